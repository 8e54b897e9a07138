"""`function` steps: a command of an App, called the way every other surface calls it.

The App is imported in processes of its own, never here, and stays for the whole run: the first step of a target pays
for the import, the others only for their call.
"""

from __future__ import annotations

import ast
import contextlib
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from ..core.clocks import ClockKind, Clocks, format_duration
from ..core.envelope import Envelope, Problem
from ..core.errors import Ending, Failure
from ..core.validation import field
from ..core.value_types import entity, replace
from ..process.clock import monotonic_ns
from .provider import (
    Provider,
    StepCall,
    StepPart,
    StepResult,
    StepType,
    bounded_by_run,
    cancelled_outcome,
    envelope_left_by,
    hand_over,
    remaining_limit_ms,
)

if TYPE_CHECKING:
    import asyncio

    from ..dispatch.dispatcher import Dispatcher
    from ..dispatch.targets import Target
    from ..inbox.inbox import Inbox
    from ..inbox.person_wait import StepSurroundings
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
MOST_IDLE_APPS = 8


@entity
class _RunningApp:
    """An App in processes of its own."""

    target: str
    folder: Path
    env: Mapping[str, str]
    own_env: Mapping[str, str] | None
    """What the file says of `env`: approvals of calls inside the App's calls are bound to it."""
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
    """Provider of calls to Apps. The rule of a failure is `function/timeout`, `function/stalled`,
    `function/import_error`, `function/unknown_command`, `function/arguments`, `function/cancelled` or
    `function/failed`; of a command that needs an approval also `approval/rejected`, `approval/expired`,
    `approval/withdrawn` or `approval/pending`.

    A command that could go on as a job does not here: it belongs to the step, and ends with it. The working directory
    is the run's; `cwd` only says where the target is looked for.
    """

    def __init__(self, inbox: Callable[[], Inbox] | None = None) -> None:
        """Keep no App yet. `inbox` is where people are asked for commands that need an approval; else the inbox of the
        store is."""
        self._inbox = inbox
        self._apps: list[_RunningApp] = []
        """The longest unused first."""
        self._import_guard = contextlib.ExitStack()

    step_type = FUNCTION

    async def run(self, step: StepCall, call: Call, runtime: Runtime) -> StepResult:
        from asyncio import CancelledError

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
                from ..runtime.call import Outcome
                from ..runtime.outcomes import outcome_of_error

                if app in self._apps:
                    self._apps.remove(app)  # whoever tries again may have mended it
                if isinstance(error, Failure) and error.code == "CWD_UNUSABLE":
                    return StepResult(Outcome(Ending.NOT_STARTED, Problem(error.code, str(error), "validation")))
                outcome = outcome_of_error(error)
                outcome.ending = Ending.NOT_STARTED
                return StepResult(outcome, None, "function/import_error")
            try:
                envelope = await _call_command(dispatcher, step, call)
            except CancelledError as cancelled:
                left = envelope_left_by(cancelled)
                killed = StepResult(cancelled_outcome(Ending.KILLED))
                hand_over(cancelled, killed if left is None else _make_result(step, call, left))
                raise
        finally:
            app.calls -= 1
            if len(self._apps) > MOST_IDLE_APPS:
                await self._close_idle()
        return _make_result(step, call, envelope)

    async def close(self) -> None:
        """Stop every App, and all that it started."""
        import asyncio

        apps, self._apps = self._apps, []
        await asyncio.gather(*map(_close_app, apps))
        self._import_guard.close()

    # --- Apps ---------------------------------------------------------------------------------------------

    def _find_app(self, step: StepCall) -> _RunningApp:
        import asyncio

        from ..process.messages import keep_users_code_out

        apps = self._apps
        # An approved step runs the file as it is now, and not as an earlier step has imported it.
        if apps and apps[-1].is_for(step) and not step.is_approved:
            return apps[-1]
        for position, app in enumerate(apps):
            if app.is_for(step) and not step.is_approved:
                apps.append(apps.pop(position))
                return app
        if not apps:  # results are opened here, and must not import what they are made of
            self._import_guard.enter_context(keep_users_code_out())
        target = str(step.settings["target"])
        opening = asyncio.ensure_future(_open_app(target, step, self._inbox))
        apps.append(_RunningApp(target, step.folder, step.env, step.own_env, opening))
        return apps[-1]

    async def _wait_for_import(self, app: _RunningApp, step: StepCall, call: Call) -> StepResult | None:
        """Wait for the import inside the step's own clocks. It goes on for those who have more time."""
        import asyncio

        from ..runtime.call import Outcome
        from ..runtime.outcomes import timeout_problem

        while not app.opening.done():
            bell = call.bound.bell  # it may have been extended meanwhile
            if bell is not None and bell.has_passed(monotonic_ns()):
                break
            limit_s = None if bell is None else bell.remaining_ns(monotonic_ns()) / 1e9
            await asyncio.wait([app.opening], timeout=limit_s)
        if app.opening.done():
            return None
        problem = timeout_problem(call, monotonic_ns() - call.started_ns)
        message = f"importing {step.settings['target']} took longer than the step may"
        outcome = Outcome(Ending.NOT_STARTED, Problem("TIMEOUT", message, fired=problem.fired))
        return StepResult(outcome)

    async def _close_idle(self) -> None:
        """Close the longest unused of those that nobody calls, until there are no more than are kept. Bounded as the
        closing of a runtime is."""
        idle = [app for app in self._apps if not app.calls and app.opening.done()]
        surplus = idle[: max(0, len(self._apps) - MOST_IDLE_APPS)]
        self._apps = [app for app in self._apps if app not in surplus]
        for app in surplus:
            await _close_app(app)


async def _call_command(dispatcher: Dispatcher, step: StepCall, call: Call) -> Envelope:
    """Call a command of an App. While a person is asked, only the time of the run goes on; the work has the step's
    clocks after that."""
    from ..inbox.person_wait import RunWait
    from ..runtime.call import CallRequest

    command, arguments = step.settings["command"], step.settings["arguments"]
    run_wait, justification = None, ""
    if step.key:
        run_wait = RunWait(
            step.key,
            step.run_began_at,
            step.waits,
            lambda: bounded_by_run(call),
            _surroundings(step),
        )
        if "justification" not in arguments:  # a command that takes one of its own is shown with that
            justification = f"{step.name} of run {step.key.partition('/')[0]} calls this command."
    request = CallRequest(command, arguments, _remaining_clocks(call), run_wait=run_wait, justification=justification)
    return await dispatcher.call(request)


def _surroundings(step: StepCall) -> StepSurroundings:
    """Return what the file decides of a call beside its arguments: the name of the App in its program, and the
    variables. Where it is imported from is the program's to say."""
    from ..dispatch.targets import parse_attribute
    from ..inbox.inbox import HIDDEN_VALUES, hide_secrets
    from ..inbox.person_wait import StepSurroundings

    async def describe(inbox: Inbox) -> dict[str, Any]:
        found: dict[str, Any] = {"app": parse_attribute(str(step.settings["target"]))}
        if step.own_env:
            hidden: list[str] = []
            found["environment"] = await hide_secrets(inbox, step.redact, step.own_env, "environment", hidden)
            if hidden:
                found[HIDDEN_VALUES] = hidden
        return found

    return StepSurroundings(describe, step.redact)


async def _open_app(written: str, step: StepCall, inbox: Callable[[], Inbox] | None) -> Dispatcher:
    """Import an App in processes of its own and return its dispatcher. Raises Failure if there is no such App, or it
    cannot be imported."""
    import asyncio

    from ..dispatch.dispatcher import Dispatcher
    from ..dispatch.targets import learn
    from ..runtime.command_runner import run_shielded
    from ..runtime.runtime import Runtime

    target = await asyncio.to_thread(_target, written, step.folder)  # a disk may not answer
    program = target.program
    if target.module is not None:
        real_folder = await asyncio.to_thread(os.path.realpath, step.folder)
        program = program._replace(path=(real_folder, *(program.path or ())[1:]))
    runtime = Runtime(program=program, environment=dict(step.env))
    await runtime.__aenter__()
    try:
        catalogue = await learn(runtime, target)
        for spec in catalogue.commands:
            runtime.register(spec.operation())
        return Dispatcher(catalogue, runtime, inbox_of=inbox, place=program.place, step=_surroundings(step))
    except BaseException:
        await run_shielded(runtime.close())
        raise


def _remaining_clocks(call: Call) -> Clocks:
    """Return what is left of a step's own clocks for the call."""
    return replace(
        call.clocks,
        timeout_ms=remaining_limit_ms(call),
        soft_ms=0,  # the step's own to ring: the command is wound down with it
    )


def _target(written: str, folder: Path) -> Target:
    """Return the target: a file relative to the folder, a module looked for there first. Raise Failure without one."""
    from ..dispatch.targets import parse_target

    try:
        os.stat(os.path.join(folder, "."))  # follows the last name, and asks whether it may be entered
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or str(error)
        raise Failure("CWD_UNUSABLE", f"cannot enter {str(folder)!r}: {why}") from None
    return parse_target(locate_target(written, folder))


def locate_target(written: str, folder: Path) -> str:
    """Return a target with the real path of its file, where it names one; a module is found when it is imported."""
    file, colon, attribute = written.partition(":")
    if file.endswith(".py") or os.sep in file:
        with contextlib.suppress(ValueError):  # a NUL, which is told where the file would be opened
            file = os.path.realpath(folder / file)
    return f"{file}{colon}{attribute}"


def names_in(program: bytes) -> set[str]:
    """Return the names that a program may bind anywhere; `*` where they cannot be known. Raises
    SyntaxError or ValueError."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(program)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            found |= {(alias.asname or alias.name).partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.Name):
            found.add("*" if node.id in ("globals", "exec") else node.id if isinstance(node.ctx, ast.Store) else "")
    return found - {""}


async def _close_app(app: _RunningApp) -> None:
    import asyncio

    if not app.opening.done():
        app.opening.cancel()
    await asyncio.wait([app.opening])  # closes its own runtime, which is bounded
    if not app.opening.cancelled() and app.opening.exception() is None:
        await app.opening.result().__aexit__(None, None, None)


# --- results ----------------------------------------------------------------------------------------------


def _make_result(step: StepCall, call: Call, envelope: Envelope) -> StepResult:
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
        limit_ms = {ClockKind.TIMEOUT: call.clocks.timeout_ms, ClockKind.SOFT: call.clocks.soft_ms}.get(fired.kind)
        if limit_ms and limit_ms != fired.limit_ms:  # what the import took of it was the step's as well
            clock["limit_ms"], clock["elapsed_ms"] = limit_ms, fired.elapsed_ms + limit_ms - fired.limit_ms
            was, now = format_duration(fired.limit_ms), format_duration(limit_ms)
            error["message"] = str(error["message"]).replace(f"after {was}", f"after {now}")
    is_undecided = isinstance(data, dict) and envelope.code == "NO_TIME_LEFT" and data.get("status") == "pending"
    return StepResult(envelope, data, "approval/pending" if is_undecided else None)
