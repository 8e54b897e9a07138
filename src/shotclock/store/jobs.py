"""Jobs, which are detached work, with their runner, progress and end; and checkpoints.

A job is *starting* until its job runner takes charge, *running* while it has one, and ends *finished* (reported by the
runner) or *lost* (the runner died). The identical invocation finds it by its key. A new attempt after a loss has the
same id; writers may name their attempt, and those of an earlier attempt are ignored.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from enum import StrEnum
from typing import Any

from ..core.limits import ProcessIdentity, WallTime
from ..core.value_types import JsonObject, value
from ._database import Table, Transaction, check_count, json_text
from ._rows import RowMapper, insert_row

# A job runner takes charge in well under a second. A machine that swaps, or a creator killed before it could start one,
# exhausts this.
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


@value
class Job:
    id: str  # letters, digits, - and _. The files of the job are named after it
    key: str  # the identity of the invocation: equal keys are the same work
    app: str
    command: str
    arguments: Any
    cwd: str
    program: Any
    tool_version: str
    spec: Any
    max_lifetime_ms: int
    idle_timeout_ms: int
    created_at: WallTime
    attempt_at: WallTime
    idempotency_key: str | None = None
    log_path: str | None = None
    stdin_path: str | None = None
    deadline_at: WallTime | None = None
    owner: str | None = None  # None: the user of the store
    state: JobState = JobState.STARTING
    attempt: int = 1
    runner: ProcessIdentity | None = None
    progress_done: int | None = None
    progress_total: int | None = None
    progress_unit: str | None = None
    progress_at: WallTime | None = None  # when `progress_done` last grew
    heartbeat_at: WallTime | None = None  # the last sign of life of this attempt
    cancel_requested_at: WallTime | None = None
    ended_at: WallTime | None = None
    envelope: JsonObject | None = None
    delivered_at: WallTime | None = None
    used_ms: int = 0  # how long its attempts have worked, by their own clocks, until the last sign of life

    @property
    def is_active(self) -> bool:
        return self.ended_at is None

    @property
    def open_questions(self) -> JsonObject:
        """The requests to an MCP client that have no answer yet, by their keys."""
        questions = self.spec.get("questions", {})
        return {key: each["request"] for key, each in questions.items() if "answer" not in each}


@value
class Checkpoint:
    """State of some work for its next attempt. The fingerprint identifies the input that it belongs to."""

    key: str
    fingerprint: str
    state: Any
    saved_at: WallTime


@value
class Ambiguous:
    ids: tuple[str, ...]


_JOBS = RowMapper(Job, "jobs")
_CHECKPOINTS = RowMapper(Checkpoint, "checkpoints")
# A writer may name the attempt it belongs to.
_SAME_ATTEMPT = "attempt = coalesce(?, attempt)"


class Jobs(Table):
    def attach_or_create(
        self, new: Job, is_alive: Callable[[ProcessIdentity], bool], *, resume: bool = False
    ) -> tuple[Job, bool]:
        """Return the job of this work, and whether this caller must start its job runner. `new` is created now.

        Of several callers at once, one must. The others get that job, running, or ended and not yet delivered. With
        `resume` a lost one gets a further attempt under its id (progress, log and input are kept); otherwise it
        ends as lost. `is_alive` must not use the store.
        """
        if not _ID.fullmatch(new.id):
            raise ValueError(f"{new.id!r} cannot be the id of a job: letters, digits, - and _ only")
        now = new.created_at
        # Nearly every look finds a living job, and does not have to wait for writers.
        if (job := self.find_answer(new.key, now, is_alive, resume=resume)) is not None:
            return job, False
        check_count(new.max_lifetime_ms, "max_lifetime_ms")
        check_count(new.idle_timeout_ms, "idle_timeout_ms")
        row = _JOBS.write(new)
        with self._database.write() as transaction:
            job = _get_latest(transaction, new.key)
            if job is not None and _answers(job, now, is_alive, resume):
                return job, False
            if job is not None and job.state is not JobState.FINISHED and resume:
                names = ("program", "spec", "deadline_at", "max_lifetime_ms", "idle_timeout_ms")  # of the new call
                transaction.execute(  # log and input stay: same key, same input
                    "UPDATE jobs SET state = 'starting', attempt = attempt + 1, attempt_at = ?, runner = NULL, "
                    "heartbeat_at = NULL, cancel_requested_at = NULL, ended_at = NULL, envelope = NULL, "
                    f"delivered_at = NULL, {', '.join(f'{name} = ?' for name in names)} WHERE id = ?",
                    (now, *(row[name] for name in names), job.id),
                )
                return _get_existing(transaction, job.id), True
            if job is not None and job.is_active:
                _end(transaction, job.id, JobState.LOST, None, now)
                return _get_existing(transaction, job.id), False
            if _get(transaction, new.id) is not None:
                raise ValueError(f"there is another job of the id {new.id!r}")
            insert_row(transaction, "jobs", row)
            return _get_existing(transaction, new.id), True

    def find_answer(
        self, key: str, now: WallTime, is_alive: Callable[[ProcessIdentity], bool], *, resume: bool = False
    ) -> Job | None:
        """Return the job that does this work, or has done it and is not delivered; None if there is none."""
        with self._database.read() as transaction:
            job = _get_latest(transaction, key)
        return job if job is not None and _answers(job, now, is_alive, resume) else None

    def create_unless_active(self, new: Job, is_alive: Callable[[ProcessIdentity], bool]) -> Job | None:
        """Create the job, or return the active one of its key. One whose runner is dead ends as lost."""
        row = _JOBS.write(new)
        with self._database.write() as transaction:
            job = _get_latest(transaction, new.key)
            if job is not None and job.is_active:
                if _answers(job, new.created_at, is_alive, resume=False):
                    return job
                _end(transaction, job.id, JobState.LOST, None, new.created_at)
            insert_row(transaction, "jobs", row)
        return None

    def forget(self, id: str) -> None:
        """Delete an ended job, which no caller needs any more. The caller removes its files."""
        self._execute("DELETE FROM jobs WHERE id = ? AND ended_at IS NOT NULL", (id,))

    def find_latest(self, key: str) -> Job | None:
        return self._read(_get_latest, key)

    def amend(self, id: str, changes: Mapping[str, object], *, wait_ms: int | None = None) -> None:
        """Change values in the `spec` of a job. `wait_ms`: see Database.write."""
        with self._database.write(durable=False, wait_ms=wait_ms) as transaction:
            if (job := _get(transaction, id)) is not None:
                text = json_text({**job.spec, **changes})
                transaction.execute("UPDATE jobs SET spec = ? WHERE id = ?", (text, id))

    def ask(self, id: str, key: str, request: Mapping[str, Any], *, attempt: int) -> bool:
        return self._change_questions(id, lambda questions: {**questions, key: {"request": request}}, attempt)

    def answer(self, id: str, answers: Mapping[str, Any]) -> bool:
        """Store answers to open questions; the first to each counts. Return whether the job is still active."""

        def add(questions: Mapping[str, Any]) -> JsonObject:
            return {
                key: {**each, "answer": answers[key]} if key in answers and "answer" not in each else each
                for key, each in questions.items()
            }

        return self._change_questions(id, add)

    def withdraw(self, id: str, key: str, *, attempt: int) -> bool:
        """Delete a question with its answer. Return whether the job is still active."""
        return self._change_questions(id, lambda questions: {k: v for k, v in questions.items() if k != key}, attempt)

    def _change_questions(
        self, id: str, change: Callable[[Mapping[str, Any]], Mapping[str, Any]], attempt: int | None = None
    ) -> bool:
        with self._database.write() as transaction:
            job = _get(transaction, id)
            if job is None or not job.is_active or attempt not in (None, job.attempt):
                return False
            text = json_text({**job.spec, "questions": change(job.spec.get("questions", {}))})
            transaction.execute("UPDATE jobs SET spec = ? WHERE id = ?", (text, id))
            return True

    def get(self, id: str) -> Job | None:
        return self._read(_get, id)

    def find(self, prefix: str, of: str | None = None) -> Job | Ambiguous | None:
        """Return the one job whose id has this prefix, or is it. `of`: only among the jobs of this owner."""
        if not _ID.fullmatch(prefix):
            return None
        with self._database.read() as transaction:
            if (exact := _get(transaction, prefix)) is not None:
                return exact if of is None or exact.owner == of else None
            after = prefix[:-1] + chr(ord(prefix[-1]) + 1)
            whose, owner = ("", ()) if of is None else ("AND owner = ? ", (of,))
            rows = transaction.execute(
                f"SELECT id FROM jobs WHERE id >= ? AND id < ? {whose}ORDER BY id LIMIT ?",
                (prefix, after, *owner, _AMBIGUOUS_SHOWN),
            ).fetchall()
            if len(rows) > 1:
                return Ambiguous(tuple(id for (id,) in rows))
            return _get(transaction, rows[0][0]) if rows else None

    def list(
        self, app: str | None = None, active_only: bool = False, limit: int = 100, of: str | None = None
    ) -> tuple[Job, ...]:
        """Return the newest jobs first. `of`: only those of this owner."""
        conditions = (["app = ?"] if app is not None else []) + (["ended_at IS NULL"] if active_only else [])
        conditions += ["owner = ?"] if of is not None else []
        where = f"WHERE {' AND '.join(conditions)} " if conditions else ""
        names = tuple(name for name in (app, of) if name is not None)
        with self._database.read() as transaction:
            values = (*names, check_count(limit, "limit"))
            return tuple(_JOBS.list(transaction, f"{where}ORDER BY seq DESC LIMIT ?", values))

    def assign_runner(self, id: str, runner: ProcessIdentity, now: WallTime) -> Job | None:
        """Give a starting job to this job runner and return it. None if it has ended or has another runner."""
        with self._database.write() as transaction:
            transaction.execute(
                "UPDATE jobs SET state = 'running', runner = ?, heartbeat_at = ? WHERE id = ? AND state = 'starting'",
                (runner, now, id),
            )
            job = _get(transaction, id)
        return job if job is not None and job.state is JobState.RUNNING and job.runner == runner else None

    def progress(
        self,
        id: str,
        done: int,
        total: int | None,
        unit: str | None,
        now: WallTime,
        *,
        attempt: int | None = None,
        wait_ms: int | None = None,
    ) -> None:
        """Record progress: `done` never decreases, total and unit stay until replaced.

        Survives `kill -9`; a power loss may take the last few seconds.
        """
        check_count(done, "done")
        if total is not None:
            check_count(total, "total")
        # The right hand sides see the row as it was.
        self._execute(
            "UPDATE jobs SET progress_at = CASE WHEN progress_done >= ? THEN progress_at ELSE ? END, "
            "progress_done = CASE WHEN progress_done >= ? THEN progress_done ELSE ? END, "
            "progress_total = coalesce(?, progress_total), progress_unit = coalesce(?, progress_unit), "
            f"heartbeat_at = ? WHERE id = ? AND ended_at IS NULL AND {_SAME_ATTEMPT}",
            (done, now, done, done, total, unit, now, id, attempt),
            durable=False,
            wait_ms=wait_ms,
        )

    def beat(
        self, id: str, now: WallTime, *, attempt: int | None = None, used_ms: int = 0, wait_ms: int | None = None
    ) -> bool:
        """Record a sign of life and return whether the job is still active. Does not wait for the disk.

        `used_ms`: how long its attempts have worked. `wait_ms`: see Database.write.
        """
        query = (
            "UPDATE jobs SET heartbeat_at = ?, used_ms = CASE WHEN used_ms >= ? THEN used_ms ELSE ? END "
            f"WHERE id = ? AND ended_at IS NULL AND {_SAME_ATTEMPT}"
        )
        return self._execute(query, (now, used_ms, used_ms, id, attempt), durable=False, wait_ms=wait_ms) > 0

    def request_cancel(self, id: str, now: WallTime, *, wait_ms: int | None = None) -> Job | None:
        """Record a request to cancel the job, unless it has ended, and return it. The first request counts."""
        with self._database.write(wait_ms=wait_ms) as transaction:
            transaction.execute(
                "UPDATE jobs SET cancel_requested_at = ? "
                "WHERE id = ? AND ended_at IS NULL AND cancel_requested_at IS NULL",
                (now, id),
            )
            return _get(transaction, id)

    def finish(self, id: str, envelope: Mapping[str, Any], now: WallTime, *, attempt: int | None = None) -> bool:
        """End the job with its envelope. Return whether this call ended it: the first one does."""
        text = json_text(envelope)
        with self._database.write() as transaction:
            return _end(transaction, id, JobState.FINISHED, text, now, attempt)

    def mark_lost(self, seen: Job, envelope: Mapping[str, Any], now: WallTime) -> bool:
        """End a job without a runner, or add the envelope of a lost one. Return whether anything changed.

        Nothing does if the job is no longer as it was seen: its runner may have come.
        """
        text = json_text(envelope)
        with self._database.write() as transaction:
            job = _get(transaction, seen.id)
            if job is None or (job.attempt, job.state) != (seen.attempt, seen.state):
                return False
            if job.is_active:
                return _end(transaction, job.id, JobState.LOST, text, now)
            query = "UPDATE jobs SET envelope = ? WHERE id = ? AND state = 'lost' AND envelope IS NULL"
            return transaction.execute(query, (text, job.id)).rowcount > 0

    def deliver(self, id: str, now: WallTime) -> bool:
        """Record the delivery of the envelope. Return whether that was the first one."""
        query = "UPDATE jobs SET delivered_at = ? WHERE id = ? AND ended_at IS NOT NULL AND delivered_at IS NULL"
        return self._execute(query, (now, id)) > 0

    def forget_ended_before(self, before: WallTime, limit: int = 500) -> tuple[Job, ...]:
        """Delete the oldest jobs that ended before then, `limit` at most so that other writers do not wait long, and
        return them. The caller removes their files."""
        with self._database.write() as transaction:
            jobs = tuple(_JOBS.list(transaction, "WHERE ended_at < ? ORDER BY ended_at LIMIT ?", (before, limit)))
            transaction.executemany("DELETE FROM jobs WHERE id = ?", [(job.id,) for job in jobs])
        return jobs


class Checkpoints(Table):
    """Table of checkpoints, one for each key. A saved one is on the disk."""

    def save(self, key: str, fingerprint: str, state: object, now: WallTime) -> None:
        self._execute(
            "INSERT INTO checkpoints (key, fingerprint, state, saved_at) VALUES (?, ?, ?, ?) "
            "ON CONFLICT (key) DO UPDATE SET fingerprint = excluded.fingerprint, state = excluded.state, "
            "saved_at = excluded.saved_at",
            (key, fingerprint, json_text(state), now),
        )

    def load(self, key: str) -> Checkpoint | None:
        return self._read(_CHECKPOINTS.get, "WHERE key = ?", (key,))

    def clear(self, key: str) -> bool:
        return self._execute("DELETE FROM checkpoints WHERE key = ?", (key,)) > 0

    def forget_saved_before(self, before: WallTime, limit: int = 500) -> int:
        """Delete the oldest checkpoints, `limit` at most, and return their number. Those of active jobs stay."""
        return self._execute(
            "DELETE FROM checkpoints WHERE key IN (SELECT key FROM checkpoints WHERE saved_at < ? AND key NOT IN "
            "(SELECT key FROM jobs WHERE ended_at IS NULL) ORDER BY saved_at LIMIT ?)",
            (before, check_count(limit, "limit")),
        )


def _answers(job: Job, now: WallTime, is_alive: Callable[[ProcessIdentity], bool], resume: bool) -> bool:
    """Return whether this job answers an invocation of the same work."""
    if job.state is JobState.STARTING:
        # `abs`, so that a clock that was set back does not keep a job starting until it has caught up.
        return abs(now - job.attempt_at) < STARTING_LIMIT_MS
    if job.state is JobState.RUNNING:
        return job.runner is not None and is_alive(job.runner)
    if job.ended_at is None or (job.state is JobState.LOST and resume):
        return False
    is_wanted = job.delivered_at is None or job.idempotency_key is not None
    return is_wanted and now - job.ended_at < RETENTION_MS


def _end(
    transaction: Transaction, id: str, state: JobState, envelope: str | None, now: WallTime, attempt: int | None = None
) -> bool:
    where = f"WHERE id = ? AND ended_at IS NULL AND {_SAME_ATTEMPT}"
    query = f"UPDATE jobs SET state = ?, envelope = ?, ended_at = ? {where}"
    return transaction.execute(query, (state, envelope, now, id, attempt)).rowcount > 0


def _get_latest(transaction: Transaction, key: str) -> Job | None:
    return _JOBS.get(transaction, "WHERE key = ? ORDER BY seq DESC LIMIT 1", (key,))


def _get(transaction: Transaction, id: str) -> Job | None:
    return _JOBS.get(transaction, "WHERE id = ?", (id,))


def _get_existing(transaction: Transaction, id: str) -> Job:
    job = _get(transaction, id)
    assert job is not None
    return job
