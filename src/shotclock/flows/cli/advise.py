"""`shotclock advise`: the timeouts of a workflow file beside its past runs."""

from __future__ import annotations

from collections.abc import Sequence

from ...calls.call import Outcome
from ...core.errors import Ending, Failure
from ...store.store import Store
from ...terminal.parser import Option, Subcommand
from ...terminal.subcommand import ChildWork
from ..file.loader import Loaded, judge, suggest, try_load
from ..report.history import RUNS_READ, History, advise, has_store, name_of, read_history
from ._check_drawing import draw_advice

MOST_RUNS = 1_000


def _run_advise(flow: str, step: list[str], runs: int, timeout: int) -> ChildWork:
    return ChildWork("advise", lambda: _show(flow, step, runs), timeout, draw=draw_advice)


def _show(flow: str, steps: Sequence[str], runs: int) -> Outcome:
    loaded = try_load(flow)
    if isinstance(loaded, Failure):
        raise loaded
    if loaded.workflow is None:
        return judge(loaded, list(loaded.findings))
    return Outcome(Ending.FINISHED, data=_advise(flow, loaded, steps, runs))


def _advise(flow: str, loaded: Loaded, steps: Sequence[str], runs: int) -> dict[str, object]:
    """Return the advice about the run and its steps, or only about the named steps."""
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
    return {
        "file": flow,
        "name": name,
        "runs": len(history.runs),
        "runs_are_all_read": not history.is_cut,
        "timeouts": [each.to_dict() for each in advised],
    }


COMMANDS = {
    "advise": Subcommand(
        "advise",
        options=(
            Option.argument("flow", "The workflow file.", missing="missing FLOW: the workflow file"),
            Option.taking("--step", "NAME", "Advise about this step only.", repeats=True),
            Option.number(
                "--runs", f"Look at the newest N runs that ended (1 to {MOST_RUNS}).", 1, MOST_RUNS, default=RUNS_READ
            ),
            Option.timeout(),
        ),
        run=_run_advise,
        epilogue="A run counts for a step if one attempt took it and ended by itself. An attempt that its own timeout "
        "stopped counts as at least that long (≥). Waiting for a person, several attempts or items and steps that were "
        "stopped from outside do not count. Fewer than 5 runs give no advice, and only 20 advise a shorter timeout.\n\n"
        "Past runs are those in the store of this machine, of the same file and workflow name.",
    )
}
