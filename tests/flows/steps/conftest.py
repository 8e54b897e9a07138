"""What the tests of providers share: one try of one step, measured, and nothing of it left behind."""

import asyncio
import datetime
import ipaddress
import ssl
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from shotclock.calls.preloaded_zygote import Program
from shotclock.calls.runtime import Runtime
from shotclock.core.limits import Clocks, Deadline
from shotclock.core.trace import TraceContext
from shotclock.flows.run.step_attempt import AnsweredAttempt, run_attempt
from shotclock.flows.steps.provider import Provider, StepCall
from shotclock.supervise.clock import monotonic_ns
from shotclock.worker.context import Scope, current_scope

# Past the bell, on two cores that others use as well.
OVERSHOOT_S = 8.0


@dataclass(frozen=True)
class Tried:
    """One try of a step."""

    result: AnsweredAttempt
    elapsed_s: float

    @property
    def error(self) -> dict[str, Any]:
        assert self.result.envelope.error is not None, self.result
        return self.result.envelope.error

    @property
    def message(self) -> str:
        return self.error["message"]

    @property
    def data(self) -> dict[str, Any]:
        assert isinstance(self.result.envelope.data, dict), self.result
        return self.result.envelope.data

    @property
    def meta(self) -> dict[str, Any]:
        return self.result.envelope.meta


@pytest.fixture
def trial(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, validate_envelope: Callable[..., Any]
) -> Callable[..., Tried]:
    """A function that tries a step with a provider, in a runtime of its own, and fails if a task is left."""
    monkeypatch.setenv("SHOTCLOCK_HOME", str(tmp_path / "home"))
    folder = tmp_path / "work"
    folder.mkdir()

    def trial(
        provider: Provider,
        settings: dict[str, Any],
        clocks: Clocks | None = None,
        *,
        env: dict[str, str] | None = None,
        run_ms: int | None = None,
        cancel_after_s: float | None = None,
    ) -> Tried:
        async def work() -> Tried:
            async with Runtime(program=Program(), workers=1) as runtime:
                if run_ms is not None:
                    deadline = Deadline.after_ms(monotonic_ns(), run_ms)
                    current_scope.set(Scope(deadline, -1, "run test", TraceContext("f" * 32)))
                call = StepCall("it", settings, clocks or Clocks(timeout_ms=10_000), env or {}, folder)
                before = asyncio.all_tasks()
                began = time.perf_counter()
                trying = asyncio.ensure_future(run_attempt(provider, call, runtime))
                try:
                    done, _ = await asyncio.wait([trying], timeout=cancel_after_s or 60)
                    if not done:
                        trying.cancel()
                        await asyncio.wait([trying], timeout=10)
                    result = trying.result()
                finally:
                    elapsed_s = time.perf_counter() - began
                    await provider.close()
                    await asyncio.sleep(0)
                    left = asyncio.all_tasks() - before - {trying}
                    assert not left, left
                return Tried(result, elapsed_s)

        tried = asyncio.run(work())
        validate_envelope(tried.result.envelope.to_dict())
        return tried

    return trial


def sockets_to(port: int) -> list[Any]:
    """Our own ends of connections to it that are still open."""
    return [c for c in psutil.Process().net_connections("tcp") if c.raddr and c.raddr.port == port]


@pytest.fixture(scope="session")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, ssl.SSLContext]:
    """A certificate of 127.0.0.1 that signed itself: its file, and a server that shows it."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "127.0.0.1")])
    now = datetime.datetime.now(datetime.UTC)
    address = x509.IPAddress(ipaddress.ip_address("127.0.0.1"))
    signed = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([address]), critical=False)
        .sign(key, hashes.SHA256())
    )
    folder = tmp_path_factory.mktemp("certificate")
    (folder / "cert.pem").write_bytes(signed.public_bytes(serialization.Encoding.PEM))
    (folder / "key.pem").write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(folder / "cert.pem", folder / "key.pem")
    return folder / "cert.pem", server
