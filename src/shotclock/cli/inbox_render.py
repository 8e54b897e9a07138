"""Proposals for a person at a terminal. Every text in them is somebody else's: nothing of it reaches the terminal as a
control character, and nothing is taken for markup."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ..core.texts import one_line, visible
from ..core.walltime import LATEST_MS, WallTime

TOO_DIFFERENT = "the texts are too different to compare"
# Of what a terminal shows of one text. All of it is in the envelope.
LINES_SHOWN = 2_000
LINE_SHOWN = 2_000
# Of a title in a list. Where the terminal is too narrow for that, other columns give way.
LEAST_TITLE = 24
NEVER = WallTime(LATEST_MS).iso()

COLOURS = {
    "pending": "yellow",
    "approved": "green",
    "modified": "green",
    "rejected": "red",
    "expired": "magenta",
    "withdrawn": "bright_black",
}


# What became of what was approved.
RUNS = {
    "not_started": "not run yet: whoever asked has to call again",
    "running": "running",
    "succeeded": "succeeded",
    "failed": "failed",
    "unknown": "began, and its process is gone: nobody knows how far it came",
}


def drawn(render: Callable[[Console], None], to_stderr: bool = False) -> str:
    """Draw it as the terminal on that stream would show it."""
    console = Console(highlight=False, stderr=to_stderr)
    with console.capture() as captured:
        render(console)
    return captured.get()


def render(verb: str, data: dict[str, Any], console: Console, now: WallTime) -> None:
    """Draw what came of one of the verbs."""
    match verb:
        case "list":
            render_list(data, console, now)
        case "show" if "history" in data:
            render_whole(data, console, now)
        case "audit":
            render_audit(data, console)
        case "propose" | "check":
            render_result(data, console)
        case "approve" | "modify" | "reject" | "extend" | "withdraw" if "title" in data:
            console.print(line_of({"type": "proposal", "proposal": data}, now))


# --- a list -----------------------------------------------------------------------------------------------------


def render_list(data: Any, console: Console, now: WallTime) -> None:
    proposals = data["proposals"]
    if not proposals:
        console.print("nothing waits for a decision" if data["status"] == "pending" else "there are none")
        return
    columns: dict[str, list[Text]] = {name: [] for name in ("id", "title", "kind", "asked by", "age", "status")}
    for each in proposals:
        title = Text(one_line(each["title"]))
        if each["destructive"]:
            title = Text("destructive ", style="bold red") + title
        status = Text(each["status"], style=COLOURS[each["status"]])
        if each["status"] == "pending":
            left = time_left(each["expires_at"], now)
            status = Text(left if data["status"] == "pending" else f"pending, {left}", style=COLOURS["pending"])
        texts = (Text(each["id"], style="bold"), title, Text(each["kind"]), Text(one_line(each["asked_by"], 20)),
                 Text(age(each["created_at"], now)), status)  # fmt: skip
        for column, text in zip(columns.values(), texts, strict=True):
            column.append(text)
    if data["status"] == "pending":
        columns["expires in"] = columns.pop("status")
    _print_columns(columns, console)
    if data["more"]:
        console.print(Text("there are more: --limit", style="dim"))


def _print_columns(columns: dict[str, list[Text]], console: Console) -> None:
    """Print a table: the title gets what the others leave, and the least needed of them give way to it."""
    widths = {name: max(len(name), *(text.cell_len for text in texts)) for name, texts in columns.items()}

    def room() -> int:
        return console.width - sum(widths[name] + 2 for name in columns if name != "title") - 2

    for name in ("kind", "age", "asked by"):
        if room() < min(widths["title"], LEAST_TITLE):
            del columns[name]
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold", pad_edge=False)
    for name in columns:
        is_title = name == "title"
        width = max(1, min(widths[name], room())) if is_title else widths[name]
        table.add_column(
            name, no_wrap=True, overflow="ellipsis", width=width, justify="right" if name == "age" else "left"
        )
    for row in zip(*columns.values(), strict=True):
        table.add_row(*row)
    console.print(table)


def line_of(event: dict[str, Any], now: WallTime) -> Text:
    """Draw a change, for whoever watches."""
    each = event["proposal"]
    status = each["status"]
    text = Text.assemble((each["id"], "bold"), "  ", (f"{status:<9}", COLOURS[status]), "  ", one_line(each["title"]))
    if event["type"] == "reminder":
        text.append(f"  expires in {time_left(each['expires_at'], now)}", style="bold red")
    elif status == "pending":
        text.append(f"  {one_line(each['asked_by'], 40)}, {_open_for(each['expires_at'], now)}", style="dim")
    elif each["decided_by"] is not None:
        text.append(f"  by {one_line(each['decided_by'], 40)}", style="dim")
        if each["run"] is not None:
            text.append(f"  {RUNS[each['run']['state']]}", style="dim")
    return text


# --- one --------------------------------------------------------------------------------------------------------


def render_whole(data: Any, console: Console, now: WallTime) -> None:
    status = data["status"]
    console.print(Text.assemble((data["id"], "bold"), "  ", (status, COLOURS[status]), "  ", one_line(data["title"])))
    asked = f"{data['kind']} asked by {one_line(data['asked_by'], 80)} {age(data['created_at'], now)} ago"
    if status == "pending":
        asked += f", {_open_for(data['expires_at'], now)}"
    console.print(Text(f"  {asked}", style="dim"))
    if data["policy"]["deciders"]:
        console.print(Text(f"  for {', '.join(one_line(name, 80) for name in data['policy']['deciders'])} to decide"))
    if data["destructive"]:
        console.print(Text(f"  destructive: approving asks to type {one_line(data['confirmation'])}", style="bold red"))
    console.print()
    _print_text(console, data["shown"]["action"], is_marked=True)
    if data["justification"]:
        console.print(Text("\nthe agent says:", style="dim"))
        _print_text(console, data["justification"])
    if data["file"] is not None:
        console.print()
        _print_difference(console, data)
    if data["decision"] is not None:
        console.print()
        _print_decision(console, data)
    if data["run"] is not None:
        _print_run(console, data["run"], unanswered=status == "expired")
    console.print()
    for entry in data["history"]:
        render_entry(entry, console)


_SOURCES = {
    "claim": "compared with what the agent said the file held when it asked: its word, not a look at the file",
    "read": "compared with the file itself",
    "nothing": "nobody says what is there now: all of it is shown as new",
}


def _print_difference(console: Console, data: Any) -> None:
    file = data["shown"]["file"]
    console.print(Text(_SOURCES[file["source"]], style="dim"))
    if file["source"] == "claim" and data["diff"] and "\n@@ " in data["diff"].partition("\n@@ ")[2]:
        console.print(Text("lines that the agent says are there already are left out", style="bold"))
    if file["contradicts"]:
        console.print(Text("the agent says that the file holds something else now", style="bold red"))
    if data["diff"] is None:
        console.print(Text(f"{one_line(data['file']['path'], 4_096)}: {TOO_DIFFERENT}; proposed is"))
        _print_text(console, data["file"]["proposed"])
    elif not data["diff"]:
        console.print(Text(f"{one_line(data['file']['path'], 4_096)}: nothing would change"))
    for line in _shown_lines(data["diff"] or "", console):
        styles = {"+++": "bold", "---": "bold", "@@ ": "cyan"}
        style = styles.get(line[:3]) or {"+": "green", "-": "red", "\\": "dim"}.get(line[:1], "")
        console.print(Text(line, style=style), soft_wrap=True)


def _print_decision(console: Console, data: Any) -> None:
    decision = data["decision"]
    via = f" via {one_line(data['decided_via'], 200)}" if data["decided_via"] else ""
    console.print(Text(f"{data['status']} by {one_line(data['decided_by'], 80)}{via} at {data['decided_at']}"))
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
    how = "nobody decided, and it went on as its rules say: " if unanswered else ""
    console.print(Text(f"{how}{RUNS[run['state']]}{at}{why}", style=style))


def _print_text(console: Console, text: str, *, is_marked: bool = False) -> None:
    for line in _shown_lines(text, console, is_marked=is_marked):
        console.print(Text(f"  {line}"), soft_wrap=True)


def _shown_lines(text: str, console: Console, *, is_marked: bool = False) -> Iterator[str]:
    """Each with everything in it to be seen, if it is not marked already. `visible` leaves line ends and tabs alone."""
    lines = text.split("\n") if text else []
    for line in lines[:LINES_SHOWN]:
        more = f"… {len(line) - LINE_SHOWN} more characters" if len(line) > LINE_SHOWN else ""
        shown = line[:LINE_SHOWN] if is_marked else visible(line[:LINE_SHOWN])
        yield shown.expandtabs(8) + more
    if len(lines) > LINES_SHOWN:
        console.print(Text(f"… {len(lines) - LINES_SHOWN} more lines: --json has them all", style="dim"))


def render_result(data: Any, console: Console) -> None:
    """Draw what became of what was asked for."""
    status = data["status"]
    line = Text.assemble((data["proposal_id"], "bold"), "  ", (status, COLOURS[status]), "  ", one_line(data["title"]))
    console.print(line)
    if data.get("continue_command") is not None:
        console.print(Text(f"  goes on with: {one_line(data['continue_command'], 2_000)}", style="dim"))
    if status != "pending":
        _print_text(console, data["notes"])
    if data.get("run") is not None:
        _print_run(console, data["run"])
    if data.get("answer") is not None:
        _print_text(console, f"answer: {data['answer']}")


# --- the audit trail --------------------------------------------------------------------------------------------


def render_entry(entry: dict[str, Any], console: Console) -> None:
    about = "" if entry["proposal"] is None else f"{entry['proposal']}  "
    details = entry["details"]
    notes = details.get("notes") or details.get("name") or details.get("code") or details.get("job_id") or ""
    via = f" via {one_line(details['via'], 200)}" if details.get("via") else ""
    text = Text.assemble(
        (f"{entry['at'][:19].replace('T', ' ')}  ", "dim"), about, (f"{entry['action']:<13} ", "bold"),
        one_line(entry["by"], 80), via, ("  " + one_line(str(notes), 200) if notes else "", "dim"),
    )  # fmt: skip
    console.print(text, soft_wrap=True)


def render_audit(data: Any, console: Console) -> None:
    if "whole" in data:
        if data["whole"]:
            console.print(Text("the audit trail is whole", style="green"))
        for problem in data["problems"]:
            console.print(Text(f"✗ {visible(problem['message'])}", style="red"))
        return
    if "head" in data:
        console.print(Text(f"{data['head']['seq']} {data['head']['hash']}"), soft_wrap=True)
        return
    for entry in data["entries"]:
        render_entry(entry, console)
    if not data["entries"]:
        console.print("there are no entries")


# --- how long ---------------------------------------------------------------------------------------------------


def age(at: str, now: WallTime) -> str:
    return about(now.ms - _ms_of(at))


def time_left(at: str, now: WallTime) -> str:
    return "no end" if at == NEVER else about(_ms_of(at) - now.ms)


def _open_for(until: str, now: WallTime) -> str:
    return "without an end" if until == NEVER else f"expires in {time_left(until, now)}"


def about(ms: int) -> str:
    """Write a duration in the two largest units that say something: 45s, 12m, 3h10m, 2d4h."""
    seconds = max(0, ms) // 1000
    if seconds < 60:
        return f"{seconds}s"
    for unit_s, unit, smaller_s, smaller in ((86_400, "d", 3_600, "h"), (3_600, "h", 60, "m"), (60, "m", 60, "")):
        if seconds >= unit_s:
            rest = seconds % unit_s // smaller_s if smaller else 0
            return f"{seconds // unit_s}{unit}" + (f"{rest}{smaller}" if rest else "")
    raise AssertionError


def _ms_of(iso: str) -> int:
    from datetime import datetime

    return round(datetime.fromisoformat(iso).timestamp() * 1000)


# --- tokens -----------------------------------------------------------------------------------------------------


def render_tokens(tokens: list[dict[str, Any]], console: Console, now: WallTime) -> None:
    if not tokens:
        console.print("there are no tokens")
        return
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold", pad_edge=False)
    for title in ("id", "name", "role", "status", "age", "expires in"):
        table.add_column(title, no_wrap=True)
    for token in tokens:
        colour = {"active": "green", "expired": "magenta", "revoked": "bright_black"}[token["status"]]
        status = Text(token["status"], style=colour)
        table.add_row(
            Text(token["id"], style="bold"), token["name"], token["role"], status, age(token["created_at"], now),
            time_left(token["expires_at"], now) if token["expires_at"] else "–",
        )  # fmt: skip
    console.print(table)
