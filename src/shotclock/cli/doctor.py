"""`shotclock doctor`: the health of this machine, as data and as a page. The probes are in enforce/checkup.py."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ..core.durations import format_duration
from ..core.effects import Ending
from ..core.envelope import Envelope, Problem
from ..enforce.admission import Outcome
from ..enforce.checkup import examine
from . import errors as errors  # registers MACHINE_UNFIT

_MARKS = {"ok": ("✓", "green"), "warn": ("!", "yellow"), "fail": ("✗", "bold red")}


def check_up(*, sweep: bool, trace_id: str | None) -> Outcome:
    findings = examine(sweep=sweep, trace_id=trace_id)
    problem = None
    if findings.failed:
        message = "; ".join(f"{check.name}: {check.detail}" for check in findings.failed)
        problem = Problem("MACHINE_UNFIT", message)
    return Outcome(Ending.FINISHED, problem, findings.as_data())


def render(envelope: Envelope, console: Console) -> None:
    assert isinstance(envelope.data, dict)
    data: dict[str, list[dict[str, object]]] = envelope.data  # type: ignore[assignment]
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    table.add_column()
    table.add_column(style="bold", no_wrap=True)
    table.add_column()
    for check in data["checks"]:
        mark, style = _MARKS[str(check["status"])]
        name = str(check["name"]).replace("_", " ")
        table.add_row(Text(mark, style=style), name, Text(_plain(check["detail"])))
    console.print(table)
    swept = {each["pid"]: each["gone"] for each in data["swept"]}
    if data["leftovers"]:
        console.print(Text("\nleftovers", style="bold"))
    for left in data["leftovers"]:
        overdue = format_duration(int(str(left["overdue_ms"])) // 1000 * 1000)
        if left["pid"] in swept:
            fate = "stopped" if swept[left["pid"]] else "still there"
        else:
            fate = f"kept: {left['kept']}" if left["kept"] else "see --sweep"
        console.print(Text(f"  {left['pid']}  {_plain(left['command'])}  ({overdue} overdue, {fate})"))
    console.print(Text("\nwhat it cannot catch", style="bold"))
    escapes = Table(box=None, show_header=False, padding=(0, 1, 0, 0))
    for escape in data["cannot_catch"]:
        escapes.add_row(" •", Text(str(escape)))
    console.print(escapes)


def _plain(text: object) -> str:
    """A process chooses its own command line; it must not reach a terminal as escape sequences."""
    return "".join(character if character.isprintable() else "?" for character in str(text))
