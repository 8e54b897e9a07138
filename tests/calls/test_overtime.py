"""Overtime and the graceful stop, for real work in every place where it may run."""

import asyncio
import collections
import json
import os
import signal
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from shotclock.calls._handler_call import ProcessCall
from shotclock.calls.call import Call, CallRules
from shotclock.calls.control import control_of, live_calls
from shotclock.calls.runtime import Runtime
from shotclock.core.catalogue import Operation
from shotclock.core.envelope import Envelope
from shotclock.core.errors import Failure
from shotclock.core.limits import Clocks
from shotclock.core.overtime import Overtime, OvertimePolicy
from tests.calls import long_work

pytestmark = pytest.mark.slow

SYNC_AND_ASYNC = [
    pytest.param(long_work.counts, "process", id="worker"),
    pytest.param(long_work.counts_on_a_loop, "process", id="async worker"),
    pytest.param(long_work.counts_on_a_loop, "shared", id="shared"),
    pytest.param(long_work.counts_on_a_loop, "inline", id="inline"),
]
DEAF = [
    pytest.param(long_work.is_deaf, "process", "killed", id="worker"),
    pytest.param(long_work.is_deaf_on_a_loop, "process", "killed", id="async worker"),
    pytest.param(long_work.is_deaf_on_a_loop, "shared", "cancelled", id="shared"),
    pytest.param(long_work.is_deaf_on_a_loop, "inline", "cancelled", id="inline"),
]
MOVABLE = SYNC_AND_ASYNC
EXTENDS = """echo '{"extend": "600ms", "reason": "seen"}'"""


@asynccontextmanager
async def running() -> AsyncIterator[Runtime]:
    async with Runtime() as runtime:
        assert await runtime.warm_up()
        yield runtime


def run(scenario: Callable[[Runtime], Any]) -> Any:
    async def main() -> Any:
        async with running() as runtime:
            return await scenario(runtime)

    return asyncio.run(asyncio.wait_for(main(), 60))


def call(handler: Any, isolation: Any, clocks: Clocks, overtime: Any = None, **arguments: object) -> Envelope:
    operation = Operation("work", handler, isolation=isolation, clocks=clocks, overtime=overtime)
    return run(lambda runtime: runtime.call(operation, arguments))


def command(script: str, clocks: Clocks, overtime: Any = None) -> Envelope:
    async def scenario(runtime: Runtime) -> Envelope:
        begun = runtime.begin("command", {}, clocks, is_command=True)
        if overtime is not None:
            policy = OvertimePolicy.of(overtime, clocks.timeout_ms or 0)
            assert policy is not None
            begun.overtime = Overtime(policy)
        return await runtime.run(["/bin/sh", "-c", script], call=begun)

    return run(scenario)


def requests_of(envelope: Envelope) -> list[dict[str, Any]]:
    overtime: Any = envelope.meta["overtime"]
    return overtime["requests"]


def clock_of(envelope: Envelope) -> dict[str, Any]:
    error: Any = envelope.error
    return error["context"]["clock"]


# --- the soft clock without overtime: a graceful stop --------------------------------------------------


@pytest.mark.parametrize("handler, isolation", SYNC_AND_ASYNC)
def test_work_that_stops_when_asked_returns_its_partial_result(handler, isolation):
    envelope = call(handler, isolation, Clocks.of("30s", soft="500ms"))
    data: Any = envelope.data
    assert envelope.ok and data["stopped"] and data["counted"] < 29
    assert envelope.meta["partial"] is True
    assert [warning["code"] for warning in envelope.warnings] == ["SOFT_LIMIT"]


@pytest.mark.parametrize("handler, isolation, ending", DEAF)
def test_work_that_takes_no_notice_is_stopped_when_its_wind_down_is_over_and_what_it_kept_is_there(
    handler, isolation, ending
):
    began = time.monotonic()
    envelope = call(handler, isolation, Clocks.of("30s", soft="300ms", wind_down="300ms", grace="200ms"))
    assert time.monotonic() - began < 15
    assert (envelope.code, envelope.ending, envelope.data) == ("TIMEOUT", ending, {"kept": True})
    assert clock_of(envelope)["kind"] == "soft" and clock_of(envelope)["limit_ms"] == 300
    assert envelope.meta["partial"] is True and envelope.meta["survivors"] == []


@pytest.mark.parametrize(
    "handler, isolation",
    [
        pytest.param(long_work.keeps_what_json_changes, "process", id="worker"),
        pytest.param(long_work.keeps_what_json_changes_on_a_loop, "process", id="async worker"),
        pytest.param(long_work.keeps_what_json_changes_on_a_loop, "shared", id="shared"),
        pytest.param(long_work.keeps_what_json_changes_on_a_loop, "inline", id="inline"),
    ],
)
def test_what_json_changes_of_a_partial_result_is_listed(handler, isolation):
    envelope = call(handler, isolation, Clocks.of("30s", soft="500ms", wind_down="100ms", grace="200ms"))
    (noted,) = [warning for warning in envelope.warnings if warning["code"] == "RESULT_CHANGED"]
    data: Any = envelope.data
    assert data["measured"] == "inf" and [change.partition(":")[0] for change in noted["context"]["changes"]] == [
        "measured",
        "read",
    ]


def test_a_command_is_asked_by_its_signal_and_by_a_file_that_appears(tmp_path: Path):
    script = """trap '' TERM
        while [ ! -e "$SHOTCLOCK_STOP_FILE" ]; do sleep 0.05; done
        echo saved; exit 0"""
    envelope = command(script, Clocks.of("30s", soft="300ms"))
    data: Any = envelope.data
    assert envelope.ok and data["stdout"] == "saved\n" and envelope.meta["partial"] is True


def test_a_command_that_ignores_both_is_killed_with_its_children_when_its_wind_down_is_over():
    script = "trap '' TERM; echo begun; sleep 60 & setsid sleep 60 & sleep 60; sleep 60"
    envelope = command(script, Clocks.of("30s", soft="300ms", wind_down="300ms", grace="100ms"))
    data: Any = envelope.data
    assert (envelope.code, envelope.ending, data["stdout"]) == ("TIMEOUT", "killed", "begun\n")
    assert clock_of(envelope)["kind"] == "soft" and envelope.meta["survivors"] == []


def test_what_is_wound_down_never_lives_past_its_timeout():
    began = time.monotonic()
    script = "trap '' TERM; sleep 60 & sleep 60; sleep 60"
    envelope = command(script, Clocks.of("1s", soft="500ms", wind_down="30s", grace="100ms"))
    assert envelope.code == "TIMEOUT" and time.monotonic() - began < 15


def test_the_soft_clock_starts_with_the_work_and_not_with_the_wait_for_a_worker():
    async def scenario() -> Envelope:
        async with Runtime(workers=1, most_workers=1) as runtime:
            assert await runtime.warm_up()
            before = asyncio.ensure_future(runtime.call(Operation("before", long_work.counts), {"to": 15}))
            await until_live("before")
            work = Operation("work", long_work.counts, clocks=Clocks.of("30s", soft="1s"))
            envelope = await runtime.call(work, {"to": 30})
            assert (await before).ok
            return envelope

    envelope = asyncio.run(asyncio.wait_for(scenario(), 60))
    data: Any = envelope.data
    assert data["stopped"] and data["counted"] >= 3, "it had its second"
    assert envelope.warnings[0]["code"] == "SOFT_LIMIT" and "1000" in str(envelope.warnings[0])


# --- observers ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("handler, isolation", SYNC_AND_ASYNC)
def test_overtime_is_granted_while_progress_grows(handler, isolation):
    envelope = call(handler, isolation, Clocks.of("30s", soft="300ms"), {"budget": "20s", "max_requests": 9}, to=12)
    assert envelope.ok and envelope.data == {"counted": 12} and "partial" not in envelope.meta
    assert {request["verdict"] for request in requests_of(envelope)} == {"granted"}


@pytest.mark.parametrize(
    "handler, isolation",
    [
        pytest.param(long_work.writes, "process", id="worker"),
        pytest.param(long_work.writes_on_a_loop, "shared", id="shared"),
        pytest.param(long_work.writes_on_a_loop, "inline", id="inline"),
    ],
)
def test_overtime_is_granted_while_text_is_written(handler, isolation):
    envelope = call(handler, isolation, Clocks.of("30s", soft="300ms"), {"budget": "20s", "max_requests": 9})
    assert envelope.ok and {request["verdict"] for request in requests_of(envelope)} == {"granted"}


def test_overtime_ends_when_progress_does():
    envelope = call(long_work.is_silent, "process", Clocks.of("30s", soft="300ms"), {"budget": "20s"})
    (request,) = requests_of(envelope)
    assert request["verdict"] == "declined" and envelope.warnings[0]["code"] == "SOFT_LIMIT"


def test_an_observer_that_hangs_takes_no_more_than_the_budget():
    envelope = command("sleep 30", Clocks.of("30s", soft="300ms"), {"command": "sleep 20", "budget": "4s"})
    (request,) = requests_of(envelope)
    assert request["verdict"] == "failed" and request["took_ms"] <= 4_000


@pytest.mark.parametrize(
    "observer, verdict, reason",
    [
        ("""echo '{"decline": true, "reason": "long enough"}'""", "declined", "long enough"),
        ("""echo '"perhaps"'""", "failed", "not an object"),
        ("exit 3", "failed", "exit code 3"),
        ("sleep 60", "failed", "did not answer within 1s"),
    ],
)
def test_an_observer_that_declines_hangs_errs_or_talks_nonsense_means_no_extension(observer, verdict, reason):
    overtime = {"command": observer, "observer_timeout": "1s", "budget": "20s"}
    envelope = call(long_work.counts, "process", Clocks.of("60s", soft="300ms"), overtime, to=600)
    (request,) = requests_of(envelope)
    assert (request["verdict"], request["granted_ms"]) == (verdict, 0) and reason in request["reason"]
    data: Any = envelope.data
    assert data["stopped"]


@pytest.mark.parametrize("handler, isolation", MOVABLE)
def test_where_the_timeout_extends_as_well_granted_work_goes_on_past_it(handler, isolation):
    overtime = {"command": EXTENDS, "budget": "20s", "max_requests": 9, "hard_extends": True}
    envelope = call(handler, isolation, Clocks.of("900ms", soft="500ms"), overtime, to=15)
    assert envelope.ok and envelope.data == {"counted": 15}
    assert requests_of(envelope)[0]["reason"] == "seen" and int(str(envelope.meta["timeout_ms"])) > 900


def test_where_the_work_refuses_a_later_timeout_no_more_is_granted_than_it_gets(monkeypatch):
    monkeypatch.setattr(ProcessCall, "move_bell", lambda self: False)
    overtime = {"command": """echo '{"extend": "20s"}'""", "budget": "60s", "max_requests": 9, "hard_extends": True}
    envelope = call(long_work.counts, "process", Clocks.of("1500ms", soft="300ms", grace="100ms"), overtime, to=600)
    assert requests_of(envelope) and all(request["granted_ms"] <= 1200 for request in requests_of(envelope))
    assert envelope.meta["timeout_ms"] == 1500
    used: Any = envelope.meta["overtime"]
    assert used["used_ms"] == sum(request["granted_ms"] + request["took_ms"] for request in requests_of(envelope))


def test_otherwise_the_timeout_stays_the_ceiling():
    overtime = {"command": """echo '{"extend": "1h"}'""", "budget": "2h"}
    began = time.monotonic()
    envelope = command("sleep 60", Clocks.of("1s", soft="400ms", grace="100ms"), overtime)
    assert envelope.code == "TIMEOUT" and time.monotonic() - began < 15
    assert all(request["granted_ms"] <= 600 for request in requests_of(envelope))


def test_a_command_decides_by_json_on_its_stdin_and_stdout(tmp_path: Path):
    seen = tmp_path / "seen.json"
    overtime = {"command": f"""cat >{seen}; echo '{{"extend": "2s", "reason": "go on"}}'""", "budget": "20s"}
    envelope = command("echo working; echo hard >&2; sleep 1; echo done", Clocks.of("30s", soft="400ms"), overtime)
    assert envelope.ok and requests_of(envelope)[0]["reason"] == "go on"
    summary = json.loads(seen.read_text())
    assert (summary["stdout"], summary["stderr"], summary["has_grown"]) == ("working\n", "hard\n", True)
    assert summary["most_ms"] <= 20_000 and summary["requests_left"] == 3


@pytest.mark.parametrize(
    "policy, expected",
    [
        ({"budget": "900ms", "max_per_request": "400ms", "max_requests": 9}, "the budget of 900ms is used up"),
        ({"budget": "1h", "max_per_request": "300ms", "max_requests": 2}, "all 2 requests are used up"),
    ],
)
def test_the_budget_and_the_number_of_requests_are_not_exceeded(policy, expected):
    script = "i=0; while :; do echo $i; i=$((i+1)); sleep 0.05; done"
    envelope = command(script, Clocks.of("60s", soft="300ms"), policy)
    *granted, last = requests_of(envelope)
    assert all(request["verdict"] == "granted" for request in granted) and last["verdict"] == "exhausted"
    assert last["reason"] == expected
    assert sum(request["granted_ms"] + request["took_ms"] for request in granted) <= 900


def test_what_an_observer_takes_is_charged_to_the_budget():
    overtime = {"command": """sleep 0.7; echo '{"extend": "10s"}'""", "budget": "2s", "max_requests": 9}
    envelope = command("sleep 60", Clocks.of("60s", soft="300ms"), overtime)
    first = requests_of(envelope)[0]
    assert first["took_ms"] >= 700 and first["granted_ms"] + first["took_ms"] <= 2000
    overtime_meta: Any = envelope.meta["overtime"]
    assert overtime_meta["used_ms"] == 2000


# --- a call that asks by itself ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "handler, isolation",
    [
        pytest.param(long_work.asks, "process", id="worker"),
        pytest.param(long_work.asks_on_a_loop, "process", id="async worker"),
        pytest.param(long_work.asks_on_a_loop, "shared", id="shared"),
        pytest.param(long_work.asks_on_a_loop, "inline", id="inline"),
    ],
)
def test_a_call_can_ask_for_overtime_and_knows_what_it_got(handler, isolation):
    overtime = {"command": EXTENDS, "budget": "20s", "hard_extends": True}
    envelope = call(handler, isolation, Clocks.of("700ms"), overtime)
    data: Any = envelope.data
    assert envelope.ok, envelope.error
    request, *others = requests_of(envelope)  # on a busy machine the bell may ring as well before it is done
    assert request["asked_by"] == "call" and data["granted_ms"] == request["granted_ms"] == 600
    assert all(other["asked_by"] == "soft clock" for other in others)
    assert data["left_ms"] > 0, "it knows of the bell that was moved"


def test_a_moved_deadline_is_in_the_variables_of_commands_that_the_function_starts():
    overtime = {"command": EXTENDS, "budget": "20s", "hard_extends": True}
    data: Any = call(long_work.asks_before_a_command, "process", Clocks.of("5s"), overtime).data
    assert data["variable"] == str(data["deadline_ns"])


@pytest.mark.parametrize(
    "handler, isolation",
    [
        pytest.param(long_work.starts_what_asks, "process", id="worker"),
        pytest.param(long_work.starts_what_asks_on_a_loop, "shared", id="shared"),
        pytest.param(long_work.starts_what_asks_on_a_loop, "inline", id="inline"),
    ],
)
def test_a_command_that_a_function_starts_asks_for_the_call_of_that_function(handler, isolation, tmp_path, monkeypatch):
    monkeypatch.setenv("SHOTCLOCK_HOME", str(tmp_path))
    overtime = {"observer": "none", "budget": "20s"}
    envelope = call(handler, isolation, Clocks.of("50s"), overtime)
    data: Any = envelope.data
    assert envelope.ok and data["ok"], data
    (request,) = requests_of(envelope)
    assert (request["asked_by"], request["granted_ms"], data["data"]["granted_ms"]) == ("call", 700, 700)


@pytest.mark.parametrize("isolation", ["process", "shared", "inline"])
def test_calls_beside_each_other_ask_each_for_itself_and_one_that_may_have_none_for_nobody(
    isolation, tmp_path, monkeypatch
):
    monkeypatch.setenv("SHOTCLOCK_HOME", str(tmp_path))
    monkeypatch.setenv("SHOTCLOCK_OVERTIME", "of:a:call further up")
    policy = {"observer": "none", "budget": "20s"}

    async def scenario(runtime: Runtime) -> list[Any]:
        handler, clocks = long_work.shows_what_it_would_ask_with, Clocks.of("50s")
        may = Operation("may", handler, isolation=isolation, clocks=clocks, overtime=policy)
        may_not = Operation("may not", handler, isolation=isolation, clocks=clocks)
        envelopes = await asyncio.gather(*(runtime.call(each) for each in (may, may_not, may)))
        return [(each.meta["request_id"], each.value) for each in envelopes]

    (one, shown), (_, nothing), (other, also_shown) = run(scenario)
    assert nothing == "" and shown.startswith(f"{one}:") and also_shown.startswith(f"{other}:")


def test_a_call_that_may_have_none_is_told_so():
    envelope = call(long_work.asks, "process", Clocks.of("30s"))
    assert envelope.code == "NOT_EXTENDABLE"


def test_each_thread_of_a_call_gets_its_answer_and_the_next_call_on_that_worker_its_own():
    policy = {"observer": "none", "budget": "20s", "max_requests": 1000}

    async def scenario(runtime: Runtime) -> None:
        asking = Operation("asking", long_work.asks_in_threads, clocks=Clocks.of("30s"), overtime=policy)
        for _ in range(3):
            envelope = await runtime.call(asking, {"count": 10})
            data: Any = envelope.data
            assert envelope.ok and data["answers"] == 10, envelope.error
            following = await runtime.call(Operation("next", long_work.names_itself, clocks=Clocks.of("10s")))
            assert following.ok, following.error

    run(scenario)


def test_a_thread_that_still_waits_when_its_call_ends_takes_nothing_from_the_next():
    async def scenario(runtime: Runtime) -> None:
        runtime.register(Operation("counts-inside", long_work.counts, clocks=Clocks.of("20s")))
        leaving = Operation("leaving", long_work.leaves_a_thread_asking, clocks=Clocks.of("30s"))
        following = Operation("next", long_work.names_itself, clocks=Clocks.of("10s"))
        envelope = await runtime.call(leaving)
        data: Any = envelope.data
        assert envelope.ok and data["is_waiting"]
        answers = await asyncio.gather(*(runtime.call(following) for _ in range(10)))
        assert all(answer.ok for answer in answers), [answer.error for answer in answers]
        assert all(answer.data != {"pid": data["pid"]} for answer in answers), "that worker is retired"

    run(scenario)


def test_a_worker_ends_after_its_most_calls_and_none_of_them_is_lost():
    async def scenario(runtime: Runtime) -> None:
        counting = Operation("counting", long_work.names_itself_and_ends_after, clocks=Clocks.of("20s"))
        answers = await asyncio.gather(*(runtime.call(counting, {"calls": 4}) for _ in range(40)))
        assert all(answer.ok for answer in answers), [answer.error for answer in answers]
        pids = collections.Counter(answer.data["pid"] for answer in answers)
        assert max(pids.values()) <= 4, pids

    run(scenario)


# --- from outside, and from above -------------------------------------------------------------------------


async def until_live(name: str) -> Call:
    for _ in range(1000):
        for each in live_calls.values():
            if each.name == name and each.work is not None:
                return each
        await asyncio.sleep(0.01)
    raise AssertionError(f"{name} did not begin")


@pytest.mark.parametrize("handler, isolation", MOVABLE)
def test_an_operator_gives_a_running_call_more_time(handler, isolation):
    async def scenario(runtime: Runtime) -> Envelope:
        operation = Operation("work", handler, isolation=isolation, clocks=Clocks.of("1s"))
        calling = asyncio.ensure_future(runtime.call(operation, {"to": 15}))
        control_of(await until_live("work")).extend(10_000, "alice")
        return await calling

    envelope = run(scenario)
    assert envelope.ok and envelope.data == {"counted": 15}
    (request,) = requests_of(envelope)
    assert (request["asked_by"], request["granted_ms"], envelope.meta["timeout_ms"]) == ("alice", 10_000, 11_000)


@pytest.mark.parametrize("handler, isolation", SYNC_AND_ASYNC[:2])
def test_more_time_that_is_given_before_the_worker_has_begun_counts(handler, isolation):
    async def main() -> Envelope:
        async with Runtime(workers=1, most_workers=1) as runtime:
            named: Any = await runtime.call(Operation("name", long_work.names_itself, clocks=Clocks.of("20s")))
            operation = Operation("work", handler, isolation=isolation, clocks=Clocks.of("500ms"))
            os.kill(named.data["pid"], signal.SIGSTOP)  # it will arm the bell that the message says, later
            calling = asyncio.ensure_future(runtime.call(operation, {"to": 8}))
            control_of(await until_live("work")).extend(20_000, "alice")
            os.kill(named.data["pid"], signal.SIGCONT)
            return await calling

    envelope = asyncio.run(asyncio.wait_for(main(), 60))
    assert envelope.ok, envelope.error
    assert envelope.data == {"counted": 8}


def test_an_operator_gives_no_more_than_the_caller_has():
    async def scenario(runtime: Runtime) -> tuple[Envelope, str]:
        begun = runtime.begin("command", {}, Clocks.of("5s"), is_command=True)
        parent = begun.bound.bell
        inner = runtime.begin("inner", {}, Clocks.of("60s"), is_command=True, parent=parent)
        calling = asyncio.ensure_future(runtime.run(["sleep", "60"], call=inner))
        await until_live("inner")
        with pytest.raises(Failure) as refused:
            control_of(inner).extend(60_000, "alice")
        control_of(inner).wind_down("alice", "enough")
        return await calling, refused.value.code

    envelope, code = run(scenario)
    assert code == "NOT_EXTENDABLE" and envelope.code == "CANCELLED"


def test_winding_down_goes_to_all_that_was_called_and_comes_back_with_what_each_has():
    async def scenario(runtime: Runtime) -> Envelope:
        runtime.register(Operation("counts-inside", long_work.counts, clocks=Clocks.of("50s")))
        outer = Operation("outer", long_work.calls_another, clocks=Clocks.of("60s"))
        calling = asyncio.ensure_future(runtime.call(outer))
        await until_live("counts-inside")
        control_of(await until_live("outer")).wind_down("alice", "enough for today")
        return await calling

    envelope = run(scenario)
    data: Any = envelope.data
    assert envelope.ok and envelope.meta["partial"] is True
    assert data["data"]["stopped"] and data["meta"]["partial"] is True, "what was called inside was told as well"
    assert [warning["code"] for warning in data["warnings"]] == ["WOUND_DOWN"]


@pytest.mark.parametrize("name", ["observer", "soft clock"])
def test_an_operator_with_the_name_of_a_clock_stops_a_call_as_any_other_does(name):
    async def scenario(runtime: Runtime) -> Envelope:
        begun = runtime.begin("command", {}, Clocks.of("60s"), is_command=True)
        calling = asyncio.ensure_future(runtime.run(["sleep", "60"], call=begun))
        await until_live("command")
        control_of(begun).wind_down(name, "enough")
        return await calling

    envelope = run(scenario)
    error: Any = envelope.error
    assert envelope.code == "CANCELLED" and error["context"]["by"] == name


@pytest.mark.parametrize("handler, isolation", SYNC_AND_ASYNC)
def test_a_call_whose_wind_down_is_over_before_it_has_a_place_is_not_started(handler, isolation):
    class Full:
        def guards(self, name: str) -> bool:
            return True

        async def enter(self, waiting: Call) -> Callable[[], None]:
            control_of(waiting).wind_down("alice", "enough", 50)
            await asyncio.sleep(0.1)
            return lambda: None

    async def scenario(runtime: Runtime) -> Envelope:
        runtime.register(Operation("work", handler, isolation=isolation, clocks=Clocks.of("5s", grace="100ms")))
        return await runtime.call("work", {"to": 600}, rules=CallRules(places=Full()))

    envelope = run(scenario)
    assert (envelope.code, envelope.ending, envelope.meta["side_effects"]) == ("CANCELLED", "not_started", "none")


def test_winding_down_one_call_touches_no_other():
    async def scenario(runtime: Runtime) -> list[Envelope]:
        one = Operation("one", long_work.counts, clocks=Clocks.of("60s"))
        other = Operation("other", long_work.counts, clocks=Clocks.of("60s"))
        both = [asyncio.ensure_future(runtime.call(each, {"to": 12})) for each in (one, other)]
        await until_live("other")
        control_of(await until_live("one")).wind_down("alice", "enough")
        return [await each for each in both]

    one, other = run(scenario)
    assert one.meta["partial"] is True
    assert other.data == {"counted": 12} and "partial" not in other.meta


# --- not enough time to begin with ------------------------------------------------------------------------


def test_work_that_needs_more_time_than_is_left_is_not_started_and_told_what_is_left():
    operation = Operation("work", long_work.counts, clocks=Clocks.of("60s"), min_time_ms=10_000)
    envelope = run(lambda runtime: runtime.call(operation, {}, Clocks.of("2s")))
    assert (envelope.code, envelope.ending) == ("NO_TIME_LEFT", "not_started")
    error: Any = envelope.error
    assert "at least 10s" in error["message"] and "2s" in error["message"]


def test_what_a_call_begins_while_it_winds_down_has_no_longer_than_that():
    async def scenario(runtime: Runtime) -> Envelope:
        runtime.register(Operation("counts-inside", long_work.counts, clocks=Clocks.of("50s")))
        cleaning = Operation("cleaning", long_work.cleans_up, clocks=Clocks.of("60s", soft="300ms", wind_down="3s"))
        return await runtime.call(cleaning)

    envelope = run(scenario)
    data: Any = envelope.data
    assert envelope.ok and envelope.meta["partial"] is True
    assert data["meta"]["timeout_ms"] <= 3000, "50 seconds were declared"


def test_a_command_is_asked_by_the_signal_that_it_wants():
    script = "trap 'echo interrupted; exit 0' USR1; sleep 60 & wait"

    async def scenario(runtime: Runtime) -> Envelope:
        return await runtime.run(["/bin/sh", "-c", script], Clocks.of("30s", soft="500ms"), stop_signal="SIGUSR1")

    envelope = run(scenario)
    data: Any = envelope.data
    assert data["stdout"] == "interrupted\n"
