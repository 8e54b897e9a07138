"""The commands of one connection to `shotclock serve shell`, each under a supervisor of its own.

They are stopped when the connection ends. If this process is killed, their supervisors kill them.
"""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import Callable

from ...calls.call import Call, Outcome
from ...calls.commands import judge
from ...calls.outcomes import outcome_of_error
from ...calls.runtime import Runtime
from ...calls.supervised_commands import InteractiveProcess
from ...core.envelope import Problem
from ...core.errors import Ending, Failure, SideEffects
from ...core.limits import NS_PER_MS
from ...core.value_types import value
from ...supervise.clock import monotonic_ns
from ...supervise.command_task import spill_path
from ...supervise.environment import without_questions
from ._shell_output import JobOutput

MOST_RUNNING = 16
MOST_ENDED = 32  # the output of older ones is removed
GRACE_MS = 2_000  # between the request to stop and the kill
CLOSE_GRACE_MS = 1_000  # the same at the end of the connection: clients kill a server that has not ended after 2 s
# How long a process waits for input before that is reported.
INPUT_WAIT_MS = 3_000
WAIT_SEEN_MS = INPUT_WAIT_MS * 2 + 1_000  # such a report is repeated; without the next one, the wait has ended
LAST_OUTPUT_S = 2.0  # for the rest of the output of an ended command, which its supervisor has already written
# The backstop of a call, above its budget: stopping a command takes the grace and a search for survivors.
BACKSTOP_MARGIN_MS = 30_000
WRITE_LIMIT_S = 5.0  # exhausted by a command that does not read its input


@value
class ShellLimits:
    """`timeout_ms` and `idle_ms` are of `run`; 0 is no limit."""

    timeout_ms: int = 120_000
    idle_ms: int = 0
    budget_ms: int = 45_000

    @property
    def operation_timeout_ms(self) -> int:
        return self.budget_ms * 2 + BACKSTOP_MARGIN_MS


class ShellJob:
    """A command of the connection."""

    def __init__(self, id: str, command: str, cwd: str, call: Call) -> None:
        self.id = id
        self.command = command
        self.cwd = cwd
        self.output: JobOutput = JobOutput(spill_path(f"{call.request_id}.log"))
        self.outcome: Outcome | None = None  # of the ended command
        self.stop_reason: str = ""
        self.is_wait_reported: bool = False  # in an answer
        self._input_wanted: dict[str, object] = {}
        self._wanted_ns = 0
        self.is_ready: bool | None = None  # None: nothing was to be waited for
        self._ready_output = b""
        self._process: InteractiveProcess | None = None
        self._started_ns, self._ended_ns = monotonic_ns(), 0
        self._waiters: set[asyncio.Future[None]] = set()

    @property
    def has_ended(self) -> bool:
        return self.outcome is not None

    @property
    def input_wanted(self) -> dict[str, object]:
        """Return the process that waits for input, as `INPUT_WANTED` describes it; nothing if that was long ago."""
        return self._input_wanted if monotonic_ns() - self._wanted_ns < WAIT_SEEN_MS * NS_PER_MS else {}

    @property
    def has_new_wait(self) -> bool:
        return bool(self.input_wanted) and not self.is_wait_reported

    @property
    def running_ms(self) -> int:
        return ((self._ended_ns or monotonic_ns()) - self._started_ns) // NS_PER_MS

    def expect_output(self, text: str) -> None:
        """Be ready once the output contains this text."""
        self._ready_output, self.is_ready = text.encode(), False

    async def until(self, is_true: Callable[[], bool], limit_s: float) -> bool:
        """Wait until something is true of the job. Returns False if the limit comes first."""
        loop = asyncio.get_running_loop()
        end_s = loop.time() + limit_s
        while not is_true():
            left_s = end_s - loop.time()
            if left_s <= 0:
                return False
            change: asyncio.Future[None] = loop.create_future()
            self._waiters.add(change)
            try:
                await asyncio.wait([change], timeout=left_s)
            finally:
                self._waiters.discard(change)
        return True

    async def write(self, content: bytes, *, end: bool) -> None:
        """Write to stdin. Raises Failure."""
        process = self._process
        if self.has_ended:
            raise Failure("CONFLICT", f"{self.id} has ended", suggestion="start it again")
        if process is None:
            raise Failure("CONFLICT", f"{self.id} is not started yet", suggestion="call again")
        if not process.has_stdin:
            message = f"the stdin of {self.id} is closed, or was empty from the beginning as for every `run`"
            raise Failure("CONFLICT", message, suggestion="use `start` for a command that reads input")
        self._forget_wait()
        try:
            async with asyncio.timeout(WRITE_LIMIT_S):
                await process.write(content)
        except BrokenPipeError:
            raise Failure("CONFLICT", f"{self.id} has closed its stdin", suggestion="look at its logs") from None
        except TimeoutError:
            message = f"{self.id} did not read its input within {WRITE_LIMIT_S:g} s; a part of it may be written"
            hint = "look at its logs, or stop it"
            raise Failure("UNAVAILABLE", message, suggestion=hint, side_effects=SideEffects.UNKNOWN) from None
        if end:
            process.end_stdin()

    async def stop(self, reason: str, grace_ms: int = GRACE_MS) -> None:
        """Stop the command with all it started, and wait for its end."""
        if self.has_ended:
            return
        self.stop_reason = self.stop_reason or reason
        if self._process is not None:
            await self._process.stop(reason, grace_ms)
        # Bounded: its supervisor is started within the limit of a request, and the rest of the output is limited.
        await self.until(lambda: self.has_ended, grace_ms / 1000 + LAST_OUTPUT_S + 1)

    async def live(self, runtime: Runtime, call: Call, argv: list[str], *, has_stdin: bool) -> None:
        """Run the command to its end, and keep its outcome."""
        opening = runtime.open(
            call,
            argv,
            base_env=without_questions(os.environ),
            cwd=self.cwd,
            stdin=has_stdin,
            relayed=True,
            input_ms=INPUT_WAIT_MS if has_stdin else 0,
        )
        outcome = Outcome(Ending.ABANDONED, Problem("SHUTTING_DOWN", "the server is stopping"))
        try:
            async with opening as process:
                self._process = process
                reading = asyncio.ensure_future(self._read(process))
                with process.watched(self._note_input_wanted):
                    if self.stop_reason:  # meanwhile
                        await process.stop(self.stop_reason, 0)
                    await asyncio.wait([process.ended])  # bounded by its limits, `stop`, or the end of the connection
                await asyncio.wait([reading], timeout=LAST_OUTPUT_S)
                reading.cancel()
            report = process.report
            assert report is not None
            if report.fired is not None and not report.lost:
                report.stopped = None  # it was stopped by a limit, and the order to stop came later
            outcome = judge(call, process.task, report)
        except Exception as error:  # a refusal to start it, or a bug: the waiting tools still answer
            outcome = outcome_of_error(error)
        finally:
            self._ended_ns, self.outcome = monotonic_ns(), outcome
            self._forget_wait()
            self.output.close()
            self._wake()

    async def _read(self, process: InteractiveProcess) -> None:
        rest = b""
        while chunk := await process.read():
            self.output.add(chunk)
            self._forget_wait()
            if self.is_ready is False and self._ready_output:
                rest += chunk
                self.is_ready = self._ready_output in rest
                rest = rest[-len(self._ready_output) :]
            self._wake()

    def _forget_wait(self) -> None:
        self._input_wanted, self.is_wait_reported = {}, False

    def _note_input_wanted(self, wanted: dict[str, object]) -> None:
        self.is_wait_reported = self.is_wait_reported and bool(self.input_wanted)
        self._input_wanted, self._wanted_ns = wanted, monotonic_ns()
        self._wake()

    def _wake(self) -> None:
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(None)


class ShellJobs:
    """The jobs of one connection, by their ids."""

    def __init__(self, runtime: Runtime, folder: str) -> None:
        self._runtime, self._folder = runtime, folder
        # In the path, bash may be a link to `shotclock-sh`, whose limits are not ours.
        self._shell = shutil.which("bash", path=f"/bin:/usr/bin:{os.environ.get('PATH', '')}") or "/bin/sh"
        self._jobs: dict[str, ShellJob] = {}
        self._lives: set[asyncio.Task[None]] = set()
        self._count = 0

    def all(self) -> list[ShellJob]:
        return list(self._jobs.values())

    def find(self, id: str) -> ShellJob:
        """Return a job. Raises Failure."""
        if id in self._jobs:
            return self._jobs[id]
        known = ", ".join(self._jobs) or "none yet"
        raise Failure(
            "JOB_NOT_FOUND",
            f"there is no job {id!r} of this connection; there are: {known}",
            suggestion="call the tool `list`",
        )

    def start(self, call: Call, command: str, cwd: str | None, name: str | None = None, *, has_stdin: bool) -> ShellJob:
        """Start a command in the shell. Raises Failure."""
        running = [job for job in self.all() if not job.has_ended]
        if len(running) >= MOST_RUNNING:
            raise Failure(
                "CONFLICT",
                f"{MOST_RUNNING} jobs are running, which is the limit: {', '.join(job.id for job in running)}",
                suggestion="stop one, or wait for its end",
            )
        if name is not None and name in self._jobs and not self._jobs[name].has_ended:
            raise Failure("CONFLICT", f"the job {name!r} is still running", suggestion="stop it, or use another name")
        self._forget_oldest()
        if name is None:
            name = self._next_name()
        elif (former := self._jobs.pop(name, None)) is not None:
            former.output.remove_file()
        folder = os.path.join(self._folder, os.path.expanduser(cwd)) if cwd else self._folder
        job = self._jobs[name] = ShellJob(name, command, folder, call)
        argv = [self._shell, "-c", command]
        life = asyncio.create_task(job.live(self._runtime, call, argv, has_stdin=has_stdin))
        self._lives.add(life)  # the loop holds tasks weakly
        life.add_done_callback(self._lives.discard)
        return job

    def _next_name(self) -> str:
        self._count += 1
        return self._next_name() if f"job-{self._count}" in self._jobs else f"job-{self._count}"

    def _forget_oldest(self) -> None:
        ended = [job for job in self.all() if job.has_ended]
        for job in ended[: max(0, len(ended) - MOST_ENDED + 1)]:
            self._jobs.pop(job.id).output.remove_file()

    async def close(self) -> None:
        """Stop all jobs. Their files stay for a day, as those of `exec`."""
        if stopping := [job.stop("the end of the connection", CLOSE_GRACE_MS) for job in self.all()]:
            await asyncio.gather(*stopping)
