"""`shotclock calls`: the calls of tools that passed through `shotclock wrap`."""

from __future__ import annotations

from ..core.clocks import WallTime
from ..core.errors import Ending
from ..core.value_types import as_dict
from ..process.clock import wall_time
from ..runtime.call import Outcome
from ..store.calls import CallFilter, LoggedCall
from ..store.store import Store
from .parser import Subcommand, duration, flag, number_between, option
from .subcommand import JSON, looks, timeout_option

MOST_LISTED = 10_000


def _list_calls(
    server: str | None, tool: str | None, failed: bool, timeouts: bool, slowest: bool, since: int | None, limit: int
) -> Outcome:
    began = None if since is None else WallTime(max(0, wall_time().ms - since))
    with Store.open() as store:
        found = store.calls.list(CallFilter(server, tool, failed, timeouts, began), limit + 1, slowest=slowest)
    return Outcome(Ending.FINISHED, data={"calls": [_row(call) for call in found[:limit]], "more": len(found) > limit})


def _row(call: LoggedCall) -> dict[str, object]:
    return {**as_dict(call), "started_at": call.started_at.iso()}


COMMANDS = {
    "calls": Subcommand(
        "calls",
        options=(
            option("--server", "NAME", "List only calls of this server: its --name, or the name of its program."),
            option("--tool", "PATTERN", "List only calls of the tools of that name, as in 'read_*'."),
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
