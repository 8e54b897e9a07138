"""What a task waits for that is resumed where its answer comes in: to asyncio it must be as good as a future."""

import asyncio
import contextvars
import time
from collections.abc import Coroutine
from typing import Any

import pytest

from shotclock import Clocks, Operation, Runtime
from shotclock.runtime.asyncio_private import Waiter

SOON_S = 10.0  # nothing here takes longer than a few turns of a loop

place = contextvars.ContextVar("place", default="nowhere")


def run(main: Coroutine[Any, Any, Any]) -> Any:
    async def bounded() -> Any:
        async with asyncio.timeout(SOON_S):
            return await main

    return asyncio.run(bounded())


async def waiting(waiter: Waiter[int], told: list[object]) -> int:
    place.set("inside")
    answer = await waiter
    told.append((answer, place.get(), asyncio.current_task()))
    return answer


def test_the_answer_resumes_the_task_before_set_result_returns():
    async def main() -> None:
        loop = asyncio.get_running_loop()
        waiter, told = Waiter[int](loop), []
        task = loop.create_task(waiting(waiter, told))
        await asyncio.sleep(0)
        seen: list[object] = []
        loop.call_soon(lambda: (waiter.set_result(1), seen.append(list(told))))
        assert await task == 1
        assert seen == [[(1, "inside", task)]], "in its own context, as its own task, and at once"
        assert place.get() == "nowhere"

    run(main())


def test_in_the_middle_of_another_task_it_is_put_off_to_the_next_turn():
    async def main() -> None:
        waiter, told = Waiter[int](asyncio.get_running_loop()), []
        task = asyncio.create_task(waiting(waiter, told))
        await asyncio.sleep(0)
        waiter.set_result(1)
        assert told == [], "two tasks of one loop never run inside each other"
        assert await task == 1

    run(main())


def test_an_answer_that_is_there_already_is_not_waited_for():
    async def main() -> None:
        waiter = Waiter[int](asyncio.get_running_loop())
        waiter.set_result(7)
        work = waiting(waiter, [])
        with pytest.raises(StopIteration) as ended:
            work.send(None)
        assert ended.value.value == 7

    run(main())


def test_a_cancelled_task_leaves_it_and_a_later_answer_finds_nobody():
    async def main() -> None:
        waiter, told = Waiter[int](asyncio.get_running_loop()), []
        task = asyncio.create_task(waiting(waiter, told))
        await asyncio.sleep(0)
        assert task.cancel()
        assert waiter.done()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert told == []
        assert not waiter.cancel(), "once is enough"

    run(main())


def test_a_task_cancelled_between_its_answer_and_its_turn_is_cancelled():
    async def main() -> None:
        waiter, told = Waiter[int](asyncio.get_running_loop()), []
        task = asyncio.create_task(waiting(waiter, told))
        await asyncio.sleep(0)
        waiter.set_result(1)  # put off, because we are a task
        assert task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert told == []

    run(main())


def test_a_timeout_around_it_fires():
    async def main() -> None:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await Waiter[int](asyncio.get_running_loop())

    run(main())


def test_what_the_resumed_task_raises_is_its_own():
    async def main() -> None:
        loop = asyncio.get_running_loop()
        waiter = Waiter[int](loop)

        async def fails() -> None:
            await waiter
            raise ValueError("mine")

        task = loop.create_task(fails())
        await asyncio.sleep(0)
        went_on: list[bool] = []
        loop.call_soon(lambda: (waiter.set_result(1), went_on.append(True)))
        with pytest.raises(ValueError, match="mine"):
            await task
        assert went_on == [True]

    run(main())


def test_an_answer_after_the_cancellation_is_nobodys():
    async def main() -> None:
        waiter, told = Waiter[int](asyncio.get_running_loop()), []
        task = asyncio.create_task(waiting(waiter, told))
        await asyncio.sleep(0)
        task.cancel()
        waiter.set_result(1)
        with pytest.raises(asyncio.CancelledError):
            await task
        assert told == []

    run(main())


async def soon_done() -> int:
    await asyncio.sleep(0.01)
    return 1


def test_a_call_cancelled_when_its_result_is_on_the_way_does_not_wait_for_another():
    async def main() -> float:
        loop = asyncio.get_running_loop()
        async with Runtime() as runtime:
            call = loop.create_task(runtime.call(Operation("soon_done", soon_done), {}, Clocks.of("10s", grace="5s")))
            await asyncio.sleep(0)
            await asyncio.sleep(0.001)
            time.sleep(0.2)  # its result has come in by now, and nobody has looked
            call.cancel()
            began = loop.time()
            await asyncio.wait([call], timeout=SOON_S)
            assert call.cancelled()
            return loop.time() - began

    # With nothing left to wait for, only a lost result would run out the grace.
    assert run(main()) < 1
