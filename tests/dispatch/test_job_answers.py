"""The answers about jobs, keys and places claim no more than was seen, also when something fails or is cancelled."""

import asyncio
import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from shotclock import App, Context
from shotclock.calls.call import CallRequest, Outcome, Stdin, admit
from shotclock.calls.preloaded_zygote import Program
from shotclock.core.catalogue import Catalogue
from shotclock.core.envelope import Envelope
from shotclock.core.errors import Failure
from shotclock.core.limits import Clocks
from shotclock.core.trace import TraceContext
from shotclock.dispatch import job_client
from shotclock.dispatch.admission import ConcurrencyLimits
from shotclock.dispatch.invocation import Invocation
from shotclock.dispatch.job_client import JobClient
from shotclock.store.home import StoreBusy
from shotclock.store.jobs import STARTING_LIMIT_MS, Checkpoints, Job, JobState
from shotclock.store.store import Store
from shotclock.supervise.clock import wall_time
from shotclock.supervise.kernel import is_alive, this_process
from tests.apps.app.conftest import Home, Tool, lines_of, wait_for, warning_codes
from tests.store.work import all_alive, new_job

pytestmark = pytest.mark.usefixtures("no_survivors")

WITHIN_S = 20

app = App("job-answers", default_timeout="20s", grace="200ms")


@app.command(single_flight="x")
def alone() -> None: ...


@app.command
def charge(folder: Path, amount: int = 5) -> int:
    with open(folder / "notes", "a") as notes:
        notes.write(f"{amount}\n")
    return amount


@app.command(interruption=True)
def long(folder: Path) -> None: ...


@app.command(interruption={"detach": False, "resume": True})
def resumes(ctx: Context) -> str:
    ctx.checkpoint(1)
    return "done"


@pytest.fixture
def store(home: Home) -> Iterator[Store]:
    """The store; once the test is over, without the jobs that this process only pretends to run."""
    with Store.open(home.path) as opened:
        yield opened
        ours = [job for job in opened.jobs.list() if job.runner in (None, this_process())]
        for job in ours:
            opened.jobs.finish(job.id, ENDED, wall_time())
        if ours:
            opened.jobs.forget_ended_before(wall_time() + 1)


def begun(store: Store, *, ms_ago: int = 0, **fields: Any) -> Job:
    """A job that has no runner yet."""
    at = wall_time() - ms_ago
    spec = {"timeout_ms": 0, "catalogue": {}} | fields.pop("spec", {})
    return store.jobs.attach_or_create(new_job(at=at, spec=spec, **fields), all_alive)[0]


def running(store: Store, **fields: Any) -> Job:
    job = store.jobs.assign_runner(begun(store, **fields).id, this_process(), wall_time())
    assert job is not None
    return job


def bounded(work: Any) -> Any:
    return asyncio.run(asyncio.wait_for(work, WITHIN_S))


def problem_of(outcome: Any) -> Any:
    assert isinstance(outcome, Outcome)
    return outcome.problem


# --- a runner that fails ------------------------------------------------------------------------------


SABOTAGE = """
import sys
if any("job_runner" in word for word in sys.orig_argv):
    from shotclock.dispatch import _job_runner as job_runner
    def fail(*given):
        raise OSError("made up")
    {target} = fail
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("target", "ending", "effects"),
    [
        ("job_runner.Catalogue.from_plain", "not_started", "none"),
        ("job_runner.JobListener.write_progress", "finished", "unknown"),
    ],
)
def test_a_runner_that_fails_after_the_work_does_not_claim_that_nothing_ran(
    target: str, ending: str, effects: str, tool: Callable[..., Tool], tmp_path: Path, validate_envelope: Any
):
    (tmp_path / "python").mkdir()
    (tmp_path / "python" / "sitecustomize.py").write_text(SABOTAGE.format(target=target))
    ran = tool("long.py")("once", tmp_path, "0", env={"PYTHONPATH": str(tmp_path / "python")})
    envelope = validate_envelope(ran.json())
    assert envelope["error"]["code"] == "INTERNAL_ERROR", envelope
    assert (envelope["meta"]["ending"], envelope["meta"]["side_effects"]) == (ending, effects)
    assert len(lines_of(tmp_path / "notes")) == (ending == "finished")


UNSTOPPABLE = SABOTAGE.replace(
    "    {target} = fail",
    """
    import asyncio, time
    async def finish(self, call, listener):
        until = time.monotonic() + 6
        while time.monotonic() < until:
            try:
                await asyncio.sleep(0.1)
            except asyncio.CancelledError:
                pass
    job_runner.Runtime.finish = finish
""",
)


@pytest.mark.slow
def test_cancelled_work_that_was_not_seen_to_end_is_abandoned(
    tool: Callable[..., Tool], tmp_path: Path, validate_envelope: Any
):
    (tmp_path / "python").mkdir()
    (tmp_path / "python" / "sitecustomize.py").write_text(UNSTOPPABLE)
    program, env = tool("long.py"), {"PYTHONPATH": str(tmp_path / "python")}
    job_id = program.envelope("once", tmp_path, "0", "--budget", "100ms", env=env, code=14)["data"]["job_id"]
    assert program.envelope("job", "cancel", job_id, code=0)["data"]["status"] == "cancelled"
    ended = validate_envelope(program.envelope("job", "wait", job_id, code=143))
    assert ended["error"]["code"] == "CANCELLED" and ended["meta"]["ending"] == "abandoned"


def test_a_runner_that_comes_at_the_last_moment_keeps_its_job(store: Store, monkeypatch: pytest.MonkeyPatch):
    job = begun(store, ms_ago=STARTING_LIMIT_MS)
    describe = job_client.lost_envelope

    def describe_late(seen: Job) -> dict[str, Any]:
        store.jobs.assign_runner(seen.id, this_process(), wall_time())
        return describe(seen)

    monkeypatch.setattr(job_client, "lost_envelope", describe_late)
    found = JobClient(store, ["tool"]).look(job.id)
    assert found is not None and found.state is JobState.RUNNING and found.is_active


# --- a start that fails -------------------------------------------------------------------------------


def catalogue_of(home: Home, tool: Callable[..., Tool]) -> Catalogue:
    """The catalogue of the long program, from one of its jobs."""
    program = tool("long.py")
    program.envelope("once", program.folder, "0", code=0)
    return Catalogue.from_plain(home.job().spec["catalogue"])


def invocation_of(catalogue: Catalogue, command: str, stdin: Stdin | None = None) -> Invocation:
    spec = catalogue.find(command)
    assert spec is not None
    return Invocation(catalogue, spec, Program(), {}, 0, stdin=stdin)


@pytest.mark.slow
def test_a_job_that_cannot_be_started_has_an_answer_and_the_next_one_has_whole_input(
    tool: Callable[..., Tool], tmp_path: Path, home: Home, store: Store, monkeypatch: pytest.MonkeyPatch
):
    client = JobClient(store, ["tool"])
    (tmp_path / "input").write_text("whole")
    invocation = invocation_of(catalogue_of(home, tool), "reads", Stdin(str(tmp_path / "input"), "digest"))

    def copy_half(source: str, target: str) -> None:
        Path(target).write_text("wh")
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("shutil.copyfile", copy_half)
        failed = store.jobs.get(client.start_or_attach(invocation, TraceContext("0" * 32)).id)
    assert failed is not None and failed.envelope is not None and not failed.is_active
    assert failed.envelope["error"]["code"] == "SPAWN_FAILED" and "No space left" in failed.envelope["error"]["message"]
    assert failed.envelope["meta"]["side_effects"] == "none"

    started: list[str] = []
    monkeypatch.setattr(job_client, "start_detached", lambda *given, **named: started.append("runner"))
    monkeypatch.setattr(Invocation, "resumes", True)  # a further attempt, under the same id and with the same files
    again = client.start_or_attach(invocation, TraceContext("0" * 32))
    assert (again.id, again.attempt, started) == (failed.id, 2, ["runner"])
    assert Path(str(again.stdin_path)).read_text() == "whole"
    store.jobs.finish(again.id, {"error": None, "ok": True}, wall_time())


@pytest.mark.slow
def test_a_log_that_cannot_be_opened_is_an_answer(
    tool: Callable[..., Tool], home: Home, store: Store, monkeypatch: pytest.MonkeyPatch
):
    invocation = invocation_of(catalogue_of(home, tool), "once")

    def refuse(path: Path) -> int:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(job_client, "create_private_file", refuse)
    failed = store.jobs.get(JobClient(store, ["tool"]).start_or_attach(invocation, TraceContext("0" * 32)).id)
    assert failed is not None and failed.envelope is not None
    assert failed.envelope["error"]["code"] == "SPAWN_FAILED"


# --- waiting that a signal ends -----------------------------------------------------------------------


ENDED: dict[str, Any] = {
    "ok": True,
    "data": {"result": 1},
    "error": None,
    "warnings": [],
    "meta": {"ending": "finished", "survivors": []},
}


def test_a_job_that_ended_when_the_signal_came_is_delivered(store: Store):
    job = running(store)
    store.jobs.finish(job.id, ENDED, wall_time())
    for name in ("SIGTERM", "SIGINT"):
        answer = bounded(JobClient(store, ["tool"]).stop_waiting(job, admit("import", Clocks()), name))
        assert isinstance(answer, Envelope) and answer.data == {"result": 1}
    failed = ENDED | {"ok": False, "error": {"code": "INTERNAL_ERROR"}}
    other = running(store, id="job2", key="other")
    store.jobs.finish(other.id, failed, wall_time())
    answer = bounded(JobClient(store, ["tool"]).stop_waiting(other, admit("import", Clocks()), "SIGINT"))
    assert isinstance(answer, Envelope) and answer.code == "INTERNAL_ERROR", "it failed by itself"


def test_a_wait_that_a_signal_ended_names_the_signal_and_no_clock(store: Store):
    job = running(store)
    problem = problem_of(bounded(JobClient(store, ["tool"]).stop_waiting(job, admit("import", Clocks()), "SIGTERM")))
    assert problem.code == "INCOMPLETE" and problem.fired is None and problem.context == {"signal": "SIGTERM"}
    assert "asked to stop" not in problem.message


def test_work_that_does_not_stop_in_time_is_said_to_have_been_asked(store: Store, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(job_client, "CANCEL_LIMIT_MS", 50)
    job = running(store)
    problem = problem_of(bounded(JobClient(store, ["tool"]).stop_waiting(job, admit("import", Clocks()), "SIGINT")))
    assert problem.code == "INCOMPLETE" and "asked to stop and has not stopped yet" in problem.message


@pytest.mark.slow
def test_sigterm_is_the_reason_of_the_answer(tool: Callable[..., Tool], tmp_path: Path, validate_envelope: Any):
    waiting = tool("long.py").start("once", tmp_path, "30")
    wait_for(lambda: lines_of(tmp_path / "notes"), "the work")
    waiting.signal(signal.SIGTERM)
    envelope = validate_envelope(waiting.ends(within_s=8).json())
    assert envelope["error"]["code"] == "INCOMPLETE" and envelope["error"]["context"] == {"signal": "SIGTERM"}


# --- cancelling ---------------------------------------------------------------------------------------


def test_cancelling_waits_for_the_grace_of_the_command_as_well(store: Store, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(job_client, "CANCEL_LIMIT_MS", 0)
    job = running(store, spec={"grace_ms": 10_000})
    client = JobClient(store, ["tool"])

    async def scenario() -> Job:
        cancelling = asyncio.ensure_future(client.cancel(job))
        while (current := store.jobs.get(job.id)) is not None and current.cancel_requested_at is None:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.2)
        assert not cancelling.done()
        store.jobs.finish(job.id, ENDED, wall_time())
        return await cancelling

    assert not bounded(scenario()).is_active


def test_cancelling_ends_with_the_time_of_the_call(store: Store):
    job = running(store, spec={"grace_ms": 60_000})
    call = admit("job cancel", Clocks(timeout_ms=100))
    answer = bounded(asyncio.wait_for(JobClient(store, ["tool"]).perform("cancel", job.id, call), 5))
    assert problem_of(answer).code == "TIMEOUT"


def test_no_job_begins_with_nothing(store: Store):
    job = running(store)
    with pytest.raises(Failure) as caught:
        bounded(JobClient(store, ["tool"]).perform("cancel", "", admit("job cancel", Clocks())))
    assert caught.value.code == "JOB_NOT_FOUND"
    current = store.jobs.get(job.id)
    assert current is not None and current.cancel_requested_at is None


# --- cancelled while a thread is at work --------------------------------------------------------------


class Gate:
    """Work in a thread that waits until the test lets it go on."""

    def __init__(self, work: Callable[..., Any]) -> None:
        self._work = work
        self.entered, self.open = threading.Event(), threading.Event()

    def __call__(self, *given: Any, **named: Any) -> Any:
        self.entered.set()
        assert self.open.wait(WITHIN_S)
        return self._work(*given, **named)

    async def cancel(self, working: asyncio.Task[Any]) -> None:
        """Cancel the work while its thread is inside, then let the thread go on."""
        assert await asyncio.to_thread(self.entered.wait, WITHIN_S)
        working.cancel()
        await asyncio.sleep(0.05)
        self.open.set()
        with contextlib.suppress(asyncio.CancelledError):
            await working


def test_a_place_that_a_cancelled_call_got_is_given_back(store: Store, monkeypatch: pytest.MonkeyPatch):
    limits = ConcurrencyLimits(app.catalogue(), lambda: store)
    gate = Gate(store.locks.acquire)

    async def scenario() -> None:
        with monkeypatch.context() as patch:
            patch.setattr(store.locks, "acquire", gate)
            call = admit("alone", Clocks(timeout_ms=20_000))
            await gate.cancel(asyncio.ensure_future(limits.enter(call)))

    bounded(scenario())
    assert store.locks.list() == ()


def test_a_key_that_a_cancelled_call_got_is_given_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    async def scenario() -> tuple[Envelope | None, Envelope]:
        async with app.dispatcher() as dispatcher:
            keys = dispatcher.store().idempotency
            gate = Gate(keys.begin)
            request = CallRequest("charge", {"folder": str(tmp_path)}, idempotency_key="k")
            call = dispatcher.begin(request)
            with monkeypatch.context() as patch:
                patch.setattr(keys, "begin", gate)
                await gate.cancel(asyncio.ensure_future(dispatcher.carry_out(call)))
            again = await app.call_with("charge", {"folder": str(tmp_path)}, idempotency_key="k", timeout="5s")
            return call.cancellation.envelope, again

    cancelled, again = bounded(scenario())
    assert cancelled is not None and cancelled.ending == "not_started"
    assert again.ok, again.error


def test_a_call_that_is_cancelled_while_its_job_starts_is_detached(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    gate = Gate(lambda *given: running(store))

    async def scenario() -> Envelope | None:
        monkeypatch.setattr(JobClient, "start_or_attach", gate)
        async with app.dispatcher() as dispatcher:
            call = dispatcher.begin(CallRequest("long", {"folder": str(tmp_path)}))
            await gate.cancel(asyncio.ensure_future(dispatcher.carry_out(call)))
            return call.cancellation.envelope

    envelope = bounded(scenario())
    assert envelope is not None and envelope.ending == "detached" and envelope.meta["side_effects"] == "unknown"


# --- checkpoints and keys -----------------------------------------------------------------------------


def test_a_checkpoint_that_cannot_be_deleted_is_a_warning(monkeypatch: pytest.MonkeyPatch):
    def refuse(self: Checkpoints, key: str) -> bool:
        raise StoreBusy("another process was writing", "/store")

    monkeypatch.setattr(Checkpoints, "clear", refuse)

    async def scenario() -> Envelope:
        async with app:
            return await app.call("resumes")

    envelope = bounded(scenario())
    assert envelope.ok and envelope.data == {"result": "done"}
    assert warning_codes(envelope.to_dict()) == ["CHECKPOINT_LEFT"]


def test_with_a_key_a_default_that_is_spelled_out_is_the_same_call(tmp_path: Path):
    async def scenario() -> list[Envelope]:
        async with app:
            short = {"folder": str(tmp_path)}
            return [await app.call_with("charge", each, idempotency_key="k") for each in (short, short | {"amount": 5})]

    first, again = bounded(scenario())
    assert first.ok and again.ok, again.error
    assert warning_codes(again.to_dict()) == ["REPLAYED"] and lines_of(tmp_path / "notes") == ["5"]


@pytest.mark.slow
def test_a_superseded_attempt_leaves_the_checkpoint_to_the_next_one(
    tool: Callable[..., Tool], tmp_path: Path, home: Home, store: Store
):
    """It would notice at its next heartbeat; here it ends before."""
    (tmp_path / "python").mkdir()
    unaware = SABOTAGE.replace("{target} = fail", "job_runner._still_wanted = lambda *given: True")
    (tmp_path / "python" / "sitecustomize.py").write_text(unaware)
    words = ["count", str(tmp_path), "3", "--pause", "0.5", "--budget", "100ms"]
    tool("long.py").envelope(*words, env={"PYTHONPATH": str(tmp_path / "python")}, code=14)
    job = wait_for(lambda: lines_of(tmp_path / "notes") and home.job(), "the work")
    again = new_job("job2", key=job.key, at=wall_time(), spec=job.spec, program=job.program)
    assert store.jobs.attach_or_create(again, lambda _: False, resume=True)[1]
    wait_for(lambda: not is_alive(job.runner), "the runner to leave")
    kept = store.checkpoints.load(job.key)
    assert kept is not None and kept.state == 3
    store.jobs.finish(job.id, ENDED, wall_time())
