"""Step types and their providers: the keys of every step, the registry of types, and what a provider gets and returns.

A new type is one file in this package, which declares a `StepType` with the schema of its steps and their provider, and
one line in `MODULES`. Such a file is imported when a workflow has a step of its type, also by commands that only read
the workflow; so what is slow to load is imported by the functions that need it. Order, retries, templates and the
record of a run are not the provider's: the engine does them.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from importlib import import_module
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, Literal, Protocol, get_args

from ..core.clocks import MAX_MS, NS_PER_MS, WORK_CLOCKS, Clocks, DurationError, WallTime, parse_duration_ms
from ..core.envelope import Envelope, Problem
from ..core.errors import Ending
from ..core.overtime import OvertimeError, OvertimePolicy
from ..core.proposal import Proposal
from ..core.validation import After, Before, Limits, Part, field, read_hints
from ..core.value_types import field as dataclass_field
from ..core.value_types import replace, value
from ..process.clock import monotonic_ns

if TYPE_CHECKING:
    import asyncio

    from ..inbox.inbox import Inbox
    from ..runtime.call import Call, Outcome
    from ..runtime.runtime import Runtime
    from .workflow import RunFile


# By step type the module that declares it: in this package, or anywhere by its full name.
MODULES = {
    "command": ".command",
    "http_client": ".http",
    "mcp": ".mcp",
    "tool": ".command",
    "git-checkout": ".git",
    "human-input": ".human",
    "function": ".function",
    "workflow": ".workflow",
    "ai": ".ai",
    "ui": ".ui",
}

Unit = Literal["s", "ms"]


def duration_ms(written: object, unit: Unit) -> int:
    """Return the milliseconds of a duration as people write it, or of a bare number (in quotes or not) in the unit of
    where it stands. Raises DurationError."""
    return parse_duration_ms(written, bare=unit)


# --- what a step may say ------------------------------------------------------------------------------------

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


# By the unit of a bare number. The clocks of a step are checked by its kind's, see StepPart.
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


Names = Annotated[
    list[str],
    Before(as_list, str | list[str]),
    After(_with_names),
]
WholeMs = Annotated[int, Limits(ge=0, le=MAX_MS)]


class Backoff(Part):
    mode: Literal["fixed", "linear", "exponential"] = "fixed"
    delay_ms: WholeMs = 1000
    max_delay_ms: WholeMs | None = None
    jitter: bool = False


class Retry(Part):
    max: int = field(ge=0, le=1000)
    """How many times more, after the first."""
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
    """The exit codes and error codes after which the step is tried again; any if there are none."""


class Reaction(Part):
    """`on_fail` and `on_success`: what else happens once a step has failed or succeeded."""

    retry: StepRetry | None = None
    run: Names = field(default=[])
    goto: str | None = None


class Approval(Part):
    """`approval`: how an operator is asked before the step runs."""

    ttl: Seconds = "24h"
    remind: Seconds | None = None
    when_expired: Literal["reject", "default"] = "reject"
    """What happens when nobody decides: it fails, or it goes on as if it had been approved."""
    deciders: Names = field(default=[])
    destructive: bool = False


def _overtime(written: Any) -> Any:
    try:
        OvertimePolicy.of(written, 1, bare="s")
    except OvertimeError as error:
        raise ValueError(str(error)) from None
    return written


OvertimeKey = Annotated[dict[str, Any] | bool | str | int | float | None, Before(_overtime)]


class StepPart(Part):
    """The keys that every step may have."""

    if TYPE_CHECKING:  # each type of step has its own
        type: str

    timeout: Clock | None = None
    soft: Clock | None = None
    idle: Clock | None = None
    grace: Clock | None = None
    wind_down: Clock | None = None
    min_time: Clock | None = None
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
    overtime: OvertimeKey = None
    approval: Approval | bool = False
    runs_on: str | None = field(default=None, min_length=1)
    """The queue of Temporal whose workers carry it out, where it is not that of the run. Here it means nothing."""
    description: str | None = None

    @classmethod
    def before_field(cls, name: str, written: Any) -> Any:
        if written is None or name not in _CLOCKS:
            return written
        return _duration_in(_read_unit(cls))(written)  # type: ignore[arg-type] # a class can be hashed


@cache  # a file may have thousands of clocks
def _read_unit(schema: type[StepPart]) -> Unit:
    """Return the unit of bare numbers in the clocks of this type of step."""
    (kind,) = get_args(read_hints(schema)["type"])
    return STEP_TYPES[kind].unit


_CLOCKS = frozenset((*WORK_CLOCKS, "connect_timeout", "min_time"))


def check_server(command: str | None, url: str | None, transport: str | None) -> None:
    """Raise ValueError unless an MCP server is named in one way, and its transport is the one that goes with it."""
    if (command is None) == (url is None):
        raise ValueError("name one server: either `command` to start it, or `url` to reach it")
    if transport is not None and (transport == "stdio") != (command is not None):
        raise ValueError("`transport: stdio` goes with `command`, `transport: http` with `url`")


# --- the types ---------------------------------------------------------------------------------------------


@value
class StepType:
    """All that is particular about one type of step. Existing files are written with these units, so they are kept."""

    name: str
    summary: str
    """What such a step is, for the reference."""
    schema: type[StepPart]
    make_provider: Callable[[RunServices], Provider]
    default_ms: int | None
    """The timeout where none is written; 0 is none, and None is as long as the run that it is in."""
    default_for: Callable[[Any], int] | None = None
    """The same, where it follows from what else the step says."""
    unit: Unit = "s"
    """Of a bare number in its clocks."""
    timeout_key: str = "timeout"
    """Where the file says it, from the step on; with a dot inside of one of its parts."""
    takes_slot: bool = True
    """Whether it counts among the `max_parallelism` that are under way. Waiting for a person is no work."""
    has_typed_output: bool = False
    """Whether its output has types of its own: text in it is text, and not read as JSON."""
    prints_text: bool = False
    """Whether its output is text where nobody reads that as JSON."""
    can_repeat: bool = False
    """Whether one that was cut off can simply be tried again: it finds out by itself how far it was."""
    can_extend: bool = True
    """Whether its timeout can be moved while it runs."""
    waits_when_approved: bool = False
    """Whether it can still wait for a person once it was approved. Whatever else has begun may not begin twice."""
    asks_before_start: bool = False
    """Whether it may ask for an approval of its own, under the key of its try, before it begins."""
    value_keys: frozenset[str] = frozenset()
    """Those of its own keys that hold values of any type. The others hold text."""
    rules: Mapping[str, str] = MappingProxyType({})
    """By error code the rule of a failure, found in error.context.rule; without a slash it is one of this type."""
    other_rule: str = "failed"

    @property
    def own_keys(self) -> tuple[str, ...]:
        """Return the keys that are the provider's. The others are the engine's own and never templates."""
        return _own_keys(self.schema)  # type: ignore[arg-type]  # a class can be hashed, whatever its instances can

    def timeout_ms(self, written: object, step: StepPart | None = None) -> int | None:
        """Return what the file says as milliseconds, or the default; 0 is none. Raises DurationError."""
        if written is None and step is not None and self.default_for is not None:
            return self.default_for(step)
        return self.default_ms if written is None else duration_ms(written, self.unit)

    def rule_for(self, code: str | None) -> str | None:
        """Return the rule of a failure with this code; None is for none."""
        if code is None:
            return None
        rule = self.rules.get(code) or _RULES.get(code) or self.other_rule
        return rule if "/" in rule else f"{self.name}/{rule}"


@cache
def _own_keys(schema: type[StepPart]) -> tuple[str, ...]:
    return tuple(name for name in schema.model_fields if name not in StepPart.model_fields and name != "type")


_RULES = {"TIMEOUT": "timeout", "NO_TIME_LEFT": "timeout", "STALLED": "stalled", "CANCELLED": "cancelled"}


class StepTypes(Mapping[str, StepType]):
    """The types of steps by name, each imported when it is asked for."""

    def __init__(self, modules: dict[str, str]) -> None:
        self._modules = modules
        self._known: dict[str, StepType] = {}

    def __getitem__(self, name: str) -> StepType:
        if name not in self._known:
            module = import_module(self._modules[name], __package__)
            self._known |= {each.name: each for each in module.STEP_TYPES}
        return self._known[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._modules)

    def __len__(self) -> int:
        return len(self._modules)

    def __contains__(self, name: object) -> bool:
        return name in self._modules

    @property
    def loaded(self) -> Iterable[StepType]:
        """Return the types that were asked for so far."""
        return self._known.values()


STEP_TYPES = StepTypes(MODULES)

# --- providers ----------------------------------------------------------------------------------------------


@value
class ForeignProposal:
    """A proposal in the inbox of another server, as that server describes it."""

    id: str
    shown: Mapping[str, object]


Waits = Callable[[str, Proposal | ForeignProposal], AbstractContextManager[Any]]


@value
class FileTool:
    """A tool of the file's own `tools`, as whoever calls it has to know it."""

    name: str
    description: str
    input_schema: Mapping[str, Any]


class FileTools(Protocol):
    """The tools of the file that a step is in."""

    async def describe(self, name: str) -> FileTool:
        """Return what a tool is. Raises KeyError where there is none of that name, and Failure where it cannot run."""
        ...

    async def call(self, name: str, arguments: Mapping[str, Any]) -> tuple[Envelope, Any]:
        """Call a tool as a step of its own would, inside the call that this is made in. Return its answer and output.
        The arguments are values, never templates: they may come from anywhere."""
        ...


@value
class StepCall:
    """One try of one step: everything is rendered, the clocks are the step's own, the run's deadline is around it."""

    step_id: str
    settings: Mapping[str, Any]
    """The step's own keys, with their templates replaced."""
    clocks: Clocks
    env: Mapping[str, str]
    """All that a child may see of the environment."""
    folder: Path
    """Where relative paths start: the step's `cwd`, else the directory of the file."""
    key: str = ""
    """Names this one try of this run's step, also to a process that goes on with the run."""
    run_began_at: WallTime | None = None
    """What was asked for under the key before that was asked for by another run."""
    waits: Waits = dataclass_field(default=lambda key, proposal: nullcontext())
    """Entered while a person is waited for."""
    item: tuple[int, int] = (0, 1)
    """Which of how many items it is done for, counted from 0."""
    parks: bool = False
    """The run is parked once it has waited for people long enough."""
    values: Mapping[str, str] = dataclass_field(default_factory=dict)
    """Variables that hold what was interpolated into a shell command."""

    own_env: Mapping[str, str] | None = None
    """What of `env` the file itself says; the rest is our own. None: nobody has told them apart."""
    holds_secret: Callable[[str], bool] = lambda text: False
    """Whether a secret that the run knows is in a text."""
    run_file: RunFile | None = None
    """Runs another workflow inside this run."""
    redact: Callable[[str], str] = lambda text: text
    """Takes the secrets that the run knows out of a text."""
    overtime: OvertimePolicy | None = None
    min_time_ms: int = 0
    """With less than this left it is not started."""
    tools: FileTools | None = None
    """The tools of the file, for a step that calls them by itself."""
    used_ms: int = 0
    """What a process that died had used of the time of this try."""
    is_approved: bool = False
    """An operator has approved this very step."""

    @property
    def name(self) -> str:
        return f"step {self.step_id}"


@value
class StepResult:
    """The result of one try, as its provider returns it."""

    outcome: Outcome | Envelope
    """What happened; an envelope where the runtime has answered the call already, or another call stands for it."""
    output: Any = None
    rule: str | None = None
    """What kind of failure it was, as `command/timeout`, where the step type does not say so by its code."""
    rewrite: Callable[[Envelope], Envelope] | None = None
    """Makes of the answer what a server has said that speaks of its calls as we do."""
    details: Mapping[str, Any] | None = None
    """What is written down with the output: of a model which one, and what it used; `partial` where it was cut off."""
    cut: str | None = None
    """Why the output is not whole, where it is not. A cut output is never handed on."""


class Provider(Protocol):
    """The code that carries out the steps of one type."""

    step_type: StepType

    async def run(self, step: StepCall, call: Call, runtime: Runtime) -> StepResult:
        """Carry out one try, bounded by the clocks of its call. Whoever began the call answers it.

        Raises Failure where it cannot be begun, and what a cancellation raises; that may carry what came of the step
        until then (`hand_over`)."""
        ...

    async def close(self) -> None:
        """Stop what it keeps between steps."""
        return


def hand_over(cancelled: asyncio.CancelledError, result: StepResult) -> None:
    """Let what came of a step until it was cancelled go along with the cancellation."""
    cancelled.step_result = result  # type: ignore[attr-defined]


def result_left_by(cancelled: asyncio.CancelledError) -> StepResult | None:
    """Return what came of the step that was cancelled, where its provider could still say so."""
    result = getattr(cancelled, "step_result", None)
    return result if isinstance(result, StepResult) else None


def envelope_left_by(cancelled: asyncio.CancelledError) -> Envelope | None:
    """Return the answer of the call that was cancelled, where the runtime could still give one."""
    envelope = getattr(cancelled, "envelope", None)
    return envelope if isinstance(envelope, Envelope) else None


def cancelled_outcome(ending: Ending) -> Outcome:
    """Return what is said of a step that was cancelled."""
    from ..runtime.call import Outcome

    return Outcome(ending, Problem("CANCELLED", "the step was cancelled"))


def remaining_limit_ms(call: Call) -> int:
    """Return what is left of a step's own limit, for what is called for it inside the same deadline; 0 is no limit."""
    limit_ms = call.clocks.timeout_ms or 0
    return limit_ms and max(1, limit_ms - (monotonic_ns() - call.started_ns) // NS_PER_MS)


def bounded_by_run(call: Call) -> Call:
    """Return the same call bounded by its run alone: while a person is asked, the clock of the step stands still."""
    waiting = replace(call, clocks=replace(call.clocks, timeout_ms=0))
    waiting.restart_clocks()
    return waiting


Aside = Callable[[], AbstractContextManager[Any]]


@value
class RunServices:
    """The parts of a run that its providers use."""

    inbox: Callable[[], Inbox]
    """Where people are asked."""
    aside: Aside = nullcontext
    """Entered while a question is open at the terminal, for whoever else draws on it."""
    environment: Mapping[str, str] = dataclass_field(default_factory=lambda: os.environ)
    """All that the run found there, with its secrets: for what no child gets to see."""


class Providers:
    """The providers of a run and of those inside it, each made when the first step of its type is tried."""

    def __init__(self, services: RunServices) -> None:
        self._services = services
        self._made: dict[str, Provider] = {}

    def __getitem__(self, step_type: str) -> Provider:
        if step_type not in self._made:
            self._made[step_type] = STEP_TYPES[step_type].make_provider(self._services)
        return self._made[step_type]

    async def close(self) -> None:
        """Stop what the providers keep between steps."""
        from contextlib import AsyncExitStack

        async with AsyncExitStack() as stack:  # a provider that cannot be closed does not keep the others
            for provider in self._made.values():
                stack.push_async_callback(provider.close)
