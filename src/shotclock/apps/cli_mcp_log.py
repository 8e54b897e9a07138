"""`shotclock calls`: the calls of tools that passed through `shotclock wrap`."""

from __future__ import annotations

import os
from operator import itemgetter

from ..calls.call import Outcome
from ..core.errors import Ending
from ..core.limits import WallTime
from ..core.value_types import as_dict
from ..store.call_spool import take_in
from ..store.store import Store, read_retention
from ..store.wrapped_calls import CallFilter, LoggedCall
from ..supervise.clock import wall_time
from ..supervise.kernel import can_see, is_alive
from ..terminal.parser import Subcommand, duration, flag, number_between, option
from ..terminal.subcommand import JSON, looks, timeout_option

MOST_LISTED = 10_000


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
        take_in(store, read_retention(os.environ).calls, wait_ms=None)
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


COMMANDS = {
    "calls": Subcommand(
        "calls",
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
        run=looks("calls", _list_calls),
    )
}
