"""Results as tables and progress as a bar, for a person."""

from typing import Any

import pytest

from shotclock.terminal.results import draw_bar, render_value
from tests.apps.app.test_signals import on_terminal


def test_a_list_of_objects_is_a_table_for_a_person_and_json_for_a_program(tool: Any) -> None:
    program = tool("rows.py")
    lines = program("users", "--format", "text").stdout.decode().splitlines()
    assert lines == [
        "NAME  AGE  NOTE              ADMIN",
        "Ada    36  first programmer",
        "山田    7  <U+001B>[31mred   true",
    ]
    assert program.envelope("users")["data"][0]["note"] == "first\nprogrammer"


def test_a_table_is_as_wide_as_the_terminal_and_complete_elsewhere(tool: Any) -> None:
    program = tool("rows.py")
    _, screen = on_terminal(program, "wide")
    assert screen.splitlines()[1].endswith("xx…") and all(len(line) <= 80 for line in screen.splitlines())
    assert "x" * 500 in program("wide", "--format", "text").stdout.decode()


ASKS = """
from shotclock import App

app = App("asks")


@app.command(approval=True)
def deploy(to: str) -> str:
    return to


app()
"""


def test_unfinished_work_is_the_commands_that_continue_and_cancel_it(tool: Any) -> None:
    program = tool("asks.py", ASKS)
    ran = program("deploy", "here", "--budget", "100ms", "--format", "text")
    assert ran.code == 14
    going_on, cancelling = ran.stdout.decode().splitlines()
    assert going_on.startswith("to continue: ") and "deploy here" in going_on
    assert cancelling.startswith("to cancel: shotclock inbox withdraw")
    assert ran.stderr.decode().rstrip().endswith("the command above")


def test_other_results_stay_json() -> None:
    for value in ([{"name": "Ada", "tags": ["a"]}], [1, 2], {"a": 1}, [], [{}], [{"a": 1}, 2]):
        assert render_value(value).startswith(("[", "{")), value
    assert render_value("text") == "text"


@pytest.mark.slow
def test_progress_is_a_bar_on_the_terminal_that_is_gone_at_the_end(tool: Any) -> None:
    program = tool("rows.py")
    code, screen = on_terminal(program, "load", env={"TERM": "xterm"})
    assert code == 0 and "load [########----------------]  33% 1/3 files" in screen
    assert screen.endswith("\x1b[2K\rloaded\n")
    _, uncounted = on_terminal(program, "load", "--no-counted", env={"TERM": "xterm"})
    assert "load: 2 files, " in uncounted
    _, dumb = on_terminal(program, "load", env={"TERM": "dumb"})
    assert dumb == "loaded\n"
    assert program("load").stderr == b""


def test_a_bar_shows_no_more_than_all() -> None:
    assert draw_bar("load", 5, 4, None, "1s") == f"load [{'#' * 24}] 100% 5/4, 1s"
    assert draw_bar("load", 5, None, "rows\x1b", "1s") == "load: 5 rows<U+001B>, 1s"
