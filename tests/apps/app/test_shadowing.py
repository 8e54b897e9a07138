"""Parameters that are called like an option of every command: the option goes before the command then."""

import asyncio
from typing import Any

import pytest

from shotclock import testing
from tests.apps.app.programs.shadowing import app


@pytest.mark.slow
def test_behind_the_command_the_name_is_the_parameters_and_before_it_ours(tool: Any) -> None:
    program = tool("shadowing.py")
    calls = [
        ["--timeout", "5s", "fetch", "u", "--timeout", "3", "--json", "--debug", "yes"],
        ["--timeout=7s", "fetch", "--url", "u"],
        ["fetch", "u", "--no-json", "--timeout=2.5"],
        ["plain", "--timeout", "6s", "Ada"],
        ["--timeout", "6s", "plain", "Ada"],
    ]
    both, ours, theirs, plain, plain_before = [ran.json() for ran in program.each(calls)]
    assert both["data"] == {"url": "u", "timeout": 3, "json": True, "debug": "yes"}
    assert both["meta"]["timeout_ms"] == 5000
    assert (ours["data"]["timeout"], ours["meta"]["timeout_ms"]) == (1.5, 7000)
    assert (theirs["data"]["timeout"], theirs["meta"]["timeout_ms"]) == (2.5, 20_000)
    assert plain["meta"]["timeout_ms"] == plain_before["meta"]["timeout_ms"] == 6000


def test_the_other_options_are_shadowed_in_the_same_way(tool: Any) -> None:
    program = tool("shadowing.py")
    after = ["--idempotency-key", "theirs", "--budget", "3", "--resume-from", "x", "--validate-only"]
    before = ["--resume-from", "second"]
    data = program.envelope(*before, "move", *after)["data"]
    assert data == {"key": "theirs", "budget": 3, "from": "x", "only": True, "skips": True}
    checked = program.envelope("--validate-only", "move")
    assert checked["ok"] and "skips" not in (checked["data"] or {})


def test_mistakes_name_the_option_that_was_meant(tool: Any) -> None:
    program = tool("shadowing.py")
    outer, inner = program.each([["--timeout", "soon", "fetch", "u"], ["fetch", "u", "--timeout", "soon"]])
    assert "'soon' is not a duration" in outer.json()["error"]["message"]
    assert inner.json()["error"]["errors"][0]["field"] == "timeout" and "duration" not in str(inner.json()["error"])


def test_help_shows_both(tool: Any) -> None:
    page = tool("shadowing.py")("fetch", "--help").stdout.decode()
    parameters, _, outer = page.partition("Options before the command:")
    assert "TIMEOUT, --timeout" in parameters and "Stop the work" not in parameters
    assert "--timeout D" in outer and "--json" in outer and "--debug" in outer and "--format" not in outer


def test_a_client_gives_such_a_parameter_as_any_other() -> None:
    async def test() -> None:
        async with testing.client(app) as client:
            fetched = testing.assert_ok(await client.call_tool("fetch", {"url": "u", "timeout": 3, "json": True}))
            assert (fetched["timeout"], fetched["json"]) == (3, True)

    asyncio.run(asyncio.wait_for(test(), 60))
