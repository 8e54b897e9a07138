"""The MCP conformance suite against an App, and against the same server on FastMCP; and clients that drive the App."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.conformance.listening import SHOTCLOCK, free_port, listening
from tests.conformance.published_servers import FASTMCP, FOLDER
from tests.conformance.results import record
from tests.conformance.test_conformance_suite import Checks, conformance, each_suite, summary
from tests.conformance.test_published_servers import CLIENTS, seen_by

pytestmark = pytest.mark.timeout(400)
HERE = Path(__file__).parent
EXAMPLE = f"{HERE.parents[1] / 'examples' / 'conformance.py'}:app"
MISSES = {
    "json-schema-2020-12": "the schema of a command follows from its annotations; rules across parameters, such as "
    "`allOf` and `if`, cannot be declared",
    "tasks-mrtr-composition": "a command that may be a task is one from its start: it asks in the task, not before it",
    "tasks-required-task-error": "a client without tasks gets its result, or `INCOMPLETE` with the id of the job; "
    "the scenario wants a refusal",
}
"""The scenarios with a failed check, and the reason. One that passes is removed from here."""
STEPS: list[list[Any]] = [
    ["tools"],
    ["call", "test_simple_text", {}],
    ["call", "test_image_content", {}],
    ["call", "test_error_handling", {}],
    ["read", "test://static-text"],
    ["prompt", "test_prompt_with_arguments", {"arg1": "a", "arg2": "b"}],
    ["complete", "test_prompt_with_arguments", "arg1", "par"],
]


def failed(seen: Checks) -> set[str]:
    return {scenario for scenario, checks in seen.items() if any(status == "FAILURE" for _, status in checks)}


def counts(seen: Checks) -> str:
    """Return the numbers of a run. The suite counts a scenario without an applicable check as passed."""
    empty = sum(not any(status in ("SUCCESS", "FAILURE") for _, status in checks) for checks in seen.values())
    return f"{len(seen) - len(failed(seen))} of {summary(seen)}; {empty} scenarios without a check"


@each_suite
def test_every_scenario_passes_or_has_a_recorded_reason(suite: str, tmp_path: Path) -> None:
    port, peer_port = free_port(), free_port()
    own = [SHOTCLOCK, "serve", EXAMPLE, "--http", f"127.0.0.1:{port}"]
    peer = [str(FOLDER / "fastmcp/bin/python"), str(HERE / "fastmcp_server.py"), str(peer_port)]
    sides = {}
    for side, argv, number in (("shotclock", own, port), (FASTMCP, peer, peer_port)):
        with listening(argv, number, tmp_path / f"{side}.log") as (url, _):
            sides[side] = conformance(suite, ["server", "--suite", "all", "--url", url], tmp_path / side)
        record("servers that you write", suite, side, counts(sides[side]))
    ours = sides["shotclock"]
    for scenario in sorted(failed(ours) & MISSES.keys()):
        record("the missed scenarios", scenario, "reason", MISSES[scenario])
    assert failed(ours) == MISSES.keys() & ours.keys()


@pytest.mark.parametrize("transport", ["stdio", "HTTP"])
@pytest.mark.parametrize("client", CLIENTS)
def test_a_client_drives_the_example(client: str, transport: str, tmp_path: Path) -> None:
    port, own = free_port(), [SHOTCLOCK, "serve", EXAMPLE]
    plan: dict[str, Any] = {"command": own, "full": False, "steps": STEPS}
    if transport == "stdio":
        seen = seen_by(client, plan)
    else:
        with listening([*own, "--http", f"127.0.0.1:{port}"], port, tmp_path / "log") as (url, _):
            seen = seen_by(client, {**plan, "command": [url]})
    tools, text, image, failure, resource, prompt, completion = seen["answers"]
    assert "test_simple_text" in [tool["name"] for tool in tools["tools"]]
    assert text["content"][0]["text"] == "This is a simple text response for testing."
    assert (image["content"][0]["type"], image["content"][0]["mimeType"]) == ("image", "image/png")
    assert failure["isError"] and "intentionally returns an error" in failure["content"][0]["text"]
    assert resource["contents"][0]["text"] == "This is the content of the static text resource."
    assert prompt["messages"][0]["content"]["text"] == "Prompt with arguments: arg1='a', arg2='b'"
    assert completion["completion"]["values"] == ["paris", "park", "party"]
    record("clients of the example", client, transport, f"{len(seen['answers'])} answers")
