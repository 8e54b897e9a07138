"""docs/benchmarks.md, written from one real run."""

from __future__ import annotations

import os
import platform

from .table import Row, Table

INTRODUCTION = """\
# Benchmarks

Written by `python -m benchmarks --write docs/benchmarks.md`; `make bench` prints the same tables without writing.
Everything is measured in one run on one machine ({machine}), side by side with the usual alternatives. The sides take
turns in rounds, in an alternating order, and a figure is the median over the rounds, so a slow minute affects all sides
alike. Compare the ratios; the absolute numbers differ from machine to machine. A ratio is the median over the rounds of
shotclock's figure divided by the peer's figure of the same round (for start-up, Temporal, models and pages it is the
quotient of the medians). Each topic runs in a fresh process with a time limit of its own. Processes left behind by a
peer are counted and then killed. *Bar* is the project's own goal.
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
