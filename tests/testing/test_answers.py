"""Assertions about answers say what is wrong with an answer."""

from typing import Any

import pytest

from shotclock import testing
from shotclock.core.envelope import Envelope

META = {"command": "greet", "ending": "finished", "side_effects": "none", "exit_code": 0}


def answered(data: Any) -> Envelope:
    return Envelope(data, None, [], META)


def failed(code: str = "TIMEOUT", **more: Any) -> Envelope:
    error = {"code": code, "message": "stopped after 1s", "suggestion": "allow more time", **more}
    return Envelope(None, error, [], {**META, "ending": "killed"})


def test_the_value_of_a_success_is_returned() -> None:
    assert testing.assert_ok(answered({"result": 3})) == 3
    assert testing.assert_ok(answered({"a": 1}).to_dict(), {"a": 1}) == {"a": 1}
    assert testing.assert_ok(answered(None)) is None


def test_a_failure_is_reported_with_its_code_message_hint_and_mistakes() -> None:
    mistakes = [{"field": "name", "message": "Field required"}]
    with pytest.raises(AssertionError) as raised:
        testing.assert_ok(failed(errors=mistakes))
    assert str(raised.value).splitlines() == [
        "greet failed: TIMEOUT: stopped after 1s",
        "  name: Field required",
        "  hint: allow more time",
        "  ending killed, side effects none",
    ]


def test_another_value_is_reported_as_a_difference_of_lines() -> None:
    with pytest.raises(AssertionError) as raised:
        testing.assert_ok(answered({"name": "Bob", "letters": [1, 2, 3]}), {"name": "Ada", "letters": [1, 2, 3]})
    lines = str(raised.value).splitlines()
    assert lines[0] == "greet returned another value:"
    assert '-  "name": "Ada"' in lines and '+  "name": "Bob"' in lines
    with pytest.raises(AssertionError, match=r"- expected \(1,\)\n\+ returned \[1\]"):
        testing.assert_ok(answered([1]), (1,))


def test_an_expected_failure_is_returned_and_any_other_answer_is_reported() -> None:
    assert testing.assert_failed(failed(), "TIMEOUT", message="after 1s")["suggestion"] == "allow more time"
    with pytest.raises(AssertionError, match="greet failed otherwise than by NOT_FOUND: TIMEOUT: stopped"):
        testing.assert_failed(failed(), "NOT_FOUND")
    with pytest.raises(AssertionError, match="'later' is not in the message: TIMEOUT"):
        testing.assert_failed(failed(), message="later")
    with pytest.raises(AssertionError, match=r"greet succeeded, TIMEOUT expected; its value:\n\{"):
        testing.assert_failed(answered({"result": 3}), "TIMEOUT")


def test_another_object_is_refused() -> None:
    with pytest.raises(TypeError, match="not int"):
        testing.assert_ok(3)
