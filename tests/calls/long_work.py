"""Work that takes long, in every place where it may run, and observers of it. Imported by workers."""

import asyncio
import json
import os
import subprocess
import sys
import threading
import time

from shotclock.worker import main as worker_main


def counts(ctx, to: int = 30) -> object:
    """Count in tenths of a second, and stop when asked to."""
    for number in range(to):
        ctx.keep({"counted": number})
        ctx.progress(number, to)
        time.sleep(0.1)
        if ctx.stopping:
            return {"counted": number, "stopped": True}
    return {"counted": to}


async def counts_on_a_loop(ctx, to: int = 30) -> object:
    for number in range(to):
        ctx.keep({"counted": number})
        ctx.progress(number, to)
        await asyncio.sleep(0.1)
        if ctx.stopping:
            return {"counted": number, "stopped": True}
    return {"counted": to}


def is_deaf(ctx) -> None:
    ctx.keep({"kept": True})
    time.sleep(60)


async def is_deaf_on_a_loop(ctx) -> None:
    ctx.keep({"kept": True})
    await asyncio.sleep(60)


def writes(ctx) -> str:
    for _ in range(10):
        ctx.write("word ")
        time.sleep(0.1)
    return "written"


async def writes_on_a_loop(ctx) -> str:
    for _ in range(10):
        ctx.write("word ")
        await asyncio.sleep(0.1)
    return "written"


def is_silent(ctx) -> None:
    while not ctx.stopping:
        time.sleep(0.02)


def asks(ctx, by: str = "2s") -> object:
    granted_ms = ctx.request_overtime("nearly there", by=by)
    time.sleep(1)
    return {"granted_ms": granted_ms, "left_ms": ctx.remaining_ms()}


async def asks_on_a_loop(ctx, by: str = "2s") -> object:
    granted_ms = await ctx.request_overtime("nearly there", by=by)
    await asyncio.sleep(1)
    return {"granted_ms": granted_ms, "left_ms": ctx.remaining_ms()}


def asks_before_a_command(ctx) -> object:
    ctx.request_overtime("nearly there", by="2s")
    return {"deadline_ns": ctx.deadline.at_ns, "variable": os.environ["SHOTCLOCK_DEADLINE_NS"]}


def calls_another(ctx) -> object:
    return ctx.call("counts-inside", {"to": 100}).to_dict()


def cleans_up(ctx) -> object:
    while not ctx.stopping:
        time.sleep(0.02)
    return ctx.call("counts-inside", {"to": 2}).to_dict()


def asks_in_threads(ctx, count: int) -> object:
    """Ask from so many threads at once; all get an answer, or it does not come back."""
    answers = []
    threads = [
        threading.Thread(target=lambda: answers.append(ctx.request_overtime("more", by="10ms"))) for _ in range(count)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    return {"answers": len(answers), "pid": os.getpid()}


def leaves_a_thread_asking(ctx) -> object:
    """Come back while a thread still waits for what it has asked."""
    thread = threading.Thread(target=lambda: ctx.call("counts-inside", {"to": 20}), daemon=True)
    thread.start()
    thread.join(0.3)
    return {"pid": os.getpid(), "is_waiting": thread.is_alive()}


def names_itself() -> object:
    return {"pid": os.getpid()}


def names_itself_and_ends_after(calls: int) -> object:
    """Lower the number of calls after which this worker ends."""
    worker_main.MOST_CALLS = calls
    return {"pid": os.getpid()}


ASKS = (sys.executable, "-m", "shotclock", "overtime", "--by", "700ms", "--reason", "nearly there")


def starts_what_asks(ctx) -> object:
    return json.loads(subprocess.run(ASKS, capture_output=True, timeout=60).stdout)


async def starts_what_asks_on_a_loop(ctx) -> object:
    process = await asyncio.create_subprocess_exec(*ASKS, stdout=subprocess.PIPE)
    return json.loads((await process.communicate())[0])


async def shows_what_it_would_ask_with(ctx) -> object:
    command = "import os; print(os.environ.get('SHOTCLOCK_OVERTIME', ''))"
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", command, stdout=subprocess.PIPE)
    return (await process.communicate())[0].decode().strip()


def keeps_what_json_changes(ctx) -> None:
    ctx.keep({"measured": float("nan")})
    ctx.keep({"measured": float("inf"), "read": b"\xff"})
    time.sleep(60)


async def keeps_what_json_changes_on_a_loop(ctx) -> None:
    ctx.keep({"measured": float("nan")})
    ctx.keep({"measured": float("inf"), "read": b"\xff"})
    await asyncio.sleep(60)
