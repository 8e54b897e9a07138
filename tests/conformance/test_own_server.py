"""The MCP conformance suite against an App, and against the same server on FastMCP; and clients that drive the App."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.conformance.listening import SHOTCLOCK, free_port, listening
from tests.conformance.published_servers import FASTMCP, FOLDER, INSPECTOR, PYDANTIC_AI
from tests.conformance.results import record
from tests.conformance.test_conformance_suite import Checks, conformance, each_suite, summary
from tests.conformance.test_published_servers import CLIENT_S, CLIENTS, seen_by

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
READ_BY_MODEL: list[tuple[str, dict[str, Any], str, list[str]]] = [
    ("test_simple_text", {}, r"This is a simple text response for testing\.", []),
    ("greet", {"name": "Ada"}, "Hello, Ada!", []),
    ("test_image_content", {}, r"See file \w+\.", ["image/png"]),
    (
        "test_error_handling",
        {},
        r'{"error":"COMMAND_FAILED: This tool intentionally returns an error for testing\. It changed nothing\."}',
        [],
    ),
]
"""Calls of an agent, and the text and the other content that its model reads for each."""
OPTIONS = {"tools": (), "call": ("--tool-name", "--tool-args-json"), "read": ("--uri",), "prompt": ("--prompt-name",)}
METHODS = {"tools": "tools/list", "call": "tools/call", "read": "resources/read", "prompt": "prompts/get"}
SHOWN = {"fastmcp": FASTMCP, "inspector": INSPECTOR, "pydantic-ai": PYDANTIC_AI[0]}
each_transport = pytest.mark.parametrize("transport", ["stdio", "HTTP"])


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


@contextlib.contextmanager
def example(transport: str, tmp_path: Path) -> Iterator[list[str]]:
    """Yield the command that starts the example, or the address at which it listens."""
    port, own = free_port(), [SHOTCLOCK, "serve", EXAMPLE]
    if transport == "stdio":
        yield own
    else:
        with listening([*own, "--http", f"127.0.0.1:{port}"], port, tmp_path / "log") as (url, _):
            yield [url]


def seen_by_program(environment: str, program: str, plan: dict[str, Any]) -> dict[str, Any]:
    argv = [str(FOLDER / environment / "bin/python"), str(HERE / program), json.dumps(plan)]
    environ = {**os.environ, "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(argv, env=environ, capture_output=True, timeout=CLIENT_S)
    assert done.returncode == 0, done.stderr.decode()[-2000:]
    assert b"Error parsing" not in done.stderr, done.stderr.decode()[-2000:]
    seen: dict[str, Any] = json.loads(done.stdout)
    return seen


def seen_by_inspector(server: list[str], step: list[Any], home: Path) -> Any:
    """Return the result of one step: the command line of the inspector takes one, and starts the server for it."""
    kind, *words = step
    more = [f"{name}={value}" for name, value in words.pop().items()] if kind == "prompt" else []
    options = [word for pair in zip(OPTIONS[kind], words, strict=True) for word in pair]
    argv = [str(FOLDER / "node_modules/.bin" / name) for name in ("node", "mcp-inspector")]
    argv += ["--cli", "--quiet", "--format", "json", *server, "--method", METHODS[kind]]
    argv += ["--protocol-era", "auto"] if server[0].startswith("http:") else []  # over stdio the older revision
    argv += [word if isinstance(word, str) else json.dumps(word) for word in options]
    argv += ["--prompt-args", *more] if more else []
    done = subprocess.run(argv, env={**os.environ, "HOME": str(home)}, capture_output=True, timeout=CLIENT_S)
    assert done.stdout, done.stderr.decode()[-2000:]
    answer = json.loads(done.stdout.splitlines()[0])["result"]
    assert (done.returncode == 0) is not answer.get("isError", False)
    return answer


@each_transport
@pytest.mark.parametrize("client", [*CLIENTS, "fastmcp", "inspector"])
def test_a_client_drives_the_example(client: str, transport: str, tmp_path: Path) -> None:
    with example(transport, tmp_path) as server:
        plan: dict[str, Any] = {"command": server, "full": False, "steps": STEPS}
        if client == "inspector":  # it cannot complete an argument
            answers = [seen_by_inspector(server, step, tmp_path) for step in STEPS if step[0] != "complete"]
        elif client == "fastmcp":
            answers = seen_by_program("fastmcp", "fastmcp_client.py", plan)["answers"]
            assert answers[1]["value"] == "This is a simple text response for testing."
        else:
            answers = seen_by(client, plan)["answers"]
    tools, text, image, failure, resource, prompt, *completions = answers
    assert "test_simple_text" in [tool["name"] for tool in tools["tools"]]
    assert text["content"][0]["text"] == "This is a simple text response for testing."
    assert (image["content"][0]["type"], image["content"][0]["mimeType"]) == ("image", "image/png")
    assert failure["isError"] and "intentionally returns an error" in failure["content"][0]["text"]
    assert resource["contents"][0]["text"] == "This is the content of the static text resource."
    assert prompt["messages"][0]["content"]["text"] == "Prompt with arguments: arg1='a', arg2='b'"
    assert client == "inspector" or completions[0]["completion"]["values"] == ["paris", "park", "party"]
    record("clients of the example", SHOWN.get(client, client), transport, f"{len(answers)} answers")


@each_transport
def test_the_model_of_an_agent_reads_values_and_no_envelopes(transport: str, tmp_path: Path) -> None:
    steps = [["call", name, arguments] for name, arguments, *_ in READ_BY_MODEL]
    with example(transport, tmp_path) as server:
        seen = seen_by_program("pydantic-ai", "agent_client.py", {"command": server, "steps": steps})
    assert "greet" in seen["tools"]
    for (name, _, text, content), (read, files) in zip(READ_BY_MODEL, seen["read"], strict=True):
        assert re.fullmatch(text, read), name
        assert [file for file in files if not file.startswith("<")] == content, name
    record("clients of the example", SHOWN["pydantic-ai"], transport, f"{len(seen['read'])} answers")
