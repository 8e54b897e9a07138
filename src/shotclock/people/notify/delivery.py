"""The sending of a message on several channels at once, each in a supervised process with a limit.

A command is a process by itself. A request or a mail is sent by a small process of ours (_sender.py), so that a server
that does not answer, or answers byte by byte, is left by killing it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ...calls.commands import explain_unstartable
from ...calls.runtime import Runtime
from ...core.envelope import Warning_, warning
from ...core.errors import Failure
from ...core.limits import Clocks, format_duration
from ...core.references import UnsetVariable, unset_message
from ...core.value_types import JsonObject, value
from ...core.visible_text import Redaction, looks_secret, one_line
from .entries import REFUSED, NotifyPart

# A message has five seconds in all: what is left of them after these is for the kill and its proof.
TIMEOUT_MS, GRACE_MS = 4_400, 300
LIMIT_MS = 5_000
CALLER_KEPT_MS = 200  # before the deadline of the caller, for the kill and the answer
REASON_LIMIT = 200  # characters of what a channel answered
OUTPUT_LIMIT = 4_096
URGENT = ("failed", "timed_out", "parked", "proposed")
Event = Mapping[str, Any]
"""`event` is its name, `title` and `text` are for people, `link` may lead to the page; the rest is for programs."""

_ROOT = str(Path(__file__).resolve().parents[3])
# -P: no module of the current directory is imported.
SENDER = [
    sys.executable,
    "-P",
    "-c",
    f"import sys; sys.path.append({_ROOT!r}); from shotclock.people.notify._sender import main; sys.exit(main())",
]


@value
class Unsent:
    """A message that was not sent, or whose arrival is unknown."""

    entry: NotifyPart
    reason: str

    @property
    def channel(self) -> str:
        return self.entry.label

    def as_warning(self) -> Warning_:
        return warning("NOT_NOTIFIED", f"{self.channel}: {self.reason}", channel=self.channel)


async def deliver(
    entries: Sequence[NotifyPart], event: Event, environment: Mapping[str, str], folder: str | None = None
) -> list[Unsent]:
    """Send an event on the channels of these entries, all at once, and return the failures. Commands run in `folder`.

    Takes five seconds at most, less if the deadline that this process has inherited is earlier.
    """
    if not entries:
        return []
    async with Runtime(workers=1) as runtime:
        sending = [_Message(entry, event, environment, folder).send(runtime) for entry in entries]
        reasons = await asyncio.gather(*sending)
    found = zip(entries, reasons, strict=True)
    return [Unsent(entry, reason) for entry, reason in found if reason is not None]


def deliver_and_wait(entries: Sequence[NotifyPart], event: Event, environment: Mapping[str, str]) -> list[Unsent]:
    """Do the same for a thread without an event loop."""
    return asyncio.run(deliver(entries, event, environment))


class _Message:
    def __init__(self, entry: NotifyPart, event: Event, environment: Mapping[str, str], folder: str | None) -> None:
        self._entry, self._event, self._folder = entry, event, folder
        self._environment = environment
        self._redaction = Redaction(environment)

    async def send(self, runtime: Runtime) -> str | None:
        """Return why the message was not sent, or None."""
        try:
            texts = self._entry.filled(self._environment)
        except UnsetVariable as unset:
            return unset_message(str(unset))
        self._redaction.learn_values(texts.values())
        if self._entry.command is not None:
            own = {path.partition(".")[2]: text for path, text in texts.items()}
            argv, data, env = self._entry.command, json.dumps(self._event), {**own, **variables_of(self._event)}
        else:
            argv, data, env = SENDER, json.dumps(self._task(texts)), {}
        try:
            return await self._run(runtime, argv, data.encode(), env)
        except Failure as failure:  # no process could be started, or no time is left
            return self._shown(str(failure))

    async def _run(self, runtime: Runtime, argv: list[str], data: bytes, env: Mapping[str, str]) -> str | None:
        clocks = Clocks(timeout_ms=TIMEOUT_MS, grace_ms=GRACE_MS, reserve_ms=CALLER_KEPT_MS)
        call = runtime.begin("notification", {}, clocks, is_command=True)
        base_env = {name: text for name, text in self._environment.items() if not looks_secret(name)}
        output = b""
        async with runtime.open(call, argv, env=env, base_env=base_env, cwd=self._folder) as process:
            with contextlib.suppress(BrokenPipeError):  # it needs no input
                await process.write(data)
            process.end_stdin()
            while chunk := await process.read():  # until the end of the process, which its supervisor bounds
                output = (output + chunk)[:OUTPUT_LIMIT]
            await asyncio.wait([process.ended])
        report = process.report
        if report is None or report.lost:
            return "its process was lost"
        if report.unstartable is not None:
            return self._shown(explain_unstartable(process.task, *report.unstartable).message)
        if report.fired is not None:
            is_cut = call.bound.limit_ms < TIMEOUT_MS
            return f"did not end within {format_duration(call.bound.limit_ms if is_cut else LIMIT_MS)}"
        if report.status == 0:
            return None
        said = output if argv is SENDER else report.stderr.head + report.stderr.tail
        last = next((line for line in reversed(said.decode(errors="replace").splitlines()) if line.strip()), "")
        if argv is SENDER and report.status == REFUSED:
            return self._shown(last)
        return f"ended with exit code {report.status}" + (f": {self._shown(last)}" if last else "")

    def _task(self, texts: Mapping[str, str]) -> JsonObject:
        """Return what the sender reads: a request or a mail."""
        event, smtp, channel = self._event, self._entry.smtp, self._entry.channel
        if smtp is not None:
            login = {name: texts.get(f"smtp.{name}") for name in ("user", "password")}
            to = ", ".join(smtp.to)
            mail = {"from": smtp.from_, "to": to, "subject": event["title"], "text": _letter(event)}
            return {"host": smtp.host, "port": smtp.port, "starttls": smtp.starttls, **login, "mail": mail}
        headers = {path.partition(".")[2]: text for path, text in texts.items() if path.startswith("headers.")}
        if channel == "ntfy":
            body, kind = event["text"], "text/plain; charset=utf-8"
            priority = "high" if event["event"] in URGENT else "default"
            link = {"Click": event["link"]} if event.get("link") else {}
            headers = {"Title": event["title"], "Priority": priority, **link, **headers}
        elif channel == "slack":  # `<!channel>` in a text of others would call everybody
            body, kind = json.dumps({"text": _as_plain(_letter(event))}), "application/json"
        else:
            body, kind = json.dumps(event), "application/json"
        return {"url": texts[channel], "headers": {"Content-Type": kind, **headers}, "body": body}

    def _shown(self, text: str) -> str:
        return one_line(self._redaction.text(text), REASON_LIMIT)


def _letter(event: Event) -> str:
    return f"{event['text']}\n{event['link']}" if event.get("link") else str(event["text"])


def _as_plain(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def variables_of(event: Event) -> dict[str, str]:
    """Return the variables of a command: SHOTCLOCK_EVENT, and those of the run or the proposal."""
    names = {"event": "EVENT", "run_id": "RUN_ID", "name": "RUN_NAME", "proposal_id": "PROPOSAL_ID", "text": "TEXT"}
    return {f"SHOTCLOCK_{name}": str(event[key]) for key, name in names.items() if key in event}
