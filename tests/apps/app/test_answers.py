"""What an answer says of the failure, of itself and of its clock is true on every surface, also when nothing ran."""

import asyncio
import json
import os
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from mcp import Client
from starlette.requests import Request

from shotclock.core import errors
from shotclock.core.envelope import Envelope
from shotclock.flows.run.step_attempt import run_attempt
from shotclock.people.auth import answering
from tests.apps.app.conftest import Tool
from tests.apps.server.client import ENDED_WITHIN_S, NO_ANSWER_S, connected, envelope_of, run, served, url_said_by

pytestmark = pytest.mark.slow

Validate = Callable[[Any], Any]
PROGRAM = Path(__file__).parent / "programs" / "answers.py"

CODES = {
    "missing": ("NOT_FOUND", 5),
    "there": ("CONFLICT", 6),
    "forbidden": ("PERMISSION_DENIED", 7),
    "refused": ("UNAVAILABLE", 12),
    "slow": ("UNAVAILABLE", 12),
    "bug": ("INTERNAL_ERROR", 1),
    "sold out": ("SHOP_SOLD_OUT", 90),
    "not found": ("NOT_FOUND", 5),
    "argument": ("ARGUMENT_REFUSED", 1),
}


@pytest.fixture(autouse=True)
def registry(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the program registers when it is imported here is forgotten again."""
    monkeypatch.setattr(errors, "_ERRORS", dict(errors._ERRORS))


@pytest.fixture
def program(tool: Any) -> Tool:
    made: Tool = tool("answers.py")
    return made


async def by_library(calls: list[tuple[str, dict[str, Any]]]) -> list[dict[str, Any]]:
    from tests.apps.app.programs import answers

    async with answers.app:
        return [(await answers.app.call_with(name, arguments)).to_dict() for name, arguments in calls]


async def by_mcp(calls: list[tuple[str, dict[str, Any]]]) -> list[dict[str, Any]]:
    async with connected(target=f"{PROGRAM}:app") as (client, _):
        return [await envelope_of(client, name, arguments) for name, arguments in calls]


async def by_function_steps(calls: list[tuple[str, dict[str, Any]]]) -> list[dict[str, Any]]:
    from shotclock.calls.runtime import Runtime
    from shotclock.core.limits import Clocks
    from shotclock.flows.steps._function_calls import FunctionProvider
    from shotclock.flows.steps.provider import StepCall

    provider, said = FunctionProvider(), []
    async with Runtime() as runtime:
        try:
            for name, arguments in calls:
                settings = {"target": f"{PROGRAM}:app", "command": name, "arguments": arguments}
                call = StepCall("it", settings, Clocks.of("20s"), dict(os.environ), PROGRAM.parent)
                said.append((await run_attempt(provider, call, runtime)).envelope.to_dict())
        finally:
            await provider.close()
    return said


# --- failures (17) --------------------------------------------------------------------------------


@pytest.mark.parametrize("surface", [by_library, by_mcp, by_function_steps])
def test_what_a_handler_raises_has_the_same_code_on_every_surface(
    surface: Any, validate_envelope: Validate, capfd: pytest.CaptureFixture[str]
):
    kinds = ("raises", "changes") if surface is by_function_steps else ("raises", "raises-async", "changes")
    calls = [(name, {"which": which}) for name in kinds for which in CODES]
    for (name, arguments), envelope in zip(calls, run(surface(calls), 100), strict=True):
        which = arguments["which"]
        validate_envelope(envelope)
        assert (envelope["error"]["code"], envelope["meta"]["exit_code"]) == CODES[which], (name, which)
        assert envelope["error"]["phase"] == "execution" and envelope["meta"]["ending"] == "finished"
        assert envelope["meta"]["side_effects"] == ("unknown" if name == "changes" else "none")
        assert "clock" not in envelope["error"].get("context", {}), "none of ours rang"
        assert "Traceback" not in str(envelope) and "answers.py" not in str(envelope)
    sold_out = envelope_after(calls, "sold out", run(surface(calls[:9]), 100))
    assert sold_out["error"]["context"] == {"left": 0} and sold_out["error"]["suggestion"] == "wait"
    if surface is not by_mcp:  # there it is the server's stderr, which the client has
        assert "answers.py" in capfd.readouterr().err


def envelope_after(calls: list[Any], which: str, envelopes: list[Any]) -> Any:
    return envelopes[[arguments["which"] for _, arguments in calls].index(which)]


MEANT_FOR_THE_CALLER = {
    "text": "unknown country: Ulmia",
    "city": "unknown city: Ulm",
    "street": "unknown street: Ulm Road",
}


@pytest.mark.parametrize("surface", [by_library, by_mcp, by_function_steps])
def test_the_text_of_a_failure_reaches_the_caller_on_every_surface(surface: Any):
    calls = [("raises", {"which": which}) for which in (*MEANT_FOR_THE_CALLER, "bug")]
    *failed, bug = run(surface(calls), 60)
    assert [envelope["error"]["message"] for envelope in failed] == list(MEANT_FOR_THE_CALLER.values())
    assert {envelope["error"]["code"] for envelope in failed} == {"GENERAL_ERROR"}
    assert "--" not in bug["error"]["suggestion"], "a hint names no option that only the command line has"


def test_the_command_line_maps_exceptions_and_keeps_their_tracebacks_on_stderr(program: Tool):
    for which, (code, exit_code) in CODES.items():
        ran = program("raises", which)
        envelope = ran.json()
        assert (envelope["error"]["code"], ran.code) == (code, exit_code)
        assert b"Traceback" not in ran.stdout
        failure = which in ("sold out", "not found", "argument")
        assert (b"Traceback" in ran.stderr) is not failure
        assert failure or b'answers.py", line' in ran.stderr.partition(b"Traceback")[2].splitlines()[1], (
            "the author's frame"
        )
    assert envelope["error"]["context"]["raised"] == "ARG_ERROR"
    assert "errors" not in envelope["error"] and "error.errors" not in envelope["error"]["suggestion"]


def test_a_traceback_is_in_the_envelope_only_when_asked_for(program: Tool, tool: Any):
    asked = program.envelope("raises", "missing", "--debug", code=5)
    assert "answers.py" in asked["error"]["context"]["traceback"]
    text = PROGRAM.read_text().replace('version="1.2.3")', 'version="1.2.3", debug=True)')
    always = tool("always.py", text).envelope("raises", "bug", code=1)
    assert "always.py" in always["error"]["context"]["traceback"]


TELLING = {
    "telling": "RuntimeError; the details are on the server's stderr, or in the job's log, for request {id}",
    "telling file": "FileNotFoundError: No such file or directory: 'plan.txt'",
    "telling connection": "ConnectionRefusedError: Connection refused",
    "telling text": "ConnectionError",
    "sold out": "none left",
}
SECRETS = ("pw", "/srv", "secret", "5432")


def assert_nothing_told(which: str, envelope: Any) -> None:
    assert envelope["error"]["message"] == TELLING[which].format(id=envelope["meta"]["request_id"]), envelope
    assert not any(secret in json.dumps(envelope) for secret in SECRETS), envelope


@pytest.mark.parametrize("transport", ["stdio", "http"])
def test_clients_of_a_server_are_told_no_text_of_an_exception_and_no_folder_of_the_server(
    transport: str, validate_envelope: Validate
):
    async def scenario() -> None:
        async with connected(transport, target=f"{PROGRAM}:app") as (client, _):
            for name in ("raises", "raises-async", "raises-in-a-job"):
                for which in TELLING:
                    envelope = await envelope_of(client, name, {"which": which})
                    assert_nothing_told(which, validate_envelope(envelope))

    run(scenario(), 120)


def test_the_http_api_tells_no_text_of_a_bug_of_ours(capfd: pytest.CaptureFixture[str]):
    async def bug(request: Request, principal: object) -> dict[str, Any]:
        raise RuntimeError("postgres://user:pw@db/srv/secret is gone")

    response: Any = run(answering("GET /proposals", bug)(Request({"type": "http"})))
    assert response.status_code == 500 and b"RuntimeError" in response.body
    assert not any(secret.encode() in response.body for secret in SECRETS), response.body
    assert "postgres://user:pw@db" in capfd.readouterr().err


def test_what_a_server_does_not_tell_is_on_its_stderr_under_the_id_of_the_request(program: Tool):
    with served("serve", f"{PROGRAM}:app", "--http", "127.0.0.1:0") as server:
        url = url_said_by(server)

        async def scenario() -> Any:
            async with Client(url, read_timeout_seconds=NO_ANSWER_S) as client:
                return await envelope_of(client, "raises", {"which": "telling"})

        envelope = run(scenario())
        server.terminate()
        server.wait(ENDED_WITHIN_S)
        os.set_blocking(server.stderr.fileno(), True)  # type: ignore[union-attr]
        said = server.stderr.read().decode()  # type: ignore[union-attr]
    assert f"request {envelope['meta']['request_id']}" in said and "postgres://user:pw@db" in said


def test_clients_of_a_server_are_told_everything_where_the_app_says_debug(tmp_path: Path):
    text = PROGRAM.read_text().replace('version="1.2.3")', 'version="1.2.3", debug=True)')
    (tmp_path / "open.py").write_text(text)

    async def scenario() -> None:
        async with connected(target=f"{tmp_path / 'open.py'}:app") as (client, _):
            envelope = await envelope_of(client, "raises", {"which": "telling"})
            assert "postgres://user:pw@db" in envelope["error"]["message"]

    run(scenario())


def test_the_command_line_and_the_library_are_told_the_text_of_an_exception(program: Tool):
    assert "postgres://user:pw@db" in program.envelope("raises", "telling", code=1)["error"]["message"]
    (envelope,) = run(by_library([("raises", {"which": "telling file"})]))
    assert "'/srv/secret/plan.txt'" in envelope["error"]["message"]


def test_a_message_of_megabytes_is_cut_and_says_so():
    for envelope in run(by_library([("raises", {"which": "long"}), ("raises-async", {"which": "long"})])):
        assert len(envelope["error"]["message"]) < 5_000
        assert "more characters" in envelope["error"]["message"]


# --- values that JSON does not have (18) ----------------------------------------------------------

CHANGED = {
    "name": {"result": "/tmp/\ufffd.txt"},
    "half": {"a": ["\ufffd"]},
    "names": {"\ufffd": 1, "\ufffd\ufffd": 2},
    "nan": ["nan", "inf"],
    "bytes": {"b": "_w=="},
    "whole": {"ü": "😀", "n": 1.5},
}


def assert_told(which: str, envelope: Any) -> None:
    assert envelope["data"] == CHANGED[which]
    codes = [warning["code"] for warning in envelope["warnings"]]
    assert codes == ([] if which == "whole" else ["RESULT_CHANGED"]), (which, envelope)
    if codes:
        assert envelope["warnings"][0]["context"]["changes"]


@pytest.mark.parametrize("surface", [by_library, by_mcp])
def test_a_result_that_json_cannot_hold_is_changed_with_a_warning(surface: Any):
    calls = [(name, {"which": which}) for name in ("returns", "returns-async") for which in CHANGED]
    *results, failed = run(surface([*calls, ("says", {"text": "ff"})]), 100)
    for (_, arguments), envelope in zip(calls, results, strict=True):
        assert_told(arguments["which"], envelope)
    assert failed["error"]["message"] == "no \ufffd"


def test_what_the_command_line_prints_is_json_for_every_reader(program: Tool):
    for which in CHANGED:
        ran = program("returns", which)
        envelope = ran.json()
        json.dumps(envelope, ensure_ascii=False).encode()
        assert b"NaN" not in ran.stdout and b"Infinity" not in ran.stdout
        assert_told(which, envelope)
    assert program.envelope("says", "ff", code=5)["error"]["message"] == "no \ufffd"


# --- about itself (16) ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "timeout_ms"),
    [
        (["frob"], 10_000),
        (["lasts", "--nope"], 120_000),
        (["lasts", "--number", "x"], 120_000),
        (["lasts", "--timeout", "7s", "--nope"], 7_000),
        (["lasts", "--validate-only"], 120_000),
        (["lasts", "--validate-only", "--timeout", "7s"], 7_000),
        (["purges", "--dry-run"], 10_000),
        (["personal"], 10_000),
        (["manifest"], 10_000),
        (["--version"], 10_000),
        (["job", "status", "zz"], 30_000),
        (["job", "frob"], None),
    ],
    ids=str,
)
def test_an_answer_before_the_command_runs_has_the_apps_version_and_the_commands_clock(
    words: list[str], timeout_ms: int | None, program: Tool, validate_envelope: Validate
):
    ran = program(*words)
    meta = validate_envelope(ran.json())["meta"]
    assert meta["tool_version"] == "1.2.3"
    assert timeout_ms is None or meta["timeout_ms"] == timeout_ms
    assert 0 < meta["duration_ms"] <= 1000 * ran.elapsed_s


def test_waiting_for_stdin_counts(program: Tool):
    silent = subprocess.Popen(["sleep", "60"], stdout=subprocess.PIPE)
    try:
        meta = program.envelope("reads", "--timeout", "1s", code=4, stdin=silent.stdout)["meta"]
    finally:
        silent.kill()
        silent.communicate(timeout=10)
    assert (meta["timeout_ms"], meta["tool_version"]) == (1000, "1.2.3")
    assert meta["duration_ms"] >= 1000


def test_a_tool_that_is_refused_over_mcp_has_the_apps_version_and_its_own_clock():
    async def scenario() -> list[Any]:
        async with connected(target=f"{PROGRAM}:app") as (client, _):
            return [
                await envelope_of(client, "frob"),
                await envelope_of(client, "lasts", {"number": "x"}),
                await envelope_of(client, "lasts", {}, meta={"shotclock.dev/budgetMs": "soon"}),
            ]

    said = [(envelope["meta"]["tool_version"], envelope["meta"]["timeout_ms"]) for envelope in run(scenario())]
    assert said == [("1.2.3", 10_000), ("1.2.3", 120_000), ("1.2.3", 120_000)]


# --- one clock (5) --------------------------------------------------------------------------------


def test_a_validator_that_hangs_beside_an_approval_ends_by_the_calls_own_clock(program: Tool):
    began = time.monotonic()
    envelope = program.envelope("approved", "1", "--timeout", "1s", code=10)
    assert time.monotonic() - began < 12, "not the 30 s of a look at the arguments"
    assert envelope["meta"]["timeout_ms"] == 1000 and envelope["meta"]["duration_ms"] >= 1000
    assert envelope["error"]["context"]["clock"]["limit_ms"] == 1000
    assert envelope["meta"]["side_effects"] == "none"


def test_a_repeat_whose_first_call_failed_has_its_time_once(tmp_path: Path):
    from tests.apps.app.programs import answers

    async def scenario() -> tuple[Envelope, Envelope, float]:
        async def call(timeout: str) -> Envelope:
            return await answers.app.call_with(
                "fails-first", {"folder": str(tmp_path)}, timeout=timeout, idempotency_key="k"
            )

        async with answers.app:
            first = asyncio.ensure_future(call("20s"))
            while not (tmp_path / "tries").exists():
                await asyncio.sleep(0.01)
            began = time.monotonic()
            second = await call("5s")
            return await first, second, time.monotonic() - began

    first, second, took_s = run(scenario())
    assert (first.code, second.code) == ("NOT_FOUND", "TIMEOUT")
    assert (tmp_path / "tries").read_text() == "xx", "the second ran because the first had changed nothing"
    assert took_s < 5 + 2.8, "5 s, its grace, and not the 2.9 s that it waited before"
    assert second.meta["timeout_ms"] == 5000 and second.meta["duration_ms"] >= 4900


def test_the_time_that_a_person_took_is_in_the_duration_but_not_on_the_clock(program: Tool):
    envelope = program.envelope("approved", "0", "--budget", "1s", code=14)
    assert envelope["meta"]["duration_ms"] >= 1000


# --- progress (39) --------------------------------------------------------------------------------


@pytest.mark.parametrize("command", ["advances", "advances_async"])
def test_fractions_and_a_message_arrive_as_they_were_said(command: str):
    async def over_mcp() -> list[Any]:
        heard: list[Any] = []

        async def listen(done: float, total: float | None, message: str | None) -> None:
            heard.append((done, total, message))

        async with connected(target=f"{PROGRAM}:app") as (client, _):
            await client.call_tool(command, {}, progress_callback=listen)
        return heard

    async def in_python() -> list[Any]:
        from tests.apps.app.programs import answers

        heard: list[Any] = []
        async with answers.app:
            await answers.app.call_with(command, {}, on_progress=lambda *said: heard.append(said))
        return heard

    assert run(over_mcp()) == run(in_python()) == [(0.5, 1.0, "half")]


def test_progress_that_is_no_number_raises_where_it_is_said():
    calls = [(command, {"wrong": True}) for command in ("advances", "advances_async")]
    text, nan = run(by_library(calls))
    assert text["error"]["message"] == "TypeError: ctx.progress: done is a number, not a str"
    assert nan["error"]["message"] == "ValueError: ctx.progress: done is a number with an end, not nan"


def test_a_job_shows_a_fraction_as_a_percentage(program: Tool):
    progress: Any = None
    for _ in range(20):
        progress = program.envelope("goes-on", "20", "--budget", "500ms", code=14)["data"]["progress"]
        if progress["done"]:
            break
    assert progress == {"done": 25, "total": 100, "unit": "%"}
