"""Table of proposals with their decisions and outcomes.

Every change is one transaction: it reads the proposal, applies a transition of core/proposal.py, and writes the result
together with its entry in the audit trail. The number of the entry is the new `seq` of the proposal. A proposal past
its end is expired in the same transaction, before any other change.

The requests are in a table of their own: they can be long and never change, so lists and expiry do not touch them.

Contract (AGENTS.md): a decision is compare-and-set.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from typing import Any

from ..core.errors import Failure
from ..core.json_values import to_json
from ..core.limits import LATEST_MS, WallTime
from ..core.proposal import (
    ActionOutcome,
    Confirmation,
    Decision,
    InboxLimits,
    Proposal,
    ProposalRequest,
    ProposalStatus,
    Runner,
    Summary,
    apply_decision,
    apply_expiry,
    apply_extension,
    apply_outcome,
    apply_use,
    apply_withdrawal,
    digest,
)
from ..core.value_types import JsonObject, replace, value
from ._database import CLOCK_SLACK_MS, Database, Table, Transaction, check_count, decode_text, json_text
from ._rows import RowMapper, insert_row, update_row
from .audit import Entry, append, digest_of_row, entries_of, next_seq

# Proposals that one transaction expires or reminds of.
AT_ONCE = 200
# The author of changes that no person made.
THE_CLOCK = "(clock)"

_PROPOSALS = RowMapper(Proposal, "proposals JOIN asks USING (id)")
_SUMMARIES = RowMapper(Summary, "proposals")
_UNCHANGING = ("id", "ask", "asked_by", "key", "action_hash", "created_at")
# The columns that the digest in the last entry of a proposal covers. A new field of a proposal changes them, and older
# proposals would fail `verify`: raise the version in schema.py.
_ROW = ", ".join(
    sorted({*_PROPOSALS.columns.split(", "), *_SUMMARIES.columns.split(", "), "remind_at"} - {"ask", "seq"})
)


@value
class NewProposal:
    id: str
    ask: ProposalRequest
    asked_by: str
    key: str | None = None
    since: WallTime | None = None
    """The beginning of the run whose question has this key. Its proposal is found again however it ended; an older one
    belongs to another run."""
    until: WallTime | None = None  # the end of the work that asks. The proposal does not outlive it


@value
class StoredProposal:
    """All rows of one proposal, for the check of the audit trail."""

    proposal: Proposal | None
    summary: Summary | None
    row: str | None  # digest of the row, as entries have it
    ask: str | None  # digest of the request, as entries have it
    entries: list[Entry]


class Proposals(Table):
    """Table of proposals. Every change is one transaction, with its entry in the audit trail."""

    def attach_or_create_all(
        self, asked: Sequence[NewProposal], now: WallTime, limits: InboxLimits | None = None
    ) -> list[Proposal | Failure]:
        """Return the proposals that answer these calls, in one transaction and in order. Without `limits` any number
        may be open.

        An identical proposal has the same key or, without a key, the same action without a key, by the same agent. A
        call gets a Failure if its key belongs to another action (KEY_REUSED), or if too many are open (INBOX_FULL).
        """
        texts = [json_text(to_json(new.ask)) for new in asked]
        with self._database.write() as transaction:
            _follow_clock(transaction, now)
            pairs = zip(asked, texts, strict=True)
            return [_attach_or_create(transaction, new, text, now, limits) for new, text in pairs]

    # --- changes --------------------------------------------------------------------------------------------

    def decide(
        self,
        id: str,
        decision: Decision,
        by: str,
        now: WallTime,
        *,
        via: str | None = None,
        confirmation: Confirmation = Confirmation(),
    ) -> Proposal:
        """Record a checked decision. Raises Failure unless the proposal was open until now."""
        details = {"notes": decision.notes, "decision": digest(to_json(decision)), **({"via": via} if via else {})}

        def step(proposal: Proposal) -> Proposal:
            return apply_decision(proposal, decision, by, now, via=via, confirmation=confirmation)

        return self._change(id, now, step, decision.status.value, details, by)

    def withdraw(self, id: str, by: str, now: WallTime) -> Proposal:
        """Record a withdrawal. Raises Failure unless the proposal was open until now."""
        return self._change(id, now, lambda proposal: apply_withdrawal(proposal, by), "withdrawn", {}, by)

    def extend(self, id: str, by_ms: int, by: str, now: WallTime) -> Proposal:
        """Move the end. Raises Failure unless the proposal was open until now."""

        return self._change(id, now, lambda old: apply_extension(old, by_ms, by), "extended", _new_end, by)

    def follow(self, id: str, until: WallTime, now: WallTime) -> Proposal:
        """Move the end with the later end of the work that asks. Raises Failure unless it is open and ends later."""

        def step(proposal: Proposal) -> Proposal:
            proposal.must_be_open()
            if (expires_at := proposal.expires_by(until)) <= proposal.expires_at:
                raise Failure("NOT_EXTENDABLE", f"{id} does not end later")
            return replace(proposal, expires_at=expires_at)

        return self._change(id, now, step, "extended", _new_end)

    def use(
        self, id: str, action_hash: str, now: WallTime, runner: Runner | None = None, *, unanswered: bool = False
    ) -> Proposal:
        """Record the use of an approval, or that the work continues `unanswered`. Raises Failure: see `apply_use`."""

        def step(proposal: Proposal) -> Proposal:
            return apply_use(proposal, action_hash, now, runner, unanswered=unanswered)

        return self._change(id, now, step, "went-on" if unanswered else "used", {"action_hash": action_hash})

    def hand_to_job(self, id: str, runner: Runner, now: WallTime) -> Proposal:
        return self._change(id, now, lambda old: replace(old, runner=runner), "started", {"job_id": runner.job_id})

    def record_outcome(self, id: str, outcome: ActionOutcome, *, unused: bool = False) -> Proposal:
        """Record the outcome of an approved action, or of an `unused` approval. Raises Failure: see `apply_outcome`."""
        action = "succeeded" if outcome.ok else "failed"
        details = {} if outcome.ok else {"code": outcome.code}
        return self._change(id, outcome.at, lambda old: apply_outcome(old, outcome, unused=unused), action, details)

    def end_run(self, asked_by: str, run_id: str, now: WallTime, unheard: Collection[str] = ()) -> None:
        """Withdraw the open proposals of a run that ends, and record which approvals had no effect.

        `unheard` has the questions whose answers were not read.
        """
        query = (
            "SELECT id, dispatched FROM proposals WHERE asked_by = ? AND key > ? AND key < ? AND runner IS NULL "
            "AND used_at IS NULL AND outcome IS NULL AND status IN ('pending', 'approved', 'modified')"
        )
        rows = self._select(query, (asked_by, f"{run_id}/", f"{run_id}0"))  # `0` follows `/`
        too_late = ActionOutcome(False, now, "CANCELLED", f"run {run_id} ended before it used this decision")
        for id, is_dispatched in rows:
            try:
                self.withdraw(id, asked_by, now)
            except Failure as failure:
                if failure.code == "ALREADY_DECIDED" and (is_dispatched or id in unheard):
                    with suppress(Failure):  # rejected
                        self.record_outcome(id, too_late, unused=True)

    def note(self, id: str, action: str, details: JsonObject, now: WallTime, by: str) -> Proposal:
        return self._change(id, now, lambda proposal: proposal, action, details, by)

    def _change(
        self,
        id: str,
        now: WallTime,
        step: Callable[[Proposal], Proposal],
        action: str,
        details: JsonObject | Callable[[Proposal], JsonObject],
        by: str | None = None,
    ) -> Proposal:
        """Change a proposal by `step`, which may raise Failure, and append an entry with these details."""
        with self._database.write() as transaction:
            if by is not None:  # the time of an outcome may be long past
                _follow_clock(transaction, now)
            proposal = _get(transaction, id)
            if proposal is None:
                raise Failure("PROPOSAL_NOT_FOUND", f"there is no proposal {id!r}")
            if proposal.is_due(now):
                proposal = _expire_proposal(transaction, proposal, now)
            refusal: Failure | None = None
            try:
                changed = step(proposal)
            except Failure as failure:
                refusal = failure  # raised after the commit, which keeps the expiry
            else:
                changed = replace(changed, seq=next_seq(transaction))
                columns = {**_SUMMARIES.write(changed.summary), **_PROPOSALS.write(changed, without=_UNCHANGING)}
                update_row(transaction, "proposals", {**columns, "remind_at": changed.remind_at}, id)
                shown = details(changed) if callable(details) else details
                _append(transaction, now, action, id, by or proposal.asked_by, shown)
        if refusal is not None:
            raise refusal
        return changed

    def end_due(self, now: WallTime) -> bool:
        """Expire proposals past their end, and remind of those close to it. Return whether anything changed."""
        with self._database.read() as transaction:  # mostly there is nothing to do, and no reason to block writers
            next_due_at, is_set_back = _next_due_at(transaction), _set_back_ms(transaction, now) > 0
        if next_due_at is None or (now < next_due_at and not is_set_back):
            return False
        due_query = "SELECT id, expires_at FROM proposals WHERE status = 'pending' AND expires_at <= ? LIMIT ?"
        remind_query = "SELECT id, expires_at FROM proposals WHERE remind_at <= ? AND expires_at > ? LIMIT ?"
        more = True
        while more:
            with self._database.write() as transaction:
                _follow_clock(transaction, now)
                due = transaction.execute(due_query, (now, AT_ONCE)).fetchall()
                to_remind = transaction.execute(remind_query, (now, now, AT_ONCE)).fetchall()
                for id, expires_at in due:
                    _expire(transaction, id, WallTime(expires_at), now)
                for id, expires_at in to_remind:
                    columns = {"seq": next_seq(transaction), "remind_at": None, "reminded_at": now}
                    update_row(transaction, "proposals", columns, id)
                    _append(transaction, now, "reminded", id, THE_CLOCK, {"expires_at": WallTime(expires_at).iso()})
                more = AT_ONCE in (len(due), len(to_remind))
        return True

    def export(self, id: str) -> JsonObject | None:
        """Return a proposal without its history as plain JSON, for another store."""
        proposal = self.get(id)
        return None if proposal is None else export_proposal(proposal)

    def take_over(self, exported: Mapping[str, Any], now: WallTime) -> Proposal:
        """Store a proposal of another store as it is there, in place of the version known here."""
        taken = read_exported(exported)
        with self._database.write() as transaction:
            taken = replace(taken, seq=next_seq(transaction))
            _delete(transaction, taken.id)
            _insert(transaction, taken, str(exported["ask"]))
            details = {
                "status": taken.status.value,
                "action_hash": taken.action_hash,
                "expires_at": taken.expires_at.iso(),
                "ask": digest(str(exported["ask"])),
                "decision": None if taken.decision is None else digest(to_json(taken.decision)),
                "used": taken.used_at is not None,
            }
            _append(transaction, now, "taken-over", taken.id, taken.decided_by or taken.asked_by, details)
        return taken

    def list_forgettable(self, before: WallTime) -> list[tuple[str, str | None]]:
        """Return the ids and keys of proposals that ended before then, the oldest first. Open ones stay, and decisions
        that are still valid."""
        rows = self._select(
            "SELECT id, key FROM proposals WHERE status <> 'pending' AND coalesce(used_at, decided_at, created_at) < ? "
            # An unused approval is valid until it expires; one that never expires would be kept for ever, so it ends
            # with its decision.
            "AND (expires_at < ? OR expires_at >= ? OR used_at IS NOT NULL OR status IN ('rejected', 'withdrawn')) "
            "ORDER BY seq",
            (before, before, LATEST_MS),
        )
        return [(decode_text(id), None if key is None else decode_text(key)) for id, key in rows]

    def forget(self, ids: Sequence[str], now: WallTime) -> int:
        """Delete ended proposals and return their number. Their entries stay, with one more for the deletion."""
        deleted = 0
        with self._database.write() as transaction:
            for id in ids:
                query = "SELECT status, action_hash FROM proposals WHERE id = ? AND status <> 'pending'"
                row = transaction.execute(query, (id,)).fetchone()
                if row is not None:
                    append(transaction, now, "forgotten", id, THE_CLOCK, {"status": row[0], "action_hash": row[1]})
                    _delete(transaction, id)
                    deleted += 1
        return deleted

    # --- queries --------------------------------------------------------------------------------------------

    def was_used(self, asked_by: str, key: str) -> bool | None:
        """Return whether an action was dispatched with a proposal under this key; None if there is none."""
        # A proposal that continued without an answer has a runner and was not used.
        used = "max(CASE WHEN used_at IS NOT NULL OR runner IS NOT NULL THEN 1 ELSE 0 END)"
        query = f"SELECT {used} FROM proposals WHERE asked_by = ? AND key = ?"
        was_used = self._select(query, (asked_by, key))[0][0]
        return None if was_used is None else bool(was_used)

    def get(self, id: str) -> Proposal | None:
        """Return the proposal as it was written, or None. One past its end may still be pending."""
        return self._read(_get, id)

    def with_entries(self, id: str) -> StoredProposal:
        """Return all rows of one proposal, as they were in one instant."""
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
        """Return each proposal in the order of creation: its id, its number, and that of the entry that made it."""
        query = (
            "SELECT id, created_seq, (SELECT max(seq) FROM audit WHERE proposal = proposals.id "
            "AND action IN ('proposed', 'taken-over')) FROM proposals ORDER BY created_seq"
        )
        return self._select(query)

    def since(self, after_seq: int, limit: int = 100) -> list[tuple[Summary, str]]:
        """Return the proposals that changed later, in the order of their last change, with its action."""
        query = (
            f"SELECT {_SUMMARIES.columns}, (SELECT action FROM audit WHERE audit.seq = proposals.seq) "
            "FROM proposals WHERE seq > ? ORDER BY seq LIMIT ?"
        )
        return [(_SUMMARIES.read(row[:-1]), row[-1]) for row in self._select(query, (after_seq, limit))]

    def last_seq(self) -> int:
        return self._read(_last_seq)

    def feed(self) -> Feed:
        """Open a Feed of the changes by others. The caller closes it."""
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
        """Return the proposals, the last changed first. `ended`: only those that are not pending any more."""
        conditions: dict[str, object] = {}
        if status is not None:
            conditions["status = ?"] = status
        if ended:
            conditions["status <> ?"] = ProposalStatus.PENDING
        if asked_by is not None:
            conditions["asked_by = ?"] = asked_by
        if before_seq is not None:
            conditions["seq < ?"] = check_count(before_seq, "before_seq")
        where = f"WHERE {' AND '.join(conditions)} " if conditions else ""
        values = (*conditions.values(), check_count(limit, "limit"))
        return self._read(_SUMMARIES.list, f"{where}ORDER BY seq DESC LIMIT ?", values)


def _new_end(changed: Proposal) -> JsonObject:
    return {"expires_at": changed.expires_at.iso()}


def export_proposal(proposal: Proposal) -> JsonObject:
    return dict(_PROPOSALS.write(proposal, without=("seq",)))


def read_exported(exported: Mapping[str, Any]) -> Proposal:
    columns = {**exported, "seq": 0}
    return _PROPOSALS.read([columns[name] for name in _PROPOSALS.columns.split(", ")])


class Feed(Table):
    """Connection of its own that finds changes by others cheaply. For one thread."""

    def __init__(self, database: Database) -> None:
        super().__init__(database)
        self._mark: object = None
        self.seen_seq: int = self._read(_last_seq)

    def look(self, is_awaited: Callable[[str], bool], limit: int) -> tuple[int, list[Proposal]]:
        """Return the number of changes since the last look, and the awaited proposals among them that have ended.

        If the number is `limit`, look again. `is_awaited` must not use the store.
        """
        with self._database.read() as transaction:
            mark = transaction.change_mark()
            if mark == self._mark:
                return 0, []
            query = "SELECT id, seq, status FROM proposals WHERE seq > ? ORDER BY seq LIMIT ?"
            rows = transaction.execute(query, (self.seen_seq, limit)).fetchall()
            ended = [id for id, _, status in rows if not ProposalStatus(status).is_open and is_awaited(id)]
            found = [proposal for id in ended if (proposal := _get(transaction, id)) is not None]
        # After the transaction, so that a look that failed is repeated.
        if rows:
            self.seen_seq = rows[-1][1]
        if len(rows) < limit:
            self._mark = mark
        return len(rows), found

    def next_due_at(self) -> WallTime | None:
        """Return when the next proposal expires or needs a reminder, if nothing changes before."""
        return self._read(_next_due_at)

    def close(self) -> None:
        self._database.close()


def _find_full(transaction: Transaction, asker: str, now: WallTime, limits: InboxLimits) -> Failure | None:
    """Return the Failure for one more proposal of this agent; None if it may be opened.

    Proposals past their end that are not expired yet do not count.
    """
    query = "SELECT count(*) FROM proposals WHERE status = 'pending' AND expires_at > ?"
    for name, most, whose in ((asker, limits.each, " AND asked_by = ?"), (None, limits.all, "")):
        values = (now,) if name is None else (now, name)
        count = transaction.execute(query + whose, values).fetchone()[0]
        if count >= most:
            owner = f"{count} proposals are open" if name is None else f"{name} has {count} proposals open"
            context = {"asked_by": name, "open": count, "limit": most}
            return Failure("INBOX_FULL", f"{owner}, and no more than {most} may be", context=context)
    return None


def _attach_or_create(
    transaction: Transaction, new: NewProposal, text: str, now: WallTime, limits: InboxLimits | None
) -> Proposal | Failure:
    ask, action_hash = new.ask, new.ask.action_hash
    where, wanted = ("key = ?", new.key) if new.key is not None else ("key IS NULL AND action_hash = ?", action_hash)
    identical = f"WHERE asked_by = ? AND {where} ORDER BY created_seq DESC LIMIT 1"
    old = _PROPOSALS.get(transaction, identical, (new.asked_by, wanted))
    if old is not None and new.since is not None and old.created_at < new.since:
        old = None
    if old is not None and old.is_due(now):
        old = _expire_proposal(transaction, old, now)
    if old is not None and old.action_hash != action_hash:
        if now < old.expires_at and (old.is_open or old.status.is_decided):
            message = f"the key {new.key!r} belongs to another proposal: {old.id}"
            return Failure("KEY_REUSED", message, context={"proposal_id": old.id})
    # An approval is valid for one run, also where the work of a run continues later.
    elif old is not None and (old.answers(now) or (new.since is not None and old.is_unused)):
        return old
    if limits is not None and (refusal := _find_full(transaction, new.asked_by, now, limits)) is not None:
        return refusal
    status, seq = ProposalStatus.PENDING, next_seq(transaction)
    made = Proposal(new.id, ask, new.asked_by, new.key, action_hash, status, now, now, seq=seq)
    made = replace(made, expires_at=made.expires_by(new.until))
    details = {
        "kind": ask.kind.value,
        "title": ask.title,
        "operation": ask.operation,
        "action_hash": action_hash,
        "expires_at": made.expires_at.iso(),
        "key": new.key,
        "ask": digest(text),
    }
    _insert(transaction, made, text)
    _append(transaction, now, "proposed", new.id, new.asked_by, details)
    return made


def _append(transaction: Transaction, now: WallTime, action: str, id: str, by: str, details: JsonObject) -> None:
    """Append the entry of a change that is in its row already, number included."""
    append(transaction, now, action, id, by, {**details, "row": _row_digest(transaction, id)})


def _row_digest(transaction: Transaction, id: str) -> str:
    return digest_of_row(transaction.execute(f"SELECT {_ROW} FROM proposals WHERE id = ?", (id,)).fetchone())


def _set_back_ms(transaction: Transaction, now: WallTime) -> int:
    """Return by how much the clock was set back since the last entry of the audit trail; 0 if it was not."""
    row = transaction.execute("SELECT at FROM audit ORDER BY seq DESC LIMIT 1").fetchone()
    by_ms = 0 if row is None else row[0] - now.ms
    return by_ms if by_ms > CLOCK_SLACK_MS else 0


def _follow_clock(transaction: Transaction, now: WallTime) -> None:
    """Move the ends of proposals and of unused approvals as the clock was set back, so that none lasts longer."""
    if not (by_ms := _set_back_ms(transaction, now)):
        return
    is_valid = "status = 'pending' OR (status IN ('approved', 'modified') AND used_at IS NULL AND expires_at > ?)"
    query = f"SELECT id, expires_at, remind_at FROM proposals WHERE expires_at < ? AND ({is_valid})"
    for id, expires_at, remind_at in transaction.execute(query, (LATEST_MS, now)).fetchall():
        moved = {"expires_at": max(0, expires_at - by_ms), "remind_at": remind_at and max(0, remind_at - by_ms)}
        update_row(transaction, "proposals", {"seq": next_seq(transaction), **moved}, id)
        details = {"expires_at": WallTime(moved["expires_at"]).iso(), "clock_set_back_ms": by_ms}
        _append(transaction, now, "moved", id, THE_CLOCK, details)


def _next_due_at(transaction: Transaction) -> WallTime | None:
    ends = transaction.execute("SELECT min(expires_at) FROM proposals WHERE status = 'pending'").fetchone()[0]
    reminds = transaction.execute("SELECT min(remind_at) FROM proposals WHERE remind_at IS NOT NULL").fetchone()[0]
    times = [at for at in (ends, reminds) if at is not None]
    return WallTime(min(times)) if times else None


def _expire(transaction: Transaction, id: str, expires_at: WallTime, now: WallTime) -> int:
    seq = next_seq(transaction)
    update_row(transaction, "proposals", {"seq": seq, "status": ProposalStatus.EXPIRED, "remind_at": None}, id)
    _append(transaction, now, "expired", id, THE_CLOCK, {"expires_at": expires_at.iso()})
    return seq


def _expire_proposal(transaction: Transaction, proposal: Proposal, now: WallTime) -> Proposal:
    return replace(apply_expiry(proposal), seq=_expire(transaction, proposal.id, proposal.expires_at, now))


def _insert(transaction: Transaction, made: Proposal, text: str) -> None:
    insert_row(transaction, "asks", {"id": made.id, "ask": text})
    columns = {**_SUMMARIES.write(made.summary), **_PROPOSALS.write(made, without=("ask",))}
    insert_row(transaction, "proposals", {**columns, "created_seq": made.seq, "remind_at": made.remind_at})


def _delete(transaction: Transaction, id: str) -> None:
    transaction.execute("DELETE FROM proposals WHERE id = ?", (id,))
    transaction.execute("DELETE FROM asks WHERE id = ?", (id,))


def _last_seq(transaction: Transaction) -> int:
    return int(transaction.execute("SELECT coalesce(max(seq), 0) FROM proposals").fetchone()[0])


def _get(transaction: Transaction, id: str) -> Proposal | None:
    return _PROPOSALS.get(transaction, "WHERE id = ?", (id,))
