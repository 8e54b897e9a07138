"""What is decided about connections and answers of servers without one of them."""

import asyncio
import socket
from typing import Any

import httpcore2
import httpx2
import pytest

from shotclock.core.envelope import Envelope
from shotclock.core.errors import Failure
from shotclock.net import http, tool_call
from shotclock.net.http import Backend
from shotclock.net.tool_hints import annotations_of


def test_a_proxy_is_the_one_that_curl_would_use() -> None:
    env = {"http_proxy": "p:1", "ALL_PROXY": "http://q", "NO_PROXY": "inside.example"}
    for url, found in (
        ("http://h", "http://p:1"),
        ("https://h", "http://q"),
        ("http://a.inside.example", None),
        ("http://inside.example", None),
    ):
        assert http.proxy_for(httpx2.URL(url), env) == found, url
    assert http.proxy_for(httpx2.URL("http://h"), {"http_proxy": ""}) is None


def test_the_first_address_that_answers_is_taken_and_names_are_looked_up_once() -> None:
    assert http.resolve("127.0.0.1", 80) == ["127.0.0.1"]
    with pytest.raises(Failure, match="cannot be the name"):
        http.resolve("a" * 64, 80)

    class Names:
        async def addresses(self, host: str, port: int) -> list[str]:
            return [host] if host != "two" else ["127.0.0.2", "127.0.0.1"]

    async def scenario() -> None:
        signs: list[None] = []
        backend = Backend(Names(), lambda: signs.append(None))  # type: ignore[arg-type]
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
            stream = await asyncio.wait_for(backend.connect_tcp("two", port), 5)
            peer, _ = server.accept()
            peer.sendall(b"hi")
            assert await stream.read(100) == b"hi" and len(signs) == 1
            await backend.aclose()
            assert peer.recv(1) == b"", "what it has opened is closed"
            peer.close()
        with pytest.raises(httpcore2.ConnectError):
            await asyncio.wait_for(backend.connect_tcp("127.0.0.1", port), 5)
        backend.expect(answer=True)
        backend.count_bytes(http.MOST_BYTES_BEFORE_ANSWER)
        with pytest.raises(httpcore2.RemoteProtocolError):
            backend.count_bytes(1)
        backend.expect(answer=False)
        backend.count_bytes(http.MOST_BYTES_BEFORE_ANSWER + 1)

    asyncio.run(scenario())


def test_the_envelope_of_a_shotclock_server_is_adopted_and_nothing_of_a_wrong_type() -> None:
    whole: dict[str, Any] = {"ok": True, "data": None, "error": None, "warnings": [], "meta": {}}
    wrong: list[dict[str, Any]] = [{"data": 1}, {"warnings": {}}, {"meta": None}]
    wrong += [{"error": {"code": "x", "message": ""}}, {"error": {"code": "X_Y"}}]
    assert tool_call._is_envelope(whole) and not tool_call._is_envelope({**whole, "more": 1})
    assert not any(tool_call._is_envelope({**whole, **each}) for each in wrong)
    kept = {"code": "LOCK_HELD", "message": "m", "context": {"a": 1}}
    error = {**kept, "retryable": 1, "retry_after_ms": -5, "phase": "x"}
    meta = {"ending": "killed", "side_effects": "all", "exit_code": 256}
    theirs = {**whole, "error": error, "meta": meta, "warnings": [{"code": "W_X", "message": "w"}, {"code": 1}]}
    ours = Envelope(None, None, [], {"ending": "finished", "side_effects": "none", "exit_code": 0})
    adopted = tool_call._adopt_answer(ours, theirs)
    assert adopted.meta == {"ending": "killed", "side_effects": "none", "exit_code": 1} and len(adopted.warnings) == 1
    assert adopted.error == {**kept, "retryable": False, "phase": "execution", "retry_after_ms": 0}
    assert tool_call._find_unsendable({"a": [1]}) is None
    assert all(map(tool_call._find_unsendable, ({"a": float("nan")}, {"a": "\ud800"}, {"a": {1}})))


def test_a_tool_that_declares_nothing_is_destructive_and_reaches_the_outside() -> None:
    for hints, words in (
        ({}, ["destructive", "open-world"]),
        ({"readOnlyHint": True, "openWorldHint": False}, ["read-only"]),
        ({"destructiveHint": False, "idempotentHint": True}, ["idempotent", "open-world"]),
    ):
        assert annotations_of(hints) == words
