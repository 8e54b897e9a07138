"""Commands that yield the items of their results."""

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

from shotclock import App, Context, Failure, Secret

app = App("streaming", default_timeout="20s")


@app.command(mutates=False)
def count(to: int, pause: float = 0.0) -> Iterator[int]:
    """Count."""
    for number in range(1, to + 1):
        yield number
        time.sleep(pause)


@app.command(mutates=False, timeout="1s")
def hang(names: list[str]) -> Iterator[dict[str, str]]:
    """Yield a few and hang."""
    for name in names:
        yield {"name": name}
    time.sleep(600)


@app.command(mutates=False)
async def later(ctx: Context, to: int) -> AsyncIterator[str]:
    """Count in a coroutine."""
    for number in range(to):
        await asyncio.sleep(0)
        yield f"{ctx.name} {number}"


@app.command(mutates=False)
def fail() -> Iterator[Any]:
    """Fail after an item."""
    yield "first"
    raise Failure("NOT_FOUND", "no second")


@app.command(mutates=False)
def tell(token: Secret[str]) -> Iterator[str]:
    """Yield a secret."""
    yield token.get_secret_value()


if __name__ == "__main__":
    app()
