"""A command run from an event loop: the zygote forks its supervisor, the loop only waits for the report."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable, Coroutine
from typing import Any

from ..core.deadlines import NS_PER_MS
from . import wire
from .clock import monotonic_ns
from .supervisor import VERIFY_LIMIT_MS, Assignment, Report
from .zygote import COMMAND

# Past the kill and its verification: a supervisor that has not reported by then is broken or was stopped.
REPORT_MARGIN_MS = 2_000
# Between two tries to reach a zygote that is behind; it forks a supervisor in about a millisecond.
BEHIND_PAUSE_S = 0.005


async def run_command(request_fork: Callable[[bytes, list[int]], None], task: Assignment) -> Report:
    """Run a command to its end. Cancelling this stops the command first. Nothing survives but what is reported."""
    loop = asyncio.get_running_loop()
    control, theirs = socket.socketpair()
    control.setblocking(False)
    ended: asyncio.Future[Report] = loop.create_future()
    inbox = wire.Inbox(control)

    def on_message() -> None:
        try:
            messages = inbox.receive()
        except BlockingIOError:
            return
        except wire.Broken:
            loop.remove_reader(control)
            if not ended.done():
                ended.set_result(Report())  # the supervisor was killed; its zygote kills what it guarded
            return
        for message in messages:
            if message[0] == "ended" and not ended.done():
                ended.set_result(Report.unpack(message[1]))

    try:
        with theirs:
            while True:
                try:
                    request_fork(COMMAND, [theirs.fileno()])
                    break
                except BlockingIOError:  # hundreds at once: the zygote is behind
                    if task.bell_ns is not None and monotonic_ns() >= task.bell_ns:
                        raise
                    await asyncio.sleep(BEHIND_PAUSE_S)
        await loop.sock_sendall(control, wire.frame((task.pack(),)))
        loop.add_reader(control, on_message)
        limit_s = None
        if task.kill_ns is not None:
            late_ns = task.kill_ns - monotonic_ns() + (VERIFY_LIMIT_MS + REPORT_MARGIN_MS) * NS_PER_MS
            limit_s = max(0.0, late_ns / 1e9)
        try:
            await asyncio.wait([ended], timeout=limit_s)
        except asyncio.CancelledError:
            with contextlib.suppress(wire.Broken):
                wire.send(control, ("stop", "cancelled"))
            stop_s = (task.grace_ms + VERIFY_LIMIT_MS + REPORT_MARGIN_MS) / 1000
            await shielded(asyncio.wait([ended], timeout=stop_s))
            raise
        return ended.result() if ended.done() else Report()
    finally:
        loop.remove_reader(control)
        control.close()  # if anything is still there, its supervisor now kills it


async def shielded(waiting: Coroutine[Any, Any, object]) -> None:
    """Finish a bounded clean-up even if the cancellation is repeated while it runs."""
    task = asyncio.ensure_future(waiting)
    while not task.done():
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.shield(task)
