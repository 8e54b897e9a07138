"""`shotclock.run`: `subprocess.run` whose whole process tree is gone when it returns or raises.

The supervisor of the command holds its limits, and the calling thread reads the pipes. docs/howto/replace.md says
what differs from `subprocess.run`.
"""

from __future__ import annotations

import contextlib
import io
import locale
import os
import select
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from subprocess import PIPE
from typing import Any, TypeAlias

from ..calls.call import inherited_deadline
from ..calls.commands import problems_with
from ..core.limits import ClockKind
from ..supervise import ipc
from ..supervise.clock import monotonic_ns, process_began_ns
from ..supervise.command_pool import CommandSupervisor, pool
from ..supervise.command_task import CommandReport, CommandTask, Order, Output
from ..supervise.environment import CALL_VARIABLE, DEADLINE_VARIABLE
from ._caller_pipes import CallerPipes

NS_PER_S = 1_000_000_000
INTERRUPT_GRACE_MS = 250  # for a command to end after Ctrl-C, as in `subprocess.run`

Word: TypeAlias = str | bytes | os.PathLike[str] | os.PathLike[bytes]
Leftover: TypeAlias = dict[str, object]
"""The `pid` and `command` of a process."""

# Options of Popen that only a child of the calling process could have, or Windows, with the values that are accepted.
_REFUSED: dict[str, tuple[object, ...]] = {
    "preexec_fn": (None,),
    "close_fds": (True,),
    "pass_fds": ((), []),
    "restore_signals": (True,),
    "startupinfo": (None,),
    "creationflags": (0,),
    "user": (None,),
    "group": (None,),
    "extra_groups": (None,),
    "pipesize": (-1,),
    "process_group": (None, -1, 0),  # every command has a group of its own
}


class _Remains:
    leftovers: Sequence[Leftover] = ()
    """The processes that outlived the command and were stopped."""
    survivors: Sequence[Leftover] = ()
    """The processes that could not be stopped."""


class CompletedProcess(subprocess.CompletedProcess[Any], _Remains):
    def check_returncode(self) -> None:
        if self.returncode:
            error = CalledProcessError(self.returncode, self.args, self.stdout, self.stderr)
            error.leftovers, error.survivors = self.leftovers, self.survivors
            raise error


class CalledProcessError(subprocess.CalledProcessError, _Remains):
    pass


class TimeoutExpired(subprocess.TimeoutExpired, _Remains):
    pass


class IdleExpired(TimeoutExpired):
    """The command wrote nothing for `timeout` seconds."""

    def __str__(self) -> str:
        return f"Command {self.cmd!r} wrote nothing for {self.timeout:g} seconds"


class SupervisorLost(subprocess.SubprocessError, _Remains):
    """The supervisor of the command was killed, so the command was killed, and its exit code is unknown."""


class Cancelled(Exception):
    """The waiting for a command was cancelled, from another thread."""


def run(
    args: Word | Sequence[Word],
    *,
    input: Any = None,
    capture_output: bool = False,
    timeout: float | None = None,
    idle: float | None = None,
    check: bool = False,
    **options: Any,
) -> CompletedProcess:
    """Run a command as `subprocess.run` does. Everything that it started is gone when this returns or raises.

    `idle` is a limit on the silence of the command, in seconds; `options` are those of `subprocess.Popen`.
    """
    return Command(args, input=input, capture_output=capture_output, **options).run(timeout, idle, check)


class Command:
    """The arguments of a call of `run`, checked."""

    def __init__(
        self,
        args: Word | Sequence[Word],
        *,
        input: Any = None,
        capture_output: bool = False,
        bufsize: int = -1,  # output is read as it comes
        executable: Word | None = None,
        stdin: Any = None,
        stdout: Any = None,
        stderr: Any = None,
        shell: bool = False,
        cwd: Word | None = None,
        env: Mapping[Any, Any] | None = None,
        universal_newlines: bool | None = None,
        text: bool | None = None,
        encoding: str | None = None,
        errors: str | None = None,
        start_new_session: bool = False,
        umask: int = -1,
        **others: object,
    ) -> None:
        for name, given in others.items():
            if name not in _REFUSED:
                raise TypeError(f"run() got an unexpected keyword argument {name!r}")
            if given not in _REFUSED[name]:
                raise ValueError(f"run() does not support {name}={given!r}; use subprocess.run for it")
        if input is not None and stdin is not None:
            raise ValueError("stdin and input arguments may not both be used.")
        if capture_output and (stdout is not None or stderr is not None):
            raise ValueError("stdout and stderr arguments may not be used with capture_output.")
        if text is not None and universal_newlines is not None and bool(text) != bool(universal_newlines):
            raise subprocess.SubprocessError("text and universal_newlines may not be different.")
        self.args = args
        self._streams = (
            stdin if input is None else PIPE,
            PIPE if capture_output else stdout,
            PIPE if capture_output else stderr,
        )
        self._encoding, self._errors = None, errors
        if encoding or errors or text or universal_newlines:
            named = io.text_encoding(encoding, 3)
            self._encoding = locale.getencoding() if named == "locale" else named
        if self._encoding is not None and input is not None:
            input = input.encode(self._encoding, errors or "strict")
        self._input = memoryview(b"" if input is None else input).cast("B")
        self._task = _task_of(args, shell, cwd, env, executable)
        self._deadline_ns, self._on_start = self._join_call()
        self._task.new_session, self._task.umask = start_new_session, _own_umask() if umask < 0 else umask
        sys.audit("subprocess.Popen", self._task.executable or self._task.argv[0], args, cwd, env)

    def run(self, timeout: float | None, idle: float | None, check: bool, wake_fd: int = -1) -> CompletedProcess:
        """Run it to its end. Once `wake_fd` can be read, it is killed and Cancelled is raised."""
        task = self._task
        limit_s = self._set_limits(timeout, idle)
        with contextlib.closing(CallerPipes(*self._streams, self._input)) as pipes:
            report = _perform(task, pipes, wake_fd, self._on_start)
            captured = pipes.finish()
        return self._conclude(report, captured, limit_s, idle or 0, check)

    def _join_call(self) -> tuple[int | None, Callable[[int], None] | None]:
        """Return the deadline of the call around us, and where to note the command as its process."""
        # What remained at the start of this process, if the deadline is not exact.
        seen_ns = monotonic_ns() if DEADLINE_VARIABLE in os.environ else process_began_ns()
        deadlines = [inherited_deadline(os.environ, seen_ns).deadline]
        on_start = None
        # Slow to import, and where it is not imported, no call runs. It matters if calls share this process.
        context = sys.modules.get("shotclock.worker.context")
        if context is not None and (recorder := context.record_starts_elsewhere()) is not None:
            self._task.env[CALL_VARIABLE], on_start = recorder
            self._task.announced = True
            deadlines.append(context.current_scope.get().deadline)
        return min((deadline.at_ns for deadline in deadlines if deadline is not None), default=None), on_start

    def _set_limits(self, timeout: float | None, idle: float | None) -> float:
        """Set the earlier of the timeout and the deadline of the call around us. Return the seconds until then."""
        task = self._task
        now_ns = task.started_ns = monotonic_ns()
        if timeout is not None:
            task.bell_ns = now_ns + int(timeout * NS_PER_S)
        if idle is not None:
            if idle <= 0:
                raise ValueError("idle is a positive number of seconds")
            task.output, task.idle_ms = Output.RELAY.name, max(1, int(idle * 1000))
        if self._deadline_ns is None or (task.bell_ns is not None and task.bell_ns <= self._deadline_ns):
            return timeout or 0
        task.bell_ns = self._deadline_ns
        remaining_s = (self._deadline_ns - now_ns) / NS_PER_S
        if remaining_s <= 0:
            raise TimeoutExpired(self.args, remaining_s)  # nothing was started
        return remaining_s

    def _conclude(
        self, report: CommandReport, captured: list[bytes | None], limit_s: float, idle_s: float, check: bool
    ) -> CompletedProcess:
        if report.unstartable is not None:
            step, number = report.unstartable
            task = self._task
            path = {"exec": task.executable or task.argv[0], "cwd": task.cwd}.get(step)
            raise OSError(number, os.strerror(number), path)
        ended: Any
        if report.fired is not None:
            kind, after_s = (IdleExpired, idle_s) if report.fired == ClockKind.IDLE.value else (TimeoutExpired, limit_s)
            # Bytes, and None for nothing, as in `subprocess`.
            ended = kind(self.args, after_s, *(output or None for output in captured))
        elif report.lost:
            ended = SupervisorLost(f"the supervisor of {self.args!r} was killed, so the command was killed as well")
        elif report.unwritten:
            raise OSError(report.unwritten, os.strerror(report.unwritten))  # the output could not be passed on
        else:
            assert report.status is not None
            texts = [self._decode(output) for output in captured]
            ended = CompletedProcess(self.args, report.status, *texts)
        ended.survivors = report.survivors
        ended.leftovers = [left for left in report.leaked if left not in report.survivors]
        if not isinstance(ended, CompletedProcess):
            raise ended
        if check:
            ended.check_returncode()
        return ended

    def _decode(self, output: bytes | None) -> Any:
        if output is None or self._encoding is None:
            return output
        return io.TextIOWrapper(io.BytesIO(output), self._encoding, self._errors).read()


def _task_of(
    args: Word | Sequence[Word], shell: bool, cwd: Word | None, env: Mapping[Any, Any] | None, executable: Word | None
) -> CommandTask:
    if isinstance(args, str | bytes):
        words: list[Any] = [args]
    elif isinstance(args, os.PathLike):
        if shell:
            raise TypeError("path-like args is not allowed when shell is true")
        words = [args]
    else:
        words = list(args)
    argv = [os.fsdecode(word) for word in words]
    program = None if executable is None else os.fsdecode(executable)
    if shell:
        argv, program = [program or "/bin/sh", "-c", *argv], None
    # This directory may have changed since the supervisor was started.
    folder = os.getcwd() if cwd is None else os.path.join(os.getcwd(), os.fsdecode(cwd))
    if env is None:
        variables = dict(os.environ)
    else:
        variables = {os.fsdecode(name): os.fsdecode(value) for name, value in env.items()}
    if problems := problems_with([*argv, program or ""], {} if env is None else variables, folder):
        raise ValueError(problems[0]["message"])
    return CommandTask(argv, variables, folder, output=Output.INHERIT.name, executable=program, announced=False)


def _own_umask() -> int:
    """Return the umask of this process, which other threads share: it can be read only as text."""
    try:
        with open("/proc/self/status", "rb") as file:
            return next((int(line[6:], 8) for line in file if line.startswith(b"Umask:")), -1)
    except OSError:
        return -1


def _perform(
    task: CommandTask, pipes: CallerPipes, wake_fd: int, on_start: Callable[[int], None] | None
) -> CommandReport:
    try:
        supervisor = pool.start(task, pipes.handed, on_start)
    except ipc.Broken as error:
        raise SupervisorLost(f"no supervisor could be started: {error}") from error
    try:
        pipes.close_theirs()
        _follow(supervisor, pipes, wake_fd)
        return supervisor.conclude()
    except BaseException as error:
        if supervisor.client.fate is None:
            _stop(supervisor, error)
        raise
    finally:
        pool.release(supervisor)


def _follow(supervisor: CommandSupervisor, pipes: CallerPipes, wake_fd: int) -> None:
    poller = select.poll()
    poller.register(supervisor.control, select.POLLIN)
    if wake_fd >= 0:
        poller.register(wake_fd, select.POLLIN)
    for fd, event in pipes.open_ends:
        poller.register(fd, event)
    while supervisor.client.fate is None:
        for fd in supervisor.wait(poller):
            if fd == wake_fd:
                raise Cancelled
            if fd != supervisor.control.fileno() and not pipes.move(fd):
                poller.unregister(fd)


def _stop(supervisor: CommandSupervisor, error: BaseException) -> None:
    """Stop the command before the exception of a signal handler is raised. Another exception does not wait for it."""
    if isinstance(error, KeyboardInterrupt):
        supervisor.order(Order.GRACE, INTERRUPT_GRACE_MS)
        supervisor.order(Order.STOP, "SIGINT")
    else:
        supervisor.order(Order.KILL, type(error).__name__)
    poller = select.poll()
    poller.register(supervisor.control, select.POLLIN)
    while supervisor.client.fate is None:
        supervisor.wait(poller)
    supervisor.conclude()


async def arun(
    args: Word | Sequence[Word],
    *,
    input: Any = None,
    capture_output: bool = False,
    timeout: float | None = None,
    idle: float | None = None,
    check: bool = False,
    **options: Any,
) -> CompletedProcess:
    """Run a command as `run` does, in a thread of its own, so that any number may wait at once.

    A cancellation kills the command first.
    """
    import asyncio  # slow to import, and `run` does without it

    command = Command(args, input=input, capture_output=capture_output, **options)
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[CompletedProcess] = loop.create_future()
    wake_fd, cancel_fd = os.pipe()

    def resolve(result: CompletedProcess | None, error: BaseException | None) -> None:
        if ended.done():
            return
        if error is not None:
            ended.set_exception(error)
        elif result is not None:
            ended.set_result(result)

    def work() -> None:
        result, failure = None, None
        try:
            result = command.run(timeout, idle, check, wake_fd)
        except BaseException as error:
            failure = error
        os.close(wake_fd)
        with contextlib.suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(resolve, result, failure)

    threading.Thread(target=work, name="shotclock-arun", daemon=True).start()
    try:
        return await asyncio.shield(ended)
    except asyncio.CancelledError:
        os.write(cancel_fd, b"x")
        # Bounded by the kill and its verification. A second cancellation does not wait for them.
        await asyncio.wait([ended])
        raise
    finally:
        os.close(cancel_fd)
        if ended.done() and not ended.cancelled():
            ended.exception()  # it was seen
