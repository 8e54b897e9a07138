"""One call of a handler that cannot be killed, waited for on the caller's loop.

The state of such a call is: running → (bell) cancelling → cancelled, or abandoned when it does not react. All
transitions happen on the caller's loop, so a result and a bell can never both win, and one always does.

docs/design.md: R22, R23.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from contextvars import Context as Variables
from functools import partial
from typing import Any, Protocol, cast

from ..core.arguments import NotSerializable, signature_of, to_valid_json
from ..core.catalogue import Guard, Operation
from ..core.clocks import NS_PER_MS, ClockKind, Clocks
from ..core.envelope import Problem
from ..core.errors import Ending, Failure
from ..process import call_processes, spans
from ..process.clock import monotonic_ns
from ..process.context import NULL_LISTENER, OVERTIME, CallListener, Context, Scope
from ..process.context import current_scope as current_scope
from ..process.kill import VERIFY_LIMIT_MS
from .asyncio_private import Waiter, start_at_once
from .call import Call, Outcome, Work, invalid, wound_down_problem
from .command_runner import run_shielded
from .control import note_progress, request_overtime
from .idle_clock import LONGEST_DELAY_S, IdleClock
from .loop_threads import CrossLoopQueue, Delivery, LoopTask, LoopThread, LoopThreads
from .outcomes import (
    TimedOut,
    failure_outcome,
    outcome_of_handler_error,
    outcome_of_value,
    stalled_problem,
)

# A loop that has not heard a cancellation, and has not moved for so long, is blocked. A healthy one takes microseconds.
HEARD_LIMIT_S = 0.05
# How long a loop that moves may take to come to a cancellation, for each piece of work that it has. A healthy one takes
# some tens of microseconds. Many handlers run it out that each block the loop for less than the limit above.
CROWD_SHARE_S = 0.005
# If our own timer was this late, the machine is short of CPU and the silence proves nothing yet.
STARVED_S = 0.02
STARVED_TRIES = 3
# What is kept of the grace for the kill of what a call has started, so that its answer still comes within the grace.
MARGIN_MS = 100
# How long a handler in a thread waits for a checkpoint to be kept: a caller's loop that is blocked runs it out.
ANSWER_LIMIT_S = 30.0

# What came of a handler that was cancelled. The exception itself would hold on to every frame that it passed through.
_CANCELLED = asyncio.CancelledError()


class Carrier(Protocol):
    """Place where handlers run that cannot be killed."""

    def submit(self, loop_task: LoopTask) -> None: ...
    def cancel(self, loop_tasks: Sequence[LoopTask], thread: LoopThread | None) -> Delivery: ...
    def give_up(self, loop_task: LoopTask) -> None: ...


class LoopCarrier:
    """Carrier of async handlers: on the thread of their level."""

    __slots__ = ("_level", "_threads")

    def __init__(self, threads: LoopThreads, level: int) -> None:
        self._threads, self._level = threads, level

    def submit(self, loop_task: LoopTask) -> None:
        self._threads.submit(loop_task, self._level)

    def cancel(self, loop_tasks: Sequence[LoopTask], thread: LoopThread | None) -> Delivery:
        assert thread is not None  # it was claimed by one
        return thread.cancel(loop_tasks)

    def give_up(self, loop_task: LoopTask) -> None:
        if not loop_task.cancel_heard:
            self._threads.relieve(loop_task.thread)


class SharedLoopCarrier:
    """Carrier of async handlers on the caller's own loop: nothing to hand over, and nothing left if the handler blocks
    it."""

    __slots__ = ("_loop",)

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop

    def submit(self, loop_task: LoopTask) -> None:
        loop_task.claim()
        loop_task.task = start_at_once(loop_task.run(None), self._loop, loop_task.context)

    def cancel(self, loop_tasks: Sequence[LoopTask], thread: LoopThread | None) -> Delivery:
        delivery = Delivery(loop_tasks, self._loop)
        delivery.deliver()
        return delivery

    def give_up(self, loop_task: LoopTask) -> None:
        pass


class ThreadCarrier:
    """Carrier of sync handlers that asked for a thread: one each, and no way to stop it but to ask."""

    def submit(self, loop_task: LoopTask) -> None:
        threading.Thread(target=self._run, args=(loop_task,), name="shotclock-thread", daemon=True).start()

    def _run(self, loop_task: LoopTask) -> None:
        # The coroutine never awaits: driving it once runs it to its end in this thread.
        if loop_task.claim():
            with contextlib.suppress(StopIteration):
                loop_task.context.run(loop_task.run(None).send, None)

    def cancel(self, loop_tasks: Sequence[LoopTask], thread: LoopThread | None) -> Delivery:
        delivery = Delivery(loop_tasks, asyncio.get_running_loop())
        delivery.deliver(turns=0)  # ctx.stopping says it; there is nothing else to throw
        return delivery

    def give_up(self, loop_task: LoopTask) -> None:
        pass


class TimerBucket:
    """The calls of one loop whose bell is in the same millisecond."""

    __slots__ = ("at_ms", "calls", "timer")

    def __init__(self, at_ms: int) -> None:
        self.at_ms = at_ms
        self.calls: dict[LoopCall, None] = {}
        self.timer: asyncio.TimerHandle | None = None


class DeadlineTimers:
    """The bells of one loop. Ten thousand that ring together are one timer and one cancellation."""

    __slots__ = ("_buckets", "_latest", "_rung", "context", "loop", "queue", "shared_loop")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._buckets: dict[int, TimerBucket] = {}
        self._latest = TimerBucket(0)
        self._rung: list[LoopCall] = []
        call_processes.watch()
        self.queue = CrossLoopQueue(loop)
        self.shared_loop = SharedLoopCarrier(loop)
        self.context = Variables()  # for all our timers: a copy of the caller's for each would be garbage

    def ask(self, question: Coroutine[Any, Any, object]) -> Future[object]:
        return asyncio.run_coroutine_threadsafe(question, self.loop)

    def arm(self, call: LoopCall, at_ns: int) -> TimerBucket:
        at_ms = -(-at_ns // NS_PER_MS)  # rounded up: no bell rings early
        bucket = self._buckets.get(at_ms)
        if bucket is None:
            bucket = self._buckets[at_ms] = TimerBucket(at_ms)
            # Kept while calls that follow one another closely may still come to it, dropped with the next.
            former, self._latest = self._latest, bucket
            self._drop_if_empty(former)
            self._wait_for(bucket)
        bucket.calls[call] = None
        return bucket

    def strike_out(self, call: LoopCall, bucket: TimerBucket) -> None:
        """Take out a call that has its answer."""
        bucket.calls.pop(call, None)
        if bucket is not self._latest:
            self._drop_if_empty(bucket)

    def close(self) -> None:
        """Drop the bucket that was kept for further calls: nobody calls any more."""
        self._drop_if_empty(self._latest)

    def _drop_if_empty(self, bucket: TimerBucket) -> None:
        if not bucket.calls and bucket.timer is not None:
            bucket.timer.cancel()
            del self._buckets[bucket.at_ms]
            bucket.timer = None

    def _wait_for(self, bucket: TimerBucket) -> None:
        delay_s = min(max(0, bucket.at_ms * NS_PER_MS - monotonic_ns()) / 1e9, LONGEST_DELAY_S)
        bucket.timer = self.loop.call_later(delay_s, self._ring_bucket, bucket, context=self.context)

    def _ring_bucket(self, bucket: TimerBucket) -> None:
        if monotonic_ns() < bucket.at_ms * NS_PER_MS:
            self._wait_for(bucket)  # a day at a time
            return
        bucket.timer = None
        del self._buckets[bucket.at_ms]
        calls, bucket.calls = bucket.calls, {}
        for call in calls:
            call.listed = None
            call.ring(ClockKind.TIMEOUT)

    def cancel_soon(self, call: LoopCall) -> None:
        if not self._rung:
            # Every bell that is due has been queued before this, so all of them are in the list by then.
            self.loop.call_soon(self._cancel, context=self.context)
        self._rung.append(call)

    def _cancel(self) -> None:
        rung, self._rung = self._rung, []
        together: dict[tuple[Carrier, LoopThread | None, int], list[LoopCall]] = {}
        for call in rung:
            together.setdefault(call.place, []).append(call)
        for (carrier, thread, grace_ms), calls in together.items():
            ExpiredCalls(self, calls, carrier.cancel(calls, thread), grace_ms / 1000)


class ExpiredCalls:
    """Calls in one loop whose bell rang together, looked after until each has its answer."""

    __slots__ = ("_calls", "_delivery", "_due_at", "_grace_s", "_pulse", "_rang_at", "_timers", "_tries", "_was_moving")

    def __init__(self, timers: DeadlineTimers, calls: list[LoopCall], delivery: Delivery, grace_s: float) -> None:
        self._timers = timers
        self._calls = calls
        self._delivery = delivery
        self._grace_s = grace_s
        self._rang_at = timers.loop.time()
        self._tries = 0
        self._was_moving = False
        self._look_later()

    def _look_later(self) -> None:
        self._pulse = self._delivery.pulse()
        self._due_at = self._timers.loop.time() + HEARD_LIMIT_S
        self._timers.loop.call_at(self._due_at, self._look, context=self._timers.context)

    def _look(self) -> None:
        """Look after a moment: give up those whose loop does not move, give the others their grace."""
        if not self._any_left():
            return
        now, delivery = self._timers.loop.time(), self._delivery
        if delivery.came_round_at is not None:
            # Only now are they known to have been asked: what their loop took to come to them is not their grace.
            at = max(now, delivery.came_round_at + self._grace_s)
            self._timers.loop.call_at(at, self._abandon, context=self._timers.context)
            return
        is_within_reason = now < self._rang_at + HEARD_LIMIT_S + CROWD_SHARE_S * delivery.crowd
        is_moving = is_within_reason and delivery.pulse() != self._pulse
        # Between two looks it may as well have been without a core: what has moved before is looked at twice.
        was_moving, self._was_moving = self._was_moving, is_moving
        is_starved = now - self._due_at > STARVED_S and self._tries < STARVED_TRIES
        self._tries = 0 if is_moving else self._tries + 1
        is_cleaning_up = delivery.is_heard and now < self._rang_at + self._grace_s
        if is_moving or (was_moving and is_within_reason) or is_starved or is_cleaning_up:
            self._look_later()
        else:
            self._abandon()

    def _any_left(self) -> bool:
        # Their answers may lie in our own queue, from a loop that was blocked before it could wake us.
        self._timers.queue.deliver_deferred()
        self._calls = [call for call in self._calls if not call.is_settled]
        return bool(self._calls)

    def _abandon(self) -> None:
        if self._any_left():
            for call in self._calls:
                call.abandon()


class LoopCall(LoopTask, Work):
    """One handler at its place, and the one answer its caller waits for."""

    __slots__ = (
        "_abandoned",
        "_arguments",
        "_call",
        "_fired",
        "_guards",
        "_guards_only",
        "_idle",
        "_is_ending",
        "_listener",
        "_made_context",
        "_on_further_call",
        "_operation",
        "_outcome",
        "_runtime",
        "_scope",
        "_timers",
        "_waiter",
        "carrier",
        "listed",
        "stopping",
    )

    def __init__(
        self,
        runtime: AbandonedCalls,
        timers: DeadlineTimers,
        carrier: Carrier,
        call: Call,
        operation: Operation,
        arguments: Mapping[str, object],
        scope: Scope,
        *,
        guards: tuple[Guard, ...] = (),
        guards_only: bool = False,
        listener: CallListener = NULL_LISTENER,
        on_further_call: Callable[[Any, Mapping[str, object], Clocks], Any] | None = None,
    ) -> None:
        super().__init__()
        self._runtime = runtime
        self._timers = timers
        self.carrier = carrier
        self._call = call
        self._operation = operation
        self._arguments = arguments
        self._scope = scope
        self._guards = guards
        self._guards_only = guards_only
        self._listener = listener
        self._on_further_call = on_further_call
        self._outcome: Outcome | None = None
        self._made_context: Context | None = None
        self._waiter: Waiter[Outcome] | asyncio.Future[Outcome] | None = None
        self.listed: TimerBucket | None = None
        self._idle: IdleClock | None = None
        self._fired: ClockKind | None = None
        self._abandoned = False
        self._is_ending = False
        self.stopping = False

    @property
    def name(self) -> str:
        return self._call.name

    @property
    def started_ns(self) -> int:
        return self._call.started_ns

    # --- where the handler runs ---------------------------------------------------------------------------

    async def run(self, thread: LoopThread | None = None) -> None:
        if thread is not None and not thread.begin(self):
            return
        result: object  # an outcome, or what was raised
        operation = self._operation
        try:
            current_scope.set(self._scope)
            if spans.recorder is not None:
                spans.stand_at(self._call.trace)
            result = await _run_guards(self._guards, operation, self._arguments) if self._guards else None
            if result is None and self._guards_only:
                result = Outcome(Ending.FINISHED)
            if result is None:
                if self._fired is not None:  # a guard held us up for so long that the caller has its answer
                    raise asyncio.CancelledError
                bound = _bind(operation, self._arguments, self._context)
                if isinstance(bound, Outcome):
                    result = bound
                else:
                    assert callable(operation.handler)  # a reference runs in another process
                    value = operation.handler(**bound)
                    result = outcome_of_value(await value if operation.is_async else value)
        except asyncio.CancelledError:
            result = _CANCELLED
        except BaseException as error:
            result = error
        self.finished_ns = monotonic_ns()
        if isinstance(self.carrier, SharedLoopCarrier):
            self._take_result(result)
        else:
            self._timers.queue.post(LoopCall._take_result, self, result)
        result = None  # an exception knows this frame, and would only be freed by the garbage collector
        self.task = None  # and so would we be with it
        if thread is not None:
            thread.end(self.finished_ns)

    def _context(self) -> Context:
        assert self._on_further_call is not None
        self._made_context = Context(
            name=self.name,
            request_id=self._call.request_id,
            deadline=self._call.bound.bell,
            depth=self._scope.depth,
            on_progress=self._progress,
            on_call=self._on_further_call,
            is_stopping=lambda: self.stopping,
            on_step=lambda name: self._timers.queue.post(self._on_step, name),
            on_ask=self._ask,
            on_partial=self._keep,
            on_write=lambda text: self._timers.queue.post(self._on_write, text),
            trace=self._call,
            skipped_steps=self._listener.skipped_steps,
        )
        return self._made_context

    def _keep(self, partial: object) -> None:
        try:
            plain, changes = to_valid_json(partial)
        except NotSerializable as error:
            raise TypeError(f"ctx.keep takes plain data: {error}") from None
        self._timers.queue.post(self._on_partial, plain, changes)

    def _progress(self, done: float, total: float | None, unit: str | None) -> None:
        self._timers.queue.post(self._on_progress, done, total, unit)

    def _ask(self, question: str, value: object) -> Any:
        """Ask on the caller's loop. Return an awaitable to an async handler, the answer itself to one in a thread."""
        if question == OVERTIME:
            by_ms, reason = cast("tuple[int, str]", value)
            asking = self._timers.ask(request_overtime(self._call, by_ms, reason))
        else:
            asking = self._timers.ask(self._listener.ask(question, value))
        if self._operation.is_async:
            return asyncio.wrap_future(asking)
        return asking.result(ANSWER_LIMIT_S)

    # --- on the caller's loop -----------------------------------------------------------------------------

    async def wait(self) -> Outcome:
        """Start it, and return exactly one outcome, on time."""
        loop = asyncio.get_running_loop()
        clocks, bell = self._call.clocks, self._call.bound.bell
        if bell is not None:
            self.listed = self._timers.arm(self, bell.at_ns)
        if clocks.idle_ms:
            self._idle = IdleClock(loop, clocks.idle_ms, self._ring_idle)
        self._call.work = self
        if self._call.winding_down is not None:
            self.stopping = True
        self.carrier.submit(self)
        try:
            if self._outcome is not None:  # on the caller's own loop, and it never waited for anything
                return self._outcome
            waiter = self._waiter = Waiter(loop)
            return await waiter
        except asyncio.CancelledError as cancelled:
            cancelled.outcome = await self._stop_for_caller(loop)  # type: ignore[attr-defined]
            raise
        finally:
            if self.listed is not None:
                self._timers.strike_out(self, self.listed)
            if self._idle is not None:
                self._idle.cancel()

    def _on_progress(self, done: float, total: float | None, unit: str | None) -> None:
        if self._idle is not None:
            self._idle.sign_of_life()
        note_progress(self._call, done, total, unit)
        if not self._abandoned:
            self._listener.progress(done, total, unit)

    def _on_write(self, text: str) -> None:
        if self._idle is not None:
            self._idle.sign_of_life()
        if not self._abandoned:
            self._listener.wrote(text)

    def _on_step(self, name: str) -> None:
        if self._idle is not None:
            self._idle.sign_of_life()
        if not self._abandoned:
            self._listener.step(name)

    def _on_partial(self, partial: object, changes: list[str]) -> None:
        if self._idle is not None:
            self._idle.sign_of_life()
        if not self._abandoned:
            self._call.keep_partial(partial, changes)

    def wind_down(self, until_ns: int) -> None:
        self.stopping = True
        if self._idle is not None:  # saving what there is may be silent
            self._idle.cancel()

    def stop_unwound(self) -> None:
        self.ring(ClockKind.SOFT)

    def move_bell(self) -> bool:
        bell = self._call.bound.bell
        if self._fired is not None or self._outcome is not None or bell is None:
            return False
        if self.listed is not None:
            self._timers.strike_out(self, self.listed)
        self.listed = self._timers.arm(self, bell.at_ns)
        if self._made_context is not None:
            self._made_context.deadline = bell
        return True

    def _ring_idle(self) -> None:
        self.ring(ClockKind.IDLE)

    def ring(self, kind: ClockKind) -> None:
        if self._fired is not None or self._outcome is not None:
            return
        self._fired = kind
        self.stopping = True
        if not self.claimed and self.claim():  # its loop never got to it: called off before it began
            self._settle(Ending.NOT_STARTED)
        else:
            self._timers.cancel_soon(self)

    @property
    def is_settled(self) -> bool:
        return self._outcome is not None

    @property
    def place(self) -> tuple[Carrier, LoopThread | None, int]:
        """Return the key by which calls are cancelled and looked after together."""
        return self.carrier, self.thread, self._call.bound.grace_ms

    def abandon(self) -> None:
        if self._outcome is not None or self._is_ending:
            return
        self._abandoned = True
        self.carrier.give_up(self)
        self._runtime.note_abandoned(self)
        if started := call_processes.give_up_started(self._scope):
            started.stop_beside(self._timers.loop, self._settle_without)
        else:
            self._settle(Ending.ABANDONED)

    def _settle_without(self, survivors: call_processes.Survivors) -> None:
        """Settle it as abandoned: it goes on, and what it had started does not."""
        self._settle(Ending.ABANDONED, survivors)

    def _take_result(self, result: object) -> None:
        if call_processes.started_by_scope and (started := call_processes.take_started(self._scope)):
            self._is_ending = True
            then = partial(self._settle_result, result)
            if self._fired is None:  # it may keep them for the calls after it, as it keeps what is in memory
                started.look_beside(self._timers.loop, then)
            else:
                left_ns = self.finished_ns + (self._call.bound.grace_ms - MARGIN_MS) * NS_PER_MS - monotonic_ns()
                started.stop_beside(self._timers.loop, then, grace_ns=max(0, left_ns))
        else:
            self._settle_result(result)

    def _settle_result(self, result: object, survivors: call_processes.Survivors = ()) -> None:
        if self._outcome is not None:
            if self._abandoned:
                self._runtime.note_late_end(self)
            return
        if self._fired is ClockKind.IDLE or (self._fired is not None and not isinstance(result, Outcome)):
            self._settle(Ending.CANCELLED, survivors)
        elif (bell := self._call.bound.bell) is None or self.finished_ns <= bell.at_ns:
            outcome = self._make_outcome(result)  # only the news of it may have come after the bell
            outcome.survivors = survivors
            self._resolve(outcome)
        else:  # by itself, but late: the bell itself was kept from ringing, or it took no notice of it
            self._settle(Ending.FINISHED if self._fired is None else Ending.CANCELLED, survivors)

    def _make_outcome(self, result: object) -> Outcome:
        if isinstance(result, Outcome):
            outcome = result
        elif isinstance(result, asyncio.CancelledError):
            outcome = Outcome(Ending.CANCELLED, Problem("CANCELLED", f"{self.name} was cancelled where it ran"))
        else:
            assert isinstance(result, BaseException)
            outcome = outcome_of_handler_error(result)
        return outcome

    def _settle(self, ending: Ending, survivors: call_processes.Survivors = ()) -> None:
        if self._fired is ClockKind.IDLE:
            self._resolve(Outcome(ending, stalled_problem(self._call), survivors=survivors))
        elif self._fired is ClockKind.SOFT:
            self._resolve(Outcome(ending, wound_down_problem(self._call), survivors=survivors))
        else:
            self._resolve(Outcome(ending, TimedOut(self._call), survivors=survivors))

    def _resolve(self, outcome: Outcome) -> None:
        self._outcome = outcome
        if self._waiter is not None:
            self._waiter.set_result(outcome)

    async def _stop_for_caller(self, loop: asyncio.AbstractEventLoop) -> Outcome | None:
        """Stop the work, wait for it no longer than the grace, and count it if it does not stop. Return what became of
        it."""
        if self._outcome is not None:
            return None
        if self.claim():
            return Outcome(Ending.NOT_STARTED)
        self.stopping = True
        self._fired = self._fired or ClockKind.TIMEOUT
        ended = self._waiter = loop.create_future()
        self._timers.cancel_soon(self)
        limit_s = HEARD_LIMIT_S * (STARVED_TRIES + 1) + (self._call.clocks.grace_ms or 0) / 1000 + 1
        limit_s += VERIFY_LIMIT_MS / 1000
        await run_shielded(asyncio.wait([ended], timeout=limit_s))
        return ended.result() if ended.done() else Outcome(Ending.ABANDONED)


def _bind(
    operation: Operation, arguments: Mapping[str, object], context: Callable[[], Context]
) -> dict[str, object] | Outcome:
    """Return the handler's arguments, or the refusal that lists everything wrong with them."""
    signature = signature_of(operation.handler)
    bound, problems = signature.check(arguments)
    if problems:
        return invalid(problems)
    if signature.wants_context:
        bound["ctx"] = context()
    return bound


async def _run_guards(guards: tuple[Any, ...], operation: Operation, arguments: Mapping[str, object]) -> Outcome | None:
    """Ask each guard in turn; the first that raises refuses the call. Nothing has run by then."""
    for guard in guards:
        try:
            verdict = guard(operation, arguments)
            if hasattr(verdict, "__await__"):
                await verdict
        except Failure as failure:
            outcome = failure_outcome(failure)
            return Outcome(Ending.NOT_STARTED, outcome.problem, outcome.data)
        except asyncio.CancelledError:
            raise
        except BaseException as error:
            name = getattr(guard, "__name__", type(guard).__name__)
            message = f"refused by {name}: {str(error) or type(error).__name__}"
            context: dict[str, object] = {"guard": name, "exception": type(error).__name__}
            return Outcome(Ending.NOT_STARTED, Problem("REFUSED", message, "validation", context=context))
    return None


class AbandonedCalls(Protocol):
    """Count of what was abandoned: the runtime."""

    def note_abandoned(self, call: LoopCall) -> None: ...
    def note_late_end(self, call: LoopCall) -> None: ...
