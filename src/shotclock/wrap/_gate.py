"""The gate before a server: pins, rules and approvals decide about each call.

    call ── lists are known ── pinned ── rules ──┬─ allow ── sent
                                                 ├─ ask ──── inbox ── approved ── checked again ── sent
                                                 └─ deny ─── answered

A call waits here while the lists of the server are read.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from ..core.errors import Ending
from ..core.json_values import is_deeper_than
from ..core.value_types import value
from ._asked_calls import DEFAULT_ASK_WAIT_MS, AskedCalls, changed_meanwhile
from ._failures import WrapFailure
from ._guard import RequestGuard
from ._links import ClientSide, Note, ServerLink
from ._listing import DEPTH_LIMIT, KnownLists, OwnLists
from ._messages import LIST_CHANGES, RpcMessage, notification_line, read_line
from ._pin_check import GUARDED, PinCheck
from ._pins import KINDS, TOOLS, ListKind, LockFile, digest_of
from ._replay import ReplayMemory
from ._requests import ClientRequest
from ._rules import CallVerdict, Rules

if TYPE_CHECKING:
    from ._approvals import InboxThread

_DENIED_AGAIN = "The same call is denied again. Use another tool, or ask the user to change the rules of shotclock wrap"


@value
class Policy:
    """The policy of one server. An empty one lets everything pass."""

    rules: Rules = Rules()
    ask_wait_ms: int = DEFAULT_ASK_WAIT_MS
    lock: LockFile | None = None
    updates_lock: bool = False
    asks_about_changes: bool = False
    approvals: InboxThread | None = None

    @property
    def decides(self) -> bool:
        return bool(self.rules.rules) or self.rules.is_read_only or self.lock is not None

    def record_end(self, request: ClientRequest, code: str | None, message: str = "") -> None:
        """Record the outcome of a call, if a person has approved it."""
        if self.approvals is not None and request.approval:
            self.approvals.record(request.approval, code, message)


class Gate:
    """The decision about each call before it reaches the server."""

    def __init__(
        self,
        policy: Policy,
        guard: RequestGuard,
        client: ClientSide,
        memory: ReplayMemory,
        server: ServerLink,
        note: Note,
        *,
        list_ms: int,
        forward: Callable[[ClientRequest], None],
    ) -> None:
        """`forward` sends a call that has passed."""
        self._policy, self._guard, self._client, self._memory, self._server = policy, guard, client, memory, server
        self._note, self._forward = note, forward
        self._rules, lock, approvals = policy.rules, policy.lock, policy.approvals
        self._methods = GUARDED if lock is not None else ("tools/call",) if policy.decides else ()
        self._unchecked: list[ClientRequest] = []
        self._has_listed = False
        self._client_has_listed = False
        kinds = list(KINDS.values()) if lock is not None else [TOOLS]
        needs_lists = lock is not None or self._rules.asks or self._rules.needs_hints
        reading = OwnLists(kinds, memory, list_ms, server.send)
        self.lists: KnownLists = KnownLists(reading, self._may_list, self._finish_lists, are_needed=needs_lists)
        self._pins: PinCheck | None = None
        if lock is not None:
            self._pins = PinCheck(
                lock,
                self.lists,
                note,
                updates=policy.updates_lock,
                approvals=approvals if policy.asks_about_changes else None,
                on_accepted=self._announce_change,
            )
        self._asked: AskedCalls | None = None
        if approvals is not None:
            self._asked = AskedCalls(approvals, guard, self.lists, policy.ask_wait_ms, self._take_again)

    @property
    def fd(self) -> int | None:
        """Return the descriptor that is readable when a person has decided."""
        return None if self._policy.approvals is None else self._policy.approvals.fd

    def close(self) -> None:
        if self._pins is not None:
            self._pins.report_unpinned()
        if self._policy.approvals is not None:
            self._policy.approvals.close()

    # --- calls ---------------------------------------------------------------------------------------------------

    def guards(self, method: str | None) -> bool:
        return method in self._methods

    def take(self, request: ClientRequest, message: RpcMessage | None = None) -> bool:
        """Return whether a request may be sent now. Otherwise it is answered, or forwarded later."""
        if request.method not in self._methods:
            return True
        if self.lists.is_stale:
            self._unchecked.append(request)
            self.lists.read_if_stale()
            return False
        message = message or read_line(request.line)
        if message is None:
            return False
        failure = None if self._pins is None else self._pins.refuse(message)
        if request.is_call and not isinstance(message.params.get("name"), str):
            failure = _denied("was denied: it has no name, so it cannot be checked")
        if failure is not None:
            self._guard.fail(request, failure)
            return False
        return not request.is_call or self._take_call(request, message)

    def _take_again(self, request: ClientRequest) -> None:
        if self.take(request):
            self._forward(request)

    def _take_call(self, request: ClientRequest, message: RpcMessage) -> bool:
        """Return whether a call may be sent now, by the rules or by its approval."""
        arguments = message.params.get("arguments")
        arguments = {} if arguments is None else arguments
        if request.approval and request.definition != digest_of(self.lists.tool(request.tool)):
            self._guard.fail(request, changed_meanwhile(request.approval))
            return False
        if not isinstance(arguments, dict) or is_deeper_than(DEPTH_LIMIT, message.params):
            what = "was denied: its arguments are no object, or nested too deep to be checked"
            self._guard.fail(request, _denied(what))
            return False
        verdict, why = self._rules.decide(request.tool, arguments, self.lists.hints_of(request.tool))
        if verdict is CallVerdict.DENY:
            self._guard.fail(request, _denied(why))
        elif verdict is CallVerdict.ASK and not request.approval and self._asked is not None:
            others = {key: item for key, item in message.params.items() if key not in ("name", "arguments", "_meta")}
            try:
                self._asked.ask(request, arguments, why, others)
            except ValueError as error:
                self._guard.fail(request, _denied(f"was denied: it cannot be shown to a person: {error}"))
        else:
            return True
        return False

    # --- people --------------------------------------------------------------------------------------------------

    def handle_decisions(self) -> None:
        """Continue with the calls and changes that a person has decided about, or that have waited long enough."""
        approvals = self._policy.approvals
        if approvals is None or self._asked is None:
            return
        for news in approvals.read_news():
            if self._pins is None or not self._pins.settle(news, approvals):
                self._asked.settle(news)

    def _announce_change(self, kind: ListKind) -> None:
        method = next((name for name, capability in LIST_CHANGES.items() if capability == kind.capability), None)
        if self._memory.greeting is not None and method is not None:
            self._client.write_line(notification_line(method))

    # --- lists ---------------------------------------------------------------------------------------------------

    def handle_list_change(self, capability: str) -> None:
        if self._policy.lock is not None or (self.lists.are_needed and capability == TOOLS.capability):
            self.lists.handle_change()

    def _may_list(self) -> bool:
        """Return whether the client has spoken and the server has answered, so that requests of ours may follow."""
        if not self._server.accepts:
            return False
        is_greeting = any(each.method == "initialize" for each in self._guard.requests)
        # A client that leaves out `notifications/initialized` has the tools all the same: they are pinned, too.
        return self._memory.is_greeted or ((bool(self._unchecked) or self._client_has_listed) and not is_greeting)

    def _finish_lists(self, problem: str) -> None:
        """Decide about the calls that waited for the lists."""
        unchecked = [each for each in self._unchecked if self._guard.requests.get(each.key) is each]
        self._unchecked = []
        if problem:
            self._note(f"shotclock: the lists of the server cannot be checked: {problem}")
            for request in unchecked:
                self._guard.fail(request, _denied(f"was denied: the server cannot be checked: {problem}"))
            return
        if not self._has_listed:
            self._has_listed = True
            for rule in self._rules.list_unused(self.lists.objects(TOOLS)):
                self._note(f"shotclock: no tool of the server matches the rule '{rule}'")
        if self._pins is not None:
            self._pins.compare()
        if self._asked is not None:
            self._asked.drop_changed()
        for request in unchecked:
            self._take_again(request)

    @property
    def checks_answers(self) -> bool:
        """Return whether no line of the server may be read differently by the client."""
        return self._policy.lock is not None

    def screen(self, request: ClientRequest, message: RpcMessage) -> bytes:
        """Return the line of an answer for the client."""
        self._client_has_listed |= request.method in KINDS
        return message.line if self._pins is None else self._pins.screen(request.method, message)


def _denied(what: str) -> WrapFailure:
    return WrapFailure("NOT_ALLOWED", what, Ending.NOT_STARTED, advice=_DENIED_AGAIN)
