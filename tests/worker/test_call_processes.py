"""Processes that a call starts where it shares its process with others: they end with it, or it says that they live."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from shotclock import Clocks, Envelope, Operation, Runtime
from tests.calls import guests
from tests.calls.bounds import mark_of, marked, run, soon
from tests.calls.work import FOREVER_S
from tests.rows import corners

pytestmark = [pytest.mark.usefixtures("no_survivors"), pytest.mark.slow]

CLOCKS = Clocks.of("1s", grace="400ms")
PLACES = ["shared", "inline"]
everywhere = pytest.mark.parametrize("where", PLACES)


@asynccontextmanager
async def a_runtime(where: Any) -> AsyncIterator[Runtime]:
    async with Runtime(preload=["tests.calls.guests"], workers=1) as runtime:
        noop = await runtime.call(op("noop", where), clocks=Clocks.of("40s"))  # whatever its imports take
        assert noop.value == 1
        yield runtime


def op(name: str, where: Any) -> Operation:
    return Operation(name, getattr(guests, name), isolation=where)


@everywhere
@pytest.mark.parametrize(
    "adversary",
    corners(
        [
            "waits_for_a_child",
            "waits_beside_an_orphan",
            "waits_for_one_that_ignores_term",
            "waits_for_one_without_a_main_thread",
            "starts_one_in_a_thread",
            "starts_one_in_an_executor",
        ],
        "waits_beside_an_orphan",
        "waits_for_one_that_ignores_term",
        "starts_one_in_an_executor",
    ),
)
def test_what_a_call_started_is_gone_when_its_time_is_up(where: Any, adversary: str, tmp_path: Path) -> None:
    async def scenario() -> Envelope:
        async with a_runtime(where) as runtime:
            envelope = await runtime.call(op(adversary, where), {"folder": str(tmp_path)}, CLOCKS)
            assert (tmp_path / "ready").exists()
            (tmp_path / "ready").unlink()  # of the host, which lives on
            assert not marked(tmp_path), envelope
            assert (await runtime.call(op("noop", where), clocks=CLOCKS)).value == 1
            return envelope

    envelope = run(scenario(), within=60)
    assert (envelope.code, envelope.meta["survivors"]) == ("TIMEOUT", [])
    assert envelope.ending == "cancelled"


@everywhere
def test_what_a_call_started_is_gone_when_its_caller_leaves(where: Any, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with a_runtime(where) as runtime:
            long = Clocks.of("30s", grace="400ms")
            calling = asyncio.ensure_future(
                runtime.call(op("waits_beside_an_orphan", where), {"folder": str(tmp_path)}, long)
            )
            await soon(lambda: mark_of(tmp_path, "ready"), within=20)
            calling.cancel()
            with pytest.raises(asyncio.CancelledError):
                await calling
            (tmp_path / "ready").unlink()
            assert not marked(tmp_path)

    run(scenario(), within=60)


@everywhere
def test_only_the_processes_of_the_call_that_ends_are_stopped(where: Any, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with a_runtime(where) as runtime:
            folders = [tmp_path / "short", tmp_path / "long"]
            for folder in folders:
                folder.mkdir()
            long = asyncio.ensure_future(
                runtime.call(
                    op("waits_beside_an_orphan", where), {"folder": str(folders[1])}, Clocks.of("30s", grace="0ms")
                )
            )
            await soon(lambda: mark_of(folders[1], "ready"), within=20)
            short = await runtime.call(op("waits_beside_an_orphan", where), {"folder": str(folders[0])}, CLOCKS)
            assert short.code == "TIMEOUT"
            for folder in folders:
                (folder / "ready").unlink()
            assert not marked(folders[0])
            assert marked(folders[1]), "its neighbour's lives on"
            long.cancel()
            await asyncio.wait([long])
            assert not marked(folders[1])

    run(scenario(), within=60)


@everywhere
def test_a_process_in_the_group_of_its_host_is_killed_without_the_host(where: Any, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with a_runtime(where) as runtime:
            nap = asyncio.ensure_future(runtime.call(op("naps", where), {"ms": 4000}, Clocks.of("30s")))
            arguments = {"folder": str(tmp_path), "has_own_session": False}
            envelope = await runtime.call(op("waits_for_one_that_ignores_term", where), arguments, CLOCKS)
            (tmp_path / "ready").unlink()
            assert (envelope.code, envelope.meta["survivors"], marked(tmp_path)) == ("TIMEOUT", [], {})
            neighbour = await nap
            assert neighbour.ok, neighbour

    run(scenario(), within=60)


@everywhere
def test_what_a_call_keeps_running_for_those_after_it_is_named(where: Any, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with a_runtime(where) as runtime:
            envelope = await runtime.call(op("leaves_a_child", where), {"folder": str(tmp_path)}, CLOCKS)
            assert envelope.ok and [process["pid"] for process in envelope.meta["survivors"]] == [envelope.value]
            os.kill(envelope.value, signal.SIGKILL)
            with suppress(ChildProcessError):  # the host's, or collected already
                os.waitpid(envelope.value, 0)

    run(scenario(), within=60)


@pytest.mark.parametrize("where", ["inline"])
def test_what_an_abandoned_call_started_is_gone_and_what_it_starts_later_does_not_live(
    where: Any, tmp_path: Path
) -> None:
    async def scenario() -> Envelope:
        async with a_runtime(where) as runtime:
            nap = asyncio.ensure_future(runtime.call(op("naps", where), {"ms": 4000}, Clocks.of("30s")))
            envelope = await runtime.call(op("swallows_beside_a_child", where), {"folder": str(tmp_path)}, CLOCKS)
            (tmp_path / "ready").unlink()
            assert not marked(tmp_path), envelope
            await soon((tmp_path / "another").exists)
            await soon(lambda: not marked(tmp_path), within=1)
            await nap
            return envelope

    envelope = run(scenario(), within=60)
    assert (envelope.code, envelope.ending, envelope.meta["survivors"]) == ("TIMEOUT", "abandoned", [])


def test_a_runtime_that_a_handler_was_the_first_to_need_lives_on(tmp_path: Path) -> None:
    """Its own processes are started inside of the call, and are nobody's."""

    async def scenario() -> None:
        async with Runtime(operations=[Operation("noop", guests.operations.noop)]) as runtime:

            async def calls(ctx: Any) -> str:
                await ctx.call("noop")
                await asyncio.sleep(FOREVER_S)
                return "never"

            assert (
                await runtime.call(Operation("calls", calls, isolation="inline"), clocks=Clocks.of("4s", grace="0ms"))
            ).code == "TIMEOUT"
            assert (await runtime.call("noop", clocks=Clocks.of("4s"))).value == 1
            assert (await runtime.run(["true"], Clocks.of("4s"))).ok

    run(scenario(), within=60)


def test_processes_that_are_no_calls_are_left_alone(tmp_path: Path) -> None:
    async def scenario() -> None:
        with subprocess.Popen([sys.executable, "-c", f"import time; time.sleep({FOREVER_S})"]) as own:
            async with a_runtime("inline") as runtime:
                await runtime.call(
                    op("waits_for_a_child", "inline"), {"folder": str(tmp_path)}, Clocks.of("500ms", grace="0ms")
                )
            assert own.poll() is None
            own.kill()

    run(scenario(), within=60)
