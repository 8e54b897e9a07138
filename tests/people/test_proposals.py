"""Proposals and decisions from outside: every mistake is found, and its place named."""

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from shotclock.core.limits import WallTime
from shotclock.core.proposal import (
    Decision,
    Kind,
    Policy,
    ProposalRequest,
    ProposalStatus,
    ProposedFile,
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


# --- mistakes -------------------------------------------------------------------------------------

DEEP: Any = 1
for _ in range(DEPTH_LIMIT + 1):
    DEEP = [DEEP]
CIRCLE: dict[str, Any] = {}
CIRCLE["again"] = CIRCLE


def test_a_title_is_needed_and_is_text():
    table: list[Any] = [("", "required"), (" \n", "required"), (None, "required"), (5, "must be text")]
    for title, wrong in table:
        with row(title, wrong):
            assert problems_with(replace(QUESTION, title=title)) == [{"field": "title", "message": wrong}]


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


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text("ab"),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("abc"), inner, max_size=3),
    max_leaves=8,
)


@given(json_values)
def test_no_schema_whatever_it_is_breaks_the_check(schema: Any):
    ask = replace(OPERATION, input_schema=schema)
    problems_with_decision(ask, Decision(MODIFIED, arguments={"a": 1, "b": None}))
    ask = replace(OPERATION, input_schema={"properties": schema, "required": schema})
    problems_with_decision(ask, Decision(MODIFIED, arguments={"a": 1, "b": None}))
    ask = replace(OPERATION, input_schema={"properties": {"a": {"type": schema, "enum": schema}}})
    problems_with_decision(ask, Decision(MODIFIED, arguments={"a": 1}))
