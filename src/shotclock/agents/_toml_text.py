"""Changes to the text of a TOML file that leave every other character as it is."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable
from typing import Any

from ..core.value_types import JsonObject
from ._json_text import KeyPath

_BARE_LINE_FEED = re.compile(r"(?<!\r)\n")


class TomlSyntax:
    """TOML, of which every program reads everything."""

    def parse(self, text: str) -> JsonObject:
        """Return the tables of a text. Raises ValueError with its mistake."""
        try:
            return tomllib.loads(text.removeprefix("\ufeff"))
        except RecursionError:
            raise ValueError("it is nested too deeply") from None

    def put(self, text: str, path: KeyPath, content: object) -> str:
        """Return the text with this value at the path, which are a table and a key in it."""

        def change(document: Any) -> None:
            import tomlkit

            outer, name = path
            document.setdefault(outer, tomlkit.table(is_super_table=True))[name] = content

        return _edit(text, change)

    def drop(self, text: str, path: KeyPath) -> str:
        """Return the text without the value at the path, and without its table if that becomes empty."""

        def change(document: Any) -> None:
            outer, name = path
            del document[outer][name]
            if not document[outer]:
                del document[outer]

        return _edit(text, change)

    def wrap(self, text: str, path: KeyPath, program: str, words: list[str], count: int) -> str:
        def change(entry: Any) -> None:
            arguments = entry.setdefault("args", [])
            for _ in range(count):
                del arguments[0]
            for at, word in enumerate(words if count else [*words, entry["command"]]):
                arguments.insert(at, word)
            entry["command"] = program

        return _edit(text, change, path)

    def unwrap(self, text: str, path: KeyPath, count: int, *, keeps_list: bool) -> str:
        def change(entry: Any) -> None:
            arguments, command = entry["args"], entry["args"][count]
            for _ in range(count + 1):
                del arguments[0]
            entry["command"] = command
            if not keeps_list and arguments.as_string() == "[]":
                del entry["args"]

        return _edit(text, change, path)


TOML = TomlSyntax()


def _edit(text: str, change: Callable[[Any], None], path: KeyPath = ()) -> str:
    """Return the text after a change of the table at a path. Raises ValueError where that is impossible."""
    import tomlkit  # it is heavy, and only a change needs it

    plain = text.removeprefix("\ufeff")
    try:
        document: Any = tomlkit.parse(plain)
        table = document
        for key in path:
            table = table[key]
        change(table)
        after = document.as_string()
    except (TypeError, AttributeError, LookupError, tomlkit.exceptions.TOMLKitError) as error:
        raise ValueError(f"it cannot be changed in place: {error}") from None
    after = _BARE_LINE_FEED.sub("\r\n", after) if "\r\n" in plain and not _BARE_LINE_FEED.search(plain) else after
    return text[: len(text) - len(plain)] + after
