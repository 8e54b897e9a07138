"""A call in the process that runs it: its function and arguments, its context, its questions, and its reply."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import itertools
import os
import pickle
import sys
from collections.abc import Callable, Coroutine, Mapping
from contextvars import ContextVar
from functools import lru_cache, partial
from typing import Any, Protocol

from ..core.arguments import NotSerializable, signature_of, to_valid_json
from ..core.envelope import describe_exception
from ..core.errors import Failure, code_of, shown_failure
from ..core.limits import Clocks, Deadline
from ..core.trace import TraceContext, span_id_of
from ..core.value_types import as_dict
from ..supervise import ipc
from . import messages
from .context import Caller, Context, Stopped, context_class
from .messages import (
    Answer,
    Ask,
    BeginWindDown,
    FurtherCall,
    Logged,
    MoveBell,
    NeverMind,
    Partial,
    Progress,
    Run,
    Step,
    Wrote,
)

Reply = tuple[str, object]
"""A kind that `outcomes.worker_outcome` knows, and its details."""

MAIN_ALIAS = "__mp_main__"
"""The main program in workers, as in processes of `multiprocessing`."""
main_import_error = ""

# An exception may carry anything. Larger ones are not sent; their text is.
LONGEST_EXCEPTION = 1_000_000

_loop: asyncio.AbstractEventLoop | None = None
"""One for all async calls of this worker: connections that they keep open on it serve the next."""


def event_loop() -> asyncio.AbstractEventLoop:
    global _loop
    if _loop is None or _loop.is_closed():
        _loop = asyncio.new_event_loop()
    asyncio.set_event_loop(_loop)
    return _loop


class WaitInThread(Protocol):
    def __call__(self, coroutine: Coroutine[Any, Any, Any], *, is_clean_up: bool = False) -> Any: ...


wait_in_thread: ContextVar[WaitInThread | None] = ContextVar("shotclock_wait_in_thread", default=None)
"""Of a sync function in the shared process: wait for a coroutine that runs on the loop there."""


def finish(coroutine: Coroutine[Any, Any, Any], *, is_clean_up: bool = False) -> Any:
    """Run a coroutine for a sync function, on the loop of its process."""
    wait = wait_in_thread.get()
    return event_loop().run_until_complete(coroutine) if wait is None else wait(coroutine, is_clean_up=is_clean_up)


_questions = itertools.count(1)
_awaited: dict[int, asyncio.Future[bytes]] = {}
"""By the number of their question."""


class RunningCall:
    """A call in its process. Each kind of worker has its own way to send, and to learn that the call is to stop."""

    def __init__(self, request: Run) -> None:
        self.request = request
        self.number: int = request.number
        trace_id, sampled, state = request.caller
        self.trace: TraceContext = TraceContext(trace_id, span_id_of(request.request_id), sampled, state)
        self.stopping: bool = False
        self.errors_shown: tuple[type[Exception], ...] = ()
        self._context: Context | None = None

    def send(self, message: messages.FromWorker) -> None:
        raise NotImplementedError

    def send_news(self, message: Progress | Partial | Step | Logged) -> None:
        """Send what may be lost, from any thread."""
        raise NotImplementedError

    def is_stopping(self) -> bool:
        raise NotImplementedError

    def state(self) -> Any:
        raise Failure("STATE_UNAVAILABLE", f"{self.request.name} runs in a worker process, which has no ctx.state")

    @property
    def deadline(self) -> Deadline | None:
        return Deadline(self.request.bell_ns) if self.request.bell_ns else None

    def bind(self) -> partial[Any] | Reply:
        """Return the function with its checked arguments, or the reply why it cannot be called."""
        module, qualname, payload = self.request.module, self.request.qualname, self.request.arguments
        try:
            function = find(module, qualname)
        except Stopped:
            raise
        except BaseException as error:
            is_main = module == MAIN_ALIAS and main_import_error
            reason = f"{module}:{qualname}: {main_import_error if is_main else _describe_briefly(error)}"
            return "unimportable", str(error) if isinstance(error, Failure) else reason
        self.errors_shown = getattr(function, "errors_shown", ())
        signature = signature_of(function)
        arguments, problems = signature.check(pickle.loads(payload))
        if problems:
            return "invalid", problems
        if hasattr(function, "looks_at_arguments"):
            return partial(function, pickle.loads(payload), arguments)  # a validator may have changed the others
        if signature.context_name is not None:
            arguments[signature.context_name] = self.context(function)
        return partial(function, **arguments)

    def context(self, function: Callable[..., Any]) -> Context:
        request = self.request
        skipped, caller = request.skipped_steps, Caller(*request.client)  # type: ignore[arg-type]
        self._context = context_class(signature_of(function).context_hint)(
            request.name, request.request_id, self.deadline, request.depth, self.trace, self, skipped, caller
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

    def log(self, level: str, message: str, logger: str | None) -> None:
        self.send_news(Logged(self.number, level, message, logger))

    def step(self, name: str) -> None:
        self.send_news(Step(self.number, name))

    def write(self, text: str) -> None:
        self.send(Wrote(self.number, text))

    def call(self, operation: object, arguments: Mapping[str, object], clocks: Clocks) -> Any:
        name = operation if isinstance(operation, str) else getattr(operation, "name", None)
        if not isinstance(name, str):
            raise TypeError("ctx.call in a worker takes the name of a registered operation")
        message = FurtherCall(self.number, next(_questions), name, pickle.dumps(dict(arguments)), as_dict(clocks))
        return self.answer_to(message, pickle.loads)

    def ask(self, question: str, value: object) -> Any:
        return self.answer_to(Ask(self.number, next(_questions), question, pickle.dumps(value)), _unpickle_answer)

    async def answer_to(self, message: FurtherCall | Ask, unpickle: Callable[[bytes], Any]) -> Any:
        """Return the answer to a question. The call's own limit cancels us here."""
        answer: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        _awaited[message.question] = answer
        self.send(message)
        try:
            return unpickle(await answer)
        except asyncio.CancelledError:
            if _awaited.pop(message.question, None) is not None:
                self.send(NeverMind(message.question))
            raise


def set_answer(message: Answer) -> bool:
    """Hand an answer to the coroutine that awaits it. Return False if none does."""
    answer = _awaited.pop(message.question, None)
    if answer is not None and not answer.done():
        answer.set_result(message.answer)
    return answer is not None


def _unpickle_answer(pickled: bytes) -> object:
    succeeded, answer = pickle.loads(pickled)
    if not succeeded:
        raise answer
    return answer


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
        return ("unserializable", f"a {type(result).__name__} cannot leave its process: {_describe_briefly(error)}")


def reply_to_error(error: BaseException, errors_shown: tuple[type[Exception], ...] = ()) -> Reply:
    error = shown_failure(error, errors_shown)
    if isinstance(error, Failure):
        with contextlib.suppress(Exception):
            error.data, error.context = to_valid_json(error.data)[0], to_valid_json(error.context)[0]
            return "failed", pickle.dumps(error)
    return "raised", describe_fully(error)


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


def read_stdin_from(path: str) -> None:
    file = os.open(path, os.O_RDONLY)
    os.dup2(file, 0)
    os.close(file)
    sys.stdin = open(0, encoding="utf-8", errors="surrogateescape", closefd=False)  # noqa: SIM115


def describe_fully(error: BaseException) -> tuple[str, str, str, str, str, bytes]:
    """Return type, message, traceback, code and public text of an exception, and itself if it can be sent."""
    pickled = b""
    with contextlib.suppress(Exception):
        pickled = pickle.dumps(error)
        pickle.loads(pickled)
    described = *describe_exception(error), code_of(error), messages.describe_outside(error)
    return *described, pickled if len(pickled) <= LONGEST_EXCEPTION else b""


def _describe_briefly(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
