"""Sync functions in the shared process: each in a thread of its own, stopped politely, or with the process."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import psutil
import pytest

from shotclock.apps.app import call_request
from shotclock.worker.context import CallListener
from tests.apps.app.stateful import app
from tests.apps.app.test_lifespan import codes, events, folder
from tests.calls.bounds import run, soon, timed
from tests.processes import is_running

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("no_survivors")]
__all__ = ["folder"]


def test_it_runs_in_a_daemon_thread_and_its_result_arrives(folder: Path) -> None:
    async def scenario() -> None:
        async with app:
            pid, is_main, is_daemon = (await app.call("says_where")).value
            assert pid == (await app.call("beside")).value and not is_main and is_daemon
            items: list[Any] = []
            answer = await app.call_with("yields", {"pieces": 3}, on_item=items.append)
            assert answer.value == items == [0, 1, 2]
            for how, code in (("bug", "INTERNAL_ERROR"), ("exit", "GENERAL_ERROR"), ("interrupt", "INTERNAL_ERROR")):
                failed = await app.call("explodes", how=how)
                assert (failed.code, failed.ending) == (code, "finished"), failed.to_dict()
            assert (await app.call("says_where")).value[0] == pid

    run(scenario())


def test_its_sync_dependencies_are_in_its_thread_and_async_ones_on_the_loop(folder: Path) -> None:
    async def scenario() -> None:
        async with app:
            answer = await app.call("depends")
            assert answer.value == [True, True], answer.to_dict()
            assert events(folder)[-2:] == ["async dependency closed", "dependency True"]
            failed = await app.call("depends", fail=True)
            assert failed.code == "INTERNAL_ERROR" and "of the command" in str(failed.error)
            pid = (await app.call("beside")).value
            hung = await app.call_with("depends_on_never", {}, timeout="200ms")
            assert (hung.code, hung.ending) == ("TIMEOUT", "cancelled"), hung.to_dict()
            assert (await app.call("beside")).value == pid

    run(scenario())


class Heard(CallListener):
    def __init__(self) -> None:
        self.said: list[Any] = []

    def progress(self, done: float, total: float | None, message: str | None) -> None:
        self.said.append((done, total, message))

    def log(self, level: str, message: str, logger: str | None) -> None:
        self.said.append((level, message))


def test_its_context_works_in_the_thread(folder: Path) -> None:
    async def scenario() -> None:
        async with app.dispatcher() as dispatcher:
            heard = Heard()
            answer = await dispatcher.runtime.call("talks", {}, listener=heard)
            assert answer.value == [True, True, False], answer.to_dict()
            assert heard.said == [(1, 2, "halves"), ("warning", "half way")]

    run(scenario())


def test_at_its_limit_one_that_looks_or_reports_or_waits_ends_and_the_process_stays(folder: Path) -> None:
    async def scenario() -> None:
        async with app:
            pid = (await app.call("beside")).value
            for name in ("obeys", "reports", "asks_forever"):
                answer = await app.call_with(name, {}, timeout="200ms")
                assert (answer.code, answer.ending) == ("TIMEOUT", "cancelled"), answer.to_dict()
                assert not answer.warnings
            assert events(folder).count("obeyed") == 1 and events(folder).count("cleaned up") == 2
            assert (await app.call("beside")).value == pid

    run(scenario())


def test_where_no_thread_can_be_started_it_has_not_begun(folder: Path) -> None:
    async def scenario() -> None:
        async with app:
            assert (await app.call("limit_memory", is_limited=True)).ok
            answer = await app.call("sleeps", seconds=0)
            assert (answer.code, answer.ending) == ("SPAWN_FAILED", "not_started"), answer.to_dict()
            assert (answer.meta["side_effects"], answer.error["retryable"]) == ("none", True), answer.to_dict()
            assert (await app.call("limit_memory", is_limited=False)).ok
            assert (await app.call("sleeps", seconds=0)).ok

    run(scenario())


def test_an_async_one_is_cancelled_only_when_its_threads_of_a_pool_have_ended(folder: Path) -> None:
    async def scenario() -> None:
        async with app:
            pid = (await app.call("beside")).value
            rested = await app.call_with("rests_in_a_pool", {"seconds": 0.3}, timeout="100ms")
            assert (rested.code, rested.ending, rested.warnings) == ("TIMEOUT", "cancelled", []), rested.to_dict()
            assert events(folder) == ["rested"] and (await app.call("beside")).value == pid
            hung = await app.call_with("rests_in_a_pool", {"seconds": 60}, timeout="100ms")
            assert (hung.ending, codes(hung)) == ("killed", ["HOST_REPLACED"]), hung.to_dict()
            assert (await app.call("beside")).value != pid

    run(scenario())


def test_its_async_dependencies_are_closed_also_if_it_returns_after_it_was_stopped(folder: Path) -> None:
    async def scenario() -> None:
        async with app:
            assert (await app.call("beside")).ok
            answer = await app.call_with("uses_pooled", {"seconds": 0.3}, timeout="200ms")
            assert (answer.code, answer.ending, answer.warnings) == ("TIMEOUT", "cancelled", []), answer.to_dict()
            assert events(folder) == ["returned to the pool"]

    run(scenario())


def test_reports_that_the_loop_cannot_take_are_dropped(folder: Path) -> None:
    async def scenario() -> None:
        async with app:
            answer = await app.call("floods")
            assert answer.ok and answer.value < 1_500, answer.to_dict()

    run(scenario())


@pytest.mark.parametrize("name", ["sleeps", "sleeps_in_c", "spins", "stubborn"])
def test_one_that_does_not_end_is_killed_with_the_process(name: str, folder: Path) -> None:
    async def scenario() -> None:
        async with app:
            pid = (await app.call("beside")).value
            arguments = {"seconds": 60} if name.startswith("sleeps") else {}
            answer, took_ms = await timed(app.call_with(name, arguments, timeout="200ms"))
            assert (answer.code, answer.ending, codes(answer)) == ("TIMEOUT", "killed", ["HOST_REPLACED"])
            assert answer.meta["survivors"] == [] and took_ms < 4000
            assert not psutil.pid_exists(pid)
            assert (await app.call("beside")).value != pid

    run(scenario())


def test_60_that_hang_at_once_do_not_delay_the_next_call_and_all_are_answered(folder: Path) -> None:
    async def scenario() -> None:
        async with app:
            await app.call("count")
            hung = [
                asyncio.ensure_future(app.call_with("sleeps", {"seconds": 60}, timeout="1500ms")) for _ in range(60)
            ]
            await soon(lambda: events(folder).count("begun") == 60)
            for name in ("count", "says_where", "plain"):
                answer, took_ms = await timed(app.call(name))
                assert answer.ok and took_ms < 1000, (name, took_ms)
            answers = await asyncio.gather(*hung)
            assert {(each.code, each.ending) for each in answers} <= {
                ("TIMEOUT", "killed"),
                ("HOST_REPLACED", "killed"),
            }
            assert (await app.call("count")).value == 1

    run(scenario())


def test_a_process_that_its_thread_starts_is_killed_with_the_call_and_kept_where_it_returns(
    folder: Path, tmp_path: Path
) -> None:
    async def scenario() -> None:
        async with app:
            await app.call("beside")  # the process is up
            pid_file = tmp_path / "pid"
            shared = (await app.call("beside")).value
            stopped = await app.call_with("starts", {"seconds": 60, "pid_file": str(pid_file)}, timeout="900ms")
            assert (stopped.code, stopped.ending, stopped.meta["survivors"]) == ("TIMEOUT", "cancelled", [])
            assert (await app.call("beside")).value == shared, "it waited for the process, which was stopped first"
            assert not is_running(int(pid_file.read_text()))
            kept = await app.call("starts", seconds=0, pid_file=str(pid_file))
            pid = int(pid_file.read_text())
            assert [each["pid"] for each in kept.meta["survivors"]] == [pid]
            assert is_running(pid)
        await soon(lambda: not is_running(pid))

    run(scenario())


def test_a_caller_that_leaves_stops_it(folder: Path) -> None:
    async def scenario() -> None:
        async with app.dispatcher() as dispatcher:
            call = asyncio.ensure_future(dispatcher.call(call_request("reports", {})))
            await soon(lambda: "begun" in events(folder), within=20)
            call.cancel()
            await asyncio.wait([call], timeout=5)
            assert "cleaned up" in events(folder)

    run(scenario())
