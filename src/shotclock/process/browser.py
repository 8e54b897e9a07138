"""A page of ours in the person's own browser. The browser is theirs: it outlives us, and nobody waits for it."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Mapping

from .detached import start_detached


def open_in_browser(path: str, environment: Mapping[str, str]) -> bool:
    """Whether there was something to open it with. Whether a window came up nobody knows."""
    command = _opener(environment)
    if command is None:
        return False
    null = os.open(os.devnull, os.O_WRONLY)
    try:
        start_detached(__name__, [command, path], output_fd=null, environment=environment)
    except OSError:
        return False
    finally:
        os.close(null)
    return True


def main(command: str, path: str) -> None:
    os.execv(command, [command, path])


def _opener(environment: Mapping[str, str]) -> str | None:
    """Without a display xdg-open would look for a browser of the terminal, which is ours to write on. One that is named
    by BROWSER is meant: editors that are connected to this machine from another one name theirs that way."""
    search = environment.get("PATH")
    if sys.platform == "darwin":
        return shutil.which("open", path=search)
    names = environment.get("BROWSER", "").split(os.pathsep)
    named = next((found for name in names if name and (found := shutil.which(name, path=search))), None)
    if named is None and not environment.get("DISPLAY") and not environment.get("WAYLAND_DISPLAY"):
        return None
    return named or shutil.which("xdg-open", path=search)
