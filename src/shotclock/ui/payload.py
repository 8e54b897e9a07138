"""The payload of an execution: declared actions, budgets that nest, and every problem reported with its path.

    {"commandId": "…", "taskId": "…", "source": "…", "expectedFormat": "android-ui-automator", "timeoutMs": 30000,
     "actions": [{"id": "snap", "type": "snapshot_ui"}]}

Each action is declared once, as a class of `Params`; payloads, `shotclock ui` and the MCP tools follow from it
(`verbs`). `read_execution` is the only way to an `Execution`: an object of this type is valid, and its budgets fit.

AGENTS.md: checked as a whole before it is sent.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Annotated, Any, Literal, cast

from ..core.errors import Failure, SideEffects
from ..core.limits import reserve_ms_for
from ..core.validation import After, Before, Limits, Part, ValidationError, field
from ..core.value_types import JsonObject, replace, value

Mode = Literal["direct", "artifact_compiled", "best_effort"]
MODES: tuple[Mode, ...] = ("direct", "artifact_compiled", "best_effort")
EXPECTED_FORMAT = "android-ui-automator"

MIN_TIMEOUT_MS = 1_000
MAX_TIMEOUT_MS = 120_000
DEFAULT_TIMEOUT_MS = 30_000
MAX_ACTIONS = 50
MAX_PAYLOAD_BYTES = 64_000
# `best_effort` continues after failures, up to these limits.
BEST_EFFORT_MAX_TIMEOUT_MS = 180_000
BEST_EFFORT_MAX_STEPS = 30
BEST_EFFORT_MAX_FAILURES = 5

MAX_INTERACTION_MS = 30_000
MAX_WAIT_MS = 60_000
MAX_NAVIGATION_MS = 30_000
MAX_SLEEP_MS = MAX_TIMEOUT_MS - reserve_ms_for(MAX_TIMEOUT_MS)
DEFAULT_BUDGET_MS = 10_000  # the budget of an action that declares none, if the execution has that much left

MAX_SNAPSHOT_BYTES = 64_000
DEFAULT_SNAPSHOT_BYTES = 24_000
MAX_CHOICES = 50  # the most options to select, and files to upload, in one action

KEYS = (
    "back", "forward", "home", "recents", "enter", "tab", "escape", "backspace", "delete", "space", "arrow_up",
    "arrow_down", "arrow_left", "arrow_right", "page_up", "page_down", "move_home", "move_end",
)  # fmt: skip


def max_timeout_ms(mode: object) -> int:
    return BEST_EFFORT_MAX_TIMEOUT_MS if mode == "best_effort" else MAX_TIMEOUT_MS


def usable_ms(timeout_ms: int) -> int:
    """Return the time that the actions share: all but the reserve for the result."""
    return timeout_ms - reserve_ms_for(timeout_ms)


def timeout_for(needed_ms: int) -> int:
    """Return the shortest execution whose actions share at least this much."""
    timeout_ms = max(MIN_TIMEOUT_MS, needed_ms)
    while usable_ms(timeout_ms) < needed_ms:
        timeout_ms += needed_ms - usable_ms(timeout_ms)
    return timeout_ms


@value
class Help:
    """The text about a param, and its name as an option of `shotclock ui`. A tool's parameter has the param's name."""

    text: str
    name: str = ""  # the option's name, if it is not that of the param
    flags: Mapping[str, tuple[object, str]] = {}
    """Flags instead of one option: for each the value that it sets, and its text."""
    by_place: bool = False
    only_cli: bool = False


def _finite(written: object) -> int | float:
    if type(written) is int or (type(written) is float and math.isfinite(written)):
        return written
    raise ValueError("must be a finite number")


def _milliseconds(written: object) -> int:
    number = _finite(written)
    if number != int(number):
        raise ValueError("must be a whole number of milliseconds")
    return int(number)


def _decimal(written: object) -> float:
    return float(max(-1e6, min(_finite(written), 1e6)))  # a longer integer has no float; every limit is below


def _check_key(key: str) -> str:
    *modifiers, last = key.lower().split("+") if len(key) > 1 else [key]
    if any(each not in ("ctrl", "alt", "shift", "meta") for each in modifiers) or not (last in KEYS or len(last) == 1):
        raise ValueError(f"{key!r:.40} is no key: use one of {', '.join(KEYS)}, or a character, after ctrl+, alt+, …")
    return key


def _check_number(choices: list[Any]) -> list[Any]:
    if not 1 <= len(choices) <= MAX_CHOICES:
        raise ValueError(f"must have between 1 and {MAX_CHOICES} entries, and has {len(choices)}")
    return choices


Interaction = Annotated[int, Before(_milliseconds, int), Limits(ge=1, le=MAX_INTERACTION_MS)]
Wait = Annotated[int, Before(_milliseconds, int), Limits(ge=1, le=MAX_WAIT_MS)]
Navigation = Annotated[int, Before(_milliseconds, int), Limits(ge=1, le=MAX_NAVIGATION_MS)]
SleepTime = Annotated[int, Before(_milliseconds, int), Limits(ge=0, le=MAX_SLEEP_MS)]
TextSize = Annotated[int, Limits(ge=1, le=MAX_SNAPSHOT_BYTES)]
Point = Annotated[float, Before(_decimal, float), Limits(ge=0, le=100_000)]
Identifier = Annotated[str, Limits(max_length=128, pattern=r"\S")]
MatcherText = Annotated[str, Limits(max_length=512, pattern=r"\S")]
Address = Annotated[str, Limits(max_length=2_048, pattern=r"\S")]
Choice = Annotated[str, Limits(max_length=512)]
Direction = Annotated[
    Literal["up", "down", "left", "right"], Help("up, down, left or right [down].", "direction", by_place=True)
]


class CamelPart(Part):
    """A part of a payload: its keys are the names of its fields in camelCase."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        for name, info in cls.model_fields.items():
            first, *words = name.split("_")
            cls.model_fields[name] = replace(info, keys=(first + "".join(map(str.capitalize, words)),))


class Matcher(CamelPart):
    """The criteria for a node. All of them must hold; the first visible node that fits is used."""

    ref: Annotated[MatcherText | None, Help("The node's ref in the last snapshot, as in [ref=e12].")] = None
    text_equals: Annotated[MatcherText | None, Help("The node's text.", "text")] = None
    text_contains: Annotated[MatcherText | None, Help("A part of the node's text.")] = None
    resource_id: Annotated[MatcherText | None, Help("The node's test id or resource id.", "id")] = None
    role: Annotated[MatcherText | None, Help("The node's role: button, link, textbox, …")] = None
    content_desc_equals: Annotated[MatcherText | None, Help("The node's label or description.", "label")] = None
    content_desc_contains: MatcherText | None = None
    css: Annotated[MatcherText | None, Help("A CSS selector, on a browser.")] = None

    def check_together(self) -> None:
        if not self.criteria:
            raise ValueError(f"must have at least one of {self.describe_keys()}")

    @classmethod
    def describe_keys(cls) -> str:
        return ", ".join(info.keys[0] for info in cls.model_fields.values())

    @property
    def criteria(self) -> dict[str, str]:
        return {name: text for name, text in self.model_dump().items() if text is not None}

    def describe(self) -> str:
        return ", ".join(f"{name}={text!r}" for name, text in self.criteria.items())


class Coordinate(CamelPart):
    x: Point
    y: Point


ACTION_TYPES: dict[str, type[Params]] = {}


class Params(CamelPart):
    """The params of one type of action. A param without a `Help` is only for payloads.

    `mutates`: it may change anything, on the device or on a server. `is_wait`: its budget adds to those of the other
    waits, while an interaction ends as soon as its node is found. `on_phones`: a phone can do it.
    """

    mutates = False  # without an annotation, which makes a key of the payload
    is_wait = False
    default_ms = DEFAULT_BUDGET_MS
    on_phones = True

    def __init_subclass__(
        cls,
        *,
        action: str,
        mutates: bool = False,
        is_wait: bool = False,
        default_ms: int = DEFAULT_BUDGET_MS,
        on_phones: bool = True,
    ) -> None:
        super().__init_subclass__()
        cls.mutates, cls.is_wait, cls.default_ms, cls.on_phones = mutates, is_wait, default_ms, on_phones
        ACTION_TYPES[action] = cls


class OpenApp(Params, action="open_app", mutates=True):
    application_id: Annotated[Identifier, Help("Instead: the id of an app on a phone.", "target", by_place=True)]
    timeout_ms: Interaction | None = None


class OpenUri(Params, action="open_uri", mutates=True, default_ms=MAX_INTERACTION_MS):
    uri: Annotated[Address, Help("An address, or the id of an app.", "target", by_place=True)]
    timeout_ms: Interaction | None = None


class CloseApp(Params, action="close_app", mutates=True):
    application_id: Identifier | None = None


class Click(Params, action="click", mutates=True):
    matcher: Matcher | None = None
    coordinate: Annotated[Coordinate | None, Help("A point instead of a node.", "at", only_cli=True)] = None
    click_type: Annotated[
        Literal["default", "long_click", "focus"],
        Help("", flags={"long": ("long_click", "Make a long click."), "focus": ("focus", "Only focus the node.")}),
    ] = "default"
    timeout_ms: Interaction | None = None

    def check_together(self) -> None:
        if (self.matcher is None) == (self.coordinate is None):
            raise ValueError(f"must have either a coordinate or at least one of {Matcher.describe_keys()}")
        if self.coordinate is not None and self.click_type == "focus":
            raise ValueError("cannot focus a coordinate: use a matcher")


class EnterText(Params, action="enter_text", mutates=True):
    matcher: Matcher
    text: Annotated[str, Help("The text to enter.", "words", by_place=True)]
    clear: Annotated[bool, Help("", flags={"keep": (False, "Append to the present text.")})] = True
    submit: Annotated[bool, Help("Press Enter afterwards.")] = False
    timeout_ms: Interaction | None = None


class SelectOption(Params, action="select_option", mutates=True, on_phones=False):
    matcher: Matcher
    options: Annotated[
        list[Choice],
        After(_check_number),
        Help("Labels or values; all others are deselected.", "option", by_place=True),
    ]
    timeout_ms: Interaction | None = None


class Hover(Params, action="hover", mutates=True, on_phones=False):
    matcher: Matcher
    timeout_ms: Interaction | None = None


class UploadFile(Params, action="upload_file", mutates=True, on_phones=False):
    matcher: Matcher
    paths: Annotated[list[Address], After(_check_number), Help("The files.", "file", by_place=True)]
    timeout_ms: Interaction | None = None


class PressKey(Params, action="press_key", mutates=True):
    key: Annotated[str, After(_check_key), Help("enter, back, arrow_down, ctrl+a, a character, …", by_place=True)]


class Scroll(Params, action="scroll", mutates=True):
    direction: Direction = "down"
    container: Matcher | None = None
    distance_ratio: Annotated[float, Before(_decimal, float)] = field(default=0.7, ge=0.05, le=1)
    timeout_ms: Interaction | None = None


class ScrollUntil(Params, action="scroll_until", mutates=True, is_wait=True, default_ms=MAX_INTERACTION_MS):
    matcher: Matcher
    direction: Direction = "down"
    container: Matcher | None = None
    max_scrolls: int = field(default=20, ge=1, le=50)
    timeout_ms: Wait | None = None


class ReadText(Params, action="read_text"):
    matcher: Matcher
    all: Annotated[bool, Help("Read all nodes that match.")] = False
    max_bytes: TextSize = DEFAULT_SNAPSHOT_BYTES
    timeout_ms: Interaction | None = None


class ReadKeyValuePair(Params, action="read_key_value_pair"):
    label_matcher: Matcher
    timeout_ms: Interaction | None = None


class SnapshotUi(Params, action="snapshot_ui"):
    matcher: Matcher | None = None
    max_bytes: Annotated[TextSize, Help("The most text to return, in bytes [24000].")] = DEFAULT_SNAPSHOT_BYTES
    format: Literal["text", "ascii"] = "text"
    timeout_ms: Interaction | None = None


class TakeScreenshot(Params, action="take_screenshot"):
    path: Annotated[
        Address | None,
        Help("The file to write; without it, the image is in the result.", "file", by_place=True, only_cli=True),
    ] = None
    timeout_ms: Interaction | None = None


class ListTabs(Params, action="list_tabs", on_phones=False):
    pass


class OpenTab(Params, action="open_tab", mutates=True, default_ms=MAX_INTERACTION_MS, on_phones=False):
    uri: Annotated[Address | None, Help("To open: its address.")] = None
    timeout_ms: Interaction | None = None


class SwitchTab(Params, action="switch_tab", mutates=True, on_phones=False):
    tab: Annotated[Identifier, Help("To switch or close: its name, as t2.")]


class CloseTab(Params, action="close_tab", mutates=True, on_phones=False):
    tab: Annotated[Identifier | None, Help("To switch or close: its name, as t2.")] = None


class AnswerDialog(Params, action="answer_dialog", mutates=True, on_phones=False):
    accept: Annotated[bool, Help("", flags={"accept": (True, "Accept it."), "dismiss": (False, "Dismiss it.")})]
    text: Annotated[str | None, Limits(max_length=2_048), Help("The answer to a prompt.")] = None
    timeout_ms: Interaction | None = None

    def check_together(self) -> None:
        if self.text is not None and not self.accept:
            raise ValueError("has a text only where accept is true")


class Sleep(Params, action="sleep", is_wait=True):
    duration_ms: Annotated[SleepTime, Help("The milliseconds to sleep.", "ms", by_place=True)]


class WaitForNode(Params, action="wait_for_node", is_wait=True):
    matcher: Matcher
    state: Annotated[
        Literal["visible", "hidden"], Help("", flags={"hidden": ("hidden", "Wait until no such node is visible.")})
    ] = "visible"
    timeout_ms: Annotated[Wait | None, Help("The longest wait, in ms [10000, at most 60000].", "timeout")] = None


class WaitForNavigation(Params, action="wait_for_navigation", is_wait=True):
    expected_package: Annotated[Identifier | None, Help("The app in the foreground.", "app")] = None
    expected_node: Matcher | None = None
    expected_url: Annotated[Address | None, Help("The address, with * for any text.", "url")] = None
    timeout_ms: Annotated[Navigation, Help("The longest wait, in ms, at most 30000. Required.", "timeout")]

    def check_together(self) -> None:
        if self.expected_package is None and self.expected_node is None and self.expected_url is None:
            raise ValueError("must have at least one of expectedPackage, expectedNode, expectedUrl")


@value
class Action:
    id: str
    type: str
    params: Params

    @property
    def limit_ms(self) -> int | None:
        if isinstance(self.params, Sleep):
            return self.params.duration_ms
        return cast("int | None", getattr(self.params, "timeout_ms", None))


@value
class Execution:
    command_id: str
    task_id: str
    source: str
    timeout_ms: int
    mode: Mode
    actions: tuple[Action, ...]
    written: JsonObject  # the payload as it is sent to a device and shown

    @property
    def mutates(self) -> bool:
        return any(action.params.mutates for action in self.actions)

    @property
    def plan(self) -> dict[str, object]:
        return {
            "commandId": self.command_id,
            "timeoutMs": self.timeout_ms,
            "actionCount": len(self.actions),
            "actions": self.written["actions"],
        }


class _PayloadPart(CamelPart):
    command_id: Identifier
    task_id: Identifier
    source: Annotated[str, Limits(max_length=64, pattern=r"\S")]
    expected_format: Literal["android-ui-automator", "aria"]
    timeout_ms: Any
    mode: Mode = "direct"
    actions: list[Any]


class _ActionPart(Part):
    id: Identifier
    type: str
    params: JsonObject = field(default={})


class _PayloadReader:
    def __init__(self, payload: JsonObject) -> None:
        self._payload = payload
        self._mode = payload.get("mode")
        self._problems: list[dict[str, str]] = []

    def read(self) -> Execution:
        payload = self._payload
        self._check_size()
        head = self._check(_PayloadPart, payload, "")
        timeout_ms = self._read_timeout(payload["timeoutMs"]) if "timeoutMs" in payload else None
        written = payload.get("actions")
        actions = self._read_actions(written) if isinstance(written, list) else None
        if timeout_ms is not None and actions is not None:
            self._check_budgets(timeout_ms, actions)
        if self._problems or head is None or timeout_ms is None or actions is None:
            raise refuse_payload(self._problems)
        payload = {**payload, "timeoutMs": timeout_ms}
        return Execution(head.command_id, head.task_id, head.source, timeout_ms, head.mode, tuple(actions), payload)

    def _add_problem(self, path: str, message: str, action: object = None) -> None:
        problem = {"path": path, "message": message}
        for name, key in (("actionId", "id"), ("actionType", "type")):
            if isinstance(action, dict) and isinstance(action.get(key), str):
                problem[name] = action[key]
        if problem not in self._problems:
            self._problems.append(problem)

    def _check(self, part: type[Part], written: object, path: str, action: object = None, prefix: str = "") -> Any:
        if not isinstance(written, dict):
            self._add_problem(path, f"{path} must be an object", action)
            return None
        try:
            return part.model_validate(written)
        except ValidationError as error:
            for each in error.errors():
                name = ".".join(map(str, each["loc"]))
                place = ".".join(filter(None, (path, name)))
                self._add_problem(place, f"{(prefix + name).rstrip('.')} {_phrase(each)}".strip(), action)
            return None

    def _check_size(self) -> None:
        try:
            size = len(json.dumps(self._payload, separators=(",", ":"), ensure_ascii=False).encode())
        except (TypeError, ValueError, RecursionError):
            self._add_problem("", "the payload is not JSON")
            return
        if size > MAX_PAYLOAD_BYTES:
            self._add_problem("", f"the payload has {size} bytes; at most {MAX_PAYLOAD_BYTES} are accepted")

    def _read_timeout(self, written: object) -> int | None:
        most = max_timeout_ms(self._mode)
        try:
            ms = _milliseconds(written)
            if not MIN_TIMEOUT_MS <= ms <= most:
                raise ValueError(f"must be between {MIN_TIMEOUT_MS} and {most}")
        except ValueError as error:
            self._add_problem("timeoutMs", f"timeoutMs {error}")
            return None
        return ms

    def _read_actions(self, written: list[Any]) -> list[Action] | None:
        best_effort = self._mode == "best_effort"
        most = BEST_EFFORT_MAX_STEPS if best_effort else MAX_ACTIONS
        if not 1 <= len(written) <= most:
            mode = " in mode best_effort" if best_effort else ""
            message = f"actions must have between 1 and {most} entries{mode}, and has {len(written)}"
            self._add_problem("actions", message)
        places: dict[str, int] = {}
        actions: list[Action] = []
        for place, each in enumerate(written[:MAX_ACTIONS]):
            if (action := self._read_action(each, f"actions.{place}")) is not None:
                actions.append(action)
            name = each.get("id") if isinstance(each, dict) else None
            if isinstance(name, str) and (first := places.setdefault(name, place)) != place:
                self._add_problem(f"actions.{place}.id", f"id {name!r} is also the id of actions.{first}", each)
        return actions if len(actions) == len(written) else None

    def _read_action(self, written: Any, path: str) -> Action | None:
        head = self._check(_ActionPart, written, path, written)
        action_type = written.get("type") if isinstance(written, dict) else None
        if not isinstance(action_type, str):
            return None
        if (kind := ACTION_TYPES.get(action_type)) is None:
            message = f"unknown action type {action_type!r:.80}; the types are {', '.join(ACTION_TYPES)}"
            self._add_problem(f"{path}.type", message, written)
            return None
        params = written.get("params", {})
        if isinstance(params, dict):
            params = self._check(kind, params, f"{path}.params", written, f"{action_type} params.")
        return None if head is None or params is None else Action(head.id, head.type, params)

    def _check_budgets(self, timeout_ms: int, actions: list[Action]) -> None:
        """Note every budget that exceeds the execution, and their sum where each fits by itself."""
        usable = usable_ms(timeout_ms)

        def advice(needed_ms: int) -> str:
            has = f"an execution of this timeoutMs has {usable} ms for its actions"
            return f"{has}: raise timeoutMs to {timeout_for(needed_ms)} at least, or wait for less"

        fits = True
        for place, action in enumerate(actions):
            if (limit_ms := action.limit_ms or 0) > usable:
                fits = False
                name = "durationMs" if action.type == "sleep" else "timeoutMs"
                message = f"{action.type} params.{name} of {limit_ms} ms does not fit; {advice(limit_ms)}"
                self._add_problem(f"actions.{place}.params.{name}", message, {"id": action.id, "type": action.type})
        waits = [action for action in actions if action.params.is_wait and action.limit_ms]
        total = sum(action.limit_ms or 0 for action in waits)
        if fits and total > usable:
            parts = ", ".join(f"{action.id} {action.limit_ms}" for action in waits)
            message = f"the waits and sleeps run in sequence and take up to {total} ms ({parts}); {advice(total)}"
            self._add_problem("timeoutMs", message)


def read_execution(written: object, *, timeout_ms: object = None) -> Execution:
    """Return the execution of a payload; `timeout_ms` replaces its `timeoutMs`. Raises Failure with every problem."""
    if not isinstance(written, dict):
        raise refuse_payload([{"path": "", "message": "the payload must be an object"}])
    return _PayloadReader(written if timeout_ms is None else {**written, "timeoutMs": timeout_ms}).read()


def effects_of_steps(execution: Execution, steps: list[JsonObject], *, is_over: bool = True) -> SideEffects:
    """Return the side effects of the steps that ran. `is_over` False: later actions may have run unseen."""
    refused = ("ACTION_UNSUPPORTED", "WAIT_TIMEOUT", "NODE_NOT_FOUND")  # nothing was tried, but for scrolls
    seen = {step["id"]: step for step in steps}
    has_stopped = is_over or (execution.mode != "best_effort" and not all(step["success"] for step in steps))
    done: list[bool] = []
    for action in execution.actions:
        step = seen.get(action.id)
        if not action.params.mutates or (step is None and has_stopped):
            continue
        if step is None or step["success"] or action.type == "scroll_until" or step["data"].get("code") not in refused:
            done.append(step is not None and bool(step["success"]))
    if not all(done):
        return SideEffects.UNKNOWN
    if not done:
        return SideEffects.NONE
    is_whole = len(steps) == len(execution.actions) and all(step["success"] for step in steps)
    return SideEffects.COMPLETE if is_whole else SideEffects.PARTIAL


def check_device(execution: Execution, is_phone: bool) -> None:
    """Raise Failure where a phone cannot do one of the actions; nothing is sent then."""
    for place, action in enumerate(execution.actions if is_phone else ()):
        if not action.params.on_phones:
            context = {"path": f"actions.{place}.type", "actionId": action.id, "actionType": action.type}
            message = f"a phone has no {action.type} (actions.{place}): nothing was sent"
            raise Failure("ACTION_UNSUPPORTED", message, context=context, side_effects=SideEffects.NONE)


def parse_payload(text: str | bytes) -> object:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise refuse_payload([{"path": "", "message": f"the payload is not JSON: {error}"}]) from None


def refuse_payload(problems: list[dict[str, str]]) -> Failure:
    first, more = problems[0], len(problems) - 1
    details = {name: text for name, text in first.items() if name != "message"}
    errors = [{"field": each["path"] or "execution", "message": each["message"]} for each in problems]
    message = first["message"] + (f" (and {more} more)" if more else "")
    context = {**details, "problems": problems, "errors": errors}
    return Failure("EXECUTION_VALIDATION_FAILED", message, context=context, side_effects=SideEffects.NONE)


_PHRASES = {
    "string_type": "must be text",
    "string_unicode": "must be text that is valid Unicode",
    "string_too_long": "must have at most {} characters",
    "string_pattern_mismatch": "must not be blank",
    "int_type": "must be a whole number",
    "less_than_equal": "must not exceed {}",
    "greater_than_equal": "must be at least {}",
    "bool_type": "must be true or false",
    "list_type": "must be a list",
    "dict_type": "must be an object",
    "model_type": "must be an object",
    "missing": "is required",
    "extra_forbidden": "is not known here",
}


def _phrase(problem: JsonObject) -> str:
    kind, message = problem["type"], str(problem["msg"])
    if kind == "literal_error":
        return f"must be one of {problem['ctx']['expected'].replace(' or ', ', ')}"
    limit = next((word for word in message.split() if word.replace(".", "").isdigit()), "")
    return _PHRASES[kind].format(limit) if kind in _PHRASES else message.removeprefix("Value error, ")
