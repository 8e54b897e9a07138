"""Whose jobs, keys and answers are: an agent has its own, and those of others are not there."""

import asyncio
import json
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from mcp import Client
from mcp.client.streamable_http import streamable_http_client
from mcp.shared._httpx_utils import create_mcp_http_client

from shotclock.calls.principal import Principal, Role
from shotclock.core.limits import WallTime
from shotclock.people.access import Access
from shotclock.store.store import Store
from tests.apps.server import client as mcp
from tests.apps.server.client import envelope_in

from .conftest import Home, lines_of

pytestmark = [pytest.mark.usefixtures("no_survivors", "warm_starts"), pytest.mark.slow]

TARGET = "tests.apps.app.programs.owned:app"
KEY = "shotclock.dev/idempotencyKey"
BUDGET = "shotclock.dev/budgetMs"


@pytest.fixture
def tokens(home: Home) -> dict[str, str]:
    roles = {"alice": Role.AGENT, "bob": Role.AGENT, "carol": Role.OPERATOR}
    with Store.open(home.path) as store:
        now = WallTime.of_ns(time.time_ns())
        return {name: Access(store).issue(name, role, Principal.local(), now).text for name, role in roles.items()}


@pytest.fixture
def url(home: Home, tokens: dict[str, str]) -> Iterator[str]:
    with mcp.http_server(target=TARGET) as (url, _):
        yield url


@asynccontextmanager
async def connected(url: str, token: str) -> AsyncIterator[Client]:
    async with create_mcp_http_client({"Authorization": f"Bearer {token}"}) as http:
        async with Client(streamable_http_client(url, http_client=http), read_timeout_seconds=30) as client:
            yield client


async def called(client: Client, tool: str, arguments: dict[str, Any], **meta: Any) -> Any:
    return envelope_in(await client.call_tool(tool, arguments, meta=meta or None))


def test_an_agents_job_is_not_there_for_another_and_operators_see_all(url: str, tokens: dict[str, str]) -> None:
    async def scenario() -> None:
        async with (
            connected(url, tokens["alice"]) as alice,
            connected(url, tokens["bob"]) as bob,
            connected(url, tokens["carol"]) as carol,
        ):
            work = {"seconds": 30.0}
            started = await called(alice, "once", work, **{BUDGET: 300})
            id = started["data"]["job_id"]
            for action in ("status", "wait", "cancel"):
                for known in (id, id[:6]):
                    refused = await called(bob, "job", {"action": action, "job_id": known, "wait_ms": 100})
                    assert refused["error"]["code"] == "JOB_NOT_FOUND", refused
            assert (await called(bob, "job", {"action": "list"}))["data"]["jobs"] == []
            for whose in (alice, carol):
                [job] = (await called(whose, "job", {"action": "list"}))["data"]["jobs"]
                assert (job["job_id"], job["status"], job["owner"]) == (id, "running", "alice")
            # The same call of another is other work.
            other = await called(bob, "once", work, **{BUDGET: 300})
            assert other["data"]["job_id"] != id
            again = await called(alice, "once", work, **{BUDGET: 300})
            assert again["data"]["job_id"] == id
            for whose, which in ((alice, id), (carol, other["data"]["job_id"])):
                ended = await called(whose, "job", {"action": "cancel", "job_id": which})
                assert ended["data"]["status"] == "cancelled", ended

    asyncio.run(asyncio.wait_for(scenario(), 90))
    listed = subprocess.run(
        [sys.executable, "-m", "shotclock", "job", "list", "--json"], capture_output=True, check=True, timeout=60
    )
    assert {job["owner"] for job in json.loads(listed.stdout)["data"]["jobs"]} == {"alice", "bob"}


def test_the_job_id_of_a_call_that_waits_for_a_person_is_known_to_its_owner_alone(
    url: str, tokens: dict[str, str]
) -> None:
    async def scenario() -> None:
        async with connected(url, tokens["alice"]) as alice, connected(url, tokens["bob"]) as bob:
            waiting = await called(alice, "gated", {}, **{BUDGET: 300})
            id = waiting["data"]["job_id"]
            for action in ("status", "wait", "cancel"):
                refused = await called(bob, "job", {"action": action, "job_id": id, "wait_ms": 100})
                assert refused["error"]["code"] == "JOB_NOT_FOUND", refused
            shown = await called(alice, "job", {"action": "status", "job_id": id})
            assert (shown["data"]["status"], shown["data"]["command"]) == ("running", "owned/gated"), shown
            ended = await called(alice, "job", {"action": "cancel", "job_id": id})
            assert ended["data"]["status"] == "cancelled", ended

    asyncio.run(asyncio.wait_for(scenario(), 90))


def test_a_key_is_its_owners_and_nobody_is_given_anothers_answer(
    url: str, tokens: dict[str, str], tmp_path: Path
) -> None:
    async def scenario() -> None:
        async with connected(url, tokens["alice"]) as alice, connected(url, tokens["bob"]) as bob:
            work = {"folder": str(tmp_path), "line": "x"}
            first = await called(alice, "plain", work, **{KEY: "k"})
            other = await called(bob, "plain", work, **{KEY: "k"})
            assert first["ok"] and other["ok"], (first, other)
            assert not any(each["code"] == "REPLAYED" for each in other["warnings"])
            # Nor can a key be taken away from others by using it first.
            changed = await called(bob, "plain", {**work, "line": "y"}, **{KEY: "alices-next"})
            assert changed["ok"]
            next_one = await called(alice, "plain", {**work, "line": "z"}, **{KEY: "alices-next"})
            assert next_one["ok"], next_one
            again = await called(alice, "plain", work, **{KEY: "k"})
            assert [each["code"] for each in again["warnings"]] == ["REPLAYED"]

    asyncio.run(asyncio.wait_for(scenario(), 90))
    assert lines_of(tmp_path / "plain") == ["x", "x", "y", "z"]
