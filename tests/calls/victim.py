"""A program with a runtime, for a test to SIGKILL: a worker and a command that daemonised, and a few calls more.

`python -m tests.calls.victim WORKERS_FOLDER COMMANDS_FOLDER`
"""

import asyncio
import sys

from shotclock import Clocks, Operation, Runtime
from tests.calls import work


async def main(workers_folder: str, commands_folder: str) -> None:
    clocks = Clocks.of("60s")
    vanishes = [sys.executable, "-m", "tests.calls.work", "daemonises_without_a_trace", commands_folder]
    async with Runtime() as runtime:
        await asyncio.gather(
            runtime.call(Operation("daemonises", work.daemonises_without_a_trace), {"folder": workers_folder}, clocks),
            runtime.run(vanishes, clocks),
            runtime.run(["sleep", str(work.FOREVER_S)], clocks),
            runtime.call(Operation("sleeps", asyncio.sleep), {"delay": work.FOREVER_S}, clocks),
        )


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
