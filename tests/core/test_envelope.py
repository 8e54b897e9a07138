"""The envelope: whatever happened, one valid answer that does not contradict itself."""

import json
import pickle
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shotclock.core.envelope import Envelope, Problem, as_data, build_envelope, make_whole, warning
from shotclock.core.errors import Ending, SideEffects, error_entries, error_entry, warning_entries
from shotclock.core.limits import ClockKind, Fired

CODES = [entry.code for entry in error_entries()]
META: dict[str, object] = {
    "duration_ms": 5,
    "timeout_ms": 30_000,
    "request_id": "0-1",
    "trace_id": "t",
    "command": "test",
    "timestamp": "2026-01-02T03:04:05.678Z",
    "tool_version": "0.1.0",
    "survivors": [],
}
Validate = Callable[[dict[str, Any]], dict[str, Any]]

# Everything json.loads can give back, with text that no UTF-8 writer accepts.
any_text = st.text(st.characters(exclude_categories=()))
leaves = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | any_text
json_values = st.recursive(
    leaves, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(any_text, inner, max_size=4), max_leaves=12
)
data_values = st.none() | st.lists(json_values, max_size=4) | st.dictionaries(any_text, json_values, max_size=4)


def built(
    problem: Problem | None = None,
    *,
    ending: Ending = Ending.FINISHED,
    data: Any = None,
    mutates: bool = True,
    idempotent: bool = False,
    **meta: object,
) -> Envelope:
    return build_envelope(
        data=data, problem=problem, ending=ending, mutates=mutates, idempotent=idempotent, meta={**META, **meta}
    )


def as_json_holds_it(value: Any) -> Any:
    """A high and a low surrogate side by side are one character to JSON; otherwise nothing changes."""
    if isinstance(value, str):
        return value.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "surrogatepass")
    if isinstance(value, list):
        return [as_json_holds_it(item) for item in value]
    if isinstance(value, dict):
        return {as_json_holds_it(key): as_json_holds_it(item) for key, item in value.items()}
    return value


def test_every_code_with_every_ending_and_declaration_makes_a_valid_envelope(validate_envelope: Validate):
    for code in CODES:
        for ending, mutates, idempotent in product(Ending, (False, True), (False, True)):
            envelope = built(Problem(code, "why"), ending=ending, mutates=mutates, idempotent=idempotent)
            said = validate_envelope(json.loads(envelope.to_json()))
            assert not said["ok"] and not envelope.ok
            assert said["error"]["code"] == envelope.code == code
            assert said["meta"]["exit_code"] == envelope.exit_code == error_entry(code).exit_code
            assert said["meta"]["ending"] == envelope.ending == ending.value
            assert said["error"]["suggestion"] == error_entry(code).hint
            if ending is Ending.NOT_STARTED or not mutates:
                assert said["meta"]["side_effects"] == "none"
            if said["error"]["retryable"]:
                assert error_entry(code).retryable
                assert said["meta"]["side_effects"] == "none" or idempotent


def test_every_ending_without_a_problem_makes_a_valid_envelope(validate_envelope: Validate):
    for ending, mutates in list(product(Ending, (False, True))):
        said = validate_envelope(json.loads(built(ending=ending, mutates=mutates).to_json()))
        assert said["ok"] and said["error"] is None and said["meta"]["exit_code"] == 0


@given(
    problem=st.none()
    | st.builds(
        Problem,
        st.sampled_from(CODES),
        any_text,
        phase=st.sampled_from(["validation", "execution", "cleanup"]),
        fired=st.none()
        | st.builds(Fired, st.sampled_from(ClockKind), any_text, st.integers(0, 2**40), st.integers(0, 2**40)),
        context=st.none() | st.dictionaries(any_text, json_values, max_size=3),
        errors=st.none() | st.lists(st.fixed_dictionaries({"field": any_text, "message": any_text}), max_size=3),
        suggestion=st.none() | any_text,
        retry_after_ms=st.none() | st.integers(0, 2**40),
        exit_code=st.none() | st.integers(1, 255),
        side_effects=st.none() | st.sampled_from(SideEffects),
    ),
    ending=st.sampled_from(Ending),
    data=data_values,
    mutates=st.booleans(),
    idempotent=st.booleans(),
    warnings=st.lists(st.builds(warning, st.sampled_from(list(warning_entries())), any_text), max_size=3),
)
def test_whatever_happened_the_envelope_is_valid_one_line_of_ascii_and_reads_back_the_same(
    problem: Problem | None,
    ending: Ending,
    data: Any,
    mutates: bool,
    idempotent: bool,
    warnings: list[dict[str, object]],
    validate_envelope: Validate,
):
    envelope = build_envelope(
        data=data,
        problem=problem,
        ending=ending,
        mutates=mutates,
        idempotent=idempotent,
        meta=META,
        warnings=warnings,
        value=object(),  # what a handler returned need not be JSON
    )
    line = envelope.to_json()
    assert line.isascii() and line.isprintable(), "a line of printable ASCII, whatever was put in"
    said = json.loads(line)
    assert list(said) == ["ok", "data", "error", "warnings", "meta"]
    validate_envelope(said)
    assert said["ok"] == (said["meta"]["exit_code"] == 0) == (problem is None)
    assert said["data"] == make_whole(as_json_holds_it(data))
    if problem is not None and mutates and not idempotent and said["meta"]["side_effects"] != "none":
        assert said["error"]["retryable"] is False
    if problem is not None and problem.fired is not None:
        assert said["error"]["context"]["clock"]["limit_ms"] == problem.fired.limit_ms


def test_text_that_could_break_a_line_or_a_writer_reads_back_exactly():
    for text in ["\0", "\n", "\r\n", "\u2028", "\x1b[31m", "\x7f", "𝄞", '"\\']:
        line = built(data={text: text}).to_json()
        line.encode("ascii")
        assert "\n" not in line and "\r" not in line
        assert json.loads(line)["data"] == {text: text}


def test_a_problem_cannot_exit_0():
    with pytest.raises(ValueError, match="cannot exit 0"):
        built(Problem("COMMAND_FAILED", "x", exit_code=0))


def test_an_envelope_without_a_problem_exits_0_whatever_it_is_told():
    for code in [1, 10, 255]:
        try:
            envelope = built(exit_code=code)
        except ValueError:
            return  # refusing it is as good
        assert envelope.ok and envelope.exit_code == 0


def test_what_is_derived_cannot_be_overruled_by_what_is_passed():
    envelope = built(Problem("TIMEOUT", "x"), ending=Ending.KILLED, exit_code=3, side_effects="none")
    assert envelope.exit_code == 10
    assert envelope.meta["side_effects"] == "unknown"


def test_a_childs_or_signals_exit_code_is_the_envelopes_where_it_is_passed_through():
    assert built(Problem("COMMAND_FAILED", "x", exit_code=125)).exit_code == 125
    assert built(Problem("CANCELLED", "x", exit_code=130)).exit_code == 130


def test_the_meta_that_was_passed_in_is_not_changed():
    before = dict(META)
    built(Problem("TIMEOUT", "x"))
    assert before == META


def test_what_the_work_says_about_its_effects_is_believed():
    envelope = built(Problem("QUEUE_TIMEOUT", "x", side_effects=SideEffects.PARTIAL))
    assert envelope.meta["side_effects"] == "partial"
    assert envelope.error is not None and envelope.error["retryable"] is False


def test_the_value_a_handler_returned_is_kept_but_never_printed():
    secret = object()
    envelope = build_envelope(
        data=None, problem=None, ending=Ending.FINISHED, mutates=False, idempotent=False, meta=META, value=secret
    )
    assert envelope.value is secret
    assert "value" not in envelope.to_dict()


@given(json_values)
def test_data_is_an_object_an_array_or_null_and_a_bare_value_is_named(value: Any):
    data = as_data(value)
    if value is None or isinstance(value, dict | list):
        assert data is value
    else:
        assert data == {"result": value}


def test_not_a_number_is_never_written_as_if_it_were_json():
    with pytest.raises(ValueError):
        built(data={"x": float("nan")}).to_json()


def test_an_envelope_can_be_pickled():
    for problem in [None, Problem("TIMEOUT", "late")]:
        whole = built(problem, data=[1])
        back = pickle.loads(pickle.dumps(whole))
        assert back.to_dict() == whole.to_dict() and repr(back) == repr(whole)
