"""The desk: where every call of an app's command is taken in, whatever the surface.

It stands before the runtime and adds what a command declared beyond its clocks. The command line, the MCP server and
the library differ only in how they read a call and how they show its envelope.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from types import TracebackType
from typing import Any, Self

from .core.catalogue import Catalogue, CommandSpec
from .core.clocks import Clocks
from .core.deadlines import Deadline
from .core.effects import Ending
from .core.envelope import Envelope, Problem
from .core.operation import Operation
from .enforce.admission import Outcome, admit, answer
from .enforce.call import Runtime
from .enforce.context import Attendant, Progress, Scope
from .enforce.hosted import current_scope
from .enforce.processes import shielded

# How long a stopped call may take beyond its grace until its processes are reported gone.
STOP_LIMIT_S = 3.0


class Desk:
    """One app, described, and the runtime that its calls run on. Use it as an async context manager."""

    def __init__(self, catalogue: Catalogue, runtime: Runtime) -> None:
        self.catalogue = catalogue
        self.runtime = runtime
        self._specs = {spec.name: spec for spec in catalogue.commands}
        self._checks: dict[str, Operation] = {}

    async def __aenter__(self) -> Self:
        await self.runtime.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.runtime.__aexit__(kind, error, trace)

    async def call(
        self,
        name: str,
        arguments: Mapping[str, object],
        clocks: Clocks | None = None,
        *,
        budget_ms: int | None = None,
        idempotency_key: str | None = None,
        validate_only: bool = False,
        dry_run: bool = False,
        resume_from: str | None = None,
        parent: Deadline | None = None,
        on_progress: Progress | None = None,
        stop: asyncio.Future[str] | None = None,
    ) -> Envelope:
        """Call a command: always one envelope, on time. A cancellation stops the work and is passed on; `stop`, once
        it holds the name of a signal, stops it as well, and what came of it until then is the answer.

        `parent` is the caller's own deadline, if it came with the call. `budget_ms` is how long this caller waits
        for a command that may outlive it; None waits as long as the work takes.
        """
        spec = self._specs.get(name)
        if spec is None:
            return await self._dispatch(name, arguments, clocks, parent, None)
        if validate_only or (dry_run and "dry_run" not in spec.input_schema["properties"]):
            checked = await self._dispatch(self._check_of(spec), arguments, clocks, parent, None)
            if checked.ok and dry_run:
                checked.data = {"dry_run": True, "would_run": name, "arguments": _shown(arguments)}
            return checked
        if dry_run:
            arguments = {**arguments, "dry_run": True}
        attending = Attending(spec, on_progress, resume_from)
        admission = admit(name, clocks or Clocks(), defaults=spec.clocks, mutates=spec.mutates)
        working = asyncio.ensure_future(self._dispatch(name, arguments, clocks, parent, attending))
        envelope = await _unless_stopped(working, stop, STOP_LIMIT_S + (admission.clocks.grace_ms or 0) / 1000)
        if envelope is None:
            assert stop is not None
            envelope = answer(admission, Outcome(Ending.KILLED, stopped_by(stop.result())))
            envelope.data = {"partial": True}
        if not envelope.ok and spec.steps:
            envelope.data = attending.partial(envelope.data)
        return envelope

    async def _dispatch(
        self,
        operation: Operation | str,
        arguments: Mapping[str, object],
        clocks: Clocks | None,
        parent: Deadline | None,
        attendant: Attendant | None,
    ) -> Envelope:
        inherited = self.runtime.inherited
        if parent is None or (inherited is not None and inherited.at_ns <= parent.at_ns):
            return await self.runtime.call(operation, arguments, clocks, attendant=attendant)
        token = current_scope.set(Scope(parent, -1, "caller", self.runtime.trace_id))
        try:
            return await self.runtime.call(operation, arguments, clocks, attendant=attendant)
        finally:
            current_scope.reset(token)

    def _check_of(self, spec: CommandSpec) -> Operation:
        """The operation that only validates the arguments, where the command's types can be imported."""
        if spec.name not in self._checks:
            reference = replace(spec.handler, qualname=f"{spec.handler.qualname}?", is_async=False)
            self._checks[spec.name] = Operation(
                spec.name, reference, isolation="process", mutates=False, idempotent=True, clocks=spec.clocks
            )
        return self._checks[spec.name]


async def _unless_stopped(
    working: asyncio.Future[Envelope], stop: asyncio.Future[str] | None, limit_s: float
) -> Envelope | None:
    """The envelope, or None where the work was stopped before it had one."""
    try:
        if stop is None:
            return await working
        both: list[asyncio.Future[Any]] = [working, stop]
        await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)  # bounded by the work's own clocks
        if working.done():
            return working.result()
    except asyncio.CancelledError:
        working.cancel()
        await shielded(asyncio.wait([working], timeout=limit_s))
        raise
    working.cancel()
    await asyncio.wait([working], timeout=limit_s)
    if working.done() and not working.cancelled() and working.exception() is None:
        return working.result()  # it ended by itself just then, and that is the truth
    return None


def stopped_by(signal_name: str) -> Problem:
    exit_code = {"SIGINT": 130, "SIGHUP": 129}.get(signal_name, 143)
    return Problem("CANCELLED", f"stopped by {signal_name}", context={"signal": signal_name}, exit_code=exit_code)


class Attending(Attendant):
    """Listens to one call of a command: which step it is at, how far it is."""

    def __init__(self, spec: CommandSpec, on_progress: Progress | None, resume_from: str | None = None) -> None:
        self._spec = spec
        self._on_progress = on_progress
        self._begun: list[str] = []
        if resume_from is not None:
            self.skipped_steps = spec.steps[: spec.steps.index(resume_from)]

    def progress(self, done: int, total: int | None, unit: str | None) -> None:
        if self._on_progress is not None:
            self._on_progress(done, total, unit)

    def step(self, name: str) -> None:
        if name not in self._begun:
            self._begun.append(name)

    def partial(self, data: object) -> dict[str, object]:
        """What is said about the steps of a command that did not succeed, beside what it said itself."""
        completed = self._begun[:-1]
        skipped = list(self.skipped_steps)
        pending = [name for name in self._spec.steps if name not in completed and name not in skipped]
        said: dict[str, Any] = dict(data) if isinstance(data, dict) else {} if data is None else {"result": data}
        said |= {"completed_steps": completed, "pending_steps": pending, "skipped_steps": skipped}
        if self._begun:
            said["failed_step"] = self._begun[-1]
        if pending:
            said["resume_from"] = self._begun[-1] if self._begun else pending[0]
        return said


def _shown(arguments: Mapping[str, object]) -> dict[str, object]:
    return {
        name: value if isinstance(value, str | int | float | bool | None) else repr(value)
        for name, value in arguments.items()
    }
