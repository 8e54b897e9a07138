"""Proposals as JSON: those that are shown, over HTTP and by the command line, and those that come in.

All texts are somebody else's: whoever shows them must not take them for markup. `shown` holds those that a person
reads, with what cannot be seen marked, so that every surface shows the same. Numbers are text in there: what reads JSON
as JavaScript does would round them.

Everything that is wrong with what comes in is reported at once.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NamedTuple, NoReturn

from ..core.clocks import DurationError, parse_duration_ms
from ..core.errors import Failure
from ..core.proposal import (
    Decision,
    Kind,
    Policy,
    Proposal,
    ProposalRequest,
    ProposalStatus,
    ProposedFile,
    Summary,
    refusal,
)
from ..core.value_types import fields_of, replace
from ..core.visible_text import visible
from .access import Principal, Role
from .person_wait import run_of

# What only we say about a proposal: where it is done, that we do it ourselves, and what we have read.
_OURS = frozenset(("surroundings", "dispatched", "was_read"))
_ASK = frozenset(fields_of(ProposalRequest)) - _OURS
_POLICY = frozenset(fields_of(Policy)) | {"ttl", "remind"}
_DECISION = frozenset(fields_of(Decision)) | {"arguments_text"}
_FILE = frozenset(fields_of(ProposedFile)) - _OURS


class _Mistakes:
    """Problems of a request that came in."""

    def __init__(self) -> None:
        self.found: list[dict[str, str]] = []

    def say(self, field: str, message: str) -> None:
        self.found.append({"field": field, "message": message})

    def refuse_unknown(self, body: Mapping[str, Any], known: frozenset[str], where: str = "") -> None:
        for name in sorted(body.keys() - known):
            self.say(f"{where}{name[:100]}", "there is no such field")

    def refuse(self) -> None:
        if self.found:
            raise refusal(self.found)


def parse_object(content: bytes) -> dict[str, Any]:
    """Parse a body. Raises Failure unless it is a JSON object."""
    try:
        body = json.loads(content, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise mistake("body", f"is not JSON: {error}") from None
    if not isinstance(body, dict):
        raise mistake("body", "must be a JSON object")
    return body


def read_number(value: object, field: str, least: int, most: int) -> int:
    """Return a whole number that may be written as text. Raises Failure unless it is in these limits."""
    if isinstance(value, str) and value.isascii() and value.isdecimal() and len(value) < 20:
        value = int(value)
    if type(value) is not int or not least <= value <= most:
        expected = f"a whole number, {least} or more" if most >= 2**53 else f"{least} to {most}"
        raise mistake(field, f"must be {expected}")
    return value


def read_request(body: dict[str, Any]) -> ProposalRequest:
    """Read a proposal. Its kind may be left out where what is there says it. Lengths and the like are the inbox's to
    check."""
    mistakes = _Mistakes()
    mistakes.refuse_unknown(body, _ASK)
    kind = body.get("kind", "file" if body.get("file") else "operation" if body.get("operation") else "question")
    if kind not in list(Kind):  # which takes what cannot be hashed as well
        mistakes.say("kind", f"must be one of {', '.join(Kind)}")
        kind = Kind.QUESTION
    file, policy = _file(body.get("file"), mistakes), _policy(body.get("policy"), mistakes)
    for name in ("title", "justification", "operation"):
        if not isinstance(body.get(name), str | None):
            mistakes.say(name, "must be text")
    for name in ("arguments", "input_schema"):
        if not isinstance(body.get(name), dict | None):
            mistakes.say(name, "must be an object")
    choices = body.get("choices") or []
    if not isinstance(choices, list):
        mistakes.say("choices", "must be a list")
    mistakes.refuse()
    return ProposalRequest(
        Kind(kind),
        body.get("title") or "",
        body.get("justification") or "",
        operation=body.get("operation"),
        arguments=body.get("arguments"),
        file=file,
        choices=tuple(choices),
        default=body.get("default"),
        input_schema=body.get("input_schema"),
        policy=policy,
    )


def _file(body: object, mistakes: _Mistakes) -> ProposedFile | None:
    if body is None:
        return None
    if not isinstance(body, dict) or not all(isinstance(body.get(name), str) for name in ("path", "proposed")):
        mistakes.say("file", "must be an object with path and proposed, both text")
        return None
    mistakes.refuse_unknown(body, _FILE, "file.")
    if not isinstance(body.get("current"), str | None):
        mistakes.say("file.current", "must be text")
    return ProposedFile(body["path"], body["proposed"], body.get("current"))


def _policy(body: object, mistakes: _Mistakes) -> Policy:
    """Read a policy, with durations as people write them (`ttl`, `remind`) beside milliseconds."""
    if body is None:
        return Policy()
    if not isinstance(body, dict):
        mistakes.say("policy", "must be an object")
        return Policy()
    mistakes.refuse_unknown(body, _POLICY, "policy.")
    values = {name: value for name, value in body.items() if name in _POLICY}
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


def read_decision(body: dict[str, Any]) -> Decision:
    """Read a decision. Raises Failure that names every problem of its fields."""
    mistakes = _Mistakes()
    mistakes.refuse_unknown(body, _DECISION)
    status = str(body.get("status"))
    if status not in set(ProposalStatus):
        mistakes.say("status", "must be approved, modified or rejected")
    if not isinstance(body.get("notes", ""), str):
        mistakes.say("notes", "must be text")
    if not isinstance(body.get("arguments"), dict | None):
        mistakes.say("arguments", "must be an object")
    if not isinstance(body.get("file_text"), str | None):
        mistakes.say("file_text", "must be text")
    values = {name: value for name, value in body.items() if name != "arguments_text"}
    if body.get("arguments_text") is not None:  # exact, where a program would round what it reads as numbers
        try:
            values["arguments"] = parse_exact_arguments(body["arguments_text"])
        except ValueError as error:
            mistakes.say("arguments", str(error))
    mistakes.refuse()
    return Decision(**{**values, "status": ProposalStatus(status)})


def parse_exact_arguments(text: object) -> dict[str, Any]:
    """Parse edited arguments. Raises ValueError that says what is wrong with them."""
    if not isinstance(text, str):
        raise ValueError("must be text")
    try:
        parsed = json.loads(text, parse_constant=_no_constant, object_pairs_hook=_each_once)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"this is not JSON: {error}") from None
    if not isinstance(parsed, dict):
        raise ValueError("the arguments are a JSON object: names and values in { }")
    return parsed


def _each_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("it names one thing twice")
    return found


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def mistake(field: str, message: str) -> Failure:
    return refusal([{"field": field, "message": message}])


class Compared(NamedTuple):
    """Text that a proposed file is compared with, and who gave it."""

    before: str | None
    source: str
    """`read` (by us), `claim` (of whoever asks), or `nothing`: there is no such file, or nobody says."""
    contradicts: bool = False
    """Whoever asks says that the file holds something else than it does."""


def compared_with(proposal: Proposal, principal: Principal) -> Compared:
    """Return what to compare a proposed file with: the file itself where it is on this machine and can be read.

    Reads the file, which may block. Only for operators: an agent must not learn from us what a file holds.
    """
    file = proposal.ask.file
    if file is None:
        return Compared(None, "nothing")
    claimed = Compared(file.current, "nothing" if file.current is None else "read" if file.was_read else "claim")
    if file.was_read or not proposal.is_open or principal.role is not Role.OPERATOR or not file.path.startswith("/"):
        return claimed
    from .approval import read_text_file

    try:
        found = read_text_file(file.path)
    except (Failure, ValueError):  # no text, or a path that no file can have
        return claimed
    return claimed if found is None else Compared(found, "read", found != file.current)


def summary(proposal: Summary, principal: Principal) -> dict[str, Any]:
    """Return what a list shows of a proposal, for this principal."""
    is_decider = not proposal.deciders or principal.name in proposal.deciders
    run = run_of(proposal, proposal.dispatched)
    return {
        "id": proposal.id,
        "seq": proposal.seq,
        "kind": proposal.kind.value,
        "title": proposal.title,
        "operation": proposal.operation,
        "path": proposal.path,
        "asked_by": proposal.asked_by,
        "status": proposal.status.value,
        "destructive": proposal.destructive,
        "created_at": proposal.created_at.iso(),
        "expires_at": proposal.expires_at.iso(),
        "decided_by": proposal.decided_by,
        "decided_at": None if proposal.decided_at is None else proposal.decided_at.iso(),
        "decided_via": proposal.decided_via,
        "used_at": None if proposal.used_at is None else proposal.used_at.iso(),
        "run": run,
        "notes": proposal.notes,
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


def whole(proposal: Proposal, principal: Principal, compared: Compared | None = None) -> dict[str, Any]:
    """Return all of a proposal, for this principal."""
    ask, decision = proposal.ask, proposal.decision
    about = summary(proposal.summary, principal)
    if compared is None:
        compared = compared_with(proposal, Principal(principal.name, Role.AGENT))
    shown = {
        **about["shown"],
        **_mark_all(
            {
                "justification": ask.justification,
                "deciders": list(ask.policy.deciders),
                "choices": list(ask.choices),
                "default": None if ask.default is None else _plain(ask.default),
                "confirmation": ask.confirmation if ask.policy.destructive else None,
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
        **ask.as_json(),
        "arguments_text": arguments_text(ask.arguments),
        "action_hash": proposal.action_hash,
        "confirmation": ask.confirmation if ask.policy.destructive else None,
        "decision": None if decision is None else decision.as_json(),
        "shown": shown,
        "form": form(ask, ask.arguments or {}),
        "_source": "external",
        "_trusted": False,
    }


def modified_text(ask: ProposalRequest, decision: Decision) -> str:
    """Return what would be done instead: the text of the action, or of the file."""
    if ask.file is not None:
        return visible(decision.file_text or "")
    return replace(ask, arguments=decision.arguments).text


def arguments_text(arguments: Mapping[str, Any] | None) -> str | None:
    """Return them as exact JSON to be edited; it comes back as text, too."""
    return None if arguments is None else _json(dict(arguments))


def form(ask: ProposalRequest, arguments: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the fields with which arguments are edited one by one. Every value in it is JSON as text."""
    schema = ask.input_schema or {}
    properties, required = schema.get("properties"), schema.get("required")
    known: Mapping[str, Any] = properties if isinstance(properties, Mapping) else {}
    fields = []
    for name in [*arguments, *(name for name in known if name not in arguments)]:
        declared = known.get(name)
        about: Mapping[str, Any] = declared if isinstance(declared, Mapping) else {}
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


def _mark_all(texts: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: [visible(each) for each in text] if isinstance(text, list) else None if text is None else visible(text)
        for name, text in texts.items()
    }
