"""The request of `shotclock run --rerun-failed`: what the new run keeps of the old one, shown before it begins."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from ...core.value_types import JsonObject, replace
from ...core.visible_text import one_line
from ...store.runs import StoredRun
from ...store.store import Store
from ...terminal.output import say_line
from ..file.schema import check_inputs
from ..run.rerun import describe, plan_rerun
from ..run.runs import RunRequest

LINE_SHOWN = 200


def read_inputs(old: StoredRun, given: Mapping[str, str], request: RunRequest) -> JsonObject:
    """Return the inputs of the old run, as far as the file still has them, with those that are given anew."""
    declared = request.workflow.inputs
    kept = {name: value for name, value in old.inputs.items() if name in declared and value is not None}
    return check_inputs(request.workflow, {**kept, **given})


def continue_run(
    store: Store,
    old: StoredRun,
    request: RunRequest,
    given: Mapping[str, str],
    start_from: tuple[str, ...],
    *,
    shows: bool,
) -> RunRequest:
    """Return the request of the run that continues an ended one, after the differences were shown."""
    inputs = read_inputs(old, given, request)
    rerun = plan_rerun(old, store, request.workflow, inputs, start_from)
    for line in describe(rerun.shown) if shows else ():
        say_line(one_line(line, LINE_SHOWN) if not line.startswith(" ") else f"  {one_line(line[2:], LINE_SHOWN)}")
    inputs = {name: each for name, each in inputs.items() if each is not None}
    return replace(request, workflow=rerun.workflow, inputs=inputs, recorded=rerun.recorded, rerun=rerun.shown)


def file_of(old: StoredRun) -> str:
    """Return the path of the old run's file, relative to this folder where that is shorter."""
    path = Path(old.file)
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else old.file
