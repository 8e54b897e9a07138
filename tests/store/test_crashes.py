"""kill -9 at any moment: the store opens clean, and whatever was said to be committed is there."""

import os
import signal
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import pytest

from shotclock.store.store import Store
from tests.store.work import NOW

pytestmark = [pytest.mark.usefixtures("no_survivors"), pytest.mark.slow]

WRITES_WITHIN_S = 30  # a Python that starts on a loaded machine
GONE_WITHIN_S = 10

# Says each number on stdout only after the store said it is committed.
WRITER = """
import os, sys
from pathlib import Path
from shotclock.core.limits import WallTime
from shotclock.store.store import Store
from tests.store.work import NOW, all_alive, holder, new_job

store = Store.open(Path(sys.argv[1]))
store.jobs.attach_or_create(new_job(), all_alive)
number = 0
while True:
    number += 1
    store.checkpoints.save("k", "f", {"number": number, "ballast": "x" * (number * 37 % 5000)}, NOW)
    store.jobs.progress("job1", number, None, None, NOW)
    store.locks.acquire(f"lock{number}", holder=holder(), label="", token=str(number), now=NOW, is_alive=all_alive)
    os.write(1, b"%d\\n" % number)
"""


@pytest.mark.parametrize("lines", [1, 2, 17, 150, 700])
def test_what_was_said_to_be_committed_is_there_after_kill_9(home: Path, lines: int):
    said = home.parent / "said"
    with open(said, "wb") as output:
        writer = subprocess.Popen([sys.executable, "-c", WRITER, home], stdout=output, cwd=Path.cwd())
    give_up_at = time.monotonic() + WRITES_WITHIN_S
    while said.read_bytes().count(b"\n") < lines:
        assert time.monotonic() < give_up_at and writer.poll() is None, said.read_bytes()
        time.sleep(0.001)
    writer.send_signal(signal.SIGKILL)
    writer.wait(GONE_WITHIN_S)
    committed = int(said.read_bytes().split()[-1])

    with Store.open(home) as store:
        found = store.checkpoints.load("k").state
        assert found["number"] in (committed, committed + 1)
        assert len(found["ballast"]) == found["number"] * 37 % 5000
        job = store.jobs.get("job1")
        assert committed <= job.progress_done <= found["number"]
        assert committed <= len(store.locks.list()) <= found["number"]
        store.checkpoints.save("k", "f", "goes on", NOW)
    connection = sqlite3.connect(home / "shotclock.db")
    assert connection.execute("PRAGMA integrity_check").fetchone()[0] == "ok"
    connection.close()


OPENER = """
import sys
from pathlib import Path
from shotclock.store.store import Store
sys.stdout.write("ready\\n"); sys.stdout.flush()
Store.open(Path(sys.argv[1]))
"""


def test_a_creation_that_is_killed_anywhere_leaves_nothing_that_stops_the_next(home: Path):
    for round in range(12):
        folder = home / str(round)
        opener = subprocess.Popen([sys.executable, "-c", OPENER, folder], stdout=subprocess.PIPE)
        assert opener.stdout is not None and opener.stdout.readline() == b"ready\n"
        pause_until = time.perf_counter() + round * 0.0008  # from before the file is there to after the migration
        while time.perf_counter() < pause_until:
            pass
        os.kill(opener.pid, signal.SIGKILL)
        opener.wait(GONE_WITHIN_S)
        opener.stdout.close()
        with Store.open(folder) as store:
            store.checkpoints.save("k", "f", round, NOW)
            assert store.checkpoints.load("k").state == round
