"""Past runs of a file, put into a store through its own methods."""

from pathlib import Path
from typing import Any

from shotclock.core.limits import ProcessIdentity, WallTime
from shotclock.flows.run.state import Status, StepState
from shotclock.store.runs import StepRecord, StoredRun
from shotclock.store.store import Store

BEGAN = WallTime(1_700_000_000_000)


def took(ms: int, name: str = "work", kind: str = "command", **more: Any) -> StepState:
    state = StepState(name, kind, Status.SUCCEEDED, started_ms=0, duration_ms=ms, attempts=1, ending="finished")
    for key, value in more.items():
        setattr(state, key, value)
    return state


def timed_out(limit_ms: int, name: str = "work", owner: str | None = None, **more: Any) -> StepState:
    clock = {"kind": "timeout", "owner": owner or f"step {name}", "limit_ms": limit_ms, "elapsed_ms": limit_ms}
    error = {"code": "TIMEOUT", "message": "", "context": {"clock": clock}}
    return took(limit_ms + 40, name, status=Status.TIMED_OUT, error=error, **more)


def add_run(
    store: Store,
    file: Path | str,
    *states: StepState,
    name: str = "flow",
    number: int = 0,
    run_ms: int = 1_000,
    own_ms: int | None = None,
    limit_ms: int | None = None,
    code: str | None = None,
) -> None:
    """Add a run that has ended. `own_ms` is the time of its last process."""
    began = BEGAN + number * 10_000_000
    limit = None if limit_ms is None else began + limit_ms
    run = StoredRun(f"run-{number}", name, str(file), {}, {}, "t", ProcessIdentity("h", "b", 1, 1), began, limit)
    store.runs.begin(run)
    store.runs.record(run.id, [StepRecord(s.id, s.status.value, s.to_record()) for s in states], began)
    error = None if code is None else {"code": code}
    meta = {"duration_ms": run_ms if own_ms is None else own_ms}
    store.runs.end(run.id, {"data": {}, "error": error, "warnings": [], "meta": meta}, began + run_ms)
