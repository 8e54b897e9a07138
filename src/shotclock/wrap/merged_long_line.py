"""A long line of one of several servers: passed in pieces, unless it may be the answer to a request of ours."""

from __future__ import annotations

from typing import Protocol

from ..core.value_types import replace
from .lines import LinePart, id_in_tail, replace_id_in_tail
from .merged_server import MergedServer
from .messages import Message, key_of, read_line, read_long_line

# Of an answer to a request of ours.
MOST_LISTED = 4 * 1024 * 1024


class ServerMessages(Protocol):
    """The receiver of the messages of servers."""

    def pass_piece(self, server: MergedServer, part: LinePart, piece: bytes) -> None: ...

    def take_server_message(self, server: MergedServer, message: Message) -> None: ...

    def note_answered(self, server: MergedServer, message: Message) -> None: ...

    def open_question(self, server: MergedServer, message: Message) -> bytes: ...

    def new_question(self, server: MergedServer, id: object, token: object) -> str: ...

    def forget_long_line(self, server: MergedServer) -> None: ...


class LongLine:
    """The line, from its first piece on."""

    def __init__(self, merger: ServerMessages, server: MergedServer, head: bytes) -> None:
        self._merger = merger
        self._server = server
        self._gathered: bytearray | None = None
        message = self._message = read_long_line(head)
        if message is None:
            self._gathered = bytearray()
        elif message.is_answer and (server.is_own(message.id) or (message.key is None and server.has_own_open)):
            self._gathered = bytearray(head)
        elif message.is_request:
            self._pass(LinePart.START, merger.open_question(server, message))
        else:
            self._pass(LinePart.START, head)

    def _pass(self, part: LinePart, piece: bytes) -> None:
        self._merger.pass_piece(self._server, part, piece)

    def add(self, part: LinePart, piece: bytes) -> None:
        message, gathered = self._message, self._gathered
        is_too_long = gathered is not None and len(gathered) + len(piece) > MOST_LISTED
        if gathered is not None and is_too_long and message is not None and message.key is None:
            self._pass(LinePart.START, bytes(gathered))  # too long for a list, so it is an answer to the client
            gathered = self._gathered = None
        if gathered is not None:
            if message is not None and not is_too_long:
                gathered += piece
        elif part is LinePart.END and message is not None:
            self._pass_end(message, piece)
        else:
            self._pass(part, piece)
        if part is LinePart.END:
            self._finish(piece)

    def _pass_end(self, message: Message, piece: bytes) -> None:
        if message.method is not None and message.key is None and (id := id_in_tail(piece)) is not None:
            piece = replace_id_in_tail(piece, self._merger.new_question(self._server, id, None)) or piece
        self._pass(LinePart.END, piece)

    def _finish(self, piece: bytes) -> None:
        self._merger.forget_long_line(self._server)
        message = self._message
        if message is None:
            return
        if message.key is None:
            id = id_in_tail(piece)
            message = replace(message, id=id, key=key_of(id))
        if self._gathered is None:
            if message.is_answer:
                self._merger.note_answered(self._server, message)
            return
        whole = read_line(bytes(self._gathered))
        if whole is not None:
            self._merger.take_server_message(self._server, whole)
        elif self._server.is_own(message.id):
            self._server.take_own_answer(message)
