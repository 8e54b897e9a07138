"""The logs of steps: what every try prints is kept, without secrets and within bounds."""

import asyncio
import base64
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from shotclock.core.envelope import Envelope
from shotclock.core.visible_text import Redaction
from shotclock.dispatch.job_log import Log
from shotclock.flows.engines import EmbeddedEngine
from shotclock.flows.report.html_report import to_html
from shotclock.flows.run.step_log import RunLogs, list_logs, read_records, run_folder
from shotclock.store.store import Retention, Store, prune
from shotclock.supervise.clock import wall_time

pytestmark = pytest.mark.usefixtures("no_survivors")

Run = Callable[..., Envelope]
SECRET = "s3cr3t-value-xyz"
SECRETS = {"API_TOKEN": SECRET, "PATH": os.environ["PATH"]}


def kept(store: Store, run_id: str) -> dict[str, str]:
    """Return the output of each try as text: stdout as it is, and each line of stderr behind an exclamation mark."""
    found = {}
    for log in list_logs(store.home, run_id):
        lines = read_records(Log(log.path).read().content)
        found[f"{log.step} {log.number}"] = "".join(
            f"[{line.left_out}]" if line.left_out else "!" * (line.stream == 2) + line.text + "\n" * line.is_whole
            for line in lines
        )
    return found


def all_bytes(store: Store, run_id: str) -> bytes:
    return b"".join(path.read_bytes() for path in run_folder(store.home, run_id).iterdir())


def test_both_streams_of_every_try_and_item_are_kept(run: Run, store: Store) -> None:
    envelope = run(
        """
        steps:
          warn: {exec: "echo WARNING >&2; sleep 0.2; echo fine"}
          flaky: {exec: "echo out; exit 1", on_fail: {retry: {max: 1}}, continue_on_failure: true}
          each.one: {exec: "echo item {{ item }}", for_each: [a, b]}
          silent: {exec: "true"}
          lines: {type: tool, tool: printer}
        tools: {printer: {exec: "printf 'no end'"}}
        """,
        run_id="one",
    )
    assert envelope.data["steps"]["warn"]["output"] == "fine"
    assert kept(store, "one") == {
        "warn 1": "!WARNING\nfine\n",
        "flaky 1": "out\n",
        "flaky 2": "out\n",
        "each.one[0] 1": "item a\n",
        "each.one[1] 1": "item b\n",
        "lines 1": "no end",
    }
    folder = run_folder(store.home, "one")
    assert folder.stat().st_mode & 0o777 == 0o700
    assert all(path.stat().st_mode & 0o777 == 0o600 for path in folder.iterdir())


def test_a_secret_is_in_no_log_also_where_it_is_written_in_parts(run: Run, store: Store) -> None:
    run(
        f"""
        steps:
          whole: {{exec: "echo before {SECRET} after; echo {SECRET} >&2"}}
          parts: {{exec: "printf s3cr3t-; sleep 1.2; echo value-xyz tail"}}
          cut: {{exec: "printf 'ask s3cr3t-val'"}}
          coded: {{exec: "echo {base64.b64encode(SECRET.encode()).decode()}"}}
        """,
        run_id="one",
        environment=SECRETS,
    )
    assert kept(store, "one") == {
        "whole 1": "before *** after\n!***\n",
        "parts 1": "*** tail\n",
        "cut 1": "ask ***",
        "coded 1": kept(store, "one")["coded 1"],
    }
    found = all_bytes(store, "one")
    assert b"s3cr3t" not in found and base64.b64encode(SECRET.encode())[:16] not in found


def test_an_unfinished_line_is_kept_while_the_step_runs(run: Run, store: Store, tmp_path: Path) -> None:
    run(f"steps: {{ask: {{exec: 'printf Continue?; sleep 1.6; cat {store.home}/logs/one/ask@1'}}}}", run_id="one")
    assert kept(store, "one")["ask 1"].startswith("Continue?")
    assert "1+Continue?" in kept(store, "one")["ask 1"]  # it was in the file before the command read it


def test_a_flood_is_bounded_and_its_end_is_whole(run: Run, store: Store) -> None:
    envelope = run("steps: {flood: {exec: 'seq 3000000 >&2; echo end'}}", run_id="one")  # 23 MB
    assert envelope.ok
    (text,) = kept(store, "one").values()
    assert len(all_bytes(store, "one")) < 3_000_000
    assert "!2999999\n!3000000\n" in text and "end\n" in text
    lines = [line for line in text.splitlines() if line.startswith("!")]
    assert all(line[1:].isdecimal() for line in lines), "a line was cut"
    left_out = sum(int(part.partition("]")[0]) for part in text.split("[")[1:])
    assert left_out > 10_000_000


@pytest.mark.parametrize("size", [1, 7, 100_000])
def test_text_of_any_pieces_is_masked_and_whole(store: Store, size: int) -> None:
    written = f"a {SECRET}\nbb ünï\n\n{'x' * 90_000}{SECRET}{'y' * 90_000}\nlast".encode()

    async def write() -> None:
        log = RunLogs(store.home, "one", Redaction({"TOKEN": SECRET}), None).open("step", 1)
        for at in range(0, len(written), size):
            log.add([(1, written[at : at + size])], [0, 0])
        log.close()

    if size > 1:
        asyncio.run(write())
        assert kept(store, "one")["step 1"] == written.decode().replace(SECRET, "***")
        return
    written = written[:40]
    asyncio.run(write())
    assert kept(store, "one")["step 1"] == written.decode().replace(SECRET, "***")


def test_the_rest_of_a_line_whose_beginning_was_left_out_is_left_out_too(store: Store) -> None:
    async def write() -> None:
        log = RunLogs(store.home, "one", Redaction({"TOKEN": SECRET}), None).open("step", 1)
        log.add([(1, b"first\nbegun s3cr")], [0, 0])
        log.add([(1, b"lue-xyz\nnext\n"), (2, b"err\n")], [50, 0])
        log.close()

    asyncio.run(write())
    assert kept(store, "one")["step 1"] == f"first\n[{50 + 10 + 8}]next\n!err\n"


def test_a_full_disk_costs_the_log_and_a_warning_but_not_the_step(
    run: Run, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = run_folder(store.home, "one")
    folder.mkdir(mode=0o700, parents=True)
    os.symlink("/dev/full", folder / "a@1")
    whole = os.open

    def follow(path: str, flags: int, *more: int) -> int:
        return whole(path, flags & ~os.O_NOFOLLOW, *more)

    monkeypatch.setattr(os, "open", follow)
    envelope = run("steps: {a: {exec: 'echo out; echo err >&2'}}", run_id="one")
    assert envelope.ok and envelope.data["steps"]["a"]["output"] == "out"
    assert [note["code"] for note in envelope.warnings] == ["NOT_WRITTEN_DOWN"]


def test_logs_that_cannot_be_made_cost_a_warning(run: Run, store: Store) -> None:
    (store.home / "logs").write_text("in the way")
    envelope = run("steps: {a: {exec: 'echo out'}}", run_id="one")
    assert envelope.ok and [note["code"] for note in envelope.warnings] == ["NOT_WRITTEN_DOWN"]
    assert "directory" in envelope.warnings[0]["message"]


def test_logs_are_pruned_with_their_run(run: Run, store: Store) -> None:
    for run_id in ("old", "new"):
        run("steps: {a: {exec: 'echo out'}}", run_id=run_id)
    keep_one = Retention(runs=1)
    assert prune(store, keep_one, wall_time(), lambda process: False, dry_run=True).logs == 1
    assert kept(store, "old") and prune(store, keep_one, wall_time(), lambda process: False).logs == 1
    assert not run_folder(store.home, "old").exists() and kept(store, "new") == {"a 1": "out\n"}


def test_a_report_has_stderr_of_successes_and_the_output_of_every_try(run: Run, store: Store) -> None:
    run(
        """
        steps:
          warn: {exec: "echo '<b>WARNING' >&2; seq 1000"}
          flaky: {exec: "echo got $(ls | wc -l); touch new; [ $(ls | wc -l) = 3 ]", on_fail: {retry: {max: 1}}}
        """,
        run_id="one",
    )
    report = asyncio.run(EmbeddedEngine(store).report("one"))
    printed = {step.id: step.printed for step in report.steps}
    assert printed["warn"][0]["stderr"] == "<b>WARNING\n"
    assert printed["warn"][0]["stdout"].endswith("999\n1000\n") and len(printed["warn"][0]["stdout"]) == 2_000
    assert [(each["try"], each["stdout"][:4]) for each in printed["flaky"]] == [(1, "got "), (2, "got ")]
    page = to_html(report)
    assert "warn attempt 1 stderr" in page and "&lt;b&gt;WARNING" in page and "flaky attempt 1 stdout" in page


def test_a_line_that_grows_is_shown_each_second_without_a_split_secret(store: Store) -> None:
    shown: list[str] = []

    def note(step: str, number: int, records: bytes) -> None:
        shown.extend(line.text for line in read_records(records))

    async def write() -> None:
        log = RunLogs(store.home, "one", Redaction({"TOKEN": SECRET}), note).open("step", 1)
        for piece in ["it ", "grows ", "s3cr3t-", "value", "-xyz", " on", " and", " on"] * 3:
            log.add([(1, piece.encode())], [0, 0])
            log.add([(2, b"other lines\n")], [0, 0])
            await asyncio.sleep(0.1)
        log.close()

    asyncio.run(write())
    found = [text for text in shown if text and text != "other lines"]
    assert len(found) > 1 and "".join(found) == "it grows *** on and on" * 3


def test_the_logs_of_a_run_are_bounded_together_and_older_tries_keep_their_ends(
    run: Run, store: Store, tmp_path: Path
) -> None:
    limit = 200_000
    count = 20_000  # less than 128 kB, so that nothing is left out if the reader is behind
    (tmp_path / "inner.yaml").write_text(f"steps: {{part: {{exec: seq {count}}}}}")
    envelope = run(
        f"""
        steps:
          first: {{exec: "seq {count}"}}
          second: {{exec: "seq {count}", depends_on: first}}
          inner: {{type: workflow, workflow: inner.yaml, depends_on: second}}
          last: {{exec: "echo began; sleep 0.5; echo the end", depends_on: inner}}
        """,
        run_id="one",
        environment={**os.environ, "SHOTCLOCK_KEEP_RUN_LOGS_SIZE": str(limit)},
    )
    assert envelope.ok and not envelope.warnings
    found = kept(store, "one")
    for name in ("first 1", "second 1"):
        begin, *lines = found[name].splitlines()
        assert begin == "![the logs of the run have reached 200,000 bytes (SHOTCLOCK_KEEP_RUN_LOGS_SIZE)]"
        assert lines == [str(number) for number in range(count + 1 - len(lines), count + 1)] and len(lines) > 100
    assert found["last 1"] == "began\nthe end\n"
    written = len(all_bytes(store, "one")) + len(all_bytes(store, "one.inner"))
    assert written < limit and list(kept(store, "one")) == ["first 1", "second 1", "last 1"]


def test_where_ends_are_too_many_the_oldest_tries_are_deleted_and_it_is_said(run: Run, store: Store) -> None:
    envelope = run(
        """
        steps:
          each: {exec: "seq 400; echo of {{ item }}", for_each: [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11]}
          wait: {exec: "sleep 0.5; echo waited", depends_on: each}
          last: {exec: "seq 400; sleep 0.5", depends_on: wait}
        """,
        run_id="one",
        environment={**os.environ, "SHOTCLOCK_KEEP_RUN_LOGS_SIZE": "9000"},
    )
    assert envelope.ok
    (note,) = envelope.warnings
    assert note["code"] == "NOT_WRITTEN_DOWN" and "SHOTCLOCK_KEEP_RUN_LOGS_SIZE" in note["message"]
    assert len(all_bytes(store, "one")) < 9_000 and "last 1" in kept(store, "one")


def test_a_shrunk_log_is_not_read_again_by_its_follower_and_its_lines_keep_their_places(store: Store) -> None:
    async def write() -> None:
        log = RunLogs(store.home, "one", Redaction({}), None).open("step", 1)
        log.add([(1, b"%04d\n" % number) for number in range(1000)], [0, 0])
        log.close()

    asyncio.run(write())
    (log,) = list_logs(store.home, "one")
    whole = Log(log.path).read()
    assert Log(log.path).shrink(70, b"note") == os.stat(log.path).st_size
    shrunk, late = Log(log.path).read(), Log(log.path).read(whole.end - 14)
    assert [line.text for line in read_records(shrunk.content)] == ["[note]", *(f"0{n}" for n in range(990, 1000))]
    assert shrunk.end == whole.end and shrunk.next_line == whole.next_line
    assert late.content == b"1 0998\n1 0999\n" and not Log(log.path).read(whole.end).content
