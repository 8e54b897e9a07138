"""Outputs that a command writes to $SHOTCLOCK_OUTPUT: whole, or an error of the step."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from shotclock.core.envelope import Envelope
from shotclock.flows.steps._output_file import FILE_LIMIT, read_output_file
from tests.rows import row


@pytest.fixture
def read(tmp_path: Path) -> Callable[[str | bytes], dict[str, str]]:
    def read(content: str | bytes) -> dict[str, str]:
        file = tmp_path / "outputs"
        file.write_bytes(content if isinstance(content, bytes) else content.encode())
        return read_output_file(str(file))

    return read


def test_values_are_lines_or_blocks(read: Callable[[str], dict[str, str]]) -> None:
    for text, values in [
        ("", {}),
        ("\n\n", {}),
        ("a=1\nb= x = y \n\na=2", {"a": "2", "b": " x = y "}),
        ("a=x<<y\n", {"a": "x<<y"}),
        ("a<<E\nb=1\n\n E\nE\nc=", {"a": "b=1\n\n E", "c": ""}),
        ("a<<E=F\none\nE=F\n", {"a": "one"}),
        ("a<<E\nE\n", {"a": ""}),
    ]:
        with row(text):
            assert read(text) == values


def test_content_that_is_cut_or_malformed_is_refused(read: Callable[[str | bytes], dict[str, str]]) -> None:
    name = "is not NAME=value"
    for content, message in [
        ("a=1\nb", f"line 2 {name}"),
        ("a b=1", f"line 1 {name}"),
        ("a-b=1", f"line 1 {name}"),
        ("=1", f"line 1 {name}"),
        ("a<<\n", f"line 1 {name}"),
        ("x=1\na<<E\none\nE ", "line 2: the value of a has no end"),
        (b"a=\xe4", "is not UTF-8"),
        (b"a=" + b"x" * (FILE_LIMIT - 1), f"is larger than {FILE_LIMIT} bytes"),
    ]:
        with row(message), pytest.raises(ValueError, match=r"^\$SHOTCLOCK_OUTPUT") as raised:
            read(content)
        assert message in str(raised.value)
    assert len(read(b"a=" + b"x" * (FILE_LIMIT - 2))["a"]) == FILE_LIMIT - 2


def test_steps_use_the_values_that_a_step_has_written(run: Callable[..., Envelope]) -> None:
    secret = "hunter2-of-the-environment"
    envelope = run(
        """
        tools:
          name: {exec: 'echo "who={{ args.who }}" >> "$SHOTCLOCK_OUTPUT"'}
        steps:
          build:
            env: {API_TOKEN: "${API_TOKEN}"}
            exec: |
              echo printed
              echo "version=1.10" >> "$SHOTCLOCK_OUTPUT"
              { echo 'notes<<END'; printf 'a "quoted" one\\ntwo; false\\n'; echo END; } >> "$SHOTCLOCK_OUTPUT"
              echo "shown=$API_TOKEN" >> "$SHOTCLOCK_OUTPUT"
          greet: {type: tool, tool: name, args: {who: you}}
          printed: {exec: echo only printed}
          use:
            exec: echo {{ outputs.build.version }} {{ outputs.build.notes }} {{ outputs.greet.who }}
            depends_on: [build, greet]
          each:
            for_each: [a, b]
            exec: echo "item={{ item }}" >> "$SHOTCLOCK_OUTPUT"
        """,
        environment={**os.environ, "API_TOKEN": secret},
    )
    assert isinstance(envelope.data, dict) and envelope.ok, envelope
    outputs = {name: step["output"] for name, step in envelope.data["steps"].items()}
    assert outputs["build"].keys() == {"version", "notes", "shown"}
    assert outputs["build"]["version"] == "1.10"
    assert outputs["use"] == '1.10 a "quoted" one\ntwo; false you'
    assert outputs["printed"] == "only printed"
    assert outputs["each"] == [{"item": "a"}, {"item": "b"}]
    assert secret not in str(envelope.to_dict())


def test_a_step_fails_with_a_wrong_file_and_each_try_has_its_own(run: Callable[..., Envelope]) -> None:
    envelope = run(
        """
        steps:
          cut: {exec: 'echo seen; printf "a<<END\\nhalf" >> "$SHOTCLOCK_OUTPUT"'}
          linked: {exec: 'ln -sf /etc/passwd "$SHOTCLOCK_OUTPUT"'}
          piped: {exec: 'rm "$SHOTCLOCK_OUTPUT"; mkfifo "$SHOTCLOCK_OUTPUT"'}
          folder: {exec: 'rm "$SHOTCLOCK_OUTPUT"; mkdir "$SHOTCLOCK_OUTPUT"'}
          removed: {exec: 'echo printed; rm "$SHOTCLOCK_OUTPUT"'}
          failed: {exec: 'echo printed; echo a=1 >> "$SHOTCLOCK_OUTPUT"; exit 3'}
          again:
            exec: 'echo try=1 >> "$SHOTCLOCK_OUTPUT"; wc -l < "$SHOTCLOCK_OUTPUT" >> lines; test $(wc -l < lines) = 2'
            on_fail: {retry: {max: 1, backoff: {delay_ms: 1}}}
          after: {exec: 'cat lines; rm lines', depends_on: again}
          never: {exec: "true", depends_on: cut}
        """
    )
    assert isinstance(envelope.data, dict)
    steps = envelope.data["steps"]
    for name in ("cut", "linked", "piped", "folder"):
        with row(name):
            assert (steps[name]["status"], steps[name]["error"]["code"]) == ("failed", "OUTPUT_INVALID")
            assert steps[name]["output"] is None
    assert "line 1: the value of a has no end" in steps["cut"]["error"]["message"]
    assert steps["cut"]["error"]["context"]["stdout"] == "seen\n"
    assert steps["never"]["status"] == "skipped"
    assert (steps["removed"]["output"], steps["failed"]["output"]) == ("printed", "printed")
    assert steps["again"]["output"] == {"try": "1"}
    assert steps["after"]["output"].split() == ["1", "1"]


def test_no_file_is_left_behind(run: Callable[..., Envelope]) -> None:
    envelope = run("steps: ['echo here=$SHOTCLOCK_OUTPUT >> $SHOTCLOCK_OUTPUT']")
    assert isinstance(envelope.data, dict)
    file = envelope.data["steps"]["step-1"]["output"]["here"]
    assert os.path.isabs(file) and not os.path.lexists(file)
