"""The executor of steps: condition, items, approval, attempts and output."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import traceback
from collections import ChainMap
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from ...calls.call import Call
from ...calls.supervised_commands import run_shielded
from ...core.envelope import Envelope, warning
from ...core.errors import Ending, Failure, SideEffects, effects_of_all
from ...core.json_values import Read, as_plain, as_text, describe_value, read_json, read_printed, warn_of_kept
from ...core.limits import NS_PER_MS, WORK_CLOCKS, Clocks, Fired
from ...core.overtime import ObserverKind, OvertimeDecision, OvertimePolicy
from ...core.value_types import JsonObject, record, replace
from ...core.visible_text import one_line
from ...supervise.clock import monotonic_ns
from ...worker.context import current_scope
from ..check.lint import approved_files, inner_workflow
from ..check.plan import (
    groups_of,
    is_output_used,
    items_come_from,
    most_attempts,
    overtime_of,
    retry_of,
    step_clock_ms,
    step_timeout_ms,
    written_timeout,
)
from ..file import templates
from ..file.schema import schema_of_inputs
from ..file.shell_quoting import find_unheard
from ..steps.command import CommandStep, ToolStep
from ..steps.provider import STEP_TYPES, FileTool, RunFile, StepCall, StepPart, duration_ms
from ..steps.workflow import WorkflowStep
from ._kept_items import digest_of, match_items, record_finished
from ._step_approval import StepApproval
from .artifacts import COLLECT_LIMIT_MS, LEAST_LIMIT_MS
from .run_context import ParallelSlots, RunContext, steps_at_work
from .state import (
    Reason,
    Status,
    StepError,
    StepState,
    TemplateScope,
    effects_of,
    explain_limit,
    longest_attempts,
)
from .step_attempt import AnsweredAttempt, change_scope, run_attempt, scope_of_run
from .step_log import PRINTING, AttemptLog
from .step_renderer import LEAST_TEMPLATE_MS, TEMPLATE_MS, RenderedStep, StepFailed, StepRenderer

ITEMS_AT_ONCE = 8
MOST_ITEMS = 10_000
MOST_WARNINGS = 50
ITEM_SHOWN = 40
TRACEBACK_FRAMES = 20
OUTPUT_LIMIT = 60_000_000
LARGE_OUTPUT = 1_000_000
END_SHOWN = 2_000
# The registry's suggestions name data of a call; a step has it elsewhere.
_OF_ITEM = re.compile(r"\{\{.*\b(item|index|matrix)\b", re.DOTALL)
_IN_DATA = re.compile(r"\bdata\.(\w+)")
_IN_STEP = {"stderr": "error.context.stderr", "exit_code": "exit_code", "body": "output"}


@record
class _Work:
    name: str
    step: StepPart
    state: StepState
    scope: TemplateScope
    item: tuple[int, int] = (0, 1)
    approved: RenderedStep | None = None
    """The approved step. It runs unchanged."""
    approval: StepApproval | None = None


class StepExecutor:
    def __init__(self, run: RunContext, run_file: RunFile) -> None:
        self._run = run
        self._workflow = run.workflow
        self._run_file = run_file
        self._person_wait = run.shared.person_wait
        self.renderer: StepRenderer = StepRenderer(run)
        self._clocks_of: dict[Clocks, Clocks] = {}
        self._folders: dict[str, dict[int, Path]] = {}
        """The working directories of steps with artifacts, by item."""

    def folders_of(self, name: str) -> dict[int, Path]:
        return self._folders.setdefault(name, {})

    async def execute(self, name: str, step: StepPart, state: StepState, scope: TemplateScope) -> None:
        """Execute one step and leave its state final."""
        token = steps_at_work.set((*steps_at_work.get(), state))
        try:
            with self._person_wait.at_work():
                await self._execute(name, step, state, scope)
        finally:
            steps_at_work.reset(token)

    async def _execute(self, name: str, step: StepPart, state: StepState, scope: TemplateScope) -> None:
        self._run.winding_down.discard(name)  # it may run again
        try:
            visible = await self.renderer.with_variables(step, step.if_, scope)
            if step.if_ is not None and not await self.renderer.evaluate(step.if_, visible):
                state.status, state.reason = Status.SKIPPED, Reason.CONDITION
                return
            items, source = await self._find_items(step, scope)
            work = _Work(name, step, state, scope)
            # Final only when nothing can change it any more, because others read it meanwhile.
            if items is None:
                verdict = await self.approve_and_attempt(work)
            else:
                verdict = await _Items(self, self._run, work, items, source).carry_out()
            if verdict is Status.SUCCEEDED:
                await self._judge_output(step, state, scope)
            state.status = await self._keep_artifacts(step, state, verdict)
        except StepFailed as failed:
            await self._keep_artifacts(step, state, Status.FAILED)
            self.record_failure(state, failed)
        except asyncio.CancelledError:
            await self._keep_artifacts(step, state, Status.CANCELLED)
            raise
        except Exception as error:  # a bug: the step fails with its traceback
            context = {"traceback": "".join(traceback.format_exception(error, limit=TRACEBACK_FRAMES))}
            bug = {"code": "INTERNAL_ERROR", "message": f"{type(error).__name__}: {error}", "retryable": False}
            state.status = Status.FAILED
            state.error = self._run.redaction.value(bug | {"phase": "execution", "context": context})

    async def _keep_artifacts(self, step: StepPart, state: StepState, verdict: Status) -> Status:
        """Keep the files of a step that has ended, and return its status, which a missing file may change."""
        run, folders = self._run, self._folders.pop(state.id, {})  # a step that never began has none
        if run.artifacts is None or not folders or run.shared.person_wait.parked.done():
            return verdict
        bell = run.deadlines.of(state.id)  # not that of the run, which keeps time for clean-up and `finally`
        left_ms = COLLECT_LIMIT_MS if bell is None else bell.remaining_ms(monotonic_ns())
        limit_ms = max(LEAST_LIMIT_MS, min(COLLECT_LIMIT_MS, left_ms))
        places = set(folders.values())
        # The items that are kept from another run have folders of their own there.
        is_shared = len(places) == 1 and not (state.kept_items and _OF_ITEM.search(step.cwd or ""))
        named = {state.id: places.pop()} if is_shared else {f"{state.id}[{at}]": each for at, each in folders.items()}
        keeping = asyncio.ensure_future(run.artifacts.keep(state.id, named, step.artifacts, limit_ms))
        await run_shielded(asyncio.wait([keeping]))  # bounded by its limit
        kept = keeping.result()
        state.artifacts = run.redaction.value(kept.artifacts)
        if verdict is not Status.SUCCEEDED:
            kept.missing = []
        state.warnings = [*state.warnings, *(run.redaction.value(note) for note in kept.warnings())]
        needed = [wanted.path for wanted in kept.missing if wanted.if_missing == "error"]
        if not needed:
            return verdict
        message = f"no file matches {', '.join(map(repr, needed))} in its working directory"
        state.error = _error("ARTIFACT_MISSING", message, "step/artifacts")
        return Status.FAILED

    def record_failure(self, state: StepState, failed: StepFailed) -> None:
        phase = "execution" if state.attempts else "validation"
        state.status, state.error = Status.FAILED, failed.error | {"phase": phase}
        self._record_cut_short(state, failed.fired)

    def _record_cut_short(self, state: StepState, fired: Fired | None) -> None:
        """Note whether the run's own timeout stopped a step. The error then names that limit."""
        state.is_cut_short = self._run.deadlines.record_fired(fired)
        if state.is_cut_short and state.error is not None:
            clock = self._run.get_fired()
            context = {**(state.error.get("context") or {}), "clock": clock.as_context()}
            # The error of a step that never began already names what it waited for.
            limit = f"stopped: {explain_limit(self._run.call, clock)}"
            message = limit if state.error["code"] == "TIMEOUT" else state.error["message"]
            state.error = {**state.error, "message": message, "context": context}

    def is_wound_down(self, name: str) -> bool:
        return self._run.call.winding_down is not None or name in self._run.winding_down

    async def _find_items(self, step: StepPart, scope: TemplateScope) -> tuple[list[Any] | None, str | None]:
        """Return the items of a step, and the step that they come from."""
        items: Any = step.items
        source = None
        if items is None or isinstance(items, bool):
            source = self._find_source(step, scope)
            if source is None:
                return None, None
            items = scope["outputs"].get(source, [])
        else:
            items = await self.renderer.render(items, scope)
            if isinstance(items, str):
                items = read_printed(items).value
            if not isinstance(items, list):
                raise StepFailed("STEP_INVALID", f"for_each is {_kind_of(items)}, not a list", "step/for_each")
        if len(items) > MOST_ITEMS:
            raise StepFailed("STEP_INVALID", f"for_each has {len(items)} items; {MOST_ITEMS} at most", "step/for_each")
        return items, source

    def _find_source(self, step: StepPart, scope: TemplateScope) -> str | None:
        sources = items_come_from(self._workflow, step)
        for group in groups_of(step.depends_on) if sources else ():
            # Of several alternatives the one that succeeded, if any.
            first = min(group, key=lambda name: name not in scope["outputs"], default=None)
            if first in sources:
                return first
        return None

    async def approve_and_attempt(self, work: _Work) -> Status:
        step, state = work.step, work.state
        if not step.approval:
            return await self._attempt_repeatedly(work)
        approval = StepApproval(self._run, state.key_in(self._run.run_id), used=state.proposal_id)
        rendered = await self.renderer.render_step(step, self._with_deadline(work))
        attempts, find_end = most_attempts(self._workflow, step), partial(self._run.deadlines.of, work.name)
        approved = await approval.ask(state.id, step, rendered, attempts, find_end)
        if isinstance(approved, AnsweredAttempt):
            return self._record_attempt(step, state, approved)
        state.proposal_id, work.approved, work.approval = approval.used, approved, approval
        error: StepError | None = {"code": "CANCELLED"}
        try:
            verdict = await self._attempt_repeatedly(work)
            error = (state.error or {}) if verdict.is_bad else None
        except StepFailed as failed:
            error = failed.error
            raise
        except asyncio.CancelledError:
            if self._person_wait.parked.done() and state.put_off().proposal_id is not None:
                approval.used = None  # its outcome is known only after the run is resumed
            raise
        finally:
            approval.record(error)
        return verdict

    async def _attempt_repeatedly(self, work: _Work) -> Status:
        step, state, retry = work.step, work.state, retry_of(self._workflow, work.step)
        most, deadline = most_attempts(self._workflow, step), self._run.deadlines.of(work.name)
        while True:
            state.attempts += 1
            state.side_effects = None  # of the attempt before
            began_ns = state.attempt_began_ns = monotonic_ns()
            try:
                result = await self._attempt(work)
            except StepFailed:  # the step could not be rendered, so it was not tried
                state.attempts -= 1
                if state.attempts > state.attempts_cut_off:
                    state.side_effects = state.earlier_effects
                raise
            verdict = await self._record_aside(step, state, result)
            state.used_ms = (monotonic_ns() - began_ns) // NS_PER_MS
            if verdict is Status.SUCCEEDED and await self._fail_if_holds(step, state, work.scope):
                verdict = Status.FAILED
                state.error = _error("FAIL_IF", f"fail_if holds: {step.fail_if}", "step/fail_if")
            state.record_attempt(state.used_ms, verdict, f"step {work.name}")
            attempts = state.attempts - state.attempts_cut_off
            if not verdict.is_bad or attempts >= most or retry is None:
                return verdict
            if retry.on and state.exit_code not in retry.on and (state.error or {})["code"] not in retry.on:
                return verdict
            if not self._run.deadlines.may_start(work.name) or self.is_wound_down(work.name):
                return verdict
            error: Mapping[str, Any] = result.envelope.error or {}
            pause_ms = retry.backoff.pause_ms(attempts, int(error.get("retry_after_ms") or 0))
            if deadline is not None and deadline.remaining_ms(monotonic_ns()) <= pause_ms:
                return verdict  # the next attempt would have no time left
            state.earlier_effects = state.effects
            await asyncio.sleep(pause_ms / 1000)

    async def _fail_if_holds(self, step: StepPart, state: StepState, scope: TemplateScope) -> bool:
        if step.fail_if is None:
            return False
        visible = await self.renderer.with_variables(step, step.fail_if, {**scope, "output": state.output})
        return await self.renderer.evaluate(step.fail_if, visible, self._left_for_output(step, state))

    def _left_for_output(self, step: StepPart, state: StepState) -> int | None:
        """Return the rest of the step's timeout for templates about its output; None if it is long enough."""
        timeout_ms = step_timeout_ms(self._workflow, step)
        if not timeout_ms or timeout_ms - state.used_ms >= TEMPLATE_MS:
            return None
        return max(LEAST_TEMPLATE_MS, timeout_ms - state.used_ms)

    async def _record_aside(self, step: StepPart, state: StepState, result: AnsweredAttempt) -> Status:
        """Record an attempt, in a thread if reading its output would delay other steps."""
        if not isinstance(result.output, str) or len(result.output) <= LARGE_OUTPUT:
            return self._record_attempt(step, state, result)
        recording = asyncio.ensure_future(asyncio.to_thread(self._record_attempt, step, state, result))
        try:
            return await asyncio.shield(recording)
        finally:
            await asyncio.wait([recording])  # bounded by the size of the output

    def _record_attempt(self, step: StepPart, state: StepState, result: AnsweredAttempt) -> Status:
        envelope, data = result.envelope, result.envelope.data
        trouble: str | None = None
        kept: tuple[str, ...] = ()
        is_cut, shown = False, ["stderr"]
        try:
            if result.cut is not None:
                raise ValueError(result.cut)
            output, kept = _read_output(step, result.output)
            state.output = self.check_size(output)
        except ValueError as unfit:
            state.output, trouble = None, f"its output cannot be passed on: {unfit}"
            is_long = result.is_long or (isinstance(result.output, str) and self.find_excess(result.output) is not None)
            # The outputs of a nested file may be those of its step, and a worker has only a part of the file.
            is_part = len(self._run.files) > 1 or self._run.json_limit is not None
            is_used = is_part or is_output_used(self._workflow, step, state.id)
            if is_long and envelope.error is None and not is_used:
                printed = result.output or (data.get("stdout") if isinstance(data, dict) else "")
                state.output = str(self._run.redaction.value(printed))[-END_SHOWN:]
                cut = warning("OUTPUT_TRUNCATED", f"nothing uses its output, of which only the end is kept: {unfit}")
                envelope.warnings, trouble, is_cut = [*envelope.warnings, cut], None, True
            elif isinstance(result.output, str) and not is_long:
                state.output = self._run.redaction.value(result.output.removesuffix("\n"))
            else:
                shown.append("stdout")
        state.details = self._run.redaction.value(dict(result.details or {}))
        state.partial = bool(state.details.pop("partial", False)) or is_cut
        state.exit_code = None
        if isinstance(step, CommandStep | ToolStep) and isinstance(data, dict):
            state.exit_code = data.get("exit_code")  # type: ignore[assignment]
        state.ending = envelope.ending
        effects = SideEffects(str(envelope.meta["side_effects"]))
        state.side_effects = effects_of_all((state.earlier_effects, effects), ended_well=envelope.ok)
        notes = [*envelope.warnings, warn_of_kept(kept)] if kept else envelope.warnings
        if written_timeout(step) is None:  # the author did not ask for the longer default timeout
            notes = [note for note in notes if note["code"] != "DEADLINE_INHERITED"]
        state.warnings = [self._run.redaction.value(note) for note in notes]
        state.error = None
        if envelope.error is None and trouble is None:
            return Status.SUCCEEDED
        error = dict(envelope.error or _error("OUTPUT_INVALID", str(trouble), "step/output"))
        if effects is SideEffects.NONE is not state.side_effects:  # an earlier attempt may have had effects
            error["retryable"] = False
        context = dict(error["context"]) if isinstance(error.get("context"), dict) else {}
        if result.rule is not None:
            context["rule"] = result.rule
        for stream in shown:
            if isinstance(data, dict) and stream in data:
                # Redacted before it is cut: half a secret would not be recognised.
                context[stream] = str(self._run.redaction.value(data[stream]))[-END_SHOWN:]
        if context:
            error["context"] = context
        if envelope.code == "COMMAND_FAILED" and isinstance(step, CommandStep) and not context.get("stderr"):
            error["message"] = f"{error['message']}{_perhaps_in_pipe(step.exec)}"
        if isinstance(suggestion := error.get("suggestion"), str):
            error["suggestion"] = _IN_DATA.sub(lambda found: _IN_STEP.get(found[1], f"output.{found[1]}"), suggestion)
        state.error = self._run.redaction.value(error)
        self._record_cut_short(state, envelope.fired)
        return Status.TIMED_OUT if envelope.code in _TIMEOUTS else Status.FAILED

    def check_size(self, output: Any) -> Any:
        if (excess := self.find_excess(output)) is not None:
            raise ValueError(excess)
        return self._run.redaction.value(output)

    def find_excess(self, value: Any) -> str | None:
        text, limit = as_text(value), self._run.json_limit
        # A character takes at most four bytes, and at most twelve characters of JSON.
        if len(text) * 4 > OUTPUT_LIMIT and len(text.encode("utf-8", "surrogatepass")) > OUTPUT_LIMIT:
            return f"it is more than {OUTPUT_LIMIT} bytes"
        if limit is not None and len(text) * 12 > limit[0] and len(json.dumps(value)) > limit[0]:
            return f"it is more than {limit[0]} characters of JSON, {limit[1]}"
        return None

    async def _attempt(self, work: _Work) -> AnsweredAttempt:
        run, step, state = self._run, work.step, work.state
        rendered = work.approved or await self.renderer.render_step(step, self._with_deadline(work))
        folders = self.folders_of(work.name) if step.artifacts else {}
        is_new = work.item[0] not in folders
        folders[work.item[0]] = rendered.folder
        log = self.open_log(step, state.id, state.attempts)
        call = self.make_call(
            work.name,
            rendered,
            self.make_clocks(step),
            work.item,
            log,
            key=f"{state.key_in(run.run_id)}.{state.attempts}",
            run_began_at=run.began_at,
            waits=self._person_wait.waits,
            parks=self._person_wait.budget_ms is not None,
            overtime=self._overtime_of(step, run.folder),
            min_time_ms=0 if step.min_time is None else duration_ms(step.min_time, STEP_TYPES[step.type].unit),
            tools=_FileTools(self, run, work) if step.type == "ai" else None,
            used_ms=state.cut_off_ms,
            is_approved=work.approval is not None,
        )
        state.cut_off_ms = 0
        # A nested run reports by itself whether it works or only waits for people.
        left = self._person_wait.leave_to_parts() if step.type == "workflow" else contextlib.nullcontext()
        outer = scope_of_run()
        # The deadline of the run, which may have been extended since the step began.
        token = current_scope.set(change_scope(outer, run.deadlines.of(work.name), outer.span, outer.call))
        kept: list[AnsweredAttempt] = []
        try:
            with left:
                if work.approval is not None:
                    await work.approval.compare_programs()
                may_start = run.deadlines.may_start(work.name)  # the run's timeout may have stopped another item
                answered = await run_attempt(
                    run.shared.providers[step.type],
                    call,
                    run.shared.runtime,
                    may_start=may_start,
                    ask_model=self._ask_model,
                    on_cancelled=kept.append,
                )
                if work.approval is not None:
                    answered.envelope.warnings += await work.approval.warn_of_changes()
                if is_new and answered.envelope.ending == Ending.NOT_STARTED:
                    del folders[work.item[0]]  # files there are not of this step
                return answered
        except StepFailed:  # before it began
            if is_new:
                del folders[work.item[0]]
            raise
        except asyncio.CancelledError:
            state.ending, state.error = Ending.CANCELLED.value, None
            for partial in kept:
                self._record_attempt(step, state, partial)
            raise
        finally:
            current_scope.reset(token)
            if log is not None:
                log.close()

    def open_log(self, step: StepPart, name: str, number: int) -> AttemptLog | None:
        logs = self._run.logs
        return logs.open(name, number) if logs is not None and step.type in PRINTING else None

    def make_call(
        self,
        step_id: str,
        rendered: RenderedStep,
        clocks: Clocks,
        item: tuple[int, int],
        log: AttemptLog | None = None,
        **more: Any,
    ) -> StepCall:
        run, (settings, values, own_env, folder) = self._run, rendered
        if log is not None:
            more["on_output"] = log.add
        return StepCall(
            step_id,
            settings,
            clocks,
            {**run.base_env, **own_env} if own_env else run.base_env,
            folder,
            item=item,
            values=values,
            own_env=own_env,
            holds_secret=run.redaction.holds,
            redact=run.redaction.text,
            run_file=self._run_file,
            **more,
        )

    def _overtime_of(self, step: StepPart, folder: Path) -> OvertimePolicy | None:
        """Return the overtime of a step. Its program is looked for beside the workflow."""
        policy = overtime_of(self._workflow, step)
        return None if policy is None else replace(policy, folder=str(folder))

    async def warm_observers(self) -> None:
        """Start the models that decide about overtime, because that takes seconds."""
        policies = (overtime_of(self._workflow, step) for step in self._workflow.steps.values())
        model = next((each for each in policies if each is not None and each.observer is ObserverKind.MODEL), None)
        if model is not None:
            models: Any = self._run.shared.providers["ai"]
            await models.warm(model.model)

    async def _ask_model(self, call: Call, summary: JsonObject) -> OvertimeDecision:
        models: Any = self._run.shared.providers["ai"]
        decision: OvertimeDecision = await models.observe_overtime(call, summary)
        return decision

    def _with_deadline(self, work: _Work) -> JsonObject:
        """Return the scope of an attempt with `deadline.remaining`, if known."""
        timeout_ms = step_timeout_ms(self._workflow, work.step)
        deadline = self._run.deadlines.of(work.name)
        left_ms = None if deadline is None else deadline.remaining_ms(monotonic_ns())
        limits = [limit for limit in (timeout_ms or None, left_ms) if limit is not None]
        return {**work.scope, "deadline": {"remaining": min(limits, default=None)}}

    def make_clocks(self, step: StepPart) -> Clocks:
        others = {f"{name}_ms": step_clock_ms(self._workflow, step, name) for name in WORK_CLOCKS if name != "timeout"}
        clocks = Clocks(step_timeout_ms(self._workflow, step) or 0, **others)
        return self._clocks_of.setdefault(clocks, clocks)  # one object for the many steps with equal limits

    async def _judge_output(self, step: StepPart, state: StepState, scope: TemplateScope) -> None:
        if step.transform is not None:
            visible = await self.renderer.with_variables(step, step.transform, scope)
            limit_ms = self._left_for_output(step, state)
            made = await self.renderer.render_value(step.transform, {**visible, "output": state.output}, limit_ms)
            if isinstance(made, str) and templates.sole_expression(step.transform) is None:
                made = read_printed(made).value
            try:
                state.output = self.check_size(made)
            except ValueError as error:
                raise StepFailed("OUTPUT_INVALID", f"the output of transform: {error}", "step/output") from None
        if step.output_schema is not None:
            schema, what = step.output_schema, "its output does not fit output_schema"
            limit_ms = self._left_for_output(step, state)
            await self.renderer.check_schema(schema, state.output, "OUTPUT_INVALID", what, "step/output", limit_ms)
        if step.for_each is True and not isinstance(state.output, list):
            message = f"`for_each: true` needs a list as output, and the output is {_kind_of(state.output)}"
            raise StepFailed("OUTPUT_INVALID", message, "step/for_each")


class _Items:
    def __init__(
        self, executor: StepExecutor, run: RunContext, work: _Work, items: list[Any], source: str | None
    ) -> None:
        self._executor, self._run, self._work, self._items, self._source = executor, run, work, items, source
        step, state = work.step, work.state
        outer = run.slots if STEP_TYPES[step.type].takes_slot else None
        self._slots = ParallelSlots(min(ITEMS_AT_ONCE, run.workflow.max_parallelism), outer)
        self._parts = [StepState(f"{work.name}[{number}]", step.type) for number in range(len(items))]
        state.items = self._parts
        self._digests = [digest_of(item) for item in items]
        for number, written in match_items(state.parts, self._digests).items():
            self._parts[number] = StepState.from_record({**written, "id": self._parts[number].id})
            if written.get("folder") is not None and self._parts[number].status.is_final:  # in an earlier process
                executor.folders_of(work.name)[number] = Path(written["folder"])
        self._is_clean_up = run.call.winding_down is not None  # no other step begins then

    async def carry_out(self) -> Status:
        parts, state, person_wait = self._parts, self._work.state, self._run.shared.person_wait
        try:
            with person_wait.leave_to_parts():
                async with asyncio.TaskGroup() as group:
                    for number in range(len(parts)):
                        group.create_task(self._carry_out_item(number))
        except asyncio.CancelledError:  # the partial outputs are kept
            stopped = next((part for part in parts if part.ending and not part.status.is_final), None)
            with contextlib.suppress(ValueError):
                state.output = self._executor.check_size([part.output for part in parts])
            state.attempts = state.attempts_cut_off + sum(part.attempts for part in parts)
            state.ended_attempts = longest_attempts([each for part in parts for each in part.ended_attempts])
            if stopped is not None:
                state.error, state.ending = stopped.error, stopped.ending
            if person_wait.parked.done():
                later = (part if part.status.is_final else part.to_parked() for part in parts)
                records = [self._to_record(number, part) for number, part in enumerate(later)]
                state.parts = records if self._executor.find_excess(records) is None else []
            else:
                self._keep_finished()
            raise
        return self._judge()

    def _keep_finished(self) -> None:
        """Note which items succeeded, for a run that continues this one."""
        state, transforms = self._work.state, self._work.step.transform is not None
        state.kept_items = sum(part.kept_from is not None for part in self._parts)
        is_recorded = self._run.record_item is not None and (transforms or state.output is not None)
        records = record_finished(self._parts, self._digests, with_outputs=transforms) if is_recorded else []
        state.parts = records if not transforms or self._executor.find_excess(records) is None else []

    async def _carry_out_item(self, number: int) -> None:
        part, work, item = self._parts[number], self._work, self._items[number]
        if part.status.is_final:  # before the run was parked, or its process died
            return
        scope = {**work.scope, "item": item, "index": number}
        if work.step.matrix is not None:
            scope["matrix"] = item
        if self._source is not None:  # templates name the source for its current item
            scope["outputs"] = ChainMap({self._source: item}, work.scope["outputs"])
        async with self._slots.hold_one():
            if self._executor.is_wound_down(work.name) and not self._is_clean_up:
                part.status = Status.SKIPPED
                return
            steps_at_work.set((*steps_at_work.get(), part))  # in the task of this item
            with self._run.shared.person_wait.at_work():
                try:
                    part.label = one_line(str(self._run.redaction.value(describe_value(item))), ITEM_SHOWN)
                    part.status = Status.RUNNING
                    await self._write(number)
                    one = _Work(work.name, work.step, part, scope, (number, len(self._items)))
                    part.status = await self._executor.approve_and_attempt(one)
                except StepFailed as failed:
                    self._executor.record_failure(part, failed)
                except Failure as failure:
                    self._executor.record_failure(part, StepFailed(failure.code, str(failure), "step/items"))
            with contextlib.suppress(Failure):  # without a record of its end it counts as cut off
                await self._write(number)

    def _to_record(self, number: int, part: StepState) -> JsonObject:
        record = {**part.to_record(), "item": self._digests[number]}
        if self._work.step.artifacts and (folder := self._executor.folders_of(self._work.name).get(number)) is not None:
            record["folder"] = str(folder)  # its files are kept when all items have ended, perhaps by another process
        return record

    async def _write(self, number: int) -> None:
        if self._run.record_item is not None:
            await self._run.record_item(self._work.name, number, self._to_record(number, self._parts[number]))

    def _judge(self) -> Status:
        parts, state = self._parts, self._work.state
        state.attempts = state.attempts_cut_off + sum(part.attempts for part in parts)
        state.ended_attempts = longest_attempts([each for part in parts for each in part.ended_attempts])
        notes = [note for part in parts for note in part.warnings if note["code"] != "DEADLINE_INHERITED"]
        state.warnings = notes[:MOST_WARNINGS]
        state.side_effects = effects_of(parts)
        try:
            state.output = self._executor.check_size([part.output for part in parts])
        except ValueError as unfit:
            state.parts = []
            raise StepFailed("OUTPUT_INVALID", f"the outputs of all items together: {unfit}", "step/output") from None
        self._keep_finished()
        bad = [number for number, part in enumerate(parts) if part.status.is_bad]
        if not bad:
            return self._judge_skipped()
        first = parts[bad[0]]
        error = first.error or {}
        context = error["context"] if isinstance(error.get("context"), dict) else {}
        shown = one_line(str(self._run.redaction.value(describe_value(self._items[bad[0]]))), ITEM_SHOWN)
        which = f"item {bad[0] + 1} of {len(parts)} ({shown})" + (f" and {len(bad) - 1} more" if len(bad) > 1 else "")
        state.error = {
            **error,
            "message": f"{which}: {error.get('message', '')}",
            "context": {**context, "items_failed": bad[:MOST_WARNINGS]},
        }
        state.ending = first.ending
        state.is_cut_short = any(part.is_cut_short for part in parts)
        return first.status

    def _judge_skipped(self) -> Status:
        """Return the status of a step without failed items: cancelled if some of them never began."""
        state = self._work.state
        skipped = [number for number, part in enumerate(self._parts) if part.status is Status.SKIPPED]
        if not skipped:
            return Status.SUCCEEDED
        state.cancel()
        what = "step" if self._work.name in self._run.winding_down else "run"
        message = f"{len(skipped)} of {len(self._parts)} items were not started: the {what} winds down"
        state.error = {**(state.error or {}), "message": message, "context": {"items_skipped": skipped[:MOST_WARNINGS]}}
        state.ending = Ending.CANCELLED.value
        return Status.CANCELLED


class _FileTools:
    def __init__(self, executor: StepExecutor, run: RunContext, work: _Work) -> None:
        self._executor, self._run, self._work = executor, run, work
        self._approved_files = approved_files.get()  # another task than the attempt makes the calls

    async def describe(self, name: str) -> FileTool:
        tool = self._run.workflow.tools[name]
        if tool.workflow is None:
            return FileTool(name, tool.description or "", tool.input_schema or {"type": "object"})
        file = self._run.folder / tool.workflow
        inner = await asyncio.to_thread(inner_workflow, file, self._run.files, unattended=True)
        return FileTool(name, tool.description or inner.description or inner.name or "", schema_of_inputs(inner))

    async def call(self, name: str, arguments: Mapping[str, Any]) -> tuple[Envelope, Any]:
        approved_files.set(self._approved_files)
        run, work, executor = self._run, self._work, self._executor
        tool, step_id = run.workflow.tools[name], f"{work.name} tool {name}"
        step: StepPart
        try:
            if work.approval is not None:
                await work.approval.compare_programs()
            if tool.workflow is None:
                step = ToolStep(type="tool", tool=name)
                rendered = await executor.renderer.render_step(step, work.scope, arguments)
            else:
                timeout = None if tool.timeout is None else f"{duration_ms(tool.timeout, 'ms')}ms"
                step = WorkflowStep(type="workflow", workflow=tool.workflow, timeout=timeout)
                rendered = await executor.renderer.render_step(step, work.scope)
                settings = {**rendered.settings, "inputs": dict(arguments)}
                rendered = rendered._replace(settings=settings, folder=run.folder)
                # Each attempt has its own name: a nested run of an agent is never resumed.
                step_id = f"{work.name}.{name}" + (f".try{work.state.attempts}" if work.state.attempts > 1 else "")
        except StepFailed as failed:
            raise Failure(failed.error["code"], str(failed)) from None
        # A tool is stopped together with its step, and has the same grace.
        clocks = replace(executor.make_clocks(step), grace_ms=executor.make_clocks(work.step).grace_ms)
        log = executor.open_log(step, f"{work.state.id} tool {name}", work.state.attempts)
        call = executor.make_call(step_id, rendered, clocks, work.item, log)
        try:
            answered = await run_attempt(run.shared.providers[step.type], call, run.shared.runtime)
        finally:
            if log is not None:
                log.close()
        return answered.envelope, answered.output


_TIMEOUTS = ("TIMEOUT", "STALLED", "NO_TIME_LEFT", "QUEUE_TIMEOUT", "OPERATION_TIMEOUT")


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


def _kind_of(value: Any) -> str:
    return {dict: "an object", str: "text", bool: "true or false", type(None): "nothing"}.get(type(value), "a number")


def _error(code: str, message: str, rule: str) -> StepError:
    return StepFailed(code, message, rule).error | {"phase": "execution"}


def _perhaps_in_pipe(script: str) -> str:
    """Name the programs in pipes: nothing shows which failed, or what the shell knows."""
    unheard = find_unheard(templates.with_marks(script))
    return f"; where the shell has `pipefail`, perhaps that of {' or '.join(unheard)}" if unheard else ""
