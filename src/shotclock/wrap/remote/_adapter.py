"""The adapter of a server over HTTP: messages as lines on stdin and stdout, streamable HTTP on the other side.

`shotclock wrap --url` starts this process in place of a server, so the limits, restarts and policy are the same. The
main thread reads stdin. Each request has a thread until it is answered; notifications and answers of the client are
sent in order by another one. A message is written to stdout once all of it has come: a slow one blocks no other.
The contracts are in wrap/AGENTS.md.
"""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import sys
import threading
from collections.abc import Callable

from ...core.value_types import value
from ...supervise.clock import monotonic_ns
from .._lines import READ_SIZE
from .._messages import LONGEST_REPEATED, Key, RpcMessage, encode, key_of
from ._connections import Exchange, HttpLink, NoAnswer, OutgoingRequest
from ._events import CollectedMessage, MessageTooLarge
from ._exchanges import HttpRequests, LineOutput, RequestExchange, note
from ._headers import ConversationHeaders, HeaderTexts
from .endpoint import AdapterReport, Endpoint, ResponseFate

STDOUT = 1
SESSION_LOST = 3  # our exit code

# Calls that wait for the server at the same time, and as many other requests: many calls must not fail a ping.
MOST_OPEN = 256
# Cancelled requests whose stream stays open for a late answer: closing it is no cancellation before 2026-07-28.
MOST_CANCELLED = 32
# Notifications and answers of the client, which a server accepts at once.
ACCEPT_LIMIT_S = 30.0
# Of them that wait for the server. At this limit no more is read from the client.
MOST_POSTINGS = 200
# The server has to know that the client is initialized before its next request.
INITIALIZED_LIMIT_S = 10.0
DELETE_LIMIT_S = 1.5
# Other requests may be refused for the same reason when a session is lost; each is worth a report.
LAST_REPORTS_S = 0.25
# A line that is being written when this process has to end. A client that does not read exhausts this.
LAST_LINE_S = 1.0
THREAD_STACK = 512 * 1024

PARSE_ERROR = -32700


@value
class Posting:
    """A notification or an answer of the client on its way."""

    what: str
    body: CollectedMessage
    headers: HeaderTexts
    after: Exchange | None = None  # a cancellation must not overtake its request


class HttpClient:
    """The client side of streamable HTTP, for both generations of the protocol."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._why_lost = f"at {endpoint.shown} does not know the session any more"
        self._link = HttpLink(endpoint)
        self._headers = ConversationHeaders()
        self._output = LineOutput(STDOUT)
        self._lock = threading.Lock()
        self._open: dict[Key | None, RequestExchange] = {}
        self._postings = queue.Queue[Posting](MOST_POSTINGS)
        self._requests = HttpRequests(self._link, self._headers, self._output, self._lose_session)
        self._is_lost = False

    def run(self) -> None:
        """Pass messages until stdin ends."""
        _start(self._send_postings)
        body = CollectedMessage()
        while piece := sys.stdin.buffer.readline(READ_SIZE):
            body.add(piece.rstrip(b"\r\n"))
            if piece.endswith(b"\n"):
                self._dispatch(body.parse(), body)
                body = CollectedMessage()

    # --- from the client -----------------------------------------------------------------------------------------

    def _dispatch(self, message: RpcMessage | None, body: CollectedMessage) -> None:
        if message is None:
            error = {"code": PARSE_ERROR, "message": "shotclock: the line is no message and was not sent"}
            self._output.write_line(encode({"jsonrpc": "2.0", "id": None, "error": error}))
        elif message.is_request:
            self._headers.record_request(message)
            headers = self._headers.of_message(message)
            self._begin(RequestExchange(message, body, headers, is_modern=self._headers.is_modern))
        elif message.method == "notifications/cancelled":
            self._cancel(message, body)
        elif message.method == "notifications/initialized":
            if self._send(self._posting(message, body), INITIALIZED_LIMIT_S) and self._headers.session:
                _start(self._requests.listen)
        else:
            self._postings.put(self._posting(message, body))

    def _begin(self, exchange: RequestExchange) -> None:
        with self._lock:
            is_lost = self._is_lost
            alike = (each for each in self._open.values() if each.is_call is exchange.is_call)
            is_full = sum(not each.is_cancelled for each in alike) >= MOST_OPEN
            if not is_lost and not is_full:
                self._open[exchange.key] = exchange
        if is_lost:
            self._report_lost(exchange)
        elif is_full:
            what = "calls" if exchange.is_call else "other requests"
            why = f"has {MOST_OPEN} open {what} of this client, which is the most that are sent at once"
            self._report(exchange, NoAnswer("SERVICE_UNAVAILABLE", ResponseFate.NOT_SENT, why))
        else:
            _start(self._run, exchange)

    def _cancel(self, message: RpcMessage, body: CollectedMessage) -> None:
        """Cancel a request: in 2026-07-28 by closing its stream, before by a notification."""
        exchange = self._open.get(key_of(message.params.get("requestId")))
        if not self._headers.is_modern:
            self._postings.put(self._posting(message, body, exchange))
        if exchange is None:
            return
        exchange.is_cancelled = True
        if exchange.is_modern:
            exchange.abort()
        with self._lock:
            cancelled = [each for each in self._open.values() if each.is_cancelled and not each.is_aborted]
        if len(cancelled) > MOST_CANCELLED:
            cancelled[0].abort()

    def _posting(self, message: RpcMessage, body: CollectedMessage, after: Exchange | None = None) -> Posting:
        return Posting(message.method or "an answer of the client", body, self._headers.of_message(message), after)

    def _send_postings(self) -> None:
        """Send notifications and answers in the order of the client."""
        while True:
            posting = self._postings.get()  # without a bound: this thread ends with the process
            if posting.after is not None:
                posting.after.has_sent.wait(ACCEPT_LIMIT_S)
            self._send(posting, ACCEPT_LIMIT_S)

    def _send(self, posting: Posting, within_s: float) -> bool:
        """Send a notification or an answer. Return whether the server accepted it."""
        try:
            refusal = self._requests.post(posting.headers, posting.body, within_s)
        except NoAnswer as failure:
            refusal = f"it {failure.fate}: the server {failure.why}"
        except MessageTooLarge as error:
            refusal = str(error)
        if refusal:
            note(f"the server did not accept {posting.what}: {refusal}")
        return not refusal

    # --- requests ------------------------------------------------------------------------------------------------

    def _run(self, exchange: RequestExchange) -> None:
        try:
            self._requests.ask(exchange)
        except NoAnswer as failure:
            self._report(exchange, failure)
        except MessageTooLarge as error:
            why = f"answered with a message that cannot be passed on: {error}"
            self._report(exchange, NoAnswer("RESULT_TOO_LARGE", ResponseFate.FAILED, why))
        except Exception as error:
            why = f"may have answered, but shotclock failed with {type(error).__name__}"
            self._report(exchange, NoAnswer("INTERNAL_ERROR", ResponseFate.LOST, why))
            raise
        finally:
            with self._lock:
                if self._open.get(exchange.key) is exchange:
                    del self._open[exchange.key]
            exchange.has_sent.set()
            exchange.ended.set()

    # --- failures and the end ------------------------------------------------------------------------------------

    def _report(self, exchange: RequestExchange, failure: NoAnswer, line: str = "") -> None:
        if not exchange.is_aborted:
            report = AdapterReport(exchange.id, failure.code, failure.fate, failure.why, line)
            self._output.write_line(report.to_line())

    def _report_lost(self, exchange: RequestExchange) -> None:
        """Report a request that the next session may send."""
        line = exchange.body.text.decode("utf-8", "replace") + "\n" if exchange.body.size < LONGEST_REPEATED else ""
        self._report(exchange, NoAnswer("CONNECTION_LOST", ResponseFate.NOT_SENT, self._why_lost), line)

    def _lose_session(self, exchange: RequestExchange | None = None) -> None:
        """End this process, so that it is started again and the client is greeted anew."""
        with self._lock:
            is_first, self._is_lost = not self._is_lost, True
            others = [each for each in self._open.values() if each is not exchange]
        if is_first:
            self._output.write_line(AdapterReport(None, "CONNECTION_LOST", ResponseFate.LOST, self._why_lost).to_line())
        if exchange is not None:
            self._report_lost(exchange)
        if is_first:
            give_up_ns = monotonic_ns() + int(LAST_REPORTS_S * 1e9)
            for other in others:
                other.ended.wait(max(0.0, (give_up_ns - monotonic_ns()) / 1e9))
            self._output.close(LAST_LINE_S)
            os._exit(SESSION_LOST)

    def close(self) -> None:
        """Close the streams and delete the session, within its limit."""
        for exchange in list(self._open.values()):
            exchange.abort()
        if self._requests.listening is not None:
            self._requests.listening.abort()
        if self._headers.session:
            _start(self._delete_session).join(DELETE_LIMIT_S)

    def _delete_session(self) -> None:
        with contextlib.suppress(NoAnswer):
            self._link.send(OutgoingRequest("DELETE", self._headers.of_stream()), Exchange(), DELETE_LIMIT_S).close()


def _start(work: Callable[..., None], *arguments: object) -> threading.Thread:
    thread = threading.Thread(target=work, args=arguments, daemon=True)
    thread.start()
    return thread


def _stop(number: int, frame: object) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sys.exit()


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C concerns the process that started us
    signal.signal(signal.SIGTERM, _stop)
    threading.stack_size(THREAD_STACK)
    client = HttpClient(Endpoint.from_environment(os.environ))
    with contextlib.suppress(SystemExit):
        client.run()
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # often it comes together with the end of stdin
    client.close()
    os._exit(0)  # threads may wait for the server


if __name__ == "__main__":
    main()
