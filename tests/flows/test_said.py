"""What a step that failed has said: on stderr for whoever looks, on stdout for the steps that clean up after it."""

from collections.abc import Callable

import pytest

from shotclock.core.envelope import Envelope
from shotclock.store.store import Store

from .conftest import statuses, step

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("no_survivors")]
Run = Callable[..., Envelope]


def test_the_end_of_stderr_is_kept_with_the_error(run: Run, store: Store) -> None:
    envelope = run(
        """
        steps:
          loud: {exec: "seq 1 5000 >&2; echo the reason >&2; exit 1"}
          hang: {exec: "echo waiting for it >&2; sleep 600", timeout: 1s, grace: 0s}
          fine: {exec: "echo no matter >&2"}
        """
    )
    assert statuses(envelope) == {"loud": "failed", "hang": "timed_out", "fine": "succeeded"}
    said = step(envelope, "loud")["error"]["context"]["stderr"]
    assert said.endswith("4999\n5000\nthe reason\n") and len(said) == 2000
    context = step(envelope, "hang")["error"]["context"]
    assert context["stderr"] == "waiting for it\n" and context["clock"]["owner"] == "step hang"
    assert "no matter" not in str(envelope.data)
    stored = store.runs.steps(envelope.data["run_id"])["loud"].record
    assert stored["error"]["context"]["stderr"] == said


def test_a_secret_on_stderr_is_taken_out_even_where_it_would_be_cut(run: Run) -> None:
    secret = "open-" + "sesame" * 20
    envelope = run(
        """
        steps:
          leak:
            exec: |
              echo "$DOOR_TOKEN" >&2
              printf '%01950d' 0 >&2
              exit 1
            env: {DOOR_TOKEN: "${DOOR_TOKEN}"}
        """,
        environment={"DOOR_TOKEN": secret, "PATH": "/usr/bin:/bin"},
    )
    said = step(envelope, "leak")["error"]["context"]["stderr"]
    assert "000" in said and "sesame" not in said


def test_what_a_failed_step_said_is_there_for_the_one_that_cleans_up(run: Run) -> None:
    envelope = run(
        """
        steps:
          start:
            exec: |
              echo '{"id": 42}'
              sleep 600
            timeout: 1s
            grace: 0s
            on_fail: {run: stop}
          stop: {exec: "echo stopped {{ steps.start.output.id }}, {{ steps.start.status }}"}
        """
    )
    assert step(envelope, "stop")["output"] == "stopped 42, timed_out"
