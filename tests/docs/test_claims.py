"""docs/comparison.md: its table of the usual ways, each row tried, and the tests that it names exist."""

import asyncio
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

TIMEOUT_S = 0.5
# Long enough to be seen alive after the timeout, short enough to be gone soon if a test is killed.
LIVES_S = 5.0
# For things that are there in milliseconds.
SOON_S = 5.0
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def left(tmp_path: Path) -> Iterator[Callable[[], bool]]:
    """Whether the process that wrote its pid to ./pid is alive; killed at the end."""
    file = tmp_path / "pid"

    def pid() -> int:
        give_up_at = time.monotonic() + SOON_S
        while not (file.exists() and re.fullmatch(r"\d+\n", file.read_text())):
            assert time.monotonic() < give_up_at, "no pid was written"
            time.sleep(0.01)
        return int(file.read_text())

    def alive() -> bool:
        try:
            return Path(f"/proc/{pid()}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
        except OSError:
            return False

    yield alive
    try:
        os.kill(pid(), signal.SIGKILL)
    except OSError:
        pass


def took_s(function: Callable[[], object]) -> float:
    began = time.monotonic()
    function()
    return time.monotonic() - began


def test_timeout_leaves_what_called_setsid(tmp_path: Path, left: Callable[[], bool]) -> None:
    command = f"setsid sh -c 'echo $$ > pid; exec sleep {LIVES_S}' & sleep 60"
    subprocess.run(["timeout", f"{TIMEOUT_S}", "bash", "-c", command], cwd=tmp_path, timeout=SOON_S)
    assert left()


def test_timeout_lets_a_reader_wait_for_whoever_holds_the_pipe(tmp_path: Path) -> None:
    argv = ["timeout", f"{TIMEOUT_S}", "bash", "-c", "sleep 2 & echo done"]
    assert took_s(lambda: subprocess.run(argv, stdout=subprocess.PIPE, timeout=SOON_S)) > 1.5


def test_subprocess_kills_the_command_only(tmp_path: Path, left: Callable[[], bool]) -> None:
    command = f"sh -c 'echo $$ > pid; exec sleep {LIVES_S}' & sleep {LIVES_S}"
    with pytest.raises(subprocess.TimeoutExpired):
        subprocess.run(["bash", "-c", command], cwd=tmp_path, timeout=TIMEOUT_S)
    assert left()


def test_asyncio_timeout_never_rings_on_a_blocked_loop() -> None:
    async def blocked() -> None:
        async with asyncio.timeout(0.1):
            time.sleep(1)

    assert took_s(lambda: asyncio.run(blocked())) >= 1  # and no TimeoutError either


def test_asyncio_timeout_waits_for_a_task_that_swallows_cancellation() -> None:
    async def swallows() -> None:
        async with asyncio.timeout(0.1):
            while True:
                try:
                    await asyncio.sleep(1)
                    return
                except asyncio.CancelledError:
                    pass

    async def bounded() -> None:
        try:
            await swallows()
        except TimeoutError:
            pass

    assert took_s(lambda: asyncio.run(bounded())) >= 1


def test_a_thread_pool_waits_for_what_it_gave_up_on() -> None:
    def bounded() -> None:
        with ThreadPoolExecutor() as pool, pytest.raises(TimeoutError):
            pool.submit(time.sleep, 1).result(timeout=0.1)

    assert took_s(bounded) >= 1


def test_every_test_that_the_comparison_names_exists() -> None:
    page = (ROOT / "docs" / "comparison.md").read_text("utf-8")
    named = set(re.findall(r"`(test_\w+)`", page))
    written = "".join(file.read_text("utf-8") for file in (ROOT / "tests").rglob("test_*.py"))
    assert len(named) > 15
    assert not {name for name in named if f"def {name}(" not in written}
