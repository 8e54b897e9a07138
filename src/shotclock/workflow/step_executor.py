"""One step from its condition to its output: templates rendered, tries repeated, the result judged.

The span of a step is above the calls of its tries and below its run:

    run nightly ─┬─ step fetch ─── try fetch ─── what the server does
                 ├─ step build ─┬─ try build
                 │              └─ try build ─── exec ─── …
                 └─ step audit ─── run audit ─── step scan ─── try scan
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import traceback
from collections import ChainMap
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from ..core.clocks import Clocks
from ..core.deadlines import NS_PER_MS, Deadline
from ..core.effects import Ending, SideEffects
from ..core.envelope import Envelope
from ..core.errors import Failure
from ..core.graph import groups_of
from ..core.redaction import Redaction
from ..core.texts import one_line
from ..core.trace import TraceContext
from ..core.values import Read, as_plain, as_text, read_json, read_printed, warn_of_kept
from ..core.walltime import WallTime
from ..inbox.inbox import Inbox
from ..process import spans
from ..process.clock import monotonic_ns, wall_ns
from ..providers.command import CommandStep
from ..providers.provider import Provider, Providers, StepCall, StepResult, result_left_by
from ..providers.step_type import STEP_TYPES, StepPart, duration_ms
from ..providers.workflow import RunFile
from ..runtime.call import Call, answer, new_span_id, no_time_left
from ..runtime.handlers import outcome_of_error
from ..runtime.loop_call import current_scope
from ..runtime.runtime import Runtime
from . import templates
from .plan import delay_ms, items_come_from, retry_of, step_timeout_ms, written_timeout
from .scheduler import Deadlines, Execute, ParallelSlots
from .schema import WorkflowFile
from .state import Reason, Status, StepState, effects_of
from .step_approval import PersonWait, Refused, StepGate, key_of
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
# Characters of JSON that one step can hand on: what the store takes of a step, less what else is known of it.
OUTPUT_LIMIT = 60_000_000
# Of what a command that failed said on stderr: the end of it, where the reason mostly is.
STDERR_KEPT = 2_000


class AnsweredTry(NamedTuple):
    """One try of a step, once it is over."""

    envelope: Envelope
    output: Any = None
    rule: str | None = None
    """What kind of failure it was, as `command/timeout`; found in error.context.rule."""


class Steps:
    """Executes the steps of one workflow."""

    def __init__(
        self,
        workflow: WorkflowFile,
        runtime: Runtime,
        providers: Providers,
        renderer: StepRenderer,
        *,
        base_env: Mapping[str, str],
        redaction: Redaction,
        deadlines: Deadlines,
        run_id: str,
        run_began_at: WallTime,
        attention: PersonWait,
        inbox: Callable[[], Inbox],
        places: ParallelSlots,
        run_file: RunFile,
    ) -> None:
        """`base_env` is what children see without asking."""
        self._run_id = run_id
        self._run_began_at = run_began_at
        self._attention = attention
        self._inbox = inbox
        self._places = places
        self._run_file = run_file
        self._workflow = workflow
        self._runtime = runtime
        self._renderer = renderer
        self._providers = providers
        self._base_env = base_env
        self._redaction = redaction
        self._deadlines = deadlines
        self._clocks_of: dict[tuple[int | None, ...], Clocks] = {}

    async def execute(self, name: str, step: StepPart, state: StepState, scope: dict[str, Any]) -> None:
        """Execute one step and leave its state final. A cancellation is passed on."""
        with self._attention.at_work():
            await self._execute(name, step, state, scope)

    async def _execute(self, name: str, step: StepPart, state: StepState, scope: dict[str, Any]) -> None:
        try:
            seen = await self._renderer.with_variables(step, step.if_, scope)
            if step.if_ is not None and not await self._renderer.evaluate(step.if_, seen):
                state.status, state.reason = Status.SKIPPED, Reason.CONDITION
                return
            items, source = await self._find_items(step, scope)
            # Its status is final only when nothing more can change it: others look at it meanwhile.
            if items is None:
                verdict = await self._approve_and_try(name, step, state, scope)
            else:
                verdict = await self._try_items(name, step, state, scope, items, source)
            if verdict is Status.SUCCEEDED:
                await self._judge_output(step, state, scope)
            state.status = verdict
        except StepFailed as failed:
            self._note_failure(state, failed)
        except Exception as error:  # ours: the step fails, and whoever waits for it is told
            bug = {"code": "INTERNAL_ERROR", "message": f"{type(error).__name__}: {error}", "retryable": False}
            context = {"traceback": "".join(traceback.format_exception(error, limit=TRACEBACK_KEPT))}
            state.status = Status.FAILED
            state.error = self._redaction.value(bug | {"phase": "execution", "context": context})

    def _note_failure(self, state: StepState, failed: StepFailed) -> None:
        state.status, state.error = Status.FAILED, failed.error_after(state.attempts)
        state.is_cut_short = failed.fired is not None and self._deadlines.owns(failed.fired.source)

    # --- items --------------------------------------------------------------------------------------------

    async def _find_items(self, step: StepPart, scope: dict[str, Any]) -> tuple[list[Any] | None, str | None]:
        """Return the items (None where there are none) and the step whose output they are, if it is another."""
        items: Any = step.for_each
        if items is None or isinstance(items, bool):
            return self._find_items_of_others(step, scope)
        items = await self._renderer.render(items, scope)
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

    async def _try_items(
        self,
        name: str,
        step: StepPart,
        state: StepState,
        scope: dict[str, Any],
        items: list[Any],
        source: str | None,
    ) -> Status:
        around = self._places if STEP_TYPES[step.type].takes_slot else None
        places = ParallelSlots(min(ITEMS_AT_ONCE, self._workflow.max_parallelism), around)
        parts = [StepState(f"{name}[{number}]", step.type) for number in range(len(items))]
        if len(state.parts) == len(parts):
            parts = [StepState.from_record(record) for record in state.parts]
        state.parts = []

        async def one(number: int, item: Any) -> None:
            if parts[number].status.is_final:  # before the run was parked
                return
            here = {**scope, "item": item, "index": number}
            if source is not None:  # the one output that is meant is this item's
                here["outputs"] = ChainMap({source: item}, scope["outputs"])
            async with places.one():
                with self._attention.at_work():
                    try:
                        item = (number, len(items))
                        parts[number].status = await self._approve_and_try(name, step, parts[number], here, item)
                    except StepFailed as failed:
                        self._note_failure(parts[number], failed)

        try:
            with self._attention.leave_to_parts():
                async with asyncio.TaskGroup() as group:
                    for number, item in enumerate(items):
                        group.create_task(one(number, item))
        except asyncio.CancelledError:  # what they had said until then is kept, as that of one would be
            stopped = next((part for part in parts if part.ending and not part.status.is_final), None)
            with contextlib.suppress(ValueError):
                state.output = self._check_size([part.output for part in parts])
            state.attempts = sum(part.attempts for part in parts)
            if stopped is not None:
                state.error, state.ending = stopped.error, stopped.ending
            if self._attention.parked.done():
                records = [(part if part.status.is_final else part.to_parked()).to_record() for part in parts]
                state.parts = [] if _is_too_large(records) else records
            raise
        outputs = [part.output for part in parts]
        state.attempts = sum(part.attempts for part in parts)
        notes = [note for part in parts for note in part.warnings if note["code"] != "DEADLINE_INHERITED"]
        state.warnings = notes[:MOST_WARNINGS]
        state.side_effects = effects_of(parts)
        bad = [number for number, part in enumerate(parts) if part.status.is_bad]
        try:
            state.output = self._check_size(outputs)
        except ValueError as unfit:
            raise StepFailed("OUTPUT_INVALID", f"the outputs of all items together: {unfit}", "step/output") from None
        if not bad:
            return Status.SUCCEEDED
        first = parts[bad[0]]
        error = first.error or {}
        known = error.get("context")
        context = {**(known if isinstance(known, dict) else {}), "items_failed": bad[:MOST_WARNINGS]}
        shown = one_line(str(self._redaction.value(as_text(items[bad[0]]))), ITEM_SHOWN)
        which = f"item {bad[0] + 1} of {len(items)} ({shown})" + (f" and {len(bad) - 1} more" if len(bad) > 1 else "")
        state.error = {**error, "message": f"{which}: {error.get('message', '')}", "context": context}
        state.ending = first.ending
        state.is_cut_short = any(part.is_cut_short for part in parts)
        return first.status

    # --- tries --------------------------------------------------------------------------------------------

    async def _approve_and_try(
        self, name: str, step: StepPart, state: StepState, scope: dict[str, Any], item: tuple[int, int] = (0, 1)
    ) -> Status:
        retry = retry_of(self._workflow, step)
        most = 1 + (retry.max if retry is not None else 0)
        deadline = self._deadlines.of(name)
        if step.approval:
            gate = StepGate(
                self._inbox(),
                key_of(self._run_id, state),
                self._attention.waits,
                self._redaction,
                self._run_began_at,
                used=state.proposal_id,
            )
            rendered = await self._renderer.render_step(step, scope)
            approved = await gate.ask(state.id, step, rendered, most, deadline)
            if isinstance(approved, Refused):
                return self._record_try(step, state, AnsweredTry(approved.envelope, None, approved.rule))
            state.proposal_id = gate.used
            ended: Mapping[str, Any] | None = {"code": "CANCELLED"}
            try:
                verdict = await self._try_repeatedly(name, step, state, scope, item, approved)
                ended = (state.error or {}) if verdict.is_bad else None
            except StepFailed as failed:
                ended = failed.error
                raise
            except asyncio.CancelledError:
                if self._attention.parked.done() and state.put_off().proposal_id is not None:
                    gate.used = None  # what became of it is known once the run has gone on
                raise
            finally:
                gate.record(ended)
            return verdict
        return await self._try_repeatedly(name, step, state, scope, item, None)

    async def _try_repeatedly(
        self,
        name: str,
        step: StepPart,
        state: StepState,
        scope: dict[str, Any],
        item: tuple[int, int],
        approved: RenderedStep | None,
    ) -> Status:
        retry = retry_of(self._workflow, step)
        most = 1 + (retry.max if retry is not None else 0)
        deadline = self._deadlines.of(name)
        while True:
            state.attempts += 1
            state.side_effects = None  # of the try before
            began_ns = monotonic_ns()
            try:
                result = await self._try(name, step, state, scope, item, approved)
            except StepFailed:  # what it is to be tried with could not be made, so it was not
                state.attempts -= 1
                raise
            verdict = self._record_try(step, state, result)
            state.used_ms = (monotonic_ns() - began_ns) // NS_PER_MS
            if verdict is Status.SUCCEEDED and await self._fail_if_holds(step, state, scope):
                verdict = Status.FAILED
                state.error = _error("FAIL_IF", f"fail_if holds: {step.fail_if}", "step/fail_if")
            if not verdict.is_bad or state.attempts >= most or retry is None:
                return verdict
            pause_ms = delay_ms(retry, state.attempts)
            if retry.backoff.jitter:
                pause_ms = int(pause_ms * random.uniform(0.5, 1.0))
            wanted = result.envelope.error or {}
            pause_ms = max(pause_ms, int(wanted.get("retry_after_ms") or 0))  # type: ignore[call-overload]
            if deadline is not None and deadline.remaining_ms(monotonic_ns()) <= pause_ms:
                return verdict  # the next try would have no time left
            await asyncio.sleep(pause_ms / 1000)

    async def _fail_if_holds(self, step: StepPart, state: StepState, scope: dict[str, Any]) -> bool:
        if step.fail_if is None:
            return False
        seen = await self._renderer.with_variables(step, step.fail_if, {**scope, "output": state.output})
        return await self._renderer.evaluate(step.fail_if, seen, self._left_for_output(step, state))

    def _left_for_output(self, step: StepPart, state: StepState) -> int | None:
        """Return what the try has left of the step's timeout, for what judges or shapes the output; None is enough."""
        timeout_ms = step_timeout_ms(self._workflow, step)
        if not timeout_ms or timeout_ms - state.used_ms >= TEMPLATE_MS:
            return None
        return max(LEAST_TEMPLATE_MS, timeout_ms - state.used_ms)

    def _record_try(self, step: StepPart, state: StepState, result: AnsweredTry) -> Status:
        envelope = result.envelope
        trouble: str | None = None
        kept: tuple[str, ...] = ()
        try:
            output, kept = _read_output(step, result.output)
            state.output = self._check_size(output)
        except ValueError as unfit:
            state.output, trouble = None, f"its output cannot be passed on: {unfit}"
            if isinstance(result.output, str) and not _is_too_large(result.output):
                state.output = self._redaction.value(result.output.removesuffix("\n"))
        state.ending = envelope.ending
        state.side_effects = SideEffects(str(envelope.meta["side_effects"]))
        notes = [*envelope.warnings, warn_of_kept(kept)] if kept else envelope.warnings
        if written_timeout(step) is None:  # that it has less than its kind may take is nobody's surprise
            notes = [note for note in notes if note["code"] != "DEADLINE_INHERITED"]
        state.warnings = [self._redaction.value(note) for note in notes]
        state.error = None
        if envelope.error is None and trouble is not None:
            state.error = _error("OUTPUT_INVALID", trouble, "step/output")
            return Status.FAILED
        if envelope.error is None:
            return Status.SUCCEEDED
        error = dict(envelope.error)
        known = error.get("context")
        context = dict(known) if isinstance(known, dict) else {}
        if result.rule is not None:
            context["rule"] = result.rule
        if isinstance(envelope.data, dict) and envelope.data.get("stderr"):
            # In this order: half a secret would not be known for one.
            context["stderr"] = str(self._redaction.value(envelope.data["stderr"]))[-STDERR_KEPT:]
        if context:
            error["context"] = context
        state.error = self._redaction.value(error)
        state.is_cut_short = envelope.fired is not None and self._deadlines.owns(envelope.fired.source)
        return Status.TIMED_OUT if _is_timeout(envelope) else Status.FAILED

    def _check_size(self, output: Any) -> Any:
        """Return what the steps behind it get of an output. Raise ValueError where it is too large."""
        if _is_too_large(output):
            raise ValueError(f"it is more than {OUTPUT_LIMIT} characters of JSON")
        return self._redaction.value(output)

    async def _try(
        self,
        name: str,
        step: StepPart,
        state: StepState,
        scope: dict[str, Any],
        item: tuple[int, int],
        approved: RenderedStep | None,
    ) -> AnsweredTry:
        settings, values, asked, folder = approved or await self._renderer.render_step(step, scope)
        env = {**self._base_env, **asked} if asked else self._base_env
        key = f"{key_of(self._run_id, state)}.{state.attempts}"
        call = StepCall(
            name,
            settings,
            self._make_clocks(step),
            env,
            folder,
            key,
            self._run_began_at,
            self._attention.waits,
            item,
            self._attention.budget_ms is not None,
            values,
            asked,
            self._redaction.holds,
            self._run_file,
            self._redaction.text,
        )
        # A run inside this one says by itself whether it works.
        left = self._attention.leave_to_parts() if step.type == "workflow" else contextlib.nullcontext()
        try:
            with left:
                return await try_step(self._providers[step.type], call, self._runtime)
        except asyncio.CancelledError as cancelled:
            state.ending, state.error = Ending.CANCELLED.value, None
            if (kept := answered_before(cancelled)) is not None:
                self._record_try(step, state, kept)
            raise

    def _make_clocks(self, step: StepPart) -> Clocks:
        unit, defaults = STEP_TYPES[step.type].unit, self._workflow.defaults

        def limit(own: object, default: object) -> int | None:
            return duration_ms(own, unit) if own is not None else None if default is None else duration_ms(default, "s")

        limits = (
            step_timeout_ms(self._workflow, step) or 0,
            limit(step.soft, defaults.soft),
            limit(step.idle, defaults.idle),
            limit(step.grace, defaults.grace),
        )
        if limits not in self._clocks_of:  # the same for most steps, and everybody below knows the same ones again
            timeout_ms, soft_ms, idle_ms, grace_ms = limits
            self._clocks_of[limits] = Clocks(timeout_ms, soft_ms=soft_ms, idle_ms=idle_ms, grace_ms=grace_ms)
        return self._clocks_of[limits]

    # --- what came out ------------------------------------------------------------------------------------

    async def _judge_output(self, step: StepPart, state: StepState, scope: dict[str, Any]) -> None:
        if step.transform is not None:
            seen = await self._renderer.with_variables(step, step.transform, scope)
            limit_ms = self._left_for_output(step, state)
            made = await self._renderer.render_value(step.transform, {**seen, "output": state.output}, limit_ms)
            if isinstance(made, str) and templates.sole_expression(step.transform) is None:
                made = read_printed(made).value
            try:
                state.output = self._check_size(made)
            except ValueError as error:
                raise StepFailed("OUTPUT_INVALID", f"what transform made: {error}", "step/output") from None
        if step.output_schema is not None:
            limit_ms = self._left_for_output(step, state)
            misfit = await self._renderer.find_misfit(step.output_schema, state.output, limit_ms)
            if misfit is not None:
                message = f"its output does not fit output_schema: {misfit.why}"
                raise StepFailed("OUTPUT_INVALID", message, "step/output", misfit.ended)
        if step.for_each is True and not isinstance(state.output, list):
            message = f"`for_each: true` needs a list as output, and the output is {_kind_of(state.output)}"
            raise StepFailed("OUTPUT_INVALID", message, "step/for_each")


async def try_step(provider: Provider, step: StepCall, runtime: Runtime) -> AnsweredTry:
    """Begin the call of one try, let the provider carry it out, and answer it: the only place that does either.

    A cancellation is passed on, with what came of the try until then where the provider says so (`answered_before`).
    """
    call = runtime.begin(step.name, {}, step.clocks)
    try:
        result = StepResult(no_time_left(call)) if call.no_time_left else await provider.run(step, call, runtime)
    except Failure as failure:
        outcome = outcome_of_error(failure)
        outcome.ending = Ending.NOT_STARTED
        result = StepResult(outcome)
    except asyncio.CancelledError as cancelled:
        if (left := result_left_by(cancelled)) is not None:
            cancelled.answered_try = _answer_try(provider, call, left)  # type: ignore[attr-defined]
        raise
    return _answer_try(provider, call, result)


def answered_before(cancelled: asyncio.CancelledError) -> AnsweredTry | None:
    """Return the answer of the try that was cancelled, where there is one."""
    tried = getattr(cancelled, "answered_try", None)
    return tried if isinstance(tried, AnsweredTry) else None


def _answer_try(provider: Provider, call: Call, result: StepResult) -> AnsweredTry:
    envelope = result.outcome if isinstance(result.outcome, Envelope) else answer(call, result.outcome)
    if result.rewrite is not None:
        envelope = result.rewrite(envelope)
    return AnsweredTry(envelope, result.output, result.rule or provider.step_type.rule_for(envelope.code))


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


def _is_too_large(value: Any) -> bool:
    """Return whether a value is too large for the store, which escapes what is not ASCII with six characters."""
    if isinstance(value, str) and len(value) * 6 <= OUTPUT_LIMIT:
        return False
    return len(json.dumps(value)) > OUTPUT_LIMIT


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
# The span of a step: above the calls of its tries, below its run.
#
#     run nightly ─┬─ step fetch ─── try fetch ─── what the server does
#                  ├─ step build ─┬─ try build
#                  │              └─ try build ─── exec ─── …
#                  └─ step audit ─── run audit ─── step scan ─── try scan
#
# Its ids are made in any case, because the calls below it tell theirs to what they start.


def trace_steps(execute: Execute, deadline_of: Callable[[str], Deadline | None]) -> Execute:
    """Return the same function with everything that it calls below a span of the step's own, and inside the step's
    deadline."""

    async def execute_traced(name: str, step: StepPart, state: StepState, scope: dict[str, Any]) -> None:
        around = current_scope.get()
        assert around is not None, "steps are executed inside of a run"
        run = around.span.trace
        own, began_ns = run.below(new_span_id()), monotonic_ns()
        token = current_scope.set(replace(around, span=own, deadline=deadline_of(name)))
        try:
            await execute(name, step, state, scope)
        finally:
            current_scope.reset(token)
            if spans.recorder is not None:
                ended_ns = wall_ns()
                span = _span(state, own, run.span_id, ended_ns - (monotonic_ns() - began_ns), ended_ns)
                spans.recorder.tell(lambda: span)

    return execute_traced


def tell_of_skipped(state: StepState) -> None:
    """Record the span of a step that was never executed."""
    around = current_scope.get()
    if spans.recorder is not None and around is not None:
        run, now_ns = around.span.trace, wall_ns()
        span = _span(state, run.below(new_span_id()), run.span_id, now_ns, now_ns)
        spans.recorder.tell(lambda: span)


def _span(state: StepState, own: TraceContext, run_id: str, started_ns: int, ended_ns: int) -> spans.Span:
    """Made at once: what a state says is changed when the step runs again."""
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
    code, message = None, ""
    if status.is_bad:
        error = state.error or {}
        code = str(error.get("code") or status.value.upper())
        message = str(error.get("message") or "")  # without secrets: the state has none
    return spans.Span(f"step {state.id}", own, run_id, started_ns, ended_ns, attributes, code, message)
