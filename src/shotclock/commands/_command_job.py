"""Commands in the background as their caller sees them: start one, then wait for its readiness or its end."""

from __future__ import annotations

import contextlib
import os
import secrets
import select
from collections.abc import Sequence

from ..calls.call import Outcome
from ..core.envelope import Envelope, Problem
from ..core.errors import Ending, Failure
from ..core.limits import NS_PER_MS
from ..core.value_types import as_dict
from ..dispatch.background_command import BackgroundCommand
from ..dispatch.job_client import JobClient, answer_for_job, lost_envelope
from ..dispatch.job_log import log_files
from ..store.home import create_private_file
from ..store.jobs import Job, JobState
from ..store.store import JOBS_FOLDER, Store
from ..supervise import ipc, kernel
from ..supervise.clock import monotonic_ns, pause, wall_time
from ..supervise.kernel import is_alive
from ..supervise.owner import find_owner
from ..supervise.runners import runners_folder
from ..supervise.unsupervised import start_detached
from ._ready import find_holder
from .background_runner import JOB_FIELDS, ToCaller, ToRunner

# How long a runner whose channel is closed may take to be gone.
LAST_LOOK_MS = 5_000
LOOK_PAUSE_S = 0.02


def assign_owner(spec: BackgroundCommand) -> None:
    """Find the process with which the command ends, from the process that starts it. Raises UnknownOwner."""
    owner = find_owner(spec.owner_choice)
    spec.owner = None if owner is None else as_dict(owner)
    spec.owner_command = "" if owner is None else str(kernel.describe(owner.pid)["command"])


class StartedCommand:
    """A command in the background, with the channel to its runner."""

    def __init__(self, client: JobClient, store: Store, job: Job, channel: ipc.Socket) -> None:
        self._client, self._store = client, store
        self.job = job
        self._channel, self._inbox = channel, ipc.MessageReader(channel)
        self.pid: int | None = None
        self.grace_ms: int = int(job.spec["grace_ms"])

    def wait(self, wanted: Sequence[str], until_ns: int | None, signal_fd: int) -> str | None:
        """Return the first wanted message, or `ended`, also if the runner is gone; None at a signal or without time."""
        while True:
            left_ms = None if until_ns is None else -(-(until_ns - monotonic_ns()) // NS_PER_MS)
            if left_ms is not None and left_ms <= 0:
                return None
            poller = select.poll()
            poller.register(signal_fd, select.POLLIN)
            poller.register(self._channel, select.POLLIN)
            ready = {fd for fd, _ in poller.poll(left_ms)}  # without a limit the end of the job bounds it
            if self._channel.fileno() in ready:
                try:
                    messages = self._inbox.receive()
                except BlockingIOError:
                    continue
                except ipc.Broken:
                    return ToCaller.ENDED
                for kind, *more in messages:
                    if kind == ToCaller.STARTED:
                        self.pid = more[0]
                    if kind in (*wanted, ToCaller.ENDED):
                        return str(kind)
            if signal_fd in ready:
                return None

    def ask(self, *request: object, fds: list[int] | None = None) -> None:
        with contextlib.suppress(ipc.Broken):
            ipc.send(self._channel, request, fds)

    def look(self) -> Job:
        """Return the job as it is now."""
        return self._client.look(self.job.id) or self.job

    def end(self) -> Envelope | None:
        """Return the envelope of the ended job; None if its runner left the channel and is still there."""
        until_ns = monotonic_ns() + LAST_LOOK_MS * NS_PER_MS
        while (job := self.look()).is_active and monotonic_ns() < until_ns:
            if job.state is JobState.STARTING:  # the runner failed before it had the job; its log says why
                self._store.jobs.mark_lost(job, lost_envelope(job), wall_time())
            pause(LOOK_PAUSE_S)
        return None if job.is_active else self._client.deliver(job)

    def forget(self, ended: Envelope) -> Envelope:
        """Delete a job whose end its caller has waited for, and return the envelope as that of a plain command."""
        self._store.jobs.forget(self.job.id)
        for path in log_files(self.job.log_path or ""):
            with contextlib.suppress(OSError):
                os.unlink(path)
        if isinstance(ended.data, dict):
            ended.data = {name: value for name, value in ended.data.items() if name not in JOB_FIELDS}
        ended.meta.pop("job_id", None)
        return ended

    def describe(self) -> dict[str, object]:
        shown = self._client.describe(self.look())
        return {**shown, "pid": shown["pid"] or self.pid}


def start_command(
    store: Store,
    spec: BackgroundCommand,
    command: list[str],
    *,
    over_ns: int | None = None,
    relay: list[int] | None = None,
) -> StartedCommand:
    """Start the command under a runner. Raises Failure, also if its name is taken or another server is in its place.

    A caller that waits gives the end of its budget, and the descriptors to which output is relayed until then.
    """
    client = JobClient(store, command)
    client.forget_old()
    if holder := find_holder(spec.sign):
        hint = "stop that process, or choose another place for yours"
        raise Failure("CONFLICT", f"{holder}; {spec.label} was not started", suggestion=hint)
    job_id = secrets.token_hex(8)
    log_path = store.folder(JOBS_FOLDER) / f"{job_id}.log"
    job = spec.as_job(job_id, str(log_path), wall_time())
    active = store.jobs.create_unless_active(job, is_alive)
    if active is not None and (current := client.look(active.id)) is not None and not current.is_active:
        active = store.jobs.create_unless_active(job, is_alive)  # the start of the other one was killed
    if active is not None:
        raise name_taken(active, command)
    ours, theirs = ipc.pair()
    output = create_private_file(log_path)
    try:
        start_detached(
            "shotclock.commands.background_runner",
            [str(store.home), job_id],
            output_fd=output,
            environment=os.environ,
            input_fd=0 if spec.passes_stdin else None,
            channel_fd=theirs.fileno(),
            job=(runners_folder(str(store.home)), job_id, job.command),
        )
    except OSError as error:
        problem = Problem("SPAWN_FAILED", f"the job's runner could not be started: {error}")
        envelope = answer_for_job(job, Outcome(Ending.NOT_STARTED, problem))
        store.jobs.mark_lost(job, envelope.to_dict(), wall_time())
    finally:
        os.close(output)
        theirs.close()
    started = StartedCommand(client, store, job, ours)
    if over_ns is not None:
        started.ask(ToRunner.WAIT, over_ns, fds=relay)
    return started


def name_taken(active: Job, command: list[str]) -> Failure:
    words = " ".join(command)
    suggestion = f"stop it with `{words} job stop {active.command}`, or run `{words} job restart {active.command}`"
    message = f"{active.command} runs already, as job {active.id}"
    return Failure("CONFLICT", message, context={"job_id": active.id}, suggestion=suggestion)
