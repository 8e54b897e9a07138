"""The verbs: executions of one action, with the inputs of `shotclock ui VERB` and the parameters of an MCP tool.

Both follow from the declared actions. An option has the name in its `Help`; a parameter has the name of the param in a
payload, as has every node's criterion (`ref`, `textEquals`, …). An illegal value is passed on, and `read_execution`
refuses it.

The execution of a verb outlasts a wait or sleep of `t` ms: `max(t + 5000, 30000)`.
"""

from __future__ import annotations

import math
import os
import types
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from ..core.errors import Failure, SideEffects
from ..core.validation import Part, read_hints
from ..core.value_types import JsonObject, value
from .payload import ACTION_TYPES, DEFAULT_BUDGET_MS, DEFAULT_TIMEOUT_MS, EXPECTED_FORMAT, MAX_TIMEOUT_MS, Help, Matcher

MARGIN_MS = 5_000  # the least time that the execution of a verb has beyond its one wait or sleep
NAME_A_NODE = "name a node: ref, text, text_contains, id, role, label or css"
ABSENT = ""  # the default of a tool's parameter without another one; models write the defaults that they see


@value
class Leaf:
    """A param of an action, or a criterion of its matcher."""

    path: tuple[str, ...]  # its place in the params
    kind: Any  # its type, without None
    name: str
    help: Help | None
    default: Any
    required: bool

    @property
    def key(self) -> str:
        return self.path[-1]


def leaves_of(part: type[Part], path: tuple[str, ...] = ()) -> Iterator[Leaf]:
    hints = read_hints(part)
    for name, info in part.model_fields.items():
        place = (*path, info.keys[0])
        kind, help = _unwrap(hints[name])
        if kind is Matcher and help is None and name != "container":
            yield from leaves_of(Matcher, place)
        else:
            yield Leaf(place, kind, name, help, None if info.is_required() else info.default, info.is_required())


def _unwrap(hint: Any) -> tuple[Any, Help | None]:
    help = None
    while get_origin(hint) in (Annotated, Union, types.UnionType):
        help = next((note for note in get_args(hint)[1:] if isinstance(note, Help)), help)
        hint = get_args(hint)[0]
    return hint, help


@value
class Input:
    """An option or argument of `shotclock ui VERB`."""

    name: str
    text: str
    type: type
    path: tuple[str, ...] = ()
    required: bool = False
    by_place: bool = False
    sets: object = None  # the value that a flag sets; None: its own
    choices: tuple[str, ...] = ()


def _inputs_of(part: type[Part]) -> Iterator[Input]:
    for leaf in leaves_of(part):
        if (help := leaf.help) is None:
            continue
        if help.flags:
            for flag, (sets, text) in help.flags.items():
                yield Input(flag, text, bool, leaf.path, sets=sets)
            continue
        kind = list if get_origin(leaf.kind) is list else leaf.kind if leaf.kind in (bool, int) else str
        yield Input(help.name or leaf.name, help.text, kind, leaf.path, leaf.required, help.by_place)


@value
class Parameter:
    """A parameter of an MCP tool."""

    name: str
    text: str
    type: Any
    default: object  # `...` where it is required


def _parameters_of(action_type: str) -> Iterator[Parameter]:
    part = ACTION_TYPES[action_type]
    for leaf in leaves_of(part):
        is_budget = leaf.name == "timeout_ms"
        if is_budget:
            yield Parameter(leaf.key, "", int, part.default_ms)
        elif leaf.help is not None and not leaf.help.only_cli:
            kind = list[str] if get_origin(leaf.kind) is list else leaf.kind
            text = "" if leaf.path[:-1] and leaf.key != "ref" else leaf.help.text
            default = ... if leaf.required else ABSENT if leaf.default is None else leaf.default
            yield Parameter(leaf.key, text, kind, default)


@value
class Verb:
    name: str
    text: str
    actions: tuple[str, ...]
    more: tuple[Input, ...] = ()
    tool_as: str | None = ""  # the name of its MCP tool, if it is not that of the verb; None has no tool

    @property
    def tool(self) -> str:
        return "" if self.tool_as is None else f"ui_{self.tool_as or self.name}"

    @property
    def inputs(self) -> list[Input]:
        found: dict[str, Input] = {}
        for action in self.actions:
            for each in _inputs_of(ACTION_TYPES[action]):
                found.setdefault(each.name, each)
        return [*self.more, *found.values()]

    @property
    def parameters(self) -> list[Parameter]:
        lists = [list(_parameters_of(action)) for action in self.actions]
        found: dict[str, Parameter] = {}
        for each in self.more:
            kind: Any = Literal[each.choices] if each.choices else each.type
            found[each.name] = Parameter(each.name, each.text, kind, each.choices[0] if each.choices else False)
        for parameters in lists:
            for parameter in parameters:
                everywhere = all(any(each.name == parameter.name for each in others) for others in lists)
                default = parameter.default if everywhere or parameter.default is not ... else ABSENT
                found.setdefault(parameter.name, Parameter(parameter.name, parameter.text, parameter.type, default))
        return sorted(found.values(), key=lambda each: (each.default is not ..., each.name == "timeoutMs"))

    @property
    def mutates(self) -> bool:
        return any(ACTION_TYPES[action].mutates for action in self.actions)


_VALUE = Input("value", "Read the value beside this label.", bool)
_TABS = Input(
    "action", "list, open, switch or close [list].", str, by_place=True, choices=("list", "open", "switch", "close")
)
VERBS = {
    verb.name: verb
    for verb in (
        Verb("open", "Open an address, or an app.", ("open_uri", "open_app")),
        Verb("snapshot", "Return visible nodes, or those in one node: roles, names, states, refs.", ("snapshot_ui",)),
        Verb("click", "Click a node or a point.", ("click",)),
        Verb("type", "Enter text into a node.", ("enter_text",)),
        Verb("press", "Press a key. On a browser, back and forward go through its history.", ("press_key",), (), "key"),
        Verb("select", "Select options of a list.", ("select_option",)),
        Verb("hover", "Move the mouse over a node.", ("hover",)),
        Verb("upload", "Give files to a file input, or to the button that asks for them.", ("upload_file",)),
        Verb("scroll", "Scroll once, or until a node is visible.", ("scroll", "scroll_until")),
        Verb("read", "Read the text of a node.", ("read_text", "read_key_value_pair"), (_VALUE,)),
        Verb(
            "tabs", "List, open, switch or close tabs.", ("list_tabs", "open_tab", "switch_tab", "close_tab"), (_TABS,)
        ),
        Verb("dialog", "Answer a confirm or prompt dialog; wait for it if there is none yet.", ("answer_dialog",)),
        Verb("screenshot", "Take a picture.", ("take_screenshot",)),
        Verb(
            "wait",
            "Wait until a node is visible or hidden, or for an address.",
            ("wait_for_node", "wait_for_navigation"),
        ),
        Verb("wait-for-nav", "Wait for another page or app.", ("wait_for_navigation",), (), None),
        Verb("sleep", "Let time pass on the device.", ("sleep",), (), None),
    )
}


def build(verb_name: str, values: Mapping[str, object], timeout_ms: object = None) -> JsonObject:
    verb = VERBS[verb_name]
    given = {name: each for name, each in values.items() if each is not None and each is not False and each != []}
    action_type = _choose(verb, given)
    params, missing = _fill(verb, action_type, given)
    if missing:
        raise _refuse_missing(missing)
    if verb_name == "wait" and action_type == "wait_for_navigation":
        params.setdefault("timeoutMs", DEFAULT_BUDGET_MS)
    if action_type in ("sleep", "wait_for_node", "wait_for_navigation"):
        timeout_ms = _outlast(params.get("durationMs" if action_type == "sleep" else "timeoutMs"), timeout_ms)
    return _payload_of(verb_name, action_type, params, timeout_ms)


def build_tool(verb_name: str, arguments: Mapping[str, object]) -> JsonObject:
    """Return the payload of a tool with these arguments. A default is left out, except for the action's budget."""
    verb = VERBS[verb_name]
    defaults = {each.name: each.default for each in verb.parameters}
    given = {
        name: each
        for name, each in arguments.items()
        if each is not None and (name == "timeoutMs" or defaults[name] is ... or each != defaults[name])
    }
    action_type = _choose(verb, given)
    params: JsonObject = {}
    leaves = {leaf.key: leaf for leaf in leaves_of(ACTION_TYPES[action_type])}
    for name, each in given.items():
        if name in leaves:
            _put(params, leaves[name].path, each)
        elif name != "timeoutMs" and all(name != more.name for more in verb.more):
            raise _refuse(f"{name} has no meaning for {action_type}: leave it out")
    missing = {
        leaf.key: leaf.help.text for leaf in leaves.values() if leaf.required and leaf.help and leaf.key not in given
    }
    if _lacks_node(action_type, params):
        missing["matcher"] = "name a node: " + ", ".join(info.keys[0] for info in Matcher.model_fields.values())
    if missing:
        raise _refuse_missing(missing)
    return _payload_of(verb_name, action_type, params, _outlast(params.get("timeoutMs"), None))


def _outlast(limit_ms: object, timeout_ms: object) -> int:
    return min(max(_number(limit_ms) + MARGIN_MS, _number(timeout_ms), DEFAULT_TIMEOUT_MS), MAX_TIMEOUT_MS)


def _payload_of(verb_name: str, action_type: str, params: JsonObject, timeout_ms: object) -> JsonObject:
    is_look = verb_name in ("snapshot", "screenshot")
    action: JsonObject = {"id": "snap" if is_look else verb_name, "type": action_type}
    return {
        **new_head(verb_name, "clawperator-observe" if is_look else "clawperator-action"),
        "timeoutMs": DEFAULT_TIMEOUT_MS if timeout_ms is None else timeout_ms,
        "actions": [action | ({"params": params} if params else {})],
        "mode": "direct",
    }


def new_head(name: str, source: str) -> JsonObject:
    command_id = f"{name}-{os.urandom(6).hex()}"
    return {"commandId": command_id, "taskId": command_id, "source": source, "expectedFormat": EXPECTED_FORMAT}


_NODE_NAMES = {
    name for leaf in leaves_of(Matcher) for name in (leaf.key, leaf.help.name or leaf.name if leaf.help else "")
}


def _choose(verb: Verb, given: Mapping[str, object]) -> str:
    match verb.name:
        case "open" if "applicationId" in given or ("target" in given and ":" not in str(given["target"])):
            return "open_app"
        case "scroll" if _NODE_NAMES & given.keys():
            return "scroll_until"
        case "read" if "value" in given:
            return "read_key_value_pair"
        case "wait" if {"url", "app", "expectedUrl", "expectedPackage"} & given.keys():
            return "wait_for_navigation"
        case "tabs":
            chosen = str(given.get("action", "list"))
            return "list_tabs" if chosen == "list" else f"{chosen}_tab"
    return verb.actions[0]


def _fill(verb: Verb, action_type: str, given: Mapping[str, object]) -> tuple[JsonObject, dict[str, str]]:
    params: JsonObject = {}
    missing: dict[str, str] = {}
    inputs = {each.name: each for each in _inputs_of(ACTION_TYPES[action_type])}
    for each in verb.inputs:
        if each.name in given and each.name not in inputs and each not in verb.more:
            raise _refuse(f"{each.name} has no meaning for {action_type}: leave it out")
    for name, each in inputs.items():
        if name in given:
            if _has(params, each.path):  # two flags, such as long and focus
                raise _refuse(f"{name} excludes the other flags for {each.path[-1]}: leave one out")
            _put(params, each.path, given[name] if each.sets is None else each.sets)
        elif each.required:
            missing[name] = each.text
    for leaf in leaves_of(ACTION_TYPES[action_type]):
        if leaf.required and leaf.help is not None and leaf.help.flags and not _has(params, leaf.path):
            missing[leaf.key] = "say " + " or ".join(f"--{flag}" for flag in leaf.help.flags)
    return params, missing | ({"matcher": NAME_A_NODE} if _lacks_node(action_type, params) else {})


def _lacks_node(action_type: str, params: Mapping[str, object]) -> bool:
    fields = ACTION_TYPES[action_type].model_fields.items()
    return any(name.endswith("matcher") and each.is_required() and each.keys[0] not in params for name, each in fields)


def _put(params: JsonObject, path: tuple[str, ...], given: object) -> None:
    for key in path[:-1]:
        params = params.setdefault(key, {})
    params[path[-1]] = given


def _has(params: Mapping[str, Any], path: tuple[str, ...]) -> bool:
    for key in path[:-1]:
        params = params.get(key, {})
    return path[-1] in params


def _refuse(message: str) -> Failure:
    return Failure("ARG_ERROR", message, side_effects=SideEffects.NONE)


def _refuse_missing(missing: Mapping[str, str]) -> Failure:
    errors = [{"field": name, "message": f"is missing: {text}"} for name, text in missing.items()]
    message = "; ".join(f"{each['field']} {each['message']}" for each in errors)
    return Failure("MISSING_ARGUMENT", message, context={"errors": errors}, side_effects=SideEffects.NONE)


def _number(written: object) -> int:
    """Return a number of milliseconds, 0 where it is none that an execution could have."""
    is_number = isinstance(written, int | float) and math.isfinite(written) and 0 < written < 1e9
    return int(written) if is_number else 0  # type: ignore[call-overload]
