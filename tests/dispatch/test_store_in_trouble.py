"""A store that is locked, slow or full at a random moment under runs, jobs, the inbox and `wrap`."""

import asyncio
import contextlib
import json
import os
import random
import resource
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from shotclock.people.inbox import Inbox
from shotclock.store.store import Store
from tests.people.work import AGENT, ANN, APPROVE, operation
from tests.rows import corners
from tests.store.locked import held
from tests.wrap.client import wrapped

pytestmark = pytest.mark.usefixtures("no_survivors", "warm_starts")

SHOTCLOCK = [sys.executable, "-m", "shotclock"]
ENDS_WITHIN_S = 120.0
STEPS = 4
FLOW = "timeout: 100s\nsteps:\n" + "".join(
    f"  s{number}: {{exec: 'sleep 0.2; echo {number} >> marks'{f', depends_on: s{number - 1}' if number else ''}}}\n"
    for number in range(STEPS)
)
FLOW += "finally: [{id: last, exec: echo last >> marks, timeout: 5s}]\n"


def ask(*words: str) -> Any:
    options = [*words[:1], "--json", *words[1:]] if words[0] == "exec" else [*words, "--json"]
    ran = subprocess.run([*SHOTCLOCK, *options], capture_output=True, timeout=ENDS_WITHIN_S, check=False)
    return json.loads(ran.stdout)


@contextlib.contextmanager
def in_trouble(kind: str, home: Path, chance: random.Random, longest_s: float, pids: list[int]) -> Iterator[None]:
    """Make the trouble at random moments until the end of the block."""
    is_over = threading.Event()

    def make() -> None:
        while not is_over.wait(chance.uniform(0, 1.0)):
            if kind == "full":
                for limit in ((0, resource.RLIM_INFINITY), (resource.RLIM_INFINITY, resource.RLIM_INFINITY)):
                    for pid in pids:
                        with contextlib.suppress(OSError):
                            resource.prlimit(pid, resource.RLIMIT_FSIZE, limit)
                    is_over.wait(chance.uniform(0, longest_s / 4))
            else:
                with held(home, longest_s):
                    is_over.wait(chance.uniform(0, longest_s if kind == "locked" else 0.2))

    making = threading.Thread(target=make)
    making.start()
    try:
        yield
    finally:
        is_over.set()
        making.join(ENDS_WITHIN_S)


def check_runs(folder: Path, kind: str, chance: random.Random, longest_s: float) -> None:
    """Every run ends by itself, its `finally` ran, and what it answers is what the store has."""
    home, folders = folder / "home", [folder / f"run{number}" for number in range(3)]
    Store.open(home).close()
    started = []
    for each in folders:
        each.mkdir()
        (each / "flow.yaml").write_text(FLOW)
        words = ["run", str(each / "flow.yaml"), "--run-id", each.name, "--json"]
        started.append(subprocess.Popen([*SHOTCLOCK, *words], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL))
    with in_trouble(kind, home, chance, longest_s, [run.pid for run in started]):
        answers = [json.loads(run.communicate(timeout=ENDS_WITHIN_S)[0]) for run in started]
    for each, answer in zip(folders, answers, strict=True):
        if answer["data"] is None:  # it did not begin
            assert answer["error"]["code"].startswith("STORE_") and not (each / "marks").exists()
            assert answer["meta"]["side_effects"] == "none"
            continue
        marks = (each / "marks").read_text().split()
        assert marks.count("last") == 1, (kind, marks, answer)
        if kind != "full":
            assert answer["ok"] and marks == [*map(str, range(STEPS)), "last"], answer
            assert not answer["warnings"], answer
        if not answer["ok"]:
            assert answer["error"]["code"] == "STORE_UNUSABLE" and not answer["error"]["retryable"], answer
            assert "call again" not in answer["error"]["suggestion"]
        is_whole = "NOT_WRITTEN_DOWN" not in {note["code"] for note in answer["warnings"]}
        with Store.open(home) as store:
            run, steps = store.runs.get(each.name), store.runs.steps(each.name)
        assert run is not None
        if is_whole:
            assert run.ended_at is not None
            assert {name: step.status for name, step in steps.items() if step.status == "succeeded"} == {
                name: step["status"] for name, step in answer["data"]["steps"].items() if step["status"] == "succeeded"
            }


def check_jobs(folder: Path, kind: str, chance: random.Random, longest_s: float) -> None:
    """A job that ends and a job that is stopped have their ends in the store, at the latest when it is well again."""
    ids = {}
    for name, seconds in (("short", "1"), ("long", "60")):
        words = ["--detach", "--name", name, "--owner", "none", "--", "sleep", seconds]
        ids[name] = ask("exec", *words)["data"]["job_id"]
    pids = [int(entry.name) for entry in (folder / "home" / "runners").iterdir()]
    with in_trouble(kind, folder / "home", chance, longest_s, pids):
        stopped = ask("job", "stop", "long")
        assert stopped["ok"] and stopped["data"]["code"] == "CANCELLED", stopped
    waited = ask("job", "wait", ids["short"])
    assert waited["ok"] and waited["data"]["exit_code"] == 0, waited
    assert ask("job", "wait", ids["long"])["error"]["code"] == "CANCELLED"


def check_inbox(folder: Path, kind: str, chance: random.Random, longest_s: float) -> None:
    async def work(store: Store) -> None:
        inbox = Inbox(store)
        for _ in range(5):
            made = await inbox.propose(operation(), AGENT)
            waiting = asyncio.create_task(inbox.wait(made.id, int(ENDS_WITHIN_S * 1000)))
            await inbox.decide(made.id, APPROVE, ANN)
            assert (await waiting).status.allows and (await inbox.use(made.id, made.action_hash))
        assert await inbox.verify_audit() == []
        await inbox.close()

    with Store.open(folder / "home") as store, in_trouble(kind, folder / "home", chance, longest_s, []):
        asyncio.run(asyncio.wait_for(work(store), ENDS_WITHIN_S))


def check_wrap(folder: Path, kind: str, chance: random.Random, longest_s: float) -> None:
    """Clients come and go without waiting, and every one of their calls is listed afterwards."""
    Store.open(folder / "home").close()
    made = 0
    with in_trouble(kind, folder / "home", chance, longest_s, []):
        for _ in range(3):
            with wrapped("--name", "files") as client:
                for number in range(chance.randrange(1, 40)):
                    client.text("echo", text=str(number))
                    made += 1
    assert len(ask("mcp", "log", "--limit", "1000")["data"]["calls"]) == made


def check(folder: Path, kind: str, rounds: int, longest_s: float, monkeypatch: pytest.MonkeyPatch) -> None:
    seed = int(os.environ.get("SHOTCLOCK_TEST_SEED") or random.randrange(2**32))
    print(f"SHOTCLOCK_TEST_SEED={seed}")
    chance = random.Random(seed)
    for number in range(rounds):
        for each in (check_runs, check_jobs, *((check_inbox, check_wrap) if kind != "full" else ())):
            place = folder / f"{each.__name__}{number}"
            place.mkdir()
            monkeypatch.setenv("SHOTCLOCK_HOME", str(place / "home"))
            began = time.monotonic()
            each(place, kind, chance, longest_s)
            print(kind, each.__name__, f"{time.monotonic() - began:.1f} s")


@pytest.mark.slow
@pytest.mark.parametrize("kind", corners(["locked", "slow", "full"], "locked", "full"))
def test_whatever_the_store_suffers_for_moments_nothing_is_lost_and_every_answer_is_true(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    check(tmp_path, kind, 1, 2.0, monkeypatch)


@pytest.mark.soak
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("kind", ["locked", "slow", "full"])
def test_whatever_the_store_suffers_for_long_nothing_is_lost_and_every_answer_is_true(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    check(tmp_path, kind, 10, 13.0, monkeypatch)
