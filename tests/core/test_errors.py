"""The registry: every code keeps the contracts it is printed into, and nothing gets past it."""

import json
import pickle
import re
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jsonschema import Draft7Validator

from shotclock.core import errors
from shotclock.core.envelope import Problem, build_envelope, warning
from shotclock.core.errors import (
    Ending,
    ErrorEntry,
    Failure,
    SideEffects,
    error_entries,
    error_entry,
    may_retry,
    register_error,
    side_effects_of,
    warning_entries,
    warning_summary,
)

SPEC = Path(__file__).parent.parent / "spec"
SIGNALS = {130, 143}


def spec(name: str) -> Any:
    return json.loads((SPEC / name).read_text("utf-8"))


ENTRIES = tuple(entry for entry in error_entries() if not entry.code.startswith("TEST_"))  # what tests register
PATTERN = spec("response-envelope.json")["definitions"]["ErrorDetail"]["properties"]["code"]["pattern"]
EXIT_CODES = set(spec("exit-code.json")["enum"])
# The codes whose description in the contract ends with "No side effects occurred", and ARG_ERROR, which means it.
NOTHING_HAPPENED = {
    code
    for code, text in zip(spec("exit-code.json")["enum"], spec("exit-code.json")["x-enum-descriptions"], strict=True)
    if "o side effect" in text or "before any side effect" in text
}


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> dict[str, ErrorEntry]:
    """A copy that a test may add to."""
    copy = {entry.code: entry for entry in ENTRIES}
    monkeypatch.setattr(errors, "_ERRORS", copy)
    return copy


by_code = pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.code)

# --- what is registered ---------------------------------------------------------------------------


def test_the_contract_was_read_as_it_is_meant():
    assert {2, 4, 5, 6, 11, 12} == NOTHING_HAPPENED


def test_a_code_is_written_as_the_envelope_demands():
    for entry in ENTRIES:
        assert re.fullmatch(PATTERN, entry.code)
        assert error_entry(entry.code) == entry
        assert error_entry(entry.code) is entry


def test_an_exit_code_is_one_of_the_contract_or_a_signals():
    for entry in ENTRIES:
        assert entry.exit_code in EXIT_CODES | SIGNALS
        assert entry.exit_code != 0


def test_an_http_status_is_one():
    for entry in ENTRIES:
        # INCOMPLETE is no failure to HTTP: accepted, not finished.
        assert 400 <= entry.http_status <= 599 or (entry.code, entry.http_status) == ("INCOMPLETE", 202)


def test_a_summary_and_a_hint_are_there_and_fit_where_they_are_printed():
    for entry in ENTRIES:
        assert 0 < len(entry.summary) <= 120
        assert 0 < len(entry.hint) <= 120
        for text in (entry.summary, entry.hint):
            assert text.isprintable() and text == text.strip()


def test_an_exit_code_that_promises_that_nothing_happened_is_only_given_when_nothing_did():
    for entry in ENTRIES:
        if entry.exit_code in NOTHING_HAPPENED:
            assert entry.side_effects is SideEffects.NONE


def test_only_clocks_may_be_retryable_without_knowing_the_effects_because_the_operation_decides():
    for entry in ENTRIES:
        if entry.retryable and entry.side_effects is not SideEffects.NONE:
            assert entry.exit_code == 10 or entry.code == "HOST_REPLACED"  # a neighbour's clock, not its own


def test_what_an_operation_declares_for_a_code_keeps_the_contract_of_exit_code_entries():
    """There, retryable implies that nothing was written. (An idempotent operation that mutates is the one
    exception that DESIGN §1 makes: a repeat does no harm, whatever was written.)"""
    for entry in ENTRIES:
        contract = Draft7Validator(spec("exit-code-entry.json"))
        for ending, (mutates, idempotent) in product(Ending, [(False, False), (False, True), (True, False)]):
            effects = side_effects_of(ending=ending, ok=False, mutates=mutates)
            retryable = may_retry(registered=entry.retryable, effects=effects, mutates=mutates, idempotent=idempotent)
            declared = {
                "name": entry.code,
                "description": entry.summary,
                "retryable": retryable,
                # The contract knows no "unknown"; "partial" is what it says of state that must be inspected.
                "side_effects": "partial" if effects is SideEffects.UNKNOWN else effects.value,
                "error_codes": [entry.code],
            }
            contract.validate(declared)


def test_every_clock_that_runs_out_exits_10_except_the_callers_own_budget():
    clocks = {"TIMEOUT", "STALLED", "QUEUE_TIMEOUT", "NO_TIME_LEFT", "OPERATION_TIMEOUT", "TEMPLATE_TIMEOUT"}
    clocks |= {"WAIT_TIMEOUT", "EVAL_TIMEOUT", "RESULT_ENVELOPE_TIMEOUT"}  # of UI executions
    clocks |= {"INPUT_WANTED", "NOT_READY"}  # of exec
    clocks |= {"NO_ANSWER"}  # of questions to the client
    assert {entry.code for entry in ENTRIES if entry.exit_code == 10} == clocks
    assert error_entry("INCOMPLETE").exit_code == 14
    assert error_entry("OPERATION_TIMEOUT").http_status == 408


def test_a_warning_is_written_as_the_envelope_demands_and_says_something():
    for code in warning_entries():
        assert re.fullmatch(PATTERN, code)
        assert warning_summary(code)
        assert warning(code) == {"code": code, "message": warning_summary(code)}


# --- what is not ----------------------------------------------------------------------------------


def is_unregistered(code: str) -> bool:
    return code not in {entry.code for entry in error_entries()}


unregistered = st.text().filter(is_unregistered)


@given(unregistered)
def test_an_unregistered_code_cannot_be_looked_up_raised_or_put_into_an_envelope(code: str):
    with pytest.raises(LookupError, match="unknown error code"):
        error_entry(code)
    with pytest.raises(LookupError, match="unknown error code"):
        Failure(code, "x")
    with pytest.raises(LookupError, match="unknown error code"):
        build_envelope(
            data=None, problem=Problem(code, "x"), ending=Ending.FINISHED, mutates=True, idempotent=False, meta={}
        )


def test_an_unregistered_warning_without_words_of_its_own_is_refused():
    with pytest.raises(LookupError, match="not registered"):
        warning("NOBODY_KNOWS_ME")


def test_what_is_handed_out_is_no_way_into_the_registry():
    warnings = warning_entries()
    assert isinstance(warnings, dict)
    warnings["ACME_NEW"] = "x"
    assert "ACME_NEW" not in warning_entries()
    assert isinstance(error_entries(), tuple)


# --- adding one's own -----------------------------------------------------------------------------


def test_an_app_may_add_a_namespaced_code_and_use_it_everywhere(registry: dict[str, ErrorEntry]):
    entry = register_error("ACME_NO_STOCK", summary="Sold out.", hint="wait", exit_code=79, http_status=409)
    assert error_entry("ACME_NO_STOCK") == entry
    assert str(Failure("ACME_NO_STOCK")) == "Sold out."
    assert entry in tuple(error_entries())


def test_registering_the_same_thing_twice_is_harmless_and_another_meaning_is_refused(registry: dict[str, ErrorEntry]):
    first = register_error("ACME_NO_STOCK", summary="Sold out.")
    assert register_error("ACME_NO_STOCK", summary="Sold out.") == first
    with pytest.raises(ValueError, match="already registered"):
        register_error("ACME_NO_STOCK", summary="Something else.")
    assert error_entry("ACME_NO_STOCK") == first


def test_a_code_of_ours_cannot_be_redefined(registry: dict[str, ErrorEntry]):
    for entry in ENTRIES:
        with pytest.raises(ValueError, match="already registered"):
            register_error(entry.code, summary="Mine now.")
        assert registry[entry.code] == entry


def test_a_badly_written_code_or_one_without_namespace_is_refused(registry: dict[str, ErrorEntry]):
    for code in ["", "A", "acme_x", "Acme_X", "ACME-X", "ACME X", "_ACME", "1_ACME", "ACME_Ä", "ACME_X\n", "NOSTOCK"]:
        before = dict(registry)
        with pytest.raises(ValueError):
            register_error(code, summary="x")
        assert registry == before


def test_an_exit_code_that_means_something_else_is_refused(registry: dict[str, ErrorEntry]):
    for exit_code in [-1, 0, 15, 63, 64, 78, 126, 130, 143, 255, 256]:
        with pytest.raises(ValueError, match="exit code"):
            register_error("ACME_X", summary="x", exit_code=exit_code)
        assert "ACME_X" not in registry


def test_exit_codes_for_apps_are_accepted(registry: dict[str, ErrorEntry]):
    for exit_code in [1, 2, 10, 14, 79, 125]:
        entry = register_error(f"ACME_X{exit_code}", summary="x", exit_code=exit_code, side_effects=SideEffects.NONE)
        assert entry.exit_code == exit_code


def test_retryable_with_side_effects_is_refused(registry: dict[str, ErrorEntry]):
    for effects in [effects for effects in SideEffects if effects is not SideEffects.NONE]:
        with pytest.raises(ValueError, match="retryable"):
            register_error("ACME_X", summary="x", retryable=True, side_effects=effects)


def test_retryable_is_accepted_when_written_the_way_its_refusal_tells_to(registry: dict[str, ErrorEntry]):
    with pytest.raises(ValueError, match="say side_effects='none'"):
        register_error("ACME_X", summary="x", retryable=True)
    entry = register_error("ACME_X", summary="x", retryable=True, side_effects="none")  # type: ignore[arg-type]
    assert entry.side_effects is SideEffects.NONE


def test_a_code_without_a_summary_is_refused(registry: dict[str, ErrorEntry]):
    with pytest.raises(ValueError, match="summary"):
        register_error("ACME_X", summary="")


# --- failures travel ------------------------------------------------------------------------------


def test_a_failure_without_words_says_what_the_registry_says():
    assert str(Failure("TIMEOUT")) == error_entry("TIMEOUT").summary


def test_a_failure_of_one_argument_is_a_code_where_it_is_a_word_in_capitals_and_a_message_otherwise():
    assert (Failure("NOT_FOUND").code, str(Failure("NOT_FOUND"))) == ("NOT_FOUND", error_entry("NOT_FOUND").summary)
    for text in ("unknown city: Ulm", "Ulm", "NO CITY", "unknown_city"):
        assert (Failure(text).code, str(Failure(text))) == ("GENERAL_ERROR", text)
    with pytest.raises(LookupError, match=r"unknown error code 'NO_CITY'; .*register_error.* Failure"):
        Failure("NO_CITY")


def test_a_failure_comes_back_from_another_process_whole():
    failure = Failure(
        "PERMISSION_DENIED",
        "not today",
        data={"a": [1]},
        context={"who": "me"},
        suggestion="tomorrow",
        side_effects=SideEffects.PARTIAL,
        retry_after_ms=5,
    )
    back = pickle.loads(pickle.dumps(failure))
    assert type(back) is Failure
    assert (str(back), vars(back)) == (str(failure), vars(failure))


def test_a_failure_arrives_by_name_even_where_its_code_is_not_registered(registry: dict[str, ErrorEntry]):
    register_error("ACME_ONLY_THERE", summary="x")
    sent = pickle.dumps(Failure("ACME_ONLY_THERE", "gone"))
    del registry["ACME_ONLY_THERE"]
    back = pickle.loads(sent)
    assert (back.code, str(back)) == ("ACME_ONLY_THERE", "gone")
