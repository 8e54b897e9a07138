"""Runs with their steps, places in groups, and calls of `wrap`: one table each, without the products that use them."""

from typing import Any

import pytest

from shotclock.core.limits import ProcessIdentity, WallTime
from shotclock.core.value_types import replace
from shotclock.store.groups import GroupPlace, OnConflict, PlaceTaken
from shotclock.store.runs import Outdated, RunTaken, StepRecord, StoredRun, belongs_to
from shotclock.store.store import Store, log_name
from shotclock.store.wrapped_calls import RUNNING, UNKNOWN, WAITING, CallFilter, LoggedCall, OpenCall

NOW = WallTime(1_000_000)
ANN, BOB = ProcessIdentity("h", "b", 1, 1), ProcessIdentity("h", "b", 2, 2)


def alive(*living: ProcessIdentity) -> Any:
    return lambda process: process in living


def run(id: str, **fields: Any) -> StoredRun:
    return replace(StoredRun(id, "flow", "/f.yaml", {"steps": {}}, {"x": 1}, "t", ANN, NOW), **fields)


def envelope(**steps: Any) -> dict[str, Any]:
    data = {"steps": {name: {"status": "succeeded", "output": output} for name, output in steps.items()}}
    return {"data": data, "error": {"code": "FAIL_IF"}, "warnings": [], "meta": {"duration_ms": 7}}


def test_a_run_belongs_to_one_living_process_until_it_ends_once(store: Store) -> None:
    runs = store.runs
    runs.begin(run("r"), [StepRecord("kept", "succeeded", {"output": 1})])
    with pytest.raises(RunTaken):
        runs.begin(run("r"))
    with pytest.raises(RunTaken):
        runs.take_up("r", BOB, alive(ANN))
    assert runs.take_up("none", BOB, alive()) is None
    taken = runs.take_up("r", BOB, alive(BOB))
    assert taken is not None and taken.holder == BOB
    runs.park("r", ANN, NOW)
    assert [each.id for each in runs.list_open()] == ["r"], "only its holder parks it"
    runs.park("r", BOB, NOW)
    assert runs.list_open() == () and runs.list_open_ids() == {"r"}
    assert runs.take_up("r", ANN, alive(ANN, BOB)).parked_at is None  # type: ignore[union-attr]
    runs.record("r", [StepRecord("a", "running", {})], NOW + 5)
    runs.record_item("r", "a", 2, {"n": 2})
    runs.record_item("r", "a", 2, {"n": 3})
    assert runs.items("r", "a") == {2: {"n": 3}} and runs.last_seen_at("r") == NOW + 5
    runs.record("r", [StepRecord("a", "pending", {})], NOW)
    assert runs.items("r", "a"), "it waits, and its items with it"
    runs.record("r", [StepRecord("a", "pending", {"parts": [1]})], NOW)
    assert runs.items("r", "a") == {}
    runs.extend("r", NOW + 50)
    runs.set_back("r", 10)
    assert (runs.get("r").created_at, runs.get("r").deadline_at) == (NOW + -10, NOW + 40)  # type: ignore[union-attr]
    runs.record("r", [StepRecord("a", "succeeded", {"output": True})], NOW)
    assert runs.end("r", envelope(kept=1, a=1), NOW + 9, owes_notice=True) and not runs.end("r", envelope(), NOW)
    ended: Any = runs.get("r")
    assert [ended.envelope["data"]["steps"][name]["output"] for name in ("kept", "a")] == [1, 1], "1 is not True"
    assert runs.claim_notice("r") and not runs.claim_notice("r")
    runs.add_warnings("r", [{"code": "NOT_TOLD"}])
    assert runs.take_up("r", BOB, alive()).envelope["warnings"] == [{"code": "NOT_TOLD"}]  # type: ignore[union-attr, index]


def test_past_outdated_and_inner_runs_are_found(store: Store) -> None:
    runs = store.runs
    record = {"attempts": 2, "error": {"context": {"clock": {"kind": "idle"}}}, "tries": [[5, "failed"]]}
    for at, id in enumerate(("a", "b", "a.s", "a.s.2", "a.s.x", "b.s")):
        runs.begin(run(id, created_at=NOW + at, inputs={"n": at}))
        runs.record(id, [StepRecord("s", "failed", record)], NOW)
    for at, id in enumerate(("b", "b.s", "a.s.2", "a.s.x")):
        runs.end(id, envelope(), NOW + 100 + at)
    assert runs.list_inside("a", "s") == ("a.s",)
    found = runs.find_ended_inside("a", "s", "/f.yaml", {"n": 3})
    assert found is not None and found.id == "a.s.2" and runs.find_ended_inside("a", "s", "/f.yaml", {"n": 4}) is None
    assert runs.files_inside("a", "s") == {"/f.yaml": {"steps": {}}} and runs.list_files("flow") == ("/f.yaml",)
    past = runs.list_past("flow", "/f.yaml", 10, before=NOW + 5)
    assert [each.id for each in past] == ["a.s.x", "a.s.2", "b"] and (past[0].code, past[0].took_ms) == ("FAIL_IF", 7)
    step = past[0].steps[0]
    assert (step.attempts, step.clock, step.tries) == (
        2,
        {"kind": "idle"},
        ((5, "failed"),),
    ) and not step.was_wound_down
    for record in ({"partial": True}, {"overtime": [{"event": "asked"}, {"event": "wind_down"}]}):
        runs.record("b", [StepRecord("s", "succeeded", record)], NOW)
        assert runs.list_past("flow", "/f.yaml", 4)[3].steps[0].was_wound_down
    assert runs.list_past("flow", "/f.yaml", 10, may_go_on=lambda: False) == ()
    assert len(runs.list_past("flow", "/f.yaml", 1)) == 1
    ids = dict(runs.list_ids())
    for limits, outdated in (
        ((None, 0, 0), []),
        ((NOW + 101, 0, 0), ["b"]),
        ((NOW + 102, 0, 0), ["b", "b.s"]),
        ((None, 1, 0), ["b", "b.s"]),
        ((None, 0, 1), ["b", "b.s"]),
    ):
        assert [ids[each.seq] for each in runs.list_outdated(*limits)] == outdated, "those inside `a` stay with it"
    left = runs.list_left_behind(NOW + 3, alive(BOB))
    assert [ids[each.seq] for each in left] == ["a", "a.s"] and runs.list_left_behind(NOW + 3, alive(ANN)) == ()
    runs.take_up("a", BOB, alive(BOB))
    assert runs.forget([*left, Outdated(99, 0)]) == 1 and runs.get("a.s") is None and runs.get("a") is not None
    assert belongs_to("a.s", frozenset(["a"]), ".") and not belongs_to("ab.s", frozenset(["a"]), ".")


def test_of_the_runs_of_a_group_one_is_under_way_and_the_others_wait_cancel_or_are_refused(store: Store) -> None:
    def ask(id: str, on: OnConflict = OnConflict.WAIT, holder: ProcessIdentity = ANN, inside: Any = ()) -> Any:
        living = alive(ANN, BOB)
        return store.groups.ask(GroupPlace("g", id, holder, is_held=False), on, NOW, living, inside)

    assert ask("one").blocker is None and ask("one").blocker is None
    assert ask("two").blocker.run == "one" and ask("three", OnConflict.REFUSE).blocker.run == "one"
    assert [place.run for place in store.groups.list("g")] == ["one", "two"], "a refused one has no place"
    assert ask("inner", inside=("one",)).blocker is None
    with pytest.raises(PlaceTaken):
        ask("one", holder=BOB)
    assert ask("newer", OnConflict.CANCEL).blocker.run == "one" and ask("two").replaced_by == "newer"
    store.groups.leave("one", BOB)
    assert ask("newer").blocker.run == "one"
    store.groups.leave("one", ANN)
    assert ask("newer").blocker is None
    assert [place.run for place in store.groups.list("g") if place.is_held] == ["newer"]


def test_calls_are_kept_filtered_and_lost_with_their_process(store: Store) -> None:
    def ended(at: int, **fields: Any) -> LoggedCall:
        return replace(LoggedCall("s", "read", NOW + at, at, "ok", None, 0, 0, 1, 1, None, 1, 9), **fields)

    def opened(number: int, holder: ProcessIdentity = ANN, **fields: Any) -> OpenCall:
        return replace(OpenCall(holder, number, "s", "read", NOW, True, 5, 0, NOW + 5, "timeout", 1, None, 1), **fields)

    calls = store.calls
    some = [ended(1), ended(2, outcome="TIMEOUT", tool="write"), ended(3, outcome="INCOMPLETE"), ended(4, server="t")]
    calls.add(some, 0, [opened(1), opened(2, BOB), opened(3, is_sent=False)])
    for wanted, found in (
        (CallFilter(), [4, 3, 2, 1]),
        (CallFilter(server="t"), [4]),
        (CallFilter(tool="wri*"), [2]),
        (CallFilter(tool="none"), []),
        (CallFilter(failed=True), [2]),
        (CallFilter(timeouts=True), [2]),
        (CallFilter(since=NOW + 3), [4, 3]),
    ):
        assert [each.duration_ms for each in calls.list(wanted, 9)] == found, wanted
    assert [each.duration_ms for each in calls.list(CallFilter(), 1, slowest=True)] == [4]
    now = calls.look(CallFilter(), 2, alive(ANN))
    assert ([each.number for each in now.open], [each.number for each in now.lost], len(now.ended)) == ([3, 1], [2], 2)
    shown = now.describe_open(NOW + 3, lambda _: True)
    assert [(each["outcome"], each["duration_ms"]) for each in shown] == [(WAITING, 3), (RUNNING, 3)]
    assert now.describe_open(NOW, lambda _: False)[0]["outcome"] == UNKNOWN
    assert (shown[0]["due_at"], shown[0]["due_by"], shown[0]["pid"]) == ((NOW + 5).iso(), "timeout", 1)
    lost = now.describe_lost(NOW + 3)[0]
    assert (lost["duration_ms"], lost["due_at"], lost["due_by"]) == (None, None, None)
    calls.add([], 0, closed=[(ANN, 1)])
    assert [each.number for each in calls.look(CallFilter(), 0, alive(ANN)).open] == [3]
    counts = [calls.count_outdated(*limits) for limits in ((NOW + 2, 0), (None, 3), (None, 0))]
    assert counts == [1, 1, 0]
    assert calls.forget_outdated(NOW + 2, 3) == 1 and calls.forget_outdated(NOW + 2, 3) == 0
    assert calls.forget_lost(NOW, 0, alive(ANN)) == 0 and calls.forget_lost(NOW + 1, 0, alive(ANN)) == 1
    calls.add([ended(5)], 2)
    assert [each.duration_ms for each in calls.list(CallFilter(), 9)] == [5, 4]


def test_names_of_logs_are_names_of_files_and_differ() -> None:
    assert (log_name("a b[1]"), log_name("a/b"), log_name("..")) == ("a b[1]", "a%2Fb", "%2E%2E")
    long = [log_name("a" * 180), log_name("a" * 181), log_name("a" * 182)]
    assert [len(name) for name in long] == [180] * 3 and len(set(long)) == 3
