"""A wall clock that is moved by up to an hour at random moments under runs, jobs, proposals and leases.

Nothing lasts longer than its limit, but for what the store could not see.
"""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from shotclock.core.limits import WallTime
from shotclock.core.proposal import Kind, Policy, ProposalRequest, ProposalStatus
from shotclock.store._database import CLOCK_SLACK_MS
from shotclock.store.proposals import NewProposal
from shotclock.store.store import Store
from tests.apps.app.conftest import Home, lines_of, wait_for
from tests.store.work import NOW, all_alive, appears, holder
from tests.wall_clock import HOUR_MS, WallClock

pytestmark = pytest.mark.usefixtures("no_survivors")

STARTS_S = 6.0  # of the programs of a test, on a loaded machine
LIMIT_S = 5.0
TICK_MS = 5_000  # between two changes in the store
TTL_MS = 600_000
MOVES = 3


def seeded() -> random.Random:
    seed = int(os.environ.get("SHOTCLOCK_TEST_SEED") or random.randrange(2**32))
    print(f"SHOTCLOCK_TEST_SEED={seed}")
    return random.Random(seed)


def check_proposals_and_leases(folder: Path, chance: random.Random) -> None:
    """In time that is only counted: so many seconds pass, and the clock is moved now and then."""
    moments = sorted(chance.randrange(TTL_MS // TICK_MS) for _ in range(MOVES))
    offset_ms, ends, back = 0, dict[str, int](), 0
    with Store.open(folder) as store:
        policy = Policy(ttl_ms=TTL_MS)
        ask = ProposalRequest(Kind.OPERATION, "it", operation="a/b", arguments={}, policy=policy)
        store.proposals.attach_or_create_all([NewProposal("p-1", ask, "agent", "watched")], NOW)
        lease: dict[str, Any] = {"holder": holder(), "label": "", "is_alive": all_alive, "lease_ms": TTL_MS}
        store.locks.acquire("l", token="held", now=NOW, **lease)
        for tick in range(1, 10 * TTL_MS // TICK_MS):
            if tick in moments:
                moved_ms = chance.randrange(-HOUR_MS, HOUR_MS)
                offset_ms, back = offset_ms + moved_ms, back + (moved_ms < 0)
            now = WallTime(NOW.ms + tick * TICK_MS + offset_ms)
            store.proposals.end_due(now)
            found = store.proposals.get("p-1")
            assert found is not None
            if found.status is ProposalStatus.EXPIRED:
                ends.setdefault("proposal", tick * TICK_MS)
            if store.locks.acquire("l", token="wants it", now=now, **lease) is None:
                ends.setdefault("lease", tick * TICK_MS)
                store.locks.release("wants it")
            if len(ends) == 2:
                break
            other = ProposalRequest(Kind.OPERATION, "it", operation="a/b", arguments={"n": tick}, policy=policy)
            store.proposals.attach_or_create_all([NewProposal(f"p-{tick}x", other, "agent", str(tick))], now)
            store.locks.acquire(f"l{tick}", token=str(tick), now=now, **lease)
        unseen_ms = (back + 1) * (TICK_MS + CLOCK_SLACK_MS)
        assert set(ends) == {"proposal", "lease"}, moments
        assert max(ends.values()) <= TTL_MS + unseen_ms, (ends, moments)


def check_run(folder: Path, chance: random.Random) -> None:
    """A run that is killed and resumed has its limit once, in all its processes."""
    clock, flow = WallClock(folder / "clock"), folder / "flow.yaml"
    flow.write_text(f"timeout: {LIMIT_S:g}s\nsteps: {{long: {{exec: 'touch begun; sleep 60', idempotent: true}}}}\n")
    env = {**clock.environment, "SHOTCLOCK_HOME": str(folder / "home")}
    words = [sys.executable, "-m", "shotclock", "run"]
    began = time.monotonic()
    with subprocess.Popen([*words, str(flow), "--run-id", "r"], env=env, stderr=subprocess.DEVNULL) as run:
        appears(folder / "begun")
        time.sleep(chance.uniform(0, LIMIT_S / 3))
        clock.move(chance.randrange(-HOUR_MS, HOUR_MS))
        run.kill()
    clock.move(chance.randrange(-HOUR_MS, HOUR_MS))
    resumed = subprocess.run([*words, "--resume", "r", "--json"], env=env, capture_output=True, timeout=60, check=False)
    assert json.loads(resumed.stdout)["error"]["code"] == "TIMEOUT", resumed.stdout
    assert time.monotonic() - began < LIMIT_S + STARTS_S


def check_job(folder: Path, chance: random.Random, tool: Any, home: Home) -> None:
    """A job that is killed and taken up again has its limit once, in all its attempts."""
    clock, program = WallClock(folder / "clock"), tool("long.py")
    words = ["count", folder, "1000", "--timeout", f"{LIMIT_S:g}s", "--fingerprint", folder.name]
    running = program.start(*words, env=clock.environment)
    wait_for(lambda: any(line.isdecimal() for line in lines_of(folder / "notes")), "the work")
    began = time.monotonic()
    time.sleep(chance.uniform(0, LIMIT_S / 3))
    clock.move(chance.randrange(-HOUR_MS, HOUR_MS))
    job = next(each for each in home.jobs() if each.is_active)
    assert job.runner is not None
    os.kill(job.runner.pid, signal.SIGKILL)
    running.ends()
    clock.move(chance.randrange(-HOUR_MS, HOUR_MS))
    answer = program.envelope(*words, env=clock.environment, timeout=60)
    if answer["error"]["code"] == "JOB_LOST":  # the first caller may have had another answer
        answer = program.envelope(*words, env=clock.environment, timeout=60)
    assert answer["error"]["code"] == "TIMEOUT", answer
    assert time.monotonic() - began < LIMIT_S + STARTS_S


def test_proposals_and_leases_end_in_their_time_when_the_clock_is_moved(tmp_path: Path) -> None:
    chance = seeded()
    for number in range(3):
        check_proposals_and_leases(tmp_path / str(number), chance)


@pytest.mark.slow
def test_runs_and_jobs_end_in_their_time_when_the_clock_is_moved(tmp_path: Path, tool: Any, home: Home) -> None:
    check_everything(tmp_path, 1, tool, home)


@pytest.mark.soak
@pytest.mark.timeout(1200)
def test_everything_ends_in_its_time_however_often_the_clock_is_moved(tmp_path: Path, tool: Any, home: Home) -> None:
    check_everything(tmp_path, 12, tool, home)


def check_everything(folder: Path, rounds: int, tool: Any, home: Home) -> None:
    chance = seeded()
    for number in range(rounds):
        places = [folder / f"{name}{number}" for name in ("run", "job", "store")]
        for place in places:
            place.mkdir()
        check_run(places[0], chance)
        check_job(places[1], chance, tool, home)
        for each in range(5):
            check_proposals_and_leases(places[2] / str(each), chance)
