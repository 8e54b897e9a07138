"""The clocks of `shotclock exec`: which one rang, whose it was, and that the work was gone by then."""

import json
import os
import select
from pathlib import Path
from typing import Any

import pytest

from tests.command_line import SHOTCLOCK, envelopes_in, read_slowly, wait_for, warning_codes

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("no_survivors", "enveloped")]

# Past the clock: stopping, verifying, answering, on a machine that runs other tests. What is promised is 100 ms,
# and that is measured where nothing else runs.
SLACK_MS = 3000

IGNORES_TERM = "trap '' TERM; while :; do sleep 0.05; done"


def children_of(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/task/{pid}/children").read_text().split()


def timed_out(envelope: dict[str, Any], code: str = "TIMEOUT", *, json: bool = False) -> dict[str, Any]:
    """The clock that fired, once everything around it is as it should be."""
    assert envelope["error"]["code"] == code
    assert envelope["meta"]["exit_code"] == (10 if json else 124)
    assert envelope["meta"]["ending"] == "killed"
    assert envelope["meta"]["side_effects"] == "unknown"
    assert envelope["meta"]["survivors"] == []
    assert envelope["error"]["retryable"] is False, "a command may change anything, so nobody is told to repeat it"
    assert envelope["error"]["phase"] == "execution"
    clock: dict[str, Any] = envelope["error"]["context"]["clock"]
    assert set(clock) == {"kind", "owner", "limit_ms", "elapsed_ms"}
    return clock


# --- timeout --------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", [[], ["--json"], ["--idle", "20s"]], ids=["inherited", "json", "relayed"])
def test_a_command_that_takes_too_long_is_stopped_and_the_clock_is_named(
    form: list[str], shotclock: Any, validate_envelope: Any
):
    ran = shotclock("exec", *form, "--timeout", "1s", "--", "sh", "-c", "echo so far; sleep 300")
    envelope = validate_envelope(ran.json() if form == ["--json"] else ran.envelope())
    assert ran.code == envelope["meta"]["exit_code"]
    clock = timed_out(envelope, json=form == ["--json"])
    assert envelope["error"]["message"] == "Command execution timed out after 1 second"
    assert (clock["kind"], clock["owner"], clock["limit_ms"]) == ("timeout", "exec", 1000)
    assert 1000 <= clock["elapsed_ms"] <= 1000 + SLACK_MS
    assert envelope["meta"]["timeout_ms"] == 1000
    assert envelope["meta"]["remaining_ms"] == 0
    assert 1000 <= envelope["meta"]["duration_ms"] <= 1000 + SLACK_MS
    output = envelope["data"]["stdout"].encode() if form == ["--json"] else ran.stdout
    assert output == b"so far\n"


@pytest.mark.parametrize(("written", "seconds"), [("300ms", "0.3"), ("0.25s", "0.25"), ("PT0.2S", "0.2")])
def test_the_message_says_the_limit_in_seconds(written: str, seconds: str, shotclock: Any):
    envelope = shotclock("exec", "--timeout", written, "--grace", "0", "--", "sleep", "300").envelope()
    assert envelope["error"]["message"] == f"Command execution timed out after {seconds} seconds"


def test_without_a_timeout_ten_minutes_are_given(shotclock: Any, validate_envelope: Any):
    meta = validate_envelope(shotclock("exec", "--", "true").envelope())["meta"]
    assert meta["timeout_ms"] == 600_000
    assert 590_000 < meta["remaining_ms"] <= 600_000


def test_a_timeout_of_0_is_none_at_all_and_none_is_passed_on(shotclock: Any, validate_envelope: Any):
    ran = shotclock("exec", "--timeout", "0", "--", "sh", "-c", 'echo "${SHOTCLOCK_REMAINING_MS-none}"')
    meta = validate_envelope(ran.envelope())["meta"]
    assert meta["timeout_ms"] == 0
    assert "remaining_ms" not in meta
    assert ran.stdout == b"none\n"


def test_a_result_that_comes_after_the_bell_is_not_a_success(shotclock: Any):
    """It was asked to stop, and then said 0: the work was cut short all the same."""
    script = "trap 'exit 0' TERM; while :; do sleep 0.05; done"
    ran = shotclock("exec", "--timeout", "300ms", "--", "sh", "-c", script)
    timed_out(ran.envelope())
    assert ran.envelope()["data"]["exit_code"] == 0


# --- grace ----------------------------------------------------------------------------------------


def test_within_the_grace_the_command_may_clean_up(tmp_path: Path, shotclock: Any):
    script = f"trap 'sleep 0.3; echo cleaned; touch {tmp_path}/cleaned; exit 1' TERM; while :; do sleep 0.05; done"
    ran = shotclock("exec", "--timeout", "300ms", "--grace", "10s", "--", "sh", "-c", script)
    timed_out(ran.envelope())
    assert ran.stdout == b"cleaned\n"
    assert (tmp_path / "cleaned").exists()
    assert ran.envelope()["meta"]["duration_ms"] < 5000, "what has cleaned up is not waited for any longer"


@pytest.mark.parametrize("form", [[], ["--json"]], ids=["inherited", "json"])
def test_what_ignores_the_polite_stop_is_killed_when_the_grace_is_over(
    form: list[str], shotclock: Any, validate_envelope: Any
):
    ran = shotclock("exec", *form, "--timeout", "300ms", "--grace", "400ms", "--", "sh", "-c", IGNORES_TERM)
    envelope = validate_envelope(ran.json() if form else ran.envelope())
    clock = timed_out(envelope, json=bool(form))
    assert 300 <= clock["elapsed_ms"] <= 300 + SLACK_MS
    assert envelope["meta"]["duration_ms"] - clock["elapsed_ms"] >= 390, "the clock fired at the bell, not at the kill"
    assert 700 <= envelope["meta"]["duration_ms"] <= 700 + SLACK_MS
    assert envelope["data"]["signal"] == "SIGKILL"


def test_without_grace_nobody_is_asked(tmp_path: Path, shotclock: Any):
    script = f"trap 'touch {tmp_path}/asked' TERM; while :; do sleep 0.05; done"
    ran = shotclock("exec", "--timeout", "300ms", "--grace", "0", "--", "sh", "-c", script)
    timed_out(ran.envelope())
    assert not (tmp_path / "asked").exists()


# --- idle -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", [[], ["--json"]], ids=["relayed", "json"])
def test_a_silent_command_is_stalled(form: list[str], shotclock: Any, validate_envelope: Any):
    ran = shotclock("exec", *form, "--idle", "300ms", "--", "sh", "-c", "echo last words; sleep 300")
    envelope = validate_envelope(ran.json() if form else ran.envelope())
    assert ran.code == envelope["meta"]["exit_code"]
    clock = timed_out(envelope, "STALLED", json=bool(form))
    assert (clock["kind"], clock["owner"], clock["limit_ms"]) == ("idle", "exec", 300)
    assert 300 <= clock["elapsed_ms"] <= 300 + SLACK_MS
    assert "300ms" in envelope["error"]["message"]
    assert (envelope["data"]["stdout"].encode() if form else ran.stdout) == b"last words\n"


@pytest.mark.parametrize(("form", "stream"), [([], 1), ([], 2), (["--json"], 2)], ids=["stdout", "stderr", "json"])
def test_output_on_either_stream_keeps_a_command_alive(form: list[str], stream: int, shotclock: Any):
    script = f"for i in 1 2 3 4 5 6 7 8; do sleep 0.1; echo $i >&{stream}; done"
    ran = shotclock("exec", *form, "--idle", "600ms", "--", "sh", "-c", script)
    assert ran.code == 0, "0.8 s of work, never silent for long"
    assert ran.elapsed_s > 0.8


def test_a_reader_that_pauses_is_not_the_commands_silence(start: Any):
    """The command has more to say and we are the ones who do not take it: that is no reason to call it stalled."""
    theirs, ours = os.pipe()
    running = start("exec", "--idle", "300ms", "--", "head", "-c", "1000000", "/dev/zero", stdout=ours)
    os.close(ours)
    received = read_slowly(theirs, first_after_s=0.9)
    assert running.ends() == 0, running.envelope()["error"]
    assert len(received) == 1_000_000


@pytest.mark.parametrize("where", ["stdout", "stderr", "both in one"])
def test_the_bell_rings_on_time_even_if_nobody_takes_the_output(where: str, start: Any):
    """Whoever holds the clock must not wait for whoever reads: not even where both streams share one full pipe."""
    theirs, ours = os.pipe()
    streams = {"stdout": ours, "stderr": ours} if where == "both in one" else {where: ours}
    flood = {"stdout": "yes", "stderr": "yes >&2", "both in one": "yes out & yes err >&2 & wait"}[where]
    running = start("exec", "--idle", "30s", "--timeout", "1s", "--grace", "0", "--", "sh", "-c", flood, **streams)
    [supervisor] = wait_for(lambda: children_of(running.process.pid), "the supervisor")
    for _ in range(20):
        # Room for one page: both streams are told that they may write, and the second finds it taken.
        wait_for(lambda: not select.select([], [ours], [], 0)[1], "the pipe to be full")
        if "pipe_write" in Path(f"/proc/{supervisor}/wchan").read_text():
            break  # leave it so: the bell must not ring into this
        os.read(theirs, 4096)
    os.close(ours)
    # When this begins it is over; without it there could be no answer.
    received = read_slowly(theirs, first_after_s=3.0, pause_s=0)
    assert running.ends() == 124
    [envelope] = envelopes_in(received) + envelopes_in(running.stdout) + envelopes_in(running.stderr)
    timed_out(envelope)
    assert envelope["meta"]["duration_ms"] <= 1000 + 1000 + SLACK_MS, "at most the second we give to the last output"


# --- soft -----------------------------------------------------------------------------------------


def test_a_command_that_winds_down_when_asked_early_has_succeeded_with_a_warning(
    shotclock: Any, validate_envelope: Any
):
    script = "trap 'echo wound down; exit 0' TERM; while :; do sleep 0.05; done"
    ran = shotclock("exec", "--soft", "300ms", "--timeout", "20s", "--", "sh", "-c", script)
    envelope = validate_envelope(ran.envelope())
    assert (ran.code, ran.stdout) == (0, b"wound down\n")
    [warning] = envelope["warnings"]
    assert warning["code"] == "SOFT_LIMIT"
    assert warning["context"] == {"limit_ms": 300}
    assert envelope["meta"]["ending"] == "finished"


def test_a_command_that_dies_from_being_asked_timed_out_by_the_soft_clock(shotclock: Any, validate_envelope: Any):
    ran = shotclock("exec", "--soft", "300ms", "--timeout", "20s", "--", "sleep", "300")
    envelope = validate_envelope(ran.envelope())
    assert ran.code == 124
    clock = timed_out(envelope)
    assert (clock["kind"], clock["owner"], clock["limit_ms"]) == ("soft", "exec", 300)
    assert 300 <= clock["elapsed_ms"] <= 300 + SLACK_MS


# --- the caller's deadline ------------------------------------------------------------------------


def test_the_callers_deadline_caps_the_timeout(shotclock: Any, validate_envelope: Any):
    ran = shotclock(
        "exec", "--timeout", "10s", "--", "sh", "-c", 'echo "$SHOTCLOCK_REMAINING_MS"; sleep 300',
        env={"SHOTCLOCK_REMAINING_MS": "1500"},
    )  # fmt: skip
    envelope = validate_envelope(ran.envelope())
    assert ran.code == 124
    clock = timed_out(envelope)
    assert (clock["kind"], clock["owner"]) == ("timeout", "caller")
    assert 0 < clock["limit_ms"] == envelope["meta"]["timeout_ms"] <= 1450, "1500 less the reserve"
    assert warning_codes(envelope) == ["DEADLINE_INHERITED"]
    assert "10s" in envelope["warnings"][0]["message"]
    assert int(ran.stdout) <= clock["limit_ms"]
    assert envelope["meta"]["duration_ms"] < 1500 + SLACK_MS


def test_even_without_a_clock_of_its_own_a_command_ends_by_its_callers_deadline(shotclock: Any):
    ran = shotclock("exec", "--timeout", "0", "--", "sleep", "300", env={"SHOTCLOCK_REMAINING_MS": "1500"})
    assert timed_out(ran.envelope())["owner"] == "caller"


@pytest.mark.parametrize("form", [[], ["--json"]], ids=["passthrough", "json"])
def test_without_time_left_nothing_is_started(form: list[str], tmp_path: Path, shotclock: Any, validate_envelope: Any):
    ran = shotclock("exec", *form, "--", "touch", tmp_path / "ran", env={"SHOTCLOCK_REMAINING_MS": "0"})
    envelope = validate_envelope(ran.json() if form else ran.envelope())
    assert ran.code == envelope["meta"]["exit_code"] == (10 if form else 124)
    assert envelope["error"]["code"] == "NO_TIME_LEFT"
    assert envelope["error"]["retryable"] is True, "nothing ran, so it may be called again"
    assert (envelope["meta"]["ending"], envelope["meta"]["side_effects"]) == ("not_started", "none")
    assert envelope["error"]["context"]["clock"]["owner"] == "caller"
    assert not (tmp_path / "ran").exists()


def test_an_unreadable_deadline_is_not_used_and_said(shotclock: Any, validate_envelope: Any):
    for text in ("soon", "-5", "1.5", "9" * 40, "5s", "٥"):
        ran = shotclock("exec", "--", "true", env={"SHOTCLOCK_REMAINING_MS": text})
        envelope = validate_envelope(ran.envelope())
        assert ran.code == 0
        assert envelope["meta"]["timeout_ms"] == 600_000
        [warning] = envelope["warnings"]
        assert warning["code"] == "DEADLINE_UNREADABLE"
        assert "SHOTCLOCK_REMAINING_MS" in warning["message"]


def test_an_empty_variable_is_no_deadline(shotclock: Any):
    envelope = shotclock("exec", "--", "true", env={"SHOTCLOCK_REMAINING_MS": ""}).envelope()
    assert (envelope["meta"]["timeout_ms"], envelope["warnings"]) == (600_000, [])


def test_an_instant_read_on_another_machine_is_not_believed(shotclock: Any):
    """Later than now plus what remained: no clock of this boot can have said that."""
    envelope = shotclock(
        "exec", "--timeout", "0", "--", "true",
        env={"SHOTCLOCK_REMAINING_MS": "20000", "SHOTCLOCK_DEADLINE_NS": str(2**62)},
    ).envelope()  # fmt: skip
    assert 0 < envelope["meta"]["timeout_ms"] <= 20_000


@pytest.mark.parametrize("work", ["sleep 300", IGNORES_TERM], ids=["sleeps", "ignores TERM"])
def test_inside_another_the_inner_answer_arrives_before_the_outer_bell(
    work: str, shotclock: Any, validate_envelope: Any
):
    ran = shotclock(
        "exec", "--timeout", "3s", "--", *SHOTCLOCK, "exec", "--json", "--timeout", "60s", "--", "sh", "-c", work
    )
    outer = validate_envelope(ran.envelope())
    inner = validate_envelope(json.loads(ran.stdout))
    clock = timed_out(inner, json=True)
    assert clock["owner"] == "caller"
    assert clock["limit_ms"] < 3000
    assert warning_codes(inner) == ["DEADLINE_INHERITED"]
    # Had the outer bell rung first, the outer envelope would say TIMEOUT.
    assert outer["error"]["code"] == "COMMAND_FAILED"
    assert outer["data"]["exit_code"] == ran.code == 10
    assert outer["meta"]["trace_id"] == inner["meta"]["trace_id"]
    assert outer["meta"]["request_id"] != inner["meta"]["request_id"]
