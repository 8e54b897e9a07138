"""The private parts of asyncio that we use: all of them, each with the bar (docs/benchmarks.md) that needs it.

Waiter: `_asyncio_future_blocking`
    10,000 deadlines that fire together, p99 at most 2.2 times asyncio's: 3.1 times with its own Future.
start_at_once, on Python 3.11: a swapped `call_soon`, `_leave_task`, `_enter_task`
    The guard on a shared loop at most 2 times `asyncio.timeout`: 2.1 to 7.8 times with `create_task`.
    The whole call there at most 8 times: 5 to 21 times with it.
running_loop: `_get_running_loop`
    The same guard on a loop of its own: where there is no loop, the public function raises, for each call.
be_silent_about: `_log_destroy_pending`
    No bar: what was abandoned and answered for long ago is no news for stderr.
"""

from __future__ import annotations

import asyncio
import contextvars
import sys
from collections.abc import Callable, Coroutine, Generator
from typing import Any, Generic, TypeVar

running_loop = asyncio._get_running_loop

T = TypeVar("T")


class Waiter(Generic[T]):
    """Future of one task. The answer resumes it right where it comes in: asyncio's would put it off to the next turn of
    the loop, which costs a handle more, and where ten thousand are answered, ten thousand.

    All of it happens on the task's own loop. To asyncio it is a future of somebody else's making.
    """

    __slots__ = ("_answer", "_asyncio_future_blocking", "_context", "_is_cancelled", "_is_done", "_loop", "_resume")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._asyncio_future_blocking = False
        self._is_done = False
        self._is_cancelled = False
        self._resume: Callable[[Waiter[T]], object] | None = None

    def __await__(self) -> Generator[Any, Any, T]:
        return self  # type: ignore[return-value]  # an iterator is enough, and an object less than a generator

    def __iter__(self) -> Waiter[T]:
        return self

    def __next__(self) -> Waiter[T]:
        """Do what an awaiting coroutine asks: the first time it is told to wait for us, the second time it has us."""
        if self._is_done:
            raise StopIteration(self.result())
        self._asyncio_future_blocking = True
        return self

    def get_loop(self) -> asyncio.AbstractEventLoop:
        return self._loop

    def add_done_callback(self, resume: Callable[[Waiter[T]], object], *, context: contextvars.Context) -> None:
        """Keep the task's callback. It is added when the task begins to wait: there is one, and it was not done when
        asked."""
        self._resume, self._context = resume, context

    def done(self) -> bool:
        return self._is_done

    def result(self) -> T:
        if self._is_cancelled:
            raise asyncio.CancelledError
        return self._answer

    def set_result(self, answer: T) -> None:
        if self._is_done:  # nobody waits any more
            return
        self._answer = answer
        self._is_done = True
        resume = self._resume
        if resume is None:
            return
        if asyncio.current_task(self._loop) is None:
            self._resume = None
            self._context.run(resume, self)
        else:  # in the middle of somebody else's step
            self._resume_later()

    def cancel(self, msg: object = None) -> bool:
        if self._is_done:
            return False
        self._is_done = self._is_cancelled = True
        self._resume_later()
        return True

    def _resume_later(self) -> None:
        resume, self._resume = self._resume, None
        if resume is not None:
            self._loop.call_soon(resume, self, context=self._context)


def start_at_once(
    work: Coroutine[Any, Any, None], loop: asyncio.AbstractEventLoop, context: contextvars.Context
) -> asyncio.Task[None]:
    """Return a task that has come to where it first waits: a short one costs no turn of the loop."""
    if sys.version_info >= (3, 12):
        return asyncio.Task(work, loop=loop, context=context, eager_start=True)
    if type(loop) is not asyncio.SelectorEventLoop or "call_soon" in vars(loop):
        return loop.create_task(work, context=context)  # somebody's own loop: not before its next turn
    caught: list[Any] = []
    # What a new task asks of its loop is its first step. Other threads use call_soon_threadsafe and are not caught.
    loop.call_soon = lambda *asked, **more: caught.append((asked, more))  # type: ignore[assignment, method-assign]
    try:
        task = asyncio.Task(work, loop=loop, context=context)
    finally:
        del loop.call_soon
    *others, ((first_step,), _) = caught
    for asked, more in others:  # of a destructor that the garbage collector came to meanwhile
        loop.call_soon(*asked, **more)
    outer = asyncio.current_task(loop)
    if outer is not None:
        asyncio.tasks._leave_task(loop, outer)
    try:
        context.run(first_step)
    finally:
        if outer is not None:
            asyncio.tasks._enter_task(loop, outer)
    return task


def be_silent_about(task: asyncio.Task[Any]) -> None:
    """Let a task that is never going to end go without a complaint on stderr."""
    task._log_destroy_pending = False  # type: ignore[attr-defined]
