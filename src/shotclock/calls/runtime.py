"""The runtime: every call of every surface begins here and ends in an `Answering`, with one envelope, on time.

admit → approval of an inner call → limits → run where it can be stopped → answer → observers
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import json
import logging
import os
import socket
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Self

from ..core.catalogue import Operation, hyphenate
from ..core.envelope import Envelope, Problem, warning
from ..core.errors import Ending, Failure, SideEffects
from ..core.limits import DEFAULT_GRACE_MS, DEFAULT_TIMEOUT_MS, Bound, Clocks, Deadline, format_duration
from ..core.overtime import ObserverKind, Overtime, OvertimeDecision, OvertimePolicy, read_decision
from ..core.trace import TraceContext
from ..core.value_types import replace
from ..supervise import ipc, kernel, spans
from ..supervise.clock import monotonic_ns
from ..supervise.command_task import DEFAULT_OUTPUT_LIMIT, CommandTask, Output
from ..supervise.environment import OVERTIME_VARIABLE
from ..worker import main as worker_main
from ..worker.context import NULL_LISTENER, CallListener, Progress, ProgressListener, current_scope
from . import commands, telemetry
from ._handler_call import ReadyCall
from .call import (
    NO_RULES,
    Call,
    CallRules,
    Cancellation,
    Outcome,
    admit,
    inherited_deadline,
    inherited_trace,
    invalid,
    make_envelope,
    no_time_left,
    record_span,
)
from .control import OBSERVER_NAME, TEXT_SHOWN, live_calls, start_control
from .executor import DEFAULT_MOST, DEFAULT_WARM, MAX_DEPTH, ChildProcesses, Counts, Executor
from .outcomes import outcome_of_error, unkept_outcome
from .preloaded_zygote import Preloaded, Program
from .supervised_commands import CommandWork, InteractiveProcess, OnOutput, open_command, run_shielded

if TYPE_CHECKING:
    from pathlib import Path

    from .control_channel import ControlChannel

# With this many abandoned calls, inline calls are refused.
ORPHAN_LIMIT = 64
Observer = Callable[[Envelope], object]
# How long a check of the machine is valid: thousands of calls need not each repeat it.
FITNESS_NS = 50_000_000
SUMMARY_VARIABLE = "SHOTCLOCK_SUMMARY"


class Runtime:
    """The calls and child processes of one event loop. Use it as an async context manager."""

    def __init__(
        self,
        *,
        operations: Iterable[Operation] = (),
        clocks: Clocks | None = None,
        observers: Iterable[Observer] = (),
        workers: int = DEFAULT_WARM,
        most_workers: int = DEFAULT_MOST,
        preload: Iterable[str] = (),
        program: Program | None = None,
        preloaded: Preloaded | None = None,
        environment: Mapping[str, str] | None = None,
        rules: CallRules = NO_RULES,
    ) -> None:
        """Take the operations and how they run, and the `rules` of calls that are begun without their own.

        `observers` get every envelope, on our loop. Workers import `program` (default: this one) and `preload`,
        or are forked from `preloaded`; `environment` is their whole environment (default: ours).
        """
        if worker_main.inside_worker:
            raise RuntimeError(
                "a runtime was started while a worker imported this program: put the start of the program "
                'under `if __name__ == "__main__":`'
            )
        if workers < 1:
            raise ValueError(f"a runtime needs at least 1 worker, not {workers}")
        self._operations = {operation.name: operation for operation in operations}
        self._clocks = (clocks or Clocks()).over(Clocks(DEFAULT_TIMEOUT_MS, grace_ms=DEFAULT_GRACE_MS))
        self._observers = tuple(observers)
        if any(inspect.iscoroutinefunction(observer) for observer in self._observers):
            raise TypeError("an observer is a plain function, not an async one")
        self.counts: Counts = Counts()
        self._channel: ControlChannel | None = None
        self._children = ChildProcesses(
            self._operations.values,
            workers=workers,
            most_workers=most_workers,
            preload=tuple(preload),
            program=program,
            preloaded=preloaded,
            environment=environment,
        )
        self._executor = Executor(self._children, self.counts, self.observe)
        self._home: asyncio.AbstractEventLoop | None = None
        self._closed = False
        self.rules: CallRules = rules
        self._fit_until_ns = 0
        inherited = inherited_deadline(os.environ, monotonic_ns())
        self.inherited: Deadline | None = inherited.deadline
        self._warnings = tuple(warning("DEADLINE_UNREADABLE", note) for note in inherited.warnings)
        self.trace: TraceContext = inherited_trace()
        telemetry.begin_if_wanted()

    async def __aenter__(self) -> Self:
        self._home = asyncio.get_running_loop()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def operation(self, name: str) -> Operation:
        """Return the operation of that name. Raises KeyError."""
        return self._operations[name]

    def register(self, operation: Operation) -> Operation:
        """Add an operation, or replace the one of its name."""
        self._operations[operation.name] = operation
        return operation

    def _found(self, name: str) -> Operation | None:
        """Find an operation by its name, also with hyphens for underscores."""
        known = self._operations.get(name)
        if known is None and self._operations:
            meant = hyphenate(name)
            known = next((each for each in self._operations.values() if hyphenate(each.name) == meant), None)
        return known

    @property
    def orphans(self) -> list[dict[str, object]]:
        """List abandoned work that still runs."""
        return self._executor.list_orphans()

    @property
    def worker_count(self) -> int:
        """Return how many worker processes are alive."""
        return self._children.worker_count

    async def warm_up(self, within_s: float = 30.0) -> bool:
        """Start the workers now instead of at the first call. Return False if they are not all up in time."""
        return await self._children.warm_up(within_s)

    async def call(
        self,
        operation: Operation | str,
        arguments: Mapping[str, object] | None = None,
        clocks: Clocks | None = None,
        *,
        on_progress: Progress | None = None,
        listener: CallListener | None = None,
        rules: CallRules | None = None,
    ) -> Envelope:
        """Call an operation: always one envelope, on time."""
        if listener is None:
            listener = NULL_LISTENER if on_progress is None else ProgressListener(on_progress)
        return await self.finish(self.begin(operation, arguments or {}, clocks, rules=rules), listener)

    def begin(
        self,
        operation: Operation | str,
        arguments: Mapping[str, object],
        clocks: Clocks | None = None,
        *,
        parent: Deadline | None = None,
        began_ns: int = 0,
        is_command: bool = False,
        rules: CallRules | None = None,
    ) -> Call:
        """Start the clocks of a call. `parent` is a further deadline. With `is_command` the name is no operation's."""
        known: Operation | None
        if isinstance(operation, str):
            known = None if is_command else self._found(operation)
        else:
            known = operation
        name = str(operation) if known is None else known.name
        scope = current_scope.get()
        self.counts.calls += 1
        deadline, owner = (self.inherited, "caller") if scope is None else (scope.deadline, scope.name)
        if scope is not None and scope.call is not None:
            deadline = _deadline_inside(scope.call, deadline)
        if parent is not None and (deadline is None or parent.at_ns < deadline.at_ns):
            deadline, owner = parent, "caller"
        defaults = self._clocks if known is None else known.clocks.over(self._clocks)
        clocks = defaults if clocks is None else clocks.over(defaults)
        call = admit(
            name,
            clocks,
            defaults=clocks,
            parent=deadline,
            parent_owner=owner,
            caller=scope.span.trace if scope is not None else spans.active() or self.trace,
            rules=rules or self.rules,
        )
        call.warnings = self._warnings + call.warnings
        call.time.began_ns = began_ns or call.time.began_ns
        call.arguments = arguments
        call.inside_of = None if scope is None else scope.call
        if known is not None:
            call.operation, call.time.min_time_ms = known, known.min_time_ms
            policy = OvertimePolicy.of(known.overtime, clocks.timeout_ms or 0) if known.overtime else None
            call.overtime = None if policy is None else Overtime(policy)
        return call

    async def finish(self, call: Call, listener: CallListener = NULL_LISTENER) -> Envelope:
        """Run a begun call to its answer."""
        async with self.answering(call) as answering:
            answering.outcome = await self.perform(call, listener)
        return answering.envelope

    def answering(self, call: Call) -> Answering:
        """Return the context in which the work of a call is done."""
        return Answering(self, call)

    def report(self, call: Call, envelope: Envelope) -> None:
        """Report an answer to the approver and the observers."""
        if call.proposal_id is not None and call.rules.approvals is not None:
            call.rules.approvals.record(call.proposal_id, envelope)
        for observer in self._observers:
            try:
                observer(envelope)
            except Exception:
                logging.getLogger(__name__).exception("an observer failed for call %s", call.request_id)

    async def perform(self, call: Call, listener: CallListener = NULL_LISTENER) -> Outcome:
        """Run the handler in its turn. A cancellation leaves the outcome of the work in the call."""
        scope = current_scope.get()
        depth = 0 if scope is None else scope.depth + 1
        operation = call.operation
        if operation is None:
            return self._explain_unknown(call.name)
        refusal = self._refusal(call, operation, depth)
        if refusal is not None:
            return refusal
        address = "" if call.overtime is None else self.overtime_address(call) or ""
        ready = ReadyCall(call, operation, depth, listener, partial(self.call, rules=call.rules), address)
        # Only registered operations: a check of arguments needs no place and no approval.
        if (call.rules.approvals or call.rules.places) and self._operations.get(call.name) is operation:
            return await self._execute_in_turn(ready)
        return await self._executor.run(ready)

    async def check(
        self, call: Call, operation: Operation, arguments: Mapping[str, object], bound: Bound | None = None
    ) -> Outcome:
        """Run an operation that only checks arguments, within the call's limits."""
        time = replace(call.time, bound=bound or call.bound)
        part = replace(
            call, operation=operation, arguments=arguments, time=time, control=None, cancellation=Cancellation()
        )
        try:
            outcome = await self.perform(part)
        except asyncio.CancelledError:
            if (left := part.cancellation.outcome) is not None:
                left.side_effects = SideEffects.NONE
                call.cancellation.outcome = left
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
        on_output: OnOutput | None = None,
    ) -> Envelope:
        """Run a command in its own tree, output captured. The same envelope as `shotclock exec --json`.

        A cancellation is passed on once the command is gone, with the answer in the call's `cancellation`. `env` is
        laid over `base_env` (default: ours). `call` is the call that this command is all of. `on_output` takes the
        output while the command runs.
        """
        if call is None:
            call = self.begin(name, {}, clocks, is_command=True)
        folder = None if cwd is None else os.fspath(cwd)
        async with self.answering(call) as answering:
            refusal = self._refuse_command(call, argv, env or {}, folder)
            if refusal is not None:
                answering.outcome = refusal
            else:
                task = commands.assign(
                    call,
                    argv,
                    env=env,
                    base_env=base_env,
                    cwd=folder,
                    output_limit=output_limit,
                    stop_signal=stop_signal,
                )
                answering.outcome = await self._run_command(call, task, on_output)
        return answering.envelope

    def _refuse_command(
        self, call: Call, argv: Sequence[str], env: Mapping[str, str], cwd: str | None
    ) -> Outcome | None:
        closed = self._refuse_all()
        if problems := commands.problems_with(argv, env, cwd):
            return invalid(problems)
        return closed or (no_time_left(call) if call.no_time_left else None)

    async def _run_command(self, call: Call, task: CommandTask, on_output: OnOutput | None) -> Outcome:
        task.soft_ns = None  # held here: an observer may have to be asked first
        if (address := self.overtime_address(call)) is not None:
            task.env[OVERTIME_VARIABLE] = address
        try:
            start_control(call, self.observe)
            return commands.judge(call, task, await self._children.commands.run(task, call, on_output))
        except asyncio.CancelledError:
            report = call.work.report if isinstance(call.work, CommandWork) else None
            if report is not None:
                call.cancellation.outcome = commands.judge(call, task, report)  # its output so far is kept
            raise
        except (OSError, ipc.Broken) as error:
            return Outcome(Ending.NOT_STARTED, Problem("SPAWN_FAILED", f"no supervisor could be started: {error}"))

    @contextlib.asynccontextmanager
    async def open(
        self,
        call: Call,
        argv: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        base_env: Mapping[str, str] | None = None,
        cwd: str | os.PathLike[str] | None = None,
        stdin: bool = True,
        relayed: bool = False,
        input_ms: int = 0,
    ) -> AsyncIterator[InteractiveProcess]:
        """Start an interactive command within a begun call. It is stopped at the deadline, and with the context.

        The soft limit is left to the caller. So is the idle limit, unless the output is `relayed`: stdout and stderr
        in one stream, through the supervisor. `input_ms` is the wait for input that is then reported. Raises Failure
        if it cannot be started.
        """
        folder = None if cwd is None else os.fspath(cwd)
        refusal = self._refuse_command(call, argv, env or {}, folder)
        if refusal is not None:
            assert isinstance(refusal.problem, Problem)
            errors = refusal.problem.errors
            raise Failure(refusal.problem.code, refusal.problem.message, context={"errors": errors} if errors else None)
        task = commands.assign(call, argv, env=env, base_env=base_env, cwd=folder)
        task.soft_ns, task.stdin = None, stdin
        if relayed:
            task.output, task.input_ms, task.tells_input = Output.RELAY.name, input_ms, True
        else:
            task.idle_ms = 0
        async with contextlib.AsyncExitStack() as stack:
            try:
                opened = await stack.enter_async_context(open_command(self._children.commands, task))
            except (OSError, ipc.Broken) as error:
                raise Failure("SPAWN_FAILED", f"no supervisor could be started: {error}") from error
            yield opened

    def _explain_unknown(self, name: str) -> Outcome:
        import difflib

        close = difflib.get_close_matches(name, self._operations, n=1)
        hint = f"did you mean {close[0]!r}?" if close else None
        message = f"there is no operation {name!r}"
        return Outcome(Ending.NOT_STARTED, Problem("UNKNOWN_OPERATION", message, "validation", suggestion=hint))

    def _refusal(self, call: Call, operation: Operation, depth: int) -> Outcome | None:
        """Return the refusal that needs no code to run, if any."""
        if depth >= MAX_DEPTH:
            message = f"{call.name} would be call number {depth + 1} in a row of calls calling calls"
            return Outcome(Ending.NOT_STARTED, Problem("DEPTH_EXCEEDED", message, "validation"))
        if call.no_time_left:
            return no_time_left(call)
        if operation.place == "inline" and len(self._executor.orphans) >= ORPHAN_LIMIT:
            message = f"{len(self._executor.orphans)} abandoned calls are still running, which is the limit"
            context: dict[str, object] = {"orphans": self._executor.list_orphans(20)}
            return Outcome(Ending.NOT_STARTED, Problem("ORPHANS_EXHAUSTED", message, "validation", context=context))
        return self._refuse_all()

    def _refuse_all(self) -> Outcome | None:
        if self._closed or self._home is None:
            why = "the runtime is closed" if self._closed else "the runtime was not entered: use `async with`"
            return Outcome(Ending.NOT_STARTED, Problem("SHUTTING_DOWN", why, "validation"))
        if asyncio.get_running_loop() is not self._home:
            raise RuntimeError("a runtime is used on the event loop that entered it")
        now_ns = monotonic_ns()
        if now_ns >= self._fit_until_ns:
            if (unfit := kernel.find_unfitness()) is not None:
                return Outcome(Ending.NOT_STARTED, Problem("MACHINE_UNFIT", unfit, "validation"))
            self._fit_until_ns = now_ns + FITNESS_NS
        return None

    async def _execute_in_turn(self, ready: ReadyCall) -> Outcome:
        """Run the handler within the limits, an inner call after its approval: the dispatcher approves the others."""
        call, approvals, places = ready.call, ready.call.rules.approvals, ready.call.rules.places
        if ready.depth and call.proposal_id is None and approvals is not None and approvals.guards(call.name):
            refusal = await approvals.approve(call)
            if refusal is not None:
                return refusal
        if places is None or not places.guards(call.name):
            return await self._executor.run(ready)
        leave = await places.enter(call)
        if isinstance(leave, Outcome):
            return leave
        ready.queued_ns = monotonic_ns() - call.started_ns
        try:
            return await self._executor.run(ready)
        finally:
            leave()

    async def observe(self, call: Call, summary: dict[str, Any]) -> OvertimeDecision:
        """Return the decision of the call's observer. Raises Failure without one, and its own errors."""
        if call.overtime is None:
            raise Failure("OBSERVER_UNAVAILABLE", f"{call.name} declares no overtime")
        policy = call.overtime.policy
        match policy.observer:
            case ObserverKind.PROGRESS:
                if summary["has_grown"]:
                    return OvertimeDecision(policy.share_ms, "its output or its progress grows")
                return OvertimeDecision(reason="neither its output nor its progress has grown")
            case ObserverKind.NONE:  # only reached when the call itself asks
                return OvertimeDecision(int(summary["asked_ms"] or 0), "there is no observer")
            case ObserverKind.COMMAND:
                return await _ask_command(self, policy, summary)
            case kind if kind in call.rules.observers:
                return await call.rules.observers[kind](call, summary)
        raise Failure("OBSERVER_UNAVAILABLE", f"there is no observer of the kind {policy.observer} here")

    def start_guard(self, timer: kernel.DeadlineTimer) -> socket.socket:
        """Start a process that kills this one once the timer rings, even if it is frozen. It lives as long as the
        returned socket. Linux only. Raises ipc.Broken or OSError."""
        return self._children.start_guard(timer)

    def open_channel(self, home: Path | None = None) -> None:
        """Let other processes of this user control these calls. `home` is that of the store (default: the user's)."""
        if self._channel is None and not self._closed and asyncio.get_running_loop() is self._home:
            from .control_channel import open_channel

            self._channel = open_channel(home)

    def overtime_address(self, call: Call) -> str | None:
        """Return the address where a command of this call may request overtime."""
        if call.overtime is None or not call.overtime.policy.max_requests:
            return None
        self.open_channel()
        return None if self._channel is None else self._channel.overtime_address(call)

    async def close_states(self) -> None:
        """Stop the calls in the shared process and close the lifespans, bounded. Call `close` after it."""
        await self._children.close_states()

    async def close(self) -> None:
        """Stop all processes, and wait, bounded, until they are gone. Inline calls are left to their limits."""
        if self._closed:
            return
        self._closed = True
        if self._channel is not None:
            self._channel.close()
        await self._children.close()
        if spans.recorder is not None:
            await asyncio.to_thread(spans.recorder.hand_over)


class Answering:
    """The context of a call's work. It is left with one answer: to the outcome, to an error, or to a cancellation.

    A cancellation is passed on, with the answer in `call.cancellation`, unless its reason is there.
    """

    __slots__ = ("_call", "_runtime", "envelope", "outcome")

    outcome: Outcome | Envelope
    """Set by the work."""
    envelope: Envelope

    def __init__(self, runtime: Runtime, call: Call) -> None:
        self._runtime, self._call = runtime, call

    async def __aenter__(self) -> Self:
        live_calls.enter(self._call)
        return self

    async def __aexit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        call, cancellation = self._call, self._call.cancellation
        live_calls.leave(call)
        cancelled = error if isinstance(error, asyncio.CancelledError) else None
        if cancelled is not None:
            outcome: Outcome | Envelope = cancellation.settle()
        elif error is not None and not isinstance(error, Exception):
            return False
        else:  # a Failure, or a bug of ours: the surface still gets its envelope
            outcome = self.outcome if error is None else outcome_of_error(error)
        self.envelope = make_envelope(call, outcome)
        if call.keep_answer is not None:
            keeping = asyncio.ensure_future(asyncio.to_thread(call.keep_answer, self.envelope))
            try:
                await asyncio.wait([keeping])
            except asyncio.CancelledError as now:
                await run_shielded(asyncio.wait([keeping]))  # bounded by the store
                cancelled = now
            unkept = keeping.exception()
            if unkept is not None and not isinstance(error, asyncio.CancelledError):
                outcome = unkept_outcome(unkept, self.envelope)  # not to be given out as an answer that is kept
                self.envelope = make_envelope(call, outcome)
        record_span(call, outcome)
        if cancelled is not None:
            cancellation.envelope = self.envelope
        self._runtime.report(call, self.envelope)
        if cancelled is not None and cancellation.reason is None:
            raise cancelled
        return True


def _deadline_inside(outer: Call, deadline: Deadline | None) -> Deadline | None:
    if outer.control is not None:
        deadline = outer.control.get_current(deadline)
    if outer.winding_down is not None:  # what begins now is clean-up
        until = Deadline(outer.winding_down.until_ns)
        deadline = until if deadline is None or until.at_ns < deadline.at_ns else deadline
    return deadline


async def _ask_command(runtime: Runtime, policy: OvertimePolicy, summary: dict[str, Any]) -> OvertimeDecision:
    """Run a shell command that reads the summary and writes the decision, both as JSON."""
    # A variable, not a file: a file would stay behind if this process were killed.
    script = f'printf "%s\\n" "${SUMMARY_VARIABLE}" | (\nunset {SUMMARY_VARIABLE}\n{policy.target}\n)'
    envelope = await runtime.run(
        ["/bin/sh", "-c", script],
        Clocks(timeout_ms=policy.observer_timeout_ms, grace_ms=0),
        env={SUMMARY_VARIABLE: json.dumps(summary)},
        cwd=policy.folder,
        name=OBSERVER_NAME,
    )
    if envelope.code in ("TIMEOUT", "NO_TIME_LEFT"):
        limit = format_duration(policy.observer_timeout_ms)
        return OvertimeDecision(failed=True, reason=f"the observer did not answer within {limit}")
    if envelope.error is not None:
        message = f"the observer failed: {envelope.error['message']}"
        return OvertimeDecision(failed=True, reason=message[:TEXT_SHOWN])
    printed = envelope.data["stdout"] if isinstance(envelope.data, dict) else ""
    try:
        return read_decision(json.loads(str(printed)))
    except (ValueError, RecursionError):
        return OvertimeDecision(failed=True, reason=f"the observer printed {printed!r:.80}, which is not JSON")
