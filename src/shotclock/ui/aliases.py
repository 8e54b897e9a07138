"""Other names of actions, params and matchers, which agents write: read, and never shown."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

ALIASES = {
    "tap": "click", "press": "click", "open_url": "open_uri", "wait_for": "wait_for_node", "find": "wait_for_node",
    "find_node": "wait_for_node", "wait": "wait_for_node", "wait_for_nav": "wait_for_navigation", "read": "read_text",
    "snap": "snapshot_ui", "snapshot": "snapshot_ui", "screenshot": "take_screenshot",
    "capture_screenshot": "take_screenshot", "type": "enter_text", "type_text": "enter_text",
    "text_entry": "enter_text", "input_text": "enter_text", "key_press": "press_key",
}  # fmt: skip
EXECUTION_ALIASES = {
    "command_id": "commandId", "task_id": "taskId", "expected_format": "expectedFormat", "timeout_ms": "timeoutMs",
}  # fmt: skip
PARAM_ALIASES = {
    "application_id": "applicationId", "app_id": "applicationId", "appId": "applicationId", "app": "applicationId",
    "package": "applicationId", "url": "uri", "duration_ms": "durationMs", "file": "path", "selector": "matcher",
    "node": "matcher", "element": "matcher", "value": "text", "click_type": "clickType", "within": "container",
    "distance_ratio": "distanceRatio", "max_scrolls": "maxScrolls", "expected_package": "expectedPackage",
    "expected_node": "expectedNode", "expected_url": "expectedUrl", "timeout_ms": "timeoutMs",
    "label_matcher": "labelMatcher", "max_bytes": "maxBytes",
}  # fmt: skip
MATCHER_ALIASES = {
    "resource_id": "resourceId", "id": "resourceId", "testId": "resourceId", "text": "textEquals",
    "text_equals": "textEquals", "text_contains": "textContains", "content_desc": "contentDescEquals",
    "content_desc_equals": "contentDescEquals", "content_desc_contains": "contentDescContains",
    "label": "contentDescEquals", "description": "contentDescEquals",
}  # fmt: skip
_MATCHERS = ("matcher", "container", "expectedNode", "labelMatcher")


def canonical_type(written: str) -> str:
    """Return the type of action that is meant; what is no type stays as it is."""
    name = written.strip().lower()
    return ALIASES.get(name, name)


def _rename(written: Any, aliases: Mapping[str, str]) -> Any:
    """Rename the keys of an object. An alias beside what it stands for stays, and is refused as unknown."""
    if not isinstance(written, dict):
        return written
    renamed: dict[Any, Any] = {}
    for key, item in written.items():
        meant = aliases.get(key, key) if isinstance(key, str) else key
        renamed[key if meant != key and (meant in written or meant in renamed) else meant] = item
    return renamed


def use_documented_names(written: Any) -> Any:
    """Return the payload under the names that are documented. What is wrong with it stays wrong."""
    payload = _rename(written, EXECUTION_ALIASES)
    if not isinstance(payload, dict) or not isinstance(payload.get("actions"), list):
        return payload
    actions = []
    for action in payload["actions"]:
        if isinstance(action, dict):
            action = dict(action)
            if isinstance(action.get("type"), str):
                action["type"] = canonical_type(action["type"])
            if isinstance(params := _rename(action.get("params"), PARAM_ALIASES), dict):
                matchers = {key: _rename(params[key], MATCHER_ALIASES) for key in _MATCHERS if key in params}
                action["params"] = {**params, **matchers}
        actions.append(action)
    return {**payload, "actions": actions}
