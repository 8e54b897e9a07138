"""What the tests of the store have in common: times, holders, jobs, and children with a bound on them."""

import multiprocessing
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from shotclock.core.limits import ProcessIdentity, WallTime
from shotclock.store.jobs import Job

NOW = WallTime(1_800_000_000_000)
CHILDREN_WITHIN_S = 60  # twenty children, each waiting for the others' transactions; a hung one would run this out

_fork = multiprocessing.get_context("fork")


def wall_now() -> WallTime:
    return WallTime.of_ns(time.time_ns())


def holder(number: int = 1) -> ProcessIdentity:
    return ProcessIdentity("host", "boot", number, 1000 + number, "pid:[1]")


def all_alive(_: ProcessIdentity) -> bool:
    return True


def all_dead(_: ProcessIdentity) -> bool:
    return False


def new_job(id: str = "job1", key: str = "key", at: WallTime = NOW, **fields: Any) -> Job:
    given: dict[str, Any] = {
        "id": id,
        "key": key,
        "app": "app",
        "command": "import",
        "arguments": {"path": "/x"},
        "cwd": "/",
        "program": {"module": "app"},
        "tool_version": "1.0",
        "spec": {"steps": []},
        "max_lifetime_ms": 3_600_000,
        "idle_timeout_ms": 300_000,
        "created_at": at,
        "attempt_at": at,
    }
    return Job(**{**given, **fields})


def appears(path: Path) -> None:
    give_up_at = time.monotonic() + CHILDREN_WITHIN_S
    while not path.exists():
        assert time.monotonic() < give_up_at, f"{path} did not appear"
        time.sleep(0.005)


def in_children(count: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
    """What `function(number, *arguments)` returned in each of so many processes that began at the same moment."""
    barrier = _fork.Barrier(count)
    answers = _fork.SimpleQueue()
    processes = [_fork.Process(target=_child, args=(function, n, arguments, barrier, answers)) for n in range(count)]
    give_up_at = time.monotonic() + CHILDREN_WITHIN_S
    for process in processes:
        process.start()
    try:
        found: dict[int, Any] = {}
        while len(found) < count:
            assert time.monotonic() < give_up_at, f"only {sorted(found)} answered"
            if answers._reader.poll(0.1):
                number, ok, answer = answers.get()
                assert ok, f"child {number}: {answer}"
                found[number] = answer
        return [found[number] for number in range(count)]
    finally:
        for process in processes:
            process.join(max(0.1, give_up_at - time.monotonic()) if len(found) == count else 0.1)
            if process.exitcode is None:
                process.kill()
                process.join(5)


def _child(function: Callable[..., Any], number: int, arguments: tuple[Any, ...], barrier: Any, answers: Any) -> None:
    try:
        barrier.wait(CHILDREN_WITHIN_S)
        answers.put((number, True, function(number, *arguments)))
    except BaseException as error:
        answers.put((number, False, f"{type(error).__name__}: {error}"))
