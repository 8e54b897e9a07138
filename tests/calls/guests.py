"""Async handlers for host processes: well-behaved ones, and those that do everything to outlive their time.

The adversaries leave a mark for each process whose end matters, the last one being `ready` (see work.mark).
"""

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

from shotclock import Context
from tests.calls import operations, work
from tests.calls.work import FOREVER_S, mark

kept: dict[str, int] = {}
"""What an app keeps in the memory of its process."""


async def noop() -> int:
    return 1


async def own_pid() -> int:
    return os.getpid()


async def echo(value: Any) -> Any:
    return value


async def naps(ms: float) -> str:
    await asyncio.sleep(ms / 1000)
    return "rested"


async def counts() -> list[int]:
    """How often it was called in this process, and whether on the same loop as before."""
    kept["calls"] = kept.get("calls", 0) + 1
    loops = kept.setdefault("loop", id(asyncio.get_running_loop()))
    return [kept["calls"], int(loops == id(asyncio.get_running_loop()))]


async def wants(count: int, name: str, folder: str) -> None:
    mark(folder, "ran")


async def prints(text: str) -> str:
    print(text, flush=True)
    os.write(1, text.encode())
    return "printed"


async def says_which_loop_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


# --- those that start processes -------------------------------------------------------------------


async def waits_for_a_child(folder: str) -> None:
    child = await asyncio.create_subprocess_exec("sleep", str(FOREVER_S))
    mark(folder, "child", child.pid)
    mark(folder, "ready")
    await child.wait()


async def waits_beside_an_orphan(folder: str) -> None:
    """What a shell put into the background is nobody's child any more, and in another session."""
    script = f"setsid sleep {FOREVER_S} > /dev/null 2>&1 & echo $!"
    shell = await asyncio.create_subprocess_exec("sh", "-c", script, stdout=asyncio.subprocess.PIPE)
    orphan = int(await shell.stdout.readline())
    await shell.wait()
    mark(folder, "orphan", orphan)
    mark(folder, "ready")
    await asyncio.sleep(FOREVER_S)


async def waits_for_one_that_ignores_term(folder: str, has_own_session: bool = True) -> None:
    script = f"trap '' TERM; : > '{folder}/trapped.new'; sleep {FOREVER_S}"
    child = await asyncio.create_subprocess_exec("sh", "-c", script, start_new_session=has_own_session)
    mark(folder, "child", child.pid)
    await asyncio.to_thread(work.await_mark, folder, "trapped.new")
    mark(folder, "ready")
    await child.wait()


async def waits_for_one_without_a_main_thread(folder: str) -> None:
    words = [sys.executable, "-m", "tests.calls.work", "sleeps_without_a_main_thread", folder]
    child = await asyncio.create_subprocess_exec(*words, cwd=Path(work.__file__).parents[2])
    await asyncio.to_thread(work.await_mark, folder, "headless")
    mark(folder, "ready")
    await child.wait()


async def starts_one_in_a_thread(folder: str) -> None:
    child = await asyncio.to_thread(subprocess.Popen, ["sleep", str(FOREVER_S)])
    mark(folder, "child", child.pid)
    mark(folder, "ready")
    await asyncio.to_thread(child.wait)


async def starts_one_in_an_executor(folder: str) -> None:
    """Whose threads, unlike those of `to_thread`, know nothing of who has asked."""
    loop = asyncio.get_running_loop()
    child = await loop.run_in_executor(None, subprocess.Popen, ["sleep", str(FOREVER_S)])
    mark(folder, "child", child.pid)
    mark(folder, "ready")
    await loop.run_in_executor(None, child.wait)


async def blocks_beside_a_child(folder: str) -> None:
    child = await asyncio.create_subprocess_exec("sleep", str(FOREVER_S))
    mark(folder, "child", child.pid)
    mark(folder, "ready")
    time.sleep(2)


async def swallows_beside_a_child(folder: str) -> None:
    """And starts another once it was asked to stop."""
    child = await asyncio.create_subprocess_exec("sleep", str(FOREVER_S))
    mark(folder, "child", child.pid)
    mark(folder, "ready")
    give_up_at = time.monotonic() + 2
    while time.monotonic() < give_up_at:
        try:
            await asyncio.sleep(0.6)
            child = await asyncio.create_subprocess_exec("sleep", str(FOREVER_S))
            mark(folder, "another", child.pid)
        except BaseException:
            pass


# --- adversaries ----------------------------------------------------------------------------------


async def sleeps(folder: str) -> None:
    mark(folder, "ready")
    await asyncio.sleep(FOREVER_S)


async def blocks(folder: str) -> None:
    work.sleeps(folder)


async def blocks_for(folder: str, ms: int) -> None:
    mark(folder, "ready")
    time.sleep(ms / 1000)


async def is_silent_for(ms: int) -> str:
    await asyncio.sleep(ms / 1000)
    return "done"


async def blocks_later(folder: str) -> None:
    await asyncio.sleep(0.01)
    work.sleeps(folder)


async def blocks_in_a_task(folder: str) -> None:
    await asyncio.gather(blocks_later(folder), asyncio.sleep(FOREVER_S))


async def blocks_in_a_callback(folder: str) -> None:
    asyncio.get_running_loop().call_later(0.01, work.sleeps, folder)
    await asyncio.sleep(FOREVER_S)


async def answers_when_cancelled() -> str:
    try:
        await asyncio.sleep(FOREVER_S)
    except asyncio.CancelledError:
        pass
    return "too late"


async def spins(folder: str) -> None:
    work.spins(folder)


async def holds_the_gil(folder: str) -> None:
    work.holds_the_gil(folder)


async def stops_itself(folder: str) -> None:
    work.stops_itself(folder)


async def floods(folder: str) -> None:
    """Output without end, and without a turn for the loop."""
    work.writes_for_ever(folder)


async def floods_with_progress(folder: str, ctx: Context) -> None:
    mark(folder, "ready")
    give_up_at = time.monotonic() + FOREVER_S
    while time.monotonic() < give_up_at:
        ctx.progress(1)


async def swallows(folder: str) -> None:
    give_up_at = time.monotonic() + FOREVER_S
    mark(folder, "ready")
    while time.monotonic() < give_up_at:
        try:
            await asyncio.sleep(0.01)
        except BaseException:
            pass


async def blocks_in_finally(folder: str) -> None:
    try:
        mark(folder, "ready")
        await asyncio.sleep(FOREVER_S)
    finally:
        time.sleep(FOREVER_S)


async def awaits_in_finally(folder: str) -> None:
    try:
        mark(folder, "ready")
        await asyncio.sleep(FOREVER_S)
    finally:
        await asyncio.sleep(FOREVER_S)


async def daemonises(folder: str) -> None:
    work.start_daemon(folder)
    mark(folder, "ready")
    await asyncio.sleep(FOREVER_S)


async def daemonises_and_blocks(folder: str) -> None:
    work.daemonises_without_a_trace(folder)


async def leaves_a_child(folder: str) -> int:
    child = await asyncio.create_subprocess_exec("sleep", str(FOREVER_S))
    mark(folder, "child", child.pid)
    return child.pid


async def cleans_up(folder: str, ms: int) -> None:
    try:
        mark(folder, "ready")
        await asyncio.sleep(FOREVER_S)
    finally:
        await asyncio.sleep(ms / 1000)
        mark(folder, "cleaned")


async def has_a_task_that_blocks(folder: str) -> None:
    """Not the handler's own code, but what it started."""

    async def block() -> None:
        time.sleep(FOREVER_S)

    mark(folder, "ready")
    await asyncio.create_task(block())


async def has_a_task_that_exits() -> None:
    async def leave() -> None:
        sys.exit(3)

    task = asyncio.create_task(leave())
    await asyncio.sleep(0.02)
    del task


async def crashes(how: str, folder: str = "") -> None:
    if folder:
        mark(folder, "ready")
        await asyncio.sleep(0.05)
    operations.crashes(how)


async def crashes_with_a_child(folder: str) -> None:
    child = subprocess.Popen(["sleep", str(FOREVER_S)])
    mark(folder, "child", child.pid)
    os.kill(os.getpid(), signal.SIGKILL)


async def raises(which: str) -> None:
    operations.raises(which)


async def fails() -> None:
    operations.fails()


async def returns_what_cannot_leave() -> object:
    return threading.Lock()


async def cancels_itself() -> None:
    raise asyncio.CancelledError


# --- the context ----------------------------------------------------------------------------------


async def looks_around(ctx: Context) -> dict[str, Any]:
    return operations.looks_around(ctx)


async def writes_and_asks(ctx: Context) -> Any:
    ctx.write("one ")
    await asyncio.to_thread(ctx.write, "two ")
    total = await ctx.link.ask("add", [1, 2])
    ctx.write("three")
    return total


async def writes_then_falls_silent(ctx: Context) -> None:
    for _ in range(20):
        ctx.write("word ")
        await asyncio.sleep(0.05)
    await asyncio.sleep(FOREVER_S)


async def winds_down_without_a_turn(ctx: Context) -> str:
    give_up_at = time.monotonic() + FOREVER_S
    while not ctx.stopping and time.monotonic() < give_up_at:
        time.sleep(0.002)
    return "wound down"


async def says_it_lives(ctx: Context, ms: int) -> str:
    give_up_at = time.monotonic() + ms / 1000
    while time.monotonic() < give_up_at:
        ctx.progress(1)
        await asyncio.sleep(0.01)
    return "still here"


async def progresses_in_a_thread(ctx: Context) -> str:
    await asyncio.to_thread(ctx.progress, 7, 9, "pages")
    return "said"


async def asks_further(
    ctx: Context, operation: str, arguments: dict[str, Any], clocks: dict[str, str]
) -> dict[str, Any]:
    envelope = await ctx.call(operation, arguments, **clocks)
    return {"depth": ctx.depth, "envelope": envelope.to_dict(), "value": envelope.value}


async def calls_itself(ctx: Context) -> Any:
    envelope = await ctx.call(ctx.name)
    return {"depth": ctx.depth, "code": envelope.code} if not envelope.ok else envelope.value


async def checkpoints(ctx: Context) -> Any:
    if not ctx.step("first"):
        return "skipped"
    await ctx.checkpoint({"at": 1})
    return await ctx.restore("same")


async def note(path: str, number: int, nap_ms: float) -> int:
    """What the file says must agree with what the envelope says."""
    await asyncio.sleep(nap_ms / 1000)
    with open(path, "ab", buffering=0) as file:
        file.write(f"{number}\n".encode())
    return number


async def writes_and_forks(ctx: Context) -> None:
    """Leave text to be sent while a fork of this process starts another."""
    ctx.write("once")
    if (pid := os.fork()) == 0:
        subprocess.run(["true"])
        os._exit(0)
    os.waitpid(pid, 0)
