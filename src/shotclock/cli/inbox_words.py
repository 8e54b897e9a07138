"""The words of `shotclock inbox`, for the parser and for whoever reads its help. Nothing here does anything."""

from __future__ import annotations

from typing import Annotated, Literal

from .words import Group, Parameter, Words

LISTED = 50
SERVED_AT = "127.0.0.1:8765"

_FLAG = Parameter(negative="", show_default=False)
_JSON = Annotated[
    bool, Parameter(negative="", show_default=False, help="The envelope alone on stdout, also on a terminal.")
]
_ID = Annotated[str | None, Parameter(name="proposal-id")]
_DURATION = Annotated[str | None, Parameter(metavar="D")]
_NOTES = Annotated[str, Parameter(metavar="TEXT", show_default=False)]
_FILE = Annotated[str | None, Parameter(metavar="FILE")]
_NAME = Annotated[str | None, Parameter(name="--as", metavar="NAME")]
_LIMIT = Annotated[int, Parameter(metavar="N")]
Status = Literal["pending", "approved", "modified", "rejected", "expired", "withdrawn"]

_EPILOGUE = """\
Off a terminal each prints one JSON envelope on stdout, `watch` a line of JSON for each change before it.

Exit codes: 0 done; 4 a person has to do this at a terminal; 5 there is no such proposal; 6 it was decided before, has
expired or was withdrawn; 7 it is not yours to decide.

`shotclock inbox VERB --help` says more about each."""
_ANSWERS = """\
Exit codes: 0 approved or modified, and nothing else; 14 nobody has decided yet, and it stays queued; 7 rejected; 6
expired or withdrawn; 11 too many are open, and this one was not proposed. So `shotclock inbox propose … && do-it` does
it only after somebody has said yes. data.status says the same in one word, data.notes is what the operator wrote."""
_USAGES = {
    "list": "[--all | --status STATUS]",
    "show": "ID",
    "approve": "ID [--notes TEXT] [--answer TEXT]",
    "modify": "ID [--file FILE] [--notes TEXT]",
    "reject": "ID [--notes TEXT]",
    "extend": "ID DURATION",
    "watch": "[--for DURATION]",
    "audit": "[ID | --head | --verify] [--anchor FILE]",
    "serve": "[--http HOST:PORT]",
    "propose": "--title TEXT [--file FILE [--current FILE]] [OPTIONS]",
    "check": "ID [--wait DURATION]",
    "withdraw": "ID",
}
VERBS = tuple(_USAGES)


def vocabulary() -> Words:
    words = Words(
        name="inbox",
        help="What waits for a person: agents propose, people decide, and nobody waits longer than they said.",
        usage="Usage: shotclock inbox VERB [OPTIONS]",
        epilogue=_EPILOGUE,
        usages={verb: f"Usage: shotclock inbox {verb} {usage}" for verb, usage in _USAGES.items()},
        epilogues={verb: _ANSWERS if verb in ("propose", "check") else "" for verb in VERBS},
        in_order=True,
    )
    _deciding(words, Group("Deciding", sort_key=1))
    _asking(words, Group("Asking", sort_key=2))
    return words


def _deciding(words: Words, group: Group) -> None:
    @words.command(name="list", group=group)
    def list_(
        *,
        all: Annotated[bool, _FLAG] = False,
        status: Annotated[Status | None, Parameter(metavar="STATUS")] = None,
        limit: _LIMIT = LISTED,
        json: _JSON = False,
    ) -> None:
        """List what waits for a decision; the one that changed last comes first.

        Parameters
        ----------
        all
            Also those that are decided, expired or withdrawn.
        status
            Only these: pending, approved, modified, rejected, expired or withdrawn.
        limit
            So many at most.
        """

    @words.command(group=group)
    def show(proposal_id: _ID = None, /, *, json: _JSON = False) -> None:
        """Show one proposal: what would be done, why, what would change in the file, and what became of it so far."""

    @words.command(group=group)
    def approve(
        proposal_id: _ID = None,
        /,
        *,
        notes: _NOTES = "",
        answer: Annotated[str | None, Parameter(metavar="TEXT")] = None,
        json: _JSON = False,
    ) -> None:
        """Say yes to it, as it is. What is destructive has to be confirmed by typing, at a terminal.

        Parameters
        ----------
        notes
            For whoever asked.
        answer
            To a question: one of its choices, or any text where it has none ("yes" if nothing is said).
        """

    @words.command(group=group)
    def modify(proposal_id: _ID = None, /, *, file: _FILE = None, notes: _NOTES = "", json: _JSON = False) -> None:
        """Say yes to something else: edit the proposed file, or the arguments (as JSON), and approve that.

        Parameters
        ----------
        file
            What it is to be is in this file. Without it, $VISUAL or $EDITOR is opened, at a terminal.
        notes
            For whoever asked.
        """

    @words.command(group=group)
    def reject(proposal_id: _ID = None, /, *, notes: _NOTES = "", json: _JSON = False) -> None:
        """Say no to it.

        Parameters
        ----------
        notes
            For whoever asked: why, and what would be better.
        """

    @words.command(group=group)
    def extend(
        proposal_id: _ID = None, by: Annotated[str | None, Parameter(name="by")] = None, /, *, json: _JSON = False
    ) -> None:
        """Let it stay open for longer, as in `shotclock inbox extend ID 2h`."""

    @words.command(group=group)
    def watch(*, for_: Annotated[str | None, Parameter(name="--for", metavar="D")] = None, json: _JSON = False) -> None:
        """Show what waits, and from then on every change and every reminder, until Ctrl-C.

        Parameters
        ----------
        for_
            Only for this long.
        """

    @words.command(group=group)
    def audit(
        proposal_id: _ID = None,
        /,
        *,
        verify: Annotated[bool, _FLAG] = False,
        head: Annotated[bool, _FLAG] = False,
        anchor: _FILE = None,
        limit: _LIMIT = LISTED,
        json: _JSON = False,
    ) -> None:
        """Show the last entries of the audit trail; of one proposal, all of them.

        Parameters
        ----------
        verify
            Whether the trail is whole: each entry that was removed, changed or put elsewhere is named (exit 1), and so
            is each proposal or token that is not what its entries say.
        head
            The end of the trail: how many entries there are, and the hash of the last one. Keep it elsewhere.
        anchor
            Append the head to this file. With --verify: check that the trail still has every head in this file.
        limit
            So many entries at most.
        """

    @words.command(group=group)
    def serve(
        *,
        http: Annotated[str, Parameter(metavar="HOST:PORT")] = SERVED_AT,
        require_token: Annotated[bool, _FLAG] = False,
        json: _JSON = False,
    ) -> None:
        """Serve the operators' page and its API, without an App, until Ctrl-C.

        Parameters
        ----------
        http
            On this address; port 0 is any free one.
        require_token
            Let nobody in without an access token, on this machine either.
        """


def _asking(words: Words, group: Group) -> None:
    @words.command(group=group)
    def propose(
        *,
        title: Annotated[str | None, Parameter(metavar="TEXT")] = None,
        file: _FILE = None,
        current: _FILE = None,
        choice: Annotated[list[str] | None, Parameter(metavar="TEXT", negative="")] = None,
        justification: Annotated[str, Parameter(metavar="TEXT", show_default=False)] = "",
        ttl: _DURATION = None,
        remind: _DURATION = None,
        destructive: Annotated[bool, _FLAG] = False,
        wait: _DURATION = None,
        idempotency_key: Annotated[str | None, Parameter(metavar="KEY")] = None,
        as_: _NAME = None,
        json: _JSON = False,
    ) -> None:
        """Ask a person, and wait for the decision, but not for long. The identical call later picks it up.

        Parameters
        ----------
        title
            What is proposed, or the question, in one line.
        file
            This file holds what is proposed. What is approved comes back in data.file; nothing is written.
        current
            The file it is to replace; the operator sees the difference.
        choice
            With a question: a possible answer; may be given several times.
        justification
            Why the operator should agree.
        ttl
            How long it stays open (a day, if nothing is said).
        remind
            So long before the end, whoever watches is reminded.
        destructive
            Approving it has to be confirmed by typing the title.
        wait
            How long to wait for the decision, instead of SHOTCLOCK_RESPONSE_TIMEOUT, else 30s; 0 does not wait.
        idempotency_key
            Calls with this key are one proposal. Without it, calls that propose the same are.
        as_
            Who asks; the user of this process, if nothing is said.
        """

    @words.command(group=group)
    def check(proposal_id: _ID = None, /, *, wait: _DURATION = None, json: _JSON = False) -> None:
        """Say how a proposal stands, and wait for its decision, but not for long.

        Parameters
        ----------
        wait
            How long, instead of SHOTCLOCK_RESPONSE_TIMEOUT, else 30s; 0 does not wait.
        """

    @words.command(group=group)
    def withdraw(proposal_id: _ID = None, /, *, as_: _NAME = None, json: _JSON = False) -> None:
        """Take a proposal back that nobody has decided yet.

        Parameters
        ----------
        as_
            Who asked, as it was said to propose.
        """
