"""The audit trail as a file: one JSON line per entry, only ever appended to.

The entries are made in the store, in the transaction of their change. They are appended to the file after the commit,
under a lock on the file. A process that is killed in between loses nothing: the next one catches up, and completes a
line that was cut off. The store remembers how far the file had come, so entries missing at its end were removed.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ..core.errors import Failure
from ..core.json_values import to_json
from ..core.limits import WallTime
from ..core.proposal import Proposal, ProposalStatus, canonical, digest
from ..core.value_types import JsonObject, value
from ..store.audit import NOTHING_BEFORE, Entry, Head
from ..store.home import StoreUnusable, create_private_file, sync_directory
from ..store.proposals import StoredProposal
from ..store.store import AUDIT_FILE_NAME, Store
from ..supervise.clock import pause

ENTRIES_AT_ONCE = 500
# Five seconds in all. Others append for milliseconds; the check of a huge file exhausts this, and then the next change
# catches up.
LOCK_ATTEMPTS = 250
LOCK_PAUSE_S = 0.02
# The size of a file of anchors: a hundred thousand of them.
ANCHOR_LIMIT = 16_000_000


@value
class AuditProblem:
    place: str  # `file`, `store`, `proposal`, `token` or `anchor`
    message: str
    seq: int | None = None
    line: int | None = None

    def __str__(self) -> str:
        return self.message


class AuditFile:
    def __init__(self, store: Store) -> None:
        self._store = store
        self.path: Path = store.home / AUDIT_FILE_NAME

    def catch_up_if_possible(self) -> None:
        """Catch up, and ignore a failure: the change itself is stored, and `verify` reports the defect."""
        with suppress(OSError, Failure):
            self.catch_up()

    def catch_up(self) -> None:
        """Append every missing entry to the file, and write it to the disk."""
        if self._store.audit.list_unfiled(1):
            with self._hold_lock() as descriptor:
                self._append(descriptor)

    def verify(self) -> list[AuditProblem]:
        """Return everything that was removed, changed, reordered or cut off; empty if the trail is intact."""
        problems: list[AuditProblem] = []
        try:
            with self._hold_lock() as descriptor:
                self._append(descriptor)
                lines, filed = self._check_store(problems), self._store.audit.get_filed_seq()
                self._check_file(descriptor, lines, filed, problems)
        except OSError as error:
            problems.append(AuditProblem("file", f"{self.path} cannot be used: {error.strerror}"))
        self._check_proposals(problems)
        self._check_tokens(problems)
        return problems

    def check_anchor(self, anchor: Path) -> list[AuditProblem]:
        """Return the anchored entries that are gone or changed. Raises Failure for an unreadable file."""
        problems: list[AuditProblem] = []
        for number, line in enumerate(_read_anchors(anchor), 1):
            try:
                anchored = json.loads(line)
                seq, hash = anchored["seq"], anchored["hash"]
                found = self._store.audit.entries(seq - 1, 1) if seq else []
            except (ValueError, TypeError, KeyError, RecursionError):
                problems.append(AuditProblem("anchor", f"line {number} of {anchor} is not an anchor", None, number))
                continue
            if seq and (not found or found[0].seq != seq):
                message = f"entry {seq} was anchored (line {number}) and is gone"
                problems.append(AuditProblem("anchor", message, seq, number))
            elif seq and found[0].hash != hash:
                message = f"entry {seq} is not the one that was anchored (line {number}): the trail was rewritten"
                problems.append(AuditProblem("anchor", message, seq, number))
        return problems

    def anchor(self, anchor: Path, now: WallTime) -> Head:
        """Append the head of the trail to a file that is kept elsewhere. Raises Failure if it cannot be written."""
        head = self._store.audit.head()
        line = canonical({"at": now.iso(), "seq": head.seq, "hash": head.hash}) + "\n"
        try:
            flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK
            with open(os.open(anchor, flags, 0o600), "wb", buffering=0) as file:
                file.write(line.encode())
                if stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                    os.fsync(file.fileno())
        except OSError as error:
            raise Failure("FILE_UNWRITABLE", f"{anchor}: {error.strerror}") from None
        return head

    # --- appending ------------------------------------------------------------------------------------------

    @contextmanager
    def _hold_lock(self) -> Iterator[int]:
        descriptor = self._open()
        try:
            for attempt in range(LOCK_ATTEMPTS):
                if attempt:
                    pause(LOCK_PAUSE_S)
                with suppress(BlockingIOError):
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
            else:
                raise Failure("STORE_BUSY", "others kept the audit file locked for too long")
            try:
                yield descriptor
            finally:
                # Not left to the closing: a process forked meanwhile has the descriptor as well, and with it the lock.
                fcntl.flock(descriptor, fcntl.LOCK_UN)
        finally:
            os.close(descriptor)

    def _open(self) -> int:
        with suppress(FileExistsError):
            os.close(create_private_file(self.path))
            sync_directory(self.path.parent)
        # O_NONBLOCK: opening a pipe in its place would wait for ever.
        flags = os.O_RDWR | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
        descriptor = os.open(self.path, flags)
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            raise StoreUnusable("the audit file is not a regular file", self.path)
        return descriptor

    def _append(self, descriptor: int) -> None:
        while entries := self._store.audit.list_unfiled(ENTRIES_AT_ONCE):
            text = _missing_text(descriptor, [entry.line().encode() for entry in entries])
            while text:
                text = text[os.write(descriptor, text) :]
            os.fsync(descriptor)
            self._store.audit.mark_filed(entries[-1].seq)

    # --- verifying ------------------------------------------------------------------------------------------

    def _check_store(self, problems: list[AuditProblem]) -> dict[int, bytes]:
        """Check the chain of entries in the store. Return the hashes of the lines that should be in the file."""
        lines: dict[int, bytes] = {}
        previous, last = NOTHING_BEFORE, 0
        for entry in self._entries():
            if entry.seq != last + 1:
                _report_missing(problems, "store", last + 1, entry.seq - 1)
            elif entry.previous != previous:
                message = f"entry {entry.seq} of the store does not follow the one before it"
                problems.append(AuditProblem("store", message, entry.seq))
            if digest(entry.content()) != entry.hash:
                problems.append(AuditProblem("store", f"entry {entry.seq} of the store was changed", entry.seq))
            previous, last = entry.hash, entry.seq
            lines[entry.seq] = hashlib.sha256(entry.line().encode()).digest()
        return lines

    def _check_file(self, descriptor: int, lines: dict[int, bytes], filed: int, problems: list[AuditProblem]) -> None:
        if os.fstat(descriptor).st_mode & 0o077:
            problems.append(AuditProblem("file", f"others than its owner may use {self.path}"))
        seen: set[int] = set()
        highest = 0
        with open(descriptor, "rb", closefd=False) as file:
            file.seek(0)
            for number, line in enumerate(file, 1):
                seq = _seq_of(line)
                if seq is None:
                    problems.append(AuditProblem("file", f"line {number} is not an entry", None, number))
                    continue
                message = None
                if seq not in lines:
                    message = f"entry {seq} (line {number}) is not in the store"
                elif hashlib.sha256(line).digest() != lines[seq]:
                    message = f"entry {seq} (line {number}) was changed"
                elif seq in seen:
                    message = f"entry {seq} is in the file again (line {number})"
                elif seq < highest:
                    message = f"entry {seq} (line {number}) comes after entry {highest}: they were reordered"
                if message is not None:
                    problems.append(AuditProblem("file", message, seq, number))
                seen.add(seq)
                highest = max(highest, seq) if seq in lines else highest
        missing = [seq for seq in range(1, filed + 1) if seq not in seen]
        while missing:
            first = end = missing.pop(0)
            while missing and missing[0] == end + 1:
                end = missing.pop(0)
            _report_missing(problems, "file", first, end, cut=end == filed)

    def _check_proposals(self, problems: list[AuditProblem]) -> None:
        ids = {entry.proposal for entry in self._entries() if entry.proposal is not None}
        for id in sorted(ids):
            # Each with its entries in one instant: others continue to decide.
            try:
                stored = self._store.proposals.with_entries(id)
            except (ValueError, TypeError, LookupError, AttributeError, RecursionError):  # not a valid row
                problems.append(AuditProblem("proposal", f"proposal {id} cannot be read: it was changed"))
                continue
            history = _ProposalHistory()
            for entry in stored.entries:
                history.apply(entry, problems)
            if stored.proposal is None and not history.is_forgotten:
                problems.append(AuditProblem("proposal", f"proposal {id} is gone from the store"))
            elif stored.proposal is not None and not history.fits(stored, stored.proposal):
                message = f"proposal {id} is not what its entries say: it was changed"
                problems.append(AuditProblem("proposal", message, stored.proposal.seq))
        before = (0, 0, "")
        for id, created, made in self._store.proposals.list_order():
            if made is None:
                problems.append(AuditProblem("proposal", f"proposal {id} is in the store without any entry"))
            else:
                if created <= before[0] or made <= before[1]:
                    message = f"proposals {before[2]} and {id} are not in the order of their entries: it was changed"
                    problems.append(AuditProblem("proposal", message, made))
                before = max(before, (created, made, id))

    def _check_tokens(self, problems: list[AuditProblem]) -> None:
        digests = self._store.tokens.digests()  # first: tokens issued from here on are not in it
        recorded: dict[str, str | None] = {}
        for entry in self._entries():
            if entry.action in ("token-issued", "token-revoked"):
                recorded[entry.details["token"]] = entry.details.get("row")
        for id, digest_now in digests.items():
            if id not in recorded:
                problems.append(AuditProblem("token", f"token {id} is in the store without any entry"))
            elif recorded[id] != digest_now and self._store.tokens.digests().get(id) != recorded[id]:
                problems.append(AuditProblem("token", f"token {id} is not what its entries say: it was changed"))
        for id in sorted(recorded.keys() - self._store.tokens.digests().keys()):
            problems.append(AuditProblem("token", f"token {id} is gone from the store"))

    def _entries(self) -> Iterator[Entry]:
        last = 0
        while entries := self._store.audit.entries(last, ENTRIES_AT_ONCE):
            yield from entries
            last = entries[-1].seq


def _read_anchors(anchor: Path) -> list[str]:
    try:
        descriptor = os.open(anchor, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        with open(descriptor, encoding="utf-8") as file:
            lines = file.read(ANCHOR_LIMIT).splitlines()
    except (OSError, UnicodeDecodeError) as error:
        code = "FILE_NOT_FOUND" if isinstance(error, FileNotFoundError) else "FILE_UNREADABLE"
        raise Failure(code, f"{anchor}: {getattr(error, 'strerror', None) or error}") from None
    if not lines:
        raise Failure("FILE_UNREADABLE", f"{anchor} holds no anchor: `shotclock inbox audit --anchor FILE` writes one")
    return lines


_ENDS = frozenset(status.value for status in ProposalStatus if not status.is_open)


class _ProposalHistory:
    """State of one proposal according to its entries."""

    def __init__(self) -> None:
        self.status = ProposalStatus.PENDING
        self.used = False
        self.is_forgotten = False
        """Whether the proposal was deleted by its age."""
        self.details: JsonObject = {}
        """Details as they were last recorded. `row` is the digest of the row after its last change."""

    def apply(self, entry: Entry, problems: list[AuditProblem]) -> None:
        """Apply an entry; add a problem if it cannot follow those before it."""
        message = None
        if entry.action in _ENDS:
            if not self.status.is_open:
                message = f"entry {entry.seq} ends proposal {entry.proposal} a second time"
            self.status = ProposalStatus(entry.action)
        elif entry.action == "taken-over":  # from the store of another machine, which has its other entries
            self.status, self.used = ProposalStatus(entry.details["status"]), bool(entry.details.get("used"))
        elif entry.action == "forgotten":
            if self.status.is_open:
                message = f"entry {entry.seq} forgets proposal {entry.proposal} before it was decided"
            self.is_forgotten = True
        elif entry.action == "used":
            if self.used:
                message = f"entry {entry.seq} uses the approval {entry.proposal} a second time"
            self.used = True
        if message is not None:
            problems.append(AuditProblem("store", message, entry.seq))
        self.details |= {"row": None, **entry.details}

    def fits(self, stored: StoredProposal, proposal: Proposal) -> bool:
        recorded = self.details.get
        return (
            not self.is_forgotten
            and self.status is proposal.status
            and recorded("action_hash") == proposal.action_hash == proposal.ask.action_hash
            and recorded("decision") == (None if proposal.decision is None else digest(to_json(proposal.decision)))
            and recorded("expires_at") == proposal.expires_at.iso()
            and self.used == (proposal.used_at is not None)
            and stored.summary == proposal.summary
            and recorded("ask") == stored.ask
            and recorded("row") == stored.row
        )


def _missing_text(descriptor: int, lines: list[bytes]) -> bytes:
    """Return the part of these lines that is not at the end of the file. A killed process may have left any part of
    them there."""
    window = 2 * max(map(len, lines)) + 1  # the last line and a piece of the next, if they are ours
    size = os.fstat(descriptor).st_size
    tail = os.pread(descriptor, window, max(0, size - window))
    whole, newline, piece = tail.rpartition(b"\n")
    last = whole.rpartition(b"\n")[2] + newline
    missing = lines[lines.index(last) + 1 :] if last in lines else lines
    text = b"".join(missing)
    if piece and missing:
        text = text[len(piece) :] if missing[0].startswith(piece) else b"\n" + text
    return text


def _seq_of(line: bytes) -> int | None:
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError):
        return None
    seq = entry.get("seq") if isinstance(entry, dict) else None
    return seq if type(seq) is int else None


def _report_missing(problems: list[AuditProblem], place: str, first: int, end: int, *, cut: bool = False) -> None:
    which = f"entry {first} is" if first == end else f"entries {first} to {end} are"
    how = " from the end, which was cut off" if cut else ""
    problems.append(AuditProblem(place, f"{which} missing in the {place}{how}", first))
