"""The output of a job for a model: its beginning and end, with the lines between them counted, and lines on request.

The whole is in a private file as soon as it is longer than an answer shows, up to FILE_CAP bytes. After that only the
end is kept, in memory, and the lines are still counted.
"""

from __future__ import annotations

import os
from bisect import bisect_left
from typing import NamedTuple

from ...supervise.command_task import make_private_directory, prune_spills

# Bytes of an answer. The end of an output says more than its beginning.
HEAD, TAIL = 6_000, 10_000
SHOWN = HEAD + TAIL
END_KEPT = 64 * 1024
FILE_CAP = 32 * 1024 * 1024  # a flood must not fill the disk
MARK_EVERY = 64 * 1024  # bytes of the file between two known line numbers
READ_SIZE = 1024 * 1024
LONGEST_LINE = 4_000  # bytes of one line among those that were asked for


class Excerpt(NamedTuple):
    """A part of an output. `lines_left_out` were written, and are not in the text."""

    text: str
    lines_left_out: int = 0


class Lines(NamedTuple):
    """Lines of an output, and the numbers of the first and the last."""

    text: str
    first_line: int
    last_line: int


class JobOutput:
    def __init__(self, path: str) -> None:
        self._path = path
        self._begin = bytearray()
        self._end = bytearray()
        self._fd = -1
        self._marks = [(0, 0)]  # lines before a byte of the file, and its offset
        self._file_lines = 0
        self.file_bytes: int = 0
        self.total: int = 0
        self.complete_lines: int = 0

    @property
    def lines(self) -> int:
        """Return the number of lines; the last one may not be complete yet."""
        return self.complete_lines + bool(self._end and not self._end.endswith(b"\n"))

    @property
    def file(self) -> str | None:
        """Return the file, if there is one."""
        return self._path if self.file_bytes else None

    @property
    def is_file_whole(self) -> bool:
        return self.file_bytes == self.total

    def add(self, chunk: bytes) -> None:
        self._begin += chunk[: max(0, SHOWN - len(self._begin))]
        if self._fd >= 0:
            self._write(chunk)
        elif self.total <= SHOWN < self.total + len(chunk):
            self._open_file()
            self._write(bytes(self._end) + chunk)  # the end is still the whole
        self.total += len(chunk)
        self.complete_lines += chunk.count(b"\n")
        self._end += chunk
        del self._end[:-END_KEPT]

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def remove_file(self) -> None:
        self.close()
        if self.file_bytes:
            self.file_bytes = 0
            try:
                os.unlink(self._path)
            except OSError:  # it was removed before
                pass

    def _open_file(self) -> None:
        try:
            make_private_directory(os.path.dirname(self._path))
            prune_spills()
            self._fd = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        except OSError:  # no place to write: beginning and end are kept
            self._fd = -1

    def _write(self, chunk: bytes) -> None:
        if self._fd < 0:
            return
        chunk = chunk[: FILE_CAP - self.file_bytes]
        written = 0
        try:
            while written < len(chunk):
                written += os.write(self._fd, chunk[written:])
        except OSError:  # the disk is full
            pass
        self.file_bytes += written
        self._file_lines += chunk.count(b"\n", 0, written)
        if self.file_bytes - self._marks[-1][1] >= MARK_EVERY:
            self._marks.append((self._file_lines, self.file_bytes))
        if self.file_bytes >= FILE_CAP or written < len(chunk):
            self.close()  # the file ends here

    def excerpt(self) -> Excerpt:
        """Return the whole, or the beginning and the end with a line about the rest."""
        if self.total <= SHOWN:
            return Excerpt(_decode(self._begin))
        head, tail = bytes(self._begin[:HEAD]), bytes(self._end[-TAIL:])
        if (cut := head.rfind(b"\n") + 1) > HEAD // 2:
            head = head[:cut]
        if 0 < (cut := tail.find(b"\n") + 1) < TAIL // 2:
            tail = tail[cut:]
        left_bytes = self.total - len(head) - len(tail)
        left_lines = max(0, self.lines - _count_lines(head) - _count_lines(tail))
        gap = f"… {left_lines:,} lines ({left_bytes:,} bytes) left out; {self.describe_file()}"
        return Excerpt("\n".join((_decode(head).removesuffix("\n"), gap, _decode(tail))), left_lines)

    def describe_file(self) -> str:
        if not self.file_bytes:
            return "they could not be kept in a file"
        what = "whole output" if self.is_file_whole else f"the first {self.file_bytes:,} bytes of the output"
        return f"{what}: {self._path}"

    def lines_after(self, number: int, most: int) -> Lines:
        """Return at most `most` lines after the one of this number, as many as fit into SHOWN bytes."""
        first, found = self._find_after(number, most)
        shown: list[bytes] = []
        size = 0
        for line in found:
            if len(line) > LONGEST_LINE:
                left = len(line) - LONGEST_LINE
                line = (
                    line[: LONGEST_LINE // 2] + f" … {left:,} bytes left out … ".encode() + line[-LONGEST_LINE // 2 :]
                )
            size += len(line) + 1
            if size > SHOWN and shown:
                break
            shown.append(line)
        return Lines(_decode(b"\n".join(shown)), first, first + len(shown) - 1)

    def _find_after(self, number: int, most: int) -> tuple[int, list[bytes]]:
        """Return lines and the number of the first one, which is a later one if the next lines were not kept."""
        before_end = self.complete_lines - self._end.count(b"\n")
        is_cut = len(self._end) < self.total  # the end may begin inside a line
        if number < before_end + is_cut:
            # A full file may end inside a line, which is then not shown as if it were whole.
            in_file = most if self.is_file_whole else min(most, self._file_lines - number)
            if in_file > 0 and (found := self._read_file(number, in_file)):
                return number + 1, found
            number = before_end + is_cut
        return number + 1, _split(self._end, number - before_end, most)

    def _read_file(self, number: int, most: int) -> list[bytes]:
        lines_before, offset = self._marks[max(0, bisect_left(self._marks, (number, 0)) - 1)]
        content = b""
        try:
            with open(self._path, "rb") as file:
                file.seek(offset)
                while content.count(b"\n") < number - lines_before + most and (chunk := file.read(READ_SIZE)):
                    content += chunk
        except OSError:  # it was removed
            return []
        return _split(content, number - lines_before, most)


def _split(content: bytes | bytearray, skipped: int, most: int) -> list[bytes]:
    lines = bytes(content).split(b"\n")
    return (lines if lines[-1] else lines[:-1])[skipped : skipped + most]


def _count_lines(part: bytes) -> int:
    return part.count(b"\n") + bool(part and not part.endswith(b"\n"))


def _decode(part: bytes | bytearray) -> str:
    return part.decode("utf-8", "replace")
