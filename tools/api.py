"""The page of the public names of the library, from their signatures and docstrings."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from enum import Enum
from typing import Any, ForwardRef

import shotclock
import shotclock.testing

LONGEST_LINE = 100
FIRST = ("App", "Context", "run", "arun", "Runtime", "Clocks", "Envelope", "Operation", "Failure")
INTRODUCTION = """# The public names

What `from shotclock import …` and `from shotclock.testing import …` give. Other modules are internal
([what stays stable](stability.md)). How they are used: [the App](app.md), [serve tools over MCP](../howto/mcp.md),
[Replace subprocess.run](../howto/replace.md#replace-subprocessrun), [Test a tool](../howto/test-a-tool.md).
"""


class Shown:
    """An annotation or a default as it stands in the source."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __repr__(self) -> str:
        # Of a named tuple, before Python 3.14.
        value = self.value.__forward_arg__ if isinstance(self.value, ForwardRef) else self.value
        text = value if isinstance(value, str) else inspect.formatannotation(value)
        # An object has no text that a reader could type.
        return re.sub(r"<[^<>]*>", "…", text)


def signature(value: Any) -> str:
    """Return the parameters of a function or class, without `self`."""
    try:
        found = inspect.signature(value)
    except (TypeError, ValueError):
        return ""
    kept = []
    for name, each in found.parameters.items():
        if name not in ("self", "cls"):
            annotation = each.annotation if each.annotation is each.empty else Shown(each.annotation)
            default = each.default if each.default is each.empty else Shown(repr(each.default))
            kept.append(each.replace(annotation=annotation, default=default))
    answer = found.return_annotation if found.return_annotation is found.empty else Shown(found.return_annotation)
    shown = found.replace(parameters=kept, return_annotation=answer)
    text = str(shown)
    if len(text) <= LONGEST_LINE:
        return text
    lines = [str(shown.replace(parameters=[each], return_annotation=shown.empty))[1:-1] for each in kept]
    if any(each.kind is each.KEYWORD_ONLY for each in kept):
        first = next(index for index, each in enumerate(kept) if each.kind is each.KEYWORD_ONLY)
        lines = [*lines[:first], "*", *(line.removeprefix("*, ") for line in lines[first:])]
    end = "" if answer is found.empty else f" -> {answer!r}"
    return "(\n" + "".join(f"    {line.removesuffix(', /')},\n" for line in lines) + f"){end}"


def documentation(value: Any) -> str:
    """Return the docstring of a value itself, if it is ours."""
    package = getattr(value, "__module__", "").partition(".")[0]
    if package != "shotclock":
        return f"The one of `{package}`."
    own = value.__dict__.get("__doc__") if inspect.isclass(value) else getattr(value, "__doc__", None)
    return inspect.cleandoc(own or "")


def members(value: type) -> Iterator[tuple[str, Any, str]]:
    """Yield the public methods and properties of a class, with the kind of each."""
    for owner in reversed([each for each in value.__mro__ if each.__module__.startswith("shotclock")]):
        for name, member in vars(owner).items():
            if name.startswith("_"):
                continue
            if isinstance(member, property):
                yield name, member.fget, "property"
            elif isinstance(member, classmethod | staticmethod):
                yield name, member.__func__, "function of the class"
            elif inspect.isfunction(member):
                yield name, member, "method"


def entry(name: str, value: Any) -> Iterator[str]:
    """Yield the lines on one public name."""
    yield f"## {name}"
    yield ""
    if inspect.isclass(value) and issubclass(value, Enum):  # its signature is another in each version of Python
        yield from ["```text", *(f"{name}.{each.name} = {each.value!r}" for each in value), "```", ""]
    elif inspect.isclass(value) or callable(value):
        yield from ["```text", f"{name}{signature(value)}", "```", ""]
    yield documentation(value)
    yield ""
    if inspect.isclass(value):
        rows = {each: (member, kind) for each, member, kind in members(value)}
        for each, (member, kind) in rows.items():
            shown = each if kind == "property" else f"{each}{signature(member)}"
            yield from ["```text", f"{name}.{shown}", "```", "", documentation(member), ""]


def api_page() -> str:
    """Return the page of the public names."""
    rest = sorted(set(shotclock.__all__) - set(FIRST) - {"__version__"}, key=str.lower)
    lines = [INTRODUCTION]
    for name in (*FIRST, *rest):
        lines += entry(name, getattr(shotclock, name))
    lines += ["# shotclock.testing", ""]
    for name in sorted(shotclock.testing.__all__, key=str.lower):
        lines += entry(f"testing.{name}", getattr(shotclock.testing, name))
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).rstrip() + "\n"
