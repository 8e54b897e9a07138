"""Commands whose jobs and keys belong to whoever calls."""

import time
from pathlib import Path

from shotclock import App

app = App("owned", grace="300ms")


@app.command(interruption=True)
def once(seconds: float = 0.5) -> str:
    """Goes on as a job."""
    time.sleep(seconds)
    return "done"


@app.command(approval=True)
def gated() -> str:
    """Waits for a person."""
    return "done"


@app.command
def plain(folder: Path, line: str) -> str:
    """Write a line."""
    with open(folder / "plain", "a") as file:
        file.write(line + "\n")
    return line


if __name__ == "__main__":
    app()
