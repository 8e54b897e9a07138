"""`${NAME}` in a file: a variable of the environment, so that a file holds no secret."""

from __future__ import annotations

import re
from collections.abc import Mapping

REFERENCE = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)(?:(:?-)([^{}]*))?\}")


class UnsetVariable(LookupError):
    """A variable of `${NAME}` that has no default and is not set."""


def value_of(found: re.Match[str], environment: Mapping[str, str]) -> str:
    name, kind, instead = found.groups()
    value = environment.get(name)
    if value is None and kind is None:
        raise UnsetVariable(name)
    return instead if value is None or (kind == ":-" and not value) else value


def fill_in(text: str, environment: Mapping[str, str]) -> str:
    return REFERENCE.sub(lambda found: value_of(found, environment), text)


def unset_message(name: str) -> str:
    return f"the variable {name} is not set; set it, or write ${{{name}:-}} if it may be missing"


def unset_name_message(name: str) -> str:
    return f"the variable {name} is not set; set it, or write `env.{name} | default('')` if it may be missing"
