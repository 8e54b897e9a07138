"""`shotclock demo`: hangs and leftovers, each run for real without and with Shotclock."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Callable

from ...runtime.runtime import Runtime
from ..output import EarlyEnd, is_terminal, note_stops, say_line, until_stopped, write_quietly
from ..parser import Subcommand, argument, flag, option
from ..report import ensure_writable, write_file
from ..subcommand import Mistaken
from .scenes import FAST, NORMAL, SCENES, Pace, Scene
from .stage import play
from .view import (
    Played,
    SceneDrawing,
    draw_end,
    end_text,
    heading,
    live_view,
    picture_of,
    scene_text,
    text_of,
)
from .workflow import run_workflow

NUMBERS = ", ".join(str(scene.number) for scene in SCENES)


def _read_scenes(text: str) -> list[int]:
    known = {str(scene.number) for scene in SCENES}
    chosen = text.split(",")
    if unknown := [each for each in chosen if each not in known]:
        raise ValueError(f"{unknown[0]!r} is not one of {NUMBERS}")
    return [int(each) for each in chosen]


def _run_demo(what: str | None, scene: list[list[int]], fast: bool, record: str | None) -> Callable[[bool], int]:
    if what is not None:
        given = {"scene": bool(scene), "fast": fast, "record": record is not None}
        if wrong := [name for name, is_given in given.items() if is_given]:
            raise Mistaken({name: "belongs to the scenes, not to the workflow" for name in wrong})
        return lambda as_json: run_workflow()
    if record is not None:
        if not record.endswith(".svg"):
            raise Mistaken({"record": f"{record!r}: the picture is SVG; name a file that ends in .svg"})
        ensure_writable(record)
    numbers = {number for each in scene for number in each}
    chosen = [each for each in SCENES if not numbers or each.number in numbers]
    return lambda as_json: show_scenes(chosen, FAST if fast else NORMAL, record)


def show_scenes(scenes: list[Scene], pace: Pace, record: str | None) -> int:
    """Play the scenes and print the counts. Returns 1 where Shotclock has left a process or a scene failed."""
    ended = asyncio.run(until_stopped(_play_all(scenes, pace)))
    note_stops()
    if isinstance(ended, EarlyEnd):
        say_line("shotclock: the demo was stopped")
        return -signal.Signals[ended.signal or "SIGTERM"]
    if record is not None:
        write_file(record, picture_of(ended))
    _write(text_of(draw_end(ended)) if is_terminal(sys.stdout) else end_text(ended))
    is_bad = any(takes and (takes[1].left or any(each.failure for each in takes)) for _, takes in ended)
    return 1 if is_bad else 0


async def _play_all(scenes: list[Scene], pace: Pace) -> Played:
    played: Played = []
    async with Runtime() as runtime:
        for scene in scenes:
            if scene.missing:
                takes = []
            else:
                with live_view(scene) as show:
                    takes = await play(runtime, scene, pace, show)
            played.append((scene, takes))
            _write(text_of(SceneDrawing(scene, takes)) if is_terminal(sys.stdout) else scene_text(scene, takes))
    return played


def _write(text: str) -> None:
    write_quietly(sys.stdout, text)


_SCENES = "\n".join(f"  {heading(scene)}" for scene in SCENES)
COMMANDS = {
    "demo": Subcommand(
        "demo",
        options=(
            argument(
                "what", "workflow: instead of the scenes, run a workflow whose steps hang.", choices=("workflow",)
            ),
            option(
                "--scene",
                "N",
                f"Play this scene alone: {NUMBERS}, or several, as 1,3.",
                read=_read_scenes,
                repeats=True,
            ),
            flag("--fast", "Shorter limits and waits."),
            option("--record", "FILE.svg", "Write a picture of the scenes to this file as well."),
        ),
        run=_run_demo,
        usage="[OPTIONS] | workflow",
        description="Run five hangs on this machine, each twice at once: without and with Shotclock. The processes "
        "and servers are real. After each scene the processes that are left alive are counted, and killed by the demo.",
        epilogue=f"""\
Scenes, of at most ten seconds each:
{_SCENES}

The programs mcp-client, notes-server and my-agent are small ones of the demo; they exist only inside it.

On a terminal both runs are shown side by side, below 80 columns one under the other; elsewhere as text, one after the
other. A scene whose programs are not on this machine (timeout, setsid) is skipped. Nothing outlives the demo: not with
Ctrl-C, and not if it is killed. The exit code is 0, or 1 if a process was left alive with Shotclock.""",
    )
}
