"""Programs that are meant to outlive us: one of ours in a session of its own, and the person's own browser."""

from __future__ import annotations

import contextvars
import os
import shutil
import sys
from collections.abc import Mapping

from .clock import pause
from .environment import CALL_VARIABLE, DEADLINE_VARIABLE, REMAINING_VARIABLE

# How long the program may take to leave our family: an interpreter that starts, and a fork.
LEAVE_LIMIT_S = 10.0
LEAVE_PAUSE_S = 0.002


def start_detached(module: str, arguments: list[str], *, output_fd: int, environment: Mapping[str, str]) -> None:
    """Run `module.main(*arguments)`, reading nothing, writing to `output_fd`. Raises OSError if it cannot be started.

    It survives us, and whoever started us; its own clocks are what bounds it.
    """
    root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    # The first process is our child and ends at once, so that nobody has to wait for the second.
    code = (
        "import os, sys\n"
        "if os.fork(): os._exit(0)\n"
        "os.closerange(3, 4096)\n"
        f"sys.path.append({root!r})\n"
        f"from {module} import main\n"
        "main(*sys.argv[1:])\n"
    )
    # The caller's deadline ends its wait, and its call what it started, but not this work.
    callers = (REMAINING_VARIABLE, DEADLINE_VARIABLE, CALL_VARIABLE)
    kept = {name: value for name, value in environment.items() if name not in callers}
    null = os.open(os.devnull, os.O_RDONLY)
    try:
        pid = contextvars.Context().run(  # of no call: it outlives whoever starts it
            os.posix_spawn,
            sys.executable,
            [sys.executable, "-P", "-c", code, *arguments],
            kept,
            file_actions=[
                (os.POSIX_SPAWN_DUP2, null, 0),
                (os.POSIX_SPAWN_DUP2, output_fd, 1),
                (os.POSIX_SPAWN_DUP2, output_fd, 2),
            ],
            setsid=True,
            setsigmask=[],
        )
    finally:
        os.close(null)
    for _ in range(int(LEAVE_LIMIT_S / LEAVE_PAUSE_S)):
        if os.waitpid(pid, os.WNOHANG)[0] == pid:
            return
        pause(LEAVE_PAUSE_S)
    raise TimeoutError("the detached process did not come up in time")


def open_in_browser(path: str, environment: Mapping[str, str]) -> bool:
    """Open a page in the person's own browser, which outlives us. Return whether there was something to open it with;
    whether a window came up nobody knows."""
    command = _find_opener(environment)
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


def _find_opener(environment: Mapping[str, str]) -> str | None:
    """Find the program that opens a page. Without a display xdg-open would look for a browser of the terminal, which is
    ours to write on. One that is named by BROWSER is meant: editors that are connected to this machine from another
    one name theirs that way."""
    search = environment.get("PATH")
    if sys.platform == "darwin":
        return shutil.which("open", path=search)
    names = environment.get("BROWSER", "").split(os.pathsep)
    named = next((found for name in names if name and (found := shutil.which(name, path=search))), None)
    if named is None and not environment.get("DISPLAY") and not environment.get("WAYLAND_DISPLAY"):
        return None
    return named or shutil.which("xdg-open", path=search)
