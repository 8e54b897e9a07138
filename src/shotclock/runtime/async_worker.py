"""One async worker seen from the runtime: what it is told and says, whether it still hears us, how it ends.

It is told of everything at the end of a turn of our loop, in one write. What it has begun, and whose code holds its
loop, can be read from shared memory even when it does not answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import mmap
import os
import socket
from collections.abc import Callable, Coroutine
from enum import Enum, auto
from functools import partial
from typing import Any, Protocol

from ..process import ipc
from ..process.async_worker_main import BEGUN, CLOSED, RUNNING, SHARED_SIZE
from ..process.call_processes import run_beside
from ..process.clock import monotonic_ns
from ..process.command_task import CommandReport
from ..process.kill import VERIFY_LIMIT_MS
from ..process.zygote import HOST, kill_what_lost_its_supervisor
from .command_runner import REPORT_MARGIN_MS, Patience
from .host_call import HostCall
from .loop_call import HEARD_LIMIT_S, STARVED_S, STARVED_TRIES
from .preloaded_zygote import Preloaded
from .upcalls import answer_question, dispatch_call
from .worker_pool import RESPAWN_PAUSE_S
from .worker_process import MOST_READS

HEARD_LIMIT_NS = int(HEARD_LIMIT_S * 1e9)
# How long a call may lie in a worker that shows no sign of life before it goes to another. Longer than on a loop of
# this process: what the worker keeps in its memory is not in the other one.
PICKUP_LIMIT_NS = 500_000_000
# How long a kill may take to be reported; a supervisor that was stopped or is broken runs it out.
KILL_LIMIT_S = (VERIFY_LIMIT_MS + REPORT_MARGIN_MS) / 1000


class Fate(Enum):
    """Reason why an async worker ends."""

    DEAF = auto()
    TAINTED = auto()
    CROWDED_OUT = auto()
    CLOSING = auto()
    DIED = auto()
    """By itself: nobody here wanted it to."""


class Owner(Protocol):
    """Owner of the async workers, which decides about them."""

    loop: asyncio.AbstractEventLoop
    preloaded: Preloaded
    context: contextvars.Context

    def on_ready(self, worker: AsyncWorker) -> None: ...
    def on_heard(self, worker: AsyncWorker, host_call: HostCall) -> None: ...
    def on_ended(
        self, worker: AsyncWorker, host_call: HostCall, kind: str, payload: object, finished_ns: int
    ) -> None: ...
    def on_deaf(self, worker: AsyncWorker, unheard: list[HostCall]) -> None: ...
    def on_blocked(self, worker: AsyncWorker) -> None: ...
    def on_lost(self, worker: AsyncWorker, report: CommandReport) -> None: ...


class AsyncWorker:
    """An async worker and its supervisor, from fork to the last report."""

    def __init__(self, owner: Owner) -> None:
        self._owner = owner
        self._loop = owner.loop
        self.fate = Fate.DIED
        self.is_ready = False
        self.is_dying = False
        self.blocked_by = ""
        """Whose code blocks its loop, where it is not killed for that yet; nothing begins in it any more."""
        self.culprit = ""
        """Whose code held the loop when it was given up, as far as can be known."""
        self.host_calls: dict[int, HostCall] = {}
        self.gone: asyncio.Future[CommandReport | None] = self._loop.create_future()
        self._numbers = 0
        self._unheard: dict[int, HostCall] = {}
        self._check: asyncio.TimerHandle | None = None
        self._check_due_ns = 0
        self._pickup: asyncio.TimerHandle | None = None
        self._pickup_due_ns = 0
        self._picked_up = 0
        self._tries = 0
        self._pulse = -1
        self._sign_ns = self._ready_ns = monotonic_ns()
        self._further: dict[int, asyncio.Task[None]] = {}
        self._outbox = bytearray()
        self._flushing = False
        self._patience: Patience | None = None
        self._supervisor = 0
        self._control, their_control = socket.socketpair()
        self._calls, their_calls = socket.socketpair()
        self._control.setblocking(False)
        self._calls.setblocking(False)
        memory = _shared_memory()
        try:
            self._words = memoryview(mmap.mmap(memory, SHARED_SIZE)).cast("Q")
            owner.preloaded.send(HOST, [their_control.fileno(), their_calls.fileno(), memory])
        except BaseException:
            self._control.close()
            self._calls.close()
            raise
        finally:
            their_control.close()
            their_calls.close()
            os.close(memory)
        self._reports, self._replies = ipc.MessageReader(self._control), ipc.MessageReader(self._calls)
        self._loop.add_reader(self._control, self._on_report)
        self._loop.add_reader(self._calls, self._on_reply)

    # --- calls --------------------------------------------------------------------------------------------

    def take(self, host_call: HostCall) -> None:
        """Give it a call. It is answered exactly once, whatever happens to the process."""
        self._numbers += 1
        host_call.host, host_call.number = self, self._numbers
        self.host_calls[host_call.number] = host_call
        host_call.taken_ns = monotonic_ns()
        host_call.sign_of_life()
        self._send(*host_call.message())
        self._watch_pickup()
        if host_call.stopping:
            self.ask_to_wind_down(host_call)

    def _watch_pickup(self) -> None:
        if self._pickup is None and not self.is_dying and not self.blocked_by:
            self._picked_up = self._words[BEGUN]
            self._pickup_due_ns = monotonic_ns() + PICKUP_LIMIT_NS
            self._pickup = self._loop.call_later(PICKUP_LIMIT_NS / 1e9, self._check_pickup, context=self._owner.context)

    def _check_pickup(self) -> None:
        """Check whether what lies there has been lying for longer than any loop needs that is not blocked."""
        self._pickup = None
        now_ns = monotonic_ns()
        waiting = [host_call for host_call in self.host_calls.values() if not self.has_begun(host_call)]
        if not waiting or self.is_dying or self.blocked_by:
            return
        is_long = any(now_ns - host_call.taken_ns >= PICKUP_LIMIT_NS for host_call in waiting)
        is_moving = self._words[BEGUN] != self._picked_up or now_ns - self._sign_ns < PICKUP_LIMIT_NS
        is_starved = now_ns - self._pickup_due_ns > STARVED_S * 1e9
        if is_long and not is_moving and not is_starved:
            self._owner.on_blocked(self)
        else:
            self._watch_pickup()

    def close_to_new(self, why: str) -> list[HostCall]:
        """Let nothing begin in it any more. Returns the calls that never will; they are no longer in it."""
        self.blocked_by = why
        self._words[CLOSED] = 1  # first: whatever begins from here on finds it
        unbegun = [host_call for host_call in self.host_calls.values() if not self.has_begun(host_call)]
        for host_call in unbegun:
            del self.host_calls[host_call.number]
            self._unheard.pop(host_call.number, None)
        return unbegun

    def has_begun(self, host_call: HostCall) -> bool:
        return bool(self._words[BEGUN] >= host_call.number)

    @property
    def was_any_good(self) -> bool:
        """Return whether it came up and was there for a while, so that there is a point in starting another at once."""
        return self.is_ready and bool(self._words[BEGUN] or monotonic_ns() - self._ready_ns > RESPAWN_PAUSE_S * 1e9)

    def ask_to_wind_down(self, host_call: HostCall) -> None:
        self._send("stopping", host_call.number)

    def cancel(self, host_call: HostCall) -> None:
        """Tell the process to cancel it. Whether it hears that decides about the process."""
        if self.is_dying:
            return  # its end answers for everybody in it
        host_call.asked_ns = monotonic_ns()
        self._unheard[host_call.number] = host_call
        self._send("cancel", host_call.number)
        if self._check is None:
            self._tries = 0
            self._check_later()

    def _check_later(self) -> None:
        self._pulse = self._words[BEGUN]
        self._check_due_ns = monotonic_ns() + HEARD_LIMIT_NS
        self._check = self._loop.call_later(HEARD_LIMIT_S, self._check_heard, context=self._owner.context)

    def _check_heard(self) -> None:
        self._check = None
        now_ns = monotonic_ns()
        deaf_to = [host_call for host_call in self._unheard.values() if now_ns - host_call.asked_ns >= HEARD_LIMIT_NS]
        if not self._unheard or self.is_dying:
            return
        self._tries += 1
        is_starved = now_ns - self._check_due_ns > STARVED_S * 1e9 and self._tries < STARVED_TRIES
        is_alive = now_ns - self._sign_ns <= HEARD_LIMIT_NS or self._words[BEGUN] != self._pulse
        is_too_late = any(now_ns >= host_call.asked_ns + host_call.grace_ns for host_call in deaf_to)
        if deaf_to and not is_starved and (is_too_late or not is_alive):
            self._owner.on_deaf(self, deaf_to)
            self._unheard = {
                number: host_call for number, host_call in self._unheard.items() if not host_call.is_abandoned
            }
        if self._unheard and not self.is_dying:
            self._check_later()

    def running(self) -> HostCall | None:
        """Return the call whose code holds the loop at this moment."""
        return self.host_calls.get(self._words[RUNNING])

    # --- what the process says ----------------------------------------------------------------------------

    def _on_reply(self) -> None:
        try:
            messages = self._replies.receive()
        except BlockingIOError:
            return
        except ipc.Broken:
            # It is gone. Its supervisor tells how; what it left below need not be waited for.
            self._loop.remove_reader(self._calls)
            self._order("kill", "its host is gone")
            return
        self._sign_ns = monotonic_ns()
        self._take_messages(messages)

    def _take_messages(self, messages: list[ipc.Message]) -> None:
        for message in messages:
            try:
                self._take_message(message)
            except Exception as error:  # of whoever listens to progress; the others' messages must not be lost
                self._loop.call_exception_handler({"message": "shotclock host", "exception": error})

    def _take_message(self, message: ipc.Message) -> None:
        if message[0] == "ready":
            self.is_ready = True
            self._ready_ns = monotonic_ns()
            self._owner.on_ready(self)
            return
        if message[0] == "never mind":
            if (further := self._further.get(message[1])) is not None:
                further.cancel()
            return
        host_call = self.host_calls.get(message[1])
        if host_call is None:
            return
        match message:
            case ("done", _, str(kind), payload, int(finished_ns)):
                del self.host_calls[host_call.number]
                self._unheard.pop(host_call.number, None)
                self._owner.on_ended(self, host_call, kind, payload, finished_ns)
            case ("process", _, str(mark), int(pid)):
                host_call.has_started(mark, pid)
            case ("heard", _):
                if self._unheard.pop(host_call.number, None) is not None:
                    self._owner.on_heard(self, host_call)
            case ("progress", _, int() | float() as done, total, unit) if not host_call.is_abandoned:
                host_call.sign_of_life()
                host_call.listener.progress(done, total, unit)
            case ("step", _, str(name)) if not host_call.is_abandoned:
                host_call.sign_of_life()
                host_call.listener.step(name)
            case ("call", _, int(question), str(name), bytes(arguments), dict(limits)):
                self._answer_later(question, partial(dispatch_call, host_call, name, arguments, limits))
            case ("ask", _, int(question), str(what), bytes(value)):
                self._answer_later(question, partial(answer_question, host_call.listener, what, value))

    def _answer_later(self, question: int, find_answer: Callable[[], Coroutine[Any, Any, bytes]]) -> None:
        async def answer() -> None:
            self._send("answer", question, await find_answer())

        further = self._further[question] = self._loop.create_task(answer())
        further.add_done_callback(lambda _: self._further.pop(question, None))

    def _on_report(self) -> None:
        try:
            messages = self._reports.receive()
        except BlockingIOError:
            return
        except ipc.Broken:
            self.end(None)
            return
        for message in messages:
            if message[0] == "started":
                self._supervisor = message[2]
            if message[0] == "ended":
                self.end(CommandReport.unpack(message[1]))

    # --- what it is told ----------------------------------------------------------------------------------

    def _send(self, *message: object) -> None:
        """Send a message at the end of this turn of our loop, together with whatever else is sent until then."""
        self._outbox += ipc.frame(message)
        if not self._flushing:
            self._flushing = True
            self._loop.call_soon(self._flush, context=self._owner.context)

    def _flush(self) -> None:
        self._flushing = False
        if self.gone.done():
            return
        try:
            while self._outbox:
                del self._outbox[: self._calls.send(self._outbox)]
        except (BlockingIOError, InterruptedError):
            self._flushing = True
            self._loop.add_writer(self._calls, self._flush_rest)
        except OSError:
            pass  # it is dying; its supervisor will report

    def _flush_rest(self) -> None:
        self._sign_ns = monotonic_ns()  # it has read something
        self._loop.remove_writer(self._calls)
        self._flush()

    def _order(self, *order: object) -> None:
        with contextlib.suppress(ipc.Broken, BlockingIOError):
            ipc.send(self._control, order)

    # --- the end ------------------------------------------------------------------------------------------

    def kill(self, fate: Fate, culprit: str = "") -> None:
        if self.is_dying or self.gone.done():
            return
        self.is_dying = True
        self.fate, self.culprit = fate, culprit
        self._words[CLOSED] = 1
        self._order("kill", fate.name.lower())
        self._patience = Patience(self._loop, self._supervisor, 0, self._give_up)

    def _give_up(self) -> None:
        self.end(None)

    def end(self, report: CommandReport | None) -> None:
        """Close it: the process and everything below it is gone, or its supervisor was killed and its zygote saw to
        it."""
        if self.gone.done():
            return
        self.is_dying = True
        self._words[CLOSED] = 1
        with contextlib.suppress(ipc.Broken, OSError):
            for _ in range(MOST_READS):  # a result sent before the end is still in the socket, and is the truth
                if not self.host_calls:
                    break
                self._take_messages(self._replies.receive())
        for handle in (self._check, self._pickup, self._patience):
            if handle is not None:
                handle.cancel()
        for further in list(self._further.values()):
            further.cancel()  # whoever asked is gone
        for sock in (self._control, self._calls):
            self._loop.remove_reader(sock)
            self._loop.remove_writer(sock)
            sock.close()
        self._words = memoryview(bytearray(self._words)).cast("Q")  # what it says from here on; the memory is let go
        self.gone.set_result(report)
        if report is None and self.host_calls:  # nobody has seen what became of it: look, before anything is claimed
            find = partial(kill_what_lost_its_supervisor, self._supervisor)
            run_beside(
                self._loop, find, lambda left: self._owner.on_lost(self, CommandReport(lost=True, survivors=list(left)))
            )
        else:
            self._owner.on_lost(self, report or CommandReport(lost=True))


def _shared_memory() -> int:
    """Return a descriptor of memory that both sides map."""
    if hasattr(os, "memfd_create"):
        memory = os.memfd_create("shotclock-host")
    else:
        import tempfile

        with tempfile.TemporaryFile() as file:
            memory = os.dup(file.fileno())
    os.ftruncate(memory, SHARED_SIZE)
    return memory
