"""Which shell runs a command, when a command has failed, and what its exit code decides."""

import shutil
import subprocess
from collections.abc import Callable
from typing import Any

import pytest

from shotclock.core.envelope import Envelope
from shotclock.flows.file.loader import load_text
from tests.rows import row

from .conftest import statuses, step

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("no_survivors")]
Run = Callable[..., Envelope]
needs_bash = pytest.mark.skipif(shutil.which("bash") is None, reason="no bash")


@needs_bash
def test_a_step_a_tool_and_a_whole_file_may_ask_for_bash(run: Run) -> None:
    envelope = run(
        """
        tools: {t: {exec: 'cat <<< tool', shell: [bash, -eu]}}
        steps:
          step: {exec: 'cat <<< "{{ run.name }}"', shell: bash}
          tool: {type: tool, tool: t}
          strict: {exec: 'echo $nothing; echo on', shell: [/bin/bash, -u], continue_on_failure: true}
        """
    )
    assert statuses(envelope) == {"step": "succeeded", "tool": "succeeded", "strict": "failed"}
    assert step(envelope, "step")["output"] == "flow" and step(envelope, "tool")["output"] == "tool"
    envelope = run("defaults: {shell: bash}\nsteps: {all: {exec: 'a=(x y); echo ${a[1]}'}}")
    assert step(envelope, "all")["output"] == "y"


@needs_bash
def test_a_failure_inside_a_pipe_fails_the_step_where_the_shell_has_pipefail(run: Run) -> None:
    envelope = run(
        """
        steps:
          fails: {exec: "false | cat", shell: bash}
          off: {exec: "set +o pipefail; false | cat", shell: bash}
          works: {exec: "echo a | cat", shell: bash}
        """
    )
    assert statuses(envelope) == {"fails": "failed", "off": "succeeded", "works": "succeeded"}


def test_sh_has_pipefail_where_it_knows_it_and_says_nothing_where_it_does_not(run: Run) -> None:
    knows = subprocess.run(["/bin/sh", "-c", "set -o pipefail"], capture_output=True, timeout=20).returncode == 0
    envelope = run("steps: {a: {exec: 'false | cat'}, b: {exec: 'echo; nosuchprogram'}}")
    assert statuses(envelope)["a"] == ("failed" if knows else "succeeded")
    said = step(envelope, "b")["error"]["context"]["stderr"]
    assert "pipefail" not in said and "option" not in said and "nosuchprogram" in said


@needs_bash
def test_a_failure_without_a_word_on_stderr_names_the_programs_inside_pipes(run: Run) -> None:
    envelope = run(
        """
        defaults: {shell: bash}
        steps:
          silent: {exec: "n=$(ls none* 2>/dev/null | wc -l); echo $n"}
          several: {exec: "ls none* 2>/dev/null | grep x | cat"}
          loud: {exec: "ls none* | wc -l"}
          no_pipe: {exec: "false"}
        """
    )
    messages = {name: step(envelope, name)["error"]["message"] for name in ("silent", "several", "loud", "no_pipe")}
    assert messages["silent"].endswith("exit code 2; where the shell has `pipefail`, perhaps that of ls")
    assert messages["several"].endswith("exit code 1; where the shell has `pipefail`, perhaps that of ls or grep")
    assert "none" in step(envelope, "loud")["error"]["context"]["stderr"]
    assert messages["loud"].endswith("exit code 2") and messages["no_pipe"].endswith("exit code 1")


def test_a_command_fails_with_its_first_line_that_fails_unless_it_says_otherwise(run: Run) -> None:
    envelope = run(
        """
        tools: {t: {exec: "false; echo on"}}
        steps:
          lines: {exec: "cd /no/such/dir\necho published"}
          one: {exec: "false; echo on"}
          tool: {type: tool, tool: t}
          reads: {exec: "false; cat", stdin: text}
          off: {exec: "set +e; false; echo on"}
          option: {exec: "false; echo on", shell: [sh, +e]}
          handled: {exec: "false || echo on; if false; then :; fi; ! true; echo on"}
        """
    )
    failed, succeeded = ("lines", "one", "tool", "reads"), ("off", "option", "handled")
    assert statuses(envelope) == dict.fromkeys(failed, "failed") | dict.fromkeys(succeeded, "succeeded")


@needs_bash
def test_bash_fails_with_its_first_line_that_fails_and_with_any_command_of_a_pipe(run: Run) -> None:
    envelope = run(
        """
        defaults: {shell: bash}
        steps:
          lines: {exec: "false; echo on"}
          pipe: {exec: "false | true; echo on"}
          long: {exec: "false; echo on", shell: [bash, --norc, --noprofile, -u]}
          off: {exec: "false; false | true; echo on", shell: [bash, +e]}
          no_pipe: {exec: "false | true; echo on", shell: [bash, +o, pipefail]}
        """
    )
    failed, succeeded = ("lines", "pipe", "long"), ("off", "no_pipe")
    assert statuses(envelope) == dict.fromkeys(failed, "failed") | dict.fromkeys(succeeded, "succeeded")


def test_what_is_no_shell_that_takes_values_as_data_is_refused() -> None:
    for shell in ["zsh", "python3", "[]", "''", "[bash, -c]", "[bash, -ec]", "'{{ inputs.x }}'"]:
        with row(shell):
            loaded = load_text(f"steps: {{a: {{exec: x, shell: {shell}}}}}".encode())
            assert [finding.field for finding in loaded.findings] == ["steps.a.shell"]


def test_the_exit_code_of_a_command_decides_what_comes_next(run: Run, linted: Callable[[str], list[Any]]) -> None:
    text = """
        tools: {t: {exec: exit 4}}
        steps:
          probe: {exec: exit 2, continue_on_failure: true}
          tool: {type: tool, tool: t, continue_on_failure: true}
          fine: {exec: "true"}
          two: {exec: "echo {{ steps.probe.exit_code }}", if: steps.probe.exit_code == 2, depends_on: probe}
          one: {exec: echo one, if: steps.probe.exit_code == 1, depends_on: probe}
          each: {exec: "exit {{ item }}", for_each: [0], continue_on_failure: true}
        outputs: {tool: "{{ steps.tool.exit_code }}", each: "{{ steps.each.exit_code }}"}
        """
    assert not [finding for finding in linted(text) if finding.is_error]
    envelope = run(text)
    assert [step(envelope, name).get("exit_code") for name in ("probe", "tool", "fine", "each")] == [2, 4, 0, None]
    assert step(envelope, "two")["output"] == "2" and step(envelope, "one")["status"] == "skipped"
    assert envelope.data["outputs"] == {"tool": 4, "each": None}


def test_a_retry_may_be_only_for_some_exit_codes_and_error_codes(run: Run) -> None:
    envelope = run(
        """
        defaults: {grace: 0}
        steps:
          busy: {exec: exit 75, on_fail: {retry: {max: 2, on: [75, TIMEOUT], backoff: {delay_ms: 0}}}}
          wrong: {exec: exit 64, on_fail: {retry: {max: 2, on: [75, TIMEOUT], backoff: {delay_ms: 0}}}}
          slow: {exec: sleep 9, timeout: 100ms, on_fail: {retry: {max: 1, on: TIMEOUT, backoff: {delay_ms: 0}}}}
        """
    )
    assert {name: step(envelope, name)["attempts"] for name in ("busy", "wrong", "slow")} == {
        "busy": 3,
        "wrong": 1,
        "slow": 2,
    }


def test_a_retry_for_what_is_no_failure_is_refused() -> None:
    for on in ["[0]", "[256]", "timeout", "[true]", "['75']"]:
        with row(on):
            loaded = load_text(f"steps: {{a: {{exec: x, on_fail: {{retry: {{max: 1, on: {on}}}}}}}}}".encode())
            assert [finding.field for finding in loaded.findings] == ["steps.a.on_fail.retry.on"]


def test_the_hint_of_a_failed_command_names_keys_that_its_step_has(run: Run) -> None:
    failed = step(run("steps: {a: {exec: exit 3}}"), "a")
    assert failed["error"]["suggestion"] == "read error.context.stderr; exit_code is the command's own"
    assert (failed["error"]["context"]["stderr"], failed["exit_code"]) == ("", 3)
