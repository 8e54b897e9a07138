"""Assertions about answers: an envelope, its JSON, or the result of an MCP tool call."""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from typing import Any

from ..core.envelope import ENVELOPE_KEY, Envelope, restore_data

_ANYTHING: Any = object()
LONGEST_DATA = 2_000  # characters of a value in a message
LONGEST_DIFFERENCE = 200  # lines


def assert_ok(answer: object, expected: Any = _ANYTHING) -> Any:
    """Return the value of a call that succeeded. Raises AssertionError with the error, or the difference to `expected`.

    A bare value, such as a number, is returned without the object around it in `data`.
    """
    __tracebackhide__ = True
    envelope = _read(answer)
    if not envelope["ok"]:
        raise AssertionError(f"{_name_of(envelope)} failed: {_describe_error(envelope)}")
    data = envelope["data"]
    value = data["result"] if isinstance(data, dict) and list(data) == ["result"] else data
    if expected is not _ANYTHING and value != expected:
        raise AssertionError(f"{_name_of(envelope)} returned another value:\n{_difference(expected, value)}")
    return value


def assert_failed(answer: object, code: str | None = None, *, message: str | None = None) -> dict[str, Any]:
    """Return the error of a call that failed, with this code, and with this text in its message."""
    __tracebackhide__ = True
    envelope = _read(answer)
    if envelope["ok"]:
        wanted = "an error" if code is None else code
        raise AssertionError(
            f"{_name_of(envelope)} succeeded, {wanted} expected; its value:\n{_show(envelope['data'])}"
        )
    error: dict[str, Any] = envelope["error"]
    if code is not None and error["code"] != code:
        raise AssertionError(f"{_name_of(envelope)} failed otherwise than by {code}: {_describe_error(envelope)}")
    if message is not None and message not in error["message"]:
        raise AssertionError(f"{message!r} is not in the message: {_describe_error(envelope)}")
    return error


def _read(answer: object) -> dict[str, Any]:
    """Return the envelope as JSON. Raises TypeError if there is none."""
    if isinstance(answer, Envelope):
        return answer.to_dict()
    meta = getattr(answer, "meta", None)
    found = meta.get(ENVELOPE_KEY) if isinstance(meta, Mapping) else answer
    if isinstance(meta, Mapping) and isinstance(found, Mapping):
        found = restore_data(found, getattr(answer, "structured_content", None))
    if not isinstance(found, Mapping) or not {"ok", "data", "error"} <= found.keys():
        raise TypeError(f"an envelope or the result of a tool call is expected, not {type(answer).__name__}")
    return dict(found)


def _name_of(envelope: dict[str, Any]) -> str:
    return str(envelope.get("meta", {}).get("command") or "the call")


def _describe_error(envelope: dict[str, Any]) -> str:
    error, meta = envelope["error"], envelope.get("meta", {})
    lines = [f"{error['code']}: {error['message']}"]
    lines += [f"  {mistake['field']}: {mistake['message']}" for mistake in error.get("errors", ())]
    if suggestion := error.get("suggestion"):
        lines.append(f"  hint: {suggestion}")
    lines.append(f"  ending {meta.get('ending')}, side effects {meta.get('side_effects')}")
    if traceback := error.get("context", {}).get("traceback"):
        lines.append(str(traceback).rstrip())
    elif envelope["data"] is not None:
        lines.append(f"  data: {_show(envelope['data'])}")
    return "\n".join(lines)


def _show(value: object) -> str:
    text = json.dumps(value, indent=2, ensure_ascii=False, default=repr)
    return (
        text if len(text) <= LONGEST_DATA else f"{text[:LONGEST_DATA]} … ({len(text) - LONGEST_DATA} more characters)"
    )


def _difference(expected: object, value: object) -> str:
    """Return both as JSON, line by line: `-` was expected, `+` was returned."""
    before, after = (
        json.dumps(each, indent=2, ensure_ascii=False, default=repr, sort_keys=True).splitlines()
        for each in (expected, value)
    )
    lines = list(difflib.unified_diff(before, after, "expected", "returned", lineterm="", n=3))
    if not lines:  # such as 1 and True, or a tuple and a list
        return f"- expected {expected!r}\n+ returned {value!r}"
    more = [f"… ({len(lines) - LONGEST_DIFFERENCE} more lines)"] if len(lines) > LONGEST_DIFFERENCE else []
    return "\n".join(lines[:LONGEST_DIFFERENCE] + more)
