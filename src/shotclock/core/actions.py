"""The text of an action: all of what would be done, in the one form that people are shown and approvals are bound to.

    run: "shop/pay"
    with:
      amount: 9007199254740993
      note: |
        | first line
        | second line
    where:
      directory: "/srv/shop"

It is exact. Two actions with one text are one action: numbers are written out in full, text is in quotes, what cannot
be seen is marked (core/texts.py), and no value can look like another or end before its end. Reasons, titles and what
an agent says about a file are claims, and stand elsewhere.

docs/design.md: R48.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from .texts import visible

if TYPE_CHECKING:
    from .proposal_request import ProposalRequest

_ESCAPES = str.maketrans({"\\": "\\\\", '"': '\\"', "\n": "\\n", "\t": "\\t"})
_PLAIN_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]*", re.ASCII)


def action_text(ask: ProposalRequest) -> str:
    """Return what is done if somebody says yes. Raises TypeError or ValueError for what is no JSON."""
    return text_of(_action(ask))


def text_of(value: Mapping[str, Any]) -> str:
    """Return the exact text of named values: two that differ in anything have different texts.

    Names stand in the order they were given in, because whoever gets a value sees that order.
    """
    return "\n".join(_lines(value, ""))


def _action(ask: ProposalRequest) -> dict[str, Any]:
    action: dict[str, Any]
    if ask.operation is not None:
        action = {"run" if ask.dispatched else "the asker runs": ask.operation}
        if ask.arguments is not None:
            action["with"] = _sort_by_name(ask.arguments)
    elif ask.file is not None:
        content = ask.file.proposed.encode("utf-8", "surrogatepass")
        action = {
            "write" if ask.dispatched else "the asker writes": ask.file.path,
            "with": {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()},
        }
    else:
        action = {"answer": ask.title, "choices": list(ask.choices)}
    if ask.surroundings:
        action["where"] = _sort_by_name(ask.surroundings)
    return action


def _sort_by_name(values: Mapping[str, Any]) -> dict[str, Any]:
    """Sort by name: in which order arguments and surroundings are given means nothing."""
    return {name: values[name] for name in sorted(values)}


def _lines(value: Mapping[str, Any] | list[Any] | tuple[Any, ...], indent: str) -> Iterator[str]:
    if isinstance(value, Mapping):
        entries = [(f"{_name(name)}:", each) for name, each in value.items()]
    else:
        entries = [("-", each) for each in value]
    for head, each in entries:
        if isinstance(each, Mapping | list | tuple) and each:
            yield f"{indent}{head}"
            yield from _lines(each, f"{indent}  ")
        elif isinstance(each, str) and "\n" in each:
            yield f"{indent}{head} |"
            for line in each.split("\n"):
                yield f"{indent}  | {_line(line)}"
        else:
            yield f"{indent}{head} {_scalar(each)}"


def _name(name: object) -> str:
    if not isinstance(name, str):
        raise TypeError(f"{name!r} is no name")
    return name if _PLAIN_NAME.fullmatch(name) else _quote(name)


def _scalar(value: object) -> str:
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, str):
        return _quote(value)
    if isinstance(value, int | float):
        return json.dumps(value, allow_nan=False)
    if isinstance(value, Mapping):
        return "{}"
    if isinstance(value, list | tuple):
        return "[]"
    raise TypeError(f"a {type(value).__name__} is not JSON")


def _quote(text: str) -> str:
    return visible(f'"{text.translate(_ESCAPES)}"')


def _line(line: str) -> str:
    """Return one line of several, with a blank at its end to be seen."""
    return f"{visible(line[:-1])}<U+{ord(line[-1]):04X}>" if line.endswith((" ", "\t")) else visible(line)
