"""The process of a device: it holds the device between executions, and runs them on it, one at a time.

Its functions are operations of the daemon's runtime, called in a host process of their own: what they block, leak or
swallow ends with that process, and the daemon answers in time all the same.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence
from typing import Any

from ..core.errors import Failure
from ..process.context import Context
from .device import CommandOutput, Device, module_of
from .execution import ExecutionRun
from .payload import read_execution

RUN_COMMAND = "command"
"""The question by which a device has the daemon run a program."""
START_PROGRAM = "program"
"""The one by which it has the daemon start a program that outlives both."""


class _Services:
    """What devices ask of the daemon, through the call that is under way."""

    def __init__(self) -> None:
        self.ctx: Context | None = None

    async def run_command(self, argv: Sequence[str], *, within_ms: int) -> CommandOutput:
        assert self.ctx is not None, "a device asks inside a call"
        told: dict[str, Any] = await self.ctx.ask(RUN_COMMAND, {"argv": list(argv), "within_ms": within_ms})
        return CommandOutput(told["exit_code"], base64.b64decode(told["stdout"]), told["stderr"])

    async def start_program(self, argv: Sequence[str]) -> None:
        assert self.ctx is not None, "a device asks inside a call"
        await self.ctx.ask(START_PROGRAM, list(argv))


_services = _Services()
_devices: dict[str, Device] = {}


async def open_session(device: str, is_fresh: bool, ctx: Context) -> dict[str, object]:
    """Open the device, unless it is open. `is_fresh`: it replaces one whose pages are gone. Raises Failure
    DEVICE_UNAVAILABLE."""
    _services.ctx = ctx
    if device not in _devices:
        _devices[device] = await module_of(device).open_device(device, _services)
        _devices[device].is_fresh = is_fresh
    place = _devices[device].place_seen()
    return {"device": device, "where": None if place is None else place.where}


async def run_execution(device: str, execution: dict[str, Any], within_ms: int | None, ctx: Context) -> dict[str, Any]:
    """Run an execution on the device and return its result. Each event is a line of text to the caller."""
    _services.ctx = ctx
    opened = _devices.get(device)
    if opened is None:
        raise Failure("DEVICE_LOST", f"{device} is not open in this process any more")

    def tell(event: dict[str, object]) -> None:
        ctx.write(json.dumps(event) + "\n")

    return await ExecutionRun(read_execution(execution), opened, tell, within_ms).run()


async def close_session(device: str, ctx: Context) -> None:
    """Close the device, if it is open."""
    _services.ctx = ctx
    opened = _devices.pop(device, None)
    if opened is not None:
        await opened.close()
