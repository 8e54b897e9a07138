"""What travels between the client, the workflow and the activities. Plain JSON, and pure: the workflow imports it.

Instants are milliseconds of the engine's clock: the workflow's time and the start of an activity are both read on it,
so no worker's own clock is ever compared with it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NotRequired, TypedDict

from ..providers.provider import StepPart
from ..workflow.plan import items_come_from
from ..workflow.schema import WorkflowFile
from ..workflow.state import StepState
from ..workflow.templates import texts_in

RUN_WORKFLOW = "shotclock-run"
STEP_ACTIVITY = "shotclock-step"
OUTPUTS_ACTIVITY = "shotclock-outputs"
ORDER_ACTIVITY = "shotclock-order"
DEFAULT_QUEUE = "shotclock"
# How long a worker may be silent before its step is somebody else's. Longer than a restart of the engine takes.
DEFAULT_HEARTBEAT_MS = 10_000
# Of what is sent to a workflow or an activity. A worker leaves those of a later version to other workers.
VERSION = 1


class RunInput(TypedDict):
    """A run, as its workflow is started with it."""

    version: int
    run_id: str
    name: str
    file: str
    folder: str
    files: list[str]
    """The real paths of the files that run each other, down to this one."""
    workflow: dict[str, Any]
    inputs: dict[str, Any]
    trace_id: str
    limit_ms: int
    """Of the whole run; 0 is none."""
    deadline_at: int | None
    """That of whoever started it, if it has one."""
    deadline_owner: str
    heartbeat_ms: int
    queue: str
    env: dict[str, str]
    """Variables of its own, which the step that it is a run of has set."""
    attributes: NotRequired[list[str]]
    """The search attributes that it may set. Runs of before there were any have none."""
    is_extendable: NotRequired[bool]
    """Whether it may be given more time: its steps have a backstop that leaves room for it. Not in runs of before."""
    counts_from_acceptance: NotRequired[bool]
    """Whether its deadline counts from the moment at which the engine accepted it. Not in runs of before: theirs counts
    from their first task."""
    caller_ms: NotRequired[int]
    """What whoever started it had left then, which no extension may pass."""
    latest_at: NotRequired[int]
    """Of a run inside another: the end of its step's own time. The rest of `deadline_at` is that of the run around."""


class StepInput(TypedDict):
    """One step, as an activity carries it out."""

    version: int
    run: dict[str, Any]
    """Its run: run_id, name, file, folder, files, trace_id, inputs, env, queue, began_at, limit_ms, deadline_at."""
    workflow: dict[str, Any]
    """The part of the file that the step needs."""
    step: str
    state: dict[str, Any]
    visible: dict[str, dict[str, Any]]
    """The states of the steps that its templates name."""
    kept_ms: int
    """How much earlier than the run's own its deadline is."""
    clean_up_by: int | None
    """The end of clean-up, where it is a part of that and the run was stopped."""
    is_clean_up: bool
    heartbeat_ms: int
    sent_at: NotRequired[int]
    """When the run has asked for it: the time of a try that goes on elsewhere has not stood still since then."""
    proposals: list[dict[str, Any]]
    """What people have been asked for it."""
    nested: dict[str, dict[str, Any]]
    """The envelopes of the runs inside it that have ended, by their ids."""
    may_park: bool
    """Whether it is given back while it waits for people. Not where the run's time is over before they could answer."""


class Order(TypedDict):
    """What somebody wants of a run that is under way: more time for a step, or that it or a step winds down."""

    run_id: str
    step: str | None
    who: str
    by_ms: int | None
    """How much more time; None is for winding down."""
    within_ms: int | None
    reason: str
    deadline_at: NotRequired[int]
    """To the worker of a step: the run has until then, now."""


class StepReply(TypedDict, total=False):
    """What became of a step."""

    state: dict[str, Any]
    is_cancelled: bool
    lost: dict[str, int]
    """Its worker was shut down while it ran: the try that it was in, and when that began."""
    is_unbegun: bool
    """It came late to a worker that could not learn whether it may still begin it: somebody else may, as if new."""
    is_parked: bool
    """It waits for people or for runs inside it: the workflow does, and then it goes on in another activity."""
    proposals: list[dict[str, Any]]
    nested: list[RunInput]


def slice_workflow(workflow: WorkflowFile, written: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return the part of a file that one step needs: history would hold the whole file once for every step."""
    step = workflow.steps[name]
    kept = {key: value for key, value in written.items() if key in ("version", "env", "defaults", "max_parallelism")}
    names = [name, *items_come_from(workflow, step)]
    kept["steps"] = {each: written["steps"][each] for each in names}
    if step.type in ("tool", "ai") and "tools" in written:
        kept["tools"] = written["tools"]
    return kept


def select_visible(
    workflow: WorkflowFile, step: StepPart, part: Mapping[str, Any], states: Mapping[str, StepState]
) -> dict[str, dict[str, Any]]:
    """Return what a step's templates can see of other steps: those that it names, or all where it names none."""
    text = " ".join(texts_in(part))
    names: list[str]
    if step.type == "ai" or re.search(r"\b(?:outputs|steps)\b(?!\.|\[['\"])", text):  # a prompt may be in a file
        names = list(states)
    else:
        found = [dotted or quoted for dotted, quoted in _NAMED.findall(text)]
        names = [name for name in dict.fromkeys([*found, *items_come_from(workflow, step)]) if name in states]
    shown = ("id", "type", "status", "error", "exit_code", "attempts", "partial", "output")
    records = {name: states[name].to_record() for name in names}
    return {name: {key: record[key] for key in shown if key in record} for name, record in records.items()}


_NAMED = re.compile(r"""\b(?:outputs|steps)(?:\.([\w-]+)|\[['"]([^'"]+))""")
