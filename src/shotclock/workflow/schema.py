"""The workflow file as it is written: every key, its type and its aliases. No meaning yet, only shape.

`shotclock schema` prints this as JSON Schema for editors.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, Literal, get_args, get_type_hints

from ..core.durations import MAX_MS, DurationError, parse_duration_ms
from .shapes import After, Before, Limits, OneOf, Part, field, json_schema_of
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
Seconds = Annotated[Duration, Before(_duration_in("s"))]
Milliseconds = Annotated[Duration, Before(_duration_in("ms"))]
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
    Before(_as_list, str | list[str]),
    After(_with_names),
]
WholeMs = Annotated[int, Limits(ge=0, le=MAX_MS)]
StepId = Annotated[str, Limits(pattern=r"^[A-Za-z_][A-Za-z0-9_.-]*$", max_length=200)]


class Backoff(Part):
    mode: Literal["fixed", "linear", "exponential"] = "fixed"
    delay_ms: WholeMs = 1000
    max_delay_ms: WholeMs | None = None
    jitter: bool = False


class Retry(Part):
    max: int = field(ge=0, le=1000)
    """How many times more, after the first."""
    backoff: Backoff = Backoff()


class Reaction(Part):
    """What else happens once a step has failed or succeeded."""

    retry: Retry | None = None
    run: Names = field(default=[])
    goto: str | None = None


class Approval(Part):
    """That an operator has to say yes first, and how."""

    ttl: Seconds = "24h"
    remind: Seconds | None = None
    when_expired: Literal["reject", "default"] = "reject"
    """What happens when nobody decides: it fails, or it goes on as if it had been approved."""
    deciders: Names = field(default=[])
    destructive: bool = False


class StepPart(Part):
    """What every step may say."""

    timeout: Clock | None = None
    soft: Clock | None = None
    idle: Clock | None = None
    grace: Clock | None = None
    depends_on: Names = field(default=[], keys=("depends_on", "needs"))
    if_: str | bool | None = field(default=None, keys=("if",))
    fail_if: str | None = None
    continue_on_failure: bool = False
    on_fail: Reaction | None = None
    on_success: Reaction | None = None
    for_each: bool | str | list[Any] | None = field(default=None, keys=("for_each", "forEach"))
    env: dict[str, Scalar] = field(default={})
    cwd: str | None = field(default=None, keys=("cwd", "working_directory"))
    transform: str | None = None
    output_schema: dict[str, Any] | None = None
    tags: Names = field(default=[])
    idempotent: bool = False
    overtime: dict[str, Any] | bool | None = None
    approval: Approval | bool = False
    description: str | None = None

    @classmethod
    def before_field(cls, name: str, written: Any) -> Any:
        if written is None or name not in _CLOCKS:
            return written
        (kind,) = get_args(get_type_hints(cls)["type"])
        return _duration_in(KINDS[kind].unit)(written)


_CLOCKS = frozenset(("timeout", "soft", "idle", "grace", "connect_timeout"))


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
    Before(_as_list, str | list[str]),
    After(_known_shell),
]


class CommandStep(StepPart):
    type: Literal["command"] = "command"
    exec: str = field(min_length=1)
    shell: Shell | None = None
    stdin: str | None = None
    output_format: Literal["auto", "json", "text"] = "auto"


class HttpStep(StepPart):
    type: Literal["http_client"]
    url: str = field(min_length=1)
    method: str = "GET"
    headers: dict[str, Scalar] = field(default={})
    body: Any = None
    params: dict[str, Scalar] = field(default={})
    max_body_bytes: int = field(default=10_000_000, ge=1)
    output_file: str | None = None


class McpStep(StepPart):
    type: Literal["mcp"]
    command: str | None = None
    args: list[str] = field(default=[], keys=("args", "command_args"))
    url: str | None = None
    headers: dict[str, Scalar] = field(default={})
    method: str = field(min_length=1, keys=("method", "tool"))
    arguments: dict[str, Any] = field(
        default={},
        keys=("arguments", "method_args", "methodArgs"),
    )
    connect_timeout: Clock | None = None
    transport: Literal["stdio", "http"] | None = None
    """As in other files: it follows from `command` or `url`."""

    def check_together(self) -> None:
        if (self.command is None) == (self.url is None):
            raise ValueError("name one server: either `command` to start it, or `url` to reach it")
        if self.transport is not None and (self.transport == "stdio") != (self.command is not None):
            raise ValueError("`transport: stdio` goes with `command`, `transport: http` with `url`")


class ToolStep(StepPart):
    type: Literal["tool"]
    tool: str = field(min_length=1)
    arguments: dict[str, Any] = field(default={}, keys=("arguments", "args"))


class GitStep(StepPart):
    type: Literal["git-checkout"]
    repository: str = field(min_length=1)
    ref: str | None = None
    fetch_depth: int | None = field(default=None, ge=0)
    path: str | None = None
    clone_timeout_ms: WholeMs | None = None


class HumanStep(StepPart):
    type: Literal["human-input"]
    prompt: str = field(min_length=1)
    default: str | None = None
    placeholder: str | None = None
    allow_empty: bool = False
    multiline: bool = False
    choices: list[str] = field(default=[])
    """The only answers that will do."""


class FunctionStep(StepPart):
    type: Literal["function"]
    target: str = field(min_length=1)
    """package.module:app or path/to/file.py:app"""
    command: str = field(min_length=1)
    arguments: dict[str, Any] = field(default={}, keys=("arguments", "args"))


class WorkflowStep(StepPart):
    type: Literal["workflow"]
    workflow: str = field(min_length=1, keys=("workflow", "config"))
    inputs: dict[str, Any] = field(default={}, keys=("inputs", "args"))


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


Step = Annotated[AnyStep, OneOf("type", STEP_TYPES)]


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
    models: list[type[Part]] = [ToolPart, *STEP_TYPES.values()]
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
