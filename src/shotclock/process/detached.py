"""A Python program of ours that is meant to outlive us: its own session, none of our descriptors, not our child."""

from __future__ import annotations

import contextvars
import os
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
