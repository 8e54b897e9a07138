"""Commands that leave with an exit code or a message of their own."""

import sys

from shotclock import App, Failure

app = App("exits", version="1.2")


@app.command(mutates=False)
def leave(code: int) -> str:
    """Leave with an exit code."""
    sys.exit(code)


@app.command(mutates=False)
async def leave_later(code: int) -> str:
    """Leave with an exit code, from a coroutine."""
    sys.exit(code)


@app.command(mutates=False)
def explain() -> None:
    """Leave with a message."""
    sys.exit("the disk is full")


@app.command(mutates=False)
def fail() -> None:
    """Raise an exception that is meant for the user."""
    raise Failure("the disk is full")


@app.command(mutates=False)
def break_down() -> None:
    """Raise an exception that is a bug."""
    raise ValueError("a bug")


if __name__ == "__main__":
    app()
