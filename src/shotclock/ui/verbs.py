"""Verbs: executions of one action, with the inputs of `shotclock ui VERB` and of the MCP tool `ui_VERB`.

The inputs follow from the declared params. The execution outlasts a wait or sleep of `t` ms: `max(t + 5000, 30000)`.
An illegal value is passed on, and `read_execution` refuses it with its path.
"""

from __future__ import annotations

import math
import os
import types
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Union, get_args, get_origin

from ..core.errors import Failure, SideEffects
from ..core.validation import Part, read_hints
from ..core.value_types import value
from .payload import ACTION_TYPES, DEFAULT_TIMEOUT_MS, EXPECTED_FORMAT, MAX_TIMEOUT_MS, Help, Matcher

MARGIN_MS = 5_000  # the least time that an execution has beyond its one wait or sleep
NAME_A_NODE = "name a node: ref, text, text_contains, id, role, label or css"


@value
class Input:
    name: str
    text: str
    type: type
    path: tuple[str, ...] = ()  # its place in the params
    required: bool = False
    by_place: bool = False
    only_cli: bool = False
    sets: object = None  # the value that a flag sets; None: its own


def _inputs_of(part: type[Part], path: tuple[str, ...] = ()) -> Iterator[Input]:
    hints = read_hints(part)
    for name, info in part.model_fields.items():
        place = (*path, info.keys[0])
        kind, help = _unwrap(hints[name])
        if kind is Matcher and help is None and name != "container":
            yield from _inputs_of(Matcher, place)
        elif help is not None and help.flags:
            for flag, (sets, text) in help.flags.items():
                yield Input(flag, text, bool, place, sets=sets)
        elif help is not None:
            kind = kind if kind in (bool, int) else str
            yield Input(help.name or name, help.text, kind, place, info.is_required(), help.by_place, help.only_cli)


def _unwrap(hint: Any) -> tuple[Any, Help | None]:
    help = None
    while get_origin(hint) in (Annotated, Union, types.UnionType):
        help = next((note for note in get_args(hint)[1:] if isinstance(note, Help)), help)
        hint = get_args(hint)[0]
    return hint, help


@value
class Verb:
    name: str
    text: str
    actions: tuple[str, ...]
    more: tuple[Input, ...] = ()

    @property
    def inputs(self) -> list[Input]:
        found = {each.name: each for action in self.actions for each in _inputs_of(ACTION_TYPES[action])}
        return [*found.values(), *self.more]

    @property
    def mutates(self) -> bool:
        return any(ACTION_TYPES[action].mutates for action in self.actions)


_VALUE = Input("value", "Read the value beside this label.", bool)
VERBS = {
    verb.name: verb
    for verb in (
        Verb("open", "Open an address, or an app.", ("open_uri", "open_app")),
        Verb("click", "Click a node or a point.", ("click",)),
        Verb("type", "Enter text into a node.", ("enter_text",)),
        Verb("press", "Press a key.", ("press_key",)),
        Verb("scroll", "Scroll once, or until a node is visible.", ("scroll", "scroll_until")),
        Verb("read", "Read the text of a node.", ("read_text", "read_key_value_pair"), (_VALUE,)),
        Verb("snapshot", "Return the visible nodes as text: roles, names, states and refs.", ("snapshot_ui",)),
        Verb("screenshot", "Take a picture.", ("take_screenshot",)),
        Verb("wait", "Wait until a node is visible, or hidden.", ("wait_for_node",)),
        Verb("wait-for-nav", "Wait for another page or app.", ("wait_for_navigation",)),
        Verb("sleep", "Let time pass on the device.", ("sleep",)),
    )
}


def build(verb_name: str, values: Mapping[str, object], timeout_ms: object = None) -> dict[str, Any]:
    """Return the payload of a verb with these inputs; `timeout_ms` is the execution's."""
    verb = VERBS[verb_name]
    action_type = _choose(verb, values)
    params, missing = _fill(action_type, values)
    if missing:
        errors = [{"field": name, "message": f"is missing: {text}"} for name, text in missing.items()]
        message = "; ".join(f"{each['field']} {each['message']}" for each in errors)
        raise Failure("MISSING_ARGUMENT", message, context={"errors": errors}, side_effects=SideEffects.NONE)
    limit_ms = params.get("durationMs") if action_type == "sleep" else values.get("timeout")
    if action_type in ("sleep", "wait_for_node", "wait_for_navigation"):
        wanted_ms = max(_number(limit_ms) + MARGIN_MS, _number(timeout_ms), DEFAULT_TIMEOUT_MS)
        timeout_ms = min(wanted_ms, MAX_TIMEOUT_MS)
    is_look = verb_name in ("snapshot", "screenshot")
    action: dict[str, Any] = {"id": "snap" if is_look else verb_name, "type": action_type}
    return {
        **new_head(verb_name, "clawperator-observe" if is_look else "clawperator-action"),
        "timeoutMs": DEFAULT_TIMEOUT_MS if timeout_ms is None else timeout_ms,
        "actions": [action | ({"params": params} if params else {})],
        "mode": "direct",
    }


def new_head(name: str, source: str) -> dict[str, Any]:
    command_id = f"{name}-{os.urandom(6).hex()}"
    return {"commandId": command_id, "taskId": command_id, "source": source, "expectedFormat": EXPECTED_FORMAT}


def _choose(verb: Verb, values: Mapping[str, object]) -> str:
    match verb.name:
        case "open":
            return "open_uri" if ":" in str(values.get("target")) else "open_app"
        case "scroll":
            return "scroll_until" if any(values.get(each.name) for each in _inputs_of(Matcher)) else "scroll"
        case "read" if values.get("value"):
            return "read_key_value_pair"
    return verb.actions[0]


def _fill(action_type: str, values: Mapping[str, object]) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the params, and the missing inputs with their texts."""
    part = ACTION_TYPES[action_type]
    params: dict[str, Any] = {}
    missing: dict[str, str] = {}
    for each in _inputs_of(part):
        given = values.get(each.name)
        if given is None or given is False:
            if each.required:
                missing[each.name] = each.text
            continue
        inside = params
        for key in each.path[:-1]:
            inside = inside.setdefault(key, {})
        if each.path[-1] in inside:  # two flags, such as long and focus
            message = f"{each.name} excludes the other flags for {each.path[-1]}: leave one out"
            raise Failure("ARG_ERROR", message, side_effects=SideEffects.NONE)
        inside[each.path[-1]] = given if each.sets is None else each.sets
    for name, info in part.model_fields.items():
        if info.is_required() and info.keys[0] not in params and name.endswith("matcher"):
            missing["matcher"] = NAME_A_NODE
    return params, missing


def _number(written: object) -> int:
    """Return a number of milliseconds, 0 where it is none that an execution could have."""
    is_number = isinstance(written, int | float) and math.isfinite(written) and 0 < written < 1e9
    return int(written) if is_number else 0  # type: ignore[call-overload]
