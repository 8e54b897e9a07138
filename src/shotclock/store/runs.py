"""Runs of workflows: what was asked for, how far each step is, and how it ended.

A step is written down when it begins and when it ends, so that whoever takes a run up again after a crash knows what
was finished and what was cut off in the middle.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from ..core.holder import Holder
from ..core.walltime import WallTime
from . import columns as c
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
    holder: Holder
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


class RunTaken(Exception):
    """The run is somebody's: it is under way, or its id was used before."""

    def __init__(self, run: Run) -> None:
        super().__init__(run.id)
        self.run = run


_COLUMNS = "id, name, file, workflow, inputs, trace_id, holder, created_at, deadline_at, ended_at, envelope, parked_at"


class Runs:
    def __init__(self, database: Database) -> None:
        self._database = database

    def begin(self, new: NewRun, holder: Holder, now: WallTime) -> Run:
        """Raises RunTaken if there is one of that id already, however it ended."""
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

    def take_up(self, run_id: str, holder: Holder, is_alive: Callable[[Holder], bool]) -> Run | None:
        """The run, now this holder's; None if there is none. Raises RunTaken while another process lives that has it.

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

    def park(self, run_id: str, holder: Holder, now: WallTime) -> None:
        """Nobody has it any more, until it is taken up again."""
        with self._database.write() as connection:
            connection.execute(
                "UPDATE runs SET parked_at = ? WHERE id = ? AND holder = ? AND ended_at IS NULL",
                (now.ms, c.text_in(run_id), c.holder_in(holder)),
            )

    def record(self, run_id: str, steps: Iterable[StepRecord], now: WallTime, *, may_wait: bool = True) -> None:
        """How far these steps are, all of them or none. Survives `kill -9`; a power loss may take the last moment, and
        its step is then taken for one that was cut off. `may_wait`: see Database.write."""
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
        """Whether this ended it. The first end stays."""
        text = c.json_in(envelope)
        with self._database.write() as connection:
            return connection.execute(
                "UPDATE runs SET envelope = ?, ended_at = ? WHERE id = ? AND ended_at IS NULL",
                (text, now.ms, c.text_in(run_id)),
            ).rowcount > 0  # fmt: skip

    def get(self, run_id: str) -> Run | None:
        with self._database.read() as connection:
            return _get(connection, run_id)

    def inside(self, run_id: str, step_id: str) -> tuple[str, ...]:
        """The runs that a step has begun, which have not ended."""
        first = f"{run_id}.{step_id}"
        with self._database.read() as connection:
            rows = connection.execute(
                "SELECT id FROM runs WHERE (id = ? OR substr(id, 1, ?) = ?) AND ended_at IS NULL",
                (c.text_in(first), len(first) + 1, f"{first}."),
            )
            ids = [c.text_out(id) for (id,) in rows]
        return tuple(id for id in ids if id == first or id[len(first) + 1 :].isdecimal())

    def list(self, limit: int = 100) -> tuple[Run, ...]:
        """The newest first."""
        with self._database.read() as connection:
            rows = connection.execute(f"SELECT {_COLUMNS} FROM runs ORDER BY seq DESC LIMIT ?", (limit,)).fetchall()
        return tuple(map(_run, rows))

    def forget_ended_before(self, before: WallTime, limit: int = 100) -> int:
        """How many went: the oldest, `limit` at most, with their steps."""
        with self._database.write() as connection:
            return connection.execute(
                "DELETE FROM runs WHERE id IN (SELECT id FROM runs WHERE ended_at < ? ORDER BY ended_at LIMIT ?)",
                (before.ms, c.count_in(limit, "limit")),
            ).rowcount


def _get(connection: sqlite3.Connection, run_id: str) -> Run | None:
    row = connection.execute(f"SELECT {_COLUMNS} FROM runs WHERE id = ?", (c.text_in(run_id),)).fetchone()
    return None if row is None else _run(row)


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
