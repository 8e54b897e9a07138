"""When steps run, what becomes of them, and what the one envelope says."""

import asyncio
import base64
import json
import os
import pty
import socket
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from shotclock.core.envelope import Envelope
from shotclock.core.limits import Clocks, WallTime
from shotclock.core.value_types import replace
from shotclock.flows.file.schema import WorkflowFile
from shotclock.flows.report.junit import to_junit
from shotclock.flows.report.report import report_of, to_markdown
from shotclock.flows.run import step_renderer
from shotclock.flows.run.scheduler import Scheduler
from shotclock.flows.run.state import Status, StepState
from shotclock.flows.steps.provider import StepPart
from shotclock.store.store import Store

from .conftest import statuses, step

pytestmark = pytest.mark.usefixtures("no_survivors")
Run = Callable[..., Envelope]


@pytest.mark.slow
def test_a_run_that_succeeds_says_what_every_step_said(run: Run, store: Store) -> None:
    envelope = run(
        """
        outputs: {n: "{{ outputs.count }}"}
        steps:
          fetch: {exec: "echo '{\\"items\\": [1, 2, 3]}'"}
          count:
            exec: echo "{{ outputs.fetch }}" | python3 -c 'import json, sys; print(len(json.load(sys.stdin)["items"]))'
            depends_on: fetch
        """
    )
    assert envelope.ok and envelope.exit_code == 0
    assert envelope.data["outputs"] == {"n": "3"}
    assert step(envelope, "fetch")["output"] == {"items": [1, 2, 3]}
    assert envelope.data["completed"] == ["fetch", "count"]
    stored = store.runs.get(envelope.data["run_id"])
    assert stored is not None and stored.envelope["ok"] is True


def test_a_failure_skips_everything_behind_it_and_names_the_cause(run: Run) -> None:
    envelope = run(
        """
        steps:
          bad: {exec: exit 7}
          next: {exec: echo no, depends_on: bad}
          last: {exec: echo no, depends_on: [next]}
          other: {exec: echo yes}
        """
    )
    assert envelope.code == "STEPS_FAILED" and envelope.exit_code == 3
    assert statuses(envelope) == {"bad": "failed", "next": "skipped", "last": "skipped", "other": "succeeded"}
    assert step(envelope, "last")["reason"] == "dependency_failed" and step(envelope, "last")["cause"] == "bad"
    assert step(envelope, "bad")["error"]["context"]["rule"] == "command/failed"


@pytest.mark.slow
def test_a_step_that_hangs_is_killed_at_its_own_clock(run: Run) -> None:
    envelope = run(
        """
        steps:
          hang: {exec: "echo so far; sleep 600", timeout: 1, grace: 0s}
          after: {exec: "true", depends_on: hang}
        """
    )
    assert statuses(envelope) == {"hang": "timed_out", "after": "skipped"}
    error = step(envelope, "hang")["error"]
    assert error["message"] == "Command execution timed out after 1 second"
    assert error["context"]["rule"] == "command/timeout"
    assert step(envelope, "hang")["output"] == "so far"


@pytest.mark.slow
def test_the_runs_deadline_caps_every_step_and_is_exit_10(run: Run) -> None:
    began = time.monotonic()
    envelope = run("timeout: 1500ms\nsteps: {a: {exec: sleep 600, grace: 0s}, b: {exec: 'true', depends_on: a}}")
    assert time.monotonic() - began < 6
    assert envelope.code == "TIMEOUT" and envelope.exit_code == 10
    assert statuses(envelope) == {"a": "timed_out", "b": "skipped"}


@pytest.mark.slow
def test_the_callers_limit_wins_where_it_is_shorter(run: Run) -> None:
    envelope = run("timeout: 10m\nsteps: {a: {exec: sleep 600, grace: 0s}}", timeout_ms=1000)
    assert envelope.exit_code == 10 and envelope.meta["timeout_ms"] == 1000


def test_either_of_two_is_enough(run: Run) -> None:
    envelope = run(
        """
        steps:
          a: {exec: exit 1}
          b: {exec: echo b}
          c: {exec: echo c, depends_on: a|b}
          d: {exec: echo d, depends_on: [a|b, b]}
        """
    )
    assert statuses(envelope) == {"a": "failed", "b": "succeeded", "c": "succeeded", "d": "succeeded"}


@pytest.mark.slow
def test_a_failure_that_is_said_to_be_harmless_stops_nobody(run: Run) -> None:
    envelope = run("steps: {a: {exec: exit 1, continue_on_failure: true}, b: {exec: echo b, depends_on: a}}")
    assert envelope.ok and statuses(envelope) == {"a": "failed", "b": "succeeded"}


@pytest.mark.slow
def test_conditions_decide_and_those_behind_a_skipped_step_are_skipped(run: Run) -> None:
    envelope = run(
        """
        inputs: {n: {type: integer, default: 3}}
        steps:
          a: {exec: echo 5}
          yes: {exec: echo y, if: "outputs.a | int > 4 and inputs.n == 3", depends_on: a}
          no: {exec: echo n, if: "{{ outputs.a | int > 9 }}", depends_on: a}
          behind: {exec: echo b, depends_on: "no"}
        """
    )
    assert envelope.ok
    assert statuses(envelope) == {"a": "succeeded", "yes": "succeeded", "no": "skipped", "behind": "skipped"}
    assert step(envelope, "no")["reason"] == "condition" and step(envelope, "behind")["reason"] == "dependency_skipped"


@pytest.mark.slow
def test_fail_if_fails_a_step_that_ended_well(run: Run) -> None:
    envelope = run('steps: {a: {exec: "echo 3", output_format: json, fail_if: "output > 2"}}')
    assert statuses(envelope) == {"a": "failed"} and step(envelope, "a")["error"]["code"] == "FAIL_IF"


def test_retries_stop_at_the_first_success(run: Run, tmp_path: Path) -> None:
    envelope = run(
        """
        steps:
          flaky:
            exec: 'n=$(cat n 2>/dev/null || echo 0); echo $((n+1)) > n; test $n -ge 2'
            on_fail: {retry: {max: 5, backoff: {delay_ms: 10, mode: exponential}}}
        """
    )
    assert envelope.ok and step(envelope, "flaky")["attempts"] == 3
    assert (tmp_path / "n").read_text() == "3\n"


@pytest.mark.slow
def test_nobody_takes_a_step_between_two_tries_for_one_that_failed(run: Run) -> None:
    envelope = run(
        """
        steps:
          quick: {exec: sleep 0.4}
          flaky:
            exec: 'test -f tried || { touch tried; exit 1; }'
            on_fail: {retry: {max: 1, backoff: {delay_ms: 900}}}
          both: {exec: echo both, depends_on: [quick, flaky]}
        """
    )
    assert envelope.ok and statuses(envelope) == dict.fromkeys(["quick", "flaky", "both"], "succeeded")


@pytest.mark.slow
def test_a_retry_that_would_have_no_time_left_is_not_tried(run: Run) -> None:
    began = time.monotonic()
    envelope = run("timeout: 3s\nsteps: {a: {exec: exit 1, on_fail: {retry: {max: 5, backoff: {delay_ms: 2900}}}}}")
    assert time.monotonic() - began < 5
    assert step(envelope, "a")["attempts"] <= 2


def test_fail_fast_stops_the_siblings_for_real(run: Run) -> None:
    began = time.monotonic()
    envelope = run(
        """
        fail_fast: true
        steps:
          bad: {exec: sleep 0.5; exit 1}
          long: {exec: sleep 600}
          later: {exec: echo x, depends_on: long}
        """
    )
    assert time.monotonic() - began < 15
    assert statuses(envelope) == {"bad": "failed", "long": "cancelled", "later": "skipped"}


@pytest.mark.slow
def test_a_signal_stops_the_run_and_says_how_far_it_was(run: Run) -> None:
    envelope = run(
        "steps: {a: {exec: echo a}, b: {exec: sleep 600, depends_on: a}, c: {exec: echo c, depends_on: b}}",
        stop_after=1.5,
    )
    assert envelope.code == "CANCELLED" and envelope.exit_code == 143
    assert statuses(envelope) == {"a": "succeeded", "b": "cancelled", "c": "skipped"}


def test_for_each_runs_once_for_every_item(run: Run) -> None:
    envelope = run(
        """
        steps:
          list: {exec: "echo '[\\"x\\", \\"y z\\", \\"$(touch pwned)\\"]'"}
          each: {exec: "printf %s {{ item }}{{ index }}", for_each: "{{ outputs.list }}", depends_on: list}
          fixed: {exec: "echo {{ item }}", forEach: [1, 2]}
          wrong: {exec: "true", for_each: "{{ outputs.list[0] }}", depends_on: list}
        """
    )
    assert step(envelope, "each")["output"] == ["x0", "y z1", "$(touch pwned)2"]
    assert step(envelope, "fixed")["output"] == ["1", "2"]
    assert step(envelope, "wrong")["error"]["code"] == "STEP_INVALID"


@pytest.mark.slow
def test_steps_named_by_run_wait_until_they_are_called_for(run: Run) -> None:
    envelope = run(
        """
        steps:
          bad: {exec: exit 1, on_fail: {run: [mend]}}
          mend: {exec: echo mended}
          good: {exec: echo g, on_success: {run: cheer}}
          cheer: {exec: echo n}
        """
    )
    assert statuses(envelope)["mend"] == "succeeded" and statuses(envelope)["cheer"] == "succeeded"
    envelope = run("steps: {good: {exec: echo g, on_fail: {run: [mend]}}, mend: {exec: echo mended}}")
    assert step(envelope, "mend")["reason"] == "on_demand"


@pytest.mark.slow
def test_a_step_that_only_the_defaults_call_for_waits_as_well(run: Run) -> None:
    text = "defaults: {on_fail: {run: mend}}\nsteps: {a: {exec: exit %d}, mend: {exec: echo mended}}"
    assert statuses(run(text % 1)) == {"a": "failed", "mend": "succeeded"}
    envelope = run(text % 0)
    assert envelope.ok and step(envelope, "mend")["reason"] == "on_demand"


def test_an_output_that_cannot_be_made_is_null_and_said(run: Run, store: Store) -> None:
    envelope = run("outputs: {a: '{{ outputs.a }}', b: '{{ outputs.nobody }}'}\nsteps: {a: {exec: echo 1}}")
    assert envelope.ok and envelope.data["outputs"] == {"a": "1", "b": None}
    (notice,) = envelope.warnings
    assert notice["code"] == "OUTPUT_MISSING" and "output b" in notice["message"]
    stored = store.runs.get(envelope.data["run_id"])
    assert stored is not None
    report = report_of(stored, store.runs.steps(stored.id), now=WallTime(stored.created_at.ms + 1), is_alive=False)
    for said in (to_markdown(report), to_junit(report), json.dumps(report.to_dict())):
        assert "OUTPUT_MISSING" in said and "nobody" in said


def test_whoever_watches_is_told_and_cannot_stop_the_run(run: Run) -> None:
    told: list[tuple[str, str]] = []
    text = "steps: {a: {exec: 'true'}, b: {exec: 'true', depends_on: a}}"
    assert run(text, on_change=lambda state: told.append((state.id, state.status.value))).ok
    assert told == [("a", "running"), ("a", "succeeded"), ("b", "running"), ("b", "succeeded")]

    def broken(state: object) -> None:
        raise OSError("no space left")

    envelope = run(text, on_change=broken)
    assert envelope.ok and [notice["code"] for notice in envelope.warnings] == ["NOT_TOLD"]


def test_whoever_watches_is_told_of_the_runs_inside_as_well(run: Run, tmp_path: Path) -> None:
    (tmp_path / "innermost.yaml").write_text("steps: {deep: {exec: 'true'}}")
    (tmp_path / "inner.yaml").write_text("steps: {a: {exec: 'true'}, b: {type: workflow, workflow: innermost.yaml}}")
    told: list[str] = []
    text = "steps: {outer: {type: workflow, workflow: inner.yaml}}"
    assert run(text, on_change=lambda state: told.append(f"{state.id} {state.status.value}")).ok
    assert set(told) == {
        f"{name} {status}"
        for name in ("outer", "outer.a", "outer.b", "outer.b.deep")
        for status in ("running", "succeeded")
    }
    assert told.index("outer.b.deep succeeded") < told.index("outer.b succeeded") < told.index("outer succeeded")


@pytest.mark.slow
def test_a_chain_of_thousands_is_skipped_at_once(run: Run) -> None:
    lines = [f"  s{n}: {{exec: 'true', depends_on: {f's{n - 1}' if n else 'bad'}}}\n" for n in range(2000)]
    envelope = run("steps:\n  bad: {exec: exit 1}\n" + "".join(lines))
    assert len(envelope.data["skipped"]) == 2000 and step(envelope, "s1999")["cause"] == "bad"


@pytest.mark.slow
def test_a_step_that_waits_for_a_person_keeps_nobody_from_working(run: Run) -> None:
    person, terminal = pty.openpty()
    stdin = os.dup(0)
    os.dup2(terminal, 0)
    try:
        envelope = run(
            """
            max_parallelism: 1
            steps:
              ask: {type: human-input, prompt: Go?, timeout: 4, default: "no"}
              work: {exec: echo worked}
            """
        )
    finally:
        os.dup2(stdin, 0)
        for fd in (stdin, person, terminal):
            os.close(fd)
    assert envelope.ok and step(envelope, "ask")["duration_ms"] >= 3900
    assert step(envelope, "work").get("started_ms", 0) < 3000


@pytest.mark.slow
def test_goto_goes_round_until_it_works_and_no_more_than_the_cap(run: Run, tmp_path: Path) -> None:
    envelope = run(
        """
        steps:
          fix: {exec: 'echo x >> tries'}
          test: {exec: 'test $(wc -l < tries) -ge 3', depends_on: fix, on_fail: {goto: fix}}
          after: {exec: echo done, depends_on: test}
        """
    )
    assert envelope.ok and statuses(envelope)["after"] == "succeeded"
    assert (tmp_path / "tries").read_text() == "x\n" * 3
    envelope = run("steps: {a: {exec: 'echo y >> rounds'}, b: {exec: exit 1, depends_on: a, on_fail: {goto: a}}}")
    assert not envelope.ok and (tmp_path / "rounds").read_text() == "y\n" * 11
    assert any(warning["code"] == "LOOP_CAP" for warning in step(envelope, "b")["warnings"])


def test_secrets_reach_only_who_asks_and_are_written_down_nowhere(run: Run, store: Store, tmp_path: Path) -> None:
    environment = {
        "PATH": "/usr/bin:/bin",
        "GH_TOKEN": "s3cr3t-value",
        "PLAIN": "shown",
        "db_password": "hunter2hunter2",
    }
    envelope = run(
        """
        steps:
          none: {exec: 'echo "[$GH_TOKEN][$db_password][$PLAIN]{{ env.PLAIN }}"'}
          asked: {exec: 'echo "[$MINE]"; test ${#MINE} = 12', env: {MINE: "${GH_TOKEN}"}}
          template: {exec: 'echo {{ env.GH_TOKEN }}'}
        """,
        environment=environment,
    )
    assert step(envelope, "none")["output"] == "[][][shown]shown"
    assert step(envelope, "asked")["output"] == "[***]" and step(envelope, "asked")["status"] == "succeeded"
    assert step(envelope, "template")["error"]["code"] == "TEMPLATE_FAILED"
    store.close()
    for file in (tmp_path / "home").rglob("*"):
        if file.is_file():
            assert b"s3cr3t-value" not in file.read_bytes()
    assert "s3cr3t" not in json.dumps(envelope.to_dict())


@pytest.mark.slow
def test_a_secret_is_known_however_it_is_written(run: Run) -> None:
    token, key = 's3cr3t+/="v&', '-----BEGIN KEY-----\nAAAAB3NzaC1yc2E\nzzzz"yyyyy\n-----END KEY-----\n'
    ways = """
import base64, json, os, urllib.parse as url
for token in (os.environ["A_TOKEN"], os.environ["PLAIN_KEY"]):
    for before in ("", "u:", "me:"):
        print(base64.b64encode((before + token + "|more").encode()).decode())
        print(base64.urlsafe_b64encode((before + token).encode()).decode())
    print("x" + json.dumps(token), url.quote(token), url.quote(token, safe=""), token.encode().hex(), token)
    print(*token.splitlines()[1:3], sep="\\n")
"""
    envelope = run(
        f"""
        steps:
          say:
            exec: python3 -c "$SCRIPT"
            env: {{SCRIPT: {json.dumps(ways)}, A_TOKEN: "${{A_TOKEN}}", PLAIN_KEY: "${{PLAIN_KEY}}"}}
          own: {{exec: 'echo $DEPLOY_PASSWORD', env: {{DEPLOY_PASSWORD: "written-{{{{ run.name }}}}"}}}}
        """,
        environment={"PATH": os.environ["PATH"], "A_TOKEN": token, "PLAIN_KEY": key},
    )
    assert envelope.ok and step(envelope, "own")["output"] == "***"
    said = step(envelope, "say")["output"]
    assert said.count("***") >= 20, said
    for part in (
        "s3cr3t",
        "AAAAB3",
        "yyyyy",
        token.encode().hex()[:8],
        "BAQUFCM05",
        base64.b64encode(b"s3cr3t")[:6].decode(),
    ):
        assert part not in said, said


def test_what_a_step_asks_for_is_there_for_its_templates(run: Run) -> None:
    envelope = run(
        """
        steps:
          asked: {exec: 'x="{{ env.GH_TOKEN }}"; echo ${#x} {{ env.MORE }}', env: {GH_TOKEN: "${GH_TOKEN}", MORE: 7}}
          not: {exec: 'echo {{ env.GH_TOKEN }}'}
        """,
        environment={"PATH": os.environ["PATH"], "GH_TOKEN": "s3cr3t-value"},
    )
    assert step(envelope, "asked")["output"] == "12 7"
    assert "`env: {GH_TOKEN: ${GH_TOKEN}}`" in step(envelope, "not")["error"]["message"]


def test_an_output_is_read_as_its_format_says(run: Run) -> None:
    envelope = run(
        """
        steps:
          text: {exec: "echo 10; echo", output_format: text}
          auto: {exec: echo 10}
          number: {exec: echo 10, output_format: json}
          json: {exec: "echo '[1]'", output_format: json}
          not: {exec: echo hello, output_format: json}
        """
    )
    assert [step(envelope, name)["output"] for name in ("text", "auto", "number", "json")] == [
        "10\n",
        "10",
        10,
        [1],
    ]
    assert step(envelope, "not")["error"]["code"] == "OUTPUT_INVALID" and step(envelope, "not")["output"] == "hello"


def test_a_child_is_kept_quiet_unless_the_file_says_otherwise(run: Run) -> None:
    environment = {"PATH": "/usr/bin:/bin", "PAGER": "less", "OURS": "kept"}
    envelope = run(
        """
        steps:
          quiet: {exec: 'echo "$PAGER $OURS"'}
          asked: {exec: 'echo "$PAGER $OURS"', env: {PAGER: more}}
          wrong: {exec: 'true', env: {BAD: "a\\0b"}}
        """,
        environment=environment,
    )
    assert step(envelope, "quiet")["output"] == "cat kept"
    assert step(envelope, "asked")["output"] == "more kept"
    assert step(envelope, "wrong")["error"]["code"] == "ARG_ERROR"


@pytest.fixture
def one_second(monkeypatch: pytest.MonkeyPatch) -> None:
    """For what a file makes us compute, instead of five, all of which a test would burn."""
    clocks = Clocks(timeout_ms=1_000, grace_ms=0)
    for name in ("_RENDER", "_RENDER_VALUE", "_EVALUATE", "_FIND_MISFIT"):
        monkeypatch.setattr(step_renderer, name, replace(getattr(step_renderer, name), clocks=clocks))


@pytest.mark.slow
@pytest.mark.usefixtures("one_second")
def test_a_template_without_end_is_stopped(run: Run) -> None:
    began = time.monotonic()
    envelope = run(
        'steps: {a: {exec: "echo {% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"}}'
    )
    assert time.monotonic() - began < 20
    assert step(envelope, "a")["error"]["code"] == "TEMPLATE_TIMEOUT"


@pytest.mark.slow
def test_what_a_step_says_can_be_shaped_and_checked(run: Run) -> None:
    envelope = run(
        """
        steps:
          shaped: {exec: "echo '{\\"a\\": {\\"b\\": 7}}'", transform: "{{ output.a.b }}"}
          good: {exec: "echo '{\\"n\\": 1}'", output_schema: {type: object, required: [n]}}
          bad: {exec: "echo '{\\"m\\": 1}'", output_schema: {type: object, required: [n]}}
        """
    )
    assert step(envelope, "shaped")["output"] == 7
    assert statuses(envelope) == {"shaped": "succeeded", "good": "succeeded", "bad": "failed"}
    assert step(envelope, "bad")["error"]["code"] == "OUTPUT_INVALID"


@pytest.mark.slow
@pytest.mark.usefixtures("one_second")
def test_a_schema_that_takes_for_ever_fails_its_step(run: Run) -> None:
    envelope = run('steps: {slow: {exec: "printf %0100d 0; echo x", output_schema: {pattern: "^(0+)+$"}}}')
    assert step(envelope, "slow")["error"]["code"] == "OUTPUT_INVALID"
    assert "timed out after 1s" in step(envelope, "slow")["error"]["message"]


@pytest.mark.slow
def test_a_schema_that_names_a_server_fails_its_step_and_nobody_is_asked(run: Run) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0)
        url = f"http://127.0.0.1:{server.getsockname()[1]}/schema.json"
        envelope = run(f'steps: {{far: {{exec: echo 1, output_schema: {{$ref: "{url}"}}}}}}')
        with pytest.raises(BlockingIOError):
            server.accept()
    assert step(envelope, "far")["error"]["code"] == "OUTPUT_INVALID"
    assert "cannot be followed" in step(envelope, "far")["error"]["message"]


@pytest.mark.slow
def test_an_output_that_is_not_there_is_told_with_the_reason(run: Run) -> None:
    envelope = run(
        """
        steps:
          late: {exec: sleep 0.5}
          bad: {exec: exit 1, continue_on_failure: true}
          early: {exec: "echo {{ outputs.late }}"}
          behind: {exec: "echo {{ outputs.bad | upper }}", depends_on: bad}
          nobody: {exec: x, if: "outputs.nobdy == 1"}
        """
    )
    said = {name: step(envelope, name)["error"]["message"] for name in ("early", "behind", "nobody")}
    assert said["early"].endswith("step 'late' has not ended: wait for it with depends_on")
    assert said["behind"].endswith("step 'bad' has not succeeded")
    assert said["nobody"].endswith("there is no step 'nobdy'")


def test_tools_are_commands_with_named_arguments(run: Run) -> None:
    envelope = run(
        """
        tools:
          greet: {exec: 'echo "Hello, {{ args.name }}!"; cat', stdin: "{{ args.more }}"}
        steps:
          hi: {type: tool, tool: greet, arguments: {name: "A'da \\"$(id)\\"", more: "and\\nmore"}}
          slow: {type: tool, tool: greet, arguments: {name: x, more: y}, timeout: 5000}
        """
    )
    assert step(envelope, "hi")["output"] == 'Hello, A\'da "$(id)"!\nand\nmore'


def test_inputs_are_checked_before_anything_runs(run: Run) -> None:
    from shotclock.core.errors import Failure

    text = """
        inputs: {n: {type: integer, required: true}, s: {type: string}}
        steps: {a: {exec: 'echo {{ inputs.n }}{{ inputs.s }}'}}
    """
    with pytest.raises(Failure) as failure:
        run(text, inputs={"m": 1, "s": 5})
    assert {error["field"] for error in failure.value.context["errors"]} == {"inputs.m", "inputs.n", "inputs.s"}
    assert step(run(text, inputs={"n": "7", "s": "x"}), "a")["output"] == "7x"


def test_a_step_that_fails_does_not_call_for_itself_because_of_the_defaults(run: Run, tmp_path: Path) -> None:
    envelope = run("""
        defaults: {on_fail: {run: notify}}
        steps:
          a: {exec: exit 1}
          b: {exec: sleep 0.5; exit 1}
          notify: {exec: "echo told >> told; exit 1"}
    """)
    assert statuses(envelope) == {"a": "failed", "b": "failed", "notify": "failed"}
    assert len((tmp_path / "told").read_text().splitlines()) == 2, "once for each of the others"


@pytest.mark.slow
def test_steps_that_call_for_each_other_for_ever_do_not(run: Run, tmp_path: Path) -> None:
    envelope = run("""
        steps:
          a: {exec: "echo a >> ran; exit 1", on_fail: {run: b}}
          b: {exec: "echo b >> ran; exit 1", on_fail: {run: a}}
          c: {exec: exit 1, on_fail: {run: a}}
    """)
    assert statuses(envelope) == {"a": "failed", "b": "failed", "c": "failed"}
    assert 2 <= len((tmp_path / "ran").read_text().splitlines()) <= 210
    assert "LOOP_CAP" in [note["code"] for note in envelope.warnings], "also at the top, where somebody looks"


def test_an_error_of_ours_outside_of_a_step_ends_the_run_and_stops_the_other_steps() -> None:
    """The executor answers for what goes wrong in a step. What goes wrong around it must not leave the run waiting."""
    stopped: list[str] = []

    async def execute(name: str, step: StepPart, state: StepState, scope: dict[str, Any]) -> None:
        if name == "broken":
            raise RuntimeError("ours")
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            stopped.append(name)
            raise

    async def record(states: Sequence[StepState]) -> None:
        pass

    steps = {name: {"type": "command", "exec": "true"} for name in ("waits", "broken")}
    running = Scheduler(WorkflowFile.model_validate({"steps": steps}), execute=execute, record=record, scope={})
    with pytest.raises(RuntimeError, match="ours"):
        asyncio.run(asyncio.wait_for(running.run(), 10))
    assert stopped == ["waits"]


def test_a_step_whose_start_is_being_recorded_does_not_begin_once_the_run_winds_down() -> None:
    begun: list[str] = []

    async def execute(name: str, step: StepPart, state: StepState, scope: dict[str, Any]) -> None:
        begun.append(name)
        state.status = Status.SUCCEEDED

    async def record(states: Sequence[StepState]) -> None:
        running.wind_down()

    steps = {name: {"type": "command", "exec": "true"} for name in ("a", "b")}
    running = Scheduler(WorkflowFile.model_validate({"steps": steps}), execute=execute, record=record, scope={})
    asyncio.run(asyncio.wait_for(running.run(), 10))
    assert begun == [] and {state.status for state in running.states.values()} == {Status.SKIPPED}


@pytest.mark.slow
def test_the_headline_counts_what_timed_out_beside_what_failed(run: Run, store: Store) -> None:
    envelope = run(
        """
        steps:
          hang: {exec: sleep 9, timeout: 300ms, grace: 0, continue_on_failure: true}
          quiet: {exec: sleep 9, idle: 300ms, grace: 0, continue_on_failure: true}
          test: {exec: exit 1}
          fine: {exec: "true"}
        """
    )
    assert envelope.error is not None
    assert envelope.error["message"] == "2 timed out, 1 failed, of 4 steps: test, hang, quiet"
    alone = run("steps: {hang: {exec: sleep 9, timeout: 300ms, grace: 0}, fine: {exec: 'true'}}", run_id="r2")
    assert alone.error is not None and alone.error["message"] == "1 timed out, of 2 steps: hang"
    stored = store.runs.get("r2")
    assert stored is not None
    report = to_markdown(report_of(stored, store.runs.steps("r2"), now=stored.created_at, is_alive=False))
    assert "`1 timed out, of 2 steps: hang`" in report
