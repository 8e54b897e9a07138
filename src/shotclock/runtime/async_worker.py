"""Async workers seen from the runtime: a process whose event loop runs many calls, and each of those calls.

A call is running → (bell, or the caller leaves) cancelling → ended in its grace, or overdue. All transitions happen on
the runtime's loop, so a result and a bell can never both win, and one always does.

The process is told of everything at the end of a turn of our loop, in one write. What it has begun, and whose code
holds its loop, can be read from shared memory even when it does not answer.
"""

from __future__ import annotations

import asyncio
import contextvars
import mmap
import os
from collections.abc import Callable, Sequence
from contextvars import Context as Variables
from enum import Enum, auto
from functools import partial
from typing import Protocol

from ..core.clocks import NS_PER_MS, ClockKind
from ..core.envelope import Problem, Warning_
from ..core.errors import Ending
from ..process import ipc, messages
from ..process.async_worker_main import BEGUN, CLOSED, RUNNING, SHARED_SIZE
from ..process.call_processes import StartedProcesses, Survivors
from ..process.clock import monotonic_ns
from ..process.command_task import CommandReport, Order
from ..process.kill import VERIFY_LIMIT_MS
from ..process.messages import Cancel, Done, Heard, NeverMind, Process, Ready, WindDown
from ..process.zygote import HOST
from .call import Outcome, wound_down_problem
from .command_runner import REPORT_MARGIN_MS
from .idle_clock import LONGEST_DELAY_S, NOT_YET, IdleClock
from .inline_call import MARGIN_MS
from .outcomes import stalled_problem, timeout_problem, worker_outcome
from .preloaded_zygote import Preloaded
from .worker_pool import RESPAWN_PAUSE_S
from .worker_process import ProcessCall, WorkerProcess

# A loop that has not heard a cancellation, and has not moved for so long, is blocked. A healthy one takes microseconds.
HEARD_LIMIT_S = 0.05
# If our own timer was this late, the machine is short of CPU and the silence proves nothing yet.
STARVED_S = 0.02
STARVED_TRIES = 3
HEARD_LIMIT_NS = int(HEARD_LIMIT_S * 1e9)
# How long a call may lie in a worker that shows no sign of life before it goes to another. Longer than on a loop of
# this process: what the worker keeps in its memory is not in the other one.
PICKUP_LIMIT_NS = 500_000_000
# How long a kill may take to be reported; a supervisor that was stopped or is broken runs it out.
KILL_LIMIT_S = (VERIFY_LIMIT_MS + REPORT_MARGIN_MS) / 1000


class HostCall(ProcessCall):
    """A call of an async handler, on its way to an async worker and back."""

    done: asyncio.Future[Outcome]
    on_waiting_end: Callable[[HostCall, ClockKind], None]
    """Told when a clock runs out before it has a worker."""
    host: AsyncWorker | None = None
    fired: ClockKind | None = None
    """Why it is being cancelled, if it is. A caller who leaves counts as a bell that rings early."""
    rang_ns = 0
    asked_ns = 0
    """When the worker was last told to cancel it."""
    was_probed = False
    is_overdue = False
    """It was cancelled, and its grace is over."""
    stopping = False
    taken_ns = 0
    """When its worker was given it."""
    started: StartedProcesses | None = None
    """The processes that it has started there."""
    _timer: asyncio.TimerHandle | None = None
    _rearm: Callable[[], None]

    @property
    def name(self) -> str:
        return self.call.name

    @property
    def started_ns(self) -> int:
        return self.call.started_ns

    @property
    def grace_ns(self) -> int:
        """Return what it has left to clean up after the bell: less than this could not even be used by those who
        obey."""
        return max(self.call.bound.grace_ms * NS_PER_MS, int(HEARD_LIMIT_S * 1e9))

    @property
    def overdue_ns(self) -> int:
        return self.rang_ns + self.grace_ns

    # --- clocks -------------------------------------------------------------------------------------------

    def arm(self, loop: asyncio.AbstractEventLoop, context: Variables) -> None:
        self.done = loop.create_future()
        self._rearm = partial(self._arm_bell, loop, context)
        self._rearm()
        self.call.work = self
        if idle_ms := self.call.clocks.idle_ms:
            self.idle = IdleClock(loop, idle_ms, self._ring_idle)

    def _arm_bell(self, loop: asyncio.AbstractEventLoop, context: Variables) -> None:
        bell = self.call.bound.bell
        if bell is None:
            return
        delay_s = (bell.at_ns - monotonic_ns()) / 1e9
        if delay_s > LONGEST_DELAY_S:
            self._timer = loop.call_later(LONGEST_DELAY_S, self._arm_bell, loop, context)
        else:
            self._timer = loop.call_later(max(0.0, delay_s), self._ring, ClockKind.TIMEOUT, context=context)

    def call_when_overdue(self, loop: asyncio.AbstractEventLoop, then: Callable[[HostCall], None]) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = loop.call_later(max(0, self.overdue_ns - monotonic_ns()) / 1e9, then, self)

    def disarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self.idle is not None:
            self.idle.cancel()

    def wind_down(self, until_ns: int) -> None:
        if self.idle is not None:  # saving what there is may be silent
            self.idle.cancel()
        self.stopping = True
        if self.host is not None:
            self.host.ask_to_wind_down(self)

    def stop_unwound(self) -> None:
        self._ring(ClockKind.SOFT)

    def move_bell(self) -> bool:
        bell = self.call.bound.bell
        if self.fired is not None or self.done.done() or bell is None:
            return False
        if self._timer is not None:
            self._timer.cancel()
        self._rearm()
        if self.host is not None:
            self.host.send_bell(self, bell.at_ns)
        return True

    def _ring_idle(self) -> object:
        if self.host is None or not self.host.has_begun(self):
            self.sign_of_life()  # the clock of silence starts with the work
            return NOT_YET
        self._ring(ClockKind.IDLE)
        return None

    def _ring(self, kind: ClockKind) -> None:
        if self.fired is None and not self.done.done():
            self.stop(kind)

    def stop(self, kind: ClockKind) -> None:
        self.fired = kind
        self.stopping = True
        self.rang_ns = monotonic_ns()
        if self.host is None:
            self.on_waiting_end(self, kind)
        else:
            self.host.cancel(self)

    # --- processes ----------------------------------------------------------------------------------------

    def has_started(self, mark: str, pid: int) -> None:
        if self.started is None:
            self.started = StartedProcesses(mark)
            self.started.is_over = self.is_abandoned
        self.started.add(pid)

    @property
    def left_of_grace_ns(self) -> int:
        """Return what its processes have before they are killed."""
        return max(0, self.overdue_ns - MARGIN_MS * NS_PER_MS - monotonic_ns())

    # --- the answer ---------------------------------------------------------------------------------------

    def resolve(self, outcome: Outcome) -> None:
        if not self.done.done():
            self.done.set_result(outcome)

    def take_result(self, done: Done, survivors: Survivors = (), *, warnings: tuple[Warning_, ...] = ()) -> None:
        """Take what the worker said came of it. At or before the bell it counts, even if the news came after."""
        bell = self.call.bound.bell
        in_time = bell is None or done.finished_ns <= bell.at_ns
        is_result = done.kind not in ("cancelled", "unbegun")
        if in_time and (self.fired is None or (self.fired is not ClockKind.IDLE and is_result)):
            outcome = self._make_outcome(done)
            outcome.survivors = survivors
            outcome.warnings += warnings
            self.resolve(outcome)
        elif done.kind == "unbegun":
            self.settle(Ending.NOT_STARTED, warnings=warnings)
        else:  # by itself, but late, where the bell itself was kept from ringing
            ending = Ending.FINISHED if self.fired is None else Ending.CANCELLED
            self.settle(ending, warnings=warnings, survivors=survivors)

    def _make_outcome(self, done: Done) -> Outcome:
        if done.kind in ("cancelled", "unbegun"):
            outcome = Outcome(Ending.CANCELLED, Problem("CANCELLED", f"{self.name} was cancelled where it ran"))
        else:
            outcome = worker_outcome(done.kind, done.payload)
        return outcome

    def settle(
        self,
        ending: Ending,
        *,
        why: str = "",
        warnings: tuple[Warning_, ...] = (),
        survivors: Sequence[dict[str, object]] = (),
    ) -> None:
        """Answer with the clock that ran out, and what became of the work."""
        if self.fired is ClockKind.IDLE:
            problem = stalled_problem(self.call)
        elif self.fired is ClockKind.SOFT:
            problem = wound_down_problem(self.call)
        else:
            problem = timeout_problem(self.call, monotonic_ns() - self.call.started_ns)
        if why:
            problem = Problem(problem.code, f"{problem.message}: {why}", fired=problem.fired)
        self.resolve(Outcome(ending, problem, warnings=warnings, survivors=survivors))


class Fate(Enum):
    """Reason why an async worker ends."""

    DEAF = auto()
    TAINTED = auto()
    CROWDED_OUT = auto()
    CLOSING = auto()
    DIED = auto()
    """By itself: nobody here wanted it to."""


class Owner(Protocol):
    """Owner of the async workers, which decides about them."""

    loop: asyncio.AbstractEventLoop
    preloaded: Preloaded
    context: contextvars.Context

    def on_ready(self, worker: AsyncWorker) -> None: ...
    def on_heard(self, worker: AsyncWorker, host_call: HostCall) -> None: ...
    def on_ended(self, worker: AsyncWorker, host_call: HostCall, done: Done) -> None: ...
    def on_deaf(self, worker: AsyncWorker, unheard: list[HostCall]) -> None: ...
    def on_blocked(self, worker: AsyncWorker) -> None: ...
    def on_lost(self, worker: AsyncWorker, report: CommandReport) -> None: ...


class AsyncWorker(WorkerProcess):
    """A process whose event loop runs many calls."""

    def __init__(self, owner: Owner) -> None:
        self._owner = owner
        self.fate = Fate.DIED
        self.is_dying = False
        self.blocked_by = ""
        """Whose code blocks its loop, where it is not killed for that yet; nothing begins in it any more."""
        self.culprit = ""
        """Whose code held the loop when it was given up, as far as can be known."""
        self.host_calls: dict[int, HostCall] = {}
        self._numbers = 0
        self._unheard: dict[int, HostCall] = {}
        self._check: asyncio.TimerHandle | None = None
        self._check_due_ns = 0
        self._pickup: asyncio.TimerHandle | None = None
        self._pickup_due_ns = 0
        self._picked_up = 0
        self._tries = 0
        self._pulse = -1
        self._sign_ns = self._ready_ns = monotonic_ns()
        self._unsent = bytearray()
        memory = _shared_memory()
        try:
            self._words = memoryview(mmap.mmap(memory, SHARED_SIZE)).cast("Q")
            super().__init__(owner.loop, partial(owner.preloaded.request, HOST), memory)
        finally:
            os.close(memory)

    # --- calls --------------------------------------------------------------------------------------------

    def take(self, host_call: HostCall) -> None:
        """Give it a call. It is answered exactly once, whatever happens to the process."""
        self._numbers += 1
        host_call.host, host_call.number = self, self._numbers
        self.host_calls[host_call.number] = host_call
        host_call.taken_ns = monotonic_ns()
        host_call.sign_of_life()
        self._send_soon(host_call.pack())
        self._watch_pickup()
        if host_call.stopping:
            self.ask_to_wind_down(host_call)

    def _watch_pickup(self) -> None:
        if self._pickup is None and not self.is_dying and not self.blocked_by:
            self._picked_up = self._words[BEGUN]
            self._pickup_due_ns = monotonic_ns() + PICKUP_LIMIT_NS
            self._pickup = self._loop.call_later(PICKUP_LIMIT_NS / 1e9, self._check_pickup, context=self._owner.context)

    def _check_pickup(self) -> None:
        """Check whether what lies there has been lying for longer than any loop needs that is not blocked."""
        self._pickup = None
        now_ns = monotonic_ns()
        waiting = [host_call for host_call in self.host_calls.values() if not self.has_begun(host_call)]
        if not waiting or self.is_dying or self.blocked_by:
            return
        is_long = any(now_ns - host_call.taken_ns >= PICKUP_LIMIT_NS for host_call in waiting)
        is_moving = self._words[BEGUN] != self._picked_up or now_ns - self._sign_ns < PICKUP_LIMIT_NS
        is_starved = now_ns - self._pickup_due_ns > STARVED_S * 1e9
        if is_long and not is_moving and not is_starved:
            self._owner.on_blocked(self)
        else:
            self._watch_pickup()

    def close_to_new(self, why: str) -> list[HostCall]:
        """Let nothing begin in it any more. Returns the calls that never will; they are no longer in it."""
        self.blocked_by = why
        self._words[CLOSED] = 1  # first: whatever begins from here on finds it
        unbegun = [host_call for host_call in self.host_calls.values() if not self.has_begun(host_call)]
        for host_call in unbegun:
            del self.host_calls[host_call.number]
            self._unheard.pop(host_call.number, None)
        return unbegun

    def has_begun(self, host_call: HostCall) -> bool:
        return bool(self._words[BEGUN] >= host_call.number)

    @property
    def was_any_good(self) -> bool:
        """Return whether it came up and was there for a while, so that there is a point in starting another at once."""
        return self.is_up and bool(self._words[BEGUN] or monotonic_ns() - self._ready_ns > RESPAWN_PAUSE_S * 1e9)

    def ask_to_wind_down(self, host_call: HostCall) -> None:
        self._send_soon(messages.pack(WindDown(host_call.number, host_call.call.request_id)))

    def send_bell(self, host_call: HostCall, bell_ns: int) -> None:
        self._send_soon(messages.pack(messages.MoveBell(host_call.number, host_call.call.request_id, bell_ns)))

    def cancel(self, host_call: HostCall) -> None:
        """Tell the process to cancel it. Whether it hears that decides about the process."""
        if self.is_dying:
            return  # its end answers for everybody in it
        host_call.asked_ns = monotonic_ns()
        self._unheard[host_call.number] = host_call
        self._send_soon(messages.pack(Cancel(host_call.number)))
        if self._check is None:
            self._tries = 0
            self._check_later()

    def _check_later(self) -> None:
        self._pulse = self._words[BEGUN]
        self._check_due_ns = monotonic_ns() + HEARD_LIMIT_NS
        self._check = self._loop.call_later(HEARD_LIMIT_S, self._check_heard, context=self._owner.context)

    def _check_heard(self) -> None:
        self._check = None
        now_ns = monotonic_ns()
        deaf_to = [host_call for host_call in self._unheard.values() if now_ns - host_call.asked_ns >= HEARD_LIMIT_NS]
        if not self._unheard or self.is_dying:
            return
        self._tries += 1
        is_starved = now_ns - self._check_due_ns > STARVED_S * 1e9 and self._tries < STARVED_TRIES
        is_alive = now_ns - self._sign_ns <= HEARD_LIMIT_NS or self._words[BEGUN] != self._pulse
        is_too_late = any(now_ns >= host_call.asked_ns + host_call.grace_ns for host_call in deaf_to)
        if deaf_to and not is_starved and (is_too_late or not is_alive):
            self._owner.on_deaf(self, deaf_to)
            self._unheard = {
                number: host_call for number, host_call in self._unheard.items() if not host_call.is_abandoned
            }
        if self._unheard and not self.is_dying:
            self._check_later()

    def running(self) -> HostCall | None:
        """Return the call whose code holds the loop at this moment."""
        return self.host_calls.get(self._words[RUNNING])

    # --- what the process says and is told ----------------------------------------------------------------

    def _on_silence(self) -> None:
        self._order(Order.KILL, "its host is gone")  # what it left below need not be waited for

    def _take_all(self, received: list[ipc.Message]) -> None:
        self._sign_ns = monotonic_ns()
        super()._take_all(received)

    def _has_calls(self) -> bool:
        return bool(self.host_calls)

    def _take(self, message: ipc.Message) -> None:
        if isinstance(message, Ready):
            self.is_up = True
            self._ready_ns = monotonic_ns()
            self._owner.on_ready(self)
            return
        if isinstance(message, NeverMind):
            self._never_mind(message.question)
            return
        host_call = self.host_calls.get(message[0])
        if host_call is None:
            return
        match message:
            case Done():
                del self.host_calls[host_call.number]
                self._unheard.pop(host_call.number, None)
                self._owner.on_ended(self, host_call, message)
            case Process():
                host_call.has_started(message.mark, message.pid)
            case Heard():
                if self._unheard.pop(host_call.number, None) is not None:
                    self._owner.on_heard(self, host_call)
            case _:
                self._take_from(host_call, message)

    def _send_soon(self, message: bytes) -> None:
        """Send a message at the end of this turn of our loop, together with whatever else is sent until then."""
        if not self._unsent:
            self._loop.call_soon(self._flush, context=self._owner.context)
        self._unsent += message

    def _flush(self) -> None:
        unsent, self._unsent = self._unsent, bytearray()
        if not self.gone.done():
            self._send(unsent)

    def _send_more(self) -> None:
        self._sign_ns = monotonic_ns()  # it has read something
        super()._send_more()

    # --- the end ------------------------------------------------------------------------------------------

    def kill(self, fate: Fate, culprit: str = "") -> None:
        if self.is_dying or self.gone.done():
            return
        self._on_ending()
        self.fate, self.culprit = fate, culprit
        self._order_end(Order.KILL, fate.name.lower())

    def _on_ending(self) -> None:
        self.is_dying = True
        self._words[CLOSED] = 1

    def _release(self, report: CommandReport | None) -> None:
        for handle in (self._check, self._pickup):
            if handle is not None:
                handle.cancel()
        self._control.close()
        self._words = memoryview(bytearray(self._words)).cast("Q")  # what it says from here on; the memory is let go

    def _answer_for_all(self, report: CommandReport) -> None:
        self._owner.on_lost(self, report)


def _shared_memory() -> int:
    """Return a descriptor of memory that both sides map."""
    if hasattr(os, "memfd_create"):
        memory = os.memfd_create("shotclock-host")
    else:
        import tempfile

        with tempfile.TemporaryFile() as file:
            memory = os.dup(file.fileno())
    os.ftruncate(memory, SHARED_SIZE)
    return memory
