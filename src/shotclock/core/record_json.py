"""Records as JSON and back, by the declared types of their fields."""

from __future__ import annotations

import types
import typing
from collections.abc import Mapping
from enum import Enum
from functools import lru_cache
from typing import Any

from .clocks import WallTime
from .value_types import as_dict, fields_of


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
def hints_of(kind: Any) -> dict[str, Any]:
    hints = typing.get_type_hints(kind)
    return {name: hints[name] for name in fields_of(kind)}


def _is_record(kind: Any) -> bool:
    return isinstance(kind, type) and "__match_args__" in vars(kind)
