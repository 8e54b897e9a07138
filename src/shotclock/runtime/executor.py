"""Where the handler of a call runs so that it can be stopped: a worker, an async worker, a thread, or a loop.

Guards are the application's own code, maybe async: they run on a loop first. What cannot be killed and does not stop is
abandoned, and counted here until it ends.

The child processes of a runtime, and who forks them:

    zygote (started when the first is needed) ─┬─ supervisors of commands
                                               └─ preloaded zygote ─┬─ the pool of workers
                                                                    └─ the workers of async handlers

Nothing is started before somebody needs it; `close` ends all of it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import weakref
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping
from functools import partial
from itertools import islice
from typing import Any, TypeVar

from ..core.catalogue import Guard, HandlerReference, Operation
from ..core.clocks import Clocks
from ..core.envelope import Envelope, Problem
from ..core.errors import Ending
from ..core.value_types import record
from ..process import ipc
from ..process.clock import monotonic_ns
from ..process.context import CallListener, Scope
from ..process.kernel import DeadlineTimer
from ..process.zygote import GUARD, continue_ours, start_clean_zygote
from .asyncio_private import running_loop
from .call import Call, Outcome, invalid
from .command_runner import Supervisors, run_shielded
from .control import Observe, follow_wind_down, start_control
from .loop_call import DeadlineTimers, LoopCall, LoopCarrier, SharedLoopCarrier, ThreadCarrier, current_scope
from .loop_threads import LoopThreads
from .preloaded_zygote import Preloaded, Program, explain_unfindable
from .worker_pool import Pool
from .worker_process import ProcessCall, Task, WorkerProcess

TYPE_CHECKING = False
if TYPE_CHECKING:  # a command line whose commands are not async needs none
    from .async_pool import AbandonedHostCalls, AsyncPool
    from .async_worker import HostCall

# How long closing waits for supervisors to report that their workers are gone.
CLOSE_LIMIT_S = 3.0
# How long closing waits for the zygote, which itself waits for its supervisors.
ZYGOTE_LIMIT_S = 3.0
ZYGOTE_PAUSE_S = 0.005
# One that is still there after so many looks may have been stopped, by the very work that it was to guard.
LOOKS_UNTIL_STOPPED = 10
# All that closing waits for: commands, workers, workers, zygote, three seconds each. A blocked loop runs it out.
CLOSING_LIMIT_S = 15.0


class ChildProcesses:
    """Workers, async workers, commands and zygotes of one runtime."""

    def __init__(
        self,
        orphans: AbandonedHostCalls,
        operations: Callable[[], Iterable[Operation]],
        *,
        workers: int,
        most_workers: int,
        preload: tuple[str, ...],
        hosts_all: bool,
        program: Program | None,
        preloaded: Preloaded | None,
        environment: Mapping[str, str] | None,
    ) -> None:
        """Take the runtime's own options. `hosts_all`: async handlers run in an async worker even where they could run
        in this process."""
        self._orphans = orphans
        self._operations = operations
        self._warm, self._most = workers, most_workers
        self._preload = preload
        self._hosts_all = hosts_all
        self._program = program
        self._preloaded = preloaded
        self._environment = environment
        self._pool: Pool | None = None
        self._async_pool: AsyncPool | None = None
        self._zygote: socket.socket | None = None
        self._zygote_pids = [] if preloaded is None or preloaded.pid is None else [preloaded.pid]
        self.commands = Supervisors(self._request_fork)
        self._closing = False
        self.home: asyncio.AbstractEventLoop | None = None
        """The loop on which all of them are waited for."""

    @property
    def worker_count(self) -> int:
        return 0 if self._pool is None else self._pool.size

    def needs_async_worker(self, operation: Operation) -> bool:
        return self._hosts_all or isinstance(operation.handler, HandlerReference)

    async def warm_up(self, within_s: float) -> bool:
        warm = await self.pool().warm_up(within_s)
        hosted = any(op.place == "loop" and self.needs_async_worker(op) for op in self._operations())
        return (await self.async_pool().warm_up(within_s) and warm) if hosted else warm

    def pool(self, first: Operation | None = None) -> Pool:
        if self._pool is None:
            assert self.home is not None
            self._pool = Pool(self.home, self._ensure_preloaded(first), warm=self._warm, most=self._most)
        return self._pool

    def async_pool(self, first: Operation | None = None) -> AsyncPool:
        if self._async_pool is None:
            from .async_pool import AsyncPool

            assert self.home is not None
            self._async_pool = AsyncPool(self.home, self._ensure_preloaded(first), self._orphans)
        return self._async_pool

    def _ensure_preloaded(self, first: Operation | None) -> Preloaded:
        if self._preloaded is None:
            # Whoever makes the first call need not have registered what it calls.
            known = [*self._operations(), *([] if first is None else [first])]
            hosted = [op.handler for op in known if op.place == "loop" and self.needs_async_worker(op)]
            handlers = [op.handler for op in known if op.place == "process"] + hosted
            # Event loops as well, where there will be any: otherwise each process would import them anew.
            has_loops = self._hosts_all or any(op.is_async for op in known)
            own: tuple[str, ...] = ()
            if has_loops:
                from ..process import async_worker_main

                own = (async_worker_main.__name__,)
            self._preloaded = Preloaded(
                self._request_fork,
                program=self._program,
                modules=(*own, *self._preload),
                handlers=[handler for handler in dict.fromkeys(handlers) if not explain_unfindable(handler)],
                environment=self._environment,
            )
        return self._preloaded

    # --- the zygote ---------------------------------------------------------------------------------------

    def _clean_zygote(self) -> socket.socket:
        if self._zygote is None:
            self._zygote, pid = start_clean_zygote()
            self._zygote_pids.append(pid)
        return self._zygote

    def _request_fork(self, note: bytes, fds: list[int]) -> None:
        if self._closing:  # whoever comes now would be looked after by nobody
            raise ipc.Broken("the runtime is closing")
        try:
            ipc.send_fds(self._clean_zygote(), note, fds)
        except ipc.Broken:  # somebody killed it; its supervisors carry on without it, and the next one forks
            self._drop_zygote()
            ipc.send_fds(self._clean_zygote(), note, fds)

    def start_guard(self, timer: DeadlineTimer) -> socket.socket:
        """Have another process kill this one, with all that it runs, once the timer rings. It lives as long as the
        socket that is returned; that ends where somebody has killed it."""
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
        self._collect()  # one that was killed may still be dying; it is collected the next time, or at the end

    def _collect(self) -> None:
        self._zygote_pids = [pid for pid in self._zygote_pids if not _has_ended(pid)]

    async def close(self) -> None:
        """Stop every process, and wait, bounded, until all are gone. A cancellation is passed on after that."""
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
        """Kill every worker and wait, bounded, until each tree is reported gone."""
        workers: list[WorkerProcess] = []
        for pool in (self._pool, self._async_pool):
            if pool is not None:
                workers += pool.kill_all()
        # Those that are up, of both pools, before the zygote: their supervisors go with it, and could not report.
        await _wait_until_gone(worker for worker in workers if worker.is_up)
        if self._preloaded is not None and not all(worker.gone.done() for worker in workers):
            self._preloaded.close()  # it may hang in an import, with the requests for them still in its hands
            await _wait_until_gone(workers)
        for worker in workers:
            worker.end(None)


async def _wait_until_gone(workers: Iterable[WorkerProcess]) -> None:
    if ends := [worker.gone for worker in workers]:
        await asyncio.wait(ends, timeout=CLOSE_LIMIT_S)


def _has_ended(pid: int) -> bool:
    try:
        return os.waitpid(pid, os.WNOHANG)[0] == pid
    except ChildProcessError:
        return True


MAX_DEPTH = 16
# Between two looks at whether a loop still picks up its work, while anything waits to be picked up.
PICKUP_CHECK_S = 0.12

_ISOLATE = "isolate it in a 'process', or on a 'loop' if it is async"
P = TypeVar("P", bound=ProcessCall)


@record
class Counts:
    """Counts for an operator, of calls and of those that did not end well."""

    calls: int = 0
    abandoned: int = 0
    late: int = 0
    observer_errors: int = 0


class Executor:
    """Runs the handlers of one runtime, and knows those that were abandoned."""

    children: ChildProcesses
    home: asyncio.AbstractEventLoop | None = None
    """The loop that entered the runtime; workers and commands are waited for there."""

    def __init__(
        self,
        counts: Counts,
        guards: tuple[Guard, ...],
        on_further_call: Callable[..., Awaitable[Envelope]],
        observe: Observe,
        share_loop: bool,
    ) -> None:
        """Take what makes a call of a call, who is asked about overtime, and whether async handlers run on their
        caller's own loop."""
        self._counts = counts
        self._guards = guards
        self._on_further_call = on_further_call
        self._observe = observe
        self._call_inside_of = self._call_inside  # once, instead of for each call
        self._share_loop = share_loop
        self._threads_of_loops = LoopThreads("shotclock-loop")
        self._loop_carriers = [LoopCarrier(self._threads_of_loops, depth) for depth in range(MAX_DEPTH)]
        self._threads = ThreadCarrier()
        self._timers_of: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, DeadlineTimers] = (
            weakref.WeakKeyDictionary()
        )
        self._last_timers: DeadlineTimers | None = None
        self._orphans: dict[LoopCall | HostCall, int] = {}
        self._pickup_check: asyncio.TimerHandle | None = None
        self._closing = False

    @property
    def orphan_count(self) -> int:
        return len(self._orphans)

    def list_orphans(self, most: int | None = None) -> list[dict[str, object]]:
        """List abandoned work that still runs: its name and for how long."""
        now = monotonic_ns()
        return [
            {"operation": call.name, "running_ms": (now - call.started_ns) // 1_000_000}
            for call in islice(self._orphans, most)
        ]

    def run(self, call: Call, depth: int, listener: CallListener) -> Awaitable[Outcome]:
        """Run guards and handler, in a worker, a host process, a thread or on a loop."""
        operation = call.operation
        assert operation is not None
        call.has_begun = True
        if call.inside_of is not None:
            follow_wind_down(call)
        if call.clocks.soft_ms or call.overtime is not None:
            start_control(call, self._observe)
        guards = self._guards + operation.guards if self._guards else operation.guards
        if operation.place == "process" and not guards and asyncio.get_running_loop() is self.home:
            return self._in_worker(call, depth, listener)
        scope = Scope(call.bound.bell, depth, call.name, call, call, call.overtime_address)
        if operation.place != "loop" or self.children.needs_async_worker(operation):
            return self._run_elsewhere(call, operation, scope, guards, listener)
        if not self._share_loop:
            self._watch_pickups()
        return LoopCall(
            self,
            self._timers(),
            self._loop_carrier(depth),
            call,
            operation,
            call.arguments or {},
            scope,
            guards=guards,
            listener=listener,
            on_further_call=self._on_further_call,
        ).wait()

    async def _run_elsewhere(
        self, call: Call, operation: Operation, scope: Scope, guards: tuple[Guard, ...], listener: CallListener
    ) -> Outcome:
        """Run it in a worker, a host or a thread. Guards are the application's own, maybe async: they run on a loop
        first."""
        arguments = call.arguments or {}
        if guards:
            self._watch_pickups()
            asking = LoopCall(
                self,
                self._timers(),
                self._loop_carrier(scope.depth),
                call,
                operation,
                arguments,
                scope,
                guards=guards,
                guards_only=True,
            )
            outcome = await asking.wait()
            if outcome.problem is not None:
                return outcome
        if operation.place == "thread" and isinstance(operation.handler, HandlerReference):
            message = f"{call.name} is only known by its name here and cannot run in a thread of this process"
            problem = Problem("HANDLER_NOT_IMPORTABLE", message, "validation", suggestion=_ISOLATE)
            return Outcome(Ending.NOT_STARTED, problem)
        if operation.place == "thread":
            return await LoopCall(
                self,
                self._timers(),
                self._threads,
                call,
                operation,
                arguments,
                scope,
                listener=listener,
                on_further_call=partial(self._call_from_thread, call, scope.depth),
            ).wait()
        run = self._in_worker if operation.place == "process" else self._in_host
        elsewhere: Outcome = await self.at_home(partial(run, call, scope.depth, listener))
        return elsewhere

    def _call_from_thread(
        self, call: Call, depth: int, other: Any, arguments: Mapping[str, object], clocks: Clocks
    ) -> Envelope:
        assert self.home is not None
        # Bounded by the child's own deadline, which is inside its caller's.
        calling: Envelope = asyncio.run_coroutine_threadsafe(
            self._call_inside(call, depth, other, arguments, clocks), self.home
        ).result()
        return calling

    def _loop_carrier(self, depth: int) -> LoopCarrier | SharedLoopCarrier:
        if self._share_loop:
            return self._timers().shared_loop
        return self._loop_carriers[depth]

    def _in_worker(self, call: Call, depth: int, listener: CallListener) -> Coroutine[Any, Any, Outcome]:
        operation = call.operation
        assert operation is not None
        task = self._for_process(Task, call, depth, listener)
        return come_to(task) if isinstance(task, Outcome) else self.children.pool(operation).run(task)

    async def _in_host(self, call: Call, depth: int, listener: CallListener) -> Outcome:
        from .async_worker import HostCall

        host_call = self._for_process(HostCall, call, depth, listener)
        if isinstance(host_call, Outcome):
            return host_call
        return await self.children.async_pool(call.operation).run(host_call)

    def _for_process(self, kind: type[P], call: Call, depth: int, listener: CallListener) -> P | Outcome:
        """Return the call as it goes to another process, or why it cannot."""
        assert call.operation is not None
        handler = call.operation.handler
        if (trouble := explain_unfindable(handler)) is not None:
            return Outcome(Ending.NOT_STARTED, Problem("HANDLER_NOT_IMPORTABLE", trouble, "validation"))
        try:
            return kind(call, handler, call.arguments or {}, depth, listener, self._call_inside_of)
        except Exception as error:
            return invalid([{"field": "arguments", "message": f"cannot be sent to a worker process: {error}"}])

    async def _call_inside(
        self, call: Call, depth: int, name: str, arguments: Mapping[str, object], clocks: Clocks
    ) -> Envelope:
        """Make a call inside of another that came without its context, from another process or thread."""
        token = current_scope.set(Scope(call.bound.bell, depth, call.name, call, call=call))
        try:
            return await self._on_further_call(name, arguments, clocks)
        finally:
            current_scope.reset(token)

    async def at_home(self, begin: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
        """Begin and wait for workers and commands on the loop that entered the runtime."""
        assert self.home is not None
        if asyncio.get_running_loop() is self.home:
            return await begin()

        async def begun() -> Any:
            return await begin()

        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(begun(), self.home))

    def _timers(self) -> DeadlineTimers:
        loop = asyncio.get_running_loop()
        timers = self._last_timers
        if timers is None or timers.loop is not loop:
            timers = self._timers_of.get(loop)
            if timers is None:
                timers = self._timers_of[loop] = DeadlineTimers(loop)
            self._last_timers = timers
        return timers

    # --- what cannot be stopped ---------------------------------------------------------------------------

    def note_abandoned(self, call: LoopCall | HostCall) -> None:
        self._counts.abandoned += 1
        self._orphans[call] = monotonic_ns()

    def note_late_end(self, call: LoopCall | HostCall) -> None:
        """Note that abandoned work ended after all. Nobody waits for its result; it only stops counting."""
        self._counts.late += 1
        self._orphans.pop(call, None)

    def note_killed(self, call: HostCall) -> None:
        """Note that abandoned work is gone with its process."""
        self._orphans.pop(call, None)

    def _watch_pickups(self) -> None:
        """Look after the loops for a while. From home: one that is to be looked after may block the moment after."""
        if self._pickup_check is not None or self.home is None or self._closing:
            return
        if running_loop() is self.home:
            self._pickup_check = self.home.call_later(PICKUP_CHECK_S, self._check_pickups)
        else:
            with contextlib.suppress(RuntimeError):  # it is closed
                self.home.call_soon_threadsafe(self._watch_pickups)

    def _check_pickups(self) -> None:
        self._pickup_check = None
        waiting = self._threads_of_loops.relieve_blocked()
        for loop, timers in list(self._timers_of.items()):
            if loop.is_closed():
                self._timers_of.pop(loop, None)
            else:  # other loops' letters may only be opened there: they resume tasks
                waiting = timers.queue.wake_for_deferred() or waiting
        if waiting and not self._closing:
            self._watch_pickups()

    # --- the end ------------------------------------------------------------------------------------------

    async def close(self) -> None:
        """Stop everything that can be stopped, and wait, bounded, until it is gone."""
        self._closing = True
        if self._pickup_check is not None:
            self._pickup_check.cancel()
        await self.children.close()
        if self.home is not None and (timers := self._timers_of.get(self.home)) is not None:
            timers.close()
        if self._threads_of_loops.has_any:  # or a thread would be started to stop none
            await asyncio.to_thread(self._threads_of_loops.close)


async def come_to(outcome: Outcome) -> Outcome:
    return outcome
