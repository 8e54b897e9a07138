"""Commands that return who calls them, and commands that fail with exceptions of their own."""

import os
import time
from typing import Any

from shotclock import App, Context, Depends


class Unknown(LookupError):
    pass


app = App("callers", errors_shown=(ValueError, Unknown))


def describe(ctx: Context) -> dict[str, Any]:
    caller = ctx.caller
    return {
        "principal": caller.principal,
        "client": [caller.client, caller.client_version],
        "session": caller.session,
        "claims": dict(caller.claims),
        "headers": dict(ctx.headers),
        "authorization": "authorization" in ctx.headers or "Bearer" in str(caller),
    }


@app.command(mutates=False)
def see(ctx: Context) -> dict[str, Any]:
    return describe(ctx)


@app.command(mutates=False, isolation="shared")
async def see_shared(ctx: Context) -> dict[str, Any]:
    return describe(ctx)


@app.command(mutates=False)
def see_inside(ctx: Context) -> dict[str, Any]:
    found: dict[str, Any] = ctx.call("see").data
    return found


@app.command(interruption=True)
def see_later(ctx: Context) -> dict[str, Any]:
    time.sleep(0.5)
    return describe(ctx)


@app.resource("caller://me")
def me(ctx: Context) -> dict[str, Any]:
    return describe(ctx)


def fail_early() -> None:
    raise ValueError("no such database")


@app.command(mutates=False)
def fails_early(early: None = Depends(fail_early)) -> str:
    return "never"


@app.command(mutates=False)
def fails(kind: str) -> str:
    if kind == "named":
        raise UnicodeError("not a text")
    if kind == "own":
        raise Unknown("no item 7")
    if kind == "empty":
        raise ValueError
    raise RuntimeError("the password is hunter2")


@app.command(mutates=False, isolation="shared")
def fails_in_thread() -> str:
    raise ValueError(f"refused in {os.path.basename('/x/thread')}")


@app.command(mutates=False, isolation="shared")
async def fails_on_loop() -> str:
    raise ValueError("refused on the loop")


@app.resource("broken://1")
def broken() -> str:
    raise ValueError("no such note")


@app.command(mutates=False)
def prints(count: int) -> str:
    return "x" * count


@app.command(mutates=False)
def shapes(kind: str) -> object:
    shown: dict[str, object] = {"list": [1, "a"], "text": "abc", "object": {"result": [1]}, "none": None, "number": 3}
    return shown[kind]


@app.command(mutates=False)
def numbers() -> list[int]:
    return [1, 2]
