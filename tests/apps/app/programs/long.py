"""A tool whose work may take longer than its callers can wait. No `__main__` guard, on purpose."""

import ctypes
import os
import sys
import time
from pathlib import Path
from typing import Any

from shotclock import App, Context, Failure

app = App("longtool", version=os.environ.get("TOOL_VERSION", "1"), grace="300ms")
RESUMES: Any = {"detach": True, "resume": True}


def note(folder: Path, line: object) -> None:
    with open(folder / "notes", "a") as notes:
        notes.write(f"{line}\n")


@app.command(interruption=RESUMES, steps=["load", "work"])
def count(folder: Path, to: int, ctx: Context, pause: float = 0.05, fingerprint: str = "v1") -> dict[str, int]:
    """Count, slowly, and note every number."""
    ctx.step("load")
    start = ctx.restore((folder / "input").read_text() if (folder / "input").exists() else fingerprint) or 0
    note(folder, f"start {start} pid {os.getpid()}")
    ctx.step("work")
    for number in range(start, to):
        note(folder, number)
        time.sleep(pause)
        ctx.progress(number + 1, to, "numbers")
        ctx.checkpoint(number + 1)
        print("at", number + 1, flush=True)
    return {"counted": to, "started_at": start}


@app.command(interruption=True)
def once(folder: Path, seconds: float = 0.5, fails: bool = False) -> str:
    """Something that cannot be resumed."""
    note(folder, f"run {os.getpid()}")
    print("working hard", flush=True)
    time.sleep(seconds)
    if fails:
        raise Failure("STORE_BUSY", "made up", data={"left": 1})
    return f"done by {os.getpid()}"


@app.command(interruption={"idle_timeout": "1s", "max_lifetime": "30s"})
def silent(folder: Path, ctx: Context, talks_for: float = 0.0) -> None:
    began = time.monotonic()
    while time.monotonic() - began < talks_for:
        ctx.progress(int((time.monotonic() - began) * 1000))
        time.sleep(0.05)
    time.sleep(60)


@app.command(interruption={"max_lifetime": "1500ms"})
def lives_too_long(folder: Path, ctx: Context) -> None:
    for number in range(1_000_000):
        ctx.progress(number)
        time.sleep(0.02)


@app.command(interruption=True)
def stubborn(folder: Path) -> None:
    note(folder, f"run {os.getpid()}")
    ctypes.PyDLL(None).sleep(300)


@app.command(interruption=True)
def session(folder: Path) -> dict[str, Any]:
    """Where it runs and what it holds."""
    time.sleep(0.7)
    links = []
    for fd in os.listdir("/proc/self/fd"):
        try:
            links.append(os.readlink(f"/proc/self/fd/{fd}"))
        except OSError:
            pass
    return {
        "session": os.getsid(0),
        "links": links,
        "cwd": os.getcwd(),
        "remaining": os.environ.get("SHOTCLOCK_REMAINING_MS"),
    }


@app.command(interruption=True, stdin=True)
def reads(seconds: float = 0.5) -> str:
    time.sleep(seconds)
    return sys.stdin.read()


@app.command(interruption=RESUMES)
async def asynchronous(folder: Path, ctx: Context, to: int = 20) -> int:
    import asyncio

    start = await ctx.restore() or 0
    note(folder, f"start {start}")
    for number in range(start, to):
        await asyncio.sleep(0.05)
        ctx.progress(number + 1, to)
        await ctx.checkpoint(number + 1)
    return start


@app.command(interruption={"detach": False, "resume": True}, timeout="20s")
def resumes_only(folder: Path, ctx: Context, to: int = 100) -> int:
    start = ctx.restore() or 0
    note(folder, f"start {start}")
    for number in range(start, to):
        time.sleep(0.03)
        ctx.checkpoint(number + 1)
        note(folder, number)
    return start


# --- limits and keys ----------------------------------------------------------------------------------


@app.command(single_flight="device:{device}", timeout="20s")
def flash(folder: Path, device: str = "a", seconds: float = 0.1) -> str:
    with open(folder / "inside", "a") as inside:
        inside.write(f"in {device} {os.getpid()} {time.monotonic_ns()}\n")
        inside.flush()
        time.sleep(seconds)
        inside.write(f"out {device} {os.getpid()} {time.monotonic_ns()}\n")
    return device


@app.command(single_flight="device:{device}", timeout="20s", queue="15s")
def flash_in_turn(folder: Path, device: str = "a", seconds: float = 0.1) -> str:
    return flash(folder, device, seconds)


@app.command(concurrency=2, timeout="20s", queue="15s")
def two_at_once(folder: Path, seconds: float = 0.2) -> str:
    return flash(folder, "two", seconds)


@app.command(timeout="20s")
def flash_twice(folder: Path, ctx: Context) -> list[Any]:
    """Calls another command, which stands in line like everybody else."""
    return [ctx.call("flash", {"folder": str(folder), "seconds": 0.1}).to_dict() for _ in range(2)]


@app.command(timeout="20s")
def charge(folder: Path, amount: int, seconds: float = 0.0, fails: bool = False) -> dict[str, int]:
    note(folder, f"charge {amount}")
    time.sleep(seconds)
    if fails:
        raise RuntimeError("the bank is closed")
    return {"charged": amount}


app()
