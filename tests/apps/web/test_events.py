"""Streams of events whose readers do not read: what is read ahead for them is bounded, and so is our patience."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from shotclock.apps.web import routes
from shotclock.calls.principal import Principal, Role
from shotclock.core.proposal import Kind, ProposalRequest
from shotclock.people.auth import IS_STILL, PRINCIPAL
from shotclock.people.inbox import Inbox
from shotclock.store.store import Store
from tests.calls.bounds import run, soon

AGENT, OPERATOR = Principal("agent", Role.AGENT), Principal("olga", Role.OPERATOR)


def scope(principal: Principal) -> dict[str, Any]:
    return {
        "type": "http",
        "method": "GET",
        "path": "/",
        "query_string": b"after=0",
        "headers": [],
        PRINCIPAL: principal,
        IS_STILL: still,
    }


async def still() -> bool:
    return True


class Client:
    """On the other end of an ASGI application: takes what comes until it is told not to."""

    def __init__(self) -> None:
        self.taken = b""
        self.reads = asyncio.Event()
        self.gone = asyncio.Event()

    async def receive(self) -> dict[str, Any]:
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Any) -> None:
        if message["type"] == "http.response.body" and message.get("more_body"):
            await self.reads.wait()
        self.taken += message.get("body", b"")


@pytest.fixture
def inbox(tmp_path: Path) -> Any:
    with Store.open(tmp_path / "home") as store:
        yield Inbox(store)


async def proposed(inbox: Inbox, count: int) -> None:
    for number in range(count):
        await inbox.propose(ProposalRequest(Kind.QUESTION, f"Question {number}"), AGENT)


def test_a_reader_that_does_not_read_is_let_go_of_after_a_while(inbox: Inbox, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routes, "TAKEN_WITHIN_S", 0.2)

    async def scenario() -> None:
        client, streams = Client(), routes.Streams(lambda: inbox)
        await asyncio.wait_for(streams(scope(OPERATOR), client.receive, client.send), 10)
        assert client.taken == b""
        await inbox.close()

    run(scenario())


def test_a_reader_that_falls_behind_gets_all_of_it_once_it_reads(inbox: Inbox) -> None:
    async def scenario() -> None:
        client, streams = Client(), routes.Streams(lambda: inbox)
        await proposed(inbox, 30)
        reading = asyncio.ensure_future(streams(scope(OPERATOR), client.receive, client.send))
        client.reads.set()
        await soon(lambda: client.taken.count(b"event: proposal") == 30)
        began = asyncio.get_running_loop().time()
        streams.end()
        await asyncio.wait_for(reading, 10)
        assert asyncio.get_running_loop().time() - began < 5, "it ends when it is told to"
        await inbox.close()

    run(scenario())


def test_streams_end_when_their_readers_go_and_when_the_server_leaves(
    inbox: Inbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(routes, "HEARTBEAT_S", 0.05)
    monkeypatch.setattr(routes, "MOST_STREAMS_EACH", 2)

    async def scenario() -> None:
        streams = routes.Streams(lambda: inbox)
        clients = [Client() for _ in range(3)]
        for client in clients:
            client.reads.set()
        going, staying = (
            asyncio.ensure_future(streams(scope(OPERATOR), each.receive, each.send)) for each in clients[:2]
        )
        await proposed(inbox, 1)
        await soon(lambda: all(b"Question 0" in each.taken for each in clients[:2]))
        await soon(lambda: b"event: alive" in clients[0].taken)
        await asyncio.wait_for(streams(scope(OPERATOR), clients[2].receive, clients[2].send), 10)
        assert b"RATE_LIMITED" in clients[2].taken, "one too many"
        clients[0].gone.set()
        await asyncio.wait_for(going, 10)
        assert not staying.done()
        streams.end()
        await asyncio.wait_for(staying, 10)
        await inbox.close()

    run(scenario())
