"""Our hooks in the file of an agent: found, put in, and taken out."""

from __future__ import annotations

import os
import shlex

from ..core.errors import Failure
from ._json_text import KeyPath
from .config_editor import ConfigEditor, ConfigEntry


def _is_our_hook(hook: object) -> bool:
    """Return whether a hook runs `shotclock agent hook`, perhaps of another installation."""
    command = (hook.get("command") or hook.get("bash")) if isinstance(hook, dict) else None
    try:
        words = shlex.split(command) if isinstance(command, str) else []
    except ValueError:
        return False
    return words[1:3] == ["agent", "hook"] and os.path.basename(words[0]) == "shotclock"


def find_ours(editor: ConfigEditor, entry: ConfigEntry) -> KeyPath | None:
    """Return the path of our entry of this kind, or None. In a group with hooks of the user it is the hook alone."""
    found = editor.read(entry.path)
    if not entry.in_list:
        return entry.path if isinstance(found, str) and os.path.basename(found) == "shotclock-sh" else None
    for place, each in reversed(list(enumerate(found if isinstance(found, list) else ()))):
        if _is_our_hook(each):
            return (*entry.path, place)
        hooks = each.get("hooks") if isinstance(each, dict) else None
        ours = [at for at, hook in enumerate(hooks if isinstance(hooks, list) else ()) if _is_our_hook(hook)]
        if ours:
            return (*entry.path, place) if len(each["hooks"]) == 1 else (*entry.path, place, "hooks", ours[-1])
    return None


def put_entry(editor: ConfigEditor, entry: ConfigEntry) -> None:
    """Put an entry in. Raises Failure where another value of the user is in its place."""
    path, found = find_ours(editor, entry), editor.read(entry.path)
    if path is None and not entry.in_list and found is not None:
        name = ".".join(entry.path)
        raise Failure("CONFLICT", f"{name} is {found!r} already", suggestion=f"remove {name} first")
    is_inside = path is not None and len(path) > len(entry.path) + 1
    content = entry.content["hooks"][0] if is_inside else entry.content
    if path is None:
        path = (*entry.path, len(found) if isinstance(found, list) else 0) if entry.in_list else entry.path
    if editor.read(path) != content:
        editor.put(path, content)


def drop_entry(editor: ConfigEditor, entry: ConfigEntry) -> None:
    while (path := find_ours(editor, entry)) is not None:
        editor.drop(path)
