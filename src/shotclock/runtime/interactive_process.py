"""A process that we talk with while it runs: supervised like any command, but its stdin and stdout are the caller's.

Its supervisor holds the clocks, so it is stopped at the deadline whatever its caller does; it is killed with everything
it started when it is closed, and when we die.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Callable

from ..process.command_task import CommandReport, CommandTask
from ..process.kill import VERIFY_LIMIT_MS
from .command_runner import REPORT_MARGIN_MS, RunningCommand, Supervisors, TaskNotSent, run_shielded

# What a process may take to leave by itself once its stdin has ended; one that does not listen is told by TERM.
LEAVE_LIMIT_S = 0.5
# And then until the kill: it has answered, nobody waits for what it still does.
LEAVE_GRACE_MS = 500
CHUNK = 64 * 1024


class InteractiveProcess:
    """A running process. `read` and `write` are bounded by whoever calls them, and end when the process does."""

    def __init__(self, running: RunningCommand, task: CommandTask, stdin: int, stdout: int) -> None:
        self._running = running
        self.task = task
        self._stdin, self._stdout = stdin, stdout
        self._waits: set[asyncio.Future[None]] = set()
        self.report: CommandReport | None = None
        """How it ended, once it has."""
        for fd in (stdin, stdout):
            os.set_blocking(fd, False)
        running.ended.add_done_callback(self._has_ended)

    @property
    def ended(self) -> asyncio.Future[CommandReport]:
        return self._running.ended

    async def read(self) -> bytes:
        """Return what it has written to its stdout; nothing at the end."""
        loop = asyncio.get_running_loop()
        await asyncio.sleep(0)  # one that never stops writing must not keep the loop for itself
        while self._stdout >= 0:
            try:
                return os.read(self._stdout, CHUNK)
            except BlockingIOError:
                await self._until(loop.add_reader, loop.remove_reader, self._stdout)
            except OSError:
                break
        return b""

    async def write(self, data: bytes) -> None:
        """Write to its stdin. Raises BrokenPipeError if it does not take any more."""
        loop = asyncio.get_running_loop()
        left = memoryview(data)
        while left:
            if self._stdin < 0:
                raise BrokenPipeError("closed")
            try:
                left = left[os.write(self._stdin, left[:CHUNK]) :]
            except BlockingIOError:
                await self._until(loop.add_writer, loop.remove_writer, self._stdin)
            except OSError as error:
                raise BrokenPipeError(str(error)) from error

    async def close(self, *, politely: bool) -> None:
        """End it. Nothing of it is left after this but what its report calls survivors.

        Politely: its stdin ends, and it may leave by itself. Otherwise it is stopped at once, with its own grace.
        """
        self.end_stdin()
        grace_ms = self.task.grace_ms
        if politely:
            await asyncio.wait([self.ended], timeout=LEAVE_LIMIT_S)
            grace_ms = min(grace_ms, LEAVE_GRACE_MS)
        if not self.ended.done():
            self._running.order("grace", grace_ms)
            self._running.order("stop", "closed")
            await asyncio.wait([self.ended], timeout=(grace_ms + VERIFY_LIMIT_MS + REPORT_MARGIN_MS) / 1000)
        if self.report is None:
            self.report = CommandReport()

    def end_stdin(self) -> None:
        loop = asyncio.get_running_loop()
        if self._stdin >= 0:
            loop.remove_writer(self._stdin)
            os.close(self._stdin)
            self._stdin = -1
        self._wake()

    def let_go(self) -> None:
        """Close the descriptors. If anything is still there, its supervisor now kills it."""
        loop = asyncio.get_running_loop()
        self.end_stdin()
        if self._stdout >= 0:
            loop.remove_reader(self._stdout)
            os.close(self._stdout)
            self._stdout = -1
        self._running.close()
        self._wake()

    async def _until(self, add: Callable[..., None], remove: Callable[[int], bool], fd: int) -> None:
        ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waits.add(ready)
        add(fd, _set, ready)
        try:
            await ready
        finally:
            self._waits.discard(ready)
            if fd in (self._stdin, self._stdout):  # otherwise it was closed, and its number may be somebody else's
                remove(fd)

    def _wake(self) -> None:
        for ready in self._waits:
            _set(ready)

    def _has_ended(self, ended: asyncio.Future[CommandReport]) -> None:
        if not ended.cancelled():
            self.report = ended.result() if ended.exception() is None else CommandReport()


@contextlib.asynccontextmanager
async def open_command(supervisors: Supervisors, task: CommandTask) -> AsyncIterator[InteractiveProcess]:
    """Start a command, and have it gone again, with all it started, when this is left. Raises OSError or ipc.Broken.

    Left by an exception (a cancellation as well) it is stopped at once, otherwise it may leave by itself.
    """
    try:
        opened = await _open_once(supervisors, task)
    except TaskNotSent:  # its zygote was killed with the request in its hands; nothing began
        opened = await _open_once(supervisors, task)
    supervisors.register(opened._running)
    try:
        try:
            yield opened
        except BaseException:
            await run_shielded(opened.close(politely=False))
            raise
        await _let_leave(opened)
    finally:
        supervisors.running.discard(opened._running)
        opened.let_go()


async def _let_leave(opened: InteractiveProcess) -> None:
    """Wait until it leaves by itself. A cancellation meanwhile ends the patience, not the care."""
    closing = asyncio.ensure_future(opened.close(politely=True))
    try:
        await asyncio.shield(closing)
    except asyncio.CancelledError:
        opened._running.order("kill", "closed")
        await run_shielded(asyncio.wait([closing], timeout=(VERIFY_LIMIT_MS + REPORT_MARGIN_MS) / 1000))
        raise


async def _open_once(supervisors: Supervisors, task: CommandTask) -> InteractiveProcess:
    their_stdin, stdin = os.pipe()
    fds = [their_stdin, stdin]
    try:
        stdout, their_stdout = os.pipe()
        fds += (stdout, their_stdout)
        running = await supervisors.begin(task, [their_stdin, their_stdout])
    except BaseException:
        for fd in fds:
            os.close(fd)
        raise
    os.close(their_stdin)
    os.close(their_stdout)
    return InteractiveProcess(running, task, stdin, stdout)


def _set(ready: asyncio.Future[None]) -> None:
    if not ready.done():
        ready.set_result(None)
