"""The end of a program that has answered: soon, and with the exit code it gave, whatever the program left running.

A thread that nobody waits for, or an exit hook that hangs, would keep the process although its caller has the envelope.
"""

from __future__ import annotations

import os
import threading
from types import FrameType

from ..enforce.clock import pause
from . import signals

# What the program's own exit hooks may take. Together with the answer it stays below the 5 s of F-011.
LEAVE_LIMIT_S = 3.0
_STARTERS = ("runpy", "importlib")


def is_the_end(package: str, frame: FrameType | None) -> bool:
    """Whether only the program itself waits for the command line to return: not a test, a REPL or a larger program."""
    while frame is not None:
        name = str(frame.f_globals.get("__name__", ""))
        if name != "__main__" and name.partition(".")[0] not in (package, *_STARTERS):
            return False
        frame = frame.f_back
    return True


def leave_soon(code: int) -> None:
    """From here on no signal changes the exit code, and LEAVE_LIMIT_S is all the time there is."""
    signals.ignore()
    threading.Thread(target=_leave, args=(code,), daemon=True).start()


def _leave(code: int) -> None:
    pause(LEAVE_LIMIT_S)
    os._exit(code)
