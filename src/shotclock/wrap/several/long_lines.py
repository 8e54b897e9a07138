"""Long lines of the client and of several servers: passed in pieces, unless only their end tells where they belong."""

from __future__ import annotations

from typing import Protocol

from ...core.value_types import replace
from ..lines import LinePart, id_in_tail, replace_id_in_tail
from ..messages import RpcMessage, key_of, read_line, read_long_line
from .lists import MOST_LISTED
from .routes import Route
from .server import MergedServer

# Of a message of the client whose server is named only behind its large part.
MOST_GATHERED = 2 * 1024 * 1024


class MessageTaker(Protocol):
    """The merger, as long lines see it."""

    def find_route(self, message: RpcMessage) -> Route | None:
        """Return the route of a long message, as far as its head tells."""
        ...

    def take_client_message(self, message: RpcMessage | None) -> None: ...

    def note_sent(self, server: MergedServer, message: RpcMessage, *, is_sent: bool) -> None:
        """Note a long request that has ended, and whether the server has got it."""
        ...

    def refuse_long(self, id: object) -> None: ...

    def pass_piece(self, server: MergedServer, part: LinePart, piece: bytes) -> None: ...

    def take_server_message(self, server: MergedServer, message: RpcMessage) -> None: ...

    def note_answered(self, server: MergedServer, message: RpcMessage) -> bool: ...

    def open_question(self, server: MergedServer, message: RpcMessage) -> bytes:
        """Return the line of a request of a server, with an id and a progress token of ours."""
        ...

    def new_question(self, server: MergedServer, id: object, token: object) -> str: ...


def _with_id_of_tail(message: RpcMessage, tail: bytes) -> RpcMessage:
    if message.key is not None:
        return message
    id = id_in_tail(tail)
    return replace(message, id=id, key=key_of(id))


class ClientLongLine:
    """A line of the client, from its first piece on."""

    def __init__(self, merger: MessageTaker, head: bytes) -> None:
        self._merger = merger
        self._message = read_long_line(head)
        self._route = None if self._message is None else merger.find_route(self._message)
        self._gathered = bytearray(head if self._route is None else b"")
        self._is_sent = self._route is not None and self._route.server.is_ready
        if self._route is not None and self._is_sent:
            self._route.server.send_piece(LinePart.START, self._route.line)

    def lose(self, server: MergedServer) -> None:
        """Drop the rest of a line whose server has ended; the request is answered at its end."""
        if self._route is not None and self._route.server is server:
            self._is_sent = False

    def add(self, part: LinePart, piece: bytes) -> None:
        if self._route is not None and self._is_sent:
            self._route.server.send_piece(part, piece)
        elif self._route is None and len(self._gathered) <= MOST_GATHERED:
            self._gathered += piece
        if part is not LinePart.END:
            return
        message = None if self._message is None else _with_id_of_tail(self._message, piece)
        if self._route is None and len(self._gathered) <= MOST_GATHERED:
            self._merger.take_client_message(read_line(bytes(self._gathered)))
        elif self._route is None:
            self._merger.refuse_long(id_in_tail(piece) if message is None else message.id)
        elif message is not None and message.is_request:  # open from its end on: the server could not begin before
            self._merger.note_sent(self._route.server, message, is_sent=self._is_sent)


class ServerLongLine:
    """A line of a server, from its first piece on. The answer to a request of ours is gathered."""

    def __init__(self, merger: MessageTaker, server: MergedServer, head: bytes) -> None:
        self._merger = merger
        self._server = server
        self._gathered: bytearray | None = None
        message = self._message = read_long_line(head)
        if message is None:  # never written by a wrap
            self._gathered = bytearray()
        elif message.is_answer and (server.is_own(message.id) or (message.key is None and server.has_own_open)):
            self._gathered = bytearray(head)
        else:
            self._pass(LinePart.START, merger.open_question(server, message) if message.is_request else head)

    def _pass(self, part: LinePart, piece: bytes) -> None:
        self._merger.pass_piece(self._server, part, piece)

    def add(self, part: LinePart, piece: bytes) -> None:
        message = self._message
        if message is None:
            return
        if self._gathered is not None and len(self._gathered) + len(piece) <= MOST_LISTED:
            self._gathered += piece
        elif self._gathered is not None and message.key is None:
            self._pass(LinePart.START, bytes(self._gathered))  # too long for a list, so it is an answer to the client
            self._gathered = None
        if part is LinePart.END:
            self._end(_with_id_of_tail(message, piece), piece)
        elif self._gathered is None:
            self._pass(part, piece)

    def _end(self, message: RpcMessage, piece: bytes) -> None:
        if self._gathered is not None:
            whole = read_line(bytes(self._gathered))  # None if it was too long to be gathered
            self._merger.take_server_message(self._server, whole or message)
            return
        if message.is_request and self._message is not None and self._message.key is None:
            piece = replace_id_in_tail(piece, self._merger.new_question(self._server, message.id, None)) or piece
        self._pass(LinePart.END, piece)
        if message.is_answer and piece.rstrip().endswith(b"}"):  # not broken off: then the answer is still to come
            self._merger.note_answered(self._server, message)
