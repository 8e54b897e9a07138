"""Well-behaved functions (and a few that crash), for workers to import and for loops and threads to run as well."""

import collections
import ctypes
import datetime
import itertools
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

from shotclock import Context, Failure, register_error
from tests.calls.work import FOREVER_S, mark


def noop() -> int:
    return 1


async def noop_async() -> int:
    return 1


def own_pid() -> int:
    return os.getpid()


def complains() -> int:
    print(f"heard from {os.getpid()}", file=sys.stderr)
    return os.getpid()


def echo(value: Any) -> Any:
    return value


def wants(count: int, name: str, folder: str) -> None:
    mark(folder, "ran")


def note(path: str, number: int, nap_ms: float) -> int:
    """Sleep, then say so in a file, then return: what the file says must agree with what the envelope says."""
    time.sleep(nap_ms / 1000)
    with open(path, "ab", buffering=0) as file:
        file.write(f"{number}\n".encode())
    return number


async def note_async(path: str, number: int, nap_ms: float) -> int:
    import asyncio  # see work.sleeps_async

    await asyncio.sleep(nap_ms / 1000)
    return note(path, number, 0)


# --- the context ----------------------------------------------------------------------------------


def looks_around(ctx: Context) -> dict[str, Any]:
    ctx.progress(1, 2, "steps")
    ctx.progress(2, 2, "steps")
    assert ctx.deadline is not None
    now_ns = time.monotonic_ns()
    return {
        "name": ctx.name,
        "request_id": ctx.request_id,
        "depth": ctx.depth,
        "remaining_ms": ctx.remaining_ms(),
        "deadline_in_ms": (ctx.deadline.at_ns - now_ns) // 1_000_000,
        "stopping": ctx.stopping,
    }


def remaining(ctx: Context) -> list[Any]:
    return [ctx.deadline, ctx.remaining_ms()]


def talks(ctx: Context, way: str) -> str:
    """Uses its line to the runtime for a while, long enough for other calls to arrive behind it."""
    give_up_at = time.monotonic() + 0.004
    while time.monotonic() < give_up_at:
        if way == "progress":
            ctx.progress(1)
        elif way == "further":
            assert ctx.call("child").ok
        elif ctx.stopping:
            return "asked to stop"
    return "not asked to stop"


def works_until_asked_to_stop(ctx: Context) -> str:
    give_up_at = time.monotonic() + FOREVER_S
    while not ctx.stopping and time.monotonic() < give_up_at:
        time.sleep(0.002)
    return "wound down"


def is_silent(ctx: Context, ms: int) -> str:
    give_up_at = time.monotonic() + ms / 1000
    while not ctx.stopping and time.monotonic() < give_up_at:
        time.sleep(0.002)
    return "never missed"


def says_it_lives(ctx: Context, ms: int) -> str:
    give_up_at = time.monotonic() + ms / 1000
    while not ctx.stopping and time.monotonic() < give_up_at:
        ctx.progress(1)
        time.sleep(0.01)
    return "still here"


def asks_further(ctx: Context, operation: str, arguments: dict[str, Any], clocks: dict[str, str]) -> dict[str, Any]:
    before = ctx.remaining_ms()
    envelope = ctx.call(operation, arguments, **clocks)
    return {"before_ms": before, "envelope": envelope.to_dict(), "value": envelope.value}


def calls_itself(ctx: Context) -> dict[str, Any]:
    envelope = ctx.call(ctx.name)
    return {"depth": ctx.depth, "code": envelope.code} if not envelope.ok else envelope.value


def leaves_a_late_word(seconds: float) -> str:
    """Returns at once, but keeps the worker's main thread from the GIL for a while after its answer is out."""

    def hog() -> None:
        give_up_at = time.monotonic() + seconds
        while time.monotonic() < give_up_at:
            collections.deque(itertools.repeat(0, 20_000_000), maxlen=0)  # about 0.1 s in one C call

    threading.Thread(target=hog, daemon=True).start()
    time.sleep(seconds / 2)
    return "answered"


def returns_although_its_bell_has_rung(ctx: Context) -> str:
    """Keeps the polite stop from being delivered until somebody lets it in, as a busy machine may."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    give_up_at = time.monotonic() + FOREVER_S
    while signal.SIGTERM not in signal.sigpending() and time.monotonic() < give_up_at:
        time.sleep(0.001)
    return "too late"


def lets_signals_in() -> str:
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    time.sleep(0.05)
    return "not stopped"


# --- failing --------------------------------------------------------------------------------------

register_error("TEST_OUT_OF_STOCK", summary="None left.", hint="order more", exit_code=79)


class Rich(Exception):
    """Has more than a message."""

    def __init__(self, message: str, shelf: int) -> None:
        super().__init__(message, shelf)
        self.shelf = shelf


class Unpicklable(Exception):
    def __init__(self) -> None:
        super().__init__("cannot travel")
        self.lock = threading.Lock()


class Mute(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words")


def raises(which: str) -> None:
    match which:
        case "rich":
            raise Rich("the shelf is empty", 7)
        case "unpicklable":
            raise Unpicklable
        case "mute":
            raise Mute
        case "system exit":
            raise SystemExit(3)
        case "keyboard interrupt":
            raise KeyboardInterrupt
        case "chain":
            try:
                raise ValueError("the first")
            except ValueError as error:
                raise Rich("the second", 1) from error


def fails() -> None:
    raise Failure(
        "TEST_OUT_OF_STOCK",
        "no widgets",
        data={"left": 0},
        context={"shelf": 7},
        suggestion="look behind the counter",
        retry_after_ms=1500,
    )


def fails_with_a_code_nobody_knows() -> None:
    raise Failure("TEST_NEVER_REGISTERED", "hm")


def fails_with_a_code_only_the_worker_knows() -> None:
    register_error("TEST_LATE_COMER", summary="Registered where it is raised.", hint="come earlier", exit_code=80)
    raise Failure("TEST_LATE_COMER", "hm")


def returns_what_cannot_leave() -> object:
    return threading.Lock()


def crashes(how: str) -> None:
    match how:
        case "SIGSEGV":
            ctypes.string_at(0)
        case "SIGKILL":
            os.kill(os.getpid(), signal.SIGKILL)
        case "SIGABRT":
            os.abort()
        case "exit":
            os._exit(3)


def leaves_processes(folder: str, count: int) -> str:
    for number in range(count):
        child = subprocess.Popen(["sleep", str(FOREVER_S)], start_new_session=True)
        mark(folder, f"left-{number}", child.pid)
    return "done"


class HangsWhenUnpickled:
    """Arguments that never arrive: unpickling them sleeps."""

    def __init__(self, ballast: bytes) -> None:
        self.ballast = ballast

    def __reduce__(self) -> tuple[Any, ...]:
        return _sleep_and_take, (self.ballast,)


def _sleep_and_take(ballast: bytes) -> None:
    time.sleep(FOREVER_S)


def marks(folder: str) -> str:
    mark(folder, "ran")
    return "ran"


def waits_for_file(path: str) -> str:
    give_up_at = time.monotonic() + FOREVER_S
    while not Path(path).exists() and time.monotonic() < give_up_at:
        time.sleep(0.002)
    return "seen"


def imported(name: str) -> bool:
    return name in sys.modules


def next_day(when: datetime.date) -> datetime.date:
    return when + datetime.timedelta(days=1)
