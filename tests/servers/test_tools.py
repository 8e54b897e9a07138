"""What a client sees of an App: its tools, and one envelope for whatever it calls."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from mcp.shared.exceptions import MCPError

from tests.servers.client import LEGACY, MODERN, TRANSPORTS, connected, envelope_of, run, timed

pytestmark = pytest.mark.usefixtures("no_survivors")

Validate = Callable[[Any], Any]

HELD = """
import os
from dataclasses import dataclass
from shotclock import App, Context, Failure

with open(os.environ["IMPORTED_BY"], "a") as file:
    file.write(f"{os.getpid()}\\n")

app = App("held", default_timeout="5s")

@dataclass
class Box:
    size: int

class Broken(Exception):
    pass

@app.command
def box() -> Box:
    return Box(3)

@app.command
async def box_async() -> list[Box]:
    return [Box(1), Box(2)]

@app.command
def breaks() -> None:
    raise Broken("own class")

@app.command
def fails() -> None:
    raise Failure("COMMAND_FAILED", "no", data=Box(4), context={"box": Box(5)})

@app.command
def nested(ctx: Context) -> object:
    return ctx.call("size-of", {"box": {"size": 6}}).data

@app.command
def size_of(box: Box) -> int:
    return box.size
"""


@pytest.mark.slow
@pytest.mark.parametrize("as_module", [False, True])
def test_the_server_imports_nothing_of_the_app_whatever_its_tools_answer_with(
    as_module: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "held.py").write_text(HELD)
    monkeypatch.setenv("IMPORTED_BY", str(tmp_path / "pids"))
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")

    async def scenario() -> None:
        target = "held:app" if as_module else str(tmp_path / "held.py")
        async with connected(target=target) as (client, server):
            assert (await envelope_of(client, "box"))["data"] == {"size": 3}
            assert (await envelope_of(client, "box-async"))["data"] == [{"size": 1}, {"size": 2}]
            assert "own class" in (await envelope_of(client, "breaks"))["error"]["message"]
            failed = await envelope_of(client, "fails")
            assert failed["error"]["code"] == "COMMAND_FAILED", failed
            assert failed["data"] == {"size": 4}
            assert failed["error"]["context"]["box"] == {"size": 5}
            assert (await envelope_of(client, "nested"))["data"] == {"result": 6}
            assert server.pid not in map(int, (tmp_path / "pids").read_text().split())

    run(scenario())
