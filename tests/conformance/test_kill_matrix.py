"""Published servers behind `shotclock wrap`, killed and misbehaving: answers on time, no orphans, and a next call.

Deaths are those of the published server itself. Mischief that it does not have is injected by `misbehaving.py`.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.conformance.listening import SHOTCLOCK
from tests.conformance.published_servers import TRIED, PublishedServer, prepare
from tests.conformance.results import record
from tests.wrap.client import ENDED_WITHIN_S, ENVELOPE, GREETING, RawClient, connected

pytestmark = pytest.mark.timeout(240)
each_server = pytest.mark.parametrize("server", TRIED, ids=lambda server: server.name)
TABLE = "the kill matrix"
MARK = "SHOTCLOCK_KILL_MATRIX"
SHIM = [sys.executable, str(Path(__file__).parents[1] / "wrap" / "misbehaving.py")]
GRACE_S = 1.0
START_UP_S = 6.0  # a browser's server on a busy machine; waited for once
SLACK_S = 10.0  # for a busy machine; the table has the time that was seen
START_S = 60.0
PEAK_LIMIT_KB = 30_000
POLL_S = 0.02
FLOOD = 20_000  # as in misbehaving.py

# A client that can be killed: it starts the wrap, and passes lines in both directions.
PUMP = """
import subprocess, sys, threading
process = subprocess.Popen(sys.argv[1:], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
def pump(source, target):
    for line in source:
        target.write(line)
        target.flush()
threading.Thread(target=pump, args=(process.stdout, sys.stdout.buffer), daemon=True).start()
pump(sys.stdin.buffer, process.stdin)
"""


class Case:
    """One server in a folder of its own. All of its processes carry a mark in their environment."""

    def __init__(self, server: PublishedServer, place: Path, site: str, mark: str) -> None:
        self.server, self.place, self.mark = server, place, mark
        plan = server.plan([], place, site, full=False)
        _, self.tool, self.arguments = next(
            step for step in plan["steps"] if step[0] == "call" and step[1] == server.probe
        )
        self.argv = server.argv(place)

    def wrap(self, *options: str, timeout_s: float | None = None) -> list[str]:
        timeout_s = self.server.timeout_s if timeout_s is None else timeout_s
        limits = ["--timeout", f"{timeout_s}s", "--grace", f"{GRACE_S}s", "--shutdown", "2s", *options]
        return [SHOTCLOCK, "wrap", *limits, "--"]

    def marked(self) -> list[tuple[int, list[str]]]:
        """Return the living processes of this case, with their command lines."""
        found = []
        for name in filter(str.isdecimal, os.listdir("/proc")):
            try:
                environ = Path(f"/proc/{name}/environ").read_bytes().split(b"\0")
                state = Path(f"/proc/{name}/stat").read_text().rpartition(")")[2].split()[0]
                words = Path(f"/proc/{name}/cmdline").read_text("utf-8", "replace").split("\0")
            except OSError:
                continue
            if f"{MARK}={self.mark}".encode() in environ and state not in "ZX":
                found.append((int(name), words))
        return found

    def server_pid(self) -> int:
        """Return the process of the published server."""
        program = os.path.basename(self.argv[-1 if self.server.name == "memory" else 0])
        pids = [pid for pid, words in self.marked() if any(word.endswith(program) for word in words[:2])]
        assert len(pids) == 1, self.marked()
        return pids[0]

    def gone_after_s(self) -> float:
        """Wait until no process is left, and return the time."""
        began = time.monotonic()
        while left := self.marked():
            assert time.monotonic() < began + ENDED_WITHIN_S, f"left behind: {left}"
            time.sleep(POLL_S)
        return time.monotonic() - began

    def call(self, client: RawClient, mischief: str = "") -> int:
        meta = {"mischief": mischief} if mischief else {}
        id: int = client.request("tools/call", {"name": self.tool, "arguments": self.arguments, "_meta": meta})
        return id

    def check_works(self, client: RawClient) -> None:
        result = client.receive(self.call(client), START_S)["result"]
        assert not result.get("isError"), result

    def note(self, row: str, cell: str) -> None:
        record(TABLE, row, self.server.name, cell)


@pytest.fixture
def case(server: PublishedServer, tmp_path: Path, site: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Case]:
    place, mark = tmp_path / "place", uuid.uuid4().hex
    prepare(place)
    monkeypatch.setenv(MARK, mark)
    each = Case(server, place, site, mark)
    yield each
    for pid, _ in each.marked():
        os.kill(pid, signal.SIGKILL)


def failure(answer: Any) -> Any:
    """Return the envelope of a failed request."""
    if "error" in answer:
        return answer["error"]["data"][ENVELOPE]
    assert answer["result"]["isError"], answer
    return answer["result"]["_meta"][ENVELOPE]


def answers_to(client: RawClient, id: int) -> int:
    messages = [json.loads(line) for line in client.lines]
    return sum("method" not in message and message["id"] == id for message in messages)


# --- deaths


@pytest.mark.parametrize("death", ["stdin closed", "SIGKILL of the client", "SIGKILL of the wrap"])
@each_server
def test_nothing_outlives_a_death(server: PublishedServer, death: str, case: Case) -> None:
    is_client = death == "SIGKILL of the client"
    argv = [*([sys.executable, "-c", PUMP] if is_client else []), *case.wrap(), *case.argv]
    with connected(argv, subprocess.DEVNULL) as client:
        client.greet()
        case.check_works(client)
        assert len(case.marked()) >= 3
        match death:
            case "stdin closed":
                assert client.process.stdin is not None
                client.process.stdin.close()
            case _:
                client.process.kill()
        code = client.process.wait(ENDED_WITHIN_S)
        gone_s = case.gone_after_s()
        assert code == (0 if death == "stdin closed" else -signal.SIGKILL)
    case.note(death, f"gone in {gone_s:.1f} s")


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["SIGKILL", "SIGSTOP"])
@each_server
def test_a_server_that_a_signal_has_hit_is_replaced(
    server: PublishedServer, number: signal.Signals, case: Case
) -> None:
    with connected([*case.wrap(), *case.argv], subprocess.DEVNULL) as client:
        client.greet()
        case.check_works(client)
        pid = case.server_pid()
        os.kill(pid, number)
        began = time.monotonic()
        answer = client.receive(case.call(client), server.timeout_s + GRACE_S + SLACK_S)
        took_s = time.monotonic() - began
        if number is signal.SIGSTOP:
            assert failure(answer)["error"]["code"] in ("HOST_REPLACED", "TIMEOUT")
        elif answer["result"].get("isError"):  # it may have reached the server just before the kill
            assert failure(answer)["error"]["code"] == "CONNECTION_LOST"
        case.check_works(client)
        assert case.server_pid() != pid
    case.gone_after_s()
    case.note(f"{number.name} of the server", f"answered after {took_s:.1f} s")


# --- mischief


@pytest.mark.parametrize("mischief", ["big", "flood", "garbage", "twice", "other id", "late", "daemon", "hang", "deaf"])
@each_server
def test_mischief_of_a_call_does_no_harm(server: PublishedServer, mischief: str, case: Case) -> None:
    titles = {
        "big": "60 MB result",
        "flood": "20,000 notifications",
        "garbage": "garbage on stdout",
        "twice": "answers twice",
        "other id": "answers under another id",
        "late": "answers late",
        "daemon": "forks a daemon",
        "hang": "never answers a call",
        "deaf": "ignores cancel and ping",
    }
    is_hung = mischief in ("hang", "late", "deaf")
    timeout_s = server.timeout_s if is_hung else START_S
    with connected([*case.wrap(timeout_s=timeout_s), *SHIM, "--", *case.argv], subprocess.DEVNULL) as client:
        client.greet()
        case.check_works(client)
        first_pid = case.server_pid()
        before = len(case.marked())
        began = time.monotonic()
        id = case.call(client, mischief)
        answer = client.receive(id, timeout_s + GRACE_S + SLACK_S)
        took_s = time.monotonic() - began
        cell = f"answered after {took_s:.1f} s"
        if is_hung:
            assert failure(answer)["error"]["code"] == "TIMEOUT"
        elif mischief == "big":
            assert failure(answer)["error"]["code"] == "RESULT_TOO_LARGE"
        else:
            assert not answer["result"].get("isError")
        case.check_works(client)
        assert answers_to(client, id) == 1
        assert (case.server_pid() == first_pid) is (mischief != "deaf")
        match mischief:
            case "big":
                status = Path(f"/proc/{client.process.pid}/status").read_text()
                peak_kb = int(status.split("VmHWM:")[1].split()[0])
                assert peak_kb <= PEAK_LIMIT_KB
                cell = f"refused, {peak_kb // 1000} MB"
            case "flood":
                assert sum(b'"flood"' in line for line in client.lines) == FLOOD
                cell = "passed"
            case "garbage" | "twice" | "other id":
                cell = "one answer"
            case "daemon":
                assert len(case.marked()) > before
    gone_s = case.gone_after_s()
    case.note(titles[mischief], f"gone in {gone_s:.1f} s" if mischief == "daemon" else cell)


@each_server
def test_a_server_that_never_answers_initialize_is_replaced(server: PublishedServer, case: Case) -> None:
    shim = [*SHIM, "--mute", "initialize", "--once", str(case.place / "muted"), "--"]
    with connected([*case.wrap("--start-up", f"{START_UP_S}s"), *shim, *case.argv], subprocess.DEVNULL) as client:
        began = time.monotonic()
        answer = client.receive(client.request("initialize", GREETING), START_UP_S + GRACE_S + SLACK_S)
        took_s = time.monotonic() - began
        failure(answer)
        client.greet()
        case.check_works(client)
    case.gone_after_s()
    case.note("never answers `initialize`", f"answered after {took_s:.1f} s")


@each_server
def test_a_server_that_never_answers_tools_list_stays_usable(server: PublishedServer, case: Case) -> None:
    shim = [*SHIM, "--mute", "tools/list", "--once", str(case.place / "muted"), "--"]
    with connected([*case.wrap("--list", f"{server.timeout_s}s"), *shim, *case.argv], subprocess.DEVNULL) as client:
        client.greet()
        began = time.monotonic()
        answer = client.receive(client.request("tools/list"), server.timeout_s + GRACE_S + SLACK_S)
        took_s = time.monotonic() - began
        failure(answer)
        assert client.receive(client.request("tools/list"), START_S)["result"]["tools"]
        case.check_works(client)
    case.gone_after_s()
    case.note("never answers `tools/list`", f"answered after {took_s:.1f} s")
