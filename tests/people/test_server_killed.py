"""kill -9 of the server at random moments, while agents propose over MCP and operators decide: nothing is lost, and
nothing is decided, or done, twice."""

import asyncio
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import httpx2
import pytest
from mcp import Client

from shotclock.calls.principal import Principal, Role
from shotclock.core.proposal import ProposalStatus
from shotclock.people.access import Access
from shotclock.people.audit_file import AuditFile
from shotclock.store.store import Store
from tests.apps.server.client import envelope_in
from tests.people.work import wall_now

pytestmark = pytest.mark.usefixtures("no_survivors", "warm_starts")

ROOT = Path(__file__).resolve().parent.parent.parent
TARGET = "tests.apps.app.programs.guarded:app"
MODERN = "2026-07-28"
# How long a call waits for a person here: short, so that many are told `pending` and come again.
RESPONSE_BUDGET = "1s"
# A call that is answered later than this is given up and repeated; the server's own bound is far below.
CALL_WITHIN_S = 15.0
# An interpreter, the SDK and the app, on a machine that has other things to do.
STARTED_WITHIN_S = 60.0
GONE_WITHIN_S = 10.0
# After its start, how long a server lives at most until it is killed.
LIVES_S = 0.8
# One in so many is killed while it starts, at most this long after it was spawned.
STARTING_ONE_IN, STARTING_S = 5, 1.5
AGENTS = 4

# Decides whatever is pending, directly in the store, until it is told to stop. Each line was written after the inbox
# had said so.
DECIDER = """
import asyncio, os, random, sys
from pathlib import Path
from shotclock.core.errors import Failure
from shotclock.core.proposal import Decision, ProposalStatus
from shotclock.people.access import Principal, Role
from shotclock.people.inbox import Inbox
from tests.apps.server.client import envelope_in
from shotclock.store.store import Store

async def main(home, seed):
    inbox, dice, otto = Inbox(Store.open(Path(home))), random.Random(seed), Principal("otto", Role.OPERATOR)
    while not os.path.exists(os.path.join(home, "over")):
        for proposal in await inbox.list(status=ProposalStatus.PENDING):
            if dice.random() < 0.25:
                status = dice.choice([ProposalStatus.APPROVED, ProposalStatus.REJECTED])
                try:
                    await inbox.decide(proposal.id, Decision(status, "otto"), otto)
                except Failure as failure:
                    assert failure.code == "ALREADY_DECIDED", failure
                else:
                    os.write(1, f"{proposal.id} {status}\\n".encode())
        await asyncio.sleep(0.2)
    await inbox.close()

asyncio.run(main(sys.argv[1], int(sys.argv[2])))
"""


class Killed:
    """A server at one address that is killed again and again, and those who go on nevertheless."""

    def __init__(self, home: Path, folder: Path, kills: int, proposals: int, seed: int) -> None:
        self.home, self.folder = home, folder
        self._kills, self._proposals, self._dice = kills, proposals, random.Random(seed)
        with socket.create_server(("127.0.0.1", 0)) as free:
            self._port = free.getsockname()[1]
        self._up = asyncio.Event()
        self._released = [asyncio.Event() for _ in range(proposals)]
        self._over = asyncio.Event()
        self._process: subprocess.Popen[bytes] | None = None
        self.seen: set[str] = set()
        """Proposals that an agent was told of."""
        self.answers: dict[int, Any] = {}
        """By the number of what an agent wanted: the answer that was not `pending`."""
        self.told: dict[str, str] = {}
        """What the operator over HTTP was told is decided."""
        self.tried: dict[str, str] = {}
        """What that operator sent, answered or not."""
        self.calls = self.broken = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    # --- the server -----------------------------------------------------------------------------------------

    def _spawn(self) -> Path:
        log = self.folder / "log"
        words = [sys.executable, "-m", "shotclock", "serve", TARGET, "--http", f"127.0.0.1:{self._port}"]
        environment = {**os.environ, "SHOTCLOCK_HOME": str(self.home), "SHOTCLOCK_RESPONSE_TIMEOUT": RESPONSE_BUDGET}
        with open(log, "wb") as output:
            self._process = subprocess.Popen(
                words, stdin=subprocess.DEVNULL, stdout=output, stderr=output, cwd=ROOT, env=environment
            )
        return log

    async def _serving(self, log: Path) -> None:
        assert self._process is not None
        give_up_at = time.monotonic() + STARTED_WITHIN_S
        while b"serving guarded on" not in log.read_bytes():
            assert time.monotonic() < give_up_at and self._process.poll() is None, log.read_text()
            await asyncio.sleep(0.01)
        self._up.set()

    def _kill(self) -> None:
        self._up.clear()
        if self._process is not None:
            self._process.send_signal(signal.SIGKILL)
            self._process.wait(GONE_WITHIN_S)

    async def _kill_again_and_again(self) -> None:
        """Each time, more of what the agents want is let go."""
        for kill in range(self._kills):
            log = self._spawn()
            for number in range(kill * self._proposals // self._kills, (kill + 1) * self._proposals // self._kills):
                self._released[number].set()
            if self._dice.randrange(STARTING_ONE_IN) == 0:
                await asyncio.sleep(self._dice.uniform(0, STARTING_S))
            else:
                await self._serving(log)
                await asyncio.sleep(self._dice.uniform(0, LIVES_S))
            assert self._process is not None and self._process.poll() is None, log.read_text()
            self._kill()
        await self._serving(self._spawn())

    # --- agents ---------------------------------------------------------------------------------------------

    async def _agent(self, numbers: list[int]) -> None:
        while left := [number for number in numbers if number not in self.answers]:
            await self._up.wait()
            try:
                async with Client(f"{self.url}/mcp", mode=MODERN, read_timeout_seconds=CALL_WITHIN_S) as client:
                    async with asyncio.TaskGroup() as group:
                        for number in left:
                            group.create_task(self._pursue(client, number))
            except Exception:  # of a server that is gone, in all the shapes the SDK has for it
                self.broken += 1
                await asyncio.sleep(0.05)

    async def _pursue(self, client: Client, number: int) -> None:
        """The identical call until somebody has decided it."""
        await self._released[number].wait()
        if number % 2:
            tool, arguments = "deploy", {"folder": str(self.folder), "service": f"s{number}"}
        else:
            text = f"allow: [host-{number}]\n"
            tool, arguments = "propose", {"title": f"File {number}", "path": f"{number}.yaml", "proposed": text}
        while number not in self.answers:
            self.calls += 1
            result = await client.call_tool(tool, {**arguments, "justification": f"attempt {self.calls}"})
            envelope = envelope_in(result)
            code, data = (envelope["error"] or {}).get("code"), envelope["data"] or {}
            if "proposal_id" in data:
                self.seen.add(data["proposal_id"])
            if envelope["ok"] or code == "PROPOSAL_REJECTED":
                self.answers[number] = envelope
            else:
                assert code in ("INCOMPLETE", "SHUTTING_DOWN", "STORE_BUSY", "SPAWN_FAILED"), envelope

    # --- an operator over HTTP ------------------------------------------------------------------------------

    async def _operator(self, token: str, seed: int) -> None:
        dice = random.Random(seed)
        headers = {"Authorization": f"Bearer {token}"}
        while not self._over.is_set():
            await self._up.wait()
            try:
                async with httpx2.AsyncClient(base_url=self.url, headers=headers, timeout=CALL_WITHIN_S) as http:
                    listed = (await http.get("/api/inbox?status=pending")).raise_for_status().json()
                    for proposal in dice.sample(listed["data"]["proposals"], len(listed["data"]["proposals"]) // 3):
                        await self._decide(http, proposal["id"], dice)
            except httpx2.HTTPError:
                pass
            await asyncio.sleep(0.1)

    async def _decide(self, http: httpx2.AsyncClient, id: str, dice: random.Random) -> None:
        shown = (await http.get(f"/api/inbox/{id}")).raise_for_status().json()["data"]["proposal"]
        status = self.tried.setdefault(id, dice.choice(["approved", "rejected"]))
        body = {"status": status, "notes": "olga", "action_hash": shown["action_hash"]}
        answer = await http.post(f"/api/inbox/{id}/decision", json=body)
        if answer.status_code == 200:
            assert id not in self.told, "decided twice"
            self.told[id] = status
        else:
            assert answer.status_code in (409, 429, 503), answer.text

    # --- all of it ------------------------------------------------------------------------------------------

    async def run(self, token: str, seed: int) -> None:
        operator = asyncio.ensure_future(self._operator(token, seed))
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._kill_again_and_again())
                for agent in range(AGENTS):
                    group.create_task(self._agent(list(range(agent, self._proposals, AGENTS))))
        finally:
            self._over.set()
            operator.cancel()
            await asyncio.wait([operator], timeout=GONE_WITHIN_S)
            self._kill()
        if not operator.cancelled() and operator.exception() is not None:
            raise operator.exception()  # type: ignore[misc]


@pytest.mark.parametrize(
    ("kills", "proposals", "within_s"),
    [
        pytest.param(6, 30, 110, marks=pytest.mark.slow),
        pytest.param(50, 100, 900, marks=[pytest.mark.soak, pytest.mark.timeout(1000)]),
    ],
)
def test_a_server_that_is_killed_at_random_moments_loses_no_proposal_and_decides_and_does_nothing_twice(
    kills: int, proposals: int, within_s: float, home: Path, tmp_path: Path
) -> None:
    seed = int(os.environ.get("SHOTCLOCK_TEST_SEED", "5"))
    print(f"seed {seed}, {kills} kills, {proposals} proposals")
    with Store.open(home) as store:
        token = Access(store).issue("olga", Role.OPERATOR, Principal.local(), wall_now()).text
    began = time.monotonic()
    with open(tmp_path / "decided", "wb") as output:
        decider = subprocess.Popen([sys.executable, "-c", DECIDER, home, str(seed)], stdout=output, cwd=ROOT)
    try:

        async def whole() -> Killed:
            killed = Killed(home, tmp_path, kills, proposals, seed)
            async with asyncio.timeout(within_s):
                await killed.run(token, seed)
            return killed

        killed = asyncio.run(whole())
        (home / "over").touch()
        assert decider.wait(GONE_WITHIN_S) == 0
    finally:
        if decider.poll() is None:
            decider.kill()
            decider.wait(GONE_WITHIN_S)
    told = dict(line.split() for line in (tmp_path / "decided").read_text().splitlines())
    assert not told.keys() & killed.told.keys(), "both were told that they had decided it"
    print(
        f"{time.monotonic() - began:.0f} s; {killed.calls} calls, {killed.broken} connections broken, "
        f"{len(told)} decided in the store, {len(killed.told)} of {len(killed.tried)} over HTTP"
    )
    check(home, tmp_path, killed, {**told, **killed.told}, proposals)


def check(home: Path, folder: Path, killed: Killed, told: dict[str, str], count: int) -> None:
    with Store.open(home) as store:
        assert AuditFile(store).verify() == []
        entries = store.audit.entries(limit=1_000_000)
        proposed = {entry.proposal for entry in entries if entry.proposal is not None}
        found = {each.id: each for each in map(store.proposals.get, proposed) if each}
        assert found.keys() == {each.id for each in store.proposals.list(limit=10_000)}
    in_file = [json.loads(line) for line in (home / "audit.jsonl").read_text().splitlines()]
    assert [entry["hash"] for entry in in_file] == [entry.hash for entry in entries]

    assert len(killed.answers) == count and killed.seen <= found.keys(), "an agent was told of one that is not there"
    for id, status in told.items():
        assert found[id].status == status, "somebody was told of a decision that is not there"
    for each in found.values():
        if each.decided_by == "olga":
            assert each.status == killed.tried[each.id], "it was decided otherwise than she said"
    for action in ("proposed", "used"):
        happened = Counter(entry.proposal for entry in entries if entry.action == action)
        assert max(happened.values(), default=0) <= 1, f"{action} twice"
    ends = Counter(entry.proposal for entry in entries if entry.action in ("approved", "rejected", "expired"))
    assert max(ends.values(), default=0) <= 1, "decided twice"
    assert ends.keys() == {id for id, each in found.items() if not each.is_open}

    of_files = Counter(each.ask.title for each in found.values() if each.ask.file is not None)
    assert of_files == {f"File {number}": 1 for number in range(0, count, 2)}, (
        "one each, however often it was asked for"
    )
    done = (folder / "done").read_text().split("\n") if (folder / "done").exists() else []
    ran = Counter(line.split()[1] for line in done if line)
    used = Counter((each.ask.arguments or {})["service"] for each in found.values() if each.used_at is not None)
    assert all(ran[service] <= used[service] for service in ran), "it ran without an approval of its own"
    for number, envelope in killed.answers.items():
        if number % 2 and envelope["ok"]:
            assert ran[f"s{number}"] >= 1, "it was said to have run"
        elif number % 2:
            assert found[envelope["data"]["proposal_id"]].status is ProposalStatus.REJECTED
