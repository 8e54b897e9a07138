"""Payloads of one action each, as `shotclock ui click` and its like send them.

Each gets an execution that is longer than its action: `max(t + 5000, 30000)`, and never longer than one may be. So for
every legal budget of the action the payload is a legal execution. What is not legal is passed on, to be refused with
its path by `read_execution`.
"""

from __future__ import annotations

import math
import os

from . import budgets

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    Payload = dict[str, Any]

ACTION_SOURCE = "clawperator-action"
OBSERVE_SOURCE = "clawperator-observe"
EXPECTED_FORMAT = "android-ui-automator"


def build_wait(matcher: Any, timeout_ms: Any = None, *, state: str = "visible") -> Payload:
    params = (
        {"matcher": matcher} | ({} if state == "visible" else {"state": state}) | _make_params(timeoutMs=timeout_ms)
    )
    return _build("wait", "wait_for_node", params, _inflated(timeout_ms))


def build_wait_for_nav(timeout_ms: Any, *, package: Any = None, node: Any = None, url: Any = None) -> Payload:
    params = _make_params(expectedPackage=package, expectedNode=node, expectedUrl=url) | {"timeoutMs": timeout_ms}
    return _build("wait-for-nav", "wait_for_navigation", params, _inflated(timeout_ms))


def build_sleep(duration_ms: Any, global_ms: Any = None) -> Payload:
    timeout_ms = max(_inflated(duration_ms), _number(global_ms))
    return _build("sleep", "sleep", {"durationMs": duration_ms}, min(timeout_ms, budgets.MAX_TIMEOUT_MS))


def build_snapshot(timeout_ms: Any = None, *, max_bytes: Any = None) -> Payload:
    return _build(
        "snap", "snapshot_ui", _make_params(maxBytes=max_bytes), _whole(timeout_ms), OBSERVE_SOURCE, "snapshot"
    )


def build_screenshot(timeout_ms: Any = None, *, path: str | None = None) -> Payload:
    params = _make_params(path=path)
    return _build("snap", "take_screenshot", params, _whole(timeout_ms), OBSERVE_SOURCE, "screenshot")


def build_click(
    timeout_ms: Any = None, *, matcher: Any = None, coordinate: Any = None, kind: str = "default"
) -> Payload:
    params = _make_params(matcher=matcher, coordinate=coordinate, clickType=None if kind == "default" else kind)
    return _build("click", "click", params, _whole(timeout_ms))


def build_open(target: str, timeout_ms: Any = None) -> Payload:
    """Return what opens an address, or an app where it has no scheme."""
    if ":" in target:
        return _build("open", "open_uri", {"uri": target}, _whole(timeout_ms))
    return _build("open", "open_app", {"applicationId": target}, _whole(timeout_ms))


def build_read(matcher: Any, timeout_ms: Any = None, *, all_of_them: bool = False) -> Payload:
    params = {"matcher": matcher} | ({"all": True} if all_of_them else {})
    return _build("read", "read_text", params, _whole(timeout_ms))


def build_read_value(label: Any, timeout_ms: Any = None) -> Payload:
    return _build("read-value", "read_key_value_pair", {"labelMatcher": label}, _whole(timeout_ms))


def build_type(matcher: Any, text: str, timeout_ms: Any = None, *, submit: bool = False, keep: bool = False) -> Payload:
    params = {"matcher": matcher, "text": text}
    params |= ({"submit": True} if submit else {}) | ({"clear": False} if keep else {})
    return _build("type", "enter_text", params, _whole(timeout_ms))


def build_press(key: str, timeout_ms: Any = None) -> Payload:
    return _build("press", "press_key", {"key": key}, _whole(timeout_ms))


def build_scroll(direction: str, timeout_ms: Any = None, *, until: Any = None, container: Any = None) -> Payload:
    params = {"direction": direction} | _make_params(container=container)
    if until is None:
        return _build("scroll", "scroll", params, _whole(timeout_ms))
    return _build("scroll", "scroll_until", {"matcher": until} | params, _whole(timeout_ms))


def _build(
    action_id: str,
    action_type: str,
    params: Payload,
    timeout_ms: Any,
    source: str = ACTION_SOURCE,
    verb: str | None = None,
) -> Payload:
    command_id = new_command_id(verb or action_id)
    action: Payload = {"id": action_id, "type": action_type}
    return {
        "commandId": command_id,
        "taskId": command_id,
        "source": source,
        "expectedFormat": EXPECTED_FORMAT,
        "timeoutMs": timeout_ms,
        "actions": [action | ({"params": params} if params else {})],
        "mode": "direct",
    }


def new_command_id(verb: str) -> str:
    return f"{verb}-{os.urandom(6).hex()}"


def _make_params(**params: Any) -> Payload:
    return {name: written for name, written in params.items() if written is not None}


def _number(written: Any) -> int:
    is_number = type(written) in (int, float) and math.isfinite(written)
    return int(written) if is_number else 0


def _inflated(action_ms: Any) -> int:
    """Return the execution for an action that may take this long."""
    wanted = max(_number(action_ms) + budgets.BUILDER_MARGIN_MS, budgets.DEFAULT_TIMEOUT_MS)
    return min(wanted, budgets.MAX_TIMEOUT_MS)


def _whole(timeout_ms: Any) -> Any:
    """Return the execution as it was asked for, or the usual one."""
    return budgets.DEFAULT_TIMEOUT_MS if timeout_ms is None else timeout_ms
