"""What comes in over HTTP, made into the inbox's own values. Everything that is wrong with it is told at once."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import fields
from typing import Any, NoReturn

from ...core.durations import DurationError, parse_duration_ms
from ...core.errors import Failure
from ...core.proposal import Decision, Kind, Policy, ProposalRequest, ProposalStatus, ProposedFile, refusal

# What only we say about a proposal: where it is done, that we do it ourselves, and what we have read.
_OURS = frozenset(("surroundings", "dispatched", "form", "was_read"))
_ASK = frozenset(field.name for field in fields(ProposalRequest)) - _OURS
_POLICY = frozenset(field.name for field in fields(Policy)) | {"ttl", "remind"}
_DECISION = frozenset(field.name for field in fields(Decision)) | {"arguments_text"}
_FILE = frozenset(field.name for field in fields(ProposedFile)) - _OURS


class _Mistakes:
    def __init__(self) -> None:
        self.found: list[dict[str, str]] = []

    def say(self, field: str, message: str) -> None:
        self.found.append({"field": field, "message": message})

    def unknown(self, said: Mapping[str, Any], known: frozenset[str], where: str = "") -> None:
        for name in sorted(said.keys() - known):
            self.say(f"{where}{name[:100]}", "there is no such field")

    def refuse(self) -> None:
        if self.found:
            raise refusal(self.found)


def object_of(content: bytes) -> dict[str, Any]:
    try:
        said = json.loads(content, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise mistake("body", f"is not JSON: {error}") from None
    if not isinstance(said, dict):
        raise mistake("body", "must be a JSON object")
    return said


def number_of(said: object, field: str, least: int, most: int) -> int:
    if isinstance(said, str) and said.isascii() and said.isdecimal() and len(said) < 20:
        said = int(said)
    if type(said) is not int or not least <= said <= most:
        expected = f"a whole number, {least} or more" if most >= 2**53 else f"{least} to {most}"
        raise mistake(field, f"must be {expected}")
    return said


def ask_of(said: dict[str, Any]) -> ProposalRequest:
    """Kinds may be left out where what is there says it. Lengths and the like are the inbox's to check."""
    mistakes = _Mistakes()
    mistakes.unknown(said, _ASK)
    kind = said.get("kind", "file" if said.get("file") else "operation" if said.get("operation") else "question")
    if kind not in list(Kind):  # which takes what cannot be hashed as well
        mistakes.say("kind", f"must be one of {', '.join(Kind)}")
        kind = Kind.QUESTION
    file, policy = _file(said.get("file"), mistakes), _policy(said.get("policy"), mistakes)
    for name in ("title", "justification", "operation"):
        if not isinstance(said.get(name), str | None):
            mistakes.say(name, "must be text")
    for name in ("arguments", "input_schema"):
        if not isinstance(said.get(name), dict | None):
            mistakes.say(name, "must be an object")
    choices = said.get("choices") or []
    if not isinstance(choices, list):
        mistakes.say("choices", "must be a list")
    mistakes.refuse()
    return ProposalRequest(
        Kind(kind),
        said.get("title") or "",
        said.get("justification") or "",
        operation=said.get("operation"),
        arguments=said.get("arguments"),
        file=file,
        choices=tuple(choices),
        default=said.get("default"),
        input_schema=said.get("input_schema"),
        policy=policy,
    )


def _file(said: object, mistakes: _Mistakes) -> ProposedFile | None:
    if said is None:
        return None
    if not isinstance(said, dict) or not all(isinstance(said.get(name), str) for name in ("path", "proposed")):
        mistakes.say("file", "must be an object with path and proposed, both text")
        return None
    mistakes.unknown(said, _FILE, "file.")
    if not isinstance(said.get("current"), str | None):
        mistakes.say("file.current", "must be text")
    return ProposedFile(said["path"], said["proposed"], said.get("current"))


def _policy(said: object, mistakes: _Mistakes) -> Policy:
    """With durations as people write them (`ttl`, `remind`) beside milliseconds."""
    if said is None:
        return Policy()
    if not isinstance(said, dict):
        mistakes.say("policy", "must be an object")
        return Policy()
    mistakes.unknown(said, _POLICY, "policy.")
    values = {name: value for name, value in said.items() if name in _POLICY}
    for name in ("ttl", "remind"):
        if name in values:
            try:
                values[f"{name}_ms"] = parse_duration_ms(values.pop(name))
            except DurationError as error:
                mistakes.say(f"policy.{name}", str(error))
    deciders = values.get("deciders") or []
    if not isinstance(deciders, list):
        mistakes.say("policy.deciders", "must be a list of names")
        deciders = []
    if mistakes.found:
        return Policy()
    return Policy(**{**values, "deciders": tuple(deciders)})


def decision_of(said: dict[str, Any]) -> Decision:
    mistakes = _Mistakes()
    mistakes.unknown(said, _DECISION)
    status = str(said.get("status"))
    if status not in set(ProposalStatus):
        mistakes.say("status", "must be approved, modified or rejected")
    if not isinstance(said.get("notes", ""), str):
        mistakes.say("notes", "must be text")
    if not isinstance(said.get("arguments"), dict | None):
        mistakes.say("arguments", "must be an object")
    if not isinstance(said.get("file_text"), str | None):
        mistakes.say("file_text", "must be text")
    values = {name: value for name, value in said.items() if name != "arguments_text"}
    if said.get("arguments_text") is not None:  # exact, where a program would round what it reads as numbers
        try:
            values["arguments"] = exact_arguments(said["arguments_text"])
        except ValueError as error:
            mistakes.say("arguments", str(error))
    mistakes.refuse()
    return Decision(**{**values, "status": ProposalStatus(status)})


def exact_arguments(text: object) -> dict[str, Any]:
    """Parse edited arguments. Raises ValueError that says what is wrong with them."""
    if not isinstance(text, str):
        raise ValueError("must be text")
    try:
        said = json.loads(text, parse_constant=_no_constant, object_pairs_hook=_each_once)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"this is not JSON: {error}") from None
    if not isinstance(said, dict):
        raise ValueError("the arguments are a JSON object: names and values in { }")
    return said


def _each_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("it names one thing twice")
    return found


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def mistake(field: str, message: str) -> Failure:
    return refusal([{"field": field, "message": message}])
