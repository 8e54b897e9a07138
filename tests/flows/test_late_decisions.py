"""A person decides while the work that asks has time: an accepted decision has its effect, or a reason why not."""

import asyncio
import json
import random
import re
import signal
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from shotclock.apps._inbox_drawing import draw_proposal
from shotclock.calls.principal import Principal, Role
from shotclock.core.errors import Failure
from shotclock.core.limits import WallTime
from shotclock.core.proposal import Decision, Kind, Policy, Proposal, ProposalRequest, ProposalStatus
from shotclock.core.value_types import replace
from shotclock.flows.file.loader import load_text
from shotclock.flows.run import runs as run
from shotclock.people.inbox import Inbox
from shotclock.people.person_wait import run_of
from shotclock.people.proposal_json import whole
from shotclock.store.store import Store
from shotclock.supervise.clock import wall_time
from shotclock.terminal.drawing import draw
from tests.flows.test_parked import proposals, shotclock
from tests.flows.test_people import WITHIN_S, YES, Runs, runs

__all__ = ["runs"]

pytestmark = [pytest.mark.usefixtures("no_survivors", "warm_starts"), pytest.mark.slow]

GATED = "steps: {ship: {exec: echo ship >> done, approval: {ttl: 1h}}}\n"


def find_open(runs: Runs) -> Proposal:
    give_up_at = time.monotonic() + WITHIN_S
    while not (found := [each for each in proposals(runs) if each.is_open]):
        assert time.monotonic() < give_up_at, "nobody asks anything"
        time.sleep(0.02)
    return found[0]


def deadline_of(runs: Runs, run_id: str) -> WallTime:
    with Store.open(runs.folder / "home") as store:
        run = store.runs.get(run_id)
    assert run is not None and run.deadline_at is not None
    return run.deadline_at


def pass_by(instant: WallTime) -> None:
    give_up_at = time.monotonic() + WITHIN_S
    while wall_time() <= instant:
        assert time.monotonic() < give_up_at
        time.sleep(0.05)


def test_a_proposal_of_a_step_expires_with_the_time_of_its_run(runs: Runs) -> None:
    runs(runs.flow("timeout: 9s\n" + GATED), "--run-id", "r", code=14)
    [proposal] = proposals(runs)
    assert proposal.expires_at <= deadline_of(runs, "r"), "it outlives the run"


def test_a_question_of_a_step_expires_with_the_time_of_its_run(runs: Runs) -> None:
    ask = "timeout: 9s\nsteps: {ask: {type: human-input, prompt: Which way?, timeout: 1h}}"
    runs(runs.flow(ask), "--run-id", "r", "--force", code=14)
    [proposal] = proposals(runs)
    assert proposal.expires_at <= deadline_of(runs, "r"), "it outlives the run"


def test_a_yes_after_the_time_of_the_run_is_refused_with_the_reason(runs: Runs) -> None:
    runs(runs.flow("timeout: 3s\n" + GATED), "--run-id", "r", code=14)
    [proposal] = proposals(runs)
    pass_by(proposal.expires_at)
    refused = shotclock(runs, "inbox", "approve", proposal.id, code=6)["error"]
    assert refused["code"] == "PROPOSAL_EXPIRED" and "the work that asked had no time left" in refused["message"]
    ended = runs("--resume", "r", code=10)
    assert ended["data"]["steps"]["ship"]["status"] != "succeeded" and runs.done() == []


def test_a_yes_in_time_says_until_when_the_run_can_use_it(runs: Runs) -> None:
    runs(runs.flow("timeout: 60s\n" + GATED), "--run-id", "r", code=14)
    [proposal] = proposals(runs)
    run = shotclock(runs, "inbox", "approve", proposal.id)["data"]["run"]
    assert run == {"state": "not_started", "at": None, "run_id": "r", "until": deadline_of(runs, "r").iso()}
    assert runs("--resume", "r", code=0)["ok"] and runs.done() == ["ship"]


def test_a_yes_that_its_parked_run_never_used_is_shown_as_missed(runs: Runs) -> None:
    runs(runs.flow("timeout: 4s\n" + GATED), "--run-id", "r", code=14)
    [proposal] = proposals(runs)
    shotclock(runs, "inbox", "approve", proposal.id)
    pass_by(deadline_of(runs, "r"))
    assert shotclock(runs, "inbox", "show", proposal.id)["data"]["run"]["state"] == "missed"
    runs("--resume", "r", code=10)
    run = shotclock(runs, "inbox", "show", proposal.id)["data"]["run"]
    assert (run["state"], run["code"]) == ("failed", "NO_TIME_LEFT"), run


def test_nobody_keeps_a_proposal_open_for_longer_than_its_run_has_time(runs: Runs) -> None:
    flow = "timeout: 60s\n" + GATED.replace("1h", "30s")
    runs(runs.flow(flow), "--run-id", "r", code=14)
    [proposal] = proposals(runs)
    extended = shotclock(runs, "inbox", "extend", proposal.id, "1h")["data"]
    assert extended["expires_at"] == deadline_of(runs, "r").iso()
    refused = shotclock(runs, "inbox", "extend", proposal.id, "1h", code=4)["error"]
    assert refused["code"] == "NOT_EXTENDABLE" and "whose time ends then" in refused["message"]


@pytest.mark.parametrize("kind", ["approval", "question"])
def test_more_time_for_a_run_that_waits_keeps_its_proposal_open(kind: str, runs: Runs) -> None:
    ask = "steps: {ship: {type: human-input, prompt: Ship?}}\n"
    began = runs.start(
        runs.flow("timeout: 8s\n" + (GATED if kind == "approval" else ask)), "--run-id", "r", "--budget", "0"
    )
    proposal = find_open(runs)
    shotclock(runs, "job", "extend", "r", "1m")
    pass_by(proposal.expires_at)
    runs.decide(Decision(ProposalStatus.APPROVED, answer="yes") if kind == "question" else YES)
    out, _ = began.communicate(timeout=WITHIN_S)
    assert json.loads(out)["ok"], out


def test_check_warns_of_a_person_who_has_more_time_than_the_run(runs: Runs) -> None:
    def find(text: str) -> list[Any]:
        found = shotclock(runs, "check", runs.flow(text))["data"]["findings"]
        return [(each["severity"], each["field"]) for each in found if each["rule"] == "human/outlasts-run"]

    assert find("timeout: 40s\n" + GATED) == [("warning", "steps.ship.approval.ttl")]
    for fine in ("timeout: 2h\n" + GATED, GATED, "timeout: 40s\n" + GATED.replace("{ttl: 1h}", "true")):
        assert find(fine) == []


def test_plan_shows_how_long_people_may_take(runs: Runs) -> None:
    plan = shotclock(runs, "plan", runs.flow(GATED))["data"]
    assert (plan["people_ms"], plan["steps"][0]["approval_ms"]) == (3_600_000, 3_600_000)
    capped = shotclock(runs, "plan", runs.flow("timeout: 40s\n" + GATED))["data"]
    assert capped["people_ms"] == capped["steps"][0]["approval_ms"] <= 40_000


def test_a_late_approval_of_a_call_says_that_it_waits_for_the_agent_and_for_how_long(runs: Runs) -> None:
    def approve(ttl_ms: int, n: int) -> str:
        async def work() -> str:
            with Store.open(runs.folder / "home") as store:
                inbox = Inbox(store)
                policy = Policy(ttl_ms=ttl_ms)
                ask = ProposalRequest(
                    Kind.OPERATION, "Write", operation="shop/write", arguments={"n": n}, policy=policy
                )
                asked = await inbox.propose(replace(ask, dispatched=True), Principal("builder", Role.AGENT))
                await inbox.decide(asked.id, YES, Principal.local())
                await inbox.close()
                return asked.id

        return asyncio.run(work())

    waiting, missed = approve(3_600_000, 1), approve(1_500, 2)
    data = shotclock(runs, "inbox", "show", waiting)["data"]
    assert data["run"] == {"state": "not_started", "at": None, "until": data["expires_at"]}
    said = " ".join(draw(draw_proposal, data).split())
    assert re.search(r"approved, waits for the agent to call again, until \S+Z \(in 59m\)", said), said
    [proposal] = [each for each in proposals(runs) if each.id == missed]
    pass_by(proposal.expires_at)
    data = shotclock(runs, "inbox", "show", missed)["data"]
    assert data["run"]["state"] == "missed"
    assert "not run: the agent did not make the call again in time" in " ".join(draw(draw_proposal, data).split())


def test_a_run_that_is_stopped_says_which_answer_it_did_not_use(runs: Runs) -> None:
    """The answer is decided in the moment in which the run is stopped: it is either taken back or has a reason."""
    flow = runs.flow("steps: {ask: {type: human-input, prompt: Ship?}}")
    began = runs.start(flow, "--run-id", "r", "--budget", "0")
    proposal = find_open(runs)
    with Store.open(runs.folder / "home") as store:
        began.send_signal(signal.SIGSTOP)
        store.proposals.decide(proposal.id, Decision(ProposalStatus.APPROVED, answer="yes"), "me", wall_time())
        began.send_signal(signal.SIGTERM)
        began.send_signal(signal.SIGCONT)
        out, _ = began.communicate(timeout=WITHIN_S)
        decided = store.proposals.get(proposal.id)
    assert decided is not None
    [ask] = json.loads(out)["data"]["steps"].values()
    shown = run_of(decided, decided.ask.dispatched)
    is_unused = shown is not None and "ended before it used this decision" in str(shown["message"])
    assert (ask["status"], is_unused) in (("succeeded", False), ("cancelled", True)), (ask, shown)


GATE = "steps: {{ship: {{exec: 'echo ship >> {done}', approval: {{ttl: {ttl}}}}}}}\n"
ASK = "steps: {{ask: {{type: human-input, prompt: Ship?{timeout}}}}}\n"
# What is about to end when a person decides, with the file and the budget of the caller.
DEADLINES = {
    "ttl": ("timeout: 30s\n" + GATE, {"ttl": "1200ms"}, None),
    "run": ("timeout: 2500ms\n" + GATE, {"ttl": "1h"}, None),
    "run of a question": ("timeout: 2500ms\n" + ASK, {"timeout": ""}, None),
    "step timeout": ("timeout: 30s\n" + ASK, {"timeout": ", timeout: 1200ms"}, None),
    "budget": ("timeout: 30s\n" + GATE, {"ttl": "1h"}, 600),
    "budget of a question": ("timeout: 30s\n" + ASK, {"timeout": ""}, 600),
}
AT_ONCE = 4


async def decide_near(kind: str, by_ms: int, number: int, store: Store, folder: Path) -> str:
    """Decide so long after the deadline, or before it, and return the outcome. Fail if a decision was lost."""
    text, values, budget_ms = DEADLINES[kind]
    done, run_id, inbox, me = folder / f"done{number}", f"r{number}", Inbox(store), Principal.local()
    loaded = load_text(text.format(done=done, **values).encode(), "flow.yaml").workflow
    assert loaded is not None
    request = run.RunRequest(loaded, str(folder / "flow.yaml"), folder, run_id)
    began = asyncio.create_task(run.start(request, store, run.RunCaller(budget_ms=budget_ms)))
    while not (found := [each for each in await inbox.list() if f"run {run_id} " in await reason_of(inbox, each.id)]):
        assert not began.done(), began.result().to_dict()
        await asyncio.sleep(0.01)
    asked = wall_time()
    end = asked + budget_ms if budget_ms else found[0].expires_at
    await asyncio.sleep(max(0, end.ms + by_ms - wall_time().ms) / 1000)
    is_accepted, proposal_id = True, found[0].id
    try:
        await inbox.decide(proposal_id, Decision(ProposalStatus.APPROVED, answer="yes" if "ask" in text else None), me)
    except Failure as failure:
        assert failure.code in ("PROPOSAL_EXPIRED", "PROPOSAL_WITHDRAWN"), failure.code
        is_accepted = False
    envelope = (await asyncio.wait_for(began, WITHIN_S)).to_dict()
    if envelope["meta"]["ending"] == "detached":
        assert is_accepted, "a parked run has time left"
        envelope = (await asyncio.wait_for(run.resume(run_id, store), WITHIN_S)).to_dict()
    proposal = await inbox.get(proposal_id)
    assert proposal is not None and not proposal.is_open
    shown = whole(proposal, me, None, await inbox.find_last_use(proposal))["run"]
    await inbox.close()
    [step] = envelope["data"]["steps"].values()
    has_effect = done.exists() or step["output"] == "yes"
    what = (kind, by_ms, is_accepted, has_effect, step, shown)
    if not is_accepted:
        assert not has_effect and not envelope["ok"] and step["error"]["message"], what
        return "refused"
    assert proposal.status is ProposalStatus.APPROVED, what
    if has_effect:
        return "had its effect"
    assert shown["state"] == "failed" and shown["message"] and step["error"]["code"] in LATE, what
    return "was of no use, with the reason"


LATE = ("NO_TIME_LEFT", "TIMEOUT", "CANCELLED")


async def reason_of(inbox: Inbox, id: str) -> str:
    proposal = await inbox.get(id)
    return "" if proposal is None else f"{proposal.ask.justification} "


async def decide_at_random_moments(seed: int, count: int, folder: Path) -> dict[str, int]:
    chance, free, ends = random.Random(seed), asyncio.Semaphore(AT_ONCE), Counter[str]()

    async def decide(number: int, kind: str, by_ms: int) -> None:
        async with free:
            ends[await decide_near(kind, by_ms, number, store, folder)] += 1

    with Store.open(folder / "home") as store:
        async with asyncio.TaskGroup() as group:
            for number in range(count):
                kind = list(DEADLINES)[number % len(DEADLINES)]
                spread_ms = chance.choice((20, 150, 600))
                group.create_task(decide(number, kind, chance.randint(-spread_ms, spread_ms)))
    return ends


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_a_decision_around_a_deadline_has_its_effect_or_a_reason(tmp_path: Path) -> None:
    seed = time.time_ns() % 1_000_000
    ends = asyncio.run(decide_at_random_moments(seed, 200, tmp_path))
    assert sum(ends.values()) == 200, f"seed {seed}"
