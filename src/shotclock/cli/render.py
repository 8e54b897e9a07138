"""Draw what the subcommands answer, for a person at a terminal."""

from __future__ import annotations

import json
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ..core.durations import format_duration
from ..core.envelope import Envelope
from ..core.texts import one_line
from ..workflow.report import MARKS, WORDS, brief
from ..workflow.state import Status
from .report import say_where

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

_MARKS = {"ok": ("✓", "green"), "warn": ("!", "yellow"), "fail": ("✗", "bold red")}


def render(envelope: Envelope, console: Console) -> None:
    """Draw an answer by what was asked for; what is not known here as the data that it is."""
    match envelope.meta["command"]:
        case "shotclock":
            _version(envelope, console)
        case "errors":
            _errors(envelope, console)
        case "doctor":
            _doctor(envelope, console)
        case "check":
            _findings(envelope, console)
        case "plan":
            _plan(envelope, console)
        case "prune":
            _pruned(envelope, console)
        case "report":
            is_list = isinstance(envelope.data, dict) and "runs" in envelope.data
            (_run_list if is_list else _run)(envelope, console)
        case _:
            console.print(json.dumps(envelope.data, indent=2), soft_wrap=True)


def _pruned(envelope: Envelope, console: Console) -> None:
    data: Any = envelope.data
    gone = data["deleted"]
    verb = "would go" if data["dry_run"] else "went"
    console.print(f"{gone['runs']} runs ({_bytes(gone['runs_bytes'])}) and {gone['proposals']} proposals {verb}")
    before, after = _bytes(data["file_bytes_before"]), _bytes(data["file_bytes"])
    console.print(f"{data['file']}: {before}" + ("" if data["dry_run"] else f", now {after}"), soft_wrap=True)


def _bytes(size: int) -> str:
    for unit in ("B", "kB", "MB"):
        if size < 1000:
            return f"{size:.3g} {unit}"
        size /= 1000  # type: ignore[assignment]
    return f"{size:.3g} GB"


def _version(envelope: Envelope, console: Console) -> None:
    data: Any = envelope.data
    console.print(f"shotclock {data['version']}")


def _errors(envelope: Envelope, console: Console) -> None:
    assert isinstance(envelope.data, dict)
    errors, warnings = envelope.data["errors"], envelope.data["warnings"]
    assert isinstance(errors, list) and isinstance(warnings, list)
    if errors:
        table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
        for title in ("error", "exit", "HTTP", "retry", "effects", "what it means"):
            table.add_column(title, justify="right" if title in ("exit", "HTTP") else "left")
        for entry in errors:
            meaning = Text(entry["summary"])
            meaning.append(f"\n→ {entry['hint']}", style="dim")
            retry = "yes" if entry["retryable"] else "no"
            code = Text(entry["code"], style="bold")
            numbers = (str(entry["exit_code"]), str(entry["http_status"]))
            table.add_row(code, *numbers, retry, entry["side_effects"], meaning)
        console.print(table)
    if warnings:
        table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
        table.add_column("warning")
        table.add_column("what it means")
        for entry in warnings:
            table.add_row(Text(entry["code"], style="bold"), entry["summary"])
        if errors:
            console.print()
        console.print(table)


def _doctor(envelope: Envelope, console: Console) -> None:
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
    """Make a text safe: a process chooses its own command line, which must not reach a terminal as escape sequences."""
    return "".join(character if character.isprintable() else "?" for character in str(text))


def _findings(envelope: Envelope, console: Console) -> None:
    data: Any = envelope.data
    for finding in data["findings"]:
        colour = "red" if finding["severity"] == "error" else "yellow"
        where = f"{finding['file']}:{finding['line']}:{finding['column']}: "
        hint = f" ({finding['suggestion']})" if "suggestion" in finding else ""
        said = Text(where) + Text(finding["severity"], colour)
        console.print(said + Text(f": {finding['field']}: {finding['message']}{hint}  [{finding['rule']}]"))
    if not data["findings"]:
        console.print(Text(f"{data['file']}: nothing to say against it"))


def _plan(envelope: Envelope, console: Console) -> None:
    data: Any = envelope.data
    if "steps" in data:
        table = Table(box=None, pad_edge=False)
        for title in ("step", "type", "after", "timeout", "tries", "starts by", "ends by"):
            table.add_column(
                title, justify="right" if title in ("timeout", "tries", "starts by", "ends by") else "left"
            )
        on_path = set(data["critical_path"])
        for step in data["steps"]:
            style = "bold" if step["id"] in on_path else None
            table.add_row(
                step["id"],
                step["type"],
                " ".join(step["depends_on"]),
                _clock(step["effective_timeout_ms"]),
                str(step["attempts"]),
                _clock(step["latest_start_ms"], "?"),
                _clock(step["latest_end_ms"], "?"),
                style=style,
            )
        console.print(table)
        worst = _clock(data["worst_case_ms"], "no end in sight")
        limit = _clock(data["run_timeout_ms"])
        console.print(Text(f"\nat worst {worst} along {' → '.join(data['critical_path'])}; the run has {limit}"))
    if data["findings"]:
        _findings(envelope, console)


def _clock(ms: int | None, otherwise: str = "no limit") -> str:
    return otherwise if ms is None or (ms == 0 and otherwise == "no limit") else format_duration(ms)


# --- runs -----------------------------------------------------------------------------------------------------


def _run_list(envelope: Envelope, console: Console) -> None:
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


def _run(envelope: Envelope, console: Console) -> None:
    """Draw a summary and the timeline, as wide as the terminal is."""
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
            console.print(Text(f"\n{say_where(data, name)}"), soft_wrap=True)  # whole, so that it can be copied


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
