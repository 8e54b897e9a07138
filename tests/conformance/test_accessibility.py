"""axe finds nothing serious on the site, the report and the operators' page, and none is wider than a phone."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from shotclock.calls.principal import Role
from shotclock.ui._browser import find_chromium
from tests.apps.web.serving import Served, serving
from tests.conformance.published_servers import FOLDER
from tools import site

playwright = pytest.importorskip("playwright.sync_api")
expect = playwright.expect

AXE = FOLDER / "node_modules/axe-core/axe.min.js"
FAILING_IMPACTS = {"serious", "critical"}
WITHIN_MS = 30_000
ENDED_WITHIN_S = 60.0
WIDE, PHONE = {"width": 1280, "height": 2400}, {"width": 400, "height": 800}
THEMES = ("light", "dark")
# The last one has wide tables without links.
SITE_PAGES = ("index.html", "howto/reports.html", "reference/workflow.html", "reference/errors.html")

FLOW = """
name: nightly
timeout: 1m
steps:
  fetch: {exec: "echo fetched; echo 'deprecated option' >&2"}
  test:
    exec: "mkdir -p logs; echo '1 of 9 failed' | tee logs/test.log; echo 'assertion failed' >&2; exit 1"
    artifacts: [logs]
    depends_on: fetch
    on_fail: {retry: {max: 1}}
  build: {exec: "echo building; sleep 600", timeout: 1s, grace: 0, depends_on: fetch}
  publish: {exec: "echo never", depends_on: [build, test]}
"""
WAITING_FLOW = """
name: release
timeout: 10m
steps:
  fetch: {exec: echo fetched}
  build: {exec: sleep 120, depends_on: fetch, timeout: 5m}
  ship: {exec: echo shipped, depends_on: build}
"""
FILE = {
    "title": "Let the build reach PyPI",
    "justification": "Three packages are not in the mirror.",
    "file": {
        "path": "/nowhere/routes.yaml",
        "current": "# What may leave\n- host: mirror.example\ndefault: deny\n",
        "proposed": "# What may leave\n- host: mirror.eu.example\n- host: pypi.org\ndefault: deny\n",
    },
}
QUESTION = {"title": "Which region?", "justification": "Both have room.", "choices": ["eu", "us"]}
SCALE = {
    "title": "Remove the old workers",
    "justification": "They are idle.",
    "operation": "ops/remove",
    "arguments": {"count": 4, "zone": "a"},
    "input_schema": {"properties": {"count": {"type": "integer"}, "zone": {"enum": ["a", "b"]}}},
    "policy": {"destructive": True},
}


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    program = find_chromium()
    if program is None:
        pytest.skip("no Chromium here")
    with playwright.sync_playwright() as driver:
        started = driver.chromium.launch(executable_path=program, args=["--no-sandbox", "--disable-gpu"])
        yield started
        started.close()


@pytest.fixture
def show(browser: Any) -> Iterator[Callable[..., Any]]:
    """A function that opens a page. Its own policy is off, because it keeps axe out."""
    contexts = []

    def open_page(address: str, theme: str = "light", viewport: Any = WIDE) -> Any:
        context = browser.new_context(viewport=viewport, color_scheme=theme, reduced_motion="reduce", bypass_csp=True)
        context.set_default_timeout(WITHIN_MS)
        contexts.append(context)
        page = context.new_page()
        page.goto(address)
        return page

    yield open_page
    for context in contexts:
        context.close()


@pytest.fixture(scope="module")
def site_pages() -> list[Path]:
    subprocess.run([sys.executable, "-m", "tools.site"], cwd=site.ROOT, check=True, timeout=site.BUILD_LIMIT_S)
    return sorted(site.SITE.rglob("*.html"))


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of a run that failed: with artifacts, tries, a timeout, a skipped step and ends of logs."""
    folder = tmp_path_factory.mktemp("report")
    (folder / "nightly.yaml").write_text(FLOW)
    page = folder / "report.html"
    shotclock = [sys.executable, "-m", "shotclock"]
    where: Any = {
        "cwd": folder,
        "env": {**os.environ, "SHOTCLOCK_HOME": str(folder / "home")},
        "timeout": ENDED_WITHIN_S,
    }
    ran = subprocess.run([*shotclock, "run", "nightly.yaml", "--run-id", "nightly-1"], capture_output=True, **where)
    assert ran.returncode == 3, ran
    subprocess.run([*shotclock, "report", "nightly-1", "--html", page], check=True, capture_output=True, **where)
    return page


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server with proposals of each kind, one decided, and a run under way."""
    folder = tmp_path_factory.mktemp("served")
    (folder / "release.yaml").write_text(WAITING_FLOW)
    with serving(folder) as server:
        operator = server.token("anna", Role.OPERATOR)
        decided = server.propose(title="Restart the mirror?", justification="It is slow.", choices=["yes", "no"])
        decision = {
            "status": "approved",
            "answer": "yes",
            "action_hash": server.whole(decided, operator)["action_hash"],
            "notes": "At night.",
        }
        assert server.ask("POST", f"/api/inbox/{decided}/decision", decision, token=operator).status == 200
        for proposal in (FILE, QUESTION, SCALE):
            server.propose(**proposal)
        run = subprocess.Popen(
            [sys.executable, "-m", "shotclock", "run", "release.yaml", "--run-id", "release-1"],
            cwd=folder,
            env={**os.environ, "SHOTCLOCK_HOME": str(server.home)},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            yield server
        finally:
            run.terminate()
            run.wait(ENDED_WITHIN_S)


def find_violations(page: Any) -> list[str]:
    """Return what axe finds on a page, each with its impact and its first elements."""
    page.evaluate(AXE.read_text("utf-8"))
    found = page.evaluate("axe.run(document, {resultTypes: ['violations']})")["violations"]
    return [
        f"{each['impact']} {each['id']} ({len(each['nodes'])}): "
        + "; ".join(f"{node['target']} {node['failureSummary']}" for node in each["nodes"][:3])
        for each in found
    ]


def assert_accessible(page: Any) -> None:
    found = find_violations(page)
    print(page.url, *found, sep="\n  ")
    assert not [each for each in found if each.split()[0] in FAILING_IMPACTS]


def sign_in(page: Any, served: Served) -> None:
    token = served.token(f"operator-{os.urandom(4).hex()}", Role.OPERATOR)
    page.get_by_label("Operator token").fill(token)
    page.get_by_role("button", name="Sign in").click()
    expect(page.locator("body")).to_have_attribute("data-link", "live", timeout=WITHIN_MS)


def overflow(page: Any) -> int:
    """Return how many pixels a page is wider than its window."""
    root = "document.scrollingElement"
    return max(0, int(page.evaluate(f"{root}.scrollWidth - {root}.clientWidth")))


@pytest.mark.parametrize("theme", THEMES)
@pytest.mark.parametrize("name", SITE_PAGES)
def test_a_page_of_the_site_is_accessible(name: str, theme: str, site_pages: list[Path], show: Any) -> None:
    assert_accessible(show((site.SITE / name).as_uri(), theme))


@pytest.mark.parametrize("theme", THEMES)
def test_the_report_of_a_failed_run_is_accessible_closed_and_open(theme: str, report: Path, show: Any) -> None:
    page = show(report.as_uri(), theme)
    assert_accessible(page)
    page.evaluate("document.querySelectorAll('details').forEach(each => { each.open = true })")
    expect(page.get_by_text("assertion failed").first).to_be_visible()
    assert_accessible(page)


@pytest.mark.parametrize("theme", THEMES)
def test_the_operators_page_is_accessible(theme: str, served: Served, show: Any) -> None:
    page = show(served.url, theme)
    expect(page.get_by_label("Operator token")).to_be_visible()
    assert_accessible(page)
    sign_in(page, served)
    for proposal in (FILE, QUESTION, SCALE):
        page.locator("li.row", has_text=str(proposal["title"])).click()
        expect(page.locator("#detail h2")).to_contain_text(str(proposal["title"]))
        assert_accessible(page)
    page.get_by_role("button", name="Approve").first.click()
    assert_accessible(page)
    page.keyboard.press("Escape")
    page.get_by_role("tab", name="History").click()
    page.locator("li.row", has_text="Restart the mirror").click()
    expect(page.locator("#detail")).to_contain_text("At night.")
    assert_accessible(page)
    page.get_by_role("tab", name="Running").click()
    page.locator("li.row", has_text="release").click()
    expect(page.locator("li.step", has_text="build")).to_contain_text("left")
    assert_accessible(page)
    page.get_by_role("button", name="Keyboard shortcuts").click()
    assert_accessible(page)


def test_no_page_of_the_site_is_wider_than_a_phone(site_pages: list[Path], show: Any) -> None:
    page = show((site.SITE / "index.html").as_uri(), viewport=PHONE)
    wide = {}
    for path in site_pages:
        page.goto(path.as_uri())
        if over := overflow(page):
            wide[path.relative_to(site.SITE).as_posix()] = over
    assert not wide


def test_the_report_and_the_operators_page_are_not_wider_than_a_phone(report: Path, served: Served, show: Any) -> None:
    page = show(report.as_uri(), viewport=PHONE)
    page.evaluate("document.querySelectorAll('details').forEach(each => { each.open = true })")
    assert overflow(page) == 0
    page = show(served.url, viewport=PHONE)
    assert overflow(page) == 0
    sign_in(page, served)
    for tab, title in (("Waiting", "Let the build"), ("Waiting", "Remove the old"), ("Running", "release")):
        page.get_by_role("tab", name=tab).click()
        assert overflow(page) == 0
        page.locator("li.row", has_text=title).click()
        expect(page.locator("#detail h2").first).to_contain_text(title)
        assert overflow(page) == 0
        page.locator("#detail .back").click()
