"""One of several servers behind one client: its `shotclock wrap` process, over all of its starts.

That process has the limits, the policy and the restarts of the server. Here it is only started, spoken to and ended.
When this process dies, the pipes close, and every such process ends with everything it has started.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from enum import Enum, auto
from typing import Protocol

from ...core.clocks import NS_PER_MS
from ...core.value_types import value
from ...process.clock import monotonic_ns
from ...process.piped_child import PipedChild
from ...runtime.commands import signal_name
from ..limits import CallLimits, ServerLimits
from ..lines import LinePart, LineSplitter
from ..messages import LISTEN, JsonObject, Key, RpcMessage, key_of, request_line
from ..requests import NEVER_NS
from ..restarts import Restarts
from ..writers import LineWriter, NoteWriter, read_some

# Beyond the limits of the server itself, for its wrap to verify and to end.
END_MARGIN_MS = 5_000
# A server that reads nothing for this long gets no more messages, so that the others get theirs.
STALL_MS = 5_000
# One that stops in the middle of a long line, as reader or as writer, stops the others, too, so it is replaced.
LINE_STALL_MS = 30_000
MOST_READS_AT_END = 64
LONGEST_STDERR_LINE = 8 * 1024
KEPT_REASON = 400
# Beyond the limits of a request, for the wrap of the server to answer it. Only one that is stuck takes longer.
BACKSTOP_MS = 10_000
# Exit codes of `shotclock wrap` for a server that cannot be started.
_UNSTARTABLE = (125, 126, 127)

OnAnswer = Callable[[RpcMessage | None], None]


@value
class ConfiguredServer:
    """A server as its file describes it."""

    name: str
    prefix: str  # of the names of its tools and prompts
    words: list[str]  # of the command line after `shotclock wrap`
    env: dict[str, str]
    limits: ServerLimits
    ask_ms: int = 0  # how long a call may wait for a person before its own limits begin

    def backstop_ms(self, method: str, limits: CallLimits) -> int | None:
        """Return the time in which the wrap of the server answers a request; None if it has no limit."""
        if not limits.timeout_ms or method == LISTEN:
            return None
        # After the limit the server has a grace to react, and another one to end.
        return limits.timeout_ms + self.ask_ms + 2 * self.limits.grace_ms + BACKSTOP_MS


class MergedPhase(Enum):
    DOWN = auto()
    UP = auto()  # the client has not greeted it
    DISCOVERING = auto()
    GREETING = auto()
    READY = auto()


class MergedEvents(Protocol):
    """The session, as a server sees it."""

    def take_from_server(self, server: MergedServer, part: LinePart, piece: bytes) -> None: ...

    def note_started(self, server: MergedServer) -> None: ...

    def note_ended(self, server: MergedServer) -> None: ...


class MergedServer:
    """A server, and the process in front of it."""

    pid_fd: int
    stdout_fd: int
    stderr_fd: int

    def __init__(self, entry: ConfiguredServer, notes: NoteWriter) -> None:
        self.entry = entry
        self.phase: MergedPhase = MergedPhase.DOWN
        # Why it cannot be used, as the end of a sentence. It holds until the server is ready.
        self.why: str = "has not answered the greeting of the client yet"
        self.exit_code: int | None = None  # of a server that cannot be started at all
        self.capabilities: JsonObject | None = None
        self.greeting: JsonObject = {}  # its answer to `initialize` or `server/discover`
        self.restarts: Restarts = Restarts()
        self.writer: LineWriter | None = None
        self.pid_fd = self.stdout_fd = self.stderr_fd = -1
        self.is_closing: bool = False
        self._events: MergedEvents
        self._notes = notes
        self._process: PipedChild | None = None
        self._splitter = LineSplitter()
        self._own: dict[str, OnAnswer] = {}
        self._own_count = 0
        self._stderr = b""
        self._last_stderr = ""
        self._start_ns = self._kill_ns = NEVER_NS
        self._full_ns, self._full_size = NEVER_NS, 0
        self._backstops: dict[Key, int] = {}
        self._ending_why = ""

    def connect(self, events: MergedEvents) -> None:
        self._events = events

    @property
    def name(self) -> str:
        return self.entry.name

    @property
    def is_running(self) -> bool:
        return self._process is not None

    @property
    def is_ready(self) -> bool:
        return self.phase is MergedPhase.READY

    def has(self, capability: str) -> bool:
        """Return whether the server may have such a capability; unknown ones are asked."""
        return self.capabilities is None or capability in self.capabilities

    # --- messages ------------------------------------------------------------------------------------------------

    def send(self, line: bytes) -> None:
        if self.writer is not None:
            self.writer.write_line(line)

    def send_piece(self, part: LinePart, piece: bytes) -> None:
        if self.writer is not None:
            self.writer.write_piece(part, piece)

    def ask(self, method: str, params: JsonObject, on_answer: OnAnswer) -> None:
        """Send a request of our own. The answer is None if the process ends before."""
        self._own_count += 1
        id = f"several-{self._own_count}"  # the prefix of the wrap's own requests would hide the answer
        self._own[id] = on_answer
        self.send(request_line(id, method, params))
        self.expect(("str", id), method, self.entry.limits.of(method, ""))

    def expect(self, key: Key, method: str, limits: CallLimits) -> None:
        """Replace the process if it has not answered a request long after its limit."""
        backstop_ms = self.entry.backstop_ms(method, limits)
        if backstop_ms is not None:
            self._backstops[key] = monotonic_ns() + backstop_ms * NS_PER_MS

    def expect_no_more(self, key: Key | None) -> None:
        if key is not None:
            self._backstops.pop(key, None)

    def is_own(self, id: object) -> bool:
        return isinstance(id, str) and id in self._own

    @property
    def has_own_open(self) -> bool:
        return bool(self._own)

    def take_own_answer(self, answer: RpcMessage) -> None:
        self.expect_no_more(key_of(answer.id))
        on_answer = self._own.pop(str(answer.id), None)
        if on_answer is not None:
            on_answer(answer)

    def holds_client_back(self, now_ns: int) -> bool:
        """Return whether the client has to wait until this server has read more. One that never reads is left out."""
        writer = self.writer
        if writer is None or not writer.is_full:
            self._full_ns = NEVER_NS
            return False
        if self._full_ns == NEVER_NS or writer.unwritten_size < self._full_size:
            self._full_ns, self._full_size = now_ns, writer.unwritten_size
        return writer.is_inside_line or not self.is_stalled(now_ns)

    def is_stalled(self, now_ns: int) -> bool:
        return now_ns >= self._full_ns + STALL_MS * NS_PER_MS

    # --- the process ---------------------------------------------------------------------------------------------

    def start(self) -> None:
        self._start_ns = NEVER_NS
        argv = [sys.executable, "-P", "-m", "shotclock", "wrap", *self.entry.words]
        try:
            # In a group of its own: the signals of a terminal reach it through us.
            process = PipedChild(argv, {**os.environ, **self.entry.env}, has_own_group=True)
        except OSError as error:
            self.why = f"could not be started: {error.strerror}"
            self.plan_start()
            return
        self._process, self.pid_fd = process, os.pidfd_open(process.pid)
        self.stdout_fd, self.stderr_fd = process.stdout_fd, process.stderr_fd
        self.writer = LineWriter(process.stdin_fd)
        self._splitter = LineSplitter()
        self.phase = MergedPhase.UP
        self._events.note_started(self)

    def plan_start(self) -> None:
        """Start the process again, later after each crash; after too many only when it is needed."""
        now_ns = monotonic_ns()
        start_ns = self.restarts.note_crash(now_ns)
        self._start_ns = NEVER_NS if self.restarts.open_for_ms(now_ns) else start_ns

    def start_if_needed(self) -> None:
        """Start a process that crashed too often, once its pause is over."""
        is_down = self._process is None and self._start_ns == NEVER_NS and self.exit_code is None
        if is_down and not self.is_closing and not self.restarts.open_for_ms(monotonic_ns()):
            self.start()

    def restart(self, why: str, number: int = signal.SIGTERM) -> None:
        """Start a fresh process in place of this one."""
        if self._process is not None:
            self.phase, self.why, self._ending_why = MergedPhase.DOWN, why, why
            self._end_within(self.entry.limits.grace_ms)
            self._process.send_signal(number)

    def read_stdout(self) -> bool:
        """Read once. Return whether there was anything."""
        chunk = read_some(self.stdout_fd)
        if chunk == b"":
            self.stdout_fd = -1  # closed with the process
        for part, piece in self._splitter.split(chunk) if chunk else ():
            self._events.take_from_server(self, part, piece)
        return bool(chunk)

    def read_stderr(self) -> bool:
        """Read once, and pass complete lines on, each with the name of the server."""
        chunk = read_some(self.stderr_fd)
        if chunk == b"":
            self.stderr_fd = -1
        *lines, self._stderr = (self._stderr + (chunk or b"")).split(b"\n")
        if len(self._stderr) > LONGEST_STDERR_LINE:
            lines, self._stderr = [*lines, self._stderr], b""
        self._pass_stderr(lines)
        return bool(chunk)

    def _pass_stderr(self, lines: list[bytes]) -> None:
        for line in lines:
            self._notes.write(self.name.encode("utf-8", "replace") + b": " + line + b"\n")
            if line.strip():
                self._last_stderr = line[-KEPT_REASON:].decode("utf-8", "replace").strip()

    def end(self) -> None:
        """Deal with the end of the process."""
        process = self._process
        code = None if process is None else process.wait(0)
        if process is None or code is None:
            return
        for read in (self.read_stdout, self.read_stderr):
            for _ in range(MOST_READS_AT_END):
                if not read():
                    break
        self._pass_stderr([self._stderr] if self._stderr else [])
        self._stderr = b""
        process.close()
        os.close(self.pid_fd)
        self.pid_fd = self.stdout_fd = self.stderr_fd = -1
        self._process = self.writer = None
        self.phase, self._kill_ns = MergedPhase.DOWN, NEVER_NS
        self._plan_after(code)
        self._backstops.clear()
        self._events.note_ended(self)
        own, self._own = self._own, {}
        for on_answer in own.values():
            on_answer(None)

    def _plan_after(self, code: int) -> None:
        why, self._ending_why = self._ending_why, ""
        if self.is_closing:
            self.why = "is being ended"
        elif code in _UNSTARTABLE:
            self.exit_code = code
            self.why = f"cannot be started: {self._last_stderr.removeprefix('shotclock wrap: ')}"
        else:
            self.plan_start()
            how = f"was killed by {signal_name(-code)}" if code < 0 else f"ended with exit code {code}"
            is_paused = self._start_ns == NEVER_NS
            again = "not started for a while" if is_paused else "being started again"
            self.why = why or f"is {again}, because its wrap {how}"

    def close(self) -> None:
        """End the process: the client is gone."""
        self.is_closing = True
        self._start_ns = NEVER_NS
        self._end_within(self.entry.limits.shutdown_ms + self.entry.limits.grace_ms)
        self.close_stdin_when_written()

    def close_stdin_when_written(self) -> None:
        is_written = self.writer is not None and not self.writer.has_unwritten
        if self.is_closing and is_written and self._process is not None:
            self.writer = None
            self._process.close_stdin()

    def stop(self, number: int) -> None:
        """Pass a stop signal on. The second one means to kill at once, and its wrap knows that, too."""
        self.is_closing = True
        self._start_ns = NEVER_NS
        self._end_within(self.entry.limits.grace_ms)
        if self._process is not None:
            self._process.send_signal(number)

    def _end_within(self, limit_ms: int) -> None:
        self._kill_ns = min(self._kill_ns, monotonic_ns() + (limit_ms + END_MARGIN_MS) * NS_PER_MS)

    # --- time ----------------------------------------------------------------------------------------------------

    @property
    def next_due_ns(self) -> int:
        now_ns = monotonic_ns()
        stalls = [self._full_ns + limit_ms * NS_PER_MS for limit_ms in (STALL_MS, LINE_STALL_MS)]
        backstop_ns = min(self._backstops.values(), default=NEVER_NS)
        return min(self._start_ns, self._kill_ns, backstop_ns, *(at_ns for at_ns in stalls if at_ns > now_ns))

    def check_clocks(self, now_ns: int, *, is_held: bool) -> None:
        """Deal with limits that are reached. A server that is held may have answers which we have not read."""
        if now_ns >= self._start_ns:
            self.start()
        overdue = [key for key, due_ns in self._backstops.items() if now_ns >= due_ns]
        if overdue and is_held:
            self._backstops |= {key: now_ns + BACKSTOP_MS * NS_PER_MS for key in overdue}
        elif overdue:
            self._backstops.clear()
            self.kill("did not answer within its limits")
        is_stuck = self.writer is not None and self.writer.is_inside_line and self.writer.is_full
        if is_stuck and now_ns >= self._full_ns + LINE_STALL_MS * NS_PER_MS:
            self._full_ns = NEVER_NS
            self.kill("did not read a long line")
        if now_ns >= self._kill_ns:
            self._kill_ns = NEVER_NS
            if self._process is not None:
                self._process.kill()

    def kill(self, why: str) -> None:
        """Replace a process that is stuck. Its supervisor kills the server with everything it has started."""
        self.restart(f"is being started again, because its wrap {why} and was killed", signal.SIGKILL)
