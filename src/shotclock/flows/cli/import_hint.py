"""The hint at `shotclock import`, for a workflow file of Visor."""

from __future__ import annotations

from pathlib import Path

from ...calls.call import Outcome
from ...core.value_types import replace


def point_to_import(flow: str, outcome: Outcome) -> Outcome:
    """Add the command that imports the file to the refusal of a file of Visor."""
    found = outcome.data["findings"] if isinstance(outcome.data, dict) else []
    wrong = [each["rule"] for each in found if each["severity"] == "error"] if isinstance(found, list) else []
    if outcome.problem is None or set(wrong) == {"ai/key"}:  # only a key is missing
        return outcome
    # The converter is large, and only needed for a file that is refused.
    from ..visor.importing import is_of_visor

    if not is_of_visor(Path(flow)):
        return outcome
    hint = f"this looks like a file of Visor: convert it with `shotclock import {flow}`"
    return replace(outcome, problem=replace(outcome.problem, suggestion=hint))
