"""Other spellings of a workflow file, as users of Visor write it, translated to the keys of the schema.

Only what means the same here is translated. What does not stays as it is, and the schema reports it.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

from .yaml_reader import read_tree

# A file whose `id` is looked for; a larger one is refused when it is loaded.
SIZE_LIMIT = 4_000_000
# Keys of a step, or of the file for all its `ai` steps, and the key of the `ai` block that each one is.
_AI_KEYS = {
    "ai_model": "model",
    "ai_provider": "provider",
    "ai_mcp_servers": "mcp_servers",
    "ai_custom_tools": "tools",
}


def translate(plain: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Return the file with its own spelling of everything that is known by another. `folder` is where it lies."""
    made = dict(plain)
    if isinstance(imports := made.get("imports"), list) and isinstance(made.get("tools", {}), dict):
        named = {_find_id(folder / file): {"workflow": file} for file in imports if isinstance(file, str)}
        if len(named) == len(imports):
            made["tools"] = {**named, **made.get("tools", {})}
            del made["imports"]
    for key in ("inputs", "outputs"):
        if isinstance(listed := made.get(key), list) and all(_has_name(each) for each in listed):
            read = _read_input if key == "inputs" else _read_output
            made[key] = {each["name"]: read(each) for each in listed}
    for_all = {key: made[key] for key in _AI_KEYS if key in made}
    for name in ("steps", "checks"):
        if isinstance(steps := made.get(name), dict):
            made[name] = {step_id: _translate_step(step, for_all) for step_id, step in steps.items()}
            made = {key: value for key, value in made.items() if key not in for_all}
    return made


def _translate_step(step: Any, for_all: dict[str, Any]) -> Any:
    if not isinstance(step, dict) or step.get("type") != "ai" or not isinstance(step.get("ai", {}), dict):
        return step
    made, block = dict(step), {}
    for key, ours in _AI_KEYS.items():
        if key in step and ours not in step.get("ai", {}):
            block[ours] = _read_tools(made.pop(key)) if ours == "tools" else made.pop(key)
        elif key in for_all:
            block[ours] = _read_tools(for_all[key]) if ours == "tools" else for_all[key]
    return {**made, "ai": {**block, **step.get("ai", {})}} if block else step


def _read_tools(written: Any) -> Any:
    """Return the names of tools of which some are written as {workflow: NAME}."""
    if not isinstance(written, list):
        return written
    return [each["workflow"] if isinstance(each, dict) and set(each) == {"workflow"} else each for each in written]


def _has_name(each: Any) -> bool:
    return isinstance(each, dict) and isinstance(each.get("name"), str)


def _read_input(written: dict[str, Any]) -> dict[str, Any]:
    made = {key: value for key, value in written.items() if key != "name"}
    if isinstance(schema := made.get("schema"), dict) and set(schema) == {"type"}:
        made["type"] = made.pop("schema")["type"]
    return made


def _read_output(written: dict[str, Any]) -> Any:
    return written["value"] if set(written) <= {"name", "value", "description"} and "value" in written else written


def _find_id(file: Path) -> str:
    """Return the `id` of a workflow file. One that cannot be read has its name, and `check` says what is wrong."""
    with contextlib.suppress(OSError, ValueError):
        if file.is_file() and file.stat().st_size <= SIZE_LIMIT:
            found = read_tree(file.read_text("utf-8-sig")).value
            if isinstance(found, dict) and isinstance(found.get("id"), str):
                return str(found["id"])
    return file.stem
