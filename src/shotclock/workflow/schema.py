"""The workflow file as it is written: every key, its type and its aliases. No meaning yet, only shape.

`shotclock schema` prints this as JSON Schema for editors. What each type of step may say is declared by its provider.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

from ..core.durations import DurationError, parse_duration_ms
from ..core.envelope import join_problems
from ..core.errors import Failure
from ..core.shapes import Before, Limits, OneOf, Part, field, json_schema_of
from ..core.values import Read, as_plain, read_json
from ..providers.command import Shell
from ..providers.step_type import STEP_TYPES, Milliseconds, Reaction, Scalar, Seconds, StepPart

StepId = Annotated[str, Limits(pattern=r"^[A-Za-z_][A-Za-z0-9_.-]*$", max_length=200)]


class _StepSchemas(Mapping[str, type[Part]]):
    """By type the schema of a step, imported when a file has one."""

    def __getitem__(self, name: str) -> type[Part]:
        return STEP_TYPES[name].schema

    def __iter__(self) -> Iterator[str]:
        return iter(STEP_TYPES)

    def __len__(self) -> int:
        return len(STEP_TYPES)


class ToolPart(Part):
    """A custom tool: a command with named arguments."""

    name: str | None = None
    description: str | None = None
    exec: str = field(min_length=1)
    input_schema: dict[str, Any] | None = field(default=None, keys=("input_schema", "inputSchema"))
    shell: Shell | None = None
    stdin: str | None = None
    env: dict[str, Scalar] = field(default={})
    cwd: str | None = None
    timeout: Milliseconds | None = None


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
    """What holds for every step that does not say otherwise. Durations with their unit: the kinds differ in theirs."""

    timeout: WithUnit | None = None
    soft: WithUnit | None = None
    idle: WithUnit | None = None
    grace: WithUnit | None = None
    env: dict[str, Scalar] = field(default={})
    cwd: str | None = None
    shell: Shell | None = None
    continue_on_failure: bool = False
    on_fail: Reaction | None = None


Step = Annotated[StepPart, OneOf("type", _StepSchemas())]


class WorkflowFile(Part):
    """The whole file."""

    version: str | int | float = "1.0"
    name: str | None = None
    description: str | None = None
    timeout: Seconds | None = None
    max_parallelism: int = field(default=8, ge=1, le=1000)
    fail_fast: bool = False
    env: dict[str, Scalar] = field(default={})
    inputs: dict[str, InputPart] = field(default={})
    outputs: dict[str, str] = field(default={})
    tools: dict[str, ToolPart] = field(default={})
    steps: dict[StepId, Step] = field(min_length=1, keys=("steps", "checks"))
    defaults: DefaultsPart = DefaultsPart()


# --- inputs -------------------------------------------------------------------------------------------------

# Of a value that is refused.
SHOWN_LIMIT = 200


def check_inputs(workflow: WorkflowFile, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return what was given, with defaults, as the types of the inputs want it. Raises Failure that lists everything
    wrong."""
    errors = [
        {"field": f"inputs.{name}", "message": f"the workflow has no such input; {_list_inputs(workflow)}"}
        for name in given
        if name not in workflow.inputs
    ]
    checked = {}
    for name, declared in workflow.inputs.items():
        if name not in given:
            if declared.required and declared.default is None:
                errors.append({"field": f"inputs.{name}", "message": "is required"})
            checked[name] = declared.default
            continue
        try:
            checked[name] = _as_declared(given[name], declared.type)
        except ValueError as error:
            errors.append({"field": f"inputs.{name}", "message": str(error)})
    if errors:
        message = join_problems(errors)
        raise Failure("ARG_ERROR", message, context={"errors": errors})
    return checked


def _as_declared(value: Any, kind: str) -> Any:
    """Text that was given for something else is read as JSON. Raise ValueError with what is wrong."""
    read = Read(value)
    if kind not in ("string", "any") and isinstance(value, str):
        with contextlib.suppress(ValueError):
            read = read_json(value)
    if not read.kept:
        read = as_plain(read.value)
    if read.kept:
        raise ValueError(f"{_shorten(read.kept[0])} cannot be kept exactly as a number; give it as text")
    if not _fits(read.value, kind):
        raise ValueError(f"{_shorten(repr(read.value))} is not of type {kind}")
    return read.value


def _shorten(text: str) -> str:
    return text if len(text) <= SHOWN_LIMIT else f"{text[:SHOWN_LIMIT]}…"


def _list_inputs(workflow: WorkflowFile) -> str:
    return f"there are {', '.join(workflow.inputs)}" if workflow.inputs else "it takes none"


_TYPES: dict[str, tuple[type, ...]] = {
    "string": (str,),
    "number": (int, float),
    "integer": (int,),
    "boolean": (bool,),
    "object": (dict,),
    "array": (list,),
    "any": (object,),
}


def _fits(value: Any, kind: str) -> bool:
    return isinstance(value, _TYPES[kind]) and (kind in ("boolean", "any") or not isinstance(value, bool))


# --- JSON Schema --------------------------------------------------------------------------------------------


def json_schema() -> dict[str, Any]:
    """For editors. Every other name of a key is there as well."""
    schema = json_schema_of(WorkflowFile)
    definitions = schema["$defs"]
    schema["properties"]["steps"]["additionalProperties"] = False  # names that are none
    schema["patternProperties"] = {"^x-": True}  # what others merge in
    _also_called(WorkflowFile, schema)
    models: list[type[Part]] = [ToolPart, *(each.schema for each in STEP_TYPES.values())]
    for model in models:
        _also_called(model, definitions[model.__name__])
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema, "title": "Shotclock workflow"}


def _also_called(model: type[Part], schema: dict[str, Any]) -> None:
    required: list[str] = schema.get("required", [])
    either: list[dict[str, Any]] = []
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
