"""The rules of a supervisor's client, in pure time: its drivers are tested with real supervisors elsewhere."""

from collections.abc import Callable
from types import ModuleType

import pytest

from shotclock.core.limits import NS_PER_MS
from shotclock.supervise import client as module
from shotclock.supervise.client import (
    MOST_SPARE,
    REPORT_LIMIT_MS,
    START_MARGIN_MS,
    Fate,
    Spares,
    StopSignals,
    SupervisorClient,
)
from shotclock.supervise.command_task import CommandReport, CommandTask, News, Order

STARTED = (News.STARTED, 7, 70)
ENDED = (News.ENDED, CommandReport(status=0, spare_pid=70).pack())
FOREVER_MS = 10_000_000


def task_of(bell_ms: int | None = None, kill_ms: int | None = None, grace_ms: int = 0, **more: bool) -> CommandTask:
    bell_ns, kill_ns = (None if at_ms is None else at_ms * NS_PER_MS for at_ms in (bell_ms, kill_ms))
    return CommandTask(["true"], {}, bell_ns=bell_ns, kill_ns=kill_ns, grace_ms=grace_ms, **more)


def lived(
    client: SupervisorClient, until_ms: int = FOREVER_MS, is_stopped: Callable[[int], bool] = lambda at_ms: False
) -> list[tuple[int, object]]:
    """Let the time pass, and return what happened: looks, continuations (SIGCONT), orders, and the loss."""
    happened: list[tuple[int, object]] = []
    while client.next_ns is not None and (at_ms := -(-client.next_ns // NS_PER_MS)) <= until_ms:
        looks = client.is_look_due(at_ms * NS_PER_MS)
        if looks:
            happened.append((at_ms, "look"))
        if client.tick(at_ms * NS_PER_MS, is_stopped=looks and is_stopped(at_ms)):
            happened[-1] = at_ms, "continued"
        happened += [(at_ms, order) for order in client.take_orders()]
        if client.fate is not None:
            happened.append((at_ms, client.fate))
    return happened


def lost_at(client: SupervisorClient) -> int | None:
    happened = lived(client)
    return happened[-1][0] if client.fate is Fate.LOST else None


def test_the_client_can_do_no_io() -> None:
    modules = {name for name, value in vars(module).items() if isinstance(value, ModuleType)}
    assert modules <= {"@py_builtins", "@pytest_ar"}  # those of pytest


def test_a_silent_supervisor_is_given_up_a_while_after_its_kill_is_due() -> None:
    table: list[tuple[CommandTask, list[tuple[int, tuple[object, ...]]], int | None]] = [
        (task_of(), [], None),
        (task_of(bell_ms=1000), [], 1000),
        (task_of(bell_ms=1000, grace_ms=200), [], 1200),
        (task_of(bell_ms=1000, kill_ms=1100, grace_ms=200), [], 1100),
        (task_of(grace_ms=200), [(50, (Order.STOP, "x"))], 250),
        (task_of(grace_ms=200), [(50, (Order.KILL, "x"))], 50),
        (task_of(grace_ms=200), [(50, (Order.STOP, "x")), (60, (Order.KILL, "x"))], 60),
        (task_of(grace_ms=200), [(50, (Order.KILL, "x")), (60, (Order.STOP, "x"))], 50),
        (task_of(grace_ms=200), [(50, (Order.RING,))], 250),
        (task_of(grace_ms=200), [(50, (Order.GRACE, 10)), (50, (Order.STOP, "x"))], 60),
        (task_of(bell_ms=1000, kill_ms=1100, grace_ms=200), [(1050, (Order.STOP, "x"))], 1100),
        *[(task_of(), [(50, order)], None) for order in ((Order.LOOK,), (Order.SIGNAL, "10"), (Order.CONTINUE,))],
    ]
    for task, orders, kill_ms in table:
        client = SupervisorClient(task, 70)
        client.receive(0, STARTED)
        for at_ms, (kind, *details) in orders:
            client.order(at_ms * NS_PER_MS, str(kind), *details)
        assert lost_at(client) == (None if kill_ms is None else kill_ms + REPORT_LIMIT_MS), (task, orders)


def test_after_a_second_signal_the_report_may_take_half_a_second() -> None:
    client = SupervisorClient(task_of(bell_ms=9000, grace_ms=5000), 70)
    client.order(0, Order.STOP, "SIGINT")
    client.order(300 * NS_PER_MS, Order.KILL, "SIGINT", report_within_ms=500)
    assert lost_at(client) == 800


def test_a_moved_timeout_moves_the_end_of_the_wait_unless_the_command_is_being_stopped() -> None:
    for stops, kill_ms in ((False, 5100), (True, 1100)):
        client = SupervisorClient(task_of(bell_ms=1000, kill_ms=1100, grace_ms=5000), 70)
        client.receive(0, STARTED)
        if stops:
            client.order(0, Order.STOP, "x")
        client.move_bell(0, 5000 * NS_PER_MS, 5100 * NS_PER_MS)
        assert client.take_orders()[-1] == (Order.BELL, 5000 * NS_PER_MS, 5100 * NS_PER_MS)
        assert lost_at(client) == kill_ms + REPORT_LIMIT_MS


def test_a_supervisor_is_looked_at_only_when_its_command_should_end() -> None:
    client = SupervisorClient(task_of(bell_ms=1000, kill_ms=2000), 70)
    client.order(0, Order.SIGNAL, "10")
    client.take_orders()
    assert [at_ms for at_ms, _ in lived(client, until_ms=2019)] == [30, 1030, 2000, 2010]
    client.receive(0, ENDED)
    assert client.next_ns is None and lived(client) == []
    at_its_bell = SupervisorClient(task_of(bell_ms=1000, kill_ms=2000), 70)
    at_its_bell.order(970 * NS_PER_MS, Order.SIGNAL, "10")
    at_its_bell.take_orders()
    assert [at_ms for at_ms, _ in lived(at_its_bell, until_ms=2009)] == [1000, 2000]


def test_a_stopped_supervisor_is_continued_and_given_up_if_it_stays_stopped_after_the_kill() -> None:
    def always(at_ms: int) -> bool:
        return True

    table: list[tuple[CommandTask, Callable[[int], bool], list[int], int | None]] = [
        (task_of(bell_ms=100, kill_ms=150), always, [130, 140, 150, 160], 170),
        (task_of(bell_ms=100, kill_ms=100), always, [130, 140], 150),
        (task_of(bell_ms=100, kill_ms=100), lambda at_ms: at_ms >= 160, [160, 170], 180),
        (task_of(bell_ms=100, kill_ms=150), lambda at_ms: at_ms == 130, [130], 150 + REPORT_LIMIT_MS),
        # Stopped again and again, and seen running in between.
        (task_of(bell_ms=100, kill_ms=100), lambda at_ms: at_ms in (130, 140, 160, 170), [130, 140, 160, 170], None),
    ]
    for task, is_stopped, continued, lost_ms in table:
        client = SupervisorClient(task, 70)
        client.receive(0, STARTED)
        happened = lived(client, until_ms=170 if lost_ms is None else FOREVER_MS, is_stopped=is_stopped)
        assert [at_ms for at_ms, what in happened if what == "continued"] == continued, task
        assert [at_ms for at_ms, what in happened if what is Fate.LOST] == ([] if lost_ms is None else [lost_ms])


def test_a_supervisor_that_is_stopped_long_before_the_end_is_only_continued() -> None:
    client = SupervisorClient(task_of(), 70)
    client.order(0, Order.LOOK)
    client.take_orders()
    assert lived(client, until_ms=100, is_stopped=lambda at_ms: at_ms < 60) == [
        *((at_ms, "continued") for at_ms in (30, 40, 50)),
        (60, "look"),
    ]


def test_one_that_starts_its_command_itself_is_given_up_soon_if_it_has_not_by_the_timeout() -> None:
    """It is not continued, because it would start the command after its timeout."""
    late = [(1000 + START_MARGIN_MS, Fate.LOST)]
    for is_announced, messages, lost in [
        (True, [], late),
        (True, [(News.STARTED, -1, 70)], late),  # of the supervisor, not of its command
        (True, [STARTED], None),
        (False, [], [(1000 + REPORT_LIMIT_MS, Fate.LOST)]),
    ]:
        client = SupervisorClient(task_of(bell_ms=1000, announced=is_announced), 70, starts_itself=True)
        for message in messages:
            client.receive(0, message)
        happened = lived(client, is_stopped=lambda at_ms: True)
        assert (happened[0][1] == "continued") if lost is None else (happened == lost), (is_announced, messages)
    fresh = SupervisorClient(task_of(bell_ms=1000), 70)
    assert lived(fresh, is_stopped=lambda at_ms: True)[0] == (1030, "continued")


def test_orders_about_a_running_command_wait_for_its_start() -> None:
    client = SupervisorClient(task_of(), starts_itself=True)
    client.order_once_started(0, Order.GRACE, 5)
    client.move_bell(0, 10 * NS_PER_MS, 20 * NS_PER_MS)
    assert (client.take_orders(), client.is_ordered, client.pid) == ([], False, 0)
    client.receive(0, (News.STARTED, -1, 70))
    assert (client.take_orders(), client.pid) == ([], 70)
    client.receive(0, STARTED)
    assert client.take_orders() == [(Order.GRACE, 5), (Order.BELL, 10 * NS_PER_MS, 20 * NS_PER_MS)]
    assert client.is_ordered and client.take_orders() == []
    client.order_once_started(0, Order.GRACE, 6)
    assert client.take_orders() == [(Order.GRACE, 6)]


def test_a_command_whose_owner_is_gone_is_stopped_and_killed_within_a_second_whatever_its_grace() -> None:
    client = SupervisorClient(task_of(grace_ms=60_000), 70)
    client.order(0, Order.STOP, "SIGTERM")
    client.stop_within(100 * NS_PER_MS, 1000, "owner gone")
    assert client.take_orders() == [(Order.STOP, "SIGTERM"), (Order.STOP, "owner gone")]
    happened = [(at_ms, what) for at_ms, what in lived(client) if what != "look"]
    assert happened == [(1100, (Order.KILL, "owner gone")), (1600, Fate.LOST)]
    assert client.stopped == "SIGTERM"  # the first reason


def test_the_end_of_the_socket_is_a_loss_unless_the_task_was_never_read() -> None:
    table: list[tuple[list[str], Fate]] = [
        ([], Fate.LOST),
        (["unread"], Fate.UNSENT),
        (["unread", "started"], Fate.LOST),  # it is an order that was not read
        (["unread", "ordered"], Fate.LOST),
        (["unread", "ended"], Fate.REPORTED),
        (["given up", "unread"], Fate.LOST),
        (["ended", "given up"], Fate.REPORTED),
    ]
    for events, fate in table:
        client = SupervisorClient(task_of())
        if "started" in events:
            client.receive(0, STARTED)
        if "ordered" in events:
            client.order(0, Order.LOOK)
        if "ended" in events:
            client.receive(0, ENDED)
        if "given up" in events:
            client.give_up()
        client.end_of_socket(is_task_unread="unread" in events)
        assert client.fate is fate, events


def test_a_report_after_the_loss_changes_nothing() -> None:
    client = SupervisorClient(task_of())
    client.give_up()
    client.receive(0, ENDED)
    client.receive(0, STARTED)
    assert (client.fate, client.report, client.has_started) == (Fate.LOST, None, False)


def test_the_report_on_a_lost_supervisor_names_the_reason_the_timeout_and_what_was_found() -> None:
    found: list[dict[str, object]] = [{"pid": 1, "command": "stays"}]
    for bell_ms, now_ms, stops, fired, stopped in [
        (None, 5000, False, None, None),
        (1000, 999, False, None, None),
        (1000, 1000, False, "timeout", None),
        (1000, 500, True, None, "SIGINT"),
        (1000, 2000, True, "timeout", "SIGINT"),
    ]:
        task = task_of(bell_ms=bell_ms)
        task.started_ns = 100 * NS_PER_MS
        client = SupervisorClient(task)
        if stops:
            client.order(0, Order.STOP, "SIGINT")
        client.give_up()
        report = client.replace_report(now_ms * NS_PER_MS, found, [{"job_id": "a"}])
        assert (report.lost, report.fired, report.stopped) == (True, fired, stopped)
        assert (report.survivors, report.jobs) == (found, [{"job_id": "a"}])
        assert report.elapsed_ns == ((now_ms - 100) * NS_PER_MS if fired else 0)


def test_a_supervisor_is_used_again_only_after_its_report_and_without_a_late_order() -> None:
    gone = (News.ENDED, CommandReport(status=0).pack())
    for messages, is_ordered, is_reusable in [
        ([ENDED], False, True),
        ([ENDED], True, False),
        ([gone], False, False),
        ([STARTED], False, False),
    ]:
        client = SupervisorClient(task_of(), 70)
        if is_ordered:
            client.order(0, Order.LOOK)
        for message in messages:
            client.receive(0, message)
        assert client.is_reusable is is_reusable, (messages, is_ordered)


@pytest.mark.parametrize("second", ["SIGINT", "SIGTERM"])
def test_a_second_signal_means_now_unless_it_comes_with_the_first(second: str) -> None:
    signals = StopSignals()
    assert signals.first is None
    assert signals.order(5, "SIGINT") == (Order.STOP, "SIGINT")
    assert signals.order(5 + 200 * NS_PER_MS, second) is None
    assert signals.order(6 + 200 * NS_PER_MS, second) == (Order.KILL, "SIGINT")
    assert signals.first == "SIGINT"


def test_only_a_few_supervisors_are_kept_and_no_used_up_one() -> None:
    class Supervisor:
        def __init__(self, is_reusable: bool) -> None:
            self.is_reusable = is_reusable
            self.is_closed = False

        def close(self) -> None:
            self.is_closed = True

    spares: Spares[Supervisor] = Spares()
    given = [Supervisor(number != 2) for number in range(MOST_SPARE + 2)]
    for supervisor in given:
        spares.give_back(supervisor)
    assert [each.is_closed for each in given] == [number in (2, MOST_SPARE + 1) for number in range(MOST_SPARE + 2)]
    taken = []
    while (supervisor_ := spares.take()) is not None:
        taken.append(supervisor_)
    assert taken == [each for each in reversed(given) if not each.is_closed] and spares.list() == []
