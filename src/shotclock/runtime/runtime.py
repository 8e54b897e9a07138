"""The chokepoint: every call of every operation, from every surface, is begun here and ends in `Runtime.conclude`.

It never raises to its surface (but passes on a cancellation), never hangs it, and returns exactly one envelope:
admit → approval → limits → guards → run where it can be stopped → answer → observers.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, Self

from ..core.catalogue import Guard, Operation, hyphenate
from ..core.clocks import DEFAULT_GRACE_MS, DEFAULT_TIMEOUT_MS, Bound, Clocks, Deadline
from ..core.envelope import Envelope, Problem, Warning_, join_problems, warning
from ..core.errors import Ending, Failure, SideEffects
from ..core.value_types import replace_fields
from ..process import ipc, kernel, spans, worker_main
from ..process.clock import monotonic_ns
from ..process.command_task import DEFAULT_OUTPUT_LIMIT, CommandReport, CommandTask
from ..process.context import NULL_LISTENER, CallListener, Progress, ProgressListener
from ..process.environment import OVERTIME_VARIABLE
from . import commands, telemetry
from .asyncio_private import running_loop
from .call import (
    OURSELVES,
    Call,
    Outcome,
    admit,
    answer,
    inherited_deadline,
    inherited_trace,
    invalid,
    no_time_left,
)
from .command_runner import InteractiveProcess, open_command
from .control import Observe, enter, leave, start_control
from .executor import MAX_DEPTH, ChildProcesses, Counts, Executor, come_to
from .loop_call import current_scope
from .loop_threads import Observer, ObserverQueue
from .outcomes import outcome_of_error
from .preloaded_zygote import Preloaded, Program
from .worker_pool import DEFAULT_MOST, DEFAULT_WARM

if TYPE_CHECKING:
    from pathlib import Path

    from ..core.overtime import Decision, Overtime
    from .control_channel import ControlChannel
    from .overtime_observers import OvertimeObservers

DEFAULT_ORPHAN_LIMIT = 64
# How long a look at whether the machine is fit counts, so that thousands of calls need not look each for itself.
FITNESS_NS = 50_000_000


class CallLimits(Protocol):
    """Lets only so many calls through at a time."""

    def guards(self, name: str) -> bool: ...
    async def enter(self, call: Call) -> Callable[[], None] | Outcome: ...


class CallApprovals(Protocol):
    """Lets some calls through only after a person has said yes."""

    def guards(self, name: str) -> bool: ...
    async def approve(self, call: Call) -> Outcome | None: ...
    def record(self, proposal_id: str, envelope: Envelope) -> None: ...


class Runtime:
    """Holds the workers, loops and zygotes of one event loop. Use it as an async context manager."""

    def __init__(
        self,
        *,
        operations: Iterable[Operation] = (),
        clocks: Clocks | None = None,
        guards: Iterable[Guard] = (),
        observers: Iterable[Observer] = (),
        workers: int = DEFAULT_WARM,
        most_workers: int = DEFAULT_MOST,
        preload: Iterable[str] = (),
        orphan_limit: int = DEFAULT_ORPHAN_LIMIT,
        share_loop: bool = False,
        host_process: bool = False,
        program: Program | None = None,
        preloaded: Preloaded | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """Take the operations and how they run. `share_loop` runs async handlers on the caller's own loop, where they
        may use what lives there (and cost no switch of threads). A handler that blocks it then delays its caller's
        answer as well: only for handlers known not to, or where another process holds the clock. `host_process` runs
        them in a process of their own, where they can be killed and nothing of theirs can block this one. `program` is
        what the workers import to find their functions; not said, it is the program that runs here. `preloaded` forks
        them, if there is one already. `environment` is all that workers and hosts see of it; not said, it is our
        own."""
        if worker_main.inside_worker:
            raise RuntimeError(
                "a runtime was started while a worker imported this program: put the start of the program "
                'under `if __name__ == "__main__":`'
            )
        self._operations = {operation.name: operation for operation in operations}
        self._clocks = (clocks or Clocks()).over(Clocks(DEFAULT_TIMEOUT_MS, grace_ms=DEFAULT_GRACE_MS))
        self._guards = tuple(guards)
        self._observers = [
            ObserverQueue(observer, f"shotclock-observer-{position}", self._observer_failed)
            for position, observer in enumerate(observers)
        ]
        self._orphan_limit = orphan_limit
        self.counts = Counts()
        self._overtime_observers: OvertimeObservers | None = None
        self.person_observer: Observe | None = None
        """Asks a person about overtime. Whoever has an inbox puts it here."""
        self._channel: ControlChannel | None = None
        self._executor = Executor(self.counts, self._guards, self.call, self.observe, share_loop=share_loop)
        self._children = ChildProcesses(
            self._executor,
            self._operations.values,
            workers=workers,
            most_workers=most_workers,
            preload=tuple(preload),
            hosts_all=host_process,
            program=program,
            preloaded=preloaded,
            environment=environment,
        )
        self._executor.children = self._children
        self._defaults: dict[Operation, Clocks] = {}
        self._last_clocks = (self._clocks, self._clocks, self._clocks)
        self._closed = False
        self.limits: CallLimits | None = None
        self.approvals: CallApprovals | None = None
        self.tool = OURSELVES
        """Who answers. An app's dispatcher puts the app here."""
        self._fit_until_ns = 0
        self.last_observer_error: BaseException | None = None
        inherited = inherited_deadline(os.environ, monotonic_ns())
        self.inherited, self._inherited_notes = inherited.deadline, inherited.warnings
        self.trace = inherited_trace()
        telemetry.begin_if_wanted()

    async def __aenter__(self) -> Self:
        self._executor.home = self._children.home = asyncio.get_running_loop()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def operation(self, name: str) -> Operation:
        return self._operations[name]

    def register(self, operation: Operation) -> Operation:
        self._operations[operation.name] = operation
        return operation

    def _found(self, name: str) -> Operation | None:
        """Find an operation by its name, or by another spelling of it, with hyphens for underscores."""
        known = self._operations.get(name)
        if known is None and self._operations:
            meant = hyphenate(name)
            known = next((each for each in self._operations.values() if hyphenate(each.name) == meant), None)
        return known

    @property
    def orphans(self) -> list[dict[str, object]]:
        """List abandoned work that still runs: its name and for how long."""
        return self._executor.list_orphans()

    @property
    def worker_count(self) -> int:
        """Count worker processes that are up or on their way."""
        return self._children.worker_count

    async def warm_up(self, within_s: float = 30.0) -> bool:
        """Start the workers now instead of at the first call, and wait for them. False if they are not all up."""
        warm: bool = await self._executor.at_home(partial(self._children.warm_up, within_s))
        return warm

    # --- the chokepoint -----------------------------------------------------------------------------------

    async def call(
        self,
        operation: Operation | str,
        arguments: Mapping[str, object] | None = None,
        clocks: Clocks | None = None,
        *,
        on_progress: Progress | None = None,
        listener: CallListener | None = None,
    ) -> Envelope:
        """Call an operation. Always one envelope, on time; what may survive is said in it."""
        if listener is None:
            listener = NULL_LISTENER if on_progress is None else ProgressListener(on_progress)
        return await self.conclude(self.begin(operation, arguments or {}, clocks), None, listener)

    def begin(
        self,
        operation: Operation | str,
        arguments: Mapping[str, object],
        clocks: Clocks | None = None,
        *,
        parent: Deadline | None = None,
        began_ns: int = 0,
        is_command: bool = False,
    ) -> Call:
        """Start the clocks of a call. `parent` is a deadline that came with it, beside those of the call that this one
        is made in and of this process. A command is only called like this, it is no operation."""
        known: Operation | None
        if isinstance(operation, str):
            known = None if is_command else self._found(operation)
        else:
            known = operation
        name = str(operation) if known is None else known.name
        scope = current_scope.get()
        self.counts.calls += 1
        deadline, owner = (self.inherited, "caller") if scope is None else (scope.deadline, scope.name)
        if scope is not None and scope.call is not None and scope.call.control is not None:
            deadline = _deadline_inside(scope.call, deadline)
        if parent is not None and (deadline is None or parent.at_ns < deadline.at_ns):
            deadline, owner = parent, "caller"
        defaults = self._clocks
        if known is not None:
            merged = self._defaults.get(known)
            if merged is None:
                merged = self._defaults[known] = known.clocks.over(self._clocks)
            defaults = merged
        if clocks is None:
            clocks = defaults
        else:
            given, over, merged = self._last_clocks  # most callers use the same ones again and again
            if given is not clocks or over is not defaults:
                merged = clocks.over(defaults)
                self._last_clocks = clocks, defaults, merged
            clocks = defaults = merged
        return admit(
            name,
            clocks,
            defaults=defaults,
            parent=deadline,
            parent_owner=owner,
            caller=scope.span.trace if scope is not None else spans.active() or self.trace,
            mutates=known.mutates if known is not None else True,
            idempotent=known.idempotent if known is not None else False,
            notes=self._inherited_warnings() if self._inherited_notes else (),
            tool=self.tool,
            began_ns=began_ns,
            operation=known,
            arguments=arguments,
            inside_of=None if scope is None else scope.call,
            overtime=None if known is None or not known.overtime else _overtime_of(known, clocks),
            min_time_ms=0 if known is None else known.min_time_ms,
        )

    async def conclude(
        self,
        call: Call,
        work: Awaitable[Outcome | Envelope] | None = None,
        listener: CallListener = NULL_LISTENER,
    ) -> Envelope:
        """Wait for the work of a call and answer it, once, whatever becomes of the work. If no work is given, it is to
        perform the call's operation.

        A cancellation is passed on, with the answer in its `envelope`; but whoever cancels it and has said why in
        `stopped_for` gets the answer."""
        enter(call)
        try:
            ended = await (self.perform(call, listener) if work is None else work)
        except asyncio.CancelledError as cancelled:
            # What became of the work goes along with the cancellation, where it is known.
            left: Outcome = getattr(cancelled, "outcome", None) or Outcome(_ending_if_cancelled(call))
            why: Problem | None = call.stopped_for or getattr(cancelled, "problem", None)
            left.problem = why or Problem("CANCELLED", "cancelled by the caller")
            leave(call)
            envelope = answer(call, left)
            if call.keep_answer is not None:
                with contextlib.suppress(Failure):  # the cancellation goes first
                    call.keep_answer(envelope)
            self._tell(call, envelope)
            if call.stopped_for is not None:
                return envelope
            cancelled.envelope = envelope  # type: ignore[attr-defined]
            raise
        except Exception as error:  # a Failure, or ours: the surface still gets its envelope
            ended = outcome_of_error(error)
        leave(call)
        envelope = answer(call, ended)
        if call.keep_answer is not None:
            try:
                await asyncio.to_thread(call.keep_answer, envelope)
            except Failure as failure:  # it may not be given out as an answer that is kept
                envelope = answer(call, outcome_of_error(failure))
        if self._observers or call.proposal_id is not None:
            self._tell(call, envelope)
        return envelope

    def _tell(self, call: Call, envelope: Envelope) -> None:
        """Tell whoever approved the call, and the observers, what became of it."""
        if call.proposal_id is not None and self.approvals is not None:
            self.approvals.record(call.proposal_id, envelope)
        for observer_queue in self._observers:
            observer_queue.tell(envelope)

    def perform(self, call: Call, listener: CallListener = NULL_LISTENER) -> Awaitable[Outcome]:
        """Run the operation of a call where it can be stopped: approval, limits, guards, handler.

        A cancellation is passed on, with what became of the work in its `outcome`."""
        scope = current_scope.get()
        depth = 0 if scope is None else scope.depth + 1
        refusal = self._refusal(call, depth)
        if refusal is not None:
            return come_to(refusal)
        if call.overtime is not None:
            call.overtime_address = self.overtime_address(call) or ""
        # Only what was registered: looking at the arguments of a call takes nobody's place, and asks nobody.
        if (self.approvals or self.limits) and self._operations.get(call.name) is call.operation:
            return self._execute_in_turn(call, depth, listener)
        return self._executor.run(call, depth, listener)

    async def check(
        self, call: Call, operation: Operation, arguments: Mapping[str, object], bound: Bound | None = None
    ) -> Outcome:
        """Run an operation that only looks at the arguments of a call: a part of the call, on its clock."""
        part = replace_fields(call, operation=operation, arguments=arguments, bound=bound or call.bound, mutates=False)
        try:
            outcome = await self.perform(part)
        except asyncio.CancelledError as cancelled:
            if (left := getattr(cancelled, "outcome", None)) is not None:
                left.side_effects = SideEffects.NONE
            raise
        if outcome.problem is not None:
            outcome.side_effects = SideEffects.NONE
        return outcome

    async def run(
        self,
        argv: Sequence[str],
        clocks: Clocks | None = None,
        *,
        env: Mapping[str, str] | None = None,
        base_env: Mapping[str, str] | None = None,
        cwd: str | os.PathLike[str] | None = None,
        output_limit: int = DEFAULT_OUTPUT_LIMIT,
        name: str = "command",
        call: Call | None = None,
        stop_signal: str = "SIGTERM",
    ) -> Envelope:
        """Run a command in its own tree, output captured. The same envelope as `shotclock exec --json`.

        A cancellation is passed on once the command is gone, with the answer in its `envelope`.
        `env` is laid over `base_env`, which is our own environment if not given. `call` is the one that this command is
        all of, whose clocks have been running since it was begun.
        """
        if call is None:
            call = self.begin(name, {}, clocks, is_command=True)
        folder = None if cwd is None else os.fspath(cwd)
        work = self._run_command(call, argv, env, base_env, folder, output_limit, stop_signal)
        return await self.conclude(call, work)

    async def _run_command(
        self,
        call: Call,
        argv: Sequence[str],
        env: Mapping[str, str] | None,
        base_env: Mapping[str, str] | None,
        cwd: str | None,
        output_limit: int,
        stop_signal: str,
    ) -> Outcome:
        closed = self._refuse_all()
        if problems := commands.problems_with(argv, env or {}, cwd):
            return invalid(problems)
        if closed is not None:
            return closed
        if call.no_time_left:
            return no_time_left(call)
        task = commands.assign(
            call, argv, env=env, base_env=base_env, cwd=cwd, output_limit=output_limit, stop_signal=stop_signal
        )
        task.soft_ns = None  # ours to ring: somebody may have to be asked first
        if (address := self.overtime_address(call)) is not None:
            task.env[OVERTIME_VARIABLE] = address
        call.has_begun = True
        try:
            run = partial(self._run_on_clocks, task, call)
            return commands.judge(call, task, await self._executor.at_home(run))
        except asyncio.CancelledError as cancelled:
            outcome = Outcome(Ending.KILLED)
            report = getattr(cancelled, "report", None)
            if isinstance(report, CommandReport) and report.stopped is not None:
                outcome = commands.judge(call, task, report)  # what it had said until then is kept
            cancelled.outcome, cancelled.problem = outcome, outcome.problem  # type: ignore[attr-defined]
            raise
        except (OSError, ipc.Broken) as error:
            return Outcome(Ending.NOT_STARTED, Problem("SPAWN_FAILED", f"no supervisor could be started: {error}"))

    async def _run_on_clocks(self, task: CommandTask, call: Call) -> CommandReport:
        start_control(call, self.observe)
        return await self._children.commands.run(task, call)

    @contextlib.asynccontextmanager
    async def open(
        self,
        call: Call,
        argv: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        base_env: Mapping[str, str] | None = None,
        cwd: str | os.PathLike[str] | None = None,
    ) -> AsyncIterator[InteractiveProcess]:
        """Start a command to talk with, for work that the caller has begun itself: stopped at that deadline, gone with
        all it started when this is left. Raises Failure if it cannot be begun; that it is not there is in its report.

        Silence and the soft clock are the caller's to notice, who reads what it says.
        """
        folder = None if cwd is None else os.fspath(cwd)
        if (closed := self._refuse_all()) is not None:
            assert isinstance(closed.problem, Problem)
            raise Failure(closed.problem.code, closed.problem.message)
        if problems := commands.problems_with(argv, env or {}, folder):
            message = join_problems(problems)
            raise Failure("ARG_ERROR", message, context={"errors": problems})
        if asyncio.get_running_loop() is not self._executor.home:
            raise RuntimeError("commands are talked with on the loop that entered the runtime")
        task = commands.assign(call, argv, env=env, base_env=base_env, cwd=folder)
        task.soft_ns, task.idle_ms = None, 0
        async with contextlib.AsyncExitStack() as stack:
            try:
                opened = await stack.enter_async_context(open_command(self._children.commands, task))
            except (OSError, ipc.Broken) as error:
                raise Failure("SPAWN_FAILED", f"no supervisor could be started: {error}") from error
            yield opened

    def _inherited_warnings(self) -> tuple[Warning_, ...]:
        return tuple(warning("DEADLINE_UNREADABLE", note) for note in self._inherited_notes)

    def _refusal(self, call: Call, depth: int) -> Outcome | None:
        """Return why the call is not started, as far as that needs no code of anybody else's."""
        known = call.operation
        if known is None:
            message = f"there is no operation {call.name!r}"
            import difflib

            close = difflib.get_close_matches(call.name, self._operations, n=1)
            hint = f"did you mean {close[0]!r}?" if close else None
            return Outcome(Ending.NOT_STARTED, Problem("UNKNOWN_OPERATION", message, "validation", suggestion=hint))
        if depth >= MAX_DEPTH:
            message = f"{call.name} would be call number {depth + 1} in a row of calls calling calls"
            return Outcome(Ending.NOT_STARTED, Problem("DEPTH_EXCEEDED", message, "validation"))
        if call.no_time_left:
            return no_time_left(call)
        if self._executor.orphan_count >= self._orphan_limit and (
            known.place != "process" or known.guards or self._guards
        ):
            message = f"{self._executor.orphan_count} abandoned calls are still running, which is the limit"
            context: dict[str, object] = {"orphans": self._executor.list_orphans(20)}
            return Outcome(Ending.NOT_STARTED, Problem("ORPHANS_EXHAUSTED", message, "validation", context=context))
        return self._refuse_all()

    def _refuse_all(self) -> Outcome | None:
        """Return why no call can be taken now, whatever it asks for."""
        if self._closed or self._executor.home is None:
            why = "the runtime is closed" if self._closed else "the runtime was not entered: use `async with`"
            return Outcome(Ending.NOT_STARTED, Problem("SHUTTING_DOWN", why, "validation"))
        now_ns = monotonic_ns()
        if now_ns >= self._fit_until_ns:
            if (unfit := kernel.find_unfitness()) is not None:
                return Outcome(Ending.NOT_STARTED, Problem("MACHINE_UNFIT", unfit, "validation"))
            self._fit_until_ns = now_ns + FITNESS_NS
        return None

    # --- running ------------------------------------------------------------------------------------------

    async def _execute_in_turn(self, call: Call, depth: int, listener: CallListener) -> Outcome:
        """Run the handler once a person has approved it, if it is called inside another call (the dispatcher has asked
        about others), and once the limits let it through."""
        if depth and call.proposal_id is None and self.approvals is not None and self.approvals.guards(call.name):
            refusal = await self.approvals.approve(call)
            if refusal is not None:
                return refusal
        if self.limits is None or not self.limits.guards(call.name):
            return await self._executor.run(call, depth, listener)
        leave = await self.limits.enter(call)
        if isinstance(leave, Outcome):
            return leave
        call.queued_ns = monotonic_ns() - call.started_ns
        try:
            return await self._executor.run(call, depth, listener)
        finally:
            leave()

    # --- observers ----------------------------------------------------------------------------------------

    @property
    def overtime_observers(self) -> OvertimeObservers:
        """Return who is asked about overtime, by kind."""
        if self._overtime_observers is None:
            from .overtime_observers import OvertimeObservers

            self._overtime_observers = OvertimeObservers(self)
            if self.person_observer is not None:
                from ..core.overtime import ObserverKind

                self._overtime_observers.register(ObserverKind.PERSON, self.person_observer)
        return self._overtime_observers

    async def observe(self, call: Call, summary: dict[str, Any]) -> Decision:
        """Ask the observer of a call whether it may have overtime."""
        return await self.overtime_observers.ask(call, summary)

    # --- the control channel ------------------------------------------------------------------------------

    def open_channel(self, home: Path | None = None) -> None:
        """Let other processes of this user see and control the calls of this one, where that can be. `home` is that of
        the store; not said, the user's own. Called on the loop that entered the runtime."""
        if self._channel is None and not self._closed and running_loop() is self._executor.home:
            from .control_channel import open_channel

            self._channel = open_channel(home)

    def overtime_address(self, call: Call) -> str | None:
        """Return what a command of this call can ask for overtime with; None where it may have none."""
        if call.overtime is None or not call.overtime.policy.max_requests:
            return None
        self.open_channel()
        return None if self._channel is None else self._channel.overtime_address(call)

    def _observer_failed(self, error: BaseException) -> None:
        self.counts.observer_errors += 1
        self.last_observer_error = error

    async def close(self) -> None:
        """Stop everything that can be stopped, and wait, bounded, until it is gone."""
        if self._closed:
            return
        self._closed = True
        if self._channel is not None:
            self._channel.close()
        await self._executor.close()
        for observer_queue in self._observers:
            await asyncio.to_thread(observer_queue.finish)
        if spans.recorder is not None:
            await asyncio.to_thread(telemetry.hand_over)


def _deadline_inside(outer: Call, deadline: Deadline | None) -> Deadline | None:
    """Return the deadline of what is begun now inside a call, which had this one for that when it began itself."""
    if outer.control is not None:
        deadline = outer.control.find_current(deadline)
    if outer.winding_down is not None:  # what is begun now is clean-up, and has no longer than that
        until = Deadline(outer.winding_down.until_ns)
        deadline = until if deadline is None or until.at_ns < deadline.at_ns else deadline
    return deadline


def _overtime_of(operation: Operation, clocks: Clocks) -> Overtime | None:
    from ..core.overtime import Overtime, OvertimePolicy

    policy = OvertimePolicy.of(operation.overtime, clocks.timeout_ms or 0)
    return None if policy is None else Overtime(policy)


def _ending_if_cancelled(call: Call) -> Ending:
    """Return what is known about the work of a call that was cancelled and said nothing."""
    if not call.has_begun:
        return Ending.NOT_STARTED
    return Ending.KILLED if call.operation is not None and call.operation.place == "process" else Ending.CANCELLED
