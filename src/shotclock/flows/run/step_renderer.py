"""The renderer of steps. All but plain names are computed in a worker with its own timeout, where it can be killed."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from ...core.catalogue import HandlerReference, Operation
from ...core.envelope import Envelope
from ...core.errors import Failure
from ...core.json_values import as_text, is_true
from ...core.limits import Clocks, Fired
from ...core.references import UnsetVariable, unset_message, unset_name_message
from ...core.value_types import JsonObject
from ...core.visible_text import looks_secret
from ..file import templates
from ..file.schema import References, holds_template, is_template
from ..file.shell_quoting import Unsafe, find_variable_refusal, with_references
from ..file.templates import mentions, uses_mapping
from ..steps.ai import AI, AiStep, read_prompt
from ..steps.command import CommandStep, ToolStep, shell_argv
from ..steps.provider import STEP_TYPES, StepPart, StepType
from .run_context import RunContext
from .state import Status, StepError, TemplateScope

# Only an endless loop takes longer.
TEMPLATE_MS = 5_000
TEMPLATE_CLOCKS = Clocks(timeout_ms=TEMPLATE_MS, grace_ms=0)
# For templates about the output, after a step has used up its time: to start a worker takes a busy machine a second.
LEAST_TEMPLATE_MS = 2_000


def _in_worker(name: str, module: str, function: str) -> Operation:
    handler = HandlerReference(module, function)
    return Operation(name, handler, isolation="process", mutates=False, idempotent=True, clocks=TEMPLATE_CLOCKS)


_RENDER = _in_worker("template", "shotclock.flows.file.templates", "render_text")
_RENDER_VALUE = _in_worker("template", "shotclock.flows.file.templates", "render_value")
_EVALUATE = _in_worker("condition", "shotclock.flows.file.templates", "evaluate")
_FIND_MISFIT = _in_worker("schema", "shotclock.flows.file.templates", "find_misfit")


class StepFailed(Exception):
    def __init__(self, code: str, message: str, rule: str, ended: Envelope | None = None) -> None:
        super().__init__(message)
        self.fired: Fired | None = None if ended is None else ended.fired
        context: JsonObject = {"rule": rule}
        cause = (ended.error or {}).get("context") if ended is not None else None
        if isinstance(cause, dict) and "clock" in cause:
            context["clock"] = cause["clock"]
        self.error: StepError = {
            "code": code,
            "message": message,
            "retryable": False,
            "phase": "validation",
            "context": context,
        }


class RenderedStep(NamedTuple):
    settings: Mapping[str, Any]
    values: Mapping[str, str]  # the variables of the values interpolated into its shell command
    env: Mapping[str, str]
    folder: Path


class StepRenderer:
    def __init__(self, run: RunContext) -> None:
        self._run = run
        self._workflow = run.workflow

    async def render_step(
        self, step: StepPart, scope: TemplateScope, arguments: Mapping[str, Any] | None = None
    ) -> RenderedStep:
        """Return the step as it runs. `arguments` replace those of a tool; templates in them are plain text."""
        env, folder = await self._render_surroundings(step, scope)
        settings, values = await self._render_settings(step, _with_env(scope, env), arguments)
        if step.type == "git-checkout" and settings["repository"] is None:
            from ..steps.git import find_repository  # imports shutil: 4 ms of every run

            repository = find_repository({**self._run.base_env, **env}, self._run.folder)
            settings = {**settings, "repository": repository}
        return RenderedStep(settings, values, env, folder)

    async def _render_settings(
        self, step: StepPart, scope: TemplateScope, arguments: Mapping[str, Any] | None
    ) -> tuple[JsonObject, dict[str, str]]:
        """Return the rendered keys of a step, and the variables of its shell command."""
        step_type = STEP_TYPES[step.type]
        written = {key: getattr(step, key) for key in step_type.own_keys}
        if isinstance(step, ToolStep):
            given = await self.render(step.arguments, scope) if arguments is None else dict(arguments)
            return await self._render_tool_settings(step, given, scope)
        if isinstance(step, CommandStep):
            return await self._render_command(step_type, written, scope)
        if isinstance(step, AiStep):
            return await self._render_ai(step, scope), {}
        return await self._render_keys(step_type, written, scope), {}

    async def _render_tool_settings(
        self, step: ToolStep, arguments: Any, scope: TemplateScope
    ) -> tuple[JsonObject, dict[str, str]]:
        tool = self._workflow.tools[step.tool]
        if tool.input_schema is not None:
            what = "arguments do not fit input_schema"
            await self.check_schema(tool.input_schema, arguments, "STEP_INVALID", what, "step/arguments")
        scope = {**scope, "args": arguments, "arguments": arguments}
        written = {"exec": tool.exec, "stdin": tool.stdin, "shell": tool.shell}
        return await self._render_command(STEP_TYPES[step.type], written, scope)

    async def _render_command(
        self, step_type: StepType, written: JsonObject, scope: TemplateScope
    ) -> tuple[JsonObject, dict[str, str]]:
        written["shell"] = shell_argv(written["shell"] or self._workflow.defaults.shell)
        script, values = await self._render_script(str(written["exec"]), scope)
        rest = {key: value for key, value in written.items() if key != "exec"}
        return {**await self._render_keys(step_type, rest, scope), "exec": script}, values

    async def _render_ai(self, step: AiStep, scope: TemplateScope) -> JsonObject:
        """Return the keys of an `ai` step, with its `prompt_file` as the prompt, and the variables of its servers."""
        prompt = step.prompt
        if step.prompt_file is not None:
            name = (await self._render_text(step.prompt_file, scope)).text
            _, folder = await self._render_surroundings(step, scope)
            try:
                prompt = await asyncio.to_thread(read_prompt, folder / name)
            except Failure as failure:
                raise StepFailed(failure.code, str(failure), "ai/prompt_file") from None
        variables = {name: server.env for name, server in step.ai.mcp_servers.items()}
        ai = step.ai.model_dump()
        for server in ai["mcp_servers"].values():
            server["env"] = {}
        settings = await self._render_keys(AI, {"prompt": prompt, "ai": ai}, scope)
        for name, env in variables.items():
            settings["ai"]["mcp_servers"][name]["env"] = await self._fill_variables(env, scope)
        return {**settings, "output_schema": step.output_schema}

    async def _render_keys(self, step_type: StepType, written: Mapping[str, Any], scope: TemplateScope) -> JsonObject:
        keys = step_type.value_keys
        return {key: await self._render_key(key, value, scope, key in keys) for key, value in written.items()}

    async def _render_key(self, key: str, written: Any, scope: TemplateScope, takes_values: bool) -> Any:
        if not holds_template(written):
            return written
        rendered = await self.render(written, scope)
        if takes_values:
            return rendered
        text = list(map(as_text, rendered)) if isinstance(written, list) else as_text(rendered)
        try:
            as_text(text).encode("utf-8", "surrogateescape")
        except UnicodeEncodeError:
            raise StepFailed("STEP_INVALID", f"{key}: it holds an incomplete character", "step/template") from None
        return text

    async def _render_script(self, script: str, scope: TemplateScope) -> tuple[str, dict[str, str]]:
        if not is_template(script):
            return script, {}
        rendered = await self._render_text(script, scope, marked=True)
        try:
            return with_references(rendered.text, rendered.values)
        except Unsafe as unsafe:
            raise StepFailed("STEP_INVALID", f"exec: {unsafe}", "step/template") from None

    async def _render_surroundings(self, step: StepPart, scope: TemplateScope) -> tuple[dict[str, str], Path]:
        """Return the variables that the file sets, and the folder of the step."""
        filled = await self._render_variables(step, scope)
        own = self._workflow.tools[step.tool].cwd if isinstance(step, ToolStep) else None
        written = step.cwd or own or self._workflow.defaults.cwd
        folder = self._run.folder
        if written is not None:
            folder = folder / (await self._render_text(written, scope)).text
        return filled, folder

    async def with_variables(self, step: StepPart, text: object, scope: TemplateScope) -> JsonObject:
        """Return the scope with the variables of the step that a text names."""
        names = set(re.findall(r"\benv(?:\.|\[['\"])(\w+)", text)) if isinstance(text, str) else set()
        return _with_env(scope, await self._render_variables(step, scope, names)) if names else scope

    async def _render_variables(
        self, step: StepPart, scope: TemplateScope, names: Collection[str] | None = None
    ) -> dict[str, str]:
        variables: JsonObject = {**self._workflow.env, **self._workflow.defaults.env, **step.env}
        if isinstance(step, ToolStep):
            variables = {**self._workflow.tools[step.tool].env, **variables}
        if names is not None:
            variables = {name: value for name, value in variables.items() if name in names}
        command = self._workflow.tools[step.tool].exec if isinstance(step, ToolStep) else getattr(step, "exec", None)
        return await self._fill_variables(variables, scope, command)

    async def _fill_variables(
        self, variables: Mapping[str, Any], scope: TemplateScope, command: str | None = None
    ) -> dict[str, str]:
        """Fill `${NAME}` and templates in, and redact secrets. Raise StepFailed if `command` would execute a value."""
        filled: dict[str, str] = {}
        if variables:
            for name, value in variables.items():
                if is_template(as_text(value)) and (refusal := find_variable_refusal(name, command)) is not None:
                    raise StepFailed("STEP_INVALID", f"env: {refusal.message}: {refusal.suggestion}", "step/env")
            references = References(self._run.environment)
            try:
                taken = {key: references.take_out(as_text(value)) for key, value in variables.items()}
            except UnsetVariable as unset:
                raise StepFailed("STEP_INVALID", f"env: {unset_message(str(unset))}", "step/env") from None
            rendered = await self.render(taken, scope)
            filled = {key: references.put_in(as_text(value)) for key, value in rendered.items()}
        self._run.redaction.learn(filled)
        return filled

    async def render_output(self, template: str, scope: TemplateScope) -> Any:
        made = await self.render_value(template, scope) if is_template(template) else template
        return self._run.redaction.value(made)

    async def render(self, value: Any, scope: TemplateScope) -> Any:
        """Render every text in a value. A text that is a single expression becomes its value."""
        if not holds_template(value):
            return value
        if isinstance(value, str):
            return await self.render_value(value, scope)
        if isinstance(value, dict):
            return {key: await self.render(item, scope) for key, item in value.items()}
        if isinstance(value, list):
            return [await self.render(item, scope) for item in value]
        return value

    async def render_value(self, template: str, scope: TemplateScope, limit_ms: int | None = None) -> Any:
        if (name := templates.sole_name(template)) is not None:
            return _look_up(name, template, scope)
        if templates.is_simple(template):
            return (await self._render_text(template, scope)).text
        return await self._compute(_RENDER_VALUE, template, scope, limit_ms)

    async def _render_text(self, template: str, scope: TemplateScope, *, marked: bool = False) -> templates.Rendered:
        if templates.is_simple(template):
            try:
                return templates.render_simple(template, scope, marked=marked)
            except templates.TemplateError as error:
                raise _template_failed(str(error), template, scope) from None
        return templates.Rendered(*await self._compute(_RENDER, template, scope, marked=marked))

    async def evaluate(self, written: str | bool, scope: TemplateScope, limit_ms: int | None = None) -> bool:
        if isinstance(written, bool):
            return written
        if (name := templates.sole_name(written)) is not None:
            return is_true(_look_up(name, written, scope))
        return bool(await self._compute(_EVALUATE, written, scope, limit_ms))

    async def _compute(
        self, operation: Operation, template: str, scope: TemplateScope, limit_ms: int | None = None, **more: Any
    ) -> Any:
        arguments = {"template": template, "scope": _plain_scope(scope, template), **more}
        envelope = await self._run.shared.runtime.call(operation, arguments, _limit_clocks(limit_ms))
        if envelope.ok:
            return envelope.value
        message = str((envelope.error or {}).get("message", ""))
        if envelope.code in ("TIMEOUT", "NO_TIME_LEFT"):
            raise StepFailed("TEMPLATE_TIMEOUT", f"{template[:100]!r}: {message}", "step/template", envelope)
        raise _template_failed(message, template, scope, envelope)

    async def check_schema(
        self, schema: JsonObject, value: Any, code: str, what: str, rule: str, limit_ms: int | None = None
    ) -> None:
        """Raise StepFailed if a value does not fit a JSON Schema."""
        arguments = {"schema": schema, "value": value}
        envelope = await self._run.shared.runtime.call(_FIND_MISFIT, arguments, _limit_clocks(limit_ms))
        if not envelope.ok:
            why = f"it could not be checked: {(envelope.error or {})['message']}"
            raise StepFailed(code, f"{what}: {why}", rule, envelope)
        if envelope.value is not None:
            raise StepFailed(code, f"{what}: {envelope.value}", rule)


def _limit_clocks(limit_ms: int | None) -> Clocks | None:
    return None if limit_ms is None else Clocks(timeout_ms=limit_ms)


def _with_env(scope: TemplateScope, env: Mapping[str, str]) -> JsonObject:
    return {**scope, "env": {**scope["env"], **env}} if env else scope


def _look_up(name: str, template: str, scope: Mapping[str, Any]) -> Any:
    try:
        return templates.look_up(name, scope)
    except templates.TemplateError as error:
        raise _template_failed(str(error), template, scope) from None


def _template_failed(
    message: str, template: str, scope: Mapping[str, Any], ended: Envelope | None = None
) -> StepFailed:
    """Return the failure, with the reason if a step has no output."""
    for name in re.findall(r"\benv\.(\w+)", template):
        if name not in scope["env"] and looks_secret(name):
            message += f"; it looks secret: a step asks for it with `env: {{{name}: ${{{name}}}}}`"
        elif name not in scope["env"]:
            message += f"; {unset_name_message(name)}"
    for kind, name in mentions(template):
        if name not in scope["steps"]:
            message += f"; there is no step {name!r}"
        elif kind == "outputs" and name not in scope["outputs"]:
            status = Status(scope["steps"][name]["status"])
            why = "has not succeeded" if status.is_final else "has not ended: wait for it with depends_on"
            message += f"; step {name!r} {why}"
    return StepFailed("TEMPLATE_FAILED", message, "step/template", ended)


def _plain_scope(scope: Mapping[str, Any], template: str) -> JsonObject:
    """Return the scope for a worker: of the outputs, which can be large, only those that the template names."""
    mentioned = {name for _, name in mentions(template)}
    plain: JsonObject = {}
    for key, value in scope.items():
        if key not in ("outputs", "steps"):
            plain[key] = value
            continue
        names = list(value) if uses_mapping(key, template, scope["steps"]) else mentioned
        plain[key] = {}
        for name in names:
            try:
                plain[key][name] = value[name]
            except KeyError:
                continue
    return plain
