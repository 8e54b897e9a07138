"""The work of a call whose handler runs: on its caller's own loop (`isolation="inline"`), or in a worker.

    running -> limit reached: stopped -> ended within the grace, or abandoned (inline), or its process killed

All transitions happen on the caller's loop, so exactly one of result and limit wins.
"""

from __future__ import annotations

import asyncio
import contextlib
import pickle
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from contextvars import copy_context
from functools import partial
from math import inf
from typing import TYPE_CHECKING, Any, cast

from ..core.arguments import NotSerializable, signature_of, to_valid_json
from ..core.catalogue import Operation
from ..core.envelope import Envelope, Warning_, as_data, warning
from ..core.errors import Ending, Failure, shown_failure
from ..core.limits import NS_PER_MS, ClockKind, Clocks
from ..core.value_types import as_dict, record
from ..supervise import spans
from ..supervise.client import REPORT_LIMIT_MS
from ..supervise.clock import monotonic_ns
from ..supervise.kill import VERIFY_LIMIT_MS
from ..worker import messages
from ..worker.context import (
    OVERTIME,
    CallListener,
    Context,
    Scope,
    StartedProcesses,
    Survivors,
    Then,
    context_class,
    current_scope,
    give_up_started,
    run_beside,
    started_by,
    take_started,
    watch,
    work_in_pools,
)
from ..worker.messages import BeginWindDown, Done, Run
from .call import Call, Outcome, Work, WorkView, invalid
from .control import IdleClock, control_of, request_overtime
from .outcomes import (
    closing_outcome,
    limit_problem,
    outcome_of_handler_error,
    outcome_of_value,
    rebuilt_warning,
    unopened_outcome,
    worker_outcome,
)
from .preloaded_zygote import address_of
from .supervised_commands import run_shielded

if TYPE_CHECKING:
    from concurrent.futures import Future

    from ._worker_process import Worker
    from .executor import Executor, WorkerPool

# A cancellation takes a turn of the loop for each layer of awaiting: a task in a group in a gather in a handler. A
# handler that obeys within so many turns is never abandoned, however short its grace and however busy the loop.
TURNS_TO_OBEY = 8
# Part of the grace kept for killing the call's processes, so that its answer comes within the grace.
MARGIN_NS = 100_000_000
# How long a cancelled caller waits beyond the grace for an inline handler to end.
STOP_MARGIN_MS = 1_000
# The supervisor hears the limit by itself; this is for a worker that was stuck before it could arm its timer.
LATE_BELL_NS = 30_000_000
# The shortest grace in the shared process: less could not be used even by a call that obeys.
SHORTEST_GRACE_NS = 50_000_000
# How often the shared process is given as long again to read a cancellation while it handles others: a loop with
# thousands of calls that are cancelled together is busy, not blocked.
MOST_WAITS = 20

OnCall = Callable[[Operation | str, Mapping[str, object], Clocks], Awaitable[Envelope]]
"""Makes a call inside the one that runs."""


@record
class ReadyCall:
    """A call that may run now: it has an operation, its approval and its places."""

    call: Call
    operation: Operation
    depth: int
    listener: CallListener
    on_call: OnCall
    overtime_address: str = ""
    """Where a command that its function starts may request overtime."""
    queued_ns: int = 0
    """Its wait for a place."""


class HandlerWork(Work):
    """The running handler of a call. Its first outcome counts: a result and a limit may cross."""

    has_grace = True

    def __init__(self, ready: ReadyCall, loop: asyncio.AbstractEventLoop) -> None:
        self._call = call = ready.call
        self._ready = ready
        self.listener: CallListener = ready.listener
        self._loop = loop
        self.done: asyncio.Future[Outcome] = loop.create_future()
        self.outcome: Outcome | None = None
        self.fired: ClockKind | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._partial: tuple[object, Sequence[str]] | None = None
        idle_ms = call.clocks.idle_ms
        self._idle = IdleClock(loop, idle_ms, partial(self._stop, ClockKind.IDLE), self.has_begun) if idle_ms else None
        call.work = self

    async def wait(self) -> Outcome:
        """Wait for the outcome. A cancellation stops the work first, and leaves its outcome in the call."""
        try:
            outcome = await self.done
            return outcome if outcome.problem is None else self._add_partial(outcome)
        except asyncio.CancelledError:
            if self.outcome is None:
                self.done = self._loop.create_future()
                limit_ms = self._stop_for_caller()
                await run_shielded(asyncio.wait([self.done], timeout=limit_ms / 1000))
            left = self._add_partial(self.outcome or Outcome(Ending.ABANDONED))
            left.problem = None  # the answer names the reason of the cancellation
            self._call.cancellation.outcome = left
            raise
        finally:
            self.disarm()

    def has_begun(self) -> bool:
        return True

    def _stop(self, kind: ClockKind) -> None:
        """Stop the work because of a limit."""
        raise NotImplementedError

    def _stop_for_caller(self) -> int:
        """Stop the work of a cancelled caller. Return the longest time that this takes, in milliseconds."""
        raise NotImplementedError

    def resolve(self, outcome: Outcome) -> None:
        if self.outcome is None:
            self.outcome = outcome  # the caller may have left in the same turn
            if not self.done.done():
                self.done.set_result(outcome)

    def disarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._idle is not None:
            self._idle.cancel()

    def sign_of_life(self) -> None:
        if self._idle is not None:
            self._idle.sign_of_life()

    def hold_idle(self, is_held: bool) -> None:
        if self._idle is not None:
            self._idle.is_held = is_held
            self._idle.sign_of_life()

    def wind_down(self, until_ns: int) -> None:
        if self._idle is not None:  # saving a partial result may be silent
            self._idle.cancel()

    def record_progress(self, done: float, total: float | None, unit: str | None) -> None:
        control_of(self._call).record_progress(done, total, unit)
        self.listener.progress(done, total, unit)

    def record_text(self, text: str) -> None:
        if text:
            control_of(self._call).record_sign_of_life()
        self.listener.wrote(text)

    def keep_partial(self, result: object, changes: Sequence[str]) -> None:
        """Keep a partial result, and the changes that JSON made to it."""
        self._partial = result, changes

    def _add_partial(self, outcome: Outcome) -> Outcome:
        if outcome.data is None and self._partial is not None:
            result, changes = self._partial
            outcome.data = as_data(result)
            if changes:
                outcome.warnings += (warning("RESULT_CHANGED", changes=list(changes)),)
        return outcome

    def limit_outcome(self, ending: Ending, warnings: tuple[Warning_, ...] = ()) -> Outcome:
        return Outcome(ending, limit_problem(self._call, self.fired or ClockKind.TIMEOUT), warnings=warnings)


class InlineCall(HandlerWork):
    """A call of an async handler on its caller's own event loop."""

    fired: ClockKind | None

    def __init__(self, ready: ReadyCall, executor: Executor) -> None:
        super().__init__(ready, asyncio.get_running_loop())
        self._handler = cast("Callable[..., Coroutine[Any, Any, object]]", ready.operation.handler)
        call = ready.call
        self._scope = Scope(call.bound.bell, ready.depth, call.name, call, call, ready.overtime_address)
        self._executor = executor
        self._task: asyncio.Task[Outcome]
        self._context: Context | None = None
        self._finished_ns = 0
        self._has_begun = self._is_abandoned = self._is_ending = False
        self._stopping = self._call.winding_down is not None

    def start(self) -> None:
        watch()
        context = copy_context()
        context.run(current_scope.set, self._scope)
        self._task = self._loop.create_task(self._run_handler(), context=context)
        self._task.add_done_callback(self._on_end)
        self._arm()

    async def _run_handler(self) -> Outcome:
        call, self._has_begun = self._call, True
        try:
            if spans.recorder is not None:
                spans.stand_at(call.trace)
            signature = signature_of(self._handler)
            arguments, problems = signature.check(call.arguments)
            if problems:
                return invalid(problems)
            if signature.context_name is not None:
                skipped = self.listener.skipped_steps
                arguments[signature.context_name] = self._context = context_class(signature.context_hint)(
                    call.name, call.request_id, call.bound.bell, self._scope.depth, call, self, skipped, call.client
                )
            return outcome_of_value(await self._handler(**arguments))
        except asyncio.CancelledError:
            raise
        except BaseException as error:  # SystemExit and KeyboardInterrupt of a handler would end the caller's loop
            return outcome_of_handler_error(shown_failure(error, getattr(self._handler, "errors_shown", ())))
        finally:
            self._finished_ns = monotonic_ns()

    def is_stopping(self) -> bool:
        return self._stopping

    def state(self) -> Any:
        raise Failure("STATE_UNAVAILABLE", f"{self._call.name} runs inline, and ctx.state is in the shared process")

    def progress(self, done: float, total: float | None, unit: str | None) -> None:
        self._report(partial(self.record_progress, done, total, unit))

    def step(self, name: str) -> None:
        self._report(partial(self.listener.step, name))

    def log(self, level: str, message: str, logger: str | None) -> None:
        self._report(partial(self.listener.log, level, message, logger))

    def write(self, text: str) -> None:
        self._report(partial(self.record_text, text))

    def keep(self, result: object) -> None:
        try:
            plain, changes = to_valid_json(result)
        except NotSerializable as error:
            raise TypeError(f"ctx.keep takes plain data: {error}") from None
        self._report(partial(self.keep_partial, plain, changes))

    def ask(self, question: str, value: object) -> Any:
        if question == OVERTIME:
            return request_overtime(self._call, *cast("tuple[int, str]", value))
        return self.listener.ask(question, value)

    def call(self, operation: Operation | str, arguments: Mapping[str, object], clocks: Clocks) -> Any:
        return self._ready.on_call(operation, arguments, clocks)

    def _report(self, note: Callable[[], None]) -> None:
        """Handle news of the handler, also from a thread that it started."""
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._handle_news, note)

    def _handle_news(self, note: Callable[[], None]) -> None:
        self.sign_of_life()
        if not self._is_abandoned:
            note()

    def _arm(self) -> None:
        bell = self._call.bound.bell
        if bell is not None:
            delay_s = max(0, bell.at_ns - monotonic_ns()) / 1e9
            self._timer = self._loop.call_later(delay_s, self._on_timeout)

    def _on_timeout(self) -> None:
        bell = self._call.bound.bell
        if bell is not None and monotonic_ns() < bell.at_ns:  # asyncio rounds; no limit is early
            self._arm()
        else:
            self._stop(ClockKind.TIMEOUT)

    def _stop(self, kind: ClockKind) -> None:
        if self.fired is not None or self.done.done() or self._task.done():
            return
        self.fired = kind
        self._stopping = True
        self._task.cancel()
        self._loop.call_later(self._call.bound.grace_ms / 1000, self._end_grace)

    def _end_grace(self, turns: int = TURNS_TO_OBEY) -> None:
        if self.done.done() or self._is_ending:
            return
        if turns:
            self._loop.call_soon(self._end_grace, turns - 1)
            return
        self._is_abandoned = True
        self._executor.counts.abandoned += 1
        self._executor.orphans[self] = self._call
        if started := give_up_started(self._scope):
            started.stop_beside(self._loop, partial(self._resolve, self.limit_outcome(Ending.ABANDONED)))
        else:
            self._resolve(self.limit_outcome(Ending.ABANDONED))

    def wind_down(self, until_ns: int) -> None:
        self._stopping = True
        super().wind_down(until_ns)

    def stop_unwound(self) -> None:
        self._stop(ClockKind.SOFT)

    def move_bell(self) -> bool:
        if self.fired is not None or self.done.done():
            return False
        if self._timer is not None:
            self._timer.cancel()
        self._arm()
        if self._context is not None:
            self._context.deadline = self._call.bound.bell
        return True

    def _on_end(self, task: asyncio.Task[Outcome]) -> None:
        outcome = None if task.cancelled() else task.result()
        if self._is_abandoned:
            self._executor.counts.late += 1
            self._executor.orphans.pop(self, None)
            return
        if self.fired is not None and (left := work_in_pools(self._scope)):
            self._wait_for_pool(task, left[0])
            return
        if not (started := take_started(self._scope)):
            self._settle(outcome, ())
            return
        self._is_ending = True
        settle = partial(self._settle, outcome)
        if self.fired is None:  # the handler may keep them for later calls, as it keeps what is in memory
            run_beside(self._loop, started.alive, settle)
        else:
            started.stop_beside(self._loop, settle, grace_ns=self._kill_in_ns())

    def _wait_for_pool(self, task: asyncio.Task[Outcome], running: Future[Any]) -> None:
        """Take the end of a stopped call later, when this thread of `asyncio.to_thread` or the like has ended."""

        def look_again(_: Future[Any]) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(self._on_end, task)

        if (started := started_by(self._scope)) is not None:  # the thread may wait for them
            started.stop_beside(self._loop, lambda survivors: None, grace_ns=self._kill_in_ns())
        running.add_done_callback(look_again)

    def _kill_in_ns(self) -> int:
        grace_ns = self._call.bound.grace_ms * NS_PER_MS
        return max(0, self._finished_ns + grace_ns - MARGIN_NS - monotonic_ns())

    def _settle(self, outcome: Outcome | None, survivors: Survivors) -> None:
        """Choose between the handler's outcome (None: it was cancelled) and the limit that was reached."""
        bell = self._call.bound.bell
        in_time = bell is None or self._finished_ns <= bell.at_ns
        if outcome is None and self.fired is None:
            outcome = worker_outcome("cancelled", None)
        was_stopped = self.fired is not None and (outcome is None or outcome.problem is not None)
        if outcome is None or was_stopped or self.fired is ClockKind.IDLE or not in_time:
            ended = Ending.FINISHED if self.fired is None else Ending.CANCELLED  # finished: by itself, but late
            outcome = self.limit_outcome(ended if self._has_begun else Ending.NOT_STARTED)
        self._resolve(outcome, survivors)

    def _resolve(self, outcome: Outcome, survivors: Survivors = ()) -> None:
        outcome.survivors = survivors
        self.resolve(outcome)

    def _stop_for_caller(self) -> int:
        self._stop(ClockKind.TIMEOUT)
        return self._call.bound.grace_ms + VERIFY_LIMIT_MS + STOP_MARGIN_MS


class ProcessCall(HandlerWork):
    """One call of a function, on its way to a worker and back."""

    fired: ClockKind | None

    def __init__(self, ready: ReadyCall, pool: WorkerPool) -> None:
        """Pickle the arguments. Raises what pickle raises, before they cost a worker."""
        self._arguments = pickle.dumps(dict(ready.call.arguments))
        super().__init__(ready, pool.loop)
        call = ready.call
        self.call: Call = call
        self.depth: int = ready.depth
        self._pool = pool
        self.worker: Worker | None = None
        self.number = 0
        self.is_stopping: bool = False
        """A limit was reached, or the caller has left."""
        self.is_heard: bool = False
        """The shared process has read the cancellation."""
        self._stopped_ns = 0
        self._waits = 0
        self.started: StartedProcesses | None = None
        """In the shared process."""
        self._warnings: tuple[Warning_, ...] = ()
        bell, queue_ms = call.bound.bell, call.clocks.queue_ms
        self._queue_ns = call.started_ns + queue_ms * NS_PER_MS if queue_ms else inf
        self._arm(min(self._queue_ns, inf if bell is None else bell.at_ns))

    async def call_inside(self, name: str, arguments: Mapping[str, object], clocks: Clocks) -> Envelope:
        token = current_scope.set(Scope(self.call.bound.bell, self.depth, self.call.name, self.call, call=self.call))
        try:
            return await self._ready.on_call(name, arguments, clocks)
        finally:
            current_scope.reset(token)

    def pack(self) -> bytes:
        call = self.call
        bell, caller = call.bound.bell, call.caller
        return messages.pack(
            Run(
                self.number,
                *address_of(self._ready.operation.handler),
                self._arguments,
                call.name,
                call.request_id,
                bell.at_ns if bell is not None else 0,
                self.depth,
                self.listener.skipped_steps,
                self.listener.stdin_path,
                (caller.trace_id, caller.sampled, caller.state),
                self._ready.overtime_address,
                tuple(as_dict(call.client).values()) if call.client is not None else (),
            )
        )

    # --- limits -------------------------------------------------------------------------------------------

    def _arm(self, at_ns: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if at_ns != inf:
            self._timer = self._loop.call_later(max(0, at_ns - monotonic_ns()) / 1e9, self.check_limits)

    def check_limits(self) -> None:
        """Enforce the limits that are reached, and arm the timer for the next."""
        bell, now_ns = self.call.bound.bell, monotonic_ns()
        bell_ns = inf if bell is None else bell.at_ns
        if self.is_stopping:
            self._end_grace(now_ns)
        elif self.worker is None:
            if now_ns < min(bell_ns, self._queue_ns):
                self._arm(min(bell_ns, self._queue_ns))
            else:
                self._pool.turn_away(self, ClockKind.QUEUE if self._queue_ns < bell_ns else ClockKind.TIMEOUT)
        elif now_ns < (due_ns := bell_ns + (0 if self.worker.is_shared else LATE_BELL_NS)):
            self._arm(due_ns)
        else:
            self._stop(ClockKind.TIMEOUT)

    def has_begun(self) -> bool:
        return self.worker is not None and self.worker.has_begun(self)

    def _stop(self, kind: ClockKind) -> None:
        if self.is_stopping or self.worker is None:
            return
        self.fired = kind
        self.stop_in_worker(kind.value)

    def stop_in_worker(self, why: str) -> None:
        """Have the worker stop it, or cancel it in the shared process. Nothing happens if it has just ended."""
        worker = self.worker
        if worker is None or self.is_stopping:
            return
        # It may have ended, and the next call begun. So the calls behind it are taken back before its answer is read.
        unbegun = worker.take_back()
        worker.read_what_is_there()
        if self in unbegun:
            unbegun.remove(self)
            self.worker = None
            self.resolve(self.limit_outcome(Ending.NOT_STARTED))
            if self.fired is not None and not worker.calls:
                worker.kill("it never began its call")
        self._pool.put_first(unbegun)
        if worker.calls.get(self.number) is not self:
            return
        self.is_stopping = True
        self._stopped_ns = monotonic_ns()
        worker.stop(self, why)
        if worker.is_shared:
            self._arm(self.overdue_ns)
            self._stop_started(lambda survivors: None)  # a thread may wait for them

    @property
    def overdue_ns(self) -> int:
        return self._stopped_ns + max(self.call.bound.grace_ms * NS_PER_MS, SHORTEST_GRACE_NS)

    def on_heard(self) -> None:
        """Count the grace from now on: a crowded loop reads a cancellation late."""
        self.is_heard = True
        self._stopped_ns = monotonic_ns()
        self._arm(self.overdue_ns)

    def _end_grace(self, now_ns: int) -> None:
        worker = self.worker
        if worker is None or not worker.is_shared or worker.is_ending or worker.is_closing_states:
            return
        worker.read_what_is_there()
        if worker.calls.get(self.number) is not self:
            return
        if self.is_heard and monotonic_ns() < self.overdue_ns:  # read just now
            return
        if self.is_heard and self._pool.is_closing:  # the lifespans are closed first; that has a limit of its own
            return
        if not self.is_heard and worker.is_moving(now_ns) and self._waits < MOST_WAITS:
            self._waits += 1
            self._arm(now_ns + SHORTEST_GRACE_NS)
        else:
            worker.kill_for(self)

    # --- control --------------------------------------------------------------------------------------------

    @property
    def is_queued(self) -> bool:
        return self.worker is None

    def wind_down(self, until_ns: int) -> None:
        super().wind_down(until_ns)
        if self.worker is not None:
            self.worker.send(BeginWindDown(self.number))

    def stop_unwound(self) -> None:
        if self.worker is not None:
            self._stop(ClockKind.SOFT)
        else:
            self._pool.leave_queue(self)
            self.resolve(Outcome(Ending.NOT_STARTED, limit_problem(self.call, ClockKind.SOFT)))

    def move_bell(self) -> bool:
        bell = self.call.bound.bell
        if bell is None or self.is_stopping or self.outcome is not None:
            return False
        if self.worker is not None and not self.worker.move_bell(self, bell.at_ns):
            return False
        self._arm(bell.at_ns if self.worker is not None else min(bell.at_ns, self._queue_ns))
        return True

    async def look(self) -> WorkView:
        return WorkView(has_begun=self.worker is not None)

    # --- in the shared process -------------------------------------------------------------------------------

    def record_rebuilt(self, why: str, ago_ns: int) -> None:
        """Note that the state of the App was opened anew before this call."""
        self._warnings = (rebuilt_warning(why, ago_ns),)

    def resolve(self, outcome: Outcome) -> None:
        outcome.warnings += self._warnings
        super().resolve(outcome)

    def has_started(self, mark: str, pid: int) -> None:
        if self.started is None:
            self.started = StartedProcesses(mark)
        self.started.add(pid)
        if self.is_stopping:
            self._stop_started(lambda survivors: None)

    def _stop_started(self, then: Then) -> None:
        """Stop the processes of the call within its grace, and call `then` with the survivors."""
        if self.started:
            left_ns = max(0, self.overdue_ns - MARGIN_NS - monotonic_ns())
            self.started.stop_beside(self._loop, then, grace_ns=left_ns)

    def handle_shared_result(self, done: Done) -> None:
        """Take the answer of the shared process, once the call's processes are stopped or listed."""
        self.disarm()
        settle = partial(self._settle, done)
        if not self.started:
            settle(())
        elif not self.is_stopping:  # the handler may keep them for later calls, as it keeps what is in memory
            run_beside(self._loop, self.started.alive, settle)
        else:
            self._stop_started(settle)

    def _settle(self, done: Done, survivors: Survivors) -> None:
        """Choose between the result and the limit. A result before the deadline counts, even if it came later."""
        bell = self.call.bound.bell
        in_time = bell is None or done.finished_ns <= bell.at_ns
        is_closed = self._pool.is_closing and not self.is_stopping and done.payload is None
        if is_closed and done.kind in ("unbegun", "unopened", "cancelled"):
            outcome = closing_outcome(Ending.CANCELLED if done.kind == "cancelled" else Ending.NOT_STARTED)
        elif done.kind == "unbegun":
            outcome = self.limit_outcome(Ending.NOT_STARTED)
        elif done.kind == "unopened":
            outcome = unopened_outcome(done.payload, self.limit_outcome(Ending.NOT_STARTED))
        elif in_time and (self.fired is None or (self.fired is not ClockKind.IDLE and done.kind != "cancelled")):
            outcome = worker_outcome(done.kind, done.payload)
        else:  # finished: by itself, but late
            outcome = self.limit_outcome(Ending.CANCELLED if self.is_stopping else Ending.FINISHED)
        outcome.survivors = survivors
        self.resolve(outcome)

    # --- its caller is cancelled ------------------------------------------------------------------------------

    def _stop_for_caller(self) -> int:
        if self.worker is not None:
            self.stop_in_worker("cancelled")
        else:
            self._pool.leave_queue(self)
            self.resolve(Outcome(Ending.NOT_STARTED))
        waits_ms = MOST_WAITS * SHORTEST_GRACE_NS // NS_PER_MS
        return 2 * self.call.bound.grace_ms + REPORT_LIMIT_MS + waits_ms
