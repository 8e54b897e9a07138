"""The streams and the signals of a command line.

Data goes to stdout and everything else to stderr, without a traceback for a closed pipe. Ctrl-S, a hanging window or
a reader that does not read never blocks a run. Stop signals are handled over the whole life of the process:

    StopListener.raise_at_once   nothing has begun: leave at once
    StopListener                 the work listens, and stops its processes; a second signal ends the process at once
    StopListener.record_only     the answer is being written, once
    leave_soon                   the answer is out
"""

from __future__ import annotations

import contextlib
import gc
import os
import select
import signal
import stat
import sys
from collections.abc import Callable, Coroutine, Iterator, Sized
from types import FrameType
from typing import TYPE_CHECKING, Any, NamedTuple, TextIO, TypeVar

from ..core.envelope import EX_IOERR, Envelope, Problem
from ..core.errors import Ending, Failure, error_entry
from ..core.limits import NS_PER_MS, format_duration
from ..core.value_types import JsonObject
from ..supervise.clock import monotonic_ns, pause
from ..supervise.command_task import PIPE_ROOM
from ..supervise.kill import STOP_SIGNALS

if TYPE_CHECKING:
    import asyncio

T = TypeVar("T")

signals_heard: list[int] = []  # the stop signals; one that comes while a reader does not read ends the wait for it


def wants_json(form: str | None) -> bool:
    """Return whether to write JSON: the format that was asked for, else text on a terminal and JSON elsewhere."""
    return form == "json" or (form is None and not is_terminal(sys.stdout))


SLICE_MS = 100  # the wait for a reader of the answer, in slices between which a signal is noticed
ANSWER_SLICES = 100


def is_terminal(stream: TextIO | None) -> bool:
    return stream is not None and stream.isatty()


def emit(envelope: Envelope, heard: Sized = signals_heard) -> int:
    return emit_text(envelope.to_json() + "\n", envelope.exit_code, heard)


def emit_text(answer: str, exit_code: int, heard: Sized = signals_heard) -> int:
    """Write the answer. Returns its exit code, or EX_IOERR if that fails; a reader that left early is no failure."""
    trouble: Exception | None = OSError("stdout is closed")
    if sys.stdout is not None:
        trouble = write_quietly(sys.stdout, answer, heard)
    if trouble is None or isinstance(trouble, BrokenPipeError):
        return exit_code
    say_line(f"shotclock: the answer could not be written: {trouble}", heard=heard)
    return exit_code or EX_IOERR


def say_line(text: str, *, after_child: bool = False, is_alone: bool = True, heard: Sized = signals_heard) -> None:
    """Write a line on stderr, unless it is empty. `after_child`: the child may have left its last line open.

    Then it starts a new line; with `is_alone` False not on a pipe, where an empty line could be the result.
    """
    if not text:
        return
    is_at_start = _stderr_at_line_start() if after_child else True
    opening = "\n" if is_at_start is False or (is_alone and not is_at_start) else ""
    write_quietly(sys.stderr, f"{opening}{text}\n", heard)


def write_quietly(stream: TextIO | None, text: str, heard: Sized = signals_heard) -> Exception | None:
    """Write the whole text, and return the error instead of raising it.

    A reader that holds the pipe without reading must not block us: the wait without progress ends after
    ANSWER_SLICES, or at once with a signal (a longer `heard`).
    """
    if stream is None:
        return None
    try:
        stream.flush()
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
                raise TimeoutError("its reader does not read")
            continue
        waited = 0
        rest = rest[os.write(fd, rest[:PIPE_ROOM]) :]


def _point_to_null(stream: TextIO) -> None:
    """Redirect the stream, so that the interpreter's own flush at exit does not fail again."""
    try:
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
    except (OSError, ValueError):
        pass


def _stderr_at_line_start() -> bool | None:
    """Return whether stderr is at the start of a line, which only a regular file shows; None is unknown."""
    try:
        status = os.fstat(2)
        if stat.S_ISCHR(status.st_mode):
            return True
        if not stat.S_ISREG(status.st_mode):
            return None
        if status.st_size == 0:
            return True
        with open("/proc/self/fd/2", "rb") as file:
            file.seek(-1, os.SEEK_END)
            return file.read(1) == b"\n"
    except OSError:
        return None


MISTAKES_SHOWN = 20  # of a workflow file; the envelope has all


def summary_line(envelope: Envelope, program: str = "shotclock") -> str:
    took = format_duration(int(str(envelope.meta["duration_ms"])))
    if envelope.error is None:
        line = f"{program}: {envelope.ending} in {took}"
    elif envelope.code == "GENERAL_ERROR":  # the words of an author, for a person
        line = f"{program}: {envelope.error['message']}"
    else:
        ending = "failed" if envelope.ending == Ending.FINISHED else envelope.ending
        line = f"{program}: {envelope.code}: {envelope.error['message']} ({ending}, {took})"
        # The output of a failed command is above, and the mistakes of a command line are in the message.
        if envelope.code == "WORKFLOW_INVALID":
            line += _mistakes_of_file(envelope)
        elif not envelope.error.get("errors") and envelope.code != "COMMAND_FAILED":
            suggestion = str(envelope.error["suggestion"])
            line += f"; {suggestion.replace('data.continue_command', 'the command above')}"
    for notice in envelope.warnings:
        line += f"\n  {notice['code']}: {notice['message']}"
    return line


def _mistakes_of_file(envelope: Envelope) -> str:
    """Return the suggestion, unless it only points at the mistakes, and a line for each mistake."""
    from ..core.visible_text import one_line  # takes 3 ms, which `exec` does not need

    error = envelope.error or {}
    mistakes: Any = error.get("errors") or ()
    suggestion = str(error.get("suggestion") or "")
    text = "" if suggestion == error_entry("WORKFLOW_INVALID").hint else f"; {suggestion}"
    if envelope.meta.get("command") in ("check", "plan", "advise") and envelope.data is not None:  # they draw them
        return text
    text += "".join(f"\n  {one_line(str(each['message']), 500)}" for each in mistakes[:MISTAKES_SHOWN])
    more = len(mistakes) - MISTAKES_SHOWN
    return text + (f"\n  and {more} more: `shotclock check` shows them all" if more > 0 else "")


def describe_page(data: JsonObject, name: str = "html") -> str:
    if name == "html" and "opened" in data:
        return f"{'opened' if data['opened'] else 'the page, for a browser:'} {data['html']}"
    return f"written to {data[name]}"


BEHIND_LIMIT = 4_000_000
LAST_WORDS_MS = 1_000  # the wait at the end for a reader that reads nothing
ANSWER_LIMIT_S = 600.0  # the wait for a person who may have left the terminal


class Outlet:
    """A descriptor with a buffer: lines are accepted at once and written when the reader reads."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._rest = bytearray()
        self._poller = select.poll()
        self._poller.register(fd, select.POLLOUT)

    def write(self, text: str) -> int:
        """Accept a text. Raises OSError where the reader is gone or too far behind, or the disk is full."""
        self._rest += text.encode("utf-8", "replace")
        self._drain(0)
        if len(self._rest) > BEHIND_LIMIT:
            self._rest.clear()
            raise OSError("its reader does not keep up")
        return len(text)

    @property
    def held(self) -> int:
        """The bytes that the reader has not taken."""
        return len(self._rest)

    def finish(self) -> bool:
        """Write the rest. Returns whether the reader took all of it."""
        try:
            self._drain(LAST_WORDS_MS)
        except OSError:
            return False
        return not self._rest

    def _drain(self, wait_ms: int) -> None:
        while self._rest and self._poller.poll(wait_ms):
            try:
                del self._rest[: os.write(self._fd, self._rest[:PIPE_ROOM])]
            except BlockingIOError:
                return
            except OSError:
                self._rest.clear()
                raise


class Screen(Outlet):
    """A terminal as a file that never blocks."""

    @staticmethod
    def find() -> Screen | None:
        """Return the terminal to draw on. None: stderr is not one, or cannot move its cursor."""
        if not is_terminal(sys.stderr) or os.environ.get("TERM", "dumb") in ("dumb", ""):
            return None
        try:
            # A description of our own: O_NONBLOCK on the shared one would affect other programs.
            return Screen(os.open(os.ttyname(2), os.O_WRONLY | os.O_NOCTTY | os.O_NONBLOCK | os.O_CLOEXEC))
        except OSError:
            return None

    @property
    def is_behind(self) -> bool:
        self.flush()
        return bool(self._rest)

    def write(self, text: str) -> int:
        self._rest += text.encode("utf-8", "replace")
        return len(text)

    def flush(self) -> None:
        with contextlib.suppress(OSError):  # the terminal is gone
            self._drain(0)

    def close(self) -> None:
        """Write the rest of a frame before the next line, with the patience of any line."""
        self.flush()
        os.close(self._fd)
        if self._rest:
            write_quietly(sys.stderr, self._rest.decode("utf-8", "replace"))


def confirm(name: str, expected: str) -> Problem | None:
    if not is_terminal(sys.stdin) or not is_terminal(sys.stderr):
        message = f"{name} runs only after a person has typed {expected!r} at a terminal"
        return Problem("PERSON_REQUIRED", message, "validation", context={"expected": expected})
    typed = (ask_person(f"{name} needs a confirmation. Type {expected!r} to continue: ") or "").rstrip("\n")
    if typed == expected:
        return None
    wrong = f"{typed[:200]!r} is not {expected!r}" if typed else f"{name}: no confirmation was typed"
    hint = f"run it again, and type {expected!r}"
    return Problem("PERSON_REQUIRED", f"{wrong}; nothing was done", "validation", suggestion=hint)


def ask_person(question: str) -> str | None:
    """Return the line that is typed at the terminal, or None where none is."""
    write_quietly(sys.stderr, question)
    return sys.stdin.readline() if select.select([sys.stdin], [], [], ANSWER_LIMIT_S)[0] else None


def read_stdin(limit_ms: int) -> Iterator[bytes]:
    """Yield stdin in chunks. Raises Failure where it cannot be read, or is not closed in time."""
    until_ns = monotonic_ns() + limit_ms * NS_PER_MS
    while True:
        left_s = (until_ns - monotonic_ns()) / 1e9
        if left_s <= 0 or not select.select([0], [], [], left_s)[0]:
            message = f"stdin was not closed within {format_duration(limit_ms)}"
            raise Failure("INPUT_REQUIRED", message, suggestion="close it, or give it /dev/null")
        try:
            chunk = os.read(0, PIPE_ROOM)
        except OSError as error:
            raise Failure("INPUT_REQUIRED", f"stdin: {error.strerror}") from None
        if not chunk:
            return
        yield chunk


# Some programs send a signal twice at once, to a process and to its group (`timeout` does): that is one request.
ONE_REQUEST_S = 0.2


class Signalled(BaseException):
    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number
        self.name = signal.Signals(number).name


class EarlyEnd(NamedTuple):
    """The end of a wait without a result: by a signal, or with None by the time limit."""

    signal: str | None


class StopListener:
    """The first stop signal as a future of its name.

    A signal that came before, and was lost in a finaliser or a fork hook where Python swallows exceptions, counts too.
    """

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
        # The loop restores the default handlers when it is closed. No signal may come in between.
        signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)

    def _hear(self, number: int) -> None:
        name = signal.Signals(number).name
        if not self.stop.done():
            self._heard_at = self._loop.time()
            signals_heard.append(number)
            self.stop.set_result(name)
        elif self._loop.time() - self._heard_at > ONE_REQUEST_S:
            for each in STOP_SIGNALS:  # a third signal must not wait for a slow reader
                signal.signal(each, signal.SIG_DFL)
            if self._on_second is not None:
                self._on_second(name)
            os._exit(128 + number)  # every process below us dies with our socket

    @staticmethod
    def raise_at_once() -> None:
        """Let a stop signal raise Signalled from now on."""
        for number in _signals_to_hear():
            signal.signal(number, _raise)

    @staticmethod
    def record_only() -> None:
        """Let a stop signal only be recorded from now on."""
        for number in _signals_to_hear():
            signal.signal(number, lambda number, frame: signals_heard.append(number))
        # A listener blocked them when its loop ended, until the next handler is set.
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)

    @staticmethod
    async def run(work: Coroutine[Any, Any, T], limit_s: float | None = None) -> T | EarlyEnd:
        """Do the work until it ends, a stop signal comes or the time limit is reached."""
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
    """Return the signals to handle: not SIGHUP below nohup, nor SIGQUIT in a script's background job."""
    may_be_ignored = (signal.SIGHUP, signal.SIGQUIT)
    return [n for n in STOP_SIGNALS if n not in may_be_ignored or signal.getsignal(n) is not signal.SIG_IGN]


def _raise(number: int, frame: object) -> None:
    signals_heard.append(number)
    raise Signalled(number)


# A forgotten thread or a hanging exit hook would keep the process after its caller has the envelope. Together with the
# answer this time of the program's own exit hooks stays below the 5 s of F-011.
LEAVE_LIMIT_S = 3.0


def is_the_end(package: str, frame: FrameType | None) -> bool:
    """Return whether only the program itself waits for us to return, and no test, REPL or larger program."""
    while frame is not None:
        name = str(frame.f_globals.get("__name__", ""))
        if name != "__main__" and name.partition(".")[0] not in (package, "runpy", "importlib"):
            return False
        frame = frame.f_back
    return True


def leave_soon(code: int) -> None:
    """End the program within LEAVE_LIMIT_S with this exit code, even if exit hooks or threads hang."""
    import threading  # which `exec` does without

    for number in STOP_SIGNALS:  # the interpreter would restore their defaults
        signal.signal(number, signal.SIG_IGN)
    # Or the interpreter searches all that was imported for garbage once more.
    gc.freeze()
    gc.disable()
    threading.Thread(target=_leave, args=(code,), daemon=True).start()


def _leave(code: int) -> None:
    pause(LEAVE_LIMIT_S)
    os._exit(code)


def brief(ms: int) -> str:
    """Return few digits: 312ms, 4.48s, 12.3s, 5m12s."""
    if ms < 1000:
        return format_duration(ms)
    unit = 10 if ms < 10_000 else 100 if ms < 60_000 else 1000
    return format_duration(round(ms / unit) * unit)
