"""Make the pictures of README and docs anew, each from a real run: `make picture`.

Needs Linux, Chromium, and `shotclock` in the environment of this interpreter.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import pty
import re
import select
import shutil
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

from playwright.sync_api import Page, expect, sync_playwright
from rich.console import Console
from rich.text import Text

from shotclock.ui._browser import find_chromium

ROOT = Path(__file__).resolve().parents[1]
PICTURES = ROOT / "docs" / "pictures"
SHOTCLOCK = [sys.executable, "-m", "shotclock"]
TOUR = "examples/tour.yaml"
FOLDER = Path("/tmp/shotclock")  # its name is in the pictures
RUN_ID = "tour-1"
LIMIT_S = 60.0
LARGEST = 150_000  # bytes
COLUMNS, LINES = 100, 30
THEMES = ("light", "dark")

ROUTES = "# What the sandbox may reach\nroutes:\n  - host: mirror.example\n    methods: [GET]\ndefault: deny\n"
PROPOSALS = (
    {
        "title": "Let the build reach PyPI",
        "justification": "Three packages are not in the mirror. Only GET, only this host.",
        "file": {
            "path": "/etc/egress/routes.yaml",
            "current": ROUTES,
            "proposed": ROUTES.replace("default:", "  - host: pypi.org\n    methods: [GET]\ndefault:"),
        },
        "policy": {"ttl": "1h"},
    },
    {
        "title": "Which region takes the traffic?",
        "justification": "Both have room.",
        "choices": ["eu-west", "us-east"],
        "policy": {"ttl": "4h"},
    },
    {
        "title": "Remove the old workers",
        "justification": "They have been idle since Monday.",
        "operation": "ops/remove",
        "arguments": {"count": 4, "zone": "a"},
        "input_schema": {"properties": {"count": {"type": "integer"}, "zone": {"enum": ["a", "b"]}}},
        "policy": {"ttl": "1d", "destructive": True},
    },
)
RELEASE = """
name: release
timeout: 10m
steps:
  fetch: {exec: echo fetched, timeout: 30s}
  build: {exec: "sleep 1; echo built", depends_on: fetch, timeout: 2m}
  test: {exec: "echo '214 of 380 tests'; exec sleep 100", depends_on: build, timeout: 3m, idle: 2m}
  publish: {exec: echo published, depends_on: test, timeout: 1m}
"""


def run_on_terminal(command: list[str], folder: Path, environment: dict[str, str]) -> str:
    """Run a command on a terminal, and return what it writes there."""
    terminal, theirs = pty.openpty()
    termios.tcsetwinsize(terminal, (LINES, COLUMNS))
    process = subprocess.Popen(
        command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment, cwd=folder, start_new_session=True
    )
    os.close(theirs)
    written = b""
    give_up_at = time.monotonic() + LIMIT_S
    try:
        while time.monotonic() < give_up_at:
            if select.select([terminal], [], [], 0.1)[0]:
                try:
                    written += os.read(terminal, 65536)
                except OSError:  # The program has ended.
                    break
        return written.decode()
    finally:
        process.kill()
        process.wait(LIMIT_S)
        os.close(terminal)


def frame_of(written: str) -> str:
    """Return the first frame of the live view in which a step is being stopped."""
    frames = re.split(r"\r\x1b\[2K(?:\x1b\[1A\x1b\[2K)*", written.replace("\r\n", "\n"))
    return next(frame for frame in frames if "of grace left" in frame).rstrip("\n")


def draw_terminal(title: str, lines: str) -> str:
    """Return an SVG picture of a terminal, without fonts from elsewhere."""
    console = Console(record=True, width=COLUMNS, file=io.StringIO(), force_terminal=True, color_system="truecolor")
    console.print(Text.from_ansi(lines), no_wrap=True, crop=True)
    return re.sub(r"@font-face \{.*?\}", "", console.export_svg(title=title), flags=re.DOTALL)


def photograph(page: Page, name: str, theme: str) -> None:
    page.screenshot(path=PICTURES / f"{name}-{theme}.png", animations="disabled")


@contextlib.contextmanager
def opened(browser: Any, theme: str, width: int, height: int) -> Iterator[Page]:
    context = browser.new_context(
        viewport={"width": width, "height": height}, color_scheme=theme, reduced_motion="reduce"
    )
    context.set_default_timeout(LIMIT_S * 1000)
    try:
        yield context.new_page()
    finally:
        context.close()


def picture_report(browser: Any, report: Path) -> None:
    for theme in THEMES:
        with opened(browser, theme, 1100, 790) as page:
            page.goto(report.as_uri())
            expect(page.locator("details.row")).to_have_count(7)
            photograph(page, "report", theme)


@contextlib.contextmanager
def serving(folder: Path, environment: dict[str, str]) -> Iterator[str]:
    """Serve the operators' page, and yield its address."""
    log = folder / "log"
    with log.open("wb") as output:
        command = [*SHOTCLOCK, "inbox", "serve", "--http", "127.0.0.1:0"]
        process = subprocess.Popen(command, env=environment, stdout=output, stderr=output)
    try:
        give_up_at = time.monotonic() + LIMIT_S
        while not (found := re.search(r"decide at (http://[^/]+)/", log.read_text())):
            if process.poll() is not None or time.monotonic() > give_up_at:
                sys.exit(log.read_text())
            time.sleep(0.05)
        yield found[1]
    finally:
        process.terminate()
        process.wait(LIMIT_S)


def make_token(name: str, role: str, environment: dict[str, str]) -> str:
    command = [*SHOTCLOCK, "token", "create", name, "--role", role, "--json"]
    created = subprocess.run(command, env=environment, check=True, capture_output=True, timeout=LIMIT_S)
    return str(json.loads(created.stdout)["data"]["token"])


def propose(address: str, token: str, proposal: dict[str, Any]) -> None:
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {token}"}
    request = Request(f"{address}/api/inbox", json.dumps(proposal).encode(), headers)
    with urlopen(request, timeout=LIMIT_S):
        pass


def picture_operators(browser: Any, folder: Path, environment: dict[str, str]) -> None:
    anna, builder = make_token("anna", "operator", environment), make_token("builder", "agent", environment)
    (folder / "release.yaml").write_text(RELEASE)
    with serving(folder, environment) as address:
        for proposal in PROPOSALS:
            propose(address, builder, proposal)
        release = subprocess.Popen(
            [*SHOTCLOCK, "run", "release.yaml", "--run-id", "release-42"],
            cwd=folder, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        try:
            for theme in THEMES:
                with opened(browser, theme, 1200, 720) as page:
                    picture_inbox(page, address, anna, theme)
        finally:
            release.terminate()
            release.wait(LIMIT_S)


def picture_inbox(page: Page, address: str, token: str, theme: str) -> None:
    page.goto(address)
    page.get_by_label("Operator token").fill(token)
    page.get_by_role("button", name="Sign in").click()
    page.locator("li.row", has_text=str(PROPOSALS[0]["title"])).click()
    expect(page.locator("#detail .diff")).to_contain_text("pypi.org")
    page.mouse.move(0, 0)
    photograph(page, "operators", theme)
    page.get_by_role("tab", name="Running").click()
    page.locator("li.row", has_text="release").click()
    expect(page.locator("li.step.running", has_text="test")).to_contain_text("left")
    page.mouse.move(0, 0)
    page.set_viewport_size({"width": 1200, "height": 520})
    photograph(page, "running", theme)


def main() -> None:
    shutil.rmtree(PICTURES, ignore_errors=True)
    PICTURES.mkdir()
    (FOLDER / "examples").mkdir(parents=True)
    shutil.copy(ROOT / TOUR, FOLDER / TOUR)
    try:
        make_pictures(FOLDER)
    finally:
        shutil.rmtree(FOLDER)
    for picture in sorted(PICTURES.iterdir()):
        size = picture.stat().st_size
        print(f"{picture.relative_to(ROOT)}: {size} bytes")
        assert size <= LARGEST, f"{picture.name} is larger than {LARGEST} bytes"


def make_pictures(folder: Path) -> None:
    with sync_playwright() as driver:
        environment = {**os.environ, "SHOTCLOCK_HOME": str(folder / "home"), "TERM": "xterm-256color"}
        for each in ("NO_COLOR", "CI", "COLUMNS", "LINES"):
            environment.pop(each, None)
        demo = [*SHOTCLOCK, "demo", "--scene", "1"]
        played = subprocess.run(demo, env=environment, check=True, stdout=subprocess.PIPE, text=True, timeout=LIMIT_S)
        shown = played.stdout.rpartition("\nleft alive\n")[0].rstrip()
        (PICTURES / "demo.svg").write_text(draw_terminal("shotclock demo", f"\x1b[1m$ shotclock demo\x1b[0m\n{shown}"))
        written = run_on_terminal([*SHOTCLOCK, "run", TOUR, "--run-id", RUN_ID], folder, environment)
        frame = f"\x1b[1m$ shotclock run {TOUR}\x1b[0m\n{frame_of(written)}"
        (PICTURES / "live-view.svg").write_text(draw_terminal("shotclock run", frame))
        report = folder / "report.html"
        command = [*SHOTCLOCK, "report", RUN_ID, "--html", str(report)]
        subprocess.run(command, env=environment, check=True, stdout=subprocess.DEVNULL, timeout=LIMIT_S)
        browser = driver.chromium.launch(executable_path=find_chromium(), args=["--no-sandbox", "--disable-gpu"])
        picture_report(browser, report)
        picture_operators(browser, folder, environment)
        browser.close()


if __name__ == "__main__":
    main()
