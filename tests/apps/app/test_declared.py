"""A command is called by the name it was given, and returns what it declares."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator, validate

from shotclock import App
from tests.apps.app.programs.named import app
from tests.apps.server.client import connected, envelope_in, envelope_of, run

pytestmark = pytest.mark.slow

Validate = Callable[[Any], Any]
TARGET = f"{Path(__file__).parent / 'programs' / 'named.py'}:app"


# --- names ----------------------------------------------------------------------------------------


def test_a_tool_has_the_name_that_was_given_or_the_functions_own():
    async def scenario() -> None:
        async with connected(target=TARGET) as (client, _):
            names = [tool.name for tool in (await client.list_tools()).tools]
            assert names[:4] == ["search_files", "getUser", "shop.list", "import"]
            found = await envelope_of(client, "search_files", {"text": "x"})
            assert found["data"] == ["x"] and found["meta"]["command"] == "search_files"
            assert (await envelope_of(client, "getUser", {"number": 1}))["data"] == {"number": 1}
            assert (await envelope_of(client, "shop.list"))["data"] == {"result": 3}
            # As the command line spells it, and as 0.1 did.
            assert (await envelope_of(client, "search-files", {"text": "x"}))["data"] == ["x"]

    run(scenario())


@pytest.mark.parametrize("name", ["search_files", "search-files", "Search_Files"])
def test_every_spelling_is_understood_on_the_command_line_in_python_and_inside(name: str, tool: Any):
    assert tool("named.py").envelope(name, "x", code=0)["data"] == ["x"]

    async def scenario() -> None:
        async with app:
            assert (await app.call(name, text="x")).data == ["x"]
            inside = await app.call("calls", name=name)
            assert inside.data["data"] == ["x"] and inside.data["meta"]["command"] == "search_files"

    asyncio.run(asyncio.wait_for(scenario(), 60))


def test_the_command_line_lists_the_hyphenated_spelling_and_the_manifest_the_other_as_an_alias(tool: Any):
    program = tool("named.py")
    said = program("--help").stdout.decode()
    assert "search-files" in said and "getuser" in said and "search_files" not in said
    commands = program.envelope("manifest", code=0)["data"]["commands"]
    assert commands["search-files"]["aliases"] == ["search_files"] and commands["getuser"]["aliases"] == ["getUser"]
    assert "aliases" not in commands["import"]


@pytest.mark.parametrize("second", ["find_all", "find-all", "FIND_ALL"])
def test_two_names_that_are_one_on_the_command_line_are_refused_when_declared(second: str):
    made = App("collides")

    @made.command
    def find_all() -> None: ...

    with pytest.raises(ValueError, match=r"already has a command 'find_all'.*'find-all'"):

        @made.command(name=second)
        def other() -> None: ...


@pytest.mark.parametrize("name", ["", "9lives", "a b", "ünder", "x" * 129, "-x", "Manifest", "job"])
def test_a_name_that_no_tool_or_command_can_have_is_refused(name: str):
    made = App("names")

    def other() -> None: ...

    if name:
        with pytest.raises(ValueError):
            made.command(name=name)(other)


# --- results --------------------------------------------------------------------------------------


def test_a_result_that_is_not_what_was_declared_is_an_error_and_is_kept(tool: Any, validate_envelope: Validate):
    program = tool("named.py")
    assert program.envelope("counts", "right", code=0)["data"] == {"result": 3}
    for command, wrong in (("counts", "wrong"), ("counts", "none"), ("counts", "nan"), ("counts-async", "wrong")):
        envelope = validate_envelope(program.envelope(command, wrong, code=1))
        assert envelope["error"]["code"] == "RESULT_INVALID" and "declares: " in envelope["error"]["message"]
    assert envelope["data"] == {"result": "three"}
    assert program.envelope("counts-async", "none", code=0)["data"] is None
    assert "size" in program.envelope("boxes", "--wrong", code=1)["error"]["message"]


def test_the_schema_of_a_tool_fits_every_answer_and_constrains_successes():
    async def scenario() -> None:
        async with connected(target=TARGET) as (client, _):
            schemas = {tool.name: tool.output_schema or {} for tool in (await client.list_tools()).tools}
            assert not [path for schema in schemas.values() for path in lists_of_types(schema)]
            calls: list[tuple[str, dict[str, Any]]] = [
                ("counts", {"result": "right"}),
                ("counts", {"result": "wrong"}),
                ("counts_async", {"result": "none"}),
                ("counts", {}),
                ("boxes", {}),
                ("boxes", {"wrong": True}),
                ("search_files", {"text": "x"}),
                ("calls", {"name": "nobody"}),
            ]
            for name, arguments in calls:
                result = await client.call_tool(name, arguments)
                assert result.is_error is not envelope_in(result)["ok"]
                assert (result.structured_content is None) is result.is_error
                if not result.is_error:
                    validate(result.structured_content, schemas[name])
            assert not Draft202012Validator(schemas["counts"]).is_valid({"result": "three"})

    run(scenario())


def lists_of_types(schema: Any) -> list[Any]:
    if isinstance(schema, dict):
        own = [schema] if isinstance(schema.get("type"), list) else []
        return own + [found for value in schema.values() for found in lists_of_types(value)]
    return [found for value in schema for found in lists_of_types(value)] if isinstance(schema, list) else []


def test_the_manifests_schema_is_that_of_the_data(tool: Any):
    program = tool("named.py")
    commands = program.envelope("manifest", code=0)["data"]["commands"]
    for words in (["counts", "right"], ["counts-async", "none"], ["boxes"], ["search-files", "x"], ["import", "x"]):
        validate(program.envelope(*words, code=0)["data"], commands[words[0]]["output_schema"])


def test_the_manifest_declares_what_a_command_that_asks_a_person_answers(tool: Any):
    commands = tool("guarded.py").envelope("manifest", code=0)["data"]["commands"]
    codes = [code for entry in commands["deploy"]["exit_codes"].values() for code in entry.get("error_codes", [])]
    assert {"INCOMPLETE", "PROPOSAL_REJECTED", "PROPOSAL_EXPIRED", "INPUT_REQUIRED", "RESULT_INVALID"} <= set(codes)
    assert commands["deploy"]["exit_codes"]["14"]["name"] == "INCOMPLETE"
