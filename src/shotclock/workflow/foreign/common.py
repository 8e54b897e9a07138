"""What the converters share: the draft of a workflow, its check, and text of another language in templates of ours."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

from ...core.value_types import field, record
from ...core.visible_text import looks_secret
from ..loader import Finding
from ..schema import STEP_NAME_LIMIT
from ..yaml_reader import Tree, quote
from .result import Imported, ImportNotes
from .writer import find_errors

STEPS_LIMIT = 300
CHECKS_LIMIT = 5  # a refused step may leave another mistake
NOWHERE = Path("/nonexistent")  # files beside the workflow are not looked at

ForeignPath = tuple[str | int, ...]


class FileRefused(Exception):
    """The whole file cannot be converted."""


class Unconvertible(Exception):
    """A value that cannot be said here, with the reason as a clause: `reads github.event`."""


@record
class Draft:
    """A workflow that is being written, and what is noted about it."""

    kind: str
    tree: Tree
    notes: ImportNotes
    top: dict[str, Any] = field(default_factory=dict)
    steps: dict[str, dict[str, Any]] = field(default_factory=dict)
    final: dict[str, dict[str, Any]] = field(default_factory=dict)  # of `finally`
    paths: dict[str, ForeignPath] = field(default_factory=dict)
    said: set[tuple[ForeignPath, str]] = field(default_factory=set)
    refused: list[str] = field(default_factory=list)  # names of steps

    def lose(self, path: ForeignPath, message: str, *, is_failing: bool = False) -> None:
        if (path, message) not in self.said:
            self.said.add((path, message))
            self.notes.add(path, message, is_failing=is_failing)

    def differ(self, path: ForeignPath, message: str) -> None:
        """Note a small difference, each once."""
        if ((), message) not in self.said:
            self.said.add(((), message))
            self.notes.add(path, message, is_lost=False)

    def name(self, wanted: str) -> str:
        """Return a name that no step has."""
        made = slug(wanted)
        for number in range(2, STEPS_LIMIT + 3):
            if made not in self.steps and made not in self.final:
                break
            made = f"{slug(wanted)}-{number}"
        return made

    def add(self, name: str, step: dict[str, Any], path: ForeignPath) -> str:
        if len(self.steps) >= STEPS_LIMIT:
            raise FileRefused(f"it becomes more than {STEPS_LIMIT} steps; split it first")
        self.steps[name], self.paths[name] = step, path
        return name

    def refuse_step(self, name: str, reason: str) -> None:
        """Put a command in place of a step that fails with the reason, so that nothing runs as if it had succeeded."""
        step = self.steps[name] if name in self.steps else self.final[name]
        kept: dict[str, Any] = {key: step[key] for key in ("depends_on", "accept_skipped", "if") if key in step}
        text = " ".join(f"this step was not converted: {reason}".split())[:300]
        made: dict[str, Any] = {**kept, "exec": literal(f"echo {shlex.quote(text)} >&2\nexit 1")}
        if name in self.steps:
            self.steps[name] = made
        else:
            self.final[name] = made
        self.refused.append(name)
        self.lose(self.paths[name], f"was not converted, and fails instead: {reason}", is_failing=True)

    def document(self) -> dict[str, Any]:
        made = {key: value for key, value in self.top.items() if value or isinstance(value, int)}
        made["steps"] = self.steps
        return {**made, "finally": self.final} if self.final else made


def new_draft(kind: str, tree: Tree) -> Draft:
    if not tree.is_whole or not isinstance(tree.value, dict):
        raise FileRefused("it is no mapping")
    if tree.flaws:
        flaw = tree.flaws[0]
        raise FileRefused(f"line {flaw.place.line}: {flaw.message}")
    return Draft(kind, tree, ImportNotes(tree))


def converted(kind: str, draft_of: Callable[[Tree, str], Draft], tree: Tree, file_name: str) -> Imported:
    """Return the file if it can be drafted and passes the checker."""
    try:
        return checked(draft_of(tree, file_name))
    except FileRefused as refused:
        return Imported(kind, None, (), str(refused))
    except Unconvertible as reason:
        return Imported(kind, None, (), f"it {reason}")


def checked(draft: Draft) -> Imported:
    """Return the file if it passes the checker. A step with a mistake fails instead of running."""
    for _ in range(CHECKS_LIMIT):
        if not draft.steps:
            return Imported(draft.kind, None, draft.notes.in_order(), "nothing in it can be run")
        errors = _errors_in(draft.document())
        if not errors:
            failing = [name for name in dict.fromkeys(draft.refused) if name in draft.steps or name in draft.final]
            return Imported(draft.kind, draft.document(), draft.notes.in_order(), failing=tuple(failing))
        elsewhere = [each for each in errors if not _is_of_step(each, draft)]
        if elsewhere:
            reason = f"{elsewhere[0].field}: {elsewhere[0].message}"
            return Imported(draft.kind, None, draft.notes.in_order(), reason)
        for name, found in {str(each.path[1]): each for each in reversed(errors)}.items():
            step = draft.steps[name] if name in draft.steps else draft.final[name]
            if "if" in found.path[2:]:
                step.pop("if", None)
            draft.refuse_step(name, found.message)
    return Imported(draft.kind, None, draft.notes.in_order(), "what it becomes does not pass the checker")


def _errors_in(document: Mapping[str, Any]) -> list[Finding]:
    """Return the mistakes in a workflow. JSON is YAML, too."""
    if not _has_text_keys(document):  # JSON would make them texts
        return [Finding("file/encoding", "a key must be text")]
    try:
        text = json.dumps(document, ensure_ascii=False, allow_nan=False)
        text.encode()
    except ValueError as error:  # half a character, or a number that is none
        return [Finding("file/encoding", f"cannot be written: {error}")]
    return find_errors(text, NOWHERE)


def _has_text_keys(part: object) -> bool:
    if isinstance(part, Mapping):
        return all(isinstance(key, str) and _has_text_keys(item) for key, item in part.items())
    return all(map(_has_text_keys, part)) if isinstance(part, list | tuple) else True


def _is_of_step(found: Finding, draft: Draft) -> bool:
    named = len(found.path) > 1 and found.path[0] in ("steps", "finally")
    return named and str(found.path[1]) in {**draft.steps, **draft.final} and found.path[2:3] != ("depends_on",)


# --- text -----------------------------------------------------------------------------------------------


def slug(text: str) -> str:
    """Return text as the name of a step."""
    made = re.sub(r"[^A-Za-z0-9_.-]+", "-", text).strip("-.")[: STEP_NAME_LIMIT - 10] or "step"
    return made if re.match(r"[A-Za-z_]", made) else f"step-{made}"


_OPENING = re.compile(r"\{\{|\{%")


def literal(text: str) -> str:
    """Return text in which nothing is a template of ours."""
    made = _OPENING.sub(lambda found: f"{{% raw %}}{found[0]}{{% endraw %}}", text)
    # Joined with a template behind it, a last brace would open another one.
    return f"{made[:-1]}{{% raw %}}{{{{% endraw %}}" if made.endswith("{") else made


def literal_variable(text: str) -> str:
    """Return text of an `env` in which nothing is a template or a `${NAME}` of ours."""
    return re.sub(r"\$(?=\{[A-Za-z_])", "{{ '$' }}", literal(text))


def in_quotes(text: str) -> str:
    """Return text as a literal of a template. Raises Unconvertible if it has both quotation marks."""
    if "'" in text and '"' in text:
        raise Unconvertible("has text with both quotation marks in an expression")
    made = text.replace("\\", "\\\\").replace("\n", "\\n").replace("\t", "\\t").replace("\r", "\\r")
    return f'"{made}"' if "'" in text else f"'{made}'"


def is_scalar(value: object) -> bool:
    return value is None or isinstance(value, str | int | float)


def scalar_text(value: Any) -> str:
    """Return a value of YAML as the text that a variable has."""
    if isinstance(value, bool):
        return "true" if value else "false"
    return "" if value is None else str(value)


def output_of(name: str, *parts: str) -> str:
    """Return the expression for an output."""
    return f"outputs['{name}']" + "".join(f".{part}" if part.isidentifier() else f"['{part}']" for part in parts)


def both(*conditions: str | None) -> str | None:
    """Return a condition that holds where all do."""
    found = list(dict.fromkeys(each for each in conditions if each))
    if len(found) < 2:
        return found[0] if found else None
    return " and ".join(f"({each})" for each in found)


# --- keys of any type -----------------------------------------------------------------------------------


def mapping_at(holder: Mapping[str, Any], key: str) -> dict[str, Any]:
    """Return a mapping, empty if there is none. Raises Unconvertible."""
    value = holder.get(key)
    if value is not None and not isinstance(value, dict):
        raise Unconvertible(f"has `{key}`, which is no mapping: {quote(value)}")
    return value or {}


def text_at(draft: Draft, holder: Mapping[str, Any], key: str, path: ForeignPath) -> str | None:
    """Return a text, or none with a note."""
    value = holder.get(key)
    if isinstance(value, bool | dict | list):
        draft.lose((*path, key), f"should be text, and is {quote(value)}")
        return None
    return None if value is None else scalar_text(value)


def list_at(holder: Mapping[str, Any], key: str) -> list[Any]:
    """Return a list, of one if it is a single value. Raises Unconvertible."""
    value = holder.get(key)
    if isinstance(value, dict):
        raise Unconvertible(f"has `{key}`, which is no list: {quote(value)}")
    return [] if value is None else value if isinstance(value, list) else [value]


def note_unknown(
    draft: Draft, holder: Mapping[str, Any], known: set[str], path: ForeignPath, why: Mapping[str, str]
) -> None:
    """Note each key that is not carried over, with the reason if there is one."""
    for key in holder:
        if key in why:
            draft.lose((*path, key), why[key])
        elif key not in known:
            draft.lose((*path, key), "is not known here, and was left out")


def secrets_in(script: str, known: Collection[str]) -> dict[str, str]:
    """Return the `env` that hands on the secrets of the environment that a command names."""
    named = dict.fromkeys(_VARIABLE.findall(script))
    return {name: f"${{{name}-}}" for name in named if name not in known and looks_secret(name)}


_VARIABLE = re.compile(r"\$\{?([A-Za-z_][A-Za-z0-9_]*)")
