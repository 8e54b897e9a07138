"""The parser of command lines reads every table, and reports every mistake at once."""

import json
from typing import Any, Literal

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from shotclock import App
from shotclock.apps import cli as app_cli
from shotclock.main import INDEX, load
from shotclock.terminal.parser import (
    CommandTable,
    Option,
    ParsedLine,
    Subcommand,
    read_command,
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


LOADED = {name: load(name) for name in INDEX if name != "ui"}
TABLES = {
    "shotclock": CommandTable("shotclock", "", tuple(each for each in LOADED.values() if isinstance(each, Subcommand))),
    **{name: each for name, each in LOADED.items() if isinstance(each, CommandTable)},
    "an app": app_table(),
}
DEMO = CommandTable(
    "demo",
    "A table to read with.",
    (
        Subcommand(
            "copy",
            "Copy one thing to another.",
            (
                Option.argument("source", "From here.", missing="missing SOURCE"),
                Option.argument("target", "To there."),
                Option.taking("--limit", "N", "So many.", read=whole_number, default="3"),
                Option.taking("--tag", "TEXT", "A mark.", repeats=True),
                Option.taking("--mode", "MODE", "How.", choices=("fast", "slow")),
                Option.duration("--idle", "So long."),
                Option.flag("--deep", "All of it.", negatable=True),
                Option.flag("--json", "As JSON."),
            ),
        ),
        Subcommand(
            "check",
            "Look.",
            (Option.flag("--limit", "Here it has no value."), Option.taking("--deep", "N", "Here it has.")),
        ),
    ),
    has_version=True,
)


def reading_of(line: str | list[str], table: CommandTable = DEMO) -> ParsedLine:
    return read_command(table, line.split() if isinstance(line, str) else line)


def said(line: str | list[str]) -> dict[str, Any]:
    reading = reading_of(line)
    assert not reading.mistakes
    return reading.typed


def mistakes(line: str | list[str]) -> dict[str, str]:
    reading = reading_of(line)
    return {mistake["field"]: mistake["message"] for mistake in reading.mistakes}


def test_options_and_arguments_are_read_as_argparse_would() -> None:
    table: list[tuple[str, dict[str, Any]]] = [
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
    ]
    for line, expected in table:
        assert said(line) == expected, line


def test_what_is_not_said_is_as_declared() -> None:
    values = reading_of("copy a").values
    assert values == {
        "source": "a", "target": None, "limit": 3, "tag": [], "mode": None, "idle": None, "deep": False, "json": False
    }  # fmt: skip


def test_words_with_spaces_are_no_options() -> None:
    assert said(["copy", "- a list", "--tag", "- x"]) == {"source": "- a list", "tag": ["- x"]}


def test_a_mistake_is_named_with_what_to_do() -> None:
    table: list[tuple[str, dict[str, str]]] = [
        ("copy", {"source": "missing SOURCE"}),
        ("copy a --idel 5s", {"--idel": "unknown option; did you mean --idle?"}),
        ("copy a -i 5s", {"-i": "unknown option; see demo copy --help"}),
        ("copy a --lim 7", {"--lim": "unknown option; did you mean --limit?"}),
        ("copy a --idle", {"idle": "--idle needs a value"}),
        ("copy a --idle --deep", {"idle": "--idle needs a value"}),
        ("copy a --limit x", {"limit": "'x' is not a whole number"}),
        ("copy a --mode quick", {"mode": "'quick' is none of fast, slow"}),
        ("copy a --deep=perhaps", {"deep": "--deep is a flag: 'perhaps' is neither true nor false"}),
        ("copy a --deep --no-deep", {"deep": "--no-deep was given before: leave one out"}),
        ("copy a --limit 1 --limit 2", {"limit": "--limit was given before: leave one out"}),
        ("copy a b c", {"arguments": "unexpected argument 'c'"}),
        ("cpoy a", {"command": "there is no command 'cpoy'; did you mean copy?"}),
        ("xyz", {"command": "there is no command 'xyz'; there are copy, check and help"}),
        ("", {"command": "missing COMMAND; there are copy, check and help"}),
        ("--nope", {"--nope": "unknown option; see demo --help"}),
        ("--json", {"command": "missing COMMAND; there are copy, check and help"}),
        ("help cpoy", {"command": "there is no command 'cpoy'; did you mean copy?"}),
    ]
    for line, expected in table:
        assert mistakes(line) == expected, line


def test_every_mistake_is_reported_at_once() -> None:
    line = "copy --limit x --mode quick --idle soon --deep=perhaps --tag"
    assert set(mistakes(line)) == {"limit", "mode", "idle", "deep", "tag", "source"}


def test_the_value_of_an_unknown_option_is_no_argument() -> None:
    assert set(mistakes("copy a b --nope c")) == {"--nope"}
    assert set(mistakes("copy a --jsn b")) == {"--jsn"}
    assert set(mistakes("copy --nope a --limit x")) == {"--nope", "limit", "source"}


def test_a_required_option_that_is_misspelt_is_not_missing_as_well() -> None:
    table = CommandTable("t", "", (Subcommand("go", "", (Option.taking("--title", "T", missing="missing --title"),)),))
    assert [mistake["field"] for mistake in reading_of("go --titel x", table).mistakes] == ["--titel"]


@pytest.mark.parametrize(
    "line", ["--help", "-h", "help", "copy --help", "copy a -h --nope", "help copy", "--help copy"]
)
def test_help_can_be_asked_for_at_every_level(line: str) -> None:
    reading = reading_of(line)
    assert reading.wants == "help"
    assert (reading.command is not None) == ("copy" in line)


def test_an_argument_given_by_its_name_does_not_move_the_others() -> None:
    table = CommandTable(
        "t", "", (Subcommand("go", "", tuple(Option.taking(f"--{x}", "X", by_place=True) for x in "abc")),)
    )
    assert reading_of("go 1 2 --c 3", table).typed == {"a": "1", "b": "2", "c": "3"}
    assert reading_of("go --b 2 1", table).typed == {"a": "1", "b": "2"}
    for line in ("go --a 1 2", "go 2 --a 1"):
        [mistake] = reading_of(line, table).mistakes
        assert mistake == {"field": "b", "message": "'2' is unclear beside --a: write --b '2'"}


def test_a_format_of_the_commands_own_stays_its_own_and_a_command_may_be_called_json() -> None:
    app = App("exporter")

    @app.command
    def export(format: str) -> None: ...

    @app.command
    def json(name: str = "") -> None: ...

    table = app_cli.table_of(app.catalogue())
    for line, name, typed, form in (
        ("export --format csv", "export", {"format": "csv"}, None),
        ("--format csv export", "export", {"format": "csv"}, None),
        ("export --format json --json", "export", {"format": "json", "--json": True}, "json"),
        ("--format json json", "json", {"--json": True}, "json"),
        ("--format text json x", "json", {"name": "x"}, "text"),
    ):
        reading = reading_of(line, table)
        assert reading.command is not None and not reading.mistakes, line
        assert (reading.command.name, reading.typed, reading.format) == (name, typed, form), line
    export_command, json_command = table.commands[:2]
    assert "text, also off a terminal" not in export_command.help("exporter")
    assert "text, also off a terminal" in json_command.help("exporter")


# --- all tables -----------------------------------------------------------------------------------------------


def test_the_help_of_every_command_names_each_of_its_options() -> None:
    for table in TABLES.values():
        for command in table.commands:
            text = command.help(table.name)
            assert text.startswith(f"Usage: {table.name} {command.name} ")
            assert max(map(len, text.splitlines())) <= 110, text
            for each in command.own:
                assert (each.name if each.name[:2] == "--" else each.name.upper()) in text


def test_the_help_of_every_table_names_each_of_its_commands() -> None:
    for table in TABLES.values():
        text = table.help()
        assert all(f"\n  {name}" in text for name in table.names)


def test_every_option_has_a_help_text() -> None:
    for name in INDEX:
        found = load(name)
        for command in found.commands if isinstance(found, CommandTable) else [found]:
            assert all(each.help for each in command.own), (name, command.name)


def test_common_command_lines_are_understood() -> None:
    lines = [
        ("shotclock", "run flow.yaml --timeout 5m --input a=1 --input b=2 --run-id=r1 --output json --json"),
        ("shotclock", "run --resume r1"),
        ("shotclock", "check flow.yaml --run-timeout 5m --timeout 1s"),
        ("shotclock", "report"),
        ("shotclock", "serve program.py:app --http 127.0.0.1:0"),
        ("inbox", "list --all --json"),
        ("inbox", "extend p1 2h"),
        ("inbox", "propose --title t --choice b --choice c --as me"),
        ("token", "create me --role agent"),
        ("job", "wait j1 --budget 5s"),
        ("an app", "mixed 1 name --sizes 1 --sizes 2 --deep --unit ms --timeout 5s --budget 1s"),
        ("an app", "mixed 1 name 1 2 -3"),
        ("an app", "odd --json-file x --camelCase y"),
        ("an app", "listed --sizes [1,2] --shape {}"),
    ]
    for table, line in lines:
        assert reading_of(line, TABLES[table]).mistakes == [], line


VALUES = st.one_of(
    st.sampled_from(["a", "agent", "json", "s", "pending", "5s", "a=1"]),
    st.sampled_from('none true yes 0 -1 1.5 -x - -- --no-json [1] [] {} {"a":1} = a=b a,b '.split(" ")),
    st.text(max_size=3),
)


@st.composite
def lines(draw: st.DrawFn) -> tuple[str, list[str]]:
    table = draw(st.sampled_from(list(TABLES)))
    command = draw(st.sampled_from(TABLES[table].commands))
    names = [parameter.name for parameter in command.own]
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
    command = TABLES[table].find(words[0])
    assert command is not None
    reading = command.read(words[1:])
    assert reading.command is not None and reading.command.name == words[0]
    for mistake in reading.mistakes:
        assert set(mistake) == {"field", "message"} and mistake["field"] and mistake["message"]
    json.dumps(reading.mistakes)
    known = {parameter.key for parameter in reading.command.own}
    assert reading.typed.keys() <= known | {reading.command.rest}


@given(st.lists(st.text(min_size=1, max_size=4), max_size=4))
def test_what_comes_behind_two_dashes_is_never_an_option(words: list[str]) -> None:
    command = Subcommand("take", "", (Option.argument("words", repeats=True), Option.flag("--deep")))
    assert command.read(["--", *words]).typed == ({"words": words} if words else {})


@given(st.text(max_size=6))
def test_a_value_with_an_equals_sign_is_taken_as_it_is(text: str) -> None:
    command = Subcommand("take", "", (Option.taking("--name", "TEXT"),))
    assert command.read([f"--name={text}"]).typed == {"name": text}
