"""Run the first example of README with timeout(1) and with Shotclock, and draw both as docs/picture.svg.

python tools/picture.py    needs `shotclock` on PATH, or in .venv
"""

from __future__ import annotations

import os
import signal
import subprocess
from html import escape
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PICTURE = ROOT / "docs" / "picture.svg"
SLEEP_S = "4173"  # An unusual number, so that the search finds no other process.
WORK = f"setsid sleep {SLEEP_S} & sleep 600"
RUN_LIMIT_S = 30.0

LINE, LEFT, TOP, LETTER = 22, 20, 62, 8.45
BUTTONS = {24: "#ff5f56", 44: "#ffbd2e", 64: "#27c93f"}
COLOURS = {"$": "#e6edf3", "!": "#ff7b72", "+": "#7ee787", " ": "#9da7b3"}


def survivors() -> list[int]:
    """Return the processes of the example that are alive."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if (folder / "cmdline").read_bytes() == f"sleep\0{SLEEP_S}\0".encode():
                found.append(int(folder.name))
        except OSError:
            continue  # It has ended.
    return found


def scene(prompt: str, command: list[str]) -> list[str]:
    """Run a command, and return its lines for the picture, each with a mark for its colour."""
    environment = {**os.environ, "SHOTCLOCK_REPORT": "line", "PATH": f"{ROOT / '.venv/bin'}:{os.environ['PATH']}"}
    # The daemon of timeout(1) keeps our pipe open: a file does not wait for it.
    with (ROOT / ".picture").open("w+") as output:
        try:
            done = subprocess.run(command, stderr=output, stdout=output, env=environment, timeout=RUN_LIMIT_S)
            output.seek(0)
            printed = [f" {line}" for line in output.read().splitlines()]
        finally:
            (ROOT / ".picture").unlink()
    left = survivors()
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    verdict = f"!{len(left)} process left behind: sleep {SLEEP_S}" if left else "+0 processes left behind"
    return [f"$$ {prompt}", *printed, f" exit code {done.returncode}", verdict]


def draw(lines: list[str]) -> str:
    """Return an SVG picture of a terminal with these lines."""
    height = TOP + LINE * len(lines) + 14
    width = round(2 * LEFT + LETTER * max(map(len, lines)))
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}">',
        f'<rect width="{width}" height="{height}" rx="10" fill="#0d1117"/>',
        *(f'<circle cx="{x}" cy="22" r="6" fill="{fill}"/>' for x, fill in BUTTONS.items()),
        '<g font-family="ui-monospace, Menlo, Consolas, monospace" font-size="14" xml:space="preserve">',
    ]
    for number, line in enumerate(lines):
        if line:
            place = f'x="{LEFT}" y="{TOP + LINE * number}" fill="{COLOURS[line[0]]}"'
            parts.append(f"<text {place}>{escape(line[1:], quote=False)}</text>")
    return "\n".join([*parts, "</g></svg>\n"])


def main() -> None:
    """Run both scenes and write the picture."""
    with_timeout = scene(f"timeout 2 bash -c '{WORK}'", ["timeout", "2", "bash", "-c", WORK])
    with_shotclock = scene(
        f"shotclock exec --timeout 2s -- bash -c '{WORK}'",
        ["shotclock", "exec", "--timeout", "2s", "--", "bash", "-c", WORK],
    )
    PICTURE.write_text(draw([*with_timeout, "", *with_shotclock]))
    print(f"wrote {PICTURE.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
