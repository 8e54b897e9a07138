"""The hint at `shotclock import`, for a workflow file of another tool."""

from __future__ import annotations

from pathlib import Path

from ..core.value_types import replace
from ..runtime.call import Outcome


def point_to_import(flow: str, outcome: Outcome) -> Outcome:
    """Add the command that imports the file to the refusal of a file of another tool."""
    found = outcome.data["findings"] if isinstance(outcome.data, dict) else []
    wrong = [each["rule"] for each in found if each["severity"] == "error"] if isinstance(found, list) else []
    if outcome.problem is None or set(wrong) == {"ai/key"}:  # only a key is missing
        return outcome
    # The converters are large, and only needed for a file that is refused.
    from ..workflow.foreign.recognise import KINDS, kind_of_file

    kind = kind_of_file(Path(flow))
    if kind is None:
        return outcome
    hint = f"this looks like a file of {KINDS[kind].tool}: convert it with `shotclock import {flow}`"
    return replace(outcome, problem=replace(outcome.problem, suggestion=hint))
