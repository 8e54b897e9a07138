"""`graceful_stop` and `extend`: whoever made a call ends it early or gives it more time, and nobody else's."""

import asyncio
import json
import subprocess
import textwrap
from pathlib import Path
from typing import Any

import pytest
from mcp import Client

from shotclock.calls.principal import Principal, Role
from shotclock.people.access import Access
from shotclock.store.store import Store
from shotclock.supervise.clock import wall_time
from tests.apps.server.client import MODERN, NO_ANSWER_S, connected, envelope_in, envelope_of, http_server, run
from tests.command_line import SHOTCLOCK

pytestmark = [pytest.mark.usefixtures("no_survivors", "warm_starts"), pytest.mark.slow]

APP = """
import time
from pathlib import Path
from shotclock import App, Context

app = App("patient")

@app.command(timeout="8s")
def count(path: str, ctx: Context) -> dict:
    Path(path).touch()
    counted = 0
    while not ctx.stopping:
        counted += 1
        ctx.progress(counted)
        time.sleep(0.05)
    return {"counted": counted}

@app.command(timeout="90s")
def slow(path: str, ctx: Context) -> dict:
    return count(path, ctx)

@app.command(timeout="8s")
async def wait(path: str, ctx: Context) -> dict:
    import asyncio
    Path(path).touch()
    while not ctx.stopping:
        await asyncio.sleep(0.05)
    return {"waited": True}

@app.command(timeout="8s", interruption=True)
def long(path: str, ctx: Context) -> dict:
    return count(path, ctx)
"""


@pytest.fixture
def target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("SHOTCLOCK_HOME", str(tmp_path / "home"))
    (tmp_path / "patient.py").write_text(APP)
    return str(tmp_path / "patient.py")


async def up(path: Path) -> None:
    async with asyncio.timeout(NO_ANSWER_S):
        while not path.exists():
            await asyncio.sleep(0.02)


@pytest.mark.parametrize("command", ["count", "wait"])
def test_a_client_gives_its_call_more_time_and_then_ends_it_early(target: str, tmp_path: Path, command: str) -> None:
    async def scenario() -> None:
        async with connected("stdio", MODERN, target=target) as (client, _):
            calling = asyncio.ensure_future(envelope_of(client, command, {"path": str(tmp_path / "up")}))
            await up(tmp_path / "up")
            [extended] = (await envelope_of(client, "extend", {"by_ms": 60_000}))["data"]["extended"]
            assert (extended["name"], extended["timeout_ms"]) == (command, 68_000)
            by_id = {"request_id": extended["request_id"], "reason": "enough", "within_ms": 20_000}
            stopped = await envelope_of(client, "graceful_stop", by_id)
            assert stopped["data"]["stopping"][0]["winding_down"]["reason"] == "enough"
            envelope = await calling
            assert envelope["ok"] and envelope["data"], envelope
            assert [notice["code"] for notice in envelope["warnings"]] == ["WOUND_DOWN"]
            assert envelope["meta"]["overtime"]["granted_ms"] == 60_000
            again = await envelope_of(client, "graceful_stop")
            assert again["error"]["code"] == "CALL_NOT_FOUND" and again["meta"]["side_effects"] == "none"
            wrong = await envelope_of(client, "extend", {"by_ms": "soon", "step": "x"})
            assert {error["field"] for error in wrong["error"]["errors"]} == {"by_ms", "step"}

    run(scenario())


def test_a_job_is_extended_and_stopped_through_the_tools(target: str, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with connected("stdio", MODERN, target=target) as (client, _):
            path = str(tmp_path / "up")
            result = await client.call_tool("long", {"path": path}, meta={"shotclock.dev/budgetMs": 100})
            job_id = envelope_in(result)["data"]["job_id"]
            await up(tmp_path / "up")
            extended = await envelope_of(client, "extend", {"job_id": job_id, "by_ms": 30_000})
            assert extended["data"]["extended"][0]["timeout_ms"] == 38_000, extended
            assert (await envelope_of(client, "graceful_stop", {"job_id": job_id}))["ok"]
            waited = await envelope_of(client, "job", {"action": "wait", "job_id": job_id, "wait_ms": 20_000})
            assert waited["data"]["counted"] > 0, waited

    run(scenario())


def test_an_agent_reaches_its_own_calls_and_an_operator_any(target: str, tmp_path: Path) -> None:
    with Store.open() as store:
        access, me = Access(store), Principal.local()
        tokens = {
            name: access.issue(name, role, me, wall_time()).text
            for name, role in (("ann", Role.AGENT), ("bob", Role.AGENT), ("eve", Role.OPERATOR))
        }

    async def scenario(url: str) -> None:
        import httpx2
        from mcp.client.streamable_http import streamable_http_client

        async def tell(name: str, tool: str, **arguments: Any) -> Any:
            headers = {"authorization": f"Bearer {tokens[name]}"}
            async with httpx2.AsyncClient(headers=headers, timeout=NO_ANSWER_S) as http:
                transport = streamable_http_client(url, http_client=http)
                async with Client(transport, mode=MODERN, read_timeout_seconds=NO_ANSWER_S) as client:
                    return await envelope_of(client, tool, arguments)

        calling = asyncio.ensure_future(tell("ann", "count", path=str(tmp_path / "up")))
        await up(tmp_path / "up")
        for arguments in ({}, {"request_id": "guessed"}):
            assert (await tell("bob", "graceful_stop", **arguments))["error"]["code"] == "CALL_NOT_FOUND"
        [extended] = (await tell("ann", "extend", by_ms=20_000))["data"]["extended"]
        theirs = await tell("bob", "extend", by_ms=1000, request_id=extended["request_id"])
        assert theirs["error"]["code"] == "CALL_NOT_FOUND"
        assert (await tell("eve", "graceful_stop", request_id=extended["request_id"]))["ok"]
        envelope = await calling
        assert envelope["ok"] and "eve" in envelope["warnings"][0]["message"]

    with http_server("--require-token", target=target) as (url, _):
        run(scenario(url))


def test_a_step_that_winds_down_tells_its_server_and_gets_what_there_is(target: str, tmp_path: Path) -> None:
    (tmp_path / "flow.yaml").write_text(
        textwrap.dedent(f"""
            steps:
              one:
                type: mcp
                command: {SHOTCLOCK[0]}
                args: [-m, shotclock, serve, {target}]
                method: slow
                arguments: {{path: {tmp_path}/up}}
                timeout: 80
                soft: 3
                wind_down: 30
        """)
    )
    ran = subprocess.run(
        [*SHOTCLOCK, "run", "flow.yaml"], cwd=tmp_path, capture_output=True, timeout=90, stdin=subprocess.DEVNULL
    )
    [step] = json.loads(ran.stdout)["data"]["steps"].values()
    assert step["status"] == "succeeded" and "counted" in step["output"], step
    assert step["duration_ms"] < 30_000
    assert [told["event"] for told in step["overtime"]] == ["wind_down"]
