"""A worker behind a network that is cut: it stops its own step before another worker begins it.

In a network namespace with a link of its own, which needs root.
"""

import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.processes import is_running
from tests.temporal.conftest import Cluster, Program, Proxy, Runs, wait_until

HEARTBEAT_S = 4.0
COMMAND_S = 20  # `ip` takes milliseconds


def ip(*words: str) -> bool:
    return subprocess.run(["ip", *words], capture_output=True, timeout=COMMAND_S).returncode == 0


def can_cut() -> bool:
    if os.geteuid() or shutil.which("ip") is None:
        return False
    name = f"sc-try-{os.getpid()}"
    return ip("netns", "add", name) and ip("netns", "del", name)


pytestmark = [pytest.mark.slow, pytest.mark.skipif(not can_cut(), reason="needs root and network namespaces")]


class Link:
    """A namespace with one link to us."""

    def __init__(self, number: int) -> None:
        self.name, self.outer, self.inner = f"sc{number}", f"sco{number}", f"sci{number}"
        self.here, self.there = f"10.213.{number}.1", f"10.213.{number}.2"

    def make(self) -> None:
        steps = [
            ("netns", "add", self.name),
            ("link", "add", self.outer, "type", "veth", "peer", "name", self.inner),
            ("link", "set", self.inner, "netns", self.name),
            ("addr", "add", f"{self.here}/24", "dev", self.outer),
            ("link", "set", self.outer, "up"),
            ("netns", "exec", self.name, "ip", "addr", "add", f"{self.there}/24", "dev", self.inner),
            ("netns", "exec", self.name, "ip", "link", "set", self.inner, "up"),
            ("netns", "exec", self.name, "ip", "link", "set", "lo", "up"),
        ]
        for step in steps:
            assert ip(*step), step

    def cut(self) -> None:
        assert ip("link", "set", self.outer, "down")

    def mend(self) -> None:
        assert ip("link", "set", self.outer, "up")

    def close(self) -> None:
        ip("link", "del", self.outer)
        ip("netns", "del", self.name)


@pytest.fixture
def link() -> Iterator[Link]:
    made = Link(os.getpid() % 250)
    try:
        made.make()
        yield made
    finally:
        made.close()


# Writes down every 20 ms that it lives; ignores the polite stop.
TICKS = "trap '' TERM; echo $$ >> pids; while :; do echo $$ $(date +%s%N) >> ticks; sleep 0.02; done"


def test_never_two_copies_of_a_step_at_once(cluster: Cluster, tmp_path: Path, link: Link) -> None:
    queue = f"q-{tmp_path.name}"
    proxy = Proxy(cluster.port, link.here)
    runs = Runs(tmp_path, cluster.url)
    workers: list[Program] = []
    try:
        prefix = ("ip", "netns", "exec", link.name)
        workers.append(cluster.start_worker("--queue", queue, url=proxy.url, prefix=prefix))
        running = runs.start(
            f"""
            timeout: 60
            steps:
              ticks: {{type: command, exec: "{TICKS}", timeout: 50, grace: 10s, idempotent: true}}
            """,
            *("--queue", queue, "--heartbeat", f"{HEARTBEAT_S:g}s"),
        )
        (first,) = runs.wait_for("pids")
        workers.append(cluster.start_worker("--queue", queue))
        began = time.monotonic()
        wait_until(lambda: time.monotonic() - began > 1.0, "heartbeats that arrive")
        link.cut()
        cut = time.monotonic()
        wait_until(lambda: not is_running(int(first)), "the end of what was cut off", HEARTBEAT_S)
        assert time.monotonic() - cut <= HEARTBEAT_S, "before anybody else could begin it"
        # The engine may give it once more to polls that the cut-off worker had open: each costs a heartbeat.
        _, second = runs.wait_for("pids", 2)
        taken_over = time.monotonic()
        link.mend()
        wait_until(lambda: time.monotonic() - taken_over > 2.0, "a while in which a third copy could begin")
        assert running.process.poll() is None and is_running(int(second))
        lives: dict[str, list[int]] = {}
        for line in (tmp_path / "ticks").read_text().splitlines():
            pid, at = line.split()
            lives.setdefault(pid, []).append(int(at))
        assert list(lives) == [first, second], "no third copy, and each in its turn"
        assert max(lives[first]) < min(lives[second]), "never at once"
        # It is a worker like any other again, unless it had to end itself.
        assert workers[0].process.poll() in (None, 70)
    finally:
        runs.close()
        for worker in workers:
            worker.kill()
        proxy.close()
