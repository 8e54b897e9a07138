"""One reader of command lines: what is read, and every mistake at once. All tables are read by it."""

import json
from typing import Any, Literal

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from shotclock import App
from shotclock.cli import app_cli, inbox, job_and_token
from shotclock.cli import subcommand_options as commands
from shotclock.cli.exec import COMMAND as EXEC
from shotclock.cli.exec import HELP
from shotclock.cli.parser import (
    Command,
    CommandTable,
    Reading,
    argument,
    command_help,
    duration,
    flag,
    option,
    read,
    read_command,
    table_help,
    whole_number,
)


def app_table() -> CommandTable:
    app = App("program")

    @app.command(interruption=True, destructive=True, mutates=True)
    def mixed(n: int, name: str, sizes: list[int], *, deep: bool = False, unit: Literal["s", "ms"] = "s") -> None: ...

    @app.command
    def listed(sizes: list[int], *, tag: tuple[str, ...] = (), shape: dict[str, int] | None = None) -> None: ...

    @app.command
    def odd(_under: str = "", camelCase: str = "", x__y: float = 0, json_file: str = "") -> None: ...

    return app_cli.table_of(app.catalogue())


TABLES = {
    "shotclock": commands.TABLE,
    "inbox": inbox.TABLE,
    "token": job_and_token.TOKEN_TABLE,
    "job": job_and_token.job_table(["shotclock"]),
    "an app": app_table(),
}
DEMO = CommandTable(
    "demo",
    "A table to read with.",
    (
        Command(
            "copy",
            "Copy one thing to another.",
            (
                argument("source", "From here.", required=True),
                argument("target", "To there."),
                option("--limit", "N", "So many.", read=whole_number, default="3"),
                option("--tag", "TEXT", "A mark.", repeats=True),
                option("--mode", "MODE", "How.", choices=("fast", "slow")),
                duration("--idle", "So long."),
                flag("--deep", "All of it.", negatable=True),
                flag("--json", "As JSON."),
            ),
        ),
        Command("check", "Look.", (flag("--limit", "Here it has no value."), option("--deep", "N", "Here it has."))),
    ),
    has_version=True,
)


def reading_of(line: str | list[str], table: CommandTable = DEMO) -> Reading:
    return read_command(table, line.split() if isinstance(line, str) else line)


def said(line: str | list[str]) -> dict[str, Any]:
    reading = reading_of(line)
    assert not reading.mistakes
    return reading.given


def mistakes(line: str | list[str]) -> dict[str, str]:
    reading = reading_of(line)
    return {mistake["field"]: mistake["message"] for mistake in reading.mistakes}


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("copy a", {"source": "a"}),
        ("copy a b --deep", {"source": "a", "target": "b", "deep": True}),
        ("copy --deep a b", {"source": "a", "target": "b", "deep": True}),
        ("copy a --no-deep", {"source": "a", "deep": False}),
        ("copy a --deep=no", {"source": "a", "deep": False}),
        ("copy a --no-deep=false", {"source": "a", "deep": True}),
        ("copy a --limit 7", {"source": "a", "limit": 7}),
        ("copy a --limit=-7", {"source": "a", "limit": -7}),
        ("copy a --limit -7", {"source": "a", "limit": -7}),
        ("copy a --idle 5s", {"source": "a", "idle": 5000}),
        ("copy a --tag x --tag=y --tag -z", {"source": "a", "tag": ["x", "y", "-z"]}),
        ("copy -- --deep -x", {"source": "--deep", "target": "-x"}),
        ("copy - -5", {"source": "-", "target": "-5"}),
        ("copy a --mode=fast", {"source": "a", "mode": "fast"}),
        ("--json copy a", {"source": "a", "json": True}),
        ("--limit 7 copy a", {"source": "a", "limit": 7}),
        ("--limit check --deep 1", {"limit": True, "deep": "1"}),
        ("--deep copy a", {"source": "a", "deep": True}),
        ("--deep copy check", {"source": "check", "deep": True}),
    ],
)
def test_options_and_arguments_are_read_as_argparse_would(line: str, expected: dict[str, Any]) -> None:
    assert said(line) == expected


def test_what_is_not_said_is_as_declared() -> None:
    values = reading_of("copy a").values
    assert values == {
        "source": "a", "target": None, "limit": 3, "tag": [], "mode": None, "idle": None, "deep": False, "json": False
    }  # fmt: skip


def test_words_with_spaces_are_no_options() -> None:
    assert said(["copy", "- a list", "--tag", "- x"]) == {"source": "- a list", "tag": ["- x"]}


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("copy", {"source": "SOURCE is missing"}),
        ("copy a --idel 5s", {"--idel": "unknown option; did you mean --idle?"}),
        ("copy a -i 5s", {"-i": "unknown option; see demo copy --help"}),
        ("copy a --lim 7", {"--lim": "unknown option; did you mean --limit?"}),
        ("copy a --idle", {"idle": "--idle needs a value"}),
        ("copy a --idle --deep", {"idle": "--idle needs a value"}),
        ("copy a --limit x", {"limit": "'x' is not a whole number"}),
        ("copy a --mode quick", {"mode": "'quick' is none of fast, slow"}),
        ("copy a --deep=perhaps", {"deep": "--deep takes no value, and 'perhaps' is neither true nor false"}),
        ("copy a --deep --no-deep", {"deep": "--no-deep was given before: leave one out"}),
        ("copy a --limit 1 --limit 2", {"limit": "--limit was given before: leave one out"}),
        ("copy a b c", {"arguments": "'c' is one too many"}),
        ("cpoy a", {"command": "there is no command 'cpoy'; did you mean copy?"}),
        ("xyz", {"command": "there is no command 'xyz'; there are copy, check and help"}),
        ("", {"command": "none given; there are copy, check and help"}),
        ("--nope", {"--nope": "unknown option; see demo --help"}),
        ("--json", {"command": "none given; there are copy, check and help"}),
    ],
)
def test_a_mistake_is_named_with_what_to_do(line: str, expected: dict[str, str]) -> None:
    assert mistakes(line) == expected


def test_what_stands_behind_version_is_called_an_option_only_where_it_is_one() -> None:
    table = CommandTable("demo", "", (), has_version=True)
    said = {each["field"]: each["message"] for each in reading_of("--version x --jsn", table).mistakes}
    assert said == {"arguments": "'x' is one too many", "--jsn": "unknown option; did you mean --json?"}


def test_a_verb_of_ui_without_ui_is_answered_with_the_whole_command() -> None:
    for name in ("wait", "snapshot", "wait-for-nav", "sleep", "click"):
        reading = read_command(TABLES["shotclock"], [name, "--timeout", "100"])
        assert reading.suggestion == f"that is `shotclock ui {name}`"
        assert reading.mistakes[0]["message"].endswith(f"; that is `shotclock ui {name}`")


def test_every_mistake_is_reported_at_once() -> None:
    line = "copy --limit x --mode quick --idle soon --deep=perhaps --nope 3 --tag"
    assert set(mistakes(line)) == {"limit", "mode", "idle", "deep", "--nope", "tag", "source"}


def test_a_required_option_that_is_misspelt_is_not_missing_as_well() -> None:
    table = CommandTable("t", "", (Command("go", "", (option("--title", "T", required=True),)),))
    assert [mistake["field"] for mistake in reading_of("go --titel x", table).mistakes] == ["--titel"]


@pytest.mark.parametrize(
    "line", ["--help", "-h", "help", "copy --help", "copy a -h --nope", "help copy", "--help copy"]
)
def test_help_can_be_asked_for_at_every_level(line: str) -> None:
    reading = reading_of(line)
    assert reading.wants == "help"
    assert (reading.command is not None) == ("copy" in line)


def test_an_argument_given_by_its_name_does_not_move_the_others() -> None:
    table = CommandTable("t", "", (Command("go", "", tuple(option(f"--{x}", "X", by_place=True) for x in "abc")),))
    assert reading_of("go 1 2 --c 3", table).given == {"a": "1", "b": "2", "c": "3"}
    assert reading_of("go --b 2 1", table).given == {"a": "1", "b": "2"}
    [mistake] = reading_of("go --a 1 2", table).mistakes
    assert mistake == {"field": "b", "message": "'2' comes after --a: write --b '2'"}


# --- all tables -----------------------------------------------------------------------------------------------


ALL = [(name, command.name) for name, table in TABLES.items() for command in table.commands if command.main is None]


@pytest.mark.parametrize(("table", "name"), ALL)
def test_the_help_of_every_command_names_each_of_its_parameters(table: str, name: str) -> None:
    command = TABLES[table].find(name)
    assert command is not None
    text = command_help(TABLES[table], command)
    assert text.startswith(f"Usage: {TABLES[table].name} {name} ")
    assert max(map(len, text.splitlines())) <= 110
    for parameter in command.parameters:
        assert (parameter.name if parameter.name[:2] == "--" else parameter.name.upper()) in text


@pytest.mark.parametrize("table", TABLES)
def test_the_help_of_every_table_names_each_of_its_commands(table: str) -> None:
    text = table_help(TABLES[table])
    assert all(f"\n  {name}" in text for name in TABLES[table].names)


def test_the_help_on_exec_names_each_of_its_options_with_its_value() -> None:
    for parameter in EXEC.parameters:
        assert f"\n  {parameter.name} {parameter.metavar}".rstrip() in HELP


@pytest.mark.parametrize(
    ("table", "line"),
    [
        ("shotclock", "run flow.yaml --timeout 5m --input a=1 --input b=2 --run-id=r1 --output json --json"),
        ("shotclock", "run --resume r1"),
        ("shotclock", "check flow.yaml --run-timeout 5m --timeout 1s"),
        ("shotclock", "report"),
        ("shotclock", "--version"),
        ("shotclock", "serve program.py:app --http 127.0.0.1:0"),
        ("inbox", "list --all --json"),
        ("inbox", "extend p1 2h"),
        ("inbox", "propose --title t --file a --choice b --choice c --as me"),
        ("token", "create me --role agent"),
        ("job", "wait j1 --budget 5s"),
        ("an app", "mixed 1 name --sizes 1 --sizes 2 --deep --unit ms --timeout 5s --budget 1s"),
        ("an app", "mixed 1 name 1 2 -3"),
        ("an app", "odd --json-file x --camelCase y"),
        ("an app", "listed --sizes [1,2] --shape {}"),
    ],
)
def test_what_agents_say_is_understood(table: str, line: str) -> None:
    assert reading_of(line, TABLES[table]).mistakes == []


VALUES = st.one_of(
    st.sampled_from(["a", "agent", "json", "s", "pending", "5s", "a=1"]),
    st.sampled_from('none true yes 0 -1 1.5 -x - -- --no-json [1] [] {} {"a":1} = a=b a,b '.split(" ")),
    st.text(max_size=3),
)


@st.composite
def lines(draw: st.DrawFn) -> tuple[str, list[str]]:
    table = draw(st.sampled_from(list(TABLES)))
    command = draw(st.sampled_from(TABLES[table].commands))
    names = [parameter.name for parameter in command.parameters]
    typed = st.sampled_from([*names * 3, "--json", "--timeout", "--as", "-j", "--js", "--help"])
    piece = st.one_of(
        st.tuples(typed),
        st.tuples(typed, VALUES),
        st.tuples(VALUES),
        st.tuples(st.builds("{}={}".format, typed, VALUES)),
    )
    return table, [command.name, *(word for words in draw(st.lists(piece, max_size=4)) for word in words)]


@given(lines())
@example(("shotclock", ["errors", "--", "--", "-"]))
def test_whatever_is_typed_is_read_to_its_end_and_every_mistake_has_a_field_and_a_message(
    line: tuple[str, list[str]],
) -> None:
    table, words = line
    reading = read_command(TABLES[table], words)
    assert reading.command is not None and reading.command.name == words[0]
    for mistake in reading.mistakes:
        assert set(mistake) == {"field", "message"} and mistake["field"] and mistake["message"]
    json.dumps(reading.mistakes)
    known = {parameter.key for parameter in reading.command.parameters}
    assert reading.given.keys() | reading.guessed.keys() <= known | {"json"}


@given(st.lists(st.text(min_size=1, max_size=4), max_size=4))
def test_what_comes_behind_two_dashes_is_never_an_option(words: list[str]) -> None:
    command = Command("take", "", (argument("words", repeats=True), flag("--deep")))
    assert read(command, ["--", *words], hint="").given == ({"words": words} if words else {})


@given(st.text(max_size=6))
def test_a_value_with_an_equals_sign_is_taken_as_it_is(text: str) -> None:
    command = Command("take", "", (option("--name", "TEXT"),))
    assert read(command, [f"--name={text}"], hint="").given == {"name": text}
