"""The inbox as surfaces use it: propose, wait, decide, and be told in time."""

import asyncio
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from shotclock.core.errors import Failure
from shotclock.core.proposal import (
    STILL_QUEUED,
    Confirmation,
    Decision,
    Kind,
    Proposal,
    ProposalRequest,
    ProposalStatus,
    ProposedFile,
)
from shotclock.core.value_types import replace
from shotclock.people import inbox as inbox_module
from shotclock.people.inbox import Inbox, Reminder
from shotclock.people.proposal_checks import FILE_LIMIT
from shotclock.store.proposals import NewProposal, Proposals
from shotclock.store.store import DAY_MS, Store
from tests.people.work import (  # fmt: skip
    AGENT,
    ANN,
    APPROVE,
    BOB,
    REJECT,
    WITHIN_S,
    bounded,
    code_of,
    opened,
    operation,
    question,
    until,
    wall_now,
)
from tests.store.locked import LONG_S, held

EXPIRED, PENDING = ProposalStatus.EXPIRED, ProposalStatus.PENDING


def test_an_approval_reaches_the_one_who_waits(home: Path):
    async def work():
        async with opened(home) as inbox, opened(home) as elsewhere:
            made = await inbox.propose(operation(), AGENT)
            waiting = asyncio.create_task(inbox.wait(made.id, 20_000))
            await asyncio.sleep(0)
            await elsewhere.decide(made.id, APPROVE, ANN)
            return (await waiting).as_result()

    result = bounded(work)
    assert (result["status"], result["notes"], result["decided_by"]) == ("approved", "go", "ann")


def test_whoever_is_cancelled_while_a_proposal_is_written_is_told_of_it_or_it_is_withdrawn(
    home: Path, monkeypatch: pytest.MonkeyPatch
):
    """A stopped server names it in its answer, and no question about overtime outlives its step."""
    begun, go = threading.Event(), threading.Event()
    write = Proposals.attach_or_create_all

    def write_later(*given: Any) -> Any:
        begun.set()
        assert go.wait(WITHIN_S)
        return write(*given)

    monkeypatch.setattr(Proposals, "attach_or_create_all", write_later)

    found: list[Proposal] = []

    async def cancel(inbox: Inbox, **options: bool) -> asyncio.Task[Any]:
        begun.clear()
        go.clear()
        writing = asyncio.create_task(
            inbox.propose(question("Being written?"), AGENT, on_found=found.append, **options)
        )
        await until(begun.is_set)
        in_line = asyncio.create_task(inbox.propose(question("In line?"), AGENT, on_found=found.append, **options))
        await asyncio.sleep(0)
        for task in (writing, in_line):
            task.cancel()
            await asyncio.sleep(0)
        go.set()
        await asyncio.wait([writing, in_line], timeout=WITHIN_S)
        with pytest.raises(asyncio.CancelledError):
            in_line.result()
        return writing

    async def work():
        async with opened(home) as inbox:
            with pytest.raises(asyncio.CancelledError):
                (await cancel(inbox)).result()
            (listed,) = await inbox.list()
            assert listed.status is PENDING and [each.id for each in found] == [listed.id]
            await inbox.withdraw(listed.id, AGENT)
        async with opened(home) as inbox:  # which is closed at once
            with pytest.raises(asyncio.CancelledError):
                (await cancel(inbox, outlives_asker=False)).result()
        async with opened(home) as inbox:
            return {summary.status for summary in await inbox.list()}, len(await inbox.list())

    assert bounded(work) == ({ProposalStatus.WITHDRAWN}, 2)


def test_what_is_too_old_goes_when_the_inbox_has_run_for_a_while_or_ends(home: Path, monkeypatch: pytest.MonkeyPatch):
    with Store.open(home) as store:
        for name in ("first", "second"):
            long_ago = wall_now() - 1000 * DAY_MS
            store.proposals.attach_or_create_all([NewProposal(name, operation(ttl_ms=1000), name)], long_ago)
            store.proposals.end_due(long_ago + 2000)

    async def work():
        async with opened(home) as inbox:
            await inbox.propose(operation(1), AGENT)
            await inbox.history("first")  # behind it on the thread of the inbox
            seen = [summary.id for summary in await inbox.list(ended=True)]
        async with opened(home) as inbox:
            return seen, [summary.id for summary in await inbox.list(ended=True)]

    assert bounded(work) == (["second", "first"], []), "not with the first call, but at the end"
    with Store.open(home) as store:
        assert store.begin_pruning(wall_now(), 0)
        store.proposals.attach_or_create_all([NewProposal("third", operation(2, ttl_ms=1000), "x")], long_ago)
        store.proposals.end_due(long_ago + 2000)
        store.prune_again_in(wall_now(), DAY_MS, 0)
    monkeypatch.setattr(inbox_module, "PRUNE_AFTER_MS", 0)

    async def long_lived():
        async with opened(home) as inbox:
            await inbox.propose(operation(3), AGENT)
            while await inbox.get("third") is not None:  # bounded by the whole
                await asyncio.sleep(0.01)

    bounded(long_lived)


@pytest.mark.slow
def test_proposals_decisions_and_outcomes_wait_while_the_store_is_locked_for_twelve_seconds(home: Path):
    async def work():
        async with opened(home) as inbox, opened(home) as elsewhere:
            before = await inbox.propose(operation(), AGENT)
            waiting = asyncio.create_task(inbox.wait(before.id, 60_000))
            with held(home) as enough:
                began = time.monotonic()
                proposing = asyncio.create_task(inbox.propose(question(), AGENT))
                deciding = asyncio.create_task(elsewhere.decide(before.id, APPROVE, ANN))
                await asyncio.to_thread(enough.wait, LONG_S - 1)
                assert not (proposing.done() or deciding.done()) and time.monotonic() - began >= LONG_S - 1.1
                await asyncio.wait([proposing, deciding], timeout=WITHIN_S)
                assert (await waiting).status is ProposalStatus.APPROVED
                made = await proposing
            assert await inbox.use(before.id, before.action_hash)
            with held(home, for_s=1.0):
                inbox.record_outcome(before.id, None)
        async with opened(home) as later:
            done = await later.get(before.id)
            assert done.outcome is not None and done.outcome.ok
            assert [each.id for each in await later.list(status=PENDING)] == [made.id]
            assert await later.verify_audit() == []

    bounded(work, 90)


def test_nobody_answers_and_the_proposal_remains_queued(home: Path):
    async def work():
        async with opened(home) as inbox:
            made = await inbox.propose(operation(), AGENT)
            began = time.monotonic()
            seen = await inbox.wait(made.id, 200)
            return seen, time.monotonic() - began, await inbox.list(status=PENDING)

    seen, took_s, queued = bounded(work)
    assert seen.as_result()["notes"] == STILL_QUEUED
    assert 0.2 <= took_s < 6
    assert [each.id for each in queued] == [seen.id]


def test_a_late_approval_is_returned_at_once_to_the_identical_call(home: Path):
    async def work():
        async with opened(home) as inbox:
            made = await inbox.propose(operation(), AGENT)
            assert (await inbox.wait(made.id, 0)).is_open
        async with opened(home) as elsewhere:
            await elsewhere.decide(made.id, APPROVE, ANN)
        async with opened(home) as inbox:
            again = await inbox.propose(operation(), AGENT)
            began = time.monotonic()
            waited = await inbox.wait(again.id, 20_000)
            return made, again, waited, time.monotonic() - began

    made, again, waited, took_s = bounded(work)
    assert made.id == again.id == waited.id
    assert again.status is waited.status is ProposalStatus.APPROVED
    assert took_s < 5


def test_an_approval_lets_one_pass(home: Path):
    async def work():
        async with opened(home) as inbox, opened(home) as elsewhere:
            made = await inbox.propose(operation(), AGENT)
            assert not await inbox.use(made.id, made.action_hash), "nobody has approved it"
            await inbox.decide(made.id, APPROVE, ANN)
            assert not await inbox.use(made.id, operation(1).action_hash)
            tries = await asyncio.gather(*(i.use(made.id, made.action_hash) for i in (inbox, elsewhere) * 5))
            assert sum(tries) == 1
            assert await code_of(inbox.use("p-none", made.action_hash)) == "PROPOSAL_NOT_FOUND"
            return made, await inbox.propose(operation(), AGENT)

    made, again = bounded(work)
    assert again.id != made.id and again.is_open


def test_expired_is_said_to_whoever_waits_looks_lists_or_decides_and_is_never_rejected(home: Path):
    async def work():
        async with opened(home) as inbox:
            waited = await inbox.propose(operation(1, ttl_ms=150), AGENT)
            assert (await inbox.wait(waited.id, 20_000)).status is EXPIRED
            looked, listed, decided = [
                await inbox.propose(operation(n, ttl_ms=50), AGENT) for n in (2, 3, 4)
            ]  # fmt: skip
            await asyncio.sleep(0.06)
            assert (await inbox.get(looked.id)).status is EXPIRED
            assert await code_of(inbox.decide(decided.id, REJECT, ANN)) == "PROPOSAL_EXPIRED"
            assert listed.id in [each.id for each in await inbox.list(status=EXPIRED)]
            assert await inbox.list(status=PENDING) == await inbox.list(status=ProposalStatus.REJECTED) == []
            return [(await inbox.wait(each.id, 0)).as_result()["status"] for each in (waited, looked, listed, decided)]

    assert bounded(work) == ["expired"] * 4


@pytest.mark.slow
def test_an_extension_by_somebody_else_keeps_those_who_wait_waiting(home: Path):
    async def work():
        async with opened(home) as inbox, opened(home) as elsewhere:
            made = await inbox.propose(operation(ttl_ms=1_000), AGENT)
            waiting = asyncio.create_task(inbox.wait(made.id, 20_000))
            extended = await elsewhere.extend(made.id, 60_000, ANN)
            assert extended.expires_at == made.expires_at + 60_000
            done, _ = await asyncio.wait([waiting], timeout=1.2)
            assert not done
            await elsewhere.decide(made.id, APPROVE, ANN)
            return await waiting

    assert bounded(work).status is ProposalStatus.APPROVED


def test_agents_never_decide_nor_extend_not_even_their_own(home: Path):
    async def work():
        async with opened(home) as inbox:
            made = await inbox.propose(operation(), AGENT)
            assert await code_of(inbox.decide(made.id, APPROVE, AGENT)) == "NOT_ALLOWED"
            assert await code_of(inbox.decide(made.id, REJECT, AGENT)) == "NOT_ALLOWED"
            assert await code_of(inbox.extend(made.id, 1000, AGENT)) == "NOT_ALLOWED"
            assert await code_of(inbox.decide("p-none", APPROVE, AGENT)) == "NOT_ALLOWED", "nor learn what there is"
            return await inbox.get(made.id), made

    there, made = bounded(work)
    assert there == made


def test_only_the_asker_withdraws_and_whoever_waits_is_told(home: Path):
    async def work():
        async with opened(home) as inbox:
            made = await inbox.propose(operation(), AGENT)
            waiting = asyncio.create_task(inbox.wait(made.id, 20_000))
            assert await code_of(inbox.withdraw(made.id, ANN)) == "NOT_ALLOWED"
            await inbox.withdraw(made.id, AGENT)
            assert await code_of(inbox.decide(made.id, APPROVE, ANN)) == "PROPOSAL_WITHDRAWN"
            return await waiting

    assert bounded(work).status is ProposalStatus.WITHDRAWN


def test_of_two_operators_at_once_one_wins_and_the_other_is_told(home: Path):
    async def work():
        async with opened(home) as inbox, opened(home) as elsewhere:
            made = await inbox.propose(operation(), AGENT)
            return await asyncio.gather(
                inbox.decide(made.id, APPROVE, ANN), elsewhere.decide(made.id, REJECT, BOB), return_exceptions=True
            )

    found = bounded(work)
    (refused,) = [each for each in found if isinstance(each, Failure)]
    (won,) = [each for each in found if not isinstance(each, Failure)]
    assert refused.code == "ALREADY_DECIDED"
    assert refused.context["decided_by"] == won.decided_by and refused.context["status"] == won.status.value


def test_who_may_decide_is_looked_at_before_what_and_what_became_of_it_before_mistakes(home: Path):
    async def work():
        async with opened(home) as inbox:
            wrong = Decision(ProposalStatus.MODIFIED)
            made = await inbox.propose(operation(deciders=("ann",)), AGENT)
            assert await code_of(inbox.decide(made.id, wrong, BOB)) == "NOT_ALLOWED"
            assert await code_of(inbox.decide(made.id, wrong, ANN)) == "ARG_ERROR"
            assert (
                await code_of(inbox.decide(made.id, APPROVE, ANN, confirmation=Confirmation("x"))) == "ACTION_CHANGED"
            )
            await inbox.decide(made.id, APPROVE, ANN, confirmation=Confirmation(made.action_hash))
            assert await code_of(inbox.decide(made.id, wrong, ANN)) == "ALREADY_DECIDED"
            assert await code_of(inbox.decide("p-none", APPROVE, ANN)) == "PROPOSAL_NOT_FOUND"
            assert await code_of(inbox.wait("p-none", 1000)) == "PROPOSAL_NOT_FOUND"
            assert await inbox.get("p-none") is None

    bounded(work)


def test_a_mistaken_proposal_is_refused_by_itself_and_keys_are_kept_apart(home: Path):
    async def work():
        async with opened(home) as inbox:
            good, bad, reused = await asyncio.gather(
                inbox.propose(operation(1), AGENT, key="k"),
                inbox.propose(replace(operation(2), title=""), AGENT),
                inbox.propose(operation(3), AGENT, key="k"),
                return_exceptions=True,
            )
            assert good.is_open
            assert (bad.code, bad.context["errors"][0]["field"]) == ("ARG_ERROR", "title")
            assert (reused.code, reused.context["proposal_id"]) == ("KEY_REUSED", good.id)
            assert await code_of(inbox.propose(operation(4), AGENT, key="")) == "ARG_ERROR"
            return await inbox.list()

    assert len(bounded(work)) == 1


def test_the_largest_file_goes_through(home: Path):
    async def work():
        async with opened(home) as inbox:
            ask = ProposalRequest(
                Kind.FILE, "large", file=ProposedFile("x", "é" * (FILE_LIMIT // 2), "\x00" * FILE_LIMIT)
            )
            made = await inbox.propose(ask, AGENT)
            await inbox.decide(made.id, Decision(ProposalStatus.MODIFIED, file_text="\n" * FILE_LIMIT), ANN)
            return (await inbox.wait(made.id, 1000)).as_result(), await inbox.verify_audit()

    result, problems = bounded(work)
    assert result["file"]["text"] == "\n" * FILE_LIMIT and problems == []


def test_ids_can_be_typed(home: Path):
    async def work():
        async with opened(home) as inbox:
            return [(await inbox.propose(question(str(n)), AGENT)).id for n in range(20)]

    ids = bounded(work)
    assert len(set(ids)) == 20
    for id in ids:
        assert len(id) == 12 and id.startswith("p-") and set(id[2:]) <= set("abcdefghijklmnopqrstuvwxyz234567")


# --- changes --------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_watcher_sees_every_proposal_as_it_is_now_reminders_included_and_goes_on_where_it_was(home: Path):
    async def work():
        async with opened(home) as inbox, opened(home) as elsewhere:
            seen = []

            async def watch(after: int | None, count: int) -> None:
                async for change in inbox.changes(after):
                    seen.append(change)
                    if len(seen) >= count:
                        return

            before = await inbox.propose(operation(0), AGENT)
            watching = asyncio.create_task(watch(0, 1))
            await watching
            assert seen.pop() == before.summary
            watching = asyncio.create_task(watch(before.seq, 4))
            made = await elsewhere.propose(operation(1, ttl_ms=2_000, remind_ms=1_500), AGENT)
            await until(lambda: len(seen) == 3)
            decided = await elsewhere.decide(before.id, APPROVE, ANN)
            await watching
            assert seen[0] == made.summary
            assert isinstance(seen[1], Reminder) and seen[1].proposal.id == made.id and seen[1].proposal.is_open
            assert seen[2].id == made.id and seen[2].status is EXPIRED
            assert seen[3] == decided.summary
            assert [getattr(c, "proposal", c).seq for c in seen] == sorted(getattr(c, "proposal", c).seq for c in seen)

    bounded(work)


def test_a_watcher_without_a_beginning_sees_only_what_follows_and_ends_with_the_inbox(home: Path):
    async def work():
        async with opened(home) as elsewhere:
            async with opened(home) as inbox:
                await inbox.propose(operation(0), AGENT)
                seen = []

                async def watch() -> None:
                    async for change in inbox.changes():
                        seen.append(change.id)

                watching = asyncio.create_task(watch())
                ids = []
                while not seen:  # from which moment on it watches nobody can say
                    ids.append((await elsewhere.propose(operation(len(ids) + 1), AGENT)).id)
                    await asyncio.sleep(0.02)
            await asyncio.wait_for(watching, 5)
            assert seen and set(seen) <= set(ids)

    bounded(work)


# --- closing and trouble --------------------------------------------------------------------------


def test_closing_answers_those_who_wait_and_refuses_those_who_come(home: Path):
    async def work():
        with Store.open(home) as store:
            inbox = Inbox(store)
            made = await inbox.propose(operation(), AGENT)
            waiting = [asyncio.create_task(inbox.wait(made.id, 60_000)) for _ in range(3)]
            await inbox.get(made.id)
            await inbox.close()
            await inbox.close()
            assert [each.status for each in await asyncio.gather(*waiting)] == [PENDING] * 3
            for late in (inbox.get(made.id), inbox.propose(operation(), AGENT), inbox.wait(made.id, 1000)):
                assert await code_of(late) == "SHUTTING_DOWN"

    bounded(work)


@pytest.mark.slow
def test_a_caller_that_gives_up_leaves_nothing_behind(home: Path):
    async def work():
        async with opened(home) as inbox:
            made = await inbox.propose(operation(), AGENT)
            waiting = asyncio.create_task(inbox.wait(made.id, 60_000))
            await until(lambda: inbox._watcher._thread is not None)
            waiting.cancel()
            await asyncio.wait([waiting])
            assert waiting.cancelled() and not inbox._watcher._waiters
            await until(lambda: inbox._watcher._thread is None)

    bounded(work)


def test_several_event_loops_may_use_one_inbox(home: Path):
    with Store.open(home) as store:
        inbox = Inbox(store)
        made = bounded(lambda: inbox.propose(operation(), AGENT))

        async def both():
            waiting = asyncio.create_task(inbox.wait(made.id, 20_000))
            await asyncio.sleep(0)
            await asyncio.to_thread(bounded, lambda: inbox.decide(made.id, APPROVE, ANN))
            return await waiting

        assert bounded(both).status is ProposalStatus.APPROVED
        bounded(inbox.close)


def test_waiting_ends_in_time_when_the_store_breaks_meanwhile(home: Path):
    async def work():
        async with opened(home) as inbox:
            made = await inbox.propose(operation(), AGENT)
            waiting = asyncio.create_task(inbox.wait(made.id, 400))
            await until(lambda: inbox._watcher._thread is not None)
            await inbox.get(made.id)  # behind its reading
            (home / "shotclock.db").rename(home / "moved.db")
            began = time.monotonic()
            seen = await asyncio.wait_for(waiting, WITHIN_S)
            (home / "moved.db").rename(home / "shotclock.db")
            return seen, time.monotonic() - began

    seen, took_s = bounded(work)
    assert seen.is_open and took_s < 5
