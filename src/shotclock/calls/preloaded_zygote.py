"""The preloaded zygote as the runtime sees it: a process with the users' modules imported, which forks the workers.

It may hang in an import or be killed; the next request starts another.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from ..core.catalogue import Handler, HandlerReference
from ..supervise import ipc
from ..supervise.clock import monotonic_ns
from ..supervise.zygote import PRELOADED
from ..worker.preloading import become_zygote_of
from ..worker.running_call import MAIN_ALIAS

# How long a fresh zygote may take to read its list of imports. One is forked in milliseconds.
PREPARE_LIMIT_S = 10.0


class Program(NamedTuple):
    """How another process imports the program: by name, by file, or not (a REPL)."""

    module: str | None = None
    file: str | None = None
    path: tuple[str, ...] | None = None
    """Default: that of this process."""
    imports: tuple[str, ...] = ()
    maker: str = ""
    """The function that makes the App, as `module/create()`. It is called once, before workers are forked."""

    @property
    def place(self) -> str | None:
        return self.file or self.module or ", ".join(self.imports) or None

    @classmethod
    def running_here(cls) -> Program:
        main = sys.modules.get("__main__")
        spec = getattr(main, "__spec__", None)
        if spec is not None and spec.name:
            return cls(spec.name)
        file = getattr(main, "__file__", None)
        return cls(None, os.path.realpath(file) if file else None)


class Preloaded:
    def __init__(
        self,
        request_fork: Callable[[bytes, list[int]], None],
        *,
        program: Program | None = None,
        modules: Sequence[str] = (),
        handlers: Sequence[Handler] = (),
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self._request_fork = request_fork
        self._program = program
        self._environment = environment
        self._modules = list(modules)
        self._handlers = [address_of(handler) for handler in handlers]
        self._requests: socket.socket | None = None
        self._control: socket.socket | None = None
        self.started_ns: int = 0
        self.pid: int | None = None
        """The pid of a zygote that is our own child, to be collected."""

    @classmethod
    def fork_here(cls) -> Preloaded | None:
        """Fork this program, whose streams are flushed (else each fork writes them again). None if it has threads."""
        if threading.active_count() > 1:
            return None
        ours, theirs = socket.socketpair()
        pid = os.fork()
        if pid == 0:
            try:
                become_zygote_of(theirs)
            except BaseException:
                sys.excepthook(*sys.exc_info())
            finally:
                os._exit(1)
        theirs.close()
        ours.setblocking(False)

        def refuse_other(note: bytes, fds: list[int]) -> None:  # a program with an event loop cannot be forked
            raise ipc.Broken("the process that forks workers was killed")

        made = cls(refuse_other)
        made._requests, made.started_ns, made.pid = ours, monotonic_ns(), pid
        return made

    def request(self, kind: bytes, fds: list[int]) -> socket.socket:
        """Have a supervisor forked, and return the socket to it. Raises ipc.Broken or OSError."""
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        with theirs:
            try:
                self.send(kind, [theirs.fileno(), *fds])
            except BaseException:
                ours.close()
                raise
        return ours

    def send(self, note: bytes, fds: list[int]) -> None:
        """Ask for a fork. A zygote that was killed is replaced, once. Raises ipc.Broken or OSError."""
        if self._requests is None:
            self.start()
        assert self._requests is not None
        try:
            ipc.send_fds(self._requests, note, fds)
        except ipc.Broken:
            self.start()
            ipc.send_fds(self._requests, note, fds)

    def start(self) -> None:
        self.close()
        control, their_control = socket.socketpair()
        requests, theirs = socket.socketpair()
        with their_control, theirs:
            self._request_fork(PRELOADED, [their_control.fileno(), theirs.fileno()])
        self._control, self._requests = control, requests
        self.started_ns = monotonic_ns()
        program = Program.running_here() if self._program is None else self._program
        path = list(sys.path if program.path is None else program.path)
        modules = [*program.imports, *self._modules]
        handlers = [*self._handlers, *([("shotclock.apps.app", f"make_app:{program.maker}")] if program.maker else [])]
        if self._program is None and "pydantic" in sys.modules:
            # Functions that are not registered yet may need it. A program without pydantic does without: each fork
            # would copy it.
            modules.append("pydantic")
        environment = dict(os.environ if self._environment is None else self._environment)
        # It may be larger than the socket's buffer; the zygote reads it when it is up.
        requests.settimeout(PREPARE_LIMIT_S)
        ipc.send(requests, ("prepare", path, modules, handlers, program.module, program.file, environment))
        requests.setblocking(False)

    def close(self) -> None:
        for sock in (self._control, self._requests):
            if sock is not None:
                sock.close()
        self._control = self._requests = None


def address_of(handler: Handler) -> tuple[str, str]:
    """Return the module and name of a handler in a fork, where the main program has another name."""
    if isinstance(handler, HandlerReference):
        module, name = handler.module, handler.qualname
    else:
        module, name = handler.__module__, handler.__qualname__
    return MAIN_ALIAS if module == "__main__" else module, name


def explain_unfindable(handler: Handler) -> str | None:
    """Return why a worker cannot find this function by its name."""
    if isinstance(handler, HandlerReference):
        return None  # the worker reports it
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
