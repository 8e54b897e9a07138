"""The schema of a workflow file: its keys, aliases, templates, variables and inputs.

The keys of each type of step are declared by its provider.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal, cast

from ...core.envelope import refusal
from ...core.json_values import Read, as_plain, read_json
from ...core.limits import DurationError, parse_duration_ms
from ...core.references import REFERENCE, unset_message, value_of
from ...core.validation import After, Before, Limits, OneOf, Part, field, json_schema_of
from ...core.value_types import JsonObject
from ...people.notify.entries import Entries
from ..steps.command import Shell, ToolStep
from ..steps.provider import STEP_TYPES, EnvFileNames, Milliseconds, OvertimeKey, Reaction, Scalar, Seconds, StepPart

if TYPE_CHECKING:
    from ..steps.ai import AiStep

STEP_NAME = r"^[A-Za-z_][A-Za-z0-9_.-]*$"
STEP_NAME_LIMIT = 200
StepId = Annotated[str, Limits(pattern=STEP_NAME, max_length=STEP_NAME_LIMIT)]


class _StepSchemas(Mapping[str, type[Part]]):
    """The schemas of steps by type, each imported when first needed."""

    def __getitem__(self, name: str) -> type[Part]:
        return STEP_TYPES[name].schema

    def __iter__(self) -> Iterator[str]:
        return iter(STEP_TYPES)

    def __len__(self) -> int:
        return len(STEP_TYPES)


class ToolPart(Part):
    """A custom tool: a command with named arguments, or a workflow with its inputs, for agents."""

    name: str | None = None
    description: str | None = None
    exec: str = field(default="", min_length=1)
    workflow: str | None = field(default=None, min_length=1)
    input_schema: JsonObject | None = field(default=None, keys=("input_schema", "inputSchema"))
    shell: Shell | None = None
    stdin: str | None = None
    env: dict[str, Scalar] = field(default={})
    cwd: str | None = None
    timeout: Milliseconds | None = None

    def check_together(self) -> None:
        if bool(self.exec) == (self.workflow is not None):
            raise ValueError("give the tool either `exec`, or `workflow` with the name of a file")
        others = [key for key in ("input_schema", "shell", "stdin", "env", "cwd") if getattr(self, key)]
        if self.workflow is not None and others:
            raise ValueError(f"`{others[0]}` is for a tool with `exec`; a workflow has `inputs` and `env` of its own")


class InputPart(Part):
    type: Literal["string", "number", "integer", "boolean", "object", "array", "any"] = "any"
    description: str | None = None
    required: bool = False
    default: Any = None


def _with_unit(written: Any) -> Any:
    try:
        parse_duration_ms(written)
    except DurationError as error:
        raise ValueError(str(error)) from None
    return str(written)


WithUnit = Annotated[str, Before(_with_unit)]


class DefaultsPart(Part):
    """The defaults of all steps. Durations need a unit, because step types differ in theirs."""

    timeout: WithUnit | None = None
    soft: WithUnit | None = None
    idle: WithUnit | None = None
    grace: WithUnit | None = None
    wind_down: WithUnit | None = None
    overtime: OvertimeKey = None
    env: dict[str, Scalar] = field(default={})
    cwd: str | None = None
    shell: Shell | None = None
    continue_on_failure: bool = False
    on_fail: Reaction | None = None


class ConcurrencyPart(Part):
    """The group of a run: of the runs in it one is under way at a time."""

    group: str = field(min_length=1, max_length=200)
    on_conflict: Literal["wait", "cancel", "refuse"] = "wait"
    """The run waits for the one before it, takes its place, or does not start."""


def _as_concurrency(written: Any) -> Any:
    return {"group": written} if isinstance(written, str) else written


Concurrency = Annotated[ConcurrencyPart, Before(_as_concurrency, str | ConcurrencyPart)]

Step = Annotated[StepPart, OneOf("type", _StepSchemas())]


def _known_version(written: str | int | float) -> str | int | float:
    if str(written) not in ("1", "1.0"):
        raise ValueError(f"there is no version {written!s:.20} of workflow files; write '1.0'")
    return written


class WorkflowFile(Part):
    """The whole file."""

    version: Annotated[str | int | float, After(_known_version)] = "1.0"
    name: str | None = None
    description: str | None = None
    timeout: Seconds | None = None
    max_parallelism: int = field(default=8, ge=1, le=1000)
    fail_fast: bool = False
    concurrency: Concurrency | None = None
    env: dict[str, Scalar] = field(default={})
    env_file: EnvFileNames = field(default=[])
    inputs: dict[str, InputPart] = field(default={})
    outputs: dict[str, str] = field(default={})
    tools: dict[str, ToolPart] = field(default={})
    steps: dict[StepId, Step] = field(min_length=1, keys=("steps", "checks"))
    finally_: list[str] = field(default=[], keys=("finally",))
    """The names of the steps that run last. The loader puts the steps of `finally` into `steps`."""
    defaults: DefaultsPart = DefaultsPart()
    notify: Entries = field(default=[])
    id: str | None = None
    """The name of its tool in a file that imports it."""


def failure_reaction(workflow: WorkflowFile, name: str) -> Reaction | None:
    """Return the `on_fail` of a step. A `finally` step has only its own: that of `defaults` runs other steps."""
    own = workflow.steps[name].on_fail
    return own if name in workflow.finally_ else own or workflow.defaults.on_fail


def calls_of(workflow: WorkflowFile, name: str) -> list[str]:
    """Return the steps that `on_fail` and `on_success` of a step run or return to."""
    step = workflow.steps[name]
    reactions = [each for each in (failure_reaction(workflow, name), step.on_success) if each is not None]
    return [called for each in reactions for called in (*each.run, each.goto) if called is not None]


def callers_of(workflow: WorkflowFile) -> dict[str, list[str]]:
    callers: dict[str, list[str]] = {}
    for name in workflow.steps:
        for called in calls_of(workflow, name):
            callers.setdefault(called, []).append(name)
    return callers


SHOWN_LIMIT = 200  # characters of a refused value in a message


def check_inputs(workflow: WorkflowFile, values: Mapping[str, Any]) -> JsonObject:
    """Return the inputs with defaults, in their declared types. Raises Failure that lists every mistake."""
    inputs = f"there are {', '.join(workflow.inputs)}" if workflow.inputs else "it takes none"
    errors = [
        {"field": f"inputs.{name}", "message": f"the workflow has no such input; {inputs}"}
        for name in values
        if name not in workflow.inputs
    ]
    checked = {}
    for name, declared in workflow.inputs.items():
        if name not in values:
            if declared.required and declared.default is None:
                errors.append({"field": f"inputs.{name}", "message": "is required"})
            checked[name] = declared.default
            if declared.default is None:
                continue
        try:
            checked[name] = _as_declared(values.get(name, declared.default), declared.type)
        except ValueError as error:
            errors.append({"field": f"inputs.{name}", "message": str(error)})
    if errors:
        raise refusal(errors)
    return checked


def schema_of_inputs(workflow: WorkflowFile) -> JsonObject:
    properties: dict[str, JsonObject] = {}
    for name, part in workflow.inputs.items():
        schema = {"type": None if part.type == "any" else part.type, "description": part.description}
        properties[name] = {key: value for key, value in schema.items() if value is not None}
    required = [name for name, part in workflow.inputs.items() if part.required and part.default is None]
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def _as_declared(value: Any, kind: str) -> Any:
    """Return a value of the declared type: text is read as JSON unless text is declared. Raises ValueError."""
    read = Read(value)
    if kind not in ("string", "any") and isinstance(value, str):
        with contextlib.suppress(ValueError):
            read = read_json(value)
    if not read.kept:
        read = as_plain(read.value)
    if read.kept:
        raise ValueError(f"{_shorten(read.kept[0])} cannot be kept exactly as a number; give it as text")
    if not (isinstance(read.value, _TYPES[kind]) and (kind in ("boolean", "any") or not isinstance(read.value, bool))):
        raise ValueError(f"{_shorten(repr(read.value))} is not of type {kind}")
    return read.value


def _shorten(text: str) -> str:
    return text if len(text) <= SHOWN_LIMIT else f"{text[:SHOWN_LIMIT]}…"


_TYPES: dict[str, tuple[type, ...]] = {
    "string": (str,),
    "number": (int, float),
    "integer": (int,),
    "boolean": (bool,),
    "object": (dict,),
    "array": (list,),
    "any": (object,),
}


def find_wrong_defaults(workflow: WorkflowFile) -> Iterator[tuple[str, str]]:
    for name, declared in workflow.inputs.items():
        if declared.default is not None:
            try:
                _as_declared(declared.default, declared.type)
            except ValueError as error:
                yield name, str(error)


# Keys of a step that are always an expression, with or without braces.
CONDITIONS = {"if", "fail_if"}


def is_template(text: str) -> bool:
    return "{{" in text or "{%" in text


def texts_in(value: Any, path: tuple[str | int, ...] = ()) -> Iterator[tuple[tuple[str | int, ...], str]]:
    """Yield the path and text of every text in a value of JSON."""
    if isinstance(value, str):
        yield path, value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from texts_in(item, (*path, key))
    elif isinstance(value, list):
        for number, item in enumerate(value):
            yield from texts_in(item, (*path, number))


def holds_template(value: Any) -> bool:
    return any(is_template(text) for _, text in texts_in(value))


class References:
    """`${NAME}` in the `env` of a file: the variables, secret or not, that a step gets.

    As in a shell, `${NAME:-value}` is the value where it is unset or empty, `${NAME-value}` where it is unset.
    """

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._environment = environment
        # A reference in data must not be replaced: while templates are rendered, the references of the file are words
        # that no data can know.
        self._word = f"shotclock-{os.urandom(16).hex()}-"
        self._values: list[str] = []

    def take_out(self, text: str) -> str:
        """Put a secret word for each reference. Raises UnsetVariable."""

        def word_for(found: re.Match[str]) -> str:
            self._values.append(value_of(found, self._environment))
            return f"{self._word}{len(self._values) - 1}-"

        return REFERENCE.sub(word_for, text)

    def put_in(self, text: str) -> str:
        """Put the values of the variables in place of the words."""
        return re.sub(rf"{self._word}(\d+)-", lambda found: self._values[int(found[1])], text)


EnvPath = tuple[str, ...]


def find_unset_notify(
    workflow: WorkflowFile, environment: Mapping[str, str]
) -> Iterator[tuple[tuple[str | int, ...], str]]:
    """Yield the path and a message for each variable of `notify` that is not set. It does not keep the run back."""
    known = {**environment, **dict.fromkeys(workflow.env, "")}
    for number, entry in enumerate(workflow.notify):
        for path, text in entry.texts().items():
            for name, kind, _ in REFERENCE.findall(text):
                if not kind and name not in known:
                    yield ("notify", number, *path.split(".", 1)), unset_message(name)


def find_unset_variables(workflow: WorkflowFile, environment: Mapping[str, str]) -> Iterator[tuple[EnvPath, str]]:
    """Yield the path and a message for each needed variable that is not set."""
    tools = {step.tool for step in workflow.steps.values() if isinstance(step, ToolStep)}
    tools |= {name for _, step in ai_steps(workflow) for name in step.ai.tools}
    for path, env, _ in envs_of(workflow):
        for key, text in env.items() if path[0] != "tools" or path[1] in tools else ():
            for name, kind, _ in REFERENCE.findall(text) if isinstance(text, str) else ():
                if not kind and name not in environment:
                    yield (*path, key), unset_message(name)


def envs_of(workflow: WorkflowFile) -> Iterator[tuple[EnvPath, Mapping[str, Scalar], str | None]]:
    """Yield the path of each `env`, its variables, and the command that gets them, if there is one."""
    yield ("env",), workflow.env, None
    yield ("defaults", "env"), workflow.defaults.env, None
    for name, step in workflow.steps.items():
        yield ("steps", name, "env"), step.env, getattr(step, "exec", None)
    for name, tool in workflow.tools.items():
        yield ("tools", name, "env"), tool.env, tool.exec
    for step_id, ai_step in ai_steps(workflow):
        for name, server in ai_step.ai.mcp_servers.items():
            yield ("steps", step_id, "ai", "mcp_servers", name, "env"), server.env, None


def ai_steps(workflow: WorkflowFile) -> Iterator[tuple[str, AiStep]]:
    for step_id, step in workflow.steps.items():
        if step.type == "ai":
            yield step_id, cast("AiStep", step)


def json_schema() -> JsonObject:
    """Return the JSON Schema for editors, with every other name of a key."""
    schema = json_schema_of(WorkflowFile)
    definitions = schema["$defs"]
    schema["properties"]["steps"]["additionalProperties"] = False  # other names are refused
    schema["patternProperties"] = {"^x-": True}  # parts that other keys merge in
    models: list[type[Part]] = [ToolPart, *(each.schema for each in STEP_TYPES.values())]
    for model in models:
        _also_called(model, definitions[model.__name__])
    schema["properties"]["steps"] = {"anyOf": [schema["properties"]["steps"], _list_schema(definitions)]}
    schema["properties"]["finally"] = {**schema["properties"]["steps"], "title": "Finally"}
    _also_called(WorkflowFile, schema)
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema, "title": "Shotclock workflow"}


def _list_schema(definitions: JsonObject) -> JsonObject:
    """Return the schema of steps as a list, whose elements have a name of their own."""
    name = {"type": "string", "minLength": 1, "maxLength": STEP_NAME_LIMIT, "pattern": STEP_NAME}
    shapes: list[JsonObject] = [{"type": "string", "minLength": 1}]
    for model in (each.schema for each in STEP_TYPES.values()):
        listed, step = f"{model.__name__}InList", definitions[model.__name__]
        definitions[listed] = {**step, "properties": {**step["properties"], "id": name, "name": name}}
        definitions[listed]["not"] = {"required": ["id", "name"]}
        shapes.append({"$ref": f"#/$defs/{listed}"})
    return {"type": "array", "minItems": 1, "items": {"anyOf": shapes}}


def _also_called(model: type[Part], schema: JsonObject) -> None:
    required: list[str] = schema.get("required", [])
    either: list[JsonObject] = []
    for field_name in model.model_fields:
        name, *others = model.keys_of(field_name)
        for other in others:
            schema["properties"][other] = schema["properties"][name]
        if others and name in required:
            required.remove(name)
            either.append({"oneOf": [{"required": [each]} for each in (name, *others)]})
        elif others:
            either.append({"not": {"required": [name, others[0]]}})
    if either:
        schema["allOf"] = either
