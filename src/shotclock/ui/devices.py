"""The devices of this machine, for those who ask which there are."""

from __future__ import annotations

import asyncio
import base64
import os
from collections.abc import Sequence

from ..core.clocks import Clocks
from ..core.errors import Failure
from ..process.unsupervised import start_program
from ..runtime.runtime import Runtime
from .device import CommandOutput, DeviceEntry, module_of
from .device_names import KINDS

# What a kind of device may take to say which there are; one whose program hangs runs it out.
FIND_LIMIT_S = 6.0
# The most that a program may say: an image of a screen is the largest.
OUTPUT_LIMIT = 16 * 1024 * 1024


class RuntimeServices:
    """What devices may ask for, in a process that has a runtime."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime

    async def run_command(self, argv: Sequence[str], *, within_ms: int) -> CommandOutput:
        clocks = Clocks(timeout_ms=max(1, within_ms), grace_ms=0)
        envelope = await self._runtime.run(argv, clocks, output_limit=OUTPUT_LIMIT)
        data = envelope.data if isinstance(envelope.data, dict) else {}
        if envelope.error is not None and envelope.code != "COMMAND_FAILED":
            raise Failure(str(envelope.code), str(envelope.error["message"]))
        encoded = data.get("stdout_base64")
        stdout = base64.b64decode(str(encoded)) if encoded else str(data.get("stdout", "")).encode()
        return CommandOutput(int(str(data.get("exit_code", 0))), stdout, str(data.get("stderr", "")))

    async def start_program(self, argv: Sequence[str]) -> None:
        try:
            await asyncio.to_thread(start_program, argv, os.environ)
        except OSError as error:
            raise Failure("SPAWN_FAILED", f"{argv[0]} could not be started: {error}") from None


async def find_all_devices() -> list[DeviceEntry]:
    """Return the devices of every kind; of a kind that cannot be asked, why."""
    async with Runtime() as runtime:
        services = RuntimeServices(runtime)
        found: list[DeviceEntry] = []
        for kind in dict.fromkeys(KINDS.values()):
            name = next(each for each, module in KINDS.items() if module == kind)
            try:
                async with asyncio.timeout(FIND_LIMIT_S):
                    found += await module_of(name).find_devices(services)
            except TimeoutError:
                found.append(DeviceEntry(name, False, f"no answer within {FIND_LIMIT_S:g} s"))
            except Failure as failure:
                found.append(DeviceEntry(name, False, str(failure)))
        return found
