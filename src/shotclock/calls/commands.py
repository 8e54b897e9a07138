"""A command: its task for a supervisor, from words and limits, and its outcome, from the supervisor's report."""

from __future__ import annotations

import errno
import os
import signal
from collections.abc import Callable, Mapping, Sequence

from ..core.envelope import EX_IOERR, STOP_SIGNAL_EXITS, Problem, Warning_, stop_problem, warning
from ..core.errors import Ending
from ..core.limits import DEFAULT_WIND_DOWN_MS, NS_PER_MS, ClockKind, Fired, format_duration, in_seconds
from ..supervise import kernel
from ..supervise.clock import monotonic_ns
from ..supervise.command_task import (
    DEFAULT_OUTPUT_LIMIT,
    Captured,
    CommandReport,
    CommandTask,
    Output,
    spill_path,
    state_directory,
    stop_file_path,
)
from ..supervise.environment import STOP_FILE_VARIABLE, child_environment
from .call import Call, Outcome, WindDown, wound_down_problem

# Errors of a full machine, which have nothing to do with the command.
_NO_MORE = (errno.EAGAIN, errno.ENOMEM, errno.EMFILE, errno.ENFILE)


def problems_with(argv: Sequence[str], env: Mapping[str, str], cwd: str | None) -> list[dict[str, str]]:
    problems = []
    if not argv:
        problems.append({"field": "command", "message": "no command given"})
    elif not argv[0]:
        problems.append({"field": "command", "message": "the command is empty"})
    for position, word in enumerate(argv):
        if trouble := _explain_unusable(word):
            problems.append({"field": f"command[{position}]", "message": trouble})
    for name, value in env.items():
        if not name or "=" in name or _explain_unusable(name):
            problems.append({"field": "env", "message": f"{name!r} cannot be the name of a variable"})
        if trouble := _explain_unusable(value):
            problems.append({"field": "env", "message": f"the value of {name} {trouble}"})
    if cwd is not None and (not cwd or _explain_unusable(cwd)):
        problems.append({"field": "cwd", "message": f"{cwd!r} cannot be a directory"})
    return problems


def _explain_unusable(text: str) -> str | None:
    if "\0" in text:
        return "contains a NUL character"
    try:
        os.fsencode(text)
    except UnicodeEncodeError:
        return "contains characters that cannot be passed to a program"
    return None


def assign(
    call: Call,
    argv: Sequence[str],
    *,
    env: Mapping[str, str] | None = None,
    base_env: Mapping[str, str] | None = None,
    cwd: str | None = None,
    output_limit: int = DEFAULT_OUTPUT_LIMIT,
    stop_signal: str = "SIGTERM",
    leave_children: bool = False,
    quiet: bool = True,
) -> CommandTask:
    """Return the supervisor's task, with the call's limits as instants. `quiet`: without pager, editor and colour."""
    clocks, bound = call.clocks, call.bound
    started = call.started_ns
    inherited = os.environ if base_env is None else base_env
    deadline = None if leave_children else bound.bell  # its children may outlive the deadline
    variables = child_environment(inherited, env or {}, call.trace, deadline, quiet=quiet)
    home = state_directory()
    stop_file = variables[STOP_FILE_VARIABLE] = stop_file_path(call.request_id, home)
    return CommandTask(
        argv=list(argv),
        env=variables,
        started_ns=started,
        cwd=cwd,
        bell_ns=bound.bell.at_ns if bound.bell else None,
        kill_ns=bound.kill_ns,
        soft_ns=started + clocks.soft_ms * NS_PER_MS if clocks.soft_ms else None,
        idle_ms=clocks.idle_ms or 0,
        grace_ms=clocks.grace_ms or 0,
        output_limit=output_limit,
        spill_stdout=spill_path(f"{call.request_id}.stdout", home),
        spill_stderr=spill_path(f"{call.request_id}.stderr", home),
        leave_children=leave_children,
        wind_down_ms=DEFAULT_WIND_DOWN_MS if clocks.wind_down_ms is None else clocks.wind_down_ms,
        stop_signal=stop_signal,
        stop_file=stop_file,
    )


def judge(call: Call, task: CommandTask, report: CommandReport) -> Outcome:
    warnings: list[Warning_] = []
    data = _output_data(task, report, warnings) if task.output == Output.CAPTURE.name else {}
    if report.unstartable is not None:
        return Outcome(Ending.NOT_STARTED, explain_unstartable(task, *report.unstartable), warnings=tuple(warnings))
    warnings += warn_left_behind("command", report.leaked, report.survivors)
    if kernel.is_proc_foreign():
        warnings.append(warning("PROC_UNFIT"))
    if report.status is not None:
        data["exit_code"] = report.status if report.status >= 0 else 128 - report.status
        if report.status < 0:
            data["signal"] = signal_name(-report.status)
    if report.jobs:
        data["jobs"] = report.jobs
        for job in report.jobs:
            message = f"{job['name']} continues as job {job['job_id']}"
            warnings.append(warning("JOB_CONTINUES", message, job_id=job["job_id"]))
    if report.stopped is not None:
        data["partial"] = True
    if report.soft_rang and call.winding_down is None:  # by the supervisor's own soft limit
        soft_ms = call.clocks.soft_ms or 0
        reason = f"the soft limit of {format_duration(soft_ms)} rang"
        fired = Fired(ClockKind.SOFT, call.name, soft_ms, soft_ms)
        call.winding_down = WindDown("soft clock", reason, task.soft_ns or 0, 0, fired)
    problem, ending = _judge_ending(call, task, report)
    return Outcome(ending, problem, data, warnings=tuple(warnings), survivors=report.survivors)


def warn_left_behind(
    what: str, leaked: Sequence[dict[str, object]], survivors: Sequence[dict[str, object]]
) -> list[Warning_]:
    """Return warnings about processes that outlived the work."""
    warnings = []
    if stopped := [left for left in leaked if left["pid"] not in [survivor["pid"] for survivor in survivors]]:
        names = ", ".join(f"{left['command']} ({left['pid']})" for left in stopped[:5])
        count = "1 process" if len(stopped) == 1 else f"{len(stopped)} processes"
        message = f"{count} outlived the {what}, stopped now: {names}"
        warnings.append(warning("DESCENDANTS_STOPPED", message, processes=stopped[:50]))
    if survivors:
        warnings.append(warning("SURVIVORS", processes=list(survivors[:50])))
    return warnings


def _judge_ending(call: Call, task: CommandTask, report: CommandReport) -> tuple[Problem | None, Ending]:
    limit_ms = call.bound.limit_ms
    if report.stopped is not None:
        if report.stopped in STOP_SIGNAL_EXITS:
            return stop_problem(report.stopped), Ending.KILLED
        return Problem("CANCELLED", "stopped by the caller", context={"reason": report.stopped}), Ending.KILLED
    if report.fired == ClockKind.TIMEOUT:
        message = f"Command execution timed out after {in_seconds(limit_ms)}"
        fired = call.fired(ClockKind.TIMEOUT, report.elapsed_ns)
        return Problem("TIMEOUT", message, fired=fired), Ending.KILLED
    if report.fired == ClockKind.IDLE:
        fired = call.fired(ClockKind.IDLE, report.elapsed_ns)
        message = f"no output for {format_duration(fired.limit_ms)}"
        return Problem("STALLED", message, fired=fired), Ending.KILLED
    if report.fired == ClockKind.INPUT:
        return _explain_input_wanted(call, task, report), Ending.KILLED
    if report.fired == ClockKind.SOFT or (report.soft_rang and report.status != 0):
        return wound_down_problem(call), Ending.KILLED
    if report.unwritten and report.status in (0, -signal.SIGPIPE, 128 + signal.SIGPIPE):  # as it sees our closed end
        message = f"the command's output could not be written: {os.strerror(report.unwritten)}"
        return Problem("FILE_UNWRITABLE", message, exit_code=EX_IOERR), Ending.FINISHED
    if report.status == 0:
        return None, Ending.FINISHED
    if report.status is None:
        return Problem("SUPERVISOR_LOST", "the command's end was not seen"), Ending.KILLED
    if report.status < 0:
        what = f"was ended by {signal_name(-report.status)}"
    else:
        what = f"ended with exit code {report.status}"
    return Problem("COMMAND_FAILED", f"the command {what}"), Ending.FINISHED


def _explain_input_wanted(call: Call, task: CommandTask, report: CommandReport) -> Problem:
    wanted = report.input_wanted
    fired = Fired(ClockKind.INPUT, call.name, task.input_ms, report.elapsed_ns // NS_PER_MS)
    waited = format_duration(task.input_ms)
    message = f"{wanted['command']} (pid {wanted['pid']}) waited {waited} for input from {wanted['waits_for']}"
    if wanted.get("prompt"):
        message += f"; the last line of the output is {wanted['prompt']!r}"
    return Problem("INPUT_WANTED", message, context={"input": wanted}, fired=fired)


def signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def explain_unstartable(task: CommandTask, step: str, number: int) -> Problem:
    """Return why a command was not started: the step that failed, and its errno."""
    why = os.strerror(number)
    if step == "machine":
        return Problem("MACHINE_UNFIT", kernel.find_unfitness() or "/proc could not be read", phase="validation")
    if step == "cwd":
        return Problem("CWD_UNUSABLE", f"cannot enter {task.cwd!r}: {why}", phase="validation")
    if step == "fork" or number in _NO_MORE:
        return Problem("SPAWN_FAILED", f"no new process could be started: {why}", phase="validation")
    command = task.argv[0]
    if number == errno.E2BIG:
        problem = {"field": "command", "message": "arguments and environment together are too long"}
        return Problem("ARG_ERROR", problem["message"], phase="validation", errors=[problem])
    if number in (errno.ENOENT, errno.ENOTDIR):
        if os.sep in command and os.path.exists(os.path.join(task.cwd or "", command)):
            why = "the interpreter named in its first line was not found"
            return Problem("COMMAND_NOT_FOUND", f"{command!r}: {why}", phase="validation")
        is_line = len(task.argv) == 1 and " " in command.strip() and os.sep not in command.partition(" ")[0]
        hint = "it is one word: leave out the quotes, or use sh -c" if is_line else None
        return Problem("COMMAND_NOT_FOUND", f"{command!r} was not found", phase="validation", suggestion=hint)
    return Problem("COMMAND_NOT_EXECUTABLE", f"{command!r} cannot be executed: {why}", phase="validation")


def _output_data(task: CommandTask, report: CommandReport, warnings: list[Warning_]) -> dict[str, object]:
    data: dict[str, object] = {}
    for name, captured in (("stdout", report.stdout), ("stderr", report.stderr)):
        text, exact = _text(captured)
        data[name] = text
        if not exact:
            import base64

            data[f"{name}_base64"] = base64.b64encode(captured.head + captured.tail).decode()
            warnings.append(warning("OUTPUT_NOT_UTF8", stream=name))
        if captured.truncated:
            data[f"{name}_bytes"] = captured.total
            data[f"{name}_file"] = captured.file
            whole = captured.file is not None and captured.file_bytes == captured.total
            kept = len(captured.head) + len(captured.tail)
            message = f"{name}: {captured.total} bytes came, {kept} are kept here"
            if captured.file:
                message += f", {'all' if whole else f'the first {captured.file_bytes}'} in {captured.file}"
            warnings.append(warning("OUTPUT_TRUNCATED", message, stream=name))
    return data


def _text(captured: Captured) -> tuple[str, bool]:
    """Return the output as text, and whether it is exact. A cut in the middle of a character does not count."""
    head, tail = captured.head, captured.tail
    if not captured.truncated:
        whole = head + tail
        try:
            return whole.decode(), True
        except UnicodeDecodeError:
            return whole.decode(errors="replace"), False
    head = _without_cut_end(head)
    tail = _without_cut_start(tail)
    dropped = captured.total - len(head) - len(tail)
    gap = f"\n[… {dropped} bytes left out …]\n"
    try:
        return head.decode() + gap + tail.decode(), True
    except UnicodeDecodeError:
        return head.decode(errors="replace") + gap + tail.decode(errors="replace"), False


def _without_cut_end(head: bytes) -> bytes:
    for back in range(1, min(4, len(head)) + 1):
        byte = head[-back]
        if byte & 0xC0 == 0x80:
            continue
        width = 4 if byte >= 0xF0 else 3 if byte >= 0xE0 else 2 if byte >= 0xC0 else 1
        return head[:-back] if width > back else head
    return head


def _without_cut_start(tail: bytes) -> bytes:
    for start in range(min(4, len(tail))):
        if tail[start] & 0xC0 != 0x80:
            return tail[start:]
    return tail if len(tail) > 3 else b""


def carry_out(call: Call, body: Callable[[], Outcome]) -> Outcome:
    """Run the body of a call within its limits."""
    from ..supervise import forked  # imports pickle, which `exec` does not need

    bell = call.bound.bell
    try:
        return forked.run(body, until_ns=bell.at_ns if bell is not None else None)
    except forked.Overdue as overdue:
        fired = call.fired(ClockKind.TIMEOUT, monotonic_ns() - call.started_ns)
        message = f"{call.name} timed out after {format_duration(fired.limit_ms)}"
        problem, left = Problem("TIMEOUT", message, fired=fired), overdue.survivors
    except forked.StoppedBySignal as interrupted:
        context: dict[str, object] = {"signal": interrupted.signal}
        problem = Problem("CANCELLED", str(interrupted), context=context, exit_code=interrupted.exit_code)
        return Outcome(Ending.KILLED, problem, {"partial": True}, survivors=interrupted.survivors)
    except forked.Raised as raised:
        problem = Problem("INTERNAL_ERROR", str(raised), context={"exception": raised.name})
        return Outcome(Ending.FINISHED, problem, traceback=raised.lines)
    except forked.NotStarted as refused:
        return Outcome(Ending.NOT_STARTED, Problem("SPAWN_FAILED", str(refused), phase="validation"))
    except forked.Died as died:
        problem, left = Problem("WORKER_CRASHED", f"the process running {call.name} died"), died.survivors
    return Outcome(Ending.KILLED, problem, survivors=left)
