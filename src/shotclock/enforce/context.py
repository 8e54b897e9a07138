"""What a running handler can see and do: its deadline, whether it should stop, progress, and further calls."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ..core.clocks import Clocks
from ..core.deadlines import Deadline
from . import clock

Progress = Callable[[int, int | None, str | None], None]


@dataclass(frozen=True, slots=True)
class Scope:
    """The call that code runs inside of; further calls find it and nest."""

    deadline: Deadline | None
    depth: int
    name: str
    trace_id: str


class Stopped(BaseException):
    """Raised inside a sync function in a worker when its time is up, so that `finally` blocks run.

    Not an Exception: a bare `except Exception` must not swallow it. What swallows it anyway is killed.
    """


class Context:
    """The call as its handler sees it. A parameter named `ctx` receives it.

    `ctx.call(…)` gives an awaitable to an async handler and the envelope itself to a sync one.
    """

    def __init__(
        self,
        *,
        name: str,
        request_id: str,
        deadline: Deadline | None,
        depth: int,
        on_progress: Progress,
        on_call: Callable[[str, Mapping[str, object], Clocks], Any],
        is_stopping: Callable[[], bool],
    ) -> None:
        self.name = name
        self.request_id = request_id
        self.deadline = deadline
        self.depth = depth
        self._on_progress = on_progress
        self._on_call = on_call
        self._is_stopping = is_stopping

    @property
    def stopping(self) -> bool:
        """Whether the call has been asked to wind down: its soft clock rang, or it is being stopped."""
        return self._is_stopping()

    def remaining_ms(self) -> int | None:
        """What is left before the bell; None where there is none."""
        return None if self.deadline is None else self.deadline.remaining_ms(clock.monotonic_ns())

    def progress(self, done: int, total: int | None = None, unit: str | None = None) -> None:
        """Say how far the work is. It also counts as a sign of life for the idle clock."""
        self._on_progress(done, total, unit)

    def call(self, operation: Any, arguments: Mapping[str, object] | None = None, **clocks: Any) -> Any:
        """Call another operation inside this call's deadline. Clocks as in `Clocks.of`: timeout="5s", …"""
        return self._on_call(operation, arguments or {}, Clocks.of(**clocks))
