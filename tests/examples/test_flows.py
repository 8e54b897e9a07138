"""Every example is run for real: real servers, a real repository, a person at a terminal."""

import asyncio
import json
import os
import re
import sqlite3
import subprocess
import tarfile
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from shotclock.calls.principal import Principal
from shotclock.core.proposal import Decision, ProposalStatus
from shotclock.flows.check.lint import lint
from shotclock.flows.check.plan import plan_of
from shotclock.flows.file.loader import load_file
from shotclock.people.inbox import Inbox
from shotclock.store.store import Store
from tests.flows.steps.model_servers import CallTool, model_server
from tests.rows import row
from tests.warm import starting_warm

from .conftest import EXAMPLES, FLOWS, SHOTCLOCK, Result

pytestmark = pytest.mark.usefixtures("no_survivors")
Run = Callable[..., Result]

GIT_LIMIT_S = 30.0
SERVER_ENDS_WITHIN_S = 10.0


def test_an_example_has_nothing_that_check_would_say_against_it_and_a_plan_that_fits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "of nobody")
    for flow in FLOWS:
        with row(flow.name):
            loaded = load_file(flow)
            assert loaded.workflow is not None and lint(loaded) == []
            plan = plan_of(loaded.workflow)
            assert plan.worst_ms is not None and plan.worst_ms <= (plan.run_timeout_ms or 0)


def test_no_example_is_left_out() -> None:
    named = {"tour.yaml", "ci.yaml", "poll-api.yaml", "audit-repo.yaml", "release.yaml", "review.yaml"}
    assert {flow.name for flow in FLOWS if "supervise" not in flow.parts} == named


# --- ci -------------------------------------------------------------------------------------------


@pytest.fixture
def project(folder: Path) -> Path:
    (folder / "sums.py").write_text("def add(a, b):\n    return a + b  # TODO: floats\n")
    (folder / "test_sums.py").write_text(
        "import unittest\nfrom sums import add\n\n\n"
        "class Sums(unittest.TestCase):\n    def test_add(self):\n        self.assertEqual(add(1, 2), 3)\n"
    )
    return folder


@pytest.mark.slow
def test_ci_packs_a_project_whose_tests_pass(run: Run, project: Path) -> None:
    ran = run("ci.yaml")
    assert ran.code == 0 and set(ran.statuses.values()) == {"succeeded"}, ran.error
    size = (project / "dist" / "package.tar.gz").stat().st_size
    assert ran.data["outputs"] == {"summary": f"1 open ends, package of {size} bytes"}
    with tarfile.open(project / "dist" / "package.tar.gz") as package:
        assert {"./sums.py", "./test_sums.py"} <= set(package.getnames())


@pytest.mark.slow
def test_ci_packs_nothing_when_a_test_fails_and_says_which(run: Run, project: Path) -> None:
    (project / "sums.py").write_text("def add(a, b):\n    return a - b\n")
    ran = run("ci.yaml")
    assert ran.code == 3
    assert ran.statuses["unit-tests"] == "failed" and ran.statuses["syntax"] == "succeeded"
    assert "AssertionError: -1 != 3" in ran.step("unit-tests")["error"]["context"]["stderr"]
    # fail_fast: what had not started when the failure came never did
    assert ran.statuses["package"] == "skipped" and ran.statuses["summary"] == "skipped"
    assert not (project / "dist").exists()


# --- poll-api -------------------------------------------------------------------------------------


class Service(ThreadingHTTPServer):
    """Makes reports, each of which is ready when it was asked for the third time."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.ordered: list[str] = []
        self.asked: dict[str, int] = {}
        self.ready_after = 3


class Handler(BaseHTTPRequestHandler):
    server: Service

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.ordered.append(body["name"])
        self.say(202, {"status": "ordered"})

    def do_GET(self) -> None:
        name, _, content = self.path.removeprefix("/reports/").partition("/")
        if name not in self.server.ordered:
            self.say(404, {"error": "nobody has ordered it"})
        elif content:
            self.say(200, {"items": ["it's", 'a "b"', "$(c)"]})
        else:
            asked = self.server.asked[name] = self.server.asked.get(name, 0) + 1
            self.say(200, {"status": "ready" if asked >= self.server.ready_after else "pending"})

    def say(self, status: int, body: object) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def service() -> Iterator[Service]:
    server = Service()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    yield server
    server.shutdown()
    thread.join(SERVER_ENDS_WITHIN_S)
    server.server_close()


@pytest.mark.slow
def test_poll_api_asks_until_the_report_is_ready_and_counts_what_is_in_it(run: Run, service: Service) -> None:
    ran = run("poll-api.yaml", api=f"http://127.0.0.1:{service.server_port}", report="sales")
    assert ran.code == 0 and set(ran.statuses.values()) == {"succeeded"}, ran.error
    assert service.ordered == ["sales"] and service.asked == {"sales": 3}
    assert ran.step("ready")["attempts"] == 3 and ran.step("order")["attempts"] == 1
    assert ran.step("fetch")["output"]["items"][2] == "$(c)"
    assert ran.data["outputs"] == {"items": 3}


# --- audit-repo -----------------------------------------------------------------------------------


@pytest.fixture
def repository(tmp_path: Path) -> Callable[..., Path]:
    """A function that makes a repository with these files in one commit."""

    def make(files: dict[str, str]) -> Path:
        place = tmp_path / "somewhere" / "project"
        for name, text in files.items():
            (place / name).parent.mkdir(parents=True, exist_ok=True)
            (place / name).write_text(text)
        who = ["-c", "user.name=Somebody", "-c", "user.email=somebody@example.org"]
        for words in (["init", "-q", "-b", "main"], ["add", "."], [*who, "commit", "-q", "-m", "All of it"]):
            subprocess.run(["git", *words], cwd=place, check=True, timeout=GIT_LIMIT_S)
        return place

    return make


@pytest.mark.slow
def test_audit_repo_finds_nothing_in_a_clean_repository(
    run: Run, repository: Callable[..., Path], folder: Path
) -> None:
    place = repository({"app.py": "print('hello')\n", "doc/long.txt": "x" * 5000, "LICENSE": "MIT\n"})
    ran = run("audit-repo.yaml", repository=place)
    assert ran.code == 0 and set(ran.statuses.values()) == {"succeeded"}, ran.error
    assert ran.step("checkout")["output"]["path"] == str(folder / "project")
    assert (folder / "project" / "app.py").read_text() == "print('hello')\n"
    assert ran.data["outputs"] == {
        "verdict": "nothing that looks like a secret",
        "secrets": {"count": 0, "places": []},
        "licences": {"count": 1, "files": ["LICENSE"]},
        "largest": "5000 ./doc/long.txt\n15 ./app.py\n4 ./LICENSE",
    }
    assert ran.step("largest")["timeout_ms"] == 20_000  # the tool's own


@pytest.mark.slow
def test_audit_repo_says_where_a_secret_is_and_does_not_repeat_it(
    run: Run, repository: Callable[..., Path], folder: Path
) -> None:
    place = repository({"conf/app.py": "debug = True\nAPI_KEY = 'c0ffee-c0ffee-c0ffee'\n", "it's.txt": "x"})
    ran = run("audit-repo.yaml", repository=place)
    assert ran.code == 3
    assert ran.data["failed"] == ["verdict"] and ran.error is not None and "verdict" in ran.error["message"]
    said = ran.step("verdict")["error"]["context"]["stderr"]
    assert said == 'looks like a secret: ["conf/app.py:2"]\n'
    assert ran.step("licences")["output"] == {"count": 0, "files": []}
    assert "c0ffee" not in json.dumps(ran.data)
    assert "c0ffee" not in "".join(_everything_stored(folder))


def _everything_stored(folder: Path) -> Iterator[str]:
    for file in (folder.parent / "home").glob("*.db"):
        with sqlite3.connect(file) as database:
            yield from database.iterdump()


# --- release --------------------------------------------------------------------------------------


@pytest.fixture
def registry(project: Path) -> Path:
    (project / "registry").mkdir()
    return project / "registry"


def outcome(folder: Path) -> Result:
    """Of the last run, from its report."""
    words = [*SHOTCLOCK, "report", "release-1"]
    with starting_warm():
        said = subprocess.run(words, stdout=subprocess.PIPE, cwd=folder, check=True, timeout=GIT_LIMIT_S)
    data = json.loads(said.stdout)["data"]
    return Result(0, {**data, "steps": {step["id"]: step for step in data["steps"]}}, data["error"])


RELEASE = [*SHOTCLOCK, "run", "release.yaml", "--input", "version=1.2.0", "--run-id", "release-1"]


@pytest.mark.slow
def test_release_off_a_terminal_waits_in_the_inbox_and_does_what_was_answered(
    run: Run, shotclock: Callable[..., Any], registry: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHOTCLOCK_RESPONSE_TIMEOUT", "200ms")
    parked = run("release.yaml", version="1.2.0")
    assert parked.code == 14, parked.error
    assert parked.statuses["ci"] == "succeeded" and parked.statuses["approve"] == "pending"
    assert not list(registry.iterdir())
    answered(parked.data["waiting"][0]["proposal_id"], "yes")
    envelope = shotclock("run", "--resume", parked.data["run_id"], timeout=60).json()
    ended = {name: step["status"] for name, step in envelope["data"]["steps"].items()}
    assert envelope["ok"] and envelope["data"]["outputs"] == {"answer": "yes"}
    assert ended["publish"] == "succeeded"
    assert [file.name for file in registry.iterdir()] == ["package-1.2.0.tar.gz"]


def answered(proposal_id: str, said: str) -> None:
    async def work() -> None:
        with Store.open() as store:
            inbox = Inbox(store)
            await inbox.decide(proposal_id, Decision(ProposalStatus.APPROVED, answer=said), Principal.local())
            await inbox.close()

    asyncio.run(asyncio.wait_for(work(), 20))


@pytest.mark.slow
def test_release_publishes_when_a_person_at_the_terminal_says_yes(
    answer: Callable[..., tuple[int, str]], registry: Path, folder: Path
) -> None:
    code, screen = answer(RELEASE, "yes")
    assert code == 0, screen
    assert re.search(r"\? Release 1\.2\.0\? \(1 open ends, package of \d+ bytes\) \(yes \| no\) \[no\]", screen)
    assert [file.name for file in registry.iterdir()] == ["package-1.2.0.tar.gz"]
    assert (folder / "tags.txt").read_text() == "v1.2.0\n"
    ran = outcome(folder)
    assert ran.statuses["publish"] == "succeeded" and ran.step("withdraw")["reason"] == "on_demand"
    assert ran.step("approve")["output"] == "yes"


@pytest.mark.slow
def test_release_publishes_nothing_when_a_person_only_presses_enter(
    answer: Callable[..., tuple[int, str]], registry: Path, folder: Path
) -> None:
    code, screen = answer(RELEASE, "")
    assert code == 0, screen
    assert not list(registry.iterdir()) and not (folder / "tags.txt").exists()
    assert outcome(folder).step("approve")["output"] == "no"


@pytest.mark.slow
def test_release_takes_back_what_was_begun_when_publishing_fails(
    answer: Callable[..., tuple[int, str]], project: Path
) -> None:
    (project / "tags.txt").write_text("v1.1.0\n")
    code, screen = answer(RELEASE, "yes")  # there is no registry
    assert code == 3, screen
    ran = outcome(project)
    assert ran.statuses["publish"] == "failed" and ran.step("publish")["attempts"] == 2
    assert ran.statuses["withdraw"] == "succeeded"
    assert (project / "tags.txt").read_text() == "v1.1.0\n"
    assert "No such file or directory" in ran.step("publish")["error"]["context"]["stderr"]


# --- tour -----------------------------------------------------------------------------------------


def is_gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


@pytest.mark.slow
def test_the_tour_shows_a_kill_a_skip_a_retry_and_a_silence(
    folder: Path, shotclock: Callable[..., Any], validate_envelope: Callable[..., Any]
) -> None:
    ran = shotclock("run", EXAMPLES / "tour.yaml", timeout=60)
    envelope = validate_envelope(ran.json())
    assert ran.code == 3 and envelope["error"]["code"] == "STEPS_FAILED"
    result = Result(ran.code, envelope["data"], envelope["error"])
    assert result.statuses == {
        "hang": "timed_out",
        "publish": "skipped",
        "anything-left": "succeeded",
        "silent": "timed_out",
        "start-service": "succeeded",
        "ask-service": "succeeded",
        "leaves-a-daemon": "succeeded",
    }
    hang = result.step("hang")
    assert hang["ending"] == "killed" and hang["error"]["context"]["clock"]["kind"] == "timeout"
    assert hang["duration_ms"] >= 3000, "it ignores SIGTERM, so it has all of its grace"
    assert len(hang["output"]) == 2 and all(is_gone(pid) for pid in hang["output"])
    assert (result.step("publish")["reason"], result.step("publish")["cause"]) == ("dependency_failed", "hang")
    silent = result.step("silent")
    assert silent["ending"] == "killed" and silent["error"]["context"]["clock"]["kind"] == "idle"
    assert silent["output"] == "connecting ..."
    assert result.step("ask-service")["attempts"] >= 2
    warned = result.step("leaves-a-daemon")["warnings"]
    assert [warning["code"] for warning in warned] == ["DESCENDANTS_STOPPED"]
    assert result.data["outputs"] == {
        "anything left": "nothing: the command and its daemon are gone",
        "service": "it answers",
    }
    assert ran.elapsed_s < 30


# --- review ---------------------------------------------------------------------------------------


@pytest.fixture
def change(tmp_path: Path) -> Path:
    """A repository whose last commit adds what looks like a key."""
    folder = tmp_path / "changed"
    folder.mkdir()

    def git(*words: str) -> None:
        identity = ("-c", "user.name=a", "-c", "user.email=a@example.org")
        subprocess.run(["git", *identity, *words], cwd=folder, check=True, capture_output=True, timeout=GIT_LIMIT_S)

    git("init", "-q")
    (folder / "shop.py").write_text("PRICE = 1\n")
    git("add", ".")
    git("commit", "-qm", "begin")
    (folder / "shop.py").write_text('PRICE = 2\napi_key = "0123456789abcdef"\n')
    git("commit", "-qam", "change")
    return folder


def model_that_reviews(request: dict[str, Any]) -> Any:
    """Looks for secrets over MCP, shows the file, then answers by what it was told."""
    told = [message for message in request["messages"] if message["role"] == "tool"]
    tools = [tool["function"]["name"] for tool in request["tools"]]
    if not told:
        assert "+api_key" in json.dumps(request["messages"]), "the change is in the prompt"
        folder = re.search(r"repository in (\S+)\. You have \d+ milliseconds", json.dumps(request["messages"]))
        assert folder is not None
        return CallTool(next(name for name in tools if "find_secrets" in name), {"folder": folder[1]})
    if len(told) == 1:
        return CallTool("show", {"file": "shop.py"})
    assert "shop.py:2" in told[0]["content"] and "PRICE = 2" in told[1]["content"]
    return CallTool(None, {"verdict": "bad", "findings": ["shop.py:2 holds a key"]})


@pytest.mark.slow
def test_review_asks_a_model_with_tools_and_fails_where_the_change_is_bad(
    run: Run, change: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with model_server(model_that_reviews) as server:
        for name, value in {**server.openai, "SHOTCLOCK_AI_MODEL": "reviewer"}.items():
            monkeypatch.setenv(name, value)
        ran = run("review.yaml", folder=change)
    assert ran.statuses == {"diff": "succeeded", "review": "succeeded", "verdict": "failed"}, ran.error
    assert ran.data["outputs"] == {"verdict": "bad", "findings": ["shop.py:2 holds a key"]}
    assert "shop.py:2 holds a key" in ran.step("verdict")["error"]["context"]["stderr"]
