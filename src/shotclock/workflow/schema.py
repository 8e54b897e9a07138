"""The workflow file as it is written: every key, its type and its aliases. No meaning yet, only shape.

`shotclock schema` prints this as JSON Schema for editors.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AliasChoices, BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from ..core.durations import DurationError
from .kinds import KINDS, duration_ms

Scalar = str | int | float | bool | None
# A number in the unit of the step's kind, or text such as 500ms, 30s, 5m, 1h30m, PT30S.
Duration = str | int | float


def _checked_duration(written: Any) -> Any:
    try:
        duration_ms(written, "s")
    except DurationError as error:
        raise ValueError(str(error)) from None
    return written


Clock = Annotated[Duration, BeforeValidator(_checked_duration)]


def _as_list(written: Any) -> Any:
    return [written] if isinstance(written, str) else written


Names = Annotated[list[str], BeforeValidator(_as_list)]
StepId = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_.-]*$", max_length=200)]


class Part(BaseModel):
    """A part of the file. A key that nobody knows is a mistake, never ignored."""

    model_config = ConfigDict(extra="forbid", frozen=True, populate_by_name=True)


class Backoff(Part):
    mode: Literal["fixed", "linear", "exponential"] = "fixed"
    delay_ms: int = Field(default=1000, ge=0)
    max_delay_ms: int | None = Field(default=None, ge=0)
    jitter: bool = False


class Retry(Part):
    max: int = Field(ge=0, le=1000)
    """How many times more, after the first."""
    backoff: Backoff = Backoff()


class Reaction(Part):
    """What else happens once a step has failed or succeeded."""

    retry: Retry | None = None
    run: Names = []
    goto: str | None = None


class StepPart(Part):
    """What every step may say."""

    timeout: Clock | None = None
    soft: Clock | None = None
    idle: Clock | None = None
    grace: Clock | None = None
    depends_on: Names = Field(default=[], validation_alias=AliasChoices("depends_on", "needs"))
    if_: str | bool | None = Field(default=None, alias="if")
    fail_if: str | None = None
    continue_on_failure: bool = False
    on_fail: Reaction | None = None
    on_success: Reaction | None = None
    for_each: bool | str | list[Any] | None = Field(
        default=None, validation_alias=AliasChoices("for_each", "forEach"), serialization_alias="for_each"
    )
    env: dict[str, Scalar] = {}
    cwd: str | None = Field(
        default=None, validation_alias=AliasChoices("cwd", "working_directory"), serialization_alias="cwd"
    )
    transform: str | None = None
    output_schema: dict[str, Any] | None = None
    tags: Names = []
    idempotent: bool = False
    overtime: dict[str, Any] | bool | None = None
    description: str | None = None


class CommandStep(StepPart):
    type: Literal["command"] = "command"
    exec: str = Field(min_length=1)
    stdin: str | None = None
    output_format: Literal["auto", "json", "text"] = "auto"


class HttpStep(StepPart):
    type: Literal["http_client"]
    url: str = Field(min_length=1)
    method: str = "GET"
    headers: dict[str, Scalar] = {}
    body: Any = None
    params: dict[str, Scalar] = {}
    max_body_bytes: int = Field(default=10_000_000, ge=1)
    output_file: str | None = None


class McpStep(StepPart):
    type: Literal["mcp"]
    command: str | None = None
    args: list[str] = Field(
        default=[], validation_alias=AliasChoices("args", "command_args"), serialization_alias="args"
    )
    url: str | None = None
    headers: dict[str, Scalar] = {}
    method: str = Field(min_length=1, validation_alias=AliasChoices("method", "tool"), serialization_alias="method")
    arguments: dict[str, Any] = Field(
        default={},
        validation_alias=AliasChoices("arguments", "method_args", "methodArgs"),
        serialization_alias="arguments",
    )
    connect_timeout: Clock | None = None

    @model_validator(mode="after")
    def _one_server(self) -> McpStep:
        if (self.command is None) == (self.url is None):
            raise ValueError("name one server: either `command` to start it, or `url` to reach it")
        return self


class ToolStep(StepPart):
    type: Literal["tool"]
    tool: str = Field(min_length=1)
    arguments: dict[str, Any] = Field(
        default={}, validation_alias=AliasChoices("arguments", "args"), serialization_alias="arguments"
    )


class GitStep(StepPart):
    type: Literal["git-checkout"]
    repository: str = Field(min_length=1)
    ref: str | None = None
    fetch_depth: int | None = Field(default=None, ge=0)
    path: str | None = None
    clone_timeout_ms: int | None = Field(default=None, ge=0)


class HumanStep(StepPart):
    type: Literal["human-input"]
    prompt: str = Field(min_length=1)
    default: str | None = None
    placeholder: str | None = None
    allow_empty: bool = False
    multiline: bool = False


class FunctionStep(StepPart):
    type: Literal["function"]
    target: str = Field(min_length=1)
    """package.module:app or path/to/file.py:app"""
    command: str = Field(min_length=1)
    arguments: dict[str, Any] = Field(
        default={}, validation_alias=AliasChoices("arguments", "args"), serialization_alias="arguments"
    )


class WorkflowStep(StepPart):
    type: Literal["workflow"]
    workflow: str = Field(
        min_length=1, validation_alias=AliasChoices("workflow", "config"), serialization_alias="workflow"
    )
    inputs: dict[str, Any] = Field(
        default={}, validation_alias=AliasChoices("inputs", "args"), serialization_alias="inputs"
    )


AnyStep = CommandStep | HttpStep | McpStep | ToolStep | GitStep | HumanStep | FunctionStep | WorkflowStep
STEP_TYPES: dict[str, type[StepPart]] = {
    "command": CommandStep,
    "http_client": HttpStep,
    "mcp": McpStep,
    "tool": ToolStep,
    "git-checkout": GitStep,
    "human-input": HumanStep,
    "function": FunctionStep,
    "workflow": WorkflowStep,
}
assert set(STEP_TYPES) == set(KINDS)


class ToolPart(Part):
    """A custom tool: a command with named arguments."""

    name: str | None = None
    description: str | None = None
    exec: str = Field(min_length=1)
    input_schema: dict[str, Any] | None = Field(
        default=None, validation_alias=AliasChoices("input_schema", "inputSchema"), serialization_alias="input_schema"
    )
    stdin: str | None = None
    env: dict[str, Scalar] = {}
    cwd: str | None = None
    timeout: Clock | None = None


class InputPart(Part):
    type: Literal["string", "number", "integer", "boolean", "object", "array", "any"] = "any"
    description: str | None = None
    required: bool = False
    default: Any = None


class DefaultsPart(Part):
    """What holds for every step that does not say otherwise. Durations with their unit: the kinds differ in theirs."""

    timeout: Annotated[str, BeforeValidator(_checked_duration)] | None = None
    soft: Annotated[str, BeforeValidator(_checked_duration)] | None = None
    idle: Annotated[str, BeforeValidator(_checked_duration)] | None = None
    grace: Annotated[str, BeforeValidator(_checked_duration)] | None = None
    env: dict[str, Scalar] = {}
    cwd: str | None = None
    continue_on_failure: bool = False
    on_fail: Reaction | None = None


Step = Annotated[AnyStep, Field(discriminator="type")]


class WorkflowFile(Part):
    """The whole file."""

    version: str | int | float = "1.0"
    name: str | None = None
    description: str | None = None
    timeout: Clock | None = None
    max_parallelism: int = Field(default=8, ge=1, le=1000)
    fail_fast: bool = False
    env: dict[str, Scalar] = {}
    inputs: dict[str, InputPart] = {}
    outputs: dict[str, str] = {}
    tools: dict[str, ToolPart] = {}
    steps: dict[StepId, Step] = Field(
        min_length=1, validation_alias=AliasChoices("steps", "checks"), serialization_alias="steps"
    )
    defaults: DefaultsPart = DefaultsPart()


def json_schema() -> dict[str, Any]:
    """For editors. `steps` is the name; `checks`, the older one, is read as well."""
    schema = WorkflowFile.model_json_schema(by_alias=True, mode="serialization")
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "Shotclock workflow", **schema}
