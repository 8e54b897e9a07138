"""`finally` and `depends_on: {x: ended}` in a file: what is accepted, how it is planned, and what a run makes of it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as xml

import pytest

from shotclock.core.envelope import Envelope
from shotclock.core.errors import Failure
from shotclock.core.limits import NS_PER_MS, Deadline
from shotclock.flows.check.plan import finally_reserve, plan_of
from shotclock.flows.file.loader import Finding, load_text
from shotclock.flows.file.schema import WorkflowFile
from shotclock.flows.report.html_report import to_html
from shotclock.flows.report.junit import to_junit
from shotclock.flows.report.report import report_of, to_markdown
from shotclock.flows.run.run_context import Deadlines
from shotclock.flows.run.step_choice import StepChoice, cut_down
from shotclock.store.store import Store
from tests.flows.conftest import statuses, step
from tests.rows import row

Run = Callable[..., Envelope]
Lint = Callable[..., list[Finding]]


def read(text: str) -> WorkflowFile:
    loaded = load_text(text.encode(), "flow.yaml")
    assert loaded.workflow is not None, loaded.findings
    return loaded.workflow


# --- the file -------------------------------------------------------------------------------------------------------


def test_a_list_is_a_chain_in_which_each_waits_for_any_end_of_the_one_before() -> None:
    workflow = read("steps: [echo one]\nfinally: [echo a, {id: b, exec: echo b}, {exec: echo c, depends_on: []}]\n")
    assert list(workflow.steps) == ["step-1", "finally-1", "b", "finally-3"]
    assert workflow.finally_ == ["finally-1", "b", "finally-3"]
    assert [workflow.steps[name].depends_on for name in workflow.finally_] == [[], [{"finally-1": "ended"}], []]
    assert WorkflowFile.model_validate(workflow.model_dump(exclude_unset=True)) == workflow


REFUSED = {
    "steps: {a: {exec: x}}\nfinally: {a: {exec: x}}": "is there twice, first in line 1",
    "steps: {a: {exec: x}}\nfinally: {}": "is empty",
    "steps: {a: {exec: x}}\nfinally: 7": "should be a mapping or a list of steps",
    "steps: {a: {exec: x}, b: {exec: x, depends_on: {a: done}}}": "a: should be ok or ended, and is 'done'",
    "steps: {a: {exec: x}}\nfinally: {b: {exec: x, nope: 1}}": "unknown key 'nope'",
}


def test_a_finally_that_cannot_be_read_is_refused_with_its_place(load: Any) -> None:
    for text, message in REFUSED.items():
        with row(text):
            loaded = load(text)
            assert loaded.workflow is None and message in loaded.findings[0].message, loaded.findings
            assert loaded.findings[0].place.line == text.count("\n") + 1


RULES = {
    "finally: {b: {exec: x, depends_on: a}}": "finally/depends-on",
    "finally: {b: {exec: x, depends_on: {a: ended}}}": "finally/depends-on",
    "finally: {b: {exec: x, on_fail: {run: a}}}": "finally/border",
    "finally: {b: {exec: x, on_success: {goto: a}}}": "finally/border",
    "defaults: {on_fail: {run: b}}\nfinally: {b: {exec: x}}": "finally/border",
    "finally: {b: {type: human-input, prompt: go on?, timeout: 5}}": "finally/person",
    "finally: {b: {exec: x, approval: true}}": "finally/person",
    "timeout: 60\nfinally: {b: {exec: x, timeout: 70}}": "budget/finally",
    "timeout: 60\nfinally: [{exec: x, timeout: 30}, {exec: x, timeout: 30}]": "budget/finally",
}
STEPS = "steps: {a: {exec: x, timeout: 5}}\n"


def test_check_refuses_what_crosses_the_border_waits_for_a_person_or_does_not_fit(linted: Lint) -> None:
    for text, rule in RULES.items():
        with row(text):
            assert rule in [found.rule for found in linted(STEPS + text) if found.is_error], linted(STEPS + text)
    whole = "steps: {a: {exec: x, timeout: 5}, b: {exec: x, depends_on: last}}\nfinally: {last: {exec: x}}"
    assert [found.rule for found in linted(whole)] == ["finally/depends-on"]


def test_a_step_that_needs_the_time_of_finally_is_refused_with_the_numbers(linted: Lint) -> None:
    text = "timeout: 60\nsteps: {a: {exec: x, timeout: 45}}\nfinally: {b: {exec: x, timeout: 20}}"
    [found] = [each for each in linted(text) if each.is_error]
    assert found.rule == "budget/longer-than-run"
    assert "45s" in found.message and "the run has 1m, 20.5s of it for finally" in found.message
    assert found.suggestion is not None and "39s" in found.suggestion


def test_a_limit_of_the_caller_that_leaves_only_time_for_finally_is_refused(linted: Lint) -> None:
    text = "timeout: 60\nsteps: {a: {exec: x, timeout: 5}}\nfinally: {b: {exec: x, timeout: 20}}"
    assert [found.rule for found in linted(text, timeout_ms=23_000) if found.is_error] == []
    [found] = [each for each in linted(text, timeout_ms=20_000) if each.is_error]
    assert "(b) need 20.5s" in found.message and "the caller of the run has 20s" in found.message


def test_a_nested_file_with_a_question_is_refused_in_finally(tmp_path: Path) -> None:
    from shotclock.flows.check.lint import lint
    from shotclock.flows.file.loader import load_file

    (tmp_path / "inner.yaml").write_text("steps: {ask: {type: human-input, prompt: really?, timeout: 5}}\n")
    (tmp_path / "flow.yaml").write_text(STEPS + "finally: {b: {type: workflow, workflow: inner.yaml}}\n")
    findings = lint(load_file(tmp_path / "flow.yaml"))
    assert [(found.rule, "'ask'" in found.message) for found in findings if found.is_error] == [
        ("finally/person", True)
    ]


def test_only_finally_steps_may_use_the_status_of_the_run(linted: Lint) -> None:
    inside = "finally: {b: {exec: 'echo {{ run.status }} {{ run.failure.code }} {{ steps.a.status }}'}}"
    assert linted(STEPS + inside) == []
    outside = linted("steps: {a: {exec: 'echo {{ run.status }}', timeout: 5}}")
    assert [found.rule for found in outside] == ["template/unknown-name"]
    wrong = linted(STEPS + "finally: {b: {exec: 'echo {{ run.failure.cod }}'}}")
    assert [found.suggestion for found in wrong] == ["did you mean 'code'?"]


def test_a_choice_of_steps_keeps_finally_and_is_refused_where_that_needs_a_step_that_is_left_out() -> None:
    text = """
steps: {a: {exec: x, tags: t}, b: {exec: x}}
finally: [{id: one, exec: 'echo {{ %s }}'}, {id: two, exec: 'echo {{ steps.a.status }}'}]
"""
    kept = cut_down(read(text % "run.status"), StepChoice(tags=("t",)))
    assert (list(kept.steps), kept.finally_) == (["a", "one", "two"], ["one", "two"])
    with pytest.raises(Failure, match="one of `finally` always runs, and uses b, which is left out"):
        cut_down(read(text % "outputs.b"), StepChoice(tags=("t",)))


# --- the plan -------------------------------------------------------------------------------------------------------

RESERVES = [
    ("[{exec: x, timeout: 10}, {exec: x, timeout: 20}]", 60, 31_000, ("finally-1", "finally-2")),
    ("{a: {exec: x, timeout: 10}, b: {exec: x, timeout: 20}}", 60, 20_500, ("b",)),
    ("{a: {exec: x}}", 60, 6_000, ("a",)),
    ("{a: {exec: x, timeout: 2, on_fail: {retry: {max: 1}}}}", 60, 5_446, ("a",)),
    ("{a: {exec: x, timeout: 2}}", None, 0, ()),
    ("{a: {exec: x, timeout: 2, on_fail: {run: b}}, b: {exec: x, timeout: 3}}", 60, 5_557, ("a", "b")),
]


def test_a_run_keeps_the_longest_chain_of_its_finally_steps() -> None:
    for text, limit_s, wanted_ms, path in RESERVES:
        with row(text, limit_s):
            timeout = f"timeout: {limit_s}\n" if limit_s else ""
            plan = plan_of(read(f"{timeout}steps: {{w: {{exec: x}}}}\nfinally: {text}"))
            assert (plan.finally_ms, plan.finally_path) == (wanted_ms, path)


def test_steps_that_wait_for_a_slot_count_one_after_another() -> None:
    text = "timeout: 60\nmax_parallelism: 1\nsteps: {w: {exec: x}}\nfinally: "
    assert plan_of(read(text + "{a: {exec: x, timeout: 9}, b: {exec: x, timeout: 9}}")).finally_ms >= 19_000


def test_the_deadlines_are_in_the_order_of_work_clean_up_finally_and_run() -> None:
    workflow = read("timeout: 60\nsteps: {w: {exec: x}}\nfinally: [{exec: x, timeout: 4}, {exec: x, timeout: 8}]")
    bell, last = Deadline(60_000 * NS_PER_MS), finally_reserve(workflow, 60_000)
    deadlines = Deadlines(bell, 5_000, frozenset({"undo"}), last)
    work, clean = deadlines.of("w"), deadlines.of("undo")
    deadlines.begin_finally(30_000 * NS_PER_MS)
    first, second = deadlines.of("finally-1"), deadlines.of("finally-2")
    at_ms = [each and each.at_ns // NS_PER_MS for each in (work, clean, first, second)]
    assert at_ms == [60_000 - last.ms - 5_000, 60_000 - last.ms, 60_000 - 8_500, 60_000]


def test_finally_has_its_reserve_although_the_others_ended_too_late() -> None:
    last = finally_reserve(read("timeout: 60\nsteps: {w: {exec: x}}\nfinally: {a: {exec: x, timeout: 4}}"), 60_000)
    deadlines = Deadlines(Deadline(60_000 * NS_PER_MS), 0, frozenset(), last)
    deadlines.begin_finally(59_000 * NS_PER_MS)
    assert deadlines.of("a") == Deadline((59_000 + last.ms) * NS_PER_MS)


def test_an_extended_run_moves_the_deadlines_of_all_its_parts() -> None:
    last = finally_reserve(read("timeout: 60\nsteps: {w: {exec: x}}\nfinally: {a: {exec: x, timeout: 4}}"), 60_000)
    deadlines = Deadlines(Deadline(60_000 * NS_PER_MS), 5_000, frozenset({"undo"}), last)
    before = [deadlines.of(name) for name in ("w", "undo")]
    became = deadlines.move(Deadline(70_000 * NS_PER_MS))
    assert [became[id(old)] for old in before] == [deadlines.of("w"), deadlines.of("undo")]
    deadlines.begin_finally(0)
    at_end = deadlines.of("a")
    assert at_end == Deadline(70_000 * NS_PER_MS)
    became = deadlines.move(Deadline(80_000 * NS_PER_MS))
    assert became[id(at_end)] is deadlines.of("a") and deadlines.of("a") == Deadline(80_000 * NS_PER_MS)


# --- the run --------------------------------------------------------------------------------------------------------


def test_any_end_starts_a_step_that_waits_for_an_end(run: Run) -> None:
    envelope = run("""
        steps:
          fails: {exec: exit 1, continue_on_failure: false}
          late: {exec: sleep 30, timeout: 100ms, grace: 0}
          skipped: {exec: exit 0, depends_on: fails}
          no: {exec: exit 0, if: "1 > 2"}
          after: {exec: echo ran, depends_on: {fails: ended, late: ended, skipped: ended, no: ended}}
          strict: {exec: echo ran, depends_on: [{fails: ended}, late]}
          both: {exec: echo ran, depends_on: [fails, {fails: ended}]}
    """)
    assert statuses(envelope) == {
        "fails": "failed", "late": "timed_out", "skipped": "skipped", "no": "skipped",
        "after": "succeeded", "strict": "skipped", "both": "skipped",
    }  # fmt: skip


def test_a_failing_finally_step_fails_a_run_and_hides_no_earlier_failure(run: Run) -> None:
    envelope = run("steps: {a: {exec: exit 0}}\nfinally: {b: {exec: exit 5}}")
    assert envelope.error is not None and envelope.error["code"] == "STEPS_FAILED" and envelope.meta["exit_code"] == 3
    assert envelope.error["message"] == "1 of 2 steps failed: b"
    envelope = run("steps: {a: {exec: exit 4}}\nfinally: {b: {exec: exit 5}}")
    assert envelope.error is not None and envelope.error["message"] == "2 of 2 steps failed: a, b"
    late = "timeout: 4\nsteps: {a: {exec: exit 4}}\nfinally: {b: {exec: sleep 30, grace: 0}}"
    envelope = run(late)
    assert envelope.error is not None and envelope.error["code"] == "STEPS_FAILED", envelope
    assert step(envelope, "b")["status"] == "timed_out"
    envelope = run(late.replace("exit 4", "exit 0"))
    assert envelope.error is not None and envelope.error["code"] == "TIMEOUT", envelope


def test_a_hanging_finally_step_takes_no_time_of_those_behind_it(run: Run) -> None:
    envelope = run("""
        timeout: 4
        steps: {a: {exec: exit 0}}
        finally: [{id: hangs, exec: sleep 30, grace: 0}, {id: last, exec: echo ran, timeout: 1}]
    """)
    assert statuses(envelope) == {"a": "succeeded", "hangs": "timed_out", "last": "succeeded"}


def test_reactions_inside_finally_work_and_those_of_defaults_do_not_cross(run: Run) -> None:
    envelope = run("""
        defaults: {on_fail: {run: note}}
        steps: {a: {exec: exit 1}, note: {exec: echo noted}}
        finally: {b: {exec: exit 1, on_fail: {run: c}}, c: {exec: "echo {{ outputs.note }}"}, d: {exec: exit 0}}
        outputs: {from_last: "{{ outputs.c }}"}
    """)
    assert statuses(envelope) == {
        "a": "failed", "note": "succeeded", "b": "failed", "c": "succeeded", "d": "succeeded",
    }  # fmt: skip
    assert envelope.data["outputs"] == {"from_last": "noted"}  # type: ignore[index]


@pytest.mark.slow
def test_a_nested_run_finishes_when_the_run_around_it_stops(run: Run, tmp_path: Path) -> None:
    (tmp_path / "inner.yaml").write_text(
        "steps: {hang: {exec: 'sleep 30', grace: 0}}\nfinally: {last: {exec: 'echo inner >> audit', timeout: 2}}\n"
    )
    envelope = run("""
        timeout: 8
        steps: {in: {type: workflow, workflow: inner.yaml}}
        finally: {last: {exec: "echo outer >> audit", timeout: 1}}
    """)
    assert (tmp_path / "audit").read_text().split() == ["inner", "outer"], envelope
    assert envelope.error is not None and envelope.error["code"] == "TIMEOUT"


def test_reports_name_the_finally_steps_and_their_failure(run: Run, store: Store) -> None:
    run("steps: {a: {exec: exit 0}}\nfinally: {b: {exec: exit 5}}", run_id="reported")
    stored = store.runs.get("reported")
    assert stored is not None
    made = report_of(stored, store.runs.steps("reported"), now=stored.created_at, is_alive=False)
    assert "| ✗ | `b` (finally) | failed |" in to_markdown(made)
    [suite] = xml.fromstring(to_junit(made))
    cases = {case.get("name"): (case.get("classname"), case.find("failure") is not None) for case in suite}
    assert cases["a"] == ("flow", False) and cases["b"] == ("flow.finally", True)
    assert made.critical_path == ("a", "b")
    assert ", finally" in to_html(made)
