"""Several servers before one engine: they show the same, and what is decided at one is decided for all."""

import asyncio
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from shotclock.calls.principal import Principal, Role
from shotclock.core.errors import Failure
from shotclock.core.proposal import Decision, ProposalStatus
from shotclock.people.inbox import Inbox
from shotclock.store.store import Store
from shotclock.temporal._engine import TemporalEngine
from shotclock.temporal.connection import read_address
from shotclock.temporal.front_end import FrontEnd
from tests.apps.web.serving import Served
from tests.temporal.conftest import POLL_S, WITHIN_S, Cluster, Program, Runs, free_port, steps_of, wait_until

pytestmark = pytest.mark.slow

ASKS = """
    timeout: 120
    steps:
      ask: {type: human-input, prompt: "Which one?"}
      after: {type: command, exec: "echo {{ outputs.ask }}", depends_on: [ask]}
    """


YES, LOCAL = Decision(ProposalStatus.APPROVED, answer="yes"), Principal.local()


class FrontEnds:
    """Two servers with stores of their own, and an operator's token for each."""

    def __init__(self, folder: Path, url: str, stack: ExitStack) -> None:
        self.servers: list[Served] = []
        self.operators: list[str] = []
        for number, words in enumerate((("inbox", "serve"), ("serve", "tests.apps.web.shop:app"))):
            home = folder / f"front{number}"
            home.mkdir()
            served = Served(home, home / "log", words=words, options=("--on", url, "--require-token"))
            self.operators.append(served.token(f"operator{number}", Role.OPERATOR))
            served.start()
            stack.callback(served.stop)
            self.servers.append(served)
        self.agent = self.servers[0].token("agent", Role.AGENT)

    def ask(self, at: int, method: str, path: str, body: Any = None) -> Any:
        return self.servers[at].ask(method, path, body, token=self.operators[at])

    def pending(self, at: int) -> dict[str, Any]:
        listed = self.ask(at, "GET", "/api/inbox?status=pending").data
        return {each["id"]: each for each in listed["proposals"]}

    def wait_for_proposal(self, at: int, but: set[str]) -> str:
        """Wait until there is one that was not there before, and return its id."""
        found: set[str] = wait_until(lambda: self.pending(at).keys() - but, f"a proposal at front end {at}")
        return found.pop()

    def decide(self, at: int, id: str, token: str | None = None, **decision: Any) -> Any:
        whole = self.servers[at].whole(id, self.operators[at])
        body = {"action_hash": whole["action_hash"], **decision}
        return self.servers[at].ask("POST", f"/api/inbox/{id}/decision", body, token=token or self.operators[at])

    def running(self, at: int) -> dict[str, Any]:
        return {run["id"]: run for run in self.ask(at, "GET", "/api/running").data["runs"]}


@pytest.fixture(scope="module")
def front_ends(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[FrontEnds]:
    with ExitStack() as stack:
        yield FrontEnds(tmp_path_factory.mktemp("fronts"), cluster.url, stack)


def test_what_is_decided_at_one_front_end_is_gone_at_the_other(front_ends: FrontEnds, runs: Runs) -> None:
    before = front_ends.pending(0).keys() | front_ends.pending(1).keys()
    running = runs.start(ASKS)
    id = front_ends.wait_for_proposal(0, before)
    assert front_ends.wait_for_proposal(1, before) == id

    refused = front_ends.decide(0, id, front_ends.agent, status="approved", answer="mine")
    assert refused.code == "NOT_ALLOWED"
    decided = front_ends.decide(0, id, status="approved", answer="this one")
    assert decided.data["proposal"]["status"] == "approved", decided.json
    late = front_ends.decide(1, id, status="approved", answer="another")
    assert late.code == "ALREADY_DECIDED" and "operator0" in late.envelope["error"]["message"], late.json

    wait_until(lambda: id not in front_ends.pending(1), "the decision at the other front end")
    seen = [front_ends.servers[at].whole(id, front_ends.operators[at]) for at in (0, 1)]
    assert [(each["status"], each["decided_by"]) for each in seen] == [("approved", "operator0")] * 2
    assert seen[0]["decided_at"] == seen[1]["decided_at"]
    code, envelope = running.ended()
    assert code == 0 and envelope["data"]["steps"]["after"]["output"] == "this one", envelope
    for served in front_ends.servers:
        assert audit_is_whole(served)


def audit_is_whole(served: Served) -> bool:
    import asyncio

    from shotclock.people.inbox import Inbox
    from shotclock.store.store import Store

    async def verify() -> bool:
        with Store.open(served.home) as store:
            inbox = Inbox(store)
            try:
                return not await inbox.verify_audit()
            finally:
                await inbox.close()

    return asyncio.run(asyncio.wait_for(verify(), 60))


def test_a_rejection_reaches_the_run_and_what_the_command_line_decides_is_seen(
    front_ends: FrontEnds, runs: Runs
) -> None:
    before = front_ends.pending(0).keys() | front_ends.pending(1).keys()
    running = runs.start('steps: {act: {type: command, exec: "touch acted", approval: true}}')
    id = front_ends.wait_for_proposal(1, before)
    assert front_ends.decide(1, id, status="rejected", notes="not now").data["proposal"]["status"] == "rejected"
    code, envelope = running.ended()
    assert code != 0 and envelope["data"]["steps"]["act"]["error"]["code"] == "PROPOSAL_REJECTED", envelope
    assert not (runs.folder / "acted").exists()

    running = runs.start(ASKS)
    id = front_ends.wait_for_proposal(0, before | {id})
    code, told = runs.call("inbox", "approve", id, "--answer", "by hand")
    assert code == 0, told
    whole = wait_until(
        lambda: (found := front_ends.servers[0].whole(id, front_ends.operators[0]))["status"] != "pending" and found,
        "the decision of the command line",
    )
    assert whole["status"] == "approved" and whole["decided_via"] == "the command line"
    assert running.ended()[0] == 0


def test_of_two_decisions_at_once_one_counts(front_ends: FrontEnds, runs: Runs) -> None:
    from concurrent.futures import ThreadPoolExecutor

    before = front_ends.pending(0).keys() | front_ends.pending(1).keys()
    running = runs.start(ASKS)
    id = front_ends.wait_for_proposal(0, before)
    assert front_ends.wait_for_proposal(1, before) == id
    with ThreadPoolExecutor(2) as threads:
        answers = list(threads.map(lambda at: front_ends.decide(at, id, status="approved", answer=f"of {at}"), (0, 1)))
    won = [at for at, answer in enumerate(answers) if answer.status == 200]
    assert len(won) == 1 and answers[1 - won[0]].code == "ALREADY_DECIDED", [each.json for each in answers]
    code, envelope = running.ended()
    assert code == 0 and envelope["data"]["steps"]["ask"]["output"] == f"of {won[0]}", envelope


def test_what_a_stopped_run_asked_is_withdrawn(front_ends: FrontEnds, runs: Runs) -> None:
    run_id = f"stopped-{time.monotonic_ns()}"
    before = front_ends.pending(0).keys()
    running = runs.start(ASKS, "--run-id", run_id)
    id = front_ends.wait_for_proposal(0, set(before))
    assert runs.call("job", "cancel", run_id)[0] == 0
    running.ended()
    wait_until(lambda: id not in front_ends.pending(0), "the end of the proposal")
    assert front_ends.servers[0].whole(id, front_ends.operators[0])["status"] == "withdrawn"


def test_a_front_end_that_starts_again_learns_what_was_decided_meanwhile(front_ends: FrontEnds, runs: Runs) -> None:
    before = front_ends.pending(0).keys() | front_ends.pending(1).keys()
    running = runs.start(ASKS)
    id = front_ends.wait_for_proposal(0, before)
    assert front_ends.wait_for_proposal(1, before) == id
    served = front_ends.servers[0]
    served.kill()
    assert front_ends.decide(1, id, status="approved", answer="meanwhile").status == 200
    assert running.ended()[0] == 0
    served.start()
    wait_until(lambda: id not in front_ends.pending(0), "the decision")
    assert served.whole(id, front_ends.operators[0])["decided_by"] == "operator1"


def step_of(run: Any, name: str) -> Any:
    return next(step for step in run["steps"] if step["id"] == name)


def test_runs_are_seen_with_their_clocks_and_wound_down_from_a_front_end(front_ends: FrontEnds, runs: Runs) -> None:
    run_id = f"seen-{time.monotonic_ns()}"
    running = runs.start(
        """
        timeout: 100
        steps:
          works: {type: command, exec: 'trap "echo part; exit 0" TERM; touch up; sleep 90 & wait', timeout: 60}
          later: {type: command, exec: "echo later", depends_on: [works]}
        """,
        *("--run-id", run_id, "--heartbeat", "4s"),
    )

    def see(at: int) -> Any:
        run = front_ends.running(at).get(run_id)
        return run and step_of(run, "works")["calls"] and run

    for at in (0, 1):
        run = wait_until(lambda at=at: see(at), "the run with the clocks of its step")
        assert 0 < run["call"]["remaining_ms"] <= 100_000 and run["name"] == "flow"
        assert step_of(run, "works")["calls"][0]["timeout_ms"] == 60_000
        assert step_of(run, "later")["status"] == "pending"
    target = {"run": run_id, "step": "works"}
    extended = front_ends.ask(0, "POST", "/api/running/extend", {**target, "by_ms": 20_000}).data["extended"]
    assert extended[0]["timeout_ms"] == 80_000
    wait_until(
        lambda: (run := see(1)) and step_of(run, "works")["calls"][0]["timeout_ms"] == 80_000,
        "the time that was given at the other front end",
    )
    extended = front_ends.ask(1, "POST", "/api/running/extend", {"run": run_id, "by_ms": 50_000}).data["extended"]
    assert (extended[0]["name"], extended[0]["timeout_ms"]) == ("run flow", 150_000)
    wait_until(lambda: see(0)["call"]["timeout_ms"] == 150_000, "the time of the run at the other front end")
    agent = front_ends.servers[0].ask("POST", "/api/running/stop", target, token=front_ends.agent)
    assert agent.code == "NOT_ALLOWED"
    stopped = front_ends.ask(1, "POST", "/api/running/stop", {**target, "reason": "enough"})
    assert stopped.data["stopping"], stopped.json
    _, envelope = running.ended()
    assert steps_of(envelope)["works"] != "running", envelope
    wait_until(lambda: run_id not in front_ends.running(0), "the end of the run")


def test_an_engine_that_is_gone_is_said_and_holds_up_nobody(tmp_path: Path, opened: Any) -> None:
    url = f"temporal://127.0.0.1:{free_port()}"
    with ExitStack() as stack:
        front_ends = FrontEnds(tmp_path, url, stack)
        listed = front_ends.ask(0, "GET", "/api/inbox?status=pending").data
        assert listed["engine"]["problem"] and url in listed["engine"]["url"]
        running = front_ends.ask(0, "GET", "/api/running").data
        assert "cannot be reached" in running["engine"]["problem"] or "did not answer" in running["engine"]["problem"]
        refused = front_ends.ask(0, "POST", "/api/running/stop", {"run": "some"})
        assert refused.code == "CONNECT_FAILED"
        body = {"action_hash": "-", "status": "approved"}
        assert front_ends.ask(0, "POST", "/api/inbox/p-aaaaaaaaaa/decision", body).code == "CONNECT_FAILED"
        page = opened(front_ends.servers[0], front_ends.operators[0])
        page.get_by_text("cannot be reached").wait_for()
        page.get_by_role("tab", name="Running").click()
        page.get_by_role("heading", name="What runs is not known").wait_for()


def test_an_engine_that_comes_back_is_found_again_and_nothing_is_lost(own_cluster: Cluster, tmp_path: Path) -> None:
    engine = own_cluster.start_engine()
    own_cluster.start_worker()
    runs = Runs(tmp_path, own_cluster.url)
    with ExitStack() as stack:
        stack.callback(runs.close)
        front_ends = FrontEnds(tmp_path, own_cluster.url, stack)
        code, envelope = runs.run(ASKS, "--budget", "100ms")
        assert code == 14, envelope
        id = front_ends.wait_for_proposal(0, set())

        def problem() -> Any:
            return front_ends.ask(0, "GET", "/api/inbox?status=pending").data["engine"]["problem"]

        assert problem() is None
        engine.kill()
        wait_until(problem, "word that the engine is gone")
        refused = front_ends.decide(0, id, status="approved", answer="too early")
        assert refused.code == "CONNECT_FAILED", refused.json
        assert id in front_ends.pending(0)
        own_cluster.start_engine()
        wait_until(lambda: problem() is None, "word that the engine is back")
        assert front_ends.decide(0, id, status="approved", answer="in time").status == 200
        code, envelope = runs.run(None, "--resume", envelope["data"]["run_id"])
        assert code == 0 and envelope["data"]["steps"]["ask"]["output"] == "in time", envelope


def test_what_is_decided_in_the_store_of_a_worker_reaches_its_run(cluster: Cluster, runs: Runs) -> None:
    """The workers and the server have the same store: what is decided there without the engine is passed on."""
    home = cluster.folder / "home"
    served = Served(home, runs.folder / "log", words=("inbox", "serve"), options=("--on", cluster.url))
    served.start()
    try:
        code, envelope = runs.run(ASKS, "--budget", "1s", "--run-id", f"beside-{time.monotonic_ns()}")
        assert code == 14, envelope
        id = envelope["data"]["waiting"][0]["proposal_id"]
        words = ["inbox", "approve", id, "--answer", "here", "--json"]
        code, told = Program(words, runs.folder, "approve", home=home).ended()
        assert code == 0, told
        code, envelope = runs.run(None, "--resume", envelope["data"]["run_id"])
        assert code == 0 and envelope["data"]["steps"]["ask"]["output"] == "here", envelope
    finally:
        served.stop()


def test_the_page_shows_runs_and_questions_of_the_engine(front_ends: FrontEnds, runs: Runs, opened: Any) -> None:
    run_id = f"page-{time.monotonic_ns()}"
    before = front_ends.pending(0).keys() | front_ends.pending(1).keys()
    running = runs.start(
        """
        name: from afar
        timeout: 100
        steps:
          works: {type: command, exec: "sleep 90", timeout: 60, grace: 100ms}
          deploy: {type: command, exec: "touch deployed", approval: true}
        """,
        *("--run-id", run_id, "--heartbeat", "4s"),
    )
    id = front_ends.wait_for_proposal(0, before)
    expect = pytest.importorskip("playwright.sync_api").expect
    page = opened(front_ends.servers[0], front_ends.operators[0])
    page.locator(f'#rows li.row[data-id="{id}"]', has_text="deploy").click()
    page.get_by_role("button", name="Approve").click()
    page.get_by_role("button", name="Approve", exact=True).click()
    wait_until((runs.folder / "deployed").exists, "the step that was approved on the page")
    page.get_by_role("tab", name="Running").click()
    page.locator("#rows li.row", has_text="from afar").click()
    step = page.locator("li.step", has_text="works")
    expect(step.get_by_role("button", name="+5 m")).to_be_visible()
    expect(page.get_by_role("button", name="+5 m")).to_have_count(2)
    page.get_by_role("button", name="+5 m").first.click()  # that of the run
    wait_until(lambda: front_ends.running(1)[run_id]["call"]["timeout_ms"] == 400_000, "more time for the run")
    step.get_by_role("button", name="Wind down").click()
    step.get_by_role("button", name="Wind down: press again").click()
    _, envelope = running.ended()
    assert steps_of(envelope)["deploy"] == "succeeded", envelope
    expect(page.get_by_role("heading", name="It does not run any more")).to_be_visible()


def test_what_is_changed_on_the_page_is_what_runs(front_ends: FrontEnds, runs: Runs, opened: Any) -> None:
    before = front_ends.pending(0).keys() | front_ends.pending(1).keys()
    running = runs.start("""
        name: careful
        timeout: 100
        steps:
          deploy: {type: command, exec: "echo everywhere | tee -a deployed", approval: true}
          after: {type: command, exec: "echo {{ outputs.deploy }}", depends_on: [deploy]}
        """)
    id = front_ends.wait_for_proposal(0, before)
    expect = pytest.importorskip("playwright.sync_api").expect
    page = opened(front_ends.servers[0], front_ends.operators[0])
    page.locator(f'#rows li.row[data-id="{id}"]', has_text="deploy").click()
    page.get_by_role("button", name="Modify").click()
    page.get_by_label("exec").fill("echo here alone | tee -a deployed")
    expect(page.locator(".dl.new .code")).to_contain_text("here alone")
    page.get_by_role("button", name="Approve with changes").click()
    expect(page.get_by_text("Approved with changes").first).to_be_visible()
    code, envelope = running.ended()
    assert code == 0 and (runs.folder / "deployed").read_text() == "here alone\n", envelope
    assert envelope["data"]["steps"]["after"]["output"] == "here alone"
    wait_until(lambda: id not in front_ends.pending(1), "the decision at the other front end")
    for at in (0, 1):
        seen = front_ends.servers[at].whole(id, front_ends.operators[at])
        assert (seen["status"], seen["decided_by"]) == ("modified", "operator0"), seen
        told = front_ends.servers[at].result(id, front_ends.operators[at])
        assert told["arguments"]["exec"] == "echo here alone | tee -a deployed"


def test_a_decision_that_cannot_be_sent_is_reported_and_the_look_goes_on(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs, run_ids = Runs(tmp_path, cluster.url), [f"unsent{number}-{time.monotonic_ns()}" for number in range(2)]
    runs.write(ASKS)

    async def look() -> None:
        with Store.open(tmp_path / "front") as store:
            front_end, inbox, operator = FrontEnd(read_address(cluster.url, {}), lambda: store), Inbox(store), LOCAL
            proposals: dict[str, str] = {}
            while len(proposals) < 2:
                await asyncio.sleep(POLL_S)
                await front_end.look()
                listed = store.proposals.list(status=ProposalStatus.PENDING, limit=100)
                keys = {str(found.key): found.id for each in listed if (found := store.proposals.get(each.id))}
                proposals = {run_id: keys[key] for run_id in run_ids for key in keys if key.startswith(run_id)}
            first, second = (proposals[run_id] for run_id in run_ids)
            assert await front_end.has(second)
            await inbox.decide(first, YES, operator)
            await inbox.close()

            async def fail(*args: Any) -> None:
                raise Failure("CONNECTION_LOST", "cut off")

            engine = TemporalEngine(read_address(cluster.url, {}))
            await engine.decide(run_ids[1], second, YES, operator)
            monkeypatch.setattr(front_end._engine, "send_decision", fail)
            while await front_end.has(second):
                await asyncio.sleep(POLL_S)
                await front_end.look()
                assert front_end.problem == "cut off"
            with pytest.raises(Failure) as late:
                await front_end.decide(second, YES, operator)
            assert late.value.code == "ALREADY_DECIDED"

    running = [runs.start(None, "flow.yaml", "--run-id", run_id) for run_id in run_ids]
    try:
        with ThreadPoolExecutor(1) as thread:  # the browser of other tests has a loop in this one
            thread.submit(lambda: asyncio.run(asyncio.wait_for(look(), WITHIN_S))).result()
        assert running[1].ended()[0] == 0
    finally:
        runs.close()
        runs.call("job", "cancel", run_ids[0])
