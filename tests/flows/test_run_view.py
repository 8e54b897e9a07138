"""What people see of a run: on a terminal while it goes on, afterwards as a report, and in the formats of others."""

import contextlib
import json
import os
import pty
import re
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as xml

import pytest

from tests.command_line import COLOUR, ESCAPES, SHOTCLOCK, SOON_S, Seen, wait_for
from tests.warm import WarmStart

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("no_survivors")]

FLOW = """\
name: view
timeout: 20s
steps:
  first: {type: command, exec: "sleep 0.4; echo one"}
  hang: {type: command, depends_on: first, timeout: 1s, grace: 0s, exec: "sleep 60"}
  behind: {type: command, depends_on: hang, exec: "true"}
"""
STUBBORN = """\
name: a-name-that-is-longer-than-the-line-of-a-terminal-would-ever-be-if-all-of-it-were-shown-there
timeout: 20s
steps:
  hang:
    exec: "trap '' TERM; while :; do sleep 60; done"
    timeout: 1s
    grace: 1s
    on_fail: {run: tidy}
  tidy: {exec: "sleep 60 & echo tidied", timeout: 10s}
  flaky:
    exec: "echo connection refused >&2; exit 1"
    timeout: 5s
    on_fail: {retry: {max: 1, backoff: {delay_ms: 900}}}
  gate: {exec: "true", timeout: 1s, approval: {ttl: 1500ms}, continue_on_failure: true}
  a-step-with-a-very-long-name-that-says-it-all-first: {exec: "true", timeout: 5s}
  a-step-with-a-very-long-name-that-says-it-all-second: {exec: "true", timeout: 5s}
"""
# A run of these files takes two or three seconds by itself, a busy machine three times that.
RUN_LIMIT_S = 30.0


@pytest.fixture
def flow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """A function that writes a workflow file. Its runs are kept in a store of the test's own."""
    monkeypatch.setenv("SHOTCLOCK_HOME", str(tmp_path / "home"))
    for name in ("NO_COLOR", "CI"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")

    def write(text: str = FLOW) -> str:
        (tmp_path / "flow.yaml").write_text(text)
        return str(tmp_path / "flow.yaml")

    return write


# --- while it runs --------------------------------------------------------------------------------


def test_on_a_terminal_each_clock_is_seen_running_down(
    flow: Callable[..., str], on_terminal: Callable[..., Seen], validate_envelope: Callable[..., Any]
) -> None:
    seen = on_terminal("run", flow(), "--run-id", "r1", streams=("stderr",), within_s=RUN_LIMIT_S)
    plain = ESCAPES.sub("", seen.screen)
    left = [float(text) for text in re.findall(r"hang\s+[━─]+ (\d+\.\d)s left", plain)]
    assert len(left) >= 4, plain
    assert left == sorted(left, reverse=True)
    assert left[0] <= 1.0
    assert re.search(r"behind\s+waits for hang", plain)
    assert re.search(r"view  1 of 3 done, 1 running  \d\.\ds  [━─]+ 1\d\.\ds left", plain)
    assert "\x1b[?25l" not in seen.screen, "a killed run would leave the terminal without its cursor"
    after = plain[plain.rindex("✓ first") :]
    assert re.search(r"◷ hang +1(\.\d+)?s  Command execution timed out after 1 second, killed", after)
    assert re.search(r"– behind +skipped: it needs hang: hang did not succeed", after)
    # stdout has the envelope and nothing else
    assert validate_envelope(json.loads(seen.stdout))["data"]["run_id"] == "r1"
    assert seen.code == 3


PRINTING = r"""
steps:
  bar:
    exec: |
      printf 'old\n\033[31m10%%\r50%% done'; sleep 2.2
  each: {exec: "echo item {{ item }} $API_TOKEN; sleep 2", for_each: [a], env: {API_TOKEN: s3cr3t-value}}
"""


def test_a_view_shows_the_last_line_of_each_running_step(
    flow: Callable[..., str], on_terminal: Callable[..., Seen]
) -> None:
    seen = on_terminal("run", flow(PRINTING), streams=("stderr",), within_s=RUN_LIMIT_S)
    plain = ESCAPES.sub("", seen.screen)
    assert re.search(r"bar .* left  50% done", plain), plain
    assert re.search(r"each .*  item a \*\*\*", plain) and "s3cr3t" not in plain
    assert "\x1b[31m10" not in seen.screen
    followed = on_terminal("run", flow(PRINTING), "--follow", streams=("stderr",), within_s=RUN_LIMIT_S)
    assert "bar | old" in followed.screen and "each[0] | item a ***" in followed.screen
    assert not re.search(r"running  \d", ESCAPES.sub("", followed.screen)), "the view was drawn as well"


ITEMS = """\
name: items
timeout: 60s
steps:
  test:
    exec: "sleep {{ matrix.s }}; test {{ matrix.s }} != 1"
    timeout: 9s
    matrix: {s: [1, 3, 4]}
"""


def test_a_view_shows_the_running_items_of_a_step_with_their_own_clocks(
    flow: Callable[..., str], on_terminal: Callable[..., Seen]
) -> None:
    seen = on_terminal("run", flow(ITEMS), streams=("stderr",), within_s=RUN_LIMIT_S)
    plain = ESCAPES.sub("", seen.screen)
    assert re.search(r"test  1 of 3 items, 1 bad", plain), plain
    left = [float(text) for text in re.findall(r"\[2\] s: 4  [━─]+ (\d+\.\d)s left", plain)]
    assert len(left) >= 4 and left == sorted(left, reverse=True) and left[0] <= 9.0, plain


NEGOTIATED = """\
name: negotiated
steps:
  busy:
    exec: "trap 'sleep 1; exit 0' TERM; for i in 1 2 3 4 5 6 7 8 9; do echo $i; sleep 0.3; done; sleep 60 & wait"
    timeout: 60s
    soft: 1s
    wind_down: 9s
    overtime: {observer: progress, budget: 10s, max_per_request: 1500ms, max_requests: 1}
"""


def test_a_view_shows_overtime_and_a_wind_down_running_out(
    flow: Callable[..., str], on_terminal: Callable[..., Seen]
) -> None:
    seen = on_terminal("run", flow(NEGOTIATED), streams=("stderr",), within_s=RUN_LIMIT_S)
    plain = ESCAPES.sub("", seen.screen)
    assert re.search(r"busy +[━─]+ \d+\.\ds left  1\.5s of overtime: its output", plain), plain
    assert re.search(r"busy +[━─]+ \d+\.\ds left  winding down, [78]\.\ds", plain), plain


def test_a_view_says_what_a_step_is_at_and_why_it_went_wrong(
    flow: Callable[..., str], on_terminal: Callable[..., Seen]
) -> None:
    size = {"LINES": "24", "COLUMNS": "80"}
    seen = on_terminal("run", flow(STUBBORN), streams=("stdout", "stderr"), within_s=RUN_LIMIT_S, env=size)
    plain = ESCAPES.sub("", seen.screen)
    assert re.search(r"^.*a-name-tha…\S+  \d of 6 done, \d running .* left", plain, re.MULTILINE)
    assert re.search(r"tidy +runs only if a reaction starts it", plain)
    assert re.search(r"hang +out of time, stopping  0\.\ds of grace left", plain)
    assert re.search(r"gate +waits for p-\w+: shotclock inbox", plain) and not re.search(r"gate +out of time", plain)
    assert re.search(r"flaky +attempt 1 failed, retries: connection refused", plain)
    assert re.search(r"✓ a-step-with\S*…\S*all-first ", plain) and re.search(r"✓ a-step-with\S*…\S*all-second ", plain)
    after = plain[plain.rindex("✓ a-step-with") :]
    assert re.search(r"✗ flaky .*2 attempts  connection refused \(the", after)
    assert re.search(r"✓ tidy .*1 process outlived the", after)
    assert re.search(r"✗ a-name-that.*: 3 succeeded, 1 timed out, 2 failed in \d", after), after
    assert re.search(r"\n  shotclock report (\w{16}) --open\n  shotclock run --rerun-failed \1\n$", after)
    assert not [line for line in plain.replace("\r", "\n").split("\n") if len(line) > 80]


def test_frames_are_few_and_fit_the_terminal_however_many_steps(
    flow: Callable[..., str], on_terminal: Callable[..., Seen]
) -> None:
    steps = "".join(f'  s{n}: {{type: command, exec: "sleep 0.1"}}\n' for n in range(120))
    file = flow(f"name: many\nmax_parallelism: 8\nsteps:\n{steps}")
    began = time.monotonic()
    size = {"LINES": "20", "COLUMNS": "70"}
    seen = on_terminal("run", file, streams=("stderr",), within_s=RUN_LIMIT_S, env=size)
    took = time.monotonic() - began
    frames = ESCAPES.sub("", seen.screen).split("many  ")[1:]
    assert 3 <= len(frames) <= took * 10 + 1
    assert all(frame.count("\n") < 20 for frame in frames[:-1])
    assert any(re.search(r"… \d+ finished, \d+ waiting", frame) for frame in frames)
    assert all(len(line) <= 70 for line in "\n".join(frames[1:-1]).replace("\r", "\n").split("\n"))


def test_a_terminal_that_takes_nothing_holds_no_clock(flow: Callable[..., str], tmp_path: Path) -> None:
    """Its buffer is full after some frames, and nobody reads: Ctrl-S, or a window that hangs."""
    steps = "".join(f'  w{n}: {{type: command, depends_on: hang, exec: "true"}}\n' for n in range(60))
    file = flow(
        "name: stuck\nsteps:\n"
        '  hang: {type: command, timeout: 3s, grace: 0s, exec: "sleep 60"}\n'
        f'  short: {{type: command, timeout: 2s, grace: 0s, exec: "sleep 60"}}\n{steps}'
    )
    ours, theirs = pty.openpty()
    env = {**os.environ, "LINES": "300", "COLUMNS": "200"}
    try:
        with open(tmp_path / "out", "wb") as out:
            process = WarmStart(
                [*SHOTCLOCK, "run", file, "--run-id", "r1"],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=theirs,
                env=env,
            )
        try:
            assert process.wait(60) == 3
        finally:
            process.kill()
            process.wait(SOON_S)
    finally:
        os.close(ours)
        os.close(theirs)
    steps_said = json.loads((tmp_path / "out").read_bytes())["data"]["steps"]
    assert 2000 <= steps_said["short"]["duration_ms"] < 12_000
    assert 3000 <= steps_said["hang"]["duration_ms"] < 12_000


def test_where_the_cursor_cannot_be_moved_there_are_plain_lines(
    flow: Callable[..., str], on_terminal: Callable[..., Seen]
) -> None:
    seen = on_terminal("run", flow(), streams=("stdout", "stderr"), within_s=RUN_LIMIT_S, env={"TERM": "dumb"})
    assert "\x1b" not in seen.screen
    lines = [line for line in seen.screen.splitlines() if not line.startswith("{")]
    succeeded = next(line for line in lines if line.startswith("✓ first succeeded"))
    assert lines[:3] == ["… first running", "first | one", succeeded]
    assert "– behind skipped: it needs hang: hang did not succeed" in lines


def test_off_a_terminal_stderr_has_a_line_for_every_change_as_it_happens(
    flow: Callable[..., str], tmp_path: Path
) -> None:
    with open(tmp_path / "out", "wb") as out, open(tmp_path / "err", "wb") as err:
        process = WarmStart([*SHOTCLOCK, "run", flow()], stdin=subprocess.DEVNULL, stdout=out, stderr=err)
    wait_for(lambda: "✓ first succeeded" in (tmp_path / "err").read_text(), "a line", RUN_LIMIT_S)
    assert process.poll() is None, "while it runs"
    assert process.wait(RUN_LIMIT_S) == 3
    lines = [re.sub(r" [\d.]+m?s", "", line) for line in (tmp_path / "err").read_text().splitlines()]
    assert lines == [
        "… first running",
        "first | one",
        "✓ first succeeded",
        "… hang running",
        "◷ hang timed_out: Command execution timed out after 1 second",
        "– behind skipped: it needs hang: hang did not succeed",
    ]
    assert json.loads((tmp_path / "out").read_text())["error"]["code"] == "STEPS_FAILED"


def test_whoever_asks_for_the_envelope_alone_gets_nothing_else(flow: Callable[..., str], tmp_path: Path) -> None:
    with open(tmp_path / "both", "wb") as both:
        process = WarmStart([*SHOTCLOCK, "run", "--json", flow()], stdin=subprocess.DEVNULL, stdout=both, stderr=both)
    assert process.wait(RUN_LIMIT_S) == 3
    assert json.loads((tmp_path / "both").read_text())["error"]["code"] == "STEPS_FAILED"


def test_a_reader_of_the_lines_that_left_is_no_business_of_the_run(flow: Callable[..., str], tmp_path: Path) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    words = ["run", flow(), "--events", str(tmp_path / "events")]
    with open(tmp_path / "out", "wb") as out:
        process = WarmStart([*SHOTCLOCK, *words], stdin=subprocess.DEVNULL, stdout=out, stderr=writing)
    os.close(writing)
    assert process.wait(RUN_LIMIT_S) == 3
    assert json.loads((tmp_path / "out").read_text())["warnings"] == []
    assert len((tmp_path / "events").read_text().splitlines()) == 6


def test_no_color_takes_the_colour_and_leaves_the_view(
    flow: Callable[..., str], on_terminal: Callable[..., Seen]
) -> None:
    file = flow("steps: {a: {exec: 'sleep 0.5; echo hi'}}\noutputs: {said: '{{ outputs.a }}'}\n")
    for env, has_colour in (({"CI": "true"}, True), ({"NO_COLOR": "1"}, False)):
        seen = on_terminal("run", file, streams=("stdout", "stderr"), within_s=RUN_LIMIT_S, env=env)
        assert '"said": "hi"' in seen.screen and "1 succeeded in" in seen.screen and '"meta"' not in seen.screen
        assert "0 of 1 done, 1 running" in seen.screen and "\x1b[2K" in seen.screen, "the view was drawn and removed"
        assert bool(COLOUR.search(seen.screen)) == has_colour, env


def test_what_a_step_says_cannot_draw_on_the_terminal(
    flow: Callable[..., str], on_terminal: Callable[..., Seen]
) -> None:
    file = flow('steps:\n  a: {type: command, exec: "true", output_schema: {const: "\\e]0;owned\\a"}}\n')
    seen = on_terminal("run", file, streams=("stdout", "stderr"), within_s=RUN_LIMIT_S)
    assert "\x1b]0;" not in seen.screen
    assert re.search(r"(<U\+001B>|\\x1b)\]0;owned", seen.screen), "shown, however it is written out"


def test_a_signal_leaves_the_terminal_clean(flow: Callable[..., str], tmp_path: Path) -> None:
    ours, theirs = pty.openpty()
    try:
        with open(tmp_path / "out", "wb") as out:
            process = WarmStart([*SHOTCLOCK, "run", flow()], stdin=subprocess.DEVNULL, stdout=out, stderr=theirs)
        screen = b""

        def hang_is_running() -> bool:
            nonlocal screen
            os.set_blocking(ours, False)
            try:
                screen += os.read(ours, 65536)
            except BlockingIOError:
                pass
            return re.search(rb"hang {2,}\x1b[^\n]* left", screen) is not None

        try:
            wait_for(hang_is_running, "the view of hang", RUN_LIMIT_S)
            process.terminate()
            assert process.wait(SOON_S) == 143
        finally:
            process.kill()
            process.wait(SOON_S)
        hang_is_running()
    finally:
        os.close(ours)
        os.close(theirs)
    assert json.loads((tmp_path / "out").read_bytes())["error"]["code"] == "CANCELLED"
    assert "■ hang" in ESCAPES.sub("", screen.decode())


INTERRUPTED = """\
steps:
  polite: {exec: "sleep 60", timeout: 59s}
  stubborn: {exec: "trap '' TERM INT; touch up; while :; do sleep 1; done", timeout: 59s, grace: 20s}
"""


def test_after_ctrl_c_a_view_shows_the_grace_that_is_left_and_after_the_second_one_how_to_continue(
    flow: Callable[..., str], tmp_path: Path
) -> None:
    ours, theirs = pty.openpty()
    os.set_blocking(ours, False)
    screen = b""

    def is_seen(pattern: str) -> bool:
        nonlocal screen
        with contextlib.suppress(BlockingIOError):
            screen += os.read(ours, 65536)
        return re.search(pattern, ESCAPES.sub("", screen.decode(errors="replace"))) is not None

    words = [*SHOTCLOCK, "run", flow(INTERRUPTED), "--run-id", "r1"]
    process = WarmStart(words, stdin=subprocess.DEVNULL, stdout=theirs, stderr=theirs)
    try:
        wait_for(lambda: is_seen(r"polite +.*s left[^✗]*stubborn +.*s left"), "both steps", RUN_LIMIT_S)
        wait_for((tmp_path / "up").exists, "the trap", RUN_LIMIT_S)
        process.send_signal(signal.SIGINT)
        wait_for(lambda: is_seen(r"stubborn +stopping  1\d\.[0-6]s of grace left"), "the grace", RUN_LIMIT_S)
        process.send_signal(signal.SIGINT)
        assert process.wait(SOON_S) == 130
        wait_for(lambda: is_seen("continue with `shotclock run --resume r1`"), "the answer", SOON_S)
    finally:
        process.kill()
        process.wait(SOON_S)
        os.close(ours)
        os.close(theirs)
    assert "failed, retries" not in ESCAPES.sub("", screen.decode(errors="replace"))


def test_a_run_that_is_refused_lists_no_steps_of_the_run_that_is_under_way(
    flow: Callable[..., str], on_terminal: Callable[..., Seen], tmp_path: Path
) -> None:
    text = "steps: {first: {exec: 'true'}, second: {exec: 'touch up; sleep 60', depends_on: first}}"
    words = [*SHOTCLOCK, "run", flow(text), "--run-id", "r1", "--json"]
    process = WarmStart(words, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        wait_for((tmp_path / "up").exists, "the second step", RUN_LIMIT_S)
        seen = on_terminal("run", "--resume", "r1", streams=("stderr",), within_s=RUN_LIMIT_S)
    finally:
        process.kill()
        process.wait(SOON_S)
    assert json.loads(seen.stdout)["error"]["code"] == "RUN_TAKEN"
    assert "first" not in seen.screen


# --- in other formats -----------------------------------------------------------------------------


def test_a_run_as_junit_and_as_markdown(
    flow: Callable[..., str], shotclock: Callable[..., Any], tmp_path: Path
) -> None:
    ran = shotclock("run", flow(), "--output", "junit")
    assert ran.code == 3
    [suite] = xml.fromstring(ran.stdout)
    tags = {case.attrib["name"]: case.find("*") for case in suite.findall("testcase")}
    assert [tags[name].tag for name in ("first", "hang", "behind")] == ["system-out", "error", "skipped"]
    file = tmp_path / "report.md"
    ran = shotclock("run", flow(), "--output", "markdown", "--output-file", file)
    assert ran.json()["error"]["code"] == "STEPS_FAILED"
    assert "| ◷ | `hang` | timed out | 1" in file.read_text()


def test_a_refused_run_has_a_junit_file_that_says_so(flow: Callable[..., str], shotclock: Callable[..., Any]) -> None:
    ran = shotclock("run", flow("steps: {a: {type: nonsense}}"), "--output", "junit")
    assert ran.code == 2
    [suite] = xml.fromstring(ran.stdout)
    assert suite.attrib["errors"] == "1"
    assert suite.findall("testcase")[0][0].attrib["type"] == "WORKFLOW_INVALID"


def test_a_file_that_cannot_be_written_is_known_before_anything_runs(
    flow: Callable[..., str], shotclock: Callable[..., Any], tmp_path: Path, validate_envelope: Callable[..., Any]
) -> None:
    file = flow(f'steps: {{a: {{type: command, exec: "touch {tmp_path}/ran"}}}}')
    ran = shotclock("run", file, "--output", "junit", "--output-file", tmp_path / "no" / "such" / "folder.xml")
    assert ran.code == 7
    assert b"FILE_UNWRITABLE" in ran.stdout
    assert not (tmp_path / "ran").exists()


# --- afterwards -----------------------------------------------------------------------------------


@pytest.fixture
def ran(flow: Callable[..., str], shotclock: Callable[..., Any]) -> None:
    """A run `nightly-1` in the store."""
    file = flow("""\
name: nightly
steps:
  a: {type: command, exec: "echo '<b>hi</b>'"}
  b: {type: command, depends_on: a, exec: "exit 3"}
""")
    assert shotclock("run", file, "--run-id", "nightly-1").code == 3


@pytest.mark.usefixtures("ran")
def test_a_report_off_a_terminal_is_an_envelope(
    shotclock: Callable[..., Any], validate_envelope: Callable[..., Any]
) -> None:
    said = validate_envelope(shotclock("report", "nightly-1").json())
    assert said["ok"]  # that the run failed is what it reports, not how it ended
    assert said["data"]["status"] == "failed"
    assert [step["id"] for step in said["data"]["steps"]] == ["a", "b"]
    assert said["data"]["steps"][1]["error"]["code"] == "COMMAND_FAILED"
    assert said["data"]["critical_path"] == ["a", "b"]


@pytest.mark.usefixtures("ran")
def test_a_report_as_a_page_is_one_file(shotclock: Callable[..., Any], tmp_path: Path) -> None:
    said = shotclock("report", "nightly", "--html", tmp_path / "r.html").json()  # the beginning of its id will do
    assert said["data"]["html"] == str(tmp_path / "r.html")
    page = (tmp_path / "r.html").read_text("utf-8")
    assert "&lt;b&gt;hi&lt;/b&gt;" in page
    assert "<b>hi" not in page
    assert sorted(file.name for file in tmp_path.iterdir()) == ["flow.yaml", "home", "r.html"]


@pytest.mark.usefixtures("ran")
def test_a_page_that_cannot_be_written_is_an_error(
    shotclock: Callable[..., Any], tmp_path: Path, validate_envelope: Callable[..., Any]
) -> None:
    gone = shotclock("report", "nightly-1", "--html", tmp_path / "no" / "r.html")
    assert gone.code == 7
    assert validate_envelope(gone.json())["error"]["code"] == "FILE_UNWRITABLE"


@pytest.mark.usefixtures("ran")
def test_an_unknown_run_names_those_that_are_near(
    shotclock: Callable[..., Any], validate_envelope: Callable[..., Any]
) -> None:
    unknown = shotclock("report", "nihgtly-1")
    assert unknown.code == 5
    error = validate_envelope(unknown.json())["error"]
    assert error["code"] == "RUN_NOT_FOUND"
    assert error["context"]["near"] == ["nightly-1"]
    assert "did you mean nightly-1?" in error["suggestion"]


@pytest.mark.usefixtures("ran")
def test_without_an_id_the_last_runs_are_listed(shotclock: Callable[..., Any]) -> None:
    [run] = shotclock("report").json()["data"]["runs"]
    assert (run["run_id"], run["status"]) == ("nightly-1", "failed")
    assert shotclock("report", "--html", "x").code == 2


@pytest.mark.usefixtures("ran")
def test_on_a_terminal_a_report_is_a_timeline(on_terminal: Callable[..., Seen]) -> None:
    seen = on_terminal("report", "nightly-1", streams=("stdout", "stderr"))
    plain = ESCAPES.sub("", seen.screen)
    assert plain.startswith("✗ nightly failed in ")
    assert re.search(r"^✓ a +\d+ms .*█", plain, re.MULTILINE)
    assert "the command ended with exit code 3" in plain
    listed = ESCAPES.sub("", on_terminal("report", streams=("stdout", "stderr")).screen)
    assert re.match(r"✗ nightly-1  failed ", listed)


@pytest.mark.usefixtures("ran")
@pytest.mark.parametrize(("output", "begins"), [("markdown", b"### "), ("junit", b"<?xml")])
def test_a_report_in_other_formats(output: str, begins: bytes, shotclock: Callable[..., Any], tmp_path: Path) -> None:
    said = shotclock("report", "nightly-1", "--output", output)
    assert said.code == 0
    assert said.stdout.startswith(begins)
    written = shotclock("report", "nightly-1", "--output", output, "--output-file", tmp_path / "x").json()
    assert written["data"]["output_file"] == str(tmp_path / "x")
    assert (tmp_path / "x").read_bytes() == said.stdout


def test_a_run_that_was_cut_off_has_a_report(
    flow: Callable[..., str], start: Any, shotclock: Callable[..., Any]
) -> None:
    running = start("run", flow(FLOW.replace("timeout: 1s", "timeout: 15s")), "--run-id", "cut")
    wait_for(lambda: shotclock("report", "cut").code == 0, "the run in the store", RUN_LIMIT_S)
    said = shotclock("report", "cut").json()["data"]
    assert said["status"] == "running"
    running.process.kill()
    running.ends()
    said = shotclock("report", "cut").json()["data"]
    assert said["status"] == "interrupted"
    assert "--resume cut" in said["why"]
    assert [step["status"] for step in said["steps"] if step["id"] == "behind"] == ["pending"]
