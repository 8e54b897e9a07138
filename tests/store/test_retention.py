"""What is kept of what has ended, and for how long; and that nothing goes which somebody may come back to."""

import asyncio
import os
import sqlite3
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from shotclock.core.errors import Failure
from shotclock.core.limits import ProcessIdentity, WallTime
from shotclock.core.proposal import Decision, Kind, Policy, ProposalRequest, ProposalStatus
from shotclock.core.value_types import replace
from shotclock.people.audit_file import AuditFile
from shotclock.people.inbox import Inbox
from shotclock.store._schema import VERSION
from shotclock.store.home import StoreBusy, StoreUnusable
from shotclock.store.proposals import NewProposal
from shotclock.store.runs import StepRecord, StoredRun
from shotclock.store.store import (
    DAY_MS,
    IN_PASSING,
    RUNNERS_SINCE,
    Retention,
    Store,
    move_aside,
    parse_size,
    prune,
    prune_in_passing,
    read_retention,
)
from tests.rows import row

NOW = WallTime(1_800_000_000_000)
ME = ProcessIdentity("host", "boot", 1, "start", "ns")
DEAD = ProcessIdentity("host", "boot", 2, "start", "ns")
ALL = Retention(0, 0, 0, 0)


def is_alive(holder: ProcessIdentity) -> bool:
    return holder == ME


def ago(days: float) -> WallTime:
    return WallTime(int(NOW.ms - days * DAY_MS))


def begin(store: Store, id: str, at: WallTime = NOW, holder: ProcessIdentity = ME) -> None:
    store.runs.begin(StoredRun(id, "flow", "/flow.yaml", {"steps": {}}, {}, "t", holder, at))


def envelope_of(steps: dict[str, Any]) -> dict[str, Any]:
    shown = {name: {"status": "succeeded", "output": output} for name, output in steps.items()}
    return {"ok": True, "data": {"run_id": "x", "steps": shown}, "error": None, "warnings": [], "meta": {}}


def end(store: Store, id: str, at: WallTime = NOW, **outputs: Any) -> None:
    begin(store, id, at)
    for name, output in outputs.items():
        store.runs.record(id, [StepRecord(name, "succeeded", {"status": "succeeded", "output": output})], at)
    store.runs.end(id, envelope_of(outputs), at)


def runs_left(store: Store) -> set[str]:
    return {run.id for run in store.runs.list(10_000)}


def rows(home: Path, query: str) -> list[Any]:
    with sqlite3.connect(home / "shotclock.db") as connection:
        return connection.execute(query).fetchall()


# --- once per value -------------------------------------------------------------------------------------------


def test_what_a_step_has_put_out_is_kept_once_and_comes_back_with_the_envelope(store: Store, home: Path) -> None:
    outputs = {"a": "word" * 1000, "b": {"list": [1, True, None, 1.5]}, "c": None, "d": "\ud800"}
    end(store, "r", **outputs)
    (text,) = rows(home, "SELECT envelope FROM runs")[0]
    assert "wordword" not in text
    assert sum(row[0].count("wordword") for row in rows(home, "SELECT record FROM steps")) > 0
    run = store.runs.get("r")
    assert run is not None and run.envelope == envelope_of(outputs)
    taken = store.runs.take_up("r", ME, is_alive)
    assert taken is not None and taken.envelope == envelope_of(outputs)


def test_an_output_that_differs_from_the_steps_own_stays_in_the_envelope(store: Store) -> None:
    begin(store, "r")
    store.runs.record("r", [StepRecord("a", "succeeded", {"status": "succeeded", "output": 1})], NOW)
    envelope = envelope_of({"a": True, "b": "never recorded"})
    store.runs.end("r", envelope, NOW)
    run = store.runs.get("r")
    assert run is not None and run.envelope == envelope


# --- runs -----------------------------------------------------------------------------------------------------


def test_runs_go_by_age_number_and_size_the_oldest_first(store: Store) -> None:
    for day in range(10):
        end(store, f"d{day}", ago(day), a="x" * 1000)
    assert prune(store, replace(ALL, runs_ms=int(7.5 * DAY_MS)), NOW, is_alive, dry_run=True).runs == 2
    assert len(runs_left(store)) == 10
    assert prune(store, replace(ALL, runs_ms=int(7.5 * DAY_MS)), NOW, is_alive).runs == 2
    assert runs_left(store) == {f"d{day}" for day in range(8)}
    assert prune(store, replace(ALL, runs=5), NOW, is_alive).runs == 3
    assert runs_left(store) == {f"d{day}" for day in range(5)}
    each = rows(store.home, "SELECT bytes FROM runs")[0][0]
    pruned = prune(store, replace(ALL, runs_bytes=3 * each + 1), NOW, is_alive)
    assert (pruned.runs, pruned.runs_bytes) == (2, 2 * each) and runs_left(store) == {"d0", "d1", "d2"}
    assert prune(store, ALL, NOW, is_alive).runs == 0
    assert rows(store.home, "SELECT count(*) FROM steps") == [(3,)]


def test_what_is_under_way_or_parked_stays_and_what_a_dead_process_left_goes(store: Store) -> None:
    begin(store, "working", ago(100))
    begin(store, "parked", ago(100), DEAD)
    store.runs.park("parked", DEAD, ago(99))
    begin(store, "left", ago(100), DEAD)
    begin(store, "left-lately", ago(1), DEAD)
    end(store, "parked.inner", ago(98), a=1)
    end(store, "parkedother", ago(98), a=1)
    end(store, "working.inner.deeper", ago(98), a=1)
    assert prune(store, Retention(30 * DAY_MS, 1, 1, 0), NOW, is_alive).runs == 2
    assert runs_left(store) == {"working", "parked", "left-lately", "parked.inner", "working.inner.deeper"}


def test_a_run_that_was_taken_up_meanwhile_stays(store: Store) -> None:
    begin(store, "left", ago(100), DEAD)
    found = store.runs.list_left_behind(ago(30), is_alive)
    assert store.runs.take_up("left", ME, is_alive) is not None
    assert store.runs.forget(found) == 0 and runs_left(store) == {"left"}


# --- proposals ------------------------------------------------------------------------------------------------

ASK = ProposalRequest(
    Kind.OPERATION, "Restart it", operation="ops/restart", arguments={"n": 1}, policy=Policy(ttl_ms=DAY_MS)
)
YES = Decision(ProposalStatus.APPROVED, "go")


def propose(
    store: Store, name: str, at: WallTime, key: str | None = None, decided: bool = True, ttl_days: int = 1
) -> None:
    ask = replace(ASK, arguments={"name": name}, policy=Policy(ttl_ms=ttl_days * DAY_MS))
    store.proposals.attach_or_create_all([NewProposal(name, ask, "agent", key)], at)
    if decided:
        store.proposals.decide(name, YES, "anna", at)


def test_old_proposals_go_and_the_audit_trail_stays_whole(store: Store, home: Path) -> None:
    propose(store, "old", ago(100))
    propose(store, "expired", ago(100), decided=False)
    store.proposals.end_due(ago(98))
    propose(store, "lately", ago(10))
    propose(store, "open", ago(200), decided=False, ttl_days=1000)
    propose(store, "holds", ago(200), ttl_days=1000)
    entries = len(store.audit.entries())
    assert prune(store, replace(ALL, proposals_ms=90 * DAY_MS), NOW, is_alive).proposals == 2
    left = {id for (id,) in rows(home, "SELECT id FROM proposals")}
    assert left == {"lately", "open", "holds"} == {id for (id,) in rows(home, "SELECT id FROM asks")}
    assert [entry.action for entry in store.audit.entries()[entries:]] == ["forgotten", "forgotten"]

    async def verified() -> Any:
        inbox = Inbox(store)
        try:
            return await inbox.verify_audit()
        finally:
            await inbox.close()

    assert asyncio.run(verified()) == []
    with sqlite3.connect(home / "shotclock.db") as connection:
        connection.execute("DELETE FROM asks WHERE id = 'lately'")
        connection.execute("DELETE FROM proposals WHERE id = 'lately'")
    connection.close()
    assert "lately is gone" in str(asyncio.run(verified())[0])


def test_what_was_used_rejected_or_withdrawn_is_over_before_it_expires(store: Store, home: Path) -> None:
    for name in ("used", "rejected", "withdrawn", "holds"):
        propose(store, name, ago(10), decided=name in ("used", "holds"), ttl_days=1000)
    [used] = rows(home, "SELECT action_hash FROM proposals WHERE id = 'used'")
    assert store.proposals.use("used", used[0], ago(9), None) is not None
    store.proposals.decide("rejected", Decision(ProposalStatus.REJECTED, "no"), "anna", ago(9))
    store.proposals.withdraw("withdrawn", "agent", ago(9))
    assert prune(store, replace(ALL, proposals_ms=5 * DAY_MS), NOW, is_alive).proposals == 3
    assert {id for (id,) in rows(home, "SELECT id FROM proposals")} == {"holds"}


def test_an_answered_question_without_an_end_is_forgotten_as_others_are(store: Store, home: Path) -> None:
    for name, days in (("old", 10), ("new", 2)):
        propose(store, name, ago(days), decided=True, ttl_days=0)
    propose(store, "open", ago(10), decided=False, ttl_days=0)
    assert prune(store, replace(ALL, proposals_ms=5 * DAY_MS), NOW, is_alive).proposals == 1
    assert {id for (id,) in rows(home, "SELECT id FROM proposals")} == {"new", "open"}


def test_what_a_run_that_has_not_ended_may_come_back_to_stays(store: Store, home: Path) -> None:
    begin(store, "r1", ago(200), DEAD)
    store.runs.park("r1", DEAD, ago(200))
    for key in ("r1/ask", "r1.inner/ask", "r12/ask"):
        propose(store, key, ago(150), key=key)
    prune(store, Retention(), NOW, is_alive)
    assert {id for (id,) in rows(home, "SELECT id FROM proposals")} == {"r1/ask", "r1.inner/ask"}


# --- the file, and when ---------------------------------------------------------------------------------------


def test_the_file_shrinks_by_what_went(store: Store, home: Path) -> None:
    for number in range(20):
        end(store, f"r{number}", ago(100), a=os.urandom(100_000).hex())
    store.shrink()
    before = (home / "shotclock.db").stat().st_size
    assert before > 4_000_000
    prune(store, Retention(), NOW, is_alive)
    assert store.shrink() and (home / "shotclock.db").stat().st_size < before / 10


def test_it_is_done_by_the_way_once_a_day_and_bounded(store: Store) -> None:
    for number in range(IN_PASSING + 10):
        end(store, f"r{number}", ago(100), a=1)
    prune_in_passing(store, {"SHOTCLOCK_KEEP_RUNS_FOR": "nonsense"}, ago(2), is_alive)
    assert len(runs_left(store)) == IN_PASSING + 10
    prune_in_passing(store, {}, NOW, is_alive)
    assert len(runs_left(store)) == 10
    prune_in_passing(store, {}, NOW + 60_000, is_alive)
    assert len(runs_left(store)) == 10
    prune_in_passing(store, {}, NOW + 2 * 3_600_000, is_alive)  # there was more to do
    assert len(runs_left(store)) == 0
    end(store, "later", ago(100), a=1)
    prune_in_passing(store, {}, NOW + 20 * 3_600_000, is_alive)
    assert len(runs_left(store)) == 1
    prune_in_passing(store, {}, NOW + 27 * 3_600_000, is_alive)
    assert len(runs_left(store)) == 0


def test_the_environment_says_what_is_kept() -> None:
    assert read_retention({}) == Retention()
    said = {
        "SHOTCLOCK_KEEP_RUNS_FOR": "7d",
        "SHOTCLOCK_KEEP_RUNS": "5",
        "SHOTCLOCK_KEEP_RUNS_SIZE": "20MB",
        "SHOTCLOCK_KEEP_PROPOSALS_FOR": "0",
    }
    assert read_retention(said) == Retention(7 * DAY_MS, 5, 20_000_000, 0)
    with pytest.raises(Failure) as refused:
        read_retention({"SHOTCLOCK_KEEP_RUNS_FOR": "7", "SHOTCLOCK_KEEP_RUNS": "-1", "SHOTCLOCK_KEEP_RUNS_SIZE": "big"})
    errors: Any = refused.value.context["errors"]
    assert len(errors) == 3


def test_a_size_is_read_as_it_is_written() -> None:
    table: list[Any] = [("0", 0), ("500", 500), ("2kB", 2000), ("3 MB", 3 * 10**6), ("1G", 10**9)]
    for text, size in table:
        with row(text, size):
            assert parse_size(text) == size


# --- a whole store, moved aside -------------------------------------------------------------------------------


def test_a_store_is_moved_aside_with_its_audit_file_and_a_new_one_starts(home: Path) -> None:
    with Store.open(home) as store:
        propose(store, "old", NOW)
        AuditFile(store).catch_up()
        store.folder("jobs")
        end(store, "ended")
        begin(store, "left", holder=DEAD)
    for version in (VERSION, RUNNERS_SINCE, RUNNERS_SINCE - 1):
        with sqlite3.connect(home / "shotclock.db") as connection:
            connection.execute(f"PRAGMA user_version={version}")
            if version < RUNNERS_SINCE:
                connection.execute("ALTER TABLE jobs RENAME COLUMN runner TO keeper")
        connection.close()
        target = move_aside(home, NOW + version, is_alive)
        assert sorted(each.name for each in target.iterdir()) == ["audit.jsonl", "jobs", "shotclock.db"]
        assert not (home / "shotclock.db").exists() and not (home / "audit.jsonl").exists()
        for each in target.iterdir():
            each.rename(home / each.name)
    (home / "audit.jsonl").unlink()
    (home / "shotclock.db").unlink()
    with Store.open(home) as store:
        assert runs_left(store) == set() and AuditFile(store).verify() == []


def test_a_store_in_use_is_not_moved(home: Path) -> None:
    with Store.open(home) as store:
        begin(store, "r1")
    with pytest.raises(StoreBusy, match=r"while work runs \(run r1, pid 1\)"):
        move_aside(home, NOW, is_alive)
    server = subprocess.Popen(
        [sys.executable, "-c", HOLD_OPEN, str(home)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        assert server.stdout is not None and server.stdout.readline() == b"open\n"
        with pytest.raises(StoreBusy, match="another process is using the store"):
            move_aside(home, NOW, lambda _: False)
    finally:
        server.communicate(timeout=20)
    assert (home / "shotclock.db").exists()
    assert move_aside(home, NOW, lambda _: False).is_dir()


HOLD_OPEN = """
import sys
from pathlib import Path
from shotclock.store._schema import VERSION
from shotclock.store.store import Store
with Store.open(Path(sys.argv[1])) as store:
    store.runs.list()
    print("open", flush=True)
    sys.stdin.read()
"""


def test_no_store_and_a_newer_store_are_not_moved(home: Path) -> None:
    with pytest.raises(StoreUnusable, match="no store"):
        move_aside(home, NOW, is_alive)
    Store.open(home).close()
    with sqlite3.connect(home / "shotclock.db") as connection:
        connection.execute(f"PRAGMA user_version={VERSION + 1}")
    connection.close()
    with pytest.raises(StoreUnusable, match="newer"):
        move_aside(home, NOW, is_alive)
