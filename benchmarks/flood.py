"""Memory of whoever runs a command that writes without end."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from shotclock import Clocks, Runtime

from .isolated import run_isolated
from .process_memory import forget_peak, peak_kib, resident_kib
from .rounds import Size
from .table import Bar, Table, absolute

LIMIT_S = 60
TITLE = "Memory under an output flood"
NOTE = (
    "`yes` for half a second, its output captured with a limit of 1 MiB. The figure is the growth of the peak "
    "resident size of the calling process. For the command line it is the difference between the largest process "
    "of shotclock with `yes` and with `true`, so its supervisor counts as well."
)
FLOOD_S = 0.5
LIMIT = 1024 * 1024
BAR = Bar(1.05 + 20, "MB")


def our_growth() -> float:
    async def run() -> float:
        async with Runtime() as runtime:
            await runtime.run(["true"])
            forget_peak()
            before = resident_kib()
            envelope = await runtime.run(["yes"], Clocks.of(f"{FLOOD_S}s", grace="0ms"), output_limit=LIMIT)
            grown = peak_kib() - before
            data: Any = envelope.data
            assert envelope.code == "TIMEOUT" and len(data["stdout"]) >= LIMIT, envelope.code
            Path(data["stdout_file"]).unlink(missing_ok=True)
            return grown * 1024 / 1e6

    return asyncio.run(run())


# A small process between us and the command: ru_maxrss of a child starts with the size of whoever spawned it.
LAUNCHER = """
import resource, subprocess, sys
with open(sys.argv[1], "wb") as out:
    subprocess.run(sys.argv[2:], stdout=out, timeout=20)
print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)
"""


def command_line_peak(*command: str) -> float:
    """Peak of the largest process below, as the kernel adds it up while they are collected."""
    program = [str(Path(sys.executable).with_name("shotclock")), "exec", "--json", "--output-limit", str(LIMIT)]
    argv = [*program, "--timeout", f"{FLOOD_S * 1e3:.0f}ms", "--grace", "0", "--", *command]
    with tempfile.TemporaryDirectory(prefix="shotclock-bench-") as folder:
        environment = {**os.environ, "SHOTCLOCK_HOME": folder}
        launcher = [sys.executable, "-c", LAUNCHER, f"{folder}/out", *argv]
        told = subprocess.run(launcher, env=environment, stdout=subprocess.PIPE, timeout=25, check=True).stdout
    return int(told) * 1024 / 1e6


def peer_growth() -> float:
    before = resident_kib()
    try:
        subprocess.run(["yes"], capture_output=True, timeout=FLOOD_S)
    except subprocess.TimeoutExpired:
        pass
    return (peak_kib() - before) * 1024 / 1e6


def measure(size: Size) -> Table:
    peer = f"subprocess.run {run_isolated(peer_growth, within_s=30):,.0f} MB"
    ours = max(run_isolated(our_growth, within_s=20) for _ in range(size.of(3, 1, 1)))
    whole = max(command_line_peak("yes") for _ in range(size.of(3, 1, 1))) - command_line_peak("true")
    return Table(
        TITLE,
        NOTE,
        [
            absolute("`Runtime.run`, the asking process", ours, "{:.1f} MB", BAR, peer),
            absolute("`shotclock exec --json`, its largest process", whole, "{:.1f} MB", BAR, peer),
        ],
    )
