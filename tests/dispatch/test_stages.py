"""The stages of a call, through a dispatcher with warm workers: preview, confirmation, secrets, items, jobs, keys."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from shotclock.calls.call import CallRequest
from shotclock.core.envelope import Envelope
from shotclock.core.limits import Clocks
from shotclock.dispatch.dispatcher import Dispatcher
from tests.apps.app.programs import cleaner, secretive, streaming


async def call(dispatcher: Dispatcher, name: str, arguments: dict[str, Any], **options: Any) -> Envelope:
    return await asyncio.wait_for(dispatcher.call(CallRequest(name, arguments, **options)), 30)


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOTCLOCK_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("MY_TOOL_TOKEN", raising=False)


def test_what_destroys_is_previewed_until_it_is_confirmed_and_a_preview_changes_nothing(tmp_path: Path) -> None:
    there, path = tmp_path / "there", str(tmp_path / "there")
    there.touch()

    async def scenario() -> None:
        async with cleaner.app.dispatcher() as cleaning:
            for name, arguments, options, code, data in (
                (
                    "wipe",
                    {"path": path},
                    {},
                    "CONFIRMATION_REQUIRED",
                    {"would_run": "wipe", "arguments": {"path": path}},
                ),
                ("wipe", {"path": path}, {"dry_run": True}, None, {"dry_run": True, "would_run": "wipe"}),
                ("wipe", {"path": path}, {"validate_only": True}, None, {"valid": True}),
                ("wipe", {"path": 1}, {}, "ARG_ERROR", None),
                ("wipe", {"path": path, "confirm_destructive": "yes"}, {}, "ARG_ERROR", None),
                ("prune", {"path": path}, {}, "CONFIRMATION_REQUIRED", {"preview": [path]}),
                ("prune", {"path": path, "dry_run": True}, {}, None, [path]),
                ("broken_preview", {"path": path}, {}, "INTERNAL_ERROR", None),
                ("wipe_later", {"path": path}, {}, "CONFIRMATION_REQUIRED", {"would_run": "wipe_later"}),
            ):
                envelope = await call(cleaning, name, arguments, **options)
                assert (envelope.code, envelope.meta["side_effects"]) == (code, "none"), (name, options)
                if isinstance(data, dict):
                    assert isinstance(envelope.data, dict) and data.items() <= envelope.data.items()
                elif data is not None:
                    assert envelope.data == data
            broken: Any = (await call(cleaning, "broken_preview", {"path": path})).error
            assert "its preview (dry_run) failed" in broken["message"] and broken["context"]["preview"] is True
            assert there.exists()
            tidied: Any = (await call(cleaning, "tidy", {"path": path})).data
            assert tidied["ok"] and not there.exists(), "the author has confirmed an inner call"
            for confirmed in ({"confirmed": True}, {}):
                there.touch()
                more = {} if confirmed else {"confirm_destructive": True}
                done = await call(cleaning, "wipe", {"path": path, **more}, **confirmed)
                assert done.ok and done.meta["confirmed"] is True and not there.exists()
            unknown: Any = (await call(cleaning, "wip", {})).error
            assert unknown["code"] == "UNKNOWN_OPERATION" and "wipe" in unknown["suggestion"]

    asyncio.run(scenario())


def test_items_arrive_as_they_are_made_and_secrets_are_needed_and_never_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        async with streaming.app.dispatcher() as streams:
            items: list[object] = []
            counted = await call(streams, "count", {"to": 3}, on_item=items.append)
            assert items == counted.data == [1, 2, 3]
            hung = await call(streams, "hang", {"names": ["a"]}, clocks=Clocks(300))
            assert (hung.code, hung.data) == ("TIMEOUT", [{"name": "a"}])
            stop: asyncio.Future[str] = asyncio.get_running_loop().create_future()
            asyncio.get_running_loop().call_later(0.1, stop.set_result, "SIGTERM")
            stopped = await call(streams, "count", {"to": 9, "pause": 9}, stop=stop)
            assert (stopped.code, stopped.exit_code, stopped.ending) == ("CANCELLED", 143, "killed")
        async with secretive.app.dispatcher() as secret:
            missing: Any = (await call(secret, "login", {"user": "u"})).error
            assert missing["code"] == "ARG_ERROR" and missing["errors"][0]["field"] == "token"
            monkeypatch.setenv("MY_TOOL_TOKEN", "hidden-value")
        async with secretive.app.dispatcher() as secret:
            shown: Any = (await call(secret, "login", {"user": "u", "leak": "data"})).data
            assert shown["length"] == 12 and shown["shown"] == "***"

    asyncio.run(scenario())


def test_a_command_that_may_be_a_job_continues_as_one_and_is_found_again(tmp_path: Path) -> None:
    path = tmp_path / "there"

    async def scenario() -> None:
        async with cleaner.app.dispatcher() as cleaning:
            path.touch()
            done = await call(cleaning, "wipe_later", {"path": str(path)}, confirmed=True, budget_ms=20_000)
            assert done.ok and "job_id" in done.meta and done.meta["confirmed"] is True and not path.exists()
            asked = CallRequest("job list", {})
            for action, job_id, code in (("status", str(done.meta["job_id"]), None), ("list", None, None)):
                admitted = cleaning.begin_own(f"job {action}", Clocks(5_000), None, mutates=False)
                outcome: Any = await cleaning.run_job_command(admitted, action, job_id, asked)
                data = outcome.data if job_id else outcome.data["jobs"][0]
                assert (data["status"], data["terminal"], data["app"]) == ("complete", True, "cleaner"), code
            keyed = await call(cleaning, "touch", {"path": str(path)}, idempotency_key="k")
            path.unlink()
            again = await call(cleaning, "touch", {"path": str(path)}, idempotency_key="k")
            assert again.meta["request_id"] == keyed.meta["request_id"] and not path.exists()

    asyncio.run(scenario())
