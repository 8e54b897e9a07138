"""The logs of the steps of a run: what each attempt prints, without secrets, written while it runs.

A log has a record for each line: the stream (1 or 2), a mark, and the text. The mark is a blank, `+` for a line that
another record of the stream continues, or `-` for a number of bytes that were left out.
AGENTS.md: masked before it is written.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from pathlib import Path
from urllib.parse import unquote

from ...core.value_types import JsonObject, value
from ...core.visible_text import HIDDEN, SHORTEST, Redaction
from ...dispatch.job_log import Log, Logbook
from ...store.home import StoreUnusable, make_private_directory
from ...store.store import LOGS_FOLDER, log_name
from ...supervise.clock import monotonic_ns
from ._log_quota import LogQuota

PRINTING = ("command", "tool", "function", "mcp", "ai")  # the types of steps whose output is kept
UNFINISHED_NS = 1_000_000_000  # after this time the beginning of a line is shown
LONGEST_LINE = 64 * 1024  # of a longer one the beginning is shown at once
ATTEMPTS_REPORTED = 20  # of one step, in a report
READ_FOR_REPORT = 256 * 1024  # bytes of the log of an attempt
END_REPORTED = 2_000  # characters of each stream of an attempt, in a report
_FILE_NAME = re.compile(r"(.+)@(\d+)", re.ASCII)  # the name of a step is quoted, so that it has no `@`

OnStepOutput = Callable[[str, int, bytes], None]
"""Takes the name of a step, the number of its attempt, and new records of its log; none when the attempt begins."""


@value
class KeptLog:
    step: str
    number: int
    path: str


@value
class LogLine:
    stream: int
    text: str
    is_whole: bool = True
    left_out: int = 0


class RunLogs:
    """The logs of one run, for the process that has it."""

    def __init__(
        self,
        home: Path | None,
        run_id: str,
        redaction: Redaction,
        on_output: OnStepOutput | None,
        quota: LogQuota | None = None,
    ) -> None:
        """`home` is the directory of the store; without one nothing is kept, and `on_output` gets everything."""
        self._folder = None if home is None else run_folder(home, run_id)
        self.redaction = redaction
        self.on_output = on_output
        self.quota: LogQuota = LogQuota(0) if quota is None else quota
        self.lost: str = ""
        """Why output is missing in the logs."""

    def open(self, step: str, number: int) -> AttemptLog:
        if self.on_output is not None:
            self.on_output(step, number, b"")
        return AttemptLog(self, step, number)

    def open_file(self, step: str, number: int) -> Logbook | None:
        if self._folder is None:
            return None
        path = f"{self._folder}/{log_name(step)}@{number}"
        try:
            make_private_directory(self._folder.parent)
            with contextlib.suppress(FileExistsError):
                self._folder.mkdir(0o700)
            file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        except OSError as error:
            self.lost = self.lost or error.strerror or str(error)
        except StoreUnusable as unusable:
            self.lost = self.lost or str(unusable)
        else:
            self.quota.open(self._folder, path)
            return Logbook(path, file)
        return None

    def close_file(self, book: Logbook, step: str, number: int) -> None:
        book.close()
        self.quota.close(f"{self._folder}/{log_name(step)}@{number}")


class AttemptLog:
    """The log of one attempt. Its file is made when something is printed."""

    def __init__(self, logs: RunLogs, step: str, number: int) -> None:
        self._logs, self._step, self._number = logs, step, number
        self._book: Logbook | None = None
        self._is_open = False
        self._rest = {1: b"", 2: b""}
        self._left_out = {1: 0, 2: 0}
        """Of a line whose beginning is missing: it could be half a secret, so the rest of it is left out as well."""
        self._since_ns = {1: 0, 2: 0}
        """The instant at which the unfinished line of a stream began, or was last shown."""
        self._timer: asyncio.TimerHandle | None = None

    def add(self, pieces: Sequence[tuple[int, bytes]], left_out: Sequence[int]) -> None:
        records: list[bytes] = []
        for stream, size in enumerate(left_out, 1):
            if size:
                self._left_out[stream] += size + len(self._rest[stream])
                self._rest[stream] = b""
        for stream, group in groupby(pieces, lambda piece: piece[0]):
            self._add(stream, b"".join(chunk for _, chunk in group), records)
        self._write(records)
        self._set_timer()

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        records: list[bytes] = []
        for stream in (1, 2):
            self._show_beginning(stream, records, is_end=True)
            if self._left_out[stream]:
                records.append(b"%d-%d\n" % (stream, self._left_out[stream]))
        self._write(records)
        if self._book is not None:
            self._logs.close_file(self._book, self._step, self._number)

    def _add(self, stream: int, chunk: bytes, records: list[bytes]) -> None:
        if self._left_out[stream]:
            lost, end, chunk = chunk.partition(b"\n")
            self._left_out[stream] += len(lost) + len(end)
            if not end:
                return
            records.append(b"%d-%d\n" % (stream, self._left_out[stream]))
            self._left_out[stream] = 0
        whole, end, rest = (self._rest[stream] + chunk).rpartition(b"\n")
        if end:
            mark = b"%d " % stream
            records.append(mark + self._mask(whole).replace(b"\n", b"\n" + mark) + b"\n")
        if end or not self._rest[stream]:
            self._since_ns[stream] = monotonic_ns()
        self._rest[stream] = rest
        if len(rest) > LONGEST_LINE:
            self._show_beginning(stream, records)

    def _mask(self, line: bytes) -> bytes:
        return self._logs.redaction.text(line.decode("utf-8", "surrogateescape")).encode("utf-8", "surrogateescape")

    def _show_beginning(self, stream: int, records: list[bytes], *, is_end: bool = False) -> None:
        """Show the beginning of an unfinished line, up to a place where a secret may begin."""
        text = self._rest[stream].decode("utf-8", "surrogateescape")
        cut = self._logs.redaction.find_unfinished(text)
        held = text[cut:]
        if is_end:
            held = HIDDEN if len(held) >= SHORTEST else held
            shown, self._rest[stream] = self._logs.redaction.text(text[:cut]) + held, b""
        else:
            shown, self._rest[stream] = self._logs.redaction.text(text[:cut]), held.encode("utf-8", "surrogateescape")
        if shown:
            records.append(b"%d+%s\n" % (stream, shown.encode("utf-8", "surrogateescape")))

    def _write(self, records: list[bytes]) -> None:
        if not records:
            return
        written = b"".join(records)
        if not self._is_open:
            self._is_open, self._book = True, self._logs.open_file(self._step, self._number)
        if self._book is not None:
            if not self._book.write(written):
                self._logs.lost = self._logs.lost or "the disk did not take it"
            self._logs.quota.add(len(written))
        if self._logs.on_output is not None:
            self._logs.on_output(self._step, self._number, written)

    def _set_timer(self) -> None:
        """Wait for the older unfinished line. Later output does not delay it: a model writes long lines in pieces."""
        unfinished = [self._since_ns[stream] for stream, rest in self._rest.items() if rest]
        if self._timer is None and unfinished:
            pause_s = max(0, min(unfinished) + UNFINISHED_NS - monotonic_ns()) / 1e9
            self._timer = asyncio.get_running_loop().call_later(pause_s, self._show_beginnings)

    def _show_beginnings(self) -> None:
        now_ns, records = monotonic_ns(), list[bytes]()
        self._timer = None
        for stream, since_ns in self._since_ns.items():
            if self._rest[stream] and now_ns >= since_ns + UNFINISHED_NS:
                self._show_beginning(stream, records)
                self._since_ns[stream] = now_ns
        self._write(records)
        self._set_timer()


def run_folder(home: Path, run_id: str) -> Path:
    return home / LOGS_FOLDER / log_name(run_id)


def list_logs(home: Path, run_id: str) -> list[KeptLog]:
    """Return the logs of a run, the oldest first."""
    found = []
    with contextlib.suppress(OSError), os.scandir(run_folder(home, run_id)) as entries:
        for entry in entries:
            if (match := _FILE_NAME.fullmatch(entry.name)) is not None:
                found.append(
                    (_began(entry.path), KeptLog(unquote(match[1], errors="surrogatepass"), int(match[2]), entry.path))
                )
    return [log for _, log in sorted(found, key=lambda each: (each[0], each[1].step, each[1].number))]


def read_printed_ends(home: Path, run_id: str) -> dict[str, list[JsonObject]]:
    """Return the ends of both streams of each attempt, by the step. Items and tools of an agent are with their step."""
    found: dict[str, list[JsonObject]] = {}
    for log in list_logs(home, run_id):
        attempts = found.setdefault(log.step.partition("[")[0].partition(" tool ")[0], [])
        if len(attempts) < ATTEMPTS_REPORTED:
            texts = {1: "", 2: ""}
            content = Log(log.path).read().content
            if len(content) > READ_FOR_REPORT:
                content = content[-READ_FOR_REPORT:].partition(b"\n")[2]
            for line in read_records(content):
                text = f"[… {line.left_out} bytes left out …]\n" if line.left_out else line.text + "\n" * line.is_whole
                texts[line.stream] = (texts[line.stream] + text)[-END_REPORTED:]
            attempts.append({"step": log.step, "try": log.number, "stdout": texts[1], "stderr": texts[2]})
    return found


def _began(path: str) -> int:
    """Return when the log began, in milliseconds: the first number of its index."""
    with contextlib.suppress(OSError, ValueError, IndexError), open(f"{path}.index", encoding="ascii") as index:
        return int(index.readline().split()[0])
    return 0


def read_records(content: bytes) -> Iterator[LogLine]:
    """Yield the lines of a log; a record that is still being written is left out."""
    for record in content.split(b"\n")[:-1]:
        stream, mark, text = record[:1], record[1:2], record[2:].decode("utf-8", "replace")
        if stream not in (b"1", b"2"):
            continue
        if mark == b"-" and text.isdecimal():
            yield LogLine(int(stream), "", left_out=int(text))
        elif mark in (b" ", b"+"):
            yield LogLine(int(stream), text, mark == b" ")
