"""The tools of `shotclock serve shell`: commands in a shell, for agents that cannot put `exec` before their own.

Every call answers within the budget. A command that takes longer continues as a job of the connection. A failed command
is an error of `run` and `wait`; the other tools only report it. An answer has the state of the job as typed data, and
as text for a model.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping
from typing import Annotated, Any, NamedTuple

from mcp_types import Tool, ToolAnnotations
from pydantic import Field, TypeAdapter

from ...calls.call import Call, CallRequest, Outcome
from ...calls.outcomes import failure_outcome
from ...calls.supervised_commands import run_shielded
from ...core.arguments import signature_of
from ...core.envelope import Envelope, Problem, shorten
from ...core.errors import Ending, Failure
from ...core.limits import Clocks, format_duration
from ...core.value_types import JsonObject, replace
from ...dispatch.dispatcher import Dispatcher
from ._results import result_schema
from .shell_jobs import CLOSE_GRACE_MS, GRACE_MS, ShellJob, ShellJobs, ShellLimits

COMMAND_SHOWN = 500
HOW_TO_CONTINUE = "call `wait` to wait for its end, `logs` to read its output, or `stop`"
LIMIT_NAMES = {"run": "its timeout of", "start": "its lifetime of"}


@dataclasses.dataclass
class ShellJobState:
    """A job, in an answer. `output` is the beginning and the end, or the lines that were asked for."""

    job: str
    status: str
    summary: str
    command: str
    cwd: str
    duration_ms: int
    lines: int
    bytes: int
    exit_code: int | None = None
    signal: str | None = None
    ready: bool | None = None
    input_wanted: JsonObject | None = None
    output: str = ""
    lines_left_out: int = 0
    first_line: int | None = None
    next_line: int | None = None
    output_file: str | None = None
    output_file_is_whole: bool | None = None


@dataclasses.dataclass
class JobList:
    summary: str
    jobs: list[ShellJobState]


def answer_job(job: ShellJob, budget_ms: int) -> Outcome:
    """Return the outcome of the command, or that it continues."""
    if job.outcome is None:
        unfinished = Problem("INCOMPLETE", f"{job.id} is still running", suggestion=HOW_TO_CONTINUE)
        return Outcome(Ending.DETACHED, unfinished, _shown(job), budget_ms=budget_ms)
    ended, problem = job.outcome, _problem_of(job.outcome)
    if problem is not None and problem.code == "COMMAND_FAILED":
        problem = replace(problem, suggestion="read data.output; data.exit_code is the command's own")
    return Outcome(ended.ending, problem, _shown(job), warnings=ended.warnings, survivors=ended.survivors)


def answer_start(job: ShellJob, budget_ms: int) -> Outcome:
    if job.is_ready is not False and not job.has_ended:
        return report_job(job)
    answer = answer_job(job, budget_ms)
    if job.has_ended and answer.problem is None and job.is_ready is False:
        answer.problem = Problem("COMMAND_FAILED", "the command ended with exit code 0 before it was ready")
    return answer


def report_job(job: ShellJob) -> Outcome:
    """Return the state of a job without judging its command."""
    ended = job.outcome
    warnings, survivors = ((), ()) if ended is None else (ended.warnings, ended.survivors)
    return Outcome(Ending.FINISHED, data=_shown(job), warnings=warnings, survivors=survivors)


def _shown(job: ShellJob) -> dict[str, object]:
    state = _state(job)
    if not job.has_ended:
        state.summary += f" Next: {HOW_TO_CONTINUE}."
    state.output, state.lines_left_out = job.output.excerpt()
    return _known(state)


def answer_lines(job: ShellJob, since_line: int, most: int) -> Outcome:
    state = _state(job)
    found = job.output.lines_after(since_line, most)
    state.output, state.first_line = found.text, found.first_line
    state.next_line = min(found.last_line, job.output.complete_lines)
    if found.first_line > since_line + 1:
        state.summary += f" Lines {since_line + 1} to {found.first_line - 1} were not kept."
    if found.last_line < found.first_line:
        state.summary += f" No line after {since_line}; there are {state.lines}."
    else:
        state.summary += f" Lines {found.first_line} to {found.last_line} of {state.lines}:"
    return Outcome(Ending.FINISHED, data=_known(state))


def _known(state: ShellJobState) -> dict[str, object]:
    """Return the fields that have a value: some clients show a model this data, and not the text."""
    return {name: given for name, given in dataclasses.asdict(state).items() if given is not None}


def _state(job: ShellJob) -> ShellJobState:
    data = job.outcome.data if job.outcome is not None and isinstance(job.outcome.data, dict) else {}
    output = job.output
    job.is_wait_reported = bool(job.input_wanted)
    return ShellJobState(
        job=job.id,
        status="ended" if job.has_ended else "running",
        summary=_summary(job),
        command=shorten(job.command, COMMAND_SHOWN),
        cwd=job.cwd,
        duration_ms=job.running_ms,
        lines=output.lines,
        bytes=output.total,
        exit_code=data.get("exit_code"),  # type: ignore[arg-type]
        signal=data.get("signal"),  # type: ignore[arg-type]
        ready=job.is_ready,
        input_wanted=job.input_wanted or None,
        output_file=output.file,
        output_file_is_whole=None if output.file is None else output.is_file_whole,
    )


def _summary(job: ShellJob) -> str:
    """Return the state of a job in a sentence or two."""
    lasted, outcome = format_duration(round(job.running_ms, -2) or job.running_ms), job.outcome
    if outcome is None:
        parts = [f"{job.id} is running, for {lasted} now"]
        if job.is_ready is not None:
            parts[0] += ", and is ready" if job.is_ready else ", and is not ready yet"
        if wanted := job.input_wanted:
            prompt = f"; the last line of its output is {wanted['prompt']!r}" if wanted.get("prompt") else ""
            parts.append(f"{wanted['command']} (pid {wanted['pid']}) waits for input: use send_input{prompt}")
        return f"{'. '.join(parts)}."
    problem = _problem_of(outcome)
    sentences = [_describe_end(job, outcome, problem, lasted)]
    sentences += [str(warning["message"]) for warning in outcome.warnings]
    if outcome.ending is Ending.KILLED and not outcome.survivors and problem and problem.code != "SUPERVISOR_LOST":
        sentences.append("no process of it is left")
    return f"{job.id}: {'; '.join(sentences)}."


def _describe_end(job: ShellJob, outcome: Outcome, problem: Problem | None, lasted: str) -> str:
    data: Any = outcome.data or {}
    if problem is None or problem.code == "COMMAND_FAILED":
        what = f"ended by {data['signal']}" if data.get("signal") else f"exit code {data['exit_code']}"
        return f"{what} after {lasted}"
    if job.stop_reason and problem.code == "CANCELLED":
        return f"stopped by {job.stop_reason} after {lasted}"
    if problem.code == "TIMEOUT" and problem.fired is not None:
        which = LIMIT_NAMES.get(problem.fired.owner, "the time that was left to this server:")
        return f"stopped after {which} {format_duration(problem.fired.limit_ms)}"
    if outcome.ending is Ending.NOT_STARTED:
        return f"not started: {problem.message}"
    return f"stopped: {problem.message}"


def _problem_of(outcome: Outcome) -> Problem | None:
    return outcome.problem() if callable(outcome.problem) else outcome.problem


def answer_list(jobs: list[ShellJob]) -> Outcome:
    states = [_state(job) for job in jobs]
    running = sum(state.status == "running" for state in states)
    summary = f"{running} running, {len(states) - running} ended."
    return Outcome(Ending.FINISHED, data={"summary": summary, "jobs": [_known(state) for state in states]})


def text_of(envelope: Envelope) -> str | None:
    """Return the summary and the output, or the error of a call that has no job."""
    data, error = envelope.data, envelope.error
    if isinstance(data, dict) and "summary" in data:
        jobs: Any = data.get("jobs", ())
        lines = [str(data["summary"]), *(f"{job['summary']}\n  $ {job['command']}" for job in jobs)]
        return "\n".join(lines) + (f"\n\n{data['output']}" if data.get("output") else "")
    return None if error is None else f"{error['code']}: {error['message']}\n{error['suggestion']}"


INSTRUCTIONS = (
    "Runs shell commands that always end. Use `run` for a command, and `start` for a server or a program that reads "
    "input. Processes that a command has left in the background are stopped when it ends: use `start` for "
    "those that should stay. All jobs end with this connection."
)
# How long `start` looks whether a command ends at once.
START_LOOK_S = 0.5
# For the reaction to input: the first output, then a pause, and no longer than both together.
REPLY_S, REPLY_PAUSE_S, REPLY_LIMIT_S = 1.0, 0.2, 3.0
PROBE_S, PROBE_PAUSE_S = 0.5, 0.1
LONGEST_S = 7 * 86_400
MOST_INPUT = 64_000  # an empty pipe takes this at once

Command = Annotated[str, Field(min_length=1, max_length=100_000, description="A command line for bash (else sh).")]
Folder = Annotated[
    str | None, Field(max_length=4_000, description="The working directory; by default that of this server.")
]
JobId = Annotated[str, Field(max_length=100, description="The id or name of a job of this connection.")]
Seconds = Annotated[float | None, Field(gt=0, le=LONGEST_S, allow_inf_nan=False)]
Method = Callable[..., Awaitable[Outcome]]


class ToolCall(NamedTuple):
    call: Call
    budget_ms: int

    @property
    def budget_s(self) -> float:
        return self.budget_ms / 1000


class ShellTools:
    """The tools and jobs of one connection."""

    def __init__(self, dispatcher: Dispatcher, limits: ShellLimits, folder: str) -> None:
        self._dispatcher, self._limits = dispatcher, limits
        self._jobs = ShellJobs(dispatcher.runtime, folder)
        self._methods: dict[str, Method] = {
            "run": self.run,
            "start": self.start,
            "logs": self.logs,
            "wait": self.wait,
            "send_input": self.send_input,
            "stop": self.stop,
            "list": self.list_jobs,
        }
        self.names: Collection[str] = self._methods.keys()
        self.tools: dict[str, Tool] = {name: _tool(name, method) for name, method in self._methods.items()}

    async def run(
        self,
        ctx: ToolCall,
        command: Command,
        cwd: Folder = None,
        timeout_s: Annotated[
            Seconds, Field(description="Stop it after this time; by default the timeout of this server.")
        ] = None,
    ) -> Outcome:
        """Run a command and answer with its exit code and output (stdout and stderr together; of a long one the
        beginning and the end, and the path of the whole). Its stdin is empty. Everything it has started is stopped when
        it ends. If it takes longer than a call may wait, it continues as a job, and the answer INCOMPLETE names it."""
        job = self._jobs.start(ctx.call, command, cwd, has_stdin=False)
        async with _stopped_if_cancelled(job, ctx):
            await job.until(lambda: job.has_ended, ctx.budget_s)
        return answer_job(job, ctx.budget_ms)

    async def start(
        self,
        ctx: ToolCall,
        command: Command,
        name: Annotated[
            str | None,
            Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$", description="The id of the job; by default job-N."),
        ] = None,
        cwd: Folder = None,
        ready_port: Annotated[
            int | None, Field(ge=1, le=65535, description="Answer once this port of this machine accepts connections.")
        ] = None,
        ready_output: Annotated[
            str | None, Field(min_length=1, max_length=1_000, description="Answer once the output contains this text.")
        ] = None,
        ready_within_s: Annotated[float, Field(gt=0, le=LONGEST_S, description="How long to wait for that.")] = 30,
        lifetime_s: Annotated[
            Seconds, Field(description="Stop it after this time; by default it ends with the connection.")
        ] = None,
    ) -> Outcome:
        """Start a command in the background, such as a server or a program that reads input (see send_input), and
        answer when it is ready. It is stopped by `stop`, after its lifetime, and at the end of this connection."""
        if ready_port is not None and await _accepts(ready_port):
            message = f"port {ready_port} already accepts connections: another program would be taken for this one"
            raise Failure("CONFLICT", message, suggestion="use another port, or stop that program")
        job = self._jobs.start(ctx.call, command, cwd, name, has_stdin=True)
        if ready_output is not None:
            job.expect_output(ready_output)
        async with _stopped_if_cancelled(job, ctx):
            if ready_port is not None:
                await _probe(job, ready_port, min(ready_within_s, ctx.budget_s))
            elif ready_output is not None:
                await job.until(lambda: job.has_ended or bool(job.is_ready), min(ready_within_s, ctx.budget_s))
            # A server behind a `&` is stopped soon, also if it was ready before that.
            await job.until(lambda: job.has_ended, START_LOOK_S - job.running_ms / 1000)
        return answer_start(job, ctx.budget_ms)

    async def logs(
        self,
        ctx: ToolCall,
        job: JobId,
        since_line: Annotated[
            int | None, Field(ge=0, description="Only lines after this number; by default the last max_lines.")
        ] = None,
        max_lines: Annotated[int, Field(ge=1, le=2_000)] = 100,
    ) -> Outcome:
        """Return lines of the output of a job. Pass next_line of the answer as since_line to read on."""
        found = self._jobs.find(job)
        if since_line is None:
            since_line = max(0, found.output.lines - max_lines)
        return answer_lines(found, since_line, max_lines)

    async def wait(
        self,
        ctx: ToolCall,
        job: JobId,
        timeout_s: Annotated[
            Seconds, Field(description="Answer after this time; at most, and by default, as long as a call may wait.")
        ] = None,
    ) -> Outcome:
        """Wait for the end of a job, and answer as `run` does. Answers earlier, once, if the job waits for input."""
        found = self._jobs.find(job)
        limit_s = ctx.budget_s if timeout_s is None else min(timeout_s, ctx.budget_s)
        await found.until(lambda: found.has_ended or found.has_new_wait, limit_s)
        return answer_job(found, ctx.budget_ms)

    async def send_input(
        self,
        ctx: ToolCall,
        job: JobId,
        text: Annotated[
            str, Field(max_length=MOST_INPUT, description="A newline is added if it ends without one.")
        ] = "",
        end: Annotated[bool, Field(description="Close stdin afterwards.")] = False,
    ) -> Outcome:
        """Write text to the stdin of a job of `start`, and return the lines that it writes within a moment."""
        found = self._jobs.find(job)
        before = found.output.complete_lines
        line = text if not text or text.endswith("\n") else f"{text}\n"
        await found.write(line.encode("utf-8", "replace"), end=end)
        await _await_reply(found)
        return answer_lines(found, before, 2_000)

    async def stop(self, ctx: ToolCall, job: JobId) -> Outcome:
        """Stop a job and everything it has started: SIGTERM, and SIGKILL 2 seconds later."""
        found = self._jobs.find(job)
        await found.stop("the tool stop")
        return report_job(found)

    async def list_jobs(self, ctx: ToolCall) -> Outcome:
        """List the jobs of this connection: those that run, and the last that ended."""
        return answer_list(self._jobs.all())

    # --- the interface of the middleware ------------------------------------------------------------------

    def mistakes_in(self, name: str, arguments: Mapping[str, Any]) -> list[dict[str, str]]:
        _, mistakes = signature_of(self._methods[name]).check(arguments)
        if arguments.get("ready_port") is not None and arguments.get("ready_output") is not None:
            mistakes.append({"field": "ready_output", "message": "give this or ready_port, not both"})
        return mistakes

    def wait_ms(self, name: str, arguments: Mapping[str, Any]) -> int | None:
        return self._limits.budget_ms

    def begin(self, request: CallRequest) -> Call:
        """Start the clocks of the command, or of a tool that starts none. A job may outlive the time of its caller."""
        name, begin = request.name, self._dispatcher.begin_own
        arguments: JsonObject = signature_of(self._methods[name]).check(request.arguments)[0]
        timeout_s = arguments.get("timeout_s")
        if name == "run":
            clocks = Clocks(self._limits.timeout_ms, idle_ms=self._limits.idle_ms, grace_ms=GRACE_MS)
            if timeout_s is not None:
                clocks = replace(clocks, timeout_ms=_in_ms(timeout_s))
            return begin(name, clocks, None, mutates=True)
        if name == "start":
            lifetime_s = arguments["lifetime_s"]
            timeout_ms = 0 if lifetime_s is None else _in_ms(lifetime_s)
            return begin(name, Clocks(timeout_ms, grace_ms=GRACE_MS), None, mutates=True)
        is_mutating = name in ("send_input", "stop")
        return begin(name, Clocks(timeout_ms=0), request.parent, mutates=is_mutating, idempotent=name == "stop")

    async def carry_out(self, call: Call, request: CallRequest) -> Envelope:
        arguments, _ = signature_of(self._methods[request.name]).check(request.arguments)
        async with self._dispatcher.runtime.answering(call) as answering:
            try:
                ctx = ToolCall(call, request.budget_ms or 0)
                answering.outcome = await self._methods[request.name](ctx, **arguments)
            except Failure as failure:
                answering.outcome = failure_outcome(failure)
                if failure.side_effects is None:
                    answering.outcome.ending = Ending.NOT_STARTED
        return answering.envelope

    def text_of(self, name: str, envelope: Envelope) -> str | None:
        return text_of(envelope)

    async def close(self) -> None:
        await self._jobs.close()


def _in_ms(seconds: float) -> int:
    return max(1, round(seconds * 1000))


def _tool(name: str, method: Method) -> Tool:
    reads = name in ("logs", "wait", "list")
    result = JobList if name == "list" else ShellJobState
    return Tool(
        name=name,
        description=" ".join((inspect.getdoc(method) or "").split()),
        input_schema={"type": "object", **signature_of(method).json_schema()},
        output_schema=result_schema(TypeAdapter(result).json_schema(), may_be_unfinished=False),
        annotations=ToolAnnotations(
            read_only_hint=reads,
            destructive_hint=not reads,  # a shell may do anything
            idempotent_hint=reads or name == "stop",
            open_world_hint=name in ("run", "start", "send_input"),
        ),
    )


@contextlib.asynccontextmanager
async def _stopped_if_cancelled(job: ShellJob, ctx: ToolCall) -> AsyncIterator[None]:
    """Stop a job whose caller has cancelled the call and does not know the id. Its output so far is kept."""
    try:
        yield
    except asyncio.CancelledError:
        await run_shielded(job.stop("the caller", CLOSE_GRACE_MS))  # also at the end of the connection
        ctx.call.cancellation.outcome = answer_job(job, ctx.budget_ms)
        raise


async def _accepts(port: int) -> bool:
    for host in ("127.0.0.1", "::1"):
        with contextlib.suppress(OSError, TimeoutError):
            async with asyncio.timeout(PROBE_S):
                _, writer = await asyncio.open_connection(host, port)
                writer.close()
                return True
    return False


async def _probe(job: ShellJob, port: int, limit_s: float) -> None:
    job.is_ready = False
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(limit_s):
            while not await _accepts(port):
                if await job.until(lambda: job.has_ended, PROBE_PAUSE_S):
                    return
            job.is_ready = not job.has_ended


async def _await_reply(job: ShellJob) -> None:
    """Wait for output, and then for a pause in it."""

    async def has_written(limit_s: float) -> bool:
        seen = job.output.total
        return await job.until(lambda: job.has_ended or job.output.total > seen, limit_s) and not job.has_ended

    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(REPLY_LIMIT_S):
            is_writing = await has_written(REPLY_S)
            while is_writing:
                is_writing = await has_written(REPLY_PAUSE_S)
