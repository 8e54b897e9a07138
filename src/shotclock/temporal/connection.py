"""Where Temporal is, and how one gets in, with TLS, mTLS or an API key.

temporal://HOST:PORT[/NAMESPACE]
"""

from __future__ import annotations

import logging
import os
import re
import shlex
from collections.abc import Mapping
from datetime import timedelta
from functools import cache
from typing import TYPE_CHECKING

from ..core.errors import Failure
from ..core.value_types import value

if TYPE_CHECKING:
    from temporalio.client import Client
    from temporalio.runtime import Runtime

_URL = re.compile(
    r"temporal://(?P<host>\[[0-9A-Fa-f:.]+\]|[^\s/:@?#]+)(?::(?P<port>[0-9]{1,5}))?(?:/(?P<namespace>[^\s/?#]+)?)?"
)
INSTALL = "pip install 'shotclock[scale]'"
DEFAULT_PORT = 7233
DEFAULT_NAMESPACE = "default"
# How long to try to reach the engine. It may be starting, and a name may have to be looked up.
CONNECT_LIMIT_S = 10.0


@value
class Setting:
    """Something that opens an engine: an option of the command line, and the variable of Temporal's own tools that it
    goes before."""

    option: str
    variable: str

    @property
    def key(self) -> str:
        return self.option.removeprefix("--").replace("-", "_")


TLS = Setting("--tls", "TEMPORAL_TLS")
CA = Setting("--tls-ca-path", "TEMPORAL_TLS_SERVER_CA_CERT_PATH")
CERT = Setting("--tls-cert-path", "TEMPORAL_TLS_CLIENT_CERT_PATH")
KEY = Setting("--tls-key-path", "TEMPORAL_TLS_CLIENT_KEY_PATH")
SERVER_NAME = Setting("--tls-server-name", "TEMPORAL_TLS_SERVER_NAME")
# Temporal's own tools take the key itself, as --api-key. There everybody on the machine could read it, in `ps`.
API_KEY = Setting("--api-key-file", "TEMPORAL_API_KEY")
SETTINGS = (TLS, CA, CERT, KEY, SERVER_NAME, API_KEY)
_YES, _NO = ("1", "true", "yes"), ("", "0", "false", "no")
# Longer ones are no certificate and no key.
LONGEST_FILE = 1_000_000


@value
class Address:
    """An engine and a namespace of it, and what opens it."""

    host: str
    port: int = DEFAULT_PORT
    namespace: str = DEFAULT_NAMESPACE
    tls: bool = False
    ca: bytes | None = None
    cert: bytes | None = None
    key: bytes | None = None
    server_name: str | None = None
    api_key: str | None = None
    options: tuple[str, ...] = ()
    """Those that were given beside --on. The names of files, never what is in them."""

    def __str__(self) -> str:
        return f"temporal://{self.host}:{self.port}/{self.namespace}"

    @property
    def on_command_line(self) -> str:
        """Return the words by which another command of ours finds the same engine."""
        return shlex.join(["--on", str(self), *self.options])


class AddressError(ValueError):
    """Every mistake in what is said of an engine."""

    def __init__(self, mistakes: list[dict[str, str]]) -> None:
        super().__init__("; ".join(f"{mistake['field']}: {mistake['message']}" for mistake in mistakes))
        self.mistakes = mistakes


def parse_address(text: str) -> tuple[str, int, str]:
    """Return host, port and namespace of a URL. Raises ValueError, which says what is wrong with it."""
    found = _URL.fullmatch(text)
    if found is None:
        raise ValueError(f"{text[:80]!r} is no address of an engine: write temporal://HOST:PORT[/NAMESPACE]")
    port = int(found["port"] or DEFAULT_PORT)
    if not 0 < port < 65536:
        raise ValueError(f"{port} is no port")
    return found["host"], port, found["namespace"] or DEFAULT_NAMESPACE


def read_address(text: str, environ: Mapping[str, str], said: Mapping[str, object] | None = None) -> Address:
    """Return the address of a URL, with what opens it: `said` are the values of options by the keys of their settings,
    the rest is in the variables of Temporal's own tools. Raises AddressError for what cannot be right, before anybody
    is asked."""
    return _AddressReader(environ, said or {}).read(text)


class _AddressReader:
    """The reading of what opens an engine."""

    def __init__(self, environ: Mapping[str, str], said: Mapping[str, object]) -> None:
        self._environ, self._said = environ, said
        self._mistakes: list[dict[str, str]] = []

    def read(self, text: str) -> Address:
        host, port, namespace = parse_address(text)
        ca, cert, key = (self._read_file(setting) for setting in (CA, CERT, KEY))
        api_key, server_name = self._read_api_key(), self._find(SERVER_NAME)
        if self._find(KEY) and not self._find(CERT):
            self._refuse(KEY, f"a key without its certificate: {CERT.option} names it")
        if self._find(CERT) and not self._find(KEY):
            self._refuse(CERT, f"a certificate without its key: {KEY.option} names it")
        wanted, needs_tls = self._read_tls(), bool(ca or cert or server_name)
        if wanted is False and needs_tls:
            self._refuse(TLS, "certificates and names are for TLS: leave them out, or this")
        if not self._mistakes:
            self._check_certificates()
        if self._mistakes:
            raise AddressError(self._mistakes)
        tls = bool(needs_tls or api_key) if wanted is None else wanted
        return Address(host, port, namespace, tls, ca, cert, key, server_name, api_key, self._list_options())

    def _refuse(self, setting: Setting, message: str) -> None:
        """Report a mistake where it was made: at the option, or at --on, by the name of the variable."""
        if self._said.get(setting.key) is not None:
            self._mistakes.append({"field": setting.option.removeprefix("--"), "message": message})
        else:
            self._mistakes.append({"field": "on", "message": f"the variable {setting.variable}: {message}"})

    def _find(self, setting: Setting) -> str | None:
        said = self._said.get(setting.key)
        return str(said) if said is not None else self._environ.get(setting.variable) or None

    def _read_tls(self) -> bool | None:
        """Return whether TLS is wanted; None where nobody says so, or the other way."""
        said = self._said.get(TLS.key)
        if said is not None:
            return bool(said)
        written = self._environ.get(TLS.variable, "").strip().lower()
        if written not in (*_YES, *_NO):
            self._refuse(TLS, f"{written[:40]!r} is neither true nor false")
        return None if not written else written in _YES

    def _read_file(self, setting: Setting) -> bytes | None:
        path = self._find(setting)
        if path is None:
            return None
        # Whoever knows Temporal's own --api-key may have put the key itself there: it is not repeated.
        shown = "it" if setting is API_KEY else repr(path)
        try:
            if not os.path.isfile(path):  # a pipe would be waited for
                self._refuse(setting, f"{shown} is no file" if os.path.exists(path) else f"{shown} is not there")
                return None
            with open(path, "rb") as file:
                return file.read(LONGEST_FILE)
        except (OSError, ValueError) as error:
            self._refuse(setting, f"{shown} cannot be read: {getattr(error, 'strerror', None) or error}")
            return None

    def _read_api_key(self) -> str | None:
        if self._said.get(API_KEY.key) is None:
            text = self._environ.get(API_KEY.variable, "").strip()
            if not text:
                return None
        else:
            found = self._read_file(API_KEY)
            if found is None:
                return None
            text = found.decode("ascii", "replace").strip()
        if not re.fullmatch(r"[!-~]+", text):  # and not what it is
            self._refuse(API_KEY, "it holds no API key: one word of ASCII")
        return text

    def _check_certificates(self) -> None:
        """See that the files hold what their names say, and that the key is that of the certificate."""
        ca, cert, key = self._find(CA), self._find(CERT), self._find(KEY)
        if ca is None and cert is None:
            return
        import ssl

        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        try:
            if ca is not None:
                context.load_verify_locations(ca)
        except (ssl.SSLError, OSError) as error:
            self._refuse(CA, f"{ca!r} holds no certificates (PEM): {error}")
        try:
            if cert is not None:
                context.load_cert_chain(cert, key, password=lambda: "")  # or a terminal would be asked for it
        except (ssl.SSLError, OSError, ValueError) as error:
            self._refuse(CERT, f"{cert!r} and {key!r} are no certificate and its key (PEM, unencrypted): {error}")

    def _list_options(self) -> tuple[str, ...]:
        given: list[str] = []
        for setting in SETTINGS:
            said = self._said.get(setting.key)
            if isinstance(said, bool):
                given.append(setting.option if said else f"{setting.option}=false")
            elif said is not None:
                path = str(said)
                given += [setting.option, path if setting is SERVER_NAME else os.path.abspath(path)]
        return tuple(given)


def require_sdk() -> None:
    """Raise Failure where the package of Temporal is not installed."""
    from importlib.util import find_spec

    if find_spec("temporalio") is None:
        raise Failure("PRECONDITION", "runs on Temporal need temporalio, which is not installed", suggestion=INSTALL)


@cache
def _sdk_runtime() -> Runtime:
    """Return what the SDK runs on. By itself it would log to stdout, which is for data."""
    from temporalio.runtime import LogForwardingConfig, LoggingConfig, Runtime, TelemetryConfig, TelemetryFilter

    forwarding = LogForwardingConfig(logger=logging.getLogger("temporalio"))
    quiet = LoggingConfig(TelemetryFilter(core_level="ERROR", other_level="ERROR"), forwarding=forwarding)
    return Runtime(telemetry=TelemetryConfig(logging=quiet))


async def connect(address: Address) -> Client:
    """Connect to the engine. Raises Failure (CONNECT_FAILED) where that is not possible within a few seconds."""
    import asyncio

    from temporalio.client import Client, TLSConfig
    from temporalio.service import RPCError

    from .payloads import make_converter

    tls: TLSConfig | bool = False
    if address.tls:
        tls = TLSConfig(
            server_root_ca_cert=address.ca,
            client_cert=address.cert,
            client_private_key=address.key,
            domain=address.server_name,
        )
    try:
        async with asyncio.timeout(CONNECT_LIMIT_S):
            client = await Client.connect(
                f"{address.host}:{address.port}",
                namespace=address.namespace,
                tls=tls,
                api_key=address.api_key,
                data_converter=make_converter(),
                runtime=_sdk_runtime(),
                connect_timeout=timedelta(seconds=CONNECT_LIMIT_S),
            )
            await _check_namespace(client)
            return client
    except (RPCError, RuntimeError, TimeoutError, OSError) as error:
        text = str(error)
        why, hint = text, _IS_IT_THERE
        if any(part in text for part in _CLOSED):
            taken_for = "does not know our certificate" if address.tls else "speaks TLS"
            why, hint = f"it has closed the connection, as one that {taken_for}", _IS_IT_TLS
        why, hint = next((said for part, *said in _REASONS if part in text), (why, hint))
        message = f"{address} cannot be reached: {why or f'no answer within {CONNECT_LIMIT_S:g}s'}"
        raise Failure("CONNECT_FAILED", message, context={"sdk": text[:500]}, suggestion=hint) from None


_IS_IT_THERE = "is it there, and is the address right? `shotclock engine dev` starts one to try things out"
_IS_IT_TLS = "--tls, --tls-cert-path and --tls-key-path, or --api-key-file, are for what it asks of its clients"
# What the SDK says, the first that fits; in words, and what to do.
_REASONS = (
    ("dns error", "nobody knows this name", _IS_IT_THERE),
    ("Connection refused", "nobody listens there", _IS_IT_THERE),
    ("NotValidForName", "its certificate is for another name", "--tls-server-name says which one it has"),
    ("UnknownIssuer", "its certificate is from nobody that is trusted here", "--tls-ca-path names whom to trust"),
    ("InvalidCertificate", "its certificate is not valid", "look at it: openssl s_client -connect HOST:PORT"),
    ("Unauthenticated", "it does not let us in", _IS_IT_TLS),
    ("PermissionDenied", "it does not let us in", _IS_IT_TLS),
)
# The same, by what of it we notice first.
_CLOSED = ("close_notify", "BrokenPipe", "ConnectionReset", "connection closed")


async def _check_namespace(client: Client) -> None:
    """Raise Failure if the engine has no such namespace."""
    from temporalio.api.workflowservice.v1 import DescribeNamespaceRequest
    from temporalio.service import RPCError, RPCStatusCode

    request = DescribeNamespaceRequest(namespace=client.namespace)
    try:
        await client.workflow_service.describe_namespace(request, timeout=timedelta(seconds=CONNECT_LIMIT_S))
    except RPCError as error:
        if error.status is RPCStatusCode.NOT_FOUND:
            hint = f"temporal operator namespace create --namespace {client.namespace}"
            raise Failure("CONNECT_FAILED", f"there is no namespace {client.namespace!r}", suggestion=hint) from None
