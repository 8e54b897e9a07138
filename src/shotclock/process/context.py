"""Context of a running handler."""

from __future__ import annotations

import math
from collections.abc import Callable, Coroutine, Mapping
from contextvars import ContextVar
from typing import Any, Protocol

from ..core.clocks import Clocks, Deadline, parse_duration_ms
from ..core.errors import Failure
from ..core.trace import TraceContext
from ..core.value_types import entity
from . import clock

OVERTIME = "overtime"

Progress = Callable[[float, float | None, str | None], None]
"""Done, total, and what is being done or counted."""


class CallListener:
    """Listener to one running call, on the caller's loop."""

    skipped_steps: tuple[str, ...] = ()
    """Done before."""
    stdin_path: str | None = None
    """The stdin of a function in a worker (default: empty)."""

    def progress(self, done: float, total: float | None, message: str | None) -> None:
        """Take a progress report."""

    def step(self, name: str) -> None:
        """Note that a step has begun; those before it are done."""

    def wrote(self, text: str) -> None:
        """Take the next piece of the text that the call is producing."""

    async def checkpoint(self, state: object) -> None:
        """Keep the state, durably, before this returns."""
        raise Failure("CHECKPOINTS_UNAVAILABLE")

    async def restore(self, fingerprint: str) -> object:
        """Return the state kept last, if it was for the same input."""
        raise Failure("CHECKPOINTS_UNAVAILABLE")

    def ask(self, question: str, value: object) -> Coroutine[Any, Any, object]:
        """Answer a question of a handler. Subclasses may know further questions."""
        if question == "checkpoint":
            return self.checkpoint(value)
        if question == "restore":
            return self.restore(str(value))
        raise Failure("UNKNOWN_OPERATION", f"the caller does not know the question {question!r}")


class Traced(Protocol):
    @property
    def trace(self) -> TraceContext: ...


@entity(frozen=True)
class Scope:
    """The call that code runs in; further calls nest in it."""

    deadline: Deadline | None
    depth: int
    name: str
    span: Traced
    call: Any = None
    """If it is one of this process."""
    overtime_address: str = ""
    """Where a command started here may request overtime."""


current_scope: ContextVar[Scope | None] = ContextVar("shotclock_scope", default=None)


class ProgressListener(CallListener):
    def __init__(self, on_progress: Progress) -> None:
        self._on_progress = on_progress

    def progress(self, done: float, total: float | None, message: str | None) -> None:
        self._on_progress(done, total, message)


NULL_LISTENER = CallListener()


class Stopped(BaseException):
    """Raised in a sync function when its time is up: `finally` blocks run, within the grace.

    Not an Exception, so that `except Exception` does not swallow it. A function that does is killed.
    """


class CallLink(Protocol):
    def is_stopping(self) -> bool: ...
    def progress(self, done: float, total: float | None, unit: str | None) -> None: ...
    def step(self, name: str) -> None: ...
    def write(self, text: str) -> None: ...
    def keep(self, result: object) -> None: ...
    def ask(self, question: str, value: object) -> Any: ...
    def call(self, operation: Any, arguments: Mapping[str, object], clocks: Clocks) -> Any: ...


class Context:
    """The call as its handler sees it. A parameter named `ctx` receives it.

    `ctx.call(…)` gives an awaitable to an async handler and the envelope itself to a sync one.
    """

    def __init__(
        self,
        name: str,
        request_id: str,
        deadline: Deadline | None,
        depth: int,
        trace: Traced,
        link: CallLink,
        skipped_steps: tuple[str, ...] = (),
    ) -> None:
        self.name = name
        self.request_id = request_id
        self.deadline = deadline
        self.depth = depth
        self._trace = trace
        self._link = link
        self._skipped_steps = skipped_steps

    @property
    def traceparent(self) -> str:
        """Return this call as a parent, in the form of W3C Trace Context."""
        return self._trace.trace.traceparent

    @property
    def stopping(self) -> bool:
        """Return whether the call has been asked to wind down: its soft clock rang, or it is being stopped."""
        return self._link.is_stopping()

    def remaining_ms(self) -> int | None:
        """Return the time left before the deadline; None if there is none."""
        return None if self.deadline is None else self.deadline.remaining_ms(clock.monotonic_ns())

    def progress(
        self, done: float, total: float | None = None, message: str | None = None, *, unit: str | None = None
    ) -> None:
        """Report how far the work is: a sign of life for the idle clock. Raises TypeError or ValueError.

        With whole numbers the message, or `unit`, is the counted thing: 3 of 10 files.
        """
        message = unit if message is None else message
        if message is not None and not isinstance(message, str):
            raise TypeError(f"ctx.progress: the message is a text, not a {type(message).__name__}")
        self._link.progress(_number("done", done), None if total is None else _number("total", total), message)

    def keep(self, partial: object) -> None:
        """Keep a partial result: `data` of the envelope if the call is stopped. Replaces the former. A sign of life."""
        self._link.keep(partial)

    def request_overtime(self, reason: str, by: object) -> Any:
        """Return the granted milliseconds, 0 if declined. Await it if async. Raises Failure NOT_EXTENDABLE."""
        if not str(reason).strip():
            raise ValueError("ctx.request_overtime: say why")
        return self._link.ask(OVERTIME, (parse_duration_ms(by), str(reason)))

    def step(self, name: str) -> bool:
        """Begin a declared step. Return False if the caller resumes from a later one: skip it."""
        if name in self._skipped_steps:
            return False
        self._link.step(name)
        return True

    def write(self, text: str) -> None:
        """Send text to the caller at once, to be kept if the call is stopped. A sign of life, even if empty."""
        self._link.write(text)

    def ask(self, question: str, value: object) -> Any:
        """Ask the caller a question. Await it if async. Raises the caller's Failure."""
        return self._link.ask(question, value)

    def checkpoint(self, state: object) -> Any:
        """Store a state (plain JSON data) that survives a crash once this returns. Await it if async."""
        return self._link.ask("checkpoint", state)

    def restore(self, fingerprint: object = "") -> Any:
        """Return the state that this invocation kept before it was interrupted, or None. Await it if async.

        A state with another fingerprint (a digest or modification time of the input) is discarded, with a warning.
        """
        return self._link.ask("restore", str(fingerprint))

    def call(self, operation: Any, arguments: Mapping[str, object] | None = None, **clocks: Any) -> Any:
        """Call another operation inside this call's deadline. Clocks as in `Clocks.of`: timeout="5s", …"""
        return self._link.call(operation, arguments or {}, Clocks.of(**clocks))


def _number(name: str, given: Any) -> float:
    if not isinstance(given, int | float) or isinstance(given, bool):
        if isinstance(given, bool) or not (hasattr(given, "__index__") or hasattr(given, "__float__")):
            raise TypeError(f"ctx.progress: {name} is a number, not a {type(given).__name__}")
        given = given.__index__() if hasattr(given, "__index__") else given.__float__()
    if isinstance(given, float) and not math.isfinite(given):
        raise ValueError(f"ctx.progress: {name} is a number with an end, not {given}")
    number: float = given
    return number
