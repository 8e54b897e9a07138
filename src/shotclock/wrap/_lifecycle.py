"""The lives of a server: start, replay of the greeting, probes, restart after a crash, and the end.

    DOWN ── start ──> REPLAYING ──> READY <──> CHECKING
      ^     (the first life is ready at once: the client greets by itself)
      └──────────── ENDING <── kill, or a crash ──┘

Messages of the client are held by the session in every phase but READY.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum, auto

from ..core.envelope import Problem
from ..core.errors import Ending
from ..core.limits import NS_PER_MS, format_duration
from ..supervise.clock import monotonic_ns
from ..supervise.foreground import TerminalSignals
from ._failures import CONNECTION_CLOSED, WrapFailure, reported_failure
from ._limits import ServerLimits
from ._lines import LineSplitter
from ._links import ServerLink
from ._messages import RpcMessage, encode, key_of
from ._replay import OWN_PREFIX, Greeting
from ._requests import NEVER_NS, RequestState
from ._restarts import Restarts
from ._server_process import ServerCommand, ServerProcess
from ._session import ClientSession
from ._writers import LineWriter, NoteWriter, read_some
from .remote.endpoint import AdapterReport

# After this silence a server gets a ping before the next request. It has that long to answer.
PING_AFTER_MS = 30_000
PING_LIMIT_MS = 10_000
# How often a server with open requests is looked at: a signal may have stopped it.
LOOK_MS = 1_000
# A server that has closed its stdout usually ends at once. Its exit code is worth this wait.
END_OF_OUTPUT_MS = 100
QUIET_LOOK_MS = 500
MOST_READS_AT_END = 64  # a process outside the tree may hold the pipe and write for ever
# An adapter that has reported the loss of its session ends by itself.
ADAPTER_END_MS = 2_000


class Phase(Enum):
    DOWN = auto()
    REPLAYING = auto()
    CHECKING = auto()
    READY = auto()
    ENDING = auto()


class ServerLife:
    def __init__(
        self,
        command: ServerCommand,
        limits: ServerLimits,
        signals: TerminalSignals,
        notes: NoteWriter,
        make_session: Callable[[ServerLink], ClientSession],
    ) -> None:
        """`make_session` is called once, with this server as its other side."""
        self.generation: int = 0
        self.has_spoken: bool = False
        self.process: ServerProcess | None = None
        self.writer: LineWriter | None = None
        self.is_over: bool = False
        self.unstartable: Problem | None = None
        self._command = command
        self._limits = limits
        self._notes = notes
        self._signals = signals
        self._restarts = Restarts()
        self._phase = Phase.DOWN
        self._splitter = LineSplitter()
        self._own_id = ""  # the request of ours whose answer ends the phase
        self._is_closing = False
        self._why = ""  # why the server is killed
        self._stream_why = ""
        self._lost_why = ""  # why the adapter of a server over HTTP ends
        self._is_planned = False
        self._start_ns = NEVER_NS
        self._phase_due_ns = NEVER_NS
        self._end_of_output_ns = NEVER_NS
        self._close_ns = NEVER_NS
        self._check_ns = NEVER_NS
        self._retire_ns = NEVER_NS
        self._was_stopped = False
        self._started_ns = 0
        self._sign_of_life_ns = 0
        self._active_ns = 0
        self._last_stderr = ""
        self.session: ClientSession = make_session(self)

    # --- as the session sees it ----------------------------------------------------------------------------------

    @property
    def accepts(self) -> bool:
        return self._phase is Phase.READY

    def want(self) -> WrapFailure | None:
        now_ns = monotonic_ns()
        self._check_ns = min(self._check_ns, now_ns + LOOK_MS * NS_PER_MS)
        if self._is_closing:
            return WrapFailure("SHUTTING_DOWN", "was not sent: the connection is closing", Ending.NOT_STARTED)
        if self._phase is Phase.DOWN and self._start_ns == NEVER_NS:
            if (wait_ms := self._restarts.open_for_ms(now_ns)) > 0:
                return self._blocked(wait_ms)
            self.start()
        elif self._phase is Phase.READY and now_ns > self._sign_of_life_ns + PING_AFTER_MS * NS_PER_MS:
            # It was silent for long: a call must not be sent to a dead server.
            is_used = self.session.requests.in_state(RequestState.SENT, RequestState.STOPPING)
            if not is_used and self.probe():
                self._phase, self._phase_due_ns = Phase.CHECKING, now_ns + PING_LIMIT_MS * NS_PER_MS
        return None

    def _blocked(self, wait_ms: int) -> WrapFailure:
        what = f"was not sent: {self._command.words.too_often}"
        return WrapFailure("SERVICE_UNAVAILABLE", what, Ending.NOT_STARTED, retry_after_ms=wait_ms)

    def send(self, line: bytes) -> bool:
        if self.writer is None:
            return False
        self._active_ns = monotonic_ns()
        if self.writer.write_line(line):
            return True
        self._lose_stream("closed its stdin")
        return False

    def probe(self) -> bool:
        memory = self.session.memory
        if memory.can_probe:
            self.send(memory.probe_line(memory.own_id("ping")))
        return memory.can_probe

    def record_sign_of_life(self, message: RpcMessage) -> None:
        self._sign_of_life_ns = self._active_ns = monotonic_ns()
        self.has_spoken = True
        if not message.is_answer:
            return
        if self._phase is Phase.REPLAYING and message.id == self._own_id:
            self._finish_replay(message)
        elif self._phase is Phase.CHECKING:
            self._become_ready()

    def kill(self, why: str) -> None:
        if self.process is not None and not self._why:
            self._phase, self._phase_due_ns, self._why = Phase.ENDING, NEVER_NS, why
            self.process.kill(why)

    def _lose_stream(self, why: str) -> None:
        """Hold further messages: the server has closed a stream, most likely because it has just ended."""
        if self._phase is not Phase.ENDING:
            self._phase, self._phase_due_ns, self._stream_why = Phase.ENDING, NEVER_NS, why
            self._end_of_output_ns = monotonic_ns() + END_OF_OUTPUT_MS * NS_PER_MS

    def describe_output(self) -> tuple[str, int]:
        if self._command.is_adapter:  # its stderr is ours, not the server's
            return "", self.session.noise_lines
        stderr = self.process.stderr if self.process is not None else ""
        return stderr or self._last_stderr, self.session.noise_lines

    # --- start and replay ----------------------------------------------------------------------------------------

    def start(self) -> None:
        now_ns = monotonic_ns()
        self.generation += 1
        self._start_ns, self._started_ns, self._sign_of_life_ns, self._active_ns = NEVER_NS, now_ns, now_ns, now_ns
        self._why, self._lost_why, self._is_planned, self._was_stopped = "", "", False, False
        self.process = ServerProcess(self._command, self._signals)
        if self.process.control_fd < 0:
            self._end()
            return
        self._splitter = LineSplitter()
        self.writer = LineWriter(self.process.stdin_fd)
        self._plan_retirement()
        self._phase = Phase.READY
        self.greet()
        if self.accepts:
            self._become_ready()

    def greet(self) -> None:
        memory = self.session.memory
        if self._phase is not Phase.READY or memory.greeting is None:
            return
        self._phase, self._phase_due_ns = Phase.REPLAYING, NEVER_NS
        if self._limits.start_up_ms:
            self._phase_due_ns = monotonic_ns() + self._limits.start_up_ms * NS_PER_MS
        self._own_id = memory.own_id("replay")
        self.send(memory.greeting_line(self._own_id))

    def _become_ready(self) -> None:
        self._phase, self._phase_due_ns = Phase.READY, NEVER_NS
        self.session.send_held()

    def _finish_replay(self, message: RpcMessage) -> None:
        memory = self.session.memory
        if message.is_error or memory.greeting is None:
            self.kill("refused the greeting of the client")
            return
        if (greeting := Greeting.of(message.result)) != memory.greeting:
            self.note("the server has another protocol revision or other capabilities than before")
            memory.greeting = greeting
        for _, line in memory.lines_after_greeting():
            self.send(line)
        if self.generation > 1:
            self.note(self._command.words.ready_again.format(self.generation))
        self.session.keep_greeting(message)
        self.session.announce_restart(memory.greeting.announced_lists)
        self._become_ready()

    # --- input from the process ----------------------------------------------------------------------------------

    def read_stdout(self) -> bool:
        """Read once. Return whether there was anything."""
        if self.process is None:
            return False
        chunk = read_some(self.process.stdout_fd)
        if chunk is None:
            return False
        if not chunk:
            self.process.close_stream("stdout")
            if not self._is_closing:
                self._lose_stream("closed its stdout")
            return False
        for line in self._splitter.split(chunk):
            report = AdapterReport.of_line(line) if self._command.is_adapter and isinstance(line, bytes) else None
            if report is None:
                self.session.handle_server_line(line)
            elif report.id is None:
                self._lose_session(report)
            else:
                self._handle_report(report)
        return True

    def _lose_session(self, report: AdapterReport) -> None:
        """Hold further messages until the adapter has ended and another one has opened a new session."""
        self._lost_why = report.why
        if self._phase is not Phase.ENDING:
            self._lose_stream(report.why)
            self._end_of_output_ns = monotonic_ns() + ADAPTER_END_MS * NS_PER_MS

    def _handle_report(self, report: AdapterReport) -> None:
        """Answer a request that the server over HTTP has not answered."""
        request = self.session.requests.get(key_of(report.id))
        if isinstance(report.id, str) and report.id.startswith(OWN_PREFIX):
            if self._phase is Phase.REPLAYING and report.id == self._own_id:
                self.kill(report.why)
            else:
                error = {"code": CONNECTION_CLOSED, "message": f"the server {report.why}"}
                line = encode({"jsonrpc": "2.0", "id": report.id, "error": error})
                self.session.handle_server_line(line)
        elif request is None or request.state is RequestState.HELD:
            return
        elif request.state is RequestState.CANCELLED:
            self.session.requests.remove(request)
        else:
            if report.line and request.state is RequestState.SENT:
                request.line, request.is_unsent = report.line.encode(), True
                if request.may_be_repeated:
                    return  # in the next session
            self.session.guard.answer_lost(request, reported_failure(report))

    def read_stderr(self) -> bool:
        if self.process is None:
            return False
        chunk = read_some(self.process.stderr_fd)
        if chunk is None:
            return False
        if not chunk:
            self.process.close_stream("stderr")
            return False
        self.process.keep_stderr(chunk)
        self._notes.write(chunk)
        return True

    def read_news(self) -> None:
        if self.process is not None and self.process.has_ended():
            self._end()

    # --- the end of a process ------------------------------------------------------------------------------------

    def _end(self) -> None:
        """Deal with the end of the process and of everything it started."""
        process = self.process
        if process is None:
            return
        for read in (self.read_stdout, self.read_stderr):
            for _ in range(MOST_READS_AT_END):
                if not read():
                    break
        for line in self._splitter.finish():
            self.session.handle_server_line(line)
        self._last_stderr = process.stderr
        lost = self._describe_loss(process)
        self.process = self.writer = None
        self._phase = Phase.DOWN
        self._phase_due_ns = self._end_of_output_ns = self._retire_ns = NEVER_NS
        process.close()
        unusable = self._decide_restart(process)
        self.session.lose_server(lost, unusable)
        if unusable is None and self._start_ns == NEVER_NS and self.session.has_held:
            self.start()  # a message came while the server was being stopped as planned

    def _describe_loss(self, process: ServerProcess) -> WrapFailure:
        survivors = process.report.survivors if process.report is not None else []
        words = self._command.words
        if self._lost_why:
            what = f"was lost: the server {self._lost_why}"
            return WrapFailure("CONNECTION_LOST", what, words.ending_gone, note=words.lost_state)
        if self._why:
            what = f"was lost: the server {self._why}, {words.replaced}"
            return WrapFailure("HOST_REPLACED", what, words.ending_killed, survivors=survivors, note=words.lost_state)
        if process.report is not None and process.report.unstartable is not None:
            what = f"was not sent: the server {process.describe_end()}"
            problem = process.explain_unstartable()
            hint = problem.suggestion or problem.registered.hint
            return WrapFailure("CONNECT_FAILED", what, Ending.NOT_STARTED, advice=f"{hint[0].upper()}{hint[1:]}")
        what = f"was lost: {words.subject} {process.describe_end()}"
        return WrapFailure("CONNECTION_LOST", what, words.ending_gone, survivors=survivors, note=words.lost_state)

    def _decide_restart(self, process: ServerProcess) -> WrapFailure | None:
        """Plan the next start. Return why held requests cannot wait for it."""
        now_ns = monotonic_ns()
        report = process.report
        if report is not None and report.unstartable is not None and self.generation == 1:
            self.unstartable, self.is_over = process.explain_unstartable(), True
            return self._describe_loss(process)
        if self._is_closing:
            self.is_over = True
            return WrapFailure("SHUTTING_DOWN", "was not sent: the connection is closing", Ending.NOT_STARTED)
        if self._is_planned:
            self.note(self._command.words.planned)
            return None
        self._start_ns = self._restarts.record_crash(now_ns)
        why = self._lost_why or self._why
        self.note(f"the server {why}" if why else f"{self._command.words.subject} {process.describe_end()}")
        if (wait_ms := self._restarts.open_for_ms(now_ns)) > 0:
            self._start_ns = NEVER_NS
            self.note(f"{self._command.words.too_often}: {format_duration(wait_ms)}")
            return self._blocked(wait_ms)
        return None

    def close(self) -> None:
        """End the server: the client is gone."""
        if self._is_closing:
            return
        self._is_closing = True
        self._start_ns = NEVER_NS
        if self.process is None:
            self.is_over = True
        else:
            self._close_ns = monotonic_ns() + self._limits.shutdown_ms * NS_PER_MS
            self.close_stdin_when_written()

    def close_stdin_when_written(self) -> None:
        """Close the server's stdin, by which a server is asked to end, once everything is written."""
        if not self._is_closing or self.process is None or self.writer is None:
            return
        if not self.writer.has_unwritten:
            self.process.close_stream("stdin")
            self.writer = None

    def stop(self, signal_name: str, *, at_once: bool) -> None:
        """Stop the server because of a signal to this process."""
        self._is_closing = True
        if self.process is None:
            self.is_over = True
        elif at_once:
            self.process.kill(signal_name)
        else:
            self.process.stop(signal_name)

    # --- clocks --------------------------------------------------------------------------------------------------

    @property
    def _deadlines(self) -> tuple[tuple[int, Callable[[int], None]], ...]:
        supervisor_ns = self.process.next_ns if self.process is not None else None
        return (
            (self._start_ns, lambda now_ns: self.start()),
            (self._phase_due_ns, self._end_phase),
            (self._end_of_output_ns, self._end_silent_server),
            (self._close_ns, self._end_closing),
            (self._check_ns, self._check_frozen),
            (self._retire_ns, self._retire),
            (NEVER_NS if supervisor_ns is None else supervisor_ns, self._check_supervisor),
        )

    @property
    def next_due_ns(self) -> int:
        return min(at_ns for at_ns, _ in self._deadlines)

    def check_clocks(self, now_ns: int) -> None:
        for at_ns, act in self._deadlines:
            if now_ns >= at_ns:
                act(now_ns)

    def _check_supervisor(self, now_ns: int) -> None:
        if self.process is not None and self.process.is_lost(now_ns):
            self._end()

    def _end_phase(self, now_ns: int) -> None:
        self._phase_due_ns = NEVER_NS
        if self._phase is Phase.REPLAYING:
            self.kill("did not answer the greeting of the client")
        elif self._phase is Phase.CHECKING:
            self.kill("did not answer a ping")

    def _end_silent_server(self, now_ns: int) -> None:
        self._end_of_output_ns = NEVER_NS
        self.kill(self._stream_why)

    def _end_closing(self, now_ns: int) -> None:
        self._close_ns = NEVER_NS
        if self.process is not None:
            self.process.stop("client gone")

    def _check_frozen(self, now_ns: int) -> None:
        """Kill a server found stopped (SIGSTOP) at two checks in a row."""
        is_waiting = self.session.requests.has_waiting and self.process is not None
        self._check_ns = now_ns + LOOK_MS * NS_PER_MS if is_waiting else NEVER_NS
        is_stopped = self.process is not None and self.process.is_stopped()
        if is_stopped and self._was_stopped:
            self.kill(self._command.words.stopped)
        self._was_stopped = is_stopped

    def _plan_retirement(self) -> None:
        ages = []
        if self._limits.idle_shutdown_ms:
            ages.append(self._active_ns + self._limits.idle_shutdown_ms * NS_PER_MS)
        if self._limits.lifetime_ms:
            ages.append(self._started_ns + self._limits.lifetime_ms * NS_PER_MS)
        self._retire_ns = min(ages, default=NEVER_NS)

    def _retire(self, now_ns: int) -> None:
        """Stop a server that was idle for long or is too old, once neither side waits for the other."""
        self._plan_retirement()
        if now_ns < self._retire_ns:
            return
        if not self.session.is_quiet or self._phase is not Phase.READY or not self.session.memory.can_probe:
            self._retire_ns = now_ns + QUIET_LOOK_MS * NS_PER_MS
        elif self.process is not None:
            self._retire_ns, self._phase, self._is_planned = NEVER_NS, Phase.ENDING, True
            self.process.close_stream("stdin")
            self.writer = None
            self.process.stop("planned")

    def note(self, text: str) -> None:
        self._notes.note(f"shotclock: {text}")
