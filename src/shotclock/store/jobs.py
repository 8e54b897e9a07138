"""Jobs, which are detached work: who runs each, how far it is, how it ended, whether somebody was told; checkpoints.

A job is *starting* until its job runner takes charge, *running* while it has one, and ends *finished* (the runner said
so) or *lost* (the runner is gone without a word). The identical invocation finds it by its key. A new attempt after a
loss goes on under the same id, and what an earlier attempt still has to say is not listened to: writers may name the
attempt they belong to.
"""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Callable, Mapping
from enum import StrEnum
from typing import Any

from ..core.records import dataclass
from ..core.walltime import ProcessIdentity, WallTime
from . import schema as c
from .database import Database

# A job runner takes charge in well under a second. A machine that swaps, or a creator killed before it could start one,
# would run this out.
STARTING_LIMIT_MS = 30_000
# How long the result of a job answers for the identical invocation (F-081: kept for a day).
RETENTION_MS = 24 * 3600 * 1000

_ID = re.compile(r"[0-9A-Za-z_-]+", re.ASCII)
_AMBIGUOUS_SHOWN = 10


class JobState(StrEnum):
    STARTING = "starting"
    RUNNING = "running"
    FINISHED = "finished"
    LOST = "lost"


@dataclass(frozen=True, slots=True)
class NewJob:
    id: str
    """Made by the caller, who names the files of the job after it. Letters, digits, - and _."""
    key: str
    """The identity of the invocation: equal keys are the same work."""
    app: str
    command: str
    arguments: Any
    cwd: str
    program: Any
    tool_version: str
    spec: Any
    max_lifetime_ms: int
    idle_timeout_ms: int
    idempotency_key: str | None = None
    log_path: str | None = None
    stdin_path: str | None = None
    deadline_at: WallTime | None = None
    owner: str | None = None
    """Whose it is. None: the user's whose store it is."""
    resume: bool = False
    """Whether a lost job of the same key is to be taken up again, rather than reported."""


@dataclass(frozen=True, slots=True)
class Progress:
    done: int
    total: int | None
    unit: str | None
    at: WallTime
    """When `done` last grew."""


@dataclass(frozen=True, slots=True)
class Job:
    id: str
    key: str
    app: str
    command: str
    arguments: Any
    cwd: str
    program: Any
    tool_version: str
    idempotency_key: str | None
    spec: Any
    log_path: str | None
    stdin_path: str | None
    state: JobState
    attempt: int
    runner: ProcessIdentity | None
    progress: Progress | None
    heartbeat_at: WallTime | None
    """The last sign of life of this attempt: its job runner took charge, beat or made progress."""
    created_at: WallTime
    attempt_at: WallTime
    deadline_at: WallTime | None
    max_lifetime_ms: int
    idle_timeout_ms: int
    cancel_requested_at: WallTime | None
    ended_at: WallTime | None
    envelope: dict[str, Any] | None
    delivered_at: WallTime | None
    owner: str | None

    @property
    def is_active(self) -> bool:
        return self.ended_at is None


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """How far some work got, in its own form, so that the next attempt does not begin at nothing. Whether it fits
    today's input, its fingerprint tells whoever loads it."""

    key: str
    fingerprint: str
    state: Any
    saved_at: WallTime


@dataclass(frozen=True, slots=True)
class Ambiguous:
    """More than one job whose id has this prefix."""

    prefix: str
    ids: tuple[str, ...]


_COLUMNS = (
    "id, key, app, command, arguments, cwd, program, tool_version, idempotency_key, spec, log_path, stdin_path, state, "
    "attempt, keeper, progress_done, progress_total, progress_unit, progress_at, heartbeat_at, created_at, attempt_at, "
    "deadline_at, max_lifetime_ms, idle_timeout_ms, cancel_requested_at, ended_at, envelope, delivered_at, "
    "owner"
)


class Jobs:
    """Table of jobs."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def attach_or_create(
        self, new: NewJob, now: WallTime, is_alive: Callable[[ProcessIdentity], bool]
    ) -> tuple[Job, bool]:
        """Return the job that does this work, and whether the caller is the one who must start its job runner.

        Of any number of callers at once, one is. The others get that job, running, or ended and not yet told.
        A lost one comes back as a further attempt under its id (progress, log and input are kept) if
        `new.resume`, and otherwise ends as lost. `is_alive` must not use the store.
        """
        if not _ID.fullmatch(new.id):
            raise ValueError(f"{new.id!r} cannot be the id of a job: letters, digits, - and _ only")
        # Nearly every look finds a living job. Finding out costs no place among the writers.
        if (job := self.find_answer(new, now, is_alive)) is not None:
            return job, False
        row = _new_row(new, now)
        with self._database.write() as connection:
            job = _get_latest(connection, new.key)
            if job is not None and _answers(job, new, now, is_alive):
                return job, False
            if job is not None and job.state is not JobState.FINISHED and new.resume:
                _take_up_again(connection, job.id, row)
                return _get_existing(connection, job.id), True
            if job is not None and job.is_active:
                _end(connection, job.id, JobState.LOST, None, now)
                return _get_existing(connection, job.id), False
            if _get(connection, new.id) is not None:
                raise ValueError(f"there is another job of the id {new.id!r}")
            names = ", ".join(row)
            connection.execute(f"INSERT INTO jobs ({names}) VALUES ({', '.join(f':{n}' for n in row)})", row)
            return _get_existing(connection, new.id), True

    def find_answer(self, new: NewJob, now: WallTime, is_alive: Callable[[ProcessIdentity], bool]) -> Job | None:
        """Return the job that does this work already, or has done it and told nobody; None if there is none."""
        with self._database.read() as connection:
            job = _get_latest(connection, new.key)
        return job if job is not None and _answers(job, new, now, is_alive) else None

    def get(self, id: str) -> Job | None:
        with self._database.read() as connection:
            return _get(connection, id)

    def find(self, prefix: str, of: str | None = None) -> Job | Ambiguous | None:
        """Return the one job whose id has this prefix. The whole id always finds its job. `of`: only among those of
        this owner, as if others had none."""
        if not _ID.fullmatch(prefix):
            return None
        with self._database.read() as connection:
            if (exact := _get(connection, prefix)) is not None:
                return exact if of is None or exact.owner == of else None
            after = prefix[:-1] + chr(ord(prefix[-1]) + 1)
            rows = connection.execute(
                "SELECT id FROM jobs WHERE id >= ? AND id < ? AND owner IS ifnull(?, owner) ORDER BY id LIMIT ?",
                (prefix, after, c.maybe_text_in(of), _AMBIGUOUS_SHOWN),
            ).fetchall()
            if len(rows) > 1:
                return Ambiguous(prefix, tuple(id for (id,) in rows))
            return _get(connection, rows[0][0]) if rows else None

    def list(
        self, app: str | None = None, active_only: bool = False, limit: int = 100, of: str | None = None
    ) -> tuple[Job, ...]:
        """Return the newest jobs first. `of`: only those of this owner."""
        query, parameters = _list_query(app, active_only, limit, of)
        with self._database.read() as connection:
            return tuple(map(_job, connection.execute(query, parameters).fetchall()))

    def take_charge(self, id: str, runner: ProcessIdentity, now: WallTime) -> Job | None:
        """Put a starting job under this job runner and return it. None if it is not to be run: ended, or under another
        runner."""
        with self._database.write() as connection:
            connection.execute(
                "UPDATE jobs SET state = 'running', keeper = ?, heartbeat_at = ? WHERE id = ? AND state = 'starting'",
                (c.holder_in(runner), now.ms, id),
            )
            job = _get(connection, id)
        return job if job is not None and job.state is JobState.RUNNING and job.runner == runner else None

    def progress(
        self, id: str, done: int, total: int | None, unit: str | None, now: WallTime, *, attempt: int | None = None
    ) -> Progress | None:
        """Record progress and return what is kept: `done` never decreases, and total and unit stay until others are
        given.

        Survives `kill -9`; a power loss may take the last few seconds. None if nothing was ever kept.
        """
        c.count_in(done, "done")
        if total is not None:
            c.count_in(total, "total")
        parameters = {
            "id": id, "done": done, "total": total, "unit": c.maybe_text_in(unit), "now": now.ms, "attempt": attempt,
        }  # fmt: skip
        with self._database.write(durable=False) as connection:
            # The right hand sides see the row as it was.
            connection.execute(
                """
                UPDATE jobs SET
                    progress_at = CASE WHEN progress_done >= :done THEN progress_at ELSE :now END,
                    progress_done = max(ifnull(progress_done, 0), :done),
                    progress_total = ifnull(:total, progress_total),
                    progress_unit = ifnull(:unit, progress_unit),
                    heartbeat_at = :now
                WHERE id = :id AND ended_at IS NULL AND attempt = ifnull(:attempt, attempt)
                """,
                parameters,
            )
            job = _get(connection, id)
        return job.progress if job is not None else None

    def beat(self, id: str, now: WallTime, *, attempt: int | None = None) -> bool:
        """Record a sign of life and return whether the job is still active. Does not wait for the disk."""
        with self._database.write(durable=False) as connection:
            return _has_changed(connection.execute(
                "UPDATE jobs SET heartbeat_at = ? WHERE id = ? AND ended_at IS NULL AND attempt = ifnull(?, attempt)",
                (now.ms, id, attempt),
            ))  # fmt: skip

    def request_cancel(self, id: str, now: WallTime) -> Job | None:
        """Record that the job is to be cancelled and return it as it is now. The first request counts; one that has
        ended is left as it is."""
        with self._database.write() as connection:
            connection.execute(
                "UPDATE jobs SET cancel_requested_at = ? "
                "WHERE id = ? AND ended_at IS NULL AND cancel_requested_at IS NULL",
                (now.ms, id),
            )
            return _get(connection, id)

    def finish(self, id: str, envelope: Mapping[str, Any], now: WallTime, *, attempt: int | None = None) -> bool:
        """End the job with its envelope. Return whether it was this call that ended it: the first one does."""
        text = c.json_in(envelope)
        with self._database.write() as connection:
            return _end(connection, id, JobState.FINISHED, text, now, attempt)

    def mark_lost(
        self, id: str, envelope: Mapping[str, Any] | None, now: WallTime, *, attempt: int | None = None
    ) -> bool:
        """End a job whose runner is gone, or give the envelope to one that was found lost without. Return whether
        anything changed."""
        text = None if envelope is None else c.json_in(envelope)
        with self._database.write() as connection:
            if _end(connection, id, JobState.LOST, text, now, attempt):
                return True
            return text is not None and _has_changed(connection.execute(
                "UPDATE jobs SET envelope = ? WHERE id = ? AND state = 'lost' AND envelope IS NULL "
                "AND attempt = ifnull(?, attempt)",
                (text, id, attempt),
            ))  # fmt: skip

    def deliver(self, id: str, now: WallTime) -> bool:
        """Record that somebody was told how it ended. Return whether that was the first time."""
        with self._database.write() as connection:
            return _has_changed(connection.execute(
                "UPDATE jobs SET delivered_at = ? WHERE id = ? AND ended_at IS NOT NULL AND delivered_at IS NULL",
                (now.ms, id),
            ))  # fmt: skip

    def forget_ended_before(self, before: WallTime, limit: int = 500) -> tuple[Job, ...]:
        """Delete the oldest jobs that ended before then and return them; their files are the caller's to remove.

        At most `limit` at once, so that nobody waits long for the place among the writers: ask again until empty.
        """
        with self._database.write() as connection:
            rows = connection.execute(
                f"SELECT {_COLUMNS} FROM jobs WHERE ended_at < ? ORDER BY ended_at LIMIT ?", (before.ms, limit)
            ).fetchall()
            jobs = tuple(map(_job, rows))
            connection.executemany("DELETE FROM jobs WHERE id = ?", [(job.id,) for job in jobs])
        return jobs


class Checkpoints:
    """Table of checkpoints, one for each key. One that was saved is on the disk."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def save(self, key: str, fingerprint: str, state: object, now: WallTime) -> None:
        """Replace the checkpoint of this key, all of it or nothing. `state` is any JSON value."""
        text = c.json_in(state)
        with self._database.write() as connection:
            connection.execute(
                "INSERT INTO checkpoints (key, fingerprint, state, saved_at) VALUES (?, ?, ?, ?) "
                "ON CONFLICT (key) DO UPDATE SET fingerprint = excluded.fingerprint, state = excluded.state, "
                "saved_at = excluded.saved_at",
                (c.text_in(key), c.text_in(fingerprint), text, now.ms),
            )

    def load(self, key: str) -> Checkpoint | None:
        """Return the checkpoint of this key, or None."""
        with self._database.read() as connection:
            row = connection.execute(
                "SELECT key, fingerprint, state, saved_at FROM checkpoints WHERE key = ?", (c.text_in(key),)
            ).fetchone()
        if row is None:
            return None
        return Checkpoint(c.text_out(row[0]), c.text_out(row[1]), c.json_out(row[2]), WallTime(row[3]))

    def clear(self, key: str) -> bool:
        """Delete the checkpoint of this key. Return whether there was one."""
        with self._database.write() as connection:
            return connection.execute("DELETE FROM checkpoints WHERE key = ?", (c.text_in(key),)).rowcount > 0

    def forget_saved_before(self, before: WallTime, limit: int = 500) -> int:
        """Delete the oldest checkpoints, `limit` at most, and return how many. Those of jobs that are still active
        stay, however old."""
        with self._database.write() as connection:
            return connection.execute(
                "DELETE FROM checkpoints WHERE key IN (SELECT key FROM checkpoints WHERE saved_at < ? AND key NOT IN "
                "(SELECT key FROM jobs WHERE ended_at IS NULL) ORDER BY saved_at LIMIT ?)",
                (before.ms, c.count_in(limit, "limit")),
            ).rowcount


def _answers(job: Job, new: NewJob, now: WallTime, is_alive: Callable[[ProcessIdentity], bool]) -> bool:
    """Return whether this job is the answer to the invocation as it stands."""
    if job.state is JobState.STARTING:
        # Either way: a clock that was set back must not keep a job starting until it has caught up.
        return abs(now - job.attempt_at) < STARTING_LIMIT_MS
    if job.state is JobState.RUNNING:
        return job.runner is not None and is_alive(job.runner)
    assert job.ended_at is not None
    if job.state is JobState.LOST and new.resume:
        return False
    untold = job.delivered_at is None
    return (untold or job.idempotency_key is not None) and now - job.ended_at < RETENTION_MS


def _list_query(app: str | None, active_only: bool, limit: int, of: str | None) -> tuple[str, tuple[Any, ...]]:
    conditions = (["app = ?"] if app is not None else []) + (["ended_at IS NULL"] if active_only else [])
    conditions += ["owner = ?"] if of is not None else []
    where = f" WHERE {' AND '.join(conditions)}" if conditions else ""
    names = tuple(c.text_in(name) for name in (app, of) if name is not None)
    parameters = (*names, c.count_in(limit, "limit"))
    return f"SELECT {_COLUMNS} FROM jobs{where} ORDER BY seq DESC LIMIT ?", parameters


def _new_row(new: NewJob, now: WallTime) -> dict[str, Any]:
    return {
        "id": new.id,
        "key": c.text_in(new.key),
        "app": c.text_in(new.app),
        "command": c.text_in(new.command),
        "arguments": c.json_in(new.arguments),
        "cwd": c.text_in(new.cwd),
        "program": c.json_in(new.program),
        "tool_version": c.text_in(new.tool_version),
        "idempotency_key": c.maybe_text_in(new.idempotency_key),
        "spec": c.json_in(new.spec),
        "log_path": c.maybe_text_in(new.log_path),
        "stdin_path": c.maybe_text_in(new.stdin_path),
        "state": JobState.STARTING.value,
        "attempt": 1,
        "created_at": now.ms,
        "attempt_at": now.ms,
        "deadline_at": c.maybe_time_in(new.deadline_at),
        "max_lifetime_ms": c.count_in(new.max_lifetime_ms, "max_lifetime_ms"),
        "idle_timeout_ms": c.count_in(new.idle_timeout_ms, "idle_timeout_ms"),
        "owner": c.maybe_text_in(new.owner),
    }


def _take_up_again(connection: sqlite3.Connection, id: str, row: dict[str, Any]) -> None:
    """Begin a further attempt, with the clocks of the call that asked for it. Log and input stay: same key, same
    input."""
    connection.execute(
        """
        UPDATE jobs SET
            state = 'starting', attempt = attempt + 1, attempt_at = :attempt_at, keeper = NULL, heartbeat_at = NULL,
            program = :program, spec = :spec, deadline_at = :deadline_at, max_lifetime_ms = :max_lifetime_ms,
            idle_timeout_ms = :idle_timeout_ms, cancel_requested_at = NULL, ended_at = NULL, envelope = NULL,
            delivered_at = NULL
        WHERE id = :resumed
        """,
        {**row, "resumed": id},
    )


def _end(
    connection: sqlite3.Connection,
    id: str,
    state: JobState,
    envelope: str | None,
    now: WallTime,
    attempt: int | None = None,
) -> bool:
    return _has_changed(connection.execute(
        "UPDATE jobs SET state = ?, envelope = ?, ended_at = ? "
        "WHERE id = ? AND ended_at IS NULL AND attempt = ifnull(?, attempt)",
        (state.value, envelope, now.ms, id, attempt),
    ))  # fmt: skip


def _has_changed(cursor: sqlite3.Cursor) -> bool:
    return cursor.rowcount > 0


def _get_latest(connection: sqlite3.Connection, key: str) -> Job | None:
    query = f"SELECT {_COLUMNS} FROM jobs WHERE key = ? ORDER BY seq DESC LIMIT 1"
    row = connection.execute(query, (c.text_in(key),)).fetchone()
    return None if row is None else _job(row)


def _get(connection: sqlite3.Connection, id: str) -> Job | None:
    row = connection.execute(f"SELECT {_COLUMNS} FROM jobs WHERE id = ?", (c.text_in(id),)).fetchone()
    return None if row is None else _job(row)


def _get_existing(connection: sqlite3.Connection, id: str) -> Job:
    job = _get(connection, id)
    assert job is not None
    return job


def _job(row: tuple[Any, ...]) -> Job:
    (
        id, key, app, command, arguments, cwd, program, tool_version, idempotency_key, spec, log_path, stdin_path,
        state, attempt, keeper, done, total, unit, progress_at, heartbeat_at, created_at, attempt_at,
        deadline_at, max_lifetime_ms, idle_timeout_ms, cancel_requested_at, ended_at, envelope, delivered_at,
        owner,
    ) = row  # fmt: skip
    progress = None if done is None else Progress(done, total, c.maybe_text_out(unit), WallTime(progress_at))
    return Job(
        id=id,
        key=c.text_out(key),
        app=c.text_out(app),
        command=c.text_out(command),
        arguments=c.json_out(arguments),
        cwd=c.text_out(cwd),
        program=c.json_out(program),
        tool_version=c.text_out(tool_version),
        idempotency_key=c.maybe_text_out(idempotency_key),
        spec=c.json_out(spec),
        log_path=c.maybe_text_out(log_path),
        stdin_path=c.maybe_text_out(stdin_path),
        state=JobState(state),
        attempt=attempt,
        runner=c.maybe_holder_out(keeper),
        progress=progress,
        heartbeat_at=c.maybe_time_out(heartbeat_at),
        created_at=WallTime(created_at),
        attempt_at=WallTime(attempt_at),
        deadline_at=c.maybe_time_out(deadline_at),
        max_lifetime_ms=max_lifetime_ms,
        idle_timeout_ms=idle_timeout_ms,
        cancel_requested_at=c.maybe_time_out(cancel_requested_at),
        ended_at=c.maybe_time_out(ended_at),
        envelope=None if envelope is None else c.json_out(envelope),
        delivered_at=c.maybe_time_out(delivered_at),
        owner=c.maybe_text_out(owner),
    )
