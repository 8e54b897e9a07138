"""What the subcommands answer, for a person at a terminal. Nothing else of them is needed to draw it."""

from __future__ import annotations

import json
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ..core.durations import format_duration
from ..core.envelope import Envelope

_MARKS = {"ok": ("✓", "green"), "warn": ("!", "yellow"), "fail": ("✗", "bold red")}


def render(envelope: Envelope, console: Console) -> None:
    """By what was asked for. What is not known here is shown as the data that it is."""
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
            from .report_shown import render, render_list

            is_list = isinstance(envelope.data, dict) and "runs" in envelope.data
            (render_list if is_list else render)(envelope, console)
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
    """A process chooses its own command line; it must not reach a terminal as escape sequences."""
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
