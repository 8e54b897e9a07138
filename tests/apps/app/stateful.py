"""An App with state, whose lifespan and commands misbehave on request."""

from __future__ import annotations

import asyncio
import ctypes
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from shotclock import App, Context, Depends, Failure

FOLDER = Path(os.environ.get("STATEFUL_FOLDER", "."))
"""`do` has the misdeeds of the next openings, one per line; `log` gets the events."""


def note(event: str) -> None:
    with (FOLDER / "log").open("a") as log:
        log.write(f"{event}\n")


def next_misdeed() -> str:
    file = FOLDER / "do"
    first, _, rest = (file.read_text() if file.exists() else "").partition("\n")
    file.write_text(rest)
    return first


@dataclass
class State:
    app: str
    thread: int = field(default_factory=threading.get_ident)
    counted: int = 0
    ends: asyncio.Event = field(default_factory=asyncio.Event)
    loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.get_running_loop)


app = App("stateful")


# Declared before the lifespan: what a command uses is known when the App is described.
@app.command
async def count(ctx: Context[State]) -> int:
    before = ctx.state.counted
    ctx.state.counted = before + 1
    await asyncio.sleep(0)
    return before + 1


def get_state(ctx: Context[State]) -> State:
    return ctx.state


async def get_state_later(state: Annotated[State, Depends(get_state)]) -> State:
    await asyncio.sleep(0)
    return state


@app.command(mutates=False)
def counted(state: Annotated[State, Depends(get_state_later)]) -> int:
    return state.counted


def _helper(ctx: Context[State]) -> int:
    return ctx.state.counted


@app.command(mutates=False)
def counted_by_helper(ctx: Context[State]) -> list[int]:
    return [_helper(ctx), os.getpid()]


@app.resource("state://counted")
def counted_resource(ctx: Context[State]) -> str:
    return str(ctx.state.counted)


@app.lifespan
async def lifespan(of: App) -> AsyncIterator[State]:
    misdeed = next_misdeed()
    note("opening")
    match misdeed:
        case "raise":
            raise RuntimeError("no database at 10.0.0.7")
        case "fail":
            raise Failure("UNAVAILABLE", "the database is closed today")
        case "hang":
            await asyncio.sleep(60)
        case "swallow":
            for _ in range(2):
                try:
                    await asyncio.sleep(60)
                except asyncio.CancelledError:
                    note("swallowed")
        case "block":
            time.sleep(60)
        case "exit":
            sys.exit(3)
        case "slow":
            await asyncio.sleep(0.2)
    state = State(of.name)
    async with asyncio.TaskGroup() as group:  # it demands that one task opens and closes it
        ending = group.create_task(end_when_asked(state))
        note("opened")
        yield state
        ending.cancel()
    note("closing")
    if misdeed == "hang closing":
        await asyncio.sleep(60)
    if misdeed == "close slowly":
        await asyncio.sleep(0.3)
    note("closed")


async def end_when_asked(state: State) -> None:
    await state.ends.wait()
    raise RuntimeError("a background task of the lifespan")


@app.command
async def end_lifespan(ctx: Context[State]) -> None:
    ctx.state.ends.set()


@app.command(mutates=False)
def plain() -> int:
    return os.getpid()


@app.command(mutates=False, isolation="shared")
async def beside() -> int:
    return os.getpid()


@app.command(mutates=False, isolation="process")
def in_process(ctx: Context[State]) -> int:
    return ctx.state.counted


@app.command(mutates=False, isolation="inline", mcp=False)
async def on_this_loop(ctx: Context[State]) -> int:
    return ctx.state.counted


# --- sync functions in the shared process ---------------------------------------------------------


@app.command(isolation="shared")
def says_where() -> list[Any]:
    return [os.getpid(), threading.current_thread() is threading.main_thread(), threading.current_thread().daemon]


@app.command(isolation="shared")
def sleeps(seconds: float) -> str:
    note("begun")
    time.sleep(seconds)
    return "rested"


@app.command(isolation="shared")
def sleeps_in_c(seconds: float) -> None:
    """Hold the GIL, so that the loop stands still as well."""
    ctypes.PyDLL(None).usleep(int(seconds * 1e6))


@app.command(isolation="shared")
async def limit_memory(is_limited: bool) -> None:
    """Leave no memory for the stack of a thread."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    _, most = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + 1_000_000 if is_limited else most, most))


@app.command(isolation="shared")
async def rests_in_a_pool(seconds: float) -> None:
    def rest() -> None:
        time.sleep(seconds)
        note("rested")

    await asyncio.to_thread(rest)


@app.command(isolation="shared")
def spins() -> None:
    while True:
        pass


@app.command(isolation="shared")
def obeys(ctx: Context) -> str:
    note("begun")
    while not ctx.stopping:
        time.sleep(0.005)
    note("obeyed")
    return "obeyed"


@app.command(isolation="shared")
def reports(ctx: Context) -> None:
    note("begun")
    try:
        while True:
            ctx.progress(1)
            time.sleep(0.005)
    finally:
        ctx.keep({"kept": "at the end"})
        note("cleaned up")


@app.command
async def waits(ctx: Context[State]) -> None:
    assert ctx.state
    note("begun")
    await asyncio.sleep(60)


@app.command(isolation="shared")
def asks_forever(ctx: Context) -> None:
    try:
        ctx.call("sleeps", {"seconds": 60})
    finally:
        note("cleaned up")


@app.command(isolation="shared")
def stubborn(ctx: Context) -> None:
    while True:
        try:
            ctx.progress(1)
            time.sleep(0.005)
        except BaseException:
            pass


@app.command(isolation="shared")
def explodes(how: str) -> None:
    if how == "exit":
        sys.exit(3)
    if how == "interrupt":
        raise KeyboardInterrupt
    raise ValueError("a bug")


@app.command(isolation="shared")
def talks(ctx: Context) -> list[Any]:
    ctx.progress(1, 2, "halves")
    ctx.log("half way", "warning")
    ctx.keep({"half": True})
    return [ctx.call("plain").ok, ctx.remaining_ms() is not None, ctx.stopping]


def own_thread() -> Iterator[list[int]]:
    thread = [threading.get_ident()]
    yield thread
    thread.append(threading.get_ident())
    note(f"dependency {len(set(thread)) == 1}")


async def on_the_loop(before: Annotated[list[int], Depends(own_thread)]) -> AsyncIterator[int]:
    yield threading.get_ident()
    note("async dependency closed")


@app.command(isolation="shared")
def depends(
    thread: Annotated[list[int], Depends(own_thread)], loop: Annotated[int, Depends(on_the_loop)], fail: bool = False
) -> list[bool]:
    if fail:
        raise ValueError("of the command")
    return [thread == [threading.get_ident()], loop == threading.main_thread().ident]


async def never(before: Annotated[list[int], Depends(own_thread)]) -> None:
    await asyncio.sleep(60)


@app.command(isolation="shared")
def depends_on_never(nothing: Annotated[None, Depends(never)]) -> None: ...


@app.command(isolation="shared")
def yields(pieces: int) -> Iterator[int]:
    yield from range(pieces)


@app.command(isolation="shared")
def starts(seconds: float, pid_file: str) -> None:
    process = subprocess.Popen(["sleep", "60"])
    Path(pid_file).write_text(str(process.pid))
    if seconds:
        process.wait(seconds)


async def pooled() -> AsyncIterator[str]:
    try:
        yield "a connection"
    finally:
        await asyncio.sleep(0)
        note("returned to the pool")


@app.command(isolation="shared")
def uses_pooled(connection: Annotated[str, Depends(pooled)], seconds: float) -> str:
    time.sleep(seconds)
    return connection


@app.command
def floods(ctx: Context[State]) -> int:
    """Report while the loop takes nothing, and return the growth of the process in pages."""
    ctx.state.loop.call_soon_threadsafe(time.sleep, 0.5)
    before = int(Path("/proc/self/statm").read_text().split()[1])
    for number in range(50_000):
        ctx.progress(number)
    return int(Path("/proc/self/statm").read_text().split()[1]) - before


@app.command
def keeps_its_state(ctx: Context[State], until: str) -> list[int]:
    """Return the different states that it sees while the lifespan is opened anew."""
    seen = {id(ctx.state)}
    note("begun")
    while not os.path.exists(until):
        seen.add(id(ctx.state))
        time.sleep(0.001)
    return sorted({id(ctx.state), *seen})


@app.command
async def die(ctx: Context[State]) -> None:
    assert ctx.state
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    app()
