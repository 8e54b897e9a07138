"""Secret parameters: from the environment, a file or stdin; in no answer, store, proposal or log."""

import asyncio
import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from shotclock import testing
from tests.apps.app.programs.secretive import app

VALUE = "s3cr3t-Value-42/+x"
ENV = {"MY_TOOL_TOKEN": VALUE}


def test_the_value_is_in_the_environment_and_the_function_has_it(tool: Any) -> None:
    program = tool("secretive.py")
    ran = program("login", "Ada", env={**ENV, "MY_TOOL_PIN": "41"})
    assert ran.json()["data"] == {"user": "Ada", "length": len(VALUE), "shown": "**********", "pin": 42}
    assert ran.stderr == b"**********\n"
    assert program.envelope("later", env=ENV)["data"] == {"result": VALUE[::-1]}


@pytest.mark.slow
def test_the_value_is_in_a_file_or_on_stdin(tool: Any, tmp_path: Path) -> None:
    program = tool("secretive.py")
    file = tmp_path / "token"
    file.write_text(f"{VALUE}\n")
    assert program.envelope("login", "Ada", "--token-file", file)["data"]["length"] == len(VALUE)
    with file.open("rb") as stdin:
        given = program.envelope("login", "Ada", "--token-file=-", stdin=stdin, env={"MY_TOOL_TOKEN": "another"})
    assert given["data"]["length"] == len(VALUE)
    file.write_text("")
    refused = program.envelope("login", "Ada", "--token-file", file, code=2)
    assert "token-file" in refused["error"]["message"] and "it is empty" in refused["error"]["message"]
    refused = program.envelope("login", "Ada", "--token-file", tmp_path / "none", code=2)
    assert "No such file" in refused["error"]["message"]


def test_a_missing_value_and_one_on_the_command_line_are_refused_before_anything_runs(tool: Any) -> None:
    program = tool("secretive.py")
    missing, typed, wrong = program.each([["login", "Ada"], ["login", "Ada", "--token", VALUE], ["later", VALUE]])
    assert missing.json()["error"]["errors"] == [
        {"field": "token", "message": "a secret: set MY_TOOL_TOKEN in the environment"}
    ]
    assert missing.code == typed.code == wrong.code == 2
    assert "did you mean --token-file?" in typed.json()["error"]["message"] and VALUE not in str(typed.json())
    assert "--token-file FILE" in program("login", "--help").stdout.decode()


def test_a_value_that_does_not_fit_is_refused_without_being_shown(tool: Any) -> None:
    ran = tool("secretive.py")("login", "Ada", env={**ENV, "MY_TOOL_PIN": "no-number-here"})
    assert ran.json()["error"]["code"] == "ARGUMENT_REFUSED" and "MY_TOOL_PIN" in ran.json()["error"]["message"]
    assert b"no-number-here" not in ran.stdout + ran.stderr


@pytest.mark.parametrize("leak", ["failure", "bug", "data"])
def test_a_value_that_the_author_reveals_is_removed_from_answer_and_traceback(tool: Any, leak: str) -> None:
    ran = tool("secretive.py")("login", "Ada", "--leak", leak, "--debug", env=ENV)
    assert VALUE.encode() not in ran.stdout + ran.stderr
    assert "***" in ran.stdout.decode()


def test_no_schema_names_it_and_a_client_cannot_give_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_TOOL_TOKEN", VALUE)

    async def test() -> None:
        async with testing.client(app) as client:
            tools = {tool.name: tool for tool in (await client.list_tools()).tools}
            assert sorted(tools["login"].input_schema["properties"]) == ["leak", "user"]
            leaked = await client.call_tool("login", {"user": "Ada", "leak": "data"})
            assert testing.assert_ok(leaked)["length"] == len(VALUE)
            assert VALUE not in leaked.model_dump_json()
            testing.assert_failed(await client.call_tool("login", {"user": "Ada", "token": "x"}), "ARG_ERROR")

    asyncio.run(asyncio.wait_for(test(), 60))


def test_proposals_jobs_and_kept_answers_do_not_have_it(tool: Any, home: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tool("secretive.py")
    asked = program.envelope("guarded", "--budget", "100ms", env=ENV)
    assert asked["data"]["status"] == "pending", asked
    keyed = ["login", "Ada", "--leak", "data", "--idempotency-key", "k"]
    assert program.envelope(*keyed, env=ENV)["ok"]
    assert program.envelope("long", env=ENV)["data"]["length"] == len(VALUE)
    found = subprocess.run(["grep", "-rlaF", VALUE, str(home.path)], capture_output=True, text=True, timeout=30)
    assert found.stdout == ""


def test_the_manifest_names_the_variable_and_the_option(tool: Any) -> None:
    manifest = tool("secretive.py").envelope("manifest")["data"]
    assert "MY_TOOL_TOKEN" in [variable["name"] for variable in manifest["env_vars"]]
    flags = manifest["commands"]["login"]["flags"]
    assert "token-file" in flags and "token" not in flags, json.dumps(flags)
