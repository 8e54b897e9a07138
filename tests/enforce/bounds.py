"""How these tests wait and measure: everything bounded, no time read but the monotonic one."""

import asyncio
import os
import time
from collections.abc import Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Any, TypeVar

import psutil
import pytest

T = TypeVar("T")

ROOT = Path(__file__).resolve().parent.parent.parent

# How late an answer may be, after the timeout (and the grace, where the work ignores the polite stop).
OVERSHOOT_MS = 100 + int(os.environ.get("SHOTCLOCK_TEST_SLACK_MS", "0"))
# A machine of two noisy cores may be late once; code that is late is late every time.
ATTEMPTS = 3
POLL_S = 0.005


def run(coroutine: Coroutine[Any, Any, T], within: float = 20) -> T:
    """asyncio.run, bounded. Only a runtime that cannot be closed runs it out."""
    return asyncio.run(asyncio.wait_for(coroutine, within))


def eventually(condition: Callable[[], T], within: float = 5) -> T:
    """Poll until the condition holds, and return what it said."""
    give_up_at = time.monotonic() + within
    while not (said := condition()):
        if time.monotonic() > give_up_at:
            pytest.fail(f"still not so after {within:g} s: {_named(condition)}")
        time.sleep(POLL_S)
    return said


async def soon(condition: Callable[[], T], within: float = 5) -> T:
    """`eventually` for a test that sits on the loop it is testing."""
    give_up_at = time.monotonic() + within
    while not (said := condition()):
        if time.monotonic() > give_up_at:
            pytest.fail(f"still not so after {within:g} s: {_named(condition)}")
        await asyncio.sleep(POLL_S)
    return said


def _named(condition: Callable[[], object]) -> str:
    code = getattr(condition, "__code__", None)
    return f"{code.co_filename}:{code.co_firstlineno}" if code else repr(condition)


class WrongFoot(Exception):
    """The machine was too slow to bring the work into the state the test is about; worth another attempt."""


def on_time(attempt: Callable[[int], dict[str, Any]], beyond_ms: int = 0) -> dict[str, Any]:
    """The envelope of the first attempt that was answered on time; fails if none was.

    On time is the call's timeout, plus `beyond_ms` (the grace, where the work uses it up), plus OVERSHOOT_MS.
    """
    late: list[str] = []
    for number in range(ATTEMPTS):
        try:
            envelope = attempt(number)
        except WrongFoot as error:
            late.append(f"not measured ({error})")
            continue
        took_ms = envelope["meta"]["duration_ms"]
        limit_ms = envelope["meta"]["timeout_ms"] + beyond_ms + OVERSHOOT_MS
        if took_ms <= limit_ms:
            return envelope
        late.append(f"{took_ms} ms instead of {limit_ms} ms")
    pytest.fail(f"answered late {ATTEMPTS} times: {', '.join(late)}")


async def timed(awaitable: Awaitable[T]) -> tuple[T, float]:
    """What came of it, and how many milliseconds it took on the caller's own clock."""
    began = time.perf_counter()
    result = await awaitable
    return result, (time.perf_counter() - began) * 1000


# --- processes that left a mark (see work.mark) ---------------------------------------------------


def marked(folder: Path) -> dict[str, psutil.Process]:
    """The processes that left a mark in `folder` and are still there, by the name of the mark."""
    alive = {}
    for path in folder.iterdir() if folder.is_dir() else ():
        if path.suffix == ".new":  # still being written
            continue
        pid, started = path.read_text().split()
        if (process := find(int(pid), int(started))) is not None:
            alive[path.name] = process
    return alive


def find(pid: int, started_ticks: int) -> psutil.Process | None:
    """The process, unless it is gone, or dead and only not collected yet, or its pid is somebody else's by now."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text("utf-8", "replace").rpartition(")")[2].split()
        return psutil.Process(pid) if int(fields[19]) == started_ticks and fields[0] not in "ZX" else None
    except (OSError, psutil.NoSuchProcess):
        return None


def mark_of(folder: Path, name: str) -> psutil.Process | None:
    return marked(folder).get(name)
