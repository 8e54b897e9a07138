"""The runner of a command in the background: it holds the command's log, owner and readiness, and stores its end.

    caller ═ channel ═ runner ── supervisor ── command

The supervisor holds the limits, and kills the command if the runner dies. The runner is light: no runtime, no event
loop. A caller that waits has a channel to it, on which it learns of the start, readiness, the end of its budget and the
end of the command; it may send a stop, the end of its budget, and the descriptors to which output is relayed.
"""

from __future__ import annotations

import contextlib
import errno
import os
import select
from collections.abc import Callable
from pathlib import Path

from ..calls.call import Call, Outcome, admit, answer
from ..calls.commands import assign, judge
from ..calls.outcomes import outcome_of_error
from ..core.envelope import Problem
from ..core.limits import NS_PER_MS, ClockKind, Clocks, format_duration
from ..core.value_types import replace
from ..dispatch.background_command import BackgroundCommand, record_end
from ..dispatch.job_log import Log, Logbook
from ..store.home import ATTEMPT_MS
from ..store.jobs import Job
from ..store.store import Store
from ..supervise import foreground, ipc, kernel
from ..supervise.clock import monotonic_ns, wall_time
from ..supervise.command_task import (
    PIPE_ROOM,
    RELAY_HELD,
    Capture,
    CommandReport,
    CommandTask,
    News,
    Order,
    Output,
    takes_more,
)
from ..supervise.environment import without_questions
from ..supervise.foreground import OWNER_GONE, PolledSupervisor, TerminalSignals
from ..supervise.kernel import this_process
from ..supervise.owner import OwnerWatch
from ..supervise.runners import runners_folder, withdraw
from ..supervise.supervisor import FLUSH_LIMIT_MS
from ..supervise.unsupervised import CHANNEL
from ._ready import LineWatch, Probe

RUNNER_NAME = "shotclock-job"
# Between two looks for a request to stop.
LOOK_MS = 250
# Between two heartbeats. A caller calls a runner silent after a minute.
BEAT_MS = 5_000
SEND_LIMIT_S = 1.0
# How long a caller may take to give its descriptors to a command that has ended.
RELAY_LIMIT_MS = 30_000
LOG_TAIL = 4_000
_CHUNK = 65536
JOB_FIELDS = ("job_id", "name", "log")  # added to the data of a command
# Reasons of a stop, for the supervisor's report; another one is OWNER_GONE.
NOT_READY, STOPPED, STORE_GONE = "not ready", "job stopped", "the store was removed"


class ToCaller:
    """Kinds of messages from a runner to its caller, the first field. The docstrings name the other fields."""

    STARTED = "started"
    """The pid of the command."""
    READY = "ready"
    OVER = "over"
    """The caller's budget is used up, and its descriptors are closed."""
    ENDED = "ended"
    """The envelope is in the store."""


class ToRunner:
    """Kinds of messages from a caller to a runner, likewise."""

    STOP = "stop"
    """The name of the signal that the caller received."""
    KILL = "kill"
    """The same, for a second signal."""
    WAIT = "wait"
    """The instant at which the budget of the caller ends. Its stdout and stderr may come with the message."""


def main(home: str, job_id: str) -> None:
    """Run a job. Errors before it is taken go to stderr, which is the job's log."""
    kernel.name_process(RUNNER_NAME)
    os.set_inheritable(CHANNEL, False)
    channel = ipc.Socket(fileno=CHANNEL)
    with Store.open(Path(home)) as store:
        job = store.jobs.assign_runner(job_id, this_process(), wall_time())
        if job is not None:  # otherwise it has ended
            _run(store, job, channel)
    withdraw(runners_folder(home))
    os._exit(0)


def _run(store: Store, job: Job, channel: ipc.Socket) -> None:
    spec = BackgroundCommand.of(job)
    call = admit("exec", Clocks(**spec.clocks))
    run = CommandRun(store, job, spec, call, channel)
    try:
        outcome = run.perform()
    except Exception as error:
        outcome = outcome_of_error(error)
    envelope = answer(call, outcome)
    envelope.meta["job_id"] = job.id
    record_end(store, job, envelope, run.is_store_gone)
    run.send(ToCaller.ENDED)


class CommandRun:
    """One command from its start to its end."""

    def __init__(self, store: Store, job: Job, spec: BackgroundCommand, call: Call, channel: ipc.Socket) -> None:
        self._store, self._job, self._spec, self._call = store, job, spec, call
        self._log_path = job.log_path or os.devnull
        self._channel: ipc.Socket | None = channel
        self._requests = ipc.ReaderWithDescriptors(channel)
        self._sign = spec.sign
        self._is_ready = False
        self._is_stopping = False
        self._probe: Probe | None = None
        self._line_watch = LineWatch(self._sign.output) if self._sign.output is not None else None
        self._owner: OwnerWatch | None = None
        self._streams: list[_Stream] = []
        self._look_ns = self._beat_ns = monotonic_ns()
        self._ready_ns = call.started_ns + spec.ready_within_ms * NS_PER_MS if self._sign.is_asked else None
        self._over_ns: int | None = None
        self._store_file = os.stat(store.path)
        self._unsaved: dict[str, object] = {}

    def perform(self) -> Outcome:
        spec = self._spec
        log_file = os.dup(2)
        task = self._assign()
        signals = TerminalSignals()
        self._open_streams(task, Logbook(self._log_path, log_file))
        os.chdir("/")
        started = foreground.PolledSupervisor.start(
            task, signals, ours=[CHANNEL, *(stream.fd for stream in self._streams)]
        )
        kernel.replace_by_null(0)
        for number in (1, 2):  # the pipes end with the command, and an error of ours is logged
            os.dup2(log_file, number)
        if isinstance(started, CommandReport):
            return self._judge(task, started)
        if (owner := spec.owner_process) is not None:
            self._owner = OwnerWatch(owner)
        with contextlib.closing(started):
            self._watch(started, signals)
        if self._probe is not None:
            self._probe.give_up()
        report = started.finish(signals)
        self._flush(report)
        if spec.captures:
            task.output = Output.CAPTURE.name
            report.stdout, report.stderr = (each.capture.finish() for each in self._streams if each.capture is not None)
        report.unwritten = next((stream.trouble for stream in self._streams if stream.trouble), 0)
        return self._judge(task, report)

    def _assign(self) -> CommandTask:
        spec = self._spec
        task = assign(
            self._call,
            spec.argv,
            env=spec.env,
            base_env=without_questions(os.environ) if spec.quiet else os.environ,
            quiet=False,
            cwd=spec.cwd,
            stop_signal=spec.stop_signal,
        )
        # The supervisor notices silence only if it sees the output.
        task.output = Output.RELAY.name if task.idle_ms else Output.INHERIT.name
        task.stdin = spec.passes_stdin
        task.runners = runners_folder(str(self._store.home))
        return task

    def _open_streams(self, task: CommandTask, log: Logbook) -> None:
        """Replace stdout and stderr, which the command inherits, by pipes to this process."""
        for numbers in ((1, 2),) if self._spec.is_one_output else ((1,), (2,)):
            read_end, write_end = os.pipe()
            for number in numbers:
                os.dup2(write_end, number)
            os.close(write_end)
            capture = None
            if self._spec.captures:
                capture = Capture(self._spec.output_limit, task.spill_stdout if numbers[0] == 1 else task.spill_stderr)
            self._streams.append(
                _Stream(read_end, log, capture, relays=self._spec.budget_ms is not None and capture is None)
            )

    def _watch(self, supervisor: PolledSupervisor, signals: TerminalSignals) -> None:
        """Wait for the end of the command, or of its supervisor."""
        while supervisor.client.fate is None:
            while (order := signals.next_order()) is not None:
                if order[0] in (Order.STOP, Order.KILL):
                    self._stop(supervisor, order[0], order[1])
            self._keep_time(supervisor)
            wait_ms = supervisor.wait_ms(self._look_ns, self._ready_ns, None if self._is_stopping else self._over_ns)
            ready = self._poll(wait_ms, supervisor.control.fileno(), signals.fd)
            if self._channel is not None and self._channel.fileno() in ready:
                self._handle_requests(supervisor)
            if self._probe is not None and self._probe.fd in ready:
                self._become_ready()
            for message in supervisor.handle(ready):
                if message[0] == News.STARTED:
                    self._record_start(message[1], supervisor.client.pid)

    def _poll(self, wait_ms: int, *fds: int) -> set[int]:
        """Wait for an event, and handle output. Return the descriptors that are ready."""
        poller = select.poll()
        own = (self._channel.fileno() if self._channel is not None else -1, self._probe.fd if self._probe else -1)
        owner = self._owner.fd if self._owner is not None else -1
        for fd in (*fds, *own, owner):
            if fd >= 0:
                poller.register(fd, select.POLLIN)
        for stream in self._streams:
            stream.register(poller)
        ready = {fd for fd, _ in poller.poll(wait_ms)}
        for stream in self._streams:
            stream.handle(ready, self._find_ready_line)
        if owner in ready:
            self._look_ns = monotonic_ns()
        return ready

    def _find_ready_line(self, chunk: bytes) -> None:
        if self._line_watch is not None and not self._is_ready and self._line_watch.finds(chunk):
            self._become_ready()

    def _keep_time(self, supervisor: PolledSupervisor) -> None:
        now_ns = monotonic_ns()
        if self._over_ns is not None and now_ns >= self._over_ns and not self._is_stopping:
            self._leave_caller()
        if self._ready_ns is not None and now_ns >= self._ready_ns:
            self._ready_ns = None
            self._stop(supervisor, Order.STOP, NOT_READY)
        if now_ns < self._look_ns:
            return
        self._look_ns = now_ns + LOOK_MS * NS_PER_MS
        if self._owner is not None and self._owner.is_gone:
            self._owner.close()
            self._owner = None
            self._is_stopping, self._ready_ns = True, None
            supervisor.stop_for_owner()
        if self.is_store_gone():  # no caller can find the job any more
            self._stop(supervisor, Order.STOP, STORE_GONE)
        with contextlib.suppress(Exception):  # a busy store is no reason to stop, nor to wait
            current = self._store.jobs.get(self._job.id)
            if current is None or current.cancel_requested_at is not None:
                self._stop(supervisor, Order.STOP, STOPPED, None if current is None else current.spec["grace_ms"])
            if now_ns >= self._beat_ns:
                self._beat_ns = now_ns + BEAT_MS * NS_PER_MS
                self._store.jobs.beat(self._job.id, wall_time(), attempt=self._job.attempt, wait_ms=0)
            if self._unsaved:
                self._save(wait_ms=0)

    def is_store_gone(self) -> bool:
        """Return whether the store was removed or replaced."""
        try:
            return not os.path.samestat(os.stat(self._store.path), self._store_file)
        except FileNotFoundError:
            return True
        except OSError:
            return False

    def _save(self, *, wait_ms: int = ATTEMPT_MS, **changes: object) -> None:
        """Record facts about the job in the store; if it is busy, at a later look."""
        self._unsaved |= changes
        with contextlib.suppress(Exception):
            self._store.jobs.amend(self._job.id, self._unsaved, wait_ms=wait_ms)
            self._unsaved = {}

    def _stop(self, supervisor: PolledSupervisor, kind: str, why: str, grace_ms: int | None = None) -> None:
        """Stop the command, once; a kill may follow."""
        if self._is_stopping and kind == Order.STOP:
            return
        self._is_stopping, self._ready_ns = True, None
        if grace_ms is not None:
            supervisor.order(Order.GRACE, grace_ms)
        supervisor.order_by_signal(kind, why)

    def _record_start(self, pid: int, supervisor: int) -> None:
        self._save(pid=pid)
        self.send(ToCaller.STARTED, pid)
        if not self._sign.is_asked:
            self._become_ready()
        elif self._line_watch is None:
            self._probe = Probe(self._sign, lambda: kernel.descendants(supervisor))
            self._probe.start()

    def _become_ready(self) -> None:
        if self._probe is not None:
            self._probe.give_up()
            self._probe = None
        if self._is_ready:
            return
        self._is_ready, self._ready_ns = True, None
        self._save(ready_at_ms=wall_time().ms)
        self.send(ToCaller.READY)

    def _handle_requests(self, supervisor: PolledSupervisor | None) -> None:
        """Obey the caller. Without a supervisor there is nothing to stop any more."""
        try:
            requests = self._requests.receive()
        except BlockingIOError:
            return
        except ipc.Broken:
            self._lose_caller()
            return
        for kind, *why in requests:
            if kind == ToRunner.WAIT:
                self._over_ns = why[0]
                for stream, fd in zip(self._streams, self._requests.take_descriptors(), strict=False):
                    stream.relay_to = fd
            elif supervisor is not None:
                self._stop(supervisor, Order.STOP if kind == ToRunner.STOP else Order.KILL, *why)

    def send(self, *message: object) -> None:
        """Send a message to the caller, if it still waits."""
        if self._channel is None:
            return
        self._channel.settimeout(SEND_LIMIT_S)
        try:
            ipc.send(self._channel, message)
        except ipc.Broken:
            self._lose_caller()

    def _leave_caller(self) -> None:
        self._over_ns = None
        for stream in self._streams:
            stream.stop_relaying()
        self.send(ToCaller.OVER)
        self._lose_caller()

    def _lose_caller(self) -> None:
        if self._channel is not None:
            self._channel.close()
            self._channel = None
        for stream in self._streams:
            stream.stop_relaying()

    def _flush(self, report: CommandReport) -> None:
        """Read the rest of the output, and relay it while the caller waits; not for long if the command was stopped."""
        is_cut_short = report.fired is not None or report.stopped is not None
        until_ns = monotonic_ns() + (FLUSH_LIMIT_MS if is_cut_short else RELAY_LIMIT_MS) * NS_PER_MS
        self._ready_ns = None
        if is_cut_short:
            self._over_ns = None
        while any(stream.has_more() for stream in self._streams):
            now_ns = monotonic_ns()
            until_over_ms = LOOK_MS if self._over_ns is None else -(-(self._over_ns - now_ns) // NS_PER_MS)
            ready = self._poll(max(0, min(LOOK_MS, until_over_ms)))
            if self._channel is not None and self._channel.fileno() in ready:
                self._handle_requests(None)
            if self._over_ns is not None and monotonic_ns() >= self._over_ns:
                self._leave_caller()
            if self._over_ns is None and monotonic_ns() >= until_ns:
                for stream in self._streams:
                    stream.stop_relaying()

    def _judge(self, task: CommandTask, report: CommandReport) -> Outcome:
        outcome = judge(self._call, task, report)
        data = outcome.data if isinstance(outcome.data, dict) else {}
        outcome.data = {**data, **dict(zip(JOB_FIELDS, (self._job.id, self._spec.name, self._log_path), strict=True))}
        if report.unstartable is None:
            outcome.problem = self._explain(report, outcome.problem)
        return outcome

    def _explain(self, report: CommandReport, problem: object) -> Problem | None:
        spec = self._spec
        found = problem if isinstance(problem, Problem) else None
        if report.stopped == OWNER_GONE:
            message = f"{spec.label} was stopped because its owner ended: {spec.describe_owner()}"
            return Problem("CANCELLED", message, context={"reason": OWNER_GONE})
        if report.stopped == STOPPED:
            return Problem("CANCELLED", "the job was stopped", context={"reason": STOPPED})
        if report.stopped == NOT_READY:
            watch = self._probe or self._line_watch
            trouble = watch.trouble if watch is not None else ""
            message = f"{spec.label} was not ready within {format_duration(spec.ready_within_ms)}: {trouble}"
            return Problem("NOT_READY", message, context={"log_tail": Log(self._log_path).tail(LOG_TAIL)})
        if report.fired == ClockKind.TIMEOUT and spec.budget_ms is None and found is not None:
            lifetime = format_duration(self._call.bound.limit_ms)
            message = f"{spec.label} was stopped at the end of its lifetime of {lifetime}"
            found = replace(found, message=message, suggestion="restart it, or give it a longer --lifetime")
        if self._is_ready or report.stopped is not None:
            return found
        ended = found.message if found is not None else "the command ended with exit code 0"
        found = found or Problem("COMMAND_FAILED", "")
        context = {**(found.context or {}), "log_tail": Log(self._log_path).tail(LOG_TAIL)}
        return replace(found, message=f"{ended} before it was ready", context=context)


class _Stream:
    """Pipe from the command: its output goes to the log, into memory, and to the caller."""

    def __init__(self, fd: int, log: Logbook, capture: Capture | None, *, relays: bool) -> None:
        self.fd, self._log, self.capture, self._relays = fd, log, capture, relays
        self.relay_to = -1
        self._held = bytearray()
        self.trouble = 0  # the errno of a failed relay
        os.set_blocking(fd, False)

    def register(self, poller: select.poll) -> None:
        if self.fd >= 0 and len(self._held) < RELAY_HELD:
            poller.register(self.fd, select.POLLIN)
        if self._held and self.relay_to >= 0:
            poller.register(self.relay_to, select.POLLOUT)

    def handle(self, ready: set[int], look: Callable[[bytes], None]) -> None:
        if self.fd in ready and self.fd >= 0:
            self._read(look)
        if self.relay_to in ready and self._held and takes_more(self.relay_to):  # both may be one pipe
            self._write()

    def has_more(self) -> bool:
        """Return whether there is output to read or to relay now."""
        return bool(self._held and self._relays) or (self.fd >= 0 and bool(select.select([self.fd], [], [], 0)[0]))

    def _read(self, look: Callable[[bytes], None]) -> None:
        try:
            chunk = os.read(self.fd, _CHUNK)
        except (BlockingIOError, InterruptedError):
            return
        if not chunk:
            self._close()
            return
        self._log.write(chunk)
        look(chunk)
        if self.capture is not None:
            self.capture.add(chunk)
        if self._relays:
            self._held += chunk

    def _write(self) -> None:
        try:
            del self._held[: os.write(self.relay_to, self._held[:PIPE_ROOM])]
        except OSError as error:  # the reader left: closing our end tells the command as it would without us
            self.trouble = 0 if error.errno == errno.EPIPE else error.errno or errno.EIO
            self.stop_relaying()
            self._close()

    def stop_relaying(self) -> None:
        self._relays = False
        self._held.clear()
        if self.relay_to >= 0:
            os.close(self.relay_to)
            self.relay_to = -1

    def _close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
