"""The gate before a server: rules, pins and approvals decide about each call.

    call ── lists are known ── pinned ── rules ──┬─ allow ── sent
                                                 ├─ ask ──── inbox ── approved ── checked again ── sent
                                                 └─ deny ─── answered

A call waits here while the lists of the server are read: after the greeting, after a restart, and after the server has
announced a change.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from typing import TYPE_CHECKING

from ..core.clocks import NS_PER_MS
from ..core.errors import Ending
from ..core.json_values import is_deeper_than
from ..core.value_types import record, replace, value
from ..process.clock import monotonic_ns
from .failures import WrapFailure
from .guard import RequestGuard
from .limits import CallLimits
from .links import ClientLink, Note, ServerLink
from .listing import DEPTH_LIMIT, OwnLists, name_of
from .messages import LIST_CHANGES, JsonObject, Message, encode, notification_line, read_line
from .pins import KINDS, PROMPTS, TOOLS, Change, ListKind, LockFile, Objects, digest_of
from .replay import ReplayMemory
from .requests import NEVER_NS, ClientRequest
from .rules import CallVerdict, Rules

if TYPE_CHECKING:
    from .approvals import InboxQuestion, InboxThread, QuestionEnd

# Clients give up after 60 s by default.
DEFAULT_ASK_WAIT_MS = 45_000
# A server may announce changes all the time: its lists are read this often at most.
RELIST_MS = 300
STORE_LIMIT_MS = 10_000
_ASK_AGAIN = "The same call is denied again. Use another tool, or ask the user to change the rules of shotclock wrap"


@value
class GateSettings:
    """The policy of one server."""

    rules: Rules
    argv: list[str]
    directory: str
    ask_wait_ms: int = DEFAULT_ASK_WAIT_MS
    updates_lock: bool = False
    asks_about_changes: bool = False


@value
class CallToAsk:
    """A call as a person is asked about it."""

    tool: str
    arguments: JsonObject
    definition: JsonObject
    rule: str  # that asks


@record
class AskedCall:
    """A call that waits for a person."""

    request: ClientRequest
    limits: CallLimits
    wait_ms: int
    definition: str  # the digest of the tool that was shown


class Gate:
    """The decision about each call before it reaches the server."""

    def __init__(self, settings: GateSettings, lock: LockFile | None, approvals: InboxThread | None) -> None:
        self._settings = settings
        self._lock = lock
        self._approvals = approvals
        self._is_pinning = lock is not None and (lock.is_new or settings.updates_lock)
        self._needs_lists = lock is not None or settings.rules.asks or settings.rules.needs_hints
        self._methods = {"tools/call": TOOLS} if lock is None else {"tools/call": TOOLS, "prompts/get": PROMPTS}
        self._is_stale = self._needs_lists
        self._changed_again = False
        self._not_before_ns = 0
        self._retry_ns = NEVER_NS
        self._listed: dict[str, Objects] = {}
        self._unchecked: list[ClientRequest] = []
        self._asked: dict[InboxQuestion, AskedCall] = {}
        self._changes_asked: dict[InboxQuestion, Change] = {}
        self._noted: set[str] = set()

    def connect(
        self,
        guard: RequestGuard,
        client: ClientLink,
        memory: ReplayMemory,
        note: Note,
        *,
        list_ms: int,
        forward: Callable[[ClientRequest], None],
    ) -> None:
        """`forward` sends a call that has passed."""
        self._guard, self._client, self._memory, self._note, self._forward = guard, client, memory, note, forward
        kinds = list(KINDS.values()) if self._lock is not None else [TOOLS]
        self._lists = OwnLists(kinds, memory, list_ms, lambda line: self._server.send(line))

    def connect_server(self, server: ServerLink) -> None:
        self._server = server

    @property
    def fd(self) -> int | None:
        """Return the descriptor that is readable when a person has decided."""
        return None if self._approvals is None else self._approvals.fd

    def close(self) -> None:
        if self._approvals is not None:
            self._approvals.close()

    # --- calls ---------------------------------------------------------------------------------------------------

    def guards(self, method: str | None) -> bool:
        return method in self._methods

    def take(self, request: ClientRequest, message: Message | None = None) -> bool:
        """Return whether a request may be sent now. Otherwise it is answered, or forwarded later."""
        if request.method not in self._methods:
            return True
        if self._is_stale:
            self._unchecked.append(request)
            self.list_if_stale()
            return False
        message = message or read_line(request.line)
        failure = None if message is None else self._refuse(request, message)
        if failure is not None:
            self._guard.fail(request, failure)
            return False
        return message is not None and not self._ask_first(request, message)

    def refuse_long(self, message: Message) -> WrapFailure | None:
        """Return why a long request may not be sent. Its arguments are not gathered, so they cannot be checked."""
        kind = self._methods.get(message.method or "")
        if kind is None:
            return None
        name = message.params.get("name")
        if not isinstance(name, str):
            return _denied("was denied: its name follows behind long arguments, so it cannot be checked")
        if self._is_stale:
            self.list_if_stale()
            what = "was not sent: the tools of the server are not known yet"
            return WrapFailure("NOT_ALLOWED", what, Ending.NOT_STARTED, advice="Call it again in a moment")
        if (change := self._change_of(kind, name)) is not None:
            return self._blocked(change)
        verdict, why = self._settings.rules.decide(name, None, self._hints_of(name))
        return _denied(why) if kind is TOOLS and verdict is CallVerdict.DENY else None

    def _refuse(self, request: ClientRequest, message: Message) -> WrapFailure | None:
        kind, name = self._methods[request.method], message.params.get("name")
        if not isinstance(name, str):
            return _denied("was denied: it has no name")
        if (change := self._change_of(kind, name)) is not None:
            return self._blocked(change)
        if kind is not TOOLS:
            return None
        if request.approval and request.definition != self._digest_of(name):
            return _changed_meanwhile(request.approval)
        arguments = _arguments_of(message)
        if not isinstance(arguments, dict) or is_deeper_than(DEPTH_LIMIT, arguments):
            return _denied("was denied: its arguments are no object, or nested too deep to be checked")
        verdict, why = self._settings.rules.decide(name, arguments, self._hints_of(name))
        return _denied(why) if verdict is CallVerdict.DENY else None

    def _change_of(self, kind: ListKind, name: str) -> Change | None:
        """Return how an object differs from its pin."""
        if self._lock is None:
            return None
        definition = self._listed.get(kind.name, {}).get(name)
        if definition is not None and self._lock.fits(kind, name, definition):
            return None
        return self._lock.change_of(kind, name, definition)

    def _blocked(self, change: Change) -> WrapFailure:
        assert self._lock is not None
        question = next((each for each, asked in self._changes_asked.items() if asked == change), None)
        advice = f"A person accepts it by deleting {self._lock.path}, or by starting once with --update-lock"
        if question is not None and question.proposal is not None:
            advice = f"A person decides about it with: shotclock inbox approve {question.proposal.id}"
        if change.before is None and change.now is None:
            return _denied(f"was denied: the server lists no such {change.kind.noun}")
        what = f"was denied: its definition {change.what} since it was pinned: {'; '.join(change.lines())}"
        return WrapFailure("ACTION_CHANGED", what, Ending.NOT_STARTED, advice=advice)

    def _definition_of(self, name: str) -> JsonObject:
        definition = self._listed.get(TOOLS.name, {}).get(name)
        return definition if isinstance(definition, dict) else {}

    def _digest_of(self, name: str) -> str:
        return digest_of(self._definition_of(name))

    def _hints_of(self, name: str) -> JsonObject:
        hints = self._definition_of(name).get("annotations")
        return hints if isinstance(hints, dict) else {}

    # --- approvals -----------------------------------------------------------------------------------------------

    def _ask_first(self, request: ClientRequest, message: Message) -> bool:
        """Ask a person about a call, if a rule says so. Return whether it has to wait."""
        if request.approval or not request.is_call or self._approvals is None:
            return False
        name, arguments = request.tool, _arguments_of(message)
        if not isinstance(arguments, dict):
            return False
        verdict, rule = self._settings.rules.decide(name, arguments, self._hints_of(name))
        if verdict is not CallVerdict.ASK:
            return False
        settings, definition = self._settings, self._definition_of(name)
        wait_ms = min(settings.ask_wait_ms, request.limits.timeout_ms or settings.ask_wait_ms)
        try:
            question = self._approvals.ask_about_call(
                settings.argv,
                settings.directory,
                CallToAsk(name, arguments, definition, rule),
                monotonic_ns() + wait_ms * NS_PER_MS,
                lambda: self._guard.requests.find(request.key) is request,
            )
        except ValueError as error:  # NaN, which is no JSON
            self._guard.fail(request, _denied(f"was denied: it cannot be shown to a person: {error}"))
            return True
        self._asked[question] = AskedCall(request, request.limits, wait_ms, digest_of(definition))
        # The time of the call begins with its approval. Until then only a store that hangs reaches this limit.
        waited_ms = (monotonic_ns() - request.arrived_ns) // NS_PER_MS
        request.limits = replace(request.limits, timeout_ms=waited_ms + wait_ms + STORE_LIMIT_MS, queue_ms=0)
        return True

    def take_decisions(self) -> None:
        """Answer the calls that a person has decided about, or that have waited long enough."""
        for news in self._approvals.read_news() if self._approvals is not None else ():
            if (change := self._changes_asked.pop(news.question, None)) is not None:
                self._settle_change(news, change)
            elif (asked := self._asked.pop(news.question, None)) is not None:
                self._settle_call(news, asked)
            elif news.is_granted:  # its call was answered in the same moment
                self._record(news, "CANCELLED", "the call was given up before it was sent")

    def _settle_call(self, news: QuestionEnd, asked: AskedCall) -> None:
        request, proposal = asked.request, news.question.proposal
        if self._guard.requests.find(request.key) is not request:
            if news.is_granted:
                self._record(news, "CANCELLED", "the call was cancelled before it was sent")
            return
        request.limits = asked.limits
        if not news.is_granted or proposal is None:
            code, what, advice, data = news.explain(asked.wait_ms)
            is_error = code != "INCOMPLETE" or "outputSchema" in self._definition_of(request.tool)
            ending = Ending.NOT_STARTED
            failure = WrapFailure(code, what, ending, advice=advice, data=data, is_error=is_error)
            self._guard.fail(request, failure)
            return
        request.approval, request.definition = proposal.id, asked.definition
        request.arrived_ns = request.held_ns = request.sign_ns = monotonic_ns()
        self._guard.requests.look_again_at(request)
        if proposal.status == "modified":
            request.line = _with_arguments(request.line, dict(proposal.arguments or {}))
        if self.take(request):
            self._forward(request)

    def note_end(self, request: ClientRequest, code: str | None, message: str = "") -> None:
        """Record the outcome of an approved call."""
        if self._approvals is not None and request.approval:
            self._approvals.record(request.approval, code, message)

    def _record(self, news: QuestionEnd, code: str | None, message: str = "") -> None:
        if self._approvals is not None and news.question.proposal is not None:
            self._approvals.record(news.question.proposal.id, code, message)

    def _drop_changed(self) -> None:
        """Answer the calls whose tool has changed while a person was asked."""
        for question, asked in [*self._asked.items()]:
            if asked.definition != self._digest_of(asked.request.tool):
                del self._asked[question]
                if self._guard.requests.find(asked.request.key) is asked.request:
                    proposal = question.proposal
                    self._guard.fail(asked.request, _changed_meanwhile(proposal.id if proposal else "its proposal"))

    # --- lists ---------------------------------------------------------------------------------------------------

    def note_list_changed(self, capability: str) -> None:
        if self._lock is None and capability != TOOLS.capability:
            return
        self._changed_again = self._lists.is_under_way
        self._is_stale = self._needs_lists
        self.list_if_stale()

    def note_lost_server(self) -> None:
        self._lists.fail("")
        self._is_stale = self._needs_lists

    def list_if_stale(self) -> None:
        """Read the lists of the server, once the client has spoken and the server has answered."""
        if not self._is_stale or self._lists.is_under_way or not self._server.accepts:
            return
        is_greeting = any(each.method == "initialize" for each in self._guard.requests)
        if not self._memory.is_greeted and (is_greeting or not self._unchecked):
            return
        now_ns = monotonic_ns()
        if now_ns < self._not_before_ns:
            self._retry_ns = self._not_before_ns
            return
        self._not_before_ns, self._retry_ns = now_ns + RELIST_MS * NS_PER_MS, NEVER_NS
        self._changed_again = False
        self._lists.begin()
        self._finish_lists_if_done()

    def take_own_answer(self, message: Message) -> None:
        if self._lists.is_answer(message.id):
            self._lists.take_answer(message)
            self._finish_lists_if_done()

    def fail_list(self, problem: str) -> None:
        """Give up a list that cannot be checked whole."""
        self._lists.fail(problem)
        self._finish_lists_if_done()

    @property
    def next_due_ns(self) -> int:
        return min(self._lists.due_ns, self._retry_ns)

    def check(self, now_ns: int) -> None:
        if self._lists.check(now_ns):
            self._finish_lists_if_done()
        if now_ns >= self._retry_ns:
            self._retry_ns = NEVER_NS
            self.list_if_stale()

    def _finish_lists_if_done(self) -> None:
        if self._lists.is_under_way:
            return
        if self._changed_again and not self._lists.problem:
            self.list_if_stale()
            return
        unchecked = [each for each in self._unchecked if self._guard.requests.find(each.key) is each]
        self._unchecked = []
        if self._lists.problem:
            self._note(f"shotclock: the lists of the server cannot be checked: {self._lists.problem}")
            for request in unchecked:
                self._guard.fail(request, _denied(f"was denied: the server cannot be checked: {self._lists.problem}"))
            return
        if not self._listed:
            for rule in self._settings.rules.find_unused(self._lists.listed[TOOLS.name]):
                self._note(f"shotclock: no tool of the server matches the rule '{rule}'")
        self._is_stale, self._listed = False, self._lists.listed
        self._compare_with_lock()
        self._drop_changed()
        for request in unchecked:
            if self.take(request):
                self._forward(request)

    # --- pins ----------------------------------------------------------------------------------------------------

    def _compare_with_lock(self) -> None:
        lock = self._lock
        if lock is None:
            return
        changes = [change for kind in KINDS.values() for change in lock.changes(kind, self._listed[kind.name])]
        if not self._is_pinning:
            for change in changes:
                self._note_change(change)
            return
        is_first, self._is_pinning = lock.is_new, False
        try:
            lock.pin_all(self._listed)
        except OSError as error:
            self._note(f"shotclock: cannot write {lock.path}: {error.strerror}; the pins end with this process")
            return
        for change in () if is_first else changes:
            self._note(f"shotclock: accepted: {change}")
        self._note(f"shotclock: pinned {lock.describe()} in {lock.path}")

    def _note_change(self, change: Change) -> None:
        """Report a change once, and ask about it where that is wanted."""
        seen = digest_of([change.kind.name, change.name, change.now])
        if self._lock is None or seen in self._noted:
            return
        self._noted.add(seen)
        self._note(f"shotclock: blocked: {change}. Compare with {self._lock.path}")
        if self._approvals is not None and self._settings.asks_about_changes:
            settings = self._settings
            question = self._approvals.ask_about_change(settings.argv, settings.directory, self._lock.path, change)
            self._changes_asked[question] = change

    def _settle_change(self, news: QuestionEnd, change: Change) -> None:
        proposal = news.question.proposal
        if not news.is_granted or self._lock is None:
            why = str(news.failure) if proposal is None else f"{proposal.id} was {proposal.status}"
            self._note(f"shotclock: still blocked: {change.kind.noun} {change.name}: {why}")
            return
        try:
            self._lock.accept(change)
        except OSError as error:
            self._record(news, "INTERNAL_ERROR", f"cannot write {self._lock.path}: {error.strerror}")
            return
        self._record(news, None)
        self._note(f"shotclock: pinned {change.kind.noun} {change.name} in {self._lock.path}, as approved")
        method = next(name for name, capability in LIST_CHANGES.items() if capability == change.kind.capability)
        if self._memory.greeting is not None:
            self._client.write_line(notification_line(method))

    def must_see(self, message: Message) -> bool:
        """Return whether a long answer has to be read whole: it may be a list, if its id follows at the end."""
        if not message.is_answer:
            return False
        if message.key is None:
            return self._lists.is_under_way or any(self._is_screened(each) for each in self._guard.requests)
        request = self._guard.requests.find(message.key)
        return self._lists.is_answer(message.id) or (request is not None and self._is_screened(request))

    def _is_screened(self, request: ClientRequest) -> bool:
        return self._lock is not None and request.method in KINDS

    def screen(self, request: ClientRequest, message: Message) -> bytes:
        """Return the line of a list for the client, without the objects that are not pinned."""
        kind, lock, result = KINDS.get(request.method), self._lock, message.result
        if kind is None or lock is None or self._is_pinning or not isinstance(result, dict):
            return message.line
        listed = result.get(kind.name)
        if not isinstance(listed, list):
            return message.line
        kept = []
        for definition in listed:
            name = name_of(kind, definition)
            if name is None:
                self._note_change(lock.change_of(kind, "without a name, or nested too deep,", None))
            elif not lock.fits(kind, name, definition):
                self._note_change(lock.change_of(kind, name, definition))
                shown_to_us = self._listed.get(kind.name, {}).get(name)
                self._is_stale |= digest_of(shown_to_us) != digest_of(definition)
            else:
                kept.append(definition)
        if len(kept) == len(listed):
            return message.line
        self.list_if_stale()
        return encode({**json.loads(message.line), "result": {**result, kind.name: kept}})


def _denied(what: str) -> WrapFailure:
    return WrapFailure("NOT_ALLOWED", what, Ending.NOT_STARTED, advice=_ASK_AGAIN)


def _changed_meanwhile(approval: str) -> WrapFailure:
    what = f"was not sent: the definition of the tool has changed since {approval} was proposed"
    return WrapFailure("ACTION_CHANGED", what, Ending.NOT_STARTED, advice="Read the list of tools again")


def _arguments_of(message: Message) -> object:
    arguments = message.params.get("arguments")
    return {} if arguments is None else arguments


def _with_arguments(line: bytes, arguments: JsonObject) -> bytes:
    content = json.loads(line)
    return encode({**content, "params": {**content["params"], "arguments": arguments}})


def directory_of(cwd: str | None) -> str:
    return os.path.abspath(cwd or os.curdir)
