"""Links that take longer than the click, and devices that were replaced: the result says so, and no page is lost."""

import asyncio
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from shotclock.supervise.clock import monotonic_ns
from shotclock.ui import _browser as browser
from shotclock.ui._execution import ExecutionRun
from shotclock.ui.payload import read_execution

from .conftest import act, data_of, execution
from .pages import Session, kill, needs_browser, serving, session_in

pytestmark = pytest.mark.slow

SNAP = {"id": "snap", "type": "snapshot_ui", "params": {"timeoutMs": 500}}
NAME = {"id": "name", "type": "enter_text", "params": {"matcher": {"css": "#name"}, "text": "Ada"}}
SUBMIT = {"matcher": {"css": "#q"}, "text": "x", "submit": True, "timeoutMs": 1000}
READ = {"id": "read", "type": "read_text", "params": {"matcher": {"css": "#name"}}}


@pytest.mark.parametrize(
    "order", [act("click", "go", "Slow", timeoutMs=1000), {"id": "go", "type": "enter_text", "params": SUBMIT}]
)
def test_a_link_slower_than_its_click_is_navigating_and_the_next_execution_finds_its_page(
    order: dict[str, Any], session: Session
) -> None:
    told = session.run(session.open("/links"), order)
    assert told["ok"] and told["meta"]["side_effects"] == "complete", told
    page = told["data"]["page"]
    assert (page["state"], page["where"], page["next"]) == ("navigating", f"{session.url}/links", "same"), page
    assert page["to"].startswith(f"{session.url}/slow")
    told = session.run(act("wait_for_node", "there", "Slow page", timeoutMs=9000))
    assert told["ok"] and told["data"]["page"]["state"] == "changed" and told["warnings"] == [], told


def test_actions_on_a_page_that_navigates_for_ever_fail_without_effect_and_another_address_opens(
    session: Session,
) -> None:
    assert session.run(session.open("/links"), act("click", "go", "Never", timeoutMs=800))["ok"]
    told = session.run(SNAP)
    assert told["error"]["code"] == "EVAL_TIMEOUT" and f"navigating to {session.url}/never" in told["error"]["message"]
    assert told["data"]["page"]["state"] == "navigating" and told["data"]["page"]["next"] == "same"
    told = session.run(act("click", "again", "Slow", timeoutMs=500))
    assert told["error"]["code"] == "WAIT_TIMEOUT" and told["meta"]["side_effects"] == "none", told
    told = session.run(session.open("/details"))
    assert told["ok"] and told["data"]["page"]["state"] == "changed" and told["warnings"] == [], told


def test_a_navigation_that_is_pending_for_too_long_is_stopped_and_the_form_is_still_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    needs_browser()
    monkeypatch.setattr(browser, "NAVIGATION_MS", 1000)  # the thirty seconds

    async def run(device: Any, *actions: Any) -> dict[str, Any]:
        return await ExecutionRun(read_execution(execution(*actions)), device, lambda event: None).run()

    async def look(url: str) -> None:
        device = await browser.open_device("browser", None)  # type: ignore[arg-type]
        try:
            opening = {"id": "open", "type": "open_uri", "params": {"uri": f"{url}/links"}}
            told = await run(device, opening, NAME, act("click", "go", "Never", timeoutMs=500))
            assert told["page"]["state"] == "navigating", told
            give_up_ns = monotonic_ns() + 20_000_000_000
            while (told := await run(device, SNAP))["page"]["next"] == "same":
                assert monotonic_ns() < give_up_ns, told
            assert told["page"] == {"state": "navigating", "where": f"{url}/links", "next": "recovered"}
            told = await run(device, READ)
            assert told["stepResults"][0]["data"]["text"] == "Ada" and told["page"]["state"] == "same", told
        finally:
            await device.close()

    with serving() as url:
        asyncio.run(asyncio.wait_for(look(url), 60))


def test_a_replaced_device_or_page_is_reported_once_in_the_next_answer(tmp_path: Path) -> None:
    def replaced(envelope: dict[str, Any]) -> tuple[str, list[str]]:
        return envelope["data"]["page"]["state"], [each["code"] for each in envelope["warnings"]]

    fresh, same = ("fresh", ["DEVICE_REPLACED"]), ("same", [])
    with session_in(tmp_path / "home") as session:
        assert replaced(session.run(session.open("/"))) == ("changed", [])  # the first ever replaces nothing
        status = session.status()
        assert status is not None
        os.kill(status["pid"], signal.SIGKILL)
        told = session.run(act("read_text", "read", "Shop", timeoutMs=500))
        assert told["error"]["code"] == "WAIT_TIMEOUT" and replaced(told) == fresh, told
        assert replaced(session.run(act("sleep", "s", durationMs=0))) == same
        session.stop()
        assert replaced(session.run(session.open("/"))) == fresh
        kill(session.processes("--type=renderer"))
        give_up_at = time.monotonic() + 20
        while (told := session.run(SNAP))["ok"]:  # the page is still being lost
            assert time.monotonic() < give_up_at, told
        assert told["data"]["page"]["next"] == "fresh", told
        assert replaced(session.run(session.open("/"), act("read_text", "read", "Shop"))) == fresh
        told = session.run(act("read_text", "read", "Shop"))
        assert replaced(told) == same and data_of(told, "read")["text"] == "Shop"
