"""Requests to a server over HTTP, and the ways in which it answers: JSON, event streams, errors, or not at all."""

from __future__ import annotations

import http.client
import json
import os
import threading
from collections.abc import Callable

from ..core.clocks import NS_PER_MS
from ..process.clock import monotonic_ns
from .endpoint import Fate
from .event_stream import CollectedMessage, EventReader, MessageTooLarge
from .http_link import Exchange, HttpLink, HttpResponse, NoAnswer, explain_loss
from .lines import id_in_tail
from .messages import Message, encode, key_of, read_line, read_long_line
from .request_headers import ANNOTATION, SESSION, RequestHeaders

RETRY_MS = 1_000
LONGEST_RETRY_MS = 30_000
MOST_RESUMPTIONS = 5
EXCERPT = 200
LONGEST_ERROR = 64 * 1024
LONGEST_LEARNED = 1024 * 1024  # of a greeting, or of a list of tools

_EVENTS = "text/event-stream"
# The server did not begin with a request that it answers so.
_NOT_BEGUN = (400, 404, 405, 406, 411, 413, 415, 421, 429)
METHOD_NOT_FOUND = -32601


class RequestExchange(Exchange):
    """A request of the client that waits for its answer."""

    def __init__(
        self, message: Message, body: CollectedMessage, headers: dict[str, str | bytes], *, is_modern: bool
    ) -> None:
        super().__init__()
        self.id, self.key, self.method = message.id, message.key, message.method
        self.body, self.headers = body, headers
        self.is_call = message.method == "tools/call"
        self.is_modern = is_modern
        self.is_answered = self.is_cancelled = False


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

    def close(self, within_s: float) -> None:
        """Wait for the end of the current line, and write no other."""
        self._lock.acquire(timeout=within_s)

    def write_line(self, line: bytes) -> None:
        self.write(CollectedMessage(line.rstrip(b"\n")))


class HttpRequests:
    """The server, as requests of the client see it."""

    def __init__(
        self,
        link: HttpLink,
        headers: RequestHeaders,
        output: LineOutput,
        note: Callable[[str], None],
        lose_session: Callable[[RequestExchange | None], None],
    ) -> None:
        self.listening: Exchange | None = None
        self._endpoint = link.endpoint
        self._link = link
        self._headers = headers
        self._output = output
        self._note = note
        self._lose_session = lose_session

    def ask(self, exchange: RequestExchange) -> None:
        """Send a request and pass the messages of its answer on. Raises NoAnswer and MessageTooLarge."""
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

    def post(self, headers: dict[str, str | bytes], body: CollectedMessage, within_s: float) -> str:
        """Send a notification or an answer. Return why the server refused it, if it did. Raises NoAnswer."""
        response = self._link.send("POST", headers, body, Exchange(), within_s)
        if response.status < 400:
            response.finish()
            return ""
        text = _collect(response, LONGEST_ERROR)
        if SESSION in headers and _names_lost_session(response.status, _read_error(response, text)):
            self._lose_session(None)
        return self._status(response, text)

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
        """Return a status with the beginning of its text."""
        excerpt = self._excerpt(text)
        return f"HTTP {response.status} {response.reason}".rstrip() + (f" ({excerpt})" if excerpt else "")

    def _excerpt(self, text: CollectedMessage) -> str:
        """Return the beginning of a text in one line."""
        found = text.head[: 4 * EXCERPT].decode("utf-8", "replace")
        line = " ".join("".join(each if each.isprintable() else " " for each in found).split())
        return self._endpoint.without_secrets(line)[:EXCERPT]

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

    def listen(self) -> None:
        """Receive messages that belong to no request, as long as the session lasts. Not every server has them."""
        reader, failed, was_open = EventReader(), 0, False
        while True:
            exchange = self.listening = Exchange()
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
                        self._lose_session(None)
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
            self._note(f"dropped a text of the server that is no message: {self._excerpt(text)!r}")
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
