"""Where the handler of a call runs: in a worker process, in the shared process, or inline on the caller's loop.

The child processes of a runtime, each started when it is first needed, and the process that forks it:

    zygote ─┬─ supervisors ── commands
            └─ supervisor ── preloaded zygote ── supervisors ─┬─ workers
                                                              └─ the shared process
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from itertools import islice

from ..core.catalogue import HandlerReference, Operation
from ..core.envelope import Problem
from ..core.errors import Ending
from ..core.limits import ClockKind
from ..core.value_types import record
from ..supervise import ipc
from ..supervise.clock import monotonic_ns
from ..supervise.kernel import DeadlineTimer
from ..supervise.zygote import GUARD, continue_ours, start_clean_zygote
from ._handler_call import InlineCall, ProcessCall, ReadyCall
from ._worker_process import Vacancy, Worker
from .call import Call, Outcome, invalid, wound_down_problem
from .control import Observe, follow_wind_down, start_control
from .outcomes import CLOSING, closing_outcome, timeout_problem
from .preloaded_zygote import Preloaded, Program, explain_unfindable
from .supervised_commands import Supervisors, run_shielded

# How long closing waits for supervisors to report that their workers are gone.
CLOSE_LIMIT_S = 3.0
# How long closing waits for the zygote, which itself waits for its supervisors.
ZYGOTE_LIMIT_S = 3.0
ZYGOTE_PAUSE_S = 0.005
# A zygote that is there after so many looks may have been stopped by the work that it guards.
LOOKS_UNTIL_STOPPED = 10
# How long the lifespans may take to close before their process is killed. MCP clients wait 2 s, send SIGTERM, and kill
# 2 s later.
STATES_CLOSE_LIMIT_S = 3.0
# All of closing: commands, lifespans, workers, zygote, three seconds each. A blocked loop runs it out.
CLOSING_LIMIT_S = 15.0
MAX_DEPTH = 16
DEFAULT_WARM = max(2, min(8, os.cpu_count() or 2))
# An awaiting async function holds a process as well, of about 6 MB with its supervisor.
DEFAULT_MOST = 256
# A burst of short calls waits for the warm workers, because forking competes with the work that is waited for. A worker
# that is busy with one call for longer than this is replaced in the count.
GROW_AFTER_S = 0.05
GROW_LATE_NS = 10_000_000
# How long the imports of the preloaded zygote may take. After this the zygote is considered hung, and the next call
# starts another.
IMPORT_LIMIT_NS = 60_000_000_000
# How long to wait after a worker that died before it was of use.
RESPAWN_PAUSE_S = 0.25
# How many such workers in a row: then waiting calls are answered instead of waiting for their limits.
MOST_FAILED_STARTS = 8
# How long workers beyond the warm ones are kept.
IDLE_KEPT_S = 10.0
# Calls that wait in a worker are taken back if the one before them runs for longer than this.
HELD_UP_S = 0.005
WARM_UP_PAUSE_S = 0.005


class WorkerPool:
    """Pool that keeps `warm` workers ready, grows to `most` while calls hang, and replaces killed ones, on one loop."""

    def __init__(
        self, preloaded: Preloaded, *, warm: int = DEFAULT_WARM, most: int = DEFAULT_MOST, is_shared: bool = False
    ) -> None:
        self.loop: asyncio.AbstractEventLoop = asyncio.get_running_loop()
        self.preloaded = preloaded
        self.warm = warm
        self.most: int = max(warm, most)
        self.is_shared = is_shared
        self._free: list[Worker] = []
        self._all: set[Worker] = set()
        self._leaving: set[Worker] = set()
        """Being killed; their successors need not wait for the proof that they are gone."""
        self._vacant: list[Vacancy] = []
        """Supervisors without a worker. Each forks its next one faster than the zygote would fork both."""
        self._waiting: deque[ProcessCall] = deque()
        self._has_inner = False
        """Calls made by calls may be waiting."""
        self._growth: asyncio.TimerHandle | None = None
        self._growth_due_ns = 0
        self._trim: asyncio.TimerHandle | None = None
        self._respawn: asyncio.TimerHandle | None = None
        self._recall: asyncio.TimerHandle | None = None
        self._failed_starts = 0
        self.is_closing: bool = False
        self._lost_states: dict[str, tuple[str, int]] = {}
        """By App: why its state was lost last, and when."""

    @property
    def size(self) -> int:
        return len(self._all)

    async def warm_up(self, within_s: float) -> bool:
        """Start the warm workers. Return False if they are not all up in time."""
        give_up_ns = monotonic_ns() + int(within_s * 1e9)
        while sum(worker.is_up for worker in self._all) < self.warm:
            self._refill()
            if monotonic_ns() >= give_up_ns:
                return False
            await asyncio.sleep(WARM_UP_PAUSE_S)
        return True

    def submit(self, call: ProcessCall) -> None:
        """Give a call to a worker, or let it wait for one within its limits."""
        if self.is_closing:
            call.resolve(closing_outcome())
            return
        if call.depth:  # before calls that are made by no call: its own caller holds a worker until it ends
            self._has_inner = True
            self._waiting.appendleft(call)
        else:
            self._waiting.append(call)
        self._serve_waiting()
        if call.worker is None:
            self._refill()
            self._plan_growth()

    def put_first(self, calls: list[ProcessCall]) -> None:
        """Put calls that a worker had not begun before all others."""
        for call in reversed(calls):
            call.worker = None
            if self.is_closing:
                call.resolve(closing_outcome())
            else:
                self._waiting.appendleft(call)
                call.check_limits()  # its queue limit counts again
        self._serve_waiting()
        if self._waiting:
            self._plan_growth()

    def _serve_waiting(self) -> None:
        while self._waiting and self._free:
            worker = self._free[-1]
            # No more than its share, or the others would have nothing to do.
            room = min(worker.room, -(-len(self._waiting) // max(1, len(self._all))))
            calls: list[ProcessCall] = []
            # The supervisor of a worker knows one grace at a time.
            grace_ms = worker.grace_ms if worker.calls else self._waiting[0].call.bound.grace_ms
            while len(calls) < room and self._waiting:
                if self._waiting[0].call.bound.grace_ms != grace_ms and not self.is_shared:
                    break
                calls.append(self._waiting.popleft())
            if calls:
                worker.begin(calls)
                self._plan_recall()
            else:
                self._free.pop()

    def _plan_recall(self) -> None:
        if self._recall is None and not self.is_shared and any(len(worker.calls) > 1 for worker in self._all):
            self._recall = self.loop.call_later(HELD_UP_S, self._recall_held_up)

    def _recall_held_up(self) -> None:
        """Take back calls that wait in a worker behind a long one."""
        self._recall = None
        long_ago = monotonic_ns() - int(HELD_UP_S * 1e9)
        for worker in list(self._all):
            if len(worker.calls) > 1 and worker.began_ns < long_ago:
                worker.read_what_is_there()
                if len(worker.calls) > 1 and worker.began_ns < long_ago:
                    self.put_first(worker.take_back())
        self._plan_recall()

    def leave_queue(self, call: ProcessCall) -> None:
        with contextlib.suppress(ValueError):
            self._waiting.remove(call)

    def turn_away(self, call: ProcessCall, kind: ClockKind) -> None:
        self.leave_queue(call)
        elapsed_ns = monotonic_ns() - call.call.started_ns
        message = "no worker came free in time"
        if not any(worker.is_up for worker in self._all):
            message = "no worker came up in time; importing the modules it needs takes too long"
            if any(monotonic_ns() - worker.asked_ns > IMPORT_LIMIT_NS for worker in self._all):
                self.preloaded.close()  # its supervisor kills it with all it started
        if kind is ClockKind.QUEUE:
            problem = Problem("QUEUE_TIMEOUT", message, fired=call.call.fired(kind, elapsed_ns))
        else:
            late = timeout_problem(call.call, elapsed_ns)
            problem = Problem("TIMEOUT", f"{late.message}: {message}", fired=late.fired)
        call.resolve(Outcome(Ending.NOT_STARTED, problem))

    def on_free(self, worker: Worker) -> None:
        """Give a worker that came up or ended a call its next one."""
        if self.is_closing or not worker.room:
            return
        if worker.has_served:
            self._failed_starts = 0
        if worker not in self._free:
            self._free.append(worker)
        self._serve_waiting()
        if len(self._free) > self.warm and self._trim is None:
            self._trim = self.loop.call_later(IDLE_KEPT_S, self._trim_idle)

    def _trim_idle(self) -> None:
        self._trim = None
        idle = [worker for worker in self._free if not worker.calls]
        for worker in idle[: max(0, len(idle) - self.warm)]:
            worker.kill("not needed")

    def _plan_growth(self) -> None:
        if self._growth is None and not self.is_shared:
            self._growth_due_ns = monotonic_ns() + int(GROW_AFTER_S * 1e9)
            self._growth = self.loop.call_later(GROW_AFTER_S, self._grow)

    def _grow(self) -> None:
        """Start workers for waiting calls. A worker busy with one call for long is as good as missing."""
        self._growth = None
        if not self._waiting or self.is_closing:
            return
        is_late = monotonic_ns() - self._growth_due_ns > GROW_LATE_NS  # our own loop was busy; answers may lie unread
        if not is_late and self._respawn is None:
            long_ago = monotonic_ns() - int(GROW_AFTER_S * 1e9)
            stuck = sum(bool(worker.calls) and worker.began_ns < long_ago for worker in self._all)
            wanted = 2 * stuck if stuck == len(self._all) else self.warm + stuck
            while len(self._all) < min(wanted, stuck + len(self._waiting), self.most) and self._spawn():
                pass
        self._plan_growth()

    def _refill(self) -> None:
        """Start workers up to `warm`, and one for each call made by a call, which must not wait for a worker that its
        own caller holds. Not while too many of the former ones will not die, nor more at once than `warm`."""
        if self.is_closing or self._respawn is not None:
            return
        while len(self._all) < self.warm and len(self._leaving) <= self.warm and self._spawn():
            pass
        if self._has_inner and not self.is_shared:
            inner = sum(call.depth > 0 for call in self._waiting)
            self._has_inner = inner > 0
            while sum(not worker.is_up for worker in self._all) < min(self.warm, inner) and self._spawn():
                pass

    def _spawn(self) -> bool:
        """Start a worker. Where the machine starts none, return False; the next attempt is a moment later."""
        while self._vacant:
            with contextlib.suppress(ipc.Broken, OSError):  # it was killed while it waited
                worker = Worker(self, self._vacant.pop())
                self._all.add(worker)
                self._free.insert(0, worker)  # the last to be chosen: it is only just being forked
                self._serve_waiting()
                return True
        try:
            self._all.add(Worker(self))
            return True
        except (ipc.Broken, OSError) as error:
            self._pause_spawning(str(error))
            return False

    def _pause_spawning(self, why: str) -> None:
        """Put the next start off: the machine is full, the imports end the process, or the zygote was killed."""
        self._failed_starts += 1
        if self._failed_starts >= MOST_FAILED_STARTS:
            self._failed_starts = 0
            message = f"no worker could be started in {MOST_FAILED_STARTS} attempts: {why}"
            # A busy worker comes free later, except for a nested call of its own: that one fails now.
            is_any_up = any(worker.is_up for worker in self._all)
            for call in [call for call in self._waiting if call.depth or not is_any_up]:
                self.leave_queue(call)
                call.resolve(Outcome(Ending.NOT_STARTED, Problem("SPAWN_FAILED", message)))
        if self._respawn is None and not self.is_closing:
            self._respawn = self.loop.call_later(RESPAWN_PAUSE_S, self._respawn_now)

    def _respawn_now(self) -> None:
        self._respawn = None
        self._refill()

    def on_leaving(self, worker: Worker) -> None:
        """Replace a worker that is being killed."""
        if worker in self._all:
            self._forget(worker)
            self._leaving.add(worker)
            self._refill()

    def on_gone(self, worker: Worker, unbegun: list[ProcessCall]) -> None:
        """Replace a worker that is gone, and move the calls that it had not begun."""
        self._forget(worker)
        if worker.vacant is not None:
            if self.is_closing or len(self._vacant) >= self.warm:
                worker.vacant.control.close()  # its supervisor ends
            else:
                self._vacant.append(worker.vacant)
        for call in unbegun:
            if call.is_stopping:
                call.resolve(call.limit_outcome(Ending.NOT_STARTED))
        if worker.was_of_use:
            self._failed_starts = 0
        else:
            self._pause_spawning("it died before it ran any call")
        self.put_first([call for call in unbegun if not call.is_stopping])
        self._refill()

    def _forget(self, worker: Worker) -> None:
        self._all.discard(worker)
        self._leaving.discard(worker)
        with contextlib.suppress(ValueError):
            self._free.remove(worker)

    def record_lost_states(self, apps: Iterable[str], why: str) -> None:
        self._lost_states.update(dict.fromkeys(apps, (why, monotonic_ns())))

    def get_lost_state(self, app: str, why_again: str) -> tuple[str, int] | None:
        """Return why the state of an App was lost before it was opened, and how long ago; None if it was not."""
        if why_again:
            return why_again, 0
        why, lost_ns = self._lost_states.get(app, ("", 0))
        return (why, monotonic_ns() - lost_ns) if why else None

    async def close_states(self) -> None:
        """Take no more calls, stop those that run in a shared process with states, and close these. Bounded."""
        self._refuse_calls()
        holding = [worker for worker in self._all if worker.holds_states]
        for worker in holding:
            worker.close_states()
        if holding:
            ends = [worker.states_closed for worker in holding]
            _, left = await asyncio.wait(ends, timeout=STATES_CLOSE_LIMIT_S)
            if left:
                import logging  # takes 4 ms

                message = "the lifespan did not close within %d s, and was killed"
                logging.getLogger("shotclock").warning(message, STATES_CLOSE_LIMIT_S)

    def _refuse_calls(self) -> None:
        self.is_closing = True
        for handle in (self._growth, self._trim, self._respawn, self._recall):
            if handle is not None:
                handle.cancel()
        while self._waiting:
            self._waiting.popleft().resolve(closing_outcome())

    def kill_all(self) -> list[Worker]:
        """Take no more calls, answer those that wait, and kill every worker. Return the workers."""
        self._refuse_calls()
        for supervisor in self._vacant:
            supervisor.control.close()
        self._vacant.clear()
        workers = [*self._all, *self._leaving]
        for worker in workers:
            worker.kill(CLOSING)
        return workers


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
        self._closing_states: asyncio.Future[None] | None = None
        self._zygote: socket.socket | None = None
        self._zygote_pids = [] if preloaded is None or preloaded.pid is None else [preloaded.pid]
        self.commands: Supervisors = Supervisors(self._request_fork)
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
            needs_loop = any(operation.is_async or operation.place == "shared" for operation in operations)
            loops = ("asyncio",) if needs_loop else ()
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

    async def close_states(self) -> None:
        if self._shared is not None:
            if self._closing_states is None:
                self._closing_states = asyncio.ensure_future(self._shared.close_states())
            await asyncio.shield(self._closing_states)

    async def _close_workers(self) -> None:
        await self.close_states()
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
        self.counts = counts
        self._observe = observe
        self.orphans: dict[InlineCall, Call] = {}

    def list_orphans(self, most: int | None = None) -> list[dict[str, object]]:
        """List abandoned work that still runs."""
        now = monotonic_ns()
        return [
            {"operation": call.name, "running_ms": (now - call.started_ns) // 1_000_000}
            for call in islice(self.orphans.values(), most)
        ]

    async def run(self, ready: ReadyCall) -> Outcome:
        """Run the handler in the isolation of its operation."""
        call, operation = ready.call, ready.operation
        call.cancellation.ending = Ending.KILLED if operation.place == "process" else Ending.CANCELLED
        follow_wind_down(call)
        if call.winding_down is not None and monotonic_ns() >= call.winding_down.until_ns:
            return Outcome(Ending.NOT_STARTED, wound_down_problem(call))  # its time passed while it waited for a place
        start_control(call, self._observe, ready.queued_ns)
        handler = operation.handler
        if operation.place == "inline":
            if isinstance(handler, HandlerReference):
                message = f"{call.name} asks for isolation='inline', and its function is not imported in this process"
                return _not_importable(message, "isolate it in a 'process', or in the 'shared' process")
            inline = InlineCall(ready, self)
            inline.start()
            return await inline.wait()
        if (reason := explain_unfindable(handler)) is not None:
            return _not_importable(reason)
        pool = self._children.pool(operation) if operation.place == "process" else self._children.shared(operation)
        try:
            work = ProcessCall(ready, pool)
        except Exception as error:
            return invalid([{"field": "arguments", "message": f"cannot be sent to a worker process: {error}"}])
        pool.submit(work)
        return await work.wait()


def _not_importable(message: str, suggestion: str | None = None) -> Outcome:
    problem = Problem("HANDLER_NOT_IMPORTABLE", message, "validation", suggestion=suggestion)
    return Outcome(Ending.NOT_STARTED, problem)
