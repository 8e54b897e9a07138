"""The site is built from README and docs without a warning, and each of its links leads somewhere."""

import fcntl
import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
from ruamel.yaml import YAML

from shotclock.core.errors import error_entries
from shotclock.ui._browser import find_chromium
from tools import site

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.slow

LARGEST_PICTURE = 150_000  # bytes


class Page(HTMLParser):
    """The links, files and anchors of a page."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.copied: list[str] = []
        self.links: list[str] = []
        self.files: list[str] = []
        self.pictures: dict[str, str] = {}
        self.anchors: set[str] = set()
        self.feed(path.read_text("utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attrs}
        self.copied += [values["data-copy"]] if "data-copy" in values else []
        self.anchors |= {values["id"]} if "id" in values else set()
        if tag == "a" and "href" in values:
            self.links.append(values["href"])
        if tag in ("img", "script") and "src" in values:
            self.files.append(values["src"])
        if tag == "img":
            self.pictures[values["src"]] = values.get("alt", "")
        if tag == "source":
            self.files.append(values["srcset"])
        if tag == "link" and values.get("rel") in ("stylesheet", "icon"):
            self.files.append(values["href"])


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> dict[Path, Page]:
    """Build the site once for all processes of the test run, and return its pages."""
    run = os.environ.get("PYTEST_XDIST_TESTRUNUID", str(os.getpid()))
    said = tmp_path_factory.getbasetemp().parent / f"site-{run}"
    with said.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # freed when a process ends, however it does
        if not said.exists():
            done = subprocess.run(
                [sys.executable, "-m", "tools.site"], cwd=ROOT, timeout=100, capture_output=True, text=True
            )
            said.write_text(f"{done.returncode}\n{done.stdout}{done.stderr}")
    assert said.read_text().startswith("0\n") and "No issues found" in said.read_text(), said.read_text()
    return {path: Page(path) for path in sorted(site.SITE.rglob("*.html")) if path.name != "404.html"}


def nav_pages(entries: object) -> list[str]:
    """Return the pages of the navigation."""
    if isinstance(entries, str):
        return [entries]
    children = entries.values() if isinstance(entries, dict) else entries
    return [page for child in children for page in nav_pages(child)]  # type: ignore[attr-defined]


def test_every_page_has_one_place_in_the_navigation() -> None:
    text = (ROOT / "mkdocs.yml").read_text("utf-8").replace("!!python/object/apply:pymdownx.slugs.slugify", "")
    places = nav_pages(YAML(typ="safe").load(text)["nav"])
    assert sorted(places) == sorted(site.site_page(page) for page in site.pages())


def test_every_link_and_anchor_of_the_site_exists(built: dict[Path, Page]) -> None:
    missing = []
    for path, page in built.items():
        for link in page.links + page.files:
            parts = urlsplit(link)
            if parts.scheme or not (parts.path or parts.fragment):
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            target = target / "index.html" if target.is_dir() else target
            if not target.exists() or (
                parts.fragment and target in built and unquote(parts.fragment) not in built[target].anchors
            ):
                missing.append(f"{path.relative_to(site.SITE)}: {link}")
    assert len(built) > 40
    assert not missing


def test_every_picture_is_shown_small_and_has_an_alternative_text(built: dict[Path, Page]) -> None:
    shown = {(path.parent / unquote(file)).resolve() for path, page in built.items() for file in page.files}
    for picture in (site.DOCS / "pictures").iterdir():
        assert picture.stat().st_size <= LARGEST_PICTURE, picture.name
        assert site.SITE / "pictures" / picture.name in shown, f"{picture.name} is on no page"
    texts = {name: text for page in built.values() for name, text in page.pictures.items()}
    assert len(texts) > 4
    assert not [name for name, text in texts.items() if len(text) < 20]


def test_the_site_asks_no_other_host_for_files(built: dict[Path, Page]) -> None:
    assert not [file for page in built.values() for file in page.files if urlsplit(file).netloc]


def test_links_that_leave_the_documentation_lead_to_the_repository(built: dict[Path, Page]) -> None:
    home = site.repository()
    outside = {link for page in built.values() for link in page.links if link.startswith(home)}
    assert len(outside) > 10
    for link in outside:
        assert (ROOT / urlsplit(link).path.partition("/blob/main/")[2]).exists(), link


def test_models_get_an_index_with_a_sentence_of_each_page(built: dict[Path, Page]) -> None:
    lines = [line for line in (site.SITE / "llms.txt").read_text("utf-8").splitlines() if line.startswith("- ")]
    assert len(lines) == len(site.pages()) - 1
    for line in lines:
        place, sentence = line.partition("](")[2].split("): ")
        assert (site.SITE / place).exists() and sentence, line


def test_every_code_of_the_troubleshooting_page_exists() -> None:
    text = (ROOT / "docs/howto/troubleshooting.md").read_text("utf-8")
    codes = {
        code
        for row in re.findall(r"^\| ((?:`[A-Z_]+`(?:, )?)+)", text, re.MULTILINE)
        for code in re.findall(r"[A-Z_]+", row)
    }
    assert len(codes) > 20
    assert codes <= {entry.code for entry in error_entries()}


def test_every_public_name_has_a_docstring() -> None:
    page = (ROOT / "docs/reference/api.md").read_text("utf-8")
    assert not re.findall(r"^```text\n([^`]+)\n```\n+(?=```|#)", page, re.MULTILINE)


def test_the_corpora_are_as_large_as_the_page_says() -> None:
    page = (ROOT / "docs/testing.md").read_text("utf-8")
    claimed = {name: int(count) for count, name in re.findall(r"\| (\d+) \| \[(tests/[^]]+)\]", page)}
    assert len(claimed) > 10
    if find_chromium() is None:  # one of its servers needs it
        del claimed["tests/conformance/test_kill_matrix.py"]
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-m", "", *claimed]
    listed = subprocess.run(command, cwd=ROOT, timeout=100, capture_output=True, text=True).stdout
    counted = {name: len(re.findall(rf"^{re.escape(name)}::", listed, re.MULTILINE)) for name in claimed}
    assert not {name: counted[name] for name in claimed if counted[name] < claimed[name]}
