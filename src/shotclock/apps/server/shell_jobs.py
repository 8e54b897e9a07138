"""The commands of one connection to `shotclock serve shell`, each under a supervisor of its own.

They are stopped when the connection ends. If this process is killed, their supervisors kill them.

A model gets the beginning and the end of the output, with the lines between them counted, and lines on request.
The whole is in a private file as soon as it is longer than an answer shows, up to FILE_CAP bytes. After that only the
end is kept, in memory, and the lines are still counted.
"""

from __future__ import annotations

import asyncio
import os
import shutil
from bisect import bisect_left
from collections.abc import Callable
from typing import NamedTuple

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
from ...supervise.command_task import make_private_directory, prune_spills, spill_path
from ...supervise.environment import without_questions

# Bytes of an answer. The end of an output says more than its beginning.
HEAD, TAIL = 6_000, 10_000
SHOWN = HEAD + TAIL
END_KEPT = 64 * 1024
FILE_CAP = 32 * 1024 * 1024  # a flood must not fill the disk
MARK_EVERY = 64 * 1024  # bytes of the file between two known line numbers
READ_SIZE = 1024 * 1024
LONGEST_LINE = 4_000  # bytes of one line among those that were asked for


class Excerpt(NamedTuple):
    """A part of an output. `lines_left_out` were written, and are not in the text."""

    text: str
    lines_left_out: int = 0


class Lines(NamedTuple):
    """Lines of an output, and the numbers of the first and the last."""

    text: str
    first_line: int
    last_line: int


class JobOutput:
    def __init__(self, path: str) -> None:
        self._path = path
        self._begin = bytearray()
        self._end = bytearray()
        self._fd = -1
        self._marks = [(0, 0)]  # lines before a byte of the file, and its offset
        self._file_lines = 0
        self.file_bytes: int = 0
        self.total: int = 0
        self.complete_lines: int = 0

    @property
    def lines(self) -> int:
        """Return the number of lines; the last one may not be complete yet."""
        return self.complete_lines + bool(self._end and not self._end.endswith(b"\n"))

    @property
    def file(self) -> str | None:
        return self._path if self.file_bytes else None

    @property
    def is_file_whole(self) -> bool:
        return self.file_bytes == self.total

    def add(self, chunk: bytes) -> None:
        self._begin += chunk[: max(0, SHOWN - len(self._begin))]
        if self._fd >= 0:
            self._write(chunk)
        elif self.total <= SHOWN < self.total + len(chunk):
            self._open_file()
            self._write(bytes(self._end) + chunk)  # the end is still the whole
        self.total += len(chunk)
        self.complete_lines += chunk.count(b"\n")
        self._end += chunk
        del self._end[:-END_KEPT]

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def remove_file(self) -> None:
        self.close()
        if self.file_bytes:
            self.file_bytes = 0
            try:
                os.unlink(self._path)
            except OSError:  # it was removed before
                pass

    def _open_file(self) -> None:
        try:
            make_private_directory(os.path.dirname(self._path))
            prune_spills()
            self._fd = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        except OSError:  # no place to write: beginning and end are kept
            self._fd = -1

    def _write(self, chunk: bytes) -> None:
        if self._fd < 0:
            return
        chunk = chunk[: FILE_CAP - self.file_bytes]
        written = 0
        try:
            while written < len(chunk):
                written += os.write(self._fd, chunk[written:])
        except OSError:  # the disk is full
            pass
        self.file_bytes += written
        self._file_lines += chunk.count(b"\n", 0, written)
        if self.file_bytes - self._marks[-1][1] >= MARK_EVERY:
            self._marks.append((self._file_lines, self.file_bytes))
        if self.file_bytes >= FILE_CAP or written < len(chunk):
            self.close()  # the file ends here

    def excerpt(self) -> Excerpt:
        """Return the whole, or the beginning and the end with a line about the rest."""
        if self.total <= SHOWN:
            return Excerpt(_decode(self._begin))
        head, tail = bytes(self._begin[:HEAD]), bytes(self._end[-TAIL:])
        if (cut := head.rfind(b"\n") + 1) > HEAD // 2:
            head = head[:cut]
        if 0 < (cut := tail.find(b"\n") + 1) < TAIL // 2:
            tail = tail[cut:]
        left_bytes = self.total - len(head) - len(tail)
        left_lines = max(0, self.lines - _count_lines(head) - _count_lines(tail))
        gap = f"… {left_lines:,} lines ({left_bytes:,} bytes) left out; {self.describe_file()}"
        return Excerpt("\n".join((_decode(head).removesuffix("\n"), gap, _decode(tail))), left_lines)

    def describe_file(self) -> str:
        if not self.file_bytes:
            return "they could not be kept in a file"
        what = "whole output" if self.is_file_whole else f"the first {self.file_bytes:,} bytes of the output"
        return f"{what}: {self._path}"

    def lines_after(self, number: int, most: int) -> Lines:
        """Return at most `most` lines after the one of this number, as many as fit into SHOWN bytes."""
        first, found = self._find_after(number, most)
        shown: list[bytes] = []
        size = 0
        for line in found:
            if len(line) > LONGEST_LINE:
                left = len(line) - LONGEST_LINE
                line = (
                    line[: LONGEST_LINE // 2] + f" … {left:,} bytes left out … ".encode() + line[-LONGEST_LINE // 2 :]
                )
            size += len(line) + 1
            if size > SHOWN and shown:
                break
            shown.append(line)
        return Lines(_decode(b"\n".join(shown)), first, first + len(shown) - 1)

    def _find_after(self, number: int, most: int) -> tuple[int, list[bytes]]:
        """Return lines and the number of the first one, which is a later one if the next lines were not kept."""
        before_end = self.complete_lines - self._end.count(b"\n")
        is_cut = len(self._end) < self.total  # the end may begin inside a line
        if number < before_end + is_cut:
            # A full file may end inside a line, which is then not shown as if it were whole.
            in_file = most if self.is_file_whole else min(most, self._file_lines - number)
            if in_file > 0 and (found := self._read_file(number, in_file)):
                return number + 1, found
            number = before_end + is_cut
        return number + 1, _split(self._end, number - before_end, most)

    def _read_file(self, number: int, most: int) -> list[bytes]:
        lines_before, offset = self._marks[max(0, bisect_left(self._marks, (number, 0)) - 1)]
        content = b""
        try:
            with open(self._path, "rb") as file:
                file.seek(offset)
                while content.count(b"\n") < number - lines_before + most and (chunk := file.read(READ_SIZE)):
                    content += chunk
        except OSError:  # it was removed
            return []
        return _split(content, number - lines_before, most)


def _split(content: bytes | bytearray, skipped: int, most: int) -> list[bytes]:
    lines = bytes(content).split(b"\n")
    return (lines if lines[-1] else lines[:-1])[skipped : skipped + most]


def _count_lines(part: bytes) -> int:
    return part.count(b"\n") + bool(part and not part.endswith(b"\n"))


def _decode(part: bytes | bytearray) -> str:
    return part.decode("utf-8", "replace")


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
