"""What a step without a command prints: the text of a model, and the messages and progress of a function or a tool."""

from __future__ import annotations

from ...supervise.clock import monotonic_ns
from .provider import StepCall

PROGRESS_PAUSE_NS = 1_000_000_000  # a loop that reports each of a million items gives one line per second
_STDOUT, _STDERR = 1, 2


class StepText:
    """The text of one attempt, as two streams of a command have it: results, and news about the work."""

    def __init__(self, step: StepCall) -> None:
        self._take = step.on_output
        self._is_open = False  # a line of the results has begun
        self._progress_ns: int | None = None

    @property
    def is_kept(self) -> bool:
        return self._take is not None

    def write(self, text: str) -> None:
        self._put(_STDOUT, text)
        if text:
            self._is_open = not text.endswith("\n")

    def end_line(self) -> None:
        if self._is_open:
            self.write("\n")

    def log(self, level: str, message: str, logger: str | None = None) -> None:
        source = "" if logger is None else f"{logger}: "
        self._put(_STDERR, f"{'' if level == 'info' else f'{level}: '}{source}{message}\n")

    def progress(self, done: float, total: float | None, message: str | None) -> None:
        """Add a line for a report, unless one was added just now. The last of all is always added."""
        now_ns = monotonic_ns()
        is_soon = self._progress_ns is not None and now_ns < self._progress_ns + PROGRESS_PAUSE_NS
        if is_soon and done != total:
            return
        self._progress_ns = now_ns
        text = f"{done:g}" if total is None else f"{done:g} of {total:g}"
        self._put(_STDERR, f"{text} {message or ''}".rstrip() + "\n")

    def _put(self, stream: int, text: str) -> None:
        if self._take is not None and text:
            self._take([(stream, text.encode("utf-8", "surrogateescape"))], (0, 0))
