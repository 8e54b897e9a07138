"""Bad input to `shotclock exec`: every mistake named at once, exit 125 (2 with --json), and nothing ran."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from shotclock.commands.exec import parse
from tests.command_line import envelopes_in

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("no_survivors", "enveloped")]

BAD_DURATIONS = [
    "", " ", "soon", "30", "1.5", "-5s", "-5", "+5s", "nan", "inf", "-inf", "1e3s", "1e400", "0x10s", "1_000s", "1,5s",
    ".5s", "5.s", "1s1s", "30m1h", "1h 30m", "30S", "1y", "0.5ms", "P", "PT", "P1Y", "PT30", "3651d", "9" * 100,
    "1s" * 1000, "٣٠s", "３０s", b"\xff",
]  # fmt: skip


def refused(ran: Any, validate_envelope: Any, *, as_json: bool = False) -> dict[str, str]:
    """What was wrong, by field, once the refusal is as it should be."""
    assert b"Traceback" not in ran.stderr
    envelope = validate_envelope(ran.json() if as_json else ran.envelope())
    assert (ran.stderr if as_json else ran.stdout) == b""
    assert ran.code == envelope["meta"]["exit_code"] == (2 if as_json else 125)
    assert envelope["error"]["code"] == "ARG_ERROR"
    assert envelope["error"]["phase"] == "validation"
    assert envelope["error"]["retryable"] is False
    assert (envelope["meta"]["ending"], envelope["meta"]["side_effects"]) == ("not_started", "none")
    assert envelope["data"] is None
    problems = envelope["error"]["errors"]
    for problem in problems:
        assert set(problem) == {"field", "message"}
        assert problem["message"] in envelope["error"]["message"]
    return {problem["field"]: problem["message"] for problem in problems}


@pytest.fixture
def touch(tmp_path: Path) -> Any:
    """A command, and the proof that it did not run."""
    marker = tmp_path / "ran"
    yield ["touch", marker]
    assert not marker.exists()


# --- options --------------------------------------------------------------------------------------


def mistakes(*words: str) -> dict[str, str]:
    """The mistakes that the parser of `exec` finds, by field."""
    return {mistake["field"]: mistake["message"] for mistake in parse([*words, "--", "true"]).errors}


def test_a_bad_duration_is_refused_by_the_name_of_its_limit():
    for bad in BAD_DURATIONS:
        for limit in ("timeout", "soft", "idle", "grace"):
            found = mistakes(f"--{limit}", os.fsdecode(bad))
            assert set(found) == {limit} and len(found[limit]) < 200, bad


def test_every_problem_is_reported_at_once(touch: list[Any], shotclock: Any, validate_envelope: Any):
    words = [
        "--timeout", "soon", "--soft=-1s", "--idle", "5", "--grace=1s1s", "--output-limit", "lots", "--env", "NAME",
        "--env", "=value", "--cwd", "", "--bogus", "--json=perhaps", "--", *touch,
    ]  # fmt: skip
    ran = shotclock("exec", *words)
    problems = refused(ran, validate_envelope, as_json=True)
    assert set(problems) == {"timeout", "soft", "idle", "grace", "output-limit", "env", "cwd", "--bogus", "json"}
    assert len(ran.json()["error"]["errors"]) == 10


def test_an_unknown_option_is_refused_with_the_one_that_was_probably_meant():
    for written, meant in {
        "--timout": "--timeout",
        "--time-out=5s": "--timeout",
        "--JSON": None,
        "--jsn": "--json",
        "--output_limit": "--output-limit",
        "--leave-childern": "--leave-children",
        "--xyzzy": None,
        "-t": None,
        "-json": "--json",
        "---json": "--json",
        "--=": None,
        "--é": None,
    }.items():
        [(field, message)] = mistakes(written).items()
        assert field == written.partition("=")[0] and "unknown option" in message
        assert meant is None or f"did you mean {meant}?" in message


@pytest.mark.parametrize("value", [[], ["5s"]], ids=["alone", "with a value"])
def test_what_follows_an_unknown_option_is_still_heard(
    value: list[str], touch: list[Any], shotclock: Any, validate_envelope: Any
):
    """The answer must be where it was asked to be, and what looks like a value is not the command."""
    ran = shotclock("exec", "--timout", *value, "--json", "--idle=soon", "--", *touch)
    assert set(refused(ran, validate_envelope, as_json=True)) == {"--timout", "idle"}


def test_an_option_without_its_value_is_refused():
    for option in ("timeout", "soft", "idle", "grace", "cwd", "env", "output-limit", "report"):
        for words in ([f"--{option}", "--", "true"], [f"--{option}"], [f"--{option}", "--json", "--", "true"]):
            found = {mistake["field"]: mistake["message"] for mistake in parse(words).errors}
            assert found.pop(option) == f"--{option} needs a value"
            assert set(found) <= {"command"}


def test_values_that_make_no_sense_are_refused_by_the_name_of_their_option():
    for option in ("json", "stdin", "no-stdin", "leave-children"):
        assert set(mistakes(f"--{option}=perhaps")) == {option}
    for limit in ("", "lots", "-1", "1.5k", "1e3", "1G", "k", "٥", "5 k", "1025M", "9" * 30, "0x10", "+5"):
        assert set(mistakes(f"--output-limit={limit}")) == {"output-limit"}, limit
    for variable in ("NAME", "", "=", "=value"):
        assert set(mistakes("--env", variable)) == {"env"}, variable
    for limits in (["--soft", "5s", "--timeout", "5s"], ["--soft=6s", "--timeout=5s"], ["--soft", "10m"]):
        assert set(mistakes(*limits)) == {"soft"}, limits


def test_without_a_timeout_any_soft_clock_may_ring(shotclock: Any):
    assert shotclock("exec", "--timeout", "0", "--soft", "20m", "--", "true").code == 0


# --- commands -------------------------------------------------------------------------------------


def test_without_a_command_nothing_can_be_run():
    for words in ([], ["--"], ["--timeout", "5s"], ["--timeout", "5s", "--"], ["--", ""], [""]):
        assert {mistake["field"] for mistake in parse(words).errors} == {"command"}, words


def called(words: list[str], tmp_path: Path, env: dict[str, str] | None = None) -> Any:
    """`main()` called with words that no command line can carry, in a process of its own."""
    from tests.conftest import Ran

    (tmp_path / "words").write_text(json.dumps(words))
    program = (
        "import json, sys\n"
        "from shotclock.main import main\n"
        f"sys.exit(main(json.load(open({str(tmp_path / 'words')!r}))))"
    )
    with open(tmp_path / "out", "wb") as out, open(tmp_path / "err", "wb") as err:
        ran = subprocess.run(
            [sys.executable, "-c", program], stdin=subprocess.DEVNULL, stdout=out, stderr=err, timeout=30, env=env
        )
    return Ran(ran.returncode, (tmp_path / "out").read_bytes(), (tmp_path / "err").read_bytes(), 0.0)


def test_text_that_no_program_can_be_given_is_refused():
    # No operating system takes either in a string: the first ends it, the second has no bytes.
    for text in ("a\0b", "a\ud800b"):
        for words, field in (
            (["--", text], "command[0]"),
            (["--", "touch", text], "command[1]"),
            (["--env", f"NAME={text}", "--", "true"], "env"),
            (["--env", f"{text}=1", "--", "true"], "env"),
            (["--cwd", text, "--", "true"], "cwd"),
        ):
            assert {mistake["field"] for mistake in parse(words).errors} == {field}, words


@pytest.mark.parametrize("form", [[], ["--json"]], ids=["passthrough", "json"])
@pytest.mark.parametrize("words", [["x" * 200_000], ["x" * 100] * 100_000], ids=["one long word", "many words"])
def test_more_words_than_a_program_can_be_given_are_refused(
    words: list[str], form: list[str], tmp_path: Path, touch: list[Any], validate_envelope: Any
):
    ran = called(["exec", *form, "--", "touch", str(touch[1]), *words], tmp_path)
    problems = refused(ran, validate_envelope, as_json=bool(form))
    assert set(problems) == {"command"}
    assert "too long" in problems["command"]
    assert len(ran.stdout + ran.stderr) < 10_000, "the words themselves are not repeated"


def test_a_variable_without_a_name_in_our_own_environment_harms_nobody(start: Any):
    """Some programs leave such things behind (`=C:=…`). It is not the command's fault, nor its exit code."""
    running = start("exec", "--", "true", before=["env", "=nameless=1"])
    assert running.ends() == 0, running.stderr
    assert b"Traceback" not in running.stderr


# --- help -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "words", [["--help"], ["-h"], ["--timeout", "5s", "--help"], ["--help", "--", "true"]], ids=str
)
def test_help_goes_to_stdout_also_where_it_is_no_terminal(words: list[str], shotclock: Any):
    ran = shotclock("exec", *words)
    assert (ran.code, ran.stderr) == (0, b"")
    assert ran.stdout.startswith(b"Usage: shotclock exec")
    assert envelopes_in(ran.stdout) == []


def test_help_names_every_option(shotclock: Any):
    text = shotclock("exec", "--help").stdout.decode()
    for option in "timeout soft idle grace cwd env stdin leave-children json format output-limit help".split():
        assert f"--{option}" in text


def test_help_after_the_dashes_is_the_commands(shotclock: Any):
    assert shotclock("exec", "--", "printf", "%s", "--help").stdout == b"--help"


@pytest.mark.parametrize("env", [{}, {"PYTHONIOENCODING": "ascii"}, {"PYTHONIOENCODING": "latin-1"}], ids=str)
def test_on_a_terminal_help_goes_to_stdout_whatever_the_terminal_can_show(env: dict[str, str], on_terminal: Any):
    seen = on_terminal("exec", "--help", streams=("stdout",), env=env)
    assert seen.code == 0
    assert seen.screen.startswith("Usage: shotclock exec") and "Examples:" in seen.screen
    assert seen.stderr == b""


# --- on a terminal --------------------------------------------------------------------------------

LINE = {"SHOTCLOCK_REPORT": "line"}


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (
            ["--timeout", "300ms", "--grace", "0", "--", "sleep", "300"],
            124,
            "shotclock: TIMEOUT: stopped after 300ms, the limit of --timeout",
        ),
        (["--", "no-such-command-here"], 127, "shotclock: COMMAND_NOT_FOUND: 'no-such-command-here' was not found"),
        (["--timeout", "soon", "--", "true"], 125, "shotclock: ARG_ERROR: timeout: 'soon' is not a duration"),
    ],
    ids=["timeout", "not found", "bad option"],
)
def test_on_a_terminal_a_failure_is_one_readable_line(words: list[str], code: int, said: str, on_terminal: Any):
    seen = on_terminal("exec", *words, streams=("stderr",), env=LINE)
    assert seen.code == code
    [line] = seen.screen.splitlines()
    assert line.startswith(said)
    assert '"ok"' not in line


def test_on_a_terminal_warnings_are_shown_as_well(on_terminal: Any):
    seen = on_terminal("exec", "--", "sh", "-c", "sleep 300 &", streams=("stdout", "stderr"), env=LINE)
    assert "DESCENDANTS_STOPPED" in seen.screen and "sleep 300" in seen.screen


def test_a_command_keeps_the_terminal_it_writes_to(on_terminal: Any):
    seen = on_terminal("exec", "--", "sh", "-c", "test -t 1 && test -t 2 && echo yes", streams=("stdout", "stderr"))
    assert seen.screen.startswith("yes\n")


def test_json_that_was_asked_for_is_json_on_a_terminal_too(on_terminal: Any, validate_envelope: Any):
    seen = on_terminal("exec", "--json", "--", "echo", "x", streams=("stdout", "stderr"))
    [envelope] = envelopes_in(seen.screen.encode())
    assert validate_envelope(envelope)["data"]["stdout"] == "x\n"


# --- anything at all ------------------------------------------------------------------------------

OPTIONS = (
    "--timeout --soft --idle --grace --cwd --env --output-limit --json --stdin --leave-children -h -x -- -".split()
)
VALUES = ["0", "1ms", "5s", "PT5S", "soon", "-1s", "", "/", "/missing", "A=B", "=", "64k", "-1", "é", b"\xff\xfe"]
COMMANDS = ["true", "false", "missing", "", "--"]
odd_text = st.text(st.characters(exclude_categories=("Cs",), exclude_characters="\0/"), max_size=8)
some_words = st.lists(
    st.sampled_from(OPTIONS)
    | st.sampled_from(VALUES)
    | st.builds("{}={}".format, st.sampled_from(OPTIONS), st.sampled_from([v for v in VALUES if isinstance(v, str)]))
    | odd_text,
    max_size=6,
)
OF_THE_CONTRACT = {0, 1, 2, 4, 5, 7, 10}
PASSED_THROUGH = {0, 1, 124, 125, 126, 127}


@settings(
    max_examples=30,
    deadline=None,
    # Each call makes its own folder, and the survivors are counted once, after all of them.
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(words=some_words, command=st.lists(st.sampled_from(COMMANDS), max_size=2))
@example(words=["--timeout", "--json"], command=["--", "true"])
@example(words=["--env", "SHOTCLOCK_REMAINING_MS=0"], command=["true"])
@example(words=["-", "--json"], command=[])
def test_whatever_words_are_given_there_is_one_valid_envelope_and_a_known_exit_code(
    words: list[str | bytes],
    command: list[str],
    tmp_path_factory: pytest.TempPathFactory,
    shotclock: Any,
    validate_envelope: Any,
):
    programs = tmp_path_factory.getbasetemp() / "harmless programs"
    if not programs.exists():
        programs.mkdir()
        for name in ("true", "false"):
            (programs / name).symlink_to(f"/bin/{name}")
    ran = shotclock("exec", *words, *command, env={"PATH": str(programs)}, cwd=programs)
    assert ran.code in (OF_THE_CONTRACT if ran.stdout else PASSED_THROUGH)
    assert b"Traceback" not in ran.stderr
    if ran.stdout.startswith(b"Usage:"):
        assert (ran.code, ran.stderr) == (0, b"")
        return
    [envelope] = envelopes_in(ran.stdout) + envelopes_in(ran.stderr)
    validate_envelope(envelope)
    assert envelope["meta"]["exit_code"] == ran.code
    if ran.stdout:
        assert ran.stderr == b""
    assert (envelope["meta"]["ending"] == "not_started") == (
        ran.code in {2, 4, 5, 7, 125, 126, 127} or "NO_TIME" in str(envelope["error"])
    )


def test_a_directory_on_stdin_ends_the_interpreter_before_anything_runs(tmp_path: Path) -> None:
    directory = os.open(tmp_path, os.O_RDONLY)
    try:
        ended = subprocess.run(
            [sys.executable, "-m", "shotclock", "exec", "--", "touch", str(tmp_path / "ran")],
            stdin=directory,
            capture_output=True,
            timeout=60,
        )
    finally:
        os.close(directory)
    assert ended.returncode == 1 and b"is a directory" in ended.stderr and not (tmp_path / "ran").exists()
