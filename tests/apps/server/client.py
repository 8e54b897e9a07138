"""A real server in a real process, and the SDK's own client on the other end."""

import asyncio
import os
import re
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
from mcp import Client, StdioServerParameters

from shotclock.core.envelope import ENVELOPE_KEY, restore_data
from tests.warm import WarmStart, starting_warm, zygote_pids

ROOT = Path(__file__).resolve().parents[3]
ADVERSARIES = "tests.apps.server.adversaries:app"
# What a call may take beyond its timeout, as promised.
LATE_S = 3.0
# An answer that takes this long will not come; the client gives up so that the test does not hang.
NO_ANSWER_S = 30.0
# An interpreter, pydantic, the SDK and the app, on a machine that has other things to do.
STARTED_WITHIN_S = 30.0
ENDED_WITHIN_S = 10.0

MODERN, LEGACY = "2026-07-28", "legacy"
TRANSPORTS = [("stdio", MODERN), ("stdio", LEGACY), ("http", MODERN), ("http", LEGACY)]
# For what is done behind them: each transport and each protocol once, the other pairs in `make soak`.
SOME_TRANSPORTS = [
    ("stdio", MODERN),
    ("http", LEGACY),
    pytest.param("stdio", LEGACY, marks=pytest.mark.soak),
    pytest.param("http", MODERN, marks=pytest.mark.soak),
]


def command(target: str = ADVERSARIES, *options: str) -> list[str]:
    return [sys.executable, "-m", "shotclock", "serve", target, *options]


@asynccontextmanager
async def connected(
    transport: str = "stdio", mode: str = MODERN, *options: str, target: str = ADVERSARIES, **of_client: Any
) -> AsyncIterator[tuple[Client, psutil.Process]]:
    """A client and the server's process."""
    if transport == "http":
        with http_server(*options, target=target) as (url, server):
            async with Client(url, mode=mode, read_timeout_seconds=NO_ANSWER_S, **of_client) as client:
                yield client, server
        return
    before = {child.pid for child in psutil.Process().children()}
    argv = command(target, *options)
    parameters = StdioServerParameters(command=argv[0], args=argv[1:], env=dict(os.environ), cwd=ROOT)
    with starting_warm():
        async with Client(parameters, mode=mode, read_timeout_seconds=NO_ANSWER_S, **of_client) as client:
            await client.list_tools()
            known = before | zygote_pids()
            (server,) = [child for child in psutil.Process().children() if child.pid not in known]
            yield client, server


@contextmanager
def http_server(*options: str, target: str = ADVERSARIES) -> Iterator[tuple[str, psutil.Process]]:
    with served(*command(target, "--http", "127.0.0.1:0", *options)[3:]) as process:
        try:
            url = url_said_by(process)
            yield url, psutil.Process(process.pid)
        finally:
            process.terminate()
            code = process.wait(ENDED_WITHIN_S)
            assert code == 143, f"exit code {code}"


@contextmanager
def served(*words: str, **options: Any) -> Iterator[subprocess.Popen[bytes]]:
    """`shotclock WORDS…` with pipes on stdin, stdout and stderr."""
    process = WarmStart(
        [sys.executable, "-m", "shotclock", *words],
        **{"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "cwd": ROOT, **options},
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.kill()
        for stream in (process.stdin, process.stdout, process.stderr):
            if stream is not None:
                stream.close()
        process.wait(ENDED_WITHIN_S)


def url_said_by(process: subprocess.Popen[bytes]) -> str:
    assert process.stderr is not None
    os.set_blocking(process.stderr.fileno(), False)
    said, give_up_at = b"", time.monotonic() + STARTED_WITHIN_S
    while time.monotonic() < give_up_at:
        said += process.stderr.read() or b""
        if found := re.search(rb"on (http://\S+)\n", said):
            return found[1].decode()
        if process.poll() is not None:
            break
        time.sleep(0.01)
    raise AssertionError(f"no address: {said.decode()}")


async def envelope_of(client: Client, tool: str, arguments: dict[str, Any] | None = None, **options: Any) -> Any:
    result = await client.call_tool(tool, arguments or {}, **options)
    return envelope_in(result)


def envelope_in(result: Any) -> Any:
    """The envelope of a result."""
    assert ENVELOPE_KEY in (result.meta or {}), result
    return restore_data(result.meta[ENVELOPE_KEY], result.structured_content)


def envelope_on_wire(result: dict[str, Any]) -> Any:
    """The envelope of a result as JSON."""
    return restore_data(result["_meta"][ENVELOPE_KEY], result.get("structuredContent"))


async def timed(awaitable: Any) -> tuple[Any, float]:
    began = time.perf_counter()
    result = await awaitable
    return result, time.perf_counter() - began


def run(coroutine: Any, within: float = 60) -> Any:
    return asyncio.run(asyncio.wait_for(coroutine, within))
