"""`pyright --verifytypes` knows the type of every public name, so that an editor shows what the code says."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.conformance.published_servers import FOLDER

CHECKED_WITHIN_S = 300.0
FEWEST_NAMES = 10_000
EXCEPTIONS: dict[str, str] = {}
"""Classes with an attribute that has no written type, and the reason."""


def test_pyright_knows_the_type_of_every_public_name_but_the_listed_ones(tmp_path: Path) -> None:
    # It looks for the package in the environment of the first `python` on PATH; `--pythonpath` does not count here.
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    ran = subprocess.run(
        [FOLDER / "node_modules/.bin/pyright", "--outputjson", "--ignoreexternal", "--verifytypes", "shotclock"],
        cwd=tmp_path,
        env={**os.environ, "PATH": path},
        capture_output=True,
        text=True,
        timeout=CHECKED_WITHIN_S,
    )
    report = json.loads(ran.stdout)
    assert not report["generalDiagnostics"], report["generalDiagnostics"]
    names = report["typeCompleteness"]["symbols"]
    assert sum(each["isExported"] for each in names) > FEWEST_NAMES
    unclear = {each["name"]: _reasons(each) for each in names if not each["isTypeKnown"] or each["isTypeAmbiguous"]}
    wrong = [f"{name}: {reasons}" for name, reasons in unclear.items() if _exception(name) not in EXCEPTIONS]
    assert not wrong, "\n".join(wrong)
    settled = EXCEPTIONS.keys() - {_exception(name) for name in unclear}
    assert not settled, f"no exceptions any more: {', '.join(sorted(settled))}"


def _exception(name: str) -> str:
    """Return the listed class of a name or of its attribute, else the name."""
    return next((each for each in EXCEPTIONS if name == each or name.startswith(f"{each}.")), name)


def _reasons(name: dict[str, Any]) -> str:
    return "; ".join(each["message"] for each in name["diagnostics"] if "docstring" not in each["message"])
