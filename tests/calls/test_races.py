"""Races that random stress has found (see test_stress.py), each by itself and without chance."""

import asyncio
import contextlib
import errno
import os
import resource
import select
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from shotclock import Clocks, Context, Envelope, Operation, Runtime
from shotclock.calls import commands
from shotclock.calls import executor as pool_module
from shotclock.calls import supervised_commands as command_runner
from shotclock.calls._handler_call import ProcessCall
from shotclock.calls._worker_process import Worker
from shotclock.calls.call import admit
from shotclock.calls.control import control_of, live_calls
from shotclock.calls.preloaded_zygote import Preloaded
from shotclock.core.envelope import Problem
from shotclock.supervise.command_task import CommandReport, CommandTask
from shotclock.worker.messages import Done
from tests.calls import guests, operations, work
from tests.calls.bounds import mark_of, marked, run, soon, timed

pytestmark = [pytest.mark.usefixtures("no_survivors"), pytest.mark.slow]

PRELOAD = ["tests.calls.operations", "tests.calls.guests", __name__]
SOON = Clocks.of("10s", grace="1s")
# More than a socket takes at once.
LARGE = 3_000_000


def forks_and_falls_through(number: int) -> int:
    """Both sides of the fork come back. Only one of them was called."""
    if os.fork() == 0:
        return -number
    time.sleep(0.02)  # the other side first
    return number


async def forks_and_falls_through_on_a_loop(number: int) -> int:
    return forks_and_falls_through(number)


def asks(ctx: Context, operation: str, arguments: dict[str, Any]) -> Any:
    envelope = ctx.call(operation, arguments)
    return envelope.value if envelope.ok else envelope.code


def misses_the_first_word(folder: str) -> None:
    """As if TERM had come right before the sleep entered the kernel: it was delivered, and nobody has seen it."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    work.mark(folder, "ready")
    signal.sigtimedwait({signal.SIGTERM}, work.FOREVER_S)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    try:
        time.sleep(work.FOREVER_S)
    finally:
        work.mark(folder, "cleaned")


OPERATIONS = [
    Operation("noop", operations.noop),
    Operation("echo", operations.echo),
    Operation("sleeps", work.sleeps),
    Operation("asks", asks),
    Operation("at once", operations.noop_async),
    Operation("own_pid", operations.own_pid),
    Operation("waits", operations.waits_for_file),
]


def a_runtime(**options: Any) -> Runtime:
    return Runtime(operations=OPERATIONS, preload=PRELOAD, **{"workers": 1, "most_workers": 1, **options})


def ours(name: str) -> list[psutil.Process]:
    found = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if process.name() == name:
                found.append(process)
    return found


def given(runtime: Runtime) -> list[Any]:
    """What its workers have been given."""
    return [task for worker in runtime._children.pool()._all for task in worker.calls.values()]


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize("late_ns, code", [(0, None), (1, "TIMEOUT")])
def test_a_result_that_is_finished_exactly_at_the_bell_counts(
    late_ns: int, code: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    take_result = Worker._handle_result

    def finished_then(worker: Worker, call: ProcessCall, done: Done) -> None:
        bell = call.call.bound.bell
        assert bell is not None
        take_result(worker, call, done._replace(finished_ns=bell.at_ns + late_ns))

    async def scenario() -> Envelope:
        async with a_runtime() as runtime:
            monkeypatch.setattr(Worker, "_handle_result", finished_then)
            return await runtime.call("echo", {"value": 7}, SOON)

    assert run(scenario()).code == code


# --- answers ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("handler", "isolation"), [(forks_and_falls_through, "process"), (forks_and_falls_through_on_a_loop, "shared")]
)
def test_a_function_that_forks_and_comes_back_twice_answers_once(handler: Callable[..., Any], isolation: Any) -> None:
    async def scenario() -> list[Any]:
        async with a_runtime() as runtime:
            found = []
            for number in range(1, 4):
                envelope = await runtime.call(
                    Operation("forks", handler, isolation=isolation), {"number": number}, SOON
                )
                found.append(envelope.value)
                found.append((await runtime.call("echo", {"value": number}, SOON)).value)
            return found

    assert run(scenario()) == [1, 1, 2, 2, 3, 3]


def test_an_answer_does_not_get_into_the_middle_of_a_large_call_that_is_on_its_way() -> None:
    async def scenario() -> list[Envelope]:
        async with a_runtime() as runtime:
            for _ in range(20):  # so quick that it is given several calls at once
                await runtime.call("noop", clocks=SOON)
            return await asyncio.gather(
                runtime.call("noop", clocks=SOON),
                runtime.call("asks", {"operation": "at once", "arguments": {}}, SOON),
                runtime.call("echo", {"value": b"b" * LARGE * 3}, Clocks.of("60s")),
            )

    noop, asked, large = run(scenario(), within=90)
    assert (noop.value, asked.value) == (1, 1)
    assert large.value == b"b" * LARGE * 3


def test_large_calls_and_calls_of_calls_work_on_a_loop_that_is_being_debugged() -> None:
    async def scenario() -> None:
        asyncio.get_running_loop().set_debug(True)
        asyncio.get_running_loop().slow_callback_duration = 10
        async with a_runtime() as runtime:
            envelope = await runtime.call("asks", {"operation": "echo", "arguments": {"value": 5}}, SOON)
            assert envelope.value == 5
            assert (await runtime.call("echo", {"value": b"b" * LARGE}, SOON)).value == b"b" * LARGE

    run(scenario())


def test_a_call_is_asked_to_wind_down_although_its_arguments_were_still_on_their_way() -> None:
    async def scenario() -> Envelope:
        async with a_runtime() as runtime:
            pid = (await runtime.call("own_pid", clocks=SOON)).value
            os.kill(pid, signal.SIGSTOP)
            handler = Operation("winds down", operations_with_ballast)
            call = asyncio.create_task(
                runtime.call(handler, {"ballast": b"b" * LARGE}, Clocks.of("10s", soft="50ms", grace="1s"))
            )
            await soon(lambda: any(task.call.winding_down is not None for task in given(runtime)))
            os.kill(pid, signal.SIGCONT)
            return await call

    envelope = run(scenario())
    assert envelope.value == "wound down"


def operations_with_ballast(ctx: Context, ballast: bytes) -> str:
    return operations.works_until_asked_to_stop(ctx)


def test_a_worker_that_dies_with_a_large_call_on_its_way_does_not_spoil_the_next() -> None:
    async def scenario() -> list[str | None]:
        found = []
        async with a_runtime() as runtime:
            for _ in range(5):
                pid = (await runtime.call("own_pid", clocks=SOON)).value
                os.kill(pid, signal.SIGSTOP)
                call = asyncio.create_task(runtime.call("echo", {"value": b"b" * LARGE}, SOON))
                await soon(lambda: given(runtime))
                os.kill(pid, signal.SIGKILL)
                found.append((await call).code)
        return found

    assert run(scenario()) == [None] * 5, "it never began: another worker runs it"


def test_a_listener_that_raises_does_not_cost_the_call_its_answer() -> None:
    def refuses(*_: object) -> None:
        raise RuntimeError("of the listener")

    async def scenario() -> Envelope:
        asyncio.get_running_loop().set_exception_handler(lambda *_: None)
        async with a_runtime() as runtime:
            handler = Operation("looks around", operations.looks_around)
            call = asyncio.create_task(runtime.call(handler, clocks=SOON, on_progress=refuses))
            while not given(runtime) and not call.done():  # at each turn of the loop: it may be answered soon
                await asyncio.sleep(0)
            time.sleep(0.2)  # so that its words and its answer are read at once
            return await call

    assert run(scenario()).ok


# --- stopping ---------------------------------------------------------------------------------------


def test_a_worker_that_missed_the_polite_stop_is_asked_again(tmp_path: Path) -> None:
    async def scenario() -> float:
        async with a_runtime() as runtime:
            handler = Operation("misses", misses_the_first_word)
            call = asyncio.create_task(runtime.call(handler, {"folder": str(tmp_path)}, Clocks.of("20s", grace="8s")))
            await soon(lambda: mark_of(tmp_path, "ready"))
            call.cancel()
            _, took_ms = await timed(asyncio.wait([call], timeout=10))
            return took_ms

    assert run(scenario()) < 4000
    assert (tmp_path / "cleaned").exists()


def test_what_a_cancelled_call_has_called_is_stopped_with_it(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with a_runtime() as runtime:
            arguments = {"operation": "sleeps", "arguments": {"folder": str(tmp_path)}}
            call = asyncio.create_task(runtime.call("asks", arguments, Clocks.of("30s", grace="1s")))
            await soon(lambda: mark_of(tmp_path, "ready"))
            call.cancel()
            await asyncio.wait([call], timeout=5)
            await soon(lambda: not marked(tmp_path))

    run(scenario())


def test_a_supervisor_that_was_stopped_itself_keeps_nobody_waiting_for_ever(tmp_path: Path) -> None:
    """Neither the caller of a function that left processes, nor the next one, who needs its place."""

    async def scenario() -> None:
        async with a_runtime() as runtime:
            path = str(tmp_path / "go")
            handler = Operation("waits", leaves_when_seen)
            call = asyncio.create_task(runtime.call(handler, {"path": path}, Clocks.of(0, grace="100ms")))
            await soon(lambda: mark_of(tmp_path, "left-0"))  # stopped before, its supervisor could not even tell of it
            (worker,) = ours("shotclock-work")
            supervisor = worker.parent()
            supervisor.send_signal(signal.SIGSTOP)
            try:
                Path(path).touch()
                done, _ = await asyncio.wait([call], timeout=8)
                assert done and call.result().value == "seen"
                assert (await runtime.call("noop", clocks=SOON)).ok
            finally:
                supervisor.send_signal(signal.SIGCONT)

    run(scenario())


def leaves_when_seen(path: str) -> str:
    operations.leaves_processes(os.path.dirname(path), 1)
    return operations.waits_for_file(path)


def test_a_cancellation_that_comes_with_the_answer_does_not_stop_the_next_call() -> None:
    async def scenario() -> list[Any]:
        async with a_runtime() as runtime:
            pid = (await runtime.call("own_pid", clocks=SOON)).value
            cancelled = asyncio.create_task(runtime.call("noop", clocks=SOON))
            await asyncio.sleep(0)
            (worker,) = runtime._children.pool()._all
            assert select.select([worker._calls], [], [], 5)[0]  # its answer is there, and nobody has read it
            behind = asyncio.create_task(runtime.call("own_pid", clocks=SOON))
            await asyncio.sleep(0)  # its answer will be read in this turn of the loop, and after this
            cancelled.cancel()
            return [pid, (await behind).value, (await runtime.call("own_pid", clocks=SOON)).value]

    before, behind, after = run(scenario())
    assert before == behind == after


def test_a_cancellation_that_comes_after_the_answer_does_not_stop_the_call_behind_it(tmp_path: Path) -> None:
    async def scenario() -> Envelope:
        async with a_runtime() as runtime:
            for _ in range(20):  # so quick that it is given several calls at once
                await runtime.call("noop", clocks=SOON)
            first = asyncio.create_task(runtime.call("noop", clocks=SOON))
            cancelled = asyncio.create_task(runtime.call("noop", clocks=SOON))
            arguments = {"ms": 200, "folder": str(tmp_path)}
            behind = asyncio.create_task(runtime.call(Operation("naps", naps), arguments, SOON))
            await first  # both are with the worker now
            give_up_at = time.monotonic() + 0.5
            while not (tmp_path / "ready").exists() and time.monotonic() < give_up_at:
                time.sleep(0.001)  # the one has answered, which nobody has read; the other is about to begin
            cancelled.cancel()
            return await behind

    assert run(scenario()).value == "rested"


@pytest.mark.parametrize("handler", ["returns_right_before_its_bell", "leaves_a_child"])
def test_a_call_behind_one_whose_worker_has_to_go_is_not_killed_with_it(handler: str, tmp_path: Path) -> None:
    async def scenario() -> Envelope:
        async with a_runtime() as runtime:
            for _ in range(20):  # so quick that it is given several calls at once
                await runtime.call("noop", clocks=SOON)
            clocks = Clocks.of("40ms", grace="1s")
            first = asyncio.create_task(runtime.call("noop", clocks=SOON))
            goes = asyncio.create_task(runtime.call(Operation("goes", globals()[handler]), clocks=clocks))
            arguments = {"ms": 200, "folder": str(tmp_path)}
            behind = asyncio.create_task(runtime.call(Operation("naps", naps), arguments, SOON))
            await first  # both are with the worker now
            time.sleep(0.1)  # what comes of the one is read when the other would have begun
            await goes
            return await behind

    assert run(scenario()).value == "rested"


def returns_right_before_its_bell(ctx: Context) -> str:
    assert ctx.deadline is not None
    while time.monotonic_ns() < ctx.deadline.at_ns - 1_500_000:
        pass
    return "just so"


def leaves_a_child() -> str:
    subprocess.Popen(["sleep", "30"])
    return "left"


def naps(ms: int, folder: str) -> str:
    work.mark(folder, "ready")
    time.sleep(ms / 1000)
    return "rested"


def test_a_call_that_no_worker_has_read_in_time_is_not_passed_on_to_the_next() -> None:
    async def scenario() -> tuple[Envelope, int]:
        async with a_runtime(workers=3, most_workers=3) as runtime:
            assert await runtime.warm_up()
            workers = await soon(lambda: found if len(found := ours("shotclock-work")) == 3 else None)
            for worker in workers:
                worker.suspend()
            envelope = await runtime.call("echo", {"value": b"b" * LARGE}, Clocks.of("100ms", grace="50ms"))
            for worker in workers:
                with contextlib.suppress(psutil.Error):
                    worker.resume()
            await soon(lambda: not all(worker.is_running() for worker in workers))
            return envelope, sum(worker.is_running() for worker in workers)

    envelope, left = run(scenario())
    assert (envelope.code, envelope.ending) == ("TIMEOUT", "not_started")
    assert left == 2, "workers were stopped that had nothing to do with it"


# --- places -----------------------------------------------------------------------------------------


def test_a_call_of_a_call_does_not_wait_behind_those_who_came_before_it(tmp_path: Path) -> None:
    """The worker that is forked for it was given to whoever stood first in the queue."""

    async def scenario() -> Envelope:
        async with a_runtime() as runtime:
            assert await runtime.warm_up()
            go = str(tmp_path / "go")
            arguments = {"path": go, "number": 4}
            asking = asyncio.create_task(runtime.call(Operation("parent", asks_when_seen), arguments, SOON))
            await soon(lambda: (tmp_path / "waits").exists())
            others = []
            for number in range(3):
                folder = tmp_path / str(number)
                folder.mkdir()
                call = runtime.call("sleeps", {"folder": str(folder)}, Clocks.of("15s", grace="1s"))
                others.append(asyncio.create_task(call))
            await asyncio.sleep(0)
            Path(go).touch()
            try:
                return await asyncio.wait_for(asking, 8)
            finally:
                for other in others:
                    other.cancel()
                await asyncio.wait(others, timeout=5)

    assert run(scenario()).value == 4


def asks_when_seen(ctx: Context, path: str, number: int) -> Any:
    Path(path).with_name("waits").touch()
    operations.waits_for_file(path)
    return ctx.call("echo", {"value": number}).value


@contextlib.contextmanager
def room_for(descriptors: int) -> Iterator[None]:
    """Only so many more of them can be opened."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = free = 0
    while free < descriptors or is_open(limit):
        free += not is_open(limit)
        limit += 1
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def is_open(fd: int) -> bool:
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True


def test_who_can_be_served_by_the_workers_that_are_there_does_not_hear_that_another_cannot_be_had(
    tmp_path: Path,
) -> None:
    async def scenario() -> Envelope:
        async with a_runtime(workers=2, most_workers=2) as runtime:
            assert await runtime.warm_up()
            go = str(tmp_path / "go")
            waits = asyncio.create_task(runtime.call(Operation("waits", says_who_waits), {"path": go}, SOON))
            busy = await soon(lambda: mark_of(tmp_path, "ready"))
            (other,) = await soon(lambda: [process for process in ours("shotclock-work") if process != busy])
            supervisor = other.parent().pid
            with room_for(0):
                os.kill(supervisor, signal.SIGKILL)
                await soon(lambda: runtime.worker_count == 1)
                call = asyncio.create_task(runtime.call("echo", {"value": 3}, SOON))
                await asyncio.sleep(0)
                os.mkdir(go)  # takes no descriptor
                assert (await waits).ok
                return await call

    assert run(scenario()).value == 3


def test_a_call_that_a_busy_worker_can_serve_later_does_not_hear_that_no_other_worker_can_be_had(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tries: list[int] = []

    def refuses(self: Preloaded, kind: bytes, fds: list[int]) -> Any:
        tries.append(1)
        raise OSError(errno.EAGAIN, "no more processes")

    async def scenario() -> Envelope:
        async with a_runtime(most_workers=4) as runtime:
            assert await runtime.warm_up()
            monkeypatch.setattr(Preloaded, "request", refuses)
            go = str(tmp_path / "go")
            waits = asyncio.create_task(runtime.call(Operation("waits", says_who_waits), {"path": go}, SOON))
            await soon(lambda: mark_of(tmp_path, "ready"))
            call = asyncio.create_task(runtime.call("echo", {"value": 3}, SOON))
            await asyncio.sleep(2.4)  # for more than eight tries, with a pause between two
            os.mkdir(go)
            assert (await waits).ok
            return await call

    assert run(scenario()).value == 3
    assert 8 <= len(tries) <= 12


@pytest.mark.parametrize("workers", [0, -1])
def test_a_runtime_without_any_worker_is_refused(workers: int) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        Runtime(workers=workers)


def says_who_waits(path: str) -> str:
    work.mark(os.path.dirname(path), "ready")
    return operations.waits_for_file(path)


def test_a_worker_that_could_not_be_had_is_tried_again_while_somebody_waits_for_it() -> None:
    async def scenario() -> Envelope:
        async with a_runtime() as runtime:
            assert await runtime.warm_up()
            worker = (await soon(lambda: ours("shotclock-work")))[0]
            supervisor = worker.parent().pid
            worker.suspend()
            call = asyncio.create_task(runtime.call("echo", {"value": 3}, Clocks.of(0)))
            await asyncio.sleep(0)
            with room_for(0):
                os.kill(supervisor, signal.SIGKILL)
                await soon(lambda: runtime.worker_count == 0)
            return await asyncio.wait_for(call, 10)

    assert run(scenario()).value == 3


def test_a_worker_that_could_not_be_made_leaves_no_descriptor() -> None:
    async def scenario() -> None:
        async with a_runtime() as runtime:
            assert await runtime.warm_up()
            before = open_descriptors()
            for room in range(8):  # two sockets, two ends of a pipe, the memory, the timer, two more sockets
                with room_for(room):
                    assert not runtime._children.pool()._spawn()
                assert open_descriptors() == before

    run(scenario())


# --- zygotes and hosts ------------------------------------------------------------------------------


def test_all_spare_supervisors_may_be_killed_at_once() -> None:
    async def scenario() -> list[bool]:
        async with a_runtime() as runtime:
            commands = [runtime.run(["sleep", "0.05"], SOON) for _ in range(3)]
            assert all(envelope.ok for envelope in await asyncio.gather(*commands))
            for supervisor in ours("shotclock-sup"):
                supervisor.kill()
            return [(await runtime.run(["true"], SOON)).ok]

    assert run(scenario()) == [True]


def test_a_queue_that_is_too_long_is_not_taken_for_imports_that_hang() -> None:
    async def scenario() -> list[int]:
        async with a_runtime() as runtime:
            guest = Operation("pid", guests.own_pid, isolation="shared")
            first = (await runtime.call(guest, clocks=SOON)).value
            runtime._children.pool().preloaded.started_ns -= 2 * pool_module.IMPORT_LIMIT_NS  # as if it were that old
            zygote = psutil.Process(first).parent().parent()
            zygote.send_signal(signal.SIGSTOP)
            try:
                late = await runtime.call("noop", clocks=Clocks.of("5s", queue="20ms"))
            finally:
                zygote.send_signal(signal.SIGCONT)
            assert late.code == "QUEUE_TIMEOUT"
            assert (await runtime.call("noop", clocks=SOON)).ok
            return [first, (await runtime.call(guest, clocks=SOON)).value]

    before, after = run(scenario())
    assert before == after, "its zygote was killed, and everything below it"


def test_a_host_that_is_gone_holds_no_descriptor(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with a_runtime() as runtime:
            blocks, noop = (
                Operation("blocks", guests.blocks, isolation="shared"),
                Operation("noop", guests.noop, isolation="shared"),
            )
            assert (await runtime.call(noop, clocks=SOON)).ok
            before = open_descriptors() + 1  # of a supervisor that is kept to fork the next one
            for _ in range(3):
                await runtime.call(blocks, {"folder": str(tmp_path)}, Clocks.of("50ms", grace=0))
                assert (await runtime.call(noop, clocks=SOON)).ok
            await soon(lambda: open_descriptors() <= before)

    run(scenario())


# --- closing ----------------------------------------------------------------------------------------


def test_closing_does_not_say_that_somebody_else_has_killed_what_it_killed(tmp_path: Path) -> None:
    async def scenario() -> list[str | None]:
        async with a_runtime(workers=2, most_workers=2) as runtime:
            assert await runtime.warm_up()
            folders = [tmp_path / name for name in ("worker", "host")]
            for folder in folders:
                folder.mkdir()
            calls = [
                asyncio.create_task(runtime.call("sleeps", {"folder": str(folders[0])}, SOON)),
                asyncio.create_task(
                    runtime.call(Operation("g", guests.sleeps, isolation="shared"), {"folder": str(folders[1])}, SOON)
                ),
            ]
            busy = await soon(lambda: mark_of(folders[0], "ready"))
            await soon(lambda: mark_of(folders[1], "ready"))
            (other,) = await soon(lambda: [process for process in ours("shotclock-work") if process != busy])
            busy.parent().parent().suspend()  # the zygote: what is asked of it from here on does not come
            other.parent().kill()
            await soon(lambda: any(not worker.is_up for worker in runtime._children.pool()._all))
            await runtime.close()
            return [envelope.code for envelope in await asyncio.gather(*calls)]

    assert run(scenario()) == ["CANCELLED", "CANCELLED"]


def test_what_runs_while_the_runtime_closes_is_stopped_by_it_although_a_host_is_only_just_being_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    were_gone = []

    async def scenario() -> tuple[str | None, str | None]:
        async with a_runtime(workers=1, most_workers=1) as runtime:
            crowd = Operation("crowd", work.has_fifty_children)
            running = asyncio.create_task(runtime.call(crowd, {"folder": str(tmp_path)}, SOON))
            busy = await soon(lambda: mark_of(tmp_path, "ready"))
            busy.parent().parent().suspend()  # the zygote: what is asked of it from here on does not come
            coming = asyncio.create_task(runtime.call(Operation("noop", guests.noop, isolation="shared"), clocks=SOON))
            await soon(lambda: runtime._children.shared()._all)
            (worker,) = runtime._children.pool()._all
            close = Preloaded.close
            monkeypatch.setattr(Preloaded, "close", lambda self: were_gone.append(worker.gone.done()) or close(self))
            await runtime.close()
            return (await running).code, (await coming).code

    assert run(scenario()) == ("CANCELLED", "SHUTTING_DOWN")
    assert were_gone and all(were_gone), "the zygote's end may be quicker than the report of who has to end before it"


def test_a_command_that_closing_has_stopped_is_not_said_to_be_lost_when_its_supervisor_goes_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> Envelope:
        async with a_runtime() as runtime:
            script = f"echo $$ > {tmp_path}/pid.new; mv {tmp_path}/pid.new {tmp_path}/pid; sleep 60"
            running = asyncio.create_task(runtime.run(["sh", "-c", script], SOON))
            await soon((tmp_path / "pid").exists)
            supervisor = psutil.Process(int((tmp_path / "pid").read_text())).parent()
            supervisor.suspend()  # it hears no order, and nobody wakes it
            monkeypatch.setattr(command_runner, "signal_supervisor", lambda pid, number: None)
            closing = asyncio.create_task(runtime.close())
            await soon(lambda: runtime._children.commands._closing)
            supervisor.kill()
            await closing
            return await running

    envelope = run(scenario())
    assert (envelope.code, envelope.ending) == ("CANCELLED", "killed"), envelope.error


def test_a_command_is_not_run_again_because_its_supervisor_was_killed_before_it_read_an_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> Envelope:
        async with a_runtime() as runtime:
            script = f"echo $$ >> {tmp_path}/pids; sleep 60"
            running = asyncio.create_task(runtime.run(["sh", "-c", script], SOON, name="once"))
            await soon(lambda: (tmp_path / "pids").exists() and (tmp_path / "pids").read_text())
            supervisor = psutil.Process(int((tmp_path / "pids").read_text())).parent()
            supervisor.suspend()
            monkeypatch.setattr(command_runner, "signal_supervisor", lambda pid, number: None)
            (call,) = [each for each in live_calls.values() if each.name == "once"]
            control_of(call).extend(5000, "alice")
            supervisor.kill()
            return await running

    envelope = run(scenario())
    assert (envelope.code, envelope.ending) == ("SUPERVISOR_LOST", "killed"), envelope.error
    assert len((tmp_path / "pids").read_text().split()) == 1


def test_a_call_that_is_extended_before_its_worker_has_read_it_keeps_the_later_bell(tmp_path: Path) -> None:
    async def scenario() -> Envelope:
        async with a_runtime() as runtime:
            assert await runtime.warm_up() and (await runtime.call("noop", clocks=SOON)).ok
            (idle,) = ours("shotclock-work")
            idle.suspend()
            clocks = Clocks.of("500ms", grace="100ms")
            waits = asyncio.create_task(runtime.call("waits", {"path": str(tmp_path / "go")}, clocks))
            (call,) = await soon(lambda: [each for each in live_calls.values() if each.work is not None])
            control_of(call).extend(30_000, "alice")
            await soon(lambda: is_timer_set(idle.parent().pid))
            idle.resume()
            old_bell_ns = call.started_ns + 500_000_000
            await soon(lambda: time.monotonic_ns() > old_bell_ns + 200_000_000)
            (tmp_path / "go").touch()
            return await waits

    envelope = run(scenario())
    assert envelope.ok, envelope.error


def is_timer_set(pid: int) -> bool:
    """Return whether a process holds a timer that is armed."""
    for path in Path(f"/proc/{pid}/fdinfo").iterdir():
        with contextlib.suppress(OSError):
            for line in path.read_text().splitlines():
                if line.startswith("it_value:") and line.split(":")[1].strip() != "(0, 0)":
                    return True
    return False


@pytest.mark.parametrize("handler", [work.sleeps, guests.sleeps], ids=["worker", "host"])
def test_work_that_was_being_stopped_already_when_closing_lost_its_supervisor_is_not_said_to_be_lost(
    tmp_path: Path, handler: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> Envelope:
        operation = Operation("g", handler, isolation="process" if handler is work.sleeps else "shared")
        async with a_runtime() as runtime:
            running = asyncio.create_task(runtime.call(operation, {"folder": str(tmp_path)}, SOON))
            supervisor = (await soon(lambda: mark_of(tmp_path, "ready"))).parent()
            supervisor.suspend()  # it hears no order, and nobody wakes it
            monkeypatch.setattr(command_runner, "signal_supervisor", lambda pid, number: None)
            if handler is work.sleeps:
                pool: Any = runtime._children.pool()
                (worker,) = pool._all
                (call,) = worker.calls.values()
                call.stop_in_worker("soft")
            else:
                pool = runtime._children.shared()
                (worker,) = pool._all
                worker.kill("a test")
            closing = asyncio.create_task(runtime.close())
            await soon(lambda: pool.is_closing)
            supervisor.kill()
            await closing
            return await running

    envelope = run(scenario())
    assert (envelope.code, envelope.ending) == ("CANCELLED", "killed"), envelope.error


def test_closing_that_is_cancelled_still_leaves_nothing() -> None:
    async def scenario() -> None:
        before, others = open_descriptors(), psutil.Process().children()
        runtime = await a_runtime().__aenter__()
        assert (await runtime.call("noop", clocks=SOON)).ok
        assert (await runtime.call(Operation("noop", guests.noop, isolation="shared"), clocks=SOON)).ok
        assert (await runtime.run(["true"], SOON)).ok
        closing = asyncio.create_task(runtime.close())
        await asyncio.sleep(0)
        for _ in range(2):
            closing.cancel()
            await asyncio.sleep(0)
        await asyncio.wait([closing], timeout=10)
        assert closing.cancelled()
        assert set(psutil.Process().children()) <= set(others)
        assert open_descriptors() <= before

    run(scenario())


def test_a_machine_that_is_full_is_not_blamed_on_the_command() -> None:
    task = CommandTask(["true"], {})
    outcome = commands.judge(admit("true", Clocks.of("1s")), task, CommandReport(unstartable=("exec", errno.EAGAIN)))
    assert isinstance(outcome.problem, Problem)
    assert outcome.problem.code == "SPAWN_FAILED"


def test_calls_that_were_taken_back_from_a_worker_without_a_core_run_in_it_later() -> None:
    async def scenario() -> list[bool]:
        async with a_runtime() as runtime:
            assert await runtime.warm_up()
            (worker,) = await soon(lambda: ours("shotclock-work"))
            noops = [runtime.call("noop", clocks=SOON) for _ in range(40)]
            assert all(envelope.ok for envelope in await asyncio.gather(*noops))  # quick: it is given some ahead
            worker.suspend()
            calls = [asyncio.create_task(runtime.call("noop", clocks=SOON)) for _ in range(5)]
            await asyncio.sleep(0.1)
            worker.resume()
            return [(await call).ok for call in calls]

    assert run(scenario()) == [True] * 5
