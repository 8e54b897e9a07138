"""An App as an author writes it."""

import os
import time
from typing import Any

from shotclock import App, Context, Failure

app = App("greeter", default_timeout="20s")


@app.command(mutates=False)
def greet(name: str, times: int = 1) -> str:
    """Greet somebody."""
    if name == "nobody":
        raise Failure("NOT_FOUND", "there is nobody to greet")
    return ", ".join([f"Hello {name}"] * times)


@app.command(mutates=False)
async def describe(ctx: Context, name: str) -> dict[str, Any]:
    """Describe somebody."""
    ctx.progress(1, 1, "names")
    return {"name": name, "pid": os.getpid(), "letters": list(name)}


@app.command(mutates=False, timeout="300ms")
def hang() -> None:
    """Hang."""
    time.sleep(600)


@app.command(destructive=True)
def forget(name: str) -> str:
    """Forget somebody."""
    return f"forgot {name}"
