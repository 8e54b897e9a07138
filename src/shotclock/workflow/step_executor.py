"""One step from its condition to its output: templates rendered, tries repeated, the result judged."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import re
import traceback
from collections import ChainMap
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from ..core.clocks import Clocks
from ..core.effects import Ending, SideEffects
from ..core.envelope import Envelope
from ..core.errors import Failure
from ..core.graph import groups_of
from ..core.operation import HandlerReference, Operation
from ..core.redaction import Redaction, looks_secret
from ..core.texts import one_line
from ..core.values import Read, as_plain, as_text, is_true, read_json, read_printed, warn_of_kept
from ..core.walltime import WallTime
from ..inbox.inbox import Inbox
from ..process.clock import monotonic_ns
from ..providers.command import CommandStep, ToolStep
from ..providers.provider import Provider, Providers, StepCall, StepResult, result_left_by
from ..providers.step_type import STEP_TYPES, StepPart, StepType, duration_ms
from ..providers.workflow import RunFile
from ..runtime.call import Call, answer, no_time_left
from ..runtime.handlers import raised
from ..runtime.runtime import Runtime
from . import templates
from .plan import delay_ms, items_come_from, retry_of, step_timeout_ms, written_timeout
from .scheduler import Deadlines, ParallelSlots
from .schema import WorkflowFile
from .secrets import References, UnsetVariable, unset_message
from .shell_quoting import Unsafe, with_references
from .state import Reason, Status, StepState, effects_of
from .step_approval import PersonWait, Refused, RenderedStep, StepGate, key_of
from .template_references import mentions

# How long a template, a condition or a JSON Schema may take. It is a line of text; only a loop takes longer.
TEMPLATE_CLOCKS = Clocks(timeout_ms=5_000, grace_ms=0)
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


def _in_worker(name: str, module: str, function: str) -> Operation:
    """What a file makes us compute: where it can be killed, and on a clock of its own."""
    handler = HandlerReference(f"shotclock.workflow.{module}", function)
    return Operation(name, handler, isolation="process", mutates=False, idempotent=True, clocks=TEMPLATE_CLOCKS)


_RENDER = _in_worker("template", "templates", "render_all")
_RENDER_VALUE = _in_worker("template", "templates", "render_value")
_EVALUATE = _in_worker("condition", "templates", "evaluate")
_MISFIT = _in_worker("schema", "json_schema", "misfit")


class StepFailed(Exception):
    """A step that could not even be tried, with the error its state shows."""

    def __init__(self, code: str, message: str, rule: str) -> None:
        super().__init__(message)
        self.error: dict[str, Any] = {
            "code": code,
            "message": message,
            "retryable": False,
            "phase": "validation",
            "context": {"rule": rule},
        }

    def error_after(self, attempts: int) -> dict[str, Any]:
        """The error of a step that was tried so often: validation is only what stopped it before it began."""
        return self.error | {"phase": "execution"} if attempts else self.error


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
        *,
        environment: Mapping[str, str],
        base_env: Mapping[str, str],
        redaction: Redaction,
        folder: Path,
        deadlines: Deadlines,
        run_id: str,
        run_began_at: WallTime,
        attention: PersonWait,
        inbox: Callable[[], Inbox],
        places: ParallelSlots,
        run_file: RunFile,
    ) -> None:
        """`environment` is everything there is, `base_env` what children see without asking."""
        self._run_id = run_id
        self._run_began_at = run_began_at
        self._attention = attention
        self._inbox = inbox
        self._places = places
        self._run_file = run_file
        self._workflow = workflow
        self._runtime = runtime
        self._providers = providers
        self._environment = environment
        self._base_env = base_env
        self._redaction = redaction
        self._folder = folder
        self._deadlines = deadlines
        self._clocks_of: dict[tuple[int | None, ...], Clocks] = {}

    async def execute(self, name: str, step: StepPart, state: StepState, scope: dict[str, Any]) -> None:
        """Leaves the state final. A cancellation is passed on."""
        with self._attention.at_work():
            await self._execute(name, step, state, scope)

    async def _execute(self, name: str, step: StepPart, state: StepState, scope: dict[str, Any]) -> None:
        try:
            seen = await self._seeing_variables(step, step.if_, scope)
            if step.if_ is not None and not await self._condition(step.if_, seen):
                state.status, state.reason = Status.SKIPPED, Reason.CONDITION
                return
            items, source = await self._items(step, scope)
            # Its status is final only when nothing more can change it: others look at it meanwhile.
            if items is None:
                verdict = await self._tries(name, step, state, scope)
            else:
                verdict = await self._each(name, step, state, scope, items, source)
            if verdict is Status.SUCCEEDED:
                await self._judge_output(step, state, scope)
            state.status = verdict
        except StepFailed as failed:
            state.status, state.error = Status.FAILED, failed.error_after(state.attempts)
        except Exception as error:  # ours: the step fails, and whoever waits for it is told
            bug = {"code": "INTERNAL_ERROR", "message": f"{type(error).__name__}: {error}", "retryable": False}
            context = {"traceback": "".join(traceback.format_exception(error, limit=TRACEBACK_KEPT))}
            state.status = Status.FAILED
            state.error = self._redaction.value(bug | {"phase": "execution", "context": context})

    # --- items --------------------------------------------------------------------------------------------

    async def _items(self, step: StepPart, scope: dict[str, Any]) -> tuple[list[Any] | None, str | None]:
        """None is no items but one go; and the step whose output they are, if they are not the step's own."""
        items: Any = step.for_each
        if items is None or isinstance(items, bool):
            return self._items_of_others(step, scope)
        items = await self._rendered(items, scope)
        if isinstance(items, str):
            items = read_printed(items).value
        if not isinstance(items, list):
            raise StepFailed("STEP_INVALID", f"for_each is {_kind_of(items)}, not a list", "step/for_each")
        return _few_enough(items), None

    def _items_of_others(self, step: StepPart, scope: dict[str, Any]) -> tuple[list[Any] | None, str | None]:
        sources = items_come_from(self._workflow, step)
        for group in groups_of(step.depends_on) if sources else ():
            # Of several that would do it is the one that did; none did where their failure is nobody's matter.
            for name in sorted(group, key=lambda name: name not in scope["outputs"]):
                if name in sources:
                    return _few_enough(scope["outputs"].get(name, [])), name
                break
        return None, None

    async def _each(
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
                        parts[number].status = await self._tries(name, step, parts[number], here, item)
                    except StepFailed as failed:
                        parts[number].status = Status.FAILED
                        parts[number].error = failed.error_after(parts[number].attempts)

        try:
            with self._attention.leave_to_parts():
                async with asyncio.TaskGroup() as group:
                    for number, item in enumerate(items):
                        group.create_task(one(number, item))
        except asyncio.CancelledError:  # what they had said until then is kept, as that of one would be
            stopped = next((part for part in parts if part.ending and not part.status.is_final), None)
            with contextlib.suppress(ValueError):
                state.output = self._handed_on([part.output for part in parts])
            state.attempts = sum(part.attempts for part in parts)
            if stopped is not None:
                state.error, state.ending = stopped.error, stopped.ending
            if self._attention.parked.done():
                records = [(part if part.status.is_final else part.parked()).recorded() for part in parts]
                state.parts = [] if _is_too_large(records) else records
            raise
        outputs = [part.output for part in parts]
        state.attempts = sum(part.attempts for part in parts)
        notes = [note for part in parts for note in part.warnings if note["code"] != "DEADLINE_INHERITED"]
        state.warnings = notes[:MOST_WARNINGS]
        state.side_effects = effects_of(parts)
        bad = [number for number, part in enumerate(parts) if part.status.is_bad]
        try:
            state.output = self._handed_on(outputs)
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

    async def _tries(
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
            rendered = await self._rendered_step(step, scope)
            passed = await gate.passed(state.id, step, rendered, most, deadline)
            if isinstance(passed, Refused):
                return self._noted(step, state, AnsweredTry(passed.envelope, None, passed.rule))
            state.proposal_id = gate.used
            ended: Mapping[str, Any] | None = {"code": "CANCELLED"}
            try:
                verdict = await self._retried(name, step, state, scope, item, passed)
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
        return await self._retried(name, step, state, scope, item, None)

    async def _retried(
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
            try:
                result = await self._try(name, step, state, scope, item, approved)
            except StepFailed:  # what it is to be tried with could not be made, so it was not
                state.attempts -= 1
                raise
            verdict = self._noted(step, state, result)
            if verdict is Status.SUCCEEDED and await self._fails(step, {**scope, "output": state.output}):
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

    async def _fails(self, step: StepPart, scope: dict[str, Any]) -> bool:
        if step.fail_if is None:
            return False
        return await self._condition(step.fail_if, await self._seeing_variables(step, step.fail_if, scope))

    def _noted(self, step: StepPart, state: StepState, result: AnsweredTry) -> Status:
        envelope = result.envelope
        trouble: str | None = None
        kept: tuple[str, ...] = ()
        try:
            output, kept = _read(step, result.output)
            state.output = self._handed_on(output)
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

    def _handed_on(self, output: Any) -> Any:
        """What the steps behind it get of an output. Raise ValueError where it is too large."""
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
        settings, values, asked, folder = approved or await self._rendered_step(step, scope)
        env = {**self._base_env, **asked} if asked else self._base_env
        key = f"{key_of(self._run_id, state)}.{state.attempts}"
        call = StepCall(
            name,
            settings,
            self._clocks(step),
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
        )
        # A run inside this one says by itself whether it works.
        left = self._attention.leave_to_parts() if step.type == "workflow" else contextlib.nullcontext()
        try:
            with left:
                return await try_step(self._providers[step.type], call, self._runtime)
        except asyncio.CancelledError as cancelled:
            state.ending, state.error = Ending.CANCELLED.value, None
            if (kept := answered_before(cancelled)) is not None:
                self._noted(step, state, kept)
            raise

    async def _rendered_step(self, step: StepPart, scope: dict[str, Any]) -> RenderedStep:
        asked, folder = await self._surroundings(step, scope)
        settings, values = await self._settings(step, _with_env(scope, asked))
        return RenderedStep(settings, values, asked, folder)

    def _clocks(self, step: StepPart) -> Clocks:
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

    # --- templates ----------------------------------------------------------------------------------------

    async def _settings(self, step: StepPart, scope: dict[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
        """Its own keys, rendered, and the variables that hold what was interpolated into its shell command."""
        step_type = STEP_TYPES[step.type]
        written = {key: getattr(step, key) for key in step_type.own_keys}
        values: dict[str, str] = {}
        if isinstance(step, ToolStep):
            tool = self._workflow.tools[step.tool]
            arguments = await self._rendered(step.arguments, scope)
            if tool.input_schema is not None and (why := await self._misfit(tool.input_schema, arguments)) is not None:
                raise StepFailed("STEP_INVALID", f"arguments do not fit input_schema: {why}", "step/arguments")
            scope = {**scope, "args": arguments, "arguments": arguments}
            written = {"exec": tool.exec, "stdin": tool.stdin, "shell": tool.shell}
        if isinstance(step, CommandStep | ToolStep):
            written["shell"] = written["shell"] or self._workflow.defaults.shell
            written["exec"], values = await self._shell(str(written["exec"]), scope)
            rest = {key: value for key, value in written.items() if key != "exec"}
            return {**await self._own_settings(step_type, rest, scope), "exec": written["exec"]}, values
        return await self._own_settings(step_type, written, scope), values

    async def _own_settings(
        self, step_type: StepType, written: Mapping[str, Any], scope: dict[str, Any]
    ) -> dict[str, Any]:
        keys = step_type.value_keys
        return {key: await self._setting(key, value, scope, key in keys) for key, value in written.items()}

    async def _setting(self, key: str, written: Any, scope: dict[str, Any], takes_values: bool) -> Any:
        """One of a provider's keys, rendered: a value where any will do, else the text of it."""
        if not _holds_template(written):
            return written
        rendered = await self._rendered(written, scope)
        if takes_values:
            return rendered
        text = list(map(as_text, rendered)) if isinstance(written, list) else as_text(rendered)
        try:
            as_text(text).encode("utf-8", "surrogateescape")
        except UnicodeEncodeError:
            raise StepFailed("STEP_INVALID", f"{key}: it holds half a character", "step/template") from None
        return text

    async def _shell(self, script: str, scope: dict[str, Any]) -> tuple[str, dict[str, str]]:
        if not templates.is_template(script):
            return script, {}
        rendered = await self._text(script, scope, marked=True)
        try:
            return with_references(rendered.text, rendered.values)
        except Unsafe as unsafe:
            raise StepFailed("STEP_INVALID", f"exec: {unsafe}", "step/template") from None

    async def _surroundings(self, step: StepPart, scope: dict[str, Any]) -> tuple[dict[str, str], Path]:
        """The variables that the file asks for, secret or not, and where it is done."""
        filled = await self._variables(step, scope)
        own = self._workflow.tools[step.tool].cwd if isinstance(step, ToolStep) else None
        written = step.cwd or own or self._workflow.defaults.cwd
        folder = self._folder
        if written is not None:
            folder = folder / (await self._text(written, scope)).text
        return filled, folder

    async def _seeing_variables(self, step: StepPart, text: object, scope: dict[str, Any]) -> dict[str, Any]:
        """The scope of a text about the step as a whole, with those of its variables that it names."""
        names = set(re.findall(r"\benv(?:\.|\[['\"])(\w+)", text)) if isinstance(text, str) else set()
        return _with_env(scope, await self._variables(step, scope, names)) if names else scope

    async def _variables(
        self, step: StepPart, scope: dict[str, Any], names: Collection[str] | None = None
    ) -> dict[str, str]:
        """What the file asks for by `env`, or of that only these."""
        asked: dict[str, Any] = {**self._workflow.env, **self._workflow.defaults.env, **step.env}
        if isinstance(step, ToolStep):
            asked = {**self._workflow.tools[step.tool].env, **asked}
        if names is not None:
            asked = {name: value for name, value in asked.items() if name in names}
        filled: dict[str, str] = {}
        if asked:
            references = References(self._environment)
            try:
                taken = {key: references.take_out(as_text(value)) for key, value in asked.items()}
            except UnsetVariable as unset:
                raise StepFailed("STEP_INVALID", f"env: {unset_message(str(unset))}", "step/env") from None
            rendered = await self._rendered(taken, scope)
            filled = {key: references.put_in(as_text(value)) for key, value in rendered.items()}
        self._redaction.learn(filled)
        return filled

    async def rendered(self, template: str, scope: dict[str, Any]) -> Any:
        """What came of the run, as its `outputs` say it. Raises StepFailed."""
        made = await self._value(template, scope) if templates.is_template(template) else template
        return self._redaction.value(made)

    async def _rendered(self, value: Any, scope: dict[str, Any]) -> Any:
        """Every text in it rendered; one that is nothing but an expression becomes its value."""
        if not _holds_template(value):
            return value
        if isinstance(value, str):
            return await self._value(value, scope)
        if isinstance(value, dict):
            return {key: await self._rendered(item, scope) for key, item in value.items()}
        if isinstance(value, list):
            return [await self._rendered(item, scope) for item in value]
        return value

    async def _value(self, template: str, scope: dict[str, Any]) -> Any:
        if (name := templates.sole_name(template)) is not None:
            return _looked_up(name, template, scope)
        if templates.is_simple(template):
            return (await self._text(template, scope)).text
        arguments = {"template": template, "scope": _plain_scope(scope, template)}
        envelope = await self._runtime.call(_RENDER_VALUE, arguments)
        if not envelope.ok:
            raise _template_failure(envelope, template, scope)
        return envelope.value

    async def _text(self, template: str, scope: dict[str, Any], *, marked: bool = False) -> templates.Rendered:
        if templates.is_simple(template):
            try:
                return templates.render_simple(template, scope, marked=marked)
            except templates.TemplateError as error:
                raise _template_failed(str(error), template, scope) from None
        arguments = {"templates": [template], "scope": _plain_scope(scope, template), "marked": marked}
        envelope = await self._runtime.call(_RENDER, arguments)
        if not envelope.ok:
            raise _template_failure(envelope, template, scope)
        rendered = envelope.value
        return templates.Rendered(*rendered[0])  # type: ignore[index]

    async def _condition(self, written: str | bool, scope: dict[str, Any]) -> bool:
        if isinstance(written, bool):
            return written
        if (name := templates.sole_name(written)) is not None:
            return is_true(_looked_up(name, written, scope))
        arguments = {"condition": written, "scope": _plain_scope(scope, written)}
        envelope = await self._runtime.call(_EVALUATE, arguments)
        if not envelope.ok:
            raise _template_failure(envelope, written, scope)
        return bool(envelope.value)

    # --- what came out ------------------------------------------------------------------------------------

    async def _judge_output(self, step: StepPart, state: StepState, scope: dict[str, Any]) -> None:
        if step.transform is not None:
            seen = await self._seeing_variables(step, step.transform, scope)
            made = await self._value(step.transform, {**seen, "output": state.output})
            if isinstance(made, str) and templates.sole_expression(step.transform) is None:
                made = read_printed(made).value
            try:
                state.output = self._handed_on(made)
            except ValueError as error:
                raise StepFailed("OUTPUT_INVALID", f"what transform made: {error}", "step/output") from None
        if step.output_schema is not None:
            problem = await self._misfit(step.output_schema, state.output)
            if problem is not None:
                raise StepFailed("OUTPUT_INVALID", f"its output does not fit output_schema: {problem}", "step/output")
        if step.for_each is True and not isinstance(state.output, list):
            message = f"`for_each: true` needs a list as output, and the output is {_kind_of(state.output)}"
            raise StepFailed("OUTPUT_INVALID", message, "step/for_each")

    async def _misfit(self, schema: dict[str, Any], value: Any) -> str | None:
        envelope = await self._runtime.call(_MISFIT, {"schema": schema, "value": value})
        if envelope.ok:
            return None if envelope.value is None else str(envelope.value)
        return f"it could not be checked: {(envelope.error or {})['message']}"


async def try_step(provider: Provider, step: StepCall, runtime: Runtime) -> AnsweredTry:
    """Begin the call of one try, let the provider carry it out, and answer it: the only place that does either.

    A cancellation is passed on, with what came of the try until then where the provider says so (`answered_before`).
    """
    call = runtime.begin(step.name, {}, step.clocks)
    try:
        result = StepResult(no_time_left(call)) if call.no_time_left else await provider.run(step, call, runtime)
    except Failure as failure:
        outcome = raised(failure)
        outcome.ending = Ending.NOT_STARTED
        result = StepResult(outcome)
    except asyncio.CancelledError as cancelled:
        if (left := result_left_by(cancelled)) is not None:
            cancelled.answered_try = _answered(provider, call, left)  # type: ignore[attr-defined]
        raise
    return _answered(provider, call, result)


def answered_before(cancelled: asyncio.CancelledError) -> AnsweredTry | None:
    """Return the answer of the try that was cancelled, where there is one."""
    tried = getattr(cancelled, "answered_try", None)
    return tried if isinstance(tried, AnsweredTry) else None


def _answered(provider: Provider, call: Call, result: StepResult) -> AnsweredTry:
    envelope = result.outcome if isinstance(result.outcome, Envelope) else answer(call, result.outcome)
    if result.rewrite is not None:
        envelope = result.rewrite(envelope)
    return AnsweredTry(envelope, result.output, result.rule or provider.step_type.rule_for(envelope.code))


def _with_env(scope: dict[str, Any], asked: Mapping[str, str]) -> dict[str, Any]:
    """What a step asks for by its `env` is there for its templates as well."""
    return {**scope, "env": {**scope["env"], **asked}} if asked else scope


def _read(step: StepPart, output: Any) -> Read:
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
    """Too large for the store, which escapes what is not ASCII with six characters."""
    if isinstance(value, str) and len(value) * 6 <= OUTPUT_LIMIT:
        return False
    return len(json.dumps(value)) > OUTPUT_LIMIT


def _kind_of(value: Any) -> str:
    """In the words of JSON."""
    kinds = {dict: "an object", str: "text", bool: "true or false", type(None): "nothing"}
    return kinds.get(type(value), "a number")


def _few_enough(items: list[Any]) -> list[Any]:
    if len(items) > MOST_ITEMS:
        raise StepFailed("STEP_INVALID", f"for_each has {len(items)} items; {MOST_ITEMS} at most", "step/for_each")
    return items


def _looked_up(name: str, template: str, scope: Mapping[str, Any]) -> Any:
    try:
        return templates.look_up(name, scope)
    except templates.TemplateError as error:
        raise _template_failed(str(error), template, scope) from None


def _template_failed(message: str, template: str, scope: Mapping[str, Any]) -> StepFailed:
    """With the reason, where it is that a step it speaks of has no output."""
    for name in re.findall(r"\benv\.(\w+)", template):
        if name not in scope["env"] and looks_secret(name):
            message += f"; it looks secret: a step asks for it with `env: {{{name}: ${{{name}}}}}`"
    for kind, name in mentions(template):
        if name not in scope["steps"]:
            message += f"; there is no step {name!r}"
        elif kind == "outputs" and name not in scope["outputs"]:
            status = Status(scope["steps"][name]["status"])
            why = "has not succeeded" if status.is_final else "has not ended: wait for it with depends_on"
            message += f"; step {name!r} {why}"
    return StepFailed("TEMPLATE_FAILED", message, "step/template")


def _holds_template(value: Any) -> bool:
    if isinstance(value, str):
        return templates.is_template(value)
    if isinstance(value, dict):
        return any(map(_holds_template, value.values()))
    return isinstance(value, list) and any(map(_holds_template, value))


def _plain_scope(scope: Mapping[str, Any], template: str) -> dict[str, Any]:
    """What a worker needs of it: outputs can be large, so only those that the template mentions by name."""
    mentioned = {name for _, name in mentions(template)}
    plain: dict[str, Any] = {}
    for key, value in scope.items():
        if key not in ("outputs", "steps"):
            plain[key] = value
            continue
        names = list(value) if re.search(rf"\b{key}\b(?!\.|\[['\"])", template) else mentioned
        plain[key] = {}
        for name in names:
            try:
                plain[key][name] = value[name]
            except KeyError:
                continue
    return plain


def _template_failure(envelope: Envelope, template: str, scope: Mapping[str, Any]) -> StepFailed:
    message = str((envelope.error or {}).get("message", ""))
    if envelope.code == "TIMEOUT":
        return StepFailed("TEMPLATE_TIMEOUT", f"{template[:100]!r}: {message}", "step/template")
    return _template_failed(message, template, scope)


def _error(code: str, message: str, rule: str) -> dict[str, Any]:
    return StepFailed(code, message, rule).error | {"phase": "execution"}


def _is_timeout(envelope: Envelope) -> bool:
    return envelope.code in ("TIMEOUT", "STALLED", "NO_TIME_LEFT", "QUEUE_TIMEOUT", "OPERATION_TIMEOUT")
