"""The desk: where every call of an app's command is taken in, whatever the surface.

It stands before the runtime and adds what a command declared beyond its clocks. The command line, the MCP server and
the library differ only in how they read a call and how they show its envelope.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import TracebackType
from typing import Any, Self

from .core.catalogue import Catalogue, CommandSpec
from .core.clocks import Clocks
from .core.deadlines import Deadline
from .core.envelope import Envelope
from .core.operation import Operation
from .enforce.call import Runtime
from .enforce.context import Attendant, Progress, Scope
from .enforce.hosted import current_scope


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
    ) -> Envelope:
        """Call a command: always one envelope, on time. A cancellation stops the work and is passed on.

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
        envelope = await self._dispatch(name, arguments, clocks, parent, attending)
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
