"""The drawing of a scene: two panes on a terminal, lines of text elsewhere, and the picture of --record."""

from __future__ import annotations

import contextlib
import io
import re
import sys
from collections.abc import Iterator
from typing import IO, cast

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from ...core.value_types import value
from ...core.visible_text import one_line
from ...process.leftovers import LeftProcess
from ..output import find_screen, is_terminal
from .scenes import WITH, WITHOUT, Scene
from .stage import Show, Take

NARROW = 80  # columns, below which the panes are drawn one under the other
PICTURE_WIDTH = 90  # wide enough for two panes, narrow enough to be read on a page
LONGEST_NAME = 40
NAMES_SHOWN = 4
FRAMES_PER_S = 8
NEXT = "Next: `shotclock timeout 60 CMD`, `shotclock agent install NAME`, and `shotclock --help`."

Played = list[tuple[Scene, list[Take]]]


def describe_left(take: Take) -> tuple[str, str]:
    """Return the count of a run in words, and its style."""
    if take.failure:
        return f"failed: {take.failure}", "bold red"
    if not take.is_counted:
        return "running", "dim"
    if take.left is None:
        return "left alive: not counted, there is no /proc here", "yellow"
    if not take.left:
        return "left alive: 0", "bold green"
    names = [name_process(each) for each in take.left[:NAMES_SHOWN]]
    more = [f"{len(take.left) - NAMES_SHOWN} more"] if len(take.left) > NAMES_SHOWN else []
    return f"left alive: {len(take.left)} ({', '.join(names + more)})", "bold red"


def name_process(process: LeftProcess) -> str:
    """Return the words of a process, paths without their folders."""
    words = [word.rpartition("/")[2] or word for word in process.cmdline.split()]
    return one_line(" ".join(words), LONGEST_NAME) + (", stopped" if process.state == "T" else "")


def count(take: Take) -> str:
    if take.failure:
        return "failed"
    return "not counted" if take.left is None else str(len(take.left))


def heading(scene: Scene) -> str:
    return f"{scene.number}. {scene.title}"


def scene_text(scene: Scene, takes: list[Take]) -> str:
    """Return a scene as lines, for a reader that is no terminal."""
    lines = [heading(scene), scene.explains if takes else missing_text(scene)]
    for take in takes:
        lines += ["", f"-- {take.title}", *take.lines, describe_left(take)[0]]
    return "\n".join(lines) + "\n\n"


def missing_text(scene: Scene) -> str:
    return f"skipped: this machine has no {' and no '.join(scene.missing)}"


@value
class SceneDrawing:
    """A scene with its runs side by side, or one under the other where there is no room."""

    scene: Scene
    takes: list[Take]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield Text(heading(self.scene), "bold")
        yield Text(self.scene.explains if self.takes else missing_text(self.scene))
        panes = [draw_take(take) for take in self.takes]
        if options.max_width < NARROW or not panes:
            yield from panes
            return
        grid = Table.grid(expand=True)
        half = options.update(width=options.max_width // 2, height=None)
        height = max(len(console.render_lines(pane, half)) for pane in panes)
        for pane in panes:
            pane.height = height
            grid.add_column(ratio=1)
        grid.add_row(*panes)
        yield grid


def draw_take(take: Take) -> Panel:
    words, style = describe_left(take)
    body = Text()
    for line in take.lines:
        body.append(f"{line}\n", line_style(line))
    body.append(words, style)
    return Panel(body, title=take.title, title_align="left", border_style="cyan" if take.title == WITH else "yellow")


def line_style(line: str) -> str:
    if line.startswith("$ "):
        return "bold"
    if line.startswith("model reads:") and "~/.ssh" in line:
        return "red"
    return "italic magenta" if line.startswith("(") else ""


def draw_end(played: Played) -> RenderableType:
    """Draw the counts of all scenes, and what to do next."""
    table = Table("left alive", box=None, pad_edge=False)
    for title in (WITHOUT, WITH):
        table.add_column(title, justify="right")
    for scene, takes in played:
        cells = [Text(count(take), describe_left(take)[1]) for take in takes]
        table.add_row(heading(scene), *(cells or [Text(missing_text(scene), "yellow")]))
    return Group(table, Text(""), Text(remains_text(played)), Text(NEXT, "bold"))


def end_text(played: Played) -> str:
    lines = ["left alive"]
    for scene, takes in played:
        counts = ", ".join(f"{take.title} {count(take)}" for take in takes)
        lines.append(f"{heading(scene)}: {counts or missing_text(scene)}")
    return "\n".join([*lines, "", remains_text(played), NEXT]) + "\n"


def remains_text(played: Played) -> str:
    takes = [take for _, takes in played for take in takes]
    if remains := [each for take in takes for each in take.not_killed]:
        return f"The demo could not kill {', '.join(f'{name_process(each)} ({each.pid})' for each in remains)}."
    if any(take.left is None for take in takes):
        return "The demo has killed its processes. Whether any is left could not be counted."
    killed = sum(len(take.left or []) for take in takes)
    these = {0: "No process was left", 1: "The demo has killed this process"}.get(
        killed, f"The demo has killed these {killed} processes"
    )
    return f"{these}; none of the demo is alive any more."


def text_of(drawing: RenderableType) -> str:
    """Return a drawing for stdout, a terminal."""
    console = Console(highlight=False, markup=False, emoji=False)
    with console.capture() as captured:
        console.print(drawing)
    return captured.get() + "\n"


@contextlib.contextmanager
def live_view(scene: Scene) -> Iterator[Show]:
    """Draw a scene on the terminal while it runs, and clear it. Do nothing if a stream is not a terminal."""
    screen = find_screen() if is_terminal(sys.stdout) else None
    if screen is None:
        yield lambda takes: None
        return
    console = Console(file=cast("IO[str]", screen), force_terminal=True, highlight=False, markup=False)
    # A process killed while drawing must not leave the terminal without its cursor.
    console.show_cursor = lambda show=True: False  # type: ignore[method-assign]
    try:
        with Live(console=console, transient=True, auto_refresh=False, vertical_overflow="crop") as live:
            yield lambda takes: live.update(SceneDrawing(scene, takes), refresh=not screen.is_behind)
    finally:
        screen.close()


def picture_of(played: Played) -> str:
    """Return the drawings of the scenes as SVG, without fonts from elsewhere."""
    console = Console(
        file=io.StringIO(), record=True, width=PICTURE_WIDTH, force_terminal=True, color_system="truecolor",
        no_color=False, highlight=False, markup=False, emoji=False, _environ={},
    )  # fmt: skip
    for scene, takes in played:
        console.print(SceneDrawing(scene, takes))
        console.print()
    console.print(draw_end(played))
    svg = console.export_svg(title="shotclock demo")
    return re.sub(r"@font-face \{.*?\}", "", svg, flags=re.DOTALL)
