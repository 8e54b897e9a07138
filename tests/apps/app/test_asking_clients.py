"""Clients that can ask their own person: that is one more way to decide where the server allows it, never for what is
destructive, and the trail says through which client it came."""

import asyncio
import os
from pathlib import Path
from typing import Any

import pytest
from mcp import Client, StdioServerParameters
from mcp_types import ElicitRequestParams, ElicitResult

from shotclock.core.proposal import ProposalStatus
from shotclock.store.store import Store
from tests.apps.app.conftest import Home, lines_of
from tests.apps.server import client as mcp
from tests.apps.server.client import envelope_in
from tests.warm import starting_warm

pytestmark = [pytest.mark.usefixtures("no_survivors"), pytest.mark.slow]

TARGET = "tests.apps.app.programs.guarded:app"


@pytest.fixture(autouse=True)
def budget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOTCLOCK_RESPONSE_TIMEOUT", "1s")


class Person:
    """Answers what the client asks."""

    def __init__(self, action: str, **content: Any) -> None:
        self.result = ElicitResult(action=action, content=content or None)  # type: ignore[arg-type]
        self.asked: list[ElicitRequestParams] = []

    async def __call__(self, context: Any, params: ElicitRequestParams) -> ElicitResult:
        self.asked.append(params)
        return self.result


ALLOWED = ("--elicitation",)


def call(
    person: Person, mode: str, tool: str, transport: str = "stdio", options: Any = ALLOWED, **arguments: Any
) -> Any:
    async def scenario() -> Any:
        if transport == "http":
            with mcp.http_server(*options, target=TARGET) as (url, _):
                async with Client(url, mode=mode, elicitation_callback=person) as client:
                    return envelope_in(await client.call_tool(tool, arguments))
        argv = mcp.command(TARGET, *options)
        parameters = StdioServerParameters(command=argv[0], args=argv[1:], env=dict(os.environ), cwd=mcp.ROOT)
        with starting_warm():
            async with Client(parameters, mode=mode, elicitation_callback=person) as client:
                return envelope_in(await client.call_tool(tool, arguments))

    return asyncio.run(asyncio.wait_for(scenario(), 60))


def statuses(home: Home) -> list[str]:
    with Store.open(home.path) as store:
        return [proposal.status.value for proposal in store.proposals.list()]


@pytest.mark.parametrize("mode", [mcp.MODERN, mcp.LEGACY])
def test_the_person_at_the_client_approves_and_it_runs(mode: str, home: Home, tmp_path: Path) -> None:
    person = Person("accept", decision="approve", notes="go on")
    envelope = call(person, mode, "deploy", folder=str(tmp_path), service="web", justification="it is time")
    assert envelope["ok"] and envelope["data"]["service"] == "web"
    assert lines_of(tmp_path / "done") == ["deploy web 1"]
    [asked] = person.asked
    with Store.open(home.path) as store:
        [proposal] = store.proposals.list()
        assert proposal.status is ProposalStatus.APPROVED
        assert proposal.notes == "go on" and proposal.decided_by != proposal.asked_by
        whole = store.proposals.get(proposal.id)
        assert whole is not None and asked.message == f"{whole.ask.text}\n\nThe agent says: it is time"
        assert "replicas: 1" in whole.ask.text  # which nobody said
        # The trail tells it from a decision in the inbox.
        assert proposal.decided_via == "MCP client mcp (elicitation)"
        [entry] = [entry for entry in store.audit.of(proposal.id) if entry.action == "approved"]
        assert entry.details["via"] == "MCP client mcp (elicitation)"


@pytest.mark.parametrize("mode", [mcp.MODERN, mcp.LEGACY])
def test_a_client_is_not_asked_unless_somebody_has_allowed_it(mode: str, home: Home, tmp_path: Path) -> None:
    person = Person("accept", decision="approve")
    envelope = call(person, mode, "deploy", options=(), folder=str(tmp_path), service="web")
    assert envelope["data"]["status"] == "pending" and person.asked == [] and statuses(home) == ["pending"]
    assert lines_of(tmp_path / "done") == []


def test_what_cannot_be_shown_whole_at_the_client_is_left_to_the_inbox(home: Home, tmp_path: Path) -> None:
    person = Person("accept", decision="approve")
    envelope = call(person, mcp.LEGACY, "deploy", folder=str(tmp_path), service="w" * 5_000)
    assert envelope["data"]["status"] == "pending" and person.asked == []


@pytest.mark.parametrize(
    ("person", "mode"), [(Person("decline"), mcp.LEGACY), (Person("accept", decision="reject"), mcp.MODERN)]
)
def test_the_person_at_the_client_says_no(person: Person, mode: str, home: Home, tmp_path: Path) -> None:
    envelope = call(person, mode, "deploy", folder=str(tmp_path), service="web")
    assert envelope["error"]["code"] == "PROPOSAL_REJECTED" and statuses(home) == ["rejected"]
    assert lines_of(tmp_path / "done") == []


@pytest.mark.parametrize("mode", [mcp.MODERN, mcp.LEGACY])
def test_a_question_that_is_put_off_stays_in_the_inbox(mode: str, home: Home, tmp_path: Path) -> None:
    person = Person("cancel")
    envelope = call(person, mode, "deploy", folder=str(tmp_path), service="web")
    assert envelope["data"]["status"] == "pending" and statuses(home) == ["pending"]
    assert len(person.asked) == 1


def test_a_question_is_answered_at_the_client(home: Home) -> None:
    person = Person("accept", answer="west")
    envelope = call(person, mcp.MODERN, "propose", title="Which way?", justification="lost", choices=["east", "west"])
    assert envelope["data"]["status"] == "approved" and envelope["data"]["answer"] == "west"


@pytest.mark.parametrize("mode", [mcp.MODERN, mcp.LEGACY])
def test_an_agent_that_comes_over_http_is_not_asked_about_its_own_wishes(mode: str, home: Home, tmp_path: Path) -> None:
    person = Person("accept", decision="approve")
    envelope = call(person, mode, "deploy", transport="http", folder=str(tmp_path), service="web")
    assert envelope["data"]["status"] == "pending" and person.asked == []
    assert lines_of(tmp_path / "done") == []


def test_what_is_not_for_this_person_to_decide_is_not_asked(home: Home, tmp_path: Path) -> None:
    person = Person("accept", decision="approve")
    envelope = call(person, mcp.MODERN, "slow", folder=str(tmp_path))  # only ada decides that
    assert envelope["data"]["status"] == "pending" and person.asked == []


@pytest.mark.parametrize("mode", [mcp.MODERN, mcp.LEGACY])
def test_what_is_destructive_is_never_asked_at_the_client(mode: str, home: Home, tmp_path: Path) -> None:
    person = Person("accept", decision="approve", confirmation="guarded/wipe")
    call(person, mode, "wipe", folder=str(tmp_path))
    assert person.asked == [] and statuses(home) == ["pending"] and lines_of(tmp_path / "done") == []
