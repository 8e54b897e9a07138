"""The way to a device and back: what a daemon may do to its client, and what is made of a result."""

import json
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from shotclock.calls.call import Outcome
from shotclock.core.envelope import Problem
from shotclock.core.errors import Ending, Failure, SideEffects
from shotclock.supervise import private_socket
from shotclock.ui import client
from shotclock.ui.daemon import judge_result
from shotclock.ui.payload import read_execution
from shotclock.ui.verbs import build

from .conftest import MemoryDevice, act, execution, hang, run_on

ENVELOPE = {"ok": True, "data": {}, "error": None, "warnings": [], "meta": {"exit_code": 0, "ending": "finished"}}
ACCEPTED_WITHIN_S = 5.0


@contextmanager
def daemon(home: Path, monkeypatch: pytest.MonkeyPatch, *lines: Any, hold: bool = False) -> Iterator[None]:
    """A daemon that answers every request with these lines; a function makes one of the request."""
    monkeypatch.setenv("SHOTCLOCK_HOME", str(home))
    os.makedirs(client.folder())
    listener = private_socket.listen(f"{client.stem_of('browser')}.sock")
    listener.settimeout(ACCEPTED_WITHIN_S)
    done = threading.Event()

    def serve() -> None:
        connection, _ = listener.accept()
        with connection:
            connection.settimeout(ACCEPTED_WITHIN_S)
            asked = connection.makefile().readline()
            if not asked:  # it has changed its mind
                return
            request = json.loads(asked)
            for line in lines:
                told = line(request) if callable(line) else line
                connection.sendall(told if isinstance(told, bytes) else json.dumps(told).encode() + b"\n")
            if hold:
                done.wait(ACCEPTED_WITHIN_S)

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join(ACCEPTED_WITHIN_S)
        listener.close()


def about(request: dict[str, Any], **told: Any) -> dict[str, Any]:
    return {"commandId": request["commandId"], **told}


def run() -> Any:
    return client.execute("browser", build("snapshot", {}, 1000))


def test_a_result_of_another_command_never_ends_this_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = {**ENVELOPE, "data": {"of": "another"}}
    mine = {**ENVELOPE, "data": {"of": "mine"}}
    lines = [
        {"commandId": "other", "envelope": other},
        lambda r: about(r, begun=True),
        lambda r: about(r, envelope=mine),
    ]
    with daemon(tmp_path / "h", monkeypatch, *lines):
        assert run().data == {"of": "mine"}


@pytest.mark.parametrize(
    "line",
    [
        b"no json\n",
        b"[1]\n",
        lambda r: about(r, envelope="x"),
        lambda r: about(r, envelope={**ENVELOPE, "ok": False}),
        lambda r: about(r, envelope={"ok": True}),
    ],
)
def test_a_result_that_cannot_be_read_is_malformed(line: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with daemon(tmp_path / "h", monkeypatch, line), pytest.raises(Failure) as raised:
        run()
    assert raised.value.code == "RESULT_ENVELOPE_MALFORMED"


def test_a_daemon_that_ends_in_the_middle_is_a_lost_device_with_what_was_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = {"event": "stepResult", "id": "snap", "actionType": "snapshot_ui", "success": True, "data": {}}
    with daemon(tmp_path / "h", monkeypatch, lambda r: about(r, event=step)), pytest.raises(Failure) as raised:
        run()
    assert raised.value.code == "DEVICE_LOST"
    assert [each["id"] for each in raised.value.data["stepResults"]] == ["snap"]  # type: ignore[index]


@pytest.mark.parametrize("speaks", [True, False])
def test_no_result_in_its_time_and_five_seconds_is_told_with_the_last_events(
    speaks: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "RESULT_MARGIN_MS", 200)  # the five seconds
    lines = [lambda r: about(r, begun=True), lambda r: about(r, event={"event": "step", "id": "snap"})]
    with daemon(tmp_path / "h", monkeypatch, *lines[: 2 * speaks], hold=True), pytest.raises(Failure) as raised:
        began = time.monotonic()
        run()
    assert time.monotonic() - began >= 1.2
    failure = raised.value
    assert failure.code == "RESULT_ENVELOPE_TIMEOUT" and "doctor" in str(failure.suggestion)
    assert failure.context["events"] == [{"event": "step", "id": "snap"}][:speaks]


def test_an_invalid_payload_is_refused_before_a_daemon_is_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHOTCLOCK_HOME", str(tmp_path / "h"))
    with pytest.raises(Failure) as raised:
        client.execute("browser", build("type", {"css": "a", "words": "x" * 300_000}))
    assert raised.value.code == "EXECUTION_VALIDATION_FAILED" and not (tmp_path / "h").exists()


def test_a_home_of_any_length_has_room_for_a_socket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = tmp_path / ("long" * 30) / ("longer" * 20)
    home.mkdir(parents=True)
    with daemon(home / "h", monkeypatch, lambda r: about(r, envelope=ENVELOPE)):
        assert run().ok


def test_a_device_has_a_file_name_of_its_own() -> None:
    for name in ("browser", "cdp:http://127.0.0.1:9222", "cdp:http://127.0.0.1:9223", "../x", "ü" * 99):
        stem = os.path.basename(client.stem_of(name))
        assert os.path.dirname(client.stem_of(name)) == client.folder() and stem.isascii() and len(stem) < 60
        assert client.stem_of(name) != client.stem_of(name + "x")


# --- results ----------------------------------------------------------------------------------------------------

PAYLOAD = execution(act("click", "a", "A"), act("read_text", "b", "B"))
READ = read_execution(PAYLOAD)


def result() -> dict[str, Any]:
    return run_on(MemoryDevice({"B": lambda ms: ["text"]}), PAYLOAD)


def judged(value: Any, problem: Problem | None = None, events: Any = (), steps: Any = ()) -> Outcome:
    outcome = Outcome(Ending.FINISHED if problem is None else Ending.KILLED, problem, value=value)
    return judge_result(READ, "browser", outcome, list(events), list(steps))


def test_a_good_result_is_the_data_of_the_envelope() -> None:
    outcome = judged(result())
    assert outcome.problem is None and outcome.side_effects is SideEffects.COMPLETE
    assert isinstance(outcome.data, dict) and outcome.data["status"] == "success"


def test_a_malformed_result_is_reported() -> None:
    good = result()
    for broken in (None, [good], {**good, "commandId": "other"}, {**good, "error": "x"}, {**good, "page": None},
                   {**good, "effects": "few"}):  # fmt: skip
        outcome = judged(broken)
        assert isinstance(outcome.problem, Problem) and outcome.problem.code == "RESULT_ENVELOPE_MALFORMED"
        assert outcome.data["page"]["next"] == "none"  # type: ignore[index,call-overload]


def test_an_operation_timeout_has_its_limit_and_a_hint_about_its_own_clock() -> None:
    frozen = MemoryDevice({"Go": hang})
    payload = execution(act("click", "go", "Go", timeoutMs=100))
    outcome = judge_result(
        read_execution(payload), "memory", Outcome(Ending.FINISHED, value=run_on(frozen, payload)), [], []
    )
    problem = outcome.problem
    assert isinstance(problem, Problem) and problem.code == "OPERATION_TIMEOUT" and problem.context is not None
    assert problem.context["timeout_ms"] == 100
    assert "give the action go more time" in str(problem.suggestion) and "server" not in str(problem.suggestion)


def test_what_was_done_before_the_device_was_silent_is_in_the_answer() -> None:
    events = [{"event": "step", "id": "a", "index": 0}, {"event": "step", "id": "b", "index": 1}]
    steps = [{"id": "a", "actionType": "click", "success": True, "data": {}}]
    outcome = judged(None, Problem("TIMEOUT", "too long"), events, steps)
    data: Any = outcome.data
    assert isinstance(outcome.problem, Problem) and outcome.problem.code == "RESULT_ENVELOPE_TIMEOUT"
    assert data["stepResults"] == steps
    assert data["position"] == {"index": 1, "actionId": "b", "completed": 1, "total": 2}
    assert outcome.side_effects is SideEffects.PARTIAL
    outcome = judged(None, Problem("WORKER_CRASHED", "SIGSEGV"), events[:1], [])
    assert outcome.problem.code == "DEVICE_LOST" and outcome.side_effects is SideEffects.UNKNOWN  # type: ignore[union-attr]


def test_what_a_cancelled_execution_says_of_its_page_is_documented() -> None:
    outcome = Outcome(Ending.CANCELLED, Problem("CANCELLED", "its caller has left"))
    data: Any = judge_result(READ, "browser", outcome, [], []).data
    assert (data["page"]["state"], data["page"]["next"]) == ("unknown", "same")
    page = (Path(__file__).resolve().parents[2] / "docs" / "reference" / "ui.md").read_text("utf-8")
    assert "\n| `unknown` | the execution was cancelled, and the page was left as it is |\n" in page


def test_nothing_is_started_for_a_device_that_nobody_knows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOTCLOCK_HOME", str(tmp_path))
    with pytest.raises(Failure, match="there is no device 'nope:x'") as refused:
        client.execute("nope:x", execution(act("sleep", "s", durationMs=1)))
    assert refused.value.code == "DEVICE_UNAVAILABLE"
    assert list(tmp_path.iterdir()) == []
