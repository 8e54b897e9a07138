"""`shotclock inbox`: what waits for a person, for the person who decides and for agents that have no MCP.

What looks or decides runs in a child that can be killed, like other subcommands. What waits runs here, so that whoever
interrupts it is told which proposal stays queued.
"""

from __future__ import annotations

import re
import sys
from functools import partial

from ..core.clocks import parse_duration_ms
from ..core.envelope import Problem
from ..core.errors import Ending, Failure
from ..core.proposal import Decision, Kind, Proposal, ProposalRequest, ProposalStatus, must_be_open
from ..core.proposal import may_decide as must_be_decider
from ..core.value_types import replace
from ..inbox.access import Principal, Role
from ..inbox.audit_file import AuditFile
from ..inbox.person_wait import refusal_outcome
from ..inbox.proposal_json import Compared, compared_with, summary, whole
from ..process.clock import wall_time
from ..runtime.call import Call, Outcome, no_time_left
from ..runtime.commands import carry_out
from ..store.audit import Entry
from ..store.store import Store
from .output import is_terminal, raise_on_stop, signals_heard, write_quietly
from .parser import Command, CommandTable, argument, duration, flag, option, whole_number
from .subcommand import (
    TIMEOUT_MS,
    Verb,
    admit_call,
    conclude,
    deliver,
    engine_options,
    problem_in,
    read_serve_options,
    read_verb,
    refuse,
    serve,
    unstarted,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from pathlib import Path
    from typing import Any, TextIO

    from ..inbox.inbox import Inbox
    from .inbox_edit import Edit

    Begin = Callable[[], Call]
    """Starts the clock of something that is to be done now."""

# Reading all of a trail of years, entry by entry.
VERIFY_TIMEOUT_MS = 600_000
MOST_LISTED = 10_000
LISTED = 50
SERVED_AT = "127.0.0.1:8765"
# Names as tokens have them, so that a proposal's asker is never something to be escaped or mistaken for another.
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@+-]{0,63}", re.ASCII)
_MUTATING = frozenset(("approve", "modify", "reject", "extend", "propose", "withdraw"))
# Those that have a clock of their own: a person's patience, or the time that was asked for.
_WITHOUT_CLOCK = frozenset(("modify", "watch", "propose", "check"))

# --- what it takes ----------------------------------------------------------------------------------------------

_EPILOGUE = """\
Off a terminal each prints one JSON envelope on stdout, `watch` a line of JSON for each change before it.

Exit codes: 0 done; 4 a person has to do this at a terminal; 5 there is no such proposal; 6 it was decided before, has
expired or was withdrawn; 7 it is not yours to decide.

`shotclock inbox VERB --help` says more about each."""
_ANSWERS = """\
Exit codes: 0 approved or modified, and nothing else; 14 nobody has decided yet, and it stays queued; 7 rejected; 6
expired or withdrawn; 11 too many are open, and this one was not proposed. So `shotclock inbox propose … && do-it` does
it only after somebody has said yes. data.status says the same in one word, data.notes is what the operator wrote."""


def _limit(text: str) -> int:
    number = whole_number(text)
    if not 1 <= number <= MOST_LISTED:
        raise ValueError(f"must be 1 to {MOST_LISTED}")
    return number


def _asker(text: str) -> str:
    if not _NAME.fullmatch(text):
        raise ValueError("must be 1 to 64 letters, digits or ._@+-")
    return text


_ID = argument("proposal-id", "The proposal.")
_ENGINE = engine_options("Of the runs on Temporal: temporal://HOST:PORT[/NAMESPACE].")
_JSON = flag("--json", "The envelope alone on stdout, also on a terminal.")
_NOTES = option("--notes", "TEXT", "For whoever asked.", default="")
_LIMIT = option("--limit", "N", "So many at most.", default=str(LISTED), read=_limit)
_WAIT_HELP = "How long to wait for the decision, instead of SHOTCLOCK_RESPONSE_TIMEOUT, else 30s; 0 does not wait."
_DECIDING, _ASKING = "Deciding", "Asking"

TABLE = CommandTable(
    "shotclock inbox",
    "What waits for a person: agents propose, people decide, and nobody waits longer than they said.",
    (
        Command(
            "list",
            "List what waits for a decision; the one that changed last comes first.",
            (
                flag("--all", "Also those that are decided, expired or withdrawn."),
                option(
                    "--status",
                    "STATUS",
                    "Only these: pending, approved, modified, rejected, expired or withdrawn.",
                    choices=tuple(status.value for status in ProposalStatus),
                ),
                _LIMIT,
                *_ENGINE,
                _JSON,
            ),
            usage="[--all | --status STATUS]",
            heading=_DECIDING,
        ),
        Command(
            "show",
            "Show one proposal: what would be done, why, what would change in the file, and what became of it so far.",
            (_ID, *_ENGINE, _JSON),
            usage="ID",
            heading=_DECIDING,
        ),
        Command(
            "approve",
            "Say yes to it, as it is. What is destructive has to be confirmed by typing, at a terminal.",
            (
                _ID,
                _NOTES,
                option(
                    "--answer",
                    "TEXT",
                    'To a question: one of its choices, or any text where it has none ("yes" if nothing is said).',
                ),
                *_ENGINE,
                _JSON,
            ),
            usage="ID [--notes TEXT] [--answer TEXT]",
            heading=_DECIDING,
        ),
        Command(
            "modify",
            "Say yes to something else: edit the proposed file, or the arguments (as JSON), and approve that.",
            (
                _ID,
                option(
                    "--file",
                    "FILE",
                    "What it is to be is in this file. Without it, $VISUAL or $EDITOR is opened, at a terminal.",
                ),
                _NOTES,
                *_ENGINE,
                _JSON,
            ),
            usage="ID [--file FILE] [--notes TEXT]",
            heading=_DECIDING,
        ),
        Command(
            "reject",
            "Say no to it.",
            (
                _ID,
                option("--notes", "TEXT", "For whoever asked: why, and what would be better.", default=""),
                *_ENGINE,
                _JSON,
            ),
            usage="ID [--notes TEXT]",
            heading=_DECIDING,
        ),
        Command(
            "extend",
            "Let it stay open for longer, as in `shotclock inbox extend ID 2h`.",
            (_ID, argument("by", "By how long.", read=parse_duration_ms), _JSON),
            usage="ID DURATION",
            heading=_DECIDING,
        ),
        Command(
            "watch",
            "Show what waits, and from then on every change and every reminder, until Ctrl-C.",
            (duration("--for", "Only for this long.", key="for_ms"), _JSON),
            usage="[--for DURATION]",
            heading=_DECIDING,
        ),
        Command(
            "audit",
            "Show the last entries of the audit trail; of one proposal, all of them.",
            (
                _ID,
                flag(
                    "--verify",
                    "Whether the trail is whole: each entry that was removed, changed or put elsewhere is named (exit "
                    "1), and so is each proposal or token that is not what its entries say.",
                ),
                flag(
                    "--head",
                    "The end of the trail: how many entries there are, and the hash of the last one. Keep it "
                    "elsewhere.",
                ),
                option(
                    "--anchor",
                    "FILE",
                    "Append the head to this file. With --verify: check that the trail still has every head in this "
                    "file.",
                ),
                _LIMIT,
                _JSON,
            ),
            usage="[ID | --head | --verify] [--anchor FILE]",
            heading=_DECIDING,
        ),
        Command(
            "serve",
            "Serve the operators' page and its API, without an App, until Ctrl-C.",
            (
                option("--http", "HOST:PORT", "On this address; port 0 is any free one.", default=SERVED_AT),
                flag("--require-token", "Let nobody in without an access token, on this machine either."),
                *_ENGINE,
                _JSON,
            ),
            usage="[--http HOST:PORT] [--on URL]",
            heading=_DECIDING,
        ),
        Command(
            "propose",
            "Ask a person, and wait for the decision, but not for long. The identical call later picks it up.",
            (
                option("--title", "TEXT", "What is proposed, or the question, in one line."),
                option(
                    "--file",
                    "FILE",
                    "This file holds what is proposed. What is approved comes back in data.file; nothing is written.",
                ),
                option("--current", "FILE", "The file it is to replace; the operator sees the difference."),
                option("--choice", "TEXT", "With a question: a possible answer.", repeats=True),
                option("--justification", "TEXT", "Why the operator should agree.", default=""),
                duration("--ttl", "How long it stays open (a day, if nothing is said)."),
                duration("--remind", "So long before the end, whoever watches is reminded."),
                flag("--destructive", "Approving it has to be confirmed by typing the title."),
                duration("--wait", _WAIT_HELP),
                option(
                    "--idempotency-key",
                    "KEY",
                    "Calls with this key are one proposal. Without it, calls that propose the same are.",
                ),
                option(
                    "--as", "NAME", "Who asks; the user of this process, if nothing is said.", read=_asker, key="asker"
                ),
                _JSON,
            ),
            usage="--title TEXT [--file FILE [--current FILE]] [OPTIONS]",
            epilogue=_ANSWERS,
            heading=_ASKING,
        ),
        Command(
            "check",
            "Say how a proposal stands, and wait for its decision, but not for long.",
            (_ID, duration("--wait", _WAIT_HELP), _JSON),
            usage="ID [--wait DURATION]",
            epilogue=_ANSWERS,
            heading=_ASKING,
        ),
        Command(
            "withdraw",
            "Take a proposal back that nobody has decided yet.",
            (_ID, option("--as", "NAME", "Who asked, as it was said to propose.", read=_asker, key="asker"), _JSON),
            usage="ID",
            heading=_ASKING,
        ),
    ),
    kind="verb",
    epilogue=_EPILOGUE,
)


# --- the way of a call --------------------------------------------------------------------------------------------


def main(words: list[str]) -> int:
    """Run `shotclock inbox VERB`."""
    verb = read_verb(TABLE, words, _check_values)
    if isinstance(verb, int):
        return verb
    if verb.name == "serve":
        return _serve(verb)
    raise_on_stop()
    is_long = bool(verb.values.get("verify"))
    timeout_ms = 0 if verb.name in _WITHOUT_CLOCK else VERIFY_TIMEOUT_MS if is_long else TIMEOUT_MS

    def begin(timeout_ms: int) -> Call:
        is_same_again = verb.name == "propose"
        return admit_call(f"inbox {verb.name}", timeout_ms, mutates=verb.name in _MUTATING, idempotent=is_same_again)

    # A person who takes their time does not use up the time of what is done then.
    later = partial(begin, timeout_ms or TIMEOUT_MS)
    call = begin(timeout_ms)
    envelope = conclude(call, lambda: _perform_there(verb, call, later))
    if verb.name == "watch" and envelope.code == "CANCELLED" and not verb.as_json:  # by the one who sits there
        return envelope.exit_code
    return deliver(envelope, verb.as_json, lambda envelope: _show(verb.name, envelope.data, sys.stdout))


def _serve(verb: Verb) -> int:
    """Serve until somebody stops it: it has no clock, and hears signals itself."""
    try:
        options, mistakes = read_serve_options(
            http=verb.values["http"], require_token=verb.values["require_token"], on=verb.values["on"]
        )
    except Failure as failure:  # to serve others, tokens are looked for
        return deliver(unstarted("inbox serve", problem_in(failure), timeout_ms=0), verb.as_json)
    if mistakes:
        return refuse("inbox serve", mistakes, verb.as_json)
    return serve("inbox serve", None, options, verb.as_json)


def _check_values(verb: str, said: dict[str, Any], report: Callable[[str, str], None]) -> None:
    if verb in ("show", "approve", "modify", "reject", "extend", "check", "withdraw") and not said["proposal_id"]:
        report("proposal-id", "which one? `shotclock inbox list` lists them")
    if verb == "extend" and said["by"] is None:
        report("by", "by how long? As in `shotclock inbox extend ID 2h`")
    if verb == "list" and said["all"] and said["status"] is not None:
        report("status", "--all and --status exclude each other")
    if verb == "audit":
        is_whole = [name for name in ("verify", "head", "anchor") if said[name]]
        if is_whole and said["proposal_id"] is not None:
            report(is_whole[0], "the trail is one chain: it is looked at as a whole")
        if said["verify"] and said["head"]:
            report("head", "--head and --verify exclude each other")
    if verb == "propose":
        if said["title"] is None:
            report("title", "what is proposed? --title says it in one line")
        if said["current"] is not None and said["file"] is None:
            report("current", "is what --file is compared with")
        if said["choice"] and said["file"] is not None:
            report("choice", "a proposed file is approved, modified or rejected")


def _perform_there(verb: Verb, call: Call, begin: Begin) -> Outcome:
    """Perform it here, or with what the runs of an engine ask."""
    on = verb.values.get("on")
    if on is None:
        return _perform(verb, call, begin)
    from .engine import perform_on_proposals

    try:
        decides = verb.name in ("approve", "modify", "reject")
        id = verb.values.get("proposal_id")
        return perform_on_proposals(on, id, decides, lambda: _perform(verb, call, begin))
    except Failure as failure:
        return refusal_outcome(failure)


def _perform(verb: Verb, call: Call, begin: Begin) -> Outcome:
    if call.no_time_left:
        return no_time_left(call)
    try:
        if verb.name in ("propose", "check"):
            from .inbox_wait import propose_or_check

            return propose_or_check(verb.name, verb.values, call)
        if verb.name == "watch":
            from .inbox_wait import watch

            return watch(verb.values["for_ms"], call, verb.as_json)
        return _do(verb.name, verb.values, begin)
    except Failure as failure:
        return refusal_outcome(failure)


# --- looking and deciding -------------------------------------------------------------------------------------


def _do(verb: str, said: dict[str, Any], begin: Begin) -> Outcome:
    me = replace(Principal.local(), via="the command line")
    id: str = said.get("proposal_id") or ""
    match verb:
        case "list":
            status = None if said["all"] else ProposalStatus(said["status"] or "pending")
            return carry_out(begin(), lambda: _list(me, status, said["limit"]))
        case "audit":
            return carry_out(begin(), lambda: _audit(id, said))
        case "extend":
            return _do_in_child(begin, lambda inbox: _describe_change(inbox.extend(id, said["by"], me), me))
        case "withdraw":
            asker = Principal(said["asker"] or me.name, Role.AGENT)
            return _do_in_child(begin, lambda inbox: _describe_change(inbox.withdraw(id, asker), me))
        case "reject":
            return _decide(begin, id, Decision(ProposalStatus.REJECTED, said["notes"]), me)
    found = _do_in_child(begin, lambda inbox: _find(inbox, id, me))
    if found.problem is not None:
        return found
    value: Any = found.value
    data: Any = found.data
    proposal, compared = value
    if verb == "show":
        from .inbox_edit import difference

        data["diff"] = difference(proposal, compared)
        return Outcome(Ending.FINISHED, data=data)
    must_be_decider(proposal, me.name)
    must_be_open(proposal)
    if verb == "modify":
        return _modify(begin, proposal, compared, data, said, me)
    decision = Decision(ProposalStatus.APPROVED, said["notes"], answer=_answer_to(proposal.ask, said["answer"]))
    confirmation = _confirm(proposal, compared, data)
    return _decide(begin, id, decision, me, proposal.action_hash, confirmation)


def _answer_to(ask: ProposalRequest, said: str | None) -> str | None:
    """Return the answer to a question: "yes" where nobody wants another."""
    return "yes" if said is None and ask.kind is Kind.QUESTION and not ask.choices else said


def _modify(
    begin: Begin, proposal: Proposal, compared: Compared, data: dict[str, Any], said: dict[str, Any], me: Principal
) -> Outcome:
    from .inbox_edit import edit_proposal

    with edit_proposal(proposal, said["file"], said["notes"]) as edit:
        confirmation = _confirm(proposal, compared, data)
        outcome = _decide(begin, proposal.id, edit.decision, me, proposal.action_hash, confirmation)
        edit.is_done = outcome.problem is None
    return _name_kept_copy(outcome, edit)


def _name_kept_copy(outcome: Outcome, edit: Edit) -> Outcome:
    """Say where what was written is kept, when somebody else decided first."""
    if isinstance(outcome.problem, Problem) and edit.kept is not None:
        context = {**(outcome.problem.context or {}), "edit": edit.kept}
        message = f"{outcome.problem.message}; what you wrote is in {edit.kept}"
        outcome.problem = replace(outcome.problem, message=message, context=context)
    return outcome


def _confirm(proposal: Proposal, compared: Compared, data: dict[str, Any]) -> str | None:
    """Return what the person typed. Raises Failure where there is none, or no agreement."""
    if not proposal.ask.policy.destructive:
        return None
    if is_terminal(sys.stdin) and is_terminal(sys.stderr):
        from .inbox_edit import difference

        data["diff"] = difference(proposal, compared)
        _show("show", data, sys.stderr)
    from .output import confirm

    problem = confirm(proposal.id, proposal.ask.confirmation)
    if problem is not None:
        raise Failure(problem.code, problem.message, context=problem.context)
    return proposal.ask.confirmation


def _decide(
    begin: Begin,
    id: str,
    decision: Decision,
    me: Principal,
    action_hash: str | None = None,
    confirmation: str | None = None,
) -> Outcome:
    return _do_in_child(
        begin,
        lambda inbox: _describe_change(
            inbox.decide(id, decision, me, action_hash=action_hash, confirmation=confirmation),
            me,
        ),
    )


def _do_in_child(begin: Begin, work: Callable[[Inbox], Awaitable[Outcome]]) -> Outcome:
    """Do the work in a child, on the clock. A refusal is the outcome."""

    import asyncio

    from ..inbox.inbox import Inbox

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
            return refusal_outcome(failure)

    return carry_out(begin(), body)


async def _describe_change(changing: Awaitable[Proposal], me: Principal) -> Outcome:
    return Outcome(Ending.FINISHED, data=summary((await changing).summary, me))


async def _find(inbox: Inbox, id: str, me: Principal) -> Outcome:
    proposal = await inbox.get(id)
    if proposal is None:
        raise Failure("PROPOSAL_NOT_FOUND", f"there is no proposal {id!r}")
    history = [_entry(entry) for entry in await inbox.history(id)]
    compared = compared_with(proposal, me)
    data = {**whole(proposal, me, compared), "diff": None, "history": history}
    return Outcome(Ending.FINISHED, data=data, value=(proposal, compared))


def _list(me: Principal, status: ProposalStatus | None, limit: int) -> Outcome:
    """List proposals, after those that are due have expired. As `Inbox.list` does, without its threads and its loop."""
    try:
        with Store.open() as store:
            if store.proposals.end_due(wall_time()):
                AuditFile(store).catch_up_if_possible()
            found = store.proposals.list(status=status, limit=limit + 1)
    except Failure as failure:
        return refusal_outcome(failure)
    proposals = [summary(proposal, me) for proposal in found[:limit]]
    said = None if status is None else status.value
    return Outcome(Ending.FINISHED, data={"status": said, "proposals": proposals, "more": len(found) > limit})


def _audit(id: str, said: dict[str, Any]) -> Outcome:
    import asyncio
    from pathlib import Path

    anchor = None if said["anchor"] is None else Path(said["anchor"]).absolute()
    limit: int = said["limit"]
    try:
        with Store.open() as store:
            if said["verify"]:
                return asyncio.run(_verify(store, anchor))
            if said["head"] or anchor is not None:
                trail = AuditFile(store)
                head = trail.head() if anchor is None else trail.anchor(anchor, wall_time())
                return Outcome(Ending.FINISHED, data={"head": {"seq": head.seq, "hash": head.hash}})
            entries = _last_entries(store, limit) if not id else store.audit.of(id)[-limit:]
            if id and not entries:
                raise Failure("PROPOSAL_NOT_FOUND", f"there is no proposal {id!r}")
    except Failure as failure:
        return refusal_outcome(failure)
    return Outcome(Ending.FINISHED, data={"entries": [_entry(entry) for entry in entries]})


def _last_entries(store: Store, limit: int) -> list[Entry]:
    """Return the last entries. Their numbers have no gaps, but for those that somebody took out."""
    last: list[Entry] = []
    after = max(0, store.audit.get_filed_seq() - limit)
    while entries := store.audit.entries(after):
        last = (last + entries)[-limit:]
        after = entries[-1].seq
    return last


async def _verify(store: Store, anchor: Path | None) -> Outcome:
    from ..inbox.inbox import Inbox

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


# --- the answer -----------------------------------------------------------------------------------------------


def _show(verb: str, data: Any, stream: TextIO) -> None:
    """Draw it all at once, and without waiting for a terminal that takes nothing."""
    from .render import draw_text, render_inbox

    if isinstance(data, dict):
        to_stderr = stream is sys.stderr
        write_quietly(
            stream, draw_text(lambda console: render_inbox(verb, data, console, wall_time()), to_stderr), signals_heard
        )
