"""Running a handler where it is: arguments checked, context given, everything it can do turned into an outcome."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

from ..core.arguments import NotSerializable, signature_of, to_valid_json
from ..core.effects import Ending
from ..core.envelope import Problem, describe_exception
from ..core.errors import Failure, code_of
from ..core.operation import Operation
from ..process.context import Context
from .call import Outcome, invalid
from .outcomes import failure_outcome, handler_failure, raised_outcome, returned_outcome


def bind(
    operation: Operation, arguments: Mapping[str, object], context: Callable[[], Context]
) -> dict[str, object] | Outcome:
    """Return the handler's arguments, or the refusal that lists everything wrong with them."""
    signature = signature_of(operation.handler)
    bound, problems = signature.check(arguments)
    if problems:
        return invalid(problems)
    if signature.wants_context:
        bound["ctx"] = context()
    return bound


def outcome_of_value(value: object) -> Outcome:
    try:
        return returned_outcome(value, *to_valid_json(value))
    except NotSerializable as error:
        return Outcome(Ending.FINISHED, Problem("RESULT_NOT_SERIALIZABLE", str(error)), value=value)


def outcome_of_error(error: BaseException, code: str = "INTERNAL_ERROR") -> Outcome:
    """Say what went wrong where no handler runs: a failure, or a bug."""
    if isinstance(error, Failure):
        return failure_outcome(error)
    outcome = raised_outcome(*describe_exception(error), code)
    outcome.value = error
    return outcome


def outcome_of_handler_error(error: BaseException) -> Outcome:
    """Say what a handler let pass: a failure, an exception that the table of codes knows, or a bug."""
    return handler_failure(error) if isinstance(error, Failure) else outcome_of_error(error, code_of(error))


async def run_guards(guards: tuple[Any, ...], operation: Operation, arguments: Mapping[str, object]) -> Outcome | None:
    """Ask each guard in turn; the first that raises refuses the call. Nothing has run by then."""
    for guard in guards:
        try:
            verdict = guard(operation, arguments)
            if hasattr(verdict, "__await__"):
                await verdict
        except Failure as failure:
            outcome = failure_outcome(failure)
            return Outcome(Ending.NOT_STARTED, outcome.problem, outcome.data)
        except asyncio.CancelledError:
            raise
        except BaseException as error:
            name = getattr(guard, "__name__", type(guard).__name__)
            message = f"refused by {name}: {str(error) or type(error).__name__}"
            context: dict[str, object] = {"guard": name, "exception": type(error).__name__}
            return Outcome(Ending.NOT_STARTED, Problem("REFUSED", message, "validation", context=context))
    return None
