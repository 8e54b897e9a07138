"""Steps that are written as a list: their names, and the order as dependencies."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, NamedTuple

from .schema import STEP_NAME, STEP_NAME_LIMIT
from .yaml_reader import Spot, YamlFlaw, quote


class NamedSteps(NamedTuple):
    steps: dict[str, Any]
    spots: Spot
    flaws: list[tuple[str, YamlFlaw]]  # with the name under which the step is kept


def name_steps(written: list[Any], spots: Spot, defaults: Any) -> NamedSteps:
    """Return the steps of a list by name, each after the one before unless it has a `depends_on` of its own."""
    made: dict[str, Any] = {}
    named = Spot(spots.place)
    flaws: list[tuple[str, YamlFlaw]] = []
    for number, element in enumerate(written):
        spot = spots.inside.get(number, Spot(spots.place))
        name, flaw = _name_of(element, number, spot)
        if flaw is None and name in made:
            line = named.inside[name].place.line
            message = f"the step {quote(name)} is there twice, first in line {line}"
            flaw = YamlFlaw("schema/twice", message, spot.place, "give one of them another `id`")
        if flaw is not None:
            name = next(each for each in _unnamed(number) if each not in made)
            flaws.append((name, flaw))
        if isinstance(element, str):
            made[name] = {"type": "command", "exec": element}
        elif isinstance(element, dict):
            made[name] = {key: value for key, value in element.items() if key not in ("id", "name")}
        else:
            continue
        named.inside[name] = spot
    _chain(made, defaults)
    return NamedSteps(made, named, flaws)


def _name_of(element: Any, number: int, spot: Spot) -> tuple[str, YamlFlaw | None]:
    if isinstance(element, str) or (isinstance(element, dict) and not element.keys() & {"id", "name"}):
        return f"step-{number + 1}", None
    if not isinstance(element, dict):
        return "", YamlFlaw("schema/value", "a step of a list is a mapping, or a command as text", spot.place)
    if "id" in element and "name" in element:
        hint = "keep one of them; text for people is a `description`"
        return "", YamlFlaw("schema/twice", "`id` and `name` both name the step", spot.inside["name"].place, hint)
    key = "id" if "id" in element else "name"
    name, place = element[key], spot.inside[key].place
    if not isinstance(name, str):
        return "", YamlFlaw("schema/value", f"`{key}` should be the name of the step, as text", place)
    if re.fullmatch(STEP_NAME, name) is None or len(name) > STEP_NAME_LIMIT:
        message = f"{quote(name)} cannot name a step: use letters, digits, `_`, `.` and `-`, a letter first"
        return "", YamlFlaw("schema/value", message, place, "text for people is a `description`")
    return name, None


def _unnamed(number: int) -> Iterator[str]:
    """Yield names for a step whose own cannot be used, so that its other mistakes are found."""
    name = f"step-{number + 1}"
    while True:
        yield name
        name += "-"


def _chain(steps: dict[str, Any], defaults: Any) -> None:
    """Make each step wait for the one before. A step that a reaction runs is not part of the order."""
    called = {name for part in (*steps.values(), defaults) for name in _called_by(part)}
    before: str | None = None
    for name, step in steps.items():
        has_own = "depends_on" in step or "needs" in step
        if name in called and not has_own:
            continue
        if not has_own and before is not None:
            step["depends_on"] = [before]
            step.setdefault("accept_skipped", True)
        before = name


def _called_by(part: Any) -> Iterator[str]:
    """Yield the steps that the reactions of a step, or of the defaults, run."""
    for key in ("on_fail", "on_success"):
        reaction = part.get(key) if isinstance(part, dict) else None
        run = reaction.get("run", []) if isinstance(reaction, dict) else []
        yield from (name for name in ([run] if isinstance(run, str) else run or []) if isinstance(name, str))
