"""Notifications of runs: once when a run ends, and each time it is parked.

The end is in the store before it is sent, and is claimed there by the process that sends it. So a run that is resumed
after `kill -9` is sent once; a process killed in the five seconds of sending may leave it unsent, never sent twice.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ...core.envelope import Envelope, Warning_, warning
from ...core.errors import Failure
from ...core.limits import format_duration
from ...core.references import REFERENCE
from ...core.value_types import JsonObject, value
from ...core.visible_text import one_line
from ...people.notify.delivery import Unsent, deliver
from ...people.notify.entries import NotifyPart, UserFile, read_user_file
from ...store.runs import StoredRun
from ...store.store import Store
from ...supervise.clock import wall_time
from ..file.schema import WorkflowFile, is_template
from .state import read_record, redaction_for, restore_secrets

STEPS_EXPLAINED = 3


@value
class Notice:
    """A message about a run, with the entries that want it, of its file and of the user's."""

    event: Mapping[str, Any]
    own: Sequence[NotifyPart]
    users: Sequence[NotifyPart]
    environment: Mapping[str, str]
    folder: str
    flaw: Warning_ | None = None
    """Why the user's file cannot be used."""

    async def send_end(self, store: Store) -> list[Warning_]:
        """Send the end of a run, unless another process has, and record the failures with the run."""
        run_id = self.event["run_id"]
        try:
            if not await asyncio.to_thread(store.runs.claim_notice, run_id):
                return []
            if warnings := await self.send():
                await asyncio.to_thread(store.runs.add_warnings, run_id, warnings)
        except Failure as failure:  # the store failed: the run may be ended, and sent, by a later process
            return [warning("NOT_NOTIFIED", str(failure))]
        return warnings

    async def send(self) -> list[Warning_]:
        """Send the message on all channels at once, within five seconds, and return a warning for each failure."""
        unsent: list[Unsent] = []
        for found in await asyncio.gather(
            deliver(self.own, self.event, self.environment, self.folder),
            deliver(self.users, self.event, self.environment),
        ):
            unsent += found
        return [*([] if self.flaw is None else [self.flaw]), *(each.as_warning() for each in unsent)]


def notice_of(
    run_id: str,
    name: str,
    file: str,
    workflow: WorkflowFile,
    envelope: Envelope,
    environment: Mapping[str, str],
    lasted_ms: int,
) -> Notice | None:
    data: JsonObject = envelope.data if isinstance(envelope.data, dict) else {}
    events = tuple(_events_of(envelope, data))
    users, flaw = UserFile(), None
    try:
        users = read_user_file(environment)
    except Failure as failure:
        flaw = warning("NOT_NOTIFIED", str(failure))
    own, others = _wanting(workflow.notify, events), _wanting(users.notify, events)
    if not (own or others or flaw):
        return None
    event = _describe(run_id, name, file, envelope, data, events[0], users, lasted_ms)
    return Notice(
        redaction_for(workflow, environment).value(event),
        own,
        others,
        environment_of(workflow, environment),
        str(Path(file).parent),
        flaw,
    )


async def answer_again(run: StoredRun, envelope: Envelope, store: Store, environment: Mapping[str, str]) -> Envelope:
    """Return the answer of an ended run, after its end was sent if the process that ended it was killed before."""
    if run.owes_notice:
        try:
            workflow = await asyncio.to_thread(lambda: restore_secrets(run, read_record(run, store)[0]))
        except Failure as failure:
            envelope.warnings.append(warning("NOT_NOTIFIED", str(failure)))
        else:
            lasted_ms = (run.ended_at or wall_time()) - run.created_at
            notice = notice_of(run.id, run.name, run.file, workflow, envelope, environment, lasted_ms)
            envelope.warnings += [] if notice is None else await notice.send_end(store)
    return envelope


def _wanting(entries: Sequence[NotifyPart], events: Sequence[str]) -> list[NotifyPart]:
    return [entry for entry in entries if not set(events).isdisjoint(entry.on)]


def environment_of(workflow: WorkflowFile, environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables for `notify`: those of the caller, and the plain ones of the file and its `env_file`."""
    return {**environment, **{name: str(text) for name, text in workflow.env.items() if _is_plain(text)}}


def warn_of_temporal(environment: Mapping[str, str]) -> list[Warning_]:
    """Return the warning that a run on Temporal sends nothing, if the user's file asks for messages about runs."""
    try:
        wanted = any(set(entry.on) != {"proposed"} for entry in read_user_file(environment).notify)
    except Failure as failure:
        return [warning("NOT_NOTIFIED", str(failure))]
    message = "runs on Temporal send no notifications; look at them with `shotclock report --on URL`"
    return [warning("NOT_NOTIFIED", message)] if wanted else []


def _is_plain(text: object) -> bool:
    return not isinstance(text, str) or not (is_template(text) or REFERENCE.search(text))


def _events_of(envelope: Envelope, data: Mapping[str, Any]) -> Iterator[str]:
    """Yield what has happened to a run, the most specific first."""
    if data.get("status") == "parked":
        yield "parked"
        return
    if envelope.code == "TIMEOUT":
        yield "timed_out"
    if not envelope.ok:
        yield "failed"
    yield "ended"


def _describe(
    run_id: str,
    name: str,
    file: str,
    envelope: Envelope,
    data: Mapping[str, Any],
    event: str,
    users: UserFile,
    lasted_ms: int,
) -> JsonObject:
    how = {"timed_out": "timed out", "parked": "waits for a person", "ended": "succeeded"}.get(event, event)
    title = one_line(f"{name} {how}", 200)
    described: JsonObject = {
        "event": event,
        "title": title,
        "run_id": run_id,
        "name": name,
        "file": file,
        "host": os.uname().nodename,
        "at": wall_time().iso(),
        "ok": envelope.ok,
        "code": envelope.code,
        "duration_ms": lasted_ms,
        "failed": list(data.get("failed", ())),
    }
    lines = [f"{title} on {described['host']} after {format_duration(lasted_ms)}"]
    if event == "parked":
        waiting = [{"proposal_id": each["proposal_id"], "title": each["title"]} for each in data["waiting"]]
        for each in waiting:
            each["link"] = users.link_to(each["proposal_id"])
        lines += [one_line(f"{each['proposal_id']}: {each['title']}", 300) for each in waiting]
        described |= {"waiting": waiting, "command": data["continue_command"]}
        if len(waiting) == 1 and waiting[0]["link"]:
            described["link"] = waiting[0]["link"]
    else:
        described["command"] = f"shotclock report {run_id}"
    if envelope.error is not None and event != "parked":
        described["message"] = str(envelope.error["message"])
        lines.append(one_line(f"{envelope.code}: {described['message']}", 500))
        failed = [(name, data["steps"][name]["error"]) for name in data.get("failed", ())]
        lines += [one_line(f"{name}: {error['message']}", 300) for name, error in failed if error][:STEPS_EXPLAINED]
    return {**described, "text": "\n".join([*lines, described["command"]])}
