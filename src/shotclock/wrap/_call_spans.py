"""Spans of calls for OpenTelemetry, in the words of its conventions for MCP. Only imported where they are asked for.

A thread that lives only while there are spans writes and sends them. The SDK's own batches are not used: its thread
would be started again in every process that is forked from here.
"""

from __future__ import annotations

import os
from collections import deque

from ..core.limits import NS_PER_MS
from ..core.trace import TraceContext
from ..supervise.clock import wall_ns
from ..supervise.spans import Attribute, Span
from ._batch_thread import BatchThread, importing
from ._call_log import LONGEST_NAME
from ._requests import EndedRequest

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ..calls.otel import Writer

# A collector that hangs exhausts this; further spans are dropped.
MOST_WAITING = 4_000
# At the end of the process. A collector that does not answer exhausts it.
FLUSH_LIMIT_S = 1.0
SUCCEEDED = ("ok", "answered")


class CallSpans:
    """The spans of one server that are to be sent. Never raises, and never delays a call."""

    def __init__(self, server: str) -> None:
        self._server = server[:LONGEST_NAME]
        self._thread = BatchThread("call-spans", self._send, lambda: bool(self._waiting))
        self._waiting: deque[tuple[int, EndedRequest]] = deque()
        self._writer: Writer | None = None
        self._dropped = 0
        self._problem = ""

    def add(self, ended: EndedRequest) -> None:
        """Send the span of a call that has ended now."""
        if ended.method != "tools/call":
            return
        with self._thread.lock:
            if len(self._waiting) >= MOST_WAITING:
                self._dropped += 1
                return
            self._waiting.append((wall_ns(), ended))
            self._thread.ensure_started()

    def close(self) -> str:
        """Send the last spans within FLUSH_LIMIT_S, and return a note about missing ones."""
        self._thread.begin_closing()
        if self._writer is not None:
            self._writer.hurry()
        if not self._thread.join(FLUSH_LIMIT_S):
            self._note_problem(f"the collector has not answered within {FLUSH_LIMIT_S:g} s")
        if self._dropped:
            self._note_problem(f"{self._dropped} came faster than they could be sent")
        problem = self._problem or self._thread.problem
        return f"spans are missing: {problem}" if problem else ""

    def _send(self) -> bool:
        with self._thread.lock:
            batch = list(self._waiting)
            self._waiting.clear()
        try:
            self._send_batch(batch)
        except Exception as error:  # a problem of the SDK must not end the sender
            self._note_problem(f"{type(error).__name__}: {error}")
        return True

    def _send_batch(self, batch: list[tuple[int, EndedRequest]]) -> None:
        if self._writer is None:
            with importing:  # here: the SDK takes time and memory
                from ..calls.otel import Writer

                self._writer = Writer(self._note_problem, most=MOST_WAITING, has_thread=False)
        if self._thread.is_closing:
            self._writer.hurry()
        for at_ns, ended in batch:
            self._writer.write(call_span(self._server, ended, at_ns))
        self._writer.send()

    def _note_problem(self, why: str) -> None:
        self._problem = self._problem or why


def call_span(server: str, ended: EndedRequest, ended_ns: int) -> Span:
    """Return the span of a call, below the span that the client has named in `_meta`."""
    parent = ended.trace or TraceContext(os.urandom(16).hex())
    tool = ended.tool[:LONGEST_NAME]
    attributes: dict[str, Attribute] = {
        "mcp.method.name": ended.method,
        "gen_ai.operation.name": "execute_tool",
        "gen_ai.tool.name": tool,
        "jsonrpc.request.id": str(ended.request_id)[:LONGEST_NAME],
        "network.transport": "pipe",
        "shotclock.kind": "wrapped call",
        "shotclock.server": server,
        "shotclock.server.generation": ended.generation,
    }
    limits = {"timeout_ms": ended.limits.timeout_ms, "idle_ms": ended.limits.idle_ms}
    attributes |= {f"shotclock.{name}": limit_ms for name, limit_ms in limits.items() if limit_ms}
    if ended.id:
        attributes["shotclock.request.id"] = ended.id
    return Span(
        name=f"{ended.method} {tool}".strip(),
        trace=parent.below(os.urandom(8).hex()),
        parent_id=parent.span_id,
        started_ns=ended_ns - ended.elapsed_ms * NS_PER_MS,
        ended_ns=ended_ns,
        attributes=attributes,
        code=None if ended.outcome in SUCCEEDED else ended.outcome,
        is_of_server=True,
    )
