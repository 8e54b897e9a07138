"""Expressions of GitHub Actions and Go templates of Taskfiles, one by one."""

import pytest

from shotclock.workflow.foreign.actions_expressions import Converter, Term, parse, static
from shotclock.workflow.foreign.common import Unconvertible, literal, literal_variable
from shotclock.workflow.foreign.taskfile_templates import Expression, Value, template_of, value_of
from shotclock.workflow.templates import evaluate, render_text

SCOPE = {"x": "Main", "n": "7", "yes": True, "empty": "", "items": ["a", "b"], "word": "false"}
KINDS = {"yes": "bool", "items": "list"}


def lookup(parts: list[object]) -> Term:
    name = str(parts[0])
    if name not in SCOPE:
        raise Unconvertible(f"reads {name}")
    return Term(name, KINDS.get(name, "text"))


CONVERTER = Converter(lookup, lambda name: static(name != "failure"))

# Conditions, and whether they hold there.
CONDITIONS = {
    "x == 'main'": True,
    "x != 'MAIN'": False,
    "'Main' == x && n == 7": True,
    "n > 6 && n <= 7.0": True,
    "empty == '' || x == 'other'": True,
    "!empty": True,
    "empty": False,
    "word": True,  # a text is true there unless it is empty
    "yes && !(x == 'main')": False,
    "contains(x, 'AI')": True,
    "contains(fromJSON('[\"a\", \"b\"]'), 'b')": True,
    "startsWith(x, 'ma') && !endsWith(x, 'ma')": True,
    "format('{0}-{1}{{}}', x, n) == 'main-7{}'": True,
    "join(items, '+') == 'A+B'": True,
    "'it''s' == 'IT''S'": True,
    "true == 'true'": False,
    "null == ''": True,
    "success() && failure() || always()": True,
    "(x == 'a' && 'one' || 'two') == 'two'": True,
    "0x10 == 16": True,
}


def test_a_condition_holds_where_it_does_there() -> None:
    for text, wanted in CONDITIONS.items():
        code = CONVERTER.condition(parse(text))
        held = code if isinstance(code, bool) else evaluate(code, dict(SCOPE))
        assert held is wanted, f"{text}: {code}"


@pytest.mark.parametrize(
    "text",
    [
        "x ==",
        "(x",
        "x y",
        "x['a'",
        "nothing",
        "hashFiles('a')",
        "x == yes",
        "format('{1}', x)",
        "",
        "a.b.",
        "fromJSON('[')",
    ],
)
def test_an_expression_that_cannot_be_said_here_is_refused(text: str) -> None:
    with pytest.raises(Unconvertible):
        CONVERTER.condition(parse(text))


def test_text_of_another_language_is_no_template_here() -> None:
    for text in ("{{.Names}}", "{% raw %}", "{", "a{", "{{{", "{%{{", "}} %}", "{# x #}", "{% endraw %}{{ 1 }}"):
        assert render_text(literal(text) + "{{ x }}", {"x": "!"})[0] == f"{text}!"
    assert render_text(literal_variable("${HOME} $HOME"), {})[0] == "${HOME} $HOME"
    assert "${" not in literal_variable("${HOME}")


def known(name: str) -> Value:
    return {"NAME": "shop", "EMPTY": "", "LIST": ["a", "b"], "LATER": Expression("outputs['later']")}[name]


TEMPLATES = {
    "plain": "plain",
    "{{.NAME}}-{{ .NAME | upper }}": "shop-SHOP",
    '{{.EMPTY | default "x"}}{{default "y" .NAME}}': "xshop",
    '{{.NAME | replace "s" "S" | quote}}': '"Shop"',
    '{{join "," .LIST}}': "a,b",
    '{{join "-" (splitList "h" .NAME)}}': "s-op",
    "{{`{{.X}}`}}": "{{.X}}",
    '{{"a\\"b"}}': 'a"b',
    "{{- .NAME -}}": "shop",
    "{{.NAME | shellQuote}}": "shop",
}


def test_a_known_template_is_filled_in() -> None:
    assert {text: value_of(text, known) for text in TEMPLATES} == TEMPLATES


def test_a_value_of_the_run_becomes_a_template_of_ours() -> None:
    assert template_of("v{{.LATER}} {{.NAME}} {{`{{`}}", known) == (
        "v{{ outputs['later'] }} shop {% raw %}{{{% endraw %}"
    )
    assert template_of('{{.LATER | default "none" | upper}}', known) == "{{ ((outputs['later'] or 'none') | upper) }}"


@pytest.mark.parametrize(
    "text", ["{{if .X}}", "{{.NAME", "{{range .LIST}}", "{{.LIST}}", "{{}}", "{{.NAME .NAME}}", "{{(.NAME}}"]
)
def test_a_template_that_cannot_be_said_here_is_refused(text: str) -> None:
    with pytest.raises((Unconvertible, KeyError)):
        value_of(text, known)
