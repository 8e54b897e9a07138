"""The plan of a workflow: the order of its steps, the clocks of each after nesting, and the longest way
through it.

Worst cases throughout: every step uses all of its time and all of its tries. Not counted are the grace of those
that are stopped, waiting for one of `max_parallelism` places, and how many items a `for_each` has.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterable, Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from operator import attrgetter

from ..core.clocks import (
    DEFAULT_GRACE_MS,
    DEFAULT_RESERVE_MS,
    DEFAULT_WIND_DOWN_MS,
    RESERVE_SHARE,
    reserve_ms_for,
)
from ..core.errors import Failure
from ..core.overtime import OvertimeError, OvertimePolicy
from ..core.value_types import value
from ..providers.command import ToolStep
from ..providers.provider import STEP_TYPES, Retry, StepPart, StepRetry, duration_ms
from .schema import WorkflowFile
from .templates import mentions, texts_in

Groups = tuple[tuple[str, ...], ...]
"""What a step waits for: something of every group. `["A", "B|C"]` is A, and B or C."""


def groups_of(written: Iterable[str]) -> Groups:
    return tuple(tuple(name.strip() for name in entry.split("|") if name.strip()) for entry in written)


def needs(groups: Groups) -> set[str]:
    return {name for group in groups for name in group}


def find_cycle(graph: Mapping[str, Groups]) -> list[str] | None:
    """Return one cycle, as a path that ends where it began; None where there is none. Unknown names are not looked
    at."""
    try:
        _sorter(graph).prepare()
    except CycleError as error:
        return list(reversed(error.args[1]))
    return None


def order_of(graph: Mapping[str, Groups]) -> list[str]:
    """Return every step after everything it names, otherwise as written. Steps on or behind a cycle are left out."""
    sorter = _sorter(graph)
    order: list[str] = []
    with contextlib.suppress(CycleError):  # the steps before a cycle come all the same
        sorter.prepare()
    while ready := sorter.get_ready():
        order += ready
        sorter.done(*ready)
    return order


def _sorter(graph: Mapping[str, Groups]) -> TopologicalSorter[str]:
    sorter: TopologicalSorter[str] = TopologicalSorter(dict.fromkeys(graph, ()))
    for name, groups in graph.items():
        sorter.add(name, *sorted(other for other in needs(groups) if other in graph))
    return sorter


def behind_all(graph: Mapping[str, Groups], names: Iterable[str]) -> set[str]:
    """Return what can never start if none of these does: whoever waits for a group that lies wholly among them."""
    lost: set[str] = set()
    behind: dict[str, list[tuple[str, int]]] = {}
    left: dict[tuple[str, int], int] = {}
    for name, groups in graph.items():
        for number, group in enumerate(groups):
            alternatives = set(group)
            left[name, number] = len(alternatives)
            for other in alternatives:
                behind.setdefault(other, []).append((name, number))
    fallen = list(names)
    while fallen:
        name = fallen.pop()
        if name in lost:
            continue
        lost.add(name)
        for follower in behind.get(name, ()):
            left[follower] -= 1
            if not left[follower]:
                fallen.append(follower[0])
    return lost


# --- which step comes before which, for many pairs at once --------------------------------------------------
# Going back from every step that asks would take time with the square of a long workflow. So everybody is visited once,
# each after those before it, and what is known about those is handed on: one bit for each step that is asked about.


# So many are asked about in one go. All at once would take a megabyte for every few steps of the largest file there is.
AT_ONCE = 4096

Before = Mapping[str, Collection[str]]
"""By step, those right before it. There may be circles: a step can be gone back to."""


def not_before(before: Before, pairs: Iterable[tuple[str, str]]) -> set[tuple[str, str]]:
    """Return those of the pairs (earlier, later) where there is no way from the second back to the first."""
    askers: dict[str, list[str]] = {}
    for earlier, later in pairs:
        if earlier not in before.get(later, ()):
            askers.setdefault(earlier, []).append(later)
    if not askers:
        return set()
    knots, names = list(_knots(before)), list(askers)
    missing: set[tuple[str, str]] = set()
    for start in range(0, len(names), AT_ONCE):
        bits = {name: 1 << number for number, name in enumerate(names[start : start + AT_ONCE])}
        above: dict[str, int] = {}
        for knot in knots:
            # Of its own members none is in `above` yet, and each is right before another one.
            others = {other for name in knot for other in before[name]}
            known = 0
            for other in others:
                known |= above.get(other, 0) | bits.get(other, 0)
            above.update(dict.fromkeys(knot, known))
        missing |= {(name, later) for name, bit in bits.items() for later in askers[name] if not above[later] & bit}
    return missing


def _knots(before: Before) -> Iterator[list[str]]:
    """Yield every step once, after all those before it; steps that are before each other together."""
    number: dict[str, int] = {}
    done: set[str] = set()
    trail: list[str] = []
    # On the trail, the first of each knot as far as is known (Gabow's algorithm, without recursion).
    firsts: list[str] = []
    for start in before:
        work = [] if start in number else [(start, iter(before[start]))]
        while work:
            name, left = work[-1]
            if name not in number:
                number[name] = len(number)
                trail.append(name)
                firsts.append(name)
            for other in left:
                if other not in number and other in before:
                    work.append((other, iter(before[other])))
                    break
                if other in number and other not in done:
                    while number[firsts[-1]] > number[other]:
                        firsts.pop()
            else:
                work.pop()
                if firsts[-1] == name:
                    firsts.pop()
                    at = number[name]
                    knot = []
                    while trail and number[trail[-1]] >= at:
                        knot.append(trail.pop())
                    done.update(knot)
                    yield knot


@value
class PlannedStep:
    """A step and its clocks, in milliseconds; None is no limit of its own."""

    id: str
    type: str
    groups: Groups
    timeout_ms: int | None
    """As written, or what holds for its kind."""
    is_written: bool
    """Whether the file says it, rather than the kind."""
    effective_ms: int | None
    """What is left of it inside the run."""
    grace_ms: int
    attempts: int
    delays_ms: int
    """All the pauses between its tries together."""
    starts_ms: int | None
    """The latest it starts if nothing cuts it short, everything before it taking all its time. None: no telling."""
    ends_ms: int | None
    is_per_item: bool
    soft_ms: int | None = None
    """When it is asked to wind down, or somebody is asked about its overtime."""
    wind_down_ms: int = DEFAULT_WIND_DOWN_MS
    overtime: OvertimePolicy | None = None
    longest_ms: int | None = None
    """What one try can take, with the overtime that moves its timeout."""

    @property
    def worst_ms(self) -> int | None:
        """Return how long all of its tries and pauses can take; None is no limit."""
        return None if not self.longest_ms else self.attempts * self.longest_ms + self.delays_ms


@value
class Plan:
    run_timeout_ms: int | None
    steps: tuple[PlannedStep, ...]
    """In an order in which they could start."""
    critical_path: tuple[str, ...]
    worst_ms: int | None
    """How long the longest way takes; None if a step on it has no limit."""
    clean_up_ms: int = 0
    """What of the run's time is kept for clean-up."""

    def step(self, step_id: str) -> PlannedStep:
        return next(step for step in self.steps if step.id == step_id)


def graph_of(workflow: WorkflowFile) -> dict[str, Groups]:
    return {step_id: groups_of(step.depends_on) for step_id, step in workflow.steps.items()}


def on_demand(workflow: WorkflowFile) -> set[str]:
    """Return the steps that only others call for: named by some `run`, and nobody waits for them."""
    waited_for = {name for groups in graph_of(workflow).values() for name in needs(groups)}
    reactions = [reaction for step in workflow.steps.values() for reaction in (step.on_fail, step.on_success)]
    named = {name for reaction in (*reactions, workflow.defaults.on_fail) if reaction for name in reaction.run}
    return {name for name in named if name not in waited_for}


def select_tagged(workflow: WorkflowFile, tags: Collection[str]) -> WorkflowFile:
    """Return the workflow with the steps that have one of the tags, and all that these need: their dependencies, the
    steps that their templates name, and those that their reactions start. Raises Failure for an unknown tag."""
    known = sorted({tag for step in workflow.steps.values() for tag in step.tags})
    if unknown := [tag for tag in tags if tag not in known]:
        message = f"no step has the tag {unknown[0]!r}; the tags of this file: {', '.join(known) or 'none'}"
        raise Failure("ARG_ERROR", message, context={"errors": [{"field": "tags", "message": message}]})
    left = [name for name, step in workflow.steps.items() if not set(tags).isdisjoint(step.tags)]
    chosen: set[str] = set()
    while left:
        name = left.pop()
        if name in chosen or name not in workflow.steps:
            continue
        chosen.add(name)
        step = workflow.steps[name]
        left += needs(groups_of(step.depends_on))
        left += [each.name for text in texts_in(step.model_dump()) for each in mentions(text)]
        for reaction in (step.on_fail or workflow.defaults.on_fail, step.on_success):
            left += [] if reaction is None else [*reaction.run, *([reaction.goto] if reaction.goto else [])]
    return keep_steps(workflow, chosen)


def keep_steps(workflow: WorkflowFile, names: Collection[str]) -> WorkflowFile:
    """Return the workflow with these steps alone, and without the outputs that are made of others."""
    written = workflow.model_dump(exclude_unset=True)
    gone = workflow.steps.keys() - names
    if not gone:
        return workflow
    written["steps"] = {name: step for name, step in written["steps"].items() if name in names}
    if workflow.outputs:
        written["outputs"] = {
            name: template
            for name, template in written["outputs"].items()
            if gone.isdisjoint(each.name for each in mentions(template))
        }
    return WorkflowFile.model_validate(written)


def run_timeout_ms(workflow: WorkflowFile) -> int | None:
    """Return the limit of the whole run, where a bare number is seconds; None is no limit."""
    return None if workflow.timeout is None else duration_ms(workflow.timeout, "s") or None


def timeout_key(step: StepPart) -> str:
    """Return where the file says it: where both are there, the key of the step's type counts."""
    own = STEP_TYPES[step.type].timeout_key
    return own if attrgetter(own)(step) is not None or step.timeout is None else "timeout"


def written_timeout(step: StepPart) -> object:
    return attrgetter(timeout_key(step))(step)


def step_timeout_ms(workflow: WorkflowFile, step: StepPart) -> int | None:
    """Return the timeout of one try: 0 is none, None is as long as the run."""
    kind, written = STEP_TYPES[step.type], written_timeout(step)
    if written is None and isinstance(step, ToolStep) and step.tool in workflow.tools:
        written = workflow.tools[step.tool].timeout
    if written is None and workflow.defaults.timeout is not None and kind.default_ms is not None:
        written = workflow.defaults.timeout
    return kind.timeout_ms(written, step)


def overtime_of(workflow: WorkflowFile, step: StepPart) -> OvertimePolicy | None:
    """Return the overtime that a try of a step may have; None is none."""
    written = step.overtime if step.overtime is not None else workflow.defaults.overtime
    return None if not written else OvertimePolicy.of(written, step_timeout_ms(workflow, step) or 0, bare="s")


def step_clock_ms(workflow: WorkflowFile, step: StepPart, name: str) -> int | None:
    """Return a clock of a step other than its timeout: its own, or the one of the defaults; None is none."""
    own, default = getattr(step, name), getattr(workflow.defaults, name)
    if own is not None:
        return duration_ms(own, STEP_TYPES[step.type].unit)
    return None if default is None else duration_ms(default, "s")


def grace_ms(workflow: WorkflowFile, step: StepPart) -> int:
    """Return the time from the polite stop to the kill; 0 is none."""
    if step.grace is not None:
        return duration_ms(step.grace, STEP_TYPES[step.type].unit)
    written = workflow.defaults.grace
    return DEFAULT_GRACE_MS if written is None else duration_ms(written, "s")


# What a run keeps back for clean-up: what it declares, up to this share of the run, and this one where it says nothing.
CLEAN_UP_SHARE = 2
UNDECLARED_SHARE = 10


def clean_up_steps(workflow: WorkflowFile) -> frozenset[str]:
    """Return the steps that some `on_fail` runs."""
    reactions = [step.on_fail for step in workflow.steps.values()] + [workflow.defaults.on_fail]
    return frozenset(name for reaction in reactions if reaction is not None for name in reaction.run)


def clean_up_wants_ms(step: StepPart, own_ms: int | None) -> int | None:
    """Return what has to be kept for a clean-up step to have all its time, with the reserve of what is inside; None
    where the file does not say."""
    if written_timeout(step) is None or not own_ms:
        return None
    return own_ms + min(DEFAULT_RESERVE_MS, own_ms // (RESERVE_SHARE - 1) + 1)


def kept_for_clean_up_ms(workflow: WorkflowFile, run_ms: int) -> int:
    """Return how much earlier than the run's own deadline that of every step ends, but for those of clean-up."""
    kept = 0
    for name in clean_up_steps(workflow) & workflow.steps.keys():
        wants = clean_up_wants_ms(workflow.steps[name], step_timeout_ms(workflow, workflow.steps[name]))
        kept = max(kept, run_ms // UNDECLARED_SHARE if wants is None else min(wants, run_ms // CLEAN_UP_SHARE))
    return kept


def retry_of(workflow: WorkflowFile, step: StepPart) -> StepRetry | None:
    reaction = step.on_fail or workflow.defaults.on_fail
    return None if reaction is None else reaction.retry


def may_run_again(workflow: WorkflowFile, step: StepPart) -> bool:
    """Return whether a step that was cut off may run again: it is idempotent, or its `retry` covers being cut off."""
    retry = retry_of(workflow, step)
    return step.idempotent or (retry is not None and (not retry.on or "INTERRUPTED" in retry.on))


def most_tries(workflow: WorkflowFile, step: StepPart) -> int:
    """Return how often a step is tried at most."""
    retry = retry_of(workflow, step)
    return 1 if retry is None else 1 + retry.max


def delay_ms(retry: Retry, number: int) -> int:
    """Return the pause before try `number` + 1, without jitter, which only shortens it."""
    backoff = retry.backoff
    delay = backoff.delay_ms
    if backoff.mode == "linear":
        delay *= number
    elif backoff.mode == "exponential":
        delay *= 2 ** min(number - 1, 60)
    return delay if backoff.max_delay_ms is None else min(delay, backoff.max_delay_ms)


def items_come_from(workflow: WorkflowFile, step: StepPart) -> list[str]:
    """Return the steps with `for_each: true` that this step waits for: it is done for every item of their output,
    unless it says for itself what it is done for."""
    if step.for_each is not None and step.for_each is not True:
        return []
    named = dict.fromkeys(name for group in groups_of(step.depends_on) for name in group)
    return [name for name in named if name in workflow.steps and workflow.steps[name].for_each is True]


def is_per_item(workflow: WorkflowFile, step: StepPart) -> bool:
    return isinstance(step.for_each, str | list) or bool(items_come_from(workflow, step))


def plan_of(workflow: WorkflowFile, *, timeout_ms: int | None = None) -> Plan:
    """Return the plan of a workflow. `timeout_ms` is the caller's limit on the run, where it is
    shorter."""
    limits = [limit for limit in (run_timeout_ms(workflow), timeout_ms) if limit]
    run_ms = min(limits) if limits else None
    kept_ms = 0 if run_ms is None else kept_for_clean_up_ms(workflow, run_ms)
    clean_up = clean_up_steps(workflow)
    graph = graph_of(workflow)
    planned: dict[str, PlannedStep] = {}
    through: dict[str, str | None] = {}
    # Steps on or behind a circle come last, so that `check` sees their clocks too.
    for step_id in dict.fromkeys([*order_of(graph), *graph]):
        step = workflow.steps[step_id]
        own_ms = step_timeout_ms(workflow, step)
        retry = retry_of(workflow, step)
        attempts = most_tries(workflow, step)
        delays = 0 if retry is None else sum(delay_ms(retry, number) for number in range(1, attempts))
        before = [planned[name] for name in needs(graph[step_id]) if name in planned]
        starts = _latest([other.ends_ms for other in before])
        through[step_id] = max(before, key=_by_end).id if before else None
        has_ms = None if run_ms is None else run_ms if step_id in clean_up else run_ms - kept_ms
        inside_ms = None if has_ms is None else has_ms - reserve_ms_for(has_ms)
        soft, wind_down = step_clock_ms(workflow, step, "soft"), step_clock_ms(workflow, step, "wind_down")
        policy = _readable_overtime(workflow, step)
        longest = own_ms and own_ms + (policy.budget_ms if policy is not None and policy.hard_extends else 0)
        ends = None if starts is None or not longest else starts + attempts * longest + delays
        planned[step_id] = PlannedStep(
            step_id,
            step.type,
            graph[step_id],
            own_ms,
            written_timeout(step) is not None,
            inside_ms if not own_ms else own_ms if inside_ms is None else min(own_ms, inside_ms),
            grace_ms(workflow, step),
            attempts,
            delays,
            starts,
            ends,
            is_per_item(workflow, step),
            soft,
            DEFAULT_WIND_DOWN_MS if wind_down is None else wind_down,
            policy,
            longest,
        )
    last = max(planned.values(), key=_by_end) if planned else None
    path = [] if last is None else [last.id]
    while path and (before_it := through[path[-1]]) is not None:
        path.append(before_it)
    worst_ms = 0 if last is None else last.ends_ms
    return Plan(run_ms, tuple(planned.values()), tuple(reversed(path)), worst_ms, kept_ms)


def _readable_overtime(workflow: WorkflowFile, step: StepPart) -> OvertimePolicy | None:
    """Return the overtime of a step; what cannot be understood is none here, and a finding of `check`."""
    try:
        return overtime_of(workflow, step)
    except OvertimeError:
        return None


def _by_end(step: PlannedStep) -> tuple[bool, int]:
    """Sort key: a step without an end comes last."""
    return step.ends_ms is None, step.ends_ms or 0


def _latest(ends: list[int | None]) -> int | None:
    return None if None in ends else max((end for end in ends if end is not None), default=0)
