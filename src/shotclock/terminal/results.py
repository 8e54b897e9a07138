"""Results of any form, and progress, as text for a person."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING

from ..core.limits import NS_PER_MS, format_duration
from ..core.value_types import JsonObject
from ..core.visible_text import one_line
from ..supervise.clock import monotonic_ns
from .drawing import draw, styled, table
from .output import Screen, write_quietly

if TYPE_CHECKING:
    from rich.console import Console

BAR_WIDTH = 24
REDRAW_NS = 100 * NS_PER_MS
_SCALARS = (str, int, float, bool, type(None))
LONGEST_CELL = 10_000  # characters, off a terminal
WIDEST_TABLE = 1_000_000


def render_value(value: object) -> str:
    """Return a result as text: a text itself, a table of a list of flat objects, JSON of anything else."""
    if isinstance(value, str):
        return value
    if isinstance(value, list) and value and all(map(_is_flat, value)):
        return "\n".join(line.rstrip() for line in draw(_draw_table, value).splitlines())
    return json.dumps(value, indent=2, ensure_ascii=False)


def _is_flat(row: object) -> bool:
    """Return whether a table would show all of an object."""
    return isinstance(row, dict) and bool(row) and all(isinstance(cell, _SCALARS) for cell in row.values())


def show_item(item: object) -> None:
    """Print an item of a command that yields, in one line unless it is a text."""
    text = item if isinstance(item, str) else json.dumps(item, ensure_ascii=False)
    write_quietly(sys.stdout, f"{text}\n")


def _draw_table(rows: list[JsonObject], console: Console) -> None:
    """Draw a column for each key. A terminal cuts the widest ones, a file has room for all of them."""
    if not console.is_terminal:
        console.width = WIDEST_TABLE
    titles = list(dict.fromkeys(key for row in rows for key in row))
    drawn = table(*(one_line(title).upper() for title in titles))
    drawn.header_style = ""
    for title, column in zip(titles, drawn.columns, strict=True):
        cells = [row.get(title) for row in rows]
        is_number = all(isinstance(cell, int | float | None) and not isinstance(cell, bool) for cell in cells)
        column.justify, column.no_wrap = "right" if is_number else "left", True
    for row in rows:
        drawn.add_row(*(styled(_cell(row.get(title))) for title in titles))
    console.print(drawn)


def _cell(value: object) -> str:
    return one_line(value, LONGEST_CELL) if isinstance(value, str) else "" if value is None else json.dumps(value)


class ProgressBar:
    """The progress of one call on the terminal of stderr. It is erased at the end."""

    def __init__(self, name: str, screen: Screen) -> None:
        self._name, self._screen = name, screen
        self._began_ns = monotonic_ns()
        self._drawn_ns = 0

    def show(self, done: float, total: float | None, unit: str | None) -> None:
        now_ns = monotonic_ns()
        is_last = total is not None and done >= total
        if (self._drawn_ns and now_ns - self._drawn_ns < REDRAW_NS and not is_last) or self._screen.is_behind:
            return
        self._drawn_ns = now_ns
        seconds = (now_ns - self._began_ns) // (1000 * NS_PER_MS)
        elapsed = format_duration(seconds * 1000) if seconds else "0s"
        # The cursor returns to the start, so that output of the command begins there.
        self._screen.write(f"\x1b[2K{draw_bar(self._name, done, total, unit, elapsed)}\r")
        self._screen.flush()

    def close(self) -> None:
        if self._drawn_ns:
            self._screen.write("\x1b[2K\r")
        self._screen.close()


def draw_bar(name: str, done: float, total: float | None, unit: str | None, elapsed: str) -> str:
    text = f" {one_line(unit)}" if unit else ""
    if not total or total <= 0:
        return f"{name}: {done:g}{text}, {elapsed}"
    share = min(max(done / total, 0.0), 1.0)
    filled = int(share * BAR_WIDTH)
    return f"{name} [{'#' * filled}{'-' * (BAR_WIDTH - filled)}] {share:4.0%} {done:g}/{total:g}{text}, {elapsed}"
