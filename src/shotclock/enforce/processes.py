"""Commands run from an event loop: a supervisor runs each, the loop only waits for its report.

The zygote forks a supervisor where there is none to spare. One whose command is gone, with all it started, waits for
the next: that saves two forks, which cost more than most commands do.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
from collections.abc import Callable, Coroutine
from typing import Any

from ..core.clocks import ClockKind
from ..core.deadlines import NS_PER_MS
from . import wire
from .assignment import Assignment, Report
from .clock import monotonic_ns
from .killing import VERIFY_LIMIT_MS
from .zygote import COMMAND

# Past the kill and its verification: a supervisor that has not reported by then is broken or was stopped.
REPORT_MARGIN_MS = 2_000
# Past the bell: one that has not even said that its command started hangs in starting it. Dead network mounts do that.
START_MARGIN_MS = 250
# Between two tries to reach a zygote that is behind; it forks a supervisor in about a millisecond.
BEHIND_PAUSE_S = 0.005
# How long a cancelled command that has not been reported as started is waited for.
CALL_OFF_S = 0.5
# How long closing waits for the commands it kills: a kill and its verification.
STOP_ALL_S = 3.0
# Supervisors kept for later commands. Each is a small process; more than these seldom run at once for long.
MOST_SPARE = 8

RequestFork = Callable[[bytes, list[int]], None]


class Running:
    """A supervisor, seen from the loop that waits for what it runs."""

    __slots__ = ("_inbox", "_loop", "control", "ended", "lost", "ordered", "pid", "started")

    def __init__(self, control: socket.socket) -> None:
        control.setblocking(False)
        self.control = control
        self.lost = False
        self.pid = 0
        """Its own, once it has said that it can be used again."""
        self._inbox = wire.Inbox(control)
        self._loop = asyncio.get_running_loop()
        self.begin()
        self._loop.add_reader(control, self._receive)

    def begin(self) -> None:
        """Nothing is known of a command yet."""
        self.started = False
        self.ordered = False
        self.ended: asyncio.Future[Report] = self._loop.create_future()

    async def tell(self, task: Assignment) -> None:
        """Raises NeverTold where there is nobody."""
        frame = wire.frame((task.pack(),))
        try:
            sent = self.control.send(frame)
            if sent < len(frame):
                await self._loop.sock_sendall(self.control, frame[sent:])
        except OSError as error:
            raise NeverTold(*error.args) from error

    def order(self, order: str, detail: object) -> None:
        self.ordered = True
        with contextlib.suppress(wire.Broken, BlockingIOError):
            wire.send(self.control, (order, detail))

    def close(self) -> None:
        """If anything is still there, its supervisor now kills it."""
        self._loop.remove_reader(self.control)
        self._loop.remove_writer(self.control)  # or its number, soon somebody else's, would still be waited for
        self.control.close()

    def end(self, report: Report) -> None:
        if not self.ended.done():
            self.ended.set_result(report)

    def give_up_starting(self, task: Assignment) -> None:
        """At its bell, a command whose start was never reported. Its zygote kills whatever there is of it."""
        if self.pid and not self.started and not self.ended.done():
            with contextlib.suppress(OSError):
                os.kill(self.pid, signal.SIGKILL)
            self.end(Report(fired=ClockKind.TIMEOUT.value, elapsed_ns=monotonic_ns() - task.started_ns))

    def _receive(self) -> None:
        try:
            messages = self._inbox.receive()
        except BlockingIOError:
            return
        except wire.Broken as broken:
            self.lost = True
            self._loop.remove_reader(self.control)
            if isinstance(broken.__cause__, ConnectionResetError) and not self.ended.done():
                self.ended.set_exception(NeverTold("killed before it read what it was sent"))
                self.ended.exception()  # whoever was cancelled meanwhile does not ask for it
            self.end(Report())  # the supervisor was killed; its zygote kills what it guarded
            return
        for message in messages:
            if message[0] == "started":
                self.started = True
            elif message[0] == "ended":
                report = Report.unpack(message[1])
                self.pid = report.spare_pid
                self.end(report)


class NeverTold(OSError):
    """No supervisor took the assignment."""


class Supervisors:
    """Those of one runtime: what they run now, and the ones to spare."""

    def __init__(self, request_fork: RequestFork) -> None:
        self._request_fork = request_fork
        self.running: set[Running] = set()
        self._spare: list[Running] = []
        self._closing = False

    async def run(self, task: Assignment) -> Report:
        """Run a command to its end. Cancelling this stops the command first. Nothing survives but what is reported."""
        for _ in range(len(self._spare) + 1):
            with contextlib.suppress(NeverTold):  # it was killed before it read that, or its zygote was; nothing began
                return await self._run_once(task)
        return await self._run_once(task)

    async def begin(self, task: Assignment, fds: list[int]) -> Running:
        """A fresh supervisor with its assignment. Of the work's own stdin and stdout, the ends are in `fds`."""
        control, theirs = socket.socketpair()
        running = Running(control)
        try:
            with theirs:
                await self._request([theirs.fileno(), *fds], task)
            await running.tell(task)
        except BaseException:
            running.close()
            raise
        return running

    async def stop_all(self) -> None:
        """Kill every command and wait, bounded, for the reports."""
        self._closing = True
        self.dismiss()
        for running in list(self.running):
            running.order("kill", "closing")
        if self.running:
            await asyncio.wait([running.ended for running in self.running], timeout=STOP_ALL_S)

    def count_in(self, running: Running) -> None:
        """It has its assignment. Where everybody was told to stop meanwhile, it has not heard that."""
        self.running.add(running)
        if self._closing:
            running.order("kill", "closing")

    def dismiss(self) -> None:
        """Those who wait for something to do."""
        while self._spare:
            self._spare.pop().close()

    async def _run_once(self, task: Assignment) -> Report:
        running = self._take_spare()
        if running is None:
            running = await self.begin(task, [])
        else:
            try:
                await running.tell(task)
            except BaseException:
                running.close()
                raise
        self.count_in(running)
        alarms = self._watch(running, task)
        try:
            return await asyncio.shield(running.ended)
        except asyncio.CancelledError as cancelled:
            running.order("stop", "cancelled")
            # What has not started is called off by that, and there is nothing to wait for.
            there = running.started or running.pid
            stop_s = (task.grace_ms + VERIFY_LIMIT_MS + REPORT_MARGIN_MS) / 1000 if there else CALL_OFF_S
            await shielded(asyncio.wait([running.ended], timeout=stop_s))
            if running.ended.done() and running.ended.exception() is None:
                # Not an exception of its own: `asyncio.timeout` knows a cancellation by its very class.
                cancelled.report = running.ended.result()  # type: ignore[attr-defined]
            raise
        finally:
            for alarm in alarms:
                alarm.cancel()
            self.running.discard(running)
            self._give_back(running)

    def _watch(self, running: Running, task: Assignment) -> list[asyncio.TimerHandle]:
        """What ends the waiting where the supervisor does not."""
        alarms: list[asyncio.TimerHandle] = []
        loop, now_ns = asyncio.get_running_loop(), monotonic_ns()
        if task.kill_ns is not None:
            late_ns = task.kill_ns - now_ns + (VERIFY_LIMIT_MS + REPORT_MARGIN_MS) * NS_PER_MS
            alarms.append(loop.call_later(max(0.0, late_ns / 1e9), running.end, Report()))
        if task.bell_ns is not None and running.pid:
            late_ns = task.bell_ns - now_ns + START_MARGIN_MS * NS_PER_MS
            alarms.append(loop.call_later(max(0.0, late_ns / 1e9), running.give_up_starting, task))
        return alarms

    def _take_spare(self) -> Running | None:
        while self._spare:
            running = self._spare.pop()
            if not running.lost:
                running.begin()
                return running
            running.close()
        return None

    def _give_back(self, running: Running) -> None:
        # An order that came too late would be taken for one about the next command.
        can_be_used = running.pid and running.ended.done() and not running.ordered and not running.lost
        if can_be_used and len(self._spare) < MOST_SPARE:
            self._spare.append(running)
        else:
            running.close()

    async def _request(self, fds: list[int], task: Assignment) -> None:
        """Ask for a supervisor. The first descriptor is its control."""
        while True:
            try:
                self._request_fork(COMMAND, fds)
                return
            except BlockingIOError:  # hundreds at once: the zygote is behind
                if task.bell_ns is not None and monotonic_ns() >= task.bell_ns:
                    raise
                await asyncio.sleep(BEHIND_PAUSE_S)


async def shielded(waiting: Coroutine[Any, Any, object]) -> None:
    """Finish a bounded clean-up even if the cancellation is repeated while it runs."""
    task = asyncio.ensure_future(waiting)
    while not task.done():
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.shield(task)
