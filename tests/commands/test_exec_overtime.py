"""`shotclock exec --overtime`: the negotiation of the runtime, with real commands."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("warm_starts")]
WITHIN_S = 60


def exec_json(*words: str) -> dict[str, Any]:
    ran = subprocess.run(
        [sys.executable, "-m", "shotclock", "exec", "--json", *words],
        capture_output=True,
        text=True,
        timeout=WITHIN_S,
        stdin=subprocess.DEVNULL,
    )
    envelope: dict[str, Any] = json.loads(ran.stdout)
    assert ran.returncode == envelope["meta"]["exit_code"]
    return envelope


def shell(script: str) -> tuple[str, ...]:
    return ("--", "sh", "-c", script)


COUNTS = "for i in 1 2 3 4 5 6 7 8 9 10 11 12; do echo $i; sleep 0.1; done"


def test_a_command_goes_on_while_its_output_grows():
    envelope = exec_json("--timeout", "30s", "--soft", "400ms", "--overtime", "20s", *shell(COUNTS))
    assert envelope["ok"] and envelope["data"]["stdout"].endswith("12\n")
    assert {request["verdict"] for request in envelope["meta"]["overtime"]["requests"]} == {"granted"}


def test_one_that_falls_silent_is_wound_down_and_what_it_said_is_kept():
    words = ("--timeout", "60s", "--soft", "300ms", "--overtime", "progress,budget=30s,max_per_request=300ms")
    envelope = exec_json(*words, *shell("echo begun; sleep 60"))
    assert envelope["error"]["code"] == "TIMEOUT" and envelope["error"]["context"]["clock"]["kind"] == "soft"
    assert envelope["data"]["stdout"] == "begun\n" and envelope["meta"]["partial"] is True
    assert envelope["meta"]["overtime"]["requests"][-1]["verdict"] == "declined"


def test_it_never_moves_past_the_callers_deadline():
    overtime = json.dumps({"command": """echo '{"extend": "1h"}'""", "budget": "2h", "hard_extends": True})
    inner = (sys.executable, "-m", "shotclock", "exec", "--timeout", "1s", "--soft", "500ms", "--overtime", overtime)
    began = time.monotonic()
    envelope = exec_json("--timeout", "4s", "--", *inner, *shell("sleep 60"))
    assert not envelope["ok"] and time.monotonic() - began < WITHIN_S / 2


def test_without_a_soft_clock_it_asks_after_three_quarters_of_the_timeout():
    envelope = exec_json("--timeout", "2s", "--overtime", "progress", *shell("sleep 60"))
    (request,) = envelope["meta"]["overtime"]["requests"]
    assert 1500 <= request["at_ms"] < 1900


def test_output_streams_through_while_it_is_watched():
    words = [sys.executable, "-m", "shotclock", "exec", "--soft", "300ms", "--overtime", "30s", "--timeout", "60s"]
    ran = subprocess.run([*words, *shell(COUNTS)], capture_output=True, text=True, timeout=WITHIN_S)
    assert ran.returncode == 0 and ran.stdout.split() == [str(number) for number in range(1, 13)]


@pytest.mark.parametrize("written", ["soon", "progress,budget=-1s", "command=", '{"observer": 5}', "{", "progress,x=1"])
def test_overtime_that_makes_no_sense_is_refused_and_nothing_runs(written: str):
    envelope = exec_json("--overtime", written, "--", "touch", "/nonexistent/x")
    assert envelope["error"]["code"] == "ARG_ERROR" and envelope["error"]["errors"][0]["field"] == "overtime"
    assert envelope["meta"]["ending"] == "not_started"


def asks_inside(by: str, then: str = "sleep 2; echo done") -> str:
    return f"{sys.executable} -m shotclock overtime --by {by} --reason nearly >&2; echo code $?; {then}"


def test_a_command_asks_for_overtime_by_itself():
    overtime = json.dumps({"command": """echo '{"extend": "20s"}'""", "budget": "40s", "hard_extends": True})
    words = ("--timeout", "12s", "--soft", "11s", "--overtime", overtime)
    envelope = exec_json(*words, *shell(asks_inside("5s")))
    (request,) = envelope["meta"]["overtime"]["requests"]
    assert (request["asked_by"], request["asked_ms"], request["granted_ms"]) == ("call", 5000, 5000)
    assert envelope["ok"] and envelope["data"]["stdout"] == "code 0\ndone\n" and envelope["meta"]["timeout_ms"] > 17_000


def test_one_that_is_declined_hears_so_and_goes_on_until_its_soft_clock():
    overtime = json.dumps({"command": """echo '{"decline": true, "reason": "no"}'""", "budget": "40s"})
    envelope = exec_json("--timeout", "60s", "--soft", "50s", "--overtime", overtime, *shell(asks_inside("5s")))
    assert envelope["ok"] and envelope["data"]["stdout"] == "code 4\ndone\n" and "no" in envelope["data"]["stderr"]


def test_whoever_has_no_token_or_says_nothing_gets_nothing_and_holds_nobody_up():
    import textwrap

    script = textwrap.dedent("""
        import json, os, socket
        request_id, token, path = os.environ["SHOTCLOCK_OVERTIME"].split(":", 2)
        silent = []
        for _ in range(20):
            one = socket.socket(socket.AF_UNIX); one.connect(path); silent.append(one)
        other = socket.socket(socket.AF_UNIX); other.connect(path); other.settimeout(20)
        request = {"do": "overtime", "request_id": request_id, "token": "guessed", "by_ms": 1, "reason": ""}
        other.sendall(json.dumps(request).encode() + b"\\n")
        print(json.loads(other.recv(1000))["code"])
    """)
    words = ("--timeout", "30s", "--soft", "20s", "--overtime", "10s", "--", sys.executable, "-c", script)
    envelope = exec_json(*words)
    assert envelope["ok"] and envelope["data"]["stdout"] == "NOT_ALLOWED\n"
    assert not envelope["meta"]["overtime"]["requests"]


def test_a_stop_file_that_is_a_pipe_holds_nobody_up():
    began = time.monotonic()
    script = 'mkdir -p "$(dirname $SHOTCLOCK_STOP_FILE)"; mkfifo $SHOTCLOCK_STOP_FILE; trap "" TERM; echo a; sleep 60'
    envelope = exec_json(
        "--timeout", "40s", "--soft", "500ms", "--wind-down", "500ms", "--grace", "200ms", *shell(script)
    )
    assert envelope["data"]["stdout"] == "a\n" and envelope["error"]["context"]["clock"]["kind"] == "soft"
    assert time.monotonic() - began < 30


def test_killed_while_somebody_is_asked_nothing_is_left(tmp_path: Path, no_survivors: object):
    overtime = "command=sleep 50.25; echo,budget=50s,observer_timeout=45s"
    words = [sys.executable, "-m", "shotclock", "exec", "--timeout", "90s", "--soft", "500ms", "--overtime", overtime]
    script = f"while :; do date +%s%N > {tmp_path}/alive; sleep 0.1; done"
    exec_ = subprocess.Popen([*words, *shell(script)], stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        give_up_at = time.monotonic() + WITHIN_S / 2
        while not observers():
            assert time.monotonic() < give_up_at, "nobody was asked"
            time.sleep(0.1)
    finally:
        exec_.kill()
        exec_.wait(WITHIN_S)
    give_up_at = time.monotonic() + 15
    while True:
        before = (tmp_path / "alive").read_text()
        time.sleep(0.7)
        if (tmp_path / "alive").read_text() == before:
            break
        assert time.monotonic() < give_up_at, "the work goes on"
    while observers():
        assert time.monotonic() < give_up_at, "the observer goes on"
        time.sleep(0.1)


def observers() -> list[int]:
    import psutil

    return [
        process.pid for process in psutil.process_iter(["cmdline"]) if process.info["cmdline"] == ["sleep", "50.25"]
    ]


def test_silence_while_it_winds_down_is_no_stall():
    script = "trap 'sleep 3; echo saved; exit 0' TERM; echo a; sleep 60 & wait"
    envelope = exec_json("--timeout", "60s", "--soft", "1s", "--idle", "2s", "--wind-down", "20s", *shell(script))
    assert envelope["ok"] and envelope["data"]["stdout"] == "a\nsaved\n"


def test_a_request_that_nobody_had_answered_when_the_command_ended_is_written_down():
    words = ("--timeout", "60s", "--soft", "500ms", "--overtime", "command=sleep 40,budget=50s,observer_timeout=45s")
    envelope = exec_json(*words, *shell("sleep 2"))
    (request,) = envelope["meta"]["overtime"]["requests"]
    assert envelope["ok"] and request["verdict"] == "unanswered" and request["took_ms"] > 0


def test_overtime_that_nobody_would_ever_be_asked_about_is_refused():
    envelope = exec_json("--timeout", "0", "--overtime", "3s", "--", "true")
    assert envelope["error"]["code"] == "ARG_ERROR" and "--soft" in envelope["error"]["message"]


def test_a_signal_reaches_the_command_as_it_is():
    words = [sys.executable, "-m", "shotclock", "exec", "--timeout", "60s", "--overtime", "30s"]
    script = "trap 'echo hurt; exit 1' INT; echo ready; while :; do sleep 0.05; done"
    with subprocess.Popen([*words, *shell(script)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as exec_:
        assert exec_.stdout is not None and exec_.stdout.readline() == "ready\n"
        exec_.send_signal(signal.SIGINT)
        stdout, stderr = exec_.communicate(timeout=WITHIN_S)
    assert exec_.returncode == 1 and stdout == "hurt\n"
    assert stderr.startswith("shotclock: CANCELLED: stopped by SIGINT")
