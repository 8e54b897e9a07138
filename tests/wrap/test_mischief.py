"""A server of the SDK that misbehaves, for clients of both generations: one answer, on time, and a next call."""

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.wrap.client import RawClient, failure, wrapped

pytestmark = [pytest.mark.usefixtures("no_survivors"), pytest.mark.slow]

HERE = Path(__file__).parent
SERVER = [sys.executable, str(HERE / "misbehaving.py"), "--", sys.executable, str(HERE / "sdk_server.py")]
MODERN = {
    "io.modelcontextprotocol/protocolVersion": "2026-07-28",
    "io.modelcontextprotocol/clientInfo": {"name": "raw", "version": "1"},
    "io.modelcontextprotocol/clientCapabilities": {},
}
HARMLESS = ("garbage", "twice", "other id", "flood", "daemon")


def ask(client: RawClient, tool: str, meta: dict[str, Any], mischief: str = "") -> Any:
    arguments = {"a": 1, "b": 2} if tool == "add" else {}
    id = client.call(tool, meta={**meta, "mischief": mischief}, **arguments)
    return client.receive(id)["result"]


@pytest.mark.parametrize("meta", [{}, MODERN], ids=["handshake", "2026-07-28"])
def test_one_answer_comes_on_time_and_the_next_call_works(meta: dict[str, Any]) -> None:
    with wrapped(
        *("--tool", "pid=timeout:1m", "--timeout", "1s", "--grace", "1s"),
        server=SERVER,
        greets=not meta,
        stderr=subprocess.DEVNULL,
    ) as client:
        first = ask(client, "pid", meta)["structuredContent"]
        for mischief in HARMLESS:
            assert ask(client, "pid", meta, mischief)["structuredContent"] == first, mischief
            assert ask(client, "pid", meta)["structuredContent"] == first
        for mischief in ("hang", "late", "deaf"):
            text, envelope = failure(ask(client, "add", meta, mischief))
            assert envelope["error"]["code"] == "TIMEOUT", text
            # Only a server that reacts to nothing is replaced.
            assert (ask(client, "pid", meta)["structuredContent"] == first) is (mischief != "deaf")
        messages = [json.loads(line) for line in client.lines]
        assert set(Counter(message["id"] for message in messages if "method" not in message).values()) == {1}
