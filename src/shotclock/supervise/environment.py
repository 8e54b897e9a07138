"""The environment of processes of a call: where no person answers, programs must not ask."""

from __future__ import annotations

import os
from collections.abc import Mapping

from ..core.limits import Deadline
from ..core.trace import TRACEPARENT_VARIABLE, TRACESTATE_VARIABLE, TraceContext
from .clock import monotonic_ns

REMAINING_VARIABLE = "SHOTCLOCK_REMAINING_MS"
CALL_VARIABLE = "SHOTCLOCK_CALL"  # the call that started a process, if several calls share that process
DEADLINE_VARIABLE = "SHOTCLOCK_DEADLINE_NS"
STOP_FILE_VARIABLE = "SHOTCLOCK_STOP_FILE"
OVERTIME_VARIABLE = "SHOTCLOCK_OVERTIME"
"""The address for `shotclock overtime`: the call, its token, and the socket of the process that waits for it."""

# Each is set by an agent for the commands it runs: Claude Code, Codex, Gemini CLI, opencode, Copilot CLI, Cursor.
AGENT_MARKS = ("CLAUDECODE", "CODEX_THREAD_ID", "GEMINI_CLI", "OPENCODE_PID", "COPILOT_CLI", "CURSOR_AGENT")

# With `false` as an editor, git and others fail at once and explain how to do without.
NO_EDITOR = {"EDITOR": "false", "VISUAL": "false", "GIT_EDITOR": "false", "GIT_SEQUENCE_EDITOR": "false"}
QUIET = {"NO_COLOR": "1", "PAGER": "cat", "GIT_PAGER": "cat", "GIT_TERMINAL_PROMPT": "0"}
# Further programs that would ask a person, or show a page at a time. An empty pager is none.
UNATTENDED = {
    "DEBIAN_FRONTEND": "noninteractive",
    "PIP_NO_INPUT": "1",
    "SYSTEMD_PAGER": "",
    "AWS_PAGER": "",
    "MANPAGER": "cat",
}
# Together: forcing the caller's own program would open its window.
NO_PASSWORD = {"SSH_ASKPASS": "false", "SSH_ASKPASS_REQUIRE": "force"}


def config_file(environ: Mapping[str, str]) -> str:
    """Return the path of the user's own file; empty if there is no place for it."""
    base = environ.get("XDG_CONFIG_HOME") or (f"{home}/.config" if (home := environ.get("HOME")) else "")
    return f"{base}/shotclock/config.toml" if os.path.isabs(base) else ""


def without_questions(inherited: Mapping[str, str]) -> dict[str, str]:
    """Return the variables with those added that keep programs from asking. The caller's own values stay."""
    asks = "SSH_ASKPASS" in inherited or "SSH_ASKPASS_REQUIRE" in inherited
    return {**QUIET, **NO_EDITOR, **UNATTENDED, **({} if asks else NO_PASSWORD), **inherited}


def child_environment(
    inherited: Mapping[str, str],
    declared: Mapping[str, str],
    trace: TraceContext,
    deadline: Deadline | None,
    *,
    quiet: bool = True,
) -> dict[str, str]:
    """Return the variables of a command. `quiet`: no pager, editor or colour, whatever was inherited."""
    variables = {**inherited, **({**QUIET, **NO_EDITOR} if quiet else {}), **declared}
    # Another value than this process was started with was declared for this command.
    if variables.get(TRACEPARENT_VARIABLE) in (None, os.environ.get(TRACEPARENT_VARIABLE)):
        variables.pop(TRACESTATE_VARIABLE, None)
        variables |= trace.as_variables()
    # Inherited values of these belong to another call; a variable without a name cannot be passed on.
    for name in (REMAINING_VARIABLE, DEADLINE_VARIABLE, OVERTIME_VARIABLE, ""):
        variables.pop(name, None)
    if deadline is not None:
        variables |= _deadline_variables(deadline)
    return variables


def _deadline_variables(deadline: Deadline) -> dict[str, str]:
    return {REMAINING_VARIABLE: str(deadline.remaining_ms(monotonic_ns())), DEADLINE_VARIABLE: str(deadline.at_ns)}


def quiet_this_process() -> None:
    """Set the variables for the processes that functions start."""
    os.environ.update({**QUIET, **NO_EDITOR})
    os.environ.pop(OVERTIME_VARIABLE, None)  # of a call further up


def set_call_variables(deadline_ns: int, traceparent: str, tracestate: str) -> None:
    """Set a call's deadline and trace in the process that runs its function. C never frees the former values."""
    variables = {TRACEPARENT_VARIABLE: traceparent, TRACESTATE_VARIABLE: tracestate}
    no_deadline = {REMAINING_VARIABLE: "", DEADLINE_VARIABLE: ""}
    variables |= _deadline_variables(Deadline(deadline_ns)) if deadline_ns else no_deadline
    for name, value in variables.items():
        if value:
            os.environ[name] = value
        else:
            os.environ.pop(name, None)
