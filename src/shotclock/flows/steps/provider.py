"""Step types and their providers: the keys of every step, the registry of types, and the interface of a provider.

A new type is one file in this package, with its `StepType`, and one line in `MODULES`. It is imported when a workflow
has such a step, also by commands that only read the workflow.
"""

from __future__ import annotations

import os
import random
import re
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, AsyncExitStack, nullcontext
from functools import cache
from importlib import import_module
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, Literal, Protocol, get_args

from ...calls.call import Call, Outcome
from ...core.envelope import Envelope, Problem
from ...core.errors import Ending
from ...core.limits import MAX_MS, NS_PER_MS, WORK_CLOCKS, Clocks, DurationError, WallTime, parse_duration_ms
from ...core.overtime import OvertimeError, OvertimePolicy
from ...core.proposal import Proposal
from ...core.validation import After, Before, Limits, Part, field, read_hints
from ...core.value_types import JsonObject, record, replace, value
from ...core.value_types import field as dataclass_field
from ...supervise.clock import monotonic_ns
from .matrix import combine

if TYPE_CHECKING:
    import asyncio

    from ...calls.runtime import Runtime
    from ...calls.supervised_commands import OnOutput
    from ...people.inbox import Inbox


MODULES = {
    "command": ".command",
    "http_client": "._http",
    "mcp": ".mcp",
    "tool": ".command",
    "git-checkout": ".git",
    "human-input": "._human",
    "function": ".function",
    "workflow": ".workflow",
    "ai": ".ai",
    "ui": "._ui",
}

Unit = Literal["s", "ms"]


def duration_ms(written: object, unit: Unit) -> int:
    return parse_duration_ms(written, bare=unit)


# --- keys of a step -----------------------------------------------------------------------------------------

Scalar = str | int | float | bool | None
# A number in the unit of the step's kind, or text such as 500ms, 30s, 5m, 1h30m, PT30S.
Duration = str | int | float


def _duration_in(unit: Unit) -> Callable[[Any], Any]:
    def check(written: Any) -> Any:
        try:
            duration_ms(written, unit)
        except DurationError as error:
            raise ValueError(str(error)) from None
        return written

    return check


# By the unit of a bare number. The clocks of a step have the unit of its type, see StepPart.
Seconds = Annotated[Duration, Before(_duration_in("s"))]
Milliseconds = Annotated[Duration, Before(_duration_in("ms"))]
Clock = Duration


def as_list(written: Any) -> Any:
    if not isinstance(written, str | list):
        raise ValueError(f"should be text or a list of texts, and is {written!r:.40}")
    return [written] if isinstance(written, str) else written


def _with_names(names: list[str]) -> list[str]:
    if not all(all(name.strip() for name in entry.split("|")) for entry in names):
        raise ValueError("a name is empty; write A, or A|B for either")
    return names


Names = Annotated[list[str], Before(as_list, str | list[str]), After(_with_names)]


def _as_dependencies(written: Any) -> Any:
    """Return the dependencies as a list of `NAME` and `{NAME: ended}`. `{NAME: ok}` is another form of `NAME`."""
    if isinstance(written, dict):
        written = [written]
    elif not isinstance(written, list):
        written = as_list(written)
    entries: list[Any] = []
    for each in written:
        pairs = each.items() if isinstance(each, dict) and each else [(each, "ok")]
        for name, end in pairs:
            if end not in ("ok", "ended"):
                raise ValueError(f"{name}: should be ok or ended, and is {end!r:.40}")
            entries.append(name if end == "ok" else {name: end})
    return entries


def _with_dependencies(entries: list[Any]) -> list[Any]:
    _with_names([name for entry in entries for name in ([entry] if isinstance(entry, str) else entry)])
    return entries


Dependency = str | dict[str, Literal["ok", "ended"]]
Dependencies = Annotated[
    list[Dependency],
    Before(_as_dependencies, str | dict[str, Literal["ok", "ended"]] | list[Dependency]),
    After(_with_dependencies),
]
WholeMs = Annotated[int, Limits(ge=0, le=MAX_MS)]


class Backoff(Part):
    mode: Literal["fixed", "linear", "exponential"] = "fixed"
    delay_ms: WholeMs = 1000
    max_delay_ms: WholeMs | None = None
    jitter: bool = False

    def longest_ms(self, attempts: int) -> int:
        """Return the pause after so many attempts, without jitter, which only shortens it."""
        growth: dict[str, int] = {"linear": attempts, "exponential": 2 ** min(attempts - 1, 60)}
        delay_ms = self.delay_ms * growth.get(self.mode, 1)
        return delay_ms if self.max_delay_ms is None else min(delay_ms, self.max_delay_ms)

    def pause_ms(self, attempts: int, retry_after_ms: int) -> int:
        """Return the pause with its jitter, and at least as long as the other side demands."""
        share = random.uniform(0.5, 1.0) if self.jitter else 1
        return max(int(self.longest_ms(attempts) * share), retry_after_ms)


class Retry(Part):
    max: int = field(ge=0, le=1000)  # attempts after the first
    backoff: Backoff = Backoff()


def _failures(written: Any) -> Any:
    for each in written if isinstance(written, list) else [written]:
        is_exit_code = type(each) is int and 1 <= each <= 255
        if not is_exit_code and not (isinstance(each, str) and ERROR_CODE.fullmatch(each)):
            raise ValueError(f"should be exit codes from 1 to 255 or error codes such as TIMEOUT, and is {each!r:.40}")
    return written if isinstance(written, list) else [written]


ERROR_CODE = re.compile("[A-Z][A-Z0-9_]*")


class StepRetry(Retry):
    on: Annotated[list[int | str], Before(_failures)] = field(default=[])
    """Exit codes and error codes to retry after; by default all."""


class Reaction(Part):
    """`on_fail` and `on_success`: reactions to the end of a step."""

    retry: StepRetry | None = None
    run: Names = field(default=[])
    goto: str | None = None


class Approval(Part):
    """`approval`: settings of the proposal before the step runs."""

    ttl: Seconds = "24h"
    remind: Seconds | None = None
    when_expired: Literal["reject", "default"] = "reject"
    """Without a decision in time, the step fails, or runs as if approved."""
    deciders: Names = field(default=[])
    destructive: bool = False


def _overtime(written: Any) -> Any:
    try:
        OvertimePolicy.of(written, 1, bare="s")
    except OvertimeError as error:
        raise ValueError(str(error)) from None
    return written


OvertimeKey = Annotated[JsonObject | bool | str | int | float | None, Before(_overtime)]


def _known_matrix(written: dict[str, list[Any]] | None) -> dict[str, list[Any]] | None:
    if written is not None:
        combine(written)
    return written


class EnvFile(Part):
    """A file of variables."""

    path: str = field(min_length=1)
    optional: bool = False


def _with_paths(written: Any) -> Any:
    """Return a list of mappings with a `path`, as which a plain name may be written."""
    listed = written if isinstance(written, list) else [written]
    return [{"path": each} if isinstance(each, str) else each for each in listed]


EnvFileNames = Annotated[list[EnvFile], Before(_with_paths, str | EnvFile | list[str | EnvFile])]


def _check_path(path: str) -> str:
    if path.startswith("/") or ".." in path.split("/"):
        raise ValueError(f"{path[:60]!r} may lead out of the step's working directory: write a path below it")
    if "{{" in path or "{%" in path or "\0" in path:
        raise ValueError(f"{path[:60]!r}: there are no templates in paths of artifacts; write a pattern such as *.log")
    return path


class ArtifactPath(Part):
    """A file, a directory or a pattern, relative to the working directory of the step."""

    path: Annotated[str, After(_check_path)] = field(min_length=1)
    if_missing: Literal["warn", "error", "ignore"] = "warn"


ArtifactPaths = Annotated[list[ArtifactPath], Before(_with_paths, str | ArtifactPath | list[str | ArtifactPath])]


class StepPart(Part):
    """The keys that every step may have."""

    if TYPE_CHECKING:  # each step type declares its own
        type: str

    timeout: Clock | None = None
    soft: Clock | None = None
    idle: Clock | None = None
    grace: Clock | None = None
    wind_down: Clock | None = None
    min_time: Clock | None = None
    depends_on: Dependencies = field(default=[], keys=("depends_on", "needs"))
    accept_skipped: bool = False
    """A dependency that its own condition skipped counts as met."""
    if_: str | bool | None = field(default=None, keys=("if",))
    fail_if: str | None = None
    continue_on_failure: bool = False
    on_fail: Reaction | None = None
    on_success: Reaction | None = None
    for_each: bool | str | list[Any] | None = field(default=None, keys=("for_each", "forEach"))
    matrix: Annotated[dict[str, list[Any]] | None, After(_known_matrix)] = None
    env: dict[str, Scalar] = field(default={})
    env_file: EnvFileNames = field(default=[])
    cwd: str | None = field(default=None, keys=("cwd", "working_directory"))
    transform: str | None = None
    output_schema: JsonObject | None = None
    tags: Names = field(default=[])
    idempotent: bool = False
    overtime: OvertimeKey = None
    approval: Approval | bool = False
    artifacts: ArtifactPaths = field(default=[])
    """Files that are kept with the run when the step has ended."""
    runs_on: str | None = field(default=None, min_length=1)
    """The Temporal queue of the step, by default the run's. Ignored without Temporal."""
    description: str | None = None

    def check_together(self) -> None:
        if self.matrix is not None and self.for_each is not None:
            raise ValueError("give the step either `matrix` or `for_each`")

    @property
    def items(self) -> bool | str | list[Any] | None:
        """Return the items as written: of `for_each`, or the combinations of `matrix`."""
        return self.for_each if self.matrix is None else combine(self.matrix)

    @classmethod
    def before_field(cls, name: str, written: Any) -> Any:
        if written is None or name not in _CLOCKS:
            return written
        return _duration_in(_read_unit(cls))(written)  # type: ignore[arg-type] # a class can be hashed


@cache  # a file may have thousands of clocks
def _read_unit(schema: type[StepPart]) -> Unit:
    """Return the unit of bare numbers in the clocks."""
    (kind,) = get_args(read_hints(schema)["type"])
    return STEP_TYPES[kind].unit


_CLOCKS = frozenset((*WORK_CLOCKS, "connect_timeout", "min_time"))


def check_server(command: str | None, url: str | None, transport: str | None) -> None:
    """Raise ValueError unless an MCP server has either a command or a URL, and the matching transport."""
    if (command is None) == (url is None):
        raise ValueError("name one server: either `command` to start it, or `url` to reach it")
    if transport is not None and (transport == "stdio") != (command is not None):
        raise ValueError("`transport: stdio` goes with `command`, `transport: http` with `url`")


# --- the types ---------------------------------------------------------------------------------------------


@value
class StepType:
    """One type of step. The units are those of existing files."""

    name: str
    summary: str
    schema: type[StepPart]
    make_provider: Callable[[RunServices], Provider]
    default_ms: int | None  # 0 is none, None is that of the run
    default_for: Callable[[Any], int] | None = None  # where it depends on other keys of the step
    unit: Unit = "s"  # of a bare number in its clocks
    timeout_key: str = "timeout"  # with a dot inside a part of the step
    takes_slot: bool = True  # counts for `max_parallelism`. Waiting for a person does not
    has_typed_output: bool = False  # text in its output is not read as JSON
    prints_text: bool = False  # its output is text unless it is read as JSON
    can_repeat: bool = False  # an interrupted step can be repeated: it finds its own progress
    can_extend: bool = True  # overtime can move its timeout
    waits_when_approved: bool = False  # it can wait for a person after its approval. Other steps must not begin twice
    asks_before_start: bool = False  # it may request its own approval, under the key of its attempt
    value_keys: frozenset[str] = frozenset()  # keys with values of any type. The others hold text
    rules: Mapping[str, str] = MappingProxyType({})  # failure rules by error code; without a slash, of this type
    other_rule: str = "failed"

    @property
    def own_keys(self) -> tuple[str, ...]:
        """Return the provider's keys. The others are never templates."""
        return _own_keys(self.schema)  # type: ignore[arg-type]  # a class can be hashed

    def timeout_ms(self, written: object, step: StepPart | None = None) -> int | None:
        """Return the timeout or the default; 0 is none. Raises DurationError."""
        if written is None and step is not None and self.default_for is not None:
            return self.default_for(step)
        return self.default_ms if written is None else duration_ms(written, self.unit)

    def rule_for(self, code: str | None) -> str | None:
        if code is None:
            return None
        rule = self.rules.get(code) or _RULES.get(code) or self.other_rule
        return rule if "/" in rule else f"{self.name}/{rule}"


@cache
def _own_keys(schema: type[StepPart]) -> tuple[str, ...]:
    return tuple(name for name in schema.model_fields if name not in StepPart.model_fields and name != "type")


_RULES = {"TIMEOUT": "timeout", "NO_TIME_LEFT": "timeout", "STALLED": "stalled", "CANCELLED": "cancelled"}


class StepTypes(Mapping[str, StepType]):
    """The step types by name, imported on use."""

    def __init__(self, modules: dict[str, str]) -> None:
        self._modules = modules
        self._loaded: dict[str, StepType] = {}

    def __getitem__(self, name: str) -> StepType:
        if name not in self._loaded:
            self._loaded |= {each.name: each for each in import_module(self._modules[name], __package__).STEP_TYPES}
        return self._loaded[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._modules)

    def __len__(self) -> int:
        return len(self._modules)

    def __contains__(self, name: object) -> bool:
        return name in self._modules

    @property
    def loaded(self) -> Iterable[StepType]:
        return self._loaded.values()


STEP_TYPES = StepTypes(MODULES)

# --- providers ----------------------------------------------------------------------------------------------


@value
class ForeignProposal:
    id: str
    shown: Mapping[str, object]


Waits = Callable[[str, Proposal | ForeignProposal], AbstractContextManager[Any]]


@value
class FileTool:
    name: str
    description: str
    input_schema: Mapping[str, Any]


class FileTools(Protocol):
    async def describe(self, name: str) -> FileTool:
        """Return a tool. Raises KeyError for an unknown name, Failure where it cannot run."""
        ...

    async def call(self, name: str, arguments: Mapping[str, Any]) -> tuple[Envelope, Any]:
        """Call a tool as a step would, and return its envelope and output. The arguments are never templates."""
        ...


@record
class CancelledAttempt:
    """The result of an attempt, left by its provider before it passes a cancellation on."""

    result: StepResult | None = None


@value
class NestedRun:
    file: Path
    inputs: Mapping[str, Any]
    env: Mapping[str, str]
    step_id: str
    item: tuple[int, int]  # of the step, and the number of items
    stop: asyncio.Future[str]  # stops the run, once it holds the reason


RunFile = Callable[[NestedRun], Awaitable[Envelope]]
"""Runs a file inside the bound of the current scope. Raises Failure if it cannot run."""


@value
class StepCall:
    """One attempt of one step, with the step's clocks inside the run's deadline."""

    step_id: str
    settings: Mapping[str, Any]  # with their templates replaced
    clocks: Clocks
    env: Mapping[str, str]
    folder: Path  # the step's `cwd`, else the directory of the file
    key: str = ""  # identifies this attempt, also where the run is resumed
    run_began_at: WallTime | None = None  # a proposal under the key from before this time belongs to another run
    waits: Waits = dataclass_field(default=lambda key, proposal: nullcontext())
    """Entered while the step waits for a person."""
    item: tuple[int, int] = (0, 1)  # of `for_each`: the index from 0, and the number of items
    parks: bool = False  # the run is parked when it waits long for people
    values: Mapping[str, str] = dataclass_field(default_factory=dict)
    """Variables with the values interpolated into a shell command."""
    own_env: Mapping[str, str] | None = None  # of `env`, set by the file. None: unknown
    holds_secret: Callable[[str], bool] = lambda text: False
    run_file: RunFile | None = None  # runs another workflow inside this run
    redact: Callable[[str], str] = lambda text: text  # removes the secrets of the run from a text
    overtime: OvertimePolicy | None = None
    min_time_ms: int = 0  # with less left it is not started
    tools: FileTools | None = None
    used_ms: int = 0  # used by a process that died
    is_approved: bool = False
    cancelled: CancelledAttempt = dataclass_field(default_factory=CancelledAttempt)
    on_output: OnOutput | None = None  # takes the output of a command while it runs

    @property
    def name(self) -> str:
        return f"step {self.step_id}"


@value
class StepResult:
    outcome: Outcome | Envelope  # an envelope where the runtime has already answered the call
    output: Any = None
    rule: str | None = None  # such as `command/timeout`, where it does not follow from the code
    rewrite: Callable[[Envelope], Envelope] | None = None  # merges the envelope of a Shotclock server into the step's
    details: Mapping[str, Any] | None = None  # stored with the output: the model and its usage, `partial`
    cut: str | None = None  # why the output is incomplete. Such an output is never passed on
    is_long: bool = False  # because it is too long


class Provider(Protocol):
    step_type: StepType

    async def run(self, step: StepCall, call: Call, runtime: Runtime) -> StepResult:
        """Run one attempt within its call's clocks. A cancelled one may leave its result in `step`. Raises Failure."""
        ...

    async def close(self) -> None:
        return


def cancelled_outcome(ending: Ending) -> Outcome:
    return Outcome(ending, Problem("CANCELLED", "the step was cancelled"))


def remaining_limit_ms(call: Call) -> int:
    """Return the rest of a step's limit; 0 is no limit."""
    limit_ms = call.clocks.timeout_ms or 0
    return limit_ms and max(1, limit_ms - (monotonic_ns() - call.started_ns) // NS_PER_MS)


def bounded_by_run(call: Call) -> Call:
    """Return the call bounded by its run: the step's clock stops while a person decides."""
    waiting = replace(call, time=replace(call.time, clocks=replace(call.clocks, timeout_ms=0)))
    waiting.restart_clocks()
    return waiting


Aside = Callable[[], AbstractContextManager[Any]]


@value
class RunServices:
    inbox: Callable[[], Inbox]
    aside: Aside = nullcontext  # entered while a question is open at the terminal: other output stops
    environment: Mapping[str, str] = dataclass_field(default_factory=lambda: os.environ)
    """With secrets that child processes do not get."""


class Providers:
    def __init__(self, services: RunServices) -> None:
        self._services = services
        self._made: dict[str, Provider] = {}

    def __getitem__(self, step_type: str) -> Provider:
        if step_type not in self._made:
            self._made[step_type] = STEP_TYPES[step_type].make_provider(self._services)
        return self._made[step_type]

    async def close(self) -> None:
        async with AsyncExitStack() as stack:  # closes all, even if one fails
            for provider in self._made.values():
                stack.push_async_callback(provider.close)
