"""The approval of a step: it is shown to an operator as it would run, and runs only after a yes to exactly that.

What is shown and hashed is everything that the file decides: its keys, what was interpolated into them, the variables
and the directory. A secret is shown as `***` and bound by a digest of what it really is. The files that a step names as
its programs are shown with their SHA-256, which is compared again before each try.

The proposal is made under a key of the run and the step, so a process that goes on with the run finds it again. It is
spent when the step begins; a run that is cut off before that has not begun the step.

docs/design.md: R40.
"""

from __future__ import annotations

import asyncio
import os
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextvars import Token
from pathlib import Path
from typing import Any, NamedTuple, TypeGuard

from ..core.clocks import Clocks, Deadline
from ..core.envelope import Envelope, Problem
from ..core.errors import Ending, Failure
from ..core.overtime import ObserverKind
from ..core.proposal import Kind, Policy, Proposal, ProposalRequest, ProposalStatus, canonical
from ..core.proposal_request import TITLE_LIMIT
from ..core.redaction import HIDDEN
from ..core.validation import ValidationError
from ..inbox.access import Principal
from ..inbox.approval import NO_SUCH_FILE, NOT_A_FILE, digest_of_file
from ..inbox.inbox import EDITED, HIDDEN_VALUES, hide_secrets, restore_hidden
from ..inbox.person_wait import NOT_BOUND, RunWait, action_changed, ask_and_wait, refusal_outcome
from ..process.context import current_scope
from ..providers.command import CommandStep, ToolStep
from ..providers.mcp import McpStep
from ..providers.provider import STEP_TYPES, Approval, StepPart, duration_ms
from ..providers.workflow import WorkflowStep
from ..runtime.call import Outcome, admit, answer
from .lint import approved_files, digests_of
from .plan import overtime_of
from .run_context import RunContext
from .schema import ToolPart, is_template
from .shell_programs import (
    ASSIGNED,
    AWK,
    RUNNERS,
    SHELL,
    find_script_files,
    find_started,
    program_of,
    read_interpreter,
)
from .shell_syntax import DEPTH_LIMIT, TooDeep, Word, read_script
from .step_renderer import RenderedStep, StepFailed

# A value that stands for itself in a script, however it is quoted.
_PLAIN_VALUE = re.compile(r"[\w./+@%:,-]+")
# After these, a relative path leads elsewhere.
_MOVING = {"cd", "pushd", "popd", "chroot", "nsenter", "unshare"}
_MOVING_OPTION = re.compile(r"-[A-Za-z]*[CD]|--chdir|--login|-execdir|-okdir")


class RefusedStep(NamedTuple):
    """The end of a step that did not begin."""

    envelope: Envelope
    rule: str


class StepApproval:
    def __init__(self, run: RunContext, key: str, *, used: str | None = None) -> None:
        """Prepare the approval of one step. `used` is the proposal that was used for it before the run was parked."""
        self._run = run
        self._inbox = run.inbox()
        self._key = key
        self.used = used
        self._files: dict[str, str] = {}
        self._programs: Mapping[str, str] = {}
        self._bound: Token[Mapping[str, str]] | None = None

    async def ask(
        self, step_id: str, step: StepPart, rendered: RenderedStep, tries: int, deadline: Deadline | None
    ) -> RenderedStep | RefusedStep:
        """Return what to run, which the operator may have changed, or how it ended before it began."""
        scope = current_scope.get()
        owner = "run" if scope is None else scope.name
        # It waits until that very deadline: whoever gave it has kept what the end of the run needs.
        clocks = Clocks(timeout_ms=0, reserve_ms=0)
        admission = admit(f"step {step_id}", clocks, parent=deadline, parent_owner=owner)
        written = rendered
        try:
            # It runs where it was shown to run, wherever a link leads by then.
            rendered = await asyncio.to_thread(_with_real_paths, step, written)
            ask = await self._ask(step_id, step, rendered, tries)
            known = None if self.used is None else await self._inbox.get(self.used)
            if known is not None and known.ask.action_hash == ask.action_hash:
                self._bind_files()
                return rendered._replace(settings={**rendered.settings, **_changes(ask, known, rendered.settings)})
            self.used = None
            wait = RunWait(self._key, self._run.began_at, self._run.person_wait.waits, lambda: admission)
            waited = await ask_and_wait(self._inbox, ask, Principal.local(), wait)
            proposal = waited.proposal
            if proposal.status is ProposalStatus.EXPIRED and ask.policy.when_expired == "default":
                if await self._inbox.use(proposal.id, ask.action_hash, unanswered=True):
                    self.used = proposal.id
                self._bind_files()
                return rendered
            if not proposal.status.allows:
                return RefusedStep(answer(admission, waited.outcome()), f"approval/{proposal.status}")
            changed = _changes(ask, proposal, rendered.settings)
            if (wrong := _find_wrong(step, changed)) is not None:
                problem = Problem("ARG_ERROR", f"what the operator changed it to does not fit: {wrong}", "validation")
                return RefusedStep(answer(admission, Outcome(Ending.NOT_STARTED, problem)), "approval/modified")
            now = await asyncio.to_thread(_with_real_paths, step, written)
            if (await self._ask(step_id, step, now, tries)).action_hash != ask.action_hash:
                raise action_changed(proposal.id, {"proposal_id": proposal.id})
            if not await self._inbox.use(proposal.id, ask.action_hash):
                problem = Problem("ALREADY_DECIDED", f"the approval {proposal.id} was used before")
                return RefusedStep(answer(admission, Outcome(Ending.NOT_STARTED, problem)), "approval/used")
            self.used = proposal.id
            self._bind_files()
        except Failure as failure:
            return RefusedStep(answer(admission, refusal_outcome(failure)), "approval/failed")
        return rendered._replace(settings={**rendered.settings, **changed})

    def _bind_files(self) -> None:
        """Bind the nested files to what was approved: each is compared again at the moment it is read to be run."""
        if self._files:
            self._bound = approved_files.set({**approved_files.get(), **self._files})

    async def compare_programs(self) -> None:
        """Raise StepFailed unless the programs that the step names have the contents that were approved."""
        for path, approved in self._programs.items():
            if await asyncio.to_thread(digest_of_file, path) != approved:
                message = f"{path!r} is not what was approved: it has changed since it was proposed"
                raise StepFailed("ACTION_CHANGED", message, "approval/failed")

    def record(self, error: Mapping[str, Any] | None) -> None:
        """Write down what became of the step, for whoever approved it."""
        if self._bound is not None:
            approved_files.reset(self._bound)
        if self.used is not None:
            code = None if error is None else str(error.get("code"))
            self._inbox.record_outcome(self.used, code, "" if error is None else str(error.get("message", "")))

    async def _ask(self, step_id: str, step: StepPart, rendered: RenderedStep, tries: int) -> ProposalRequest:
        written = step.approval if isinstance(step.approval, Approval) else Approval()
        run_id = self._run.run_id
        title = f"{step_id}: {step.description}" if step.description else f"Run step {step_id}"
        settings = {name: value for name, value in rendered.settings.items() if value is not None}
        hidden: list[str] = []
        arguments = await self._hide_secrets(settings, "with", hidden)
        surroundings: dict[str, Any] = {
            **NOT_BOUND,
            "step type": step.type,
            "directory": await self._hide_secrets(str(rendered.folder), "directory", hidden),
            "environment": await self._hide_secrets(rendered.env, "environment", hidden),
        }
        if rendered.values:
            surroundings["values"] = await self._hide_secrets(rendered.values, "values", hidden)
        if tries > 1:
            surroundings["tries"] = f"up to {tries}: one approval covers all of them"
        tools = {name: tool.model_dump(exclude_unset=True) for name, tool in _tools_of(step, self._run).items()}
        nested = [self._run.folder / tool["workflow"] for tool in tools.values() if "workflow" in tool]
        if isinstance(step, WorkflowStep):
            nested.append(rendered.folder / str(rendered.settings["workflow"]))
        self._files = {}
        for file in nested:
            self._files |= await asyncio.to_thread(digests_of, file)
        self._programs = await asyncio.to_thread(_digest_programs, step, rendered, self._run)
        if files := {**self._files, **self._programs}:
            surroundings["files"] = await self._hide_secrets(files, "files", hidden)
        overtime = step.overtime if step.overtime is not None else self._run.workflow.defaults.overtime
        if overtime:  # who is asked about it may be a program of the file
            surroundings["overtime"] = await self._hide_secrets(overtime, "overtime", hidden)
        if tools:
            surroundings["tools of the file"] = await self._hide_secrets(tools, "tools of the file", hidden)
        if hidden:
            surroundings[HIDDEN_VALUES] = hidden
        return ProposalRequest(
            Kind.OPERATION,
            " ".join(title.split())[:TITLE_LIMIT],
            f"Step {step_id} ({step.type}) of run {run_id} asks before it runs.",
            operation=f"run {run_id} step {step_id}",
            arguments=arguments,
            policy=Policy(
                ttl_ms=max(1, duration_ms(written.ttl, "s")),
                remind_ms=0 if written.remind is None else duration_ms(written.remind, "s"),
                when_expired=written.when_expired,
                deciders=tuple(written.deciders),
                destructive=written.destructive,
            ),
            surroundings=surroundings,
            dispatched=True,
        )

    async def _hide_secrets(self, value: Any, place: str, hidden: list[str]) -> Any:
        return await hide_secrets(self._inbox, self._run.redaction.text, value, place, hidden)


def _tools_of(step: StepPart, run: RunContext) -> dict[str, ToolPart]:
    """Return the tools that an agent may call by itself: their arguments are not known yet."""
    from ..providers.ai import AiStep

    return {name: run.workflow.tools[name] for name in step.ai.tools} if isinstance(step, AiStep) else {}


def _digest_programs(step: StepPart, rendered: RenderedStep, run: RunContext) -> dict[str, str]:
    """Return the digests of the files below the step's directory that it names as its programs."""
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
    for tool in _tools_of(step, run).values():  # a tool that is a workflow has no `exec`
        if not is_template(where := tool.cwd or run.workflow.defaults.cwd or ""):
            shell = shlex.join(tool.shell or run.workflow.defaults.shell or ())
            found |= _digest_script(tool.exec, run.folder / where) | _digest_script(shell, run.folder / where)
    return found


def _digest_target(place: str, folder: Path) -> dict[str, str]:
    """Return the file of a function, or the files of its module, which is looked for in the folder first."""
    if os.path.isabs(place):
        return {place: digest_of_file(place)}
    parts = place.split(".")
    modules = [str(folder.joinpath(*parts[: number + 1])) for number in range(len(parts))]
    paths = [path for module in modules for path in (f"{module}.py", f"{module}/__init__.py")]
    return {path: digest_of_file(path) for path in paths}


class _Found(NamedTuple):
    """A command of a script."""

    words: Sequence[Word]
    is_sure: bool
    """Whether it is run. A quoted text may be a script, or only a text."""
    is_moved: bool = False
    """Whether its script changes the directory."""


def _commands_in(script: str, is_sure: bool = True, depth: int = 0) -> list[_Found]:
    """Return the commands of a script, with those of each script in its words."""
    try:
        commands = read_script(script).commands if depth < DEPTH_LIMIT else []
    except TooDeep:
        return []
    found = [each for command in commands for each in _commands_of(command.words, command.input, is_sure, depth)]
    is_moved = any(_changes_directory(each.words) for each in found if each.is_sure or not is_sure)
    return [each._replace(is_moved=True) for each in found] if is_moved else found


def _commands_of(words: Sequence[Word], read: Sequence[Word], is_sure: bool, depth: int) -> list[_Found]:
    """Return a command, the commands that `env` and the like start, and those of each script among the words."""
    found: list[_Found] = []
    code: list[Word] = []
    started = words
    while started:
        if ASSIGNED.match(started[0].text) or started[0].text[:1] == "-":
            started = started[1:]
            continue
        name = program_of(started[0])
        # `flock FILE -c SCRIPT` looks like a program with blanks in its name.
        found.append(_Found(started, is_sure and len(started[0].text.split()) == 1))
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


def _digest_program(command: _Found, folder: Path) -> Iterator[tuple[str, str]]:
    """Yield the programs of a command that are named by their paths, and the files of code that it is given.

    A program or script that does not exist yet is bound as that.
    """
    program, *arguments = [
        Word() if command.is_moved and not word.text.startswith(os.sep) else word for word in command.words
    ]
    name = program_of(command.words[0])
    named = [program] if "/" in program.text else []
    given = [word for word in arguments if "/" in word.text and _is_executable(folder / word.text)]
    if name in (".", "source"):
        named += arguments[:1]
    elif name in AWK:
        given += find_script_files(arguments)
    elif (reading := read_interpreter(name, command.words[1:])) is not None:
        first = len(arguments) - len(reading.rest)
        given += arguments[:first]
        given += [word for word in arguments[first:] if _is_file(_digest_below(word, folder))][:1]
        # Not the first argument of a module or of a script in an option.
        if not reading.code and (first == len(reading.options) or command.words[first].text == "--"):
            named += arguments[first : first + 1]
    for word in named:
        if (found := _digest_below(word, folder)) is not None and (command.is_sure or _is_file(found)):
            yield found
    for word in given:
        if _is_file(found := _digest_below(word, folder)):
            yield found


def _is_executable(path: Path) -> bool:
    return "\0" not in str(path) and os.access(path, os.X_OK)


def _is_file(found: tuple[str, str] | None) -> TypeGuard[tuple[str, str]]:
    return found is not None and found[1] != NO_SUCH_FILE


def _digest_below(word: Word, folder: Path) -> tuple[str, str] | None:
    """Return the path and the digest of what a literal word names below the folder; None for anything else."""
    if word.is_expanded or not word.text or "\0" in word.text:
        return None
    path = str(folder / word.text)
    below = os.path.join(folder, "")
    if not os.path.normpath(path).startswith(below) and not os.path.realpath(path).startswith(below):
        return None
    digest = NOT_A_FILE if os.path.isdir(path) else digest_of_file(path)
    is_pattern = digest == NO_SUCH_FILE and any(char in word.text for char in "*?[{~")
    return None if digest == NOT_A_FILE or is_pattern else (path, digest)


def _with_real_paths(step: StepPart, rendered: RenderedStep) -> RenderedStep:
    try:
        folder, settings = Path(os.path.realpath(rendered.folder)), rendered.settings
        if step.type == "function":
            from ..providers.function import locate_target

            settings = {**settings, "target": locate_target(str(settings["target"]), folder)}
        return rendered._replace(folder=folder, settings=settings)
    except ValueError:  # no path at all, which is said where it would be entered
        return rendered


def _changes(ask: ProposalRequest, proposal: Proposal, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return only what differs, and in it what was not shown (a secret) as it is, not as it was shown."""
    if proposal.status is not ProposalStatus.MODIFIED:
        return {}
    asked, decided = dict(ask.arguments or {}), dict(proposal.arguments or {})
    return {
        name: restore_hidden(value, asked.get(name), settings.get(name))
        for name, value in decided.items()
        if name not in asked or canonical(asked[name]) != canonical(value)
    }


def _find_wrong(step: StepPart, changed: Mapping[str, Any]) -> str | None:
    if not changed:
        return None
    if masked := [name for name, value in changed.items() if HIDDEN in canonical(value)]:
        return f"{', '.join(masked)}: {EDITED}"
    # What runs of a tool is a command; the step itself only names the tool.
    is_tool = isinstance(step, ToolStep)
    model = CommandStep if is_tool else STEP_TYPES[step.type].schema
    written = {"exec": "-"} if is_tool else step.model_dump(exclude_unset=True)
    try:
        model.model_validate({**written, **changed})
    except ValidationError as error:
        return "; ".join(f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in error.errors())
    return None
