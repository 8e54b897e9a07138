"""The models of pydantic-ai, in the process of an agent, over connections with bounded responses."""

from __future__ import annotations

from functools import lru_cache

import httpx2
from pydantic_ai.models import Model, create_async_httpx2_client

from ...net.http import CountedBody

# Where the step has no timeout, the run or the caller ends it.
LONGEST_REQUEST_S = 24 * 3600.0
# Bytes. SDKs keep an event until its end and search it with each packet: four times the size takes 16 times longer.
EVENT_LIMIT = 4 * 1024 * 1024
CONNECT_S = 5.0


class AnswerTooLong(ValueError):
    """An answer that is given up because it might not fit into memory."""


# A worker serves one step after another and keeps its connections.
@lru_cache(maxsize=16)
def build_model(provider: str, model: str, base_url: str | None, key: str) -> Model:
    if provider == "anthropic":
        from pydantic_ai.models.anthropic import AnthropicModel
        from pydantic_ai.providers.anthropic import AnthropicProvider

        own = AnthropicProvider(api_key=key, base_url=base_url, http_client=open_bounded_client())
        return AnthropicModel(model, provider=own)
    if provider == "google":
        from pydantic_ai.models.google import GoogleModel
        from pydantic_ai.providers.google import GoogleProvider

        google = GoogleProvider(api_key=key, base_url=base_url, http_client=open_bounded_client())
        return GoogleModel(model, provider=google)
    from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
    from pydantic_ai.providers.openai import OpenAIProvider

    # Other servers offer the older of OpenAI's two protocols.
    kind = OpenAIResponsesModel if base_url is None else OpenAIChatModel
    client = open_bounded_client()
    return kind(model, provider=OpenAIProvider(api_key=key or "none", base_url=base_url, http_client=client))


def open_bounded_client() -> httpx2.AsyncClient:
    """Return a client that rejects events longer than EVENT_LIMIT, and compressed bodies, of which a few
    bytes could become gigabytes."""
    client = create_async_httpx2_client(timeout=httpx2.Timeout(LONGEST_REQUEST_S, connect=CONNECT_S))
    client.headers["Accept-Encoding"] = "identity"
    client.event_hooks = {"response": [_bound_body]}
    return client


async def _bound_body(response: httpx2.Response) -> None:
    assert isinstance(response.stream, httpx2.AsyncByteStream)
    encoding = response.headers.get("Content-Encoding", "identity")
    if encoding.strip().lower() not in ("", "identity"):
        raise AnswerTooLong(f"its answer is compressed ({encoding[:40]}), which was not asked for")
    size, last = 0, b""

    def count(part: bytes) -> None:
        nonlocal size, last
        seen = last + part  # the end of an event may come in two packets
        end = max(seen.rfind(each) for each in _ENDS) if response.is_success else -1  # an error is read as a whole
        size = size + len(part) if end < 0 else len(seen) - end
        last = seen[-3:]
        if size > EVENT_LIMIT:
            raise AnswerTooLong(f"a part of its answer is longer than {EVENT_LIMIT} bytes, and was given up")

    response.stream = CountedBody(response.stream, count)


# Of an event: an empty line.
_ENDS = (b"\n\n", b"\r\r", b"\r\n\r\n")
