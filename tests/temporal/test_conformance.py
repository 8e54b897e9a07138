"""One suite for both engines: the same file gives the same answer, wherever its steps are carried out."""

import json
import random
import signal
import sys
import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest

from tests.processes import is_running
from tests.temporal.conftest import Program, Runs, steps_of, wait_until

pytestmark = pytest.mark.slow

LARGE_WITHIN_S = 100.0


@pytest.fixture
def runs(on_either: Runs) -> Runs:
    return on_either


Valid = Callable[[dict[str, Any]], dict[str, Any]]
# For what tests/flows proves of the engine here: on it, such a file runs in `make soak` only.
HERE_IN_SOAK = [pytest.param("embedded", marks=pytest.mark.soak), "temporal"]
also_here_in_soak = pytest.mark.parametrize("on_either", HERE_IN_SOAK, indirect=True)


@also_here_in_soak
def test_steps_run_in_order_and_hand_on_what_they_said(runs: Runs, validate_envelope: Valid) -> None:
    code, envelope = runs.run(
        """
        timeout: 60
        inputs: {who: {type: string}}
        steps:
          a: {type: command, exec: "echo '{\\"n\\": 1}'"}
          b: {type: command, exec: "echo {{ outputs.a.n }} {{ inputs.who }}; echo b >> order", depends_on: [a]}
          c: {type: command, exec: "exit 1", depends_on: [a], continue_on_failure: true}
          d: {type: command, exec: "cat order; test -n \\"$SHOTCLOCK_REMAINING_MS\\" && echo ok", depends_on: [b, c]}
        outputs: {said: "{{ outputs.b }}", nothing: "{{ outputs.c }}"}
        """,
        "--input",
        "who=you",
        "--run-id",
        f"order-{time.monotonic_ns()}",
    )
    validate_envelope(envelope)
    assert code == 0 and envelope["ok"], envelope
    assert envelope["data"]["completed"] == ["a", "b", "d"]
    assert envelope["data"]["outputs"] == {"said": "1 you", "nothing": None}
    assert [note["code"] for note in envelope["warnings"]] == ["OUTPUT_MISSING"]
    assert envelope["data"]["steps"]["d"]["output"] == "b\nok"
    assert envelope["meta"]["timeout_ms"] == 60_000 and 0 < envelope["meta"]["remaining_ms"] < 60_000


@also_here_in_soak
def test_a_list_of_steps_has_its_files_its_matrix_and_its_named_outputs(runs: Runs, validate_envelope: Valid) -> None:
    (runs.folder / "values.env").write_text("WHERE='here; false'\nWHO=file\n")
    code, envelope = runs.run(
        """
        timeout: 60
        env_file: values.env
        steps:
          - id: build
            env: {WHO: step}
            exec: echo "where=$WHERE" >> $SHOTCLOCK_OUTPUT; echo "who=$WHO" >> $SHOTCLOCK_OUTPUT
          - {id: no, if: "1 > 2", exec: "exit 1"}
          - id: each
            matrix: {os: [a, b], n: [1, 2], exclude: [{os: a, n: 2}]}
            exec: echo {{ matrix.os }}{{ item.n }} {{ outputs.build.where }} {{ outputs.build.who }}
          - {id: cut, exec: "echo nothing >> $SHOTCLOCK_OUTPUT", continue_on_failure: true}
          - echo end
        """,
        "--run-id",
        f"list-{time.monotonic_ns()}",
    )
    validate_envelope(envelope)
    assert code == 0 and envelope["ok"], envelope
    steps = envelope["data"]["steps"]
    assert steps["build"]["output"] == {"where": "here; false", "who": "step"}
    assert steps["no"]["status"] == "skipped"
    assert steps["each"]["output"] == [f"{each} here; false step" for each in ("a1", "b1", "b2")]
    assert steps["cut"]["error"]["code"] == "OUTPUT_INVALID" and steps["cut"]["output"] is None
    assert steps["step-5"]["output"] == "end"


def printable(size: int, seed: int) -> bytes:
    """About so many bytes of UTF-8 without a line's end behind them: of every width, with all that JSON escapes."""
    letters = random.Random(seed).choices('aZ09 \n\r\t"\\\x00\x7féж€\ue000\ufeff😀', k=min(size, 40_000))
    block = "".join(letters).encode()
    whole = (block * (size // len(block) + 1))[:size] if block else b""
    return whole.decode(errors="ignore").rstrip("\n").encode()


MB = 1_000_000
ANY = random.Random(21)
SOME = (0, 2**20, 2**20 + 1, ANY.randrange(2**20, 5 * MB), ANY.randrange(61 * MB, 70 * MB))
MORE = (60 * MB - 8, 60 * MB + 8, 2**26 + 8, *(ANY.randrange(70 * MB) for _ in range(5)))


@pytest.mark.parametrize("sizes", [SOME, *(pytest.param((size,), marks=pytest.mark.soak) for size in MORE)])
def test_the_next_step_reads_what_a_command_printed_or_the_step_fails(runs: Runs, sizes: tuple[int, ...]) -> None:
    lines = ["timeout: 5m", "steps:"]
    for number, size in enumerate(sizes):
        (runs.folder / f"printed{number}").write_bytes(printable(size, size))
        lines += [
            f"  print{number}: {{type: command, exec: cat printed{number}, output_format: text}}",
            f'  read{number}: {{type: command, exec: cat > read{number}, stdin: "{{{{ outputs.print{number} }}}}",',
            f"    depends_on: print{number}}}",
        ]
    _, envelope = runs.start("\n".join(lines)).ended(LARGE_WITHIN_S)
    for number, size in enumerate(sizes):
        printed = (runs.folder / f"printed{number}").read_bytes()
        step, read = (envelope["data"]["steps"][f"{name}{number}"] for name in ("print", "read"))
        # A workflow of Temporal reads each value in one go.
        is_too_large = runs.on is not None and len(json.dumps(printed.decode())) > 10 * MB
        if len(printed) > 60 * MB or is_too_large:
            assert (step["status"], read["status"], step["output"]) == ("failed", "skipped", None), size
            assert step["error"]["code"] == "OUTPUT_INVALID", size
        else:
            assert (step["status"], read["status"]) == ("succeeded", "succeeded"), (size, step["error"], read["error"])
            assert (runs.folder / f"read{number}").read_bytes() == printed, size
            assert step["output"].encode() == printed and "warnings" not in step, size


def test_steps_that_wait_for_nothing_begin_in_the_order_of_the_file(runs: Runs) -> None:
    code, envelope = runs.run(
        """
        timeout: 60
        max_parallelism: 1
        steps:
          zeta: {type: command, exec: "echo zeta >> order"}
          mid: {type: command, exec: "echo mid >> order"}
          alpha: {type: command, exec: "echo alpha >> order"}
        """
    )
    assert code == 0 and (runs.folder / "order").read_text().split() == ["zeta", "mid", "alpha"], envelope
    assert list(envelope["data"]["steps"]) == envelope["data"]["completed"] == ["zeta", "mid", "alpha"], envelope


@also_here_in_soak
def test_every_change_is_an_event_and_in_order_before_the_line_of_the_run(runs: Runs) -> None:
    """Steps are shorter than the pause between two looks at an engine, and the last one ends with its run."""
    runs.write("steps: {one: {type: command, exec: echo one}}", "inner.yaml")
    steps = ["a", "b", "c", "d"]
    chain = "".join(
        f"  {name}: {{type: command, exec: sleep 0.1, depends_on: [{before}]}}\n" for before, name in pairwise(steps)
    )
    flow = f"""steps:
  a: {{type: command, exec: "true"}}
{chain}  inner: {{type: workflow, workflow: inner.yaml, depends_on: [d]}}
  fails: {{type: command, exec: exit 1, depends_on: [inner]}}
  last: {{type: command, exec: "true", depends_on: [fails]}}
"""
    code, envelope = runs.run(flow, "--events", "events", "--run-id", f"events-{time.monotonic_ns()}")
    assert code == 3 and not envelope["warnings"], envelope
    written = [json.loads(line) for line in (runs.folder / "events").read_text().splitlines()]
    told = [(line["event"], line.get("id"), line.get("status")) for line in written]
    order = [("step", name, status) for name in steps for status in ("running", "succeeded")]
    order += [("step", "inner", "running"), ("step", "inner.one", "running"), ("step", "inner.one", "succeeded")]
    order += [("step", "inner", "succeeded"), ("step", "fails", "running"), ("step", "fails", "failed")]
    assert told == [*order, ("step", "last", "skipped"), ("run", None, None)], told


@also_here_in_soak
def test_what_waits_for_a_failure_is_skipped_and_told_why(runs: Runs, validate_envelope: Valid) -> None:
    code, envelope = runs.run("""
        steps:
          bad: {type: command, exec: "echo said; echo why >&2; exit 4"}
          behind: {type: command, exec: "touch behind", depends_on: [bad]}
          last: {type: command, exec: "touch last", depends_on: [behind]}
          unwanted: {type: command, exec: "touch unwanted", if: "false"}
          either: {type: command, exec: "echo either", depends_on: ["bad|other"]}
          other: {type: command, exec: "echo other"}
          tolerated: {type: command, exec: "exit 1", continue_on_failure: true}
          after: {type: command, exec: "echo {{ steps.tolerated.status }}", depends_on: [tolerated]}
        """)
    validate_envelope(envelope)
    assert code == 3 and envelope["error"]["code"] == "STEPS_FAILED"
    steps = envelope["data"]["steps"]
    assert steps_of(envelope) == {
        "bad": "failed", "behind": "skipped", "last": "skipped", "unwanted": "skipped", "either": "succeeded",
        "other": "succeeded", "tolerated": "failed", "after": "succeeded",
    }  # fmt: skip
    assert (steps["behind"]["reason"], steps["behind"]["cause"]) == ("dependency_failed", "bad")
    assert (steps["last"]["reason"], steps["last"]["cause"]) == ("dependency_failed", "bad")
    assert steps["unwanted"]["reason"] == "condition"
    assert steps["bad"]["error"]["code"] == "COMMAND_FAILED" and steps["bad"]["output"] == "said"
    assert steps["bad"]["error"]["context"]["stderr"] == "why\n"
    assert steps["after"]["output"] == "failed"
    assert not list(runs.folder.glob("behind*")) and not (runs.folder / "unwanted").exists()


@also_here_in_soak
def test_a_step_that_hangs_is_killed_with_all_it_started(runs: Runs, validate_envelope: Valid) -> None:
    code, envelope = runs.run("""
        steps:
          hangs:
            {type: command, timeout: 1, grace: 300ms,
             exec: "trap '' TERM; setsid sleep 300 & echo $! $$ > pids; echo so far; while :; do sleep 1; done"}
          after: {type: command, exec: "echo after", depends_on: [hangs]}
        """)
    validate_envelope(envelope)
    hung = envelope["data"]["steps"]["hangs"]
    assert code == 3 and steps_of(envelope) == {"hangs": "timed_out", "after": "skipped"}
    assert hung["error"]["code"] == "TIMEOUT" and hung["ending"] == "killed" and hung["output"] == "so far"
    clock = hung["error"]["context"]["clock"]
    assert (clock["kind"], clock["owner"], clock["limit_ms"]) == ("timeout", "step hangs", 1000)
    assert hung["side_effects"] == envelope["meta"]["side_effects"] == "unknown"
    assert not any(is_running(int(pid)) for pid in (runs.folder / "pids").read_text().split())


@also_here_in_soak
def test_the_deadline_of_the_run_ends_it(runs: Runs, validate_envelope: Valid) -> None:
    code, envelope = runs.run("""
        timeout: 3
        steps:
          quick: {type: command, exec: "echo quick"}
          slow: {type: command, exec: "echo begun; sleep 300", grace: 200ms, depends_on: [quick]}
          never: {type: command, exec: "echo never", depends_on: [slow]}
        """)
    validate_envelope(envelope)
    assert code == 10 and envelope["error"]["code"] == "TIMEOUT" and envelope["meta"]["ending"] == "killed"
    assert envelope["error"]["context"]["clock"]["owner"] == "run flow"
    assert envelope["error"]["context"]["clock"]["limit_ms"] == 3000
    assert steps_of(envelope) == {"quick": "succeeded", "slow": "timed_out", "never": "skipped"}
    slow = envelope["data"]["steps"]["slow"]
    assert slow["error"]["context"]["clock"]["owner"] == "run flow" and slow["output"] == "begun"
    assert 2_000 <= envelope["meta"]["duration_ms"] <= 6_000


@also_here_in_soak
def test_a_step_is_tried_again_as_its_file_says(runs: Runs, validate_envelope: Valid) -> None:
    code, envelope = runs.run("""
        steps:
          flaky:
            type: command
            exec: "echo x >> tries; test $(wc -l < tries) -ge 3"
            on_fail: {retry: {max: 3, backoff: {delay_ms: 50}}}
          hopeless: {type: command, exec: "exit 1", on_fail: {retry: {max: 1, backoff: {delay_ms: 10}}}}
        """)
    validate_envelope(envelope)
    steps = envelope["data"]["steps"]
    assert code == 3 and (steps["flaky"]["status"], steps["flaky"]["attempts"]) == ("succeeded", 3)
    assert (steps["hopeless"]["status"], steps["hopeless"]["attempts"]) == ("failed", 2)
    assert len((runs.folder / "tries").read_text().split()) == 3


@also_here_in_soak
def test_items_are_done_one_by_one_and_going_back_repeats(runs: Runs, validate_envelope: Valid) -> None:
    code, envelope = runs.run("""
        steps:
          list: {type: command, exec: "echo '[1, 2, 3]'", for_each: true}
          each: {type: command, exec: "echo item {{ outputs.list }}", depends_on: [list]}
          counts: {type: command, exec: "echo x >> visits"}
          back: {type: command, exec: "test $(wc -l < visits) -ge 2", depends_on: [counts], on_fail: {goto: counts}}
        """)
    validate_envelope(envelope)
    assert code == 0, envelope
    assert envelope["data"]["steps"]["each"]["output"] == ["item 1", "item 2", "item 3"]
    assert envelope["data"]["steps"]["back"]["loops"] == 1
    assert len((runs.folder / "visits").read_text().split()) == 2


@also_here_in_soak
def test_a_file_runs_inside_another_and_inside_its_time(runs: Runs, validate_envelope: Valid) -> None:
    runs.write(
        """
        inputs: {n: {type: number}}
        steps:
          one: {type: command, exec: "echo {{ inputs.n }} $FROM_STEP"}
        outputs: {got: "{{ outputs.one }}"}
        """,
        "inner.yaml",
    )
    runs.write(
        """
        steps:
          slow: {type: command, exec: "sleep 300", grace: 100ms}
        """,
        "slow.yaml",
    )
    code, envelope = runs.run("""
        steps:
          nested: {type: workflow, workflow: inner.yaml, inputs: {n: 7}, env: {FROM_STEP: here}}
          items: {type: workflow, workflow: inner.yaml, inputs: {n: "{{ item }}"}, for_each: [1, 2]}
          after: {type: command, exec: "echo {{ outputs.nested.got }}", depends_on: [nested]}
          bounded: {type: workflow, workflow: slow.yaml, timeout: 3}
        """)
    validate_envelope(envelope)
    steps = envelope["data"]["steps"]
    assert steps["after"]["output"] == "7 here", envelope
    assert steps["items"]["output"] == [{"got": "1"}, {"got": "2"}]
    assert code == 3 and (steps["bounded"]["status"], steps["bounded"]["error"]["code"]) == ("timed_out", "TIMEOUT")
    assert steps["bounded"]["error"]["context"]["rule"] == "workflow/timeout"
    assert 2_000 <= steps["bounded"]["duration_ms"] <= 8_000


@also_here_in_soak
def test_overtime_is_granted_as_the_file_says(runs: Runs, validate_envelope: Valid) -> None:
    code, envelope = runs.run("""
        timeout: 60
        steps:
          longer:
            type: command
            exec: "sleep 2; echo done"
            timeout: 1500ms
            soft: 500ms
            overtime: {command: "echo '{\\"extend\\": \\"5s\\"}'", budget: 10s, hard_extends: true}
        """)
    validate_envelope(envelope)
    longer = envelope["data"]["steps"]["longer"]
    assert code == 0 and longer["output"] == "done", envelope
    assert longer["overtime"][0]["granted_ms"] == 5000


@also_here_in_soak
def test_a_stopped_run_keeps_what_was_said_and_cleans_up(runs: Runs, validate_envelope: Valid) -> None:
    running = runs.start("""
        timeout: 120
        steps:
          works:
            {type: command, exec: "echo begun; echo $$ > pid; sleep 300", grace: 300ms, on_fail: {run: [tidy]}}
          tidy: {type: command, exec: "touch tidied", timeout: 5}
          after: {type: command, exec: "touch after", depends_on: [works]}
        """)
    (pid,) = runs.wait_for("pid")
    running.process.send_signal(signal.SIGTERM)
    code, envelope = running.ended()
    validate_envelope(envelope)
    assert code == 143 and envelope["error"]["code"] == "CANCELLED"
    assert steps_of(envelope) == {"works": "cancelled", "tidy": "succeeded", "after": "skipped"}
    assert envelope["data"]["steps"]["works"]["output"] == "begun"
    assert envelope["data"]["steps"]["works"]["ending"] == "killed"
    assert (runs.folder / "tidied").exists() and not (runs.folder / "after").exists()
    assert not is_running(int(pid))


@also_here_in_soak
def test_a_question_parks_the_run_and_its_answer_goes_on(runs: Runs, validate_envelope: Valid) -> None:
    code, envelope = runs.run(
        """
        steps:
          first: {type: command, exec: "echo x >> first"}
          ask: {type: human-input, prompt: "Which one?", depends_on: [first]}
          then: {type: command, exec: "echo got {{ outputs.ask }}", depends_on: [ask]}
        """,
        "--budget",
        "1s",
        "--run-id",
        f"asks-{time.monotonic_ns()}",
    )
    validate_envelope(envelope)
    data = envelope["data"]
    assert code == 14 and envelope["error"]["code"] == "INCOMPLETE" and data["state"] == "paused"
    assert [waits["title"] for waits in data["waiting"]] == ["Which one?"]
    proposal = data["waiting"][0]["proposal_id"]
    code, listed = runs.call("inbox", "list")
    assert code == 0 and proposal in [each["id"] for each in listed["data"]["proposals"]], listed
    code, decided = runs.call("inbox", "approve", proposal, "--answer", "this one")
    assert code == 0, decided
    code, decided = runs.call("inbox", "approve", proposal, "--answer", "another")
    assert code in (5, 6), decided  # decided, or gone with what its run waited for
    code, envelope = runs.run(None, "--resume", data["run_id"])
    validate_envelope(envelope)
    assert code == 0 and envelope["data"]["steps"]["then"]["output"] == "got this one", envelope
    assert len((runs.folder / "first").read_text().split()) == 1
    assert envelope["data"]["steps"]["ask"]["attempts"] == 1


@also_here_in_soak
def test_tags_select_steps_and_what_they_need_also_when_the_run_is_resumed(
    runs: Runs, validate_envelope: Valid
) -> None:
    # A secret makes a run here read its file again; on an engine it would be refused.
    secret = "A" if runs.on else "MY_TOKEN"
    code, envelope = runs.run(
        """
        env: {NAME: "a-literal-secret"}
        steps:
          other: {type: command, exec: "echo other >> did", tags: [docs]}
          fetch: {type: command, exec: "echo fetch >> did"}
          named: {type: command, exec: "echo named >> did; exit 7", continue_on_failure: true}
          build: {type: command, exec: "echo build >> did; exit 1", depends_on: [fetch, named], tags: [ship, all],
                  if: "steps.named.exit_code == 7",
                  on_fail: {run: tidy}, continue_on_failure: true}
          ask: {type: human-input, prompt: "Which one?", depends_on: build, tags: ship}
          tidy: {type: command, exec: "echo tidy >> did"}
        outputs: {answer: "{{ outputs.ask }}", other: "{{ outputs.other }}"}
        """.replace("NAME", secret),
        *("--tags", "ship,all", "--budget", "1s", "--run-id", f"tagged-{time.monotonic_ns()}"),
    )
    validate_envelope(envelope)
    left_out = [] if runs.on else ["other"]  # Temporal gets the chosen steps only
    assert code == 14 and sorted(envelope["data"]["steps"].keys() - left_out) == [
        *("ask", "build", "fetch", "named", "tidy")
    ], envelope
    assert envelope["data"]["skipped"] == left_out
    runs.call("inbox", "approve", envelope["data"]["waiting"][0]["proposal_id"], "--answer", "this one")
    code, envelope = runs.run(None, "--resume", envelope["data"]["run_id"])
    assert code == 0 and envelope["data"]["outputs"] == {"answer": "this one"}, envelope
    assert sorted((runs.folder / "did").read_text().split()) == ["build", "fetch", "named", "tidy"]
    code, envelope = runs.run("steps: {a: {type: command, exec: x, tags: [b]}}", "--tags", "c")
    assert code == 2 and "the tags of this file: b" in envelope["error"]["message"]


@also_here_in_soak
def test_a_question_of_a_file_inside_another_parks_both_and_work_inside_does_not(
    runs: Runs, validate_envelope: Valid
) -> None:
    runs.write(
        """
        steps:
          works: {type: command, exec: "sleep 2"}
          ask: {type: human-input, prompt: "Inside?", depends_on: [works]}
        outputs: {answer: "{{ outputs.ask }}"}
        """,
        "inner.yaml",
    )
    code, envelope = runs.run(
        """
        steps:
          nested: {type: workflow, workflow: inner.yaml}
          then: {type: command, exec: "echo {{ outputs.nested.answer }}", depends_on: [nested]}
        """,
        *("--budget", "700ms", "--run-id", f"inside-{time.monotonic_ns()}"),
    )
    validate_envelope(envelope)
    assert code == 14, envelope
    (waits,) = envelope["data"]["waiting"]  # not before the inner step has worked for longer than the budget
    assert waits["title"] == "Inside?"
    code, decided = runs.call("inbox", "approve", waits["proposal_id"], "--answer", "well")
    assert code == 0, decided
    code, envelope = runs.run(None, "--resume", envelope["data"]["run_id"])
    validate_envelope(envelope)
    assert code == 0 and envelope["data"]["steps"]["then"]["output"] == "well", envelope


@also_here_in_soak
def test_a_question_that_nobody_answers_has_its_default(runs: Runs, validate_envelope: Valid) -> None:
    code, envelope = runs.run("""
        steps:
          ask: {type: human-input, prompt: "Well?", timeout: 2, default: "no"}
          then: {type: command, exec: "echo got {{ outputs.ask }}", depends_on: [ask]}
          strict: {type: human-input, prompt: "Really?", timeout: 2}
        """)
    validate_envelope(envelope)
    steps = envelope["data"]["steps"]
    assert code == 3 and steps["then"]["output"] == "got no", envelope
    assert steps["ask"]["warnings"][0]["code"] == "HUMAN_DEFAULTED"
    assert (steps["strict"]["status"], steps["strict"]["error"]["code"]) == ("timed_out", "TIMEOUT")


@also_here_in_soak
def test_a_question_ends_with_its_run(runs: Runs, validate_envelope: Valid) -> None:
    code, envelope = runs.run(
        """
        timeout: 4
        steps:
          ask: {type: human-input, prompt: "Anybody?", default: "no"}
          then: {type: command, exec: "touch then", depends_on: [ask]}
        """,
        *("--budget", "0s"),
    )
    validate_envelope(envelope)
    assert code == 10 and envelope["error"]["code"] == "TIMEOUT", envelope
    assert steps_of(envelope) == {"ask": "timed_out", "then": "skipped"}
    assert envelope["data"]["steps"]["ask"]["error"]["context"]["clock"]["owner"] == "run flow"
    assert 3_000 <= envelope["meta"]["duration_ms"] <= 7_000 and not (runs.folder / "then").exists()


@also_here_in_soak
@pytest.mark.parametrize("verdict", ["approve", "reject", "approve, but the script has changed"])
def test_a_step_that_asks_first_runs_only_after_a_yes(runs: Runs, validate_envelope: Valid, verdict: str) -> None:
    script = runs.folder / "deploy.sh"
    script.write_text("echo x >> deployed; echo done")
    verdict, _, changes = verdict.partition(",")
    code, envelope = runs.run(
        """
        steps:
          deploy: {type: command, exec: "sh deploy.sh", approval: true}
          after: {type: command, exec: "echo after", depends_on: [deploy]}
        """,
        "--budget",
        "1s",
        "--run-id",
        f"approval-{verdict}-{time.monotonic_ns()}",
    )
    validate_envelope(envelope)
    assert code == 14 and not (runs.folder / "deployed").exists(), envelope
    proposal = envelope["data"]["waiting"][0]["proposal_id"]
    _, report = runs.call("report", envelope["data"]["run_id"])
    waits = {step["id"]: step["waits_for"] for step in report["data"]["steps"]}
    assert waits == {"deploy": [proposal], "after": []}, report
    if changes:  # before the decision: an engine goes on with the run at once
        script.write_text("echo evil >> deployed")
    code, decided = runs.call("inbox", verdict, proposal)
    assert code == 0, decided
    code, envelope = runs.run(None, "--resume", envelope["data"]["run_id"])
    validate_envelope(envelope)
    deploy = envelope["data"]["steps"]["deploy"]
    if changes:
        assert code == 3 and deploy["error"]["code"] == "ACTION_CHANGED" and not (runs.folder / "deployed").exists()
    elif verdict == "approve":
        assert code == 0 and deploy["output"] == "done" and (runs.folder / "deployed").read_text() == "x\n"
    else:
        assert code == 3 and deploy["error"]["code"] == "PROPOSAL_REJECTED" and not (runs.folder / "deployed").exists()
        assert deploy["error"]["context"]["rule"] == "approval/rejected" and deploy["side_effects"] == "none"
        assert steps_of(envelope)["after"] == "skipped"


def test_a_run_that_has_ended_answers_again_and_its_id_is_taken(runs: Runs) -> None:
    run_id = f"once-{time.monotonic_ns()}"
    code, first = runs.run("steps: {a: {type: command, exec: exit 3}}", "--run-id", run_id)
    again_code, again = runs.run(None, "--resume", run_id)
    assert (code, again_code) == (3, 3) and first == again
    code, refused = runs.run("steps: {a: {type: command, exec: echo a}}", "--run-id", run_id)
    assert code == 6 and refused["error"]["code"] == "RUN_TAKEN"
    code, missing = runs.run(None, "--resume", "no-such-run")
    assert code == 5 and missing["error"]["code"] == "RUN_NOT_FOUND"


@also_here_in_soak
def test_a_run_is_reported_while_it_runs_and_after_it(runs: Runs) -> None:
    run_id = f"told-{time.monotonic_ns()}"
    running = runs.start(
        """
        timeout: 100
        steps:
          a: {type: command, exec: "echo a"}
          b: {type: command, exec: "touch begun; while test ! -e go; do sleep 0.2; done", depends_on: [a]}
        """,
        "--run-id",
        run_id,
    )
    wait_until((runs.folder / "begun").exists, "the second step")

    def shown() -> dict[str, str]:
        code, told = runs.call("report", run_id)
        assert code == 0, told
        return {step["id"]: step["status"] for step in told["data"]["steps"]}

    assert shown() == {"a": "succeeded", "b": "running"}
    (runs.folder / "go").touch()
    assert running.ended()[0] == 0
    assert shown() == {"a": "succeeded", "b": "succeeded"}


def ordered(runs: Runs, *words: str) -> dict[str, Any]:
    """Give an order about a step that runs, as soon as it is heard."""

    def told() -> dict[str, Any] | None:
        code, envelope = runs.call("job", *words)
        return envelope if code == 0 else None

    return wait_until(told, f"job {' '.join(words)}")


def test_an_operator_gives_a_step_more_time_but_never_more_than_the_run_has(
    runs: Runs, validate_envelope: Valid
) -> None:
    run_id = f"extended-{time.monotonic_ns()}"
    running = runs.start(
        """
        timeout: 40
        steps:
          longer: {type: command, exec: "touch begun; while test ! -e go; do sleep 0.2; done; echo done", timeout: 12}
        """,
        *("--run-id", run_id),
    )
    wait_until((runs.folder / "begun").exists, "the step")
    (extended,) = ordered(runs, "extend", run_id, "10s", "--step", "longer")["data"]["extended"]
    assert extended["granted_ms"] == 10_000 and 12_000 < extended["remaining_ms"] <= 22_000
    (extended,) = ordered(runs, "extend", run_id, "1h", "--step", "longer")["data"]["extended"]
    assert extended["granted_ms"] < 20_000 and extended["remaining_ms"] < 40_000
    (runs.folder / "go").touch()
    code, envelope = running.ended()
    validate_envelope(envelope)
    longer = envelope["data"]["steps"]["longer"]
    assert code == 0 and longer["output"] == "done" and len(longer["overtime"]) == 2, envelope
    assert longer["timeout_ms"] > 22_000


WAITS_FOR_GO = "touch begun; while test ! -e go; do sleep 0.2; done; echo done"


def test_a_whole_run_is_given_more_time_and_so_are_its_steps(runs: Runs, validate_envelope: Valid) -> None:
    run_id = f"longer-{time.monotonic_ns()}"
    began = time.monotonic()
    running = runs.start(
        f"""
        timeout: 10
        steps:
          slow: {{type: command, exec: "{WAITS_FOR_GO}", timeout: 120}}
          next: {{type: command, exec: "echo $SHOTCLOCK_REMAINING_MS", depends_on: [slow]}}
        """,
        *("--run-id", run_id, "--force"),
    )
    wait_until((runs.folder / "begun").exists, "the step")
    code, told = runs.call("job", "extend", run_id, "60s")
    assert code == 0, told
    (extended,) = told["data"]["extended"]
    assert (extended["name"], extended["granted_ms"], extended["timeout_ms"]) == ("run flow", 60_000, 70_000)
    assert 55_000 < extended["remaining_ms"] <= 70_000
    wait_until(lambda: time.monotonic() - began > 11.5, "the deadline that it had")
    (runs.folder / "go").touch()
    code, envelope = running.ended()
    validate_envelope(envelope)
    assert code == 0 and envelope["data"]["steps"]["slow"]["output"] == "done", envelope
    assert 20_000 < int(envelope["data"]["steps"]["next"]["output"]) < 60_000
    assert envelope["meta"]["timeout_ms"] == 70_000 and envelope["meta"]["overtime"]["granted_ms"] == 60_000
    code, told = runs.call("job", "extend", run_id, "60s")
    assert code == 5, told  # it has ended


@also_here_in_soak
def test_a_long_run_with_a_short_step_is_extended_as_well(runs: Runs) -> None:
    run_id = f"long-{time.monotonic_ns()}"
    running = runs.start(
        f'{{timeout: 3h, steps: {{short: {{type: command, exec: "{WAITS_FOR_GO}", timeout: 60}}}}}}', "--run-id", run_id
    )
    wait_until((runs.folder / "begun").exists, "the step")
    code, told = runs.call("job", "extend", run_id, "30m")
    assert code == 0 and told["data"]["extended"][0]["granted_ms"] == 1_800_000, told
    (runs.folder / "go").touch()
    assert running.ended()[0] == 0


@also_here_in_soak
def test_a_run_inside_another_follows_it_and_has_never_more(runs: Runs, validate_envelope: Valid) -> None:
    runs.write(f'steps: {{slow: {{type: command, exec: "{WAITS_FOR_GO}", timeout: 100}}}}', "inner.yaml")
    run_id = f"outer-{time.monotonic_ns()}"
    began = time.monotonic()
    running = runs.start(
        """
        timeout: 10
        steps:
          nested: {type: workflow, workflow: inner.yaml}
        """,
        *("--run-id", run_id, "--force"),
    )
    wait_until((runs.folder / "begun").exists, "the step inside")
    code, refused = runs.call("job", "extend", f"{run_id}.nested", "60s")
    assert code != 0 and refused["error"]["code"] in ("NOT_EXTENDABLE", "RUN_NOT_FOUND"), refused
    assert runs.call("job", "extend", run_id, "30s")[0] == 0
    wait_until(lambda: time.monotonic() - began > 11.5, "the deadline that it had")
    (runs.folder / "go").touch()
    code, envelope = running.ended()
    validate_envelope(envelope)
    assert code == 0, envelope


def test_a_run_gets_no_more_than_its_caller_has(runs: Runs) -> None:
    run_id = f"within-{time.monotonic_ns()}"
    runs.write(f'{{timeout: 20, steps: {{slow: {{type: command, exec: "{WAITS_FOR_GO}", timeout: 20}}}}}}')
    words = ["run", "flow.yaml", "--run-id", run_id, "--json", "--force", *runs.where]
    outer = ["exec", "--timeout", "70s", "--", sys.executable, "-m", "shotclock"]
    program = Program([*outer, *words], runs.folder, "outer")
    try:
        wait_until((runs.folder / "begun").exists, "the step")
        code, told = runs.call("job", "extend", run_id, "1h")
        assert code == 0, told
        assert 20_000 < told["data"]["extended"][0]["granted_ms"] < 50_000, told
        code, told = runs.call("job", "extend", run_id, "1h")
        assert code == 4 and told["error"]["code"] == "NOT_EXTENDABLE", told
        assert told["error"]["message"].startswith("run flow has all the time that its caller"), told
        (runs.folder / "go").touch()
        assert program.ended()[0] == 0
    finally:
        program.kill()


@also_here_in_soak
def test_an_operator_winds_a_step_down_and_what_it_says_is_kept(runs: Runs, validate_envelope: Valid) -> None:
    run_id = f"wound-{time.monotonic_ns()}"
    running = runs.start(
        """
        timeout: 60
        steps:
          works: {type: command, exec: "trap 'echo saved; exit 0' TERM; touch begun; while :; do sleep 0.2; done"}
          after: {type: command, exec: "echo after", depends_on: [works]}
        """,
        *("--run-id", run_id),
    )
    wait_until((runs.folder / "begun").exists, "the step")
    (stopping,) = ordered(runs, "stop", run_id, "--step", "works")["data"]["stopping"]
    assert stopping["name"] == "step works"
    code, envelope = running.ended()
    validate_envelope(envelope)
    assert code == 0 and envelope["data"]["steps"]["works"]["output"] == "saved", envelope
    assert steps_of(envelope) == {"works": "succeeded", "after": "succeeded"}


def test_a_run_that_is_wound_down_starts_nothing_any_more(runs: Runs, validate_envelope: Valid) -> None:
    run_id = f"down-{time.monotonic_ns()}"
    running = runs.start(
        """
        timeout: 60
        steps:
          works:
            type: command
            exec: "trap 'echo saved; exit 0' TERM; touch begun; while :; do sleep 0.2; done"
            timeout: 30
          after: {type: command, exec: "touch after", depends_on: [works]}
        """,
        *("--run-id", run_id),
    )
    wait_until((runs.folder / "begun").exists, "the step")
    if runs.on is not None:  # a run hears it at once, a step on a worker once it has been told of
        wait_until(
            lambda: runs.call("job", "extend", run_id, "1s", "--step", "works")[0] == 0, "the worker of the step"
        )
    ordered(runs, "stop", run_id)
    code, envelope = running.ended()
    validate_envelope(envelope)
    assert code == 143 and envelope["error"]["code"] == "CANCELLED", envelope
    assert steps_of(envelope) == {"works": "succeeded", "after": "skipped"} and not (runs.folder / "after").exists()
