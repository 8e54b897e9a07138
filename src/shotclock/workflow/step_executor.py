"""The executor of steps: condition, items, approval, tries, and what becomes of the output.

The span of a step is above the calls of its tries and below its run:

    run nightly ─┬─ step fetch ─── try fetch ─── what the server does
                 ├─ step build ─┬─ try build
                 │              └─ try build ─── exec ─── …
                 └─ step audit ─── run audit ─── step scan ─── try scan
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import re
import traceback
from collections import ChainMap
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from ..core.clocks import NS_PER_MS, WORK_CLOCKS, Clocks, Deadline, Fired
from ..core.envelope import Envelope
from ..core.errors import Ending, Failure, SideEffects, effects_of_all
from ..core.json_values import Read, as_plain, as_text, read_json, read_printed, warn_of_kept
from ..core.overtime import ObserverKind, Overtime, OvertimeDecision, OvertimePolicy
from ..core.trace import TraceContext
from ..core.value_types import record, replace
from ..core.visible_text import one_line
from ..process import spans
from ..process.clock import monotonic_ns, wall_ns
from ..process.context import Scope, Traced, current_scope
from ..providers.command import CommandStep, ToolStep
from ..providers.provider import (
    STEP_TYPES,
    FileTool,
    Provider,
    StepCall,
    StepPart,
    StepResult,
    duration_ms,
    result_left_by,
)
from ..providers.workflow import RunFile, WorkflowStep
from ..runtime.call import Call, Outcome, Work, WorkView, answer, new_span_id, no_time_left, wound_down_problem
from ..runtime.control import OBSERVER_NAME, calls_made_by, control_of, enter, leave, start_control
from ..runtime.outcomes import outcome_of_error
from ..runtime.runtime import Runtime
from . import templates
from .lint import approved_files, inner_workflow
from .plan import (
    delay_ms,
    groups_of,
    items_come_from,
    most_tries,
    overtime_of,
    retry_of,
    step_timeout_ms,
    written_timeout,
)
from .scheduler import Execute, ParallelSlots, RunContext
from .schema import schema_of_inputs
from .state import Reason, Status, StepState, effects_of
from .step_approval import RefusedStep, StepApproval
from .step_renderer import LEAST_TEMPLATE_MS, TEMPLATE_MS, RenderedStep, StepFailed, StepRenderer

# How many items of one step are under way at a time.
ITEMS_AT_ONCE = 8
# Of the items of one step: warnings that are kept, and numbers of items that failed.
MOST_WARNINGS = 50
# Characters of an item that failed in what is said about it.
ITEM_SHOWN = 40
# How many a step may have.
MOST_ITEMS = 10_000
# Frames of a traceback of our own.
TRACEBACK_KEPT = 20
# Bytes that one step can hand on: of its text, or of the JSON of any other value.
OUTPUT_LIMIT = 60_000_000
# Characters of an output that are read aside.
LARGE = 1_000_000
# Characters of a command's stderr, or of an output that is not handed on, which its error shows: the end of it.
END_SHOWN = 2_000


class AnsweredTry(NamedTuple):
    """One try of a step, once it is over."""

    envelope: Envelope
    output: Any = None
    rule: str | None = None
    """What kind of failure it was, as `command/timeout`; found in error.context.rule."""
    details: Mapping[str, Any] | None = None
    """What is written down with the output."""
    cut: str | None = None
    """Why the output is not whole, where it is not."""


@record
class _Work:
    """A step, or one of its items, while it is executed."""

    name: str
    step: StepPart
    state: StepState
    scope: dict[str, Any]
    item: tuple[int, int] = (0, 1)
    """Which of how many items it is done for."""
    approved: RenderedStep | None = None
    """What somebody has approved, which is what runs."""
    approval: StepApproval | None = None


class StepExecutor:
    """The executor of the steps of one run."""

    def __init__(self, run: RunContext, run_file: RunFile) -> None:
        self._run = run
        self._workflow = run.workflow
        self._run_file = run_file
        self._person_wait = run.person_wait
        self.renderer = StepRenderer(run)
        self._clocks_of: dict[Clocks, Clocks] = {}

    async def execute(self, name: str, step: StepPart, state: StepState, scope: dict[str, Any]) -> None:
        """Execute one step and leave its state final. A cancellation is passed on."""
        with self._person_wait.at_work():
            await self._execute(name, step, state, scope)

    async def _execute(self, name: str, step: StepPart, state: StepState, scope: dict[str, Any]) -> None:
        self._run.wound_down.discard(name)  # it may run again
        try:
            visible = await self.renderer.with_variables(step, step.if_, scope)
            if step.if_ is not None and not await self.renderer.evaluate(step.if_, visible):
                state.status, state.reason = Status.SKIPPED, Reason.CONDITION
                return
            items, source = await self._find_items(step, scope)
            # Its status is final only when nothing more can change it: others look at it meanwhile.
            if items is None:
                verdict = await self._approve_and_try(_Work(name, step, state, scope))
            else:
                verdict = await self._try_items(_Work(name, step, state, scope), items, source)
            if verdict is Status.SUCCEEDED:
                await self._judge_output(step, state, scope)
            state.status = verdict
        except StepFailed as failed:
            self._note_failure(state, failed)
        except Exception as error:  # ours: the step fails, and whoever waits for it is told
            bug = {"code": "INTERNAL_ERROR", "message": f"{type(error).__name__}: {error}", "retryable": False}
            context = {"traceback": "".join(traceback.format_exception(error, limit=TRACEBACK_KEPT))}
            state.status = Status.FAILED
            state.error = self._run.redaction.value(bug | {"phase": "execution", "context": context})

    def _note_failure(self, state: StepState, failed: StepFailed) -> None:
        state.status, state.error = Status.FAILED, failed.error_after(state.attempts)
        self._note_cut_short(state, failed.fired)

    def _note_cut_short(self, state: StepState, fired: Fired | None) -> None:
        """Note whether the run's own clock has stopped a step. Then its error names the limit of the run: what the step
        had of that, which was less by a reserve, is nobody's limit."""
        state.is_cut_short = self._run.deadlines.note_fired(fired)
        if state.is_cut_short and state.error is not None:
            limit, clock = self._run.describe_limit()
            context = {**(state.error.get("context") or {}), "clock": clock.as_context()}
            # Of what never began, the message says what it waited for.
            message = f"stopped: {limit}" if state.error["code"] == "TIMEOUT" else state.error["message"]
            state.error = {**state.error, "message": message, "context": context}

    # --- items --------------------------------------------------------------------------------------------

    async def _find_items(self, step: StepPart, scope: dict[str, Any]) -> tuple[list[Any] | None, str | None]:
        """Return the items (None where there are none) and the step whose output they are, if it is another."""
        items: Any = step.for_each
        if items is None or isinstance(items, bool):
            return self._find_items_of_others(step, scope)
        items = await self.renderer.render(items, scope)
        if isinstance(items, str):
            items = read_printed(items).value
        if not isinstance(items, list):
            raise StepFailed("STEP_INVALID", f"for_each is {_kind_of(items)}, not a list", "step/for_each")
        return _limit_items(items), None

    def _find_items_of_others(self, step: StepPart, scope: dict[str, Any]) -> tuple[list[Any] | None, str | None]:
        sources = items_come_from(self._workflow, step)
        for group in groups_of(step.depends_on) if sources else ():
            # Of several that would do it is the one that did; none did where their failure is nobody's matter.
            for name in sorted(group, key=lambda name: name not in scope["outputs"]):
                if name in sources:
                    return _limit_items(scope["outputs"].get(name, [])), name
                break
        return None, None

    async def _try_items(self, work: _Work, items: list[Any], source: str | None) -> Status:
        step, state, scope = work.step, work.state, work.scope
        outer = self._run.slots if STEP_TYPES[step.type].takes_slot else None
        slots = ParallelSlots(min(ITEMS_AT_ONCE, self._workflow.max_parallelism), outer)
        parts = [StepState(f"{work.name}[{number}]", step.type) for number in range(len(items))]
        digests = [hashlib.sha256(as_text(item).encode("utf-8", "surrogatepass")).hexdigest() for item in items]
        for number, (record, digest) in enumerate(zip(state.parts, digests, strict=False)):
            if record.get("item") == digest:  # it is about this very item
                parts[number] = StepState.from_record(record)
        state.parts = []
        is_clean_up = self._run.call.winding_down is not None  # nothing else is begun then

        def to_record(number: int, part: StepState) -> dict[str, Any]:
            return {**part.to_record(), "item": digests[number]}

        async def write(number: int) -> None:
            if self._run.record_item is not None:
                await self._run.record_item(work.name, number, to_record(number, parts[number]))

        async def try_item(number: int, item: Any) -> None:
            part = parts[number]
            if part.status.is_final:  # before the run was parked, or its process died
                return
            here = {**scope, "item": item, "index": number}
            if source is not None:  # the one output that is meant is this item's
                here["outputs"] = ChainMap({source: item}, scope["outputs"])
            async with slots.hold_one():
                if self._is_wound_down(work.name) and not is_clean_up:
                    part.status = Status.SKIPPED
                    return
                with self._person_wait.at_work():
                    try:
                        part.status = Status.RUNNING
                        await write(number)
                        one = _Work(work.name, step, part, here, (number, len(items)))
                        part.status = await self._approve_and_try(one)
                    except StepFailed as failed:
                        self._note_failure(part, failed)
                    except Failure as failure:
                        self._note_failure(part, StepFailed(failure.code, str(failure), "step/items"))
                with contextlib.suppress(Failure):  # without a record of its end it counts as cut off
                    await write(number)

        try:
            with self._person_wait.leave_to_parts():
                async with asyncio.TaskGroup() as group:
                    for number, item in enumerate(items):
                        group.create_task(try_item(number, item))
        except asyncio.CancelledError:  # what they had said until then is kept, as that of one would be
            stopped = next((part for part in parts if part.ending and not part.status.is_final), None)
            with contextlib.suppress(ValueError):
                state.output = self._check_size([part.output for part in parts])
            state.attempts = state.cut_off + sum(part.attempts for part in parts)
            if stopped is not None:
                state.error, state.ending = stopped.error, stopped.ending
            if self._person_wait.parked.done():
                later = (part if part.status.is_final else part.to_parked() for part in parts)
                records = [to_record(number, part) for number, part in enumerate(later)]
                state.parts = records if self._find_excess(records) is None else []
            raise
        outputs = [part.output for part in parts]
        state.attempts = state.cut_off + sum(part.attempts for part in parts)
        notes = [note for part in parts for note in part.warnings if note["code"] != "DEADLINE_INHERITED"]
        state.warnings = notes[:MOST_WARNINGS]
        state.side_effects = effects_of(parts)
        bad = [number for number, part in enumerate(parts) if part.status.is_bad]
        try:
            state.output = self._check_size(outputs)
        except ValueError as unfit:
            raise StepFailed("OUTPUT_INVALID", f"the outputs of all items together: {unfit}", "step/output") from None
        if not bad:
            return self._judge_skipped(work.name, state, parts)
        first = parts[bad[0]]
        error = first.error or {}
        known = error.get("context")
        context = {**(known if isinstance(known, dict) else {}), "items_failed": bad[:MOST_WARNINGS]}
        shown = one_line(str(self._run.redaction.value(as_text(items[bad[0]]))), ITEM_SHOWN)
        which = f"item {bad[0] + 1} of {len(items)} ({shown})" + (f" and {len(bad) - 1} more" if len(bad) > 1 else "")
        state.error = {**error, "message": f"{which}: {error.get('message', '')}", "context": context}
        state.ending = first.ending
        state.is_cut_short = any(part.is_cut_short for part in parts)
        return first.status

    def _is_wound_down(self, name: str) -> bool:
        """Return whether nothing more of a step is to begin: it, or its run, was asked to wind down."""
        return self._run.call.winding_down is not None or name in self._run.wound_down

    def _judge_skipped(self, name: str, state: StepState, parts: list[StepState]) -> Status:
        """Return the status of a step of which no item has failed: cancelled if there are some that never began."""
        skipped = [number for number, part in enumerate(parts) if part.status is Status.SKIPPED]
        if not skipped:
            return Status.SUCCEEDED
        state.cancel()
        what = "step" if name in self._run.wound_down else "run"
        message = f"{len(skipped)} of {len(parts)} items were not started: the {what} winds down"
        state.error = {**(state.error or {}), "message": message, "context": {"items_skipped": skipped[:MOST_WARNINGS]}}
        state.ending = Ending.CANCELLED.value
        return Status.CANCELLED

    # --- tries --------------------------------------------------------------------------------------------

    async def _approve_and_try(self, work: _Work) -> Status:
        step, state = work.step, work.state
        if not step.approval:
            return await self._try_repeatedly(work)
        approval = StepApproval(self._run, state.key_in(self._run.run_id), used=state.proposal_id)
        rendered = await self.renderer.render_step(step, self._with_deadline(work))
        tries, deadline = most_tries(self._workflow, step), self._run.deadlines.of(work.name)
        approved = await approval.ask(state.id, step, rendered, tries, deadline)
        if isinstance(approved, RefusedStep):
            return self._record_try(step, state, AnsweredTry(approved.envelope, None, approved.rule))
        state.proposal_id, work.approved, work.approval = approval.used, approved, approval
        ended: Mapping[str, Any] | None = {"code": "CANCELLED"}
        try:
            verdict = await self._try_repeatedly(work)
            ended = (state.error or {}) if verdict.is_bad else None
        except StepFailed as failed:
            ended = failed.error
            raise
        except asyncio.CancelledError:
            if self._person_wait.parked.done() and state.put_off().proposal_id is not None:
                approval.used = None  # what became of it is known once the run has gone on
            raise
        finally:
            approval.record(ended)
        return verdict

    async def _try_repeatedly(self, work: _Work) -> Status:
        step, state, retry = work.step, work.state, retry_of(self._workflow, work.step)
        most, deadline = most_tries(self._workflow, step), self._run.deadlines.of(work.name)
        may_start = self._run.deadlines.may_start
        while True:
            state.attempts += 1
            state.side_effects = None  # of the try before
            began_ns = state.try_began_ns = monotonic_ns()
            try:
                result = await self._try(work)
            except StepFailed:  # what it is to be tried with could not be made, so it was not
                state.attempts -= 1
                if state.attempts > state.cut_off:
                    state.side_effects = state.earlier_effects
                raise
            verdict = await self._record_aside(step, state, result)
            state.used_ms = (monotonic_ns() - began_ns) // NS_PER_MS
            if verdict is Status.SUCCEEDED and await self._fail_if_holds(step, state, work.scope):
                verdict = Status.FAILED
                state.error = _error("FAIL_IF", f"fail_if holds: {step.fail_if}", "step/fail_if")
            tries = state.attempts - state.cut_off
            if not verdict.is_bad or tries >= most or retry is None:
                return verdict
            if retry.on and state.exit_code not in retry.on and (state.error or {})["code"] not in retry.on:
                return verdict
            if not may_start(work.name) or self._is_wound_down(work.name):
                return verdict
            pause_ms = delay_ms(retry, tries)
            if retry.backoff.jitter:
                import random  # slow to import, and most steps do not wait for another attempt

                pause_ms = int(pause_ms * random.uniform(0.5, 1.0))
            wanted = result.envelope.error or {}
            pause_ms = max(pause_ms, int(wanted.get("retry_after_ms") or 0))  # type: ignore[call-overload]
            if deadline is not None and deadline.remaining_ms(monotonic_ns()) <= pause_ms:
                return verdict  # the next try would have no time left
            state.earlier_effects = state.effects
            await asyncio.sleep(pause_ms / 1000)

    async def _fail_if_holds(self, step: StepPart, state: StepState, scope: dict[str, Any]) -> bool:
        if step.fail_if is None:
            return False
        visible = await self.renderer.with_variables(step, step.fail_if, {**scope, "output": state.output})
        return await self.renderer.evaluate(step.fail_if, visible, self._left_for_output(step, state))

    def _left_for_output(self, step: StepPart, state: StepState) -> int | None:
        """Return what the try has left of the step's timeout, for what judges or shapes the output; None is enough."""
        timeout_ms = step_timeout_ms(self._workflow, step)
        if not timeout_ms or timeout_ms - state.used_ms >= TEMPLATE_MS:
            return None
        return max(LEAST_TEMPLATE_MS, timeout_ms - state.used_ms)

    async def _record_aside(self, step: StepPart, state: StepState, result: AnsweredTry) -> Status:
        """Record a try, in a thread where its output is so large that reading it would hold up all other steps."""
        if not isinstance(result.output, str) or len(result.output) <= LARGE:
            return self._record_try(step, state, result)
        recording = asyncio.ensure_future(asyncio.to_thread(self._record_try, step, state, result))
        try:
            return await asyncio.shield(recording)
        finally:
            await asyncio.wait([recording])  # bounded by the size of the output

    def _record_try(self, step: StepPart, state: StepState, result: AnsweredTry) -> Status:
        envelope, data = result.envelope, result.envelope.data
        trouble: str | None = None
        kept: tuple[str, ...] = ()
        shown = ["stderr"]
        try:
            if result.cut is not None:
                raise ValueError(f"{result.cut}; {OUTPUT_LIMIT} are the most")
            output, kept = _read_output(step, result.output)
            state.output = self._check_size(output)
        except ValueError as unfit:
            state.output, trouble = None, f"its output cannot be passed on: {unfit}"
            if isinstance(result.output, str) and self._find_excess(result.output) is None:
                state.output = self._run.redaction.value(result.output.removesuffix("\n"))
            else:
                shown.append("stdout")
        state.details = self._run.redaction.value(dict(result.details or {}))
        state.partial = bool(state.details.pop("partial", False))
        state.exit_code = None
        if isinstance(step, CommandStep | ToolStep) and isinstance(data, dict):
            state.exit_code = data.get("exit_code")  # type: ignore[assignment]
        state.ending = envelope.ending
        effects = SideEffects(str(envelope.meta["side_effects"]))
        state.side_effects = effects_of_all((state.earlier_effects, effects), ended_well=envelope.ok)
        notes = [*envelope.warnings, warn_of_kept(kept)] if kept else envelope.warnings
        if written_timeout(step) is None:  # that it has less than its kind may take is nobody's surprise
            notes = [note for note in notes if note["code"] != "DEADLINE_INHERITED"]
        state.warnings = [self._run.redaction.value(note) for note in notes]
        state.error = None
        if envelope.error is None and trouble is None:
            return Status.SUCCEEDED
        error = dict(envelope.error or _error("OUTPUT_INVALID", str(trouble), "step/output"))
        if effects is SideEffects.NONE is not state.side_effects:  # a repeat could do what an earlier try has done
            error["retryable"] = False
        known = error.get("context")
        context = dict(known) if isinstance(known, dict) else {}
        if result.rule is not None:
            context["rule"] = result.rule
        for stream in shown:
            if isinstance(data, dict) and stream in data:
                # In this order: half a secret would not be known for one.
                context[stream] = str(self._run.redaction.value(data[stream]))[-END_SHOWN:]
        if context:
            error["context"] = context
        if isinstance(suggestion := error.get("suggestion"), str):
            error["suggestion"] = _IN_DATA.sub(lambda found: _IN_STEP.get(found[1], f"output.{found[1]}"), suggestion)
        state.error = self._run.redaction.value(error)
        self._note_cut_short(state, envelope.fired)
        return Status.TIMED_OUT if _is_timeout(envelope) else Status.FAILED

    def _check_size(self, output: Any) -> Any:
        """Return what the steps behind it get of an output. Raise ValueError where it is too large."""
        if (excess := self._find_excess(output)) is not None:
            raise ValueError(excess)
        return self._run.redaction.value(output)

    def _find_excess(self, value: Any) -> str | None:
        """Return why a value is too large to be handed on, if it is."""
        text, limit = as_text(value), self._run.json_limit
        # No character is more than four bytes, or more than twelve characters of JSON.
        if len(text) * 4 > OUTPUT_LIMIT and len(text.encode("utf-8", "surrogatepass")) > OUTPUT_LIMIT:
            return f"it is more than {OUTPUT_LIMIT} bytes"
        if limit is not None and len(text) * 12 > limit and len(json.dumps(value)) > limit:
            return f"it is more than {limit} characters of JSON, the most on this engine"
        return None

    async def _try(self, work: _Work) -> AnsweredTry:
        run, step, state = self._run, work.step, work.state
        rendered = work.approved or await self.renderer.render_step(step, self._with_deadline(work))
        settings, values, own_env, folder = rendered
        call = StepCall(
            work.name,
            settings,
            self._make_clocks(step),
            {**run.base_env, **own_env} if own_env else run.base_env,
            folder,
            key=f"{state.key_in(run.run_id)}.{state.attempts}",
            run_began_at=run.began_at,
            waits=self._person_wait.waits,
            item=work.item,
            parks=self._person_wait.budget_ms is not None,
            values=values,
            own_env=own_env,
            holds_secret=run.redaction.holds,
            run_file=self._run_file,
            redact=run.redaction.text,
            overtime=self._overtime_of(step, run.folder),
            min_time_ms=0 if step.min_time is None else duration_ms(step.min_time, STEP_TYPES[step.type].unit),
            tools=_FileTools(self, work) if step.type == "ai" else None,
            used_ms=state.cut_off_ms,
            is_approved=work.approval is not None,
        )
        state.cut_off_ms = 0
        # A run inside this one says by itself whether it works.
        left = self._person_wait.leave_to_parts() if step.type == "workflow" else contextlib.nullcontext()
        outer = current_scope.get()
        assert outer is not None, "steps are tried inside of a run"
        # That of the run, which may have been extended since the step began.
        token = current_scope.set(_change_scope(outer, run.deadlines.of(work.name), outer.span, outer.call))
        try:
            with left:
                if work.approval is not None:
                    await work.approval.compare_programs()
                may_start = run.deadlines.may_start(work.name)  # the run's clock may have rung for another item
                return await try_step(run.providers[step.type], call, run.runtime, may_start=may_start)
        except asyncio.CancelledError as cancelled:
            state.ending, state.error = Ending.CANCELLED.value, None
            if (kept := answered_before(cancelled)) is not None:
                self._record_try(step, state, kept)
            raise
        finally:
            current_scope.reset(token)

    def _overtime_of(self, step: StepPart, folder: Path) -> OvertimePolicy | None:
        """Return the overtime of a step. Whoever decides about it is looked for beside the workflow."""
        policy = overtime_of(self._workflow, step)
        if policy is None:
            return None
        if policy.observer is ObserverKind.MODEL:
            self._run.runtime.overtime_observers.register(ObserverKind.MODEL, self._ask_model)
        return replace(policy, folder=str(folder))

    async def warm_observers(self) -> None:
        """Start the processes of the models that decide about overtime: they take seconds to come up."""
        policies = (overtime_of(self._workflow, step) for step in self._workflow.steps.values())
        model = next((each for each in policies if each is not None and each.observer is ObserverKind.MODEL), None)
        if model is not None:
            from ..providers.ai import AiProvider

            models = self._run.providers["ai"]
            assert isinstance(models, AiProvider)
            await models.warm(model.model)

    async def _ask_model(self, call: Call, summary: dict[str, Any]) -> OvertimeDecision:
        from ..providers.ai import AiProvider

        models = self._run.providers["ai"]
        assert isinstance(models, AiProvider)
        return await models.observe_overtime(call, summary)

    def _with_deadline(self, work: _Work) -> dict[str, Any]:
        """Return what the templates of a try see: also how many milliseconds it has, where that is known."""
        timeout_ms = step_timeout_ms(self._workflow, work.step)
        deadline = self._run.deadlines.of(work.name)
        left_ms = None if deadline is None else deadline.remaining_ms(monotonic_ns())
        limits = [limit for limit in (timeout_ms or None, left_ms) if limit is not None]
        return {**work.scope, "deadline": {"remaining": min(limits, default=None)}}

    async def call_tool(self, work: _Work, name: str, arguments: Mapping[str, Any]) -> AnsweredTry:
        """Call a tool of the file for a step, as a call of its own inside the one that this is made in."""
        run, tool, step_id = self._run, self._workflow.tools[name], f"{work.name} tool {name}"
        step: StepPart
        try:
            if work.approval is not None:
                await work.approval.compare_programs()
            if tool.workflow is None:
                step = ToolStep(type="tool", tool=name)
                rendered = await self.renderer.render_tool(step, arguments, work.scope)
            else:
                timeout = None if tool.timeout is None else f"{duration_ms(tool.timeout, 'ms')}ms"
                step = WorkflowStep(type="workflow", workflow=tool.workflow, timeout=timeout)
                rendered = await self.renderer.render_step(step, work.scope)
                inputs = {"inputs": dict(arguments)}
                rendered = rendered._replace(settings={**rendered.settings, **inputs}, folder=run.folder)
                # A try of its own: what a process that died has begun for an agent is never taken up again.
                step_id = f"{work.name}.{name}" + (f".try{work.state.attempts}" if work.state.attempts > 1 else "")
        except StepFailed as failed:
            raise Failure(failed.error["code"], str(failed)) from None
        settings, values, own_env, folder = rendered
        # Stopped with the step that called it, it has no longer than that to be gone.
        clocks = replace(self._make_clocks(step), grace_ms=self._make_clocks(work.step).grace_ms)
        call = StepCall(
            step_id,
            settings,
            clocks,
            {**run.base_env, **own_env} if own_env else run.base_env,
            folder,
            values=values,
            own_env=own_env,
            holds_secret=run.redaction.holds,
            redact=run.redaction.text,
            item=work.item,
            run_file=self._run_file,
        )
        return await try_step(run.providers[step.type], call, run.runtime)

    async def describe_tool(self, name: str) -> FileTool:
        tool = self._workflow.tools[name]
        if tool.workflow is None:
            return FileTool(name, tool.description or "", tool.input_schema or {"type": "object"})
        file = self._run.folder / tool.workflow
        inner = await asyncio.to_thread(inner_workflow, file, self._run.files, unattended=True)
        return FileTool(name, tool.description or inner.description or inner.name or "", schema_of_inputs(inner))

    def _make_clocks(self, step: StepPart) -> Clocks:
        unit, defaults = STEP_TYPES[step.type].unit, self._workflow.defaults

        def limit(own: object, default: object) -> int | None:
            return duration_ms(own, unit) if own is not None else None if default is None else duration_ms(default, "s")

        others = {
            f"{name}_ms": limit(getattr(step, name), getattr(defaults, name))
            for name in WORK_CLOCKS
            if name != "timeout"
        }
        clocks = Clocks(step_timeout_ms(self._workflow, step) or 0, **others)
        # The same for most steps, and everybody below knows the same ones again.
        return self._clocks_of.setdefault(clocks, clocks)

    # --- what came out ------------------------------------------------------------------------------------

    async def _judge_output(self, step: StepPart, state: StepState, scope: dict[str, Any]) -> None:
        if step.transform is not None:
            visible = await self.renderer.with_variables(step, step.transform, scope)
            limit_ms = self._left_for_output(step, state)
            made = await self.renderer.render_value(step.transform, {**visible, "output": state.output}, limit_ms)
            if isinstance(made, str) and templates.sole_expression(step.transform) is None:
                made = read_printed(made).value
            try:
                state.output = self._check_size(made)
            except ValueError as error:
                raise StepFailed("OUTPUT_INVALID", f"what transform made: {error}", "step/output") from None
        if step.output_schema is not None:
            limit_ms = self._left_for_output(step, state)
            misfit = await self.renderer.find_misfit(step.output_schema, state.output, limit_ms)
            if misfit is not None:
                message = f"its output does not fit output_schema: {misfit.why}"
                raise StepFailed("OUTPUT_INVALID", message, "step/output", misfit.ended)
        if step.for_each is True and not isinstance(state.output, list):
            message = f"`for_each: true` needs a list as output, and the output is {_kind_of(state.output)}"
            raise StepFailed("OUTPUT_INVALID", message, "step/for_each")


async def try_step(provider: Provider, step: StepCall, runtime: Runtime, *, may_start: bool = True) -> AnsweredTry:
    """Begin the call of one try, let the provider carry it out, and answer it: the only place that does either. Where
    the try may not start any more, it answers NO_TIME_LEFT.

    A cancellation is passed on, with what came of the try until then where the provider says so (`answered_before`).
    """
    call = runtime.begin(step.name, {}, step.clocks)
    call.min_time_ms = step.min_time_ms
    if step.used_ms:
        call.count_from(call.started_ns - step.used_ms * NS_PER_MS)
    if step.overtime is not None:
        call.overtime = Overtime(step.overtime)
    outer = current_scope.get() or Scope(runtime.inherited, -1, "caller", call)
    token = current_scope.set(_change_scope(outer, outer.deadline, outer.span, call))
    work = call.work = _TryWork(call, provider.step_type.can_extend)
    enter(call)
    start_control(call, runtime.observe)
    try:
        if call.no_time_left or not may_start:
            result = StepResult(no_time_left(call))
        else:
            result = await provider.run(step, call, runtime)
    except Failure as failure:
        outcome = outcome_of_error(failure)
        outcome.ending = Ending.NOT_STARTED
        result = StepResult(outcome)
    except asyncio.CancelledError as cancelled:
        left = result_left_by(cancelled)
        if not work.take_back_cancellation():
            if left is not None:
                cancelled.answered_try = _answer_try(provider, call, left)  # type: ignore[attr-defined]
            raise
        result = _unwound_result(call, left)
    finally:
        current_scope.reset(token)
        leave(call)
    return _answer_try(provider, call, result)


class _TryWork(Work):
    """A try whose provider has no work of its own: what it calls is told to wind down by itself, and the try is
    cancelled once its time for that is over. A provider that has some puts it in this one's place."""

    __slots__ = ("_call", "_can_extend", "_is_stopped", "_limit_ms", "_task")

    def __init__(self, call: Call, can_extend: bool) -> None:
        self._call = call
        self._can_extend = can_extend
        self._limit_ms = call.clocks.timeout_ms or 0
        self._task = asyncio.current_task()
        self._is_stopped = False

    def move_bell(self) -> bool:
        """Let what is called for the step have what the step has now: it has what was left of the step's own limit,
        inside the same deadline. Whoever else waits looks at the bell again when the old one rings."""
        if not self._can_extend:
            return False
        call, before_ms = self._call, self._limit_ms
        longer_ms = (call.clocks.timeout_ms or 0) - before_ms
        made = [each for each in calls_made_by(call) if each.parent is call.parent and each.name != OBSERVER_NAME]
        if longer_ms and not all(control_of(each).follow_caller(each.parent, longer_ms) for each in made):
            return False
        self._limit_ms = before_ms + longer_ms
        return True

    async def look(self) -> WorkView:
        """Return nothing but whether it has begun: not while an App or a library is imported for it."""
        return WorkView(has_begun=not self._can_extend or bool(calls_made_by(self._call)))

    def stop_unwound(self) -> None:
        if self._task is not None and not self._is_stopped:
            self._is_stopped = True
            self._task.cancel()

    def take_back_cancellation(self) -> bool:
        """Return whether it was this, and nobody else, who has cancelled the try."""
        return self._is_stopped and self._task is not None and self._task.uncancel() == 0


def _unwound_result(call: Call, left: StepResult | None) -> StepResult:
    """Return the result of a try that was stopped because it did not wind down, with what came of it until then."""
    problem = wound_down_problem(call)
    if left is None:
        return StepResult(Outcome(Ending.CANCELLED, problem))
    known = left.outcome
    if isinstance(known, Envelope):
        survivors: Any = known.meta.get("survivors") or ()
        known = Outcome(Ending(known.ending), problem, known.data, survivors=survivors)
    known.problem = problem
    return StepResult(known, left.output, left.rule)


def answered_before(cancelled: asyncio.CancelledError) -> AnsweredTry | None:
    """Return the answer of the try that was cancelled, where there is one."""
    tried = getattr(cancelled, "answered_try", None)
    return tried if isinstance(tried, AnsweredTry) else None


def _answer_try(provider: Provider, call: Call, result: StepResult) -> AnsweredTry:
    envelope = result.outcome if isinstance(result.outcome, Envelope) else answer(call, result.outcome)
    if result.rewrite is not None:
        envelope = result.rewrite(envelope)
    rule = result.rule or provider.step_type.rule_for(envelope.code)
    return AnsweredTry(envelope, result.output, rule, result.details, result.cut)


class _FileTools:
    """The tools of the file, for one try of a step that calls them by itself."""

    def __init__(self, executor: StepExecutor, work: _Work) -> None:
        self._executor, self._work = executor, work
        self._approved_files = approved_files.get()  # a call is made by another task than the try

    async def describe(self, name: str) -> FileTool:
        return await self._executor.describe_tool(name)

    async def call(self, name: str, arguments: Mapping[str, Any]) -> tuple[Envelope, Any]:
        approved_files.set(self._approved_files)
        answered = await self._executor.call_tool(self._work, name, arguments)
        return answered.envelope, answered.output


def _read_output(step: StepPart, output: Any) -> Read:
    if not isinstance(output, str) or STEP_TYPES[step.type].has_typed_output:
        return as_plain(output)
    match step.output_format if isinstance(step, CommandStep) else "auto":
        case "text":
            return Read(output.removesuffix("\n"))
        case "json":
            try:
                return read_json(output)
            except ValueError as error:
                raise ValueError(f"`output_format` says json, and the output is not JSON: {error}") from None
    return read_printed(output)


# Where a step has what a suggestion of the error registry looks for in the data of a call.
_IN_DATA = re.compile(r"\bdata\.(\w+)")
_IN_STEP = {"stderr": "error.context.stderr", "exit_code": "exit_code", "body": "output"}


def _kind_of(value: Any) -> str:
    """Return the type of a value in the words of JSON."""
    kinds = {dict: "an object", str: "text", bool: "true or false", type(None): "nothing"}
    return kinds.get(type(value), "a number")


def _limit_items(items: list[Any]) -> list[Any]:
    if len(items) > MOST_ITEMS:
        raise StepFailed("STEP_INVALID", f"for_each has {len(items)} items; {MOST_ITEMS} at most", "step/for_each")
    return items


def _error(code: str, message: str, rule: str) -> dict[str, Any]:
    return StepFailed(code, message, rule).error | {"phase": "execution"}


def _is_timeout(envelope: Envelope) -> bool:
    return envelope.code in ("TIMEOUT", "STALLED", "NO_TIME_LEFT", "QUEUE_TIMEOUT", "OPERATION_TIMEOUT")


# --- spans ------------------------------------------------------------------------------------------------
# The ids of a span are made in any case, because the calls below it tell theirs to what they start.


def trace_steps(execute: Execute, deadline_of: Callable[[str], Deadline | None]) -> Execute:
    """Return the same function with everything that it calls below a span of the step's own, and inside the step's
    deadline."""

    async def execute_traced(name: str, step: StepPart, state: StepState, scope: dict[str, Any]) -> None:
        outer = current_scope.get()
        assert outer is not None, "steps are executed inside of a run"
        run = outer.span.trace
        own, began_ns = run.below(new_span_id()), monotonic_ns()
        token = current_scope.set(_change_scope(outer, deadline_of(name), own, outer.call))
        try:
            await execute(name, step, state, scope)
        finally:
            current_scope.reset(token)
            if spans.recorder is not None:
                ended_ns = wall_ns()
                span = _span(state, own, run.span_id, ended_ns - (monotonic_ns() - began_ns), ended_ns)
                spans.recorder.tell(lambda: span)

    return execute_traced


def record_skipped_span(state: StepState) -> None:
    """Record the span of a step that was never executed."""
    outer = current_scope.get()
    if spans.recorder is not None and outer is not None:
        run, now_ns = outer.span.trace, wall_ns()
        span = _span(state, run.below(new_span_id()), run.span_id, now_ns, now_ns)
        spans.recorder.tell(lambda: span)


def _overtime_attributes(state: StepState) -> dict[str, spans.Attribute]:
    """Say what was decided about its time; not for which reasons, which may quote what is secret."""
    asked = [told for told in state.overtime if told["event"] == "overtime"]
    wound_down = [told for told in state.overtime if told["event"] == "wind_down"]
    attributes: dict[str, spans.Attribute] = {}
    if asked:
        attributes["shotclock.overtime.requests"] = len(asked)
        attributes["shotclock.overtime.granted_ms"] = sum(told["granted_ms"] for told in asked)
    if wound_down:
        attributes["shotclock.wind_down.by"] = str(wound_down[0]["by"])
    return attributes


def _span(state: StepState, own: TraceContext, run_id: str, started_ns: int, ended_ns: int) -> spans.Span:
    """Make the span of a step at once: its state changes when the step runs again."""
    # It is not final where a cancellation has gone through it.
    status = state.status if state.status.is_final else Status.CANCELLED
    attributes: dict[str, spans.Attribute] = {
        "shotclock.kind": "step",
        "shotclock.step.id": state.id,
        "shotclock.step.type": state.type,
        "shotclock.step.status": status.value,
        "shotclock.step.attempts": state.attempts,
    }
    if state.timeout_ms:
        attributes["shotclock.timeout_ms"] = state.timeout_ms
    if state.ending is not None:
        attributes["shotclock.ending"] = state.ending
    if state.reason is not None:
        attributes["shotclock.step.reason"] = state.reason.value
    if state.cause is not None:
        attributes["shotclock.step.cause"] = state.cause
    attributes |= _overtime_attributes(state)
    code, message = None, ""
    if status.is_bad:
        error = state.error or {}
        code = str(error.get("code") or status.value.upper())
        message = str(error.get("message") or "")  # without secrets: the state has none
    return spans.Span(f"step {state.id}", own, run_id, started_ns, ended_ns, attributes, code, message)


def _change_scope(scope: Scope, deadline: Deadline | None, span: Traced, call: Any) -> Scope:
    """Return a copy with these. Each step of a run has three: `replace` takes several times as long."""
    return Scope(deadline, scope.depth, scope.name, span, call, scope.overtime_address)
