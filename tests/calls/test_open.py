"""Processes that are talked with: two pipes and a handle, and nothing left of them when the handle is."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from shotclock import Clocks, Runtime
from shotclock.calls.call import admit
from shotclock.calls.supervised_commands import LEAVE_GRACE_MS, LEAVE_LIMIT_S, InteractiveProcess
from shotclock.core.errors import Failure
from tests.calls import work
from tests.calls.bounds import ROOT, eventually, mark_of, marked, run, soon

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("no_survivors", "home")]

LINE_WITHIN_S = 10.0  # an interpreter that starts on a busy machine
ECHO = 'while read line; do echo "said $line"; done'


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOTCLOCK_HOME", str(tmp_path / "home"))


def shell(script: str) -> list[str]:
    return ["/bin/sh", "-c", script]


def adversary(name: str, folder: Path) -> list[str]:
    return [sys.executable, "-m", "tests.calls.work", name, str(folder)]


async def line_of(opened: InteractiveProcess) -> bytes:
    said = b""
    while not said.endswith(b"\n"):
        part = await asyncio.wait_for(opened.read(), LINE_WITHIN_S)
        if not part:
            break
        said += part
    return said


def opening(argv: list[str], scenario: Any, clocks: Clocks | None = None, **options: Any) -> Any:
    """Run a scenario with a process that is open; what it returned, and the process's report."""

    async def within() -> Any:
        async with Runtime() as runtime:
            admission = admit("talk", clocks or Clocks.of("20s"))
            async with runtime.open(admission, argv, **options) as opened:
                result = await scenario(opened)
            return result, opened.report

    return run(within(), within=30)


def test_what_is_written_reaches_it_and_what_it_says_comes_back() -> None:
    async def talk(opened: InteractiveProcess) -> list[bytes]:
        said = []
        for word in (b"one", b"two"):
            await opened.write(word + b"\n")
            said.append(await line_of(opened))
        return said

    said, report = opening(shell(ECHO), talk)

    assert said == [b"said one\n", b"said two\n"]
    assert report.status == 0, "it saw the end of its stdin and left by itself"
    assert report.stopped is None


def test_what_is_larger_than_any_pipe_goes_both_ways_at_once() -> None:
    sent = os.urandom(3_000_000)

    async def talk(opened: InteractiveProcess) -> bytes:
        writing = asyncio.create_task(opened.write(sent))
        back = b""
        while len(back) < len(sent):
            back += await asyncio.wait_for(opened.read(), LINE_WITHIN_S)
        await writing
        return back

    back, report = opening(["/bin/cat"], talk)

    assert back == sent
    assert report.status == 0


def test_its_stderr_is_kept_and_bounded_and_never_blocks_it() -> None:
    async def talk(opened: InteractiveProcess) -> bytes:
        return await line_of(opened)

    said, report = opening(shell("head -c 5000000 /dev/zero | tr '\\0' x >&2; echo ready; cat >/dev/null"), talk)

    assert said == b"ready\n"
    assert report.stderr.total == 5_000_000
    assert len(report.stderr.head) + len(report.stderr.tail) < 2_000_000
    assert report.stdout.total == 0


def test_reading_from_one_that_left_is_the_end_and_writing_to_it_breaks() -> None:
    async def talk(opened: InteractiveProcess) -> bytes:
        said = await line_of(opened)
        assert await opened.read() == b""
        await soon(opened.ended.done)
        with pytest.raises(BrokenPipeError):
            await opened.write(b"x" * 1_000_000)
        return said

    said, report = opening(shell("echo bye; exit 7"), talk)

    assert said == b"bye\n"
    assert report.status == 7


def test_one_that_closes_its_stdout_and_stays_is_heard_to_do_so() -> None:
    async def talk(opened: InteractiveProcess) -> bytes:
        said = await line_of(opened)
        assert await asyncio.wait_for(opened.read(), LINE_WITHIN_S) == b"", "nobody else holds the pipe"
        assert not opened.ended.done()
        return said

    said, _ = opening(shell("echo bye; exec sleep 30 >&-"), talk, Clocks.of("20s", grace="0s"))

    assert said == b"bye\n"


def test_one_that_reads_nothing_does_not_hold_a_writer_past_its_end() -> None:
    async def talk(opened: InteractiveProcess) -> None:
        writing = asyncio.create_task(opened.write(b"x" * 1_000_000))
        await asyncio.wait([writing], timeout=0.2)
        assert not writing.done()
        return writing

    writing, _ = opening(["/bin/sleep", "30"], talk, Clocks.of("20s", grace="0s"))

    assert isinstance(writing.exception(), BrokenPipeError)


def test_one_that_ignores_the_end_of_its_stdin_and_term_is_killed_with_its_tree(tmp_path: Path) -> None:
    async def talk(opened: InteractiveProcess) -> float:
        await soon(lambda: mark_of(tmp_path, "ready"), LINE_WITHIN_S)
        return time.perf_counter()

    left_at, report = opening(adversary("swallows_everything", tmp_path), talk)

    assert time.perf_counter() - left_at < LEAVE_LIMIT_S + LEAVE_GRACE_MS / 1000 + 8
    assert report.status == -signal.SIGKILL
    assert not marked(tmp_path)


def test_it_is_stopped_at_the_deadline_even_if_its_caller_does_nothing(tmp_path: Path) -> None:
    async def talk(opened: InteractiveProcess) -> None:
        await asyncio.wait_for(asyncio.shield(opened.ended), 10)

    _, report = opening(["/bin/sleep", "30"], talk, Clocks.of("300ms", grace="100ms"))

    assert report.fired == "timeout"
    assert 300 <= report.elapsed_ns / 1e6 < 8000


def test_a_cancelled_caller_leaves_nothing_behind(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with Runtime() as runtime:

            async def talk() -> None:
                async with runtime.open(admit("talk", Clocks.of("20s", grace="100ms")), argv) as opened:
                    await opened.read()

            argv = adversary("has_a_child_that_ignores_term", tmp_path)
            talking = asyncio.create_task(talk())
            await soon(lambda: mark_of(tmp_path, "ready"), LINE_WITHIN_S)
            talking.cancel()
            with pytest.raises(asyncio.CancelledError):
                await talking
            assert not marked(tmp_path)

    run(scenario())


def test_what_cannot_be_started_is_told_by_the_report() -> None:
    async def talk(opened: InteractiveProcess) -> bytes:
        return await asyncio.wait_for(opened.read(), LINE_WITHIN_S)

    said, report = opening(["/no/such/server"], talk)

    assert said == b""
    assert report.unstartable[0] == "exec"


@pytest.mark.parametrize(("argv", "code"), [([], "ARG_ERROR"), (["a\0b"], "ARG_ERROR")])
def test_what_no_program_can_be_given_is_refused(argv: list[str], code: str) -> None:
    with pytest.raises(Failure) as refused:
        opening(argv, None)

    assert refused.value.code == code


def test_it_sees_the_remaining_time_and_the_environment_it_was_given() -> None:
    async def talk(opened: InteractiveProcess) -> bytes:
        return await line_of(opened)

    said, _ = opening(
        shell('echo "$WORD $SHOTCLOCK_REMAINING_MS $HOME"'), talk, Clocks.of("5s"), env={"WORD": "hello"}, base_env={}
    )

    word, remaining, *rest = said.split()
    assert word == b"hello"
    assert 0 < int(remaining) <= 5000
    assert rest == []


def test_when_we_are_killed_it_dies_too(tmp_path: Path) -> None:
    program = f"""
import asyncio, sys
from shotclock import Clocks, Runtime
from shotclock.calls.call import admit

async def main():
    async with Runtime() as runtime:
        argv = [sys.executable, "-m", "tests.calls.work", "swallows_everything", {str(tmp_path)!r}]
        async with runtime.open(admit("talk", Clocks.of("30s")), argv) as opened:
            await opened.read()

asyncio.run(main())
"""
    process = subprocess.Popen([sys.executable, "-c", program], cwd=ROOT)
    try:
        eventually(lambda: mark_of(tmp_path, "ready"), work.READY_WITHIN_S)
    finally:
        process.kill()
        process.wait(10)

    eventually(lambda: not marked(tmp_path))


def test_descriptors_do_not_pile_up() -> None:
    async def scenario() -> tuple[int, int]:
        async with Runtime() as runtime:
            counts = []
            for _ in range(8):
                async with runtime.open(admit("talk", Clocks.of("10s")), ["/bin/cat"]) as opened:
                    await opened.write(b"x\n")
                    await line_of(opened)
                counts.append(len(os.listdir("/proc/self/fd")))
            return counts[0], counts[-1]

    first, last = run(scenario(), within=30)

    assert last == first
