"""Our side of the MCP benchmarks, served by `shotclock serve benchmarks.mcp_app:app`."""

from __future__ import annotations

import time

from shotclock import App

# Longer than anybody waits for the answer, short enough that the peer, which waits for the end, gives one.
HANGS_S = 3.0

app = App("bench", default_timeout="5s", grace="0ms")


@app.command(mutates=False)
def noop(a: int) -> int:
    return a


@app.command(mutates=False)
async def noop_async(a: int) -> int:
    return a


@app.command(timeout="1s")
def hang() -> None:
    time.sleep(HANGS_S)
