"""Exit codes that a command chooses, and messages to a person under the tool's own name."""

import asyncio
from typing import Any

from shotclock import testing
from tests.apps.app.programs.exits import app


def test_sys_exit_in_a_command_is_the_exit_code_of_the_program(tool: Any, validate_envelope: Any) -> None:
    calls = [["leave", "3"], ["leave-later", "4"], ["leave", "--code", "256"], ["leave", "--code", "-1"]]
    for ran, code in zip(tool("exits.py").each(calls), (3, 4, 1, 255), strict=True):
        envelope = validate_envelope(ran.json())
        assert (ran.code, envelope["meta"]["exit_code"]) == (code, code)
        assert envelope["error"]["code"] == "GENERAL_ERROR" and f"exit code {code}" in envelope["error"]["message"]
        assert ran.stderr == b""


def test_a_client_is_given_the_exit_code_and_the_text() -> None:
    async def test() -> None:
        async with testing.client(app) as client:
            left = await client.call_tool("leave", {"code": 3})
            assert testing.assert_failed(left, "GENERAL_ERROR")["message"] == "leave left with exit code 3"
            explained = await client.call_tool("explain", {})
            testing.assert_failed(explained, "GENERAL_ERROR", message="the disk is full")

    asyncio.run(asyncio.wait_for(test(), 60))


def test_a_person_reads_a_message_of_the_author_under_the_tools_name_and_no_traceback(tool: Any) -> None:
    calls = [[command, "--format", "text"] for command in ("explain", "fail")]
    for ran in tool("exits.py").each(calls):
        assert (ran.code, ran.stdout, ran.stderr) == (1, b"", b"exits: the disk is full\n")


def test_bugs_mistakes_and_the_version_are_reported_under_the_tools_name(tool: Any) -> None:
    calls = [["break-down", "--format", "text"], ["leave", "--format", "text"], ["--version", "--format", "text"]]
    bug, mistake, version = tool("exits.py").each(calls)
    assert bug.stderr.startswith(b"exits: break_down raised (request ") and b"\nexits: INTERNAL_ERROR: " in bug.stderr
    assert mistake.stderr.startswith(b"exits: ARG_ERROR: code: ") and b"shotclock" not in mistake.stderr
    assert version.stdout == b"exits 1.2\n"


def test_the_job_commands_of_a_tool_speak_under_its_name(tool: Any) -> None:
    program = tool("secretive.py")
    unknown, mistake = program.each(
        [["job", "status", "none", "--format", "text"], ["job", "wait", "--format", "text"]]
    )
    assert unknown.stderr.startswith(b"my-tool: ") and mistake.stderr.startswith(b"my-tool: ARG_ERROR: ")
