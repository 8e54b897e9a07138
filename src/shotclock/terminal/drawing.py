"""Drawing for a person at a terminal: styled text, tables, ages and sizes.

The products draw their own answers with it. `rich` takes 40 ms to import, so only what draws imports it.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import datetime
from typing import TYPE_CHECKING, Any

from ..core.limits import LATEST_MS, WallTime, format_duration
from ..supervise.clock import wall_time

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

NEVER = WallTime(LATEST_MS).iso()
OFF_TERMINAL_COLUMNS = 1000  # in a file or a pipe, no name is cut

Draw = Callable[[Any, "Console"], None]


def draw(how: Draw, data: object, *, to_stderr: bool = False) -> str:
    """Return the drawing of an answer."""
    from rich.console import Console

    console = Console(highlight=False, markup=False, emoji=False, stderr=to_stderr)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = OFF_TERMINAL_COLUMNS
    with console.capture() as captured:
        how(data, console)
    return captured.get()


def styled(words: str = "", style: str = "", **more: Any) -> Text:
    from rich.text import Text

    return Text(words, style, **more)


def table(*titles: str, wraps: int | None = None) -> Table:
    """Return a table. `wraps` is the column that alone becomes narrower where the terminal is."""
    from rich.table import Table

    made = Table(*titles, box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="bold", show_header=any(titles))
    for number, column in enumerate(made.columns):
        column.no_wrap = wraps not in (None, number)
    return made


def file_size(size: int) -> str:
    from rich.filesize import decimal

    return decimal(size)


def short_size(size: int) -> str:
    return file_size(size).replace(" bytes", " B").replace(" byte", " B")


def limit_in_words(ms: int | None, otherwise: str = "no limit") -> str:
    return otherwise if ms is None or (ms == 0 and otherwise == "no limit") else format_duration(ms)


def age(at: str) -> str:
    return _round(wall_time().ms - _ms_of(at))


def time_left(at: str) -> str:
    return "no end" if at == NEVER else _round(_ms_of(at) - wall_time().ms)


def _round(ms: int) -> str:
    """Return a duration in its two largest units: 45s, 12m, 3h10m, 2d4h."""
    unit_ms = 3_600_000 if ms >= 86_400_000 else 60_000 if ms >= 60_000 else 1_000
    return format_duration(ms // unit_ms * unit_ms) if ms >= 1_000 else "0s"


def _ms_of(iso: str) -> int:
    return round(datetime.fromisoformat(iso).timestamp() * 1000)
