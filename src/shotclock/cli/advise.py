"""`shotclock advise`: the timeouts of a workflow file beside its past runs; `--write` edits the file."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from ..core.errors import Ending, Failure
from ..core.value_types import replace
from ..runtime.call import Outcome
from ..store.store import Store
from ..workflow.history import RUNS_READ, Advice, History, advise, has_store, name_of, read_history
from ..workflow.lint import lint
from ..workflow.loader import Loaded, judge, load_text, suggest, try_load
from ..workflow.timeout_edit import edit_timeouts
from .config_files import ConfigChange, change_file, read_text, write_change
from .parser import Subcommand, argument, flag, number_between, option
from .subcommand import JSON, ChildWork, show_drawn, timeout_option

MOST_RUNS = 1_000


def _run_advise(
    flow: str, step: list[str], runs: int, write: bool, yes: bool, timeout: int
) -> ChildWork | Callable[[bool], int]:
    if not write:
        return ChildWork("advise", lambda: _show(flow, step, runs), timeout, show=show_drawn)
    return change_file("advise", lambda: _plan_change(flow, step, runs), write_change, yes=yes)


def _show(flow: str, steps: Sequence[str], runs: int) -> Outcome:
    loaded = _load(flow)
    if loaded.workflow is None:
        return judge(loaded, list(loaded.findings))
    return Outcome(Ending.FINISHED, data=_advise(flow, loaded, steps, runs)[1])


def _plan_change(flow: str, steps: Sequence[str], runs: int) -> ConfigChange:
    _load(flow)  # refuses a file that cannot be read
    text = read_text(Path(flow))
    loaded = load_text((text or "").encode(), flow, Path(flow).parent)
    if text is None or loaded.workflow is None:
        message, errors = loaded.format_errors(loaded.findings)
        raise Failure("WORKFLOW_INVALID", message, context={"errors": errors})
    advised, data = _advise(flow, loaded, steps, runs)
    edited = edit_timeouts(text, loaded, advised)
    _refuse_unfit(loaded, load_text(edited.text.encode(), flow, Path(flow).parent))
    written = ["the run" if name is None else name for name in edited.steps]
    return ConfigChange(flow, text, edited.text, "advise", {**data, "written": written}, notes=edited.notes)


def _refuse_unfit(before: Loaded, after: Loaded) -> None:
    """Raise Failure if `check` would refuse the edited file for a reason that it did not have before."""
    known = {(found.rule, found.path) for found in lint(before) if found.is_error}
    wrong = [found for found in lint(after) if found.is_error and (found.rule, found.path) not in known]
    if wrong:
        message, errors = after.format_errors(wrong)
        hint = "write some of the timeouts with --step NAME, or edit the file by hand"
        context = {"errors": errors}
        raise Failure("WORKFLOW_INVALID", f"with these timeouts, {message}", context=context, suggestion=hint)


def _load(flow: str) -> Loaded:
    loaded = try_load(flow)
    if isinstance(loaded, Failure):
        raise loaded
    return loaded


def _advise(flow: str, loaded: Loaded, steps: Sequence[str], runs: int) -> tuple[list[Advice], dict[str, object]]:
    """Return the advice about the run and its steps, or only about the named steps, and the answer with it."""
    workflow = loaded.workflow
    assert workflow is not None
    for name in steps:
        if name not in workflow.steps:
            hint = suggest(name, workflow.steps, otherwise="there are ")
            raise Failure("ARG_ERROR", f"there is no step {name!r} in {flow}", suggestion=hint)
    history, name = History(), name_of(workflow, flow)
    if has_store():
        with Store.open() as store:
            history = read_history(store.runs, name, flow, count=runs)
    advised = [each for each in advise(workflow, history) if not steps or each.step in steps]
    data: dict[str, object] = {
        "file": flow,
        "name": name,
        "runs": len(history.runs),
        "runs_are_all_read": not history.is_cut,
        "timeouts": [each.to_dict() for each in advised],
    }
    return advised, data


COMMANDS = {
    "advise": Subcommand(
        "advise",
        options=(
            argument("flow", "The workflow file.", missing="missing FLOW: the workflow file"),
            option("--step", "NAME", "Advise about this step only.", repeats=True),
            option(
                "--runs",
                "N",
                f"Look at the newest N runs that ended (1 to {MOST_RUNS}).",
                read=number_between(1, MOST_RUNS),
                default=RUNS_READ,
            ),
            flag("--write", "Write the suggested timeouts to the file; the difference is shown first."),
            flag("--yes", "Do not ask before writing.", needs="--write"),
            JSON,
            replace(timeout_option(), excludes=("--write",)),  # a person may take long
        ),
        run=_run_advise,
        epilogue="A run counts for a step if one try took it and ended by itself. A try that its own timeout stopped "
        "counts as at least that long (≥). Waiting for a person, several tries or items and steps that were stopped "
        "from outside do not count. Fewer than 5 runs give no advice, and only 20 advise a shorter timeout.\n\n"
        "Past runs are those in the store of this machine, of the same file and workflow name.",
    )
}
