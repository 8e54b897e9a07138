"""The workflow file as it is written: every key, its type and its aliases. No meaning yet, only shape.

`shotclock schema` prints this as JSON Schema for editors.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, Literal, get_args

from pydantic import (
    AfterValidator,
    AliasChoices,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    field_validator,
    model_validator,
)

from ..core.durations import MAX_MS, DurationError, parse_duration_ms
from .shell_quoting import SHELLS
from .step_types import KINDS, Unit, duration_ms

Scalar = str | int | float | bool | None
# A number in the unit of the step's kind, or text such as 500ms, 30s, 5m, 1h30m, PT30S.
Duration = str | int | float


def _duration_in(unit: Unit) -> Callable[[Any], Any]:
    def checked(written: Any) -> Any:
        try:
            duration_ms(written, unit)
        except DurationError as error:
            raise ValueError(str(error)) from None
        return written

    return checked


# By the unit of a bare number. The clocks of a step are checked by its kind's, see StepPart.
Seconds = Annotated[Duration, BeforeValidator(_duration_in("s"))]
Milliseconds = Annotated[Duration, BeforeValidator(_duration_in("ms"))]
Clock = Duration


def _as_list(written: Any) -> Any:
    if not isinstance(written, str | list):
        raise ValueError(f"should be text or a list of texts, and is {written!r:.40}")
    return [written] if isinstance(written, str) else written


def _with_names(names: list[str]) -> list[str]:
    if not all(all(name.strip() for name in entry.split("|")) for entry in names):
        raise ValueError("a name is empty; write A, or A|B for either")
    return names


Names = Annotated[
    list[str],
    BeforeValidator(_as_list, json_schema_input_type=str | list[str]),
    AfterValidator(_with_names),
]
WholeMs = Annotated[int, Field(ge=0, le=MAX_MS)]
StepId = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_.-]*$", max_length=200)]


class Part(BaseModel):
    """A part of the file. A key that nobody knows is a mistake, never ignored."""

    # Strict, because a file says what it means: `max: true` is not one try, `"3"` is text.
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    @classmethod
    def keys_of(cls, name: str) -> list[str]:
        """What a field is called in the file: its own name first, then what else is read."""
        info = cls.model_fields[name]
        if isinstance(info.validation_alias, AliasChoices):
            return [str(choice) for choice in info.validation_alias.choices]
        return [info.alias or name]


class Backoff(Part):
    mode: Literal["fixed", "linear", "exponential"] = "fixed"
    delay_ms: WholeMs = 1000
    max_delay_ms: WholeMs | None = None
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


class Approval(Part):
    """That an operator has to say yes first, and how."""

    ttl: Seconds = "24h"
    remind: Seconds | None = None
    when_expired: Literal["reject", "default"] = "reject"
    """What happens when nobody decides: it fails, or it goes on as if it had been approved."""
    deciders: Names = []
    destructive: bool = False


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
    approval: Approval | bool = False
    description: str | None = None

    @field_validator("timeout", "soft", "idle", "grace", "connect_timeout", mode="before", check_fields=False)
    @classmethod
    def _in_unit_of_kind(cls, written: Any) -> Any:
        (kind,) = get_args(cls.model_fields["type"].annotation)
        return written if written is None else _duration_in(KINDS[kind].unit)(written)


def _known_shell(words: list[str]) -> list[str]:
    name = words[0].rpartition("/")[2] if words else ""
    if name not in SHELLS:
        known = ", ".join(SHELLS)
        raise ValueError(f"{name!r} is not a shell that can be used here: write one of {known}, also with its path")
    if any(set(word[1:]) & set("cs") for word in words[1:] if word.startswith("-") and not word.startswith("--")):
        raise ValueError("-c and -s are given by shotclock: leave them out")
    return words


# The shell of a command, with its options.
Shell = Annotated[
    list[str],
    BeforeValidator(_as_list, json_schema_input_type=str | list[str]),
    AfterValidator(_known_shell),
]


class CommandStep(StepPart):
    type: Literal["command"] = "command"
    exec: str = Field(min_length=1)
    shell: Shell | None = None
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
    transport: Literal["stdio", "http"] | None = None
    """As in other files: it follows from `command` or `url`."""

    @model_validator(mode="after")
    def _one_server(self) -> McpStep:
        if (self.command is None) == (self.url is None):
            raise ValueError("name one server: either `command` to start it, or `url` to reach it")
        if self.transport is not None and (self.transport == "stdio") != (self.command is not None):
            raise ValueError("`transport: stdio` goes with `command`, `transport: http` with `url`")
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
    clone_timeout_ms: WholeMs | None = None


class HumanStep(StepPart):
    type: Literal["human-input"]
    prompt: str = Field(min_length=1)
    default: str | None = None
    placeholder: str | None = None
    allow_empty: bool = False
    multiline: bool = False
    choices: list[str] = []
    """The only answers that will do."""


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
    shell: Shell | None = None
    stdin: str | None = None
    env: dict[str, Scalar] = {}
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


WithUnit = Annotated[str, BeforeValidator(_with_unit)]


class DefaultsPart(Part):
    """What holds for every step that does not say otherwise. Durations with their unit: the kinds differ in theirs."""

    timeout: WithUnit | None = None
    soft: WithUnit | None = None
    idle: WithUnit | None = None
    grace: WithUnit | None = None
    env: dict[str, Scalar] = {}
    cwd: str | None = None
    shell: Shell | None = None
    continue_on_failure: bool = False
    on_fail: Reaction | None = None


Step = Annotated[AnyStep, Field(discriminator="type")]


class WorkflowFile(Part):
    """The whole file."""

    version: str | int | float = "1.0"
    name: str | None = None
    description: str | None = None
    timeout: Seconds | None = None
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
    """For editors. Every other name of a key is there as well."""
    schema = WorkflowFile.model_json_schema(by_alias=True, mode="validation")
    definitions = schema["$defs"]
    schema["properties"]["steps"]["additionalProperties"] = False  # names that are none
    schema["patternProperties"] = {"^x-": True}  # what others merge in
    _also_called(WorkflowFile, schema)
    models: list[type[Part]] = [ToolPart, *STEP_TYPES.values()]
    for model in models:
        _also_called(model, definitions[model.__name__])
    for definition in definitions.values():
        definition.pop("title", None)
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema, "title": "Shotclock workflow"}


def _also_called(model: type[Part], schema: dict[str, Any]) -> None:
    required: list[str] = schema.get("required", [])
    either: list[dict[str, Any]] = []
    for field in model.model_fields:
        name, *others = model.keys_of(field)
        for other in others:
            schema["properties"][other] = schema["properties"][name]
        if others and name in required:
            required.remove(name)
            either.append({"oneOf": [{"required": [each]} for each in (name, *others)]})
        elif others:
            either.append({"not": {"required": [name, others[0]]}})
    if either:
        schema["allOf"] = either
