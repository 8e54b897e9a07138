"""The inbox, for every surface: propose, wait, look, decide.

Everything that uses the store runs on one thread of the inbox's own, in order, so that neither the event loop nor its
other threads wait for the disk. Entries of the audit trail are written to their file on the same thread, after the work
that is already queued, so that a burst of changes is one write.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import os
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

from ..calls.principal import Principal
from ..calls.supervised_commands import run_shielded
from ..core.envelope import refusal, shorten
from ..core.errors import Failure
from ..core.limits import LATEST_MS, Deadline, WallTime
from ..core.proposal import (
    ActionOutcome,
    Confirmation,
    Decision,
    InboxLimits,
    Proposal,
    ProposalRequest,
    ProposalStatus,
    Runner,
    Summary,
)
from ..core.value_types import JsonObject, value
from ..core.visible_text import HIDDEN, looks_secret
from ..store.audit import Entry
from ..store.home import load_private_key, make_private_directory
from ..store.proposals import NewProposal
from ..store.runs import StoredRun
from ..store.store import Store, prune_in_passing
from ..supervise.clock import monotonic_ns, wall_time
from ..supervise.kernel import is_alive, this_process
from ._watcher import Watcher, set_results
from .access import make_id
from .announcer import Announcer
from .audit_file import AuditFile, AuditProblem
from .person_wait import LastUse, read_inbox_limits
from .proposal_checks import check_decision, problems_with, problems_with_key

# Closing waits this long for queued work. Each piece is bounded by the store's own waits; a stuck disk exhausts this.
CLOSE_LIMIT_S = 15.0
# A cancellation waits this long for a proposal that is being written. A busy store exhausts this.
WRITTEN_LIMIT_S = 2.0
# A watcher that was not woken looks for itself after this long.
CHANGES_LOOK_S = 15.0
# A wait without an end is made of pieces of this.
LONGEST_WAIT_MS = 3_600_000
# Pruning starts when the process has run this long, or ends, so that it does not delay the first callers.
PRUNE_AFTER_MS = 60_000
# Changes that are read for a watcher at once, and proposals of one transaction.
CHANGES_AT_ONCE = 100
PROPOSED_AT_ONCE = 100
# The key of the digests of hidden values, in the store's directory. 64 bits of a digest are shown.
KEY_FILE = "approvals.key"
HIDDEN_DIGITS = 16
# The part of an error's message that is kept with the proposal.
OUTCOME_SHOWN = 500

T = TypeVar("T")


@value
class Reminder:
    """A proposal that is about to expire undecided."""

    proposal: Summary


class Inbox:
    """Proposals of one store, for several event loops. A refused request is a Failure with a registered code."""

    def __init__(self, store: Store, limits: InboxLimits | None = None) -> None:
        """Raise Failure if the environment holds no valid limit of open proposals."""
        self._limits = limits or read_inbox_limits()
        self._store = store
        self._proposals = store.proposals
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="shotclock-inbox-store")
        self._watcher = Watcher(store.proposals, self._file_soon)
        self._file = AuditFile(store)
        self._announcer = Announcer(store)
        self._lock = threading.Lock()
        self._queued: deque[tuple[NewProposal, Future[Proposal]]] = deque()
        self._filing = False
        self._closed = False
        self._key: bytes | None = None
        self._prune_at = Deadline.after_ms(monotonic_ns(), PRUNE_AFTER_MS)

    async def close(self) -> None:
        """Close the inbox: callers that still wait get the proposal as it was. The store stays open."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        last = self._thread.submit(self._finish)
        self._thread.shutdown(wait=False)
        await asyncio.wait([asyncio.wrap_future(last)], timeout=CLOSE_LIMIT_S)
        if self._announcer.is_sending:
            await asyncio.to_thread(self._announcer.close)

    # --- for agents -----------------------------------------------------------------------------------------

    async def propose(
        self,
        ask: ProposalRequest,
        by: Principal,
        *,
        key: str | None = None,
        since: WallTime | None = None,
        until: WallTime | None = None,
        outlives_asker: bool = True,
        on_found: Callable[[Proposal], None] | None = None,
    ) -> Proposal:
        """Return the proposal that answers this call: an open one, one whose decision is still valid, or a new one.

        `since`: a proposal under the key from then on answers it, even an expired one. `until` is the end of the work
        that asks, which the proposal does not outlive. Raises Failure (INBOX_FULL) if too many are open. A cancellation
        while the proposal is being written is raised after that; if the proposal is not to outlive its asker, it is
        withdrawn then. `on_found` is called with the proposal in either case and may raise Failure.
        """
        answer: Future[Proposal] = Future()
        with self._lock:
            self._must_not_be_closed()
            self._queued.append((NewProposal(f"p-{make_id(10)}", ask, by.name, key, since, until), answer))
            self._thread.submit(self._propose_next)
        try:
            proposal = await asyncio.wrap_future(answer)
        except asyncio.CancelledError:
            if answer.cancel():  # before it was begun
                raise
            if not outlives_asker:  # queued behind the writing, and before the closing
                self._do_later(lambda: self._proposals.withdraw(answer.result(0).id, by.name, wall_time()))
                raise
            written = asyncio.wrap_future(answer)
            await run_shielded(asyncio.wait([written], timeout=WRITTEN_LIMIT_S))
            if written.done() and written.exception() is None and on_found is not None:
                with suppress(Failure):  # the cancellation comes first
                    on_found(written.result())
            raise
        if on_found is not None:
            on_found(proposal)
        return proposal

    async def wait(self, proposal_id: str, wait_ms: int) -> Proposal:
        """Return the proposal once it is not pending any more, or as it is when the time is up.

        Raises Failure if there is none of that id, or the store cannot be used; never because of time.
        """
        if wait_ms <= 0:
            return await self._do(lambda: self._get_existing(proposal_id))
        loop = asyncio.get_running_loop()
        until = loop.time() + wait_ms / 1000
        decided = self._watcher.register(proposal_id)
        bell = None
        try:
            proposal = await self._do(lambda: self._get_existing(proposal_id, watched=True))
            if not proposal.is_open:
                return proposal
            bell = loop.call_at(until, set_results, [decided], None)
            return await decided or proposal
        finally:
            self._watcher.unregister(proposal_id, decided)
            if bell is not None:
                bell.cancel()

    async def wait_until(self, proposal: Proposal, deadline: Deadline | None) -> Proposal:
        """Wait as `wait` does, until a deadline or, without one, until the proposal ends."""
        while proposal.is_open:
            left_ms = LONGEST_WAIT_MS if deadline is None else deadline.remaining_ms(monotonic_ns())
            if left_ms <= 0:
                break
            proposal = await self.wait(proposal.id, min(left_ms, LONGEST_WAIT_MS))
        return proposal

    async def end_wait(self, proposal: Proposal) -> Proposal:
        """Return a proposal that can be decided no more: as it was decided just now, or expired or withdrawn."""

        def work() -> Proposal:
            with suppress(Failure):  # it was decided, or has expired
                self._proposals.withdraw(proposal.id, proposal.asked_by, wall_time())
            return self._get_existing(proposal.id)

        return await self._change(work)

    def follow(self, proposal_id: str, until: WallTime) -> None:
        """Move the end of a proposal with the later end of the work that asks, without waiting."""
        self._do_later(lambda: self._proposals.follow(proposal_id, until, wall_time()))

    async def withdraw(self, proposal_id: str, by: Principal) -> Proposal:
        """Withdraw a proposal. Raises Failure unless its own agent does."""
        return await self._change(lambda: self._proposals.withdraw(proposal_id, by.name, wall_time()))

    async def use(self, proposal_id: str, action_hash: str, *, unanswered: bool = False) -> bool:
        """Use this approval of exactly that action, once. Return False if it cannot be used.

        `unanswered`: it expired, and its policy continues without an answer. The caller owes a `record_outcome`.
        """

        def work() -> bool:
            runner = Runner(this_process())
            try:
                self._proposals.use(proposal_id, action_hash, wall_time(), runner, unanswered=unanswered)
            except Failure as failure:
                if failure.code in ("ALREADY_DECIDED", "ACTION_CHANGED", "NOT_ALLOWED"):
                    return False
                raise
            self._announce_change()
            return True

        return await self._do(work)

    def record_outcome(self, proposal_id: str, code: str | None, message: str = "") -> None:
        """Record the outcome of an approved action, without waiting; without a code it succeeded."""
        shown = None if code is None else shorten(message, OUTCOME_SHOWN)
        outcome = ActionOutcome(code is None, wall_time(), code, shown)
        self._do_later(lambda: self._proposals.record_outcome(proposal_id, outcome))

    def withdraw_unneeded(self, proposal_id: str, by: Principal) -> None:
        """Withdraw a proposal that no caller awaits any more, without waiting, unless it was just decided."""
        self._do_later(lambda: self._proposals.withdraw(proposal_id, by.name, wall_time()))

    def _do_later(self, change: Callable[[], object]) -> None:
        def work() -> None:
            with suppress(Failure):  # it is recorded already, or the store cannot be used: the action itself is done
                change()
                self._announce_change()

        with self._lock:
            if not self._closed:
                self._thread.submit(work)

    async def digest_of_hidden(self, text: str) -> str:
        """Return a digest that distinguishes hidden values without showing them. It is keyed, so that short values
        cannot be found by trying."""

        def work() -> str:
            if self._key is None:
                self._key = load_private_key(make_private_directory(self._store.home) / KEY_FILE)
            digest = hmac.new(self._key, text.encode("utf-8", "surrogatepass"), hashlib.sha256)
            return digest.hexdigest()[:HIDDEN_DIGITS]

        return await self._do(work)

    # --- for operators --------------------------------------------------------------------------------------

    async def decide(
        self, proposal_id: str, decision: Decision, by: Principal, confirmation: Confirmation = Confirmation()
    ) -> Proposal:
        """Record a decision. Of two at once one wins, and the other one's Failure names the winner."""
        by.must_be_operator("decide")

        def work() -> Proposal:
            check_decision(self._get_existing(proposal_id), decision, by.name)
            return self._proposals.decide(
                proposal_id, decision, by.name, wall_time(), via=by.via or None, confirmation=confirmation
            )

        return await self._change(work)

    async def extend(self, proposal_id: str, by_ms: int, by: Principal) -> Proposal:
        """Move the end of a proposal. Raises Failure unless an operator asks, it is open, and its run lasts as long."""
        by.must_be_operator("extend")

        def work() -> Proposal:
            proposal = self._get_existing(proposal_id)
            run, within_ms = self._find_run(proposal), by_ms
            if proposal.is_open and run is not None and run.deadline_at is not None:
                within_ms = min(by_ms, run.deadline_at - proposal.expires_at)
                if within_ms <= 0:
                    message = f"{proposal.id} is asked by run {run.id}, whose time ends then"
                    hint = f"a run under way can have more: `shotclock job extend {run.id} 10m`"
                    raise Failure("NOT_EXTENDABLE", message, suggestion=hint)
            return self._proposals.extend(proposal_id, within_ms, by.name, wall_time())

        return await self._change(work)

    # --- queries --------------------------------------------------------------------------------------------

    async def get(self, proposal_id: str) -> Proposal | None:
        return await self._do(lambda: self._look(proposal_id))

    async def find_last_use(self, proposal: Proposal) -> LastUse | None:
        """Return None where another store or an engine may have the run that asks."""

        def work() -> LastUse | None:
            if (run := self._find_run(proposal)) is None:
                return None if "/" in (proposal.key or "") else LastUse(proposal.expires_at)
            return LastUse(run.ended_at or run.deadline_at or WallTime(LATEST_MS), run.id)

        return await self._do(work)

    def _find_run(self, proposal: Proposal) -> StoredRun | None:
        run_id, is_of_step, _ = (proposal.key or "").partition("/")
        return self._store.runs.get(run_id) if is_of_step else None

    async def changes(self, after_seq: int | None = None) -> AsyncIterator[Summary | Reminder]:
        """Yield each proposal as it is after a change, until the inbox is closed; several changes at once are one.

        `after_seq` is the `seq` of the last one seen; None starts now.
        """
        seq = await self._do(self._proposals.last_seq) if after_seq is None else after_seq
        while True:
            changed = self._watcher.register(None)
            try:
                await self._do(self._watcher.start)
                found = await self._do(partial(self._proposals.since, seq, CHANGES_AT_ONCE))
                if not found:
                    await asyncio.wait([changed], timeout=CHANGES_LOOK_S)
            except Failure as failure:
                if failure.code == "SHUTTING_DOWN":
                    return
                raise
            finally:
                self._watcher.unregister(None, changed)
            for proposal, action in found:
                seq = proposal.seq
                yield Reminder(proposal) if action == "reminded" else proposal

    async def history(self, proposal_id: str) -> list[Entry]:
        return await self._do(lambda: self._store.audit.of(proposal_id))

    async def verify_audit(self) -> list[AuditProblem]:
        """Return the problems of the audit trail; empty if it is intact."""
        return await self._do(self._file.verify)

    # --- on the inbox's own thread --------------------------------------------------------------------------

    async def _do(self, work: Callable[[], T]) -> T:
        with self._lock:
            self._must_not_be_closed()
            started = self._thread.submit(work)
        return await asyncio.wrap_future(started)

    def _must_not_be_closed(self) -> None:
        if self._closed:
            raise Failure("SHUTTING_DOWN", "the inbox is closed")

    def _propose_next(self) -> None:
        """Propose everything that is queued by now, because one transaction of many waits for the disk once."""
        with self._lock:
            queued = [self._queued.popleft() for _ in range(min(len(self._queued), PROPOSED_AT_ONCE))]
        queued = [(new, answer) for new, answer in queued if answer.set_running_or_notify_cancel()]
        valid: list[tuple[NewProposal, Future[Proposal]]] = []
        try:
            for new, answer in queued:
                if problems := problems_with(new.ask) + problems_with_key(new.key):
                    answer.set_exception(refusal(problems))
                else:
                    valid.append((new, answer))
            if not valid:
                return
            found = self._proposals.attach_or_create_all([new for new, _ in valid], wall_time(), self._limits)
        except BaseException as error:
            for _, answer in queued:
                if not answer.done():
                    answer.set_exception(error)
            return
        self._announce_change()
        pairs = zip(valid, found, strict=True)
        self._announcer.announce(made for (new, _), made in pairs if isinstance(made, Proposal) and made.id == new.id)
        for (_, answer), answered in zip(valid, found, strict=True):
            if isinstance(answered, Failure):
                answer.set_exception(answered)
            else:
                answer.set_result(answered)

    async def _change(self, work: Callable[[], Proposal]) -> Proposal:
        def changing() -> Proposal:
            try:
                return work()
            finally:
                self._announce_change()  # a refusal may have expired it

        return await self._do(changing)

    def _get_existing(self, proposal_id: str, *, watched: bool = False) -> Proposal:
        if watched:
            self._watcher.start()
        proposal = self._look(proposal_id)
        if proposal is None:
            raise Failure("PROPOSAL_NOT_FOUND", f"there is no proposal {proposal_id!r}")
        return proposal

    def _look(self, proposal_id: str) -> Proposal | None:
        proposal = self._proposals.get(proposal_id)
        now = wall_time()
        if proposal is not None and (proposal.is_due(now) or now < proposal.created_at):  # the clock was set back
            self._end_due()
            return self._proposals.get(proposal_id)
        return proposal

    def _end_due(self) -> None:
        if self._proposals.end_due(wall_time()):
            self._announce_change()

    def _announce_change(self) -> None:
        self._watcher.look_now()
        self._file_soon()

    def _file_soon(self) -> None:
        with self._lock:
            if self._filing or self._closed:
                return
            self._filing = True
            self._thread.submit(self._write_file)

    def _write_file(self) -> None:
        with self._lock:
            self._filing = False
        self._file.catch_up_if_possible()
        if self._prune_at.has_passed(monotonic_ns()):
            self._prune()

    def _finish(self) -> None:
        self._watcher.close()
        self._file.catch_up_if_possible()
        self._prune()

    def _prune(self) -> None:
        prune_in_passing(self._store, os.environ, wall_time(), is_alive)

    # --- last: from here on `list` is this method and not the built-in type -----------------------------------

    async def list(
        self,
        *,
        status: ProposalStatus | None = None,
        ended: bool = False,
        asked_by: str | None = None,
        limit: int = 200,
        before_seq: int | None = None,
    ) -> list[Summary]:
        """Return the proposals, the last changed first. `ended`: only those that are not pending any more."""

        def work() -> list[Summary]:
            self._end_due()
            return self._proposals.list(
                status=status, ended=ended, asked_by=asked_by, limit=limit, before_seq=before_seq
            )

        return await self._do(work)


# --- hidden values ------------------------------------------------------------------------------------------------

HIDDEN_VALUES = "hidden values, by digest"
EDITED = "a text with a hidden value can be left as it is, or replaced, but not edited"


async def hide_secrets(inbox: Inbox, redact: Callable[[str], str], value: Any, place: str, hidden: list[str]) -> Any:
    """Return a value without its secrets. Each text that had one is added to `hidden`, by a digest of all of it."""
    if isinstance(value, Mapping):
        shown: JsonObject = {}
        for name, each in value.items():
            label = await hide_secrets(inbox, redact, str(name), f"a name in {place}", hidden)
            if label in shown:  # two that differ in their hidden parts
                label = f"{label} ({len(shown)})"
            if place == "environment" and looks_secret(name):  # however short it is
                shown[label] = HIDDEN
                hidden.append(f"{place}.{label}: {await inbox.digest_of_hidden(each)}")
            else:
                shown[label] = await hide_secrets(inbox, redact, each, f"{place}.{label}", hidden)
        return shown
    if isinstance(value, list):
        return [
            await hide_secrets(inbox, redact, each, f"{place}[{number}]", hidden) for number, each in enumerate(value)
        ]
    if isinstance(value, str) and (redacted := redact(value)) != value:
        hidden.append(f"{place}: {await inbox.digest_of_hidden(value)}")
        return redacted
    return value


def restore_hidden(decided: Any, shown: Any, real: Any) -> Any:
    """Return the decided value with the real text in place of each hidden one that was not changed."""
    if isinstance(decided, dict) and isinstance(shown, dict) and isinstance(real, Mapping):
        return {name: restore_hidden(each, shown.get(name), real.get(name)) for name, each in decided.items()}
    if isinstance(decided, list) and isinstance(shown, list) and isinstance(real, list):
        pairs = [*zip(shown, real, strict=True), *[(None, None)] * len(decided)]
        return [restore_hidden(each, *pair) for each, pair in zip(decided, pairs, strict=False)]
    is_hidden = isinstance(shown, str) and HIDDEN in shown and decided == shown
    return real if is_hidden and isinstance(real, str) else decided
