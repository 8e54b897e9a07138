"""Waiting for what somebody else does with a proposal, at the price of a future.

One thread per inbox, and only while anybody waits, looks whether the database changed: 40 times a second, and at once
after a change of our own. It also ends what is past its end. A waiter is registered *before* it reads the proposal,
so whatever is committed after its reading is seen by a look that finds it registered.

docs/design.md: R42.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterable

from ..core.clocks import WallTime
from ..core.errors import Failure
from ..core.proposal import Proposal
from ..process.clock import wall_time
from ..store.proposals import Feed, Proposals

LOOK_S = 0.025
# Somebody who waits again right away finds the thread still there.
LINGER_LOOKS = 40
# How long closing waits for the thread, which may be in the middle of a transaction. A stuck disk would run this out.
STOP_LIMIT_S = 5.0
# Changes of proposals that are read at once.
CHANGES_AT_ONCE = 1_000

ProposalFuture = asyncio.Future[Proposal | None]


class Watcher:
    """Thread that looks for changes while anybody waits. It calls `on_expiry` when proposals were ended or reminded
    of."""

    def __init__(self, proposals: Proposals, on_expiry: Callable[[], None]) -> None:
        self._proposals = proposals
        self._on_expiry = on_expiry
        self._lock = threading.Lock()  # never held while the store is used: event loops take it
        self._waiters: dict[str | None, set[ProposalFuture]] = {}
        self._wake = threading.Event()
        self._thread: threading.Thread | None = None
        self._feed: Feed | None = None
        self._closed = False

    def register(self, proposal_id: str | None) -> ProposalFuture:
        """Return a future that gets the proposal once it is not pending any more; None when we are closed.

        Without an id: with None after any change of any proposal.
        """
        waiter: ProposalFuture = asyncio.get_running_loop().create_future()
        with self._lock:
            if self._closed:
                waiter.set_result(None)
            else:
                self._waiters.setdefault(proposal_id, set()).add(waiter)
        return waiter

    def unregister(self, proposal_id: str | None, waiter: ProposalFuture) -> None:
        """Forget a future that nobody waits for any more."""
        with self._lock:
            registered = self._waiters.get(proposal_id)
            if registered is not None:
                registered.discard(waiter)
                if not registered:
                    del self._waiters[proposal_id]

    def start(self) -> None:
        """Start the thread: after registering and before reading, never by two threads at once. Opens the feed: it may
        block."""
        with self._lock:
            if self._thread is not None or self._closed:
                return
        if self._feed is None:
            self._feed = self._proposals.feed()
        with self._lock:
            if not self._closed:
                self._thread = threading.Thread(target=self._watch, name="shotclock-inbox", daemon=True)
                self._thread.start()

    def look_now(self) -> None:
        self._wake.set()

    def close(self) -> None:
        """Stop the thread and tell everybody who waits. Blocks, for a bounded time."""
        with self._lock:
            self._closed = True
            thread = self._thread
        self._wake.set()
        if thread is not None:
            thread.join(STOP_LIMIT_S)
        with self._lock:
            waiting, self._waiters = self._waiters, {}
        for registered in waiting.values():
            _tell(registered, None)
        if self._feed is not None and (thread is None or not thread.is_alive()):
            self._feed.close()

    # --- in the thread --------------------------------------------------------------------------------------

    def _watch(self) -> None:
        try:
            self._look_while_anybody_waits()
        finally:
            with self._lock:
                if self._thread is threading.current_thread():  # a bug ended it: the next who waits starts another
                    self._thread = None

    def _look_while_anybody_waits(self) -> None:
        assert self._feed is not None
        idle_looks = 0
        due_at: WallTime | None = None
        due_known = False
        while True:
            pause_s = LOOK_S
            try:
                if not due_known:
                    due_at, due_known = self._feed.next_due_at(), True
                now = wall_time()
                if due_at is not None and now >= due_at:
                    due_known = False
                    if self._proposals.end_due(now):
                        self._on_expiry()
                if self._pass_on(self._feed):
                    due_known = False
                if due_at is not None and due_known:
                    pause_s = min(LOOK_S, max(0.0, (due_at - wall_time()) / 1000))
            except Failure:
                pass  # a busy or broken store: those who wait have clocks of their own, and we look again
            self._wake.wait(pause_s)
            self._wake.clear()
            with self._lock:
                idle_looks = 0 if self._waiters else idle_looks + 1
                if self._closed or idle_looks > LINGER_LOOKS:
                    self._thread = None
                    return

    def _pass_on(self, feed: Feed) -> bool:
        """Tell those who wait what changed. Return whether anything did."""
        changed = 0
        count = CHANGES_AT_ONCE
        while count == CHANGES_AT_ONCE:
            count, ended = feed.look(self._is_awaited, CHANGES_AT_ONCE)
            changed += count
            for proposal in ended:
                self._tell(proposal.id, proposal)
        if changed:
            self._tell(None, None)
        return changed > 0

    def _is_awaited(self, proposal_id: str) -> bool:
        with self._lock:
            return proposal_id in self._waiters

    def _tell(self, proposal_id: str | None, proposal: Proposal | None) -> None:
        with self._lock:
            registered = self._waiters.pop(proposal_id, set())
        _tell(registered, proposal)


def _tell(registered: Iterable[ProposalFuture], proposal: Proposal | None) -> None:
    by_loop: dict[asyncio.AbstractEventLoop, list[ProposalFuture]] = {}
    for waiter in registered:
        by_loop.setdefault(waiter.get_loop(), []).append(waiter)
    for loop, waiters in by_loop.items():
        try:
            loop.call_soon_threadsafe(_resolve, waiters, proposal)
        except RuntimeError:  # the loop was closed, and whoever waited on it is gone
            pass


def _resolve(waiters: list[ProposalFuture], proposal: Proposal | None) -> None:
    for waiter in waiters:
        if not waiter.done():
            waiter.set_result(proposal)
