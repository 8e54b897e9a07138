"""Everything at once, at random, with the tables turned on us: kills, cancellations, a blocked loop.

Each round is made from its seed, which a failure names; `python -m tests.calls.test_stress SEED [ROUNDS]` runs it
again. What must hold whatever happens: every call is answered once and on time, with an answer of its own; nothing is
left, no process, no descriptor, no call in a queue; and the runtime that was left alone does nothing.
"""

import asyncio
import contextlib
import faulthandler
import os
import random
import sys
import time
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from shotclock import Clocks, Context, Operation, Runtime
from tests.calls import guests, operations, work
from tests.calls.bounds import ROOT, soon

pytestmark = pytest.mark.usefixtures("no_survivors")

# Past timeout and grace. The machine's other work runs it out, a kernel that is slow to kill, and nothing of ours.
LATE_S = 4.0
# What a round may take: its calls are short, and even those that nobody answers are over by then.
ROUND_LIMIT_S = 60
# A call that all is well again.
RECOVERY = Clocks.of("20s")
# What a runtime that nobody calls may use of a core. A timer that goes round does more than that.
IDLE_S, IDLE_SHARE = 0.3, 0.2

KILLED = ("SUPERVISOR_LOST", "WORKER_CRASHED", "SPAWN_FAILED", "COMMAND_FAILED")
"""What is said where somebody has killed what ran the call."""
CLOSED = ("SHUTTING_DOWN", "CANCELLED", "SPAWN_FAILED")
END_BY_THEMSELVES = ("noop", "echo", "talks", "asks_twice", "dies", "crashes", "falls_through", "raises", "leaves")
# How long those may take that have all the time they want: what they need may be killed under them again and again.
UNHURRIED_MS = 5000


def dies_at_random(chance: float, seed: int) -> str:
    if random.Random(seed).random() < chance:
        os._exit(7)
    return "lived"


def forks_and_falls_through(number: int) -> int:
    """Both sides of the fork come back. Only one of them was called."""
    if os.fork() == 0:
        return -number
    return number


def asks_twice(ctx: Context, number: int, size: int) -> list[Any]:
    found = []
    for _ in range(2):
        envelope = ctx.call("echo", {"value": [number, b"x" * size]}, timeout="500ms")
        found.append(envelope.value[0] if envelope.ok else envelope.code)
    return found


def talks(ctx: Context, count: int) -> int:
    for number in range(count):
        ctx.progress(number, count, "words")
    return count


OPERATIONS = [
    Operation("noop", operations.noop),
    Operation("echo", operations.echo),
    Operation("note", operations.note),
    Operation("talks", talks),
    Operation("asks_twice", asks_twice),
    Operation("dies", dies_at_random),
    Operation("crashes", operations.crashes),
    Operation("falls_through", forks_and_falls_through),
    Operation("leaves", operations.leaves_processes),
    Operation("stubborn", work.swallows_everything),
    Operation("sleeps", work.sleeps),
    Operation("winds_down", operations.works_until_asked_to_stop),
    Operation("says_it_lives", operations.says_it_lives),
    Operation("silent", operations.is_silent),
    Operation("raises", operations.raises),
    Operation("guest_noop", guests.noop, isolation="shared"),
    Operation("guest_echo", guests.echo, isolation="shared"),
    Operation("guest_naps", guests.naps, isolation="shared"),
    Operation("guest_blocks", guests.blocks, isolation="shared"),
    Operation("guest_swallows", guests.swallows, isolation="shared"),
    Operation("guest_crashes", guests.crashes, isolation="shared"),
    Operation("guest_asks", guests.asks_further, isolation="shared"),
]


class Round:
    """One seed's worth of trouble."""

    def __init__(self, seed: int, folder: Path, validate: Callable[[dict[str, Any]], object], calls: int) -> None:
        self.dice = random.Random(seed)
        self.seed, self.folder, self.validate, self.calls = seed, folder, validate, calls
        dice = self.dice
        self.warm = dice.randint(1, 4)
        self.most = self.warm + dice.choice([0, 0, 1, 6])
        self.callers = dice.choice([1, 3, 8, 24])
        # Who guards what a killed supervisor left is its zygote: one of the two is killed, never both.
        self.targets = dice.choice(
            [(), (), ("shotclock-work", "shotclock-host"), ("shotclock-work", "shotclock-sup"), ("clock-zygote",)]
        )
        self.blocks = dice.random() < 0.4
        self.freezes = dice.random() < 0.4
        self.cancels = dice.choice([0.0, 0.1, 0.5])
        self.hosts = dice.random() < 0.5
        self.only = dice.choice([None, None, "quick", "nested", "big"])
        self.blocked: list[tuple[float, float]] = []
        self.told: list[str] = []
        self.closes = False
        self.answered = 0
        self.killed = 0

    def __str__(self) -> str:
        return (
            f"seed {self.seed}: workers {self.warm}-{self.most}, {self.callers} callers, {self.only or 'everything'}, "
            f"kills {' and '.join(self.targets) or 'nobody'}, cancels {self.cancels:.0%}"
            f"{', freezes' if self.freezes and self.targets else ''}"
            f"{', blocks' if self.blocks else ''}: {self.answered} answers, {self.killed} kills"
        )

    # --- the calls ------------------------------------------------------------------------------------

    async def run(self) -> None:
        descriptors = open_descriptors()
        async with Runtime(
            operations=OPERATIONS,
            preload=["tests.calls.operations", "tests.calls.guests", __name__],
            workers=self.warm,
            most_workers=self.most,
        ) as runtime:
            if self.dice.random() < 0.7:
                await runtime.warm_up()
            trouble = [asyncio.create_task(self._kill())] if self.targets else []
            trouble += [asyncio.create_task(self._block())] if self.blocks else []
            try:
                await asyncio.gather(*[self._caller(runtime, n) for n in range(self.callers)])
            finally:
                for task in trouble:
                    task.cancel()
                await asyncio.wait(trouble, timeout=1) if trouble else None
            await self._is_well(runtime)
            if self.dice.random() < 0.3:  # closing takes those who are still there with it
                await self._close_on(runtime)
        del runtime
        await soon(lambda: open_descriptors() <= descriptors, within=2)

    async def _is_well(self, runtime: Runtime) -> None:
        for name in ("noop", "guest_noop") if self.hosts else ("noop",):
            for _ in range(3):  # what was killed a moment ago may be what it is given
                envelope = await runtime.call(name, clocks=RECOVERY)
                if envelope.ok or not self.targets:
                    break
            assert envelope.ok, (name, envelope.to_dict())
        pool = runtime._children.pool()
        assert not pool._waiting, "a call is left in the queue"
        await soon(lambda: not any(worker.calls for worker in (*pool._all, *pool._leaving)), within=4)
        assert not runtime._children.commands.running
        assert len(set(pool._free)) == len(pool._free), "a worker is free twice"
        await soon(lambda: not pool._leaving, within=4)
        before = time.process_time()
        await asyncio.sleep(IDLE_S)
        used = time.process_time() - before
        assert used < IDLE_S * IDLE_SHARE, f"{used:.3f} s of processor time in {IDLE_S} s of nothing to do"

    async def _close_on(self, runtime: Runtime) -> None:
        self.closes = True
        late = [asyncio.create_task(self._one(runtime, 100_000 + n)[1]) for n in range(8)]
        await asyncio.sleep(self.dice.random() * self.dice.choice([0.001, 0.05]))
        began = time.monotonic()
        await runtime.close()
        assert time.monotonic() - began < 4 + LATE_S, "closing hung"
        done, left = await asyncio.wait(late, timeout=LATE_S)
        assert not left, f"{len(left)} calls were not answered by a runtime that closed"
        await asyncio.gather(*done)

    async def _caller(self, runtime: Runtime, number: int) -> None:
        for n in range(self.calls // max(3, self.callers)):  # one alone would take long over it
            began = time.monotonic()
            limit_s, calling = self._one(runtime, number * 1000 + n)
            task = asyncio.create_task(calling)
            try:
                if self.dice.random() < self.cancels:
                    await asyncio.wait([task], timeout=self.dice.random() * self.dice.choice([0.002, 0.02, 0.2]))
                    task.cancel()
                    if self.dice.random() < 0.5:
                        await asyncio.wait([task], timeout=self.dice.random() * self.dice.choice([0.0, 0.002, 0.03]))
                        task.cancel()
                await asyncio.wait([task], timeout=limit_s + 10)
            finally:
                took_s = time.monotonic() - began
            allowed_s = limit_s + LATE_S + self._blocked_since(began)
            what = self.told[-1] if self.told else ""
            assert task.done(), f"call {number * 1000 + n} hangs ({what})"
            assert took_s <= allowed_s, f"{took_s:.2f} s instead of {allowed_s:.2f}: {task}"
            self.answered += 1
            if not task.cancelled():
                await task

    def _blocked_since(self, began: float) -> float:
        return sum(max(0.0, end - max(began, start)) for start, end in self.blocked)

    def _one(self, runtime: Runtime, number: int) -> tuple[float, Coroutine[Any, Any, None]]:
        """Any call, and within which time it is over if nothing is wrong with us."""
        dice = self.dice
        grace_ms = dice.choice([0, 20, 50, 200])
        timeout_ms = dice.choice([30, 100, 400, 400, 1500])
        clocks = Clocks(timeout_ms=timeout_ms, grace_ms=grace_ms)
        if dice.random() < 0.15:
            clocks = Clocks(timeout_ms=timeout_ms, grace_ms=grace_ms, soft_ms=max(1, timeout_ms // 3))
        elif dice.random() < 0.15:
            clocks = Clocks(timeout_ms=timeout_ms, grace_ms=grace_ms, idle_ms=dice.choice([5, 30, 100]))
        elif dice.random() < 0.15:
            clocks = Clocks(timeout_ms=timeout_ms, grace_ms=grace_ms, queue_ms=dice.choice([1, 20, 100]))
        folder = str(self.folder)
        quick: list[tuple[str, dict[str, Any], object]] = [
            ("noop", {}, 1),
            ("echo", {"value": number}, number),
            ("echo", {"value": number}, number),
            ("talks", {"count": dice.choice([1, 10, 300])}, None),
        ]
        nested: list[tuple[str, dict[str, Any], object]] = [
            ("asks_twice", {"number": number, "size": dice.choice([0, 10, 300_000])}, None),
            ("echo", {"value": number}, number),
        ]
        size = dice.choice([10_000, 200_000, 300_000, 3_000_000])
        big: list[tuple[str, dict[str, Any], object]] = [
            ("echo", {"value": [number, b"x" * size]}, [number, b"x" * size]),
            ("echo", {"value": number}, number),
            ("asks_twice", {"number": number, "size": dice.choice([0, 300_000])}, None),
        ]
        slow: list[tuple[str, dict[str, Any], object]] = [
            ("note", {"path": f"{folder}/notes.new", "number": number, "nap_ms": dice.choice([1, 6, 40, 200])}, number),
            ("dies", {"chance": 0.5, "seed": number}, None),
            ("crashes", {"how": dice.choice(["SIGSEGV", "SIGKILL", "exit"])}, None),
            ("falls_through", {"number": number}, number),
            ("sleeps", {"folder": folder}, None),
            ("stubborn", {"folder": folder}, None),
            ("winds_down", {}, None),
            ("says_it_lives", {"ms": 60}, None),
            ("silent", {"ms": 60}, None),
            ("raises", {"which": "rich"}, None),
            ("leaves", {"folder": folder, "count": 2}, None),
        ]
        if self.hosts:
            slow += [
                ("guest_noop", {}, 1),
                ("guest_echo", {"value": [number, b"x" * size]}, [number, b"x" * size]),
                ("guest_naps", {"ms": 20}, "rested"),
                ("guest_blocks", {"folder": folder}, None),
                ("guest_swallows", {"folder": folder}, None),
                ("guest_crashes", {"how": "exit"}, None),
                ("guest_asks", {"operation": "echo", "arguments": {"value": number}, "clocks": {}}, None),
            ]
        if self.only is None and dice.random() < 0.2:
            return (timeout_ms + grace_ms) / 1000, self._command(runtime, clocks, number)
        pick = {"quick": quick, "nested": nested, "big": big, None: quick + nested + big + slow}[self.only]
        name, arguments, expected = dice.choice(pick)
        if name in END_BY_THEMSELVES and dice.random() < 0.2:  # no bell will come to the rescue of what was lost
            timeout_ms, clocks = UNHURRIED_MS, Clocks(timeout_ms=0, grace_ms=grace_ms)
        self.told.append(f"{number} {name} {clocks}")
        limit_s = (timeout_ms + max(grace_ms, 150 if name.startswith("guest") else 0)) / 1000
        return limit_s, self._function(runtime, name, arguments, clocks, expected)

    async def _function(
        self, runtime: Runtime, name: str, arguments: dict[str, Any], clocks: Clocks, expected: object
    ) -> None:
        envelope = await runtime.call(name, arguments, clocks)
        self.validate(envelope.to_dict())
        if envelope.ok and expected is not None:
            assert envelope.value == expected, f"the answer of another call: {str(envelope.value)[:80]}"
        if name == "asks_twice" and envelope.ok:
            answers = [answer for answer in envelope.value if isinstance(answer, int)]
            assert all(answer == arguments["number"] for answer in answers), envelope.value
        known = {"TIMEOUT", "STALLED", "QUEUE_TIMEOUT", *self._excuses()}
        known |= {"crashes": {"WORKER_CRASHED"}, "dies": {"WORKER_CRASHED"}, "raises": {"INTERNAL_ERROR"}}.get(
            name, set()
        )
        if name.startswith("guest"):
            known |= {"HOST_REPLACED", "WORKER_CRASHED", "CANCELLED"}
        assert envelope.ok or envelope.code in known, (name, envelope.to_dict())

    async def _command(self, runtime: Runtime, clocks: Clocks, number: int) -> None:
        script = self.dice.choice(
            [
                f"echo {number}",
                f"echo {number}",
                "exec sleep 30",
                "trap '' TERM; sleep 30",
                "setsid sleep 30 & sleep 30",
                "setsid sleep 30 >/dev/null 2>&1 &",
                "kill -9 $$",
                "yes",
            ]
        )
        self.told.append(f"{number} {script} {clocks}")
        env = {"BALLAST": "x" * 120_000, "MORE": "x" * 120_000} if self.dice.random() < 0.2 else {}
        envelope = await runtime.run(["sh", "-c", script], clocks, env=env, output_limit=10_000)
        self.validate(envelope.to_dict())
        if envelope.ok and script.startswith("echo"):
            assert envelope.data["stdout"] == f"{number}\n", envelope.to_dict()
        known = {"TIMEOUT", "STALLED", "COMMAND_FAILED", *self._excuses()}
        assert envelope.ok or envelope.code in known, (script, envelope.to_dict())

    def _excuses(self) -> set[str]:
        return {*(KILLED if self.targets else ()), *(CLOSED if self.closes else ())}

    # --- the trouble ----------------------------------------------------------------------------------

    async def _kill(self) -> None:
        while True:  # ends with the round: it is cancelled
            await asyncio.sleep(self.dice.random() * self.dice.choice([0.01, 0.1, 0.3]))
            names = {process: named(process) for process in ours()}
            candidates = [process for process, name in names.items() if name in self.targets]
            if not candidates or "shotclock-work" not in names.values():
                continue  # if those that only import were killed as well, nothing would ever come up
            victim = self.dice.choice(candidates)
            self.killed += 1
            with contextlib.suppress(psutil.Error):
                if self.freezes and self.dice.random() < 0.5:
                    await self._freeze(victim)
                else:
                    victim.kill()

    async def _freeze(self, victim: psutil.Process) -> None:
        """As a machine does that has no memory left. What it was to do is done that much later."""
        began = time.monotonic()
        victim.suspend()
        try:
            await asyncio.sleep(self.dice.random() * self.dice.choice([0.02, 0.3]))
        finally:
            with contextlib.suppress(psutil.Error):  # in the place of a cancellation it would keep us here for ever
                victim.resume()
            self.blocked.append((began, time.monotonic()))

    async def _block(self) -> None:
        while True:  # ends with the round: it is cancelled
            await asyncio.sleep(self.dice.random() * 0.3)
            began = time.monotonic()
            time.sleep(self.dice.random() * self.dice.choice([0.02, 0.2]))
            self.blocked.append((began, time.monotonic()))


def ours() -> list[psutil.Process]:
    return psutil.Process().children(recursive=True)


def named(process: psutil.Process) -> str:
    try:
        return process.name()
    except psutil.Error:
        return ""


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


@contextlib.contextmanager
def watched(what: Callable[[], str]) -> Iterator[None]:
    """Says which round it was, and where everybody stood if it does not end."""
    faulthandler.dump_traceback_later(ROUND_LIMIT_S + 5)
    try:
        yield
    except BaseException as error:
        error.add_note(what())
        raise
    finally:
        faulthandler.cancel_dump_traceback_later()


def stress(seed: int, folder: Path, validate: Callable[[dict[str, Any]], object], calls: int = 60) -> Round:
    one = Round(seed, folder, validate, calls)
    with watched(lambda: str(one)):
        asyncio.run(asyncio.wait_for(one.run(), ROUND_LIMIT_S))
    return one


@pytest.mark.slow
@pytest.mark.parametrize("seed", [79, random.randrange(10**6)], ids=["zygotes", "another"])
def test_a_round_of_everything_at_random_loses_no_call_and_leaves_nothing(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, validate_envelope: Callable[..., Any]
) -> None:
    monkeypatch.chdir(ROOT)
    stress(seed, tmp_path, validate_envelope)


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_many_rounds_of_everything_at_random_lose_no_call_and_leave_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, validate_envelope: Callable[..., Any]
) -> None:
    monkeypatch.chdir(ROOT)
    first = random.randrange(10**6)
    for seed in range(first, first + 100):
        stress(seed, tmp_path, validate_envelope)


if __name__ == "__main__":
    import tempfile

    first, count = int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 1
    bad = 0
    for seed in range(first, first + count):
        with tempfile.TemporaryDirectory() as scratch:
            began = time.monotonic()
            try:
                one = stress(seed, Path(scratch), lambda envelope: None)
                print(f"ok   {time.monotonic() - began:4.1f} s {one}", flush=True)
            except BaseException as error:
                bad += 1
                print(f"FAIL {type(error).__name__}: {str(error)[:700]} {error.__notes__}", flush=True)
                if isinstance(error, KeyboardInterrupt):
                    raise
            for process in ours():
                print("     left:", process.pid, named(process), flush=True)
    sys.exit(bad > 0)
