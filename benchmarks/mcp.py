"""What a tool call over MCP costs that does nothing, and one that hangs, against FastMCP: same client and transport."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable

from mcp import Client, StdioServerParameters

from .isolated import ROOT
from .rounds import Size, find_peer, take_turns
from .table import Bar, Row, Table, absolute, compared

LIMIT_S = 300
TITLE = "MCP tool call"
NOTE = (
    "Time per call, one after the other, with the SDK's own client and each server in a process of its own. FastMCP "
    "runs tools inside the process that speaks the protocol; ours speaks only, async tools run in a second process, "
    "sync ones in a third. *2026* is protocol revision 2026-07-28, *2025* a client that begins with a handshake. "
    "*Hanging sync tool*: it sleeps 3 s and has a timeout of 1 s on both sides; the figure is when the answer came. "
    "*A model reads*: the content and structured content of one result, as the JSON that a client receives, without "
    "metadata."
)
TOOLS = {"async no-op": "noop_async", "sync no-op": "noop"}
ERAS = {"2026": "auto", "2025": "legacy"}
# An answer that takes longer will not come.
NO_ANSWER_S = 10.0
# Interpreters, the SDK and the apps come up.
STARTED_WITHIN_S = 30.0
GONE_WITHIN_S = 5.0

OURS = [sys.executable, "-m", "shotclock", "serve", "benchmarks.mcp_app:app"]
THEIRS = [sys.executable, "-m", "benchmarks.mcp_peer"]
NAME, PEER = ("FastMCP", THEIRS) if find_peer("fastmcp") else ("itself", OURS)
ENVIRONMENT = {**os.environ, "FASTMCP_CHECK_FOR_UPDATES": "off"}


@contextlib.asynccontextmanager
async def over_stdio(argv: list[str], mode: str) -> AsyncIterator[Client]:
    parameters = StdioServerParameters(command=argv[0], args=argv[1:], env=ENVIRONMENT, cwd=ROOT)
    async with Client(parameters, mode=mode, read_timeout_seconds=NO_ANSWER_S) as client:
        yield client


@contextlib.asynccontextmanager
async def over_http(argv: list[str], mode: str) -> AsyncIterator[Client]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    address = ["--http", f"127.0.0.1:{port}"] if argv is OURS else [str(port)]
    server = subprocess.Popen([*argv, *address], cwd=ROOT, env=ENVIRONMENT, stderr=subprocess.DEVNULL)
    try:
        await until_listening(port)
        async with Client(f"http://127.0.0.1:{port}/mcp", mode=mode, read_timeout_seconds=NO_ANSWER_S) as client:
            yield client
    finally:
        server.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            server.wait(GONE_WITHIN_S)
        server.kill()


async def until_listening(port: int) -> None:
    give_up_at = time.monotonic() + STARTED_WITHIN_S
    while time.monotonic() < give_up_at:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
            return
        await asyncio.sleep(0.05)
    raise TimeoutError(f"nobody listens on port {port}")


def calls(client: Client, tool: str, count: int) -> Callable[[], object]:
    async def some() -> float:
        began = time.perf_counter()
        for _ in range(count):
            await client.call_tool(tool, {"a": 1})
        return (time.perf_counter() - began) / count * 1e6

    return some


async def compare(transport: str, era: str, rounds: int, count: int) -> list[Row]:
    connect = over_stdio if transport == "stdio" else over_http
    rows = []
    async with connect(OURS, ERAS[era]) as ours, connect(PEER, ERAS[era]) as peer:
        for what, tool in TOOLS.items():
            sides = {"ours": calls(ours, tool, count), "peer": calls(peer, tool, count)}
            figure = await take_turns(sides, rounds)  # type: ignore[arg-type]
            name, shown, ratio = f"{what}, {transport}, {era}", "{:.0f} µs", figure.ratio("ours", "peer")
            rows.append(compared(name, figure["ours"], NAME, figure["peer"], shown, Bar(0.95), ratio=ratio))
    return rows


async def hanging() -> Row:
    taken = {}
    for name, argv in {"ours": OURS, "peer": PEER}.items():
        async with over_stdio(argv, "auto") as client:
            await client.call_tool("noop", {"a": 1})
            began = time.perf_counter()
            await client.call_tool("hang", {})
            taken[name] = time.perf_counter() - began
    return absolute(
        "hanging sync tool, timeout 1 s", taken["ours"], "{:.2f} s", Bar(1.1, "s"), f"{NAME} {taken['peer']:.2f} s"
    )


async def bytes_read() -> Row:
    read = {}
    for name, argv in {"ours": OURS, "peer": PEER}.items():
        async with over_stdio(argv, "auto") as client:
            result = await client.call_tool("noop", {"a": 1})
            shown = {"content", "structured_content"}
            read[name] = len(result.model_dump_json(include=shown, by_alias=True, exclude_none=True))
    return compared("bytes a model reads per call", read["ours"], NAME, read["peer"], "{:.0f}", Bar(1.0))


async def _measure(rounds: int, count: int, ways: list[tuple[str, str]]) -> Table:
    rows = []
    for transport, era in ways:
        rows += await compare(transport, era, rounds, count)
    rows += [await bytes_read(), await hanging()]
    return Table(TITLE, NOTE, rows)


def measure(size: Size) -> Table:
    ways = [(transport, era) for transport in ("stdio", "http") for era in ERAS]
    return asyncio.run(_measure(*size.of((27, 20, ways), (8, 15, ways), (1, 1, ways[-1:]))))
