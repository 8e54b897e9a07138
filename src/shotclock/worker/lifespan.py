"""The lifespan of an App in the shared process: opened for the first call that needs it, closed with the runtime.

An async lifespan lives in one task, and a sync one in a thread of its own, from its opening to its end: task groups
and connections to SQLite demand that.
"""

from __future__ import annotations

import asyncio
import inspect
import sys
import threading
from collections.abc import Callable, Coroutine
from contextlib import AbstractAsyncContextManager, AbstractContextManager, asynccontextmanager, contextmanager
from contextvars import Context, copy_context
from functools import partial
from typing import Any

from ..core.errors import Failure
from ..core.limits import format_duration
from ..core.signatures import read_parameters
from ..core.value_types import entity

# Openings that were given up and run on: a thread cannot be stopped. With so many, no further one is begun.
MOST_GIVEN_UP = 4

Manager = AbstractContextManager[Any] | AbstractAsyncContextManager[Any]
RecordRunning = Callable[[Coroutine[Any, Any, None]], Coroutine[Any, Any, None]]
"""Wraps a coroutine: says in the shared memory when its code holds the loop."""


@entity
class Lifespan:
    """What an author declares with `@app.lifespan`."""

    app: Any
    key: str
    function: Callable[..., Any]
    limit_ms: int | None

    def make_manager(self) -> Manager:
        """Return the context manager that yields the state. Raises what the function raises, and TypeError."""
        function = self.function
        if inspect.isasyncgenfunction(function):
            function = asynccontextmanager(function)
        elif inspect.isgeneratorfunction(function):
            function = contextmanager(function)
        parameters = read_parameters(function).parameters.values()
        takes_app = any(each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD) for each in parameters)
        made = function(self.app) if takes_app else function()
        if not hasattr(made, "__aenter__") and not hasattr(made, "__enter__"):
            raise TypeError(f"the lifespan yields the state, or returns a context manager, not a {type(made).__name__}")
        return made  # type: ignore[no-any-return]


def check_lifespan(function: Callable[..., Any]) -> None:
    """Raise TypeError for a function that cannot be a lifespan."""
    if not callable(function):
        raise TypeError(f"a lifespan is a function that yields the state, not a {type(function).__name__}")
    name = getattr(function, "__qualname__", repr(function))
    if inspect.iscoroutinefunction(function):
        raise TypeError(f"the lifespan {name} has no `yield`: yield the state, and clean up behind that")
    kinds = inspect.Parameter
    needed = [
        each
        for each in read_parameters(function).parameters.values()
        if each.default is each.empty and each.kind not in (kinds.VAR_POSITIONAL, kinds.VAR_KEYWORD)
    ]
    if len(needed) > 1 or any(each.kind is each.KEYWORD_ONLY for each in needed):
        raise TypeError(f"the lifespan {name} takes no parameter, or one that receives the App")


class NotOpened(Exception):
    """The lifespan could not be opened. Its cause is the exception of the author, if there is one."""


class HeldState:
    """The state of one App, for the calls of the shared process."""

    def __init__(self, lifespan: Lifespan, record_running: RecordRunning, context: Context) -> None:
        self._lifespan = lifespan
        self._record_running = record_running
        self._context = context
        self._life: _Life | None = None
        self._given_up: list[_Life] = []
        """Those that still run."""
        self._was_open = False

    @property
    def is_open(self) -> bool:
        return self._life is not None and self._life.is_open

    def value(self) -> Any:
        """Return the state, which is open."""
        assert self._life is not None
        return self._life.opened.result()

    async def open(self) -> tuple[Any, str]:
        """Wait until it is open. Return the state, and why it was opened again in this process. Raises NotOpened.

        An opening for which no call waits any more is stopped.
        """
        if self._life is None or self._life.is_over:
            self._given_up = [each for each in (*self._given_up, self._life) if each is not None and each.is_running]
            if len(self._given_up) >= MOST_GIVEN_UP:
                advice = "give what they wait for a time limit of its own"
                raise NotOpened(f"{MOST_GIVEN_UP} openings that were given up still run: {advice}")
            why_again = "the lifespan had ended by itself" if self._was_open else ""
            self._life = _Life(self._lifespan, self._record_running, self._context.copy(), why_again)
        life = self._life
        life.waiting += 1
        try:
            if not life.opened.done():
                await asyncio.wait([life.opened])  # bounded by the call's limit, and by that of the opening
        finally:
            life.waiting -= 1
            if not life.waiting and not life.opened.done():
                life.give_up("it was not open when the last call that waited for it had to end")
        if (error := life.opened.exception()) is not None:
            raise error
        self._was_open = True
        return life.opened.result(), life.why_again

    async def close(self) -> None:
        """End the lifespan, and wait for that. The runtime bounds it."""
        if self._life is not None:
            await self._life.close()


class _Life:
    """One opening of a lifespan, and the time until its end."""

    def __init__(self, lifespan: Lifespan, record_running: RecordRunning, context: Context, why_again: str) -> None:
        self._lifespan = lifespan
        self.why_again = why_again
        self._loop = asyncio.get_running_loop()
        self.opened: asyncio.Future[Any] = self._loop.create_future()
        self.waiting = 0
        self.is_over = False
        """It has ended, or is given up: the next call opens another one."""
        self._thread_ended = True
        self._closing, self._thread_closing = asyncio.Event(), threading.Event()
        self._task = self._loop.create_task(record_running(self._live()), context=context)
        limit_ms = lifespan.limit_ms
        if limit_ms:
            late = f"it was not open after {format_duration(limit_ms)}, the default timeout of the App"
            self._loop.call_later(limit_ms / 1000, self.give_up, late)

    @property
    def is_open(self) -> bool:
        return self.opened.done() and not self.is_over

    @property
    def is_running(self) -> bool:
        """Return whether the author's code has not ended, also where it was given up."""
        return not (self._thread_ended and self._task.done())

    async def _live(self) -> None:
        try:
            manager = self._lifespan.make_manager()
            if isinstance(manager, AbstractAsyncContextManager):
                async with manager as state:
                    self._offer(state)
                    await self._closing.wait()  # unbounded on purpose: as long as its process
            else:
                ended = run_in_thread(partial(self._live_in_thread, manager), "shotclock-lifespan")
                self._thread_ended = False
                await ended
        except BaseException as error:  # an exit of the author's code must not end the loop
            self._record_end(error)
        else:
            self._record_end(None)

    def _live_in_thread(self, manager: AbstractContextManager[Any]) -> None:
        try:
            with manager as state:
                self._loop.call_soon_threadsafe(self._offer, state)
                self._thread_closing.wait()  # unbounded on purpose: as long as its process
        finally:
            self._loop.call_soon_threadsafe(setattr, self, "_thread_ended", True)

    def _offer(self, state: object) -> None:
        if not self.opened.done():
            self.opened.set_result(state)

    def _record_end(self, error: BaseException | None) -> None:
        self.is_over = True
        if not self.opened.done():
            self._refuse(NotOpened(), error)
        elif error is not None and not isinstance(error, asyncio.CancelledError):
            sys.excepthook(type(error), error, error.__traceback__)  # no call is there to answer

    def give_up(self, why: str) -> None:
        """Stop an opening that takes too long. If it is done later nevertheless, it is closed at once."""
        if not self.opened.done():
            self.is_over = True
            self._refuse(NotOpened(why), None)
            self._end()
            self._task.cancel()

    def _refuse(self, refusal: NotOpened, cause: BaseException | None) -> None:
        refusal.__cause__ = cause
        self.opened.set_exception(refusal)
        self.opened.exception()  # it is known, also if every call has left

    def _end(self) -> None:
        self._closing.set()
        self._thread_closing.set()

    async def close(self) -> None:
        self.give_up("the runtime is closing")
        self._end()
        await asyncio.wait([self._task])


def run_in_thread(work: Callable[[], Any], name: str) -> asyncio.Future[Any]:
    """Run work in a daemon thread of its own, with the variables of the caller."""
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[Any] = loop.create_future()

    def note(result: Any, error: BaseException | None) -> None:
        if ended.done():
            return
        if error is None:
            ended.set_result(result)
        else:
            ended.set_exception(error)

    def run() -> None:
        try:
            result = work()
        except BaseException as error:
            loop.call_soon_threadsafe(note, None, error)
        else:
            loop.call_soon_threadsafe(note, result, None)

    try:
        threading.Thread(target=copy_context().run, args=(run,), name=name, daemon=True).start()
    except RuntimeError as error:
        raise Failure("SPAWN_FAILED", f"the machine would not start another thread: {error}") from None
    return ended
