"""Everything that is known to hang other tools, on every surface: answered on time, really stopped, next call works.

The answer of a call whose work can be killed is checked for its word: when it is there, the processes are not.
"""

import asyncio
import contextlib
import ctypes
import itertools
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from shotclock import Clocks, Envelope, Operation, Runtime
from tests.calls import hostile, operations, work
from tests.calls.bounds import (
    ATTEMPTS,
    LONG_GRACE_MS,
    OVERSHOOT_MS,
    POLL_S,
    ROOT,
    WrongFoot,
    at_last,
    eventually,
    mark_of,
    marked,
    on_time,
    run,
    soon,
    timed,
)
from tests.rows import corners

pytestmark = [pytest.mark.usefixtures("no_survivors", "warm_starts"), pytest.mark.slow]

TIMEOUT_MS = 200
COMMAND_TIMEOUT_MS = 400  # Python has to start first
GRACE_MS = 200
# How long after the SIGKILL of its guardian a tree may live.
DEAD_WITHIN_S = 5.0

NOOP = Operation("noop", operations.noop)
NOOPS = (
    NOOP,
    Operation("noop_shared", operations.noop_async, isolation="shared"),
    Operation("noop_inline", operations.noop_async, isolation="inline"),
)
NEXT_CALL = Clocks.of("5s")

Validate = Callable[[dict[str, Any]], dict[str, Any]]


async def works_again(runtime: Runtime, *which: Operation) -> None:
    for operation in which or NOOPS:
        envelope = await runtime.call(operation, clocks=NEXT_CALL)
        assert envelope.value == 1, envelope.to_dict()


# --- work that can be killed ----------------------------------------------------------------------

# The function in work.py, and whether it takes no notice of the polite stop.
KILLABLE = [
    ("sleeps_async", False),
    ("sleeps", False),
    ("spins", False),
    ("holds_the_gil", True),
    ("waits_in_recv", False),
    ("swallows_everything", True),
    ("blocks_in_finally", True),
    ("waits_for_a_lock", False),
    ("has_a_child_that_ignores_term", True),
    ("reads_what_a_grandchild_holds_open", False),
    ("daemonises", False),
    ("daemonises_without_a_trace", True),
    ("hops_from_pid_to_pid", True),
    ("stops_itself", False),
    ("stops_its_supervisor", False),
    ("stops_its_guardians", False),
    ("keeps_its_supervisor_stopped", True),
    ("writes_for_ever", False),
    ("has_fifty_children", False),
]


def command(adversary: str, folder: Path) -> list[str]:
    return [sys.executable, "-m", "tests.calls.work", adversary, str(folder)]


def in_a_worker(
    adversary: str, folder: Path, shotclock: Any, timeout_ms: int, grace_ms: int = GRACE_MS
) -> dict[str, Any]:
    async def scenario() -> dict[str, Any]:
        async with Runtime(preload=["tests.calls.work", "tests.calls.operations"]) as runtime:
            await works_again(runtime, NOOP)  # the worker is warm: the time is the adversary's alone
            operation = Operation(adversary, getattr(work, adversary), isolation="process")
            clocks = Clocks(timeout_ms=timeout_ms, grace_ms=grace_ms)
            envelope = await runtime.call(operation, {"folder": str(folder)}, clocks)
            assert not marked(folder)
            await works_again(runtime, NOOP)
            return envelope.to_dict()

    return run(scenario())


def as_a_command(
    adversary: str, folder: Path, shotclock: Any, timeout_ms: int, grace_ms: int = GRACE_MS
) -> dict[str, Any]:
    async def scenario() -> dict[str, Any]:
        async with Runtime() as runtime:
            clocks = Clocks(timeout_ms=timeout_ms, grace_ms=grace_ms)
            envelope = await runtime.run(command(adversary, folder), clocks, cwd=ROOT)
            assert not marked(folder)
            after = await runtime.run(["echo", "next"], NEXT_CALL)
            assert after.ok and after.data["stdout"] == "next\n"
            return envelope.to_dict()

    return run(scenario())


def on_the_command_line(
    adversary: str, folder: Path, shotclock: Any, timeout_ms: int, grace_ms: int = GRACE_MS
) -> dict[str, Any]:
    clocks = ("--timeout", f"{timeout_ms}ms", "--grace", f"{grace_ms}ms")
    ran = shotclock("exec", "--json", *clocks, "--", *command(adversary, folder), cwd=ROOT)
    assert not marked(folder)
    envelope = ran.json()
    assert ran.code == envelope["meta"]["exit_code"] == 10
    assert shotclock("exec", "--json", "--", "echo", "next").json()["data"]["stdout"] == "next\n"
    return envelope


SURFACES = {"worker": (in_a_worker, TIMEOUT_MS), "run": (as_a_command, COMMAND_TIMEOUT_MS)}
SURFACES["exec"] = on_the_command_line, COMMAND_TIMEOUT_MS
# A worker meets all of them. The others have the same supervisor: they meet those that outwit a simpler one.
MET_BY_ALL = {"holds_the_gil", "daemonises_without_a_trace", "keeps_its_supervisor_stopped", "has_fifty_children"}
MEETINGS = [(*each, surface) for surface in SURFACES for each in KILLABLE]


@pytest.mark.parametrize(
    ("adversary", "ignores", "surface"),
    corners(MEETINGS, *(each for each in MEETINGS if each[2] == "worker" or each[0] in MET_BY_ALL)),
)
def test_whatever_a_process_does_it_is_gone_when_its_time_is_up(
    adversary: str, ignores: bool, surface: str, tmp_path: Path, shotclock: Any, validate_envelope: Validate
) -> None:
    perform, timeout_ms = SURFACES[surface]

    def attempt(number: int) -> dict[str, Any]:
        folder = tmp_path / str(number)
        folder.mkdir()
        patience_ms = timeout_ms * 2**number  # a slow machine may need longer to bring the adversary up
        grace_ms = GRACE_MS if ignores else LONG_GRACE_MS
        envelope = validate_envelope(perform(adversary, folder, shotclock, patience_ms, grace_ms))
        assert_timed_out(envelope, "killed", patience_ms)
        if not (folder / "ready").exists():
            raise WrongFoot("stopped before it was ready")
        if ignores:  # otherwise the adversary is none, and the bound below proves nothing
            assert envelope["meta"]["duration_ms"] >= patience_ms + GRACE_MS
        return envelope

    on_time(attempt, beyond_ms=GRACE_MS if ignores else 0)


def assert_timed_out(envelope: dict[str, Any], ending: str, timeout_ms: int) -> None:
    assert envelope["error"]["code"] == "TIMEOUT", envelope
    assert envelope["meta"]["exit_code"] == 10
    assert envelope["meta"]["ending"] == ending, envelope
    assert envelope["meta"]["timeout_ms"] == timeout_ms
    assert envelope["meta"]["survivors"] == []
    clock = envelope["error"]["context"]["clock"]
    assert (clock["kind"], clock["limit_ms"]) == ("timeout", timeout_ms)
    assert timeout_ms <= clock["elapsed_ms"] <= envelope["meta"]["duration_ms"]


def test_the_c_call_of_these_tests_really_holds_the_gil(tmp_path: Path) -> None:
    async def scenario() -> Envelope:
        async with Runtime(preload=["tests.calls.work"]) as runtime:
            await works_again(runtime, NOOP)
            operation = Operation("gil", work.holds_the_gil_before_a_witness)
            return await runtime.call(operation, {"folder": str(tmp_path)}, Clocks.of("1s", grace="0ms"))

    envelope = run(scenario())
    assert envelope.code == "TIMEOUT"
    before, _, while_held = (tmp_path / "beats.new").read_bytes().partition(b"|")
    assert before
    assert len(while_held) < 50, "the witness went on counting, some hundred times a second"


def test_output_written_before_the_stop_is_kept(shotclock: Any, tmp_path: Path) -> None:
    for number in range(ATTEMPTS):
        clocks = ("--timeout", f"{500 * 2**number}ms", "--grace", "0")
        kept = shotclock("exec", "--json", *clocks, "--", *command("writes_for_ever", tmp_path)).json()["data"][
            "stdout"
        ]
        if (tmp_path / "ready").exists() and kept:
            break
    assert kept.startswith("y\ny\n")


# --- the same as async commands of an App ----------------------------------------------------------


Call = Callable[[str, dict[str, Any], int], Awaitable[dict[str, Any]]]


@contextlib.asynccontextmanager
async def by_library() -> AsyncIterator[Call]:
    async def call(name: str, arguments: dict[str, Any], timeout_ms: int) -> dict[str, Any]:
        return (await hostile.app.call_with(name, arguments, timeout=f"{timeout_ms}ms")).to_dict()

    async with hostile.app:
        yield call


def by_mcp(transport: str) -> Callable[[], contextlib.AbstractAsyncContextManager[Call]]:
    @contextlib.asynccontextmanager
    async def by_this_transport() -> AsyncIterator[Call]:
        from tests.apps.server.client import MODERN, connected, envelope_of  # the SDK takes a second to import

        async with connected(transport, MODERN, target="tests.calls.hostile:app") as (client, _):

            async def call(name: str, arguments: dict[str, Any], timeout_ms: int) -> dict[str, Any]:
                meta = {"shotclock.dev/timeoutMs": timeout_ms}
                return dict(await envelope_of(client, name, arguments, meta=meta))

            yield call

    return by_this_transport


Reach = Callable[[], contextlib.AbstractAsyncContextManager[Call]]
# What MCP adds is tested in tests/apps/server/test_hanging_tools.py.
REACHES = pytest.mark.parametrize(
    "reach",
    corners([by_library, by_mcp("stdio"), by_mcp("http")], by_library),
    ids=["library", "MCP stdio", "MCP HTTP"],
)


def test_every_hostile_case_is_an_async_command_as_well() -> None:
    assert {adversary for adversary, _ in KILLABLE} <= {adversary.__name__ for adversary in hostile.ADVERSARIES}


@pytest.mark.timeout(300)
@REACHES
def test_whatever_an_async_command_does_it_is_gone_when_its_time_is_up(
    reach: Reach, tmp_path: Path, validate_envelope: Validate
) -> None:
    async def attempt(call: Call, name: str, number: int) -> dict[str, Any]:
        folder = tmp_path / f"{name}-{number}"
        folder.mkdir()
        patience_ms = TIMEOUT_MS * 2**number
        envelope = validate_envelope(await call(name, {"folder": str(folder)}, patience_ms))
        if envelope["meta"]["ending"] == "not_started" or not (folder / "ready").exists():
            raise WrongFoot("stopped before it was ready")
        assert_timed_out(envelope, "killed", patience_ms)
        assert not marked(folder), name
        assert (await call("noop", {}, 5000))["data"] == {"result": 1}, f"after {name}"
        return envelope

    async def scenario() -> list[str]:
        wrong = []
        async with reach() as call:
            assert (await call("noop", {}, 40_000))["ok"]  # whatever the imports take
            for name in hostile.NAMES:
                for number in range(5):
                    try:
                        envelope = await attempt(call, name, number)
                    except WrongFoot:
                        continue
                    late_ms = envelope["meta"]["duration_ms"] - envelope["meta"]["timeout_ms"] - GRACE_MS
                    if late_ms <= OVERSHOOT_MS * 2**number:
                        break
                else:
                    wrong.append(f"{name} was never answered on time")
        return wrong

    wrong = run(scenario(), within=280)
    assert not wrong, wrong


@REACHES
def test_what_outlives_an_async_command_is_stopped_and_named_when_it_has_returned(
    reach: Reach, tmp_path: Path, validate_envelope: Validate
) -> None:
    async def scenario() -> None:
        async with reach() as call:
            assert (await call("noop", {}, 40_000))["ok"]  # whatever the imports take
            for adversary, left in hostile.LEAVING.items():
                folder = tmp_path / left
                folder.mkdir()
                envelope = validate_envelope(await call(hostile.name_of(adversary), {"folder": str(folder)}, 15_000))
                assert not marked(folder), left
                assert envelope["ok"] and envelope["meta"]["ending"] == "finished", envelope
                assert envelope["meta"]["survivors"] == []
                (warning,) = envelope["warnings"]
                assert warning["code"] == "DESCENDANTS_STOPPED"
                pid = int((folder / left).read_text().split()[0])
                assert pid in [process["pid"] for process in warning["context"]["processes"]]

    run(scenario(), within=90)


@REACHES
def test_an_async_command_that_crashes_its_process_is_answered_for_and_the_next_call_works(
    reach: Reach, validate_envelope: Validate
) -> None:
    async def scenario() -> None:
        async with reach() as call:
            assert (await call("noop", {}, 40_000))["ok"]  # whatever the imports take
            for how in hostile.CRASHES:
                envelope = validate_envelope(await call("crashes", {"how": how}, 15_000))
                context = {"exit_code": 3} if how == "exit" else {"signal": how}
                error = envelope["error"]
                assert (error["code"], error["context"]) == ("WORKER_CRASHED", context), envelope
                assert (envelope["meta"]["side_effects"], envelope["meta"]["survivors"]) == ("unknown", [])
                assert (await call("noop", {}, 5000))["data"] == {"result": 1}, f"after {how}"
                if reach is not by_library:  # there it is a loop of the program itself
                    shared = validate_envelope(await call("crashes-on-a-shared-loop", {"how": how}, 15_000))
                    assert shared["error"]["code"] == "WORKER_CRASHED", shared
                    assert [note["code"] for note in shared["warnings"]] == ["HOST_REPLACED"]
                    assert (shared["meta"]["side_effects"], shared["meta"]["survivors"]) == ("unknown", [])

    run(scenario(), within=90)


@REACHES
def test_when_the_supervisor_of_an_async_command_is_killed_its_processes_die_and_the_caller_is_told(
    reach: Reach, tmp_path: Path, validate_envelope: Validate
) -> None:
    async def scenario() -> None:
        async with reach() as call:
            assert (await call("noop", {}, 40_000))["ok"]  # whatever the imports take
            for name in ("daemonises-without-a-trace", "has-fifty-children"):
                folder = tmp_path / name
                folder.mkdir()
                waiting = asyncio.ensure_future(call(name, {"folder": str(folder)}, 25_000))
                leader = await soon(lambda folder=folder: mark_of(folder, "ready"), within=10)
                supervisor_of(leader).kill()
                envelope = validate_envelope(await asyncio.wait_for(waiting, DEAD_WITHIN_S))
                await soon(lambda folder=folder: not marked(folder), within=DEAD_WITHIN_S)
                assert (envelope["error"]["code"], envelope["meta"]["ending"]) == ("SUPERVISOR_LOST", "killed")
                assert envelope["meta"]["side_effects"] == "unknown"
                assert (await call("noop", {}, 5000))["data"] == {"result": 1}, f"after {name}"

    run(scenario(), within=90)


# --- commands that leave by themselves, and something stays ---------------------------------------


@pytest.mark.parametrize("surface", ["run", "exec"])
@pytest.mark.parametrize(
    ("adversary", "left"), [(adversary.__name__, left) for adversary, left in hostile.LEAVING.items()]
)
def test_what_outlives_its_command_is_stopped_soon_after_and_named(
    adversary: str, left: str, surface: str, tmp_path: Path, shotclock: Any, validate_envelope: Validate
) -> None:
    async def scenario() -> dict[str, Any]:
        async with Runtime() as runtime:
            return (await runtime.run(command(adversary, tmp_path), Clocks.of("30s"), cwd=ROOT)).to_dict()

    if surface == "run":
        envelope = run(scenario())
    else:
        envelope = shotclock("exec", "--json", "--timeout", "30s", "--", *command(adversary, tmp_path), cwd=ROOT).json()
    validate_envelope(envelope)
    assert not marked(tmp_path)
    assert envelope["ok"]
    assert envelope["meta"]["ending"] == "finished"
    assert envelope["data"]["stdout"] == "done\n"
    assert envelope["meta"]["duration_ms"] < 15_000
    (warning,) = envelope["warnings"]
    assert warning["code"] == "DESCENDANTS_STOPPED"
    pid = int((tmp_path / left).read_text().split()[0])
    assert pid in [process["pid"] for process in warning["context"]["processes"]]


# --- work that cannot be killed -------------------------------------------------------------------


def awaits_sleep(end: contextlib.ExitStack) -> Any:
    async def handler() -> None:
        await asyncio.sleep(work.FOREVER_S)

    return handler


def awaits_a_lock(end: contextlib.ExitStack) -> Any:
    async def handler() -> None:
        lock = asyncio.Lock()
        await lock.acquire()
        await lock.acquire()

    return handler


def awaits_recv(end: contextlib.ExitStack) -> Any:
    ours, theirs = socket.socketpair()
    end.callback(theirs.close)
    end.callback(ours.close)
    ours.setblocking(False)

    async def handler() -> None:
        await asyncio.get_running_loop().sock_recv(ours, 1)

    return handler


def swallows_every_exception(end: contextlib.ExitStack) -> Any:
    released = threading.Event()
    end.callback(released.set)

    async def handler() -> None:
        while not released.is_set():
            try:
                await asyncio.sleep(0.01)
            except BaseException:
                pass

    return handler


def awaits_in_finally(end: contextlib.ExitStack) -> Any:
    released = threading.Event()
    end.callback(released.set)

    async def handler() -> None:
        try:
            await asyncio.sleep(work.FOREVER_S)
        finally:
            while not released.is_set():
                await asyncio.sleep(0.01)

    return handler


# What makes the handler, how it ends, and whether it uses up the grace.
INLINE = {
    "awaits_sleep": (awaits_sleep, "cancelled", False),
    "awaits_a_lock": (awaits_a_lock, "cancelled", False),
    "awaits_recv": (awaits_recv, "cancelled", False),
    "swallows_everything": (swallows_every_exception, "abandoned", True),
    "awaits_in_finally": (awaits_in_finally, "abandoned", True),
}


@pytest.mark.parametrize(("make", "ending", "ignores"), INLINE.values(), ids=INLINE.keys())
def test_whatever_an_inline_handler_awaits_its_caller_is_answered(
    make: Any, ending: str, ignores: bool, validate_envelope: Validate
) -> None:
    async def scenario() -> dict[str, Any]:
        async with Runtime() as runtime:
            with contextlib.ExitStack() as end:
                clocks = Clocks(timeout_ms=TIMEOUT_MS, grace_ms=GRACE_MS if ignores else LONG_GRACE_MS)
                operation = Operation("adversary", make(end), isolation="inline")
                envelope, took_ms = await timed(runtime.call(operation, clocks=clocks))
                assert took_ms - envelope.meta["duration_ms"] < 2000
                assert runtime.counts.abandoned == len(runtime.orphans) == (ending == "abandoned")
                await works_again(runtime, NOOPS[2])
            # Once it comes back after all, nobody hears of it, and it no longer counts.
            await soon(lambda: not runtime.orphans)
            assert runtime.counts.late == (ending == "abandoned")
            return envelope.to_dict()

    def attempt(number: int) -> dict[str, Any]:
        envelope = validate_envelope(run(scenario()))
        assert_timed_out(envelope, ending, TIMEOUT_MS)
        return envelope

    on_time(attempt, beyond_ms=GRACE_MS if ignores else 0)


def test_an_inline_handler_that_holds_the_gil_delays_the_answer_only_while_it_holds_it(
    validate_envelope: Validate,
) -> None:
    """Nothing in a process runs without the GIL; code that may do this belongs into a worker."""
    held_ms = TIMEOUT_MS + 200

    async def hold() -> None:
        ctypes.PyDLL(None).usleep(held_ms * 1000)

    async def scenario() -> dict[str, Any]:
        async with Runtime() as runtime:
            operation = Operation("gil", hold, isolation="inline")
            envelope = await runtime.call(operation, clocks=Clocks(timeout_ms=TIMEOUT_MS, grace_ms=GRACE_MS))
            await works_again(runtime, NOOPS[2])
            return envelope.to_dict()

    def attempt(number: int) -> dict[str, Any]:
        envelope = validate_envelope(run(scenario()))
        assert envelope["error"]["code"] == "TIMEOUT"
        return envelope

    on_time(attempt, beyond_ms=held_ms - TIMEOUT_MS)


# --- right at the deadline ------------------------------------------------------------------------

ROUNDS = 60


@pytest.mark.parametrize(
    ("place", "grace_ms", "edge_ms", "spread_ms"),
    [
        ("process", 0, 30, 10),
        ("process", 60, 30, 10),
        ("shared", 60, 30, 10),
        ("inline", 60, 30, 10),
        ("command", 60, 50, 40),  # it has to start first
    ],
    ids=["process-killed at once", "process-with grace", "shared", "inline", "command"],
)
def test_a_result_that_arrives_right_at_the_deadline_is_answered_once_and_truthfully(
    place: Any, grace_ms: int, edge_ms: int, spread_ms: int, tmp_path: Path, validate_envelope: Validate
) -> None:
    for slower in (1, 5):  # a machine that is busy answers nobody within 30 ms
        notes = tmp_path / f"notes-{slower}"
        notes.touch()
        times = (slower * edge_ms, slower * spread_ms, grace_ms)
        answers = [envelope.ok for envelope in answers_at_the_deadline(place, *times, notes, validate_envelope)]
        if set(answers) == {True, False}:
            return
    pytest.fail(f"the rounds did not straddle the deadline: {answers}")


def answers_at_the_deadline(
    place: Any, edge_ms: int, spread_ms: int, grace_ms: int, notes: Path, validate_envelope: Validate
) -> list[Envelope]:
    told: list[Envelope] = []
    handler = operations.note_async if place in ("shared", "inline") else operations.note

    async def scenario() -> list[Envelope]:
        envelopes = []
        async with Runtime(preload=["tests.calls.operations"], observers=[told.append]) as runtime:
            clocks = Clocks(timeout_ms=edge_ms, grace_ms=grace_ms)
            await works_again(runtime, NOOP)
            await runtime.run(["true"], NEXT_CALL)
            for number in range(ROUNDS):
                nap_ms = edge_ms + spread_ms * (2 * number / ROUNDS - 1)
                if place == "command":
                    script = f"sleep {nap_ms / 1000:.4f}; echo {number} >> '{notes}'; echo {number}"
                    call = runtime.run(["sh", "-c", script], clocks)
                else:
                    arguments = {"path": str(notes), "number": number, "nap_ms": nap_ms}
                    call = runtime.call(Operation("note", handler, isolation=place), arguments, clocks)
                envelopes.append(await call)
            await works_again(runtime)
            await soon(lambda: len(told) >= ROUNDS + 2 + len(NOOPS))
        return envelopes

    envelopes = run(scenario(), within=60)
    written = notes.read_text().split()
    for number, envelope in enumerate(envelopes):
        validate_envelope(envelope.to_dict())
        assert envelope.code in (None, "TIMEOUT"), envelope.to_dict()
        times = written.count(str(number))
        if envelope.ok:
            assert times == 1, f"round {number} succeeded, but its note is there {times} times"
            assert envelope.value == number or envelope.data["stdout"] == f"{number}\n"
        else:
            assert times <= 1
            assert envelope.meta["exit_code"] == 10
    ids = [envelope.meta["request_id"] for envelope in told]
    assert len(ids) == len(set(ids)) == ROUNDS + 2 + len(NOOPS), "every call is told exactly once"
    return envelopes


# --- more milliseconds than fit into 32 bits ------------------------------------------------------


def test_a_timeout_of_three_billion_milliseconds_neither_rings_at_once_nor_overflows(
    shotclock: Any, validate_envelope: Validate, tmp_path: Path
) -> None:
    long = Clocks(
        timeout_ms=3_000_000_000,
        soft_ms=2_900_000_000,
        idle_ms=2_800_000_000,
        queue_ms=2_700_000_000,
        grace_ms=3_000_000_000,
    )
    path = str(tmp_path / "notes")

    async def scenario() -> list[Envelope]:
        async with Runtime(preload=["tests.calls.operations"]) as runtime:
            arguments = {"path": path, "number": 7, "nap_ms": 100}
            return [
                await runtime.call(Operation("note", operations.note), arguments, long),
                await runtime.call(Operation("note", operations.note_async, isolation="shared"), arguments, long),
                await runtime.call(Operation("note", operations.note_async, isolation="inline"), arguments, long),
                await runtime.run(["sleep", "0.1"], long),
            ]

    envelopes = [envelope.to_dict() for envelope in run(scenario())]
    clocks = ("--timeout", "3000000000ms", "--idle", "2800000000ms", "--grace", "3000000000ms")
    ran = shotclock("exec", "--json", *clocks, "--", "sleep", "0.1")
    assert ran.code == 0
    for envelope in [*envelopes, ran.json()]:
        validate_envelope(envelope)
        assert envelope["ok"], envelope
        assert envelope["meta"]["timeout_ms"] == 3_000_000_000
        assert envelope["meta"]["duration_ms"] >= 100


# --- SIGKILL, where it hurts most -----------------------------------------------------------------


@contextlib.contextmanager
def running(*argv: str, folder: Path) -> Any:
    """A process whose output goes to files, ended (by SIGKILL) at the latest when the test is over."""
    with open(folder / "out", "wb") as out, open(folder / "err", "wb") as err:
        process = subprocess.Popen(argv, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=out, stderr=err)
    try:
        yield process
    finally:
        process.kill()
        process.wait(5)


@pytest.mark.parametrize("options", [(), ("--json",), ("--idle", "30s")], ids=["inherit", "capture", "relay"])
@pytest.mark.parametrize("adversary", ["daemonises_without_a_trace", "has_fifty_children"])
def test_when_exec_is_killed_everything_below_it_dies(
    adversary: str, options: tuple[str, ...], tmp_path: Path, no_survivors: Any
) -> None:
    folder = tmp_path / "marks"
    folder.mkdir()
    words = (sys.executable, "-m", "shotclock", "exec", *options, "--timeout", "60s", "--")
    with running(*words, *command(adversary, folder), folder=tmp_path) as process:
        eventually(lambda: mark_of(folder, "ready"), within=10)
        process.kill()
        eventually(lambda: not marked(folder), within=DEAD_WITHIN_S)
        process.wait(5)
        assert no_survivors.wait_until_alone(DEAD_WITHIN_S) == []


def supervisor_of(process: psutil.Process) -> psutil.Process:
    parent = process.parent()
    assert parent is not None and parent.name() == "shotclock-sup", parent
    return parent


@pytest.mark.parametrize("supervisors_too", [False, True], ids=["alone", "with the supervisors"])
def test_when_a_program_with_a_runtime_is_killed_its_workers_and_commands_die(
    supervisors_too: bool, tmp_path: Path, no_survivors: Any
) -> None:
    worker, child = tmp_path / "worker", tmp_path / "command"
    worker.mkdir()
    child.mkdir()
    with running(sys.executable, "-m", "tests.calls.victim", str(worker), str(child), folder=tmp_path) as process:
        eventually(lambda: mark_of(worker, "ready") and mark_of(child, "ready"), within=15)
        assert {"ready", "daemon"} <= marked(worker).keys() & marked(child).keys()
        guards = [supervisor_of(marked(folder)["ready"]) for folder in (worker, child)] if supervisors_too else []
        process.kill()
        for guard in guards:
            with contextlib.suppress(psutil.NoSuchProcess):  # it has seen the program die, and was quicker
                guard.kill()
        eventually(lambda: not marked(worker) and not marked(child), within=DEAD_WITHIN_S)
        process.wait(5)
        assert no_survivors.wait_until_alone(DEAD_WITHIN_S) == []


@pytest.mark.parametrize("adversary", ["daemonises_without_a_trace", "has_fifty_children"])
@pytest.mark.parametrize("surface", ["worker", "run"])
def test_when_a_supervisor_is_killed_what_it_guarded_dies_and_the_caller_is_told(
    surface: str, adversary: str, tmp_path: Path, validate_envelope: Validate
) -> None:
    async def scenario() -> Envelope:
        async with Runtime(preload=["tests.calls.work", "tests.calls.operations"]) as runtime:
            clocks = Clocks.of("30s")
            if surface == "worker":
                operation = Operation(adversary, getattr(work, adversary))
                call = runtime.call(operation, {"folder": str(tmp_path)}, clocks)
            else:
                call = runtime.run(command(adversary, tmp_path), clocks, cwd=ROOT)
            waiting = asyncio.create_task(call)
            leader = await soon(lambda: mark_of(tmp_path, "ready"), within=10)
            supervisor_of(leader).kill()
            envelope = await asyncio.wait_for(waiting, DEAD_WITHIN_S)
            await soon(lambda: not marked(tmp_path), within=DEAD_WITHIN_S)
            await works_again(runtime)
            assert (await runtime.run(["true"], NEXT_CALL)).ok
            return envelope

    envelope = run(scenario())
    validate_envelope(envelope.to_dict())
    assert (envelope.code, envelope.ending) == ("SUPERVISOR_LOST", "killed")
    assert envelope.meta["side_effects"] == "unknown"


def test_the_death_of_one_supervisor_costs_nobody_else_their_work(tmp_path: Path) -> None:
    """Whoever kills what it guarded must not take for a stray what a living one has just started."""

    async def scenario() -> None:
        async with Runtime() as runtime:
            for number in range(10):
                folder = tmp_path / str(number)
                folder.mkdir()
                pid_file = folder / "pid"
                script = f"echo $$ > '{pid_file}.new'; mv '{pid_file}.new' '{pid_file}'; exec sleep {work.FOREVER_S}"
                victim = asyncio.create_task(runtime.run(["sh", "-c", script], Clocks.of("30s")))
                await soon(pid_file.exists)
                guard = supervisor_of(psutil.Process(int(pid_file.read_text())))
                others = [asyncio.create_task(runtime.run(["echo", "hi"], Clocks.of("10s"))) for _ in range(12)]
                await asyncio.sleep(0.002 * number)  # somewhere in the middle of their starting
                guard.kill()
                for envelope in await asyncio.gather(*others):
                    assert envelope.ok, (number, envelope)
                assert (await victim).code == "SUPERVISOR_LOST"

    run(scenario(), within=60)


OWN_PID = Operation("own_pid", operations.own_pid)


async def current_worker(runtime: Runtime) -> psutil.Process:
    return psutil.Process((await runtime.call(OWN_PID, clocks=NEXT_CALL)).value)


def test_a_supervisor_forks_the_next_worker_and_guards_it_as_it_guarded_the_first(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    async def scenario() -> set[int]:
        pids: set[int] = set()
        async with Runtime(workers=1, most_workers=1, preload=["tests.calls.operations"]) as runtime:
            guard = supervisor_of(await current_worker(runtime))
            for number in range(4):
                worker = await current_worker(runtime)
                assert supervisor_of(worker) == guard
                assert (await runtime.call(Operation("complains", operations.complains))).value == worker.pid
                pids.add(worker.pid)
                folder = tmp_path / str(number)
                folder.mkdir()
                hangs = Operation("daemonises_without_a_trace", work.daemonises_without_a_trace)
                late = await runtime.call(hangs, {"folder": str(folder)}, Clocks.of("300ms", grace="0ms"))
                assert (late.code, late.ending) == ("TIMEOUT", "killed")
                assert not marked(folder)
                crash = await runtime.call(Operation("crashes", operations.crashes), {"how": "SIGKILL"}, NEXT_CALL)
                assert crash.code == "WORKER_CRASHED" and crash.error["context"]["signal"] == "SIGKILL", crash.error
        return pids

    pids = run(scenario())
    assert len(pids) == 4, "each is a new process"
    told = capfd.readouterr().err
    assert all(f"heard from {pid}" in told for pid in pids), "and each of them can still be heard"


def test_a_supervisor_that_is_killed_while_it_has_no_worker_costs_nobody_anything(tmp_path: Path) -> None:
    leaves = Operation("leaves", operations.leaves_processes)

    async def scenario() -> int:
        killed = 0
        async with Runtime(workers=1, most_workers=1, preload=["tests.calls.operations"]) as runtime:
            for number in range(9):
                folder = tmp_path / str(number)
                folder.mkdir()
                # Its worker is killed and its successor forked meanwhile, by another one: this one is out of work. On a
                # slow machine it may be done in time to fork the successor itself.
                guard = supervisor_of(await current_worker(runtime))
                assert (await runtime.call(leaves, {"folder": str(folder), "count": 1}, NEXT_CALL)).ok
                if supervisor_of(await current_worker(runtime)) == guard:
                    continue
                guard.kill()
                await works_again(runtime, NOOP, NOOP)
                killed += 1
                if killed == 3:
                    break
        return killed

    assert run(scenario()) > 0


def test_supervisors_without_a_worker_die_with_the_runtime(tmp_path: Path, no_survivors: Any) -> None:
    async def scenario() -> psutil.Process:
        async with Runtime(workers=1, most_workers=1, preload=["tests.calls.operations"]) as runtime:
            guard = supervisor_of(await current_worker(runtime))
            leaves = Operation("leaves", operations.leaves_processes)
            assert (await runtime.call(leaves, {"folder": str(tmp_path), "count": 1}, NEXT_CALL)).ok
            await works_again(runtime, NOOP)
            assert guard.is_running()
        return guard

    guard = run(scenario())
    eventually(lambda: is_dead(guard))


@pytest.mark.parametrize("adversary", ["daemonises_without_a_trace", "has_fifty_children"])
@pytest.mark.parametrize("options", [("--json",), ("--report", "json")], ids=["capture", "inherit"])
def test_when_the_supervisor_of_exec_is_killed_the_tree_dies_and_an_envelope_says_so(
    options: tuple[str, ...], adversary: str, tmp_path: Path, validate_envelope: Validate
) -> None:
    folder = tmp_path / "marks"
    folder.mkdir()
    words = (sys.executable, "-m", "shotclock", "exec", *options, "--timeout", "60s", "--")
    with running(*words, *command(adversary, folder), folder=tmp_path) as process:
        leader = eventually(lambda: mark_of(folder, "ready"), within=10)
        supervisor_of(leader).kill()
        code = process.wait(DEAD_WITHIN_S + 1)
        assert not marked(folder)
    is_captured = options == ("--json",)
    stream = (tmp_path / ("out" if is_captured else "err")).read_bytes()
    envelope = validate_envelope(json.loads(stream.strip().splitlines()[-1]))
    assert envelope["error"]["code"] == "SUPERVISOR_LOST"
    assert envelope["meta"]["ending"] == "killed"
    assert code == envelope["meta"]["exit_code"] == (1 if is_captured else 125)


def is_dead(process: psutil.Process) -> bool:
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


# The worker's ancestors, counted from the worker: its supervisor, the preloaded zygote, that one's supervisor,
# the clean zygote.
PRELOADED, PRELOADED_SUPERVISOR, CLEAN = 1, 2, 3


@pytest.mark.parametrize(
    ("worker_too", "victims"),
    corners(
        itertools.product(
            (True, False), [[CLEAN], [PRELOADED], [PRELOADED_SUPERVISOR], [PRELOADED, CLEAN], [CLEAN, PRELOADED]]
        ),
        (True, [PRELOADED_SUPERVISOR]),
        (True, [PRELOADED, CLEAN]),
        (False, [CLEAN, PRELOADED]),
    ),
)
def test_when_zygotes_are_killed_the_next_calls_work(worker_too: bool, victims: list[int]) -> None:
    async def scenario() -> None:
        async with Runtime(workers=1, preload=["tests.calls.operations"]) as runtime:
            assert (await runtime.run(["true"], NEXT_CALL)).ok
            worker = psutil.Process((await runtime.call(Operation("own_pid", operations.own_pid))).value)
            chain = worker.parents()
            assert chain[CLEAN].name() == "clock-zygote"
            assert chain[CLEAN + 1].pid == os.getpid()
            for victim in victims:
                chain[victim].kill()
            await soon(lambda: all(is_dead(chain[victim]) for victim in victims))
            if worker_too:  # so that a new one has to be forked, by a zygote that is not there
                crash = await runtime.call(Operation("crashes", operations.crashes), {"how": "SIGKILL"}, NEXT_CALL)
                assert crash.code in ("WORKER_CRASHED", "SUPERVISOR_LOST")
            for _ in range(3):
                await works_again(runtime)
                assert (await runtime.run(["true"], NEXT_CALL)).ok

    run(scenario())


@pytest.mark.parametrize("victims", [(CLEAN,), (PRELOADED, CLEAN)], ids=["clean", "both"])
def test_when_zygotes_are_killed_running_work_goes_on_and_is_still_bounded(
    victims: tuple[int, ...], tmp_path: Path, validate_envelope: Validate
) -> None:
    async def scenario(timeout_ms: int) -> list[Envelope]:
        async with Runtime(preload=["tests.calls.work", "tests.calls.operations"]) as runtime:
            clocks = Clocks(timeout_ms=timeout_ms, grace_ms=0)
            (tmp_path / "worker").mkdir(exist_ok=True)
            (tmp_path / "command").mkdir(exist_ok=True)
            call = runtime.call(Operation("sleeps", work.sleeps), {"folder": str(tmp_path / "worker")}, clocks)
            other = runtime.run(command("sleeps", tmp_path / "command"), clocks, cwd=ROOT)
            both = asyncio.gather(call, other)
            while not ((worker := mark_of(tmp_path / "worker", "ready")) and mark_of(tmp_path / "command", "ready")):
                if both.done():
                    raise WrongFoot("stopped before both were ready")
                await asyncio.sleep(POLL_S)
            chain = worker.parents()
            for victim in victims:
                chain[victim].kill()
            envelopes = await both
            assert not marked(tmp_path / "worker") and not marked(tmp_path / "command")
            return envelopes

    for envelope in at_last(lambda number: run(scenario(1200 * 2**number), within=60)):
        validate_envelope(envelope.to_dict())
        assert (envelope.code, envelope.ending) == ("TIMEOUT", "killed"), envelope


# --- a caller that is stuck -----------------------------------------------------------------------


@pytest.mark.parametrize("surface", ["worker", "run"])
def test_a_caller_whose_own_loop_is_blocked_does_not_delay_the_kill(surface: str, tmp_path: Path) -> None:
    async def scenario(timeout_ms: int) -> Envelope:
        async with Runtime(preload=["tests.calls.work"]) as runtime:
            clocks = Clocks(timeout_ms=timeout_ms, grace_ms=0)
            if surface == "worker":
                assert await runtime.warm_up()  # what its imports take is not what this second is for
                operation = Operation("daemonises", work.daemonises)
                call = runtime.call(operation, {"folder": str(tmp_path)}, clocks)
            else:
                call = runtime.run(command("daemonises", tmp_path), clocks, cwd=ROOT)
            waiting = asyncio.create_task(call)
            while not mark_of(tmp_path, "ready"):
                if waiting.done():
                    raise WrongFoot("stopped before it was ready")
                await asyncio.sleep(POLL_S)
            # On purpose not awaited: the loop stands still.
            eventually(lambda: not marked(tmp_path), within=timeout_ms / 1000 + DEAD_WITHIN_S)
            return await waiting

    assert at_last(lambda number: run(scenario(1000 * 2**number), within=60)).code == "TIMEOUT"


@pytest.mark.parametrize("surface", ["exec", "command step", "function step"])
def test_work_that_stops_its_caller_and_all_guards_is_ended_and_answered_for(
    surface: str, tmp_path: Path, validate_envelope: Validate, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHOTCLOCK_HOME", str(tmp_path / "home"))
    folder = tmp_path / "marks"
    folder.mkdir()
    work_words = command("stops_its_caller", folder)
    words = ["exec", "--json", "--timeout", "2s", "--grace", "200ms", "--", *work_words]
    if surface != "exec":
        step: dict[str, Any] = {"exec": f"cd {ROOT} && exec {shlex.join(work_words)}"}
        if surface == "function step":
            (tmp_path / "tool.py").write_text(
                f"import sys\nfrom shotclock import App\nsys.path.insert(0, {str(ROOT)!r})\n"
                "from tests.calls import work\n"
                "app = App('tool')\napp.command(work.stops_its_caller)\n"
            )
            step = {"type": "function", "target": "tool.py:app", "command": "stops-its-caller"}
            step["arguments"] = {"folder": str(folder)}
        flow = {"steps": {"stops": {**step, "timeout": "2s", "grace": "200ms"}}}
        (tmp_path / "flow.yaml").write_text(json.dumps(flow))
        words = ["run", str(tmp_path / "flow.yaml"), "--json"]
    with running(sys.executable, "-m", "shotclock", *words, folder=tmp_path) as process:
        assert process.wait(2 + DEAD_WITHIN_S) in (3, 10)
        assert (folder / "ready").exists() and not marked(folder)
    envelope = validate_envelope(json.loads((tmp_path / "out").read_bytes()))
    ended = envelope if surface == "exec" else {**envelope["data"]["steps"]["stops"], "meta": {"survivors": []}}
    assert (ended["error"]["code"], ended["meta"]["survivors"]) == ("TIMEOUT", [])


def test_a_stopped_exec_does_not_delay_the_kill(tmp_path: Path, validate_envelope: Validate) -> None:
    folder = tmp_path / "marks"
    folder.mkdir()
    words = (sys.executable, "-m", "shotclock", "exec", "--json", "--timeout", "3s", "--grace", "0", "--")
    with running(*words, *command("daemonises", folder), folder=tmp_path) as process:
        eventually(lambda: mark_of(folder, "ready"))
        process.send_signal(signal.SIGSTOP)
        eventually(lambda: not marked(folder), within=3 + DEAD_WITHIN_S)
        process.send_signal(signal.SIGCONT)
        assert process.wait(15) == 10
    assert validate_envelope(json.loads((tmp_path / "out").read_bytes()))["error"]["code"] == "TIMEOUT"
