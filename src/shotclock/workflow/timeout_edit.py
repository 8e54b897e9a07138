"""Changes of timeouts in the text of a workflow file. Everything else in the text stays as it is.

The parser gives the place of each value, and only those characters are replaced, or one line is added. What the edited
text then means is compared with what was wanted.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError
from ruamel.yaml.events import AliasEvent
from ruamel.yaml.nodes import MappingNode, Node, ScalarNode

from ..core.clocks import format_duration
from ..core.value_types import value
from ..providers.provider import STEP_TYPES, Unit
from .history import Advice
from .loader import Loaded, load_text
from .plan import run_timeout_ms, step_timeout_ms
from .schema import WorkflowFile

_STEPS = ("steps", "checks")
SHARED = "it is shared by an anchor or a merge key: edit it by hand"
NOT_ITS_OWN = {
    "defaults": "its timeout is that of `defaults`: edit that, or give the step its own",
    "tool": "its timeout is that of its tool: edit it there",
}


@value
class Edited:
    text: str
    steps: tuple[str | None, ...] = ()  # those whose timeout was changed; None is the run
    notes: tuple[str, ...] = ()  # why the others were not


@value
class _Change:
    start: int
    end: int
    text: str


def edit_timeouts(text: str, loaded: Loaded, advised: Sequence[Advice]) -> Edited:
    """Return the text of a file with the suggested timeouts. One that cannot be edited safely is left, with a note."""
    mark, text = text[: text.startswith("\ufeff")], text.removeprefix("\ufeff")
    notes: list[str] = []
    done: list[str | None] = []
    for advice in advised:
        workflow = loaded.workflow
        if advice.suggested_ms is None or workflow is None:
            continue
        whose = "the run" if advice.step is None else advice.step
        if advice.source in NOT_ITS_OWN:
            notes.append(f"{whose}: {NOT_ITS_OWN[advice.source]}")
            continue
        try:
            change = _find_change(text, workflow, advice, advice.suggested_ms)
        except _Unsafe as unsafe:
            notes.append(f"{whose}: {unsafe}")
            continue
        edited = text[: change.start] + change.text + text[change.end :]
        again = load_text(edited.encode(), loaded.source.name, loaded.source.folder)
        if again.workflow is None or not _is_wanted(workflow, again.workflow, advice):
            notes.append(f"{whose}: its timeout cannot be edited safely: edit it by hand")
            continue
        text, loaded = edited, again
        done.append(advice.step)
    return Edited(mark + text, tuple(done), tuple(notes))


class _Unsafe(Exception):
    """The file cannot be edited here without changing more than one timeout."""


def _find_change(text: str, workflow: WorkflowFile, advice: Advice, wanted_ms: int) -> _Change:
    try:
        root = YAML(typ="safe", pure=True).compose(text)
        aliases = {event.anchor for event in YAML(typ="safe", pure=True).parse(text) if isinstance(event, AliasEvent)}
    except YAMLError:
        raise _Unsafe("the file cannot be read again: edit it by hand") from None
    unit: Unit = "s" if advice.step is None else STEP_TYPES[workflow.steps[advice.step].type].unit
    path = advice.path if advice.source == "file" else (*advice.path, "timeout")
    node: Any = root
    for at, key in enumerate(path):
        entry = _find_entry(node, (*_STEPS,) if key in _STEPS and at == 0 else (key,))
        if entry is None and at == len(path) - 1 and advice.source != "file":
            return _insert(text, node, f"timeout: {format_duration(wanted_ms)}")
        if entry is None:  # it was merged in, or the loader understood another form of the file
            raise _Unsafe(SHARED)
        key_node, found = entry
        if found.start_mark.index < key_node.end_mark.index or (found.anchor is not None and found.anchor in aliases):
            raise _Unsafe(SHARED)
        node = found
    if not isinstance(node, ScalarNode) or node.style not in (None, "'", '"'):
        raise _Unsafe("its timeout is written in several lines: edit it by hand")
    start, end = node.start_mark.index, node.end_mark.index
    written = text[start:end]
    if (node.style is None and written != node.value) or node.anchor is not None:
        raise _Unsafe("its timeout has a tag or an anchor: edit it by hand")
    quote = node.style or ""
    return _Change(start, end, f"{quote}{_in_form_of(str(node.value), wanted_ms, unit)}{quote}")


def _find_entry(node: Any, names: Sequence[str]) -> tuple[Node, Node] | None:
    """Return the own key of a mapping with one of these names, and its value."""
    if not isinstance(node, MappingNode):
        return None
    return next(((key, value) for key, value in node.value if isinstance(key, ScalarNode) and key.value in names), None)


def _in_form_of(written: str, ms: int, unit: Unit) -> str:
    """Return a duration as the author writes it: a number in the unit of the key, ISO 8601, or a number with a unit."""
    plain = written.strip()
    if re.fullmatch(r"[0-9.]+", plain, re.ASCII):
        if unit == "ms":
            return str(ms)
        return str(ms // 1000) if ms % 1000 == 0 else f"{ms / 1000:g}"
    return f"PT{ms / 1000:.15g}S" if plain.startswith("P") else format_duration(ms)


def _insert(text: str, mapping: Node, line: str) -> _Change:
    """Return the insertion of a key: a line behind the first key, or before it if its value has several lines."""
    if not isinstance(mapping, MappingNode) or not mapping.value:
        raise _Unsafe("it has no keys of its own: edit it by hand")
    first, value = mapping.value[0]
    start = first.start_mark.index
    if mapping.flow_style:
        return _Change(start, start, f"{line}, ")
    begin = text.rfind("\n", 0, start) + 1
    indent = text[begin:start]
    if indent.strip(" "):
        raise _Unsafe("its keys begin behind other text: edit it by hand")
    is_short = isinstance(value, ScalarNode) and value.style in (None, "'", '"')
    behind = text.find("\n", value.end_mark.index) + 1 if is_short and value.end_mark.line == first.end_mark.line else 0
    newline = "\r\n" if text[:start].endswith(f"\r\n{indent}") else "\n"
    at = behind or begin
    return _Change(at, at, f"{indent}{line}{newline}")


def _is_wanted(before: WorkflowFile, after: WorkflowFile, advice: Advice) -> bool:
    """Return whether only this timeout differs, and is the suggested one."""
    if advice.step is None:
        is_right = run_timeout_ms(after) == advice.suggested_ms
    else:
        is_right = step_timeout_ms(after, after.steps[advice.step]) == advice.suggested_ms
    path = advice.path if advice.source == "file" else (*advice.path, "timeout")
    return is_right and _without(before, path) == _without(after, path)


def _without(workflow: WorkflowFile, path: Sequence[str]) -> Mapping[str, Any]:
    written = workflow.model_dump(exclude_unset=True)
    node: Any = written
    for key in path[:-1]:
        node = node.get(key)
        if not isinstance(node, dict):
            return written
    node.pop(path[-1], None)
    return written
