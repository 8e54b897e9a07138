"""`shotclock report`: what became of a run, to read, to look at, or for other programs."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from ..core.errors import Ending, Failure
from ..process.clock import wall_time
from ..process.kernel import is_alive
from ..runtime.call import Outcome
from ..runtime.outcomes import failure_outcome
from ..store.runs import Run
from ..store.store import Store
from ..workflow.report import Report, report_of
from ..workflow.state import Status
from .output import is_terminal, say_line

if TYPE_CHECKING:
    from ..temporal.connection import Address

# Runs in a list, and those among which a mistyped or shortened id is looked for.
RUNS_LISTED = 20
RUNS_KNOWN = 200
# Of a file's name, with room for what a page is called while it is written.
PAGE_NAME_LENGTH = 200


def report(
    run_id: str,
    *,
    html: str | None,
    output: str,
    output_file: str | None,
    keeps: bool = False,
    on: Address | None = None,
) -> Outcome:
    """Report a run. The value is the text that was asked for instead of the envelope, if one was.

    With `keeps` there is a page also where nobody said where. `on` is the engine that has the run, if one has.
    """
    try:
        if on is not None:
            from .engine import report_on_engine

            made = report_on_engine(on, run_id)
        else:
            with Store.open() as store:
                made = stored_report(store, _find(store, run_id))
        if keeps and html is None:
            with Store.open() as store:
                html = _page_path(store, made.run_id)
        data = made.to_dict()
        if html is not None:
            from ..workflow.html_report import to_html

            write_file(html, to_html(made))
            data["html"] = os.path.abspath(html)
        text = None if output == "json" else text_of(made, output)
        if output_file is not None:
            write_file(output_file, text if text is not None else _json(data))
            data["output_file"], text = os.path.abspath(output_file), None
    except Failure as failure:
        return failure_outcome(failure)
    return Outcome(Ending.FINISHED, data=data, value=text)


def say_where(data: dict[str, Any], name: str = "html") -> str:
    if name == "html" and "opened" in data:
        return f"{'opened' if data['opened'] else 'the page, for a browser:'} {data['html']}"
    return f"written to {data[name]}"


def _page_path(store: Store, run_id: str) -> str:
    """Return where the page of a run is when nobody says where. An id is somebody's text, and no path."""
    return str(store.folder("reports") / f"{quote(run_id, safe='')[:PAGE_NAME_LENGTH]}.html")


def show(outcome: Outcome, *, says: bool) -> None:
    """Show the page to the person at the terminal, if there is one, and a browser. `says`: where it is, on stderr.

    Not part of the work: what that starts is stopped when it ends, and a browser is not.
    """
    from ..process.unsupervised import open_in_browser

    data: Any = outcome.data
    is_somebody_there = is_terminal(sys.stderr) and not os.environ.get("CI")
    data["opened"] = is_somebody_there and open_in_browser(data["html"], os.environ)
    if says:
        say_line(say_where(data))


def list_runs(on: Address | None = None) -> Outcome:
    """List the last runs, of the store or of an engine."""
    try:
        if on is not None:
            from .engine import list_on_engine

            return Outcome(Ending.FINISHED, data={"runs": list_on_engine(on, RUNS_LISTED)})
        with Store.open() as store:
            runs = [_describe_run(run) for run in store.runs.list(RUNS_LISTED)]
    except Failure as failure:
        return failure_outcome(failure)
    return Outcome(Ending.FINISHED, data={"runs": runs})


def stored_report(store: Store, run: Run) -> Report:
    return report_of(run, store.runs.steps(run.id), now=wall_time(), is_alive=is_alive(run.holder))


def text_of(made: Report, output: str) -> str:
    from ..workflow.report import to_junit, to_markdown

    renderings: dict[str, Callable[[Report], str]] = {"markdown": to_markdown, "junit": to_junit}
    return renderings[output](made)


def write_file(path: str, text: str) -> None:
    """Write all of it or nothing, where it is a file; what is none (a pipe, /dev/stdout) is just written to."""
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
    """Raise Failure before the work where the file cannot be written. A file that was not there is then, empty."""
    try:
        if not os.path.exists(path) or os.path.isfile(path):
            with open(path, "ab"):
                pass
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else str(error)
        raise Failure("FILE_UNWRITABLE", f"{path!r} cannot be written: {why}") from None


def _find(store: Store, run_id: str) -> Run:
    """Find a run by its id, or by a beginning that only one has. Raises Failure."""
    run = None if "\0" in run_id else store.runs.get(run_id)
    if run is not None:
        return run
    known = [run.id for run in store.runs.list(RUNS_KNOWN)]
    begin = [name for name in known if run_id and name.startswith(run_id)]
    if len(begin) == 1:
        run = store.runs.get(begin[0])
    if run is not None:
        return run
    import difflib

    near = begin[:5] or difflib.get_close_matches(run_id, known, n=3)
    message = f"there is no run {run_id!r}" if not begin else f"{len(begin)} runs begin with {run_id!r}"
    hint = f"did you mean {' or '.join(near)}?" if near else "`shotclock report` lists the last runs"
    raise Failure("RUN_NOT_FOUND", message, context={"near": near}, suggestion=hint)


def _describe_run(run: Run) -> dict[str, object]:
    alive = run.ended_at is None and is_alive(run.holder)
    made = report_of(run, {}, now=wall_time(), is_alive=alive)
    return {
        "run_id": run.id,
        "name": run.name,
        "status": made.status.value,
        "started_at": run.created_at.iso(),
        "ended_at": None if run.ended_at is None else run.ended_at.iso(),
        "duration_ms": None if made.status in (Status.INTERRUPTED, Status.PARKED) else made.duration_ms,
        "why": made.why,
    }


def _json(data: dict[str, Any]) -> str:
    import json

    return json.dumps(data, indent=2, ensure_ascii=True) + "\n"
