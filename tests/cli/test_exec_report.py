"""What `shotclock exec` says on stderr at the end: what a pipeline asked for, by --report or SHOTCLOCK_REPORT."""

from typing import Any

import pytest

from .conftest import envelopes_in

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


def test_off_a_terminal_the_envelope_is_said_where_nothing_was_asked_for(shotclock: Any):
    ran = shotclock("exec", "--", "true", env={"SHOTCLOCK_REPORT": None})
    assert ran.envelope()["ok"]


@pytest.mark.parametrize("form", ["line", "none"])
def test_a_success_is_silent_and_the_output_untouched(form: str, reporting: Any):
    ran = reporting(form, "--", "sh", "-c", "echo out; echo err >&2")
    assert (ran.code, ran.stdout, ran.stderr) == (0, b"out\n", b"err\n")


def test_line_says_a_failure_in_one_readable_line(reporting: Any):
    ran = reporting("line", "--", "sh", "-c", "echo err >&2; exit 3")
    assert ran.code == 3
    said = ran.stderr.decode().splitlines()
    assert said[0] == "err" and len(said) == 2
    assert said[1].startswith("shotclock: COMMAND_FAILED: the command ended with exit code 3")


def test_line_says_a_timeout_and_what_was_left_running(reporting: Any):
    ran = reporting("line", "--timeout", "300ms", "--", "sleep", "30")
    assert ran.code == 10
    assert ran.stderr.startswith(b"shotclock: TIMEOUT: ") and ran.stderr.count(b"\n") == 1
    left = reporting("line", "--", "sh", "-c", "sleep 30 &")
    assert left.code == 0
    assert b"DESCENDANTS_STOPPED" in left.stderr


def test_none_says_nothing_about_a_command_that_ran(reporting: Any):
    assert reporting("none", "--", "sh", "-c", "exit 3").stderr == b""
    late = reporting("none", "--timeout", "300ms", "--", "sleep", "30")
    assert (late.code, late.stderr) == (10, b"")


def test_none_still_says_why_nothing_ran(reporting: Any):
    for words in (["--bogus", "--", "true"], ["--", "no-such-command-here"], ["--cwd", "/nowhere", "--", "true"]):
        ran = reporting("none", *words)
        assert ran.code in (2, 4, 5)
        assert ran.stderr.startswith(b"shotclock: ") and not envelopes_in(ran.stderr)


def test_json_is_the_envelope_also_on_a_terminal(on_terminal: Any):
    seen = on_terminal("exec", "--report", "json", "--", "true", streams=("stderr",))
    assert envelopes_in(seen.screen.encode())[0]["ok"]


def test_line_is_silent_after_a_success_also_on_a_terminal(on_terminal: Any):
    assert on_terminal("exec", "--report", "line", "--", "true", streams=("stderr",)).screen == ""


@pytest.mark.parametrize("way", ["option", "variable"])
def test_a_form_that_there_is_not_is_refused(way: str, shotclock: Any):
    options, env = WAYS[way]("loud")
    ran = shotclock("exec", *options, "--", "true", env={"SHOTCLOCK_REPORT": None, **env})
    assert ran.code == 2
    [error] = ran.envelope()["error"]["errors"]
    assert error == {
        "field": "report" if way == "option" else "SHOTCLOCK_REPORT", "message": "'loud' is none of json, line, none"
    }  # fmt: skip


def test_json_on_stdout_leaves_no_report_to_ask_for(shotclock: Any):
    assert shotclock("exec", "--json", "--report", "line", "--", "true").json()["error"]["code"] == "ARG_ERROR"
    ran = shotclock("exec", "--json", "--", "true", env={"SHOTCLOCK_REPORT": "none"})
    assert ran.json()["ok"] and ran.stderr == b""
