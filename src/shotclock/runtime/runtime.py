"""The chokepoint: every call of every operation, from every surface, is begun here and ends in `Runtime.conclude`.

It never raises to its surface (but passes on a cancellation), never hangs it, and returns exactly one envelope:
admit → approval → limits → guards → run where it can be stopped → answer → observers.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from functools import partial
from itertools import islice
from typing import Any, Protocol, Self

from ..core.clocks import DEFAULT_GRACE_MS, DEFAULT_TIMEOUT_MS, Clocks
from ..core.deadlines import Bound, Deadline
from ..core.effects import Ending, SideEffects
from ..core.envelope import Envelope, Problem, Warning_, join_problems, warning
from ..core.errors import Failure
from ..core.operation import Guard, HandlerReference, Operation, hyphenate
from ..core.records import dataclass, replace_fields
from ..process import ipc, kernel, spans, worker_main
from ..process.clock import monotonic_ns
from ..process.command_task import CommandReport
from ..process.context import NULL_LISTENER, CallListener, Progress, ProgressListener, Scope
from ..process.output import DEFAULT_OUTPUT_LIMIT
from . import commands, telemetry
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
from .children import ChildProcesses
from .handlers import outcome_of_error
from .host_call import HostCall
from .interactive_process import InteractiveProcess, open_command
from .loop_call import DeadlineTimers, LoopCall, LoopCarrier, SharedLoopCarrier, ThreadCarrier, current_scope
from .loop_threads import LoopThreads
from .observers import Observer, ObserverQueue
from .preloaded_zygote import Preloaded, Program
from .worker_pool import DEFAULT_MOST, DEFAULT_WARM
from .worker_process import Task, explain_unfindable

MAX_DEPTH = 16
DEFAULT_ORPHAN_LIMIT = 64
# Between two looks at whether a loop still picks up its work, while anything waits to be picked up.
PICKUP_CHECK_S = 0.12
# How long a look at whether the machine is fit counts, so that thousands of calls need not look each for itself.
FITNESS_NS = 50_000_000

_ISOLATE = "isolate it in a 'process', or on a 'loop' if it is async"


class CallLimits(Protocol):
    """Lets only so many calls through at a time."""

    def guards(self, name: str) -> bool: ...
    async def enter(self, call: Call) -> Callable[[], None] | Outcome: ...


class CallApprovals(Protocol):
    """Lets some calls through only after a person has said yes."""

    def guards(self, name: str) -> bool: ...
    async def approve(self, call: Call) -> Outcome | None: ...
    def record(self, proposal_id: str, envelope: Envelope) -> None: ...


@dataclass(slots=True)
class Counts:
    """What an operator wants to know about calls that did not end well."""

    calls: int = 0
    abandoned: int = 0
    late: int = 0
    observer_errors: int = 0


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
        """`share_loop` runs async handlers on the caller's own loop, where they may use what lives there (and
        cost no switch of threads). A handler that blocks it then delays its caller's answer as well: only for
        handlers known not to, or where another process holds the clock. `host_process` runs them in a process of
        their own, where they can be killed and nothing of theirs can block this one. `program` is what the workers
        import to find their functions; not said, it is the program that runs here. `preloaded` forks them, if there is
        one already. `environment` is all that workers and hosts see of it; not said, it is our own."""
        if worker_main.inside_worker:
            raise RuntimeError(
                "a runtime was started while a worker imported this program: put the start of the program "
                'under `if __name__ == "__main__":`'
            )
        self._operations = {operation.name: operation for operation in operations}
        self._clocks = (clocks or Clocks()).over(Clocks(DEFAULT_TIMEOUT_MS, grace_ms=DEFAULT_GRACE_MS))
        self._guards = tuple(guards)
        self._audiences = [
            ObserverQueue(observer, f"shotclock-observer-{position}", self._observer_failed)
            for position, observer in enumerate(observers)
        ]
        self._orphan_limit = orphan_limit
        self._share_loop = share_loop
        self._children = ChildProcesses(
            self,
            self._operations.values,
            workers=workers,
            most_workers=most_workers,
            preload=tuple(preload),
            hosts_all=host_process,
            program=program,
            preloaded=preloaded,
            environment=environment,
        )
        self._hosts = LoopThreads("shotclock-loop")
        self._loop_carriers = [LoopCarrier(self._hosts, depth) for depth in range(MAX_DEPTH)]
        self._threads = ThreadCarrier()
        self._timers_of: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, DeadlineTimers] = (
            weakref.WeakKeyDictionary()
        )
        self._last_bells: DeadlineTimers | None = None
        self._orphans: dict[LoopCall | HostCall, int] = {}
        self._defaults: dict[Operation, Clocks] = {}
        self._last_clocks = (self._clocks, self._clocks, self._clocks)
        self._home: asyncio.AbstractEventLoop | None = None
        self._pickup_check: asyncio.TimerHandle | None = None
        self._closed = False
        self._on_further_call, self._on_call_inside = self.call, self._call_inside  # once, instead of for each call
        self.limits: CallLimits | None = None
        self.approvals: CallApprovals | None = None
        self.tool = OURSELVES
        """Who answers. An app's dispatcher puts the app here."""
        self.counts = Counts()
        self._fit_until_ns = 0
        self.last_observer_error: BaseException | None = None
        inherited = inherited_deadline(os.environ, monotonic_ns())
        self.inherited, self._inherited_notes = inherited.deadline, inherited.warnings
        self.trace = inherited_trace()
        telemetry.begin_if_wanted()

    async def __aenter__(self) -> Self:
        self._home = self._children.home = asyncio.get_running_loop()
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
        return self._orphan_list(len(self._orphans))

    @property
    def worker_count(self) -> int:
        """Count worker processes that are up or on their way."""
        return self._children.worker_count

    def _orphan_list(self, most: int) -> list[dict[str, object]]:
        now = monotonic_ns()
        return [
            {"operation": call.name, "running_ms": (now - call.started_ns) // 1_000_000}
            for call in islice(self._orphans, most)
        ]

    async def warm_up(self, within_s: float = 30.0) -> bool:
        """Start the workers now instead of at the first call, and wait for them. False if they are not all up."""
        warm: bool = await self._at_home(partial(self._children.warm_up, within_s))
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
            said, over, merged = self._last_clocks  # most callers use the same ones again and again
            if said is not clocks or over is not defaults:
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
        try:
            ended = await (self.perform(call, listener) if work is None else work)
        except asyncio.CancelledError as cancelled:
            # What became of the work goes along with the cancellation, where it is known.
            left: Outcome = getattr(cancelled, "outcome", None) or Outcome(_ending_if_cancelled(call))
            said: Problem | None = call.stopped_for or getattr(cancelled, "problem", None)
            left.problem = said or Problem("CANCELLED", "cancelled by the caller")
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
        envelope = answer(call, ended)
        if call.keep_answer is not None:
            try:
                await asyncio.to_thread(call.keep_answer, envelope)
            except Failure as failure:  # it may not be given out as an answer that is kept
                envelope = answer(call, outcome_of_error(failure))
        if self._audiences or call.proposal_id is not None:
            self._tell(call, envelope)
        return envelope

    def _tell(self, call: Call, envelope: Envelope) -> None:
        """Tell whoever approved the call, and the observers, what became of it."""
        if call.proposal_id is not None and self.approvals is not None:
            self.approvals.record(call.proposal_id, envelope)
        for observer_queue in self._audiences:
            observer_queue.tell(envelope)

    def perform(self, call: Call, listener: CallListener = NULL_LISTENER) -> Awaitable[Outcome]:
        """Run the operation of a call where it can be stopped: approval, limits, guards, handler.

        A cancellation is passed on, with what became of the work in its `outcome`."""
        scope = current_scope.get()
        depth = 0 if scope is None else scope.depth + 1
        refusal = self._refusal(call, depth)
        if refusal is not None:
            return _come_to(refusal)
        # Only what was registered: looking at the arguments of a call takes nobody's place, and asks nobody.
        if (self.approvals or self.limits) and self._operations.get(call.name) is call.operation:
            return self._execute_in_turn(call, depth, listener)
        return self._execute(call, depth, listener)

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
    ) -> Envelope:
        """Run a command in its own tree, output captured. The same envelope as `shotclock exec --json`.

        A cancellation is passed on once the command is gone, with the answer in its `envelope`.
        `env` is laid over `base_env`, which is our own environment if not given. `call` is the one that this command is
        all of, whose clocks have been running since it was begun.
        """
        if call is None:
            call = self.begin(name, {}, clocks, is_command=True)
        folder = None if cwd is None else os.fspath(cwd)
        return await self.conclude(call, self._run_command(call, argv, env, base_env, folder, output_limit))

    async def _run_command(
        self,
        call: Call,
        argv: Sequence[str],
        env: Mapping[str, str] | None,
        base_env: Mapping[str, str] | None,
        cwd: str | None,
        output_limit: int,
    ) -> Outcome:
        closed = self._refuse_all()
        if problems := commands.problems_with(argv, env or {}, cwd):
            return invalid(problems)
        if closed is not None:
            return closed
        if call.no_time_left:
            return no_time_left(call)
        task = commands.assign(call, argv, env=env, base_env=base_env, cwd=cwd, output_limit=output_limit)
        call.has_begun = True
        try:
            return commands.judge(call, task, await self._at_home(partial(self._children.commands.run, task)))
        except asyncio.CancelledError as cancelled:
            outcome = Outcome(Ending.KILLED)
            report = getattr(cancelled, "report", None)
            if isinstance(report, CommandReport) and report.stopped is not None:
                outcome = commands.judge(call, task, report)  # what it had said until then is kept
            cancelled.outcome, cancelled.problem = outcome, outcome.problem  # type: ignore[attr-defined]
            raise
        except (OSError, ipc.Broken) as error:
            return Outcome(Ending.NOT_STARTED, Problem("SPAWN_FAILED", f"no supervisor could be started: {error}"))

    @contextlib.asynccontextmanager
    async def open(
        self,
        admission: Call,
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
        if asyncio.get_running_loop() is not self._home:
            raise RuntimeError("commands are talked with on the loop that entered the runtime")
        task = commands.assign(admission, argv, env=env, base_env=base_env, cwd=folder)
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
        if len(self._orphans) >= self._orphan_limit and (known.place != "process" or known.guards or self._guards):
            message = f"{len(self._orphans)} abandoned calls are still running, which is the limit"
            context: dict[str, object] = {"orphans": self._orphan_list(20)}
            return Outcome(Ending.NOT_STARTED, Problem("ORPHANS_EXHAUSTED", message, "validation", context=context))
        return self._refuse_all()

    def _refuse_all(self) -> Outcome | None:
        """Return why no call can be taken now, whatever it asks for."""
        if self._closed or self._home is None:
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
            return await self._execute(call, depth, listener)
        leave = await self.limits.enter(call)
        if isinstance(leave, Outcome):
            return leave
        try:
            return await self._execute(call, depth, listener)
        finally:
            leave()

    def _execute(self, call: Call, depth: int, listener: CallListener) -> Awaitable[Outcome]:
        """Run guards and handler, in a worker, a host process, a thread or on a loop."""
        operation = call.operation
        assert operation is not None
        call.has_begun = True
        guards = self._guards + operation.guards if self._guards else operation.guards
        if operation.place == "process" and not guards and asyncio.get_running_loop() is self._home:
            return self._in_worker(call, depth, listener)
        scope = Scope(call.bound.bell, depth, call.name, call)
        if operation.place != "loop" or self._children.needs_async_worker(operation):
            return self._execute_elsewhere(call, operation, scope, guards, listener)
        if not self._share_loop:
            self._watch_pickups()
        return LoopCall(
            self,
            self._timers(),
            self._loop_carrier(depth),
            call,
            operation,
            call.arguments or {},
            scope,
            guards=guards,
            listener=listener,
            on_further_call=self._on_further_call,
        ).wait()

    async def _execute_elsewhere(
        self, call: Call, operation: Operation, scope: Scope, guards: tuple[Guard, ...], listener: CallListener
    ) -> Outcome:
        """Run it in a worker, a host or a thread. Guards are the application's own, maybe async: they run on a loop
        first."""
        arguments = call.arguments or {}
        if guards:
            self._watch_pickups()
            asking = LoopCall(
                self,
                self._timers(),
                self._loop_carrier(scope.depth),
                call,
                operation,
                arguments,
                scope,
                guards=guards,
                guards_only=True,
            )
            outcome = await asking.wait()
            if outcome.problem is not None:
                return outcome
        if operation.place == "thread" and isinstance(operation.handler, HandlerReference):
            message = f"{call.name} is only known by its name here and cannot run in a thread of this process"
            problem = Problem("HANDLER_NOT_IMPORTABLE", message, "validation", suggestion=_ISOLATE)
            return Outcome(Ending.NOT_STARTED, problem)
        if operation.place == "thread":
            return await LoopCall(
                self,
                self._timers(),
                self._threads,
                call,
                operation,
                arguments,
                scope,
                listener=listener,
                on_further_call=partial(self._call_from_thread, call, scope.depth),
            ).wait()
        run = self._in_worker if operation.place == "process" else self._in_host
        elsewhere: Outcome = await self._at_home(partial(run, call, scope.depth, listener))
        return elsewhere

    def _call_from_thread(
        self, admission: Call, depth: int, other: Any, arguments: Mapping[str, object], clocks: Clocks
    ) -> Envelope:
        assert self._home is not None
        # Bounded by the child's own deadline, which is inside its caller's.
        calling: Envelope = asyncio.run_coroutine_threadsafe(
            self._call_inside(admission, depth, other, arguments, clocks), self._home
        ).result()
        return calling

    def _loop_carrier(self, depth: int) -> LoopCarrier | SharedLoopCarrier:
        if self._share_loop:
            return self._timers().shared_loop
        return self._loop_carriers[depth]

    def _in_worker(self, call: Call, depth: int, listener: CallListener) -> Coroutine[Any, Any, Outcome]:
        operation = call.operation
        assert operation is not None
        if (trouble := explain_unfindable(operation.handler)) is not None:
            return _come_to(_not_importable(trouble))
        task = Task(call, operation.handler, call.arguments or {}, depth, listener, self._on_call_inside)
        return self._children.pool(operation).run(task)

    async def _call_inside(
        self, admission: Call, depth: int, name: str, arguments: Mapping[str, object], clocks: Clocks
    ) -> Envelope:
        """Make a call inside of another that came without its context, from another process or thread."""
        token = current_scope.set(Scope(admission.bound.bell, depth, admission.name, admission))
        try:
            return await self.call(name, arguments, clocks)
        finally:
            current_scope.reset(token)

    async def _in_host(self, call: Call, depth: int, listener: CallListener) -> Outcome:
        operation = call.operation
        assert operation is not None
        if (trouble := explain_unfindable(operation.handler)) is not None:
            return _not_importable(trouble)
        try:
            host_call = HostCall(call, operation.handler, call.arguments or {}, depth, listener, self._on_call_inside)
        except Exception as error:
            return invalid([{"field": "arguments", "message": f"cannot be sent to a host process: {error}"}])
        return await self._children.async_pool(operation).run(host_call)

    async def _at_home(self, begin: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
        """Begin and wait for workers and commands on the loop that entered the runtime."""
        assert self._home is not None
        if asyncio.get_running_loop() is self._home:
            return await begin()

        async def begun() -> Any:
            return await begin()

        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(begun(), self._home))

    def _timers(self) -> DeadlineTimers:
        loop = asyncio.get_running_loop()
        timers = self._last_bells
        if timers is None or timers.loop is not loop:
            timers = self._timers_of.get(loop)
            if timers is None:
                timers = self._timers_of[loop] = DeadlineTimers(loop)
            self._last_bells = timers
        return timers

    # --- what cannot be stopped ---------------------------------------------------------------------------

    def note_abandoned(self, call: LoopCall | HostCall) -> None:
        self.counts.abandoned += 1
        self._orphans[call] = monotonic_ns()

    def note_late_end(self, call: LoopCall | HostCall) -> None:
        """Note that abandoned work ended after all. Nobody waits for its result; it only stops counting."""
        self.counts.late += 1
        self._orphans.pop(call, None)

    def note_killed(self, call: HostCall) -> None:
        """Note that abandoned work is gone with its process."""
        self._orphans.pop(call, None)

    def _watch_pickups(self) -> None:
        """Look after the loops for a while. From home: one that is to be looked after may block the moment after."""
        if self._pickup_check is not None or self._home is None or self._closed:
            return
        if asyncio._get_running_loop() is self._home:
            self._pickup_check = self._home.call_later(PICKUP_CHECK_S, self._check_pickups)
        else:
            with contextlib.suppress(RuntimeError):  # it is closed
                self._home.call_soon_threadsafe(self._watch_pickups)

    def _check_pickups(self) -> None:
        self._pickup_check = None
        waiting = self._hosts.relieve_blocked()
        for loop, timers in list(self._timers_of.items()):
            if loop.is_closed():
                self._timers_of.pop(loop, None)
            else:  # other loops' letters may only be opened there: they resume tasks
                waiting = timers.queue.wake_for_deferred() or waiting
        if waiting and not self._closed:
            self._watch_pickups()

    # --- observers ----------------------------------------------------------------------------------------

    def _observer_failed(self, error: BaseException) -> None:
        self.counts.observer_errors += 1
        self.last_observer_error = error

    async def close(self) -> None:
        """Stop everything that can be stopped, and wait, bounded, until it is gone."""
        if self._closed:
            return
        self._closed = True
        if self._pickup_check is not None:
            self._pickup_check.cancel()
        await self._children.close()
        if self._home is not None and (timers := self._timers_of.get(self._home)) is not None:
            timers.close()
        if self._hosts.has_any:  # or a thread would be started to stop none
            await asyncio.to_thread(self._hosts.close)
        for observer_queue in self._audiences:
            await asyncio.to_thread(observer_queue.finish)
        if spans.recorder is not None:
            await asyncio.to_thread(telemetry.hand_over)


def _ending_if_cancelled(call: Call) -> Ending:
    """Return what is known about the work of a call that was cancelled and said nothing."""
    if not call.has_begun:
        return Ending.NOT_STARTED
    return Ending.KILLED if call.operation is not None and call.operation.place == "process" else Ending.CANCELLED


async def _come_to(outcome: Outcome) -> Outcome:
    return outcome


def _not_importable(trouble: str) -> Outcome:
    return Outcome(Ending.NOT_STARTED, Problem("HANDLER_NOT_IMPORTABLE", trouble, "validation"))
