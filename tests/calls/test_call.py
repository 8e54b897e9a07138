"""The chokepoint: what every call has, wherever its handler runs."""

import asyncio
import contextlib
import functools
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import pytest

from shotclock import Clocks, Context, Envelope, Failure, Operation, Runtime
from tests.calls import guests, operations, work
from tests.calls.bounds import ROOT, WrongFoot, eventually, mark_of, marked, on_time, run, soon, timed
from tests.rows import corners

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("no_survivors")]

Validate = Callable[[dict[str, Any]], dict[str, Any]]

PRELOAD = ["tests.calls.work", "tests.calls.operations", "tests.calls.guests"]
PLACES = ["process", "inline"]
EVERYWHERE = ["process", "shared", "inline"]
SOON = Clocks.of("5s")


def operation_at(place: Any, handler: Any, name: str = "operation", **more: Any) -> Operation:
    """A sync function as an operation of that place; in the shared process, its async twin; inline, inside of one."""
    if place == "shared":
        handler = getattr(guests, handler.__name__, handler)
    if place != "inline":
        return Operation(name, handler, isolation=place, **more)
    if handler is operations.is_silent:
        return Operation(name, sleeps_in_silence, isolation="inline", **more)

    @functools.wraps(handler)
    async def awaited(**arguments: Any) -> Any:
        return handler(**arguments)

    return Operation(name, awaited, isolation="inline", **more)


async def sleeps_in_silence(ms: int) -> None:
    await asyncio.sleep(ms / 1000)


def one_call(operation: Operation, arguments: Any = None, clocks: Clocks = SOON, **options: Any) -> Envelope:
    async def scenario() -> Envelope:
        async with Runtime(preload=PRELOAD, **options) as runtime:
            return await runtime.call(operation, arguments, clocks)

    return run(scenario())


# --- validation -----------------------------------------------------------------------------------


@pytest.mark.parametrize("place", EVERYWHERE)
def test_every_problem_with_the_arguments_is_reported_at_once_and_nothing_runs(
    place: str, tmp_path: Path, validate_envelope: Validate
) -> None:
    wrong = {"count": "many", "folder": str(tmp_path), "colour": "red"}
    envelope = one_call(operation_at(place, operations.wants), wrong)
    validate_envelope(envelope.to_dict())
    assert (envelope.code, envelope.exit_code, envelope.ending) == ("ARG_ERROR", 2, "not_started")
    assert {problem["field"] for problem in envelope.error["errors"]} == {"count", "name", "colour"}
    assert envelope.meta["side_effects"] == "none"
    assert list(tmp_path.iterdir()) == []


def test_arguments_that_cannot_be_sent_to_a_worker_are_refused_and_cost_no_worker(validate_envelope: Validate) -> None:
    async def scenario() -> Envelope:
        async with Runtime(preload=PRELOAD) as runtime:
            echo = Operation("echo", operations.echo)
            envelope = await runtime.call(echo, {"value": lambda: 1}, SOON)
            assert (await runtime.call(echo, {"value": 2}, SOON)).value == 2
            return envelope

    envelope = run(scenario())
    validate_envelope(envelope.to_dict())
    assert (envelope.code, envelope.exit_code, envelope.ending) == ("ARG_ERROR", 2, "not_started")


def test_an_unknown_operation_is_refused_with_the_name_that_was_meant(validate_envelope: Validate) -> None:
    async def scenario() -> list[Envelope]:
        async with Runtime(operations=[Operation("deploy", operations.noop)]) as runtime:
            return [await runtime.call("deplay"), await runtime.call("zzz")]

    close, far = run(scenario())
    for envelope in (close, far):
        validate_envelope(envelope.to_dict())
        assert (envelope.code, envelope.exit_code, envelope.ending) == ("UNKNOWN_OPERATION", 5, "not_started")
    assert "'deploy'" in close.error["suggestion"]
    assert "deploy" not in far.error["suggestion"]


def test_a_runtime_that_is_not_entered_or_already_closed_refuses_calls(validate_envelope: Validate) -> None:
    async def scenario() -> list[Envelope]:
        runtime = Runtime()
        before = [await runtime.call(Operation("noop", operations.noop)), await runtime.run(["true"])]
        async with runtime:
            pass
        after = [await runtime.call(Operation("noop", operations.noop)), await runtime.run(["true"])]
        return before + after

    for envelope in run(scenario()):
        validate_envelope(envelope.to_dict())
        assert (envelope.code, envelope.ending) == ("SHUTTING_DOWN", "not_started")


# --- observers ------------------------------------------------------------------------------------


# Handler, arguments, clocks, the code that comes of it.
ENDS = {
    "success": (operations.noop, {}, SOON, None),
    "failure": (operations.fails, {}, SOON, "TEST_OUT_OF_STOCK"),
    "bug": (operations.raises, {"which": "rich"}, SOON, "INTERNAL_ERROR"),
    "invalid": (operations.noop, {"colour": "red"}, SOON, "ARG_ERROR"),
    "timeout": (operations.is_silent, {"ms": 9000}, Clocks.of("150ms", grace="300ms"), "TIMEOUT"),
}


@pytest.mark.parametrize("place", PLACES)
def test_every_observer_is_told_exactly_once_how_a_call_ended(place: str, validate_envelope: Validate) -> None:
    first: list[Envelope] = []
    second: list[Envelope] = []

    async def scenario() -> list[Envelope]:
        answers = []
        async with Runtime(preload=PRELOAD, observers=[first.append, second.append]) as runtime:
            for how, (handler, arguments, clocks, code) in ENDS.items():
                answers.append(await runtime.call(operation_at(place, handler, how), arguments, clocks))
                assert answers[-1].code == code, how
            silent = operation_at(place, operations.is_silent, "cancel")
            task = asyncio.create_task(runtime.call(silent, {"ms": 500}, Clocks.of("20s", grace="300ms")))
            await soon(lambda: runtime.counts.calls == len(answers) + 1)
            task.cancel()
            await asyncio.wait([task], timeout=5)
            assert task.cancelled()
        return answers

    answers = run(scenario())
    for told in (first, second):
        names = [envelope.meta["command"] for envelope in told]
        assert sorted(names) == sorted([*ENDS, "cancel"])
        (cancelled,) = (envelope for envelope in told if envelope not in answers)
        validate_envelope(cancelled.to_dict())
        assert (cancelled.code, cancelled.meta["command"]) == ("CANCELLED", "cancel")


def test_commands_are_told_to_observers_as_well() -> None:
    told: list[Envelope] = []

    async def scenario() -> list[Envelope]:
        async with Runtime(observers=[told.append]) as runtime:
            answers = [
                await runtime.run(["true"], SOON),
                await runtime.run(["false"], SOON),
                await runtime.run(["sleep", "9"], Clocks.of("100ms")),
                await runtime.run([], SOON),
            ]
            task = asyncio.create_task(runtime.run(["sleep", "9"], SOON))
            await soon(lambda: runtime.counts.calls == len(answers) + 1)
            task.cancel()
            await asyncio.wait([task], timeout=5)
            await soon(lambda: len(told) == len(answers) + 1)
            return answers

    run(scenario())
    codes = {envelope.code for envelope in told}
    assert codes == {None, "COMMAND_FAILED", "TIMEOUT", "ARG_ERROR", "CANCELLED"}


def test_an_observer_that_raises_is_logged_and_the_others_are_still_called(caplog: pytest.LogCaptureFixture) -> None:
    told: list[Envelope] = []

    def broken(envelope: Envelope) -> None:
        raise RuntimeError("the log is full")

    async def scenario() -> None:
        async with Runtime(observers=[broken, told.append]) as runtime:
            for _ in range(3):
                assert (await runtime.call(operation_at("inline", operations.noop), clocks=SOON)).ok

    run(scenario())
    assert len(told) == 3
    assert caplog.text.count("RuntimeError: the log is full") == 3


def test_options_that_were_withdrawn_are_refused() -> None:
    async def observer(envelope: Envelope) -> None: ...

    with pytest.raises(TypeError, match="plain function"):
        Runtime(observers=[observer])
    for made in (
        lambda: Runtime(guards=[]),  # type: ignore[call-arg]
        lambda: Runtime(share_loop=True),  # type: ignore[call-arg]
        lambda: Operation("noop", operations.noop, guards=()),  # type: ignore[call-arg]
    ):
        with pytest.raises(TypeError):
            made()
    for isolation, instead in (("loop", "'shared'"), ("thread", "'process'")):
        with pytest.raises(ValueError, match=instead):
            Operation("noop", operations.noop_async, isolation=isolation)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="not async"):
        Operation("noop", operations.noop, isolation="inline")


# --- calls that call --------------------------------------------------------------------------------


async def asks_further_async(ctx: Context, operation: str, arguments: Any, clocks: Any) -> dict[str, Any]:
    before = ctx.remaining_ms()
    envelope = await ctx.call(operation, arguments, **clocks)
    return {"before_ms": before, "envelope": envelope.to_dict(), "value": envelope.value}


async def calls_itself_async(ctx: Context) -> dict[str, Any]:
    envelope = await ctx.call(ctx.name)
    return {"depth": ctx.depth, "code": envelope.code} if not envelope.ok else envelope.value


def asking(place: Any) -> Operation:
    handler = operations.asks_further if place == "process" else asks_further_async
    return Operation("parent", handler, isolation=place)


def ask(parent: str, child: Operation, clocks: Clocks, *, arguments: Any = None, child_clocks: Any = None) -> Any:
    async def scenario() -> Any:
        async with Runtime(operations=[child], preload=PRELOAD) as runtime:
            assert (await runtime.call(Operation("noop", operations.noop), clocks=SOON)).ok  # the workers are up
            further = {"operation": child.name, "arguments": arguments or {}, "clocks": child_clocks or {}}
            return await runtime.call(asking(parent), further, clocks)

    return run(scenario())


@pytest.mark.parametrize("parent", EVERYWHERE)
def test_a_call_from_inside_a_handler_gets_what_its_caller_has_left_minus_the_reserve(
    parent: str, validate_envelope: Validate
) -> None:
    children = [operation_at(place, operations.looks_around, place) for place in EVERYWHERE]

    async def scenario() -> list[Envelope]:
        async with Runtime(operations=children, preload=PRELOAD) as runtime:
            clocks = {"timeout": "60s"}
            return [
                await runtime.call(
                    asking(parent), {"operation": child.name, "arguments": {}, "clocks": clocks}, Clocks.of("4s")
                )
                for child in children
            ]

    for answer in run(scenario()):
        assert answer.ok, answer
        told = answer.value
        envelope = validate_envelope(told["envelope"])
        assert envelope["ok"]
        reserve_ms = told["before_ms"] // 10
        granted_ms = envelope["meta"]["timeout_ms"]
        assert told["before_ms"] // 2 < granted_ms <= told["before_ms"] - reserve_ms + 1
        assert told["value"]["remaining_ms"] <= granted_ms
        assert told["value"]["depth"] == 1
        assert envelope["meta"]["trace_id"] == answer.meta["trace_id"]
        assert [warning["code"] for warning in envelope["warnings"]] == ["DEADLINE_INHERITED"]


@pytest.mark.parametrize("parent", EVERYWHERE)
def test_a_child_cut_short_by_its_parent_answers_before_the_parents_own_bell(parent: str) -> None:
    silent = operation_at("process", operations.is_silent, "child")
    for timeout_ms in (900, 2700, 8100):  # a busy machine may need longer to answer than what is kept back for it
        clocks = Clocks(timeout_ms=timeout_ms)
        answer = ask(parent, silent, clocks, arguments={"ms": 20_000}, child_clocks={"timeout": "60s"})
        if answer.ok:
            break
    assert answer.ok, answer
    envelope = answer.value["envelope"]
    assert envelope["error"]["code"] == "TIMEOUT"
    assert envelope["error"]["context"]["clock"]["owner"] == "parent"
    assert answer.meta["duration_ms"] < timeout_ms


@pytest.mark.parametrize("place", EVERYWHERE)
def test_calls_that_call_themselves_end_at_the_depth_bound(place: Any, validate_envelope: Validate) -> None:
    handler = operations.calls_itself if place == "process" else calls_itself_async

    async def scenario() -> Envelope:
        operation = Operation("recursive", handler, isolation=place)
        async with Runtime(operations=[operation], preload=PRELOAD) as runtime:
            return await runtime.call(operation, clocks=Clocks.of("15s"))

    envelope = run(scenario())
    validate_envelope(envelope.to_dict())
    assert envelope.value == {"depth": 15, "code": "DEPTH_EXCEEDED"}


def test_a_worker_that_calls_further_needs_no_place_of_its_own_for_the_child() -> None:
    async def scenario() -> list[Envelope]:
        child = Operation("child", operations.noop)
        async with Runtime(operations=[child], preload=PRELOAD, workers=1, most_workers=1) as runtime:
            further = {"operation": "child", "arguments": {}, "clocks": {}}
            parents = [runtime.call(asking("process"), further, Clocks.of("10s")) for _ in range(3)]
            return await asyncio.gather(*parents)

    for envelope in run(scenario()):
        assert envelope.ok and envelope.value["value"] == 1, envelope


# --- the context ----------------------------------------------------------------------------------


@pytest.mark.parametrize("place", EVERYWHERE)
def test_a_handler_sees_its_deadline_and_its_progress_is_seen(place: str) -> None:
    seen: list[tuple[int, int | None, str | None]] = []

    async def scenario() -> Envelope:
        async with Runtime(preload=PRELOAD) as runtime:
            operation = operation_at(place, operations.looks_around, "look")
            envelope = await runtime.call(operation, clocks=SOON, on_progress=lambda *step: seen.append(step))
            await soon(lambda: len(seen) == 2)
            return envelope

    envelope = run(scenario())
    look = envelope.value
    assert (look["name"], look["depth"], look["stopping"]) == ("look", 0, False)
    assert look["request_id"] == envelope.meta["request_id"]
    assert 0 < look["remaining_ms"] <= 5000
    assert abs(look["remaining_ms"] - look["deadline_in_ms"]) < 1000
    assert seen == [(1, 2, "steps"), (2, 2, "steps")]


@pytest.mark.parametrize("place", PLACES)
def test_a_handler_without_a_timeout_has_no_deadline(place: str) -> None:
    def remaining(ctx: Context) -> Any:
        return [ctx.deadline, ctx.remaining_ms()]

    handler = operations.remaining if place == "process" else remaining
    envelope = one_call(operation_at(place, handler), clocks=Clocks.of(0))
    assert envelope.value == [None, None]
    assert envelope.meta["timeout_ms"] == 0


async def works_until_asked_async(ctx: Context) -> str:
    give_up_at = time.monotonic() + work.FOREVER_S
    while not ctx.stopping and time.monotonic() < give_up_at:
        await asyncio.sleep(0.002)
    return "wound down"


@pytest.mark.parametrize("place", EVERYWHERE)
def test_the_soft_clock_asks_the_handler_to_wind_down_and_its_result_counts(
    place: Any, validate_envelope: Validate
) -> None:
    handler = operations.works_until_asked_to_stop if place == "process" else works_until_asked_async

    async def scenario() -> Envelope:
        async with Runtime(preload=PRELOAD) as runtime:
            await runtime.call(operation_at(place, operations.noop), clocks=SOON)
            return await runtime.call(Operation("soft", handler, isolation=place), clocks=Clocks.of("5s", soft="200ms"))

    envelope = run(scenario())
    validate_envelope(envelope.to_dict())
    assert (envelope.value, envelope.ending) == ("wound down", "finished")
    assert [(warning["code"], warning["context"]) for warning in envelope.warnings] == [
        ("SOFT_LIMIT", {"limit_ms": 200})
    ]
    assert 200 <= envelope.meta["duration_ms"] < 3900


@pytest.mark.parametrize(
    ("place", "ending"), [("process", "killed"), ("shared", "cancelled"), ("inline", "cancelled")], ids=EVERYWHERE
)
def test_a_handler_that_is_silent_for_the_idle_clock_is_stopped_as_stalled(
    place: Any, ending: str, validate_envelope: Validate
) -> None:
    handler = operations.is_silent if place == "process" else sleeps_in_silence

    async def scenario() -> Envelope:
        async with Runtime(preload=PRELOAD) as runtime:
            await runtime.call(operation_at(place, operations.noop), clocks=SOON)
            clocks = Clocks.of("5s", idle="200ms", grace="500ms")
            return await runtime.call(Operation("silent", handler, isolation=place), {"ms": 4000}, clocks)

    envelope = run(scenario())
    validate_envelope(envelope.to_dict())
    assert (envelope.code, envelope.exit_code, envelope.ending) == ("STALLED", 10, ending)
    clock = envelope.error["context"]["clock"]
    assert (clock["kind"], clock["limit_ms"]) == ("idle", 200)
    assert 200 <= envelope.meta["duration_ms"] < 3900


def test_a_soft_clock_that_rings_while_the_call_still_waits_for_a_worker_is_heard_when_it_starts() -> None:
    """The pool is cold and takes longer than the soft clock."""
    operation = Operation("soft", operations.works_until_asked_to_stop)
    envelope = one_call(operation, clocks=Clocks.of("4s", soft="50ms"))
    assert envelope.value == "wound down", envelope
    assert [warning["code"] for warning in envelope.warnings] == ["SOFT_LIMIT"]


def test_the_idle_clock_does_not_count_the_wait_for_a_worker_and_rings_after_it() -> None:
    """Nothing is silent that has not begun; once it has, silence is noticed as ever."""

    async def after_a_long_wait(handler: Any, arguments: Any) -> Envelope:
        async with Runtime(preload=PRELOAD, workers=1, most_workers=1) as runtime:
            note = {"path": os.devnull, "number": 1, "nap_ms": 900}
            busy = asyncio.create_task(runtime.call(Operation("busy", operations.note), note, SOON))
            await soon(lambda: runtime.counts.calls == 1)
            clocks = Clocks.of("8s", idle="300ms", grace="500ms")
            envelope = await runtime.call(Operation("waits", handler), arguments, clocks)
            assert (await busy).ok
            return envelope

    lively = run(after_a_long_wait(operations.says_it_lives, {"ms": 400}))
    assert lively.value == "still here", lively
    silent = run(after_a_long_wait(operations.is_silent, {"ms": 5000}))
    assert (silent.code, silent.ending) == ("STALLED", "killed"), silent


def test_progress_is_a_sign_of_life_to_the_idle_clock() -> None:
    clocks = Clocks.of("10s", idle="300ms")
    operation = Operation("lively", operations.says_it_lives)
    envelope = one_call(operation, {"ms": 700}, clocks)
    assert envelope.value == "still here", envelope
    assert envelope.meta["duration_ms"] >= 700


# --- what cannot be stopped -----------------------------------------------------------------------


async def ignores_cancellation(until: threading.Event) -> None:
    while not until.is_set():
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(0.01)


def test_abandoned_calls_are_listed_and_at_the_limit_only_killable_work_is_still_taken(
    validate_envelope: Validate, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shotclock.calls.runtime.ORPHAN_LIMIT", 2)
    released = threading.Event()

    async def deaf() -> str:
        await ignores_cancellation(released)
        return "too late"

    told: list[Envelope] = []

    async def scenario() -> Envelope:
        async with Runtime(preload=PRELOAD, observers=[told.append]) as runtime:
            clocks = Clocks.of("100ms", grace="0ms")
            for number in range(2):
                operation = Operation(f"deaf {number}", deaf, isolation="inline")
                assert (await runtime.call(operation, clocks=clocks)).code == "TIMEOUT"
            listed = runtime.orphans
            assert [orphan["operation"] for orphan in listed] == ["deaf 0", "deaf 1"]
            assert all(orphan["running_ms"] >= 100 for orphan in listed)
            noop = operation_at("inline", operations.noop)
            refused = await runtime.call(noop, clocks=SOON)
            assert (await runtime.call(Operation("noop", operations.noop), clocks=SOON)).ok
            assert (await runtime.run(["true"], SOON)).ok
            released.set()
            await soon(lambda: not runtime.orphans)
            assert (runtime.counts.abandoned, runtime.counts.late) == (2, 2)
            assert (await runtime.call(noop, clocks=SOON)).ok
            return refused

    refused = run(scenario())
    validate_envelope(refused.to_dict())
    assert (refused.code, refused.exit_code, refused.ending) == ("ORPHANS_EXHAUSTED", 12, "not_started")
    assert [orphan["operation"] for orphan in refused.error["context"]["orphans"]] == ["deaf 0", "deaf 1"]
    assert len(told) == 6, "a late result is never told"


def test_inline_work_whose_thread_of_a_pool_runs_on_is_abandoned_not_cancelled() -> None:
    released = threading.Event()

    async def rests() -> None:
        await asyncio.to_thread(released.wait, 60)

    async def scenario() -> None:
        async with Runtime() as runtime:
            operation = Operation("x", rests, isolation="inline")
            assert (await runtime.call(operation, clocks=Clocks.of("50ms", grace="100ms"))).ending == "abandoned"
            assert [each["operation"] for each in runtime.orphans] == ["x"]
            released.set()
            await soon(lambda: runtime.counts.late == 1)
            assert not runtime.orphans
            released.clear()
            asyncio.get_running_loop().call_later(0.1, released.set)
            assert (await runtime.call(operation, clocks=Clocks.of("50ms", grace="10s"))).ending == "cancelled"

    run(scenario())


# --- cancellation ---------------------------------------------------------------------------------


@pytest.mark.parametrize("again", [False, True], ids=["once", "twice"])
@pytest.mark.parametrize("surface", ["process", "command", "inline"])
def test_cancelling_the_caller_stops_the_work_and_is_passed_on(surface: Any, again: bool, tmp_path: Path) -> None:
    started, ended = threading.Event(), threading.Event()

    async def awaits() -> None:
        started.set()
        try:
            await asyncio.sleep(work.FOREVER_S)
        finally:
            ended.set()

    def has_started() -> object:
        return mark_of(tmp_path, "ready") if surface in ("process", "command") else started.is_set()

    async def scenario() -> None:
        async with Runtime(preload=PRELOAD) as runtime:
            clocks = Clocks.of("20s", grace="2s")
            calls = {
                "process": lambda: runtime.call(
                    Operation("d", work.cleans_up_when_asked), {"folder": str(tmp_path)}, clocks
                ),
                "command": lambda: runtime.run(
                    [sys.executable, "-m", "tests.calls.work", "cleans_up_when_asked", str(tmp_path)], clocks, cwd=ROOT
                ),
                "inline": lambda: runtime.call(Operation("awaits", awaits, isolation="inline"), clocks=clocks),
            }
            task = asyncio.create_task(calls[surface]())
            await soon(has_started, within=10)
            task.cancel()
            if again:
                await asyncio.sleep(0.02)
                task.cancel()
            done, _ = await asyncio.wait([task], timeout=3)
            assert done and task.cancelled()
            if surface in ("process", "command"):
                assert (tmp_path / "cleaned").exists()
                assert not marked(tmp_path)
            else:
                assert ended.is_set()
            assert runtime.counts.abandoned == 0

    run(scenario())


def test_cancelling_the_caller_of_work_that_cannot_be_stopped_is_bounded_and_counted() -> None:
    started, released = threading.Event(), threading.Event()

    async def deaf() -> None:
        started.set()
        await ignores_cancellation(released)

    async def scenario() -> float:
        async with Runtime() as runtime:
            operation = Operation("deaf", deaf, isolation="inline")
            task = asyncio.create_task(runtime.call(operation, clocks=Clocks.of("20s", grace="300ms")))
            await soon(started.is_set)
            task.cancel()
            _, took_ms = await timed(asyncio.wait([task], timeout=5))
            assert task.cancelled()
            assert runtime.counts.abandoned == len(runtime.orphans) == 1
            released.set()
            await soon(lambda: runtime.counts.late == 1)
            return took_ms

    assert run(scenario()) < 1500


@pytest.mark.parametrize("surface", ["process", "command"])
def test_work_cancelled_before_it_could_start_never_runs_and_holds_nobody_up(surface: str, tmp_path: Path) -> None:
    async def scenario() -> float:
        async with Runtime(preload=PRELOAD) as runtime:  # cold: there is no zygote yet
            clocks = Clocks.of("20s", grace="5s")
            if surface == "process":
                call = runtime.call(Operation("marks", operations.marks), {"folder": str(tmp_path)}, clocks)
            else:
                call = runtime.run(["sh", "-c", f"sleep 0.3; : > '{tmp_path}/ran'; sleep 9"], clocks)
            task = asyncio.create_task(call)
            await soon(lambda: runtime.counts.calls == 1)
            await asyncio.sleep(0)
            task.cancel()
            _, took_ms = await timed(asyncio.wait([task], timeout=15))
            assert task.cancelled()
            return took_ms

    took_ms = run(scenario())
    assert took_ms < 4500
    assert list(tmp_path.iterdir()) == []


# --- handlers on the caller's own loop --------------------------------------------------------------

COLOUR: ContextVar[str] = ContextVar("colour", default="none")


async def says_where_it_runs() -> list[Any]:
    return [threading.current_thread() is threading.main_thread(), COLOUR.get()]


async def has_a_limit_of_its_own() -> str:
    try:
        async with asyncio.timeout(0.02):
            await asyncio.sleep(work.FOREVER_S)
    except TimeoutError:
        return "mine"
    return "none"


async def will_not_listen(deaf_s: float) -> str:
    until = time.monotonic() + deaf_s
    while time.monotonic() < until:
        try:
            await asyncio.sleep(until - time.monotonic())
        except asyncio.CancelledError:
            pass
    return "late"


async def sleeps_for_ever() -> None:
    await asyncio.sleep(work.FOREVER_S)


async def raises_at_once() -> None:
    raise ValueError("at once")


async def calls_on(ctx: Context, further: int) -> int:
    return 1 + (await ctx.call("calls_on", {"further": further - 1})).value if further else 0


def test_an_inline_handler_runs_on_its_callers_loop_and_in_its_context() -> None:
    async def scenario() -> None:
        operation = Operation("calls_on", calls_on, isolation="inline")
        async with Runtime(operations=[operation]) as runtime:
            COLOUR.set("red")
            where = await runtime.call(Operation("where", says_where_it_runs, isolation="inline"), clocks=SOON)
            assert where.value == [True, "red"]
            assert (
                await runtime.call(Operation("limit", has_a_limit_of_its_own, isolation="inline"), clocks=SOON)
            ).value == "mine"
            assert (await runtime.call(operation, {"further": 5}, SOON)).value == 5
            failed = await runtime.call(Operation("raises", raises_at_once, isolation="inline"), clocks=SOON)
            assert failed.code == "INTERNAL_ERROR" and isinstance(failed.value, ValueError)
            late = await runtime.call(
                Operation("sleeps", sleeps_for_ever, isolation="inline"), clocks=Clocks.of("50ms")
            )
            assert (late.code, late.ending) == ("TIMEOUT", "cancelled")
            deaf = Operation("deaf", will_not_listen, isolation="inline")
            given_up, took_ms = await timed(runtime.call(deaf, {"deaf_s": 3}, Clocks.of("50ms", grace="100ms")))
            assert (given_up.code, given_up.ending) == ("TIMEOUT", "abandoned")
            assert took_ms < 2800
            assert len(runtime.orphans) == 1
            await soon(lambda: not runtime.orphans)
            cancelled = asyncio.create_task(
                runtime.call(Operation("sleeps", sleeps_for_ever, isolation="inline"), clocks=SOON)
            )
            await asyncio.sleep(0)
            cancelled.cancel()
            with pytest.raises(asyncio.CancelledError):
                await cancelled
            assert COLOUR.get() == "red"

    run(scenario())


# --- an inherited deadline --------------------------------------------------------------------------


@pytest.mark.parametrize("surface", [*PLACES, "command"])
def test_a_deadline_inherited_through_the_environment_caps_every_call(
    surface: Any, monkeypatch: pytest.MonkeyPatch, validate_envelope: Validate
) -> None:
    async def sleeps(ms: int) -> None:
        await asyncio.sleep(ms / 1000)

    async def scenario() -> list[Envelope]:
        async with Runtime(preload=PRELOAD) as runtime:
            if surface == "command":
                first = await runtime.run(["sleep", "29"], Clocks.of("60s"))
                return [first, await runtime.run(["true"], Clocks.of("60s"))]
            handler = sleeps if surface == "inline" else operations.is_silent
            operation = Operation("silent", handler, isolation=surface)
            first = await runtime.call(operation, {"ms": 29_000}, Clocks.of("60s"))
            while (runtime.inherited.at_ns - time.monotonic_ns()) > 0:
                await asyncio.sleep(0.02)
            return [first, await runtime.call(operation, {"ms": 0}, Clocks.of("60s"))]

    def attempt(number: int) -> dict[str, Any]:
        left_ms = 800 * 2**number
        monkeypatch.setenv("SHOTCLOCK_REMAINING_MS", str(left_ms))
        monkeypatch.delenv("SHOTCLOCK_DEADLINE_NS", raising=False)
        first, second = run(scenario(), within=40)
        if first.code == "NO_TIME_LEFT":
            raise WrongFoot("nothing was left when it began")
        assert first.code == "TIMEOUT"
        assert first.error["context"]["clock"]["owner"] == "caller"
        assert first.meta["timeout_ms"] < left_ms
        assert "DEADLINE_INHERITED" in [warning["code"] for warning in first.warnings]
        if surface != "command":
            validate_envelope(second.to_dict())
            assert (second.code, second.exit_code, second.ending) == ("NO_TIME_LEFT", 10, "not_started")
        return validate_envelope(first.to_dict())

    on_time(attempt)


def test_an_unreadable_inherited_deadline_is_said_and_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOTCLOCK_REMAINING_MS", "soon")
    envelope = one_call(Operation("noop", operations.noop_async))
    assert envelope.ok
    assert [warning["code"] for warning in envelope.warnings] == ["DEADLINE_UNREADABLE"]


# --- results and failures ---------------------------------------------------------------------------


@pytest.mark.parametrize("place", EVERYWHERE)
def test_a_failure_answers_with_its_registered_code_and_everything_it_carries(
    place: str, validate_envelope: Validate
) -> None:
    envelope = one_call(operation_at(place, operations.fails))
    validate_envelope(envelope.to_dict())
    assert (envelope.code, envelope.exit_code, envelope.ending) == ("TEST_OUT_OF_STOCK", 79, "finished")
    assert envelope.error["message"] == "no widgets"
    assert envelope.error["suggestion"] == "look behind the counter"
    assert envelope.error["context"] == {"shelf": 7}
    assert envelope.error["retry_after_ms"] == 1500
    assert envelope.data == {"left": 0}
    assert isinstance(envelope.value, Failure)


@pytest.mark.parametrize("place", PLACES)
def test_a_failure_with_an_unregistered_code_is_a_bug_of_its_handler(place: str, validate_envelope: Validate) -> None:
    envelope = one_call(operation_at(place, operations.fails_with_a_code_nobody_knows))
    validate_envelope(envelope.to_dict())
    assert envelope.code == "INTERNAL_ERROR"
    assert "TEST_NEVER_REGISTERED" in envelope.error["message"]


def test_a_code_that_only_the_worker_registered_arrives_as_it_is(validate_envelope: Validate) -> None:
    envelope = one_call(Operation("late", operations.fails_with_a_code_only_the_worker_knows))
    validate_envelope(envelope.to_dict())
    assert (envelope.code, envelope.exit_code) == ("TEST_LATE_COMER", 80)
    assert envelope.error["message"] == "hm" and envelope.error["suggestion"] == "come earlier"


@pytest.mark.parametrize("place", EVERYWHERE)
def test_a_result_that_cannot_leave_its_place_is_a_clear_error(place: str, validate_envelope: Validate) -> None:
    envelope = one_call(operation_at(place, operations.returns_what_cannot_leave))
    validate_envelope(envelope.to_dict())
    assert (envelope.code, envelope.ending) == ("RESULT_NOT_SERIALIZABLE", "finished")
    assert "lock" in envelope.error["message"]


@pytest.mark.parametrize("place", EVERYWHERE)
def test_an_exception_comes_back_whole(
    place: str, validate_envelope: Validate, capfd: pytest.CaptureFixture[str]
) -> None:
    envelope = one_call(operation_at(place, operations.raises), {"which": "chain"})
    validate_envelope(envelope.to_dict())
    assert (envelope.code, envelope.exit_code, envelope.ending) == ("INTERNAL_ERROR", 1, "finished")
    assert isinstance(envelope.value, operations.Rich)
    assert (envelope.value.args, envelope.value.shelf) == (("the second", 1), 1)
    assert envelope.error["context"] == {"exception": "Rich"}, "where it was raised is not for the caller"
    traceback = capfd.readouterr().err
    assert "the first" in traceback and "the second" in traceback and "operations.py" in traceback


# What operations.raises is told to raise, and its type's name.
RAISED = {
    "unpicklable": "Unpicklable",
    "mute": "Mute",
    "system exit": "SystemExit",
    "keyboard interrupt": "KeyboardInterrupt",
}


@pytest.mark.parametrize("place", EVERYWHERE)
def test_whatever_a_handler_raises_is_an_answer_and_the_next_call_works(
    place: str, validate_envelope: Validate
) -> None:
    async def scenario() -> None:
        async with Runtime(preload=PRELOAD, workers=1) as runtime:
            for which, name in RAISED.items():
                envelope = await runtime.call(operation_at(place, operations.raises), {"which": which}, SOON)
                validate_envelope(envelope.to_dict())
                assert envelope.code == "INTERNAL_ERROR"
                assert envelope.error["context"]["exception"] == name
                assert (await runtime.call(operation_at(place, operations.noop), clocks=SOON)).value == 1

    run(scenario())


def test_a_worker_that_dies_under_its_function_is_a_crash_with_its_signal(validate_envelope: Validate) -> None:
    async def scenario() -> None:
        async with Runtime(preload=PRELOAD) as runtime:
            for how in ("SIGSEGV", "SIGKILL", "SIGABRT", "exit"):
                envelope = await runtime.call(Operation("crashes", operations.crashes), {"how": how}, SOON)
                validate_envelope(envelope.to_dict())
                assert (envelope.code, envelope.exit_code) == ("WORKER_CRASHED", 1)
                assert envelope.meta["side_effects"] == "unknown"
                expected = {"exit_code": 3} if how == "exit" else {"signal": how}
                assert expected.items() <= envelope.error["context"].items()
                assert (await runtime.call(Operation("noop", operations.noop), clocks=SOON)).value == 1

    run(scenario())


def test_processes_a_function_leaves_behind_are_stopped_and_named(tmp_path: Path, validate_envelope: Validate) -> None:
    async def scenario() -> Envelope:
        async with Runtime(preload=PRELOAD) as runtime:
            operation = Operation("leaves", operations.leaves_processes)
            envelope = await runtime.call(operation, {"folder": str(tmp_path), "count": 3}, SOON)
            assert not marked(tmp_path), "they are gone when the answer is there"
            assert (await runtime.call(Operation("noop", operations.noop), clocks=SOON)).value == 1
            return envelope

    envelope = run(scenario())
    validate_envelope(envelope.to_dict())
    assert envelope.value == "done"
    (warning,) = envelope.warnings
    assert warning["code"] == "DESCENDANTS_STOPPED"
    left = {int(path.read_text().split()[0]) for path in tmp_path.iterdir()}
    assert {process["pid"] for process in warning["context"]["processes"]} == left
    assert all(process["command"].startswith("sleep") for process in warning["context"]["processes"])


@pytest.mark.parametrize("place", EVERYWHERE)
def test_five_megabytes_travel_both_ways(place: str) -> None:
    payload = os.urandom(1024) * 5 * 1024
    envelope = one_call(operation_at(place, operations.echo), {"value": payload}, Clocks.of("60s"))
    assert envelope.value == payload


def test_a_worker_that_never_reads_a_big_payload_is_killed_on_time() -> None:
    async def scenario() -> Envelope:
        async with Runtime(preload=PRELOAD, workers=1) as runtime:
            assert (await runtime.call(Operation("noop", operations.noop), clocks=SOON)).ok
            hangs = Operation("unpickles", operations.echo)
            payload = {"value": operations.HangsWhenUnpickled(b"x" * 20_000_000)}
            envelope = await runtime.call(hangs, payload, Clocks.of("400ms", grace="200ms"))
            assert (await runtime.call(Operation("noop", operations.noop), clocks=SOON)).ok
            return envelope

    envelope = run(scenario())
    assert envelope.code == "TIMEOUT"
    assert envelope.ending in ("killed", "not_started"), "the latter where 20 MB take longer than that to arrive"
    assert envelope.meta["duration_ms"] < 6000


# --- handlers a worker can and cannot find --------------------------------------------------------


class CallsItself:
    def __call__(self) -> int:
        return 1


@functools.wraps(operations.noop)
def a_wrapper_under_a_borrowed_name() -> str:
    return "the wrapper ran"


def not_importable() -> dict[str, Any]:
    def closure() -> int:
        return 1

    return {
        "lambda": lambda: 1,
        "closure": closure,
        "partial": functools.partial(operations.echo, value=1),
        "callable object": CallsItself(),
        "wrapper under a borrowed name": a_wrapper_under_a_borrowed_name,
    }


@pytest.mark.parametrize("which", not_importable())
def test_a_handler_that_a_worker_cannot_find_is_refused_and_nothing_else_is_run_instead(
    which: str, validate_envelope: Validate
) -> None:
    handler = not_importable()[which]
    envelope = one_call(Operation("homeless", handler, isolation="process"))
    validate_envelope(envelope.to_dict())
    assert (envelope.code, envelope.ending) == ("HANDLER_NOT_IMPORTABLE", "not_started"), envelope


SCRIPT = """
import asyncio, json
from shotclock import Clocks, Operation, Runtime

class Point:
    def __init__(self, x: int): self.x = x

def double(x: int) -> int:
    return 2 * x

def fails(x: int) -> None:
    raise ValueError(x)

async def main():
    async with Runtime() as runtime:
        good = await runtime.call(Operation("double", double), {"x": 21}, Clocks.of("10s"))
        bad = await runtime.call(Operation("fails", fails), {"x": 21}, Clocks.of("10s"))
        print(json.dumps([good.to_dict(), bad.to_dict()]))
"""


@pytest.mark.parametrize("how", ["file", "module"])
def test_handlers_of_a_script_run_in_workers(how: str, tmp_path: Path, validate_envelope: Validate) -> None:
    script = tmp_path / "a_script.py"
    script.write_text(SCRIPT + 'if __name__ == "__main__":\n    asyncio.run(main())\n')
    argv = [sys.executable, str(script)] if how == "file" else [sys.executable, "-m", "a_script"]
    with open(tmp_path / "out", "wb") as out:
        subprocess.run(argv, cwd=tmp_path, stdout=out, timeout=20, check=True)
    good, bad = map(validate_envelope, json.loads((tmp_path / "out").read_text()))
    assert good["data"] == {"result": 42}
    assert bad["error"]["message"] == "ValueError: 21"


def test_a_script_without_a_main_guard_gets_an_answer_that_says_what_is_wrong(tmp_path: Path) -> None:
    script = tmp_path / "a_script.py"
    script.write_text(SCRIPT + "asyncio.run(main())\n")
    with open(tmp_path / "out", "wb") as out:
        subprocess.run([sys.executable, str(script)], stdout=out, timeout=20, check=True)
    good, _ = json.loads((tmp_path / "out").read_text())
    assert good["ok"] or good["error"]["code"] == "HANDLER_NOT_IMPORTABLE"
    assert good["ok"] or "__name__" in good["error"]["message"]


# --- the pool -------------------------------------------------------------------------------------


def test_the_queue_limit_holds_for_a_call_that_a_busy_worker_gives_back(tmp_path: Path) -> None:
    async def scenario() -> Envelope:
        async with Runtime(preload=PRELOAD, workers=1, most_workers=1) as runtime:
            for _ in range(20):  # quick calls: the worker is given more than one at a time
                await runtime.call(Operation("noop", operations.noop), {}, Clocks.of("20s"))
            slow, clocks = Operation("sleeps", work.sleeps), Clocks.of("2s", grace="0ms")
            busy = asyncio.ensure_future(runtime.call(slow, {"folder": str(tmp_path)}, clocks))
            await asyncio.sleep(0)
            clocks = Clocks.of("20s", queue="2ms", grace="0ms")
            late = await runtime.call(Operation("noop", operations.noop), {}, clocks)
            assert not busy.done()
            await busy
            return late

    late = run(scenario())
    assert (late.code, late.ending) == ("QUEUE_TIMEOUT", "not_started"), late


def test_when_no_worker_comes_free_within_the_queue_clock_the_call_never_starts(
    tmp_path: Path, validate_envelope: Validate
) -> None:
    async def scenario() -> tuple[Envelope, Envelope]:
        async with Runtime(preload=PRELOAD, workers=1, most_workers=1) as runtime:
            assert await runtime.warm_up()  # a slow start is no part of the two seconds
            busy = asyncio.create_task(
                runtime.call(Operation("sleeps", work.sleeps), {"folder": str(tmp_path)}, Clocks.of("2s", grace="0ms"))
            )
            await soon(lambda: mark_of(tmp_path, "ready"), within=10)
            marks = Operation("marks", operations.marks)
            arguments = {"folder": str(tmp_path)}
            queued = await runtime.call(marks, arguments, Clocks.of("10s", queue="200ms"))
            timed_out = await runtime.call(marks, arguments, Clocks.of("150ms", queue="5s"))
            assert (await busy).code == "TIMEOUT"
            assert not (tmp_path / "ran").exists()
            assert (await runtime.call(marks, arguments, SOON)).ok
            return queued, timed_out

    queued, timed_out = run(scenario())
    for envelope in (queued, timed_out):
        validate_envelope(envelope.to_dict())
        assert (envelope.exit_code, envelope.ending) == (10, "not_started")
        assert envelope.meta["side_effects"] == "none"
        assert envelope.error["retryable"]
    assert (queued.code, queued.error["context"]["clock"]["kind"]) == ("QUEUE_TIMEOUT", "queue")
    assert 200 <= queued.meta["duration_ms"] < 1900
    assert (timed_out.code, timed_out.error["context"]["clock"]["kind"]) == ("TIMEOUT", "timeout")
    assert 150 <= timed_out.meta["duration_ms"] < 1900


def test_the_pool_grows_around_workers_that_hang(tmp_path: Path) -> None:
    async def scenario() -> float:
        async with Runtime(preload=PRELOAD, workers=1) as runtime:
            hanging = []
            for number in range(4):
                folder = tmp_path / str(number)
                folder.mkdir()
                call = runtime.call(Operation("sleeps", work.sleeps), {"folder": str(folder)}, Clocks.of("8s", grace=0))
                hanging.append(asyncio.create_task(call))
            noop, took_ms = await timed(runtime.call(Operation("noop", operations.noop), clocks=SOON))
            assert noop.ok
            assert not any(task.done() for task in hanging)
            for task in hanging:
                task.cancel()
            await asyncio.wait(hanging, timeout=10)
            return took_ms

    assert run(scenario()) < 3000


def test_a_worker_killed_before_it_came_up_is_given_nothing_when_it_does() -> None:
    async def scenario() -> None:
        async with Runtime(preload=PRELOAD, workers=2, most_workers=2) as runtime:
            pool = runtime._children.pool()
            pool._refill()
            killed = next(iter(pool._all))
            assert not killed.is_up
            killed.kill("not needed")
            pool.on_free(killed)  # what its first message does, if it comes before its end
            assert killed not in pool._free, "whoever looks for a free one would try it for ever"
            envelopes = await asyncio.gather(
                *(runtime.call(Operation("noop", operations.noop), clocks=SOON) for _ in range(20))
            )
            assert all(envelope.ok for envelope in envelopes)
            await asyncio.wait([killed.gone], timeout=10)
            assert killed.gone.done()

    run(scenario())


def test_a_worker_killed_at_its_deadline_is_replaced_by_a_fork_and_nothing_is_imported_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "slow_to_import.py").write_text("import time\ntime.sleep(3)\n")
    monkeypatch.syspath_prepend(str(tmp_path))

    async def scenario() -> float:
        async with Runtime(preload=["slow_to_import", *PRELOAD], workers=1) as runtime:
            assert await runtime.warm_up()
            sleeps = Operation("sleeps", work.sleeps)
            await runtime.call(sleeps, {"folder": str(tmp_path)}, Clocks.of("100ms", grace=0))
            noop, took_ms = await timed(runtime.call(Operation("noop", operations.noop), clocks=SOON))
            assert noop.ok
            return took_ms

    assert run(scenario()) < 2900


async def make_quick(runtime: Runtime) -> None:
    """Many short calls: where a pool sends calls ahead to workers that are quick, it does so from here on."""
    noops = [runtime.call(Operation("noop", operations.noop), clocks=SOON) for _ in range(100)]
    assert all(envelope.value == 1 for envelope in await asyncio.gather(*noops))


@pytest.mark.parametrize("workers", corners([1, 2], 2))
def test_a_call_that_hangs_holds_up_none_of_those_behind_it(workers: int, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with Runtime(preload=PRELOAD, workers=workers) as runtime:
            await make_quick(runtime)
            clocks = Clocks.of("4s", grace=0)
            echo = Operation("echo", operations.echo)
            calls = []
            for number in range(40):
                if number == 3:
                    sleeps = Operation("sleeps", work.sleeps)
                    calls.append(runtime.call(sleeps, {"folder": str(tmp_path)}, clocks))
                calls.append(runtime.call(echo, {"value": number}, clocks))
            tasks = [asyncio.create_task(call) for call in calls]
            hanging = tasks.pop(3)
            _, took_ms = await timed(asyncio.wait(tasks, timeout=10))
            assert [task.result().value for task in tasks] == list(range(40))
            assert took_ms < 3900
            assert not hanging.done()
            assert (await hanging).code == "TIMEOUT"
            await make_quick(runtime)

    run(scenario())


@pytest.mark.parametrize("way", ["stopping", "progress", "further"])
@pytest.mark.parametrize("workers", corners([1, 2], 2))
def test_a_handler_that_uses_its_context_takes_nothing_from_the_calls_behind_it(workers: int, way: str) -> None:
    async def scenario() -> None:
        child = Operation("child", operations.noop)
        async with Runtime(operations=[child], preload=PRELOAD, workers=workers) as runtime:
            for _ in range(5):
                await make_quick(runtime)
                talks = Operation("talks", operations.talks)
                echo = Operation("echo", operations.echo)
                calls = []
                for number in range(30):
                    if number % 5 == 0:
                        calls.append(runtime.call(talks, {"way": way}, SOON))
                    else:
                        calls.append(runtime.call(echo, {"value": number}, SOON))
                envelopes, took_ms = await timed(asyncio.gather(*calls))
                for number, envelope in enumerate(envelopes):
                    assert envelope.value == ("not asked to stop" if number % 5 == 0 else number), envelope
                assert took_ms < 4900
            # Nobody lost a worker on the way: had they, there would be none left by now.
            assert (await runtime.call(echo, {"value": 1}, Clocks.of("2s"))).ok

    run(scenario(), within=40)


def test_a_word_that_came_too_late_for_its_call_does_not_swallow_the_next(validate_envelope: Validate) -> None:
    async def scenario() -> list[Envelope]:
        async with Runtime(preload=PRELOAD, workers=1, most_workers=1) as runtime:
            hogs = Operation("hogs", operations.leaves_a_late_word)
            first = await runtime.call(hogs, {"seconds": 0.6}, Clocks.of("10s", soft="50ms"))
            second = await runtime.call(Operation("noop", operations.noop), clocks=SOON)
            return [first, second]

    first, second = run(scenario())
    assert first.value == "answered"
    assert second.value == 1, second


def test_a_crash_costs_only_the_call_that_crashed() -> None:
    async def scenario() -> None:
        async with Runtime(preload=PRELOAD, workers=2) as runtime:
            await make_quick(runtime)
            crashes, echo = Operation("crashes", operations.crashes), Operation("echo", operations.echo)
            calls = []
            for number in range(40):
                if number % 10 == 5:
                    calls.append(runtime.call(crashes, {"how": "SIGKILL"}, SOON))
                else:
                    calls.append(runtime.call(echo, {"value": number}, SOON))
            for number, envelope in enumerate(await asyncio.gather(*calls)):
                if number % 10 == 5:
                    assert envelope.code == "WORKER_CRASHED"
                else:
                    assert envelope.value == number, envelope

    run(scenario())


def test_a_worker_whose_bell_has_rung_is_trusted_with_no_other_call() -> None:
    """The race of the test above, held still: the answer is out, the stop is on its way, the next call is there."""

    async def scenario() -> tuple[Envelope, Envelope]:
        async with Runtime(preload=PRELOAD, workers=1, most_workers=1) as runtime:
            assert (await runtime.call(Operation("noop", operations.noop), clocks=SOON)).ok
            late = Operation("late", operations.returns_although_its_bell_has_rung)
            first = await runtime.call(late, clocks=Clocks.of("200ms", grace="2s"))
            return first, await runtime.call(Operation("next", operations.lets_signals_in), clocks=SOON)

    first, second = run(scenario())
    assert first.code in (None, "TIMEOUT")
    assert second.value == "not stopped", second


def test_modules_that_hang_while_they_are_imported_hang_no_call(tmp_path: Path, monkeypatch: Any) -> None:
    (tmp_path / "hangs_on_import.py").write_text("import time\ntime.sleep(40)\n")
    monkeypatch.syspath_prepend(str(tmp_path))

    async def scenario() -> tuple[Envelope, float]:
        async with Runtime(preload=["hangs_on_import"]) as runtime:
            envelope = await runtime.call(Operation("noop", operations.noop), clocks=Clocks.of("600ms", grace="0ms"))
            _, closing_ms = await timed(runtime.close())
            return envelope, closing_ms

    envelope, closing_ms = run(scenario())
    assert closing_ms < 15_000, "nothing that hangs is waited for where it can be killed"
    assert (envelope.code, envelope.ending) == ("TIMEOUT", "not_started")
    assert envelope.meta["duration_ms"] < 8000


def test_a_preload_that_fails_is_told_by_the_call_that_needs_it_only(tmp_path: Path, monkeypatch: Any) -> None:
    (tmp_path / "broken_module.py").write_text("def handler() -> int:\n    return 1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    import broken_module  # type: ignore[import-not-found]

    # Of another size: with the same size in the same second it would be taken for the one that is compiled.
    (tmp_path / "broken_module.py").write_text("raise RuntimeError('half written, and no more of it')\n")

    async def scenario() -> list[Envelope]:
        async with Runtime(preload=["broken_module", *PRELOAD]) as runtime:
            return [
                await runtime.call(Operation("broken", broken_module.handler), clocks=SOON),
                await runtime.call(Operation("noop", operations.noop), clocks=SOON),
            ]

    broken, fine = run(scenario())
    assert broken.code == "HANDLER_NOT_IMPORTABLE"
    assert "half written" in broken.error["message"]
    assert fine.value == 1


def test_a_call_from_another_loop_is_refused() -> None:
    async def scenario() -> Envelope:
        async with Runtime(preload=PRELOAD) as runtime:
            return await asyncio.to_thread(run, runtime.call(Operation("noop", operations.noop), clocks=SOON))

    envelope = run(scenario())
    assert (envelope.code, "event loop" in envelope.error["message"]) == ("INTERNAL_ERROR", True)


def test_a_runtime_leaves_no_thread_and_no_descriptor_behind() -> None:
    async def scenario() -> None:
        async with Runtime(preload=PRELOAD, observers=[lambda envelope: None]) as runtime:
            for place in PLACES:
                assert (await runtime.call(operation_at(place, operations.noop), clocks=SOON)).ok
            assert (await runtime.run(["true"], SOON)).ok
            assert (await runtime.run(["sleep", "9"], Clocks.of("50ms", grace=0))).code == "TIMEOUT"

    run(scenario())  # whatever is opened once and for all is open by now
    threads, descriptors = set(threading.enumerate()), set(os.listdir("/proc/self/fd"))
    run(scenario())
    eventually(lambda: set(threading.enumerate()) <= threads)
    assert len(os.listdir("/proc/self/fd")) <= len(descriptors)
