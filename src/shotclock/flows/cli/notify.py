"""`shotclock notify test`: send a trial message on every channel of the user's file, or of a workflow file."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from ...calls.call import Outcome
from ...commands.shell_limits import NOT_OF_A_PROJECT, read_limits
from ...core.envelope import Envelope, Problem
from ...core.errors import Ending, Failure
from ...core.visible_text import one_line
from ...people.notify.delivery import deliver
from ...people.notify.entries import NotifyPart, read_user_file
from ...supervise.environment import config_file
from ...terminal.output import write_quietly
from ...terminal.parser import Option, Subcommand
from ...terminal.subcommand import ChildWork
from ..file.loader import load_or_refuse
from ..run.notices import environment_of


def _run_test(what: str, flow: str | None, timeout: int) -> ChildWork:
    return ChildWork("notify test", lambda: _test(flow), timeout, mutates=True, show=_show)


def _test(flow: str | None) -> Outcome:
    entries: Sequence[NotifyPart]
    environment, folder = dict(os.environ), None
    if flow is None:
        for mistake in read_limits(os.environ, os.getcwd(), {}, {})[1]:
            if mistake.endswith(NOT_OF_A_PROJECT):  # the file of a project asks for messages
                raise Failure("ARG_ERROR", mistake)
        file, entries = config_file(os.environ), read_user_file(os.environ).notify
    else:
        loaded = load_or_refuse(flow)
        if isinstance(loaded, Outcome):
            return loaded
        if loaded.workflow is None:
            message, errors = loaded.format_errors(loaded.findings)
            raise Failure("WORKFLOW_INVALID", message, context={"errors": errors})
        file, entries = flow, loaded.workflow.notify
        environment, folder = environment_of(loaded.workflow, os.environ), str(Path(flow).absolute().parent)
    if not entries:
        raise Failure("PRECONDITION", f"there is no `notify` in {file}", suggestion="add an entry, then try again")
    event = {
        "event": "test",
        "title": "A trial of shotclock",
        "host": os.uname().nodename,
        "file": str(file),
        "text": f"This is a trial of the notifications in {file} on {os.uname().nodename}.",
    }
    unsent = {id(each.entry): each.reason for each in asyncio.run(deliver(entries, event, environment, folder))}
    rows = [
        {"channel": entry.label, "on": entry.on, "ok": id(entry) not in unsent, "reason": unsent.get(id(entry))}
        for entry in entries
    ]
    data: dict[str, object] = {"file": str(file), "messages": rows}
    problem = None
    if unsent:
        channels = ", ".join(dict.fromkeys(str(row["channel"]) for row in rows if not row["ok"]))
        message = f"{len(unsent)} of {len(rows)} messages {'was' if len(unsent) == 1 else 'were'} not sent: {channels}"
        hint = "data.messages has the reason of each; correct the entry or its channel, then try again"
        problem = Problem("UNAVAILABLE", message, suggestion=hint)
    return Outcome(Ending.FINISHED, problem, data)


def _show(envelope: Envelope) -> None:
    rows = envelope.data["messages"] if isinstance(envelope.data, dict) and "messages" in envelope.data else []
    for row in rows if isinstance(rows, list) else []:
        how = "sent" if row["ok"] else f"not sent: {row['reason']}"
        write_quietly(sys.stdout, one_line(f"{row['channel']} ({', '.join(row['on'])}): {how}", 500) + "\n")


COMMANDS = {
    "notify": Subcommand(
        "notify",
        options=(
            Option.argument("what", "test.", choices=("test",), missing="write `shotclock notify test [FLOW]`"),
            Option.argument("flow", "A workflow file; without one, the user's own file."),
            Option.timeout(),
        ),
        run=_run_test,
        usage="test [FLOW] [OPTIONS]",
        epilogue="A message is sent on every channel, whatever events it is for, and each has five seconds.\n\n"
        "The user's own file is ~/.config/shotclock/config.toml.",
    )
}
