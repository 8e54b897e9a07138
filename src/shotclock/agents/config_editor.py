"""The one editor of the files of agents and clients: JSON as its reader takes it, and TOML.

A change replaces the text of a value in place, so comments, a byte order mark and the form of everything else stay. At
the end the text is read again, and nothing is written unless only the wanted values differ.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from ..core.errors import Failure
from ..core.value_types import value
from ._json_text import KeyPath, with_object


class ConfigSyntax(Protocol):
    """A format of configuration files."""

    def parse(self, text: str) -> Any:
        """Return the value of a file. Raises ValueError where the program that has the file does not read it."""

    def put(self, text: str, path: KeyPath, content: object) -> str:
        """Return the text with this value at the path. Raises ValueError where something else is in the way."""

    def drop(self, text: str, path: KeyPath) -> str:
        """Return the text without the value at the path, and without what becomes empty."""

    def wrap(self, text: str, path: KeyPath, program: str, words: list[str], count: int) -> str:
        """Return the text with a program and words before the command of a server, in place of `count` words."""

    def unwrap(self, text: str, path: KeyPath, count: int, *, keeps_list: bool) -> str:
        """Return the text with the command behind `count` words as the program again."""


@value
class ConfigEntry:
    """A value in a file: an element of a list, or the value of a key."""

    path: tuple[str, ...]
    content: Any
    in_list: bool = True


class ConfigEditor:
    """The text of a file while values in it are changed."""

    def __init__(self, file: Path, reader: str, text: str | None, syntax: ConfigSyntax, fresh: str = "") -> None:
        """`fresh` is the text of a new file. Raises Failure unless the reader takes the text for an object."""
        self.text: str = with_object(text, fresh) if fresh else text or ""
        self._file, self._syntax = file, syntax
        try:
            self.data: Any = syntax.parse(self.text)
            if not isinstance({} if self.data is None else self.data, dict):
                raise ValueError("it is not an object")
        except ValueError as error:
            raise self._left(f"because {reader} does not read it: {error}", "correct it first") from None
        self.data = self.data or {}

    def read(self, path: KeyPath) -> Any:
        """Return the value at the path, or None."""
        found = self.data
        for key in path:
            is_there = key in found if isinstance(found, dict) else isinstance(found, list) and key in range(len(found))
            if not is_there:
                return None
            found = found[key]
        return found

    def put(self, path: KeyPath, content: object) -> None:
        """Put a value in. Raises Failure where something else is in the way."""
        self._change(path, content, self._syntax.put, content)

    def drop(self, path: KeyPath) -> None:
        """Take a value out, and the objects and lists that become empty."""
        wanted = self.read(path[:-1]).copy()
        del wanted[path[-1]]
        self._change(path[:-1], wanted or None, lambda text, _: self._syntax.drop(text, path))

    def wrap(self, path: KeyPath, program: str, words: list[str], count: int) -> None:
        """Put a program and its words before the command of a server, or in place of the `count` words there."""
        entry = self.read(path)
        arguments = entry.get("args", [])
        behind = arguments[count:] if count else [entry["command"], *arguments]
        wanted = {**entry, "command": program, "args": [*words, *behind]}
        self._change(path, wanted, self._syntax.wrap, program, words, count)

    def unwrap(self, path: KeyPath, count: int, *, keeps_list: bool) -> None:
        """Make the command behind `count` words the program again. An empty list stays if it `keeps_list`."""
        entry = self.read(path)
        command, *arguments = entry["args"][count:]
        wanted = {**entry, "command": command, "args": arguments}
        self._change(path, wanted, partial(self._syntax.unwrap, keeps_list=keeps_list), count)

    def _change(self, path: KeyPath, wanted: object, change: Callable[..., str], *more: object) -> None:
        """Change the value at a path. Raises Failure unless it has the wanted value then, and the rest is unchanged."""
        before = self.data
        try:
            self.text = change(self.text, path, *more)
            self.data = self._syntax.parse(self.text) or {}
            is_right = _pruned(self.read(path)) == _pruned(wanted) and _rest(before, path) == _rest(self.data, path)
        except LookupError:
            is_right = False
        except ValueError as error:
            raise self._left(f"because {error}", "correct it first") from None
        if not is_right:
            why = f"because the entry of {path[-1]!r} cannot be changed in place"
            raise self._left(why, "leave the server out with --server, or write the entry by hand")

    def _left(self, why: str, suggestion: str) -> Failure:
        return Failure("CONFLICT", f"{self._file} was left as it is, {why}", suggestion=suggestion)


def _rest(data: Any, path: KeyPath) -> Any:
    """Return the data without the list or the value at the path, and without what is empty."""
    if not path or not isinstance(data, dict):
        return None
    return _pruned({key: _rest(each, path[1:]) if key == path[0] else each for key, each in data.items()})


def _pruned(data: Any) -> Any:
    """Return the data without empty objects and lists, which a change may make or leave."""
    if isinstance(data, dict):
        kept = {key: _pruned(each) for key, each in data.items()}
        return {key: each for key, each in kept.items() if each not in ({}, [], None)}
    return [_pruned(each) for each in data] if isinstance(data, list) else data
