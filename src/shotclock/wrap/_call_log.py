"""The log of calls: written to the store in batches, by a thread that lives only while there are calls to write.

The loop of the front never waits for the store. What the store does not accept in time is kept in files beside it, and
added by the next process that records or lists calls. A call that lasts is written at once as an open one, and replaced
as soon as it has ended.
"""

from __future__ import annotations

import os
import re
from collections import deque
from collections.abc import Sequence

from ..core.errors import Failure
from ..core.limits import WallTime
from ..core.value_types import record
from ..supervise.clock import monotonic_ns, wall_ns, wall_time
from ..supervise.kernel import is_alive, this_process
from ._batch_thread import BatchThread, importing
from ._requests import EndedRequest, OpenRequest

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ..store.wrapped_calls import LoggedCall, OpenCall

# So many waiting calls are written at once, without waiting for more; to a file, if others keep the store locked.
LARGE_BATCH = 2_000
# A burst that is faster than the disk exhausts this.
MOST_WAITING = 4_000
# The last calls, at the end of the process; after the first limit they are written to a file.
CLOSE_LIMIT_S = 1.0
LAST_ATTEMPT_S = 0.5
LONGEST_NAME = 200

_STARTERS = re.compile(r"npx|bunx?|pnpm|yarn|dlx|exec|run|tool|uvx?|pipx|python[\d.]*|node|deno|docker|sh|bash|env")
_ENDINGS = re.compile(r"\.(py|m?js|c?ts|sh)$|(?<=.)@[^@]*$")


def server_name(argv: Sequence[str]) -> str:
    """Return a name for a server: the first word of its command that is no option and no starter, such as npx."""
    words = [os.path.basename(word.rstrip("/")) for word in argv if not word.startswith("-")]
    named = [word for word in words if word and _STARTERS.fullmatch(word) is None]
    return _ENDINGS.sub("", (named or words or ["server"])[0])[:LONGEST_NAME]


@record
class Batch:
    ended: list[tuple[WallTime, EndedRequest]]
    opened: dict[int, OpenRequest]
    closed: set[int]


class CallLog:
    def __init__(self, server: str) -> None:
        self._server = server[:LONGEST_NAME]
        self._thread = BatchThread("call-log", self._write, self._has_more)
        self._waiting: deque[tuple[WallTime, EndedRequest]] = deque()
        self._opened: dict[int, OpenRequest] = {}
        self._closed: set[int] = set()  # open calls that have ended and are not in `_waiting`
        self._tried: set[int] = set()  # those of the last batch; a failed one is tried again with the next
        self._dropped = 0
        self._problem = ""

    def add(self, ended: EndedRequest) -> None:
        """Record a call that has ended now. Never waits for the store."""
        if ended.method != "tools/call":
            return
        with self._thread.lock:
            self._opened.pop(ended.number, None)
            if len(self._waiting) >= MOST_WAITING:
                self._dropped += 1
                self._closed |= {ended.number} - {0}
                return
            self._waiting.append((wall_time(), ended))
            # A call that is recorded as open must not seem to be open.
            self._thread.ensure_started(is_urgent=len(self._waiting) == LARGE_BATCH or ended.number != 0)

    def record_open(self, requests: list[OpenRequest]) -> None:
        """Record calls that are open, or that have changed since they were recorded. Never waits for the store."""
        with self._thread.lock:
            self._opened |= {request.number: request for request in requests}
            self._thread.ensure_started(is_urgent=True)

    def close(self) -> str:
        """Write the last calls, and return a note about those that were not recorded."""
        self._thread.begin_closing()
        self._thread.join(CLOSE_LIMIT_S) or self._thread.join(LAST_ATTEMPT_S)
        lost = self._dropped + len(self._waiting)
        problem = self._problem or self._thread.problem
        why = f": {problem}" if problem else ""
        return f"{lost} calls were not logged{why}" if lost else ""

    def _write(self) -> bool:
        with self._thread.lock:
            batch = Batch(list(self._waiting), dict(self._opened), set(self._closed))
        is_done_with = self._try_to_write(batch)
        with self._thread.lock:
            self._tried = batch.closed
            if is_done_with:
                for _ in batch.ended:
                    self._waiting.popleft()
                for number, request in batch.opened.items():
                    if self._opened.get(number) is request:
                        del self._opened[number]
        return is_done_with

    def _has_more(self) -> bool:
        return bool(self._waiting or self._opened or self._closed - self._tried)

    def _try_to_write(self, batch: Batch) -> bool:
        """Write calls to the store. Return whether they are done with: written, or dropped because it is unusable."""
        try:
            with importing:  # here: SQLite takes time and memory that a server without calls does not need
                from ..store.call_spool import CallBatch, record_calls
            calls = tuple(self._ended_call(at, ended) for at, ended in batch.ended)
            opened = tuple(self._open_call(request) for request in batch.opened.values())
            numbers = {ended.number for _, ended in batch.ended if ended.number} | batch.closed
            written = CallBatch(this_process(), calls, opened, tuple(numbers))
            is_last = self._thread.gives_up or len(calls) >= LARGE_BATCH
            if not record_calls(written, os.environ, wall_time(), is_alive, is_last=is_last):
                return False
            with self._thread.lock:
                self._closed -= batch.closed
            return True
        except Failure as failure:
            self._problem = str(failure)
        except Exception as error:  # a bug of ours must not end the log
            self._problem = f"{type(error).__name__}: {error}"
        with self._thread.lock:
            self._dropped += len(batch.ended)
            self._closed |= {ended.number for _, ended in batch.ended} - {0}
        return True

    def _ended_call(self, at: WallTime, ended: EndedRequest) -> LoggedCall:
        from ..store.wrapped_calls import LoggedCall  # as above

        return LoggedCall(
            server=self._server,
            tool=ended.tool[:LONGEST_NAME],
            started_at=WallTime(max(0, at.ms - ended.elapsed_ms)),
            duration_ms=ended.elapsed_ms,
            outcome=ended.outcome,
            call_id=ended.id or None,
            timeout_ms=ended.limits.timeout_ms,
            idle_ms=ended.limits.idle_ms,
            request_bytes=ended.request_bytes,
            answer_bytes=ended.answer_bytes,
            arguments_sha256=ended.digest,
            generation=ended.generation,
            pid=os.getpid(),
        )

    def _open_call(self, request: OpenRequest) -> OpenCall:
        from ..store.wrapped_calls import OpenCall  # as above

        behind_ns = wall_ns() - monotonic_ns()
        return OpenCall(
            holder=this_process(),
            number=request.number,
            server=self._server,
            tool=request.tool[:LONGEST_NAME],
            started_at=WallTime.of_ns(max(0, request.arrived_ns + behind_ns)),
            is_sent=request.is_sent,
            timeout_ms=request.limits.timeout_ms,
            idle_ms=request.limits.idle_ms,
            due_at=None if request.due_ns is None else WallTime.of_ns(max(0, request.due_ns + behind_ns)),
            due_by=request.due_by,
            request_bytes=request.request_bytes,
            arguments_sha256=request.digest,
            generation=request.generation,
        )
