"""The words for a step: the same in the live view, its lines, the report, Markdown and the page."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ...core.value_types import value
from ...terminal.output import brief
from ..run.state import Reason, Status

MARKS = {
    Status.PENDING: "·",
    Status.RUNNING: "…",
    Status.SUCCEEDED: "✓",
    Status.FAILED: "✗",
    Status.TIMED_OUT: "◷",
    Status.SKIPPED: "–",
    Status.CANCELLED: "■",
    Status.INTERRUPTED: "!",
    Status.PARKED: "◌",
}
WORDS = {status: status.value.replace("_", " ") for status in Status}
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


def took_in_words(duration_ms: int | None, waited_ms: int = 0) -> str:
    """Return the time of a step, if it has ended, and how long it waited for people, which is not part of it."""
    took = "" if duration_ms is None else brief(duration_ms - waited_ms)
    return took + (f", waited {brief(waited_ms)}" if waited_ms else "")


def attempts_in_words(attempts: int) -> str:
    """Return the number of attempts, or nothing for a single one."""
    return f"{attempts} attempts" if attempts > 1 else ""


def skipped_in_words(reason: str, cause: str | None, ended: str = "did not succeed") -> str:
    """Return why a step was skipped. `ended` says how its cause ended."""
    reasons = {
        Reason.CONDITION.value: "its condition did not hold",
        Reason.DEPENDENCY_FAILED.value: f"it needs {cause}: {cause} {ended}",
        Reason.DEPENDENCY_SKIPPED.value: f"it needs {cause}: {cause} {ended}",
        Reason.ON_DEMAND.value: "no other step called it",
        Reason.RUN_ENDED.value: "the run ended before it could start",
        Reason.NOT_CHOSEN.value: "left out by --only, --skip or --tags",
    }
    return reasons.get(reason, reason)


def wait_in_words(proposals: Sequence[str], where: str = "") -> str:
    """Return what a step waits for, with the command that decides it. `where` is the address of its engine."""
    more = f" and {len(proposals) - 1} more" if len(proposals) > 1 else ""
    return f"waits for {proposals[0]}{more}: shotclock inbox approve {proposals[0]} {where}".rstrip()


def why_failed(error: Mapping[str, Any]) -> str:
    """Return the message, after the last line of a command's stderr, which is mostly the reason."""
    message = str(error.get("message", ""))
    last = stderr_of(error).strip().rpartition("\n")[2].strip()
    return f"{last} ({message})" if last and error.get("code") == "COMMAND_FAILED" else message


def news_in_words(news: Mapping[str, Any]) -> str:
    """Return a decision about the time of a step or a run, in words."""
    if news["event"] == "waiting":
        is_parked = ", which is parked" if news["is_parked"] else ""
        return f"waits for run {news['for_run']} of group {news['group']}{is_parked}"
    if news["event"] == "no_worker":
        return f"no worker serves queue {news['queue']!r}; {news['start']}"
    because = f": {news['reason']}" if news.get("reason") else ""
    if news["event"] == "wind_down":
        return f"winds down within {brief(news['within_ms'])}{because}"
    if news["verdict"] == "granted":
        if news["asked_by"] not in ("soft clock", "call"):
            return f"{brief(news['granted_ms'])} more by {news['asked_by']}"
        return f"{brief(news['granted_ms'])} of overtime{because}"
    words = {
        "declined": "overtime declined",
        "failed": "no overtime",
        "exhausted": "no overtime left",
        "unanswered": "overtime asked for, ended before the answer",
    }
    return f"{words.get(news['verdict'], news['verdict'])}{because}"


def noteworthy(warnings: Iterable[Mapping[str, Any]]) -> str:
    """Return the first warning of a successful step, except that its run cut its time."""
    return next((str(each.get("message", "")) for each in warnings if each.get("code") != "DEADLINE_INHERITED"), "")


def stderr_of(error: Mapping[str, Any] | None) -> str:
    context = (error or {}).get("context")
    return str(context.get("stderr") or "") if isinstance(context, Mapping) else ""


@value
class FiredClock:
    kind: str
    owner: str
    limit_ms: int
    elapsed_ms: int

    def is_of(self, step: str) -> bool:
        return self.owner in (f"step {step}", step)

    def in_words(self, step: str) -> str:
        limit = brief(self.limit_ms)
        if self.is_of(step):
            return f"its own {self.kind} clock ({limit})"
        if self.owner.startswith("run "):
            return f"the run's clock, which left it {limit}"
        return f"the {self.kind} clock of {self.owner or 'another call'} ({limit})"

    def owner_in_words(self, step: str) -> str:
        if self.is_of(step):
            return "its own clock"
        return "the run's clock" if self.owner.startswith("run ") else f"the clock of {self.owner}"


def artifacts_in_words(artifacts: Mapping[str, Any]) -> str:
    count = artifacts["files"]
    deleted = ", deleted since" if artifacts.get("is_deleted") else ""
    return f"{count} artifact{'s' if count > 1 else ''} of {artifacts['bytes']} bytes{deleted}"
