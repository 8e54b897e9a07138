"""What is decided about a call and a job without an App: places, keys, identities, states, steps of a command."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shotclock.calls.call import CallRequest, Outcome, admit
from shotclock.calls.preloaded_zygote import Program
from shotclock.core.catalogue import Catalogue, CommandSpec, HandlerReference, Interruption
from shotclock.core.envelope import Problem
from shotclock.core.errors import Ending, Failure
from shotclock.core.limits import Clocks, Deadline, WallTime
from shotclock.core.value_types import as_dict, replace
from shotclock.dispatch.admission import ConcurrencyLimits, KeyedCall, find_other_work
from shotclock.dispatch.background_command import BackgroundCommand, Ready, describe_command, is_abandoned, read_name
from shotclock.dispatch.dispatcher import CommandListener
from shotclock.dispatch.invocation import Invocation, InvocationCheckpoint, Target
from shotclock.dispatch.job_client import JobClient, answer_for_job, limit_ms, lost_envelope, progress_of
from shotclock.store.jobs import STARTING_LIMIT_MS, Job, JobState
from shotclock.store.store import Store
from shotclock.supervise.clock import monotonic_ns, wall_time
from shotclock.supervise.kernel import this_process

SPEC = CommandSpec("pay", HandlerReference("shop", "pay"), interruption=Interruption(), steps=("a", "b", "c"))
SHOP = Catalogue("shop", "1.0.0", commands=(SPEC,))
GONE = replace(this_process(), started=1)  # its pid is used again


@pytest.fixture
def store(tmp_path: Path) -> Any:
    with Store.open(tmp_path) as opened:
        yield opened


def invocation(**fields: Any) -> Invocation:
    return replace(Invocation(SHOP, SPEC, Program(None), {"to": 1}, 5_000), **fields)


def job(**fields: Any) -> Job:
    now = wall_time()
    return replace(invocation().as_job("/tmp/none.log", "j1", now), **fields)


def refused(outcome: Any) -> str:
    assert isinstance(outcome, Outcome) and isinstance(outcome.problem, Problem)
    return outcome.problem.code


def test_a_place_is_taken_waited_for_and_given_back(store: Store) -> None:
    spec = replace(SPEC, single_flight="to {to}", concurrency=2)
    limits = ConcurrencyLimits(replace(SHOP, commands=(spec,)), lambda: store)

    async def scenario() -> None:
        async def enter(to: int, queue_ms: int = 0) -> Callable[[], None] | Outcome:
            call = admit("pay", Clocks(5_000, queue_ms=queue_ms, grace_ms=0))
            call.arguments = {"to": to}
            return await limits.enter(call)

        first, second = await enter(1), await enter(2)
        assert callable(first) and callable(second) and limits.guards("pay") and not limits.guards("other")
        conflict = await enter(3)
        assert refused(conflict) == "LOCK_HELD" and conflict.problem.context["lock"] == "shop/pay"  # type: ignore[union-attr]
        assert len(store.locks.list()) == 4, "a call that was refused holds no place"
        second()
        assert (await enter(1)).problem.context["lock"] == "shop:to 1"  # type: ignore[union-attr]
        waiting = asyncio.ensure_future(enter(1, queue_ms=4_000))
        await asyncio.sleep(0.02)
        assert not waiting.done()
        first()
        assert callable(await waiting)

    asyncio.run(scenario())


def test_a_repeat_under_a_key_gets_the_first_answer_unless_that_changed_nothing(store: Store) -> None:
    def keyed(arguments: dict[str, object], key: str = "k") -> KeyedCall:
        return KeyedCall(store, "shop/pay", key, arguments)

    async def scenario() -> None:
        first, again = admit("pay", Clocks(5_000)), admit("pay", Clocks(50))
        assert await keyed({"a": 1}).begin(first) is None and first.keep_answer is not None
        assert refused(await keyed({"a": 2}).begin(again)) == "KEY_REUSED"
        late: Any = await keyed({"a": 1}).begin(again)
        assert (refused(late), late.ending) == ("TIMEOUT", Ending.DETACHED)
        envelope = answer_for_job(job(), Outcome(Ending.FINISHED, data={"x": 1}))
        first.keep_answer(envelope)
        replayed: Any = await keyed({"a": 1}).begin(again)
        assert replayed.data == {"x": 1} and replayed.warnings[-1]["code"] == "REPLAYED"
        other = admit("pay", Clocks(5_000))
        assert await keyed({}, "none").begin(other) is None and other.keep_answer is not None
        other.keep_answer(answer_for_job(job(), Outcome(Ending.NOT_STARTED, Problem("ARG_ERROR", "wrong"))))
        assert await keyed({}, "none").begin(other) is None, "nothing was done: it may be done now"

    asyncio.run(scenario())
    assert find_other_work(store, "shop/job", "k", "one") is None
    assert refused(find_other_work(store, "shop/job", "k", "two")) == "KEY_REUSED"
    digest = KeyedCall(store, "", "", {})._digest
    store.idempotency.begin("shop/pay", "dead", digest, GONE, wall_time(), lambda _: False)
    assert refused(asyncio.run(keyed({}, "dead").begin(admit("pay", Clocks(50))))) == "INTERRUPTED"


def test_the_same_work_has_the_same_identity_and_anything_else_another() -> None:
    key = invocation().key()
    assert invocation(timeout_ms=1, resume_from="a", proposal_id="p").key() == key
    others: list[dict[str, Any]] = [{"arguments": {"to": 2}}, {"idempotency_key": "k"}, {"owner": "bob"}]
    for other in (*others, {"catalogue": replace(SHOP, version="2")}):
        assert invocation(**other).key() != key, other
    made = job()
    assert (made.deadline_at, made.max_lifetime_ms, limit_ms(made)) == (made.created_at + 5_000, 3_600_000, 5_000)
    endless = invocation(timeout_ms=0).as_job("x.log", "j", WallTime(5))
    assert endless.deadline_at is None and limit_ms(endless) == 3_600_000 and endless.stdin_path is None
    assert not invocation().resumes and invocation(spec=replace(SPEC, interruption=Interruption(resume=True))).resumes


def test_a_job_is_what_its_row_and_its_runner_say(store: Store) -> None:
    client, now = JobClient(store, ["shop"]), wall_time()
    done = answer_for_job(job(), Outcome(Ending.FINISHED, data={})).to_dict()
    cancelled = answer_for_job(job(), Outcome(Ending.KILLED, Problem("CANCELLED", "x"))).to_dict()
    ended = {"state": JobState.FINISHED, "ended_at": now}
    for fields, status in (
        ({}, "running"),
        ({**ended, "envelope": done}, "complete"),
        ({**ended, "envelope": cancelled}, "cancelled"),
        ({**ended, "state": JobState.LOST}, "failed"),
    ):
        shown = client.describe(job(**fields))
        assert (shown["status"], shown["terminal"]) == (status, bool(fields)), fields
    assert client.describe(job())["cancel_command"] == "shop job cancel j1"
    assert progress_of(job()) == {"done": 0}
    assert progress_of(job(progress_done=2, progress_unit="x")) == {"done": 2, "unit": "x"}
    meta: Any = lost_envelope(job())["meta"]
    assert (meta["ending"], meta["side_effects"], meta["duration_ms"]) == ("not_started", "none", 0)
    assert lost_envelope(job(runner=GONE))["meta"]["ending"] == "killed"
    assert answer_for_job(job(attempt=2), Outcome(Ending.NOT_STARTED)).meta["side_effects"] == "unknown"
    created = now + -STARTING_LIMIT_MS
    for id, fields, is_lost in (
        ("new", {}, False),
        ("late", {"attempt_at": created}, True),
        ("mine", {"state": JobState.RUNNING, "runner": this_process()}, False),
    ):
        store.jobs.attach_or_create(job(id=id, key=id, created_at=now, **{"attempt_at": now, **fields}), lambda _: True)
        looked = client.look(id)
        assert looked is not None and (looked.state is JobState.LOST) is is_lost, id
    with pytest.raises(Failure, match="there is no job"):
        client.find("other")
    assert client.find("ne").id == "new"
    for budget_ms, parent_ms, waits in ((None, None, None), (100, None, 100), (100, 50, 50), (None, 50, 50)):
        parent = None if parent_ms is None else Deadline.after_ms(monotonic_ns(), parent_ms * 10 // 9)
        until, waits_ms = JobClient.patience(admit("x", Clocks(9_999), parent=parent), budget_ms)
        assert (until is None) is (waits is None) and abs(waits_ms - (waits or 0)) < 10, (budget_ms, parent_ms)


def test_a_command_in_the_background_is_described_by_its_job() -> None:
    command, now = BackgroundCommand(["/bin/sleep", "5"], "/", clocks={"timeout_ms": 100}), WallTime(1_000)
    made = command.as_job("j", "j.log", now)
    assert (made.key, made.command, made.deadline_at) == ("exec j", "sleep", now + 100)
    assert replace(command, name="web").as_job("j", "j.log", now).key == "exec name web"
    shown = describe_command(made, now + 40)
    assert (shown["age_ms"], shown["lifetime_left_ms"], shown["ready"], shown["ready_sign"]) == (40, 60, False, None)
    assert describe_command(replace(made, ended_at=now), now)["ready"] is None
    assert describe_command(replace(made, spec={**made.spec, "ready_at_ms": 1}), now)["ready"] is True
    assert not is_abandoned(made) and is_abandoned(replace(made, spec={"starter": as_dict(GONE)}))
    signs = {
        "port 80": Ready(port=80),
        "a line that matches 'up'": Ready(output="up"),
        "http://x": Ready(url="http://x"),
    }
    assert {text: each.describe() for text, each in signs.items()} == {text: text for text in signs}
    assert all(each.is_asked for each in signs.values()) and not Ready().is_asked
    assert read_name("a.b_c-9") == "a.b_c-9"
    for wrong in ("", "-a", "a" * 65, "a b"):
        with pytest.raises(ValueError):
            read_name(wrong)


def test_a_target_is_a_module_or_a_file_and_the_name_of_an_app(tmp_path: Path) -> None:
    (tmp_path / "shop.py").touch()
    assert Target.parse("pkg.shop") == Target("app", module="pkg.shop")
    assert Target.parse(f"{tmp_path}/shop.py:make()") == Target("make()", file=f"{tmp_path}/shop.py")
    assert Target.parse("pkg:a.b").program.imports == ("pkg",)
    for text, code in (("pkg:1", "TARGET_UNUSABLE"), ("p-g", "TARGET_UNUSABLE"), ("a/b.py", "TARGET_NOT_FOUND")):
        with pytest.raises(Failure) as found:
            Target.parse(text)
        assert found.value.code == code, text


def test_the_steps_and_items_of_a_command_that_failed_say_where_to_go_on() -> None:
    news: list[Any] = []
    request = CallRequest("pay", {}, resume_from="b", on_progress=lambda *each: news.append(each))
    listener = CommandListener(InvocationCheckpoint(Store.open, str), replace(SPEC, streams=True), request, None)
    assert listener.add_steps(None) == {
        "completed_steps": [], "pending_steps": ["b", "c"], "skipped_steps": ["a"], "resume_from": "b",
    }  # fmt: skip
    for name in ("b", "b", "c"):
        listener.step(name)
    shown = listener.add_steps(5)
    assert (shown["result"], shown["completed_steps"], shown["failed_step"]) == (5, ["b"], "c")
    assert shown["resume_from"] == "c"
    listener.wrote('"one"')
    listener.wrote("2")
    assert listener.items == ["one", 2] and news == [(1.0, None, "one"), (2.0, None, "2")]
    silent = CommandListener(InvocationCheckpoint(Store.open, str), SPEC, CallRequest("pay", {}, resume_from="x"), None)
    silent.wrote("1")
    assert silent.items == [] and silent.skipped_steps == ()
