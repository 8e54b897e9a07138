"""Worker processes seen from the runtime: what they are given, what they answer, how they end.

`WorkerProcess` is what all of them have in common. A `Worker` serves one call at a time over its own socket. It arms a
timer for each call that its supervisor hears, and the supervisor kills it without being told, so the loop this runs on
may be late without the work living longer. An `AsyncWorker` (async_worker.py) runs many calls on one event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import pickle
import socket
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from functools import partial
from math import inf
from typing import Any, NamedTuple, Protocol

from ..core.catalogue import Handler
from ..core.clocks import NS_PER_MS, ClockKind, Clocks
from ..core.envelope import Envelope
from ..core.errors import Failure
from ..process import ipc, messages
from ..process.call_processes import run_beside
from ..process.clock import monotonic_ns
from ..process.command_task import CommandReport, News, Order
from ..process.context import OVERTIME, CallListener
from ..process.kernel import DeadlineTimer
from ..process.messages import Answer, Ask, Done, NeverMind, Partial, Progress, Run, Skipped, Step, WindDown, Wrote
from ..process.worker_main import CLOSE_CALL_NS
from ..process.zygote import WORKER, kill_what_lost_its_supervisor
from .call import Call, Outcome, Work, WorkView
from .command_runner import Patience
from .commands import warn_left_behind
from .control import note_progress, note_sign_of_life, request_overtime
from .idle_clock import IdleClock
from .outcomes import CLOSING, answer_unopenable, crash_outcome, worker_outcome
from .preloaded_zygote import Preloaded, address_of

# A worker that answered its last call within this may have some more waiting in its socket: about as many as it does
# in AHEAD_NS. Waking it for each costs more than a short call takes.
QUICK_NS = 1_000_000
AHEAD_NS = 2_000_000
MOST_AHEAD = 64
# Reads of what is in a worker's socket, several times what fits into one. It may go on writing, and would never end.
MOST_READS = 16

OnCall = Callable[[str, Mapping[str, object], Clocks], Awaitable[Envelope]]
"""Makes a call inside the one that runs."""


class ProcessCall(Work):
    """One call of a function, on its way to another process and back."""

    def __init__(
        self,
        call: Call,
        handler: Handler,
        depth: int,
        listener: CallListener,
        on_call: OnCall,
    ) -> None:
        """Pickle the arguments. Raises what pickle raises: such arguments never leave, and cost no worker."""
        self.call = call
        self._handler = handler
        self._arguments = pickle.dumps(dict(call.arguments or {}))
        self.depth = depth
        self.listener = listener
        self.on_call = on_call
        self.number = 0
        """Its number in its process, where that runs several: they begin in the order of their numbers."""
        self.idle: IdleClock | None = None
        self.is_abandoned = False

    def pack(self) -> bytes:
        """Return the message that begins it."""
        call = self.call
        bell, caller = call.bound.bell, call.caller
        return messages.pack(
            Run(
                self.number,
                *address_of(self._handler),
                self._arguments,
                call.name,
                call.request_id,
                bell.at_ns if bell is not None else 0,
                self.depth,
                self.listener.skipped_steps,
                self.listener.stdin_path,
                (caller.trace_id, caller.sampled, caller.state),
                call.overtime_address,
            )
        )

    def sign_of_life(self) -> None:
        if self.idle is not None:
            self.idle.sign_of_life()


class WorkerProcess:
    """A process that runs functions, and its supervisor, from fork to the last report."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, request: Callable[[list[int]], socket.socket], *fds: int
    ) -> None:
        """Ask for the process, which gets one end of a socket and these descriptors; `request` returns our end of the
        line to its supervisor. Raises ipc.Broken or OSError."""
        self._loop = loop
        self.is_up = False
        """It has come up, and can be given calls."""
        self.gone: asyncio.Future[CommandReport | None] = loop.create_future()
        """Done when it and everything below it is gone, with its supervisor's report; None if that was lost."""
        self._supervisor = 0
        self._ordered: str | None = None
        self._patience: Patience | None = None
        self._further: dict[int, asyncio.Task[None]] = {}
        self._outbox = bytearray()
        self._calls, theirs = socket.socketpair()
        self._calls.setblocking(False)
        try:
            with theirs:
                self._control = request([theirs.fileno(), *fds])
        except BaseException:
            self._calls.close()
            raise
        self._reports, self._replies = ipc.MessageReader(self._control), messages.Reader(self._calls)
        # Their numbers: asyncio tries a lookup first whose KeyError contains the repr, and a socket's asks the kernel.
        loop.add_reader(self._control.fileno(), self._on_report)
        loop.add_reader(self._calls.fileno(), self._on_reply)

    # What the two kinds do in their own ways:

    def _on_started(self) -> None:
        """Take note that it was forked."""

    def _on_silence(self) -> None:
        """Take note that it has closed its socket. Its supervisor tells how it ended."""

    def _take(self, message: ipc.Message) -> None:
        """Take one message of the process."""
        raise NotImplementedError

    def _has_calls(self) -> bool:
        raise NotImplementedError

    def _on_ending(self) -> None:
        """Begin nothing any more."""
        raise NotImplementedError

    def _release(self, report: CommandReport | None) -> None:
        """Close what else it has, and the line to its supervisor unless that is of further use."""
        raise NotImplementedError

    def _answer_for_all(self, report: CommandReport) -> None:
        """Answer for the calls that it did not answer itself."""
        raise NotImplementedError

    # --- what the process says ----------------------------------------------------------------------------

    def _on_reply(self) -> None:
        try:
            received = self._replies.receive()
        except BlockingIOError:
            return
        except ipc.Broken:
            self._loop.remove_reader(self._calls.fileno())
            self._on_silence()
            return
        self._take_all(received)

    def _take_all(self, received: list[ipc.Message]) -> None:
        for message in received:
            try:
                self._take(message)
            except Exception as error:  # of whoever listens to progress; the answer behind it must not be lost
                self._loop.call_exception_handler({"message": "shotclock worker", "exception": error})

    def _read_what_is_there(self) -> None:
        with contextlib.suppress(ipc.Broken, OSError):
            for _ in range(MOST_READS):
                if not self._has_calls():
                    break
                self._take_all(self._replies.receive())

    def _take_from(self, inside: ProcessCall, message: ipc.Message) -> None:
        """Take what the code of a call says or asks by its context."""
        match message:
            case Progress() if not inside.is_abandoned:
                inside.sign_of_life()
                note_progress(inside.call, message.done, message.total, message.unit)
                inside.listener.progress(message.done, message.total, message.unit)
            case Step() if not inside.is_abandoned:
                inside.sign_of_life()
                inside.listener.step(message.name)
            case Partial() if not inside.is_abandoned:
                inside.sign_of_life()
                with contextlib.suppress(Exception):  # of a class that is not imported here: what came before is kept
                    inside.call.keep_partial(messages.unpickle(message.value), message.changes)
            case Wrote() if not inside.is_abandoned:
                inside.sign_of_life()
                if message.text:
                    note_sign_of_life(inside.call)
                inside.listener.wrote(message.text)
            case Ask():
                self._answer_later(message.question, partial(_answer_question, inside, message))
            case messages.FurtherCall():
                self._answer_later(message.question, partial(_answer_call, inside, message))

    def _answer_later(self, question: int, find_answer: Callable[[], Coroutine[Any, Any, bytes]]) -> None:
        async def answer() -> None:
            self._send(messages.pack(Answer(question, await find_answer())))

        further = self._further[question] = self._loop.create_task(answer())
        further.add_done_callback(lambda _: self._further.pop(question, None))

    def _never_mind(self, question: int) -> None:
        if (further := self._further.get(question)) is not None:
            further.cancel()

    def _forget_questions(self) -> None:
        for further in list(self._further.values()):
            further.cancel()  # whoever asked is gone

    def _on_report(self) -> None:
        try:
            reports = self._reports.receive()
        except BlockingIOError:
            return
        except ipc.Broken:
            self.end(None)
            return
        for report in reports:
            match report:
                case (News.STARTED, _, int(pid)):
                    self._supervisor = pid
                    self._on_started()
                case (News.ENDED, dict(packed)):
                    self.end(CommandReport.unpack(packed))

    # --- what it is told ----------------------------------------------------------------------------------

    def _send(self, message: bytes | bytearray) -> None:
        """Send a message, whole and in order: what is larger than the socket's buffer goes out as it is read."""
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

    def _order(self, *order: object) -> None:
        with contextlib.suppress(ipc.Broken, BlockingIOError):
            ipc.send(self._control, order)

    def _order_end(self, order: str, why: str, grace_ms: int = 0) -> None:
        """Have its supervisor stop or kill it, and bound the wait for the report: a supervisor that was itself stopped,
        or is broken, sends none, and nobody waits for it for ever."""
        if self._ordered is None or why == CLOSING:  # its supervisor may go with us, whatever it was told before
            self._ordered = why
        self._order(order, why)
        if self.gone.done():
            return
        former, self._patience = self._patience, Patience(self._loop, self._supervisor, grace_ms, self._give_up)
        if former is not None:
            self._patience.ends_at = min(self._patience.ends_at, former.ends_at)
            former.cancel()

    # --- the end ------------------------------------------------------------------------------------------

    def _give_up(self) -> None:
        self.end(None)

    async def wait_gone(self, within_s: float) -> bool:
        """Return whether its whole tree was reported gone in time."""
        await asyncio.wait([self.gone], timeout=within_s)
        return self.gone.done()

    def end(self, report: CommandReport | None) -> None:
        """Close it: the process and everything below it is gone, or its supervisor was killed and its zygote saw to
        it."""
        if self.gone.done():
            return
        self._on_ending()
        if self._patience is not None:
            self._patience.cancel()
        self._read_what_is_there()  # a result sent before the end is still in the socket, and is the truth
        self._forget_questions()
        for sock in (self._control, self._calls):
            self._loop.remove_reader(sock.fileno())
            self._loop.remove_writer(sock.fileno())
        self._calls.close()
        self.gone.set_result(report)
        self._release(report)
        if report is not None:
            self._answer_for_all(report)
            return
        lost = CommandReport(lost=True, stopped=self._ordered)
        if not self._has_calls():
            self._answer_for_all(lost)
            return

        def answer_for_all(left: Sequence[dict[str, object]]) -> None:
            lost.survivors = list(left)
            self._answer_for_all(lost)

        # Nobody has seen what became of it: look, before anything is claimed.
        run_beside(self._loop, partial(kill_what_lost_its_supervisor, self._supervisor), answer_for_all)


async def _answer_question(inside: ProcessCall, message: Ask) -> bytes:
    """Answer `ctx.request_overtime`, `ctx.checkpoint`, `ctx.restore` and `ctx.ask`: what is decided, or what the
    listener says; or the Failure that is to be raised there."""
    answer: object
    try:
        value = messages.unpickle(message.value)
        if message.what == OVERTIME:
            answer = (True, await request_overtime(inside.call, *value))
        else:
            answer = (True, await inside.listener.ask(message.what, value))
    except Failure as failure:
        answer = (False, failure)
    except Exception as error:
        answer = (False, Failure("CHECKPOINTS_UNAVAILABLE", f"{type(error).__name__}: {error}"))
    return pickle.dumps(answer)


async def _answer_call(inside: ProcessCall, message: messages.FurtherCall) -> bytes:
    """Answer `ctx.call`: make the further call and return its envelope."""
    try:
        arguments = messages.unpickle(message.arguments)
    except Exception as error:
        envelope = answer_unopenable(message.name, error)
    else:
        envelope = await inside.on_call(message.name, arguments, Clocks(**message.limits))
    try:
        return pickle.dumps(envelope)
    except Exception:  # the value cannot be pickled; its JSON form always can
        return pickle.dumps(Envelope(envelope.data, envelope.error, envelope.warnings, envelope.meta))


# --- one call at a time -----------------------------------------------------------------------------------


class Task(ProcessCall):
    """One call on its way to a worker and back."""

    done: asyncio.Future[Outcome]
    message: bytes
    give_up_ns: float
    """When waiting for a worker ends."""
    waits_for_queue: bool
    """Whether that is the queue clock's doing, or the bell's."""
    worker: Worker | None = None
    sent_ns = 0
    stalled = False

    def prepare(self, pool: Owner) -> None:
        """Make it ready to wait for a worker."""
        self._pool = pool
        self.done = pool.loop.create_future()
        self.message = self.pack()
        bell, queue_ms = self.call.bound.bell, self.call.clocks.queue_ms
        bell_ns = bell.at_ns if bell is not None else inf
        queue_ns = self.call.started_ns + queue_ms * NS_PER_MS if queue_ms else inf
        self.give_up_ns, self.waits_for_queue = min(bell_ns, queue_ns), queue_ns < bell_ns

    @property
    def is_queued(self) -> bool:
        return self.worker is None

    def wind_down(self, until_ns: int) -> None:
        if self.idle is not None:  # saving what there is may be silent
            self.idle.cancel()
        if self.worker is not None:
            self.worker.ask_to_wind_down(self)

    def stop_unwound(self) -> None:
        self._pool.stop_unwound(self)

    def move_bell(self) -> bool:
        bell = self.call.bound.bell
        assert bell is not None
        if self.worker is None:
            self.message = self.pack()
            if not self.waits_for_queue:
                self.give_up_ns = bell.at_ns
            return True
        return self.worker.move_bell(self, bell.at_ns)

    async def look(self) -> WorkView:
        return WorkView(has_begun=self.worker is not None)

    def resolve(self, outcome: Outcome) -> None:
        """Answer the call. The first answer counts: a result and a kill may cross, and only one is delivered."""
        if not self.done.done():
            self.done.set_result(outcome)


class Vacant(NamedTuple):
    """A supervisor without a worker."""

    control: socket.socket
    pid: int


class Owner(Protocol):
    """Owner of the workers: the pool."""

    loop: asyncio.AbstractEventLoop
    preloaded: Preloaded

    def give_back(self, worker: Worker) -> None: ...
    def stop_unwound(self, task: Task) -> None: ...
    def on_leaving(self, worker: Worker) -> None: ...
    def on_lost(self, worker: Worker, unstarted: list[Task]) -> None: ...


class Worker(WorkerProcess):
    """A process that serves one call after another.

    A new supervisor comes from the zygote. One whose last worker is gone forks the next by itself: nothing is there
    to be imported any more, so it counts as started at once, and its first call waits in its socket.
    """

    def __init__(self, pool: Owner, supervisor: Vacant | None = None) -> None:
        self._pool = pool
        self._tokens, self._tokens_in = os.pipe()
        self.vacant: Vacant | None = None
        """When it is gone: its supervisor, waiting to fork another."""
        self.assigned: deque[Task] = deque()
        self._returned: tuple[Task, Outcome, list[dict[str, object]]] | None = None
        """A call that returned and left processes. It is answered when they are gone."""
        """What it was given: the first runs, the next waits in its socket with a token in the pipe."""
        self.began_ns = 0
        self._took_ns = QUICK_NS
        self._finished_ns = 0
        self._skipping = 0
        self.asked_ns = monotonic_ns()
        self.grace_ms = 0
        self.stopping = False
        self._is_last_call = False
        """Nothing else begins in it: its bell was moved."""
        for fd in (self._tokens, self._tokens_in):
            os.set_blocking(fd, False)
        request = partial(pool.preloaded.request, WORKER)
        if supervisor is not None:
            request = partial(_ask_again, supervisor.control)
        try:
            with contextlib.closing(DeadlineTimer()) as bell:  # the worker arms it, its supervisor hears it
                super().__init__(pool.loop, request, bell.fd, self._tokens)
        except BaseException:
            self._close_tokens()
            raise
        if supervisor is not None:
            self.is_up, self._supervisor = True, supervisor.pid

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
        assigned = len(self.assigned)
        if assigned > MOST_AHEAD // 2:  # as it is most of the time where many wait
            return 0
        if self.stopping or self._skipping or self._is_last_call or (assigned and self._outbox):
            return 0
        if self._took_ns >= QUICK_NS:
            return 0 if assigned else 1
        most = min(MOST_AHEAD, AHEAD_NS // max(1, self._took_ns))
        return most - assigned if assigned <= most // 2 else 0

    # --- a call -------------------------------------------------------------------------------------------

    def set_grace(self, grace_ms: int) -> None:
        if grace_ms != self.grace_ms:
            self.grace_ms = grace_ms
            self._order(Order.GRACE, grace_ms)

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
            if task.idle is not None:
                task.idle.sign_of_life()
            if task.call.winding_down is not None:
                self.ask_to_wind_down(task)
            elif (control := task.call.control) is not None:
                control.loop.call_soon_threadsafe(control.begin_work)

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
        self._send(messages.pack(WindDown(0, task.call.request_id)))

    def move_bell(self, task: Task, bell_ns: int) -> bool:
        """Have another bell ring for a call that has begun or waits in its socket. The supervisor sets the timer that
        the worker has armed; it may come too late, and be taken for that of the next call. So there is none in this
        worker."""
        if self.task is not task or self.gone.done() or self.stopping:
            return False
        self._is_last_call = True
        self._order(Order.BELL, bell_ns, 0)
        self._send(messages.pack(messages.MoveBell(0, task.call.request_id, bell_ns)))
        return True

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
            self._order_end(Order.STOP, why, self.grace_ms)
        return unbegun

    def kill(self, why: str) -> None:
        self.stopping = True
        self._order_end(Order.KILL, why)
        self._pool.on_leaving(self)

    # --- what the process says ----------------------------------------------------------------------------

    def _on_started(self) -> None:
        self.is_up = True
        self._pool.give_back(self)

    def _has_calls(self) -> bool:
        return bool(self.assigned) or self._returned is not None

    def _take(self, message: ipc.Message) -> None:
        task = self.task
        if isinstance(message, Done):
            if task is not None:
                self._take_result(task, message)
        elif isinstance(message, Skipped):
            self._skipping -= 1
            if self.is_idle:
                self._pool.give_back(self)
        elif isinstance(message, NeverMind):
            self._never_mind(message.question)
        elif task is not None:
            self._take_from(task, message)

    def _take_result(self, task: Task, done: Done) -> None:
        bell, finished_ns = task.call.bound.bell, done.finished_ns
        if bell is not None:
            to_bell_ns = bell.at_ns - finished_ns
            if to_bell_ns <= 0:  # too late: its end is told by its supervisor, which has heard the bell or hears us
                self.kill(ClockKind.TIMEOUT.value)
                return
            if to_bell_ns < CLOSE_CALL_NS:  # as it does, it begins nothing else
                self.kill("its bell may have rung")
        if self._is_last_call:
            self.kill("its bell was moved")
        # From the end of the one before, if this one was already waiting then. One that took long may only have lost
        # the processor to others: it takes several of them until the worker counts as slow, and gets one at a time.
        took_ns = finished_ns - max(self._finished_ns, task.sent_ns)
        self._took_ns = min(took_ns, 2 * max(self._took_ns, AHEAD_NS // MOST_AHEAD))
        self._finished_ns = finished_ns
        self._finish(task, worker_outcome(done.kind, done.payload), done.leaked)

    def _finish(self, task: Task, outcome: Outcome, leaked: list[dict[str, object]]) -> None:
        self.assigned.popleft()
        self.began_ns = monotonic_ns()
        if self._further:
            self._forget_questions()
        if leaked:
            # It returned, but what it started lives on. The worker goes, and everything below it.
            self._returned = task, outcome, leaked
            self.kill("leaked processes")
            return
        task.worker = None  # a cancellation that comes now must not stop what it does next
        self._pool.give_back(self)  # first: the worker has its next call before anybody reads this answer
        task.resolve(outcome)

    # --- the end ------------------------------------------------------------------------------------------

    def _on_ending(self) -> None:
        self.stopping = True

    def _release(self, report: CommandReport | None) -> None:
        unstarted = self.take_back()
        self._close_tokens()
        if report is not None and report.unstartable is not None:
            self.is_up = False  # it was only taken for granted
        if report is None or report.unstartable is not None or report.survivors:
            self._control.close()
        else:
            self.vacant = Vacant(self._control, self._supervisor)
        self._pool.on_lost(self, unstarted)

    def _answer_for_all(self, report: CommandReport) -> None:
        if self._returned is not None:
            (task, outcome, leaked), self._returned = self._returned, None
            outcome.survivors = report.survivors
            outcome.warnings += tuple(warn_left_behind("function", leaked, report.survivors))
            task.resolve(outcome)
        while self.assigned:  # each goes on where it is resolved, and may look at us
            task = self.assigned.popleft()
            task.resolve(crash_outcome(task.call, report))

    def _close_tokens(self) -> None:
        for fd in (self._tokens, self._tokens_in):
            os.close(fd)
        self._tokens = self._tokens_in = -1


def _ask_again(supervisor: socket.socket, fds: list[int]) -> socket.socket:
    try:
        ipc.send_fds(supervisor, ipc.frame((Order.AGAIN,)), fds)
    except (ipc.Broken, OSError):
        supervisor.close()
        raise
    return supervisor
