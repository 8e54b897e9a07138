"""Workers and engines that are killed: no step is lost, none runs twice at once, and no deadline moves."""

import asyncio
import contextlib
import json
import os
import random
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from math import inf
from pathlib import Path
from typing import Any

import psutil
import pytest
from temporalio.api.common.v1 import WorkflowExecution
from temporalio.api.workflowservice.v1 import PauseActivityRequest

from shotclock.temporal._messages import STEP_ACTIVITY
from shotclock.temporal.connection import connect, read_address
from tests.flows.steps.servers import Connection, Server
from tests.processes import is_running
from tests.temporal.conftest import WITHIN_S, Cluster, Program, Runs, steps_of, wait_until
from tests.temporal.test_replay import fetch, replay

pytestmark = pytest.mark.slow

HEARTBEAT_S = 3.0
# Runs beside each other, each with a program that waits for it.
AT_ONCE = 8
STUBBORN = (
    "trap '' TERM; date +%s.%N >> began; setsid sleep 300 & echo $! $$ >> pids; "
    "while :; do date +%s.%N >> alive; sleep 0.1; done"
)
STUBBORN_FLOW = f"""
    timeout: 60
    steps:
      stubborn: {{type: command, exec: "{STUBBORN}", timeout: 12, grace: 200ms, idempotent: true}}
      after: {{type: command, exec: "touch after", depends_on: [stubborn]}}
    """


class Workers:
    """Workers of a queue of the test's own, to be killed."""

    def __init__(self, cluster: Cluster, queue: str) -> None:
        self.cluster, self.queue = cluster, queue
        self.alive: list[Program] = []

    def start(self, *options: str) -> Program:
        self.alive.append(worker := self.cluster.start_worker("--queue", self.queue, *options))
        return worker

    def close(self) -> None:
        for worker in self.alive:
            worker.kill()


@pytest.fixture
def workers(cluster: Cluster, tmp_path: Path) -> Iterator[Workers]:
    made = Workers(cluster, f"q-{tmp_path.name}")
    yield made
    made.close()


def began_at(runs: Runs, times: int) -> list[float]:
    return [float(line) for line in runs.wait_for("began", times)]


def pids_in(runs: Runs) -> list[int]:
    file = runs.folder / "pids"  # written after it has said that it began
    return [int(pid) for pid in file.read_text().split()] if file.exists() else []


def check_bounds(runs: Runs, envelope: dict[str, Any], killed_at: float | None, limit_s: int = 12) -> None:
    """By what the step has written itself: taken over in time, and stopped at its first deadline, whoever had it."""
    first, second = began_at(runs, 2)
    if killed_at is not None:
        assert second - killed_at <= HEARTBEAT_S + 1.0
    assert -0.5 <= float((runs.folder / "alive").read_text().split()[-1]) - first - limit_s <= 0.5
    step = envelope["data"]["steps"]["stubborn"]
    assert steps_of(envelope) == {"stubborn": "timed_out", "after": "skipped"}, envelope
    assert step["error"]["code"] == "TIMEOUT" and step["attempts"] == 2 and step["side_effects"] == "unknown"
    assert step["error"]["context"]["clock"]["limit_ms"] == limit_s * 1000
    assert -100 <= step["error"]["context"]["clock"]["elapsed_ms"] - limit_s * 1000 <= 500
    assert not any(map(is_running, pids_in(runs))) and not (runs.folder / "after").exists()


def test_a_step_whose_worker_is_killed_goes_on_elsewhere_until_its_first_deadline(runs: Runs, workers: Workers) -> None:
    both = [workers.start(), workers.start()]  # neither is started on the clock of the step
    running = runs.start(STUBBORN_FLOW, *("--queue", workers.queue, "--heartbeat", f"{HEARTBEAT_S}s"))
    (first,) = began_at(runs, 1)
    pids = wait_until(lambda: len(pids_in(runs)) == 2 and pids_in(runs), "both processes")
    above = {each.pid for each in psutil.Process(pids[1]).parents()}
    (its_worker,) = [worker for worker in both if worker.process.pid in above]
    wait_until(lambda: time.time() - first > 2 * HEARTBEAT_S / 8 + 0.5, "a heartbeat or two")
    killed_at = time.time()
    its_worker.kill()
    wait_until(lambda: not any(map(is_running, pids)), "the end of what its worker had started", HEARTBEAT_S)
    code, envelope = running.ended()
    assert code == 3
    check_bounds(runs, envelope, killed_at)


def test_a_step_that_is_much_longer_than_the_heartbeat_comes_to_its_end(runs: Runs, workers: Workers) -> None:
    """The SDK gives an activity up by itself five seconds after a heartbeat was due that it has not sent itself."""
    workers.start()
    running = runs.start(
        """
        timeout: 60
        steps: {long: {type: command, exec: "date >> began; sleep 8; echo done", timeout: 50}}
        """,
        *("--queue", workers.queue, "--heartbeat", "2s"),
    )
    code, envelope = running.ended()
    assert (code, envelope["data"]["steps"]["long"]["output"]) == (0, "done"), envelope
    assert len(runs.wait_for("began")) == 1


def test_the_time_of_a_step_goes_on_while_it_waits_for_another_worker(runs: Runs, workers: Workers) -> None:
    workers.start()
    gpu = f"{workers.queue}-gpu"
    limit_s = 18  # of which another worker may take fourteen to start, beside other tests
    flow = STUBBORN_FLOW.replace("idempotent: true", f"idempotent: true, runs_on: {gpu}")
    flow = flow.replace("timeout: 12", f"timeout: {limit_s}")
    lost = workers.cluster.start_worker("--queue", gpu)
    try:
        running = runs.start(flow, *("--queue", workers.queue, "--heartbeat", f"{HEARTBEAT_S}s"))
        (first,) = began_at(runs, 1)
    finally:
        lost.kill()
    wait_until(lambda: time.time() - first > HEARTBEAT_S + 1, "the engine to miss it, and nobody to be there")
    other = workers.cluster.start_worker("--queue", gpu)
    try:
        code, envelope = running.ended()
    finally:
        other.kill()
    assert code == 3
    check_bounds(runs, envelope, None, limit_s)


def test_a_step_that_may_not_run_twice_is_interrupted_when_its_worker_is_killed(runs: Runs, workers: Workers) -> None:
    workers.start()
    running = runs.start(
        """
        timeout: 60
        steps:
          once: {type: command, exec: "echo x >> ran; sleep 300"}
          after: {type: command, exec: "touch after", depends_on: [once]}
          other: {type: command, exec: "while test ! -e ran; do sleep 0.2; done; echo other", idempotent: true}
        """,
        *("--queue", workers.queue, "--heartbeat", "1500ms"),
    )
    runs.wait_for("ran")
    workers.start()
    workers.alive[0].kill()
    code, envelope = running.ended()
    once = envelope["data"]["steps"]["once"]
    assert code == 3 and steps_of(envelope) == {"once": "interrupted", "after": "skipped", "other": "succeeded"}
    assert once["error"]["code"] == "INTERRUPTED" and once["side_effects"] == "unknown" and once["attempts"] == 1
    assert not once["error"]["retryable"] and envelope["meta"]["side_effects"] == "unknown"
    assert (runs.folder / "ran").read_text() == "x\n"


def test_a_worker_that_is_told_to_leave_hands_its_steps_on(runs: Runs, workers: Workers) -> None:
    workers.start("--drain", "0s")
    running = runs.start(
        """
        timeout: 60
        steps:
          again:
            type: command
            exec: "echo x >> ran; while test ! -e go; do sleep 0.2; done; echo done"
            idempotent: true
        """,
        *("--queue", workers.queue, "--heartbeat", "20s"),
    )
    runs.wait_for("ran")
    workers.start()
    workers.alive[0].process.send_signal(signal.SIGTERM)
    runs.wait_for("ran", 2)  # long before a heartbeat would be missed
    (runs.folder / "go").touch()
    code, envelope = running.ended()
    assert code == 0 and envelope["data"]["steps"]["again"]["output"] == "done", envelope
    code, left = workers.alive[0].ended()
    assert code == 0 and left["data"] == {"stopped_by": "SIGTERM"}


def test_no_worker_means_no_step_and_the_run_still_ends(runs: Runs, workers: Workers) -> None:
    workers.start()
    code, envelope = runs.run(
        """
        timeout: 8
        steps:
          here: {type: command, exec: "echo here"}
          nowhere: {type: command, exec: "touch ran", runs_on: no-such-queue, depends_on: [here]}
        """,
        *("--queue", workers.queue),
    )
    nowhere = envelope["data"]["steps"]["nowhere"]
    assert code == 10 and steps_of(envelope) == {"here": "succeeded", "nowhere": "timed_out"}, envelope
    assert nowhere["error"]["code"] == "NO_TIME_LEFT" and nowhere["ending"] == "not_started"
    assert nowhere["side_effects"] == "none" and not (runs.folder / "ran").exists()
    (noted,) = [each["message"] for each in envelope["warnings"] if each["code"] == "NO_WORKER"]
    assert "'no-such-queue' of step nowhere; `shotclock worker --on" in noted


def test_the_engine_may_be_killed_and_nothing_is_lost(own_cluster: Cluster, tmp_path: Path) -> None:
    engine = own_cluster.start_engine()
    own_cluster.start_worker()
    runs = Runs(tmp_path, own_cluster.url)
    try:
        running = runs.start(
            """
            timeout: 60
            steps:
              works: {type: command, exec: "echo x >> ran; while test ! -e go; do sleep 0.2; done; echo done"}
              ask: {type: human-input, prompt: "Well?"}
              slow: {type: command, exec: "date +%s.%N > began; sleep 300", timeout: 20, grace: 100ms}
              after: {type: command, exec: "echo {{ outputs.works }} {{ outputs.ask }}", depends_on: [works, ask]}
            """,
            *("--budget", "0s", "--heartbeat", "16s", "--run-id", "survives"),
        )
        runs.wait_for("ran")
        (began,) = [float(line) for line in runs.wait_for("began")]

        def asked() -> list[str]:
            _, listed = runs.call("inbox", "list")
            return [each["id"] for each in listed["data"]["proposals"]]

        (proposal,) = wait_until(asked, "the question")
        engine.kill()
        own_cluster.start_engine()
        (runs.folder / "go").touch()
        code, decided = runs.call("inbox", "approve", proposal, "--answer", "yes")
        assert code == 0, decided
        code, envelope = running.ended()
        ended = time.time()
        assert code == 3 and steps_of(envelope) == {
            "works": "succeeded", "ask": "succeeded", "slow": "timed_out", "after": "succeeded"
        }, envelope  # fmt: skip
        assert envelope["data"]["steps"]["after"]["output"] == "done yes"
        assert (runs.folder / "ran").read_text() == "x\n", "it ran once"
        assert envelope["data"]["steps"]["slow"]["error"]["context"]["clock"]["elapsed_ms"] <= 20_500
        assert ended - began <= 25
    finally:
        runs.close()


# Tells which worker has it: the parent of its supervisor's parent. A worker that is killed this very moment is none.
AUDITED = (
    "read -r _ _ _ zygote _ < /proc/$PPID/stat; read -r _ _ _ worker _ < /proc/$zygote/stat; "
    "echo begun STEP $worker $(date +%s.%N) >> LOG; sleep 0.4; echo ended STEP $worker $(date +%s.%N) >> LOG"
)
# What a worker that is given a step may take to begin it, beside all the others. Killed before, it has not begun it.
BEGIN_S = 3.0


@dataclass
class Audit:
    """What one run has done, by three who do not know of each other: its steps, the engine, and who killed workers."""

    log: list[list[str]]
    given: dict[str, list[tuple[int, float]]]
    """By step: to which workers the engine has given it, and when."""
    killed: dict[int, float]

    def times(self, what: str, step: str) -> dict[int, list[float]]:
        """When the copy of each worker has said this."""
        found: dict[int, list[float]] = {}
        for did, name, written, at in self.log:
            if (did, name) == (what, step):
                worker, tries = int(written), [worker for worker, _ in self.given[step]]
                if worker not in tries:  # its worker was being killed, and not its parent's parent any more
                    (worker,) = [each for each in tries if 0 <= float(at) - self.killed.get(each, 0) <= 1]
                found.setdefault(worker, []).append(float(at))
        return found

    def check(self, step: str, told: dict[str, Any], *, may_repeat: bool) -> bool:
        """Check all that is known of a step which the run has come to, and return whether it has succeeded."""
        tries, begun, ended = self.given[step], self.times("begun", step), self.times("ended", step)
        assert told["attempts"] == len(tries), "each try that the engine has given away is counted, and no other"
        assert may_repeat or len(tries) == 1, "given away twice"
        assert all(len(times) == 1 for times in (*begun.values(), *ended.values())), "one try has run twice"
        lost = tries
        if told["status"] == "interrupted":
            assert not may_repeat and told["error"]["code"] == "INTERRUPTED" and told["side_effects"] == "unknown"
        else:
            *lost, (last, _) = tries
            assert told["status"] == "succeeded" and last in begun and last in ended, "succeeded, and has not run"
        for worker, given_at in lost:
            assert given_at <= self.killed.get(worker, 0), "lost without a kill"
            if worker not in begun:  # the one start that may be missing: killed between the engine's word and the step
                assert self.killed[worker] - given_at <= BEGIN_S, "given away, and neither begun nor killed at once"
        for (worker, _), (following, _) in pairwise(tries):
            assert min(begun.get(following, [inf])) > self.killed[worker], "two copies at once"
        return told["status"] == "succeeded"


def read_given(cluster: Cluster, run_id: str) -> dict[str, list[tuple[int, float]]]:
    """Which worker each step was given to, and when, by the history of the run."""

    async def read() -> dict[str, list[tuple[int, float]]]:
        client = await connect(read_address(cluster.url, {}))
        named: dict[int, str] = {}
        given: dict[str, list[tuple[int, float]]] = {}
        async for event in client.get_workflow_handle(run_id).fetch_history_events():
            if event.HasField("activity_task_scheduled_event_attributes"):
                named[event.event_id] = json.loads(event.user_metadata.summary.data)
            if event.HasField("activity_task_started_event_attributes"):
                started = event.activity_task_started_event_attributes
                pid = int(started.identity.partition("@")[0])
                at = event.event_time.ToNanoseconds() / 1e9
                given.setdefault(named[started.scheduled_event_id], []).append((pid, at))
            if event.HasField("activity_task_completed_event_attributes"):
                completed = event.activity_task_completed_event_attributes
                if b'"is_unbegun":true' in completed.result.payloads[0].data:  # it was given back as it came
                    given[named[completed.scheduled_event_id]].pop()
        return given

    return asyncio.run(asyncio.wait_for(read(), 60))


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_runs_end_as_they_should_while_workers_are_killed(runs: Runs, workers: Workers) -> None:
    """Every run has its expected end, by an audit of what ran how often: each try that the engine gave away has begun
    once, unless its worker was killed right then; a step is repeated or interrupted only where its worker was killed,
    one that may not be repeated was given away once; and nothing behind an interrupted one has run."""
    count, steps, kills = 100, 10, 10
    for _ in range(3):
        workers.start()
    lines = [f"timeout: {60 + 6 * count}", "inputs: {n: {type: number}, gate: {type: string}}", "steps:"]
    for number in range(steps):
        waits = f", depends_on: [s{number - 1}]" if number else ""
        kind = "idempotent: true" if number % 3 else "idempotent: false"
        script = AUDITED.replace("STEP", f"s{number}").replace("LOG", "log{{ inputs.n }}")
        if number == steps - 1:  # not over before the last kill, however long it took to start another worker
            script = script.replace("sleep 0.4", "while test ! -e {{ inputs.gate }}; do sleep 0.1; done")
        lines.append(f'  s{number}: {{type: command, exec: "{script}", {kind}{waits}}}')
    runs.write("\n".join(lines))
    seed = random.randrange(1_000_000)
    pick = random.Random(seed)
    # Long enough that a worker which lives is heard of on a machine that has too much to do.
    common = ("--queue", workers.queue, "--heartbeat", "6s", "--json")
    waiting, running = list(range(count)), dict[int, Program]()
    ended: dict[int, dict[str, Any]] = {}
    killed: dict[int, float] = {}
    next_kill_at = time.monotonic() + 0.5
    give_up_at = time.monotonic() + 60 + 8 * count
    while len(ended) < count:
        assert time.monotonic() < give_up_at, f"seed {seed}: {count - len(ended)} runs have not ended"
        for number in [number for number, program in running.items() if program.process.poll() is not None]:
            ended[number] = running.pop(number).ended()[1]
        while waiting and len(running) < AT_ONCE:
            number = waiting.pop(0)
            gate = "all_killed" if number >= count - AT_ONCE else "flow.yaml"  # which is there
            named = ("--input", f"n={number}", "--input", f"gate={gate}", "--run-id", f"{workers.queue}-{number}")
            running[number] = runs.start(None, "flow.yaml", *named, *common)
        # All along the way: the next one once its part of the runs has ended.
        is_due = len(ended) * kills >= len(killed) * (count - AT_ONCE)
        if len(killed) < kills and is_due and time.monotonic() >= next_kill_at:
            victim = workers.alive.pop(pick.randrange(len(workers.alive)))
            victim.kill()
            killed[victim.process.pid] = time.time()  # after it: the engine may give away a step meanwhile
            workers.start()
            next_kill_at = time.monotonic() + pick.uniform(0.2, 1.0)
        if len(killed) == kills:
            (runs.folder / "all_killed").touch()
        time.sleep(0.05)
    repeated = interrupted = 0
    for number, envelope in ended.items():
        log = runs.folder / f"log{number}"
        written = [line.split() for line in log.read_text().splitlines()] if log.exists() else []
        audit = Audit(written, read_given(workers.cluster, f"{workers.queue}-{number}"), killed)
        is_broken = False
        for name, told in envelope["data"]["steps"].items():
            context = f"seed {seed}, run {number}, {name}: {told} {audit}"
            if is_broken:
                assert told["status"] == "skipped" and name not in audit.given and not audit.times("begun", name), (
                    context
                )
                continue
            try:
                is_broken = not audit.check(name, told, may_repeat=bool(int(name[1:]) % 3))
            except AssertionError as error:
                raise AssertionError(f"{error}: {context}") from error
            repeated += told["attempts"] - 1
        interrupted += is_broken
        assert envelope["ok"] is not is_broken, f"seed {seed}, run {number}: {envelope}"
    print(f"seed {seed}: {count} runs, {kills} kills: {repeated} tries repeated, {interrupted} runs interrupted")


# A copy of a step, as a program and as a function of an App: it tells all its life that it is there, and hears no stop.
TICKS = """
import os, signal, time

def tick():
    with open(os.path.join(os.path.dirname(__file__), "ticks"), "a", buffering=1) as ticks:
        while True:
            ticks.write(f"{os.getpid()} {time.monotonic_ns()}\\n")
            time.sleep(0.01)

if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    tick()
"""
APP = """
from shotclock import App
import ticks

app = App("acme")

@app.command(mutates=False)
def tick() -> None:
    try:
        ticks.tick()
    except BaseException:
        ticks.tick()
"""


class Copies:
    """What each copy of a step has told of its life."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        (folder / "ticks.py").write_text(TICKS)
        (folder / "acme.py").write_text(APP)

    def serve(self, connection: Connection) -> None:
        """Take a request that is never answered, and tell for how long whoever made it is there."""
        for wait in (connection.read_request, connection.hang):
            wait()
            with (self._folder / "ticks").open("a") as ticks:
                ticks.write(f"{id(connection)} {time.monotonic_ns()}\n")

    def lives(self) -> list[tuple[int, int]]:
        """From when to when each was there, in order."""
        file, lives = self._folder / "ticks", dict[str, tuple[int, int]]()
        for line in file.read_text().split("\n")[:-1] if file.exists() else ():
            who, at = line.split()
            lives[who] = (lives.get(who, (int(at), 0))[0], int(at))
        return sorted(lives.values())

    def check_apart(self) -> None:
        lives = self.lives()
        assert all(before[1] < after[0] for before, after in pairwise(lives)), f"never at once: {lives}"

    def wait_for(self, count: int) -> list[tuple[int, int]]:
        return wait_until(lambda: len(lives := self.lives()) >= count and lives, f"{count} copies")


COPIES = {
    "command": f'type: command, exec: "exec {sys.executable} ticks.py"',
    "function": "type: function, target: acme.py:app, command: tick",
    "http_client": "type: http_client, url: SERVER",
}


@pytest.mark.parametrize(
    ("kind", "freeze"),
    [
        ("command", os.kill),
        ("http_client", os.kill),
        pytest.param("function", os.kill, marks=pytest.mark.soak),
        pytest.param("command", os.killpg, id="as by Ctrl-Z", marks=pytest.mark.soak),
    ],
)
def test_a_frozen_worker_has_no_step_left_when_another_begins_it(
    runs: Runs, workers: Workers, tmp_path: Path, kind: str, freeze: Callable[[int, int], None]
) -> None:
    """Also where the work is in the worker itself, as a request is: it never goes on with it."""
    copies = Copies(tmp_path)
    frozen = workers.cluster.start_worker("--queue", workers.queue, own_session=True)
    workers.alive.append(frozen)
    with Server(copies.serve) as server:
        running = runs.start(
            f"""
            timeout: 90
            steps:
              ticks: {{{COPIES[kind].replace("SERVER", server.url)}, timeout: 80s, grace: 10s, idempotent: true}}
            """,
            *("--queue", workers.queue, "--heartbeat", "2s"),
        )
        copies.wait_for(1)
        second = workers.start()
        below = [each.pid for each in psutil.Process(frozen.process.pid).children(recursive=True)]
        freeze(frozen.process.pid, signal.SIGSTOP)
        copies.wait_for(2)
        wait_until(lambda: "was frozen" in frozen.err.read_text(), "the word of its guard, which is its last act", 10)
        assert frozen.process.wait(WITHIN_S) == -signal.SIGKILL
        wait_until(lambda: not any(map(is_running, below)), "the end of all that it had started", 10)
        with contextlib.suppress(ProcessLookupError):
            freeze(frozen.process.pid, signal.SIGCONT)  # as whoever had stopped it would
        taken_over = time.monotonic()
        wait_until(lambda: time.monotonic() - taken_over > 1.0, "a while in which anything could go on")
        assert running.process.poll() is None and second.process.poll() is None
        running.kill()
        copies.check_apart()


def test_a_step_that_was_sent_to_a_frozen_worker_is_not_begun_when_it_goes_on(
    runs: Runs, workers: Workers, tmp_path: Path
) -> None:
    """The engine answers questions for work that a frozen worker has open, and gives the step to others later."""
    copies = Copies(tmp_path)
    workers.start()
    gpu = f"{workers.queue}-gpu"
    frozen = workers.cluster.start_worker("--queue", gpu)
    flow = f"""
        timeout: 90
        steps:
          ticks: {{{COPIES["command"]}, timeout: 80s, idempotent: true, runs_on: {gpu}}}
        """
    common = ("--queue", workers.queue, "--heartbeat", "2s")
    try:
        runs.write(f'steps: {{warm: {{type: command, exec: "true", runs_on: {gpu}}}}}', "warm.yaml")
        assert runs.run(None, "warm.yaml", *common)[0] == 0
        frozen.process.send_signal(signal.SIGSTOP)
        running = runs.start(flow, *common)
        sent = time.monotonic()
        wait_until(lambda: time.monotonic() - sent > 1.0, "the engine to give the step to the only one who asked")
        other = workers.cluster.start_worker("--queue", gpu)
        try:
            copies.wait_for(1)
            frozen.process.send_signal(signal.SIGCONT)
            for _ in range(6):  # of which the one that was frozen has some, after what had come before
                assert runs.run(None, "warm.yaml", *common)[0] == 0
            assert running.process.poll() is None and frozen.process.poll() is None
            # On a busy machine the other may have been taken for lost as well. At once there is one.
            copies.check_apart()
        finally:
            running.kill()
            other.kill()
        assert runs.run(None, "warm.yaml", *common)[0] == 0, "it is a worker like any other again"
    finally:
        frozen.kill()


def test_a_step_that_came_late_is_given_back_unbegun_where_the_engine_does_not_answer(
    own_cluster: Cluster, tmp_path: Path
) -> None:
    """It may not run twice, and has not begun: so it is neither begun in doubt nor interrupted."""
    engine = own_cluster.start_engine()
    own_cluster.start_worker()
    frozen = own_cluster.start_worker("--queue", "gpu")
    (server,) = [
        each for each in psutil.Process(engine.process.pid).children(recursive=True) if "temporal" in each.name()
    ]
    runs = Runs(tmp_path, own_cluster.url)
    try:
        frozen.process.send_signal(signal.SIGSTOP)
        running = runs.start(
            "steps: {once: {type: command, exec: 'echo x >> ran', runs_on: gpu}}",
            *("--heartbeat", "12s", "--run-id", "late"),
        )
        sent = time.monotonic()
        wait_until(lambda: time.monotonic() - sent > 4.0, "the engine to give it away, and it to be late")
        server.suspend()
        frozen.process.send_signal(signal.SIGCONT)
        asked = time.monotonic()
        wait_until(lambda: time.monotonic() - asked > 6.5, "the worker to ask for as long as it may")
        server.resume()
        code, envelope = running.ended()
        once = envelope["data"]["steps"]["once"]
        assert code == 0 and once["status"] == "succeeded" and once["attempts"] == 1, envelope
        assert (runs.folder / "ran").read_text() == "x\n"
        replay(fetch(own_cluster, "late"))
    finally:
        server.resume()
        runs.close()


def test_a_worker_whose_guard_is_killed_ends(workers: Workers) -> None:
    """Nobody would end its steps if it were frozen."""
    worker = workers.start()

    def holds_pidfd(process: psutil.Process) -> bool:
        return any("pidfd" in os.readlink(fd) for fd in Path(f"/proc/{process.pid}/fd").iterdir())

    def find_guards() -> list[psutil.Process]:
        return [each for each in psutil.Process(worker.process.pid).children(recursive=True) if holds_pidfd(each)]

    (guard,) = wait_until(find_guards, "the guard of the worker")  # it opens the pidfd after the worker is ready
    guard.kill()
    wait_until(lambda: worker.process.poll() is not None, "its end", 10)
    assert worker.process.poll() == 70


def test_a_paused_activity_is_no_cancelled_step(runs: Runs, workers: Workers) -> None:
    """Its worker stops the step, and it begins again."""
    workers.start()
    run_id = f"paused-{time.monotonic_ns()}"
    running = runs.start(
        """
        timeout: 60
        steps:
          works:
            type: command
            exec: "echo begun >> began; test $(wc -l < began) -ge 2 || sleep 300"
            idempotent: true
            grace: 100ms
        """,
        *("--run-id", run_id, "--queue", workers.queue, "--heartbeat", "3s"),
    )
    runs.wait_for("began")

    async def pause() -> None:
        client = await connect(read_address(workers.cluster.url, {}))
        of = WorkflowExecution(workflow_id=run_id)
        request = PauseActivityRequest(namespace=client.namespace, execution=of, type=STEP_ACTIVITY, identity="me")
        await client.workflow_service.pause_activity(request)

    asyncio.run(asyncio.wait_for(pause(), WITHIN_S))
    code, envelope = running.ended()
    assert code == 0 and envelope["meta"]["survivors"] == [], envelope
