"""The page on the design and the AGENTS.md of each package: they name what is there, and nothing else."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
SRC = ROOT / "src" / "shotclock"
PAGE = (ROOT / "docs" / "design.md").read_text("utf-8")
ROOMS = sorted(folder.parent for folder in SRC.glob("*/__init__.py"))
LONGEST_MAP = 60  # lines of an AGENTS.md


def section(title: str) -> str:
    return PAGE.split(f"### {title}\n", 1)[1].split("\n#", 1)[0]


def test_the_map_has_every_package_and_no_other() -> None:
    tree = PAGE.split("```text\n", 1)[1].split("```", 1)[0]
    named = set(re.findall(r"^  (\w+)/", tree, re.MULTILINE)) | {"testing"}
    assert named == {room.name for room in ROOMS}


def test_the_way_of_a_call_and_the_words_are_short_enough_to_be_read() -> None:
    way = section("The way of one call").split("```text\n", 1)[1].split("```", 1)[0]
    assert len(way.splitlines()) <= 12
    for module in re.findall(r"\b([a-z]+/\w+(?:/\w+)?)\b", way):
        assert (SRC / f"{module}.py").exists(), module
    words = [line for line in section("Words").splitlines() if line.startswith("| ")][1:]
    assert 10 <= len(words) <= 20


def test_every_file_that_the_pages_name_is_there() -> None:
    pages = [ROOT / "docs" / "design.md", *(ROOT / "docs" / "design").glob("*.md")]
    named = {name for page in pages for name in re.findall(r"`((?:\w+/)+\w+\.py)`", page.read_text("utf-8"))}
    assert len(named) > 30
    missing = [name for name in sorted(named) if not ((SRC / name).exists() or (ROOT / name).exists())]
    assert not missing


def test_every_package_has_a_short_map_of_all_its_modules() -> None:
    for room in ROOMS:
        if room.name == "testing":
            continue
        text = (room / "AGENTS.md").read_text("utf-8")
        assert len(text.splitlines()) <= LONGEST_MAP, room.name
        words = set(re.findall(r"\w+", text))
        modules = {file.stem for file in room.rglob("*.py")} - {"__init__"}
        assert not modules - words, f"{room.name}/AGENTS.md does not name these modules"
        named = set(re.findall(r"`(\w+(?:/\w+)*\.py)`", text))
        gone = {name for name in named if not any((at / name).exists() for at in (room, SRC, ROOT))}
        assert not gone, f"{room.name}/AGENTS.md names modules that are not there"


def test_comments_cite_contracts_by_name() -> None:
    numbered = re.compile(r"docs/design\.md:? R\d|\(R\d+[a-z]?\)|\bR\d+[a-z]?:")
    cited = [file.name for file in SRC.rglob("*.py") if numbered.search(file.read_text("utf-8"))]
    assert not cited
