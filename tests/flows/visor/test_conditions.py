"""JavaScript conditions mean the same here: each is converted and evaluated by our engine."""

import re
from typing import Any

import pytest

from shotclock.core.errors import Failure
from shotclock.flows.file.templates import evaluate
from shotclock.flows.visor._conditions import condition
from shotclock.flows.visor._expression import NameScope, Unsayable
from tests.rows import row

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

# Conditions that are true in JavaScript. `o` stands for outputs["o"].
TRUE = """
o.yes | o.five | o.list | o.map | o.word | o.said | o.three | !o.empty | !o.zero | !o.nothing | !o.no | !o.absent
!!o.list | !(!o.list) | o.yes && o.five | o.no || o.word | o.absent || o.map | o.five > 4 | o.five >= 5 | 3 < o.five
o.yes === true | o.no === false | o.one !== true | o.zero !== false | o.nothing === null | o.absent === undefined
o.word !== undefined | o.absent == null | o.nothing == null | o.word != null | o.word === 'high' | o.word == 'high'
o.absent !== 'high' | o.zero === 0 | o.one === 1 | o.no !== 0 | o.yes !== 1 | o.five === 5 | o.nothing !== undefined
o['my-key'] === 'dash' | o.deep.a.b === 'c' | o.deep?.a?.b === 'c' | o.absent?.a?.b === undefined | !o.absent?.a.b
o.three.length === 3 | o.list.length === 0 | o.word.length > 3 | !(o.absent?.length > 0) | o.absent?.length !== 0
o.items[0].s === 'error' | o.items[5]?.s === undefined | o.five > -1 | o.five !== 5.5 | o.no === false && o.yes
env.STAGE === 'test' | !env.EMPTY | !env.ABSENT | env.ABSENT !== 'x' | env.ABSENT === undefined | inputs.who === 'me'
outputs.text === 'ready' | outputs.count > 4 | outputs.count === 5 | !outputs.flag | outputs.flag === false
outputs.ask.text === 'yes' | !outputs.gone | outputs.gone === undefined | outputs["gone"]?.x !== 'a' | outputs_raw.o.yes
(o.five > 1) === true | o.word === 'a' || o.word === 'high' && o.yes | o.nothing || o.yes | o.no && o.no || o.yes
!(o.no || o.word === 'a') && (o.yes || o.no) | (o.no || o.yes) && (o.yes || o.no) | output.errors.length !== 0
"""
# These are refused, and never guessed.
REFUSED = """
pr.title | branch === 'main' | filesChanged.length | event.action | memory.get('a') | outputs.nobody | inputs.absent
outputs.history['o'].length | o[o.word] | /a/.test(o.word) | new Date() | Math.max(1, 2) | o.items.some(i => i.s)
o.five == '5' | o.five == 5 | o.word * 2 | o.a === o.b | o.word.includes('a') | always() | o.yes ? o.yes : o.no
o.items.filter(i => i.ok).length | `n: ${o.five}` | o.x = 3 | o.five++ | x => x | function () {} | [1].length
(o.five && o.word) === 'high' | (o.map || o.list).length === 0 | o.absent ?? o.yes | 1 < o.five < 9 | o.five + 1 === 6
outputs.ask.ts | typeof o.five === 'number' | ( | o.word in o | { a: 1 | '{{' === o.word | o.word o.yes | -o.five
"""


def listed(table: str) -> list[str]:
    # A single bar separates: `||` is of JavaScript.
    return [each.strip() for line in table.strip().splitlines() for each in line.split(" | ")]


def with_names(source: str) -> str:
    return re.sub(r"(?<![\w.'\"])o(?=[.?\[])", 'outputs["o"]', source)


def test_a_condition_is_as_true_as_in_javascript() -> None:
    for source in listed(TRUE):
        with row(source):
            written = condition(with_names(source), NAMES)
            assert evaluate(written, SCOPE) is True, written
            opposite = f"!({with_names(source)})"
            assert evaluate(condition(opposite, NAMES), SCOPE) is False, condition(opposite, NAMES)


def test_what_cannot_be_said_is_refused() -> None:
    for source in listed(REFUSED):
        with row(source), pytest.raises(Unsayable):
            condition(with_names(source), NAMES)


def test_values_of_another_type_fail_and_do_not_answer() -> None:
    for source in ("o.word > 3", "o.five.length > 1", "o.absent.x === 'a'", "outputs.text > 3", "o.word.items"):
        written = condition(with_names(source), NAMES)
        with pytest.raises(Failure):
            evaluate(written, SCOPE)
