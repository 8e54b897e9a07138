"""The file of Visor on its way: its texts, durations, variables and reactions, and the notes on what differs."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ...core.value_types import JsonObject, field, record, replace, value
from ..file.yaml_reader import Tree
from ._conditions import condition
from ._expression import NameScope, Unsayable, literal
from ._liquid import is_liquid, template

Path_ = tuple[str | int, ...]
_REFERENCE = re.compile(r"\$\{\{\s*env\.([A-Za-z_]\w*)\s*\}\}|\$\{([A-Za-z_]\w*)\}|\$([A-Z_][A-Z0-9_]*)")
_HOLE = re.compile(r'"[^"{]*"|\{\{-?([\s\S]*?)-?\}\}')
_QUOTED = re.compile(r"\"[^\"]*\"|'[^']*'")
_JSON_FILTER = re.compile(r"\|\s*(?:json|to_json)\s*$")
SECONDS_BELOW = 1000  # a bare number of a command below this is in seconds

STRICT = (
    "where Visor takes a name that is missing for empty, and a condition that cannot be evaluated for false, the step "
    "fails here (TEMPLATE_FAILED)"
)
ONE_WORD = "a value in a command is one word here, with its spaces: write a loop where several words are meant"


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

    document: JsonObject | None
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


@record
class VisorFile:
    key: str  # `steps` or `checks`
    document: JsonObject
    scope: NameScope
    notes: ImportNotes
    folder: Path
    failing: set[str] = field(default_factory=set)  # steps that could not be converted
    said: set[str] = field(default_factory=set)

    @property
    def steps(self) -> JsonObject:
        steps: JsonObject = self.document[self.key]
        return steps

    def note_once(self, path: Path_, message: str) -> None:
        """Note a difference that holds for the whole file, at its first place."""
        if message not in self.said:
            self.said.add(message)
            self.notes.add(path, message, is_lost=False)

    # --- templates and conditions: None where they cannot be converted, which is noted

    def text(
        self, path: Path_, written: Any, *, scope: NameScope | None = None, is_command: bool = False
    ) -> str | None:
        """Return a text with Liquid in it."""
        if isinstance(written, bool) or not isinstance(written, str | int | float):
            self.notes.add(path, "it should be text")
            return None
        source = str(written)
        try:
            made = template(source, scope or self.scope, is_command=is_command)
        except Unsayable as why:
            self.notes.add(path, f"its template cannot be said here: {why}")
            return None
        if is_liquid(source):
            self.note_once(path, STRICT)
            if is_command and "{{" in _QUOTED.sub("", source):
                self.note_once(path, ONE_WORD)
        return made

    def condition(self, path: Path_, written: Any, scope: NameScope) -> str | None:
        if isinstance(written, bool):
            return "true" if written else "false"
        if not isinstance(written, str) or not written.strip():
            self.notes.add(path, "it should be an expression")
            return None
        try:
            made = condition(written, scope)
        except Unsayable as why:
            self.notes.add(path, f"this condition cannot be converted: {why}")
            return None
        self.note_once(path, STRICT)
        return made

    def transform(self, path: Path_, written: Any, scope: NameScope) -> str | None:
        """Return a Liquid transform, whose text Visor reads as JSON, as one expression."""
        if not isinstance(written, str):
            self.notes.add(path, "it should be text")
            return None
        source = written.strip()
        try:
            if "{%" not in source and source[:1] in ("{", "["):
                return f"{{{{ {_json_expression(source, scope)} }}}}"
            if "{%" in source and source[:1] in ("{", "["):
                raise Unsayable("JSON with blocks in it")
            return template(_JSON_FILTER.sub("", source[:-2]) + source[-2:], scope)
        except Unsayable as why:
            self.notes.add(path, f"its template cannot be said here: {why}")
            return None

    def values(self, path: Path_, written: Any) -> Any:
        """Return a value with Liquid in its texts. Raises Unsayable."""
        if isinstance(written, str):
            made = self.text(path, written)
            if made is None:
                raise Unsayable("a value with a template that cannot be said here")
            return made
        if isinstance(written, dict):
            return {key: self.values((*path, key), each) for key, each in written.items()}
        if isinstance(written, list):
            return [self.values((*path, number), each) for number, each in enumerate(written)]
        return written

    # --- other parts

    def duration(self, path: Path_, written: Any, unit: str) -> str | None:
        """Return a duration with its unit: `ms`, `s`, or `either`, where Visor's pages and its code differ."""
        if written is None:
            return None
        if isinstance(written, str) and written.strip().isdecimal():
            written = int(written)
        if isinstance(written, bool) or not isinstance(written, int) or written <= 0 or written > 10**11:
            self.notes.add(path, "it should be a number above 0; the default holds")
            return None
        if unit == "either":
            unit = "s" if written < SECONDS_BELOW else "ms"
            read = "seconds" if unit == "s" else "milliseconds"
            self.notes.add(path, f"read as {read}: Visor's pages and its code differ in the unit", is_lost=False)
        if unit == "ms" and written % 1000 == 0:
            return f"{written // 1000}s"
        return f"{written}{unit}"

    def env(self, path: Path_, written: Any) -> JsonObject:
        made: JsonObject = {}
        if not isinstance(written, dict):
            self.notes.add(path, "it should be a mapping")
            return made
        for name, each in written.items():
            if not isinstance(each, str | int | float | bool):
                self.notes.add((*path, name), "a variable is a text, a number, true or false")
                continue
            if isinstance(each, str):
                each = _REFERENCE.sub(lambda found: f"${{{found[1] or found[2] or found[3]}}}", each)
                if is_liquid(each):
                    each = self.text((*path, name), each)
                    if each is None:
                        continue
            made[name] = each
        return made

    def reaction(self, path: Path_, written: Any, *, is_failure: bool, of: str | None = None) -> JsonObject:
        made: JsonObject = {}
        if not isinstance(written, dict):
            self.notes.add(path, "it should be a mapping")
            return made
        for key, part in written.items():
            here = (*path, key)
            if key == "retry" and is_failure:
                if (retry := self._retry(here, part)) is not None:
                    made["retry"] = retry
            elif key == "run":
                names = [name for name in self._names(here, part) if self._is_step(here, name)]
                if names:
                    made["run"] = names
                    if is_failure:
                        what = "the steps run here, and the failed step is not tried again after them"
                        self.notes.add(here, what, is_lost=False)
            elif key == "goto":
                if isinstance(part, str) and self._is_step(here, part):
                    if of is not None and part != of and part not in self.ancestors(of):
                        self.notes.add(here, f"a step goes back only to one that it waits for, and not to `{part}`")
                    else:
                        made["goto"] = part
            else:
                self.notes.add(here, _REACTIONS.get(key, "there is nothing like it here"))
        return made

    def ancestors(self, name: str) -> set[str]:
        found: set[str] = set()
        left = [name]
        while left:
            for each in self.dependencies(left.pop()):
                if each not in found:
                    found.add(each)
                    left.append(each)
        return found

    def lists_before(self, name: str) -> set[str]:
        """Return the steps with `forEach` that a step waits for: it runs once for each of their items."""
        return {each for each in self.dependencies(name) if self.steps[each].get("forEach") is True}

    def dependencies(self, name: str) -> Iterator[str]:
        """Yield the steps that a step waits for, as far as they are there."""
        written = self.steps.get(name, {}).get("depends_on")
        for each in [written] if isinstance(written, str) else written if isinstance(written, list) else ():
            if isinstance(each, str):
                yield from (part.strip() for part in each.split("|") if part.strip() in self.steps)

    def _names(self, path: Path_, written: Any) -> Iterator[str]:
        for number, each in enumerate([written] if isinstance(written, str) else written or ()):
            if isinstance(each, str):
                yield each
            elif isinstance(each, dict) and set(each) == {"step"} and isinstance(each["step"], str):
                yield each["step"]
            else:
                self.notes.add((*path, number), "only steps of this file can be run, without values for them")

    def _is_step(self, path: Path_, name: str) -> bool:
        if name not in self.steps:
            self.notes.add(path, f"the file has no step `{name[:60]}`")
        return name in self.steps

    def _retry(self, path: Path_, written: Any) -> JsonObject | None:
        most = written.get("max") if isinstance(written, dict) else None
        if isinstance(most, bool) or not isinstance(most, int) or not 0 <= most <= 1000:
            self.notes.add(path, "`max` should be a number from 0 to 1000")
            return None
        made: JsonObject = {"max": most}
        backoff = written.get("backoff")
        if isinstance(backoff, dict):
            part: JsonObject = {}
            if backoff.get("mode") in ("fixed", "exponential"):
                part["mode"] = backoff["mode"]
            delay = backoff.get("delay_ms")
            if isinstance(delay, int) and not isinstance(delay, bool) and 0 <= delay < 10**10:
                part["delay_ms"] = delay
            if part:
                made["backoff"] = part
        elif backoff is None:
            made["backoff"] = {"delay_ms": 0}  # Visor tries again at once
        return made


_REACTIONS = {
    "goto_js": "a step that is computed cannot be gone to: `goto` names one",
    "run_js": "steps that are computed cannot be run: `run` names them",
    "transitions": "a step goes to one other at most: `goto` names it",
    "goto_event": "there are no events here",
    "retry": "a success is not tried again",
}


def _json_expression(source: str, scope: NameScope) -> str:
    """Return the JSON with holes as an expression with the same value. Raises Unsayable."""
    holes: list[str] = []

    def hole(found: re.Match[str]) -> str:
        if found[1] is None:
            return found[0]
        holes.append(found[1])
        return f'"\\u0000{len(holes) - 1}"'

    try:
        value = json.loads(_HOLE.sub(hole, source))
    except ValueError:
        raise Unsayable("a text that is no JSON, with values in it") from None
    return _written(value, holes, scope)


def _written(value: Any, holes: list[str], scope: NameScope) -> str:
    if isinstance(value, str) and value.startswith("\0"):
        whole = _JSON_FILTER.sub("", holes[int(value[1:])])
        return template("{{" + whole + "}}", scope).removeprefix("{{").removesuffix("}}").strip()
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_written(k, [], scope)}: {_written(v, holes, scope)}" for k, v in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(_written(each, holes, scope) for each in value) + "]"
    if isinstance(value, str) and is_liquid(value):
        raise Unsayable("a value inside a text of JSON")
    return literal(value).text


def with_output(scope: NameScope, kind: str) -> NameScope:
    """Return the names where the output of a step of this kind is visible."""
    return replace(scope, output="text" if kind == "human-input" else "any", output_printed=kind == "command")
