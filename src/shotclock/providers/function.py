"""`function`: a command of an App, called the way every other surface calls it.

The App is imported in processes of its own, never here, and stays for the whole run: the first step of a target pays
for the import, the others only for their call.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from ..core.clocks import ClockKind, Clocks
from ..core.deadlines import NS_PER_MS
from ..core.durations import format_duration
from ..core.effects import Ending
from ..core.envelope import Envelope, Problem
from ..core.errors import Failure
from ..core.records import dataclass, replace_fields
from ..core.shapes import field
from ..process.clock import monotonic_ns
from .provider import StepCall, StepResult, bounded_by_run, cancelled_outcome, envelope_left_by, hand_over
from .step_type import StepPart, StepType

if TYPE_CHECKING:
    import asyncio

    from ..dispatch.dispatcher import Dispatcher
    from ..dispatch.targets import Target
    from ..inbox.inbox import Inbox
    from ..runtime.call import Call
    from ..runtime.runtime import Runtime


class FunctionStep(StepPart):
    type: Literal["function"]
    target: str = field(min_length=1)
    """package.module:app or path/to/file.py:app"""
    command: str = field(min_length=1)
    arguments: dict[str, Any] = field(default={}, keys=("arguments", "args"))


FUNCTION = StepType(
    "function",
    "a command of an App",
    FunctionStep,
    lambda services: FunctionProvider(services.inbox),
    default_ms=30_000,
    has_typed_output=True,
    waits_when_approved=True,
    asks_before_start=True,
    value_keys=frozenset({"arguments"}),
    rules={
        "QUEUE_TIMEOUT": "timeout",
        "UNKNOWN_OPERATION": "unknown_command",
        "ARG_ERROR": "arguments",
        "HANDLER_NOT_IMPORTABLE": "import_error",
        "PROPOSAL_REJECTED": "approval/rejected",
        "PROPOSAL_EXPIRED": "approval/expired",
        "PROPOSAL_WITHDRAWN": "approval/withdrawn",
        "ACTION_CHANGED": "approval/failed",
    },
)
STEP_TYPES = (FUNCTION,)

# How many Apps (with different environments, each is another) are kept up when nobody calls them just now.
KEPT = 8


@dataclass(eq=False, slots=True)
class _Served:
    """An App in processes of its own."""

    target: str
    folder: Path
    env: Mapping[str, str]
    opening: asyncio.Task[Dispatcher]
    calls: int = 0

    def is_for(self, step: StepCall) -> bool:
        # Comparing costs two microseconds; any key made of the environment costs ten times that for every step.
        return self.target == step.settings["target"] and self.env == step.env and self.folder == step.folder


class FunctionProvider:
    """The rule of a failure is `function/timeout`, `function/stalled`, `function/import_error`,
    `function/unknown_command`, `function/arguments`, `function/cancelled` or `function/failed`; of a command that needs
    an approval also `approval/rejected`, `approval/expired`, `approval/withdrawn` or `approval/pending`.

    A command that could go on as a job does not here: it belongs to the step, and ends with it. The working directory
    is the run's; `cwd` only says where the target is looked for.
    """

    def __init__(self, inbox: Callable[[], Inbox] | None = None) -> None:
        """`inbox` is where people are asked for commands that need an approval; else the inbox of the store is."""
        self._inbox = inbox
        self._served: list[_Served] = []
        """The longest unused first."""
        self._kept_out = contextlib.ExitStack()

    step_type = FUNCTION

    async def run(self, step: StepCall, call: Call, runtime: Runtime) -> StepResult:
        from asyncio import CancelledError

        served = self._find_app(step)
        served.calls += 1
        try:
            if not served.opening.done():
                refused = await self._wait_for_import(served, step, call)
                if refused is not None:
                    return refused
            try:
                dispatcher = served.opening.result()
            except Exception as error:
                from ..runtime.call import Outcome
                from ..runtime.handlers import outcome_of_error

                if served in self._served:
                    self._served.remove(served)  # whoever tries again may have mended it
                if isinstance(error, Failure) and error.code == "CWD_UNUSABLE":
                    return StepResult(Outcome(Ending.NOT_STARTED, Problem(error.code, str(error), "validation")))
                outcome = outcome_of_error(error)
                outcome.ending = Ending.NOT_STARTED
                return StepResult(outcome, None, "function/import_error")
            try:
                envelope = await _call_command(dispatcher, step, call, runtime)
            except CancelledError as cancelled:
                left = envelope_left_by(cancelled)
                killed = StepResult(cancelled_outcome(Ending.KILLED)) if left is None else _make_result(step, left)
                hand_over(cancelled, killed)
                raise
        finally:
            served.calls -= 1
            if len(self._served) > KEPT:
                await self._close_idle()
        return _make_result(step, envelope)

    async def close(self) -> None:
        """Stop every App, and all that it started."""
        import asyncio

        served, self._served = self._served, []
        await asyncio.gather(*map(_close_app, served))
        self._kept_out.close()

    # --- Apps ---------------------------------------------------------------------------------------------

    def _find_app(self, step: StepCall) -> _Served:
        import asyncio

        from ..process.safe_unpickle import keep_users_code_out

        apps = self._served
        if apps and apps[-1].is_for(step):
            return apps[-1]
        for position, served in enumerate(apps):
            if served.is_for(step):
                apps.append(apps.pop(position))
                return served
        if not apps:  # results are opened here, and must not import what they are made of
            self._kept_out.enter_context(keep_users_code_out())
        target = str(step.settings["target"])
        opening = asyncio.ensure_future(_open_app(target, step.folder, dict(step.env), self._inbox))
        apps.append(_Served(target, step.folder, step.env, opening))
        return apps[-1]

    async def _wait_for_import(self, served: _Served, step: StepCall, call: Call) -> StepResult | None:
        """Wait for the import inside the step's own clocks. It goes on for those who have more time."""
        import asyncio

        from ..runtime.call import Outcome
        from ..runtime.outcomes import timeout_problem

        bell = call.bound.bell
        limit_s = None if bell is None else bell.remaining_ns(monotonic_ns()) / 1e9
        done, _ = await asyncio.wait([served.opening], timeout=limit_s)
        if done:
            return None
        problem = timeout_problem(call, monotonic_ns() - call.started_ns)
        message = f"importing {step.settings['target']} took longer than the step may"
        outcome = Outcome(Ending.NOT_STARTED, Problem("TIMEOUT", message, fired=problem.fired))
        return StepResult(outcome)

    async def _close_idle(self) -> None:
        """Close the longest unused of those that nobody calls, until there are no more than are kept. Bounded as the
        closing of a runtime is."""
        idle = [served for served in self._served if not served.calls and served.opening.done()]
        surplus = idle[: max(0, len(self._served) - KEPT)]
        self._served = [served for served in self._served if served not in surplus]
        for served in surplus:
            await _close_app(served)


async def _call_command(dispatcher: Dispatcher, step: StepCall, call: Call, runtime: Runtime) -> Envelope:
    """Call a command of an App. While a person is asked, only the time of the run goes on; the work has the step's
    clocks after that."""
    from ..inbox.approval import RunWait
    from ..runtime.request import CallRequest

    command, arguments = step.settings["command"], step.settings["arguments"]
    run_wait, justification = None, ""
    if step.key:
        run_wait = RunWait(
            step.key,
            step.run_began_at,
            step.waits,
            lambda: bounded_by_run(call, runtime),
            lambda inbox: _surroundings(step, inbox),
        )
        if "justification" not in arguments:  # a command that takes one of its own is shown with that
            justification = f"{step.name} of run {step.key.partition('/')[0]} calls this command."
    request = CallRequest(command, arguments, _remaining_clocks(call), run_wait=run_wait, justification=justification)
    return await dispatcher.call(request)


async def _surroundings(step: StepCall, inbox: Inbox) -> dict[str, Any]:
    """Return what the file decides of a call beside its arguments: the name of the App in its program, and the
    variables. Where it is imported from is the program's to say."""
    from ..dispatch.targets import parse_attribute
    from ..inbox.hidden_values import hide_secrets

    found: dict[str, Any] = {"app": parse_attribute(str(step.settings["target"]))}
    if step.asked:
        hidden: list[str] = []
        found["environment"] = await hide_secrets(inbox, step.redact, step.asked, "environment", hidden)
        if hidden:
            found["hidden values, by digest"] = hidden
    return found


async def _open_app(written: str, folder: Path, env: dict[str, str], inbox: Callable[[], Inbox] | None) -> Dispatcher:
    """Raises Failure if there is no such App, or it cannot be imported."""
    import asyncio

    from ..dispatch.dispatcher import Dispatcher
    from ..dispatch.targets import learn
    from ..runtime.command_runner import run_shielded
    from ..runtime.runtime import Runtime

    target = await asyncio.to_thread(_target, written, folder)  # a disk may not answer
    program = target.program
    if target.module is not None:
        real_folder = await asyncio.to_thread(os.path.realpath, folder)
        program = program._replace(path=(real_folder, *(program.path or ())[1:]))
    runtime = Runtime(program=program, host_process=True, environment=env)
    await runtime.__aenter__()
    try:
        catalogue = await learn(runtime, target)
        for spec in catalogue.commands:
            runtime.register(spec.operation())
        return Dispatcher(catalogue, runtime, inbox_of=inbox, place=program.place)
    except BaseException:
        await run_shielded(runtime.close())
        raise


def _remaining_clocks(call: Call) -> Clocks:
    """Return what is left of a step's own clocks for the call."""
    clocks, spent_ms = call.clocks, (monotonic_ns() - call.started_ns) // NS_PER_MS
    # No time at all would mean no limit.
    return replace_fields(
        clocks,
        timeout_ms=max(1, clocks.timeout_ms - spent_ms) if clocks.timeout_ms else clocks.timeout_ms,
        soft_ms=max(1, clocks.soft_ms - spent_ms) if clocks.soft_ms else clocks.soft_ms,
    )


def _target(written: str, folder: Path) -> Target:
    """Return the target: a file relative to the folder, a module looked for there first. Raise Failure without one."""
    from ..dispatch.targets import parse_target

    try:
        os.stat(os.path.join(folder, "."))  # follows the last name, and asks whether it may be entered
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or str(error)
        raise Failure("CWD_UNUSABLE", f"cannot enter {str(folder)!r}: {why}") from None
    place, colon, attribute = written.partition(":")
    if place.endswith(".py") or os.sep in place:
        place = str(folder / place)
    return parse_target(f"{place}{colon}{attribute}")


async def _close_app(served: _Served) -> None:
    import asyncio

    if not served.opening.done():
        served.opening.cancel()
    await asyncio.wait([served.opening])  # closes its own runtime, which is bounded
    if not served.opening.cancelled() and served.opening.exception() is None:
        await served.opening.result().__aexit__(None, None, None)


# --- results ----------------------------------------------------------------------------------------------


def _make_result(step: StepCall, envelope: Envelope) -> StepResult:
    data: Any = envelope.data
    if envelope.ok:
        # The contract names a bare value; the output of the step is the value.
        if isinstance(data, dict) and len(data) == 1 and "result" in data and not isinstance(envelope.value, dict):
            data = data["result"]
        return StepResult(envelope, data)
    error, fired = envelope.error or {}, envelope.fired
    context = error.get("context")
    clock = context.get("clock") if isinstance(context, dict) else None
    if fired is not None and isinstance(clock, dict) and fired.owner == step.settings["command"]:
        clock["owner"] = step.name  # the limit is the step's, whatever the command is called
        limit_ms = {ClockKind.TIMEOUT: step.clocks.timeout_ms, ClockKind.SOFT: step.clocks.soft_ms}.get(fired.kind)
        if limit_ms and limit_ms != fired.limit_ms:  # what the import took of it was the step's as well
            clock["limit_ms"], clock["elapsed_ms"] = limit_ms, fired.elapsed_ms + limit_ms - fired.limit_ms
            was, now = format_duration(fired.limit_ms), format_duration(limit_ms)
            error["message"] = str(error["message"]).replace(f"after {was}", f"after {now}")
    is_undecided = isinstance(data, dict) and envelope.code == "NO_TIME_LEFT" and data.get("status") == "pending"
    return StepResult(envelope, data, "approval/pending" if is_undecided else None)
