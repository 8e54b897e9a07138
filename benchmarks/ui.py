"""What an execution costs beside bare Playwright, and a `shotclock ui click` from the shell beside `exec -- true`."""

from __future__ import annotations

import asyncio
import os
import tempfile
import time
from pathlib import Path

from shotclock.ui import client
from shotclock.ui._browser import FLAGS, VIEWPORT, find_chromium
from shotclock.ui.verbs import build

from .rounds import Size, take_turns
from .startup import SHOTCLOCK, wall_time
from .table import Bar, Table, compared

LIMIT_S = 240
TITLE = "UI executions"
NOTE = (
    "*One snapshot*: an execution with one `snapshot_ui` from a program that has the client imported, through the "
    "socket, the daemon, its runtime and the process of the browser, to the envelope; the peer is "
    "`page.aria_snapshot(mode='ai')` in this process, on the same page of 300 rows in another Chromium of the same "
    "flags. *From the shell*: a warm `shotclock ui click` with all that a click takes in the browser, beside "
    "`shotclock exec -- true`, which starts a process and guards it."
)
ROWS = "".join(f"<p>row {n} <button data-testid=b{n}>take {n}</button></p>" for n in range(300))
PAGE = f"<!doctype html><title>Rows</title><h1>Rows</h1>{ROWS}"
SNAPSHOTS = 5
CLICK = [SHOTCLOCK, "ui", "click", "--id", "b5"]
EXEC = [SHOTCLOCK, "exec", "--timeout", "5s", "--", "true"]


def snapshot_through_daemon() -> float:
    began = time.perf_counter()
    for _ in range(SNAPSHOTS):
        envelope = client.execute("browser", build("snapshot", {"max_bytes": 64_000}))
        assert envelope.ok, envelope
    return (time.perf_counter() - began) / SNAPSHOTS * 1e3


async def _measure(rounds: int, page_file: Path) -> Table:
    from playwright.async_api import async_playwright

    opened = client.execute("browser", build("open", {"target": page_file.as_uri()}))
    assert opened.ok, opened
    async with async_playwright() as driver:
        browser = await driver.chromium.launch(
            executable_path=find_chromium(), chromium_sandbox=os.geteuid() != 0, args=list(FLAGS)
        )
        page = await browser.new_page(viewport=VIEWPORT)
        await page.goto(page_file.as_uri())

        async def bare() -> float:
            began = time.perf_counter()
            for _ in range(SNAPSHOTS):
                assert await page.aria_snapshot(mode="ai", timeout=10_000)
            return (time.perf_counter() - began) / SNAPSHOTS * 1e3

        snapshots = await take_turns({"ours": snapshot_through_daemon, "bare": bare}, rounds)
        await browser.close()
    environ = dict(os.environ)
    sides = {name: lambda a=argv: wall_time(a, environ) * 1e3 for name, argv in (("click", CLICK), ("exec", EXEC))}
    shell = await take_turns(sides, rounds)
    shown = "{:.1f} ms"
    return Table(
        TITLE,
        NOTE,
        [
            compared("one snapshot", snapshots["ours"], "bare Playwright", snapshots["bare"], shown, Bar(1.15)),
            compared("from the shell", shell["click"], "`exec -- true`", shell["exec"], shown, Bar(2)),
        ],
    )


def measure(size: Size) -> Table:
    with tempfile.TemporaryDirectory() as folder:
        os.environ["SHOTCLOCK_HOME"] = f"{folder}/home"
        page_file = Path(folder) / "page.html"
        page_file.write_text(PAGE)
        try:
            return asyncio.run(_measure(size.of(30, 8, 1), page_file))
        finally:
            client.stop("browser")
