"""`shotclock exec`: what the command gets, what comes back, byte for byte, and what is left behind."""

import base64
import os
import pty
import select
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.command_line import SHOTCLOCK, envelopes_in, is_alive, read_slowly, wait_for, warning_codes

pytestmark = pytest.mark.usefixtures("no_survivors", "enveloped")

# Left alone, the command writes to our own descriptors; with an idle clock its output goes through our hands.
INHERITED: list[str] = []
RELAYED = ["--idle", "20s"]
both_ways = pytest.mark.parametrize("way", [INHERITED, RELAYED], ids=["inherited", "relayed"])

BINARY = bytes(range(256)) + b"\0\0\r\n\r\xff\xfe\n\x1b[31m" + "é€😀".encode() + b"\xf0\x9f no newline at the end"


@pytest.fixture
def blob(tmp_path: Path) -> Path:
    path = tmp_path / "blob"
    path.write_bytes(BINARY)
    return path


# --- passthrough ----------------------------------------------------------------------------------


@both_ways
def test_stdout_passes_through_byte_for_byte_with_nothing_of_ours_in_it(
    way: list[str], blob: Path, shotclock: Any, validate_envelope: Any
):
    ran = shotclock("exec", *way, "--", "cat", blob)
    assert ran.stdout == BINARY
    assert ran.code == 0
    assert len(ran.stderr.splitlines()) == 1
    assert validate_envelope(ran.envelope())["ok"]


@both_ways
@pytest.mark.parametrize("ending", [b"", b"\n"], ids=["open last line", "closed last line"])
def test_stderr_passes_through_byte_for_byte_and_the_envelope_is_its_last_line(
    way: list[str], ending: bytes, blob: Path, shotclock: Any, validate_envelope: Any
):
    blob.write_bytes(BINARY + ending)
    ran = shotclock("exec", *way, "--", "sh", "-c", f"cat {blob} >&2")
    before, _, line = ran.stderr.removesuffix(b"\n").rpartition(b"\n")
    assert before + b"\n" == BINARY + b"\n", "untouched, plus at most the line end the envelope needs"
    validate_envelope(ran.envelope())
    assert envelopes_in(line)
    assert ran.stdout == b""


def test_both_streams_keep_their_order_when_they_go_to_one_place(shotclock: Any):
    ran = shotclock(
        "exec", "--", "sh", "-c", "echo one; echo two >&2; echo three; echo four >&2", stderr_to_stdout=True
    )
    assert ran.stdout.splitlines()[:4] == [b"one", b"two", b"three", b"four"]
    assert len(envelopes_in(ran.stdout)) == 1


@pytest.mark.slow
def test_the_commands_exit_code_is_ours_and_the_envelopes(shotclock: Any, validate_envelope: Any):
    for code in (0, 1, 2, 10, 124, 137, 255):
        ran = shotclock("exec", "--", "sh", "-c", f"exit {code}")
        envelope = validate_envelope(ran.envelope())
        assert ran.code == envelope["meta"]["exit_code"] == envelope["data"]["exit_code"] == code
        assert ran.stdout == b""
        assert envelope["meta"]["ending"] == "finished"
        if code:
            assert envelope["error"]["code"] == "COMMAND_FAILED"
            assert envelope["error"]["retryable"] is False


def test_a_command_ended_by_a_signal_gives_128_plus_its_number(shotclock: Any, validate_envelope: Any):
    for number in (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGSEGV, signal.SIGPIPE):
        ran = shotclock("exec", "--", "sh", "-c", f"ulimit -c 0; kill -{int(number)} $$")
        envelope = validate_envelope(ran.envelope())
        assert envelope["meta"]["exit_code"] == 128 + number
        # Ctrl-C ends a shell's loop only if it ends us as well.
        assert ran.code == (-number if number == signal.SIGINT else 128 + number)
        assert envelope["data"] == {"exit_code": 128 + number, "signal": number.name}
        assert number.name in envelope["error"]["message"]


def test_words_that_are_not_utf8_reach_the_command_as_they_are(shotclock: Any):
    assert shotclock("exec", "--", "printf", "%s", b"\xff\xfe\x80").stdout == b"\xff\xfe\x80"


def test_everything_after_the_dashes_belongs_to_the_command(shotclock: Any):
    ran = shotclock("exec", "--", "echo", "--json", "--timeout", "--", "-h")
    assert ran.stdout == b"--json --timeout -- -h\n"


def test_the_first_word_that_is_no_option_begins_the_command(shotclock: Any):
    assert shotclock("exec", "--timeout=5s", "echo", "--json").stdout == b"--json\n"


def test_the_pipe_that_carries_our_output_is_closed_when_we_are_gone(no_survivors: Any):
    """A descriptor left open in a supervisor or a leaked child would keep whoever reads to the end waiting."""
    ran = subprocess.run(
        [*SHOTCLOCK, "exec", "--", "sh", "-c", "sleep 300 & echo done"], capture_output=True, timeout=20, check=True
    )
    assert ran.stdout == b"done\n"


# --- --json ---------------------------------------------------------------------------------------


def test_the_envelope_is_alone_on_stdout_in_one_line_with_the_output_inside(shotclock: Any, validate_envelope: Any):
    ran = shotclock("exec", "--json", "--", "sh", "-c", "echo out é; echo err >&2")
    assert ran.stdout.endswith(b"}\n") and ran.stdout.count(b"\n") == 1
    assert ran.stderr == b""
    envelope = validate_envelope(ran.json())
    assert envelope["data"] == {"stdout": "out é\n", "stderr": "err\n", "exit_code": 0}
    assert envelope["meta"]["side_effects"] == "complete"
    assert ran.code == 0


def test_text_with_nuls_and_control_characters_is_text(tmp_path: Path, shotclock: Any, validate_envelope: Any):
    text = "a\0b\r\n\x1b[31m\u2028€😀"
    (tmp_path / "text").write_bytes(text.encode())
    envelope = validate_envelope(shotclock("exec", "--json", "--", "cat", tmp_path / "text").json())
    assert envelope["data"]["stdout"] == text
    assert envelope["warnings"] == []


# --- commands that cannot be started --------------------------------------------------------------


def refused(ran: Any, json: bool, validate_envelope: Any) -> dict[str, Any]:
    """The envelope of a run in which nothing was started."""
    assert b"Traceback" not in ran.stderr
    envelope: dict[str, Any] = validate_envelope(ran.json() if json else ran.envelope())
    assert (ran.stderr if json else ran.stdout) == b""
    assert ran.code == envelope["meta"]["exit_code"]
    assert envelope["meta"]["ending"] == "not_started"
    assert envelope["meta"]["side_effects"] == "none"
    assert envelope["error"]["phase"] == "validation"
    return envelope


in_both_forms = pytest.mark.parametrize("json", [False, True], ids=["passthrough", "json"])


@in_both_forms
def test_a_command_that_is_not_there_exits_127(json: bool, tmp_path: Path, shotclock: Any, validate_envelope: Any):
    (tmp_path / "plain").write_text("")
    for command in ("no-such-command-here", "./missing", "/no/such/place", "plain/inside-a-file", b"\xff"):
        ran = shotclock("exec", *["--json"] * json, "--", command, cwd=tmp_path)
        assert refused(ran, json, validate_envelope)["error"]["code"] == "COMMAND_NOT_FOUND"
        assert ran.code == (5 if json else 127)


@in_both_forms
@pytest.mark.parametrize("kind", ["plain file", "directory", "not a program", "on PATH"])
def test_a_file_that_cannot_be_executed_exits_126(
    kind: str, json: bool, tmp_path: Path, shotclock: Any, validate_envelope: Any
):
    target = tmp_path / "target"
    if kind == "directory":
        target.mkdir()
    else:
        target.write_bytes(b"\0\1\2\3 neither script nor binary")
        target.chmod(0o755 if kind == "not a program" else 0o644)
    command = "target" if kind == "on PATH" else target
    ran = shotclock("exec", *["--json"] * json, "--", command, env={"PATH": f"{tmp_path}:/nowhere"})
    assert refused(ran, json, validate_envelope)["error"]["code"] == "COMMAND_NOT_EXECUTABLE"
    assert ran.code == (7 if json else 126)


@pytest.mark.parametrize("is_on_path", [False, True])
def test_a_script_without_an_interpreter_is_run_by_sh(is_on_path: bool, tmp_path: Path, shotclock: Any):
    script = tmp_path / "script"
    script.write_text('echo "$0 $1"; exit 3\n')
    script.chmod(0o755)
    command = "script" if is_on_path else script
    ran = shotclock("exec", "--", command, "word", env={"PATH": f"{tmp_path}:{os.environ['PATH']}"})
    assert (ran.code, ran.stdout) == (3, f"{script} word\n".encode())


@in_both_forms
@pytest.mark.parametrize("kind", ["missing", "a file", "unreadable", "below a file"])
def test_a_directory_that_cannot_be_entered_exits_125_and_nothing_runs(
    kind: str, json: bool, tmp_path: Path, shotclock: Any, validate_envelope: Any
):
    folder = tmp_path / "folder"
    if kind == "a file":
        folder.write_text("")
    elif kind == "below a file":
        folder.write_text("")
        folder /= "inside"
    elif kind == "unreadable":
        if os.geteuid() == 0:
            pytest.skip("root enters every directory")
        folder.mkdir(mode=0)
    ran = shotclock("exec", *["--json"] * json, "--cwd", folder, "--", "touch", tmp_path / "ran")
    envelope = refused(ran, json, validate_envelope)
    assert (ran.code, envelope["error"]["code"]) == (4 if json else 125, "CWD_UNUSABLE")
    assert str(folder) in envelope["error"]["message"]
    assert not (tmp_path / "ran").exists()


def test_the_directory_is_the_commands_and_relative_commands_are_found_from_there(tmp_path: Path, shotclock: Any):
    (tmp_path / "here").mkdir()
    script = tmp_path / "here" / "say"
    script.write_text("#!/bin/sh\npwd\n")
    script.chmod(0o755)
    ran = shotclock("exec", "--cwd", "here", "--", "./say", cwd=tmp_path)
    assert ran.stdout.decode().strip() == str(tmp_path / "here")


# --- what the command gets ------------------------------------------------------------------------


def environment_of(ran: Any) -> dict[str, str]:
    return dict(entry.split("=", 1) for entry in ran.stdout.decode().split("\0") if entry)


def test_variables_are_set_kept_and_overridden(shotclock: Any):
    given = ["--env", "ONE=1", "--env", "PAIR=a=b", "--env=EMPTY=", "--env", "ONE=2", "--env", "PAGER=less"]
    environment = environment_of(shotclock("exec", *given, "--", "env", "-0", env={"KEPT": "yes"}))
    expected = {"ONE": "2", "PAIR": "a=b", "EMPTY": "", "KEPT": "yes", "PAGER": "less"}
    assert {name: environment.get(name) for name in expected} == expected


def test_nobody_is_asked_or_painted_for_and_the_remaining_time_goes_along(shotclock: Any):
    ran = shotclock("exec", "--timeout", "30s", "--", "env", "-0", env={"PAGER": None, "NO_COLOR": None})
    environment = environment_of(ran)
    quiet = {"NO_COLOR": "1", "PAGER": "cat", "GIT_PAGER": "cat", "GIT_TERMINAL_PROMPT": "0"}
    assert {name: environment.get(name) for name in quiet} == quiet
    assert 20_000 < int(environment["SHOTCLOCK_REMAINING_MS"]) <= 30_000
    assert int(environment["SHOTCLOCK_DEADLINE_NS"]) > 0
    assert environment["TRACEPARENT"].split("-")[1] == ran.envelope()["meta"]["trace_id"]


def test_only_the_three_standard_descriptors_are_passed_on(shotclock: Any):
    for way in (INHERITED, RELAYED, ["--json"]):
        ran = shotclock(
            "exec", *way, "--", sys.executable, "-c", "import os; print(sorted(os.listdir('/proc/self/fd')))"
        )
        # The fourth is the listing's own.
        assert b"['0', '1', '2', '3']" in ran.stdout


@pytest.mark.parametrize("way", [INHERITED, [*RELAYED, "--stdin"], ["--json"]], ids=["inherited", "relayed", "json"])
@pytest.mark.parametrize("source", ["file", "pipe", "socket"])
def test_what_a_file_a_pipe_or_a_socket_holds_on_stdin_reaches_the_command(
    source: str, way: list[str], tmp_path: Path, start: Any
):
    if source == "file":
        (tmp_path / "in").write_bytes(BINARY)
        theirs = os.open(tmp_path / "in", os.O_RDONLY)
    else:
        theirs, ours = os.pipe() if source == "pipe" else [end.detach() for end in socket.socketpair()]
        os.write(ours, BINARY)
        os.close(ours)
    running = start("exec", *way, "--", "cat", stdin=theirs)
    os.close(theirs)
    assert running.ends() == 0
    got = running.stdout
    if way == ["--json"]:
        got = base64.b64decode(running.envelope()["data"]["stdout_base64"])
    assert got == BINARY


@pytest.mark.parametrize("way", [INHERITED, RELAYED], ids=["inherited", "relayed"])
def test_much_data_goes_in_and_out_through_a_pipe_unharmed(way: list[str], tmp_path: Path):
    """`cat big | shotclock exec -- gzip > x.gz` once wrote 20 bytes and ended with exit code 0."""
    big = os.urandom(1024) * 8192
    (tmp_path / "big").write_bytes(big)
    line = f"cat big | {' '.join([*SHOTCLOCK, 'exec', *way])} -- gzip -1 | gzip -d > out"
    ran = subprocess.run(["bash", "-o", "pipefail", "-c", line], cwd=tmp_path, stderr=subprocess.DEVNULL, timeout=60)
    assert ran.returncode == 0
    assert (tmp_path / "out").read_bytes() == big


def test_whoever_writes_to_stdin_is_told_as_soon_as_the_command_closes_it(start: Any):
    theirs, ours = os.pipe()
    running = start("exec", "--", "sh", "-c", "head -c 1; exec <&-; echo closed; sleep 300", stdin=theirs)
    os.close(theirs)
    os.write(ours, b"x")
    running.said(b"closed")
    poller = select.poll()
    poller.register(ours, 0)
    assert [event for _, event in poller.poll(5000)] == [select.POLLERR], "nobody but the command may hold it open"
    os.close(ours)
    running.signal(signal.SIGTERM)
    assert running.ends() == -signal.SIGTERM


@pytest.mark.parametrize("way", [[], ["--idle", "20s"], ["--json"]], ids=["inherited", "relayed", "json"])
def test_a_command_that_waits_for_input_nobody_sends_is_ended_by_its_clock(way: list[str], start: Any):
    theirs, ours = os.pipe()
    running = start("exec", *way, "--timeout", "300ms", "--", "cat", stdin=theirs)
    os.close(theirs)
    assert running.ends() == (10 if way == ["--json"] else 124)
    os.close(ours)


def test_no_stdin_gives_the_command_end_of_file_and_leaves_the_input_unread(start: Any):
    theirs, ours = os.pipe()
    os.write(ours, b"not for it")
    running = start("exec", "--no-stdin", "--", "cat", stdin=theirs)
    assert running.ends() == 0
    assert running.stdout == b""
    os.close(ours)
    assert os.read(theirs, 64) == b"not for it"
    os.close(theirs)


@pytest.mark.parametrize(
    ("option", "read"), [([], b"typed\nend\n"), (["--stdin"], b"typed\nend\n"), (["--no-stdin"], b"end\n")], ids=str
)
def test_a_terminal_on_stdin_is_the_commands_unless_it_shall_have_none(option: list[str], read: bytes, start: Any):
    ours, theirs = pty.openpty()
    os.write(ours, b"typed\n")
    running = start("exec", *option, "--", "sh", "-c", 'read -r line && echo "$line"; echo end', stdin=theirs)
    os.close(theirs)
    assert running.ends() == 0
    os.close(ours)
    assert running.stdout == read


def test_stdin_and_no_stdin_together_are_refused(shotclock: Any):
    ran = shotclock("exec", "--stdin", "--no-stdin", "--", "true")
    assert (ran.code, ran.envelope()["error"]["errors"][0]["field"]) == (125, "no-stdin")


def a_stdin_without_input(kind: str, tmp_path: Path) -> tuple[int, int]:
    """Our end to be read from, and the other end (or the same)."""
    if "socket" in kind:
        one, other = socket.socketpair()
        return one.detach(), other.detach()
    if "pipe" in kind:
        return os.pipe()
    (tmp_path / "empty").write_bytes(b"")
    fd = os.open(tmp_path / "empty" if kind == "empty file" else os.devnull, os.O_RDONLY)
    return fd, os.dup(fd)


@pytest.mark.parametrize("closed", [False, True], ids=["open", "closed"])
def test_where_no_input_was_sent_nothing_is_said_about_it(closed: bool, tmp_path: Path, start: Any):
    """Many a program that starts us gives us a pipe or a socket and never writes, or closes it at once."""
    for kind in ("null device", "empty file", "pipe", "socket"):
        theirs, ours = a_stdin_without_input(kind, tmp_path)
        if closed:
            os.close(ours)
        running = start("exec", "--", "true", stdin=theirs)
        os.close(theirs)
        assert running.ends() == 0
        if not closed:
            os.close(ours)
        assert warning_codes(running.envelope()) == []


# --- output that is too much ----------------------------------------------------------------------


@pytest.mark.parametrize("limit", ["0", "1", "7", "1000", "64k"])
def test_both_streams_are_cut_and_kept_apart(limit: str, tmp_path: Path, shotclock: Any, validate_envelope: Any):
    script = "head -c 100000 /dev/zero | tr '\\0' o; head -c 90000 /dev/zero | tr '\\0' e >&2"
    ran = shotclock(
        "exec", "--json", f"--output-limit={limit}", "--", "sh", "-c", script, env={"SHOTCLOCK_HOME": str(tmp_path)}
    )
    envelope = validate_envelope(ran.json())
    assert warning_codes(envelope) == ["OUTPUT_TRUNCATED", "OUTPUT_TRUNCATED"]
    assert Path(envelope["data"]["stdout_file"]).read_bytes() == b"o" * 100_000
    assert Path(envelope["data"]["stderr_file"]).read_bytes() == b"e" * 90_000


# --- what outlives the command --------------------------------------------------------------------

OUTLIVED = "sleep 300 & echo $!"


# A child may still write to what it holds open; one that holds nothing of the command is not waited for.
HOLDS = {
    "sleep 300 & exit 0": 300,
    "sleep 300 >/dev/null 2>&1 </dev/null & exit 0": 0,
    "sleep 300 >/dev/null </dev/null & exit 0": 300,
    "sleep 300 >elsewhere 2>&1 </dev/null & exit 0": 0,
    "setsid sleep 300 >/dev/null 2>&1 <elsewhere & exit 0": 0,
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "form", [["--report", "json"], ["--json"], ["--idle", "20s"]], ids=["inherited", "json", "relayed"]
)
def test_only_a_child_that_holds_a_stream_of_the_command_has_time_to_end(
    form: list[str], tmp_path: Path, shotclock: Any
):
    (tmp_path / "elsewhere").write_text("")
    for script, least_ms in HOLDS.items():
        ran = shotclock("exec", *form, "--", "sh", "-c", script, cwd=tmp_path)
        envelope = ran.json() if form == ["--json"] else ran.envelope()
        assert warning_codes(envelope) == ["DESCENDANTS_STOPPED"]
        took_ms = envelope["meta"]["duration_ms"]
        assert took_ms >= least_ms if least_ms else took_ms < 300, (script, took_ms)


@pytest.mark.parametrize("form", [[], ["--json"], RELAYED], ids=["inherited", "json", "relayed"])
def test_children_live_on_when_asked_to_be_left_and_nobody_waits_for_them(
    form: list[str], shotclock: Any, validate_envelope: Any
):
    ran = shotclock("exec", *form, "--leave-children", "--", "sh", "-c", OUTLIVED, timeout=10)
    envelope = validate_envelope(ran.json() if form == ["--json"] else ran.envelope())
    pid = int(envelope["data"]["stdout"] if form == ["--json"] else ran.stdout)
    try:
        assert ran.code == 0
        assert envelope["warnings"] == []
        assert is_alive(pid)
    finally:
        os.kill(pid, signal.SIGKILL)
        wait_for(lambda: not is_alive(pid), "the sleeper to be gone")


def test_the_whole_output_arrives_even_if_the_reader_is_slow_and_children_are_left(start: Any):
    theirs, ours = os.pipe()
    running = start("exec", *RELAYED, "--leave-children", "--", "head", "-c", "200000", "/dev/zero", stdout=ours)
    os.close(ours)
    # It fits into two pipes and our hands, so the command has long ended when its last output is taken.
    assert len(read_slowly(theirs, first_after_s=0.3)) == 200_000
    assert running.ends() == 0
