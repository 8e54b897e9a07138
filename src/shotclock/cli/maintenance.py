"""`shotclock errors` and `doctor`: the registry of codes and the health of this machine."""

from __future__ import annotations

import difflib
from typing import TYPE_CHECKING

from ..core.envelope import Problem
from ..core.errors import Ending, ErrorEntry, error_entries, warning_entries
from ..runtime.call import Outcome
from .parser import Subcommand, argument, flag, option
from .subcommand import JSON, ChildWork, show_drawn, timeout_option

if TYPE_CHECKING:
    from ..runtime.doctor import Findings
    from ..ui.devices import DeviceFindings

# --- errors ---------------------------------------------------------------------------------------------------


def _run_errors(code: str | None, timeout: int) -> ChildWork:
    return ChildWork("errors", lambda: _look_up(code), timeout, show=show_drawn)


def _look_up(code: str | None) -> Outcome:
    """Return the whole registry or one entry of it, in the same shape."""
    errors, warnings = {entry.code: entry for entry in error_entries()}, warning_entries()
    if code is not None:
        wanted = code.upper().replace("-", "_")
        if wanted not in errors and wanted not in warnings:
            close = difflib.get_close_matches(wanted, [*errors, *warnings], n=1)
            hint = f"did you mean {close[0]}?" if close else None
            message = f"there is no error or warning {code!r}"
            return Outcome(Ending.FINISHED, Problem("UNKNOWN_CODE", message, suggestion=hint))
        errors = {wanted: errors[wanted]} if wanted in errors else {}
        warnings = {wanted: warnings[wanted]} if wanted in warnings else {}
    data: dict[str, object] = {
        "errors": [_entry(entry) for entry in errors.values()],
        "warnings": [{"code": name, "summary": summary} for name, summary in warnings.items()],
    }
    return Outcome(Ending.FINISHED, data=data)


def _entry(entry: ErrorEntry) -> dict[str, object]:
    return {
        "code": entry.code,
        "exit_code": entry.exit_code,
        "http_status": entry.http_status,
        "retryable": entry.retryable,
        "side_effects": entry.side_effects.value,
        "summary": entry.summary,
        "hint": entry.hint,
    }


# --- doctor ---------------------------------------------------------------------------------------------------


def _run_doctor(about: str | None, sweep: bool, trace: str | None, timeout: int) -> ChildWork:
    return ChildWork("doctor", lambda: _examine(about, sweep, trace), timeout, mutates=sweep, show=show_drawn)


def _examine(about: str | None, sweep: bool, trace: str | None) -> Outcome:
    if about == "ui":
        import asyncio

        from ..ui.devices import examine_devices

        return _judge(asyncio.run(examine_devices()))
    from ..runtime.doctor import examine

    return _judge(examine(sweep=sweep, trace_id=trace))


def _judge(findings: Findings | DeviceFindings) -> Outcome:
    problem = None
    if findings.failed:
        message = "; ".join(f"{check.name}: {check.detail}" for check in findings.failed)
        problem = Problem("MACHINE_UNFIT", message)
    return Outcome(Ending.FINISHED, problem, findings.as_data())


COMMANDS = {
    "errors": Subcommand(
        "errors",
        options=(argument("code", "Show only this code, as in `shotclock errors TIMEOUT`."), JSON, timeout_option()),
        run=_run_errors,
    ),
    "doctor": Subcommand(
        "doctor",
        options=(
            argument("about", "ui: check the devices of `shotclock ui` instead of the machine.", choices=("ui",)),
            flag(
                "--sweep", "Kill the leftovers and remove empty cgroups. Look at the list first.", excludes=("about",)
            ),
            option(
                "--trace",
                "ID",
                "List only leftovers of this trace (meta.trace_id of an envelope).",
                excludes=("about",),
            ),
            JSON,
            timeout_option(),
        ),
        run=_run_doctor,
    ),
}
