"""A tool with a bit of everything that a command may declare. No `__main__` guard, on purpose."""

import asyncio
import sys
import time
from dataclasses import dataclass
from datetime import date, datetime, timedelta
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, Literal
from uuid import UUID

from pydantic import BaseModel, Field

from shotclock import App, Context, Failure, register_error

register_error("SHOP_NO_STOCK", summary="There is none left.", exit_code=90, http_status=409, side_effects="none")

app = App("tool", default_timeout="5s", grace="300ms", version="1.2.3", help="A tool to try things with.")


class Colour(Enum):
    RED = "red"
    BLUE = "blue"


class Size(Enum):
    SMALL = 1
    LARGE = 2


class Point(BaseModel):
    x: int
    y: int = Field(0, ge=0)
    label: str | None = None


@dataclass
class Box:
    corner: Point
    width: float = 1.0


class Node(BaseModel):
    name: str
    children: list["Node"] = []


@app.command(mutates=False)
def types(
    path: Path,
    count: int,
    ratio: float = 0.5,
    *,
    colour: Colour = Colour.RED,
    size: Size = Size.SMALL,
    mode: Literal["fast", "slow"] = "fast",
    level: Literal[1, 2] = 1,
    maybe: int | None = None,
    either: int | str = 0,
    numbers: list[int] = [],  # noqa: B006
    pairs: dict[str, int] = {},  # noqa: B006
    point: Point | None = None,
    box: Box | None = None,
    tree: Node | None = None,
    when: datetime | None = None,
    day: date | None = None,
    every: timedelta | None = None,
    ident: UUID | None = None,
    loud: bool = False,
    quiet: bool = True,
    short: Annotated[str, Field(max_length=3)] = "abc",
    anything: Any = None,
    raw: bytes = b"",
    listed: tuple[int, str] | None = None,
) -> dict[str, str]:
    """Say what arrived, and as what.

    Args:
        path: Where it is.
        count: How many there are.
    """
    return {name: repr(value) for name, value in locals().items()}


@app.command(mutates=False)
def import_(path: Path, *, dry_run_all: bool = False) -> str:
    """A name that Python keeps for itself."""
    return str(path)


@app.command(mutates=False)
def anything_more(first: str = "", **more: Any) -> dict[str, Any]:
    return {"first": first, **more}


@app.command(mutates=False)
def echo(text: str) -> str:
    return text


@app.command(mutates=False, timeout="700ms")
def waits(seconds: float, ctx: Context) -> str:
    time.sleep(seconds)
    return f"waited {seconds:g}"


@app.command(steps=["fetch", "build", "publish"], timeout="800ms")
def stepped(folder: Path, ctx: Context, stuck_at: str = "build", fails: bool = False) -> list[str]:
    """Do three things, one after the other."""
    done = []
    for name in ("fetch", "build", "publish"):
        if not ctx.step(name):
            continue
        if name == stuck_at:
            (folder / "stuck").touch()
            if fails:
                raise Failure("SHOP_NO_STOCK", "nothing to build", data={"left": 0})
            time.sleep(60)
        (folder / name).touch()
        done.append(name)
    return done


@app.command
async def patient(folder: Path, ctx: Context, unwinding: float = 0.0) -> None:
    """Wait until it is told to stop, and then tidy up."""
    (folder / "up").touch()
    try:
        await asyncio.sleep(60)
    finally:
        time.sleep(unwinding)
        (folder / "tidied").touch()


@app.command
def stubborn(folder: Path) -> None:
    """Takes no notice of a polite stop."""
    import signal

    signal.signal(signal.SIGTERM, lambda *_: (folder / "asked").touch())
    (folder / "up").touch()
    while True:
        time.sleep(0.02)


@app.command(soft="200ms", timeout="5s")
def winds_down(ctx: Context) -> str:
    while not ctx.stopping:
        time.sleep(0.01)
    return "wound down"


@app.command(exit_codes=["SHOP_NO_STOCK"])
def sell(item: str) -> None:
    raise Failure("SHOP_NO_STOCK", f"no {item}", data={"left": 0})


@app.command(destructive=True)
def wipe(path: Path) -> str:
    path.unlink()
    return "wiped"


@app.command(destructive=True)
def prune(path: Path, dry_run: bool = False) -> str:
    if dry_run:
        return f"would prune {path}"
    path.unlink()
    return "pruned"


@app.command(requires_person="wipe {name}")
def danger(name: str) -> str:
    return f"{name} is gone"


@app.command(mutates=False)
def progresses(ctx: Context, seconds: float = 1.0) -> str:
    began = time.monotonic()
    while (spent := time.monotonic() - began) < seconds:
        ctx.progress(int(spent * 1000), int(seconds * 1000), "ms")
        time.sleep(0.02)
    return "done"


@app.command(mutates=False)
def nested(ctx: Context, seconds: float = 0.0) -> dict[str, Any]:
    inner = ctx.call("waits", {"seconds": seconds})
    return {"inner": inner.to_dict(), "remaining_ms": ctx.remaining_ms()}


@app.command(mutates=False, mcp=False)
def interpreter() -> str:
    return sys.executable


app()
