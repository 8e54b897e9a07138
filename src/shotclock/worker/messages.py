"""Messages between the runtime and its workers: on the wire the number of the type, and the fields (`ipc.frame`).

Both sides run the same version, so the numbers may change between versions. Values of users travel pickled. A
process that must not run users' code (a server) unpickles only plain values and our own classes; for others it uses
the JSON form beside them.
"""

from __future__ import annotations

import contextlib
import io
import mmap
import os
import pickle
from collections.abc import Iterator
from typing import Any, NamedTuple, get_args

from ..core.errors import code_of, rebuild_failure
from ..supervise import ipc


def describe_outside(error: BaseException) -> str:
    """Return the public text of an exception: for an OSError with a code, the OS's message and the file's last name.
    Other texts may hold paths, addresses and passwords."""
    if not isinstance(error, OSError) or error.errno is None or code_of(error) == "INTERNAL_ERROR":
        return ""
    name = error.filename
    if not isinstance(name, str | bytes):
        return os.strerror(error.errno)
    return f"{os.strerror(error.errno)}: {os.path.basename(os.fsdecode(name))!r}"


class Run(NamedTuple):
    """To a worker: run a function with pickled arguments."""

    number: int
    """Of the call in its process. Calls begin in the order of their numbers."""
    module: str
    qualname: str
    arguments: bytes
    name: str
    request_id: str
    bell_ns: int
    """0 if there is none."""
    depth: int
    skipped_steps: tuple[str, ...]
    stdin_path: str | None
    caller: tuple[str, bool, str]
    """Its id, whether it is sampled, its state."""
    overtime_address: str = ""
    client: tuple[object, ...] = ()
    """The fields of a Caller."""


class MoveBell(NamedTuple):
    """To a worker: a call has another deadline."""

    number: int
    bell_ns: int


class BeginWindDown(NamedTuple):
    """To a worker: a call is to end by itself."""

    number: int


class Cancel(NamedTuple):
    """To the shared worker: cancel a call. Answered at once with `Heard`, and later with `Done`."""

    number: int


class Answer(NamedTuple):
    """To a worker: the answer to a question, pickled."""

    question: int
    answer: bytes


class Heard(NamedTuple):
    """From the shared worker: it has read the cancellation of a call."""

    number: int


class Opened(NamedTuple):
    """From the shared worker: a call has waited for the lifespan of its App, which is open now."""

    number: int
    app: str
    why_again: str
    """Why it was opened again in the same process, or an empty text."""


class CloseStates(NamedTuple):
    """To the shared worker: stop the calls and close the lifespans. Answered with `StatesClosed`."""


class StatesClosed(NamedTuple):
    """From the shared worker: every lifespan is closed."""


class Process(NamedTuple):
    """From the shared worker: a call has started a process."""

    number: int
    mark: str
    pid: int


class Progress(NamedTuple):
    number: int
    done: float
    total: float | None
    unit: str | None


class Partial(NamedTuple):
    """From a worker: a partial result as pickled plain data, and the changes that JSON made."""

    number: int
    value: bytes
    changes: list[str]


class Step(NamedTuple):
    """From a worker: a declared step has begun."""

    number: int
    name: str


class Wrote(NamedTuple):
    """From a worker: a piece of its call's text. Unlike progress it is never dropped."""

    number: int
    text: str


class Logged(NamedTuple):
    """From a worker: `ctx.log`."""

    number: int
    level: str
    message: str
    logger: str | None


class Ask(NamedTuple):
    """From a worker: a question of its context to the caller, with a pickled value."""

    number: int
    question: int
    """Unique in its process."""
    what: str
    value: bytes


class FurtherCall(NamedTuple):
    """From a worker: `ctx.call`, with pickled arguments."""

    number: int
    question: int
    name: str
    arguments: bytes
    limits: dict[str, int | None]


class NeverMind(NamedTuple):
    """From a worker: the answer to a question is no longer awaited."""

    question: int


class Done(NamedTuple):
    """From a worker: a call has ended."""

    number: int
    kind: str
    """A kind that `outcomes.worker_outcome` knows, or "unbegun"."""
    payload: Any
    leaked: list[dict[str, object]]
    finished_ns: int


ToWorker = Run | MoveBell | BeginWindDown | Cancel | Answer | CloseStates
News = Opened | Process | Progress | Partial | Step | Wrote | Logged
FromWorker = Heard | News | StatesClosed | Ask | FurtherCall | NeverMind | Done
Message = ToWorker | FromWorker
_TYPES: tuple[Any, ...] = get_args(Message)
_NUMBERS = {kind: number for number, kind in enumerate(_TYPES)}
_make = tuple.__new__


def pack(message: Message) -> bytes:
    """Return the bytes of a message. Raises ValueError or OverflowError if it is too large or not plain."""
    return ipc.frame((_NUMBERS[type(message)], *message))


class Reader(ipc.MessageReader):
    def receive(self) -> list[ipc.Message]:
        return [_make(_TYPES[received[0]], received[1:]) for received in super().receive()]


# The memory shared with the runtime, in words of eight bytes. It can be read when the worker is blocked.
MEMORY_SIZE = 4096
BEGUN = 0
"""The highest number of a call that has begun. Calls begin in the order of their numbers."""
RUNNING = 1
"""In the shared worker: the number of the call whose code holds the loop; 0 if none does, or it is unknown."""
SHARED = 2
"""1 in the shared worker, set before it is forked."""
STATES = 3
"""In the shared worker: how many lifespans it has begun to open."""
LIFESPAN_RUNS = 2**64 - 1
"""At RUNNING: the code of a lifespan holds the loop."""


def open_memory(fd: int) -> memoryview:
    return memoryview(mmap.mmap(fd, MEMORY_SIZE)).cast("Q")


# The opcode by which protocol 4 and later name a class. The byte may also be part of a text.
_CLASS = b"\x93"
_BUILTINS = frozenset({"bytearray", "complex", "frozenset", "range", "set"})
_PLAIN_MODULES = frozenset({"collections", "datetime", "decimal", "fractions", "uuid"})

_opens_all = True


def is_plain(pickled: bytes) -> bool:
    """Return whether a pickle that this version of Python made certainly names no class."""
    return _CLASS not in pickled


def unpickle(pickled: bytes) -> Any:
    """Unpickle a value. Raises what pickle raises, and for users' classes where those are kept out."""
    if _opens_all:
        return pickle.loads(pickled)
    return _PlainUnpickler(io.BytesIO(pickled)).load()


@contextlib.contextmanager
def keep_users_code_out() -> Iterator[None]:
    """Refuse values of users' classes in this process."""
    global _opens_all
    before, _opens_all = _opens_all, False
    try:
        yield
    finally:
        _opens_all = before


class _PlainUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        is_known = module in _PLAIN_MODULES or module.startswith(("shotclock.core.", "shotclock.worker.client_forms"))
        if "." not in name and (name in _BUILTINS if module == "builtins" else is_known):
            found = super().find_class(module, name)
            # Only its own classes, not what the module has imported, and the function by which a Failure travels.
            if (isinstance(found, type) and found.__module__ == module) or found is rebuild_failure:
                return found
        raise pickle.UnpicklingError(f"{module}.{name} belongs to a program that is not imported here")
