"""An App with every adversary of `work` as an async command, beside some that only async code can be."""

import inspect
from collections.abc import Callable
from typing import Any

from shotclock import App
from tests.calls import guests, operations, work

app = App("hostile", default_timeout="5s", grace="200ms")

ADVERSARIES = (
    work.sleeps_async,
    work.sleeps,
    work.spins,
    work.holds_the_gil,
    work.waits_in_recv,
    work.swallows_everything,
    work.blocks_in_finally,
    work.waits_for_a_lock,
    work.stops_its_supervisor,
    work.stops_its_guardians,
    work.keeps_its_supervisor_stopped,
    work.has_a_child_that_ignores_term,
    work.reads_what_a_grandchild_holds_open,
    work.daemonises,
    work.daemonises_without_a_trace,
    work.hops_from_pid_to_pid,
    work.stops_itself,
    work.writes_for_ever,
    work.has_fifty_children,
    guests.blocks_later,
    guests.blocks_in_a_task,
    guests.blocks_in_a_callback,
    guests.swallows,
    guests.waits_for_a_child,
    guests.waits_beside_an_orphan,
    guests.waits_for_one_that_ignores_term,
    guests.starts_one_in_a_thread,
    guests.blocks_beside_a_child,
)
# They return, and something stays: by the mark that it left.
LEAVING = {
    work.leaves_a_grandchild_on_its_stdout: "grandchild",
    work.leaves_a_daemon: "daemon",
    work.leaves_a_daemon_without_a_main_thread: "headless",
}
CRASHES = ("SIGSEGV", "SIGKILL", "SIGABRT", "exit")


def name_of(adversary: Callable[[str], Any]) -> str:
    return adversary.__name__.replace("_", "-")


NAMES = [name_of(adversary) for adversary in ADVERSARIES]


def _as_async(adversary: Callable[[str], Any]) -> Callable[[str], Any]:
    async def run(folder: str) -> None:
        result = adversary(folder)
        if inspect.isawaitable(result):
            await result

    return run


for _adversary in (*ADVERSARIES, *LEAVING):
    app.command(name=name_of(_adversary))(_as_async(_adversary))


@app.command
async def crashes(how: str) -> None:
    operations.crashes(how)


@app.command(isolation="shared")
async def crashes_on_a_shared_loop(how: str) -> None:
    operations.crashes(how)


@app.command(mutates=False)
async def noop() -> int:
    return 1
