"""Proposals in the store: the identical call attaches, of two at once one wins, and the end is the store's to find."""

import multiprocessing
import os
from pathlib import Path
from typing import Any

import pytest

from shotclock.core.errors import Failure
from shotclock.core.limits import WallTime
from shotclock.core.proposal import (
    ActionOutcome,
    Confirmation,
    Decision,
    InboxLimits,
    Kind,
    Policy,
    Proposal,
    ProposalRequest,
    ProposalStatus,
    ProposedFile,
    Runner,
)
from shotclock.core.value_types import replace
from shotclock.store import proposals
from shotclock.store.audit import NOTHING_BEFORE
from shotclock.store.proposals import NewProposal
from shotclock.store.store import Store
from shotclock.supervise.kernel import this_process
from tests.store.work import CHILDREN_WITHIN_S, NOW, in_children

APPROVE = Decision(ProposalStatus.APPROVED, "go")
REJECT = Decision(ProposalStatus.REJECTED, "no")
ASK = ProposalRequest(
    Kind.OPERATION, "Restart it", operation="ops/restart", arguments={"host": "a"}, policy=Policy(ttl_ms=1000)
)
OTHER = replace(ASK, arguments={"host": "b"})
END = NOW + 1000
_numbers = iter(range(10**6))


def propose(
    store: Store,
    ask: ProposalRequest = ASK,
    by: str = "agent",
    key: str | None = None,
    now: WallTime = NOW,
    limits: InboxLimits | None = None,
) -> tuple[Proposal, bool]:
    new = NewProposal(f"p-{os.getpid()}-{next(_numbers)}", ask, by, key)
    (found,) = store.proposals.attach_or_create_all([new], now, limits)
    if isinstance(found, Failure):
        raise found
    return found, found.id == new.id


def code_of(attempt: Any, *arguments: Any, **named: Any) -> str:
    with pytest.raises(Failure) as refused:
        attempt(*arguments, **named)
    return refused.value.code


def actions(store: Store) -> list[str]:
    return [entry.action for entry in store.audit.entries()]


# --- attaching ------------------------------------------------------------------------------------


def test_a_proposal_comes_back_whole(store: Store, home: Path):
    ask = ProposalRequest(
        Kind.FILE,
        "Neue Türen ␀\x1b[31m<b>",
        "weil\n",
        file=ProposedFile("/a b", "x\r\n\t", "y"),
        default=[1, None],
        policy=Policy(5_000, 100, "default", ("ann",), True),
    )
    made, was_made = propose(store, ask, key="k")
    assert was_made and made.is_open and made.expires_at == NOW + 5000
    with Store.open(home) as other:
        assert other.proposals.get(made.id) == made
        assert other.proposals.get("p-none") is None


def test_the_identical_call_attaches_and_another_asker_or_action_does_not(store: Store):
    made, _ = propose(store)
    assert propose(store, replace(ASK, justification="other words", title="other title")) == (made, False)
    assert propose(store, by="somebody")[1]
    assert propose(store, OTHER)[1]
    assert len(store.proposals.list()) == 3


def test_a_key_makes_two_of_the_same_action_and_one_of_the_same_key(store: Store):
    one, _ = propose(store, key="1")
    two, made = propose(store, key="2")
    assert made and two.id != one.id
    assert propose(store, key="1") == (one, False)
    unkeyed, made = propose(store)
    assert made and unkeyed.id not in (one.id, two.id)


def test_a_key_that_stands_for_another_action_is_refused_by_name_while_that_is_in_force(store: Store):
    made, _ = propose(store, key="k")
    with pytest.raises(Failure) as refused:
        propose(store, OTHER, key="k")
    assert (refused.value.code, refused.value.context) == ("KEY_REUSED", {"proposal_id": made.id})
    assert propose(store, OTHER, "somebody", key="k")[1], "keys are each asker's own"
    store.proposals.decide(made.id, APPROVE, "ann", NOW)
    assert code_of(propose, store, OTHER, key="k") == "KEY_REUSED"
    store.proposals.use(made.id, made.action_hash, NOW)
    assert code_of(propose, store, OTHER, key="k") == "KEY_REUSED"
    assert propose(store, OTHER, key="k", now=END)[1], "from its end on a key is free"


def test_among_many_at_once_each_gets_its_own_answer(store: Store):
    asked = [NewProposal(f"p-m{n}", ask, "a", key) for n, (ask, key) in enumerate(
        [(ASK, None), (ASK, None), (ASK, "k"), (OTHER, "k"), (OTHER, None)]
    )]  # fmt: skip
    first, same, keyed, reused, other = store.proposals.attach_or_create_all(asked, NOW)
    assert [each.id for each in (first, same, keyed, other)] == ["p-m0", "p-m0", "p-m2", "p-m4"]
    assert same == first
    assert isinstance(reused, Failure) and reused.code == "KEY_REUSED"
    assert len(store.proposals.list()) == 3


@pytest.mark.parametrize("decision", [APPROVE, REJECT, Decision(ProposalStatus.MODIFIED, arguments={"host": "c"})])
def test_a_decision_taken_meanwhile_answers_the_identical_call_until_its_end(store: Store, decision: Decision):
    made, _ = propose(store)
    decided = store.proposals.decide(made.id, decision, "ann", NOW + 10)
    assert propose(store, now=END - 1) == (decided, False)
    assert propose(store, now=END)[1]


def test_an_approval_that_was_used_answers_nobody_again(store: Store):
    made, _ = propose(store)
    store.proposals.decide(made.id, APPROVE, "ann", NOW)
    assert store.proposals.use(made.id, made.action_hash, NOW + 5).used_at == NOW + 5
    assert code_of(store.proposals.use, made.id, made.action_hash, NOW) == "ALREADY_DECIDED"
    again, was_made = propose(store)
    assert was_made and again.is_open


def test_whether_anything_was_run_under_a_key_is_known_also_where_nobody_answered(store: Store):
    ask = replace(ASK, policy=Policy(ttl_ms=1000, when_expired="default"))
    made, _ = propose(store, ask, key="k")
    assert store.proposals.was_used("agent", "k") is False
    store.proposals.end_due(END)
    assert store.proposals.was_used("agent", "k") is False
    store.proposals.use(made.id, made.action_hash, END, Runner(this_process()), unanswered=True)
    assert store.proposals.was_used("agent", "k") is True
    assert store.proposals.was_used("agent", "other") is None


@pytest.mark.parametrize("key", [None, "k"])
def test_what_expired_or_was_withdrawn_never_answers(store: Store, key: str | None):
    first, _ = propose(store, key=key)
    store.proposals.withdraw(first.id, "agent", NOW)
    second, was_made = propose(store, key=key)
    assert was_made
    third, was_made = propose(store, key=key, now=END)
    assert was_made
    assert store.proposals.get(second.id).status is ProposalStatus.EXPIRED
    assert third.id not in (first.id, second.id)


# --- the end --------------------------------------------------------------------------------------


@pytest.mark.parametrize("attempt", ["decide", "reject", "withdraw", "extend"])
def test_past_its_end_a_proposal_is_expired_whoever_comes_first_and_never_rejected(store: Store, attempt: str):
    made, _ = propose(store)
    tries = {
        "decide": lambda: store.proposals.decide(made.id, APPROVE, "ann", END),
        "reject": lambda: store.proposals.decide(made.id, REJECT, "ann", END),
        "withdraw": lambda: store.proposals.withdraw(made.id, "agent", END),
        "extend": lambda: store.proposals.extend(made.id, 1000, "ann", END),
    }
    assert code_of(tries[attempt]) == "PROPOSAL_EXPIRED"
    there = store.proposals.get(made.id)
    assert (there.status, there.decision, there.decided_by) == (ProposalStatus.EXPIRED, None, None)
    assert actions(store) == ["proposed", "expired"], "kept, although the attempt was refused"


def test_a_decision_in_the_last_millisecond_counts(store: Store):
    made, _ = propose(store)
    assert store.proposals.decide(made.id, APPROVE, "ann", END - 1).status is ProposalStatus.APPROVED


def test_an_extension_moves_the_end(store: Store):
    made, _ = propose(store)
    assert store.proposals.extend(made.id, 500, "ann", NOW).expires_at == END + 500
    assert not store.proposals.end_due(END)
    assert store.proposals.end_due(END + 500)
    assert store.proposals.get(made.id).status is ProposalStatus.EXPIRED


def test_all_that_are_due_are_ended_and_reminded_of_once(store: Store, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(proposals, "AT_ONCE", 3)
    for number in range(8):
        propose(store, replace(ASK, arguments={"n": number}, policy=Policy(ttl_ms=1000, remind_ms=400)))
    propose(store, replace(ASK, arguments={"n": "late"}, policy=Policy(ttl_ms=9000)))
    assert not store.proposals.end_due(NOW + 599)
    assert store.proposals.end_due(NOW + 600) and not store.proposals.end_due(NOW + 700)
    assert actions(store).count("reminded") == 8
    assert store.proposals.end_due(END) and not store.proposals.end_due(END + 1)
    assert actions(store).count("expired") == 8
    assert len(store.proposals.list(status=ProposalStatus.PENDING)) == 1


def test_what_is_past_its_end_already_is_not_reminded_of(store: Store):
    propose(store, replace(ASK, policy=Policy(ttl_ms=1000, remind_ms=400)))
    store.proposals.end_due(END + 5)
    assert actions(store) == ["proposed", "expired"]


# --- who may --------------------------------------------------------------------------------------


def test_only_the_asker_withdraws(store: Store):
    made, _ = propose(store)
    assert code_of(store.proposals.withdraw, made.id, "somebody", NOW) == "NOT_ALLOWED"
    assert store.proposals.withdraw(made.id, "agent", NOW).status is ProposalStatus.WITHDRAWN
    assert code_of(store.proposals.decide, made.id, APPROVE, "ann", NOW) == "PROPOSAL_WITHDRAWN"


def test_what_is_refused_leaves_no_trace(store: Store):
    made, _ = propose(store, replace(ASK, policy=Policy(deciders=("ann",), destructive=True)))
    assert code_of(store.proposals.decide, made.id, APPROVE, "bob", NOW) == "NOT_ALLOWED"
    assert code_of(store.proposals.decide, made.id, APPROVE, "ann", NOW) == "CONFIRMATION_NEEDED"
    assert (
        code_of(store.proposals.decide, made.id, APPROVE, "ann", NOW, confirmation=Confirmation("x"))
        == "ACTION_CHANGED"
    )
    assert code_of(store.proposals.use, made.id, made.action_hash, NOW) == "NOT_ALLOWED"
    assert code_of(store.proposals.decide, "p-none", APPROVE, "ann", NOW) == "PROPOSAL_NOT_FOUND"
    assert store.proposals.get(made.id) == made
    assert actions(store) == ["proposed"]


# --- looking --------------------------------------------------------------------------------------


def test_the_list_is_by_last_change_and_goes_on_where_it_stopped(store: Store):
    made = [propose(store, replace(ASK, arguments={"n": n}), f"agent{n % 2}")[0] for n in range(5)]
    store.proposals.decide(made[1].id, APPROVE, "ann", NOW)
    ids = [each.id for each in made]
    order = [ids[1], ids[4], ids[3], ids[2], ids[0]]
    assert [each.id for each in store.proposals.list()] == order
    first = store.proposals.list(limit=2)
    assert [each.id for each in store.proposals.list(before_seq=first[-1].seq)] == order[2:]
    pending = store.proposals.list(status=ProposalStatus.PENDING, asked_by="agent1")
    assert [each.id for each in pending] == [ids[3]]


def test_a_list_shows_what_the_proposals_are_without_their_texts(store: Store):
    asks = [
        replace(ASK, policy=Policy(deciders=("ann",), destructive=True)),
        ProposalRequest(Kind.FILE, "Türen \x00", file=ProposedFile("/a", "x", "y")),
        ProposalRequest(Kind.QUESTION, "Why?", choices=("a", "b")),
    ]
    made = [propose(store, ask)[0] for ask in asks]
    store.proposals.decide(made[1].id, Decision(ProposalStatus.MODIFIED, "n" * 300, file_text="z"), "ann", NOW)
    listed = store.proposals.list()
    assert listed == [store.proposals.get(made[n].id).summary for n in (1, 2, 0)]
    assert listed[0].notes == "n" * 200
    assert [summary for summary, _ in store.proposals.since(0)] == listed[::-1]
    assert [each.id for each in store.proposals.list(ended=True)] == [made[1].id]


def test_the_one_that_was_made_last_answers_though_the_clock_was_set_back(store: Store):
    first, _ = propose(store, key="k")
    store.proposals.decide(first.id, APPROVE, "ann", NOW)
    store.proposals.use(first.id, first.action_hash, NOW)
    second, made = propose(store, key="k", now=NOW - 500)
    assert made and second.created_at < first.created_at
    store.proposals.record_outcome(first.id, ActionOutcome(True, NOW))  # the last change is of the first
    assert propose(store, key="k", now=NOW - 400) == (second, False)


def test_a_clock_that_is_set_back_prolongs_no_proposal_and_no_unused_approval(store: Store):
    hour_ms, ask = 3_600_000, replace(ASK, policy=Policy(ttl_ms=300_000))
    waiting, _ = propose(store, ask, key="1")
    approved, _ = propose(store, ask, key="2")
    store.proposals.decide(approved.id, APPROVE, "ann", NOW + 100_000)
    back = NOW - hour_ms
    assert store.proposals.end_due(back), "it looks at once, not when they are due"
    ends = {id: store.proposals.get(id).expires_at for id in (waiting.id, approved.id)}
    assert ends == dict.fromkeys(ends, back + 200_000), "what was left when the store saw them last"
    assert not store.proposals.end_due(back + 199_999), "moved once"
    assert propose(store, ask, key="2", now=back + 199_999)[0].id == approved.id
    assert propose(store, ask, key="2", now=back + 200_000)[1], "the approval is not valid any more"
    assert store.proposals.end_due(back + 200_000)
    assert store.proposals.get(waiting.id).status is ProposalStatus.EXPIRED
    assert actions(store)[3:] == ["moved", "moved", "proposed", "expired"]


def test_a_writer_that_waited_for_others_moves_nothing(store: Store):
    made, _ = propose(store, replace(ASK, policy=Policy(ttl_ms=300_000)), now=NOW)
    assert not store.proposals.end_due(NOW - 30_000)
    assert store.proposals.get(made.id) == made


# --- limits -----------------------------------------------------------------------------------------


def full(attempt: Any) -> dict[str, Any]:
    with pytest.raises(Failure) as refused:
        attempt()
    assert refused.value.code == "INBOX_FULL"
    return refused.value.context


def number(n: int, **policy: Any) -> ProposalRequest:
    return replace(ASK, arguments={"n": n}, policy=Policy(**{"ttl_ms": 1000, **policy}))


def test_nobody_has_more_open_than_there_is_room_for_and_what_is_open_still_answers(store: Store):
    limits = InboxLimits(each=2, all=3)
    first, _ = propose(store, number(1), "a", limits=limits)
    propose(store, number(2), "a", limits=limits)
    before = store.audit.entries()
    assert full(lambda: propose(store, number(3), "a", limits=limits)) == {"asked_by": "a", "open": 2, "limit": 2}
    assert propose(store, number(1), "a", limits=limits) == (first, False), "the identical call attaches"
    assert store.audit.entries() == before and len(store.proposals.list()) == 2, "nothing was made"
    propose(store, number(3), "b", limits=limits)
    assert full(lambda: propose(store, number(4), "b", limits=limits)) == {"asked_by": None, "open": 3, "limit": 3}


@pytest.mark.parametrize("end", ["decided", "withdrawn", "expired"])
def test_what_has_ended_makes_room(store: Store, end: str):
    limits = InboxLimits(each=1, all=1)
    made, _ = propose(store, number(1), limits=limits)
    now = NOW
    if end == "decided":
        store.proposals.decide(made.id, REJECT, "ann", NOW)
    elif end == "withdrawn":
        store.proposals.withdraw(made.id, "agent", NOW)
    else:
        now = END  # nobody has noticed yet
    assert propose(store, number(2), now=now, limits=limits)[1]


def test_of_many_at_once_those_that_fit_are_made(store: Store):
    asked = [NewProposal(f"p-f{n}", number(n % 4), "a") for n in range(8)]
    found = store.proposals.attach_or_create_all(asked, NOW, InboxLimits(each=3, all=9))
    codes = [each.code if isinstance(each, Failure) else each.id for each in found]
    assert codes == ["p-f0", "p-f1", "p-f2", "INBOX_FULL"] * 2


def propose_in_a_loop(me: int, home: Path) -> int:
    made = 0
    with Store.open(home) as store:
        for n in range(40):
            try:
                made += propose(store, number(1000 * me + n), f"agent{me}", limits=InboxLimits(each=30, all=50))[1]
            except Failure as failure:
                assert failure.code == "INBOX_FULL"
    return made


@pytest.mark.usefixtures("no_survivors")
def test_two_processes_at_once_do_not_exceed_it_either(store: Store, home: Path):
    made = in_children(2, propose_in_a_loop, home)
    assert sum(made) == 50 and max(made) <= 30
    assert len(store.proposals.list(status=ProposalStatus.PENDING)) == 50


def test_a_feed_sees_what_others_change_and_costs_nothing_while_they_do_not(store: Store, home: Path):
    before, _ = propose(store)
    feed = store.proposals.feed()
    try:
        assert feed.look(lambda _: True, 10) == (0, [])
        made, _ = propose(store, OTHER)
        assert feed.look(lambda _: True, 10) == (1, []), "a pending one is news, but nobody waits for that"
        with Store.open(home) as other:
            decided = other.proposals.decide(made.id, APPROVE, "ann", NOW)
            other.proposals.decide(before.id, REJECT, "ann", NOW)
        assert feed.look(lambda id: id == made.id, 10) == (2, [decided])
        assert feed.look(lambda _: True, 10) == (0, [])
        store.checkpoints.save("k", "f", 1, NOW)
        assert feed.look(lambda _: True, 10) == (0, [])
    finally:
        feed.close()


def test_a_feed_that_has_more_to_read_than_it_may_goes_on_from_there(store: Store):
    feed = store.proposals.feed()
    try:
        for number in range(5):
            propose(store, replace(ASK, arguments={"n": number}))
        assert [feed.look(lambda _: False, 2)[0] for _ in range(4)] == [2, 2, 1, 0]
    finally:
        feed.close()


def test_a_feed_goes_on_after_a_fork(store: Store):
    feed = store.proposals.feed()
    try:
        feed.look(lambda _: True, 10)
        child = os.fork()
        if not child:
            os._exit(0)
        os.waitpid(child, 0)
        made, _ = propose(store)
        assert feed.look(lambda _: True, 10) == (1, [])
        store.proposals.withdraw(made.id, "agent", NOW)
        assert [each.id for each in feed.look(lambda _: True, 10)[1]] == [made.id]
    finally:
        feed.close()


# --- the trail ------------------------------------------------------------------------------------


def test_every_change_has_an_entry_in_a_chain_and_the_proposal_its_number(store: Store):
    made, _ = propose(store)
    store.proposals.extend(made.id, 10, "ann", NOW + 1)
    store.proposals.decide(made.id, APPROVE, "bob", NOW + 2)
    store.proposals.use(made.id, made.action_hash, NOW + 3)
    entries = store.audit.of(made.id)
    assert [(e.seq, e.action, e.by, e.at) for e in entries] == [
        (1, "proposed", "agent", NOW),
        (2, "extended", "ann", NOW + 1),
        (3, "approved", "bob", NOW + 2),
        (4, "used", "agent", NOW + 3),
    ]
    assert [e.previous for e in entries] == [NOTHING_BEFORE, *(e.hash for e in entries[:-1])]
    assert store.proposals.get(made.id).seq == 4 == store.proposals.last_seq()


# --- at once --------------------------------------------------------------------------------------

ROUNDS = 200


def decide_all(number: int, home: Path, together: Any) -> list[str]:
    outcomes = []
    decision = Decision(ProposalStatus.APPROVED if number % 2 else ProposalStatus.REJECTED, str(number))
    with Store.open(home) as store:
        for round in range(ROUNDS):
            together.wait(CHILDREN_WITHIN_S)
            try:
                store.proposals.decide(f"p-r{round}", decision, f"operator{number}", NOW)
                outcomes.append("won")
            except Failure as failure:
                assert failure.code == "ALREADY_DECIDED"
                outcomes.append(failure.context["decided_by"])
    return outcomes


@pytest.mark.slow
@pytest.mark.usefixtures("no_survivors")
def test_of_two_processes_that_decide_at_the_same_time_one_wins_and_the_other_is_told_who(store: Store, home: Path):
    asked = [NewProposal(f"p-r{n}", replace(ASK, arguments={"n": n}), "agent") for n in range(ROUNDS)]
    store.proposals.attach_or_create_all(asked, NOW)
    zero, one = in_children(2, decide_all, home, multiprocessing.get_context("fork").Barrier(2))
    for round in range(ROUNDS):
        there = store.proposals.get(f"p-r{round}")
        winner = int(there.decided_by[-1])
        assert (zero, one)[winner][round] == "won"
        assert (zero, one)[1 - winner][round] == f"operator{winner}"
        assert there.decision.notes == str(winner)
    assert len(store.audit.entries(limit=10_000)) == 2 * ROUNDS
    assert "won" in zero and "won" in one, "they did not run at the same time"


def propose_the_same(number: int, home: Path) -> list[str]:
    with Store.open(home) as store:
        found = []
        for round in range(20):
            new = NewProposal(f"p-{number}x{round}", replace(ASK, arguments={"n": round}), "agent")
            found.append(store.proposals.attach_or_create_all([new], NOW)[0].id)
        return found


@pytest.mark.usefixtures("no_survivors")
def test_identical_calls_of_many_processes_make_one_proposal(store: Store, home: Path):
    found = in_children(4, propose_the_same, home)
    assert found[0] == found[1] == found[2] == found[3]
    assert len(store.proposals.list()) == 20


def test_a_run_that_ends_withdraws_its_questions_and_says_which_approvals_had_no_effect(store: Store) -> None:
    keys = ("r/a", "r/b", "r/c", "r0/d")
    made = {key: propose(store, replace(ASK, title=key), by="run r", key=key)[0].id for key in keys}
    ours, theirs = propose(store, replace(ASK, dispatched=True), by="run r", key="r/e")[0].id, made["r/c"]
    for id in (made["r/b"], theirs, ours):
        store.proposals.decide(id, APPROVE, "ann", NOW)
    store.proposals.end_run("run r", "r", NOW + 5, unheard=[made["r/b"]])
    ends = {key: store.proposals.get(id) for key, id in {**made, "r/e": ours}.items()}
    assert {key: each.status.value for key, each in ends.items() if each is not None} == {
        "r/a": "withdrawn", "r/b": "approved", "r/c": "approved", "r0/d": "pending", "r/e": "approved",
    }  # fmt: skip
    unused = {key for key, each in ends.items() if each is not None and each.outcome is not None}
    assert unused == {"r/b", "r/e"}, "the author of r/c carries it out, and has read the answer"


def test_a_proposal_is_taken_over_from_another_store_as_it_is_there(store: Store, tmp_path: Path) -> None:
    made, _ = propose(store, key="k")
    with Store.open(tmp_path / "other") as other:
        other.proposals.take_over(store.proposals.export(made.id) or {}, NOW)
        other.proposals.decide(made.id, APPROVE, "ann", NOW)
        exported = other.proposals.export(made.id)
    assert exported is not None and store.proposals.export("p-none") is None
    taken = store.proposals.take_over(exported, NOW + 1)
    assert (taken.status, taken.decided_by, taken.ask) == (APPROVE.status, "ann", ASK)
    assert store.proposals.get(made.id) == taken and actions(store) == ["proposed", "taken-over"]
    (entry,) = store.audit.entries(1)
    assert (entry.details["status"], entry.details["used"], entry.by) == ("approved", False, "ann")
    assert entry.details["decision"] is not None
    assert store.proposals.list_forgettable(NOW + 2) == [], "it is still valid"
    assert (
        store.proposals.list_forgettable(END + 1) == [(made.id, "k")]
        and store.proposals.forget([made.id, "x"], END) == 1
    )
