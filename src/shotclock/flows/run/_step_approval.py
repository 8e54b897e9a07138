"""The approval of a step: an operator sees the step as it would run, and it runs only if exactly that is approved.

Everything that the file decides is shown and hashed. A secret is shown as `***` and bound by a digest of its value.
Program files are shown with their SHA-256, which is compared again before each attempt. Only files below the step's
directory are bound; one that does not exist yet is bound as missing.

The proposal has a key of the run and the step, so that a resumed run finds it again. It is used up when the step
begins. AGENTS.md: what was approved is what runs.
"""

from __future__ import annotations

import asyncio
import os
import re
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import Token
from pathlib import Path
from typing import Any, NamedTuple, TypeGuard

from ...calls.call import Call, Outcome, RunWait, admit, answer
from ...calls.principal import Principal
from ...core.envelope import Problem, Warning_, warning
from ...core.errors import Ending, Failure
from ...core.limits import Clocks, Deadline
from ...core.overtime import ObserverKind
from ...core.proposal import Kind, Policy, Proposal, ProposalRequest, ProposalStatus, canonical
from ...core.validation import ValidationError
from ...core.value_types import JsonObject
from ...core.visible_text import HIDDEN
from ...people.approval import NO_SUCH_FILE, NOT_A_FILE, digest_of_file
from ...people.inbox import EDITED, HIDDEN_VALUES, hide_secrets, restore_hidden
from ...people.person_wait import NOT_BOUND, action_changed, ask_and_wait, refusal_outcome
from ...people.proposal_checks import TITLE_LIMIT
from ...worker.context import current_scope
from ..check.lint import approved_files, digests_of
from ..check.plan import overtime_of
from ..file.schema import ToolPart, is_template
from ..file.shell_programs import (
    ASSIGNED,
    AWK,
    RUNNERS,
    SHELL,
    find_script_files,
    find_started,
    program_of,
    read_interpreter,
)
from ..file.shell_syntax import DEPTH_LIMIT, TooDeep, Word, read_script
from ..steps.ai import AiStep
from ..steps.command import CommandStep, ToolStep
from ..steps.function import locate_target
from ..steps.mcp import McpStep
from ..steps.provider import STEP_TYPES, Approval, StepPart, duration_ms
from ..steps.workflow import WorkflowStep
from .run_context import RunContext
from .step_attempt import AnsweredAttempt
from .step_renderer import RenderedStep, StepFailed


class StepApproval:
    def __init__(self, run: RunContext, key: str, *, used: str | None = None) -> None:
        """Prepare the approval. `used` is the proposal that the step began with before."""
        self._run = run
        self._inbox = run.shared.inbox()
        self._key = key
        self.used = used
        self._files: dict[str, str] = {}
        self._programs: Mapping[str, str] = {}
        self._bound: Token[Mapping[str, str]] | None = None

    async def ask(
        self,
        step_id: str,
        step: StepPart,
        rendered: RenderedStep,
        attempts: int,
        find_end: Callable[[], Deadline | None],
    ) -> RenderedStep | AnsweredAttempt:
        """Return the approved step, perhaps modified, or the end of a step that may not begin."""
        scope = current_scope.get()
        owner = "run" if scope is None else scope.name
        # It waits until that very deadline: the run has already kept the time for its end.
        clocks = Clocks(timeout_ms=0, reserve_ms=0)

        def begin() -> Call:
            return admit(f"step {step_id}", clocks, parent=find_end(), parent_owner=owner)

        admission = begin()
        wait = RunWait(self._key, self._run.began_at, self._run.shared.person_wait.waits, begin)
        try:
            return await self._ask_and_use(step_id, step, rendered, attempts, admission, wait)
        except Failure as failure:
            return AnsweredAttempt(answer(admission, refusal_outcome(failure)), rule="approval/failed")

    async def _ask_and_use(
        self, step_id: str, step: StepPart, written: RenderedStep, attempts: int, admission: Call, wait: RunWait
    ) -> RenderedStep | AnsweredAttempt:
        # The step runs in the directory that was shown, even if a link leads elsewhere by then.
        rendered = await asyncio.to_thread(_with_real_paths, step, written)
        ask = await self._make_request(step_id, step, rendered, attempts)
        used = None if self.used is None else await self._inbox.get(self.used)
        if used is not None and used.ask.action_hash == ask.action_hash:
            return self._bind(rendered, _changes(ask, used, rendered.settings))
        self.used = None
        waited = await ask_and_wait(self._inbox, ask, Principal.local(), wait)
        proposal = waited.proposal
        if proposal.allows_unanswered:
            if await self._inbox.use(proposal.id, ask.action_hash, unanswered=True):
                self.used = proposal.id
            return self._bind(rendered, {})
        if not proposal.status.allows:
            rule = "pending" if waited.is_late else proposal.status
            return AnsweredAttempt(answer(admission, waited.outcome()), rule=f"approval/{rule}")
        changed = _changes(ask, proposal, rendered.settings)
        if (wrong := _find_wrong(step, changed)) is not None:
            problem = Problem("ARG_ERROR", f"the operator's change does not fit: {wrong}", "validation")
            return AnsweredAttempt(answer(admission, Outcome(Ending.NOT_STARTED, problem)), rule="approval/modified")
        now = await asyncio.to_thread(_with_real_paths, step, written)
        if (await self._make_request(step_id, step, now, attempts)).action_hash != ask.action_hash:
            raise action_changed(proposal.id, {"proposal_id": proposal.id})
        if not await self._inbox.use(proposal.id, ask.action_hash):
            problem = Problem("ALREADY_DECIDED", f"the approval {proposal.id} was used before")
            return AnsweredAttempt(answer(admission, Outcome(Ending.NOT_STARTED, problem)), rule="approval/used")
        self.used = proposal.id
        return self._bind(rendered, changed)

    def _bind(self, rendered: RenderedStep, changed: Mapping[str, Any]) -> RenderedStep:
        """Return the approved step, with its nested files, which are compared again when they are read."""
        if self._files:
            self._bound = approved_files.set({**approved_files.get(), **self._files})
        return rendered._replace(settings={**rendered.settings, **changed})

    async def compare_programs(self) -> None:
        for path in await self._find_changed():
            message = f"{path!r} is not what was approved: it has changed since it was proposed"
            raise StepFailed("ACTION_CHANGED", message, "approval/failed")

    async def warn_of_changes(self) -> list[Warning_]:
        """Compare again after an attempt: its programs are opened after the comparison before it."""
        said = "changed while the step ran, which may have run other contents than the approved ones"
        return [warning("APPROVED_FILE_CHANGED", f"{path!r} {said}") for path in await self._find_changed()]

    async def _find_changed(self) -> list[str]:
        digests = await asyncio.to_thread(lambda: [digest_of_file(path) for path in self._programs])
        return [path for path, now in zip(self._programs, digests, strict=True) if now != self._programs[path]]

    def record(self, error: Mapping[str, Any] | None) -> None:
        if self._bound is not None:
            approved_files.reset(self._bound)
        if self.used is not None:
            code = None if error is None else str(error.get("code"))
            self._inbox.record_outcome(self.used, code, "" if error is None else str(error.get("message", "")))

    async def _make_request(
        self, step_id: str, step: StepPart, rendered: RenderedStep, attempts: int
    ) -> ProposalRequest:
        written = step.approval if isinstance(step.approval, Approval) else Approval()
        run_id = self._run.run_id
        of = f"{step_id} of {self._run.call.name.removeprefix('run ')}"
        title = f"{of}: {step.description}" if step.description else f"Run step {of}"
        settings = {name: value for name, value in rendered.settings.items() if value is not None}
        hidden: list[str] = []
        arguments = await self._hide_secrets(settings, "with", hidden)
        tools = {name: tool.model_dump(exclude_unset=True) for name, tool in tools_of(step, self._run).items()}
        await self._read_files(step, rendered, tools)
        overtime = step.overtime if step.overtime is not None else self._run.workflow.defaults.overtime
        shown: JsonObject = {"directory": str(rendered.folder), "environment": rendered.env}
        optional = {
            "values": rendered.values,
            "files": {**self._files, **self._programs},
            "overtime": overtime,  # its observer may be a program of the file
            "tools of the file": tools,
        }
        shown |= {name: each for name, each in optional.items() if each}
        surroundings: JsonObject = {**NOT_BOUND, "step type": step.type}
        for place, each in shown.items():
            surroundings[place] = await self._hide_secrets(each, place, hidden)
        if attempts > 1:
            surroundings["tries"] = f"up to {attempts}: one approval covers all of them"
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

    async def _read_files(self, step: StepPart, rendered: RenderedStep, tools: Mapping[str, Any]) -> None:
        nested = [self._run.folder / tool["workflow"] for tool in tools.values() if "workflow" in tool]
        if isinstance(step, WorkflowStep):
            nested.append(rendered.folder / str(rendered.settings["workflow"]))
        self._files = {}
        for file in nested:
            self._files |= await asyncio.to_thread(digests_of, file)
        self._programs = await asyncio.to_thread(digest_programs, step, rendered, self._run)

    async def _hide_secrets(self, value: Any, place: str, hidden: list[str]) -> Any:
        return await hide_secrets(self._inbox, self._run.redaction.text, value, place, hidden)


def _with_real_paths(step: StepPart, rendered: RenderedStep) -> RenderedStep:
    try:
        folder, settings = Path(os.path.realpath(rendered.folder)), rendered.settings
        if step.type == "function":
            settings = {**settings, "target": locate_target(str(settings["target"]), folder)}
        return rendered._replace(folder=folder, settings=settings)
    except ValueError:  # not a path; the provider reports it
        return rendered


def _changes(ask: ProposalRequest, proposal: Proposal, settings: Mapping[str, Any]) -> JsonObject:
    """Return the operator's changes, with hidden secrets restored."""
    if proposal.status is not ProposalStatus.MODIFIED:
        return {}
    shown, decided = dict(ask.arguments or {}), dict(proposal.arguments or {})
    return {
        name: restore_hidden(value, shown.get(name), settings.get(name))
        for name, value in decided.items()
        if name not in shown or canonical(shown[name]) != canonical(value)
    }


def _find_wrong(step: StepPart, changed: Mapping[str, Any]) -> str | None:
    if not changed:
        return None
    if masked := [name for name, value in changed.items() if HIDDEN in canonical(value)]:
        return f"{', '.join(masked)}: {EDITED}"
    # A tool runs as a command; its step only names the tool.
    is_tool = isinstance(step, ToolStep)
    model = CommandStep if is_tool else STEP_TYPES[step.type].schema
    written = {"exec": "-"} if is_tool else step.model_dump(exclude_unset=True)
    try:
        model.model_validate({**written, **changed})
    except ValidationError as error:
        return "; ".join(f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in error.errors())
    return None


_PLAIN_VALUE = re.compile(r"[\w./+@%:,-]+")  # a value that is the same however it is quoted in a script
# After these, a relative path names another file.
_MOVING = {"cd", "pushd", "popd", "chroot", "nsenter", "unshare"}
_MOST_FOLDERS = 8  # in which a command may be after several `cd`
_NOT_LITERAL = re.compile(r"[-~]|.*[*?\[{]", re.DOTALL)
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
    folders: tuple[str, ...] = ("",)
    """The directories in which it may be run; none if they are not known."""


def _commands_in(script: str, is_sure: bool = True, depth: int = 0) -> list[_ScriptCommand]:
    try:
        commands = read_script(script).commands if depth < DEPTH_LIMIT else []
    except TooDeep:
        return []
    found = [each for command in commands for each in _commands_of(command.words, command.input, is_sure, depth)]
    moving = [each.words for each in found if (each.is_sure or not is_sure) and _changes_directory(each.words)]
    outer = _folders_after(moving)
    return [
        each._replace(folders=tuple(dict.fromkeys(os.path.join(one, own) for one in outer for own in each.folders)))
        for each in found
    ]


def _folders_after(moving: Sequence[Sequence[Word]]) -> tuple[str, ...]:
    """Return the directories in which a command beside these may be run: not each `cd` precedes it, or succeeds."""
    folders = [""]
    for words in moving:
        if words[0].text != "cd" or len(words) != 2 or words[1].is_expanded or words[1].values:
            return ()
        if _NOT_LITERAL.match(words[1].text) or len(folders) * 2 > _MOST_FOLDERS:
            return ()
        folders += [os.path.join(each, words[1].text) for each in folders]
    return tuple(folders)


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
    """Yield the programs of a command, and its files of code, in each directory in which it may be run."""
    program, *arguments = [
        word if command.folders or word.text.startswith(os.sep) else Word() for word in command.words
    ]
    for place in command.folders or ("",):
        yield from _digest_words(command, program, arguments, folder, folder / place)


def _digest_words(
    command: _ScriptCommand, program: Word, arguments: list[Word], folder: Path, place: Path
) -> Iterator[tuple[str, str]]:
    name = program_of(command.words[0])
    required = [program] if "/" in program.text else []
    optional = [word for word in arguments if "/" in word.text and _is_executable(place / word.text)]
    if name in (".", "source"):
        required += arguments[:1]
    elif name in AWK:
        optional += find_script_files(arguments)
    elif (reading := read_interpreter(name, command.words[1:])) is not None:
        first = len(arguments) - len(reading.rest)
        optional += arguments[:first]
        optional += [word for word in arguments[first:] if _is_file(_digest_below(word, folder, place))][:1]
        # Not the first argument of a module or of a script in an option.
        if not reading.code and (first == len(reading.options) or command.words[first].text == "--"):
            required += arguments[first : first + 1]
    for word in required:
        if (found := _digest_below(word, folder, place)) is not None and (command.is_sure or _is_file(found)):
            yield found
    for word in optional:
        if _is_file(found := _digest_below(word, folder, place)):
            yield found


def _is_executable(path: Path) -> bool:
    return "\0" not in str(path) and os.access(path, os.X_OK)


def _is_file(found: tuple[str, str] | None) -> TypeGuard[tuple[str, str]]:
    return found is not None and found[1] != NO_SUCH_FILE


def _digest_below(word: Word, folder: Path, place: Path) -> tuple[str, str] | None:
    """Return the path of a word in a place, and the digest of its file. None: it is no file below the folder."""
    if word.is_expanded or not word.text or "\0" in word.text:
        return None
    path = str(place / word.text)
    below = os.path.join(folder, "")
    if not os.path.normpath(path).startswith(below) and not os.path.realpath(path).startswith(below):
        return None
    digest = NOT_A_FILE if os.path.isdir(path) else digest_of_file(path)
    is_pattern = digest == NO_SUCH_FILE and any(char in word.text for char in "*?[{~")
    return None if digest == NOT_A_FILE or is_pattern else (path, digest)
