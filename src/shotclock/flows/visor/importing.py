"""The import of a file of Visor: read it, convert it, and check the result."""

from __future__ import annotations

from pathlib import Path

from ...core.errors import Failure
from ...core.value_types import JsonObject, value
from ..file.loader import SIZE_LIMIT, try_load
from ..file.yaml_reader import Tree, read_tree
from ._visor import convert, looks_like
from ._visor_file import Imported, Note
from ._writer import describe, find_errors, text_of, with_header

SHOWN_ERRORS = 5
ONLY_VISOR = "name a file of Visor: files of other tools are not supported"


@value
class ImportedText:
    text: str
    notes: tuple[Note, ...]
    failing: tuple[str, ...] = ()  # names of steps

    def to_answer(self) -> list[JsonObject]:
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


def import_file(file: str) -> ImportedText:
    """Return a file of Visor as a workflow of ours that passes `check`. Raises Failure where that is not possible."""
    if file == "-":
        hint = "write it to a file: paths in it are relative to its folder, and the notes name its lines"
        raise Failure("ARG_ERROR", "stdin is not read", suggestion=hint)
    path = Path(file)
    return _accepted(_convert(_read(path), file), path)


def is_of_visor(path: Path) -> bool:
    """Return whether a file on disk can be read and has keys of Visor that are not ours."""
    try:
        if not path.is_file() or path.stat().st_size > SIZE_LIMIT:
            return False
        return looks_like(read_tree(path.read_text("utf-8-sig")).value, str(path))
    except (OSError, ValueError):
        return False


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
        hint = flaw.suggestion if path.suffix in (".yml", ".yaml", ".json") else ONLY_VISOR
        raise _refused(f"{where}: {flaw.message}", hint)
    return tree


def _convert(tree: Tree, file: str) -> Imported:
    try:
        imported = convert(tree, file)
    except RecursionError:
        raise _refused(f"{file}: it is nested too deep to be converted") from None
    if imported.document is None:
        hint = None if imported.notes else ONLY_VISOR
        raise _refused(f"{file}: {imported.refusal or 'it cannot be converted'}", hint, imported.notes)
    return imported


def _accepted(imported: Imported, path: Path) -> ImportedText:
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
    return ImportedText(with_header(text, str(path), imported.notes), imported.notes, imported.failing)


def _refused(message: str, suggestion: str | None = None, notes: tuple[Note, ...] = ()) -> Failure:
    errors = [{"field": note.key or "file", "message": describe(note)} for note in notes]
    context = {"errors": errors} if errors else {}
    hint = "correct what error.errors lists" if errors else "change this in the file, then call again"
    return Failure("WORKFLOW_INVALID", message, suggestion=suggestion or hint, context=context)
