"""The log of a job: what a reader finds in its two pages, by lines and by time."""

import os
from pathlib import Path

import pytest

from shotclock.core.limits import WallTime
from shotclock.dispatch import job_log
from shotclock.dispatch.job_log import Log, Logbook, LogPart


def open_log(path: Path) -> Logbook:
    return Logbook(str(path), os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600))


def test_pages_are_limited_and_numbers_are_those_of_the_whole_output(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job_log, "LOG_LIMIT", 1_000)
    log = open_log(tmp_path / "log")
    written = b""
    for number in range(1, 1_001):
        line = f"line {number}\n".encode()
        log.write(line)
        written += line
        part = Log(str(tmp_path / "log")).read()
        assert part.end == len(written) and part.next_line == number + 1
        assert written.endswith(part.content) and part.content.startswith(f"line {part.first_line}\n".encode())
    assert sum(os.path.getsize(name) for name in Log(str(tmp_path / "log")).files[:2]) < 3_000
    assert os.path.getsize(tmp_path / "log.index") < 1_000


def test_a_reader_continues_where_it_was_and_skips_what_was_dropped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job_log, "LOG_LIMIT", 100)
    log, path = open_log(tmp_path / "log"), str(tmp_path / "log")
    log.write(b"first\nhalf")
    seen = Log(path).read()
    log.write(b" and half\n")
    assert Log(path).read(seen.end).content == b" and half\n"
    for number in range(200):
        log.write(f"{number:09}\n".encode())
    rest = Log(path).read(seen.end)
    assert rest.offset > seen.end and rest.content.endswith(b"000000199\n")
    assert Log(path).read(rest.end).content == b""


def test_a_reader_at_the_end_of_a_page_misses_no_line_of_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job_log, "LOG_LIMIT", 10)
    log, path = open_log(tmp_path / "log"), str(tmp_path / "log")
    log.write(b"a page of one line\n")
    seen = Log(path).read()
    log.write(b"the second page\n")
    log.write(b"the third page\n")
    assert Log(path).read(seen.end).content == b"the second page\nthe third page\n"


def test_a_part_is_chosen_by_lines(tmp_path: Path) -> None:
    open_log(tmp_path / "log").write(b"1\n2\n3\n4\nopen")
    for number, expected in ((1, b"1\n2\n3\n4\nopen"), (4, b"4\nopen"), (5, b"open"), (9, b"")):
        part = Log(str(tmp_path / "log")).read()
        part.keep_from_line(number)
        assert part.content == expected
    for count, expected in ((1, b"open"), (2, b"4\nopen"), (9, b"1\n2\n3\n4\nopen")):
        part = Log(str(tmp_path / "log")).read()
        part.keep_last_lines(count)
        assert part.content == expected
    assert part.first_line == 1 and Log(str(tmp_path / "log")).tail(6) == "4\nopen"


def test_a_part_is_chosen_by_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_log, "wall_time", lambda: WallTime(9_000))
    log = open_log(tmp_path / "log")
    for at_ms in (10_000, 10_500, 20_000, 30_000):
        monkeypatch.setattr(job_log, "wall_time", lambda at_ms=at_ms: WallTime(at_ms))
        log.write(f"at {at_ms}\n".encode())
    for since_ms, expected in (
        (0, b"at 10000\nat 10500\nat 20000\nat 30000\n"),
        (15_000, b"at 20000\nat 30000\n"),
        (30_000, b"at 30000\n"),
        (40_000, b""),
    ):
        assert Log(str(tmp_path / "log")).read(since=WallTime(since_ms)).content == expected


def test_a_further_attempt_appends_and_a_log_without_an_index_is_still_read(tmp_path: Path) -> None:
    open_log(tmp_path / "log").write(b"one\ntwo\n")
    open_log(tmp_path / "log").write(b"three\n")
    part = Log(str(tmp_path / "log")).read()
    assert (part.content, part.next_line) == (b"one\ntwo\nthree\n", 4)
    (tmp_path / "bare").write_bytes(b"it did not start\n")
    assert Log(str(tmp_path / "bare")).tail(100) == "it did not start\n"
    assert Log(str(tmp_path / "none")).read().content == b""


def test_a_part_of_a_log_is_cut_by_lines_and_knows_where_it_is() -> None:
    for work, content, offset, first_line in (
        (lambda part: part.keep_from_line(5), b"two\nne\n", 14, 5),
        (lambda part: part.keep_from_line(6), b"ne\n", 18, 6),
        (lambda part: part.keep_from_line(9), b"", 21, 7),
        (lambda part: part.keep_from_line(4), b"one\ntwo\nne\n", 10, 4),
        (lambda part: part.keep_last_lines(1), b"ne\n", 18, 6),
        (lambda part: part.keep_last_lines(2), b"two\nne\n", 14, 5),
        (lambda part: part.keep_last_lines(9), b"one\ntwo\nne\n", 10, 4),
        (lambda part: part.drop(4), b"two\nne\n", 14, 5),
    ):
        part = LogPart(b"one\ntwo\nne\n", 10, 4)
        work(part)
        assert (part.content, part.offset, part.first_line) == (content, offset, first_line)
        assert (part.end, part.next_line) == (21, 7)
    last = LogPart(b"a\nb")
    last.keep_last_lines(1)
    assert last.content == b"b" and last.next_line == 2
