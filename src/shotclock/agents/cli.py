"""`shotclock agent`: put shotclock in front of the commands of a coding agent, and take it away again."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..calls.call import Outcome
from ..core.errors import Ending
from ..core.visible_text import visible
from ..terminal.drawing import styled
from ..terminal.parser import CommandTable, Option, Subcommand
from ..terminal.subcommand import ChildWork, Mistaken
from ._status import describe
from .config_files import SCOPE, YES, change_file, draw_change
from .install import plan_install, plan_remove, write_plan
from .known_agents import AGENTS, CodingAgent, ConfigScope

if TYPE_CHECKING:
    from rich.console import Console

ELSEWHERE = "give it the MCP server `shotclock serve shell` instead"


def _run_install(name: str, user: bool, project: bool, approvals: bool, accept_allow: bool, yes: bool) -> Any:
    agent = _find(name)
    if approvals and agent.approvals is None:
        able = " and ".join(each.title for each in AGENTS.values() if each.approvals is not None)
        raise Mistaken({"approvals": f"{agent.title} has no permission requests that a hook can answer; {able} have"})
    if agent.needs_acceptance and not accept_allow:
        raise Mistaken({"accept-allow": f"{agent.needs_acceptance}. Give --accept-allow if you accept that"})
    plan = partial(plan_install, agent, ConfigScope.of(project), approvals=approvals)
    return change_file("agent install", plan, write_plan, draw_change, yes=yes)


def _run_remove(name: str, user: bool, project: bool, yes: bool) -> Any:
    plan = partial(plan_remove, _find(name), ConfigScope.of(project))
    return change_file("agent remove", plan, write_plan, partial(draw_change, verb="removed from"), yes=yes)


def _find(name: str) -> CodingAgent:
    if name not in AGENTS:
        raise Mistaken({"name": f"{name!r} is not known here; there are {', '.join(AGENTS)}. For others, {ELSEWHERE}"})
    return AGENTS[name]


def _run_status(name: str | None) -> ChildWork:
    chosen = tuple(AGENTS.values()) if name is None else (_find(name),)

    def body() -> Outcome:
        found = [describe(agent, scope, os.environ, Path.cwd()) for agent in chosen for scope in ConfigScope]
        # In the home, a project's file may be the same.
        users = {each.file for each in found if each.scope is ConfigScope.USER}
        shown = [each for each in found if each.scope is ConfigScope.USER or (each.is_there and each.file not in users)]
        return Outcome(Ending.FINISHED, data={"agents": [each.as_data() for each in shown]})

    return ChildWork("agent status", body, draw=_draw_status)


def _draw_status(data: Any, console: Console) -> None:
    for each in data["agents"]:
        state = {True: "effective", None: "installed"}.get(each["effective"], "not effective")
        state = state if each["installed"] else "not installed"
        style = {"effective": "green", "installed": "green", "not effective": "yellow"}.get(state, "bright_black")
        line = styled(f"{each['agent']:<9} {each['scope']:<8} ") + styled(f"{state:<14}", style)
        approvals = " (with approvals)" if each["approvals"] else ""
        console.print(line + styled(f"{visible(each['file'])}{approvals}"), soft_wrap=True)
        for problem in each["problems"]:
            console.print(styled("  ! ", "yellow") + styled(visible(problem)), soft_wrap=True)
        for condition in each["conditions"]:
            console.print(f"  {condition}", soft_wrap=True)


def _run_hook(words: list[str]) -> int:
    from .hook import main

    return main(words)


_NAMES = ", ".join(AGENTS)
COMMANDS = {
    "agent": CommandTable(
        "shotclock agent",
        "Put shotclock in front of every command of a coding agent.",
        (
            Subcommand(
                "install",
                "Show the change of the agent's configuration, ask, and write it.",
                (
                    Option.argument("name", f"The agent: {_NAMES}.", missing=f"missing NAME of the agent: {_NAMES}"),
                    *SCOPE,
                    Option.flag("--approvals", "Send the agent's permission requests to the inbox (claude, copilot)."),
                    Option.flag(
                        "--accept-allow", "Accept that rules for single commands stop working (codex, copilot)."
                    ),
                    YES,
                ),
                _run_install,
            ),
            Subcommand(
                "status",
                "Show where shotclock is installed, and whether it has an effect there.",
                (Option.argument("name", f"Only this agent: {_NAMES}."),),
                _run_status,
            ),
            Subcommand(
                "remove",
                "Restore the configuration as it was before the installation.",
                (
                    Option.argument("name", f"The agent: {_NAMES}.", missing=f"missing NAME of the agent: {_NAMES}"),
                    *SCOPE,
                    YES,
                ),
                _run_remove,
            ),
            Subcommand("hook", "Answer a hook of an agent; the installation calls it.", main=_run_hook),
        ),
        "verb",
    )
}
