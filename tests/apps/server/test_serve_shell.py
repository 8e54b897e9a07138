"""`shotclock serve shell`: the SDK's own client on one end, real commands on the other."""

import asyncio
import json
import os
import signal
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import pytest
from mcp import Client

from tests.apps.server.client import (
    ENDED_WITHIN_S,
    LEGACY,
    MODERN,
    ROOT,
    STARTED_WITHIN_S,
    connected,
    envelope_in,
    envelope_on_wire,
    run,
    served,
)
from tests.apps.server.test_lifecycle import hear, say
from tests.calls.bounds import eventually, soon
from tests.processes import is_running

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("no_survivors")]

GONE_WITHIN_S = 2.0  # after the server was killed, as promised
# A child in a session of its own that ignores TERM, and a parent that waits for it. Both leave their pids.
TREE = (
    """trap '' TERM; setsid sh -c 'trap "" TERM; echo $$ > {0}/child; sleep 300' & echo $$ > {0}/parent; wait; wait"""
)


class Answer(NamedTuple):
    envelope: dict[str, Any]
    text: str
    is_error: bool

    @property
    def data(self) -> dict[str, Any]:
        data: dict[str, Any] = self.envelope["data"]
        return data

    @property
    def code(self) -> str | None:
        return self.envelope["error"] and self.envelope["error"]["code"]


class Shell:
    def __init__(self, client: Client, server: psutil.Process) -> None:
        self.client, self.server = client, server

    async def call(self, tool: str, /, **arguments: Any) -> Answer:
        result = await self.client.call_tool(tool, arguments)
        return Answer(envelope_in(result), result.content[0].text, bool(result.is_error))  # type: ignore[union-attr]

    async def run(self, command: str, **arguments: Any) -> Answer:
        return await self.call("run", command=command, **arguments)


@asynccontextmanager
async def shell(*options: str, mode: str = MODERN) -> AsyncIterator[Shell]:
    async with connected("stdio", mode, *options, target="shell") as (client, server):
        yield Shell(client, server)


def with_shell(scene: Callable[[Shell], Awaitable[None]], *options: str, mode: str = MODERN) -> None:
    async def play() -> None:
        async with shell(*options, mode=mode) as opened:
            await scene(opened)

    run(play())


def pids_in(folder: Path) -> list[int]:
    """Return the pids of a TREE, once both processes have started."""
    files = [folder / "parent", folder / "child"]
    eventually(lambda: all(file.exists() and file.read_text().endswith("\n") for file in files), STARTED_WITHIN_S)
    return [int(file.read_text()) for file in files]


def are_gone(pids: list[int]) -> bool:
    return not any(map(is_running, pids))


# --- run ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", [MODERN, LEGACY])
def test_a_command_answers_with_its_exit_code_and_both_streams_in_order(
    mode: str, validate_envelope: Callable[[dict[str, Any]], dict[str, Any]]
) -> None:
    async def scene(shell: Shell) -> None:
        ok = await shell.run("echo one; echo two >&2; echo three")
        validate_envelope(ok.envelope)
        assert (ok.is_error, ok.data["exit_code"], ok.data["status"]) == (False, 0, "ended")
        assert ok.data["output"] == "one\ntwo\nthree\n"
        assert ok.text == f"{ok.data['summary']}\n\none\ntwo\nthree\n"
        assert "exit code 0 after" in ok.data["summary"]
        failed = await shell.run("echo so; exit 3")
        validate_envelope(failed.envelope)
        assert (failed.is_error, failed.code, failed.data["exit_code"]) == (True, "COMMAND_FAILED", 3)
        assert failed.data["output"] == "so\n" and "exit code 3" in failed.text
        crashed = await shell.run("kill -SEGV $$")
        assert (crashed.data["exit_code"], crashed.data["signal"]) == (139, "SIGSEGV")
        assert "ended by SIGSEGV" in crashed.text

    with_shell(scene, mode=mode)


def test_a_command_runs_in_the_folder_that_is_named_or_in_that_of_the_server(tmp_path: Path) -> None:
    async def scene(shell: Shell) -> None:
        assert (await shell.run("pwd")).data["output"] == f"{ROOT}\n"
        assert (await shell.run("pwd", cwd=str(tmp_path))).data["output"] == f"{tmp_path}\n"
        assert (await shell.run("pwd", cwd="tests")).data["output"] == f"{ROOT / 'tests'}\n"
        refused = await shell.run("pwd", cwd="nowhere")
        assert (refused.code, refused.envelope["meta"]["ending"]) == ("CWD_UNUSABLE", "not_started")
        assert "cannot enter" in refused.text

    with_shell(scene)


def test_a_folder_that_does_not_exist_is_refused_on_stderr() -> None:
    with served("serve", "shell", "--cwd", "nowhere") as process:
        out, err = process.communicate(timeout=STARTED_WITHIN_S)
    assert (process.returncode, out) == (4, b"") and b"'nowhere' is not a directory" in err


def test_a_hanging_command_is_stopped_with_a_child_that_left_its_session_and_ignores_the_signal(tmp_path: Path) -> None:
    async def scene(shell: Shell) -> None:
        stopped = await shell.run(TREE.format(tmp_path), timeout_s=1.5)
        assert (stopped.code, stopped.envelope["meta"]["ending"]) == ("TIMEOUT", "killed")
        assert stopped.envelope["meta"]["survivors"] == []
        assert "stopped after its timeout of 1.5s; no process of it is left" in stopped.text
        assert are_gone(pids_in(tmp_path))

    with_shell(scene)


def test_children_that_outlive_their_command_are_stopped_and_named(tmp_path: Path) -> None:
    async def scene(shell: Shell) -> None:
        answer = await shell.run(f"setsid sleep 300 & echo $! > {tmp_path}/pid; echo done")
        assert answer.envelope["ok"] and answer.data["output"] == "done\n"
        assert [warning["code"] for warning in answer.envelope["warnings"]] == ["DESCENDANTS_STOPPED"]
        assert "1 process outlived the command, stopped now: sleep 300" in answer.text
        assert are_gone([int((tmp_path / "pid").read_text())])

    with_shell(scene)


def test_a_silent_command_is_stopped_by_the_idle_limit_of_the_server() -> None:
    async def scene(shell: Shell) -> None:
        stalled = await shell.run("echo begun; sleep 300")
        assert (stalled.code, stalled.data["output"]) == ("STALLED", "begun\n")
        assert "no output for 1s" in stalled.text
        timed_out = await shell.run("while echo .; do sleep 0.2; done")
        assert timed_out.code == "TIMEOUT", "it was never silent"

    with_shell(scene, "--idle", "1s", "--timeout", "3s")


def test_a_command_of_run_has_an_empty_stdin_that_is_no_pipe_and_no_terminal() -> None:
    async def scene(shell: Shell) -> None:
        asked = await shell.run("python3 -c 'input(\"Password: \")'")
        assert asked.code == "COMMAND_FAILED" and "Password: " in asked.text and "EOFError" in asked.text
        # A search program with a pipe as stdin would search that instead of the folder.
        assert (await shell.run("readlink /proc/self/fd/0")).data["output"] == "/dev/null\n"
        assert (await shell.run("true < /dev/tty")).code == "COMMAND_FAILED"
        quiet = await shell.run("echo $PAGER $GIT_TERMINAL_PROMPT $DEBIAN_FRONTEND")
        assert quiet.data["output"] == "cat 0 noninteractive\n"

    with_shell(scene)


def test_a_command_that_takes_longer_than_the_budget_continues_as_a_job() -> None:
    async def scene(shell: Shell) -> None:
        began = time.monotonic()
        pending = await shell.run("echo begun; sleep 3; echo over; exit 5")
        assert time.monotonic() - began < 2.9
        assert (pending.code, pending.is_error) == ("INCOMPLETE", False)
        assert (pending.envelope["meta"]["ending"], pending.envelope["meta"]["budget_ms"]) == ("detached", 1000)
        assert (pending.data["job"], pending.data["status"], pending.data["output"]) == ("job-1", "running", "begun\n")
        assert "call `wait`" in pending.text and "job-1 is running" in pending.text
        over = await wait_for_end(shell, "job-1")
        assert (over.code, over.data["exit_code"], over.data["output"]) == ("COMMAND_FAILED", 5, "begun\nover\n")
        again = await shell.call("wait", job="job-1")
        assert again.data == over.data, "an ended job stays as it is"

    with_shell(scene, "--budget", "1s")


async def wait_for_end(shell: Shell, job: str) -> Answer:
    for _ in range(20):
        if (answer := await shell.call("wait", job=job)).code != "INCOMPLETE":
            return answer
    pytest.fail(f"{job} has not ended")


# --- output ---------------------------------------------------------------------------------------


def test_a_flood_is_counted_to_its_end_and_fills_no_disk() -> None:
    async def scene(shell: Shell) -> None:
        flood = asyncio.ensure_future(shell.run("yes 0123456789abcdef | head -c 51000000"))
        beside = await asyncio.wait_for(shell.run("echo beside"), STARTED_WITHIN_S)
        assert beside.data["output"] == "beside\n"
        data = (await flood).data
        assert (data["lines"], data["bytes"]) == (3_000_000, 51_000_000)
        assert os.path.getsize(data["output_file"]) == 32 * 1024 * 1024 and not data["output_file_is_whole"]
        assert "the first 33,554,432 bytes of the output: " in data["output"]
        lost = await shell.call("logs", job=data["job"], since_line=2_500_000, max_lines=1)
        assert f"Lines 2500001 to {lost.data['first_line'] - 1} were not kept." in lost.text
        assert lost.data["first_line"] > 2_990_000 and lost.data["output"] == "0123456789abcdef"
        kept = await shell.call("logs", job=data["job"], since_line=1_000_000, max_lines=1)
        assert (kept.data["first_line"], kept.data["output"]) == (1_000_001, "0123456789abcdef")

    with_shell(scene)


# --- start, and the tools for jobs ----------------------------------------------------------------


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port: int = taken.getsockname()[1]
        return port


def test_a_server_is_started_and_ready_then_found_listed_and_stopped() -> None:
    async def scene(shell: Shell) -> None:
        port = free_port()
        command = f"python3 -u -m http.server {port} --bind 127.0.0.1"
        started = await shell.call("start", command=command, name="web", ready_port=port)
        assert started.envelope["ok"] and started.data["ready"] is True and "is ready" in started.text
        fetched = await shell.run(f"python3 -c 'import urllib.request as u; u.urlopen(\"http://127.0.0.1:{port}\")'")
        assert fetched.envelope["ok"], fetched.text
        logs = await shell.call("logs", job="web")
        assert "GET / HTTP/1.1" in logs.data["output"]
        again = await shell.call("start", command=command, name="web2", ready_port=port)
        assert again.code == "CONFLICT" and f"port {port} already accepts connections" in again.text
        same = await shell.call("start", command="sleep 1", name="web")
        assert same.code == "CONFLICT" and "'web' is still running" in same.text
        listed = await shell.call("list")
        assert {job["job"]: job["status"] for job in listed.data["jobs"]} == {"web": "running", "job-1": "ended"}
        assert listed.text.startswith("1 running, 1 ended.")
        stopped = await shell.call("stop", job="web")
        assert stopped.envelope["ok"] and stopped.data["status"] == "ended"
        assert "stopped by the tool stop" in stopped.text and "no process of it is left" in stopped.text
        assert (await shell.call("stop", job="web")).envelope["ok"], "a second stop changes nothing"
        assert (await shell.call("wait", job="web")).code == "CANCELLED"
        with pytest.raises(OSError):
            socket.create_connection(("127.0.0.1", port), timeout=1)

    with_shell(scene)


def test_a_server_in_the_background_of_its_command_is_not_reported_as_running() -> None:
    async def scene(shell: Shell) -> None:
        for ready in ({"ready_output": "up"}, {}):
            answer = await shell.call("start", command="sh -c 'echo up; exec sleep 300' & exit", **ready)
            assert answer.data["status"] == "ended" and "1 process outlived the command" in answer.text

    with_shell(scene)


def test_a_link_named_bash_in_the_path_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "bash").write_text("#!/bin/sh\necho linked\n")
    (tmp_path / "bash").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)

    async def scene(shell: Shell) -> None:
        assert (await shell.run("echo real")).data["output"] == "real\n"

    with_shell(scene)


def test_start_reports_why_a_command_is_not_ready() -> None:
    async def scene(shell: Shell) -> None:
        said = await shell.call(
            "start", command="echo star; sleep 0.3; echo ting up; sleep 300", ready_output="ting up", lifetime_s=250
        )
        assert said.envelope["ok"] and said.data["ready"] is True and said.envelope["meta"]["timeout_ms"] == 250_000
        died = await shell.call("start", command="echo no config; exit 2", ready_output="up")
        assert (died.code, died.data["exit_code"], died.is_error) == ("COMMAND_FAILED", 2, True)
        assert "no config" in died.text
        ended = await shell.call("start", command="echo nothing to serve", ready_output="up")
        assert ended.code == "COMMAND_FAILED" and "before it was ready" in ended.envelope["error"]["message"]
        at_once = await shell.call("start", command="exit 4")
        assert at_once.data["exit_code"] == 4
        slow = await shell.call("start", command="sleep 300", ready_output="up", ready_within_s=0.5)
        assert (slow.code, slow.is_error, slow.data["ready"]) == ("INCOMPLETE", False, False)
        assert "is not ready yet" in slow.text
        short = await shell.call("start", command="sleep 300", lifetime_s=1)
        over = await wait_for_end(shell, short.data["job"])
        assert over.code == "TIMEOUT" and "its lifetime of 1s" in over.text

    with_shell(scene)


def test_a_program_that_waits_for_input_is_reported_and_gets_it() -> None:
    async def scene(shell: Shell) -> None:
        await shell.call("start", command="python3 -q -i", name="python")
        asking = await shell.call("wait", job="python")
        assert asking.code == "INCOMPLETE" and asking.data["status"] == "running"
        assert asking.data["input_wanted"]["prompt"] == ">>>" and "waits for input: use send_input" in asking.text
        again = await shell.call("wait", job="python", timeout_s=0.3)
        assert again.data["input_wanted"] and again.data["duration_ms"] - asking.data["duration_ms"] >= 300
        replied = await shell.call("send_input", job="python", text="print(6 * 7)")
        assert "42\n" in replied.data["output"] and "input_wanted" not in replied.data
        left = await shell.call("send_input", job="python", text="import sys; sys.exit(9)\n")
        assert left.data["exit_code"] == 9
        late = await shell.call("send_input", job="python", text="print(1)")
        assert late.code == "CONFLICT" and "has ended" in late.text

    with_shell(scene)


def test_stdin_of_a_job_can_be_closed_and_is_then_refused() -> None:
    async def scene(shell: Shell) -> None:
        await shell.call("start", command="cat; echo end; sleep 300", name="cat")
        assert (await shell.call("send_input", job="cat", text="grüße\n")).data["output"] == "grüße"
        ended = await shell.call("send_input", job="cat", text="last", end=True)
        assert ended.data["output"] == "last\nend" and ended.data["first_line"] == 2
        assert "stdin of cat is closed" in (await shell.call("send_input", job="cat", text="more")).text
        deaf = await shell.call("start", command="exec 0<&-; echo deaf; sleep 300", name="deaf", ready_output="deaf")
        assert deaf.envelope["ok"]
        assert "has closed its stdin" in (await shell.call("send_input", job="deaf", text="hello")).text

    with_shell(scene)


def test_a_job_that_does_not_read_its_input_cannot_hold_up_a_call() -> None:
    async def scene(shell: Shell) -> None:
        await shell.call("start", command="sleep 300", name="busy")
        first = await shell.call("send_input", job="busy", text="x" * 60_000)
        assert first.envelope["ok"], "the pipe holds it"
        second = await shell.call("send_input", job="busy", text="x" * 60_000)
        assert second.envelope["error"]["retryable"] is False, "a part of it may be written"
        assert second.code == "UNAVAILABLE" and "did not read its input within 5 s" in second.text

    with_shell(scene)


def test_there_is_a_limit_on_running_jobs_and_old_ones_are_forgotten_with_their_output() -> None:
    async def scene(shell: Shell) -> None:
        long = (await shell.run("seq 20000")).data
        for _ in range(32):
            await shell.run("true")
        assert not os.path.exists(long["output_file"])
        assert (await shell.call("logs", job=long["job"])).code == "JOB_NOT_FOUND"
        await asyncio.gather(*(shell.call("start", command="sleep 300") for _ in range(16)))
        refused = await shell.run("true")
        assert refused.envelope["meta"]["ending"] == "not_started"
        assert refused.code == "CONFLICT" and "16 jobs are running, which is the limit" in refused.text
        await shell.call("stop", job="job-40")
        assert (await shell.run("true")).envelope["ok"]

    with_shell(scene)


# --- mistakes -------------------------------------------------------------------------------------


def test_bad_arguments_are_refused_in_words_and_nothing_runs() -> None:
    async def scene(shell: Shell) -> None:
        for tool, arguments, field in (
            ("run", {}, "command"),
            ("run", {"command": ""}, "command"),
            ("run", {"command": 5}, "command"),
            ("run", {"command": "true", "timeout_s": -1}, "timeout_s"),
            ("run", {"command": "true", "timeout_s": "soon"}, "timeout_s"),
            ("run", {"command": "true", "shell": "zsh"}, "shell"),
            ("start", {"command": "true", "name": "../x"}, "name"),
            ("start", {"command": "true", "ready_port": 70_000}, "ready_port"),
            ("start", {"command": "true", "ready_port": 7_000, "ready_output": "up"}, "ready_output"),
            ("logs", {"job": "x", "max_lines": 0}, "max_lines"),
            ("wait", {"job": "x", "timeout_s": 0}, "timeout_s"),
        ):
            refused = await shell.call(tool, **arguments)
            assert (refused.code, refused.is_error) == ("ARG_ERROR", True), (tool, arguments)
            assert field in [problem["field"] for problem in refused.envelope["error"]["errors"]]
            assert refused.text.startswith("ARG_ERROR: ") and field in refused.text
        unreadable = await shell.run("echo \0")
        assert unreadable.code == "ARG_ERROR" and "NUL" in unreadable.text
        for tool in ("logs", "wait", "stop", "send_input"):
            unknown = await shell.call(tool, job="nope")
            assert unknown.code == "JOB_NOT_FOUND" and "no job 'nope' of this connection" in unknown.text
        assert (await shell.call("start", command="sleep 300", name="ok")).envelope["ok"]

    with_shell(scene)


def test_the_tools_describe_their_effects_truthfully() -> None:
    async def scene(shell: Shell) -> None:
        tools = {tool.name: tool for tool in (await shell.client.list_tools()).tools}
        assert list(tools) == ["run", "start", "logs", "wait", "send_input", "stop", "list"]
        hints = {name: tool.annotations for name, tool in tools.items() if tool.annotations is not None}
        assert [name for name, hint in hints.items() if hint.read_only_hint] == ["logs", "wait", "list"]
        assert [name for name, hint in hints.items() if hint.destructive_hint] == ["run", "start", "send_input", "stop"]
        assert tools["run"].input_schema["required"] == ["command"]
        assert len(json.dumps([tool.input_schema for tool in tools.values()])) < 6_000, "every model reads this"

    with_shell(scene)


# --- the connection -------------------------------------------------------------------------------


def test_one_connection_sees_no_jobs_of_another() -> None:
    async def scene() -> None:
        async with shell() as one:
            await one.call("start", command="sleep 300", name="mine")
            # The helper finds the server among the children of this process: the first is one of them already.
            async with shell() as other:
                assert (await other.call("list")).data["jobs"] == []
                assert (await other.call("stop", job="mine")).code == "JOB_NOT_FOUND"
            assert (await one.call("logs", job="mine")).data["status"] == "running"

    run(scene())


def test_a_client_that_leaves_takes_its_jobs_along(tmp_path: Path) -> None:
    async def scene(shell: Shell) -> None:
        polite = f"trap 'echo bye > {tmp_path}/bye; exit' TERM; echo up; while :; do sleep 0.1; done"
        assert (await shell.call("start", command=polite, ready_output="up")).envelope["ok"]
        assert (await shell.call("start", command=TREE.format(tmp_path))).envelope["ok"]
        pids.extend(pids_in(tmp_path))

    pids: list[int] = []
    with_shell(scene)
    eventually(lambda: are_gone(pids), GONE_WITHIN_S)
    assert (tmp_path / "bye").read_text() == "bye\n", "it was asked to stop first"


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_stops_all_jobs_and_answers_the_waiting_calls(number: int, code: int, tmp_path: Path) -> None:
    with served("serve", "shell") as process:
        say(process, 1, "run", {"command": f"echo begun; {TREE.format(tmp_path)}"})
        pids = pids_in(tmp_path)
        process.send_signal(number)
        answer = envelope_on_wire(hear(process)["result"])
        assert (answer["error"]["code"], answer["data"]["output"]) == ("CANCELLED", "begun\n")
        assert (answer["meta"]["ending"], answer["meta"]["survivors"]) == ("killed", [])
        assert process.wait(ENDED_WITHIN_S) == code
        assert are_gone(pids)


def test_a_killed_server_leaves_no_process_of_any_job(tmp_path: Path) -> None:
    with served("serve", "shell") as process:
        folders = [tmp_path / name for name in ("run", "start")]
        for number, folder in enumerate(folders):
            folder.mkdir()
            say(process, number, folder.name, {"command": TREE.format(folder)})
        pids = [pid for folder in folders for pid in pids_in(folder)]
        assert all(not are_gone([pid]) for pid in pids)
        process.kill()
        process.wait(ENDED_WITHIN_S)
        eventually(lambda: are_gone(pids), GONE_WITHIN_S)


def test_cancelling_run_or_start_stops_the_command_and_cancelling_wait_does_not(tmp_path: Path) -> None:
    async def scene(shell: Shell) -> None:
        for tool, more in (("run", {}), ("start", {"ready_output": "never"})):
            folder = tmp_path / tool
            folder.mkdir()
            call = asyncio.ensure_future(shell.call(tool, command=TREE.format(folder), **more))
            pids = await asyncio.to_thread(pids_in, folder)
            await cancel(call)
            await soon(lambda pids=pids: are_gone(pids), ENDED_WITHIN_S)
        await shell.call("start", command="sleep 300", name="stays")
        waiting = asyncio.ensure_future(shell.call("wait", job="stays"))
        await asyncio.wait([waiting], timeout=0.5)
        await cancel(waiting)
        listed = await shell.call("list")
        assert {job["job"]: job["status"] for job in listed.data["jobs"]} == {
            "job-1": "ended",
            "job-2": "ended",
            "stays": "running",
        }
        assert "stopped by the caller" in listed.text

    with_shell(scene)


async def cancel(call: asyncio.Task[Answer]) -> None:
    call.cancel()
    await asyncio.wait([call], timeout=ENDED_WITHIN_S)
    assert call.cancelled()
