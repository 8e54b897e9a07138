"""Values between steps, read from JSON and written as JSON.

A number that cannot be represented exactly (`1e999`, `9007199254740993.0`, an integer of thousands of digits) stays
text, so that no step uses a changed number.

Records are written as JSON and read back by the declared types of their fields.
"""

from __future__ import annotations

import json
import math
import re
import types
import typing
from collections.abc import Iterable, Mapping, Sequence
from enum import Enum
from functools import lru_cache
from typing import Any, NamedTuple

from .envelope import Warning_, warning
from .limits import WallTime
from .value_types import JsonObject, as_dict, fields_of

# Code that stores, redacts or shows a value recurses.
DEPTH_LIMIT = 200
# Python writes and reads integers of up to 4,300 digits; this many bits are safely below that.
LONGEST_INTEGER_BITS = 13_000
LONGEST_LITERAL = 3_900
# A float represents any number of so many digits.
DIGITS_OF_EVERY_FLOAT = 15

# The names of JSON Schema.
JSON_TYPES: dict[str, tuple[type, ...]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "array": (list, tuple),
    "object": (dict,),
    "null": (type(None),),
}
_SURROGATE = re.compile("[\ud800-\udfff]")


class Read(NamedTuple):
    value: Any
    kept: tuple[str, ...] = ()  # numbers that stay text because they cannot be represented exactly


def read_json(text: str) -> Read:
    """Read JSON. Raises ValueError for invalid or too deeply nested JSON."""
    kept: list[str] = []

    def number(literal: str, held: Any) -> Any:
        if held is None:
            kept.append(literal)
            return literal
        return held

    try:
        value = json.loads(
            text,
            parse_int=lambda literal: number(literal, int(literal) if len(literal) <= LONGEST_LITERAL else None),
            parse_float=lambda literal: number(literal, _float(literal)),
            parse_constant=_refuse_constant,
        )
    except RecursionError:
        raise ValueError("nested too deep") from None
    if is_deeper_than(DEPTH_LIMIT, value):
        raise ValueError(f"nested more than {DEPTH_LIMIT} levels deep")
    return Read(value, tuple(kept))


def read_printed(text: str) -> Read:
    """Read the output of a command: an object or a list, else its text without the last newline."""
    if text.lstrip()[:1] in ("{", "["):
        try:
            return read_json(text)
        except ValueError:
            pass
    return Read(text.removesuffix("\n"))


def as_plain(value: Any) -> Read:
    """Return a value as JSON data: an iterable as a list, infinities and NaN as text. Raises ValueError."""
    kept: list[str] = []
    return Read(_plain(value, kept, 0), tuple(kept))


def warn_of_kept(literals: Sequence[str]) -> Warning_:
    shown = ", ".join(f"{literal[:20]}…" if len(literal) > 20 else literal for literal in literals[:3])
    more = f" and {len(literals) - 3} more" if len(literals) > 3 else ""
    return warning("NUMBER_KEPT_AS_TEXT", f"{shown}{more}: cannot be kept exactly as a number, so it stays text")


def as_text(value: Any) -> str:
    """Return a text unchanged, and any other value as JSON."""
    if isinstance(value, str):
        return value
    return "" if value is None else write_json(value, separators=(",", ":"))


def describe_value(value: Any) -> str:
    """Return a value for a message: an object of plain values without the punctuation of JSON."""
    if isinstance(value, dict) and value and not any(isinstance(part, dict | list) for part in value.values()):
        return ", ".join(f"{name}: {as_text(part)}" for name, part in value.items())
    return as_text(value)


def write_json(value: Any, indent: int | None = None, separators: tuple[str, str] | None = None) -> str:
    """Return readable JSON that can always be encoded: half a character is escaped."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, indent=indent, separators=separators)
    if not text.isascii() and _SURROGATE.search(text):
        return _SURROGATE.sub(lambda found: f"\\u{ord(found[0]):04x}", text)
    return text


def is_true(value: Any) -> bool:
    """Return whether a condition holds. Texts such as `false` and `no` are not true."""
    if isinstance(value, str):
        return value.strip().lower() not in ("", "false", "0", "no", "none", "null")
    return bool(value)


def _float(literal: str) -> float | None:
    """Parse a float. None where it is not exactly the written number."""
    value = float(literal)
    mantissa, _, exponent = literal.lower().partition("e")
    if len(mantissa) <= DIGITS_OF_EVERY_FLOAT and not exponent:
        return value
    if not math.isfinite(value) or len(literal) > LONGEST_LITERAL:
        return None
    from decimal import Decimal, InvalidOperation

    digits = len(mantissa.replace(".", "").lstrip("-0"))
    try:
        # The shortest form of a float is not always the nearest of its length: 2**-24 is 5.960464477539063e-08.
        is_same = Decimal(literal) in (Decimal(format(value, f".{max(1, digits)}g")), Decimal(repr(value)))
    except InvalidOperation:  # the exponent is too large
        return None
    return value if is_same else None


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def is_deeper_than(limit: int, value: Any) -> bool:
    """Return whether more than so many lists and objects are inside one another. Empty ones do not count."""
    level = [value]
    for _ in range(limit + 1):
        level = [
            item
            for part in level
            if isinstance(part, dict | list | tuple)
            for item in (part.values() if isinstance(part, dict) else part)
        ]
        if not level:
            return False
    return True


def has_json_type(value: object, name: str) -> bool:
    """Return whether a value is of a type of JSON Schema. Raises KeyError for another name."""
    if isinstance(value, bool):  # an int in Python
        return name == "boolean"
    if name == "integer" and isinstance(value, float):
        return value.is_integer()
    return isinstance(value, JSON_TYPES[name])


def _plain(value: Any, kept: list[str], depth: int) -> Any:
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return str(value)
    if isinstance(value, int):
        if value.bit_length() <= LONGEST_INTEGER_BITS:
            return int(value)
        from decimal import Decimal

        kept.append(format(Decimal(value), "f"))  # all digits, more than `str` writes
        return kept[-1]
    if isinstance(value, float):
        if math.isfinite(value):
            return float(value)
        kept.append(str(value))
        return kept[-1]
    if depth >= DEPTH_LIMIT:
        raise ValueError(f"it is nested more than {DEPTH_LIMIT} levels deep")
    if isinstance(value, Mapping):
        return {as_text(key): _plain(item, kept, depth + 1) for key, item in value.items()}
    if isinstance(value, Iterable) and not isinstance(value, bytes | bytearray):
        return [_plain(item, kept, depth + 1) for item in value]
    raise ValueError(f"a {type(value).__name__} cannot be passed on: pass plain data")


def to_json(value: Any) -> Any:
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, WallTime):
        return value.ms
    if _is_record(type(value)):
        return {name: to_json(each) for name, each in as_dict(value).items()}
    if isinstance(value, tuple):
        return [to_json(each) for each in value]
    return dict(value) if isinstance(value, Mapping) else value


def of_json(declared: Any, plain: Any) -> Any:
    """Return the value of a declared type from the JSON of `to_json`."""
    declared = without_none(declared)
    if plain is None:
        return None
    if typing.get_origin(declared) is tuple:
        return tuple(of_json(typing.get_args(declared)[0], each) for each in plain)
    if declared is WallTime or (isinstance(declared, type) and issubclass(declared, Enum)):
        return declared(plain)
    if _is_record(declared):
        hints = hints_of(declared)
        return declared(**{name: of_json(hints[name], each) for name, each in plain.items()})
    return plain


def without_none(declared: Any) -> Any:
    """Return X for `X | None`, and other types unchanged."""
    if typing.get_origin(declared) not in (typing.Union, types.UnionType):
        return declared
    members = [each for each in typing.get_args(declared) if each is not type(None)]
    return members[0] if len(members) == 1 else declared


@lru_cache(maxsize=64)
def hints_of(kind: Any) -> JsonObject:
    hints = typing.get_type_hints(kind)
    return {name: hints[name] for name in fields_of(kind)}


def _is_record(kind: Any) -> bool:
    return isinstance(kind, type) and "__match_args__" in vars(kind)
