"""Jobs as their callers see them. Any caller can wait for a job: it shares only the store with the runner.

Contract (AGENTS.md): only the store is between a caller and a runner.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import shlex
import shutil
import signal
from pathlib import Path
from typing import Any

from ..calls.call import Call, Outcome, Tool, admit, answer
from ..calls.principal import Principal, Role
from ..core.catalogue import semantic_version
from ..core.envelope import Envelope, Problem, Warning_, stop_problem, warning
from ..core.errors import Ending, Failure, SideEffects
from ..core.limits import NS_PER_MS, ClockKind, Clocks, Deadline, Fired, WallTime, format_duration
from ..core.proposal import Proposal, ProposalStatus
from ..core.trace import TRACESTATE_VARIABLE, TraceContext
from ..core.value_types import JsonObject, replace
from ..people.inbox import Inbox
from ..people.person_wait import outcome_of
from ..store.home import ATTEMPT_MS, StoreError, create_private_file
from ..store.jobs import RETENTION_MS, STARTING_LIMIT_MS, Ambiguous, Job, JobState
from ..store.store import JOBS_FOLDER, Store
from ..supervise.clock import monotonic_ns, wall_time
from ..supervise.kernel import can_see, descendants, is_alive
from ..supervise.kill import signal_process
from ..supervise.runners import is_enrolled, runners_folder
from ..supervise.unsupervised import start_detached
from ..worker.context import Progress
from .background_command import BackgroundCommand, describe_command, is_abandoned, is_command, name_key
from .invocation import Invocation
from .job_log import Log

# Between two looks at a job. The first are close together, because most work is short.
FIRST_LOOK_S = 0.02
LATER_LOOKS_S = 0.2
# A runner writes a heartbeat four times a second. A living one that is silent for this long is stopped or starved.
SILENT_LIMIT_MS = 60_000
# How long cancelling waits beyond the grace for the runner to notice and to report.
CANCEL_LIMIT_MS = 10_000
# How long a runner whose work has ended may take to record that, while the store is in trouble.
RECORDED_WITHIN_MS = 1_000
LOG_TAIL = 4_000
CHECKPOINTS_KEPT_MS = 7 * 24 * 3600 * 1000
POLL_INTERVAL_MS = 1_000
# The most jobs in a list. Of the active ones none should be missing.
MOST_ACTIVE = 10_000
MOST_ENDED = 100


class JobClient:
    """The jobs of one store. `command` is the program that has the `job` commands, for hints."""

    def __init__(self, store: Store, command: list[str]) -> None:
        self._store = store
        self._command = command
        self.warnings: tuple[Warning_, ...] = ()

    async def perform(
        self,
        verb: str,
        job_id: str | None,
        call: Call,
        *,
        app: str | None = None,
        active_only: bool = False,
        of: str | None = None,
        budget_ms: int | None = None,
        on_progress: Progress | None = None,
    ) -> Outcome | Envelope:
        """Do one of list, status, wait and cancel, on the jobs of one owner (`of`; None: all). An envelope is the job's
        own. Raises Failure if there is no such job, or no usable store."""
        if verb == "list":
            jobs = await asyncio.to_thread(self.list, app, active_only=active_only, of=of)
            return Outcome(Ending.FINISHED, data={"jobs": jobs})
        try:
            job = await asyncio.to_thread(self.find, job_id or "", of)
        except Failure:
            # A call that waits for a person gives its proposal's id as that of a job.
            found = await self._perform_on_proposal(verb, job_id or "", call, of, budget_ms)
            if found is None:
                raise
            return found
        if verb == "status":
            return Outcome(Ending.FINISHED, data=self.describe(job))
        if verb == "cancel":
            job = await self.cancel(job, call.bound.bell)
            return self.describe_stop(job)
        return await self.wait(job, call, budget_ms, on_progress)

    @staticmethod
    def patience(call: Call, budget_ms: int | None) -> tuple[int | None, int]:
        """Return until when this caller waits, and how long: its budget, within its own caller's deadline."""
        ends = [] if budget_ms is None else [call.started_ns + budget_ms * NS_PER_MS]
        if call.bound.owner != call.name and call.bound.bell is not None:
            ends.append(call.bound.bell.at_ns)
        if not ends:
            return None, 0
        return min(ends), max(0, (min(ends) - call.started_ns) // NS_PER_MS)

    def start_or_attach(self, invocation: Invocation, trace: TraceContext) -> Job:
        """Return the job of this work: a running one, an ended one that was not delivered, or a new one."""
        self.forget_old()
        job_id = secrets.token_hex(8)
        log = self._store.folder(JOBS_FOLDER) / f"{job_id}.log"
        new = invocation.as_job(str(log), job_id, wall_time())
        job, ours = self._store.jobs.attach_or_create(new, is_alive, resume=invocation.resumes)
        if ours:
            try:
                self._start_runner(job, invocation, trace)
            except OSError as error:
                problem = Problem("SPAWN_FAILED", f"the job's runner could not be started: {error}")
                envelope = answer_for_job(job, Outcome(Ending.NOT_STARTED, problem))
                self._store.jobs.mark_lost(job, envelope.to_dict(), wall_time())
        return job

    def find_attached(self, invocation: Invocation) -> Job | None:
        """Return the running or undelivered job of this work."""
        return self._store.jobs.find_answer(invocation.key(), wall_time(), is_alive, resume=invocation.resumes)

    def _start_runner(self, job: Job, invocation: Invocation, trace: TraceContext) -> None:
        assert job.log_path is not None
        if invocation.stdin is not None and job.stdin_path is not None:
            # Each attempt copies it: the copy of an earlier one may be incomplete.
            Path(job.stdin_path).unlink(missing_ok=True)
            os.close(create_private_file(Path(job.stdin_path)))
            shutil.copyfile(invocation.stdin.path, job.stdin_path)
        environment = {name: value for name, value in os.environ.items() if name != TRACESTATE_VARIABLE}
        environment |= trace.as_variables()
        try:
            output = create_private_file(Path(job.log_path))
        except FileExistsError:  # a further attempt appends
            output = os.open(job.log_path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
        try:
            start_detached(
                "shotclock.dispatch._job_runner",
                [str(self._store.home), job.id],
                output_fd=output,
                environment=environment,
                job=(runners_folder(str(self._store.home)), job.id, job.command),
            )
        finally:
            os.close(output)

    def forget_old(self) -> None:
        self._store.checkpoints.forget_saved_before(WallTime(max(0, wall_time().ms - CHECKPOINTS_KEPT_MS)))
        before = WallTime(max(0, wall_time().ms - RETENTION_MS))
        for job in self._store.jobs.forget_ended_before(before):
            for path in (*Log(job.log_path or "").files, job.stdin_path or ""):
                if job.log_path and path:
                    Path(path).unlink(missing_ok=True)

    async def wait(
        self, job: Job, call: Call, budget_ms: int | None, on_progress: Progress | None = None
    ) -> Outcome | Envelope:
        """Return the job's envelope once it has ended; INCOMPLETE when the caller's time is up first."""
        until_ns, waits_ms = self.patience(call, budget_ms)
        pause_s = FIRST_LOOK_S
        reported: object = None
        while True:
            current = await asyncio.to_thread(self.look, job.id)
            if current is None:
                problem = Problem("JOB_NOT_FOUND", f"there is no job {job.id!r}", "validation")
                return Outcome(Ending.NOT_STARTED, problem)
            if not current.is_active:
                return await asyncio.to_thread(self.deliver, current)
            done, total, unit = current.progress_done, current.progress_total, current.progress_unit
            if done is not None and (done, total, unit) != reported and on_progress is not None:
                reported = (done, total, unit)
                on_progress(done, total, unit)
            left_s = None if until_ns is None else (until_ns - monotonic_ns()) / 1e9
            if left_s is not None and left_s <= 0:
                return self.incomplete(current, call, waits_ms)
            await asyncio.sleep(pause_s if left_s is None else min(pause_s, left_s))
            pause_s = min(pause_s * 1.5, LATER_LOOKS_S)

    def look(self, job_id: str) -> Job | None:
        """Read the job, and end it as lost if its runner is gone or never came."""
        job = self._store.jobs.get(job_id)
        if job is None:
            return None
        if not job.is_active:
            is_lost = job.envelope is None
        elif job.state is JobState.STARTING:
            is_lost = abs(wall_time() - job.attempt_at) >= STARTING_LIMIT_MS  # or the clock was set back
            is_lost = is_lost or (is_abandoned(job) and not is_enrolled(runners_folder(str(self._store.home)), job_id))
        else:
            is_lost = job.runner is None or not is_alive(job.runner)
        if not is_lost:
            return job
        self._store.jobs.mark_lost(job, lost_envelope(job), wall_time())
        return self._store.jobs.get(job_id)

    def deliver(self, job: Job) -> Envelope:
        self._store.jobs.deliver(job.id, wall_time())
        envelope = job.envelope or lost_envelope(job)
        meta = {**envelope["meta"], "job_id": job.id}
        return Envelope(envelope["data"], envelope["error"], list(envelope["warnings"]), meta)

    async def stop_waiting(self, job: Job, call: Call, signal: str) -> Outcome | Envelope:
        """Answer a caller that a signal stopped. SIGINT (Ctrl-C) ends the work, not only the waiting."""
        current = await self.cancel(job) if signal == "SIGINT" else await asyncio.to_thread(self.look, job.id)
        job = current or job
        if job.is_active:
            return self.incomplete(job, call, signal=signal)
        ended = await asyncio.to_thread(self.deliver, job)
        if signal != "SIGINT" or ended.code != "CANCELLED":
            return ended
        survivors: Any = ended.meta["survivors"]
        data: dict[str, object] = {"partial": True, "job_id": job.id}
        return Outcome(Ending(ended.ending), stop_problem(signal), data, survivors=survivors)

    def incomplete(self, job: Job, call: Call, budget_ms: int = 0, signal: str | None = None) -> Outcome:
        """Answer that the job continues: its progress, and how to wait for it or cancel it."""
        silent_ms = 0 if job.heartbeat_at is None else wall_time().since_ms(job.heartbeat_at)
        if silent_ms > SILENT_LIMIT_MS:
            fired = Fired(ClockKind.IDLE, "runner", SILENT_LIMIT_MS, silent_ms)
            message = f"the runner of job {job.id} has been silent for {format_duration(silent_ms)}"
            return Outcome(Ending.DETACHED, Problem("STALLED", message, fired=fired), self.describe(job))
        data: dict[str, object] = {
            "state": "running",
            "job_id": job.id,
            "progress": progress_of(job),
            "continue_command": self._command_line("wait", job.id),
            "cancel_command": self._command_line("cancel", job.id),
        }
        message = f"{job.command} continues as job {job.id}"
        if job.cancel_requested_at is not None:
            message = f"{message}; it was asked to stop and has not stopped yet"
        elapsed_ms = (monotonic_ns() - call.started_ns) // NS_PER_MS
        if signal is None:
            problem = Problem("INCOMPLETE", message, fired=Fired(ClockKind.BUDGET, "caller", budget_ms, elapsed_ms))
            return Outcome(Ending.DETACHED, problem, data, budget_ms=budget_ms)
        problem = Problem("INCOMPLETE", f"{message}; {signal} ended the wait", context={"signal": signal})
        return Outcome(Ending.DETACHED, problem, data, budget_ms=elapsed_ms)

    def find(self, prefix: str, of: str | None = None) -> Job:
        """Find a job by its name or the beginning of its id. Raises Failure if there is none, or more than one."""
        jobs = self._store.jobs
        # An id comes first, then a name: of its commands the active one, else the latest.
        named = None if of is not None else jobs.get(prefix) or jobs.find_latest(name_key(prefix))
        found = named or jobs.find(prefix, of)
        if isinstance(found, Ambiguous):
            message = f"more than one job begins with {prefix!r}: {', '.join(found.ids)}"
            raise Failure("JOB_NOT_FOUND", message)
        current = None if found is None else self.look(found.id)
        if current is None:
            raise Failure("JOB_NOT_FOUND", f"there is no job {prefix!r}")
        return current

    def list(
        self, app: str | None = None, *, active_only: bool = False, of: str | None = None
    ) -> list[dict[str, object]]:
        """Return the active jobs, then the newest of the ended ones."""
        found = self._store.jobs.list(app, True, MOST_ACTIVE, of=of)
        if not active_only:
            found += tuple(job for job in self._store.jobs.list(app, limit=MOST_ENDED, of=of) if not job.is_active)
        looked = (self.look(listed.id) for listed in found)
        return [self.describe(job) for job in looked if job is not None and (job.is_active or not active_only)]

    async def cancel(self, job: Job, bell: Deadline | None = None, within_ms: int | None = None) -> Job:
        """Ask its runner to stop it, and wait, bounded, until it has. `within_ms` is another grace than its own.

        The request is sent as a signal if the store does not take it. The job is returned as ended once its work has,
        with a warning if that is not in the store.
        """
        grace_ms = job.spec.get("grace_ms", 0) if within_ms is None else within_ms
        trouble: StoreError | None = None
        try:
            if within_ms is not None:
                grace = {"grace_ms": within_ms}
                await asyncio.to_thread(self._store.jobs.amend, job.id, grace, wait_ms=ATTEMPT_MS)
            await asyncio.to_thread(self._store.jobs.request_cancel, job.id, wall_time(), wait_ms=ATTEMPT_MS)
        except StoreError as error:
            if not _signal_runner(job):
                raise
            trouble = error
        kill_ns = 0 if trouble is None or within_ms is None else monotonic_ns() + within_ms * NS_PER_MS
        limit = Deadline.after_ms(monotonic_ns(), grace_ms + CANCEL_LIMIT_MS)
        until_ns = min(limit.at_ns, limit.at_ns if bell is None else bell.at_ns)
        over_ns = 0
        while True:
            current: Job | None = job
            try:
                current = await asyncio.to_thread(self.look, job.id)
            except StoreError as error:
                trouble = error
            if current is None or not current.is_active or monotonic_ns() >= until_ns:
                return current or job
            if kill_ns and monotonic_ns() >= kill_ns:
                _signal_runner(job)  # a second time, which ends its grace
                kill_ns = 0
            # The work is over once the runner has no process below it any more.
            runner = job.runner
            if trouble is not None and runner is not None and (not is_alive(runner) or not descendants(runner.pid)):
                over_ns = over_ns or monotonic_ns() + RECORDED_WITHIN_MS * NS_PER_MS
                if monotonic_ns() >= over_ns:  # it is recorded later: by its runner, or as lost
                    message = f"the end of job {job.id}, which `job status` reports as running until then: {trouble}"
                    self.warnings += (warning("NOT_WRITTEN_DOWN", message),)
                    envelope = answer_for_job(job, Outcome(Ending.KILLED, Problem("CANCELLED", "the job was stopped")))
                    return replace(job, state=JobState.FINISHED, ended_at=wall_time(), envelope=envelope.to_dict())
            await asyncio.sleep(FIRST_LOOK_S)

    def describe_stop(self, job: Job) -> Outcome:
        late = Problem("TIMEOUT", f"job {job.id} was asked to stop and has not stopped yet")
        return Outcome(Ending.FINISHED, late if job.is_active else None, self.describe(job), warnings=self.warnings)

    def describe(self, job: Job) -> dict[str, object]:
        shown: dict[str, object] = {
            "job_id": job.id,
            "app": job.app,
            "command": job.command,
            "status": _status(job),
            "terminal": not job.is_active,
            "status_command": self._command_line("status", job.id),
            "continue_command": self._command_line("wait", job.id),
            "cancel_command": self._command_line("cancel", job.id),
            "poll_interval_ms": POLL_INTERVAL_MS,
            "timeout_ms": limit_ms(job),
            "progress": progress_of(job),
            "attempt": job.attempt,
            "created_at": job.created_at.iso(),
            "log": job.log_path,
            "owner": job.owner,
        }
        if is_command(job):
            name = BackgroundCommand.of(job).name or job.id
            shown |= describe_command(job, wall_time())
            shown |= {f"{verb}_command": self._command_line(verb, name) for verb in ("logs", "stop", "restart")}
        if job.ended_at is not None:
            shown["ended_at"] = job.ended_at.iso()
        if job.envelope is not None and job.envelope["error"] is not None:
            shown["code"] = job.envelope["error"]["code"]
        return shown

    async def _perform_on_proposal(
        self, verb: str, proposal_id: str, call: Call, of: str | None, budget_ms: int | None
    ) -> Outcome | None:
        """Do a job command with a proposal; None if `of` may not see it. Raises Failure if it cannot be cancelled."""
        by = Principal.local() if of is None else Principal(of, Role.AGENT)
        inbox = Inbox(self._store)
        try:
            proposal = await inbox.get(proposal_id)
            if proposal is None or not by.may_see(proposal):
                return None
            if verb == "cancel":
                proposal = await inbox.withdraw(proposal.id, by)
            if verb != "wait":
                return Outcome(Ending.FINISHED, data=self._describe_proposal(proposal))
            until_ns, waits_ms = self.patience(call, budget_ms)
            proposal = await inbox.wait_until(proposal, None if until_ns is None else Deadline(until_ns))
            return outcome_of(proposal, (monotonic_ns() - call.started_ns) // NS_PER_MS, waits_ms)
        finally:
            await inbox.close()

    def _describe_proposal(self, proposal: Proposal) -> dict[str, object]:
        status = "running" if proposal.is_open else "complete" if proposal.status.allows else "failed"
        return {
            "job_id": proposal.id,
            "proposal_id": proposal.id,
            "command": proposal.ask.operation or proposal.ask.title,
            "status": "cancelled" if proposal.status is ProposalStatus.WITHDRAWN else status,
            "proposal_status": proposal.status.value,
            "terminal": not proposal.is_open,
            "status_command": self._command_line("status", proposal.id),
            "continue_command": f"shotclock inbox check {proposal.id}",
            "cancel_command": self._command_line("cancel", proposal.id),
            "poll_interval_ms": POLL_INTERVAL_MS,
            "timeout_ms": proposal.ask.policy.ttl_ms,
            "progress": {"done": int(not proposal.is_open), "total": 1, "unit": "decisions"},
            "created_at": proposal.created_at.iso(),
        }

    def _command_line(self, verb: str, job_id: str) -> str:
        return shlex.join([*self._command, "job", verb, job_id])


def _signal_runner(job: Job) -> bool:
    runner = job.runner
    return runner is not None and can_see(runner) and is_alive(runner) and signal_process(runner.pid, signal.SIGTERM)


def limit_ms(job: Job) -> int:
    """Return how long the work may take: its timeout, if it has one, within the lifetime of a job."""
    return min(job.spec["timeout_ms"] or job.max_lifetime_ms, job.max_lifetime_ms)


def progress_of(job: Job) -> dict[str, object]:
    if job.progress_done is None:
        return {"done": 0}
    fields = {"done": job.progress_done, "total": job.progress_total, "unit": job.progress_unit}
    return {name: value for name, value in fields.items() if value is not None}


def _status(job: Job) -> str:
    if job.is_active:
        return "running"
    if job.envelope is not None and job.envelope["ok"]:
        return "complete"
    if job.envelope is not None and job.envelope["error"]["code"] == "CANCELLED":
        return "cancelled"
    return "failed"


def lost_envelope(job: Job) -> JsonObject:
    context: dict[str, object] = {
        "job_id": job.id,
        "attempt": job.attempt,
        "log_tail": Log(job.log_path or os.devnull).tail(LOG_TAIL),
    }
    ending, message = Ending.KILLED, f"the runner of job {job.id} is gone; {job.command} was stopped in the middle"
    if job.runner is None:
        ending, message = Ending.NOT_STARTED, f"the runner of job {job.id} did not start, so {job.command} did not run"
    data: dict[str, object] = {"job_id": job.id, "progress": progress_of(job)}
    envelope = answer_for_job(job, Outcome(ending, Problem("JOB_LOST", message, context=context), data))
    envelope.meta["duration_ms"] = 0 if job.heartbeat_at is None else job.heartbeat_at.since_ms(job.attempt_at)
    return envelope.to_dict()


def answer_for_job(job: Job, outcome: Outcome) -> Envelope:
    if outcome.ending is Ending.NOT_STARTED and job.attempt > 1:
        outcome.side_effects = SideEffects.UNKNOWN  # of the earlier attempts
    catalogue = job.spec.get("catalogue") or {}
    tool = Tool(semantic_version(job.tool_version), is_served=catalogue.get("is_served", False))
    return answer(admit(job.command, Clocks(timeout_ms=limit_ms(job)), tool=tool), outcome)
