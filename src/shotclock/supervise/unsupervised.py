"""Detached programs, which outlive this process: one of ours, a browser, a shared server."""

from __future__ import annotations

import contextvars
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence

from .clock import pause
from .environment import CALL_VARIABLE, DEADLINE_VARIABLE, REMAINING_VARIABLE

# How long the program may take to detach: the start of an interpreter, and a fork.
LEAVE_LIMIT_S = 10.0
LEAVE_PAUSE_S = 0.002
CHANNEL = 3  # the descriptor of the channel to the caller


def read_error_output(argv: Sequence[str], limit_s: float) -> str:
    """Run a harmless program. Return its error output if it fails within the limit."""
    environment = {"PATH": os.environ.get("PATH", os.defpath), "LC_ALL": "C"}
    try:
        ran = subprocess.run(argv, env=environment, stdin=subprocess.DEVNULL, capture_output=True, timeout=limit_s)
    except (OSError, ValueError, subprocess.TimeoutExpired):
        return ""
    return ran.stderr.decode("utf-8", "replace") if ran.returncode else ""


def start_detached(
    module: str,
    arguments: list[str],
    *,
    output_fd: int,
    environment: Mapping[str, str],
    input_fd: int | None = None,
    channel_fd: int | None = None,
    job: tuple[str, str, str] | None = None,
) -> None:
    """Run `module.main(*arguments)` in a process that survives this one and is bounded by its own limits.

    Its stdin is empty, or `input_fd`. A `channel_fd` becomes its descriptor 3. The runner of a `job` (folder of
    runners, id, name) is enrolled when this returns, so that the end of this program no longer stops it.
    """
    root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    enrolment = "" if job is None else f"from shotclock.supervise.runners import enrol; enrol{job!r}\n"
    # The first process is our child and ends soon, so that the second needs no parent to wait for it.
    code = (
        "import os, sys\n"
        "enrolled, enrolled_in = os.pipe()\n"
        "if os.fork(): os.close(enrolled_in), os.read(enrolled, 1), os._exit(0)\n"
        f"sys.path.append({root!r})\n"
        f"{enrolment}"
        "os.close(enrolled), os.close(enrolled_in)\n"
        f"os.closerange({3 if channel_fd is None else CHANNEL + 1}, 4096)\n"
        f"from {module} import main\n"
        "main(*sys.argv[1:])\n"
    )
    # The deadline and the call of the caller do not apply to this work.
    callers = (REMAINING_VARIABLE, DEADLINE_VARIABLE, CALL_VARIABLE)
    kept = {name: value for name, value in environment.items() if name not in callers}
    null = os.open(os.devnull, os.O_RDONLY)
    try:
        pid = contextvars.Context().run(  # it belongs to no call
            os.posix_spawn,
            sys.executable,
            [sys.executable, "-P", "-c", code, *arguments],
            kept,
            file_actions=[
                (os.POSIX_SPAWN_DUP2, null if input_fd is None else input_fd, 0),
                (os.POSIX_SPAWN_DUP2, output_fd, 1),
                (os.POSIX_SPAWN_DUP2, output_fd, 2),
                *([] if channel_fd is None else [(os.POSIX_SPAWN_DUP2, channel_fd, CHANNEL)]),
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
    """Open a page in the person's browser. Return whether a program was found; whether a window appeared is unknown."""
    command = _find_opener(environment)
    if command is None:
        return False
    try:
        start_program([command, path], environment)
    except OSError:
        return False
    return True


def start_program(argv: Sequence[str], environment: Mapping[str, str]) -> None:
    """Start a program that survives this process; its output is discarded."""
    null = os.open(os.devnull, os.O_WRONLY)
    try:
        start_detached(__name__, list(argv), output_fd=null, environment=environment)
    finally:
        os.close(null)


def main(*argv: str) -> None:
    os.execv(argv[0], argv)


def _find_opener(environment: Mapping[str, str]) -> str | None:
    """Find BROWSER or xdg-open, which without a display would start a browser in our terminal and is not used."""
    search = environment.get("PATH")
    if sys.platform == "darwin":
        return shutil.which("open", path=search)
    names = environment.get("BROWSER", "").split(os.pathsep)
    named = next((found for name in names if name and (found := shutil.which(name, path=search))), None)
    if named is None and not environment.get("DISPLAY") and not environment.get("WAYLAND_DISPLAY"):
        return None
    return named or shutil.which("xdg-open", path=search)
