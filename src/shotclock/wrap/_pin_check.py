"""The check of lists against their pins: other definitions are left out, blocked and, if wanted, asked about."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import TYPE_CHECKING

from ..core.errors import Ending
from ..core.uri_template import matches_strictly, may_match
from ._failures import WrapFailure
from ._links import Note
from ._listing import KnownLists, name_of
from ._messages import DISCOVER, JsonObject, RpcMessage, encode
from ._pins import GREETING, KINDS, PROMPTS, TEMPLATES, TOOLS, Change, ListKind, LockFile, Objects, digest_of

if TYPE_CHECKING:
    from ._approvals import InboxQuestion, InboxThread, QuestionEnd

GREETINGS = ("initialize", DISCOVER)
# Changes that are reported by one process. A server that changes its tools all the time exhausts this.
MOST_NOTED = 10_000
# Changes that a person is asked about at once: the places in the inbox are those of all servers.
MOST_ASKED = 10
# Requests that use a pinned object, or may use one.
GUARDED = ("tools/call", "prompts/get", "resources/read", "resources/subscribe", "completion/complete")


class PinCheck:
    def __init__(
        self,
        lock: LockFile,
        lists: KnownLists,
        note: Note,
        *,
        updates: bool,
        approvals: InboxThread | None,
        on_accepted: Callable[[ListKind], None],
    ) -> None:
        """`approvals` is there if a person is asked about changes."""
        self._lock = lock
        self._lists = lists
        self._note = note
        self._approvals = approvals
        self._on_accepted = on_accepted
        self._is_pinning = lock.is_new or updates
        self._asked: dict[InboxQuestion, Change] = {}
        self._noted: set[str] = set()
        self._asked_about: set[str] = set()
        self._greeting: Objects | None = None  # as last seen

    # --- requests ------------------------------------------------------------------------------------------------

    def refuse(self, message: RpcMessage) -> WrapFailure | None:
        """Return why a request may not be sent: it uses an object that is not the pinned one."""
        params, kind, key = message.params, TOOLS, "name"
        if message.method == "completion/complete":
            ref = params.get("ref")
            params = ref if isinstance(ref, dict) else {}
            kind, key = (PROMPTS, "name") if params.get("type") == "ref/prompt" else (TEMPLATES, "uri")
        elif message.method == "prompts/get":
            kind = PROMPTS
        elif message.method != "tools/call":
            kind, key = TEMPLATES, "uri"
        name = params.get(key)
        if not isinstance(name, str):
            what = f"was denied: its {key} is missing, or follows behind a long part, so it cannot be checked"
            return WrapFailure("NOT_ALLOWED", what, Ending.NOT_STARTED, advice="Send it in another form")
        if kind is TEMPLATES:
            return self._refuse_uri(name)
        definition = self._lists.objects(kind).get(name)
        fits = definition is not None and self._lock.fits(kind, name, definition)
        return None if fits else self._blocked(self._lock.change_of(kind, name, definition))

    def _refuse_uri(self, uri: str) -> WrapFailure | None:
        """Refuse a URI that only templates match which are changed or new. Plain resources are not pinned."""
        blocked = None
        for template, definition in self._lists.objects(TEMPLATES).items():
            if template != uri and not may_match(template, uri):
                continue
            if not self._lock.fits(TEMPLATES, template, definition):
                blocked = self._lock.change_of(TEMPLATES, template, definition)
            elif template == uri or matches_strictly(template, uri):
                return None
        return None if blocked is None else self._blocked(blocked)

    def _blocked(self, change: Change) -> WrapFailure:
        if change.before is None and change.now is None:
            what = f"was denied: the server lists no such {change.kind.noun}"
            return WrapFailure("NOT_ALLOWED", what, Ending.NOT_STARTED, advice=f"Read the list of {change.kind.noun}s")
        question = next((each for each, asked in self._asked.items() if asked == change), None)
        advice = f"A person accepts it by deleting {self._lock.path}, or by starting once with --update-lock"
        if question is not None:
            proposal = question.proposal  # it may not be stored yet
            how = "list" if proposal is None else f"approve {proposal.id}"
            advice = f"A person decides about it with: shotclock inbox {how}"
        what = f"was denied, because it is not as pinned: {change}"
        return WrapFailure("ACTION_CHANGED", what, Ending.NOT_STARTED, advice=advice)

    # --- lists ---------------------------------------------------------------------------------------------------

    def compare(self) -> None:
        """Compare the lists that were read with their pins, or pin them."""
        lock, greeting = self._lock, self._greeting
        changes = [change for kind in KINDS.values() for change in lock.changes(kind, self._lists.objects(kind))]
        if not self._is_pinning:
            for change in changes:
                self._note_change(change)
            return
        is_first, self._is_pinning = lock.is_new, False
        try:
            seen = {} if greeting is None else {GREETING.name: greeting}
            lock.pin_all({kind.name: self._lists.objects(kind) for kind in KINDS.values()} | seen)
        except OSError as error:
            self._note(f"shotclock: cannot write {lock.path}: {error.strerror}; the pins end with this process")
            return
        for change in () if is_first else changes:
            self._note(f"shotclock: accepted: {change}")
        self._note(f"shotclock: pinned {lock.describe()} in {lock.path}")

    def report_unpinned(self) -> None:
        """Report at the end that the definitions which the client may have read are not pinned."""
        if self._is_pinning:
            self._note(f"shotclock: nothing was pinned in {self._lock.path}: it ended before the lists were read")

    def screen(self, method: str, message: RpcMessage) -> bytes:
        """Return the line of a list or greeting for the client, without the objects that are not pinned."""
        kind, result = KINDS.get(method), message.result
        if not isinstance(result, dict):
            return message.line
        if method in GREETINGS:
            return self._screen_greeting(message, result)
        if kind is None or self._is_pinning:
            return message.line
        listed = result.get(kind.name)
        if not isinstance(listed, list):
            return message.line
        kept = []
        for definition in listed:
            name = name_of(kind, definition)
            if name is None:
                self._note_change(self._lock.change_of(kind, "without a name, or nested too deep,", None))
            elif not self._lock.fits(kind, name, definition):
                self._note_change(self._lock.change_of(kind, name, definition))
                self._lists.note_difference(kind, name, definition)
            else:
                kept.append(definition)
        if len(kept) == len(listed):
            return message.line
        self._lists.read_if_stale()
        return encode({**json.loads(message.line), "result": {**result, kind.name: kept}})

    def _screen_greeting(self, message: RpcMessage, result: JsonObject) -> bytes:
        text = result.get(GREETING.key)
        definition = None if text is None else {GREETING.key: text if isinstance(text, str) else None}
        self._greeting = {} if definition is None else {GREETING.key: definition}
        if self._is_pinning:
            return message.line
        if not self._lock.has(GREETING):
            if text is not None:
                self._note(f"shotclock: the instructions of the server are not pinned in {self._lock.path}")
            return message.line
        for change in self._lock.changes(GREETING, self._greeting):
            self._note_change(change)
        if text is None or (isinstance(text, str) and self._lock.fits(GREETING, GREETING.key, definition)):
            return message.line
        kept = {name: item for name, item in result.items() if name != GREETING.key}
        return encode({**json.loads(message.line), "result": kept})

    # --- changes -------------------------------------------------------------------------------------------------

    def _note_change(self, change: Change) -> None:
        """Report a change once, and ask about it where that is wanted."""
        seen = digest_of([change.kind.name, change.name, change.now])
        if seen not in self._noted and len(self._noted) < MOST_NOTED:
            self._noted.add(seen)
            how = "start once with --update-lock" if self._approvals is None else "see shotclock inbox list"
            self._note(f"shotclock: blocked: {change}. It differs from {self._lock.path}; to accept it, {how}")
        may_ask = seen not in self._asked_about and len(self._asked_about) < MOST_NOTED
        if self._approvals is not None and may_ask and len(self._asked) < MOST_ASKED:
            self._asked_about.add(seen)
            self._asked[self._approvals.ask_about_change(self._lock.path, change)] = change

    def settle(self, news: QuestionEnd, approvals: InboxThread) -> bool:
        """Pin a change that was approved. Return whether the news is about a change."""
        change, proposal = self._asked.pop(news.question, None), news.question.proposal
        if change is None:
            return False
        if not news.is_granted:
            why = str(news.failure) if proposal is None else f"{proposal.id} was {proposal.status}"
            self._note(f"shotclock: still blocked: {change.kind.noun} {change.name}: {why}")
            if news.failure is None:
                self.compare()
            return True
        try:
            self._lock.accept(change)
        except OSError as error:
            approvals.record_end(news, "INTERNAL_ERROR", f"cannot write {self._lock.path}: {error.strerror}")
            return True
        approvals.record_end(news, None)
        self._note(f"shotclock: pinned {change.kind.noun} {change.name} in {self._lock.path}, as approved")
        self._on_accepted(change.kind)
        self.compare()  # more changes may wait for their question
        return True
