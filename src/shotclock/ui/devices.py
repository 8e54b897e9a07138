"""The devices of this machine, for those who ask which there are."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Sequence

from ..core.clocks import Clocks
from ..core.errors import Failure
from ..runtime.runtime import Runtime
from .device import KINDS, CommandOutput, DeviceEntry, module_of

# What a kind of device may take to say which there are; one whose program hangs runs it out.
FIND_LIMIT_S = 6.0


class RuntimeServices:
    """What devices may ask for, in a process that has a runtime."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime

    async def run_command(self, argv: Sequence[str], *, within_ms: int) -> CommandOutput:
        envelope = await self._runtime.run(argv, Clocks(timeout_ms=max(1, within_ms), grace_ms=0))
        data = envelope.data if isinstance(envelope.data, dict) else {}
        if envelope.error is not None and envelope.code != "COMMAND_FAILED":
            raise Failure(str(envelope.code), str(envelope.error["message"]))
        encoded = data.get("stdout_base64")
        stdout = base64.b64decode(str(encoded)) if encoded else str(data.get("stdout", "")).encode()
        return CommandOutput(int(str(data.get("exit_code", 0))), stdout, str(data.get("stderr", "")))


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
