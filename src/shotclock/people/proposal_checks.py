"""Checks of proposals and decisions that come from outside: every problem at once, each with its field."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from ..core.envelope import refusal
from ..core.json_values import JSON_TYPES, has_json_type, is_deeper_than
from ..core.limits import MAX_MS
from ..core.proposal import (
    JSON,
    Decision,
    Kind,
    Policy,
    Problems,
    Proposal,
    ProposalRequest,
    ProposalStatus,
    may_decide,
)

TITLE_LIMIT = 200
TEXT_LIMIT = 20_000
PATH_LIMIT = 4_096
ARGUMENTS_LIMIT = 256 * 1024
FILE_LIMIT = 1024 * 1024
LIST_LIMIT = 100
# Parsers give up at some depth, and a stored value must be readable from a deeper stack as well.
DEPTH_LIMIT = 64
KEY_LIMIT = 200


def problems_with(ask: ProposalRequest) -> Problems:
    found: Problems = []
    kind: object = ask.kind
    if not isinstance(kind, Kind):
        _add(found, "kind", f"must be {', '.join(Kind)}")
    _text(found, "title", ask.title, TITLE_LIMIT, needed=True)
    _text(found, "justification", ask.justification, TEXT_LIMIT)
    if ask.kind is Kind.OPERATION:
        _text(found, "operation", ask.operation, PATH_LIMIT, needed=True)
    if ask.kind is Kind.FILE and ask.file is None:
        _add(found, "file", "required")
    for name, is_there, owner in (
        ("operation", ask.operation is not None or ask.arguments is not None, Kind.OPERATION),
        ("file", ask.file is not None, Kind.FILE),
        ("choices", bool(ask.choices), Kind.QUESTION),
    ):
        if is_there and ask.kind is not owner:
            _add(found, name, f"does not belong to a {ask.kind}")
    for name, values in (("arguments", ask.arguments), ("surroundings", ask.surroundings)):
        if values is not None:
            _arguments(found, name, values)
    if ask.file is not None:
        _text(found, "file.path", ask.file.path, PATH_LIMIT, needed=True)
        _file_text(found, "file.proposed", ask.file.proposed)
        if ask.file.current is not None:
            _file_text(found, "file.current", ask.file.current)
    _names(found, "choices", ask.choices, TEXT_LIMIT)
    if ask.choices and ask.default is not None and ask.default not in ask.choices:
        _add(found, "default", "is not one of the choices")
    _json(found, "default", ask.default)
    if ask.input_schema is not None:
        _arguments(found, "input_schema", ask.input_schema)
    _policy(found, ask.policy)
    return found


def problems_with_key(key: str | None) -> Problems:
    found: Problems = []
    if key is not None:
        _text(found, "idempotency_key", key, KEY_LIMIT, needed=True)
    return found


def check_decision(proposal: Proposal, decision: Decision, by: str) -> None:
    """Raise Failure unless this person may make this decision now."""
    may_decide(proposal, by)
    proposal.must_be_open()
    if problems := problems_with_decision(proposal.ask, decision):
        raise refusal(problems)


def problems_with_decision(ask: ProposalRequest, decision: Decision) -> Problems:
    """Return every problem of a decision on this request; empty if it can be carried out."""
    found: Problems = []
    status: object = decision.status
    if not isinstance(status, ProposalStatus) or not status.is_decided:
        _add(found, "status", "a decision is approved, modified or rejected")
    _text(found, "notes", decision.notes, TEXT_LIMIT)
    is_modified = decision.status is ProposalStatus.MODIFIED
    if is_modified and ask.kind is Kind.QUESTION:
        _add(found, "status", "a question is answered or rejected, not modified")
    for name, new, owner in (
        ("arguments", decision.arguments, Kind.OPERATION),
        ("file_text", decision.file_text, Kind.FILE),
    ):
        if new is None and is_modified and ask.kind is owner:
            _add(found, name, "required in a modification")
        elif new is not None and not (is_modified and ask.kind is owner):
            _add(found, name, f"belongs to the modification of a {owner} only")
        elif new is not None and owner is Kind.FILE:
            _file_text(found, name, new)
        elif decision.arguments is not None:
            _arguments(found, name, decision.arguments)
            found += _check_fits(ask.input_schema, decision.arguments, ask.arguments or {})
    if ask.kind is not Kind.QUESTION or decision.status is not ProposalStatus.APPROVED:
        if decision.answer is not None:
            _add(found, "answer", "only a question that is approved has one")
    elif decision.answer is None:
        one = f"one with --answer: {' or '.join(ask.choices)}" if ask.choices else "an answer"
        _add(found, "answer", f"choose {one}")
    elif ask.choices and decision.answer not in ask.choices:
        _add(found, "answer", f"must be one of {', '.join(ask.choices)}")
    else:
        _json(found, "answer", decision.answer)
    return found


def _add(found: Problems, field: str, message: str) -> None:
    found.append({"field": field, "message": message})


def _text(found: Problems, field: str, text: object, limit: int, *, needed: bool = False) -> None:
    if needed and (text is None or (isinstance(text, str) and not text.strip())):
        _add(found, field, "required")
    elif not isinstance(text, str):
        _add(found, field, "must be text")
    elif len(text) > limit:
        _add(found, field, f"{len(text)} characters are too many: {limit} at most")
    else:
        _size(found, field, text, "bytes", 4 * limit)


def _file_text(found: Problems, field: str, text: object) -> None:
    if not isinstance(text, str):
        _add(found, field, "must be text")
    else:
        _size(found, field, text, "bytes", FILE_LIMIT)


def _arguments(found: Problems, field: str, arguments: object) -> None:
    if not isinstance(arguments, Mapping) or not all(isinstance(name, str) for name in arguments):
        _add(found, field, "must be named values")
    else:
        _json(found, field, dict(arguments))


def _json(found: Problems, field: str, value: object) -> None:
    try:
        if is_deeper_than(DEPTH_LIMIT, value):
            raise ValueError(f"nested deeper than {DEPTH_LIMIT} levels")
        text = json.dumps(value, allow_nan=False, ensure_ascii=False, sort_keys=True)
    except (TypeError, ValueError) as error:
        _add(found, field, f"is not JSON: {error}")
    else:
        _size(found, field, text, "bytes of JSON", ARGUMENTS_LIMIT)


def _size(found: Problems, field: str, text: str, unit: str, limit: int) -> None:
    try:
        size = len(text.encode())
    except UnicodeEncodeError:  # half characters, which other parsers of JSON refuse
        _add(found, field, "is not valid Unicode")
        return
    if size > limit:
        _add(found, field, f"{size} {unit} are too many: {limit} at most")


def _names(found: Problems, field: str, names: Any, limit: int) -> None:
    if not isinstance(names, tuple) or len(names) > LIST_LIMIT:
        _add(found, field, f"must be a list of {LIST_LIMIT} at most")
        return
    for name in names:
        _text(found, field, name, limit, needed=True)
    if any(name in names[:place] for place, name in enumerate(names)):
        _add(found, field, "contains a value twice")


def _policy(found: Problems, policy: Policy) -> None:
    if type(policy.ttl_ms) is not int or not 0 <= policy.ttl_ms <= MAX_MS:
        _add(found, "policy.ttl_ms", "must be from 1 ms to ten years, or 0 for no end")
    elif type(policy.remind_ms) is not int or not 0 <= policy.remind_ms < (policy.ttl_ms or 1):
        _add(found, "policy.remind_ms", "must be shorter than ttl_ms")
    if policy.when_expired not in ("expire", "reject", "default"):
        _add(found, "policy.when_expired", "must be expire, reject or default")
    _names(found, "policy.deciders", policy.deciders, TITLE_LIMIT)
    destructive: object = policy.destructive
    if not isinstance(destructive, bool):
        _add(found, "policy.destructive", "must be true or false")


def _check_fits(
    schema: Mapping[str, JSON] | None, arguments: Mapping[str, JSON], asked: Mapping[str, JSON]
) -> Problems:
    """Return the typing mistakes of a person: a missing or unknown name, another type, a value that is not allowed.

    Not all of JSON Schema: the schema may come from an agent, and some schemas take forever to check. The whole check
    is made where the operation runs, within its timeout.
    """
    found: Problems = []
    if not isinstance(schema, Mapping):
        return found
    properties, required = schema.get("properties"), schema.get("required")
    declared: Mapping[str, JSON] = properties if isinstance(properties, Mapping) else {}
    for name in required if isinstance(required, list) else []:
        if isinstance(name, str) and name not in arguments:
            _add(found, f"arguments.{name}", "required")
    for name, value in arguments.items():
        wanted = declared.get(name)
        if name not in declared and schema.get("additionalProperties") is False:
            _add(found, f"arguments.{name}", "there is no such argument")
        if not isinstance(wanted, Mapping) or (
            name in asked and type(asked[name]) is type(value) and asked[name] == value
        ):
            continue  # an argument that was not modified may be a default, which need not fit
        names = wanted.get("type")
        types = [str(each) for each in (names if isinstance(names, list) else [names]) if str(each) in JSON_TYPES]
        if types and not any(has_json_type(value, each) for each in types):
            _add(found, f"arguments.{name}", f"must be of type {' or '.join(types)}")
        elif isinstance(wanted.get("enum"), list) and value not in wanted["enum"]:
            _add(found, f"arguments.{name}", "is not one of the values it may have")
    return found
