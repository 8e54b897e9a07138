"""Drawings of the answers of `shotclock check`, `plan`, `schema` and `advise`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from ...core.limits import format_duration
from ...core.value_types import JsonObject
from ...core.visible_text import one_line
from ...terminal.drawing import limit_in_words, styled, table
from ...terminal.output import brief

if TYPE_CHECKING:
    from rich.console import Console

_SOURCES = {"default": " (default)", "defaults": " (defaults)", "tool": " (tool)"}


def draw_schema(data: Any, console: Console) -> None:
    console.print(json.dumps(data, indent=2), soft_wrap=True)


def draw_findings(data: Any, console: Console) -> None:
    for finding in data["findings"]:
        colour = "red" if finding["severity"] == "error" else "yellow"
        where = f"{finding['file']}:{finding['line']}:{finding['column']}: "
        hint = f" ({finding['suggestion']})" if "suggestion" in finding else ""
        line = styled(where) + styled(finding["severity"], colour)
        console.print(line + styled(f": {finding['field']}: {finding['message']}{hint}  [{finding['rule']}]"))
    if not data["findings"]:
        console.print(f"{data['file']}: OK")


def draw_plan(data: Any, console: Console) -> None:
    if "steps" in data:
        rows = table("step", "type", "after", "timeout", "attempts", "starts by", "ends by")
        for column in rows.columns[3:]:
            column.justify = "right"
        for step in data["steps"]:
            waits = [f"{name} (ended)" if name in step["any_end_of"] else name for name in step["depends_on"]]
            names = (step["id"], step["type"], " ".join(waits or ["finally"] * step["finally"]))
            timeout, attempts = limit_in_words(step["effective_timeout_ms"]), str(step["attempts"])
            times = (limit_in_words(step["latest_start_ms"], "?"), limit_in_words(step["latest_end_ms"], "?"))
            rows.add_row(
                *names, timeout, attempts, *times, style="bold" if step["id"] in data["critical_path"] else None
            )
        console.print(rows)
        for step in data["steps"]:
            if step["timeout_ms"] and step["effective_timeout_ms"] < step["timeout_ms"]:
                has, left = format_duration(step["timeout_ms"]), format_duration(step["effective_timeout_ms"])
                console.print(f"  {step['id']}: the run leaves it {left} of its {has}", style="bright_black")
            for line in _describe_early_clocks(step):
                console.print(f"  {step['id']}: {line}", style="bright_black")
            if step["approval_ms"]:
                wait = format_duration(step["approval_ms"])
                console.print(f"  {step['id']}: before it begins a person has {wait} to approve it", style="yellow")
        for name, repository in data["repositories"].items():
            console.print(f"  {name}: repository {repository or 'unknown'}", style="bright_black")
        worst, limit = limit_in_words(data["worst_case_ms"], "no end in sight"), limit_in_words(data["run_timeout_ms"])
        path = " → ".join(data["critical_path"])
        people = f" and {format_duration(data['people_ms'])} of waiting for people" if data["people_ms"] else ""
        console.print(f"\nat worst {worst}{people} along {path}; the run has {limit}")
        if data["finally_ms"]:
            path = " → ".join(data["finally_path"])
            console.print(f"{format_duration(data['finally_ms'])} of it are kept for finally, with a reserve: {path}")
        if (concurrency := data.get("concurrency")) is not None:
            group = one_line(concurrency["group"], 100)
            console.print(f"one run at a time in group {group} ({concurrency['on_conflict']})", markup=False)
    if data["findings"]:
        draw_findings(data, console)


def _describe_early_clocks(step: JsonObject) -> Iterator[str]:
    within = format_duration(step["wind_down_ms"])
    if step["overtime"]:
        when = f" from {format_duration(step['soft_ms'])}" if step["soft_ms"] else ""
        yield f"overtime{when}: {step['overtime']}; else it winds down within {within}"
    elif step["soft_ms"]:
        yield f"winds down from {format_duration(step['soft_ms'])}, within {within}"


def draw_advice(data: Any, console: Console) -> None:
    if "findings" in data:  # the file has mistakes
        draw_findings(data, console)
        return
    rows = table("step", "timeout", "runs", "p50", "p95", "max", "timeouts", "advice", wraps=7)
    for column in rows.columns[1:7]:
        column.justify = "right"
    for each in data["timeouts"]:
        name = styled("the run", "italic") if each["step"] is None else styled(one_line(each["step"], 40))
        limit = limit_in_words(each["timeout_ms"], "none") + _SOURCES.get(each["source"], "")
        figures = (_figure(each, figure) for figure in ("p50", "p95", "max"))
        colour = {"raise": "yellow", "lower": "cyan", "unknown": "bright_black"}.get(each["verdict"], "")
        numbers = (str(each["runs"]), *figures, str(each["timeouts"] or ""))
        rows.add_row(name, limit, *numbers, styled(each["advice"], colour))
    console.print(rows)
    more = "" if data["runs_are_all_read"] else "; there was no time to read more"
    console.print(f"\n{data['runs']} ended runs of {one_line(data['name'], 60)}{more}", style="dim")


def _figure(row: JsonObject, name: str) -> str:
    ms = row[f"{name}_ms"]
    return "" if ms is None else f"{'≥' if row.get(f'{name}_is_at_least') else ''}{brief(ms)}"
