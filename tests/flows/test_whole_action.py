"""The approval of a step is about everything that the file decides of what runs: no two steps that differ in any of it
share a text, and so an approval. Every key of every kind of step is among them."""

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from shotclock.core.proposal import Proposal, ProposalStatus
from shotclock.flows.file.schema import ToolPart
from shotclock.flows.steps.provider import STEP_TYPES, StepPart
from shotclock.people.inbox import Inbox
from shotclock.store.store import Store

pytestmark = [pytest.mark.usefixtures("no_survivors", "warm_starts"), pytest.mark.slow]

# Of each kind one step as it is, and by key what else it could have. A key that changes nothing of what runs is named
# with a reason.
STEPS: dict[str, dict[str, Any]] = {
    "command": {"exec": "cat", "cwd": "here", "env": {"A": "1"}},
    "http_client": {"url": "http://127.0.0.1:9/"},
    "mcp": {"command": "echo", "method": "t"},
    "tool": {"tool": "one", "arguments": {"a": "0"}},
    "git-checkout": {"repository": "https://127.0.0.1:9/y.git"},
    "function": {"target": "one.py:app", "command": "c"},
    "workflow": {"workflow": "one.yaml"},
    "ai": {"prompt": "p", "ai": {"model": "gpt-5.5"}},
    "ui": {"actions": [{"id": "a", "type": "sleep", "params": {"durationMs": 1000}}]},
}
OTHERWISE: dict[str, dict[str, list[Any]]] = {
    "command": {
        "exec": ["cat ", "tac"],
        "stdin": ["", "x"],
        "shell": ["bash", "sh"],
        "output_format": ["text"],
        "stop_signal": ["SIGINT"],
        "cwd": ["there"],
        "env": [{"A": "2"}, {"A": "1", "B": ""}, {"a": "1"}, {}],
        "on_fail": [{"retry": {"max": 2}}],
        "overtime": [{"command": "./ask"}, {"command": "./other"}],
    },
    "http_client": {
        "url": ["http://127.0.0.1:9/x"],
        "method": ["POST", "PUT"],
        "params": [{"a": "1"}, {"a": "2"}],
        "headers": [{"a": "1"}, {"Authorization": "one-literal"}, {"Authorization": "two-literal"}],
        "body": ["x", {"n": 9007199254740993}, {"n": 9007199254740992}, {"n": "9007199254740992"}],
        "max_body_bytes": [10],
        "output_file": ["f"],
    },
    "mcp": {
        "command": ["false"],
        "args": [["a"], ["a", "b"], ["a b"]],
        "method": ["u"],
        "arguments": [{"n": 1}, {"n": 1.0}, {"n": "1"}, {"n": True}],
        "env": [{"A": "1"}],
    },
    "tool": {"tool": ["two", "three", "four", "five", "six"], "arguments": [{"a": "1"}, {"a": "2"}]},
    "git-checkout": {
        "repository": ["https://127.0.0.1:9/z.git"],
        "ref": ["v1"],
        "path": ["p"],
        "fetch_depth": [3],
    },
    "function": {"target": ["two.py:app", "one.py:other"], "command": ["d"], "arguments": [{"n": 1}, {"n": "1"}]},
    "workflow": {"workflow": ["two.yaml"], "inputs": [{"a": "1"}, {"a": "2"}]},
    "ai": {
        "prompt": ["q"],
        "prompt_file": ["prompt.txt"],
        "ai": [
            {"model": "gpt-5.6"},
            {"model": "gpt-5.5", "tools": "one"},
            {"model": "gpt-5.5", "tools": "two"},
            {"model": "gpt-5.5", "tools": "seven"},
            {"model": "gpt-5.5", "tools": "eight"},
            {"model": "gpt-5.5", "mcp_servers": {"s": {"command": "a"}}},
            {"model": "gpt-5.5", "mcp_servers": {"s": {"command": "b"}}},
        ],
    },
    "ui": {
        "actions": [[{"id": "a", "type": "sleep", "params": {"durationMs": 2000}}]],
        "execution": ["{}"],
        "device": ["android"],
        "mode": ["artifact_compiled"],
    },
}
SAYS_NOTHING_OF_WHAT_RUNS = {
    "type": "is part of the text by itself, and each kind is its own test",
    "connect_timeout": "is a clock",
    "clone_timeout_ms": "is a clock",
    "transport": "only repeats what command and url say",
}
# A server by its address instead of a command.
BY_ADDRESS = [{"url": "http://127.0.0.1:9/mcp"}, {"url": "http://127.0.0.1:9/m"}, {"headers": {"A": "1"}}]
TOOLS: dict[str, dict[str, Any]] = {
    "one": {"exec": "echo {{ args.a }}"},
    "two": {"exec": "cat {{ args.a }}"},
    "three": {"exec": "echo {{ args.a }}", "shell": "bash"},
    "four": {"exec": "echo {{ args.a }}", "stdin": "x"},
    "five": {"exec": "echo {{ args.a }}", "env": {"A": "1"}},
    "six": {"exec": "echo {{ args.a }}", "cwd": "here"},
    "seven": {"workflow": "one.yaml"},
    "eight": {"workflow": "two.yaml"},
}


def variants_of(kind: str) -> list[dict[str, Any]]:
    plain = STEPS[kind]
    made = [plain]
    for key, values in OTHERWISE[kind].items():
        apart = {"prompt": ("prompt_file",), "execution": ("actions",), "prompt_file": ("prompt",)}.get(key, ())
        kept = {name: value for name, value in plain.items() if name not in apart}
        made += [{**kept, key: value} for value in values]
    if kind == "mcp":
        address = BY_ADDRESS[0]
        made += [{"method": "t", **address, **more} for more in BY_ADDRESS]
    return made


def test_every_key_of_a_step_that_decides_what_runs_is_tried() -> None:
    for kind in STEPS:
        own = set(STEP_TYPES[kind].schema.model_fields) - set(StepPart.model_fields)
        tried = {*OTHERWISE[kind], *(["url", "headers"] if kind == "mcp" else [])}
        assert own - SAYS_NOTHING_OF_WHAT_RUNS.keys() <= tried, kind
    assert {name for name in STEP_TYPES if name != "human-input"} == set(STEPS)
    assert set(ToolPart.model_fields) <= {key for tool in TOOLS.values() for key in tool} | {
        "name", "description", "input_schema", "timeout",
    }  # fmt: skip


def test_two_steps_that_differ_in_anything_that_runs_never_share_the_text_of_an_approval(tmp_path: Path) -> None:
    for name in ("here", "there"):
        (tmp_path / name).mkdir()
    for name in ("one", "two"):
        (tmp_path / f"{name}.py").write_text("app = other = judge = None")
        (tmp_path / f"{name}.yaml").write_text("inputs: {a: {default: ''}}\nsteps: {s: {exec: 'true'}}\n")
    (tmp_path / "prompt.txt").write_text("from a file")
    variants = [(kind, each) for kind in STEPS if kind != "ui" for each in variants_of(kind)]
    steps = {f"v{at}": {"type": kind, "approval": True, **each} for at, (kind, each) in enumerate(variants)}
    file = {"max_parallelism": len(steps), "tools": TOOLS, "steps": steps}
    (tmp_path / "flow.json").write_text(json.dumps(file))
    environment = {
        **os.environ,
        "SHOTCLOCK_HOME": str(tmp_path / "home"),
        "SHOTCLOCK_RESPONSE_TIMEOUT": "1500ms",
        "OPENAI_API_KEY": "of nobody",
    }
    words = [sys.executable, "-m", "shotclock", "run", "flow.json", "--run-id", "r"]
    ran = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, timeout=50)
    assert ran.returncode == 14, ran.stdout
    texts = asyncio.run(read_texts(tmp_path / "home"))
    assert len(texts) == len(variants)
    seen: dict[str, int] = {}
    for at, variant in enumerate(variants):
        text = texts[f"run r step v{at}"].replace(f"step v{at}", "step v")
        assert text not in seen, (variants[seen[text]], variant)
        seen[text] = at


def test_a_checkout_without_a_repository_shows_the_one_that_it_will_use(tmp_path: Path) -> None:
    step = {"type": "git-checkout", "ref": "main", "clone_timeout_ms": 600000, "approval": True}
    (tmp_path / "flow.json").write_text(json.dumps({"steps": {"checkout-repo": step}}))
    environment = {
        **os.environ,
        "SHOTCLOCK_HOME": str(tmp_path / "home"),
        "SHOTCLOCK_RESPONSE_TIMEOUT": "100ms",
        "GITHUB_REPOSITORY": "owner/name",
    }
    for words, code in ((["plan", "flow.json"], 0), (["run", "flow.json", "--run-id", "r"], 14)):
        ran = subprocess.run(
            [sys.executable, "-m", "shotclock", *words], cwd=tmp_path, env=environment, capture_output=True, timeout=50
        )
        assert ran.returncode == code, ran.stdout
        if code == 0:
            plan = json.loads(ran.stdout)["data"]
            assert plan["repositories"] == {"checkout-repo": "https://github.com/owner/name"}
    (text,) = asyncio.run(read_texts(tmp_path / "home")).values()
    assert "https://github.com/owner/name" in text


async def read_texts(home: Path) -> dict[str, str]:
    with Store.open(home) as store:
        inbox = Inbox(store)
        found = [await inbox.get(each.id) for each in await inbox.list(status=ProposalStatus.PENDING, limit=200)]
        await inbox.close()
    return {str(each.ask.operation): each.ask.text for each in found if isinstance(each, Proposal)}
