"""Calls of wrapped MCP servers on the operators' page: those that are open, and those that failed lately."""

from __future__ import annotations

import shlex
from typing import Any

from ...core.limits import WallTime, format_duration
from ...core.value_types import as_dict
from ...store.store import Store
from ...store.wrapped_calls import LOST, CallFilter, CallsNow, LoggedCall, OpenCall
from ...supervise.kernel import can_see, is_alive

LATELY_MS = 3_600_000
MOST_OPEN = 100
MOST_FAILED = 50


def read_calls(store: Store) -> CallsNow:
    return store.calls.look(CallFilter(failed=True), MOST_FAILED, is_alive)


def describe_calls(found: CallsNow, now: WallTime) -> dict[str, Any]:
    """Return the open calls, and those that failed or were lost lately, the newest first."""
    shown = found.open[:MOST_OPEN]
    open_calls = CallsNow(shown, (), ()).describe_open(now, can_see)
    failed = [(call.started_at + call.duration_ms, _describe_ended(call)) for call in found.ended]
    failed += [(call.started_at, _describe_lost(call, now)) for call in found.lost]
    failed.sort(key=lambda each: each[0].ms, reverse=True)
    lately = [row for at, row in failed if now.ms - at.ms <= LATELY_MS]
    return {
        "wrapped": [
            {**row, "id": _id_of(call), "more": _command("--running", call)}
            for call, row in zip(shown, open_calls, strict=True)
        ],
        "wrapped_count": len(found.open),
        "failed": lately[:MOST_FAILED],
        "failed_has_more": len(lately) >= MOST_FAILED,
        "failed_command": f"shotclock mcp log --failed --since {format_duration(LATELY_MS)}",
    }


def _id_of(call: OpenCall) -> str:
    return f"open-{call.holder.pid}-{call.holder.started}-{call.number}"


def _describe_ended(call: LoggedCall) -> dict[str, Any]:
    ended_at = call.started_at + call.duration_ms
    id = call.call_id or f"call-{call.pid}-{call.started_at.ms}-{call.duration_ms}-{call.request_bytes}"
    row = {**as_dict(call), "started_at": call.started_at.iso(), "ended_at": ended_at.iso()}
    return {**row, "id": f"failed-{id}", "more": _command("--failed", call)}


def _describe_lost(call: OpenCall, now: WallTime) -> dict[str, Any]:
    row = call.describe(now, LOST)
    return {**row, "ended_at": None, "id": f"failed-{_id_of(call)}", "more": _command("--failed", call)}


def _command(selection: str, call: LoggedCall | OpenCall) -> str:
    """Return the command that lists this call and similar ones, quoted for a shell."""
    pattern = "".join(f"[{letter}]" if letter in "*?[" else letter for letter in call.tool)
    return shlex.join(["shotclock", "mcp", "log", selection, f"--server={call.server}", f"--tool={pattern}"])
