"""Async commands run where they can be killed: whatever they do to their loop, it is their own and ends with them."""

import asyncio
import os
import time
from pathlib import Path
from typing import Any

import pytest

from shotclock import App, Context
from shotclock.core.envelope import Envelope
from tests.processes import is_running

from .conftest import wait_for

pytestmark = [pytest.mark.usefixtures("no_survivors"), pytest.mark.slow]

app = App("awaits", default_timeout="10s", grace="3s")


@app.command(timeout="2s")
async def cleans_up(path: Path, blocks: bool = False) -> None:
    try:
        if blocks:
            time.sleep(60)
        await asyncio.sleep(60)
    finally:
        if not blocks:
            await asyncio.sleep(0.05)
        path.write_text("clean")


@app.command(timeout="20s")
async def blocks_for(seconds: float) -> str:
    time.sleep(seconds)
    return "done"


@app.command(timeout="2s", mutates=False)
async def answers() -> int:
    return 1


@app.command(timeout="50s", mutates=False)
async def naps(seconds: float) -> int:
    await asyncio.sleep(seconds)
    return os.getpid()


@app.command(mutates=False)
async def calls_twice(ctx: Context, seconds: float) -> list[str | None]:
    calls = [ctx.call("naps", {"seconds": seconds}) for _ in range(2)]
    return [envelope.code for envelope in await asyncio.gather(*calls)]


@app.command(mutates=False)
async def gives_up_a_call(ctx: Context, path: Path) -> str:
    try:
        await asyncio.wait_for(ctx.call("writes-late", {"path": str(path)}), 0.5)
    except TimeoutError:
        return "given up"
    return "answered"


@app.command
async def writes_late(path: Path) -> None:
    await asyncio.sleep(1.5)
    path.write_text("late")


@app.command(mutates=False)
async def own_loop() -> tuple[int, int]:
    return os.getpid(), id(asyncio.get_running_loop())


@app.command(mutates=False)
async def leaves_a_task_that_will_not_go() -> int:
    async def stays() -> None:
        while True:
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                pass

    asyncio.get_running_loop().kept = asyncio.create_task(stays())  # type: ignore[attr-defined]
    await asyncio.sleep(0)
    return os.getpid()


def run(scenario: Any) -> Any:
    return asyncio.run(asyncio.wait_for(scenario, 60))


async def warmed_up() -> None:
    """A worker is there, whatever its imports take on this machine: the clocks of the test are for the command."""
    assert (await app.call_with("answers", {}, timeout="40s")).ok


def call(command: str, **arguments: object) -> Envelope:
    async def scenario() -> Envelope:
        async with app:
            await warmed_up()
            return await app.call(command, **arguments)

    return run(scenario())  # type: ignore[no-any-return]


@pytest.mark.parametrize("blocks", [False, True], ids=["awaiting", "blocking"])
def test_an_async_command_whose_time_is_up_cleans_up_within_its_grace(blocks: bool, tmp_path: Path) -> None:
    envelope = call("cleans-up", path=tmp_path / "said", blocks=blocks)
    assert (envelope.code, envelope.ending) == ("TIMEOUT", "killed")
    assert (tmp_path / "said").read_text() == "clean"
    assert envelope.meta["duration_ms"] < 3900, "it did not need its whole grace"


def test_a_command_that_blocks_its_loop_lives_until_its_own_bell_and_its_neighbours_run_elsewhere() -> None:
    async def scenario() -> list[Envelope]:
        async with app:
            await warmed_up()
            blocked = asyncio.ensure_future(app.call("blocks-for", seconds=3))
            naps = [asyncio.ensure_future(app.call("naps", seconds=2.5)) for _ in range(10)]
            await asyncio.sleep(0.5)
            quick = await app.call("answers")
            assert not blocked.done()
            return [quick, await blocked, *await asyncio.gather(*naps)]

    quick, blocked, *naps = run(scenario())
    assert quick.value == 1
    assert blocked.value == "done"
    assert all(nap.ok for nap in naps), [nap.error for nap in naps]
    assert len({nap.value for nap in naps}) == 10, "each in a process of its own"


def test_twenty_commands_that_wait_do_so_at_the_same_time() -> None:
    async def scenario() -> list[Envelope]:
        async with app:
            return await asyncio.gather(*[app.call("naps", seconds=3) for _ in range(20)])

    envelopes = run(scenario())
    assert all(envelope.ok for envelope in envelopes), {envelope.code for envelope in envelopes}
    assert len({envelope.value for envelope in envelopes}) > 10, "few had to wait for the end of another"


def test_calls_made_by_an_async_command_run_beside_each_other() -> None:
    envelope = call("calls-twice", seconds=2)
    assert envelope.value == [None, None]
    assert envelope.meta["duration_ms"] < 3800


def test_a_call_that_an_async_command_no_longer_waits_for_is_stopped(tmp_path: Path) -> None:
    envelope = call("gives-up-a-call", path=tmp_path / "said")
    assert envelope.value == "given up"
    time.sleep(1.5)  # when it would have written
    assert not (tmp_path / "said").exists()


def test_async_calls_of_one_worker_share_a_loop_so_that_what_is_open_on_it_stays_of_use() -> None:
    async def scenario() -> list[tuple[int, int]]:
        async with app:
            return [tuple((await app.call("own-loop")).value) for _ in range(6)]

    seen = set(run(scenario()))
    assert len({pid for pid, _ in seen}) == len(seen), seen


def test_a_task_that_will_not_go_takes_its_worker_with_it_and_nobodys_call() -> None:
    async def scenario() -> list[int]:
        async with app:
            pids = [(await app.call("leaves-a-task-that-will-not-go")).value for _ in range(4)]
            wait_for(lambda: not any(is_running(pid) for pid in pids), "the workers to be gone", within_s=5)
            return pids

    pids = run(scenario())
    assert len(set(pids)) == 4
