"""Ending of the work (`Ending`), what it may have changed (`SideEffects`), and whether to try again."""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum


class Ending(StrEnum):
    FINISHED = "finished"
    KILLED = "killed"
    CANCELLED = "cancelled"
    ABANDONED = "abandoned"
    NOT_STARTED = "not_started"
    DETACHED = "detached"


class SideEffects(StrEnum):
    NONE = "none"
    PARTIAL = "partial"
    COMPLETE = "complete"
    UNKNOWN = "unknown"


def side_effects_of(*, ending: Ending, ok: bool, mutates: bool) -> SideEffects:
    """Return what can honestly be said. Work that mutates and did not end well may have done anything."""
    if ending is Ending.NOT_STARTED or not mutates:
        return SideEffects.NONE
    if ok and ending is Ending.FINISHED:
        return SideEffects.COMPLETE
    return SideEffects.UNKNOWN


def effects_of_all(parts: Iterable[SideEffects], *, ended_well: bool) -> SideEffects:
    """Return what several pieces of work did together: no more is claimed than of the worst known of them."""
    seen = set(parts)
    for worse in (SideEffects.UNKNOWN, SideEffects.PARTIAL):
        if worse in seen:
            return worse
    if SideEffects.COMPLETE not in seen:
        return SideEffects.NONE
    return SideEffects.COMPLETE if ended_well else SideEffects.PARTIAL


def may_retry(*, registered: bool, effects: SideEffects, mutates: bool, idempotent: bool) -> bool:
    """Return whether to try again: the registry's word, lowered where a repeat could do the same thing twice. Never
    raised."""
    may_have_changed = effects is not SideEffects.NONE
    return registered and not (mutates and not idempotent and may_have_changed)
