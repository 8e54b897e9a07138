"""What `shotclock wrap` adds to a call of an MCP server, beside FastMCP's proxy."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from .isolated import ROOT
from .mcp import ENVIRONMENT, ERAS, calls, over_stdio
from .rounds import Size, find_peer, take_turns
from .table import Bar, Row, Table, absolute, compared

LIMIT_S = 300
TITLE = "MCP server behind a proxy"
NOTE = (
    "Time per call of a tool that does nothing, over stdio, of a server of the Python SDK: without a proxy (the peer), "
    "behind `shotclock wrap`, and behind FastMCP's proxy, which take turns. *SDK client* is the SDK's own; *raw "
    "client* writes and reads lines, so the call itself is as short as it can be. *Memory* is the resident memory of "
    "the process in front of the server after the calls, and at its peak with a result of 10 MB."
)
DIRECT = [sys.executable, "-m", "benchmarks.wrap_server"]
WRAPPED = [sys.executable, "-m", "shotclock", "wrap", "--", *DIRECT]
NAME, PROXIED = ("FastMCP's proxy", [*DIRECT, "proxy"]) if find_peer("fastmcp") else ("itself", WRAPPED)
LARGE = 10_000_000
# Writes a result of any size, without the SDK.
LARGE_SERVER = (
    "import sys\n"
    "for line in sys.stdin:\n"
    f'    print(\'{{"jsonrpc":"2.0","id":1,"result":"\' + \'x\' * {LARGE} + \'"}}\', flush=True)\n'
)
ENDED_WITHIN_S = 10


class RawClient:
    """A client that writes and reads lines."""

    def __init__(self, argv: list[str]) -> None:
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(
            argv, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, cwd=ROOT, env=ENVIRONMENT
        )
        self._number = 0

    def ask(self, method: str, params: dict[str, object]) -> bytes:
        assert self.process.stdin is not None and self.process.stdout is not None
        self._number += 1
        content = {"jsonrpc": "2.0", "id": self._number, "method": method, "params": params}
        self.process.stdin.write(json.dumps(content).encode() + b"\n")
        self.process.stdin.flush()
        return self.process.stdout.readline()

    def greet(self) -> None:
        info = {"name": "raw", "version": "1"}
        self.ask("initialize", {"protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": info})

    def memory_mb(self, field: str) -> float:
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(status.split(f"{field}:")[1].split()[0]) / 1024

    def close(self) -> None:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.close()
        self.process.stdout.close()
        self.process.wait(ENDED_WITHIN_S)


def raw_calls(client: RawClient, count: int) -> Callable[[], float]:
    def some() -> float:
        began = time.perf_counter()
        for _ in range(count):
            client.ask("tools/call", {"name": "noop_async", "arguments": {"a": 1}})
        return (time.perf_counter() - began) / count * 1e6

    return some


async def compare_with_sdk_client(era: str, rounds: int, count: int) -> list[Row]:
    mode = ERAS[era]
    async with over_stdio(DIRECT, mode) as direct, over_stdio(WRAPPED, mode) as ours, over_stdio(PROXIED, mode) as peer:
        sides = {"direct": direct, "ours": ours, "peer": peer}
        figure = await take_turns({name: calls(each, "noop_async", count) for name, each in sides.items()}, rounds)  # type: ignore[misc]
    shown = "{:.0f} µs"
    ratio, proxy_ratio = figure.ratio("ours", "direct"), figure.ratio("peer", "direct")
    return [
        compared(f"SDK client, {era}", figure["ours"], "direct", figure["direct"], shown, Bar(1.3), ratio=ratio),
        Row(f"{NAME}, {era}", "–", f"{shown.format(figure['peer'])}, {proxy_ratio:.2f} × the direct call"),
    ]


async def compare_with_raw_client(rounds: int, count: int) -> list[Row]:
    direct, ours = RawClient(DIRECT), RawClient(WRAPPED)
    try:
        for client in (direct, ours):
            client.greet()
        figure = await take_turns({"direct": raw_calls(direct, count), "ours": raw_calls(ours, count)}, rounds)
        added = figure["direct"] * (figure.ratio("ours", "direct") - 1) / 1000
        memory = ours.memory_mb("VmRSS")
    finally:
        direct.close()
        ours.close()
    beside = f"direct {figure['direct']:.0f} µs"
    return [
        absolute(
            "raw client, added to a call", added, "{:.3f} ms", Bar(0.5, "ms"), beside, figure.ratio("ours", "direct")
        ),
        absolute("memory after the calls", memory, "{:.1f} MB", Bar(30, "MB")),
    ]


def pass_large_result() -> Row:
    client = RawClient([*WRAPPED[:4], "--", sys.executable, "-c", LARGE_SERVER])
    try:
        assert len(client.ask("ping", {})) > LARGE
        peak = client.memory_mb("VmHWM")
    finally:
        client.close()
    return absolute("peak memory, result of 10 MB", peak, "{:.1f} MB", Bar(90, "MB"))


async def _measure(rounds: int, count: int, eras: list[str]) -> Table:
    rows = []
    for era in eras:
        rows += await compare_with_sdk_client(era, rounds, count)
    rows += await compare_with_raw_client(rounds, count)
    rows.append(pass_large_result())
    return Table(TITLE, NOTE, rows)


def measure(size: Size) -> Table:
    eras = list(ERAS)
    return asyncio.run(_measure(*size.of((27, 100, eras), (8, 25, eras), (1, 1, eras[:1]))))
