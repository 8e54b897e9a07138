"""The recorder of spans neither raises nor says more than it knows."""

import threading

import pytest

from shotclock.calls.call import Outcome, admit
from shotclock.calls.telemetry import Recorder
from shotclock.core.errors import Ending, SideEffects
from shotclock.core.limits import Clocks
from shotclock.supervise.spans import Span


def no_span() -> Span:
    raise AssertionError


def test_a_recorder_whose_thread_cannot_start_says_so_and_waits_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def cannot_start(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", cannot_start)
    recorder = Recorder()
    recorder.tell(no_span)
    recorder.hand_over()
    assert recorder.finish() == "spans are missing: can't start new thread"


def test_the_side_effects_of_an_outcome_are_those_of_its_span(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[Span] = []
    recorder = Recorder()
    monkeypatch.setattr(recorder, "tell", lambda ended: told.append(ended()))
    outcome = Outcome(Ending.FINISHED, side_effects=SideEffects.PARTIAL)
    recorder.call_ended(admit("run", Clocks()), outcome, 0, 0)
    assert told[0].attributes["shotclock.side_effects"] == "partial"
