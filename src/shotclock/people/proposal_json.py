"""Proposals as JSON: those that are shown, over HTTP and by the command line, and those that come in.

All texts come from outside and are not markup. `shown` has those that a person reads, with invisible characters marked,
so that every surface shows the same. Numbers are text in there: JavaScript would round them.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Mapping
from typing import Any, NamedTuple, NoReturn

from ..calls.principal import Principal, Role
from ..core.envelope import refusal
from ..core.errors import Failure
from ..core.json_values import to_json
from ..core.limits import DurationError, parse_duration_ms
from ..core.proposal import (
    Decision,
    Kind,
    Policy,
    Problems,
    Proposal,
    ProposalRequest,
    ProposalStatus,
    ProposedFile,
    Summary,
)
from ..core.value_types import JsonObject, fields_of, replace
from ..core.visible_text import visible
from .person_wait import LastUse, run_of
from .proposal_checks import FILE_LIMIT

# Fields that only Shotclock sets.
_OWN = frozenset(("surroundings", "dispatched", "was_read"))
_ASK = frozenset(fields_of(ProposalRequest)) - _OWN
_POLICY = frozenset(fields_of(Policy)) | {"ttl", "remind"}
_DECISION = frozenset(fields_of(Decision)) | {"arguments_text"}
_FILE = frozenset(fields_of(ProposedFile)) - _OWN


# --- in -----------------------------------------------------------------------------------------------------------


def parse_object(content: bytes) -> JsonObject:
    """Parse a body. Raises Failure unless it is a JSON object."""
    try:
        body = json.loads(content, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise mistake("body", f"is not JSON: {error}") from None
    if not isinstance(body, dict):
        raise mistake("body", "must be a JSON object")
    return body


def read_number(value: object, field: str, least: int, most: int) -> int:
    """Return a whole number that may be written as text. Raises Failure unless it is within these limits."""
    if isinstance(value, str) and value.isascii() and value.isdecimal() and len(value) < 20:
        value = int(value)
    if type(value) is not int or not least <= value <= most:
        expected = f"a whole number, {least} or more" if most >= 2**53 else f"{least} to {most}"
        raise mistake(field, f"must be {expected}")
    return value


def read_request(body: JsonObject) -> ProposalRequest:
    """Read a proposal. Its kind may be left out if it follows from the other fields. The inbox checks the values.

    Raises Failure that names every unknown field and every part that is not an object.
    """
    problems = _unknown_fields(body, _ASK)
    kind = body.get("kind", "file" if body.get("file") else "operation" if body.get("operation") else "question")
    if kind not in list(Kind):  # a list, because an unhashable kind must not raise TypeError
        problems.append({"field": "kind", "message": f"must be one of {', '.join(Kind)}"})
    file, policy = _read_file(body.get("file"), problems), _read_policy(body.get("policy"), problems)
    if problems:
        raise refusal(problems)
    written = {name: each for name, each in body.items() if each is not None}
    choices = _as_tuple(body.get("choices"))
    parts = {"kind": Kind(kind), "file": file, "policy": policy, "choices": choices}
    return ProposalRequest(**{"title": "", **written, **parts})


def _read_file(body: object, problems: Problems) -> ProposedFile | None:
    if body is None:
        return None
    if not isinstance(body, dict) or not {"path", "proposed"} <= body.keys():
        problems.append({"field": "file", "message": "must be an object with path and proposed, both text"})
        return None
    problems += _unknown_fields(body, _FILE, "file.")
    return ProposedFile(body["path"], body["proposed"], body.get("current"))


def _read_policy(body: object, problems: Problems) -> Policy:
    """Read a policy, with durations such as 5m (`ttl`, `remind`) beside milliseconds."""
    if body is None:
        return Policy()
    if not isinstance(body, dict):
        problems.append({"field": "policy", "message": "must be an object"})
        return Policy()
    problems += _unknown_fields(body, _POLICY, "policy.")
    values = {name: value for name, value in body.items() if name in _POLICY}
    for name in values.keys() & {"ttl", "remind"}:
        try:
            values[f"{name}_ms"] = parse_duration_ms(values.pop(name))
        except DurationError as error:
            problems.append({"field": f"policy.{name}", "message": str(error)})
    return Policy(**{**values, "deciders": _as_tuple(values.get("deciders"))})


def _as_tuple(value: Any) -> Any:
    """Return a list as a tuple, nothing as an empty one, and other values for the inbox to refuse."""
    return tuple(value or ()) if isinstance(value, list | None) else value


def read_decision(body: JsonObject) -> Decision:
    """Read a decision. Raises Failure that names every problem of its fields; the inbox checks the values."""
    problems = _unknown_fields(body, _DECISION)
    status = str(body.get("status"))
    if status not in set(ProposalStatus):
        problems.append({"field": "status", "message": "must be approved, modified or rejected"})
    values = {name: value for name, value in body.items() if name in fields_of(Decision)}
    if body.get("arguments_text") is not None:  # exact, where a program would round numbers
        try:
            values["arguments"] = parse_exact_arguments(body["arguments_text"])
        except ValueError as error:
            problems.append({"field": "arguments", "message": str(error)})
    if problems:
        raise refusal(problems)
    return Decision(**{**values, "status": ProposalStatus(status)})


def parse_exact_arguments(text: object) -> JsonObject:
    """Parse edited arguments. Raises ValueError with the reason."""
    if not isinstance(text, str):
        raise ValueError("must be text")
    try:
        parsed = json.loads(text, parse_constant=_refuse_constant, object_pairs_hook=_refuse_repeated)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"this is not JSON: {error}") from None
    if not isinstance(parsed, dict):
        raise ValueError("the arguments are a JSON object: names and values in { }")
    return parsed


def _refuse_repeated(pairs: list[tuple[str, Any]]) -> JsonObject:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("it has a name twice")
    return found


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _unknown_fields(body: Mapping[str, Any], names: frozenset[str], prefix: str = "") -> Problems:
    unknown = sorted(body.keys() - names)
    return [{"field": f"{prefix}{name[:100]}", "message": "there is no such field"} for name in unknown]


def mistake(field: str, message: str) -> Failure:
    return refusal([{"field": field, "message": message}])


# --- out ----------------------------------------------------------------------------------------------------------


class Compared(NamedTuple):
    """Text that a proposed file is compared with, and its source."""

    before: str | None
    source: str
    """`read` (by Shotclock), `claim` (of the agent), `same` (the file already holds the proposed text, which is shown
    as new), or `nothing` (there is no such file, or its text is unknown)."""
    contradicts: bool = False  # whether the file holds another text than the agent claims


def compared_with(proposal: Proposal, principal: Principal) -> Compared:
    """Return the text to compare a proposed file with: that of the file itself if it is on this machine.

    Reads the file, which may block, and only for operators: an agent must not learn the content of a file.
    """
    file = proposal.ask.file
    if file is None:
        return Compared(None, "nothing")
    claimed = Compared(file.current, "nothing" if file.current is None else "read" if file.was_read else "claim")
    if file.was_read or not proposal.is_open or principal.role is not Role.OPERATOR or not file.path.startswith("/"):
        return claimed
    try:
        text = read_text_file(file.path)
    except (Failure, ValueError):  # not text, or an impossible path
        return claimed
    if text is None:
        return claimed
    if file.current is None:  # the agent claims nothing, and a text that is there already must still be seen
        return Compared(None, "same") if text == file.proposed else Compared(text, "read")
    return Compared(text, "read", text != file.current)


def read_text_file(path: str) -> str | None:
    """Return the text of a file; None if it does not exist. Raises Failure if it is too large or not text."""
    try:
        # O_NONBLOCK: opening a pipe must not wait for its writer.
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise Failure("FILE_UNREADABLE", f"{path} is not an ordinary file")
            content = file.read(FILE_LIMIT + 1)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise Failure("FILE_UNREADABLE", f"{path}: {error.strerror}") from None
    if len(content) > FILE_LIMIT:
        raise Failure("FILE_UNREADABLE", f"{path} is larger than {FILE_LIMIT} bytes, the most that is shown")
    try:
        return content.decode()
    except UnicodeDecodeError:
        raise Failure("FILE_UNREADABLE", f"{path} is not text in UTF-8") from None


def summary(proposal: Summary, principal: Principal, last_use: LastUse | None = None) -> JsonObject:
    """Return the fields that a list shows of a proposal to this principal."""
    plain = {name: each for name, each in to_json(proposal).items() if name not in ("deciders", "runner", "outcome")}
    for name in ("created_at", "expires_at", "decided_at", "used_at"):
        at = getattr(proposal, name)
        plain[name] = None if at is None else at.iso()
    is_decider = not proposal.deciders or principal.name in proposal.deciders
    run = run_of(proposal, plain.pop("dispatched"), last_use)
    return {
        **plain,
        "run": run,
        "may_decide": principal.role is Role.OPERATOR and is_decider,
        "shown": _mark_all(
            {
                "title": proposal.title,
                "about": proposal.operation or proposal.path,
                "asked_by": proposal.asked_by,
                "decided_by": proposal.decided_by,
                "decided_via": proposal.decided_via,
                "run": None if run is None or run.get("message") is None else str(run["message"]),
            }
        ),
    }


def whole(
    proposal: Proposal, principal: Principal, compared: Compared | None = None, last_use: LastUse | None = None
) -> JsonObject:
    """Return all fields of a proposal for this principal."""
    ask, decision = proposal.ask, proposal.decision
    about = summary(proposal.summary, principal, last_use)
    if compared is None:
        compared = compared_with(proposal, Principal(principal.name, Role.AGENT))
    confirmation = ask.confirmation if ask.policy.destructive else None
    shown = {
        **about["shown"],
        **_mark_all(
            {
                "justification": ask.justification,
                "deciders": list(ask.policy.deciders),
                "choices": list(ask.choices),
                "default": None if ask.default is None else _plain(ask.default),
                "confirmation": confirmation,
                "notes": None if decision is None else decision.notes,
                "answer": None if decision is None or decision.answer is None else _plain(decision.answer),
            }
        ),
        "action": ask.text,
        "modified": None,
        "file": None,
    }
    if ask.file is not None:
        shown["file"] = {
            **_mark_all({"path": ask.file.path, "before": compared.before, "proposed": ask.file.proposed}),
            "source": compared.source,
            "contradicts": compared.contradicts,
        }
    if decision is not None and (decision.arguments is not None or decision.file_text is not None):
        shown["modified"] = modified_text(ask, decision)
    return {
        **about,
        **to_json(ask),
        "arguments_text": arguments_text(ask.arguments),
        "action_hash": proposal.action_hash,
        "confirmation": confirmation,
        "decision": to_json(decision),
        "shown": shown,
        "form": form(ask, ask.arguments or {}),
        "_source": "external",
        "_trusted": False,
    }


def modified_text(ask: ProposalRequest, decision: Decision) -> str:
    if ask.file is not None:
        return visible(decision.file_text or "")
    return replace(ask, arguments=decision.arguments).text


def arguments_text(arguments: Mapping[str, Any] | None) -> str | None:
    """Return arguments as exact JSON text for an editor."""
    return None if arguments is None else _json(dict(arguments))


def form(ask: ProposalRequest, arguments: Mapping[str, Any]) -> list[JsonObject]:
    """Return the fields of a form for arguments. Every value in it is JSON as text."""
    schema = ask.input_schema or {}
    properties, required = schema.get("properties"), schema.get("required")
    declared: Mapping[str, Any] = properties if isinstance(properties, Mapping) else {}
    fields = []
    for name in [*arguments, *(name for name in declared if name not in arguments)]:
        about: Mapping[str, Any] = declared[name] if isinstance(declared.get(name), Mapping) else {}
        options, kind, description = about.get("enum"), about.get("type"), about.get("description")
        if kind is None and name in arguments:
            kind = _kind_of(arguments[name])
        fields.append(
            {
                "name": name,
                "label": visible(name),
                "text": _json(arguments[name]) if name in arguments else None,
                "kind": kind if isinstance(kind, str) else None,
                "options": [_json(each) for each in options] if isinstance(options, list) else None,
                "required": isinstance(required, list) and name in required,
                "description": visible(description) if isinstance(description, str) else None,
            }
        )
    return fields


def _json(value: Any) -> str:
    return json.dumps(value, indent=2, ensure_ascii=False)


def _kind_of(value: object) -> str | None:
    kinds = ((bool, "boolean"), (str, "string"), (int, "integer"), (float, "number"))
    return next((kind for type_, kind in kinds if isinstance(value, type_)), None)


def _plain(value: object) -> str:
    return value if isinstance(value, str) else _json(value)


def _mark_all(texts: Mapping[str, Any]) -> JsonObject:
    return {
        name: [visible(each) for each in text] if isinstance(text, list) else None if text is None else visible(text)
        for name, text in texts.items()
    }
