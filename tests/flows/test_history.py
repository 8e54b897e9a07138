"""The history of a workflow file: which tries count, what the numbers mean, and the advice that follows from them."""

import asyncio
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shotclock.calls.principal import Principal
from shotclock.core.proposal import Decision, ProposalStatus
from shotclock.flows.file.loader import load_file
from shotclock.flows.report.history import Advice, History, Measured, advise, find_near_limits, read_history
from shotclock.flows.run.state import Status, StepState
from shotclock.people.inbox import Inbox
from shotclock.store.store import Store

from .past import add_run, timed_out, took

WITHIN_S = 20.0
MS = st.integers(1, 100_000)


def advice_of(load: Any, text: str, history: History) -> dict[str | None, Advice]:
    loaded = load(text)
    assert loaded.workflow is not None, loaded.findings
    return {each.step: each for each in advise(loaded.workflow, history)}


# --- numbers -----------------------------------------------------------------------------------------------


@given(st.lists(MS), st.lists(st.tuples(MS, MS)), st.floats(0.01, 1))
def test_a_percentile_holds_for_every_duration_that_stopped_tries_may_have_had(
    finished: list[int], stopped: list[tuple[int, int]], share: float
) -> None:
    measured = Measured(tuple(finished), tuple(limit for limit, _ in stopped))
    figure = measured.percentile(share)
    true = sorted([*finished, *(limit + more for limit, more in stopped)])
    if figure is None:
        assert not true
        return
    # The smallest true duration that this share of the tries did not exceed.
    wanted = next(ms for ms in true if sum(each <= ms for each in true) >= share * len(true) - 1e-9)
    assert figure.ms <= wanted if figure.is_at_least else figure.ms == wanted


@given(st.lists(MS, min_size=1))
def test_percentiles_do_not_fall_and_the_last_is_the_maximum(finished: list[int]) -> None:
    found = [Measured(tuple(finished)).percentile(share) for share in (0.5, 0.95, 1)]
    values = [figure.ms for figure in found if figure is not None]
    assert values == sorted(values) and values[-1] == max(finished)


# --- which tries count ----------------------------------------------------------------------------------------


@pytest.mark.slow
def test_tries_that_ended_by_themselves_count_and_others_do_not(run: Callable[..., Any], tmp_path: Path) -> None:
    flow = """
    steps:
      fine: {exec: sleep 0.05}
      slow: {exec: sleep 60, timeout: 300ms, continue_on_failure: true}
      fails: {exec: exit 3, continue_on_failure: true}
      retried:
        exec: test -e tried || { touch tried; exit 1; }
        on_fail: {retry: {max: 1, backoff: {delay_ms: 1}}}
      items: {exec: "sleep {{ item }}", for_each: [0.3, 0]}
      slow_once:
        exec: test -e began || { touch began; sleep 60; }
        timeout: 300ms
        on_fail: {retry: {max: 1, backoff: {delay_ms: 1}}}
      slow_item: {exec: "sleep {{ item }}", for_each: [0, 60], timeout: 300ms, continue_on_failure: true}
      silent: {exec: sleep 60, idle: 200ms, continue_on_failure: true}
      skipped: {exec: 'true', if: 'false'}
    """
    run(flow, timeout_ms=30_000)
    run("steps: {fine: {exec: sleep 60}}", timeout_ms=700)  # the run's limit stops it
    run("steps: {fine: {exec: sleep 60}}", stop_after=0.3)
    with Store.open(tmp_path / "home") as store:
        history = read_history(store.runs, "flow", tmp_path / "flow.yaml")
    found = {name: history.of_step(name, "command") for name in ("fine", "slow", "fails", "silent")}
    found |= {name: history.of_step(name, "command") for name in ("retried", "items", "slow_once", "slow_item")}
    assert len(history.runs) == 3
    [fine_ms] = found["fine"].finished
    assert 50 <= fine_ms < 5_000 and found["fine"].uncounted == 2 and not found["fine"].stopped
    assert found["slow"].stopped == (300,) and not found["slow"].finished
    assert found["fails"].failures == 1 and not found["fails"].runs
    assert found["silent"].uncounted == 1
    assert len(found["retried"].finished) == 1 and found["retried"].finished[0] < 5_000
    [longest_ms] = found["items"].finished
    assert 300 <= longest_ms < 5_000
    assert found["slow_once"].stopped == found["slow_item"].stopped == (300,)
    assert not any(found[name].uncounted for name in ("retried", "items", "slow_once", "slow_item"))
    assert history.of_step("skipped", "command") == Measured()
    assert history.of_step("fine", "http_client") == Measured()
    whole = history.of_run()
    assert whole.stopped == (700,) and len(whole.finished) == 1 and whole.uncounted == 1


def test_a_step_that_waited_for_a_person_has_no_duration(run: Callable[..., Any], tmp_path: Path) -> None:
    (tmp_path / "inner.yaml").write_text("steps: {ask: {exec: 'true', approval: true}}")
    deciding = threading.Thread(target=_approve, args=(tmp_path / "home", 2))
    deciding.start()
    text = """
    steps:
      asks: {exec: 'true', approval: true}
      nested: {type: workflow, workflow: inner.yaml}
      beside: {exec: 'true'}
    """
    assert run(text, timeout_ms=60_000).ok
    deciding.join(WITHIN_S)
    with Store.open(tmp_path / "home") as store:
        history = read_history(store.runs, "flow", tmp_path / "flow.yaml")
        inner = read_history(store.runs, "inner", tmp_path / "inner.yaml")
    assert history.of_step("asks", "command") == Measured(uncounted=1)
    assert history.of_step("nested", "workflow") == Measured(uncounted=1)
    assert history.of_step("beside", "command").runs == 1
    assert history.of_run() == inner.of_run() == Measured(uncounted=1)


def _approve(home: Path, count: int) -> None:
    async def work() -> None:
        decided, until = 0, time.monotonic() + WITHIN_S
        with Store.open(home) as store:
            inbox = Inbox(store)
            while decided < count and time.monotonic() < until:
                for found in await inbox.list(status=ProposalStatus.PENDING):
                    await inbox.decide(found.id, Decision(ProposalStatus.APPROVED, ""), Principal.local())
                    decided += 1
                await asyncio.sleep(0.02)
            await inbox.close()

    asyncio.run(work())


def test_only_runs_of_the_same_file_and_name_belong_to_it(store: Store, tmp_path: Path) -> None:
    file, link = tmp_path / "flow.yaml", tmp_path / "link.yaml"
    file.touch()
    link.symlink_to(file)
    add_run(store, file, took(10), number=1)
    add_run(store, link, took(20), number=2)
    add_run(store, file, took(30), name="other", number=3)
    add_run(store, tmp_path / "copy.yaml", took(40), number=4)
    for path in (file, link):
        assert read_history(store.runs, "flow", path).of_step("work", "command").finished == (20, 10)
    assert read_history(store.runs, "flow", file, count=1).of_step("work", "command").finished == (20,)
    before = read_history(store.runs, "flow", file).runs[0].created_at
    assert read_history(store.runs, "flow", file, before=before).of_step("work", "command").finished == (10,)


def test_of_several_tries_the_longest_counts_and_one_at_the_limit_before_all(store: Store, tmp_path: Path) -> None:
    tries = [
        ([[40, "failed"], [70, "finished"]], Measured((70,))),
        ([[90, "finished"], [70, "finished"]], Measured((90,))),
        ([[500, "stopped"], [70, "finished"]], Measured(stopped=(500,))),
        ([[90, "other"], [70, "finished"]], Measured((70,))),
    ]
    for number, (each, expected) in enumerate(tries):
        file = tmp_path / str(number)
        add_run(store, file, took(1_000, attempts=2, ended_attempts=each), number=number)
        assert read_history(store.runs, "flow", file).of_step("work", "command") == expected
    state = StepState("work", "command")
    for ms in range(1_000):
        state.record_attempt(ms, Status.SUCCEEDED, "step work")
    assert len(state.ended_attempts) == 50 and max(ms for ms, _ in state.ended_attempts) == 999


def test_tries_that_were_cut_short_wound_down_or_resumed_do_not_count(store: Store, tmp_path: Path) -> None:
    states = [
        timed_out(100, owner="run flow", is_cut_short=True),
        timed_out(100, owner="step other"),
        took(100, partial=True),
        took(100, overtime=[{"event": "wind_down"}]),
        took(100, was_paused=True),
        took(100, attempts=2),
        took(100, status=Status.CANCELLED),
        took(100, status=Status.INTERRUPTED),
    ]
    for number, state in enumerate(states):
        add_run(store, tmp_path / "f", state, number=number)
    add_run(store, tmp_path / "f", number=100, run_ms=90_000, own_ms=500)  # resumed by another process
    add_run(store, tmp_path / "f", took(70, overtime=[{"event": "overtime", "granted_ms": 50}]), number=101)
    history = read_history(store.runs, "flow", tmp_path / "f")
    assert history.of_step("work", "command") == Measured((70,), uncounted=len(states))
    assert history.of_run().uncounted == 2  # also the run with a pause


# --- advice ------------------------------------------------------------------------------------------------


def test_advice_is_one_sentence_with_a_round_value(load: Any, store: Store, tmp_path: Path) -> None:
    """By the timeout of the step: how often each duration was seen, the verdict and the suggested value."""
    cases: list[tuple[str, list[Any], str, int | None, str]] = [
        ("60s", [], "unknown", None, "no past runs"),
        ("60s", [took(59_000)] * 4, "unknown", None, "4 runs are too few"),
        ("60s", [took(52_000)] * 5, "raise", 90_000, "raise it to 1m30s: the longest of 5 runs took 52s, of 1m"),
        ("60s", [*[took(9_000)] * 9, timed_out(60_000)], "raise", 120_000, "raise it to 2m: 1 of 10 runs reached 1m"),
        # It timed out at a shorter limit, before the author raised it.
        ("60s", [*[took(12_000)] * 9, timed_out(10_000)], "keep", None, "keep it: the longest of 10 runs took ≥12s"),
        ("60s", [took(5_000)] * 19, "keep", None, "keep it: the longest of 19 runs took 5s"),
        ("60s", [took(5_000)] * 30, "lower", 15_000, "lower it to 15s: the longest of 30 runs took 5s"),
        ("60s", [took(10)] * 30, "lower", 5_000, "lower it to 5s: the longest of 30 runs took 10ms"),
        ("6s", [took(10)] * 30, "keep", None, "keep it: the longest of 30 runs took 10ms"),
        ("0", [took(10)] * 30, "keep", None, "it has no timeout"),
        ("60s", [took(1, attempts=2)] * 6, "unknown", None, "no run can be counted (6 interrupted or continued)"),
    ]
    for at, (timeout, states, verdict, suggested, sentence) in enumerate(cases):
        for number, state in enumerate(states):
            add_run(store, tmp_path / str(at), state, number=at * 100 + number)
        history = read_history(store.runs, "flow", tmp_path / str(at))
        found = advice_of(load, f"steps: {{work: {{exec: 'true', timeout: {timeout}}}}}", history)["work"]
        assert (found.verdict, found.suggested_ms) == (verdict, suggested), (at, found)
        assert found.sentence.startswith(sentence), (at, found)


def test_advice_stays_within_the_budget_of_the_run(load: Any, store: Store, tmp_path: Path) -> None:
    for number in range(10):
        add_run(store, tmp_path / "f", took(29_000), number=number)
    history = read_history(store.runs, "flow", tmp_path / "f")
    step = "steps: {work: {exec: 'true', timeout: 30s%s}}"
    retry = ", on_fail: {retry: {max: 1, backoff: {delay_ms: 1000}}}"
    assert advice_of(load, step % "", history)["work"].suggested_ms == 45_000
    assert advice_of(load, "timeout: 40s\n" + step % "", history)["work"].suggested_ms == 39_000
    tight = advice_of(load, "timeout: 31s\n" + step % "", history)["work"]
    assert tight.verdict == "raise" and tight.suggested_ms is None
    assert tight.sentence.startswith("give the run more time, then raise it")
    assert advice_of(load, "timeout: 95s\n" + step % retry, history)["work"].suggested_ms == 45_000
    assert advice_of(load, "timeout: 70s\n" + step % retry, history)["work"].suggested_ms == 34_000
    assert advice_of(load, "timeout: 62s\n" + step % retry, history)["work"].suggested_ms is None


def test_a_default_timeout_is_raised_and_never_lowered(load: Any, store: Store, tmp_path: Path) -> None:
    for number in range(25):
        add_run(store, tmp_path / "f", took(10, "quick"), took(55_000, "slow"), number=number)
    found = advice_of(
        load,
        "steps: {quick: {exec: 'true'}, slow: {exec: 'true'}}",
        read_history(store.runs, "flow", tmp_path / "f"),
    )
    assert (found["quick"].source, found["quick"].verdict) == ("default", "keep")
    assert (found["slow"].source, found["slow"].suggested_ms) == ("default", 90_000)


def test_the_timeout_of_the_run_has_room_for_those_of_its_steps(load: Any, store: Store, tmp_path: Path) -> None:
    for number in range(25):
        add_run(store, tmp_path / "f", took(900), number=number, run_ms=1_000)
    history = read_history(store.runs, "flow", tmp_path / "f")
    lowered = advice_of(load, "timeout: 1h\nsteps: {work: {exec: 'true', timeout: 2m}}", history)[None]
    assert lowered.verdict == "lower" and lowered.suggested_ms == 180_000
    assert (
        advice_of(load, "timeout: 1h\nsteps: {work: {type: human-input, prompt: x}}", history)[None].verdict == "keep"
    )


# --- in passing --------------------------------------------------------------------------------------------


def test_a_check_reports_limits_that_were_nearly_reached(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHOTCLOCK_HOME", str(store.home))
    file = tmp_path / "flow.yaml"
    file.write_text("steps:\n  work:\n    exec: 'true'\n    timeout: 10s\n  renamed: {exec: 'true', timeout: 10s}\n")
    for number in range(5):
        add_run(store, file, took(9_000), took(9_000, "old"), number=number)
    [found] = find_near_limits(load_file(file))
    assert (found.rule, found.field, found.place.line) == ("history/near-limit", "steps.work.timeout", 4)
    assert (found.message, found.suggestion) == ("the longest of 5 runs took 9s, of 10s", "raise it to 15s")
    assert not found.is_error
    os.chmod(store.home, 0o777)  # a store that cannot be used
    assert find_near_limits(load_file(file)) == []
    os.chmod(store.home, 0o700)
    monkeypatch.setenv("SHOTCLOCK_HOME", str(tmp_path / "none"))
    assert find_near_limits(load_file(file)) == [] and not (tmp_path / "none").exists()
