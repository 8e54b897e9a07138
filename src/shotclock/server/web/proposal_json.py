"""Proposals as the API gives them. All texts are somebody else's: whoever shows them must not take them for markup.

`shown` holds those that a person reads, with what cannot be seen marked, so that every surface shows the same. Numbers
are text in there: what reads JSON as JavaScript does would round them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from ...core.errors import Failure
from ...core.proposal import Decision, Proposal, ProposalRequest, Summary
from ...core.texts import visible
from ...inbox.access import Principal, Role
from ...inbox.outcomes import run_of


class Compared(NamedTuple):
    """What a proposed file is compared with, and whose word that is."""

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
    from ...inbox.approval import text_at

    try:
        found = text_at(file.path)
    except (Failure, ValueError):  # no text, or a path that no file can have
        return claimed
    return claimed if found is None else Compared(found, "read", found != file.current)


def summary(proposal: Summary, principal: Principal) -> dict[str, Any]:
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
        "shown": _marked(
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
    ask, decision = proposal.ask, proposal.decision
    about = summary(proposal.summary, principal)
    if compared is None:
        compared = compared_with(proposal, Principal(principal.name, Role.AGENT))
    shown = {
        **about["shown"],
        **_marked(
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
            **_marked({"path": ask.file.path, "before": compared.before, "proposed": ask.file.proposed}),
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
        said = known.get(name)
        about: Mapping[str, Any] = said if isinstance(said, Mapping) else {}
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


def _marked(texts: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: [visible(each) for each in text] if isinstance(text, list) else None if text is None else visible(text)
        for name, text in texts.items()
    }
