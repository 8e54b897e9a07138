"""A worker process seen from the runtime: what it is given, what it answers, how it ends.

A worker serves one call at a time over its own socket. It arms a timer for each call that its supervisor hears,
and the supervisor kills it without being told, so the loop this runs on may be late without the work living
longer.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import pickle
import socket
import sys
from collections import deque
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import field
from functools import lru_cache, partial
from math import inf
from typing import Any, NamedTuple, Protocol

from ..core.clocks import ClockKind
from ..core.deadlines import NS_PER_MS
from ..core.operation import Handler, HandlerReference
from ..core.records import dataclass
from ..process import ipc
from ..process.call_processes import run_beside
from ..process.clock import monotonic_ns
from ..process.command_task import CommandReport
from ..process.context import CallListener
from ..process.kernel import DeadlineTimer
from ..process.worker_main import CLOSE_CALL_NS
from ..process.zygote import WORKER, kill_what_lost_its_supervisor
from .call import Call, Outcome
from .command_runner import Patience
from .loop_threads import Waiter
from .outcomes import crash_outcome, warn_left_behind, worker_outcome
from .preloaded_zygote import Preloaded, address_of
from .soft_and_idle import Alarms
from .upcalls import FurtherCall, answer_question, dispatch_call

# A worker that answered its last call within this may have some more waiting in its socket: about as many as it does
# in AHEAD_NS. Waking it for each costs more than a short call takes.
QUICK_NS = 1_000_000
AHEAD_NS = 2_000_000
MOST_AHEAD = 64
# Reads of what is in a worker's socket, several times what fits into one. It may go on writing, and would never end.
MOST_READS = 16


@dataclass(slots=True, eq=False)
class Task:
    """One call of a function, on its way to a worker and back."""

    admission: Call
    handler: Handler
    arguments: Mapping[str, object]
    depth: int
    listener: CallListener
    on_call: FurtherCall
    done: Waiter[Outcome] = field(init=False)
    message: bytes = field(init=False)
    give_up_ns: float = field(init=False)
    """When waiting for a worker ends."""
    waits_for_queue: bool = field(init=False)
    """Whether that is the queue clock's doing, or the bell's."""
    worker: Worker | None = None
    sent_ns: int = 0
    alarms: Alarms | None = None
    stalled: bool = False

    def __post_init__(self) -> None:
        bell, queue_ms = self.admission.bound.bell, self.admission.clocks.queue_ms
        bell_ns = bell.at_ns if bell is not None else inf
        queue_ns = self.admission.started_ns + queue_ms * NS_PER_MS if queue_ms else inf
        self.give_up_ns, self.waits_for_queue = min(bell_ns, queue_ns), queue_ns < bell_ns

    def resolve(self, outcome: Outcome) -> None:
        """Answer the call. The first answer counts: a result and a kill may cross, and only one is delivered."""
        self.done.set_result(outcome)

    def pack(self) -> bytes:
        """Return the message to the worker. Raises what pickle raises: such arguments never leave, and cost no
        worker."""
        admission, handler = self.admission, self.handler
        bell, caller = admission.bound.bell, admission.caller
        return ipc.frame(
            (
                "run",
                *address_of(handler),
                pickle.dumps(dict(self.arguments)),
                admission.name,
                admission.request_id,
                bell.at_ns if bell is not None else 0,
                self.depth,
                self.listener.skipped_steps,
                self.listener.stdin_path,
                (caller.trace_id, caller.sampled, caller.state),
            )
        )


class Vacant(NamedTuple):
    """A supervisor without a worker."""

    control: socket.socket
    pid: int


class Owner(Protocol):
    """Owner of the workers: the pool."""

    loop: asyncio.AbstractEventLoop
    preloaded: Preloaded

    def give_back(self, worker: Worker) -> None: ...
    def on_leaving(self, worker: Worker) -> None: ...
    def on_lost(self, worker: Worker, unstarted: list[Task]) -> None: ...


class Worker:
    """A worker process, from fork to the last report of its supervisor.

    A new supervisor comes from the zygote. One whose last worker is gone forks the next by itself: nothing is there
    to be imported any more, so it counts as started at once, and its first call waits in its socket.
    """

    def __init__(self, pool: Owner, supervisor: Vacant | None = None) -> None:
        self._pool = pool
        self._loop = pool.loop
        self._calls, their_calls = socket.socketpair()
        self._tokens, self._tokens_in = os.pipe()
        self.started = supervisor is not None
        self.vacant: Vacant | None = None
        """When it is gone: its supervisor, waiting to fork another."""
        self._supervisor = 0 if supervisor is None else supervisor.pid
        self.assigned: deque[Task] = deque()
        """What it was given: the first runs, the next waits in its socket with a token in the pipe."""
        self.began_ns = 0
        self._took_ns = QUICK_NS
        self._finished_ns = 0
        self._skipping = 0
        self._outbox = bytearray()
        self.gone: asyncio.Future[CommandReport | None] = self._loop.create_future()
        self._patience: Patience | None = None
        self._further: dict[int, asyncio.Task[None]] = {}
        self.asked_ns = monotonic_ns()
        self.grace_ms = 0
        self.stopping = False
        for fd in (self._calls.fileno(), self._tokens, self._tokens_in):
            os.set_blocking(fd, False)
        try:
            with (
                their_calls,
                contextlib.closing(DeadlineTimer()) as bell,
            ):  # the worker arms it, its supervisor hears it
                fds = [their_calls.fileno(), bell.fd, self._tokens]
                self._control = (
                    _ask_zygote(pool.preloaded, fds) if supervisor is None else _ask_again(supervisor.control, fds)
                )
        except (ipc.Broken, OSError):
            self._close_calls()
            raise
        self._reports, self._replies = ipc.MessageReader(self._control), ipc.MessageReader(self._calls)
        # Their numbers: asyncio tries a lookup first whose KeyError contains the repr, and a socket's asks the kernel.
        self._loop.add_reader(self._control.fileno(), self._on_report)
        self._loop.add_reader(self._calls.fileno(), self._on_reply)

    @property
    def task(self) -> Task | None:
        """Return the call it runs."""
        return self.assigned[0] if self.assigned else None

    @property
    def is_idle(self) -> bool:
        return not self.assigned and not self._skipping

    @property
    def room(self) -> int:
        """Return how many calls it may be given. One whose calls are quick may have some waiting, so that it need not
        sleep between them; they are refilled some at a time, because waking it for each costs more than the call."""
        if self.stopping or self._skipping or (self.assigned and self._outbox):
            return 0
        if self._took_ns >= QUICK_NS:
            return 0 if self.assigned else 1
        most = min(MOST_AHEAD, AHEAD_NS // max(1, self._took_ns))
        return most - len(self.assigned) if len(self.assigned) <= most // 2 else 0

    # --- a call -------------------------------------------------------------------------------------------

    def set_grace(self, grace_ms: int) -> None:
        if grace_ms != self.grace_ms:
            self.grace_ms = grace_ms
            self._order("grace", grace_ms)

    def begin(self, *tasks: Task) -> None:
        """Give the worker calls. Each is resolved exactly once, whatever happens to the process."""
        now_ns = monotonic_ns()
        if not self.assigned:
            self.began_ns = now_ns
        for task in tasks:
            task.worker, task.sent_ns = self, now_ns
            self.assigned.append(task)
        with contextlib.suppress(OSError):  # ours to read as well: it is never broken, and never full
            os.write(self._tokens_in, b"." * len(tasks))
        self._send(b"".join([task.message for task in tasks]))
        for task in tasks:
            if task.alarms is not None:
                task.alarms.sign_of_life()
                if task.alarms.soft_rang:
                    self.ask_to_wind_down(task)

    def take_back(self) -> list[Task]:
        """Return the calls it has not started. From here on it never will: their tokens are ours."""
        try:
            count = len(os.read(self._tokens, MOST_AHEAD))
        except OSError:
            return []
        taken = [self.assigned.pop() for _ in range(min(count, len(self.assigned)))]
        self._skipping += len(taken)
        for task in taken:
            task.worker = None
        return taken[::-1]

    def ask_to_wind_down(self, task: Task) -> None:
        self._send(ipc.frame(("stopping", task.admission.request_id)))

    def _send(self, message: bytes) -> None:
        """Send a message, whole and in order: what is larger than the socket's buffer goes out as the worker reads."""
        if not self._outbox:
            try:
                sent = self._calls.send(message)
            except BlockingIOError:
                sent = 0
            except OSError:
                return  # it is dying; its supervisor will report
            if sent == len(message):
                return
            message = message[sent:]
            self._loop.add_writer(self._calls.fileno(), self._send_more)
        self._outbox += message

    def _send_more(self) -> None:
        try:
            del self._outbox[: self._calls.send(self._outbox)]
        except BlockingIOError:
            return
        except OSError:
            self._outbox.clear()
        if not self._outbox:
            self._loop.remove_writer(self._calls.fileno())

    def stop(self, task: Task, why: str) -> list[Task]:
        """Stop a call by the polite ladder, run by the supervisor: TERM, grace, KILL. Returns what it has not begun.

        It may have ended by now, and the next begun. So that only the one is hit: those behind it are taken back, then
        its answer is looked for.
        """
        if self.gone.done():
            return []
        unbegun = self.take_back()
        self._read_what_is_there()
        if self.task is task:
            self.stopping = True
            self._order("stop", why)
            self._expect_end(self.grace_ms)
        return unbegun

    def kill(self, why: str) -> None:
        self.stopping = True
        self._order("kill", why)
        self._expect_end(0)
        self._pool.on_leaving(self)

    def _expect_end(self, grace_ms: int) -> None:
        """Bound the wait for the end: a supervisor that was itself stopped, or is broken, reports nothing; nobody waits
        for it for ever."""
        if self.gone.done():
            return
        former, self._patience = self._patience, Patience(self._loop, self._supervisor, grace_ms, self._give_up)
        if former is not None:
            self._patience.ends_at = min(self._patience.ends_at, former.ends_at)
            former.cancel()

    def _give_up(self) -> None:
        self.end(None)

    async def wait_gone(self, within_s: float) -> bool:
        """Return whether the worker's whole tree was reported gone in time."""
        await asyncio.wait([self.gone], timeout=within_s)
        return self.gone.done()

    # --- what the process says ----------------------------------------------------------------------------

    def _on_reply(self) -> None:
        try:
            messages = self._replies.receive()
        except BlockingIOError:
            return
        except ipc.Broken:
            self._loop.remove_reader(self._calls.fileno())  # its supervisor tells how it ended
            return
        self._take_all(messages)

    def _read_what_is_there(self) -> None:
        with contextlib.suppress(ipc.Broken, OSError):
            for _ in range(MOST_READS):
                if self.task is None:
                    break
                self._take_all(self._replies.receive())

    def _take_all(self, messages: list[ipc.Message]) -> None:
        for message in messages:
            try:
                self._take(message)
            except Exception as error:  # of whoever listens to progress; the answer behind it must not be lost
                self._loop.call_exception_handler({"message": "shotclock worker", "exception": error})

    def _take(self, message: ipc.Message) -> None:
        task = self.task
        if message[0] == "done" and task is not None:
            self._take_result(task, *message[1:])
            return
        if message[0] == "skipped":
            self._skipping -= 1
            if self.is_idle:
                self._pool.give_back(self)
        if task is None:
            return
        match message:
            case ("progress", int() | float() as done, total, unit):
                if task.alarms is not None:
                    task.alarms.sign_of_life()
                task.listener.progress(done, total, unit)
            case ("step", str(name)):
                if task.alarms is not None:
                    task.alarms.sign_of_life()
                task.listener.step(name)
            case ("ask", int(number), str(question), bytes(value)):
                self._answer_later(task, number, partial(answer_question, task.listener, question, value))
            case ("call", int(number), str(name), bytes(arguments), dict(limits)):
                self._answer_later(task, number, partial(dispatch_call, task, name, arguments, limits))
            case ("never mind", int(number)):
                if (further := self._further.get(number)) is not None:
                    further.cancel()

    def _take_result(
        self, task: Task, kind: str, payload: Any, leaked: list[dict[str, object]], finished_ns: int
    ) -> None:
        bell = task.admission.bound.bell
        if bell is not None:
            to_bell_ns = bell.at_ns - finished_ns
            if to_bell_ns <= 0:  # too late: its end is told by its supervisor, which has heard the bell or hears us
                self.kill(ClockKind.TIMEOUT.value)
                return
            if to_bell_ns < CLOSE_CALL_NS:  # as it does, it begins nothing else
                self.kill("its bell may have rung")
        # From the end of the one before, if this one was already waiting then.
        self._took_ns = finished_ns - max(self._finished_ns, task.sent_ns)
        self._finished_ns = finished_ns
        self._finish(task, worker_outcome(kind, payload), leaked)

    def _answer_later(self, task: Task, number: int, find_answer: Callable[[], Coroutine[Any, Any, bytes]]) -> None:
        async def answer() -> None:
            found = await find_answer()
            if self.task is task:
                self._send(ipc.frame(("answer", number, found)))

        further = self._further[number] = self._loop.create_task(answer())

        def forget(_: object) -> None:
            if self._further.get(number) is further:  # each call counts its questions anew
                del self._further[number]

        further.add_done_callback(forget)

    def _finish(self, task: Task, outcome: Outcome, leaked: list[dict[str, object]]) -> None:
        self.assigned.popleft()
        self.began_ns = monotonic_ns()
        if self._further:
            for further in list(self._further.values()):
                further.cancel()  # nobody waits for it any more
        if leaked:
            # It returned, but what it started lives on. The worker goes, and everything below it.
            outcome.warnings += (warn_left_behind(leaked),)
            self.gone.add_done_callback(lambda _: task.resolve(outcome))
            self.kill("leaked processes")
            return
        task.worker = None  # a cancellation that comes now must not stop what it does next
        self._pool.give_back(self)  # first: the worker has its next call before anybody reads this answer
        task.resolve(outcome)

    def _on_report(self) -> None:
        try:
            messages = self._reports.receive()
        except BlockingIOError:
            return
        except ipc.Broken:
            self.end(None)
            return
        for message in messages:
            match message:
                case ("started", _, int(pid)):
                    self.started = True
                    self._supervisor = pid
                    self._pool.give_back(self)
                case ("ended", dict(packed)):
                    self.end(CommandReport.unpack(packed))

    def end(self, report: CommandReport | None) -> None:
        """Close it: the process and everything below it is gone, or its supervisor was killed and its zygote saw to
        it."""
        if self.gone.done():
            return
        self.stopping = True
        if self._patience is not None:
            self._patience.cancel()
        self._read_what_is_there()  # a result sent before the kill is still in the socket, and is the truth
        for further in list(self._further.values()):
            further.cancel()  # whoever asked is gone
        unstarted = self.take_back()
        self._close_calls()
        self._loop.remove_reader(self._control.fileno())
        if report is not None and report.unstartable is not None:
            self.started = False  # it was only taken for granted
        if report is None or report.unstartable is not None or report.survivors:
            self._control.close()
        else:
            self.vacant = Vacant(self._control, self._supervisor)
        self.gone.set_result(report)
        self._pool.on_lost(self, unstarted)
        if report is None and self.assigned:  # nobody has seen what became of it: look, before anything is claimed
            find = partial(kill_what_lost_its_supervisor, self._supervisor)
            run_beside(
                self._loop, find, lambda left: self._answer_for_assigned(CommandReport(lost=True, survivors=list(left)))
            )
        elif report is not None:
            self._answer_for_assigned(report)

    def _answer_for_assigned(self, report: CommandReport) -> None:
        while self.assigned:  # each goes on where it is resolved, and may look at us
            task = self.assigned.popleft()
            task.resolve(crash_outcome(task.admission, report))

    def _order(self, *order: object) -> None:
        with contextlib.suppress(ipc.Broken, BlockingIOError):
            ipc.send(self._control, order)

    def _close_calls(self) -> None:
        self._loop.remove_reader(self._calls.fileno())
        self._loop.remove_writer(self._calls.fileno())
        self._calls.close()
        for fd in (self._tokens, self._tokens_in):
            os.close(fd)
        self._tokens = self._tokens_in = -1


def _ask_zygote(zygote: Preloaded, fds: list[int]) -> socket.socket:
    """Have a supervisor forked that forks a worker; return our end of the line to it."""
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    with theirs:
        try:
            zygote.send(WORKER, [theirs.fileno(), *fds])
        except (ipc.Broken, OSError):
            ours.close()
            raise
    return ours


def _ask_again(supervisor: socket.socket, fds: list[int]) -> socket.socket:
    try:
        ipc.send_fds(supervisor, ipc.frame(("again",)), fds)
    except (ipc.Broken, OSError):
        supervisor.close()
        raise
    return supervisor


@lru_cache(maxsize=1024)
def explain_unfindable(handler: Handler) -> str | None:
    """Return why a worker could not find this very function by its name, if so."""
    if isinstance(handler, HandlerReference):
        return None  # the worker tells
    name = getattr(handler, "__qualname__", None)
    module = sys.modules.get(getattr(handler, "__module__", None) or "")
    if name is None or module is None:
        return f"{handler!r} has no name to import it by"
    found: object = module
    for part in name.split("."):
        found = getattr(found, part, None)
    if found is handler or getattr(found, "__shotclock_handler__", None) is handler:
        return None
    return f"{module.__name__}.{name} cannot be imported, or is not this function"
