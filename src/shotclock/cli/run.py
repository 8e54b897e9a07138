"""`shotclock run`: a workflow, from its file or from where it was cut off."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

from ..core.clocks import Clocks
from ..core.durations import format_duration
from ..core.effects import Ending
from ..core.envelope import Envelope
from ..core.errors import Failure
from ..enforce.admission import Outcome, admit, answer
from ..enforce.handlers import raised
from ..store import Store
from ..workflow.lint import lint
from ..workflow.run import RunRequest, resume, start
from ..workflow.states import Status, StepState
from . import flow, signals
from .asked import RunAsked
from .output import emit, is_terminal, say_line, summary_line, write_quietly

MARKS = {
    Status.RUNNING: "…",
    Status.SUCCEEDED: "✓",
    Status.FAILED: "✗",
    Status.TIMED_OUT: "⏱",
    Status.SKIPPED: "-",
    Status.CANCELLED: "■",
    Status.INTERRUPTED: "!",
}


def main(asked: RunAsked, as_json: bool) -> int:
    try:
        envelope = _performed(asked, as_json)
    except signals.Signalled as signalled:
        from ..desk import stopped_by

        admission = admit("run", Clocks())
        envelope = answer(admission, Outcome(Ending.NOT_STARTED, stopped_by(signalled.name)))
    except Failure as failure:
        outcome = raised(failure)
        outcome.ending = Ending.NOT_STARTED
        envelope = answer(admit("run", Clocks()), outcome)
    signals.only_note()
    return _deliver(envelope, as_json)


def _performed(asked: RunAsked, as_json: bool) -> Envelope:
    signals.raise_when_told()
    with Store.open() as store, _Events(asked.events) as events:

        def on_change(state: StepState) -> None:
            events.write(state)
            if not as_json or is_terminal(sys.stderr):
                say_line(_line(state))

        if asked.resume is not None:
            return asyncio.run(_resumed(asked.resume, store, on_change))
        assert asked.flow is not None
        loaded = flow.load(asked.flow)
        if isinstance(loaded, Outcome):
            return answer(admit("run", Clocks()), loaded)
        findings = lint(loaded, timeout_ms=asked.timeout_ms, unattended=not is_terminal(sys.stdin))
        refused = flow.judged(loaded, findings, may_be_tight=asked.force)
        if refused.problem is not None or loaded.workflow is None:
            refused.ending = Ending.NOT_STARTED
            return answer(admit("run", Clocks()), refused)
        request = RunRequest(
            loaded.workflow, str(Path(asked.flow).absolute()), Path(asked.flow).absolute().parent, inputs=asked.inputs,
            timeout_ms=asked.timeout_ms, **({"run_id": asked.run_id} if asked.run_id else {}),
        )  # fmt: skip
        return asyncio.run(_started(request, store, on_change))


async def _started(request: RunRequest, store: Store, on_change: flow.OnChange) -> Envelope:
    with signals.told() as stop:
        return await start(request, store, stop=stop, on_change=on_change)


async def _resumed(run_id: str, store: Store, on_change: flow.OnChange) -> Envelope:
    with signals.told() as stop:
        return await resume(run_id, store, stop=stop, on_change=on_change)


class _Events:
    """A line of JSON for every change, for whoever watches from outside."""

    def __init__(self, path: str | None) -> None:
        try:
            self._file = None if path is None else open(path, "a", encoding="utf-8")  # noqa: SIM115
        except OSError as error:
            raise Failure("FILE_UNREADABLE", f"--events {path!r}: {error.strerror}") from None

    def __enter__(self) -> _Events:
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._file.close()

    def write(self, state: StepState) -> None:
        if self._file is not None:
            self._file.write(json.dumps({"type": "step", "id": state.id, **state.shown()}, default=str) + "\n")
            self._file.flush()


def _line(state: StepState) -> str:
    took = "" if state.duration_ms is None else f" {format_duration(state.duration_ms)}"
    why = ""
    if state.error is not None:
        why = f": {state.error['message']}"
    elif state.reason is not None:
        why = f": {state.reason.value}" + (f" ({state.cause})" if state.cause else "")
    return f"{MARKS.get(state.status, ' ')} {state.id} {state.status.value}{took}{why}"


def _deliver(envelope: Envelope, as_json: bool) -> int:
    if as_json:
        return emit(envelope, signals.heard)
    data: dict[str, Any] = envelope.data if isinstance(envelope.data, dict) else {}
    if data.get("outputs"):
        write_quietly(sys.stdout, json.dumps(data["outputs"], indent=2, ensure_ascii=False) + "\n")
    if "run_id" in data:
        counts = f"{len(data['completed'])} succeeded, {len(data['failed'])} failed, {len(data['skipped'])} skipped"
        say_line(f"run {data['run_id']}: {counts}")
    if envelope.error is not None:
        say_line(summary_line(envelope))
    return envelope.exit_code
