"""`shotclock report`: what became of a run, to read, to look at, or for other programs."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from ..core.errors import Ending, Failure
from ..runtime.call import Outcome
from ..runtime.outcomes import failure_outcome
from ..store.store import Store
from ..workflow.report import Report
from .engine import open_engine
from .output import is_terminal, say_line

if TYPE_CHECKING:
    from ..temporal.connection import Address

# Runs in a list.
RUNS_LISTED = 20
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
        with open_engine(on) as engine:
            made = asyncio.run(engine.report(run_id))
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
        with open_engine(on) as engine:
            runs = [run.as_row() for run in asyncio.run(engine.list_runs(RUNS_LISTED))]
    except Failure as failure:
        return failure_outcome(failure)
    return Outcome(Ending.FINISHED, data={"runs": runs})


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


def _json(data: dict[str, Any]) -> str:
    import json

    return json.dumps(data, indent=2, ensure_ascii=True) + "\n"
