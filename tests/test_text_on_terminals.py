"""Text on a terminal, JSON elsewhere, and `--format` on either side of every subcommand."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from shotclock.main import INDEX, load, main, table
from shotclock.terminal.parser import CommandTable, Subcommand, find_command
from shotclock.wrap import cli_install as wrap_install
from tests.command_line import COLOUR, ESCAPES

pytestmark = pytest.mark.usefixtures("no_survivors")

LIMIT_S = 60.0  # `doctor` and `run` start processes, on a busy machine
FLOW = "name: works\nsteps:\n  a: {exec: echo hello}\noutputs: {said: '{{ outputs.a }}'}\n"
# What to call, and a part of what a person reads.
CALLS = {
    "errors TIMEOUT": "what it means",
    "check works.yaml": "works.yaml: OK",
    "plan works.yaml": "at worst",
    "schema": '"$schema"',
    "report": "works",
    "report first": "works succeeded",
    "doctor": "what it cannot catch",
    "prune --dry-run": "would delete 0 runs",
    "token list": "no tokens",
    "wrap status cursor": "cursor    project",
    "wrap install cursor --file servers.json --yes": "servers.json",
    "wrap remove cursor --file servers.json --yes": "servers.json",
    "job list": "no jobs",
    "inbox list": "no proposal waits",
    "inbox audit": "no entries",
    "ui click --text Save --dry-run": '"dryRun"',
    "run works.yaml": '"said": "hello"',
    "--version": "shotclock ",
}
# Every call is made in the first two.
ENVIRONMENTS = {"plain": {}, "NO_COLOR": {"NO_COLOR": "1"}, "CI": {"CI": "true"}, "dumb": {"TERM": "dumb"}}


@pytest.fixture(autouse=True)
def a_terminal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shotclock: Any) -> None:
    """A terminal with colours, and a store with one run."""
    for name in ("CI", "NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setenv("SHOTCLOCK_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    Path("works.yaml").write_text(FLOW)
    Path("servers.json").write_text('{"mcpServers": {"web": {"url": "http://127.0.0.1:1"}}}')


def text_of(screen: str) -> str:
    """What is read there: without escape sequences and line ends, and with every number the same."""
    return " ".join(re.sub(r"[\d.]+ ?(ms|[smhdkMGB]+\b)?", "0", ESCAPES.sub("", screen)).split())


@pytest.mark.slow
def test_on_a_terminal_there_is_text_and_no_color_takes_only_its_colour(on_terminal: Any, shotclock: Any) -> None:
    assert shotclock("run", "works.yaml", "--run-id", "first").code == 0
    coloured = set()
    for line, part in CALLS.items():
        texts = {}
        environments = list(ENVIRONMENTS.items())
        for name, env in environments if line in ("errors TIMEOUT", "doctor") else environments[:2]:
            seen = on_terminal(*line.split(), streams=("stdout",), within_s=LIMIT_S, env=env)
            assert part in ESCAPES.sub("", seen.screen), (line, name, seen)
            assert '"meta":' not in seen.screen, (line, name)
            texts[name] = text_of(seen.screen)
            if COLOUR.search(seen.screen):
                coloured.add((name, line))
            if name == "dumb":
                assert "\x1b" not in seen.screen, line
        if line.split()[0] not in ("report", "run", "doctor", "ui"):  # with times, processes of others, random ids
            assert len(set(texts.values())) == 1, (line, texts)
    assert {name for name, _ in coloured} == {"plain", "CI"}
    assert ("CI", "doctor") in coloured


@pytest.mark.slow
def test_the_format_that_was_asked_for_is_given_on_a_terminal_and_off_one(
    on_terminal: Any, shotclock: Any, validate_envelope: Any
) -> None:
    assert shotclock("run", "works.yaml", "--run-id", "first").code == 0
    for line, part in CALLS.items():
        words, streams = line.split(), ("stdout",)
        seen = on_terminal(*words, "--format", "json", streams=streams, within_s=LIMIT_S)
        assert validate_envelope(json.loads(seen.screen))["ok"], line
        ran = shotclock("--format", "text", *words)
        assert part in ran.stdout.decode() and b"\x1b" not in ran.stdout, line
        if line != "--version":  # a line everywhere
            assert validate_envelope(shotclock(*words).json())["ok"], f"{line}: JSON is the default off a terminal"


@pytest.mark.slow
def test_every_refusal_is_in_the_format_that_was_asked_for(
    on_terminal: Any, shotclock: Any, validate_envelope: Any
) -> None:
    for line in ("frob", "inbox", "inbox frob", "inbox show p-none", "errors --frob", "serve nowhere.py", "report x"):
        words = line.split()
        seen = on_terminal("--format", "json", *words, streams=("stdout",))
        assert not validate_envelope(json.loads(seen.screen))["ok"], line
        seen = on_terminal(*words, streams=("stdout",))
        assert seen.screen == "" and b"shotclock: " in seen.stderr, line
        ran = shotclock(*words, "--format=text")
        assert (ran.code, ran.stdout) == (seen.code, b"") and b"shotclock: " in ran.stderr, line


@pytest.mark.slow
def test_off_a_terminal_no_name_of_a_table_is_cut(shotclock: Any, on_terminal: Any, tmp_path: Path) -> None:
    first, second = (f"test-ubuntu-latest-python-3.{number}-with-postgres" for number in (11, 12))
    flow = tmp_path / "flow.yaml"
    flow.write_text(
        f"{{timeout: 20s, steps: {{{first}: {{exec: echo a}}, {second}: {{exec: echo a, depends_on: {first}}}}}}}"
    )
    lines = shotclock("plan", flow, "--format", "text", env={"COLUMNS": None}).stdout.decode().splitlines()
    assert [line.split()[0] for line in lines[1:3]] == [first, second] and lines[2].split()[2] == first
    assert lines[3] == f"  {first}: the run leaves it 19.5s of its 1m"


def test_help_is_as_wide_as_a_narrow_terminal_and_a_hundred_columns_elsewhere(on_terminal: Any, shotclock: Any) -> None:
    for line in ("run --help", "exec --help", "wrap --help", "timeout --help"):
        words = line.split()
        narrow = on_terminal(*words, streams=("stdout",), env={"COLUMNS": "80"}).screen.splitlines()
        wide = shotclock(*words, env={"COLUMNS": "80"}).stdout.decode().splitlines()
        for lines, least, most in ((narrow, 60, 80), (wide, 80, 100)):  # usage, headings and examples are not broken
            described = [each for each in lines if each.startswith("  ") and not each.startswith("  shotclock ")]
            assert least < max(map(len, described)) <= most, line


@pytest.mark.slow
def test_the_text_of_a_refused_workflow_file_names_each_mistake_once_and_the_command_that_converts_it(
    shotclock: Any, tmp_path: Path
) -> None:
    flow, foreign = tmp_path / "flow.yaml", tmp_path / "visor.yml"
    flow.write_text("steps:\n  a: {exec: 'true', timeot: 5}\n")
    foreign.write_text("steps: {a: {type: noop, group: x}}\n")
    for words in ("run", "check", "plan", "advise", "notify test"):
        ran = shotclock(*words.split(), flow, "--format", "text")
        text = " ".join((ran.stdout + ran.stderr).decode().split())
        assert (ran.code, text.count("unknown key 'timeot'"), text.count("mean 'timeout'?")) == (2, 1, 1), (words, text)
    for command in ("run", "check", "plan"):
        ran = shotclock(command, foreign, "--format", "text")
        assert f"convert it with `shotclock import {foreign}`" in ran.stderr.decode(), command


def load_verbs(name: str) -> Subcommand | CommandTable:
    return wrap_install.TABLE if name == "wrap" else load(name)


def leaves() -> Iterator[tuple[list[str], Subcommand]]:
    for name in INDEX:
        loaded = load_verbs(name)
        if isinstance(loaded, CommandTable):
            yield from (([name, command.name], command) for command in loaded.commands)
        else:
            yield [name], loaded


def read_line(words: list[str]) -> Any:
    """Read a line as the program does, table by table."""
    line = find_command(table(), words)
    assert line.command is not None, words
    loaded = load_verbs(line.command.name)
    if isinstance(loaded, CommandTable):
        line = find_command(loaded, line.words)
        assert line.command is not None, words
        loaded = line.command
    return loaded.read(line.words)


def test_every_subcommand_that_answers_in_our_form_takes_the_format_on_either_side() -> None:
    for words, command in leaves():
        if command.name in ("timeout", "hook", "demo"):  # the forms of GNU and the agents; a show for people
            continue
        for form in ("text", "json"):
            for typed in (["--format", form], [f"--format={form}"]):
                for place in range(len(words) + 1):
                    line = [*words[:place], *typed, *words[place:]]
                    reading = read_line(line)
                    assert (reading.format, reading.command.name) == (form, command.name), line
                    assert "format" not in str(reading.mistakes), line
        assert read_line([*words, "--json"]).format == "json"
        for wrong in (["--format", "yaml"], ["--format"], ["--format=text", "--json"]):
            assert "format" in {mistake["field"] for mistake in read_line([*words, *wrong]).mistakes}, (words, wrong)


@pytest.mark.slow
def test_the_format_of_exec_is_its_json_and_timeout_has_none(shotclock: Any, validate_envelope: Any) -> None:
    for words in (["--format", "json", "exec"], ["exec", "--format", "json"], ["exec", "--format=json"]):
        envelope = validate_envelope(shotclock(*words, "--", "sh", "-c", "echo hello; exit 3").json())
        assert (envelope["data"]["stdout"], envelope["meta"]["exit_code"]) == ("hello\n", 1), words
    for words in (["exec"], ["--format", "text", "exec"], ["exec", "--format=text", "--report", "none"]):
        ran = shotclock(*words, "--", "sh", "-c", "echo hello --format json; exit 3")
        assert (ran.code, ran.stdout) == (3, b"hello --format json\n"), words
    ran = shotclock("exec", "echo", "--format", "json")
    assert ran.stdout == b"--format json\n", "a word of the command"
    ran = shotclock("--format", "json", "exec", "--report", "json", "--", "true")
    assert ran.code == 2 and "exclude each other" in ran.json()["error"]["message"]
    for words in (["--format", "json", "timeout", "5", "true"], ["timeout", "--format", "json", "5", "true"]):
        ran = shotclock(*words)
        assert (ran.code, ran.stdout) == (125, b"")
        assert ran.stderr.startswith(b"timeout: option --format not recognized\n")


@pytest.mark.slow
def test_help_goes_to_stdout_whatever_format_is_asked_for(capfd: pytest.CaptureFixture[str]) -> None:
    lines = {" ".join(words): [*words, "--help"] for words, _ in leaves()}
    lines |= {"SUBCOMMAND": ["--format", "json", "--help"], "SUBCOMMAND ": ["--help", "--json"]}
    for name, words in (lines | {"SUBCOMMAND  ": ["help", "--frob"]}).items():
        assert main(words) == 0
        shown = capfd.readouterr()
        assert shown.err == "" and shown.out.startswith(f"Usage: shotclock {name.strip()} "), words
