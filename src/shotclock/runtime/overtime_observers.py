"""Observers of overtime: they decide whether a call may take longer. One that fails grants nothing."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from ..core.clocks import Clocks, format_duration
from ..core.errors import Failure
from ..core.overtime import ObserverKind, OvertimeDecision, OvertimePolicy, read_decision
from .call import Call
from .control import OBSERVER_NAME, TEXT_SHOWN, Observe

if TYPE_CHECKING:
    from .runtime import Runtime

SUMMARY_VARIABLE = "SHOTCLOCK_SUMMARY"


class OvertimeObservers:
    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._registered: dict[ObserverKind, Observe] = {}

    def register(self, kind: ObserverKind, observe: Observe) -> None:
        self._registered[kind] = observe

    async def ask(self, call: Call, summary: dict[str, Any]) -> OvertimeDecision:
        """Return the decision of the call's observer. Raises Failure without one, and its own errors."""
        if call.overtime is None:
            raise Failure("OBSERVER_UNAVAILABLE", f"{call.name} declares no overtime")
        policy = call.overtime.policy
        match policy.observer:
            case ObserverKind.PROGRESS:
                if summary["has_grown"]:
                    return OvertimeDecision(policy.share_ms, "its output or its progress grows")
                return OvertimeDecision(reason="neither its output nor its progress has grown")
            case ObserverKind.NONE:  # only reached when the call itself asks
                return OvertimeDecision(int(summary["asked_ms"] or 0), "there is no observer")
            case ObserverKind.COMMAND:
                return await self._ask_command(policy, summary)
            case kind if kind in self._registered:
                return await self._registered[kind](call, summary)
        raise Failure("OBSERVER_UNAVAILABLE", f"there is no observer of the kind {policy.observer} here")

    async def _ask_command(self, policy: OvertimePolicy, summary: dict[str, Any]) -> OvertimeDecision:
        """Run a shell command that reads the summary and writes the decision, both as JSON."""
        # A variable, not a file: a file would stay behind if this process were killed.
        script = f'printf "%s\\n" "${SUMMARY_VARIABLE}" | (\nunset {SUMMARY_VARIABLE}\n{policy.target}\n)'
        envelope = await self._runtime.run(
            ["/bin/sh", "-c", script],
            Clocks(timeout_ms=policy.observer_timeout_ms, grace_ms=0),
            env={SUMMARY_VARIABLE: json.dumps(summary)},
            cwd=policy.folder,
            name=OBSERVER_NAME,
        )
        if envelope.code in ("TIMEOUT", "NO_TIME_LEFT"):
            limit = format_duration(policy.observer_timeout_ms)
            return OvertimeDecision(failed=True, reason=f"the observer did not answer within {limit}")
        if envelope.error is not None:
            message = f"the observer failed: {envelope.error['message']}"
            return OvertimeDecision(failed=True, reason=message[:TEXT_SHOWN])
        printed = envelope.data["stdout"] if isinstance(envelope.data, dict) else ""
        try:
            return read_decision(json.loads(str(printed)))
        except (ValueError, RecursionError):
            return OvertimeDecision(failed=True, reason=f"the observer printed {printed!r:.80}, which is not JSON")
