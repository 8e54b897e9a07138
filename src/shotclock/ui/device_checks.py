"""`shotclock doctor ui`: which devices can be used here, and what is missing for the others."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable
from importlib.metadata import PackageNotFoundError, version

from ..core.errors import Failure
from ..core.value_types import value
from ..runtime.doctor import Check, Status
from ..runtime.runtime import Runtime
from .adb import INSTALL, Adb, find_adb, find_server_version, server_address
from .browser import CHROMIUM_VARIABLE, find_chromium
from .device import DeviceEntry
from .devices import RuntimeServices, find_all_devices

# What one check may take; a program that hangs runs it out.
CHECK_LIMIT_S = 6.0
VERSION_LIMIT_MS = 5_000
# Where programs that are started with a debugging port are looked for, and how long one may take to answer.
CDP_PORT = 9222
CDP_LIMIT_S = 1.0
MOST_CDP_BYTES = 64 * 1024


@value
class DeviceFindings:
    """What was found out about the devices."""

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
    """Look at what the devices need, and at the devices. Starts none, and leaves nothing running."""
    async with Runtime() as runtime:
        services = RuntimeServices(runtime)
        needed = await asyncio.gather(
            _check("playwright", _check_playwright()),
            _check("chromium", _check_chromium(services)),
            _check("cdp", _check_cdp()),
            _check("adb", _check_adb(services)),
            _check("adb_server", _check_adb_server()),
        )
    devices = await find_all_devices()
    checks = [*needed, *(_judge_device(device) for device in devices)]
    usable = [device.name for device in devices if device.usable]
    checks.append(Check("devices", "ok" if usable else "fail", ", ".join(usable) or "no device can be used here"))
    return DeviceFindings(checks, devices)


async def _check(name: str, checking: Awaitable[tuple[Status, str]]) -> Check:
    """Return what a check found; one that does not answer is a finding itself."""
    try:
        async with asyncio.timeout(CHECK_LIMIT_S):
            status, detail = await checking
    except TimeoutError:
        status, detail = "warn", f"no answer within {CHECK_LIMIT_S:g} s"
    except Failure as failure:
        status, detail = "warn", str(failure)
    return Check(name, status, detail)


def _judge_device(device: DeviceEntry) -> Check:
    return Check(device.name, "ok" if device.usable else "warn", device.detail)


async def _check_playwright() -> tuple[Status, str]:
    try:
        return "ok", version("playwright")
    except PackageNotFoundError:
        return "warn", "Playwright is not installed: pip install 'shotclock[browser]'"


async def _check_chromium(services: RuntimeServices) -> tuple[Status, str]:
    program = find_chromium()
    if program is None:
        missing = "no Chromium is on PATH: install one (Debian: apt install chromium-headless-shell)"
        return "warn", f"{missing}, or name it in {CHROMIUM_VARIABLE}"
    output = await services.run_command([program, "--version"], within_ms=VERSION_LIMIT_MS)
    said = output.stdout.decode("utf-8", "replace").strip().split("\n")[0][:100]
    if output.exit_code or not said:
        return "warn", f"{program} --version ended with exit code {output.exit_code}"
    return "ok", f"{said} ({program})"


async def _check_cdp() -> tuple[Status, str]:
    """Look whether a program with a debugging port runs. That none does is nothing wrong."""
    none = (
        f"nothing on 127.0.0.1:{CDP_PORT}; start a Chromium-based app with --remote-debugging-port={CDP_PORT} to use it"
    )
    try:
        async with asyncio.timeout(CDP_LIMIT_S):
            reader, writer = await asyncio.open_connection("127.0.0.1", CDP_PORT)
            try:
                writer.write(b"GET /json/version HTTP/1.0\r\nHost: 127.0.0.1\r\n\r\n")
                answer = await reader.read(MOST_CDP_BYTES)
                while (
                    b"}" not in answer and len(answer) < MOST_CDP_BYTES and (more := await reader.read(MOST_CDP_BYTES))
                ):
                    answer += more
            finally:
                writer.close()
        name = str(json.loads(answer.partition(b"\r\n\r\n")[2])["Browser"])[:100]
    except OSError as error:
        return ("warn", f"127.0.0.1:{CDP_PORT} gives no answer") if isinstance(error, TimeoutError) else ("ok", none)
    except (ValueError, KeyError, TypeError):
        return "warn", f"what listens on 127.0.0.1:{CDP_PORT} is no debugging port of Chromium's"
    return "ok", f"{name}: use it with --device cdp:http://127.0.0.1:{CDP_PORT}"


async def _check_adb(services: RuntimeServices) -> tuple[Status, str]:
    if (program := find_adb()) is None:
        return "warn", INSTALL
    words, _ = await Adb(program, services).find_version()
    return "ok", f"{words} ({program})"


async def _check_adb_server() -> tuple[Status, str]:
    found = await find_server_version()
    host, port = server_address()
    if found is None:
        return "ok", f"none on {host}:{port}; the first session with a phone starts one, which stays"
    return "ok", f"version {found} on {host}:{port}"
