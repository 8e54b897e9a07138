"""Which shell runs a command, and what becomes of a failure inside a pipe."""

import shutil
import subprocess
from collections.abc import Callable

import pytest

from shotclock.core.envelope import Envelope
from shotclock.workflow.loader import load_text

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


def test_a_shell_that_is_not_there_is_told(run: Run) -> None:
    envelope = run("steps: {a: {exec: 'true', shell: /no/such/bash}}")
    assert step(envelope, "a")["error"]["code"] == "COMMAND_NOT_FOUND"


@pytest.mark.parametrize("shell", ["zsh", "python3", "[]", "''", "[bash, -c]", "[bash, -ec]", "'{{ inputs.x }}'"])
def test_what_is_no_shell_that_takes_values_as_data_is_refused(shell: str) -> None:
    loaded = load_text(f"steps: {{a: {{exec: x, shell: {shell}}}}}".encode())
    assert [finding.field for finding in loaded.findings] == ["steps.a.shell"]


def test_lines_are_counted_as_in_the_file(run: Run) -> None:
    envelope = run('steps: {a: {exec: "true\\nnosuchprogram", stdin: x}}')
    assert "2: nosuchprogram" in step(envelope, "a")["error"]["context"]["stderr"].replace("line ", "")
