"""Requests of a server to its client, such as sampling, over all processes of the server.

A restarted server counts its ids from the start again, and a late answer of the client would be taken for the answer
to another request. So the ids of every process but the first are replaced by fresh ones.
"""

from __future__ import annotations

from ._guard import RequestGuard
from ._links import ClientSide, ServerLink
from ._messages import Key, RpcMessage, cancellation_line, key_of, notification_line
from ._replay import ReplayMemory


class ServerQuestions:
    """The open requests of the server: ids as the client sees them, with those of the server."""

    def __init__(self, client: ClientSide, guard: RequestGuard, memory: ReplayMemory, server: ServerLink) -> None:
        self._client, self._guard, self._memory, self._server = client, guard, memory, server
        self._open: dict[Key, str | int] = {}

    def __bool__(self) -> bool:
        return bool(self._open)

    @property
    def has_fresh_ids(self) -> bool:
        return self._server.generation > 1

    def open(self, server_id: object) -> str | None:
        """Note a request of the server. Return its new id; None in the first life, whose ids are unchanged."""
        if not isinstance(server_id, str | int):
            return None
        self._guard.set_server_asking(True)
        if not self.has_fresh_ids:
            self._open[type(server_id).__name__, server_id] = server_id
            return None
        fresh = self._memory.own_id(f"life{self._server.generation}")
        self._open["str", fresh] = server_id
        return fresh

    def close(self, key: Key | None) -> str | int | None:
        """Return the server's own id of a request that is answered or cancelled; None if it is unknown."""
        server_id = None if key is None else self._open.pop(key, None)
        self._guard.set_server_asking(bool(self._open))
        return server_id

    def handle_answer(self, message: RpcMessage) -> None:
        """Pass an answer of the client. One to a process that is gone is dropped."""
        server_id = self.close(message.key)
        if server_id is None and self.has_fresh_ids:
            return
        is_renamed = server_id is not None and key_of(server_id) != message.key
        self._server.send(message.with_id(server_id) if is_renamed and server_id is not None else message.line)

    def handle_cancellation(self, message: RpcMessage) -> None:
        """Pass `notifications/cancelled` of the server, with the id that the client knows."""
        cancelled = key_of(message.params.get("requestId"))
        found = next((key for key, own in self._open.items() if key_of(own) == cancelled), None)
        if found is None and self.has_fresh_ids:
            return
        self.close(found)
        line = message.line
        if found is not None and found != cancelled:
            line = notification_line("notifications/cancelled", {**message.params, "requestId": found[1]})
        self._client.write_line(line)

    def cancel_all(self) -> None:
        """Cancel the requests of a process that is gone."""
        for _, id in self._open:
            self._client.write_line(cancellation_line(id, "the server that asked is gone"))
        self._open.clear()
        self._guard.set_server_asking(False)
