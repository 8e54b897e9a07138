"""The lines of a run on stderr where no view can be drawn: changes of steps, what these print, and signs of life."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import Iterable, Sequence

from ...core.limits import NS_PER_MS, format_duration
from ...core.value_types import JsonObject
from ...core.visible_text import one_line
from ...supervise.clock import monotonic_ns
from ...terminal.output import Outlet
from ..report.words import (
    MARKS,
    attempts_in_words,
    news_in_words,
    skipped_in_words,
    took_in_words,
    wait_in_words,
    why_failed,
)
from ..run.state import Status, StepState
from ..run.step_log import LogLine, read_records

HEARTBEAT_S = 30.0  # the longest silence
LOOK_S = 0.2  # between two looks at the silence, and at a reader that is behind
HELD_LIMIT = 256 * 1024  # of output for a reader that is behind; what comes then is left out
NAMED = 5  # running steps in a sign of life
ESCAPES = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-Z\\-_])")
COLOUR = re.compile(r"\x1b\[[0-9;:]*m")


def is_part_of(name: str, step: str) -> bool:
    """Return whether it is the step, or an item, a step of its nested workflow, or a tool of its agent."""
    return name == step or name.startswith(tuple(f"{step}{mark}" for mark in "[. "))


def label_of(step: str, number: int) -> str:
    return f"{step} | " if number == 1 else f"{step} (attempt {number}) | "


def _flatten(text: str) -> str:
    """Return a line without what moves the cursor or leaves a colour on: of a progress bar the last state."""
    if "\x1b" in text:
        text = ESCAPES.sub(lambda found: found[0] if COLOUR.fullmatch(found[0]) else "", text)
        if "\x1b" in text and not text.endswith(("\x1b[0m", "\x1b[m")):
            text += "\x1b[0m"
    return next((part for part in reversed(text.split("\r")) if part), "")


class LabelledLines:
    """Text of the lines of several logs, each behind its label."""

    def __init__(self) -> None:
        self._unfinished: tuple[str, int] | None = None
        self._has_returned = False

    def write(self, label: str, lines: Iterable[LogLine]) -> str:
        written: list[str] = []
        for line in lines:
            begun, place = self._unfinished, (label, line.stream)
            if begun is not None and (begun != place or line.left_out):
                written.append("\n")
            if line.left_out:
                written.append(f"{label}[… {line.left_out} bytes left out …]\n")
                self._unfinished = None
                continue
            text = line.text
            if label:
                is_drawn_anew = text.startswith("\r") or self._has_returned
                text, self._has_returned = _flatten(text), text.endswith("\r")
                if is_drawn_anew and begun == place:  # a progress bar
                    written.append("\n")
                    begun = None
            written.append(text if begun == place else label + text)
            if line.is_whole:
                written.append("\n")
            self._unfinished = None if line.is_whole else place
        return "".join(written)

    def finish(self) -> str:
        begun, self._unfinished = self._unfinished, None
        return "" if begun is None else "\n"


class RunLines:
    """A line for every change, with the methods of a View."""

    aside = contextlib.nullcontext[None]

    def __init__(
        self,
        outlet: Outlet | None,
        *,
        shows_output: bool,
        annotates: bool = False,
        only: Sequence[str] = (),
        heartbeat_s: float = HEARTBEAT_S,
        where: str = "",
    ) -> None:
        """`annotates`: failed steps are annotations of GitHub Actions. `only`: the steps whose output is shown, if not
        all. `where` is the address of its engine."""
        self._outlet = outlet
        self._shows_output = shows_output and outlet is not None
        self._annotates, self._where = annotates, where
        self._only = only
        self._heartbeat_s = heartbeat_s
        self._writer = LabelledLines()
        self._running: dict[str, int] = {}
        self._unannounced: dict[str, tuple[int, str]] = {}  # a step whose `if` is false is never announced as running
        self._attempts: dict[str, int] = {}
        self._waits: dict[str, str] = {}
        self._began_ns = self._written_ns = monotonic_ns()
        self._left_out = 0
        self._watching: asyncio.Task[None] | None = None

    @classmethod
    def unseen(cls) -> RunLines:
        return cls(None, shows_output=False)

    async def __aenter__(self) -> RunLines:
        if self._outlet is not None:
            self._watching = asyncio.get_running_loop().create_task(self._watch())
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._watching is not None:
            self._watching.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._watching
        self._announce()
        if self._outlet is not None:
            self._outlet.finish()

    def handle_change(self, state: StepState) -> None:
        if state.status is Status.RUNNING:
            self._running.setdefault(state.id, monotonic_ns())
            had_waits = self._waits.pop(state.id, None) is not None
            if state.waits_for:
                self._waits[state.id] = f"{state.id} {wait_in_words(state.waits_for, self._where)}"
            if state.waits_for or had_waits:
                self._unannounced.pop(state.id, None)
                waits = self._waits.get(state.id)
                self._write_line(_describe(state) if waits is None else f"{MARKS[Status.PARKED]} {waits}")
                return
            self._unannounced[state.id] = monotonic_ns(), _describe(state)
            return
        if state.status is Status.SKIPPED:
            self._unannounced.pop(state.id, None)
        self._announce(state.id)
        self._running.pop(state.id, None)
        line = _describe(state)
        if (attempts := self._attempts.pop(state.id, 1)) > 1 and state.status.is_final:
            line += f" ({attempts_in_words(attempts)})"
        if self._annotates and state.status.is_bad:  # shown above the log as well
            kind = "warning" if state.continues else "error"
            line = f"::{kind} title={_escape(state.id, ':,')}::{_escape(line)}"
        self._write_line(line)

    def handle_news(self, step: str, news: JsonObject) -> None:
        self._write_line(f"◔ {step or 'the run'} {one_line(news_in_words(news), 1000)}")

    def _announce(self, step: str | None = None) -> None:
        """Write that a step runs, or all of them, once."""
        for name in [*self._unannounced] if step is None else [step]:
            if name in self._unannounced:
                self._write_line(self._unannounced.pop(name)[1])

    def handle_output(self, step: str, number: int, records: bytes) -> None:
        """Show new output; without records, an attempt begins."""
        self._announce(step.partition("[")[0].partition(" tool ")[0])
        if not self._shows_output:
            return
        if not records:
            self._attempts[step] = number
            if number > 1:
                self._write_line(f"… {step} begins attempt {number}")
            return
        if self._only and not any(is_part_of(step, name) for name in self._only):
            return
        if self._outlet is not None and self._outlet.held > HELD_LIMIT:
            self._left_out += len(records)
        else:
            self._write(self._left_out_line() + self._writer.write(label_of(step, number), read_records(records)))

    def handle_stop(self) -> None:
        pass

    def clear(self) -> None:
        pass

    async def _watch(self) -> None:
        """Say which steps run where nothing is written for long, and write on for a reader that was behind."""
        while True:
            await asyncio.sleep(LOOK_S)
            for name, (at_ns, _) in [*self._unannounced.items()]:
                if monotonic_ns() - at_ns >= LOOK_S * 1e9:
                    self._announce(name)
            silent_s = (monotonic_ns() - self._written_ns) / 1e9
            if self._shows_output and self._running and silent_s >= self._heartbeat_s:
                self._write_line(self._describe_running())
            elif self._outlet is not None and self._outlet.held:
                self._put("")

    def _describe_running(self) -> str:
        now_ns = monotonic_ns()
        steps = [
            f"{self._waits.get(name, name)} {format_duration((now_ns - at_ns) // NS_PER_MS // 1000 * 1000)}"
            for name, at_ns in self._running.items()
        ]
        more = f" and {len(steps) - NAMED} more" if len(steps) > NAMED else ""
        return f"… running: {', '.join(steps[:NAMED])}{more}"

    def _left_out_line(self) -> str:
        left_out, self._left_out = self._left_out, 0
        return f"{self._writer.finish()}[… {left_out} bytes of output left out …]\n" if left_out else ""

    def _write_line(self, line: str) -> None:
        self._write(f"{self._writer.finish()}{line}\n")

    def _write(self, text: str) -> None:
        self._written_ns = monotonic_ns()
        self._put(text)

    def _put(self, text: str) -> None:
        if self._outlet is not None:
            try:
                self._outlet.write(text)
            except OSError:  # the reader has left, or does not keep up
                self._outlet, self._shows_output = None, False


def _escape(text: str, more: str = "") -> str:
    """Write a value of a command of GitHub's runner."""
    for letter in "%\r\n" + more:
        text = text.replace(letter, f"%{ord(letter):02X}")
    return text


def _describe(state: StepState) -> str:
    took = "" if state.duration_ms is None else " "
    took += took_in_words(state.duration_ms, state.waited_ms)
    why = ""
    if state.error is not None:
        why = f": {one_line(why_failed(state.error), 1000)}"
    elif state.reason is not None:
        why = f": {skipped_in_words(state.reason, state.cause)}"
    return f"{MARKS[state.status]} {state.id} {state.status.value}{took}{why}"
