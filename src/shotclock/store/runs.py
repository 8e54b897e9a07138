"""Runs of workflows: what was asked for, how far each step is, and how it ended.

A step is written down when it begins and when it ends, so that whoever takes a run up again after a crash knows what
was finished and what was cut off in the middle.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from ..core.records import dataclass
from ..core.walltime import ProcessIdentity, WallTime
from . import schema as c
from .database import Database


@dataclass(frozen=True, slots=True)
class NewRun:
    id: str
    name: str
    file: str
    workflow: Any
    """The file as it was when the run began: a run that goes on later goes on with that."""
    inputs: Any
    trace_id: str
    deadline_at: WallTime | None = None


@dataclass(frozen=True, slots=True)
class Run:
    id: str
    name: str
    file: str
    workflow: Any
    inputs: Any
    trace_id: str
    holder: ProcessIdentity
    created_at: WallTime
    deadline_at: WallTime | None
    ended_at: WallTime | None
    envelope: dict[str, Any] | None
    parked_at: WallTime | None = None
    """Since when it lies here with its questions, and no process has it."""


@dataclass(frozen=True, slots=True)
class StepRecord:
    id: str
    status: str
    record: Any


@dataclass(frozen=True, slots=True)
class Outdated:
    """A run that may be deleted."""

    seq: int
    bytes: int
    holder: str | None = None
    """Who had it and died, where it has not ended."""


class RunTaken(Exception):
    """The run belongs to somebody: it is under way, or its id was used before."""

    def __init__(self, run: Run) -> None:
        super().__init__(run.id)
        self.run = run


_COLUMNS = "id, name, file, workflow, inputs, trace_id, holder, created_at, deadline_at, ended_at, envelope, parked_at"


class Runs:
    """Table of runs and their steps."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def begin(self, new: NewRun, holder: ProcessIdentity, now: WallTime) -> Run:
        """Record a new run. Raises RunTaken if there is one of that id already, however it ended."""
        with self._database.write() as connection:
            if (there := _get(connection, new.id)) is not None:
                raise RunTaken(there)
            connection.execute(
                f"INSERT INTO runs ({_COLUMNS}) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, NULL, NULL, NULL)",
                (
                    c.text_in(new.id),
                    c.text_in(new.name),
                    c.text_in(new.file),
                    c.json_in(new.workflow),
                    c.json_in(new.inputs),
                    new.trace_id,
                    c.holder_in(holder),
                    now.ms,
                    c.maybe_time_in(new.deadline_at),
                ),
            )
            made = _get(connection, new.id)
        assert made is not None
        return made

    def take_up(self, run_id: str, holder: ProcessIdentity, is_alive: Callable[[ProcessIdentity], bool]) -> Run | None:
        """Give the run to this holder and return it; None if there is none. Raises RunTaken while another process lives
        that has it.

        One that has ended stays as it is.
        """
        with self._database.write() as connection:
            run = _get(connection, run_id)
            if run is None or run.ended_at is not None:
                return run
            if run.parked_at is None and run.holder != holder and is_alive(run.holder):
                raise RunTaken(run)
            connection.execute(
                "UPDATE runs SET holder = ?, parked_at = NULL WHERE id = ?", (c.holder_in(holder), c.text_in(run_id))
            )
            return _get(connection, run_id)

    def park(self, run_id: str, holder: ProcessIdentity, now: WallTime) -> None:
        """Record that nobody has it any more, until it is taken up again."""
        with self._database.write() as connection:
            connection.execute(
                "UPDATE runs SET parked_at = ? WHERE id = ? AND holder = ? AND ended_at IS NULL",
                (now.ms, c.text_in(run_id), c.holder_in(holder)),
            )

    def record(self, run_id: str, steps: Iterable[StepRecord], now: WallTime, *, may_wait: bool = True) -> None:
        """Record how far these steps are, all of them or none. Survives `kill -9`; a power loss may take the last
        moment, and its step is then taken for one that was cut off. `may_wait`: see Database.write."""
        rows = [(c.text_in(run_id), c.text_in(step.id), step.status, c.json_in(step.record), now.ms) for step in steps]
        with self._database.write(durable=False, may_wait=may_wait) as connection:
            connection.executemany(
                "INSERT INTO steps (run, id, status, record, changed_at) VALUES (?, ?, ?, ?, ?) "
                "ON CONFLICT (run, id) DO UPDATE SET status = excluded.status, record = excluded.record, "
                "changed_at = excluded.changed_at",
                rows,
            )

    def steps(self, run_id: str) -> dict[str, StepRecord]:
        with self._database.read() as connection:
            rows = connection.execute("SELECT id, status, record FROM steps WHERE run = ?", (c.text_in(run_id),))
            return {c.text_out(id): StepRecord(c.text_out(id), status, c.json_out(text)) for id, status, text in rows}

    def end(self, run_id: str, envelope: Mapping[str, Any], now: WallTime) -> bool:
        """Record the end of a run and return whether this ended it: the first end stays. What its steps have put out is
        kept once, with the steps."""
        with self._database.write() as connection:
            text, size = _slim_envelope(connection, c.text_in(run_id), envelope)
            return connection.execute(
                "UPDATE runs SET envelope = ?, bytes = ?, ended_at = ? WHERE id = ? AND ended_at IS NULL",
                (text, size, now.ms, c.text_in(run_id)),
            ).rowcount > 0  # fmt: skip

    def get(self, run_id: str) -> Run | None:
        with self._database.read() as connection:
            return _get(connection, run_id)

    def list_inside(self, run_id: str, step_id: str) -> tuple[str, ...]:
        """Return the ids of the runs that a step has begun, which have not ended."""
        first = f"{run_id}.{step_id}"
        with self._database.read() as connection:
            rows = connection.execute(
                "SELECT id FROM runs WHERE (id = ? OR substr(id, 1, ?) = ?) AND ended_at IS NULL",
                (c.text_in(first), len(first) + 1, f"{first}."),
            )
            ids = [c.text_out(id) for (id,) in rows]
        return tuple(id for id in ids if id == first or id[len(first) + 1 :].isdecimal())

    def list(self, limit: int = 100) -> tuple[Run, ...]:
        """Return the newest first."""
        with self._database.read() as connection:
            rows = connection.execute(f"SELECT {_COLUMNS} FROM runs ORDER BY seq DESC LIMIT ?", (limit,)).fetchall()
        return tuple(map(_run, rows))

    def slim(self, limit: int = 50) -> int:
        """Rewrite ended runs from before outputs were kept once, `limit` at most, and return how many."""
        with self._database.write() as connection:
            rows = connection.execute(
                "SELECT id, envelope FROM runs WHERE ended_at IS NOT NULL AND bytes IS NULL LIMIT ?",
                (c.count_in(limit, "limit"),),
            ).fetchall()
            for id, envelope in rows:
                text, size = _slim_envelope(connection, id, c.json_out(envelope))
                connection.execute("UPDATE runs SET envelope = ?, bytes = ? WHERE id = ?", (text, size, id))
        return len(rows)

    def list_outdated(self, before: WallTime | None, count: int, size: int) -> tuple[Outdated, ...]:
        """Return ended runs that ended before then, or that are more than so many or than so many bytes, the oldest
        first; 0 and None are no limit. What belongs to a run that has not ended stays."""
        kept = total = 0
        found = []
        with self._database.read() as connection:
            rows = connection.execute(
                "SELECT seq, ended_at, coalesce(bytes, 0) FROM runs WHERE ended_at IS NOT NULL ORDER BY ended_at DESC"
            )
            for seq, ended_at, bytes in rows:
                kept, total = kept + 1, total + bytes
                too_many = (count and kept > count) or (size and total > size)
                if too_many or (before is not None and ended_at < before.ms):
                    found.append(Outdated(seq, bytes))
            return tuple(each for each in reversed(found) if not _is_inside_open(connection, each.seq))

    def list_left_behind(self, before: WallTime, is_alive: Callable[[ProcessIdentity], bool]) -> tuple[Outdated, ...]:
        """Return runs that began before then and whose process died. One that is parked waits for a person, and
        stays."""
        with self._database.read() as connection:
            rows = connection.execute(
                "SELECT seq, holder FROM runs INDEXED BY runs_open "
                "WHERE ended_at IS NULL AND parked_at IS NULL AND created_at < ?",
                (before.ms,),
            ).fetchall()
        return tuple(Outdated(seq, 0, holder) for seq, holder in rows if not is_alive(c.holder_out(holder)))

    def forget(self, runs: Iterable[Outdated]) -> int:
        """Delete runs with their steps and return how many. One that was taken up meanwhile stays."""
        with self._database.write() as connection:
            query = "DELETE FROM runs WHERE seq = ? AND (ended_at IS NOT NULL OR (holder = ? AND parked_at IS NULL))"
            return sum(connection.execute(query, (run.seq, run.holder)).rowcount for run in runs)


def _get(connection: sqlite3.Connection, run_id: str) -> Run | None:
    row = connection.execute(f"SELECT {_COLUMNS} FROM runs WHERE id = ?", (c.text_in(run_id),)).fetchone()
    if row is None:
        return None
    run = _run(row)
    steps = _steps_in(run.envelope)
    if any("output" not in step for step in steps.values()):
        records = _records(connection, c.text_in(run_id))
        for id, step in steps.items():
            step.setdefault("output", records.get(id, {}).get("output"))
    return run


def _is_inside_open(connection: sqlite3.Connection, seq: int) -> bool:
    """Return whether it was begun by a step of a run that has not ended: that one's id and a dot are the beginning of
    its."""
    query = (
        "SELECT 1 FROM runs AS inner_run, runs AS around INDEXED BY runs_open WHERE inner_run.seq = ? "
        "AND around.ended_at IS NULL AND substr(inner_run.id, 1, length(around.id) + 1) = around.id || '.'"
    )
    return connection.execute(query, (seq,)).fetchone() is not None


def _slim_envelope(connection: sqlite3.Connection, id: str | bytes, envelope: Mapping[str, Any]) -> tuple[str, int]:
    """Return the envelope without the outputs that stand with the steps as well, and how much the whole run takes."""
    rows = connection.execute("SELECT id, record FROM steps WHERE run = ?", (id,)).fetchall()
    records = {c.text_out(step): c.json_out(record) for step, record in rows}
    kept = {
        name: {key: value for key, value in step.items() if key != "output"}
        if name in records and _is_same(step.get("output"), records[name].get("output"))
        else step
        for name, step in _steps_in(envelope).items()
    }
    if kept:
        envelope = {**envelope, "data": {**envelope["data"], "steps": kept}}
    text = c.json_in(envelope)
    found = connection.execute("SELECT length(workflow) + length(inputs) FROM runs WHERE id = ?", (id,)).fetchone()
    return text, len(text) + sum(len(record) for _, record in rows) + (0 if found is None else found[0])


def _is_same(one: Any, other: Any) -> bool:
    return type(one) is type(other) and bool(one == other)


def _records(connection: sqlite3.Connection, id: str | bytes) -> dict[str, Any]:
    rows = connection.execute("SELECT id, record FROM steps WHERE run = ?", (id,))
    return {c.text_out(step): c.json_out(record) for step, record in rows}


def _steps_in(envelope: Mapping[str, Any] | None) -> dict[str, dict[str, Any]]:
    data = None if envelope is None else envelope.get("data")
    steps = data.get("steps") if isinstance(data, dict) else None
    return steps if isinstance(steps, dict) else {}


def _run(row: tuple[Any, ...]) -> Run:
    id, name, file, workflow, inputs, trace_id, holder, created_at, deadline_at, ended_at, envelope, parked_at = row
    return Run(
        c.text_out(id),
        c.text_out(name),
        c.text_out(file),
        c.json_out(workflow),
        c.json_out(inputs),
        trace_id,
        c.holder_out(holder),
        WallTime(created_at),
        c.maybe_time_out(deadline_at),
        c.maybe_time_out(ended_at),
        None if envelope is None else c.json_out(envelope),
        c.maybe_time_out(parked_at),
    )
