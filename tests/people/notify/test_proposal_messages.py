"""Notifications of proposals: once for a new one, from every surface that asks, and never a reason to fail."""

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Ran
from tests.flows.test_people import YES, Runs, runs
from tests.people.notify.servers import Taken, web_server
from tests.wrap.client import wrapped
from tests.wrap.test_policy import Server, server

__all__ = ["runs", "server"]

pytestmark = [pytest.mark.usefixtures("no_survivors", "warm_starts"), pytest.mark.slow]

Shotclock = Callable[..., Ran]
PAGE = "http://inbox.example:8766"


@pytest.fixture
def taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Taken]:
    """A server that the user's file names for proposals."""
    with web_server() as taken:
        folder = tmp_path / "config" / "shotclock"
        folder.mkdir(parents=True)
        entry = f'[[notify]]\non = ["proposed"]\nwebhook = "{taken.url}/proposed"\n'
        (folder / "config.toml").write_text(f'page = "{PAGE}/"\n{entry}')
        monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
        monkeypatch.setenv("SHOTCLOCK_HOME", str(tmp_path / "home"))
        monkeypatch.setenv("SHOTCLOCK_RESPONSE_TIMEOUT", "500ms")
        yield taken


def events(taken: Taken) -> list[dict[str, Any]]:
    return [json.loads(request.body) for request in taken.items]


def propose(shotclock: Shotclock, title: str) -> tuple[str, float]:
    ran = shotclock("inbox", "propose", "--as", "builder", "--title", title, "--wait", "0")
    assert ran.code == 14, ran.stdout
    return ran.json()["data"]["proposal_id"], ran.elapsed_s


def reasons(shotclock: Shotclock, proposal_id: str) -> list[Any]:
    entries = shotclock("inbox", "audit", proposal_id).json()["data"]["entries"]
    return [each["details"]["reasons"] for each in entries if each["action"] == "not-notified"]


def test_a_new_proposal_is_sent_once_with_a_link_that_holds_no_key(shotclock: Shotclock, taken: Taken) -> None:
    proposal_id, _ = propose(shotclock, "Allow github.com")
    again, _ = propose(shotclock, "Allow github.com")
    assert again == proposal_id
    [event] = events(taken)
    assert (event["event"], event["proposal_id"], event["asked_by"]) == ("proposed", proposal_id, "builder")
    assert event["title"] == "builder asks: Allow github.com"
    assert event["link"] == f"{PAGE}/#/{proposal_id}"
    assert reasons(shotclock, proposal_id) == []


def test_a_secret_in_a_title_is_not_sent(shotclock: Shotclock, taken: Taken, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DEPLOY_TOKEN", "opensesame")
    propose(shotclock, "Deploy with opensesame")
    assert events(taken)[0]["title"] == "builder asks: Deploy with ***"


def test_a_failure_is_in_the_history_of_the_proposal_which_stays_open(shotclock: Shotclock, taken: Taken) -> None:
    taken.status = 500
    proposal_id, _ = propose(shotclock, "Allow github.com")
    [[reason]] = reasons(shotclock, proposal_id)
    assert reason.startswith(f"webhook 127.0.0.1:{taken.port}: answered 500")
    assert shotclock("inbox", "audit", "--verify").code == 0
    assert shotclock("inbox", "approve", proposal_id).json()["data"]["status"] == "approved"


def test_a_server_that_does_not_answer_delays_the_one_who_asks_by_five_seconds_at_most(
    shotclock: Shotclock, taken: Taken
) -> None:
    taken.drips = True
    proposal_id, elapsed_s = propose(shotclock, "Allow github.com")
    assert elapsed_s < 10
    assert reasons(shotclock, proposal_id) == [[f"webhook 127.0.0.1:{taken.port}: did not end within 5s"]]


def test_a_mistake_in_the_users_file_is_in_the_history(shotclock: Shotclock, taken: Taken, tmp_path: Path) -> None:
    (tmp_path / "config" / "shotclock" / "config.toml").write_text("[[notify]]\non = ['proposed']\nntfy = 'x'\n")
    proposal_id, _ = propose(shotclock, "Allow github.com")
    [[reason]] = reasons(shotclock, proposal_id)
    assert "notify.0.ntfy: is not the URL of a web server" in reason


def test_the_approval_of_a_step_is_sent_when_it_is_asked_for(taken: Taken, runs: Runs) -> None:
    parked = runs(runs.flow("steps: {ship: {exec: echo ship >> done, approval: true}}\n"), "--run-id", "r1", code=14)
    [event] = events(taken)
    assert event["proposal_id"] == parked["data"]["waiting"][0]["proposal_id"]
    runs("--resume", "r1", code=14)  # asks the same
    runs.decide(YES)
    runs("--resume", "r1", code=0)
    assert len(taken.items) == 1
    assert runs.done() == ["ship"]


def test_a_call_of_a_wrapped_server_is_sent(server: Server, taken: Taken, tmp_path: Path) -> None:
    with wrapped("--ask", "write_*", "--ask-wait", "300ms", server=server.command) as client:
        began = time.monotonic()
        client.receive(client.call("write_file", path="/etc/passwd"))
        [event] = [json.loads(request.body) for request in taken.wait_for(1)]
        assert time.monotonic() - began < 15
    assert "write_file" in event["title"]
    assert event["link"] == f"{PAGE}/#/{event['proposal_id']}"
