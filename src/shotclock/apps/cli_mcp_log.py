"""`shotclock mcp log`: the calls of tools that passed through `shotclock wrap`."""

from __future__ import annotations

import os
from operator import itemgetter
from typing import TYPE_CHECKING, Any

from ..calls.call import Outcome
from ..core.errors import Ending
from ..core.limits import WallTime
from ..core.value_types import as_dict
from ..core.visible_text import one_line
from ..store.call_spool import add_spooled
from ..store.store import Store, read_retention
from ..store.wrapped_calls import PENDING, RUNNING, SUCCEEDED, UNKNOWN, WAITING, CallFilter, LoggedCall
from ..supervise.clock import wall_time
from ..supervise.kernel import can_see, is_alive
from ..terminal.drawing import age, brief, short_size, styled, table, time_left, wrap_only
from ..terminal.parser import Subcommand, duration, flag, number_between, option
from ..terminal.subcommand import JSON, looks, timeout_option

if TYPE_CHECKING:
    from rich.console import Console

MOST_LISTED = 10_000
WIDE = 100
LONGEST_SERVER = 16


def _list_calls(
    server: str | None,
    tool: str | None,
    running: bool,
    failed: bool,
    timeouts: bool,
    slowest: bool,
    since: int | None,
    limit: int,
) -> Outcome:
    began = None if since is None else WallTime(max(0, wall_time().ms - since))
    wanted = CallFilter(server, tool, failed, timeouts, began)
    with Store.open() as store:
        add_spooled(store, read_retention(os.environ).calls, wait_ms=None)
        found = store.calls.look(wanted, 0 if running else limit + 1, is_alive, slowest=slowest)
    now = wall_time()
    rows = [] if failed or timeouts else found.describe_open(now, can_see)
    over = [(call.started_at + call.duration_ms, _row(call)) for call in found.ended]
    if not running and not timeouts:
        over += zip((call.started_at for call in found.lost), found.describe_lost(now), strict=True)
    rows += [row for _, row in sorted(over, key=itemgetter(0), reverse=True)]
    if slowest:
        rows.sort(key=_duration, reverse=True)
    return Outcome(Ending.FINISHED, data={"calls": rows[:limit], "more": len(rows) > limit})


def _row(call: LoggedCall) -> dict[str, object]:
    return {**as_dict(call), "started_at": call.started_at.iso()}


def _duration(row: dict[str, object]) -> int:
    duration_ms = row["duration_ms"]
    return duration_ms if isinstance(duration_ms, int) else -1


def _draw_calls(data: Any, console: Console) -> None:
    if not data["calls"]:
        console.print("no calls")
        return
    sizes = {"sent": "request_bytes", "received": "answer_bytes"}
    limit = ["limit"] if any(call.get("due_at") for call in data["calls"]) else []
    if console.width < WIDE:
        sizes = {} if limit else {"received": "answer_bytes"}
    rows = table("age", "server", "tool", "took", "outcome", *sizes, *limit)
    for column in (rows.columns[3], *rows.columns[5:]):
        column.justify = "right"
    for call in data["calls"]:
        colour = "green" if call["outcome"] in SUCCEEDED else "red"
        colour = "yellow" if call["outcome"] in (RUNNING, WAITING, UNKNOWN, PENDING) else colour
        names = (styled(one_line(call[name], 60), no_wrap=True, overflow="ellipsis") for name in ("server", "tool"))
        outcome = styled(call["outcome"], colour)
        took = "" if call["duration_ms"] is None else brief(call["duration_ms"])
        shown = [short_size(call[name]) for name in sizes.values()]
        if limit:
            shown.append(f"{call['due_by']} in {time_left(call['due_at'])}" if call.get("due_at") else "")
        rows.add_row(age(call["started_at"]), *names, took, outcome, *shown)
    wrap_only(rows, 2)
    rows.columns[1].max_width = LONGEST_SERVER
    console.print(rows)
    if data["more"]:
        console.print("there are more: --limit", style="dim")


LOG = Subcommand(
    "log",
    "List the calls of tools that passed through `shotclock wrap`.",
    options=(
        option("--server", "NAME", "List only calls of this server: its --name, or the name of its program."),
        option("--tool", "PATTERN", "List only calls of the tools of that name, as in 'read_*'."),
        flag("--running", "List only calls that have not ended.", excludes=("--failed", "--timeouts")),
        flag("--failed", "List only calls that failed, by an error of the tool or of Shotclock."),
        flag("--timeouts", "List only calls that reached a limit."),
        flag("--slowest", "The slowest first, instead of the newest."),
        duration("--since", "List only calls that began within this time (1h, 7d)."),
        option("--limit", "N", "List at most this many.", default="20", read=number_between(1, MOST_LISTED)),
        JSON,
        timeout_option(),
    ),
    run=looks("mcp log", _list_calls, _draw_calls),
)
