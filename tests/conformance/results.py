"""The tables of docs/conformance.md. Tests record cells, `python -m tests.conformance.results FOLDER` writes them."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

from tests.conformance.published_servers import FOLDER

PAGE = Path(__file__).parents[2] / "docs" / "conformance.md"
FILE = "results"


def record(table: str, row: str, column: str, cell: str) -> None:
    with open(FOLDER / FILE, "a", encoding="utf-8") as file:
        file.write(json.dumps([table, row, column, cell], ensure_ascii=False) + "\n")


def tables(lines: list[str]) -> dict[str, str]:
    """Return each table in Markdown, with rows and columns in alphabetical order: tests run in any order."""
    cells: dict[str, dict[tuple[str, str], str]] = {}
    for line in lines:
        table, row, column, cell = json.loads(line)
        cells.setdefault(table, {})[row, column] = cell
    drawn = {}
    for table, known in cells.items():
        rows, columns = (sorted({key[place] for key in known}) for place in (0, 1))
        head = [f"| | {' | '.join(columns)} |", "|---" * (len(columns) + 1) + "|"]
        body = [f"| {row} | {' | '.join(known.get((row, column), '–') for column in columns)} |" for row in rows]
        drawn[table] = "\n".join([*head, *body])
    return drawn


def write(page: Path, drawn: dict[str, str]) -> None:
    """Replace the tables of the page, and keep those that no test has recorded."""
    text = page.read_text(encoding="utf-8")
    for name, table in drawn.items():
        pattern = rf"(<!-- results of {re.escape(name)} -->\n).*?(<!-- end -->)"
        text, count = re.subn(
            pattern, lambda found, table=table: f"{found[1]}{table}\n{found[2]}", text, flags=re.DOTALL
        )
        assert count == 1, f"docs/conformance.md has no place for the results of {name}"
    page.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    write(PAGE, tables((Path(sys.argv[1]) / FILE).read_text(encoding="utf-8").splitlines()))
