"""What the programs themselves cost, cold: `shotclock exec -- true`, the other commands, an App, and the imports."""

from __future__ import annotations

import asyncio
import compileall
import contextlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import shotclock

from .rounds import Side, Size, take_turns
from .table import Bar, Table, compared

LIMIT_S = 240
RUNS_PER_ROUND = 20
TITLE = "Start-up"
NOTE = (
    "Wall time from spawn to exit, all with the same interpreter and compiled modules, output to /dev/null. "
    "`python -c pass` is what any Python program costs before its first line. `import shotclock` loads names when they "
    "are first used; `from shotclock import Runtime` brings in asyncio. `run` has one step, `true`; the App forks a "
    "worker that doubles a number. `shotclock.run` and `subprocess.run` are called in this warm program."
)
PYTHON = sys.executable
SHOTCLOCK = str(Path(PYTHON).with_name("shotclock"))
SHOTCLOCK_SH = str(Path(PYTHON).with_name("shotclock-sh"))
FLOW = "steps: {say: {exec: 'true'}}\n"
PROGRAM = """
from shotclock import App

app = App("program")

@app.command(mutates=False)
def double(n: int) -> int:
    return 2 * n

app()
"""
COMMANDS = {
    "exec": [SHOTCLOCK, "exec", "--timeout", "5s", "--", "true"],
    "shell": [SHOTCLOCK_SH, "-c", "true"],
    "run": [SHOTCLOCK, "run", "flow.yaml"],
    "check": [SHOTCLOCK, "check", "flow.yaml"],
    "inbox list": [SHOTCLOCK, "inbox", "list"],
    "app": [PYTHON, "program.py", "double", "2"],
    "pass": [PYTHON, "-c", "pass"],
    "import": [PYTHON, "-c", "import shotclock"],
    "import Runtime": [PYTHON, "-c", "from shotclock import Runtime"],
    "timeout(1)": ["timeout", "5", "true"],
    "subprocess.run": [PYTHON, "-c", 'import subprocess; subprocess.run(["true"], timeout=5)'],
}


def wall_time(argv: list[str], environ: dict[str, str]) -> float:
    null = os.open(os.devnull, os.O_RDWR)
    actions = [(os.POSIX_SPAWN_DUP2, null, number) for number in (0, 1, 2)]
    began = time.perf_counter()
    pid = os.posix_spawnp(argv[0], argv, environ, file_actions=actions)
    _, status = os.waitpid(pid, 0)  # bounded by the limit over this whole benchmark
    taken = time.perf_counter() - began
    os.close(null)
    assert status == 0, (argv, status)
    return taken


def time_of_true(run: Callable[[list[str]], object]) -> float:
    began = time.perf_counter()
    for _ in range(RUNS_PER_ROUND):
        run(["true"])
    return (time.perf_counter() - began) / RUNS_PER_ROUND


def measure(size: Size) -> Table:
    compileall.compile_dir(str(Path(shotclock.__file__).parent), quiet=2)
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        Path("flow.yaml").write_text(FLOW)
        Path("program.py").write_text(PROGRAM)
        environ = {**os.environ, "SHOTCLOCK_HOME": folder}
        sides: dict[str, Side] = {name: partial(wall_time, argv, environ) for name, argv in COMMANDS.items()}
        sides |= {
            "warm run": lambda: time_of_true(shotclock.run),
            "warm subprocess": lambda: time_of_true(subprocess.run),
        }
        figures = asyncio.run(take_turns(sides, size.of(40, 10, 1)))
        taken = {name: s * 1e3 for name, s in figures.items()}
    shown = "{:.1f} ms"
    what = "`exec -- true`"
    return Table(
        TITLE,
        NOTE,
        [
            compared(what, taken["exec"], "`python -c pass`", taken["pass"], shown, Bar(4.5)),
            compared(what, taken["exec"], "`timeout 5 true`", taken["timeout(1)"], shown),
            compared(what, taken["exec"], "Python, `subprocess.run(timeout=5)`", taken["subprocess.run"], shown),
            compared(
                "`shotclock-sh -c true`",
                taken["shell"],
                what,
                taken["exec"],
                shown,
                Bar(1.1),
                ratio=figures.ratio("shell", "exec"),
            ),
            compared("`import shotclock`", taken["import"], "`python -c pass`", taken["pass"], shown, Bar(3)),
            compared(
                "`from shotclock import Runtime`", taken["import Runtime"], "`python -c pass`", taken["pass"], shown
            ),
            compared("`shotclock run` of one step", taken["run"], "`python -c pass`", taken["pass"], shown, Bar(17)),
            compared("`shotclock check` of it", taken["check"], "`python -c pass`", taken["pass"], shown, Bar(10)),
            compared("`shotclock inbox list`", taken["inbox list"], "`python -c pass`", taken["pass"], shown, Bar(8)),
            compared("a command of an App", taken["app"], "`python -c pass`", taken["pass"], shown, Bar(11)),
            compared(
                '`shotclock.run(["true"])`',
                taken["warm run"],
                "`subprocess.run`",
                taken["warm subprocess"],
                "{:.2f} ms",
                Bar(2),
                ratio=figures.ratio("warm run", "warm subprocess"),
            ),
        ],
    )
