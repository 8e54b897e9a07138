"""Every Python block of the pages and every example passes pyright, as an author's editor runs it."""

import json
import subprocess
import sys
from pathlib import Path

from tests.conformance.published_servers import FOLDER
from tests.docs.test_types import write_shown

CHECKED_WITHIN_S = 300.0
IGNORED_RULES = {"reportMissingImports"}
"""Blocks import modules that the page has them write under another name."""


def test_examples_and_python_blocks_pass_pyright(tmp_path: Path) -> None:
    written = write_shown(tmp_path)
    config = {"pythonVersion": "3.11", "typeCheckingMode": "standard"}
    (tmp_path / "pyrightconfig.json").write_text(json.dumps(config))
    ran = subprocess.run(
        [FOLDER / "node_modules/.bin/pyright", "--outputjson", "--pythonpath", sys.executable],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=CHECKED_WITHIN_S,
    )
    report = json.loads(ran.stdout)
    assert report["summary"]["filesAnalyzed"] == len(written), ran.stdout[-2000:]
    wrong = [
        f"{written[Path(each['file']).name]} +{each['range']['start']['line'] + 1}: {each['message']}"
        for each in report["generalDiagnostics"]
        if each["severity"] == "error" and each.get("rule") not in IGNORED_RULES
    ]
    assert not wrong, "\n".join(wrong)
