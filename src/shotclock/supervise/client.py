"""The client of one supervisor, as a state machine without I/O: when to look at it, and when to give it up.

    driver ── SupervisorClient     in: messages, the end of the socket, orders, the time
                                   out: orders to send, the next instant, the fate of the supervisor

A driver owns the socket, the clock and the signals: `foreground.PolledSupervisor` polls (exec, jobs, wrap, and the
threads of `shotclock.run`), `calls.supervised_commands` has an event loop.
"""

from __future__ import annotations

from enum import Enum, auto
from typing import Generic, TypeVar

from ..core.limits import NS_PER_MS, ClockKind
from .command_task import CommandReport, CommandTask, News, Order
from .kill import VERIFY_LIMIT_MS

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Protocol

    from .ipc import Message

    class Reusable(Protocol):
        @property
        def is_reusable(self) -> bool: ...
        def close(self) -> None: ...


# How long to wait for a report after the kill and its verification. Longer means that the supervisor is broken.
REPORT_MARGIN_MS = 3_000
REPORT_LIMIT_MS = VERIFY_LIMIT_MS + REPORT_MARGIN_MS
# How long to wait for a report after a second signal. A kill is usually reported within a few milliseconds.
LAST_WORD_MS = 500
# How long after the timeout the start of a command may take. Longer means that it hangs, as on a dead network mount.
START_MARGIN_MS = 250
# The work may stop its supervisor by a signal. How long after the timeout or an order to look whether it has.
LATE_BELL_MS = 30
LOOK_PAUSE_MS = 10  # between two looks at a supervisor that is stopped, or whose command is to end
# How long after the kill a supervisor may stay stopped, although it is continued.
SILENT_LIMIT_MS = 20
# How far apart two signals may be that count as one: `timeout` and others signal a process and its group at once.
ONE_WISH_MS = 200
MOST_SPARE = 8  # each is a small process; more than these rarely run at once for long


class Fate(Enum):
    REPORTED = auto()
    LOST = auto()  # it was killed, or is stopped or silent for too long: its work has to be killed without it
    UNSENT = auto()  # it was killed before it read the task, so nothing began


class SupervisorClient:
    """One command under a supervisor. Times are monotonic nanoseconds."""

    def __init__(self, task: CommandTask, pid: int = 0, *, starts_itself: bool = False) -> None:
        """`pid` is that of the supervisor, if it is known.

        With `starts_itself` it starts the command without a child of its own, and hangs where the start hangs.
        """
        self.task = task
        self.pid = pid
        self.fate: Fate | None = None
        self.report: CommandReport | None = None
        self.has_started: bool = False
        self.is_ordered: bool = False
        self.stopped: str | None = None
        """The reason of the first order to end the command."""
        self._grace_ms = task.grace_ms
        self._starts_itself = starts_itself
        self._orders: list[Message] = []
        self._later_orders: list[Message] = []
        self._kill_order: tuple[int, str] | None = None
        self._continued_ns: int | None = None
        self._limit(task.bell_ns, task.kill_ns)

    def _limit(self, bell_ns: int | None, kill_ns: int | None) -> None:
        self._bell_ns = bell_ns
        self._look_ns = None if bell_ns is None else bell_ns + LATE_BELL_MS * NS_PER_MS
        self._kill_ns: int | None = None
        self._give_up_ns: int | None = None
        if kill_ns is None and bell_ns is not None:
            kill_ns = bell_ns + self._grace_ms * NS_PER_MS
        if kill_ns is not None:
            self._expect_end(kill_ns)

    def _expect_end(self, kill_ns: int, report_within_ms: int = REPORT_LIMIT_MS) -> None:
        self._kill_ns = _earlier(self._kill_ns, kill_ns)
        self._give_up_ns = _earlier(self._give_up_ns, kill_ns + report_within_ms * NS_PER_MS)

    # --- orders -----------------------------------------------------------------------------------------------

    def order(self, now_ns: int, kind: str, *details: object, report_within_ms: int = REPORT_LIMIT_MS) -> None:
        """Order something of the supervisor. It is not used again: the order may come after the end of the command."""
        self.is_ordered = True
        self._orders.append((kind, *details))
        self._look_ns = _earlier(self._look_ns, now_ns + LATE_BELL_MS * NS_PER_MS)
        match (kind, *details):
            case (Order.STOP, str(why)):
                self.stopped = self.stopped or why
                self._expect_end(now_ns + self._grace_ms * NS_PER_MS)
            case (Order.KILL, str(why)):
                self.stopped = self.stopped or why
                self._expect_end(now_ns, report_within_ms)
            case (Order.RING,):
                self._bell_ns = _earlier(self._bell_ns, now_ns)
                self._expect_end(now_ns + self._grace_ms * NS_PER_MS)
            case (Order.GRACE, int(grace_ms)):
                self._grace_ms = grace_ms

    def order_once_started(self, now_ns: int, *order: object) -> None:
        """Order something of a running command: an order before the start may call the command off."""
        if self.has_started:
            self.order(now_ns, *order)  # type: ignore[arg-type]
        else:
            self._later_orders.append(order)

    def move_bell(self, now_ns: int, bell_ns: int, kill_ns: int) -> None:
        if self.stopped is None:
            self._limit(bell_ns, kill_ns)
        self.order_once_started(now_ns, Order.BELL, bell_ns, kill_ns)

    def stop_within(self, now_ns: int, within_ms: int, why: str) -> None:
        """Stop the command, and order its kill after this time, even if a longer grace has already begun."""
        self.order(now_ns, Order.STOP, why)
        self._kill_order = now_ns + within_ms * NS_PER_MS, why

    def take_orders(self) -> list[Message]:
        """Return the orders to send now."""
        orders, self._orders = self._orders, []
        return orders

    # --- events -----------------------------------------------------------------------------------------------

    def receive(self, now_ns: int, message: Message) -> None:
        """Handle a message. Those that are not about the start and the end are left to the driver."""
        if self.fate is not None:
            return
        match message:
            case (News.STARTED, int(group), int(pid)):
                self.pid = pid
                if self._starts_itself and group < 0:  # only the supervisor has started
                    return
                self.has_started = True
                orders, self._later_orders = self._later_orders, []
                for order in orders:
                    self.order(now_ns, *order)
            case (News.ENDED, dict(packed)):
                self.fate, self.report = Fate.REPORTED, CommandReport.unpack(packed)

    def end_of_socket(self, *, is_task_unread: bool = False) -> None:
        """Handle the end of the socket. `is_task_unread`: the supervisor has left something unread.

        It is the task only if nothing else was sent, and the command has not started.
        """
        if self.fate is None:
            is_unsent = is_task_unread and not self.has_started and not self.is_ordered
            self.fate = Fate.UNSENT if is_unsent else Fate.LOST

    def give_up(self) -> None:
        if self.fate is None:
            self.fate = Fate.LOST

    def is_look_due(self, now_ns: int) -> bool:
        """Return whether the next tick needs to know if the supervisor is stopped by a signal."""
        return self.fate is None and self._next_look_ns is not None and now_ns >= self._next_look_ns

    @property
    def _next_look_ns(self) -> int | None:
        """Return when to look: not at a supervisor that would start its command after the timeout if continued."""
        may_start = self._starts_itself and not self.has_started and not self.is_ordered
        return None if may_start else self._look_ns

    def tick(self, now_ns: int, *, is_stopped: bool = False) -> bool:
        """Apply the rules of this instant. Return whether the supervisor has to be continued.

        A driver reads the messages that have come by `now_ns` first: a report in the socket is no silence.
        """
        if self.fate is not None:
            return False
        if self._kill_order is not None and now_ns >= self._kill_order[0]:
            self.order(now_ns, Order.KILL, self._kill_order[1], report_within_ms=LAST_WORD_MS)
            self._kill_order = None
        is_stuck = False
        if self.is_look_due(now_ns):
            again_ns = now_ns + LOOK_PAUSE_MS * NS_PER_MS
            if is_stopped:
                self._look_ns = again_ns
            elif self._kill_ns is not None and (self.stopped is not None or now_ns >= (self._bell_ns or now_ns)):
                self._look_ns = max(again_ns, self._kill_ns)
            else:
                self._look_ns = None if self._bell_ns is None else self._bell_ns + LATE_BELL_MS * NS_PER_MS
            self._continued_ns = (self._continued_ns or now_ns) if is_stopped else None
            if self._kill_ns is not None and self._continued_ns is not None:
                is_stuck = now_ns >= max(self._kill_ns, self._continued_ns) + SILENT_LIMIT_MS * NS_PER_MS
        lost_ns = self._lost_ns
        if is_stuck or (lost_ns is not None and now_ns >= lost_ns):
            self.fate = Fate.LOST
        return is_stopped and self.fate is None

    @property
    def _lost_ns(self) -> int | None:
        """Return when a silent supervisor is given up."""
        if not self._starts_itself or self.has_started or not self.task.announced or self._bell_ns is None:
            return self._give_up_ns
        return _earlier(self._give_up_ns, self._bell_ns + START_MARGIN_MS * NS_PER_MS)

    # --- results ----------------------------------------------------------------------------------------------

    @property
    def next_ns(self) -> int | None:
        """Return when the next tick is due."""
        if self.fate is not None:
            return None
        next_ns = self._lost_ns
        if (look_ns := self._next_look_ns) is not None:
            next_ns = _earlier(next_ns, look_ns)
        return next_ns if self._kill_order is None else _earlier(next_ns, self._kill_order[0])

    @property
    def is_reusable(self) -> bool:
        """Return whether the supervisor waits for another command, and no order is on its way to it."""
        return self.report is not None and self.report.spare_pid != 0 and not self.is_ordered

    def replace_report(
        self, now_ns: int, survivors: list[dict[str, object]], jobs: list[dict[str, object]] | None = None
    ) -> CommandReport:
        """Return the report on a command whose supervisor was lost, after its processes were looked for."""
        report = CommandReport(lost=True, stopped=self.stopped, survivors=survivors, jobs=jobs or [])
        if self._bell_ns is not None and now_ns >= self._bell_ns:
            report.fired, report.elapsed_ns = ClockKind.TIMEOUT.value, now_ns - self.task.started_ns
        return report


class StopSignals:
    """The signals by which a user stops a command, as orders: the first one is passed on, the second means "now"."""

    def __init__(self) -> None:
        self.first: str | None = None
        self._first_ns = 0

    def order(self, now_ns: int, name: str) -> tuple[str, str] | None:
        if self.first is None:
            self.first, self._first_ns = name, now_ns
            return Order.STOP, name
        return (Order.KILL, self.first) if now_ns - self._first_ns > ONE_WISH_MS * NS_PER_MS else None


R = TypeVar("R", bound="Reusable")


class Spares(Generic[R]):
    """The supervisors that wait for another command. Threads may share them."""

    def __init__(self) -> None:
        self._waiting: list[R] = []

    def take(self) -> R | None:
        try:
            return self._waiting.pop()
        except IndexError:
            return None

    def give_back(self, supervisor: R) -> None:
        if supervisor.is_reusable and len(self._waiting) < MOST_SPARE:
            self._waiting.append(supervisor)
        else:
            supervisor.close()

    def list(self) -> list[R]:
        return self._waiting[:]


def _earlier(one_ns: int | None, other_ns: int) -> int:
    return other_ns if one_ns is None else min(one_ns, other_ns)
