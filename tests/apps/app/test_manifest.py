"""`manifest`: everything a caller needs to know, as the contract wants it."""

import json
from typing import Any

import pytest
from jsonschema import Draft7Validator
from referencing import Registry, Resource

from tests.conftest import SPEC

pytestmark = [pytest.mark.usefixtures("no_survivors"), pytest.mark.slow]


@pytest.fixture(scope="module")
def validate_manifest() -> Any:
    entry = json.loads((SPEC / "exit-code-entry.json").read_text("utf-8"))
    schema = json.loads((SPEC / "manifest-response.json").read_text("utf-8"))
    registry: Any = Registry().with_resources([(entry["$id"], Resource.from_contents(entry))])
    validator = Draft7Validator(schema, registry=registry)

    def validate(manifest: dict[str, Any]) -> dict[str, Any]:
        problems = [f"{error.json_path}: {error.message[:300]}" for error in validator.iter_errors(manifest)]
        assert not problems, "\n".join(problems)
        return manifest

    return validate


@pytest.mark.requirement("C-001")
def test_the_manifest_of_a_rich_app_keeps_the_contract(tool: Any, validate_envelope: Any, validate_manifest: Any):
    manifest = validate_manifest(validate_envelope(tool().envelope("manifest", code=0))["data"])
    commands = manifest["commands"]
    assert {"types", "import", "stepped", "manifest"} <= set(commands)
    for name, command in commands.items():
        assert {"0", "2"} <= set(command["exit_codes"]), name
        assert command["danger_level"] == "safe" or command["exit_codes"]["10"]["retryable"] is False, name
    assert "SHOP_NO_STOCK" in commands["sell"]["exit_codes"]["90"]["error_codes"]
    assert commands["stepped"]["steps"] == ["fetch", "build", "publish"]
    assert commands["stepped"]["flags"]["resume-from"]["enum_values"] == ["fetch", "build", "publish"]
    assert commands["wipe"]["danger_level"] == "destructive" and "dry-run" in commands["wipe"]["flags"]
    assert "dry-run" not in commands["echo"]["flags"]
    assert commands["danger"]["requires_person"] is True and commands["danger"]["mcp"] is False
    assert commands["echo"]["danger_level"] == "safe"
    flags = commands["types"]["flags"]
    assert flags["mode"]["type"] == "enum" and flags["mode"]["enum_values"] == ["fast", "slow"]
    assert flags["count"]["required"] is True and flags["ratio"]["default"] == 0.5
    assert flags["point"]["type"] == "object"
    assert "idempotency-key" in flags


@pytest.mark.requirement("C-001")
@pytest.mark.requirement("F-080")
def test_a_command_that_may_go_on_declares_exit_14_and_the_commands_to_go_on_with(tool: Any, validate_manifest: Any):
    manifest = validate_manifest(tool("long.py").envelope("manifest", code=0)["data"])
    command = manifest["commands"]["count"]
    assert command["interruption"] == {
        "detach": True,
        "resume": True,
        "idle_timeout_ms": 300_000,
        "max_lifetime_ms": 3_600_000,
    }
    assert "INCOMPLETE" in command["exit_codes"]["14"]["error_codes"]
    assert "JOB_LOST" in command["exit_codes"]["1"]["error_codes"]
    assert "budget" in command["flags"]
    assert {"job list", "job status", "job wait", "job cancel"} <= set(manifest["commands"])
    assert "LOCK_HELD" in manifest["commands"]["flash"]["exit_codes"]["4"]["error_codes"]


@pytest.mark.requirement("F-012")
def test_whether_a_timeout_may_be_retried_is_what_the_manifest_declared(tool: Any, tmp_path: Any):
    program = tool()
    commands = program.envelope("manifest", code=0)["data"]["commands"]
    reading, writing = program.start("waits", "60"), program.start("stepped", tmp_path)
    for name, running in (("waits", reading), ("stepped", writing)):
        envelope = running.ends().json()
        declared = commands[name]["exit_codes"]["10"]
        assert envelope["meta"]["exit_code"] == 10 and "TIMEOUT" in declared["error_codes"]
        assert envelope["error"]["retryable"] is declared["retryable"] is (name == "waits")


def test_every_word_of_the_manifest_is_a_word_of_the_command_line(tool: Any):
    """The flags that are promised are understood: `--help` is made from the parser itself."""
    program = tool()
    commands = program.envelope("manifest", code=0)["data"]["commands"]
    for name in ("types", "stepped", "wipe"):
        help_text = program(name, "--help").stdout.decode()
        for flag in commands[name]["flags"]:
            assert f"--{flag}" in help_text, (name, flag)


APP = """
from shotclock import App
app = App("tool", version="1")

@app.command({options})
def take(a: int{parameter}) -> None:
    "Take it."

app()
"""


def test_the_etag_changes_when_a_command_does_and_only_then(tool: Any):
    variants = [("", ""), ("", ""), ("timeout='5s'", ""), ("mutates=False", ""), ("", ", b: int = 2")]
    tags = [
        tool(f"v{number}.py", APP.format(options=options, parameter=parameter)).envelope("manifest", code=0)["data"][
            "etag"
        ]
        for number, (options, parameter) in enumerate(variants)
    ]
    assert tags[0] == tags[1], "the same app, started twice"
    assert len(set(tags)) >= 3
    assert tags[3] != tags[0] != tags[4]
