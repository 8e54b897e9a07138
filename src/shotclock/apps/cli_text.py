"""Results and progress of an App's commands, as text for a person."""

from __future__ import annotations

import json
import os
import sys
from typing import Any

from ..core.limits import NS_PER_MS, format_duration
from ..core.visible_text import one_line
from ..supervise.clock import monotonic_ns
from ..terminal.output import Screen, is_terminal, write_quietly

BAR_WIDTH = 24
REDRAW_NS = 100 * NS_PER_MS
_SCALARS = (str, int, float, bool, type(None))
_GAP = "  "
LONGEST_CELL = 10_000  # characters, off a terminal
USUAL_WIDTH = 80
NARROWEST = 8  # of a column that is cut


def render_value(value: object) -> str:
    """Return a result as text: a text itself, a table of a list of flat objects, JSON of anything else."""
    if isinstance(value, str):
        return value
    if isinstance(value, list) and (table := _table(value)):
        return table
    return json.dumps(value, indent=2, ensure_ascii=False)


def show_item(item: object) -> None:
    """Print an item of a command that yields, in one line unless it is a text."""
    text = item if isinstance(item, str) else json.dumps(item, ensure_ascii=False)
    write_quietly(sys.stdout, f"{text}\n")


def _table(rows: list[Any]) -> str | None:
    """Return a table with a column for each key, None if it would hide something."""
    if not rows or not all(isinstance(row, dict) and row for row in rows):
        return None
    if not all(isinstance(cell, _SCALARS) for row in rows for cell in row.values()):
        return None
    titles = list(dict.fromkeys(key for row in rows for key in row))
    columns = [[_cell(row.get(title)) for row in rows] for title in titles]
    is_number = [
        all(isinstance(row.get(title), int | float | None) and not isinstance(row.get(title), bool) for row in rows)
        for title in titles
    ]
    heads = [one_line(title).upper() for title in titles]
    widths = [max(map(_width, [head, *cells])) for head, cells in zip(heads, columns, strict=True)]
    _fit(widths, len(_GAP))
    lines = [
        _GAP.join(
            _place(cell, width, right) for cell, width, right in zip(line, widths, is_number, strict=True)
        ).rstrip()
        for line in (heads, *zip(*columns, strict=True))
    ]
    return "\n".join(lines)


def _cell(value: object) -> str:
    return one_line(value, LONGEST_CELL) if isinstance(value, str) else "" if value is None else json.dumps(value)


def _fit(widths: list[int], gap: int) -> None:
    """Narrow the widest columns until the table fits the terminal. A file has room for all of it."""
    if not is_terminal(sys.stdout):
        return
    room = _find_width()
    while sum(widths) + gap * (len(widths) - 1) > room and max(widths) > NARROWEST:
        widths[widths.index(max(widths))] -= 1


def _find_width() -> int:
    """Return the columns of the terminal. `shutil` knows them as well, and takes milliseconds to import."""
    written = os.environ.get("COLUMNS", "")
    if written.isdecimal() and int(written):
        return int(written)
    try:
        return os.get_terminal_size(1).columns or USUAL_WIDTH
    except OSError:
        return USUAL_WIDTH


def _width(text: str) -> int:
    """Return the number of terminal cells of a text."""
    if text.isascii():
        return len(text)
    import unicodedata

    return sum(
        0 if unicodedata.combining(letter) else 1 + (unicodedata.east_asian_width(letter) in "WF") for letter in text
    )


def _place(text: str, width: int, is_number: bool) -> str:
    if _width(text) > width:
        while _width(text) > width - 1:
            text = text[:-1]
        text += "…"
    blanks = " " * (width - _width(text))
    return blanks + text if is_number else text + blanks


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
