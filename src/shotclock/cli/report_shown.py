"""A run for a person at a terminal: a summary and its timeline, as wide as the terminal is."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.text import Text

from ..core.envelope import Envelope
from ..core.texts import one_line
from ..workflow.report import MARKS, WORDS, brief
from ..workflow.states import Status
from .report import where_it_is

# Steps on a terminal. Of a longer run only those that say something are shown there.
STEPS_SHOWN = 60

COLOURS = {
    Status.SUCCEEDED: "green",
    Status.FAILED: "red",
    Status.TIMED_OUT: "yellow",
    Status.CANCELLED: "magenta",
    Status.INTERRUPTED: "magenta",
    Status.PARKED: "yellow",
    Status.RUNNING: "blue",
    Status.SKIPPED: "bright_black",
    Status.PENDING: "bright_black",
}


def render_list(envelope: Envelope, console: Console) -> None:
    data: Any = envelope.data
    if not data["runs"]:
        console.print(Text("no runs yet"))
    width = max((len(one_line(run["run_id"], 40)) for run in data["runs"]), default=0)
    for run in data["runs"]:
        status = Status(run["status"])
        took = "" if run["duration_ms"] is None else brief(run["duration_ms"])
        line = Text(f"{MARKS[status]} ", COLOURS[status]) + Text(f"{one_line(run['run_id'], 40):<{width}}  ", "bold")
        line += Text(f"{WORDS[status]:<11}", COLOURS[status]) + Text(f"  {run['started_at'][:19]}Z  {took:>8}  ")
        line += Text(one_line(run["name"], 60))
        _print(console, line)


def render(envelope: Envelope, console: Console) -> None:
    """A summary and the timeline, as wide as the terminal is."""
    data: Any = envelope.data
    status = Status(data["status"])
    of = f" of {brief(data['budget_ms'])}" if data["budget_ms"] else ""
    title = Text(f"{MARKS[status]} {one_line(data['name'], 80)} {WORDS[status]}", f"bold {COLOURS[status]}")
    _print(console, title + Text(f" in {brief(data['duration_ms'])}{of}", "not bold"))
    if data["why"]:
        _print(console, Text(f"  {one_line(data['why'], 500)}", COLOURS[status]))
    counts = ", ".join(f"{count} {WORDS[Status(name)]}" for name, count in data["counts"].items())
    _print(console, Text(f"  {counts}; run {one_line(data['run_id'], 80)}\n", "bright_black"))
    steps = _worth_showing(data["steps"], set(data["critical_path"]))
    names = min(28, max((len(one_line(step["id"], 28)) for step in steps), default=0))
    end_ms = max(data["duration_ms"], 1)
    room = max(10, console.width - names - 26)
    for step in steps:
        _print(console, _row(step, names, room, end_ms))
        if step["why"]:
            _print(console, Text(f"    {one_line(step['why'], 200)}", COLOURS[Status(step["status"])]))
    if len(steps) < len(data["steps"]):
        _print(console, Text(f"\n  {len(data['steps']) - len(steps)} more steps; --html FILE shows them all"))
    for name in ("html", "output_file"):
        if name in data:
            console.print(Text(f"\n{where_it_is(data, name)}"), soft_wrap=True)  # whole, so that it can be copied


def _worth_showing(steps: list[dict[str, Any]], on_path: set[str]) -> list[dict[str, Any]]:
    if len(steps) <= STEPS_SHOWN:
        return steps
    bad = [step for step in steps if Status(step["status"]).is_bad or step["status"] == "running"]
    rest = [step for step in steps if step not in bad and (step["attempts"] > 1 or step["id"] in on_path)]
    chosen = {step["id"] for step in (bad + rest)[:STEPS_SHOWN]}
    return [step for step in steps if step["id"] in chosen]


def _row(step: dict[str, Any], names: int, room: int, end_ms: int) -> Text:
    status = Status(step["status"])
    took = "" if step["duration_ms"] is None else brief(step["duration_ms"])
    budget = f"/ {brief(step['budget_ms'])}" if step["budget_ms"] and step["started_ms"] is not None else ""
    line = Text(f"{MARKS[status]} ", COLOURS[status])
    line += Text(f"{one_line(step['id'], 28):<{names}} ") + Text(f"{took:>8} ", "bold")
    line += Text(f"{budget:<9} ", "bright_black")
    if step["at_ms"] is None:
        return line + Text(WORDS[status], COLOURS[status])
    start = min(room - 1, step["at_ms"] * room // end_ms)
    if step["started_ms"] is None:
        return line + Text(" " * start + "○", COLOURS[status])
    used = max(1, min(room - start, round((step["duration_ms"] or 0) * room / end_ms)))
    spare = 0
    if step["budget_ms"]:
        spare = max(0, min(room - start, round(step["budget_ms"] * room / end_ms)) - used)
    tries = f" ↻{step['attempts']}" if step["attempts"] > 1 else ""
    return line + Text(" " * start) + Text("█" * used, COLOURS[status]) + Text("░" * spare, "bright_black") + tries


def _print(console: Console, line: Text) -> None:
    console.print(line, soft_wrap=False, no_wrap=True, overflow="ellipsis", crop=True)
