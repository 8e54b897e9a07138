"""Drawings of proposals and of the audit trail.

The texts of a proposal are foreign: none reaches the terminal as a control character or as markup.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from ..core.value_types import JsonObject
from ..core.visible_text import one_line, visible
from ..terminal.drawing import NEVER, age, styled, table, time_left

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

LINES_SHOWN = 2_000  # the envelope has the rest
LINE_SHOWN = 2_000
DECISION_COLOURS = {
    "pending": "yellow",
    "approved": "green",
    "modified": "green",
    "rejected": "red",
    "expired": "magenta",
    "withdrawn": "bright_black",
}
RUN_STATES = {
    "not_started": "approved, waits for the agent to call again, or for its run",
    "missed": "not run: the agent did not make the call again in time",
    "running": "running",
    "succeeded": "succeeded",
    "failed": "failed",
    "unknown": "started, but its process is gone: it may have done a part",
}
_SOURCES = {
    "claim": "compared with the text that the agent claims the file had, not with the file itself",
    "read": "compared with the file itself",
    "same": "the file already holds this text: all lines are shown as new",
    "nothing": "the current text is unknown: all lines are shown as new",
}


def draw_inbox(verb: str, data: Any, console: Console) -> None:
    """Draw the answer of a verb of `shotclock inbox`. One that failed may have other data, which is not drawn."""
    match verb:
        case "list" if "proposals" in data:
            _draw_proposals(data, console)
        case "show" if "history" in data:
            draw_proposal(data, console)
        case "audit" if "partial" not in data:
            _draw_trail(data, console)
        case "propose" | "check" if "proposal_id" in data:
            _draw_result(data, console)
        case "watch" if "proposal" in data:
            console.print(_describe_change(data), no_wrap=True, overflow="ellipsis")
        case _ if "title" in data:
            console.print(_describe_change({"type": "proposal", "proposal": data}))


def _draw_proposals(data: Any, console: Console) -> None:
    is_pending = data["status"] == "pending"
    if not data["proposals"]:
        console.print("no proposal waits for a decision" if is_pending else "no proposals")
        return
    titles = ("id", "title", "kind", "asked by", "age", "expires in" if is_pending else "status")
    # A narrow terminal shows the id, the title and the status.
    shown = range(len(titles)) if console.width >= 80 else (0, 1, len(titles) - 1)
    rows = table(*(titles[place] for place in shown), wraps=1)
    for each in data["proposals"]:
        row = _describe_proposal(each, is_pending)
        rows.add_row(*(row[place] for place in shown))
    console.print(rows)
    if data["more"]:
        console.print("there are more: --limit", style="dim")


def _describe_proposal(each: JsonObject, is_pending: bool) -> list[Text]:
    title = styled("destructive " if each["destructive"] else "", style="bold red", no_wrap=True, overflow="ellipsis")
    title.append(one_line(each["title"]), "not bold default")
    status = each["status"]
    if status == "pending":
        left = time_left(each["expires_at"])
        status = left if is_pending else f"pending, {left}"
    texts = (each["kind"], one_line(each["asked_by"], 20), age(each["created_at"]))
    return [styled(each["id"], "bold"), title, *map(styled, texts), styled(status, DECISION_COLOURS[each["status"]])]


def draw_proposal(data: Any, console: Console) -> None:
    console.print(_heading(data["id"], data["status"], data["title"]))
    asked = f"{data['kind']} asked by {one_line(data['asked_by'], 80)} {age(data['created_at'])} ago"
    until = f", {_open_for(data['expires_at'])}" if data["status"] == "pending" else ""
    console.print(f"  {asked}{until}", style="dim")
    if data["policy"]["deciders"]:
        console.print(f"  for {', '.join(one_line(name, 80) for name in data['policy']['deciders'])} to decide")
    if data["destructive"]:
        console.print(f"  destructive: approving asks to type {one_line(data['confirmation'])}", style="bold red")
    console.print()
    _print_text(console, data["shown"]["action"], is_marked=True)
    if data["justification"]:
        console.print("\nreason given:", style="dim")
        _print_text(console, data["justification"])
    if data["file"] is not None:
        console.print()
        _print_difference(console, data)
    if data["decision"] is not None:
        console.print()
        _print_decision(console, data)
    if data["run"] is not None:
        _print_run(console, data["run"], unanswered=data["status"] == "expired")
    console.print()
    for entry in data["history"]:
        _print_entry(entry, console)


def _print_difference(console: Console, data: Any) -> None:
    file = data["shown"]["file"]
    console.print(_SOURCES[file["source"]], style="dim")
    if data["status"] != "pending" and file["source"] in ("claim", "nothing"):
        console.print("the file itself is read only while a proposal waits", style="dim")
    if file["source"] == "claim" and data["diff"] and "\n@@ " in data["diff"].partition("\n@@ ")[2]:
        console.print("lines that the agent claims are there already are omitted", style="bold")
    if file["contradicts"]:
        console.print("the agent claims a different current text", style="bold red")
    if data["diff"] is None:
        path = one_line(data["file"]["path"], 4_096)
        console.print(styled(f"{path}: the texts are too different to compare; proposed is"))
        _print_text(console, data["file"]["proposed"])
    elif not data["diff"]:
        console.print(styled(f"{one_line(data['file']['path'], 4_096)}: nothing would change"))
    for line in _lines_to_show(data["diff"] or "", console):
        styles = {"+++": "bold", "---": "bold", "@@ ": "cyan"}
        style = styles.get(line[:3]) or {"+": "green", "-": "red", "\\": "dim"}.get(line[:1], "")
        console.print(styled(line, style=style), soft_wrap=True)


def _print_decision(console: Console, data: Any) -> None:
    decision = data["decision"]
    via = f" via {one_line(data['decided_via'], 200)}" if data["decided_via"] else ""
    console.print(styled(f"{data['status']} by {one_line(data['decided_by'], 80)}{via} at {data['decided_at']}"))
    if decision["answer"] is not None:
        _print_text(console, f"answer: {decision['answer']}")
    if decision["notes"]:
        _print_text(console, decision["notes"])
    if data["shown"]["modified"] is not None:
        _print_text(console, data["shown"]["modified"], is_marked=True)


def _print_run(console: Console, run: Any, *, unanswered: bool = False) -> None:
    at = "" if run["at"] is None else f" at {run['at']}"
    why = f": {run['code']} {one_line(run['message'] or '')}" if run["state"] == "failed" else ""
    style = {"succeeded": "green", "failed": "red", "unknown": "red"}.get(run["state"], "yellow")
    how = "expired undecided, and run as its rules allow: " if unanswered else ""
    console.print(f"{how}{_run_state(run)}{at}{why}", style=style)


def _run_state(run: Any) -> str:
    if "run_id" in run and run["state"] == "missed":
        return f"not run: run {run['run_id']} has ended, or has no time left"
    until = "" if run.get("until", NEVER) == NEVER else f", until {run['until']} (in {time_left(run['until'])})"
    if run["state"] == "not_started" and "run_id" in run:
        command = f"shotclock run --resume {run['run_id']}"
        return f"not run yet: its run continues by itself, a parked local one with: {command}{until}"
    if run["state"] == "not_started" and "until" in run:
        return f"approved, waits for the agent to call again{until}"
    return RUN_STATES[run["state"]]


def _print_text(console: Console, text: str, *, is_marked: bool = False) -> None:
    for line in _lines_to_show(text, console, is_marked=is_marked):
        console.print(styled(f"  {line}"), soft_wrap=True)


def _lines_to_show(text: str, console: Console, *, is_marked: bool = False) -> Iterator[str]:
    """Yield the lines, with invisible characters made visible unless `is_marked`."""
    lines = text.split("\n") if text else []
    for line in lines[:LINES_SHOWN]:
        more = f"… {len(line) - LINE_SHOWN} more characters" if len(line) > LINE_SHOWN else ""
        shown = line[:LINE_SHOWN] if is_marked else visible(line[:LINE_SHOWN])
        yield shown.expandtabs(8) + more
    if len(lines) > LINES_SHOWN:
        console.print(f"… {len(lines) - LINES_SHOWN} more lines: --json has them all", style="dim")


def _draw_result(data: Any, console: Console) -> None:
    console.print(_heading(data["proposal_id"], data["status"], data["title"]))
    if data.get("continue_command") is not None:
        console.print(f"  continue with: {one_line(data['continue_command'], 2_000)}", style="dim")
    if data["status"] != "pending":
        _print_text(console, data["notes"])
    if data.get("run") is not None:
        _print_run(console, data["run"])
    if data.get("answer") is not None:
        _print_text(console, f"answer: {data['answer']}")


def _describe_change(event: JsonObject) -> Text:
    each = event["proposal"]
    text = _heading(each["id"], each["status"], each["title"], width=9)
    if event["type"] == "reminder":
        text.append(f"  expires in {time_left(each['expires_at'])}", style="bold red")
    elif each["status"] == "pending":
        text.append(f"  {one_line(each['asked_by'], 40)}, {_open_for(each['expires_at'])}", style="dim")
    elif each["decided_by"] is not None:
        text.append(f"  by {one_line(each['decided_by'], 40)}", style="dim")
        if each["run"] is not None:
            text.append(f"  {_run_state(each['run'])}", style="dim")
    return text


def _heading(id: str, status: str, title: str, width: int = 0) -> Text:
    text = styled().append(id, "bold").append("  ").append(f"{status:<{width}}", DECISION_COLOURS[status])
    return text.append(f"  {one_line(title)}")


def _open_for(until: str) -> str:
    return "without an end" if until == NEVER else f"expires in {time_left(until)}"


def _draw_trail(data: Any, console: Console) -> None:
    if "whole" in data:
        if data["whole"]:
            console.print("the audit trail is whole", style="green")
        for problem in data["problems"]:
            console.print(f"✗ {visible(problem['message'])}", style="red")
    elif "head" in data:
        console.print(f"{data['head']['seq']} {data['head']['hash']}", soft_wrap=True)
    elif not data["entries"]:
        console.print("no entries")
    for entry in data.get("entries", ()):
        _print_entry(entry, console)


def _print_entry(entry: JsonObject, console: Console) -> None:
    about = "" if entry["proposal"] is None else f"{entry['proposal']}  "
    details = entry["details"]
    notes = details.get("notes") or details.get("name") or details.get("code") or details.get("job_id") or ""
    via = f" via {one_line(details['via'], 200)}" if details.get("via") else ""
    text = styled().append(f"{entry['at'][:19].replace('T', ' ')}  ", "dim").append(about)
    text.append(f"{entry['action']:<13} ", "bold").append(f"{one_line(entry['by'], 80)}{via}")
    text.append(f"  {one_line(str(notes), 200)}" if notes else "", "dim")
    console.print(text, soft_wrap=True)
