"""Commands with results and progress for people."""

import time
from typing import Any

from shotclock import App, Context

app = App("rows")


@app.command(mutates=False)
def users() -> list[dict[str, Any]]:
    """List users."""
    return [
        {"name": "Ada", "age": 36, "note": "first\nprogrammer"},
        {"name": "山田", "age": 7, "note": "\x1b[31mred", "admin": True},
    ]


@app.command(mutates=False)
def wide() -> list[dict[str, Any]]:
    """List something wide."""
    return [{"id": 1, "text": "x" * 500}]


@app.command(mutates=False)
def nested() -> list[dict[str, Any]]:
    """List objects that are no rows."""
    return [{"name": "Ada", "tags": ["a"]}]


@app.command(mutates=False)
def load(ctx: Context, counted: bool = True) -> str:
    """Report progress."""
    for done in range(1, 4):
        ctx.progress(done, 3 if counted else None, "files")
        time.sleep(0.2)
    return "loaded"


if __name__ == "__main__":
    app()
