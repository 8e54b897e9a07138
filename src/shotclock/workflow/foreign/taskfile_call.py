"""One call of a task of a Taskfile: what it was given, the commands that it defers, and where it runs."""

from __future__ import annotations

import re
from typing import Any

from ...core.value_types import field, record, value
from .common import ForeignPath, Unconvertible
from .taskfile_templates import Expression, Value

_SYSTEMS = {"linux": "Linux", "darwin": "Darwin", "freebsd": "FreeBSD", "openbsd": "OpenBSD", "netbsd": "NetBSD"}
_MACHINES = {"amd64": ("x86_64", "amd64"), "arm64": ("aarch64", "arm64"), "386": ("i386", "i686"), "arm": ("arm*",)}


@value
class Deferred:
    """A command with `defer`."""

    script: str
    path: ForeignPath
    reached: str | None  # the step whose success says that the `defer` was reached


@record
class TaskCall:
    """One call of a task."""

    root: str  # the task that is asked for
    task: str
    prefix: str  # of the names of its steps
    path: ForeignPath
    variables: dict[str, Value]
    conditions: list[str]
    above: tuple[str, ...] = ()
    env: dict[str, Any] = field(default_factory=dict)
    used: set[str] = field(default_factory=set)  # steps that compute a variable, since the last step was written


def steps_in(value: Value) -> set[str]:
    return set(re.findall(r"outputs\['([^']+)'\]", value.code)) if isinstance(value, Expression) else set()


def pattern_of(platforms: list[Any]) -> str:
    """Return the pattern of `case` for the platforms, empty for all of them."""
    made: list[str] = []
    for each in platforms:
        first, _, second = str(each).partition("/")
        system, machine = (first, second) if first not in _MACHINES else ("", first)
        machines = _MACHINES.get(machine, (machine or "*",))
        made += [f"{_SYSTEMS.get(system, system or '*')}/{one}" for one in machines]
    if not all(re.fullmatch(r"[\w*]+/[\w*]+", each) for each in made):
        raise Unconvertible("names a platform that is not known")
    return "|".join(made)
