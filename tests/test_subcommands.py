"""Every subcommand but exec: what is understood, what is refused, and where help goes."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from shotclock.main import INDEX

pytestmark = pytest.mark.usefixtures("no_survivors")

# So that nothing says "nobody looks" but the absence of a terminal.
LOOKED_AT = {"CI": None, "NO_COLOR": None}


@pytest.fixture(autouse=True)
def a_person_may_look(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in LOOKED_AT:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")


# --- help -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("words", [["--help"], ["help"], []], ids=str)
def test_help_goes_to_stdout_and_lists_every_subcommand(words: list[str], shotclock: Any, on_terminal: Any):
    ran, seen = shotclock(*words), on_terminal(*words, streams=("stdout",))
    assert (ran.code, ran.stderr) == (seen.code, seen.stderr) == (0, b"")
    assert ran.stdout.decode() == seen.screen
    assert seen.screen.startswith("Usage: shotclock SUBCOMMAND") and "\x1b" not in seen.screen
    for name in INDEX:
        assert re.search(rf"\n  {name} |[ \n]{name}[,.]", seen.screen), name


def test_the_help_fits_one_screen_and_groups_the_common_subcommands(on_terminal: Any):
    lines = on_terminal("--help", streams=("stdout",), env={"COLUMNS": "80"}).screen.splitlines()
    assert len(lines) <= 30 and max(map(len, lines)) <= 80
    headings = [line for line in lines if line.endswith(":") and not line.startswith(" ")]
    assert headings == [f"{each}:" for each in dict.fromkeys(heading for heading, _, _ in INDEX.values()) if each]
    for name, (heading, _, summary) in INDEX.items():
        line = f"  {name:<8} {summary}"
        assert (line in lines) == (heading != ""), name


def test_off_a_terminal_each_subcommand_writes_where_the_last_line_of_the_help_says(shotclock: Any):
    said = " ".join(shotclock("--help").stdout.decode().split())
    assert said.endswith(
        "Off a terminal it prints one JSON envelope, but `exec` only with --json, otherwise the command's own output. "
        "`serve` and `wrap` speak MCP on stdout. Help and `demo` are text."
    )
    assert json.loads(shotclock("errors", "TIMEOUT").stdout)["ok"]
    ran = shotclock("exec", "--", "echo", "hello")
    assert (ran.stdout, ran.stderr) == (b"hello\n", b"")
    assert json.loads(shotclock("exec", "--json", "--", "true").stdout)["ok"]


@pytest.mark.parametrize("name", ["exec", "errors", "inbox", "inbox propose"])
def test_help_on_a_subcommand_is_the_same_both_ways(name: str, shotclock: Any):
    asked, flagged = shotclock("help", *name.split()), shotclock(*name.split(), "--help")
    assert asked.code == flagged.code == 0
    assert asked.stdout == flagged.stdout
    assert f"Usage: shotclock {name}".encode() in asked.stdout


def test_no_verb_is_a_mistake_with_the_usage_on_stderr(shotclock: Any, on_terminal: Any, validate_envelope: Any):
    ran = shotclock("inbox")
    error = validate_envelope(ran.json())["error"]
    assert (ran.code, error["code"], error["errors"][0]["field"]) == (2, "ARG_ERROR", "verb")
    assert ran.stderr.startswith(b"Usage: shotclock inbox VERB")
    seen = on_terminal("inbox", streams=("stdout",))
    assert (seen.code, seen.screen) == (2, "")
    assert seen.stderr.startswith(ran.stderr) and b"missing VERB; there are list, " in seen.stderr


# --- refusals -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("word", "meant"), [("docter", "doctor"), ("error", "errors"), ("EXEC", "exec")])
def test_an_unknown_subcommand_is_refused_with_the_nearest_one(
    word: str, meant: str, shotclock: Any, validate_envelope: Any
):
    ran = shotclock(word, "--anything", "else")
    envelope = validate_envelope(ran.json())
    assert ran.code == 2
    assert envelope["error"]["suggestion"] == f"did you mean {meant}?"
    assert envelope["meta"]["ending"] == "not_started"
    assert ran.stderr == b""


def test_the_earlier_names_of_the_verbs_of_mcp_are_refused_with_what_to_write(shotclock: Any, validate_envelope: Any):
    for line, verb in {"tools -- true": "tools", "call work -- true": "call", "calls --failed": "log"}.items():
        ran = shotclock(*line.split())
        error = validate_envelope(ran.json())["error"]
        assert (ran.code, error["code"], error["suggestion"]) == (2, "ARG_ERROR", f"write `shotclock mcp {verb}`")


def test_a_word_like_nothing_gets_the_list(shotclock: Any, validate_envelope: Any):
    envelope = validate_envelope(shotclock("qqqq").json())
    assert all(name in envelope["error"]["message"] for name in INDEX)


@pytest.mark.parametrize(
    "words",
    [
        ["--json", "errors", "TIMEOUT"],
        ["--timeout", "5s", "errors", "TIMEOUT"],
        ["--timeout=5s", "--json", "errors", "TIMEOUT"],
        ["--json", "--timeout", "5s", "errors", "TIMEOUT"],
    ],
    ids=" ".join,
)
def test_options_may_stand_before_the_subcommand(words: list[str], shotclock: Any, validate_envelope: Any):
    ran = shotclock(*words)
    envelope = validate_envelope(ran.json())
    assert (ran.code, envelope["data"]["errors"][0]["code"]) == (0, "TIMEOUT")
    assert envelope["meta"]["timeout_ms"] == (5_000 if any("5s" in word for word in words) else 30_000)


def test_options_may_stand_before_a_verb_and_before_exec(
    shotclock: Any, validate_envelope: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("SHOTCLOCK_HOME", str(tmp_path / "home"))
    assert validate_envelope(shotclock("--json", "inbox", "list").json())["meta"]["command"] == "inbox list"
    assert validate_envelope(shotclock("inbox", "--limit", "5", "list").json())["ok"]
    ran = shotclock("--timeout", "5s", "--json", "exec", "--", "printf", "hello")
    assert validate_envelope(ran.json())["data"]["stdout"] == "hello"


def test_an_option_that_no_subcommand_has_is_named_where_there_is_none(shotclock: Any, validate_envelope: Any):
    ran = shotclock("--jsno")
    [mistake] = validate_envelope(ran.json())["error"]["errors"]
    assert (ran.code, mistake) == (2, {"field": "--jsno", "message": "unknown option; did you mean --json?"})


def test_every_mistake_is_told_at_once(shotclock: Any, validate_envelope: Any):
    ran = shotclock("errors", "--jsno", "TIMEOUT", "--tarce", "extra", "--timeout", "fast")
    envelope = validate_envelope(ran.json())
    assert ran.code == 2
    assert {mistake["field"] for mistake in envelope["error"]["errors"]} == {"--jsno", "--tarce", "timeout"}
    assert envelope["error"]["phase"] == "validation"


@pytest.mark.parametrize(
    ("words", "field"),
    [
        (["errors", "--timeout"], "timeout"),
        (["errors", "--timeout", "-5s"], "timeout"),
        (["errors", "--timeout", "30"], "timeout"),
        (["errors", "--timeout", "1s", "--timeout", "2s"], "timeout"),
        (["errors", "--json=perhaps"], "json"),
        (["help", "nothing"], "subcommand"),
        (["__complete", "x"], "subcommand"),
    ],
)
def test_bad_words_are_an_envelope_and_never_a_panel(
    words: list[str], field: str, shotclock: Any, validate_envelope: Any
):
    ran = shotclock(*words)
    envelope = validate_envelope(ran.json())
    assert ran.code == 2
    assert [mistake["field"] for mistake in envelope["error"]["errors"]] == [field]
    assert ran.stderr == b""


def test_a_mistake_on_a_terminal_is_one_line_on_stderr(on_terminal: Any):
    seen = on_terminal("docter", streams=("stdout",))
    assert seen.code == 2
    assert seen.screen == ""
    assert b"did you mean doctor?" in seen.stderr


# --- where the envelope goes ----------------------------------------------------------------------


def test_the_version_is_a_line_everywhere_and_data_where_it_is_asked_for(
    shotclock: Any, on_terminal: Any, validate_envelope: Any
) -> None:
    from shotclock import __version__

    assert shotclock("--version").stdout.decode() == f"shotclock {__version__}\n"
    assert on_terminal("--version", streams=("stdout",)).screen == f"shotclock {__version__}\n"
    for words in (("--version", "--json"), ("--format", "json", "--version")):
        assert validate_envelope(shotclock(*words).json())["data"] == {"version": __version__}


def test_every_response_has_the_clock_it_ran_under(shotclock: Any, validate_envelope: Any):
    assert validate_envelope(shotclock("errors").json())["meta"]["timeout_ms"] == 30_000
    assert validate_envelope(shotclock("errors", "--timeout", "5s").json())["meta"]["timeout_ms"] == 5_000
    assert validate_envelope(shotclock("errors", "--timeout", "0").json())["meta"]["timeout_ms"] == 0
    assert validate_envelope(shotclock("nothing").json())["meta"]["timeout_ms"] == 30_000


def test_a_callers_deadline_is_inherited(shotclock: Any, validate_envelope: Any):
    ran = shotclock("errors", env={"SHOTCLOCK_REMAINING_MS": "0"})
    assert ran.code == 10
    assert validate_envelope(ran.json())["error"]["code"] == "NO_TIME_LEFT"
    ran = shotclock("errors", env={"SHOTCLOCK_REMAINING_MS": "10000"})
    envelope = validate_envelope(ran.json())
    assert envelope["meta"]["timeout_ms"] < 10_000
    assert [warning["code"] for warning in envelope["warnings"]] == ["DEADLINE_INHERITED"]


def test_a_reader_that_leaves_early_is_not_our_failure(start: Any, tmp_path: Path):
    import os

    reading, writing = os.pipe()
    os.close(reading)
    running = start("errors", stdout=writing)
    os.close(writing)
    assert running.ends() == 0
    assert running.stderr == b""
