"""`shotclock inbox`: what waits for a person, for the person who decides and for agents that have no MCP.

What looks or decides runs in a child that can be killed, like other subcommands. What waits runs here, so that whoever
interrupts it is told which proposal stays queued.
"""

from __future__ import annotations

import asyncio
import os
import re
import sys
from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TextIO, cast

from ..core.clocks import Clocks
from ..core.durations import DurationError, parse_duration_ms
from ..core.effects import Ending
from ..core.envelope import Envelope, Problem, stopped_by, warning
from ..core.errors import Failure
from ..core.proposals import Ask, Decision, Kind, Proposal, ProposalStatus, must_be_open
from ..core.proposals import may_decide as must_be_decider
from ..core.records import changed
from ..core.texts import visible
from ..core.walltime import WallTime
from ..enforce.admission import Admission, Outcome, admit, answer, inherited_deadline, no_time_left
from ..enforce.clock import monotonic_ns, wall_ns
from ..enforce.forked import carry_out
from ..inbox import AuditFile, Inbox, Principal, Role, refused
from ..servers.operators.shown import Compared, compared_with, summary, whole
from ..store import Store
from ..store.audit import Entry
from . import person, signals
from .inbox_asking import waited
from .inbox_difference import difference
from .inbox_editing import Edit, modified
from .inbox_words import vocabulary
from .output import emit, is_terminal, say_line, summary_line, wants_json, write_quietly
from .parsing import Mistakes, mistaken, parse_verb

# Looking and deciding take a moment; the store's own waits are shorter than this.
TIMEOUT_MS = 30_000
# Reading all of a trail of years, entry by entry.
VERIFY_TIMEOUT_MS = 600_000
MOST_LISTED = 10_000
# Names as tokens have them, so that a proposal's asker is never something to be escaped or mistaken for another.
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@+-]{0,63}", re.ASCII)
_MUTATING = frozenset(("approve", "modify", "reject", "extend", "propose", "withdraw"))
# Those that have a clock of their own: a person's patience, or the time that was asked for.
_WITHOUT_CLOCK = frozenset(("modify", "watch", "propose", "check"))
Begin = Callable[[], Admission]
"""Starts the clock of something that is to be done now."""
_WITHOUT_ID = frozenset(("list", "watch", "audit", "propose", "serve"))


def main(words: list[str]) -> int:
    as_json = wants_json("--json" in words)
    spoken = parse_verb(vocabulary(), words, command="shotclock inbox")
    if spoken is None:
        return 0
    verb, said, mistakes = spoken
    if said:
        if verb not in _WITHOUT_ID and not said["proposal_id"]:
            mistakes.append({"field": "proposal-id", "message": "which one? `shotclock inbox list` lists them"})
        _understand_durations(said, mistakes)
        _understand_others(verb, said, mistakes)
    if mistakes:
        return _deliver("", mistaken("inbox", mistakes), as_json)
    if verb == "serve":
        return _serve(said, as_json)
    signals.raise_when_told()
    inherited = inherited_deadline(os.environ, monotonic_ns())
    timeout_ms = 0 if verb in _WITHOUT_CLOCK else VERIFY_TIMEOUT_MS if said.get("verify") else TIMEOUT_MS
    notes = tuple(warning("DEADLINE_UNREADABLE", text) for text in inherited.warnings)

    def admitted(clocks: Clocks) -> Admission:
        idempotent = verb == "propose"
        mutates = verb in _MUTATING
        return admit(
            f"inbox {verb}", clocks, parent=inherited.deadline, mutates=mutates, idempotent=idempotent, notes=notes
        )

    # A person who takes their time does not use up the time of what is done then.
    begin = partial(admitted, Clocks(timeout_ms=timeout_ms or TIMEOUT_MS))
    envelope = _answered(verb, said, admitted(Clocks(timeout_ms=timeout_ms)), begin, as_json)
    return _deliver(verb, envelope, as_json)


def _serve(said: dict[str, Any], as_json: bool) -> int:
    """Until somebody stops it: it has no clock, and hears signals itself."""
    from .serve import run, understood

    try:
        asked, mistakes = understood(None, said["http"], require_token=said["require_token"])
        if mistakes:
            return _deliver("", mistaken("inbox serve", mistakes), as_json)
        ended = run(asked)
    except Failure as failure:  # to serve others, tokens are looked for
        ended = failure
    if isinstance(ended, Failure):
        return _deliver("serve", answer(admit("inbox serve", Clocks()), refused(ended)), as_json)
    return ended


def _understand_durations(said: dict[str, Any], mistakes: Mistakes) -> None:
    names = {"by": "by", "for_": "for", "ttl": "ttl", "remind": "remind", "wait": "wait"}
    for name, field in names.items():
        if said.get(name) is not None:
            try:
                said[name] = parse_duration_ms(said[name])
            except DurationError as error:
                mistakes.append({"field": field, "message": str(error)})


def _understand_others(verb: str, said: dict[str, Any], mistakes: Mistakes) -> None:
    if verb == "extend" and said["by"] is None:
        mistakes.append({"field": "by", "message": "by how long? As in `shotclock inbox extend ID 2h`"})
    if said.get("as_") is not None and not _NAME.fullmatch(said["as_"]):
        mistakes.append({"field": "as", "message": "must be 1 to 64 letters, digits or ._@+-"})
    if not 1 <= said.get("limit", 1) <= MOST_LISTED:
        mistakes.append({"field": "limit", "message": f"must be 1 to {MOST_LISTED}"})
    if verb == "list" and said["all"] and said["status"] is not None:
        mistakes.append({"field": "status", "message": "--all and --status exclude each other"})
    if verb == "audit":
        is_whole = [name for name in ("verify", "head", "anchor") if said[name]]
        if is_whole and said["proposal_id"] is not None:
            mistakes.append({"field": is_whole[0], "message": "the trail is one chain: it is looked at as a whole"})
        if said["verify"] and said["head"]:
            mistakes.append({"field": "head", "message": "--head and --verify exclude each other"})
    if verb == "propose":
        if said["title"] is None and not any(mistake["field"] == "title" for mistake in mistakes):
            mistakes.append({"field": "title", "message": "what is proposed? --title says it in one line"})
        if said["current"] is not None and said["file"] is None:
            mistakes.append({"field": "current", "message": "is what --file is compared with"})
        if said["choice"] and said["file"] is not None:
            mistakes.append({"field": "choice", "message": "a proposed file is approved, modified or rejected"})


def _answered(verb: str, said: dict[str, Any], admission: Admission, begin: Begin, as_json: bool) -> Envelope:
    try:
        if admission.no_time_left:
            return answer(admission, no_time_left(admission))
        if verb in ("propose", "check"):
            return waited(verb, said, admission)
        if verb == "watch":
            from .inbox_watching import watched

            return watched(said["for_"], admission, as_json)
        outcome = _done(verb, said, begin)
    except signals.Signalled as signalled:
        outcome = Outcome(Ending.NOT_STARTED, stopped_by(signalled.name))
    except Failure as failure:
        outcome = refused(failure)
    return answer(admission, outcome)


# --- looking and deciding -------------------------------------------------------------------------------------


def _done(verb: str, said: dict[str, Any], begin: Begin) -> Outcome:
    me = replace(Principal.local(), via="the command line")
    id: str = said.get("proposal_id") or ""
    match verb:
        case "list":
            status = None if said["all"] else ProposalStatus(said["status"] or "pending")
            return _inside(begin, lambda inbox: _listed(inbox, me, status, said["limit"]))
        case "audit":
            return carry_out(begin(), lambda: _audited(id, said))
        case "extend":
            return _inside(begin, lambda inbox: _told(inbox.extend(id, said["by"], me), me))
        case "withdraw":
            asker = Principal(said["as_"] or me.name, Role.AGENT)
            return _inside(begin, lambda inbox: _told(inbox.withdraw(id, asker), me))
        case "reject":
            return _decided(begin, id, Decision(ProposalStatus.REJECTED, said["notes"]), me)
    found = _inside(begin, lambda inbox: _found(inbox, id, me))
    if found.problem is not None:
        return found
    proposal, compared = cast(tuple[Proposal, Compared], found.value)
    data = cast(dict[str, Any], found.data)
    if verb == "show":
        data["diff"] = difference(proposal, compared)
        return Outcome(Ending.FINISHED, data=data)
    must_be_decider(proposal, me.name)
    must_be_open(proposal)
    if verb == "modify":
        return _modified(begin, proposal, compared, data, said, me)
    decision = Decision(ProposalStatus.APPROVED, said["notes"], answer=_answer_to(proposal.ask, said["answer"]))
    confirmation = _confirmed(proposal, compared, data)
    return _decided(begin, id, decision, me, proposal.action_hash, confirmation)


def _answer_to(ask: Ask, said: str | None) -> str | None:
    """To say yes to a question is an answer, where nobody wants another."""
    return "yes" if said is None and ask.kind is Kind.QUESTION and not ask.choices else said


def _modified(
    begin: Begin, proposal: Proposal, compared: Compared, data: dict[str, Any], said: dict[str, Any], me: Principal
) -> Outcome:
    with modified(proposal, said["file"], said["notes"]) as edit:
        confirmation = _confirmed(proposal, compared, data)
        outcome = _decided(begin, proposal.id, edit.decision, me, proposal.action_hash, confirmation)
        edit.is_done = outcome.problem is None
    return _with_kept(outcome, edit)


def _with_kept(outcome: Outcome, edit: Edit) -> Outcome:
    """Whoever decided first does not cost us what was written."""
    if isinstance(outcome.problem, Problem) and edit.kept is not None:
        context = {**(outcome.problem.context or {}), "edit": edit.kept}
        message = f"{outcome.problem.message}; what you wrote is in {edit.kept}"
        outcome.problem = changed(outcome.problem, message=message, context=context)
    return outcome


def _confirmed(proposal: Proposal, compared: Compared, data: dict[str, Any]) -> str | None:
    """What the person typed; raises Failure where there is none, or no agreement."""
    if not proposal.ask.policy.destructive:
        return None
    if is_terminal(sys.stdin) and is_terminal(sys.stderr):
        data["diff"] = difference(proposal, compared)
        _show("show", data, sys.stderr)
    problem = person.ask(proposal.id, proposal.ask.confirmation)
    if problem is not None:
        raise Failure(problem.code, problem.message, context=problem.context)
    return proposal.ask.confirmation


def _decided(
    begin: Begin,
    id: str,
    decision: Decision,
    me: Principal,
    action_hash: str | None = None,
    confirmation: str | None = None,
) -> Outcome:
    return _inside(
        begin,
        lambda inbox: _told(
            inbox.decide(id, decision, me, action_hash=action_hash, confirmation=confirmation),
            me,
        ),
    )


def _inside(begin: Begin, work: Callable[[Inbox], Awaitable[Outcome]]) -> Outcome:
    """In a child, on the clock. A refusal is the outcome."""

    async def perform() -> Outcome:
        with Store.open() as store:
            inbox = Inbox(store)
            try:
                return await work(inbox)
            finally:
                await inbox.close()

    def body() -> Outcome:
        try:
            return asyncio.run(perform())
        except Failure as failure:
            return refused(failure)

    return carry_out(begin(), body)


async def _told(changing: Awaitable[Proposal], me: Principal) -> Outcome:
    return Outcome(Ending.FINISHED, data=summary((await changing).summary, me))


async def _found(inbox: Inbox, id: str, me: Principal) -> Outcome:
    proposal = await inbox.get(id)
    if proposal is None:
        raise Failure("PROPOSAL_NOT_FOUND", f"there is no proposal {id!r}")
    history = [_entry(entry) for entry in await inbox.history(id)]
    compared = compared_with(proposal, me)
    data = {**whole(proposal, me, compared), "diff": None, "history": history}
    return Outcome(Ending.FINISHED, data=data, value=(proposal, compared))


async def _listed(inbox: Inbox, me: Principal, status: ProposalStatus | None, limit: int) -> Outcome:
    found = await inbox.list(status=status, limit=limit + 1)
    proposals = [summary(proposal, me) for proposal in found[:limit]]
    said = None if status is None else status.value
    return Outcome(Ending.FINISHED, data={"status": said, "proposals": proposals, "more": len(found) > limit})


def _audited(id: str, said: dict[str, Any]) -> Outcome:
    anchor = None if said["anchor"] is None else Path(said["anchor"]).absolute()
    limit: int = said["limit"]
    try:
        with Store.open() as store:
            if said["verify"]:
                return asyncio.run(_verified(store, anchor))
            if said["head"] or anchor is not None:
                trail = AuditFile(store)
                head = trail.head() if anchor is None else trail.anchor(anchor, now())
                return Outcome(Ending.FINISHED, data={"head": {"seq": head.seq, "hash": head.hash}})
            entries = _last_entries(store, limit) if not id else store.audit.of(id)[-limit:]
            if id and not entries:
                raise Failure("PROPOSAL_NOT_FOUND", f"there is no proposal {id!r}")
    except Failure as failure:
        return refused(failure)
    return Outcome(Ending.FINISHED, data={"entries": [_entry(entry) for entry in entries]})


def _last_entries(store: Store, limit: int) -> list[Entry]:
    """Their numbers have no gaps, but for those that somebody took out."""
    last: list[Entry] = []
    after = max(0, store.audit.filed() - limit)
    while entries := store.audit.entries(after):
        last = (last + entries)[-limit:]
        after = entries[-1].seq
    return last


async def _verified(store: Store, anchor: Path | None) -> Outcome:
    inbox = Inbox(store)
    try:
        found = await inbox.verify_audit()
        if anchor is not None:
            found += AuditFile(store).check_anchor(anchor)
    finally:
        await inbox.close()
    problems = [{"place": p.place, "message": p.message, "seq": p.seq, "line": p.line} for p in found]
    data: dict[str, object] = {"whole": not problems, "problems": problems}
    if not problems:
        return Outcome(Ending.FINISHED, data=data)
    more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
    return Outcome(Ending.FINISHED, Problem("AUDIT_BROKEN", f"{found[0]}{more}"), data)


def _entry(entry: Entry) -> dict[str, object]:
    shown = entry.content()
    del shown["previous"]
    return {**shown, "hash": entry.hash}


def now() -> WallTime:
    return WallTime.of_ns(wall_ns())


# --- the answer -----------------------------------------------------------------------------------------------


def _deliver(verb: str, envelope: Envelope, as_json: bool) -> int:
    signals.only_note()
    if as_json:
        return emit(envelope, signals.heard)
    data: Any = envelope.data
    if isinstance(data, dict):
        _show(verb, data, sys.stdout)
    is_told = verb == "watch" and envelope.code == "CANCELLED"  # by the one who sits there
    if (envelope.error is not None or envelope.warnings) and not is_told:
        say_line(visible(summary_line(envelope)), heard=signals.heard)
    return envelope.exit_code


def _show(verb: str, data: dict[str, Any], stream: TextIO) -> None:
    """All at once, and without waiting for a terminal that takes nothing."""
    from .inbox_shown import drawn, render

    to_stderr = stream is sys.stderr
    write_quietly(stream, drawn(lambda console: render(verb, data, console, now()), to_stderr), signals.heard)
