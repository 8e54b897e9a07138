"""The environment of what is started for a call: one for commands, steps and whatever a function starts itself.

Nobody is there to press a key, and output is data: so no pager, no editor, no colour, no question. And the call's
deadline and place in its trace go along, for a shotclock that is started further down.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping

from ..core.deadlines import Deadline
from ..core.trace import TRACEPARENT_VARIABLE, TRACESTATE_VARIABLE, TraceContext
from . import kernel
from .admission import DEADLINE_VARIABLE, REMAINING_VARIABLE
from .clock import monotonic_ns

# `false` as an editor: git and others say at once that there was a problem with it, and how to do without.
NO_EDITOR = {"EDITOR": "false", "VISUAL": "false", "GIT_EDITOR": "false", "GIT_SEQUENCE_EDITOR": "false"}
QUIET = {"NO_COLOR": "1", "PAGER": "cat", "GIT_PAGER": "cat", "GIT_TERMINAL_PROMPT": "0"}
# The longest of the values that are written over: a traceparent.
_LONGEST_VALUE = 63


def child_environment(
    inherited: Mapping[str, str],
    given: Mapping[str, str],
    trace: TraceContext,
    deadline: Deadline | None,
    *,
    attended: bool = False,
) -> dict[str, str]:
    """Return the variables of a command. `given` was written down for it, and wins. `attended`: a person is at its
    terminal, and may want an editor."""
    variables = {**inherited, **QUIET, **({} if attended else NO_EDITOR), **given}
    # One that is not what we were started with was meant for this command, by whoever wrote it down.
    if variables.get(TRACEPARENT_VARIABLE) in (None, os.environ.get(TRACEPARENT_VARIABLE)):
        variables.pop(TRACESTATE_VARIABLE, None)
        variables |= trace.as_variables()
    for name in (REMAINING_VARIABLE, DEADLINE_VARIABLE, ""):  # a nameless one could be inherited, but not passed on
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
    """In a process that runs functions of others: what they start gets the same variables as any command."""
    os.environ.update({**QUIET, **NO_EDITOR})


class CallVariables:
    """A call's deadline and trace in the environment of the process that runs its function.

    Each value is written over the last one in memory of our own: setenv never frees a value, and a worker lives long.
    """

    def __init__(self) -> None:
        self._buffers = {
            name: ctypes.create_string_buffer(len(name) + 1 + _LONGEST_VALUE + 1)
            for name in (REMAINING_VARIABLE, DEADLINE_VARIABLE, TRACEPARENT_VARIABLE)
        }

    def set(self, deadline: Deadline | None, trace: TraceContext) -> None:
        variables = trace.as_variables()
        state = variables.pop(TRACESTATE_VARIABLE, None)
        if state is not None:
            os.environ[TRACESTATE_VARIABLE] = state
        else:
            os.environ.pop(TRACESTATE_VARIABLE, None)
        if deadline is not None:
            variables |= _deadline_variables(deadline)
        for name, buffer in self._buffers.items():
            value = variables.get(name)
            if value is None:
                os.environ.pop(name, None)
            elif len(value) > _LONGEST_VALUE or not kernel.put_variable(buffer, name, value):
                os.environ[name] = value
