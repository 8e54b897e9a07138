"""Every failure of an execution tells the truth about effects, on every surface: ui, serve ui and a workflow."""

import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from shotclock.core.envelope import Problem
from shotclock.core.errors import Ending, SideEffects
from shotclock.runtime.call import Outcome
from shotclock.ui.client import RESULT_MARGIN_MS
from shotclock.ui.daemon import judge_result
from shotclock.ui.payload import read_execution
from tests.server.client import MODERN, connected, envelope_in

from .conftest import act, execution

SHOTCLOCK = [sys.executable, "-m", "shotclock"]
WITHIN_S = 100.0
SEED = 20261119
CLICK, LOOK = ("click", "Buy"), ("read_text", "Said")
REFUSED = ("NODE_NOT_FOUND", "WAIT_TIMEOUT")


@contextmanager
def daemon_of(device: str) -> Iterator[subprocess.Popen[str]]:
    words = [sys.executable, "-m", "tests.ui.scripted_daemon", device]
    process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2])
    assert process.stdin is not None and process.stdout is not None
    try:
        assert process.stdout.readline() == "ready\n"
        yield process
    finally:
        process.kill()
        process.wait(WITHIN_S)
        process.stdin.close()
        process.stdout.close()


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SHOTCLOCK_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def case(script: str, *actions: tuple[str, str], mode: str = "direct", timeout_ms: int = 1000) -> dict[str, Any]:
    made = [act(kind, f"a{place}", text) for place, (kind, text) in enumerate(actions)]
    return {**execution(*made, timeout_ms=timeout_ms, mode=mode), "taskId": script}


def random_case(chance: random.Random) -> dict[str, Any]:
    actions = [chance.choice((CLICK, LOOK)) for _ in range(chance.randint(1, 3))]
    mode = chance.choice(("direct", "best_effort"))
    words = ["opening"] * chance.randint(0, 1) + ["begun"]
    for place in range(chance.randint(0, len(actions))):
        words.append(f"step:{place}")
        words.append(chance.choice((f"ok:{place}", f"ok:{place}", f"fail:{place}:{chance.choice(REFUSED)}", "")))
        if not words[-1] or (mode == "direct" and words[-1].startswith("fail")):
            break
    ending = chance.choice(("close", "garbage", "odd"))
    return case(" ".join(filter(None, [*words, ending])), *actions, mode=mode)


def expected_effects(payload: dict[str, Any]) -> set[str]:
    """Return what an answer may say, from what the daemon said and what it may have done since."""
    words = payload["taskId"].split()
    done = [payload["actions"][int(word[3:])]["type"] for word in words if word.startswith("ok:")]
    failed = [word for word in words if word.startswith("fail:")]
    unseen = payload["actions"][len(done) + len(failed) :]
    has_stopped = bool(failed) and payload["mode"] == "direct"
    if "begun" in words and not has_stopped and any(each["type"] == "click" for each in unseen):
        return {"unknown"}
    if "click" not in done:
        return {"none"}
    return {"partial", "unknown"} if failed or unseen else {"partial", "unknown", "complete"}


def check(surface: str, payload: dict[str, Any], answer: Any) -> None:
    where = f"{surface}, {payload['taskId']!r}, {[each['type'] for each in payload['actions']]}: {answer}"
    error = answer["error"]
    assert error is not None, where
    effects = answer["meta"]["side_effects"]
    assert effects in expected_effects(payload), where
    assert effects == "none" or error["retryable"] is False, where


def ask_command_line(payload: dict[str, Any], device: str = "browser") -> Any:
    words = [*SHOTCLOCK, "ui", "exec", "--execution", json.dumps(payload), "--device", device]
    ran = subprocess.run(words, capture_output=True, timeout=WITHIN_S)
    return json.loads(ran.stdout)


async def ask_server(asked: list[tuple[dict[str, Any], str]]) -> list[Any]:
    async with connected("stdio", MODERN, target="ui") as (client, _):
        calls = [client.call_tool("ui_execute", {"execution": each, "device": device}) for each, device in asked]
        return [envelope_in(each) for each in await asyncio.gather(*calls)]


def ask_workflow(asked: list[tuple[dict[str, Any], str]], folder: Path) -> list[Any]:
    steps = {
        f"s{place}": {"type": "ui", "device": device, "execution": payload}
        for place, (payload, device) in enumerate(asked)
    }
    (folder / "flow.yaml").write_text(json.dumps({"steps": steps}))
    words = [*SHOTCLOCK, "run", "flow.yaml", "--json"]
    ran = subprocess.run(words, cwd=folder, capture_output=True, timeout=WITHIN_S)
    answer = json.loads(ran.stdout)["data"]["steps"]
    return [answer[f"s{place}"] for place in range(len(asked))]


@pytest.mark.slow
def test_no_failure_after_a_message_that_may_have_an_effect_says_none_on_any_surface(tmp_path: Path) -> None:
    chance = random.Random(SEED)
    cases = [
        case("begun step:0 ok:0 close", CLICK),
        case("begun step:0 ok:0 step:1 close", CLICK, LOOK),
        case("begun step:0 close", CLICK),
        case("begun close", LOOK, CLICK),
        case("begun garbage", CLICK),
        *(random_case(chance) for _ in range(7)),
    ]
    silent = case("begun step:0 ok:0 step:1 silent", CLICK, LOOK)
    devices = [f"cdp:http://127.0.0.1:{port}" for port in (1, 2, 3)]  # a silent one is killed by its client
    with daemon_of("browser"), daemon_of(devices[0]), daemon_of(devices[1]), daemon_of(devices[2]):
        with ThreadPoolExecutor(4) as pool:
            slow = pool.submit(ask_command_line, silent, devices[0])
            for payload, answer in zip(cases, pool.map(ask_command_line, cases), strict=True):
                check("ui exec", payload, answer)
            check("ui exec", silent, slow.result())
        asked = [(each, "browser") for each in cases]
        answers = asyncio.run(asyncio.wait_for(ask_server([*asked, (silent, devices[1])]), WITHIN_S))
        for payload, answer in zip([*cases, silent], answers, strict=True):
            check("serve ui", payload, answer)
        answers = ask_workflow([*asked, (silent, devices[2])], tmp_path)
        for payload, answer in zip([*cases, silent], answers, strict=True):
            check("workflow", payload, {"error": answer["error"], "meta": answer})


@pytest.mark.slow
def test_a_command_that_is_stopped_by_signals_tells_the_effects(tmp_path: Path) -> None:
    cases = [
        case("begun step:0 ok:0 step:1 silent", CLICK, LOOK),
        case("begun step:0 silent", CLICK),
        case("begun step:0 silent", LOOK, CLICK),
        case("begun step:0 silent", LOOK),
    ]
    with daemon_of("browser") as daemon:
        assert daemon.stdout is not None
        for payload in cases:
            for numbers in ((signal.SIGTERM,), (signal.SIGINT, signal.SIGTERM)):
                payload["timeoutMs"] = 30_000
                words = [*SHOTCLOCK, "ui", "exec", "--execution", json.dumps(payload)]
                process = subprocess.Popen(words, stdout=subprocess.PIPE)
                assert daemon.stdout.readline().strip() == payload["commandId"]
                for number in numbers:
                    process.send_signal(number)
                out, _ = process.communicate(timeout=WITHIN_S)
                answer = json.loads(out)
                assert answer["error"]["code"] == "CANCELLED", answer
                check("ui exec", payload, answer)


@pytest.mark.slow
def test_a_client_that_was_stopped_past_its_limit_reads_a_long_answer_that_is_there(tmp_path: Path) -> None:
    payload = case("begun silent good", CLICK)
    with daemon_of("browser") as daemon:
        assert daemon.stdout is not None and daemon.stdin is not None
        words = [*SHOTCLOCK, "ui", "exec", "--execution", json.dumps(payload)]
        process = subprocess.Popen(words, stdout=subprocess.PIPE)
        daemon.stdout.readline()
        began = time.monotonic()
        process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED)
        daemon.stdin.write("go on\n")
        daemon.stdin.flush()
        assert daemon.stdout.readline() == "answered\n"
        time.sleep(began + (payload["timeoutMs"] + RESULT_MARGIN_MS) / 1000 + 0.1 - time.monotonic())
        process.send_signal(signal.SIGCONT)
        out, _ = process.communicate(timeout=WITHIN_S)
        assert len(json.loads(out)["data"]["text"]) == 100_000 and daemon.poll() is None


def test_a_device_process_that_is_gone_may_have_gone_on_after_its_last_event() -> None:
    payload = execution(act("read_text", "look", "A"), act("click", "go", "B"))
    begun = [{"event": "step", "id": "look", "actionType": "read_text", "index": 0}]
    outcome = Outcome(Ending.KILLED, Problem("WORKER_CRASHED", "SIGKILL"))
    assert judge_result(read_execution(payload), "browser", outcome, begun, []).side_effects is SideEffects.UNKNOWN


def test_scrolls_that_did_not_find_their_node_were_done() -> None:
    payload = execution(act("scroll_until", "s", "End"))
    failed = [{"id": "s", "actionType": "scroll_until", "success": False, "data": {"code": "WAIT_TIMEOUT"}}]
    outcome = judge_result(read_execution(payload), "browser", Outcome(Ending.KILLED, Problem("TIMEOUT", "")), [], failed)
    assert outcome.side_effects is SideEffects.UNKNOWN
