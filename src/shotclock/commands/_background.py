"""`exec --detach`, `exec --budget` and `job restart`: the command runs under a job's runner, and this process waits."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import secrets
import select
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

from ..calls.call import Call, Outcome, invalid
from ..calls.outcomes import failure_outcome
from ..core.envelope import Envelope, Problem
from ..core.errors import Ending, Failure
from ..core.limits import NS_PER_MS, ClockKind, Deadline, Fired, format_duration, nest, parse_duration_ms
from ..core.value_types import as_dict, replace
from ..dispatch.background_command import BackgroundCommand, is_command, read_name
from ..dispatch.job_client import JobClient, answer_for_job, lost_envelope
from ..dispatch.job_log import Log
from ..store.home import create_private_file
from ..store.jobs import Job, JobState
from ..store.store import JOBS_FOLDER, Store
from ..supervise import ipc, kernel
from ..supervise.clock import monotonic_ns, pause, wall_time
from ..supervise.command_task import Order
from ..supervise.foreground import TerminalSignals
from ..supervise.kernel import is_alive
from ..supervise.owner import UnknownOwner, find_owner
from ..supervise.runners import runners_folder
from ..supervise.unsupervised import start_detached
from ..terminal.output import emit, say_line, write_quietly
from ..terminal.parser import Mistakes
from ..terminal.subcommand import admit_call, conclude
from ._ready import find_holder, read_url
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
        for path in Log(self.job.log_path or "").files:
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


LIFETIME_VARIABLE = "SHOTCLOCK_LIFETIME"
# How long a runner may take to start, and to report after the last of its limits: a machine that swaps exhausts this.
START_LIMIT_MS = 30_000
ANSWER_MARGIN_MS = 10_000
COMMAND = ["shotclock"]
T = TypeVar("T")


def run(options: Mapping[str, Any], call: Call, signals: TerminalSignals) -> Outcome | Envelope:
    """Run the command of `exec` as a job, with these options. An envelope is the job's own."""
    spec, mistakes = _read_spec(options, call)
    if mistakes:
        return invalid(mistakes)
    until = _detach_clocks(call, spec.clocks["timeout_ms"])
    started = None
    try:
        with Store.open() as store:
            if options["detach"]:
                started = start_command(store, spec, COMMAND)
                return _wait_until_ready(started, spec, call, signals, until)
            over_ns = _end_of_budget(spec, call, until)
            started = start_command(store, spec, COMMAND, over_ns=over_ns, relay=None if spec.captures else [1, 2])
            return _wait_for_end(started, over_ns, call, signals)
    except Failure as failure:
        outcome = failure_outcome(failure)
        outcome.ending = Ending.NOT_STARTED if started is None else Ending.DETACHED
        return outcome


def _detach_clocks(call: Call, timeout_ms: int) -> Deadline | None:
    """Give the call the limit of the job, and return until when its caller waits: its deadline bounds only that."""
    waits = nest(call.started_ns, timeout_ms=0, grace_ms=0, owner=call.name, parent=call.time.parent).bell
    call.time.parent, call.time.clocks = None, replace(call.clocks, timeout_ms=timeout_ms)
    call.time.start(call.started_ns, call.name)
    call.warnings = tuple(note for note in call.warnings if note["code"] != "DEADLINE_INHERITED")
    return waits


def restart_work(job_id: str) -> Callable[[bool], int]:
    return partial(_restart, job_id)


def _restart(job_id: str, as_json: bool) -> int:
    """Stop a command, if it runs, and start it again as it was started."""
    signals = TerminalSignals()
    call = admit_call("job restart", 0, mutates=True)
    envelope = conclude(call, partial(_start_again, job_id, call, signals))
    if as_json:
        return emit(envelope, signals.heard)
    if envelope.ok:
        write_quietly(sys.stdout, describe_start(envelope.data))
    else:
        say_line(explain(envelope), heard=signals.heard)
    return envelope.exit_code


def _start_again(job_id: str, call: Call, signals: TerminalSignals) -> Outcome | Envelope:
    with Store.open() as store:
        client = JobClient(store, COMMAND)
        job = client.find(job_id)
        if not is_command(job) or (spec := BackgroundCommand.of(job)).budget_ms is not None:
            raise Failure("PRECONDITION", f"job {job.id} was not started with `exec --detach`, and is not restarted")
        try:
            assign_owner(spec)
        except UnknownOwner as error:
            raise Failure("PRECONDITION", f"{spec.label} was not restarted: {error}") from None
        if asyncio.run(client.cancel(job)).is_active:
            return Outcome(Ending.NOT_STARTED, Problem("TIMEOUT", f"{spec.label} has not stopped yet; call again"))
        until = _detach_clocks(call, spec.clocks["timeout_ms"])
        return _wait_until_ready(start_command(store, spec, COMMAND), spec, call, signals, until)


def _read_spec(options: Mapping[str, Any], call: Call) -> tuple[BackgroundCommand, Mistakes]:
    mistakes: Mistakes = []

    def read(name: str, reader: Callable[[str], T], text: str | None) -> T | None:
        if text is None:
            return None
        try:
            return reader(text)
        except ValueError as error:
            mistakes.append({"field": name, "message": str(error)})
            return None

    clocks = {"grace_ms": call.clocks.grace_ms or 0, "idle_ms": call.clocks.idle_ms or 0}
    clocks["timeout_ms"] = call.clocks.timeout_ms or 0
    if options["detach"]:
        text = os.environ.get(LIFETIME_VARIABLE) or None
        default_ms = read(LIFETIME_VARIABLE, parse_duration_ms, text) if options["lifetime"] is None else None
        clocks["timeout_ms"] = options["lifetime"] or default_ms or 0
    sign = {
        "port": options["ready_port"],
        "output": read("ready-output", _read_pattern, options["ready_output"]),
        "url": read("ready-url", read_url, options["ready_url"]),
    }
    is_relayed = options["budget"] is not None and not options["json"]
    spec = BackgroundCommand(
        argv=options["command"],
        cwd=os.path.join(_directory(), options["cwd"]) if options["cwd"] else _directory(),
        name=read("name", read_name, options["name"]),
        env=options["env"],
        clocks=clocks,
        stop_signal=options["stop_signal"],
        quiet=options["quiet_env"] is not False,
        ready={name: value for name, value in sign.items() if value is not None},
        ready_within_ms=options["ready_within"],
        owner_choice=options["owner"],
        budget_ms=options["budget"],
        captures=options["budget"] is not None and options["json"],
        output_limit=options["output_limit"],
        is_one_output=options["detach"] or (is_relayed and os.path.samestat(os.fstat(1), os.fstat(2))),
        passes_stdin=options["budget"] is not None and not (options["no_stdin"] or os.isatty(0)),
    )
    try:
        assign_owner(spec)
    except UnknownOwner as error:
        mistakes.append({"field": "owner", "message": str(error)})
    return spec, mistakes


def _read_pattern(text: str) -> str:
    try:
        re.compile(text)
    except re.error as error:
        raise ValueError(f"{text[:80]!r} is not a regular expression: {error}") from None
    return text


def _directory() -> str:
    try:
        return os.getcwd()
    except OSError:  # it was removed
        return "/"


def _wait_until_ready(
    started: StartedCommand, spec: BackgroundCommand, call: Call, signals: TerminalSignals, until: Deadline | None
) -> Outcome | Envelope:
    """Wait until the command is ready, has ended, or the caller has no more time."""
    limit_ms = START_LIMIT_MS
    if spec.sign.is_asked:
        limit_ms += spec.ready_within_ms + spec.clocks["grace_ms"] + ANSWER_MARGIN_MS
    until_ns = call.started_ns + limit_ms * NS_PER_MS
    if until is not None:
        until_ns = min(until_ns, until.at_ns)
    told = _wait(started, [ToCaller.READY], until_ns, signals)
    if told == ToCaller.ENDED and (ended := started.end()) is not None:
        return ended
    if told == ToCaller.READY:
        return Outcome(Ending.DETACHED, data=started.describe())
    return _incomplete(started, call, f"{spec.label} is not ready yet")


def _end_of_budget(spec: BackgroundCommand, call: Call, until: Deadline | None) -> int:
    """Return when the caller stops waiting: after its budget, and before its own deadline."""
    over_ns = call.started_ns + (spec.budget_ms or 0) * NS_PER_MS
    return over_ns if until is None else min(over_ns, until.at_ns)


def _wait_for_end(started: StartedCommand, over_ns: int, call: Call, signals: TerminalSignals) -> Outcome | Envelope:
    """Wait for the end of the command until the budget is used up."""
    told = _wait(started, [ToCaller.OVER], over_ns + ANSWER_MARGIN_MS * NS_PER_MS, signals)
    if told == ToCaller.ENDED and (ended := started.end()) is not None:
        return ended if ended.code == "JOB_LOST" else started.forget(ended)
    budget_ms = max(0, over_ns - call.started_ns) // NS_PER_MS
    return _incomplete(started, call, f"still running after {format_duration(budget_ms)}")


def _wait(started: StartedCommand, wanted: list[str], until_ns: int, signals: TerminalSignals) -> str | None:
    """Return what the runner reports. A signal that stops us stops the command; then its end is waited for."""
    while True:
        told = started.wait(wanted, until_ns, signals.fd)
        while (order := signals.next_order()) is not None:
            if order[0] == Order.SUSPEND:
                signals.suspend()
            elif order[0] in (Order.STOP, Order.KILL):
                started.ask(ToRunner.STOP if order[0] == Order.STOP else ToRunner.KILL, order[1])
                wanted = []
                until_ns = monotonic_ns() + (started.grace_ms + ANSWER_MARGIN_MS) * NS_PER_MS
        if told is not None or monotonic_ns() >= until_ns:
            return told


def _incomplete(started: StartedCommand, call: Call, what: str) -> Outcome:
    data = started.describe()
    message = f"{what}; it continues as job {started.job.id}, wait for it with `{data['continue_command']}`"
    if data["terminal"]:  # meanwhile, and its output was not read in time
        message = f"it has ended after the budget; `{data['continue_command']}` has its result"
    elapsed_ms = (monotonic_ns() - call.started_ns) // NS_PER_MS
    fired = Fired(ClockKind.BUDGET, "caller", elapsed_ms, elapsed_ms)
    shown = ("job_id", "name", "progress", "continue_command", "cancel_command", "logs_command", "log")
    data = {"state": "running", **{name: data[name] for name in shown}}
    return Outcome(Ending.DETACHED, Problem("INCOMPLETE", message, fired=fired), data, budget_ms=elapsed_ms)


def explain(envelope: Envelope) -> str:
    """Return why a command in the background is not there, with the end of its log."""
    error = envelope.error or {}
    hint = "" if envelope.code == "INCOMPLETE" or error.get("errors") else str(error["suggestion"])
    context = error.get("context")
    line = f"shotclock: {envelope.code}: {error['message']}"
    if isinstance(context, dict) and "log_tail" in context:
        log = str(context["log_tail"]).rstrip("\n")
        return f"{line}. The end of its log:\n{log}" if log else f"{line}. It has written nothing"
    return f"{line}. {hint[:1].upper()}{hint[1:]}" if hint else line


def describe_start(data: object) -> str:
    """Return one line about a command that was started."""
    shown = data if isinstance(data, dict) else {}
    name = str(shown["name"] or shown["job_id"])
    state = "has started" if shown["ready_sign"] is None else "is ready"
    owner = ", no owner" if shown["owner_process"] is None else ""
    return (
        f"{shown['command']} {state}: job {shown['job_id']}, pid {shown['pid']}{owner}; "
        f"logs: {shlex.join([*COMMAND, 'job', 'logs', name])}; stop: {shlex.join([*COMMAND, 'job', 'stop', name])}\n"
    )
