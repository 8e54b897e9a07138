"""Changes of the inbox as server-sent events, for as long as somebody reads them.

    event: hello      what time it is here; sent first
    event: proposal   the summary of one that is new or changed; its `id` is the number to go on from
    event: reminder   one that expires soon
    event: alive      every 15 s, so that silence means that the connection is dead

Whoever comes back with `Last-Event-ID` (or `?after=`) gets what was missed. Whoever does not read is let go of, and may
come back the same way. Whose token was revoked, or session has ended, is told nothing more.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections import Counter
from typing import Any

from starlette.requests import Request
from starlette.types import Receive, Scope, Send

from ...core.errors import Failure
from ...core.proposal import Summary
from ...inbox.inbox import Inbox
from ...process.clock import wall_time
from .auth import is_still_known, principal_of
from .proposal_json import summary
from .requests import mistake
from .responses import refusal

HEARTBEAT_S = 15.0
# How many changes are read ahead for one reader, and how long one piece may take to be taken from us. What is not read
# ahead stays where it is, in the store.
MOST_WAITING = 256
TAKEN_WITHIN_S = 20.0
MOST_STREAMS = 256
MOST_STREAMS_EACH = 24


class Streams:
    """All readers of one server. ASGI application of the events' address."""

    def __init__(self, inbox: Any) -> None:
        self._inbox = inbox
        self._open: Counter[str] = Counter()
        self._ending = asyncio.Event()

    def end(self) -> None:
        """Everybody is let go of, at once: the server is about to leave."""
        self._ending.set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        principal = principal_of(request)
        who = f"{principal.role} {principal.name}"
        try:
            after = _after(request)
            if self._open.total() >= MOST_STREAMS or self._open[who] >= MOST_STREAMS_EACH:
                raise Failure("RATE_LIMITED", "too many event streams are open", retry_after_ms=5_000)
            inbox: Inbox = self._inbox()
        except Failure as failure:
            await refusal("inbox events", failure)(scope, receive, send)
            return
        self._open[who] += 1
        try:
            await _Stream(inbox, request, after, self._ending).run(receive, send)
        finally:
            self._open[who] -= 1
            if not self._open[who]:
                del self._open[who]


def _after(request: Request) -> int | None:
    said = request.headers.get("last-event-id") or request.query_params.get("after")
    if not said:
        return None
    if not (said.isascii() and said.isdecimal() and len(said) < 19):
        raise mistake("after", "the id of the last event is a whole number")
    return int(said)


class _Stream:
    def __init__(self, inbox: Inbox, request: Request, after: int | None, ending: asyncio.Event) -> None:
        self._inbox = inbox
        self._request = request
        self._principal = principal_of(request)
        self._after = after
        self._ending = ending
        self._waiting: asyncio.Queue[bytes] = asyncio.Queue(MOST_WAITING)

    async def run(self, receive: Receive, send: Send) -> None:
        headers = [
            (b"content-type", b"text/event-stream; charset=utf-8"),
            (b"cache-control", b"no-store"),
            (b"x-accel-buffering", b"no"),
        ]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        tasks = [
            asyncio.ensure_future(work)
            for work in (self._read(), self._write(send), _until_gone(receive), self._ending.wait())
        ]
        try:
            # Unbounded on purpose: a stream lasts until its reader goes, or does not read, or the server leaves.
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks, timeout=TAKEN_WITHIN_S)
        with contextlib.suppress(OSError, TimeoutError):
            async with asyncio.timeout(TAKEN_WITHIN_S):
                await send({"type": "http.response.body", "body": b""})
        for task in tasks:  # what went wrong is said where bugs are said
            error = task.exception() if task.done() and not task.cancelled() else None
            if error is not None and not isinstance(error, _TooSlow | OSError):
                raise error

    async def _read(self) -> None:
        await self._waiting.put(event("hello", {"now": wall_time().iso()}))
        async for change in self._inbox.changes(self._after):
            proposal = change if isinstance(change, Summary) else change.proposal
            if not self._principal.may_see(proposal):
                continue
            said = summary(proposal, self._principal)
            name = "proposal" if isinstance(change, Summary) else "reminder"
            await self._waiting.put(event(name, said, proposal.seq))  # as fast as it is taken, which is bounded below

    async def _write(self, send: Send) -> None:
        while True:  # not with wait_for, which in Python 3.11 may swallow that we are to end
            try:
                async with asyncio.timeout(HEARTBEAT_S):
                    text = await self._waiting.get()
            except TimeoutError:
                text = event("alive", {})
            while not self._waiting.empty():
                text += self._waiting.get_nowait()
            if not await is_still_known(self._request):
                return
            try:
                async with asyncio.timeout(TAKEN_WITHIN_S):
                    await send({"type": "http.response.body", "body": text, "more_body": True})
            except TimeoutError:
                raise _TooSlow from None


class _TooSlow(Exception):
    """The reader does not read."""


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def event(name: str, data: dict[str, Any], seq: int | None = None) -> bytes:
    id_line = "" if seq is None else f"id: {seq}\n"
    return f"{id_line}event: {name}\ndata: {json.dumps(data, separators=(',', ':'))}\n\n".encode()
