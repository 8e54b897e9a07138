"""The program files that a step runs, with their digests, for its approval.

Only files below the step's directory are bound; one that does not exist yet is bound as missing.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, TypeGuard

from ..core.overtime import ObserverKind
from ..inbox.approval import NO_SUCH_FILE, NOT_A_FILE, digest_of_file
from ..providers.ai import AiStep
from ..providers.command import CommandStep, ToolStep
from ..providers.mcp import McpStep
from ..providers.provider import StepPart
from .plan import overtime_of
from .run_context import RunContext
from .schema import ToolPart, is_template
from .shell_programs import ASSIGNED, AWK, RUNNERS, SHELL, find_script_files, find_started, program_of, read_interpreter
from .shell_syntax import DEPTH_LIMIT, TooDeep, Word, read_script
from .step_renderer import RenderedStep

_PLAIN_VALUE = re.compile(r"[\w./+@%:,-]+")  # a value that is the same however it is quoted in a script
# After these, a relative path names another file.
_MOVING = {"cd", "pushd", "popd", "chroot", "nsenter", "unshare"}
_MOVING_OPTION = re.compile(r"-[A-Za-z]*[CD]|--chdir|--login|-execdir|-okdir")


def tools_of(step: StepPart, run: RunContext) -> dict[str, ToolPart]:
    """Return the tools that an agent may call by itself."""
    return {name: run.workflow.tools[name] for name in step.ai.tools} if isinstance(step, AiStep) else {}


def digest_programs(step: StepPart, rendered: RenderedStep, run: RunContext) -> dict[str, str]:
    settings, folder = rendered.settings, rendered.folder
    found: dict[str, str] = {}
    if (overtime := overtime_of(run.workflow, step)) is not None and overtime.observer is ObserverKind.COMMAND:
        found |= _digest_script(overtime.target or "", Path(os.path.realpath(run.folder)))
    if step.type == "function":
        found |= _digest_target(str(settings["target"]).partition(":")[0], folder)
    if isinstance(step, CommandStep | ToolStep):
        script = settings["exec"]
        for name, value in rendered.values.items():
            if _PLAIN_VALUE.fullmatch(value):
                script = script.replace(f"${{{name}}}", value)
        found |= _digest_script(script, folder) | _digest_script(shlex.join(settings["shell"] or ()), folder)
    servers = [settings] if isinstance(step, McpStep) else []
    servers += settings["ai"]["mcp_servers"].values() if step.type == "ai" else ()
    for server in servers:
        found |= _digest_script(shlex.join((server["command"] or "", *server["args"])), folder)
    for tool in tools_of(step, run).values():  # a tool that is a workflow has no `exec`
        if not is_template(where := tool.cwd or run.workflow.defaults.cwd or ""):
            shell = shlex.join(tool.shell or run.workflow.defaults.shell or ())
            found |= _digest_script(tool.exec, run.folder / where) | _digest_script(shell, run.folder / where)
    return found


def _digest_target(place: str, folder: Path) -> dict[str, str]:
    if os.path.isabs(place):
        return {place: digest_of_file(place)}
    parts = place.split(".")
    modules = [str(folder.joinpath(*parts[: number + 1])) for number in range(len(parts))]
    paths = [path for module in modules for path in (f"{module}.py", f"{module}/__init__.py")]
    return {path: digest_of_file(path) for path in paths}


class _ScriptCommand(NamedTuple):
    words: Sequence[Word]
    is_sure: bool
    """Whether it is certainly run. A quoted text may be a script, or only a text."""
    is_moved: bool = False  # whether its script changes the directory


def _commands_in(script: str, is_sure: bool = True, depth: int = 0) -> list[_ScriptCommand]:
    try:
        commands = read_script(script).commands if depth < DEPTH_LIMIT else []
    except TooDeep:
        return []
    found = [each for command in commands for each in _commands_of(command.words, command.input, is_sure, depth)]
    is_moved = any(_changes_directory(each.words) for each in found if each.is_sure or not is_sure)
    return [each._replace(is_moved=True) for each in found] if is_moved else found


def _commands_of(words: Sequence[Word], read: Sequence[Word], is_sure: bool, depth: int) -> list[_ScriptCommand]:
    """Return a command, the commands that `env` and the like start, and those of scripts among the words."""
    found: list[_ScriptCommand] = []
    code: list[Word] = []
    started = words
    while started:
        if ASSIGNED.match(started[0].text) or started[0].text[:1] == "-":
            started = started[1:]
            continue
        name = program_of(started[0])
        # `flock FILE -c SCRIPT` looks like a program with blanks in its name.
        found.append(_ScriptCommand(started, is_sure and len(started[0].text.split()) == 1))
        if SHELL.fullmatch(name) and (reading := read_interpreter(name, started[1:])) is not None:
            code += reading.code
        elif name == "eval":
            code += started[1:]
        started = find_started(name, started[1:]) if name in RUNNERS else ()
    for word in (*words[1:], *read):
        is_code = any(word is each for each in code)
        if is_code or len(word.text.split()) > 1:
            found += _commands_in(word.text, is_sure and is_code and not word.is_expanded, depth + 1)
    return found


def _changes_directory(words: Sequence[Word]) -> bool:
    name = program_of(words[0])
    options = words[1:] if name == "find" else ()
    if name in RUNNERS:
        options = words[1 : len(words) - len(find_started(name, words[1:]))]
    return name in _MOVING or any(_MOVING_OPTION.match(word.text) for word in options)


def _digest_script(script: str, folder: Path) -> dict[str, str]:
    return {path: text for command in _commands_in(script) for path, text in _digest_program(command, folder)}


def _digest_program(command: _ScriptCommand, folder: Path) -> Iterator[tuple[str, str]]:
    """Yield the programs of a command, and its files of code."""
    program, *arguments = [
        Word() if command.is_moved and not word.text.startswith(os.sep) else word for word in command.words
    ]
    name = program_of(command.words[0])
    required = [program] if "/" in program.text else []
    optional = [word for word in arguments if "/" in word.text and _is_executable(folder / word.text)]
    if name in (".", "source"):
        required += arguments[:1]
    elif name in AWK:
        optional += find_script_files(arguments)
    elif (reading := read_interpreter(name, command.words[1:])) is not None:
        first = len(arguments) - len(reading.rest)
        optional += arguments[:first]
        optional += [word for word in arguments[first:] if _is_file(_digest_below(word, folder))][:1]
        # Not the first argument of a module or of a script in an option.
        if not reading.code and (first == len(reading.options) or command.words[first].text == "--"):
            required += arguments[first : first + 1]
    for word in required:
        if (found := _digest_below(word, folder)) is not None and (command.is_sure or _is_file(found)):
            yield found
    for word in optional:
        if _is_file(found := _digest_below(word, folder)):
            yield found


def _is_executable(path: Path) -> bool:
    return "\0" not in str(path) and os.access(path, os.X_OK)


def _is_file(found: tuple[str, str] | None) -> TypeGuard[tuple[str, str]]:
    return found is not None and found[1] != NO_SUCH_FILE


def _digest_below(word: Word, folder: Path) -> tuple[str, str] | None:
    if word.is_expanded or not word.text or "\0" in word.text:
        return None
    path = str(folder / word.text)
    below = os.path.join(folder, "")
    if not os.path.normpath(path).startswith(below) and not os.path.realpath(path).startswith(below):
        return None
    digest = NOT_A_FILE if os.path.isdir(path) else digest_of_file(path)
    is_pattern = digest == NO_SUCH_FILE and any(char in word.text for char in "*?[{~")
    return None if digest == NOT_A_FILE or is_pattern else (path, digest)
