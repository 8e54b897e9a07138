"""What `shotclock exec` says on stderr at the end: what a pipeline asked for, by --report or SHOTCLOCK_REPORT."""

import itertools
import json
import os
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.command_line import SHOTCLOCK, envelopes_in

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("no_survivors")]

WAYS: dict[str, Any] = {
    "option": lambda form: (["--report", form], {}),
    "variable": lambda form: ([], {"SHOTCLOCK_REPORT": form}),
    "option before variable": lambda form: ([f"--report={form}"], {"SHOTCLOCK_REPORT": "json"}),
}


@pytest.fixture(params=WAYS)
def reporting(request: pytest.FixtureRequest, shotclock: Any) -> Any:
    """A function that runs a command with this form of report, however it was asked for."""

    def run(form: str, *words: str) -> Any:
        options, env = WAYS[request.param](form)
        return shotclock("exec", *options, *words, env={"SHOTCLOCK_REPORT": None, **env})

    return run


WITHOUT_ANY = {"SHOTCLOCK_REPORT": None}


def test_a_command_that_ended_by_itself_adds_nothing_on_a_terminal_or_off_it(shotclock: Any, on_terminal: Any):
    for script in ("echo err >&2", "echo err >&2; exit 3", "echo err >&2; kill -9 $$"):
        for options in ([], ["--report", "line"], ["--report", "none"]):
            assert shotclock("exec", *options, "--", "sh", "-c", script, env=WITHOUT_ANY).stderr == b"err\n"
            assert on_terminal("exec", *options, "--", "sh", "-c", script, streams=("stderr",)).screen == "err\n"


@pytest.mark.parametrize("form", ["line", "none"])
def test_a_success_is_silent_and_the_output_untouched(form: str, reporting: Any):
    ran = reporting(form, "--", "sh", "-c", "echo out; echo err >&2")
    assert (ran.code, ran.stdout, ran.stderr) == (0, b"out\n", b"err\n")


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (
            "--timeout 300ms -- sleep 30",
            124,
            "TIMEOUT: stopped after 300ms, the limit of --timeout. Allow more time with --timeout, or do less",
        ),
        ("--idle 300ms -- sleep 30", 124, "STALLED: stopped after "),
        ("--soft 300ms -- sleep 30", 124, "TIMEOUT: stopped after "),
        ("-- sh -c 'sleep 30 &'", 0, "DESCENDANTS_STOPPED: 1 process outlived the command, stopped now: sleep 30 ("),
        ("-- sh -c 'sleep 30 & exit 3'", 3, "DESCENDANTS_STOPPED: 1 process outlived the command"),
        ("-- no-such-command-here", 127, "COMMAND_NOT_FOUND: 'no-such-command-here' was not found. Install it"),
        ("-- 'sleep 30'", 127, "COMMAND_NOT_FOUND: 'sleep 30' was not found. It is one word: leave out the quotes"),
        ("-- './no such file'", 127, "COMMAND_NOT_FOUND: './no such file' was not found. Install it"),
        ("-- /", 126, "COMMAND_NOT_EXECUTABLE: '/' cannot be executed"),
        ("--cwd /nowhere -- true", 125, "CWD_UNUSABLE: cannot enter '/nowhere'"),
        ("--bogus -- true", 125, "ARG_ERROR: --bogus: unknown option"),
    ],
)
def test_what_we_stopped_or_could_not_start_adds_one_line(words: str, code: int, said: str, tmp_path: Any):
    """Also on a pipe, which does not show whether the command has left its last line open."""
    ran = subprocess.run(
        [*SHOTCLOCK, "exec", *shlex.split(words)],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=30,
        env={name: value for name, value in os.environ.items() if name != "SHOTCLOCK_REPORT"},
    )
    [line] = ran.stderr.decode().splitlines()
    assert (ran.returncode, ran.stdout) == (code, b"")
    assert line.startswith(f"shotclock: {said}")


def test_the_deadline_of_the_caller_is_named(shotclock: Any):
    ran = shotclock("exec", "--", "sleep", "30", env={**WITHOUT_ANY, "SHOTCLOCK_REMAINING_MS": "900"})
    assert b"the deadline of the caller. Give the caller more time" in ran.stderr


def test_none_says_nothing_about_a_command_that_ran(reporting: Any):
    assert reporting("none", "--", "sh", "-c", "exit 3").stderr == b""
    late = reporting("none", "--timeout", "300ms", "--", "sleep", "30")
    assert (late.code, late.stderr) == (124, b"")


def test_none_still_says_why_nothing_ran(reporting: Any):
    for words in (["--bogus", "--", "true"], ["--", "no-such-command-here"], ["--cwd", "/nowhere", "--", "true"]):
        ran = reporting("none", *words)
        assert ran.code in (125, 127)
        assert ran.stderr.startswith(b"shotclock: ") and not envelopes_in(ran.stderr)


@pytest.mark.parametrize("way", ["option", "variable"])
def test_json_is_the_envelope_with_the_exit_code_that_the_process_has(way: str, shotclock: Any, on_terminal: Any):
    options, env = WAYS[way]("json")
    for words, code in ((["true"], 0), (["sh", "-c", "exit 3"], 3), (["no-such-command-here"], 127), (["/"], 126)):
        ran = shotclock("exec", *options, "--", *words, env={**WITHOUT_ANY, **env})
        assert ran.code == ran.envelope()["meta"]["exit_code"] == code
    late = shotclock("exec", *options, "--timeout", "300ms", "--", "sleep", "30", env={**WITHOUT_ANY, **env})
    assert late.code == late.envelope()["meta"]["exit_code"] == 124
    seen = on_terminal("exec", *options, "--", "true", streams=("stderr",), env=env)
    assert envelopes_in(seen.screen.encode())[0]["ok"]


@pytest.mark.parametrize("way", ["option", "variable"])
def test_a_form_that_there_is_not_is_refused(way: str, shotclock: Any):
    options, env = WAYS[way]("loud")
    ran = shotclock("exec", *options, "--", "true", env={"SHOTCLOCK_REPORT": None, **env})
    assert ran.code == 125
    field = "report" if way == "option" else "SHOTCLOCK_REPORT"
    assert f"ARG_ERROR: {field}: 'loud' is none of json, line, none" in ran.stderr.decode()


def test_json_on_stdout_leaves_no_report_to_ask_for(shotclock: Any):
    assert shotclock("exec", "--json", "--report", "line", "--", "true").json()["error"]["code"] == "ARG_ERROR"
    ran = shotclock("exec", "--json", "--", "true", env={"SHOTCLOCK_REPORT": "none"})
    assert ran.json()["ok"] and ran.stderr == b""


def test_with_too_few_descriptors_nothing_is_started_and_the_limit_is_named(tmp_path: Path):
    begun, flow = tmp_path / "begun", tmp_path / "flow.yaml"
    flow.write_text(f"steps: {{a: {{exec: touch {begun}}}}}\n")
    words = [["exec", "--json", "--", "touch", str(begun)], ["run", str(flow), "--json"]]
    for limit, command in itertools.product((5, 6, 8, 9, 10, 12), words):
        line = f'ulimit -n {limit} && exec "$@"'
        ran = subprocess.run(
            ["sh", "-c", line, "sh", *SHOTCLOCK, *command],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=30,
            env={**os.environ, "SHOTCLOCK_HOME": str(tmp_path / "home")},
        )
        assert b"Traceback" not in ran.stderr
        envelope = json.loads(ran.stdout)
        assert envelope["error"]["code"] == "SPAWN_FAILED" and envelope["meta"]["ending"] == "not_started", envelope
        assert "Too many open files" in envelope["error"]["message"]
        assert not (tmp_path / "begun").exists()
