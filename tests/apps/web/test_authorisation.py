"""A served App whose clients get their tokens from an issuer, beside the server's own tokens."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import httpx2
import pytest
from mcp import Client
from mcp.client.auth import OAuthClientProvider
from mcp.client.streamable_http import streamable_http_client
from mcp.shared.auth import AuthorizationCodeResult, OAuthClientMetadata

from shotclock.calls.principal import Role
from tests.apps.server.client import envelope_in
from tests.apps.web.serving import ANSWER_WITHIN_S, Served, serving
from tests.certificates import certificate
from tests.people.issuing import TestIssuer, issuing

pytestmark = pytest.mark.slow

WELL_KNOWN = "/.well-known/oauth-protected-resource"


@pytest.fixture(scope="module")
def source() -> Iterator[TestIssuer]:
    with issuing() as issuer:
        yield issuer


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory, source: TestIssuer) -> Iterator[Served]:
    options = ("--issuer", source.url, "--require-scope", "tools")
    words = ("serve", "tests.apps.app.programs.owned:app")
    with serving(tmp_path_factory.mktemp("served"), words=words, options=options) as server:
        yield server


def test_a_client_learns_where_to_get_a_token(served: Served, source: TestIssuer) -> None:
    resource = f"{served.url}/mcp"
    for path in (WELL_KNOWN, f"{WELL_KNOWN}/mcp"):
        assert served.ask("GET", path).json == {
            "resource": resource,
            "authorization_servers": [source.url],
            "bearer_methods_supported": ["header"],
            "scopes_supported": ["tools"],
        }
    where = f'scope="tools", resource_metadata="{served.url}{WELL_KNOWN}/mcp"'
    bare = served.ask("POST", "/mcp", {})
    assert (bare.status, bare.headers["www-authenticate"]) == (401, f"Bearer {where}")
    for token in ("opaque", source.token("https://other.example/mcp", scope="tools"), "shotclock_agent_x"):
        wrong = served.ask("POST", "/mcp", {}, token=token)
        assert (wrong.status, wrong.code) == (401, "TOKEN_INVALID")
        assert wrong.headers["www-authenticate"].startswith('Bearer error="invalid_token", error_description="')
        assert where in wrong.headers["www-authenticate"]
        assert token not in served.said()
    narrow = served.ask("POST", "/mcp", {}, token=source.token(resource, scope="other"))
    assert (narrow.status, narrow.code) == (403, "NOT_ALLOWED")
    assert narrow.headers["www-authenticate"].startswith('Bearer error="insufficient_scope"')
    assert where in narrow.headers["www-authenticate"]


def test_proposals_belong_to_issuer_and_subject_and_own_tokens_still_work(served: Served, source: TestIssuer) -> None:
    resource = f"{served.url}/mcp"
    ada, bob = (source.token(resource, scope="tools", sub=name) for name in ("ada", "bob"))
    operator = served.token("olga", Role.OPERATOR)
    id = served.propose(ada, title="May I?", choices=["yes", "no"])
    assert served.whole(id, operator)["asked_by"] == f"{source.url}#ada"
    assert served.result(id, ada)["status"] == "pending"
    assert served.ask("GET", f"/api/inbox/{id}/result", token=bob).status == 404
    decision = {"status": "approved", "answer": "yes", "action_hash": served.whole(id, operator)["action_hash"]}
    for token, status in ((ada, 403), (operator, 200)):
        assert served.ask("POST", f"/api/inbox/{id}/decision", decision, token=token).status == status
    assert served.ask("POST", "/api/inbox/session", {"token": ada}).status == 401, "an issuer makes no operators"


class Memory:
    """The tokens of one client."""

    def __init__(self) -> None:
        self.tokens: Any = None
        self.client: Any = None

    async def get_tokens(self) -> Any:
        return self.tokens

    async def set_tokens(self, tokens: Any) -> None:
        self.tokens = tokens

    async def get_client_info(self) -> Any:
        return self.client

    async def set_client_info(self, client_info: Any) -> None:
        self.client = client_info


def test_the_sdks_client_signs_in_and_its_job_is_its_own(served: Served, source: TestIssuer) -> None:
    """The whole flow: 401, metadata, registration, authorisation code with PKCE, token, call."""
    url = f"{served.url}/mcp"
    arrived: list[str] = []

    async def visit(page: str) -> None:
        async with httpx2.AsyncClient(trust_env=False, timeout=ANSWER_WITHIN_S) as browser:
            arrived.append((await browser.get(page)).headers["location"])

    async def callback() -> AuthorizationCodeResult:
        answer = {name: values[0] for name, values in parse_qs(urlsplit(arrived[-1]).query).items()}
        return AuthorizationCodeResult(**answer)

    async def call(auth: Any, tool: str, arguments: Any, **meta: Any) -> Any:
        async with (
            httpx2.AsyncClient(auth=auth, trust_env=False, timeout=ANSWER_WITHIN_S) as http,
            Client(streamable_http_client(url, http_client=http), read_timeout_seconds=ANSWER_WITHIN_S) as client,
        ):
            result = await client.call_tool(tool, arguments, meta=meta or None)
            return envelope_in(result)

    async def scene() -> None:
        metadata = OAuthClientMetadata(
            client_name="test",
            redirect_uris=["http://127.0.0.1:1/callback"],
            token_endpoint_auth_method="none",
            grant_types=["authorization_code", "refresh_token"],
        )
        auth = OAuthClientProvider(url, metadata, Memory(), visit, callback)
        pending = await call(auth, "once", {"seconds": 20}, **{"shotclock.dev/budgetMs": 300})
        assert pending["error"]["code"] == "INCOMPLETE", pending
        assert len(arrived) == 1 and source.registered
        job = {"action": "status", "job_id": pending["data"]["job_id"]}

        def bearer(name: str) -> Any:
            token = source.token(url, scope="tools", sub=name)
            return lambda request: request.headers.update({"Authorization": f"Bearer {token}"}) or request

        assert (await call(bearer("bob"), "job", job))["error"]["code"] == "JOB_NOT_FOUND"
        assert (await call(bearer("ada"), "job", job))["ok"]
        assert (await call(auth, "job", {**job, "action": "cancel"}))["ok"]

    asyncio.run(scene())


def test_a_server_starts_without_its_issuer_and_behind_a_proxy(tmp_path: Path) -> None:
    """Other clients are served meanwhile, and stderr names the problem."""
    options = ("--issuer", "http://127.0.0.1:1", "--resource", "https://tools.example/x/mcp")
    with serving(tmp_path, options=options) as served, issuing() as source:
        agent = served.token("agent-1", Role.AGENT)
        refused = served.ask("GET", "/health", token=source.token("https://tools.example/x/mcp"))
        assert (refused.status, refused.code) == (503, "UNAVAILABLE")
        assert "retry-after" in refused.headers
        assert served.ask("GET", "/health", token=agent, Host="tools.example").status == 200
        assert served.ask("GET", "/health", token=agent, Host="evil.example").status == 421
        found = served.ask("GET", f"{WELL_KNOWN}/x/mcp", Host="tools.example")
        assert found.json["resource"] == "https://tools.example/x/mcp"
        assert "the keys of the issuer http://127.0.0.1:1 cannot be fetched" in served.said()


def test_an_issuer_with_a_private_authority_is_trusted_by_ssl_cert_file(tmp_path: Path) -> None:
    certificate(tmp_path, "server", certificate(tmp_path, "authority", None))
    authority = {"SSL_CERT_FILE": str(tmp_path / "authority.pem")}
    words = ("serve", "tests.apps.app.programs.owned:app")
    with issuing(tmp_path / "server.pem") as source:
        for environment, status in (({}, 503), (authority, 406)):  # 406: of the transport, behind the token
            folder = tmp_path / str(status)
            folder.mkdir()
            options = ("--issuer", source.url)
            with serving(folder, words=words, options=options, environment=environment) as server:
                token = source.token(f"{server.url}/mcp")
                assert server.ask("POST", "/mcp", {}, token=token).status == status
                assert ("set SSL_CERT_FILE" in server.said()) == (status == 503), server.said()
