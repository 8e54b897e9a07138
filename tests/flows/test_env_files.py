"""Files of variables: their form, which value counts, and that nothing in them is executed or shown."""

import os
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

from shotclock.core.envelope import Envelope
from shotclock.flows.file._env_files import FILE_LIMIT, read_variables
from shotclock.flows.file.loader import Loaded, load_file
from tests.conftest import Ran
from tests.rows import row

DOTENV = r"""
# a comment
PLAIN=a b
export EXPORTED = exported   # a comment
EMPTY=
HASH=a#b
SINGLE='$HOME # \n'  # a comment
DOUBLE="a\tb\n\"\$HOME\" `touch ran` \d"
LINES="one
two"
APOSTROPHE=it's
TWICE=1
TWICE=2
"""


def test_a_file_of_variables_is_read_as_data() -> None:
    expected = {
        "PLAIN": "a b",
        "EXPORTED": "exported",
        "EMPTY": "",
        "HASH": "a#b",
        "SINGLE": r"$HOME # \n",
        "DOUBLE": 'a\tb\n"$HOME" `touch ran` \\d',
        "LINES": "one\ntwo",
        "APOSTROPHE": "it's",
        "TWICE": "2",
    }
    assert read_variables(DOTENV) == expected
    assert read_variables(DOTENV.replace("\n", "\r\n")) == expected


def test_a_wrong_line_is_named_and_its_value_is_not_shown() -> None:
    for text, message in [
        ("A=1\nsecret words", "line 2 is not NAME=value"),
        ("1A=secret", "line 1 is not NAME=value"),
        ("A='1\n2'\nB='secret", "line 3: the quotation mark is never closed"),
        ("A='1' secret", "line 1: there is more behind the closing quotation mark"),
        ("A=secret{{ x }}", "line 1: `{{`, `{%` and `${NAME}` in a value are not replaced"),
        ("A=secret${B}", "line 1: `{{`, `{%` and `${NAME}` in a value are not replaced"),
        ("A=secret\0", "line 1 holds a NUL character"),
    ]:
        with row(text):
            with pytest.raises(ValueError, match=r"^line") as raised:
                read_variables(text)
            assert str(raised.value).startswith(message)
            assert "secret" not in str(raised.value)


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Loaded]:
    """A function that writes a workflow file with files beside it, and loads it."""

    def write(text: str, **files: str) -> Loaded:
        for name, content in files.items():
            (tmp_path / f"{name}.env").write_text(content)
        file = tmp_path / "flow.yaml"
        file.write_text(textwrap.dedent(text))
        return load_file(file)

    return write


def test_the_nearest_value_counts(write: Callable[..., Loaded], run: Callable[..., Envelope]) -> None:
    loaded = write(
        """
        env_file: [first.env, {path: second.env}]
        env: {C: file, D: file}
        steps:
          a:
            env_file: step.env
            env: {E: step}
            exec: echo $A $B $C $D $E "$F" {{ env.A }}
        """,
        first="A=first\nB=first\nC=first\nD=first\nE=first\nF='`echo $A`'",
        second="B=second\nC=second\nD=second\nE=second",
        step="D=of-step\nE=of-step",
    )
    assert loaded.workflow is not None, loaded.findings
    envelope = run(loaded.workflow, environment={**os.environ, "A": "environment"})
    assert isinstance(envelope.data, dict)
    assert envelope.data["steps"]["a"]["output"] == "first second file of-step step `echo $A` first"


def test_a_value_that_looks_secret_is_masked_and_not_stored(
    write: Callable[..., Loaded], run: Callable[..., Envelope], tmp_path: Path
) -> None:
    secret = "hunter2-of-the-file"
    loaded = write("env_file: s.env\nsteps: [echo $API_TOKEN]", s=f"API_TOKEN={secret}")
    assert loaded.workflow is not None
    envelope = run(loaded.workflow)
    assert envelope.ok and secret not in str(envelope.to_dict())
    for file in (tmp_path / "home").rglob("*"):
        if file.is_file():
            assert secret.encode() not in file.read_bytes(), file


def test_a_missing_file_is_a_mistake_unless_it_is_optional(write: Callable[..., Loaded]) -> None:
    loaded = write(
        """
        env_file: [gone.env, {path: gone.env, optional: true}]
        steps:
          a:
            exec: x
            env_file: {path: gone.env, optional: true}
          b:
            exec: x
            env_file: also.env
        """
    )
    assert loaded.workflow is None
    assert [(each.rule, each.place.line) for each in loaded.findings] == [("env/file", 2), ("env/file", 9)]
    assert loaded.findings[0].message == "there is no file 'gone.env'"


def test_what_is_no_file_of_variables_is_refused(write: Callable[..., Loaded], tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.env")
    (tmp_path / "latin.env").write_bytes(b"A=\xe4")
    (tmp_path / "large.env").write_bytes(b"#" * (FILE_LIMIT + 1))
    (tmp_path / "wrong.env").write_text("A=1\n=2")
    for name, message in [
        ("pipe.env", "'pipe.env' cannot be read: it is not a file"),
        (".", "'.' cannot be read: Is a directory"),
        ("latin.env", "'latin.env' is not UTF-8"),
        ("large.env", f"'large.env' is larger than {FILE_LIMIT} bytes"),
        ("wrong.env", "'wrong.env', line 2 is not NAME=value"),
        ("'{{ run.id }}.env'", "the file is read before anything runs: its name cannot be a template"),
    ]:
        with row(name):
            loaded = write(f"steps:\n  - exec: x\n    env_file: {name}\n    soft: soon")
            assert [(each.message, each.place.line) for each in loaded.findings[:1]] == [(message, 3)]
            assert len(loaded.findings) == 2


def test_the_digest_of_a_workflow_covers_its_variables(write: Callable[..., Loaded]) -> None:
    digests = {write("env_file: a.env\nsteps: [x]", a=text).source.sha256 for text in ("A=1", "A=2", "A=2")}
    assert len(digests) == 2


def test_a_resumed_run_reads_secrets_again_and_refuses_other_changes(
    shotclock: Callable[..., Ran], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHOTCLOCK_HOME", str(tmp_path / "home"))
    flow, variables = tmp_path / "flow.yaml", tmp_path / ".env"
    flow.write_text(
        textwrap.dedent("""\
        env_file: .env
        steps:
          - {id: ask, type: human-input, prompt: Which?}
          - {id: after, exec: 'echo ${#API_TOKEN} $PLAIN'}
        """)
    )
    variables.write_text("API_TOKEN=abcdefgh\nPLAIN=one\n")
    parked = shotclock("run", str(flow), "--run-id", "secrets", "--budget", "100ms", "--json").json()
    [waiting] = parked["data"]["waiting"]
    shotclock("inbox", "approve", waiting["proposal_id"], "--answer", "yes", "--json")
    variables.write_text("API_TOKEN=abcdefgh\nPLAIN=two\n")
    refused = shotclock("run", "--resume", "secrets", "--json").json()
    assert (refused["error"]["code"], refused["data"]) == ("WORKFLOW_INVALID", None)
    variables.write_text("API_TOKEN=abcdefghij\nPLAIN=one\n")
    resumed = shotclock("run", "--resume", "secrets", "--json").json()
    assert resumed["ok"] and resumed["data"]["steps"]["after"]["output"] == "10 one"
