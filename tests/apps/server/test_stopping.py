"""A server that is stopped while callers wait for a person or a job: each is told, and what they wait for goes on."""

import asyncio
import json
import threading
from pathlib import Path
from typing import Any

import pytest

from shotclock.apps.web.routes import Operators
from shotclock.calls.principal import Principal
from shotclock.core.proposal import Kind, ProposalRequest, ProposalStatus
from shotclock.people.inbox import Inbox
from shotclock.store.store import Store
from tests.apps.server.client import MODERN, TRANSPORTS, connected, envelope_in, http_server, run
from tests.calls.bounds import eventually, soon

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("no_survivors")]

APP = """
import time
from shotclock import App, Context

app = App("careful", default_timeout="30s", proposals=True)

@app.command(approval=True)
def delete(name: str) -> str:
    return name

@app.command(interruption=True, timeout="30s")
def index(ctx: Context) -> int:
    for number in range(50):
        ctx.progress(number, 50)
        time.sleep(0.1)
    return 50
"""
PROPOSAL = {"title": "May I?", "justification": "Because."}


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SHOTCLOCK_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture
def target(tmp_path: Path) -> str:
    (tmp_path / "careful.py").write_text(APP)
    return f"{tmp_path / 'careful.py'}:app"


def pending(home: Path) -> int:
    with Store.open(home) as store:
        return len(store.proposals.list(status=ProposalStatus.PENDING))


@pytest.mark.parametrize(("transport", "mode"), TRANSPORTS)
def test_whoever_waits_for_a_person_is_told_that_the_server_was_stopped_and_the_proposal_stays_queued(
    transport: str, mode: str, home: Path, target: str
) -> None:
    async def scenario() -> list[Any]:
        async with connected(transport, mode, target=target) as (client, server):
            calls = [
                asyncio.ensure_future(client.call_tool("delete", {"name": "a"})),
                asyncio.ensure_future(client.call_tool("propose", PROPOSAL)),
            ]
            await soon(lambda: pending(home) == 2, within=20)
            server.terminate()
            ended, _ = await asyncio.wait(calls, timeout=10)
            assert len(ended) == 2, "nobody was told"
            return [envelope_in(call.result()) for call in calls]

    deleted, proposed = run(scenario())
    for envelope in (deleted, proposed):
        assert (envelope["ok"], envelope["error"]["code"]) == (False, "CANCELLED"), envelope
        assert envelope["error"]["context"]["signal"] == "SIGTERM"
    assert deleted["meta"]["ending"] == "not_started"
    # Our own tool had begun: the proposal is there, and its answer names it.
    assert proposed["meta"]["ending"] == "cancelled"
    assert (proposed["data"]["status"], proposed["data"]["partial"]) == ("pending", True)
    assert pending(home) == 2
    with Store.open(home) as store:
        assert proposed["data"]["proposal_id"] in {each.id for each in store.proposals.list()}


def test_whoever_waits_for_a_job_is_told_how_to_go_on_with_it(home: Path, target: str) -> None:
    async def scenario() -> list[Any]:
        async with connected("http", MODERN, target=target) as (client, server):
            index = asyncio.ensure_future(client.call_tool("index", {}))
            jobs: list[Any] = []

            async def find_job() -> bool:
                listed = await client.call_tool("job", {"action": "list"})
                jobs[:] = envelope_in(listed)["data"]["jobs"]
                return bool(jobs)

            for _ in range(200):
                if await find_job():
                    break
                await asyncio.sleep(0.05)
            wait = asyncio.ensure_future(client.call_tool("job", {"action": "wait", "job_id": jobs[0]["job_id"]}))
            await asyncio.sleep(0.3)
            server.terminate()
            await asyncio.wait([index, wait], timeout=10)
            return [envelope_in(index.result()), envelope_in(wait.result())]

    indexed, waited = run(scenario())
    assert indexed["error"]["code"] == "INCOMPLETE"
    assert (waited["error"]["code"], waited["meta"]["ending"]) == ("CANCELLED", "cancelled")
    with Store.open(home) as store:
        eventually(lambda: not store.jobs.get(indexed["data"]["job_id"]).is_active, within=20)
        assert store.jobs.get(indexed["data"]["job_id"]).envelope["data"] == {"result": 50}


def test_whoever_waits_for_a_decision_over_the_api_is_told_that_it_is_pending(home: Path, target: str) -> None:
    import urllib.request

    with http_server(target=target) as (url, server):
        base = url.removesuffix("/mcp") + "/api/inbox"
        answers: list[Any] = []

        def ask(path: str, body: bytes | None) -> None:
            request = urllib.request.Request(f"{base}{path}", body, {"Content-Type": "application/json"})
            with urllib.request.urlopen(request, timeout=20) as response:
                answers.append((response.status, json.load(response)["data"]["status"]))

        propose = threading.Thread(target=ask, args=("", b'{"title": "May I?", "wait_ms": 20000}'))
        propose.start()
        eventually(lambda: pending(home) == 1, within=10)
        with Store.open(home) as store:
            (waiting,) = store.proposals.list()
        check = threading.Thread(target=ask, args=(f"/{waiting.id}/result?wait_ms=20000", None))
        check.start()
        eventually(lambda: len(server.net_connections("tcp")) > 2, within=10)
        server.terminate()
        for thread in (propose, check):
            thread.join(10)
        assert answers == [(202, "pending")] * 2
    assert pending(home) == 1


def test_what_is_proposed_over_the_api_while_the_server_leaves_is_answered_at_once(home: Path) -> None:
    """Its wait would begin after all the others were ended, and the server would be gone under it."""

    async def scenario() -> None:
        with Store.open(home) as store:
            inbox = Inbox(store)
            operators = Operators("careful", lambda: inbox, lambda: store)
            operators.end_waits()
            made = await inbox.propose(ProposalRequest(Kind.QUESTION, "May I?", ""), Principal.local())
            assert await asyncio.wait_for(operators._wait_for_decision(made, 20_000), 10) is made
            await inbox.close()

    run(scenario())
