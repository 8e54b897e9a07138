"""Commands: what they get, what is kept of their output, and how they are asked before they are killed."""

import asyncio
import base64
import itertools
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shotclock import Clocks, Envelope, Runtime
from shotclock.supervise.command_task import SPILL_CAP, Capture
from tests.calls import work
from tests.calls.bounds import ROOT, WrongFoot, eventually, mark_of, marked, on_time, run, soon
from tests.rows import corners

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("no_survivors", "home")]

Validate = Callable[[dict[str, Any]], dict[str, Any]]
Run = Callable[..., dict[str, Any]]

SOON = Clocks.of("10s")


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where output is spilled to, away from the user's own."""
    monkeypatch.setenv("SHOTCLOCK_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture(params=corners(["run", "run-again", "exec"], "run-again", "exec"))
def surface(request: pytest.FixtureRequest, shotclock: Any, validate_envelope: Validate) -> Run:
    """The same command through the library, under a fresh supervisor and under one that has run another before, and
    through `shotclock exec --json`."""

    def by_library(*argv: str, timeout: str = "10s", grace: str = "5s", **options: Any) -> dict[str, Any]:
        async def scenario() -> dict[str, Any]:
            async with Runtime() as runtime:
                if request.param == "run-again":
                    assert (await runtime.run(["true"], SOON)).ok
                return (await runtime.run(argv, Clocks.of(timeout, grace=grace), **options)).to_dict()

        return validate_envelope(run(scenario()))

    def by_command_line(
        *argv: str,
        timeout: str = "10s",
        grace: str = "5s",
        env: dict[str, str] | None = None,
        cwd: Any = None,
        output_limit: int | None = None,
    ) -> dict[str, Any]:
        words = ["--timeout", timeout, "--grace", grace]
        words += [word for name, value in (env or {}).items() for word in ("--env", f"{name}={value}")]
        words += ["--cwd", str(cwd)] if cwd is not None else []
        words += ["--output-limit", str(output_limit)] if output_limit is not None else []
        ran = shotclock("exec", "--json", *words, "--", *argv)
        envelope = validate_envelope(ran.json())
        assert ran.code == envelope["meta"]["exit_code"]
        return envelope

    return by_command_line if request.param == "exec" else by_library


def warnings_of(envelope: dict[str, Any]) -> list[str]:
    return [warning["code"] for warning in envelope["warnings"]]


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


# --- output -----------------------------------------------------------------------------------------


def test_output_within_the_limit_is_kept_whole_and_no_file_is_written(surface: Run, home: Path) -> None:
    envelope = surface("sh", "-c", "printf 12345678; printf abcd >&2", output_limit=8)
    assert (envelope["data"]["stdout"], envelope["data"]["stderr"]) == ("12345678", "abcd")
    assert envelope["warnings"] == []
    assert "stdout_file" not in envelope["data"]
    assert not home.exists()


def test_of_more_output_head_and_tail_are_kept_the_file_has_it_all_and_the_gap_is_said(surface: Run) -> None:
    envelope = surface(*python("for n in range(20000): print(n)"), output_limit=1000)
    whole = "".join(f"{n}\n" for n in range(20000)).encode()
    data = envelope["data"]
    assert data["stdout_bytes"] == len(whole)
    head, gap, tail = data["stdout"].partition("\n[…")
    assert gap
    assert whole.startswith(head.encode()) and len(head) == 500
    tail = tail.partition("…]\n")[2]
    assert whole.endswith(tail.encode()) and len(tail) == 500
    assert f"{len(whole) - 1000} bytes" in data["stdout"]
    assert warnings_of(envelope) == ["OUTPUT_TRUNCATED"]
    assert Path(data["stdout_file"]).read_bytes() == whole
    assert Path(data["stdout_file"]).stat().st_mode & 0o077 == 0, "output may hold secrets"


def test_past_its_cap_the_file_ends_and_that_is_said() -> None:
    async def scenario() -> Envelope:
        async with Runtime() as runtime:
            argv = ["head", "-c", str(SPILL_CAP + 1_000_000), "/dev/zero"]
            return await runtime.run(argv, Clocks.of("15s"), output_limit=1000)

    envelope = run(scenario())
    assert envelope.ok
    assert envelope.data["stdout_bytes"] == SPILL_CAP + 1_000_000
    assert Path(envelope.data["stdout_file"]).stat().st_size == SPILL_CAP
    assert f"the first {SPILL_CAP}" in envelope.warnings[0]["message"]
    Path(envelope.data["stdout_file"]).unlink()


def test_where_no_file_can_be_written_head_and_tail_are_still_kept(
    surface: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a file").touch()
    monkeypatch.setenv("SHOTCLOCK_HOME", str(tmp_path / "a file" / "below"))
    envelope = surface(*python("print('x' * 5000)"), output_limit=100)
    assert envelope["ok"]
    assert warnings_of(envelope) == ["OUTPUT_TRUNCATED"]
    assert envelope["data"]["stdout_file"] is None
    assert envelope["data"]["stdout"].startswith("x" * 50)


def test_however_output_is_cut_into_reads_the_same_bytes_are_kept(tmp_path: Path) -> None:
    cuts = [[1], [1, 1, 1], [9], [10], [11], [4, 7], [5, 5, 1], [3] * 20, [1000], [2, 999, 4]]
    for number, (limit, sizes) in enumerate(itertools.product([0, 1, 2, 10], cuts)):
        whole = bytes(index % 251 for index in range(sum(sizes)))
        capture = Capture(limit, str(tmp_path / "output" / f"spill{number}"))
        at = 0
        for size in sizes:
            capture.add(whole[at : at + size])
            at += size
        kept = capture.finish()
        assert kept.total == len(whole)
        assert kept.truncated == (len(whole) > limit)
        if kept.truncated:
            assert len(kept.head) + len(kept.tail) == limit
            assert whole.startswith(kept.head) and whole.endswith(kept.tail)
            assert kept.file is not None and Path(kept.file).read_bytes() == whole
        else:
            assert kept.head + kept.tail == whole
            assert kept.file is None


def test_output_that_is_not_utf8_arrives_exactly_in_base64(surface: Run) -> None:
    every_byte = bytes(range(256)) * 3
    envelope = surface(*python("import sys; sys.stdout.buffer.write(bytes(range(256)) * 3)"))
    assert base64.b64decode(envelope["data"]["stdout_base64"]) == every_byte
    assert "stderr_base64" not in envelope["data"]
    assert warnings_of(envelope) == ["OUTPUT_NOT_UTF8"]
    assert "\ufffd" in envelope["data"]["stdout"]


def test_of_truncated_output_that_is_not_utf8_head_and_tail_arrive_exactly(surface: Run) -> None:
    code = r"import sys; sys.stdout.buffer.write(b'\xff\xfe' * 50 + b'm' * 1000 + b'\xfd\xfc' * 50)"
    envelope = surface(*python(code), output_limit=200)
    assert base64.b64decode(envelope["data"]["stdout_base64"]) == b"\xff\xfe" * 50 + b"\xfd\xfc" * 50
    assert sorted(warnings_of(envelope)) == ["OUTPUT_NOT_UTF8", "OUTPUT_TRUNCATED"]


@pytest.mark.parametrize("character", ["é", "€", "😀"])
def test_a_cut_in_the_middle_of_a_character_is_not_taken_for_broken_text(character: str) -> None:
    async def scenario() -> list[Envelope]:
        async with Runtime() as runtime:
            argv = python(f"print('{character}' * 500, end='')")
            return [await runtime.run(argv, SOON, output_limit=limit) for limit in (100, 101, 102, 103)]

    for envelope in run(scenario()):
        assert warnings_of(envelope.to_dict()) == ["OUTPUT_TRUNCATED"]
        assert set(envelope.data["stdout"].partition("\n[…")[0]) == {character}


def test_a_flood_of_output_does_not_grow_our_memory(tmp_path: Path) -> None:
    """Measured by the kernel, over the process and everything it waited for, its supervisor included."""

    def peak_mb(*words: str) -> float:
        with open(tmp_path / "out", "wb") as out:
            argv = [sys.executable, "-m", "shotclock", "exec", "--json", "--timeout", "1s", "--grace", "0", *words]
            process = subprocess.Popen(argv, stdout=out, stderr=subprocess.DEVNULL, stdin=subprocess.DEVNULL)
            _, _, usage = os.wait4(process.pid, 0)  # bounded by --timeout, and by pytest's own
            process.returncode = 0
        return usage.ru_maxrss / 1024

    quiet = peak_mb("--", "true")
    flood = peak_mb("--", "yes", "a line of output that never ends")
    envelope = json.loads((tmp_path / "out").read_bytes())
    assert envelope["error"]["code"] == "TIMEOUT"
    assert envelope["data"]["stdout_bytes"] > 20_000_000, "that was no flood"
    Path(envelope["data"]["stdout_file"]).unlink()
    limit_mb = 1
    assert flood <= quiet + limit_mb + 20


# --- what the command gets --------------------------------------------------------------------------


def test_stdin_is_closed_unless_asked_for(surface: Run) -> None:
    envelope = surface("sh", "-c", "cat; echo end")
    assert envelope["data"]["stdout"] == "end\n"
    assert envelope["meta"]["duration_ms"] < 5000


def test_the_environment_is_quiet_and_knows_the_remaining_time(surface: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PAGER", raising=False)  # where `exec` would keep it
    monkeypatch.setenv("KEPT", "as it was")
    code = "import json, os; print(json.dumps(dict(os.environ)))"
    variables = json.loads(surface(*python(code), timeout="8s", env={"MORE": "a b"})["data"]["stdout"])
    expected = {"NO_COLOR": "1", "PAGER": "cat", "GIT_TERMINAL_PROMPT": "0", "KEPT": "as it was", "MORE": "a b"}
    assert expected.items() <= variables.items()
    assert 0 < int(variables["SHOTCLOCK_REMAINING_MS"]) <= 8000


def test_what_the_caller_sets_wins_over_the_quiet_defaults_but_not_over_the_clock(surface: Run) -> None:
    chosen = {"PAGER": "more", "SHOTCLOCK_REMAINING_MS": "99999999"}
    envelope = surface("sh", "-c", "echo $PAGER $SHOTCLOCK_REMAINING_MS", timeout="8s", env=chosen)
    pager, remaining = envelope["data"]["stdout"].split()
    assert pager == "more"
    assert int(remaining) <= 8000


def test_a_command_without_a_deadline_is_told_of_none(surface: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SHOTCLOCK_REMAINING_MS", raising=False)
    envelope = surface("sh", "-c", "echo [$SHOTCLOCK_REMAINING_MS$SHOTCLOCK_DEADLINE_NS]", timeout="0")
    assert envelope["data"]["stdout"] == "[]\n"
    assert envelope["meta"]["timeout_ms"] == 0


def test_the_remaining_time_shrinks_from_one_shotclock_to_the_next_below_it(shotclock: Any) -> None:
    show = "echo $SHOTCLOCK_REMAINING_MS"
    again = f"{sys.executable} -m shotclock exec --timeout 60s --"
    nested = f"{show}; sleep 0.2; {again} sh -c '{show}; {again} sh -c \"echo \\$SHOTCLOCK_REMAINING_MS\"'"
    ran = shotclock("exec", "--json", "--timeout", "20s", "--", "sh", "-c", nested)
    first, second, third = map(int, ran.json()["data"]["stdout"].split())
    assert first <= 20000
    assert second <= first - 200 - 500, "what has passed, and the reserve that the outer one keeps"
    assert third <= second - 500


def test_a_command_runs_where_it_is_told_to(surface: Run, tmp_path: Path) -> None:
    assert surface("pwd", cwd=tmp_path)["data"]["stdout"] == f"{tmp_path.resolve()}\n"


def test_nothing_of_ours_is_open_in_the_command(surface: Run) -> None:
    code = "import os; print([fd for fd in range(200) if os.path.exists(f'/proc/self/fd/{fd}')])"
    assert surface(*python(code))["data"]["stdout"] == "[0, 1, 2]\n"


def test_signals_have_their_default_meaning_in_the_command(surface: Run) -> None:
    code = "import signal; print([n for n in range(1, 32) if signal.getsignal(n) is signal.SIG_IGN])"
    # Python itself ignores SIGPIPE and SIGXFSZ when it starts.
    assert json.loads(surface(*python(code))["data"]["stdout"]) == [signal.SIGPIPE, signal.SIGXFSZ]
    read_one = "yes | head -1"
    assert surface("bash", "-c", f"{read_one}; echo ${{PIPESTATUS[0]}}")["data"]["stdout"] == "y\n141\n"


# --- commands that fail, or never start -----------------------------------------------------------------


def test_a_failing_command_is_told_with_its_own_exit_code_and_output(surface: Run) -> None:
    envelope = surface("sh", "-c", "echo out; echo err >&2; exit 7")
    assert (envelope["error"]["code"], envelope["meta"]["exit_code"]) == ("COMMAND_FAILED", 1)
    assert envelope["meta"]["ending"] == "finished"
    assert envelope["data"] == {"stdout": "out\n", "stderr": "err\n", "exit_code": 7}


def test_a_command_ended_by_a_signal_from_elsewhere_is_told_with_the_signal(surface: Run) -> None:
    envelope = surface("sh", "-c", "kill -KILL $$")
    assert envelope["error"]["code"] == "COMMAND_FAILED"
    assert (envelope["data"]["exit_code"], envelope["data"]["signal"]) == (137, "SIGKILL")


@pytest.fixture
def odd_files(tmp_path: Path) -> Path:
    (tmp_path / "text").write_text("no program\n")
    (tmp_path / "text").chmod(0o644)
    (tmp_path / "script").write_text("#!/no/such/interpreter\n")
    (tmp_path / "script").chmod(0o755)
    return tmp_path


@pytest.mark.parametrize(
    ("word", "code", "exit_code"),
    [
        ("no-such-command-anywhere", "COMMAND_NOT_FOUND", 5),
        ("{}/missing", "COMMAND_NOT_FOUND", 5),
        ("{}/text/below", "COMMAND_NOT_FOUND", 5),
        ("{}/script", "COMMAND_NOT_FOUND", 5),
        ("{}/text", "COMMAND_NOT_EXECUTABLE", 7),
        ("{}", "COMMAND_NOT_EXECUTABLE", 7),
    ],
)
def test_a_command_that_cannot_be_started_says_why(
    word: str, code: str, exit_code: int, surface: Run, odd_files: Path
) -> None:
    envelope = surface(word.format(odd_files))
    assert (envelope["error"]["code"], envelope["meta"]["exit_code"]) == (code, exit_code)
    assert envelope["meta"]["ending"] == "not_started"
    assert envelope["meta"]["side_effects"] == "none"
    assert envelope["error"]["phase"] == "validation"


@pytest.mark.parametrize("where", ["missing", "text"])
def test_a_working_directory_that_cannot_be_entered_is_told_as_such(where: str, surface: Run, odd_files: Path) -> None:
    envelope = surface("true", cwd=odd_files / where)
    assert (envelope["error"]["code"], envelope["meta"]["exit_code"]) == ("CWD_UNUSABLE", 4)
    assert envelope["meta"]["ending"] == "not_started"


def test_words_that_cannot_be_passed_are_refused_all_at_once(validate_envelope: Validate) -> None:
    async def scenario() -> list[Envelope]:
        async with Runtime() as runtime:
            return [
                await runtime.run([]),
                await runtime.run([""]),
                await runtime.run(["echo", "a\0b"], env={"A=B": "1", "C": "\0"}, cwd="\0"),
            ]

    nothing, empty, several = run(scenario())
    for envelope in (nothing, empty, several):
        validate_envelope(envelope.to_dict())
        assert (envelope.code, envelope.exit_code, envelope.ending) == ("ARG_ERROR", 2, "not_started")
    assert len(several.error["errors"]) == 4


def test_arguments_too_long_for_the_kernel_are_refused() -> None:
    async def scenario() -> Envelope:
        async with Runtime() as runtime:
            return await runtime.run(["true", "x" * 4_000_000], SOON)

    envelope = run(scenario())
    assert (envelope.code, envelope.exit_code, envelope.ending) == ("ARG_ERROR", 2, "not_started")


# --- stopping ---------------------------------------------------------------------------------------------


def command(adversary: str, folder: Path) -> list[str]:
    return [sys.executable, "-m", "tests.calls.work", adversary, str(folder)]


def test_a_command_that_cleans_up_in_time_is_let_finish(surface: Run, tmp_path: Path) -> None:
    def attempt(number: int) -> dict[str, Any]:
        folder = tmp_path / str(number)
        folder.mkdir()
        timeout = f"{600 * 2**number}ms"
        envelope = surface(*command("cleans_up_when_asked", folder), timeout=timeout, grace="5s", cwd=ROOT)
        assert (envelope["error"]["code"], envelope["meta"]["ending"]) == ("TIMEOUT", "killed")
        if not (folder / "ready").exists():
            raise WrongFoot("stopped before it was ready")
        assert (folder / "cleaned").exists()
        assert envelope["data"]["exit_code"] == 1, "its own, not a signal's"
        return envelope

    on_time(attempt, beyond_ms=150)


def test_grace_shrinks_where_the_inherited_deadline_is_near(
    surface: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The caller's own bell must not ring before it has our answer."""

    def attempt(number: int) -> dict[str, Any]:
        folder = tmp_path / str(number)
        folder.mkdir()
        timeout_ms = 1000 * 2**number
        monkeypatch.setenv("SHOTCLOCK_REMAINING_MS", str(timeout_ms + 500 * 2**number))
        monkeypatch.delenv("SHOTCLOCK_DEADLINE_NS", raising=False)
        clocks = {"timeout": f"{timeout_ms}ms", "grace": "10s"}
        envelope = surface(*command("swallows_everything", folder), **clocks, cwd=ROOT)
        assert (envelope["error"]["code"], envelope["meta"]["ending"]) == ("TIMEOUT", "killed")
        if not (folder / "ready").exists():
            raise WrongFoot("stopped before it was ready")
        if envelope["meta"]["timeout_ms"] < timeout_ms:
            raise WrongFoot("less than the timeout was left when it began")
        assert envelope["meta"]["duration_ms"] >= timeout_ms
        return envelope

    on_time(attempt, beyond_ms=lambda number: 400 * 2**number)


@pytest.mark.parametrize("late_ms", [0, 2, 5, 20])
def test_a_command_stopped_just_after_it_started_does_not_lose_the_polite_stop(late_ms: int) -> None:
    """Between fork and exec the child is still our own program, and would take the signal for its own."""

    async def scenario() -> float:
        async with Runtime() as runtime:
            assert (await runtime.run(["true"], SOON)).ok
            slowest = 0.0
            loop = asyncio.get_running_loop()
            for _ in range(10):
                task = asyncio.create_task(runtime.run(["sleep", str(work.FOREVER_S)], Clocks.of("30s", grace="3s")))
                await asyncio.sleep(late_ms / 1000)
                began = loop.time()
                task.cancel()
                await asyncio.wait([task], timeout=10)
                slowest = max(slowest, loop.time() - began)
                if slowest > 2:
                    break
            return slowest

    assert run(scenario(), within=30) < 2


def test_the_soft_clock_asks_a_command_to_wind_down_and_its_end_counts(tmp_path: Path) -> None:
    async def scenario() -> tuple[Envelope, Envelope]:
        async with Runtime() as runtime:
            obeys = "trap 'echo wound down; exit 0' TERM; while :; do sleep 0.02; done"
            assert (await runtime.run(["true"], SOON)).ok  # the shell has to have set its trap before it is asked
            clocks = Clocks.of("10s", soft="700ms")
            return (await runtime.run(["sh", "-c", obeys], clocks), await runtime.run(["sleep", "9"], clocks))

    obeyed, died = run(scenario())
    assert (obeyed.code, obeyed.ending, obeyed.data["stdout"]) == (None, "finished", "wound down\n")
    assert warnings_of(obeyed.to_dict()) == ["SOFT_LIMIT"]
    assert obeyed.meta["duration_ms"] < 4500
    assert died.code == "TIMEOUT"
    assert died.error["context"]["clock"]["kind"] == "soft"


def test_a_silent_command_is_stopped_as_stalled_and_a_chatty_one_is_not() -> None:
    async def scenario() -> tuple[Envelope, Envelope]:
        async with Runtime() as runtime:
            chats = "for i in 1 2 3 4 5 6 7 8; do echo $i; sleep 0.1; done"
            clocks = Clocks.of("10s", idle="400ms", grace="1s")
            return await runtime.run(["sh", "-c", "echo first; sleep 9"], clocks), await runtime.run(
                ["sh", "-c", chats], clocks
            )

    silent, chatty = run(scenario())
    assert (silent.code, silent.exit_code, silent.ending) == ("STALLED", 10, "killed")
    assert silent.data["stdout"] == "first\n"
    assert 400 <= silent.meta["duration_ms"] < 2000
    assert chatty.ok


def test_a_background_child_that_ends_by_itself_soon_is_waited_for_and_not_mentioned(surface: Run) -> None:
    envelope = surface("sh", "-c", "(sleep 0.1; echo late) & echo early")
    assert envelope["data"]["stdout"] == "early\nlate\n"
    assert envelope["warnings"] == []


def test_what_outlives_its_command_and_ignores_term_is_killed_and_named(surface: Run, tmp_path: Path) -> None:
    script = f"trap '' TERM; sleep {work.FOREVER_S} & echo $!"
    envelope = surface("sh", "-c", script)
    assert envelope["ok"]
    (warning,) = envelope["warnings"]
    assert warning["code"] == "DESCENDANTS_STOPPED"
    assert [process["pid"] for process in warning["context"]["processes"]] == [int(envelope["data"]["stdout"])]
    assert f"sleep {work.FOREVER_S}" in warning["message"]
    assert envelope["meta"]["duration_ms"] < 3000


@pytest.mark.parametrize("adversary", ["leaves_a_daemon", "leaves_a_grandchild_on_its_stdout"])
def test_children_that_were_asked_to_be_left_live_on(adversary: str, tmp_path: Path, shotclock: Any) -> None:
    ran = shotclock("exec", "--json", "--leave-children", "--", *command(adversary, tmp_path), cwd=ROOT)
    left = marked(tmp_path)
    for process in left.values():
        process.kill()
    eventually(lambda: not marked(tmp_path))
    envelope = ran.json()
    assert envelope["ok"] and envelope["data"]["stdout"] == "done\n"
    assert envelope["warnings"] == []
    assert set(left) == {"daemon" if adversary == "leaves_a_daemon" else "grandchild"}


@pytest.mark.parametrize(("number", "exit_code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_to_exec_stops_the_tree_and_answers_with_its_number(
    number: signal.Signals, exit_code: int, tmp_path: Path, validate_envelope: Validate
) -> None:
    folder = tmp_path / "marks"
    folder.mkdir()
    argv = [sys.executable, "-m", "shotclock", "exec", "--json", "--grace", "300ms", "--"]
    with open(tmp_path / "out", "wb") as out:
        process = subprocess.Popen([*argv, *command("daemonises", folder)], cwd=ROOT, stdout=out)
    try:
        eventually(lambda: mark_of(folder, "ready"))
        process.send_signal(number)
        assert process.wait(5) == exit_code
    finally:
        process.kill()
        process.wait(5)
    assert not marked(folder)
    envelope = validate_envelope(json.loads((tmp_path / "out").read_bytes()))
    assert (envelope["error"]["code"], envelope["meta"]["ending"]) == ("CANCELLED", "killed")
    assert envelope["error"]["context"]["signal"] == number.name


def test_a_command_on_a_runtime_that_another_task_cancels_leaves_the_others_alone(tmp_path: Path) -> None:
    async def scenario() -> Envelope:
        async with Runtime() as runtime:
            staying = asyncio.create_task(runtime.run(["sh", "-c", "sleep 0.5; echo stayed"], SOON))
            going = asyncio.create_task(runtime.run(command("sleeps", tmp_path), SOON, cwd=ROOT))
            await soon(lambda: mark_of(tmp_path, "ready"))
            going.cancel()
            await asyncio.wait([going], timeout=5)
            assert going.cancelled() and not marked(tmp_path)
            return await staying

    assert run(scenario()).data["stdout"] == "stayed\n"
