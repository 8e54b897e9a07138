"""An operation: what can be called, how it is isolated, and what it declares about its effects."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import field
from typing import Any, Literal, get_args

from .clocks import Clocks
from .records import dataclass

Isolation = Literal["auto", "process", "loop", "thread"]
RunsIn = Literal["process", "loop", "thread"]
Guard = Callable[..., Any]


def hyphenate(name: str) -> str:
    """Return the name as a command line writes it. Two that differ only in their spelling are one."""
    return name.replace("_", "-").lower()


@dataclass(frozen=True, slots=True)
class HandlerReference:
    """A handler that is called where it is imported, which is not here: by module and name, as in `app:import`."""

    module: str
    qualname: str
    is_async: bool = False


Handler = Callable[..., Any] | HandlerReference


@dataclass(frozen=True, slots=True, eq=False)
class Operation:
    """A handler with a name. `auto` isolates sync functions in a killable process, async ones on a loop."""

    name: str
    handler: Handler
    isolation: Isolation = "auto"
    mutates: bool = True
    """Whether it may change anything. Not said means yes: an envelope must not promise what nobody declared."""
    idempotent: bool = False
    clocks: Clocks = field(default_factory=Clocks)
    guards: tuple[Guard, ...] = ()
    is_async: bool = field(init=False)
    place: RunsIn = field(init=False)

    def __post_init__(self) -> None:
        if not self.name:
            raise ValueError("an operation needs a name")
        if not callable(self.handler) and not isinstance(self.handler, HandlerReference):
            raise TypeError(f"the handler of {self.name!r} cannot be called")
        if self.isolation not in get_args(Isolation):
            raise ValueError(f"{self.name!r}: isolation must be one of {', '.join(get_args(Isolation))}")
        handler = self.handler
        is_async = handler.is_async if isinstance(handler, HandlerReference) else inspect.iscoroutinefunction(handler)
        if self.isolation == "loop" and not is_async:
            raise ValueError(f"{self.name!r} is not async: isolate it in a 'process' or a 'thread'")
        if self.isolation == "thread" and is_async:
            raise ValueError(f"{self.name!r} is async: run it on a 'loop', or in a 'process' to make it killable")
        place: RunsIn = ("loop" if is_async else "process") if self.isolation == "auto" else self.isolation
        object.__setattr__(self, "is_async", is_async)
        object.__setattr__(self, "place", place)
