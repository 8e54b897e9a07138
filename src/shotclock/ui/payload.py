"""The payload of an execution: strict objects, every problem at once, each with its path.

    {"commandId": "…", "taskId": "…", "source": "…", "expectedFormat": "android-ui-automator", "timeoutMs": 30000,
     "actions": [{"id": "snap", "type": "snapshot_ui"}]}

`read_execution` is the only way to an `Execution`: what is of this type is valid, and its budgets fit.

docs/design.md: R54.
"""

from __future__ import annotations

import json
import math
from typing import Annotated, Any, Literal, cast

from ..core.errors import Failure
from ..core.validation import Before, Part, ValidationError, field
from ..core.value_types import value
from . import budgets
from .aliases import use_documented_names
from .budgets import ActionBudget, Misfit

Mode = Literal["direct", "artifact_compiled", "best_effort"]
MODES: tuple[Mode, ...] = ("direct", "artifact_compiled", "best_effort")

MAX_ID_LENGTH = 128
MAX_SOURCE_LENGTH = 64
MAX_MATCHER_LENGTH = 512
MAX_URI_LENGTH = 2_048
MAX_SNAPSHOT_BYTES = 64_000
DEFAULT_SNAPSHOT_BYTES = 24_000
MAX_SCROLLS = 50
DEFAULT_SCROLLS = 20

_MODIFIERS = ("ctrl", "alt", "shift", "meta")
KEYS = (
    "back", "home", "recents", "enter", "tab", "escape", "backspace", "delete", "space", "arrow_up", "arrow_down",
    "arrow_left", "arrow_right", "page_up", "page_down", "move_home", "move_end",
)  # fmt: skip


# --- values -------------------------------------------------------------------------------------------------


def _milliseconds(written: Any) -> int:
    """Return a number of milliseconds. Raises ValueError for what is no finite, whole number."""
    if type(written) is not int and (type(written) is not float or not math.isfinite(written)):
        raise ValueError("must be a finite number")
    if written != int(written):
        raise ValueError("must be a whole number of milliseconds")
    return int(written)


def _budget_up_to(limit_ms: int, *, least_ms: int = 1) -> Before:
    def read(written: Any) -> int:
        ms = _milliseconds(written)
        if ms < least_ms:
            raise ValueError("must be greater than 0" if least_ms else "must not be negative")
        if ms > limit_ms:
            raise ValueError(f"must not exceed {limit_ms}")
        return ms

    return Before(read, int)


def _text_up_to(limit: int) -> Before:
    def read(written: Any) -> Any:
        if isinstance(written, str) and not written.strip():
            raise ValueError("must not be blank")
        if isinstance(written, str) and len(written) > limit:
            raise ValueError(f"must have at most {limit} characters")
        return written

    return Before(read, str)


def _key(written: Any) -> Any:
    if not isinstance(written, str):
        raise ValueError("must be the name of a key")
    *modifiers, key = written.lower().split("+") if len(written) > 1 else [written]
    if any(each not in _MODIFIERS for each in modifiers) or not (key in KEYS or len(key) == 1):
        raise ValueError(f"{written!r:.40} is no key: one of {', '.join(KEYS)}, or a character, behind ctrl+, alt+, …")
    return written


def _ratio(written: Any) -> Any:
    if type(written) not in (int, float) or not 0.05 <= written <= 1:
        raise ValueError("must be between 0.05 and 1")
    return float(written)


def _count_up_to(limit: int) -> Before:
    def read(written: Any) -> Any:
        if type(written) is not int or not 1 <= written <= limit:
            raise ValueError(f"must be a whole number between 1 and {limit}")
        return written

    return Before(read, int)


def _coordinate(written: Any) -> float:
    if type(written) not in (int, float) or not 0 <= written <= 100_000:
        raise ValueError("must be a number between 0 and 100000")
    return float(written)


Sleep = Annotated[int, _budget_up_to(budgets.MAX_SLEEP_MS, least_ms=0)]
Interaction = Annotated[int, _budget_up_to(budgets.MAX_INTERACTION_MS)]
Wait = Annotated[int, _budget_up_to(budgets.MAX_WAIT_MS)]
Navigation = Annotated[int, _budget_up_to(budgets.MAX_NAVIGATION_MS)]
MatcherText = Annotated[str, _text_up_to(MAX_MATCHER_LENGTH)]
Identifier = Annotated[str, _text_up_to(MAX_ID_LENGTH)]


class Matcher(Part):
    """What a node must be like. All that is said must hold; the first node that fits is meant."""

    text_equals: MatcherText | None = field(default=None, keys=("textEquals",))
    text_contains: MatcherText | None = field(default=None, keys=("textContains",))
    resource_id: MatcherText | None = field(default=None, keys=("resourceId",))
    role: MatcherText | None = None
    content_desc_equals: MatcherText | None = field(default=None, keys=("contentDescEquals",))
    content_desc_contains: MatcherText | None = field(default=None, keys=("contentDescContains",))
    css: MatcherText | None = None
    ref: MatcherText | None = None
    """A node of the last snapshot, as in `[ref=e12]`."""

    def check_together(self) -> None:
        if not self.criteria:
            raise ValueError(f"must have at least one of {', '.join(_MATCHER_KEYS)}")

    @property
    def criteria(self) -> dict[str, str]:
        """Return what must hold, by the name that it has in the payload."""
        return {name: text for name, text in self.model_dump().items() if text is not None}

    def describe(self) -> str:
        return ", ".join(f"{name}={text!r}" for name, text in self.criteria.items())


_MATCHER_KEYS = tuple(info.keys[0] for info in Matcher.model_fields.values())


class Coordinate(Part):
    """A point on the screen or in the viewport, from its upper left."""

    x: Annotated[float, Before(_coordinate, float)]
    y: Annotated[float, Before(_coordinate, float)]


# --- actions ------------------------------------------------------------------------------------------------


class Params(Part):
    """The params of one type of action."""


class OpenApp(Params):
    application_id: Identifier = field(keys=("applicationId",))
    timeout_ms: Interaction | None = field(default=None, keys=("timeoutMs",))


class OpenUri(Params):
    uri: Annotated[str, _text_up_to(MAX_URI_LENGTH)]
    timeout_ms: Interaction | None = field(default=None, keys=("timeoutMs",))


class CloseApp(Params):
    application_id: Identifier | None = field(default=None, keys=("applicationId",))
    """On a browser there is only its page."""


class Click(Params):
    matcher: Matcher | None = None
    coordinate: Coordinate | None = None
    click_type: Literal["default", "long_click", "focus"] = field(default="default", keys=("clickType",))
    timeout_ms: Interaction | None = field(default=None, keys=("timeoutMs",))

    def check_together(self) -> None:
        if (self.matcher is None) == (self.coordinate is None):
            raise ValueError("must have either a matcher or a coordinate")
        if self.coordinate is not None and self.click_type == "focus":
            raise ValueError("a coordinate cannot be focused: give a matcher")


class EnterText(Params):
    matcher: Matcher
    text: str
    clear: bool = True
    """Whether the text replaces what is there."""
    submit: bool = False
    """Whether Enter is pressed behind it."""
    timeout_ms: Interaction | None = field(default=None, keys=("timeoutMs",))


class PressKey(Params):
    key: Annotated[str, Before(_key, str)]


class Scroll(Params):
    direction: Literal["up", "down", "left", "right"] = "down"
    container: Matcher | None = None
    distance_ratio: Annotated[float, Before(_ratio, float)] = field(default=0.7, keys=("distanceRatio",))
    timeout_ms: Interaction | None = field(default=None, keys=("timeoutMs",))


class ScrollUntil(Params):
    matcher: Matcher
    direction: Literal["up", "down", "left", "right"] = "down"
    container: Matcher | None = None
    max_scrolls: Annotated[int, _count_up_to(MAX_SCROLLS)] = field(default=DEFAULT_SCROLLS, keys=("maxScrolls",))
    timeout_ms: Wait | None = field(default=None, keys=("timeoutMs",))


class ReadText(Params):
    matcher: Matcher
    all: bool = False
    max_bytes: Annotated[int, _count_up_to(MAX_SNAPSHOT_BYTES)] = field(
        default=DEFAULT_SNAPSHOT_BYTES, keys=("maxBytes",)
    )
    timeout_ms: Interaction | None = field(default=None, keys=("timeoutMs",))


class ReadKeyValuePair(Params):
    label_matcher: Matcher = field(keys=("labelMatcher", "matcher"))
    timeout_ms: Interaction | None = field(default=None, keys=("timeoutMs",))


class SnapshotUi(Params):
    max_bytes: Annotated[int, _count_up_to(MAX_SNAPSHOT_BYTES)] = field(
        default=DEFAULT_SNAPSHOT_BYTES, keys=("maxBytes",)
    )
    format: Literal["text", "ascii"] = "text"
    timeout_ms: Interaction | None = field(default=None, keys=("timeoutMs",))


class TakeScreenshot(Params):
    path: Annotated[str, _text_up_to(MAX_URI_LENGTH)] | None = None
    """Where the image is written; not said, it is in the result."""
    timeout_ms: Interaction | None = field(default=None, keys=("timeoutMs",))


class SleepParams(Params):
    duration_ms: Sleep = field(keys=("durationMs",))


class WaitForNode(Params):
    matcher: Matcher
    state: Literal["visible", "hidden"] = "visible"
    timeout_ms: Wait | None = field(default=None, keys=("timeoutMs",))


class WaitForNavigation(Params):
    expected_package: Identifier | None = field(default=None, keys=("expectedPackage",))
    expected_node: Matcher | None = field(default=None, keys=("expectedNode",))
    expected_url: Annotated[str, _text_up_to(MAX_URI_LENGTH)] | None = field(default=None, keys=("expectedUrl",))
    """The whole address, or with `*` for any text a pattern of it."""
    timeout_ms: Navigation = field(keys=("timeoutMs",))

    def check_together(self) -> None:
        if self.expected_package is None and self.expected_node is None and self.expected_url is None:
            raise ValueError("must have at least one of expectedPackage, expectedNode, expectedUrl")


@value
class ActionType:
    """One type of action: its params, and what it does to whom."""

    params: type[Params]
    mutates: bool
    """Whether it may change anything, on the device or behind it."""
    is_wait: bool = False
    """Whether its budget is one that has to follow those of the other waits."""
    default_ms: int = budgets.DEFAULT_INTERACTION_MS


ACTION_TYPES: dict[str, ActionType] = {
    "open_app": ActionType(OpenApp, True),
    "open_uri": ActionType(OpenUri, True, default_ms=budgets.MAX_INTERACTION_MS),
    "close_app": ActionType(CloseApp, True),
    "click": ActionType(Click, True),
    "enter_text": ActionType(EnterText, True),
    "press_key": ActionType(PressKey, True),
    "scroll": ActionType(Scroll, True),
    "scroll_until": ActionType(ScrollUntil, True, is_wait=True, default_ms=budgets.MAX_INTERACTION_MS),
    "read_text": ActionType(ReadText, False),
    "read_key_value_pair": ActionType(ReadKeyValuePair, False),
    "snapshot_ui": ActionType(SnapshotUi, False),
    "take_screenshot": ActionType(TakeScreenshot, False),
    "sleep": ActionType(SleepParams, False, is_wait=True),
    "wait_for_node": ActionType(WaitForNode, False, is_wait=True, default_ms=budgets.DEFAULT_WAIT_MS),
    "wait_for_navigation": ActionType(WaitForNavigation, False, is_wait=True),
}

# --- executions ---------------------------------------------------------------------------------------------


@value
class Action:
    """One action that is valid."""

    id: str
    type: str
    params: Params

    @property
    def kind(self) -> ActionType:
        return ACTION_TYPES[self.type]

    @property
    def limit_ms(self) -> int | None:
        """Return the budget that it says itself; a sleep has what it sleeps."""
        if isinstance(self.params, SleepParams):
            return self.params.duration_ms
        return cast("int | None", getattr(self.params, "timeout_ms", None))

    @property
    def budget(self) -> ActionBudget | None:
        limit_ms = self.limit_ms
        return None if limit_ms is None else ActionBudget(limit_ms, self.kind.is_wait)


@value
class Execution:
    """A payload that is valid, and whose budgets fit."""

    command_id: str
    task_id: str
    source: str
    expected_format: str
    timeout_ms: int
    mode: Mode
    actions: tuple[Action, ...]
    written: dict[str, Any]
    """The payload under the documented names, as it goes to a device and is shown."""

    @property
    def mutates(self) -> bool:
        return any(action.kind.mutates for action in self.actions)

    @property
    def plan(self) -> dict[str, object]:
        """Return what would be done, in short."""
        return {
            "commandId": self.command_id,
            "timeoutMs": self.timeout_ms,
            "actionCount": len(self.actions),
            "actions": self.written["actions"],
        }


class _ExecutionPart(Part):
    command_id: Identifier = field(keys=("commandId",))
    task_id: Identifier = field(keys=("taskId",))
    source: Annotated[str, _text_up_to(MAX_SOURCE_LENGTH)]
    expected_format: Literal["android-ui-automator", "aria"] = field(keys=("expectedFormat",))
    timeout_ms: Any = field(keys=("timeoutMs",))
    mode: Mode = "direct"
    actions: list[Any]


class _ActionPart(Part):
    id: Identifier
    type: str
    params: dict[str, Any] = field(default={})


class PayloadProblems:
    """Every problem with a payload, in the order in which it is read."""

    def __init__(self) -> None:
        self._found: list[dict[str, str]] = []

    def __bool__(self) -> bool:
        return bool(self._found)

    def note(self, path: str, message: str, action: tuple[Any, Any] = (None, None)) -> None:
        problem = {"path": path, "message": message}
        for name, known in zip(("actionId", "actionType"), action, strict=True):
            if isinstance(known, str):
                problem[name] = known
        if problem not in self._found:
            self._found.append(problem)

    def failure(self) -> Failure:
        """Return the refusal: the first problem is its message and its details, the others stand beside it."""
        first = self._found[0]
        details = {name: text for name, text in first.items() if name != "message"}
        errors = [{"field": each["path"] or "execution", "message": each["message"]} for each in self._found]
        message = first["message"] if len(self._found) == 1 else f"{first['message']} (and {len(self._found) - 1} more)"
        return Failure(
            "EXECUTION_VALIDATION_FAILED", message, context={**details, "problems": self._found, "errors": errors}
        )


def read_execution(written: Any, *, timeout_ms: Any = None) -> Execution:
    """Return the execution that a payload describes, with its `timeoutMs` replaced by `timeout_ms` where that is given.

    Raises Failure EXECUTION_VALIDATION_FAILED with every problem of the payload and of what replaces a part of it.
    """
    problems = PayloadProblems()
    payload = use_documented_names(written)
    if isinstance(payload, dict):
        size = _size_of(payload)
        if size is None:
            problems.note("", "the payload is not JSON")
        elif size > budgets.MAX_PAYLOAD_BYTES:
            problems.note("", f"the payload has {size} bytes; at most {budgets.MAX_PAYLOAD_BYTES} are taken")
    head = _check(_ExecutionPart, payload, "", problems)
    mode = payload.get("mode", "direct") if isinstance(payload, dict) else "direct"
    own_ms = _read_timeout(payload["timeoutMs"], mode, problems) if _has(payload, "timeoutMs") else None
    if timeout_ms is not None:
        own_ms = _read_timeout(timeout_ms, mode, problems)
    actions = _read_actions(payload.get("actions") if isinstance(payload, dict) else None, mode, problems)
    if own_ms is not None and all(action is not None for action in actions):
        _check_budgets(own_ms, [action for action in actions if action is not None], problems)
    if problems or head is None:
        raise problems.failure()
    assert own_ms is not None
    payload = {**payload, "timeoutMs": own_ms}
    checked = tuple(action for action in actions if action is not None)
    return Execution(
        head.command_id, head.task_id, head.source, head.expected_format, own_ms, head.mode, checked, payload
    )


def parse_payload(text: str | bytes) -> Any:
    """Return the JSON of a payload. Raises Failure EXECUTION_VALIDATION_FAILED for what is none."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        problems = PayloadProblems()
        problems.note("", f"the payload is not JSON: {error}")
        raise problems.failure() from None


def _has(payload: Any, key: str) -> bool:
    return isinstance(payload, dict) and key in payload


def _size_of(payload: Any) -> int | None:
    """Return the bytes of the payload as it is sent; None where it cannot be."""
    try:
        return len(json.dumps(payload, separators=(",", ":"), ensure_ascii=False).encode())
    except (TypeError, ValueError, RecursionError, UnicodeEncodeError):
        return None


def _read_timeout(written: Any, mode: object, problems: PayloadProblems) -> int | None:
    best_effort = mode == "best_effort"
    most = budgets.BEST_EFFORT_MAX_TIMEOUT_MS if best_effort else budgets.MAX_TIMEOUT_MS
    try:
        ms = _milliseconds(written)
        if not budgets.MIN_TIMEOUT_MS <= ms <= most:
            raise ValueError(f"must be between {budgets.MIN_TIMEOUT_MS} and {most}")
    except ValueError as error:
        problems.note("timeoutMs", f"timeoutMs {error}")
        return None
    return ms


def _read_actions(written: Any, mode: object, problems: PayloadProblems) -> list[Action | None]:
    """Return the actions, None for those that are wrong."""
    if not isinstance(written, list):
        return [None]
    most = budgets.BEST_EFFORT_MAX_STEPS if mode == "best_effort" else budgets.MAX_ACTIONS
    if not 1 <= len(written) <= most:
        where = " in mode best_effort" if mode == "best_effort" else ""
        problems.note("actions", f"actions must have between 1 and {most} entries{where}, and has {len(written)}")
    actions: list[Action | None] = []
    seen: dict[str, int] = {}
    for position, each in enumerate(written[: budgets.MAX_ACTIONS]):
        path = f"actions.{position}"
        names = (each.get("id"), each.get("type")) if isinstance(each, dict) else (None, None)
        part = _check(_ActionPart, each, path, problems, names)
        action_id, action_type = names
        if isinstance(action_id, str) and seen.setdefault(action_id, position) != position:
            message = f"id {action_id!r} is used before, by actions.{seen[action_id]}"
            problems.note(f"{path}.id", message, names)
            part = None
        known = ACTION_TYPES.get(action_type) if isinstance(action_type, str) else None
        if isinstance(action_type, str) and known is None:
            problems.note(f"{path}.type", f"unknown action type {action_type!r:.80}", names)
        params = None
        if known is not None:
            given = each.get("params", {})
            if isinstance(given, dict):
                params = _check(known.params, given, f"{path}.params", problems, names, f"{action_type} params.")
        actions.append(None if part is None or params is None else Action(part.id, part.type, params))
    return actions


def _check_budgets(timeout_ms: int, actions: list[Action], problems: PayloadProblems) -> None:
    for misfit in budgets.find_misfits(timeout_ms, [action.budget for action in actions]):
        needs = _fits(misfit)
        if misfit.position is None:
            waits = ", ".join(
                f"{action.id} {action.limit_ms}" for action in actions if action.kind.is_wait and action.limit_ms
            )
            message = f"the waits and sleeps follow each other and take up to {misfit.needed_ms} ms ({waits}); {needs}"
            problems.note("timeoutMs", message)
            continue
        action = actions[misfit.position]
        name = "durationMs" if action.type == "sleep" else "timeoutMs"
        message = f"{action.type} params.{name} of {misfit.needed_ms} ms does not fit; {needs}"
        problems.note(f"actions.{misfit.position}.params.{name}", message, (action.id, action.type))


def _fits(misfit: Misfit) -> str:
    has = f"an execution of this timeoutMs has {misfit.usable_ms} ms for its actions"
    return f"{has}: raise timeoutMs to {misfit.fits_in_ms} at least, or wait for less"


def _check(
    part: type[Any],
    written: Any,
    path: str,
    problems: PayloadProblems,
    action: tuple[Any, Any] = (None, None),
    prefix: str = "",
) -> Any:
    """Return the part that was written, or None after every problem with it is noted."""
    if not isinstance(written, dict):
        problems.note(path, f"{path or 'the payload'} must be an object", action)
        return None
    try:
        return part.model_validate(written)
    except ValidationError as error:
        for each in error.errors():
            loc = [str(step) for step in each["loc"]]
            name = ".".join(loc)
            where = ".".join(filter(None, (path, name)))
            problems.note(where, _message(each, prefix + name if name else prefix.rstrip(".")), action)
        return None


_TYPES = {
    "string_type": "must be text",
    "string_unicode": "must be text that is valid Unicode",
    "int_type": "must be a whole number",
    "float_type": "must be a number",
    "bool_type": "must be true or false",
    "list_type": "must be a list",
    "dict_type": "must be an object",
    "model_type": "must be an object",
    "missing": "is required",
    "extra_forbidden": "is not known here",
}


def _message(problem: dict[str, Any], name: str) -> str:
    kind, said = problem["type"], str(problem["msg"])
    if kind == "value_error":
        said = said.removeprefix("Value error, ")
    elif kind == "literal_error":
        said = f"must be one of {problem['ctx']['expected'].replace(' or ', ', ')}"
    else:
        said = _TYPES.get(kind, said)
    return f"{name} {said}".strip()
