"""Build the site of the documentation into build/site: `make site`.

README.md becomes its first page. Links that lead out of docs/ become links to the repository.
"""

from __future__ import annotations

import html
import posixpath
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
PAGES = ROOT / "build" / "site-pages"
SITE = ROOT / "build" / "site"
BUILD_LIMIT_S = 300.0

_LINK = re.compile(r"(?<=\]\()(?P<target>[^)#\s]+)(?=[)#\s])")
_FENCE = re.compile(r"^(?P<fence>```+)(?P<language>\w+)?[^\n]*$", re.MULTILINE)
_HEADING = re.compile(r"^# (?P<title>.+)$", re.MULTILINE)
_COMMENT = re.compile(r"^<!--.*?-->\n+", re.DOTALL)
_CODE = re.compile(r'<div class="highlight">(?=(?P<code><pre>.*?</pre>))', re.DOTALL)
_TAG = re.compile(r"<[^>]+>")
_LANGUAGES = {"json": "json", "python": "python", "yaml": "yaml", "diff": "diff", "console": "console"}


def repository() -> str:
    """Return the address of the repository's files."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    return f"{project['urls']['Repository']}/blob/main"


def site_page(path: Path) -> str:
    """Return a file of the repository as the path of its page on the site, or its address in the repository."""
    if path == ROOT / "README.md":
        return "index.md"
    if path.is_relative_to(DOCS):
        return path.relative_to(DOCS).as_posix()
    return f"{repository()}/{path.relative_to(ROOT).as_posix()}"


def site_text(page: Path) -> str:
    """Return the text of a page with the links of the site."""

    def link(found: re.Match[str]) -> str:
        target = found["target"]
        if re.match(r"[a-z]+:", target):
            return target
        place = site_page((page.parent / target).resolve())
        return place if ":" in place else posixpath.relpath(place, posixpath.dirname(site_page(page)) or ".")

    def fence(found: re.Match[str]) -> str:
        return found["fence"] + _LANGUAGES.get(found["language"] or "", "")

    return _FENCE.sub(fence, _LINK.sub(link, page.read_text("utf-8")))


def pages() -> list[Path]:
    """Return the pages of the site, README first."""
    return [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]


def index_for_models() -> str:
    """Return llms.txt: each page with its title and its first sentence."""
    lines = ["# Shotclock", "", "> " + first_sentence((ROOT / "README.md").read_text("utf-8")), "", "## Pages", ""]
    for page in pages()[1:]:
        text = page.read_text("utf-8")
        title = _HEADING.search(text)
        assert title is not None, f"{page.name} has no title"
        lines.append(f"- [{title['title']}]({site_page(page)}): {first_sentence(text)}")
    return "\n".join(lines) + "\n"


def first_sentence(text: str) -> str:
    """Return the first sentence of prose below the title, without marks and links."""
    prose = re.sub(r"^```.*?^```$", "", _COMMENT.sub("", text).partition("\n")[2], flags=re.DOTALL | re.MULTILINE)
    for block in prose.split("\n\n"):
        if block.strip() and block.lstrip()[0] not in "#|!<-":
            plain = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", block)
            return re.split(r"(?<=\.)\s", re.sub(r"[*`]", "", " ".join(plain.split())), maxsplit=1)[0]
    return ""


def write_pages() -> None:
    """Write the pages, pictures and llms.txt that the site is built from."""
    shutil.rmtree(PAGES, ignore_errors=True)
    shutil.copytree(DOCS, PAGES)
    for page in pages():
        (PAGES / site_page(page)).write_text(site_text(page), "utf-8")
    (PAGES / "llms.txt").write_text(index_for_models(), "utf-8")


def commands_of(session: str) -> str:
    """Return the commands of a console session, without its prompts and its output."""
    commands: list[str] = []
    goes_on = False  # the lines of a here-document follow its command
    for line in session.splitlines():
        goes_on = line.startswith("$ ") or (goes_on and line.startswith("> "))
        commands += [line[2:]] if goes_on else []
    return "\n".join(commands)


def offer_commands(page: Path) -> None:
    """Let the copy button of a console session copy its commands alone."""

    def mark(found: re.Match[str]) -> str:
        commands = commands_of(html.unescape(_TAG.sub("", found["code"])))
        return f'<div class="highlight" data-copy="{html.escape(commands)}">' if commands else found[0]

    page.write_text(_CODE.sub(mark, page.read_text("utf-8")), "utf-8")


def main() -> int:
    write_pages()
    shutil.rmtree(SITE, ignore_errors=True)
    command = [Path(sys.executable).with_name("zensical"), "build", "--clean", "--strict", "-f", ROOT / "mkdocs.yml"]
    try:
        code = subprocess.run(command, cwd=ROOT, timeout=BUILD_LIMIT_S).returncode
        # llms.txt lists the pages as Markdown.
        shutil.copytree(PAGES, SITE, dirs_exist_ok=True)
        for page in SITE.rglob("*.html"):
            offer_commands(page)
        return code
    except subprocess.TimeoutExpired:
        print(f"the site was not built in {BUILD_LIMIT_S:g} s", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
