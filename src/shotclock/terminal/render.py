"""Drawings of the answers of subcommands, for a person at a terminal.

The texts of a proposal are foreign: none reaches the terminal as a control character or as markup.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from datetime import datetime
from typing import Any

from rich.console import Console
from rich.filesize import decimal
from rich.table import Table
from rich.text import Text

from ..core.limits import LATEST_MS, WallTime, format_duration
from ..core.visible_text import one_line, visible
from ..flows.report.report import MARKS, WORDS, artifacts_in_words, brief, news_in_words
from ..flows.run.state import Status
from ..store.wrapped_calls import PENDING, RUNNING, SUCCEEDED, UNKNOWN, WAITING
from ..supervise.clock import wall_time
from ..wrap.rules import annotations_of
from .output import describe_page

STEPS_SHOWN = 60  # steps shown on a terminal; of a longer run only failed, running, repeated and critical ones
NEWS_SHOWN = 10
P95_WIDTH = 12
LONGEST_SERVER = 16
WIDE = 100

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

_SENTENCE_END = re.compile(r"(?<=[.!?])\s|\n")
_MARKS = {"ok": ("✓", "green"), "warn": ("!", "yellow"), "fail": ("✗", "bold red")}


OFF_TERMINAL_COLUMNS = 1000  # in a file or a pipe, no name is cut


def draw(name: str, data: Any, *, to_stderr: bool = False) -> str:
    """Return the drawing of an answer for a terminal. `name` is the command's."""
    console = Console(highlight=False, markup=False, emoji=False, stderr=to_stderr)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = OFF_TERMINAL_COLUMNS
    with console.capture() as captured:
        _draw(name, data, console)
    return captured.get()


def _draw(name: str, data: Any, console: Console) -> None:
    match name:
        case "schema":
            console.print(json.dumps(data, indent=2), soft_wrap=True)
        case "errors":
            _errors(data, console)
        case "doctor":
            _doctor(data, console)
        case "check":
            _findings(data, console)
        case "advise" if "findings" in data:  # the file has mistakes
            _findings(data, console)
        case "plan":
            _plan(data, console)
        case "advise":
            _advice(data, console)
        case "prune":
            _prune(data, console)
        case "report" if "runs" in data:
            _run_list(data, console)
        case "report":
            _run(data, console)
        case "calls":
            _calls(data, console)
        case "tools":
            _tools(data, console)
        case "token list" | "token revoke":
            _tokens(data.get("tokens", data.get("revoked")), console)
        case "agent status":
            _agents(data, console)
        case "agent install" | "agent remove" if "diff" in data:
            _agent_change("wrote" if name == "agent install" else "removed from", data, console)
        case "serve install" if "diff" in data:
            _agent_change("wrote", data, console)
        case "wrap install" | "wrap remove" if "diff" in data:
            _agent_change("wrote" if name == "wrap install" else "removed from", data, console)
            _servers(data["servers"], console)
        case "wrap status":
            _clients(data, console)
        case "inbox list" if "proposals" in data:
            _list(data, console)
        case "inbox show" if "history" in data:
            _proposal(data, console)
        case "inbox audit" if "partial" not in data:
            _audit(data, console)
        case "inbox propose" | "inbox check" if "proposal_id" in data:
            _result(data, console)
        case "inbox watch" if "proposal" in data:
            _print(console, _change(data))
        case _ if "title" in data:
            console.print(_change({"type": "proposal", "proposal": data}))


def _table(*titles: str) -> Table:
    return Table(*titles, box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="bold", show_header=bool(titles))


def _prune(data: Any, console: Console) -> None:
    if "moved_to" in data:
        console.print(f"the store was moved to {data['moved_to']}", soft_wrap=True)
        return
    gone = data["deleted"]
    verb = "would delete" if data["dry_run"] else "deleted"
    size = f" ({decimal(gone['runs_bytes'])})" if gone["runs"] else ""
    console.print(f"{verb} {gone['runs']} runs{size}, {gone['proposals']} proposals and {gone['calls']} calls")
    after = "" if data["dry_run"] else f", now {decimal(data['file_bytes'])}"
    console.print(f"{data['file']}: {decimal(data['file_bytes_before'])}{after}", soft_wrap=True)


def _agents(data: Any, console: Console) -> None:
    for each in data["agents"]:
        state = {True: "effective", None: "installed"}.get(each["effective"], "not effective")
        state = state if each["installed"] else "not installed"
        style = {"effective": "green", "installed": "green", "not effective": "yellow"}.get(state, "bright_black")
        line = Text(f"{each['agent']:<9} {each['scope']:<8} ") + Text(f"{state:<14}", style)
        approvals = " (with approvals)" if each["approvals"] else ""
        console.print(line + Text(f"{visible(each['file'])}{approvals}"), soft_wrap=True)
        for problem in each["problems"]:
            console.print(Text("  ! ", "yellow") + Text(visible(problem)), soft_wrap=True)
        for condition in each["conditions"]:
            console.print(f"  {condition}", soft_wrap=True)


def _agent_change(verb: str, data: Any, console: Console) -> None:
    done = verb if data["changed"] else "not written:" if data["diff"] else "nothing to change in"
    console.print(f"{done} {visible(data['file'])}", soft_wrap=True)
    for note in data["notes"] if data["changed"] else ():
        console.print(visible(note), soft_wrap=True)


def _clients(data: Any, console: Console) -> None:
    for each in data["clients"]:
        line = f"{each['client']:<9} {each['scope']:<8} {visible(each['file'])}"
        console.print(line if each["exists"] else f"{line} (no such file)", soft_wrap=True)
        if each["problem"] is not None:
            console.print(Text("  ! ", "yellow") + Text(visible(each["problem"])), soft_wrap=True)
        _servers(each["servers"], console)


def _servers(servers: Any, console: Console) -> None:
    for each in servers:
        style = {"wrapped": "green", "not wrapped": "yellow"}.get(each["state"], "bright_black")
        project = "" if each["project"] is None else f" in {each['project']}"
        reason = "" if each["reason"] is None else f": {each['reason']}"
        line = Text(f"  {visible(each['name'])}{visible(project)} ") + Text(f"{each['state']}{reason}", style)
        console.print(line, soft_wrap=True)


def _errors(data: Any, console: Console) -> None:
    if data["errors"]:
        table = _table("error", "exit", "HTTP", "retry", "effects", "what it means")
        for column in table.columns[1:3]:
            column.justify = "right"
        for entry in data["errors"]:
            meaning = Text(entry["summary"]).append(f"\n→ {entry['hint']}", style="dim")
            retry = "no" if not entry["retryable"] else "yes" if entry["side_effects"] == "none" else "yes*"
            numbers = (str(entry["exit_code"]), str(entry["http_status"]), retry)
            table.add_row(Text(entry["code"], style="bold"), *numbers, entry["side_effects"], meaning)
        console.print(table)
        if any(entry["retryable"] and entry["side_effects"] != "none" for entry in data["errors"]):
            console.print(Text("* only if nothing was changed: `error.retryable` of the answer says so", style="dim"))
    if data["errors"] and data["warnings"]:
        console.print()
    if data["warnings"]:
        table = _table("warning", "what it means")
        for entry in data["warnings"]:
            table.add_row(Text(entry["code"], style="bold"), entry["summary"])
        console.print(table)


def _doctor(data: Any, console: Console) -> None:
    table = _table()
    for check in data["checks"]:
        mark, style = _MARKS[check["status"]]
        name = Text(check["name"].replace("_", " "), style="bold", no_wrap=True)
        table.add_row(Text(mark, style=style), name, visible(check["detail"]))
    console.print(table)
    if "cannot_catch" not in data:  # `doctor ui`
        return
    swept = {each["pid"]: each["gone"] for each in data["swept"]}
    if data["leftovers"]:
        console.print("\nleftovers", style="bold")
    for left in data["leftovers"]:
        overdue = format_duration(left["overdue_ms"] // 1000 * 1000)
        if left["pid"] in swept:
            fate = "stopped" if swept[left["pid"]] else "still there"
        else:
            fate = f"kept: {left['kept']}" if left["kept"] else "see --sweep"
        console.print(f"  {left['pid']}  {one_line(left['command'])}  ({overdue} overdue, {fate})")
    console.print("\nwhat it cannot catch", style="bold")
    escapes = _table()
    for escape in data["cannot_catch"]:
        escapes.add_row(" •", escape)
    console.print(escapes)


def _findings(data: Any, console: Console) -> None:
    for finding in data["findings"]:
        colour = "red" if finding["severity"] == "error" else "yellow"
        where = f"{finding['file']}:{finding['line']}:{finding['column']}: "
        hint = f" ({finding['suggestion']})" if "suggestion" in finding else ""
        line = Text(where) + Text(finding["severity"], colour)
        console.print(line + Text(f": {finding['field']}: {finding['message']}{hint}  [{finding['rule']}]"))
    if not data["findings"]:
        console.print(f"{data['file']}: OK")


def _plan(data: Any, console: Console) -> None:
    if "steps" in data:
        table = _table("step", "type", "after", "timeout", "tries", "starts by", "ends by")
        for column in table.columns[3:]:
            column.justify = "right"
        for step in data["steps"]:
            waits = [f"{name} (ended)" if name in step["any_end_of"] else name for name in step["depends_on"]]
            names = (step["id"], step["type"], " ".join(waits or ["finally"] * step["finally"]))
            timeout, tries = _clock(step["effective_timeout_ms"]), str(step["attempts"])
            times = (_clock(step["latest_start_ms"], "?"), _clock(step["latest_end_ms"], "?"))
            table.add_row(*names, timeout, tries, *times, style="bold" if step["id"] in data["critical_path"] else None)
        console.print(table)
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
        worst, limit = _clock(data["worst_case_ms"], "no end in sight"), _clock(data["run_timeout_ms"])
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
        _findings(data, console)


_SOURCES = {"default": " (default)", "defaults": " (defaults)", "tool": " (tool)"}


def _advice(data: Any, console: Console) -> None:
    if data.get("changed"):
        console.print(f"wrote {visible(data['file'])}: {', '.join(data['written'])}", soft_wrap=True)
    else:
        table = _table("step", "timeout", "runs", "p50", "p95", "max", "timeouts", "advice")
        for column in table.columns[1:7]:
            column.justify = "right"
        for each in data["timeouts"]:
            name = Text("the run", "italic") if each["step"] is None else Text(one_line(each["step"], 40))
            limit = _clock(each["timeout_ms"], "none") + _SOURCES.get(each["source"], "")
            figures = (_figure(each, figure) for figure in ("p50", "p95", "max"))
            colour = {"raise": "yellow", "lower": "cyan", "unknown": "bright_black"}.get(each["verdict"], "")
            numbers = (str(each["runs"]), *figures, str(each["timeouts"] or ""))
            table.add_row(name, limit, *numbers, Text(each["advice"], colour))
        _wrap_only(table, 7)
        console.print(table)
        more = "" if data["runs_are_all_read"] else "; there was no time to read more"
        console.print(f"\n{data['runs']} ended runs of {one_line(data['name'], 60)}{more}", style="dim")
    for note in data.get("notes", ()):
        console.print(visible(note), soft_wrap=True)


def _figure(row: dict[str, Any], name: str) -> str:
    ms = row[f"{name}_ms"]
    return "" if ms is None else f"{'≥' if row.get(f'{name}_is_at_least') else ''}{brief(ms)}"


def _describe_early_clocks(step: dict[str, Any]) -> Iterator[str]:
    within = format_duration(step["wind_down_ms"])
    if step["overtime"]:
        when = f" from {format_duration(step['soft_ms'])}" if step["soft_ms"] else ""
        yield f"overtime{when}: {step['overtime']}; else it winds down within {within}"
    elif step["soft_ms"]:
        yield f"winds down from {format_duration(step['soft_ms'])}, within {within}"


def _clock(ms: int | None, otherwise: str = "no limit") -> str:
    return otherwise if ms is None or (ms == 0 and otherwise == "no limit") else format_duration(ms)


def _run_list(data: Any, console: Console) -> None:
    if not data["runs"]:
        console.print("no runs yet")
    table = _table()
    for run in data["runs"]:
        status = Status(run["status"])
        took = "" if run["duration_ms"] is None else brief(run["duration_ms"])
        mark = Text.assemble((f"{MARKS[status]} ", COLOURS[status]), (one_line(run["run_id"], 40), "bold"))
        name = Text(one_line(run["name"], 60), no_wrap=True, overflow="ellipsis")
        table.add_row(mark, Text(WORDS[status], COLOURS[status]), f"{run['started_at'][:19]}Z", took, name)
    _wrap_only(table, 4)
    console.print(table)


def _calls(data: Any, console: Console) -> None:
    if not data["calls"]:
        console.print("no calls")
        return
    sizes = {"sent": "request_bytes", "received": "answer_bytes"}
    limit = ["limit"] if any(call.get("due_at") for call in data["calls"]) else []
    if console.width < WIDE:
        sizes = {} if limit else {"received": "answer_bytes"}
    table = _table("age", "server", "tool", "took", "outcome", *sizes, *limit)
    for column in (table.columns[3], *table.columns[5:]):
        column.justify = "right"
    for call in data["calls"]:
        colour = "green" if call["outcome"] in SUCCEEDED else "red"
        colour = "yellow" if call["outcome"] in (RUNNING, WAITING, UNKNOWN, PENDING) else colour
        names = (Text(one_line(call[name], 60), no_wrap=True, overflow="ellipsis") for name in ("server", "tool"))
        outcome = Text(call["outcome"], colour)
        took = "" if call["duration_ms"] is None else brief(call["duration_ms"])
        shown = [_short_size(call[name]) for name in sizes.values()]
        if limit:
            shown.append(f"{call['due_by']} in {_time_left(call['due_at'])}" if call.get("due_at") else "")
        table.add_row(_age(call["started_at"]), *names, took, outcome, *shown)
    _wrap_only(table, 2)
    table.columns[1].max_width = LONGEST_SERVER
    console.print(table)
    if data["more"]:
        console.print("there are more: --limit", style="dim")


def _tools(data: Any, console: Console) -> None:
    if not data["tools"]:
        console.print("no tools")
    table = _table()
    for tool in data["tools"]:
        schema = tool.get("inputSchema") or {}
        required = schema.get("required") or ()
        names = " ".join(name if name in required else f"[{name}]" for name in schema.get("properties") or ())
        first, *_ = _SENTENCE_END.split((tool.get("description") or "").strip(), 1)
        about = Text(one_line(first, 200))
        words = " · ".join(filter(None, (one_line(names), ", ".join(annotations_of(tool.get("annotations") or {})))))
        about.append("\n" if about and words else "").append(words, "dim")
        table.add_row(Text(one_line(tool["name"], 60), "bold", no_wrap=True), about)
    if data["tools"]:
        console.print(table)


def _short_size(size: int) -> str:
    return decimal(size).replace(" bytes", " B").replace(" byte", " B")


def _wrap_only(table: Table, place: int) -> None:
    """Make this column alone narrower where the terminal is."""
    for number, column in enumerate(table.columns):
        column.no_wrap = number != place


def _run(data: Any, console: Console) -> None:
    status = Status(data["status"])
    of = f" of {brief(data['budget_ms'])}" if data["budget_ms"] else ""
    title = Text(f"{MARKS[status]} {one_line(data['name'], 80)} {WORDS[status]}", f"bold {COLOURS[status]}")
    _print(console, title + Text(f" in {brief(data['duration_ms'])}{of}", "not bold"))
    if data["why"]:
        _print(console, Text(f"  {one_line(data['why'], 500)}", COLOURS[status]))
    counts = ", ".join(f"{count} {WORDS[Status(name)]}" for name, count in data["counts"].items())
    group = data["concurrency"]
    waited = f", waited {brief(group['waited_ms'])}" if group and group["waited_ms"] else ""
    in_group = f"; group {one_line(group['group'], 80)}{waited}" if group else ""
    _print(console, Text(f"  {counts}; run {one_line(data['run_id'], 80)}{in_group}\n", "bright_black"))
    steps = _worth_showing(data["steps"], set(data["critical_path"]))
    names = min(28, max((len(one_line(step["id"], 28)) for step in steps), default=0))
    end_ms = max(data["duration_ms"], 1)
    has_p95 = any(step["p95_ms"] is not None for step in steps)
    columns = 80 if console.width == OFF_TERMINAL_COLUMNS else console.width
    room = max(10, columns - names - 26 - P95_WIDTH * has_p95)
    for step in steps:
        _print(console, _row(step, names, room, end_ms, has_p95=has_p95))
        if step["why"]:
            _print(console, Text(f"    {one_line(step['why'], 200)}", COLOURS[Status(step["status"])]))
        for news in step["overtime"][:NEWS_SHOWN]:
            _print(console, Text(f"    ◔ +{brief(news['at_ms'])} {one_line(news_in_words(news), 200)}", "yellow"))
    if len(steps) < len(data["steps"]):
        _print(console, Text(f"\n  {len(data['steps']) - len(steps)} more steps; --html FILE shows them all"))
    if data["artifacts"] is not None:
        words, folder = artifacts_in_words(data["artifacts"]), visible(data["artifacts"]["folder"])
        console.print(Text(f"\n  {words}: {folder}"), soft_wrap=True)
    if data["rerun_of"]:
        _print(console, Text(f"\n  continues run {one_line(data['rerun_of'], 80)}", "bright_black"))
    if data["continue_command"]:
        _print(console, Text(f"\n  continue it: {one_line(data['continue_command'], 200)}"))
    for name in ("html", "output_file"):
        if name in data:
            console.print(Text(f"\n{describe_page(data, name)}"), soft_wrap=True)  # whole, to be copied


def _worth_showing(steps: list[dict[str, Any]], on_path: set[str]) -> list[dict[str, Any]]:
    if len(steps) <= STEPS_SHOWN:
        return steps
    bad = [step for step in steps if Status(step["status"]).is_bad or step["status"] == "running"]
    rest = [step for step in steps if step not in bad and (step["attempts"] > 1 or step["id"] in on_path)]
    chosen = {step["id"] for step in (bad + rest)[:STEPS_SHOWN]}
    return [step for step in steps if step["id"] in chosen]


def _row(step: dict[str, Any], names: int, room: int, end_ms: int, *, has_p95: bool) -> Text:
    status = Status(step["status"])
    took = "" if step["duration_ms"] is None else brief(step["duration_ms"] - step["uncounted_ms"])
    budget = f"/ {brief(step['budget_ms'])}" if step["budget_ms"] and step["started_ms"] is not None else ""
    line = Text(f"{MARKS[Status.PARKED if step['waits_for'] else status]} ", COLOURS[status])
    line += Text(f"{one_line(step['id'], 28):<{names}} ") + Text(f"{took:>8} ", "bold")
    if has_p95:
        p95 = "" if step["p95_ms"] is None else f"p95 {brief(step['p95_ms'])}"
        line += Text(f"{p95:<{P95_WIDTH}}", "bright_black")
    line += Text(f"{budget:<9} ", "bright_black")
    if step["at_ms"] is None:
        return line + Text(WORDS[status], COLOURS[status])
    start = min(room - 1, step["at_ms"] * room // end_ms)
    if step["started_ms"] is None:
        return line + Text(" " * start + "○", COLOURS[status])
    used = max(1, min(room - start, round((step["duration_ms"] or 0) * room / end_ms)))
    spare, waited = 0, min(used, round(step["waited_ms"] * room / end_ms))
    if step["budget_ms"]:
        spare = max(0, min(room - start, round((step["budget_ms"] + step["uncounted_ms"]) * room / end_ms)) - used)
    tries = f" ↻{step['attempts']}" if step["attempts"] > 1 and not step["is_per_item"] else ""
    line += Text(" " * start) + Text("╱" * waited, "yellow") + Text("█" * (used - waited), COLOURS[status])
    return line + Text("░" * spare, "bright_black") + tries


def _print(console: Console, line: Text) -> None:
    console.print(line, soft_wrap=False, no_wrap=True, overflow="ellipsis", crop=True)


LINES_SHOWN = 2_000  # the envelope has the rest
LINE_SHOWN = 2_000
NEVER = WallTime(LATEST_MS).iso()

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


def _run_state(run: Any) -> str:
    if "run_id" in run and run["state"] == "missed":
        return f"not run: run {run['run_id']} has ended, or has no time left"
    until = "" if run.get("until", NEVER) == NEVER else f", until {run['until']} (in {_time_left(run['until'])})"
    if run["state"] == "not_started" and "run_id" in run:
        command = f"shotclock run --resume {run['run_id']}"
        return f"not run yet: its run continues by itself, a parked local one with: {command}{until}"
    if run["state"] == "not_started" and "until" in run:
        return f"approved, waits for the agent to call again{until}"
    return RUN_STATES[run["state"]]


def _list(data: Any, console: Console) -> None:
    is_pending = data["status"] == "pending"
    if not data["proposals"]:
        console.print("no proposal waits for a decision" if is_pending else "no proposals")
        return
    titles = ("id", "title", "kind", "asked by", "age", "expires in" if is_pending else "status")
    # A narrow terminal shows the id, the title and the status.
    shown = range(len(titles)) if console.width >= 80 else (0, 1, len(titles) - 1)
    table = _table(*(titles[place] for place in shown))
    for each in data["proposals"]:
        row = _describe_proposal(each, is_pending)
        table.add_row(*(row[place] for place in shown))
    _wrap_only(table, 1)
    console.print(table)
    if data["more"]:
        console.print("there are more: --limit", style="dim")


def _describe_proposal(each: dict[str, Any], is_pending: bool) -> list[Text]:
    title = Text("destructive " if each["destructive"] else "", style="bold red", no_wrap=True, overflow="ellipsis")
    title.append(one_line(each["title"]), "not bold default")
    status = each["status"]
    if status == "pending":
        left = _time_left(each["expires_at"])
        status = left if is_pending else f"pending, {left}"
    texts = (each["kind"], one_line(each["asked_by"], 20), _age(each["created_at"]))
    return [Text(each["id"], "bold"), title, *map(Text, texts), Text(status, DECISION_COLOURS[each["status"]])]


def _heading(id: str, status: str, title: str, width: int = 0) -> Text:
    return Text.assemble((id, "bold"), "  ", (f"{status:<{width}}", DECISION_COLOURS[status]), "  ", one_line(title))


def _change(event: dict[str, Any]) -> Text:
    each = event["proposal"]
    text = _heading(each["id"], each["status"], each["title"], width=9)
    if event["type"] == "reminder":
        text.append(f"  expires in {_time_left(each['expires_at'])}", style="bold red")
    elif each["status"] == "pending":
        text.append(f"  {one_line(each['asked_by'], 40)}, {_open_for(each['expires_at'])}", style="dim")
    elif each["decided_by"] is not None:
        text.append(f"  by {one_line(each['decided_by'], 40)}", style="dim")
        if each["run"] is not None:
            text.append(f"  {_run_state(each['run'])}", style="dim")
    return text


def _proposal(data: Any, console: Console) -> None:
    console.print(_heading(data["id"], data["status"], data["title"]))
    asked = f"{data['kind']} asked by {one_line(data['asked_by'], 80)} {_age(data['created_at'])} ago"
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


_SOURCES = {
    "claim": "compared with the text that the agent claims the file had, not with the file itself",
    "read": "compared with the file itself",
    "same": "the file already holds this text: all lines are shown as new",
    "nothing": "the current text is unknown: all lines are shown as new",
}


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
        console.print(Text(f"{path}: the texts are too different to compare; proposed is"))
        _print_text(console, data["file"]["proposed"])
    elif not data["diff"]:
        console.print(Text(f"{one_line(data['file']['path'], 4_096)}: nothing would change"))
    for line in _lines_to_show(data["diff"] or "", console):
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
    how = "expired undecided, and run as its rules allow: " if unanswered else ""
    console.print(f"{how}{_run_state(run)}{at}{why}", style=style)


def _print_text(console: Console, text: str, *, is_marked: bool = False) -> None:
    for line in _lines_to_show(text, console, is_marked=is_marked):
        console.print(Text(f"  {line}"), soft_wrap=True)


def _lines_to_show(text: str, console: Console, *, is_marked: bool = False) -> Iterator[str]:
    """Yield the lines, with invisible characters made visible unless `is_marked`."""
    lines = text.split("\n") if text else []
    for line in lines[:LINES_SHOWN]:
        more = f"… {len(line) - LINE_SHOWN} more characters" if len(line) > LINE_SHOWN else ""
        shown = line[:LINE_SHOWN] if is_marked else visible(line[:LINE_SHOWN])
        yield shown.expandtabs(8) + more
    if len(lines) > LINES_SHOWN:
        console.print(f"… {len(lines) - LINES_SHOWN} more lines: --json has them all", style="dim")


def _result(data: Any, console: Console) -> None:
    console.print(_heading(data["proposal_id"], data["status"], data["title"]))
    if data.get("continue_command") is not None:
        console.print(f"  continue with: {one_line(data['continue_command'], 2_000)}", style="dim")
    if data["status"] != "pending":
        _print_text(console, data["notes"])
    if data.get("run") is not None:
        _print_run(console, data["run"])
    if data.get("answer") is not None:
        _print_text(console, f"answer: {data['answer']}")


def _print_entry(entry: dict[str, Any], console: Console) -> None:
    about = "" if entry["proposal"] is None else f"{entry['proposal']}  "
    details = entry["details"]
    notes = details.get("notes") or details.get("name") or details.get("code") or details.get("job_id") or ""
    via = f" via {one_line(details['via'], 200)}" if details.get("via") else ""
    text = Text.assemble(
        (f"{entry['at'][:19].replace('T', ' ')}  ", "dim"), about, (f"{entry['action']:<13} ", "bold"),
        one_line(entry["by"], 80), via, ("  " + one_line(str(notes), 200) if notes else "", "dim"),
    )  # fmt: skip
    console.print(text, soft_wrap=True)


def _audit(data: Any, console: Console) -> None:
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


def _tokens(tokens: list[dict[str, Any]], console: Console) -> None:
    if not tokens:
        console.print("no tokens")
        return
    table = _table("id", "name", "role", "status", "age", "expires in")
    for token in tokens:
        colour = {"active": "green", "expired": "magenta", "revoked": "bright_black"}[token["status"]]
        left = _time_left(token["expires_at"]) if token["expires_at"] else "–"
        status = Text(token["status"], style=colour)
        table.add_row(
            Text(token["id"], style="bold"), token["name"], token["role"], status, _age(token["created_at"]), left
        )
    _wrap_only(table, 1)
    console.print(table)


def _age(at: str) -> str:
    return _round(wall_time().ms - _ms_of(at))


def _time_left(at: str) -> str:
    return "no end" if at == NEVER else _round(_ms_of(at) - wall_time().ms)


def _open_for(until: str) -> str:
    return "without an end" if until == NEVER else f"expires in {_time_left(until)}"


def _round(ms: int) -> str:
    """Return a duration in its two largest units: 45s, 12m, 3h10m, 2d4h."""
    unit_ms = 3_600_000 if ms >= 86_400_000 else 60_000 if ms >= 60_000 else 1_000
    return format_duration(ms // unit_ms * unit_ms) if ms >= 1_000 else "0s"


def _ms_of(iso: str) -> int:
    return round(datetime.fromisoformat(iso).timestamp() * 1000)
