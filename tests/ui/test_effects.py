"""Every failure of an execution tells the truth about effects, on every surface: ui, serve ui and a workflow."""

import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from shotclock.calls.call import Outcome
from shotclock.core.envelope import Problem
from shotclock.core.errors import Ending, Failure, SideEffects
from shotclock.ui.client import RESULT_MARGIN_MS
from shotclock.ui.daemon import judge_result
from shotclock.ui.payload import read_execution
from tests.apps.server.client import MODERN, connected, envelope_in

from .conftest import act, execution
from .pages import Session, session_in

pytestmark = pytest.mark.usefixtures("warm_starts")
SHOTCLOCK = [sys.executable, "-m", "shotclock"]
WITHIN_S = 100.0
SEED = 20261119
CLICK, LOOK = ("click", "Buy"), ("read_text", "Said")
REFUSED = ("NODE_NOT_FOUND", "WAIT_TIMEOUT")


@contextmanager
def daemon_of(device: str) -> Iterator[subprocess.Popen[str]]:
    words = [sys.executable, "-m", "tests.ui.scripted_daemon", device]
    process = subprocess.Popen(
        words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2]
    )
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


def look_for(session: Session, resource_id: str) -> str:
    answer = session.run(act("read_text", "look") | {"params": {"matcher": {"resourceId": resource_id}}})
    text: str = answer["data"]["stepResults"][0]["data"]["text"]
    return text


@pytest.mark.slow
def test_an_order_that_was_partly_done_is_no_wait_in_vain(home: Path) -> None:
    with session_in(home) as session:
        assert session.run(session.open("/slow-input"))["ok"]
        choosing = {"matcher": {"textEquals": "Go"}, "paths": ["/etc/hostname"], "timeoutMs": 800}
        typing = {"matcher": {"role": "textbox"}, "text": "ms" * 200, "clear": False, "timeoutMs": 1500}
        for action_type, params, done in (("upload_file", choosing, "clicked"), ("enter_text", typing, "typed")):
            answer = session.run({"id": "it", "type": action_type, "params": params})
            assert look_for(session, "said") == done
            assert answer["error"]["code"] == "OPERATION_TIMEOUT", answer["error"]
            assert answer["meta"]["side_effects"] == "unknown" and not answer["error"]["retryable"]
        disabled = {"matcher": {"role": "combobox"}, "options": ["a"], "timeoutMs": 600}
        answer = session.run({"id": "it", "type": "select_option", "params": disabled})
        assert (answer["error"]["code"], answer["meta"]["side_effects"]) == ("WAIT_TIMEOUT", "none")


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
            numbers = (signal.SIGINT, signal.SIGTERM) if payload is cases[1] else (signal.SIGTERM,)
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


@pytest.mark.slow
def test_the_duration_and_the_timeout_in_an_answer_are_those_of_the_caller() -> None:
    with daemon_of("browser"):
        for ending in ("good", "close"):
            began = time.monotonic()
            meta = ask_command_line(case(f"begun {ending}", CLICK, timeout_ms=7000))["meta"]
            waited_ms = (time.monotonic() - began) * 1000
            assert meta["timeout_ms"] == 7000 and 0 < meta["remaining_ms"] <= 7000, meta
            assert waited_ms / 4 < meta["duration_ms"] <= waited_ms, (meta, waited_ms)


def test_a_device_process_that_is_gone_may_have_gone_on_after_its_last_event() -> None:
    payload = execution(act("read_text", "look", "A"), act("click", "go", "B"))
    begun = [{"event": "step", "id": "look", "actionType": "read_text", "index": 0}]
    outcome = Outcome(Ending.KILLED, Problem("WORKER_CRASHED", "SIGKILL"))
    assert judge_result(read_execution(payload), "browser", outcome, begun, []).side_effects is SideEffects.UNKNOWN
    never = Outcome(Ending.NOT_STARTED, Problem("SPAWN_FAILED", "no process"))
    assert judge_result(read_execution(payload), "browser", never, [], []).side_effects is SideEffects.NONE


def test_scrolls_that_did_not_find_their_node_were_done() -> None:
    payload = execution(act("scroll_until", "s", "End"))
    failed = [{"id": "s", "actionType": "scroll_until", "success": False, "data": {"code": "WAIT_TIMEOUT"}}]
    outcome = judge_result(
        read_execution(payload), "browser", Outcome(Ending.KILLED, Problem("TIMEOUT", "")), [], failed
    )
    assert outcome.side_effects is SideEffects.UNKNOWN


# --- real orders --------------------------------------------------------------------------------------------------

ORDER_PAGE = (
    b"""<title>Orders</title><button onclick="fetch('/order', {method: 'POST'})">Order</button><p id=said>Ready</p>"""
)
MOMENTS = [
    ("daemon", signal.SIGKILL),
    ("client", signal.SIGTERM),
    ("daemon", signal.SIGTERM),
    ("client", signal.SIGINT),
    ("daemon", signal.SIGSTOP),
]


class Orders(BaseHTTPRequestHandler):
    count = 0
    arrived = threading.Event()

    def do_POST(self) -> None:
        Orders.count += 1
        Orders.arrived.set()
        self._answer(b"ordered")

    def do_GET(self) -> None:
        self._answer(ORDER_PAGE)

    def _answer(self, body: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def shop() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Orders)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/"
    finally:
        server.shutdown()
        thread.join(WITHIN_S)
        server.server_close()


def wait_until_idle(session: Session) -> None:
    give_up_at = time.monotonic() + WITHIN_S
    while time.monotonic() < give_up_at:
        with suppress(Failure):  # of a daemon that is just ending
            if (session.status() or {}).get("holder") is None:
                return
        time.sleep(0.02)
    raise AssertionError("the device has been busy for too long")


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_the_effects_of_failures_at_a_random_moment_agree_with_the_orders_that_were_counted(
    home: Path, tmp_path: Path
) -> None:
    seed = random.SystemRandom().randrange(1 << 32)
    chance = random.Random(seed)
    order, pause = act("click", "x", "Order"), {"id": "x", "type": "sleep", "params": {"durationMs": 250}}
    actions = [{**each, "id": f"a{place}"} for place, each in enumerate([pause, order, pause, order, pause])]
    failures: set[tuple[str, str]] = set()
    with session_in(home) as session, shop() as url:
        for number in range(80):
            opened = session.run({"id": "open", "type": "open_uri", "params": {"uri": url}}, timeout_ms=30_000)
            assert opened["ok"], opened
            daemon = (session.status() or {})["pid"]
            target, sent = chance.choice(MOMENTS)
            surface = chance.choice(("ui exec", "run"))
            payload = execution(*actions, timeout_ms=2000)
            before = Orders.count
            Orders.arrived.clear()
            if surface == "run":
                (tmp_path / "flow.yaml").write_text(json.dumps({"steps": {"it": {"type": "ui", "execution": payload}}}))
                words = [*SHOTCLOCK, "run", "flow.yaml", "--json"]
            else:
                words = [*SHOTCLOCK, "ui", "exec", "--execution", json.dumps(payload)]
            process = subprocess.Popen(words, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
            if chance.random() < 0.5:
                assert Orders.arrived.wait(WITHIN_S)
                time.sleep(chance.uniform(0, 0.4))  # the random moment
            else:
                time.sleep(chance.uniform(0, 1.2 if surface == "ui exec" else 2.5))
            with suppress(ProcessLookupError):
                os.kill(process.pid if target == "client" else daemon, sent)
            out, _ = process.communicate(timeout=WITHIN_S)
            if sent == signal.SIGSTOP:
                with suppress(ProcessLookupError):
                    os.kill(daemon, signal.SIGCONT)
            wait_until_idle(session)
            ordered = Orders.count - before
            where = f"seed {seed}, round {number}: {surface}, {sent.name} to the {target}, {ordered} orders: {out!r}"
            if not out:  # the signal came before it listened for any
                assert target == "client" and ordered == 0, where
                continue
            answer = json.loads(out)
            effects, error = answer["meta"]["side_effects"], answer["error"]
            if surface == "run":
                step = answer["data"]["steps"]["it"] if answer["data"] else {}
                assert step.get("side_effects", "none") == effects, where
            failures |= {(error["code"], effects)} if error else set()
            assert effects != "none" or ordered == 0, where
            assert effects not in ("complete", "partial") or ordered, where
            assert error is None or effects == "none" or not error["retryable"], where
            assert error is not None or (ordered == 2 and effects == "complete"), where
    assert failures, seed
