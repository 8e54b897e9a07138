"""docs/benchmarks.md, written from one real run."""

from __future__ import annotations

import os
import platform

from .table import Row, Table

INTRODUCTION = """\
# Benchmarks

Written by `python -m benchmarks --write docs/benchmarks.md`; `make bench` prints the same tables without writing.
Everything is measured in one run on one machine ({machine}), side by side with what a user would pick instead. The
sides take turns, round by round, in an order that is turned round each time, and a figure is the median over the
rounds, so a slow minute hits all sides alike. What counts is the ratio: shotclock's figure divided by the peer's of the
same round, and of these quotients the median, because two medians may come from different minutes (start-up, Temporal,
models and pages divide the medians). The absolute
numbers are for orientation and differ from machine to machine. Each topic runs in a fresh process with a
limit of its own, and what a peer leaves running is counted and then killed. *Bar* is what the project set out to reach.
"""


def page(tables: list[Table], load: float) -> str:
    system = f"{platform.system()}, Python {platform.python_version()}"
    machine = f"{os.cpu_count()} cores, {system}, load {load:.1f} before the run"
    return "\n".join([INTRODUCTION.format(machine=machine), *(table.as_markdown() for table in tables), missed(tables)])


def missed(tables: list[Table]) -> str:
    lines = [_line(table, row) for table in tables for row in table.rows if row.met is False]
    return "\n".join(["## Bars missed in this run", "", *(lines or ["None."]), ""])


def _line(table: Table, row: Row) -> str:
    figure = row.ours if row.ratio is None else f"{row.ratio:.2f} ×"
    against = "" if row.peer == "–" else f" against {row.peer.rsplit(' ', 2)[0] if row.ratio else row.peer}"
    return f"- {table.title}: {row.what}{against}: {figure}, the bar is {row.bar}. {row.why}".rstrip()
