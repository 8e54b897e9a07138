"""A call and its two ends: `admit` starts its clocks before anything runs, `answer` makes the one envelope of it.

The blocking command line and the asyncio runtime differ only in how they wait in between.

docs/design.md: R1.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence

from .._version import __version__
from ..core.clocks import DEFAULT_GRACE_MS, DEFAULT_TIMEOUT_MS, ClockKind, Clocks, Fired
from ..core.deadlines import NS_PER_MS, Bound, Deadline, nest
from ..core.durations import format_duration
from ..core.effects import Ending, SideEffects
from ..core.envelope import Envelope, Problem, Warning_, build_envelope, join_problems, warning
from ..core.records import record, replace_fields, value
from ..core.trace import TraceContext, span_id_of, trace_from_variables
from ..process import clock, spans
from ..process.environment import DEADLINE_VARIABLE, REMAINING_VARIABLE

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ..core.operation import Operation
    from .request import CallRequest

_DEFAULTS = Clocks(timeout_ms=DEFAULT_TIMEOUT_MS, grace_ms=DEFAULT_GRACE_MS)


@value
class Tool:
    """Who answers: the version that its envelopes carry, and whether they may carry tracebacks."""

    version: str | None = __version__
    """None where the app's version cannot be written as the contract wants it: ours would not be the truth."""
    debug: bool = False


OURSELVES = Tool()


@record
class Call:
    """One call of an operation, from its admission to its answer. Its clocks are fixed and running."""

    name: str
    clocks: Clocks
    bound: Bound
    started_ns: int
    request_id: str
    caller: TraceContext
    """The span that this call is below."""
    mutates: bool = True
    idempotent: bool = False
    warnings: tuple[Warning_, ...] = ()
    tool: Tool = OURSELVES
    began_ns: int = 0
    """When the caller began to wait, where that is earlier than the start of the clocks: a person was asked first, or
    the program was imported."""
    parent: Deadline | None = None
    """The deadline that this call's own is inside of, with its owner's name."""
    parent_owner: str = "caller"
    operation: Operation | None = None
    arguments: Mapping[str, object] | None = None
    """What it runs with: after an approval what was approved. Let go of when the call is answered."""
    request: CallRequest | None = None
    """What a surface asked for, if one did: who asks, the key, and how it waits and listens."""
    confirmed: bool = False
    """Whoever called said that it may destroy something."""
    has_begun: bool = False
    """Something of its work may have run."""
    proposal_id: str | None = None
    """The approval that it has used up, and that is owed its outcome."""
    stopped_for: Problem | None = None
    """Why it is cancelled, where that is not its caller's wish. Whoever says so gets its answer."""
    keep_answer: Callable[[Envelope], None] | None = None
    """Writes the answer down before anybody gets it. May block, and raise Failure."""

    def restart_clocks(self) -> None:
        """Start the clocks anew, which stood still while a person was asked. What the caller waited stays counted."""
        self.started_ns = clock.monotonic_ns()
        self.bound = nest(
            self.started_ns,
            timeout_ms=self.clocks.timeout_ms or 0,
            grace_ms=self.clocks.grace_ms or 0,
            owner=self.name,
            parent=self.parent,
            parent_owner=self.parent_owner,
            reserve_ms=self.clocks.reserve_ms,
        )
        others = tuple(said for said in self.warnings if said["code"] != "DEADLINE_INHERITED")
        self.warnings = others + _inherited_warnings(self)

    def narrowed(self, limit_ms: int, owner: str) -> Bound:
        """Return the bound of a part of this call that may take `limit_ms` from now on, and no longer than the call."""
        latest = Deadline.after_ms(clock.monotonic_ns(), limit_ms)
        if self.bound.bell is not None and self.bound.bell.at_ns <= latest.at_ns:
            return self.bound
        return Bound(latest, self.bound.grace_ms, limit_ms, owner)

    @property
    def trace_id(self) -> str:
        return self.caller.trace_id

    @property
    def trace(self) -> TraceContext:
        """Return this call as the parent of what it starts. Derived when asked for: most calls are never asked."""
        return self.caller.below(span_id_of(self.request_id))

    @property
    def no_time_left(self) -> bool:
        return self.bound.bell is not None and self.bound.bell.has_passed(self.started_ns)

    def fired(self, kind: ClockKind, elapsed_ns: int) -> Fired:
        """Record which clock fired, with its owner and limit."""
        elapsed_ms = elapsed_ns // NS_PER_MS
        match kind:
            case ClockKind.TIMEOUT:
                return Fired(kind, self.bound.owner, self.bound.limit_ms, elapsed_ms, self.bound.source)
            case ClockKind.SOFT:
                return Fired(kind, self.name, self.clocks.soft_ms or 0, elapsed_ms)
            case ClockKind.IDLE:
                return Fired(kind, self.name, self.clocks.idle_ms or 0, elapsed_ms)
            case _:
                return Fired(kind, self.name, self.clocks.queue_ms or 0, elapsed_ms)


@record
class Outcome:
    """What happened to the work."""

    ending: Ending
    problem: Problem | Callable[[], Problem] | None = None
    """Why it did not succeed, or how to say so once somebody asks."""
    data: dict[str, object] | list[object] | None = None
    value: object = None
    warnings: tuple[Warning_, ...] = ()
    survivors: Sequence[dict[str, object]] = ()
    traceback: str = ""
    """Of what the handler raised: for stderr, and for the envelope only where the tool says so."""
    admission: Call | None = None
    """The call that it is the outcome of, once it is answered."""
    answered_ns: int = 0
    wall_ns: int = 0
    side_effects: SideEffects | None = None
    """Where more is known than what follows from how it ended: of a run, what its steps say."""
    budget_ms: int | None = None
    """How long the caller waited for what goes on without it."""


@value
class Inherited:
    """Time that came with the environment from whoever started this process."""

    deadline: Deadline | None = None
    warnings: tuple[str, ...] = ()


def inherited_deadline(environment: Mapping[str, str], now_ns: int) -> Inherited:
    """Read the caller's deadline: exact where it was read on this boot's clock, else what remained at the start."""
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
    """Forget whose calls are counted: a forked process is another one."""
    global _process_token
    _process_token = ""


os.register_at_fork(after_in_child=_forget_process)


def new_request_id() -> str:
    """Return an id that is unique per call; the first part is the process's, so that calls of one process sort
    together."""
    global _process_token, _process_trace, _calls
    if not _process_token:
        _process_token, _calls = os.urandom(6).hex(), 0
        _process_trace = new_trace()
    _calls += 1
    return f"{_process_token}-{_calls:x}"


def new_span_id() -> str:
    """Return an id for what is no call, but has calls below it."""
    return span_id_of(new_request_id())


def new_trace() -> TraceContext:
    """Return a trace that begins here. Sampled: nobody above has said otherwise, and somebody below may record."""
    return TraceContext(os.urandom(16).hex())


def inherited_trace() -> TraceContext:
    """Return where whoever started this process stands in its trace; else a trace that begins with this process."""
    inherited = trace_from_variables(os.environ)
    if inherited is not None:
        return inherited
    new_request_id()  # sees to it that there is one
    return _process_trace


def admit(
    name: str,
    clocks: Clocks,
    *,
    defaults: Clocks = _DEFAULTS,
    parent: Deadline | None = None,
    parent_owner: str = "caller",
    caller: TraceContext | None = None,
    mutates: bool = True,
    idempotent: bool = False,
    notes: tuple[Warning_, ...] = (),
    tool: Tool = OURSELVES,
    began_ns: int = 0,
    operation: Operation | None = None,
    arguments: Mapping[str, object] | None = None,
) -> Call:
    """Fix the clocks of a call, which run from now on. `began_ns` is when its caller began to wait."""
    if clocks is not defaults:
        clocks = clocks.over(defaults)
    now = clock.monotonic_ns()
    call = Call(
        name,
        clocks,
        nest(
            now,
            timeout_ms=clocks.timeout_ms or 0,
            grace_ms=clocks.grace_ms or 0,
            owner=name,
            parent=parent,
            parent_owner=parent_owner,
            reserve_ms=clocks.reserve_ms,
        ),
        now,
        new_request_id(),
        caller or inherited_trace(),
        mutates,
        idempotent,
        notes,
        tool,
        began_ns or now,
        parent,
        parent_owner,
        operation,
        arguments,
    )
    if parent is not None:
        call.warnings += _inherited_warnings(call)
    return call


def _inherited_warnings(call: Call) -> tuple[Warning_, ...]:
    """Return the warning that the parent's deadline is earlier than what was asked for, if it is."""
    timeout_ms = call.clocks.timeout_ms or 0
    if call.parent is None or not timeout_ms or call.bound.owner == call.name:
        return ()
    left = format_duration(call.bound.limit_ms)
    message = f"{format_duration(timeout_ms)} was asked for; the {call.parent_owner} left {left}"
    return (warning("DEADLINE_INHERITED", message),)


def no_time_left(admission: Call) -> Outcome:
    return Outcome(
        Ending.NOT_STARTED,
        Problem(
            "NO_TIME_LEFT",
            f"{admission.name} was not started: the {admission.bound.owner}'s deadline has passed",
            phase="validation",
            fired=admission.fired(ClockKind.TIMEOUT, 0),
        ),
    )


def invalid(problems: list[dict[str, str]]) -> Outcome:
    """Refuse what cannot be understood or allowed: every problem at once, and nothing began."""
    message = join_problems(problems)
    return Outcome(Ending.NOT_STARTED, Problem("ARG_ERROR", message, "validation", errors=problems))


def answer(admission: Call, outcome: Outcome | Envelope) -> Envelope:
    """Make the one envelope of a call. What happened is fixed here and now; its text is made when it is read.

    An envelope is what another call answered that did the same work, and is passed on as it is."""
    now_ns, wall_ns = clock.monotonic_ns(), clock.wall_ns()
    admission.arguments = None  # whoever keeps the envelope need not keep them
    if isinstance(outcome, Envelope):
        if spans.recorder is not None:
            problem = None if outcome.ok else Problem(str(outcome.code), "")
            spans.recorder.call_ended(admission, Outcome(Ending(outcome.ending), problem), now_ns, wall_ns)
        return outcome
    if isinstance(outcome.problem, Problem):
        outcome.problem.registered  # noqa: B018 - an unregistered code is found here, not by whoever reads it
    if outcome.traceback:
        _write_traceback(admission.name, outcome.traceback)
    if spans.recorder is not None:
        spans.recorder.call_ended(admission, outcome, now_ns, wall_ns)
    warnings = admission.warnings + outcome.warnings
    outcome.admission, outcome.answered_ns, outcome.wall_ns = admission, now_ns, wall_ns
    return Envelope.rendered_later(outcome.data, warnings, outcome.value, outcome.problem is None, _render, outcome)


def _write_traceback(name: str, lines: str) -> None:
    try:
        sys.stderr.write(f"shotclock: {name} raised:\n{lines}")
    except Exception:  # closed, or full: nobody reads it
        pass


def _render(outcome: Outcome) -> Envelope:
    admission, now_ns = outcome.admission, outcome.answered_ns
    assert admission is not None  # it was answered for
    bound = admission.bound
    meta: dict[str, object] = {
        "duration_ms": (now_ns - (admission.began_ns or admission.started_ns)) // NS_PER_MS,
        "timeout_ms": bound.limit_ms,
        "request_id": admission.request_id,
        "trace_id": admission.trace_id,
        "command": admission.name,
        "timestamp": clock.timestamp(outcome.wall_ns),
        "survivors": list(outcome.survivors),
    }
    if admission.tool.version is not None:
        meta["tool_version"] = admission.tool.version
    if admission.confirmed and outcome.ending is not Ending.NOT_STARTED:
        meta["confirmed"] = True
    if outcome.budget_ms is not None:
        meta["budget_ms"] = outcome.budget_ms
    if bound.bell is not None:
        meta["remaining_ms"] = bound.bell.remaining_ms(now_ns)
    problem = outcome.problem() if callable(outcome.problem) else outcome.problem
    if outcome.traceback and problem is not None and admission.tool.debug:
        problem = replace_fields(problem, context={**(problem.context or {}), "traceback": outcome.traceback})
    return build_envelope(
        data=outcome.data,
        problem=problem,
        ending=outcome.ending,
        mutates=admission.mutates,
        idempotent=admission.idempotent,
        meta=meta,
        effects=outcome.side_effects,
    )
