"""Pins: the known definition of every tool, prompt and resource template of a server, in a lock file.

The instructions in the greeting of the server are one more object. A file of an earlier version has no pin of them.

A definition is pinned whole, as canonical JSON: the same server writes its keys in another order for each revision of
the protocol, and a change of any field can mislead a model.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Iterator

from ..core.value_types import value
from ._messages import JsonObject

FORMAT_VERSION = 1
LARGEST_FILE = 16 * 1024 * 1024
# Of one difference, for people: longer values are cut.
LONGEST_VALUE = 300
MOST_LINES = 20


@value
class ListKind:
    """A list of a server whose objects are pinned."""

    name: str  # in the lock file, and in results
    method: str
    key: str  # the member that names an object
    noun: str
    capability: str


TOOLS = ListKind("tools", "tools/list", "name", "tool", "tools")
PROMPTS = ListKind("prompts", "prompts/list", "name", "prompt", "prompts")
TEMPLATES = ListKind("resourceTemplates", "resources/templates/list", "uriTemplate", "resource template", "resources")
GREETING = ListKind("greeting", "initialize", "instructions", "greeting field", "")
KINDS = {kind.method: kind for kind in (TOOLS, PROMPTS, TEMPLATES)}

Objects = dict[str, object]  # the definitions of one list, by name


def digest_of(definition: object) -> str:
    """Return the SHA-256 of a definition as canonical JSON."""
    text = json.dumps(definition, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


@value
class Change:
    """A definition that is not the pinned one."""

    kind: ListKind
    name: str
    before: object  # None: it is new
    now: object  # None: it is gone

    @property
    def what(self) -> str:
        if self.before is None:
            return "is new"
        return "is gone" if self.now is None else "has changed"

    def lines(self) -> list[str]:
        """Return the difference, with one line for each value."""
        if self.before is None or self.now is None:
            return [f"{'+' if self.before is None else '-'} {_shown(self.before or self.now)}"]
        lines = list(_differences("", self.before, self.now))
        return lines if len(lines) <= MOST_LINES else [*lines[:MOST_LINES], f"and {len(lines) - MOST_LINES} more"]

    def __str__(self) -> str:
        return f"{self.kind.noun} {self.name} {self.what}: {'; '.join(self.lines())}"


def _differences(place: str, before: object, now: object) -> Iterator[str]:
    if isinstance(before, dict) and isinstance(now, dict):
        for name in sorted({*before, *now}):
            inner = f"{place}.{name}" if place else name
            if name not in before:
                yield f"{inner}: + {_shown(now[name])}"
            elif name not in now:
                yield f"{inner}: - {_shown(before[name])}"
            else:
                yield from _differences(inner, before[name], now[name])
    elif digest_of(before) != digest_of(now):  # 1, 1.0 and true are equal in Python
        yield f"{place}: {_shown(before)} -> {_shown(now)}"


def _shown(item: object) -> str:
    """Return a value for people. Invisible characters are shown as escapes."""
    text = json.dumps(item, sort_keys=True)
    return text if len(text) <= LONGEST_VALUE else f"{text[:LONGEST_VALUE]}… ({len(text)} characters)"


class LockFile:
    """The pins of one server. Every pin has the digest that counts, and the definition for the difference."""

    def __init__(self, path: str) -> None:
        """Raise ValueError if the file is there and cannot be used."""
        self.path: str = os.path.abspath(path)
        self.is_new: bool = True
        self._pins: dict[str, dict[str, JsonObject]] = {kind.name: {} for kind in KINDS.values()}
        """By kind and name. The greeting is missing until it was seen once."""
        self._load()

    def _load(self) -> None:
        try:
            with open(self.path, encoding="utf-8") as file:
                content = json.loads(file.read(LARGEST_FILE))
        except FileNotFoundError:
            return
        except (OSError, ValueError, RecursionError) as error:
            raise ValueError(f"{self.path} cannot be read: {error}") from None
        if not isinstance(content, dict) or content.get("version") != FORMAT_VERSION:
            raise ValueError(f"{self.path} is no lock file of shotclock wrap")
        for name in [*self._pins, *([GREETING.name] if GREETING.name in content else [])]:
            pins = content.get(name)
            if not isinstance(pins, dict) or not all(_is_pin(pin) for pin in pins.values()):
                raise ValueError(f"{self.path} has no valid pins of {name}; delete it to pin them anew")
            self._pins[name] = pins
        self.is_new = False

    def has(self, kind: ListKind) -> bool:
        """Return whether objects of a kind are pinned at all."""
        return kind.name in self._pins

    def fits(self, kind: ListKind, name: str, definition: object) -> bool:
        pin = self._pins[kind.name].get(name)
        return pin is not None and pin["sha256"] == digest_of(definition)

    def change_of(self, kind: ListKind, name: str, definition: object) -> Change:
        pin = self._pins[kind.name].get(name)
        return Change(kind, name, None if pin is None else pin["definition"], definition)

    def changes(self, kind: ListKind, listed: Objects) -> list[Change]:
        """Return how a whole list differs from the pinned one."""
        names = [name for name in listed if not self.fits(kind, name, listed[name])]
        names += [name for name in self._pins[kind.name] if name not in listed]
        return [self.change_of(kind, name, listed.get(name)) for name in names]

    def pin_all(self, listed: dict[str, Objects]) -> None:
        """Pin whole lists in place of the old pins. Raises OSError."""
        for kind, objects in listed.items():
            self._pins[kind] = {name: _pin(definition) for name, definition in objects.items()}
        self._save()

    def accept(self, change: Change) -> None:
        """Pin one changed definition. Raises OSError."""
        if change.now is None:
            self._pins[change.kind.name].pop(change.name, None)
        else:
            self._pins[change.kind.name][change.name] = _pin(change.now)
        self._save()

    def _save(self) -> None:
        """Replace the file at once, so that another process reads the old or the new one."""
        draft = f"{self.path}.{os.urandom(4).hex()}"
        try:
            with open(draft, "x", encoding="utf-8") as file:  # never through a link of that name
                json.dump({"version": FORMAT_VERSION, **self._pins}, file, indent=1, sort_keys=True)
                file.write("\n")
            os.replace(draft, self.path)
        except OSError:
            with contextlib.suppress(OSError):
                os.unlink(draft)
            raise
        self.is_new = False

    def describe(self) -> str:
        counts = [f"{len(self._pins[kind.name])} {kind.noun}s" for kind in KINDS.values()]
        return ", ".join(counts)


def _is_pin(pin: object) -> bool:
    return isinstance(pin, dict) and isinstance(pin.get("sha256"), str) and "definition" in pin


def _pin(definition: object) -> JsonObject:
    return {"sha256": digest_of(definition), "definition": definition}
