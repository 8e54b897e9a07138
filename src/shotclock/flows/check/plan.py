"""The plan of a workflow: the order of its steps, their limits after nesting, and the longest path.

In the worst case every step uses all of its time and attempts, and known items wait for slots. Not counted: the grace
of stopped steps, the waits of several steps for slots, and items that are only known when the workflow runs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterable, Mapping
from graphlib import CycleError, TopologicalSorter
from operator import attrgetter

from ...core.limits import DEFAULT_GRACE_MS, DEFAULT_RESERVE_MS, DEFAULT_WIND_DOWN_MS, RESERVE_SHARE, reserve_ms_for
from ...core.overtime import OvertimeError, OvertimePolicy
from ...core.value_types import field, value
from ..file.schema import WorkflowFile, calls_of, texts_in
from ..file.templates import mentions, uses_mapping
from ..steps.command import ToolStep
from ..steps.provider import STEP_TYPES, Approval, Dependency, StepPart, StepRetry, duration_ms

Groups = tuple[tuple[str, ...], ...]  # one step of every group: `["A", "B|C"]` means A, and B or C


def groups_of(written: Iterable[Dependency]) -> Groups:
    names = (name for entry in written for name in ([entry] if isinstance(entry, str) else entry))
    return tuple(tuple(part.strip() for part in name.split("|") if part.strip()) for name in names)


def ends_awaited(step: StepPart) -> frozenset[str]:
    """Return the dependencies of which any end is enough: `ended`, and nowhere in the list `ok` as well."""
    strict = needs(groups_of(entry for entry in step.depends_on if isinstance(entry, str)))
    return frozenset(needs(groups_of(step.depends_on)) - strict)


def needs(groups: Groups) -> set[str]:
    return {name for group in groups for name in group}


def find_cycle(graph: Mapping[str, Groups]) -> list[str] | None:
    """Return one cycle, as a path that ends where it began."""
    try:
        _sorter(graph).prepare()
    except CycleError as error:
        return list(reversed(error.args[1]))
    return None


def order_of(graph: Mapping[str, Groups]) -> list[str]:
    """Return the steps, each after its dependencies, without those on or behind a cycle."""
    sorter = _sorter(graph)
    order: list[str] = []
    with contextlib.suppress(CycleError):  # the steps before a cycle are still returned
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
    """Return the steps that can never start if these do not. The graph must have no cycle."""
    lost = set(names)
    for name in order_of(graph):
        if any(group and lost.issuperset(group) for group in graph[name]):
            lost.add(name)
    return lost


def reach(starts: Iterable[str], following: Callable[[str], Iterable[str]]) -> dict[str, None]:
    """Return these steps and all that follow them, in the order in which they are found."""
    found = dict.fromkeys(starts)
    left = list(found)
    while left:
        new = [name for name in following(left.pop()) if name not in found]
        found |= dict.fromkeys(new)
        left += new
    return found


AT_ONCE = 4096  # the bits of all steps of the largest files would take gigabytes

Before = Mapping[str, Collection[str]]  # the direct predecessors of each step, perhaps with cycles


def not_before(before: Before, pairs: Iterable[tuple[str, str]]) -> set[tuple[str, str]]:
    """Return the pairs (earlier, later) without a path back. Searched together: one by one would be quadratic."""
    searched: dict[str, list[str]] = {}
    for earlier, later in pairs:
        if earlier not in before.get(later, ()):
            searched.setdefault(earlier, []).append(later)
    names = list(searched)
    # Steps on or behind a cycle come last.
    order = dict.fromkeys([*order_of({name: (tuple(others),) for name, others in before.items()}), *before])
    missing: set[tuple[str, str]] = set()
    for start in range(0, len(names), AT_ONCE):
        bits = {name: 1 << number for number, name in enumerate(names[start : start + AT_ONCE])}
        above = dict.fromkeys(before, 0)
        has_changed = True
        while has_changed:  # once more than the depth of the cycles
            has_changed = False
            for name in order:
                found = above[name]
                for other in before[name]:
                    found |= above.get(other, 0) | bits.get(other, 0)
                if found != above[name]:
                    above[name], has_changed = found, True
        missing |= {(name, later) for name, bit in bits.items() for later in searched[name] if not above[later] & bit}
    return missing


@value
class PlannedStep:
    """A step and its limits in milliseconds; None is no limit of its own."""

    id: str
    type: str
    groups: Groups
    timeout_ms: int | None
    is_written: bool
    effective_ms: int | None
    grace_ms: int
    attempts: int
    delays_ms: int
    starts_ms: int | None  # the latest start; None if it is unbounded
    ends_ms: int | None
    is_per_item: bool
    soft_ms: int | None = None
    wind_down_ms: int = DEFAULT_WIND_DOWN_MS
    overtime: OvertimePolicy | None = None
    longest_ms: int | None = None  # the longest attempt, with overtime
    is_finally: bool = False
    any_end: frozenset[str] = frozenset()  # the dependencies of which any end is enough
    rounds: int | None = 1  # of the items; None if they are not known yet
    approval_ms: int = 0  # the longest wait for its approval, before it begins

    @property
    def worst_ms(self) -> int | None:
        return None if not self.longest_ms else self.attempts * self.longest_ms + self.delays_ms


@value
class Plan:
    run_timeout_ms: int | None
    steps: tuple[PlannedStep, ...]
    critical_path: tuple[str, ...]
    worst_ms: int | None  # None if a step on the longest path has no limit
    clean_up_ms: int = 0
    finally_ms: int = 0
    finally_path: tuple[str, ...] = ()  # the longest chain of `finally` steps

    @property
    def people_ms(self) -> int:
        """The longest waits for approvals along the critical path, which `worst_ms` does not count."""
        waits_ms = sum(step.approval_ms for step in self.steps if step.id in self.critical_path)
        return waits_ms if self.run_timeout_ms is None else min(waits_ms, self.run_timeout_ms)

    def step(self, step_id: str) -> PlannedStep:
        return next(step for step in self.steps if step.id == step_id)


def graph_of(workflow: WorkflowFile) -> dict[str, Groups]:
    return {step_id: groups_of(step.depends_on) for step_id, step in workflow.steps.items()}


def on_demand(workflow: WorkflowFile) -> set[str]:
    """Return the steps that only run when called: a `run` names them, and no step depends on them."""
    waited_for = {name for groups in graph_of(workflow).values() for name in needs(groups)}
    reactions = [reaction for step in workflow.steps.values() for reaction in (step.on_fail, step.on_success)]
    named = {name for reaction in (*reactions, workflow.defaults.on_fail) if reaction for name in reaction.run}
    return {name for name in named if name not in waited_for}


def keep_steps(workflow: WorkflowFile, names: Collection[str]) -> WorkflowFile:
    written = workflow.model_dump(exclude_unset=True)
    gone = workflow.steps.keys() - names
    if not gone:
        return workflow
    written["steps"] = {name: step for name, step in written["steps"].items() if name in names}
    if workflow.finally_:
        written["finally"] = [name for name in workflow.finally_ if name in names]
    return keep_outputs(WorkflowFile.model_validate(written), outputs_without(workflow, gone))


def outputs_without(workflow: WorkflowFile, gone: Collection[str]) -> list[str]:
    """Return the outputs that name none of these steps."""
    return [
        name
        for name, template in workflow.outputs.items()
        if set(gone).isdisjoint(each.name for each in mentions(template))
    ]


def keep_outputs(workflow: WorkflowFile, names: Collection[str]) -> WorkflowFile:
    if workflow.outputs.keys() <= set(names):
        return workflow
    written = workflow.model_dump(exclude_unset=True)
    written["outputs"] = {name: template for name, template in written["outputs"].items() if name in names}
    return WorkflowFile.model_validate(written)


def run_timeout_ms(workflow: WorkflowFile, caller_ms: int | None = None) -> int | None:
    """Return the limit of the whole run: the shorter of the file's and the caller's. A bare number is seconds."""
    own_ms = None if workflow.timeout is None else duration_ms(workflow.timeout, "s")
    return min((limit for limit in (own_ms, caller_ms) if limit), default=None)


def timeout_key(step: StepPart) -> str:
    """Return the key of the step's timeout. The key of its type precedes `timeout`."""
    own = STEP_TYPES[step.type].timeout_key
    return own if attrgetter(own)(step) is not None or step.timeout is None else "timeout"


def approval_ttl_ms(step: StepPart) -> int:
    written = Approval() if step.approval is True else step.approval
    return max(1, duration_ms(written.ttl, "s")) if isinstance(written, Approval) else 0


def written_timeout(step: StepPart) -> object:
    return attrgetter(timeout_key(step))(step)


def step_timeout_ms(workflow: WorkflowFile, step: StepPart) -> int | None:
    """Return the timeout of one attempt; 0 is none, None is that of the run."""
    kind, written = STEP_TYPES[step.type], written_timeout(step)
    if written is None and isinstance(step, ToolStep) and step.tool in workflow.tools:
        written = workflow.tools[step.tool].timeout
    if written is None and workflow.defaults.timeout is not None and kind.default_ms is not None:
        written = workflow.defaults.timeout
    return kind.timeout_ms(written, step)


def overtime_of(workflow: WorkflowFile, step: StepPart) -> OvertimePolicy | None:
    written = step.overtime if step.overtime is not None else workflow.defaults.overtime
    return None if not written else OvertimePolicy.of(written, step_timeout_ms(workflow, step) or 0, bare="s")


def step_clock_ms(workflow: WorkflowFile, step: StepPart, name: str) -> int | None:
    own, default = getattr(step, name), getattr(workflow.defaults, name)
    if own is not None:
        return duration_ms(own, STEP_TYPES[step.type].unit)
    return None if default is None else duration_ms(default, "s")


def grace_ms(workflow: WorkflowFile, step: StepPart) -> int:
    written_ms = step_clock_ms(workflow, step, "grace")
    return DEFAULT_GRACE_MS if written_ms is None else written_ms


# A run keeps the declared timeouts of its clean-up, up to 1/2 of its time, and 1/10 if none is declared.
CLEAN_UP_SHARE = 2
UNDECLARED_SHARE = 10


def clean_up_steps(workflow: WorkflowFile) -> frozenset[str]:
    """Return the steps that an `on_fail` runs, without those of `finally`, which have their own time."""
    reactions = [step.on_fail for step in workflow.steps.values()] + [workflow.defaults.on_fail]
    named = (name for reaction in reactions if reaction is not None for name in reaction.run)
    return frozenset(named) - frozenset(workflow.finally_)


def clean_up_wants_ms(step: StepPart, own_ms: int | None) -> int | None:
    """Return the time that a clean-up step needs, with the reserve of its calls; None if the file does not set it."""
    if written_timeout(step) is None or not own_ms:
        return None
    return own_ms + min(DEFAULT_RESERVE_MS, own_ms // (RESERVE_SHARE - 1) + 1)


def kept_for_clean_up_ms(workflow: WorkflowFile, run_ms: int) -> int:
    """Return the time that only clean-up steps may use."""
    kept = 0
    for name in clean_up_steps(workflow) & workflow.steps.keys():
        wants = clean_up_wants_ms(workflow.steps[name], step_timeout_ms(workflow, workflow.steps[name]))
        kept = max(kept, run_ms // UNDECLARED_SHARE if wants is None else min(wants, run_ms // CLEAN_UP_SHARE))
    return kept


def finally_needs_ms(workflow: WorkflowFile, name: str, run_ms: int) -> int:
    """Return the time kept for one `finally` step: all of its attempts, or a tenth of the run's if undeclared."""
    step = workflow.steps[name]
    wants_ms = clean_up_wants_ms(step, step_timeout_ms(workflow, step))
    retry, attempts = retry_of(workflow, step), most_attempts(workflow, step)
    pauses_ms = 0 if retry is None else sum(retry.backoff.longest_ms(number) for number in range(1, attempts))
    return run_ms // UNDECLARED_SHARE if wants_ms is None else attempts * wants_ms + pauses_ms


@value
class FinallyReserve:
    """The time that a run keeps for its `finally` steps: their longest chain."""

    ms: int = 0
    path: tuple[str, ...] = ()
    behind_ms: Mapping[str, int] = field(default_factory=dict)  # by step, what those that wait for it still need


NO_FINALLY = FinallyReserve()


def finally_reserve(workflow: WorkflowFile, run_ms: int | None) -> FinallyReserve:
    if not run_ms or not workflow.finally_:
        return NO_FINALLY
    graph = {name: groups for name, groups in graph_of(workflow).items() if name in workflow.finally_}
    callers = {name: set(needs(groups)) for name, groups in graph.items()}
    for name in graph:
        for called in calls_of(workflow, name):
            callers.get(called, set()).add(name)  # a step that an `on_fail` runs comes after its caller
    order = order_of({name: tuple((other,) for other in sorted(others)) for name, others in callers.items()})
    behind: dict[str, int] = dict.fromkeys(graph, 0)
    path: dict[str, tuple[str, ...]] = {}
    needed = {name: finally_needs_ms(workflow, name, run_ms) for name in graph}
    for name in reversed(order):
        after = [other for other in order if name in callers[other]]
        longest = max(after, key=lambda other: needed[other] + behind[other], default=None)
        behind[name] = 0 if longest is None else needed[longest] + behind[longest]
        path[name] = (name, *(() if longest is None else path[longest]))
    first = max(order, key=lambda name: needed[name] + behind[name], default=None)
    if first is None:  # they wait for each other
        return NO_FINALLY
    chain_ms, slots = needed[first] + behind[first], workflow.max_parallelism
    if len(order) > slots:  # the others wait for slots: the longest that any order of starts takes
        chain_ms += (sum(needed.values()) - chain_ms) // slots + 1
    return FinallyReserve(chain_ms, path[first], behind)


def retry_of(workflow: WorkflowFile, step: StepPart) -> StepRetry | None:
    reaction = step.on_fail or workflow.defaults.on_fail
    return None if reaction is None else reaction.retry


def may_run_again(workflow: WorkflowFile, step: StepPart) -> bool:
    """Return whether a cut-off step may run again: it is idempotent, or its `retry` covers INTERRUPTED."""
    retry = retry_of(workflow, step)
    return step.idempotent or (retry is not None and (not retry.on or "INTERRUPTED" in retry.on))


def most_attempts(workflow: WorkflowFile, step: StepPart) -> int:
    retry = retry_of(workflow, step)
    return 1 if retry is None else 1 + retry.max


def items_come_from(workflow: WorkflowFile, step: StepPart) -> list[str]:
    """Return the dependencies with `for_each: true`, whose outputs are the items."""
    if step.matrix is not None or (step.for_each is not None and step.for_each is not True):
        return []
    named = dict.fromkeys(name for group in groups_of(step.depends_on) for name in group)
    return [name for name in named if name in workflow.steps and workflow.steps[name].for_each is True]


def is_output_used(workflow: WorkflowFile, step: StepPart, name: str) -> bool:
    """Return whether anything may read the output of a step, beside the answer of the run."""
    own = (step.fail_if, step.transform, step.output_schema, step.for_each)
    if any(own) or is_per_item(workflow, step) or getattr(step, "output_format", "auto") == "json":
        return True
    if any(getattr(each, "prompt_file", None) for each in workflow.steps.values()):
        return True  # a template that is not in the file
    texts = [text for _, text in texts_in(workflow.model_dump(exclude_unset=True))]
    mentioned = {each.name for text in texts for each in mentions(text)}
    return name in mentioned or any(
        uses_mapping(kind, text, workflow.steps) for kind in ("outputs", "steps") for text in texts
    )


def rounds_of(workflow: WorkflowFile, step: StepPart) -> int | None:
    """Return how many times the items of a step fill the places, at least 1; None if they are not known yet."""
    if isinstance(step.items, list):
        return max(1, -(-len(step.items) // workflow.max_parallelism))
    return None if is_per_item(workflow, step) else 1


def is_per_item(workflow: WorkflowFile, step: StepPart) -> bool:
    return step.matrix is not None or isinstance(step.for_each, str | list) or bool(items_come_from(workflow, step))


def plan_of(workflow: WorkflowFile, *, timeout_ms: int | None = None) -> Plan:
    """Return the plan of a workflow. The shorter of `timeout_ms` and the file's limit holds."""
    run_ms = run_timeout_ms(workflow, timeout_ms)
    kept = finally_reserve(workflow, run_ms)
    before_finally_ms = None if run_ms is None else max(1, run_ms - kept.ms)
    kept_ms = 0 if before_finally_ms is None else kept_for_clean_up_ms(workflow, before_finally_ms)
    clean_up, last_steps = clean_up_steps(workflow), frozenset(workflow.finally_)
    graph = graph_of(workflow)
    planned: dict[str, PlannedStep] = {}
    through: dict[str, str | None] = {}
    # Steps on or behind a cycle come last, so that `check` sees their limits too.
    for step_id in sorted(dict.fromkeys([*order_of(graph), *graph]), key=last_steps.__contains__):
        step = workflow.steps[step_id]
        own_ms = step_timeout_ms(workflow, step)
        retry = retry_of(workflow, step)
        attempts = most_attempts(workflow, step)
        delays = 0 if retry is None else sum(retry.backoff.longest_ms(number) for number in range(1, attempts))
        before = [planned[name] for name in needs(graph[step_id]) if name in planned]
        if step_id in last_steps and not before:
            before = [step for step in planned.values() if step.id not in last_steps]
        starts = _latest([other.ends_ms for other in before])
        through[step_id] = max(before, key=_by_end).id if before else None
        has_ms = before_finally_ms
        if run_ms is not None and has_ms is not None:
            left_ms = has_ms if step_id in clean_up else has_ms - kept_ms
            has_ms = max(1, run_ms - kept.behind_ms.get(step_id, 0)) if step_id in last_steps else left_ms
        inside_ms = None if has_ms is None else has_ms - reserve_ms_for(has_ms)
        soft, wind_down = step_clock_ms(workflow, step, "soft"), step_clock_ms(workflow, step, "wind_down")
        policy = _readable_overtime(workflow, step)
        longest = own_ms and own_ms + (policy.budget_ms if policy is not None and policy.hard_extends else 0)
        rounds = rounds_of(workflow, step)
        ends = None if starts is None or not longest else starts + (rounds or 1) * (attempts * longest + delays)
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
            step_id in last_steps,
            ends_awaited(step),
            rounds,
            approval_ttl_ms(step) if inside_ms is None else min(approval_ttl_ms(step), inside_ms),
        )
    last = max(planned.values(), key=_by_end) if planned else None
    path = [] if last is None else [last.id]
    while path and (before_it := through[path[-1]]) is not None:
        path.append(before_it)
    worst_ms = 0 if last is None else last.ends_ms
    return Plan(run_ms, tuple(planned.values()), tuple(reversed(path)), worst_ms, kept_ms, kept.ms, kept.path)


def _readable_overtime(workflow: WorkflowFile, step: StepPart) -> OvertimePolicy | None:
    """Return the overtime policy of a step; None for a malformed one, which `check` reports."""
    try:
        return overtime_of(workflow, step)
    except OvertimeError:
        return None


def _by_end(step: PlannedStep) -> tuple[bool, int]:
    return step.ends_ms is None, step.ends_ms or 0


def _latest(ends: list[int | None]) -> int | None:
    return None if None in ends else max((end for end in ends if end is not None), default=0)
