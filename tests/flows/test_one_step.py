"""One command step of a run is one admission of its own, and passes few files of ours."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.apps.server.client import ROOT

RUN_WITHIN_S = 60
FLOW = "steps:\n  one:\n    type: command\n    exec: echo done\n"
# Files of ours that the process of the run executes: 63 since the scheduler is five modules, and two more on a busy
# machine. The zygote, the supervisor and the command's own process execute four more.
MOST_FILES = 70


@pytest.mark.slow
def test_a_run_of_one_command_is_admitted_once_and_so_is_its_step_and_both_pass_few_files(tmp_path: Path) -> None:
    (tmp_path / "flow.yaml").write_text(FLOW)
    lines: list[str] = []
    for number in range(2):  # the first run of a home creates its store, and deletes what is too old in it
        notes = tmp_path / f"notes-{number}"
        flow = str(tmp_path / "flow.yaml")
        words = [sys.executable, "-m", "tests.apps.server.walked", str(notes), "run", flow, "--json"]
        environment = {**os.environ, "SHOTCLOCK_HOME": str(tmp_path / "home")}
        subprocess.run(words, env=environment, cwd=ROOT, check=True, capture_output=True, timeout=RUN_WITHIN_S)
        lines = notes.read_text().splitlines()
    files = sorted({line for line in lines if line.startswith("file ")})
    assert [line for line in lines if line.startswith("admit ")] == ["admit run flow", "admit step one"], lines
    assert len(files) <= MOST_FILES, f"{len(files)}: {files}"
