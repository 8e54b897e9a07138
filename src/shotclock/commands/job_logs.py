"""`job logs`: the output of a job, as it is kept, or followed until the job ends."""

from __future__ import annotations

import codecs
import re
import sys
from collections.abc import Callable
from functools import partial

from ..calls.call import OURSELVES, Outcome, Tool
from ..core.envelope import Envelope
from ..core.errors import Ending, Failure
from ..core.limits import WallTime, parse_duration_ms
from ..core.value_types import replace
from ..dispatch.job_client import JobClient
from ..dispatch.job_log import Log, LogPart
from ..store.jobs import Job
from ..store.store import Store
from ..supervise.clock import pause, wall_time
from ..terminal.output import StopListener, write_quietly
from ..terminal.parser import Option, Subcommand, whole_number
from ..terminal.subcommand import TIMEOUT_MS, Mistaken, admit_call, conclude, deliver, run_subcommand

LINES = 100
LOOK_S = 0.1  # between two looks at a log that is followed


def _read_since(text: str) -> tuple[str, int]:
    """Return the number of a line, or milliseconds."""
    if text.isascii() and text.isdecimal():
        return "line", max(1, whole_number(text))
    return "time", parse_duration_ms(text)


COMMAND = Subcommand(
    "logs",
    "Print the output of a job: the last 100 lines, unless options say otherwise.",
    (
        Option.argument("job-id", "The job: its name, its id, or the beginning of its id.", missing="missing JOB-ID"),
        Option.flag("--follow", "-f: print further output until the job ends, always as text."),
        Option.taking(
            "--since",
            "WHEN",
            "Print the output of the last 10m (a duration), or from line 120 on (a number). The last one or two "
            "million bytes are kept.",
            read=_read_since,
        ),
        Option.number("--lines", "-n N: print the last N lines; 0 means all.", 0),
    ),
    usage="JOB-ID [-f] [-n N] [--since WHEN]",
)


def log_command(prefix: str, tool: Tool = OURSELVES) -> Subcommand:
    """Return the subcommand, which also accepts -f and -n."""
    command = replace(COMMAND, run=partial(_run, tool))

    def main(words: list[str]) -> int:
        return run_subcommand(prefix, command, [long for word in words for long in spell_out(word)], tool=tool)

    return replace(command, main=main)


def spell_out(word: str) -> list[str]:
    if word == "-f":
        return ["--follow"]
    if (match := re.fullmatch(r"-n=?(\d*)", word, re.ASCII)) is not None:
        return ["--lines", match[1]] if match[1] else ["--lines"]
    return [word]


def _run(
    tool: Tool, job_id: str, follow: bool, since: tuple[str, int] | None, lines: int | None
) -> Callable[[bool], int]:
    if since is not None and lines is not None:
        raise Mistaken({"since": "--since and --lines exclude each other: leave one out"})
    count = LINES if lines is None and since is None else lines or 0

    def start(as_json: bool) -> int:
        call = admit_call("job logs", 0 if follow else TIMEOUT_MS, tool=tool)
        body = partial(_follow if follow else _read, job_id, since, count)
        envelope = conclude(call, body)
        if follow and (envelope.ok or envelope.code == "CANCELLED"):  # Ctrl-C is the way to leave
            return envelope.exit_code
        return deliver(envelope, as_json, _show)

    return start


def _find(client: JobClient, job_id: str) -> tuple[Job, str]:
    job = client.find(job_id)
    if job.log_path is None:
        raise Failure("NOT_FOUND", f"job {job.id} has no log")
    return job, job.log_path


def _first_part(path: str, since: tuple[str, int] | None, count: int) -> LogPart:
    kind, number = since or ("", 0)
    part = Log(path).read(since=WallTime(max(0, wall_time().ms - number)) if kind == "time" else None)
    if kind == "line":
        part.keep_from_line(number)
    if count:
        part.keep_last_lines(count)
    return part


def _read(job_id: str, since: tuple[str, int] | None, count: int) -> Outcome:
    with Store.open() as store:
        job, path = _find(JobClient(store, ["shotclock"]), job_id)
        part = _first_part(path, since, count)
    text = part.content.decode("utf-8", "replace")
    data: dict[str, object] = {"job_id": job.id, "first_line": part.first_line, "next_line": part.next_line}
    return Outcome(Ending.FINISHED, data={**data, "terminal": not job.is_active, "text": text})


def _follow(job_id: str, since: tuple[str, int] | None, count: int) -> Outcome:
    """Print the output until the job ends, which bounds it, or a signal comes."""
    with Store.open() as store:
        client = JobClient(store, ["shotclock"])
        job, path = _find(client, job_id)
        StopListener.raise_at_once()
        seen = Log(path).state()
        part = _first_part(path, since, count)
        decode = codecs.getincrementaldecoder("utf-8")("replace").decode
        while True:
            if part.content and write_quietly(sys.stdout, decode(part.content)) is not None:
                break  # the reader left
            if not job.is_active and not part.content:
                break
            if not part.content:
                pause(LOOK_S)
            job = client.look(job.id) or job  # before the log, which is complete when the job has ended
            is_same = seen == (seen := Log(path).state())
            end = part.end
            part = LogPart(b"", end) if is_same else Log(path).read(end)
            if part.offset > end:  # it was dropped before it was read
                write_quietly(sys.stdout, f"[… {part.offset - end} bytes left out …]\n")
    return Outcome(Ending.FINISHED)


def _show(envelope: Envelope) -> None:
    if isinstance(envelope.data, dict) and envelope.ok:
        write_quietly(sys.stdout, str(envelope.data["text"]))
