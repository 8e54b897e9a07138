"""`shotclock doctor`: the health of this machine, as data and as a page. The probes are in enforce/checkup.py."""

from __future__ import annotations

from ..core.effects import Ending
from ..core.envelope import Problem
from ..enforce.admission import Outcome
from ..enforce.checkup import examine
from . import errors as errors  # registers MACHINE_UNFIT


def check_up(*, sweep: bool, trace_id: str | None) -> Outcome:
    findings = examine(sweep=sweep, trace_id=trace_id)
    problem = None
    if findings.failed:
        message = "; ".join(f"{check.name}: {check.detail}" for check in findings.failed)
        problem = Problem("MACHINE_UNFIT", message)
    return Outcome(Ending.FINISHED, problem, findings.as_data())
