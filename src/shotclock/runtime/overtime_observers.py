"""Observers of overtime: who looks at a long call near its end, and says whether it may go on.

An observer gets a summary of the call and answers with a decision. It is bounded by whoever asks, and one that fails
grants nothing. Those that need more than processes (a person, a model) are put in by whoever has an inbox or a model.
"""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Any

from ..core.catalogue import HandlerReference, Operation
from ..core.clocks import Clocks, format_duration
from ..core.envelope import Envelope
from ..core.errors import Failure
from ..core.overtime import Decision, ObserverKind, OvertimePolicy, read_decision
from .call import Call
from .control import OBSERVER_NAME, TEXT_SHOWN, Observe

if TYPE_CHECKING:
    from .runtime import Runtime

SHELL = "/bin/sh"
SUMMARY_VARIABLE = "SHOTCLOCK_SUMMARY"


class OvertimeObservers:
    """The observers of one runtime, by kind."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._others: dict[ObserverKind, Observe] = {}

    def register(self, kind: ObserverKind, observe: Observe) -> None:
        """Say how observers of a kind are asked that this runtime does not know by itself."""
        self._others[kind] = observe

    async def ask(self, call: Call, summary: dict[str, Any]) -> Decision:
        """Ask the observer of a call. Raises Failure where it cannot be asked, and whatever it raises."""
        assert call.overtime is not None
        policy = call.overtime.policy
        match policy.observer:
            case ObserverKind.PROGRESS:
                if summary["has_grown"]:
                    return Decision(policy.share_ms, "its output or its progress grows")
                return Decision(reason="neither its output nor its progress has grown")
            case ObserverKind.NONE:  # asked only where the call itself wants it
                return Decision(int(summary["asked_ms"] or 0), "there is nobody to ask")
            case ObserverKind.COMMAND:
                return await self._ask_command(policy, summary)
            case ObserverKind.FUNCTION:
                return await self._ask_function(policy, summary)
            case other if other in self._others:
                return await self._others[other](call, summary)
        raise Failure("OBSERVER_UNAVAILABLE", f"no observer of the kind {policy.observer} can be asked here")

    async def _ask_command(self, policy: OvertimePolicy, summary: dict[str, Any]) -> Decision:
        """Run a shell command with the summary as JSON on its stdin; its stdout is the decision as JSON."""
        # Not in a file: nobody would remove it where this process is killed.
        script = f'printf "%s\\n" "${SUMMARY_VARIABLE}" | (\nunset {SUMMARY_VARIABLE}\n{policy.target}\n)'
        envelope = await self._runtime.run(
            [SHELL, "-c", script],
            Clocks(timeout_ms=policy.observer_timeout_ms, grace_ms=0),
            env={SUMMARY_VARIABLE: json.dumps(summary)},
            cwd=policy.folder,
            name=OBSERVER_NAME,
        )
        if envelope.error is not None:
            return _explain_failure(envelope, policy)
        printed = envelope.data["stdout"] if isinstance(envelope.data, dict) else ""
        try:
            return read_decision(json.loads(str(printed)))
        except (ValueError, RecursionError):
            return Decision(failed=True, reason=f"the observer printed {printed!r:.80}, which is no JSON")

    async def _ask_function(self, policy: OvertimePolicy, summary: dict[str, Any]) -> Decision:
        """Call a function with the summary, in a worker: a registered operation, `module:function` or
        `path/to/file.py:function`."""
        assert policy.target is not None
        operation: Operation | str = policy.target
        arguments: dict[str, object] = {"summary": summary}
        module, colon, qualname = policy.target.partition(":")
        if colon:
            handler = HandlerReference(module, qualname)
            if is_file(policy.target):
                handler = HandlerReference(__name__, ask_function_in_file.__name__)
                arguments |= {"file": os.path.join(policy.folder or "", module), "name": qualname}
            operation = Operation(OBSERVER_NAME, handler, isolation="process", mutates=False)
        clocks = Clocks(timeout_ms=policy.observer_timeout_ms, grace_ms=0)
        envelope = await self._runtime.call(operation, arguments, clocks)
        if envelope.error is not None:
            return _explain_failure(envelope, policy)
        return read_decision(envelope.data)


def _explain_failure(envelope: Envelope, policy: OvertimePolicy) -> Decision:
    if envelope.code in ("TIMEOUT", "NO_TIME_LEFT"):
        limit = format_duration(policy.observer_timeout_ms)
        return Decision(failed=True, reason=f"the observer did not answer within {limit}")
    assert envelope.error is not None
    return Decision(failed=True, reason=f"the observer failed: {envelope.error['message']}"[:TEXT_SHOWN])


def is_file(target: str) -> bool:
    """Return whether a function is named by the file that it is in."""
    file = target.partition(":")[0]
    return file.endswith(".py") or os.sep in file


def ask_function_in_file(file: str, name: str, summary: dict[str, Any]) -> Any:
    """Call the function of a file that is no module, in the worker that runs this."""
    import runpy

    return runpy.run_path(file)[name](summary)
