"""The peer of the temporal topic: a worker with an activity for shell commands, as one would write it by hand."""

from __future__ import annotations

import asyncio
import sys
from datetime import timedelta

from temporalio import activity, workflow
from temporalio.client import Client
from temporalio.worker import UnsandboxedWorkflowRunner, Worker

QUEUE = "bare"
AT_ONCE = 8


@activity.defn
async def run_command(command: str) -> str:
    process = await asyncio.create_subprocess_shell(command, stdout=asyncio.subprocess.PIPE)
    try:
        out, _ = await asyncio.wait_for(process.communicate(), 60)
    except TimeoutError:
        process.kill()
        raise
    if process.returncode:
        raise RuntimeError(f"exit {process.returncode}")
    return out.decode()


@workflow.defn
class BareRun:
    @workflow.run
    async def run(self, count: int) -> int:
        places = asyncio.Semaphore(AT_ONCE)

        async def step() -> str:
            async with places:
                return await workflow.execute_activity(
                    run_command,
                    "true",
                    start_to_close_timeout=timedelta(seconds=70),
                    heartbeat_timeout=timedelta(seconds=10),
                )

        await asyncio.gather(*(step() for _ in range(count)))
        return count


async def main(address: str) -> None:
    client = await Client.connect(address)
    async with Worker(
        client,
        task_queue=QUEUE,
        workflows=[BareRun],
        activities=[run_command],
        max_concurrent_activities=AT_ONCE,
        workflow_runner=UnsandboxedWorkflowRunner(),  # as ours
    ):
        print("ready", file=sys.stderr, flush=True)
        await asyncio.Event().wait()  # until it is killed


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
