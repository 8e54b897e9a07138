"""The adapter of a server over HTTP: messages as lines on stdin and stdout, streamable HTTP on the other side.

`shotclock wrap --url` starts this process in place of a server, so the limits, restarts and policy are the same. The
main thread reads stdin. Each request has a thread until it is answered; notifications and answers of the client are
sent in order by another one. A message is written to stdout once all of it has come: a slow one blocks no other.
docs/design.md: R75.
"""

from __future__ import annotations

import contextlib
import http.client
import os
import queue
import select
import signal
import threading
from collections import deque
from collections.abc import Callable

from ..core.clocks import NS_PER_MS
from ..process.clock import monotonic_ns
from .endpoint import AdapterReport, Endpoint, Fate
from .event_stream import CollectedMessage, MessageTooLarge
from .http_link import Exchange, HttpLink, NoAnswer
from .http_requests import HttpRequests, LineOutput, RequestExchange
from .lines import READ_SIZE, LinePart, LineSplitter, id_in_tail
from .messages import LONGEST_REPEATED, Key, Message, encode, key_of, read_line, read_long_line
from .request_headers import RequestHeaders

STDIN, STDOUT, STDERR = 0, 1, 2
SESSION_LOST = 3  # our exit code

# Calls that wait for the server at the same time, and as many other requests: many calls must not fail a ping.
MOST_OPEN = 256
# Cancelled requests whose stream stays open for a late answer, and how long: closing it is no cancellation before
# the revision 2026-07-28.
MOST_CANCELLED = 64
CANCELLED_LIMIT_MS = 5_000
# Notifications and answers of the client, which a server accepts at once.
ACCEPT_LIMIT_S = 30.0
# The server has to know that the client is initialized before its next request.
INITIALIZED_LIMIT_S = 10.0
DELETE_LIMIT_S = 1.5
# Other requests may be refused for the same reason when a session is lost; each is worth a report.
LAST_REPORTS_S = 0.25
# A line that is being written when this process has to end. A client that does not read exhausts this.
LAST_LINE_S = 1.0
LOOK_MS = 500
THREAD_STACK = 512 * 1024

PARSE_ERROR = -32700


class Posting:
    """A notification or an answer of the client on its way."""

    def __init__(self, message: Message, body: CollectedMessage, headers: dict[str, str | bytes]) -> None:
        self.message, self.body, self.headers = message, body, headers
        self.after: Exchange | None = None  # a cancellation must not overtake its request
        self.done = threading.Event()


class HttpClient:
    """The client side of streamable HTTP, for both generations of the protocol."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint
        self._link = HttpLink(endpoint)
        self._headers = RequestHeaders()
        self._output = LineOutput(STDOUT)
        self._lock = threading.Lock()
        self._open: dict[Key, RequestExchange] = {}
        self._cancelled: deque[tuple[int, RequestExchange]] = deque()
        self._postings: queue.SimpleQueue[Posting] = queue.SimpleQueue()
        self._requests = HttpRequests(self._link, self._headers, self._output, self._note, self._lose_session)
        self._is_lost = False
        self._long: Message | None = None
        self._body = CollectedMessage()

    def run(self, stop_fd: int) -> None:
        """Pass messages until stdin ends or there is anything to read on the other descriptor."""
        _start(self._send_postings)
        splitter = LineSplitter()
        poller = select.poll()
        poller.register(STDIN, select.POLLIN)
        poller.register(stop_fd, select.POLLIN)
        while True:
            ready = [fd for fd, _ in poller.poll(LOOK_MS if self._cancelled else None)]
            if stop_fd in ready:
                return
            if ready:
                chunk = os.read(STDIN, READ_SIZE)
                if not chunk:
                    return
                for part, piece in splitter.split(chunk):
                    self._take(part, piece)
            self._end_cancelled()

    # --- from the client -----------------------------------------------------------------------------------------

    def _take(self, part: LinePart, piece: bytes) -> None:
        if part is LinePart.WHOLE:
            self._dispatch(read_line(piece), CollectedMessage(piece.rstrip(b"\r\n")))
            return
        if part is LinePart.START:
            self._long, self._body = read_long_line(piece), CollectedMessage()
        self._body.add(piece.rstrip(b"\r\n") if part is LinePart.END else piece)
        if part is LinePart.END:
            message = self._long
            if message is not None and message.key is None:
                message.id = id_in_tail(piece)
                message.key = key_of(message.id)
            self._dispatch(message, self._body)

    def _dispatch(self, message: Message | None, body: CollectedMessage) -> None:
        if message is None:
            error = {"code": PARSE_ERROR, "message": "shotclock: the line is no message and was not sent"}
            self._output.write_line(encode({"jsonrpc": "2.0", "id": None, "error": error}))
        elif message.is_request:
            self._headers.note_request(message)
            headers = self._headers.of_message(message)
            self._begin(RequestExchange(message, body, headers, is_modern=self._headers.is_modern))
        elif message.method == "notifications/cancelled":
            self._cancel(message, body)
        else:
            posting = self._post(message, body)
            if message.method == "notifications/initialized":
                posting.done.wait(INITIALIZED_LIMIT_S)

    def _begin(self, exchange: RequestExchange) -> None:
        if self._is_lost:
            self._report_lost(exchange)
            return
        with self._lock:
            alike = (each for each in self._open.values() if each.is_call is exchange.is_call)
            is_full = sum(not each.is_cancelled for each in alike) >= MOST_OPEN
            if not is_full and exchange.key is not None:
                self._open[exchange.key] = exchange
        if is_full:
            what = "calls" if exchange.is_call else "other requests"
            why = f"has {MOST_OPEN} open {what} of this client, which is the most that are sent at once"
            self._report(exchange, NoAnswer("SERVICE_UNAVAILABLE", Fate.NOT_SENT, why))
        else:
            _start(self._run, exchange)

    def _post(self, message: Message, body: CollectedMessage, after: Exchange | None = None) -> Posting:
        posting = Posting(message, body, self._headers.of_message(message))
        posting.after = after
        self._postings.put(posting)
        return posting

    def _cancel(self, message: Message, body: CollectedMessage) -> None:
        """Cancel a request: in 2026-07-28 by closing its stream, before by a notification."""
        key = key_of(message.params.get("requestId"))
        exchange = None if key is None else self._open.get(key)
        if exchange is None:
            if not self._headers.is_modern:
                self._post(message, body)
        elif exchange.is_modern:
            self._give_up(exchange)
        else:
            exchange.is_cancelled = True
            self._post(message, body, exchange)
            self._cancelled.append((monotonic_ns() + CANCELLED_LIMIT_MS * NS_PER_MS, exchange))

    def _end_cancelled(self) -> None:
        now_ns = monotonic_ns()
        while self._cancelled and (
            len(self._cancelled) > MOST_CANCELLED
            or self._cancelled[0][0] <= now_ns
            or self._cancelled[0][1].ended.is_set()
        ):
            self._give_up(self._cancelled.popleft()[1])

    def _give_up(self, exchange: RequestExchange) -> None:
        self._forget(exchange)
        exchange.abort()

    def _forget(self, exchange: RequestExchange) -> None:
        with self._lock:
            if exchange.key is not None and self._open.get(exchange.key) is exchange:
                del self._open[exchange.key]

    def _send_postings(self) -> None:
        """Send notifications and answers in the order of the client."""
        while True:
            posting = self._postings.get()
            try:
                if posting.after is not None:
                    posting.after.has_sent.wait(ACCEPT_LIMIT_S)
                self._send_posting(posting)
            except (NoAnswer, OSError, http.client.HTTPException, MessageTooLarge) as error:
                what = posting.message.method or "an answer of the client"
                why = f"{error.fate}: the server {error.why}" if isinstance(error, NoAnswer) else f"was lost: {error}"
                self._note(f"{what} {why}")
            finally:
                posting.done.set()
                posting.body.close()

    def _send_posting(self, posting: Posting) -> None:
        refusal = self._requests.post(posting.headers, posting.body, ACCEPT_LIMIT_S)
        if refusal:
            self._note(f"the server refused {posting.message.method or 'an answer of the client'}: {refusal}")
        elif posting.message.method == "notifications/initialized" and self._headers.session:
            _start(self._requests.listen)

    # --- requests ------------------------------------------------------------------------------------------------

    def _run(self, exchange: RequestExchange) -> None:
        try:
            self._requests.ask(exchange)
            if not exchange.is_answered:
                raise NoAnswer("CONNECTION_LOST", Fate.LOST, "ended its answer without a result")
        except NoAnswer as failure:
            self._report(exchange, failure)
        except MessageTooLarge as error:
            why = f"answered with a message that cannot be passed on: {error}"
            self._report(exchange, NoAnswer("RESULT_TOO_LARGE", Fate.FAILED, why))
        except Exception as error:
            why = f"may have answered, but shotclock failed with {type(error).__name__}"
            self._report(exchange, NoAnswer("INTERNAL_ERROR", Fate.LOST, why))
            raise
        finally:
            self._forget(exchange)
            exchange.has_sent.set()
            exchange.ended.set()
            exchange.body.close()

    # --- failures and the end ------------------------------------------------------------------------------------

    def _report(self, exchange: RequestExchange, failure: NoAnswer, line: str = "") -> None:
        if not exchange.is_aborted:
            report = AdapterReport(exchange.id, failure.code, failure.fate, failure.why, line)
            self._output.write_line(report.to_line())

    def _report_lost(self, exchange: RequestExchange) -> None:
        """Report a request that the next session may send."""
        body = exchange.body
        line = body.head.decode("utf-8", "replace") + "\n" if body.size < LONGEST_REPEATED else ""
        self._report(exchange, NoAnswer("CONNECTION_LOST", Fate.NOT_SENT, self._why_lost()), line)

    def _why_lost(self) -> str:
        return f"at {self._endpoint.shown} does not know the session any more"

    def _lose_session(self, exchange: RequestExchange | None = None) -> None:
        """End this process, so that it is started again and the client is greeted anew."""
        with self._lock:
            is_first, self._is_lost = not self._is_lost, True
        if is_first:
            self._output.write_line(AdapterReport(None, "CONNECTION_LOST", Fate.LOST, self._why_lost()).to_line())
        if exchange is not None:
            self._report_lost(exchange)
        if is_first:
            give_up_ns = monotonic_ns() + int(LAST_REPORTS_S * 1000) * NS_PER_MS
            for other in list(self._open.values()):
                if other is not exchange:
                    other.ended.wait(max(0.0, (give_up_ns - monotonic_ns()) / NS_PER_MS / 1000))
            self._output.close(LAST_LINE_S)
            os._exit(SESSION_LOST)

    def close(self) -> None:
        """Close the streams and delete the session, within its limit."""
        for exchange in list(self._open.values()):
            exchange.abort()
        if self._requests.listening is not None:
            self._requests.listening.abort()
        if self._headers.session:
            deleting = _start(self._delete_session)
            deleting.join(DELETE_LIMIT_S)

    def _delete_session(self) -> None:
        with contextlib.suppress(NoAnswer):
            self._link.send("DELETE", self._headers.of_stream(), None, Exchange(), DELETE_LIMIT_S).close()

    def _note(self, text: str) -> None:
        with contextlib.suppress(OSError):
            os.write(STDERR, f"shotclock: {text}\n".encode("utf-8", "replace"))


def _start(work: Callable[..., None], *arguments: object) -> threading.Thread:
    thread = threading.Thread(target=work, args=arguments, daemon=True)
    thread.start()
    return thread


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C concerns the process that started us
    stop_fd, stopping_fd = os.pipe()
    signal.signal(signal.SIGTERM, lambda number, frame: os.write(stopping_fd, b"!"))
    threading.stack_size(THREAD_STACK)
    client = HttpClient(Endpoint.from_environment(os.environ))
    client.run(stop_fd)
    client.close()
    os._exit(0)  # threads may wait for the server


if __name__ == "__main__":
    main()
