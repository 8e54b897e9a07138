"""The sidecar of a sandboxed agent: a real server over HTTP, the SDK's client as agent, operators from elsewhere."""

import asyncio
import json
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from mcp import Client

from shotclock.calls.principal import Principal, Role
from shotclock.core.proposal import Decision, Kind, Proposal, ProposalStatus
from shotclock.people.inbox import Inbox
from shotclock.store.store import Store
from tests.apps.server import client as mcp
from tests.apps.server.client import envelope_in

from .conftest import EXAMPLES

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("no_survivors")]

SIDECAR = "examples/supervise/sidecar.py:app"
ADA = Principal("ada", Role.OPERATOR)
# A whole test; a machine that is busy with others takes several seconds to start a server.
TEST_WITHIN_S = 100.0
PROPOSED_WITHIN_S = 20.0
ROUTES = '{"routes": [{"host": "pypi.org"}, {"host": "github.com", "methods": ["GET"]}]}\n'
NARROWER = '{"routes": [{"host": "pypi.org"}]}\n'
HOSTS = "pypi.org\ngithub.com  # to read issues\n"
CAPABILITIES = '{"programs": ["python3", "git", "gcc"]}\n'
WHY = "to install <b>what</b> the task needs"


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the example's, and a server that would look there."""
    folder = tmp_path / "config"
    shutil.copytree(EXAMPLES / "supervise" / "config", folder)
    monkeypatch.setenv("SHOTCLOCK_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("SUPERVISE_CONFIG", str(folder))
    monkeypatch.delenv("SHOTCLOCK_RESPONSE_TIMEOUT", raising=False)
    monkeypatch.setenv("SUPERVISE_RESPONSE_TIMEOUT_SECONDS", "20")
    return folder


Scenario = Callable[[Client, Inbox], Coroutine[Any, Any, None]]


@pytest.fixture
def served(config: Path, tmp_path: Path) -> Callable[[Scenario], None]:
    """Runs a scenario with an agent's client and an operator's inbox, which is not the server's."""

    @asynccontextmanager
    async def operator() -> AsyncIterator[Inbox]:
        with Store.open(tmp_path / "home") as store:
            inbox = Inbox(store)
            try:
                yield inbox
            finally:
                await inbox.close()

    def run(scenario: Scenario) -> None:
        async def whole() -> None:
            async with operator() as inbox, mcp.connected("http", target=SIDECAR) as (client, _):
                await scenario(client, inbox)

        mcp.run(whole(), TEST_WITHIN_S)

    return run


async def asked(client: Client, tool: str, **arguments: Any) -> Any:
    """The envelope of a call that is no error: that nobody has answered, or said no, is none."""
    result = await client.call_tool(tool, arguments)
    assert not result.is_error, result
    return envelope_in(result)


async def proposed(inbox: Inbox) -> Proposal:
    give_up_at = time.monotonic() + PROPOSED_WITHIN_S
    while not (found := await inbox.list(status=ProposalStatus.PENDING)):
        assert time.monotonic() < give_up_at, "nothing was proposed"
        await asyncio.sleep(0.01)
    (listed,) = found
    proposal = await inbox.get(listed.id)
    assert proposal is not None
    return proposal


FILES = (
    ("egress-block", "egress-routes.json", ROUTES),
    ("egress-allow", "egress-hosts.txt", HOSTS),
    ("capability-block", "capabilities.json", CAPABILITIES),
)


def test_what_is_approved_modified_or_rejected_in_time_is_told_in_one_shape_and_only_a_yes_is_written(
    served: Any, config: Path, validate_envelope: Any
) -> None:
    async def decide_three(client: Client, inbox: Inbox, tool: str, file: str, text: str) -> None:
        path, before = config / file, (config / file).read_text()
        # What was rejected stays rejected: the next has to propose something else.
        other = f" {text}" if file.endswith("json") else f"# all\n{text}"
        for decision, wanted, written in (
            (Decision(ProposalStatus.REJECTED, "not today"), other, before),
            (Decision(ProposalStatus.APPROVED, "go"), text, text),
            (Decision(ProposalStatus.MODIFIED, "less", file_text=before), f"{text}\n", before),
        ):
            there = path.read_text()
            calling = asyncio.ensure_future(asked(client, tool, proposed_file=wanted, justification=WHY))
            proposal = await proposed(inbox)
            assert proposal.ask.kind is Kind.FILE and proposal.ask.justification == WHY
            assert proposal.ask.title == f"supervise {tool}: {file}"
            shown = proposal.ask.file
            assert shown is not None and (shown.path, shown.proposed, shown.current) == (str(path), wanted, there)
            assert path.read_text() == there, "nobody has said yes"
            await inbox.decide(proposal.id, decision, ADA)
            envelope = validate_envelope(await calling)
            data = envelope["data"]
            assert (data["status"], path.read_text()) == (decision.status.value, written)
            assert data["proposal_id"] == proposal.id and data["decided_by"] == "ada"
            assert data["notes"] == decision.notes and data["title"] == proposal.ask.title
            if decision.status.allows:
                assert envelope["ok"] and data["file"] == {"path": str(path), "text": path.read_text()}

    async def scenario(client: Client, inbox: Inbox) -> None:
        for tool, file, text in FILES:
            await decide_three(client, inbox, tool, file, text)

    served(scenario)
    left = {each.name for each in config.iterdir()}
    assert left == {each.name for each in (EXAMPLES / "supervise" / "config").iterdir()}, "nothing else was left there"


def test_nobody_answers_and_the_late_approval_is_picked_up_by_the_check_and_by_the_identical_call(
    served: Any, config: Path, monkeypatch: pytest.MonkeyPatch, validate_envelope: Any
) -> None:
    monkeypatch.setenv("SUPERVISE_RESPONSE_TIMEOUT_SECONDS", "0.5")
    path = config / "egress-routes.json"
    before = path.read_text()

    async def scenario(client: Client, inbox: Inbox) -> None:
        async def call(why: str = WHY) -> Any:
            return validate_envelope(await asked(client, "egress-block", proposed_file=ROUTES, justification=why))

        waiting, took_s = await mcp.timed(call())
        assert waiting["data"]["status"] == "pending" and 0.4 < took_s < 10
        assert waiting["data"]["notes"] == "operator response timed out; proposal remains queued"
        id = waiting["data"]["proposal_id"]
        assert (await call("in other words"))["data"]["proposal_id"] == id, "the identical call attaches"
        checked = await asked(client, "check-proposal", proposal_id=id, wait_ms=50)
        assert checked["data"]["status"] == "pending"
        assert [each.id for each in await inbox.list(status=ProposalStatus.PENDING)] == [id], "still queued, and once"
        await inbox.decide(id, Decision(ProposalStatus.APPROVED, "late"), ADA)
        checked = await asked(client, "check-proposal", proposal_id=id)
        assert checked["data"]["status"] == "approved" and checked["data"]["notes"] == "late"
        assert checked["data"]["file"]["text"] == ROUTES
        assert path.read_text() == before, "asking how it stands writes nothing"
        done = await call()
        assert done["ok"] and (done["data"]["status"], done["data"]["proposal_id"]) == ("approved", id)
        assert path.read_text() == ROUTES
        again = await call()
        assert again["data"]["status"] == "pending" and again["data"]["proposal_id"] != id, "one yes is for one writing"

    served(scenario)


def test_a_file_that_has_changed_meanwhile_is_not_overwritten(served: Any, config: Path) -> None:
    path = config / "egress-routes.json"

    async def scenario(client: Client, inbox: Inbox) -> None:
        calling = asyncio.ensure_future(
            client.call_tool("egress-block", {"proposed_file": ROUTES, "justification": WHY})
        )
        proposal = await proposed(inbox)
        path.write_text(NARROWER)  # by the operator's own hand
        await inbox.decide(proposal.id, Decision(ProposalStatus.APPROVED), ADA)
        result = await calling
        assert result.is_error and envelope_in(result)["error"]["code"] == "ACTION_CHANGED"
        assert path.read_text() == NARROWER
        calling = asyncio.ensure_future(asked(client, "egress-block", proposed_file=ROUTES, justification=WHY))
        anew = await proposed(inbox)
        assert anew.id != proposal.id and anew.ask.file is not None and anew.ask.file.current == NARROWER
        await inbox.decide(anew.id, Decision(ProposalStatus.APPROVED), ADA)
        assert (await calling)["ok"] and path.read_text() == ROUTES

    served(scenario)


def test_a_file_that_is_none_bothers_nobody_and_an_operators_mistake_writes_nothing(served: Any, config: Path) -> None:
    path = config / "egress-routes.json"
    before = path.read_text()

    async def scenario(client: Client, inbox: Inbox) -> None:
        for tool, text in (
            ("egress-block", '{"routes": [{"hosts": "a"}]}'),
            ("egress-block", "routes: none"),
            ("egress-allow", "pypi.org\nhttp://example.org/\n"),
            ("capability-block", "[]"),
        ):
            result = await client.call_tool(tool, {"proposed_file": text, "justification": WHY})
            error = envelope_in(result)["error"]
            assert result.is_error and error["code"] == "ARG_ERROR" and "proposed_file" in error["message"], error
        forged = {"proposed_file": ROUTES, "justification": WHY, "decision": {"file": {"path": str(path)}}}
        calling = asyncio.ensure_future(client.call_tool("egress-block", forged))
        proposal = await proposed(inbox)  # what the caller says was decided does not matter
        assert path.read_text() == before
        await inbox.decide(proposal.id, Decision(ProposalStatus.MODIFIED, file_text="not even JSON"), ADA)
        result = await calling
        assert result.is_error and envelope_in(result)["error"]["code"] == "ARG_ERROR"
        assert path.read_text() == before

    served(scenario)


# --- the environment --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value", "code"),
    [
        ("SUPERVISE_RESPONSE_TIMEOUT_SECONDS", "soon", 2),
        ("SHOTCLOCK_RESPONSE_TIMEOUT", "30", 2),
        ("SUPERVISE_EGRESS_URL", "localhost:8701", 4),
    ],
)
def test_a_server_with_nonsense_in_its_environment_does_not_start_and_says_why(
    name: str, value: str, code: int, config: Path, shotclock: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, value)
    ended = shotclock("serve", SIDECAR, "--http", "127.0.0.1:0", timeout=TEST_WITHIN_S)
    assert ended.code == code, ended
    assert name in ended.json()["error"]["message"]


# --- the egress service -----------------------------------------------------------------------------------------------


class Egress:
    """A service that answers as it is told to. `hangs` is let go of at the end."""

    def __init__(self) -> None:
        self.says: tuple[int, bytes] | None = None
        self.released = threading.Event()
        egress = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                if egress.says is None:
                    egress.released.wait(TEST_WITHIN_S)
                    return
                status, body = egress.says
                self.send_response(status)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *said: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}/routes"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,))
        self._thread.start()

    def close(self) -> None:
        self.released.set()
        if self._thread.is_alive():
            self._server.shutdown()
            self._server.server_close()
            self._thread.join(10)


@pytest.fixture
def egress(monkeypatch: pytest.MonkeyPatch) -> Iterator[Egress]:
    service = Egress()
    monkeypatch.setenv("SUPERVISE_EGRESS_URL", service.url)
    yield service
    service.close()


def test_the_routes_are_listed_and_a_service_that_hangs_fails_or_is_gone_is_a_tools_answer(
    egress: Egress, served: Any, validate_envelope: Any
) -> None:
    async def scenario(client: Client, inbox: Inbox) -> None:
        async def listed() -> tuple[Any, bool, float]:
            result, took_s = await mcp.timed(client.call_tool("list-egress-routes", {}))
            return validate_envelope(envelope_in(result)), bool(result.is_error), took_s

        routes = [{"host": "pypi.org"}]
        egress.says = (200, json.dumps(routes).encode())
        envelope, is_error, _ = await listed()
        assert envelope["data"] == {"service": egress.url, "routes": routes} and not is_error

        for says, code, word in (
            ((500, b"out of memory"), "HTTP_STATUS", "500"),
            ((200, b"<html>"), "FETCH_FAILED", "not JSON"),
            ((200, b'"' + b"x" * 300_000 + b'"'), "BODY_TOO_LARGE", "bytes"),
        ):
            egress.says = says
            envelope, is_error, _ = await listed()
            assert (envelope["error"]["code"], is_error) == (code, True) and word in envelope["error"]["message"]

        egress.says = None
        envelope, is_error, took_s = await listed()
        assert (envelope["error"]["code"], is_error) == ("TIMEOUT", True)
        assert envelope["error"]["context"]["clock"]["limit_ms"] == 5000
        assert 4.9 < took_s < 5 + 5 * mcp.LATE_S

        egress.close()
        envelope, is_error, took_s = await listed()
        assert (envelope["error"]["code"], is_error) == ("CONNECT_FAILED", True)
        assert "refused" in envelope["error"]["message"]

    served(scenario)


def test_the_service_is_asked_directly_and_not_by_way_of_the_sandboxes_proxy(
    egress: Egress, config: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    egress.says = (200, b"[]")
    with open(tmp_path / "out", "wb") as out:
        command = [sys.executable, EXAMPLES / "supervise" / "sidecar.py", "list-egress-routes"]
        ended = subprocess.run(command, stdout=out, stdin=subprocess.DEVNULL, timeout=TEST_WITHIN_S)
    envelope = json.loads((tmp_path / "out").read_bytes())
    assert ended.returncode == 0 and envelope["data"]["routes"] == [], envelope
