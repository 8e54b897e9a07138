"""The answers of `shotclock serve shell`: the state of a job as typed data, and as text for a model."""

from __future__ import annotations

import dataclasses
from typing import Any

from ...calls.call import Outcome
from ...core.envelope import Envelope, Problem, shorten
from ...core.errors import Ending
from ...core.limits import format_duration
from ...core.value_types import replace
from .shell_jobs import ShellJob

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
    input_wanted: dict[str, Any] | None = None
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
