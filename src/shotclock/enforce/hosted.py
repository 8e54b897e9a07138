"""One call of a handler that cannot be killed, waited for on the caller's loop.

The state of such a call is: running → (bell) cancelling → cancelled, or abandoned when it does not react. All
transitions happen on the caller's loop, so a result and a bell can never both win, and one always does.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from typing import Any, Protocol

from ..core.clocks import ClockKind
from ..core.effects import Ending
from ..core.envelope import warning
from .admission import Admission, Outcome
from .alarms import LONGEST_DELAY_S, Alarms
from .clock import monotonic_ns
from .loops import Hosts, Mailbox, Ticket
from .workers import stalled_problem, timeout_problem

# How long a loop may take to hear a cancellation before it counts as blocked. A healthy one takes microseconds.
HEARD_LIMIT_S = 0.05
# If our own timer was this late, the machine is short of CPU and the silence proves nothing yet.
STARVED_S = 0.02
STARVED_TRIES = 3


class Carrier(Protocol):
    """Where handlers run that cannot be killed."""

    def submit(self, ticket: Ticket) -> None: ...
    def cancel(self, ticket: Ticket) -> None: ...
    def give_up(self, ticket: Ticket) -> None: ...


class LoopCarrier:
    """Async handlers: on the host of their level."""

    def __init__(self, hosts: Hosts, level: int) -> None:
        self._hosts, self._level = hosts, level

    def submit(self, ticket: Ticket) -> None:
        self._hosts.submit(ticket, self._level)

    def cancel(self, ticket: Ticket) -> None:
        if ticket.host is not None:
            ticket.host.cancel(ticket)

    def give_up(self, ticket: Ticket) -> None:
        if not ticket.cancel_heard:
            self._hosts.relieve(ticket.host)


class SharedLoopCarrier:
    """Async handlers on the caller's own loop: nothing to hand over, and nothing left if the handler blocks it."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop

    def submit(self, ticket: Ticket) -> None:
        ticket.claim()
        ticket.task = self._loop.create_task(ticket.run(), context=ticket.context)

    def cancel(self, ticket: Ticket) -> None:
        ticket.cancel_heard = True
        if ticket.task is not None:
            ticket.task.cancel()

    def give_up(self, ticket: Ticket) -> None:
        pass


class ThreadCarrier:
    """Sync handlers that asked for a thread: one each, and no way to stop it but to ask."""

    def submit(self, ticket: Ticket) -> None:
        threading.Thread(target=self._run, args=(ticket,), name="shotclock-thread", daemon=True).start()

    def _run(self, ticket: Ticket) -> None:
        if ticket.claim():
            # The coroutine never awaits: driving it once runs it to its end in this thread.
            coroutine = ticket.run()
            try:
                ticket.context.run(coroutine.send, None)
            except StopIteration:
                pass

    def cancel(self, ticket: Ticket) -> None:
        ticket.cancel_heard = True  # ctx.stopping says it; there is nothing else to throw

    def give_up(self, ticket: Ticket) -> None:
        pass


class HostedCall:
    """Waits for one ticket. `run` returns exactly one outcome, on time."""

    __slots__ = (
        "_abandoned",
        "_admission",
        "_alarms",
        "_carrier",
        "_done",
        "_fired",
        "_loop",
        "_mailbox",
        "_on_abandoned",
        "_on_late",
        "_rang_at",
        "_ticket",
        "_timer",
        "_tries",
        "stopping",
    )

    def __init__(
        self,
        admission: Admission,
        carrier: Carrier,
        mailbox: Mailbox | None,
        make: Callable[[], Coroutine[Any, Any, Outcome]],
        *,
        on_abandoned: Callable[[HostedCall], None],
        on_late: Callable[[HostedCall], None],
    ) -> None:
        self._admission = admission
        self._carrier = carrier
        self._loop = asyncio.get_running_loop()
        self._done: asyncio.Future[Outcome] = self._loop.create_future()
        self._ticket = Ticket(make, self._reply)
        self._mailbox = mailbox
        self._timer: asyncio.TimerHandle | None = None
        self._alarms: Alarms | None = None
        self._fired: ClockKind | None = None
        self._abandoned = False
        self._rang_at = 0.0
        self._tries = 0
        self._on_abandoned, self._on_late = on_abandoned, on_late
        self.stopping = False

    @property
    def name(self) -> str:
        return self._admission.name

    @property
    def started_ns(self) -> int:
        return self._admission.started_ns

    async def run(self) -> Outcome:
        clocks, bell = self._admission.clocks, self._admission.bound.bell
        if bell is not None:
            self._arm_bell(bell.at_ns)
        if clocks.soft_ms or clocks.idle_ms:
            self._alarms = Alarms(
                self._loop,
                self._admission,
                on_soft=self._wind_down,
                on_idle=lambda: self._ring(ClockKind.IDLE),
            )
        self._carrier.submit(self._ticket)
        try:
            return await self._done
        except asyncio.CancelledError:
            await self._cancelled_by_caller()
            raise
        finally:
            if self._timer is not None:
                self._timer.cancel()
            if self._alarms is not None:
                self._alarms.cancel()

    def _reply(self, ticket: Ticket, result: object) -> None:
        """Where the handler ran, when it ended: bring the result to the caller's loop."""
        if self._mailbox is None:
            self._arrived(result)
        else:
            self._mailbox.post(self._arrived, result)

    def sign_of_life(self) -> None:
        if self._alarms is not None:
            self._alarms.sign_of_life()

    # --- on the caller's loop -----------------------------------------------------------------------------

    def _arm_bell(self, at_ns: int) -> None:
        delay_s = (at_ns - monotonic_ns()) / 1e9
        if delay_s > LONGEST_DELAY_S:
            self._timer = self._loop.call_later(LONGEST_DELAY_S, self._arm_bell, at_ns)
        else:
            self._timer = self._loop.call_later(max(0.0, delay_s), self._ring, ClockKind.TIMEOUT)

    def _wind_down(self) -> None:
        self.stopping = True

    def _ring(self, kind: ClockKind) -> None:
        if self._fired is not None or self._done.done():
            return
        self._fired = kind
        self.stopping = True
        if self._ticket.claim():  # its loop never got to it: called off before it began
            self._settle(Ending.NOT_STARTED)
            return
        self._carrier.cancel(self._ticket)
        if self._timer is not None:
            self._timer.cancel()
        self._rang_at = self._loop.time()
        self._timer = self._loop.call_at(self._rang_at + HEARD_LIMIT_S, self._check_heard)

    def _check_heard(self) -> None:
        now = self._loop.time()
        late = now - (self._rang_at + HEARD_LIMIT_S * (self._tries + 1))
        if not self._ticket.cancel_heard:
            self._tries += 1
            if late > STARVED_S and self._tries < STARVED_TRIES:
                self._timer = self._loop.call_later(HEARD_LIMIT_S, self._check_heard)
            else:
                self._abandon()
            return
        grace_s = (self._admission.bound.grace_ms or self._admission.clocks.grace_ms or 0) / 1000
        left = self._rang_at + grace_s - now
        self._timer = self._loop.call_later(max(0.0, left), self._abandon)

    def _abandon(self) -> None:
        if self._done.done():
            return
        self._abandoned = True
        self._carrier.give_up(self._ticket)
        self._on_abandoned(self)
        self._settle(Ending.ABANDONED)

    def _arrived(self, result: object) -> None:
        if self._done.done():
            if self._abandoned:
                self._on_late(self)
            return
        bell = self._admission.bound.bell
        in_time = bell is None or self._ticket.finished_ns <= bell.at_ns
        if self._fired is None or (in_time and self._fired is ClockKind.TIMEOUT and isinstance(result, Outcome)):
            self._done.set_result(self._finished(result))
        else:
            self._settle(Ending.CANCELLED)

    def _finished(self, result: object) -> Outcome:
        if isinstance(result, Outcome):
            outcome = result
        elif isinstance(result, asyncio.CancelledError):
            from ..core.envelope import Problem

            outcome = Outcome(Ending.CANCELLED, Problem("CANCELLED", f"{self.name} cancelled itself"))
        else:
            from .handlers import raised

            assert isinstance(result, BaseException)
            outcome = raised(result)
        if self._alarms is not None and self._alarms.soft_rang:
            outcome.warnings.append(warning("SOFT_LIMIT", limit_ms=self._admission.clocks.soft_ms))
        return outcome

    def _settle(self, ending: Ending) -> None:
        admission = self._admission
        if self._fired is ClockKind.IDLE:
            problem = stalled_problem(admission)
        else:
            elapsed_ns = monotonic_ns() - admission.started_ns
            problem = timeout_problem(admission, admission.fired(ClockKind.TIMEOUT, elapsed_ns))
        self._done.set_result(Outcome(ending, problem))

    async def _cancelled_by_caller(self) -> None:
        """Stop the work, wait for it no longer than the grace, and count it if it does not stop."""
        if self._ticket.claim():
            return
        self.stopping = True
        self._fired = self._fired or ClockKind.TIMEOUT
        ended = self._done = self._loop.create_future()
        self._carrier.cancel(self._ticket)
        self._rang_at = self._loop.time()
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_at(self._rang_at + HEARD_LIMIT_S, self._check_heard)
        from .processes import shielded

        limit_s = HEARD_LIMIT_S * STARVED_TRIES + (self._admission.clocks.grace_ms or 0) / 1000 + 1
        await shielded(asyncio.wait([ended], timeout=limit_s))
