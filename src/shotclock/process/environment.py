"""The environment of processes of a call: no person answers, and output is data. docs/design.md: R5."""

from __future__ import annotations

import os
from collections.abc import Mapping, MutableMapping

from ..core.clocks import NS_PER_MS, Deadline
from ..core.trace import TRACEPARENT_VARIABLE, TRACESTATE_VARIABLE, TraceContext
from . import kernel
from .clock import monotonic_ns

REMAINING_VARIABLE = "SHOTCLOCK_REMAINING_MS"
CALL_VARIABLE = "SHOTCLOCK_CALL"  # the call that started a process, if several calls share that process
DEADLINE_VARIABLE = "SHOTCLOCK_DEADLINE_NS"
STOP_FILE_VARIABLE = "SHOTCLOCK_STOP_FILE"
OVERTIME_VARIABLE = "SHOTCLOCK_OVERTIME"
"""The address for `shotclock overtime`: the call, its token, and the socket of the process that waits for it."""

# With `false` as an editor, git and others fail at once and explain how to do without.
NO_EDITOR = {"EDITOR": "false", "VISUAL": "false", "GIT_EDITOR": "false", "GIT_SEQUENCE_EDITOR": "false"}
QUIET = {"NO_COLOR": "1", "PAGER": "cat", "GIT_PAGER": "cat", "GIT_TERMINAL_PROMPT": "0"}

_TRACEPARENT, _TRACESTATE = TRACEPARENT_VARIABLE.encode(), TRACESTATE_VARIABLE.encode()
_REMAINING, _DEADLINE = REMAINING_VARIABLE.encode(), DEADLINE_VARIABLE.encode()
# Longer than any of ours. The inherited values are replaced before a call begins.
_LONGEST_INHERITED = 64
_TRACEPARENT_IS, _REMAINING_IS, _DEADLINE_IS = _TRACEPARENT + b"=", _REMAINING + b"=", _DEADLINE + b"="


def child_environment(
    inherited: Mapping[str, str],
    declared: Mapping[str, str],
    trace: TraceContext,
    deadline: Deadline | None,
    *,
    attended: bool = False,
) -> dict[str, str]:
    """Return the variables of a command. `attended`: a person is at the terminal and may want an editor."""
    variables = {**inherited, **QUIET, **({} if attended else NO_EDITOR), **declared}
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
    return {
        REMAINING_VARIABLE: str(deadline.remaining_ms(monotonic_ns())),
        DEADLINE_VARIABLE: str(deadline.at_ns),
    }


def quiet_this_process() -> None:
    """Set the variables for the processes that functions start."""
    os.environ.update({**QUIET, **NO_EDITOR})
    os.environ.pop(OVERTIME_VARIABLE, None)  # of a call further up


class CallVariables:
    """A call's deadline and trace in the environment of the process that runs its function."""

    def __init__(self) -> None:
        self._entries = kernel.OwnEntries(_TRACEPARENT, _REMAINING, _DEADLINE) if kernel.LINUX else None
        own: dict[bytes, bytes] | None = getattr(os.environ, "_data", None)
        self._python: MutableMapping[bytes, bytes] = os.environb if own is None or self._entries is None else own

    def prepare(self) -> None:
        """Make room for the variables in the process that workers are forked from: it takes a millisecond."""
        if self._entries is not None:
            names = (_TRACEPARENT, _REMAINING, _DEADLINE)
            self._entries.write(*(name + b"=" + self._python.get(name, b"")[:_LONGEST_INHERITED] for name in names))

    def remove_prepared(self) -> None:
        """Remove the variables set by `prepare`, in a process that serves several calls at once."""
        if self._entries is not None:
            for name in (_TRACEPARENT, _REMAINING, _DEADLINE):
                if name not in self._python:
                    os.unsetenv(name)

    def set(self, deadline_ns: int, traceparent: str, tracestate: str) -> None:
        parent, deadline = traceparent.encode(), b"%d" % deadline_ns
        remaining = b"%d" % (max(0, deadline_ns - monotonic_ns()) // NS_PER_MS)
        python = self._python
        python[_TRACEPARENT], python[_REMAINING], python[_DEADLINE] = parent, remaining, deadline
        if self._entries is not None:
            self._entries.write(_TRACEPARENT_IS + parent, _REMAINING_IS + remaining, _DEADLINE_IS + deadline)
        if not deadline_ns:
            del os.environb[_REMAINING], os.environb[_DEADLINE]
        if tracestate:
            os.environ[TRACESTATE_VARIABLE] = tracestate
        elif _TRACESTATE in python:
            del os.environb[_TRACESTATE]
