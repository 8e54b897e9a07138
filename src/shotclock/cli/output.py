"""What reaches the two streams: data on stdout, everything else on stderr, and no traceback for a closed pipe."""

from __future__ import annotations

import os
import select
import stat
import sys
from collections.abc import Sized

from ..core.durations import format_duration
from ..core.envelope import EX_IOERR, Envelope
from ..process.output import PIPE_ROOM

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import TextIO


def wants_json(asked: bool, *, even_without_colour: bool = True) -> bool:
    """Return whether to write JSON: when asked for, when stdout is no terminal, and where CI or NO_COLOR say that
    nobody looks. For what has a plain rendering as well, NO_COLOR only says that there is no colour."""
    is_plain = even_without_colour and "NO_COLOR" in os.environ
    return asked or not is_terminal(sys.stdout) or bool(os.environ.get("CI")) or is_plain


# How long we wait for somebody to take our answer, in slices between which a signal is noticed.
SLICE_MS = 100
ANSWER_SLICES = 100


def is_terminal(stream: TextIO | None) -> bool:
    return stream is not None and stream.isatty()


def emit(envelope: Envelope, heard: Sized = ()) -> int:
    """Write the envelope alone on stdout. Returns the exit code."""
    return emit_text(envelope.to_json() + "\n", envelope.exit_code, heard)


def emit_text(answer: str, exit_code: int, heard: Sized = ()) -> int:
    """Write the answer on stdout. Returns the exit code, which is the answer's own, whoever reads.

    A reader that left early is told nothing and is not our failure; a full disk is, and so is a stdout that was closed.
    """
    trouble: Exception | None = OSError("stdout is closed")
    if sys.stdout is not None:
        trouble = write_quietly(sys.stdout, answer, heard)
    if trouble is None or isinstance(trouble, BrokenPipeError):
        return exit_code
    say_line(f"shotclock: the answer could not be written: {trouble}", heard=heard)
    return exit_code or EX_IOERR


def emit_help(text: str) -> None:
    """Write help, which is not data: to stdout only where a person reads it."""
    write_quietly(sys.stdout if is_terminal(sys.stdout) else sys.stderr, text)


def say_line(text: str, *, after_child: bool = False, heard: Sized = ()) -> None:
    """Write a line on stderr. After a child that may have left its last line open, it starts on a new one."""
    opening = "\n" if after_child and not _stderr_at_line_start() else ""
    write_quietly(sys.stderr, f"{opening}{text}\n", heard)


def write_quietly(stream: TextIO | None, text: str, heard: Sized = ()) -> Exception | None:
    """Write it all. What went wrong is returned, not raised.

    Somebody who holds the pipe and does not read must not hold us: without progress we wait no longer than
    ANSWER_SLICES, and a signal (a longer `heard`) ends the wait at once.
    """
    if stream is None:
        return None
    try:
        stream.flush()
        # A terminal that cannot show it all still shows the rest.
        _write_all(stream.fileno(), text.encode(stream.encoding or "utf-8", "replace"), heard)
    except (OSError, ValueError) as error:
        _point_to_null(stream)
        return error
    return None


def _write_all(fd: int, data: bytes, heard: Sized) -> None:
    poller = select.poll()
    poller.register(fd, select.POLLOUT)
    signals, waited = len(heard), 0
    rest = memoryview(data)
    while rest:
        if not poller.poll(SLICE_MS):
            waited += 1
            if waited >= ANSWER_SLICES or len(heard) > signals:
                raise TimeoutError("nobody takes it")
            continue
        waited = 0
        rest = rest[os.write(fd, rest[:PIPE_ROOM]) :]


def flush_quietly(stream: TextIO | None) -> None:
    write_quietly(stream, "")


def _point_to_null(stream: TextIO) -> None:
    """Close the stream, so that the interpreter's own flush at exit does not complain a second time."""
    try:
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
    except (OSError, ValueError):
        pass


def _stderr_at_line_start() -> bool:
    """Return whether stderr is at the start of a line. Only a regular file can be asked for its last byte; elsewhere an
    empty line is the lesser evil."""
    try:
        status = os.fstat(2)
        if stat.S_ISCHR(status.st_mode):
            return True
        if not stat.S_ISREG(status.st_mode):
            return False
        if status.st_size == 0:
            return True
        with open("/proc/self/fd/2", "rb") as file:
            file.seek(-1, os.SEEK_END)
            return file.read(1) == b"\n"
    except OSError:
        return False


def summary_line(envelope: Envelope) -> str:
    """Write one line for a person at a terminal."""
    took = format_duration(int(str(envelope.meta["duration_ms"])))
    if envelope.error is None:
        line = f"shotclock: {envelope.ending} in {took}"
    else:
        line = f"shotclock: {envelope.code}: {envelope.error['message']} ({envelope.ending}, {took})"
        errors = envelope.error.get("errors")
        if not errors:
            line += f"; {envelope.error['suggestion']}"
    for notice in envelope.warnings:
        line += f"\n  {notice['code']}: {notice['message']}"
    return line
