"""One host process seen from the runtime: what it is told and says, whether it still hears us, how it ends.

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

from . import wire
from .assignment import Report
from .clock import monotonic_ns
from .guests import Guest
from .host import BEGUN, CLOSED, RUNNING, SHARED_SIZE
from .hosted import HEARD_LIMIT_S, STARVED_S, STARVED_TRIES
from .killing import VERIFY_LIMIT_MS
from .pool import RESPAWN_PAUSE_S
from .preloaded import Preloaded
from .processes import REPORT_MARGIN_MS, Patience
from .questions import answered, redispatched
from .spawned import beside
from .workers import MOST_READS
from .zygote import HOST, kill_what_lost_its_supervisor

HEARD_LIMIT_NS = int(HEARD_LIMIT_S * 1e9)
# How long a call may lie in a host that shows no sign of life before it goes to another. Longer than on a loop of this
# process: what the host keeps in its memory is not in the other one.
PICKUP_LIMIT_NS = 500_000_000
# How long a kill may take to be reported; a supervisor that was stopped or is broken runs it out.
KILL_LIMIT_S = (VERIFY_LIMIT_MS + REPORT_MARGIN_MS) / 1000


class Fate(Enum):
    """Why a host ends."""

    DEAF = auto()
    TAINTED = auto()
    CROWDED_OUT = auto()
    CLOSING = auto()
    DIED = auto()
    """By itself: nobody here wanted it to."""


class Owner(Protocol):
    """Who keeps the hosts, and decides about them."""

    loop: asyncio.AbstractEventLoop
    preloaded: Preloaded
    context: contextvars.Context

    def came_up(self, host: HostProcess) -> None: ...
    def heard(self, host: HostProcess, guest: Guest) -> None: ...
    def ended(self, host: HostProcess, guest: Guest, kind: str, payload: object, finished_ns: int) -> None: ...
    def found_deaf(self, host: HostProcess, unheard: list[Guest]) -> None: ...
    def found_blocked(self, host: HostProcess) -> None: ...
    def lost(self, host: HostProcess, report: Report) -> None: ...


class HostProcess:
    """A host process and its supervisor, from fork to the last report."""

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
        self.guests: dict[int, Guest] = {}
        self.gone: asyncio.Future[Report | None] = self._loop.create_future()
        self._numbers = 0
        self._unheard: dict[int, Guest] = {}
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
        self._reports, self._replies = wire.Inbox(self._control), wire.Inbox(self._calls)
        self._loop.add_reader(self._control, self._on_report)
        self._loop.add_reader(self._calls, self._on_reply)

    # --- calls --------------------------------------------------------------------------------------------

    def take(self, guest: Guest) -> None:
        """Give it a call. It is answered exactly once, whatever happens to the process."""
        self._numbers += 1
        guest.host, guest.number = self, self._numbers
        self.guests[guest.number] = guest
        guest.taken_ns = monotonic_ns()
        guest.sign_of_life()
        self._say(*guest.message())
        self._watch_pickup()
        if guest.stopping:
            self.ask_to_wind_down(guest)

    def _watch_pickup(self) -> None:
        if self._pickup is None and not self.is_dying and not self.blocked_by:
            self._picked_up = self._words[BEGUN]
            self._pickup_due_ns = monotonic_ns() + PICKUP_LIMIT_NS
            self._pickup = self._loop.call_later(PICKUP_LIMIT_NS / 1e9, self._check_pickup, context=self._owner.context)

    def _check_pickup(self) -> None:
        """Whether what lies there has been lying for longer than any loop needs that is not blocked."""
        self._pickup = None
        now_ns = monotonic_ns()
        waiting = [guest for guest in self.guests.values() if not self.has_begun(guest)]
        if not waiting or self.is_dying or self.blocked_by:
            return
        is_long = any(now_ns - guest.taken_ns >= PICKUP_LIMIT_NS for guest in waiting)
        is_moving = self._words[BEGUN] != self._picked_up or now_ns - self._sign_ns < PICKUP_LIMIT_NS
        is_starved = now_ns - self._pickup_due_ns > STARVED_S * 1e9
        if is_long and not is_moving and not is_starved:
            self._owner.found_blocked(self)
        else:
            self._watch_pickup()

    def close_to_new(self, why: str) -> list[Guest]:
        """Let nothing begin in it any more. Returns the calls that never will; they are no longer in it."""
        self.blocked_by = why
        self._words[CLOSED] = 1  # first: whatever begins from here on finds it
        unbegun = [guest for guest in self.guests.values() if not self.has_begun(guest)]
        for guest in unbegun:
            del self.guests[guest.number]
            self._unheard.pop(guest.number, None)
        return unbegun

    def has_begun(self, guest: Guest) -> bool:
        return bool(self._words[BEGUN] >= guest.number)

    @property
    def was_any_good(self) -> bool:
        """Whether it came up and was there for a while, so that there is a point in starting another at once."""
        return self.is_ready and bool(self._words[BEGUN] or monotonic_ns() - self._ready_ns > RESPAWN_PAUSE_S * 1e9)

    def ask_to_wind_down(self, guest: Guest) -> None:
        self._say("stopping", guest.number)

    def cancel(self, guest: Guest) -> None:
        """Tell the host to cancel it. Whether the host hears that decides about the host."""
        if self.is_dying:
            return  # its end answers for everybody in it
        guest.asked_ns = monotonic_ns()
        self._unheard[guest.number] = guest
        self._say("cancel", guest.number)
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
        deaf_to = [guest for guest in self._unheard.values() if now_ns - guest.asked_ns >= HEARD_LIMIT_NS]
        if not self._unheard or self.is_dying:
            return
        self._tries += 1
        is_starved = now_ns - self._check_due_ns > STARVED_S * 1e9 and self._tries < STARVED_TRIES
        is_alive = now_ns - self._sign_ns <= HEARD_LIMIT_NS or self._words[BEGUN] != self._pulse
        is_too_late = any(now_ns >= guest.asked_ns + guest.grace_ns for guest in deaf_to)
        if deaf_to and not is_starved and (is_too_late or not is_alive):
            self._owner.found_deaf(self, deaf_to)
            self._unheard = {number: guest for number, guest in self._unheard.items() if not guest.is_abandoned}
        if self._unheard and not self.is_dying:
            self._check_later()

    def running(self) -> Guest | None:
        """Whose code holds the loop at this moment."""
        return self.guests.get(self._words[RUNNING])

    # --- what the process says ----------------------------------------------------------------------------

    def _on_reply(self) -> None:
        try:
            messages = self._replies.receive()
        except BlockingIOError:
            return
        except wire.Broken:
            # It is gone. Its supervisor tells how; what it left below need not be waited for.
            self._loop.remove_reader(self._calls)
            self._order("kill", "its host is gone")
            return
        self._sign_ns = monotonic_ns()
        self._hear_all(messages)

    def _hear_all(self, messages: list[wire.Message]) -> None:
        for message in messages:
            try:
                self._hear(message)
            except Exception as error:  # of whoever listens to progress; the others' messages must not be lost
                self._loop.call_exception_handler({"message": "shotclock host", "exception": error})

    def _hear(self, message: wire.Message) -> None:
        if message[0] == "ready":
            self.is_ready = True
            self._ready_ns = monotonic_ns()
            self._owner.came_up(self)
            return
        if message[0] == "never mind":
            if (further := self._further.get(message[1])) is not None:
                further.cancel()
            return
        guest = self.guests.get(message[1])
        if guest is None:
            return
        match message:
            case ("done", _, str(kind), payload, int(finished_ns)):
                del self.guests[guest.number]
                self._unheard.pop(guest.number, None)
                self._owner.ended(self, guest, kind, payload, finished_ns)
            case ("process", _, str(mark), int(pid)):
                guest.has_started(mark, pid)
            case ("heard", _):
                if self._unheard.pop(guest.number, None) is not None:
                    self._owner.heard(self, guest)
            case ("progress", _, int() | float() as done, total, unit) if not guest.is_abandoned:
                guest.sign_of_life()
                guest.attendant.progress(done, total, unit)
            case ("step", _, str(name)) if not guest.is_abandoned:
                guest.sign_of_life()
                guest.attendant.step(name)
            case ("call", _, int(question), str(name), bytes(arguments), dict(limits)):
                self._attend(question, partial(redispatched, guest, name, arguments, limits))
            case ("ask", _, int(question), str(what), bytes(value)):
                self._attend(question, partial(answered, guest.attendant, what, value))

    def _attend(self, question: int, find_answer: Callable[[], Coroutine[Any, Any, bytes]]) -> None:
        async def answer() -> None:
            self._say("answer", question, await find_answer())

        further = self._further[question] = self._loop.create_task(answer())
        further.add_done_callback(lambda _: self._further.pop(question, None))

    def _on_report(self) -> None:
        try:
            messages = self._reports.receive()
        except BlockingIOError:
            return
        except wire.Broken:
            self.end(None)
            return
        for message in messages:
            if message[0] == "started":
                self._supervisor = message[2]
            if message[0] == "ended":
                self.end(Report.unpack(message[1]))

    # --- what it is told ----------------------------------------------------------------------------------

    def _say(self, *message: object) -> None:
        """Sent at the end of this turn of our loop, together with whatever else is said until then."""
        self._outbox += wire.frame(message)
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
        with contextlib.suppress(wire.Broken, BlockingIOError):
            wire.send(self._control, order)

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

    def end(self, report: Report | None) -> None:
        """The process and everything below it is gone, or its supervisor was killed and its zygote saw to it."""
        if self.gone.done():
            return
        self.is_dying = True
        self._words[CLOSED] = 1
        with contextlib.suppress(wire.Broken, OSError):
            for _ in range(MOST_READS):  # a result sent before the end is still in the socket, and is the truth
                if not self.guests:
                    break
                self._hear_all(self._replies.receive())
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
        if report is None and self.guests:  # nobody has seen what became of it: look, before anything is claimed
            find = partial(kill_what_lost_its_supervisor, self._supervisor)
            beside(self._loop, find, lambda left: self._owner.lost(self, Report(lost=True, survivors=list(left))))
        else:
            self._owner.lost(self, report or Report(lost=True))


def _shared_memory() -> int:
    """A descriptor of memory that both sides map."""
    if hasattr(os, "memfd_create"):
        memory = os.memfd_create("shotclock-host")
    else:
        import tempfile

        with tempfile.TemporaryFile() as file:
            memory = os.dup(file.fileno())
    os.ftruncate(memory, SHARED_SIZE)
    return memory
