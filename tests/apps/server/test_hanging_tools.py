"""Tools that hang in every way of the list, called by a real client over each transport and protocol generation."""

import asyncio
import contextlib
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from mcp import Client

from tests.apps.server.client import (
    LATE_S,
    LEGACY,
    MODERN,
    SOME_TRANSPORTS,
    connected,
    envelope_of,
    http_server,
    run,
    timed,
)
from tests.calls import work
from tests.calls.bounds import marked, soon
from tests.rows import corners

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("no_survivors")]

TIMEOUT_S = 0.3
ASYNC_HANGING = ["blocks-the-loop", "holds-the-gil-on-the-loop", "swallows-cancellation"]
# The first transport has all of them, the others those that outwit a simpler server.
ADVERSARIES = [function.__name__.replace("_", "-") for function in work.HANGING] + ASYNC_HANGING
MET_BY_ALL = ["holds-the-gil", "swallows-everything", "daemonises-without-a-trace", "writes-for-ever", *ASYNC_HANGING]
CRASHING = ["exits", "segfaults", "segfaults-on-the-loop"]

# What the server may have beyond its first processes while it is idle: the warm workers with their supervisors.
PROCESSES_CAP = 4
THREADS_CAP = 4


@pytest.mark.timeout(180)
@pytest.mark.parametrize(("transport", "mode"), SOME_TRANSPORTS)
def test_every_hanging_tool_is_answered_on_time_and_the_next_call_works(
    transport: str, mode: str, tmp_path: Path, validate_envelope: Callable[[Any], Any]
) -> None:
    async def scenario() -> list[str]:
        wrong = []
        async with connected(transport, mode) as (client, _):
            for tool in ADVERSARIES if transport == "stdio" else MET_BY_ALL:
                folder = tmp_path / tool
                folder.mkdir()
                envelope, took_s = await timed(envelope_of(client, tool, {"folder": str(folder)}))
                validate_envelope(envelope)
                if (envelope["error"] or {}).get("code") != "TIMEOUT" or took_s > TIMEOUT_S + LATE_S:
                    wrong.append(f"{tool}: {envelope['error']} after {took_s:.2f} s")
                following = await envelope_of(client, "noop", {"a": 7})
                if following["data"] != {"result": 7}:
                    wrong.append(f"after {tool}: {following}")
                await soon(lambda folder=folder: not marked(folder))
        return wrong

    wrong = run(scenario(), within=150)
    assert not wrong, "\n".join(wrong)


def test_a_tool_that_blocks_the_shared_loop_is_replaced_at_the_limit_of_a_neighbour() -> None:
    async def scenario() -> None:
        async with connected() as (client, _):
            blocking = asyncio.ensure_future(envelope_of(client, "blocks-others-for", {"seconds": 12}))
            await asyncio.sleep(0.5)
            meta = {"shotclock.dev/timeoutMs": 1000}
            neighbour, took_s = await timed(envelope_of(client, "remembers", {"what": "a"}, meta=meta))
            assert neighbour["error"]["code"] == "TIMEOUT" and neighbour["meta"]["ending"] == "not_started", neighbour
            assert took_s < LATE_S
            replaced = await blocking
            assert replaced["error"]["code"] == "HOST_REPLACED" and replaced["meta"]["survivors"] == [], replaced
            assert (await envelope_of(client, "remembers", {"what": "b"}))["ok"]

    run(scenario())


@pytest.mark.parametrize("tool", CRASHING)
def test_a_tool_that_crashes_its_process_is_answered_and_the_next_call_works(tool: str) -> None:
    async def scenario() -> None:
        async with connected() as (client, _):
            envelope, took_s = await timed(envelope_of(client, tool))
            assert envelope["error"]["code"] in ("WORKER_CRASHED", "HOST_LOST"), envelope
            assert took_s < LATE_S
            for following in ("noop", "noop-async"):
                assert (await envelope_of(client, following))["ok"]

    run(scenario())


# --- many -----------------------------------------------------------------------------------------


async def noop_s(client: Any) -> float:
    """What a no-op takes, in the middle of twenty."""
    taken = [(await timed(client.call_tool("noop", {"a": 1})))[1] for _ in range(20)]
    return statistics.median(taken)


def footprint(server: psutil.Process) -> tuple[int, int]:
    return len(server.children(recursive=True)), server.num_threads()


async def hang(client: Any, tool: str, folder: Path, timeout_ms: int) -> str | None:
    """What was wrong with the answer, if anything."""
    meta = {"shotclock.dev/timeoutMs": timeout_ms}
    envelope, took_s = await timed(envelope_of(client, tool, {"folder": str(folder)}, meta=meta))
    if (envelope["error"] or {}).get("code") != "TIMEOUT":
        return f"{tool}: {envelope}"
    return f"{tool}: answered after {took_s:.2f} s" if took_s > timeout_ms / 1000 + LATE_S else None


@pytest.mark.timeout(240)
@pytest.mark.parametrize("calls", [80, pytest.param(1000, marks=pytest.mark.soak)])
def test_hanging_calls_in_a_row_leave_the_server_as_it_was(calls: int, tmp_path: Path) -> None:
    tools = ["sleeps", "waits-in-recv", "waits-for-a-lock", "sleeps-async", "blocks-in-finally"]

    async def scenario() -> list[str]:
        async with connected() as (client, server):
            before_s, (processes, threads) = await noop_s(client), footprint(server)
            wrong: list[str] = []

            async def some(number: int) -> None:
                for position in range(calls // 4):
                    tool = tools[(number + position) % len(tools)]
                    if said := await hang(client, tool, tmp_path, timeout_ms=50):
                        wrong.append(said)

            await asyncio.gather(*(some(number) for number in range(4)))
            await settled(server, processes, threads)
            after_s = await noop_s(client)
            if after_s > max(5 * before_s, 0.5):
                wrong.append(f"a no-op took {before_s * 1000:.1f} ms before and {after_s * 1000:.1f} ms after")
            return wrong

    wrong = run(scenario(), within=220)
    assert not wrong, "\n".join(wrong[:10])


@pytest.mark.alone
@pytest.mark.timeout(120)
@pytest.mark.parametrize("tool", corners(["sleeps", "sleeps-async"], "sleeps"))
def test_two_hundred_calls_that_hang_at_once_are_each_answered_on_time(tool: str, tmp_path: Path) -> None:
    async def scenario() -> list[str]:
        async with connected() as (client, server):
            before_s, (processes, threads) = await noop_s(client), footprint(server)
            answers = await asyncio.gather(*(hang(client, tool, tmp_path, timeout_ms=2000) for _ in range(200)))
            wrong = [said for said in answers if said]
            await settled(server, processes, threads, within=30)
            after_s = await noop_s(client)
            if after_s > max(5 * before_s, 0.5):
                wrong.append(f"a no-op took {before_s * 1000:.1f} ms before and {after_s * 1000:.1f} ms after")
            return wrong

    wrong = run(scenario(), within=100)
    assert not wrong, "\n".join(wrong[:10])


@pytest.mark.soak
@pytest.mark.timeout(120)
@pytest.mark.parametrize("mode", [MODERN, LEGACY])
def test_two_hundred_that_hang_at_once_over_http_are_answered_on_time(mode: str, tmp_path: Path) -> None:
    """On the server's clock: a client in Python needs seconds for as many connections, whoever is on the other end."""

    async def scenario() -> None:
        meta = {"shotclock.dev/timeoutMs": 2000}
        with http_server() as (url, _):
            async with contextlib.AsyncExitStack() as stack:
                clients = [await stack.enter_async_context(Client(url, mode=mode)) for _ in range(4)]
                envelopes = await asyncio.gather(
                    *(
                        envelope_of(clients[number % 4], "sleeps", {"folder": str(tmp_path)}, meta=meta)
                        for number in range(200)
                    )
                )
                assert {envelope["error"]["code"] for envelope in envelopes} == {"TIMEOUT"}
                assert max(envelope["meta"]["duration_ms"] for envelope in envelopes) < 2000 + LATE_S * 1000
                assert (await envelope_of(clients[0], "noop", meta=meta))["ok"]

    run(scenario(), within=100)


def test_a_server_answers_while_others_hang(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with connected("stdio", MODERN) as (client, _):
            patient = [
                asyncio.ensure_future(client.call_tool(tool, {"folder": str(tmp_path)}))
                for tool in ["patient", "patient-async"] * 20
            ]
            for _ in range(10):
                envelope, took_s = await timed(envelope_of(client, "noop", meta={"shotclock.dev/timeoutMs": 5000}))
                assert envelope["ok"], envelope
                assert took_s < 5
            for call in patient:
                call.cancel()
            await asyncio.wait(patient, timeout=10)

    run(scenario())


async def settled(server: psutil.Process, processes: int, threads: int, within: float = 20) -> None:
    """Extra workers are let go after a while without work; until then they are idle, not left over."""

    def is_small_again() -> bool:
        now_processes, now_threads = footprint(server)
        return now_processes <= processes + PROCESSES_CAP and now_threads <= threads + THREADS_CAP

    await soon(is_small_again, within=within)
