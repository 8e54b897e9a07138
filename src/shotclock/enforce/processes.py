"""A command run from an event loop: the zygote forks its supervisor, the loop only waits for the report."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

from ..core.deadlines import NS_PER_MS
from . import wire
from .assignment import Assignment, Report
from .clock import monotonic_ns
from .supervisor import VERIFY_LIMIT_MS
from .zygote import COMMAND

# Past the kill and its verification: a supervisor that has not reported by then is broken or was stopped.
REPORT_MARGIN_MS = 2_000
# Between two tries to reach a zygote that is behind; it forks a supervisor in about a millisecond.
BEHIND_PAUSE_S = 0.005
# How long a cancelled command that has not been reported as started is waited for.
CALL_OFF_S = 0.5
# How long closing waits for the commands it kills: a kill and its verification.
STOP_ALL_S = 3.0


@dataclass(eq=False, slots=True)
class Running:
    """A command's supervisor, seen from the loop that waits for it."""

    control: socket.socket
    ended: asyncio.Future[Report]
    started: bool = False

    def order(self, order: str, why: str) -> None:
        with contextlib.suppress(wire.Broken, BlockingIOError):
            wire.send(self.control, (order, why))

    def receive(self, inbox: wire.Inbox) -> None:
        try:
            messages = inbox.receive()
        except BlockingIOError:
            return
        except wire.Broken:
            self.ended.get_loop().remove_reader(self.control)
            self._end(Report())  # the supervisor was killed; its zygote kills what it guarded
            return
        for message in messages:
            if message[0] == "started":
                self.started = True
            elif message[0] == "ended":
                self._end(Report.unpack(message[1]))

    def _end(self, report: Report) -> None:
        if not self.ended.done():
            self.ended.set_result(report)


async def run_command(
    request_fork: Callable[[bytes, list[int]], None], task: Assignment, all_running: set[Running]
) -> Report:
    """Run a command to its end. Cancelling this stops the command first. Nothing survives but what is reported."""
    try:
        return await _run_once(request_fork, task, all_running)
    except NeverTold:  # its zygote was killed with the request in its hands; nothing began
        return await _run_once(request_fork, task, all_running)


class NeverTold(OSError):
    """No supervisor took the assignment."""


async def _run_once(
    request_fork: Callable[[bytes, list[int]], None], task: Assignment, all_running: set[Running]
) -> Report:
    loop = asyncio.get_running_loop()
    control, theirs = socket.socketpair()
    control.setblocking(False)
    running = Running(control, loop.create_future())
    all_running.add(running)
    try:
        with theirs:
            await request(request_fork, [theirs.fileno()], task)
        try:
            await loop.sock_sendall(control, wire.frame((task.pack(),)))
        except OSError as error:
            raise NeverTold(*error.args) from error
        loop.add_reader(control, running.receive, wire.Inbox(control))
        limit_s = None
        if task.kill_ns is not None:
            late_ns = task.kill_ns - monotonic_ns() + (VERIFY_LIMIT_MS + REPORT_MARGIN_MS) * NS_PER_MS
            limit_s = max(0.0, late_ns / 1e9)
        await asyncio.wait([running.ended], timeout=limit_s)
        return running.ended.result() if running.ended.done() else Report()
    except asyncio.CancelledError:
        running.order("stop", "cancelled")
        # What has not started is called off by that, and there is nothing to wait for.
        stop_s = (task.grace_ms + VERIFY_LIMIT_MS + REPORT_MARGIN_MS) / 1000 if running.started else CALL_OFF_S
        await shielded(asyncio.wait([running.ended], timeout=stop_s))
        raise
    finally:
        all_running.discard(running)
        loop.remove_reader(control)
        control.close()  # if anything is still there, its supervisor now kills it


async def request(request_fork: Callable[[bytes, list[int]], None], fds: list[int], task: Assignment) -> None:
    """Ask for a supervisor. The first descriptor is its control; two more are the work's own stdin and stdout."""
    while True:
        try:
            request_fork(COMMAND, fds)
            return
        except BlockingIOError:  # hundreds at once: the zygote is behind
            if task.bell_ns is not None and monotonic_ns() >= task.bell_ns:
                raise
            await asyncio.sleep(BEHIND_PAUSE_S)


async def stop_all(all_running: set[Running]) -> None:
    """Kill every command and wait, bounded, for the reports."""
    for running in list(all_running):
        running.order("kill", "closing")
    if all_running:
        await asyncio.wait([running.ended for running in all_running], timeout=STOP_ALL_S)


async def shielded(waiting: Coroutine[Any, Any, object]) -> None:
    """Finish a bounded clean-up even if the cancellation is repeated while it runs."""
    task = asyncio.ensure_future(waiting)
    while not task.done():
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.shield(task)
