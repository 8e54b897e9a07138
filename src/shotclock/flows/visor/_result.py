"""The result of importing a file of Visor: a workflow of ours and the notes on what differs."""

from __future__ import annotations

from typing import Any

from ...core.value_types import field, record, value
from ..file.yaml_reader import Tree


@value
class Note:
    """A part of the Visor file that was left out, or that means something slightly different here."""

    line: int
    key: str  # the path of the key in the Visor file, such as `steps.build.group`
    message: str
    is_lost: bool = True  # False if it was carried over with a difference
    is_failing: bool = False  # a step fails instead of running


@value
class Imported:
    """A Visor file as a workflow of ours. A refused file has no document."""

    document: dict[str, Any] | None
    notes: tuple[Note, ...] = ()
    refusal: str | None = None
    failing: tuple[str, ...] = ()  # the steps that fail, because they could not be converted


@record
class ImportNotes:
    tree: Tree
    written: list[Note] = field(default_factory=list)

    def add(self, path: tuple[str | int, ...], message: str, *, is_lost: bool = True, is_failing: bool = False) -> None:
        """Add a note on the key at `path`, or on its nearest existing parent."""
        spot = self.tree.spots
        for part in path:
            if part not in spot.inside:
                break
            spot = spot.inside[part]
        self.written.append(Note(spot.place.line, ".".join(map(str, path)), message, is_lost, is_failing))

    def in_order(self) -> tuple[Note, ...]:
        return tuple(sorted(self.written, key=lambda note: (not note.is_failing, note.line)))
