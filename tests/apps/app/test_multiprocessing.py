"""Processes of `multiprocessing` belong to the call that starts them, and Python's helpers to none."""

import asyncio
import json
import multiprocessing
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from shotclock import App
from shotclock.supervise.kernel import is_zombie
from tests.apps.server.client import connected, envelope_in
from tests.rows import corners

from .conftest import PROGRAMS, SOON_S, warning_codes
from .waiting import wait_for_release

pytestmark = [pytest.mark.usefixtures("no_survivors", "warm_starts"), pytest.mark.slow]

METHODS = ("default", "spawn", "forkserver", "fork")
PROGRAM = PROGRAMS / "pooled.py"

app = App("multiprocessed")


@app.command(mutates=False, isolation="shared", timeout="30s", grace="2s")
def join_a_process(folder: Path, name: str, method: str) -> int | None:
    context: Any = multiprocessing.get_context(method)
    process = context.Process(target=wait_for_release, args=(folder, name))
    process.start()
    process.join()
    return process.exitcode  # type: ignore[no-any-return]


@app.command(mutates=False, isolation="shared")
def leave_a_process(folder: Path, name: str, method: str) -> int:
    context: Any = multiprocessing.get_context(method)
    process = context.Process(target=wait_for_release, args=(folder, name))
    process.start()
    return process.pid  # type: ignore[no-any-return]


async def started(folder: Path, name: str) -> int:
    give_up_at = time.monotonic() + SOON_S
    while not (folder / name).exists() or not (text := (folder / name).read_text()):
        assert time.monotonic() < give_up_at, name
        await asyncio.sleep(0.01)
    return int(text)


@pytest.mark.parametrize("method", corners(["forkserver", "spawn"], "forkserver"))
def test_a_limit_in_the_shared_process_stops_the_processes_of_its_own_call_alone(method: str, tmp_path: Path) -> None:
    async def scenario() -> None:
        def begin(name: str, timeout: str) -> Any:
            arguments = {"folder": str(tmp_path), "name": name, "method": method}
            return asyncio.ensure_future(app.call_with("join_a_process", arguments, timeout=timeout))

        async with app:
            # Once the first call, for which Python starts its helpers, is the one that is stopped, and once another.
            for first, second, stopped in (("a", "b", "a"), ("c", "d", "d")):
                calls, pids = {}, {}
                for name in (first, second):
                    calls[name] = begin(name, "6s" if name == stopped else "30s")
                    pids[name] = await started(tmp_path, name)
                other = second if stopped == first else first
                ended = await calls[stopped]
                assert (ended.code, ended.ending) == ("TIMEOUT", "cancelled"), ended
                assert is_zombie(pids[stopped]) and not is_zombie(pids[other])
                (tmp_path / f"release-{other}").touch()
                finished = await calls[other]
                assert finished.data == {"result": 0} and not finished.warnings, finished
                assert not finished.meta.get("survivors"), finished

    asyncio.run(scenario())


def test_only_the_process_that_a_finished_call_left_is_named_and_no_helper_of_python(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with app:
            left = await app.call("leave_a_process", folder=str(tmp_path), name="left", method="forkserver")
            assert [each["pid"] for each in left.meta["survivors"]] == [left.value], left  # type: ignore[attr-defined]

    asyncio.run(scenario())


def run_program(*words: str) -> Any:
    ran = subprocess.run([sys.executable, PROGRAM, *words, "--json"], capture_output=True, timeout=60)
    return json.loads(ran.stdout or ran.stderr)


@pytest.mark.parametrize("command", corners(["in-process", "in-shared"], "in-shared"))
def test_functions_of_the_program_itself_run_in_pools_of_processes(command: str) -> None:
    for method in METHODS:
        answer = run_program(command, "4", "--method", method)
        assert answer["data"] == {"result": 14}, (method, answer)
        assert warning_codes(answer) == [] and not answer["meta"].get("survivors"), (method, answer)


def test_functions_of_a_served_program_run_in_pools_of_processes() -> None:
    async def scenario() -> None:
        async with connected(target=f"{PROGRAM}:app") as (client, _):
            for command in ("in_process", "in_shared"):
                for method in METHODS:
                    answer = envelope_in(await client.call_tool(command, {"n": 4, "method": method}))
                    assert answer["data"] == {"result": 14} and not answer["warnings"], (method, answer)
                    assert not answer["meta"].get("survivors"), (method, answer)

    asyncio.run(scenario())
