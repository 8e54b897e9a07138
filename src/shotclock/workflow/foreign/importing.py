"""The import of a file: read it, recognise it, convert it, and check what came of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ...core.errors import Failure
from ...core.value_types import value
from ..loader import SIZE_LIMIT, Loaded, load_file, try_load
from ..yaml_reader import Tree, read_tree
from .recognise import KINDS, kind_of
from .result import Imported, Note
from .writer import describe, find_errors, text_of, with_header

SHOWN_ERRORS = 5


@value
class ImportedText:
    """An imported workflow as the text of a file."""

    kind: str
    text: str
    notes: tuple[Note, ...]
    failing: tuple[str, ...] = ()  # names of steps

    def to_answer(self) -> list[dict[str, Any]]:
        """Return the notes as JSON."""
        return [
            {
                "line": note.line,
                "key": note.key,
                "message": note.message,
                "lost": note.is_lost,
                "fails": note.is_failing,
            }
            for note in self.notes
        ]


def import_file(file: str, kind: str | None = None) -> ImportedText:
    """Return a foreign file as a workflow of ours that passes `check`. Raises Failure where that is not possible."""
    if file == "-":
        hint = "write it to a file: paths in it are relative to its folder, and the notes name its lines"
        raise Failure("ARG_ERROR", "stdin is not read", suggestion=hint)
    path = Path(file)
    tree = _read(path)
    recognised = kind_of(tree.value, file)
    found = kind or recognised
    if found is None:
        raise _not_recognised(path)
    if recognised is not None and found != recognised:
        tool, other = KINDS[recognised].tool, KINDS[found].tool
        raise _refused(f"{path}: is a file of {tool}, and not of {other}", "leave out --kind")
    return _accepted(_convert(tree, file, found), path)


def _read(path: Path) -> Tree:
    # The loader bounds the size, and refuses pipes, devices and what is not UTF-8.
    loaded = try_load(path)
    if isinstance(loaded, Failure):
        raise loaded
    unreadable = [found for found in loaded.findings if found.rule in ("file/size", "file/encoding")]
    if unreadable:
        raise _refused(f"{path}: {unreadable[0].message}")
    with open(path, "rb") as file:
        data = file.read(SIZE_LIMIT + 1)
    tree = read_tree(data[:SIZE_LIMIT].decode("utf-8-sig", "replace"))
    if tree.flaws:
        flaw = tree.flaws[0]
        where = f"{path}:{flaw.place.line}:{flaw.place.column}"
        if path.suffix not in (".yml", ".yaml", ".json"):
            raise _refused(f"{where}: {flaw.message}", f"not supported: name a file of {_known_tools()}")
        raise _refused(f"{where}: {flaw.message}", flaw.suggestion)
    if not isinstance(tree.value, dict):
        raise _refused(
            f"{path}: {'is empty' if tree.value is None else 'is no mapping'}", f"name a file of {_known_tools()}"
        )
    return tree


def _convert(tree: Tree, file: str, kind: str) -> Imported:
    try:
        imported = KINDS[kind].convert(tree, file)
    except RecursionError:
        raise _refused(f"{file}: it is nested too deep to be converted") from None
    if imported.document is None:
        raise _refused(f"{file}: {imported.refusal or 'it cannot be converted'}", notes=imported.notes)
    return imported


def _accepted(imported: Imported, path: Path) -> ImportedText:
    """Return the text of the workflow, if it passes the check."""
    try:
        text = text_of(imported.document or {})
    except ValueError as error:
        raise _refused(f"{path}: {error}", notes=imported.notes) from None
    wrong = find_errors(text, path.absolute().parent)
    if wrong:
        listed = "; ".join(f"{found.field}: {found.message}" for found in wrong[:SHOWN_ERRORS])
        more = f"; and {len(wrong) - SHOWN_ERRORS} more" if len(wrong) > SHOWN_ERRORS else ""
        message = f"{path}: the imported workflow would not pass `shotclock check`: {listed}{more}"
        raise _refused(message, notes=imported.notes)
    whole = with_header(text, str(path), imported.kind, imported.notes)
    return ImportedText(imported.kind, whole, imported.notes, imported.failing)


def _not_recognised(path: Path) -> Failure:
    try:
        loaded: Loaded | None = load_file(path)
    except OSError:
        loaded = None
    if loaded is not None and loaded.workflow is not None:
        return _refused(f"{path}: is a workflow of shotclock already", f"run it with `shotclock run {path}`")
    hint = f"other tools are not supported; if it is one of these, name its kind: --kind {'|'.join(KINDS)}"
    return _refused(f"{path}: is not recognised as a file of {_known_tools()}", hint)


def _known_tools() -> str:
    return ", ".join(kind.tool for kind in KINDS.values())


def _refused(message: str, suggestion: str | None = None, notes: tuple[Note, ...] = ()) -> Failure:
    errors = [{"field": note.key or "file", "message": describe(note)} for note in notes]
    context = {"errors": errors} if errors else {}
    hint = "correct what error.errors lists" if errors else "change this in the file, then call again"
    return Failure("WORKFLOW_INVALID", message, suggestion=suggestion or hint, context=context)
