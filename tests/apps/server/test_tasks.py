"""The Tasks extension of MCP: a call becomes a task that outlives its server and its client."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from typing import Any, Literal

import psutil
import pytest
from mcp import Client, StdioServerParameters
from mcp.client.extension import ClaimContext, ClientExtension, ResultClaim
from mcp_types import CallToolResult, Request, RequestParams, Result

from shotclock.calls.principal import Principal, Role
from shotclock.core.envelope import ENVELOPE_KEY
from shotclock.core.limits import WallTime
from shotclock.people.access import Access
from shotclock.store.store import Store
from tests.apps.app.conftest import Home, home
from tests.apps.server.client import MODERN, NO_ANSWER_S, ROOT, command, http_server, run

__all__ = ["home"]
pytestmark = pytest.mark.slow

TARGET = "tests.apps.app.programs.owned:app"
ASKING = "tests.apps.app.programs.asking:app"
EXTENSION = "io.modelcontextprotocol/tasks"
DAY_MS = 24 * 3600 * 1000


def post(
    url: str, method: str, token: str | None = None, *, declares: bool = True, asks: bool = True, **params: Any
) -> Any:
    """Send one request of the 2026 revision and return its answer. `mcp_name` replaces the header."""
    name = params.pop("mcp_name", params.get("taskId", params.get("name", "")))
    capabilities: dict[str, Any] = {"extensions": {EXTENSION: {}}} if declares else {}
    capabilities |= {"elicitation": {}} if asks else {}
    meta = {
        "io.modelcontextprotocol/protocolVersion": MODERN,
        "io.modelcontextprotocol/clientCapabilities": capabilities,
    }
    body = {"jsonrpc": "2.0", "id": 1, "method": method, "params": {**params, "_meta": meta}}
    headers = {
        "Content-Type": "application/json",
        "Accept": "application/json, text/event-stream",
        "MCP-Protocol-Version": MODERN,
        "Mcp-Method": method,
        "Mcp-Name": name if name.isascii() else "x",
        **({} if token is None else {"Authorization": f"Bearer {token}"}),
    }
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    try:
        with urllib.request.urlopen(request, timeout=NO_ANSWER_S) as response:
            text = response.read().decode()
    except urllib.error.HTTPError as error:
        text = error.read().decode()
    return json.loads(text.partition("data: ")[2] if "data: " in text[:200] else text)


def started(url: str, seconds: float, token: str | None = None) -> Any:
    task = post(url, "tools/call", token, name="once", arguments={"seconds": seconds})["result"]
    assert (task["resultType"], task["status"]) == ("task", "working"), task
    return task


def ended(url: str, task_id: str, token: str | None = None) -> Any:
    """Return the task once it is not working any more, or asks."""
    give_up_at = time.monotonic() + NO_ANSWER_S
    while True:
        task = post(url, "tasks/get", token, taskId=task_id)["result"]
        if task["status"] != "working":
            return task
        assert time.monotonic() < give_up_at, task
        time.sleep(0.1)


def asking(url: str, token: str | None = None) -> tuple[str, str]:
    """Start a task that asks, and return its id and the key of its question."""
    task_id = post(url, "tools/call", token, name="job_that_asks", arguments={})["result"]["taskId"]
    task = ended(url, task_id, token)
    assert task["status"] == "input_required" and "result" not in task, task
    ((key, request),) = task["inputRequests"].items()
    assert (request["method"], request["params"]["message"]) == ("elicitation/create", "Your name?")
    return task_id, key


CLIENT = f"""
import asyncio, json, sys
from tests.apps.server.test_tasks import call_over_stdio

async def main():
    async def created(task, server):
        print(json.dumps({{"task": task.task_id, "server": server}}), flush=True)
        await asyncio.sleep({NO_ANSWER_S})
    await call_over_stdio({{"seconds": 4.0}}, created)

asyncio.run(main())
"""


class CreatedTask(Result):
    result_type: Literal["task"] = "task"
    task_id: str
    poll_interval_ms: int


class GetTask(Request[RequestParams, Literal["tasks/get"]]):
    method: Literal["tasks/get"] = "tasks/get"
    params: Any
    name_param = "taskId"


class TaskState(Result):
    status: str
    result: dict[str, Any] | None = None


class Polling(ClientExtension):
    identifier = EXTENSION

    def __init__(self, created: Any = None) -> None:
        self.created = created

    def claims(self) -> list[ResultClaim[Any]]:
        return [ResultClaim(result_type="task", model=CreatedTask, resolve=self._resolve)]

    async def _resolve(self, task: CreatedTask, ctx: ClaimContext) -> CallToolResult:
        if self.created is not None:
            await self.created(task, psutil.Process().children()[0].pid)
        async with asyncio.timeout(NO_ANSWER_S):
            while True:
                state = await ctx.session.send_request(GetTask(params={"taskId": task.task_id}), TaskState)
                if state.status == "completed":
                    return CallToolResult.model_validate(state.result)
                await asyncio.sleep(task.poll_interval_ms / 1000)


async def call_over_stdio(arguments: dict[str, Any], created: Any = None) -> CallToolResult:
    """Call with the client of the SDK, which resolves the task."""
    argv = command(TARGET)
    server = StdioServerParameters(command=argv[0], args=argv[1:], env=dict(os.environ), cwd=ROOT)
    extensions = [Polling(created)]
    async with Client(server, mode=MODERN, extensions=extensions, read_timeout_seconds=NO_ANSWER_S) as client:
        return await client.call_tool("once", arguments)


def test_the_client_of_the_sdk_polls_a_task_over_stdio(home: Home) -> None:
    result = run(call_over_stdio({"seconds": 0.2}))
    assert (result.is_error, result.structured_content) == (False, {"result": "done"})
    assert result.meta is not None and result.meta[ENVELOPE_KEY]["meta"]["job_id"] == home.job().id


def test_a_task_survives_kill_9_of_server_and_client_and_is_found_by_its_id(home: Home) -> None:
    client = subprocess.Popen([sys.executable, "-c", CLIENT], stdout=subprocess.PIPE, cwd=ROOT)
    with client:
        assert client.stdout is not None
        told = json.loads(client.stdout.readline())
        for pid in (client.pid, told["server"]):
            os.kill(pid, signal.SIGKILL)
    with http_server(target=TARGET) as (url, _):
        assert post(url, "tasks/get", taskId=told["task"])["result"]["status"] == "working"
        task = ended(url, told["task"])
        assert (task["status"], task["result"]["structuredContent"]) == ("completed", {"result": "done"}), task
        assert post(url, "tasks/get", taskId=told["task"])["result"] == task  # as often as the client asks


def test_tasks_are_cancelled_fail_truthfully_and_belong_to_their_principal(home: Home) -> None:
    roles = {"alice": Role.AGENT, "bob": Role.AGENT, "carol": Role.OPERATOR}
    with Store.open(home.path) as store:
        now = WallTime.of_ns(time.time_ns())
        alice, bob, carol = (
            Access(store).issue(name, role, Principal.local(), now).text for name, role in roles.items()
        )
    with http_server(target=TARGET) as (url, _):
        task = started(url, 30.0, alice)
        id = task["taskId"]
        assert DAY_MS <= task["ttlMs"] < DAY_MS + 60_000 and task["pollIntervalMs"] > 0, task
        assert started(url, 30.0, alice)["taskId"] == id  # the identical call attaches
        # Nothing distinguishes the task of another principal from one that does not exist.
        unknown = [("tasks/get", {}), ("tasks/cancel", {}), ("tasks/update", {"inputResponses": {}})]
        for method, params in unknown:
            for task_id, token in ((id, bob), (id[:6], alice), ("../x", alice), ("", alice), ("x" * 10_000, alice)):
                error = post(url, method, token, taskId=task_id, **params)["error"]
                assert (error["code"], error["message"]) == (
                    -32602,
                    f"there is no task {task_id[:100]!r} in this server's store",
                ), error
        assert post(url, "tasks/get", alice, taskId=7, mcp_name="7")["error"]["code"] == -32602
        assert post(url, "tasks/get", alice, taskId=id, mcp_name="other")["error"]["code"] == -32020
        assert post(url, "tasks/get", carol, taskId=id)["result"]["status"] == "working"
        answered = post(url, "tasks/update", alice, taskId=id, inputResponses={"never-asked": {}})["result"]
        assert set(answered) == {"resultType", "_meta"}, answered

        for _ in range(2):
            cancelled = post(url, "tasks/cancel", alice, taskId=id)["result"]
            assert (cancelled["resultType"], set(cancelled)) == ("complete", {"resultType", "_meta"})
        task = post(url, "tasks/get", alice, taskId=id)["result"]
        assert task["status"] == "cancelled" and not {"result", "error"} & set(task), task
        assert "CANCELLED" in task["statusMessage"]

        lost = started(url, 30.0, alice)["taskId"]
        assert lost != id  # a cancelled task is over for its client
        os.kill(home.runner(lost), signal.SIGKILL)
        task = ended(url, lost, alice)
        assert (task["status"], task["error"]["code"]) == ("failed", -32603), task
        assert task["error"]["data"][ENVELOPE_KEY]["error"]["code"] == "JOB_LOST"


def test_a_client_that_does_not_declare_the_extension_gets_no_task(home: Home) -> None:
    with http_server(target=TARGET) as (url, _):
        result = post(url, "tools/call", declares=False, name="once", arguments={"seconds": 0.1})["result"]
        assert (result["resultType"], result["structuredContent"]) == ("complete", {"result": "done"})
        for method in ("tasks/get", "tasks/cancel"):
            error = post(url, method, declares=False, taskId=home.job().id)["error"]
            assert (error["code"], list(error["data"]["requiredCapabilities"]["extensions"])) == (-32021, [EXTENSION])
        assert post(url, "tasks/list", mcp_name="")["error"]["code"] == -32601
        assert EXTENSION in post(url, "server/discover")["result"]["capabilities"]["extensions"]


def accepted(name: object) -> dict[str, Any]:
    return {"action": "accept", "content": {"answer": name}}


def test_a_task_asks_its_own_client_and_takes_the_first_answer(home: Home) -> None:
    with Store.open(home.path) as store:
        now = WallTime.of_ns(time.time_ns())
        alice, bob = (Access(store).issue(name, Role.AGENT, Principal.local(), now).text for name in ("alice", "bob"))
    began = time.monotonic()
    with http_server(target=ASKING) as (url, _):
        task_id, key = asking(url, alice)
    with http_server(target=ASKING) as (url, _):  # the question is in the store
        error = post(url, "tasks/update", bob, taskId=task_id, inputResponses={key: accepted("Eve")})["error"]
        assert error["message"] == f"there is no task {task_id!r} in this server's store"
        for wrong in ({"action": "maybe"}, {"roots": []}, "Ada", None):
            error = post(url, "tasks/update", alice, taskId=task_id, inputResponses={key: wrong})["error"]
            assert error["code"] == -32602 and key in error["message"], error
        post(url, "tasks/update", alice, taskId=task_id, inputResponses={"another": accepted("Eve"), "x" * 9_000: {}})
        assert list(ended(url, task_id, alice)["inputRequests"]) == [key]
        while time.monotonic() < began + 1.2:  # longer than the timeout of the command
            time.sleep(0.05)
        for name in ("Ada", "Eve"):
            assert post(url, "tasks/update", alice, taskId=task_id, inputResponses={key: accepted(name)})["result"]
        task = ended(url, task_id, alice)
        assert (task["status"], task["result"]["structuredContent"]) == ("completed", {"result": "Ada"}), task
        assert not home.job(task_id).spec["questions"]  # an answer may be private


def test_a_task_that_asks_is_cancelled_or_lost_and_its_question_withdrawn(home: Home) -> None:
    with http_server(target=ASKING) as (url, _):
        task_id, key = asking(url)
        post(url, "tasks/cancel", taskId=task_id)
        task = post(url, "tasks/get", taskId=task_id)["result"]
        assert task["status"] == "cancelled" and "inputRequests" not in task
        assert post(url, "tasks/update", taskId=task_id, inputResponses={key: accepted("Ada")})["result"]
        lost, _ = asking(url)
        os.kill(home.runner(lost), signal.SIGKILL)
        task = ended(url, lost)
        while task["status"] == "input_required":  # until the death of the runner is seen
            task = ended(url, lost)
        assert (task["status"], "inputRequests" in task) == ("failed", False), task


def test_a_job_without_a_client_that_can_answer_cannot_ask(home: Home) -> None:
    with http_server(target=ASKING) as (url, _):
        call: dict[str, Any] = {"name": "job_that_asks", "arguments": {}}
        answer = post(url, "tools/call", asks=False, **call)
        assert "result" in answer, answer
        task = answer["result"]
        result = ended(url, task["taskId"])["result"]
        assert (
            result["isError"] and "CANNOT_ASK: the client does not support elicitation" in result["content"][0]["text"]
        )
        result = post(url, "tools/call", declares=False, **call)["result"]
        assert result["isError"] and "CANNOT_ASK: the job was not started as a task" in result["content"][0]["text"]
