"""`shotclock logs --on`: what heartbeats and results have of the output of a run on an engine."""

import asyncio
import subprocess
import sys
import time
from pathlib import Path

import pytest

from shotclock.core.visible_text import Redaction
from shotclock.flows.run.step_log import KeptLog, LogLine, RunLogs
from shotclock.temporal.step_tails import TAIL_LIMIT, StepTails, _ActivityReading
from tests.temporal.conftest import WITHIN_S, Runs, wait_until

FLOW = """
    timeout: 200
    steps:
      warn: {exec: "echo WARNING >&2; echo fine"}
      flaky: {exec: "echo out; exit 1", on_fail: {retry: {max: 1}}, continue_on_failure: true}
      each: {exec: "echo item {{ item }}", for_each: [a, b]}
      flood: {exec: "seq 3000"}
      nested: {type: workflow, workflow: inner.yaml}
      silent: {exec: "true"}
    """


@pytest.fixture(autouse=True)
def payloads(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if "on_engine" in request.fixturenames:
        folder: Path = request.getfixturevalue("cluster").folder
        monkeypatch.setenv("SHOTCLOCK_PAYLOADS", str(folder / "home" / "payloads"))


@pytest.mark.slow
def test_after_its_end_the_ends_of_all_tries_are_there(on_engine: Runs) -> None:
    on_engine.write("steps: {part: {exec: echo inside}}", "inner.yaml")
    run_id = f"logs-{time.monotonic_ns()}"
    on_engine.run(FLOW, "--run-id", run_id)
    code, answer = on_engine.call("logs", run_id)
    assert code == 0 and answer["data"]["terminal"], answer
    found = {(log["step"], log["try"]): log["lines"] for log in answer["data"]["logs"]}
    flood = found.pop(("flood", 1))
    texts = {key: sorted(line["text"] for line in lines) for key, lines in found.items()}
    assert texts == {
        ("warn", 1): ["WARNING", "fine"],
        ("flaky", 1): ["out"],
        ("flaky", 2): ["out"],
        ("each[0]", 1): ["item a"],
        ("each[1]", 1): ["item b"],
        ("nested.part", 1): ["inside"],
    }
    written = sum(len(f"1 {number}\n") for number in range(1, 3001))
    kept = sum(len(f"1 {line['text']}\n") for line in flood[1:])
    assert flood[-1]["text"] == "3000" and flood[0]["left_out"] + kept == written
    code, answer = on_engine.call("logs", run_id, "flody")
    assert code != 0 and "did you mean flood" in answer["error"]["suggestion"]
    assert on_engine.call("logs", run_id, "silent")[1]["data"]["none"]


@pytest.mark.slow
def test_a_running_step_is_followed_by_its_heartbeats_and_no_line_comes_twice(on_engine: Runs) -> None:
    run_id, go = f"follow-{time.monotonic_ns()}", on_engine.folder / "go"
    script = "for n in 1 2 3 4 5 6; do echo line $n; sleep 0.5; done; while test ! -e go; do sleep 0.1; done; echo end"
    running = on_engine.start(f"""steps: {{a: {{exec: "{script}", timeout: 100}}}}""", "--run-id", run_id)
    words = [sys.executable, "-m", "shotclock", "logs", run_id, "a", "-f", *on_engine.where]
    out = on_engine.folder / "followed"
    wait_until(lambda: on_engine.call("logs", run_id)[1]["ok"], "the run")
    with out.open("wb") as file, subprocess.Popen(words, stdout=file, cwd=on_engine.folder) as following:
        try:
            wait_until(lambda: "line 6" in out.read_text(), "a heartbeat with the output")
            assert running.process.poll() is None, "the output came only with the result"
            go.touch()
            assert following.wait(WITHIN_S) == 0
        finally:
            following.kill()
    assert running.ended()[0] == 0
    assert out.read_text().splitlines() == [*(f"line {n}" for n in range(1, 7)), "end"]


class Reader:
    """A reader of one activity, which remembers what it was given."""

    def __init__(self) -> None:
        self.reading, self.lines = _ActivityReading(), list[str]()

    def take(self, log: KeptLog, lines: list[LogLine]) -> None:
        self.lines += [f"[{line.left_out}]" if line.left_out else f"{log.step} {line.text}" for line in lines]


def test_a_reader_that_misses_heartbeats_names_the_gap_and_shows_nothing_twice() -> None:
    tails, reader = StepTails(), Reader()
    tails.add("a", 1, b"1 one\n")
    early = tails.describe()
    for printed in (early, early):
        reader.reading.add("", printed, reader.take)
    assert reader.lines == ["a one"]
    for number in range(1000):
        tails.add("a", 1, b"1 %07d\n" % number)
    reader.reading.add("", tails.describe(), reader.take)
    reader.reading.add("", early, reader.take)  # an answer of the engine that was late
    gap = reader.lines[1]
    kept = len(reader.lines) - 2
    assert reader.lines[-1] == "a 0000999" and int(gap[1:-1]) + kept * 10 == 10_000
    assert TAIL_LIMIT - 10 <= kept * 10 <= TAIL_LIMIT


def test_of_a_line_longer_than_a_tail_the_end_is_shown() -> None:
    tails, reader = StepTails(), Reader()
    tails.add("a", 1, b"1 " + b"x" * 10_000 + "ü end\n".encode())
    reader.reading.add("", tails.describe(), reader.take)
    assert len(reader.lines) == 2 and reader.lines[1].endswith("xxü end")
    assert len(str(tails.describe())) < TAIL_LIMIT + 200


def test_items_of_which_nothing_was_seen_are_named_at_the_end() -> None:
    tails, reader = StepTails(), Reader()
    for number in range(100):
        tails.add(f"a[{number}]", 1, b"1 " + b"y" * 97 + b"\n")
    reader.reading.finish("", "a", tails.describe(), reader.take)
    assert len(reader.lines) <= TAIL_LIMIT // 100 + 1
    missed = int(reader.lines[-1][1:-1])
    assert missed + (len(reader.lines) - 1) * 100 == 10_000


def test_records_without_an_end_of_text_are_no_tail(tmp_path: Path) -> None:
    tails = StepTails()
    tails.add("a", 1, b"")
    assert tails.describe() == {}


def test_a_tail_has_no_secret_also_where_it_is_written_in_parts() -> None:
    tails, reader, secret = StepTails(), Reader(), "s3cr3t-value-xyz"

    async def write() -> None:
        log = RunLogs(None, "one", Redaction({"TOKEN": secret}), tails.add).open("a", 1)
        for piece in (b"uses s3cr3t-", b"value-xyz\n", b"again " + secret.encode() + b"\n"):
            log.add([(1, piece)], [0, 0])
        log.close()

    asyncio.run(write())
    reader.reading.add("", tails.describe(), reader.take)
    assert reader.lines == ["a uses ***", "a again ***"]
