"""`shotclock-sh`: a shell whose commands have limits. It runs the real shell under the supervisor of `exec`.

Agents start it in place of their shell, also under the name `bash`, so it imports only what every start needs.
"""

from __future__ import annotations

import contextlib
import os
import stat
import sys
from collections.abc import Iterator
from typing import NoReturn

from .._version import __version__
from ..core.limits import Clocks, ProcessIdentity
from ..supervise import foreground, kernel
from ..supervise.environment import AGENT_MARKS
from ..supervise.foreground import TerminalSignals
from ..supervise.owner import OwnerWatch, UnknownOwner, find_owner, is_agent_gone
from ..terminal.output import say_line, write_quietly
from .exec import AGENT_INPUT_WAIT_MS, DEFAULTS, NOT_DONE, ExecRequest, Wording, carry_out, choose_report
from .shell_limits import BadSetting, Limit, read_limits, take_note, take_options, variable_of

NAME = "shotclock-sh"
SHELL_VARIABLE = "SHOTCLOCK_SHELL"
DEPTH_VARIABLE = "SHOTCLOCK_SHELL_DEPTH"
MOST_NESTED = 20  # each is two processes; agents inside agents and recursive makefiles reach a handful
_SHELLS = ("bash", "zsh", "sh")
_FOLDERS = ("/bin", "/usr/bin")
_FIRST_LINE = 256  # bytes, as the kernel reads them
_LONG_WITH_VALUE = ("--rcfile", "--init-file")

HELP = """\
Usage: shotclock-sh [LIMITS] [OPTIONS OF THE SHELL] -c STRING [NAME [ARGUMENTS…]]
       shotclock-sh [LIMITS] 'COMMAND LINE'
       shotclock-sh [LIMITS] [OPTIONS OF THE SHELL] SCRIPT [ARGUMENTS…]

A shell whose commands have limits: the arguments go to your own shell, and when a limit is reached, everything that
the command started is killed, as by `shotclock exec`. Exit codes and the line on stderr are those of `shotclock exec`.

Without a command or a script it becomes your shell, without limits.

  SHOTCLOCK_TIMEOUT     kill a command after this time [10m]
  SHOTCLOCK_IDLE        kill it after this time without output [none]
  SHOTCLOCK_INPUT_WAIT  kill it after it has waited this long for input [none; 10s under a coding agent]
  SHOTCLOCK_BACKGROUND  kill a command that a coding agent has put in the background after this time [none]
  SHOTCLOCK_LIFETIME    the lifetime of background jobs, for `shotclock exec --detach` [none]
  SHOTCLOCK_SHELL       the shell to run [$SHELL if it is bash or zsh, else bash, zsh or sh]

0 means none. LIMITS are --timeout D, --idle D, --input-wait D, --background D and --lifetime D, and precede the
variables. Files may set the same limits (timeout = "5m"): shotclock.toml or [tool.shotclock] in pyproject.toml of the
project, which can only shorten them, and ~/.config/shotclock/config.toml. SHOTCLOCK_BACKGROUND is in place of
SHOTCLOCK_TIMEOUT and SHOTCLOCK_IDLE where `shotclock agent install` has told the agent to say so.

A command ends with its owner: the coding agent that runs it, otherwise the parent process.
"""


class Unusable(Exception):
    """A reason not to run the command."""


def main() -> int:
    """Run one command, or become the real shell. A negative exit code is the signal to die of."""
    name, words = os.path.basename(sys.argv[0]), sys.argv[1:]
    if name not in _SHELLS and words in (["--help"], ["--version"]):
        write_quietly(sys.stdout, HELP if words == ["--help"] else f"{NAME} {__version__}\n")
        return 0
    try:
        options, words = take_options(words)
        return _run(name, words, options)
    except (Unusable, BadSetting) as error:
        say_line(f"{NAME}: {error}")
        return NOT_DONE


def _run(name: str, words: list[str], options: dict[str, str]) -> int:
    is_command = True
    if name not in _SHELLS and len(words) == 1 and words[0][:1] not in ("-", "+"):
        is_command = is_command_line(words[0])
        if not is_script(words[0], is_command):
            words = ["-c", words[0]]
    argv = [find_shell(name), *words]
    if reads_commands(words):
        if options:
            raise Unusable("limits need a command: -c STRING, a command line or a script")
        _become(argv)
    signals = TerminalSignals()
    owner = _find_owner()
    # Of an agent's hook or MCP server: the user's own, as are the processes that it leaves.
    unlimited = ExecRequest(
        clocks=Clocks(timeout_ms=0), input_wait=0, quiet_env=False, leave_children=True, report="none"
    )
    request = _limited(options, words) if is_command else unlimited
    request.env[DEPTH_VARIABLE] = str(_read_depth() + 1)
    request.program, request.command = NAME, argv
    request.owner_watch = None if owner is None else OwnerWatch(owner)
    return carry_out(request, signals)


def _become(argv: list[str]) -> NoReturn:
    try:
        foreground.replace_this_process(argv[0], argv)
    except OSError as error:
        raise Unusable(f"{argv[0]}: {error.strerror}") from None


def _limited(options: dict[str, str], words: list[str]) -> ExecRequest:
    """Return the request of a command, with its limits. Raises BadSetting."""
    has_agent = any(map(os.environ.get, AGENT_MARKS))
    in_background = has_agent and words[:1] == ["-c"] and len(words) == 2 and take_note(os.environ, words[1])
    defaults = {"timeout": DEFAULTS.timeout_ms or 0, "input_wait": AGENT_INPUT_WAIT_MS if has_agent else 0}
    limits, mistakes = read_limits(os.environ, _folder(), defaults, options)
    if mistakes:
        more = f" (and {len(mistakes) - 1} more)" if len(mistakes) > 1 else ""
        say_line(" ".join(f"{NAME}: ignored: {mistakes[0]}{more}".splitlines()))
    lifetime, variable = limits["lifetime"], variable_of("lifetime")
    if in_background:
        own = limits["background"]
        limits |= {"timeout": own, "idle": Limit(0, variable_of("idle"))}
        when = f"after {own} ({own.source}) at the latest, and " if own.ms else ""
        say_line(f"{NAME}: in the background, without the limits of other commands: it ends {when}with its agent")
    request = ExecRequest(
        clocks=Clocks(timeout_ms=limits["timeout"].ms, idle_ms=limits["idle"].ms),
        input_wait=limits["input_wait"].ms,
        env={} if lifetime.source == variable else {variable: str(lifetime)},
        wording=_wording(limits, "commands in the background" if in_background else "commands"),
    )
    choose_report(request)
    return request


def _folder() -> str:
    try:
        return os.getcwd()
    except OSError:  # it was removed
        return ""


def _wording(limits: dict[str, Limit], commands: str) -> Wording:
    in_background = f"run it in the background: {_shotclock()} exec --detach --name NAME -- COMMAND"
    return Wording(
        timeout=f"{commands} here ({limits['timeout'].source})",
        idle=f"silence here ({limits['idle'].source})",
        after_timeout=f"Do less in one command, or {in_background}",
        after_silence=f"Make the command print its progress, or {in_background}",
        after_question="Use a non-interactive option such as -y, or give the answer on stdin",
        after_leftovers=f"To keep such a process, {in_background}",
    )


def _shotclock() -> str:
    """Return the word by which a command can start `shotclock`: its path, where PATH does not lead to it."""
    if any(os.access(f"{folder}/shotclock", os.X_OK) for folder in os.environ.get("PATH", "").split(os.pathsep)):
        return "shotclock"
    beside = os.path.join(os.path.dirname(os.path.realpath(sys.argv[0])), "shotclock")
    return beside if os.access(beside, os.X_OK) else "shotclock"


def is_script(word: str, is_command: bool) -> bool:
    """Return whether the one argument is a script for the shell, and not a command line.

    The kernel gives the path of a script that names this program in its first line: as a command line it would start
    this program again without end. Other files that can be executed by their path are left to the kernel, as are the
    hooks and servers of Claude Code.
    """
    try:
        with open(os.open(word, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
            first = file.read(_FIRST_LINE) if stat.S_ISREG(os.fstat(file.fileno()).st_mode) else b"\0"
    except OSError:
        return False
    if first.startswith(b"#!") and NAME.encode() in first.partition(b"\n")[0]:
        return True
    return is_command and b"\0" not in first and not (os.sep in word and os.access(word, os.X_OK))


def _read_depth() -> int:
    """Return how many of these shells are above. Raises Unusable where one starts the next without end."""
    text = os.environ.get(DEPTH_VARIABLE, "")
    depth = int(text) if text.isascii() and text.isdecimal() and len(text) < 5 else 0
    if depth >= MOST_NESTED:
        raise Unusable(f"{depth} of these shells are inside each other: a script or a setting starts it without end")
    return depth


def is_command_line(line: str) -> bool:
    """Return whether the one argument is a command, and not a hook or an MCP server of Claude Code.

    With CLAUDE_CODE_SHELL_PREFIX all three arrive in this form. Seen in version 2.1.326: a command is
    `source …/shell-snapshots/snapshot-….sh … && eval … && pwd -P >| FILE`, and its stdout is a file. Hooks and servers
    are as the user has configured them, and the agent reads their stdout, so that is a socket or a pipe.
    """
    if not os.environ.get("CLAUDECODE"):
        return True
    has_eval = " && eval " in line and (line.startswith("source ") or " && pwd -P >| " in line)
    mode = os.fstat(1).st_mode
    return has_eval or not (stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode))


def reads_commands(words: list[str]) -> bool:
    """Return whether the shell reads its commands from stdin: it has neither -c nor a script."""
    rest = iter(words)
    for word in rest:
        if word in ("-", "--"):
            return next(rest, None) is None
        if word.startswith("--"):
            if word in _LONG_WITH_VALUE:
                next(rest, None)
        elif word[:1] not in ("-", "+") or (word[0] == "-" and "c" in word):
            return False
        elif word[0] == "-" and "s" in word:
            return True
        else:
            for _ in range(word.count("o") + word.count("O")):  # -o pipefail, -O extglob
                next(rest, None)
    return True


def find_shell(name: str) -> str:
    """Return the path of the real shell: of that name, if it is a shell's. Raises Unusable.

    This program is a script and a real shell is none, so it never finds itself, under any name.
    """
    if chosen := os.environ.get(SHELL_VARIABLE):
        if not _is_program(chosen):
            raise Unusable(f"{SHELL_VARIABLE}={chosen!r} is not the absolute path of a shell; a script cannot be one")
        return chosen
    found = next(filter(_is_program, _candidates(name)), None)
    if found is None:
        wanted = " or ".join(_wanted_shells(name))
        raise Unusable(f"there is no {wanted} in the path; set {SHELL_VARIABLE} to the path of your shell")
    return found


def _wanted_shells(name: str) -> tuple[str, ...]:
    return (name,) if name in _SHELLS else _SHELLS


def _candidates(name: str) -> Iterator[str]:
    own = os.environ.get("SHELL", "")
    if name not in _SHELLS and os.path.basename(own) in ("bash", "zsh"):
        yield own
    folders = [*_FOLDERS, *os.environ.get("PATH", "").split(os.pathsep)]
    for each in _wanted_shells(name):
        yield from (f"{folder}/{each}" for folder in folders)


def _is_program(path: str) -> bool:
    """Return whether a file can be executed and is no script. A relative path could be a file of the project."""
    try:
        if not (os.path.isabs(path) and os.path.isfile(path) and os.access(path, os.X_OK)):
            return False
        with open(path, "rb", buffering=0) as file:
            return file.read(2) != b"#!"
    except PermissionError:
        return True  # a script must be readable
    except OSError:
        return False


def _find_owner() -> ProcessIdentity | None:
    """Return the agent that runs this command, else the parent process. Raises Unusable if the agent is gone."""
    if is_agent_gone():  # killed while this program started
        raise Unusable("the agent that started this command is gone")
    for choice in ("agent", "parent"):
        with contextlib.suppress(UnknownOwner):
            return find_owner(choice)
    if kernel.is_proc_foreign():
        say_line(f"{NAME}: /proc shows another PID namespace, so the command does not end with its owner")
    return None
