"""What people are asked for a step, on its way between the store of a worker, the workflow, and whoever decides.

The workflow holds it while nobody else does. Its instants are on the engine's clock there.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from ..core.clocks import LATEST_MS, WallTime
from ..core.proposal import Proposal
from ..process.clock import wall_time
from ..providers.provider import ForeignProposal
from ..store.store import Store

# What lies in the inbox of another server is asked about again after this.
FOREIGN_PAUSE_MS = 30_000
_INSTANTS = ("created_at", "expires_at", "reminded_at", "decided_at", "used_at")


def pack_proposals(
    step: str, waiting: Iterable[Proposal | ForeignProposal], store: Store, ahead_ms: int
) -> list[dict[str, Any]]:
    """Return what a step waits for, as its workflow keeps it. `ahead_ms` is how far the engine's clock is ahead."""
    packed: list[dict[str, Any]] = []
    for proposal in waiting:
        if isinstance(proposal, ForeignProposal):
            again_at = wall_time().ms + ahead_ms + FOREIGN_PAUSE_MS
            packed.append({"id": proposal.id, "step": step, "status": "pending", "expires_at": again_at})
            continue
        record = store.proposals.export(proposal.id)
        assert record is not None, "it was just asked for"
        packed.append(pack_record(step, _shift(record, ahead_ms)))
    return packed


def pack_record(step: str, record: Mapping[str, Any]) -> dict[str, Any]:
    about = {key: record[key] for key in ("id", "status", "expires_at")}
    return {**about, "step": step, "record": dict(record)}


def unpack_proposals(packed: Iterable[Mapping[str, Any]], store: Store, ahead_ms: int = 0) -> None:
    """Write down in a store what a workflow knows of its proposals."""
    for each in packed:
        if "record" in each:
            record = {**each["record"], "status": each["status"]}
            store.proposals.take_over(_shift(record, -ahead_ms), wall_time())


def _shift(record: Mapping[str, Any], by_ms: int) -> dict[str, Any]:
    """Return the record on another clock. What never expires stays so."""
    moved = {
        name: WallTime(record[name] + by_ms).ms
        for name in _INSTANTS
        if record.get(name) is not None and record[name] < LATEST_MS - abs(by_ms)
    }
    return {**record, **moved}
