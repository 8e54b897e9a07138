"""Outcomes of functions, made from results, exceptions and the ends of processes."""

from __future__ import annotations

import contextlib
from typing import Any, cast

from ..core.arguments import NotSerializable, to_valid_json
from ..core.envelope import Envelope, Problem, Warning_, as_data, describe_exception, warning
from ..core.errors import Ending, Failure, SideEffects, code_of, error_entry
from ..core.limits import ClockKind, Clocks, format_duration
from ..core.value_types import replace, value
from ..supervise.clock import monotonic_ns
from ..supervise.command_task import CommandReport
from ..worker import messages
from .call import Call, Outcome, admit, answer, invalid, wound_down_problem
from .commands import signal_name

CLOSING = "closing"
NOTHING_RAN = error_entry("ARG_ERROR").exit_code


def worker_outcome(kind: str, payload: Any) -> Outcome:
    match kind:
        case "returned":
            pickled, data, changes = payload
            try:
                value = messages.unpickle(pickled)
            except Exception as error:
                if data is None:
                    message = f"the result cannot be rebuilt here: {type(error).__name__}: {error}"
                    return Outcome(Ending.FINISHED, Problem("RESULT_NOT_SERIALIZABLE", message))
                value = data
            return returned_outcome(value, value if data is None else data, changes)
        case "invalid":
            return invalid(payload)
        case "unimportable":
            return Outcome(Ending.NOT_STARTED, Problem("HANDLER_NOT_IMPORTABLE", payload, "validation"))
        case "unstartable":
            return Outcome(Ending.NOT_STARTED, Problem("SPAWN_FAILED", payload))
        case "cancelled":
            return Outcome(Ending.CANCELLED, Problem("CANCELLED", "the function was cancelled where it ran"))
        case "unserializable":
            return Outcome(Ending.FINISHED, Problem("RESULT_NOT_SERIALIZABLE", payload))
        case "failed":
            try:
                return handler_failure(messages.unpickle(payload))
            except Exception as error:
                return raised_outcome(type(error).__name__, str(error), "")
        case _:
            name, text, lines, code, outside, pickled = payload
            outcome = raised_outcome(name, text, lines, code, outside)
            with contextlib.suppress(Exception):
                outcome.value = messages.unpickle(pickled) if pickled else None
            return outcome


def returned_outcome(value: object, plain: Any, changes: list[str]) -> Outcome:
    warnings = (warning("RESULT_CHANGED", changes=changes),) if changes else ()
    return Outcome(Ending.FINISHED, value=value, data=as_data(plain), warnings=warnings)


def answer_unopenable(name: str, error: Exception) -> Envelope:
    """Answer an inner call whose arguments are of classes that are not imported here."""
    message = f"pass plain data, not objects: {error}"
    problem = Problem("ARG_ERROR", message, "validation", errors=[{"field": "arguments", "message": message}])
    return answer(admit(name, Clocks()), Outcome(Ending.NOT_STARTED, problem))


def failure_outcome(failure: Failure) -> Outcome:
    """Turn a failure outside a handler into an outcome. If its exit code promises that nothing ran, the `errors` of its
    context become those of the answer."""
    outcome = _describe_failure(failure)
    if failure.entry.exit_code == NOTHING_RAN:
        assert isinstance(outcome.problem, Problem)
        context = dict(outcome.problem.context or {})
        errors = context.pop("errors", None)
        outcome.ending = Ending.NOT_STARTED
        outcome.problem = replace(outcome.problem, phase="validation", errors=errors, context=context or None)
    return outcome


def _describe_failure(failure: Failure) -> Outcome:
    problem = Problem(
        failure.code,
        str(failure),
        context=_as_plain(failure.context) or None,
        suggestion=failure.suggestion,
        retry_after_ms=failure.retry_after_ms,
        exit_code=failure.exit_code,
        side_effects=failure.side_effects,
        entry=failure.entry,
    )
    return Outcome(Ending.FINISHED, problem, as_data(_as_plain(failure.data)), value=failure)


def handler_failure(failure: Failure) -> Outcome:
    """Turn the failure of a handler into an outcome. It has begun, so exit code 2 (nothing ran) is replaced."""
    outcome = _describe_failure(failure)
    if failure.entry.exit_code == NOTHING_RAN:
        assert isinstance(outcome.problem, Problem)
        context = {**(outcome.problem.context or {}), "raised": failure.code}
        suggestion = failure.suggestion or failure.entry.hint or None
        outcome.problem = replace(
            outcome.problem, code="ARGUMENT_REFUSED", entry=None, context=context, suggestion=suggestion
        )
    return outcome


def _as_plain(data: Any) -> Any:
    """Make plain data of anything: an envelope that cannot be written would be no answer."""
    try:
        return to_valid_json(data)[0]
    except NotSerializable:
        return {name: repr(value) for name, value in data.items()} if isinstance(data, dict) else repr(data)


def raised_outcome(name: str, text: str, lines: str, code: str = "INTERNAL_ERROR", outside: str = "") -> Outcome:
    outside = f"{name}: {outside}" if outside else name
    problem = Problem(code, f"{name}: {text}" if text else name, context={"exception": name}, outside=outside)
    return Outcome(Ending.FINISHED, problem, traceback=lines)


def crash_outcome(call: Call, report: CommandReport) -> Outcome:
    """Return the outcome of a call whose worker ended without an answer."""
    survivors = report.survivors
    bell = call.bound.bell
    if report.lost and report.stopped == CLOSING:  # by our own order, and its zygote ended after that
        return Outcome(Ending.KILLED, Problem("CANCELLED", f"stopped: {CLOSING}"), survivors=survivors)
    if report.lost and (bell is None or monotonic_ns() < bell.at_ns):
        problem = Problem("SUPERVISOR_LOST", "the worker's supervisor was killed")
        return Outcome(Ending.KILLED, problem, survivors=survivors)
    if report.lost or report.fired == ClockKind.TIMEOUT or report.stopped == ClockKind.TIMEOUT:
        elapsed_ns = max(bell.at_ns if bell else 0, monotonic_ns()) - call.started_ns
        return Outcome(Ending.KILLED, timeout_problem(call, elapsed_ns), survivors=survivors)
    if report.unstartable is not None:
        return Outcome(Ending.NOT_STARTED, Problem("SPAWN_FAILED", "the machine would not start another process"))
    if report.stopped == ClockKind.SOFT and call.winding_down is not None:
        return Outcome(Ending.KILLED, wound_down_problem(call), survivors=survivors)
    if report.stopped is not None:
        return Outcome(Ending.KILLED, Problem("CANCELLED", f"stopped: {report.stopped}"), survivors=survivors)
    status = report.status
    context: dict[str, object] = {"exit_code": status}
    how = f"left with exit code {status}"
    if status is not None and status < 0:
        context = {"signal": signal_name(-status)}
        how = f"was ended by {signal_name(-status)}"
    if report.leaked:
        context["stopped"] = report.leaked
    message = f"the process running {call.name} {how}"
    return Outcome(Ending.FINISHED, Problem("WORKER_CRASHED", message, context=context), survivors=survivors)


@value
class Replacement:
    """Why the shared process was replaced, and what is lost with it."""

    culprit: str = ""  # the operation to blame, if known
    deed: str = ""  # without one, the process died by itself
    had_state: bool = False  # a lifespan was open in it

    def blame(self, call_name: str = "") -> str:
        culprit = "it" if self.culprit == call_name != "" else self.culprit or "a task, a thread or a callback"
        return f"{culprit} {self.deed}" if self.deed else "it died"

    @property
    def loss(self) -> str:
        lost = "what functions kept in its memory is lost"
        return f"{lost}, and the next call opens the lifespan anew" if self.had_state else lost


def replaced_warning(call: Call, replacement: Replacement, interrupted: int = 0) -> Warning_:
    context = {"interrupted": interrupted} if interrupted else {}
    message = f"the shared process was replaced ({replacement.blame(call.name)}); {replacement.loss}"
    return warning("HOST_REPLACED", message, **context)


def replaced_outcome(call: Call, replacement: Replacement) -> Outcome:
    why, culprit = replacement.blame(call.name), replacement.culprit
    message = f"{call.name} was interrupted, the shared process was replaced: {why}; {replacement.loss}"
    context: dict[str, object] | None = {"operation": culprit} if culprit else None
    return Outcome(Ending.KILLED, Problem("HOST_REPLACED", message, context=context))


def rebuilt_warning(why: str, ago_ns: int) -> Warning_:
    when = f"{format_duration(ago_ns // 1_000_000)} ago: " if ago_ns else ""
    message = f"the lifespan was opened anew for this call, and the state from before is lost ({when}{why})"
    return warning("STATE_REBUILT", message)


def unopened_outcome(described: Any, limit: Outcome) -> Outcome:
    """Return the outcome of a call whose lifespan could not be opened, or was not open at the limit."""
    if described is None:
        if isinstance(limit.problem, Problem):
            message = f"{limit.problem.message}, before the lifespan of the App was open"
            limit.problem = replace(limit.problem, message=message)
        return limit
    name, text, lines, _, outside, _ = described
    if name in ("NotOpened", "Failure"):  # our own words, and the author's for callers
        outside = text
    else:
        text = f"{name}: {text}" if text else name
        outside = f"{name}: {outside}" if outside else name
    before = "the lifespan of the App could not be opened: "
    problem = Problem("LIFESPAN_FAILED", before + text, context={"exception": name}, outside=before + outside)
    return Outcome(Ending.NOT_STARTED, problem, traceback=lines)


def closing_outcome(ending: Ending = Ending.NOT_STARTED) -> Outcome:
    if ending is Ending.NOT_STARTED:
        return Outcome(ending, Problem("SHUTTING_DOWN", "the runtime is closing"))
    return Outcome(ending, Problem("CANCELLED", f"stopped: {CLOSING}"))


def timeout_problem(call: Call, elapsed_ns: int) -> Problem:
    fired = call.fired(ClockKind.TIMEOUT, elapsed_ns)
    return Problem("TIMEOUT", f"{call.name} timed out after {format_duration(fired.limit_ms)}", fired=fired)


def limit_problem(call: Call, kind: ClockKind) -> Problem:
    if kind is ClockKind.IDLE:
        return stalled_problem(call)
    if kind is ClockKind.SOFT:
        return wound_down_problem(call)
    return timeout_problem(call, monotonic_ns() - call.started_ns)


def stalled_problem(call: Call) -> Problem:
    fired = call.fired(ClockKind.IDLE, monotonic_ns() - call.started_ns)
    return Problem("STALLED", f"{call.name}: no sign of life for {format_duration(fired.limit_ms)}", fired=fired)


def outcome_of_value(value: object) -> Outcome:
    try:
        return returned_outcome(value, *to_valid_json(value))
    except NotSerializable as error:
        return Outcome(Ending.FINISHED, Problem("RESULT_NOT_SERIALIZABLE", str(error)), value=value)


def outcome_of_error(error: BaseException, code: str = "INTERNAL_ERROR") -> Outcome:
    if isinstance(error, Failure):
        return failure_outcome(error)
    outcome = raised_outcome(*describe_exception(error), code, messages.describe_outside(error))
    outcome.value = error
    return outcome


def outcome_of_handler_error(error: BaseException) -> Outcome:
    """Turn a handler's exception into an outcome: a failure, one with a registered code, or a bug."""
    return handler_failure(error) if isinstance(error, Failure) else outcome_of_error(error, code_of(error))


def unkept_outcome(error: BaseException, envelope: Envelope) -> Outcome:
    """Return the outcome of a call whose answer could not be stored. Its work has ended as the answer says."""
    outcome = outcome_of_handler_error(error)
    outcome.ending = Ending(envelope.ending)
    outcome.side_effects = SideEffects(str(envelope.meta["side_effects"]))
    outcome.survivors = cast("list[dict[str, object]]", envelope.meta["survivors"])
    return outcome
