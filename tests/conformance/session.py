"""One run of a coding agent with a scripted model, in a home of its own, and the processes of its commands.

Commands of a scenario hold a file of that home open, MARK: its path in their command line is how they are found again.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

from tests.conformance.coding_agents import CodingAgent, Place
from tests.conformance.scripted_model import ScriptedModel, serve

PROGRAMS = Path(sys.executable).parent
# The limits of commands in every scenario, short because each is waited for.
LIMITS = 'timeout = "5s"\ninput_wait = "2s"\n'
START_S = 60.0  # of an agent on a busy machine, until it asks its model
POLL_S = 0.05


@dataclass
class Session:
    """An agent at work."""

    agent: CodingAgent
    place: Place
    model: ScriptedModel
    mark: str
    process: subprocess.Popen[bytes] | None = None
    began: float = field(default_factory=time.monotonic)

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self.began

    def result(self, within_s: float, number: int = 0) -> str | None:
        """Return the first result of a command that the model gets, or the one with this number, or None."""
        with self.model.changed:
            self.model.changed.wait_for(lambda: len(self.model.results) > number, within_s)
            return self.model.results[number] if len(self.model.results) > number else None

    def left(self) -> list[int]:
        """Return the processes of its commands that are alive."""
        return [pid for pid, words in _command_lines() if words[:2] == ["tail", "-f"] and self.mark in words]

    def kill_agent(self) -> None:
        """Kill the agent with SIGKILL: its launcher and its own program, not the commands."""
        folder = str(FOLDER / "node_modules")
        for pid, words in _command_lines():
            if any(word.startswith(folder) for word in words[:2]) and _is_of(pid, self.place.home):
                _kill(pid)


FOLDER = Path(os.environ.get("SHOTCLOCK_CONFORMANCE") or "/nonexistent").absolute()


@contextmanager
def session(
    agent: CodingAgent,
    folder: Path,
    command: str,
    *,
    installed: bool,
    denies: bool = False,
    asks: bool = False,
    more: tuple[str, ...] = (),
    arguments: Mapping[str, object] = MappingProxyType({}),
    then: tuple[str, ...] = (),
    before: Callable[[Place], None] = lambda place: None,
) -> Iterator[Session]:
    """Start the agent with a model that asks for this command; MARK in it is the marked file.

    `more` are options of the installation, `arguments` further ones of the command, `then` the commands after it;
    `before` is called after the installation. An agent that `asks` needs a permission.
    """
    home, project = folder / "home", folder / "home" / "project"
    project.mkdir(parents=True)
    mark = home / "mark"
    mark.touch()
    with serve([command.replace("MARK", str(mark)), *then], dict(arguments)) as (model, port):
        place = Place(home, project, port)
        agent.prepare(place)
        options = agent.deny(place) if denies else ()
        place.write(".config/shotclock/config.toml", LIMITS)
        environ = agent.environ(place)
        if installed:
            words = [PROGRAMS / "shotclock", "agent", "install", agent.name, "--yes", *agent.install_options, *more]
            subprocess.run(words, env=environ, cwd=project, check=True, capture_output=True, timeout=START_S)
        before(place)
        running = Session(agent, place, model, str(mark))
        try:
            with open(folder / "output", "wb") as output:
                running.process = subprocess.Popen(
                    agent.command(FOLDER, options, asks=asks),
                    cwd=project,
                    env=environ,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    start_new_session=True,
                )
            yield running
        finally:
            _clean_up(running)


def wait_until(condition: Callable[[], object], within_s: float) -> bool:
    give_up_at = time.monotonic() + within_s
    while not condition():
        if time.monotonic() > give_up_at:
            return False
        time.sleep(POLL_S)
    return True


def _clean_up(running: Session) -> None:
    """End the agent and every process that works in its home."""
    assert running.process is not None
    for _ in range(5):
        for pid, words in _command_lines():
            if running.mark in words or _is_of(pid, running.place.home):
                _kill(pid)
        if running.process.poll() is not None and not running.left():
            break
        time.sleep(POLL_S)
    running.process.wait(START_S)


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        pass


def _is_of(pid: int, home: Path) -> bool:
    """Return whether a process has this home, or works in it."""
    try:
        environ = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        return f"HOME={home}".encode() in environ or Path(os.readlink(f"/proc/{pid}/cwd")).is_relative_to(home)
    except OSError:
        return False


def _command_lines() -> Iterator[tuple[int, list[str]]]:
    """Yield the living processes of this machine, without this one."""
    for name in os.listdir("/proc"):
        if not name.isdecimal() or int(name) == os.getpid():
            continue
        try:
            line = Path(f"/proc/{name}/cmdline").read_text("utf-8", "replace")
            state = Path(f"/proc/{name}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            continue
        if line and state not in "ZX":
            yield int(name), line.split("\0")
