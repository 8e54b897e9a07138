"""`shotclock ui`: payloads built and checked without a device, and a page acted on from the shell."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.ui.pages import Session, session_in

SHOTCLOCK = [sys.executable, "-m", "shotclock"]
SNAPSHOT = {
    "commandId": "snap-1",
    "taskId": "snap-1",
    "source": "agent",
    "expectedFormat": "android-ui-automator",
    "timeoutMs": 30000,
    "actions": [{"id": "snap", "type": "snapshot_ui"}],
}
WITHIN_S = 60.0


def answer(shotclock: Callable[..., Any], *words: str, **options: Any) -> tuple[int, dict[str, Any]]:
    ran = shotclock("ui", *words, **options)
    told = ran.json()
    assert told["meta"]["exit_code"] == ran.code
    return ran.code, told


def test_a_valid_execution_is_shown_as_it_would_be_sent(
    shotclock: Callable[..., Any], tmp_path: Path, validate_envelope: Callable[[Any], Any]
) -> None:
    code, told = answer(shotclock, "exec", "--validate-only", "--execution", json.dumps(SNAPSHOT))
    assert code == 0 and validate_envelope(told)["data"] == {"ok": True, "validated": True, "execution": SNAPSHOT}
    file = tmp_path / "e.json"
    file.write_text(json.dumps(SNAPSHOT))
    code, told = answer(shotclock, "exec", str(file), "--timeout", "5000", "--dry-run")
    plan = {"commandId": "snap-1", "timeoutMs": 5000, "actionCount": 1, "actions": SNAPSHOT["actions"]}
    assert told["data"] == {"ok": True, "dryRun": True, "plan": plan}


@pytest.mark.slow
def test_a_payload_is_read_from_stdin(tmp_path: Path) -> None:
    words = [*SHOTCLOCK, "ui", "exec", "-", "--validate-only"]
    ran = subprocess.run(words, input=json.dumps(SNAPSHOT).encode(), capture_output=True, timeout=WITHIN_S)
    assert json.loads(ran.stdout)["data"]["execution"] == SNAPSHOT
    read, write = os.pipe()  # nobody ever writes
    try:
        ran = subprocess.run(words, stdin=read, capture_output=True, timeout=WITHIN_S)
    finally:
        os.close(read)
        os.close(write)
    assert ran.returncode == 4 and json.loads(ran.stdout)["error"]["code"] == "INPUT_REQUIRED"


def test_each_verb_gives_its_execution(shotclock: Callable[..., Any]) -> None:
    for words, timeout_ms, action_id, action_type in (
        (["wait", "--text", "Done", "--timeout", "45000"], 50000, "wait", "wait_for_node"),
        (["wait-for-nav", "--app", "com.x", "--timeout", "30000"], 35000, "wait-for-nav", "wait_for_navigation"),
        (["sleep", "1500", "--timeout", "60000"], 60000, "sleep", "sleep"),
        (["click", "--at", "3,4"], 30000, "click", "click"),
        (["type", "hello", "--label", "Name"], 30000, "type", "enter_text"),
        (["scroll", "--text", "End"], 30000, "scroll", "scroll_until"),
        (["read", "--id", "x", "--timeout", "9s"], 9000, "read", "read_text"),
    ):
        code, told = answer(shotclock, *words, "--dry-run")
        assert code == 0, told
        plan = told["data"]["plan"]
        assert plan["timeoutMs"] == timeout_ms and plan["actionCount"] == 1
        assert [(each["id"], each["type"]) for each in plan["actions"]] == [(action_id, action_type)]


def test_a_dry_run_shows_the_params_of_every_action(shotclock: Callable[..., Any]) -> None:
    actions = [
        {"id": "click-1", "type": "click", "params": {"matcher": {"textEquals": "Settings"}}},
        {"id": "sleep-1", "type": "sleep", "params": {"durationMs": 1500}},
        {"id": "wait-1", "type": "wait_for_node", "params": {"matcher": {"textEquals": "Done"}, "timeoutMs": 10000}},
        {"id": "snap-1", "type": "snapshot_ui"},
    ]
    code, told = answer(shotclock, "exec", "--dry-run", "--execution", json.dumps({**SNAPSHOT, "actions": actions}))
    plan = {"commandId": "snap-1", "timeoutMs": 30000, "actionCount": 4, "actions": actions}
    assert (code, told["data"]) == (0, {"ok": True, "dryRun": True, "plan": plan})


def test_what_is_wrong_is_said_before_anything_is_started(shotclock: Callable[..., Any], tmp_path: Path) -> None:
    for words, code, field, message in (
        (["wait-for-nav", "--app", "x"], "MISSING_ARGUMENT", "timeout", "is missing"),
        (["wait-for-nav", "--timeout", "5000"], "EXECUTION_VALIDATION_FAILED", "actions.0.params", "expectedUrl"),
        (["wait"], "MISSING_ARGUMENT", "matcher", "name a node"),
        (["sleep"], "MISSING_ARGUMENT", "ms", "is missing"),
        (["exec"], "MISSING_ARGUMENT", "execution", "is missing"),
        (
            ["wait-for-nav", "--app", "x", "--timeout", "30001", "--validate-only"],
            "EXECUTION_VALIDATION_FAILED",
            "actions.0.params.timeoutMs",
            "wait_for_navigation params.timeoutMs must not exceed 30000",
        ),
        (["exec", "--execution", "{", "--dry-run"], "EXECUTION_VALIDATION_FAILED", "execution", "not JSON"),
        (
            ["exec", "--execution", json.dumps(SNAPSHOT), "--timeout", "nan"],
            "EXECUTION_VALIDATION_FAILED",
            "timeoutMs",
            "timeoutMs must be a finite number",
        ),
        (
            ["exec", "--execution", json.dumps(SNAPSHOT), "--timeout", "500"],
            "EXECUTION_VALIDATION_FAILED",
            "timeoutMs",
            "timeoutMs must be between 1000 and 120000",
        ),
        (["click", "--text", "x", "--timeout", "soon"], "ARG_ERROR", "timeout", "soon"),
        (["snapshot", "--dry-run", "--validate-only"], "ARG_ERROR", "dry-run", "exclude each other"),
        (["fly"], "ARG_ERROR", "verb", "no verb 'fly'"),
    ):
        exit_code, told = answer(shotclock, *words, env={"SHOTCLOCK_HOME": str(tmp_path / "home")})
        assert (exit_code, told["error"]["code"]) == (2, code), told
        wrong = {each["field"]: each["message"] for each in told["error"]["errors"]}
        assert message in wrong[field], wrong
        assert not (tmp_path / "home" / "ui").exists()


def test_every_mistake_in_the_words_is_named_at_once(shotclock: Callable[..., Any]) -> None:
    for words, fields in (
        (["exec", "--bogus", "--device", "nope:xx", "--timeout", "soon"], {"--bogus", "device", "timeout"}),
        (["stop", "--device", "nope", "--bogus"], {"device", "--bogus"}),
    ):
        code, told = answer(shotclock, *words)
        assert (code, told["error"]["code"]) == (2, "ARG_ERROR")
        assert fields <= {each["field"] for each in told["error"]["errors"]}, told["error"]["errors"]


@pytest.mark.slow
def test_consecutive_commands_act_on_the_same_page(tmp_path: Path, validate_envelope: Callable[[Any], Any]) -> None:
    with session_in(tmp_path / "home") as session:

        def ui(*words: str) -> dict[str, Any]:
            ran = subprocess.run([*SHOTCLOCK, "ui", *words], capture_output=True, timeout=WITHIN_S)
            told: dict[str, Any] = validate_envelope(json.loads(ran.stdout))
            assert ran.returncode == told["meta"]["exit_code"] and not ran.stderr, ran
            return told

        assert ui("start")["data"]["open"] is True
        assert ui("open", session.url)["ok"]
        assert ui("click", "--text", "Buy")["meta"]["side_effects"] == "complete"
        assert not imported_by("click", "--text", "Buy") & {"asyncio", "pydantic", "sqlite3", "playwright"}
        assert ui("read", "--id", "said")["data"]["stepResults"][0]["data"]["text"] == "bought"
        assert ui("wait", "--text", "Never", "--timeout", "300")["error"]["code"] == "WAIT_TIMEOUT"
        (tab,) = ui("tabs")["data"]["stepResults"][0]["data"]["tabs"]
        assert (tab["tab"], tab["title"], tab["active"]) == ("t1", "Shop", True)
        kept = {each["name"]: each["kept"] for each in ui("devices")["data"]["devices"]}
        assert kept["browser"]["open"] is True
        assert interrupted(session)["error"]["code"] == "CANCELLED"
        assert ui("stop", "--all")["data"] == {"stopped": ["browser"]}
        assert ui("stop")["data"] == {"stopped": []}


def imported_by(*words: str) -> set[str]:
    """The modules that a warm command imports: what it costs every time."""
    environ = {**os.environ, "PYTHONPROFILEIMPORTTIME": "1"}
    ran = subprocess.run([*SHOTCLOCK, "ui", *words], capture_output=True, timeout=WITHIN_S, env=environ)
    assert ran.returncode == 0, ran
    return {name.decode() for name in re.findall(rb"^import time:.*\| +([^.\s]+)", ran.stderr, re.MULTILINE)}


def interrupted(session: Session) -> dict[str, Any]:
    """What a command says that is stopped in the middle."""
    process = subprocess.Popen([*SHOTCLOCK, "ui", "sleep", "20000"], stdout=subprocess.PIPE)
    give_up_at = time.monotonic() + WITHIN_S
    while (session.status() or {}).get("holder") is None:
        assert time.monotonic() < give_up_at and process.poll() is None
        time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    out, _ = process.communicate(timeout=WITHIN_S)
    assert process.returncode == 143
    told: dict[str, Any] = json.loads(out)
    return told
