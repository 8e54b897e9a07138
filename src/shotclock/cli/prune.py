"""`shotclock prune`: what has ended long ago goes, and the store's file becomes as small as what is left."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..core.effects import Ending
from ..core.envelope import warning
from ..core.errors import Failure
from ..core.walltime import WallTime
from ..enforce.admission import Outcome
from ..enforce.clock import wall_ns
from ..enforce.identity import is_alive
from ..enforce.outcomes import failure_outcome
from ..jobs import Front
from ..store import Store
from ..store.retention import Retention, prune, retention_in


def prune_store(changes: dict[str, int], *, dry_run: bool) -> Outcome:
    """Keep what the environment says, but for these changes."""
    try:
        retention = replace(retention_in(os.environ), **changes)
        with Store.open() as store:
            before = _size(store.path)
            pruned = prune(store, retention, WallTime.of_ns(wall_ns()), is_alive, dry_run=dry_run)
            shrunk = True
            if not dry_run:
                Front(store, ["shotclock"]).forget_old()
                shrunk = store.shrink()
            after = _size(store.path)
    except Failure as failure:
        return failure_outcome(failure)
    data: dict[str, Any] = {
        "dry_run": dry_run,
        "deleted": pruned.as_data(),
        "keeps": _as_data(retention),
        "file": str(store.path),
        "file_bytes_before": before,
        "file_bytes": after,
    }
    notes = () if shrunk else (warning("STORE_NOT_SHRUNK"),)
    return Outcome(Ending.FINISHED, data=data, warnings=notes)


def _as_data(retention: Retention) -> dict[str, int]:
    return {
        "runs_ms": retention.runs_ms,
        "runs": retention.runs,
        "runs_bytes": retention.runs_bytes,
        "proposals_ms": retention.proposals_ms,
    }


def _size(path: Path) -> int:
    """Of the file and its log."""
    return sum(os.path.getsize(name) for name in (path, f"{path}-wal") if os.path.exists(name))
