"""An ended run is continued by a new one: what had succeeded does not run again. An audit file counts what ran."""

import json
import os
import subprocess
import sys
import textwrap
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shotclock.store.store import Store

from .test_resume import Started, finished

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("no_survivors", "warm_starts")]

ANSWER_LIMIT_S = 60

Valid = Callable[[dict[str, Any]], Any]


class Flow:
    """A workflow file whose steps append their names to `audit`, and the runs of it."""

    def __init__(self, folder: Path, validate: Valid) -> None:
        self.folder, self.home, self.file = folder, folder / "home", folder / "flow.yaml"
        self.audit = folder / "audit"
        self._validate = validate

    def write(self, text: str) -> None:
        self.file.write_text(textwrap.dedent(text))

    def change(self, old: str, new: str) -> None:
        text = self.file.read_text()
        assert old in text
        self.file.write_text(text.replace(old, new))

    def run(self, *words: str) -> dict[str, Any]:
        """Return the answer. `audit` holds what this run did."""
        self.audit.write_text("")
        envelope = finished(self.home, *words)
        self._validate(envelope)
        return envelope

    def first(self, *words: str) -> dict[str, Any]:
        return self.run(str(self.file), "--run-id", "first", *words)

    def rerun(self, *words: str) -> dict[str, Any]:
        return self.run("--rerun-failed", "first", *words)

    @property
    def did(self) -> list[str]:
        return sorted(self.audit.read_text().split())

    def store(self) -> Store:
        return Store.open(self.home)


@pytest.fixture
def flow(tmp_path: Path, validate_envelope: Valid) -> Flow:
    return Flow(tmp_path, validate_envelope)


def why(envelope: dict[str, Any]) -> dict[str, str]:
    return {each["step"]: each["why"] for each in envelope["data"]["rerun"]["runs_again"]}


def test_of_60_steps_with_one_failure_only_that_one_and_the_ones_behind_it_run(flow: Flow) -> None:
    steps = []
    for number in range(60):
        after = f"depends_on: s{number - 20}, " if number >= 20 else ""
        check = "test -e mended && " if number == 30 else ""
        steps.append(f"  s{number}: {{{after}exec: '{check}echo s{number} >> audit; {check}echo $(({number} * 2))'}}")
    flow.file.write_text("\n".join(["steps:", *steps]))
    first = flow.first()
    assert first["data"]["failed"] == ["s30"] and first["data"]["skipped"] == ["s50"]
    (flow.folder / "mended").touch()
    envelope = flow.rerun()
    assert envelope["ok"] and flow.did == ["s30", "s50"]
    data = envelope["data"]
    assert data["rerun_of"] == "first" and data["rerun"]["kept"] == 58
    assert {name: step["output"] for name, step in data["steps"].items()} == {f"s{n}": str(n * 2) for n in range(60)}
    kept = data["steps"]["s0"]
    assert (kept["duration_ms"], kept["attempts"], kept["side_effects"]) == (None, 0, "none")
    assert kept["kept_from"] == "first" and "started_ms" not in kept


def test_of_100_items_with_ten_failures_only_those_run_with_their_retries(flow: Flow) -> None:
    items = [f"n{number}" for number in range(100)]
    bad = items[5::10]
    flow.write(f"""
        max_parallelism: 8
        steps:
          each:
            exec: |
              echo {{{{ item }}}} >> audit
              case {{{{ item }}}} in {"|".join(bad)}) test -e mended;; esac
              echo got-{{{{ item }}}}
            for_each: {json.dumps(items)}
            on_fail: {{retry: {{max: 1, backoff: {{delay_ms: 1}}}}}}
          all: {{exec: "echo all >> audit; echo {{{{ outputs.each | length }}}}", depends_on: each}}
    """)
    first = flow.first()
    assert first["data"]["steps"]["each"]["error"]["message"].startswith("item 6 of 100 (n5) and 9 more")
    assert Counter(flow.did) == Counter(items) + Counter(bad)
    (flow.folder / "mended").touch()
    envelope = flow.rerun()
    assert envelope["ok"] and flow.did == sorted([*bad, "all"])
    each = envelope["data"]["steps"]["each"]
    assert each["output"] == [f"got-{item}" for item in items] and envelope["data"]["steps"]["all"]["output"] == "100"
    assert each["attempts"] == 10 and each["kept_items"] == 90
    assert envelope["data"]["rerun"]["kept_items"] == 90


def test_a_changed_file_is_shown_and_only_what_it_changes_runs_again(flow: Flow) -> None:
    flow.write("""
        steps:
          fetch: {exec: "echo fetch >> audit; echo one"}
          left: {exec: "echo left >> audit; echo {{ outputs.fetch }}-left", depends_on: fetch}
          right: {exec: "echo right >> audit; echo {{ outputs.fetch }}-right", depends_on: fetch}
          behind: {exec: "echo behind >> audit; echo {{ outputs.left }}", depends_on: left}
          old: {exec: "echo old >> audit"}
          bad: {exec: "echo bad >> audit; exit 1"}
          named: {exec: "echo named >> audit", if: "steps.bad.status == 'failed'", depends_on: fetch|bad}
    """)
    flow.first()
    flow.change("left >> audit; echo {{ outputs.fetch }}-left", "left >> audit; echo {{ outputs.fetch }}-LEFT")
    flow.change("depends_on: fetch}\n  behind", "depends_on: fetch, timeout: 7m, tags: [x]}\n  behind")
    flow.change('  old: {exec: "echo old >> audit"}', '  new: {exec: "echo new >> audit"}')
    envelope = flow.rerun()
    assert flow.did == ["bad", "behind", "left", "new"]
    data = envelope["data"]
    assert data["steps"]["behind"]["output"] == "one-LEFT" and data["steps"]["right"]["kept_from"] == "first"
    rerun = data["rerun"]
    assert (rerun["added"], rerun["removed"], rerun["file"]) == (["new"], ["old"], [])
    assert rerun["changed"] == [
        {"step": "left", "keys": ["exec"], "runs_again": True},
        {"step": "right", "keys": ["timeout", "tags"], "runs_again": False},
    ]
    assert why(envelope) == {
        "left": "changed: exec",
        "behind": "it depends on left, which runs again",
        "bad": "it failed",
        "new": "it is new in the file",
        "named": "it depends on bad, which runs again",
    }


def test_the_differences_are_lines_on_stderr_before_any_step(flow: Flow) -> None:
    flow.write("steps: {a: {exec: 'echo one'}, b: {exec: 'exit 1'}}")
    flow.first()
    flow.change("exit 1", "echo 2")
    done = subprocess.run(
        [sys.executable, "-m", "shotclock", "run", "--rerun-failed", "fir"],
        env={**os.environ, "SHOTCLOCK_HOME": str(flow.home)},
        capture_output=True,
        text=True,
        timeout=ANSWER_LIMIT_S,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr.splitlines()[:4] == [
        "continues run first: keeps 1 step; 1 step to run",
        "  ~ b: changed in the file (exec)",
        "  ↻ b: it failed",
        "… b running",
    ]


def test_items_are_found_by_their_value_in_a_changed_list(flow: Flow) -> None:
    flow.write("""
        steps:
          list: {exec: "echo list >> audit; cat list.json", output_format: json}
          each: {exec: "echo {{ item }} >> audit; echo {{ item }}!", for_each: "{{ outputs.list }}", depends_on: list}
          last: {exec: "echo last >> audit; test -e mended", depends_on: each}
    """)
    (flow.folder / "list.json").write_text('["a", "b", "b", "c"]')
    flow.first()
    assert flow.did == ["a", "b", "b", "c", "last", "list"]
    (flow.folder / "list.json").write_text('["c", "new", "b", "a", "c"]')
    (flow.folder / "mended").touch()
    envelope = flow.rerun("--from", "list")
    assert flow.did == ["a", "b", "c", "c", "last", "list", "new"], "--from runs all that depends on it again"
    flow.change("cat list.json", "cat  list.json")
    envelope = flow.rerun()
    assert flow.did == ["c", "last", "list", "new"]
    assert envelope["data"]["steps"]["each"]["output"] == ["c!", "new!", "b!", "a!", "c!"]
    assert why(envelope)["each"] == "it depends on list, which runs again; 4 finished items are kept"


def test_items_run_again_where_more_than_their_value_has_changed(flow: Flow) -> None:
    flow.write("""
        steps:
          token: {exec: "echo token >> audit; echo t1"}
          each: {exec: "echo {{ item }}{{ outputs.token }} >> audit", for_each: [a, b], depends_on: token}
          other: {exec: "echo other{{ matrix.n }} >> audit", matrix: {n: [1, 2]}}
    """)
    flow.first()
    flow.change("echo t1", "echo t2")
    flow.change("n: [1, 2]", "n: [2, 3, 1]")
    envelope = flow.rerun()
    assert flow.did == ["at2", "bt2", "other3", "token"]
    assert why(envelope)["other"] == "changed: matrix; 2 finished items are kept"


def test_a_masked_or_a_cut_output_is_not_handed_on(flow: Flow, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_TOKEN", "a-long-secret-value")
    flow.write("""
        steps:
          shows: {exec: "echo shows >> audit; echo say $T", env: {T: "${MY_TOKEN}"}}
          plain: {exec: "echo plain >> audit; echo fine"}
          each:
            exec: "echo {{ item }} >> audit; test {{ item }} = a && echo $T; test {{ item }} != c || test -e mended"
            env: {T: "${MY_TOKEN}"}
            for_each: [a, b, c]
          bad: {exec: "test -e mended", depends_on: [shows, plain, each]}
    """)
    flow.first()
    (flow.folder / "mended").touch()
    envelope = flow.rerun()
    assert envelope["ok"] and flow.did == ["a", "c", "shows"]
    assert why(envelope)["shows"] == "its output has a masked secret (***), which cannot be handed on"
    assert why(envelope)["each"] == "it failed; 1 finished item is kept"
    assert "a-long-secret-value" not in json.dumps(envelope)


def test_a_rerun_of_a_rerun_keeps_what_both_have_done(flow: Flow) -> None:
    flow.write("""
        steps:
          a: {exec: "echo a >> audit; echo from-a"}
          each: {exec: "echo i{{ item }} >> audit; test -e mended-{{ item }}", for_each: [1, 2, 3]}
          b: {exec: "echo b >> audit; test -e mended-b && echo from-b", depends_on: a}
          c: {exec: "echo c >> audit; echo {{ outputs.a }} {{ outputs.b }}", depends_on: [b, each]}
    """)
    (flow.folder / "mended-1").touch()
    flow.first()
    assert flow.did == ["a", "b", "i1", "i2", "i3"]
    for name in ("2", "b"):
        (flow.folder / f"mended-{name}").touch()
    flow.rerun("--run-id", "second")
    assert flow.did == ["b", "i2", "i3"]
    (flow.folder / "mended-3").touch()
    envelope = flow.run("--rerun-failed", "second", "--run-id", "third")
    assert envelope["ok"] and flow.did == ["c", "i3"]
    steps = envelope["data"]["steps"]
    assert steps["c"]["output"] == "from-a from-b" and steps["each"]["kept_items"] == 2
    assert (steps["a"]["kept_from"], steps["b"]["kept_from"]) == ("first", "second")
    with flow.store() as store:
        assert [store.runs.get(run).rerun_of for run in ("first", "second", "third")] == [None, "first", "second"]  # type: ignore[union-attr]


def test_a_rerun_that_is_killed_resumes_without_what_it_had_kept_or_finished(flow: Flow) -> None:
    items = [f"n{number}" for number in range(60)]
    flow.write(f"""
        steps:
          a: {{exec: "echo a >> audit; echo from-a"}}
          each:
            exec: |
              echo {{{{ item }}}} >> audit
              case {{{{ item }}}} in n5*) test -e mended; sleep 0.3;; esac
              echo {{{{ item }}}}
            for_each: {json.dumps(items)}
            idempotent: true
            depends_on: a
          c: {{exec: "echo c >> audit; echo {{{{ outputs.each | length }}}}", depends_on: each}}
    """)
    flow.first()
    bad = [item for item in items if item.startswith("n5")]
    (flow.folder / "mended").touch()
    # Another order and one item more: the records of kept items and of those that run again share no numbers.
    flow.change(json.dumps(items), json.dumps([*reversed(items), "more"]))
    flow.audit.write_text("")
    started = Started(flow.home, "--rerun-failed", "first", "--run-id", "second")
    started.wait_until(lambda: len(flow.did) > 9)
    assert started.kill()
    with flow.store() as store:
        run = store.runs.get("second")
        assert run is not None and run.ended_at is None and run.rerun_of == "first"
        states = {name: step.status for name, step in store.runs.steps("second").items()}
        assert states["a"] == "succeeded" and states["each"] == "running"
    before = flow.did
    refused = finished(flow.home, "--rerun-failed", "second")
    assert refused["error"]["code"] == "RUN_TAKEN" and "--resume second" in refused["error"]["suggestion"]
    envelope = flow.run("--resume", "second")
    assert envelope["ok"], envelope["error"]
    assert set(before) <= {*bad, "more"} and set(flow.did) <= {*bad, "more", "c"}
    counts = Counter(before) + Counter(flow.did)
    assert set(counts) == {*bad, "more", "c"} and max(counts.values()) <= 2
    assert len(flow.did) < len(bad) + 2, "items that had finished in the killed process did not run again"
    data = envelope["data"]
    assert data["steps"]["each"]["output"] == [*reversed(items), "more"] and data["steps"]["each"]["kept_items"] == 49
    assert data["rerun_of"] == "first" and data["rerun"]["kept"] == 1 and data["steps"]["a"]["kept_from"] == "first"


def test_the_inputs_are_those_of_the_old_run_unless_they_are_given_anew(flow: Flow) -> None:
    flow.write("""
        inputs: {who: {type: string, default: nobody}, count: {type: integer, default: 1}, unset: {type: string}}
        steps:
          greet: {exec: "echo greet >> audit; echo {{ inputs.who }}"}
          number: {exec: "echo number >> audit; echo {{ inputs.count }}"}
          bad: {exec: "echo bad >> audit; test -e mended; echo {{ outputs.greet }}", depends_on: [greet, number]}
          last: {exec: "echo last >> audit; exit 1", depends_on: bad}
        outputs: {said: "{{ outputs.bad }}"}
    """)
    flow.first("--input", "who=ann", "--input", "count=5")
    assert flow.did == ["bad", "greet", "number"]
    (flow.folder / "mended").touch()
    envelope = flow.rerun()
    assert flow.did == ["bad", "last"] and envelope["data"]["steps"]["number"]["output"] == "5"
    envelope = flow.rerun("--input", "who=bob")
    assert flow.did == ["bad", "greet", "last"]
    assert envelope["data"]["outputs"] == {"said": "bob"} and why(envelope)["greet"] == "one of its inputs is another"


def test_approvals_are_asked_again_and_kept_steps_need_none(flow: Flow) -> None:
    flow.write("""
        steps:
          one: {exec: "echo one >> audit", approval: true}
          two: {exec: "echo two >> audit; test -e mended", approval: true, depends_on: one}
    """)
    envelope = flow.first("--budget", "1s")
    for _ in range(2):
        assert envelope["error"]["code"] == "INCOMPLETE"
        approve(flow, envelope["data"]["waiting"][0]["proposal_id"])
        envelope = flow.run("--resume", "first", "--budget", "1s")
    assert envelope["error"]["code"] == "STEPS_FAILED"
    (flow.folder / "mended").touch()
    envelope = flow.rerun("--run-id", "second", "--budget", "1s")
    assert envelope["error"]["code"] == "INCOMPLETE" and flow.did == []
    [waiting] = envelope["data"]["waiting"]
    approve(flow, waiting["proposal_id"])
    envelope = flow.run("--resume", "second", "--budget", "1s")
    assert envelope["ok"] and flow.did == ["two"], envelope


def approve(flow: Flow, proposal: str) -> None:
    argv = [sys.executable, "-m", "shotclock", "inbox", "approve", proposal]
    env = {**os.environ, "SHOTCLOCK_HOME": str(flow.home)}
    subprocess.run(argv, env=env, check=True, capture_output=True, timeout=ANSWER_LIMIT_S)


def test_reactions_of_a_kept_step_do_not_run_again_unless_they_failed(flow: Flow) -> None:
    flow.write("""
        steps:
          build: {exec: "echo build >> audit", on_success: {run: [note, tell]}}
          note: {exec: "echo note >> audit"}
          tell: {exec: "echo tell >> audit; test -e mended"}
          bad: {exec: "echo bad >> audit; test -e mended", on_fail: {run: tidy}}
          tidy: {exec: "echo tidy >> audit"}
    """)
    flow.first()
    assert flow.did == ["bad", "build", "note", "tell", "tidy"]
    envelope = flow.rerun()
    assert flow.did == ["bad", "tell", "tidy"], "a failure is tidied up each time"
    (flow.folder / "mended").touch()
    envelope = flow.rerun()
    assert envelope["ok"] and flow.did == ["bad", "tell"]
    assert envelope["data"]["steps"]["tidy"]["reason"] == "on_demand"
    assert envelope["data"]["steps"]["note"]["kept_from"] == "first"


def test_conditions_that_did_not_hold_are_kept_and_what_was_skipped_behind_a_failure_runs(flow: Flow) -> None:
    flow.write(
        """
        steps:
          no: {exec: "echo no >> audit", if: "env.GO == 'yes'", env: {}}
          after: {exec: "echo after >> audit", depends_on: no, accept_skipped: true}
          never: {exec: "echo never >> audit", depends_on: no}
          bad: {exec: "echo bad >> audit; test -e mended", depends_on: after}
          rest: {exec: "echo rest >> audit", depends_on: bad}
    """.replace("env.GO == 'yes'", "false")
    )
    flow.first()
    (flow.folder / "mended").touch()
    envelope = flow.rerun()
    assert flow.did == ["bad", "rest"]
    data = envelope["data"]
    assert data["skipped"] == ["no", "never"] and data["steps"]["no"]["kept_from"] == "first"
    assert (data["steps"]["never"]["reason"], data["steps"]["never"]["cause"]) == ("dependency_skipped", "no")


def test_a_rerun_with_nothing_to_do_is_refused_and_from_gives_it_something(flow: Flow) -> None:
    flow.write("""
        steps:
          a: {exec: "echo a >> audit"}
          b: {exec: "echo b >> audit", depends_on: a}
          c: {exec: "echo c >> audit", depends_on: b}
    """)
    flow.first()
    refused = flow.rerun()
    assert refused["error"]["code"] == "ARG_ERROR" and "--from STEP" in refused["error"]["suggestion"]
    assert flow.rerun("--from", "b")["ok"] and flow.did == ["b", "c"]
    refused = flow.rerun("--from", "d")
    assert "there is no step 'd'; the steps of this file: a, b, c" in refused["error"]["message"]
    refused = flow.run("--rerun-failed", "nothing")
    assert refused["error"]["code"] == "RUN_NOT_FOUND"
    for words in (["--resume", "first"], ["--only", "a"], [str(flow.file)], ["--on", "temporal://127.0.0.1:1"]):
        refused = flow.rerun(*words)
        assert refused["error"]["code"] == "ARG_ERROR" and refused["meta"]["ending"] == "not_started", words


def test_the_deadline_is_its_own_and_kept_steps_are_in_no_statistics(flow: Flow) -> None:
    flow.write("""
        timeout: 20s
        steps:
          a: {exec: "echo a >> audit", timeout: 5s}
          b: {exec: "echo b >> audit; test -e mended", timeout: 5s}
    """)
    for number in range(5):
        flow.run(str(flow.file), "--run-id", f"r{number}")
    (flow.folder / "mended").touch()
    envelope = flow.run("--rerun-failed", "r4", "--timeout", "9s", "--run-id", "again")
    assert envelope["ok"] and envelope["meta"]["timeout_ms"] == 9_000
    argv = [sys.executable, "-m", "shotclock", "advise", str(flow.file), "--json"]
    env = {**os.environ, "SHOTCLOCK_HOME": str(flow.home)}
    done = subprocess.run(argv, env=env, check=True, capture_output=True, timeout=ANSWER_LIMIT_S)
    rows = {row["step"]: row for row in json.loads(done.stdout)["data"]["timeouts"]}
    assert (rows["a"]["runs"], rows["b"]["runs"], rows[None]["runs"]) == (5, 1, 0)


def test_reports_name_the_run_that_steps_come_from_and_the_command_that_continues(flow: Flow) -> None:
    flow.write("steps: {a: {exec: 'echo hello'}, b: {exec: 'exit 1'}}")
    first = flow.first()
    assert first["data"]["rerun_command"] == "shotclock run --rerun-failed first"
    flow.rerun("--run-id", "second")
    page = flow.folder / "page.html"
    env = {**os.environ, "SHOTCLOCK_HOME": str(flow.home)}
    report = [sys.executable, "-m", "shotclock", "report", "second"]
    for words in (["--output", "markdown"], ["--html", str(page)], ["--output", "json"]):
        done = subprocess.run([*report, *words], env=env, check=True, capture_output=True, timeout=ANSWER_LIMIT_S)
        text = page.read_text() if "--html" in words else done.stdout.decode()
        assert "kept from run first" in text and "shotclock run --rerun-failed second" in text, words


def test_a_variable_of_a_kept_step_may_be_gone(flow: Flow, monkeypatch: pytest.MonkeyPatch) -> None:
    flow.write("""
        steps:
          a: {exec: "echo a >> audit; echo fine", env: {T: "${ONLY_ONCE}"}}
          b: {exec: "echo b >> audit; test -e mended", depends_on: a}
    """)
    monkeypatch.setenv("ONLY_ONCE", "some-value")
    flow.first()
    monkeypatch.delenv("ONLY_ONCE")
    (flow.folder / "mended").touch()
    assert flow.rerun()["ok"] and flow.did == ["b"]
    refused = flow.rerun("--from", "a")
    assert refused["error"]["code"] == "ARG_ERROR" and "ONLY_ONCE" in refused["error"]["message"]


def test_a_nested_run_that_failed_continues_inside(flow: Flow) -> None:
    flow.write("""
        steps:
          whole: {type: workflow, workflow: inner.yaml, inputs: {name: w}}
          each: {type: workflow, workflow: inner.yaml, inputs: {name: "{{ item }}"}, for_each: [a, b, c]}
          other: {type: workflow, workflow: other.yaml}
          last:
            exec: "echo last >> audit; echo {{ outputs.whole.out }} {{ outputs.each[1].out }}"
            depends_on: [whole, each]
    """)
    (flow.folder / "inner.yaml").write_text("""
inputs: {name: {type: string}}
steps:
  one: {exec: "echo one-{{ inputs.name }} >> audit; echo {{ inputs.name }}!"}
  two: {exec: "echo two-{{ inputs.name }} >> audit; test {{ inputs.name }} = a || test -e mended", depends_on: one}
outputs: {out: "{{ outputs.one }}"}
""")
    (flow.folder / "other.yaml").write_text("steps: {x: {exec: 'echo x >> audit'}}")
    flow.first()
    assert flow.did == sorted(["x", *(f"{step}-{name}" for step in ("one", "two") for name in "abcw")])
    (flow.folder / "mended").touch()
    envelope = flow.rerun("--run-id", "second")
    assert envelope["ok"] and flow.did == ["last", "two-b", "two-c", "two-w"], envelope["error"]
    assert envelope["data"]["steps"]["last"]["output"] == "w! b!"
    with flow.store() as store:
        inside = store.runs.get("second.whole")
        assert inside is not None and inside.rerun_of == "first.whole"
    assert flow.rerun("--from", "whole")["ok"]
    assert [each for each in flow.did if each.endswith("-w")] == ["one-w", "two-w"], "--from runs all of it again"


def test_of_a_changed_nested_file_only_what_has_changed_runs_again(flow: Flow) -> None:
    inner = flow.folder / "inner.yaml"
    flow.write("""
        steps:
          each: {type: workflow, workflow: inner.yaml, inputs: {name: "{{ item }}"}, for_each: [a, b]}
          bad: {exec: "test -e mended"}
    """)
    inner.write_text(
        "inputs: {name: {}}\n"
        "steps:\n"
        "  one: {exec: 'echo one-{{ inputs.name }} >> audit'}\n"
        "  two: {exec: 'echo two-{{ inputs.name }} >> audit', depends_on: one}\n"
    )
    flow.first()
    assert flow.did == ["one-a", "one-b", "two-a", "two-b"]
    flow.rerun("--run-id", "second")
    assert flow.did == []
    (flow.folder / "mended").touch()
    inner.write_text(inner.read_text().replace("two-", "second-"))
    envelope = flow.run("--rerun-failed", "second")
    assert envelope["ok"] and flow.did == ["second-a", "second-b"]
    assert why(envelope)["each"] == "its file inner.yaml has changed; 2 finished items run again, too"


def test_items_that_had_finished_are_kept_also_of_a_run_that_was_stopped(flow: Flow) -> None:
    flow.write("""
        max_parallelism: 2
        steps:
          each:
            exec: |
              echo {{ item }} >> audit
              case {{ item }} in slow*) test -e mended || sleep 600;; esac
              echo {{ item }}
            for_each: [a, b, slow1, slow2, c]
            grace: 0
    """)
    stopped = flow.first("--timeout", "2s")
    assert stopped["error"]["code"] == "TIMEOUT" and flow.did == ["a", "b", "slow1", "slow2"]
    started = Started(flow.home, str(flow.file), "--run-id", "killed")
    flow.audit.write_text("")
    started.wait_until(lambda: len(flow.did) == 4)
    assert started.kill()
    argv = [sys.executable, "-m", "shotclock", "job", "cancel", "killed"]
    env = {**os.environ, "SHOTCLOCK_HOME": str(flow.home)}
    subprocess.run(argv, env=env, capture_output=True, timeout=ANSWER_LIMIT_S)
    (flow.folder / "mended").touch()
    for run in ("first", "killed"):
        envelope = flow.run("--rerun-failed", run)
        assert envelope["ok"] and flow.did == ["c", "slow1", "slow2"], run
        assert envelope["data"]["steps"]["each"]["output"] == ["a", "b", "slow1", "slow2", "c"]


def test_a_changed_variable_of_the_file_is_part_of_every_step(flow: Flow) -> None:
    flow.write("""
        env: {NAME: one}
        tools: {say: {exec: "echo say >> audit; echo said"}, hush: {exec: "echo hush >> audit"}}
        steps:
          a: {type: tool, tool: say}
          b: {type: tool, tool: hush}
          c: {exec: "echo c >> audit; exit 1"}
    """)
    flow.first()
    flow.change("echo said", "echo SAID")
    envelope = flow.rerun()
    assert flow.did == ["c", "say"] and why(envelope)["a"] == "changed: tools.say"
    flow.change("NAME: one", "NAME: two")
    envelope = flow.rerun()
    assert flow.did == ["c", "hush", "say"] and envelope["data"]["rerun"]["file"] == ["env", "tools"]
    assert [each["step"] for each in envelope["data"]["rerun"]["changed"]] == ["a"]


def test_a_run_that_has_not_ended_is_not_continued_by_a_new_one(flow: Flow) -> None:
    flow.write("steps: {ask: {type: human-input, prompt: Well?}, wait: {exec: 'echo wait >> audit; test -e go'}}")
    parked = flow.first("--budget", "100ms")
    assert parked["error"]["code"] == "INCOMPLETE"
    refused = flow.rerun()
    assert (refused["error"]["code"], refused["meta"]["exit_code"]) == ("RUN_TAKEN", 6)
    assert "shotclock run --resume first" in refused["error"]["suggestion"]
    flow.write("steps: {wait: {exec: 'echo wait >> audit; until test -e go; do sleep 0.05; done'}}")
    flow.audit.write_text("")
    started = Started(flow.home, str(flow.file), "--run-id", "second")
    started.wait_until(lambda: flow.did == ["wait"])
    refused = flow.run("--rerun-failed", "second")
    assert "under way in process" in refused["error"]["message"]
    assert "shotclock job wait second" in refused["error"]["suggestion"]
    (flow.folder / "go").touch()
    assert started.wait(ANSWER_LIMIT_S)


BUILT = """
    steps:
      build: {exec: echo build >> audit; mkdir -p out; echo program > out/app; chmod +x out/app, artifacts: [out]}
      test: {exec: echo test >> audit; test -e mended && cat out/app, depends_on: build}
    finally:
      clean: {exec: rm -rf out}
    """


def test_artifacts_of_kept_steps_are_put_back_where_the_step_had_left_them(flow: Flow) -> None:
    flow.write(BUILT)
    assert not flow.first()["ok"] and not (flow.folder / "out").exists()
    second = flow.run("--rerun-failed", "first", "--run-id", "second")
    assert flow.did == ["test"] and "mended" not in str(second["data"]["steps"]["build"]["output"])
    (flow.folder / "mended").touch()
    third = flow.run("--rerun-failed", "second")
    assert third["ok"] and flow.did == ["test"] and third["data"]["steps"]["test"]["output"] == "program"
    [restored] = third["data"]["rerun"]["restores"]
    assert (restored["step"], restored["to"]) == ("build", str(flow.folder / "out/app"))


def test_a_restored_program_can_be_run_and_a_file_that_is_still_there_is_left_alone(flow: Flow) -> None:
    flow.write(BUILT.replace("rm -rf out", "'true'").replace("&& cat out/app", "&& test -x out/app"))
    flow.first()
    (flow.folder / "mended").touch()
    before = (flow.folder / "out/app").stat().st_ino
    assert flow.rerun()["data"]["rerun"]["restores"] == []
    assert (flow.folder / "out/app").stat().st_ino == before
    (flow.folder / "mended").unlink()
    flow.run(str(flow.file), "--run-id", "again")
    (flow.folder / "out/app").unlink()
    (flow.folder / "mended").touch()
    assert flow.run("--rerun-failed", "again")["ok"], "it is not executable"


@pytest.mark.parametrize("change", ["edited", "deleted"])
def test_a_step_runs_again_where_its_artifacts_can_not_be_restored(change: str, flow: Flow) -> None:
    flow.write(BUILT if change == "deleted" else BUILT.replace("rm -rf out", "'true'"))
    flow.first()
    (flow.folder / "mended").touch()
    if change == "edited":
        (flow.folder / "out/app").write_text("mine")
    else:
        [copy] = (flow.home / "artifacts" / "first").rglob("app")
        copy.unlink()
    ended = flow.rerun()
    assert ended["ok"] and flow.did == ["build", "test"]
    said = {"edited": "its artifact out/app is another file now", "deleted": "its artifact out/app is gone"}
    assert why(ended)["build"] == said[change]
