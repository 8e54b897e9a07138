"""The response budget: 30 seconds, or what the environment says, or a clear refusal at the start."""

import pytest

from shotclock.core.errors import Failure
from shotclock.inbox import response_budget_ms

OURS, SECONDS = "SHOTCLOCK_RESPONSE_TIMEOUT", "SUPERVISE_RESPONSE_TIMEOUT_SECONDS"


@pytest.mark.parametrize(
    ("environ", "ms"),
    [
        ({}, 30_000),
        ({OURS: "", SECONDS: " "}, 30_000),
        ({OURS: "5s"}, 5_000),
        ({OURS: "PT1M"}, 60_000),
        ({OURS: "250ms", SECONDS: "nonsense that is not looked at"}, 250),
        ({OURS: "0"}, 0),
        ({SECONDS: "30"}, 30_000),
        ({SECONDS: "0.5"}, 500),
        ({SECONDS: " 2. "}, 2_000),
        ({SECONDS: ".25"}, 250),
        ({SECONDS: "0.0001"}, 1),
        ({SECONDS: "0"}, 0),
    ],
)
def test_the_budget_is_what_the_environment_says(environ: dict[str, str], ms: int):
    assert response_budget_ms(environ) == ms


@pytest.mark.parametrize("said", ["-1", "nan", "NaN", "inf", "-inf", "soon", "30", "1e3", "5 s", "99999999d", "٣s"])
def test_what_is_no_duration_is_refused_by_the_name_of_its_variable(said: str):
    with pytest.raises(Failure, match=OURS) as refused:
        response_budget_ms({OURS: said})
    assert refused.value.code == "ARG_ERROR"
    assert refused.value.context["errors"][0]["field"] == OURS


@pytest.mark.parametrize(
    "said", ["-1", "-0.5", "nan", "inf", "Infinity", "text", "30s", "1_0", "1e3", "0x10", "9" * 12, "٣", "1 2"]
)
def test_what_is_no_number_of_seconds_is_refused_by_the_name_of_its_variable(said: str):
    with pytest.raises(Failure, match=SECONDS) as refused:
        response_budget_ms({SECONDS: said})
    assert refused.value.code == "ARG_ERROR"
    assert refused.value.context["errors"][0]["field"] == SECONDS


def test_without_an_environment_it_is_our_own(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(OURS, "7s")
    assert response_budget_ms() == 7_000
