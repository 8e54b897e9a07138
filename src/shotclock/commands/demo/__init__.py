"""`shotclock demo`: hangs and leftovers, each run for real without and with Shotclock."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Callable

from ...calls.runtime import Runtime
from ...core.visible_text import one_line
from ...supervise.leftovers import LeftProcess
from ...terminal.output import EarlyEnd, StopListener, say_line, write_quietly
from ...terminal.parser import Option, Subcommand
from ._scenes import FAST, NORMAL, SCENES, Pace, Scene
from ._stage import Take, play

NUMBERS = ", ".join(str(scene.number) for scene in SCENES)
LONGEST_NAME = 40
NAMES_SHOWN = 4
NEXT = "Next: `shotclock timeout 60 CMD`, `shotclock agent install NAME`, and `shotclock --help`."
Played = list[tuple[Scene, list[Take]]]


def _read_scenes(text: str) -> list[int]:
    known = {str(scene.number) for scene in SCENES}
    chosen = text.split(",")
    if unknown := [each for each in chosen if each not in known]:
        raise ValueError(f"{unknown[0]!r} is not one of {NUMBERS}")
    return [int(each) for each in chosen]


def _run_demo(scene: list[list[int]], fast: bool) -> Callable[[bool], int]:
    numbers = {number for each in scene for number in each}
    chosen = [each for each in SCENES if not numbers or each.number in numbers]
    return lambda as_json: show_scenes(chosen, FAST if fast else NORMAL)


def show_scenes(scenes: list[Scene], pace: Pace) -> int:
    """Play the scenes and print the counts. Returns 1 where Shotclock has left a process or a scene failed."""
    ended = asyncio.run(StopListener.run(_play_all(scenes, pace)))
    StopListener.record_only()
    if isinstance(ended, EarlyEnd):
        say_line("shotclock: the demo was stopped")
        return -signal.Signals[ended.signal or "SIGTERM"]
    _write(end_text(ended))
    is_bad = any(takes and (takes[1].left or any(each.failure for each in takes)) for _, takes in ended)
    return 1 if is_bad else 0


async def _play_all(scenes: list[Scene], pace: Pace) -> Played:
    played: Played = []
    async with Runtime() as runtime:
        for scene in scenes:
            _write(f"{_heading(scene)}\n{_missing_text(scene) if scene.missing else scene.explains}\n")
            takes = [] if scene.missing else await play(runtime, scene, pace)
            played.append((scene, takes))
            _write(takes_text(takes))
    return played


def _write(text: str) -> None:
    write_quietly(sys.stdout, text)


def takes_text(takes: list[Take]) -> str:
    """Return what both runs printed, and the processes that they left."""
    lines = [line for take in takes for line in ("", f"-- {take.title}", *take.lines, _describe_left(take))]
    return "".join(f"{line}\n" for line in [*lines, ""])


def end_text(played: Played) -> str:
    """Return the counts of all scenes, and the next step."""
    lines = ["left alive"]
    for scene, takes in played:
        counts = ", ".join(f"{take.title} {_count(take)}" for take in takes)
        lines.append(f"{_heading(scene)}: {counts or _missing_text(scene)}")
    return "\n".join([*lines, "", _remains_text(played), NEXT]) + "\n"


def _heading(scene: Scene) -> str:
    return f"{scene.number}. {scene.title}"


def _missing_text(scene: Scene) -> str:
    return f"skipped: this machine has no {' and no '.join(scene.missing)}"


def _describe_left(take: Take) -> str:
    if take.failure:
        return f"failed: {take.failure}"
    if take.left is None:
        return "left alive: not counted, there is no /proc here"
    names = [_name(each) for each in take.left[:NAMES_SHOWN]]
    names += [f"{len(take.left) - NAMES_SHOWN} more"] * (len(take.left) > NAMES_SHOWN)
    return f"left alive: {len(take.left)}" + (f" ({', '.join(names)})" if names else "")


def _name(process: LeftProcess) -> str:
    """Return the words of a process, paths without their folders."""
    words = [word.rpartition("/")[2] or word for word in process.cmdline.split()]
    return one_line(" ".join(words), LONGEST_NAME) + (", stopped" if process.state == "T" else "")


def _count(take: Take) -> str:
    if take.failure:
        return "failed"
    return "not counted" if take.left is None else str(len(take.left))


def _remains_text(played: Played) -> str:
    takes = [take for _, takes in played for take in takes]
    if remains := [each for take in takes for each in take.not_killed]:
        return f"The demo could not kill {', '.join(f'{_name(each)} ({each.pid})' for each in remains)}."
    if any(take.left is None for take in takes):
        return "The demo has killed its processes. Whether any is left could not be counted."
    killed = sum(len(take.left or []) for take in takes)
    these = {0: "No process was left", 1: "The demo has killed this process"}.get(
        killed, f"The demo has killed these {killed} processes"
    )
    return f"{these}; none of the demo is alive any more."


_SCENES = "\n".join(f"  {_heading(scene)}" for scene in SCENES)
COMMANDS = {
    "demo": Subcommand(
        "demo",
        options=(
            Option.taking(
                "--scene",
                "N",
                f"Play this scene alone: {NUMBERS}, or several, as 1,3.",
                read=_read_scenes,
                repeats=True,
            ),
            Option.flag("--fast", "Shorter limits and waits."),
        ),
        run=_run_demo,
        is_stream=True,
        usage="[OPTIONS]",
        description="Run five hangs on this machine, each twice at once: without and with Shotclock. The processes "
        "and servers are real. After each scene the processes that are left alive are counted, and killed by the demo.",
        epilogue=f"""\
Scenes, of at most ten seconds each:
{_SCENES}

The programs mcp-client, notes-server and my-agent are small ones of the demo; they exist only inside it.

A scene whose programs are not on this machine (timeout, setsid) is skipped. Nothing outlives the demo: not with
Ctrl-C, and not if it is killed. The exit code is 0, or 1 if a process was left alive with Shotclock.""",
    )
}
