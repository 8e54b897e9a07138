"""Context of a running handler: its deadline, whether it should stop, progress, and further calls."""

from __future__ import annotations

import math
from collections.abc import Callable, Coroutine, Mapping
from contextvars import ContextVar
from typing import Any, Protocol

from ..core.clocks import Clocks
from ..core.deadlines import Deadline
from ..core.errors import Failure
from ..core.records import dataclass
from ..core.trace import TraceContext
from . import clock

Progress = Callable[[float, float | None, str | None], None]
"""How far it is, of how much, and what is being done or counted."""


class CallListener:
    """Listener to one running call, on the loop that called. It does nothing, unless somebody overrides it."""

    skipped_steps: tuple[str, ...] = ()
    """Steps that were done before and are not to be done again."""
    stdin_path: str | None = None
    """The file that a function in a worker finds on its stdin; nothing, if not said."""

    def progress(self, done: float, total: float | None, message: str | None) -> None:
        """Take note that the work is this far."""

    def step(self, name: str) -> None:
        """Take note that a step has begun; those before it are done."""

    async def checkpoint(self, state: object) -> None:
        """Keep the state, durably, before this returns."""
        raise Failure("CHECKPOINTS_UNAVAILABLE")

    async def restore(self, fingerprint: str) -> object:
        """Return the state kept last, if it was for the same input."""
        raise Failure("CHECKPOINTS_UNAVAILABLE")

    def ask(self, question: str, value: object) -> Coroutine[Any, Any, object]:
        """Answer what a handler asked from wherever it runs; only these two."""
        if question == "checkpoint":
            return self.checkpoint(value)
        return self.restore(str(value))


class Traced(Protocol):
    """A call, or a place in a trace: what further calls are below."""

    @property
    def trace(self) -> TraceContext: ...


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class Scope:
    """The call that code runs inside of; further calls find it and nest."""

    deadline: Deadline | None
    depth: int
    name: str
    span: Traced
    limit_ms: int = 0
    """What was set, where the deadline is that of the call named here; 0 where it is somebody else's."""


current_scope: ContextVar[Scope | None] = ContextVar("shotclock_scope", default=None)


class ProgressListener(CallListener):
    """Listener that is told of progress only."""

    def __init__(self, on_progress: Progress) -> None:
        self._on_progress = on_progress

    def progress(self, done: float, total: float | None, message: str | None) -> None:
        self._on_progress(done, total, message)


NULL_LISTENER = CallListener()


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
        on_step: Callable[[str], None],
        on_ask: Callable[[str, object], Any],
        trace: Traced,
        skipped_steps: tuple[str, ...] = (),
    ) -> None:
        self.name = name
        self.request_id = request_id
        self.deadline = deadline
        self.depth = depth
        self._on_progress = on_progress
        self._on_call = on_call
        self._is_stopping = is_stopping
        self._on_step = on_step
        self._on_ask = on_ask
        self._trace = trace
        self._skipped_steps = skipped_steps

    @property
    def traceparent(self) -> str:
        """Return this call as the parent of what it starts elsewhere: the header and variable of W3C Trace Context."""
        return self._trace.trace.traceparent

    @property
    def stopping(self) -> bool:
        """Return whether the call has been asked to wind down: its soft clock rang, or it is being stopped."""
        return self._is_stopping()

    def remaining_ms(self) -> int | None:
        """Return what is left before the bell; None where there is none."""
        return None if self.deadline is None else self.deadline.remaining_ms(clock.monotonic_ns())

    def progress(
        self, done: float, total: float | None = None, message: str | None = None, *, unit: str | None = None
    ) -> None:
        """Report how far the work is. It also counts as a sign of life for the idle clock.

        The message says what is being done. With whole numbers it, or `unit`, is what they count: 3 of 10 files. Raises
        TypeError or ValueError for what is no number, and for a message that is no text.
        """
        message = unit if message is None else message
        if message is not None and not isinstance(message, str):
            raise TypeError(f"ctx.progress: the message is a text, not a {type(message).__name__}")
        self._on_progress(_number("done", done), None if total is None else _number("total", total), message)

    def step(self, name: str) -> bool:
        """Begin a declared step. Return False where the caller resumes from a later one: it was done before, skip
        it."""
        if name in self._skipped_steps:
            return False
        self._on_step(name)
        return True

    def checkpoint(self, state: object) -> Any:
        """Keep what is done so far (plain JSON data): once this returns it survives a crash. Await it if async."""
        return self._on_ask("checkpoint", state)

    def restore(self, fingerprint: object = "") -> Any:
        """Return the state this same invocation kept before it was interrupted, or None. Await it if async.

        The fingerprint stands for the input (a digest, a modification time, a count): what was kept for another one
        is discarded, with a warning.
        """
        return self._on_ask("restore", str(fingerprint))

    def call(self, operation: Any, arguments: Mapping[str, object] | None = None, **clocks: Any) -> Any:
        """Call another operation inside this call's deadline. Clocks as in `Clocks.of`: timeout="5s", …"""
        return self._on_call(operation, arguments or {}, Clocks.of(**clocks))


def _number(name: str, said: Any) -> float:
    if not isinstance(said, int | float) or isinstance(said, bool):
        if isinstance(said, bool) or not (hasattr(said, "__index__") or hasattr(said, "__float__")):
            raise TypeError(f"ctx.progress: {name} is a number, not a {type(said).__name__}")
        said = said.__index__() if hasattr(said, "__index__") else said.__float__()
    if isinstance(said, float) and not math.isfinite(said):
        raise ValueError(f"ctx.progress: {name} is a number with an end, not {said}")
    number: float = said
    return number
