"""Workers and engines that are killed: no step is lost, none runs twice at once, and no deadline moves."""

import json
import random
import signal
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.temporal.conftest import Cluster, Program, Runs, is_alive, steps_of, wait_until

pytestmark = pytest.mark.slow

HEARTBEAT_S = 3.0
STUBBORN = "trap '' TERM; date +%s.%N >> began; setsid sleep 300 & echo $! $$ >> pids; while :; do sleep 0.2; done"


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


@pytest.fixture
def runs(cluster: Cluster, tmp_path: Path) -> Iterator[Runs]:
    made = Runs(tmp_path, cluster.url)
    yield made
    made.close()


def began_at(runs: Runs, times: int) -> list[float]:
    return [float(line) for line in runs.wait_for("began", times)]


def pids_in(runs: Runs) -> list[int]:
    return [int(pid) for pid in (runs.folder / "pids").read_text().split()]


def test_a_step_whose_worker_is_killed_goes_on_elsewhere_until_its_first_deadline(
    runs: Runs, workers: Workers, validate_envelope: object
) -> None:
    workers.start()
    running = runs.start(
        f"""
        timeout: 60
        steps:
          stubborn: {{type: command, exec: "{STUBBORN}", timeout: 12, grace: 200ms, idempotent: true}}
          after: {{type: command, exec: "touch after", depends_on: [stubborn]}}
        """,
        *("--queue", workers.queue, "--heartbeat", f"{HEARTBEAT_S}s"),
    )
    (first,) = began_at(runs, 1)
    pids = wait_until(lambda: len(pids_in(runs)) == 2 and pids_in(runs), "both processes")
    workers.start()
    wait_until(lambda: time.time() - first > 2 * HEARTBEAT_S / 8 + 0.5, "a heartbeat or two")
    killed_at = time.time()
    workers.alive[0].kill()
    wait_until(lambda: not any(map(is_alive, pids)), "the end of what its worker had started", HEARTBEAT_S)
    _, second = began_at(runs, 2)
    assert second - killed_at <= HEARTBEAT_S + 1.0 + 1.0, "a second more than promised, for a busy machine"
    code, envelope = running.ended()
    stopped = time.time() - first
    step = envelope["data"]["steps"]["stubborn"]
    assert code == 3 and steps_of(envelope) == {"stubborn": "timed_out", "after": "skipped"}, envelope
    assert step["error"]["code"] == "TIMEOUT" and step["attempts"] == 2 and step["side_effects"] == "unknown"
    assert step["error"]["context"]["clock"]["limit_ms"] == 12_000
    # Of the first start: that of the second would be HEARTBEAT_S later at least.
    assert 11_900 <= step["error"]["context"]["clock"]["elapsed_ms"] <= 12_500
    assert 11.9 <= stopped <= 12.0 + HEARTBEAT_S - 0.5, stopped
    assert not any(map(is_alive, pids_in(runs))) and not (runs.folder / "after").exists()


def test_a_step_that_may_not_run_twice_is_interrupted_when_its_worker_is_killed(runs: Runs, workers: Workers) -> None:
    workers.start()
    running = runs.start(
        """
        timeout: 60
        steps:
          once: {type: command, exec: "echo x >> ran; sleep 300"}
          after: {type: command, exec: "touch after", depends_on: [once]}
          other: {type: command, exec: "while test ! -e ran; do sleep 0.05; done; echo other", idempotent: true}
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
            exec: "echo x >> ran; while test ! -e go; do sleep 0.05; done; echo done"
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
        timeout: 3
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


def test_a_step_runs_on_the_queue_that_it_names(runs: Runs, workers: Workers) -> None:
    workers.start()
    gpu = workers.cluster.start_worker("--queue", f"{workers.queue}-gpu")
    try:
        code, envelope = runs.run(
            f"""
            timeout: 60
            steps:
              here: {{type: command, exec: "ps -o ppid= $PPID"}}
              there: {{type: command, exec: "touch there", runs_on: {workers.queue}-gpu}}
            """,
            *("--queue", workers.queue),
        )
        assert code == 0, envelope
        assert (runs.folder / "there").exists()
    finally:
        gpu.stop()


def test_the_engine_may_be_killed_and_nothing_is_lost(own_cluster: Cluster, tmp_path: Path) -> None:
    engine = own_cluster.start_engine()
    own_cluster.start_worker()
    runs = Runs(tmp_path, own_cluster.url)
    try:
        running = runs.start(
            """
            timeout: 60
            steps:
              works: {type: command, exec: "echo x >> ran; while test ! -e go; do sleep 0.05; done; echo done"}
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


def audit_of(folder: Path, number: int) -> Counter[str]:
    log = folder / f"log{number}"
    return Counter(log.read_text().split()) if log.exists() else Counter()


@pytest.mark.parametrize(
    ("count", "steps", "kills"),
    [pytest.param(8, 6, 2, id="short"), pytest.param(100, 10, 10, id="whole", marks=pytest.mark.soak)],
)
@pytest.mark.timeout(1800)
def test_runs_end_as_they_should_while_workers_are_killed(
    runs: Runs, workers: Workers, count: int, steps: int, kills: int
) -> None:
    """Every run has its expected end, by an audit of what ran how often: a step that may be repeated has ended once at
    least, one that may not was begun once at most, and nothing behind an interrupted one has run."""
    for _ in range(3):
        workers.start()
    lines = [f"timeout: {60 + 6 * count}", "inputs: {n: {type: number}}", "steps:"]
    for number in range(steps):
        waits = f", depends_on: [s{number - 1}]" if number else ""
        kind = "idempotent: true" if number % 3 else "idempotent: false"
        script = (
            f"echo begun-s{number} >> log{{{{ inputs.n }}}}; sleep 0.4; echo ended-s{number} >> log{{{{ inputs.n }}}}"
        )
        lines.append(f'  s{number}: {{type: command, exec: "{script}", {kind}{waits}}}')
    runs.write("\n".join(lines))
    seed = random.randrange(1_000_000)
    pick = random.Random(seed)
    common = ("--queue", workers.queue, "--heartbeat", "2s", "--json")
    running = [
        runs.start(None, "flow.yaml", "--input", f"n={number}", "--run-id", f"{workers.queue}-{number}", *common)
        for number in range(min(count, 8))
    ]
    waiting = list(range(len(running), count))
    ended: dict[int, dict[str, object]] = {}
    left, next_kill_at = kills, time.monotonic() + 0.5
    numbers = {id(program): number for number, program in enumerate(running)}
    give_up_at = time.monotonic() + 60 + 8 * count
    while len(ended) < count:
        assert time.monotonic() < give_up_at, f"seed {seed}: {count - len(ended)} runs have not ended"
        for program in [each for each in running if each.process.poll() is not None]:
            running.remove(program)
            ended[numbers[id(program)]] = program.ended()[1]
            if waiting:
                number = waiting.pop(0)
                named = ("--input", f"n={number}", "--run-id", f"{workers.queue}-{number}")
                running.append(begun := runs.start(None, "flow.yaml", *named, *common))
                numbers[id(begun)] = number
        if left and time.monotonic() >= next_kill_at:
            left -= 1
            victim = pick.choice(workers.alive)
            workers.alive.remove(victim)
            victim.kill()
            workers.start()
            next_kill_at = time.monotonic() + pick.uniform(0.2, 1.0)
        time.sleep(0.05)
    assert not left, f"the runs were over before all {kills} workers were killed"
    for number, envelope in ended.items():
        log, told = audit_of(runs.folder, number), envelope["data"]["steps"]  # type: ignore[index]
        context = f"seed {seed}, run {number}: {dict(log)} {json.dumps({k: v['status'] for k, v in told.items()})}"
        is_broken = False
        for name, step in told.items():
            begun, done = log[f"begun-{name}"], log[f"ended-{name}"]
            if is_broken:
                assert step["status"] == "skipped" and not begun, context
            elif int(name[1:]) % 3:
                # A worker may be killed with a step that has not begun yet: that counts as a try.
                assert step["status"] == "succeeded" and done >= 1 and 1 <= begun <= step["attempts"], context
            elif step["status"] == "interrupted":
                assert begun <= 1, context  # it may have ended, and nobody lived to say so
                is_broken = True
            else:
                assert step["status"] == "succeeded" and (begun, done) == (1, 1), context
        assert envelope["ok"] is not is_broken, context


def test_a_worker_that_stood_still_for_too_long_ends_with_its_steps(runs: Runs, workers: Workers) -> None:
    """Stopped as a whole it cannot act. Once it could, its thread sees that the lease of its step is over."""
    workers.start()
    running = runs.start(
        """
        timeout: 60
        steps:
          ticks: {type: command, exec: "echo $$ >> pids; sleep 300", idempotent: true, timeout: 50, grace: 10s}
        """,
        *("--queue", workers.queue, "--heartbeat", "2s"),
    )
    (first,) = runs.wait_for("pids")
    workers.start()
    workers.alive[0].process.send_signal(signal.SIGSTOP)
    runs.wait_for("pids", 2)  # the engine has missed it, and given the step to the other
    workers.alive[0].process.send_signal(signal.SIGCONT)
    wait_until(lambda: workers.alive[0].process.poll() is not None, "its end", 10)
    assert workers.alive[0].process.poll() == 70
    wait_until(lambda: not is_alive(int(first)), "the end of what it had started", 10)
    assert running.process.poll() is None
