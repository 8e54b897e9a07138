"""How long is waited and how many may be open: as usual, as the environment says, or a clear refusal at the start."""

import itertools
from pathlib import Path
from typing import Any

import pytest

from shotclock.core.errors import Failure
from shotclock.core.proposal import InboxLimits
from shotclock.people.inbox import Inbox
from shotclock.people.person_wait import read_inbox_limits, read_response_budget_ms
from shotclock.store.store import Store
from tests.rows import row

OURS, SECONDS = "SHOTCLOCK_RESPONSE_TIMEOUT", "SUPERVISE_RESPONSE_TIMEOUT_SECONDS"
EACH, ALL = "SHOTCLOCK_INBOX_LIMIT_EACH", "SHOTCLOCK_INBOX_LIMIT"


def test_the_budget_is_what_the_environment_says():
    table: list[Any] = [
        ({}, 30_000),
        ({OURS: "", SECONDS: " "}, 30_000),
        ({OURS: "5s"}, 5_000),
        ({OURS: "PT1M"}, 60_000),
        ({OURS: "250ms", SECONDS: "30"}, 250),
        ({OURS: "0"}, 0),
        ({SECONDS: "30"}, 30_000),
        ({SECONDS: "0.5"}, 500),
        ({SECONDS: " 2. "}, 2_000),
        ({SECONDS: ".25"}, 250),
        ({SECONDS: "0.0001"}, 1),
        ({SECONDS: "0"}, 0),
    ]
    for environ, ms in table:
        with row(environ, ms):
            assert read_response_budget_ms(environ) == ms


def test_what_is_no_duration_is_refused_by_the_name_of_its_variable():
    table: list[Any] = ["-1", "nan", "NaN", "inf", "-inf", "soon", "30", "1e3", "5 s", "99999999d", "٣s"]
    for said in table:
        with row(said):
            with pytest.raises(Failure, match=OURS) as refused:
                read_response_budget_ms({OURS: said})
            assert refused.value.code == "ARG_ERROR"
            assert refused.value.context["errors"][0]["field"] == OURS


def test_what_is_no_number_of_seconds_is_refused_by_the_name_of_its_variable():
    table: list[Any] = [
        "-1",
        "-0.5",
        "nan",
        "inf",
        "Infinity",
        "text",
        "30s",
        "1_0",
        "1e3",
        "0x10",
        "9" * 12,
        "٣",
        "1 2",
    ]
    for said in table:
        with row(said):
            with pytest.raises(Failure, match=SECONDS) as refused:
                read_response_budget_ms({SECONDS: said})
            assert refused.value.code == "ARG_ERROR"
            assert refused.value.context["errors"][0]["field"] == SECONDS


def test_nonsense_in_either_variable_is_refused_whichever_counts():
    with pytest.raises(Failure) as refused:
        read_response_budget_ms({OURS: "250ms", SECONDS: "soon"})
    assert SECONDS in str(refused.value)


def test_without_an_environment_it_is_our_own(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(OURS, "7s")
    assert read_response_budget_ms() == 7_000


# --- room -----------------------------------------------------------------------------------------


def test_the_room_is_what_the_environment_says():
    table: list[Any] = [
        ({}, InboxLimits(100, 1_000)),
        ({EACH: " ", ALL: ""}, InboxLimits(100, 1_000)),
        ({EACH: "5"}, InboxLimits(5, 1_000)),
        ({EACH: "20000", ALL: " 30000 "}, InboxLimits(20_000, 30_000)),
    ]
    for environ, room in table:
        with row(environ, room):
            assert read_inbox_limits(environ) == room


def test_what_is_no_number_of_proposals_is_refused_with_the_budget():
    table = itertools.product([EACH, ALL], ["0", "-1", "1.5", "1e3", "many", "1_000", "٣", "9" * 10, "5 6"])
    for name, said in table:
        with row(name, said):
            with pytest.raises(Failure, match=name) as refused:
                read_response_budget_ms({name: said})
            assert refused.value.code == "ARG_ERROR"
            assert refused.value.context["errors"][0]["field"] == name


def test_an_inbox_does_not_open_where_its_room_is_nonsense(home: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(ALL, "some")
    with Store.open(home) as store, pytest.raises(Failure, match=ALL):
        Inbox(store)
