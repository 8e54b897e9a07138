"""Signatures of functions and of the functions that wrap them.

From Python 3.14 on `functools.wraps` copies `__annotate__`, which an assigned `__annotations__` clears. So wrappers are
declared here alone.
"""

from __future__ import annotations

import functools
import inspect
import sys
import typing
from collections.abc import Callable
from typing import TypeVar

from .value_types import JsonObject

F = TypeVar("F", bound=Callable[..., object])

CONTEXT_NAME = "ctx"

read_parameters: Callable[[Callable[..., object]], inspect.Signature] = inspect.signature
"""Return the signature without resolving annotations."""

if sys.version_info >= (3, 14):
    from annotationlib import Format

    read_parameters = functools.partial(inspect.signature, annotation_format=Format.FORWARDREF)


def read_hints(function: Callable[..., object]) -> JsonObject:
    """Return the annotations of a function. Raises TypeError if one cannot be resolved."""
    try:
        return typing.get_type_hints(function, include_extras=True)
    except Exception as error:  # an annotation may be any expression
        raise TypeError(f"{function.__qualname__}: annotation cannot be resolved: {error}") from None


def known_hints(function: Callable[..., object], *, include_extras: bool = False) -> JsonObject:
    """Return the annotations of a function, none if one cannot be resolved."""
    try:
        return typing.get_type_hints(function, include_extras=include_extras)
    except Exception:
        return {}


def read_signature(function: Callable[..., object]) -> inspect.Signature:
    """Return the signature with resolved annotations. Raises TypeError."""
    hints = read_hints(function)
    written = read_parameters(function)
    parameters = [each.replace(annotation=hints.get(name, each.empty)) for name, each in written.parameters.items()]
    return inspect.Signature(parameters, return_annotation=hints.get("return", written.empty))


def with_context(signature: inspect.Signature, hint: object = inspect.Signature.empty) -> inspect.Signature:
    parameters = [each for each in signature.parameters.values() if each.name != CONTEXT_NAME]
    place = next((at for at, each in enumerate(parameters) if each.kind is each.VAR_KEYWORD), len(parameters))
    parameters.insert(place, inspect.Parameter(CONTEXT_NAME, inspect.Parameter.KEYWORD_ONLY, annotation=hint))
    return signature.replace(parameters=parameters)


def declare(function: Callable[..., object], signature: inspect.Signature) -> None:
    annotations = {each.name: each.annotation for each in signature.parameters.values()}
    annotations["return"] = signature.return_annotation
    function.__annotations__ = {name: each for name, each in annotations.items() if each is not signature.empty}
    function.__signature__ = signature  # type: ignore[attr-defined]


def wraps(function: Callable[..., object]) -> Callable[[F], F]:
    """Return `functools.wraps` that keeps declared annotations."""
    return functools.wraps(function, (*functools.WRAPPER_ASSIGNMENTS, "__annotations__"))  # type: ignore[return-value]
