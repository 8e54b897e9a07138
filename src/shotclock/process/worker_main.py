"""Program of a worker: take a call, run the function, send back what came of it, and stay warm.

Runs below a supervisor, which kills it and everything it started when the call's bell rings. Nothing here has
to be trusted to end.

docs/design.md: R19.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import os
import pickle
import select
import signal
import socket
import sys
import threading
from collections.abc import Callable, Coroutine, Mapping
from functools import lru_cache, partial
from typing import Any, NoReturn

from ..core.arguments import NotSerializable, signature_of, to_valid_json
from ..core.clocks import Clocks
from ..core.deadlines import Deadline
from ..core.envelope import Envelope, describe_exception
from ..core.errors import Failure, code_of
from ..core.records import as_dict
from ..core.trace import TraceContext, span_id_of, traceparent_of
from . import ipc, kernel, safe_unpickle, spans
from .clock import monotonic_ns
from .context import Context, Stopped
from .environment import CallVariables, quiet_this_process

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
# How long a worker watches for its next call before it falls asleep.
AWAKE_NS = 300_000
# One that answered this close to its bell may be on the way to be killed: no other call may begin in it.
CLOSE_CALL_NS = 3_000_000
# How long the tasks that an async function left behind may take to be cancelled. One that will not go runs it out, and
# takes the worker with it.
OTHERS_LIMIT_S = 0.1
# Where in a message the call's name tag and its bell are.
_REQUEST_ID, _BELL = 5, 6
# An exception may carry anything. Larger ones stay where they are; what they say travels.
LONGEST_EXCEPTION = 1_000_000


class _Call:
    """The call being run, seen from inside the worker."""

    def __init__(self, sock: socket.socket, inbox: ipc.MessageReader, request_id: str) -> None:
        self._sock = sock
        self._inbox = inbox
        self._request_id = request_id
        self._thread = threading.get_ident()
        self._asked = 0
        self._answers: dict[int, bytes] = {}
        self._waiting: dict[int, asyncio.Future[bytes]] = {}
        self.stopping = False
        self.behind: list[ipc.Message] = []
        self.coroutine: _Coroutine | None = None
        """What it runs, where the function is async."""
        self.is_last = False
        """Something of it is still there that would disturb the next call: the worker leaves after the answer."""

    def progress(self, done: float, total: float | None, unit: str | None) -> None:
        ipc.send(self._sock, ("progress", done, total, unit))

    def is_stopping(self) -> bool:
        if threading.get_ident() != self._thread:  # one that the function has started; messages are read in one place
            return self.stopping
        while not self.stopping and (self._inbox.has_unread or select.select([self._sock], [], [], 0)[0]):
            self._take(self._inbox.next())
        return self.stopping

    def step(self, name: str) -> None:
        ipc.send(self._sock, ("step", name))

    # --- what a sync function asks: it waits ----------------------------------------------------------------

    def call(self, operation: object, arguments: Mapping[str, object], clocks: Clocks) -> Envelope:
        return pickle.loads(self._await_answer(self._send_call(operation, arguments, clocks)))  # type: ignore[no-any-return]

    def ask(self, question: str, value: object) -> object:
        return _unpickle_answer(self._await_answer(self._send("ask", question, pickle.dumps(value))))

    def _await_answer(self, number: int) -> bytes:
        while number not in self._answers:  # bounded by our own supervisor: it kills us when the call's time is up
            self._take(self._inbox.next())
        return self._answers.pop(number)

    # --- what an async one asks: its loop goes on meanwhile --------------------------------------------------

    def call_async(
        self, operation: object, arguments: Mapping[str, object], clocks: Clocks
    ) -> Coroutine[Any, Any, Envelope]:
        return self._further(_name_of(operation), pickle.dumps(dict(arguments)), as_dict(clocks))

    async def _further(self, name: str, arguments: bytes, limits: dict[str, Any]) -> Envelope:
        return pickle.loads(await self._answer_to(self._send("call", name, arguments, limits)))  # type: ignore[no-any-return]

    async def ask_async(self, question: str, value: object) -> object:
        return _unpickle_answer(await self._answer_to(self._send("ask", question, pickle.dumps(value))))

    async def _answer_to(self, number: int) -> bytes:
        """Await the answer. Bounded by the call's own clock: at its bell we are cancelled here."""
        import asyncio

        answer: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._waiting[number] = answer
        try:
            return await answer
        except asyncio.CancelledError:
            if self._waiting.pop(number, None) is not None:
                ipc.send(self._sock, ("never mind", number))
            raise

    def read_on(self, loop: asyncio.AbstractEventLoop) -> None:
        """Take what comes, as long as the loop runs."""
        while self._inbox.has_unread:
            self._take(self._inbox.next())
        loop.add_reader(self._sock, self._read, loop)

    def stop_reading_on(self, loop: asyncio.AbstractEventLoop) -> None:
        loop.remove_reader(self._sock)

    def _read(self, loop: asyncio.AbstractEventLoop) -> None:
        try:
            messages = self._inbox.receive()
        except BlockingIOError:
            return
        except ipc.Broken:  # the runtime is gone, and our supervisor knows it
            loop.remove_reader(self._sock)
            return
        for message in messages:
            self._take(message)

    # --- both -----------------------------------------------------------------------------------------------

    def _send_call(self, operation: object, arguments: Mapping[str, object], clocks: Clocks) -> int:
        return self._send("call", _name_of(operation), pickle.dumps(dict(arguments)), as_dict(clocks))

    def _send(self, kind: str, *details: object) -> int:
        self._asked += 1
        ipc.send(self._sock, (kind, self._asked, *details))
        return self._asked

    def _take(self, message: ipc.Message) -> None:
        match message:
            case ("answer", int(number), bytes(answer)):
                waiting = self._waiting.pop(number, None)
                if waiting is None:
                    self._answers[number] = answer
                elif not waiting.done():
                    waiting.set_result(answer)
            case ("stopping", request_id):
                self.stopping = self.stopping or request_id == self._request_id
            case _:
                self.behind.append(message)  # the calls behind this one


def _name_of(operation: object) -> str:
    name = operation if isinstance(operation, str) else getattr(operation, "name", None)
    if not isinstance(name, str):
        raise TypeError("ctx.call in a worker takes the name of a registered operation")
    return name


def _unpickle_answer(answer: bytes) -> object:
    went_well, said = pickle.loads(answer)
    if not went_well:
        raise said
    return said


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


_variables = CallVariables()
_loop: asyncio.AbstractEventLoop | None = None
"""One for all async calls of this worker: what they keep open on it (connections, pools) is of use to the next."""


def _event_loop() -> asyncio.AbstractEventLoop:
    global _loop
    import asyncio

    if _loop is None or _loop.is_closed():
        _loop = asyncio.new_event_loop()
    asyncio.set_event_loop(_loop)
    return _loop


def serve_calls(sock: socket.socket, bell: kernel.DeadlineTimer, tokens: int) -> NoReturn:
    """Serve one call after another until the runtime closes the socket.

    The next call may already wait behind the one that runs. Whoever takes its token out of the pipe owns it: we do,
    and start it, or the runtime did, to give it to another worker.
    """
    sock.setblocking(True)
    inbox = ipc.MessageReader(sock)
    kernel.become_subreaper()  # so that "no child left" means "nothing left" here as well
    kernel.name_process("shotclock-work")
    quiet_this_process()
    _read_from(os.devnull)
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
        if message[0] != "run":
            continue  # a "stopping" that came too late for its call
        if not _take_token(tokens):
            _reply_or_leave(sock, ("skipped",))
            continue
        call = _Call(sock, inbox, message[_REQUEST_ID])
        try:
            if bell_ns := message[_BELL]:
                bell.arm(bell_ns)  # before anything of the call runs; from here on the supervisor decides
            running, asked = True, False
            reply = _perform(call, *message[1:])
            running = False
            if os.getpid() != me:  # the function forked and came back twice; its caller waits for one answer
                os._exit(0)
            finished_ns = monotonic_ns()
            if bell_ns:
                bell.disarm()
        except Stopped:
            # The bell rang. Whatever we answered now would come too late; the supervisor waits for our end.
            _flush()
            os._exit(0)
        _flush()
        leaked = _find_leaked() if kernel.has_children() else []
        inbox.put_back(call.behind)
        _reply_or_leave(sock, ("done", *reply, leaked, finished_ns))
        if call.is_last:
            os._exit(0)
        while leaked or (bell_ns and finished_ns > bell_ns - CLOSE_CALL_NS):
            signal.pause()  # unbounded on purpose: whoever reads our answer has us killed, and nobody else with us


class _Lull:
    """Wait for the next call. Falling asleep and being woken takes longer than a short call; where the last one came
    quickly, the next is watched for awake, for a moment."""

    def __init__(self, sock: socket.socket) -> None:
        self._poller = select.poll()
        self._poller.register(sock, select.POLLIN)
        self._came_quickly = False

    def wait(self) -> None:
        began_ns = monotonic_ns()
        poll = self._poller.poll
        if self._came_quickly:
            while not poll(0):
                if monotonic_ns() - began_ns > AWAKE_NS:
                    break
            else:
                return
        poll()  # unbounded like the read that follows it
        self._came_quickly = monotonic_ns() - began_ns < AWAKE_NS


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


def _take_token(tokens: int) -> bool:
    try:
        return bool(os.read(tokens, 1))
    except BlockingIOError:
        return False


def _reply_or_leave(sock: socket.socket, message: ipc.Message) -> None:
    try:
        ipc.send(sock, message)
    except ipc.Broken:
        os._exit(0)


def _perform(
    call: _Call,
    module: str,
    qualname: str,
    payload: bytes,
    name: str,
    request_id: str,
    bell_ns: int,
    depth: int,
    skipped_steps: tuple[str, ...],
    stdin_path: str | None,
    caller: tuple[str, bool, str],
) -> Reply:
    trace = CallTrace(caller, request_id)
    trace.stand()
    _variables.set(bell_ns, trace.traceparent, caller[2])

    def context(function: Callable[..., Any]) -> Context:
        is_async = inspect.iscoroutinefunction(function)
        return Context(
            name=name,
            request_id=request_id,
            deadline=Deadline(bell_ns) if bell_ns else None,
            depth=depth,
            on_progress=call.progress,
            on_call=call.call_async if is_async else call.call,
            is_stopping=call.is_stopping,
            on_step=call.step,
            on_ask=call.ask_async if is_async else call.ask,
            trace=trace,
            skipped_steps=skipped_steps,
        )

    try:
        if stdin_path is not None:
            _read_from(stdin_path)
        bound = bind(module, qualname, payload, context)
        if isinstance(bound, tuple):
            return bound
        result = bound()
        if inspect.iscoroutine(result):
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
        if stdin_path is not None:
            _read_from(os.devnull)
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


def bind(
    module: str, qualname: str, payload: bytes, context: Callable[[Callable[..., Any]], Context]
) -> Callable[[], Any] | Reply:
    """Return the function with its arguments, checked; or the reply that says why it cannot be called, and nothing
    ran."""
    try:
        function = find(module, qualname)
    except Stopped:
        raise
    except BaseException as error:
        why = main_import_error if module == MAIN_ALIAS and main_import_error else f"{type(error).__name__}: {error}"
        return "unimportable", f"{module}:{qualname}: {why}"
    signature = signature_of(function)
    arguments, problems = signature.check(pickle.loads(payload))
    if problems:
        return "invalid", problems
    if hasattr(function, "looks_at_arguments"):
        return partial(function, pickle.loads(payload), arguments)  # a validator may have changed the others
    if signature.wants_context:
        arguments["ctx"] = context(function)
    return partial(function, **arguments)


def reply_to_result(result: object) -> Reply:
    try:
        (data, changes), pickled = to_valid_json(result), pickle.dumps(result)
        same = not changes and type(data) is type(result) and data == result and safe_unpickle.is_plain(pickled)
        return "returned", (pickled, None if same else data, changes)
    except Stopped:
        raise
    except NotSerializable as error:
        return "unserializable", str(error)
    except BaseException as error:
        return (
            "unserializable",
            f"a {type(result).__name__} cannot leave its process: {type(error).__name__}: {error}",
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


def _describe(error: BaseException) -> tuple[str, str, str, str, bytes]:
    """Return type, message, traceback and code, which always arrive; the exception itself where it can be pickled and
    rebuilt, and is of a reasonable size."""
    pickled = b""
    with contextlib.suppress(Exception):
        pickled = pickle.dumps(error)
        pickle.loads(pickled)
    return *describe_exception(error), code_of(error), pickled if len(pickled) <= LONGEST_EXCEPTION else b""


def _find_leaked() -> list[dict[str, object]]:
    """Return what the function started and left running. Its dead children are collected on the way."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    alive = [pid for pid in kernel.descendants(os.getpid()) if not kernel.is_zombie(pid)]
    return [kernel.describe(pid) for pid in alive[:_LEAKED_NAMED]]


def _flush() -> None:
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except Exception:
        pass  # the function may have closed or replaced them
