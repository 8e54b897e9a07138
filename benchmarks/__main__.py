"""`python -m benchmarks [TOPIC…] [--quick | --once] [--write FILE]`: run the benchmarks and print their tables."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
import tempfile
import time
import traceback
from pathlib import Path

from .isolated import run_isolated
from .page import page
from .rounds import Size
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


def measure(topic: str, size: Size) -> Table:
    """The table of a topic; of one that fails, a table without rows, so that it does not hide the topics after it."""
    try:
        module = importlib.import_module(f"benchmarks.{topic}")
        table: Table = run_isolated(module.measure, size, within_s=module.LIMIT_S)
        return table
    except Exception as error:
        traceback.print_exc()
        return Table(f"{topic}: failed", str(error), header=["no result"], grid=[[f"{type(error).__name__}: {error}"]])


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("topics", nargs="*", metavar="TOPIC", help=f"of: {', '.join(TOPICS)}; all if none is named")
    parser.add_argument("--quick", action="store_true", help="fewer rounds: a glance, not a result")
    parser.add_argument("--once", action="store_true", help="one short round: whether it runs to its end, no result")
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
            table = measure(topic, Size.ONCE if options.once else Size.QUICK if options.quick else Size.WHOLE)
            print(table.as_text(), flush=True)
            tables.append(table)
    missed = [row for table in tables for row in table.rows if row.met is False]
    print(f"{time.monotonic() - began:.0f} s; {len(missed)} bars missed", flush=True)
    if options.write:
        options.write.write_text(page(tables, load))
    failed = [table.title for table in tables if table.header == ["no result"]]
    if failed:
        print("\n".join(failed), file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
