"""The sections of steps: the names and the order of a list, and the steps of `finally`.

The steps of `finally` are put into `steps`, so that every part of the program treats them as steps; the file keeps
their names.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, Literal, NamedTuple

from ...core.value_types import JsonObject
from .schema import STEP_NAME, STEP_NAME_LIMIT
from .yaml_reader import Spot, YamlFlaw, quote

Section = Literal["steps", "finally"]


class NamedSteps(NamedTuple):
    steps: JsonObject
    spots: Spot
    flaws: list[tuple[str, YamlFlaw]]  # with the name under which the step is kept


def name_steps(written: list[Any], spots: Spot, defaults: Any, section: Section = "steps") -> NamedSteps:
    """Return the steps of a list by name, each after the one before unless it has a `depends_on` of its own.

    In `finally` each waits for any end of the one before, in `steps` for its success.
    """
    made: JsonObject = {}
    named = Spot(spots.place)
    flaws: list[tuple[str, YamlFlaw]] = []
    for number, element in enumerate(written):
        spot = spots.inside.get(number, Spot(spots.place))
        name, flaw = _name_of(element, number, spot, section)
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
    _chain(made, defaults, section)
    return NamedSteps(made, named, flaws)


def _name_of(element: Any, number: int, spot: Spot, section: Section) -> tuple[str, YamlFlaw | None]:
    if isinstance(element, str) or (isinstance(element, dict) and not element.keys() & {"id", "name"}):
        return f"{section.removesuffix('s')}-{number + 1}", None
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


def _chain(steps: JsonObject, defaults: Any, section: Section) -> None:
    """Make each step wait for the one before. A step that a reaction runs is not part of the order."""
    called = {name for part in (*steps.values(), defaults) for name in _called_by(part)}
    before: str | None = None
    for name, step in steps.items():
        has_own = "depends_on" in step or "needs" in step
        if name in called and not has_own:
            continue
        if not has_own and before is not None and section == "finally":
            step["depends_on"] = {before: "ended"}
        elif not has_own and before is not None:
            step["depends_on"] = [before]
            step.setdefault("accept_skipped", True)
        before = name


def _called_by(part: Any) -> Iterator[str]:
    """Yield the steps that the reactions of a step, or of the defaults, run."""
    for key in ("on_fail", "on_success"):
        reaction = part.get(key) if isinstance(part, dict) else None
        run = reaction.get("run", []) if isinstance(reaction, dict) else []
        yield from (name for name in ([run] if isinstance(run, str) else run or []) if isinstance(name, str))


def merge_finally(written: JsonObject, spots: Spot) -> list[tuple[str, YamlFlaw]]:
    """Move the steps of `finally` into `steps`, and leave their names. Return the flaws, each with a step's name."""
    if "finally" not in written:
        return []
    last, spot = written.pop("finally"), spots.inside["finally"]
    flaws: list[tuple[str, YamlFlaw]] = []
    if isinstance(last, list):
        named = name_steps(last, spot, written.get("defaults"), section="finally")
        last, spot, flaws = named.steps, named.spots, named.flaws
    if not isinstance(last, dict) or not last:
        message = "is empty" if not last else "should be a mapping or a list of steps"
        return [*flaws, ("", YamlFlaw("schema/value", message, spots.inside["finally"].place))]
    key = "steps" if "steps" in written else "checks"
    steps = written.get(key)
    if not isinstance(steps, dict):
        return flaws  # which is a flaw of its own
    inside = spots.inside[key]
    for name in last.keys() & steps.keys():
        line = inside.inside[name].place.line
        message = (
            f"the step {quote(name)} is there twice, first in line {line}: `steps` and `finally` share their names"
        )
        flaws.append(
            (name, YamlFlaw("schema/twice", message, spot.inside[name].place, "give one of them another name"))
        )
    written[key] = {**last, **steps} if flaws else {**steps, **last}
    spots.inside[key] = Spot(inside.place, {**spot.inside, **inside.inside})
    written["finally"] = [name for name in last if name not in steps]
    return flaws
