"""Drawings of the report of a run, and of the list of runs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ...core.value_types import JsonObject
from ...core.visible_text import one_line, visible
from ...terminal.drawing import OFF_TERMINAL_COLUMNS, styled, table
from ...terminal.output import brief, describe_page
from ..report.words import COLOURS, MARKS, WORDS, artifacts_in_words, attempts_in_words, news_in_words
from ..run.state import Status

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

STEPS_SHOWN = 60  # steps shown on a terminal; of a longer run only failed, running, repeated and critical ones
NEWS_SHOWN = 10
P95_WIDTH = 12
ATTEMPTS_WIDTH = 13


def draw_runs(data: Any, console: Console) -> None:
    if not data["runs"]:
        console.print("no runs yet")
    rows = table("", "", "", "", "", wraps=4)
    for run in data["runs"]:
        status = Status(run["status"])
        took = "" if run["duration_ms"] is None else brief(run["duration_ms"])
        mark = styled().append(f"{MARKS[status]} ", COLOURS[status]).append(one_line(run["run_id"], 40), "bold")
        name = styled(one_line(run["name"], 60), no_wrap=True, overflow="ellipsis")
        rows.add_row(mark, styled(WORDS[status], COLOURS[status]), f"{run['started_at'][:19]}Z", took, name)
    console.print(rows)


def draw_run(data: Any, console: Console) -> None:
    status = Status(data["status"])
    of = f" of {brief(data['budget_ms'])}" if data["budget_ms"] else ""
    title = styled(f"{MARKS[status]} {one_line(data['name'], 80)} {WORDS[status]}", f"bold {COLOURS[status]}")
    _print_line(console, title + styled(f" in {brief(data['duration_ms'])}{of}", "not bold"))
    if data["why"]:
        _print_line(console, styled(f"  {one_line(data['why'], 500)}", COLOURS[status]))
    counts = ", ".join(f"{count} {WORDS[Status(name)]}" for name, count in data["counts"].items())
    group = data["concurrency"]
    waited = f", waited {brief(group['waited_ms'])}" if group and group["waited_ms"] else ""
    in_group = f"; group {one_line(group['group'], 80)}{waited}" if group else ""
    _print_line(console, styled(f"  {counts}; run {one_line(data['run_id'], 80)}{in_group}\n", "bright_black"))
    steps = _worth_showing(data["steps"], set(data["critical_path"]))
    names = min(28, max((len(one_line(step["id"], 28)) for step in steps), default=0))
    end_ms = max(data["duration_ms"], 1)
    has_p95 = any(step["p95_ms"] is not None for step in steps)
    columns = 80 if console.width == OFF_TERMINAL_COLUMNS else console.width
    has_attempts = any(step["attempts"] > 1 and not step["is_per_item"] for step in steps)
    room = max(10, columns - names - 26 - P95_WIDTH * has_p95 - ATTEMPTS_WIDTH * has_attempts)
    for step in steps:
        _print_line(console, _row(step, names, room, end_ms, has_p95=has_p95))
        if step["why"]:
            _print_line(console, styled(f"    {one_line(step['why'], 200)}", COLOURS[Status(step["status"])]))
        for news in step["overtime"][:NEWS_SHOWN]:
            _print_line(
                console, styled(f"    ◔ +{brief(news['at_ms'])} {one_line(news_in_words(news), 200)}", "yellow")
            )
    if len(steps) < len(data["steps"]):
        _print_line(console, styled(f"\n  {len(data['steps']) - len(steps)} more steps; --html FILE shows them all"))
    if data["artifacts"] is not None:
        words, folder = artifacts_in_words(data["artifacts"]), visible(data["artifacts"]["folder"])
        console.print(styled(f"\n  {words}: {folder}"), soft_wrap=True)
    if data["rerun_of"]:
        _print_line(console, styled(f"\n  continues run {one_line(data['rerun_of'], 80)}", "bright_black"))
    if data["continue_command"]:
        _print_line(console, styled(f"\n  continue it: {one_line(data['continue_command'], 200)}"))
    for name in ("html", "output_file"):
        if name in data:
            console.print(styled(f"\n{describe_page(data, name)}"), soft_wrap=True)  # whole, to be copied


def _worth_showing(steps: list[JsonObject], on_path: set[str]) -> list[JsonObject]:
    if len(steps) <= STEPS_SHOWN:
        return steps
    bad = [step for step in steps if Status(step["status"]).is_bad or step["status"] == "running"]
    rest = [step for step in steps if step not in bad and (step["attempts"] > 1 or step["id"] in on_path)]
    chosen = {step["id"] for step in (bad + rest)[:STEPS_SHOWN]}
    return [step for step in steps if step["id"] in chosen]


def _row(step: JsonObject, names: int, room: int, end_ms: int, *, has_p95: bool) -> Text:
    status = Status(step["status"])
    took = "" if step["duration_ms"] is None else brief(step["duration_ms"] - step["uncounted_ms"])
    budget = f"/ {brief(step['budget_ms'])}" if step["budget_ms"] and step["started_ms"] is not None else ""
    line = styled(f"{MARKS[Status.PARKED if step['waits_for'] else status]} ", COLOURS[status])
    line += styled(f"{one_line(step['id'], 28):<{names}} ") + styled(f"{took:>8} ", "bold")
    if has_p95:
        p95 = "" if step["p95_ms"] is None else f"p95 {brief(step['p95_ms'])}"
        line += styled(f"{p95:<{P95_WIDTH}}", "bright_black")
    line += styled(f"{budget:<9} ", "bright_black")
    if step["at_ms"] is None:
        return line + styled(WORDS[status], COLOURS[status])
    start = min(room - 1, step["at_ms"] * room // end_ms)
    if step["started_ms"] is None:
        return line + styled(" " * start + "○", COLOURS[status])
    used = max(1, min(room - start, round((step["duration_ms"] or 0) * room / end_ms)))
    spare, waited = 0, min(used, round(step["waited_ms"] * room / end_ms))
    if step["budget_ms"]:
        spare = max(0, min(room - start, round((step["budget_ms"] + step["uncounted_ms"]) * room / end_ms)) - used)
    attempts = "" if step["is_per_item"] or step["attempts"] <= 1 else f" ↻ {attempts_in_words(step['attempts'])}"
    line += styled(" " * start) + styled("╱" * waited, "yellow") + styled("█" * (used - waited), COLOURS[status])
    return line + styled("░" * spare, "bright_black") + attempts


def _print_line(console: Console, line: Text) -> None:
    """Print one line, cut at the edge of the terminal."""
    console.print(line, no_wrap=True, overflow="ellipsis")
