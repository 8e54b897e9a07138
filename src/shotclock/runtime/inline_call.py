"""A call of an async handler on its caller's own event loop (`isolation="inline"`).

    running -> limit reached: cancelled -> ended within the grace, or abandoned

All transitions happen on that loop, so exactly one of result and limit wins.

docs/design.md: R22, R23.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine, Mapping
from contextvars import copy_context
from functools import partial
from typing import Any, Protocol, cast

from ..core.arguments import NotSerializable, signature_of, to_valid_json
from ..core.clocks import NS_PER_MS, ClockKind, Clocks
from ..core.envelope import Problem
from ..core.errors import Ending
from ..process import spans
from ..process.clock import monotonic_ns
from ..process.context import (
    OVERTIME,
    CallListener,
    Context,
    Scope,
    Survivors,
    current_scope,
    give_up_started,
    take_started,
    watch,
)
from ..process.kill import VERIFY_LIMIT_MS
from .call import Call, Outcome, Work, invalid
from .command_runner import run_shielded
from .control import IdleClock, note_progress, request_overtime
from .outcomes import limit_problem, outcome_of_handler_error, outcome_of_value

# A cancellation takes a turn of the loop for each layer of awaiting: a task in a group in a gather in a handler. A
# handler that obeys within so many turns is never abandoned, however short its grace and however busy the loop.
TURNS_TO_OBEY = 8
# Part of the grace kept for killing the call's processes, so that its answer comes within the grace.
MARGIN_MS = 100
# How long a cancelled caller waits beyond the grace for the handler to end.
STOP_MARGIN_S = 1.0


class AbandonedCalls(Protocol):
    def note_abandoned(self, call: InlineCall) -> None: ...
    def note_late_end(self, call: InlineCall) -> None: ...


class InlineCall(Work):
    def __init__(self, call: Call, scope: Scope, listener: CallListener, abandoned: AbandonedCalls) -> None:
        assert call.operation is not None
        self._call = call
        self._handler = cast("Callable[..., Coroutine[Any, Any, object]]", call.operation.handler)
        self._scope = scope
        self._listener = listener
        self._register = abandoned
        self._loop = asyncio.get_running_loop()
        self._done: asyncio.Future[Outcome] = self._loop.create_future()
        self._outcome: Outcome | None = None
        self._task: asyncio.Task[Outcome]
        self._timer: asyncio.TimerHandle | None = None
        self._idle: IdleClock | None = None
        self._context: Context | None = None
        self._fired: ClockKind | None = None
        self._finished_ns = 0
        self._has_begun = self._is_abandoned = self._is_ending = False
        self._stopping = call.winding_down is not None

    @property
    def name(self) -> str:
        return self._call.name

    @property
    def started_ns(self) -> int:
        return self._call.started_ns

    async def run(self, on_call: Callable[..., Any]) -> Outcome:
        """Run the handler and return exactly one outcome, on time."""
        watch()
        self._on_call = on_call
        if idle_ms := self._call.clocks.idle_ms:
            self._idle = IdleClock(self._loop, idle_ms, partial(self._ring, ClockKind.IDLE))
        self._call.work = self
        context = copy_context()
        context.run(current_scope.set, self._scope)
        self._task = self._loop.create_task(self._run_handler(), context=context)
        self._task.add_done_callback(self._on_end)
        self._arm()
        try:
            return await self._done
        except asyncio.CancelledError as cancelled:
            cancelled.outcome = await self._stop_for_caller()  # type: ignore[attr-defined]
            raise
        finally:
            if self._timer is not None:
                self._timer.cancel()
            if self._idle is not None:
                self._idle.cancel()

    async def _run_handler(self) -> Outcome:
        call, self._has_begun = self._call, True
        try:
            if spans.recorder is not None:
                spans.stand_at(call.trace)
            signature = signature_of(self._handler)
            arguments, problems = signature.check(call.arguments)
            if problems:
                return invalid(problems)
            if signature.wants_context:
                skipped = self._listener.skipped_steps
                arguments["ctx"] = self._context = Context(
                    call.name, call.request_id, call.bound.bell, self._scope.depth, call, self, skipped
                )
            return outcome_of_value(await self._handler(**arguments))
        except asyncio.CancelledError:
            raise
        except BaseException as error:  # SystemExit and KeyboardInterrupt of a handler would end the caller's loop
            return outcome_of_handler_error(error)
        finally:
            self._finished_ns = monotonic_ns()

    def is_stopping(self) -> bool:
        return self._stopping

    def progress(self, done: float, total: float | None, unit: str | None) -> None:
        self._report(partial(self._take_progress, done, total, unit))

    def step(self, name: str) -> None:
        self._report(partial(self._listener.step, name))

    def write(self, text: str) -> None:
        self._report(partial(self._listener.wrote, text))

    def keep(self, result: object) -> None:
        try:
            plain, changes = to_valid_json(result)
        except NotSerializable as error:
            raise TypeError(f"ctx.keep takes plain data: {error}") from None
        self._report(partial(self._call.keep_partial, plain, changes))

    def ask(self, question: str, value: object) -> Any:
        if question == OVERTIME:
            return request_overtime(self._call, *cast("tuple[int, str]", value))
        return self._listener.ask(question, value)

    def call(self, operation: object, arguments: Mapping[str, object], clocks: Clocks) -> Any:
        return self._on_call(operation, arguments, clocks)

    def _report(self, note: Callable[[], None]) -> None:
        """Take news of the handler, also from a thread that it started."""
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._take_news, note)

    def _take_news(self, note: Callable[[], None]) -> None:
        if self._idle is not None:
            self._idle.sign_of_life()
        if not self._is_abandoned:
            note()

    def _take_progress(self, done: float, total: float | None, unit: str | None) -> None:
        note_progress(self._call, done, total, unit)
        self._listener.progress(done, total, unit)

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
            self._ring(ClockKind.TIMEOUT)

    def _ring(self, kind: ClockKind) -> None:
        if self._fired is not None or self._done.done() or self._task.done():
            return
        self._fired = kind
        self._stopping = True
        self._task.cancel()
        self._loop.call_later(self._call.bound.grace_ms / 1000, self._end_grace)

    def _end_grace(self, turns: int = TURNS_TO_OBEY) -> None:
        if self._done.done() or self._is_ending:
            return
        if turns:
            self._loop.call_soon(self._end_grace, turns - 1)
            return
        self._is_abandoned = True
        self._register.note_abandoned(self)
        if started := give_up_started(self._scope):
            started.stop_beside(self._loop, partial(self._resolve, self._limit_outcome(Ending.ABANDONED)))
        else:
            self._resolve(self._limit_outcome(Ending.ABANDONED))

    def wind_down(self, until_ns: int) -> None:
        self._stopping = True
        if self._idle is not None:  # saving a partial result may be silent
            self._idle.cancel()

    def stop_unwound(self) -> None:
        self._ring(ClockKind.SOFT)

    def move_bell(self) -> bool:
        if self._fired is not None or self._done.done():
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
            self._register.note_late_end(self)
            return
        if not (started := take_started(self._scope)):
            self._settle(outcome, ())
            return
        self._is_ending = True
        settle = partial(self._settle, outcome)
        if self._fired is None:  # the handler may keep them for later calls, as it keeps what is in memory
            started.look_beside(self._loop, settle)
        else:
            left_ns = self._finished_ns + (self._call.bound.grace_ms - MARGIN_MS) * NS_PER_MS - monotonic_ns()
            started.stop_beside(self._loop, settle, grace_ns=max(0, left_ns))

    def _settle(self, outcome: Outcome | None, survivors: Survivors) -> None:
        """Choose between the handler's outcome (None: it was cancelled) and the limit that was reached."""
        bell = self._call.bound.bell
        in_time = bell is None or self._finished_ns <= bell.at_ns
        if outcome is None and self._fired is None:
            outcome = Outcome(Ending.CANCELLED, Problem("CANCELLED", f"{self.name} was cancelled where it ran"))
        was_stopped = self._fired is not None and (outcome is None or outcome.problem is not None)
        if outcome is None or was_stopped or self._fired is ClockKind.IDLE or not in_time:
            ended = Ending.FINISHED if self._fired is None else Ending.CANCELLED  # finished: by itself, but late
            outcome = self._limit_outcome(ended if self._has_begun else Ending.NOT_STARTED)
        self._resolve(outcome, survivors)

    def _limit_outcome(self, ending: Ending) -> Outcome:
        return Outcome(ending, limit_problem(self._call, self._fired or ClockKind.TIMEOUT))

    def _resolve(self, outcome: Outcome, survivors: Survivors = ()) -> None:
        outcome.survivors = survivors
        self._outcome = outcome  # the caller may have left in the same turn
        if not self._done.done():
            self._done.set_result(outcome)

    async def _stop_for_caller(self) -> Outcome:
        """Cancel the handler because its caller was cancelled; wait for its grace and a margin."""
        if self._outcome is not None:
            return self._outcome
        self._done = self._loop.create_future()
        self._ring(ClockKind.TIMEOUT)
        limit_s = (self._call.bound.grace_ms + VERIFY_LIMIT_MS) / 1000 + STOP_MARGIN_S
        await run_shielded(asyncio.wait([self._done], timeout=limit_s))
        return self._done.result() if self._done.done() else Outcome(Ending.ABANDONED)
