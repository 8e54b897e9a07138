"""Where Temporal is, and how one gets in, with TLS, mTLS or an API key.

temporal://HOST:PORT[/NAMESPACE]
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from datetime import timedelta
from functools import cache
from pathlib import Path
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
class Address:
    """An engine and a namespace of it, and what opens it."""

    host: str
    port: int = DEFAULT_PORT
    namespace: str = DEFAULT_NAMESPACE
    tls: bool = False
    ca_file: str | None = None
    cert_file: str | None = None
    key_file: str | None = None
    server_name: str | None = None
    api_key: str | None = None

    def __str__(self) -> str:
        return f"temporal://{self.host}:{self.port}/{self.namespace}"


def parse_address(text: str) -> tuple[str, int, str]:
    """Return host, port and namespace of a URL. Raises ValueError, which says what is wrong with it."""
    found = _URL.fullmatch(text)
    if found is None:
        raise ValueError(f"{text[:80]!r} is no address of an engine: write temporal://HOST:PORT[/NAMESPACE]")
    port = int(found["port"] or DEFAULT_PORT)
    if not 0 < port < 65536:
        raise ValueError(f"{port} is no port")
    return found["host"], port, found["namespace"] or DEFAULT_NAMESPACE


def read_address(text: str, environ: Mapping[str, str]) -> Address:
    """Return the address of a URL, with what the variables of Temporal's own tools say about TLS and keys. Raises
    ValueError."""
    host, port, namespace = parse_address(text)
    api_key = environ.get("TEMPORAL_API_KEY") or None
    ca_file, cert_file = environ.get("TEMPORAL_TLS_SERVER_CA_CERT_PATH"), environ.get("TEMPORAL_TLS_CLIENT_CERT_PATH")
    tls = environ.get("TEMPORAL_TLS", "").lower() in ("1", "true", "yes") or bool(ca_file or cert_file or api_key)
    return Address(
        host,
        port,
        namespace,
        tls,
        ca_file,
        cert_file,
        environ.get("TEMPORAL_TLS_CLIENT_KEY_PATH"),
        environ.get("TEMPORAL_TLS_SERVER_NAME"),
        api_key,
    )


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
            server_root_ca_cert=_read(address.ca_file),
            client_cert=_read(address.cert_file),
            client_private_key=_read(address.key_file),
            domain=address.server_name,
        )
    try:
        async with asyncio.timeout(CONNECT_LIMIT_S):
            return await Client.connect(
                f"{address.host}:{address.port}",
                namespace=address.namespace,
                tls=tls,
                api_key=address.api_key,
                data_converter=make_converter(),
                runtime=_sdk_runtime(),
                connect_timeout=timedelta(seconds=CONNECT_LIMIT_S),
            )
    except (RPCError, RuntimeError, TimeoutError, OSError) as error:
        why = str(error) or f"no answer within {CONNECT_LIMIT_S:g}s"
        raise Failure("CONNECT_FAILED", f"{address} cannot be reached: {why}") from None


def _read(path: str | None) -> bytes | None:
    if not path:
        return None
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise Failure("FILE_NOT_FOUND", f"{path}: {error.strerror}") from None
