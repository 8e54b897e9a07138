"""The runner of a job: a process that holds the limits, runs the work where it can be killed, and stores its end.

If the runner is killed its work dies with it and the job is lost. The next identical call answers or resumes it.

Contract (AGENTS.md): a job belongs to a runner from the start.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import signal
from collections.abc import Coroutine, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from ..calls import telemetry
from ..calls.call import Call, CallRequest, CallRules, Outcome, tool_of
from ..calls.control import control_of
from ..calls.control_channel import runs as running_runs
from ..calls.outcomes import outcome_of_error
from ..calls.preloaded_zygote import Program
from ..calls.runtime import Runtime
from ..core.catalogue import Catalogue, CommandSpec
from ..core.envelope import Envelope, Problem, Warning_, shorten
from ..core.errors import Ending, Failure
from ..core.limits import NS_PER_MS, Clocks, format_duration
from ..core.overtime import ObserverKind
from ..core.proposal import ActionOutcome, Runner
from ..core.value_types import replace
from ..people.approval import Approvals, ask_person
from ..people.inbox import Inbox
from ..store.home import StoreBusy
from ..store.jobs import Job
from ..store.store import Store
from ..supervise.clock import monotonic_ns, wall_time
from ..supervise.kernel import this_process
from ..supervise.runners import runners_folder, withdraw
from ..worker.client_forms import check_capabilities
from ..worker.context import ASK_CLIENT, ASK_LIMIT_MS, URL_COMPLETED, Caller, check_question
from .admission import ConcurrencyLimits
from .background_command import record_end
from .dispatcher import ArgumentChecks, CommandListener
from .invocation import InvocationCheckpoint
from .job_client import answer_for_job, limit_ms
from .job_log import Logbook

# Between two heartbeats of a runner, with a check whether it should stop.
BEAT_S = 0.25
LONGEST_NAME = 100
# The shortest time between two writes of progress; the last is always written.
PROGRESS_NS = 200_000_000


def main(home: str, job_id: str) -> None:
    """Run a job. Errors before it is taken go to stderr, which is the job's log."""
    folder = runners_folder(home)
    log, log_in = os.pipe()
    with Store.open(Path(home)) as store:
        job = store.jobs.assign_runner(job_id, this_process(), wall_time())
        if job is None:
            withdraw(folder)
            return  # it has another runner, or has ended
        with contextlib.suppress(OSError):
            os.chdir(job.cwd)
        log_file = os.dup(2)
        for fd in (1, 2):
            os.dup2(log_in, fd)
        os.close(log_in)
        proposal_id = job.spec.get("proposal_id")
        if proposal_id is not None:
            with contextlib.suppress(Failure):  # a busy store: its outcome is recorded later
                store.proposals.hand_to_job(proposal_id, Runner(this_process(), job.id), wall_time())
        try:
            envelope = asyncio.run(_run(store, job, log, log_file))
        except Exception as error:
            outcome = outcome_of_error(error)
            if job.id not in running_runs:
                outcome.ending = Ending.NOT_STARTED
            envelope = answer_for_job(job, outcome)
        is_latest = record_end(store, job, envelope, lambda: not store.path.exists())
        if is_latest and proposal_id is not None:
            message = str((envelope.error or {}).get("message", ""))
            ran = ActionOutcome(envelope.ok, wall_time(), envelope.code, None if envelope.ok else shorten(message, 500))
            with contextlib.suppress(Failure):  # the job has it
                store.proposals.record_outcome(proposal_id, ran)
        if is_latest and envelope.ok:
            with contextlib.suppress(Failure):  # it is deleted when it is old
                store.checkpoints.clear(job.key)
    telemetry.finish()
    withdraw(folder)
    os._exit(0)


async def _run(store: Store, job: Job, log: int, log_file: int) -> Envelope:
    loop = asyncio.get_running_loop()
    os.set_blocking(log, False)
    logbook = Logbook(job.log_path or os.devnull, log_file)
    loop.add_reader(log, logbook.take, log)
    catalogue = Catalogue.from_plain(job.spec["catalogue"])
    program = Program(**{**job.program, "imports": tuple(job.program["imports"])})
    spec = catalogue.find(job.command)
    assert spec is not None
    runtime = Runtime(
        operations=[replace(each.operation(), isolation="process") for each in catalogue.commands],
        workers=1,
        program=program,
    )
    inbox = Inbox(store)
    approvals = Approvals(catalogue, lambda: inbox, ArgumentChecks(runtime).look_at, program.place)
    observers = {ObserverKind.PERSON: partial(ask_person, lambda: inbox)}
    rules = CallRules(tool_of(catalogue), approvals, ConcurrencyLimits(catalogue, lambda: store), observers)
    if (proposal := store.proposals.get(job.spec.get("proposal_id") or "")) is not None:
        approvals.must_be_approved(proposal)
    async with runtime:
        runtime.open_channel(store.home)
        call = runtime.begin(job.command, job.arguments, Clocks(timeout_ms=limit_ms(job)), rules=rules)
        if (caller := job.spec.get("caller")) is not None:
            call.request = CallRequest(job.command, job.arguments, caller=Caller(**caller))
        if job.used_ms:  # by earlier attempts, which have the same limit
            call.count_from(call.started_ns - job.used_ms * NS_PER_MS)
        running_runs[job.id] = call
        listener = JobListener(store, job, spec, call)
        working = asyncio.ensure_future(runtime.finish(call, listener))
        stopped = asyncio.Event()  # by a caller whose request the store did not take
        loop.add_signal_handler(signal.SIGTERM, stopped.set)
        while not working.done():  # bounded by the work's own clocks
            await asyncio.wait([working], timeout=BEAT_S)
            if stopped.is_set() or not _still_wanted(store, job, listener):
                call.cancellation.reason = Problem("CANCELLED", "the job was cancelled")
                working.cancel()
                await asyncio.wait([working], timeout=(call.clocks.grace_ms or 0) / 1000 + 3)
                break
        if working.done() and not working.cancelled():
            envelope = working.result()
        else:
            envelope = answer_for_job(job, Outcome(Ending.ABANDONED, call.cancellation.reason))
        if envelope.code == "CANCELLED":
            envelope.data = envelope.data or {"partial": True}
    await inbox.close()
    listener.write_progress()
    if not envelope.ok and spec.steps:
        envelope.data = listener.add_steps(envelope.data)
    envelope.warnings += listener.warnings
    envelope.meta["job_id"] = job.id
    logbook.take(log)
    return envelope


def _still_wanted(store: Store, job: Job, listener: JobListener) -> bool:
    """Write a heartbeat and return whether the job is still wanted. A busy store is no reason to stop."""
    with contextlib.suppress(Exception):
        used_ms = (monotonic_ns() - listener.call.started_ns) // NS_PER_MS
        with contextlib.suppress(StoreBusy):
            store.jobs.beat(job.id, wall_time(), attempt=job.attempt, used_ms=used_ms, wait_ms=0)
        listener.write_progress_sometimes()
        current = store.jobs.get(job.id)
        return current is not None and current.attempt == job.attempt and current.cancel_requested_at is None
    return True


class JobListener(CommandListener):
    def __init__(self, store: Store, job: Job, spec: CommandSpec, call: Call) -> None:
        checkpoint = InvocationCheckpoint(lambda: store, lambda: job.key)
        request = CallRequest(job.command, job.arguments, resume_from=job.spec["resume_from"])
        super().__init__(checkpoint, spec, request, call.tool.redaction())
        self.stdin_path = job.stdin_path
        self.warnings: list[Warning_] = checkpoint.warnings
        self._store = store
        self._job = job
        self._latest: tuple[int, int | None, str | None] | None = None
        self._written_ns = 0
        self._asking = 0
        self.call = call

    def wrote(self, text: str) -> None:
        """Drop an item: a job has no caller to give it to."""

    def ask(self, question: str, value: object) -> Coroutine[Any, Any, object]:
        if question == ASK_CLIENT and isinstance(value, dict):
            return self._ask_client(value["name"], value["method"], value["params"])
        return super().ask(question, value)

    async def _ask_client(self, name: str, method: str, params: Mapping[str, Any]) -> object:
        """Store a question for the client of the job's task, and return its answer. Raises Failure."""
        job, jobs, asks = self._job, self._store.jobs, self._job.spec.get("asks")
        if method == URL_COMPLETED:  # the revision that has tasks has no such message
            return {}
        if asks is None:
            raise Failure("CANNOT_ASK", "the job was not started as a task by an MCP client")
        check_capabilities(asks, method, params)
        check_question(params, self._asking)
        key = f"{name[:LONGEST_NAME]}-{secrets.token_hex(8)}"
        self._asking += 1
        try:
            with control_of(self.call).person_wait(ASK_LIMIT_MS) as limit_ms:
                async with asyncio.timeout(limit_ms / 1000):
                    request = {"method": method, "params": params}
                    await asyncio.to_thread(jobs.ask, job.id, key, request, attempt=job.attempt)
                    while True:
                        await asyncio.sleep(BEAT_S)
                        current = jobs.get(job.id)
                        given = {} if current is None else current.spec.get("questions", {}).get(key, {})
                        if "answer" in given:
                            return given["answer"]
        except TimeoutError:
            raise Failure("NO_ANSWER", f"no answer within {format_duration(ASK_LIMIT_MS)}") from None
        finally:
            self._asking -= 1
            with contextlib.suppress(Failure):  # a busy store: it goes with the job
                jobs.withdraw(job.id, key, attempt=job.attempt)

    def progress(self, done: float, total: float | None, unit: str | None) -> None:
        self._latest = _in_whole_numbers(max(done, 0), total, self.redact(unit))
        self.write_progress_sometimes()

    def write_progress_sometimes(self) -> None:
        """Write the progress, also what a busy store did not take before, unless some was just written."""
        if monotonic_ns() - self._written_ns >= PROGRESS_NS:
            self.write_progress(wait_ms=0)

    def write_progress(self, *, wait_ms: int | None = None) -> None:
        if self._latest is None:
            return
        self._written_ns = monotonic_ns()
        with contextlib.suppress(Exception):  # a failure must not end the work
            attempt = self._job.attempt
            self._store.jobs.progress(self._job.id, *self._latest, wall_time(), attempt=attempt, wait_ms=wait_ms)
            self._latest = None


def _in_whole_numbers(done: float, total: float | None, unit: str | None) -> tuple[int, int | None, str | None]:
    """Return progress in whole numbers: fractions become a percentage."""
    if total is not None and (int(done) != done or int(total) != total):
        return (int(100 * done / total), 100, "%") if total > 0 else (int(done), None, unit)
    return int(done), None if total is None else int(total), unit
