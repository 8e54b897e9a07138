"""`shotclock.arun`: `shotclock.run` for asyncio, in a thread of its own, so that any number may wait at once."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from collections.abc import Sequence
from typing import Any

from .run import Command, CompletedProcess, Word


async def arun(
    args: Word | Sequence[Word],
    *,
    input: Any = None,
    capture_output: bool = False,
    timeout: float | None = None,
    idle: float | None = None,
    check: bool = False,
    **options: Any,
) -> CompletedProcess:
    """Run a command as `run` does, without blocking the loop. A cancellation kills the command first."""
    command = Command(args, input=input, capture_output=capture_output, **options)
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[CompletedProcess] = loop.create_future()
    wake_fd, cancel_fd = os.pipe()

    def resolve(result: CompletedProcess | None, error: BaseException | None) -> None:
        if ended.done():
            return
        if error is not None:
            ended.set_exception(error)
        elif result is not None:
            ended.set_result(result)

    def work() -> None:
        result, failure = None, None
        try:
            result = command.run(timeout, idle, check, wake_fd)
        except BaseException as error:
            failure = error
        os.close(wake_fd)
        with contextlib.suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(resolve, result, failure)

    threading.Thread(target=work, name="shotclock-arun", daemon=True).start()
    try:
        return await asyncio.shield(ended)
    except asyncio.CancelledError:
        os.write(cancel_fd, b"x")
        # Bounded by the kill and its verification. A second cancellation does not wait for them.
        await asyncio.wait([ended])
        raise
    finally:
        os.close(cancel_fd)
        if ended.done() and not ended.cancelled():
            ended.exception()  # it was seen
