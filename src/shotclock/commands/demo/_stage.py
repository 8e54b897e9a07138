"""A scene, run twice at once in our own runtime: nothing of it outlives the demo, whatever ends the demo.

The processes of a run carry a variable of their own, by which they are counted. The shell that runs the script does
not carry it: it is the person's shell, and waits afterwards so that the runtime does not stop the rest too early.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shlex
import shutil
import sys
import tempfile
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path

from ...calls.runtime import Runtime
from ...core.limits import Clocks
from ...core.value_types import field, record
from ...core.visible_text import visible
from ...supervise import kernel
from ...supervise.clock import monotonic_ns
from ...supervise.environment import AGENT_MARKS
from ...supervise.leftovers import MARK, LeftProcess, find_carriers
from ._scenes import WITH, WITHOUT, Pace, Scene, runnable

VARIABLE = "SHOTCLOCK_DEMO"
PREFIX = "shotclock-demo-"
# On a slow machine. Together they are less than the ten seconds that a scene may take.
LONGEST_S = 7.0
LONGEST_SETTLING_S = 2.5  # both runs are counted at the same time, at the end of it
BACKSTOP = "20s"
GRACE = "200ms"
TICK_S = 0.1
FINISHED = b"\x1e"
SHELL = f'exec 2>&1; export {VARIABLE}="$1"; eval "$2"; unset {VARIABLE}; printf "\\036"; exec sleep 600'
HERE = Path(__file__).parent


@record
class Take:
    """One run of a scene: its output, and the processes left alive."""

    title: str
    script: str
    folder: Path
    token: str = field(default_factory=lambda: uuid.uuid4().hex)
    printed: bytes = b""
    left: list[LeftProcess] | None = None
    not_killed: list[LeftProcess] = field(default_factory=list)
    is_finished: bool = False
    failure: str = ""

    @property
    def lines(self) -> list[str]:
        text = self.printed.decode("utf-8", "replace").replace(str(self.folder), "…")
        return [visible(line) for line in text.splitlines()]

    @property
    def is_over(self) -> bool:
        return self.is_finished or bool(self.failure)

    def find_left(self) -> list[LeftProcess] | None:
        return find_carriers(f"{VARIABLE}={self.token}")

    async def run(self, runtime: Runtime, environment: dict[str, str]) -> None:
        """Run the script, and keep its remains alive until this is cancelled."""
        words = ["sh", "-c", SHELL, "demo", self.token, self.script]
        clocks = Clocks.of(BACKSTOP, grace=GRACE)
        envelope = await runtime.run(words, clocks, base_env=environment, cwd=self.folder, on_output=self._take_output)
        self.failure = "its shell ended early" if envelope.error is None else str(envelope.error["message"])

    def _take_output(self, pieces: Sequence[tuple[int, bytes]], left_out: Sequence[int]) -> None:
        self.printed += b"".join(piece for _, piece in pieces)
        if FINISHED in self.printed:
            self.is_finished, self.printed = True, self.printed.replace(FINISHED, b"")


async def play(runtime: Runtime, scene: Scene, pace: Pace) -> list[Take]:
    """Run a scene both ways, count the processes that are left, and kill them."""
    with make_folder() as folder:
        environment = make_programs(folder)
        scripts = {WITHOUT: scene.without, WITH: scene.with_shotclock}
        takes = [
            Take(title, runnable(script, pace), folder / title.partition(" ")[0]) for title, script in scripts.items()
        ]
        for take in takes:
            take.folder.mkdir()
        runs = [asyncio.create_task(take.run(runtime, environment)) for take in takes]
        try:
            await _watch(scene, takes, pace)
        finally:
            for run in runs:
                run.cancel()
            await asyncio.gather(*runs, return_exceptions=True)  # bounded: a killed command is reported within seconds
    for take in takes:
        take.not_killed = take.find_left() or []
    return takes


async def _watch(scene: Scene, takes: list[Take], pace: Pace) -> None:
    """Wait until both runs are over, or one hangs for long enough, and then until all has settled."""
    began_ns = monotonic_ns()
    while not all(take.is_over for take in takes):
        elapsed_s = (monotonic_ns() - began_ns) / 1e9
        if scene.hangs and elapsed_s >= pace.watch_s and takes[1].is_over:
            takes[0].printed += f"(still running after {elapsed_s:.0f}s)\n".encode()
            break
        if elapsed_s >= LONGEST_S:
            for take in takes:
                take.failure = take.failure or ("" if take.is_finished else f"not over after {LONGEST_S:g}s")
            break
        await asyncio.sleep(TICK_S)
    began_ns = monotonic_ns()
    while True:
        for take in takes:
            take.left = take.find_left()
        elapsed_s = (monotonic_ns() - began_ns) / 1e9
        is_settled = elapsed_s >= pace.settle_s and not takes[1].left
        if is_settled or elapsed_s >= LONGEST_SETTLING_S or not any(take.left for take in takes):
            break
        await asyncio.sleep(TICK_S)


@contextlib.contextmanager
def make_folder() -> Iterator[Path]:
    """Make a folder for one scene. Those of demos that were killed are removed."""
    for old in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        pid = old.name.removeprefix(PREFIX).partition("-")[0]
        with contextlib.suppress(OSError):
            if pid.isdecimal() and old.stat().st_uid == os.geteuid() and kernel.identify(int(pid)) is None:
                shutil.rmtree(old, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=f"{PREFIX}{os.getpid()}-", ignore_cleanup_errors=True) as folder:
        yield Path(folder)


def make_programs(folder: Path) -> dict[str, str]:
    """Write the programs that the scripts name, and return the environment of a scene, without limits of the caller."""
    python = shlex.quote(sys.executable)
    mine = {
        "shotclock": f'exec {python} -P -m shotclock "$@"',
        "shotclock-sh": f'exec {python} -P -c "from shotclock.main import run_shell; run_shell()" "$@"',
        "mcp-client": f'exec {python} -P {shlex.quote(str(HERE / "_mcp_client.py"))} "$@"',
        "notes-server": "if [ -e updated ]; then setsid sleep 600 </dev/null >/dev/null 2>&1 & fi\n"
        f"exec {python} -P {shlex.quote(str(HERE / '_notes_server.py'))}",
        "my-agent": "echo 'agent: runs a command that hangs'\n"
        "\"$AGENT_SHELL\" -c 'touch running; sleep 600 & sleep 600'\necho 'agent: the command has ended'",
    }
    programs = folder / "bin"
    programs.mkdir()
    for name, text in mine.items():
        (programs / name).write_text(f"#!/bin/sh\n{text}\n")
        (programs / name).chmod(0o700)
    kept = {
        name: text
        for name, text in os.environ.items()
        if name not in AGENT_MARKS and (name == MARK or not name.startswith("SHOTCLOCK_"))
    }
    path = f"{programs}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
    return {**kept, "PATH": path, "SHOTCLOCK_HOME": str(folder / "state")}
