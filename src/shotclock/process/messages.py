"""Messages between the runtime and the processes that run functions: each is a type, and nothing else is sent.

On the wire a message is the number of its type and its fields (`ipc.frame`). Both sides are forked from one program, so
the numbers need not stay the same from one version to the next.

Values of users travel pickled. Unpickling imports the modules of the classes in it, so a process that is to run no code
of its users' (a server) unpickles only what is made of plain values and classes of our own; everything else it knows by
its JSON form, which travels beside.
"""

from __future__ import annotations

import contextlib
import io
import os
import pickle
from collections.abc import Iterator
from typing import Any, NamedTuple, get_args

from ..core.errors import code_of
from . import ipc


def describe_outside(error: BaseException) -> str:
    """Return what a caller elsewhere is told of an exception besides its type: what the OS says of an error that has a
    code, with the last name of the file. An exception's own text may hold paths, addresses and passwords."""
    if not isinstance(error, OSError) or error.errno is None or code_of(error) == "INTERNAL_ERROR":
        return ""
    name = error.filename
    if not isinstance(name, str | bytes):
        return os.strerror(error.errno)
    return f"{os.strerror(error.errno)}: {os.path.basename(os.fsdecode(name))!r}"


class Run(NamedTuple):
    """To a worker: run a function. Its arguments are pickled."""

    number: int
    """Of the call in its process, here and in all that follows. Calls begin in the order of their numbers."""
    module: str
    qualname: str
    arguments: bytes
    name: str
    request_id: str
    bell_ns: int
    """0 where there is none."""
    depth: int
    skipped_steps: tuple[str, ...]
    stdin_path: str | None
    caller: tuple[str, bool, str]
    """The trace that the call is in: its id, whether it is sampled, its state."""
    overtime_address: str = ""
    """What a command that it starts asks for overtime with; empty where it may have none."""


class MoveBell(NamedTuple):
    """To a worker: a call has another deadline."""

    number: int
    bell_ns: int


class WindDown(NamedTuple):
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
    """From a worker: the result so far, pickled, as plain data, and what had to be changed in it for that."""

    number: int
    value: bytes
    changes: list[str]


class Step(NamedTuple):
    """From a worker: a declared step has begun."""

    number: int
    name: str


class Wrote(NamedTuple):
    """From a worker: a piece of the text that its call is producing. Unlike progress it is never dropped."""

    number: int
    text: str


class Ask(NamedTuple):
    """From a worker: `ctx.checkpoint`, `ctx.restore` or `ctx.ask`, with a pickled value."""

    number: int
    question: int
    """Its number, unique in its process."""
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
    """One of those that `outcomes.worker_outcome` knows, or "unbegun"."""
    payload: Any
    leaked: list[dict[str, object]]
    finished_ns: int


ToWorker = Run | MoveBell | WindDown | Cancel | Answer
FromWorker = Heard | Process | Progress | Partial | Step | Wrote | Ask | FurtherCall | NeverMind | Done
Message = ToWorker | FromWorker
_TYPES: tuple[Any, ...] = get_args(Message)
_NUMBERS = {kind: number for number, kind in enumerate(_TYPES)}
_make = tuple.__new__


def pack(message: Message) -> bytes:
    """Return the bytes that are sent. Raises ValueError or OverflowError for what is too large, or no plain value."""
    return ipc.frame((_NUMBERS[type(message)], *message))


class Reader(ipc.MessageReader):
    """Reader of these messages."""

    def receive(self) -> list[ipc.Message]:
        return [_make(_TYPES[received[0]], received[1:]) for received in super().receive()]


# The opcode that looks up a class, in every protocol since 4. As a byte of some text it also stands where none is.
_CLASS = b"\x93"
_BUILTINS = frozenset({"bytearray", "complex", "frozenset", "range", "set"})
_PLAIN_MODULES = frozenset({"collections", "datetime", "decimal", "fractions", "uuid"})

_opens_all = True


def is_plain(pickled: bytes) -> bool:
    """Return whether it can be opened anywhere. True is certain, False is not."""
    return _CLASS not in pickled


def unpickle(pickled: bytes) -> Any:
    """Unpickle a value. Raises what pickle raises; where users' code is kept out, also for values that would import
    it."""
    if _opens_all or is_plain(pickled):
        return pickle.loads(pickled)
    return _PlainUnpickler(io.BytesIO(pickled)).load()


@contextlib.contextmanager
def keep_users_code_out() -> Iterator[None]:
    """Refuse values of users' classes meanwhile, for the process as a whole."""
    global _opens_all
    before, _opens_all = _opens_all, False
    try:
        yield
    finally:
        _opens_all = before


class _PlainUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if module == "builtins" and name in _BUILTINS:
            return super().find_class(module, name)
        if module in _PLAIN_MODULES or module.startswith("shotclock.core."):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"{module}.{name} belongs to a program that is not imported here")
