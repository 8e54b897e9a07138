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
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextvars import Token
from pathlib import Path
from typing import Any

from ..core.clocks import Clocks, Deadline
from ..core.envelope import Envelope, Problem
from ..core.errors import Ending, Failure
from ..core.proposal import Kind, Policy, Proposal, ProposalRequest, ProposalStatus, canonical
from ..core.proposal_request import TITLE_LIMIT
from ..core.redaction import HIDDEN
from ..core.validation import ValidationError
from ..core.value_types import NamedTuple
from ..inbox.access import Principal
from ..inbox.approval import NO_SUCH_FILE, NOT_A_FILE, digest_of_file
from ..inbox.inbox import EDITED, HIDDEN_VALUES, hide_secrets, restore_hidden
from ..inbox.person_wait import NOT_BOUND, RunWait, action_changed, ask_and_wait, refusal_outcome
from ..providers.command import CommandStep, ToolStep
from ..providers.mcp import McpStep
from ..providers.provider import STEP_TYPES, Approval, StepPart, duration_ms
from ..providers.workflow import WorkflowStep
from ..runtime.call import Outcome, admit, answer
from ..runtime.loop_call import current_scope
from .lint import approved_files, digests_of
from .scheduler import RunContext
from .schema import ToolPart, is_template
from .shell_programs import ASSIGNED, INTERPRETER, RUNNERS, SHELL, find_started, program_of, read_interpreter
from .shell_syntax import TooDeep, Word, read_script
from .step_renderer import RenderedStep, StepFailed


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
    if step.type == "function":
        path = str(settings["target"]).partition(":")[0]
        return {path: digest_of_file(path)} if os.path.isabs(path) else {}
    if isinstance(step, CommandStep | ToolStep):
        return _digest_all(_commands_in(settings["exec"]), folder)
    if isinstance(step, McpStep):
        return _digest_all([_server_command(settings)], folder)
    found: dict[str, str] = {}
    for server in settings["ai"]["mcp_servers"].values() if step.type == "ai" else ():
        found |= _digest_all([_server_command(server)], folder)
    for tool in _tools_of(step, run).values():  # a tool that is a workflow has no `exec`
        if not is_template(where := tool.cwd or run.workflow.defaults.cwd or ""):
            found |= _digest_all(_commands_in(tool.exec), run.folder / where)
    return found


def _server_command(server: Mapping[str, Any]) -> list[Word]:
    return [Word(text) for text in (server["command"] or "", *server["args"])]


def _commands_in(script: str) -> Iterator[Sequence[Word]]:
    """Yield the words of each command of a script, of the command that `env` and the like start, and of `sh -c`."""
    try:
        commands = read_script(script).commands
    except TooDeep:
        return
    for command in commands:
        words: Sequence[Word] = command.words
        while words:
            if ASSIGNED.match(words[0].text) or words[0].text[:1] == "-":
                words = words[1:]
                continue
            yield words
            name = program_of(words[0])
            if SHELL.fullmatch(name) and (reading := read_interpreter(name, words[1:])) is not None:
                for inner in reading.code:
                    if not inner.is_expanded:
                        yield from _commands_in(inner.text)
            words = find_started(name, words[1:]) if name in RUNNERS else ()


def _digest_all(commands: Iterable[Sequence[Word]], folder: Path) -> dict[str, str]:
    return {path: text for words in commands for path, text in _digest_program(words, folder)}


def _digest_program(words: Sequence[Word], folder: Path) -> Iterator[tuple[str, str]]:
    """Yield the program of a command, if it is named by its path, and the first file that an interpreter is given.

    A file that does not exist yet is bound as that.
    """
    program, *arguments = words or [Word()]
    if "/" in program.text and (found := _digest_below(program, folder)) is not None:
        yield found
    name = program_of(program)
    if not SHELL.fullmatch(name) and not INTERPRETER.fullmatch(name) and name not in (".", "source"):
        return
    for number, word in enumerate(arguments):
        found = _digest_below(word, folder)
        is_missing = found is not None and found[1] == NO_SUCH_FILE
        if found is not None and (not is_missing or (number == 0 and not word.text.startswith("-"))):
            yield found
            return


def _digest_below(word: Word, folder: Path) -> tuple[str, str] | None:
    """Return the path and the digest of what a literal word names below the folder; None for anything else."""
    if word.is_expanded or not word.text or "\0" in word.text:
        return None
    path = str(folder / word.text)
    below = f"{folder}{os.sep}"
    if not os.path.normpath(path).startswith(below) and not os.path.realpath(path).startswith(below):
        return None
    digest = digest_of_file(path)
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
