"""kill -9 of those who propose and decide, at random moments: nothing is lost, nothing is decided twice."""

import json
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from shotclock.core.errors import Failure
from shotclock.core.proposal import Decision, ProposalStatus
from shotclock.people.audit_file import AuditFile
from shotclock.store.store import Store
from tests.people.work import wall_now

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("no_survivors", "warm_starts")]

KILLS = 12
BEGINS_WITHIN_S = 30  # a Python that starts on a loaded machine
GONE_WITHIN_S = 10

# Proposes, and decides whatever is pending, its own or others'. Each line was said only after the inbox said so.
WRITER = """
import asyncio, os, random, sys
from pathlib import Path
from shotclock.core.errors import Failure
from shotclock.core.proposal import Decision, InboxLimits, ProposalStatus
from shotclock.people.access import Principal, Role
from shotclock.people.inbox import Inbox
from shotclock.store.store import Store
from tests.people.work import operation

async def main(home, name):
    inbox = Inbox(Store.open(Path(home)), InboxLimits(10**6, 10**6))
    agent, operator = Principal("agent-" + name, Role.AGENT), Principal("operator-" + name, Role.OPERATOR)
    say = lambda *words: os.write(1, (" ".join(words) + "\\n").encode())
    say("ready", name)
    for number in range(10_000):
        made = await asyncio.gather(*(inbox.propose(operation(number * 3 + n), agent) for n in range(3)))
        for proposal in made:
            say("proposed", proposal.id)
        for proposal in random.sample(made, 2) + random.sample(await inbox.list(limit=20), 2):
            status = random.choice([ProposalStatus.APPROVED, ProposalStatus.REJECTED])
            try:
                await inbox.decide(proposal.id, Decision(status, name), operator)
            except Failure as failure:
                assert failure.code == "ALREADY_DECIDED", failure
            else:
                say("decided", proposal.id, status)

asyncio.run(main(sys.argv[1], sys.argv[2]))
"""


def test_whatever_was_said_is_kept_and_the_trail_is_whole_after_kill_9_at_random_moments(home: Path, tmp_path: Path):
    moments = random.Random(5)
    said = []
    for kill in range(KILLS // 2):
        writers = []
        for number in range(2):
            said.append(tmp_path / f"said-{kill}-{number}")
            with open(said[-1], "wb") as output:
                command = [sys.executable, "-c", WRITER, home, f"{kill}x{number}"]
                writers.append(subprocess.Popen(command, stdout=output, cwd=Path.cwd()))
        give_up_at = time.monotonic() + BEGINS_WITHIN_S
        while any(b"ready" not in path.read_bytes() for path in said[-2:]):
            assert time.monotonic() < give_up_at and all(writer.poll() is None for writer in writers)
            time.sleep(0.001)
        for writer in writers:  # not at the same moment, so that one is killed while the other goes on
            time.sleep(moments.uniform(0, 0.15))
            assert writer.poll() is None
            writer.send_signal(signal.SIGKILL)
        for writer in writers:
            writer.wait(GONE_WITHIN_S)

    proposed: set[str] = set()
    decided: dict[str, str] = {}
    for path in said:
        for line in path.read_text().splitlines():
            match line.split():
                case ["proposed", id]:
                    assert id not in proposed
                    proposed.add(id)
                case ["decided", id, status]:
                    assert id not in decided, "decided twice"
                    decided[id] = status
    assert len(proposed) > KILLS and len(decided) > KILLS, "they were killed before they did anything"

    with Store.open(home) as store:
        assert AuditFile(store).verify() == []
        for id in proposed:
            assert store.proposals.get(id) is not None
        for id, status in decided.items():
            assert store.proposals.get(id).status == status
            with pytest.raises(Failure, match=r"was (approved|rejected) by operator"):
                store.proposals.decide(id, Decision(ProposalStatus.APPROVED), "late", wall_now())
        entries = store.audit.entries(limit=1_000_000)
    ends = [entry.proposal for entry in entries if entry.action in ("approved", "rejected")]
    assert len(ends) == len(set(ends)) >= len(decided)
    in_file = [json.loads(line) for line in (home / "audit.jsonl").read_text().splitlines()]
    assert [entry["hash"] for entry in in_file] == [entry.hash for entry in entries]
