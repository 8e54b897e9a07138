"""The finished items of a `for_each` or `matrix` step, kept for when the step begins again, here or in another run."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ...core.errors import SideEffects
from ...core.json_values import as_text, write_json
from ...core.value_types import JsonObject
from ...core.visible_text import HIDDEN
from .state import Status, StepState


def digest_of(item: Any) -> str:
    """Return the digest of a value. A number and its text are different values."""
    return hashlib.sha256(write_json(item).encode("utf-8", "surrogatepass")).hexdigest()


def match_items(records: Sequence[Mapping[str, Any]], digests: Sequence[str]) -> dict[int, Mapping[str, Any]]:
    """Return the record of each item that has one, by the number of the item.

    A record belongs to the item of its value: the one in its old place, else the first other one, if it succeeded.
    """
    numbered = enumerate(zip(records, digests, strict=False))
    found = {number: record for number, (record, digest) in numbered if record.get("item") == digest}
    spare: dict[str, list[Mapping[str, Any]]] = {}
    for number, record in enumerate(records):
        if number not in found and record.get("status") == Status.SUCCEEDED:
            spare.setdefault(record["item"], []).append(record)
    for number, digest in enumerate(digests):
        if number not in found and spare.get(digest):
            found[number] = spare[digest].pop(0)
    return found


def merge_items(records: Sequence[JsonObject], begun: Mapping[int, JsonObject]) -> list[JsonObject]:
    """Return the records of a step with those of the items that it has begun since.

    A record whose place is used by another item is put behind all of them.
    """
    merged = {**dict(enumerate(records)), **begun}
    made = [merged.get(number, {}) for number in range(max(merged, default=-1) + 1)]
    replaced = ((records[number], record) for number, record in begun.items() if number < len(records))
    return made + [before for before, now in replaced if before.get("item") not in (None, now.get("item"))]


def record_finished(parts: Iterable[StepState], digests: Sequence[str], *, with_outputs: bool) -> list[JsonObject]:
    """Return short records of the items that succeeded. Without outputs these are in the output of the step."""
    records: list[JsonObject] = []
    for part, digest in zip(parts, digests, strict=True):
        record: JsonObject = {}
        if part.status is Status.SUCCEEDED and not part.partial:
            record = {"item": digest, "status": part.status.value}
            record |= {"output": part.output} if with_outputs else {}
            record |= {"kept_from": part.kept_from} if part.kept_from else {}
        records.append(record)
    return records if any(records) else []


def keep_finished(state: StepState, run_id: str) -> list[JsonObject]:
    """Return the records of the finished items of a step in an ended run, for a run that continues it."""
    outputs = state.output if isinstance(state.output, list) else []
    kept: list[JsonObject] = []
    for number, record in enumerate(state.parts):
        has_output = "output" in record or number < len(outputs)
        output = record["output"] if "output" in record else outputs[number] if has_output else None
        if record.get("status") != Status.SUCCEEDED or not has_output or record.get("partial") or is_masked(output):
            kept.append({})
            continue
        part = keep(StepState(f"{state.id}[{number}]", state.type), output, record.get("kept_from") or run_id)
        kept.append({**part.to_record(), "item": record["item"]})
    return kept if any(kept) else []


def keep(state: StepState, output: Any, run_id: str) -> StepState:
    """Mark a step or an item as succeeded in another run. It took no time and had no effects in this one."""
    state.status, state.output, state.kept_from = Status.SUCCEEDED, output, run_id
    state.side_effects, state.was_paused = SideEffects.NONE, True
    return state


def is_masked(output: Any) -> bool:
    return HIDDEN in as_text(output)
