"""Recognise the workflow file of another tool, by its content and its name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from ..loader import SIZE_LIMIT
from ..yaml_reader import Tree, read_tree
from . import actions, dagu, taskfile, visor
from .result import Imported


class ForeignKind(NamedTuple):
    """A kind of file that can be imported."""

    tool: str  # its name for people
    looks_like: Callable[[Any, str], bool]
    convert: Callable[[Tree, str], Imported]


KINDS: dict[str, ForeignKind] = {
    "visor": ForeignKind("Visor", visor.looks_like, visor.convert),
    "actions": ForeignKind("GitHub Actions", actions.looks_like, actions.convert),
    "taskfile": ForeignKind("Task", taskfile.looks_like, taskfile.convert),
    "dagu": ForeignKind("Dagu", dagu.looks_like, dagu.convert),
}


def kind_of(document: Any, file_name: str) -> str | None:
    """Return the kind of a file, or None if it is none of them."""
    if not isinstance(document, dict):
        return None
    return next((name for name, kind in KINDS.items() if kind.looks_like(document, file_name)), None)


def kind_of_file(path: Path) -> str | None:
    """Return the kind of a file on disk, or None if it cannot be read or is none of them."""
    try:
        if not path.is_file() or path.stat().st_size > SIZE_LIMIT:
            return None
        return kind_of(read_tree(path.read_text("utf-8-sig")).value, str(path))
    except (OSError, ValueError):
        return None
