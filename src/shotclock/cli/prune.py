"""`shotclock prune`: delete old runs, proposals and jobs, or move the whole store aside."""

from __future__ import annotations

import os
from pathlib import Path

from ..core.envelope import warning
from ..core.errors import Ending, Failure
from ..core.value_types import replace
from ..dispatch.job_client import JobClient
from ..process.clock import wall_time
from ..process.kernel import is_alive
from ..runtime.call import Outcome
from ..runtime.outcomes import failure_outcome
from ..store.home import state_home
from ..store.retention import move_aside, parse_size, prune, read_retention
from ..store.store import Store
from .parser import Subcommand, duration, flag, option
from .subcommand import JSON, ChildWork, show_drawn, timeout_option


def _run_prune(
    older_than: int | None, keep: int | None, max_size: int | None, dry_run: bool, reset: bool, timeout: int
) -> ChildWork:
    ended_ms = None if older_than is None else max(1, older_than)
    limits = {"runs_ms": ended_ms, "proposals_ms": ended_ms, "runs": keep, "runs_bytes": max_size}
    changes = {name: limit for name, limit in limits.items() if limit is not None}
    if reset:
        return ChildWork("prune", reset_store, timeout, mutates=True, show=show_drawn)
    return ChildWork(
        "prune", lambda: prune_store(changes, dry_run=dry_run), timeout, mutates=not dry_run, show=show_drawn
    )


def prune_store(changes: dict[str, int], *, dry_run: bool) -> Outcome:
    """Delete what ended long ago, by the limits of the environment with these changes."""
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
        "keeps": {name: getattr(retention, name) for name in ("runs_ms", "runs", "runs_bytes", "proposals_ms")},
        "file": str(store.path),
        "file_bytes_before": before,
        "file_bytes": after,
    }
    notes = () if shrunk else (warning("STORE_NOT_SHRUNK"),)
    return Outcome(Ending.FINISHED, data=data, warnings=notes)


def reset_store() -> Outcome:
    """Move the store aside, so that the next command starts a new one."""
    try:
        moved_to = move_aside(state_home(os.environ), wall_time(), is_alive)
    except Failure as failure:
        return failure_outcome(failure)
    return Outcome(Ending.FINISHED, data={"moved_to": str(moved_to)})


def _size(path: Path) -> int:
    """Return the bytes of the file and its log."""
    return sum(os.path.getsize(name) for name in (path, f"{path}-wal") if os.path.exists(name))


def _read_count(text: str) -> int:
    if not text.isdecimal() or len(text) > 15:
        raise ValueError(f"{text[:40]!r} is not a whole number; 0 means no limit")
    return int(text)


COMMANDS = {
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
                read=parse_size,
            ),
            flag("--dry-run", "Show what would be deleted, and delete nothing."),
            flag(
                "--reset",
                "Move the whole store aside and start a new one. Refused while work runs.",
                excludes=("--older-than", "--keep", "--max-size", "--dry-run"),
            ),
            JSON,
            timeout_option("5m"),
        ),
        run=_run_prune,
        description="Delete runs, proposals and jobs that ended long ago. Those that run, are parked or wait are kept.",
    ),
}
