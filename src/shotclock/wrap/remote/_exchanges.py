"""Requests to a server over HTTP, and the ways in which it answers: JSON, event streams, errors, or not at all."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable

from ...core.limits import NS_PER_MS
from ...supervise.clock import monotonic_ns
from .._messages import JsonObject, Key, RpcMessage, encode, error_of, read_line, request_line
from ._connections import Exchange, HttpLink, HttpResponse, NoAnswer, OutgoingRequest
from ._events import CollectedMessage, EventReader, MessageTooLarge
from ._headers import EVENT_TYPE, JSON_TYPE, LAST_EVENT_ID, SESSION, ConversationHeaders, HeaderTexts
from .endpoint import ResponseFate

STDERR = 2

SHORTEST_RETRY_MS, LONGEST_RETRY_MS = 200, 30_000
MOST_RESUMPTIONS = 5
EXCERPT = 200
LONGEST_ERROR = 64 * 1024
# Of our own requests for lists of tools.
LIST_LIMIT_S = 30.0
MOST_PAGES = 50

# The server did not begin with a request that it answers so.
_NOT_BEGUN = (400, 404, 405, 406, 411, 413, 415, 421, 429)
METHOD_NOT_FOUND = -32601
HEADER_MISMATCH = -32020


class RequestExchange(Exchange):
    """A request that waits for its answer."""

    def __init__(self, message: RpcMessage, body: CollectedMessage, headers: HeaderTexts, *, is_modern: bool) -> None:
        super().__init__()
        self.id: object = message.id
        self.key: Key | None = message.key
        self.method: str | None = message.method
        self.body = body
        self.headers = headers
        self.is_call: bool = message.method == "tools/call"
        self.is_modern = is_modern
        self.is_own = self.is_answered = self.is_cancelled = False
        self.has_learned = False  # the list of tools was read for it
        self.result: object = None  # of a request of our own


class LineOutput:
    """Our stdout. Several threads write whole lines."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._lock = threading.Lock()

    def write_line(self, line: bytes) -> None:
        rest = memoryview(line)
        with self._lock:
            while rest:
                try:
                    rest = rest[os.write(self._fd, rest) :]
                except OSError:  # the process that started us is gone
                    os._exit(0)

    def close(self, within_s: float) -> None:
        """Wait for the end of the current line, and write no other."""
        self._lock.acquire(timeout=within_s)


class HttpRequests:
    def __init__(
        self,
        link: HttpLink,
        headers: ConversationHeaders,
        output: LineOutput,
        lose_session: Callable[[RequestExchange | None], None],
    ) -> None:
        self.listening: Exchange | None = None
        self._link = link
        self._headers = headers
        self._output = output
        self._lose_session = lose_session

    def ask(self, exchange: RequestExchange) -> None:
        """Send a request and pass the messages of its answer on. Raises NoAnswer and MessageTooLarge."""
        within_s = LIST_LIMIT_S if exchange.is_own else None
        response = self._link.send(OutgoingRequest("POST", exchange.headers, exchange.body), exchange, within_s)
        if exchange.method == "initialize" and response.status == 200:
            session = response.header(SESSION)
            self._headers.session = session if session.isascii() and session.isprintable() else ""
        if response.status >= 400:
            self._handle_refusal(exchange, response)
        elif response.status == 200 and response.kind == EVENT_TYPE:
            self._read_answer(exchange, response)
        elif response.status == 200 and response.kind == JSON_TYPE:
            self._deliver(response.collect(), exchange)
        else:
            kind = f" as {response.kind}" if response.kind else ""
            why = f"gave no answer that can be read: {self._describe(response, response.collect(LONGEST_ERROR))}{kind}"
            raise NoAnswer("HTTP_STATUS", ResponseFate.FAILED, why)
        if not exchange.is_answered:
            raise NoAnswer("CONNECTION_LOST", ResponseFate.LOST, "ended its answer without a result")

    def post(self, headers: HeaderTexts, body: CollectedMessage, within_s: float) -> str:
        """Send a notification or an answer. Return why the server refused it, if it did. Raises NoAnswer."""
        response = self._link.send(OutgoingRequest("POST", headers, body), Exchange(), within_s)
        if response.status < 400:
            response.finish()
            return ""
        text = response.collect(LONGEST_ERROR)
        if SESSION in headers and _names_lost_session(response.status, _read_refusal(response, text)):
            self._lose_session(None)
        return self._describe(response, text)

    def _handle_refusal(self, exchange: RequestExchange, response: HttpResponse) -> None:
        """Pass the error of a server on, or raise NoAnswer."""
        text = response.collect(LONGEST_ERROR)
        status, refusal = response.status, _read_refusal(response, text)
        shown = self._describe(response, text)
        if SESSION in exchange.headers and _names_lost_session(status, refusal):
            exchange.is_answered = True
            self._lose_session(exchange)
        elif status in (401, 403):
            hint = "pass a token with --header 'Authorization: Bearer ${TOKEN}'; OAuth is not done here"
            code = "AUTH_REQUIRED" if status == 401 else "PERMISSION_DENIED"
            raise NoAnswer(code, ResponseFate.REFUSED, f"denies access: {shown}; {hint}")
        elif refusal is not None:
            error = error_of(refusal)
            may_learn = exchange.is_call and not exchange.has_learned and error.get("code") == HEADER_MISMATCH
            if may_learn and self._learn_tools(exchange) and not exchange.is_aborted:
                self.ask(exchange)
            else:
                self._answer_error(exchange, error)
        elif exchange.method == "server/discover" and status < 500:
            # An older server may know no such request. Clients greet after this error.
            self._answer_error(exchange, {"code": METHOD_NOT_FOUND, "message": f"the server answered: {shown}"})
        else:
            code = "RATE_LIMITED" if status == 429 else "HTTP_STATUS"
            fate = ResponseFate.REFUSED if status in _NOT_BEGUN else ResponseFate.FAILED
            raise NoAnswer(code, fate, f"answered with {shown}")

    def _learn_tools(self, exchange: RequestExchange) -> bool:
        """Read which arguments of a refused call belong in headers. Return whether its headers have changed.

        This process may be younger than the client's list of tools.
        """
        exchange.has_learned = True
        call = exchange.body.parse()
        if call is None:
            return False
        cursor: object = None
        with contextlib.suppress(NoAnswer, MessageTooLarge):
            for _ in range(MOST_PAGES):
                params: JsonObject = {"_meta": call.meta} | ({} if cursor is None else {"cursor": cursor})
                line = request_line("shotclock-list", "tools/list", params)
                if (message := read_line(line)) is None:
                    break
                headers = self._headers.of_message(message)
                own = RequestExchange(message, CollectedMessage(line), headers, is_modern=True)
                own.is_own = True
                self.ask(own)
                cursor = own.result.get("nextCursor") if isinstance(own.result, dict) else None
                if cursor is None:
                    break
        before, exchange.headers = exchange.headers, self._headers.of_message(call)
        return exchange.headers != before

    def _answer_error(self, exchange: RequestExchange, error: JsonObject) -> None:
        """Write an error under the id of the request: servers that refuse early do not know it."""
        exchange.is_answered = True
        if not exchange.is_own:
            self._output.write_line(encode({"jsonrpc": "2.0", "id": exchange.id, "error": error}))

    def _describe(self, response: HttpResponse, text: CollectedMessage) -> str:
        """Return the status of a response and the beginning of its text, in one line."""
        excerpt = self._excerpt(text.text[: 4 * EXCERPT].decode("utf-8", "replace"))
        return self._excerpt(response.title) + (f" ({excerpt})" if excerpt else "")

    def _excerpt(self, text: str) -> str:
        line = " ".join("".join(each if each.isprintable() else " " for each in text).split())
        return self._link.endpoint.without_secrets(line)[:EXCERPT]

    # --- streams -------------------------------------------------------------------------------------------------

    def _read_answer(self, exchange: RequestExchange, response: HttpResponse) -> None:
        """Read the stream of an answer and, where the server numbers its events, the streams that continue it."""
        reader, failed = EventReader(), 0
        stream: HttpResponse | None = response
        while not exchange.ended.is_set():
            before, why = reader.last_id, "ended its answer without a result"
            try:
                stream = stream or self._open_stream(exchange, reader.last_id)
                if stream.kind == EVENT_TYPE:
                    self._read_events(stream, reader, exchange)
                else:
                    failed = MOST_RESUMPTIONS
                    shown = self._describe(stream, stream.collect(LONGEST_ERROR))
                    why = f"ended the stream of its answer and does not resume it: {shown}"
            except NoAnswer as failure:
                why = failure.why
            stream = None
            failed = 0 if reader.last_id != before else failed + 1
            if exchange.is_answered:
                return
            is_wanted = not exchange.is_cancelled and not exchange.is_modern
            if not reader.last_id or not is_wanted or failed > MOST_RESUMPTIONS:
                raise NoAnswer("CONNECTION_LOST", ResponseFate.LOST, why)
            exchange.ended.wait(_retry_s(reader, failed))

    def listen(self) -> None:
        """Receive messages that belong to no request, as long as the session lasts. Not every server has them."""
        reader, failed, was_open = EventReader(), 0, False
        while True:
            exchange = self.listening = Exchange()
            before, opened_ns = reader.last_id, monotonic_ns()
            with contextlib.suppress(NoAnswer, MessageTooLarge):
                response = self._open_stream(exchange, reader.last_id)
                if response.status == 200 and response.kind == EVENT_TYPE:
                    was_open = True
                    self._read_events(response, reader, None)
                else:
                    response.finish()
                    if not was_open:
                        return
                    if response.status == 404:
                        self._lose_session(None)
            has_lasted = monotonic_ns() - opened_ns > LONGEST_RETRY_MS * NS_PER_MS
            failed = 0 if has_lasted or reader.last_id != before else failed + 1
            if exchange.ended.wait(_retry_s(reader, failed)):
                return

    def _open_stream(self, exchange: Exchange, last_id: str) -> HttpResponse:
        headers = self._headers.of_stream() | ({LAST_EVENT_ID: last_id} if last_id else {})
        return self._link.send(OutgoingRequest("GET", headers), exchange)

    def _read_events(self, response: HttpResponse, reader: EventReader, exchange: RequestExchange | None) -> None:
        """Pass the messages of a stream on until it ends or has the answer. Raises NoAnswer and MessageTooLarge."""
        reader.restart()
        try:
            while (exchange is None or not exchange.is_answered) and (chunk := response.read()):
                for text in reader.read(chunk):
                    self._deliver(text, exchange)
        except MessageTooLarge:
            response.close()
            raise
        response.finish()

    def _deliver(self, text: CollectedMessage, exchange: RequestExchange | None) -> None:
        """Write a message of the server to stdout, and note whether it answers the request."""
        message = text.parse()
        if message is None:
            excerpt = self._excerpt(text.text[: 4 * EXCERPT].decode("utf-8", "replace"))
            note(f"dropped a text of the server that is no message: {excerpt!r}")
            return
        if exchange is not None and message.is_answer:
            if message.is_error and message.id is None:
                self._answer_error(exchange, error_of(message))
                return
            if message.key == exchange.key:
                self._learn(exchange, message, text)
                exchange.is_answered = True
        if exchange is None or not exchange.is_own:
            self._output.write_line(text.text + b"\n")

    def _learn(self, exchange: RequestExchange, message: RpcMessage, text: CollectedMessage) -> None:
        """Note the parts of an answer that later requests need."""
        if exchange.method == "initialize":
            self._headers.record_greeting(message.result)
        elif exchange.method == "tools/list" and exchange.is_modern:
            self._headers.declared.learn(text.text)
        if exchange.is_own:
            exchange.result = message.result


def note(text: str) -> None:
    with contextlib.suppress(OSError):
        os.write(STDERR, f"shotclock: {text}\n".encode("utf-8", "replace"))


def _retry_s(reader: EventReader, failed: int) -> float:
    """Return the pause before a stream is opened again: the server's, growing as long as it does not succeed."""
    return min(LONGEST_RETRY_MS, max(SHORTEST_RETRY_MS, reader.retry_ms) << min(failed, 10)) / 1000


def _read_refusal(response: HttpResponse, text: CollectedMessage) -> RpcMessage | None:
    """Return the JSON-RPC error in a body, if it has one."""
    message = text.parse() if response.kind == JSON_TYPE else None
    return message if message is not None and error_of(message) else None


def _names_lost_session(status: int, refusal: RpcMessage | None) -> bool:
    """Return whether an answer to a request with a session id means that the server does not know the session."""
    error = {} if refusal is None else error_of(refusal)
    if status == 404:
        return error.get("code") != METHOD_NOT_FOUND
    # Servers made from an example of the TypeScript SDK answer so.
    is_example = status == 400 and refusal is not None and refusal.id is None
    return is_example and "session id" in str(error.get("message")).lower()
