"""A worker: it takes workflows and steps from a queue of Temporal, and leaves no process behind."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import os
import secrets
import select
import socket
import tempfile
import threading
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

from temporalio.client import Client
from temporalio.worker import UnsandboxedWorkflowRunner, Worker

from .._version import __version__
from ..calls.preloaded_zygote import Program
from ..calls.runtime import Runtime
from ..core.value_types import value
from ..core.visible_text import looks_secret
from ..flows.run.runs import OpenedInbox
from ..people.inbox import KEY_FILE
from ..store.home import create_private_file
from ..store.store import Store
from ..supervise import kernel
from ._messages import DEFAULT_QUEUE
from ._payloads import KEY_VARIABLE, find_unreadable, read_keys
from ._run_workflow import RunWorkflow
from ._step_activity import Activities, Leases, WorkerServices
from .connection import API_KEY, SETTINGS, Address, connect

DEFAULT_PARALLEL = 8
STICKY_S = 0.5  # how long a workflow waits for the worker that has it in memory before another one takes it
POLLS = 2  # Open polls at the engine. A task that answers the poll of a cut-off worker is lost until its timeout.
# How long running steps have to end when the worker shuts down. Then other workers take them.
DEFAULT_DRAIN_MS = 30_000
# The pause between two checks for overdue steps: a fraction of the time until another worker may start them.
LEASE_LOOK_MS = 50
EXIT_CUT_OFF = 70  # The exit code of a worker that could not stop a step in time. Its processes die with it.
# The name of a worker in history. Without it the SDK digests all imported modules, which takes a quarter of a second.
BUILD_ID = f"shotclock-{__version__}"
# The worker's own credentials, which no step sees.
OWN_VARIABLES = frozenset((*(setting.variable for setting in SETTINGS), KEY_VARIABLE))


@value
class WorkerOptions:
    queue: str = DEFAULT_QUEUE
    most_steps: int = DEFAULT_PARALLEL
    drain_ms: int = DEFAULT_DRAIN_MS
    folder: str | None = None


async def serve_worker(
    address: Address, options: WorkerOptions, stop: asyncio.Future[str], on_ready: Callable[[], None]
) -> str:
    kernel.hide_variables(looks_secret)
    logs = logging.StreamHandler()
    logs.addFilter(_shorten)
    logging.getLogger("temporalio").addHandler(logs)
    async with contextlib.AsyncExitStack() as stack:
        home = stack.enter_context(tempfile.TemporaryDirectory(prefix="shotclock-worker-"))
        runtime = await stack.enter_async_context(Runtime(program=Program(), workers=1))
        store = stack.enter_context(Store.open(Path(home)))
        runtime.open_channel(store.home)
        _share_approval_key(store)
        inbox = OpenedInbox(store)
        stack.push_async_callback(inbox.close)
        client = await connect(address)
        folder = None if options.folder is None else Path(options.folder)
        own_queue = f"{options.queue}@{secrets.token_hex(6)}"
        leases = Leases()
        environment = {name: value for name, value in os.environ.items() if name not in OWN_VARIABLES}
        own = {name: value for name, value in os.environ.items() if name in OWN_VARIABLES}
        if address.api_key is not None:
            own[API_KEY.variable] = address.api_key
        services = WorkerServices(client, runtime, store, inbox, environment, folder, own_queue, leases, own)
        guard = stack.enter_context(runtime.start_guard(leases.timer)) if kernel.LINUX else None
        is_over = threading.Event()
        stack.callback(is_over.set)
        threading.Thread(target=_end_when_overdue, args=(leases, guard, is_over), daemon=True).start()
        steps, orders = make_workers(client, services, options)
        async with orders, steps:
            on_ready()
            return await stop  # unbounded: a worker serves until it is stopped


def _shorten(record: logging.LogRecord) -> bool:
    """Log only the reason where a payload cannot be read, without a traceback."""
    if record.exc_info and (why := find_unreadable(record.exc_info[1])) is not None:
        record.msg, record.args, record.exc_info = f"{record.getMessage()}: {why}", (), None
    return True


def _share_approval_key(store: Store) -> None:
    """Give secrets in proposals the same digest on every worker that has the same key."""
    for key in read_keys(os.environ)[:1]:
        with open(create_private_file(store.home / KEY_FILE), "wb") as file:
            file.write(hashlib.sha256(b"shotclock approvals " + key).digest())


def _end_when_overdue(leases: Leases, guard: socket.socket | None, is_over: threading.Event) -> None:
    """End the worker when a step is overdue or its guard gone. In a thread: a blocked event loop cannot prevent it."""
    poller = select.poll()
    if guard is not None:
        poller.register(guard, select.POLLIN)
    while not leases.is_overdue:
        is_unguarded = poller.poll(LEASE_LOOK_MS)
        if is_over.is_set():
            return
        if is_unguarded:
            break
    os._exit(EXIT_CUT_OFF)


def make_workers(client: Client, services: WorkerServices, options: WorkerOptions) -> tuple[Worker, Worker]:
    activities = Activities(services)
    steps = Worker(
        client,
        task_queue=options.queue,
        build_id=BUILD_ID,
        workflows=[RunWorkflow],
        activities=[activities.carry_out_step, activities.render_outputs],
        # The workflow is our own code. Tests replay it in Temporal's sandbox, which would take a quarter of a worker's
        # time.
        workflow_runner=UnsandboxedWorkflowRunner(),
        max_concurrent_activities=options.most_steps,
        max_concurrent_activity_task_polls=POLLS,
        max_concurrent_workflow_task_polls=POLLS,
        graceful_shutdown_timeout=timedelta(milliseconds=options.drain_ms),
        sticky_queue_schedule_to_start_timeout=timedelta(seconds=STICKY_S),
    )
    orders = Worker(
        client,
        task_queue=services.own_queue,
        build_id=BUILD_ID,
        activities=[activities.carry_out_order],
        max_concurrent_activity_task_polls=1,
    )
    return steps, orders
