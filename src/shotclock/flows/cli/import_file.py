"""`shotclock import`: convert a workflow file of Visor to one of ours."""

from __future__ import annotations

import os
import sys
from functools import partial
from typing import Any, cast

from ...calls.call import Outcome
from ...core.envelope import Envelope
from ...core.errors import Ending, Failure
from ...core.visible_text import one_line
from ...terminal.output import say_line, write_quietly
from ...terminal.parser import Option, Subcommand
from ...terminal.subcommand import ChildWork
from ..visor.importing import import_file
from .report import write_file


def _run_import(file: str, output: str | None, force: bool, timeout: int, json_only: bool) -> ChildWork:
    body = partial(_import, file, output, force, json_only)
    return ChildWork("import", body, timeout, output is not None, _show, _print_notes)


def _import(file: str, output: str | None, force: bool, as_json: bool) -> Outcome:
    if output is not None and os.path.exists(output) and os.path.exists(file) and os.path.samefile(file, output):
        raise Failure("ARG_ERROR", "--output is the file that is read", suggestion="name another file with --output")
    made = import_file(file)
    data: dict[str, object] = {"file": file, "notes": made.to_answer(), "failing": list(made.failing)}
    if output is None:
        data["workflow"] = made.text
        return Outcome(Ending.FINISHED, data=data, value=None if as_json else made.text)  # a text is printed as it is
    if os.path.lexists(output) and not force:
        hint = "name another file, or overwrite it with --force"
        raise Failure("FILE_UNWRITABLE", f"{output!r} exists already", suggestion=hint)
    write_file(output, made.text)
    data["output"] = os.path.abspath(output)
    return Outcome(Ending.FINISHED, data=data)


def _print_notes(outcome: Outcome, as_json: bool) -> None:
    if not isinstance(outcome.data, dict) or (as_json and outcome.value is None and "workflow" in outcome.data):
        return
    notes: Any = outcome.data["notes"]
    file = one_line(str(outcome.data["file"]), 200)
    for note in notes:
        what = "fails" if note["fails"] else "left out" if note["lost"] else "different here"
        text = f"{note['key']}: {note['message']}" if note["key"] else note["message"]
        say_line(f"{file}:{note['line']}: {what}: {one_line(text, 400)}")


def _show(envelope: Envelope) -> None:
    if isinstance(envelope.data, dict) and "output" in envelope.data:
        notes: Any = envelope.data["notes"]
        count = len(notes)
        noted = "without notes" if not count else f"with {count} note{'s' * (count > 1)}"
        failing = len(cast("list[str]", envelope.data["failing"]))
        noted += f"; {failing} step{'s' * (failing > 1)} will fail" if failing else ""
        write_quietly(sys.stdout, f"{envelope.data['output']}: written, {noted}\n")


COMMANDS = {
    "import": Subcommand(
        "import",
        options=(
            Option.argument("file", "The file of Visor.", missing="missing FILE: the file of Visor"),
            Option.taking("--output", "FILE", "Write the workflow to this file instead of stdout."),
            Option.flag("--force", "Overwrite the file of --output.", needs="--output"),
            Option.flag(
                "--json", "Print an envelope with the workflow and the notes instead of the workflow.", key="json_only"
            ),
            Option.timeout(),
        ),
        run=_run_import,
        usage="FILE [OPTIONS]",
    )
}
