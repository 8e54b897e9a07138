"""A cancelled call is answered with what was seen of its work, and the cancellation is passed on."""

import asyncio
import contextlib
import threading
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import psutil
import pytest

from shotclock import Clocks, Envelope, Failure, Runtime
from shotclock.calls import supervised_commands as command_runner
from shotclock.calls.call import Call, Outcome, admit
from shotclock.calls.supervised_commands import run_shielded
from shotclock.supervise import spans
from tests.calls.bounds import run, soon

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("no_survivors")]

CLOCKS = Clocks.of("20s", grace="500ms")
SOON_S = 10.0


def begin(runtime: Runtime, argv: list[str]) -> tuple[Call, asyncio.Task[Envelope]]:
    call = runtime.begin("command", {}, CLOCKS, is_command=True)
    return call, asyncio.create_task(runtime.run(argv, call=call))


async def supervisor_of_a_sleeper(folder: Path) -> psutil.Process:
    pid = folder / "pid"
    await soon(lambda: pid.exists() and pid.read_text().strip())
    supervisor = psutil.Process(int(pid.read_text())).parent()
    assert supervisor is not None
    return supervisor


def sleeper(folder: Path) -> list[str]:
    return ["sh", "-c", f"echo $$ > {folder}/pid; exec sleep 60"]


async def cancelled(task: asyncio.Task[Any], call: Call) -> Envelope:
    await asyncio.wait([task], timeout=10)
    assert task.cancelled()
    assert call.cancellation.envelope is not None
    return call.cancellation.envelope


def test_processes_of_a_killed_supervisor_are_looked_for_after_a_cancellation_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    look = command_runner.kill_what_lost_its_supervisor

    def finds_one_that_will_not_die(supervisor: int) -> list[int]:
        look(supervisor)
        return [1]

    async def scenario() -> Envelope:
        async with Runtime() as runtime:
            call, task = begin(runtime, sleeper(tmp_path))
            supervisor = await supervisor_of_a_sleeper(tmp_path)
            supervisor.suspend()
            monkeypatch.setattr(command_runner, "signal_supervisor", lambda pid, number: None)
            monkeypatch.setattr(command_runner, "kill_what_lost_its_supervisor", finds_one_that_will_not_die)
            task.cancel()
            await asyncio.sleep(0.05)
            supervisor.kill()
            return await cancelled(task, call)

    envelope = run(scenario())
    assert (envelope.code, envelope.ending) == ("CANCELLED", "abandoned")
    assert [each["pid"] for each in envelope.meta["survivors"]] == [1]


def test_a_cancellation_while_processes_are_looked_for_is_passed_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looking, may_end = threading.Event(), threading.Event()
    look = command_runner.kill_what_lost_its_supervisor

    def looks_long(supervisor: int) -> list[int]:
        looking.set()
        may_end.wait(10)
        return look(supervisor)

    async def scenario() -> Envelope:
        async with Runtime() as runtime:
            call, task = begin(runtime, sleeper(tmp_path))
            supervisor = await supervisor_of_a_sleeper(tmp_path)
            monkeypatch.setattr(command_runner, "kill_what_lost_its_supervisor", looks_long)
            supervisor.kill()
            await soon(looking.is_set)
            task.cancel()
            await asyncio.sleep(0.05)
            may_end.set()
            return await cancelled(task, call)

    envelope = run(scenario())
    assert (envelope.ok, envelope.ending) == (False, "killed")


def test_a_command_that_is_cancelled_before_anything_was_forked_is_not_called_killed() -> None:
    def is_behind(note: bytes, fds: list[int]) -> None:
        raise BlockingIOError

    async def scenario() -> Envelope:
        async with Runtime() as runtime:
            runtime._children.commands._request_fork = is_behind
            call, task = begin(runtime, ["true"])
            await asyncio.sleep(0.02)
            task.cancel()
            return await cancelled(task, call)

    envelope = run(scenario())
    assert (envelope.code, envelope.ending) == ("CANCELLED", "not_started")


def test_a_command_that_ended_by_itself_as_its_caller_was_cancelled_keeps_its_end_and_its_output(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    end: Callable[..., None] = command_runner.RunningCommand.end

    async def scenario() -> Envelope:
        async with Runtime() as runtime:
            call, task = begin(runtime, ["echo", "whole"])

            def end_and_cancel(self: command_runner.RunningCommand) -> None:
                end(self)
                task.cancel()

            monkeypatch.setattr(command_runner.RunningCommand, "end", end_and_cancel)
            return await cancelled(task, call)

    envelope = run(scenario())
    assert (envelope.code, envelope.ending) == ("CANCELLED", "finished")
    assert isinstance(envelope.data, dict) and envelope.data["stdout"] == "whole\n"


def test_a_cancellation_while_an_interactive_command_is_stopped_after_an_error_is_passed_on(tmp_path: Path) -> None:
    raised = asyncio.Event()

    async def scenario() -> None:
        async with Runtime() as runtime:

            async def talk() -> None:
                script = f"trap '' TERM; echo $$ > {tmp_path}/pid; while :; do sleep 0.1; done"
                async with runtime.open(admit("talk", CLOCKS), ["sh", "-c", script]):
                    await supervisor_of_a_sleeper(tmp_path)
                    raised.set()
                    raise ValueError("of the caller")

            task = asyncio.create_task(talk())
            await raised.wait()
            await asyncio.sleep(0.02)
            task.cancel()
            await asyncio.wait([task], timeout=10)
            assert task.cancelled()

    run(scenario())


def test_a_cancellation_while_the_answer_is_stored_reaches_the_caller_and_the_observers_get_the_answer() -> None:
    storing, may_end = threading.Event(), threading.Event()
    seen: list[Envelope] = []

    def keeps_long(envelope: Envelope) -> None:
        storing.set()
        may_end.wait(10)

    async def scenario() -> Envelope:
        async with Runtime(observers=[seen.append]) as runtime:
            call, task = begin(runtime, ["echo", "whole"])
            call.keep_answer = keeps_long
            await soon(storing.is_set)
            task.cancel()
            await asyncio.sleep(0.05)
            may_end.set()
            return await cancelled(task, call)

    envelope = run(scenario())
    assert envelope.ok and seen == [envelope]


@pytest.mark.parametrize("code", ["STORE_UNUSABLE", "ARG_ERROR"])
def test_an_answer_that_cannot_be_stored_is_one_span_and_does_not_say_that_nothing_ran(
    code: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorded: list[tuple[str, object]] = []

    class Recorder:
        def call_ended(self, call: Call, outcome: Outcome, now_ns: int, wall_ns: int) -> None:
            recorded.append((call.request_id, outcome.ending))

        def hand_over(self) -> None:
            pass

    def cannot_keep(envelope: Envelope) -> None:
        raise Failure(code, "the disk is full")

    async def scenario() -> Envelope:
        async with Runtime() as runtime:
            monkeypatch.setattr(spans, "recorder", Recorder())
            call, task = begin(runtime, ["true"])
            call.keep_answer = cannot_keep
            return await task

    envelope = run(scenario())
    assert (envelope.ok, envelope.ending, envelope.meta["side_effects"]) == (False, "finished", "complete")
    assert "the disk is full" in str(envelope.error)
    assert recorded == [(envelope.meta["request_id"], "finished")]


# --- the clean-up of a caller that is cancelled ---------------------------------------------------------------


async def cancelled_in(clean_up: Callable[[list[str], asyncio.Event], Coroutine[Any, Any, None]]) -> list[str]:
    """Cancel a caller in the middle of its clean-up. What it did, and whether its task ended as cancelled."""
    done: list[str] = []
    begun = asyncio.Event()
    task = asyncio.create_task(clean_up(done, begun))
    async with asyncio.timeout(SOON_S):
        await begun.wait()
        task.cancel()
        await asyncio.wait([task])
    return [*done, "cancelled" if task.cancelled() else "not cancelled"]


def test_a_first_cancellation_during_a_clean_up_is_not_lost() -> None:
    async def removes(done: list[str], begun: asyncio.Event) -> None:
        begun.set()
        await asyncio.sleep(0.05)
        done.append("removed")

    async def awaits_afterwards(done: list[str], begun: asyncio.Event) -> None:
        await run_shielded(removes(done, begun))
        done.append("tidied")
        await asyncio.sleep(0)
        done.append("went on")

    async def ends_afterwards(done: list[str], begun: asyncio.Event) -> None:
        try:
            await run_shielded(removes(done, begun))
        finally:
            done.append("tidied")

    async def fails(done: list[str], begun: asyncio.Event) -> None:
        async def break_down() -> None:
            await removes(done, begun)
            raise OSError("it cannot be removed")

        with contextlib.suppress(OSError):
            await run_shielded(break_down())
        done.append("tidied")

    for clean_up in (awaits_afterwards, ends_afterwards, fails):
        assert asyncio.run(cancelled_in(clean_up)) == ["removed", "tidied", "cancelled"], clean_up


def test_a_repeated_cancellation_does_not_cut_a_clean_up_short() -> None:
    async def cleans_up_when_cancelled(done: list[str], begun: asyncio.Event) -> None:
        asyncio.current_task().cancel()  # type: ignore[union-attr]
        try:
            await asyncio.sleep(SOON_S)
        except asyncio.CancelledError:
            begun.set()
            await run_shielded(asyncio.sleep(0.05))
            await asyncio.sleep(0)
            done.append("all of it")
            raise

    assert asyncio.run(cancelled_in(cleans_up_when_cancelled)) == ["all of it", "cancelled"]


def test_a_timeout_during_a_clean_up_is_a_timeout() -> None:
    async def main() -> str:
        task = asyncio.current_task()
        assert task is not None
        try:
            async with asyncio.timeout(0.01):
                await run_shielded(asyncio.sleep(0.05))
                await asyncio.sleep(SOON_S)
        except TimeoutError:
            return f"timeout, {task.cancelling()} cancellations left"
        return "nothing"

    assert asyncio.run(main()) == "timeout, 0 cancellations left"
