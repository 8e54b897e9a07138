"""What a run says about its steps: each in exactly one list, and no more claimed than is known."""

from collections.abc import Callable

import pytest

from shotclock.core.envelope import Envelope
from tests.rows import row

from .conftest import statuses, step

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("no_survivors")]
Run = Callable[..., Envelope]
LISTS = ("completed", "failed", "skipped", "pending")


def listed(envelope: Envelope) -> dict[str, list[str]]:
    assert isinstance(envelope.data, dict)
    return {name: envelope.data[name] for name in LISTS if envelope.data.get(name)}


def test_a_step_that_may_fail_is_in_the_list_of_those_that_did(run: Run) -> None:
    envelope = run(
        """
        steps:
          killed: {exec: "sleep 60", timeout: 300ms, grace: 0, continue_on_failure: true}
          failed: {exec: exit 1, continue_on_failure: true}
          fine: {exec: echo fine}
          never: {exec: echo no, if: "false"}
        """
    )
    assert envelope.ok and envelope.exit_code == 0
    assert listed(envelope) == {"completed": ["fine"], "failed": ["killed", "failed"], "skipped": ["never"]}
    assert envelope.meta["side_effects"] == "unknown" and envelope.meta["ending"] == "finished"


def test_what_a_run_changed_follows_from_its_steps(run: Run) -> None:
    for steps, effects in (
        ("a: {exec: 'true'}", "complete"),
        ("a: {exec: 'true', if: 'false'}", "none"),
        ("a: {exec: 'true'}\n  b: {exec: 'echo {{ env.NOT_THERE_AT_ALL }}'}", "partial"),
        ("a: {exec: 'true'}\n  b: {exec: exit 1}", "unknown"),
        ("a: {exec: 'exit {{ item }}', for_each: [0, 1]}", "unknown"),
        ("a: {exec: 'true', for_each: []}", "none"),
        ("a: {exec: sleep 60, for_each: [1]}\n  b: {exec: sleep 0.3; exit 1}\nfail_fast: true", "unknown"),
    ):
        with row(steps):
            envelope = run(f"steps:\n  {steps}\n")
            assert envelope.meta["side_effects"] == effects
            names = sorted(name for names in listed(envelope).values() for name in names)
            assert names == sorted(statuses(envelope)), "every step is in exactly one list"


def test_every_step_is_in_exactly_one_list_however_the_run_ends(run: Run) -> None:
    text = """
        steps:
          long: {exec: sleep 60, grace: 0}
          behind: {exec: echo b, depends_on: long}
          demand: {exec: echo d}
          bad: {exec: exit 1, on_success: {run: demand}}
        """
    for how in ({"stop_after": 0.8}, {"timeout_ms": 900}):
        envelope = run(text, **how)
        assert not envelope.ok
        names = [name for names in listed(envelope).values() for name in names]
        assert sorted(names) == ["bad", "behind", "demand", "long"]
        assert step(envelope, "demand")["reason"] == "on_demand"


def test_a_step_says_what_it_may_have_changed(run: Run) -> None:
    envelope = run("steps: {a: {exec: 'true'}, b: {exec: exit 1}, c: {exec: 'echo {{ env.NOT_THERE_AT_ALL }}'}}")
    said = {name: step(envelope, name).get("side_effects") for name in "abc"}
    assert said == {"a": "complete", "b": "unknown", "c": None}
