"""A destructive command shows what it would do, and does it only when whoever calls has confirmed that."""

import asyncio
import os
from pathlib import Path
from typing import Any

import pytest

from shotclock.calls.runtime import Runtime
from shotclock.core.limits import Clocks
from shotclock.flows.run.step_attempt import run_attempt
from shotclock.flows.steps._function_calls import FunctionProvider
from shotclock.flows.steps.provider import StepCall
from tests.apps.app.conftest import PROGRAMS, fields_of
from tests.apps.server.client import connected, envelope_of, run

pytestmark = pytest.mark.slow


@pytest.fixture
def precious(tmp_path: Path) -> Path:
    (tmp_path / "precious").touch()
    return tmp_path / "precious"


def assert_only_shown(envelope: Any, precious: Path, command: str) -> None:
    assert (envelope["error"]["code"], envelope["meta"]["exit_code"]) == ("CONFIRMATION_REQUIRED", 2)
    assert envelope["data"]["would_run"] == command.replace("-", "_")
    assert envelope["data"]["arguments"] == {"path": str(precious)}
    assert envelope["data"].get("preview") == ([str(precious)] if command == "prune" else None)
    assert (envelope["meta"]["ending"], envelope["meta"]["side_effects"]) == ("not_started", "none")
    assert envelope["error"]["phase"] == "validation" and "confirmed" not in envelope["meta"]
    assert precious.exists()


@pytest.mark.requirement("O-021")
@pytest.mark.parametrize("command", ["wipe", "prune", "wipe-later"])
def test_on_the_command_line_it_is_only_shown_until_it_is_confirmed(
    command: str, tool: Any, precious: Path, validate_envelope: Any
):
    program = tool("cleaner.py")
    assert_only_shown(validate_envelope(program.envelope(command, precious, code=2)), precious, command)
    envelope = validate_envelope(program.envelope(command, precious, "--confirm-destructive", code=0))
    assert envelope["meta"]["confirmed"] is True and envelope["meta"]["side_effects"] == "complete"
    assert not precious.exists()


@pytest.mark.requirement("O-021")
def test_arguments_that_are_wrong_are_told_before_anybody_has_to_confirm(tool: Any):
    program = tool("cleaner.py")
    assert fields_of(program.envelope("wipe", code=2)) == ["path"]
    assert fields_of(program.envelope("touch", "x", "--confirm-destructive", code=2)) == ["--confirm-destructive"]


@pytest.mark.requirement("C-004")
def test_a_dry_run_and_a_look_at_the_arguments_need_no_confirmation(tool: Any, precious: Path):
    program = tool("cleaner.py")
    for option in ("--dry-run", "--validate-only"):
        for confirmed in ([], ["--confirm-destructive"]):
            envelope = program.envelope("prune", precious, option, *confirmed, code=0)
            assert precious.exists() and "confirmed" not in envelope["meta"], (option, confirmed)


def test_where_a_person_decides_no_option_confirms(tool: Any, precious: Path):
    program = tool("cleaner.py")
    assert program.envelope("personal", precious, code=4)["error"]["code"] == "PERSON_REQUIRED"
    assert program.envelope("approved", precious, "--budget", "1ms", code=14)["error"]["code"] == "INCOMPLETE"
    for command in ("personal", "approved"):
        wrong = program.envelope(command, precious, "--confirm-destructive", code=2)
        assert fields_of(wrong) == ["--confirm-destructive"]
    assert precious.exists()


@pytest.mark.requirement("O-021")
def test_over_mcp_an_argument_confirms(tool: Any, tmp_path: Path, precious: Path):
    tool("cleaner.py")

    async def scenario() -> None:
        async with connected(target=f"{tmp_path / 'cleaner.py'}:app") as (client, _):
            listed = {each.name: each.input_schema["properties"] for each in (await client.list_tools()).tools}
            said = {name: "confirm_destructive" in properties for name, properties in listed.items()}
            assert said["wipe"] and said["prune"] and not said["touch"] and not said["approved"]
            here = {"path": str(precious)}
            assert_only_shown(await envelope_of(client, "prune", here), precious, "prune")
            rehearsed = await envelope_of(client, "prune", {**here, "dry_run": True})
            assert rehearsed["ok"] and rehearsed["meta"]["side_effects"] == "none" and precious.exists()
            wrong = await envelope_of(client, "wipe", {**here, "confirm_destructive": "yes"})
            assert fields_of(wrong) == ["confirm_destructive"] and precious.exists()
            assert_only_shown(
                await envelope_of(client, "wipe", {**here, "confirm_destructive": False}), precious, "wipe"
            )
            done = await envelope_of(client, "wipe", {**here, "confirm_destructive": True})
            assert done["ok"] and done["meta"]["confirmed"] is True and not precious.exists()

    run(scenario())


def test_in_python_an_argument_or_an_option_confirms(precious: Path):
    from tests.apps.app.programs.cleaner import app

    async def scenario() -> None:
        async with app:
            assert_only_shown((await app.call("wipe", path=precious)).to_dict(), precious, "wipe")
            done = await app.call("wipe", path=precious, confirm_destructive=True)
            assert done.ok and done.meta["confirmed"] is True and not precious.exists()
            precious.touch()
            done = await app.call_with("wipe", {"path": precious}, confirm_destructive=True)
            assert done.ok and not precious.exists()

    asyncio.run(asyncio.wait_for(scenario(), 60))


def test_a_function_step_confirms_in_its_arguments(precious: Path):
    async def scenario() -> list[Any]:
        provider, said = FunctionProvider(), []
        async with Runtime() as runtime:
            try:
                for more in ({}, {"confirm_destructive": True}):
                    arguments = {"path": str(precious), **more}
                    settings = {"target": f"{PROGRAMS / 'cleaner.py'}:app", "command": "wipe", "arguments": arguments}
                    step = StepCall("it", settings, Clocks.of("20s"), dict(os.environ), PROGRAMS)
                    said.append((await run_attempt(provider, step, runtime)).envelope.to_dict())
                    assert precious.exists() is not bool(more)
            finally:
                await provider.close()
        return said

    shown, done = asyncio.run(asyncio.wait_for(scenario(), 60))
    assert shown["error"]["code"] == "CONFIRMATION_REQUIRED" and done["ok"]


def test_the_manifest_says_what_confirms(tool: Any):
    commands = tool("cleaner.py").envelope("manifest", code=0)["data"]["commands"]
    assert commands["wipe"]["confirm_flag"] == "confirm-destructive" in commands["wipe"]["flags"]
    assert "CONFIRMATION_REQUIRED" in commands["wipe"]["exit_codes"]["2"]["error_codes"]
    for name in ("personal", "approved", "touch"):
        assert "confirm_flag" not in commands[name] and "confirm-destructive" not in commands[name]["flags"]
