"""The audit file: whole after every change, and whatever is done to it is found."""

import asyncio
import fcntl
import itertools
import json
import os
import shutil
import sqlite3
import stat
import tempfile
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest

from shotclock.calls.principal import Role
from shotclock.core.errors import Failure
from shotclock.core.proposal import ProposalStatus
from shotclock.people import audit_file
from shotclock.people.access import Access
from shotclock.people.audit_file import AuditFile
from shotclock.store.home import StoreUnusable
from shotclock.store.proposals import NewProposal
from shotclock.store.store import Store
from tests.people.work import AGENT, ANN, APPROVE, REJECT, bounded, code_of, opened, operation, wall_now
from tests.rows import row
from tests.store.work import in_children

pytestmark = pytest.mark.slow

ENTRIES = 8


@pytest.fixture
def file(home: Path) -> Path:
    """Eight entries: four proposals, one of them extended, approved and used, one rejected."""

    async def work():
        async with opened(home) as inbox:
            made = [await inbox.propose(operation(number), AGENT) for number in range(4)]
            await inbox.extend(made[0].id, 1000, ANN)
            await inbox.decide(made[0].id, APPROVE, ANN)
            await inbox.use(made[0].id, made[0].action_hash)
            await inbox.decide(made[1].id, REJECT, ANN)

    bounded(work)
    return home / "audit.jsonl"


def verified(home: Path) -> list[str]:
    with Store.open(home) as store:
        return [str(problem) for problem in AuditFile(store).verify()]


def lines_of(file: Path) -> list[bytes]:
    return file.read_bytes().splitlines(keepends=True)


def tampered(home: Path, statement: str, *given: object) -> None:
    """In the store, behind its back."""
    connection = sqlite3.connect(home / "shotclock.db")
    assert connection.execute(statement, given).rowcount > 0
    connection.commit()
    connection.close()


def test_every_change_is_a_line_of_its_own_chained_and_nobody_elses_to_read(home: Path, file: Path):
    entries = [json.loads(line) for line in lines_of(file)]
    assert [entry["seq"] for entry in entries] == list(range(1, ENTRIES + 1))
    actions = ["proposed"] * 4 + ["extended", "approved", "used", "rejected"]
    assert [entry["action"] for entry in entries] == actions
    assert all(after["previous"] == before["hash"] for before, after in pairwise(entries))
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert verified(home) == []


def test_the_history_of_a_proposal_is_what_happened_to_it(home: Path):
    async def work():
        async with opened(home) as inbox:
            made = await inbox.propose(operation(), AGENT)
            await inbox.propose(operation(1), AGENT)
            await inbox.decide(made.id, APPROVE, ANN)
            return [(entry.action, entry.by) for entry in await inbox.history(made.id)]

    assert bounded(work) == [("proposed", "agent"), ("approved", "ann")]


def changed(line: bytes, **fields: object) -> bytes:
    return json.dumps({**json.loads(line), **fields}, sort_keys=True, separators=(",", ":")).encode() + b"\n"


Tamper = Callable[[list[bytes]], list[bytes]]
TAMPERED: dict[str, tuple[Tamper, str]] = {
    "the first removed": (lambda lines: lines[1:], "entry 1 is missing in the file"),
    "one in the middle removed": (lambda lines: [*lines[:3], *lines[4:]], "entry 4 is missing in the file"),
    "several removed": (lambda lines: [*lines[:2], *lines[5:]], "entries 3 to 5 are missing in the file"),
    "the last cut off": (lambda lines: lines[:-1], "entry 8 is missing in the file from the end, which was cut off"),
    "the end cut off": (lambda lines: lines[:5], "entries 6 to 8 are missing in the file from the end"),
    "cut in a line": (lambda lines: [*lines[:7], lines[7][:40]], "line 8 is not an entry"),
    "emptied": (lambda lines: [], "entries 1 to 8 are missing in the file from the end"),
    "one changed": (
        lambda lines: [*lines[:5], changed(lines[5], by="bob"), *lines[6:]],
        "entry 6 (line 6) was changed",
    ),
    "one byte changed": (
        lambda lines: [*lines[:5], lines[5].replace(b'"go"', b'"gO"'), *lines[6:]],
        "entry 6 (line 6) was changed",
    ),
    "a hash changed": (lambda lines: [changed(lines[0], hash="0" * 64), *lines[1:]], "entry 1 (line 1) was changed"),
    "a number changed": (
        lambda lines: [*lines[:7], changed(lines[7], seq=99)],
        "entry 99 (line 8) is not in the store",
    ),
    "two swapped": (
        lambda lines: [*lines[:2], lines[3], lines[2], *lines[4:]],
        "entry 3 (line 4) comes after entry 4: they were reordered",
    ),
    "turned round": (lambda lines: lines[::-1], "entry 7 (line 2) comes after entry 8: they were reordered"),
    "one repeated": (lambda lines: [*lines, lines[4]], "entry 5 is in the file again (line 9)"),
    "one invented": (lambda lines: [*lines, changed(lines[7], seq=9)], "entry 9 (line 9) is not in the store"),
    "something else": (lambda lines: [*lines[:4], b"\x00\xff not json\n", *lines[4:]], "line 5 is not an entry"),
    "an empty line": (lambda lines: [*lines[:4], b"\n", *lines[4:]], "line 5 is not an entry"),
    "deep nesting": (lambda lines: [*lines, b"[" * 100_000 + b"\n"], "line 9 is not an entry"),
}


def copy_of(home: Path) -> Path:
    """A copy of a closed store, to be tampered with."""
    copy = Path(tempfile.mkdtemp(dir=home.parent)) / "home"
    shutil.copytree(home, copy)
    return copy


def test_whatever_is_done_to_the_file_is_named(home: Path, file: Path):
    for name, continues in itertools.product(TAMPERED, (False, True)):
        with row(name, continues):
            copy, (tamper, expected) = copy_of(home), TAMPERED[name]
            (copy / file.name).write_bytes(b"".join(tamper(lines_of(file))))
            if continues:  # and is not mended or hidden by what is appended
                with Store.open(copy) as store:
                    store.proposals.attach_or_create_all([NewProposal("p-more", operation(9), "agent")], wall_now())
                    AuditFile(store).catch_up()
                if name == "one invented":
                    expected = "entry 9 (line 9) was changed"
                expected = expected.removesuffix(", which was cut off").removesuffix(" from the end")
            found = verified(copy)
            assert any(expected in problem for problem in found), found


def test_a_removed_or_readable_file_is_named(home: Path, file: Path):
    os.chmod(file, 0o644)
    assert any("others than its owner" in problem for problem in verified(home))
    file.unlink()
    assert any("entries 1 to 8 are missing" in problem for problem in verified(home))
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


def test_what_is_changed_in_the_store_is_named_as_well(home: Path, file: Path):
    table = [
        ("UPDATE audit SET by = 'bob' WHERE seq = 6", "entry 6 of the store was changed"),
        ("UPDATE audit SET details = '{}' WHERE seq = 6", "entry 6 of the store was changed"),
        ("DELETE FROM audit WHERE seq = 5", "entry 5 is missing in the store"),
        ("DELETE FROM audit WHERE seq = 8", "entry 8 (line 8) is not in the store"),
        ("UPDATE audit SET previous = hash WHERE seq = 3", "entry 3 of the store does not follow"),
        ("UPDATE proposals SET status = 'modified' WHERE status = 'approved'", "is not what its entries say"),
        ("UPDATE proposals SET used_at = NULL WHERE used_at IS NOT NULL", "is not what its entries say"),
        ("UPDATE proposals SET expires_at = expires_at + 1 WHERE status = 'pending'", "is not what its entries say"),
        ("UPDATE proposals SET decision = replace(decision, 'go', 'no')", "is not what its entries say"),
        ("UPDATE asks SET ask = replace(ask, '\"n\":3', '\"n\":4')", "is not what its entries say"),
        ("UPDATE proposals SET title = replace(title, 'Restart', 'Praise')", "is not what its entries say"),
        ("UPDATE proposals SET notes = 'yes' WHERE status = 'rejected'", "is not what its entries say"),
        ("DELETE FROM proposals WHERE status = 'rejected'", "is gone from the store"),
        ("UPDATE proposals SET decided_by = 'bob' WHERE status = 'approved'", "is not what its entries say"),
        ("UPDATE proposals SET decided_at = decided_at - 1 WHERE status = 'approved'", "is not what its entries say"),
        ("UPDATE proposals SET decided_via = 'a person' WHERE status = 'approved'", "is not what its entries say"),
        ("UPDATE proposals SET asked_by = 'bob' WHERE status = 'approved'", "is not what its entries say"),
        ("UPDATE proposals SET created_at = 1 WHERE status = 'pending'", "is not what its entries say"),
        ("UPDATE proposals SET used_at = used_at - 1 WHERE used_at > 0", "is not what its entries say"),
        (
            "UPDATE proposals SET outcome = json_object('ok', 1, 'at', 1) WHERE used_at > 0",
            "is not what its entries say",
        ),
        ("UPDATE proposals SET key = 'k' WHERE status = 'pending'", "is not what its entries say"),
        (
            'UPDATE asks SET ask = replace(ask, \'"justification":""\', \'"justification":"sure"\')',
            "is not what its entries say",
        ),
        (
            'UPDATE asks SET ask = replace(ask, \'"deciders":[]\', \'"deciders":["bob"]\')',
            "is not what its entries say",
        ),
        ("UPDATE asks SET ask = replace(ask, '86400000', '86400001')", "is not what its entries say"),
        ("UPDATE proposals SET created_seq = 99 WHERE status = 'rejected'", "not in the order of their entries"),
        ("UPDATE proposals SET deciders = 'x' WHERE status = 'rejected'", "cannot be read: it was changed"),
        ("UPDATE proposals SET outcome = 'x' WHERE used_at > 0", "cannot be read: it was changed"),
        ("UPDATE proposals SET runner = '[1]' WHERE used_at > 0", "cannot be read: it was changed"),
        ("UPDATE asks SET ask = '[' WHERE ask LIKE '%\"n\":3%'", "cannot be read: it was changed"),
        ("UPDATE audit SET details = '{' WHERE seq = 6", "entry 6 of the store was changed"),
        ("UPDATE audit SET details = '[1]' WHERE seq = 6", "entry 6 of the store was changed"),
    ]
    for statement, expected in table:
        with row(statement):
            copy = copy_of(home)
            tampered(copy, statement)
            found = verified(copy)
            assert any(expected in problem for problem in found), found


@pytest.mark.parametrize(
    ("statement", "expected"),
    [
        ("UPDATE tokens SET role = 'operator' WHERE name = 'agent'", "is not what its entries say"),
        ("UPDATE tokens SET digest = '0' WHERE name = 'agent'", "is not what its entries say"),
        ("UPDATE tokens SET expires_at = NULL WHERE name = 'agent'", "is not what its entries say"),
        ("UPDATE tokens SET revoked_at = NULL WHERE name = 'gone'", "is not what its entries say"),
        ("UPDATE tokens SET name = 'ann' WHERE name = 'agent'", "is not what its entries say"),
        ("DELETE FROM tokens WHERE name = 'gone'", "is gone from the store"),
        ("INSERT INTO tokens VALUES ('zzzzzzzz', 'eve', 'operator', '0', 1, NULL, NULL)", "without any entry"),
    ],
)
def test_what_is_changed_about_a_token_is_named(home: Path, statement: str, expected: str):
    with Store.open(home) as store:
        access = Access(store)
        for name in ("agent", "gone"):
            access.issue(name, Role.AGENT, ANN, wall_now(), ttl_ms=1_000_000)
        access.revoke("gone", ANN, wall_now())
    assert verified(home) == []
    tampered(home, statement)
    (problem,) = verified(home)
    assert expected in problem


def test_an_anchor_elsewhere_tells_of_a_tail_that_was_cut_and_of_a_trail_that_was_rewritten(
    home: Path, file: Path, tmp_path: Path
):
    anchor = tmp_path / "anchors"
    with Store.open(home) as store:
        trail = AuditFile(store)
        head = trail.anchor(anchor, wall_now())
        assert head == store.audit.head() and head.seq == ENTRIES
        assert trail.check_anchor(anchor) == []
        # The last rejection never happened: all of it is taken away, and nothing in here misses it.
        connection = sqlite3.connect(home / "shotclock.db")
        row = connection.execute("SELECT id, seq FROM proposals WHERE status = 'rejected'").fetchone()
        seqs = [seq for (seq,) in connection.execute("SELECT seq FROM audit WHERE proposal = ?", row[:1])]
        assert seqs == [2, 8]
        connection.execute("DELETE FROM audit WHERE seq = 8")
        connection.execute("UPDATE audit_filed SET seq = 7")
        connection.commit()
        (problem,) = trail.check_anchor(anchor)
        assert str(problem) == "entry 8 was anchored (line 1) and is gone"
        # Or somebody else decided it: the chain is written anew from there.
        from shotclock.store.audit import append

        append(connection, wall_now(), "rejected", row[0], "anna", {"notes": ""})
        connection.commit()
        connection.close()
        (problem,) = trail.check_anchor(anchor)
        assert "entry 8 is not the one that was anchored (line 1): the trail was rewritten" in str(problem)


def test_a_file_without_anchors_is_no_proof_of_anything(home: Path, file: Path, tmp_path: Path):
    with Store.open(home) as store:
        trail = AuditFile(store)
        for content, code in ((None, "FILE_NOT_FOUND"), (b"", "FILE_UNREADABLE"), (b"\xff", "FILE_UNREADABLE")):
            if content is not None:
                (tmp_path / "anchors").write_bytes(content)
            with pytest.raises(Failure) as refused:
                trail.check_anchor(tmp_path / "anchors")
            assert refused.value.code == code
        (tmp_path / "anchors").write_text("hello\n")
        assert "is not an anchor" in str(trail.check_anchor(tmp_path / "anchors")[0])


def test_an_end_that_was_taken_from_file_and_store_alike_is_missed_by_the_proposal_it_was_about(home: Path, file: Path):
    file.write_bytes(b"".join(lines_of(file)[:-1]))
    tampered(home, "DELETE FROM audit WHERE seq = 8")
    tampered(home, "UPDATE audit_filed SET seq = 7")
    (problem,) = verified(home)
    assert "is not what its entries say" in problem


def test_a_decision_that_was_forged_with_its_entry_left_out_is_named(home: Path, file: Path):
    tampered(
        home, "UPDATE proposals SET status = 'approved', decided_by = 'ann', decided_at = 1, notes = '', "
        "decision = (SELECT decision FROM proposals WHERE status = 'approved') WHERE status = 'pending'"
    )  # fmt: skip
    assert len([problem for problem in verified(home) if "is not what its entries say" in problem]) == 2


def test_what_others_decide_while_it_is_verified_is_no_alarm(home: Path, file: Path, monkeypatch: pytest.MonkeyPatch):
    with Store.open(home) as store, Store.open(home) as others:
        look = store.proposals.with_entries
        looked: list[str] = []

        def meanwhile(id: str):
            looked.append(id)
            for each in others.proposals.list(status=ProposalStatus.PENDING):
                others.proposals.decide(each.id, REJECT, "bob", wall_now())
            new = NewProposal(f"p-m{len(looked)}", operation(200 + len(looked)), "agent")
            others.proposals.attach_or_create_all([new], wall_now())
            return look(id)

        monkeypatch.setattr(store.proposals, "with_entries", meanwhile)
        assert AuditFile(store).verify() == [] and len(looked) == 4
    assert verified(home) == []


# --- catching up ----------------------------------------------------------------------------------


def unfiled(home: Path, count: int) -> None:
    """Changes of a process that was killed before it came to the file."""
    with Store.open(home) as store:
        for number in range(count):
            store.proposals.attach_or_create_all(
                [NewProposal(f"p-u{number}", operation(100 + number), "agent")], wall_now()
            )


@pytest.mark.parametrize("kept", [0, 1, 30, 400, 700, 10_000])
def test_what_a_killed_process_left_half_written_is_finished(home: Path, file: Path, kept: int):
    """Whatever part of the lines reached the file before the store could note that they are in it."""
    unfiled(home, 3)
    with Store.open(home) as store:
        whole = b"".join(entry.line().encode() for entry in store.audit.list_unfiled(10))
    with open(file, "ab") as output:
        output.write(whole[:kept])
    assert verified(home) == []
    assert file.read_bytes().endswith(whole) and len(lines_of(file)) == ENTRIES + 3


def test_a_foreign_piece_at_the_end_is_left_there_and_named_and_does_not_swallow_an_entry(home: Path, file: Path):
    with open(file, "ab") as output:
        output.write(b'{"seq": 9, "act')
    unfiled(home, 2)
    assert verified(home) == ["line 9 is not an entry"]
    assert [json.loads(line)["seq"] for line in lines_of(file)[9:]] == [9, 10]


def test_more_than_are_written_at_once_are_written_in_turns(home: Path, file: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(audit_file, "ENTRIES_AT_ONCE", 4)
    unfiled(home, 11)
    assert verified(home) == []
    assert len(lines_of(file)) == ENTRIES + 11


def catch_up_again(number: int, home: Path) -> None:
    with Store.open(home) as store:
        for round in range(15):
            id = f"p-{number}x{round}"
            store.proposals.attach_or_create_all([NewProposal(id, operation(round), f"agent{number}")], wall_now())
            AuditFile(store).catch_up()


@pytest.mark.usefixtures("no_survivors")
def test_processes_that_append_at_the_same_time_write_every_entry_once_and_in_order(home: Path, file: Path):
    in_children(4, catch_up_again, home)
    assert [json.loads(line)["seq"] for line in lines_of(file)] == list(range(1, ENTRIES + 61))
    assert verified(home) == []


def test_a_lock_that_nobody_gives_back_is_not_waited_for_for_ever_and_fails_no_decision(
    home: Path, file: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(audit_file, "LOCK_ATTEMPTS", 3)

    async def work():
        async with opened(home) as inbox:
            made = await inbox.propose(operation(50), AGENT)
            await inbox.decide(made.id, APPROVE, ANN)
            assert await code_of(inbox.verify_audit()) == "STORE_BUSY"

    with open(file, "rb") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        bounded(work)
        assert len(lines_of(file)) == ENTRIES
    assert verified(home) == []
    assert len(lines_of(file)) == ENTRIES + 2


@pytest.mark.parametrize("obstacle", ["directory", "pipe", "link"])
def test_what_stands_in_the_place_of_the_file_neither_hangs_nor_fails_a_decision(home: Path, obstacle: str):
    async def work():
        async with opened(home) as inbox:
            {
                "directory": lambda path: path.mkdir(),
                "pipe": os.mkfifo,
                "link": lambda path: path.symlink_to(home / "elsewhere"),
            }[obstacle](home / "audit.jsonl")
            made = await inbox.propose(operation(), AGENT)
            assert (await inbox.decide(made.id, APPROVE, ANN)).status is ProposalStatus.APPROVED
            try:
                return await asyncio.wait_for(inbox.verify_audit(), 5)
            except StoreUnusable as unusable:
                return [unusable]

    assert bounded(work)
    assert not (home / "elsewhere").exists()
