"""Overtime of `shotclock exec`: who is asked at the soft bell, and what follows. Imported only where there may be any.

`exec` waits without an event loop. An observer that takes a while (a command, a model, a person) is asked by a process
of its own, forked for that, which has a runtime; what it says comes through a pipe, and it is killed when its time is
up.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from typing import Any

from ..core.clocks import NS_PER_MS, ClockKind, Fired, format_duration, latest_bell, move_bell
from ..core.overtime import ObserverKind, Overtime, OvertimeDecision, kept_for_wind_down_ms, read_decision
from ..core.value_types import replace
from ..process.clock import monotonic_ns
from ..process.command_task import CommandTask, Order
from ..process.environment import OVERTIME_VARIABLE
from ..process.foreground import Negotiation
from ..process.forked import ForkedQuestion
from ..runtime.call import Call, WindDown
from ..runtime.control_channel import AskedOvertime, PolledChannel

Send = Callable[..., None]
# How long the end of the output may take to be shown; a supervisor that is stopped runs it out.
LOOK_LIMIT_MS = 1_000
ANSWER_SIZE = 64 * 1024


class ExecOvertime(Negotiation):
    """The soft clock of one command, and its overtime: at the bell, or because the command asks for it itself."""

    def __init__(self, call: Call, task: CommandTask) -> None:
        assert call.overtime is not None
        self._call, self._task, self._overtime = call, task, call.overtime
        self._soft_ns, task.soft_ns = task.soft_ns, None
        self.act_ns = self._soft_ns
        self._wind_down_ms = task.wind_down_ms
        soft_ms = call.clocks.soft_ms or 0
        self._kept_ms = kept_for_wind_down_ms(call.bound.limit_ms, soft_ms, task.wind_down_ms)
        self._began_ns = 0
        self._is_looking = False
        self._question: ForkedQuestion | None = None
        self._seen = 0
        self._answer = b""
        self._asking: AskedOvertime | None = None
        """What the command has asked for by itself, while that is decided."""
        self._channel = PolledChannel.open(call.request_id)
        if self._channel is not None:
            task.env[OVERTIME_VARIABLE] = self._channel.address

    @property
    def fds(self) -> tuple[int, ...]:  # type: ignore[override]
        asked = () if self._question is None else (self._question.fd,)
        return asked if self._channel is None else (*asked, *self._channel.fds)

    def act(self, order: Send) -> None:
        now_ns = monotonic_ns()
        if self._question is not None:  # its time is up
            limit = format_duration((now_ns - self._began_ns) // NS_PER_MS)
            self._settle(OvertimeDecision(failed=True, reason=f"the observer did not answer within {limit}"), order)
        elif self._is_looking:
            self.take_look(b"", b"", 0)
        elif not self._overtime.policy.has_observer:
            self._began_ns = now_ns
            limit = format_duration(self._call.clocks.soft_ms or 0)
            self._wind_down("soft clock", f"the soft limit of {limit} rang", order)
        else:
            self._begin(order)

    def take(self, fd: int, order: Send) -> None:
        if self._question is not None and fd == self._question.fd:
            self._take_answer(order)
            return
        asked = None if self._channel is None else self._channel.take(fd)
        if asked is None:
            return
        if self._asking is not None or self._began_ns or self._call.winding_down is not None:
            asked.answer(0, "declined", "overtime is being decided about, or it winds down", self._remaining_ms())
            return
        self._asking = asked
        self._begin(order)

    def _begin(self, order: Send) -> None:
        """Ask whoever decides, once it is known what the command has written."""
        now_ns = self._began_ns = monotonic_ns()
        self._order = order
        if not self._overtime.room_ms(self._ceiling_ms(now_ns)) or not self._overtime.policy.has_observer:
            self._settle(OvertimeDecision(self._overtime.policy.budget_ms), order)
            return
        self._is_looking = True
        self.act_ns = now_ns + LOOK_LIMIT_MS * NS_PER_MS
        order(Order.LOOK)

    def take_look(self, stdout: bytes, stderr: bytes, written: int) -> None:
        if not self._is_looking:
            return
        self._is_looking = False
        has_grown, self._seen = written > self._seen, written
        policy = self._overtime.policy
        if policy.observer is ObserverKind.PROGRESS:
            decision = OvertimeDecision(policy.share_ms, "its output grows")
            self._settle(decision if has_grown else OvertimeDecision(reason="its output has not grown"), self._order)
            return
        now_ns = monotonic_ns()
        self._ask(
            {
                "call": " ".join(self._task.argv)[:1000],
                "request_id": self._call.request_id,
                "elapsed_ms": (now_ns - self._call.started_ns) // NS_PER_MS,
                "timeout_ms": self._call.bound.limit_ms,
                "remaining_ms": self._remaining_ms(),
                "stdout": stdout.decode(errors="replace"),
                "stderr": stderr.decode(errors="replace"),
                "output_bytes": written,
                "has_grown": has_grown,
                "granted_ms": self._overtime.granted_ms,
                "requests": [request.as_meta() for request in self._overtime.requests],
                "requests_left": self._overtime.requests_left,
                "most_ms": self._overtime.room_ms(self._ceiling_ms(now_ns)),
                "asked_by": self._asked_by,
                "asked_ms": None if self._asking is None else self._asking.by_ms,
                "reason": "" if self._asking is None else self._asking.reason,
            },
            now_ns,
        )

    def _ask(self, summary: dict[str, Any], now_ns: int) -> None:
        self._answer = b""
        try:
            self._question = ForkedQuestion(lambda: json.dumps(_observe(self._call, summary)).encode())
        except OSError as error:
            self._settle(
                OvertimeDecision(failed=True, reason=f"the observer could not be started: {error}"), self._order
            )
            return
        self.act_ns = now_ns + self._overtime.patience_ms(self._ceiling_ms(now_ns)) * NS_PER_MS

    def _take_answer(self, order: Send) -> None:
        assert self._question is not None
        chunk = os.read(self._question.fd, ANSWER_SIZE)
        self._answer += chunk
        if chunk and len(self._answer) < ANSWER_SIZE:
            return
        try:
            answered = json.loads(self._answer)
        except (ValueError, RecursionError):
            answered = {"failed": "the observer gave no answer"}
        failed = answered.get("failed")
        self._settle(OvertimeDecision(failed=True, reason=failed) if failed else read_decision(answered), order)

    def _settle(self, decision: OvertimeDecision, order: Send) -> None:
        self._end_question()
        now_ns, asking = monotonic_ns(), self._asking
        if asking is not None:
            decision = replace(decision, extend_ms=min(decision.extend_ms, asking.by_ms))
        request = self._overtime.settle(
            decision,
            at_ms=(self._began_ns - self._call.started_ns) // NS_PER_MS,
            took_ms=(now_ns - self._began_ns) // NS_PER_MS,
            ceiling_ms=self._ceiling_ms(now_ns),
            asked_by=self._asked_by,
        )
        self._asking = None
        if request.granted_ms and self._overtime.policy.hard_extends:
            self._move_bell(request.granted_ms + request.took_ms, order)
        if request.granted_ms:
            # A command that asks early loses nothing by it.
            from_ns = now_ns if asking is None else max(now_ns, self._soft_ns or 0)
            self._soft_ns = from_ns + request.granted_ms * NS_PER_MS
        if asking is not None:
            asking.answer(request.granted_ms, request.verdict.value, request.reason, self._remaining_ms())
        elif not request.granted_ms:
            self._wind_down("observer", request.reason or f"overtime was {request.verdict}", order)
            return
        self.act_ns, self._began_ns = self._soft_ns, 0

    def _wind_down(self, by: str, reason: str, order: Send) -> None:
        now_ns = monotonic_ns()
        until_ns = now_ns + self._wind_down_ms * NS_PER_MS
        limit_ms, elapsed_ms = ((at_ns - self._call.started_ns) // NS_PER_MS for at_ns in (self._began_ns, now_ns))
        fired = Fired(ClockKind.SOFT, self._call.name, limit_ms, elapsed_ms)
        self._call.winding_down = WindDown(by, reason, now_ns, until_ns, fired)
        self.act_ns = None
        order(Order.WIND_DOWN, until_ns)

    @property
    def _asked_by(self) -> str:
        return "soft clock" if self._asking is None else "call"

    def _remaining_ms(self) -> int | None:
        bell = self._call.bound.bell
        return None if bell is None else bell.remaining_ms(monotonic_ns())

    def _ceiling_ms(self, now_ns: int) -> int | None:
        bell = self._call.bound.bell
        if self._overtime.policy.hard_extends:
            bell = latest_bell(self._call.parent, self._call.started_ns)
        if bell is None:
            return None
        from_ns = now_ns if self._asking is None else max(now_ns, self._soft_ns or 0)
        return max(0, bell.remaining_ms(from_ns) - self._kept_ms)

    def _move_bell(self, by_ms: int, order: Send) -> None:
        call = self._call
        moved = move_bell(call.bound, by_ms, latest_bell(call.parent, call.started_ns), call.parent)
        if moved is not None and moved.bell is not None:
            call.bound = moved
            self._task.bell_ns, self._task.kill_ns = moved.bell.at_ns, moved.kill_ns
            order(Order.BELL, self._task.bell_ns, self._task.kill_ns)

    def _end_question(self) -> None:
        if self._question is not None:
            self._question.end()
            self._question = None

    def close(self) -> None:
        if self._began_ns and self._call.winding_down is None:  # it ended before that was decided
            at_ms = (self._began_ns - self._call.started_ns) // NS_PER_MS
            took_ms = (monotonic_ns() - self._began_ns) // NS_PER_MS
            self._overtime.note_unanswered(at_ms, self._asked_by, took_ms)
        self._end_question()
        if self._channel is not None:
            self._channel.close()


def _observe(call: Call, summary: dict[str, Any]) -> dict[str, Any]:
    """Ask the observer of a call, in a process that was forked for it."""
    import asyncio

    from ..runtime.runtime import Runtime

    async def ask() -> OvertimeDecision:
        async with Runtime(workers=1) as runtime:
            return await runtime.observe(call, summary)

    decision = asyncio.run(ask())
    if decision.failed:
        return {"failed": decision.reason}
    return {"extend_ms": decision.extend_ms, "decline": not decision.extend_ms, "reason": decision.reason}


def read_overtime(text: str, timeout_ms: int) -> Overtime | None:
    """Read what `--overtime` says: an observer, a budget or a JSON object. Raises OvertimeError."""
    from ..core.overtime import OvertimeError, OvertimePolicy

    written: object = text
    if text.lstrip().startswith("{"):
        try:
            written = json.loads(text)
        except ValueError as error:
            raise OvertimeError(f"not a JSON object: {error}") from None
    policy = OvertimePolicy.of(written, timeout_ms)
    return None if policy is None else Overtime(policy)
