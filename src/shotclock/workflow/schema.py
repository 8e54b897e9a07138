"""The workflow file as it is written: every key, its type and its aliases. No meaning yet, only shape.

`shotclock schema` prints this as JSON Schema for editors. What each type of step may say is declared by its provider.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

from ..core.durations import DurationError, parse_duration_ms
from ..core.shapes import Before, Limits, OneOf, Part, field, json_schema_of
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
