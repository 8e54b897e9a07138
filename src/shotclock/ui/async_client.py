"""Executions for those who have an event loop: the blocking client in a thread, cut off when it is cancelled."""

from __future__ import annotations

import asyncio
from typing import Any

from ..core.envelope import Envelope
from ..runtime.command_runner import run_shielded
from . import client

# After its socket was cut, a thread that reads from it returns at once.
CUT_LIMIT_S = 5.0


async def execute(
    device: str,
    payload: dict[str, Any],
    *,
    timeout_ms: Any = None,
    remaining_ms: int | None = None,
    traceparent: str | None = None,
) -> Envelope:
    """Run an execution on a device, and return its envelope. A cancellation stops the execution. Raises Failure."""
    exchanges: list[client.Exchange] = []
    working = asyncio.ensure_future(
        asyncio.to_thread(
            client.execute,
            device,
            payload,
            timeout_ms=timeout_ms,
            remaining_ms=remaining_ms,
            traceparent=traceparent,
            on_exchange=exchanges.append,
        )
    )
    try:
        return await asyncio.shield(working)  # bounded by the client itself
    except asyncio.CancelledError:
        for exchange in exchanges:
            exchange.cut()
        await run_shielded(asyncio.wait([working], timeout=CUT_LIMIT_S))
        if working.done() and not working.cancelled():
            working.exception()  # that it was cut off
        raise
