"""Where the handler of a call runs: in a worker process, in the shared process, or inline on the caller's loop.

The child processes of a runtime, each started when it is first needed, and the process that forks it:

    zygote ─┬─ supervisors of commands
            └─ preloaded zygote ─┬─ workers
                                 └─ the shared process
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable, Iterable, Mapping
from itertools import islice

from ..core.catalogue import HandlerReference, Operation
from ..core.clocks import Clocks
from ..core.envelope import Envelope, Problem
from ..core.errors import Ending
from ..core.value_types import record
from ..process import ipc
from ..process.clock import monotonic_ns
from ..process.context import CallListener, Scope, current_scope
from ..process.kernel import DeadlineTimer
from ..process.zygote import GUARD, continue_ours, start_clean_zygote
from .call import Call, Outcome, invalid
from .command_runner import Supervisors, run_shielded
from .control import Observe, follow_wind_down, start_control
from .inline_call import InlineCall
from .preloaded_zygote import Preloaded, Program, explain_unfindable
from .worker_pool import WorkerPool
from .worker_process import OnCall, ProcessCall, Worker

# Closing waits so long for supervisors to report that their workers are gone,
CLOSE_LIMIT_S = 3.0
# and so long for the zygote, which itself waits for its supervisors.
ZYGOTE_LIMIT_S = 3.0
ZYGOTE_PAUSE_S = 0.005
# A zygote that is there after so many looks may have been stopped by the work that it guards.
LOOKS_UNTIL_STOPPED = 10
# All of closing: commands, workers, shared process and zygote, three seconds each. A blocked loop runs it out.
CLOSING_LIMIT_S = 15.0
MAX_DEPTH = 16


class ChildProcesses:
    def __init__(
        self,
        operations: Callable[[], Iterable[Operation]],
        *,
        workers: int,
        most_workers: int,
        preload: tuple[str, ...],
        program: Program | None,
        preloaded: Preloaded | None,
        environment: Mapping[str, str] | None,
    ) -> None:
        self._operations = operations
        self._warm, self._most = workers, most_workers
        self._preload = preload
        self._program = program
        self._preloaded = preloaded
        self._environment = environment
        self._pool: WorkerPool | None = None
        self._shared: WorkerPool | None = None
        self._zygote: socket.socket | None = None
        self._zygote_pids = [] if preloaded is None or preloaded.pid is None else [preloaded.pid]
        self.commands = Supervisors(self._request_fork)
        self._closing = False

    @property
    def worker_count(self) -> int:
        return 0 if self._pool is None else self._pool.size

    async def warm_up(self, within_s: float) -> bool:
        is_warm = await self.pool().warm_up(within_s)
        if any(operation.place == "shared" for operation in self._operations()):
            is_warm = await self.shared().warm_up(within_s) and is_warm
        return is_warm

    def pool(self, first: Operation | None = None) -> WorkerPool:
        if self._pool is None:
            self._pool = WorkerPool(self._ensure_preloaded(first), warm=self._warm, most=self._most)
        return self._pool

    def shared(self, first: Operation | None = None) -> WorkerPool:
        if self._shared is None:
            self._shared = WorkerPool(self._ensure_preloaded(first), warm=1, most=1, is_shared=True)
        return self._shared

    def _ensure_preloaded(self, first: Operation | None) -> Preloaded:
        if self._preloaded is None:
            # The operation of the first call need not be registered.
            operations = [*self._operations(), *([] if first is None else [first])]
            handlers = dict.fromkeys(operation.handler for operation in operations if operation.place != "inline")
            # Event loops as well, where there will be any: otherwise each process would import them anew.
            loops = ("asyncio",) if any(operation.is_async for operation in operations) else ()
            self._preloaded = Preloaded(
                self._request_fork,
                program=self._program,
                modules=(*loops, *self._preload),
                handlers=[handler for handler in handlers if not explain_unfindable(handler)],
                environment=self._environment,
            )
        return self._preloaded

    def _clean_zygote(self) -> socket.socket:
        if self._zygote is None:
            self._zygote, pid = start_clean_zygote()
            self._zygote_pids.append(pid)
        return self._zygote

    def _request_fork(self, note: bytes, fds: list[int]) -> None:
        if self._closing:  # a process forked now would never be stopped
            raise ipc.Broken("the runtime is closing")
        try:
            ipc.send_fds(self._clean_zygote(), note, fds)
        except ipc.Broken:  # it was killed; its supervisors continue without it, and another one forks
            self._drop_zygote()
            ipc.send_fds(self._clean_zygote(), note, fds)

    def start_guard(self, timer: DeadlineTimer) -> socket.socket:
        """Start a process that kills this one, with all it runs, once the timer rings. It ends with the socket."""
        ours, theirs = socket.socketpair()
        runtime = os.pidfd_open(os.getpid())
        try:
            with theirs:
                self._request_fork(GUARD, [theirs.fileno(), timer.fd, runtime])
        except BaseException:
            ours.close()
            raise
        finally:
            os.close(runtime)
        return ours

    def _drop_zygote(self) -> None:
        self.commands.dismiss()  # without a zygote to guard them
        if self._zygote is not None:
            self._zygote.close()
            self._zygote = None
        self._collect()  # a killed one may still be dying: it is collected the next time

    def _collect(self) -> None:
        self._zygote_pids = [pid for pid in self._zygote_pids if not _has_ended(pid)]

    async def close(self) -> None:
        """Stop every process and wait, bounded, until all are gone. Then a cancellation is passed on."""
        closing = asyncio.ensure_future(self._close())
        try:
            await asyncio.shield(closing)
        except asyncio.CancelledError:
            await run_shielded(asyncio.wait([closing], timeout=CLOSING_LIMIT_S))
            raise

    async def _close(self) -> None:
        self._closing = True
        await self.commands.stop_all()
        await self._close_workers()
        if self._preloaded is not None:
            self._preloaded.close()
        self._drop_zygote()
        for look in range(int(ZYGOTE_LIMIT_S / ZYGOTE_PAUSE_S)):
            self._collect()
            if not self._zygote_pids:
                break
            if look % LOOKS_UNTIL_STOPPED == LOOKS_UNTIL_STOPPED - 1:
                continue_ours()
            await asyncio.sleep(ZYGOTE_PAUSE_S)

    async def _close_workers(self) -> None:
        workers: list[Worker] = []
        for pool in (self._pool, self._shared):
            if pool is not None:
                workers += pool.kill_all()
        # Those that are up before the zygote: their supervisors go with it, and could not report.
        await _wait_until_gone(worker for worker in workers if worker.is_up)
        if self._preloaded is not None and not all(worker.gone.done() for worker in workers):
            self._preloaded.close()  # it may hang in an import, with the requests for them unread
            await _wait_until_gone(workers)
        for worker in workers:
            worker.end(None)


async def _wait_until_gone(workers: Iterable[Worker]) -> None:
    if ends := [worker.gone for worker in workers]:
        await asyncio.wait(ends, timeout=CLOSE_LIMIT_S)


def _has_ended(pid: int) -> bool:
    try:
        return os.waitpid(pid, os.WNOHANG)[0] == pid
    except ChildProcessError:
        return True


@record
class Counts:
    calls: int = 0
    abandoned: int = 0
    late: int = 0


class Executor:
    """Runs the handlers of one runtime."""

    def __init__(self, children: ChildProcesses, counts: Counts, observe: Observe) -> None:
        self._children = children
        self._counts = counts
        self._observe = observe
        self._orphans: dict[InlineCall, None] = {}

    @property
    def orphan_count(self) -> int:
        return len(self._orphans)

    def list_orphans(self, most: int | None = None) -> list[dict[str, object]]:
        """List abandoned work that still runs."""
        now = monotonic_ns()
        return [
            {"operation": call.name, "running_ms": (now - call.started_ns) // 1_000_000}
            for call in islice(self._orphans, most)
        ]

    async def run(self, call: Call, depth: int, listener: CallListener, on_call: OnCall) -> Outcome:
        """Run the handler at its place. `on_call` makes the calls inside this one."""
        operation = call.operation
        assert operation is not None
        call.has_begun = True
        follow_wind_down(call)
        start_control(call, self._observe)
        handler = operation.handler
        if operation.place == "inline":
            if isinstance(handler, HandlerReference):
                message = f"{call.name} asks for isolation='inline', and its function is not imported in this process"
                return _not_importable(message, "isolate it in a 'process', or in the 'shared' process")
            scope = Scope(call.bound.bell, depth, call.name, call, call, call.overtime_address)
            return await InlineCall(call, scope, listener, self).run(on_call)
        if (reason := explain_unfindable(handler)) is not None:
            return _not_importable(reason)

        async def call_inside(name: str, arguments: Mapping[str, object], clocks: Clocks) -> Envelope:
            token = current_scope.set(Scope(call.bound.bell, depth, call.name, call, call=call))
            try:
                return await on_call(name, arguments, clocks)
            finally:
                current_scope.reset(token)

        pool = self._children.pool(operation) if operation.place == "process" else self._children.shared(operation)
        try:
            work = ProcessCall(call, handler, depth, listener, call_inside, pool)
        except Exception as error:
            return invalid([{"field": "arguments", "message": f"cannot be sent to a worker process: {error}"}])
        return await pool.run(work)

    def note_abandoned(self, call: InlineCall) -> None:
        self._counts.abandoned += 1
        self._orphans[call] = None

    def note_late_end(self, call: InlineCall) -> None:
        """Count abandoned work that ended after all. Its result is dropped."""
        self._counts.late += 1
        self._orphans.pop(call, None)


def _not_importable(message: str, suggestion: str | None = None) -> Outcome:
    problem = Problem("HANDLER_NOT_IMPORTABLE", message, "validation", suggestion=suggestion)
    return Outcome(Ending.NOT_STARTED, problem)
