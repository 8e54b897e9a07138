"""`shotclock inbox watch`: what waits, and then every change, for as long as somebody looks."""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

from rich.console import Console

from ..core.effects import Ending
from ..core.envelope import Envelope, stopped_by
from ..core.errors import Failure
from ..core.proposals import ProposalStatus, Summary
from ..core.walltime import WallTime
from ..enforce.admission import Admission, Outcome, answer
from ..enforce.clock import wall_ns
from ..enforce.handlers import raised
from ..inbox import Inbox, Principal, Reminder
from ..servers.operators.shown import summary
from ..store import Store
from . import signals
from .inbox_shown import line_of
from .output import is_terminal, say_line, write_quietly

BELL = "\a"
WAITING_SHOWN = 200


def watched(for_ms: int | None, admission: Admission, as_json: bool) -> Envelope:
    """Ends with the time asked for, with a signal, with our caller's deadline, or when nobody takes what we say."""
    limits = [] if for_ms is None else [for_ms / 1000]
    if admission.bound.bell is not None:
        limits.append(admission.bound.bell.remaining_ms(admission.started_ns) / 1000)
    with Store.open() as store:
        return asyncio.run(_watched(store, min(limits, default=None), admission, as_json))


async def _watched(store: Store, limit_s: float | None, admission: Admission, as_json: bool) -> Envelope:
    inbox = Inbox(store)
    told = _Told(as_json)
    with signals.told() as stop:
        working = asyncio.ensure_future(_tell_all(inbox, told))
        both: list[asyncio.Future[Any]] = [working, stop]
        # Without a limit it is the person who ends it: that is what watching is.
        await asyncio.wait(both, timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
        outcome = Outcome(Ending.FINISHED)
        try:
            if working.done():
                working.result()
            elif stop.done():
                outcome = Outcome(Ending.CANCELLED, stopped_by(stop.result()))
        except Failure as failure:
            outcome = raised(failure)
        finally:
            working.cancel()
            await inbox.close()
    outcome.data = {"changes": told.count}
    return answer(admission, outcome)


async def _tell_all(inbox: Inbox, told: _Told) -> None:
    """What waits by now, the oldest first, and then what changes; nothing is lost or told twice in between.

    Returns when whoever reads has left, and raises Failure when what we say cannot be written.
    """
    latest = await inbox.list(limit=1)
    seq = latest[0].seq if latest else 0
    for proposal in reversed(await inbox.list(status=ProposalStatus.PENDING, limit=WAITING_SHOWN)):
        if proposal.seq <= seq and not told.tell(proposal, rings=False):
            return
    if is_terminal(sys.stderr):
        say_line("watching; Ctrl-C ends it")
    async for change in inbox.changes(seq):
        if not told.tell(change, rings=isinstance(change, Reminder) or change.is_open):
            return


class _Told:
    def __init__(self, as_json: bool) -> None:
        self._as_json = as_json
        self._me = Principal.local()
        self._console = Console(highlight=False)
        self.count = 0

    def tell(self, change: Summary | Reminder, *, rings: bool) -> bool:
        """Whether there is still somebody to tell."""
        is_reminder = isinstance(change, Reminder)
        proposal = change.proposal if isinstance(change, Reminder) else change
        event = {"type": "reminder" if is_reminder else "proposal", "proposal": summary(proposal, self._me)}
        self.count += 1
        if self._as_json:
            text = json.dumps(event, separators=(",", ":")) + "\n"
        else:
            with self._console.capture() as captured:
                line = line_of(event, WallTime.of_ns(wall_ns()))
                self._console.print(line, no_wrap=True, overflow="ellipsis")
            text = captured.get() + (BELL if rings else "")
        trouble = write_quietly(sys.stdout, text, signals.heard)
        if trouble is not None and not isinstance(trouble, BrokenPipeError):
            raise Failure("FILE_UNWRITABLE", f"what changes could not be written: {trouble}")
        return trouble is None
