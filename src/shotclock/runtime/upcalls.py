"""Calls that running code makes from another process into the runtime, answered in the bytes that travel back."""

from __future__ import annotations

import pickle
from collections.abc import Awaitable, Callable, Mapping
from typing import Protocol

from ..core.clocks import Clocks
from ..core.envelope import Envelope
from ..core.errors import Failure
from ..process import safe_unpickle
from ..process.context import CallListener
from .call import Call
from .outcomes import answer_unopenable

FurtherCall = Callable[[Call, int, str, Mapping[str, object], Clocks], Awaitable[Envelope]]
"""A call made by the call that was admitted like this, at this depth."""


async def answer_question(listener: CallListener, question: str, value: bytes) -> bytes:
    """Answer `ctx.checkpoint` and `ctx.restore`: what the listener says, or the Failure that is to be raised there."""
    answer: object
    try:
        answer = (True, await listener.ask(question, safe_unpickle.unpickle(value)))
    except Failure as failure:
        answer = (False, failure)
    except Exception as error:
        answer = (False, Failure("CHECKPOINTS_UNAVAILABLE", f"{type(error).__name__}: {error}"))
    return pickle.dumps(answer)


class Calling(Protocol):
    """A call in another process that may make further ones."""

    @property
    def admission(self) -> Call: ...
    @property
    def depth(self) -> int: ...
    @property
    def on_call(self) -> FurtherCall: ...


async def dispatch_call(inside: Calling, name: str, arguments: bytes, limits: dict[str, int | None]) -> bytes:
    """Answer `ctx.call`: dispatch the further call and return its envelope."""
    try:
        opened = safe_unpickle.unpickle(arguments)
    except Exception as error:
        envelope = answer_unopenable(name, error)
    else:
        envelope = await inside.on_call(inside.admission, inside.depth, name, opened, Clocks(**limits))
    try:
        return pickle.dumps(envelope)
    except Exception:  # the value cannot be pickled; its JSON form always can
        return pickle.dumps(Envelope(envelope.data, envelope.error, envelope.warnings, envelope.meta))
