"""A person before the work: a command that declares `approval` runs only after somebody has said yes to exactly that.

    arguments are checked ── proposal ── approved ── spent by this one dispatch ── the work, whose clock starts now
                                 │
                                 └─ rejected, expired, still pending: an answer, and nothing has run

An approval lets one call pass. Of two identical calls that waited for the same one, the second asks again.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from ..core.arguments import to_jsonable
from ..core.catalogue import Catalogue, CommandSpec
from ..core.deadlines import NS_PER_MS, Deadline, reserve_ms_for
from ..core.effects import Ending
from ..core.envelope import Envelope, Problem
from ..core.proposals import Ask, Kind, ProposalStatus
from ..enforce.admission import Outcome
from ..enforce.clock import monotonic_ns
from .access import Principal
from .answers import outcome_of
from .budget import response_budget_ms
from .inbox import Inbox

TITLE_LENGTH = 200
Check = Callable[[CommandSpec, Mapping[str, object]], Awaitable[Envelope]]


@dataclass(frozen=True, slots=True)
class Passed:
    """Somebody said yes, perhaps to something else than was asked."""

    arguments: Mapping[str, object]
    waited_ms: int


class Approvals:
    """Raises Failure when it is made where the environment says nonsense about how long people are waited for."""

    def __init__(self, catalogue: Catalogue, inbox: Callable[[], Inbox], check: Check | None = None) -> None:
        """`check` looks at arguments without running anything, where that is possible."""
        self._check = check
        self._app = catalogue.name
        self._specs = {spec.name: spec for spec in catalogue.commands if spec.approval is not None}
        self._inbox = inbox
        self._budget_ms = response_budget_ms() if self._specs else 0

    def guards(self, name: str) -> bool:
        return name in self._specs

    async def ask(
        self,
        spec: CommandSpec,
        arguments: Mapping[str, object],
        by: Principal,
        *,
        key: str | None = None,
        justification: str = "",
        budget_ms: int | None = None,
        parent: Deadline | None = None,
    ) -> Passed | Outcome | Envelope:
        """An envelope where what the operator made of the arguments is refused; the approval is not spent then.

        Raises Failure (the store cannot be used) or NotSerializable (the arguments cannot be shown to anybody).
        """
        started_ns = monotonic_ns()
        wait_ms = self._patience_ms(budget_ms, parent, started_ns)
        ask = self._ask(spec, arguments, justification)
        inbox = self._inbox()
        while True:
            proposal = await inbox.propose(ask, by, key=key)
            waited_ms = (monotonic_ns() - started_ns) // NS_PER_MS
            if proposal.is_open:
                proposal = await inbox.wait(proposal.id, wait_ms - waited_ms)
                waited_ms = (monotonic_ns() - started_ns) // NS_PER_MS
            if not proposal.status.allows:
                return outcome_of(proposal, waited_ms, wait_ms)
            approved: dict[str, Any] = dict(proposal.arguments or {})
            if proposal.status is ProposalStatus.MODIFIED and (wrong := await self._wrong(spec, approved)) is not None:
                return wrong
            if await inbox.use(proposal.id, ask.action_hash):
                # As they were given, where nobody changed them: they may be more than JSON can say.
                as_given = arguments if proposal.status is ProposalStatus.APPROVED else approved
                return Passed(as_given, waited_ms)

    async def approve(
        self, name: str, arguments: Mapping[str, object], parent: Deadline | None
    ) -> Mapping[str, object] | Outcome:
        """For a call from inside another: the same gate, within the time that the outer one has left."""
        spec = self._specs[name]
        passed = await self._wrong(spec, arguments) or await self.ask(spec, arguments, Principal.local(), parent=parent)
        if isinstance(passed, Envelope):
            error = passed.error or {}
            return Outcome(Ending.NOT_STARTED, Problem(str(passed.code), str(error.get("message", "")), "validation"))
        return passed if isinstance(passed, Outcome) else passed.arguments

    async def _wrong(self, spec: CommandSpec, arguments: Mapping[str, object]) -> Envelope | None:
        if self._check is None:
            return None
        checked = await self._check(spec, arguments)
        return None if checked.ok else checked

    def _patience_ms(self, budget_ms: int | None, parent: Deadline | None, now_ns: int) -> int:
        limits = [self._budget_ms]
        if budget_ms is not None:
            limits.append(budget_ms)
        if parent is not None:
            remaining_ms = parent.remaining_ms(now_ns)
            limits.append(remaining_ms - reserve_ms_for(remaining_ms))
        return max(0, min(limits))

    def _ask(self, spec: CommandSpec, arguments: Mapping[str, object], justification: str) -> Ask:
        assert spec.approval is not None
        plain: dict[str, Any] = to_jsonable(dict(arguments))
        title = f"{self._app} {spec.name}" + "".join(f" {name}={value}" for name, value in plain.items())
        title = " ".join(title.split())
        return Ask(
            Kind.OPERATION,
            title if len(title) <= TITLE_LENGTH else title[: TITLE_LENGTH - 1] + "…",
            justification,
            operation=f"{self._app}/{spec.name}",
            arguments=plain,
            input_schema=spec.input_schema,
            policy=replace(spec.approval, destructive=spec.destructive or spec.approval.destructive),
        )
