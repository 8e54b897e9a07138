"""Tokens of an issuer, against a real one on loopback: which are accepted, and what a bad issuer cannot do."""

import asyncio
import base64
import hashlib
import hmac
import json
import time
from collections.abc import Callable, Iterator
from typing import Any

import jwt
import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa

from shotclock.calls.principal import Principal, Role
from shotclock.calls.runtime import Runtime
from shotclock.core.errors import Failure
from shotclock.net.http import Names
from shotclock.people import issuer as issuer_module
from shotclock.people.authorisation import Authorisation, read_authorisation
from shotclock.people.issuer import Issuer, metadata_urls
from tests.people.issuing import LONGEST_HANG_S, RSA_KEY, TestIssuer, issuing

HERE = "http://127.0.0.1:8000/mcp"
METADATA = "/.well-known/oauth-authorization-server"


@pytest.fixture
def source() -> Iterator[TestIssuer]:
    with issuing() as issuer:
        yield issuer


def trusting(source: TestIssuer, *scopes: str, said: list[str] | None = None) -> Issuer:
    wanted = Authorisation(source.url, scopes=scopes).at(("127.0.0.1", 8000), "/mcp")
    return Issuer(wanted, Names(Runtime()), (said if said is not None else []).append)


async def outcome(issuer: Issuer, token: str) -> str:
    """The code and the end of the message, or the name of the principal."""
    try:
        return (await issuer.authenticate(token)).name
    except Failure as failure:
        return f"{failure.code} {failure}"


def part(value: Any) -> str:
    content = value if isinstance(value, bytes) else json.dumps(value).encode()
    return base64.urlsafe_b64encode(content).decode().rstrip("=")


def forged(header: dict[str, Any], claims: dict[str, Any], sign: Callable[[bytes], bytes]) -> str:
    body = f"{part(header)}.{part(claims)}"
    return f"{body}.{part(sign(body.encode()))}"


def test_only_a_signed_current_token_for_this_server_is_accepted(source: TestIssuer) -> None:
    now = int(time.time())
    claims = {"iss": source.url, "aud": HERE, "sub": "ada", "exp": now + 300}
    public = RSA_KEY.public_key()
    pem = public.public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
    stranger = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    valid = source.token(HERE)
    refused = {
        "for another server": source.token("https://other.example/mcp"),
        "lacks one of": source.token(HERE, aud=None),
        "lacks one of exp": source.token(HERE, exp=None),
        "lacks one of exp,": source.token(HERE, sub=None),
        "from another issuer": source.token(HERE, iss=source.url + "/"),
        "has expired": source.token(HERE, exp=now - 60),
        "not valid yet": source.token(HERE, nbf=now + 300),
        "signature is wrong": jwt.encode(claims, stranger, "RS256", {"kid": "first"}),
        "its signature is wrong": valid[:-8] + "AAAAAAAA",
        "algorithm is not accepted": forged({"alg": "none", "kid": "first"}, claims, lambda body: b""),
        "its algorithm is not accepted": forged(
            {"alg": "HS256", "kid": "first"}, claims, lambda body: hmac.new(pem, body, hashlib.sha256).digest()
        ),
        "this token is refused: its algorithm": forged({"alg": ["RS256"]}, claims, lambda body: b"x"),
        "no key for it": forged({"alg": "ES256", "kid": "first"}, claims, lambda body: b"x" * 64),
        "the issuer has no key": jwt.encode(claims, RSA_KEY, "RS256", {"kid": "unknown"}),
        "not an access token": source.token(HERE, headers={"typ": "logout+jwt"}),
        "bound to a key": source.token(HERE, cnf={"jkt": "x"}),
        "its sub": source.token(HERE, sub="ada\n(anonymous)"),
        "malformed": forged({"alg": "RS256", "kid": "first"}, claims, lambda body: b"")[:-1] + ".",
        "opaque tokens": "2YotnFZFEjr1zCsicMWpAA",
        "longer than": valid + "A" * 20_000,
    }  # fmt: skip

    async def scene() -> None:
        issuer = trusting(source)
        assert await issuer.authenticate(valid) == Principal(f"{source.url}#ada", Role.AGENT)
        assert await outcome(issuer, source.token(HERE, aud=["https://a.example", HERE])) == f"{source.url}#ada"
        assert await outcome(issuer, source.token(HERE, exp=now - 5)) == f"{source.url}#ada", "clocks differ a little"
        assert await outcome(issuer, jwt.encode(claims, RSA_KEY, "PS256")) == f"{source.url}#ada", "the only key"
        for why, token in refused.items():
            answer = await outcome(issuer, token)
            assert answer.startswith("TOKEN_INVALID"), (why, answer)
            assert why in answer or why == "malformed", (why, answer)
            assert token not in answer

    asyncio.run(scene())


def test_a_token_without_the_scope_is_told_which_one_is_missing(source: TestIssuer) -> None:
    async def scene() -> None:
        issuer = trusting(source, "tools", "extra")
        for claims in ({"scope": "extra tools more"}, {"scp": ["tools", "extra"]}):
            assert await outcome(issuer, source.token(HERE, **claims)) == f"{source.url}#ada"
        for claims in ({}, {"scope": "toolsextra"}, {"scope": 7}, {"scp": {"tools": 1}}):
            answer = await outcome(issuer, source.token(HERE, **claims))
            assert answer == "NOT_ALLOWED the token lacks the scope tools extra"

    asyncio.run(scene())


def test_new_keys_are_fetched_and_unknown_ones_cost_one_fetch(
    source: TestIssuer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scene() -> None:
        issuer = trusting(source)
        old = source.token(HERE)
        await asyncio.gather(*(outcome(issuer, old) for _ in range(20)))
        assert source.fetches_of_keys() == 1
        source.rotate("second")
        new = source.token(HERE, kid="second")
        flood = [jwt.encode({"n": n}, RSA_KEY, "RS256", {"kid": f"k{n}"}) for n in range(50)]
        answers = await asyncio.gather(*(outcome(issuer, token) for token in flood))
        assert {answer[:13] for answer in answers} == {"TOKEN_INVALID"}
        assert source.fetches_of_keys() == 1, "fetched a moment ago"
        assert await outcome(issuer, old) == f"{source.url}#ada"
        monkeypatch.setattr(issuer_module, "FETCH_AGAIN_S", 0.0)
        assert await outcome(issuer, new) == f"{source.url}#ada"
        assert (await outcome(issuer, old)).startswith("TOKEN_INVALID"), "its key was withdrawn"

    asyncio.run(scene())


def test_an_issuer_that_misbehaves_is_named_and_nothing_is_accepted(
    source: TestIssuer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(issuer_module, "FETCH_WITHIN_S", 1.0)

    def redirect(handler: Any) -> None:
        handler.send_response(302)
        handler.send_header("Location", f"{source.url}/secret")
        handler.send_header("Content-Length", "0")
        handler.end_headers()

    def drip(handler: Any) -> None:
        handler.send_response(200)
        handler.end_headers()
        while not source.hang_until.wait(0.05):
            handler.wfile.write(b" ")

    def send(document: Any) -> Callable[[Any], None]:
        return lambda handler: handler.send(document)

    cases: list[tuple[str, Callable[[Any], None], str]] = [
        (METADATA, redirect, "answered 302"),
        ("/keys", redirect, "answered 302"),
        (METADATA, lambda handler: source.hang_until.wait(LONGEST_HANG_S), "did not answer within 1 s"),
        ("/keys", drip, "did not answer within 1 s"),
        ("/keys", send(b" " * 300_000), "more than 262144 bytes"),
        (METADATA, send({**source.metadata(), "issuer": "https://other.example"}), "give exactly that name"),
        (METADATA, send({**source.metadata(), "jwks_uri": "file:///etc/passwd"}), "not an https URL"),
        (METADATA, send({**source.metadata(), "jwks_uri": "http://10.0.0.1/keys"}), "not an https URL"),
        (METADATA, send([]), "no JSON object"),
        (METADATA, lambda handler: handler.send({}, 404), "has no metadata"),
        ("/keys", send(b"[" * 100_000), "no JSON object"),
        ("/keys", send({"keys": 7}), "not a JWK set"),
    ]

    async def scene() -> None:
        for path, answer, why in cases:
            source.answers = {path: answer}
            said: list[str] = []
            found = await outcome(trusting(source, said=said), source.token(HERE))
            assert found.startswith("UNAVAILABLE") and why in found, (why, found)
            assert len(said) == 1 and why in said[0]
        assert "/secret" not in source.asked
        odd = [{"kty": "oct", "k": "AAAA"}, {"kty": "RSA", "n": 7}, 7, {"kty": "EC", "crv": "secp256k1"}]
        source.answers = {"/keys": send({"keys": [*odd, *source.jwks()["keys"]]})}
        assert await outcome(trusting(source), source.token(HERE)) == f"{source.url}#ada", "one bad key costs no other"

    asyncio.run(scene())


def test_known_keys_work_while_the_issuer_hangs_and_not_forever(
    source: TestIssuer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scene() -> None:
        issuer = trusting(source)
        token = source.token(HERE)
        await issuer.authenticate(token)
        source.answers = {METADATA: lambda handler: source.hang_until.wait(LONGEST_HANG_S)}
        monkeypatch.setattr(issuer_module, "FETCH_AGAIN_S", 0.0)
        monkeypatch.setattr(issuer_module, "FRESH_S", 0.0)
        began = time.monotonic()
        assert await outcome(issuer, token) == f"{source.url}#ada"
        assert time.monotonic() - began < issuer_module.FETCH_WITHIN_S, "the fetch is beside the request"
        monkeypatch.setattr(issuer_module, "FETCH_WITHIN_S", 0.2)
        monkeypatch.setattr(issuer_module, "KEYS_LAST_S", 0.0)
        assert (await outcome(issuer, token)).startswith("UNAVAILABLE")

    asyncio.run(scene())


def test_metadata_is_looked_for_where_the_specification_says() -> None:
    assert metadata_urls("https://a.example/") == [
        "https://a.example/.well-known/oauth-authorization-server",
        "https://a.example/.well-known/openid-configuration",
    ]
    assert metadata_urls("https://a.example/t1") == [
        "https://a.example/.well-known/oauth-authorization-server/t1",
        "https://a.example/.well-known/openid-configuration/t1",
        "https://a.example/t1/.well-known/openid-configuration",
    ]


def test_options_that_cannot_work_are_refused() -> None:
    local, far = ("127.0.0.1", 0), ("0.0.0.0", 8000)
    good = {"issuer": "https://a.example"}
    for address, written, field in (
        (None, good, "issuer"),
        (local, {"issuer": "http://a.example"}, "issuer"),
        (local, {"issuer": "ftp://127.0.0.1"}, "issuer"),
        (local, {"issuer": "https://u:p@a.example"}, "issuer"),
        (local, {"issuer": "https://a.example?x"}, "issuer"),
        (local, {"issuer": "https://a.example:99999"}, "issuer"),
        (local, {"issuer": ""}, "issuer"),
        (far, good, "resource"),
        (local, {**good, "resource": 'https://a"b'}, "resource"),
        (local, {**good, "audience": "two words"}, "audience"),
        (local, {**good, "require_scope": ['a"b']}, "require_scope"),
        (local, {"audience": "x"}, "audience"),
    ):
        _, mistakes = read_authorisation(address, **written)  # type: ignore[arg-type]
        assert [each["field"] for each in mistakes] == [field], written
    for issuer in ("https://a.example/t1", "http://127.0.0.1:9", "http://localhost:9", "http://[::1]:9"):
        found, mistakes = read_authorisation(far, issuer=issuer, resource="https://tools.example/x/mcp")
        assert mistakes == [] and found is not None
        found = found.at(far, "/mcp")
        assert found.metadata_url == "https://tools.example/.well-known/oauth-protected-resource/x/mcp"
        assert found.audience == found.resource
