"""A proposal and its transitions, as the store applies them."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shotclock.core.errors import Failure
from shotclock.core.limits import LATEST_MS, MAX_MS, ProcessIdentity, WallTime
from shotclock.core.proposal import (
    ActionOutcome,
    Confirmation,
    Decision,
    Kind,
    Policy,
    Proposal,
    ProposalRequest,
    ProposalStatus,
    ProposedFile,
    Runner,
    apply_decision,
    apply_expiry,
    apply_extension,
    apply_outcome,
    apply_use,
    apply_withdrawal,
    canonical,
    digest,
)
from shotclock.core.value_types import replace

NOW = WallTime(1_000_000)
END = NOW + 60_000
OPERATION = ProposalRequest(Kind.OPERATION, "pay", operation="shop/pay", arguments={"b": 2, "a": 1}, dispatched=True)
RUNNER = Runner(ProcessIdentity("h", "b", 1, 2))
PENDING, APPROVED, MODIFIED, REJECTED, EXPIRED, WITHDRAWN = ProposalStatus


def proposal(status: ProposalStatus = PENDING, ask: ProposalRequest = OPERATION, **fields: Any) -> Proposal:
    if status.is_decided:
        decided = Decision(status, "fine", arguments={"a": 9} if status is MODIFIED else None)
        fields = {"decision": decided, "decided_by": "ann", "decided_at": NOW, **fields}
    made = Proposal("p-1", ask, "bot", None, ask.action_hash, status, NOW, END)
    return replace(made, **fields)


def refusal(work: Any, *arguments: Any, **named: Any) -> tuple[str, str]:
    with pytest.raises(Failure) as found:
        work(*arguments, **named)
    return found.value.code, str(found.value)


def test_only_an_open_proposal_is_decided_expired_withdrawn_or_extended_and_the_refusal_names_its_end() -> None:
    yes = Decision(APPROVED)
    decided = apply_decision(proposal(), yes, "ann", NOW, via="http")
    assert (decided.status, decided.decision, decided.decided_by, decided.decided_at) == (APPROVED, yes, "ann", NOW)
    assert decided.decided_via == "http" and apply_decision(proposal(), yes, "ann", NOW, via="").decided_via is None
    assert apply_expiry(proposal()).status is EXPIRED and apply_withdrawal(proposal(), "bot").status is WITHDRAWN
    extended = apply_extension(proposal(reminded_at=NOW), 500, "ann")
    assert (extended.expires_at, extended.reminded_at) == (END + 500, None)
    ends = {APPROVED: "ALREADY_DECIDED", MODIFIED: "ALREADY_DECIDED", REJECTED: "ALREADY_DECIDED"}
    ends |= {EXPIRED: "PROPOSAL_EXPIRED", WITHDRAWN: "PROPOSAL_WITHDRAWN"}
    for status, code in ends.items():
        ended = proposal(status)
        for work, rest in (
            (apply_decision, (yes, "ann", NOW)),
            (apply_expiry, ()),
            (apply_withdrawal, ("bot",)),
            (apply_extension, (1, "ann")),
        ):
            assert refusal(work, ended, *rest)[0] == code, (status, work)
    assert refusal(apply_expiry, proposal(REJECTED)) == ("ALREADY_DECIDED", f"p-1 was rejected by ann at {NOW}")
    assert refusal(apply_expiry, proposal(WITHDRAWN))[1] == "p-1 was withdrawn by bot"
    assert "no time left" in refusal(apply_expiry, proposal(EXPIRED))[1], "it ended before its policy said"


def test_a_decision_needs_a_decider_the_action_that_was_shown_and_the_typed_words_if_it_is_destructive() -> None:
    yes, ask = Decision(APPROVED), replace(OPERATION, policy=Policy(deciders=("ann",), destructive=True))
    typed = Confirmation(typed="  shop/pay ")
    assert refusal(apply_decision, proposal(ask=ask), yes, "bob", NOW, confirmation=typed)[0] == "NOT_ALLOWED"
    assert refusal(apply_extension, proposal(ask=ask), 1, "bob")[0] == "NOT_ALLOWED"
    assert refusal(apply_withdrawal, proposal(), "ann")[0] == "NOT_ALLOWED", "only its own agent withdraws it"
    other = Confirmation(action_hash="other")
    assert refusal(apply_decision, proposal(), yes, "ann", NOW, confirmation=other)[0] == "ACTION_CHANGED"
    shown = Confirmation(action_hash=ask.action_hash, typed="shop/pay")
    assert apply_decision(proposal(ask=ask), yes, "ann", NOW, confirmation=shown).status is APPROVED
    for wrong in (None, "", "shop"):
        confirmation = Confirmation(typed=wrong)
        code = refusal(apply_decision, proposal(ask=ask), yes, "ann", NOW, confirmation=confirmation)[0]
        assert code == "CONFIRMATION_NEEDED"
    assert apply_decision(proposal(ask=ask), Decision(REJECTED), "ann", NOW).status is REJECTED, "a no is never typed"
    for by_ms in (0, -1, MAX_MS + 1, True, "1"):
        assert refusal(apply_extension, proposal(), by_ms, "ann")[0] == "ARG_ERROR", by_ms
    assert apply_extension(proposal(), MAX_MS, "ann").expires_at == END + MAX_MS
    assert apply_extension(proposal(expires_at=WallTime(LATEST_MS - 1)), 5, "ann").expires_at == WallTime(LATEST_MS)


def test_an_approval_of_exactly_that_action_is_used_once_and_has_one_outcome() -> None:
    approved, hash = proposal(APPROVED), OPERATION.action_hash
    used = apply_use(approved, hash, NOW, RUNNER)
    assert (used.used_at, used.runner) == (NOW, RUNNER)
    assert refusal(apply_use, used, hash, NOW)[0] == "ALREADY_DECIDED"
    assert refusal(apply_use, proposal(APPROVED, runner=RUNNER), hash, NOW)[0] == "ALREADY_DECIDED"
    assert refusal(apply_use, approved, "other", NOW)[0] == "ACTION_CHANGED"
    for status in (PENDING, REJECTED, EXPIRED, WITHDRAWN):
        assert refusal(apply_use, proposal(status), hash, NOW)[0] == "NOT_ALLOWED", status
    outcome = ActionOutcome(True, NOW)
    assert apply_outcome(used, outcome).outcome == outcome
    assert refusal(apply_outcome, apply_outcome(used, outcome), outcome)[0] == "ALREADY_DECIDED"
    assert refusal(apply_outcome, approved, outcome)[0] == "NOT_ALLOWED"
    assert apply_outcome(approved, outcome, unused=True).outcome == outcome
    assert refusal(apply_outcome, used, outcome, unused=True)[0] == "NOT_ALLOWED"
    assert refusal(apply_outcome, proposal(REJECTED), outcome, unused=True)[0] == "NOT_ALLOWED"


def test_work_continues_unanswered_only_by_its_policy_and_only_where_time_ran_out_for_the_question() -> None:
    ask = replace(OPERATION, policy=Policy(ttl_ms=60_000, when_expired="default"))
    gone = proposal(EXPIRED, ask)
    went_on = apply_use(gone, ask.action_hash, NOW, RUNNER, unanswered=True)
    assert (went_on.used_at, went_on.runner, went_on.is_unused) == (None, RUNNER, False)
    early = proposal(EXPIRED, ask, expires_at=END + -1)
    for other in (early, proposal(EXPIRED), proposal(APPROVED, ask), proposal(PENDING, ask)):
        assert refusal(apply_use, other, other.action_hash, NOW, unanswered=True)[0] == "NOT_ALLOWED"
    assert early.ended_with_its_work and not gone.ended_with_its_work and not proposal(PENDING, ask).ended_with_its_work


def test_which_proposal_answers_the_identical_call_and_when_it_ends_or_reminds() -> None:
    before, after = END + -1, END
    for made, is_answer in (
        (proposal(), True),
        (proposal(APPROVED), True),
        (proposal(REJECTED), True),
        (proposal(APPROVED, used_at=NOW), False),
        (proposal(WITHDRAWN), False),
        (proposal(EXPIRED), False),
    ):
        assert made.answers(before) is is_answer and not made.answers(after)
    assert proposal().is_due(after) and not proposal().is_due(before) and not proposal(REJECTED).is_due(after)
    assert proposal().expires_by(None) == NOW + 86_400_000 and proposal().expires_by(END) == END
    endless = proposal(ask=replace(OPERATION, policy=Policy(ttl_ms=0, remind_ms=20_000)))
    assert endless.expires_by(None) == WallTime(LATEST_MS)
    assert endless.remind_at == END + -20_000 and replace(endless, expires_at=NOW + 5).remind_at == NOW
    for silent in (proposal(), replace(endless, reminded_at=NOW), replace(endless, status=WITHDRAWN)):
        assert silent.remind_at is None


def test_the_text_of_an_action_covers_all_that_runs_and_nothing_else() -> None:
    assert OPERATION.text == 'run: "shop/pay"\nwith:\n  a: 1\n  b: 2'
    same = replace(OPERATION, title="other", justification="why", policy=Policy(ttl_ms=1), arguments={"a": 1, "b": 2})
    assert same.action_hash == OPERATION.action_hash
    assert replace(OPERATION, dispatched=False).text.startswith('"the asker runs": "shop/pay"')
    for other in ({"arguments": {"a": 1}}, {"operation": "x"}, {"surroundings": {"directory": "/"}}):
        assert replace(OPERATION, **other).action_hash != OPERATION.action_hash
    file = ProposalRequest(Kind.FILE, "t", file=ProposedFile("/f", "text"))
    assert file.text.startswith('"the asker writes": "/f"\nwith:\n  bytes: 4\n  sha256: "982d')
    assert (
        ProposalRequest(Kind.QUESTION, "go?", choices=("a", "b")).text == 'question: "go?"\nchoices:\n  - "a"\n  - "b"'
    )
    assert OPERATION.confirmation == "shop/pay"
    assert ProposalRequest(Kind.QUESTION, "Drop  the\ntable").confirmation == "Drop the table"
    assert canonical({"b": 1, "a": [True]}) == '{"a":[true],"b":1}' and digest(1) != digest("1")


def test_the_result_has_what_may_be_acted_upon_and_only_then() -> None:
    assert "arguments" not in proposal().as_result() and proposal(EXPIRED).as_result()["notes"].startswith("it expired")
    assert "arguments" not in proposal(REJECTED).as_result() and proposal(REJECTED).as_result()["decided_by"] == "ann"
    assert proposal(APPROVED).as_result()["arguments"] == {"a": 1, "b": 2}
    assert proposal(MODIFIED).as_result()["arguments"] == {"a": 9}
    file = ProposalRequest(Kind.FILE, "t", file=ProposedFile("/f", "old"))
    modified = proposal(MODIFIED, file, decision=Decision(MODIFIED, file_text="new"))
    assert modified.as_result()["file"] == {"path": "/f", "text": "new"}
    assert proposal(APPROVED, file).as_result()["file"]["text"] == "old"
    answered = proposal(APPROVED, ProposalRequest(Kind.QUESTION, "go?"), decision=Decision(APPROVED, answer="yes"))
    assert answered.as_result()["answer"] == "yes" and "answer" not in proposal(APPROVED).as_result()
    assert proposal(REJECTED).summary.notes == "fine" and proposal().summary.notes is None
    assert proposal(APPROVED, file).summary.path == "/f" and proposal().summary.path is None


decisions = st.sampled_from([APPROVED, MODIFIED, REJECTED]).map(lambda status: Decision(status, "because"))
steps = st.one_of(
    st.tuples(st.just(apply_decision), decisions, st.sampled_from(["ann", "bob"])).map(
        lambda s: lambda p, now: s[0](p, s[1], s[2], now)
    ),
    st.just(lambda p, now: apply_expiry(p)),
    st.sampled_from(["bot", "somebody"]).map(lambda by: lambda p, now: apply_withdrawal(p, by)),
    st.integers(1, 10**9).map(lambda ms: lambda p, now: apply_extension(p, ms, "ann")),
    st.sampled_from([OPERATION.action_hash, "other"]).map(lambda h: lambda p, now: apply_use(p, h, now)),
)


@given(st.lists(steps, max_size=12))
def test_whatever_is_tried_in_whatever_order_a_proposal_ends_once_and_is_used_once_at_most(tried: list[Any]):
    current = proposal()
    ends = uses = 0
    for number, step in enumerate(tried):
        now = NOW + number
        try:
            following = step(current, now)
        except Failure:
            continue
        if following.status is not current.status:
            assert current.is_open, "what has ended stays as it ended"
            ends += 1
        if following.used_at != current.used_at:
            assert following.status.allows and current.used_at is None
            uses += 1
        if not current.is_open:
            assert (following.decision, following.decided_by, following.decided_at, following.expires_at) == (
                current.decision, current.decided_by, current.decided_at, current.expires_at,
            )  # fmt: skip
        assert (following.decision is not None) == following.status.is_decided
        assert (following.ask, following.action_hash, following.asked_by) == (OPERATION, current.action_hash, "bot")
        current = following
    assert ends <= 1 and uses <= 1
    assert json.loads(json.dumps(current.as_result()))["status"] == current.status.value
