"""The output of a job: what is shown of it and what is kept, however it arrives."""

import os
import stat
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as some

from shotclock.apps.server import shell_jobs as shell_output
from shotclock.apps.server.shell_jobs import END_KEPT, FILE_CAP, SHOWN, JobOutput


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SHOTCLOCK_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def output_of(home: Path, *chunks: bytes) -> JobOutput:
    output = JobOutput(str(home / "output" / os.urandom(6).hex()))
    for chunk in chunks:
        output.add(chunk)
    return output


def test_a_short_output_is_shown_whole_and_needs_no_file(home: Path) -> None:
    output = output_of(home, b"a\nb", b"\nc")
    assert (output.excerpt().text, output.lines, output.complete_lines) == ("a\nb\nc", 3, 2)
    assert output.file is None and not home.exists()
    assert output.lines_after(0, 10) == ("a\nb\nc", 1, 3)
    assert output.lines_after(1, 1) == ("b", 2, 2)
    assert output.lines_after(3, 5) == ("", 4, 3), "there is no fourth line"


def test_the_file_is_private_and_has_everything_from_the_first_byte(home: Path) -> None:
    chunks = [b"x" * 99 + b"\n"] * (SHOWN // 100 + 1)
    output = output_of(home, *chunks)
    assert output.file is not None and output.is_file_whole
    assert Path(output.file).read_bytes() == b"".join(chunks)
    assert stat.S_IMODE(os.stat(output.file).st_mode) == 0o600
    output.remove_file()
    assert output.file is None and not list((home / "output").iterdir())


def test_without_a_place_for_the_file_the_beginning_and_the_end_are_kept(home: Path) -> None:
    home.write_text("not a folder")
    output = output_of(home, *(b"%d\n" % number for number in range(1, 50_001)))
    shown = output.excerpt()
    assert shown.text.startswith("1\n2\n") and shown.text.endswith("49999\n50000\n")
    assert "they could not be kept in a file" in shown.text and output.file is None
    assert output.lines_after(49_998, 5) == ("49999\n50000", 49_999, 50_000)
    assert output.lines_after(10, 1).first_line > 10_000, "the line after 10 was not kept"


def test_a_full_disk_ends_the_file_and_nothing_else(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    output = output_of(home, b"x" * 99 + b"\n", b"y" * SHOWN)
    kept = output.file_bytes

    def refuse(fd: int, content: bytes) -> int:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(shell_output.os, "write", refuse)
        output.add(b"lost\n")
    output.add(b"after\n")
    assert (output.file_bytes, output.is_file_whole) == (kept, False)
    assert f"the first {kept:,} bytes of the output" in output.excerpt().text
    assert output.excerpt().text.endswith("lost\nafter\n")


def test_past_the_cap_only_the_end_is_kept_and_lines_are_still_counted(home: Path) -> None:
    chunk = b"0123456\n" * 8_192
    output = output_of(home, *([chunk] * (FILE_CAP // len(chunk) + 3)))
    assert output.file_bytes == FILE_CAP and output.total == FILE_CAP + 3 * len(chunk)
    assert output.lines == output.total // 8
    in_file = FILE_CAP // 8
    assert output.lines_after(in_file - 1, 1) == ("0123456", in_file, in_file)
    lost = output.lines_after(in_file + 5, 1)
    assert lost.first_line == output.lines - END_KEPT // 8 + 2, "the first line of the end may be cut"
    assert output.lines_after(output.lines - 1, 9) == ("0123456", output.lines, output.lines)


def test_a_line_without_end_is_cut_in_the_middle(home: Path) -> None:
    output = output_of(home, b"begin" + b"x" * 200_000 + b"end")
    assert "0 lines (184,008 bytes) left out" in output.excerpt().text
    text = output.lines_after(0, 10).text
    assert text.startswith("beginxx") and text.endswith("xxend") and "196,008 bytes left out" in text


@given(
    chunks=some.lists(some.binary(max_size=40) | some.just(b"a line\n" * 700) | some.just(b"x" * 5_000), max_size=40),
    number=some.integers(0, 12_000),
    most=some.integers(1, 50),
)
def test_lines_are_found_however_the_output_arrived(chunks: list[bytes], number: int, most: int) -> None:
    output = output_of(Path(os.environ["SHOTCLOCK_HOME"]), *chunks)
    whole = b"".join(chunks)
    lines = whole.split(b"\n")
    lines = lines if lines[-1] else lines[:-1]
    assert (output.file is not None) == (len(whole) > SHOWN)
    assert (output.total, output.complete_lines, output.lines) == (len(whole), whole.count(b"\n"), len(lines))
    found = output.lines_after(number, most)
    assert found.first_line == number + 1
    shown = lines[number : found.last_line]
    assert len(shown) <= most and (shown or number >= len(lines))
    if all(len(line) <= shell_output.LONGEST_LINE for line in shown):
        assert found.text == b"\n".join(shown).decode("utf-8", "replace")
    output.remove_file()


def test_a_line_that_the_full_file_cuts_is_not_shown_as_whole(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shell_output, "FILE_CAP", 20_050)
    output = output_of(home, *[b"x" * 99 + b"\n"] * 2_000)
    assert output.lines_after(199, 5) == ("x" * 99, 200, 200)
    assert output.lines_after(200, 1).first_line > 2_000 - END_KEPT // 100, "line 201 was not kept"


def test_empty_lines_that_are_counted_as_shown_are_shown(home: Path) -> None:
    shown = output_of(home, b"\n" * 50_000).excerpt()
    assert shown.text.count("\n") + shown.lines_left_out == 50_000 + 1, "and one line about those left out"
