"""The same commands called from Python: inside and outside `async with app`, with options of one call, cancelled."""

import asyncio
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from shotclock import App, Context, Failure
from shotclock.core.envelope import Envelope

from .conftest import Home, lines_of, wait_for

pytestmark = pytest.mark.usefixtures("no_survivors")

app = App("library", default_timeout="20s", grace="200ms", version="1.0.0")


@app.command(mutates=False)
def add(a: int, b: int = 2) -> int:
    return a + b


@app.command(mutates=False)
async def add_async(a: int, b: int = 2) -> int:
    return a + b


@app.command
def sleeps(folder: Path, seconds: float = 60.0) -> None:
    (folder / "up").write_text(str(os.getpid()))
    time.sleep(seconds)


@app.command
async def sleeps_async(folder: Path) -> None:
    (folder / "up").write_text(str(os.getpid()))
    try:
        await asyncio.sleep(60)
    finally:
        (folder / "tidied").touch()


@app.command(mutates=False, isolation="inline")
async def shares(thing: Any) -> str:
    return type(thing).__name__


@app.command
def charge(folder: Path, amount: int) -> int:
    with open(folder / "notes", "a") as notes:
        notes.write(f"{amount}\n")
    return amount


@app.command(single_flight="x", queue="30s")
def in_turn(folder: Path, seconds: float = 0.05) -> None:
    with open(folder / "inside", "a") as inside:
        inside.write("in\n")
        inside.flush()
        time.sleep(seconds)
        inside.write("out\n")


@app.command(interruption=True)
def long_work(folder: Path, seconds: float, ctx: Context) -> str:
    for number in range(int(seconds * 20)):
        ctx.progress(number, int(seconds * 20))
        time.sleep(0.05)
    return "done"


@app.command(steps=["one", "two"])
async def stepped(ctx: Context) -> None:
    ctx.step("one")
    ctx.step("two")
    raise Failure("STORE_BUSY", "made up")


@app.command(mutates=False)
async def counts(ctx: Context) -> int:
    for number in range(5):
        ctx.progress(number + 1, 5)
    return (await ctx.call("add-async", {"a": 1})).value


def run(scenario: Any) -> Any:
    return asyncio.run(asyncio.wait_for(scenario, 60))


@pytest.mark.slow
@pytest.mark.parametrize("command", ["add", "add-async"])
def test_a_call_is_one_envelope_with_or_without_a_runtime_that_stays(command: str, validate_envelope: Any):
    async def scenario() -> list[Envelope]:
        outside = await app.call(command, a=1)
        async with app:
            return [outside, *[await app.call(command, a=number) for number in range(3)]]

    envelopes = run(scenario())
    assert [envelope.value for envelope in envelopes] == [3, 2, 3, 4]
    for envelope in envelopes:
        shown = validate_envelope(envelope.to_dict())
        assert shown["meta"]["timeout_ms"] == 20_000 and shown["meta"]["tool_version"] == "1.0.0"


@pytest.mark.slow
def test_event_loops_of_several_threads_call_it_at_the_same_time() -> None:
    both = threading.Barrier(2, timeout=20)

    async def scenario() -> list[Envelope]:
        async with app:
            both.wait()
            answers = await asyncio.gather(*(app.call("add", a=number) for number in range(3)))
            both.wait()
        return answers

    with ThreadPoolExecutor(2) as pool:
        for running in [pool.submit(run, scenario()) for _ in range(2)]:
            assert [answer.value for answer in running.result(30)] == [2, 3, 4]


@pytest.mark.slow
@pytest.mark.requirement("F-015")
def test_wrong_arguments_and_unknown_commands_are_envelopes_and_no_exceptions(validate_envelope: Any):
    async def scenario() -> list[Envelope]:
        async with app:
            return [
                await app.call("add", a="x", b="y", c=1),
                await app.call("add-async", a=[]),
                await app.call("nope"),
                await app.call("add"),
            ]

    first, second, third, fourth = [validate_envelope(envelope.to_dict()) for envelope in run(scenario())]
    assert sorted(problem["field"] for problem in first["error"]["errors"]) == ["a", "b", "c"]
    assert second["error"]["code"] == fourth["error"]["code"] == "ARG_ERROR"
    assert third["error"]["code"] == "UNKNOWN_OPERATION"


@pytest.mark.slow
def test_what_lives_in_this_process_may_be_passed_to_a_command_on_its_loop(validate_envelope: Any):
    """Also where it cannot be written down; only what has to be written down is refused."""

    async def scenario() -> list[Envelope]:
        async with app:
            return [
                await app.call("shares", thing=asyncio.Lock()),
                await app.call_with("shares", {"thing": asyncio.Lock()}, idempotency_key="k"),
                await app.call("add", a=asyncio.Lock()),
                await app.call("long-work", folder=asyncio.Lock(), seconds=1),
            ]

    shared, *refused = run(scenario())
    assert shared.value == "Lock"
    for envelope in refused:
        assert validate_envelope(envelope.to_dict())["error"]["code"] == "ARG_ERROR"


@pytest.mark.slow
@pytest.mark.requirement("F-011")
@pytest.mark.parametrize("command", ["sleeps", "sleeps-async"])
def test_the_timeout_of_one_call_is_beside_its_arguments(command: str, tmp_path: Path, validate_envelope: Any):
    async def scenario() -> Envelope:
        async with app:
            return await app.call_with(command, {"folder": str(tmp_path)}, timeout="1s")

    envelope = validate_envelope(run(scenario()).to_dict())
    assert envelope["error"]["code"] == "TIMEOUT" and envelope["meta"]["timeout_ms"] == 1000
    assert envelope["meta"]["duration_ms"] < 3000


@pytest.mark.slow
@pytest.mark.requirement("F-030")
@pytest.mark.parametrize("command", ["sleeps", "sleeps-async"])
def test_cancelling_the_caller_stops_the_work(command: str, tmp_path: Path):
    async def scenario() -> None:
        async with app:
            calling = asyncio.ensure_future(app.call(command, folder=str(tmp_path)))
            for _ in range(1000):
                if (tmp_path / "up").exists() and (tmp_path / "up").read_text():
                    break
                await asyncio.sleep(0.01)
            calling.cancel()
            with pytest.raises(asyncio.CancelledError):
                await calling
            if command == "sleeps":
                pid = int((tmp_path / "up").read_text())
                wait_for(lambda: not Path(f"/proc/{pid}").exists(), "the worker to be gone", within_s=3)
            else:
                wait_for((tmp_path / "tidied").exists, "the clean-up", within_s=3)
            assert (await app.call("add", a=1)).value == 3, "the next call works"

    run(scenario())


@pytest.mark.slow
@pytest.mark.requirement("C-007")
def test_a_key_works_from_python_too(tmp_path: Path):
    async def scenario() -> list[Envelope]:
        async with app:
            arguments = {"folder": str(tmp_path), "amount": 5}
            calls = [app.call_with("charge", arguments, idempotency_key="k") for _ in range(3)]
            same = await asyncio.gather(*calls)
            other = await app.call_with("charge", {"folder": str(tmp_path), "amount": 6}, idempotency_key="k")
            return [*same, other]

    *same, other = run(scenario())
    assert [envelope.to_dict()["data"] for envelope in same] == [{"result": 5}] * 3
    assert other.code == "KEY_REUSED"
    assert lines_of(tmp_path / "notes") == ["5"]


@pytest.mark.slow
@pytest.mark.requirement("F-033")
def test_calls_of_one_process_stand_in_the_same_line(tmp_path: Path):
    async def scenario() -> list[Envelope]:
        async with app:
            return await asyncio.gather(*(app.call("in-turn", folder=str(tmp_path)) for _ in range(6)))

    assert all(envelope.ok for envelope in run(scenario()))
    assert lines_of(tmp_path / "inside") == ["in", "out"] * 6


@pytest.mark.slow
@pytest.mark.requirement("F-082")
@pytest.mark.requirement("F-080")
def test_a_budget_hands_the_work_over_and_the_identical_call_gets_it_back(
    tmp_path: Path, home: Home, validate_envelope: Any
):
    heard: list[int] = []

    async def scenario() -> list[Envelope]:
        arguments = {"folder": str(tmp_path), "seconds": 3.0}
        async with app:
            first = await app.call_with("long-work", arguments, budget="1s")
            second = await app.call_with("long-work", arguments, on_progress=lambda done, *_: heard.append(done))
            return [first, second]

    first, second = (validate_envelope(envelope.to_dict()) for envelope in run(scenario()))
    assert first["error"]["code"] == "INCOMPLETE" and first["meta"]["budget_ms"] == 1000
    assert second["data"] == {"result": "done"} and second["meta"]["job_id"] == first["data"]["job_id"]
    assert heard and heard == sorted(heard)
    assert len(home.jobs()) == 1


@pytest.mark.slow
@pytest.mark.requirement("C-008")
def test_steps_and_progress_are_heard_here_as_well(validate_envelope: Any):
    heard: list[Any] = []

    async def scenario() -> list[Envelope]:
        async with app:
            return [
                await app.call("stepped"),
                await app.call_with("counts", {}, on_progress=lambda *said: heard.append(said)),
            ]

    stepped, counted = run(scenario())
    data = validate_envelope(stepped.to_dict())["data"]
    assert data["completed_steps"] == ["one"] and data["failed_step"] == "two"
    assert counted.value == 3
    assert heard[-1] == (5, 5, None)


@pytest.mark.slow
def test_an_app_can_be_entered_again_and_calls_outside_do_not_close_it():
    async def scenario() -> list[Any]:
        values = []
        for _ in range(2):
            async with app:
                values += [
                    envelope.value for envelope in await asyncio.gather(*(app.call("add-async", a=n) for n in range(3)))
                ]
        values.append((await app.call("add-async", a=9)).value)
        return values

    assert run(scenario()) == [2, 3, 4, 2, 3, 4, 11]


@pytest.mark.slow
def test_calls_at_the_same_time_without_a_context_do_not_close_each_other():
    """Each of them opens what it needs; one that ends first must not take the others with it."""

    async def scenario() -> list[Any]:
        return await asyncio.gather(*(app.call("add-async", a=n) for n in range(4)), app.call("add", a=1))

    assert [envelope.value for envelope in run(scenario())] == [2, 3, 4, 5, 3]
