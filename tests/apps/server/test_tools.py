"""What a client sees of an App: its tools, and one envelope for whatever it calls."""

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from mcp.shared.exceptions import MCPError

from shotclock.apps.server._tools import BURST, INTERVAL_S
from tests.apps.server.client import (
    LEGACY,
    MODERN,
    SOME_TRANSPORTS,
    connected,
    envelope_in,
    envelope_of,
    run,
    timed,
)
from tests.rows import corners

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("no_survivors")]

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


@pytest.mark.parametrize("as_module", corners([False, True], False))
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
            assert (await envelope_of(client, "breaks"))["error"]["context"] == {"exception": "Broken"}
            failed = await envelope_of(client, "fails")
            assert failed["error"]["code"] == "COMMAND_FAILED", failed
            assert failed["data"] == {"size": 4}
            assert failed["error"]["context"]["box"] == {"size": 5}
            assert (await envelope_of(client, "nested"))["data"] == {"result": 6}
            assert server.pid not in map(int, (tmp_path / "pids").read_text().split())

    run(scenario())


# --- the list -------------------------------------------------------------------------------------


def test_the_list_says_what_each_command_declared() -> None:
    async def scenario() -> None:
        async with connected("stdio", "auto") as (client, _):
            listed = {tool.name: tool for tool in (await client.list_tools()).tools}
            assert "hidden" not in listed
            assert "job" not in listed
            noop, erase, stock = listed["noop"], listed["erase"], listed["out_of_stock"]
            assert noop.description is not None
            assert noop.description.startswith("Gives back what it was given.")
            assert noop.input_schema["properties"]["a"]["type"] == "integer"
            assert noop.annotations is not None
            assert (noop.annotations.read_only_hint, noop.annotations.destructive_hint) == (True, None)
            assert erase.annotations is not None
            assert (erase.annotations.read_only_hint, erase.annotations.destructive_hint) == (None, True)
            assert stock.annotations is not None
            assert stock.annotations.destructive_hint is None, "it did not declare that it destroys nothing"
            assert stock.annotations.idempotent_hint
            assert client.server_info is not None
            assert (client.server_info.name, client.server_info.version) == ("adversaries", "1.2.3")
            assert client.instructions == "Tools that do not end."

    run(scenario())


HINTED = """
from shotclock import App

app = App("hinted")

@app.command
def delete_everything() -> str:
    return "deleted"

@app.command(destructive=False)
def append() -> str:
    return "appended"

@app.command(destructive=True, confirm=False)
def drop() -> str:
    return "dropped"
"""


def test_a_tool_is_called_harmless_or_destructive_only_where_its_author_declared_it(tmp_path: Path) -> None:
    async def scenario() -> None:
        (tmp_path / "hinted.py").write_text(HINTED)
        async with connected(target=str(tmp_path / "hinted.py")) as (client, _):
            hints = {tool.name: tool.annotations for tool in (await client.list_tools()).tools}
            declared = {name: hints[name] and hints[name].destructive_hint for name in hints}  # type: ignore[union-attr]
            assert [declared[name] for name in ("delete_everything", "append", "drop")] == [None, False, True]
            dropped = await envelope_of(client, "drop")
            assert dropped["data"] == {"result": "dropped"}, "confirm=False declares it without a confirmation"

    run(scenario())


def test_a_tool_that_may_go_on_says_so_and_brings_the_job_tool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOTCLOCK_HOME", str(tmp_path / "home"))
    (tmp_path / "long.py").write_text(
        "import time\nfrom shotclock import App\napp = App('long')\n"
        "@app.command(interruption=True)\ndef work(seconds: float) -> str:\n"
        "    time.sleep(seconds)\n    return 'done'\n"
    )

    async def scenario() -> None:
        async with connected(target=str(tmp_path / "long.py")) as (client, _):
            listed = {tool.name: tool for tool in (await client.list_tools()).tools}
            assert "INCOMPLETE" in (listed["work"].description or "")
            result = await client.call_tool("work", {"seconds": 2}, meta={"shotclock.dev/budgetMs": 300})
            incomplete = envelope_in(result)
            assert incomplete is not None
            assert incomplete["error"]["code"] == "INCOMPLETE", incomplete
            assert not result.is_error
            waited = await envelope_of(
                client, "job", {"action": "wait", "job_id": incomplete["data"]["job_id"], "wait_ms": 15_000}
            )
            assert waited["ok"], waited
            mistaken = await envelope_of(client, "job", {"action": "explode", "wait_ms": -1, "more": 1})
            assert mistaken["error"]["code"] == "ARG_ERROR"
            assert [error["field"] for error in mistaken["error"]["errors"]] == ["action", "wait_ms", "more"]

    run(scenario())


# --- one envelope for everything ------------------------------------------------------------------


@pytest.mark.parametrize(("transport", "mode"), SOME_TRANSPORTS)
def test_a_model_reads_the_value_and_programs_find_the_envelope(
    transport: str, mode: str, validate_envelope: Validate
) -> None:
    async def scenario() -> None:
        async with connected(transport, mode) as (client, _):
            assert client.protocol_version == (MODERN if mode == MODERN else "2025-11-25")
            result = await client.call_tool("parcel", {"weight": 1.5})
            assert not result.is_error
            envelope = validate_envelope(envelope_in(result))
            assert envelope["data"] == {"weight": 1.5, "labels": ["fragile"]}
            assert envelope["error"] is None
            (content,) = result.content
            assert json.loads(content.text) == result.structured_content == envelope["data"]  # type: ignore[union-attr]
            assert result.meta is not None
            assert 0 < result.meta["shotclock.dev/remainingMs"] <= 300

    run(scenario())


@pytest.mark.parametrize("mode", [MODERN, LEGACY])
def test_what_goes_wrong_is_an_envelope_and_no_protocol_error(mode: str, validate_envelope: Validate) -> None:
    async def scenario() -> None:
        async with connected("stdio", mode) as (client, _):
            for tool, arguments, code in [
                ("noop", {"a": "x", "b": 1}, "ARG_ERROR"),
                ("parcel", {}, "ARG_ERROR"),
                ("no-op", {}, "UNKNOWN_OPERATION"),
                ("hidden", {}, "UNKNOWN_OPERATION"),
                ("describe", {}, "UNKNOWN_OPERATION"),
                ("raises", {}, "INTERNAL_ERROR"),
                ("out-of-stock", {}, "ACME_NO_STOCK"),
                ("exits", {}, "WORKER_CRASHED"),
            ]:
                result = await client.call_tool(tool, arguments)
                assert result.is_error, tool
                error = validate_envelope(envelope_in(result))["error"]
                assert error["code"] == code, tool
                named = set(re.findall(r"error\.context\.(\w+)", error["suggestion"]))
                assert named <= error.get("context", {}).keys(), "a hint points at what is there"
            both = await envelope_of(client, "noop", {"a": "x", "b": 1})
            assert [error["field"] for error in both["error"]["errors"]] == ["a", "b"]
            assert both["meta"]["ending"] == "not_started"
            assert "noop" in (await envelope_of(client, "no-op"))["error"]["suggestion"]
            assert (await envelope_of(client, "out-of-stock"))["data"] == {"left": 0}

    run(scenario())


STRANGE = {
    "surrogate": {"text": "half a character: \ufffd, a whole one: \U0001f600"},
    "numbers": [2**70, 1e308, "nan", "inf"],
    "null": None,
    "empty": {},
    "control": {"text": "\x00\x1b[31m\u2028\n"},
    "large": {"result": "x" * 3_000_000},
}


@pytest.mark.parametrize("transport", corners(["stdio", "http"], "http"))
def test_a_strange_result_arrives_or_is_said_to_be_unreadable(transport: str, validate_envelope: Validate) -> None:
    async def scenario() -> None:
        async with connected(transport) as (client, _):
            for kind, data in STRANGE.items():
                envelope = validate_envelope(await envelope_of(client, "strange", {"kind": kind}))
                assert envelope["data"] == data, kind
            deep = validate_envelope(await envelope_of(client, "strange", {"kind": "deep"}))
            assert deep["error"]["code"] == "RESULT_NOT_SERIALIZABLE"
            (large, took_s) = await timed(envelope_of(client, "strange", {"kind": "too large"}))
            assert validate_envelope(large)["error"]["code"] == "RESULT_TOO_LARGE"
            assert large["meta"]["ending"] == "finished"
            assert took_s < 15, "who is not told on time may wait for ever"
            assert (await envelope_of(client, "prints"))["data"] == {"result": "printed"}
            assert (await envelope_of(client, "noop"))["ok"]

    run(scenario())


def test_a_call_without_a_name_is_a_protocol_error_and_costs_nothing() -> None:
    async def scenario() -> None:
        async with connected() as (client, _):
            with pytest.raises(MCPError):
                await client.session._dispatcher.send_raw_request("tools/call", await _enveloped(client, {}))
            assert (await envelope_of(client, "noop"))["ok"]

    async def _enveloped(client: Any, params: dict[str, Any]) -> dict[str, Any]:
        meta = {"io.modelcontextprotocol/protocolVersion": MODERN, "io.modelcontextprotocol/clientCapabilities": {}}
        return {**params, "_meta": meta}

    run(scenario())


# --- time -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("transport", "mode"), SOME_TRANSPORTS)
def test_the_callers_remaining_time_bounds_the_call(transport: str, mode: str) -> None:
    async def scenario() -> None:
        async with connected(transport, mode) as (client, _):
            meta = {"shotclock.dev/remainingMs": 2000}
            seen = await client.call_tool("remaining", meta=meta)
            assert 0 < envelope_in(seen)["data"]["result"] <= 2000
            assert seen.meta is not None
            assert 0 < seen.meta["shotclock.dev/remainingMs"] <= 2000
            (inherited,) = envelope_in(seen)["warnings"]
            assert inherited["code"] == "DEADLINE_INHERITED"

            none_left = await envelope_of(client, "noop", meta={"shotclock.dev/remainingMs": 0})
            assert none_left["error"]["code"] == "NO_TIME_LEFT"
            assert none_left["meta"]["ending"] == "not_started"

    run(scenario())


def test_the_bell_of_the_caller_rings_before_its_own_time_is_up(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with connected() as (client, _):
            meta = {"shotclock.dev/remainingMs": 1000}
            envelope, took_s = await timed(envelope_of(client, "patient", {"folder": str(tmp_path)}, meta=meta))
            assert envelope["error"]["code"] == "TIMEOUT"
            assert envelope["error"]["context"]["clock"]["owner"] == "caller"
            assert envelope["meta"]["timeout_ms"] < 1000 and took_s < 5

    run(scenario())


def test_a_remaining_time_that_cannot_be_read_is_passed_over_with_a_warning() -> None:
    async def scenario() -> None:
        async with connected() as (client, _):
            for unreadable in (-1, "1000", 1.5, True, None, 10**30, {"ms": 1}):
                envelope = await envelope_of(client, "noop", meta={"shotclock.dev/remainingMs": unreadable})
                assert envelope["ok"]
                codes = [warning["code"] for warning in envelope["warnings"]]
                assert codes == ([] if unreadable is None else ["DEADLINE_UNREADABLE"]), unreadable

    run(scenario())


def test_options_of_the_call_are_taken_from_its_meta_and_refused_if_they_cannot_be_read(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with connected() as (client, _):
            folder = {"folder": str(tmp_path)}
            envelope = await envelope_of(client, "patient", folder, meta={"shotclock.dev/timeoutMs": 150})
            assert envelope["error"]["code"] == "TIMEOUT"
            assert envelope["meta"]["timeout_ms"] == 150
            meta = {"shotclock.dev/timeoutMs": "soon", "shotclock.dev/budgetMs": -1, "shotclock.dev/idempotencyKey": ""}
            refused = await envelope_of(client, "noop", meta=meta)
            assert refused["error"]["code"] == "ARG_ERROR"
            assert [error["field"] for error in refused["error"]["errors"]] == [f"_meta.{name}" for name in meta]

    run(scenario())


# --- progress -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("transport", "mode"), SOME_TRANSPORTS)
def test_progress_increases_is_limited_and_its_last_word_comes_before_the_answer(transport: str, mode: str) -> None:
    async def scenario() -> None:
        heard: list[tuple[float, float | None, str | None]] = []

        async def listen(done: float, total: float | None, message: str | None) -> None:
            heard.append((done, total, message))

        async with connected(transport, mode) as (client, _):
            arguments = {"n": 400, "pause_ms": 1}
            _, took_s = await timed(client.call_tool("counts-to", arguments, progress_callback=listen))
            at_the_answer = len(heard)
            assert (await envelope_of(client, "noop"))["ok"]
            assert len(heard) == at_the_answer
            done = [amount for amount, _, _ in heard]
            assert done == sorted(set(done))
            assert heard[-1] == (400, 400, "400 of 400 steps")
            assert 2 <= len(heard) <= took_s / INTERVAL_S + BURST + 1

    run(scenario())


def test_a_tool_that_reports_three_times_in_150_ms_is_heard_three_times() -> None:
    async def scenario() -> None:
        async with connected() as (client, _):
            for pause_ms in (50, 0):
                heard: list[float] = []

                async def listen(done: float, total: float | None, message: str | None, heard: Any = heard) -> None:
                    heard.append(done)

                await client.call_tool("counts-to", {"n": 3, "pause_ms": pause_ms}, progress_callback=listen)
                assert heard == [1, 2, 3]

    run(scenario())
