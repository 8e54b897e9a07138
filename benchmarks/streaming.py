"""Output while it runs: what the log of a step costs a flood of 100 MB, and how late `logs -f` shows a line."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from shotclock import Runtime
from shotclock.core.visible_text import Redaction
from shotclock.flows.run.step_log import RunLogs
from shotclock.store.store import Store

from .rounds import Side, Size, percentile, take_turns
from .table import Bar, Table, absolute

LIMIT_S = 300
TITLE = "Output while it runs"
NOTE = (
    "100 MB of lines from a shell, by `Runtime.run` with a secret to mask: its output kept for the answer alone, or "
    "also written to the log of a step. The *lag* is the time from `print` in a step until `shotclock logs -f` in "
    "another process has written the line, for 100 lines; *with a load* beside a busy process per core."
)
BYTES = 100_000_000
LINES, PAUSE_S = 100, 0.05
CLOCK = f"import time\nfor n in range({{}}): print(time.time(), flush=True); time.sleep({PAUSE_S})"
BUSY = "while True: pass"
FOLLOW_LIMIT_S = 60


async def seconds_of_flood(count: int, *, streams: bool) -> float:
    with tempfile.TemporaryDirectory(prefix="shotclock-bench-") as folder:
        log = RunLogs(Path(folder) / "home", "run", Redaction({"TOKEN": "s3cr3t-of-a-bench"}), None).open("step", 1)
        async with Runtime() as runtime:
            await runtime.run(["true"])
            began = time.perf_counter()
            script = f"yes 'a line of the output of a build' | head -c {count}"
            envelope = await runtime.run(["sh", "-c", script], on_output=log.add if streams else None)
            taken = time.perf_counter() - began
            log.close()
        assert envelope.ok, envelope.error
        data: Any = envelope.data
        if data.get("stdout_file"):
            Path(data["stdout_file"]).unlink(missing_ok=True)
    return taken


def lags_ms(load: int, lines: int) -> list[float]:
    """Return the lag of each line of a step, beside so many busy processes."""
    with tempfile.TemporaryDirectory(prefix="shotclock-bench-") as folder:
        (Path(folder) / "clock.py").write_text(CLOCK.format(lines))
        (Path(folder) / "flow.yaml").write_text(f"steps: {{clock: {{exec: {sys.executable} clock.py}}}}")
        environment = {**os.environ, "SHOTCLOCK_HOME": f"{folder}/home"}
        program, null = [sys.executable, "-m", "shotclock"], subprocess.DEVNULL
        Store.open(Path(folder) / "home")
        busy = [subprocess.Popen([sys.executable, "-c", BUSY]) for _ in range(load)]
        words = ["run", f"{folder}/flow.yaml", "--run-id", "one", "--json"]
        running = subprocess.Popen([*program, *words], env=environment, stdout=null, stderr=null)
        try:
            log, until = Path(folder) / "home/logs/one/clock@1", time.monotonic() + FOLLOW_LIMIT_S
            while not log.exists() and time.monotonic() < until:
                time.sleep(0.01)
            follow = [*program, "logs", "one", "clock", "-f"]
            with subprocess.Popen(follow, env=environment, stdout=subprocess.PIPE, text=True) as following:
                assert following.stdout is not None
                lags = [(time.time(), float(line)) for line in following.stdout]
            began = lags[0][0]  # what was printed before it followed is late by its start
            # On a busy machine it may follow only once all is printed: then that start is what there is to show.
            return [(seen - printed) * 1e3 for seen, printed in lags if printed > began or began > lags[-1][1]]
        finally:
            for each in (running, *busy):
                each.kill()
                each.wait(FOLLOW_LIMIT_S)


async def _measure(rounds: int, count: int, lines: int) -> Table:
    sides: dict[str, Side] = {
        "kept": lambda: seconds_of_flood(count, streams=False),
        "streamed": lambda: seconds_of_flood(count, streams=True),
    }
    taken = await take_turns(sides, rounds)
    ratio = taken.ratio("streamed", "kept")
    peer = f"not streamed {taken['kept']:.2f} s"
    rows = [absolute(f"100 MB streamed, {taken['streamed']:.2f} s", ratio, "{:.2f} ×", Bar(1.1, "×"), peer)]
    for what, load, bar in (("quiet", 0, Bar(500, "ms")), ("with a load", os.cpu_count() or 1, None)):
        lags = await asyncio.to_thread(lags_ms, load, lines)
        for name, figure in (("p50", percentile(lags, 50)), ("max", max(lags))):
            rows.append(absolute(f"`logs -f`, {what}: {name} of {len(lags)} lines", figure, "{:.0f} ms", bar))
    return Table(TITLE, NOTE, rows)


def measure(size: Size) -> Table:
    return asyncio.run(_measure(*size.of((9, BYTES, LINES), (1, BYTES, LINES), (1, 1_000_000, 20))))
