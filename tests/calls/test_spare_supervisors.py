"""A supervisor whose command is gone runs the next one, and nothing of the first is noticed there."""

import asyncio
import contextlib
import os
import signal
import time
from pathlib import Path

import psutil
import pytest

from shotclock import Clocks, Envelope, Runtime
from shotclock.calls.supervised_commands import RunningCommand
from shotclock.supervise import ipc, kill
from shotclock.supervise.client import MOST_SPARE
from shotclock.supervise.command_task import Order
from tests.calls import work
from tests.calls.bounds import run, soon

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("no_survivors", "home")]

SOON = Clocks.of("10s")
GUARD = ["sh", "-c", "echo $PPID"]


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOTCLOCK_HOME", str(tmp_path / "home"))


def said(envelope: Envelope) -> str:
    assert envelope.ok, envelope.error
    return str(envelope.data["stdout"]).strip()  # type: ignore[index, call-overload]


async def guard_of(runtime: Runtime) -> psutil.Process:
    return psutil.Process(int(said(await runtime.run(GUARD, SOON))))


def test_one_after_another_they_have_the_same_supervisor_and_at_once_they_have_not() -> None:
    async def scenario() -> tuple[list[int], set[int]]:
        async with Runtime() as runtime:
            one_by_one = [(await guard_of(runtime)).pid for _ in range(5)]
            slow = ["sh", "-c", "echo $PPID; sleep 0.5"]
            at_once = await asyncio.gather(*(runtime.run(slow, SOON) for _ in range(MOST_SPARE + 2)))
            return one_by_one, {int(said(envelope)) for envelope in at_once}

    one_by_one, at_once = run(scenario())
    assert len(set(one_by_one)) == 1
    assert len(at_once) == MOST_SPARE + 2


def test_a_late_request_for_output_of_the_first_does_not_call_off_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    async def send_with_request(running: RunningCommand) -> None:
        running.control.send(ipc.frame((running.client.task.pack(),)) + ipc.frame((Order.MORE,)))

    async def scenario() -> None:
        async with Runtime() as runtime:
            guard = await guard_of(runtime)
            monkeypatch.setattr(RunningCommand, "send_task", send_with_request)
            assert (await guard_of(runtime)).pid == guard.pid

    run(scenario())


def test_no_output_of_the_first_is_asked_for_while_the_next_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[object] = []
    send = ipc.send
    monkeypatch.setattr(ipc, "send", lambda control, message: sent.append(message) or send(control, message))

    async def scenario() -> None:
        async with Runtime() as runtime:
            twice = ["sh", "-c", "echo 1; sleep 0.03; echo 2"]
            assert said(await runtime.run(twice, SOON, on_output=lambda pieces, left_out: None)) == "1\n2"
            sent.clear()
            await runtime.run(["sleep", "0.3"], SOON)

    run(scenario())
    assert (Order.MORE,) not in sent


def test_of_many_at_once_only_a_few_supervisors_stay_and_none_when_the_runtime_is_closed() -> None:
    def supervisors() -> list[psutil.Process]:
        found = []
        for child in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):  # those that do not stay end meanwhile
                if child.name() == "shotclock-sup":
                    found.append(child)
        return found

    async def scenario() -> list[psutil.Process]:
        async with Runtime() as runtime:
            await asyncio.gather(*(runtime.run(["sleep", "0.3"], SOON) for _ in range(MOST_SPARE * 2)))
            await soon(lambda: len(supervisors()) <= MOST_SPARE)
            return supervisors()

    kept = run(scenario())
    assert len(kept) == MOST_SPARE
    assert not any(process.is_running() for process in kept)


def test_no_cgroup_is_left_behind(tmp_path: Path) -> None:
    home = kill.home_directory()
    if home is None:
        pytest.skip("no cgroup can be made here")

    def mine(pids: set[int]) -> list[str]:
        return [name for name in os.listdir(home) if any(name == f"shotclock-{pid}" for pid in pids)]

    async def scenario() -> set[int]:
        async with Runtime() as runtime:
            pids = {(await guard_of(runtime)).pid for _ in range(2)}
            assert mine(pids)  # it is in use, otherwise this test says nothing
            killed = await runtime.run(["sh", "-c", "setsid sleep 30 & sleep 30"], Clocks.of("200ms", grace=0))
            assert killed.code == "TIMEOUT"
            pids.add((await guard_of(runtime)).pid)
            return pids

    assert mine(run(scenario())) == []


@pytest.mark.parametrize("bomb", ["forks_and_exits", "daemonises"])
def test_a_tree_that_forks_faster_than_it_is_found_is_killed_by_a_used_one_too(bomb: str, tmp_path: Path) -> None:
    """It has to step out of the cgroup that it shares with its command first."""
    scripts = {
        "forks_and_exits": "f() { (f & ) ; }; f",
        "daemonises": "f() { setsid sh -c 'sleep 0.01' & f2; }; f2() { f & sleep 0.005; }; while :; do f; done",
    }

    async def scenario() -> tuple[Envelope, Envelope]:
        async with Runtime() as runtime:
            await guard_of(runtime)
            stopped = await runtime.run(
                ["sh", "-c", f"ulimit -u 4000; {scripts[bomb]}; sleep 30"], Clocks.of("300ms", grace=0)
            )
            return stopped, await runtime.run(["echo", "next"], SOON)

    stopped, after = run(scenario(), within=60)
    assert (stopped.code, stopped.ending, stopped.meta.get("survivors")) in [
        ("TIMEOUT", "killed", []),
        ("COMMAND_FAILED", "finished", []),
    ]
    assert said(after) == "next"


def test_what_the_first_left_running_is_stopped_before_the_next_begins() -> None:
    async def scenario() -> tuple[Envelope, Envelope]:
        async with Runtime() as runtime:
            await guard_of(runtime)
            leaks = await runtime.run(["sh", "-c", "setsid sleep 30 & echo $!"], SOON)
            return leaks, await runtime.run(["sh", "-c", "ps -o pid= --ppid $PPID | wc -l"], SOON)

    leaks, after = run(scenario())
    assert [warning["code"] for warning in leaks.warnings] == ["DESCENDANTS_STOPPED"]
    assert not psutil.pid_exists(int(said(leaks)))
    assert said(after) == "1"  # the command that asks


def test_a_spare_one_that_somebody_kills_is_not_missed() -> None:
    async def scenario() -> str:
        async with Runtime() as runtime:
            guard = await guard_of(runtime)
            guard.kill()
            return said(await runtime.run(["echo", "next"], SOON))

    assert run(scenario()) == "next"


def test_one_that_is_killed_at_work_says_so_and_what_it_guarded_dies() -> None:
    async def scenario() -> tuple[Envelope, list[psutil.Process], Envelope]:
        async with Runtime() as runtime:
            guard = await guard_of(runtime)
            working = asyncio.ensure_future(
                runtime.run(["sh", "-c", f"setsid sleep {work.FOREVER_S} & sleep {work.FOREVER_S}"], SOON)
            )
            await soon(lambda: len(guard.children(recursive=True)) >= 3)
            tree = guard.children(recursive=True)
            guard.kill()
            lost = await asyncio.wait_for(working, 5)
            await soon(lambda: not any(process.is_running() for process in tree))
            return lost, tree, await runtime.run(["true"], SOON)

    lost, _, after = run(scenario())
    assert lost.code == "SUPERVISOR_LOST" and after.ok


def test_one_that_cannot_even_start_its_command_is_given_up_at_the_bell() -> None:
    """As one does whose command's directory is on a dead network mount: here it is stopped by a signal."""

    async def scenario() -> tuple[Envelope, float, Envelope]:
        async with Runtime() as runtime:
            guard = await guard_of(runtime)
            os.kill(guard.pid, signal.SIGSTOP)
            began = time.monotonic()
            hung = await runtime.run(["echo", "never"], Clocks.of("300ms", grace=0))
            took_s = time.monotonic() - began
            await soon(lambda: not guard.is_running() or guard.status() == psutil.STATUS_ZOMBIE)
            return hung, took_s, await runtime.run(["true"], SOON)

    hung, took_s, after = run(scenario())
    assert (hung.code, hung.ending) == ("TIMEOUT", "killed")
    assert took_s < 5 and after.ok


def test_an_order_to_stop_the_first_never_reaches_the_second() -> None:
    """A command that ends by itself while it is being cancelled."""

    async def scenario() -> None:
        async with Runtime() as runtime:
            await guard_of(runtime)
            for number in range(0, 60, 3):
                task = asyncio.ensure_future(runtime.run(["true"], SOON))
                await asyncio.sleep(number / 20_000)
                task.cancel()
                await asyncio.wait([task], timeout=5)
                assert said(await runtime.run(["echo", "whole"], SOON)) == "whole"

    run(scenario(), within=60)
