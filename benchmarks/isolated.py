"""A function run in a fresh Python process and given up on after a limit: no benchmark can hang the others.

Peers are known to hang and to leave processes behind. Whatever is left below is killed here, because the one who
runs benchmarks is a subreaper and everything comes to it.
"""

from __future__ import annotations

import importlib
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from shotclock.supervise import kernel

ROOT = Path(__file__).resolve().parent.parent
# A killed process needs this long at most to disappear; only one stuck inside the kernel needs more.
GONE_LIMIT_S = 2.0


class GaveUp(Exception):
    """The function did not come back within its limit."""


class Failed(Exception):
    """The function raised; its traceback is on stderr."""


def run_isolated(function: Callable[..., Any], *arguments: Any, within_s: float) -> Any:
    """The function's result, from a process of its own. Nothing it started survives this."""
    kernel.become_subreaper()
    spared = set(kernel.descendants(os.getpid()))
    with tempfile.TemporaryDirectory(prefix="shotclock-bench-") as folder:
        answer = Path(folder) / "answer"
        request = (function.__module__, function.__qualname__, arguments, str(answer))
        process = subprocess.Popen(
            [sys.executable, "-c", "from benchmarks.isolated import serve; serve()"],
            stdin=subprocess.PIPE,
            cwd=ROOT,
            start_new_session=True,
        )
        try:
            assert process.stdin is not None
            process.stdin.write(pickle.dumps(request))
            process.stdin.close()
            process.wait(within_s)
        except subprocess.TimeoutExpired:
            raise GaveUp(f"{function.__module__}.{function.__qualname__}: no answer within {within_s:g} s") from None
        finally:
            kill_everything_below(process, spared)
        if not answer.exists():
            raise Failed(f"{function.__module__}.{function.__qualname__} ended with {process.returncode}")
        return pickle.loads(answer.read_bytes())


def serve() -> None:
    module, qualname, arguments, answer = pickle.load(sys.stdin.buffer)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)  # it was a pipe that nobody will ever write to again
    result = getattr(importlib.import_module(module), qualname)(*arguments)
    part = Path(answer + ".part")
    part.write_bytes(pickle.dumps(result))
    part.rename(answer)
    sys.stderr.flush()
    os._exit(0)  # a peer's non-daemon threads could keep the interpreter for good


def kill_everything_below(process: subprocess.Popen[bytes], spared: set[int]) -> None:
    give_up = time.monotonic() + GONE_LIMIT_S
    while (left := set(kernel.descendants(os.getpid())) - spared) and time.monotonic() < give_up:
        for pid in left:
            try:
                os.kill(pid, signal.SIGKILL)
                if pid != process.pid:
                    os.waitpid(pid, os.WNOHANG)
            except OSError:
                pass  # gone, or not a child of ours yet
        process.poll()
        time.sleep(0.005)


def left_with_mark(mark: str) -> list[int]:
    """Living processes that carry the mark in their environment, wherever they have got to."""
    wanted = mark.encode()
    found = []
    for name in os.listdir("/proc"):
        if name.isdecimal():
            try:
                with open(f"/proc/{name}/environ", "rb") as file:
                    if wanted in file.read() and not kernel.is_zombie(int(name)):
                        found.append(int(name))
            except OSError:
                continue
    return found


def kill_marked(mark: str, *, settle_s: float = 0.0) -> int:
    """Clean up after a side: how many it had left behind, `settle_s` after its answer."""
    give_up = time.monotonic() + settle_s
    while (left := left_with_mark(mark)) and time.monotonic() < give_up:
        time.sleep(0.005)
    for pid in left:
        try:
            os.kill(pid, signal.SIGKILL)
        except OSError:
            pass
    return len(left)
