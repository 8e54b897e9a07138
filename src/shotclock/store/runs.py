"""Runs of workflows, with the records of their steps.

A step is recorded when it begins and when it ends, so that a process that resumes a run after a crash knows which steps
were finished and which were interrupted.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..core.limits import ProcessIdentity, WallTime
from ..core.value_types import JsonObject, value
from ._database import (
    VERSION,
    Database,
    Schema,
    Table,
    Transaction,
    check_count,
    decode_process,
    decode_text,
    json_text,
    parts_of_json,
)
from ._rows import RowMapper


@contextlib.contextmanager
def open_runs(path: Path) -> Iterator[Runs]:
    """Open only the runs of a store that is there, without importing the rest of it."""
    database = Database(path, Schema(VERSION, ()))
    try:
        yield Runs(database)
    finally:
        database.close()


@value
class StoredRun:
    id: str
    name: str
    file: str
    workflow: Any  # the file as it was when the run began. A resumed run uses it
    inputs: Any
    trace_id: str
    holder: ProcessIdentity
    created_at: WallTime
    deadline_at: WallTime | None = None
    ended_at: WallTime | None = None
    envelope: JsonObject | None = None
    parked_at: WallTime | None = None  # since when it waits for a person without a process
    concurrency: JsonObject | None = None  # its group, and how long it waited for that
    owes_notice: bool = False  # whether its end is yet to be sent to those whom its `notify` names
    rerun_of: str | None = None  # the ended run that it continues
    rerun: JsonObject | None = None  # what it kept of that run, and what runs again
    began_on: str = ""
    """The boot and the monotonic nanoseconds at which it began, which no change of the wall clock moves."""


@value
class StepRecord:
    id: str
    status: str
    record: Any


@value
class PastStep:
    """The parts of a step's record that show how long it took, and how it ended. Its output is not read."""

    id: str
    type: str | None
    status: str
    duration_ms: int | None
    attempts: int
    was_paused: bool
    is_cut_short: bool
    was_wound_down: bool
    clock: Mapping[str, Any] | None  # the limit that stopped it
    tries: Sequence[tuple[int, str]] = ()
    """The milliseconds and the outcome of each attempt, or of the longest ones."""


@value
class PastRun:
    """An ended run. `took_ms` is the time of its last process, which is shorter than the run if that was resumed."""

    id: str
    created_at: WallTime
    ended_at: WallTime
    deadline_at: WallTime | None
    code: str | None
    took_ms: int | None
    steps: tuple[PastStep, ...]


@value
class Outdated:
    seq: int
    bytes: int
    holder: str | None = None  # the dead process of a run that has not ended


class RunTaken(Exception):
    """The run is under way, or its id was used before."""

    def __init__(self, run: StoredRun) -> None:
        super().__init__(run.id)
        self.run = run


_RUNS = RowMapper(StoredRun, "runs")
_STEPS = RowMapper(StepRecord, "steps")
_INSERT_STEP = "INSERT INTO steps (run, id, status, record, changed_at) VALUES (?, ?, ?, ?, ?)"


class Runs(Table):
    def begin(self, run: StoredRun, steps: Sequence[StepRecord] = ()) -> None:
        """Record a new run with the steps that it does not begin with anew, all or nothing.

        Raises RunTaken if there is one of that id already.
        """
        with self._database.write() as transaction:
            if (there := _get(transaction, run.id)) is not None:
                raise RunTaken(there)
            _RUNS.insert(transaction, run)
            rows = [(run.id, step.id, step.status, json_text(step.record), run.created_at) for step in steps]
            transaction.executemany(_INSERT_STEP, rows)

    def take_up(
        self, run_id: str, holder: ProcessIdentity, is_alive: Callable[[ProcessIdentity], bool]
    ) -> StoredRun | None:
        """Give the run to this holder and return it; None if there is none. An ended one stays as it is.

        Raises RunTaken while another living process has it.
        """
        with self._database.write() as transaction:
            run = _get(transaction, run_id)
            if run is None or run.ended_at is not None:
                return run
            if run.parked_at is None and run.holder != holder and is_alive(run.holder):
                raise RunTaken(run)
            transaction.execute("UPDATE runs SET holder = ?, parked_at = NULL WHERE id = ?", (holder, run_id))
            transaction.execute("UPDATE group_places SET holder = ? WHERE run = ?", (holder, run_id))
            return _get(transaction, run_id)

    def last_seen_at(self, run_id: str) -> WallTime:
        query = "SELECT coalesce(max(changed_at), 0) FROM steps WHERE run = ?"
        return WallTime(self._select(query, (run_id,))[0][0])

    def set_back(self, run_id: str, by_ms: int) -> None:
        """Move the times of a run that has not ended as the wall clock was moved."""
        with self._database.write() as transaction:
            query = "UPDATE runs SET created_at = created_at - ?, deadline_at = deadline_at - ? WHERE id = ?"
            transaction.execute(query, (by_ms, by_ms, run_id))
            transaction.execute("UPDATE steps SET changed_at = changed_at - ? WHERE run = ?", (by_ms, run_id))

    def park(self, run_id: str, holder: ProcessIdentity, now: WallTime) -> None:
        """Record that the run has no process until it is taken up again."""
        query = "UPDATE runs SET parked_at = ? WHERE id = ? AND holder = ? AND ended_at IS NULL"
        self._execute(query, (now, run_id, holder))

    def extend(self, run_id: str, deadline_at: WallTime, *, wait_ms: int | None = None) -> None:
        query = "UPDATE runs SET deadline_at = ? WHERE id = ? AND ended_at IS NULL"
        self._execute(query, (deadline_at, run_id), durable=False, wait_ms=wait_ms)

    def record_group(self, run_id: str, concurrency: Mapping[str, Any]) -> None:
        """Record the group of a resumed run, with the time that it has waited for it."""
        query = "UPDATE runs SET concurrency = ? WHERE id = ? AND ended_at IS NULL"
        self._execute(query, (json_text(concurrency), run_id), durable=False)

    def record(self, run_id: str, steps: Sequence[StepRecord], now: WallTime, *, wait_ms: int | None = None) -> None:
        """Record the state of these steps, all of them or none. `wait_ms`: see Database.write.

        Survives `kill -9`; after a power loss the last step may count as interrupted.
        """
        rows = [(run_id, step.id, step.status, json_text(step.record), now) for step in steps]
        with self._database.write(durable=False, wait_ms=wait_ms) as transaction:
            transaction.executemany(
                f"{_INSERT_STEP} "
                "ON CONFLICT (run, id) DO UPDATE SET status = excluded.status, record = excluded.record, "
                "changed_at = excluded.changed_at",
                rows,
            )
            # Parked steps keep their items as `parts` of the record.
            ended = [
                (run_id, step.id)
                for step in steps
                if step.status != "running" and (step.status != "pending" or step.record.get("parts"))
            ]
            transaction.executemany("DELETE FROM items WHERE run = ? AND step = ?", ended)

    def record_item(self, run_id: str, step_id: str, number: int, record: Any, *, wait_ms: int | None = None) -> None:
        """Record the state of one item of a running step. `wait_ms`: see Database.write."""
        query = (
            "INSERT INTO items (run, step, number, record) VALUES (?, ?, ?, ?) "
            "ON CONFLICT (run, step, number) DO UPDATE SET record = excluded.record"
        )
        self._execute(query, (run_id, step_id, number, json_text(record)), durable=False, wait_ms=wait_ms)

    def items(self, run_id: str, step_id: str) -> dict[int, Any]:
        query = "SELECT number, record FROM items WHERE run = ? AND step = ?"
        return {number: json.loads(record) for number, record in self._select(query, (run_id, step_id))}

    def steps(self, run_id: str) -> dict[str, StepRecord]:
        with self._database.read() as transaction:
            return {step.id: step for step in _STEPS.list(transaction, "WHERE run = ?", (run_id,))}

    def end(
        self,
        run_id: str,
        envelope: Mapping[str, Any],
        now: WallTime,
        *,
        owes_notice: bool = False,
        wait_ms: int | None = None,
    ) -> bool:
        """Record the end of a run and return whether this call ended it: the first end stays.

        The outputs of steps are stored once, with the steps. `owes_notice`: see `claim_notice`. `wait_ms`: see
        Database.write.
        """
        size = "length(workflow) + length(inputs) + (SELECT coalesce(sum(length(record)), 0) FROM steps WHERE run = ?)"
        with self._database.write(wait_ms=wait_ms) as transaction:
            text = json_text(_leave_out_outputs(transaction, run_id, envelope))
            ended = transaction.execute(
                f"UPDATE runs SET envelope = ?, bytes = ? + {size}, ended_at = ?, owes_notice = ? "
                "WHERE id = ? AND ended_at IS NULL",
                (text, len(text), run_id, now, owes_notice, run_id),
            )
            transaction.execute("DELETE FROM group_places WHERE run = ?", (run_id,))
            return ended.rowcount > 0

    def claim_notice(self, run_id: str) -> bool:
        """Return whether the caller is to send the end of a run: only the first one is, so nothing is sent twice."""
        return self._execute("UPDATE runs SET owes_notice = 0 WHERE id = ? AND owes_notice", (run_id,)) > 0

    def add_warnings(self, run_id: str, warnings: Sequence[Mapping[str, Any]]) -> None:
        query = "SELECT envelope FROM runs WHERE id = ? AND ended_at IS NOT NULL"
        with self._database.write() as transaction:
            if (row := transaction.execute(query, (run_id,)).fetchone()) is not None:
                envelope = json.loads(row[0])
                envelope["warnings"] = [*envelope["warnings"], *warnings]
                transaction.execute("UPDATE runs SET envelope = ? WHERE id = ?", (json_text(envelope), run_id))

    def get(self, run_id: str) -> StoredRun | None:
        return self._read(_get, run_id)

    def list_inside(self, run_id: str, step_id: str) -> tuple[str, ...]:
        with self._database.read() as transaction:
            rows = _select_inside(transaction, "id", run_id, step_id, "ended_at IS NULL")
            return tuple(decode_text(id) for (id,) in rows)

    def find_ended_inside(self, run_id: str, step_id: str, file: str, inputs: Any) -> StoredRun | None:
        """Return the newest ended run of a file with these inputs that a step has begun."""
        with self._database.read() as transaction:
            where = "ended_at IS NOT NULL AND file = ? AND inputs = ? ORDER BY seq DESC"
            rows = _select_inside(transaction, "id", run_id, step_id, where, (file, json_text(inputs)))
            found = next(rows, None)
            return None if found is None else _get(transaction, decode_text(found[0]))

    def files_inside(self, run_id: str, step_id: str) -> JsonObject:
        """Return the workflows of the runs that a step has begun, by their files."""
        with self._database.read() as transaction:
            rows = _select_inside(transaction, "id, file, workflow", run_id, step_id, "ended_at IS NOT NULL")
            texts = {decode_text(file): workflow for _, file, workflow in rows}
        return {file: json.loads(workflow) for file, workflow in texts.items()}

    def list(self, limit: int = 100) -> tuple[StoredRun, ...]:
        return tuple(self._read(_RUNS.list, "ORDER BY seq DESC LIMIT ?", (limit,)))

    def list_open(self, limit: int = 100) -> tuple[StoredRun, ...]:
        """Return the runs with a process, living or dead, the newest first."""
        where = "WHERE ended_at IS NULL AND parked_at IS NULL ORDER BY seq DESC LIMIT ?"
        return tuple(self._read(_RUNS.list, where, (check_count(limit, "limit"),)))

    def list_files(self, name: str) -> tuple[str, ...]:
        rows = self._select("SELECT DISTINCT file FROM runs WHERE name = ?", (name,))
        return tuple(decode_text(file) for (file,) in rows)

    def list_past(
        self,
        name: str,
        file: str,
        count: int,
        before: WallTime | None = None,
        may_go_on: Callable[[], bool] = lambda: True,
    ) -> tuple[PastRun, ...]:
        """Return the newest ended runs of a file that began before then, the newest first.

        Stops early once `may_go_on` returns false.
        """
        found: list[PastRun] = []
        with self._database.read() as transaction:
            until = "" if before is None else " AND created_at < ?"
            rows = transaction.execute(
                f"SELECT {_PAST_RUN} FROM runs WHERE name = ? AND file = ? AND ended_at IS NOT NULL{until} "
                "ORDER BY seq DESC LIMIT ?",
                (name, file, *(() if before is None else (before,)), check_count(count, "count")),
            )
            for id, created_at, ended_at, deadline_at, parts in rows:
                if not may_go_on():
                    break
                run_id, (code, took_ms) = decode_text(id), json.loads(parts)
                query = f"SELECT id, status, {_PAST_STEP} FROM steps WHERE run = ?"
                steps = tuple(_read_past_step(row) for row in transaction.execute(query, (run_id,)))
                until_at = None if deadline_at is None else WallTime(deadline_at)
                found.append(PastRun(run_id, WallTime(created_at), WallTime(ended_at), until_at, code, took_ms, steps))
        return tuple(found)

    def list_outdated(self, before: WallTime | None, count: int, size: int) -> tuple[Outdated, ...]:
        """Return the runs that ended before then or exceed the count or the size, the oldest first; 0 and None are no
        limit. Runs inside a run that has not ended are not returned."""
        kept = total = 0
        found = []
        with self._database.read() as transaction:
            rows = transaction.execute(
                "SELECT seq, ended_at, bytes FROM runs WHERE ended_at IS NOT NULL ORDER BY ended_at DESC"
            )
            for seq, ended_at, bytes in rows:
                kept, total = kept + 1, total + bytes
                too_many = (count and kept > count) or (size and total > size)
                if too_many or (before is not None and ended_at < before.ms):
                    found.append(Outdated(seq, bytes))
            open_ids = _list_open_ids(transaction)
            query = "SELECT id FROM runs WHERE seq = ?"
            ids = (transaction.execute(query, (each.seq,)).fetchone()[0] for each in found)
            free = [each for each, id in zip(found, ids, strict=True) if not belongs_to(decode_text(id), open_ids, ".")]
        return tuple(reversed(free))

    def list_ids(self) -> tuple[tuple[int, str], ...]:
        return tuple((seq, decode_text(id)) for seq, id in self._select("SELECT seq, id FROM runs"))

    def list_open_ids(self) -> frozenset[str]:
        return self._read(_list_open_ids)

    def list_left_behind(self, before: WallTime, is_alive: Callable[[ProcessIdentity], bool]) -> tuple[Outdated, ...]:
        """Return the runs that began before then and whose process died, without parked ones."""
        query = "SELECT seq, holder FROM runs WHERE ended_at IS NULL AND parked_at IS NULL AND created_at < ?"
        rows = self._select(query, (before,))
        return tuple(Outdated(seq, 0, holder) for seq, holder in rows if not is_alive(decode_process(holder)))

    def forget(self, runs: Iterable[Outdated]) -> int:
        """Delete runs with their steps and return their number. One that was taken up meanwhile stays."""
        with self._database.write() as transaction:
            query = "DELETE FROM runs WHERE seq = ? AND (ended_at IS NOT NULL OR (holder = ? AND parked_at IS NULL))"
            return sum(transaction.execute(query, (run.seq, run.holder)).rowcount for run in runs)


def _select_inside(
    transaction: Transaction, columns: str, run_id: str, step_id: str, where: str, values: tuple[object, ...] = ()
) -> Iterator[Sequence[Any]]:
    """Yield columns, the id first, of the runs that a step has begun: they have its name, perhaps with a number."""
    first = f"{run_id}.{step_id}"
    rows = transaction.execute(
        f"SELECT {columns} FROM runs WHERE (id = ? OR substr(id, 1, ?) = ?) AND {where}",
        (first, len(first) + 1, f"{first}.", *values),
    )
    for row in rows:
        id = decode_text(row[0])
        if id == first or id[len(first) + 1 :].isdecimal():
            yield row


_PAST_RUN = f"id, created_at, ended_at, deadline_at, {parts_of_json('envelope', 'error.code', 'meta.duration_ms')}"
_PAST_STEP = parts_of_json(
    "record",
    "type",
    "duration_ms",
    "attempts",
    "was_paused",
    "is_cut_short",
    "partial",
    "overtime",
    "error.context.clock",
    "tries",
)


def _read_past_step(row: Sequence[Any]) -> PastStep:
    id, status, extracted = row
    type, duration_ms, attempts, was_paused, is_cut_short, partial, overtime, clock, tries = json.loads(extracted)
    was_wound_down = bool(partial) or any(news.get("event") == "wind_down" for news in overtime or ())
    return PastStep(
        decode_text(id),
        type,
        status,
        duration_ms,
        attempts or 0,
        bool(was_paused),
        bool(is_cut_short),
        was_wound_down,
        clock if isinstance(clock, dict) else None,
        tuple((int(ms), str(outcome)) for ms, outcome in tries or ()),
    )


def _list_open_ids(transaction: Transaction) -> frozenset[str]:
    return frozenset(decode_text(id) for (id,) in transaction.execute("SELECT id FROM runs WHERE ended_at IS NULL"))


def belongs_to(name: str, run_ids: frozenset[str], separators: str) -> bool:
    """Return whether a name begins with the id of one of these runs and a separator, as the ids of its nested runs and
    the keys of its proposals do."""
    return any(letter in separators and name[:at] in run_ids for at, letter in enumerate(name))


def _get(transaction: Transaction, run_id: str) -> StoredRun | None:
    run = _RUNS.get(transaction, "WHERE id = ?", (run_id,))
    if run is not None:
        without = {id: step for id, step in _steps_of(run.envelope).items() if "output" not in step}
        for step in _STEPS.list(transaction, "WHERE run = ?", (run_id,)) if without else ():
            if step.id in without:
                without[step.id]["output"] = step.record.get("output")
    return run


def _leave_out_outputs(transaction: Transaction, id: str, envelope: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the envelope without the outputs that the records of its steps hold."""
    steps = dict(_steps_of(envelope))
    # One record at a time, because each can be large.
    for step_id, record in transaction.execute("SELECT id, record FROM steps WHERE run = ?", (id,)):
        step = steps.get(decode_text(step_id), {})
        # Compared as text: 1 and True are equal, and not the same.
        if "output" in step and json_text(step["output"]) == json_text(json.loads(record).get("output")):
            steps[decode_text(step_id)] = {key: value for key, value in step.items() if key != "output"}
    return {**envelope, "data": {**envelope["data"], "steps": steps}} if steps else envelope


def _steps_of(envelope: Mapping[str, Any] | None) -> dict[str, JsonObject]:
    data = (envelope or {}).get("data")
    steps = data.get("steps") if isinstance(data, dict) else None
    return steps if isinstance(steps, dict) else {}
