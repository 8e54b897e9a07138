"""The tools that audit-repo.yaml asks over MCP: what should not be in a repository, and what should."""

import re
from pathlib import Path
from typing import Any

from shotclock import App

app = App("audit-tools", default_timeout="30s")

SECRET = re.compile(r"(?i)\b(?:api[_-]?key|secret|password|token)\b\s*[:=]\s*[\"'][^\"'\s]{8,}[\"']")
LARGEST_READ = 1_000_000


def files(folder: Path) -> list[Path]:
    return [file for file in sorted(folder.rglob("*")) if file.is_file() and ".git" not in file.parts]


@app.command(mutates=False)
def find_secrets(folder: Path) -> dict[str, Any]:
    """Lines that look like credentials; the credentials themselves are not repeated."""
    found = []
    for file in files(folder):
        if file.stat().st_size <= LARGEST_READ:
            for number, line in enumerate(file.read_text("utf-8", "replace").splitlines(), 1):
                if SECRET.search(line):
                    found.append(f"{file.relative_to(folder)}:{number}")
    return {"count": len(found), "places": found}


@app.command(mutates=False)
def find_licences(folder: Path) -> dict[str, Any]:
    """The files that say what one may do with the rest."""
    names = [str(file.relative_to(folder)) for file in files(folder) if file.stem.upper() in ("LICENSE", "COPYING")]
    return {"count": len(names), "files": names}


if __name__ == "__main__":
    app()
