"""What tests of the operators' page share: a real Chromium, and the page opened in it."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from shotclock.ui._browser import find_chromium
from tests.apps.web.serving import Served

SCREENSHOTS = Path(__file__).parent / "screenshots"
# What the page may take for one step. A reconnect waits for five seconds at most; a busy machine needs the rest.
WITHIN_MS = 20_000
WIDE, PHONE = {"width": 1280, "height": 820}, {"width": 375, "height": 740}


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    playwright = pytest.importorskip("playwright.sync_api")
    program = find_chromium()
    if program is None:
        pytest.skip("no Chromium here: `make test` installs it where it may")
    SCREENSHOTS.mkdir(exist_ok=True)
    playwright.expect.set_options(timeout=WITHIN_MS)
    with playwright.sync_playwright() as driver:
        started = driver.chromium.launch(
            executable_path=program, args=["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"], timeout=60_000
        )
        # It starts processes of its own once it is up: by the first page they are there, and no test's survivors.
        started.new_page().close()
        yield started
        started.close()


@pytest.fixture
def opened(browser: Any, request: pytest.FixtureRequest) -> Iterator[Any]:
    """A function that opens the page as an operator: with the printed link, or with a token. Fails on any complaint."""
    expect = pytest.importorskip("playwright.sync_api").expect
    contexts: list[Any] = []
    complaints: list[str] = []

    def open_page(served: Served, token: str | None = None, viewport: Any = WIDE, theme: str = "light") -> Any:
        context = browser.new_context(viewport=viewport, color_scheme=theme, reduced_motion="reduce")
        context.set_default_timeout(WITHIN_MS)
        contexts.append(context)
        page = context.new_page()
        page.on("pageerror", lambda error: complaints.append(f"error: {error}"))
        page.on("console", lambda said: complaints.append(said.text) if "Content Security" in said.text else None)
        page.on("dialog", lambda dialog: complaints.append(f"dialog: {dialog.message}"))
        if token is None:
            page.goto(served.link)
        else:
            page.goto(served.url)
            page.get_by_label("Operator token").fill(token)
            page.get_by_role("button", name="Sign in").click()
        expect(page.locator("body")).to_have_attribute("data-link", "live")
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert not complaints, complaints


def shoot(page: Any, name: str) -> None:
    page.screenshot(path=SCREENSHOTS / f"{name}.png")
