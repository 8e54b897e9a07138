"""`shotclock timeout`: the words and exit codes of GNU timeout, with the whole tree stopped. Silent without -v."""

from __future__ import annotations

import getopt
import math
import os
import re
import signal
import sys

from .._version import __version__
from ..calls.call import admit, inherited_deadline
from ..calls.commands import assign, judge, problems_with
from ..core.limits import MAX_MS, ClockKind, Clocks
from ..core.value_types import record
from ..supervise import foreground
from ..supervise.clock import monotonic_ns
from ..supervise.command_task import CommandReport, Output
from ..supervise.foreground import TerminalSignals
from ..terminal.output import say_line, write_quietly
from ..terminal.parser import Option, Subcommand
from .exec import LIMIT_REACHED, NOT_DONE, NOT_EXECUTABLE, NOT_FOUND

# The time between the signal and SIGKILL without -k. GNU timeout would wait for ever.
GRACE_MS = 5_000
KILLED = 128 + signal.SIGKILL

_SECONDS = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400}
_DECIMAL = r"(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:e[+-]?[0-9]+)?"
_HEXADECIMAL = r"0x(?:[0-9a-f]+\.?[0-9a-f]*|\.[0-9a-f]+)(?:p[+-]?[0-9]+)?"
_DURATION = rf"\s*(?P<number>(?i:\+?(?:{_HEXADECIMAL}|{_DECIMAL}|inf(?:inity)?)))(?P<unit>[smhd]?)"


class Misused(Exception):
    pass


@record
class TimeoutRequest:
    command: list[str]
    duration_ms: int
    kill_after_ms: int = 0
    signal: int = int(signal.SIGTERM)
    verbose: bool = False
    foreground: bool = False
    preserve_status: bool = False


def main(words: list[str]) -> int:
    foreground.fill_standard_descriptors()
    try:
        request = parse(words)
    except Misused as misused:
        say_line(f"timeout: {misused}\nTry 'shotclock timeout --help' for more information.")
        return NOT_DONE
    if isinstance(request, str):
        write_quietly(sys.stdout, request)
        return 0
    return run(request)


def parse(words: list[str]) -> TimeoutRequest | str:
    """Return the request, or the text to print. Options end at the first word that is none."""
    try:
        options, rest = getopt.getopt(words, "k:s:vfph", [*_LONG_OPTIONS, "help", "version"])
    except getopt.GetoptError as error:
        raise Misused(str(error)) from None
    request = TimeoutRequest(rest[1:], 0)
    for name, text in options:
        match name:
            case "-k" | "--kill-after":
                request.kill_after_ms = read_duration_ms(text)
            case "-s" | "--signal":
                request.signal = read_signal(text)
            case "-v" | "--verbose":
                request.verbose = True
            case "-f" | "--foreground":
                request.foreground = True
            case "-p" | "--preserve-status":
                request.preserve_status = True
            case "--version":
                return f"timeout (shotclock) {__version__}\n"
            case _:
                return COMMAND.help()
    if not request.command:
        raise Misused("a DURATION and a COMMAND are needed" if not rest else "no COMMAND after the DURATION")
    request.duration_ms = read_duration_ms(rest[0])
    if problems := problems_with(request.command, {}, None):
        raise Misused(problems[0]["message"])
    return request


def read_duration_ms(text: str) -> int:
    """Return milliseconds, rounded up; what is too long is the longest limit there is."""
    match = re.fullmatch(_DURATION, text, re.ASCII)
    if match is None:
        raise Misused(f"invalid time interval '{text}'")
    number = match["number"].lower()
    is_hexadecimal = "x" in number
    try:
        seconds = (float.fromhex(number) if is_hexadecimal else float(number)) * _SECONDS[match["unit"]]
    except OverflowError:
        return MAX_MS
    mantissa = number.partition("p" if is_hexadecimal else "e")[0]
    if not seconds and mantissa.strip("+0x."):
        return 1  # too small for a float, but not none
    return MAX_MS if seconds * 1000 >= MAX_MS else math.ceil(seconds * 1000)


def read_signal(text: str) -> int:
    """Return the number of a signal by its name, its number, or the exit code of a process that it ended."""
    name = text.upper().removeprefix("SIG")
    number = -1
    if text.isascii() and text.isdecimal() and len(text) < 10:
        number = int(text) & (0xFF if int(text) >= 0xFF else 0x7F)
    elif name == "EXIT":
        number = 0
    elif f"SIG{name}" in signal.Signals.__members__:
        number = signal.Signals[f"SIG{name}"]
    elif (match := re.fullmatch(r"RT(MIN|MAX)([+-][0-9]{1,2})", name)) is not None:
        number = signal.Signals[f"SIGRT{match[1]}"] + int(match[2])
    if number != 0 and number not in signal.valid_signals():
        raise Misused(f"'{text}': invalid signal")
    return int(number)


def name_of(number: int) -> str:
    try:
        return signal.Signals(number).name.removeprefix("SIG")
    except ValueError:
        return str(number)


def run(request: TimeoutRequest) -> int:
    signals = TerminalSignals(has_alarm=True)
    clocks = Clocks(timeout_ms=request.duration_ms, grace_ms=request.kill_after_ms or GRACE_MS)
    parent = inherited_deadline(os.environ, monotonic_ns()).deadline
    call = admit("timeout", clocks, parent=parent)
    if call.no_time_left:
        return LIMIT_REACHED
    task = assign(call, request.command, quiet=False)
    task.output, task.stdin = Output.INHERIT.name, True
    task.shares_group = request.foreground or foreground.has_terminal()
    task.timeout_signal, task.tells_signals = request.signal, request.verbose

    def show(number: int) -> None:
        say_line(f"timeout: sending signal {name_of(number)} to command '{request.command[0]}'")

    report = foreground.run(task, signals, show)
    problem = judge(call, task, report).problem
    if report.unstartable is not None or (report.status is None and report.fired is None and report.stopped is None):
        assert problem is not None and not callable(problem)
        say_line(f"timeout: {problem.message}")
        return {"COMMAND_NOT_FOUND": NOT_FOUND, "COMMAND_NOT_EXECUTABLE": NOT_EXECUTABLE}.get(problem.code, NOT_DONE)
    if report.survivors:
        say_line(f"timeout: {len(report.survivors)} processes could not be killed")
    return exit_code(request, report)


def exit_code(request: TimeoutRequest, report: CommandReport) -> int:
    """Return the exit code of GNU timeout; a negative one is the signal to die of."""
    status = report.status if report.status is not None else -signal.SIGKILL  # the kill was seen, its end was not
    if report.fired != ClockKind.TIMEOUT:
        return status
    is_kill_asked = bool(request.kill_after_ms) or request.signal == signal.SIGKILL
    if request.preserve_status or (status == -signal.SIGKILL and is_kill_asked):
        return status if status >= 0 else 128 - status
    return LIMIT_REACHED


COMMAND = Subcommand(
    "timeout",
    "Run one command with a timeout, in the words of timeout(1).",
    (
        Option.taking("--kill-after", "D", "-k D: send SIGKILL this long after the first signal [5s]."),
        Option.taking("--signal", "S", "-s S: the signal at the timeout, by name or number [TERM]."),
        Option.flag("--verbose", "-v: say on stderr which signal is sent."),
        Option.flag("--foreground", "-f: leave the command in our process group, also off a terminal."),
        Option.flag("--preserve-status", "-p: exit with the command's own code, also after the timeout."),
        Option.flag("--version", "Show the version."),
    ),
    main=main,
    usage="[OPTIONS] DURATION COMMAND [ARGUMENTS…]",
    description="Run a command, and stop it with everything it started after DURATION: seconds, or a number with s, m, "
    "h or d; 0 means no limit. Options, output and exit codes are those of GNU timeout.",
    epilogue="""\
Exit codes: the command's own; 124 after the timeout; 125 a failure or misuse of timeout itself; 126 the command cannot
be executed; 127 it was not found; 137 it was killed because of -k or -s KILL.

Unlike GNU timeout it stops processes in sessions of their own, and what the command leaves behind, and sends SIGKILL
also without -k, after 5 seconds. `shotclock exec` adds more limits, reports and JSON.""",
)
COMMANDS = {"timeout": COMMAND}
_LONG_OPTIONS = tuple(f"{each.field}{'=' * bool(each.metavar)}" for each in COMMAND.options if each.field != "version")
