"""How these tests wait and measure: everything bounded, no time read but the monotonic one."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Any, TypeVar

import psutil
import pytest

T = TypeVar("T")

ROOT = Path(__file__).resolve().parent.parent.parent

# How late an answer may be at the first attempt, after the timeout (and the grace, where the work ignores the polite
# stop). A noisy machine is late now and then, so every further attempt may be twice as late. What is broken is late by
# more than the last one allows: by a grace that should not have been used (LONG_GRACE_MS), or for ever.
OVERSHOOT_MS = 100
ATTEMPTS = 5
LONG_GRACE_MS = 10_000  # of work that should not need it
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


def on_time(attempt: Callable[[int], dict[str, Any]], beyond_ms: int | Callable[[int], int] = 0) -> dict[str, Any]:
    """The envelope of the first attempt that was answered on time; fails if none was.

    On time is the call's timeout, plus `beyond_ms` (the grace, where the work uses it up), plus what an attempt allows.
    """
    late: list[str] = []
    for number in range(ATTEMPTS):
        try:
            envelope = attempt(number)
        except WrongFoot as error:
            late.append(f"not measured ({error})")
            continue
        took_ms = envelope["meta"]["duration_ms"]
        beyond = beyond_ms if isinstance(beyond_ms, int) else beyond_ms(number)
        limit_ms = envelope["meta"]["timeout_ms"] + beyond + OVERSHOOT_MS * 2**number
        if took_ms <= limit_ms:
            return envelope
        late.append(f"{took_ms} ms instead of {limit_ms} ms")
    pytest.fail(f"answered late {ATTEMPTS} times: {', '.join(late)}")


def at_last(attempt: Callable[[int], T]) -> T:
    """What the first attempt made that came into the state the test is about; fails if none did."""
    for number in range(ATTEMPTS):
        try:
            return attempt(number)
        except WrongFoot as error:
            why = error
    pytest.fail(f"not once in {ATTEMPTS} attempts: {why}")


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
        is_dead = fields[0] in "ZX" and int(fields[17]) <= 1  # without other threads
        return psutil.Process(pid) if int(fields[19]) == started_ticks and not is_dead else None
    except (OSError, psutil.NoSuchProcess):
        return None


def mark_of(folder: Path, name: str) -> psutil.Process | None:
    return marked(folder).get(name)
