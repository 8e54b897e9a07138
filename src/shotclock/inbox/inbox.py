"""The inbox, as every surface uses it: propose, wait, look, decide.

Everything that touches the store runs on one thread of the inbox's own, in the order it was asked for, so that
neither the event loop nor the loop's other threads wait for the disk. Entries of the audit trail are written to their
file on the same thread, behind what is already in line, so that a burst of changes is one write.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

from ..core.clocks import Deadline, WallTime
from ..core.envelope import shorten
from ..core.errors import Failure
from ..core.proposal import (
    ActionOutcome,
    Decision,
    InboxLimits,
    Proposal,
    ProposalRequest,
    ProposalStatus,
    Runner,
    Summary,
    refusal,
)
from ..core.proposal_checks import check_decision, problems_with, problems_with_key
from ..core.redaction import HIDDEN, looks_secret
from ..core.value_types import value
from ..process.clock import monotonic_ns, wall_time
from ..process.kernel import is_alive, this_process
from ..store.audit import Entry
from ..store.home import load_private_key, make_private_directory
from ..store.proposals import NewProposal
from ..store.store import Store
from .access import Principal
from .audit_file import AuditFile, AuditProblem
from .person_wait import read_inbox_limits
from .watcher import Watcher

# How long closing waits for what is in line. Each is bounded by the store's own waits; a stuck disk would run this out.
CLOSE_LIMIT_S = 15.0
# How long a cancellation waits for a proposal that is being written. Others who keep the store busy run this out.
WRITTEN_LIMIT_S = 2.0
# A watcher who was told of nothing looks for itself after this long.
CHANGES_LOOK_S = 15.0
# A wait without an end is made of pieces of this; only how often the store is looked at depends on it.
LONGEST_WAIT_MS = 3_600_000
# What is too old is not looked for while those wait for whom the process was started, but when it has run for so long,
# or ends.
PRUNE_AFTER_MS = 60_000
# What is read for a watcher at once.
CHANGES_AT_ONCE = 100
# What is proposed in one transaction, at most.
PROPOSED_AT_ONCE = 100
# Of the store's directory: what the digests of hidden values are made with. 64 bits of a digest are shown.
KEY_FILE = "approvals.key"
HIDDEN_DIGITS = 16
# Of an error's message, as it is kept with the proposal.
OUTCOME_SHOWN = 500
_LETTERS = "abcdefghijklmnopqrstuvwxyz234567"

T = TypeVar("T")


@value
class Reminder:
    """A proposal that is about to expire, and nobody has decided."""

    proposal: Summary


class Inbox:
    """Proposals of one store. May be used from several event loops. What is refused is a Failure with a registered
    code."""

    def __init__(self, store: Store, limits: InboxLimits | None = None) -> None:
        """Raise Failure where the environment holds no valid limit of how many may be open."""
        self._limits = limits or read_inbox_limits()
        self._store = store
        self._proposals = store.proposals
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="shotclock-inbox-store")
        self._watcher = Watcher(store.proposals, self._file_soon)
        self._file = AuditFile(store)
        self._lock = threading.Lock()
        self._asked: deque[tuple[NewProposal, Future[Proposal]]] = deque()
        self._filing = False
        self._closed = False
        self._key: bytes | None = None
        self._prune_at = Deadline.after_ms(monotonic_ns(), PRUNE_AFTER_MS)

    async def close(self) -> None:
        """Close the inbox: whoever still waits gets the proposal as it was. The store stays open."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        last = self._thread.submit(self._finish)
        self._thread.shutdown(wait=False)
        await asyncio.wait([asyncio.wrap_future(last)], timeout=CLOSE_LIMIT_S)

    # --- for those who ask ----------------------------------------------------------------------------------

    async def propose(
        self,
        ask: ProposalRequest,
        by: Principal,
        *,
        key: str | None = None,
        since: WallTime | None = None,
        outlives_asker: bool = True,
    ) -> Proposal:
        """Return the proposal that answers this call: one that is open, a decision that still holds, or a new one.

        `since`: whatever was asked under the key from then on answers it, also one that has expired meanwhile.
        Raises Failure (INBOX_FULL) where a new one would be one too many. A cancellation that comes while it is being
        written is passed on after that, with the `proposal`: it is there, and whoever asked has to know. One that is
        not to outlive its asker is withdrawn then.
        """
        import secrets  # as those below: slow to import, and most programs propose nothing

        id = "p-" + "".join(secrets.choice(_LETTERS) for _ in range(10))
        answer: Future[Proposal] = Future()
        with self._lock:
            self._must_not_be_closed()
            self._asked.append((NewProposal(id, ask, by.name, key, since), answer))
            self._thread.submit(self._propose_next)
        try:
            return await asyncio.wrap_future(answer)
        except asyncio.CancelledError as cancelled:
            if answer.cancel():  # before it was begun
                raise
            if not outlives_asker:  # behind it on our thread, and before whatever closes us
                self._do_later(lambda: self._proposals.withdraw(answer.result(0).id, by.name, wall_time()))
                raise
            from ..runtime.command_runner import run_shielded

            written = asyncio.wrap_future(answer)
            await run_shielded(asyncio.wait([written], timeout=WRITTEN_LIMIT_S))
            if written.done() and written.exception() is None:
                cancelled.proposal = written.result()  # type: ignore[attr-defined]
            raise

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
            bell = loop.call_at(until, _time_out, decided)
            return await decided or proposal
        finally:
            self._watcher.unregister(proposal_id, decided)
            if bell is not None:
                bell.cancel()

    async def wait_until(self, proposal: Proposal, deadline: Deadline | None) -> Proposal:
        """Wait as `wait` does, until a deadline; None waits for as long as people take, or the proposal's own end."""
        while proposal.is_open:
            left_ms = LONGEST_WAIT_MS if deadline is None else deadline.remaining_ms(monotonic_ns())
            if left_ms <= 0:
                break
            proposal = await self.wait(proposal.id, min(left_ms, LONGEST_WAIT_MS))
        return proposal

    async def withdraw(self, proposal_id: str, by: Principal) -> Proposal:
        """Withdraw a proposal. Raises Failure unless by whoever proposed it."""
        return await self._change(lambda: self._proposals.withdraw(proposal_id, by.name, wall_time()))

    async def use(self, proposal_id: str, action_hash: str, *, unanswered: bool = False) -> bool:
        """Use this approval of exactly that action: once, and nobody after us. Return False where it is not ours to act
        on. `unanswered`: nobody answered, and its rules let it go on.

        Whoever uses it owes a `record_outcome`.
        """

        def work() -> bool:
            runner = Runner(this_process())
            try:
                if unanswered:
                    self._proposals.continue_unanswered(proposal_id, action_hash, runner, wall_time())
                else:
                    self._proposals.use(proposal_id, action_hash, wall_time(), runner)
            except Failure as failure:
                if failure.code in ("ALREADY_DECIDED", "ACTION_CHANGED", "NOT_ALLOWED"):
                    return False
                raise
            self._announce_change()
            return True

        return await self._do(work)

    def record_outcome(self, proposal_id: str, code: str | None, message: str = "") -> None:
        """Record what became of what was approved; without a code it succeeded. Nobody waits for it but `close`."""
        outcome = ActionOutcome(
            code is None, wall_time(), code, shorten(message, OUTCOME_SHOWN) if code is not None else None
        )

        self._do_later(lambda: self._proposals.record_outcome(proposal_id, outcome))

    def withdraw_unneeded(self, proposal_id: str, by: Principal) -> None:
        """Withdraw what nobody waits for any more, unless it was just decided. Nobody waits for this but `close`."""
        self._do_later(lambda: self._proposals.withdraw(proposal_id, by.name, wall_time()))

    def _do_later(self, change: Callable[[], object]) -> None:
        def work() -> None:
            try:
                change()
            except Failure:  # it is known already, or the store cannot be used: what was done is done
                return
            self._announce_change()

        with self._lock:
            if not self._closed:
                self._thread.submit(work)

    async def digest_of_hidden(self, text: str) -> str:
        """Return a digest that tells hidden values apart without showing them. Keyed, so that nobody finds a short one
        by trying."""

        import hashlib
        import hmac

        def work() -> str:
            if self._key is None:
                self._key = load_private_key(make_private_directory(self._store.home) / KEY_FILE)
            return hmac.new(self._key, text.encode("utf-8", "surrogatepass"), hashlib.sha256).hexdigest()[
                :HIDDEN_DIGITS
            ]

        return await self._do(work)

    # --- for those who decide -------------------------------------------------------------------------------

    async def decide(
        self,
        proposal_id: str,
        decision: Decision,
        by: Principal,
        *,
        action_hash: str | None = None,
        confirmation: str | None = None,
    ) -> Proposal:
        """Record a decision. Of two at once one wins, and the other is told who. `action_hash` is that of what the
        person was shown."""
        by.must_be_operator("decide")

        def work() -> Proposal:
            check_decision(self._get_existing(proposal_id), decision, by.name)
            return self._proposals.decide(
                proposal_id,
                decision,
                by.name,
                wall_time(),
                via=by.via or None,
                action_hash=action_hash,
                confirmation=confirmation,
            )

        return await self._change(work)

    async def extend(self, proposal_id: str, by_ms: int, by: Principal) -> Proposal:
        """Move the end of a proposal. Raises Failure unless an operator asks and it is open."""
        by.must_be_operator("extend")
        return await self._change(lambda: self._proposals.extend(proposal_id, by_ms, by.name, wall_time()))

    # --- looking --------------------------------------------------------------------------------------------

    async def get(self, proposal_id: str) -> Proposal | None:
        return await self._do(lambda: self._look(proposal_id))

    async def changes(self, after_seq: int | None = None) -> AsyncIterator[Summary | Reminder]:
        """Yield each proposal as it is after it changed, for ever; several changes at once are one.

        `after_seq` is the `seq` of the last one seen, None means from now on. Ends when the inbox is closed.
        """
        seq = await self._do(self._proposals.last_seq) if after_seq is None else after_seq
        while True:
            changed = self._watcher.register(None)
            try:
                found = await self._do(partial(self._list_changes, seq))
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
        """Return what the audit trail holds about it, the oldest first."""
        return await self._do(lambda: self._store.audit.of(proposal_id))

    async def verify_audit(self) -> list[AuditProblem]:
        """Return what is wrong with the audit trail; nothing, if it is whole."""
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
        """Propose all that are in line by now, because a transaction of many waits for the disk once."""
        with self._lock:
            asked = [self._asked.popleft() for _ in range(min(len(self._asked), PROPOSED_AT_ONCE))]
        asked = [(new, answer) for new, answer in asked if answer.set_running_or_notify_cancel()]
        fitting: list[tuple[NewProposal, Future[Proposal]]] = []
        try:
            for new, answer in asked:
                if problems := problems_with(new.ask) + problems_with_key(new.key):
                    answer.set_exception(refusal(problems))
                else:
                    fitting.append((new, answer))
            if not fitting:
                return
            found = self._proposals.attach_or_create_all([new for new, _ in fitting], wall_time(), self._limits)
        except BaseException as error:
            for _, answer in asked:
                if not answer.done():
                    answer.set_exception(error)
            return
        self._announce_change()
        for (_, answer), attached in zip(fitting, found, strict=True):
            if isinstance(attached, Failure):
                answer.set_exception(attached)
            else:
                answer.set_result(attached.proposal)

    async def _change(self, work: Callable[[], Proposal]) -> Proposal:
        def changing() -> Proposal:
            try:
                return work()
            finally:
                self._announce_change()  # a refusal may have found it expired

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
        if proposal is not None and proposal.is_due(wall_time()):
            self._end_due()
            return self._proposals.get(proposal_id)
        return proposal

    def _list_changes(self, seq: int) -> list[tuple[Summary, str]]:
        self._watcher.start()
        return self._proposals.since(seq, CHANGES_AT_ONCE)

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
            self._thread.submit(self._bring_to_file)

    def _bring_to_file(self) -> None:
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
        from ..store.retention import prune_by_the_way

        prune_by_the_way(self._store, os.environ, wall_time(), is_alive)

    # --- last, because from here on its name is not the built-in type's ---------------------------------------

    async def list(
        self,
        *,
        status: ProposalStatus | None = None,
        ended: bool = False,
        asked_by: str | None = None,
        limit: int = 200,
        before_seq: int | None = None,
    ) -> list[Summary]:
        """Return the one that changed last first. `ended`: only those that are not pending any more."""

        def work() -> list[Summary]:
            self._end_due()
            return self._proposals.list(
                status=status, ended=ended, asked_by=asked_by, limit=limit, before_seq=before_seq
            )

        return await self._do(work)


def _time_out(waiter: asyncio.Future[Proposal | None]) -> None:
    if not waiter.done():
        waiter.set_result(None)


# What a person is shown of the values that are hidden.
HIDDEN_VALUES = "hidden values, by digest"
EDITED = "a text with a hidden value can be left as it is, or replaced, but not edited"


async def hide_secrets(inbox: Inbox, redact: Callable[[str], str], value: Any, place: str, hidden: list[str]) -> Any:
    """Return it without its secrets. Each text that had one is told in `hidden`, by a digest of all of it."""
    if isinstance(value, Mapping):
        shown: dict[str, Any] = {}
        for name, each in value.items():
            label = await hide_secrets(inbox, redact, str(name), f"a name in {place}", hidden)
            if label in shown:  # two that differ in what is hidden
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
    """Return what was decided, with each hidden text that was left as it was shown as it really is."""
    if isinstance(decided, dict) and isinstance(shown, dict) and isinstance(real, Mapping):
        return {name: restore_hidden(each, shown.get(name), real.get(name)) for name, each in decided.items()}
    if isinstance(decided, list) and isinstance(shown, list) and isinstance(real, list):
        known = [*zip(shown, real, strict=True), *[(None, None)] * len(decided)]
        return [restore_hidden(each, *pair) for each, pair in zip(decided, known, strict=False)]
    is_hidden = isinstance(shown, str) and HIDDEN in shown and decided == shown
    return real if is_hidden and isinstance(real, str) else decided
