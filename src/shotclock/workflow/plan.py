"""What a workflow would take: the clocks of each step after nesting, and the longest way through.

Worst cases throughout: every step uses all of its time and all of its tries. Not counted are the grace of those
that are stopped, waiting for one of `max_parallelism` places, and how many items a `for_each` has.
"""

from __future__ import annotations

from ..core.clocks import DEFAULT_GRACE_MS
from ..core.deadlines import DEFAULT_RESERVE_MS, RESERVE_SHARE, reserve_ms_for
from ..core.graph import Groups, groups_of, needs, order_of
from ..core.records import dataclass
from ..providers.command import ToolStep
from ..providers.step_type import STEP_TYPES, Retry, StepPart, duration_ms
from .schema import WorkflowFile


@dataclass(frozen=True, slots=True)
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

    @property
    def worst_ms(self) -> int | None:
        """All of its tries and pauses."""
        return None if not self.timeout_ms else self.attempts * self.timeout_ms + self.delays_ms


@dataclass(frozen=True, slots=True)
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


def run_timeout_ms(workflow: WorkflowFile) -> int | None:
    """Return the limit of the whole run, where a bare number is seconds; None is no limit."""
    return None if workflow.timeout is None else duration_ms(workflow.timeout, "s") or None


def timeout_key(step: StepPart) -> str:
    """Return where the file says it: where both are there, the key of the step's type counts."""
    own = STEP_TYPES[step.type].timeout_key
    return own if getattr(step, own) is not None or step.timeout is None else "timeout"


def written_timeout(step: StepPart) -> object:
    return getattr(step, timeout_key(step))


def step_timeout_ms(workflow: WorkflowFile, step: StepPart) -> int | None:
    """Return the timeout of one try: 0 is none, None is as long as the run."""
    kind, written = STEP_TYPES[step.type], written_timeout(step)
    if written is None and isinstance(step, ToolStep) and step.tool in workflow.tools:
        written = workflow.tools[step.tool].timeout
    if written is None and workflow.defaults.timeout is not None and kind.default_ms is not None:
        written = workflow.defaults.timeout
    return kind.timeout_ms(written)


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
    """What has to be kept for it to have all its time, with the reserve of what is inside; None: it does not say."""
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


def retry_of(workflow: WorkflowFile, step: StepPart) -> Retry | None:
    reaction = step.on_fail or workflow.defaults.on_fail
    return None if reaction is None else reaction.retry


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
    """Those it waits for that say `for_each: true`: it is done for every item of their output, unless it says for
    itself what it is done for."""
    if step.for_each is not None and step.for_each is not True:
        return []
    named = dict.fromkeys(name for group in groups_of(step.depends_on) for name in group)
    return [name for name in named if name in workflow.steps and workflow.steps[name].for_each is True]


def is_per_item(workflow: WorkflowFile, step: StepPart) -> bool:
    return isinstance(step.for_each, str | list) or bool(items_come_from(workflow, step))


def plan_of(workflow: WorkflowFile, *, timeout_ms: int | None = None) -> Plan:
    """Return the plan of a workflow without circles. `timeout_ms` is the caller's limit on the run, where it is
    shorter."""
    limits = [limit for limit in (run_timeout_ms(workflow), timeout_ms) if limit]
    run_ms = min(limits) if limits else None
    kept_ms = 0 if run_ms is None else kept_for_clean_up_ms(workflow, run_ms)
    clean_up = clean_up_steps(workflow)
    graph = graph_of(workflow)
    planned: dict[str, PlannedStep] = {}
    through: dict[str, str | None] = {}
    for step_id in order_of(graph):
        step = workflow.steps[step_id]
        own_ms = step_timeout_ms(workflow, step)
        retry = retry_of(workflow, step)
        attempts = 1 + (retry.max if retry is not None else 0)
        delays = 0 if retry is None else sum(delay_ms(retry, number) for number in range(1, attempts))
        before = [planned[name] for name in needs(graph[step_id]) if name in planned]
        starts = _latest([other.ends_ms for other in before])
        through[step_id] = max(before, key=_by_end).id if before else None
        has_ms = None if run_ms is None else run_ms if step_id in clean_up else run_ms - kept_ms
        inside_ms = None if has_ms is None else has_ms - reserve_ms_for(has_ms)
        worst = None if not own_ms else attempts * own_ms + delays
        ends = None if starts is None or worst is None else starts + worst
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
        )
    last = max(planned.values(), key=_by_end) if planned else None
    path = [] if last is None else [last.id]
    while path and (before_it := through[path[-1]]) is not None:
        path.append(before_it)
    worst_ms = 0 if last is None else last.ends_ms
    return Plan(run_ms, tuple(planned.values()), tuple(reversed(path)), worst_ms, kept_ms)


def _by_end(step: PlannedStep) -> tuple[bool, int]:
    """Sort key: a step without an end comes last."""
    return step.ends_ms is None, step.ends_ms or 0


def _latest(ends: list[int | None]) -> int | None:
    return None if None in ends else max((end for end in ends if end is not None), default=0)
