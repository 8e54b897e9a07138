"""What comes in on stdin, read to its end into a file, so that the work can be killed, repeated and identified."""

from __future__ import annotations

import contextlib
import hashlib
import os
import select
import tempfile
from collections.abc import Iterator

from ..core.durations import format_duration
from ..core.envelope import Problem
from ..enforce.clock import monotonic_ns
from ..jobs.invocation import Stdin

STDIN_LIMIT = 256 * 1024 * 1024
CHUNK = 64 * 1024
# Where the command itself has no timeout, somebody who never closes the pipe runs this out.
LONGEST_WAIT_MS = 3_600_000


@contextlib.contextmanager
def spooled_stdin(limit_ms: int | None) -> Iterator[Stdin | Problem]:
    """The file is gone afterwards. A problem says why there is none."""
    fd, path = tempfile.mkstemp(prefix="shotclock-stdin-")
    try:
        digest = hashlib.sha256()
        problem = _copy(fd, digest, limit_ms or LONGEST_WAIT_MS)
        yield Stdin(path, digest.hexdigest()) if problem is None else problem
    finally:
        os.close(fd)
        with contextlib.suppress(OSError):
            os.unlink(path)


def _copy(file: int, digest: hashlib._Hash, limit_ms: int) -> Problem | None:
    until_ns = monotonic_ns() + limit_ms * 1_000_000
    poller = select.poll()
    poller.register(0, select.POLLIN)
    size = 0
    while True:
        left_ms = (until_ns - monotonic_ns()) // 1_000_000
        if left_ms <= 0:
            message = f"stdin was not closed within {format_duration(limit_ms)}"
            return Problem("INPUT_REQUIRED", message, "validation", suggestion="close it, or give it /dev/null")
        if not poller.poll(min(left_ms, 60_000)):
            continue
        try:
            chunk = os.read(0, CHUNK)
        except OSError as error:  # it was closed before we began
            return None if error.errno == 9 else Problem("INPUT_REQUIRED", f"stdin: {error.strerror}", "validation")
        if not chunk:
            return None
        size += len(chunk)
        if size > STDIN_LIMIT:
            errors = [{"field": "stdin", "message": f"more than {STDIN_LIMIT} bytes"}]
            return Problem("ARG_ERROR", "stdin: more than is taken", "validation", errors=errors)
        digest.update(chunk)
        while chunk:
            chunk = chunk[os.write(file, chunk) :]
