"""A call and its two ends: `admit` starts its clocks before anything runs, `answer` makes its envelope."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Protocol

from .._version import __version__
from ..core.envelope import Envelope, Problem, Warning_, build_envelope, join_problems, warning
from ..core.errors import Ending, SideEffects
from ..core.limits import (
    DEFAULT_GRACE_MS,
    DEFAULT_TIMEOUT_MS,
    NS_PER_MS,
    Bound,
    ClockKind,
    Clocks,
    Deadline,
    Fired,
    WallTime,
    format_duration,
    nest,
    reserve_ms_for,
)
from ..core.trace import TraceContext, span_id_of, trace_from_variables
from ..core.value_types import JsonObject, field, record, replace, value
from ..supervise import clock, spans
from ..supervise.environment import DEADLINE_VARIABLE, REMAINING_VARIABLE

TYPE_CHECKING = False
if TYPE_CHECKING:
    import asyncio
    from contextlib import AbstractContextManager

    from ..core.catalogue import Catalogue, Operation
    from ..core.overtime import ObserverKind, Overtime, OvertimeDecision
    from ..core.proposal import Proposal
    from ..core.visible_text import Redaction
    from ..worker.context import Answerer, Caller, OnLog, Progress
    from .control import CallControl
    from .principal import Principal

DEFAULT_CLOCKS = Clocks(timeout_ms=DEFAULT_TIMEOUT_MS, grace_ms=DEFAULT_GRACE_MS)


@value
class Tool:
    """The program that answers."""

    version: str | None = __version__
    """None if the app's version does not have the form of the contract."""
    debug: bool = False
    is_served: bool = False
    """Its callers are remote: without `debug` they do not see the text of an exception."""
    name: str = "shotclock"
    secret_variables: tuple[str, ...] = ()
    """Variables whose values are removed from answers."""

    def redaction(self) -> Redaction | None:
        if not self.secret_variables:
            return None
        from ..core.visible_text import Redaction  # few programs need it

        redaction = Redaction({})
        redaction.learn_values(os.environ.get(variable, "") for variable in self.secret_variables)
        return redaction


OURSELVES = Tool()


class Approver(Protocol):
    """Asks a person before guarded calls: `people.approval.Approvals`."""

    def guards(self, name: str) -> bool: ...
    async def approve(self, call: Call) -> Outcome | None: ...
    def record(self, proposal_id: str, envelope: Envelope) -> None: ...


class Places(Protocol):
    """Limits how many guarded calls run at the same time: `dispatch.admission.ConcurrencyLimits`."""

    def guards(self, name: str) -> bool: ...
    async def enter(self, call: Call) -> Callable[[], None] | Outcome: ...


@value
class CallRules:
    """The App's part of a call: the program that answers, and those who may hold the call up or extend it."""

    tool: Tool = OURSELVES
    approvals: Approver | None = None
    places: Places | None = None
    observers: Mapping[ObserverKind, Callable[[Call, JsonObject], Awaitable[OvertimeDecision]]] = field(
        default_factory=dict
    )
    """Persons and models, who decide whether a call may take longer."""


NO_RULES = CallRules()


def tool_of(catalogue: Catalogue) -> Tool:
    """Return the program that answers for an App. The log of a server is Shotclock's."""
    name = OURSELVES.name if catalogue.is_served else catalogue.name
    return Tool(catalogue.semantic_version, catalogue.debug, catalogue.is_served, name, catalogue.secret_variables)


@value
class Effects:
    mutates: bool = True
    idempotent: bool = False


UNDECLARED = Effects()
NO_ARGUMENTS: Mapping[str, object] = {}


@record
class CallTime:
    """The clocks of a call: their limits, and the instants they are counted from."""

    clocks: Clocks
    bound: Bound
    started_ns: int
    began_ns: int = 0
    """When the caller began to wait, if before the clocks started: during an approval or an import."""
    parent: Deadline | None = None
    parent_owner: str = "caller"
    min_time_ms: int = 0
    """With less than this left it is not started."""

    def start(self, at_ns: int, name: str) -> None:
        self.started_ns = at_ns
        self.bound = _nest(name, self.clocks, at_ns, self.parent, self.parent_owner)


def _nest(name: str, clocks: Clocks, started_ns: int, parent: Deadline | None, parent_owner: str) -> Bound:
    return nest(
        started_ns,
        timeout_ms=clocks.timeout_ms or 0,
        grace_ms=clocks.grace_ms or 0,
        owner=name,
        parent=parent,
        parent_owner=parent_owner,
        reserve_ms=clocks.reserve_ms,
    )


@record
class Cancellation:
    """A possible cancellation of a call: its reason, and the end of the cancelled work."""

    reason: Problem | None = None
    """None: the caller wants no answer. Otherwise the call returns one that says so."""
    ending: Ending = Ending.NOT_STARTED
    """Of work that leaves no outcome."""
    outcome: Outcome | None = None
    """Left by the work before it passes the cancellation on."""
    envelope: Envelope | None = None
    """The answer of the cancelled call."""

    def settle(self) -> Outcome:
        outcome = self.outcome or Outcome(self.ending)
        outcome.problem = self.reason or outcome.problem or Problem("CANCELLED", "cancelled by the caller")
        return outcome


@record
class Call:
    """One call of an operation. Its clocks are running."""

    name: str
    request_id: str
    caller: TraceContext
    """The span that this call is below."""
    time: CallTime
    rules: CallRules = NO_RULES
    effects: Effects = UNDECLARED
    """Of a call without an operation."""
    warnings: tuple[Warning_, ...] = ()
    operation: Operation | None = None
    arguments: Mapping[str, object] = NO_ARGUMENTS
    """After an approval the approved ones. Released when the call is answered."""
    request: CallRequest | None = None
    inside_of: Call | None = None
    proposal_id: str | None = None
    """Of its approval."""
    overtime: Overtime | None = None
    control: CallControl | None = None
    work: Work | None = None
    winding_down: WindDown | None = None
    cancellation: Cancellation = field(default_factory=Cancellation)
    keep_answer: Callable[[Envelope], None] | None = None
    """Stores the answer before it is returned. May block, and raise Failure."""

    @property
    def clocks(self) -> Clocks:
        return self.time.clocks

    @property
    def bound(self) -> Bound:
        return self.time.bound

    @property
    def tool(self) -> Tool:
        return self.rules.tool

    @property
    def started_ns(self) -> int:
        return self.time.started_ns

    def restart_clocks(self) -> None:
        """Restart the clocks after an approval. The caller's waiting time stays counted."""
        self.time.start(clock.monotonic_ns(), self.name)
        others = tuple(each for each in self.warnings if each["code"] != "DEADLINE_INHERITED")
        self.warnings = others + _inherited_warnings(self)

    def count_from(self, started_ns: int) -> None:
        """Count the clocks from the start of a process that died, whose work this call continues."""
        self.time.began_ns = started_ns
        self.time.start(started_ns, self.name)

    def narrowed(self, limit_ms: int, owner: str) -> Bound:
        """Return the bound of a part of this call: `limit_ms` from now, within the call's own."""
        latest = Deadline.after_ms(clock.monotonic_ns(), limit_ms)
        if self.bound.bell is not None and self.bound.bell.at_ns <= latest.at_ns:
            return self.bound
        return Bound(latest, self.bound.grace_ms, limit_ms, owner)

    @property
    def mutates(self) -> bool:
        return self.effects.mutates if self.operation is None else self.operation.mutates

    @property
    def idempotent(self) -> bool:
        return self.effects.idempotent if self.operation is None else self.operation.idempotent

    @property
    def trace_id(self) -> str:
        return self.caller.trace_id

    @property
    def trace(self) -> TraceContext:
        """Return this call as the parent of other spans."""
        return self.caller.below(span_id_of(self.request_id))

    @property
    def client(self) -> Caller | None:
        """Return the client of a server that made this call, or the one that this call is inside of."""
        outer = self
        while outer.inside_of is not None:
            outer = outer.inside_of
        return None if outer.request is None else outer.request.caller

    @property
    def no_time_left(self) -> bool:
        time = self.time
        if time.bound.bell is None:
            return False
        left_ns = time.bound.bell.at_ns - time.started_ns
        return left_ns <= 0 or left_ns < time.min_time_ms * NS_PER_MS

    def fired(self, kind: ClockKind, elapsed_ns: int) -> Fired:
        elapsed_ms = elapsed_ns // NS_PER_MS
        if kind is ClockKind.TIMEOUT:
            return Fired(kind, self.bound.owner, self.bound.limit_ms, elapsed_ms, self.bound.source)
        return Fired(kind, self.name, getattr(self.clocks, f"{kind}_ms", None) or 0, elapsed_ms)


@value
class WorkView:
    stdout: str = ""
    stderr: str = ""
    written: int = 0
    has_begun: bool = True


class Work:
    """The work of a call."""

    __slots__ = ()

    has_grace: bool = False  # whether the work itself is stopped with a grace, and not only what it has begun
    needs_end: bool = False  # whether work inside it has to be gone, not only stopped, when its wind-down ends

    @property
    def is_queued(self) -> bool:
        return False

    def kept_ms(self, left_ms: int) -> int:
        """Return the part of a wind-down that the work keeps for itself, after the calls inside it."""
        return reserve_ms_for(left_ms)

    def wind_down(self, until_ns: int) -> None:
        """Ask the work to end by itself until then."""

    def stop_unwound(self) -> None:
        """Stop work that did not end by itself: polite signal, grace, kill."""

    def kill(self) -> None:
        """Kill it at once: another process is about to do the same work."""

    def move_bell(self) -> bool:
        """Take the call's new deadline. Return False if it cannot."""
        return False

    def hold_idle(self, is_held: bool) -> None:
        """Stop or restart the idle limit."""

    async def look(self) -> WorkView:
        return WorkView()


@value
class WindDown:
    """A graceful stop, and until when the work may end by itself."""

    by: str
    """`soft clock`, `observer`, or a person's name."""
    reason: str
    at_ns: int
    until_ns: int
    fired: Fired | None = None
    """The soft limit that caused it, of this call or of one that contains it."""
    has_to_be_gone: bool = False
    """Whether the work has to be gone by then, with its grace: the work around it needs the time after that."""


@record
class Outcome:
    """The end of a call's work."""

    ending: Ending
    problem: Problem | Callable[[], Problem] | None = None
    data: dict[str, object] | list[object] | None = None
    value: object = None
    warnings: tuple[Warning_, ...] = ()
    survivors: Sequence[dict[str, object]] = ()
    traceback: str = ""
    """For stderr, and in the envelope only with `debug`."""
    side_effects: SideEffects | None = None
    """The side effects, if more is known than follows from the ending: of a run, from its steps."""
    budget_ms: int | None = None
    """How long the caller waited for work that continues without it."""


@value
class Inherited:
    deadline: Deadline | None = None
    warnings: tuple[str, ...] = ()


def inherited_deadline(environment: Mapping[str, str], now_ns: int) -> Inherited:
    """Read the caller's deadline: exact if it was read on this boot's clock, else what remained at the start."""
    unreadable: list[str] = []
    values: dict[str, int] = {}
    for name in (REMAINING_VARIABLE, DEADLINE_VARIABLE):
        text = environment.get(name, "").strip()
        if not text:
            continue
        if text.isascii() and text.isdecimal() and len(text) < 20:
            values[name] = int(text)
        else:
            unreadable.append(f"{name}={text[:40]!r} is not a whole number")
    remaining, at = values.get(REMAINING_VARIABLE), values.get(DEADLINE_VARIABLE)
    if remaining is None:
        # An instant without a remaining time could be from another machine's clock; nothing tells them apart.
        return Inherited(None, tuple(unreadable))
    relative = Deadline.after_ms(now_ns, remaining)
    # Time only passes: an instant later than "now + what remained" was read on some other boot's clock.
    absolute = Deadline(at) if at is not None and at <= relative.at_ns + NS_PER_MS else relative
    return Inherited(absolute, tuple(unreadable))


_process_token = ""
_process_trace = TraceContext("")
_calls = 0


def _forget_process() -> None:
    global _process_token
    _process_token = ""


os.register_at_fork(after_in_child=_forget_process)


def new_request_id() -> str:
    """Return a unique id; its first part is that of the process."""
    global _process_token, _process_trace, _calls
    if not _process_token:
        _process_token, _calls = os.urandom(6).hex(), 0
        _process_trace = new_trace()
    _calls += 1
    return f"{_process_token}-{_calls:x}"


def new_span_id() -> str:
    """Return an id for a span that is no call, but has calls below it."""
    return span_id_of(new_request_id())


def new_trace() -> TraceContext:
    """Return a trace that begins here. It is sampled: a process below may record."""
    return TraceContext(os.urandom(16).hex())


def inherited_trace() -> TraceContext:
    """Return the trace of the parent process, or one that begins here."""
    inherited = trace_from_variables(os.environ)
    if inherited is not None:
        return inherited
    new_request_id()  # makes one
    return _process_trace


def admit(
    name: str,
    clocks: Clocks,
    *,
    defaults: Clocks = DEFAULT_CLOCKS,
    parent: Deadline | None = None,
    parent_owner: str = "caller",
    caller: TraceContext | None = None,
    effects: Effects = UNDECLARED,
    tool: Tool = OURSELVES,
    rules: CallRules | None = None,
) -> Call:
    if clocks is not defaults:
        clocks = clocks.over(defaults)
    now = clock.monotonic_ns()
    bound = _nest(name, clocks, now, parent, parent_owner)
    time = CallTime(clocks, bound, now, now, parent, parent_owner)
    call = Call(name, new_request_id(), caller or inherited_trace(), time, rules or CallRules(tool), effects)
    call.warnings = _inherited_warnings(call)
    return call


def _inherited_warnings(call: Call) -> tuple[Warning_, ...]:
    """Warn if the parent's deadline is earlier than the requested one."""
    timeout_ms = call.clocks.timeout_ms or 0
    if call.time.parent is None or not timeout_ms or call.bound.owner == call.name:
        return ()
    left = format_duration(call.bound.limit_ms)
    message = f"{format_duration(timeout_ms)} was asked for; the {call.time.parent_owner} left {left}"
    return (warning("DEADLINE_INHERITED", message),)


def no_time_left(call: Call) -> Outcome:
    bell, owner = call.bound.bell, call.bound.owner
    why = f"the {owner}'s deadline has passed"
    fired: Fired | None = call.fired(ClockKind.TIMEOUT, 0)
    if bell is not None and not bell.has_passed(call.started_ns):  # no clock has rung: it asks for more than there is
        left = format_duration(bell.remaining_ms(call.started_ns))
        whose = "its own timeout" if owner == call.name else f"the {owner}"
        why, fired = f"it needs at least {format_duration(call.time.min_time_ms)}, and {whose} leaves {left}", None
    problem = Problem("NO_TIME_LEFT", f"{call.name} was not started: {why}", phase="validation", fired=fired)
    return Outcome(Ending.NOT_STARTED, problem)


def invalid(problems: list[dict[str, str]]) -> Outcome:
    message = join_problems(problems)
    return Outcome(Ending.NOT_STARTED, Problem("ARG_ERROR", message, "validation", errors=problems))


def wound_down_problem(call: Call) -> Problem:
    asked = call.winding_down
    assert asked is not None
    message = f"{asked.reason}; {call.name} wound down without finishing"
    if asked.fired is None:
        return Problem("CANCELLED", message, context={"reason": asked.reason, "by": asked.by})
    elapsed_ms = (clock.monotonic_ns() - call.started_ns) // NS_PER_MS
    return Problem("TIMEOUT", message, fired=replace(asked.fired, elapsed_ms=elapsed_ms))


def answer(call: Call, outcome: Outcome | Envelope) -> Envelope:
    """Make the one envelope of a call, and record its span."""
    envelope = make_envelope(call, outcome)
    record_span(call, outcome)
    return envelope


def make_envelope(call: Call, outcome: Outcome | Envelope) -> Envelope:
    """Make the envelope of a call. An envelope of another call that did the same work is passed on."""
    call.arguments, call.work = NO_ARGUMENTS, None  # the envelope need not keep them
    if isinstance(outcome, Envelope):
        return outcome
    _correct_ending(outcome)
    if (redaction := call.tool.redaction()) is not None:
        outcome.traceback = redaction.text(outcome.traceback or "")
    if isinstance(outcome.problem, Problem):
        outcome.problem.registered  # noqa: B018 - an unregistered code is found here, not by the reader
    if outcome.traceback:
        with contextlib.suppress(Exception):  # stderr is closed or full
            where = f"{call.tool.name}: {call.name} raised (request {call.request_id})"
            sys.stderr.write(f"{where}:\n{outcome.traceback}")
    warnings = call.warnings + outcome.warnings
    if call.winding_down is not None and outcome.problem is None:
        warnings += (_wind_down_warning(call, call.winding_down),)
    envelope = _render(call, outcome, clock.monotonic_ns(), clock.wall_ns())
    envelope.value, envelope.warnings = outcome.value, list(warnings)
    if redaction is not None:
        envelope.data, envelope.error, envelope.warnings = redaction.value(
            [envelope.data, envelope.error, envelope.warnings]
        )
    return envelope


def record_span(call: Call, outcome: Outcome | Envelope) -> None:
    if spans.recorder is None:
        return
    if isinstance(outcome, Envelope):
        outcome = Outcome(Ending(outcome.ending), None if outcome.ok else Problem(str(outcome.code), ""))
    spans.recorder.call_ended(call, outcome, clock.monotonic_ns(), clock.wall_ns())


def answer_at(call: Call, outcome: Outcome, now_ns: int) -> Envelope:
    """Make the envelope on the clock of a Temporal workflow. It reads and writes nothing: a replay makes the same."""
    _correct_ending(outcome)
    envelope = _render(call, outcome, now_ns, now_ns)
    envelope.warnings.extend(call.warnings + outcome.warnings)
    return envelope


def _correct_ending(outcome: Outcome) -> None:
    """Report killed work with survivors as abandoned: killed means seen dead."""
    if outcome.ending is Ending.KILLED and outcome.survivors:
        outcome.ending = Ending.ABANDONED
        if not any(note["code"] == "SURVIVORS" for note in outcome.warnings):
            outcome.warnings += (warning("SURVIVORS", processes=list(outcome.survivors[:50])),)


def _wind_down_warning(call: Call, asked: WindDown) -> Warning_:
    if asked.fired is not None and asked.fired.owner == call.name:
        return warning("SOFT_LIMIT", limit_ms=asked.fired.limit_ms)
    who = f"the {asked.by}" if asked.fired is not None else asked.by
    return warning("WOUND_DOWN", f"asked to wind down by {who}: {asked.reason}")


def _render(call: Call, outcome: Outcome, now_ns: int, wall_ns: int) -> Envelope:
    bound = call.bound
    meta: dict[str, object] = {
        "duration_ms": (now_ns - (call.time.began_ns or call.started_ns)) // NS_PER_MS,
        "timeout_ms": bound.limit_ms,
        "request_id": call.request_id,
        "trace_id": call.trace_id,
        "command": call.name,
        "timestamp": clock.timestamp(wall_ns),
        "survivors": list(outcome.survivors),
    }
    if call.tool.version is not None:
        meta["tool_version"] = call.tool.version
    if call.request is not None and call.request.confirmed and outcome.ending is not Ending.NOT_STARTED:
        meta["confirmed"] = True
    if outcome.budget_ms is not None:
        meta["budget_ms"] = outcome.budget_ms
    if call.overtime is not None:
        meta["overtime"] = call.overtime.as_meta()
    was_stopped = outcome.problem is not None and outcome.ending in (Ending.KILLED, Ending.CANCELLED, Ending.ABANDONED)
    if outcome.data is not None and (call.winding_down is not None or was_stopped):
        meta["partial"] = True
    if bound.bell is not None:
        meta["remaining_ms"] = bound.bell.remaining_ms(now_ns)
    problem = outcome.problem() if callable(outcome.problem) else outcome.problem
    if problem is not None and problem.outside is not None and call.tool.is_served and not call.tool.debug:
        where = f"on the server's stderr, or in the job's log, for request {call.request_id}"
        details = f"; the details are {where}" if problem.code == "INTERNAL_ERROR" else ""
        problem = replace(problem, message=f"{problem.outside}{details}")
    if outcome.traceback and problem is not None and call.tool.debug:
        problem = replace(problem, context={**(problem.context or {}), "traceback": outcome.traceback})
    return build_envelope(
        data=outcome.data,
        problem=problem,
        ending=outcome.ending,
        mutates=call.mutates,
        idempotent=call.idempotent,
        meta=meta,
        effects=outcome.side_effects,
    )


@record
class CallRequest:
    """A request to call a command, with the options of this call."""

    name: str
    arguments: Mapping[str, object]
    clocks: Clocks | None = None
    principal: Principal | None = None
    """None: the user of this process."""
    idempotency_key: str | None = None
    parent: Deadline | None = None
    began_ns: int = 0
    """When the caller began to wait, if before the call was made."""
    budget_ms: int | None = None
    """How long the caller waits for a job or a person. None: as long as the work takes."""
    confirmed: bool = False
    """Without this or `confirm_destructive` a destructive command is only previewed."""
    dry_run: bool = False
    validate_only: bool = False
    resume_from: str | None = None
    caller: Caller | None = None
    """The client of a server, for the function."""
    on_progress: Progress | None = None
    on_question: Answerer | None = None
    """Answers the questions of the handler's context that only this surface can."""
    asks: Mapping[str, object] | None = None
    """The capabilities of an MCP client that a job may ask; None: it cannot ask."""
    on_log: OnLog | None = None
    """Called with the level, the text and the logger of each message; by default Python's logging is."""
    on_item: Callable[[object], None] | None = None
    """Called with each item of a command that yields."""
    stop: asyncio.Future[str] | None = None
    """Once it holds the name of a signal the work is stopped, with its partial outcome as the answer."""
    stdin: Stdin | None = None
    justification: str = ""
    repeat_hint: str | None = None
    run_wait: RunWait | None = None
    """How a step of a run waits for a person."""
    refusal: Outcome | None = None
    """The refusal of the surface itself; nothing runs."""

    @property
    def owner(self) -> str | None:
        """None: the user of the store."""
        return None if self.principal is None else self.principal.owner


@value
class Stdin:
    """Input from stdin, spooled to a file that the caller removes."""

    path: str
    digest: str


@value
class StepSurroundings:
    """Parts of a step of a run that decide its calls, beside their arguments."""

    describe: Callable[[Any], Awaitable[Mapping[str, Any]]]
    """Returns them as a person is shown them."""
    redact: Callable[[str], str]
    """Removes the secrets that the run knows from a text."""


@value
class RunWait:
    """Wait of a step of a run for a person: as long as the run has time, unless the run is parked meanwhile."""

    key: str | None
    """Finds the proposal again, also from a process that resumes the run."""
    run_began_at: WallTime | None
    """An older proposal under the key belongs to another run."""
    waits: Callable[[str, Proposal], AbstractContextManager[Any]]
    """Entered while a person is waited for."""
    bounded: Callable[[], Call]
    """Returns the call that bounds the wait."""
    step: StepSurroundings | None = None
