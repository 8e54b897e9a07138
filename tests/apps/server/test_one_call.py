"""One call is one admission, whatever stands between the client and the work."""

import asyncio
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from mcp import Client, StdioServerParameters

from shotclock import Clocks, Runtime
from shotclock.calls.principal import Principal, Role
from shotclock.core.proposal import Decision, ProposalStatus
from shotclock.people.inbox import Inbox
from shotclock.store.store import Store
from tests.apps.server.client import MODERN, NO_ANSWER_S, ROOT, envelope_of, run

pytestmark = pytest.mark.slow

TARGET = "tests.apps.app.programs.guarded:app"
# Of ours, for the call that asks and the identical one that runs: 49 in the server and the worker since the modules are
# in rooms, and two that only a busy machine needs.
MOST_FILES = 51


class Notes:
    """What the server has noted since it was last told to begin anew."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._begins_at = 0

    def _lines(self, kind: str) -> list[str]:
        text = self._path.read_bytes()[self._begins_at :].decode()
        return [line.partition(" ")[2] for line in text.splitlines() if line.startswith(f"{kind} ")]

    @property
    def admitted(self) -> list[str]:
        return self._lines("admit")

    @property
    def files(self) -> set[str]:
        return set(self._lines("file"))

    def begin_anew(self, server: psutil.Process) -> None:
        server.send_signal(signal.SIGUSR1)
        self._begins_at = self._path.stat().st_size


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("SHOTCLOCK_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("SHOTCLOCK_RESPONSE_TIMEOUT", "200ms")
    yield tmp_path / "home"


def with_server(notes: Path, scenario: Callable[[Client, psutil.Process], Any]) -> Any:
    async def converse() -> Any:
        before = {child.pid for child in psutil.Process().children()}
        words = ["-m", "tests.apps.server.walked", str(notes), "serve", TARGET]
        parameters = StdioServerParameters(command=sys.executable, args=words, env=dict(os.environ), cwd=ROOT)
        async with Client(parameters, mode=MODERN, read_timeout_seconds=NO_ANSWER_S) as client:
            await client.list_tools()
            [server] = [child for child in psutil.Process().children() if child.pid not in before]
            return await scenario(client, server)

    return run(converse())


def test_a_call_over_mcp_is_admitted_once_and_so_is_one_that_a_person_approved(home: Path, tmp_path: Path) -> None:
    notes = Notes(tmp_path / "notes")
    arguments = {"folder": str(tmp_path), "service": "web"}

    async def scenario(client: Client, server: psutil.Process) -> None:
        warm = await envelope_of(client, "around", {"folder": str(tmp_path), "service": "x"})  # all is imported by then
        assert warm["ok"], warm
        notes.begin_anew(server)
        asked = await envelope_of(client, "deploy", arguments)
        assert asked["error"]["code"] == "INCOMPLETE", asked
        assert notes.admitted == ["deploy"]
        with Store.open(home) as store:
            inbox = Inbox(store)
            operator = Principal("ada", Role.OPERATOR)
            await inbox.decide(asked["data"]["proposal_id"], Decision(ProposalStatus.APPROVED), operator)
            await inbox.close()
        ran = await envelope_of(client, "deploy", arguments)
        assert ran["ok"], ran
        assert notes.admitted == ["deploy", "deploy"], "each of the two calls is admitted once"
        assert len(notes.files) <= MOST_FILES, f"{len(notes.files)}: {sorted(notes.files)}"

    with_server(tmp_path / "notes", scenario)
    assert (tmp_path / "done").read_text() == "deploy web 1\n"


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("no-such-tool", {}, "UNKNOWN_OPERATION"),
    ("deploy", {"service": 1}, "ARG_ERROR"),
    ("job", {"action": "dance"}, "ARG_ERROR"),
    ("check-proposal", {"proposal_id": "p-nothing"}, "PROPOSAL_NOT_FOUND"),
]


def test_what_the_server_refuses_is_one_call_as_well(home: Path, tmp_path: Path) -> None:
    notes = Notes(tmp_path / "notes")

    async def scenario(client: Client, server: psutil.Process) -> None:
        for tool, arguments, code in REFUSED:
            notes.begin_anew(server)
            envelope = await envelope_of(client, tool, arguments)
            assert envelope["error"]["code"] == code
            assert notes.admitted == [tool]

    with_server(tmp_path / "notes", scenario)


def test_a_command_that_its_caller_cancels_says_why_it_was_stopped_and_what_it_had_said(tmp_path: Path) -> None:
    async def scenario() -> Any:
        async with Runtime() as runtime:
            begun = tmp_path / "begun"
            words = ["sh", "-c", f"echo said; touch {begun}; sleep 60"]
            call = runtime.begin("command", {}, Clocks.of("50s"), is_command=True)
            running = asyncio.ensure_future(runtime.run(words, call=call))
            while not begun.exists():
                await asyncio.sleep(0.02)
            running.cancel()
            with pytest.raises(asyncio.CancelledError):
                await running
            return call.cancellation.envelope

    envelope = run(scenario())
    assert (envelope.code, envelope.ending, envelope.data["stdout"]) == ("CANCELLED", "killed", "said\n")
    assert envelope.error["message"] == "stopped by the caller" and envelope.data["partial"]
