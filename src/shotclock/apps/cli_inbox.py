"""`shotclock inbox`: proposals, for the people who decide them and for agents without MCP.

Verbs that wait run here, not in a child, so that an interrupted caller learns which proposal remains queued.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from ..calls.call import Call, Outcome, no_time_left
from ..calls.principal import Principal, Role
from ..core.envelope import Problem
from ..core.errors import Ending, Failure
from ..core.limits import parse_duration_ms
from ..core.proposal import Confirmation, Decision, Kind, Proposal, ProposalStatus
from ..core.proposal import may_decide as must_be_decider
from ..core.value_types import replace, value
from ..dispatch.engines import engine_at, engine_options
from ..people.audit_file import AuditFile, AuditProblem
from ..people.cli_editing import difference, edit_proposal
from ..people.person_wait import LastUse, refusal_outcome
from ..people.proposal_json import compared_with, summary, whole
from ..store.audit import Entry
from ..store.store import Store
from ..supervise.clock import wall_time
from ..supervise.owner import find_agent_mark
from ..terminal.output import StopListener, confirm, is_terminal
from ..terminal.parser import CommandTable, Option, Subcommand
from ..terminal.subcommand import TIMEOUT_MS, admit_call, carry_out_or_fail, conclude, deliver, draw_answer
from ._inbox_drawing import draw_inbox, draw_proposal

if TYPE_CHECKING:
    from ..dispatch.engines import EngineAddress
    from ..people.inbox import Inbox

VERIFY_TIMEOUT_MS = 600_000  # the verification reads a trail of years, entry by entry
MOST_LISTED = 10_000
_OUTSIDE = "decide in a terminal that the agent did not open, or on the operators' page: shotclock inbox serve"
# The names that tokens have: an asker's name needs no escaping and resembles no other.
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@+-]{0,63}", re.ASCII)
_DECIDING = ("approve", "modify", "reject")
_MUTATING = ("approve", "modify", "reject", "extend", "propose", "withdraw")

Start = Callable[[bool], int]


@value
class InboxCall:
    call: Call
    begin: Callable[[], Call]  # starts the clock of a child, so that the time a person takes does not count
    as_json: bool
    me: Principal
    on: EngineAddress | None


def _start(
    verb: str, work: Callable[[InboxCall], Outcome], *, on: EngineAddress | None = None, timeout_ms: int | None = None
) -> Start:
    """Return the work of a verb. `timeout_ms` 0: it has a limit of its own, or ends with a person's patience."""

    def start(as_json: bool) -> int:
        StopListener.raise_at_once()
        limit_ms = TIMEOUT_MS if timeout_ms is None else timeout_ms
        admit = partial(admit_call, f"inbox {verb}", mutates=verb in _MUTATING, idempotent=verb == "propose")
        me = replace(Principal.local(), via="the command line")
        this = InboxCall(admit(limit_ms), partial(admit, limit_ms or TIMEOUT_MS), as_json, me, on)

        def work_in_time() -> Outcome:
            if this.call.no_time_left:
                return no_time_left(this.call)
            if verb in _DECIDING and (mark := find_agent_mark()) is not None:
                message = f"a coding agent runs this command ({mark} is set), and people decide; nothing was decided"
                raise Failure("NOT_ALLOWED", message, suggestion=_OUTSIDE)
            return work(this)

        envelope = conclude(this.call, work_in_time, refusal_outcome)
        if verb == "watch" and envelope.code == "CANCELLED" and not as_json:
            return envelope.exit_code  # the person at the terminal ended it
        return deliver(envelope, as_json, lambda envelope: draw_answer(partial(draw_inbox, verb), envelope.data))

    return start


def _in_child(this: InboxCall, body: Callable[[], Outcome]) -> Outcome:
    return carry_out_or_fail(this.begin(), body, refusal_outcome)


def _with_inbox(this: InboxCall, work: Callable[[Inbox], Awaitable[Outcome]]) -> Outcome:
    import asyncio

    from ..people.inbox import Inbox

    async def perform() -> Outcome:
        if this.on is not None:
            opened = engine_at(this.on).open_inbox(this.on)
            return await work(cast("Inbox", opened))  # verbs with --on only show and decide
        with Store.open() as store:
            inbox = Inbox(store)
            try:
                return await work(inbox)
            finally:
                await inbox.close()

    return _in_child(this, lambda: asyncio.run(perform()))


def _run_list(all: bool, status: str | None, limit: int, on: EngineAddress | None) -> Start:
    wanted = None if all else ProposalStatus(status or "pending")

    def body(me: Principal) -> Outcome:
        rows = _list_here(me, wanted, limit + 1) if on is None else _list_on(on, me, wanted)
        name = None if wanted is None else wanted.value
        return Outcome(Ending.FINISHED, data={"status": name, "proposals": rows[:limit], "more": len(rows) > limit})

    return _start("list", lambda this: _in_child(this, lambda: body(this.me)))


def _list_here(me: Principal, status: ProposalStatus | None, limit: int) -> list[dict[str, object]]:
    """List proposals after ending those that are due. As `Inbox.list`, without its threads and its loop."""
    with Store.open() as store:
        if store.proposals.end_due(wall_time()):
            AuditFile(store).catch_up_if_possible()
        return [summary(proposal, me) for proposal in store.proposals.list(status=status, limit=limit)]


def _list_on(on: EngineAddress, me: Principal, status: ProposalStatus | None) -> list[dict[str, object]]:
    import asyncio

    found = asyncio.run(engine_at(on).open_runs(on).find_proposals())
    found.sort(key=lambda each: each[1].created_at, reverse=True)
    return [
        {**summary(proposal.summary, me), "run_id": run_id}
        for run_id, proposal in found
        if status in (None, proposal.status)
    ]


def _run_show(proposal_id: str, on: EngineAddress | None) -> Start:
    def work(this: InboxCall) -> Outcome:
        found = _find(this, proposal_id)
        if found.problem is None:
            _add_difference(found)
        return replace(found, value=None)

    return _start("show", work, on=on)


def _find(this: InboxCall, id: str) -> Outcome:
    async def find(inbox: Inbox) -> Outcome:
        proposal = await inbox.get(id)
        if proposal is None:
            raise Failure("PROPOSAL_NOT_FOUND", f"there is no proposal {id!r}")
        history = [_entry(entry) for entry in await inbox.history(id)]
        compared, last_use = compared_with(proposal, this.me), await _find_last_use(this, inbox, proposal)
        data = {**whole(proposal, this.me, compared, last_use), "diff": None, "history": history}
        return Outcome(Ending.FINISHED, data=data, value=(proposal, compared))

    return _with_inbox(this, find)


def _add_difference(found: Outcome) -> None:
    data: Any = found.data
    value: Any = found.value
    data["diff"] = difference(*value)


def _run_audit(proposal_id: str | None, verify: bool, head: bool, anchor: str | None, limit: int) -> Start:
    file = None if anchor is None else Path(anchor).absolute()

    def body() -> Outcome:
        with Store.open() as store:
            trail = AuditFile(store)
            if verify:
                return _describe_problems(trail.verify() + ([] if file is None else trail.check_anchor(file)))
            if head or file is not None:
                end = store.audit.head() if file is None else trail.anchor(file, wall_time())
                return Outcome(Ending.FINISHED, data={"head": end._asdict()})
            entries = _last_entries(store, limit) if not proposal_id else store.audit.of(proposal_id)[-limit:]
            if proposal_id and not entries:
                raise Failure("PROPOSAL_NOT_FOUND", f"there is no proposal {proposal_id!r}")
            return Outcome(Ending.FINISHED, data={"entries": [_entry(entry) for entry in entries]})

    timeout_ms = VERIFY_TIMEOUT_MS if verify else None
    return _start("audit", lambda this: _in_child(this, body), timeout_ms=timeout_ms)


def _last_entries(store: Store, limit: int) -> list[Entry]:
    """Return the last entries. Their numbers have gaps only where entries were removed."""
    last: list[Entry] = []
    after = max(0, store.audit.get_filed_seq() - limit)
    while entries := store.audit.entries(after):
        last = (last + entries)[-limit:]
        after = entries[-1].seq
    return last


def _describe_problems(found: list[AuditProblem]) -> Outcome:
    problems = [{"place": p.place, "message": p.message, "seq": p.seq, "line": p.line} for p in found]
    data: dict[str, object] = {"whole": not problems, "problems": problems}
    if not problems:
        return Outcome(Ending.FINISHED, data=data)
    more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
    return Outcome(Ending.FINISHED, Problem("AUDIT_BROKEN", f"{found[0]}{more}"), data)


def _entry(entry: Entry) -> dict[str, object]:
    content = entry.content()
    del content["previous"]
    return {**content, "hash": entry.hash}


def _run_approve(proposal_id: str, notes: str, answer: str | None, on: EngineAddress | None) -> Start:
    def work(this: InboxCall) -> Outcome:
        found = _find(this, proposal_id)
        if found.problem is not None:
            return found
        proposal = _decidable(this, found)
        is_yes = answer is None and proposal.ask.kind is Kind.QUESTION and not proposal.ask.choices
        decision = Decision(ProposalStatus.APPROVED, notes, answer="yes" if is_yes else answer)
        return _decide(this, proposal_id, decision, Confirmation(proposal.action_hash, _confirm(proposal, found)))

    return _start("approve", work, on=on)


def _run_modify(proposal_id: str, file: str | None, notes: str, on: EngineAddress | None) -> Start:
    def work(this: InboxCall) -> Outcome:
        found = _find(this, proposal_id)
        if found.problem is not None:
            return found
        proposal = _decidable(this, found)
        decision, copy = edit_proposal(proposal, file, notes)
        confirmation = Confirmation(proposal.action_hash, _confirm(proposal, found))
        outcome = _decide(this, proposal_id, decision, confirmation)
        if copy is not None and outcome.problem is None:
            copy.unlink(missing_ok=True)
        elif copy is not None and isinstance(outcome.problem, Problem):
            context = {**(outcome.problem.context or {}), "edit": str(copy)}
            message = f"{outcome.problem.message}; your text is in {copy}"
            outcome.problem = replace(outcome.problem, message=message, context=context)
        return outcome

    return _start("modify", work, on=on, timeout_ms=0)


def _run_reject(proposal_id: str, notes: str, on: EngineAddress | None) -> Start:
    decision = Decision(ProposalStatus.REJECTED, notes)
    return _start("reject", lambda this: _decide(this, proposal_id, decision), on=on)


def _run_extend(proposal_id: str, by: int) -> Start:
    return _start("extend", lambda this: _change(this, lambda inbox: inbox.extend(proposal_id, by, this.me)))


def _run_withdraw(proposal_id: str, asker: str | None) -> Start:
    def work(this: InboxCall) -> Outcome:
        agent = Principal(asker or this.me.name, Role.AGENT)
        return _change(this, lambda inbox: inbox.withdraw(proposal_id, agent))

    return _start("withdraw", work)


def _decidable(this: InboxCall, found: Outcome) -> Proposal:
    """Return the found proposal. Raises Failure where it is not open, or not ours to decide."""
    value: Any = found.value
    proposal: Proposal = value[0]
    must_be_decider(proposal, this.me.name)
    proposal.must_be_open()
    return proposal


def _confirm(proposal: Proposal, found: Outcome) -> str | None:
    if not proposal.ask.policy.destructive:
        return None
    if is_terminal(sys.stdin) and is_terminal(sys.stderr):
        _add_difference(found)
        draw_answer(draw_proposal, found.data, sys.stderr)
    problem = confirm(proposal.id, proposal.ask.confirmation)
    if problem is not None:
        raise Failure(problem.code, problem.message, context=problem.context, suggestion=problem.suggestion)
    return proposal.ask.confirmation


def _decide(this: InboxCall, id: str, decision: Decision, confirmation: Confirmation = Confirmation()) -> Outcome:
    return _change(this, lambda inbox: inbox.decide(id, decision, this.me, confirmation))


def _change(this: InboxCall, change: Callable[[Inbox], Awaitable[Proposal]]) -> Outcome:
    async def perform(inbox: Inbox) -> Outcome:
        changed = await change(inbox)
        data = summary(changed.summary, this.me, await _find_last_use(this, inbox, changed))
        return Outcome(Ending.FINISHED, data=data)

    return _with_inbox(this, perform)


async def _find_last_use(this: InboxCall, inbox: Inbox, proposal: Proposal) -> LastUse | None:
    return None if this.on is not None else await inbox.find_last_use(proposal)


def _run_waiting(verb: str, **values: Any) -> Start:
    from .cli_inbox_wait import VERBS

    return _start(verb, lambda this: VERBS[verb]({**values, "as_json": this.as_json}, this.call), timeout_ms=0)


def _run_serve(http: str, require_token: bool, on: EngineAddress | None) -> Start:
    from .cli_serve import read_serve_options, serve

    options = read_serve_options(http=http, require_token=require_token, on=on)
    return lambda as_json: serve("inbox serve", None, options, as_json)


_EPILOGUE = """\
Off a terminal each verb prints one JSON envelope on stdout, `watch` a line of JSON for each change before it.

Exit codes: 0 done; 4 a person has to do this at a terminal; 5 there is no such proposal; 6 it was decided before, has
expired or was withdrawn; 7 you may not decide it.

`shotclock inbox VERB --help` shows the options of a verb."""
_ANSWERS = """\
Exit codes: 0 approved or modified; 14 not decided yet, it remains queued; 7 rejected; 6 expired or withdrawn; 11 too
many proposals are open, and this one was not made. So `shotclock inbox propose … && do-it` does it only after an
approval. data.status is the same in one word, data.notes is the operator's text."""


def _read_asker(text: str) -> str:
    if not _NAME.fullmatch(text):
        raise ValueError("must be 1 to 64 letters, digits or ._@+-")
    return text


_ID = Option.argument("proposal-id", "The proposal.", missing="missing proposal id; see `shotclock inbox list`")
_ENGINE = engine_options("Proposals of runs on Temporal: temporal://HOST:PORT[/NAMESPACE].")
_NOTES = Option.taking("--notes", "TEXT", "A note for the asker.", default="")
_LIMIT = Option.number(
    "--limit",
    "List at most this many.",
    1,
    MOST_LISTED,
    default="50",
)
_WAIT = Option.duration(
    "--wait",
    "Wait this long for the decision, instead of SHOTCLOCK_RESPONSE_TIMEOUT (a duration), else "
    "SUPERVISE_RESPONSE_TIMEOUT_SECONDS, else 30s; 0 does not wait. Never longer than the caller's own deadline.",
)
_VERBS = (
    Subcommand(
        "list",
        "List the proposals that wait for a decision, the last changed first.",
        (
            Option.flag("--all", "List decided, expired and withdrawn proposals as well."),
            Option.taking(
                "--status",
                "STATUS",
                "List only these: pending, approved, modified, rejected, expired or withdrawn.",
                choices=tuple(status.value for status in ProposalStatus),
                excludes=("--all",),
            ),
            _LIMIT,
            *_ENGINE,
        ),
        _run_list,
    ),
    Subcommand(
        "show",
        "Show a proposal: the action, the reason, the change to the file, and its history.",
        (_ID, *_ENGINE),
        _run_show,
    ),
    Subcommand(
        "approve",
        "Approve a proposal as it is. A destructive one has to be confirmed by typing, at a terminal.",
        (
            _ID,
            _NOTES,
            Option.taking(
                "--answer", "TEXT", 'The answer to a question: one of its choices, or any text if it has none ["yes"].'
            ),
            *_ENGINE,
        ),
        _run_approve,
    ),
    Subcommand(
        "modify",
        "Edit the proposed file or arguments (as JSON), and approve the result.",
        (
            _ID,
            Option.taking(
                "--file", "FILE", "The file with the new text. Without it, $VISUAL or $EDITOR is opened, at a terminal."
            ),
            _NOTES,
            *_ENGINE,
        ),
        _run_modify,
    ),
    Subcommand(
        "reject",
        "Reject a proposal.",
        (
            _ID,
            Option.taking("--notes", "TEXT", "The reason for the asker, and a better way.", default=""),
            *_ENGINE,
        ),
        _run_reject,
    ),
    Subcommand(
        "extend",
        "Keep a proposal open for longer, as in `shotclock inbox extend ID 2h`.",
        (
            _ID,
            Option.argument(
                "by",
                "The time to add.",
                read=parse_duration_ms,
                missing="missing BY: the time to add, as in `shotclock inbox extend ID 2h`",
            ),
        ),
        _run_extend,
    ),
    Subcommand(
        "watch",
        "Show the waiting proposals, then every change and every reminder, until Ctrl-C.",
        (Option.duration("--for", "Stop after this time.", key="for_ms"),),
        partial(_run_waiting, "watch"),
    ),
    Subcommand(
        "audit",
        "Show the last entries of the audit trail, or all entries of one proposal.",
        (
            Option.argument("proposal-id", "The proposal."),
            Option.flag(
                "--verify",
                "Check the trail: report each entry that was removed, changed or moved (exit 1), and each proposal or "
                "token that differs from its entries.",
                excludes=("proposal-id",),
            ),
            Option.flag(
                "--head",
                "Show the number of entries and the hash of the last one. Keep it elsewhere.",
                excludes=("proposal-id", "--verify"),
            ),
            Option.taking(
                "--anchor",
                "FILE",
                "Append the head to this file. With --verify: check that the trail still has every head in the file.",
                excludes=("proposal-id",),
            ),
            _LIMIT,
        ),
        _run_audit,
    ),
    Subcommand(
        "serve",
        "Serve the operators' page and its API, without an App, until Ctrl-C.",
        (
            Option.taking("--http", "HOST:PORT", "The address; port 0 is any free port.", default="127.0.0.1:8765"),
            Option.flag("--require-token", "Require an access token, also from this machine."),
            *_ENGINE,
        ),
        _run_serve,
    ),
    Subcommand(
        "propose",
        "Ask a person and wait for the decision for a short time. The identical call later returns it.",
        (
            Option.taking(
                "--title",
                "TEXT",
                "The proposal or the question in one line; at most 200 characters.",
                missing="missing --title: the proposal in one line",
            ),
            Option.taking(
                "--file",
                "FILE",
                "The file with the whole proposed text (UTF-8, at most 1 MB). The approved text is returned in "
                "data.file; nothing is written. Without it, the proposal is a question.",
            ),
            Option.taking(
                "--current",
                "FILE",
                "The file that it would replace [the one of --file]; the operator sees the difference.",
                needs="--file",
            ),
            Option.taking("--choice", "TEXT", "A possible answer to a question.", repeats=True, excludes=("--file",)),
            Option.taking("--justification", "TEXT", "The reason; at most 20,000 characters.", default=""),
            Option.duration("--ttl", "It expires after this time, and so does its decision [1 day]; 0 means never."),
            Option.duration("--remind", "Remind the operators this long before it expires."),
            Option.flag("--destructive", "The approval has to be confirmed by typing the title."),
            _WAIT,
            Option.taking(
                "--idempotency-key",
                "KEY",
                "Calls with this key are one proposal; with other content it is KEY_REUSED. Without it, calls that "
                "propose the same are one.",
            ),
            Option.taking("--as", "NAME", "The asker [the user of this process].", read=_read_asker, key="asker"),
        ),
        partial(_run_waiting, "propose"),
        usage="--title TEXT [--file FILE [--current FILE]] [OPTIONS]",
        epilogue=_ANSWERS,
    ),
    Subcommand(
        "check",
        "Show the state of a proposal, and wait for its decision for a short time.",
        (_ID, _WAIT),
        partial(_run_waiting, "check"),
        epilogue=_ANSWERS,
    ),
    Subcommand(
        "withdraw",
        "Withdraw a proposal that is not decided yet.",
        (
            _ID,
            Option.taking("--as", "NAME", "The asker that made the proposal.", read=_read_asker, key="asker"),
        ),
        _run_withdraw,
    ),
)
COMMANDS = {
    "inbox": CommandTable(
        "shotclock inbox",
        "Proposals: agents make them, people decide them, and no call waits longer than its limit.",
        _VERBS,
        kind="verb",
        epilogue=_EPILOGUE,
    )
}
