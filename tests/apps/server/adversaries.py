"""An App whose tools hang in every way we know, beside some that behave. Served by the tests, never imported by the
server."""

import asyncio
import ctypes
import os
import time
from dataclasses import dataclass

from shotclock import App, Context, Failure, Image, register_error
from tests.calls import work

register_error("ACME_NO_STOCK", summary="Nothing left.", exit_code=79, retryable=True, side_effects="none")

# Base64 without padding, so that a repetition of it is base64 as well.
PIXEL = "iVBORw0KGgoA"

app = App("adversaries", version="1.2.3", default_timeout="300ms", grace="100ms", help="Tools that do not end.")

for function in work.HANGING:
    app.command(function)


@app.command
async def blocks_the_loop(folder: str) -> None:
    work.sleeps(folder)


@app.command
async def holds_the_gil_on_the_loop(folder: str) -> None:
    work.holds_the_gil(folder)


@app.command
async def swallows_cancellation(folder: str) -> None:
    work.mark(folder, "ready")
    give_up_at = time.monotonic() + work.FOREVER_S
    while time.monotonic() < give_up_at:
        try:
            await asyncio.sleep(work.FOREVER_S)
        except BaseException:
            pass


# --- those that share a process -------------------------------------------------------------------

remembered: list[str] = []


@app.command(isolation="shared", timeout=0)
async def swallows_beside_others(folder: str) -> None:
    await swallows_cancellation(folder)


@app.command(isolation="shared", timeout=0, grace="700ms")
async def swallows_through_its_grace(folder: str) -> None:
    await swallows_cancellation(folder)


@app.command(isolation="shared", timeout=0)
async def blocks_others(folder: str) -> None:
    work.sleeps(folder)


@app.command(timeout="15s")
async def waits_for_a_child(folder: str) -> None:
    child = await asyncio.create_subprocess_exec("sleep", str(work.FOREVER_S))
    work.mark(folder, "child", child.pid)
    work.mark(folder, "ready", child.pid)
    await child.wait()


@app.command(isolation="shared", timeout="15s")
async def waits_for_a_child_beside_others(folder: str) -> None:
    await waits_for_a_child(folder)


@app.command(isolation="shared", timeout="15s")
async def blocks_others_for(seconds: float) -> str:
    time.sleep(seconds)
    return "done"


@app.command(isolation="shared", timeout="10s")
async def remembers(what: str) -> list[str]:
    remembered.append(what)
    return remembered


# --- those that end by themselves, badly ----------------------------------------------------------


@app.command
def exits() -> None:
    os._exit(3)


@app.command
def segfaults() -> None:
    ctypes.string_at(0)


@app.command
async def segfaults_on_the_loop() -> None:
    ctypes.string_at(0)


@app.command
def raises() -> None:
    raise RuntimeError("on purpose")


@app.command
def prints() -> str:
    """Writes what looks like an answer to where answers go."""
    print('{"jsonrpc":"2.0","id":1,"result":{}}', flush=True)
    os.write(1, b"not JSON at all\n")
    return "printed"


# --- those that behave ----------------------------------------------------------------------------


@app.command(mutates=False)
def noop(a: int = 1) -> int:
    """Gives back what it was given."""
    return a


@app.command(mutates=False)
async def noop_async(a: int = 1) -> int:
    return a


@dataclass
class Parcel:
    weight: float
    labels: list[str]


@app.command(mutates=False)
def parcel(weight: float, label: str = "fragile") -> Parcel:
    """A parcel, labelled."""
    return Parcel(weight, [label])


@app.command(mutates=False, timeout="10s")
def picture(image: str = PIXEL, repeat: int = 1) -> Image:
    return Image(data=image * repeat, format="png")


@app.command(exit_codes=["ACME_NO_STOCK"], idempotent=True)
def out_of_stock() -> None:
    raise Failure("ACME_NO_STOCK", "no parcels left", data={"left": 0})


@app.command(destructive=True, timeout="10s")
def erase(what: str) -> str:
    return what


@app.command(mcp=False)
def hidden() -> str:
    return "seen"


@app.command(timeout=0)
def unbounded(folder: str) -> None:
    work.sleeps(folder)


@app.command(timeout="20s")
def patient(folder: str) -> None:
    work.sleeps(folder)


@app.command(timeout="20s")
async def patient_async(folder: str) -> None:
    await work.sleeps_async(folder)


@app.command(timeout="10s")
def counts_to(ctx: Context, n: int, pause_ms: int = 0) -> int:
    for done in range(1, n + 1):
        ctx.progress(done, n, "steps")
        time.sleep(pause_ms / 1000)
    return n


@app.command(timeout="10s", mutates=False)
def strange(kind: str) -> object:
    """Results that readers of JSON stumble over."""
    if kind == "deep":
        nested: list[object] = []
        for _ in range(150):
            nested = [nested]
        return nested
    return {
        "surrogate": {"text": "half a character: \ud83d, a whole one: \U0001f600"},
        "numbers": [2**70, 1e308, float("nan"), float("inf")],
        "null": None,
        "empty": {},
        "large": "x" * 3_000_000,
        "too large": ["x" * 1_000_000] * 50,
        "control": {"text": "\x00\x1b[31m\u2028\n"},
    }[kind]


@app.command(timeout="19s", mutates=False)
def floods(megabytes: int) -> str:
    """Much on stdout and on stderr, and a last line."""
    for number in range(megabytes):
        os.write(1 + number % 2, b"x" * 999_999 + b"\n")
    print("the last line")
    return "done"


@app.command(timeout="10s", mutates=False)
def remaining(ctx: Context) -> int | None:
    return ctx.remaining_ms()
