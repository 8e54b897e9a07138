"""Secrets: variables whose names look like one reach neither templates nor children unless a step asks for them, and
their values are kept out of everything that is written down."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from typing import Any

from ..core.redaction import HIDDEN, Redaction, is_secret_header, looks_secret

_REFERENCE = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)(?:(:?-)([^{}]*))?\}")


def visible(environment: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if not looks_secret(name)}


class UnsetVariable(LookupError):
    """`${NAME}` speaks of a variable that is not there, and gives no value instead."""


class References:
    """`${NAME}` in the `env` of a file: where a step asks for a variable, secret or not.

    As in a shell, `${NAME:-value}` is the value where it is unset or empty, `${NAME-value}` where it is unset.
    """

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._environment = environment
        # What a template makes of data must not ask for a variable. So they stand in the file's text as words that no
        # data can know while its templates are rendered.
        self._word = f"shotclock-{os.urandom(16).hex()}-"
        self._values: list[str] = []

    def take_out(self, text: str) -> str:
        """The text with a word of ours for each reference. Raises UnsetVariable."""

        def word_for(found: re.Match[str]) -> str:
            self._values.append(_value_of(found, self._environment))
            return f"{self._word}{len(self._values) - 1}-"

        return _REFERENCE.sub(word_for, text)

    def put_in(self, text: str) -> str:
        """The text with the values of the variables where our words stand."""
        if self._word not in text:
            return text
        return re.sub(rf"{self._word}(\d+)-", lambda found: self._values[int(found[1])], text)


def _value_of(found: re.Match[str], environment: Mapping[str, str]) -> str:
    name, kind, instead = found.groups()
    value = environment.get(name)
    if value is None and kind is None:
        raise UnsetVariable(name)
    return instead if value is None or (kind == ":-" and not value) else value


def unset_names(text: str, environment: Mapping[str, str]) -> list[str]:
    """The variables that the text needs and that are not there."""
    return [name for name, kind, _ in _REFERENCE.findall(text) if not kind and name not in environment]


def unset_message(name: str) -> str:
    return f"the variable {name} is not set; set it, or write ${{{name}:-}} if it may be missing"


# --- a workflow as it is written down -----------------------------------------------------------------------

# What of a step or a tool is free text. The other keys are names and numbers, which a report reads.
_TEXTS = {"exec", "stdin", "url", "body", "params", "command", "args", "arguments", "repository"}
_TEXTS |= {"prompt", "default", "inputs", "transform"}


def literal_secrets(written: Mapping[str, Any]) -> dict[str, str]:
    """By name, what the file itself says for a variable or a header that looks secret."""
    found: dict[str, str] = {}
    for part in _parts(written):
        for key in ("env", "headers"):
            for name, value in (part.get(key) or {}).items():
                if _is_literal_secret(key, name, value):
                    found[f"{name}_SECRET"] = str(value)  # a header's name need not look like a variable's
    return found


def without_secrets(written: Mapping[str, Any], redaction: Redaction) -> dict[str, Any]:
    """The workflow as it may be kept: no literal secret in `env` and `headers`, no known one in its texts."""
    kept: dict[str, Any] = json.loads(json.dumps(written))
    for part in _parts(kept):
        for key, value in part.items():
            if key in ("env", "headers") and isinstance(value, dict):
                part[key] = {
                    name: HIDDEN if _is_literal_secret(key, name, each) else redaction.value(each)
                    for name, each in value.items()
                }
            elif key in _TEXTS and not _is_declaration(part, key):
                part[key] = redaction.value(value)
    return kept


def is_same(kept: Any, written: Any) -> bool:
    """Whether this is what was kept without its secrets: it may differ where something was hidden, and only there."""
    if isinstance(kept, dict) and isinstance(written, dict):
        return kept.keys() == written.keys() and all(is_same(kept[key], written[key]) for key in kept)
    if isinstance(kept, list) and isinstance(written, list):
        return len(kept) == len(written) and all(map(is_same, kept, written))
    if isinstance(kept, str) and HIDDEN in kept:
        pattern = ".*".join(map(re.escape, kept.split(HIDDEN)))
        return re.fullmatch(pattern, str(written), re.DOTALL) is not None
    return bool(kept == written) and type(kept) is type(written)


def _parts(written: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """The file itself, its defaults, inputs, tools and steps: whatever may hold `env`, `headers` or text."""
    yield written  # type: ignore[misc]
    yield written.get("defaults") or {}
    for key in ("inputs", "tools", "steps"):
        yield from (written.get(key) or {}).values()


def _is_declaration(part: Mapping[str, Any], key: str) -> bool:
    return key == "inputs" and "steps" in part


def _is_literal_secret(key: str, name: str, value: Any) -> bool:
    if not looks_secret(name) and not (key == "headers" and is_secret_header(name)):
        return False
    text = "" if value is None else str(value)
    return bool(text) and "{{" not in text and not _REFERENCE.search(text)
