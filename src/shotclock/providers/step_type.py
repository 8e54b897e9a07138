"""The types of steps: what every step may say, and where each type is declared.

A new type is one file in this package, which declares a `StepType` with the schema of its steps and their provider, and
one line in `MODULES`. Such a file is imported when a workflow has a step of its type, also by those who only read the
workflow; so what is slow to load is imported by the functions that need it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib import import_module
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args, get_type_hints

from ..core.durations import MAX_MS, DurationError, parse_duration_ms
from ..core.records import dataclass
from ..core.shapes import After, Before, Limits, Part, field

if TYPE_CHECKING:
    from .provider import Provider, RunServices

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

    if TYPE_CHECKING:  # each type of step has its own
        type: str

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
        return _duration_in(STEP_TYPES[kind].unit)(written)


_CLOCKS = frozenset(("timeout", "soft", "idle", "grace", "connect_timeout"))


# --- the types ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StepType:
    """All that is particular about one type of step. Existing files are written with these units, so they are kept."""

    name: str
    summary: str
    """What such a step is, for the reference."""
    schema: type[StepPart]
    make_provider: Callable[[RunServices], Provider]
    default_ms: int | None
    """The timeout where none is written; 0 is none, and None is as long as the run that it is in."""
    unit: Unit = "s"
    """Of a bare number in its clocks."""
    timeout_key: str = "timeout"
    takes_slot: bool = True
    """Whether it counts among the `max_parallelism` that are under way. Waiting for a person is no work."""
    has_typed_output: bool = False
    """Whether its output has types of its own: text in it is text, and not read as JSON."""
    prints_text: bool = False
    """Whether its output is text where nobody reads that as JSON."""
    can_repeat: bool = False
    """Whether one that was cut off can simply be tried again: it finds out by itself how far it was."""
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
        """The keys that are the provider's. The others are the engine's own and never templates."""
        return tuple(name for name in self.schema.model_fields if name not in StepPart.model_fields and name != "type")

    def timeout_ms(self, written: object) -> int | None:
        """Return what the file says as milliseconds, or the default; 0 is none. Raises DurationError."""
        return self.default_ms if written is None else duration_ms(written, self.unit)

    def rule_for(self, code: str | None) -> str | None:
        """Return the rule of a failure with this code; None is for none."""
        if code is None:
            return None
        rule = self.rules.get(code) or _RULES.get(code) or self.other_rule
        return rule if "/" in rule else f"{self.name}/{rule}"


_RULES = {"TIMEOUT": "timeout", "NO_TIME_LEFT": "timeout", "STALLED": "stalled", "CANCELLED": "cancelled"}


class StepTypes(Mapping[str, StepType]):
    """By name every type of step that there is, each imported when it is asked for."""

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
        """Those that were asked for so far."""
        return self._known.values()


STEP_TYPES = StepTypes(MODULES)
