"""The files of other tools in the folders beside this module, and what is expected of each.

`expected.json` holds, by kind and file, why the file is refused, or the notes of its import. This writes it anew:
`python -m tests.workflow.foreign.foreign_files`; read the difference before it is committed.
"""

import json
from pathlib import Path
from typing import Any

from shotclock.core.errors import Failure
from shotclock.workflow.foreign.importing import import_file

HERE = Path(__file__).parent
EXPECTED = HERE / "expected.json"
KINDS = {"visor": 40, "actions": 15, "taskfile": 15, "dagu": 10}  # and how many files there are at least
RUN_AT_LEAST = 10  # files of each kind


def names(kind: str) -> list[str]:
    return sorted(path.name for path in (HERE / kind).iterdir() if path.suffix in (".yml", ".yaml"))


def described(notes: list[dict[str, Any]]) -> list[str]:
    return [
        f"{note['line']} {note['key']} {'lost' if note['lost'] else 'differs'}: {note['message']}" for note in notes
    ]


def outcome_of(kind: str, name: str) -> str | list[str]:
    """Return the refusal of a file, or its notes."""
    file = HERE / kind / name
    try:
        return described(import_file(str(file), kind).to_answer())
    except Failure as failure:
        return str(failure).replace(f"{file.parent}/", "")


if __name__ == "__main__":
    outcomes = {kind: {name: outcome_of(kind, name) for name in names(kind)} for kind in KINDS}
    EXPECTED.write_text(json.dumps(outcomes, indent=1, ensure_ascii=False) + "\n")
