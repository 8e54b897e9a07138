"""The combinations of a `matrix`, with the meaning that `include` and `exclude` have in GitHub Actions."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from itertools import product
from typing import Any

from ...core.value_types import JsonObject

COMBINATIONS_LIMIT = 1_000
CHANGES_LIMIT = 100  # entries of `include` and `exclude`, each of which is compared with all combinations

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*", re.ASCII)


def combine(written: Mapping[str, list[Any]]) -> list[JsonObject]:
    """Return the combinations in order. Raises ValueError."""
    axes = {name: values for name, values in written.items() if name not in ("include", "exclude")}
    include, exclude = written.get("include", []), written.get("exclude", [])
    for name, values in axes.items():
        if _NAME.fullmatch(name) is None:
            raise ValueError(f"{name[:40]!r} cannot be used in a template: use letters, digits and `_`, a letter first")
        if not values:
            raise ValueError(f"{name} has no values")
    for key, entries in (("include", include), ("exclude", exclude)):
        if len(entries) > CHANGES_LIMIT:
            raise ValueError(f"{key} has {len(entries)} entries; {CHANGES_LIMIT} are the most")
        if not all(isinstance(entry, dict) and entry for entry in entries):
            raise ValueError(f"{key} should be a list of mappings")
    for entry in exclude:
        if unknown := [name for name in entry if name not in axes]:
            raise ValueError(f"exclude: there is no {str(unknown[0])[:40]!r}; there are {', '.join(axes) or 'none'}")
    if axes and math.prod(map(len, axes.values())) > COMBINATIONS_LIMIT:
        raise ValueError(f"has more than {COMBINATIONS_LIMIT} combinations")
    originals = [dict(zip(axes, values, strict=True)) for values in product(*axes.values())] if axes else []
    originals = [each for each in originals if not any(_fits(entry, each) for entry in exclude)]
    combinations = [dict(each) for each in originals]
    more: list[JsonObject] = []
    for entry in include:
        own = {name: value for name, value in entry.items() if name in axes}
        fitting = [number for number, each in enumerate(originals) if _fits(own, each)]
        for number in fitting:
            combinations[number].update(entry)
        if not fitting:
            more.append(dict(entry))
    if not combinations and not more:
        raise ValueError("has no combination")
    return [*combinations, *more]


def _fits(entry: Mapping[str, Any], combination: Mapping[str, Any]) -> bool:
    """Return whether every value of an entry is that of a combination. True is not 1."""
    return all(combination[name] == value and type(combination[name]) is type(value) for name, value in entry.items())
