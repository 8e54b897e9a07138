"""The options of `serve --issuer`: the issuer whose tokens a server accepts beside its own, and what they must carry.

The words are OAuth's: the *issuer* signs tokens, the *resource* is this server by its public URL, the *audience* of a
token is the resource that it is for.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from urllib.parse import SplitResult, urlsplit

from ..core.value_types import replace, value
from .addresses import is_loopback, url_of

METADATA_PATH = "/.well-known/oauth-protected-resource"  # RFC 9728
_SCOPE = re.compile(r"[\x21\x23-\x5b\x5d-\x7e]{1,100}")
_URL = re.compile(r"[\x21\x23-\x3b\x3d\x3f-\x5b\x5d-\x7e]{1,1000}")
_AUDIENCE = re.compile(r"[\x21-\x7e]{1,1000}")


@value
class Authorisation:
    issuer: str
    resource: str = ""  # empty: the address on which the server listens
    audience: str = ""  # empty: the resource
    scopes: tuple[str, ...] = ()

    def at(self, address: tuple[str, int], path: str) -> Authorisation:
        """Return it with resource and audience, for a server that listens on an address."""
        resource = self.resource or url_of(address, path)
        return replace(self, resource=resource, audience=self.audience or resource)

    @property
    def host(self) -> str:
        return urlsplit(self.resource).hostname or ""

    @property
    def metadata_path(self) -> str:
        return METADATA_PATH + urlsplit(self.resource).path.rstrip("/")

    @property
    def metadata_url(self) -> str:
        return urlsplit(self.resource)._replace(path=self.metadata_path).geturl()


def read_authorisation(
    address: tuple[str, int] | None,
    *,
    issuer: str | None = None,
    resource: str | None = None,
    audience: str | None = None,
    require_scope: Iterable[str] = (),
) -> tuple[Authorisation | None, list[dict[str, str]]]:
    """Return the authorisation, if there is an issuer, and every mistake. `address` None is a server without HTTP."""
    scopes = tuple(require_scope)
    mistakes: dict[str, str] = {}
    if issuer is None:
        given = {"resource": resource, "audience": audience, "require_scope": scopes}
        mistakes = {field: "goes with --issuer" for field, written in given.items() if written}
        return None, _listed(mistakes)
    if address is None:
        mistakes["issuer"] = "goes with --http: there are no tokens on stdin"
    elif problem := url_problem(issuer, is_secure=True):
        mistakes["issuer"] = problem
    if resource is not None and (problem := url_problem(resource, is_secure=False)):
        mistakes["resource"] = problem
    elif resource is None and address is not None and not is_loopback(address[0]):
        mistakes["resource"] = "is missing: give the URL by which clients reach this server, as https://HOST/mcp"
    if audience is not None and not _AUDIENCE.fullmatch(audience):
        mistakes["audience"] = "must be 1 to 1000 characters of ASCII without spaces"
    if bad := [scope for scope in scopes if not _SCOPE.fullmatch(scope)]:
        mistakes["require_scope"] = f"{bad[0][:40]!r} is not the name of a scope"
    return Authorisation(issuer, resource or "", audience or "", scopes), _listed(mistakes)


def url_problem(text: str, *, is_secure: bool) -> str | None:
    """Return what is wrong with a URL, if anything. `is_secure`: it must be https, except on loopback."""
    if not _URL.fullmatch(text) or (url := _split(text)) is None or url.scheme not in ("http", "https"):
        return f"{text[:100]!r} is not a URL such as https://HOST/PATH"
    if url.username is not None or "?" in text or "#" in text:
        return "must have no user, query or fragment"
    if is_secure and url.scheme != "https" and not is_on_loopback(text):
        return "must begin with https:// (http:// only for this machine, as http://127.0.0.1:PORT)"
    return None


def is_on_loopback(text: str) -> bool:
    url = _split(text)
    return url is not None and (url.hostname == "localhost" or is_loopback(url.hostname or ""))


def _split(text: str) -> SplitResult | None:
    try:
        url = urlsplit(text)
        return url if url.hostname and (url.port is None or url.port > 0) else None
    except ValueError:  # a port or an IPv6 address that is none
        return None


def _listed(mistakes: dict[str, str]) -> list[dict[str, str]]:
    return [{"field": field, "message": message} for field, message in mistakes.items()]
