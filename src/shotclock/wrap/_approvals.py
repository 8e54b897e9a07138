"""Questions to the inbox, asked on a thread of their own: the loop before the server never waits for the disk.

ask ── proposed, or found again ── decided ── used up ── news for the loop
                                       │
                                       └─ rejected, expired, or not decided in time: news, too
"""

from __future__ import annotations

import hashlib
import hmac
import os
import threading
import traceback
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from queue import Empty, SimpleQueue

from ..calls.principal import ANONYMOUS
from ..core.envelope import refusal
from ..core.errors import Failure
from ..core.limits import format_duration
from ..core.proposal import ActionOutcome, Kind, Policy, Proposal, ProposalRequest, Runner, canonical
from ..core.value_types import entity, replace, value
from ..people.access import make_id
from ..people.announcer import Announcer
from ..people.audit_file import AuditFile
from ..people.person_wait import NOT_BOUND, describe_proposal, read_inbox_limits
from ..people.proposal_checks import TITLE_LIMIT, problems_with
from ..store.home import load_private_key, make_private_directory
from ..store.proposals import NewProposal
from ..store.store import Store
from ..supervise.clock import monotonic_ns, wall_time
from ..supervise.kernel import this_process
from ._asked_calls import CallToAsk
from ._pins import Change, digest_of
from ._requests import NEVER_NS

# How often the thread looks for decisions while calls wait for them.
LOOK_S = 0.1
IDLE_LOOK_S = 60.0
# The end waits this long for outcomes that are being written. A busy store exhausts this.
CLOSE_LIMIT_S = 2.0
LONGEST_SCHEMA = 64 * 1024
KEY_FILE = "approvals.key"  # the same as of other approvals
DIGITS_SHOWN = 16
DESCRIPTION_SHOWN = 2_000


@entity
class InboxQuestion:
    """A question to the inbox. `is_wanted` returns whether its call still waits; the thread calls it."""

    ask: ProposalRequest
    until_ns: int = NEVER_NS
    is_wanted: Callable[[], bool] = lambda: True
    proposal: Proposal | None = None


@value
class QuestionEnd:
    """The end of a question: granted and used up, refused, or not decided in time."""

    question: InboxQuestion
    is_granted: bool = False
    failure: Failure | None = None  # the inbox cannot be used

    def explain(self, wait_ms: int) -> tuple[str, str, str, dict[str, object] | None]:
        """Return the code, the end of a sentence, the advice and the data for a call that may not run (yet)."""
        proposal = self.question.proposal
        if self.failure is not None or proposal is None:
            failure = self.failure or Failure("INTERNAL_ERROR", "there is no proposal")
            return (
                failure.code,
                f"was not sent: a person has to approve it, and {failure}",
                "Call again later",
                None,
            )
        data = describe_proposal(proposal)
        if proposal.is_open:
            data |= {"state": "paused", "continue_command": "call the tool again with the same arguments"}
            waited = f"not decided within {format_duration(wait_ms)}"
            what = f"was not sent yet: it waits for approval as {proposal.id}, {waited}"
            advice = (
                "Continue with other work, and make the identical call later: it picks the decision up. "
                f"A person decides with: shotclock inbox approve {proposal.id}"
            )
            return "INCOMPLETE", what, advice, data
        notes = f": {data['notes']}" if data["notes"] else ""
        by = f" by {proposal.decided_by}" if proposal.decided_by else ""
        what = f"was not sent: its approval {proposal.id} was {proposal.status}{by}{notes}"
        return f"PROPOSAL_{proposal.status.upper()}", what, "Do not repeat it unchanged", data


class InboxThread:
    """The thread that asks. Everything that uses the store runs on it."""

    def __init__(self, argv: list[str], directory: str, variables: Mapping[str, str]) -> None:
        """The command of the server is a part of every question, its `variables` by digest."""
        self.fd: int = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._server = {"MCP server": argv, "directory": directory}
        self._variables = variables
        self._orders: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._news: deque[QuestionEnd] = deque()
        self._waiting: list[InboxQuestion] = []
        self._store: Store | None = None
        self._announcer: Announcer | None = None
        self._thread: threading.Thread | None = None

    # --- for the loop --------------------------------------------------------------------------------------------

    def ask_about_call(self, call: CallToAsk, until_ns: int, is_wanted: Callable[[], bool]) -> InboxQuestion:
        """Ask whether a tool may be called once. Raises ValueError if the call cannot be shown."""
        return self._ask(InboxQuestion(_call_request(self._server, call), until_ns, is_wanted))

    def ask_about_change(self, lock: str, change: Change) -> InboxQuestion:
        """Ask whether a changed definition may be pinned."""
        return self._ask(InboxQuestion(_change_request(self._server, lock, change)))

    def _ask(self, question: InboxQuestion) -> InboxQuestion:
        try:
            self._order(lambda: self._try(question, self._begin))
        except RuntimeError as error:  # no more threads; the next question tries again
            self._tell(QuestionEnd(question, failure=Failure("INTERNAL_ERROR", f"the inbox cannot be asked: {error}")))
        return question

    def record(self, proposal_id: str, code: str | None, message: str) -> None:
        """Record the outcome of an approved action; without a code it succeeded."""
        outcome = ActionOutcome(code is None, wall_time(), code, None if code is None else message)
        self._order(lambda: self._record(proposal_id, outcome))

    def record_end(self, news: QuestionEnd, code: str | None, message: str = "") -> None:
        if news.question.proposal is not None:
            self.record(news.question.proposal.id, code, message)

    def read_news(self) -> list[QuestionEnd]:
        with suppress(BlockingIOError):
            os.eventfd_read(self.fd)
        return [self._news.popleft() for _ in range(len(self._news))]

    def close(self) -> None:
        if self._thread is not None:
            self._orders.put(None)
            self._thread.join(CLOSE_LIMIT_S)
            if self._announcer is not None:
                self._announcer.close()

    def _order(self, work: Callable[[], None]) -> None:
        if self._thread is None:
            thread = threading.Thread(target=self._run, name="shotclock-wrap-inbox", daemon=True)
            thread.start()  # may fail; on Python 3.13 such a thread cannot be started again
            self._thread = thread
        self._orders.put(work)

    # --- on the thread -------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            try:
                order = self._orders.get(timeout=LOOK_S if self._waiting else IDLE_LOOK_S)
            except Empty:
                pass
            else:
                if order is None:
                    return
                order()
            for question in [*self._waiting]:
                self._try(question, self._look)

    def _try(self, question: InboxQuestion, step: Callable[[InboxQuestion], bool]) -> None:
        """Take a step of a question, which waits if the step returns True."""
        if question in self._waiting:
            self._waiting.remove(question)
        try:
            if step(question):
                self._waiting.append(question)
        except Failure as failure:
            self._tell(QuestionEnd(question, failure=failure))
        except Exception as error:  # the call must be answered, and later ones asked about
            traceback.print_exc()
            self._tell(QuestionEnd(question, failure=Failure("INTERNAL_ERROR", f"the inbox failed: {error}")))

    def _tell(self, news: QuestionEnd) -> None:
        self._news.append(news)
        os.eventfd_write(self.fd, 1)

    def _open(self) -> Store:
        if self._store is None:
            self._store = Store.open()
        return self._store

    def _begin(self, question: InboxQuestion) -> bool:
        store = self._open()
        ask = question.ask = self._with_variables(store, question.ask)
        if problems := problems_with(ask):
            raise refusal(problems)
        new = NewProposal(f"p-{make_id(10)}", ask, ANONYMOUS.name)
        found = store.proposals.attach_or_create_all([new], wall_time(), read_inbox_limits())[0]
        if isinstance(found, Failure):
            raise found
        if found.id == new.id:
            self._announcer = self._announcer or Announcer(store)
            self._announcer.announce([found])
        AuditFile(store).catch_up_if_possible()
        question.proposal = found
        return self._settle(question, found)

    def _with_variables(self, store: Store, ask: ProposalRequest) -> ProposalRequest:
        if not self._variables or "variables, by digest" in (ask.surroundings or {}):
            return ask
        key = load_private_key(make_private_directory(store.home) / KEY_FILE)
        shown = {
            name: hmac.new(key, text.encode("utf-8", "surrogatepass"), hashlib.sha256).hexdigest()[:DIGITS_SHOWN]
            for name, text in self._variables.items()
        }
        return replace(ask, surroundings={**(ask.surroundings or {}), "variables, by digest": shown})

    def _look(self, question: InboxQuestion) -> bool:
        store, known = self._open(), question.proposal
        if known is None:
            return False
        proposal = store.proposals.get(known.id)
        if proposal is not None and proposal.is_due(wall_time()):
            store.proposals.end_due(wall_time())
            AuditFile(store).catch_up_if_possible()
            proposal = store.proposals.get(known.id)
        if proposal is None:
            raise Failure("PROPOSAL_NOT_FOUND", f"there is no proposal {known.id!r}")
        question.proposal = proposal
        return self._settle(question, proposal)

    def _settle(self, question: InboxQuestion, proposal: Proposal) -> bool:
        """Report a question whose proposal is decided or whose time is over. Return whether it still waits."""
        if not question.is_wanted():
            self._tell(QuestionEnd(question))
            return False
        if proposal.is_open and monotonic_ns() < question.until_ns:
            return True
        if proposal.status.allows:
            try:
                self._open().proposals.use(proposal.id, proposal.action_hash, wall_time(), Runner(this_process()))
            except Failure as failure:
                if failure.code == "ALREADY_DECIDED":  # by an identical call: an approval is valid for one
                    return self._begin(question)
                raise
            AuditFile(self._open()).catch_up_if_possible()
        self._tell(QuestionEnd(question, is_granted=proposal.status.allows))
        return False

    def _record(self, proposal_id: str, outcome: ActionOutcome) -> None:
        with suppress(Failure, OSError):  # the action itself is done
            store = self._open()
            store.proposals.record_outcome(proposal_id, outcome)
            AuditFile(store).catch_up_if_possible()


# --- what is asked -----------------------------------------------------------------------------------------------


def _call_request(server: Mapping[str, object], call: CallToAsk) -> ProposalRequest:
    """Return the question whether a tool may be called once, bound to the server, the arguments and the definition."""
    tool, arguments, definition = call.tool, call.arguments, call.definition
    schema, hints, text = definition.get("inputSchema"), definition.get("annotations"), definition.get("description")
    described = f"\n\nThe server describes the tool:\n{text[:DESCRIPTION_SHOWN]}" if isinstance(text, str) else ""
    shown = sorted(f"{name}={each if isinstance(each, str) else canonical(each)}" for name, each in arguments.items())
    # The shortest first: a list shows the start of a title, and a path says more than the start of a text.
    title = " ".join([tool, *sorted(shown, key=len)])
    return ProposalRequest(
        Kind.OPERATION,
        _shorten(title),
        f"The rule '{call.rule}' asks about it.{described}",
        operation=tool,
        arguments=arguments,
        input_schema=schema if isinstance(schema, dict) and len(canonical(schema)) <= LONGEST_SCHEMA else None,
        policy=Policy(destructive=isinstance(hints, dict) and hints.get("destructiveHint") is True),
        surroundings={
            **server,
            "definition of the tool": f"sha256 {digest_of(definition)}",
            **({"other parameters": call.others} if call.others else {}),
            **NOT_BOUND,
        },
        dispatched=True,
    )


def _change_request(server: Mapping[str, object], lock: str, change: Change) -> ProposalRequest:
    """Return the question whether a changed definition may be pinned."""
    return ProposalRequest(
        Kind.OPERATION,
        _shorten(f"Accept that the {change.kind.noun} {change.name} {change.what}"),
        "\n".join(change.lines()),
        operation=f"pin {change.kind.noun} {change.name}",
        surroundings={
            **server,
            "lock file": lock,
            "before": None if change.before is None else f"sha256 {digest_of(change.before)}",
            "now": None if change.now is None else f"sha256 {digest_of(change.now)}",
            "difference": change.lines(),
        },
        dispatched=True,
    )


def _shorten(title: str) -> str:
    title = " ".join(title.split())
    return title if len(title) <= TITLE_LIMIT else title[: TITLE_LIMIT - 1] + "…"
