"""What runs now on the operators' page: seen live, extended and wound down from there, by operators alone."""

import json
import os
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from shotclock.calls.principal import Role
from tests.apps.web.conftest import shoot
from tests.apps.web.serving import Served, serving
from tests.warm import WarmStart

expect = pytest.importorskip("playwright.sync_api").expect

pytestmark = [pytest.mark.usefixtures("no_survivors"), pytest.mark.slow]

WITHIN_S = 60.0
# What is shown is called old after 5 s.
STALE_MS = 20_000
FLOW = """
name: nightly
timeout: 10m
steps:
  fetch: {exec: echo fetched}
  build:
    exec: 'trap "echo part; exit 0" TERM; touch up; sleep 120 & wait'
    timeout: 200
    soft: 150
    overtime: {observer: none, budget: 60s}
    depends_on: [fetch]
  ship: {exec: echo shipped, depends_on: [build]}
"""


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    with serving(tmp_path) as server:
        yield server


@pytest.fixture
def nightly(tmp_path: Path, served: Served) -> Iterator[subprocess.Popen[bytes]]:
    """A run in a process of its own, in the middle of its second step."""
    (tmp_path / "flow.yaml").write_text(textwrap.dedent(FLOW))
    process = WarmStart(
        [sys.executable, "-m", "shotclock", "run", "flow.yaml", "--run-id", "nightly-1"],
        cwd=tmp_path,
        env={**os.environ, "SHOTCLOCK_HOME": str(served.home)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    try:
        wait_for((tmp_path / "up").exists)
        yield process
    finally:
        process.kill()
        process.wait(WITHIN_S)


def wait_for(condition: Callable[[], Any]) -> None:
    give_up_at = time.monotonic() + WITHIN_S
    while not condition():
        assert time.monotonic() < give_up_at
        time.sleep(0.02)


def test_the_api_lists_extends_and_stops_for_operators_only(served: Served, nightly: Any) -> None:
    agent, operator = served.token("ann", Role.AGENT), served.token("eve", Role.OPERATOR)
    for method, path in (("GET", ""), ("POST", "/extend"), ("POST", "/stop")):
        refused = served.ask(method, f"/api/running{path}", None if method == "GET" else {}, token=agent)
        assert (refused.status, refused.code) == (403, "NOT_ALLOWED")
    [run] = served.ask("GET", "/api/running", token=operator).data["runs"]
    assert (run["id"], run["name"]) == ("nightly-1", "nightly")
    assert [(step["id"], step["status"]) for step in run["steps"]] == [
        ("fetch", "succeeded"), ("build", "running"), ("ship", "pending"),
    ]  # fmt: skip
    [call] = run["steps"][1]["calls"]
    assert call["timeout_ms"] == 200_000 and 0 < call["remaining_ms"] <= 200_000 and call["soft_ms"] > 0
    step = {"run": "nightly-1", "step": "build"}
    told = served.ask("POST", "/api/running/extend", {**step, "by_ms": 30_000}, token=operator).data
    assert told["extended"][0]["timeout_ms"] == 230_000
    for path, body, code in (
        ("extend", step, "ARG_ERROR"),
        ("extend", {"by_ms": 1}, "ARG_ERROR"),
        ("extend", {"run": "nosuch", "by_ms": 1}, "CALL_NOT_FOUND"),
        ("stop", {"run": "nightly-1", "step": "ship"}, "CALL_NOT_FOUND"),
        ("stop", {"request_id": "nosuch"}, "CALL_NOT_FOUND"),
        ("dance", {}, "UNKNOWN_OPERATION"),
    ):
        assert served.ask("POST", f"/api/running/{path}", body, token=operator).code == code, (path, body)
    assert served.ask("POST", "/api/running/stop", {"run": "nightly-1"}, token=operator).data["stopping"]
    out, _ = nightly.communicate(timeout=WITHIN_S)
    envelope = json.loads(out)
    assert envelope["data"]["steps"]["build"]["output"] == "part"
    events = [
        (told["event"], told.get("asked_by") or told["by"]) for told in envelope["data"]["steps"]["build"]["overtime"]
    ]
    assert events == [("overtime", "eve"), ("wind_down", "eve")]
    assert served.ask("GET", "/api/running", token=operator).data["runs"] == []


def test_an_operator_extends_and_winds_down_a_step_on_the_page(served: Served, nightly: Any, opened: Any) -> None:
    page = opened(served)
    page.get_by_role("tab", name="Running").click()
    row = page.locator("li.row", has_text="nightly")
    expect(row).to_contain_text("build")
    row.click()
    build = page.locator("li.step", has_text="build").first
    expect(build).to_contain_text("running")
    expect(build.locator(".left-text")).to_contain_text("left")
    before = build.locator(".left-text").text_content()
    expect(build.locator(".left-text")).not_to_have_text(str(before))  # it runs down
    build.get_by_role("button", name="+5 m").click()
    expect(build).to_contain_text("5 m 00 s more by")
    expect(build.locator(".left-text")).to_contain_text("m")
    shoot(page, "running")
    as_of = page.locator(".facts .age")
    expect(as_of).to_have_text("now")
    page.route("**/api/running", lambda route: route.abort())
    expect(page.locator("#detail [role=alert]")).to_contain_text("Shown as it was", timeout=STALE_MS)
    expect(as_of).to_contain_text("s ago", timeout=STALE_MS)
    page.unroute("**/api/running")
    expect(as_of).to_have_text("now", timeout=STALE_MS)
    expect(page.locator("#detail [role=alert]")).to_have_count(0)
    build.get_by_role("button", name="Wind down").click()
    build.get_by_role("button", name="press again").click()
    expect(page.locator("#detail")).to_contain_text("It does not run any more")
    page.get_by_role("tab", name="Waiting").click()
    expect(page.locator("#detail")).to_contain_text("Nothing waits for you")
    out, _ = nightly.communicate(timeout=WITHIN_S)
    steps = json.loads(out)["data"]["steps"]
    assert steps["build"]["output"] == "part" and steps["ship"]["status"] == "succeeded"


GATED = "steps: {deploy: {exec: echo deployed, approval: true}, beside: {exec: echo beside}}"


@pytest.fixture
def gated(tmp_path: Path, served: Served) -> Iterator[subprocess.Popen[bytes]]:
    """A run in a process of its own that only waits for a person."""
    (tmp_path / "flow.yaml").write_text(GATED)
    process = WarmStart(
        [sys.executable, "-m", "shotclock", "run", "flow.yaml", "--run-id", "gated-1", "--budget", "0"],
        cwd=tmp_path,
        env={**os.environ, "SHOTCLOCK_HOME": str(served.home)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait(WITHIN_S)


def test_a_step_that_waits_for_a_person_is_linked_to_its_proposal(served: Served, gated: Any, opened: Any) -> None:
    operator = served.token("eve", Role.OPERATOR)

    def find() -> Any:
        runs = served.ask("GET", "/api/running", token=operator).data["runs"]
        return next((step["waits_for"] for run in runs for step in run["steps"] if step["id"] == "deploy"), [])

    wait_for(find)
    [proposal_id] = find()
    page = opened(served)
    page.get_by_role("tab", name="Running").click()
    row = page.locator("li.row", has_text="flow")
    expect(row).to_contain_text(f"waits for {proposal_id}")
    row.click()
    deploy = page.locator("li.step", has_text="deploy").first
    expect(deploy).to_contain_text(f"waits for {proposal_id}")
    expect(deploy).not_to_contain_text("running")
    shoot(page, "running-waits")
    deploy.get_by_role("link", name=proposal_id).click()
    expect(page.locator("#detail")).to_contain_text("Run step deploy of flow")
    action_hash = served.ask("GET", f"/api/inbox/{proposal_id}", token=operator).data["proposal"]["action_hash"]
    body = {"status": "approved", "action_hash": action_hash}
    decided = served.ask("POST", f"/api/inbox/{proposal_id}/decision", body, token=operator).data["proposal"]
    assert decided["run"]["run_id"] == "gated-1" and decided["run"]["state"] == "not_started"
    out, _ = gated.communicate(timeout=WITHIN_S)
    deployed = json.loads(out)["data"]["steps"]["deploy"]
    assert deployed["status"] == "succeeded" and 0 < deployed["waited_ms"] <= deployed["duration_ms"]
    assert "waits_for" not in deployed
