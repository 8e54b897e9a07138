"""Worker processes as the runtime sees them: the calls they are given, their answers, and their end.

A worker for itself arms a timer for each call; its supervisor hears it, and kills on time even if this loop is late.
The limits of calls in the shared process are held here: cancelled at the limit, the process killed after the grace.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import pickle
import socket
from collections.abc import Callable, Coroutine
from functools import partial
from math import inf
from typing import TYPE_CHECKING, Any

from ..core.envelope import Envelope
from ..core.errors import Ending, Failure
from ..core.limits import ClockKind, Clocks
from ..supervise import ipc
from ..supervise.client import SupervisorClient
from ..supervise.clock import monotonic_ns
from ..supervise.command_task import CommandReport, CommandTask, News, Order
from ..supervise.kernel import DeadlineTimer
from ..supervise.zygote import WORKER, kill_what_lost_its_supervisor
from ..worker import messages
from ..worker.context import OVERTIME, Survivors, run_beside
from ..worker.main import CLOSE_CALL_NS
from ..worker.messages import (
    BEGUN,
    LIFESPAN_RUNS,
    MEMORY_SIZE,
    RUNNING,
    SHARED,
    STATES,
    Answer,
    Ask,
    BeginWindDown,
    Cancel,
    CloseStates,
    Done,
    Heard,
    Logged,
    MoveBell,
    NeverMind,
    Opened,
    Partial,
    Process,
    Progress,
    StatesClosed,
    Step,
    Wrote,
    open_memory,
)
from ._handler_call import SHORTEST_GRACE_NS, ProcessCall
from .call import Outcome
from .commands import warn_left_behind
from .control import request_overtime
from .outcomes import (
    CLOSING,
    Replacement,
    answer_unopenable,
    crash_outcome,
    limit_problem,
    replaced_outcome,
    replaced_warning,
    worker_outcome,
)
from .supervised_commands import ClientTimer

if TYPE_CHECKING:
    from .executor import WorkerPool

# A worker that answered its last call within this gets some more ahead: waking it for each costs more than a short
# call takes. Without that two workers are half as fast as pebble's.
QUICK_NS = 2_000_000
MOST_AHEAD = 16
TOKEN_SIZE = 8
# Reads of what is in a worker's socket, several times what fits into one. It may continue to write.
MOST_READS = 16
# A worker that dies sooner, and before its first call, failed to start.
SHORT_LIFE_NS = 250_000_000


class Worker:
    """A worker process and its supervisor, from fork to the last report.

    A supervisor whose last worker is gone forks the next when asked. Nothing is left to be imported, so that worker
    counts as started at once, and its first call waits in its socket.
    """

    def __init__(self, pool: WorkerPool, vacant: Vacancy | None = None) -> None:
        """Ask for the process. Raises ipc.Broken or OSError."""
        self._pool = pool
        self._loop = pool.loop
        self.is_shared: bool = pool.is_shared
        self.is_up: bool = vacant is not None
        self.is_ending: bool = False
        self._is_retiring = False
        """Its deadline was moved, and the timer might be taken for that of the next call: it ends after this one."""
        self.gone: asyncio.Future[CommandReport | None] = self._loop.create_future()
        """Done when its whole tree is gone, with the supervisor's report; None if that is lost."""
        self.calls: dict[int, ProcessCall] = {}
        self._numbers = 0
        self._returned: tuple[ProcessCall, Outcome, list[dict[str, object]]] | None = None
        """A call that returned and left processes: answered when they are gone."""
        self.vacant: Vacancy | None = None
        """When it is gone: its supervisor, waiting to fork another."""
        self.asked_ns: int = monotonic_ns()
        self.began_ns: int = self.asked_ns
        self._up_ns = self._sign_ns = self.asked_ns
        self._supervisor = 0 if vacant is None else vacant.pid
        self._ordered: str | None = None
        self.replacement: Replacement = Replacement()
        """Of the shared process, once it is killed: why."""
        self._opened: set[str] = set()
        """The Apps whose lifespan was open in it."""
        self.states_closed: asyncio.Future[None] = self._loop.create_future()
        self.is_closing_states: bool = False
        self._ending: ClientTimer | None = None
        self._further: dict[int, asyncio.Task[None]] = {}
        self._outbox = bytearray()
        self.grace_ms: int = 0
        self._is_quick = False
        with contextlib.ExitStack() as on_failure, contextlib.ExitStack() as always:
            self._calls, theirs = socket.socketpair()
            on_failure.callback(self._calls.close)
            always.callback(theirs.close)
            self._calls.setblocking(False)
            self._tokens, self._tokens_in = os.pipe()
            on_failure.callback(self._close_tokens)
            for fd in (self._tokens, self._tokens_in):
                os.set_blocking(fd, False)
            memory = _shared_memory()
            always.callback(os.close, memory)
            self._words = open_memory(memory)
            self._words[SHARED] = self.is_shared
            bell = always.enter_context(contextlib.closing(DeadlineTimer()))  # armed there, heard by its supervisor
            fds = [theirs.fileno(), bell.fd, memory, self._tokens]
            self._control = pool.preloaded.request(WORKER, fds) if vacant is None else vacant.fork(fds)
            on_failure.pop_all()
        self._reports, self._replies = ipc.MessageReader(self._control), messages.Reader(self._calls)
        # By number: for a socket asyncio makes a KeyError with its repr, which asks the kernel.
        self._loop.add_reader(self._control.fileno(), self._on_report)
        self._loop.add_reader(self._calls.fileno(), self._on_reply)

    # --- calls --------------------------------------------------------------------------------------------

    @property
    def room(self) -> int:
        """Return how many calls it may be given. Quick ones come ahead, so that it need not sleep between them."""
        if not self.is_up or self.is_ending or self._is_retiring:
            return 0
        if self.is_shared:
            return MOST_AHEAD
        if not self._is_quick or self._outbox:
            return 0 if self.calls else 1
        return MOST_AHEAD - len(self.calls) if len(self.calls) <= MOST_AHEAD // 2 else 0

    def has_begun(self, call: ProcessCall) -> bool:
        return bool(self._words[BEGUN] >= call.number)

    def is_moving(self, now_ns: int) -> bool:
        """Return whether the shared process did something a moment ago."""
        return now_ns - self._sign_ns <= SHORTEST_GRACE_NS

    @property
    def has_served(self) -> bool:
        return bool(self._words[BEGUN])

    @property
    def was_of_use(self) -> bool:
        """Return whether another one may be started at once: it ran a call or lived for a while."""
        return self.is_up and (self.has_served or monotonic_ns() - self._up_ns > SHORT_LIFE_NS)

    def begin(self, calls: list[ProcessCall]) -> None:
        """Give it calls. Each is answered exactly once, whatever happens to the process."""
        if not self.calls:
            self.began_ns = monotonic_ns()
        grace_ms = calls[0].call.bound.grace_ms
        if not self.is_shared and grace_ms != self.grace_ms:
            self.grace_ms = grace_ms
            self._order(Order.GRACE, grace_ms)
        for call in calls:
            self._numbers += 1
            call.worker, call.number = self, self._numbers
            self.calls[call.number] = call
            if not self.is_shared:
                os.write(self._tokens_in, call.number.to_bytes(TOKEN_SIZE, "little"))
        self._send(b"".join([call.pack() for call in calls]))
        for call in calls:
            call.sign_of_life()
            if call.call.winding_down is not None:
                self.send(BeginWindDown(call.number))
            elif call.call.control is not None:
                call.call.control.begin_work()

    def take_back(self) -> list[ProcessCall]:
        """Return the calls that it has not started, and never will: it takes a call's token out of the pipe first."""
        try:
            tokens = b"" if self.is_shared else os.read(self._tokens, MOST_AHEAD * TOKEN_SIZE)
        except OSError:
            return []
        self._is_quick = False
        self._loop.call_soon(self._pool.on_free, self)  # it may have no call left, and no answer will tell the pool
        numbers = [int.from_bytes(tokens[at : at + TOKEN_SIZE], "little") for at in range(0, len(tokens), TOKEN_SIZE)]
        return [self.calls.pop(number) for number in numbers]

    def _close_tokens(self) -> None:
        os.close(self._tokens)
        os.close(self._tokens_in)
        self._tokens = self._tokens_in = -1  # another worker may get these numbers

    def move_bell(self, call: ProcessCall, bell_ns: int) -> bool:
        if self.calls.get(call.number) is not call or self.is_ending:
            return False
        if not self.is_shared:
            # The supervisor may set the new limit only after this call has ended. So no other call follows here.
            self._is_retiring = True
            self._order(Order.BELL, bell_ns, 0)
        self.send(MoveBell(call.number, bell_ns))
        return True

    def stop(self, call: ProcessCall, why: str) -> None:
        """Stop one of its calls: by the supervisor (TERM, grace, KILL), or by a cancellation in the shared process."""
        if self.is_ending:
            return  # its end answers for all its calls
        if self.is_shared:
            self.send(Cancel(call.number))
        elif self.has_begun(call):
            self.is_ending = True
            self._order_end(Order.STOP, why, self.grace_ms)
        else:
            self.kill(why)

    def kill(self, why: str) -> None:
        if not self.gone.done():
            self.is_ending = True
            unbegun = self.take_back()
            self._order_end(Order.KILL, why)
            self._record_lost_states()
            self._pool.on_leaving(self)
            self._pool.put_first(unbegun)

    def kill_for(self, call: ProcessCall) -> None:
        number = self._words[RUNNING]
        running = self.calls.get(number)
        if call.is_heard:
            culprit, deed = call.call.name, "did not stop when it was cancelled"
        else:
            culprit, deed = "" if running is None else running.call.name, "blocked its event loop"
        if not call.is_heard and number == LIFESPAN_RUNS:
            culprit = "the lifespan of the App"
        self.replacement = Replacement(culprit, deed, had_state=bool(self._opened))
        self.kill("shared")

    @property
    def holds_states(self) -> bool:
        return bool(self._words[STATES]) and self.is_up and not self.is_ending

    def close_states(self) -> None:
        """Have the shared process stop its calls and close its lifespans. It is killed after that, not before."""
        self.is_closing_states = True
        self.send(CloseStates())

    def _record_states_closed(self) -> None:
        if not self.states_closed.done():
            self.states_closed.set_result(None)

    def _record_lost_states(self) -> None:
        if self._opened and self._ordered != CLOSING:
            self._pool.record_lost_states(self._opened, f"the shared process was replaced, {self.replacement.blame()}")

    # --- messages of the process ----------------------------------------------------------------------------

    def _on_reply(self) -> None:
        try:
            received = self._replies.receive()
        except BlockingIOError:
            return
        except ipc.Broken:  # its supervisor reports how it ended
            self._loop.remove_reader(self._calls.fileno())
            return
        self._handle_all(received)

    def _handle_all(self, received: list[ipc.Message]) -> None:
        for message in received:
            try:
                self._handle(message)
            except Exception as error:  # of a listener to progress; the answer behind it must not be lost
                self._loop.call_exception_handler({"message": "shotclock worker", "exception": error})

    def read_what_is_there(self) -> None:
        """Take the messages in the socket: an answer there is the truth, whatever happened since."""
        with contextlib.suppress(ipc.Broken, OSError):
            for _ in range(MOST_READS):
                if not self.calls or self._calls.fileno() < 0:
                    break
                self._handle_all(self._replies.receive())

    def _handle(self, message: ipc.Message) -> None:
        if isinstance(message, NeverMind):
            if (further := self._further.get(message.question)) is not None:
                further.cancel()
            return
        if isinstance(message, StatesClosed):
            self._record_states_closed()
            return
        call = self.calls.get(message[0])
        if isinstance(message, Opened):
            self._opened.add(message.app)
            if call is not None and (lost := self._pool.get_lost_state(message.app, message.why_again)):
                call.record_rebuilt(*lost)
            return
        if call is None:
            return
        match message:
            case Done() if self.is_shared:
                self._sign_ns = monotonic_ns()
                del self.calls[call.number]
                call.handle_shared_result(message)
                self._pool.on_free(self)
            case Done():
                self._handle_result(call, message)
            case Heard():
                self._sign_ns = monotonic_ns()
                call.on_heard()
            case Process():
                call.has_started(message.mark, message.pid)
            case Progress():
                call.sign_of_life()
                call.record_progress(message.done, message.total, message.unit)
            case Step():
                call.sign_of_life()
                call.listener.step(message.name)
            case Partial():
                call.sign_of_life()
                with contextlib.suppress(Exception):  # of a class that is not imported here: the former one is kept
                    call.keep_partial(messages.unpickle(message.value), message.changes)
            case Wrote():
                call.sign_of_life()
                call.record_text(message.text)
            case Logged():
                call.sign_of_life()
                call.listener.log(message.level, message.message, message.logger)
            case Ask():
                self._answer_later(message.question, partial(_answer_question, call, message))
            case messages.FurtherCall():
                self._answer_later(message.question, partial(_answer_call, call, message))

    def _handle_result(self, call: ProcessCall, done: Done) -> None:
        bell = call.call.bound.bell
        to_bell_ns = inf if bell is None else bell.at_ns - done.finished_ns
        if to_bell_ns < 0:  # too late: it is answered when its supervisor reports the end
            self.kill(ClockKind.TIMEOUT.value)
            return
        del self.calls[call.number]
        for further in list(self._further.values()):
            further.cancel()
        outcome = worker_outcome(done.kind, done.payload)
        if done.leaked:  # the worker goes, and everything below it
            self._returned = call, outcome, done.leaked
            self.kill("leaked processes")
            return
        if to_bell_ns < CLOSE_CALL_NS or self._is_retiring:
            self.kill("its limit was close, or was moved")
        call.worker = None  # a cancellation that comes now must not stop the next call
        now_ns = monotonic_ns()
        self._is_quick, self.began_ns = now_ns - self.began_ns < QUICK_NS, now_ns
        self._pool.on_free(self)  # first, so that the worker has its next call before this answer is read
        call.resolve(outcome)

    def _answer_later(self, question: int, find_answer: Callable[[], Coroutine[Any, Any, bytes]]) -> None:
        async def answer() -> None:
            self.send(Answer(question, await find_answer()))

        further = self._further[question] = self._loop.create_task(answer())
        further.add_done_callback(lambda _: self._further.pop(question, None))

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
                    self.is_up, self._up_ns = True, monotonic_ns()
                    self._pool.on_free(self)
                case (News.ENDED, dict(packed)):
                    self.end(CommandReport.unpack(packed))

    # --- messages and orders to it ------------------------------------------------------------------------------

    def send(self, message: messages.ToWorker) -> None:
        self._send(messages.pack(message))

    def _send(self, message: bytes) -> None:
        """Send a message, whole and in order, as fast as it is read."""
        if self.gone.done():
            return
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
        self._sign_ns = monotonic_ns()  # it has read something
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
        """Have its supervisor stop or kill it. The wait is bounded: a stopped or broken supervisor sends no report."""
        if self._ordered is None or why == CLOSING:  # its supervisor may end with us, whatever the first reason
            self._ordered = why
        if self._ending is None:
            client = SupervisorClient(CommandTask([], {}, grace_ms=grace_ms), self._supervisor)
            self._ending = ClientTimer(self._loop, client, self._order, partial(self.end, None))
        self._ending.order(order, why)

    # --- the end ------------------------------------------------------------------------------------------

    def end(self, report: CommandReport | None) -> None:
        """Close it: its tree is gone, or its supervisor was killed."""
        if self.gone.done():
            return
        self.is_ending = True
        if self._ending is not None:
            self._ending.cancel()
        self.read_what_is_there()
        for further in list(self._further.values()):
            further.cancel()
        for sock in (self._control, self._calls):
            self._loop.remove_reader(sock.fileno())
            self._loop.remove_writer(sock.fileno())
        self._calls.close()
        unbegun = self.take_back()
        self._close_tokens()
        self._words = memoryview(bytearray(self._words)).cast("Q")  # lets go of the memory and its descriptor
        self.gone.set_result(report)
        self._record_states_closed()
        if not self._ordered:
            self.replacement = Replacement(had_state=bool(self._opened))
            self._record_lost_states()
        if report is None or report.unstartable is not None or report.survivors:
            self.is_up = self.is_up and (report is None or report.unstartable is None)
            self._control.close()
        else:
            self.vacant = Vacancy(self._control, self._supervisor)
        for call in [call for call in self.calls.values() if not self.has_begun(call)]:
            unbegun.append(self.calls.pop(call.number))
        self._pool.on_gone(self, unbegun)
        if report is not None:
            self._answer_for_all(report)
            return

        def answer_for_all(left: Survivors) -> None:
            self._answer_for_all(CommandReport(lost=True, stopped=self._ordered, survivors=list(left)))

        if self.calls or self._returned is not None:  # no process has seen its end: look, before anything is claimed
            run_beside(self._loop, partial(kill_what_lost_its_supervisor, self._supervisor), answer_for_all)

    def _answer_for_all(self, report: CommandReport) -> None:
        """Answer the calls that had begun and were not answered by the process."""
        if self._returned is not None:
            (returned, outcome, leaked), self._returned = self._returned, None
            outcome.survivors = report.survivors
            outcome.warnings += tuple(warn_left_behind("function", leaked, report.survivors))
            returned.resolve(outcome)
        calls, self.calls = self.calls, {}
        interrupted = sum(not call.is_stopping for call in calls.values())
        for call in calls.values():
            call.resolve(self._answer_for(call, report, interrupted))

    def _answer_for(self, call: ProcessCall, report: CommandReport, interrupted: int) -> Outcome:
        if not self.is_shared:
            outcome = crash_outcome(call.call, report)
            if call.fired is ClockKind.IDLE and outcome.ending is Ending.KILLED:
                outcome.problem = limit_problem(call.call, call.fired)
            return outcome
        replacement = self.replacement
        if call.is_stopping:
            warnings = (replaced_warning(call.call, replacement, interrupted),)
            outcome = call.limit_outcome(Ending.KILLED, warnings)
        elif self._ordered == CLOSING or not replacement.deed:  # closed, or died by itself
            outcome = crash_outcome(call.call, report)
            if self._ordered != CLOSING:
                outcome.warnings += (replaced_warning(call.call, replacement),)
        else:
            outcome = replaced_outcome(call.call, replacement)
        outcome.survivors = report.survivors
        return outcome


class Vacancy:
    def __init__(self, control: socket.socket, pid: int) -> None:
        self.control = control
        self.pid = pid

    def fork(self, fds: list[int]) -> socket.socket:
        """Have it fork another worker, and return the line to it. Raises ipc.Broken or OSError."""
        try:
            ipc.send_fds(self.control, ipc.frame((Order.AGAIN,)), fds)
        except (ipc.Broken, OSError):
            self.control.close()
            raise
        return self.control


def _shared_memory() -> int:
    if hasattr(os, "memfd_create"):
        memory = os.memfd_create("shotclock-worker")
    else:
        import tempfile  # takes 2 ms, and only systems other than Linux need it

        with tempfile.TemporaryFile() as file:
            memory = os.dup(file.fileno())
    os.ftruncate(memory, MEMORY_SIZE)
    return memory


async def _answer_question(call: ProcessCall, message: Ask) -> bytes:
    """Answer a question of the handler's context, or send the Failure to raise."""
    answer: object
    try:
        value = messages.unpickle(message.value)
        if message.what == OVERTIME:
            answer = (True, await request_overtime(call.call, *value))
        else:
            answer = (True, await call.listener.ask(message.what, value))
    except Failure as failure:
        answer = (False, failure)
    except Exception as error:
        answer = (False, Failure("CHECKPOINTS_UNAVAILABLE", f"{type(error).__name__}: {error}"))
    return pickle.dumps(answer)


async def _answer_call(call: ProcessCall, message: messages.FurtherCall) -> bytes:
    try:
        arguments = messages.unpickle(message.arguments)
    except Exception as error:
        envelope = answer_unopenable(message.name, error)
    else:
        envelope = await call.call_inside(message.name, arguments, Clocks(**message.limits))
    try:
        return pickle.dumps(envelope)
    except Exception:  # the value cannot be pickled; its JSON form always can
        return pickle.dumps(Envelope(envelope.data, envelope.error, envelope.warnings, envelope.meta))
