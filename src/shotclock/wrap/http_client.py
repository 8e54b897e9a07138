"""The adapter of a server over HTTP: messages as lines on stdin and stdout, streamable HTTP on the other side.

`shotclock wrap --url` starts this process in place of a server, so the limits, restarts and policy are the same. The
main thread reads stdin. Each request has a thread until it is answered; notifications and answers of the client are
sent in order by another one. A message is written to stdout once all of it has come: a slow one blocks no other.
docs/design.md: R76.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import queue
import select
import signal
import sys
import threading
from collections import deque

from ..core.clocks import NS_PER_MS
from ..process.clock import monotonic_ns
from .adapter_reports import AdapterReport, Fate
from .endpoint import Endpoint
from .event_stream import CollectedMessage, EventReader, MessageTooLarge
from .http_link import Exchange, HttpLink, HttpResponse, NoAnswer, explain_loss
from .lines import READ_SIZE, LinePart, LineSplitter, id_in_tail
from .messages import LONGEST_REPEATED, Key, Message, encode, key_of, read_line, read_long_line
from .request_headers import ANNOTATION, SESSION, RequestHeaders

STDIN, STDOUT, STDERR = 0, 1, 2
SESSION_LOST = 3  # our exit code

# Requests that wait for the server at the same time; further ones are refused.
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

RETRY_MS = 1_000
LONGEST_RETRY_MS = 30_000
MOST_RESUMPTIONS = 5
EXCERPT = 200
LONGEST_ERROR = 64 * 1024
LONGEST_LEARNED = 1024 * 1024  # of a greeting, or of a list of tools
LOOK_MS = 500
THREAD_STACK = 512 * 1024

_EVENTS = "text/event-stream"
# The server did not begin with a request that it answers so.
_NOT_BEGUN = (400, 404, 405, 406, 411, 413, 415, 421, 429)
METHOD_NOT_FOUND, PARSE_ERROR = -32601, -32700


class RequestExchange(Exchange):
    """A request of the client that waits for its answer."""

    def __init__(
        self, message: Message, body: CollectedMessage, headers: dict[str, str | bytes], *, is_modern: bool
    ) -> None:
        super().__init__()
        self.id, self.key, self.method = message.id, message.key, message.method
        self.body, self.headers = body, headers
        self.is_modern = is_modern
        self.is_answered = False


class Posting:
    """A notification or an answer of the client on its way."""

    def __init__(self, message: Message, body: CollectedMessage, headers: dict[str, str | bytes]) -> None:
        self.message, self.body, self.headers = message, body, headers
        self.after: Exchange | None = None  # a cancellation must not overtake its request
        self.done = threading.Event()


class LineOutput:
    """Our stdout. Several threads write whole lines."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._lock = threading.Lock()

    def write(self, message: CollectedMessage) -> None:
        with self._lock:
            for piece in message.pieces():
                while piece:
                    try:
                        piece = piece[os.write(self._fd, piece) :]
                    except OSError:  # the process that started us is gone
                        os._exit(0)

    def write_line(self, line: bytes) -> None:
        self.write(CollectedMessage(line.rstrip(b"\n")))


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
        self._listening: Exchange | None = None
        self._is_lost = False
        self._long: Message | None = None
        self._body = CollectedMessage()

    def run(self) -> None:
        """Pass messages until stdin ends."""
        _start(self._send_postings)
        splitter = LineSplitter()
        poller = select.poll()
        poller.register(STDIN, select.POLLIN)
        while True:
            if poller.poll(LOOK_MS if self._cancelled else None):
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
            is_full = len(self._open) - len(self._cancelled) >= MOST_OPEN
            if not is_full and exchange.key is not None:
                self._open[exchange.key] = exchange
        if is_full:
            why = f"has {MOST_OPEN} open requests of this client, which is the most that are sent at once"
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
            exchange.abort()
        else:
            self._post(message, body, exchange)
            self._cancelled.append((monotonic_ns() + CANCELLED_LIMIT_MS * NS_PER_MS, exchange))

    def _end_cancelled(self) -> None:
        now_ns = monotonic_ns()
        while self._cancelled and (
            len(self._cancelled) > MOST_CANCELLED
            or self._cancelled[0][0] <= now_ns
            or self._cancelled[0][1].ended.is_set()
        ):
            self._cancelled.popleft()[1].abort()

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
        response = self._link.send("POST", posting.headers, posting.body, Exchange(), ACCEPT_LIMIT_S)
        if response.status >= 400:
            text = _collect(response, LONGEST_ERROR)
            if SESSION in posting.headers and _names_lost_session(response.status, _read_error(response, text)):
                self._lose_session()
            else:
                self._note(
                    f"the server refused {posting.message.method or 'an answer'}: {self._status(response, text)}"
                )
            return
        response.finish()
        if posting.message.method == "notifications/initialized" and self._headers.session:
            _start(self._listen)

    # --- requests ------------------------------------------------------------------------------------------------

    def _run(self, exchange: RequestExchange) -> None:
        try:
            self._ask(exchange)
            if not exchange.is_answered:
                raise NoAnswer("CONNECTION_LOST", Fate.LOST, "ended its answer without a result")
        except NoAnswer as failure:
            self._report(exchange, failure)
        except MessageTooLarge as error:
            why = f"answered with a message that cannot be passed on: {error}"
            self._report(exchange, NoAnswer("RESULT_TOO_LARGE", Fate.FAILED, why))
        finally:
            with self._lock:
                if exchange.key is not None and self._open.get(exchange.key) is exchange:
                    del self._open[exchange.key]
            exchange.has_sent.set()
            exchange.ended.set()
            exchange.body.close()

    def _ask(self, exchange: RequestExchange) -> None:
        response = self._link.send("POST", exchange.headers, exchange.body, exchange)
        if exchange.method == "initialize" and response.status == 200:
            session = response.header(SESSION)
            self._headers.session = session if session.isascii() and session.isprintable() else ""
        if response.status >= 400:
            self._take_refusal(exchange, response)
        elif response.status == 200 and response.kind == _EVENTS:
            reader = EventReader()
            failure = self._read_events(response, reader, exchange)
            self._resume(exchange, reader, failure)
        elif response.status == 200 and response.kind == "application/json":
            self._deliver(_collect(response), exchange)
        else:
            text = _collect(response, LONGEST_ERROR)
            kind = f" as {response.kind}" if response.kind else ""
            why = f"gave no answer that can be read: {self._status(response, text)}{kind}"
            raise NoAnswer("HTTP_STATUS", Fate.FAILED, why)

    def _take_refusal(self, exchange: RequestExchange, response: HttpResponse) -> None:
        """Pass the error of a server on, or raise NoAnswer."""
        text = _collect(response, LONGEST_ERROR)
        status, answer = response.status, _read_error(response, text)
        if SESSION in exchange.headers and _names_lost_session(status, answer):
            exchange.is_answered = True
            self._lose_session(exchange)
        elif status in (401, 403):
            hint = "pass a token with --header 'Authorization: Bearer ${TOKEN}'; OAuth is not done here"
            code = "AUTH_REQUIRED" if status == 401 else "PERMISSION_DENIED"
            raise NoAnswer(code, Fate.REFUSED, f"denies access: {self._status(response, text)}; {hint}")
        elif answer is not None:
            self._answer_error(exchange, answer["error"])
        elif exchange.method == "server/discover" and status < 500:
            # An older server may know no such request. Clients greet after this error.
            error = {"code": METHOD_NOT_FOUND, "message": f"the server answered: {self._status(response, text)}"}
            self._answer_error(exchange, error)
        else:
            code = "RATE_LIMITED" if status == 429 else "HTTP_STATUS"
            fate = Fate.REFUSED if status in _NOT_BEGUN else Fate.FAILED
            raise NoAnswer(code, fate, f"answered with {self._status(response, text)}")

    def _answer_error(self, exchange: RequestExchange, error: object) -> None:
        """Write an error under the id of the request: servers that refuse early do not know it."""
        exchange.is_answered = True
        self._output.write_line(encode({"jsonrpc": "2.0", "id": exchange.id, "error": error}))

    def _status(self, response: HttpResponse, text: CollectedMessage) -> str:
        """Return a status with the beginning of its text, in one line."""
        found = text.head[: 4 * EXCERPT].decode("utf-8", "replace")
        excerpt = " ".join("".join(each if each.isprintable() else " " for each in found).split())
        excerpt = self._endpoint.without_secrets(excerpt)[:EXCERPT]
        return f"HTTP {response.status} {response.reason}".rstrip() + (f" ({excerpt})" if excerpt else "")

    # --- streams -------------------------------------------------------------------------------------------------

    def _read_events(
        self, response: HttpResponse, reader: EventReader, exchange: RequestExchange | None
    ) -> NoAnswer | None:
        """Pass the messages of a stream on until it ends or has the answer. Return how it was cut off."""
        failure = None
        try:
            while (exchange is None or not exchange.is_answered) and (chunk := response.read()):
                for event in reader.read(chunk):
                    if event.kind == "message" and event.data.size:  # an event without data only carries an id
                        self._deliver(event.data, exchange)
                        event.data.close()
        except (OSError, http.client.HTTPException) as error:
            failure = NoAnswer("CONNECTION_LOST", Fate.LOST, explain_loss(error))
        except MessageTooLarge:
            response.close()
            raise
        if failure is None:
            response.finish()
        else:
            response.close()
        return failure

    def _resume(self, exchange: RequestExchange, reader: EventReader, failure: NoAnswer | None) -> None:
        """Read the rest of an answer whose stream has ended early, where the server numbers its events."""
        failed = 0
        while not exchange.is_answered and not exchange.is_aborted:
            if not reader.last_id or exchange.is_modern or failed >= MOST_RESUMPTIONS:
                if failure is not None:
                    raise failure
                return
            if exchange.ended.wait(_retry_s(reader, failed)):
                return
            before, reader = reader, EventReader()
            reader.last_id, reader.retry_ms = before.last_id, before.retry_ms
            try:
                response = self._open_stream(exchange, reader.last_id)
                if response.status != 200 or response.kind != _EVENTS:
                    text = _collect(response, LONGEST_ERROR)
                    why = f"ended the stream of its answer and does not resume it: {self._status(response, text)}"
                    raise NoAnswer("CONNECTION_LOST", Fate.LOST, why)
                failure = self._read_events(response, reader, exchange)
                failed = 0 if reader.last_id != before.last_id else failed + 1
            except NoAnswer as again:
                if again.fate is not Fate.NOT_SENT:
                    raise
                failed += 1
                failure = NoAnswer("CONNECTION_LOST", Fate.LOST, f"ended the stream of its answer and {again.why}")

    def _open_stream(self, exchange: Exchange, last_id: str) -> HttpResponse:
        headers = {"Accept": _EVENTS, **self._headers.of_stream()}
        if last_id:
            headers["Last-Event-ID"] = last_id.encode()
        return self._link.send("GET", headers, None, exchange)

    def _listen(self) -> None:
        """Receive messages that belong to no request, as long as the session lasts. Not every server has them."""
        reader, failed, was_open = EventReader(), 0, False
        while True:
            exchange = self._listening = Exchange()
            before = reader.last_id
            try:
                response = self._open_stream(exchange, reader.last_id)
                if response.status == 200 and response.kind == _EVENTS:
                    was_open, started_ns = True, monotonic_ns()
                    self._read_events(response, reader, None)
                    has_lasted = monotonic_ns() - started_ns > LONGEST_RETRY_MS * NS_PER_MS
                    failed = 0 if has_lasted or reader.last_id != before else failed + 1
                else:
                    response.finish()
                    if not was_open:
                        return
                    if response.status == 404:
                        self._lose_session()
                    failed += 1
            except (NoAnswer, MessageTooLarge):
                failed += 1
            if exchange.ended.wait(_retry_s(reader, failed)):
                return
            later = EventReader()
            later.last_id, later.retry_ms = reader.last_id, reader.retry_ms
            reader = later

    def _deliver(self, text: CollectedMessage, exchange: RequestExchange | None) -> None:
        """Write a message of the server to stdout, and note whether it answers the request."""
        message = read_long_line(text.head) if text.is_long else read_line(text.head)
        if message is None or not text.head.lstrip().startswith(b"{"):
            shown = self._endpoint.without_secrets(text.head[:EXCERPT].decode("utf-8", "replace"))
            self._note(f"dropped a text of the server that is no message: {shown!r}")
            return
        if message.is_answer and exchange is not None:
            id = id_in_tail(text.tail) if message.key is None and text.is_long else message.id
            if id is None and message.is_error and not text.is_long:
                self._answer_error(exchange, json.loads(text.head)["error"])
                return
            if key_of(id) == exchange.key:
                self._learn(exchange, text)
                exchange.is_answered = True
        self._output.write(text)

    def _learn(self, exchange: RequestExchange, text: CollectedMessage) -> None:
        """Note the parts of an answer that later headers need."""
        is_list = exchange.method == "tools/list" and exchange.is_modern
        if text.size > LONGEST_LEARNED or not (is_list or exchange.method == "initialize"):
            return
        whole = b"".join(text.pieces())
        if not is_list or ANNOTATION.encode() in whole:
            message = read_line(whole)
            result = None if message is None else message.result
            (self._headers.note_tools if is_list else self._headers.note_greeting)(result)

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
            os._exit(SESSION_LOST)

    def close(self) -> None:
        """Close the streams and delete the session, within its limit."""
        for exchange in list(self._open.values()):
            exchange.abort()
        if self._listening is not None:
            self._listening.abort()
        if self._headers.session:
            deleting = _start(self._delete_session)
            deleting.join(DELETE_LIMIT_S)

    def _delete_session(self) -> None:
        with contextlib.suppress(NoAnswer):
            self._link.send("DELETE", self._headers.of_stream(), None, Exchange(), DELETE_LIMIT_S).close()

    def _note(self, text: str) -> None:
        with contextlib.suppress(OSError):
            os.write(STDERR, f"shotclock: {text}\n".encode("utf-8", "replace"))


def _start(work: object, *arguments: object) -> threading.Thread:
    thread = threading.Thread(target=work, args=arguments, daemon=True)  # type: ignore[arg-type]
    thread.start()
    return thread


def _retry_s(reader: EventReader, failed: int) -> float:
    """Return the pause before a stream is opened again: the server's, growing as long as it does not succeed."""
    first_ms = RETRY_MS if reader.retry_ms is None else reader.retry_ms
    return min(LONGEST_RETRY_MS, first_ms << min(failed, 10)) / 1000


def _collect(response: HttpResponse, most: int | None = None) -> CollectedMessage:
    """Return the body of a response. Raises NoAnswer if it is cut off."""
    try:
        text = response.collect(most)
    except (OSError, http.client.HTTPException) as error:
        response.close()
        raise NoAnswer("CONNECTION_LOST", Fate.LOST, explain_loss(error)) from None
    response.finish()
    return text


def _read_error(response: HttpResponse, text: CollectedMessage) -> dict[str, object] | None:
    """Return the JSON-RPC error in a body, if it has one."""
    message = read_line(text.head) if response.kind == "application/json" else None
    if message is None or not message.is_error:
        return None
    content = json.loads(text.head)
    return content if isinstance(content["error"], dict) else None


def _names_lost_session(status: int, answer: dict[str, object] | None) -> bool:
    """Return whether an answer to a request with a session id means that the server does not know the session."""
    error = answer["error"] if answer is not None else None
    if not isinstance(error, dict) or answer is None:
        return status == 404
    if status == 404:
        return error.get("code") != METHOD_NOT_FOUND
    # Servers made from an example of the TypeScript SDK answer so.
    return status == 400 and answer.get("id") is None and "session id" in str(error.get("message")).lower()


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C concerns the process that started us
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(0))
    threading.stack_size(THREAD_STACK)
    client = HttpClient(Endpoint.from_environment(os.environ))
    try:
        client.run()
    except SystemExit:
        pass
    client.close()
    os._exit(0)  # threads may wait for the server


if __name__ == "__main__":
    main()
