"""Context of a running handler, and the processes that it started where calls share a process.

Those are killed when a limit ends the call, or listed. Python's functions that start processes are wrapped: each
records the new process for its call, and marks its environment, which finds daemons and background jobs. Not found are
processes started by `os.system` or `os.forkpty`, under another loop than asyncio's, in a thread that the call made
itself, or orphaned with an environment of their own or with that of `multiprocessing`'s fork server.
"""

from __future__ import annotations

import _posixsubprocess
import asyncio
import concurrent.futures
import contextlib
import inspect
import json
import math
import os
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextvars import Context as Variables
from contextvars import ContextVar, copy_context
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, Protocol, get_args, get_origin

from ..core.errors import Failure
from ..core.limits import Clocks, Deadline, parse_duration_ms
from ..core.trace import TraceContext
from ..core.value_types import entity, field, value
from ..supervise import clock, kernel
from ..supervise.clock import monotonic_ns, pause
from ..supervise.environment import CALL_VARIABLE, OVERTIME_VARIABLE
from ..supervise.kill import kill_below, signal_process
from . import client_forms

if TYPE_CHECKING:
    from concurrent.futures import Future
    from multiprocessing.process import BaseProcess

    from typing_extensions import TypeVar

    S = TypeVar("S", default=Any)
else:
    from typing import TypeVar

    S = TypeVar("S")

OVERTIME = "overtime"
RESOURCE_UPDATED = "resource updated"
ASK_CLIENT = "ask client"
URL_COMPLETED = "notifications/elicitation/complete"
ASK_LIMIT_MS = 10 * 60_000  # for a person to answer
MOST_QUESTIONS = 20  # of one call at the same time
LONGEST_QUESTION = 1024 * 1024  # as JSON
LOG_LEVELS = ("debug", "info", "notice", "warning", "error", "critical", "alert", "emergency")
LONGEST_LOG = 10_000

Progress = Callable[[float, float | None, str | None], None]
"""Done, total, and what is being done or counted."""
OnLog = Callable[[str, str, str | None], None]
"""Level, text and logger of a message."""
Answerer = Callable[[str, object], Coroutine[Any, Any, object] | None]
"""Answers a question of a handler's context; None for one that it does not know."""
LOOK_PAUSE_S = 0.005
KEPT_BY_PYTHON = ("multiprocessing.resource_tracker", "multiprocessing.forkserver")
"""Processes that Python starts once and keeps."""
# Where `fork_exec` and `posix_spawn` take the environment.
_EXEC_ENVIRONMENT, _SPAWN_ENVIRONMENT = 5, 2

Survivors = Sequence[dict[str, object]]
Then = Callable[[Survivors], object]


@value
class Caller:
    """The client of a server that made the call. Outside of a server all of it is empty."""

    principal: str | None = None  # the bearer of a token of the server or of its issuer
    client: str = ""  # the client's own word
    client_version: str = ""
    session: str | None = None  # of an older client over HTTP
    claims: Mapping[str, object] = field(default_factory=dict)  # of a verified token of the issuer
    headers: Mapping[str, str] = field(default_factory=dict)


class CallListener:
    """Listener to one running call, on the caller's loop."""

    skipped_steps: tuple[str, ...] = ()
    """Done before."""
    stdin_path: str | None = None
    """The stdin of a function in a worker (default: empty)."""

    def progress(self, done: float, total: float | None, message: str | None) -> None:
        """Take a progress report."""

    def step(self, name: str) -> None:
        """Note that a step has begun; those before it are done."""

    def log(self, level: str, message: str, logger: str | None) -> None:
        """Take a message of the function. Outside a server it goes to Python's logging."""
        import logging  # takes 4 ms, and few commands use it

        severity = _SEVERITIES.get(level) or level.upper()
        logging.getLogger(logger or "shotclock").log(getattr(logging, severity), "%s", message)

    def wrote(self, text: str) -> None:
        """Take the next piece of the text that the call is producing."""

    async def checkpoint(self, state: object) -> None:
        """Keep the state, durably, before this returns."""
        raise Failure("CHECKPOINTS_UNAVAILABLE")

    async def restore(self, fingerprint: str) -> object:
        """Return the state kept last, if it was for the same input."""
        raise Failure("CHECKPOINTS_UNAVAILABLE")

    def ask(self, question: str, value: object) -> Coroutine[Any, Any, object]:
        """Answer a question of a handler. Subclasses may know further questions."""
        if question == "checkpoint":
            return self.checkpoint(value)
        if question == "restore":
            return self.restore(str(value))
        if question == RESOURCE_UPDATED:
            return asyncio.sleep(0)  # outside a server there is no client that listens
        if question == ASK_CLIENT:
            raise Failure("CANNOT_ASK", "only an MCP client can be asked, by the command that it called itself")
        raise Failure("UNKNOWN_OPERATION", f"the caller does not know the question {question!r}")


class Traced(Protocol):
    @property
    def trace(self) -> TraceContext: ...


@entity(frozen=True)
class Scope:
    """The call that code runs in; further calls nest in it."""

    deadline: Deadline | None
    depth: int
    name: str
    span: Traced
    call: Any = None
    """If it is one of this process."""
    overtime_address: str = ""
    """Where a command started here may request overtime."""


current_scope: ContextVar[Scope | None] = ContextVar("shotclock_scope", default=None)


class ProgressListener(CallListener):
    def __init__(self, on_progress: Progress) -> None:
        self._on_progress = on_progress

    def progress(self, done: float, total: float | None, message: str | None) -> None:
        self._on_progress(done, total, message)


NULL_LISTENER = CallListener()


class Stopped(BaseException):
    """Raised in a sync function when its time is up: `finally` blocks run, within the grace.

    Not an Exception, so that `except Exception` does not swallow it. A function that does is killed.
    """


class CallLink(Protocol):
    def is_stopping(self) -> bool: ...
    def state(self) -> Any: ...
    def progress(self, done: float, total: float | None, unit: str | None) -> None: ...
    def step(self, name: str) -> None: ...
    def write(self, text: str) -> None: ...
    def log(self, level: str, message: str, logger: str | None) -> None: ...
    def keep(self, result: object) -> None: ...
    def ask(self, question: str, value: object) -> Any: ...
    def call(self, operation: Any, arguments: Mapping[str, object], clocks: Clocks) -> Any: ...


class Context(Generic[S]):
    """The call as its handler sees it. A parameter named `ctx`, or annotated with it, receives it.

    It is an instance of the subclass that the parameter is annotated with.

    `ctx.call(…)` gives an awaitable to an async handler and the envelope itself to a sync one. `Context[AppState]`
    names the type of `ctx.state`.
    """

    _is_call_context = True  # known to core by this name, which imports nothing from here

    def __init__(
        self,
        name: str,
        request_id: str,
        deadline: Deadline | None,
        depth: int,
        trace: Traced,
        link: CallLink,
        skipped_steps: tuple[str, ...] = (),
        caller: Caller | None = None,
    ) -> None:
        self.name = name
        self.request_id = request_id
        self.deadline = deadline
        self.depth = depth
        self._trace = trace
        self.link = link
        self._skipped_steps = skipped_steps
        self.caller: Caller = caller or Caller()

    @property
    def headers(self) -> Mapping[str, str]:
        """Return the headers of the client's request that `serve --pass-header` names, in lower case."""
        return self.caller.headers

    @property
    def traceparent(self) -> str:
        """Return this call as a parent, in the form of W3C Trace Context."""
        return self._trace.trace.traceparent

    @property
    def stopping(self) -> bool:
        """Return whether the call has been asked to wind down: its soft clock rang, or it is being stopped."""
        return self.link.is_stopping()

    @property
    def state(self) -> S:
        """Return the value that the lifespan of the App has yielded. Raises Failure STATE_UNAVAILABLE elsewhere."""
        state: S = self.link.state()
        return state

    def remaining_ms(self) -> int | None:
        """Return the time left before the deadline; None if there is none."""
        return None if self.deadline is None else self.deadline.remaining_ms(clock.monotonic_ns())

    def progress(
        self, done: float, total: float | None = None, message: str | None = None, *, unit: str | None = None
    ) -> None:
        """Report how far the work is: a sign of life for the idle clock. Raises TypeError or ValueError.

        With whole numbers the message, or `unit`, is the counted thing: 3 of 10 files.
        """
        message = unit if message is None else message
        if message is not None and not isinstance(message, str):
            raise TypeError(f"ctx.progress: the message is a text, not a {type(message).__name__}")
        self.link.progress(_number("done", done), None if total is None else _number("total", total), message)

    def keep(self, partial: object) -> None:
        """Keep a partial result: `data` of the envelope if the call is stopped. Replaces the former. A sign of life."""
        self.link.keep(partial)

    def request_overtime(self, reason: str, by: object) -> Any:
        """Return the granted milliseconds, 0 if declined. Await it if async. Raises Failure NOT_EXTENDABLE."""
        if not str(reason).strip():
            raise ValueError("ctx.request_overtime: say why")
        return self.link.ask(OVERTIME, (parse_duration_ms(by), str(reason)))

    def step(self, name: str) -> bool:
        """Begin a declared step. Return False if the caller resumes from a later one: skip it."""
        if name in self._skipped_steps:
            return False
        self.link.step(name)
        return True

    def write(self, text: str) -> None:
        """Send text to the caller at once, to be kept if the call is stopped. A sign of life, even if empty."""
        self.link.write(text)

    def log(self, message: str, level: str = "info", logger: str | None = None) -> None:
        """Send a message to the client's log, or to stderr on the command line. A sign of life.

        The level is one of MCP's: debug, info, notice, warning, error, critical, alert, emergency.
        """
        if not all(isinstance(each, str) for each in (message, logger or "")):
            raise TypeError("ctx.log: the message and the logger are texts")
        if level not in LOG_LEVELS:
            raise ValueError(f"ctx.log: the level is one of {', '.join(LOG_LEVELS)}, not {level!r}")
        cut = message if len(message) <= LONGEST_LOG else f"{message[:LONGEST_LOG]}…"
        self.link.log(level, cut, logger)

    def ask(self, message: str, type: Any = str, *, name: str = "answer") -> Any:
        """Ask the person at the MCP client. Return an `Answer`; await it if async.

        The type is str, int, float, bool, a Literal or Enum of texts, a list of these choices, or a flat model or
        dataclass of them. Questions that wait at the same time have different names. Raises TypeError for another
        type, and Failure CANNOT_ASK, NO_ANSWER or BAD_ANSWER.
        """
        form = client_forms.Form(type)
        params = {"mode": "form", "message": str(message), "requestedSchema": form.schema}
        return self._ask_client("elicitation/create", params, name, form.read)

    def ask_url(self, message: str, url: str, *, name: str = "answer") -> Any:
        """Ask the person at the MCP client to open a URL, for secrets that neither client nor model may see.

        Return an `Answer` without data; await it if async. "accept" is the consent to open the URL: find out yourself
        when the person has finished there. Raises ValueError for a URL that is not http or https, and Failure as `ask`.
        """
        params = {"mode": "url", "message": str(message), "url": client_forms.checked_url(url)}
        return self._ask_client("elicitation/create", params, name, client_forms.read_consent)

    def url_completed(self, *, name: str = "answer") -> Any:
        """Inform the client that the person has finished at the URL of `ask_url`. Await it if async."""
        return self._ask_client(URL_COMPLETED, {}, name, lambda _: None)

    def sample(
        self,
        messages: Any,
        *,
        max_tokens: int = 1_000,
        system: str | None = None,
        temperature: float | None = None,
        stop: Sequence[str] | None = None,
        name: str = "sample",
    ) -> Any:
        """Have the client's model answer a text, or messages. Return a `Sampled`; await it if async.

        Raises TypeError, and Failure as `ask` does.
        """
        given = {"systemPrompt": system, "temperature": temperature, "stopSequences": stop and list(stop)}
        params = {"messages": client_forms.sampling_messages(messages), "maxTokens": int(max_tokens)}
        params |= {key: value for key, value in given.items() if value is not None}
        return self._ask_client("sampling/createMessage", params, name, client_forms.read_sample)

    def roots(self, *, name: str = "roots") -> Any:
        """Return the folders of the client, each a `Root`. Await it if async. Raises Failure as `ask` does."""
        return self._ask_client("roots/list", {}, name, client_forms.read_roots)

    def _ask_client(self, method: str, params: Mapping[str, Any], name: str, read: Callable[[Any], Any]) -> Any:
        answer = self.link.ask(ASK_CLIENT, {"name": str(name), "method": method, "params": params})
        if not inspect.isawaitable(answer):
            return read(answer)

        async def read_later() -> Any:
            return read(await answer)

        return read_later()

    def resource_updated(self, uri: str) -> Any:
        """Notify the clients of the server that listen to a resource. Await it if async."""
        return self.link.ask(RESOURCE_UPDATED, str(uri))

    def checkpoint(self, state: object) -> Any:
        """Store a state (plain JSON data) that survives a crash once this returns. Await it if async."""
        return self.link.ask("checkpoint", state)

    def restore(self, fingerprint: object = "") -> Any:
        """Return the state that this invocation kept before it was interrupted, or None. Await it if async.

        A state with another fingerprint (a digest or modification time of the input) is discarded, with a warning.
        """
        return self.link.ask("restore", str(fingerprint))

    def call(self, operation: Any, arguments: Mapping[str, object] | None = None, **clocks: Any) -> Any:
        """Call another operation inside this call's deadline. Clocks as in `Clocks.of`: timeout="5s", …"""
        return self.link.call(operation, arguments or {}, Clocks.of(**clocks))


_SEVERITIES = {"notice": "INFO", "alert": "CRITICAL", "emergency": "CRITICAL"}
"""Of levels that Python's logging does not have."""


def check_question(params: Mapping[str, Any], asked: int) -> None:
    """Raise Failure CANNOT_ASK for a question that is too long, or one too many beside those of the call."""
    if asked >= MOST_QUESTIONS:
        raise Failure("CANNOT_ASK", f"a call asks at most {MOST_QUESTIONS} questions at the same time")
    if (length := len(json.dumps(params))) > LONGEST_QUESTION:
        raise Failure("CANNOT_ASK", f"the question has {length} characters, {LONGEST_QUESTION} are the most")


def context_class(hint: Any) -> type[Context]:
    """Return the class that the annotation of `ctx` names, alone or in a union: Context or a subclass of it."""
    for named in (hint, *get_args(hint)):
        each = get_origin(named) or named
        if isinstance(each, type) and issubclass(each, Context):
            return each
    return Context


def _number(name: str, given: Any) -> float:
    if isinstance(given, bool) or not (hasattr(given, "__index__") or hasattr(given, "__float__")):
        raise TypeError(f"ctx.progress: {name} is a number, not a {type(given).__name__}")
    number: int | float = given.__index__() if hasattr(given, "__index__") else given.__float__()
    if isinstance(number, float) and not math.isfinite(number):
        raise ValueError(f"ctx.progress: {name} is a number with an end, not {number}")
    return number


_UNSEEN = -1  # the start of a process that could not be looked at when it was recorded


class StartedProcesses:
    __slots__ = ("__weakref__", "_pids", "is_over", "mark")

    def __init__(self, mark: str | None = None) -> None:
        self.mark: str = os.urandom(8).hex() if mark is None else mark
        self.is_over: bool = False
        """The call was abandoned; processes that it starts later are killed at once."""
        self._pids: dict[int, int] = {}

    def __bool__(self) -> bool:
        return bool(self._pids)

    def add(self, pid: int) -> None:
        self._pids[pid] = _UNSEEN
        with contextlib.suppress(OSError):
            self._pids[pid] = kernel.start_of(pid)  # a pid may be another process's by the time we look
        if self.is_over:
            signal_process(pid, signal.SIGKILL)

    def alive(self) -> list[int]:
        """Return the living processes, with their descendants. Raises OSError if they cannot be looked for."""
        roots = [pid for pid, start in self._pids.items() if start in (kernel.start_of(pid), _UNSEEN)]
        names = os.listdir("/proc") if os.path.isdir("/proc") else ()
        entry = f"{CALL_VARIABLE}={self.mark}".encode()
        roots += (int(name) for name in names if name.isdecimal() and entry in kernel.environment_of(int(name)))
        found = dict.fromkeys(pid for root in roots for pid in (root, *kernel.descendants(root)))
        return [pid for pid in found if pid != os.getpid() and not kernel.is_zombie(pid)]

    def stop(self, kill_ns: int) -> list[int]:
        """Send TERM now and KILL at `kill_ns`; return the survivors. Blocks until then, and for the limit of a kill."""
        left = self.alive()
        if not left:
            return []
        if monotonic_ns() < kill_ns:
            for pid in left:
                signal_process(pid, signal.SIGTERM)
                signal_process(pid, signal.SIGCONT)
            while monotonic_ns() < kill_ns and self.alive():
                pause(LOOK_PAUSE_S)
        return kill_below(lambda: not self.alive(), lambda wait_ms: pause(wait_ms / 1000), find=self.alive)

    def stop_beside(self, loop: asyncio.AbstractEventLoop, then: Then, *, grace_ns: int = 0) -> None:
        """Stop them in a thread, and call `then` with the survivors on the loop."""
        run_beside(loop, partial(self.stop, monotonic_ns() + grace_ns), then)


def run_beside(loop: asyncio.AbstractEventLoop, work: Callable[[], list[int]], then: Then) -> None:
    """Run blocking work in a thread, and call `then` with its result on the loop."""

    def run() -> None:
        try:
            left = [kernel.describe(pid) for pid in work()]
        except Exception as error:  # never claim what was not seen
            left = [{"pid": 0, "command": f"its processes could not be looked for: {error}"}]
        with contextlib.suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(then, left, context=Variables())

    threading.Thread(target=run, name="shotclock-stop", daemon=True).start()


_started: weakref.WeakKeyDictionary[Scope, StartedProcesses] = weakref.WeakKeyDictionary()
_submitted: weakref.WeakKeyDictionary[Scope, set[Future[Any]]] = weakref.WeakKeyDictionary()
_listener: Callable[[StartedProcesses, int], None] | None = None
_is_watching = False


def started_by(scope: Scope) -> StartedProcesses | None:
    return _started.get(scope)


def take_started(scope: Scope) -> StartedProcesses | None:
    return _started.pop(scope, None)


def give_up_started(scope: Scope) -> StartedProcesses:
    """Return the processes of the call; those that it starts later are killed at once."""
    started = _started.setdefault(scope, StartedProcesses())
    started.is_over = True
    return started


def watch(listener: Callable[[StartedProcesses, int], None] | None = None) -> None:
    """Record the processes that calls start. A listener is called in the thread that starts one."""
    global _listener, _is_watching
    _listener = listener
    if _is_watching:
        return
    _is_watching = True
    from multiprocessing.process import BaseProcess

    fork_exec = _record_starts(_posixsubprocess.fork_exec, _EXEC_ENVIRONMENT)
    setattr(_posixsubprocess, "fork_exec", fork_exec)  # noqa: B010  what multiprocessing uses
    setattr(subprocess, "_fork_exec", fork_exec)  # noqa: B010
    for name in ("posix_spawn", "posix_spawnp"):
        setattr(os, name, _record_starts(getattr(os, name), _SPAWN_ENVIRONMENT))
    os.fork = _record_starts(os.fork, None)
    pool = concurrent.futures.ThreadPoolExecutor
    pool.submit = _submit_in_context(pool.submit)  # type: ignore[method-assign]
    setattr(BaseProcess, "start", _record_process(BaseProcess.start))  # noqa: B010


def _record_process(start: Callable[[BaseProcess], None]) -> Callable[[BaseProcess], None]:
    """Wrap a start of `multiprocessing` to record the process, whose parent may be the fork server."""

    def start_and_record(process: BaseProcess) -> None:
        start(process)
        if process.pid is not None and (elsewhere := record_starts_elsewhere()) is not None:
            elsewhere[1](process.pid)

    return start_and_record


def record_starts_elsewhere() -> tuple[str, Callable[[int], None]] | None:
    """Return the mark of the call that runs, and a function that records a process which another one started for it."""
    scope = current_scope.get()
    if scope is None:
        return None
    if (started := _started.get(scope)) is None:
        started = _started.setdefault(scope, StartedProcesses())

    def record_start(pid: int) -> None:
        started.add(pid)
        if _listener is not None:
            _listener(started, pid)

    return started.mark, record_start


def _submit_in_context(submit: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `submit` to run the work in the context of the call: a pool's threads belong to no call."""

    def submit_for_call(pool: Any, work: Callable[..., Any], /, *arguments: Any, **named: Any) -> Any:
        scope = current_scope.get()
        if scope is None:
            return submit(pool, work, *arguments, **named)
        submitted = submit(pool, copy_context().run, work, *arguments, **named)
        running = _submitted.setdefault(scope, set())
        running.add(submitted)
        submitted.add_done_callback(running.discard)
        return submitted

    return submit_for_call


def work_in_pools(scope: Scope) -> list[Future[Any]]:
    """Return the work of a call that runs in threads of pools: a cancellation does not end it."""
    return list(_submitted.get(scope, ()))


def _record_starts(start: Callable[..., int], environment_at: int | None) -> Callable[..., int]:
    """Wrap a function that starts processes to record them for the call that runs."""

    def record_and_start(*arguments: Any, **named: Any) -> int:
        scope = current_scope.get()
        texts = [word for word in arguments[0] if isinstance(word, str)] if environment_at == _EXEC_ENVIRONMENT else ()
        # A helper of all calls belongs to none.
        is_helper = any(f"from {name} import main" in text for text in texts for name in KEPT_BY_PYTHON)
        recorder = None if is_helper else record_starts_elsewhere()
        if scope is None or recorder is None:
            return start(*arguments, **named)
        mark, record_start = recorder
        if environment_at is not None and len(arguments) > environment_at:
            own = {CALL_VARIABLE: mark, OVERTIME_VARIABLE: scope.overtime_address}
            changed = _with_variables(arguments[environment_at], own, as_list=environment_at == _EXEC_ENVIRONMENT)
            arguments = (*arguments[:environment_at], changed, *arguments[environment_at + 1 :])
        pid = start(*arguments, **named)
        if pid > 0:
            record_start(pid)
        return pid

    return record_and_start


def _with_variables(environment: Any, own: Mapping[str, str], *, as_list: bool) -> Any:
    """Return the environment with these variables, unless they are empty: a list of entries for `fork_exec`."""
    if environment is None:  # our own, to `fork_exec`, and from Python 3.13 on to `posix_spawn` as well
        environment = os.environb
    elif as_list:
        environment = dict(entry.split(b"=", 1) for entry in environment)
    changed = {name: value for name, value in environment.items() if os.fsdecode(name) not in own}
    changed |= {os.fsencode(name): os.fsencode(value) for name, value in own.items() if value}
    return [name + b"=" + value for name, value in changed.items()] if as_list else changed


def helpers_of_python() -> set[int]:
    """Return the processes of `KEPT_BY_PYTHON`."""
    tracker = getattr(sys.modules.get("multiprocessing.resource_tracker"), "_resource_tracker", None)
    server = getattr(sys.modules.get("multiprocessing.forkserver"), "_forkserver", None)
    pids = getattr(tracker, "_pid", None), getattr(server, "_forkserver_pid", None)
    return {pid for pid in pids if pid is not None}
