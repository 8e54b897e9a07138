"""JavaScript conditions mean the same here: each is converted and evaluated by our engine."""

import re
from typing import Any

import pytest

from shotclock.core.errors import Failure
from shotclock.workflow.foreign.expression import NameScope, Unsayable
from shotclock.workflow.foreign.javascript import condition, expression
from shotclock.workflow.templates import evaluate, render_value

VALUES: dict[str, Any] = {
    "empty": "",
    "zero": 0,
    "one": 1,
    "five": 5,
    "yes": True,
    "no": False,
    "nothing": None,
    "list": [],
    "map": {},
    "word": "high",
    "said": "false",
    "three": [1, 2, 3],
    "words": ["a", "b"],
    "items": [{"s": "error", "n": 4, "ok": True}, {"s": "info", "n": 1, "ok": False}, {"n": 9}],
    "deep": {"a": {"b": "c"}},
    "my-key": "dash",
}
SCOPE = {
    "outputs": {"o": VALUES, "text": "ready", "count": "5", "flag": "false", "ask": "yes"},
    "steps": {"o": {"output": VALUES}},
    "env": {"STAGE": "test", "EMPTY": ""},
    "inputs": {"who": "me"},
    "output": {"errors": ["x"], "message": "ERROR: disk"},
}
NAMES = NameScope(
    {"o": "ai", "text": "command", "count": "command", "flag": "command", "ask": "human-input", "gone": "ai"},
    {"who": "string"},
    output="any",
)

# Expressions, with what JavaScript says. `o` stands for outputs["o"].
TRUE = """
o.yes | o.five | o.list | o.map | o.word | o.said | o.three | !o.empty | !o.zero | !o.nothing | !o.no | !o.absent
!!o.list | !(!o.list) | o.yes && o.five | o.no || o.word | o.absent || o.map | o.five > 4 | o.five >= 5 | 3 < o.five
o.yes === true | o.no === false | o.one !== true | o.zero !== false | o.nothing === null | o.absent === undefined
o.word !== undefined | o.absent == null | o.nothing == null | o.word != null | o.word === 'high' | o.word == 'high'
o.absent !== 'high' | o.zero === 0 | o.one === 1 | o.no !== 0 | o.yes !== 1 | o.five === 5 | o.nothing !== undefined
o['my-key'] === 'dash' | o.deep.a.b === 'c' | o.deep?.a?.b === 'c' | o.absent?.a?.b === undefined | !o.absent?.a.b
o.three.length === 3 | o.list.length === 0 | o.word.length > 3 | !(o.absent?.length > 0) | o.absent?.length !== 0
o.three.includes(2) | !o.three.includes(7) | o.word.includes('ig') | o.words.includes('a') | !o.absent?.includes('a')
o.word.startsWith('hi') | o.word.endsWith('gh') | o.word.toUpperCase() === 'HIGH' | o.word.trim() === 'high'
o.items.some(i => i.s === 'error') | !o.items.some(i => i.s === 'none') | o.items.some(i => i.ok)
o.items.some(i => !i.ok) | o.items.some((i) => i.n > 8) | !o.items.every(i => i.ok) | o.three.every(n => n > 0)
o.items.every(i => i.s !== 'none') | o.items.some(i => i.s !== 'error') | o.list.every(i => i.ok)
!o.list.some(i => i.ok)
o.items.filter(i => i.s === 'error').length === 1 | o.items.filter(i => i.n > 3 && i.ok).length === 1
o.items.some(i => i.s === 'error' && i.n > 3) | !o.items.some(i => i.s === 'info' && i.n > 3)
o.items.filter(i => i.ok === true).length === 1 | o.items.find(i => i.s === 'info').n === 1
o.items.map(i => i.n).includes(9) | o.items[0].s === 'error' | o.items.length > 2 ? o.yes : o.no
(o.absent || []).length === 0 | (o.three || []).length === 3 | (o.nothing ?? 'x') === 'x' | (o.empty ?? 'x') === ''
(o.zero ?? 7) === 0 | (o.empty || 'x') === 'x' | (o.five && o.word) === 'high' | `${env.STAGE}-1` === 'test-1'
env.STAGE === 'test' | !env.EMPTY | !env.ABSENT | env.ABSENT !== 'x' | env.ABSENT === undefined | inputs.who === 'me'
outputs.text === 'ready' | outputs.count > 4 | outputs.count === 5 | !outputs.flag | outputs.flag === false
outputs.ask.text === 'yes' | !outputs.gone | outputs.gone === undefined | outputs["gone"]?.x !== 'a' | outputs_raw.o.yes
typeof o.word === 'string' | typeof o.absent === 'undefined' | typeof o.five !== 'string' | Array.isArray(o.three)
!Array.isArray(o.map) | Object.keys(o.map).length === 0 | length(o.three) === 3 | contains(output.message, 'error:')
startsWith(output.message, 'err') | always() | !failure() | output.errors.length + 1 === 2 | o.five - 2 > 2
hasIssue(o.items, 's', 'error') | countIssues(o.items, 's', 'error') === 1 | parseInt(o.five) === 5 | Boolean(o.list)
const x = o.items; return x.length === 3 | if (o.five > 3) { return true; } return false | log("a"); o.yes
(o.five > 1) === true | o.word === 'a' || o.word === 'high' && o.yes | o.nothing || o.yes
"""
# What cannot be said: these are refused, and never guessed.
REFUSED = """
pr.title | branch === 'main' | filesChanged.length | event.action | memory.get('a') | outputs.nobody | inputs.absent
outputs.history['o'].length | o[o.word] | /a/.test(o.word) | new Date() | Math.max(1, 2) | o.items.reduce((a, b) => a)
o.five == '5' | o.five == 5 | o.word * 2 | o.a === o.b | o.items.some(i => i.a || i.b) | o.items.some(i => i.keys)
o.items.some(i => i.n === 1) | `n: ${o.five}` | o.x = 3 | o.five++ | x => x | function () {} | [...o.three] | isMember()
o.items.filter(i => i.s.length > 2).length | outputs.ask.ts | o.word.match('a') | typeof o.five === 'number' | (
await o | o.word in o | o.three.slice(1) | { a: 1 | '{{' === o.word | Number(o.five).toFixed(2) === 'a'
"""


def listed(table: str) -> list[str]:
    # A single bar separates: `||` is of JavaScript.
    return [each.strip() for line in table.strip().splitlines() for each in line.split(" | ")]


def with_names(source: str) -> str:
    return re.sub(r"(?<![\w.'\"])o(?=[.?\[])", 'outputs["o"]', source)


@pytest.mark.parametrize("source", listed(TRUE))
def test_a_condition_is_as_true_as_in_javascript(source: str) -> None:
    written = condition(with_names(source), NAMES)
    assert evaluate(written, SCOPE) is True, written
    opposite = f"!({with_names(source)})"
    if not source.startswith(("const", "if", "log")):
        assert evaluate(condition(opposite, NAMES), SCOPE) is False, condition(opposite, NAMES)


@pytest.mark.parametrize("source", listed(REFUSED))
def test_what_cannot_be_said_is_refused(source: str) -> None:
    with pytest.raises(Unsayable):
        condition(with_names(source), NAMES)


def test_a_script_gives_the_value_of_javascript() -> None:
    table = {
        "({ a: o.five, b: [o.word], 'c-d': o.absent })": {"a": 5, "b": ["high"], "c-d": None},
        "o.items.filter(i => i.ok)": [{"s": "error", "n": 4, "ok": True}],
        "o.empty || 'none'": "none",
        "o.list || 'none'": [],
        "o.zero ?? 3": 0,
        "const n = o.three.length; return n > 2 ? { big: true, n } : null": {"big": True, "n": 3},
        "JSON.parse(outputs.count)": 5,
        "o.words.join('-')": "a-b",
        "o.items.map(i => i.n)": [4, 1, 9],
    }
    for source, expected in table.items():
        written = expression(with_names(source), NAMES)
        assert render_value(f"{{{{ {written} }}}}", SCOPE) == expected, written


def test_values_of_another_type_fail_and_do_not_answer() -> None:
    for source in ("o.word > 3", "o.five.length > 1", "o.absent.x === 'a'", "outputs.text > 3", "o.word.items"):
        written = condition(with_names(source), NAMES)
        with pytest.raises(Failure):
            evaluate(written, SCOPE)
