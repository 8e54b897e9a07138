"""The Visor files of these tests, and what is expected of each: its notes, or why it is refused.

`visor_expected.json` holds, by file, `refusal`, or `notes` as [line, key, lost]. `python visor_files.py` writes it;
read the difference before it is committed.
"""

import json
from pathlib import Path
from typing import Any

from shotclock.core.errors import Failure
from shotclock.workflow.foreign.importing import import_file

FOLDER = Path(__file__).parent / "visor"
EXPECTED = Path(__file__).parent / "visor_expected.json"


def names() -> list[str]:
    return sorted(path.stem for path in FOLDER.glob("*.yaml"))


def outcome_of(name: str) -> dict[str, Any]:
    try:
        made = import_file(str(FOLDER / f"{name}.yaml"), "visor")
    except Failure as failure:
        return {"refusal": str(failure).replace(f"{FOLDER}/", "")}
    return {"notes": [[note.line, note.key, note.is_lost] for note in made.notes]}


if __name__ == "__main__":
    EXPECTED.write_text(json.dumps({name: outcome_of(name) for name in names()}, indent=1) + "\n")
