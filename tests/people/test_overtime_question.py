"""A person decides about the overtime of a step: asked in the inbox, in time, and not asked any longer than that."""

import json
import os
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from shotclock.calls.principal import Principal
from shotclock.core.proposal import Confirmation, Decision, Proposal, ProposalStatus
from shotclock.people.inbox import Inbox
from shotclock.store.store import Store

pytestmark = [pytest.mark.usefixtures("no_survivors", "warm_starts"), pytest.mark.slow]

WITHIN_S = 60.0


@pytest.fixture
def run_step(tmp_path: Path) -> Iterator[Callable[[str], subprocess.Popen[bytes]]]:
    started: list[subprocess.Popen[bytes]] = []

    def run_step(step: str) -> subprocess.Popen[bytes]:
        (tmp_path / "flow.yaml").write_text("steps:\n  long:\n" + textwrap.indent(textwrap.dedent(step), "    "))
        words = [sys.executable, "-m", "shotclock", "run", "flow.yaml"]
        environment = {**os.environ, "SHOTCLOCK_HOME": str(tmp_path / "home")}
        pipes: Any = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
        started.append(subprocess.Popen(words, cwd=tmp_path, env=environment, **pipes))
        return started[-1]

    yield run_step
    for process in started:
        process.kill()
        process.wait(WITHIN_S)


def step_of(process: subprocess.Popen[bytes]) -> Any:
    out, _ = process.communicate(timeout=WITHIN_S)
    return json.loads(out)["data"]["steps"]["long"]


def question_in(store: Store) -> Proposal:
    give_up_at = time.monotonic() + WITHIN_S
    while True:
        if found := store.proposals.list(limit=1):
            proposal = store.proposals.get(found[0].id)
            assert proposal is not None
            return proposal
        assert time.monotonic() < give_up_at, "nobody was asked"
        time.sleep(0.02)


def wait_until_told(store: Store) -> None:
    """Wait until the decision has reached the step, which is written down while it runs."""
    (run,) = store.runs.list(1)
    give_up_at = time.monotonic() + WITHIN_S
    while not store.runs.steps(run.id)["long"].record.get("overtime"):
        assert time.monotonic() < give_up_at, "nobody was told"
        time.sleep(0.02)


def decide(store: Store, proposal: Proposal, decision: Decision) -> None:
    import asyncio

    async def work() -> None:
        inbox = Inbox(store)
        await inbox.decide(
            proposal.id, decision, Principal.local(), confirmation=Confirmation(proposal.ask.action_hash)
        )
        await inbox.close()

    asyncio.run(work())


ASKS = """
    exec: 'trap "echo part; exit 0" TERM; echo hello; while [ ! -e go ]; do sleep 0.1; done; echo done'
    timeout: 120
    soft: 1
    overtime: {observer: person, budget: 60s, max_per_request: 30s}
"""


def test_a_person_grants_overtime_from_the_inbox(run_step: Any, tmp_path: Path) -> None:
    process = run_step(ASKS)
    with Store.open(tmp_path / "home") as store:
        proposal = question_in(store)
        assert proposal.ask.title == "More time for step long?"
        assert proposal.ask.choices == ("30s more", "no more time")
        assert "The end of its stdout:\nhello" in proposal.ask.justification
        decide(store, proposal, Decision(ProposalStatus.APPROVED, "one more table", answer="30s more"))
        wait_until_told(store)
    (tmp_path / "go").touch()
    step = step_of(process)
    assert step["status"] == "succeeded" and step["output"] == "hello\ndone"
    [told] = step["overtime"]
    assert (told["verdict"], told["granted_ms"], told["observer"]) == ("granted", 30_000, "person")
    assert told["reason"].startswith("one more table (")


@pytest.mark.parametrize(
    "decision",
    [Decision(ProposalStatus.APPROVED, answer="no more time"), Decision(ProposalStatus.REJECTED, "enough")],
    ids=["declined", "rejected"],
)
def test_a_person_declines_and_the_step_winds_down(run_step: Any, tmp_path: Path, decision: Decision) -> None:
    process = run_step(ASKS)
    with Store.open(tmp_path / "home") as store:
        decide(store, question_in(store), decision)
    step = step_of(process)
    assert step["output"] == "hello\npart"
    assert [told.get("verdict") or told["event"] for told in step["overtime"]] == ["declined", "wind_down"]


def test_nobody_answers_in_time_and_nothing_is_granted(run_step: Any, tmp_path: Path) -> None:
    process = run_step(ASKS.replace("budget: 60s", "budget: 60s, observer_timeout: 1s"))
    step = step_of(process)
    assert [told.get("verdict") or told["event"] for told in step["overtime"]] == ["failed", "wind_down"]
    with Store.open(tmp_path / "home") as store:
        assert not question_in(store).is_open


def test_a_question_that_is_not_needed_any_more_is_withdrawn(run_step: Any, tmp_path: Path) -> None:
    process = run_step(ASKS)
    with Store.open(tmp_path / "home") as store:
        question_in(store)
        (tmp_path / "go").touch()
        assert step_of(process)["status"] == "succeeded"
        assert question_in(store).status is ProposalStatus.WITHDRAWN
