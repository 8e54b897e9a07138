"""The devices of this machine, for `shotclock ui devices` and `shotclock doctor ui`."""

from __future__ import annotations

import asyncio
import base64
import json
import os
from collections.abc import Awaitable, Sequence
from importlib.metadata import PackageNotFoundError, version

from ..core.clocks import Clocks
from ..core.errors import Failure
from ..core.value_types import value
from ..process.unsupervised import start_program
from ..runtime.doctor import Check, Status
from ..runtime.runtime import Runtime
from .adb import INSTALL, Adb, find_adb, find_server_version, server_address
from .browser import CHROMIUM_VARIABLE, NO_PLAYWRIGHT, find_chromium
from .device import KINDS, DeviceEntry, ProgramOutput, module_of

CHECK_LIMIT_S = 6.0  # a program that hangs reaches it
VERSION_LIMIT_MS = 5_000
# The port at which a Chromium-based app is expected, and the limit of its answer.
CDP_PORT = 9222
CDP_LIMIT_S = 1.0
MAX_CDP_BYTES = 64 * 1024
OUTPUT_LIMIT = 16 * 1024 * 1024  # the largest output is a picture of a screen


class RuntimeServices:
    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime

    async def run_command(self, argv: Sequence[str], *, within_ms: int) -> ProgramOutput:
        clocks = Clocks(timeout_ms=max(1, within_ms), grace_ms=0)
        envelope = await self._runtime.run(argv, clocks, output_limit=OUTPUT_LIMIT)
        if envelope.error is not None and envelope.code != "COMMAND_FAILED":
            raise Failure(str(envelope.code), str(envelope.error["message"]))
        data = envelope.data if isinstance(envelope.data, dict) else {}
        encoded = data.get("stdout_base64")
        stdout = base64.b64decode(str(encoded)) if encoded else str(data.get("stdout", "")).encode()
        return ProgramOutput(int(str(data.get("exit_code", 0))), stdout, str(data.get("stderr", "")))

    async def start_program(self, argv: Sequence[str]) -> None:
        try:
            await asyncio.to_thread(start_program, argv, os.environ)
        except OSError as error:
            raise Failure("SPAWN_FAILED", f"{argv[0]} could not be started: {error}") from None


async def find_all_devices() -> list[DeviceEntry]:
    """Return the devices of every kind; for a kind that cannot be listed, the reason."""
    async with Runtime() as runtime:
        services = RuntimeServices(runtime)
        found: list[DeviceEntry] = []
        for name in KINDS:
            if name == "cdp":  # it is reached by its address
                continue
            try:
                async with asyncio.timeout(CHECK_LIMIT_S):
                    found += await module_of(name).find_devices(services)
            except (TimeoutError, Failure) as error:
                reason = str(error) if isinstance(error, Failure) else f"no answer within {CHECK_LIMIT_S:g} s"
                found.append(DeviceEntry(name, False, reason))
        return found


@value
class DeviceFindings:
    checks: list[Check]
    devices: list[DeviceEntry]

    @property
    def failed(self) -> list[Check]:
        return [check for check in self.checks if check.status == "fail"]

    def as_data(self) -> dict[str, object]:
        checks = [{"name": check.name, "status": check.status, "detail": check.detail} for check in self.checks]
        devices = [{"name": each.name, "usable": each.usable, "detail": each.detail} for each in self.devices]
        return {"checks": checks, "devices": devices}


async def examine_devices() -> DeviceFindings:
    """Check the requirements and list the devices. Starts none, and leaves nothing running."""
    async with Runtime() as runtime:
        services = RuntimeServices(runtime)
        needs = await asyncio.gather(
            _check("playwright", _check_playwright()),
            _check("chromium", _check_chromium(services)),
            _check("cdp", check_cdp()),
            _check("adb", _check_adb(services)),
            _check("adb_server", _check_adb_server()),
        )
    devices = await find_all_devices()
    checks = [*needs, *(Check(each.name, "ok" if each.usable else "warn", each.detail) for each in devices)]
    usable = [device.name for device in devices if device.usable]
    checks.append(Check("devices", "ok" if usable else "fail", ", ".join(usable) or "no device can be used here"))
    return DeviceFindings(checks, devices)


async def _check(name: str, checking: Awaitable[tuple[Status, str]]) -> Check:
    try:
        async with asyncio.timeout(CHECK_LIMIT_S):
            status, detail = await checking
    except TimeoutError:
        status, detail = "warn", f"no answer within {CHECK_LIMIT_S:g} s"
    except Failure as failure:
        status, detail = "warn", str(failure)
    return Check(name, status, detail)


async def _check_playwright() -> tuple[Status, str]:
    try:
        return "ok", version("playwright")
    except PackageNotFoundError:
        return "warn", NO_PLAYWRIGHT


async def _check_chromium(services: RuntimeServices) -> tuple[Status, str]:
    program = find_chromium()
    if program is None:
        missing = "no Chromium is on PATH: install one (Debian: apt install chromium-headless-shell)"
        return "warn", f"{missing}, or name it in {CHROMIUM_VARIABLE}"
    output = await services.run_command([program, "--version"], within_ms=VERSION_LIMIT_MS)
    name = output.stdout.decode("utf-8", "replace").strip().split("\n")[0][:100]
    if output.exit_code or not name:
        return "warn", f"{program} --version ended with exit code {output.exit_code}"
    return "ok", f"{name} ({program})"


async def check_cdp() -> tuple[Status, str]:
    """Look for an app with a debugging port. Having none is no fault."""
    address = f"127.0.0.1:{CDP_PORT}"
    try:
        async with asyncio.timeout(CDP_LIMIT_S):
            reader, writer = await asyncio.open_connection("127.0.0.1", CDP_PORT)
            try:
                writer.write(b"GET /json/version HTTP/1.0\r\nHost: 127.0.0.1\r\n\r\n")
                answer = b""
                while (
                    b"}" not in answer and len(answer) < MAX_CDP_BYTES and (chunk := await reader.read(MAX_CDP_BYTES))
                ):
                    answer += chunk
            finally:
                writer.close()
        name = str(json.loads(answer.partition(b"\r\n\r\n")[2])["Browser"])[:100]
    except TimeoutError:
        return "warn", f"{address} gives no answer"
    except OSError:
        start = f"start a Chromium-based app with --remote-debugging-port={CDP_PORT} to use it"
        return "ok", f"nothing on {address}; {start}"
    except (ValueError, KeyError, TypeError):
        return "warn", f"the program that listens on {address} has no debugging port of Chromium's"
    return "ok", f"{name}: use it with --device cdp:http://{address}"


async def _check_adb(services: RuntimeServices) -> tuple[Status, str]:
    if (program := find_adb()) is None:
        return "warn", INSTALL
    name, _ = await Adb(program, services).find_version()
    return "ok", f"{name} ({program})"


async def _check_adb_server() -> tuple[Status, str]:
    found = await find_server_version()
    host, port = server_address()
    if found is None:
        return "ok", f"none on {host}:{port}; the first session with a phone starts one, which stays"
    return "ok", f"version {found} on {host}:{port}"
