"""Every topic of the benchmarks runs to its end, in its shortest form; no figure is judged here."""

import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.__main__ import TOPICS
from shotclock.ui._browser import find_chromium

ROOT = Path(__file__).parents[2]
LIMIT_S = 110


def run(*words: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-m", "benchmarks", "--once", *words]
    return subprocess.run(argv, cwd=cwd, capture_output=True, text=True, timeout=LIMIT_S)


@pytest.mark.soak  # half a minute of CPU; mypy finds what a topic calls by a name that is gone
@pytest.mark.parametrize("topic", TOPICS)
def test_a_topic_runs_to_its_end(topic: str) -> None:
    if topic == "ui" and find_chromium() is None:
        pytest.skip("no Chromium here")
    ran = run(topic)
    assert ran.returncode == 0 and "no result" not in ran.stdout, ran.stderr[-3000:]


@pytest.mark.slow
def test_a_topic_that_fails_is_named_at_the_end_and_hides_none_after_it(tmp_path: Path) -> None:
    (tmp_path / "benchmarks").mkdir()
    for file in (ROOT / "benchmarks").glob("*.py"):
        (tmp_path / "benchmarks" / file.name).write_text(file.read_text())
    (tmp_path / "benchmarks/fresh.py").write_text("from shotclock import no_such_name\n")
    ran = run("fresh", "calls", cwd=tmp_path)
    assert ran.returncode == 1 and "Inline no-op call" in ran.stdout, ran.stdout
    assert ran.stdout.index("fresh: failed") < ran.stdout.index("Inline no-op call")
    assert ran.stderr.splitlines()[-1] == "fresh: failed", ran.stderr
