"""The messages between the client, the workflow and the activities, in plain JSON.

Instants are milliseconds of the engine's clock. A worker knows that clock by the start of its activity.

Runs are found in Temporal by search attributes, if the namespace has them. Setting an unregistered one fails the run,
so the client looks first. A namespace gets them once:

    for name in ShotclockRun ShotclockStatus ShotclockClock ShotclockEnding; do
      temporal operator search-attribute create --namespace default --name $name --type Keyword
    done
    temporal operator search-attribute create --namespace default --name ShotclockStep --type KeywordList
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any, NotRequired, TypedDict

from temporalio.common import SearchAttributeKey, SearchAttributePair, TypedSearchAttributes

from ..core.limits import LATEST_MS, WallTime
from ..core.proposal import Proposal
from ..core.value_types import JsonObject
from ..flows.check.plan import items_come_from
from ..flows.file.schema import WorkflowFile, texts_in
from ..flows.file.templates import mentions, uses_mapping
from ..flows.run.state import StepState
from ..flows.steps.provider import ForeignProposal, StepPart
from ..store.proposals import read_exported
from ..store.store import Store
from ..supervise.clock import wall_time

RUN_WORKFLOW = "shotclock-run"
STEP_ACTIVITY = "shotclock-step"
OUTPUTS_ACTIVITY = "shotclock-outputs"
ORDER_ACTIVITY = "shotclock-order"
DEFAULT_QUEUE = "shotclock"
# How long a worker may be silent before another one takes its step. Longer than a restart of the engine takes.
DEFAULT_HEARTBEAT_MS = 10_000
VERSION = 2  # The version of these messages. A worker leaves runs and steps of other versions to other workers.
FOREIGN_PAUSE_MS = 30_000  # a proposal in the inbox of another server is asked about again after this
_INSTANTS = ("created_at", "expires_at", "reminded_at", "decided_at", "used_at")


class RunInput(TypedDict):
    version: int
    run_id: str
    name: str
    file: str
    folder: str
    files: list[str]  # the real paths of the nested files, from the outermost to this one
    workflow: JsonObject
    inputs: JsonObject
    trace_id: str
    limit_ms: int
    caller_ms: int | None  # The time that the caller has left. No extension may exceed it.
    deadline_at: int | None  # the deadline of the run around a nested one
    deadline_owner: str
    latest_at: int | None
    """For a nested run: the end of its step's own time. The rest of `deadline_at` belongs to the run around it."""
    heartbeat_ms: int
    queue: str
    env: dict[str, str]  # the variables that the step around a nested run has set
    attributes: list[str]


class StepInput(TypedDict):
    version: int
    run: JsonObject  # run_id, name, file, folder, files, trace_id, inputs, env, queue, began_at, limit_ms, deadline_at
    workflow: JsonObject
    step: str
    state: JsonObject
    visible: dict[str, JsonObject]
    kept_ms: int
    clean_up_by: int | None  # the end of clean-up, for a clean-up step of a stopped run
    is_clean_up: bool
    last: NotRequired[JsonObject]
    """In a run with `finally` steps: `reserve_ms`; for such a step also `by`, its deadline, and `run`, so far."""
    heartbeat_ms: int
    sent_at: int  # The time of the request. An attempt that continues on another worker has used the time since then.
    proposals: list[JsonObject]
    nested: dict[str, JsonObject]
    may_park: bool
    """Whether the worker returns the step while it waits for people. Not if the run's time is nearly over."""


class OrderInput(TypedDict):
    run_id: str
    step: str | None
    who: str
    by_ms: int | None
    within_ms: int | None
    reason: str
    deadline_at: NotRequired[int]  # for the worker of a step: the new deadline of the run


class StepReply(TypedDict, total=False):
    state: JsonObject
    is_cancelled: bool
    lost: dict[
        str, int
    ]  # The worker was shut down or cut off, and has stopped the step: its attempt, and when that began.
    is_unbegun: bool  # With `lost`: the worker has not begun the step, which is sent again.
    is_parked: bool  # The step waits for people or nested runs. The workflow waits for them, then sends the step again.
    proposals: list[JsonObject]
    nested: list[RunInput]
    printed: JsonObject  # the end of what the step has printed: see step_tails.py


def slice_workflow(workflow: WorkflowFile, written: Mapping[str, Any], name: str) -> JsonObject:
    """Return the part of a file that one step needs. With the whole file, history would hold it once per step."""
    step = workflow.steps[name]
    kept = {key: value for key, value in written.items() if key in ("version", "env", "defaults", "max_parallelism")}
    names = [name, *items_come_from(workflow, step)]
    kept["steps"] = {each: written["steps"][each] for each in names}
    if step.type in ("tool", "ai") and "tools" in written:
        kept["tools"] = written["tools"]
    return kept


def select_visible(
    workflow: WorkflowFile, step: StepPart | None, part: Mapping[str, Any], states: Mapping[str, StepState]
) -> dict[str, JsonObject]:
    """Return the states that the templates of a step or of the run's outputs name; all if they use the mapping."""
    text = " ".join(text for _, text in texts_in(part))
    # The prompt of a model may be in a file.
    is_whole = any(uses_mapping(kind, text, states) for kind in ("outputs", "steps"))
    if is_whole or (step is not None and step.type == "ai"):
        names = list(states)
    else:
        sources = [] if step is None else items_come_from(workflow, step)
        found = dict.fromkeys([*(mention.name for mention in mentions(text)), *sources])
        names = [name for name in found if name in states]
    shown = ("id", "type", "status", "error", "exit_code", "attempts", "partial", "output")
    records = {name: states[name].to_record() for name in names}
    return {name: {key: record[key] for key in shown if key in record} for name, record in records.items()}


# The workflow keeps the proposals of a step while no worker has it, on the engine's clock.


def pack_proposals(
    step: str, waiting: Iterable[Proposal | ForeignProposal], store: Store, ahead_ms: int
) -> list[JsonObject]:
    """Return the proposals of a step for its workflow, on the engine's clock, which is ahead by `ahead_ms`."""
    packed: list[JsonObject] = []
    for proposal in waiting:
        record = None if isinstance(proposal, ForeignProposal) else store.proposals.export(proposal.id)
        if record is None:
            again_at = wall_time().ms + ahead_ms + FOREIGN_PAUSE_MS
            packed.append({"id": proposal.id, "step": step, "status": "pending", "expires_at": again_at})
        else:
            packed.append(pack_record(step, _shift(record, ahead_ms)))
    return packed


def pack_record(step: str, record: Mapping[str, Any]) -> JsonObject:
    about = {key: record[key] for key in ("id", "status", "expires_at")}
    return {**about, "step": step, "record": dict(record)}


def follow_run(packed: JsonObject, end_ms: int) -> JsonObject:
    """Return a packed proposal that stays open until the later end of its run, if its own time allows it."""
    if "record" not in packed:
        return packed
    proposal = read_exported(packed["record"])
    end = max(proposal.expires_at, proposal.expires_by(WallTime(end_ms)))
    return pack_record(packed["step"], {**packed["record"], "expires_at": end.ms})


def unpack_proposals(packed: Iterable[Mapping[str, Any]], store: Store, ahead_ms: int = 0) -> None:
    for each in packed:
        if "record" in each:
            record = {**each["record"], "status": each["status"]}
            store.proposals.take_over(_shift(record, -ahead_ms), wall_time())


def _shift(record: Mapping[str, Any], by_ms: int) -> JsonObject:
    moved = {
        name: WallTime(record[name] + by_ms).ms
        for name in _INSTANTS
        if record.get(name) is not None and record[name] < LATEST_MS - abs(by_ms)
    }
    return {**record, **moved}


RUN = SearchAttributeKey.for_keyword("ShotclockRun")
STATUS = SearchAttributeKey.for_keyword("ShotclockStatus")
STEP = SearchAttributeKey.for_keyword_list("ShotclockStep")
CLOCK = SearchAttributeKey.for_keyword("ShotclockClock")
ENDING = SearchAttributeKey.for_keyword("ShotclockEnding")
KEYS: tuple[SearchAttributeKey[Any], ...] = (RUN, STATUS, STEP, CLOCK, ENDING)
TYPES = {key.name: "KeywordList" if key is STEP else "Keyword" for key in KEYS}
WAITING = "waiting"
# Of one value, and of the steps: the engine's index has limits of its own.
MOST_LETTERS = 200
MOST_STEPS = 20


def describe_beginning(name: str, registered: Collection[str]) -> TypedSearchAttributes:
    values: dict[SearchAttributeKey[Any], str] = {RUN: name[:MOST_LETTERS], STATUS: "running"}
    return TypedSearchAttributes(
        [SearchAttributePair(key, value) for key, value in values.items() if key.name in registered]
    )


def describe_progress(steps: Iterable[str], *, is_waiting: bool) -> dict[SearchAttributeKey[Any], Any]:
    return {STATUS: WAITING if is_waiting else "running", STEP: [name[:MOST_LETTERS] for name in steps][:MOST_STEPS]}


def describe_end(
    envelope: Mapping[str, Any], errors: Iterable[Mapping[str, Any] | None]
) -> dict[SearchAttributeKey[Any], Any]:
    """Return the attributes of an ended run: its code, and the limit that ended it or the first of its steps."""
    own: Mapping[str, Any] | None = envelope["error"]
    clocks = [error["context"]["clock"] for error in (own, *errors) if error and "clock" in error.get("context", {})]
    values: dict[SearchAttributeKey[Any], Any] = {
        STATUS: "succeeded" if own is None else "failed",
        STEP: [],
        ENDING: "OK" if own is None else own["code"],
    }
    if clocks:
        values[CLOCK] = f"{clocks[0]['kind']} of {clocks[0]['owner']}"[:MOST_LETTERS]
    return values
