"""The work that is measured. Everything a worker process runs has to be importable, so it lives here."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import time

# Long enough that only a kill ends it, short enough that nothing is left on the machine for good.
LONG_S = 60.0


def noop(a: int) -> int:
    return a


async def noop_async(a: int) -> int:
    return a


async def sleep_async() -> None:
    await asyncio.sleep(LONG_S)


def sleep() -> None:
    time.sleep(LONG_S)


def ignore_term() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    while True:
        time.sleep(LONG_S)


def hold_the_gil() -> None:
    """A regular expression that backtracks for hours inside C, where no signal handler and no thread gets a turn."""
    re.match(r"(a+)+$", "a" * 40 + "b")


async def block_the_loop() -> None:
    time.sleep(LONG_S)


async def hold_the_gil_async() -> None:
    hold_the_gil()


def leave_a_daemon(mark: str) -> None:
    """Start a grandchild in a session of its own, whose parent is gone, and then hang."""
    environment = {**os.environ, "BENCH_MARK": mark}
    subprocess.run(["bash", "-c", DAEMONISE], env=environment, timeout=LONG_S)
    time.sleep(LONG_S)


DAEMONISE = f"( setsid sleep {LONG_S:.0f} & )"
