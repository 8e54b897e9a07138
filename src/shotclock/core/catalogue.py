"""Operations, and the catalogue of an App as plain data: enough to list and call its commands without importing it."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from typing import Any, Literal, Self, get_args

from .json_values import of_json, to_json
from .limits import Clocks
from .proposal import Policy
from .value_types import JsonObject, entity, field, fields_of, value

Isolation = Literal["auto", "process", "shared", "inline"]
RunsIn = Literal["process", "shared", "inline"]
_WITHDRAWN = {"loop": "use 'shared'", "thread": "use 'process', or 'inline' for an async function"}
OvertimeKeys = JsonObject | bool | str | None


def hyphenate(name: str) -> str:
    """Return the name as a command line writes it."""
    return name.replace("_", "-").lower()


@value
class HandlerReference:
    """A handler that another process imports, by module and name."""

    module: str
    qualname: str
    is_async: bool = False


Handler = Callable[..., Any] | HandlerReference


@entity(frozen=True)
class Operation:
    """A handler with a name, and where it runs: in a worker `process` (the default, `auto`), in the `shared` process of
    all such handlers, or `inline` on the caller's event loop."""

    name: str
    handler: Handler
    isolation: Isolation = "auto"
    mutates: bool = True  # the default is yes: an envelope must not promise more than was declared
    idempotent: bool = False
    clocks: Clocks = field(default_factory=Clocks)
    overtime: OvertimeKeys = None
    min_time_ms: int = 0
    is_async: bool = field(init=False)
    place: RunsIn = field(init=False)

    def __post_init__(self) -> None:
        if not self.name:
            raise ValueError("an operation needs a name")
        if not callable(self.handler) and not isinstance(self.handler, HandlerReference):
            raise TypeError(f"the handler of {self.name!r} cannot be called")
        if self.isolation not in get_args(Isolation):
            hint = _WITHDRAWN.get(self.isolation, f"it must be one of {', '.join(get_args(Isolation))}")
            raise ValueError(f"{self.name!r}: there is no isolation {self.isolation!r}: {hint}")
        handler = self.handler
        is_async = handler.is_async if isinstance(handler, HandlerReference) else inspect.iscoroutinefunction(handler)
        if self.isolation == "inline" and not is_async:
            raise ValueError(f"{self.name!r} is not async: isolate it in a 'process', or in the 'shared' process")
        place: RunsIn = "process" if self.isolation == "auto" else self.isolation
        object.__setattr__(self, "is_async", is_async)
        object.__setattr__(self, "place", place)


JsonSchema = JsonObject

CONFIRMATION = "confirm_destructive"  # the argument that confirms a destructive call, beside those of the command

_NUMBER = r"(0|[1-9][0-9]*)"
_SEMANTIC_VERSION = re.compile(rf"{_NUMBER}\.{_NUMBER}\.{_NUMBER}(-[0-9A-Za-z.-]+)?(\+[0-9A-Za-z.-]+)?")

# The default budget of a caller of a command that may become a job, and the variable that sets it.
DEFAULT_BUDGET_MS = 30_000
BUDGET_VARIABLE = "AGENT_CALL_BUDGET_MS"


@value
class Interruption:
    """Declaration that a command may outlive its caller's budget, as a job."""

    detach: bool = True
    resume: bool = False  # after a crash, the same call continues from its last checkpoint
    idle_timeout_ms: int = 300_000  # without progress for this long it is stalled
    max_lifetime_ms: int = 3_600_000

    def __post_init__(self) -> None:
        if not self.detach and not self.resume:
            raise ValueError("interruption: a command that can neither detach nor resume cannot be interrupted")
        for name in ("idle_timeout_ms", "max_lifetime_ms"):
            if getattr(self, name) < 1000:
                raise ValueError(f"interruption: {name} must be at least 1000")


@value
class ApprovedFile:
    """A file that the operator approves: shown as a diff, and modified as text."""

    path: str  # absolute. Set by the app, never by the caller
    proposed: str  # the parameter with the whole new text of the file
    decision: str | None = None  # the parameter that gets the decision. Callers cannot set it


@value
class Listing:
    """How clients show a command, a resource or a prompt."""

    title: str | None = None
    icons: tuple[JsonObject, ...] = ()
    annotations: JsonObject | None = None
    meta: JsonObject | None = None
    uri: str = ""  # of a resource: its URI or its template
    mime_type: str | None = None


@value
class SecretParameter:
    """A parameter whose value is in an environment variable, never among the arguments."""

    name: str
    variable: str
    is_required: bool = True


@value
class CommandSpec:
    name: str
    handler: HandlerReference
    summary: str = ""
    description: str = ""
    input_schema: JsonSchema = field(default_factory=dict)
    output_schema: JsonSchema | None = None
    positionals: tuple[str, ...] = ()  # parameters without a flag, in order
    isolation: Isolation = "auto"
    clocks: Clocks = field(default_factory=Clocks)
    mutates: bool = True
    idempotent: bool = False
    destructive: bool | None = None  # None: not declared
    confirm: bool = True  # a destructive one runs only when its caller has confirmed it
    steps: tuple[str, ...] = ()
    interruption: Interruption | None = None
    error_codes: tuple[str, ...] = ()
    requires_person: str | None = None  # the text that a person must type before it runs; `{name}` is an argument
    approval: Policy | None = None
    approved_file: ApprovedFile | None = None  # with `approval`: the file that the call would write
    single_flight: str | None = None
    """Calls with the same key run one at a time on this machine; `{name}` is an argument."""
    concurrency: int | None = None
    reads_stdin: bool = False
    on_mcp: bool = True
    overtime: OvertimeKeys = None
    min_time_ms: int = 0
    secrets: tuple[SecretParameter, ...] = ()
    streams: bool = False  # it yields the items of its result
    open_world: bool | None = None  # whether it reaches beyond this machine; None where that is not declared
    listing: Listing = field(default_factory=Listing)
    shown_name: str = ""  # of a resource or a prompt, whose `name` begins with its kind
    uses_state: bool = False  # it runs where the lifespan of the App is open

    @property
    def kind(self) -> str:
        """Return `command`, or the kind of a declaration that only a server offers."""
        kind, blank, _ = self.name.partition(" ")
        return kind if blank else "command"

    @property
    def hyphenated(self) -> str:
        return hyphenate(self.name)

    @property
    def needs_confirmation(self) -> bool:
        """Return whether the caller must confirm it. Where a person decides, that person confirms."""
        return bool(self.destructive) and self.confirm and self.approval is None and self.requires_person is None

    @property
    def may_be_unfinished(self) -> bool:
        """Return whether an answer may come before the work has ended: it continues, or waits for a person."""
        return self.interruption is not None or self.approval is not None

    @property
    def defaults(self) -> JsonObject:
        properties = self.input_schema.get("properties", {})
        return {name: declared["default"] for name, declared in properties.items() if "default" in declared}

    def operation(self) -> Operation:
        return Operation(**{name: getattr(self, name) for name in fields_of(Operation)})


def semantic_version(written: str) -> str | None:
    """Return the version in three numbers (`1.2` is 1.2.0), None where that is impossible."""
    padded = written + ".0" * max(0, 2 - written.count("."))
    return next((text for text in (written, padded) if _SEMANTIC_VERSION.fullmatch(text)), None)


@value
class Catalogue:
    name: str
    version: str
    summary: str = ""
    operation_timeout_ms: int = 120_000
    commands: tuple[CommandSpec, ...] = ()
    served: tuple[CommandSpec, ...] = ()  # resources, prompts and completions, which only a server offers
    list_page_size: int | None = None
    clocks: Clocks = field(default_factory=Clocks)
    proposals: bool = False  # its server has tools for free proposals to the operator
    debug: bool = False
    is_served: bool = False  # clients of a server call it: they get less of exceptions, also from jobs
    elicitation: bool = False  # a client may ask its own user for an approval
    notes: tuple[str, ...] = ()  # for its author, when it is served
    file: str | None = None  # its real path, to which approvals are bound. None without a file or without approvals

    @property
    def secret_variables(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(secret.variable for spec in self.commands for secret in spec.secrets))

    @property
    def semantic_version(self) -> str | None:
        return semantic_version(self.version)

    def to_plain(self) -> JsonObject:
        plain: JsonObject = to_json(self)
        return plain

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> Self:
        catalogue: Self = of_json(cls, plain)
        return catalogue

    @property
    def everything(self) -> tuple[CommandSpec, ...]:
        return self.commands + self.served

    def find(self, name: str) -> CommandSpec | None:
        if " " in name:
            return next((each for each in self.served if each.name == name), None)
        meant = hyphenate(name)
        return next((command for command in self.commands if command.hyphenated == meant), None)
