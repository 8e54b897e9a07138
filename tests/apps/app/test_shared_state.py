"""State in the shared process: concurrent calls of a command agree."""

from __future__ import annotations

import asyncio

from shotclock import App

app = App("counting")
counted = 0


@app.command(isolation="shared")
async def count() -> int:
    global counted
    before = counted
    counted = before + 1
    await asyncio.sleep(0)
    return before + 1


def test_200_concurrent_calls_of_a_counter_agree() -> None:
    async def scenario() -> None:
        async with app:
            answers = await asyncio.gather(*(app.call("count") for _ in range(200)))
            assert sorted(answer.value for answer in answers) == list(range(1, 201))

    asyncio.run(asyncio.wait_for(scenario(), 60))
