"""A mixture of everything, for a while: nothing may pile up.

`make test` has a short run of it, `make soak` a long one.
"""

import asyncio
import os
import random
import signal
import threading
from pathlib import Path
from typing import Any

import psutil
import pytest

from shotclock import Clocks, Operation, Runtime
from tests.calls import work
from tests.calls.bounds import ROOT, run

pytestmark = pytest.mark.usefixtures("no_survivors")

HANGING = [
    work.sleeps,
    work.spins,
    work.swallows_everything,
    work.blocks_in_finally,
    work.daemonises,
    work.stops_itself,
    work.has_a_child_that_ignores_term,
]
CLOCKS = Clocks.of(timeout="300ms", grace="100ms")
AT_ONCE = 6


def quick(number: int) -> int:
    return number


async def hangs(folder: str) -> None:
    await asyncio.sleep(600)


async def one(runtime: Runtime, dice: random.Random, folder: Path, chaos: bool = False) -> None:
    """Any call at all, and whether its answer is the right one. In chaos, "my supervisor was killed" is one as well."""
    lost = ("SUPERVISOR_LOST",) if chaos else ()
    arguments = {"folder": str(folder)}
    match dice.randrange(5):
        case 0:
            envelope = await runtime.call(Operation("quick", quick), {"number": 7}, Clocks.of("20s"))
            assert envelope.value == 7 or envelope.code in lost, envelope
        case 1:
            envelope = await runtime.call(Operation("hangs", hangs, isolation="shared"), arguments, CLOCKS)
            assert (envelope.code, envelope.ending) == ("TIMEOUT", "cancelled"), envelope
        case 2:
            command = ["bash", "-c", "setsid sleep 600 & trap '' TERM; sleep 600"]
            envelope = await runtime.run(command, CLOCKS)
            assert envelope.code in ("TIMEOUT", *lost), envelope
        case 3:
            envelope = await runtime.run(["echo", "hello"], Clocks.of("20s"))
            said = {"stdout": "hello\n", "stderr": "", "exit_code": 0}
            assert envelope.data == said or envelope.code in lost, envelope
        case _:
            handler = dice.choice(HANGING)
            envelope = await runtime.call(Operation(handler.__name__, handler), arguments, CLOCKS)
            assert envelope.code in ("TIMEOUT", *lost), envelope
    assert envelope.meta["survivors"] == [], envelope


async def soak(seconds: float, folder: Path, seed: int, *, kill_zygotes: bool = False) -> None:
    dice = random.Random(seed)
    async with Runtime(preload=["tests.calls.work", __name__], workers=2) as runtime:
        assert await runtime.warm_up()
        await asyncio.gather(*[one(runtime, dice, folder) for _ in range(AT_ONCE)])
        before = footprint()
        give_up_at = asyncio.get_running_loop().time() + seconds
        rounds = 0
        while asyncio.get_running_loop().time() < give_up_at:
            answers = [asyncio.ensure_future(one(runtime, dice, folder, kill_zygotes)) for _ in range(AT_ONCE)]
            if kill_zygotes and rounds % 5 == 4:
                kill_one_of_ours(dice)
            await asyncio.gather(*answers)
            rounds += 1
        envelope = await runtime.call(Operation("quick", quick), {"number": 1}, Clocks.of("20s"))
        assert envelope.value == 1, envelope
        assert rounds > 1
        assert runtime.orphans == []
        after = footprint()
        # The pool may have grown by the workers it keeps for a while; four descriptors each.
        assert after["descriptors"] <= before["descriptors"] + 64, (before, after)
        assert after["threads"] <= before["threads"] + 2, (before, after)


def footprint() -> dict[str, int]:
    return {"descriptors": len(os.listdir("/proc/self/fd")), "threads": threading.active_count()}


def kill_one_of_ours(dice: random.Random) -> None:
    """SIGKILL to a zygote, as the out-of-memory killer would."""
    ours: list[Any] = [p for p in psutil.Process().children(recursive=True) if p.name() == "clock-zygote"]
    if ours:
        dice.choice(ours).send_signal(signal.SIGKILL)


@pytest.mark.slow
def test_a_few_seconds_of_everything_leave_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    run(soak(3, tmp_path, seed=1), within=60)


@pytest.mark.soak
@pytest.mark.timeout(300)
@pytest.mark.parametrize("seed", range(4))
def test_minutes_of_everything_leave_nothing_behind(seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    run(soak(60, tmp_path, seed=seed), within=200)


@pytest.mark.soak
@pytest.mark.timeout(300)
def test_chaos_among_our_own_processes_loses_no_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    run(soak(60, tmp_path, seed=9, kill_zygotes=True), within=200)
