"""`python -m benchmarks [TOPIC…] [--quick] [--write FILE]`: run the benchmarks and print their tables."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
import tempfile
import time
from pathlib import Path

from .isolated import Failed, GaveUp, run_isolated
from .page import page
from .table import Table

TOPICS = [
    "calls",
    "workers",
    "fresh",
    "startup",
    "overshoot",
    "memory",
    "trees",
    "flood",
    "streaming",
    "mcp",
    "wrap",
    "inbox",
    "workflows",
    "temporal",
    "scale",
    "models",
    "ui",
    "scoreboard",
]


def measure(topic: str, quick: bool) -> Table:
    module = importlib.import_module(f"benchmarks.{topic}")
    try:
        return run_isolated(module.measure, quick, within_s=module.LIMIT_S)
    except (GaveUp, Failed) as error:
        return Table(module.TITLE, str(error), header=["no result"], grid=[[str(error)]])


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("topics", nargs="*", metavar="TOPIC", help=f"of: {', '.join(TOPICS)}; all if none is named")
    parser.add_argument("--quick", action="store_true", help="fewer rounds: a glance, not a result")
    parser.add_argument("--write", type=Path, metavar="FILE", help="write the page with the tables as well")
    options = parser.parse_args()
    if unknown := set(options.topics) - set(TOPICS):
        parser.error(f"no such topic: {', '.join(sorted(unknown))}")
    tables = []
    began, load = time.monotonic(), os.getloadavg()[0]
    print(f"load of the machine before the run: {load:.1f} on {os.cpu_count()} cores", flush=True)
    with tempfile.TemporaryDirectory(prefix="shotclock-bench-") as home:
        os.environ["SHOTCLOCK_HOME"] = home  # not the user's own store
        for topic in options.topics or TOPICS:
            table = measure(topic, options.quick)
            print(table.as_text(), flush=True)
            tables.append(table)
    missed = [row for table in tables for row in table.rows if row.met is False]
    print(f"{time.monotonic() - began:.0f} s; {len(missed)} bars missed", flush=True)
    if options.write:
        options.write.write_text(page(tables, load))
    return 0


if __name__ == "__main__":
    sys.exit(main())
