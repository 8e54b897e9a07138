"""`ctx.progress` as the client sees it: strictly increasing, not too often, the last word not lost, none after the
answer."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

# Between two notifications of one call: nobody sees more, and a loop that reports each item must not become traffic.
INTERVAL_S = 0.1
# How long the answer waits for the last notification to be taken. Only a client that stopped reading runs this out, and
# it takes no answer either.
LAST_WORD_S = 1.0

SendProgress = Callable[[float, float | None, str | None], Awaitable[None]]


class ProgressReports:
    """Of one call. `heard` is told by the runtime, on the loop."""

    def __init__(self, report: SendProgress) -> None:
        self._report = report
        self._told: float | None = None
        self._latest: tuple[float, float | None, str | None] | None = None
        self._telling: asyncio.Task[None] | None = None
        self._rests = False
        self._closed = False

    def heard(self, done: float, total: float | None, message: str | None) -> None:
        if self._closed or (self._latest is not None and done <= self._latest[0]):
            return
        self._latest = (done, total, message)
        if self._telling is None:
            self._telling = asyncio.get_running_loop().create_task(self._tell())

    async def _tell(self) -> None:
        """Lives as long as there is news, one notification per interval."""
        try:
            while self._has_news and not self._closed:
                await self._tell_latest()
                self._rests = True
                await asyncio.sleep(INTERVAL_S)
                self._rests = False
        finally:
            self._telling = None

    @property
    def _has_news(self) -> bool:
        return self._latest is not None and (self._told is None or self._latest[0] > self._told)

    async def _tell_latest(self) -> None:
        assert self._latest is not None
        done, total, message = self._latest
        self._told = done
        if message and isinstance(done, int) and (total is None or isinstance(total, int)):  # they count something
            message = f"{done} {message}" if total is None else f"{done} of {total} {message}"
        await self._report(done, total, message)

    async def finish(self) -> None:
        """Before the answer: what is not told yet is told now, and nothing after it."""
        self._closed = True
        if (telling := self._telling) is not None:
            if self._rests:
                telling.cancel()
            await asyncio.wait([telling], timeout=LAST_WORD_S)
            telling.cancel()
        if self._has_news:
            last = asyncio.get_running_loop().create_task(self._tell_latest())
            await asyncio.wait([last], timeout=LAST_WORD_S)
            last.cancel()

    def abandon(self) -> None:
        """Nobody listens any more."""
        self._closed = True
        if self._telling is not None:
            self._telling.cancel()
