"""Answers to HTTP requests, as events or as JSON.

Clients with sessions get events, as from the SDK's servers, unless a long answer comes first: they limit the size of an
event. Others get JSON if the answer comes first, because it has a status, and events otherwise.
"""

from __future__ import annotations

from collections.abc import Iterable
from io import BufferedIOBase
from typing import Protocol

from ..core.clocks import NS_PER_MS
from ..process.clock import monotonic_ns
from .http_headers import EVENT_TYPE, STATUS_OF_ERROR
from .http_sessions import HttpSession
from .http_streams import Event, StreamReader
from .payloads import Payload

# For an answer to come first. After that, events begin.
ANSWER_WITHIN_MS = 15_000
PING_MS = 15_000
LOOK_S = 1.0  # how often a connection looks whether its client has gone
RETRY_MS = 1_000

HeaderLines = Iterable[tuple[str, str]]


class AnsweringConnection(Protocol):
    """The part of a connection that answers need."""

    wfile: BufferedIOBase
    request_version: str
    close_connection: bool

    @property
    def is_client_gone(self) -> bool: ...

    def answer_json(self, payload: Payload, status: int, headers: HeaderLines = ()) -> None: ...

    def send_response(self, code: int) -> None: ...

    def send_header(self, keyword: str, value: str) -> None: ...

    def end_head(self) -> None: ...


class StreamAnswer:
    """The answer to one request, read from a stream. `takes_events`: whether the client accepts anything but JSON."""

    def __init__(
        self,
        connection: AnsweringConnection,
        reader: StreamReader,
        session: HttpSession | None,
        *,
        takes_events: bool = True,
        is_resumable: bool = False,
    ) -> None:
        self._connection = connection
        self._out = connection.wfile
        self._reader = reader
        self._session = session
        self._takes_events = takes_events
        self._is_resumable = is_resumable
        self._is_chunked = connection.request_version >= "HTTP/1.1"

    def wait(self) -> Event | None:
        """Return the answer if it comes first and in time. A client that takes no events waits for it."""
        give_up_ns = monotonic_ns() + ANSWER_WITHIN_MS * NS_PER_MS
        while True:
            left_s = (give_up_ns - monotonic_ns()) / 1e9
            events = self._reader.take(LOOK_S if not self._takes_events else max(0.0, min(LOOK_S, left_s)))
            if events:
                return events[0] if events[0].is_last else None
            if self._takes_events and monotonic_ns() >= give_up_ns:
                return None
            if self._reader.is_over or self._connection.is_client_gone:
                raise ConnectionError("the client has gone")

    def send(self, answer: Event | None) -> None:
        """Send the answer that came first, or everything that comes."""
        headers = () if self._session is None else (("Mcp-Session-Id", self._session.id),)
        if answer is not None and (self._session is None or not self._takes_events or answer.payload.is_long):
            status = 200
            if self._session is None and answer.error_code is not None:
                status = STATUS_OF_ERROR.get(answer.error_code, 200)
            self._connection.answer_json(answer.payload, status, headers)
            self._reader.note_sent(answer)
            return
        self._begin(headers)
        if answer is None:
            self._out.flush()
        self._send_events()
        if self._is_chunked:
            self._out.write(b"0\r\n\r\n")
        self._out.flush()

    def _send_events(self) -> None:
        pinged_ns = monotonic_ns()
        while not self._reader.is_over:
            events = self._reader.take(LOOK_S)
            for event in events:
                self._send_event(event)
            if events:
                if not events[-1].is_last:  # otherwise the end of the stream is sent with it
                    self._out.flush()
                self._reader.note_sent(events[-1])
            elif self._connection.is_client_gone:
                raise ConnectionError("the client has gone")
            elif monotonic_ns() - pinged_ns > PING_MS * NS_PER_MS:
                self._write(b": ping\r\n\r\n")
                self._out.flush()
            else:
                continue
            pinged_ns = monotonic_ns()

    def _begin(self, headers: HeaderLines) -> None:
        connection = self._connection
        connection.send_response(200)
        connection.send_header("Content-Type", EVENT_TYPE)
        connection.send_header("Cache-Control", "no-cache, no-transform")
        connection.send_header("X-Accel-Buffering", "no")
        for name, value in headers:
            connection.send_header(name, value)
        if self._is_chunked:
            connection.send_header("Transfer-Encoding", "chunked")
        else:
            connection.close_connection = True
        connection.end_head()
        if self._is_resumable:
            id = f"{self._reader.stream.number}-{self._reader.at}"
            self._write(f"id: {id}\r\nretry: {RETRY_MS}\r\ndata:\r\n\r\n".encode())

    def _send_event(self, event: Event) -> None:
        id = "" if self._session is None else f"id: {self._reader.stream.number}-{event.number}\r\n"
        self._write(f"event: message\r\n{id}data: ".encode())
        for piece in event.payload.pieces():
            self._write(piece)
        self._write(b"\r\n\r\n")

    def _write(self, data: bytes) -> None:
        if not data:
            return
        if self._is_chunked:
            self._out.write(b"%x\r\n" % len(data))
            self._out.write(data)
            self._out.write(b"\r\n")
        else:
            self._out.write(data)
