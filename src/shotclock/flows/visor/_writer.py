"""The writer of imported workflows: readable YAML, with the notes as comments at the top."""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.comments import CommentedMap, CommentedSeq
from ruamel.yaml.scalarstring import LiteralScalarString

from ...core.limits import WORK_CLOCKS
from ...core.value_types import JsonObject
from ..check.lint import lint
from ..file.loader import Finding, load_text
from ..file.yaml_reader import read_tree
from ._visor_file import Note

# The order of keys, as the pages of docs/ write them. Keys that are not here follow in their own order.
_FILE_KEYS = ["version", "name", "id", "description", "timeout", "max_parallelism", "fail_fast", "concurrency"]
_FILE_KEYS += ["env", "env_file", "inputs", "defaults", "tools", "steps", "checks", "finally", "outputs"]
_STEP_KEYS = ["id", "name", "type", "description", "tags", "depends_on", "needs", "accept_skipped", "if"]
_STEP_KEYS += ["for_each", "matrix", "exec", "shell", "stdin", "output_format", "url", "method", "headers"]
_STEP_KEYS += ["params", "body", "command", "args", "arguments", "tool", "workflow", "inputs", "repository"]
_STEP_KEYS += ["ref", "path", "prompt", "prompt_file", "placeholder", "default", "choices", "multiline"]
_STEP_KEYS += ["allow_empty", "ai", "cwd", "env", "env_file", "clone_timeout_ms", *WORK_CLOCKS, "fail_if"]
_STEP_KEYS += ["transform", "output_schema", "continue_on_failure", "on_success", "on_fail", "approval"]
_MAPPINGS_OF_STEPS = ("steps", "checks", "finally")
# A list of short plain values is written in one line.
SHORT_LIST, LINE = 6, 90
COMMENT_LIMIT = 400  # characters of a note
# What depends on the machine, and not on the file.
_OF_THIS_MACHINE = frozenset({"ai/key", "ai/extra", "env/file", "function/missing"})


def text_of(document: JsonObject) -> str:
    """Return a workflow as YAML. Raises ValueError where the text would not be read as the same values."""
    writer = YAML()
    writer.indent(mapping=2, sequence=4, offset=2)
    writer.width = 1 << 16  # a line of the file stays a line
    writer.allow_unicode = True
    out = io.StringIO()
    try:
        made: JsonObject = _sort(document, _FILE_KEYS)
        for key in _MAPPINGS_OF_STEPS:
            steps = made.get(key)
            if isinstance(steps, dict):
                made[key] = {name: _sort(step, _STEP_KEYS) for name, step in steps.items()}
            elif isinstance(steps, list):
                made[key] = [_sort(step, _STEP_KEYS) for step in steps]
        writer.dump(_laid_out(made), out)
    except Exception as error:
        raise ValueError(f"it cannot be written as YAML: {str(error)[:200]}") from None
    read = read_tree(out.getvalue())
    if read.flaws or read.value != document:
        flaw = read.flaws[0].message if read.flaws else "a value would be read differently"
        raise ValueError(f"it cannot be written as YAML that is read alike: {flaw}")
    return out.getvalue()


def with_header(text: str, file_name: str, notes: tuple[Note, ...]) -> str:
    """Return the text with comments that name its source and its notes."""
    return "".join(f"{line}\n" for line in (*_header(file_name, notes), "")) + text


def find_errors(text: str, folder: Path) -> list[Finding]:
    """Return the errors that `shotclock check` would report of this text, those of this machine aside."""
    loaded = load_text(text.encode("utf-8", "surrogatepass"), "the imported workflow", folder)
    return [found for found in lint(loaded) if found.is_error and found.rule not in _OF_THIS_MACHINE]


def describe(note: Note) -> str:
    text = f"line {note.line}: {note.key}: {note.message}" if note.key else f"line {note.line}: {note.message}"
    printable = "".join(each if each.isprintable() else " " for each in text)
    return printable if len(printable) <= COMMENT_LIMIT else f"{printable[:COMMENT_LIMIT]}…"


def _header(file_name: str, notes: tuple[Note, ...]) -> Iterator[str]:
    shown = "".join(each if each.isprintable() else "?" for each in Path(file_name).name)
    yield f"# Imported from {shown} by shotclock import."
    failing = [note for note in notes if note.is_failing]
    lost = [note for note in notes if note.is_lost and not note.is_failing]
    different = [note for note in notes if not note.is_lost]
    for title, listed in (("Fails instead:", failing), ("Left out:", lost), ("Different here:", different)):
        if listed:
            yield "#"
            yield f"# {title}"
            yield from (f"#   {describe(note)}" for note in listed)


def _sort(part: Any, order: list[str]) -> Any:
    if not isinstance(part, dict):
        return part
    return {key: part[key] for key in (*(key for key in order if key in part), *(k for k in part if k not in order))}


def _laid_out(value: Any) -> Any:
    if isinstance(value, dict):
        return CommentedMap((str(key), _laid_out(each)) for key, each in value.items())
    if isinstance(value, list):
        made = CommentedSeq(_laid_out(each) for each in value)
        is_plain = all(each is None or isinstance(each, bool | int | float | str) for each in value)
        if is_plain and len(value) <= SHORT_LIST and sum(len(str(each)) for each in value) < LINE:
            made.fa.set_flow_style()
        return made
    if isinstance(value, str) and "\n" in value and not _needs_quotes(value):
        return LiteralScalarString(value)
    return value


def _needs_quotes(text: str) -> bool:
    """Return whether a block of lines would lose something: spaces at its start, or characters that YAML escapes."""
    if text[0] in " \n\t" or text.endswith(("\n\n", " \n")):
        return True
    return any(not (each.isprintable() or each == "\n") for each in text)
