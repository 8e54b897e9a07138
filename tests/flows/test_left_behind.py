"""What a run that has ended leaves for people: nothing that nobody waits for."""

from collections.abc import Callable

import pytest

from shotclock.core.envelope import Envelope
from shotclock.core.proposal import ProposalStatus
from shotclock.store.store import Store

from .conftest import statuses, step

pytestmark = pytest.mark.usefixtures("no_survivors")
Run = Callable[..., Envelope]


def _asked(store: Store) -> dict[str, ProposalStatus]:
    return {summary.title: summary.status for summary in store.proposals.list()}


def test_questions_of_a_run_that_was_stopped_are_taken_back(run: Run, store: Store) -> None:
    envelope = run(
        """
        fail_fast: true
        steps:
          question: {type: human-input, prompt: "Publish?"}
          gate: {exec: echo hi, approval: true}
          bad: {exec: sleep 0.3; exit 1}
        """
    )
    assert statuses(envelope) == {"question": "cancelled", "gate": "cancelled", "bad": "failed"}
    assert _asked(store) == dict.fromkeys(("Publish?", "Run step gate of flow"), ProposalStatus.WITHDRAWN)


@pytest.mark.slow
def test_a_gate_that_outlasts_the_run_is_the_clock_of_the_run(run: Run, store: Store) -> None:
    envelope = run("timeout: 900ms\nsteps: {gate: {exec: echo hi, approval: true}}")
    assert envelope.exit_code == 10 and envelope.code == "TIMEOUT"
    assert step(envelope, "gate")["status"] == "timed_out"
    assert step(envelope, "gate")["error"]["context"]["clock"]["owner"].startswith("run ")
    assert _asked(store) == {"Run step gate of flow": ProposalStatus.EXPIRED}
