"""The page on the design: its map has every package, and the code points at rules that exist."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
SRC = ROOT / "src" / "shotclock"
PAGE = (ROOT / "docs" / "design.md").read_text("utf-8")


def section(title: str) -> str:
    return PAGE.split(f"### {title}\n", 1)[1].split("\n#", 1)[0]


def test_the_map_has_every_package_and_no_other() -> None:
    tree = PAGE.split("```text\n", 1)[1].split("```", 1)[0]
    packages = {folder.parent.name for folder in SRC.glob("*/__init__.py")}
    assert set(re.findall(r"^  (\w+)/", tree, re.MULTILINE)) == packages


def test_the_way_of_a_call_and_the_words_are_short_enough_to_be_read() -> None:
    way = section("The way of one call").split("```text\n", 1)[1].split("```", 1)[0]
    assert len(way.splitlines()) <= 12
    words = [line for line in section("Words").splitlines() if line.startswith("| ")][1:]
    assert 10 <= len(words) <= 20


def test_every_file_that_the_page_names_is_there() -> None:
    named = set(re.findall(r"`((?:\w+/)+\w+\.py)`", PAGE))
    assert len(named) > 30
    missing = [name for name in sorted(named) if not ((SRC / name).exists() or (ROOT / name).exists())]
    assert not missing


def test_every_pointer_in_the_code_hits_a_rule() -> None:
    numbered = re.findall(r"^\*\*(R\d+[a-z]?)\.", PAGE, re.MULTILINE)
    assert len(numbered) == len(set(numbered)) > 40
    pointed_at = set()
    for file in SRC.rglob("*.py"):
        for listed in re.findall(r"docs/design\.md: ((?:R\d+[a-z]?(?:, )?)+)", file.read_text("utf-8")):
            pointed_at.update(listed.split(", "))
    assert pointed_at <= set(numbered)
