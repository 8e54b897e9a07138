"""What the end of a worker, an exception or a failure becomes, without a worker."""

from typing import Any

from shotclock.calls.call import Outcome, WindDown, admit
from shotclock.calls.outcomes import (
    Replacement,
    closing_outcome,
    crash_outcome,
    failure_outcome,
    handler_failure,
    rebuilt_warning,
    replaced_outcome,
    replaced_warning,
    unopened_outcome,
    worker_outcome,
)
from shotclock.core.envelope import Problem
from shotclock.core.errors import Ending, Failure
from shotclock.core.limits import Clocks
from shotclock.supervise.clock import monotonic_ns
from shotclock.supervise.command_task import CommandReport

SURVIVORS = [{"pid": 7}]


def summary(outcome: Outcome) -> tuple[str | None, str]:
    problem: Any = outcome.problem
    return None if problem is None else problem.code, outcome.ending.value


def test_the_end_of_a_worker_without_an_answer_says_what_ended_it() -> None:
    for fields, timeout_ms, found in (
        ({"lost": True, "stopped": "closing"}, 9_000, ("CANCELLED", "killed")),
        ({"lost": True}, 9_000, ("SUPERVISOR_LOST", "killed")),
        ({"lost": True}, 0, ("SUPERVISOR_LOST", "killed")),
        ({"lost": True, "stopped": "x"}, 1, ("TIMEOUT", "killed")),
        ({"fired": "timeout"}, 9_000, ("TIMEOUT", "killed")),
        ({"stopped": "timeout"}, 9_000, ("TIMEOUT", "killed")),
        ({"unstartable": (1, "")}, 9_000, ("SPAWN_FAILED", "not_started")),
        ({"stopped": "soft"}, 9_000, ("CANCELLED", "killed")),
        ({"stopped": "client"}, 9_000, ("CANCELLED", "killed")),
        ({"status": 3}, 9_000, ("WORKER_CRASHED", "finished")),
    ):
        call = admit("work", Clocks(timeout_ms))
        while timeout_ms == 1 and not call.bound.bell.has_passed(monotonic_ns()):  # type: ignore[union-attr]
            pass
        report = CommandReport(**{"survivors": SURVIVORS, **fields})  # type: ignore[arg-type]
        outcome = crash_outcome(call, report)
        assert summary(outcome) == found, fields
        assert outcome.survivors == ([] if "unstartable" in fields else SURVIVORS) or outcome.survivors == ()
    call = admit("work", Clocks(9_000))
    call.winding_down = WindDown("soft clock", "late", 0, 1)
    assert summary(crash_outcome(call, CommandReport(stopped="soft"))) == ("CANCELLED", "killed")
    killed: Any = crash_outcome(call, CommandReport(status=-9, leaked=2)).problem
    assert killed.context == {"signal": "SIGKILL", "stopped": 2} and killed.message.endswith("was ended by SIGKILL")
    left: Any = crash_outcome(call, CommandReport(status=3)).problem
    assert left.context == {"exit_code": 3} and left.message.endswith("left with exit code 3")


def test_a_failure_of_a_handler_has_begun_and_one_outside_of_it_has_not() -> None:
    wrong = Failure("ARG_ERROR", "no", context={"errors": [{"field": "a", "message": "m"}]}, data={"x": {1}})
    outside, inside = failure_outcome(wrong), handler_failure(wrong)
    assert (summary(outside), summary(inside)) == (("ARG_ERROR", "not_started"), ("ARGUMENT_REFUSED", "finished"))
    problem: Any = outside.problem
    assert (problem.errors, problem.context, problem.phase) == ([{"field": "a", "message": "m"}], None, "validation")
    refused: Any = inside.problem
    assert refused.context["raised"] == "ARG_ERROR" and refused.suggestion == wrong.entry.hint
    assert summary(failure_outcome(Failure("CONFLICT", "x"))) == ("CONFLICT", "finished")
    assert handler_failure(Failure("CONFLICT", "x", data=object())).data["result"].startswith("<object")  # type: ignore[index, call-overload, union-attr]


def test_each_answer_of_a_worker_is_an_outcome() -> None:
    for kind, payload, found in (
        ("invalid", [{"field": "a", "message": "m"}], ("ARG_ERROR", "not_started")),
        ("unimportable", "x", ("HANDLER_NOT_IMPORTABLE", "not_started")),
        ("unstartable", "x", ("SPAWN_FAILED", "not_started")),
        ("cancelled", None, ("CANCELLED", "cancelled")),
        ("unserializable", "x", ("RESULT_NOT_SERIALIZABLE", "finished")),
        ("returned", (b"broken", None, []), ("RESULT_NOT_SERIALIZABLE", "finished")),
        ("returned", (b"broken", {"a": 1}, ["a: b"]), (None, "finished")),
        ("failed", b"broken", ("INTERNAL_ERROR", "finished")),
        ("raised", ("E", "text", "lines", "CONFLICT", "shown", b""), ("CONFLICT", "finished")),
    ):
        assert summary(worker_outcome(kind, payload)) == found, kind
    raised: Any = worker_outcome("raised", ("E", "", "lines", "INTERNAL_ERROR", "", b"")).problem
    assert (raised.message, raised.outside) == ("E", "E")
    changed = worker_outcome("returned", (b"broken", 5, ["a: b"]))
    assert (changed.data, changed.value, changed.warnings[0]["code"]) == ({"result": 5}, 5, "RESULT_CHANGED")


def test_a_replaced_process_and_a_lifespan_that_was_not_opened_name_who_is_to_blame() -> None:
    call, blocked = admit("work", Clocks(9_000)), Replacement("other", "blocked", had_state=True)
    assert (blocked.blame("work"), Replacement("work", "blocked").blame("work")) == ("other blocked", "it blocked")
    unknown = Replacement("", "blocked").blame()
    assert (unknown, Replacement().blame()) == ("a task, a thread or a callback blocked", "it died")
    assert "opens the lifespan anew" in blocked.loss and "anew" not in Replacement().loss
    assert replaced_warning(call, blocked, 2)["context"] == {"interrupted": 2}
    assert "context" not in replaced_warning(call, blocked)
    problem: Any = replaced_outcome(call, blocked).problem
    assert problem.context == {"operation": "other"}
    assert "(5ms ago: why)" in str(rebuilt_warning("why", 5_000_000)) and "(why)" in str(rebuilt_warning("why", 0))
    limit = Outcome(Ending.KILLED, Problem("TIMEOUT", "late"))
    assert unopened_outcome(None, limit).problem.message == "late, before the lifespan of the App was open"  # type: ignore[union-attr]
    for name, outside, shown in (("NotOpened", "x", "text"), ("ValueError", "", "ValueError"), ("E", "x", "E: x")):
        unopened: Any = unopened_outcome((name, "text", "lines", "", outside, b""), limit).problem
        assert unopened.outside == f"the lifespan of the App could not be opened: {shown}"
    assert summary(closing_outcome()) == ("SHUTTING_DOWN", "not_started")
    assert summary(closing_outcome(Ending.KILLED)) == ("CANCELLED", "killed")
