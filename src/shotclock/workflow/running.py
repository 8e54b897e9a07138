"""A run: each step starts the moment what it waits for is done, inside one deadline, and every change is written down.

One loop owns all states, so nothing can be decided twice. What a step does is its provider's; here is only when.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from ..core.graph import needs
from ..enforce.clock import monotonic_ns
from .plan import graph_of, step_timeout_ms
from .schema import AnyStep, Reaction, WorkflowFile
from .states import Reason, Status, StepState

# How often a step may send the run back to an earlier one. A loop that has not ended by then is not going to.
LOOP_CAP = 10
# How many steps may be started in all, with every repetition: past this something feeds itself.
START_CAP = 100_000
NS_PER_MS = 1_000_000
# Among the tasks of the steps, whose names have no blanks.
FAIL_FAST = "fail fast"

Execute = Callable[[str, AnyStep, StepState, dict[str, Any]], Any]
Record = Callable[[Iterable[StepState]], None]


class Running:
    """The steps of one run. `execute` runs one of them to its end and leaves its state final."""

    def __init__(
        self,
        workflow: WorkflowFile,
        *,
        execute: Execute,
        record: Record,
        scope: Mapping[str, Any],
        on_change: Callable[[StepState], None] | None = None,
        known: Mapping[str, StepState] | None = None,
        began_ns: int | None = None,
    ) -> None:
        """`known` is what an earlier process wrote down of this very run, `began_ns` when that began."""
        self._workflow = workflow
        self._execute = execute
        self._record = record
        self._scope = scope
        self._on_change = on_change or (lambda state: None)
        self._graph = graph_of(workflow)
        self._behind: dict[str, list[str]] = {name: [] for name in self._graph}
        for name, groups in self._graph.items():
            for other in needs(groups):
                self._behind[other].append(name)
        self._on_demand = _named_by_run(workflow)
        self.states: dict[str, StepState] = {}
        for name, step in workflow.steps.items():
            self.states[name] = StepState(
                name,
                step.type,
                timeout_ms=step_timeout_ms(workflow, step),
                continues=step.continue_on_failure or workflow.defaults.continue_on_failure,
            )
        self._started_ns = monotonic_ns() if began_ns is None else began_ns
        self._places = asyncio.Semaphore(workflow.max_parallelism)
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._starts = 0
        self._all_done = asyncio.Event()
        self._stopping: Status | None = None
        self.notes: list[str] = []
        for name, state in (known or {}).items():
            if name in self.states:
                self.states[name] = state

    async def run(self) -> None:
        """Until every step is final. Bounded by the deadline around the steps, since each ends inside it."""
        for name in self.states:
            self._consider(name)
        self._check_done()
        try:
            await self._all_done.wait()
        except asyncio.CancelledError:
            await self.stop(Status.CANCELLED)
            raise

    async def stop(self, status: Status) -> None:
        """Stop what runs, for real, and start nothing more."""
        self._stopping = self._stopping or status
        tasks = [task for task in self._tasks.values() if not task.done() and task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)  # bounded: a cancelled step is killed after its grace
        self._settle_rest()

    # --- deciding -----------------------------------------------------------------------------------------

    def _consider(self, name: str) -> None:
        """Start it, skip it, or leave it waiting."""
        state = self.states[name]
        if state.status is not Status.PENDING or name in self._tasks or self._stopping is not None:
            return
        if name in self._on_demand:
            return  # whoever calls for it starts it
        waits = False
        for group in self._graph[name]:
            members = [self.states[other] for other in group]
            if any(member.has_passed for member in members):
                continue
            if all(member.status.is_final for member in members):
                self._skip(state, members)
                return
            waits = True
        if not waits:
            self._start(name)

    def _skip(self, state: StepState, members: list[StepState]) -> None:
        culprit = next((member for member in members if member.status.is_bad), members[0])
        failed = culprit.status.is_bad or culprit.reason is Reason.DEPENDENCY_FAILED
        state.status = Status.SKIPPED
        state.reason = Reason.DEPENDENCY_FAILED if failed else Reason.DEPENDENCY_SKIPPED
        state.cause = culprit.cause or culprit.id
        self._changed(state)
        self._ended(state.id)

    def _start(self, name: str) -> None:
        self._starts += 1
        task = asyncio.get_running_loop().create_task(self._step(name))
        self._tasks[name] = task
        task.add_done_callback(lambda _: self._ended(name))

    async def _step(self, name: str) -> None:
        step, state = self._workflow.steps[name], self.states[name]
        async with self._places:
            if self._stopping is not None:
                return
            state.status = Status.RUNNING
            state.started_ms = (monotonic_ns() - self._started_ns) // NS_PER_MS
            self._changed(state)
            began_ns = monotonic_ns()
            try:
                await self._execute(name, step, state, self.scope_for(name))
            except asyncio.CancelledError:
                state.status = self._stopped_as()
                state.error = state.error or {"code": "CANCELLED", "message": "the run was stopped", "retryable": False}
            state.duration_ms = (monotonic_ns() - began_ns) // NS_PER_MS
            self._changed(state)

    def _stopped_as(self) -> Status:
        return self._stopping or Status.CANCELLED

    def scope_for(self, name: str) -> dict[str, Any]:
        """What its templates can see."""
        return {**self._scope, "outputs": Outputs(self.states), "steps": Shown(self.states)}

    # --- after a step -------------------------------------------------------------------------------------

    def _ended(self, name: str) -> None:
        self._tasks.pop(name, None)
        state = self.states[name]
        if self._stopping is None and state.status.is_final:
            reaction = self._reaction(name, state)
            if reaction is not None:
                self._react(name, state, reaction)
            if state.status.is_bad and self._workflow.fail_fast and not state.continues:
                stopping = self._tasks[FAIL_FAST] = asyncio.ensure_future(self.stop(Status.CANCELLED))
                stopping.add_done_callback(self._has_stopped)
        for follower in self._behind[name]:
            self._consider(follower)
        self._check_done()

    def _has_stopped(self, _: object) -> None:
        self._tasks.pop(FAIL_FAST, None)
        self._check_done()

    def _reaction(self, name: str, state: StepState) -> Reaction | None:
        step = self._workflow.steps[name]
        if state.status is Status.SUCCEEDED:
            return step.on_success
        if state.status in (Status.FAILED, Status.TIMED_OUT):
            return step.on_fail or self._workflow.defaults.on_fail
        return None

    def _react(self, name: str, state: StepState, reaction: Reaction) -> None:
        for other in reaction.run:
            self._again(other)
        if reaction.goto is not None:
            if state.loops >= LOOP_CAP:
                message = f"{name} went back to {reaction.goto} {LOOP_CAP} times, which is the limit"
                state.warnings.append({"code": "LOOP_CAP", "message": message})
                self._changed(state)
            else:
                state.loops += 1
                self._again(reaction.goto)

    def _again(self, name: str) -> None:
        """Run a step (once more), and everything behind it that has run before."""
        if self._starts > START_CAP or name in self._tasks:
            return
        for other in self._with_followers(name):
            state = self.states[other]
            if state.status.is_final and other not in self._tasks:
                self.states[other] = StepState(
                    other, state.type, timeout_ms=state.timeout_ms, continues=state.continues, loops=state.loops
                )
        self.states[name].loops = (
            max(1, self.states[name].loops) if name in self._on_demand else self.states[name].loops
        )
        groups = self._graph[name]
        if not groups or name in self._on_demand:
            self._start(name)
        else:
            self._consider(name)

    def _with_followers(self, name: str) -> list[str]:
        found = [name]
        for other in found:
            found += [follower for follower in self._behind[other] if follower not in found]
        return found

    def _check_done(self) -> None:
        if self._tasks:
            return
        self._settle_rest()
        self._all_done.set()

    def _settle_rest(self) -> None:
        """Nothing runs any more, so what still waits never will."""
        rest = [state for state in self.states.values() if not state.status.is_final]
        for state in rest:
            if state.id in self._on_demand:
                state.status, state.reason = Status.SKIPPED, Reason.ON_DEMAND
            elif state.status is Status.RUNNING:
                state.status = self._stopped_as()
            else:
                state.status, state.reason = Status.SKIPPED, Reason.RUN_ENDED
        if rest:
            self._record(rest)

    def _changed(self, state: StepState) -> None:
        self._record([state])
        self._on_change(state)


class _View(Mapping[str, Any]):
    """Of the states, as they are when somebody looks: a copy for each of a thousand steps would be a million."""

    def __init__(self, states: Mapping[str, StepState]) -> None:
        self._states = states

    def __iter__(self) -> Iterator[str]:
        return iter(self._states)

    def __len__(self) -> int:
        return len(self._states)


class Outputs(_View):
    """`outputs.build` in a template. Only what has succeeded has an output."""

    def __getitem__(self, name: str) -> Any:
        state = self._states[name]
        if state.status is not Status.SUCCEEDED:
            raise KeyError(name)
        return state.output


class Shown(_View):
    """`steps.build.status` in a template. Here is also the output of one that failed: what it said until then."""

    def __getitem__(self, name: str) -> Any:
        state = self._states[name]
        shown = {"status": state.status.value, "error": state.error, "attempts": state.attempts}
        return {**shown, "output": state.output}


def _named_by_run(workflow: WorkflowFile) -> set[str]:
    """Steps that only others call for: named by some `run`, and nobody waits for them."""
    waited_for = {name for groups in graph_of(workflow).values() for name in needs(groups)}
    named = {
        name
        for step in workflow.steps.values()
        for reaction in (step.on_fail, step.on_success)
        if reaction is not None
        for name in reaction.run
    }
    return {name for name in named if name not in waited_for}
