"""Files of Visor in `files/`, and what is expected of each.

`expected.json` holds, by file, why it is refused, or the notes of its import. This writes it anew:
`python -m tests.flows.visor.foreign_files`; read the difference before it is committed.
"""

import json
from pathlib import Path
from typing import Any

from shotclock.core.errors import Failure
from shotclock.flows.visor.importing import import_file

HERE = Path(__file__).parent
FILES = HERE / "files"
EXPECTED = HERE / "expected.json"


def names() -> list[str]:
    return sorted(path.name for path in FILES.iterdir() if path.suffix in (".yml", ".yaml"))


def described(notes: list[dict[str, Any]]) -> list[str]:
    return [
        f"{note['line']} {note['key']} {'lost' if note['lost'] else 'differs'}: {note['message']}" for note in notes
    ]


def outcome_of(name: str) -> str | list[str]:
    """Return the refusal of a file, or its notes."""
    try:
        return described(import_file(str(FILES / name)).to_answer())
    except Failure as failure:
        return str(failure).replace(f"{FILES}/", "")


if __name__ == "__main__":
    outcomes = {name: outcome_of(name) for name in names()}
    EXPECTED.write_text(json.dumps(outcomes, indent=1, ensure_ascii=False) + "\n")
