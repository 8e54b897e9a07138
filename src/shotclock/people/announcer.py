"""Notifications of new proposals, sent by the process that asks, beside its wait for a decision.

A failure is an entry in the history of the proposal, where the operator sees it. It never fails the proposal.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress

from ..core.errors import Failure
from ..core.proposal import Proposal
from ..core.value_types import JsonObject
from ..core.visible_text import Redaction, one_line
from ..store.store import Store
from ..supervise.clock import wall_time
from .notify.entries import UserFile, read_user_file

AT_ONCE = 4  # proposals whose messages are sent at once; each message is a process
CLOSE_LIMIT_S = 5.0  # of one message; what has not begun by then is not sent
EVENT, NOTIFIER = "proposed", "(notify)"


class Announcer:
    """Sends the messages about new proposals of one store, on threads of its own."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._threads: ThreadPoolExecutor | None = None
        self._sending: dict[Future[None], str] = {}

    def announce(self, proposals: Iterable[Proposal]) -> None:
        """Begin to send the messages that the user's file asks for, without waiting. Called by one thread."""
        for proposal in proposals:
            try:
                users = read_user_file(os.environ)
                if users.entries_for(EVENT):
                    self._begin(proposal, users)
            except (Failure, RuntimeError) as error:  # the file has a mistake, or there are no more threads
                self._note(proposal.id, [str(error)])

    @property
    def is_sending(self) -> bool:
        return bool(self._sending)

    def _begin(self, proposal: Proposal, users: UserFile) -> None:
        self._threads = self._threads or ThreadPoolExecutor(AT_ONCE, thread_name_prefix="shotclock-notify")
        sent = self._threads.submit(self._send, proposal, users)
        self._sending[sent] = proposal.id
        sent.add_done_callback(lambda done: self._sending.pop(done, None))

    def close(self) -> None:
        """Wait, bounded, for the messages that are being sent."""
        if self._threads is None:
            return
        sending = dict(self._sending)
        unsent = [each for each in wait(sending, CLOSE_LIMIT_S).not_done if each.cancel()]
        self._threads.shutdown(wait=False)
        for each in unsent:
            self._note(sending[each], ["its process ended before the message was sent"])

    def _send(self, proposal: Proposal, users: UserFile) -> None:
        from .notify.delivery import deliver_and_wait  # most proposals send nothing, and need no runtime

        event = Redaction(os.environ).value(describe(proposal, users))
        unsent = deliver_and_wait(users.entries_for(EVENT), event, os.environ)
        if unsent:
            self._note(proposal.id, [f"{each.channel}: {each.reason}" for each in unsent])

    def _note(self, proposal_id: str, reasons: list[str]) -> None:
        with suppress(Failure):  # the store failed, or the proposal was deleted
            self._store.proposals.note(proposal_id, "not-notified", {"reasons": reasons}, wall_time(), NOTIFIER)


def describe(proposal: Proposal, users: UserFile) -> JsonObject:
    """Return the message about a proposal: its title and where to decide, nothing of its content."""
    asks = one_line(f"{proposal.asked_by} asks: {proposal.ask.title}", 300)
    link, command = users.link_to(proposal.id), f"shotclock inbox show {proposal.id}"
    return {
        "event": EVENT,
        "title": asks,
        "proposal_id": proposal.id,
        "asked_by": proposal.asked_by,
        "kind": proposal.ask.kind.value,
        "destructive": proposal.ask.policy.destructive,
        "expires_at": proposal.expires_at.iso(),
        "host": os.uname().nodename,
        "at": proposal.created_at.iso(),
        "command": command,
        "text": f"{asks}\n{command}",
        **({} if link is None else {"link": link}),
    }
