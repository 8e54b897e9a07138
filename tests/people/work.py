"""What the tests of the inbox have in common: people, asks, and an inbox that is closed again."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from shotclock.calls.principal import Principal, Role
from shotclock.core.errors import Failure
from shotclock.core.limits import WallTime
from shotclock.core.proposal import Decision, Kind, Policy, ProposalRequest, ProposalStatus
from shotclock.people.inbox import Inbox
from shotclock.store.store import Store

WITHIN_S = 30  # every test as a whole, and every wait in it; only something that hangs runs this out
AGENT = Principal("agent", Role.AGENT)
ANN = Principal("ann", Role.OPERATOR)
BOB = Principal("bob", Role.OPERATOR)
APPROVE = Decision(ProposalStatus.APPROVED, "go")
REJECT = Decision(ProposalStatus.REJECTED, "no")


def operation(number: int = 0, **policy: Any) -> ProposalRequest:
    return ProposalRequest(
        Kind.OPERATION, "Restart it", operation="ops/restart", arguments={"n": number}, policy=Policy(**policy)
    )  # fmt: skip


def question(title: str = "Why?", **policy: Any) -> ProposalRequest:
    return ProposalRequest(Kind.QUESTION, title, policy=Policy(**policy))


def wall_now() -> WallTime:
    return WallTime.of_ns(time.time_ns())


@asynccontextmanager
async def opened(home: Path) -> AsyncIterator[Inbox]:
    """An inbox with a store of its own, like that of another process."""
    with Store.open(home) as store:
        inbox = Inbox(store)
        try:
            yield inbox
        finally:
            await inbox.close()


def bounded(work: Callable[[], Awaitable[Any]], within_s: float = WITHIN_S) -> Any:
    async def main() -> Any:
        async with asyncio.timeout(within_s):
            return await work()

    return asyncio.run(main())


async def code_of(attempt: Awaitable[Any]) -> str:
    with pytest.raises(Failure) as refused:
        await attempt
    return refused.value.code


async def until(condition: Callable[[], bool]) -> None:
    give_up_at = time.monotonic() + WITHIN_S
    while not condition():
        assert time.monotonic() < give_up_at, "it did not come to that"
        await asyncio.sleep(0.005)
