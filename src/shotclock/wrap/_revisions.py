"""A client that accepts only a newer revision of the protocol than its server has: the answer says so.

Clients of both generations negotiate by themselves and never come here. Requests of the revision 2026-07-28 are
answered with `resultType`. If the first answer is an error, only discovery tells a mistake of the client from a server
that does not know the revision, so the error waits for it.
"""

from __future__ import annotations

import json
from collections.abc import Callable

from ..core.errors import Ending
from ..core.limits import NS_PER_MS
from ..core.value_types import replace
from ..supervise.clock import monotonic_ns
from ._failures import WrapFailure
from ._guard import RequestGuard
from ._links import ServerLink
from ._messages import DISCOVER, REVISION_KEY, RpcMessage, encode, error_of
from ._replay import ReplayMemory
from ._requests import NEVER_NS, ClientRequest

# A server that answers its first request with an error, and discovery not at all, exhausts this.
DISCOVERY_LIMIT_MS = 5_000
_INTERNAL_ERROR = -32603
_ADVICE = "Use a client that negotiates the revision, or a newer server"


class RevisionCheck:
    """The revision of the server, as far as its answers show it."""

    def __init__(
        self,
        guard: RequestGuard,
        memory: ReplayMemory,
        server: ServerLink,
        pass_on: Callable[[ClientRequest, RpcMessage], None],
    ) -> None:
        """`pass_on` writes an answer for the client."""
        self.next_due_ns: int = NEVER_NS
        self._guard, self._memory, self._server, self._pass_on = guard, memory, server, pass_on
        self._is_older: bool | None = None  # None: not known yet
        self._own_id = ""
        self._waiting: list[tuple[ClientRequest, RpcMessage]] = []

    def refuse(self, message: RpcMessage) -> WrapFailure | None:
        """Return why a request is not sent: a server that cannot answer it might still act on it."""
        if not self._is_older or REVISION_KEY not in message.meta or message.method == DISCOVER:
            return None
        return WrapFailure("PRECONDITION", f"was not sent: {self._explain()}", Ending.NOT_STARTED, advice=_ADVICE)

    def _explain(self) -> str:
        revision = self._memory.envelope.get(REVISION_KEY)
        return f"the client speaks only the revision {revision} of the protocol, which the server does not have"

    def take(self, request: ClientRequest, message: RpcMessage) -> bool:
        """Return whether an answer is replaced, or passed on later."""
        if self._is_older is False or self._memory.greeting is not None:
            return False
        if request.method == DISCOVER:
            self._is_older = None if message.is_error else False
            return False
        if not self._memory.envelope or request.method == "initialize":
            return False
        if not message.is_error:
            self._is_older = not (isinstance(message.result, dict) and "resultType" in message.result)
            self._settle_waiting()
            if self._is_older:
                what = f"was answered, but {self._explain()}, so the client could not read the answer"
                self._guard.fail(request, WrapFailure("RESULT_INVALID", what, Ending.FINISHED, advice=_ADVICE))
            return self._is_older
        self._waiting.append((request, message))
        if self._is_older:
            self._settle_waiting()
        elif not self._own_id:
            self._own_id = self._memory.own_id("discover")
            self.next_due_ns = monotonic_ns() + DISCOVERY_LIMIT_MS * NS_PER_MS
            self._server.send(self._memory.discovery_line(self._own_id))
        return True

    def handle_own_answer(self, message: RpcMessage) -> None:
        if message.id == self._own_id:
            is_unclear = message.is_error and error_of(message).get("code") == _INTERNAL_ERROR
            self._is_older = None if is_unclear else message.is_error
            self._settle_waiting()

    def _settle_waiting(self) -> None:
        """Pass on the errors that waited, with a sentence more if the server is older."""
        waiting, self._waiting, self._own_id, self.next_due_ns = self._waiting, [], "", NEVER_NS
        for request, message in waiting:
            if self._guard.requests.get(request.key) is request:
                if self._is_older:
                    error = error_of(message)
                    reason = f"{error.get('message', 'the server refused the request')}. shotclock: {self._explain()}"
                    content = {**json.loads(message.line), "error": {**error, "message": f"{reason}. {_ADVICE}."}}
                    message = replace(message, line=encode(content))
                self._pass_on(request, message)

    def handle_lost_server(self) -> None:
        """Pass on what was answered, and forget the revision: another process may have another one."""
        self._settle_waiting()
        self._is_older = None

    def check(self, now_ns: int) -> None:
        if now_ns >= self.next_due_ns:
            self._settle_waiting()
