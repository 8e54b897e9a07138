"""The streams and the signals of a command line: what is written, who is asked, and what stops it.

Data goes to stdout and everything else to stderr, without a traceback for a closed pipe. Ctrl-S, a window that hangs or
a pipe that nobody reads holds no run. The signals that mean "stop" are heard over the whole life of the process:

    raise_on_stop      nothing has begun: leave where we are
    StopListener         the work listens, and stops what it started; a second signal ends us at once
    note_stops         the answer is being written, and is written once
    ignore_stops       the answer is out
"""

from __future__ import annotations

import os
import select
import signal
import stat
import sys
from collections.abc import Callable, Coroutine, Sized
from types import FrameType
from typing import TYPE_CHECKING, Any, NamedTuple, TextIO, TypeVar

from ..core.clocks import format_duration
from ..core.envelope import EX_IOERR, Envelope, Problem
from ..process.command_task import PIPE_ROOM
from ..process.kill import STOP_SIGNALS

if TYPE_CHECKING:
    import asyncio

T = TypeVar("T")


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


def describe_page(data: dict[str, Any], name: str = "html") -> str:
    """Name the file of a report, for a person."""
    if name == "html" and "opened" in data:
        return f"{'opened' if data['opened'] else 'the page, for a browser:'} {data['html']}"
    return f"written to {data[name]}"


# --- terminals ------------------------------------------------------------------------------------------------

# What a reader may be behind. One that has let so much lie is not going to read it.
BEHIND_LIMIT = 4_000_000
# How long the end waits for a reader that takes nothing at all.
LAST_WORDS_MS = 1_000
# How long we wait for somebody who may have left the terminal.
ANSWER_LIMIT_S = 600.0


class Outlet:
    """A descriptor that takes lines at once and writes what it can."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._rest = bytearray()
        self._poller = select.poll()
        self._poller.register(fd, select.POLLOUT)

    def write(self, text: str) -> None:
        """Take a text. Raises OSError: it is gone or full, or its reader does not keep up."""
        self._rest += text.encode("utf-8", "replace")
        self._drain(0)
        if len(self._rest) > BEHIND_LIMIT:
            self._rest.clear()
            raise OSError("whoever reads it does not keep up")

    def finish(self) -> bool:
        """Write what is left. Returns whether all of it was taken."""
        try:
            self._drain(LAST_WORDS_MS)
        except OSError:
            return False
        return not self._rest

    def _drain(self, wait_ms: int) -> None:
        """Write for as long as something is taken within `wait_ms`."""
        while self._rest and self._poller.poll(wait_ms):
            try:
                del self._rest[: os.write(self._fd, self._rest[:PIPE_ROOM])]
            except BlockingIOError:
                return
            except OSError:
                self._rest.clear()
                raise


def screen_here() -> Screen | None:
    """Return the terminal to draw on, None where lines are better: stderr is no terminal, cannot move its cursor, or
    shall have no colour."""
    if not is_terminal(sys.stderr) or os.environ.get("TERM", "dumb") in ("dumb", "") or "NO_COLOR" in os.environ:
        return None
    try:
        # A description of our own: without blocking, which on the shared one would be everybody's.
        fd = os.open(os.ttyname(2), os.O_WRONLY | os.O_NOCTTY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    return Screen(fd)


class Screen:
    """A terminal as a file that takes everything at once and writes what it can."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._rest = b""
        self.encoding = getattr(sys.stderr, "encoding", None) or "utf-8"

    @property
    def is_behind(self) -> bool:
        self.flush()
        return bool(self._rest)

    def write(self, text: str) -> int:
        self._rest += text.encode(self.encoding, "replace")
        return len(text)

    def flush(self) -> None:
        try:
            while self._rest:
                self._rest = self._rest[os.write(self._fd, self._rest) :]
        except BlockingIOError:
            pass
        except OSError:  # it is gone; nobody looks any more
            self._rest = b""

    def isatty(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._fd

    def close(self) -> None:
        """Write what is left of a frame: it belongs before whatever is said next. Waits as long as any line would."""
        self.flush()
        rest, self._rest = self._rest, b""
        os.close(self._fd)
        if rest:
            write_quietly(sys.stderr, rest.decode(self.encoding, "replace"))


def confirm(name: str, expected: str) -> Problem | None:
    """Have a person type back what is expected. Returns None where they did, otherwise why nothing runs."""
    if not is_terminal(sys.stdin) or not is_terminal(sys.stderr):
        message = f"{name} runs only after a person has typed {expected!r} at a terminal"
        return Problem("PERSON_REQUIRED", message, "validation", context={"expected": expected})
    write_quietly(sys.stderr, f"{name} needs a person to confirm. Type {expected!r} to go on: ")
    if not select.select([sys.stdin], [], [], ANSWER_LIMIT_S)[0]:
        return Problem("PERSON_REQUIRED", f"{name}: nobody answered", "validation")
    if sys.stdin.readline().rstrip("\n") == expected:
        return None
    return Problem("PERSON_REQUIRED", f"{name} was not confirmed", "validation")


# --- signals --------------------------------------------------------------------------------------------------

# Some send a signal twice at once, to a process and to its group (`timeout` does): that is one wish, not two.
ONE_WISH_S = 0.2

signals_heard: list[int] = []
"""Those that came, in their order."""


class Signalled(BaseException):
    """A signal came before the work."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number
        self.name = signal.Signals(number).name


def raise_on_stop() -> None:
    for number in _signals_to_hear():
        signal.signal(number, _raise)


def note_stops() -> None:
    for number in _signals_to_hear():
        signal.signal(number, _note)
    # `StopListener` held them back when its loop ended, until somebody listens again.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)


def ignore_stops() -> None:
    """Ignore them: the answer is out and the process about to end; the interpreter would give the signals their
    defaults back."""
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)


class StopListener:
    """The first signal as a future of its name, from here on; one that came before and was lost in a finaliser or a
    fork hook, where Python swallows exceptions, counts as well."""

    def __init__(self, on_second: Callable[[str], object] | None = None) -> None:
        """`on_second` is called with the name of a second signal, which then ends the process at once."""
        from asyncio import get_running_loop

        self._on_second = on_second
        self._loop = get_running_loop()
        self.stop: asyncio.Future[str] = self._loop.create_future()
        self._heard_at = self._loop.time()

    def __enter__(self) -> asyncio.Future[str]:
        for number in _signals_to_hear():
            self._loop.add_signal_handler(number, self._hear, number)
        if signals_heard:
            self.stop.set_result(signal.Signals(signals_heard[0]).name)
        return self.stop

    def __exit__(self, *_: object) -> None:
        # The loop gives signals back to their defaults when it is closed. None may come in between.
        signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)

    def _hear(self, number: int) -> None:
        if self.stop.done():
            if (
                self._loop.time() - self._heard_at > ONE_WISH_S
            ):  # it means now: everything below us dies with our socket
                for each in STOP_SIGNALS:  # a third signal must not wait for a slow reader
                    signal.signal(each, signal.SIG_DFL)
                if self._on_second is not None:
                    self._on_second(signal.Signals(number).name)
                os._exit(128 + number)
            return
        self._heard_at = self._loop.time()
        signals_heard.append(number)
        self.stop.set_result(signal.Signals(number).name)


class EarlyEnd(NamedTuple):
    """The end of a wait without a result: by a signal, or with None by the time limit."""

    signal: str | None


async def until_stopped(work: Coroutine[Any, Any, T], limit_s: float | None = None) -> T | EarlyEnd:
    """Return the result of the work, unless a stop signal or the limit comes first."""
    import asyncio

    with StopListener() as stop:
        working = asyncio.ensure_future(work)
        waits: list[asyncio.Future[Any]] = [working, stop]
        await asyncio.wait(waits, timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        working.cancel()
        return EarlyEnd(stop.result() if stop.done() else None)


def _signals_to_hear() -> list[signal.Signals]:
    """Return those we listen to. Whoever is started by nohup does not hear SIGHUP, and a script's background job not
    SIGQUIT."""
    may_be_ignored = (signal.SIGHUP, signal.SIGQUIT)
    return [n for n in STOP_SIGNALS if n not in may_be_ignored or signal.getsignal(n) is not signal.SIG_IGN]


def _raise(number: int, frame: object) -> None:
    signals_heard.append(number)
    raise Signalled(number)


def _note(number: int, frame: object) -> None:
    signals_heard.append(number)


# --- the end of the program -----------------------------------------------------------------------------------
# A thread that nobody waits for, or an exit hook that hangs, would keep the process after its caller has the envelope.

# What the program's own exit hooks may take. Together with the answer it stays below the 5 s of F-011.
LEAVE_LIMIT_S = 3.0
_STARTERS = ("runpy", "importlib")


def is_the_end(package: str, frame: FrameType | None) -> bool:
    """Return whether only the program itself waits for us to return: not a test, a REPL or a larger program."""
    while frame is not None:
        name = str(frame.f_globals.get("__name__", ""))
        if name != "__main__" and name.partition(".")[0] not in (package, *_STARTERS):
            return False
        frame = frame.f_back
    return True


def leave_soon(code: int) -> None:
    """End the program within LEAVE_LIMIT_S, with this exit code, whatever its exit hooks and threads do."""
    import gc
    import threading

    ignore_stops()
    # Or the interpreter looks through all that was imported once more, before it ends.
    gc.freeze()
    gc.disable()
    threading.Thread(target=_leave, args=(code,), daemon=True).start()


def _leave(code: int) -> None:
    from ..process.clock import pause

    pause(LEAVE_LIMIT_S)
    os._exit(code)
