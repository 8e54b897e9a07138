"""The lifespan of an App: opened once in the shared process, rebuilt with it, and closed at an orderly end."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Annotated

import pytest

from shotclock import App, Context, Depends, Envelope
from shotclock.apps.app import call_request
from tests.apps.app.stateful import app
from tests.calls.bounds import run, soon, timed

pytestmark = [pytest.mark.usefixtures("no_survivors")]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("STATEFUL_FOLDER", str(tmp_path))
    return tmp_path


def events(folder: Path) -> list[str]:
    log = folder / "log"
    return log.read_text().split("\n")[:-1] if log.exists() else []


def misbehave(folder: Path, *misdeeds: str) -> None:
    (folder / "do").write_text("".join(f"{each}\n" for each in misdeeds))


def codes(envelope: Envelope) -> list[str]:
    return [each["code"] for each in envelope.warnings]


# --- where commands run ---------------------------------------------------------------------------


def test_commands_that_read_the_state_run_where_it_is_and_others_do_not() -> None:
    catalogue = app.catalogue()
    shared = {"count", "counted", "counted-by-helper", "end-lifespan", "die"}
    assert {spec.hyphenated for spec in catalogue.commands if spec.isolation == "shared" and spec.uses_state} >= shared
    for name in ("plain", "in_process", "beside", "says_where"):
        spec = catalogue.find(name)
        assert spec is not None and not spec.uses_state, name
    assert all(spec.isolation == "shared" for spec in catalogue.served)
    assert {each.place for each in app._operations() if each.name == "count"} == {"shared"}


def test_a_helper_is_found_by_its_name_or_annotation_and_not_by_an_attribute_of_the_same_name() -> None:
    other = App("helped", lifespan=lambda: contextlib.nullcontext({}))

    for function in (count, counts_by_helper, asks_by_method):
        other.command(function)
    uses = {spec.name: spec.uses_state for spec in other.catalogue().commands}
    assert uses == {"count": True, "counts_by_helper": True, "asks_by_method": False}


def count(ctx: Context[dict[str, int]]) -> int:
    return len(ctx.state)


def _count_for(call: Context[dict[str, int]]) -> int:
    return len(call.state)


def counts_by_helper(call: Context) -> int:
    return _count_for(call)


def asks_by_method(ctx: Context, text: str) -> int:
    return text.count("a")


def test_without_a_lifespan_an_attribute_called_state_moves_no_command() -> None:
    other = App("order")

    @other.command
    def show(ctx: Context) -> str:
        return str(ctx.state)

    assert [spec.isolation for spec in other.catalogue().commands] == ["auto"]


def test_a_lifespan_that_cannot_be_one_is_refused_where_it_is_declared() -> None:
    other = App("other")

    async def no_yield() -> None: ...
    def two(app: App, more: int) -> Iterator[None]:
        yield

    for wrong, reason in ((no_yield, "no `yield`"), (two, "no parameter, or one"), ("text", "is a function")):
        with pytest.raises(TypeError, match=reason):
            other.lifespan(wrong)  # type: ignore[type-var]

    @other.lifespan
    def first() -> Iterator[None]:
        yield

    with pytest.raises(ValueError, match=r"already has the lifespan .*first"):
        other.lifespan(first)

    def job(ctx: Context) -> object:
        return ctx.state

    with pytest.raises(ValueError, match="cannot use the state"):
        other.command(job, name="long", interruption=True)
    late = App("late")
    late.command(job, name="long", interruption=True)
    with pytest.raises(ValueError, match="cannot use the state"):
        late.lifespan(first)


@pytest.mark.slow
def test_the_state_is_there_for_all_calls_and_refused_elsewhere(folder: Path) -> None:
    async def scenario() -> None:
        async with app:
            answers = await asyncio.gather(*(app.call("count") for _ in range(200)))
            assert sorted(answer.value for answer in answers) == list(range(1, 201)), answers[0].to_dict()
            assert not any(answer.warnings for answer in answers)
            by_helper = (await app.call("counted_by_helper")).value
            shared_pid = (await app.call("beside")).value
            assert by_helper == [200, shared_pid]
            assert (await app.call("counted")).value == 200, "sync, with an async dependency"
            for name in ("in_process", "on_this_loop"):
                refused = await app.call(name)
                assert refused.code == "STATE_UNAVAILABLE", refused.to_dict()
                assert "isolation='shared'" in str(refused.error)
            assert events(folder) == ["opening", "opened"]
        assert events(folder)[2:] == ["closing", "closed"], "`async with app` has ended"

    run(scenario())


@pytest.mark.slow
def test_on_the_command_line_the_state_is_opened_for_the_command_and_closed_after_it(folder: Path) -> None:
    words = [sys.executable, "-m", "tests.apps.app.stateful", "count"]
    done = subprocess.run(words, capture_output=True, timeout=20, check=False)
    assert done.returncode == 0 and b'"result":1' in done.stdout, done
    assert events(folder) == ["opening", "opened", "closing", "closed"]


# --- opening --------------------------------------------------------------------------------------


@pytest.mark.slow
def test_an_opening_that_fails_is_told_to_every_call_and_tried_again_by_the_next(folder: Path) -> None:
    async def scenario() -> None:
        async with app:
            for misdeed, text in (
                ("raise", "RuntimeError: no database at 10.0.0.7"),
                ("fail", "the database is closed today"),
                ("exit", "SystemExit: 3"),
            ):
                misbehave(folder, *[misdeed] * 5)  # a call that comes a moment later opens it again
                failed = await asyncio.gather(*(app.call("count") for _ in range(5)))
                for each in failed:
                    assert (each.code, each.ending) == ("LIFESPAN_FAILED", "not_started"), each.to_dict()
                    assert each.meta["side_effects"] == "none"
                    assert each.error is not None and text in each.error["message"] and each.error["retryable"]
                misbehave(folder)
            answer = await app.call("count")
            assert answer.value == 1 and not answer.warnings

    run(scenario())


@pytest.mark.slow
@pytest.mark.parametrize("misdeed", ["hang", "swallow"])
def test_60_callers_of_an_opening_that_hangs_are_answered_and_others_do_not_wait(misdeed: str, folder: Path) -> None:
    async def scenario() -> None:
        misbehave(folder, misdeed)
        async with app:
            await app.call("beside")  # the process is up
            await app.call("plain")
            hung = [asyncio.ensure_future(app.call_with("count", {}, timeout="1s")) for _ in range(60)]
            await soon(lambda: "opening" in events(folder))
            for name in ("plain", "beside", "says_where"):
                answer, took_ms = await timed(app.call(name))
                assert answer.ok and took_ms < 900, (name, took_ms)
            for each in await asyncio.gather(*hung):
                assert (each.code, each.ending) == ("TIMEOUT", "not_started"), each.to_dict()
                assert each.error is not None and "before the lifespan of the App was open" in each.error["message"]
            assert (await app.call("count")).value == 1

    run(scenario())


short = App("short-default", default_timeout="200ms")


@short.lifespan
def never_opens() -> Iterator[None]:
    threading.Event().wait(60)
    yield


@short.command(timeout="20s")
def reads_short(ctx: Context) -> None:
    assert ctx.state


@pytest.mark.slow
def test_an_opening_takes_no_longer_than_the_default_timeout_of_the_app() -> None:
    async def scenario() -> None:
        async with short:
            answer, took_ms = await timed(short.call("reads_short"))
            assert answer.code == "LIFESPAN_FAILED" and took_ms < 5000
            assert "not open after 200ms" in str(answer.error)

    run(scenario())


@pytest.mark.slow
def test_an_opening_that_blocks_the_loop_is_replaced_and_named(folder: Path) -> None:
    async def scenario() -> None:
        misbehave(folder, "block")
        async with app:
            await app.call("beside")  # the process is up
            answer = await app.call_with("count", {}, timeout="300ms")
            assert answer.code == "TIMEOUT" and codes(answer) == ["HOST_REPLACED"], answer.to_dict()
            assert "the lifespan of the App blocked its event loop" in str(answer.warnings)
            assert (await app.call("count")).value == 1

    run(scenario())


# --- replacement ----------------------------------------------------------------------------------


@pytest.mark.slow
def test_calls_interrupted_by_a_replacement_and_the_first_call_after_it_say_that_the_state_is_lost(
    folder: Path,
) -> None:
    async def scenario() -> None:
        async with app:
            assert (await app.call("count")).value == 1
            neighbour = asyncio.ensure_future(app.call("obeys"))
            hung = await app.call_with("sleeps", {"seconds": 60}, timeout="200ms")
            assert (hung.code, hung.ending, codes(hung)) == ("TIMEOUT", "killed", ["HOST_REPLACED"])
            assert "the next call opens the lifespan anew" in str(hung.warnings)
            interrupted = await neighbour
            assert (interrupted.code, interrupted.meta["side_effects"]) == ("HOST_REPLACED", "unknown")
            assert "opens the lifespan anew" in str(interrupted.error)
            first, second = await app.call("count"), await app.call("count")
            assert (first.value, codes(first)) == (1, ["STATE_REBUILT"]), first.to_dict()
            assert "sleeps did not stop" in str(first.warnings) and "ago" in str(first.warnings)
            assert (second.value, codes(second)) == (2, [])
            # Killed from outside.
            died = await app.call("die")
            assert (died.code, codes(died)) == ("WORKER_CRASHED", ["HOST_REPLACED"]), died.to_dict()
            assert died.meta["side_effects"] == "unknown"
            after = await app.call("count")
            assert (after.value, codes(after)) == (1, ["STATE_REBUILT"])
            # Ended by itself.
            assert (await app.call("end_lifespan")).ok
            rebuilt = await app.call("count")
            assert (rebuilt.value, codes(rebuilt)) == (1, ["STATE_REBUILT"]), rebuilt.to_dict()
            assert "ended by itself" in str(rebuilt.warnings)
        # The killed ones were not closed; neither was the one whose task group failed.
        assert events(folder).count("opened") == 4 and events(folder)[-2:] == ["closing", "closed"]
        assert events(folder).count("closing") == 1

    run(scenario())


@pytest.mark.slow
def test_a_call_keeps_the_state_with_which_it_began(folder: Path) -> None:
    async def scenario() -> None:
        async with app:
            ends = folder / "ends"
            running = asyncio.ensure_future(app.call("keeps_its_state", until=str(ends)))
            await soon(lambda: "begun" in events(folder))
            assert (await app.call("end_lifespan")).ok
            misbehave(folder, "slow")
            assert codes(await app.call("count")) == ["STATE_REBUILT"]
            ends.touch()
            answer = await running
            assert answer.ok and len(answer.value) == 1, answer.to_dict()

    run(scenario())


@contextlib.contextmanager
def hangs_in_a_thread() -> Iterator[None]:
    folder = Path(os.environ["STATEFUL_FOLDER"])
    with (folder / "log").open("a") as log:
        log.write("opening\n")
    while not (folder / "released").exists():
        time.sleep(0.005)
    yield


hung_app = App("hung-lifespan", lifespan=hangs_in_a_thread)


@hung_app.command
def reads(ctx: Context[None]) -> None:
    assert ctx.state is None


@pytest.mark.slow
def test_openings_that_hang_in_threads_do_not_pile_up(folder: Path) -> None:
    async def scenario() -> None:
        async with hung_app as app:
            for _ in range(100):  # the first ones may wait for the process
                answer = await app.call_with("reads", {}, timeout="100ms")
                assert answer.ending == "not_started", answer.to_dict()
                if answer.code == "LIFESPAN_FAILED":
                    break
            assert "4 openings that were given up still run" in str(answer.error)
            assert events(folder) == ["opening"] * 4
            (folder / "released").touch()
            for _ in range(100):  # until the threads have ended
                if (after := await app.call("reads")).ok:
                    break
            assert after.ok, after.to_dict()

    run(scenario())


# --- closing --------------------------------------------------------------------------------------


@pytest.mark.slow
def test_calls_that_run_at_the_end_are_stopped_before_the_state_is_closed(folder: Path) -> None:
    async def scenario() -> None:
        async with app.dispatcher() as dispatcher:
            await dispatcher.call(call_request("count", {}))
            calls = [dispatcher.call(call_request(name, {})) for name in ("obeys", "reports", "waits")]
            running = [asyncio.ensure_future(each) for each in calls]
            await soon(lambda: events(folder).count("begun") == 3)
            await dispatcher.runtime.close()
            obeyed, *stopped = await asyncio.gather(*running)
            assert obeyed.value == "obeyed", "it looks at ctx.stopping, and was in time"
            for each in stopped:
                assert (each.code, each.ending) == ("CANCELLED", "cancelled"), each.to_dict()
        said = events(folder)
        assert said.index("obeyed") < said.index("closing") and said.index("cleaned up") < said.index("closing")
        assert said[-1] == "closed"

    run(scenario())


@pytest.mark.slow
def test_a_closing_that_hangs_is_cut_short_and_reported(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        misbehave(folder, "hang closing")
        async with app:
            await app.call("count")
        assert events(folder)[-1] == "closing"

    _, took_ms = run(timed(scenario()))
    assert took_ms < 8000
    assert "the lifespan did not close within 3 s" in caplog.text


# --- other kinds of lifespan ----------------------------------------------------------------------


@contextlib.contextmanager
def connection() -> Iterator[sqlite3.Connection]:
    db = sqlite3.connect(":memory:", check_same_thread=False)
    db.execute("create table opened (thread)")
    db.execute("insert into opened values (?)", (threading.get_ident(),))
    yield db
    (opened_by,) = db.execute("select thread from opened").fetchone()
    db.close()
    Path(os.environ["STATEFUL_FOLDER"], "log").write_text(f"{opened_by == threading.get_ident()}\n")


sync_app = App("sync-lifespan", lifespan=connection)


def get_db(ctx: Context[sqlite3.Connection]) -> sqlite3.Connection:
    return ctx.state


@sync_app.command(mutates=False)
async def tables(db: Annotated[sqlite3.Connection, Depends(get_db)]) -> int:
    return int(db.execute("select count(*) from opened").fetchone()[0])


@pytest.mark.slow
def test_a_sync_lifespan_is_opened_and_closed_in_one_thread(folder: Path) -> None:
    async def scenario() -> None:
        async with sync_app:
            assert (await sync_app.call("tables")).value == 1

    run(scenario())
    assert events(folder) == ["True"]


decorated = App("decorated")


@decorated.lifespan
@contextlib.asynccontextmanager
async def as_fastmcp_writes_it(server: App) -> AsyncIterator[dict[str, str]]:
    yield {"name": server.name}


@decorated.command(mutates=False)
def name_of_app(ctx: Context[dict[str, str]]) -> str:
    return ctx.state["name"]


broken = App("broken-lifespan")


@broken.lifespan
def yields_nothing() -> Iterator[None]:
    if broken is None:
        yield


@broken.command(mutates=False)
def reads_broken(ctx: Context) -> None:
    assert ctx.state


@pytest.mark.slow
def test_a_context_manager_is_a_lifespan_and_one_that_yields_nothing_fails() -> None:
    async def scenario() -> None:
        async with decorated, broken:
            assert (await decorated.call("name_of_app")).value == "decorated"
            answer = await broken.call("reads_broken")
            assert answer.code == "LIFESPAN_FAILED" and "didn't yield" in str(answer.error)

    run(scenario())
