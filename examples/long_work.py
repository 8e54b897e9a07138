"""Work that takes longer than its caller waits, and goes on where it was. See docs/howto/background.md."""

import time
from pathlib import Path

from shotclock import App, Context

app = App("long-work", version="1.0")


@app.command(interruption={"resume": True}, mutates=False)
def measure(file: Path, ctx: Context, pause: float = 0.1) -> dict[str, int]:
    """Add up the lengths of the lines of a file, slowly.

    Parameters
    ----------
    file
        A text file.
    pause
        Seconds per line.
    """
    lines = file.read_text().splitlines()
    kept = ctx.restore(file.stat().st_mtime_ns) or {"done": 0, "length": 0}
    began_at = kept["done"]
    for done, line in enumerate(lines[began_at:], start=began_at + 1):
        time.sleep(pause)  # stands for work
        kept = {"done": done, "length": kept["length"] + len(line)}
        ctx.checkpoint(kept)
        ctx.progress(done, len(lines), "lines")
    return {"length": kept["length"], "began_at": began_at}


if __name__ == "__main__":
    app()
