"""A person before the work: a command that declares `approval` runs only after somebody has said yes to exactly that.

    arguments are checked ── proposal ── approved ── spent by this one dispatch ── the work, whose clock starts now
                                 │
                                 └─ rejected, expired, still pending: an answer, and nothing has run

An approval lets one call pass. Of two identical calls that waited for the same one, the second asks again.

A command that writes a file is shown as what would change in it. The current text is read here, because no code of
the app's runs before somebody said yes.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import stat
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any

from ..core.arguments import NotSerializable
from ..core.catalogue import ApprovedFile, Catalogue, CommandSpec
from ..core.clocks import NS_PER_MS, Deadline, reserve_ms_for
from ..core.envelope import Envelope
from ..core.errors import Failure
from ..core.exact_values import Look, Typed, copy_arguments, exact
from ..core.proposal import Kind, Proposal, ProposalRequest, ProposalStatus, ProposedFile, canonical, digest, result_of
from ..core.proposal_request import FILE_LIMIT
from ..core.redaction import HIDDEN
from ..core.value_types import replace
from ..process.clock import monotonic_ns
from ..runtime.call import Call, CallRequest, Outcome, invalid
from .access import Principal
from .inbox import EDITED, HIDDEN_VALUES, Inbox, hide_secrets, restore_hidden
from .person_wait import (
    CALL_AGAIN,
    NOT_BOUND,
    CallWait,
    StepSurroundings,
    action_changed,
    ask_and_wait,
    read_response_budget_ms,
    refusal_outcome,
)

TITLE_LENGTH = 200
# The one parameter beside the text that a command with an approved file may have.
JUSTIFICATION = "justification"
PROGRAM_DIGEST = "program content"
NO_SUCH_FILE = "no such file"
NOT_A_FILE = "not a regular file"
Check = Callable[[Call, CommandSpec, Mapping[str, object]], Awaitable[Outcome]]


class Approvals:
    """Asks a person before a command that declares `approval` is run, and records what became of it. Raises Failure
    when it is made, if the environment holds no valid time to wait for people."""

    def __init__(
        self,
        catalogue: Catalogue,
        inbox: Callable[[], Inbox],
        check: Check | None = None,
        program: str | None = None,
        step: StepSurroundings | None = None,
    ) -> None:
        """`check` looks at arguments without running anything, where that is possible, as a part of the call. `program`
        is the file or the module that the commands are in, `step` the step of a run that they are called for."""
        self._step = step
        self._check = check
        self._program = program
        self._file = catalogue.file
        # Workers run the program as it was imported, which was before this.
        self._file_digest = None if catalogue.file is None else digest_of_file(catalogue.file)
        self._app = catalogue.name
        self._specs = {spec.name: spec for spec in catalogue.commands if spec.approval is not None}
        self._inbox = inbox
        self._budget_ms = read_response_budget_ms() if self._specs else 0

    def guards(self, name: str) -> bool:
        """Return whether the command needs an approval."""
        return name in self._specs

    async def approve(self, call: Call, look: Look | None = None) -> Outcome | None:
        """Ask a person whether the call may run, and wait within its caller's time. Return the answer where it may not.

        Else the approval is used up, and the call has what was approved: perhaps other arguments. Its clocks stand
        still while a person is asked. `look` is what the check of the arguments said of them, if that was done.
        """
        spec, request = self._specs[call.name], call.request
        try:
            if request is None:  # made inside another call: nobody else may change the arguments while a person decides
                call.arguments = copy_arguments(call.arguments or {})
                call.request = request = CallRequest(call.name, call.arguments, repeat_hint=CALL_AGAIN)
            if look is None and self._check is not None:
                checked = await self._check(call, spec, call.arguments or {})
                if checked.problem is not None:
                    return checked
                look = Look.of(checked.data)
            return await self._ask(call, spec, request, look)
        except NotSerializable as reason:  # nobody could be shown it
            return invalid([{"field": "arguments", "message": str(reason)}])
        except Failure as failure:  # the store cannot be used, or what would be done has changed meanwhile
            return refusal_outcome(failure)

    async def _ask(self, call: Call, spec: CommandSpec, request: CallRequest, look: Look | None) -> Outcome | None:
        """Propose the call, wait for a decision and use the approval up."""
        started_ns = monotonic_ns()
        wait_ms = self._patience_ms(request.budget_ms, call.parent, started_ns)
        inbox, run_wait = self._inbox(), request.run_wait
        by = request.principal or Principal.local()
        while True:
            ask = await self._question(call, spec, request, look)
            # The hash of a file knows not what is there now, which makes it another question.
            identity = None if ask.file is None else digest([ask.title, ask.action_hash, ask.file.current])
            wait = run_wait or CallWait(started_ns, wait_ms, request.idempotency_key or identity)
            waited = await ask_and_wait(inbox, ask, by, wait, partial(_must_be_asked_alike, ask, run_wait is not None))
            proposal = waited.proposal
            goes_on = proposal.status is ProposalStatus.EXPIRED and ask.policy.when_expired == "default"
            if waited.was_open and (goes_on or proposal.status.allows):
                call.restart_clocks()
                # What it would do now may not be what was asked: another directory, another file, other conversions.
                if look is not None and self._check is not None:
                    checked = await self._check(call, spec, call.arguments or {})
                    if checked.problem is not None:
                        return checked
                    look = Look.of(checked.data)
                now = await self._question(call, spec, request, look)
                if not _is_asked_alike(proposal.ask, now):
                    message = f"what would be done now is not what {proposal.id} asks for: it has changed meanwhile"
                    raise Failure("ACTION_CHANGED", message, suggestion="call again, which asks anew")
            if not goes_on and not proposal.status.allows:
                return waited.outcome(request.repeat_hint or f"call {spec.name} again with the same arguments")
            approved = _make_approved_arguments(spec, call.arguments or {}, proposal)
            is_shown_hidden = self._step_of(request) is not None and spec.approved_file is None
            if is_shown_hidden and (edited := _find_edited(approved, call.arguments or {})):
                return invalid([{"field": name, "message": EDITED} for name in edited])
            if proposal.status is ProposalStatus.MODIFIED and self._check is not None:
                checked = await self._check(call, spec, approved)
                if checked.problem is not None:
                    return checked
            if await inbox.use(proposal.id, ask.action_hash, unanswered=goes_on):
                call.arguments, call.proposal_id = approved, proposal.id
                if request.budget_ms is not None:
                    waited_ms = (monotonic_ns() - started_ns) // NS_PER_MS
                    request.budget_ms = max(0, request.budget_ms - waited_ms)
                return None

    def must_be_approved(self, proposal: Proposal) -> None:
        """Raise Failure unless the proposal was made for this program file, with the content that was imported."""
        approved = (proposal.ask.surroundings or {}).get(PROGRAM_DIGEST)
        if approved != self._file_digest:
            message = f"{self._file!r} is not what {proposal.id} asks for: it has changed since it was proposed"
            raise Failure("ACTION_CHANGED", message, suggestion="call again, which asks anew")

    def record(self, proposal_id: str, envelope: Envelope) -> None:
        """Write down what became of a run, for whoever approved it. A job that goes on does that itself."""
        if envelope.ending != "detached":
            message = str((envelope.error or {}).get("message", ""))
            self._inbox().record_outcome(proposal_id, envelope.code, message)

    async def _question(
        self, call: Call, spec: CommandSpec, request: CallRequest, look: Look | None
    ) -> ProposalRequest:
        """Write out what would be done, with what else decides what this call does."""
        added: dict[str, Any] = {}
        if self._file is not None:
            added[PROGRAM_DIGEST] = await asyncio.to_thread(digest_of_file, self._file)
            if added[PROGRAM_DIGEST] != self._file_digest:
                message = f"{self._file!r} has changed since this program was started from it"
                raise Failure("ACTION_CHANGED", message, suggestion="start the program again, and call again")
        if request.stdin is not None:
            added["stdin"] = {"sha256": request.stdin.digest}
        if request.resume_from is not None:
            added["resume from"] = request.resume_from
        conversions, shown = _conversions(look), call.arguments or {}
        if (step := self._step_of(request)) is not None:
            inbox, redact = self._inbox(), step.redact
            added |= await step.describe(inbox)
            hidden: list[str] = []
            shown = await hide_secrets(inbox, redact, shown, "arguments", hidden)
            conversions = await hide_secrets(inbox, redact, conversions, "conversions", hidden)
            if hidden:
                added[HIDDEN_VALUES] = [*added.get(HIDDEN_VALUES, ()), *hidden]
        added |= conversions
        if spec.approved_file is None:
            return await self._ask_for_operation(spec, shown, request.justification, added)
        return await asyncio.to_thread(
            self._ask_for_file, spec, spec.approved_file, call.arguments or {}, request.justification, added
        )

    def _step_of(self, request: CallRequest) -> StepSurroundings | None:
        """Return the step that a call is made for; a call inside another one is made for the step of the whole App."""
        return self._step if request.run_wait is None else request.run_wait.step

    def _patience_ms(self, budget_ms: int | None, parent: Deadline | None, now_ns: int) -> int:
        limits = [self._budget_ms]
        if budget_ms is not None:
            limits.append(budget_ms)
        if parent is not None:
            remaining_ms = parent.remaining_ms(now_ns)
            limits.append(remaining_ms - reserve_ms_for(remaining_ms))
        return max(0, min(limits))

    async def _ask_for_operation(
        self,
        spec: CommandSpec,
        arguments: Mapping[str, object],
        justification: str,
        added: Mapping[str, Any],
    ) -> ProposalRequest:
        assert spec.approval is not None
        given, typed = exact(arguments)
        filling = _DefaultFiller(spec.input_schema)
        arguments = {**_defaults(spec), **filling.fill(given)}
        title = f"{self._app} {spec.name}" + "".join(
            f" {name}={arguments[name]}" for name in _names_in_title(spec, arguments)
        )
        surroundings = {**self._surroundings(spec, filling), **added}
        if typed:
            surroundings["given as"] = {each.path: await self._type_shown(each) for each in typed}
        return ProposalRequest(
            Kind.OPERATION,
            _shorten_title(title),
            justification,
            operation=f"{self._app}/{spec.name}",
            arguments=arguments,
            input_schema=spec.input_schema,
            policy=replace(spec.approval, destructive=spec.destructive or spec.approval.destructive),
            surroundings=surroundings,
            dispatched=True,
        )

    async def _type_shown(self, value: Typed) -> Any:
        """Describe the type of a value, and its state by a keyed digest: the state of an object may hold what is not
        for everybody to see."""
        if value.state is None:
            return value.type
        return {"type": value.type, "state": await self._inbox().digest_of_hidden(value.state)}

    def _ask_for_file(
        self,
        spec: CommandSpec,
        file: ApprovedFile,
        arguments: Mapping[str, object],
        justification: str,
        added: Mapping[str, Any],
    ) -> ProposalRequest:
        """Write out a change of a file. Reads the file, for the comparison."""
        assert spec.approval is not None
        return ProposalRequest(
            Kind.FILE,
            _shorten_title(f"{self._app} {spec.name}: {os.path.basename(file.path)}"),
            justification or str(arguments.get(JUSTIFICATION, "")),
            file=ProposedFile(file.path, str(arguments[file.proposed]), read_text_file(file.path), was_read=True),
            policy=replace(spec.approval, destructive=spec.destructive or spec.approval.destructive),
            surroundings={
                "command": f"{self._app}/{spec.name}",
                **self._surroundings(spec),
                **added,
            },
            dispatched=True,
        )

    def _surroundings(self, spec: CommandSpec, filling: _DefaultFiller | None = None) -> dict[str, Any]:
        """Say where it runs, and which arguments nobody can be shown because only the program knows them."""
        try:
            found: dict[str, Any] = {"directory": os.getcwd()}
        except OSError:  # it was removed under us
            found = {"directory": None}
        found |= NOT_BOUND
        if self._program is not None:
            found["program"] = self._program
        if self._file is not None and self._file != self._program:  # a name stands for whatever is found by it
            found["program file"] = self._file
        properties = spec.input_schema.get("properties", {})
        required = spec.input_schema.get("required", [])
        unknown = sorted(
            name for name, declared in properties.items() if name not in required and "default" not in declared
        )
        if filling is not None:
            unknown = sorted([*unknown, *filling.unknown])
            if filling.undeclared:
                found["names that are not declared"] = sorted(filling.undeclared)
        if unknown and spec.approved_file is None:
            found["defaults known to the program alone"] = unknown
        return found


def _conversions(look: Look | None) -> dict[str, Any]:
    """Return what the command gets where it is something else than was given."""
    found: dict[str, Any] = {}
    if look is not None and look.runs_as:
        found["runs as"] = look.runs_as
    if look is not None and look.unsteady:
        found["runs as something else every time"] = look.unsteady
    return found


def _defaults(spec: CommandSpec) -> dict[str, Any]:
    """Return what the command is run with where the caller says nothing."""
    properties = spec.input_schema.get("properties", {})
    return {name: declared["default"] for name, declared in properties.items() if "default" in declared}


def _names_in_title(spec: CommandSpec, arguments: Mapping[str, Any]) -> list[str]:
    """Return the names of the arguments that are not as by default, in one order, however the call was written: the
    identical call has the identical title."""
    defaults, declared = _defaults(spec), list(spec.input_schema.get("properties", {}))
    names = [name for name in declared if name in arguments] + sorted(arguments.keys() - declared)
    return [name for name in names if name not in defaults or canonical(defaults[name]) != canonical(arguments[name])]


class _DefaultFiller:
    """Fills in the defaults of the models inside arguments, as far as their schema tells them."""

    def __init__(self, schema: Mapping[str, Any]) -> None:
        self._schema = schema
        self.unknown: list[str] = []
        """Where only the program knows it."""
        self.undeclared: list[str] = []
        """What is ignored, or is another name of something whose default is shown beside it."""

    def fill(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments with the defaults of the models inside them."""
        properties = self._schema.get("properties", {})
        return {name: self._value(value, properties.get(name, {}), name) for name, value in given.items()}

    def _value(self, value: Any, schema: Any, path: str) -> Any:
        if not isinstance(value, dict | list):
            return value
        fitting = self._find_shapes(value, schema)
        if len(fitting) > 1:
            self.unknown.append(path)
        if len(fitting) != 1:
            return value
        [schema] = fitting
        if isinstance(value, list):
            first = schema.get("prefixItems", [])
            rest = schema.get("items", {})
            return [
                self._value(each, first[at] if at < len(first) else rest, f"{path}[{at}]")
                for at, each in enumerate(value)
            ]
        properties, more = schema.get("properties", {}), schema.get("additionalProperties")
        if properties and not more:
            self.undeclared += [f"{path}.{name}" for name in value if name not in properties]
        found = {name: self._value(each, properties.get(name, more), f"{path}.{name}") for name, each in value.items()}
        for name, declared in properties.items():
            if name not in value and "default" in declared:
                found[name] = declared["default"]
            elif name not in value:
                self.unknown.append(f"{path}.{name}")
        return found

    def _find_shapes(self, value: dict[str, Any] | list[Any], schema: Any) -> list[dict[str, Any]]:
        """Return the schemas, of those that are allowed here, that this value may be written for."""
        if not isinstance(schema, dict):
            return []
        if "$ref" in schema:
            return self._find_shapes(value, self._schema.get("$defs", {}).get(schema["$ref"].rpartition("/")[2]))
        for several in ("anyOf", "oneOf", "allOf"):
            if several in schema:
                return [each for option in schema[several] for each in self._find_shapes(value, option)]
        if schema.get("type") != ("array" if isinstance(value, list) else "object"):
            return []
        if isinstance(value, dict):
            constants = {
                name: declared["const"]
                for name, declared in schema.get("properties", {}).items()
                if "const" in declared
            }
            if any(name in value and value[name] != constant for name, constant in constants.items()):
                return []
            if any(name not in value for name in schema.get("required", [])):
                return []
        return [schema]


def _must_be_asked_alike(ask: ProposalRequest, is_step: bool, proposal: Proposal) -> None:
    """Raise Failure unless the proposal asks the same question."""
    if _is_asked_alike(proposal.ask, ask):
        return
    if is_step:
        raise action_changed(proposal.id, {"proposal_id": proposal.id})
    message = f"{proposal.id} asks for the same in other words, by other rules or of another file"
    raise Failure("ACTION_CHANGED", message, suggestion="withdraw it and call again, or use another key")


def _is_asked_alike(there: ProposalRequest, ask: ProposalRequest) -> bool:
    """Return whether it is the same question. Whoever may propose may have proposed the same action before, under rules
    of its own: for anybody to decide, without the typed confirmation, against a current text that it made up."""
    return (there.title, there.policy, there.file, there.text) == (ask.title, ask.policy, ask.file, ask.text)


def _find_edited(approved: Mapping[str, object], arguments: Mapping[str, object]) -> list[str]:
    """Return the arguments in which somebody has changed a text around a hidden value."""
    return [name for name, value in approved.items() if value is not arguments.get(name) and HIDDEN in canonical(value)]


def _make_approved_arguments(
    spec: CommandSpec, arguments: Mapping[str, object], proposal: Proposal
) -> Mapping[str, object]:
    """Return what the command is run with: as it was given, where nobody changed it: it may be more than JSON can
    say."""
    file = spec.approved_file
    if file is None:
        if proposal.status is not ProposalStatus.MODIFIED:
            return arguments
        asked = dict(proposal.ask.arguments or {})
        # A default that was shown and left alone stays the command's own: not every one would pass as an argument.
        return {
            name: arguments[name] if is_same else restore_hidden(value, asked.get(name), arguments.get(name))
            for name, value in (proposal.arguments or {}).items()
            if not (is_same := name in asked and canonical(asked[name]) == canonical(value)) or name in arguments
        }
    assert proposal.ask.file is not None
    approved = {**arguments, file.proposed: proposal.file_text}
    if JUSTIFICATION in arguments:  # the one that the operator was shown, whatever this call says
        approved[JUSTIFICATION] = proposal.ask.justification
    if file.decision is not None:
        shown = {"path": file.path, "text": proposal.file_text, "current": proposal.ask.file.current}
        approved[file.decision] = {**result_of(proposal), "file": shown}
    return approved


def _shorten_title(title: str) -> str:
    title = " ".join(title.split())
    return title if len(title) <= TITLE_LENGTH else title[: TITLE_LENGTH - 1] + "…"


def digest_of_file(path: str) -> str:
    """Return the SHA-256 of a file's content, behind every symbolic link, or the reason why there is none."""
    try:
        # O_NONBLOCK: opening a pipe must not wait for its writer.
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                return NOT_A_FILE
            return f"sha256 {hashlib.file_digest(file, 'sha256').hexdigest()}"
    except (FileNotFoundError, NotADirectoryError):
        return NO_SUCH_FILE
    except (OSError, ValueError) as error:
        return f"unreadable: {getattr(error, 'strerror', None) or error}"


def read_text_file(path: str) -> str | None:
    """Read a text file; None where there is no such file. Raises Failure where nobody could be shown what would
    change."""
    try:
        # A pipe that nobody writes to must not keep us waiting.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise Failure("FILE_UNREADABLE", f"{path} is not an ordinary file")
            with open(descriptor, "rb", closefd=False) as file:
                content = file.read(FILE_LIMIT + 1)
        finally:
            os.close(descriptor)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise Failure("FILE_UNREADABLE", f"{path}: {error.strerror}") from None
    if len(content) > FILE_LIMIT:
        raise Failure("FILE_UNREADABLE", f"{path} is larger than {FILE_LIMIT} bytes, the most that is shown")
    try:
        return content.decode()
    except UnicodeDecodeError:
        raise Failure("FILE_UNREADABLE", f"{path} is not text in UTF-8") from None
