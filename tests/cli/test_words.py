"""Two readers of one command line: what the quick one takes, cyclopts takes to mean the same."""

import inspect
from typing import Annotated, Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shotclock import App
from shotclock.cli import commands, inbox_words, job, surface, token
from shotclock.cli.understanding import understand
from shotclock.cli.words import Parameter, Parsed, Words, read_plainly


def app_words() -> Words:
    app = App("program")

    @app.command(interruption=True, destructive=True, mutates=True)
    def mixed(n: int, name: str, sizes: list[int], *, deep: bool = False, unit: Literal["s", "ms"] = "s") -> None: ...

    @app.command
    def listed(sizes: list[int], *, tag: tuple[str, ...] = (), shape: dict[str, int] | None = None) -> None: ...

    @app.command
    def odd(_under: str = "", camelCase: str = "", x__y: float = 0, json_file: str = "") -> None: ...

    return surface._vocabulary(app.catalogue())


VOCABULARIES = {
    "shotclock": commands.WORDS,
    "inbox": inbox_words.vocabulary(),
    "token": token._vocabulary(),
    "job": job._vocabulary(["shotclock"]),
    "an app": app_words(),
}
# What is special to one of the readers, or might be.
VALUES = st.one_of(
    st.sampled_from(["a", "agent", "json", "s", "pending"]),
    st.sampled_from('none None null true yes 0 -1 1.5 -x - -- --no-json [1] [] {} {"a":1} = a=b a,b '.split(" ")),
    st.text(max_size=3),
)


def same(plain: Parsed, thorough: Parsed) -> bool:
    if plain.wants_version:
        return thorough.wants_version
    for parsed in (plain, thorough):
        parsed.arguments.apply_defaults()
    return plain.function is thorough.function and plain.arguments.arguments == thorough.arguments.arguments


@st.composite
def lines(draw: st.DrawFn) -> tuple[Words, list[str]]:
    words = VOCABULARIES[draw(st.sampled_from(list(VOCABULARIES)))]
    name = draw(st.sampled_from(list(words.commands)))
    names = [f"--{each.replace('_', '-')}" for each in _parameters(words, name)]
    option = st.sampled_from([*names * 3, "--json", "--timeout", "--as", "--for", "-j", "--js"])
    piece = st.one_of(
        st.tuples(option),
        st.tuples(option, VALUES),
        st.tuples(VALUES),
        st.tuples(st.builds("{}={}".format, option, VALUES)),
    )
    return words, [name, *(word for words in draw(st.lists(piece, max_size=3)) for word in words)]


def _parameters(words: Words, name: str) -> list[str]:
    return list(inspect.signature(words.commands[name].function).parameters)


@pytest.mark.slow
@settings(max_examples=400, deadline=None)
@given(lines())
def test_what_is_read_plainly_cyclopts_reads_alike(line: tuple[Words, list[str]]) -> None:
    words, said = line
    plain = read_plainly(words, said)
    if plain is not None:
        thorough, mistakes = understand(words, said, help_hint="")
        assert not mistakes
        assert thorough is not None and same(plain, thorough), (plain, thorough)


@pytest.mark.parametrize(
    ("vocabulary", "line"),
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
        ("an app", "odd --json-file x"),
        ("an app", "listed --sizes [1,2] --shape {}"),
    ],
)
def test_what_agents_say_is_read_plainly_and_alike(vocabulary: str, line: str) -> None:
    words = VOCABULARIES[vocabulary]
    plain = read_plainly(words, line.split())
    assert plain is not None
    thorough, mistakes = understand(words, line.split(), help_hint="")
    assert not mistakes
    assert thorough is not None and same(plain, thorough)


def test_a_type_that_is_not_known_is_left_to_cyclopts() -> None:
    words = Words("w", "", "")

    @words.command()
    def count(n: int = 1, *, limit: Annotated[int, Parameter(metavar="N")] = 1, plain: bool = False) -> None: ...

    assert read_plainly(words, ["count", "--limit", "3"]) is None
    assert read_plainly(words, ["count", "3"]) is None
    assert read_plainly(words, ["count", "--plain"]) is not None
