"""The engine on Temporal, as `dispatch.engines` opens it by its URL. Only opening it imports the SDK."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from ..calls.principal import Principal
from ..core.errors import Failure
from ..core.proposal import Confirmation, Decision, Proposal
from ..store.audit import Entry
from ..store.store import Store
from .connection import Address, check_url, read_address, require_sdk

if TYPE_CHECKING:
    from ._engine import TemporalEngine
    from .front_end import FrontEnd
    from .step_tails import OnLines

__all__ = ["check_url", "open_front_end", "open_inbox", "open_runs", "read_address", "read_tails"]


def open_runs(on: Address, queue: str | None = None, heartbeat_ms: int | None = None) -> TemporalEngine:
    require_sdk()
    from ._engine import TemporalEngine

    return TemporalEngine(on, queue=queue, heartbeat_ms=heartbeat_ms)


def open_front_end(on: Address, store: Callable[[], Store]) -> FrontEnd:
    require_sdk()
    from .front_end import FrontEnd

    return FrontEnd(on, store)


async def read_tails(engine: TemporalEngine, run_id: str, on_lines: OnLines, *, follows: bool) -> None:
    """Pass on what the engine keeps of the output of a run; with `follows` until it has ended."""
    from .step_tails import RunTails

    await RunTails(engine, run_id, on_lines).read(follows=follows)


def open_inbox(on: Address) -> EngineInbox:
    return EngineInbox(open_runs(on))


class EngineInbox:
    """The open proposals of runs on Temporal: the part of an Inbox that shows and decides them."""

    def __init__(self, engine: TemporalEngine) -> None:
        self._engine = engine

    async def _find(self, id: str) -> tuple[str, Proposal]:
        """Return the run and its proposal. Raises Failure where it is decided or unknown."""
        if found := await self._engine.find_proposals(id):
            return found[0]
        await self._engine.refuse_decided(id)
        raise Failure("PROPOSAL_NOT_FOUND", f"there is no proposal {id!r}")

    async def get(self, id: str) -> Proposal:
        return (await self._find(id))[1]

    async def history(self, id: str) -> list[Entry]:
        return []  # the trail of a proposal is in the stores that handled it

    async def decide(
        self, id: str, decision: Decision, by: Principal, confirmation: Confirmation = Confirmation()
    ) -> Proposal:
        """Decide a proposal, which counts once its run has accepted it."""
        run_id, _ = await self._find(id)
        return await self._engine.decide(run_id, id, decision, by, confirmation)
