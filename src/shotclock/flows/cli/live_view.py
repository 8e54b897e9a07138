"""The view of a run on a terminal: each step with its remaining time, or the steps that it waits for.

Drawn on stderr from the run's own loop, so it never waits for the terminal: one that does not read (Ctrl-S, a hanging
window) misses frames, and the timeouts of the steps still fire on time.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator, Mapping
from typing import IO, Any, cast

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from ...core.errors import Ending
from ...core.value_types import JsonObject
from ...core.visible_text import one_line
from ...store.store import Store
from ...supervise.clock import monotonic_ns, wall_time
from ...terminal.output import Screen, brief
from ..check.plan import Groups, ends_awaited, grace_ms, graph_of, is_per_item, most_attempts, needs
from ..file.schema import WorkflowFile
from ..report.words import (
    COLOURS,
    MARKS,
    attempts_in_words,
    news_in_words,
    noteworthy,
    skipped_in_words,
    took_in_words,
    wait_in_words,
    why_failed,
)
from ..run.state import Status, StepState
from ..run.step_log import read_records
from .run_lines import ESCAPES

SPARE_LINES = 3  # lines of the terminal that stay free: the prompt above, and the line of the cursor
LONGEST_NAME = 44
SHORTEST_NAME = 12
BAR_WIDTH = 16
FINISHED_SHOWN = 3
PRINTED_READ = 4096  # bytes of new output in which the last line is looked for
PRINTED_SHOWN = 200
LISTED_AT_END = 30  # of more finished steps, only the failed ones are listed


class View:
    """The view of one run, drawn by a task while it is entered."""

    def __init__(
        self,
        screen: Screen,
        workflow: WorkflowFile,
        name: str,
        store: Store,
        run_id: str,
        recorded: Mapping[str, StepState],
    ) -> None:
        """`recorded` holds the states of its steps before it begins or continues."""
        self._screen = screen
        self._workflow = workflow
        self._name = name
        self._store = store
        self._run_id = run_id
        self._deadline_ns: int | None = None
        self._graph: dict[str, Groups] = graph_of(workflow)
        self._begun = asyncio.Event()
        self._news: dict[str, JsonObject] = {}
        self._printed: dict[str, str] = {}
        self._states: dict[str, StepState] = {}
        self._running: dict[str, _AttemptClock] = {}
        self._finished: dict[str, None] = {}
        reactions = [each for step in workflow.steps.values() for each in (step.on_fail, step.on_success) if each]
        waited_for = {name for groups in graph_of(workflow).values() for name in needs(groups)}
        self._on_call = {name for reaction in reactions for name in reaction.run} - waited_for
        self._longest = min(LONGEST_NAME, max((len(one_line(name)) for name in self._graph), default=1))
        for state in recorded.values():
            if state.status.is_final and (state.status is not Status.SKIPPED or state.is_settled):
                self._states[state.id], self._finished[state.id] = state, None
        self._began_ns = monotonic_ns()
        self._console = Console(file=cast("IO[str]", screen), force_terminal=True, highlight=False, markup=False)
        # A process killed while drawing must not leave the terminal without its cursor.
        self._console.show_cursor = lambda show=True: False  # type: ignore[method-assign]
        self._live: Live | None = None
        self._drawing: asyncio.Task[None] | None = None
        self._stopped_ns: int | None = None

    def handle_change(self, state: StepState) -> None:
        name = state.id
        if name not in self._graph:  # a step of a nested workflow
            return
        self._begun.set()
        self._states[name] = state
        self._running.pop(name, None)
        self._finished.pop(name, None)
        if state.status.is_final:
            self._finished[name] = None
            self._news.pop(name, None)
            self._printed.pop(name, None)
        else:
            self._running[name] = _AttemptClock()

    def handle_news(self, name: str, news: JsonObject) -> None:
        if news["event"] in ("waiting", "no_worker"):  # no row of the view has room for it
            self._console.print(Text(f"◔ {name or 'the run'} {one_line(news_in_words(news), 1000)}", "yellow"))
            return
        self._news[name] = news | {"until_ns": monotonic_ns() + news.get("within_ms", 0) * 1_000_000}
        if not name and news["event"] == "overtime" and self._deadline_ns is not None:
            self._deadline_ns += news["granted_ms"] * 1_000_000

    def handle_output(self, step: str, number: int, records: bytes) -> None:
        """Keep the last line that a step prints, or a part of it: an item, a nested step, a tool of an agent."""
        name = step.partition("[")[0].partition(" tool ")[0]
        while name not in self._graph and "." in name:
            name = name.rpartition(".")[0]
        if not records:
            self._printed.pop(name, None)
        for line in reversed(list(read_records(records[-PRINTED_READ:]))):
            # A progress bar overwrites its line.
            if text := ESCAPES.sub("", line.text).rstrip().rpartition("\r")[2].strip():
                self._printed[name] = one_line(text, PRINTED_SHOWN)
                break

    def handle_stop(self) -> None:
        self._stopped_ns = monotonic_ns()

    def clear(self) -> None:
        self._stop()
        self._screen.close()

    async def __aenter__(self) -> View:
        self._drawing = asyncio.get_running_loop().create_task(self._draw())
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._drawing is not None:
            self._drawing.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._drawing
        self._stop()
        if self._begun.is_set():  # else the run was refused
            self._list_finished()
        self._screen.close()

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        drawing, self._drawing = self._drawing, None
        self._stop()
        try:
            yield
        finally:
            self._drawing = drawing

    async def _draw(self) -> None:
        await self._begun.wait()  # bounded by the run: it cancels us
        run = await asyncio.to_thread(self._store.runs.get, self._run_id)
        if run is not None and run.deadline_at is not None:
            self._deadline_ns = monotonic_ns() + max(0, run.deadline_at - wall_time()) * 1_000_000
        while True:
            if self._drawing is not None and not self._screen.is_behind:
                if self._live is None:
                    options: Any = {"auto_refresh": False, "redirect_stdout": False, "redirect_stderr": False}
                    self._live = Live(console=self._console, transient=True, vertical_overflow="crop", **options)
                    self._live.start()
                self._live.update(self.frame(monotonic_ns()), refresh=True)
            await asyncio.sleep(1 / 8)  # eight frames per second

    def _stop(self) -> None:
        live, self._live = self._live, None
        if live is not None:
            live.update(Text(""))
            live.stop()

    def _list_finished(self) -> None:
        states = [self._states[name] for name in self._finished]
        if len(states) > LISTED_AT_END:
            states = [state for state in states if state.status.is_bad][:LISTED_AT_END]
        for state in states:
            self._console.print(self._row(state, monotonic_ns()), no_wrap=True, overflow="ellipsis", crop=True)

    def frame(self, now_ns: int) -> Group:
        room = max(4, self._console.height - SPARE_LINES)
        names = self._graph if len(self._graph) < room else self._choose_steps(room - 2)
        lines = [self._header(now_ns)]
        spare = room - len(names)
        for name in names:
            state = self._states.get(name)
            lines.append(self._waiting(name) if state is None else self._row(state, now_ns))
            items = self._item_rows(state, now_ns)[:spare] if state is not None and name in self._running else []
            spare -= len(items)
            lines += items
        if len(names) < len(self._graph):
            waiting = len(self._graph) - len(self._running) - len(self._finished)
            hidden = len(self._running.keys() - set(names))
            more = f"{hidden} more running, " if hidden else ""
            lines.append(Text(f"  … {more}{len(self._finished)} finished, {waiting} waiting", "bright_black"))
        return Group(*lines)

    def _choose_steps(self, room: int) -> list[str]:
        running = list(self._running)[: max(1, room * 2 // 3)]
        latest = list(reversed(self._finished))
        bad = [name for name in latest if self._states[name].status.is_bad][: max(1, room // 4)]
        ended = [name for name in latest[:FINISHED_SHOWN] if name not in bad]
        waiting = [name for name in self._graph if name not in self._states and name not in self._on_call]
        waiting.sort(key=lambda name: len(self._open_groups(name)))
        return (bad[::-1] + ended[::-1] + running + waiting)[:room]

    def _header(self, now_ns: int) -> Text:
        bad = sum(self._states[name].status.is_bad for name in self._finished)
        line = Text(f"  {len(self._finished)} of {len(self._graph)} done, {len(self._running)} running")
        if bad:
            line.append(f", {bad} bad", "red")
        line.append(f"  {_format_ticking((now_ns - self._began_ns) // 1_000_000)}", "bright_black")
        if self._deadline_ns is not None:
            left_ms = max(0, (self._deadline_ns - now_ns) // 1_000_000)
            of_ms = max(1, (self._deadline_ns - self._began_ns) // 1_000_000)
            line.append("  ").append_text(_draw_countdown(left_ms, of_ms))
        if (news := self._news.get("")) is not None:
            line.append(f"  {_describe_news(news, now_ns)}", "yellow")
        name = _shorten(self._name, max(SHORTEST_NAME, self._console.width - len(line) - 1))
        header = Text(no_wrap=True, overflow="ellipsis")
        return header.append(name, "bold").append_text(line)

    def _waiting(self, name: str) -> Text:
        line = self._begin_line(name, Status.PENDING)
        if name in self._on_call:
            return line.append("runs only if a reaction starts it", "bright_black")
        if name in self._workflow.finally_ and not self._graph[name]:
            return line.append("runs once all other steps have ended", "bright_black")
        groups = self._open_groups(name)
        names = ["|".join(_shorten(other, self._width) for other in group) for group in groups[:4]]
        waits = ", ".join(names) + (", …" if len(groups) > 4 else "")
        return line.append(f"waits for {waits}" if waits else "waits for its turn", "bright_black")

    def _open_groups(self, name: str) -> list[tuple[str, ...]]:
        any_end = ends_awaited(self._workflow.steps[name])
        return [
            group
            for group in self._graph[name]
            if not any(self._has_passed(other) or (other in any_end and self._has_ended(other)) for other in group)
        ]

    def _has_ended(self, name: str) -> bool:
        state = self._states.get(name)
        return state is not None and state.status.is_final

    def _has_passed(self, name: str) -> bool:
        state = self._states.get(name)
        return state is not None and (state.duration_ms is not None or state.is_settled) and state.has_passed

    def _row(self, state: StepState, now_ns: int) -> Text:
        clock = self._running.get(state.id)
        if clock is not None:
            return self._running_row(state, clock, now_ns)
        line = self._begin_line(state.id, state.status)
        if state.started_ms is not None and state.duration_ms is not None:
            line.append(took_in_words(state.duration_ms, state.waited_ms))
            if state.attempts > 1 and not self._is_per_item(state.id):
                line.append(f", {attempts_in_words(state.attempts)}")
            line.append("  ")
        if state.kept_from is not None:
            line.append(f"kept from run {one_line(state.kept_from)}", "bright_black")
        elif state.error is not None:
            line.append(one_line(why_failed(state.error)), COLOURS[state.status])
            if state.ending == Ending.KILLED:
                line.append(", killed", COLOURS[state.status])
        elif state.reason is not None:
            line.append(f"skipped: {one_line(skipped_in_words(state.reason, state.cause))}", "bright_black")
        elif note := noteworthy(state.warnings):
            line.append(one_line(note), "yellow")
        return line

    def _running_row(self, state: StepState, clock: _AttemptClock, now_ns: int) -> Text:
        clock.look(state, now_ns)
        line = self._begin_line(state.id, Status.PARKED if state.waits_for else Status.RUNNING)
        step = self._workflow.steps[state.id]
        step_grace_ms = grace_ms(self._workflow, step)
        if state.waits_for and not state.items:
            return line.append(wait_in_words(state.waits_for), "yellow")
        if state.type == "human-input":
            line.append("asks a person  ", "yellow")
        if self._stopped_ns is not None and clock.began_ns <= self._stopped_ns:
            return _append_stopping(line, "stopping", step_grace_ms - (now_ns - self._stopped_ns) // 1_000_000)
        if state.error is not None and clock.is_pausing(state) and most_attempts(self._workflow, step) > 1:
            why = one_line(why_failed(state.error))
            return line.append(f"attempt {state.attempts} failed, retries: {why}", "yellow")
        limits = []
        if state.timeout_ms and not self._is_per_item(state.id):
            limits.append(state.timeout_ms)
        if self._deadline_ns is not None:
            limits.append(max(0, (self._deadline_ns - clock.began_ns) // 1_000_000))
        spent_ms = (now_ns - clock.began_ns) // 1_000_000
        if state.items:
            ended = [item.status for item in state.items if item.status.is_final]
            bad = sum(status.is_bad for status in ended)
            line.append(f"{len(ended)} of {len(state.items)} items" + f", {bad} bad" * bool(bad) + "  ")
        if limits and spent_ms > min(limits):
            _append_stopping(line, "out of time, stopping", min(limits) + step_grace_ms - spent_ms)
        elif limits:
            line.append_text(_draw_countdown(max(0, min(limits) - spent_ms), max(1, min(limits))))
        else:
            line.append(f"{_format_ticking(spent_ms)}, no limit")
        if state.attempts > 1 and not self._is_per_item(state.id):
            line.append(f"  attempt {state.attempts}", "yellow")
        if (news := self._news.get(state.id)) is not None:
            line.append(f"  {_describe_news(news, now_ns)}", "yellow")
        if (printed := self._printed.get(state.id)) is not None:
            line.append(f"  {printed}", "bright_black")
        return line

    def _item_rows(self, state: StepState, now_ns: int) -> list[Text]:
        rows = []
        for item in state.items:
            if item.status is not Status.RUNNING:
                continue
            line = Text(f"    {item.id.removeprefix(state.id)} {item.label}  ", no_wrap=True, overflow="ellipsis")
            spent_ms = (now_ns - item.attempt_began_ns) // 1_000_000 if item.attempt_began_ns else 0
            if item.waits_for:
                line.append(wait_in_words(item.waits_for), "yellow")
            elif state.timeout_ms:
                line.append_text(_draw_countdown(max(0, state.timeout_ms - spent_ms), state.timeout_ms))
            else:
                line.append(f"{_format_ticking(spent_ms)}, no limit")
            rows.append(line.append(f"  attempt {item.attempts}" if item.attempts > 1 else "", "yellow"))
        return rows

    def _is_per_item(self, name: str) -> bool:
        return is_per_item(self._workflow, self._workflow.steps[name])

    def _begin_line(self, name: str, status: Status) -> Text:
        line = Text(no_wrap=True, overflow="ellipsis")
        line.append(f"{MARKS[status]} ", COLOURS[status])
        return line.append(
            f"{_shorten(name, self._width):<{self._width}}  ", "bold" if status is Status.RUNNING else ""
        )

    @property
    def _width(self) -> int:
        return min(self._longest, max(SHORTEST_NAME, self._console.width // 3))


class _AttemptClock:
    """The start of the current attempt. The state only counts attempts, so it is noticed by looking."""

    def __init__(self) -> None:
        self.began_ns = monotonic_ns()
        self._attempt = 0
        self._before: object = None  # the error of the previous attempt; any other error belongs to the current one
        self._seen: object = None

    def look(self, state: StepState, now_ns: int) -> None:
        if state.attempts > self._attempt:
            if self._attempt:
                self.began_ns = now_ns
            self._attempt, self._before = state.attempts, self._seen
        self._seen = state.error

    def is_pausing(self, state: StepState) -> bool:
        return state.error is not None and state.error is not self._before


def _shorten(name: str, width: int) -> str:
    """Shorten a name in the middle, because names that begin alike mostly differ at their ends."""
    flat = one_line(name)
    if len(flat) <= width:
        return flat
    end = (width - 1) // 2
    return f"{flat[: width - 1 - end]}…{flat[len(flat) - end :]}"


def _describe_news(news: JsonObject, now_ns: int) -> str:
    if news["event"] == "wind_down":
        return f"winding down, {_format_ticking(max(0, news['until_ns'] - now_ns) // 1_000_000)}"
    return one_line(news_in_words(news))


def _append_stopping(line: Text, what: str, grace_ms: int) -> Text:
    line.append(what, "red")
    return line.append(f"  {_format_ticking(grace_ms)} of grace left") if grace_ms > 0 else line


def _draw_countdown(left_ms: int, of_ms: int) -> Text:
    share = left_ms / of_ms
    colour = "green" if share > 0.4 else "yellow" if share > 0.15 else "red"
    full = min(BAR_WIDTH, round(BAR_WIDTH * share))
    line = Text("━" * full, colour) + Text("─" * (BAR_WIDTH - full), "bright_black")
    return line.append(f" {_format_ticking(left_ms)} left", colour)


def _format_ticking(ms: int) -> str:
    """Return a duration with one digit, which moves without flickering."""
    return f"{ms / 1000:.1f}s" if ms < 60_000 else brief(ms // 1000 * 1000)
