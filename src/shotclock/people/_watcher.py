"""Watching of proposals for changes, at the price of one future per waiter.

One thread per inbox, running only while there are waiters, looks at the database for changes: 40 times a second, and at
once after a change of this process. It also expires proposals. A waiter is registered *before* it reads the proposal,
so a change committed after its reading is found by a look that finds the waiter registered.

Contract (AGENTS.md): waiting holds only a future.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress

from ..core.errors import Failure
from ..core.limits import WallTime
from ..core.proposal import Proposal
from ..store.proposals import Feed, Proposals
from ..supervise.clock import wall_time

LOOK_S = 0.025
# A caller that waits again right away finds the thread still running.
LINGER_LOOKS = 40
# Closing waits this long for the thread, which may be inside a transaction. A stuck disk exhausts this.
STOP_LIMIT_S = 5.0
# Changes of proposals that are read at once.
CHANGES_AT_ONCE = 1_000

ProposalFuture = asyncio.Future[Proposal | None]


class Watcher:
    """Thread that looks for changes while there are waiters. It calls `on_expiry` after expiries and reminders."""

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
        """Return a future for the proposal once it is not pending any more; None when the watcher is closed.

        Without an id the future gets None after any change of any proposal.
        """
        waiter: ProposalFuture = asyncio.get_running_loop().create_future()
        with self._lock:
            if self._closed:
                waiter.set_result(None)
            else:
                self._waiters.setdefault(proposal_id, set()).add(waiter)
        return waiter

    def unregister(self, proposal_id: str | None, waiter: ProposalFuture) -> None:
        with self._lock:
            registered = self._waiters.get(proposal_id)
            if registered is not None:
                registered.discard(waiter)
                if not registered:
                    del self._waiters[proposal_id]

    def start(self) -> None:
        """Start the thread, after registering and before reading; not from two threads at once. Opening the feed may
        block."""
        with self._lock:
            if self._thread is not None or self._closed:
                return
        feed = self._feed = self._feed or self._proposals.feed()
        with self._lock:
            if not self._closed:
                self._thread = threading.Thread(target=self._watch, args=(feed,), name="shotclock-inbox", daemon=True)
                self._thread.start()

    def look_now(self) -> None:
        self._wake.set()

    def close(self) -> None:
        """Stop the thread and resolve all waiters. Blocks for a bounded time."""
        with self._lock:
            self._closed = True
            thread = self._thread
        self._wake.set()
        if thread is not None:
            thread.join(STOP_LIMIT_S)
        with self._lock:
            waiting, self._waiters = self._waiters, {}
        for registered in waiting.values():
            _resolve_all(registered, None)
        if self._feed is not None and (thread is None or not thread.is_alive()):
            self._feed.close()

    # --- in the thread --------------------------------------------------------------------------------------

    def _watch(self, feed: Feed) -> None:
        try:
            self._look_while_awaited(feed)
        finally:
            with self._lock:
                if self._thread is threading.current_thread():  # a bug ended it: the next waiter starts another
                    self._thread = None

    def _look_while_awaited(self, feed: Feed) -> None:
        idle_looks = 0
        due_at: WallTime | None = None
        is_due_read = False
        now = wall_time()
        while True:
            pause_s, before = LOOK_S, now
            with suppress(Failure):  # a busy or broken store: waiters have deadlines of their own, and we look again
                if not is_due_read:
                    due_at, is_due_read = feed.next_due_at(), True
                now = wall_time()
                if due_at is not None and (now >= due_at or now < before):  # or the clock was set back
                    is_due_read = False
                    if self._proposals.end_due(now):
                        self._on_expiry()
                if self._pass_on(feed):
                    is_due_read = False
                if due_at is not None and is_due_read:
                    pause_s = min(LOOK_S, max(0.0, (due_at - wall_time()) / 1000))
            self._wake.wait(pause_s)
            self._wake.clear()
            with self._lock:
                idle_looks = 0 if self._waiters else idle_looks + 1
                if self._closed or idle_looks > LINGER_LOOKS:
                    self._thread = None
                    return

    def _pass_on(self, feed: Feed) -> bool:
        """Resolve the waiters of changed proposals. Return whether there was a change."""
        changed = 0
        count = CHANGES_AT_ONCE
        while count == CHANGES_AT_ONCE:
            count, ended = feed.look(self._is_awaited, CHANGES_AT_ONCE)
            changed += count
            for proposal in ended:
                self._resolve(proposal.id, proposal)
        if changed:
            self._resolve(None, None)
        return changed > 0

    def _is_awaited(self, proposal_id: str) -> bool:
        with self._lock:
            return proposal_id in self._waiters

    def _resolve(self, proposal_id: str | None, proposal: Proposal | None) -> None:
        with self._lock:
            registered = self._waiters.pop(proposal_id, set())
        _resolve_all(registered, proposal)


def _resolve_all(registered: Iterable[ProposalFuture], proposal: Proposal | None) -> None:
    by_loop: dict[asyncio.AbstractEventLoop, list[ProposalFuture]] = {}
    for waiter in registered:
        by_loop.setdefault(waiter.get_loop(), []).append(waiter)
    for loop, waiters in by_loop.items():
        with suppress(RuntimeError):  # the loop was closed, and its waiters with it
            loop.call_soon_threadsafe(set_results, waiters, proposal)


def set_results(waiters: list[ProposalFuture], proposal: Proposal | None) -> None:
    for waiter in waiters:
        if not waiter.done():
            waiter.set_result(proposal)
