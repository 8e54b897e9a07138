"""`shotclock exec`: timeout(1) for agents. One bounded command, really stopped, answered with one envelope.

Agents run it before every command, so it imports only what every start needs.
"""

from __future__ import annotations

import json
import os
import signal
import sys

from ..calls.call import Call, Outcome, admit, answer, inherited_deadline, invalid, no_time_left
from ..calls.commands import assign, judge, problems_with
from ..core.envelope import STOP_SIGNAL_EXITS, Envelope, Problem, warning
from ..core.errors import Ending
from ..core.limits import WORK_CLOCKS, ClockKind, Clocks, format_duration
from ..core.value_types import as_dict, field, record, replace, value
from ..supervise import foreground
from ..supervise.clock import monotonic_ns
from ..supervise.command_task import DEFAULT_OUTPUT_LIMIT, CommandReport, CommandTask, Output
from ..supervise.environment import AGENT_MARKS, OVERTIME_VARIABLE, without_questions
from ..supervise.foreground import TerminalSignals
from ..supervise.runners import runners_folder
from ..terminal.output import emit, emit_text, say_line, write_quietly
from ..terminal.parser import (
    Mistakes,
    Option,
    Subcommand,
    name_and_value,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ..supervise.owner import OwnerWatch

DEFAULTS = Clocks(timeout_ms=600_000, grace_ms=5_000)
AGENT_INPUT_WAIT_MS = 10_000  # where an agent runs the command, and no person can answer
MAX_OUTPUT_LIMIT = 1024 * 1024 * 1024

_STOP_SIGNALS = ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2")
_REPORTS = ("json", "line", "none")
# Exit codes of GNU timeout for our own part, without --json.
LIMIT_REACHED, NOT_DONE, NOT_EXECUTABLE, NOT_FOUND = 124, 125, 126, 127
STILL_RUNNING = 14  # as with --json
EXIT_CODES = {
    **dict.fromkeys(
        ("TIMEOUT", "STALLED", "NO_TIME_LEFT", "QUEUE_TIMEOUT", "INPUT_WANTED", "NOT_READY", "CANCELLED"), LIMIT_REACHED
    ),
    "INCOMPLETE": STILL_RUNNING,
    "COMMAND_NOT_EXECUTABLE": NOT_EXECUTABLE,
    "COMMAND_NOT_FOUND": NOT_FOUND,
}
READY_WITHIN_MS = 30_000
# Options of commands that run as jobs, of detached ones alone, and of all others.
_DETACHED_OPTIONS = {"lifetime", "ready_port", "ready_output", "ready_url", "ready_within"}
_JOB_OPTIONS = {"name", "owner", *_DETACHED_OPTIONS}
_FOREGROUND_OPTIONS = {"overtime", "leave_children", "input_wait", "soft", "wind_down"}
_LEFT_BEHIND = ("DESCENDANTS_STOPPED", "SURVIVORS")
REPORT_VARIABLE = "SHOTCLOCK_REPORT"
_OWN_CODE_HINT = "read what the command wrote to stderr; data.exit_code is its own"


@value
class Wording:
    """The names of the limits in the report line, and the advice when one was reached."""

    timeout: str = "--timeout"
    idle: str = "--idle"
    after_timeout: str = "Allow more time with --timeout, or do less in one command"
    after_silence: str = "Raise --idle, or make the command print its progress"
    after_question: str = ""  # without one it is that of the error
    after_leftovers: str = "Keep such processes with --leave-children"


@record
class ExecRequest:
    command: list[str] = field(default_factory=list)
    clocks: Clocks = field(default_factory=Clocks)
    overtime: str | None = None
    stop_signal: str = "SIGTERM"
    env: dict[str, str] = field(default_factory=dict)
    cwd: str | None = None
    json: bool = False
    report: str | None = None
    stdin: bool = False
    no_stdin: bool = False
    quiet_env: bool | None = None
    leave_children: bool = False
    input_wait: int | None = None
    help: bool = False
    output_limit: int = DEFAULT_OUTPUT_LIMIT
    program: str = "exec"
    owner_watch: OwnerWatch | None = None  # the command is stopped at its end
    wording: Wording = field(default_factory=Wording)
    detach: bool = False
    budget: int | None = None
    name: str | None = None
    lifetime: int | None = None
    ready_port: int | None = None
    ready_output: str | None = None
    ready_url: str | None = None
    ready_within: int = READY_WITHIN_MS
    owner: str | None = None
    errors: Mistakes = field(default_factory=list)

    def refuse(self, field: str, message: str) -> None:
        self.errors.append({"field": field, "message": message})


def main(words: list[str]) -> int:
    foreground.fill_standard_descriptors()
    signals = TerminalSignals()
    request = parse(words)
    if request.help:
        return emit_text(COMMAND.help(), 0)
    return carry_out(request, signals)


def carry_out(request: ExecRequest, signals: TerminalSignals) -> int:
    """Run the command and report. Return the exit code; a negative one is the signal to die of."""
    now = monotonic_ns()
    inherited = inherited_deadline(os.environ, now)
    call = admit(request.program, request.clocks, defaults=DEFAULTS, parent=inherited.deadline)
    call.warnings += tuple(warning("DEADLINE_UNREADABLE", text) for text in inherited.warnings)
    _allow_overtime(request, call)
    if (request.detach or request.budget is not None) and not request.errors:
        return _run_as_job(request, call, signals)
    if request.errors:
        outcome = invalid(request.errors)
    elif call.no_time_left:
        outcome = no_time_left(call)
    else:
        outcome = _run(request, call, signals)
    if not request.json:
        outcome = _pass_exit_code_through(outcome)
    return _deliver(answer(call, outcome), signals, request)


def parse(words: list[str]) -> ExecRequest:
    line = COMMAND.read(words)
    typed = line.typed
    limits = {f"{name}_ms": typed.pop(name) for name in WORK_CLOCKS if name in typed}
    env = dict(typed.pop("env", ()))
    request = ExecRequest(**typed, env=env, clocks=Clocks(**limits), help=line.wants == "help", errors=line.mistakes)
    timeout_ms = limits.get("timeout_ms", DEFAULTS.timeout_ms)
    if limits.get("soft_ms") and timeout_ms and limits["soft_ms"] >= timeout_ms:
        request.refuse("soft", "--soft must be shorter than --timeout")
    _check_background(request, {*typed, *(name.removesuffix("_ms") for name in limits)})
    choose_report(request)
    if not request.help:
        request.errors += problems_with(request.command, request.env, request.cwd)
    return request


def _check_background(request: ExecRequest, typed: set[str]) -> None:
    """Refuse options that have no meaning for a job, and those of a job for another command."""
    is_job = request.detach or request.budget is not None
    for name in sorted(_JOB_OPTIONS & typed) if not is_job else ():
        request.refuse(name, f"--{name.replace('_', '-')} needs --detach, or --budget")
    for name in sorted(_FOREGROUND_OPTIONS & typed) if is_job else ():
        request.refuse(name, f"--{name.replace('_', '-')} has no effect on a command in the background")
    if request.detach:
        if "timeout" in typed:
            request.refuse("timeout", "a detached command has a lifetime: write --lifetime instead of --timeout")
        if request.stdin:
            request.refuse("stdin", "a detached command has no stdin: give it a file as an argument")
    elif request.budget is not None:
        for name in sorted(_DETACHED_OPTIONS & typed):
            request.refuse(name, f"--{name.replace('_', '-')} needs --detach")
        if not request.budget:
            request.refuse("budget", "must be a duration above 0; leave it out to wait for the end")


def choose_report(request: ExecRequest) -> None:
    form = os.environ.get(REPORT_VARIABLE)
    if request.json or request.report is not None or not form:
        return
    if form in _REPORTS:
        request.report = form
    else:
        request.refuse(REPORT_VARIABLE, f"{form!r} is none of {', '.join(_REPORTS)}")


def _read_signal(text: str) -> str:
    name = text.upper()
    name = name if name.startswith("SIG") else f"SIG{name}"
    if name not in _STOP_SIGNALS:
        raise ValueError(f"{text!r} is not one of {', '.join(_STOP_SIGNALS)}")
    return name


def read_byte_count(text: str) -> int:
    digits, unit = text, 1
    if text[-1:] in ("k", "K", "m", "M"):
        digits, unit = text[:-1], 1024 if text[-1] in "kK" else 1024 * 1024
    if not (digits.isascii() and digits.isdecimal()) or len(digits) > 12:
        raise ValueError(f"{text!r} is not a number of bytes: write 65536, 64k or 1M")
    if int(digits) * unit > MAX_OUTPUT_LIMIT:
        raise ValueError(f"{text} is more than the 1024M that may be kept in memory")
    return int(digits) * unit


_CLOCKS = "Clocks (500ms, 30s, 5m, 1h30m or PT30S; 0 means none)"
_INPUT = "Input of the command"
_OUTPUT = "Output"
_BACKGROUND = "Background (--detach: a server; --budget: longer than the caller waits)"
COMMAND = Subcommand(
    "exec",
    "Run one command with a timeout; if it hangs, kill everything it started.",
    (
        Option.duration(
            "--timeout", "Kill the command after this time [10m]; a caller's own deadline still holds.", heading=_CLOCKS
        ),
        Option.duration(
            "--soft",
            "Ask it to exit (SIGTERM, and SHOTCLOCK_STOP_FILE appears) after this time, before the timeout.",
            heading=_CLOCKS,
        ),
        Option.taking(
            "--stop-signal",
            "S",
            "Ask by this signal instead: INT, HUP, QUIT, USR1 or USR2.",
            read=_read_signal,
            heading=_CLOCKS,
        ),
        Option.duration("--idle", "Kill it after this time without output.", heading=_CLOCKS),
        Option.duration(
            "--input-wait",
            "Kill it after a process has waited this long for input, on the terminal or on a stdin that only the "
            "caller can fill [none; 10s under a coding agent].",
            heading=_CLOCKS,
        ),
        Option.duration("--grace", "The time between SIGTERM and SIGKILL [5s].", heading=_CLOCKS),
        Option.taking(
            "--overtime",
            "WHO",
            "Ask whether it may take longer at the soft limit [3/4 of the timeout]: progress (while its output grows), "
            "command=CMD, or none. Further keys follow, separated by commas without spaces: budget=2m, "
            "max_requests=3, max_per_request=30s, observer_timeout=10s, hard_extends=true. `--overtime 2m` is "
            "progress,budget=2m. A CMD with a comma in it needs the same keys as a JSON object.",
            heading=_CLOCKS,
        ),
        Option.duration(
            "--wind-down", "The time to exit after the soft limit before it is killed [5s].", heading=_CLOCKS
        ),
        Option.taking("--cwd", "DIR", "Run in this directory.", heading=_INPUT),
        Option.taking("--env", "K=V", "Set a variable.", read=name_and_value, repeats=True, heading=_INPUT),
        Option.flag("--no-stdin", "Give it an empty stdin instead of ours.", excludes=("--stdin",), heading=_INPUT),
        Option.flag("--stdin", "Give it our stdin, as is the default.", heading=_INPUT),
        Option.flag(
            "--quiet-env",
            "Set variables that keep programs from asking, paging and colouring, if we have no value of our own for "
            "them [only where neither stdin nor stdout nor /dev/tty is a terminal].",
            negatable=True,
            default=None,
            heading=_INPUT,
        ),
        Option.flag("--leave-children", "Do not kill processes that outlive the command.", heading=_INPUT),
        Option.flag(
            "--json",
            "Print only the envelope on stdout, with the output in it. The exit code is meta.exit_code.",
            heading=_OUTPUT,
        ),
        Option.taking(
            "--report",
            "FORM",
            "The report on stderr at the end, without --json. line (the default): one line if we stopped the command "
            "or its children, or could not start it; json: the envelope; none: no report on a command that ran.",
            choices=_REPORTS,
            excludes=("--json",),
            heading=_OUTPUT,
        ),
        Option.taking(
            "--output-limit",
            "N",
            "With --json: keep this many bytes of each stream (64k, 1M), head and tail [1M]; the rest goes to a file.",
            read=read_byte_count,
            heading=_OUTPUT,
        ),
        Option.flag(
            "--detach",
            "Answer when the command is ready, and leave it running as a job until its lifetime or its owner ends, or "
            "`shotclock job stop`.",
            excludes=("--budget",),
            heading=_BACKGROUND,
        ),
        Option.taking(
            "--name",
            "NAME",
            "The name of the job, instead of its id. One of a name runs at a time.",
            heading=_BACKGROUND,
        ),
        Option.duration("--lifetime", "Stop it after this time [SHOTCLOCK_LIFETIME, else none].", heading=_BACKGROUND),
        Option.number(
            "--ready-port",
            "It is ready when it listens on this port; another process on it does not count.",
            1,
            65_535,
            metavar="PORT",
            excludes=("--ready-output", "--ready-url"),
            heading=_BACKGROUND,
        ),
        Option.taking(
            "--ready-output",
            "REGEX",
            "It is ready when a line of its output matches.",
            excludes=("--ready-url",),
            heading=_BACKGROUND,
        ),
        Option.taking(
            "--ready-url", "URL", "It is ready when a GET is answered with a status below 500.", heading=_BACKGROUND
        ),
        Option.duration("--ready-within", "Stop it if it is not ready by then [30s].", heading=_BACKGROUND),
        Option.taking(
            "--owner",
            "WHO",
            "Stop it when this process ends: agent, terminal, parent, a pid, or none [the coding agent, else the "
            "terminal's session, else none].",
            heading=_BACKGROUND,
        ),
        Option.duration(
            "--budget",
            "Wait this long. If it still runs then, answer with exit code 14; it continues as a job until its timeout.",
            heading=_BACKGROUND,
        ),
    ),
    rest="command",
    usage="[OPTIONS] -- COMMAND [ARGUMENTS…]",
    description="Run one command with a timeout. When a limit is reached, everything the command started is killed, "
    "also processes that left its group or session.",
    epilogue="""\
Without --json the output passes through unchanged, and the exit code is the command's. Only if we stopped the command
or its children, or could not start it, one line is added to stderr. SHOTCLOCK_REPORT=json sets --report json for all.

A signal that stops us (INT, TERM, HUP, QUIT) is passed to the command; SIGKILL follows after the grace, or at once with
a second signal. Other signals that would end us (USR1, USR2, ALRM, real-time ones) are only passed on. INT, HUP and
QUIT stay ignored if they were, as INT is for the `&` job of a script; PIPE is at its default for the command.

Where stdin, stdout or /dev/tty is a terminal, the command has it as under `timeout --foreground`: editors, pagers and
password prompts work, and Ctrl-C is the command's own. Ctrl-Z stops everything that it started, fg continues it; the
timeout keeps running. Elsewhere the command has a session of its own, and variables that keep programs from asking.

Exit codes: the command's own, and 128 + N if signal N ended it; those of timeout(1) for our part: 124 a limit was
reached; 125 bad options, an unusable directory or another failure of ours; 126 not executable; 127 not found. 14 says
that the budget is used up and the command continues. A signal that stopped us also ends us, unless the command handled
it and failed with a code of its own. With --json the exit code is meta.exit_code: 10 for a limit, 1 for a failing
command (COMMAND_FAILED), 130 for SIGINT.

Examples:

  shotclock exec --timeout 60s -- make test
  shotclock exec --timeout 10m --idle 1m --json -- npm ci
  shotclock exec --detach --name web --ready-port 3000 --lifetime 2h -- npm run dev""",
    main=main,
)
COMMANDS = {"exec": COMMAND}


def _allow_overtime(request: ExecRequest, call: Call) -> None:
    if request.overtime is None:
        return
    from ..core.overtime import Overtime, OvertimeError, OvertimePolicy

    written: object = request.overtime
    try:
        if request.overtime.lstrip().startswith("{"):
            written = json.loads(request.overtime)
        policy = OvertimePolicy.of(written, call.bound.limit_ms)
    except OvertimeError as error:
        request.refuse("overtime", str(error))
        return
    except ValueError as error:
        request.refuse("overtime", f"not a JSON object: {error}")
        return
    if policy is None:
        return
    call.overtime = Overtime(policy)
    if call.clocks.soft_ms is None:
        call.time.clocks = replace(call.clocks, soft_ms=policy.soft_ms(call.bound.limit_ms))
    if policy.has_observer and not call.clocks.soft_ms:
        request.refuse("overtime", "without a timeout there is no soft limit to ask at: add --soft")


def _run(request: ExecRequest, call: Call, signals: TerminalSignals) -> Outcome:
    input_ms = request.input_wait
    if input_ms is None:
        input_ms = AGENT_INPUT_WAIT_MS if any(map(os.environ.get, AGENT_MARKS)) else 0
    if input_ms and not foreground.has_input(passes_stdin=not request.no_stdin):
        input_ms = 0  # the command can reach none
    if request.json:
        output = Output.CAPTURE
    else:
        # To notice silence we must see the output; otherwise the command keeps our own descriptors. The prompt of a
        # command is worth a pipe, but not the terminal, nor the output of children that live on.
        may_relay = not (request.leave_children or os.isatty(1) or os.isatty(2))
        is_watched = call.clocks.idle_ms or call.overtime is not None or (input_ms and may_relay)
        output = Output.RELAY if is_watched else Output.INHERIT
    has_terminal = foreground.has_terminal()
    is_quiet = not has_terminal if request.quiet_env is None else request.quiet_env
    task = assign(
        call,
        request.command,
        env=request.env,
        base_env=without_questions(os.environ) if is_quiet else os.environ,
        quiet=False,
        cwd=request.cwd,
        output_limit=request.output_limit,
        leave_children=request.leave_children,
        stop_signal=request.stop_signal,
    )
    task.output = output.name
    task.input_ms = input_ms
    task.stdin = not request.no_stdin
    task.shares_group = has_terminal
    task.runners = runners_folder()
    if call.overtime is None:
        return judge(call, task, foreground.run(task, signals, owner=request.owner_watch))
    return judge(call, task, _run_with_overtime(call, task, signals))


def _run_with_overtime(call: Call, task: CommandTask, signals: TerminalSignals) -> CommandReport:
    # The event loop and the runtime take as long to import as a plain `exec` takes in all.
    import asyncio

    from ..calls.runtime import Runtime
    from ..calls.supervised_commands import run_in_foreground

    async def run() -> CommandReport:
        async with Runtime() as runtime:
            task.soft_ns = None  # the runtime asks the observer first
            if (address := runtime.overtime_address(call)) is not None:
                task.env[OVERTIME_VARIABLE] = address
            return await run_in_foreground(task, call, signals, runtime.observe)

    return asyncio.run(run())


def _run_as_job(request: ExecRequest, call: Call, signals: TerminalSignals) -> int:
    from . import _background as background  # imports the store, which other commands do without

    envelope = answer(call, background.run(as_dict(request), call, signals))
    error = envelope.error
    if not request.json and error is not None:
        exit_code = _own_exit_code(str(error["code"]), error.get("context"), envelope.data)
        envelope.meta["exit_code"] = exit_code or envelope.exit_code
    if request.json or request.report == "json" or not (request.detach or envelope.ending == Ending.DETACHED):
        return _deliver(envelope, signals, request)
    if error is not None:
        say_line(background.explain(envelope), after_child=True, is_alone=False, heard=signals.heard)
        return -number if (number := _deadly_signal(envelope)) else envelope.exit_code
    return emit_text(background.describe_start(envelope.data), 0, signals.heard)


def _pass_exit_code_through(outcome: Outcome) -> Outcome:
    """Replace the exit codes of the contract by the command's own and those of GNU timeout."""
    problem = outcome.problem
    if isinstance(problem, Problem):
        hint = _OWN_CODE_HINT if problem.code == "COMMAND_FAILED" else problem.suggestion
        exit_code = _own_exit_code(problem.code, problem.context, outcome.data)
        outcome.problem = replace(problem, exit_code=exit_code or problem.exit_code, suggestion=hint)
    return outcome


def _own_exit_code(code: str, context: object, data: object) -> int | None:
    """Return the exit code of a failure without --json; None if it is that of the signal that stopped us."""
    data = data if isinstance(data, dict) else {}
    own = int(data.get("exit_code") or 0)
    if code == "COMMAND_FAILED" and own:
        return own
    if _stop_signal(context) is None:
        return EXIT_CODES.get(code, NOT_DONE)
    return own if own and "signal" not in data else None  # it has handled the signal


def _stop_signal(context: object) -> str | None:
    """Return the name of the signal that stopped this process."""
    return str(context["signal"]) if isinstance(context, dict) and "signal" in context else None


def _deliver(envelope: Envelope, signals: TerminalSignals, request: ExecRequest) -> int:
    if request.json:
        return emit(envelope, signals.heard)
    write_quietly(sys.stdout, "")
    if request.report == "json":
        say_line(envelope.to_json(), after_child=True, heard=signals.heard)
    elif request.report != "none" or envelope.ending == Ending.NOT_STARTED:  # which has printed nothing itself
        say_line(_report_line(envelope, request), after_child=True, is_alone=False, heard=signals.heard)
    return -number if (number := _deadly_signal(envelope)) else envelope.exit_code


def _deadly_signal(envelope: Envelope) -> int:
    """Return the signal to die of: it stopped us, or Ctrl-C has ended the command."""
    data = envelope.data if isinstance(envelope.data, dict) else {}
    name = _stop_signal(envelope.error and envelope.error.get("context"))
    if name is not None and envelope.exit_code == STOP_SIGNAL_EXITS.get(name):
        return signal.Signals[name]
    is_interrupted = envelope.code == "COMMAND_FAILED" and data.get("signal") == "SIGINT"
    return signal.SIGINT if is_interrupted else 0


def _report_line(envelope: Envelope, request: ExecRequest) -> str:
    """Return one line that explains itself; an empty one if the command ended by itself and left nothing behind."""
    error = None if envelope.code == "COMMAND_FAILED" else envelope.error
    parts, advice = [], request.wording.after_leftovers
    if error is not None:
        what, advice = _explain(envelope, error, request)
        parts.append(f"{envelope.code}: {what}")
    parts += [f"{left['code']}: {left['message']}" for left in envelope.warnings if left["code"] in _LEFT_BEHIND]
    if not parts:
        return ""
    line = f"shotclock: {'; '.join(parts)}{f'. {advice}' if advice else ''}"
    return " ".join(line.splitlines())


def _explain(envelope: Envelope, error: dict[str, object], request: ExecRequest) -> tuple[str, str]:
    """Return what was stopped and after how long, and what to try."""
    context, words = error.get("context"), request.wording
    took = format_duration(int(str(envelope.meta["duration_ms"])))
    if (name := _stop_signal(context)) is not None:
        return f"stopped by {name} after {took}", ""
    if isinstance(context, dict) and "reason" in context:
        return f"stopped after {took}: {context['reason']}", ""
    hint = "" if error.get("errors") else str(error["suggestion"])
    message, hint = str(error["message"]), hint[:1].upper() + hint[1:]
    clock = context.get("clock") if isinstance(context, dict) else None
    if not isinstance(clock, dict) or envelope.ending == Ending.NOT_STARTED:
        return message, hint
    limit, elapsed = format_duration(clock["limit_ms"]), format_duration(clock["elapsed_ms"])
    if clock["kind"] == ClockKind.IDLE:
        return f"stopped after {elapsed}: no output for {limit}, the limit of {words.idle}", words.after_silence
    if clock["kind"] == ClockKind.SOFT:
        why = f"stopped after {elapsed}: not done at the soft limit of {limit}"
        return why, "Raise --soft, or do less in one command"
    if clock["kind"] != ClockKind.TIMEOUT:
        return f"stopped after {elapsed}: {message}", words.after_question or hint
    if clock["owner"] != request.program:
        return f"stopped after {elapsed}, the deadline of the {clock['owner']}", "Give the caller more time"
    return f"stopped after {limit}, the limit of {words.timeout}", words.after_timeout
