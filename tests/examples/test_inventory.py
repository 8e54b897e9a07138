"""The server of docs/howto/from-fastmcp.md: only imports and decorators differ, and clients get the same answers.

The original runs in tests/conformance, where FastMCP is installed.
"""

import ast
import asyncio
import base64
import difflib
import os
import re
import socket
import struct
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from mcp import Client, StdioServerParameters

from tests.examples import inventory_session as session
from tests.examples.inventory_session import ANSWERS_WITHIN_S, CALLS, Fails, Picture, Session, drive

ROOT = Path(__file__).resolve().parents[2]
ORIGINAL = ROOT / "tests" / "conformance" / "fastmcp_inventory.py"
PORT = ROOT / "examples" / "inventory.py"
PAGE = ROOT / "docs" / "howto" / "from-fastmcp.md"


# --- the files --------------------------------------------------------------------------------------


def comparable(path: Path) -> list[str]:
    """Return the statements of a server without imports, decorators, and the lines that make and run it."""
    kept = []
    for statement in ast.parse(path.read_text()).body:
        is_made = isinstance(statement, ast.Assign) and ast.unparse(statement.targets[0]) == "mcp"
        if isinstance(statement, ast.Import | ast.ImportFrom | ast.If) or is_made:
            continue
        if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef):
            statement.decorator_list = []
        kept.append(ast.dump(statement))
    return kept


def test_the_port_differs_in_imports_decorators_and_the_lines_that_make_and_run_the_server() -> None:
    original = comparable(ORIGINAL)
    assert comparable(PORT) == original and len(original) > 14
    text = ORIGINAL.read_text()
    assert (text.count("@mcp.tool"), text.count("@mcp.resource"), text.count("@mcp.prompt")) == (8, 2, 1)
    changed = [line[1:] for line in difference() if line[0] in "+-" and line[1:].strip()]
    assert all(re.match(r"(from|import|@|mcp = |    mcp\.)", line) for line in changed), changed


def difference() -> list[str]:
    files = [path.read_text().splitlines() for path in (ORIGINAL, PORT)]
    return list(difflib.unified_diff(*files, n=1_000, lineterm=""))[3:]


def test_the_page_shows_both_files() -> None:
    (shown,) = re.findall(r"```diff\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert shown.splitlines() == [line.rstrip() if line == " " else line for line in difference()]


# --- the answers ------------------------------------------------------------------------------------


def check(seen: Session) -> None:
    """Hold what a client saw against the expected answers, for either server."""
    names = sorted(seen.offered["tools"])
    assert names == ["add", "chart", "gross", "load", "reorder", "search", "supplier_price", "take"]
    assert seen.offered["tools"]["search"] == (["limit", "query"], ["query"], True)
    assert seen.offered["tools"]["take"] == (["count", "name"], ["name", "count"], False)
    assert seen.offered["instructions"] == "What a shop has in stock."
    assert seen.offered["resources"] == ["inventory://summary"]
    assert (seen.offered["templates"], seen.offered["prompts"]) == (["inventory://items/{name}"], ["letter"])
    for (name, arguments, expected), answer in zip(CALLS, seen.answers, strict=True):
        check_answer(f"{name} {arguments}", expected, answer)
    for uri, expected in session.RESOURCES.items():
        if isinstance(expected, Fails):
            check_answer(uri, expected, seen.resources[uri])
        else:
            assert seen.resources[uri] == expected
    assert seen.letter == ("user", session.LETTER)
    assert sorted(seen.log) == session.LOG
    assert seen.progress == session.PROGRESS
    assert seen.questions == session.QUESTIONS


def check_answer(call: str, expected: Any, answer: Any) -> None:
    kind, *rest = answer
    if isinstance(expected, Fails):
        assert kind == "failed" and expected.words in rest[0], call
    elif isinstance(expected, Picture):
        assert kind == "image", call
        size = struct.unpack(">II", base64.b64decode(rest[0])[16:24])
        assert size == (expected.width, expected.height), call
    else:
        structured, text = rest
        assert structured == (expected if isinstance(expected, dict) else {"result": expected}), call
        assert text == expected if isinstance(expected, str) else ast.literal_eval(text) == expected, call


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["auto", "legacy"])
def test_a_client_gets_the_answers_of_the_original(mode: str, no_survivors: object, tmp_path: Path) -> None:
    state = {"SHOTCLOCK_HOME": str(tmp_path)}
    check(asyncio.run(drive([sys.executable, str(PORT)], mode, state)))


# --- what is gained ---------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_tool_whose_supplier_never_answers_ends_and_the_next_call_works(no_survivors: object, tmp_path: Path) -> None:
    async def call(url: str) -> list[Any]:
        environ = {**os.environ, "SHOTCLOCK_HOME": str(tmp_path)}
        server = StdioServerParameters(command=sys.executable, args=[str(PORT)], env=environ)
        async with Client(server, read_timeout_seconds=ANSWERS_WITHIN_S) as client:
            meta: Any = {"shotclock.dev/timeoutMs": 300}
            hung = await client.call_tool("supplier_price", {"url": url}, meta=meta)
            return [session.answer_of(hung), session.answer_of(await client.call_tool("gross", {"price": 10}))]

    with socket.create_server(("127.0.0.1", 0)) as silent:
        accepted: list[Any] = []
        thread = threading.Thread(target=lambda: accepted.append(silent.accept()), daemon=True)
        thread.start()
        hung, after = asyncio.run(call(f"http://127.0.0.1:{silent.getsockname()[1]}/"))
        thread.join(ANSWERS_WITHIN_S)
    accepted[0][0].close()
    assert hung[0] == "failed" and "timed out after 300ms" in hung[1]
    assert after[1] == {"result": 11.9}
