"""Table of proposals: what was asked for, how each was decided, and what became of it.

Every change is one transaction that reads the proposal, lets core/proposal.py decide whether the change may be,
and writes it down together with its entry in the audit trail. The entry's number is the proposal's new `seq`.
One that is past its end is expired in the same transaction, before anything else is done with it.

What is asked for stands in a table of its own: it can be long and never changes, so lists and expiry leave it alone.

docs/design.md: R41.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..core.clocks import LATEST_MS, WallTime
from ..core.errors import Failure
from ..core.proposal import (
    NOTES_SHOWN,
    ActionOutcome,
    Decision,
    InboxLimits,
    Kind,
    Proposal,
    ProposalRequest,
    ProposalStatus,
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
from ..core.value_types import replace, value
from .audit import Entry, append, digest_of_row, entries_of, next_seq
from .rows import (
    Codec,
    Database,
    RowMapper,
    Transaction,
    check_count,
    decode_process,
    decode_text,
    encode,
    insert_row,
    json_text,
    optional,
)

# How many are expired or reminded of in one transaction.
AT_ONCE = 200
# Who did it, where nobody did.
THE_CLOCK = "(clock)"

# All that is kept of one beside its number and its ask: what its last entry has the digest of. Never changed, because
# entries of another time are compared with it.
_ROW = (
    "id, status, asked_by, key, action_hash, created_at, expires_at, remind_at, reminded_at, decided_by, decided_at, "
    "decided_via, used_at, runner, outcome, about, notes, decision"
)


@value
class NewProposal:
    """A proposal that is to be opened, or found again."""

    id: str
    ask: ProposalRequest
    asked_by: str
    key: str | None = None
    since: WallTime | None = None
    """The key stands for one question of work that began then and may go on after any time: what was asked under it
    is found again however it ended, and what was asked before is somebody else's."""


@value
class Attached:
    """The proposal that answers a request, and whether it was made for it."""

    proposal: Proposal
    was_made: bool


@value
class StoredProposal:
    """All that is stored about one proposal, for the check of the audit trail."""

    proposal: Proposal | None
    summary: Summary | None
    row: str | None
    ask: str | None
    """Digests of both, as entries have them."""
    entries: list[Entry]


def _decode_outcome(column: str) -> ActionOutcome:
    ok, at, code, message = json.loads(column)
    return ActionOutcome(ok, WallTime(at), code, message)


def _decode_runner(column: str) -> Runner:
    holder, job_id = json.loads(column)
    return Runner(decode_process(holder), job_id)


def _build_summary(fields: dict[str, Any]) -> Summary:
    about = fields.pop("about")
    shown = {**about, "kind": Kind(about["kind"]), "deciders": tuple(about["deciders"])}
    return Summary(**{**fields, **shown, "destructive": bool(about["destructive"])})


_CODECS = {
    "status": Codec(encode, ProposalStatus),
    "runner": optional(Codec(lambda runner: json_text([encode(runner.holder), runner.job_id]), _decode_runner)),
    "outcome": optional(Codec(lambda ran: json_text([ran.ok, ran.at.ms, ran.code, ran.message]), _decode_outcome)),
}
_PROPOSALS = RowMapper(
    Proposal,
    "proposals JOIN asks USING (id)",
    codecs={
        **_CODECS,
        "ask": Codec(lambda ask: json_text(ask.as_json()), lambda column: ProposalRequest.of_json(json.loads(column))),
        "decision": optional(
            Codec(lambda made: json_text(made.as_json()), lambda column: Decision.of_json(json.loads(column)))
        ),
    },
)
# What stays as it was proposed.
_UNCHANGING = ("id", "ask", "asked_by", "key", "action_hash", "created_at")
_SUMMARIES = RowMapper(
    Summary,
    "proposals",
    without=("kind", "title", "operation", "path", "destructive", "deciders", "dispatched"),
    beside={"about": "Any"},
    build=_build_summary,
    codecs=_CODECS,
)


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
        texts = [json_text(new.ask.as_json()) for new in asked]
        with self._database.write() as transaction:
            left = _LimitsLeft(transaction, now, limits)
            pairs = zip(asked, texts, strict=True)
            return [_attach_or_create(transaction, new, text, now, left) for new, text in pairs]

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

        return self._change(id, now, step, decision.status.value, by, details)

    def withdraw(self, id: str, by: str, now: WallTime) -> Proposal:
        """Record that the asker took it back. Raises Failure unless it was open until now."""
        return self._change(id, now, lambda proposal: apply_withdrawal(proposal, by), "withdrawn", by, {})

    def extend(self, id: str, by_ms: int, by: str, now: WallTime) -> Proposal:
        """Move its end. Raises Failure unless it was open until now."""

        def details(changed: Proposal) -> dict[str, Any]:
            return {"expires_at": changed.expires_at.iso()}

        return self._change(id, now, lambda proposal: apply_extension(proposal, by_ms, by), "extended", by, details)

    def use(self, id: str, action_hash: str, now: WallTime, runner: Runner | None = None) -> Proposal:
        """Record that the approval was used. Raises Failure unless it is an approval of that action which nobody has
        used."""
        details = {"action_hash": action_hash}
        return self._change(id, now, lambda there: apply_use(there, action_hash, now, runner), "used", None, details)

    def go_on_unanswered(self, id: str, action_hash: str, runner: Runner, now: WallTime) -> Proposal:
        """Record that nobody answered and that it goes on, as its rules say. Raises Failure unless they do."""
        details = {"action_hash": action_hash}
        return self._change(id, now, lambda there: apply_going_on(there, action_hash, runner), "went-on", None, details)

    def go_on_as_job(self, id: str, runner: Runner, now: WallTime) -> Proposal:
        """Record that what was approved is run by a job runner."""
        details = {"job_id": runner.job_id}
        return self._change(id, now, lambda there: replace(there, runner=runner), "started", None, details)

    def record_outcome(self, id: str, outcome: ActionOutcome) -> Proposal:
        """Record what became of what was approved. Raises Failure if nothing was run, or it is known already."""
        action = "succeeded" if outcome.ok else "failed"
        details = {} if outcome.ok else {"code": outcome.code}
        return self._change(id, outcome.at, lambda there: apply_outcome(there, outcome), action, None, details)

    def end_due(self, now: WallTime) -> bool:
        """Expire what is past its end, and remind of what soon will be. Return whether anything changed."""
        with self._database.read() as transaction:  # mostly there is nothing to do, and no reason to keep writers out
            next_due_at = _next_due_at(transaction)
        if next_due_at is None or now < next_due_at:
            return False
        more = True
        while more:
            with self._database.write() as transaction:
                due, to_remind = _list_due(transaction, now), _list_to_remind(transaction, now)
                for id, expires_at in due:
                    _expire(transaction, id, expires_at, now)
                for id, expires_at in to_remind:
                    _remind(transaction, id, expires_at, now)
                more = AT_ONCE in (len(due), len(to_remind))
        return True

    def export(self, id: str) -> dict[str, Any] | None:
        """Return all that is kept of one but its history, as plain JSON, for a store elsewhere; None if there is
        none."""
        proposal = self.get(id)
        return None if proposal is None else export_proposal(proposal)

    def take_over(self, exported: Mapping[str, Any], now: WallTime) -> Proposal:
        """Record a proposal of another store as it was there, in the place of what is known of it here."""
        taken = read_exported(exported)
        with self._database.write() as transaction:
            taken = replace(taken, seq=next_seq(transaction))
            transaction.execute("DELETE FROM proposals WHERE id = ?", (taken.id,))
            transaction.execute("DELETE FROM asks WHERE id = ?", (taken.id,))
            _insert(transaction, taken, str(exported["ask"]))
            details = {
                "status": taken.status.value,
                "action_hash": taken.action_hash,
                "expires_at": taken.expires_at.iso(),
                "ask": digest(str(exported["ask"])),
                "decision": None if taken.decision is None else digest(taken.decision.as_json()),
                "used": taken.used_at is not None,
            }
            _append(transaction, now, "taken-over", taken.id, taken.decided_by or taken.asked_by, details)
        return taken

    def list_forgettable(self, before: WallTime) -> list[tuple[str, str | None]]:
        """Return the ids of proposals that were over before then, the oldest first, each with its key. Open ones stay,
        and decisions that may still hold."""
        with self._database.read() as transaction:
            rows = transaction.execute(
                "SELECT id, key FROM proposals "
                "WHERE status <> 'pending' AND coalesce(used_at, decided_at, created_at) < ? "
                # A yes that nobody has used holds until it expires; everything else is over when it was decided.
                # One that never expires would be kept for ever: it is over when it was decided, too.
                "AND (expires_at < ? OR expires_at >= ? OR used_at IS NOT NULL OR status IN ('rejected', 'withdrawn')) "
                "ORDER BY seq",
                (before, before, LATEST_MS),
            ).fetchall()
        return [(decode_text(id), None if key is None else decode_text(key)) for id, key in rows]

    def forget(self, ids: Sequence[str], now: WallTime) -> int:
        """Delete proposals and return how many. Their entries in the audit trail stay, and one more says that they were
        deleted."""
        gone = 0
        with self._database.write() as transaction:
            for id in ids:
                row = transaction.execute(
                    "SELECT status, action_hash FROM proposals WHERE id = ? AND status <> 'pending'", (id,)
                ).fetchone()
                if row is not None:
                    details = {"status": row[0], "action_hash": row[1]}
                    append(transaction, now, "forgotten", id, THE_CLOCK, details)
                    transaction.execute("DELETE FROM proposals WHERE id = ?", (id,))
                    transaction.execute("DELETE FROM asks WHERE id = ?", (id,))
                    gone += 1
        return gone

    def _change(
        self,
        id: str,
        now: WallTime,
        step: Callable[[Proposal], Proposal],
        action: str,
        by: str | None,
        details: dict[str, Any] | Callable[[Proposal], dict[str, Any]],
    ) -> Proposal:
        """Change a proposal by `step`, which may refuse it by a Failure, with an entry of these details."""
        with self._database.write() as transaction:
            proposal = _get(transaction, id)
            if proposal is None:
                raise Failure("PROPOSAL_NOT_FOUND", f"there is no proposal {id!r}")
            if proposal.is_due(now):
                proposal = _expire_proposal(transaction, proposal, now)
            refusal: Failure | None = None
            try:
                changed = step(proposal)
            except Failure as failure:
                refusal = failure  # raised outside: that it has expired is to be kept
            else:
                shown = details(changed) if callable(details) else details
                changed = _write(transaction, changed, now, action, by or proposal.asked_by, shown)
        if refusal is not None:
            raise refusal
        return changed

    # --- looking --------------------------------------------------------------------------------------------

    def open_of_run(self, asked_by: str, run_id: str) -> list[str]:
        """Return the ids of the open proposals of a run's steps."""
        begins = f"{run_id}/"
        with self._database.read() as transaction:
            rows = transaction.execute(
                "SELECT id, key FROM proposals WHERE asked_by = ? AND key IS NOT NULL AND status = 'pending'",
                (asked_by,),
            )
            return [decode_text(id) for id, key in rows if decode_text(key).startswith(begins)]

    def was_used(self, asked_by: str, key: str) -> bool:
        """Return whether anything was dispatched with an approval that was asked for under this key."""
        return self._count_uses(asked_by, key)[1] > 0

    def is_unused(self, asked_by: str, key: str) -> bool:
        """Return whether something was asked for under this key and nothing was dispatched with it."""
        asked, used = self._count_uses(asked_by, key)
        return asked > 0 and not used

    def _count_uses(self, asked_by: str, key: str) -> tuple[int, int]:
        # A runner without a use: nobody answered, and it went on as its rules say.
        used = "count(CASE WHEN used_at IS NOT NULL OR runner IS NOT NULL THEN 1 END)"
        query = f"SELECT count(*), {used} FROM proposals WHERE asked_by = ? AND key = ?"
        with self._database.read() as transaction:
            asked, went_on = transaction.execute(query, (asked_by, key)).fetchone()
        return asked, went_on

    def get(self, id: str) -> Proposal | None:
        """Return the proposal as it was written, or None: one past its end may still be pending."""
        with self._database.read() as transaction:
            return _get(transaction, id)

    def with_entries(self, id: str) -> StoredProposal:
        """Return all that is kept of one, as it was in one instant."""
        with self._database.read() as transaction:
            summary = _SUMMARIES.get(transaction, "WHERE id = ?", (id,))
            ask = transaction.execute("SELECT ask FROM asks WHERE id = ?", (id,)).fetchone()
            return StoredProposal(
                _get(transaction, id),
                summary,
                None if summary is None else _row_digest(transaction, id),
                None if ask is None else digest(ask[0]),
                entries_of(transaction, id),
            )

    def list_order(self) -> list[tuple[str, int, int | None]]:
        """Return all of them as they are looked up, by their order of creation, each with the number that this goes by
        and with that of the entry that made it, if there is one."""
        query = (
            "SELECT id, created_seq, (SELECT max(seq) FROM audit WHERE proposal = proposals.id "
            "AND action IN ('proposed', 'taken-over')) FROM proposals ORDER BY created_seq"
        )
        with self._database.read() as transaction:
            return [(id, created, made) for id, created, made in transaction.execute(query)]

    def since(self, after_seq: int, limit: int = 100) -> list[tuple[Summary, str]]:
        """Return those that changed later, in the order of their last change, and what that was."""
        query = (
            f"SELECT {_SUMMARIES.columns}, (SELECT action FROM audit WHERE audit.seq = proposals.seq) "
            "FROM proposals WHERE seq > ? ORDER BY seq LIMIT ?"
        )
        with self._database.read() as transaction:
            return [(_SUMMARIES.read(row[:-1]), row[-1]) for row in transaction.execute(query, (after_seq, limit))]

    def last_seq(self) -> int:
        """Return the number of the last change; 0 if there was none."""
        with self._database.read() as transaction:
            return _last_seq(transaction)

    def feed(self) -> Feed:
        """Open a Feed for whoever waits for what others do. The caller closes it."""
        return Feed(self._database.open_another())

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
        wanted: list[tuple[str, object]] = []
        if status is not None:
            wanted.append(("status = ?", status))
        if ended:
            wanted.append(("status <> ?", ProposalStatus.PENDING))
        if asked_by is not None:
            wanted.append(("asked_by = ?", asked_by))
        if before_seq is not None:
            wanted.append(("seq < ?", check_count(before_seq, "before_seq")))
        where = f"WHERE {' AND '.join(condition for condition, _ in wanted)} " if wanted else ""
        values = (*(value for _, value in wanted), check_count(limit, "limit"))
        with self._database.read() as transaction:
            return _SUMMARIES.list(transaction, f"{where}ORDER BY seq DESC LIMIT ?", values)


def export_proposal(proposal: Proposal) -> dict[str, Any]:
    """Return all of a proposal as plain JSON, for a store elsewhere."""
    return dict(_PROPOSALS.write(proposal, without=("seq",)))


def read_exported(exported: Mapping[str, Any]) -> Proposal:
    """Return the proposal that another store has exported."""
    columns = {**exported, "seq": 0}
    return _PROPOSALS.read([columns[name] for name in _PROPOSALS.columns.split(", ")])


class Feed:
    """Connection of its own that sees cheaply whether anybody changed anything. For one thread."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._seen: object = None
        self.seen_seq = 0
        with self._database.read() as transaction:
            self.seen_seq = _last_seq(transaction)

    def look(self, is_awaited: Callable[[str], bool], limit: int) -> tuple[int, list[Proposal]]:
        """Return how many changed since the last look, and those of them that ended and that somebody waits for.

        If it is as many as `limit`, look again. `is_awaited` must not use the store.
        """
        with self._database.read() as transaction:
            mark = transaction.change_mark()
            if mark == self._seen:
                return 0, []
            query = "SELECT id, seq, status FROM proposals WHERE seq > ? ORDER BY seq LIMIT ?"
            rows = transaction.execute(query, (self.seen_seq, limit)).fetchall()
            ended = [id for id, _, status in rows if not ProposalStatus(status).is_open and is_awaited(id)]
            found = [proposal for id in ended if (proposal := _get(transaction, id)) is not None]
        # Only now: a look that failed is made again.
        if rows:
            self.seen_seq = rows[-1][1]
        if len(rows) < limit:
            self._seen = mark
        return len(rows), found

    def next_due_at(self) -> WallTime | None:
        """Return when the next one expires or wants a reminder, if nothing changes before."""
        with self._database.read() as transaction:
            return _next_due_at(transaction)

    def close(self) -> None:
        self._database.close()


class _LimitsLeft:
    """Count of the proposals that may still be opened. Made once in a transaction, which nobody else can add to."""

    def __init__(self, transaction: Transaction, now: WallTime, limits: InboxLimits | None) -> None:
        self._transaction = transaction
        self._now = now
        self._limits = limits
        self._open: dict[str | None, int] = {}

    def refusal(self, asker: str) -> Failure | None:
        """Return the Failure for one more proposal of this asker; None if it may be opened."""
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
            given: list[object] = [self._now]
            if who is not None:
                query += " AND asked_by = ?"
                given.append(who)
            self._open[who] = int(self._transaction.execute(query, given).fetchone()[0])
        return self._open[who]


def _attach_or_create(
    transaction: Transaction, new: NewProposal, text: str, now: WallTime, left: _LimitsLeft
) -> Attached | Failure:
    ask, action_hash = new.ask, new.ask.action_hash
    there = _find_identical(transaction, new, action_hash)
    if there is not None and new.since is not None and there.created_at < new.since:
        there = None
    if there is not None and there.is_due(now):
        there = _expire_proposal(transaction, there, now)
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
    status, seq = ProposalStatus.PENDING, next_seq(transaction)
    made = Proposal(new.id, ask, new.asked_by, new.key, action_hash, status, now, expires_at, seq=seq)
    _insert(transaction, made, text)
    _append(transaction, now, "proposed", new.id, new.asked_by, details)
    return Attached(made, was_made=True)


def _append(transaction: Transaction, now: WallTime, action: str, id: str, by: str, details: dict[str, Any]) -> None:
    """Append the entry of a change that is in its row already, number included."""
    append(transaction, now, action, id, by, {**details, "row": _row_digest(transaction, id)})


def _row_digest(transaction: Transaction, id: str) -> str:
    row = transaction.execute(f"SELECT {_ROW} FROM proposals WHERE id = ?", (id,)).fetchone()
    return digest_of_row(row)


def _is_in_force(proposal: Proposal, now: WallTime) -> bool:
    """Return whether its key still stands for it."""
    return now < proposal.expires_at and (proposal.is_open or proposal.status.is_decided)


def _find_identical(transaction: Transaction, new: NewProposal, action_hash: str) -> Proposal | None:
    where, given = ("key = ?", new.key) if new.key is not None else ("key IS NULL AND action_hash = ?", action_hash)
    rest = f"WHERE asked_by = ? AND {where} ORDER BY created_seq DESC LIMIT 1"
    return _PROPOSALS.get(transaction, rest, (new.asked_by, given))


def _next_due_at(transaction: Transaction) -> WallTime | None:
    ends = transaction.execute("SELECT min(expires_at) FROM proposals WHERE status = 'pending'").fetchone()[0]
    reminds = transaction.execute("SELECT min(remind_at) FROM proposals WHERE remind_at IS NOT NULL").fetchone()[0]
    times = [at for at in (ends, reminds) if at is not None]
    return WallTime(min(times)) if times else None


def _list_due(transaction: Transaction, now: WallTime) -> list[tuple[str, WallTime]]:
    query = "SELECT id, expires_at FROM proposals WHERE status = 'pending' AND expires_at <= ? LIMIT ?"
    return [(id, WallTime(at)) for id, at in transaction.execute(query, (now, AT_ONCE))]


def _list_to_remind(transaction: Transaction, now: WallTime) -> list[tuple[str, WallTime]]:
    """Return those to remind of that are not past their end already."""
    query = "SELECT id, expires_at FROM proposals WHERE remind_at <= ? AND expires_at > ? LIMIT ?"
    return [(id, WallTime(at)) for id, at in transaction.execute(query, (now, now, AT_ONCE))]


def _expire(transaction: Transaction, id: str, expires_at: WallTime, now: WallTime) -> int:
    """Expire a pending one and return its new `seq`."""
    seq = next_seq(transaction)
    transaction.execute("UPDATE proposals SET seq = ?, status = 'expired', remind_at = NULL WHERE id = ?", (seq, id))
    _append(transaction, now, "expired", id, THE_CLOCK, {"expires_at": expires_at.iso()})
    return seq


def _expire_proposal(transaction: Transaction, proposal: Proposal, now: WallTime) -> Proposal:
    return replace(apply_expiry(proposal), seq=_expire(transaction, proposal.id, proposal.expires_at, now))


def _remind(transaction: Transaction, id: str, expires_at: WallTime, now: WallTime) -> None:
    transaction.execute(
        "UPDATE proposals SET seq = ?, remind_at = NULL, reminded_at = ? WHERE id = ?",
        (next_seq(transaction), now, id),
    )
    _append(transaction, now, "reminded", id, THE_CLOCK, {"expires_at": expires_at.iso()})


def _insert(transaction: Transaction, made: Proposal, text: str) -> None:
    insert_row(transaction, "asks", {"id": made.id, "ask": text})
    row = _PROPOSALS.write(made, without=("ask",))
    notes = None if made.decision is None else made.decision.notes[:NOTES_SHOWN]
    more = {"created_seq": made.seq, "remind_at": made.remind_at, "about": json_text(made.ask.about()), "notes": notes}
    insert_row(transaction, "proposals", {**row, **more})


def _write(
    transaction: Transaction, changed: Proposal, now: WallTime, action: str, by: str, details: dict[str, Any]
) -> Proposal:
    changed = replace(changed, seq=next_seq(transaction))
    notes = None if changed.decision is None else changed.decision.notes[:NOTES_SHOWN]
    row = _PROPOSALS.write(changed, without=_UNCHANGING)
    columns = {**row, "remind_at": changed.remind_at, "notes": notes}
    settings = ", ".join(f"{name} = ?" for name in columns)
    transaction.execute(f"UPDATE proposals SET {settings} WHERE id = ?", (*columns.values(), changed.id))
    _append(transaction, now, action, changed.id, by, details)
    return changed


def _last_seq(transaction: Transaction) -> int:
    return int(transaction.execute("SELECT coalesce(max(seq), 0) FROM proposals").fetchone()[0])


def _get(transaction: Transaction, id: str) -> Proposal | None:
    return _PROPOSALS.get(transaction, "WHERE id = ?", (id,))
