"""The lines of a run off a terminal: what steps print, behind their names, and signs of life."""

import asyncio
import contextlib
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shotclock.flows.cli.run_lines import HELD_LIMIT, LabelledLines, RunLines
from shotclock.flows.run.state import Status, StepState
from shotclock.flows.run.step_log import read_records
from shotclock.terminal.output import Outlet

pytestmark = pytest.mark.usefixtures("no_survivors")

FLOW = """\
steps:
  build: {exec: "echo compiling; echo ::error::trap >&2; printf unfinished"}
  flaky: {exec: "echo out; exit 1", on_fail: {retry: {max: 1}}, depends_on: build}
  each: {exec: "echo item {{ item }}", for_each: [a], depends_on: build}
"""


@pytest.fixture
def lines_of(shotclock: Callable[..., Any], tmp_path: Path) -> Callable[..., list[str]]:
    """A function that runs the flow and returns the lines on stderr."""
    (tmp_path / "flow.yaml").write_text(FLOW)

    def run(*words: str, **env: str | None) -> list[str]:
        settings = {"SHOTCLOCK_HOME": str(tmp_path / "home"), "GITHUB_ACTIONS": None, **env}
        ran = shotclock("run", tmp_path / "flow.yaml", *words, env=settings)
        assert ran.code == 3
        return ran.stderr.decode().splitlines()

    return run


@pytest.mark.slow
def test_each_line_is_behind_the_name_of_its_step_and_retries_are_said(lines_of: Callable[..., list[str]]) -> None:
    found = lines_of()
    expected = ["build | compiling", "build | ::error::trap", "build | unfinished", "flaky | out", "each[0] | item a"]
    assert {*expected, "… flaky begins attempt 2", "flaky (attempt 2) | out"} <= set(found)
    assert found.index("… flaky begins attempt 2") < found.index("flaky (attempt 2) | out")
    quiet = lines_of("--quiet")
    assert not any(" | " in line or "begins attempt" in line for line in quiet) and "… build running" in quiet
    assert lines_of("--json") == lines_of("--output", "json") == []


def running(name: str) -> StepState:
    return StepState(name, "command", status=Status.RUNNING)


def test_silence_is_answered_with_the_running_steps(tmp_path: Path) -> None:
    with open(tmp_path / "err", "wb") as file:

        async def wait() -> None:
            lines = RunLines(Outlet(file.fileno()), shows_output=True, heartbeat_s=0.1)
            async with lines, asyncio.timeout(10):
                lines.handle_change(running("build"))
                while "… running: build " not in (tmp_path / "err").read_text():
                    await asyncio.sleep(0.02)

        asyncio.run(wait())


def test_a_step_that_is_skipped_at_once_is_never_said_to_run(tmp_path: Path) -> None:
    with open(tmp_path / "err", "wb") as file:

        async def write() -> None:
            async with RunLines(Outlet(file.fileno()), shows_output=True) as lines:
                for name in ("skipped", "printing", "short"):
                    lines.handle_change(running(name))
                lines.handle_change(StepState("skipped", "command", status=Status.SKIPPED))
                lines.handle_output("printing[1]", 1, b"1 text\n")
                lines.handle_change(StepState("short", "command", status=Status.SUCCEEDED, duration_ms=5))

        asyncio.run(write())
    assert (tmp_path / "err").read_text().splitlines() == [
        "– skipped skipped",
        "… printing running",
        "printing[1] | text",
        "… short running",
        "✓ short succeeded 5ms",
    ]


def test_a_reader_that_does_not_read_loses_output_and_is_told_how_much() -> None:
    reading, writing = os.pipe()
    os.set_blocking(reading, False)

    async def flood() -> str:
        lines, got = RunLines(Outlet(writing), shows_output=True), b""
        async with lines, asyncio.timeout(10):
            for _ in range(100):
                lines.handle_output("a", 1, b"1 " + b"x" * 20_000 + b"\n")
            assert lines._outlet is not None and lines._outlet.held < HELD_LIMIT + 30_000
            while lines._outlet.held:
                with contextlib.suppress(BlockingIOError):  # it was all read, and is filled again in a moment
                    got += os.read(reading, 1_000_000)
                await asyncio.sleep(0.02)
            lines.handle_output("a", 1, b"1 last\n")
        with os.fdopen(reading, "rb", closefd=True) as rest:
            return (got + (rest.read() or b"")).decode()

    try:
        text = asyncio.run(flood())
    finally:
        os.close(writing)
    left_out = int(re.findall(r"… (\d+) bytes of output left out", text)[0])
    assert text.count("x") + left_out // 20_003 * 20_000 == 2_000_000 and text.endswith("a | last\n")


@pytest.mark.slow
def test_only_the_followed_steps_print_and_an_unknown_name_is_refused(
    lines_of: Callable[..., list[str]], shotclock: Callable[..., Any], tmp_path: Path
) -> None:
    for words in (["--follow", "build,each"], ["--follow=build", "--follow", "each"]):
        found = lines_of(*words)
        assert {line for line in found if " | " in line} == {
            "build | compiling",
            "build | ::error::trap",
            "build | unfinished",
            "each[0] | item a",
        }
        assert "✓ build succeeded" in "\n".join(found) and any("flaky failed" in line for line in found)
    env = {"SHOTCLOCK_HOME": str(tmp_path / "home")}
    alone = shotclock("run", "--follow", tmp_path / "flow.yaml", env=env)
    assert alone.code == 3 and b"flaky | out" in alone.stderr
    refused = shotclock("run", tmp_path / "flow.yaml", "--follow", "biuld", env=env)
    assert refused.code == 2 and refused.json()["error"]["suggestion"] == "did you mean build?"
    assert shotclock("run", tmp_path / "flow.yaml", "--follow", "build", "--quiet", env=env).code == 2


def test_output_that_stays_with_workers_is_not_followed_and_the_command_that_reads_it_is_named(
    shotclock: Callable[..., Any], tmp_path: Path
) -> None:
    (tmp_path / "flow.yaml").write_text("steps: {a: {type: command, exec: echo a}}")
    for words in (["--follow"], ["--follow", "a"]):
        refused = shotclock("run", tmp_path / "flow.yaml", "--on", "temporal://127.0.0.1:9", *words)
        (told,) = refused.json()["error"]["errors"]
        assert refused.code == 2 and told["field"] == "follow", refused
        assert "`shotclock logs RUN_ID -f --on temporal://127.0.0.1:9/default`" in told["message"]


def text_of(*records: bytes) -> str:
    writer = LabelledLines()
    return "".join(writer.write("a | ", read_records(record)) for record in records) + writer.finish()


def test_a_progress_bar_is_a_line_for_each_piece_and_moves_no_cursor() -> None:
    assert text_of(b"1+\r10%\r20%\n", b"1+\r30%\n", b"1 \r100%\n") == "a | 20%\na | 30%\na | 100%\n"
    assert text_of(b"1+10%\r20%\r\n", b"1 30%\n", b"1 next\n") == "a | 20%\na | 30%\na | next\n"
    assert text_of(b"1+no \n", b"1 bar\r\n") == "a | no bar\n"
    assert text_of(b"1 \x1b[2J\x1b[31mred\n", b"1 \x1b]0;title\x07plain\n") == "a | \x1b[31mred\x1b[0m\na | plain\n"


def test_a_failed_step_is_an_annotation_of_github_and_its_text_commands_nothing(tmp_path: Path) -> None:
    error = {"code": "COMMAND_FAILED", "message": "100% wrong"}
    failed = StepState("a:b", "command", status=Status.FAILED, error=error, duration_ms=5)
    may_fail = StepState("may", "command", status=Status.FAILED, error=error, duration_ms=5, continues=True)
    with open(tmp_path / "err", "wb") as file:

        async def write() -> None:
            async with RunLines(Outlet(file.fileno()), shows_output=True, annotates=True) as lines:
                lines.handle_output("a:b", 2, b"")
                lines.handle_change(failed)
                lines.handle_change(may_fail)

        asyncio.run(write())
    _, first, second = (tmp_path / "err").read_text().splitlines()
    assert first.startswith("::error title=a%3Ab::✗ a:b failed 5ms: 100%25 wrong") and first.endswith("(2 attempts)")
    assert second.startswith("::warning title=may::✗ may failed")


def test_the_last_lines_of_a_parked_run_are_the_commands_that_approve_and_continue_it(
    shotclock: Callable[..., Any], tmp_path: Path
) -> None:
    (tmp_path / "flow.yaml").write_text("{name: CI, steps: {ship: {exec: echo x, approval: true}}}")
    words = ("--run-id", "r", "--timeout", "1m", "--budget", "10ms", "--format", "text")
    ran = shotclock("run", tmp_path / "flow.yaml", *words, env={"SHOTCLOCK_HOME": str(tmp_path / "home")})
    last = [re.sub(r"p-\w+|\d{4}-[\w:.-]+Z", "…", line) for line in ran.stderr.decode().splitlines()[-5:]]
    assert ran.code == 14 and last[:4] == [
        "◌ CI waits for a person:",
        "  Run step ship of CI: shotclock inbox approve …",
        "  then, until …:",
        "  shotclock run --resume r",
    ]
    assert "it can continue until" in last[4]


def test_a_sign_of_life_names_the_proposal_that_a_step_waits_for(tmp_path: Path) -> None:
    waiting = StepState("ship", "command", Status.RUNNING, waits_for=["p-1", "p-2"])
    decided = StepState("ship", "command", Status.RUNNING, waited_ms=2_000)
    with open(tmp_path / "err", "wb", buffering=0) as file:

        async def write() -> None:
            where = "--on temporal://127.0.0.1:7233"
            async with RunLines(Outlet(file.fileno()), shows_output=True, heartbeat_s=0.3, where=where) as lines:
                lines.handle_change(waiting)
                await wait_for_lines(tmp_path / "err", 2)
                lines.handle_change(decided)

        asyncio.run(write())
    first, second, *_, last = (tmp_path / "err").read_text().splitlines()
    waits = "ship waits for p-1 and 1 more: shotclock inbox approve p-1 --on temporal://127.0.0.1:7233"
    assert first == f"◌ {waits}" and second.startswith(f"… running: {waits} ")
    assert last == "… ship running, waited 2s"


async def wait_for_lines(file: Path, count: int) -> None:
    async with asyncio.timeout(10):
        while file.read_bytes().count(b"\n") < count:
            await asyncio.sleep(0.02)
