"""A parked run: what was decided in time counts whenever it goes on, and it can be looked at and cancelled."""

import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from shotclock.calls.principal import Principal
from shotclock.core.limits import WallTime
from shotclock.core.proposal import Decision, Proposal, ProposalStatus
from shotclock.core.value_types import replace
from shotclock.flows.file.loader import load_text
from shotclock.flows.run import runs as run
from shotclock.people.inbox import Inbox
from shotclock.store.store import Store
from shotclock.supervise.kernel import this_process
from tests.flows.test_people import INCOMPLETE, WITHIN_S, YES, Runs, runs

__all__ = ["runs"]

pytestmark = [pytest.mark.usefixtures("no_survivors", "warm_starts"), pytest.mark.slow]

DESCRIPTOR = json.loads((Path(__file__).parents[1] / "spec" / "job-descriptor.derived.json").read_text("utf-8"))
QUESTION = """
steps:
  ask: {type: human-input, prompt: Approve?, timeout: 4s, default: "no"}
  after: {exec: 'echo {{ outputs.ask }} >> done', depends_on: ask}
"""
STRICT = """
steps:
  ask: {type: human-input, prompt: Approve?, timeout: 4s}
  after: {exec: 'echo {{ outputs.ask }} >> done', depends_on: ask}
"""
GATED = """
steps:
  ship: {exec: echo ship >> done, approval: {ttl: 4s}}
  tell: {exec: echo tell >> done, depends_on: ship}
"""


def proposals(runs: Runs) -> list[Proposal]:
    with Store.open(runs.folder / "home") as store:
        found = [store.proposals.get(listed.id) for listed in store.proposals.list()]
    return [proposal for proposal in found if proposal is not None]


def over(runs: Runs) -> None:
    """Wait until the time that the one proposal is open for is over, by the clock that it goes by."""
    [proposal] = proposals(runs)
    give_up_at = time.monotonic() + WITHIN_S
    while time.time() * 1000 <= proposal.expires_at.ms:
        assert time.monotonic() < give_up_at
        time.sleep(0.05)


def shotclock(runs: Runs, *words: str, code: int = 0) -> Any:
    ended = subprocess.run(
        [sys.executable, "-m", "shotclock", *words],
        cwd=runs.folder,
        env=runs.env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        timeout=WITHIN_S,
    )
    answer = json.loads(ended.stdout)
    assert ended.returncode == code, answer
    return answer


def test_an_answer_given_in_time_counts_though_the_run_goes_on_after_the_timeout(runs: Runs) -> None:
    runs(runs.flow(QUESTION), "--run-id", "r", code=14)
    runs.decide(Decision(ProposalStatus.APPROVED, answer="yes"))
    over(runs)
    ended = runs("--resume", "r", code=0)
    assert ended["data"]["steps"]["ask"]["output"] == "yes" and runs.done() == ["yes"]
    assert len(proposals(runs)) == 1, "nobody is asked again"


def test_an_approval_given_in_time_counts_though_the_run_goes_on_after_its_ttl(runs: Runs) -> None:
    runs(runs.flow(GATED), "--run-id", "r", code=14)
    runs.decide(YES)
    over(runs)
    runs("--resume", "r", code=0)
    assert runs.done() == ["ship", "tell"] and len(proposals(runs)) == 1


def test_a_question_that_nobody_answered_in_time_gives_its_default_at_once(runs: Runs) -> None:
    runs(runs.flow(QUESTION), "--run-id", "r", code=14)
    over(runs)
    ended = runs("--resume", "r", code=0)
    ask = ended["data"]["steps"]["ask"]
    assert ask["output"] == "no" and runs.done() == ["no"]
    assert [note["code"] for note in ask["warnings"]] == ["HUMAN_DEFAULTED"] and "4 seconds" in str(ask["warnings"])
    assert [proposal.status for proposal in proposals(runs)] == [ProposalStatus.EXPIRED]


def test_a_question_without_a_default_that_nobody_answered_in_time_has_timed_out(runs: Runs) -> None:
    runs(runs.flow(STRICT), "--run-id", "r", code=14)
    over(runs)
    ask = runs("--resume", "r", code=3)["data"]["steps"]["ask"]
    assert ask["status"] == "timed_out" and ask["error"]["message"] == "Human input timed out after 4 seconds"
    clock = ask["error"]["context"]["clock"]
    assert (clock["owner"], clock["limit_ms"]) == ("step ask", 4000) and clock["elapsed_ms"] >= 4000
    assert len(proposals(runs)) == 1


def test_the_default_is_taken_although_the_rest_of_the_run_has_less_time_than_the_question_had(runs: Runs) -> None:
    runs(runs.flow("timeout: 7s\n" + QUESTION), "--run-id", "r", code=14)
    over(runs)
    assert runs("--resume", "r", code=0)["data"]["steps"]["ask"]["output"] == "no"


@pytest.mark.parametrize(("policy", "code"), [("reject", 3), ("default", 0)])
def test_an_approval_that_nobody_gave_in_time_ends_as_its_policy_says(runs: Runs, policy: str, code: int) -> None:
    text = GATED.replace("{ttl: 4s}", f"{{ttl: 1s, when_expired: {policy}}}")
    runs(runs.flow(text), "--run-id", "r", code=14)
    over(runs)
    ended = runs("--resume", "r", code=code)
    if code:
        assert ended["data"]["steps"]["ship"]["error"]["code"] == "PROPOSAL_EXPIRED" and runs.done() == []
    else:
        assert runs.done() == ["ship", "tell"]
    assert len(proposals(runs)) == 1


def test_a_question_without_a_timeout_has_none(runs: Runs) -> None:
    runs(runs.flow("steps: {ask: {type: human-input, prompt: Which way?}}"), "--run-id", "r", code=14)
    [proposal] = proposals(runs)
    assert proposal.ask.policy.ttl_ms == 0 and proposal.expires_at.iso().startswith("9999-12-31")
    [listed] = shotclock(runs, "inbox", "list")["data"]["proposals"]
    assert listed["status"] == "pending"
    runs.decide(Decision(ProposalStatus.APPROVED, answer="west"))
    assert runs("--resume", "r", code=0)["data"]["steps"]["ask"]["output"] == "west"


def test_an_answer_to_an_earlier_run_of_the_same_id_is_none_to_this_one(runs: Runs) -> None:
    runs(runs.flow(QUESTION.replace("4s", "1h")), "--run-id", "r", code=14)
    runs.decide(Decision(ProposalStatus.APPROVED, answer="yes"))
    runs("--resume", "r", code=0)
    with Store.open(runs.folder / "home") as store:
        assert store.runs.forget(store.runs.list_outdated(WallTime.of_ns(time.time_ns() + 10**9), 0, 0)) == 1
    runs("flow.yaml", "--run-id", "r", code=14)
    assert len(proposals(runs)) == 2


def test_a_run_is_not_parked_between_the_end_of_a_step_and_the_begin_of_its_follower(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = run._write

    async def write_slowly(writing: Callable[..., object], *more: Any) -> None:
        await asyncio.sleep(0.1)
        await write(writing, *more)

    monkeypatch.setattr(run, "_write", write_slowly)
    text = """
steps:
  ask: {type: human-input, prompt: Which way?}
  first: {exec: sleep 1}
  second: {exec: echo ran >> done; sleep 0.5, depends_on: first}
"""
    workflow = load_text(text.encode(), "flow.yaml", tmp_path).workflow
    assert workflow is not None

    async def work() -> Any:
        request = run.RunRequest(workflow, str(tmp_path / "flow.yaml"), tmp_path)
        with Store.open(tmp_path / "home") as store:
            return await run.start(request, store, run.RunCaller(budget_ms=0))

    parked: Any = asyncio.run(asyncio.wait_for(work(), WITHIN_S)).data
    assert parked["status"] == "parked" and len(parked["waiting"]) == 1
    assert {name: step["status"] for name, step in parked["steps"].items()} == {
        "ask": "pending", "first": "succeeded", "second": "succeeded",
    }  # fmt: skip
    assert (tmp_path / "done").read_text() == "ran\n"


# --- looking and cancelling -----------------------------------------------------------------------------------


def test_a_parked_run_is_parked_in_its_answer_in_the_store_and_in_its_report(runs: Runs) -> None:
    parked = runs(runs.flow(QUESTION), "--run-id", "r", "--timeout", "1m", code=14)
    assert parked["data"]["status"] == "parked"
    assert "shotclock inbox approve ID" in parked["error"]["suggestion"]
    assert parked["data"]["continue_until"] in parked["error"]["message"]
    with Store.open(runs.folder / "home") as store:
        run = store.runs.get("r")
        assert run is not None and run.parked_at is not None
    made = shotclock(runs, "report", "r")["data"]
    assert made["status"] == "parked" and "died" not in made["why"] and "--resume r" in made["why"]
    [listed] = shotclock(runs, "report")["data"]["runs"]
    assert listed["status"] == "parked"
    for output in ("markdown", "junit"):
        assert shotclock(runs, "report", "r", "--output", output, "--output-file", "made")["data"]["status"] == "parked"
        assert "parked" in (runs.folder / "made").read_text()


def test_the_job_id_of_a_parked_run_is_known_to_the_job_commands(
    runs: Runs, validate_envelope: Callable[[Any], Any]
) -> None:
    parked = runs(runs.flow(QUESTION.replace("4s", "1h")), "--run-id", "r", code=14)["data"]
    jsonschema.validate(parked, INCOMPLETE)
    shown = validate_envelope(shotclock(runs, "job", "status", parked["job_id"]))["data"]
    jsonschema.validate(shown, DESCRIPTOR)
    assert (shown["run_id"], shown["run_status"], shown["terminal"]) == ("r", "parked", False)
    assert shown["waits_for"] == [proposal.id for proposal in proposals(runs)]
    waited = validate_envelope(shotclock(runs, "job", "wait", parked["job_id"], code=14))
    assert waited["error"]["code"] == "INCOMPLETE" and waited["data"]["continue_command"] == parked["continue_command"]
    runs.decide(Decision(ProposalStatus.APPROVED, answer="west"))
    runs("--resume", "r", code=0)
    assert shotclock(runs, "job", "wait", "r")["data"]["steps"]["ask"]["output"] == "west"
    assert shotclock(runs, "job", "status", "r")["data"]["status"] == "complete"


def test_cancelling_a_parked_run_withdraws_its_questions_and_ends_it_for_good(
    runs: Runs, validate_envelope: Callable[[Any], Any]
) -> None:
    runs.flow(QUESTION.replace("4s", "1h"), "inner.yaml")
    outer = """
steps:
  inside: {type: workflow, workflow: inner.yaml}
  gated: {exec: echo gated >> done, approval: true}
  last: {exec: echo last >> done, depends_on: [inside, gated]}
"""
    parked = runs(runs.flow(outer), "--run-id", "r", code=14)["data"]
    assert len(proposals(runs)) == 2
    words = parked["cancel_command"].split()
    assert words[0] == "shotclock"
    cancelled = validate_envelope(shotclock(runs, *words[1:]))["data"]
    assert (cancelled["status"], cancelled["terminal"]) == ("cancelled", True)
    assert {proposal.status for proposal in proposals(runs)} == {ProposalStatus.WITHDRAWN}
    ended = validate_envelope(runs("--resume", "r", code=143))
    assert ended["error"]["code"] == "CANCELLED" and runs.done() == []
    statuses = {name: step["status"] for name, step in ended["data"]["steps"].items()}
    assert statuses == {"inside": "cancelled", "gated": "cancelled", "last": "skipped"}
    assert shotclock(runs, "report", "r")["data"]["status"] == "cancelled"
    assert shotclock(runs, "report", "r.inside")["data"]["status"] == "cancelled"
    again = shotclock(runs, *words[1:])["data"]
    assert again["status"] == "cancelled"


LOCKED = """
inputs: {name: {type: string, default: it}}
timeout: 2s
steps:
  lock: {exec: echo lock >> done}
  ask: {type: human-input, prompt: Well?, depends_on: lock, on_fail: {run: unlock}}
  gated: {exec: echo gated >> done, approval: true, depends_on: lock, on_fail: {run: [unlock, tell]}}
  never: {exec: echo never >> done, depends_on: ask, on_fail: {run: wrong}}
  unlock: {exec: 'sleep 0.5; echo unlock-{{ inputs.name }} >> done'}
  tell: {exec: echo tell >> done}
  wrong: {exec: echo wrong >> done}
"""


@pytest.mark.parametrize("place", ["run", "inside"])
def test_cancelling_a_parked_run_cleans_up_as_a_signal_would(
    runs: Runs, validate_envelope: Callable[[Any], Any], place: str
) -> None:
    text = LOCKED
    if place == "inside":
        runs.flow(LOCKED, "inner.yaml")
        text = "steps: {it: {type: workflow, workflow: inner.yaml, inputs: {name: it}}}"
    runs(runs.flow(text), "--run-id", "r", code=14)
    time.sleep(2.1)  # the run's own time is over when it is cancelled
    cancelled = validate_envelope(shotclock(runs, "job", "cancel", "r"))
    assert cancelled["data"]["status"] == "cancelled" and not cancelled["warnings"]
    assert sorted(runs.done()) == ["lock", "tell", "unlock-it"]
    ended = validate_envelope(runs("--resume", "r" if place == "run" else "r.it", code=143))
    steps = ended["data"]["steps"]
    assert {name: step["status"] for name, step in steps.items()} == {
        **dict.fromkeys(("lock", "unlock", "tell"), "succeeded"),
        **dict.fromkeys(("ask", "gated"), "cancelled"),
        **dict.fromkeys(("never", "wrong"), "skipped"),
    }
    assert (ended["error"]["code"], ended["meta"]["side_effects"]) == ("CANCELLED", "partial")
    assert ended["error"]["message"] == "the run was cancelled"


def test_cancelling_a_parked_run_names_the_clean_up_that_could_not_be_run(
    runs: Runs, validate_envelope: Callable[[Any], Any]
) -> None:
    secret = LOCKED.replace("timeout: 2s", 'env: {API_TOKEN: "${API_TOKEN}"}')
    runs.env["API_TOKEN"] = "abc"
    runs(runs.flow(secret), "--run-id", "r", code=14)
    del runs.env["API_TOKEN"]
    cancelled = validate_envelope(shotclock(runs, "job", "cancel", "r"))
    [told] = cancelled["warnings"]
    assert told["code"] == "CLEAN_UP_MISSING" and told["context"]["steps"] == ["unlock", "tell"]
    assert "API_TOKEN" in told["message"] and runs.done() == ["lock"]
    ended = runs("--resume", "r", code=143)
    assert ended["warnings"] == [told] and ended["meta"]["side_effects"] == "partial"
    assert all(proposal.status is ProposalStatus.WITHDRAWN for proposal in proposals(runs))


def test_cancelling_a_dead_run_runs_the_clean_up_of_a_step_that_may_not_run_twice(
    runs: Runs, validate_envelope: Callable[[Any], Any]
) -> None:
    text = """
steps:
  slow: {exec: echo began >> done; sleep 60, on_fail: {run: [tidy, both]}}
  other: {exec: sleep 60, idempotent: true, on_fail: {run: both}}
  tidy: {exec: echo tidy >> done}
  both: {exec: echo both >> done}
"""
    process = runs.start(runs.flow(text), "--run-id", "r")
    give_up_at = time.monotonic() + WITHIN_S
    while not runs.done():
        assert time.monotonic() < give_up_at
        time.sleep(0.02)
    process.kill()
    process.communicate(timeout=WITHIN_S)
    assert validate_envelope(shotclock(runs, "job", "cancel", "r"))["warnings"] == []
    assert sorted(runs.done()) == ["began", "both", "tidy"]


def test_cancelling_a_run_ends_the_runs_that_the_tools_of_its_agent_began(runs: Runs) -> None:
    text = """
tools: {look: {workflow: inner.yaml}}
steps: {agent: {type: ai, prompt: Look., ai: {model: m, tools: look}, on_fail: {retry: {max: 1}}}}
"""
    workflow = load_text(text.encode(), "flow.yaml", runs.folder).workflow
    inner = load_text(b"steps: {a: {exec: echo}}", "inner.yaml", runs.folder).workflow
    assert workflow is not None and inner is not None
    dead = replace(this_process(), boot_id="another")
    names = ["r.agent.look", "r.agent.look.2", "r.agent.look.try2"]
    with Store.open(runs.folder / "home") as store:
        for name in ("r", *names, "r.agent.other"):
            written = run.record_workflow(workflow if name == "r" else inner, {})
            file = str(runs.folder / "flow.yaml")
            now = WallTime.of_ns(time.time_ns())
            store.runs.begin(run.StoredRun(name, name, file, written, {}, "0" * 32, dead, now, None))
    shotclock(runs, "job", "cancel", "r")
    with Store.open(runs.folder / "home") as store:
        ended = [name for name in (*names, "r.agent.other") if store.runs.get(name).ended_at is not None]  # type: ignore[union-attr]
    assert ended == names


def test_a_run_that_is_under_way_is_not_cancelled_from_outside(runs: Runs) -> None:
    process = runs.start(runs.flow("steps: {slow: {exec: touch up; sleep 60}}"), "--run-id", "r")

    async def up() -> None:
        while not (runs.folder / "up").exists():
            await asyncio.sleep(0.02)

    try:
        asyncio.run(asyncio.wait_for(up(), WITHIN_S))
        refused = shotclock(runs, "job", "cancel", "r", code=6)
        assert refused["error"]["code"] == "RUN_TAKEN" and str(process.pid) in refused["error"]["message"]
        assert shotclock(runs, "job", "status", "r")["data"]["status"] == "running"
    finally:
        process.terminate()
        process.communicate(timeout=WITHIN_S)
    assert process.returncode == 143


# --- several that wait in one step ----------------------------------------------------------------------------

EACH_GATED = """
timeout: 20m
steps:
  go: {for_each: [a, b], exec: 'echo {{ item }} >> done; echo {{ item }}', approval: true}
"""
EACH_ASKED = """
timeout: 20m
steps:
  q: {type: human-input, prompt: 'x {{ item }}', for_each: [a, b]}
"""
INSIDE_GATED = """
timeout: 20m
steps:
  go: {type: workflow, workflow: inner.yaml, approval: true}
"""


def decide_some(runs: Runs, decisions: dict[str, Decision]) -> None:
    """By what stands in the proposal, among those that are open."""

    async def work() -> None:
        with Store.open(runs.folder / "home") as store:
            inbox = Inbox(store)
            for text, decision in decisions.items():
                [one] = [
                    each
                    for each in proposals(runs)
                    if each.is_open and text in f"{each.ask.title} {each.ask.operation}"
                ]
                await inbox.decide(one.id, decision, Principal.local())
            await inbox.close()

    asyncio.run(asyncio.wait_for(work(), WITHIN_S))


def test_an_item_that_was_approved_and_has_run_is_not_run_again_after_the_others_were_waited_for(runs: Runs) -> None:
    runs(runs.flow(EACH_GATED), "--run-id", "r", code=14)
    decide_some(runs, {"go[0]": YES})
    still = runs("--resume", "r", code=14)
    assert len(still["data"]["waiting"]) == 1 and runs.done() == ["a"]
    decide_some(runs, {"go[1]": YES})
    assert runs("--resume", "r", code=0)["data"]["steps"]["go"]["output"] == ["a", "b"]
    assert runs.done() == ["a", "b"] and len(proposals(runs)) == 2


def test_an_item_that_works_is_waited_for_although_another_one_needs_a_person(runs: Runs) -> None:
    slow = EACH_GATED.replace("echo {{ item }} >> done;", "sleep 2; echo {{ item }} >> done;")
    runs(runs.flow(slow), "--run-id", "r", code=14)
    decide_some(runs, {"go[0]": YES})
    runs("--resume", "r", code=14)
    assert runs.done() == ["a"]


def test_a_run_whose_items_are_all_questions_is_parked_and_goes_on_after_the_answers(runs: Runs) -> None:
    parked = runs(runs.flow(EACH_ASKED), "--run-id", "r", code=14)
    assert {waits["title"] for waits in parked["data"]["waiting"]} == {"x a", "x b"}
    decide_some(runs, {"x b": Decision(ProposalStatus.APPROVED, answer="south")})
    assert len(runs("--resume", "r", code=14)["data"]["waiting"]) == 1
    decide_some(runs, {"x a": Decision(ProposalStatus.APPROVED, answer="north")})
    assert runs("--resume", "r", code=0)["data"]["steps"]["q"]["output"] == ["north", "south"]
    assert len(proposals(runs)) == 2


def test_the_runs_of_items_are_numbered_by_their_item_also_after_parking(runs: Runs) -> None:
    runs.flow(
        """
inputs: {who: {type: string}, wait: {type: number}}
steps:
  first: {exec: "sleep {{ inputs.wait }}; echo {{ inputs.who }}"}
  ask: {type: human-input, prompt: "x {{ inputs.who }}", depends_on: first}
  after: {exec: "echo {{ outputs.first }}-{{ outputs.ask }} >> done", depends_on: ask}
""",
        "inner.yaml",
    )
    outer = """
timeout: 20m
steps:
  each:
    type: workflow
    workflow: inner.yaml
    inputs: {who: "{{ item }}", wait: "{{ 1.5 if index == 0 else 0 }}"}
    for_each: [a, b, c, d, e]
"""
    runs(runs.flow(outer), "--run-id", "r", code=14)
    with Store.open(runs.folder / "home") as store:
        found = {run.id: run.inputs["who"] for run in store.runs.list() if run.id != "r"}
    assert found == {"r.each": "a"} | {f"r.each.{number}": who for number, who in enumerate("bcde", 2)}
    decide_some(runs, {"x a": Decision(ProposalStatus.APPROVED, answer="A")})
    runs("--resume", "r", code=14)
    decide_some(runs, {f"x {who}": Decision(ProposalStatus.APPROVED, answer=who.upper()) for who in "bcde"})
    ended = runs("--resume", "r", code=0)
    assert [each["ask"] for each in ended["data"]["steps"]["each"]["output"]] == list("ABCDE")
    assert sorted(runs.done()) == ["a-A", "b-B", "c-C", "d-D", "e-E"] and len(proposals(runs)) == 5


def test_an_approved_run_inside_another_that_asks_something_itself_is_approved_once(runs: Runs) -> None:
    runs.flow(QUESTION.replace("4s", "5m"), "inner.yaml")
    runs(runs.flow(INSIDE_GATED), "--run-id", "r", code=14)
    runs.decide(YES)
    runs("--resume", "r", code=14)
    runs.decide(Decision(ProposalStatus.APPROVED, answer="yes"))
    runs("--resume", "r", code=0)
    assert runs.done() == ["yes"] and len(proposals(runs)) == 2
