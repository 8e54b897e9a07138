"""Child processes of one runtime: who forks them, and who looks after which.

    zygote (started when the first is needed) ─┬─ supervisors of commands
                                               └─ preloaded zygote ─┬─ the pool of workers
                                                                    └─ the workers of async handlers

Nothing is started before somebody needs it; `close` ends all of it.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable, Iterable, Mapping

from ..core.operation import HandlerReference, Operation
from ..process import async_worker_main, ipc
from ..process.zygote import start_clean_zygote
from .async_pool import AbandonedHostCalls, AsyncPool
from .command_runner import Supervisors, run_shielded
from .preloaded_zygote import Preloaded, Program
from .worker_pool import Pool
from .worker_process import explain_unfindable

# How long closing waits for the zygote, which itself waits for its supervisors.
ZYGOTE_LIMIT_S = 3.0
ZYGOTE_PAUSE_S = 0.005
# All that closing waits for: commands, workers, workers, zygote, three seconds each. A blocked loop runs it out.
CLOSING_LIMIT_S = 15.0


class ChildProcesses:
    """Workers, async workers, commands and zygotes of one runtime."""

    def __init__(
        self,
        books: AbandonedHostCalls,
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
        self._books = books
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
            assert self.home is not None
            self._async_pool = AsyncPool(self.home, self._ensure_preloaded(first), self._books)
        return self._async_pool

    def _ensure_preloaded(self, first: Operation | None) -> Preloaded:
        if self._preloaded is None:
            # Whoever makes the first call need not have registered what it calls.
            known = [*self._operations(), *([] if first is None else [first])]
            hosted = [op.handler for op in known if op.place == "loop" and self.needs_async_worker(op)]
            handlers = [op.handler for op in known if op.place == "process"] + hosted
            # Event loops as well, where there will be any: otherwise each process would import them anew.
            has_loops = self._hosts_all or any(op.is_async for op in known)
            own = (async_worker_main.__name__,) if has_loops else ()
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
        # Together: where the zygote has to go with the one, it takes the other with it.
        await asyncio.gather(*[forks.close() for forks in (self._pool, self._async_pool) if forks is not None])
        if self._preloaded is not None:
            self._preloaded.close()
        self._drop_zygote()
        for _ in range(int(ZYGOTE_LIMIT_S / ZYGOTE_PAUSE_S)):
            self._collect()
            if not self._zygote_pids:
                break
            await asyncio.sleep(ZYGOTE_PAUSE_S)


def _has_ended(pid: int) -> bool:
    try:
        return os.waitpid(pid, os.WNOHANG)[0] == pid
    except ChildProcessError:
        return True
