"""`shotclock serve --reload`: the program is imported anew when one of its files changes.

    files ── change ── new processes import the program ── lists and later calls ── clients are informed
                                └ it cannot be imported: a line on stderr, and the former program stays

Calls that began finish in the processes of their own program (AGENTS.md: a call belongs to its program).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Callable, Iterable
from pathlib import Path

from ...calls.runtime import Runtime
from ...core.catalogue import Catalogue
from ...core.errors import Failure
from ...core.limits import WallTime
from ...core.value_types import value
from ...dispatch.dispatcher import Dispatcher
from ...dispatch.invocation import Target, learn_files
from ...supervise.clock import wall_time
from ._mcp_server import McpServer
from ._tool_calls import ToolCallMiddleware

LOOK_EVERY_S = 0.3
# Python recognises a changed file by the second of its change, and editors write several files one after the other.
SETTLED_MS = 1_000
SETTLES_WITHIN_S = 10.0  # with files that a program writes all the time, or a clock that is wrong
# For an import that itself writes one of the files. A longer one is given up where they change.
IMPORTED_WITHIN_S = 2.0
MOST_FORMER = 3  # replaced programs with calls that have not ended; those of a further one are stopped

Marks = dict[str, tuple[int, int] | None]
Connect = Callable[[Catalogue, Runtime], Dispatcher]


@value
class _Loaded:
    """An imported program whose workers are up."""

    dispatcher: Dispatcher
    files: list[str]


class Reloader:
    def __init__(
        self,
        target: Target,
        server: McpServer,
        since: WallTime,
        begin: Callable[[], Runtime],
        connect: Connect,
        say: Callable[[str], None],
    ) -> None:
        """Prepare. `since` is before the first import, `begin` makes the runtime of a program, and `connect` makes its
        commands callable."""
        self._target, self._server, self._say = target, server, say
        self._since, self._begin, self._connect = since, begin, connect
        self._files: list[str] = []
        self._retiring: set[asyncio.Task[None]] = set()

    @contextlib.asynccontextmanager
    async def watching(self) -> AsyncIterator[None]:
        """Reload until this is left."""
        self._files = await learn_files(self._server.dispatcher.runtime, self._target)
        marks = read_marks(self._files)
        for file, mark in marks.items():
            if mark is not None and mark[0] // 1_000_000 >= self._since.ms:
                marks[file] = None  # edited while the server started, perhaps after the import
        watching = asyncio.create_task(self._watch(marks))
        try:
            yield
        finally:
            for task in (watching, *self._retiring):
                task.cancel()
            await asyncio.gather(watching, *self._retiring, return_exceptions=True)
            await self._server.close_runtimes()

    async def _watch(self, marks: Marks) -> None:
        while True:  # until it is cancelled
            await asyncio.sleep(LOOK_EVERY_S)
            if read_marks(marks) == marks:
                continue
            marks = await self._settled(list(marks))
            loaded = await self._load_while(marks)
            if loaded is None:
                continue
            if isinstance(loaded, _Loaded):
                await self._replace_by(loaded)
                files = self._files
            else:  # the mistake may be in a file that was not imported before
                self._say(f"{self._target} stays as it was: {loaded}")
                files = sorted({*self._files, *_beside(self._files)})
            marks = {**read_marks(files), **{file: marks[file] for file in files if file in marks}}

    async def _load_while(self, marks: Marks) -> _Loaded | str | None:
        """Import the program in other processes. Return it, or the reason why that failed.

        None if the files change meanwhile: an import that hangs must not keep the author waiting.
        """
        loading = asyncio.create_task(self._load())
        try:
            await asyncio.wait([loading], timeout=IMPORTED_WITHIN_S)
            while not loading.done() and read_marks(marks) == marks:
                await asyncio.wait([loading], timeout=LOOK_EVERY_S)
        finally:
            loading.cancel()
            await asyncio.wait([loading])  # bounded by the closing of its runtime
        return None if loading.cancelled() else loading.result()

    async def _settled(self, files: Iterable[str]) -> Marks:
        """Wait until the files stay as they are, and return their marks."""
        marks = read_marks(files)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(SETTLES_WITHIN_S):
                while not _are_old(marks) or read_marks(files) != marks:
                    marks = read_marks(files)
                    await asyncio.sleep(LOOK_EVERY_S)
        return marks

    async def _load(self) -> _Loaded | str:
        runtime = self._begin()
        try:
            await runtime.__aenter__()
            catalogue = await self._target.learn(runtime)
            files = await learn_files(runtime, self._target)
            dispatcher = self._connect(catalogue, runtime)
            await runtime.warm_up()
        except BaseException as error:
            await runtime.close()
            if not isinstance(error, Exception):
                raise
            return f"{error.code if isinstance(error, Failure) else type(error).__name__}: {error}"
        return _Loaded(dispatcher, files)

    async def _replace_by(self, loaded: _Loaded) -> None:
        before = self._server.middleware
        changed = await self._server.use(loaded.dispatcher)
        self._files = loaded.files
        uses_state = any(spec.uses_state for spec in loaded.dispatcher.catalogue.everything)
        rebuilt = "; its state is opened anew" if uses_state else ""
        self._say(f"reloaded {self._target}; changed lists: {', '.join(changed) or 'none'}{rebuilt}")
        retiring = asyncio.create_task(self._retire(before))
        self._retiring.add(retiring)
        retiring.add_done_callback(self._retiring.discard)
        for former in self._server.former[:-MOST_FORMER]:
            former.stop("a reload")
            await former.dispatcher.runtime.close()

    async def _retire(self, former: ToolCallMiddleware) -> None:
        """Close the processes of a replaced program once its calls have ended."""
        await former.until_done()
        await former.dispatcher.runtime.close()
        self._server.former.remove(former)


def read_marks(files: Iterable[str]) -> Marks:
    """Return the time of change and the size of each file; None for one that is not there."""
    marks: Marks = {}
    for file in files:
        try:
            found = os.stat(file)
            marks[file] = (found.st_mtime_ns, found.st_size)
        except OSError:
            marks[file] = None
    return marks


def _are_old(marks: Marks) -> bool:
    now_ms = wall_time().ms
    return all(mark is None or now_ms - mark[0] // 1_000_000 >= SETTLED_MS for mark in marks.values())


def _beside(files: Iterable[str]) -> Iterable[str]:
    folders = {os.path.dirname(file) for file in files}
    return (str(path) for folder in folders for path in Path(folder).glob("*.py"))
