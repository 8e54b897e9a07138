"""Orders to a call in another process: `shotclock overtime`, `run --extend`, `run --wind-down`, `job extend` and
`job stop`."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any

from ..core.clocks import format_duration, parse_duration_ms
from ..core.envelope import Envelope, Problem
from ..core.errors import Ending, Failure
from ..inbox.person_wait import refusal_outcome
from ..process.environment import OVERTIME_VARIABLE
from ..runtime.call import Outcome
from ..runtime.control_channel import ask
from .output import signals_heard, write_quietly
from .parser import Subcommand, option
from .subcommand import JSON, ChildWork, timeout_option

if TYPE_CHECKING:
    from ..temporal.connection import Address

LONGEST_WAIT_S = 24 * 3600.0  # the observer may be a person
_VERDICTS = {"declined": "overtime was declined", "failed": "no overtime", "exhausted": "there is no overtime left"}


def request_overtime(by: int, reason: str, timeout: int) -> ChildWork:
    def body() -> Outcome:
        try:
            return _request_overtime(by, reason)
        except Failure as failure:
            return refusal_outcome(failure)

    return ChildWork("overtime", body, timeout, True, _show_overtime)


def _request_overtime(by_ms: int, reason: str) -> Outcome:
    request_id, _, rest = os.environ.get(OVERTIME_VARIABLE, "").partition(":")
    token, _, path = rest.partition(":")
    if not path:
        message = f"overtime is not available here ({OVERTIME_VARIABLE} is not set)"
        raise Failure("NOT_EXTENDABLE", message)
    request: dict[str, object] = {"do": "overtime", "request_id": request_id, "token": token, "by_ms": by_ms}
    answer = ask(path, request | {"reason": reason}, LONGEST_WAIT_S)
    if answer["granted_ms"]:
        return Outcome(Ending.FINISHED, data=answer)
    why = f": {answer['reason']}" if answer["reason"] else ""
    problem = Problem("OVERTIME_DECLINED", f"{_VERDICTS.get(answer['verdict'], 'no overtime')}{why}")
    return Outcome(Ending.FINISHED, problem, answer)


def _show_overtime(envelope: Envelope) -> None:
    data: Any = envelope.data
    if data["granted_ms"]:
        left = "" if data["remaining_ms"] is None else f", {format_duration(data['remaining_ms'])} left in all"
        write_quietly(sys.stdout, f"granted {format_duration(data['granted_ms'])}{left}\n", signals_heard)


def control_run(
    name: str,
    run_id: str,
    step: str | None,
    by_ms: int | None = None,
    within_ms: int | None = None,
    reason: str = "",
    on: Address | None = None,
) -> ChildWork:
    def body() -> Outcome:
        import asyncio

        from ..inbox.access import Principal
        from ..workflow.engine import RunOrder
        from .engine import open_engine

        order = RunOrder(run_id, step, Principal.local().name, by_ms, within_ms, reason)
        try:
            with open_engine(on) as engine:
                return Outcome(Ending.FINISHED, data=asyncio.run(engine.order(order)))
        except Failure as failure:
            return refusal_outcome(failure)

    return ChildWork(name, body, mutates=True, show=show_control)


def show_control(envelope: Envelope) -> None:
    if not envelope.ok or not isinstance(envelope.data, dict):
        return
    data: Any = envelope.data
    for call in data.get("extended", ()):
        left = "" if call["remaining_ms"] is None else f", {format_duration(call['remaining_ms'])} left"
        line = f"{call['name']}: {format_duration(call['granted_ms'])} more{left}\n"
        write_quietly(sys.stdout, line, signals_heard)
    for call in data.get("stopping", ()):
        within = format_duration(call["winding_down"]["remaining_ms"])
        write_quietly(sys.stdout, f"{call['name']}: winding down, {within} at most\n", signals_heard)


def _read_extension(text: str) -> int:
    if not (by_ms := parse_duration_ms(text)):
        raise ValueError(_NO_DURATION)
    return by_ms


def _read_reason(text: str) -> str:
    if not text.strip():
        raise ValueError(_NO_REASON)
    return text


_NO_DURATION = "--by needs a duration, such as --by 30s"
_NO_REASON = "--reason needs a text for the observer that decides"
COMMANDS = {
    "overtime": Subcommand(
        "overtime",
        options=(
            option("--by", "D", "The time to add (30s).", read=_read_extension, missing=_NO_DURATION),
            option(
                "--reason", "TEXT", "The reason, for the observer that decides.", read=_read_reason, missing=_NO_REASON
            ),
            JSON,
            timeout_option("10m"),
        ),
        run=request_overtime,
        usage="--by D --reason TEXT",
    )
}
