"""`mcp`: a call of an MCP tool, on a server that is started for it or reached by URL."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping
from typing import Any, Literal

from ...calls.call import Call, Outcome
from ...calls.runtime import Runtime
from ...core.errors import Ending, Failure
from ...core.limits import MAX_MS, Deadline, parse_duration_ms
from ...core.validation import field
from ...core.value_types import JsonObject
from ...net.tool_call import ToolAnswer, ToolRequest
from ...people.inbox import Inbox
from ...people.person_wait import undecided_outcome
from ...supervise.clock import monotonic_ns
from ._step_text import StepText
from .provider import (
    Clock,
    ForeignProposal,
    Provider,
    Scalar,
    StepCall,
    StepPart,
    StepResult,
    StepType,
    bounded_by_run,
    check_server,
)


class McpStep(StepPart):
    type: Literal["mcp"]
    command: str | None = None
    args: list[str] = field(default=[], keys=("args", "command_args"))
    url: str | None = None
    headers: dict[str, Scalar] = field(default={})
    method: str = field(min_length=1, keys=("method", "tool"))
    arguments: JsonObject = field(
        default={},
        keys=("arguments", "method_args", "methodArgs"),
    )
    connect_timeout: Clock | None = None
    transport: Literal["stdio", "http"] | None = None  # follows from `command` or `url`; existing files have it

    def check_together(self) -> None:
        super().check_together()
        check_server(self.command, self.url, self.transport)


MCP = StepType(
    "mcp",
    "MCP tool call",
    McpStep,
    lambda services: McpProvider(services.inbox),
    default_ms=60_000,
    waits_when_approved=True,
    value_keys=frozenset({"arguments", "headers"}),
    rules={
        "UNKNOWN_OPERATION": "unknown_tool",
        "TOOL_FAILED": "tool_error",
        "ARG_ERROR": "arguments",
    },
    other_rule="connect_error",
)
STEP_TYPES = (MCP,)
# Between calls of a tool that waits for a person in a foreign inbox, where the run is never parked.
LOOK_AGAIN_S = 5.0


class McpProvider(Provider):
    def __init__(self, inbox: Callable[[], Inbox] | None = None) -> None:
        """Load nothing yet. `inbox` is the run's, which a server on this machine may share."""
        self._inbox = inbox

    step_type = MCP

    async def run(self, step: StepCall, call: Call, runtime: Runtime) -> StepResult:
        """Call the tool. Where it needs an approval, wait and repeat the identical call."""
        while True:
            answer = await self._call_tool(step, call, runtime)
            proposal = None if answer.envelope is None else _read_proposal(answer.envelope)
            if proposal is None or not step.key:
                rule = None if answer.rule is None else f"mcp/{answer.rule}"
                return StepResult(answer.outcome, answer.output, rule, answer.rewrite)
            waiting = bounded_by_run(call)
            bell = waiting.bound.bell
            # No call is made inside: parking the run would cut it.
            with step.waits(step.key, proposal):
                await self._wait(proposal, step, bell)
            if bell is not None and bell.has_passed(monotonic_ns()):
                return StepResult(
                    undecided_outcome(proposal.id, dict(proposal.shown), waiting), None, "approval/pending"
                )
            call.restart_clocks()

    async def _wait(self, proposal: ForeignProposal, step: StepCall, bell: Deadline | None) -> None:
        """Wait for the decision in a shared inbox; elsewhere for a pause, or until the run is parked."""
        with contextlib.suppress(Failure):
            inbox = None if self._inbox is None else self._inbox()
            ours = None if inbox is None else await inbox.get(proposal.id)
            if inbox is not None and ours is not None and ours.is_open:
                await inbox.wait_until(ours, bell)
                return
        pause_s = MAX_MS / 1000 if step.parks else LOOK_AGAIN_S
        left_s = pause_s if bell is None else bell.remaining_ns(monotonic_ns()) / 1e9
        await asyncio.sleep(min(pause_s, left_s))

    async def _call_tool(self, step: StepCall, call: Call, runtime: Runtime) -> ToolAnswer:
        settings, shown = step.settings, StepText(step)
        headers = {name: str(value) for name, value in settings.get("headers", {}).items() if value is not None}
        written = settings.get("connect_timeout")

        def leave(outcome: Outcome) -> None:
            step.cancelled.result = StepResult(outcome)

        request = ToolRequest(
            settings["method"],
            settings["arguments"],
            [str(settings["command"]), *map(str, settings.get("args", []))] if settings.get("command") else [],
            step.own_env or {},
            step.env,
            step.folder,
            leave,
            settings.get("url") or "",
            headers,
            0 if written is None else parse_duration_ms(written, bare="s"),
            shown.log,
            shown.progress,
        )
        return await request.send(call, runtime)


def _read_proposal(theirs: Mapping[str, Any]) -> ForeignProposal | None:
    """Return the proposal that a tool of a Shotclock server waits for."""
    error, data, ending = theirs["error"], theirs["data"], theirs["meta"].get("ending")
    if error is None or error["code"] != "INCOMPLETE" or ending != Ending.NOT_STARTED or not isinstance(data, dict):
        return None
    proposal_id = data.get("proposal_id")
    if data.get("status") != "pending" or not isinstance(proposal_id, str):
        return None
    names = ("status", "proposal_id", "notes", "title", "expires_at")
    return ForeignProposal(proposal_id, {name: data[name] for name in names if name in data})
