"""Program of a worker: take a call, run the function, send back what came of it, and stay warm.

Runs below a supervisor, which kills it and everything it started when the call's bell rings. Nothing here has
to be trusted to end.

docs/design.md: R19.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import inspect
import itertools
import os
import pickle
import select
import signal
import socket
import sys
import threading
from collections.abc import Callable, Coroutine, Mapping
from functools import lru_cache, partial
from types import CoroutineType
from typing import Any, NoReturn

from ..core.arguments import NotSerializable, signature_of, to_valid_json
from ..core.clocks import NS_PER_MS, Clocks, Deadline
from ..core.envelope import Envelope, describe_exception
from ..core.errors import Failure, code_of
from ..core.trace import TraceContext, span_id_of, traceparent_of
from ..core.value_types import as_dict
from . import ipc, kernel, messages, spans
from .clock import monotonic_ns
from .context import Context, Stopped
from .environment import OVERTIME_VARIABLE, CallVariables, quiet_this_process
from .messages import (
    Answer,
    Ask,
    Done,
    FurtherCall,
    MoveBell,
    NeverMind,
    Partial,
    Progress,
    Run,
    Skipped,
    Step,
    WindDown,
    Wrote,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    import asyncio

Reply = tuple[str, object]
"""What came of a function: one of the kinds that `outcomes.worker_outcome` knows, and its details."""

MAIN_ALIAS = "__shotclock_main__"
main_import_error = ""
"""Why the main program could not be imported here, if so."""
inside_worker = False
"""True in a worker and in the zygote that preloads for it: no runtime may be started there."""

# Names of leaked processes that travel back; there may be thousands, a person reads a few.
_LEAKED_NAMED = 50
# A child may end between being counted and being listed; one that no look finds cannot be named.
_LEAK_LOOKS = 3
# How long a worker watches for its next call before it falls asleep.
AWAKE_NS = 300_000
# Between two looks, which take a microsecond or two: somebody else had the processor. How long that is kept in mind.
PREEMPTED_NS = 100_000
CROWDED_NS = 100_000_000
# One that answered this close to its bell may be on the way to be killed: no other call may begin in it.
CLOSE_CALL_NS = 3_000_000
# Calls before the first. The interpreter specialises code that has run a few times.
REHEARSALS = 16
# How long the tasks that an async function left behind may take to be cancelled. One that will not go runs it out, and
# takes the worker with it.
OTHERS_LIMIT_S = 0.1
# An exception may carry anything. Larger ones stay where they are; what they say travels.
LONGEST_EXCEPTION = 1_000_000


class CallTrace:
    """The call's own place in its trace."""

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

    def stand(self) -> None:
        """Put spans that its code makes itself below it."""
        if "opentelemetry.trace" in sys.modules:
            spans.stand_at(self.trace)


_questions = itertools.count(1)


class RunningCall:
    """A call being run, seen from inside its process. How it sends and hears whether to stop, each program says."""

    def __init__(self, request: Run, waiting: dict[int, asyncio.Future[bytes]]) -> None:
        """Take the message that began it, and the questions that wait for an answer on an event loop, by number."""
        self.request = request
        self.number = request.number
        self.trace = CallTrace(request.caller, request.request_id)
        self.stopping = False
        self._waiting = waiting
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
        """Return the function with its arguments, checked; or the reply that says why it cannot be called, and nothing
        ran."""
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
            request.name,
            request.request_id,
            self.deadline,
            request.depth,
            self.trace,
            self,
            request.skipped_steps,
        )
        return self._context

    def take_bell(self, message: MoveBell) -> None:
        """Take note of another deadline: what asks for the time left is told."""
        if self._context is not None and message.request_id == self.request.request_id:
            self._context.deadline = Deadline(message.bell_ns)

    def keep(self, partial: object) -> None:
        try:
            plain, changes = to_valid_json(partial)
        except NotSerializable as error:
            raise TypeError(f"ctx.keep takes plain data: {error}") from None
        self.send_news(Partial(self.number, pickle.dumps(plain), changes))

    def progress(self, done: float, total: float | None, unit: str | None) -> None:
        self.send_news(Progress(self.number, done, total, unit))

    def step(self, name: str) -> None:
        self.send_news(Step(self.number, name))

    def write(self, text: str) -> None:
        self.send(Wrote(self.number, text))

    # --- what an async function asks: its loop goes on meanwhile ---------------------------------------------

    def call(self, operation: object, arguments: Mapping[str, object], clocks: Clocks) -> Any:
        return self._await_envelope(self.further_call(operation, arguments, clocks))

    def ask(self, what: str, value: object) -> Any:
        return self._await_state(what, value)

    def further_call(self, operation: object, arguments: Mapping[str, object], clocks: Clocks) -> FurtherCall:
        name = operation if isinstance(operation, str) else getattr(operation, "name", None)
        if not isinstance(name, str):
            raise TypeError("ctx.call in a worker takes the name of a registered operation")
        return FurtherCall(self.number, next(_questions), name, pickle.dumps(dict(arguments)), as_dict(clocks))

    def question(self, what: str, value: object) -> Ask:
        return Ask(self.number, next(_questions), what, pickle.dumps(value))

    async def _await_envelope(self, message: FurtherCall) -> Envelope:
        return pickle.loads(await self._await_answer(message))  # type: ignore[no-any-return]

    async def _await_state(self, what: str, value: object) -> object:
        return unpickle_answer(await self._await_answer(self.question(what, value)))

    async def _await_answer(self, message: FurtherCall | Ask) -> bytes:
        """Ask and await the answer. Bounded by the call's own clock: at its bell we are cancelled here."""
        import asyncio

        answer: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._waiting[message.question] = answer
        self.send(message)
        try:
            return await answer
        except asyncio.CancelledError:
            if self._waiting.pop(message.question, None) is not None:
                self.send(NeverMind(message.question))
            raise


def take_answer(message: Answer, waiting: dict[int, asyncio.Future[bytes]]) -> bool:
    """Give an answer to whoever awaits it. Return False if nobody does."""
    answer = waiting.pop(message.question, None)
    if answer is not None and not answer.done():
        answer.set_result(message.answer)
    return answer is not None


def unpickle_answer(pickled: bytes) -> object:
    went_well, answer = pickle.loads(pickled)
    if not went_well:
        raise answer
    return answer


def describe_briefly(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


class _Call(RunningCall):
    """The one call of a worker. What a sync function asks, it waits for here."""

    coroutine: _Coroutine | None = None
    """What it runs, where the function is async."""
    is_last = False
    """Something of it is still there that would disturb the next call: the worker leaves after the answer."""
    _is_async = False
    _is_over = False

    def __init__(self, request: Run, sock: socket.socket, inbox: messages.Reader) -> None:
        super().__init__(request, {})
        self._sock = sock
        self._inbox = inbox
        self.behind: list[ipc.Message] = []

    def context(self, function: Callable[..., Any]) -> Context:
        self._is_async = inspect.iscoroutinefunction(function)
        self._thread = threading.get_ident()
        self._answers: dict[int, bytes] = {}
        # The function may have threads. One of them reads at a time, and hands the others what they wait for.
        self._news = threading.Condition(threading.Lock())
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
            if not self._is_over:  # or it would be news of the next call
                _send(self._sock, message)

    def is_stopping(self) -> bool:
        if self._is_async and threading.get_ident() != self._thread:  # its loop reads
            return self.stopping
        with self._news:  # held while it reads: the call does not end meanwhile
            if self._is_read or self._is_over:
                return self.stopping
            while not self.stopping and (self._inbox.has_unread or select.select([self._sock], [], [], 0)[0]):
                self._take(self._inbox.next())
            self._news.notify_all()
        return self.stopping

    def end(self) -> None:
        """Let no thread that the function has left behind send or read for it any more. One that is reading cannot be
        told: the worker leaves with it, and a call that it may have read is given to another, as its token is here."""
        if self._context is None:  # it can neither send nor ask
            return
        with self._sending, self._news:
            self._is_over = True
            self.is_last = self.is_last or self._asking > 0
            self._news.notify_all()

    def _refuse_if_over(self) -> None:
        if self._is_over:
            raise RuntimeError(f"{self.request.name} has ended; a thread of it can ask for nothing any more")

    def call(self, operation: object, arguments: Mapping[str, object], clocks: Clocks) -> Any:
        if self._is_async:
            return super().call(operation, arguments, clocks)
        return pickle.loads(self._wait_for_answer(self.further_call(operation, arguments, clocks)))

    def ask(self, what: str, value: object) -> Any:
        if self._is_async:
            return super().ask(what, value)
        return unpickle_answer(self._wait_for_answer(self.question(what, value)))

    def _wait_for_answer(self, message: FurtherCall | Ask) -> bytes:
        """Ask and wait for the answer, in any thread. Bounded by our own supervisor, which kills us at the bell."""
        with self._news:
            self._refuse_if_over()
            self._asking += 1
        try:
            self.send(message)
            while not self._has_answer(message.question):
                try:
                    self._take(self._inbox.next())
                finally:
                    with self._news:
                        self._is_read = False
                        self._news.notify_all()
            return self._answers.pop(message.question)
        finally:
            with self._news:
                self._asking -= 1

    def _has_answer(self, question: int) -> bool:
        """Wait until the answer is there, or it is this thread's turn to read: then it returns False."""
        with self._news:
            while question not in self._answers:
                self._refuse_if_over()
                if not self._is_read:
                    self._is_read = True
                    return False
                self._news.wait()  # bounded by our supervisor, which kills us at the bell; whoever reads tells us
            return True

    def read_on(self, loop: asyncio.AbstractEventLoop) -> None:
        """Take what comes, as long as the loop runs."""
        while self._inbox.has_unread:
            self._take(self._inbox.next())
        loop.add_reader(self._sock, self._read, loop)

    def stop_reading_on(self, loop: asyncio.AbstractEventLoop) -> None:
        loop.remove_reader(self._sock)

    def _read(self, loop: asyncio.AbstractEventLoop) -> None:
        # `ctx.stopping` may have read it since we were woken, and to read again would block the loop.
        if not select.select([self._sock], [], [], 0)[0]:
            return
        try:
            received = self._inbox.receive()
        except BlockingIOError:
            return
        except ipc.Broken:  # the runtime is gone, and our supervisor knows it
            loop.remove_reader(self._sock)
            return
        for message in received:
            self._take(message)

    def _take(self, message: ipc.Message) -> None:
        match message:
            case Answer():
                if not take_answer(message, self._waiting) and self._context is not None:
                    self._answers[message.question] = message.answer
            case WindDown():
                self.stopping = self.stopping or message.request_id == self.request.request_id
            case MoveBell():
                self.take_bell(message)
            case _:
                self.behind.append(message)  # the calls behind this one


class _Coroutine:
    """An async function on the loop of this worker, from its first step until nothing of it is left."""

    def __init__(self, loop: asyncio.AbstractEventLoop, coroutine: Coroutine[Any, Any, Any]) -> None:
        self._loop = loop
        self._task = loop.create_task(coroutine)
        self._asked = self._heard = self._thrown = False

    def stop(self) -> None:
        """Cancel it: from the signal handler, and again every few milliseconds. One that does not let its loop hear
        that has `Stopped` raised wherever it is, once."""
        if not self._asked:
            self._asked = True
            self._loop.call_soon_threadsafe(self._cancel)
        elif not self._heard and not self._thrown:
            self._thrown = True
            raise Stopped

    def _cancel(self) -> None:
        self._heard = True
        self._task.cancel()

    def run(self) -> Any:
        """Return what it returned. Raises what it raised, and Stopped where it was stopped, however it took that."""
        try:
            return self._loop.run_until_complete(self._task)
        except Stopped:
            if not self._task.done():  # it hit the loop between two steps; what was awaiting still cleans up
                self._task.cancel()
                with contextlib.suppress(BaseException):
                    self._loop.run_until_complete(self._task)
            raise
        finally:
            if self._asked:
                raise Stopped

    def end_others(self) -> bool:
        """Cancel the tasks that it started and did not wait for. Return False if one is still there."""
        import asyncio

        others = asyncio.all_tasks(self._loop)
        if not others:
            return True
        for task in others:
            task.cancel()
        _, left = self._loop.run_until_complete(asyncio.wait(others, timeout=OTHERS_LIMIT_S))
        return not left


call_variables = CallVariables()
_loop: asyncio.AbstractEventLoop | None = None
"""One for all async calls of this worker: what they keep open on it (connections, pools) is of use to the next."""


def _event_loop() -> asyncio.AbstractEventLoop:
    global _loop
    import asyncio

    if _loop is None or _loop.is_closed():
        _loop = asyncio.new_event_loop()
    asyncio.set_event_loop(_loop)
    return _loop


def prepare_forks(*, serves_many: bool = True) -> None:
    """Do once, in the process that workers are forked from, what is the same for all of them. Unless it `serves_many`,
    garbage is not looked for: that would copy every page of the program for one command."""
    quiet_this_process()
    call_variables.prepare()
    _read_from(os.devnull)
    # What is imported stays; a collection in a fork that walked over it would copy every page it is on.
    if serves_many:
        _rehearse_calls()
        gc.collect()
    gc.freeze()


def _rehearse_calls() -> None:
    """Go through what a worker does for each call until the interpreter has filled its caches and specialised the code.
    A fork that did it anew would copy a page for each of them, in its first call."""
    ours, theirs = socket.socketpair()
    inbox = messages.Reader(theirs)
    arguments = pickle.dumps({"number": 1})
    run = Run(0, __name__, _do_nothing.__name__, arguments, "", "0-0", 0, 0, (), None, ("", False, ""))
    packed = messages.pack(run)
    with ours, theirs, contextlib.closing(kernel.DeadlineTimer()) as bell:
        for _ in range(REHEARSALS):
            ours.sendall(packed)  # its buffer holds all of them, and what is sent back is read at once
            message = inbox.next()
            assert isinstance(message, Run)
            call = _Call(message, theirs, inbox)
            bell.arm(monotonic_ns() + 1_000 * NS_PER_MS)
            assert call.trace.traceparent
            call_variables.prepare()
            bound = call.bind()
            assert not isinstance(bound, tuple)
            reply = reply_to_result(bound())
            bell.disarm()
            call.end()
            _flush()
            assert not kernel.has_children()
            _send(theirs, Done(0, *reply, [], monotonic_ns()))
            ours.recv(len(packed))


def _do_nothing(number: int) -> int:
    return number


def serve_calls(sock: socket.socket, bell: kernel.DeadlineTimer, tokens: int) -> NoReturn:
    """Serve one call after another until the runtime closes the socket.

    The next call may already wait behind the one that runs. Whoever takes its token out of the pipe owns it: we do,
    and start it, or the runtime did, to give it to another worker.
    """
    sock.setblocking(True)
    inbox = messages.Reader(sock)
    kernel.become_subreaper()  # so that "no child left" means "nothing left" here as well
    kernel.name_process("shotclock-work")
    me = os.getpid()
    running = asked = False
    call: _Call | None = None

    def on_term(number: int, frame: object) -> None:
        nonlocal asked
        if not running:
            os._exit(0)
        if call is not None and call.coroutine is not None:
            call.coroutine.stop()
        elif not asked:  # once: our supervisor asks again and again, which must not hit the clean-up
            asked = True
            raise Stopped

    signal.signal(signal.SIGTERM, on_term)
    lull = _Lull(sock)
    while True:
        if not inbox.has_unread:
            lull.wait()
        try:
            message = inbox.next()  # unbounded on purpose: a warm worker waits for work, and dies with its supervisor
        except ipc.Broken:
            os._exit(0)
        if not isinstance(message, Run):
            continue  # came too late for its call
        if not _take_token(tokens):
            _reply_or_leave(sock, Skipped())
            continue
        call = _Call(message, sock, inbox)
        try:
            if bell_ns := message.bell_ns:
                bell.arm(bell_ns)  # before anything of the call runs; from here on the supervisor decides
            running, asked = True, False
            reply = _perform(call)
            running = False
            if os.getpid() != me:  # the function forked and came back twice; its caller waits for one answer
                os._exit(0)
            finished_ns = monotonic_ns()
            if bell_ns:
                bell.disarm()
            call.end()
        except Stopped:
            # The bell rang. Whatever we answered now would come too late; the supervisor waits for our end.
            _flush()
            os._exit(0)
        _flush()
        leaked = _find_leaked() if kernel.has_children() else []
        inbox.put_back(call.behind)
        _reply_or_leave(sock, Done(0, *reply, leaked, finished_ns))
        if call.is_last:
            os._exit(0)
        while leaked or (bell_ns and finished_ns > bell_ns - CLOSE_CALL_NS):
            signal.pause()  # unbounded on purpose: whoever reads our answer has us killed, and nobody else with us


class _Lull:
    """Wait for the next call. Falling asleep and being woken takes longer than a short call; where the last one came
    quickly, the next is watched for awake, for a moment. Not where others want the processor: whoever watches takes it
    from them, and maybe from the caller itself, and is then woken later than one that has slept."""

    def __init__(self, sock: socket.socket) -> None:
        self._poller = select.poll()
        self._poller.register(sock, select.POLLIN)
        self._came_quickly = False
        self._crowded_until_ns = 0

    def wait(self) -> None:
        began_ns = now_ns = monotonic_ns()
        poll = self._poller.poll
        if self._came_quickly and now_ns >= self._crowded_until_ns:
            while not poll(0):
                before_ns, now_ns = now_ns, monotonic_ns()
                if now_ns - before_ns > PREEMPTED_NS:
                    self._crowded_until_ns = now_ns + CROWDED_NS
                    break
                if now_ns - began_ns > AWAKE_NS:
                    break
            else:
                return
        poll()  # unbounded like the read that follows it
        self._came_quickly = monotonic_ns() - began_ns < AWAKE_NS


def _take_token(tokens: int) -> bool:
    try:
        return bool(os.read(tokens, 1))
    except BlockingIOError:
        return False


def _send(sock: socket.socket, message: messages.FromWorker) -> None:
    """Send a whole message, or raise ipc.Broken."""
    try:
        sock.sendall(messages.pack(message))
    except OSError as error:
        raise ipc.Broken(str(error)) from error


def _reply_or_leave(sock: socket.socket, message: messages.FromWorker) -> None:
    try:
        _send(sock, message)
    except ipc.Broken:
        os._exit(0)


def _perform(call: _Call) -> Reply:
    request = call.request
    call.trace.stand()
    call_variables.set(request.bell_ns, call.trace.traceparent, request.caller[2])
    if request.overtime_address:
        os.environ[OVERTIME_VARIABLE] = request.overtime_address
    try:
        if request.stdin_path is not None:
            _read_from(request.stdin_path)
        bound = call.bind()
        if isinstance(bound, tuple):
            return bound
        result = bound()
        if isinstance(result, CoroutineType):
            result = _run_async(call, result)
    except Stopped:
        raise
    except BaseException as error:
        if call.coroutine is not None:
            import asyncio

            if isinstance(error, asyncio.CancelledError):
                return "cancelled", None  # by itself: nobody asked it to stop
        return reply_to_error(error)
    finally:
        if request.stdin_path is not None:
            _read_from(os.devnull)
        if request.overtime_address:
            os.environ.pop(OVERTIME_VARIABLE, None)
    return reply_to_result(result)


def _run_async(call: _Call, coroutine: Coroutine[Any, Any, Any]) -> object:
    loop = _event_loop()
    call.read_on(loop)
    running = call.coroutine = _Coroutine(loop, coroutine)
    try:
        return running.run()
    finally:
        call.is_last = not running.end_others()
        call.stop_reading_on(loop)


def _read_from(path: str) -> None:
    """Make this file what is on stdin."""
    file = os.open(path, os.O_RDONLY)
    os.dup2(file, 0)
    os.close(file)
    sys.stdin = open(0, encoding="utf-8", errors="surrogateescape", closefd=False)  # noqa: SIM115


# --- what a worker and a host process say in the same way -------------------------------------------------


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
        return (
            "unserializable",
            f"a {type(result).__name__} cannot leave its process: {describe_briefly(error)}",
        )


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
    if command:  # may be a closure or a lambda, which only the one who keeps it can find
        return found(command)  # type: ignore[no-any-return]
    # A decorator may have put something callable in the function's place; what it wraps is what was meant.
    found = getattr(found, "__shotclock_handler__", found)
    if not callable(found):
        raise TypeError(f"{qualname} is not a function")
    return found  # type: ignore[no-any-return]


def _describe(error: BaseException) -> tuple[str, str, str, str, str, bytes]:
    """Return type, message, traceback, code and what callers elsewhere are told, which always arrive; the exception
    itself where it can be pickled and rebuilt, and is of a reasonable size."""
    pickled = b""
    with contextlib.suppress(Exception):
        pickled = pickle.dumps(error)
        pickle.loads(pickled)
    described = *describe_exception(error), code_of(error), messages.describe_outside(error)
    return *described, pickled if len(pickled) <= LONGEST_EXCEPTION else b""


def _find_leaked() -> list[dict[str, object]]:
    """Return what the function started and left running. Its dead children are collected on the way."""
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
