"""Drawings of the answers of `shotclock errors`, `doctor`, `prune` and `token`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..core.limits import format_duration
from ..core.visible_text import one_line, visible
from ..terminal.drawing import age, file_size, styled, table, time_left, wrap_only

if TYPE_CHECKING:
    from rich.console import Console

_MARKS = {"ok": ("✓", "green"), "warn": ("!", "yellow"), "fail": ("✗", "bold red")}


def draw_pruned(data: Any, console: Console) -> None:
    if "moved_to" in data:
        console.print(f"the store was moved to {data['moved_to']}", soft_wrap=True)
        return
    gone = data["deleted"]
    verb = "would delete" if data["dry_run"] else "deleted"
    size = f" ({file_size(gone['runs_bytes'])})" if gone["runs"] else ""
    console.print(f"{verb} {gone['runs']} runs{size}, {gone['proposals']} proposals and {gone['calls']} calls")
    after = "" if data["dry_run"] else f", now {file_size(data['file_bytes'])}"
    console.print(f"{data['file']}: {file_size(data['file_bytes_before'])}{after}", soft_wrap=True)


def draw_errors(data: Any, console: Console) -> None:
    if data["errors"]:
        rows = table("error", "exit", "HTTP", "retry", "effects", "what it means")
        for column in rows.columns[1:3]:
            column.justify = "right"
        for entry in data["errors"]:
            meaning = styled(entry["summary"]).append(f"\n→ {entry['hint']}", style="dim")
            retry = "no" if not entry["retryable"] else "yes" if entry["side_effects"] == "none" else "yes*"
            numbers = (str(entry["exit_code"]), str(entry["http_status"]), retry)
            rows.add_row(styled(entry["code"], style="bold"), *numbers, entry["side_effects"], meaning)
        console.print(rows)
        if any(entry["retryable"] and entry["side_effects"] != "none" for entry in data["errors"]):
            console.print(styled("* only if nothing was changed: `error.retryable` of the answer says so", style="dim"))
    if data["errors"] and data["warnings"]:
        console.print()
    if data["warnings"]:
        rows = table("warning", "what it means")
        for entry in data["warnings"]:
            rows.add_row(styled(entry["code"], style="bold"), entry["summary"])
        console.print(rows)


def draw_checks(data: Any, console: Console) -> None:
    rows = table()
    for check in data["checks"]:
        mark, style = _MARKS[check["status"]]
        name = styled(check["name"].replace("_", " "), style="bold", no_wrap=True)
        rows.add_row(styled(mark, style=style), name, visible(check["detail"]))
    console.print(rows)
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
    escapes = table()
    for escape in data["cannot_catch"]:
        escapes.add_row(" •", escape)
    console.print(escapes)


def draw_tokens(data: Any, console: Console) -> None:
    tokens = data.get("tokens", data.get("revoked"))
    if not tokens:
        console.print("no tokens")
        return
    rows = table("id", "name", "role", "status", "age", "expires in")
    for token in tokens:
        colour = {"active": "green", "expired": "magenta", "revoked": "bright_black"}[token["status"]]
        left = time_left(token["expires_at"]) if token["expires_at"] else "–"
        status = styled(token["status"], style=colour)
        rows.add_row(
            styled(token["id"], style="bold"), token["name"], token["role"], status, age(token["created_at"]), left
        )
    wrap_only(rows, 1)
    console.print(rows)
