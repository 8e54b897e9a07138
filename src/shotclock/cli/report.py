"""`shotclock report`: what became of a run, to read, to look at, or for other programs."""

from __future__ import annotations

import difflib
import os
import sys
from collections.abc import Callable
from typing import Any
from urllib.parse import quote

from rich.console import Console
from rich.text import Text

from ..core.effects import Ending
from ..core.envelope import Envelope
from ..core.errors import Failure
from ..core.texts import one_line
from ..core.walltime import WallTime
from ..enforce.admission import Outcome
from ..enforce.clock import wall_ns
from ..enforce.handlers import raised
from ..enforce.identity import is_alive
from ..store import Store
from ..store.runs import Run
from ..workflow.report import MARKS, WORDS, Report, brief, report_of
from ..workflow.states import Status
from .output import is_terminal, say_line

# Runs in a list, and those among which a mistyped or shortened id is looked for.
RUNS_LISTED = 20
RUNS_KNOWN = 200
# Steps on a terminal. Of a longer run only those that say something are shown there.
STEPS_SHOWN = 60
# Of a file's name, with room for what a page is called while it is written.
PAGE_NAME_LENGTH = 200

COLOURS = {
    Status.SUCCEEDED: "green",
    Status.FAILED: "red",
    Status.TIMED_OUT: "yellow",
    Status.CANCELLED: "magenta",
    Status.INTERRUPTED: "magenta",
    Status.RUNNING: "blue",
    Status.SKIPPED: "bright_black",
    Status.PENDING: "bright_black",
}


def report(run_id: str, *, html: str | None, output: str, output_file: str | None, keeps: bool = False) -> Outcome:
    """The value is the text that was asked for instead of the envelope, if one was.

    With `keeps` there is a page also where nobody said where.
    """
    try:
        with Store.open() as store:
            made = stored_report(store, _find(store, run_id))
            if keeps and html is None:
                html = _kept_page(store, made.run_id)
        data = made.to_dict()
        if html is not None:
            from ..workflow.page import to_html

            write_file(html, to_html(made))
            data["html"] = os.path.abspath(html)
        text = None if output == "json" else text_of(made, output)
        if output_file is not None:
            write_file(output_file, text if text is not None else _json(data))
            data["output_file"], text = os.path.abspath(output_file), None
    except Failure as failure:
        return raised(failure)
    return Outcome(Ending.FINISHED, data=data, value=text)


def _kept_page(store: Store, run_id: str) -> str:
    """Where the page of a run is when nobody says where. An id is somebody's text, and no path."""
    return str(store.folder("reports") / f"{quote(run_id, safe='')[:PAGE_NAME_LENGTH]}.html")


def show(outcome: Outcome, *, says: bool) -> None:
    """The page to the person at the terminal, if there is one, and a browser. `says`: where it is, on stderr.

    Not part of the work: what that starts is stopped when it ends, and a browser is not.
    """
    from ..enforce.browser import open_in_browser

    data: Any = outcome.data
    is_somebody_there = is_terminal(sys.stderr) and not os.environ.get("CI")
    data["opened"] = is_somebody_there and open_in_browser(data["html"], os.environ)
    if says:
        say_line(where_it_is(data))


def listed() -> Outcome:
    try:
        with Store.open() as store:
            runs = [_listed(run) for run in store.runs.list(RUNS_LISTED)]
    except Failure as failure:
        return raised(failure)
    return Outcome(Ending.FINISHED, data={"runs": runs})


def stored_report(store: Store, run: Run) -> Report:
    return report_of(run, store.runs.steps(run.id), now=WallTime.of_ns(wall_ns()), is_alive=is_alive(run.holder))


def text_of(made: Report, output: str) -> str:
    from ..workflow.formats import to_junit, to_markdown

    renderings: dict[str, Callable[[Report], str]] = {"markdown": to_markdown, "junit": to_junit}
    return renderings[output](made)


def write_file(path: str, text: str) -> None:
    """All of it or nothing, where it is a file; what is none (a pipe, /dev/stdout) is just written to."""
    data = text.encode("utf-8", "backslashreplace")
    beside = f"{path}.{os.getpid()}.part"
    try:
        if os.path.exists(path) and not os.path.isfile(path):
            with open(path, "wb") as file:
                file.write(data)
            return
        try:
            with open(beside, "wb") as file:
                file.write(data)
            os.replace(beside, path)
        finally:
            if os.path.exists(beside):
                os.unlink(beside)
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else str(error)
        raise Failure("FILE_UNWRITABLE", f"{path!r} cannot be written: {why}") from None


def ensure_writable(path: str) -> None:
    """So that it is known before the work. A file that was not there is then, empty."""
    try:
        if not os.path.exists(path) or os.path.isfile(path):
            with open(path, "ab"):
                pass
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else str(error)
        raise Failure("FILE_UNWRITABLE", f"{path!r} cannot be written: {why}") from None


def _find(store: Store, run_id: str) -> Run:
    """By its id, or by a beginning that only one has."""
    run = None if "\0" in run_id else store.runs.get(run_id)
    if run is not None:
        return run
    known = [run.id for run in store.runs.list(RUNS_KNOWN)]
    begin = [name for name in known if run_id and name.startswith(run_id)]
    if len(begin) == 1:
        run = store.runs.get(begin[0])
    if run is not None:
        return run
    near = begin[:5] or difflib.get_close_matches(run_id, known, n=3)
    message = f"there is no run {run_id!r}" if not begin else f"{len(begin)} runs begin with {run_id!r}"
    hint = f"did you mean {' or '.join(near)}?" if near else "`shotclock report` lists the last runs"
    raise Failure("RUN_NOT_FOUND", message, context={"near": near}, suggestion=hint)


def _listed(run: Run) -> dict[str, object]:
    alive = run.ended_at is None and is_alive(run.holder)
    made = report_of(run, {}, now=WallTime.of_ns(wall_ns()), is_alive=alive)
    return {
        "run_id": run.id,
        "name": run.name,
        "status": made.status.value,
        "started_at": run.created_at.iso(),
        "ended_at": None if run.ended_at is None else run.ended_at.iso(),
        "duration_ms": None if made.status is Status.INTERRUPTED else made.duration_ms,
        "why": made.why,
    }


def _json(data: dict[str, Any]) -> str:
    import json

    return json.dumps(data, indent=2, ensure_ascii=True) + "\n"


# --- for a person -----------------------------------------------------------------------------------------


def render_list(envelope: Envelope, console: Console) -> None:
    data: Any = envelope.data
    if not data["runs"]:
        console.print(Text("no runs yet"))
    width = max((len(one_line(run["run_id"], 40)) for run in data["runs"]), default=0)
    for run in data["runs"]:
        status = Status(run["status"])
        took = "" if run["duration_ms"] is None else brief(run["duration_ms"])
        line = Text(f"{MARKS[status]} ", COLOURS[status]) + Text(f"{one_line(run['run_id'], 40):<{width}}  ", "bold")
        line += Text(f"{WORDS[status]:<11}", COLOURS[status]) + Text(f"  {run['started_at'][:19]}Z  {took:>8}  ")
        line += Text(one_line(run["name"], 60))
        _print(console, line)


def render(envelope: Envelope, console: Console) -> None:
    """A summary and the timeline, as wide as the terminal is."""
    data: Any = envelope.data
    status = Status(data["status"])
    of = f" of {brief(data['budget_ms'])}" if data["budget_ms"] else ""
    title = Text(f"{MARKS[status]} {one_line(data['name'], 80)} {WORDS[status]}", f"bold {COLOURS[status]}")
    _print(console, title + Text(f" in {brief(data['duration_ms'])}{of}", "not bold"))
    if data["why"]:
        _print(console, Text(f"  {one_line(data['why'], 500)}", COLOURS[status]))
    counts = ", ".join(f"{count} {WORDS[Status(name)]}" for name, count in data["counts"].items())
    _print(console, Text(f"  {counts}; run {one_line(data['run_id'], 80)}\n", "bright_black"))
    steps = _worth_showing(data["steps"], set(data["critical_path"]))
    names = min(28, max((len(one_line(step["id"], 28)) for step in steps), default=0))
    end_ms = max(data["duration_ms"], 1)
    room = max(10, console.width - names - 26)
    for step in steps:
        _print(console, _row(step, names, room, end_ms))
        if step["why"]:
            _print(console, Text(f"    {one_line(step['why'], 200)}", COLOURS[Status(step["status"])]))
    if len(steps) < len(data["steps"]):
        _print(console, Text(f"\n  {len(data['steps']) - len(steps)} more steps; --html FILE shows them all"))
    for name in ("html", "output_file"):
        if name in data:
            console.print(Text(f"\n{where_it_is(data, name)}"), soft_wrap=True)  # whole, so that it can be copied


def where_it_is(data: dict[str, Any], name: str = "html") -> str:
    if name == "html" and "opened" in data:
        return f"{'opened' if data['opened'] else 'the page, for a browser:'} {data['html']}"
    return f"written to {data[name]}"


def _worth_showing(steps: list[dict[str, Any]], on_path: set[str]) -> list[dict[str, Any]]:
    if len(steps) <= STEPS_SHOWN:
        return steps
    bad = [step for step in steps if Status(step["status"]).is_bad or step["status"] == "running"]
    rest = [step for step in steps if step not in bad and (step["attempts"] > 1 or step["id"] in on_path)]
    chosen = {step["id"] for step in (bad + rest)[:STEPS_SHOWN]}
    return [step for step in steps if step["id"] in chosen]


def _row(step: dict[str, Any], names: int, room: int, end_ms: int) -> Text:
    status = Status(step["status"])
    took = "" if step["duration_ms"] is None else brief(step["duration_ms"])
    budget = f"/ {brief(step['budget_ms'])}" if step["budget_ms"] and step["started_ms"] is not None else ""
    line = Text(f"{MARKS[status]} ", COLOURS[status])
    line += Text(f"{one_line(step['id'], 28):<{names}} ") + Text(f"{took:>8} ", "bold")
    line += Text(f"{budget:<9} ", "bright_black")
    if step["at_ms"] is None:
        return line + Text(WORDS[status], COLOURS[status])
    start = min(room - 1, step["at_ms"] * room // end_ms)
    if step["started_ms"] is None:
        return line + Text(" " * start + "○", COLOURS[status])
    used = max(1, min(room - start, round((step["duration_ms"] or 0) * room / end_ms)))
    spare = 0
    if step["budget_ms"]:
        spare = max(0, min(room - start, round(step["budget_ms"] * room / end_ms)) - used)
    tries = f" ↻{step['attempts']}" if step["attempts"] > 1 else ""
    return line + Text(" " * start) + Text("█" * used, COLOURS[status]) + Text("░" * spare, "bright_black") + tries


def _print(console: Console, line: Text) -> None:
    console.print(line, soft_wrap=False, no_wrap=True, overflow="ellipsis", crop=True)
