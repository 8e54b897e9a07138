"""One call in an async worker, seen from the runtime: its clocks, and the one answer its caller waits for.

running → (bell, or the caller leaves) cancelling → ended in its grace, or overdue. All transitions happen on the
runtime's loop, so a result and a bell can never both win, and one always does.
"""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Callable, Mapping, Sequence
from contextvars import Context as Variables
from typing import Protocol

from ..core.clocks import ClockKind
from ..core.deadlines import NS_PER_MS
from ..core.effects import Ending
from ..core.envelope import Problem, Warning_, warning
from ..core.operation import Handler
from ..process.call_processes import StartedProcesses, Survivors
from ..process.clock import monotonic_ns
from ..process.context import CallListener
from .call import Call, Outcome
from .loop_call import HEARD_LIMIT_S, MARGIN_MS
from .outcomes import stalled_problem, timeout_problem, worker_outcome
from .preloaded_zygote import address_of
from .soft_and_idle import LONGEST_DELAY_S, NOT_YET, Alarms
from .upcalls import FurtherCall


class HostOfCall(Protocol):
    """The async worker that a call is in."""

    def has_begun(self, host_call: HostCall) -> bool: ...
    def cancel(self, host_call: HostCall) -> None: ...
    def ask_to_wind_down(self, host_call: HostCall) -> None: ...


class HostCall:
    """A call of an async handler, on its way to an async worker and back."""

    __slots__ = (
        "_alarms",
        "_handler",
        "_payload",
        "_timer",
        "admission",
        "asked_ns",
        "depth",
        "done",
        "fired",
        "host",
        "is_abandoned",
        "is_overdue",
        "listener",
        "number",
        "on_call",
        "on_waiting_end",
        "rang_ns",
        "started",
        "stopping",
        "taken_ns",
        "was_probed",
    )

    def __init__(
        self,
        admission: Call,
        handler: Handler,
        arguments: Mapping[str, object],
        depth: int,
        listener: CallListener,
        on_call: FurtherCall,
    ) -> None:
        """Pickle the arguments. Raises what pickle raises: such arguments never leave."""
        self.admission = admission
        self._handler = handler
        self._payload = pickle.dumps(dict(arguments))
        self.depth = depth
        self.listener = listener
        self.on_call = on_call
        self.done: asyncio.Future[Outcome]
        self.host: HostOfCall | None = None
        self.number = 0
        """Its number in its worker, where calls begin in the order of their numbers."""
        self.fired: ClockKind | None = None
        """Why it is being cancelled, if it is. A caller who leaves counts as a bell that rings early."""
        self.rang_ns = 0
        self.asked_ns = 0
        """When the worker was last told to cancel it."""
        self.was_probed = False
        self.is_overdue = False
        """It was cancelled, and its grace is over."""
        self.is_abandoned = False
        self.stopping = False
        self.taken_ns = 0
        """When its worker was given it."""
        self.started: StartedProcesses | None = None
        """The processes that it has started there."""
        self.on_waiting_end: Callable[[HostCall, ClockKind], None]
        """Told when a clock runs out before it has a worker."""
        self._timer: asyncio.TimerHandle | None = None
        self._alarms: Alarms | None = None

    @property
    def name(self) -> str:
        return self.admission.name

    @property
    def started_ns(self) -> int:
        return self.admission.started_ns

    @property
    def grace_ns(self) -> int:
        """Return what it has left to clean up after the bell: less than this could not even be used by those who
        obey."""
        return max(self.admission.bound.grace_ms * NS_PER_MS, int(HEARD_LIMIT_S * 1e9))

    @property
    def overdue_ns(self) -> int:
        return self.rang_ns + self.grace_ns

    def message(self) -> tuple[object, ...]:
        """Return the message that begins it in its worker."""
        admission = self.admission
        bell, caller = admission.bound.bell, admission.caller
        return (
            "run",
            self.number,
            *address_of(self._handler),
            self._payload,
            admission.name,
            admission.request_id,
            bell.at_ns if bell is not None else 0,
            self.depth,
            self.listener.skipped_steps,
            (caller.trace_id, caller.sampled, caller.state),
        )

    # --- clocks -------------------------------------------------------------------------------------------

    def arm(self, loop: asyncio.AbstractEventLoop, context: Variables) -> None:
        self.done = loop.create_future()
        clocks = self.admission.clocks
        self._arm_bell(loop, context)
        if clocks.soft_ms or clocks.idle_ms:
            self._alarms = Alarms(loop, self.admission, on_soft=self._wind_down, on_idle=self._ring_idle)

    def _arm_bell(self, loop: asyncio.AbstractEventLoop, context: Variables) -> None:
        bell = self.admission.bound.bell
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
        if self._alarms is not None:
            self._alarms.cancel()

    def sign_of_life(self) -> None:
        if self._alarms is not None:
            self._alarms.sign_of_life()

    def _wind_down(self) -> None:
        self.stopping = True
        if self.host is not None:
            self.host.ask_to_wind_down(self)

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

    def take_result(
        self,
        kind: str,
        payload: object,
        finished_ns: int,
        survivors: Survivors = (),
        *,
        warnings: tuple[Warning_, ...] = (),
    ) -> None:
        """Take what the worker said came of it. At or before the bell it counts, even if the news came after."""
        bell = self.admission.bound.bell
        in_time = bell is None or finished_ns <= bell.at_ns
        is_result = kind not in ("cancelled", "unbegun")
        if in_time and (self.fired is None or (self.fired is ClockKind.TIMEOUT and is_result)):
            outcome = self._make_outcome(kind, payload)
            outcome.survivors = survivors
            outcome.warnings += warnings
            self.resolve(outcome)
        elif kind == "unbegun":
            self.settle(Ending.NOT_STARTED, warnings=warnings)
        else:  # by itself, but late, where the bell itself was kept from ringing
            ending = Ending.FINISHED if self.fired is None else Ending.CANCELLED
            self.settle(ending, warnings=warnings, survivors=survivors)

    def _make_outcome(self, kind: str, payload: object) -> Outcome:
        if kind in ("cancelled", "unbegun"):
            outcome = Outcome(Ending.CANCELLED, Problem("CANCELLED", f"{self.name} was cancelled where it ran"))
        else:
            outcome = worker_outcome(kind, payload)
        if self._alarms is not None and self._alarms.soft_rang:
            outcome.warnings += (warning("SOFT_LIMIT", limit_ms=self.admission.clocks.soft_ms),)
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
            problem = stalled_problem(self.admission)
        else:
            problem = timeout_problem(self.admission, monotonic_ns() - self.admission.started_ns)
        if why:
            problem = Problem(problem.code, f"{problem.message}: {why}", fired=problem.fired)
        self.resolve(Outcome(ending, problem, warnings=warnings, survivors=survivors))
