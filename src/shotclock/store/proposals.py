"""Table of proposals: what was asked for, how each was decided, and what became of it.

Every change is one transaction that reads the proposal, lets core/proposal.py decide whether the change may be,
and writes it down together with its entry in the audit trail. The entry's number is the proposal's new `seq`.
One that is past its end is expired in the same transaction, before anything else is done with it.

What is asked for stands in a table of its own: it can be long and never changes, so lists and expiry leave it alone.

docs/design.md: R41.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..core.errors import Failure
from ..core.proposal import (
    NOTES_SHOWN,
    Decision,
    InboxLimits,
    Kind,
    Proposal,
    ProposalRequest,
    ProposalStatus,
    Ran,
    Runner,
    Summary,
    apply_decision,
    apply_expiry,
    apply_extension,
    apply_going_on,
    apply_outcome,
    apply_use,
    apply_withdrawal,
    digest,
)
from ..core.records import dataclass
from ..core.walltime import LATEST_MS, WallTime
from . import schema as c
from .audit import Entry, append, digest_of_row, entries_of, next_seq
from .database import Database

# How many are expired or reminded of in one transaction.
AT_ONCE = 200
# Who did it, where nobody did.
THE_CLOCK = "(clock)"

_COLUMNS = (
    "id, seq, status, asked_by, key, action_hash, created_at, expires_at, reminded_at, decided_by, decided_at, "
    "used_at, decision, ask, decided_via, runner, outcome"
)
# All that is kept of one beside its number and its ask: what its last entry has the digest of. Never changed, because
# entries of another time are compared with it.
_ROW = (
    "id, status, asked_by, key, action_hash, created_at, expires_at, remind_at, reminded_at, decided_by, decided_at, "
    "decided_via, used_at, runner, outcome, about, notes, decision"
)
_WHOLE = f"SELECT {_COLUMNS} FROM proposals JOIN asks USING (id)"
_SUMMARY = (
    "SELECT id, proposals.seq, status, asked_by, created_at, expires_at, decided_by, decided_at, used_at, about, "
    "notes, decided_via, outcome, runner"
)


@dataclass(frozen=True, slots=True)
class NewProposal:
    """A proposal that is to be opened, or found again."""

    id: str
    ask: ProposalRequest
    asked_by: str
    key: str | None = None
    since: WallTime | None = None
    """The key stands for one question of work that began then and may go on after any time: what was asked under it
    is found again however it ended, and what was asked before is somebody else's."""


@dataclass(frozen=True, slots=True)
class Attached:
    """The proposal that answers a request, and whether it was made for it."""

    proposal: Proposal
    was_made: bool


@dataclass(frozen=True, slots=True)
class Kept:
    """All there is about one proposal, for whoever verifies it."""

    proposal: Proposal | None
    summary: Summary | None
    row: str | None
    ask: str | None
    """Digests of both, as entries have them."""
    entries: list[Entry]


class Proposals:
    """Table of proposals. Every change is one transaction, with its entry in the audit trail."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def attach_or_create(self, new: NewProposal, now: WallTime, limits: InboxLimits | None = None) -> Attached:
        """Return the proposal that answers this call. Raises Failure if the key stands for another action (KEY_REUSED),
        or if a new one would be one too many (INBOX_FULL).

        Identical is the same key, or without one the same action without a key, by the same asker.
        """
        (found,) = self.attach_or_create_all([new], now, limits)
        if isinstance(found, Failure):
            raise found
        return found

    def attach_or_create_all(
        self, asked: Sequence[NewProposal], now: WallTime, limits: InboxLimits | None = None
    ) -> list[Attached | Failure]:
        """Do the same for many at the price of one wait for the disk. Those before count for those that follow.
        `limits` is how many may be open then; None: as many as come."""
        texts = [c.json_in(new.ask.as_json()) for new in asked]
        with self._database.write() as connection:
            left = _LimitsLeft(connection, now, limits)
            return [_attach_or_create(connection, new, text, now, left) for new, text in zip(asked, texts, strict=True)]

    # --- changes --------------------------------------------------------------------------------------------

    def decide(
        self,
        id: str,
        decision: Decision,
        by: str,
        now: WallTime,
        *,
        via: str | None = None,
        action_hash: str | None = None,
        confirmation: str | None = None,
    ) -> Proposal:
        """Record a decision. Raises Failure unless the proposal was open until now. Check the decision before: nothing
        here looks inside it."""
        details = {"notes": decision.notes, "decision": digest(decision.as_json()), **({"via": via} if via else {})}

        def step(proposal: Proposal) -> Proposal:
            return apply_decision(
                proposal, decision, by, now, via=via, action_hash=action_hash, confirmation=confirmation
            )

        return self._change(id, now, step, decision.status.value, by, lambda _: details)

    def withdraw(self, id: str, by: str, now: WallTime) -> Proposal:
        """Record that the asker took it back. Raises Failure unless it was open until now."""
        return self._change(id, now, lambda proposal: apply_withdrawal(proposal, by), "withdrawn", by, lambda _: {})

    def extend(self, id: str, by_ms: int, by: str, now: WallTime) -> Proposal:
        """Move its end. Raises Failure unless it was open until now."""

        def details(changed: Proposal) -> dict[str, Any]:
            return {"expires_at": changed.expires_at.iso()}

        return self._change(id, now, lambda proposal: apply_extension(proposal, by_ms, by), "extended", by, details)

    def use(self, id: str, action_hash: str, now: WallTime, runner: Runner | None = None) -> Proposal:
        """Record that the approval was used. Raises Failure unless it is an approval of that action which nobody has
        used."""
        details = {"action_hash": action_hash}

        def step(proposal: Proposal) -> Proposal:
            return apply_use(proposal, action_hash, now, runner)

        return self._change(id, now, step, "used", None, lambda _: details)

    def go_on_unanswered(self, id: str, action_hash: str, runner: Runner, now: WallTime) -> Proposal:
        """Record that nobody answered and that it goes on, as its rules say. Raises Failure unless they do."""
        details = {"action_hash": action_hash}

        def step(proposal: Proposal) -> Proposal:
            return apply_going_on(proposal, action_hash, runner)

        return self._change(id, now, step, "went-on", None, lambda _: details)

    def go_on_as_job(self, id: str, runner: Runner, now: WallTime) -> Proposal:
        """Record that what was approved is run by a job runner."""
        details = {"job_id": runner.job_id}
        return self._change(id, now, lambda there: replace(there, runner=runner), "started", None, lambda _: details)

    def record_outcome(self, id: str, outcome: Ran) -> Proposal:
        """Record what became of what was approved. Raises Failure if nothing was run, or it is known already."""
        action = "succeeded" if outcome.ok else "failed"
        details = {} if outcome.ok else {"code": outcome.code}
        return self._change(
            id, outcome.at, lambda there: apply_outcome(there, outcome), action, None, lambda _: details
        )

    def end_due(self, now: WallTime) -> bool:
        """Expire what is past its end, and remind of what soon will be. Return whether anything changed."""
        with self._database.read() as connection:  # mostly there is nothing to do, and no reason to keep writers out
            next_due_at = _next_due_at(connection)
        if next_due_at is None or now < next_due_at:
            return False
        more = True
        while more:
            with self._database.write() as connection:
                due, to_remind = _list_due(connection, now), _list_to_remind(connection, now)
                for id, expires_at in due:
                    _expire(connection, id, expires_at, now)
                for id, expires_at in to_remind:
                    _remind(connection, id, expires_at, now)
                more = AT_ONCE in (len(due), len(to_remind))
        return True

    def list_forgettable(self, before: WallTime) -> tuple[str, ...]:
        """Return ids of proposals that were over before then, the oldest first. Open ones stay, decisions that may
        still hold, and what a run that has not ended may come back to."""
        with self._database.read() as connection:
            rows = connection.execute(
                "SELECT id FROM proposals WHERE status <> 'pending' AND coalesce(used_at, decided_at, created_at) < ? "
                # A yes that nobody has used holds until it expires; everything else is over when it was decided.
                # One that never expires would be kept for ever: it is over when it was decided, too.
                "AND (expires_at < ? OR expires_at >= ? OR used_at IS NOT NULL OR status IN ('rejected', 'withdrawn')) "
                "AND NOT EXISTS (SELECT 1 FROM runs INDEXED BY runs_open WHERE ended_at IS NULL "
                "AND substr(proposals.key, 1, length(runs.id) + 1) IN (runs.id || '/', runs.id || '.')) "
                "ORDER BY seq",
                (before.ms, before.ms, LATEST_MS),
            )
            return tuple(c.text_out(id) for (id,) in rows)

    def forget(self, ids: Sequence[str], now: WallTime) -> int:
        """Delete proposals and return how many. Their entries in the audit trail stay, and one more says that they were
        deleted."""
        gone = 0
        with self._database.write() as connection:
            for id in ids:
                row = connection.execute(
                    "SELECT status, action_hash FROM proposals WHERE id = ? AND status <> 'pending'", (c.text_in(id),)
                ).fetchone()
                if row is not None:
                    details = {"status": row[0], "action_hash": row[1]}
                    append(connection, now, "forgotten", id, THE_CLOCK, details)
                    connection.execute("DELETE FROM proposals WHERE id = ?", (c.text_in(id),))
                    connection.execute("DELETE FROM asks WHERE id = ?", (c.text_in(id),))
                    gone += 1
        return gone

    def _change(
        self,
        id: str,
        now: WallTime,
        step: Callable[[Proposal], Proposal],
        action: str,
        by: str | None,
        details: Callable[[Proposal], dict[str, Any]],
    ) -> Proposal:
        with self._database.write() as connection:
            proposal = _get(connection, id)
            if proposal is None:
                raise Failure("PROPOSAL_NOT_FOUND", f"there is no proposal {id!r}")
            if proposal.is_due(now):
                proposal = _expire_proposal(connection, proposal, now)
            refusal: Failure | None = None
            try:
                changed = step(proposal)
            except Failure as failure:
                refusal = failure  # raised outside: that it has expired is to be kept
            else:
                changed = _write(connection, changed, now, action, by or proposal.asked_by, details(changed))
        if refusal is not None:
            raise refusal
        return changed

    # --- looking --------------------------------------------------------------------------------------------

    def open_of_run(self, asked_by: str, run_id: str) -> list[str]:
        """Return the ids of the open proposals of a run's steps."""
        begins = f"{run_id}/"
        with self._database.read() as connection:
            rows = connection.execute(
                "SELECT id, key FROM proposals WHERE asked_by = ? AND key IS NOT NULL AND status = 'pending'",
                (c.text_in(asked_by),),
            )
            return [c.text_out(id) for id, key in rows if c.text_out(key).startswith(begins)]

    def was_used(self, asked_by: str, key: str) -> bool:
        """Return whether anything was dispatched with an approval that was asked for under this key."""
        with self._database.read() as connection:
            found = connection.execute(
                # A runner without a use: nobody answered, and it went on as its rules say.
                "SELECT 1 FROM proposals WHERE asked_by = ? AND key = ? "
                "AND (used_at IS NOT NULL OR runner IS NOT NULL)",
                (c.text_in(asked_by), c.text_in(key)),
            ).fetchone()
        return found is not None

    def is_unused(self, asked_by: str, key: str) -> bool:
        """Return whether something was asked for under this key and nothing was dispatched with it."""
        with self._database.read() as connection:
            found = connection.execute(
                "SELECT count(*), count(used_at), count(runner) FROM proposals WHERE asked_by = ? AND key = ?",
                (c.text_in(asked_by), c.text_in(key)),
            ).fetchone()
        return bool(found[0]) and not (found[1] or found[2])

    def get(self, id: str) -> Proposal | None:
        """Return the proposal as it was written, or None: one past its end may still be pending."""
        with self._database.read() as connection:
            return _get(connection, id)

    def with_entries(self, id: str) -> Kept:
        """Return all that is kept of one, as it was in one instant."""
        with self._database.read() as connection:
            row = connection.execute(f"{_SUMMARY} FROM proposals WHERE id = ?", (c.text_in(id),)).fetchone()
            ask = connection.execute("SELECT ask FROM asks WHERE id = ?", (c.text_in(id),)).fetchone()
            return Kept(
                _get(connection, id),
                None if row is None else _summary(row),
                _row_digest(connection, id) if row is not None else None,
                None if ask is None else digest(ask[0]),
                entries_of(connection, id),
            )

    def since(self, after_seq: int, limit: int = 100) -> list[tuple[Summary, str]]:
        """Return those that changed later, in the order of their last change, and what that was."""
        query = (
            f"{_SUMMARY}, audit.action FROM proposals LEFT JOIN audit ON audit.seq = proposals.seq "
            "WHERE proposals.seq > ? ORDER BY proposals.seq LIMIT ?"
        )
        with self._database.read() as connection:
            return [(_summary(row), row[-1]) for row in connection.execute(query, (after_seq, limit))]

    def last_seq(self) -> int:
        with self._database.read() as connection:
            return _last_seq(connection)

    def feed(self) -> Feed:
        """Open a Feed for whoever waits for what others do. The caller closes it."""
        return Feed(self._database.path)

    def list(
        self,
        *,
        status: ProposalStatus | None = None,
        ended: bool = False,
        asked_by: str | None = None,
        limit: int = 200,
        before_seq: int | None = None,
    ) -> list[Summary]:
        """Return the one that changed last first. `ended`: only those that are not pending any more."""
        wanted: list[tuple[str, Any]] = []
        if status is not None:
            wanted.append(("status = ?", status.value))
        if ended:
            wanted.append(("status <> ?", ProposalStatus.PENDING.value))
        if asked_by is not None:
            wanted.append(("asked_by = ?", c.text_in(asked_by)))
        if before_seq is not None:
            wanted.append(("seq < ?", c.count_in(before_seq, "before_seq")))
        where = " AND ".join(condition for condition, _ in wanted) or "1"
        query = f"{_SUMMARY} FROM proposals WHERE {where} ORDER BY seq DESC LIMIT ?"
        with self._database.read() as connection:
            rows = connection.execute(query, (*(value for _, value in wanted), c.count_in(limit, "limit")))
            return [_summary(row) for row in rows]


class Feed:
    """Connection of its own that sees cheaply whether anybody changed anything. For one thread."""

    def __init__(self, path: Path) -> None:
        self._database = Database(path)
        self._connection: sqlite3.Connection | None = None
        self._version = 0
        self.seen_seq = 0
        with self._database.read() as connection:
            self.seen_seq = _last_seq(connection)

    def look(self, is_awaited: Callable[[str], bool], limit: int) -> tuple[int, list[Proposal]]:
        """Return how many changed since the last look, and those of them that ended and that somebody waits for.

        If it is as many as `limit`, look again. `is_awaited` must not use the store.
        """
        with self._database.read() as connection:
            version = connection.execute("PRAGMA data_version").fetchone()[0]
            # The number means something on one connection only, and a fork brings another one.
            if connection is self._connection and version == self._version:
                return 0, []
            query = "SELECT id, seq, status FROM proposals WHERE seq > ? ORDER BY seq LIMIT ?"
            rows = connection.execute(query, (self.seen_seq, limit)).fetchall()
            ended = [id for id, _, status in rows if not ProposalStatus(status).is_open and is_awaited(id)]
            found = [proposal for id in ended if (proposal := _get(connection, id)) is not None]
        # Only now: a look that failed is made again.
        if rows:
            self.seen_seq = rows[-1][1]
        if len(rows) < limit:
            self._connection, self._version = connection, version
        return len(rows), found

    def next_due_at(self) -> WallTime | None:
        """Return when the next one expires or wants a reminder, if nothing changes before."""
        with self._database.read() as connection:
            return _next_due_at(connection)

    def close(self) -> None:
        self._database.close()


class _LimitsLeft:
    """How many proposals may still be opened, by whom. Counted once in a transaction, which nobody else can add to."""

    def __init__(self, connection: sqlite3.Connection, now: WallTime, limits: InboxLimits | None) -> None:
        self._connection = connection
        self._now = now
        self._limits = limits
        self._open: dict[str | None, int] = {}

    def refusal(self, asker: str) -> Failure | None:
        if self._limits is None:
            return None
        for who, most in ((asker, self._limits.each), (None, self._limits.all)):
            if (count := self._count(who)) >= most:
                whose = f"{count} proposals are open" if who is None else f"{who} has {count} proposals open"
                context = {"asked_by": who, "open": count, "limit": most}
                return Failure("INBOX_FULL", f"{whose}, and no more than {most} may be", context=context)
        return None

    def take(self, asker: str) -> None:
        for who in (asker, None):
            self._open[who] = self._count(who) + 1

    def _count(self, who: str | None) -> int:
        """Count the open ones of an asker, or all of them for None. What is past its end does not count, whether or not
        anybody has noticed."""
        if who not in self._open:
            query = "SELECT count(*) FROM proposals WHERE status = 'pending' AND expires_at > ?"
            given: list[Any] = [self._now.ms]
            if who is not None:
                query += " AND asked_by = ?"
                given.append(c.text_in(who))
            self._open[who] = int(self._connection.execute(query, given).fetchone()[0])
        return self._open[who]


def _attach_or_create(
    connection: sqlite3.Connection, new: NewProposal, text: str, now: WallTime, left: _LimitsLeft
) -> Attached | Failure:
    ask, action_hash = new.ask, new.ask.action_hash
    there = _find_identical(connection, new, action_hash)
    if there is not None and new.since is not None and there.created_at < new.since:
        there = None
    if there is not None and there.is_due(now):
        there = _expire_proposal(connection, there, now)
    if there is not None and there.action_hash != action_hash and _is_in_force(there, now):
        message = f"the key {new.key!r} stands for another proposal: {there.id}"
        return Failure("KEY_REUSED", message, context={"proposal_id": there.id})
    # An approval lets one pass, also where its work goes on later.
    holds = there is not None and (there.answers(now) or (new.since is not None and there.is_unused))
    if there is not None and there.action_hash == action_hash and holds:
        return Attached(there, was_made=False)
    if (refusal := left.refusal(new.asked_by)) is not None:
        return refusal
    left.take(new.asked_by)
    expires_at = now + ask.policy.ttl_ms if ask.policy.ttl_ms else WallTime(LATEST_MS)
    details = {
        "kind": ask.kind.value,
        "title": ask.title,
        "operation": ask.operation,
        "action_hash": action_hash,
        "expires_at": expires_at.iso(),
        "key": new.key,
        "ask": digest(text),
    }
    status, seq = ProposalStatus.PENDING, next_seq(connection)
    made = Proposal(new.id, ask, new.asked_by, new.key, action_hash, status, now, expires_at, seq=seq)
    _insert(connection, made, text)
    _append(connection, now, "proposed", new.id, new.asked_by, details)
    return Attached(made, was_made=True)


def _append(
    connection: sqlite3.Connection, now: WallTime, action: str, id: str, by: str, details: dict[str, Any]
) -> None:
    """Append the entry of a change that is in its row already, number included."""
    append(connection, now, action, id, by, {**details, "row": _row_digest(connection, id)})


def _row_digest(connection: sqlite3.Connection, id: str) -> str:
    row = connection.execute(f"SELECT {_ROW} FROM proposals WHERE id = ?", (c.text_in(id),)).fetchone()
    return digest_of_row(row)


def _is_in_force(proposal: Proposal, now: WallTime) -> bool:
    """Return whether its key still stands for it."""
    return now < proposal.expires_at and (proposal.is_open or proposal.status.is_decided)


def _find_identical(connection: sqlite3.Connection, new: NewProposal, action_hash: str) -> Proposal | None:
    if new.key is not None:
        where, given = "key = ?", c.text_in(new.key)
    else:
        where, given = "key IS NULL AND action_hash = ?", action_hash
    row = connection.execute(
        f"{_WHOLE} WHERE asked_by = ? AND {where} ORDER BY proposals.rowid DESC LIMIT 1",
        (c.text_in(new.asked_by), given),
    ).fetchone()
    return None if row is None else _proposal(row)


def _next_due_at(connection: sqlite3.Connection) -> WallTime | None:
    ends = connection.execute("SELECT min(expires_at) FROM proposals WHERE status = 'pending'").fetchone()[0]
    reminds = connection.execute("SELECT min(remind_at) FROM proposals WHERE remind_at IS NOT NULL").fetchone()[0]
    times = [at for at in (ends, reminds) if at is not None]
    return WallTime(min(times)) if times else None


def _list_due(connection: sqlite3.Connection, now: WallTime) -> list[tuple[str, WallTime]]:
    query = "SELECT id, expires_at FROM proposals WHERE status = 'pending' AND expires_at <= ? LIMIT ?"
    return [(id, WallTime(at)) for id, at in connection.execute(query, (now.ms, AT_ONCE))]


def _list_to_remind(connection: sqlite3.Connection, now: WallTime) -> list[tuple[str, WallTime]]:
    """Return those to remind of that are not past their end already."""
    query = "SELECT id, expires_at FROM proposals WHERE remind_at <= ? AND expires_at > ? LIMIT ?"
    return [(id, WallTime(at)) for id, at in connection.execute(query, (now.ms, now.ms, AT_ONCE))]


def _expire(connection: sqlite3.Connection, id: str, expires_at: WallTime, now: WallTime) -> int:
    """Expire a pending one and return its new `seq`."""
    seq = next_seq(connection)
    connection.execute("UPDATE proposals SET seq = ?, status = 'expired', remind_at = NULL WHERE id = ?", (seq, id))
    _append(connection, now, "expired", id, THE_CLOCK, {"expires_at": expires_at.iso()})
    return seq


def _expire_proposal(connection: sqlite3.Connection, proposal: Proposal, now: WallTime) -> Proposal:
    return replace(apply_expiry(proposal), seq=_expire(connection, proposal.id, proposal.expires_at, now))


def _remind(connection: sqlite3.Connection, id: str, expires_at: WallTime, now: WallTime) -> None:
    connection.execute(
        "UPDATE proposals SET seq = ?, remind_at = NULL, reminded_at = ? WHERE id = ?",
        (next_seq(connection), now.ms, id),
    )
    _append(connection, now, "reminded", id, THE_CLOCK, {"expires_at": expires_at.iso()})


def _insert(connection: sqlite3.Connection, made: Proposal, text: str) -> None:
    connection.execute("INSERT INTO asks (id, ask) VALUES (?, ?)", (made.id, text))
    connection.execute(
        "INSERT INTO proposals (id, seq, status, asked_by, key, action_hash, created_at, expires_at, remind_at, about) "
        "VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
        (
            made.id,
            made.seq,
            made.status.value,
            c.text_in(made.asked_by),
            c.maybe_text_in(made.key),
            made.action_hash,
            made.created_at.ms,
            made.expires_at.ms,
            c.maybe_time_in(made.remind_at),
            c.json_in(made.ask.about()),
        ),
    )


def _write(
    connection: sqlite3.Connection, changed: Proposal, now: WallTime, action: str, by: str, details: dict[str, Any]
) -> Proposal:
    changed = replace(changed, seq=next_seq(connection))
    connection.execute(
        "UPDATE proposals SET seq = ?, status = ?, expires_at = ?, remind_at = ?, reminded_at = ?, decided_by = ?, "
        "decided_at = ?, used_at = ?, notes = ?, decision = ?, decided_via = ?, runner = ?, outcome = ? WHERE id = ?",
        (
            changed.seq,
            changed.status.value,
            changed.expires_at.ms,
            c.maybe_time_in(changed.remind_at),
            c.maybe_time_in(changed.reminded_at),
            c.maybe_text_in(changed.decided_by),
            c.maybe_time_in(changed.decided_at),
            c.maybe_time_in(changed.used_at),
            None if changed.decision is None else c.text_in(changed.decision.notes[:NOTES_SHOWN]),
            None if changed.decision is None else c.json_in(changed.decision.as_json()),
            c.maybe_text_in(changed.decided_via),
            None if changed.runner is None else c.json_in([c.holder_in(changed.runner.holder), changed.runner.job_id]),
            _outcome_in(changed.outcome),
            changed.id,
        ),
    )
    _append(connection, now, action, changed.id, by, details)
    return changed


def _outcome_in(outcome: Ran | None) -> str | None:
    return None if outcome is None else c.json_in([outcome.ok, outcome.at.ms, outcome.code, outcome.message])


def _outcome_out(column: str | None) -> Ran | None:
    if column is None:
        return None
    ok, at, code, message = c.json_out(column)
    return Ran(ok, WallTime(at), code, message)


def _runner_out(column: str | None) -> Runner | None:
    if column is None:
        return None
    holder, job_id = c.json_out(column)
    return Runner(c.holder_out(holder), job_id)


def _last_seq(connection: sqlite3.Connection) -> int:
    return int(connection.execute("SELECT coalesce(max(seq), 0) FROM proposals").fetchone()[0])


def _get(connection: sqlite3.Connection, id: str) -> Proposal | None:
    row = connection.execute(f"{_WHOLE} WHERE id = ?", (c.text_in(id),)).fetchone()
    return None if row is None else _proposal(row)


def _proposal(row: tuple[Any, ...]) -> Proposal:
    decision = row[12]
    return Proposal(
        id=c.text_out(row[0]),
        seq=row[1],
        status=ProposalStatus(row[2]),
        asked_by=c.text_out(row[3]),
        key=c.maybe_text_out(row[4]),
        action_hash=row[5],
        created_at=WallTime(row[6]),
        expires_at=WallTime(row[7]),
        reminded_at=c.maybe_time_out(row[8]),
        decided_by=c.maybe_text_out(row[9]),
        decided_at=c.maybe_time_out(row[10]),
        used_at=c.maybe_time_out(row[11]),
        decision=None if decision is None else Decision.of_json(c.json_out(decision)),
        ask=ProposalRequest.of_json(c.json_out(row[13])),
        decided_via=c.maybe_text_out(row[14]),
        runner=_runner_out(row[15]),
        outcome=_outcome_out(row[16]),
    )


def _summary(row: tuple[Any, ...]) -> Summary:
    about = c.json_out(row[9])
    return Summary(
        id=c.text_out(row[0]),
        seq=row[1],
        status=ProposalStatus(row[2]),
        asked_by=c.text_out(row[3]),
        created_at=WallTime(row[4]),
        expires_at=WallTime(row[5]),
        decided_by=c.maybe_text_out(row[6]),
        decided_at=c.maybe_time_out(row[7]),
        used_at=c.maybe_time_out(row[8]),
        notes=c.maybe_text_out(row[10]),
        decided_via=c.maybe_text_out(row[11]),
        outcome=_outcome_out(row[12]),
        runner=_runner_out(row[13]),
        kind=Kind(about["kind"]),
        title=about["title"],
        operation=about["operation"],
        path=about["path"],
        destructive=bool(about["destructive"]),
        deciders=tuple(about["deciders"]),
        dispatched=bool(about.get("dispatched", False)),
    )
