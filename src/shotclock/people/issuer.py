"""Tokens of an issuer (OAuth 2.1): JWTs that are checked with the issuer's published keys.

    metadata   RFC 8414 or OpenID Connect discovery; it must name the configured issuer
    keys       fetched by one task for all requests, kept for an hour, fetched again for an unknown key id
    token      signature by a key pair, `iss`, `aud`, `exp`, `nbf`, `sub`, scopes

A token is never sent anywhere and never logged. Without keys none is accepted.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
from collections.abc import Callable
from urllib.parse import urlsplit

import httpcore2
import httpx2
import jwt
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from ..calls.principal import Principal, Role
from ..core.errors import Failure
from ..core.value_types import JsonObject
from ..net.http import Names, Transport
from ..supervise.clock import monotonic_ns
from .authorisation import METADATA_PATH, Authorisation, is_on_loopback, url_problem

FETCH_WITHIN_S = 5.0  # for metadata and keys together, lookup and TLS included
CLOSED_WITHIN_S = 1.0  # for a fetch that ran out of time to close its connection
FETCH_AGAIN_S = 10.0  # at the earliest, however many tokens name unknown keys
FRESH_S = 300.0  # then keys are fetched again, beside the requests
KEYS_LAST_S = 3_600.0  # without news of the issuer
MOST_BYTES = 256 * 1024
MOST_KEYS = 100
LONGEST_TOKEN = 16 * 1024
LEEWAY_S = 30  # for clocks that differ

_RSA = ("RS256", "RS384", "RS512", "PS256", "PS384", "PS512")
_ALGORITHMS = frozenset((*_RSA, "ES256", "ES384", "ES512", "EdDSA"))  # never `none`, never a shared secret
_TYPES = ("jwt", "at+jwt", "application/at+jwt")
_SUBJECT = re.compile(r"[\x20-\x7e]{1,255}")
_FETCH_ERRORS = (
    httpx2.HTTPError, httpx2.InvalidURL, httpx2.StreamError, httpcore2.NetworkError, httpcore2.ProtocolError,
    httpcore2.ProxyError, httpcore2.TimeoutException, httpcore2.UnsupportedProtocol, OSError, ValueError,
)  # fmt: skip
_REASONS: dict[type[Exception], str] = {
    jwt.ExpiredSignatureError: "it has expired",
    jwt.ImmatureSignatureError: "it is not valid yet",
    jwt.InvalidAudienceError: "it is for another server",
    jwt.InvalidIssuerError: "it is from another issuer",
    jwt.InvalidSignatureError: "its signature is wrong",
    jwt.MissingRequiredClaimError: "it lacks one of exp, iss, aud and sub",
}

Keys = dict[tuple[str | None, str], jwt.PyJWK]  # by id and algorithm


class Issuer:
    """The issuer of a server. `say` gets a line when its keys cannot be fetched."""

    def __init__(self, wanted: Authorisation, names: Names, say: Callable[[str], None]) -> None:
        self.wanted = wanted
        self._names = names
        self._say = say
        self._keys: Keys = {}
        self._fetched_at_ns: int | None = None
        self._tried_at_ns: int | None = None
        self._fetching: asyncio.Task[None] | None = None
        self._problem = ""

    def routes(self) -> list[Route]:
        wanted = self.wanted
        document = {
            "resource": wanted.resource,
            "authorization_servers": [wanted.issuer],
            "bearer_methods_supported": ["header"],
            **({"scopes_supported": list(wanted.scopes)} if wanted.scopes else {}),
        }

        async def show(request: Request) -> Response:
            return JSONResponse(document)

        return [Route(path, show, methods=["GET"]) for path in dict.fromkeys((METADATA_PATH, wanted.metadata_path))]

    def challenge(self, error: str = "", description: str = "") -> str:
        """Return the WWW-Authenticate header of a refusal (RFC 6750, RFC 9728)."""
        parts = {
            "error": error,
            "error_description": description,
            "scope": " ".join(self.wanted.scopes),
            "resource_metadata": self.wanted.metadata_url,
        }
        return "Bearer " + ", ".join(f'{name}="{text}"' for name, text in parts.items() if text)

    async def authenticate(self, token: str) -> Principal:
        wanted = self.wanted
        header = _read_header(token)
        key = await self._find_key(header.get("kid"), header["alg"])
        try:
            claims = jwt.decode(
                token,
                key,
                algorithms=[header["alg"]],
                audience=wanted.audience,
                issuer=wanted.issuer,
                leeway=LEEWAY_S,
                options={"require": ["exp", "iss", "aud", "sub"], "enforce_minimum_key_length": True},
            )
        except jwt.PyJWTError as error:
            raise _invalid(_REASONS.get(type(error), "it is malformed")) from None
        if "cnf" in claims:
            raise _invalid("it is bound to a key of its client, which this server does not check")
        if not _SUBJECT.fullmatch(claims["sub"]):
            raise _invalid("its sub is not 1 to 255 characters of ASCII")
        granted = claims.get("scope", claims.get("scp", ""))
        granted = granted.split() if isinstance(granted, str) else granted if isinstance(granted, list) else []
        if missing := [scope for scope in wanted.scopes if scope not in granted]:
            raise Failure("NOT_ALLOWED", f"the token lacks the scope {' '.join(missing)}")
        # No token of the store has a name with these characters, and the URL of an issuer has no `#`.
        return Principal(f"{wanted.issuer}#{claims['sub']}", Role.AGENT, claims=claims)

    async def _find_key(self, id: str | None, algorithm: str) -> jwt.PyJWK:
        """Return a key, waiting for a fetch only if it is not known. Raises Failure."""
        age_s = self._age_s()
        key = _choose(self._keys, id, algorithm) if age_s < KEYS_LAST_S else None
        if key is not None:
            if age_s > FRESH_S:
                self.begin_fetch()
            return key
        if (fetching := self.begin_fetch()) is not None:
            await asyncio.wait([fetching], timeout=FETCH_WITHIN_S + CLOSED_WITHIN_S)
            if fetching.done():
                fetching.result()
        if self._age_s() >= KEYS_LAST_S:
            message = f"no token can be checked now: {self._problem or 'the issuer has not answered yet'}"
            raise Failure("UNAVAILABLE", message, retry_after_ms=int(FETCH_AGAIN_S * 1000))
        key = _choose(self._keys, id, algorithm)
        if key is None:
            raise _invalid("the issuer has no key for it")
        return key

    def _age_s(self) -> float:
        return float("inf") if self._fetched_at_ns is None else (monotonic_ns() - self._fetched_at_ns) / 1e9

    def begin_fetch(self) -> asyncio.Task[None] | None:
        """Return the running fetch, or begin one, unless the last began a moment ago."""
        if self._fetching is not None and not self._fetching.done():
            return self._fetching
        now_ns = monotonic_ns()
        if self._tried_at_ns is not None and now_ns - self._tried_at_ns < FETCH_AGAIN_S * 1e9:
            return None
        self._tried_at_ns = now_ns
        self._fetching = asyncio.get_running_loop().create_task(self._fetch())
        return self._fetching

    async def _fetch(self) -> None:
        problem = ""
        try:
            async with asyncio.timeout(FETCH_WITHIN_S):
                transport = Transport(
                    self._names, httpx2.create_ssl_context, os.environ, on_sign=lambda: None, on_body=lambda part: None
                )
                async with httpx2.AsyncClient(transport=transport, timeout=None, trust_env=False) as client:
                    self._keys = read_keys(await _get(client, await self._find_keys_url(client)))
            self._fetched_at_ns = monotonic_ns()
        except TimeoutError:
            problem = f"the issuer {self.wanted.issuer} did not answer within {FETCH_WITHIN_S:g} s"
        except _FETCH_ERRORS as error:
            problem = (
                f"the keys of the issuer {self.wanted.issuer} cannot be fetched: {str(error) or type(error).__name__}"
            )
            if "CERTIFICATE_VERIFY_FAILED" in problem:
                problem += "; set SSL_CERT_FILE to the certificates of a private authority"
        if problem and problem != self._problem:
            self._say(problem)
        self._problem = problem

    async def _find_keys_url(self, client: httpx2.AsyncClient) -> str:
        """Return the URL of the keys, from the issuer's metadata. Raises ValueError and errors of HTTP."""
        issuer = self.wanted.issuer
        for url in metadata_urls(issuer):
            try:
                metadata = await _get(client, url)
            except NotThere:
                continue
            if metadata.get("issuer") != issuer:
                raise ValueError(
                    f"{url} names the issuer {str(metadata.get('issuer'))[:200]!r}: give exactly that name"
                )
            keys_url = metadata.get("jwks_uri")
            if not isinstance(keys_url, str):
                raise ValueError(f"{url} has no jwks_uri")
            elsewhere = is_on_loopback(keys_url) and not is_on_loopback(issuer)
            if elsewhere or url_problem(keys_url.partition("?")[0], is_secure=True):
                raise ValueError(f"the jwks_uri in {url} is not an https URL")
            return keys_url
        raise ValueError(f"{issuer} has no metadata (RFC 8414 or OpenID Connect discovery)")


def metadata_urls(issuer: str) -> list[str]:
    """Return where the metadata of an issuer may be, in the order of the MCP specification."""
    url = urlsplit(issuer)
    base, path = f"{url.scheme}://{url.netloc}", url.path.rstrip("/")
    urls = [f"{base}/.well-known/{name}{path}" for name in ("oauth-authorization-server", "openid-configuration")]
    return [*urls, f"{base}{path}/.well-known/openid-configuration"] if path else urls


class NotThere(ValueError):
    """There is no document at a URL."""


async def _get(client: httpx2.AsyncClient, url: str) -> JsonObject:
    """Fetch a JSON object. Raises NotThere, ValueError and errors of HTTP. Redirects are not followed."""
    headers = {"Accept": "application/json", "Accept-Encoding": "identity"}
    async with client.stream("GET", url, headers=headers) as response:
        if response.status_code != 200:
            is_there = response.status_code not in (404, 405, 410)
            raise (ValueError if is_there else NotThere)(f"{url} answered {response.status_code}")
        content = b""
        async for part in response.aiter_raw():
            content += part
            if len(content) > MOST_BYTES:
                raise ValueError(f"{url} sent more than {MOST_BYTES} bytes")
    try:
        document = json.loads(content)
    except (ValueError, RecursionError):
        document = None
    if not isinstance(document, dict):
        raise ValueError(f"{url} sent no JSON object")
    return document


def read_keys(document: JsonObject) -> Keys:
    """Return the keys that verify signatures, without the ones that cannot be used here. Raises ValueError."""
    entries = document.get("keys")
    if not isinstance(entries, list):
        raise ValueError("its keys are not a JWK set")
    keys: Keys = {}
    for entry in entries[:MOST_KEYS]:
        if not isinstance(entry, dict) or entry.get("use", "sig") != "sig":
            continue
        id, named = entry.get("kid"), entry.get("alg")
        for algorithm in [named] if named else _RSA if entry.get("kty") == "RSA" else [None]:
            try:
                key = jwt.PyJWK(entry, algorithm)
            except (jwt.PyJWTError, TypeError, ValueError, AttributeError):
                continue  # of a kind that is not known here
            if key.algorithm_name in _ALGORITHMS and (id is None or isinstance(id, str)):
                keys[id, key.algorithm_name] = key
    return keys


def _choose(keys: Keys, id: str | None, algorithm: str) -> jwt.PyJWK | None:
    if id is not None:
        return keys.get((id, algorithm))
    fitting = [key for (_, each), key in keys.items() if each == algorithm]
    return fitting[0] if len(fitting) == 1 else None


def _read_header(token: str) -> JsonObject:
    """Return the header of a JWT that may be valid. Raises Failure."""
    if len(token) > LONGEST_TOKEN:
        raise _invalid(f"it is longer than {LONGEST_TOKEN} characters")
    try:
        header = jwt.get_unverified_header(token)
    except (jwt.PyJWTError, ValueError, RecursionError):
        raise _invalid("it is neither a token of this server nor a JWT: opaque tokens cannot be checked") from None
    if header.get("alg") not in tuple(_ALGORITHMS):  # may be of any type
        raise _invalid("its algorithm is not accepted")
    if str(header.get("typ", "jwt")).lower() not in _TYPES:
        raise _invalid("it is not an access token")
    return header


def _invalid(why: str) -> Failure:
    return Failure("TOKEN_INVALID", f"this token is refused: {why}")
