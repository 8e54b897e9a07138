"""Program of a worker process: take a call, run its function, send the result, and stay warm.

A worker for itself arms a timer for each call; its supervisor kills it at the limit. The shared worker runs async
functions on one loop; the runtime holds their limits. asyncio is imported by the calls that need it.

docs/design.md: R19.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import inspect
import itertools
import mmap
import os
import pickle
import select
import signal
import socket
import sys
import threading
import types
from collections.abc import Callable, Coroutine, Generator, Mapping
from contextvars import ContextVar, copy_context
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any, NoReturn

from ..core.arguments import NotSerializable, signature_of, to_valid_json
from ..core.clocks import Clocks, Deadline
from ..core.envelope import Envelope, describe_exception
from ..core.errors import Failure, code_of
from ..core.trace import TraceContext, span_id_of, traceparent_of
from ..core.value_types import as_dict
from . import ipc, kernel, messages, spans
from .clock import monotonic_ns
from .context import Context, Scope, StartedProcesses, Stopped, current_scope, watch
from .environment import OVERTIME_VARIABLE, quiet_this_process, set_call_variables
from .messages import (
    Answer,
    Ask,
    BeginWindDown,
    Cancel,
    Done,
    FurtherCall,
    Heard,
    MoveBell,
    NeverMind,
    Partial,
    Process,
    Progress,
    Run,
    Step,
    Wrote,
)

if TYPE_CHECKING:
    import asyncio

Reply = tuple[str, object]
"""A kind that `outcomes.worker_outcome` knows, and its details."""

# The memory shared with the runtime, in words of eight bytes. It can be read when the worker is blocked.
MEMORY_SIZE = 4096
BEGUN = 0
"""The highest number of a call that has begun. Calls begin in the order of their numbers."""
RUNNING = 1
"""In the shared worker: the number of the call whose code holds the loop; 0 if none does, or it is unknown."""
SHARED = 2
"""1 in the shared worker, set before it is forked."""

MAIN_ALIAS = "__shotclock_main__"
main_import_error = ""
inside_worker = False
"""True in a worker and in its zygote: no runtime may be started there."""

# Leaked processes named in an answer; there may be thousands.
_LEAKED_NAMED = 50
# A child may end between being counted and being listed; one that no look finds cannot be named.
_LEAK_LOOKS = 3
# A worker that answered this close to its limit may be about to be killed: no other call may begin in it.
CLOSE_CALL_NS = 3_000_000
# A worker ends after this many calls, and with it the 280 bytes that C keeps of the variables of each.
MOST_CALLS = 50_000
# How long tasks left by an async function may take to be cancelled. If one stays, the worker ends.
OTHERS_LIMIT_S = 0.1
# An exception may carry anything. Larger ones are not sent; their text is.
LONGEST_EXCEPTION = 1_000_000
# Progress beyond this that a slow runtime has not read is dropped.
PROGRESS_HELD = 256 * 1024
# How often the shared worker sends the news of a handler that does not let the loop run.
SEND_AT_LEAST_NS = 5_000_000


def open_memory(fd: int) -> memoryview:
    return memoryview(mmap.mmap(fd, MEMORY_SIZE)).cast("Q")


class CallTrace:
    __slots__ = ("_caller", "_request_id")

    def __init__(self, caller: tuple[str, bool, str], request_id: str) -> None:
        self._caller, self._request_id = caller, request_id

    @property
    def trace(self) -> TraceContext:
        trace_id, sampled, state = self._caller
        return TraceContext(trace_id, span_id_of(self._request_id), sampled, state)

    @property
    def traceparent(self) -> str:
        trace_id, sampled, _ = self._caller
        return traceparent_of(trace_id, span_id_of(self._request_id), sampled)

    def enter(self) -> None:
        """Make it the parent of the spans that the call's own code makes."""
        if "opentelemetry.trace" in sys.modules:
            spans.stand_at(self.trace)


_questions = itertools.count(1)
_awaited: dict[int, asyncio.Future[bytes]] = {}
"""By the number of their question."""


class RunningCall:
    """A call in its process. Each kind of worker has its own way to send, and to learn that the call is to stop."""

    def __init__(self, request: Run) -> None:
        self.request = request
        self.number = request.number
        self.trace = CallTrace(request.caller, request.request_id)
        self.stopping = False
        self._context: Context | None = None

    def send(self, message: messages.FromWorker) -> None:
        raise NotImplementedError

    def send_news(self, message: Progress | Partial | Step) -> None:
        """Send what may be lost, from any thread."""
        raise NotImplementedError

    def is_stopping(self) -> bool:
        raise NotImplementedError

    @property
    def deadline(self) -> Deadline | None:
        return Deadline(self.request.bell_ns) if self.request.bell_ns else None

    def bind(self) -> Callable[[], Any] | Reply:
        """Return the function with its checked arguments, or the reply why it cannot be called."""
        module, qualname, payload = self.request.module, self.request.qualname, self.request.arguments
        try:
            function = find(module, qualname)
        except Stopped:
            raise
        except BaseException as error:
            is_main = module == MAIN_ALIAS and main_import_error
            return "unimportable", f"{module}:{qualname}: {main_import_error if is_main else describe_briefly(error)}"
        signature = signature_of(function)
        arguments, problems = signature.check(pickle.loads(payload))
        if problems:
            return "invalid", problems
        if hasattr(function, "looks_at_arguments"):
            return partial(function, pickle.loads(payload), arguments)  # a validator may have changed the others
        if signature.wants_context:
            arguments["ctx"] = self.context(function)
        return partial(function, **arguments)

    def context(self, function: Callable[..., Any]) -> Context:
        request = self.request
        self._context = Context(
            request.name, request.request_id, self.deadline, request.depth, self.trace, self, request.skipped_steps
        )
        return self._context

    def take(self, message: ipc.Message) -> None:
        if isinstance(message, BeginWindDown):
            self.stopping = True
        elif isinstance(message, MoveBell) and self._context is not None:
            self._context.deadline = Deadline(message.bell_ns)

    def keep(self, result: object) -> None:
        try:
            plain, changes = to_valid_json(result)
        except NotSerializable as error:
            raise TypeError(f"ctx.keep takes plain data: {error}") from None
        self.send_news(Partial(self.number, pickle.dumps(plain), changes))

    def progress(self, done: float, total: float | None, unit: str | None) -> None:
        self.send_news(Progress(self.number, done, total, unit))

    def step(self, name: str) -> None:
        self.send_news(Step(self.number, name))

    def write(self, text: str) -> None:
        self.send(Wrote(self.number, text))

    # --- questions of an async function: its loop runs meanwhile --------------------------------------------

    def call(self, operation: object, arguments: Mapping[str, object], clocks: Clocks) -> Any:
        return self._await_envelope(self.further_call(operation, arguments, clocks))

    def ask(self, question: str, value: object) -> Any:
        return self._await_state(question, value)

    def further_call(self, operation: object, arguments: Mapping[str, object], clocks: Clocks) -> FurtherCall:
        name = operation if isinstance(operation, str) else getattr(operation, "name", None)
        if not isinstance(name, str):
            raise TypeError("ctx.call in a worker takes the name of a registered operation")
        return FurtherCall(self.number, next(_questions), name, pickle.dumps(dict(arguments)), as_dict(clocks))

    def question(self, question: str, value: object) -> Ask:
        return Ask(self.number, next(_questions), question, pickle.dumps(value))

    async def _await_envelope(self, message: FurtherCall) -> Envelope:
        return pickle.loads(await self._await_answer(message))  # type: ignore[no-any-return]

    async def _await_state(self, question: str, value: object) -> object:
        return unpickle_answer(await self._await_answer(self.question(question, value)))

    async def _await_answer(self, message: FurtherCall | Ask) -> bytes:
        """Ask and await the answer. The call's own limit cancels us here."""
        import asyncio

        answer: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        _awaited[message.question] = answer
        self.send(message)
        try:
            return await answer
        except asyncio.CancelledError:
            if _awaited.pop(message.question, None) is not None:
                self.send(NeverMind(message.question))
            raise


def take_answer(message: Answer) -> bool:
    """Hand an answer to the coroutine that awaits it. Return False if none does."""
    answer = _awaited.pop(message.question, None)
    if answer is not None and not answer.done():
        answer.set_result(message.answer)
    return answer is not None


def unpickle_answer(pickled: bytes) -> object:
    succeeded, answer = pickle.loads(pickled)
    if not succeeded:
        raise answer
    return answer


def describe_briefly(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


# --- one call at a time -----------------------------------------------------------------------------------


class OnlyCall(RunningCall):
    """The one call of a worker for itself."""

    coroutine: RunningCoroutine | None = None
    is_last = False
    """Something of the call would disturb the next: the worker ends after the answer."""
    _is_async = False
    _is_over = False

    def __init__(self, request: Run, sock: socket.socket, inbox: messages.Reader) -> None:
        super().__init__(request)
        self._sock = sock
        self._inbox = inbox
        self.behind: list[ipc.Message] = []
        """The calls behind this one, read meanwhile."""

    def context(self, function: Callable[..., Any]) -> Context:
        self._is_async = inspect.iscoroutinefunction(function)
        self._thread = threading.get_ident()
        self._answers: dict[int, bytes] = {}
        # The function may have threads. One of them reads at a time, and hands the others their answers.
        self._changed = threading.Condition(threading.Lock())
        self._sending = threading.Lock()
        self._is_read = False
        self._asking = 0
        return super().context(function)

    def send(self, message: messages.FromWorker) -> None:
        with self._sending:
            self._refuse_if_over()
            _send(self._sock, message)

    def send_news(self, message: Progress | Partial | Step) -> None:
        with self._sending:
            if not self._is_over:  # otherwise it would count as news of the next call
                _send(self._sock, message)

    def is_stopping(self) -> bool:
        if self._is_async and threading.get_ident() != self._thread:  # its loop reads
            return self.stopping
        with self._changed:  # held while it reads: the call does not end meanwhile
            if self._is_read or self._is_over:
                return self.stopping
            while not self.stopping and (self._inbox.has_unread or select.select([self._sock], [], [], 0)[0]):
                self.take(self._inbox.next())
            self._changed.notify_all()
        return self.stopping

    def end(self) -> None:
        """Let no thread that the function left behind send or read any more. One that is reading cannot be stopped: the
        worker ends with it, and a call that it may have read goes to another worker, because it has not begun."""
        if self._context is None:  # it can neither send nor ask
            return
        with self._sending, self._changed:
            self._is_over = True
            self.is_last = self.is_last or self._asking > 0
            self._changed.notify_all()

    def _refuse_if_over(self) -> None:
        if self._is_over:
            raise RuntimeError(f"{self.request.name} has ended; its threads can ask for nothing any more")

    def call(self, operation: object, arguments: Mapping[str, object], clocks: Clocks) -> Any:
        if self._is_async:
            return super().call(operation, arguments, clocks)
        return pickle.loads(self._wait_for_answer(self.further_call(operation, arguments, clocks)))

    def ask(self, question: str, value: object) -> Any:
        if self._is_async:
            return super().ask(question, value)
        return unpickle_answer(self._wait_for_answer(self.question(question, value)))

    def _wait_for_answer(self, message: FurtherCall | Ask) -> bytes:
        """Ask and wait for the answer, in any thread. Our supervisor kills us at the limit."""
        with self._changed:
            self._refuse_if_over()
            self._asking += 1
        try:
            self.send(message)
            while not self._has_answer(message.question):
                try:
                    self.take(self._inbox.next())
                finally:
                    with self._changed:
                        self._is_read = False
                        self._changed.notify_all()
            return self._answers.pop(message.question)
        finally:
            with self._changed:
                self._asking -= 1

    def _has_answer(self, question: int) -> bool:
        """Wait until the answer is there, or it is this thread's turn to read: then return False."""
        with self._changed:
            while question not in self._answers:
                self._refuse_if_over()
                if not self._is_read:
                    self._is_read = True
                    return False
                self._changed.wait()  # bounded by our supervisor; the thread that reads notifies us
            return True

    def take(self, message: ipc.Message) -> None:
        if isinstance(message, Answer):
            if not take_answer(message) and self._context is not None:
                self._answers[message.question] = message.answer
        elif isinstance(message, Run) or message[0] > self.number:
            self.behind.append(message)
        elif message[0] == self.number:  # others came too late for their call
            super().take(message)

    def run_async(self, coroutine: Coroutine[Any, Any, Any]) -> object:
        """Run an async function on the loop of this worker, and read messages meanwhile."""
        loop = _event_loop()
        while self._inbox.has_unread:
            self.take(self._inbox.next())
        loop.add_reader(self._sock, self._read, loop)
        running = self.coroutine = RunningCoroutine(loop, coroutine)
        try:
            return running.run()
        finally:
            self.is_last = not running.end_others()
            loop.remove_reader(self._sock)

    def _read(self, loop: asyncio.AbstractEventLoop) -> None:
        # `ctx.stopping` may have read it since the loop woke, and to read again would block.
        if not select.select([self._sock], [], [], 0)[0]:
            return
        try:
            received = self._inbox.receive()
        except BlockingIOError:
            return
        except ipc.Broken:  # the runtime is gone; our supervisor notices
            loop.remove_reader(self._sock)
            return
        for message in received:
            self.take(message)


class RunningCoroutine:
    """An async function on the loop of this worker."""

    def __init__(self, loop: asyncio.AbstractEventLoop, coroutine: Coroutine[Any, Any, Any]) -> None:
        self._loop = loop
        self._task = loop.create_task(coroutine)
        self._is_cancelling = self._is_cancelled = self._is_thrown = False

    def stop(self) -> None:
        """Cancel it, from the repeated signal. If its loop does not run, raise `Stopped` wherever it is, once."""
        if not self._is_cancelling:
            self._is_cancelling = True
            self._loop.call_soon_threadsafe(self._cancel)
        elif not self._is_cancelled and not self._is_thrown:
            self._is_thrown = True
            raise Stopped

    def _cancel(self) -> None:
        self._is_cancelled = True
        self._task.cancel()

    def run(self) -> Any:
        """Return its result. Raises Stopped if it was stopped."""
        try:
            return self._loop.run_until_complete(self._task)
        except Stopped:
            if not self._task.done():  # raised in the loop, between two steps; the coroutine still cleans up
                self._task.cancel()
                with contextlib.suppress(BaseException):
                    self._loop.run_until_complete(self._task)
            raise
        finally:
            if self._is_cancelling:
                raise Stopped

    def end_others(self) -> bool:
        """Cancel the tasks that it left. Return False if one is still there."""
        import asyncio

        others = asyncio.all_tasks(self._loop)
        if not others:
            return True
        for task in others:
            task.cancel()
        _, left = self._loop.run_until_complete(asyncio.wait(others, timeout=OTHERS_LIMIT_S))
        return not left


_loop: asyncio.AbstractEventLoop | None = None
"""One for all async calls of this worker: connections that they keep open on it serve the next."""


def _event_loop() -> asyncio.AbstractEventLoop:
    global _loop
    import asyncio

    if _loop is None or _loop.is_closed():
        _loop = asyncio.new_event_loop()
    asyncio.set_event_loop(_loop)
    return _loop


def prepare_forks(*, serves_many: bool = True) -> None:
    """Do what is the same for all forks. Unless it `serves_many`, garbage is not collected: that would copy every page
    of the program for one command."""
    quiet_this_process()
    _read_from(os.devnull)
    # What is imported stays; a collection in a fork that walked over it would copy every page it is on.
    if serves_many:
        gc.collect()
    gc.freeze()


def serve_calls(sock: socket.socket, bell: kernel.DeadlineTimer, memory: int, tokens: int) -> NoReturn:
    words = open_memory(memory)
    os.close(memory)
    if words[SHARED]:
        SharedWorker(sock, words).serve()
    _serve_one_at_a_time(sock, bell, words, CallTokens(tokens))


class CallTokens:
    """The numbers of the calls that may begin, in a pipe. The runtime takes a number out to move its call elsewhere."""

    def __init__(self, fd: int) -> None:
        self._fd, self._number = fd, 0

    def take(self, number: int) -> bool:
        """Return whether this call may begin. Calls and tokens come in the order of their numbers."""
        while self._number < number:
            try:
                self._number = int.from_bytes(os.read(self._fd, 8), "little")
            except BlockingIOError:
                return False
        return self._number == number


def _serve_one_at_a_time(
    sock: socket.socket, bell: kernel.DeadlineTimer, words: memoryview, tokens: CallTokens
) -> NoReturn:
    sock.setblocking(True)
    inbox = messages.Reader(sock)
    kernel.become_subreaper()  # so that "no child left" means "nothing left" here as well
    kernel.name_process("shotclock-work")
    me = os.getpid()
    is_running = is_asked = False
    call: OnlyCall | None = None

    def on_term(number: int, frame: object) -> None:
        nonlocal is_asked
        if not is_running:
            os._exit(0)
        if call is not None and call.coroutine is not None:
            call.coroutine.stop()
        elif not is_asked:  # once: our supervisor repeats the signal, which must not hit the clean-up
            is_asked = True
            raise Stopped

    signal.signal(signal.SIGTERM, on_term)
    while True:
        try:
            message = inbox.next()  # unbounded on purpose: a warm worker waits for work, and dies with its supervisor
        except ipc.Broken:
            os._exit(0)
        if not isinstance(message, Run) or not tokens.take(message.number):
            continue  # it came too late for its call, or was taken back
        call = OnlyCall(message, sock, inbox)
        try:
            if bell_ns := message.bell_ns:
                bell.arm(bell_ns)  # before anything of the call runs; from here on the supervisor decides
            is_running, is_asked = True, False
            # Before any code of the call: if the worker dies, a call that has not begun is given to another one.
            words[BEGUN] = message.number
            reply = _perform(call)
            is_running = False
            if os.getpid() != me:  # the function forked and came back twice; its caller waits for one answer
                os._exit(0)
            finished_ns = monotonic_ns()
            if bell_ns:
                bell.disarm()
            call.end()
        except Stopped:
            # The limit was reached. An answer would come too late; the supervisor waits for our end.
            _flush()
            os._exit(0)
        _flush()
        leaked = _find_leaked() if kernel.has_children() else []
        inbox.put_back(call.behind)
        try:
            _send(sock, Done(message.number, *reply, leaked, finished_ns))
        except ipc.Broken:
            os._exit(0)
        if call.is_last or message.number >= MOST_CALLS:
            os._exit(0)
        while leaked or (bell_ns and finished_ns > bell_ns - CLOSE_CALL_NS):
            signal.pause()  # unbounded on purpose: the runtime reads our answer and has us killed


def _send(sock: socket.socket, message: messages.FromWorker) -> None:
    try:
        sock.sendall(messages.pack(message))
    except OSError as error:
        raise ipc.Broken(str(error)) from error


def _perform(call: OnlyCall) -> Reply:
    request = call.request
    call.trace.enter()
    set_call_variables(request.bell_ns, call.trace.traceparent, request.caller[2])
    if request.overtime_address:
        os.environ[OVERTIME_VARIABLE] = request.overtime_address
    try:
        if request.stdin_path is not None:
            _read_from(request.stdin_path)
        bound = call.bind()
        if isinstance(bound, tuple):
            return bound
        result = bound()
        if isinstance(result, types.CoroutineType):
            result = call.run_async(result)
    except Stopped:
        raise
    except BaseException as error:
        if call.coroutine is not None and type(error).__name__ == "CancelledError":
            return "cancelled", None  # by itself: nothing asked it to stop
        return reply_to_error(error)
    finally:
        if request.stdin_path is not None:
            _read_from(os.devnull)
        if request.overtime_address:
            os.environ.pop(OVERTIME_VARIABLE, None)
    return reply_to_result(result)


def _read_from(path: str) -> None:
    file = os.open(path, os.O_RDONLY)
    os.dup2(file, 0)
    os.close(file)
    sys.stdin = open(0, encoding="utf-8", errors="surrogateescape", closefd=False)  # noqa: SIM115


# --- many calls on one loop -------------------------------------------------------------------------------

_number: ContextVar[int] = ContextVar("shotclock_call_number", default=0)
"""Number of the call whose code runs, in its tasks and threads as well."""


class SharedWorker:
    def __init__(self, sock: socket.socket, words: memoryview) -> None:
        kernel.name_process("shotclock-host")
        _read_from(os.devnull)
        sock.setblocking(False)
        self.loop = _event_loop()
        self.words = words
        self._sock = sock
        self._inbox = messages.Reader(sock)
        self.pid = os.getpid()
        self._thread = threading.get_ident()
        self._context = copy_context()
        self._calls: dict[int, SharedCall] = {}
        self._outbox = bytearray()
        self._is_flushing = False
        self._flushed_ns = 0

    def serve(self) -> NoReturn:
        watch(self._report_process)
        self.loop.add_reader(self._sock, self._read)
        while True:
            with contextlib.suppress(BaseException):  # a handler's task that exits must not end the others' worker
                self.loop.run_forever()  # unbounded on purpose: it ends with the socket, or by the supervisor

    def _report_process(self, started: StartedProcesses, pid: int) -> None:
        """Report at once that a call has started a process: it can be killed whatever its loop does then."""
        self.send_from_anywhere(Process(_number.get(), started.mark, pid))
        if self.is_here():
            self._flush()

    def _read(self) -> None:
        try:
            received = self._inbox.receive()
        except BlockingIOError:
            return
        except ipc.Broken:
            os._exit(0)
        for message in received:
            if isinstance(message, Run):
                self._begin(message)
            elif isinstance(message, Answer):
                take_answer(message)
            elif (call := self._calls.get(message[0])) is not None:
                call.take(message)

    def _begin(self, request: Run) -> None:
        call = self._calls[request.number] = SharedCall(self, request)
        call.task = self.loop.create_task(call.run(), context=self._context.copy())
        call.task.add_done_callback(call.on_end, context=self._context)

    def look(self) -> None:
        """Read messages for a handler that asks without letting the loop run."""
        if self.is_here() and select.select([self._sock], [], [], 0)[0]:
            self._read()
            self._flush()

    def is_here(self) -> bool:
        """Return whether this is the loop's thread."""
        return threading.get_ident() == self._thread

    def send(self, message: messages.FromWorker) -> None:
        """Send a message at the end of this turn of the loop, with the others of the turn."""
        self._outbox += messages.pack(message)
        if not self._is_flushing:
            self._is_flushing = True
            self.loop.call_soon(self._flush, context=self._context)

    def send_from_anywhere(self, message: messages.FromWorker) -> None:
        if self.is_here():
            self.send(message)
        else:
            self.loop.call_soon_threadsafe(self.send, message, context=self._context)

    def send_or_drop(self, message: Progress | Partial | Step) -> None:
        """Send news from any thread; drop them rather than pile them up."""
        if not self.is_here():
            self.loop.call_soon_threadsafe(self.send_or_drop, message, context=self._context)
        elif len(self._outbox) < PROGRESS_HELD:
            self.send(message)
            if monotonic_ns() - self._flushed_ns > SEND_AT_LEAST_NS:
                self._flush()

    def _flush(self) -> None:
        self._is_flushing = False
        self._flushed_ns = monotonic_ns()
        outbox = self._outbox
        try:
            while outbox:
                del outbox[: self._sock.send(outbox)]
        except (BlockingIOError, InterruptedError):
            self._is_flushing = True
            self.loop.add_writer(self._sock, self._flush_rest)
        except OSError:
            os._exit(0)

    def _flush_rest(self) -> None:
        self.loop.remove_writer(self._sock)
        self._flush()

    def forget(self, number: int) -> None:
        self._calls.pop(number, None)


class SharedCall(RunningCall):
    task: asyncio.Task[None]
    _has_replied = False

    def __init__(self, worker: SharedWorker, request: Run) -> None:
        super().__init__(request)
        self._worker = worker

    def send(self, message: messages.FromWorker) -> None:
        self._worker.send(message)

    def send_news(self, message: Progress | Partial | Step) -> None:
        self._worker.send_or_drop(message)

    def write(self, text: str) -> None:
        self._worker.send_from_anywhere(Wrote(self.number, text))

    def is_stopping(self) -> bool:
        if not self.stopping:
            self._worker.look()
        return self.stopping

    def take(self, message: ipc.Message) -> None:
        if isinstance(message, Cancel):
            self.send(Heard(self.number))
            self.stopping = True
            self.task.cancel()
        else:
            super().take(message)

    async def run(self) -> None:
        import asyncio

        words, request = self._worker.words, self.request
        words[BEGUN] = self.number  # before any code of the call, as above
        self.trace.enter()
        _number.set(self.number)
        scope = Scope(self.deadline, request.depth, request.name, self.trace, overtime_address=request.overtime_address)
        current_scope.set(scope)
        words[RUNNING] = self.number
        reply: Reply
        try:
            bound = self.bind()
            if isinstance(bound, tuple):
                reply = bound
            else:
                result = bound()
                if isinstance(result, types.CoroutineType):
                    result = await _note_running(result, words, self.number)  # type: ignore[misc]
                words[RUNNING] = self.number
                reply = reply_to_result(result)
        except asyncio.CancelledError:
            reply = "cancelled", None
        except BaseException as error:
            reply = reply_to_error(error)
        if os.getpid() != self._worker.pid:  # the handler forked and came back twice; its caller waits for one answer
            os._exit(0)
        finished_ns = monotonic_ns()
        words[RUNNING] = 0
        self._has_replied = True
        try:
            self.send(Done(self.number, *reply, [], finished_ns))
        except (ValueError, OverflowError) as error:  # gigabytes
            self.send(Done(self.number, "unserializable", f"the result cannot be sent: {error}", [], finished_ns))

    def on_end(self, task: asyncio.Task[None]) -> None:
        self._worker.forget(self.number)
        if not self._has_replied:  # cancelled before its first step
            self.send(Done(self.number, "unbegun", None, [], monotonic_ns()))


@types.coroutine
def _note_running(handler: Coroutine[Any, Any, Any], words: memoryview, number: int) -> Generator[Any, None, Any]:
    """Await a handler, and write its number into the shared memory whenever its code holds the loop."""
    thrown: BaseException | None = None
    while True:
        words[RUNNING] = number
        try:
            awaited = handler.send(None) if thrown is None else handler.throw(thrown)
        except StopIteration as returned:
            return returned.value
        finally:
            words[RUNNING] = 0
        try:
            yield awaited
            thrown = None
        except BaseException as error:
            thrown = error


# --- replies ----------------------------------------------------------------------------------------------


def reply_to_result(result: object) -> Reply:
    try:
        (data, changes), pickled = to_valid_json(result), pickle.dumps(result)
        same = not changes and type(data) is type(result) and data == result and messages.is_plain(pickled)
        return "returned", (pickled, None if same else data, changes)
    except Stopped:
        raise
    except NotSerializable as error:
        return "unserializable", str(error)
    except BaseException as error:
        return ("unserializable", f"a {type(result).__name__} cannot leave its process: {describe_briefly(error)}")


def reply_to_error(error: BaseException) -> Reply:
    if isinstance(error, Failure):
        with contextlib.suppress(Exception):
            error.data, error.context = to_valid_json(error.data)[0], to_valid_json(error.context)[0]
            return "failed", pickle.dumps(error)
    return "raised", _describe(error)


@lru_cache(maxsize=1024)
def find(module: str, qualname: str) -> Callable[..., Any]:
    found: Any = sys.modules.get(module) or importlib.import_module(module)
    path, _, command = qualname.partition(":")
    for part in path.split("."):
        found = getattr(found, part)
    if command:  # a closure or a lambda may be behind it, which only its App can find
        return found(command)  # type: ignore[no-any-return]
    # A decorator may have replaced the function; the wrapped one is called.
    found = getattr(found, "__shotclock_handler__", found)
    if not callable(found):
        raise TypeError(f"{qualname} is not a function")
    return found  # type: ignore[no-any-return]


def _describe(error: BaseException) -> tuple[str, str, str, str, str, bytes]:
    """Return type, message, traceback, code and public text of an exception, and itself if it can be sent."""
    pickled = b""
    with contextlib.suppress(Exception):
        pickled = pickle.dumps(error)
        pickle.loads(pickled)
    described = *describe_exception(error), code_of(error), messages.describe_outside(error)
    return *described, pickled if len(pickled) <= LONGEST_EXCEPTION else b""


def _find_leaked() -> list[dict[str, object]]:
    """Return the processes that the function left running, and collect its dead children."""
    for _ in range(_LEAK_LOOKS):
        if kernel.collect_dead():
            return []
        if alive := [pid for pid in kernel.descendants(os.getpid()) if not kernel.is_zombie(pid)]:
            return [kernel.describe(pid) for pid in alive[:_LEAKED_NAMED]]
    return [kernel.describe(kernel.UNKNOWN_PID)]


def _flush() -> None:
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except Exception:
        pass  # the function may have closed or replaced them
