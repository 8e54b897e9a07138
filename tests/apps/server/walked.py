"""`python -m tests.apps.server.walked NOTES serve …`: a command of ours that notes its way through our code.

A line of NOTES is `file PATH` for a file of ours whose functions run, each once since the last SIGUSR1, or `admit NAME`
for a call that is admitted. What runs while a module is imported does not count.
"""

import os
import signal
import sys
import threading
from types import FrameType
from typing import Any

import shotclock
from shotclock.calls.call import admit
from shotclock.main import run_program

HOME = os.path.dirname(shotclock.__file__) + os.sep


def is_importing(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_filename == "<frozen importlib._bootstrap>":
            return True
        frame = frame.f_back
    return False


def main() -> None:
    notes = os.open(sys.argv.pop(1), os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC)
    seen: set[str] = set()

    def note(frame: FrameType, event: str, _: Any) -> None:
        if event != "call":
            return
        code = frame.f_code
        if code is admit.__code__:
            os.write(notes, f"admit {frame.f_locals['name']}\n".encode())
        path = code.co_filename
        if path not in seen and not (path.startswith(HOME) and is_importing(frame)):
            seen.add(path)
            if path.startswith(HOME):
                os.write(notes, f"file {path[len(HOME) :]}\n".encode())

    signal.signal(signal.SIGUSR1, lambda *_: seen.clear())
    threading.setprofile(note)
    sys.setprofile(note)
    run_program()


if __name__ == "__main__":
    main()
