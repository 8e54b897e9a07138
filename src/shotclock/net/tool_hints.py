"""The words for the annotations of an MCP tool."""

from __future__ import annotations

from collections.abc import Callable, Mapping

DESTRUCTIVE = "destructive"
# The defaults of the protocol: a tool that declares nothing is destructive and reaches the outside.
ANNOTATIONS: dict[str, Callable[[Mapping[str, object]], bool]] = {
    DESTRUCTIVE: lambda hints: hints.get("readOnlyHint") is not True and hints.get("destructiveHint") is not False,
    "read-only": lambda hints: hints.get("readOnlyHint") is True,
    "idempotent": lambda hints: hints.get("idempotentHint") is True,
    "open-world": lambda hints: hints.get("openWorldHint") is not False,
}


def annotations_of(hints: Mapping[str, object]) -> list[str]:
    return [word for word, matches in ANNOTATIONS.items() if matches(hints)]
