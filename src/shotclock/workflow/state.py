"""What can become of a step, and what is kept of it. Whether something failed is a typed status, never text."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import field, fields
from enum import StrEnum
from typing import Any

from ..core.effects import SideEffects, effects_of_all
from ..core.envelope import Warning_
from ..core.records import dataclass
from ..providers.step_type import STEP_TYPES


class Status(StrEnum):
    PENDING = "pending"
    RUNNING = "running"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    TIMED_OUT = "timed_out"
    SKIPPED = "skipped"
    CANCELLED = "cancelled"
    INTERRUPTED = "interrupted"
    PARKED = "parked"
    """Of a run alone: it waits for a person, and no process waits with it."""

    @property
    def is_final(self) -> bool:
        return self not in (Status.PENDING, Status.RUNNING, Status.PARKED)

    @property
    def is_bad(self) -> bool:
        return self in (Status.FAILED, Status.TIMED_OUT, Status.CANCELLED, Status.INTERRUPTED)


class Reason(StrEnum):
    """Why a step was skipped."""

    CONDITION = "condition"
    DEPENDENCY_FAILED = "dependency_failed"
    DEPENDENCY_SKIPPED = "dependency_skipped"
    ON_DEMAND = "on_demand"
    """Only named by `run`, and nothing called for it."""
    RUN_ENDED = "run_ended"


@dataclass(slots=True)
class StepState:
    """A step of a run, as far as it is."""

    id: str
    type: str
    status: Status = Status.PENDING
    reason: Reason | None = None
    cause: str | None = None
    """The step whose failure this goes back to."""
    started_ms: int | None = None
    """Since the run began."""
    duration_ms: int | None = None
    timeout_ms: int | None = None
    attempts: int = 0
    loops: int = 0
    output: Any = None
    error: dict[str, Any] | None = None
    ending: str | None = None
    side_effects: SideEffects | None = None
    """None of one that has not begun, or that nobody knows more of than its status."""
    warnings: list[Warning_] = field(default_factory=list)
    continues: bool = False
    """Its failure does not stop those who wait for it."""
    visit: int = 0
    """How often it was begun anew."""
    calls: int = 0
    """How often it has called for others by `run`."""
    is_called: bool = False
    """A `run` of another step has called for it."""
    is_cut_short: bool = False
    """The run's own clock stopped it."""
    proposal_id: str | None = None
    """Of the approval that it began with, before the run was parked."""
    parts: list[dict[str, Any]] = field(default_factory=list)
    """The records of its items, where the run was parked while some of them waited."""
    used_ms: int = 0
    """What its last try took. Known only while it runs."""

    @property
    def has_passed(self) -> bool:
        return self.status is Status.SUCCEEDED or (self.continues and self.status.is_bad)

    @property
    def effects(self) -> SideEffects:
        """What it may have changed, as far as is known."""
        if self.side_effects is not None:
            return self.side_effects
        is_untouched = self.status in (Status.PENDING, Status.SKIPPED) or (
            self.status is Status.FAILED and not self.attempts
        )
        return SideEffects.NONE if is_untouched else SideEffects.UNKNOWN

    def fresh(self) -> StepState:
        """Return the same step before it has run. How often it sent the run back is not forgotten."""
        return StepState(
            self.id,
            self.type,
            timeout_ms=self.timeout_ms,
            loops=self.loops,
            visit=self.visit,
            calls=self.calls,
            continues=self.continues,
            is_called=self.is_called,
        )

    def put_off(self) -> StepState:
        """Return the same step for when the run goes on: what was done of its items stays done."""
        later = self.fresh()
        later.proposal_id = self.proposal_id if STEP_TYPES[self.type].waits_when_approved else None
        later.parts = self.parts
        later.attempts = self.attempts
        return later

    def to_parked(self) -> StepState:
        """Return the same step where its last try only waited for a person: it will be made when the run goes on."""
        later = self.put_off()
        made = [part.get("attempts", 0) for part in self.parts] or [self.attempts - 1]
        later.attempts = max(0, sum(made))
        if later.attempts or self.type == "workflow":  # what was done of it before
            later.side_effects = SideEffects.UNKNOWN
        return later

    def to_answer(self) -> dict[str, Any]:
        """Return what the envelope shows of it."""
        return {name: value for name in _SHOWN if (value := getattr(self, name)) or name in _ALWAYS_SHOWN}

    def to_record(self) -> dict[str, Any]:
        """Return what the store keeps of it: what differs from a fresh step, because every step is written twice."""
        return {name: value for name in _FIELDS if (value := getattr(self, name)) or name in _ALWAYS_RECORDED}

    @classmethod
    def from_record(cls, record: dict[str, Any]) -> StepState:
        """Raises ValueError or KeyError where another version has written something that is not known here."""
        reason = record.get("reason")
        known = {name: value for name, value in record.items() if name in _FIELDS}
        known |= {"status": Status(record["status"]), "reason": None if reason is None else Reason(reason)}
        if known.get("side_effects") is not None:
            known["side_effects"] = SideEffects(known["side_effects"])
        return cls(**known)


_FIELDS = tuple(field.name for field in fields(StepState) if field.name != "used_ms")
_KEPT_BACK = {"id", "continues", "visit", "calls", "is_called", "is_cut_short", "proposal_id", "parts"}
_SHOWN = tuple(name for name in _FIELDS if name not in _KEPT_BACK)
_ALWAYS_SHOWN = {"status", "duration_ms", "attempts", "output", "error"}
# Nothing, 0, false and empty are different things in these.
_ALWAYS_RECORDED = {"started_ms", "duration_ms", "timeout_ms", "output"}


def lists_of(states: Mapping[str, StepState]) -> dict[str, list[str]]:
    """Return the steps by what became of them, each in exactly one list. `pending` is only there where the run is not
    over."""
    lists: dict[str, list[str]] = {"completed": [], "failed": [], "skipped": [], "pending": []}
    for name, state in states.items():
        if state.status.is_bad:
            lists["failed"].append(name)
        else:
            lists[_LISTS.get(state.status, "pending")].append(name)
    if not lists["pending"]:
        del lists["pending"]
    return lists


_LISTS = {Status.SUCCEEDED: "completed", Status.SKIPPED: "skipped"}


def effects_of(states: Iterable[StepState]) -> SideEffects:
    """Return the side effects of all these steps together."""
    states = list(states)
    is_well = all(state.status in (Status.SUCCEEDED, Status.SKIPPED) for state in states)
    return effects_of_all((state.effects for state in states), ended_well=is_well)
