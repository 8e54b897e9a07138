"""`shotclock report`: a run as text, as a page, or for other programs; and the list of the last runs."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from ...calls.call import Outcome
from ...core.errors import Ending, Failure
from ...dispatch.engines import engine_options
from ...store.store import Store
from ...supervise.unsupervised import open_in_browser
from ...terminal.output import describe_page, is_terminal, say_line
from ...terminal.parser import Option, Subcommand
from ...terminal.subcommand import ChildWork, Mistaken
from ..engines import open_engine
from ..report.report import Report, to_markdown
from ._report_drawing import draw_run, draw_runs

if TYPE_CHECKING:
    from ...dispatch.engines import EngineAddress

PAGE_NAME_LENGTH = 200  # leaves room in a file name for the suffix of an unfinished page
FORMATS = ("json", "markdown", "junit")


def _run_report(
    run_id: str | None,
    html: str | None,
    open: bool,
    output: str,
    output_file: str | None,
    on: EngineAddress | None,
    timeout: int,
) -> ChildWork:
    writes = html is not None or open or output_file is not None
    if run_id is None:
        if writes or output != "json":
            raise Mistaken({"run-id": "missing RUN-ID; `shotclock report` lists the last runs"})
        return ChildWork("report", lambda: _list_runs(on), timeout, draw=draw_runs)

    def body() -> Outcome:
        with open_engine(on) as engine:
            made = asyncio.run(engine.report(run_id))
        data, page = made.to_dict(), html
        if open and page is None:
            with Store.open() as store:
                page = str(store.folder("reports") / f"{quote(made.run_id, safe='')[:PAGE_NAME_LENGTH]}.html")
        if page is not None:
            write_file(page, text_of(made, "html"))
            data["html"] = os.path.abspath(page)
        text = None if output == "json" else text_of(made, output)
        if output_file is not None:
            write_file(output_file, json.dumps(data, indent=2) + "\n" if text is None else text)
            data["output_file"], text = os.path.abspath(output_file), None
        return Outcome(Ending.FINISHED, data=data, value=text)

    def open_page(outcome: Outcome, as_json: bool) -> None:
        _open_page(outcome, says=as_json or output != "json")  # otherwise the drawing names the page

    return ChildWork("report", body, timeout, writes, draw=draw_run, afterwards=open_page if open else None)


def _open_page(outcome: Outcome, *, says: bool) -> None:
    """Open the page in a browser. Done after the work: the browser must outlive the child that does the work."""
    data: Any = outcome.data
    data["opened"] = is_terminal(sys.stderr) and open_in_browser(data["html"], os.environ)
    if says:
        say_line(describe_page(data))


def _list_runs(on: EngineAddress | None) -> Outcome:
    with open_engine(on) as engine:
        runs = [run.as_row() for run in asyncio.run(engine.list_runs(20))]
    return Outcome(Ending.FINISHED, data={"runs": runs})


def text_of(made: Report, output: str) -> str:
    if output == "markdown":
        return to_markdown(made)
    from ..report import html_report, junit  # a run or a check does not wait for XML

    return junit.to_junit(made) if output == "junit" else html_report.to_html(made)


def write_file(path: str, text: str) -> None:
    """Write a file wholly or not at all; a pipe or a device is written directly."""
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
        raise _unwritable(path, error) from None


def ensure_writable(path: str) -> None:
    """Raise Failure before the work where the file cannot be written. Creates the file."""
    try:
        if not os.path.exists(path) or os.path.isfile(path):
            with open(path, "ab"):
                pass
    except (OSError, ValueError) as error:
        raise _unwritable(path, error) from None


def _unwritable(path: str, error: OSError | ValueError) -> Failure:
    why = error.strerror if isinstance(error, OSError) else str(error)
    return Failure("FILE_UNWRITABLE", f"{path!r} cannot be written: {why}")


COMMANDS = {
    "report": Subcommand(
        "report",
        options=(
            Option.argument("run-id", "The run, or the beginning of its id."),
            Option.taking("--html", "FILE", "Write a self-contained page with the timeline to this file."),
            Option.flag("--open", "Open the page in a browser; without a terminal or a browser, name its file."),
            Option.taking(
                "--output",
                "FORMAT",
                "The format to print: json (the envelope; a timeline on a terminal), markdown or junit.",
                choices=FORMATS,
                default="json",
            ),
            Option.taking("--output-file", "FILE", "Write it to this file instead."),
            Option.timeout(),
            *engine_options("Report a run on Temporal: temporal://HOST:PORT[/NAMESPACE]."),
        ),
        run=_run_report,
    )
}
