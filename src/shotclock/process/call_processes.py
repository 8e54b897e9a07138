"""Which processes a call has started that shares its process with others: killed where its clock ends it, or named.

Python starts processes by a handful of functions. Each is replaced, once, by one that notes the new process for the
call in whose context it runs, and marks its environment: what leaves its family on the way (a daemon, what a shell put
into the background) is found by that. A call that has a worker for itself needs none of this: there everything below
is its own. What hides from both, by starting under another loop than asyncio's, in a thread that the call made itself,
or with an environment of its own that is then orphaned, is not found.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from contextvars import Context as Variables
from contextvars import copy_context
from functools import partial
from typing import Any

from . import kernel
from .clock import monotonic_ns, pause
from .context import Scope, current_scope
from .environment import CALL_VARIABLE
from .kill import kill_below, signal_process

# Between two looks at whether what was asked to end has ended.
LOOK_PAUSE_S = 0.005
# Where the environment is among the arguments of `fork_exec`, and of `posix_spawn`.
_EXEC_ENVIRONMENT, _SPAWN_ENVIRONMENT = 5, 2


Survivors = Sequence[dict[str, object]]
Then = Callable[[Survivors], object]


class Started:
    """The processes that one call has started."""

    __slots__ = ("__weakref__", "_pids", "is_over", "mark")

    def __init__(self, mark: str | None = None) -> None:
        self.mark = os.urandom(8).hex() if mark is None else mark
        self.is_over = False
        """The call was given up and its processes killed; what it starts from here on is killed at once."""
        self._pids: dict[int, int] = {}

    def __bool__(self) -> bool:
        return bool(self._pids)

    def add(self, pid: int) -> None:
        self._pids[pid] = kernel.start_of(pid)  # a pid may be another process's by the time we look
        if self.is_over:
            signal_process(pid, signal.SIGKILL)

    def alive(self) -> list[int]:
        """What of it is still there, with everything below."""
        roots = [pid for pid, start in self._pids.items() if kernel.start_of(pid) == start]
        roots += [pid for pid in _marked(f"{CALL_VARIABLE}={self.mark}".encode()) if pid not in roots]
        found = dict.fromkeys(roots)
        for root in roots:
            found.update(dict.fromkeys(kernel.descendants(root)))
        for pid in (os.getpid(), *_helpers()):
            found.pop(pid, None)
        return [pid for pid in found if not kernel.is_zombie(pid)]

    def stop(self, kill_ns: int) -> list[int]:
        """TERM now, KILL at `kill_ns`: what would not die. Blocks; bounded by that and by the limit of a kill."""
        left = self.alive()
        if left and monotonic_ns() < kill_ns:
            for pid in left:
                signal_process(pid, signal.SIGTERM)
                signal_process(pid, signal.SIGCONT)
            while monotonic_ns() < kill_ns and self.alive():
                pause(LOOK_PAUSE_S)
        if not left:
            return []
        return kill_below(lambda: not self.alive(), lambda wait_ms: pause(wait_ms / 1000), find=self.alive)

    def stop_beside(self, loop: asyncio.AbstractEventLoop, then: Then, *, grace_ns: int = 0) -> None:
        """The same in a thread of its own: others run on the loop. `then` is told there what survives."""
        beside(loop, partial(self.stop, monotonic_ns() + grace_ns), then)

    def look_beside(self, loop: asyncio.AbstractEventLoop, then: Then) -> None:
        """Only tell what is there: a call that ended by itself may keep processes for the calls after it."""
        beside(loop, self.alive, then)


def beside(loop: asyncio.AbstractEventLoop, work: Callable[[], list[int]], then: Then) -> None:
    """Run what blocks in a thread of its own, and say on the loop which processes it found."""

    def run() -> None:
        try:
            left = [kernel.describe(pid) for pid in work()]
        except Exception as error:  # never claim what was not seen
            left = [{"pid": 0, "command": f"its processes could not be looked for: {error}"}]
        with contextlib.suppress(RuntimeError):  # the loop is closed, and nobody waits any more
            loop.call_soon_threadsafe(then, left, context=Variables())

    threading.Thread(target=run, name="shotclock-stop", daemon=True).start()


_started: weakref.WeakKeyDictionary[Scope, Started] = weakref.WeakKeyDictionary()
noted: dict[Any, Any] = _started.data  # type: ignore[attr-defined]
"""Whether anything is there, asked at the end of every call."""
_listener: Callable[[Started, int], None] | None = None
_is_watching = False


def taken(scope: Scope) -> Started | None:
    """What the call has started, and is no longer kept here."""
    return _started.pop(scope, None)


def given_up(scope: Scope) -> Started:
    """What the call has started; whatever it starts from now on is killed at once."""
    started = _started.setdefault(scope, Started())
    started.is_over = True
    return started


def watch(listener: Callable[[Started, int], None] | None = None) -> None:
    """Note from here on which call starts what. A listener is told instead, in the thread that starts it."""
    global _listener, _is_watching
    _listener = listener
    if _is_watching:
        return
    _is_watching = True
    import _posixsubprocess
    import subprocess
    from concurrent.futures import ThreadPoolExecutor

    fork_exec = _noting(_posixsubprocess.fork_exec, _EXEC_ENVIRONMENT)
    setattr(_posixsubprocess, "fork_exec", fork_exec)  # noqa: B010  what multiprocessing uses
    setattr(subprocess, "_fork_exec", fork_exec)  # noqa: B010
    for name in ("posix_spawn", "posix_spawnp"):
        setattr(os, name, _noting(getattr(os, name), _SPAWN_ENVIRONMENT))
    os.fork = _noting(os.fork, None)
    ThreadPoolExecutor.submit = _submitting(ThreadPoolExecutor.submit)  # type: ignore[method-assign]


def _submitting(submit: Callable[..., Any]) -> Callable[..., Any]:
    """The same function, which runs the work in the context of the call: a pool's threads belong to no call."""

    def submit_for_call(pool: Any, work: Callable[..., Any], /, *arguments: Any, **named: Any) -> Any:
        if current_scope.get() is None:
            return submit(pool, work, *arguments, **named)
        return submit(pool, copy_context().run, work, *arguments, **named)

    return submit_for_call


def _noting(start: Callable[..., int], environment_at: int | None) -> Callable[..., int]:
    """The same function, which notes the process for the call that runs."""

    def note_and_start(*arguments: Any, **named: Any) -> int:
        scope = current_scope.get()
        if scope is None:
            return start(*arguments, **named)
        started = _started.get(scope)
        if started is None:
            started = _started.setdefault(scope, Started())
        if environment_at is not None and len(arguments) > environment_at:
            marked = _with_mark(arguments[environment_at], started.mark)
            arguments = (*arguments[:environment_at], marked, *arguments[environment_at + 1 :])
        pid = start(*arguments, **named)
        if pid > 0:
            started.add(pid)
            if _listener is not None:
                _listener(started, pid)
        return pid

    return note_and_start


def _with_mark(environment: Any, mark: str) -> Any:
    """As `fork_exec` takes it (a list of bytes, or None for our own) or as `posix_spawn` does (a mapping)."""
    variable = os.fsencode(CALL_VARIABLE)
    if environment is None:
        environment = [name + b"=" + value for name, value in os.environb.items()]
    if isinstance(environment, list):
        others = [entry for entry in environment if not entry.startswith(variable + b"=")]
        return [*others, variable + b"=" + mark.encode()]
    return {**environment, CALL_VARIABLE: mark}


def _marked(entry: bytes) -> list[int]:
    """Every process that carries the mark, of those whose environment we may read."""
    found = []
    for name in os.listdir("/proc") if os.path.isdir("/proc") else ():
        if name.isdecimal():
            with contextlib.suppress(OSError):
                fd = os.open(f"/proc/{name}/environ", os.O_RDONLY | os.O_CLOEXEC)
                try:
                    environment = b""
                    while chunk := os.read(fd, 65536):
                        environment += chunk
                finally:
                    os.close(fd)
                if entry in environment.split(b"\0"):
                    found.append(int(name))
    return found


def _helpers() -> list[int]:
    """Processes that Python's own modules keep for the whole program, whoever happened to be the first to need them."""
    pids = []
    for module, holder, attribute in (
        ("multiprocessing.resource_tracker", "_resource_tracker", "_pid"),
        ("multiprocessing.forkserver", "_forkserver", "_forkserver_pid"),
    ):
        pid = getattr(getattr(sys.modules.get(module), holder, None), attribute, None)
        if isinstance(pid, int):
            pids.append(pid)
    return pids
