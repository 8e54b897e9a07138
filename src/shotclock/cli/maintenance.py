"""`shotclock errors`, `doctor` and `prune`: the registry of codes, the health of this machine, and the store's size."""

from __future__ import annotations

import difflib
import os
from pathlib import Path
from typing import TYPE_CHECKING

from ..core.envelope import Problem, warning
from ..core.errors import Ending, ErrorEntry, Failure, error_entries, warning_entries
from ..runtime.call import Outcome
from .parser import Subcommand, argument, duration, flag, option
from .subcommand import JSON, ChildWork, Mistaken, show_drawn, timeout_option

if TYPE_CHECKING:
    from ..runtime.doctor import Findings
    from ..store.retention import Retention
    from ..ui.devices import DeviceFindings

# --- errors ---------------------------------------------------------------------------------------------------


def _run_errors(code: str | None, timeout: int) -> ChildWork:
    return ChildWork("errors", lambda: _look_up(code), timeout, show=show_drawn)


def _look_up(code: str | None) -> Outcome:
    """Return the whole registry or one entry of it, in the same shape."""
    errors, warnings = {entry.code: entry for entry in error_entries()}, warning_entries()
    if code is not None:
        wanted = code.upper().replace("-", "_")
        if wanted not in errors and wanted not in warnings:
            close = difflib.get_close_matches(wanted, [*errors, *warnings], n=1)
            hint = f"did you mean {close[0]}?" if close else None
            message = f"there is no error or warning {code!r}"
            return Outcome(Ending.FINISHED, Problem("UNKNOWN_CODE", message, suggestion=hint))
        errors = {wanted: errors[wanted]} if wanted in errors else {}
        warnings = {wanted: warnings[wanted]} if wanted in warnings else {}
    data: dict[str, object] = {
        "errors": [_entry(entry) for entry in errors.values()],
        "warnings": [{"code": name, "summary": summary} for name, summary in warnings.items()],
    }
    return Outcome(Ending.FINISHED, data=data)


def _entry(entry: ErrorEntry) -> dict[str, object]:
    return {
        "code": entry.code,
        "exit_code": entry.exit_code,
        "http_status": entry.http_status,
        "retryable": entry.retryable,
        "side_effects": entry.side_effects.value,
        "summary": entry.summary,
        "hint": entry.hint,
    }


# --- doctor ---------------------------------------------------------------------------------------------------


def _run_doctor(about: str | None, sweep: bool, trace: str | None, timeout: int) -> ChildWork:
    if about == "ui" and (sweep or trace is not None):
        raise Mistaken({"sweep" if sweep else "trace": "not with `doctor ui`: leave it out"})
    return ChildWork("doctor", lambda: _examine(about, sweep, trace), timeout, mutates=sweep, show=show_drawn)


def _examine(about: str | None, sweep: bool, trace: str | None) -> Outcome:
    if about == "ui":
        import asyncio

        from ..ui.devices import examine_devices

        return _judge(asyncio.run(examine_devices()))
    from ..runtime.doctor import examine

    return _judge(examine(sweep=sweep, trace_id=trace))


def _judge(findings: Findings | DeviceFindings) -> Outcome:
    problem = None
    if findings.failed:
        message = "; ".join(f"{check.name}: {check.detail}" for check in findings.failed)
        problem = Problem("MACHINE_UNFIT", message)
    return Outcome(Ending.FINISHED, problem, findings.as_data())


# --- prune ----------------------------------------------------------------------------------------------------


def _run_prune(
    older_than: int | None, keep: int | None, max_size: int | None, dry_run: bool, reset: bool, timeout: int
) -> ChildWork:
    ended_ms = None if older_than is None else max(1, older_than)
    limits = {"runs_ms": ended_ms, "proposals_ms": ended_ms, "runs": keep, "runs_bytes": max_size}
    changes = {name: limit for name, limit in limits.items() if limit is not None}
    if reset and (changes or dry_run):
        raise Mistaken({"reset": "--reset moves the whole store: leave the other options out"})
    if reset:
        return ChildWork("prune", reset_store, timeout, mutates=True, show=show_drawn)
    return ChildWork(
        "prune", lambda: prune_store(changes, dry_run=dry_run), timeout, mutates=not dry_run, show=show_drawn
    )


def prune_store(changes: dict[str, int], *, dry_run: bool) -> Outcome:
    """Delete what has ended long ago; keep what the environment says, but for these changes."""
    from ..core.value_types import replace
    from ..dispatch.job_client import JobClient
    from ..process.clock import wall_time
    from ..process.kernel import is_alive
    from ..runtime.outcomes import failure_outcome
    from ..store.retention import prune, read_retention
    from ..store.store import Store

    try:
        retention = replace(read_retention(os.environ), **changes)
        with Store.open() as store:
            before = _size(store.path)
            pruned = prune(store, retention, wall_time(), is_alive, dry_run=dry_run)
            shrunk = True
            if not dry_run:
                JobClient(store, ["shotclock"]).forget_old()
                shrunk = store.shrink()
            after = _size(store.path)
    except Failure as failure:
        return failure_outcome(failure)
    data: dict[str, object] = {
        "dry_run": dry_run,
        "deleted": pruned.as_data(),
        "keeps": _describe_limits(retention),
        "file": str(store.path),
        "file_bytes_before": before,
        "file_bytes": after,
    }
    notes = () if shrunk else (warning("STORE_NOT_SHRUNK"),)
    return Outcome(Ending.FINISHED, data=data, warnings=notes)


def reset_store() -> Outcome:
    """Move the store aside, so that the next command starts a new one."""
    from ..process.clock import wall_time
    from ..process.kernel import is_alive
    from ..runtime.outcomes import failure_outcome
    from ..store.home import state_home
    from ..store.retention import move_aside

    try:
        moved_to = move_aside(state_home(os.environ), wall_time(), is_alive)
    except Failure as failure:
        return failure_outcome(failure)
    return Outcome(Ending.FINISHED, data={"moved_to": str(moved_to)})


def _describe_limits(retention: Retention) -> dict[str, int]:
    return {
        "runs_ms": retention.runs_ms,
        "runs": retention.runs,
        "runs_bytes": retention.runs_bytes,
        "proposals_ms": retention.proposals_ms,
    }


def _size(path: Path) -> int:
    """Return the bytes of the file and its log."""
    return sum(os.path.getsize(name) for name in (path, f"{path}-wal") if os.path.exists(name))


# --- the options ----------------------------------------------------------------------------------------------


def _read_count(text: str) -> int:
    if not text.isdecimal() or len(text) > 15:
        raise ValueError(f"{text[:40]!r} is not a whole number; 0 means no limit")
    return int(text)


def _read_size(text: str) -> int:
    from ..store.retention import parse_size

    return parse_size(text)


COMMANDS = {
    "errors": Subcommand(
        "errors",
        options=(argument("code", "Show only this code, as in `shotclock errors TIMEOUT`."), JSON, timeout_option()),
        run=_run_errors,
    ),
    "doctor": Subcommand(
        "doctor",
        options=(
            argument("about", "ui: check the devices of `shotclock ui` instead of the machine.", choices=("ui",)),
            flag("--sweep", "Kill the leftovers and remove empty cgroups. Look at the list first."),
            option("--trace", "ID", "List only leftovers of this trace (meta.trace_id of an envelope)."),
            JSON,
            timeout_option(),
        ),
        run=_run_doctor,
    ),
    "prune": Subcommand(
        "prune",
        options=(
            duration(
                "--older-than",
                "Delete runs and proposals that ended this long ago (7d, 12h; 0: all that have ended), instead of 30d "
                "for runs and 90d for proposals.",
            ),
            option("--keep", "N", "Keep at most this many ended runs, the newest, instead of 1000.", read=_read_count),
            option(
                "--max-size",
                "SIZE",
                "Keep at most this much of ended runs (500kB, 20MB), instead of 1GB.",
                read=_read_size,
            ),
            flag("--dry-run", "Show what would be deleted, and delete nothing."),
            flag("--reset", "Move the whole store aside and start a new one. Refused while work runs."),
            JSON,
            timeout_option("5m"),
        ),
        run=_run_prune,
        description="Delete runs, proposals and jobs that ended long ago. Those that run, are parked or wait are kept.",
    ),
}
