"""The caller of a run whose engine, worker, link or codec fails: it never claims that an accepted run did nothing."""

import asyncio
import json
import random
import secrets
import shlex
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from temporalio.client import WorkflowExecutionDescription, WorkflowExecutionStatus
from temporalio.service import RPCError
from temporalio.testing import ActivityEnvironment

from shotclock.temporal._messages import RUN_WORKFLOW, VERSION
from shotclock.temporal._step_activity import Activities
from shotclock.temporal.connection import connect, read_address
from tests.apps.test_inbox import Terminal, editor
from tests.flows.steps.servers import Connection, Server
from tests.temporal.conftest import WITHIN_S, Cluster, Program, Proxy, Runs, steps_of, wait_until

pytestmark = pytest.mark.slow

# The SDK itself asks again for ten seconds after the beginning of a request.
SDK_RETRIES_S = 10.0
KEY = "SHOTCLOCK_CODEC_KEY"
SEED = "27"  # the first absence of each test is longer than that


def new_id(name: str) -> str:
    return f"{name}-{time.monotonic_ns()}"


def describe(cluster: Cluster, run_id: str) -> WorkflowExecutionDescription:
    async def main() -> WorkflowExecutionDescription:
        client = await connect(read_address(cluster.url, {}))
        return await client.get_workflow_handle(run_id).describe()

    return asyncio.run(asyncio.wait_for(main(), WITHIN_S))


def terminate(cluster: Cluster, run_id: str) -> None:
    async def main() -> None:
        client = await connect(read_address(cluster.url, {}))
        await client.get_workflow_handle(run_id).terminate(reason="by a test")

    asyncio.run(asyncio.wait_for(main(), WITHIN_S))


def check_unknown(envelope: dict[str, Any], run_id: str, code: str, ending: str = "detached") -> None:
    assert envelope["error"]["code"] == code and not envelope["error"]["retryable"], envelope
    assert (envelope["meta"]["side_effects"], envelope["meta"]["ending"]) == ("unknown", ending), envelope
    assert envelope["data"]["run_id"] == run_id and run_id in envelope["data"]["continue_command"], envelope


def carry_on(runs: Runs, envelope: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    """Run the command that an answer names."""
    ours, *words = shlex.split(envelope["data"]["continue_command"])
    assert ours == "shotclock"
    return Program([*words, "--json"], runs.folder, new_id("continued")).ended()


def test_a_caller_waits_on_when_the_engine_is_away_for_a_second(runs: Runs, link: Proxy) -> None:
    runs.on = link.url
    running = runs.start("{timeout: 60, steps: {pay: {type: command, exec: 'echo paid >> paid; sleep 14'}}}")
    runs.wait_for("paid")
    began = time.monotonic()
    wait_until(lambda: time.monotonic() - began > SDK_RETRIES_S + 1, "the time in which the SDK asks again by itself")
    link.cut()
    cut = time.monotonic()
    wait_until(lambda: time.monotonic() - cut > 1.2, "a short absence")
    link.mend()
    code, envelope = running.ended()
    assert code == 0 and steps_of(envelope) == {"pay": "succeeded"}, envelope
    assert (runs.folder / "paid").read_text() == "paid\n"


def test_a_run_whose_acceptance_was_lost_on_the_way_is_waited_for(runs: Runs, link: Proxy) -> None:
    runs.on, run_id = link.url, new_id("lost")
    link.deaf_after, large = 3000, secrets.token_hex(4000)  # no other request is as large, and it is compressed
    flow = f"{{timeout: 60, steps: {{pay: {{type: command, exec: 'echo paid >> paid #{large}'}}}}}}"
    running = runs.start(flow, "--run-id", run_id)
    wait_until(lambda: link.is_deaf, "the request")
    lost = time.monotonic()
    runs.wait_for("paid")
    wait_until(lambda: time.monotonic() - lost > SDK_RETRIES_S + 1, "the time in which the SDK asks again by itself")
    link.mend()
    code, envelope = running.ended()
    assert code == 0 and envelope["data"]["run_id"] == run_id, envelope
    assert (runs.folder / "paid").read_text() == "paid\n"
    code, envelope = runs.run("{timeout: 60, steps: {pay: {type: command, exec: 'true'}}}", "--run-id", run_id)
    assert code == 6 and envelope["error"]["code"] == "RUN_TAKEN", envelope


def test_a_caller_without_the_codec_key_does_not_say_that_nothing_ran(
    runs: Runs, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_id, key = new_id("keyless"), secrets.token_hex(32)
    monkeypatch.setenv(KEY, key)
    worker = cluster.start_worker("--queue", run_id)
    try:
        monkeypatch.delenv(KEY)
        flow = "{timeout: 60, steps: {pay: {type: command, exec: 'echo paid >> paid'}}}"
        code, envelope = runs.run(flow, "--queue", run_id, "--run-id", run_id)
        assert code == 14 and KEY in envelope["error"]["suggestion"], envelope
        check_unknown(envelope, run_id, "INCOMPLETE")
        assert (runs.folder / "paid").read_text() == "paid\n"
        code, told = runs.call("job", "wait", run_id)
        check_unknown(told, run_id, "INCOMPLETE")
        monkeypatch.setenv(KEY, key)
        code, envelope = carry_on(runs, envelope)
        assert code == 0 and steps_of(envelope) == {"pay": "succeeded"}, envelope
    finally:
        worker.kill()


def test_a_run_that_is_terminated_on_the_engine_is_interrupted_with_unknown_effects(
    runs: Runs, cluster: Cluster
) -> None:
    run_id = new_id("terminated")
    running = runs.start(
        "{timeout: 60, steps: {pay: {type: command, exec: 'echo paid >> paid; sleep 50'}}}", "--run-id", run_id
    )
    runs.wait_for("paid")
    terminate(cluster, run_id)
    code, envelope = running.ended()
    assert code == 1 and "by a test" in envelope["error"]["message"], envelope
    check_unknown(envelope, run_id, "INTERRUPTED", "abandoned")


def test_commands_about_a_run_never_say_that_nothing_was_done_while_its_engine_is_away(runs: Runs, link: Proxy) -> None:
    link.cut()
    runs.on = link.url
    commands = (["job", "status", "r"], ["job", "wait", "r"], ["job", "cancel", "r"], ["run", "--resume", "r"])
    for words in (*commands, ["report", "r"]):
        code, told = runs.call(*words)
        assert code == 12 and told["error"]["code"] == "CONNECT_FAILED", told
        assert told["meta"]["side_effects"] == "unknown" and told["meta"]["ending"] != "not_started", told
        assert told["data"]["run_id"] == "r" and "--resume r" in told["data"]["continue_command"], told


def test_a_run_without_a_worker_says_so_at_once_and_does_nothing_after_its_deadline(
    runs: Runs, cluster: Cluster
) -> None:
    run_id = new_id("untaken")
    flow = "{timeout: 8, steps: {pay: {type: command, exec: 'echo paid >> paid'}}}"
    code, envelope = runs.run(flow, "--queue", run_id, "--run-id", run_id)
    assert code == 14 and f"no worker serves queue {run_id!r}" in envelope["error"]["message"], envelope
    assert f"--queue {run_id}" in envelope["error"]["suggestion"], envelope
    check_unknown(envelope, run_id, "INCOMPLETE")
    found = describe(cluster, run_id)
    assert found.status is WorkflowExecutionStatus.RUNNING
    limit = found.raw_description.execution_config.workflow_execution_timeout
    assert limit.ToMilliseconds() == 8_000 + 24 * 3_600_000, "its own time, and a day"
    accepted_at = found.start_time.timestamp()
    wait_until(lambda: time.time() > accepted_at + 9, "the deadline of the run")
    worker = cluster.start_worker("--queue", run_id)
    try:
        code, envelope = carry_on(runs, envelope)
        assert code == 10 and envelope["error"]["code"] in ("TIMEOUT", "NO_TIME_LEFT"), envelope
        assert not (runs.folder / "paid").exists()
        code, told = runs.call("report", run_id)
        assert told["data"]["started_at"].startswith(time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(accepted_at)))
    finally:
        worker.kill()


def test_a_run_that_may_wait_for_a_person_is_not_ended_by_the_engine(runs: Runs, cluster: Cluster) -> None:
    run_id = new_id("person")
    flow = "{timeout: 100, steps: {ask: {type: human-input, prompt: 'Well?'}}}"
    code, envelope = runs.run(flow, "--budget", "1s", "--run-id", run_id)
    assert code == 14, envelope
    found = describe(cluster, run_id)
    assert found.raw_description.execution_config.workflow_execution_timeout.ToMilliseconds() == 0
    terminate(cluster, run_id)


def test_a_question_names_its_run_and_a_second_decision_is_already_decided(runs: Runs) -> None:
    run_id = new_id("asks")
    flow = "{timeout: 100, steps: {ask: {type: human-input, prompt: 'Well?'}}}"
    code, envelope = runs.run(flow, "--budget", "1s", "--run-id", run_id)
    (asked,) = envelope["data"]["waiting"]
    code, told = runs.call("inbox", "list")
    (listed,) = [each for each in told["data"]["proposals"] if each["id"] == asked["proposal_id"]]
    assert listed["run_id"] == run_id, listed
    assert runs.call("inbox", "approve", asked["proposal_id"], "--answer", "yes")[0] == 0
    code, told = runs.call("inbox", "approve", asked["proposal_id"], "--answer", "no")
    assert code == 6 and told["error"]["code"] == "ALREADY_DECIDED", told
    assert told["error"]["context"]["status"] == "approved", told
    code, envelope = carry_on(runs, envelope)
    assert code == 0 and envelope["data"]["steps"]["ask"]["output"] == "yes", envelope
    code, told = runs.call("inbox", "reject", asked["proposal_id"], "--notes", "too late")
    assert code == 6 and told["error"]["code"] == "ALREADY_DECIDED", told


def test_an_edit_that_was_not_approved_is_kept_where_the_answer_says(
    runs: Runs, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_id, home = new_id("edited"), runs.folder / "operator"
    monkeypatch.setenv("SHOTCLOCK_HOME", str(home))
    flow = "{timeout: 100, steps: {deploy: {type: command, exec: echo a, approval: true}}}"
    _, envelope = runs.run(flow, "--budget", "1s", "--run-id", run_id)
    (asked,) = envelope["data"]["waiting"]
    env = editor(runs.folder, 'echo "{half" > "$1"; exit 1')
    operator = Terminal("inbox", "modify", asked["proposal_id"], "--on", cluster.url, env=env)
    try:
        assert operator.ends() == 1, operator.text
    finally:
        operator.close()
    [copy] = (home / "edits").iterdir()
    assert copy.read_text() == "{half\n" and str(copy) in operator.text.replace("\n", ""), operator.text
    terminate(cluster, run_id)


UNLISTED = """
from temporalio.client import WorkflowExecutionAsyncIterator
from temporalio.service import RPCError, RPCStatusCode

async def refuse(*_, **__):
    raise RPCError("the index is away", RPCStatusCode.UNAVAILABLE, b"")

WorkflowExecutionAsyncIterator.fetch_next_page = refuse
from shotclock.main import run_program
run_program()
"""


@pytest.mark.usefixtures("warm_starts")
def test_an_engine_that_does_not_list_its_runs_is_named_in_the_answer(runs: Runs, validate_envelope: Any) -> None:
    for words in (["list"], ["show", "p-aaaaaaaaaa"], ["approve", "p-aaaaaaaaaa"]):
        command = [sys.executable, "-c", UNLISTED, "inbox", *words, *runs.where]
        ran = subprocess.run(command, capture_output=True, cwd=runs.folder, timeout=WITHIN_S)
        envelope = validate_envelope(json.loads(ran.stdout))
        assert (ran.returncode, envelope["error"]["code"]) == (12, "CONNECT_FAILED"), (words, ran)
        assert "the index is away" in envelope["error"]["message"]


def test_a_run_of_a_later_version_is_left_to_other_workers(cluster: Cluster) -> None:
    run_id = new_id("later")

    async def start() -> None:
        client = await connect(read_address(cluster.url, {}))
        await client.start_workflow(RUN_WORKFLOW, {"version": VERSION + 1}, id=run_id, task_queue="shotclock")

    def has_failed_task() -> bool:
        found = describe(cluster, run_id)
        assert found.status is WorkflowExecutionStatus.RUNNING, found.status
        return found.raw_description.pending_workflow_task.attempt > 1

    asyncio.run(asyncio.wait_for(start(), WITHIN_S))
    try:
        wait_until(has_failed_task, "a worker that does not know the version")
    finally:
        terminate(cluster, run_id)

    given = {"version": VERSION + 1, "state": {"id": "a"}}
    carry_out = Activities(None).carry_out_step  # type: ignore[arg-type]
    reply = asyncio.run(asyncio.wait_for(ActivityEnvironment().run(carry_out, given), WITHIN_S))
    assert reply == {"state": {"id": "a"}, "lost": {}, "is_unbegun": True}


class Store:
    """An object store for large payloads that can fail."""

    def __init__(self) -> None:
        self.is_away = False
        self._held: dict[bytes, bytes] = {}

    def serve(self, connection: Connection) -> None:
        head, _, body = connection.read_request().partition(b"\r\n\r\n")
        method, path, *_ = head.split()
        if method == b"PUT" and not self.is_away:
            self._held[path] = body
        status, told = (b"503 Away", b"") if self.is_away else (b"200 OK", self._held[path])
        connection.send(b"HTTP/1.1 %b\r\ncontent-length: %d\r\nconnection: close\r\n\r\n" % (status, len(told)) + told)


class Faults:
    """The things between a caller and its run that fail: both links, the worker, the engine, the store of payloads."""

    def __init__(self, seed: str, cluster: Cluster, queue: str, store: Store, kills_engine: bool) -> None:
        self._chance, self._cluster, self._store = random.Random(seed), cluster, store
        self._kills_engine = kills_engine
        self.caller, self._worker = Proxy(cluster.port), Proxy(cluster.port)
        self._queue = queue
        self._program = self._start_worker()

    def _start_worker(self) -> Program:
        return self._cluster.start_worker("--queue", self._queue, url=self._worker.url)

    def strike(self, kind: str, began: float) -> str:
        """Let something fail at a random moment, for a random time, and return when and for how long."""
        at, for_s = began + self._chance.uniform(0, 3), self._chance.choice([0.2, 1.2, 4, 12])
        wait_until(lambda: time.monotonic() >= at, "the moment")
        if kind == "delay":
            self.caller.delay_s = self._worker.delay_s = 0.3
        elif kind == "cut":
            self.caller.cut()
        elif kind == "store":
            self._store.is_away = True
        elif kind == "worker":
            self._program.kill()
        elif self._kills_engine:
            self._cluster.programs[0].kill()
        else:
            self.caller.cut()
            self._worker.cut()
        over = time.monotonic() + for_s
        wait_until(lambda: time.monotonic() >= over, "the absence")
        if kind == "engine" and self._kills_engine:
            self._cluster.programs[0] = self._cluster.start_engine()
        self._store.is_away = False
        self.caller.mend()
        self._worker.mend()
        if self._program.process.poll() is not None:
            self._program = self._start_worker()
        return f"{kind} at {at - began:.2f}s for {for_s}s"

    def close(self) -> None:
        self._program.kill()
        self.caller.close()
        self._worker.close()


def check_honest(cluster: Cluster, envelope: dict[str, Any], run_id: str, has_run: bool, context: str) -> None:
    """Compare the answer of a caller with the run on the engine and the file that its step wrote."""
    meta, data = envelope["meta"], envelope["data"] or {}
    context = f"{context}: {envelope}"
    assert not (has_run and meta["side_effects"] == "none"), context
    try:
        describe(cluster, run_id)
    except RPCError:
        assert not has_run, context
        return
    assert meta["ending"] != "not_started" and data["run_id"] == run_id, context
    if "steps" not in data:  # not the envelope of the run itself
        assert meta["side_effects"] == "unknown" and run_id in data["continue_command"], context
        assert not envelope["error"]["retryable"], context


def try_faults(cluster: Cluster, folder: Path, seed: str, kinds: Iterable[str], *, kills_engine: bool) -> None:
    store = Store()
    queue = new_id("faults")
    with Server(store.serve) as server, pytest.MonkeyPatch.context() as patch:
        patch.setenv("SHOTCLOCK_PAYLOADS", server.url)
        patch.setenv(KEY, secrets.token_hex(32))
        faults = Faults(seed, cluster, queue, store, kills_engine)
        runs = Runs(folder, faults.caller.url)
        try:
            for number, kind in enumerate(kinds):
                run_id, began = f"{queue}-{number}", time.monotonic()
                running = runs.start(
                    f"""
                    timeout: 25
                    steps:
                      pay: {{type: command, exec: "echo paid >> paid{number}; sleep 1.5; seq 1 40000", timeout: 20}}
                    """,
                    *("--queue", queue, "--run-id", run_id, "--heartbeat", "3s"),
                )
                what = faults.strike(kind, began)
                _, envelope = running.ended(150)  # its own time, the margin for its end, and a busy machine
                has_run = (folder / f"paid{number}").exists()
                check_honest(cluster, envelope, run_id, has_run, f"seed {seed}, round {number}, {what}")
        finally:
            runs.close()
            faults.close()


def test_no_answer_about_an_accepted_run_says_that_nothing_was_done(cluster: Cluster, tmp_path: Path) -> None:
    try_faults(cluster, tmp_path, SEED, ("cut", "worker", "store"), kills_engine=False)


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_no_answer_of_many_says_that_nothing_was_done(own_cluster: Cluster, tmp_path: Path) -> None:
    own_cluster.start_engine()
    seed = secrets.token_hex(4)
    kinds = random.Random(seed).choices(["cut", "delay", "engine", "worker", "store"], k=40)
    try_faults(own_cluster, tmp_path, seed, kinds, kills_engine=True)
