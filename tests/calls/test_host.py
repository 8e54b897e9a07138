"""Async handlers in a host process: whatever they do, each call is answered on time, and the next one works."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any

import psutil
import pytest

from shotclock import Clocks, Envelope, Operation, Runtime
from shotclock.calls import executor
from shotclock.core.catalogue import HandlerReference
from shotclock.worker.context import CallListener
from tests.calls import guests, operations
from tests.calls.bounds import LONG_GRACE_MS, ROOT, WrongFoot, eventually, mark_of, marked, on_time, run, soon, timed
from tests.processes import is_running
from tests.rows import corners

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("no_survivors")]

TIMEOUT_MS = 200
GRACE_MS = 200
DEAD_WITHIN_S = 5.0
NEXT_CALL = Clocks.of("5s")
SOON = Clocks.of("10s")

Validate = Callable[[dict[str, Any]], dict[str, Any]]


def op(name: str, **more: Any) -> Operation:
    return Operation(name, getattr(guests, name), **{"isolation": "shared", **more})


NOOP = op("noop")


@contextlib.asynccontextmanager
async def a_runtime(**options: Any) -> AsyncIterator[Runtime]:
    preload = ["tests.calls.guests"]
    async with Runtime(preload=preload, workers=1, **options) as runtime:
        await works(runtime)  # the host is up: what is measured is the call alone
        yield runtime


async def works(runtime: Runtime) -> None:
    envelope = await runtime.call(NOOP, clocks=NEXT_CALL)
    assert envelope.value == 1, envelope.to_dict()


async def pid_of_host(runtime: Runtime) -> int:
    return (await runtime.call(op("own_pid"), clocks=NEXT_CALL)).value


def one_call(operation: Operation, arguments: Any = None, clocks: Clocks = SOON, **options: Any) -> Envelope:
    async def scenario() -> Envelope:
        async with a_runtime() as runtime:
            envelope = await runtime.call(operation, arguments, clocks, **options)
            await works(runtime)
            return envelope

    return run(scenario())


# --- calls that end well --------------------------------------------------------------------------


def test_a_handler_runs_in_another_process_on_its_main_thread_and_its_result_arrives_whole(
    validate_envelope: Validate,
) -> None:
    async def scenario() -> None:
        async with a_runtime() as runtime:
            pid = await pid_of_host(runtime)
            assert pid != os.getpid()
            assert psutil.Process(pid).name() == "shotclock-host"
            assert (await runtime.call(op("says_which_loop_thread"))).value is True
            value = {"text": "ü", "set": {1, 2}, "bytes": b"\x00\xff", "when": 1.5}
            envelope = await runtime.call(op("echo"), {"value": value}, SOON)
            assert envelope.value == value
            validate_envelope(envelope.to_dict())
            assert envelope.ending == "finished"
            assert [warning["code"] for warning in envelope.warnings] == ["RESULT_CHANGED"], "JSON has no bytes"

    run(scenario())


def test_what_handlers_keep_in_memory_is_there_for_all_calls_on_one_loop() -> None:
    async def scenario() -> list[Any]:
        async with a_runtime() as runtime:
            envelopes = await asyncio.gather(*(runtime.call(op("counts"), clocks=SOON) for _ in range(50)))
            return [envelope.value for envelope in envelopes]

    assert sorted(run(scenario())) == [[number, 1] for number in range(1, 51)]


def test_what_a_handler_prints_does_not_reach_our_stdout(tmp_path: Path) -> None:
    script = (
        "import asyncio\n"
        "from shotclock import Operation, Runtime\n"
        "from tests.calls import guests\n"
        "async def main():\n"
        "    async with Runtime(preload=['tests.calls.guests']) as runtime:\n"
        "        prints = Operation('prints', guests.prints, isolation='shared')\n"
        "        envelope = await runtime.call(prints, {'text': 'noise'})\n"
        "        print('answer', envelope.value)\n"
        "asyncio.run(main())\n"
    )
    with open(tmp_path / "out", "wb") as out, open(tmp_path / "err", "wb") as err:
        subprocess.run([sys.executable, "-c", script], cwd=ROOT, stdout=out, stderr=err, timeout=20, check=True)
    assert (tmp_path / "out").read_text() == "answer printed\n"
    assert (tmp_path / "err").read_text().count("noise") == 2


def test_what_returned_may_leave_children_which_live_and_die_with_the_host(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with a_runtime() as runtime:
            envelope = await runtime.call(op("leaves_a_child"), {"folder": str(tmp_path)}, SOON)
            child = envelope.value
            assert [process["pid"] for process in envelope.meta["survivors"]] == [child], "it is not hidden"
            await works(runtime)
            assert is_running(child)
            os.kill(await pid_of_host(runtime), signal.SIGKILL)
            await soon(lambda: not is_running(child), within=DEAD_WITHIN_S)
            await works(runtime)

    run(scenario())


# --- by reference ---------------------------------------------------------------------------------


def test_a_reference_that_cannot_be_found_is_told_and_nothing_runs(validate_envelope: Validate) -> None:
    reference = HandlerReference("tests.calls.guests", "nowhere", is_async=True)
    envelope = one_call(Operation("x", reference, isolation="shared"))
    validate_envelope(envelope.to_dict())
    assert (envelope.code, envelope.ending) == ("HANDLER_NOT_IMPORTABLE", "not_started")
    assert "nowhere" in envelope.error["message"]


def test_a_reference_cannot_run_inline(validate_envelope: Validate) -> None:
    reference = HandlerReference("tests.calls.operations", "noop_async", is_async=True)
    envelope = one_call(Operation("x", reference, isolation="inline"))
    validate_envelope(envelope.to_dict())
    assert (envelope.code, envelope.ending) == ("HANDLER_NOT_IMPORTABLE", "not_started")
    assert "inline" in envelope.error["message"]


# --- calls that fail by themselves ----------------------------------------------------------------


def test_a_task_of_a_handler_that_exits_does_not_end_the_host() -> None:
    async def scenario() -> None:
        async with a_runtime() as runtime:
            pid = await pid_of_host(runtime)
            assert (await runtime.call(op("has_a_task_that_exits"), clocks=SOON)).ok
            assert await pid_of_host(runtime) == pid

    run(scenario())


def test_a_handler_that_cancels_itself_is_cancelled_and_no_clock_is_blamed() -> None:
    envelope = one_call(op("cancels_itself"))
    assert (envelope.code, envelope.ending) == ("CANCELLED", "cancelled")


# --- the context ----------------------------------------------------------------------------------


def test_progress_may_be_said_in_a_thread_of_the_handler() -> None:
    heard: list[Any] = []
    assert one_call(op("progresses_in_a_thread"), on_progress=lambda *progress: heard.append(progress)).ok
    assert heard == [(7, 9, "pages")]


def test_whoever_listens_to_progress_and_raises_loses_nobody_their_answer() -> None:
    async def scenario() -> list[Any]:
        complaints: list[Any] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: complaints.append(context["exception"]))
        async with a_runtime() as runtime:

            def raises(*progress: object) -> None:
                raise RuntimeError("not listening")

            assert (await runtime.call(op("looks_around"), clocks=SOON, on_progress=raises)).ok
        return complaints

    assert [str(complaint) for complaint in run(scenario())] == ["not listening"] * 2


def test_steps_and_checkpoints_reach_whoever_attends_the_call() -> None:
    class Clerk(CallListener):
        def __init__(self) -> None:
            self.heard: list[Any] = []

        def step(self, name: str) -> None:
            self.heard.append(name)

        async def checkpoint(self, state: object) -> None:
            self.heard.append(state)

        async def restore(self, fingerprint: str) -> object:
            return [fingerprint, self.heard]

    clerk = Clerk()
    assert one_call(op("checkpoints"), listener=clerk).value == ["same", ["first", {"at": 1}]]
    clerk.skipped_steps = ("first",)
    assert one_call(op("checkpoints"), listener=clerk).value == "skipped"
    assert one_call(op("checkpoints")).code == "CHECKPOINTS_UNAVAILABLE"


class Reader(CallListener):
    """Listener that keeps what is written, and can add."""

    def __init__(self) -> None:
        self.text = ""

    def wrote(self, text: str) -> None:
        self.text += text

    def ask(self, question: str, value: object) -> Coroutine[Any, Any, object]:
        return self._add(value) if question == "add" else super().ask(question, value)

    async def _add(self, value: Any) -> object:
        return sum(value)


PLACES = ["shared", "process", "inline"]


@pytest.mark.parametrize("isolation", PLACES)
def test_text_and_questions_reach_whoever_attends_the_call(isolation: Any) -> None:
    async def scenario() -> tuple[Envelope, Envelope, Reader]:
        reader = Reader()
        async with Runtime(workers=1) as runtime:
            operation = op("writes_and_asks", isolation=isolation)
            known = await runtime.call(operation, clocks=SOON, listener=reader)
            return known, await runtime.call(operation, clocks=SOON), reader

    known, unknown, reader = run(scenario())
    assert (known.value, reader.text) == (3, "one two three"), known.to_dict()
    assert unknown.code == "UNKNOWN_OPERATION"


def test_a_process_that_a_handler_forks_sends_nothing_in_its_place() -> None:
    reader = Reader()
    envelope = one_call(op("writes_and_forks"), listener=reader)
    assert envelope.ok and reader.text == "once", envelope.to_dict()


@pytest.mark.parametrize("isolation", PLACES)
def test_text_is_a_sign_of_life_and_is_there_when_the_call_has_stalled(isolation: Any) -> None:
    async def scenario() -> tuple[Envelope, Reader]:
        reader = Reader()
        async with Runtime(workers=1) as runtime:
            await runtime.call(op("noop", isolation=isolation), clocks=SOON)
            operation = op("writes_then_falls_silent", isolation=isolation)
            clocks = Clocks.of("15s", idle="700ms", grace="200ms")
            return await runtime.call(operation, clocks=clocks, listener=reader), reader

    envelope, reader = run(scenario())
    assert envelope.code == "STALLED", envelope.to_dict()
    assert reader.text == "word " * 20
    assert envelope.meta["duration_ms"] >= 1600


def test_the_soft_clock_is_heard_by_a_handler_that_gives_the_loop_no_turn() -> None:
    envelope = one_call(op("winds_down_without_a_turn"), clocks=Clocks.of("10s", soft="100ms"))
    assert envelope.value == "wound down"
    assert [warning["code"] for warning in envelope.warnings] == ["SOFT_LIMIT"]
    assert envelope.meta["duration_ms"] < 2000


def test_the_idle_clock_rings_for_the_silent_and_not_for_those_who_say_that_they_live(tmp_path: Path) -> None:
    clocks = Clocks.of("10s", idle="150ms", grace="100ms")
    silent = one_call(op("sleeps"), {"folder": str(tmp_path)}, clocks)
    assert (silent.code, silent.ending) == ("STALLED", "cancelled")
    assert silent.meta["duration_ms"] < 8000
    assert one_call(op("says_it_lives"), {"ms": 500}, clocks).value == "still here"


def test_silence_is_counted_from_the_beginning_of_a_call_and_not_while_others_block_the_loop(tmp_path: Path) -> None:
    async def scenario() -> Envelope:
        async with a_runtime() as runtime:
            blocking = runtime.call(op("blocks_for"), {"folder": str(tmp_path), "ms": 1100}, SOON)
            blocked = asyncio.create_task(blocking)
            await soon((tmp_path / "ready").exists)
            answered = await runtime.call(op("is_silent_for"), {"ms": 500}, Clocks.of("10s", idle="600ms"))
            await blocked
            return answered

    envelope = run(scenario())
    assert envelope.value == "done", envelope.to_dict()


def test_when_a_caller_in_the_host_is_cancelled_the_call_it_waits_for_is_stopped_as_well(tmp_path: Path) -> None:
    async def scenario() -> Envelope:
        async with a_runtime(operations=[op("sleeps"), Operation("worker", operations.noop)]) as runtime:
            ask = {"operation": "sleeps", "arguments": {"folder": str(tmp_path)}, "clocks": {}}
            waiting = asyncio.create_task(runtime.call(op("asks_further"), ask, Clocks.of("60s", grace="1s")))
            await soon((tmp_path / "ready").exists)
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await asyncio.wait_for(waiting, 3)
            (host,) = runtime._children.shared()._all
            await soon(lambda: not host.calls, within=2)
            await works(runtime)

    run(scenario())


# --- everything that is known to hang other tools -------------------------------------------------

# How the work ends, and whether it uses up the grace.
ADVERSARIES = {
    "sleeps": ("cancelled", False),
    "blocks": ("killed", True),
    "spins": ("killed", True),
    "holds_the_gil": ("killed", True),
    "stops_itself": ("killed", True),
    "floods": ("killed", True),
    "floods_with_progress": ("killed", True),
    "swallows": ("killed", True),
    "blocks_in_finally": ("killed", True),
    "awaits_in_finally": ("killed", True),
    "daemonises": ("cancelled", False),
    "daemonises_and_blocks": ("killed", True),
    "has_a_task_that_blocks": ("killed", True),
}


@pytest.mark.parametrize(
    "adversary", corners(ADVERSARIES, "sleeps", "blocks", "stops_itself", "swallows", "daemonises_and_blocks")
)
def test_whatever_a_handler_does_it_is_stopped_when_its_time_is_up_and_the_next_call_works(
    adversary: str, tmp_path: Path, validate_envelope: Validate
) -> None:
    ending, uses_grace = ADVERSARIES[adversary]

    async def scenario(folder: Path, timeout_ms: int) -> tuple[Envelope, int]:
        async with a_runtime() as runtime:
            assert (await runtime.call(op("counts"), clocks=SOON)).value[0] == 1
            clocks = Clocks(timeout_ms=timeout_ms, grace_ms=GRACE_MS if uses_grace else LONG_GRACE_MS)
            envelope = await runtime.call(op(adversary), {"folder": str(folder)}, clocks)
            assert ending != "killed" or not marked(folder)
            assert runtime.orphans == []
            return envelope, (await runtime.call(op("counts"), clocks=NEXT_CALL)).value[0]

    def attempt(number: int) -> dict[str, Any]:
        folder = tmp_path / str(number)
        folder.mkdir()
        timeout_ms = TIMEOUT_MS * 2**number
        with stderr_away():
            answered, calls_seen = run(scenario(folder, timeout_ms))
        envelope = validate_envelope(answered.to_dict())
        if not (folder / "ready").exists():
            raise WrongFoot("stopped before it was ready")
        assert envelope["error"]["code"] == "TIMEOUT", envelope
        assert envelope["meta"]["ending"] == ending, envelope
        assert envelope["meta"]["survivors"] == []
        assert envelope["meta"]["side_effects"] == "unknown"
        # State that is lost is said, and what is said is so.
        was_said = [warning["code"] for warning in envelope["warnings"]] == ["HOST_REPLACED"]
        assert was_said is (ending == "killed")
        assert calls_seen == (1 if was_said else 2)
        if uses_grace:
            assert envelope["meta"]["duration_ms"] >= timeout_ms + GRACE_MS
        return envelope

    on_time(attempt, beyond_ms=GRACE_MS if uses_grace else 0)


@contextlib.contextmanager
def stderr_away() -> Any:
    """A flood goes to our stderr, which pytest would keep."""
    kept, null = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(null)


def test_a_handler_has_its_grace_to_clean_up(tmp_path: Path) -> None:
    clocks = Clocks.of("150ms", grace="2s")
    envelope = one_call(op("cleans_up"), {"folder": str(tmp_path), "ms": 100}, clocks)
    assert (envelope.code, envelope.ending) == ("TIMEOUT", "cancelled")
    assert (tmp_path / "cleaned").exists()
    assert envelope.warnings == []


def test_without_any_grace_those_who_obey_are_still_only_cancelled(tmp_path: Path) -> None:
    arguments = {"folder": str(tmp_path), "ms": 10}
    envelope = one_call(op("cleans_up"), arguments, Clocks.of("100ms", grace="0ms"))
    assert (envelope.code, envelope.ending) == ("TIMEOUT", "cancelled")
    assert (tmp_path / "cleaned").exists()


def test_a_result_that_is_given_after_the_bell_is_late_and_not_delivered() -> None:
    envelope = one_call(op("answers_when_cancelled"), clocks=Clocks.of("100ms", grace="2s"))
    assert (envelope.code, envelope.ending, envelope.value) == ("TIMEOUT", "cancelled", None)


@pytest.mark.parametrize(("how", "context"), [("SIGSEGV", {"signal": "SIGSEGV"}), ("exit", {"exit_code": 3})])
def test_a_host_that_crashes_is_told_to_those_in_it_and_replaced(
    how: str, context: dict[str, object], tmp_path: Path, validate_envelope: Validate
) -> None:
    async def scenario() -> list[Envelope]:
        async with a_runtime() as runtime:
            neighbour = asyncio.create_task(runtime.call(op("sleeps"), {"folder": str(tmp_path)}, SOON))
            await soon((tmp_path / "ready").exists)
            crash = await runtime.call(op("crashes"), {"how": how}, SOON)
            await works(runtime)
            return [crash, await neighbour]

    for envelope in run(scenario()):
        validate_envelope(envelope.to_dict())
        assert (envelope.code, envelope.ending) == ("WORKER_CRASHED", "finished"), envelope
        assert envelope.error["context"] == context
        assert envelope.meta["duration_ms"] < 4500
        assert [warning["code"] for warning in envelope.warnings] == ["HOST_REPLACED"]


def test_a_crash_is_told_at_once_although_children_are_left_and_they_are_gone_by_then(tmp_path: Path) -> None:
    envelope = one_call(op("crashes_with_a_child"), {"folder": str(tmp_path)})
    assert envelope.code == "WORKER_CRASHED"
    assert not marked(tmp_path)
    assert envelope.meta["duration_ms"] < 3000


# --- neighbours -----------------------------------------------------------------------------------


def test_neighbours_of_a_blocked_loop_are_told_and_those_not_begun_move_on_unharmed(
    tmp_path: Path, validate_envelope: Validate
) -> None:
    async def scenario() -> tuple[list[Envelope], list[Envelope], Envelope]:
        async with a_runtime() as runtime:
            folders = [tmp_path / str(number) for number in range(3)]
            for folder in folders:
                folder.mkdir()
            begun = [
                asyncio.create_task(runtime.call(op("sleeps", mutates=False), {"folder": str(folders[0])}, SOON)),
                asyncio.create_task(runtime.call(op("sleeps"), {"folder": str(folders[1])}, SOON)),
            ]
            await soon(lambda: all((folder / "ready").exists() for folder in folders[:2]))
            clocks = Clocks.of("300ms", grace="300ms")
            blocking = asyncio.create_task(runtime.call(op("blocks"), {"folder": str(folders[2])}, clocks))
            await soon((folders[2] / "ready").exists)
            unbegun = [asyncio.create_task(runtime.call(op("counts"), clocks=SOON)) for _ in range(20)]
            blocked = await blocking
            return [await call for call in begun], [await call for call in unbegun], blocked

    begun, unbegun, blocked = run(scenario())
    assert (blocked.code, blocked.ending) == ("TIMEOUT", "killed")
    (warning,) = blocked.warnings
    assert warning["code"] == "HOST_REPLACED" and warning["context"]["interrupted"] == 2
    for envelope, may_retry in zip(begun, (True, False), strict=True):
        validate_envelope(envelope.to_dict())
        assert (envelope.code, envelope.ending) == ("HOST_REPLACED", "killed")
        assert "blocks blocked its event loop" in envelope.error["message"]
        assert "lost" in envelope.error["message"]
        assert envelope.error["context"] == {"operation": "blocks"}
        assert envelope.error["retryable"] is may_retry
        assert envelope.meta["side_effects"] == ("none" if may_retry else "unknown")
    assert sorted(envelope.value[0] for envelope in unbegun) == list(range(1, 21))  # each once, in the fresh host
    assert all(envelope.warnings == [] for envelope in unbegun)


@pytest.mark.parametrize("blocks", ["blocks_later", "blocks_in_a_task", "blocks_in_a_callback"])
def test_the_limit_of_a_neighbour_ends_the_process_that_a_handler_blocks(blocks: str, tmp_path: Path) -> None:
    async def scenario() -> tuple[Envelope, ...]:
        async with a_runtime() as runtime:
            nap = asyncio.create_task(runtime.call(op("naps"), {"ms": 60_000}, Clocks.of("1s", grace="100ms")))
            await asyncio.sleep(0.05)
            blocking = asyncio.create_task(runtime.call(op(blocks), {"folder": str(tmp_path)}, Clocks.of("30s")))
            await soon((tmp_path / "ready").exists)
            late = asyncio.create_task(runtime.call(op("naps"), {"ms": 1}, Clocks.of("100ms", grace="30s")))
            moved = asyncio.create_task(runtime.call(op("naps"), {"ms": 1}, SOON))
            return await nap, await blocking, await late, await moved

    nap, blocking, late, moved = run(scenario())
    assert moved.value == "rested" and moved.warnings == []
    assert (late.code, late.ending, late.meta["side_effects"]) == ("TIMEOUT", "not_started", "none")
    assert (nap.code, nap.ending) == ("TIMEOUT", "killed")
    assert nap.warnings[0]["code"] == "HOST_REPLACED" and "event loop" in nap.warnings[0]["message"]
    assert (blocking.code, blocking.ending) == ("HOST_REPLACED", "killed")


def test_a_handler_that_swallows_its_cancellation_ends_with_its_process_and_its_neighbours_are_told(
    tmp_path: Path, validate_envelope: Validate
) -> None:
    async def scenario() -> tuple[Envelope, Envelope]:
        async with a_runtime() as runtime:
            old = await pid_of_host(runtime)
            nap = asyncio.create_task(runtime.call(op("naps"), {"ms": 30_000}, Clocks.of("60s")))
            envelope = await runtime.call(op("swallows"), {"folder": str(tmp_path)}, Clocks.of("200ms", grace="100ms"))
            assert not is_running(old) and runtime.counts.abandoned == 0
            assert await pid_of_host(runtime) != old
            return envelope, await nap

    envelope, neighbour = run(scenario())
    validate_envelope(envelope.to_dict())
    assert (envelope.code, envelope.ending) == ("TIMEOUT", "killed")
    assert [warning["code"] for warning in envelope.warnings] == ["HOST_REPLACED"]
    assert 300 <= envelope.meta["duration_ms"] < 2900
    assert (neighbour.code, neighbour.ending) == ("HOST_REPLACED", "killed")
    assert "swallows did not stop when it was cancelled" in neighbour.error["message"]


def test_who_blocks_in_its_clean_up_among_others_is_killed_and_they_are_told(tmp_path: Path) -> None:
    async def scenario() -> list[Envelope]:
        async with a_runtime() as runtime:
            nap = asyncio.create_task(runtime.call(op("naps"), {"ms": 5000}, SOON))
            clocks = Clocks.of("200ms", grace="100ms")
            envelope = await runtime.call(op("blocks_in_finally"), {"folder": str(tmp_path)}, clocks)
            await works(runtime)
            assert runtime.orphans == []
            return [envelope, await nap]

    stopped, nap = run(scenario())
    assert (stopped.code, stopped.ending) == ("TIMEOUT", "killed")
    assert stopped.meta["duration_ms"] < 4500
    assert nap.code == "HOST_REPLACED"


@pytest.mark.parametrize("adversary", corners(["sleeps", "swallows", "blocks"], "swallows"))
def test_after_two_hundred_that_hang_at_once_the_next_call_works(adversary: str, tmp_path: Path) -> None:
    async def scenario(timeout: str) -> list[Envelope]:
        async with a_runtime() as runtime:
            clocks = Clocks.of(timeout, grace="300ms")
            calls = [runtime.call(op(adversary), {"folder": str(tmp_path)}, clocks) for _ in range(200)]
            envelopes = await asyncio.gather(*calls)
            envelope, took_ms = await timed(runtime.call(NOOP, clocks=NEXT_CALL))
            assert envelope.value == 1 and took_ms < 3000
            assert runtime.orphans == []
            return envelopes

    endings = {"sleeps": {"cancelled"}, "swallows": {"killed"}, "blocks": {"killed", "not_started"}}
    for timeout in ("500ms", "2s", "6s"):  # a busy machine takes a while to start two hundred
        envelopes = run(scenario(timeout), within=40)
        assert {envelope.code for envelope in envelopes} == {"TIMEOUT"}
        assert max(envelope.meta["duration_ms"] for envelope in envelopes) < 15_000
        if {envelope.ending for envelope in envelopes} <= endings[adversary]:
            break
    assert {envelope.ending for envelope in envelopes} <= endings[adversary]


# --- callers that leave ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "adversary", corners(["sleeps", "blocks", "swallows", "blocks_in_finally", "stops_itself"], "sleeps", "swallows")
)
def test_a_caller_that_is_cancelled_stops_the_work_within_its_grace(adversary: str, tmp_path: Path) -> None:
    async def scenario() -> float:
        async with a_runtime() as runtime:
            clocks = Clocks.of("60s", grace="200ms")
            call = asyncio.create_task(runtime.call(op(adversary), {"folder": str(tmp_path)}, clocks))
            await soon((tmp_path / "ready").exists)
            call.cancel()
            began = time.perf_counter()
            with pytest.raises(asyncio.CancelledError):
                await asyncio.wait_for(call, 5)
            took_ms = (time.perf_counter() - began) * 1000
            assert adversary == "sleeps" or not marked(tmp_path)
            (host,) = runtime._children.shared()._all
            assert not host.calls
            await works(runtime)
            return took_ms

    assert run(scenario()) < 4000


def test_a_caller_that_leaves_before_the_host_is_up_leaves_nothing_behind(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with Runtime(preload=["tests.calls.guests"]) as runtime:
            call = asyncio.create_task(runtime.call(op("sleeps"), {"folder": str(tmp_path)}, SOON))
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call
            await works(runtime)
            assert list(tmp_path.iterdir()) == []

    run(scenario())


def test_a_bell_that_rings_before_the_host_is_up_means_that_nothing_began(tmp_path: Path) -> None:
    async def scenario() -> list[Envelope]:
        async with Runtime(preload=["tests.calls.guests"]) as runtime:
            arguments = {"folder": str(tmp_path)}
            bell = runtime.call(op("sleeps"), arguments, Clocks.of("5ms"))
            queue = runtime.call(op("sleeps"), arguments, Clocks.of("10s", queue="5ms"))
            envelopes = await asyncio.gather(bell, queue)
            await works(runtime)
            assert list(tmp_path.iterdir()) == []
            return envelopes

    bell, queue = run(scenario())
    assert (bell.code, bell.ending) == ("TIMEOUT", "not_started")
    assert (queue.code, queue.ending) == ("QUEUE_TIMEOUT", "not_started")


@pytest.mark.parametrize(
    "adversary", corners(["sleeps", "blocks", "daemonises_and_blocks", "swallows"], "daemonises_and_blocks")
)
def test_a_runtime_that_is_closed_in_mid_call_stops_everything_and_answers(adversary: str, tmp_path: Path) -> None:
    async def scenario() -> Envelope:
        async with a_runtime() as runtime:
            call = asyncio.create_task(runtime.call(op(adversary), {"folder": str(tmp_path)}, Clocks.of("60s")))
            await soon((tmp_path / "ready").exists)
            _, took_ms = await timed(runtime.close())
            assert took_ms < 4500
            assert not marked(tmp_path)
            return await asyncio.wait_for(call, 5)

    envelope = run(scenario())
    assert (envelope.code, envelope.ending) == ("CANCELLED", "killed")


# --- kill -9 --------------------------------------------------------------------------------------

SUPERVISOR, PRELOADED, CLEAN = 0, 1, 3


@pytest.mark.parametrize("victim", ["host", "supervisor"])
def test_when_the_host_or_its_supervisor_is_killed_those_in_it_are_told_and_the_tree_is_gone(
    victim: str, tmp_path: Path, validate_envelope: Validate
) -> None:
    async def scenario() -> Envelope:
        async with a_runtime() as runtime:
            call = asyncio.create_task(runtime.call(op("daemonises"), {"folder": str(tmp_path)}, Clocks.of("30s")))
            host = await soon(lambda: mark_of(tmp_path, "ready"))
            (host if victim == "host" else host.parents()[SUPERVISOR]).kill()
            envelope = await asyncio.wait_for(call, DEAD_WITHIN_S)
            await soon(lambda: not marked(tmp_path), within=DEAD_WITHIN_S)
            await works(runtime)
            return envelope

    envelope = run(scenario())
    validate_envelope(envelope.to_dict())
    expected = ("WORKER_CRASHED", "finished") if victim == "host" else ("SUPERVISOR_LOST", "killed")
    assert (envelope.code, envelope.ending) == expected


@pytest.mark.parametrize("victims", [(PRELOADED, CLEAN)])
def test_when_zygotes_are_killed_calls_go_on_and_a_fresh_host_can_still_be_had(
    victims: tuple[int, ...], tmp_path: Path
) -> None:
    async def scenario() -> None:
        async with a_runtime() as runtime:
            host = psutil.Process(await pid_of_host(runtime))
            nap = asyncio.create_task(runtime.call(op("naps"), {"ms": 300}, SOON))
            chain = host.parents()
            assert chain[PRELOADED].name() == chain[CLEAN].name() == "clock-zygote"
            for victim in victims:
                chain[victim].kill()
            assert (await nap).value == "rested"
            assert await pid_of_host(runtime) == host.pid
            assert (await runtime.call(op("crashes"), {"how": "exit"}, SOON)).code == "WORKER_CRASHED"
            for _ in range(3):
                await works(runtime)

    run(scenario())


def test_when_the_runtime_is_killed_the_host_and_everything_below_it_dies(tmp_path: Path, no_survivors: Any) -> None:
    script = (
        "import asyncio, sys\n"
        "from shotclock import Clocks, Operation, Runtime\n"
        "from tests.calls import guests\n"
        "async def main():\n"
        "    async with Runtime(preload=['tests.calls.guests']) as runtime:\n"
        "        operation = Operation('daemonises', guests.daemonises, isolation='shared')\n"
        "        await runtime.call(operation, {'folder': sys.argv[1]}, Clocks.of('60s'))\n"
        "asyncio.run(main())\n"
    )
    process = subprocess.Popen([sys.executable, "-c", script, str(tmp_path)], cwd=ROOT)
    try:
        eventually(lambda: mark_of(tmp_path, "ready"), within=15)
        assert {"ready", "daemon"} <= marked(tmp_path).keys()
    finally:
        process.kill()
        process.wait(5)
    eventually(lambda: not marked(tmp_path), within=DEAD_WITHIN_S)
    assert no_survivors.wait_until_alone(DEAD_WITHIN_S) == []


def test_a_host_that_is_stopped_from_outside_while_idle_is_found_out_by_the_next_bell() -> None:
    async def scenario() -> Envelope:
        async with a_runtime() as runtime:
            os.kill(await pid_of_host(runtime), signal.SIGSTOP)
            envelope = await runtime.call(NOOP, clocks=Clocks.of("200ms", grace="200ms"))
            await works(runtime)
            return envelope

    envelope = run(scenario())
    assert (envelope.code, envelope.ending) == ("TIMEOUT", "not_started")
    assert envelope.meta["duration_ms"] < 3000


def test_hosts_that_die_while_they_start_are_not_started_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    starts = 0
    init = executor.Worker.__init__

    def die_at_once(self: Any, *arguments: Any) -> None:
        nonlocal starts
        starts += 1
        init(self, *arguments)
        self.kill("a test")

    async def scenario() -> Envelope:
        async with Runtime(preload=["tests.calls.guests"]) as runtime:
            monkeypatch.setattr(executor.Worker, "__init__", die_at_once)
            envelope = await runtime.call(NOOP, clocks=Clocks.of("15s"))
            monkeypatch.setattr(executor.Worker, "__init__", init)
            await works(runtime)
            return envelope

    envelope = run(scenario())
    assert (envelope.code, envelope.ending) == ("SPAWN_FAILED", "not_started")
    assert starts == executor.MOST_FAILED_STARTS
    assert envelope.meta["duration_ms"] > 1000 * executor.RESPAWN_PAUSE_S * (executor.MOST_FAILED_STARTS - 1)


# --- right at the deadline ------------------------------------------------------------------------
