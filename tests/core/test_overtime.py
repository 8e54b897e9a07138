"""The arithmetic of overtime: never past the budget, the ceiling or the parent, and it only ever grows."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shotclock.core.limits import NS_PER_MS, Bound, Deadline, latest_bell, move_bell, reserve_ms_for
from shotclock.core.overtime import (
    ObserverKind,
    Overtime,
    OvertimeDecision,
    OvertimeError,
    OvertimePolicy,
    OvertimeRequest,
    Verdict,
    kept_for_wind_down_ms,
    read_decision,
)
from shotclock.core.value_types import replace

ms = st.integers(0, 10**9)
some_ms = st.integers(1, 10**9)
policies = st.builds(
    OvertimePolicy,
    st.sampled_from(ObserverKind),
    some_ms,
    st.integers(0, 20),
    ms,
    some_ms,
    st.booleans(),
)
decisions = st.builds(OvertimeDecision, st.integers(-(10**6), 10**10), st.just(""), st.booleans())
asked = st.lists(st.tuples(decisions, st.integers(0, 10**6), st.none() | ms), max_size=30)


@given(policies, asked)
def test_however_often_it_is_asked_no_more_is_granted_than_the_budget_and_the_requests_allow(policy, requests):
    overtime = Overtime(policy)
    for decision, took_ms, ceiling_ms in requests:
        overtime.settle(decision, at_ms=0, took_ms=took_ms, ceiling_ms=ceiling_ms)
    assert overtime.granted_ms <= overtime.used_ms <= policy.budget_ms
    assert sum(request.verdict is Verdict.GRANTED for request in overtime.requests) <= policy.max_requests


@given(policies, asked)
def test_no_grant_is_more_than_was_said_than_one_request_may_have_or_than_the_ceiling(policy, requests):
    overtime = Overtime(policy)
    for decision, took_ms, ceiling_ms in requests:
        request = overtime.settle(decision, at_ms=0, took_ms=took_ms, ceiling_ms=ceiling_ms)
        assert 0 <= request.granted_ms <= max(0, decision.extend_ms)
        assert ceiling_ms is None or request.granted_ms <= ceiling_ms
        assert not policy.max_per_request_ms or request.granted_ms <= policy.max_per_request_ms
        assert (request.verdict is Verdict.GRANTED) == (request.granted_ms > 0 and not decision.failed)


@given(policies, asked)
def test_what_is_used_only_grows_and_what_an_observer_takes_is_charged(policy, requests):
    overtime = Overtime(policy)
    for decision, took_ms, ceiling_ms in requests:
        before = overtime.used_ms
        request = overtime.settle(decision, at_ms=0, took_ms=took_ms, ceiling_ms=ceiling_ms)
        assert overtime.used_ms == min(policy.budget_ms, before + took_ms + request.granted_ms)


@given(policies, asked)
def test_an_observer_that_failed_grants_nothing(policy, requests):
    overtime = Overtime(policy)
    for decision, took_ms, ceiling_ms in requests:
        request = overtime.settle(decision, at_ms=0, took_ms=took_ms, ceiling_ms=ceiling_ms)
        if decision.failed:
            assert (request.verdict, request.granted_ms) == (Verdict.FAILED, 0)


@given(policies, asked, st.none() | ms)
def test_an_observer_has_no_longer_than_what_it_could_grant_would_last(policy, requests, ceiling_ms):
    overtime = Overtime(policy)
    for decision, took_ms, ceiling in requests:
        overtime.settle(decision, at_ms=0, took_ms=took_ms, ceiling_ms=ceiling)
    left_ms = policy.budget_ms - overtime.used_ms
    limits = [policy.observer_timeout_ms, left_ms - reserve_ms_for(left_ms)]
    limits += [] if ceiling_ms is None else [ceiling_ms]
    assert overtime.patience_ms(ceiling_ms) == max(1, min(limits))


@given(st.integers(0, 2**40), st.integers(1, 2**40), ms, some_ms, st.none() | st.integers(0, 2**41), st.none() | ms)
def test_a_bell_that_is_moved_is_never_past_what_the_parent_leaves(now_ns, lead_ns, grace_ms, by_ms, left_ns, reserve):
    bell = Deadline(now_ns + lead_ns)
    parent = None if left_ns is None else Deadline(now_ns + left_ns)
    latest = latest_bell(parent, now_ns, reserve)
    moved = move_bell(Bound(bell, grace_ms, lead_ns // NS_PER_MS, "own", bell), by_ms, latest, parent)
    if moved is None:
        assert latest is not None and latest.at_ns < bell.at_ns + NS_PER_MS
        return
    assert moved.bell is not None and moved.kill_ns is not None
    assert bell.at_ns < moved.bell.at_ns <= bell.at_ns + by_ms * NS_PER_MS
    assert latest is None or moved.bell.at_ns <= latest.at_ns
    assert parent is None or moved.kill_ns <= max(parent.at_ns, moved.bell.at_ns)


@given(policies)
def test_grants_of_half_a_second_are_real(policy):
    overtime = Overtime(OvertimePolicy(ObserverKind.PROGRESS, 60_000, 3, 500))
    request = overtime.settle(OvertimeDecision(500), at_ms=0, took_ms=0, ceiling_ms=None)
    assert (request.granted_ms, overtime.used_ms) == (500, 500)


# --- as it is written ------------------------------------------------------------------------------


def test_a_policy_is_read_as_people_write_it():
    for written, expected in [
        (True, OvertimePolicy(ObserverKind.PROGRESS, 60_000)),
        ("progress", OvertimePolicy(ObserverKind.PROGRESS, 60_000)),
        ("2m", OvertimePolicy(ObserverKind.PROGRESS, 120_000)),
        ({"budget": "2m", "max_requests": 5}, OvertimePolicy(ObserverKind.PROGRESS, 120_000, 5)),
        ("command=./judge.sh,budget=90s", OvertimePolicy(ObserverKind.COMMAND, 90_000, target="./judge.sh")),
        ({"command": "./judge.sh"}, OvertimePolicy(ObserverKind.COMMAND, 60_000, target="./judge.sh")),
        ({"observer": "none"}, OvertimePolicy(ObserverKind.NONE, 60_000)),
        ("none,hard-extends=true", OvertimePolicy(ObserverKind.NONE, 60_000, hard_extends=True)),
        ({"model": "m"}, OvertimePolicy(ObserverKind.MODEL, 60_000, model={"model": "m"})),
        ({"deciders": "ann"}, OvertimePolicy(ObserverKind.PROGRESS, 60_000, deciders=("ann",))),
        ({"deciders": ["ann", "bob"]}, OvertimePolicy(ObserverKind.PROGRESS, 60_000, deciders=("ann", "bob"))),
        ("2m,max-requests=0,max-per-request=1m", OvertimePolicy(ObserverKind.PROGRESS, 120_000, 0, 60_000)),
    ]:
        assert OvertimePolicy.of(written, 60_000) == expected


def test_the_share_the_soft_limit_and_the_time_to_wind_down_follow_from_the_policy():
    policy = OvertimePolicy(ObserverKind.PROGRESS, 100, 3)
    others = replace(policy, max_per_request_ms=7), replace(policy, max_requests=0)
    assert [each.share_ms for each in (policy, *others)] == [34, 7, 100]
    assert (policy.soft_ms(1000), policy.soft_ms(1), policy.soft_ms(0)) == (750, 1, None)
    assert replace(policy, observer=ObserverKind.NONE).soft_ms(1000) is None
    for limits, kept in (((1000, 600, 300), 200), ((1000, 600, 100), 100), ((0, 600, 100), 0), ((500, 600, 100), 0)):
        assert kept_for_wind_down_ms(*limits) == kept


def test_a_grant_that_is_not_made_says_why_and_the_record_of_each_request_is_kept():
    for policy, ceiling_ms, reason in (
        (OvertimePolicy(ObserverKind.PROGRESS, 100, 0), None, "no requests are allowed (max_requests)"),
        (OvertimePolicy(ObserverKind.PROGRESS, 100, 3), 0, "the timeout leaves no room for more"),
        (OvertimePolicy(ObserverKind.PROGRESS, 10, 3), None, "the budget of 10ms is used up"),
    ):
        request = Overtime(policy).settle(OvertimeDecision(50), at_ms=1, took_ms=10, ceiling_ms=ceiling_ms)
        assert (request.verdict, request.reason, request.granted_ms) == (Verdict.EXHAUSTED, reason, 0)
    overtime = Overtime(OvertimePolicy(ObserverKind.PROGRESS, 100, 2))
    assert overtime.settle(OvertimeDecision(60), at_ms=1, took_ms=5, ceiling_ms=None).granted_ms == 60
    assert overtime.used_ms == 65 and overtime.reduce_last(20, "less").granted_ms == 20 and overtime.used_ms == 25
    assert overtime.reduce_last(0, "none").verdict is Verdict.EXHAUSTED and overtime.requests_left == 2
    overtime.record_unanswered(9, "call", 500)
    assert overtime.used_ms == 100 and overtime.requests_left == 1
    assert overtime.settle(OvertimeDecision(failed=True), at_ms=2, took_ms=0, ceiling_ms=5).verdict is Verdict.FAILED
    assert overtime.settle(OvertimeDecision(5), at_ms=2, took_ms=0, ceiling_ms=5).reason == "all 2 requests are used up"
    gift = OvertimeRequest.by_person("ann", 1, 10, 10)
    overtime.requests.append(gift)
    assert overtime.requests_left == 0 and overtime.as_meta()["granted_ms"] == 10 and "is_gift" not in gift.as_meta()


def test_a_person_may_take_as_long_as_the_budget():
    policy = OvertimePolicy.of({"observer": "person", "budget": "10m"}, 60_000)
    assert policy is not None and policy.observer_timeout_ms == 600_000


def test_without_overtime_there_is_no_policy():
    assert OvertimePolicy.of(None, 60_000) is OvertimePolicy.of(False, 60_000) is None


def test_a_policy_that_makes_no_sense_is_refused_by_the_key_at_fault():
    for written, message in [
        ("soon", "neither an observer"),
        ({"obsever": "progress"}, "obsever: not a key"),
        ({"observer": "boss"}, "observer: one of"),
        ({"function": "judge.py:decide"}, "a function cannot decide about overtime: write command"),
        ({"observer": "function"}, "a function cannot decide about overtime: write command"),
        ("function=judge.py:decide", "a function cannot decide about overtime: write command"),
        ({"observer": "command"}, "command: write the shell command"),
        ({"budget": -1}, "budget"),
        ({"budget": "0s"}, "budget: should be more than 0"),
        ({"max_requests": 1.5}, "max_requests"),
        ({"max_requests": True}, "max_requests"),
        ({"hard_extends": "yes"}, "hard_extends"),
        ({"deciders": [1]}, "deciders"),
        ({"deciders": [" "]}, "deciders"),
        ({"model": 1}, "model"),
        ({"max_requests": 1001}, "max_requests"),
        ("progress,2m", "write KEY=VALUE"),
        ([], "write true"),
    ]:
        with pytest.raises(OvertimeError, match=message):
            OvertimePolicy.of(written, 60_000)


def test_where_there_is_no_timeout_a_budget_has_to_be_named():
    with pytest.raises(OvertimeError, match="no timeout"):
        OvertimePolicy.of(True, 0)


# --- what an observer says -------------------------------------------------------------------------


def test_an_answer_extends_or_declines():
    rows = [({"extend": "30s"}, 30_000), ({"extend_ms": 500}, 500), ({"decline": True}, 0), ({"extend": False}, 0)]
    for answered, extend_ms in rows:
        assert read_decision({**answered, "reason": "why"}) == OvertimeDecision(extend_ms, "why")


@given(
    st.recursive(
        st.none() | st.booleans() | st.floats() | st.text(),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    )
)
def test_whatever_an_observer_answers_is_a_decision_and_nonsense_grants_nothing(answered):
    decision = read_decision(answered)
    assert decision.extend_ms == 0 and (decision.failed or isinstance(answered, dict))


def test_a_duration_that_is_none_grants_nothing():
    for duration in ["inf", float("nan"), "-5s", "soon", 10**30, [], {}]:
        assert read_decision({"extend": duration}).failed
