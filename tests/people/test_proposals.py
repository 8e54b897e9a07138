"""Proposals: which changes may be, what counts as the same action, and the one shape of the answer."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shotclock.core.errors import Failure
from shotclock.core.json_values import of_json, to_json
from shotclock.core.limits import WallTime
from shotclock.core.proposal import (
    STILL_QUEUED,
    Confirmation,
    Decision,
    Kind,
    Policy,
    Proposal,
    ProposalRequest,
    ProposalStatus,
    ProposedFile,
    apply_decision,
    apply_expiry,
    apply_extension,
    apply_use,
    apply_withdrawal,
    result_of,
)
from shotclock.core.value_types import replace
from shotclock.people.proposal_checks import (
    ARGUMENTS_LIMIT,
    DEPTH_LIMIT,
    FILE_LIMIT,
    problems_with,
    problems_with_decision,
    problems_with_key,
)
from tests.rows import row

NOW = WallTime(1_800_000_000_000)
APPROVED, MODIFIED, REJECTED = ProposalStatus.APPROVED, ProposalStatus.MODIFIED, ProposalStatus.REJECTED

OPERATION = ProposalRequest(Kind.OPERATION, "Restart it", operation="ops/restart", arguments={"host": "a", "times": 2})
FILE = ProposalRequest(Kind.FILE, "New routes", file=ProposedFile("routes.yaml", "a: 1\n", "a: 0\n"))
QUESTION = ProposalRequest(Kind.QUESTION, "Which one?", choices=("left", "right"))


def proposal(ask: ProposalRequest = OPERATION, **fields: Any) -> Proposal:
    given = Proposal(
        "p-aaaaaaaaaa", ask, "agent", None, ask.action_hash, ProposalStatus.PENDING, NOW, NOW + ask.policy.ttl_ms
    )
    return replace(given, **fields)


def code_of(attempt: Any, *arguments: Any, **named: Any) -> str:
    with pytest.raises(Failure) as refused:
        attempt(*arguments, **named)
    return refused.value.code


# --- transitions ----------------------------------------------------------------------------------

statuses = st.sampled_from(list(ProposalStatus))
decisions = st.sampled_from([APPROVED, MODIFIED, REJECTED]).map(lambda status: Decision(status, "because"))
steps = st.one_of(
    st.tuples(st.just(apply_decision), decisions, st.sampled_from(["ann", "bob"])).map(
        lambda s: lambda p, now: s[0](p, s[1], s[2], now)
    ),
    st.just(lambda p, now: apply_expiry(p)),
    st.sampled_from(["agent", "somebody"]).map(lambda by: lambda p, now: apply_withdrawal(p, by)),
    st.integers(1, 10**9).map(lambda ms: lambda p, now: apply_extension(p, ms, "ann")),
    st.sampled_from([OPERATION.action_hash, FILE.action_hash]).map(lambda h: lambda p, now: apply_use(p, h, now)),
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
        assert (following.ask, following.action_hash, following.asked_by) == (OPERATION, current.action_hash, "agent")
        current = following
    assert ends <= 1 and uses <= 1
    assert json.loads(json.dumps(result_of(current)))["status"] == current.status.value


@given(statuses, decisions)
def test_only_what_is_pending_can_be_decided_and_the_refusal_names_what_became_of_it(
    status: ProposalStatus, decision: Decision
):
    earlier = {"decision": Decision(status), "decided_by": "bob", "decided_at": NOW} if status.is_decided else {}
    there = proposal(status=status, **earlier)
    if status.is_open:
        assert apply_decision(there, decision, "ann", NOW).decided_by == "ann"
        return
    with pytest.raises(Failure) as refused:
        apply_decision(there, decision, "ann", NOW)
    expected = {"expired": "PROPOSAL_EXPIRED", "withdrawn": "PROPOSAL_WITHDRAWN"}.get(status.value, "ALREADY_DECIDED")
    assert refused.value.code == expected
    assert refused.value.context["status"] == status.value
    if status.is_decided:
        assert refused.value.context["decided_by"] == "bob"
        assert refused.value.context["decided_at"] == NOW.iso()


def test_only_the_deciders_that_are_named_may_decide_or_extend():
    there = proposal(replace(OPERATION, policy=Policy(deciders=("ann",))))
    assert code_of(apply_decision, there, Decision(APPROVED), "bob", NOW) == "NOT_ALLOWED"
    assert code_of(apply_extension, there, 1000, "bob") == "NOT_ALLOWED"
    assert apply_decision(there, Decision(APPROVED), "ann", NOW).status is APPROVED


def test_something_destructive_is_approved_only_with_its_name_typed_and_rejected_without():
    there = proposal(replace(OPERATION, policy=Policy(destructive=True)))
    for typed in (None, "", "yes", "ops/restar", "OPS/RESTART"):
        for status in (APPROVED, MODIFIED):
            assert (
                code_of(apply_decision, there, Decision(status), "ann", NOW, confirmation=Confirmation(typed=typed))
                == "CONFIRMATION_NEEDED"
            )
    assert (
        apply_decision(there, Decision(APPROVED), "ann", NOW, confirmation=Confirmation(typed=" ops/restart\n")).status
        is APPROVED
    )
    assert apply_decision(there, Decision(REJECTED), "ann", NOW).status is REJECTED


def test_a_title_is_confirmed_as_it_is_read_whatever_blanks_are_in_it():
    ask = ProposalRequest(Kind.FILE, "Drop  the\ntable", file=ProposedFile("x", ""), policy=Policy(destructive=True))
    assert (
        apply_decision(
            proposal(ask), Decision(APPROVED), "ann", NOW, confirmation=Confirmation(typed="Drop the table")
        ).status
        is APPROVED
    )


def test_what_was_decided_on_must_be_what_is_proposed():
    assert (
        code_of(apply_decision, proposal(), Decision(APPROVED), "a", NOW, confirmation=Confirmation("0" * 64))
        == "ACTION_CHANGED"
    )
    assert (
        apply_decision(
            proposal(), Decision(APPROVED), "a", NOW, confirmation=Confirmation(OPERATION.action_hash)
        ).status
        is APPROVED
    )


def test_an_approval_is_used_once_for_the_action_it_is_about():
    approved = apply_decision(proposal(), Decision(APPROVED), "ann", NOW)
    assert code_of(apply_use, approved, FILE.action_hash, NOW) == "ACTION_CHANGED"
    spent = apply_use(approved, OPERATION.action_hash, NOW)
    assert code_of(apply_use, spent, OPERATION.action_hash, NOW) == "ALREADY_DECIDED"
    for other in (proposal(), apply_decision(proposal(), Decision(REJECTED), "ann", NOW), apply_expiry(proposal())):
        assert code_of(apply_use, other, OPERATION.action_hash, NOW) == "NOT_ALLOWED"


def test_a_decision_answers_the_identical_call_until_the_end_or_until_it_is_used():
    approved = apply_decision(proposal(), Decision(APPROVED), "ann", NOW)
    rejected = apply_decision(proposal(), Decision(REJECTED), "ann", NOW)
    end = approved.expires_at
    for there in (proposal(), approved, rejected):
        assert there.answers(end - 1) and not there.answers(end)
    assert not apply_use(approved, OPERATION.action_hash, NOW).answers(NOW)
    assert not apply_expiry(proposal()).answers(NOW) and not apply_withdrawal(proposal(), "agent").answers(NOW)


def test_a_title_is_needed_and_is_text():
    table: list[Any] = [("", "required"), (" \n", "required"), (None, "required"), (5, "must be text")]
    for title, wrong in table:
        with row(title, wrong):
            assert problems_with(replace(QUESTION, title=title)) == [{"field": "title", "message": wrong}]


def test_an_extension_is_a_time():
    table: list[Any] = [0, -1, 10**15, True, 1.5, None]
    for by_ms in table:
        with row(by_ms):
            assert code_of(apply_extension, proposal(), by_ms, "ann") == "ARG_ERROR"


def test_an_extension_brings_a_new_reminder():
    there = proposal(replace(OPERATION, policy=Policy(ttl_ms=1000, remind_ms=400)))
    assert there.remind_at == NOW + 600
    told = replace(there, reminded_at=NOW + 600)
    assert told.remind_at is None
    assert apply_extension(told, 500, "ann").remind_at == NOW + 1100
    assert apply_expiry(there).remind_at is None


# --- the same action ------------------------------------------------------------------------------

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text("ab"),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("abc"), inner, max_size=3),
    max_leaves=8,
)
arguments = st.dictionaries(st.text("abc", min_size=1), json_values, max_size=4)


@pytest.mark.slow
@given(arguments)
def test_the_order_of_arguments_the_reasons_and_the_policy_do_not_change_the_action(given_: dict[str, Any]):
    ask = ProposalRequest(Kind.OPERATION, "t", operation="a/b", arguments=given_)
    turned = ProposalRequest(
        Kind.OPERATION, "other title", "because", operation="a/b",
        arguments=dict(reversed(given_.items())), policy=Policy(ttl_ms=5), input_schema={},
    )  # fmt: skip
    assert ask.action_hash == turned.action_hash


@pytest.mark.slow
@given(arguments, arguments)
def test_other_arguments_are_another_action(one: dict[str, Any], two: dict[str, Any]):
    hashes = [ProposalRequest(Kind.OPERATION, "t", operation="a/b", arguments=each).action_hash for each in (one, two)]
    assert (hashes[0] == hashes[1]) == (json.dumps(one, sort_keys=True) == json.dumps(two, sort_keys=True))


def test_what_would_be_done_makes_the_action():
    table: list[Any] = [
        replace(OPERATION, operation="ops/stop"),
        replace(FILE, file=replace(FILE.file, path="x")),
        replace(FILE, file=replace(FILE.file, proposed="a: 2\n")),
        replace(QUESTION, title="Which?"),
        replace(QUESTION, choices=("left",)),
    ]
    for other in table:
        with row(other):
            original = {Kind.OPERATION: OPERATION, Kind.FILE: FILE, Kind.QUESTION: QUESTION}[other.kind]
            assert other.action_hash != original.action_hash


def test_what_a_change_is_shown_against_is_no_part_of_it():
    assert replace(FILE, file=replace(FILE.file, current=None)).action_hash == FILE.action_hash


def test_an_ask_comes_back_from_json_whole():
    table: list[Any] = [OPERATION, FILE, QUESTION]
    for ask in table:
        with row(ask):
            ask = replace(ask, policy=Policy(5000, 100, "reject", ("ann", "bob"), True))
            back = of_json(ProposalRequest, json.loads(json.dumps(to_json(ask))))
            assert back == ask and back.action_hash == ask.action_hash


# --- the answer -----------------------------------------------------------------------------------


def test_every_answer_has_the_same_fields_and_only_an_allowing_one_has_something_to_act_on():
    ends = {
        "pending": proposal(),
        "approved": apply_decision(proposal(), Decision(APPROVED, "go"), "ann", NOW),
        "modified": apply_decision(proposal(), Decision(MODIFIED, "less", arguments={"host": "b"}), "ann", NOW),
        "rejected": apply_decision(proposal(), Decision(REJECTED, "no"), "ann", NOW),
        "expired": apply_expiry(proposal()),
        "withdrawn": apply_withdrawal(proposal(), "agent"),
    }
    for status, there in ends.items():
        result = result_of(there)
        assert result["status"] == status
        assert {"status", "proposal_id", "notes", "title", "expires_at"} <= set(result)
        assert ("arguments" in result) == (status in ("approved", "modified"))
        assert ("decided_by" in result) == (status in ("approved", "modified", "rejected"))
    assert result_of(ends["pending"])["notes"] == STILL_QUEUED
    assert result_of(ends["approved"])["arguments"] == {"host": "a", "times": 2}
    assert result_of(ends["modified"])["arguments"] == {"host": "b"}


def test_files_and_questions_answer_with_what_is_to_be_used():
    approved = apply_decision(proposal(FILE), Decision(APPROVED), "ann", NOW)
    modified = apply_decision(proposal(FILE), Decision(MODIFIED, file_text="a: 3\n"), "ann", NOW)
    assert result_of(approved)["file"] == {"path": "routes.yaml", "text": "a: 1\n"}
    assert result_of(modified)["file"] == {"path": "routes.yaml", "text": "a: 3\n"}
    answered = apply_decision(proposal(QUESTION), Decision(APPROVED, answer="left"), "ann", NOW)
    assert result_of(answered)["answer"] == "left"
    assert "answer" not in result_of(apply_decision(proposal(QUESTION), Decision(REJECTED), "ann", NOW))


# --- mistakes -------------------------------------------------------------------------------------

DEEP: Any = 1
for _ in range(DEPTH_LIMIT + 1):
    DEEP = [DEEP]
CIRCLE: dict[str, Any] = {}
CIRCLE["again"] = CIRCLE


def test_a_plain_ask_has_no_mistakes():
    table: list[Any] = [OPERATION, FILE, QUESTION, ProposalRequest(Kind.QUESTION, "Why?")]
    for ask in table:
        with row(ask):
            assert problems_with(ask) == []


def test_a_mistake_is_found_and_its_place_named():
    table: list[Any] = [
        (replace(OPERATION, title=" "), "title"),
        (replace(OPERATION, title="x" * 201), "title"),
        (replace(OPERATION, title="\udcff"), "title"),
        (replace(OPERATION, title=None), "title"),
        (replace(OPERATION, kind="operation"), "kind"),
        (replace(OPERATION, justification="x" * 20_001), "justification"),
        (replace(OPERATION, operation=None), "operation"),
        (replace(OPERATION, arguments=[1]), "arguments"),
        (replace(OPERATION, arguments={1: 2}), "arguments"),
        (replace(OPERATION, arguments={"x": float("nan")}), "arguments"),
        (replace(OPERATION, arguments={"x": b""}), "arguments"),
        (replace(OPERATION, arguments={"x": {1: 2, "a": 3}}), "arguments"),
        (replace(OPERATION, arguments={"x": "\udcff"}), "arguments"),
        (replace(OPERATION, arguments={"x": "y" * ARGUMENTS_LIMIT}), "arguments"),
        (replace(OPERATION, arguments={"x": DEEP}), "arguments"),
        (replace(OPERATION, arguments=CIRCLE), "arguments"),
        (replace(OPERATION, file=FILE.file), "file"),
        (replace(FILE, file=None), "file"),
        (replace(FILE, operation="x"), "operation"),
        (replace(FILE, file=ProposedFile("", "x")), "file.path"),
        (replace(FILE, file=ProposedFile("x", "é" * (FILE_LIMIT // 2 + 1))), "file.proposed"),
        (replace(FILE, file=ProposedFile("x", b"x")), "file.proposed"),
        (replace(FILE, file=ProposedFile("x", "x", "y" * (FILE_LIMIT + 1))), "file.current"),
        (replace(FILE, choices=("a",)), "choices"),
        (replace(QUESTION, choices=("a", "a")), "choices"),
        (replace(QUESTION, choices=["a"]), "choices"),
        (replace(QUESTION, choices=([], [])), "choices"),
        (replace(QUESTION, default="middle"), "default"),
        (replace(QUESTION, policy=Policy(ttl_ms=-1)), "policy.ttl_ms"),
        (replace(QUESTION, policy=Policy(ttl_ms=1.5)), "policy.ttl_ms"),
        (replace(QUESTION, policy=Policy(ttl_ms=10**15)), "policy.ttl_ms"),
        (replace(QUESTION, policy=Policy(ttl_ms=10, remind_ms=10)), "policy.remind_ms"),
        (replace(QUESTION, policy=Policy(when_expired="approve")), "policy.when_expired"),
        (replace(QUESTION, policy=Policy(deciders=("",))), "policy.deciders"),
        (replace(QUESTION, policy=Policy(destructive=1)), "policy.destructive"),
    ]
    for ask, field in table:
        with row(ask, field):
            assert field in [each["field"] for each in problems_with(ask)]


def test_sizes_at_the_limit_are_taken():
    assert problems_with(replace(FILE, title="x" * 200, file=ProposedFile("x", "y" * FILE_LIMIT))) == []


def test_a_key_is_a_short_text():
    table: list[Any] = ["", "x" * 201, "\udcff", 5]
    for key in table:
        with row(key):
            assert problems_with_key(key)
            assert not problems_with_key("k") and not problems_with_key(None)


SCHEMA = {
    "type": "object",
    "properties": {"host": {"type": "string", "enum": ["a", "b"]}, "times": {"type": ["integer", "null"]}, "odd": True},
    "required": ["host"],
    "additionalProperties": False,
}


def test_a_decision_that_does_not_fit_is_refused_by_its_place():
    table: list[Any] = [
        (OPERATION, Decision(ProposalStatus.EXPIRED), "status"),
        (OPERATION, Decision(ProposalStatus.PENDING), "status"),
        (OPERATION, Decision("approved"), "status"),
        (OPERATION, Decision(APPROVED, "x" * 20_001), "notes"),
        (OPERATION, Decision(MODIFIED), "arguments"),
        (OPERATION, Decision(APPROVED, arguments={}), "arguments"),
        (OPERATION, Decision(MODIFIED, arguments={"x": float("inf")}), "arguments"),
        (OPERATION, Decision(MODIFIED, arguments={}, file_text=""), "file_text"),
        (OPERATION, Decision(APPROVED, answer="x"), "answer"),
        (FILE, Decision(MODIFIED), "file_text"),
        (FILE, Decision(MODIFIED, file_text="x" * (FILE_LIMIT + 1)), "file_text"),
        (FILE, Decision(REJECTED, file_text="x"), "file_text"),
        (QUESTION, Decision(APPROVED), "answer"),
        (QUESTION, Decision(APPROVED, answer="up"), "answer"),
        (QUESTION, Decision(MODIFIED, answer="left"), "status"),
        (QUESTION, Decision(REJECTED, answer="left"), "answer"),
        (replace(OPERATION, input_schema=SCHEMA), Decision(MODIFIED, arguments={}), "arguments.host"),
        (replace(OPERATION, input_schema=SCHEMA), Decision(MODIFIED, arguments={"host": "c"}), "arguments.host"),
        (replace(OPERATION, input_schema=SCHEMA), Decision(MODIFIED, arguments={"host": 1}), "arguments.host"),
        (
            replace(OPERATION, input_schema=SCHEMA),
            Decision(MODIFIED, arguments={"host": "a", "times": True}),
            "arguments.times",
        ),
        (replace(OPERATION, input_schema=SCHEMA), Decision(MODIFIED, arguments={"host": "a", "x": 1}), "arguments.x"),
    ]
    for ask, decision, field in table:
        with row(ask, decision, field):
            assert field in [each["field"] for each in problems_with_decision(ask, decision)]


def test_a_decision_that_fits_is_taken():
    table: list[Any] = [
        (OPERATION, Decision(APPROVED)),
        (OPERATION, Decision(MODIFIED, arguments={})),
        (FILE, Decision(MODIFIED, file_text="")),
        (QUESTION, Decision(APPROVED, answer="right")),
        (ProposalRequest(Kind.QUESTION, "Free?"), Decision(APPROVED, answer="")),
        (QUESTION, Decision(REJECTED)),
        (
            replace(OPERATION, input_schema=SCHEMA),
            Decision(MODIFIED, arguments={"host": "b", "times": None, "odd": []}),
        ),
        (replace(OPERATION, input_schema=SCHEMA), Decision(MODIFIED, arguments={"host": "b", "times": 2.0})),
    ]
    for ask, decision in table:
        with row(ask, decision):
            assert problems_with_decision(ask, decision) == []


@given(json_values)
def test_no_schema_whatever_it_is_breaks_the_check(schema: Any):
    there = proposal(replace(OPERATION, input_schema=schema))
    problems_with_decision(there.ask, Decision(MODIFIED, arguments={"a": 1, "b": None}))
    there = proposal(replace(OPERATION, input_schema={"properties": schema, "required": schema}))
    problems_with_decision(there.ask, Decision(MODIFIED, arguments={"a": 1, "b": None}))
    there = proposal(replace(OPERATION, input_schema={"properties": {"a": {"type": schema, "enum": schema}}}))
    problems_with_decision(there.ask, Decision(MODIFIED, arguments={"a": 1}))
