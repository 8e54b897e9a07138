"""Calls of an App's commands for `function` steps.

The App is imported in processes of its own, never here, and stays for the run: only the first step waits for it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ...calls.call import Call, CallRequest, Outcome, RunWait, StepSurroundings
from ...calls.outcomes import outcome_of_error, timeout_problem
from ...calls.runtime import Runtime
from ...calls.supervised_commands import run_shielded
from ...core.envelope import Envelope, Problem
from ...core.errors import Ending, Failure
from ...core.json_values import as_text
from ...core.limits import ClockKind, format_duration
from ...core.value_types import JsonObject, entity, replace
from ...dispatch.dispatcher import Dispatcher
from ...dispatch.invocation import Target, parse_attribute
from ...people.inbox import HIDDEN_VALUES, Inbox, hide_secrets
from ...supervise.clock import monotonic_ns
from ...worker.messages import keep_users_code_out
from ._step_text import StepText
from .function import FUNCTION, locate_target
from .provider import Provider, StepCall, StepResult, bounded_by_run, cancelled_outcome, remaining_limit_ms

# The same App with another environment is another one.
MOST_IDLE_APPS = 8


@entity
class _RunningApp:
    target: str
    folder: Path
    env: Mapping[str, str]
    own_env: Mapping[str, str] | None  # of `env`, set by the file: approvals of nested calls are bound to it
    opening: asyncio.Task[Dispatcher]
    calls: int = 0

    def is_for(self, step: StepCall) -> bool:
        # Comparing costs two microseconds; any key made of the environment costs ten times that for every step.
        return (
            self.target == step.settings["target"]
            and self.env == step.env
            and self.folder == step.folder
            and self.own_env == step.own_env
        )


class FunctionProvider(Provider):
    """Provider of calls to Apps. A command never becomes a job here. `cwd` is only the folder of the target."""

    def __init__(self, inbox: Callable[[], Inbox] | None = None) -> None:
        """Start without Apps. `inbox` is by default that of the store."""
        self._inbox = inbox
        self._apps: list[_RunningApp] = []  # the longest unused first
        self._import_guard = contextlib.ExitStack()

    step_type = FUNCTION

    async def run(self, step: StepCall, call: Call, runtime: Runtime) -> StepResult:
        app = self._find_app(step)
        app.calls += 1
        try:
            if not app.opening.done():
                refused = await self._wait_for_import(app, step, call)
                if refused is not None:
                    return refused
            try:
                dispatcher = app.opening.result()
            except Exception as error:
                if app in self._apps:
                    self._apps.remove(app)  # a retry imports it again
                if isinstance(error, Failure) and error.code == "CWD_UNUSABLE":
                    return StepResult(Outcome(Ending.NOT_STARTED, Problem(error.code, str(error), "validation")))
                outcome = outcome_of_error(error)
                outcome.ending = Ending.NOT_STARTED
                return StepResult(outcome, None, "function/import_error")
            inner = dispatcher.begin(_request_of(step, call))
            try:
                envelope = await dispatcher.carry_out(inner)
            except asyncio.CancelledError:
                left = inner.cancellation.envelope
                killed = StepResult(cancelled_outcome(Ending.KILLED))
                step.cancelled.result = killed if left is None else _make_result(step, call, left)
                raise
        finally:
            app.calls -= 1
            if len(self._apps) > MOST_IDLE_APPS:
                await self._close_idle()
        return _make_result(step, call, envelope)

    async def close(self) -> None:
        apps, self._apps = self._apps, []
        await asyncio.gather(*map(_close_app, apps))
        self._import_guard.close()

    def _find_app(self, step: StepCall) -> _RunningApp:
        apps = self._apps
        # An approved step runs the file as it is now, not as an earlier step imported it.
        app = None if step.is_approved else next((each for each in reversed(apps) if each.is_for(step)), None)
        if app is not None:
            apps.remove(app)
            apps.append(app)
            return app
        if not apps:  # results are unpickled here and must not import the App's modules
            self._import_guard.enter_context(keep_users_code_out())
        target = str(step.settings["target"])
        opening = asyncio.ensure_future(_open_app(target, step, self._inbox))
        apps.append(_RunningApp(target, step.folder, step.env, step.own_env, opening))
        return apps[-1]

    async def _wait_for_import(self, app: _RunningApp, step: StepCall, call: Call) -> StepResult | None:
        """Wait for the import within the step's clocks. The import continues for other steps."""

        while not app.opening.done():
            bell = call.bound.bell  # overtime may extend it
            if bell is not None and bell.has_passed(monotonic_ns()):
                break
            await asyncio.wait([app.opening], timeout=None if bell is None else bell.remaining_ns(monotonic_ns()) / 1e9)
        if app.opening.done():
            return None
        problem = timeout_problem(call, monotonic_ns() - call.started_ns)
        message = f"importing {step.settings['target']} took longer than the step may"
        return StepResult(Outcome(Ending.NOT_STARTED, Problem("TIMEOUT", message, fired=problem.fired)))

    async def _close_idle(self) -> None:
        idle = [app for app in self._apps if not app.calls and app.opening.done()]
        surplus = idle[: max(0, len(self._apps) - MOST_IDLE_APPS)]
        self._apps = [app for app in self._apps if app not in surplus]
        for app in surplus:
            await _close_app(app)


def _request_of(step: StepCall, call: Call) -> CallRequest:
    """Return the request of a step. While a person decides, only the run's time counts, not the step's clocks."""
    command, arguments = step.settings["command"], step.settings["arguments"]
    run_wait, justification = None, ""
    if step.key:
        run_wait = RunWait(step.key, step.run_began_at, step.waits, lambda: bounded_by_run(call), _surroundings(step))
        if "justification" not in arguments:  # a command with such an argument shows its own
            justification = f"{step.name} of run {step.key.partition('/')[0]} calls this command."
    # The soft limit of the step winds the command down.
    clocks = replace(call.clocks, timeout_ms=remaining_limit_ms(call), soft_ms=0)
    request = CallRequest(command, arguments, clocks, run_wait=run_wait, justification=justification)
    text = StepText(step)
    if not text.is_kept:
        return request

    def add_item(item: object) -> None:
        text.write(as_text(item) + "\n")

    return replace(request, on_progress=text.progress, on_log=text.log, on_item=add_item)


def _surroundings(step: StepCall) -> StepSurroundings:
    """Return the App's name and the variables, which the file decides."""

    async def describe(inbox: Inbox) -> JsonObject:
        found: JsonObject = {"app": parse_attribute(str(step.settings["target"]))}
        if step.own_env:
            hidden: list[str] = []
            found["environment"] = await hide_secrets(inbox, step.redact, step.own_env, "environment", hidden)
            if hidden:
                found[HIDDEN_VALUES] = hidden
        return found

    return StepSurroundings(describe, step.redact)


async def _open_app(written: str, step: StepCall, inbox: Callable[[], Inbox] | None) -> Dispatcher:
    """Import an App in processes of its own and return its dispatcher. Raises Failure."""

    target = await asyncio.to_thread(_target, written, step.folder)  # a disk may not answer
    program = target.program
    if target.module is not None:
        real_folder = await asyncio.to_thread(os.path.realpath, step.folder)
        program = program._replace(path=(real_folder, *(program.path or ())[1:]))
    runtime = Runtime(program=program, environment=dict(step.env))
    await runtime.__aenter__()
    try:
        catalogue = await target.learn(runtime)
        for spec in catalogue.commands:
            runtime.register(spec.operation())
        return Dispatcher(catalogue, runtime, inbox_of=inbox, place=program.place, step=_surroundings(step))
    except BaseException:
        await run_shielded(runtime.close())
        raise


def _target(written: str, folder: Path) -> Target:
    try:
        os.stat(os.path.join(folder, "."))  # follows a link, and checks the right to enter
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or str(error)
        raise Failure("CWD_UNUSABLE", f"cannot enter {str(folder)!r}: {why}") from None
    return Target.parse(locate_target(written, folder))


async def _close_app(app: _RunningApp) -> None:
    if not app.opening.done():
        app.opening.cancel()
    await asyncio.wait([app.opening])  # closes its own runtime, which is bounded
    if not app.opening.cancelled() and app.opening.exception() is None:
        await app.opening.result().__aexit__(None, None, None)


def _make_result(step: StepCall, call: Call, envelope: Envelope) -> StepResult:
    data: Any = envelope.data
    if envelope.ok:
        # The envelope names a bare value `result`; the output of the step is the value.
        if isinstance(data, dict) and len(data) == 1 and "result" in data and not isinstance(envelope.value, dict):
            data = data["result"]
        return StepResult(envelope, data)
    error, fired = envelope.error or {}, envelope.fired
    context = error.get("context")
    clock = context.get("clock") if isinstance(context, dict) else None
    if fired is not None and isinstance(clock, dict) and fired.owner == step.settings["command"]:
        clock["owner"] = step.name  # the limit is the step's
        limit_ms = {ClockKind.TIMEOUT: call.clocks.timeout_ms, ClockKind.SOFT: call.clocks.soft_ms}.get(fired.kind)
        if limit_ms and limit_ms != fired.limit_ms:  # the import took its part of the limit
            clock["limit_ms"], clock["elapsed_ms"] = limit_ms, fired.elapsed_ms + limit_ms - fired.limit_ms
            was, now = format_duration(fired.limit_ms), format_duration(limit_ms)
            error["message"] = str(error["message"]).replace(f"after {was}", f"after {now}")
    is_undecided = isinstance(data, dict) and envelope.code == "NO_TIME_LEFT" and data.get("status") == "pending"
    return StepResult(envelope, data, "approval/pending" if is_undecided else None)
