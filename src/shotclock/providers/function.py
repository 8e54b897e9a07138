"""`function`: a command of an App, called the way every other surface calls it.

The App is imported in processes of its own, never here, and stays for the whole run: the first step of a target pays
for the import, the others only for their call.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..core.clocks import ClockKind, Clocks
from ..core.deadlines import NS_PER_MS
from ..core.durations import format_duration
from ..core.effects import Ending
from ..core.envelope import Envelope, Problem
from ..core.records import dataclass, replace_fields
from ..dispatch.dispatcher import Dispatcher
from ..dispatch.targets import Target, learn, parse_target
from ..inbox.approval import RunWait
from ..inbox.inbox import Inbox
from ..process.clock import monotonic_ns
from ..process.safe_unpickle import keep_users_code_out
from ..runtime.call import Call, Outcome, answer, no_time_left
from ..runtime.command_runner import shielded
from ..runtime.handlers import raised
from ..runtime.outcomes import timeout_problem
from ..runtime.runtime import Runtime
from .provider import StepCall, StepResult, admitted, cancelled_outcome, envelope_left_by, hand_over

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

    def is_for(self, call: StepCall) -> bool:
        # Comparing costs two microseconds; any key made of the environment costs ten times that for every step.
        return self.target == call.settings["target"] and self.env == call.env and self.folder == call.folder


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

    async def run(self, call: StepCall, runtime: Runtime) -> StepResult:
        admission = admitted(call, runtime)
        served = self._found(call)
        served.calls += 1
        try:
            if not served.opening.done():
                refused = await self._opened(served, call, admission)
                if refused is not None:
                    return refused
            try:
                dispatcher = served.opening.result()
            except Exception as error:
                if served in self._served:
                    self._served.remove(served)  # whoever tries again may have mended it
                outcome = raised(error)
                outcome.ending = Ending.NOT_STARTED
                return StepResult(answer(admission, outcome), None, "function/import_error")
            try:
                envelope = await _called(dispatcher, call, runtime, _left(admission))
            except asyncio.CancelledError as cancelled:
                left = envelope_left_by(cancelled) or answer(admission, cancelled_outcome(Ending.KILLED))
                hand_over(cancelled, _result(call, left))
                raise
        finally:
            served.calls -= 1
            if len(self._served) > KEPT:
                await self._close_idle()
        return _result(call, envelope)

    async def close(self) -> None:
        """Every App, and all that it started."""
        served, self._served = self._served, []
        await asyncio.gather(*map(_closed, served))
        self._kept_out.close()

    # --- Apps ---------------------------------------------------------------------------------------------

    def _found(self, call: StepCall) -> _Served:
        apps = self._served
        if apps and apps[-1].is_for(call):
            return apps[-1]
        for position, served in enumerate(apps):
            if served.is_for(call):
                apps.append(apps.pop(position))
                return served
        if not apps:  # results are opened here, and must not import what they are made of
            self._kept_out.enter_context(keep_users_code_out())
        target = str(call.settings["target"])
        opening = asyncio.ensure_future(_dispatcher(target, call.folder, dict(call.env), self._inbox))
        apps.append(_Served(target, call.folder, call.env, opening))
        return apps[-1]

    async def _opened(self, served: _Served, call: StepCall, admission: Call) -> StepResult | None:
        """Wait for the import inside the step's own clocks. It goes on for those who have more time."""
        if admission.no_time_left:
            return StepResult(answer(admission, no_time_left(admission)), None, "function/timeout")
        bell = admission.bound.bell
        limit_s = None if bell is None else bell.remaining_ns(monotonic_ns()) / 1e9
        done, _ = await asyncio.wait([served.opening], timeout=limit_s)
        if done:
            return None
        problem = timeout_problem(admission, monotonic_ns() - admission.started_ns)
        message = f"importing {call.settings['target']} took longer than the step may"
        outcome = Outcome(Ending.NOT_STARTED, Problem("TIMEOUT", message, fired=problem.fired))
        return StepResult(answer(admission, outcome), None, "function/timeout")

    async def _close_idle(self) -> None:
        """The longest unused of those that nobody calls, until there are no more than are kept. Bounded as the closing
        of a runtime is."""
        idle = [served for served in self._served if not served.calls and served.opening.done()]
        surplus = idle[: max(0, len(self._served) - KEPT)]
        self._served = [served for served in self._served if served not in surplus]
        for served in surplus:
            await _closed(served)


async def _called(dispatcher: Dispatcher, call: StepCall, runtime: Runtime, clocks: Clocks) -> Envelope:
    """While a person is asked, only the time of the run goes on; the work has the step's clocks after that."""
    command, arguments = call.settings["command"], call.settings["arguments"]

    def bounded() -> Call:
        return admitted(replace(call, clocks=Clocks(timeout_ms=0)), runtime)

    run_wait = RunWait(call.key, call.run_began_at, call.waits, bounded) if call.key else None
    # A command that takes a justification of its own is shown with that one.
    said = (
        "" if "justification" in arguments else f"{call.name} of run {call.key.partition('/')[0]} calls this command."
    )
    return await dispatcher.call(command, arguments, clocks, run_wait=run_wait, justification=said if call.key else "")


async def _dispatcher(written: str, folder: Path, env: dict[str, str], inbox: Callable[[], Inbox] | None) -> Dispatcher:
    """Raises Failure if there is no such App, or it cannot be imported."""
    target = await asyncio.to_thread(_target, written, folder)
    program = target.program
    if target.module is not None:
        program = program._replace(path=(str(folder), *(program.path or ())[1:]))
    runtime = Runtime(program=program, host_process=True, environment=env)
    await runtime.__aenter__()
    try:
        catalogue = await learn(runtime, target)
        for spec in catalogue.commands:
            runtime.register(spec.operation())
        return Dispatcher(catalogue, runtime, inbox_of=inbox)
    except BaseException:
        await shielded(runtime.close())
        raise


def _left(admission: Call) -> Clocks:
    """What is left of a step's own clocks for the call."""
    clocks, spent_ms = admission.clocks, (monotonic_ns() - admission.started_ns) // NS_PER_MS
    # No time at all would mean no limit.
    return replace_fields(
        clocks,
        timeout_ms=max(1, clocks.timeout_ms - spent_ms) if clocks.timeout_ms else clocks.timeout_ms,
        soft_ms=max(1, clocks.soft_ms - spent_ms) if clocks.soft_ms else clocks.soft_ms,
    )


def _target(written: str, folder: Path) -> Target:
    """A file relative to the folder; a module is looked for there first."""
    place, colon, attribute = written.partition(":")
    if place.endswith(".py") or os.sep in place:
        place = str(folder / place)
    return parse_target(f"{place}{colon}{attribute}")


async def _closed(served: _Served) -> None:
    if not served.opening.done():
        served.opening.cancel()
    await asyncio.wait([served.opening])  # closes its own runtime, which is bounded
    if not served.opening.cancelled() and served.opening.exception() is None:
        await served.opening.result().__aexit__(None, None, None)


# --- results ----------------------------------------------------------------------------------------------


def _result(call: StepCall, envelope: Envelope) -> StepResult:
    data: Any = envelope.data
    if envelope.ok:
        # The contract names a bare value; the output of the step is the value.
        if isinstance(data, dict) and len(data) == 1 and "result" in data and not isinstance(envelope.value, dict):
            data = data["result"]
        return StepResult(envelope, data)
    error, fired = envelope.error or {}, envelope.fired
    context = error.get("context")
    clock = context.get("clock") if isinstance(context, dict) else None
    if fired is not None and isinstance(clock, dict) and fired.owner == call.settings["command"]:
        clock["owner"] = call.name  # the limit is the step's, whatever the command is called
        limit_ms = {ClockKind.TIMEOUT: call.clocks.timeout_ms, ClockKind.SOFT: call.clocks.soft_ms}.get(fired.kind)
        if limit_ms and limit_ms != fired.limit_ms:  # what the import took of it was the step's as well
            clock["limit_ms"], clock["elapsed_ms"] = limit_ms, fired.elapsed_ms + limit_ms - fired.limit_ms
            said, now = format_duration(fired.limit_ms), format_duration(limit_ms)
            error["message"] = str(error["message"]).replace(f"after {said}", f"after {now}")
    rule = _RULES.get(str(envelope.code), "function/failed")
    if isinstance(data, dict) and envelope.code == "NO_TIME_LEFT" and data.get("status") == "pending":
        rule = "approval/pending"
    return StepResult(envelope, data, rule)


_RULES = {
    "TIMEOUT": "function/timeout",
    "NO_TIME_LEFT": "function/timeout",
    "QUEUE_TIMEOUT": "function/timeout",
    "STALLED": "function/stalled",
    "CANCELLED": "function/cancelled",
    "UNKNOWN_OPERATION": "function/unknown_command",
    "ARG_ERROR": "function/arguments",
    "HANDLER_NOT_IMPORTABLE": "function/import_error",
    "PROPOSAL_REJECTED": "approval/rejected",
    "PROPOSAL_EXPIRED": "approval/expired",
    "PROPOSAL_WITHDRAWN": "approval/withdrawn",
    "ACTION_CHANGED": "approval/failed",
}
