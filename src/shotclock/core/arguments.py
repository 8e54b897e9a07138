"""Arguments checked against a function's signature, every problem at once, before anything runs."""

from __future__ import annotations

import inspect
import json
import math
import typing
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

# pydantic is imported where it is first needed: most of the command line never does, and it is slow to start.

CONTEXT_NAME = "ctx"


class NotSerializable(Exception):
    """A result that cannot be put into JSON."""


class Signature:
    """What a function takes. Build it once per function with `signature_of`."""

    def __init__(self, function: Callable[..., Any]) -> None:
        from pydantic import ConfigDict, Field, ValidationError, create_model

        parameters = inspect.signature(function).parameters
        try:
            hints = typing.get_type_hints(function, include_extras=True)
        except NameError as error:
            raise TypeError(f"{function.__qualname__}: annotation cannot be resolved: {error}") from None
        self.wants_context = CONTEXT_NAME in parameters
        self._names: dict[str, str] = {}
        self._takes_more = False
        fields: dict[str, Any] = {}
        for position, parameter in enumerate(parameters.values()):
            if parameter.name == CONTEXT_NAME:
                continue
            if parameter.kind is parameter.VAR_KEYWORD:
                self._takes_more = True
                continue
            if parameter.kind in (parameter.VAR_POSITIONAL, parameter.POSITIONAL_ONLY):
                raise TypeError(f"{function.__qualname__}: arguments are passed by name, {parameter} cannot be")
            default = ... if parameter.default is parameter.empty else parameter.default
            # Behind an alias, a parameter may be called anything, `json` and `model_config` included.
            key = f"p{position}"
            fields[key] = (hints.get(parameter.name, Any), Field(default, alias=parameter.name))
            self._names[key] = parameter.name
        extra: Any = "allow" if self._takes_more else "forbid"
        self._model = create_model(
            f"Arguments of {function.__qualname__}",
            __config__=ConfigDict(extra=extra, arbitrary_types_allowed=True, protected_namespaces=()),
            **fields,
        )
        self._invalid = ValidationError
        self._validate = self._model.__pydantic_validator__.validate_python

    def json_schema(self) -> dict[str, Any]:
        """What the arguments look like, for those who call without seeing the function."""
        schema: dict[str, Any] = self._model.model_json_schema(by_alias=True)
        schema.pop("title", None)
        schema.setdefault("properties", {})
        return schema

    def check(self, arguments: Mapping[str, object]) -> tuple[dict[str, object], list[dict[str, str]]]:
        """The arguments as the function wants them, or what is wrong with them."""
        if not arguments and not self._names:
            return {}, []
        try:
            checked = self._validate(arguments)
        except self._invalid as error:
            return {}, [
                {"field": ".".join(map(str, problem["loc"])) or "arguments", "message": problem["msg"]}
                for problem in error.errors(include_url=False, include_input=False)
            ]
        values = checked.__dict__
        accepted = {name: values[key] for key, name in self._names.items()}
        if self._takes_more:
            accepted.update(checked.__pydantic_extra__ or {})
        return accepted, []


@lru_cache(maxsize=1024)
def signature_of(function: Callable[..., Any]) -> Signature:
    return Signature(function)


# What Python writes out in decimal is limited; this is safely below it (4,300 digits).
_LONGEST_INTEGER_BITS = 14_000
_PLAIN = frozenset({type(None), bool, int, str})


def to_jsonable(value: object) -> Any:
    """The value as JSON holds it; raises NotSerializable with a reason."""
    if type(value) in _PLAIN and (type(value) is not int or value.bit_length() <= _LONGEST_INTEGER_BITS):
        return value
    from pydantic_core import PydanticSerializationError, to_jsonable_python

    try:
        plain = to_jsonable_python(value, bytes_mode="base64")
    except (PydanticSerializationError, ValueError, RecursionError, TypeError) as error:
        raise NotSerializable(f"a {type(value).__name__} cannot be put into JSON: {error}") from None
    try:
        json.dumps(plain, allow_nan=False)
    except (ValueError, RecursionError):
        return _with_named_numbers(plain)
    return plain


def _with_named_numbers(plain: Any) -> Any:
    """JSON has no NaN and no infinities; their names are the nearest thing it has."""
    if isinstance(plain, float):
        return plain if math.isfinite(plain) else str(plain)
    if isinstance(plain, int) and plain.bit_length() > _LONGEST_INTEGER_BITS:
        raise NotSerializable("an integer of thousands of digits cannot be put into JSON")
    if isinstance(plain, list):
        return [_with_named_numbers(item) for item in plain]
    if isinstance(plain, dict):
        return {key: _with_named_numbers(item) for key, item in plain.items()}
    return plain
