"""How many may run at once, between processes; and keys that make a repeat harmless."""

import signal
from pathlib import Path
from typing import Any

import pytest

from tests.apps.app.conftest import Home, lines_of, uses_the_store, wait_for, warning_codes

pytestmark = [pytest.mark.usefixtures("no_survivors"), pytest.mark.slow]


def most_inside(folder: Path) -> int:
    """By the clock: how many were inside at the same time, at most."""
    events = []
    for line in lines_of(folder / "inside"):
        what, _device, _pid, at_ns = line.split()
        events.append((int(at_ns), 1 if what == "in" else -1))
    inside = most = 0
    for _, change in sorted(events):
        inside += change
        most = max(most, inside)
    assert inside == 0
    return most


# --- places -------------------------------------------------------------------------------------------


@pytest.mark.requirement("F-033")
def test_of_many_processes_in_line_never_two_are_inside(tool: Any, tmp_path: Path):
    program = tool("long.py")
    running = [program.start("flash-in-turn", tmp_path, "--seconds", "0.05") for _ in range(10)]
    codes = [one.ends(60).code for one in running]
    assert codes == [0] * 10
    assert len(lines_of(tmp_path / "inside")) == 20
    assert most_inside(tmp_path) == 1


@pytest.mark.requirement("F-033")
def test_two_places_are_two_and_no_more(tool: Any, tmp_path: Path):
    program = tool("long.py")
    running = [program.start("two-at-once", tmp_path, "--seconds", "0.6") for _ in range(6)]
    assert [one.ends(60).code for one in running] == [0] * 6
    assert most_inside(tmp_path) == 2


@pytest.mark.requirement("F-033")
def test_a_place_that_is_taken_is_refused_with_who_has_it_for_how_long_and_when_to_ask_again(
    tool: Any, tmp_path: Path, validate_envelope: Any
):
    program = tool("long.py")
    holder = program.start("flash", tmp_path, "--seconds", "60")
    wait_for(lambda: lines_of(tmp_path / "inside"), "the holder to be inside")
    ran = program("flash", tmp_path)
    envelope = validate_envelope(ran.json())
    assert ran.code == 4 and envelope["error"]["code"] == "LOCK_HELD"
    assert envelope["error"]["retryable"] is True and envelope["meta"]["side_effects"] == "none"
    held_by = envelope["error"]["context"]["holder"]
    assert held_by["pid"] == holder.process.pid and held_by["command"] == "flash"
    assert 0 <= held_by["age_ms"] < 30_000
    assert 0 < envelope["error"]["retry_after_ms"] <= 60_000
    # Another key is another place; one that is refused holds none.
    assert program.envelope("flash", tmp_path, "--device", "b", code=0)["data"] == {"result": "b"}
    holder.signal(signal.SIGTERM)
    holder.ends(5)
    assert program.envelope("flash", tmp_path, code=0)["data"] == {"result": "a"}


IN_TURN = """
import time
from pathlib import Path
from shotclock import App, Context

app = App("in-turn")

@app.command(single_flight="one", timeout="50s", queue="40s", mutates=False)
def hold(folder: Path) -> None:
    (folder / "inside").touch()
    time.sleep(2)

@app.command(single_flight="one", timeout="50s", queue="40s", soft="1s", mutates=False)
def work(ctx: Context) -> bool:
    return ctx.stopping

if __name__ == "__main__":
    app()
"""


def test_the_soft_clock_does_not_run_while_it_waits_for_its_place(tool: Any, tmp_path: Path):
    program = tool("in_turn.py", IN_TURN)
    holder = program.start("hold", tmp_path)
    wait_for(lambda: (tmp_path / "inside").exists(), "the holder to be inside")
    envelope = program.envelope("work", code=0)
    assert holder.ends(20).code == 0
    assert envelope["data"] == {"result": False} and envelope["warnings"] == []


@pytest.mark.requirement("F-033")
def test_the_queue_clock_is_how_long_it_waits(tool: Any, tmp_path: Path, validate_envelope: Any):
    program = tool("long.py")
    holder = program.start("flash", tmp_path, "--seconds", "60")
    wait_for(lambda: lines_of(tmp_path / "inside"), "the holder to be inside")
    patient = program.start("flash-in-turn", tmp_path)
    short = tool("long.py", words=[*program.words]).start("flash-in-turn", tmp_path, "--timeout", "1s")
    ran = short.ends(10)
    assert ran.code in (4, 10), "its timeout is shorter than its queue clock"
    envelope = validate_envelope(ran.json())
    assert envelope["meta"]["ending"] == "not_started" and envelope["meta"]["side_effects"] == "none"
    holder.signal(signal.SIGKILL)
    holder.process.wait(5)
    assert patient.ends(10).code == 0, "a killed holder frees the place"


def test_a_call_inside_a_call_stands_in_line_too(tool: Any, tmp_path: Path):
    program = tool("long.py")
    holder = program.start("flash", tmp_path, "--seconds", "60")
    wait_for(lambda: lines_of(tmp_path / "inside"), "the holder to be inside")
    inner = program.envelope("flash-twice", tmp_path, code=0)["data"]
    assert [one["error"]["code"] for one in inner] == ["LOCK_HELD"] * 2
    holder.signal(signal.SIGKILL)
    holder.process.wait(5)
    inner = program.envelope("flash-twice", tmp_path, code=0)["data"]
    assert [one["ok"] for one in inner] == [True, True]


def test_bad_arguments_are_told_before_anybody_stands_in_line(tool: Any, tmp_path: Path):
    program = tool("long.py")
    holder = program.start("flash", tmp_path, "--seconds", "60")
    wait_for(lambda: lines_of(tmp_path / "inside"), "the holder to be inside")
    assert program.envelope("flash", tmp_path, "--seconds", "long", code=2)["error"]["code"] == "ARG_ERROR"
    assert program.envelope("flash", code=2)["error"]["code"] == "ARG_ERROR"
    assert program.envelope("flash", tmp_path, "--validate-only", code=0)["data"] == {"valid": True}
    holder.signal(signal.SIGKILL)
    holder.process.wait(5)


# --- keys ---------------------------------------------------------------------------------------------


@pytest.mark.requirement("C-007")
def test_a_repeat_with_the_same_key_is_answered_and_not_run(tool: Any, tmp_path: Path, validate_envelope: Any):
    program = tool("long.py")
    words = ["charge", str(tmp_path), "5", "--idempotency-key", "order-1"]
    first = validate_envelope(program.envelope(*words, code=0))
    again = validate_envelope(program.envelope(*words, code=0))
    assert again["data"] == first["data"] == {"charged": 5}
    assert warning_codes(first) == [] and warning_codes(again) == ["REPLAYED"]
    assert again["meta"]["request_id"] == first["meta"]["request_id"]
    assert lines_of(tmp_path / "notes") == ["charge 5"]
    other = validate_envelope(program.envelope("charge", tmp_path, "6", "--idempotency-key", "order-1", code=6))
    assert other["error"]["code"] == "KEY_REUSED" and other["meta"]["side_effects"] == "none"
    assert lines_of(tmp_path / "notes") == ["charge 5"]


@pytest.mark.requirement("C-007")
def test_repeats_at_the_same_time_wait_for_the_first(tool: Any, tmp_path: Path):
    program = tool("long.py")
    words = ["charge", str(tmp_path), "5", "--seconds", "3", "--idempotency-key", "k"]
    running = [program.start(*words) for _ in range(5)]
    assert [one.ends(40).json()["data"] for one in running] == [{"charged": 5}] * 5
    assert lines_of(tmp_path / "notes") == ["charge 5"]


@pytest.mark.requirement("C-007")
def test_a_first_call_that_failed_after_it_began_is_not_run_again(tool: Any, tmp_path: Path, validate_envelope: Any):
    program = tool("long.py")
    words = ["charge", str(tmp_path), "5", "--fails", "--idempotency-key", "k"]
    first, again = program.envelope(*words, code=1), program.envelope(*words, code=1)
    assert again["error"]["code"] == first["error"]["code"] == "INTERNAL_ERROR"
    assert lines_of(tmp_path / "notes") == ["charge 5"]
    # What never ran uses no key up.
    program.envelope("charge", tmp_path, "five", "--idempotency-key", "k2", code=2)
    program.envelope("charge", tmp_path, "5", "--idempotency-key", "k2", code=0)


@pytest.mark.requirement("C-007")
def test_a_first_call_that_was_killed_is_said_to_be_interrupted(tool: Any, tmp_path: Path, validate_envelope: Any):
    program = tool("long.py")
    words = ["charge", str(tmp_path), "5", "--seconds", "60", "--idempotency-key", "k"]
    running = program.start(*words, "--timeout", "60s")
    wait_for(lambda: lines_of(tmp_path / "notes"), "the first call")
    running.signal(signal.SIGKILL)
    running.process.wait(5)
    envelope = validate_envelope(program.envelope(*words, code=1))
    assert envelope["error"]["code"] == "INTERRUPTED"
    assert envelope["error"]["retryable"] is False and envelope["meta"]["side_effects"] == "unknown"
    assert lines_of(tmp_path / "notes") == ["charge 5"]


@pytest.mark.requirement("C-007")
@pytest.mark.requirement("F-013")
def test_whoever_waits_for_the_first_call_can_be_told_to_stop(tool: Any, tmp_path: Path, home: Home):
    program = tool("long.py")
    words = ["charge", str(tmp_path), "5", "--seconds", "60", "--timeout", "60s", "--idempotency-key", "k"]
    first = program.start(*words)
    wait_for(lambda: lines_of(tmp_path / "notes"), "the first call")
    second = program.start(*words)
    wait_for(lambda: uses_the_store(second), "it to wait for the first")
    second.signal(signal.SIGTERM)
    ran = second.ends(within_s=5)
    assert ran.code == 143 and ran.json()["meta"]["ending"] == "not_started"
    first.signal(signal.SIGTERM)
    assert first.ends(within_s=5).code == 143
    assert lines_of(tmp_path / "notes") == ["charge 5"]
