"""Calls that wait for a person: asked about in the inbox, bound to the exact arguments and definition of the tool."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import TYPE_CHECKING

from ..core.errors import Ending
from ..core.limits import NS_PER_MS
from ..core.proposal import digest
from ..core.value_types import record, replace, value
from ..supervise.clock import monotonic_ns
from ._failures import WrapFailure
from ._guard import RequestGuard
from ._limits import CallLimits
from ._listing import KnownLists
from ._messages import JsonObject, encode
from ._pins import digest_of
from ._requests import ClientRequest

if TYPE_CHECKING:
    from ._approvals import InboxQuestion, InboxThread, QuestionEnd

# Clients give up after 60 s by default.
DEFAULT_ASK_WAIT_MS = 45_000
STORE_LIMIT_MS = 10_000


@value
class CallToAsk:
    """A call as a person is asked about it."""

    tool: str
    arguments: JsonObject
    definition: JsonObject
    rule: str  # that asks
    others: JsonObject  # further parameters, such as answers of a user


@record
class AskedCall:
    request: ClientRequest
    limits: CallLimits
    wait_ms: int
    definition: str  # the digest of the tool that was shown


class AskedCalls:
    def __init__(
        self,
        approvals: InboxThread,
        guard: RequestGuard,
        lists: KnownLists,
        ask_wait_ms: int,
        on_approved: Callable[[ClientRequest], None],
    ) -> None:
        self._approvals = approvals
        self._guard = guard
        self._lists = lists
        self._ask_wait_ms = ask_wait_ms
        self._on_approved = on_approved
        self._asked: dict[InboxQuestion, AskedCall] = {}

    def ask(self, request: ClientRequest, arguments: JsonObject, rule: str, others: JsonObject) -> None:
        """Ask about a call. Raises ValueError if it cannot be shown, because of NaN, which is no JSON."""
        wait_ms = min(self._ask_wait_ms, request.limits.timeout_ms or self._ask_wait_ms)
        definition = self._lists.tool(request.tool)
        question = self._approvals.ask_about_call(
            CallToAsk(request.tool, arguments, definition, rule, others),
            monotonic_ns() + wait_ms * NS_PER_MS,
            lambda: self._is_open(request),
        )
        self._asked[question] = AskedCall(request, request.limits, wait_ms, digest_of(definition))
        # The time of the call begins with its approval. Until then only a store that hangs reaches this limit.
        waited_ms = (monotonic_ns() - request.arrived_ns) // NS_PER_MS
        request.limits = replace(request.limits, timeout_ms=waited_ms + wait_ms + STORE_LIMIT_MS, queue_ms=0)

    def _is_open(self, request: ClientRequest) -> bool:
        return self._guard.requests.get(request.key) is request

    def settle(self, news: QuestionEnd) -> None:
        """Continue with a call that was approved, or answer it: it was rejected, or has waited long enough."""
        asked, proposal = self._asked.pop(news.question, None), news.question.proposal
        if asked is None or not self._is_open(asked.request):
            if news.is_granted:
                self._approvals.record_end(news, "CANCELLED", "the call was given up before it was sent")
            return
        request = asked.request
        request.limits = asked.limits
        if not news.is_granted or proposal is None:
            code, what, advice, data = news.explain(asked.wait_ms)
            is_error = code != "INCOMPLETE" or "outputSchema" in self._lists.tool(request.tool)
            failure = WrapFailure(code, what, Ending.NOT_STARTED, advice=advice, data=data, is_error=is_error)
            self._guard.fail(request, failure)
            return
        request.approval, request.definition = proposal.id, asked.definition
        request.arrived_ns = request.held_ns = request.sign_ns = monotonic_ns()
        self._guard.requests.reschedule(request)
        if proposal.status == "modified":
            content, arguments = json.loads(request.line), dict(proposal.arguments or {})
            request.line = encode({**content, "params": {**content["params"], "arguments": arguments}})
            request.size = len(request.line)
            request.digest = None if request.digest is None else digest(arguments)
        self._on_approved(request)

    def drop_changed(self) -> None:
        """Answer the calls whose tool has changed while a person was asked."""
        for question, asked in [*self._asked.items()]:
            if asked.definition != digest_of(self._lists.tool(asked.request.tool)):
                del self._asked[question]
                if self._is_open(asked.request):
                    proposal = question.proposal
                    self._guard.fail(asked.request, changed_meanwhile(proposal.id if proposal else "its proposal"))


def changed_meanwhile(approval: str) -> WrapFailure:
    what = f"was not sent: the definition of the tool has changed since {approval} was proposed"
    return WrapFailure("ACTION_CHANGED", what, Ending.NOT_STARTED, advice="Read the list of tools again")
