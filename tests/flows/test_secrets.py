"""Secrets of a run: what of them is kept, what is asked for, and what data can do about it."""

import base64
import json
import os
import sqlite3
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shotclock.core.envelope import Envelope
from shotclock.core.errors import Failure
from shotclock.core.visible_text import Redaction
from shotclock.flows.file.schema import WorkflowFile
from shotclock.flows.run.state import is_same, redaction_for, without_secrets

from .conftest import statuses, step
from .test_people import YES, Runs

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("no_survivors", "warm_starts")]
Run = Callable[..., Envelope]
PATH = {"PATH": "/usr/bin:/bin"}
LITERAL = """
env: {TOP_SECRET: literal-top-1}
defaults: {env: {SOME_KEY: literal-default-2}}
tools: {t: {exec: 'echo "$TOOL_TOKEN" | wc -c', env: {TOOL_TOKEN: literal-tool-3}}}
steps:
  gate: {exec: 'echo gate', approval: true}
  use:
    exec: test "$DB_PASSWORD$SHORT_PIN" = s3cr3tpass7531 && echo fine
    env: {DB_PASSWORD: s3cr3tpass, SHORT_PIN_KEY: qwx, SHORT_PIN: 7531, PLAIN: not-hidden}
    depends_on: gate
  fetch:
    type: http_client
    url: http://127.0.0.1:1/
    headers: {Authorization: Bearer literal-header-4, X-Token: "{{ env.TOP_SECRET }}", Accept: text/plain}
    depends_on: use
    continue_on_failure: true
  tool: {type: tool, tool: t, depends_on: gate}
"""
HIDDEN = ["literal-top-1", "literal-default-2", "literal-tool-3", "s3cr3tpass", "literal-header-4", "qwx"]


def stored(folder: Path) -> str:
    (database,) = (folder / "home").glob("*.db")
    with sqlite3.connect(database) as connection:
        tables = ("runs", "steps", "proposals", "audit")
        return "\n".join(str(row) for table in tables for row in connection.execute(f"SELECT * FROM {table}"))


def test_a_literal_secret_of_the_file_is_not_kept_and_is_there_when_the_run_goes_on(tmp_path: Path) -> None:
    runs = Runs(tmp_path)
    runs(runs.flow(LITERAL), "--run-id", "r1", code=14)
    kept = stored(tmp_path)
    assert [secret for secret in HIDDEN if secret in kept] == []
    assert "not-hidden" in kept and "{{ env.TOP_SECRET }}" in kept
    runs.decide(YES)
    ended = runs("--resume", "r1", code=0)
    assert ended["data"]["steps"]["use"]["output"] == "fine"
    assert ended["data"]["steps"]["tool"]["output"] in (15, "15")
    assert [secret for secret in HIDDEN if secret in stored(tmp_path) + json.dumps(ended)] == []


def test_a_run_whose_secrets_are_gone_with_its_file_is_not_gone_on_with(tmp_path: Path) -> None:
    runs = Runs(tmp_path)
    runs(runs.flow(LITERAL), "--run-id", "r1", code=14)
    runs.decide(YES)
    file = tmp_path / "flow.yaml"
    file.unlink()
    refused = runs("--resume", "r1", code=5)
    assert refused["error"]["code"] == "FILE_NOT_FOUND" and "put the file back" in refused["error"]["suggestion"]
    file.write_text(LITERAL.replace("echo fine", "echo other"))
    refused = runs("--resume", "r1", code=2)
    assert refused["error"]["code"] == "WORKFLOW_INVALID" and "has changed" in refused["error"]["message"]
    file.write_text(LITERAL)
    assert runs("--resume", "r1", code=0)["ok"]


def test_two_literal_secrets_of_one_name_are_both_hidden() -> None:
    def fetch(token: str) -> dict[str, Any]:
        return {"type": "http_client", "url": "http://127.0.0.1:1/", "headers": {"Authorization": token}}

    steps = {"a": fetch("Bearer literal-first"), "b": fetch("Bearer literal-second")}
    redaction = redaction_for(WorkflowFile.model_validate({"steps": steps}), {"0_SECRET": "from-outside"})
    said = redaction.text("Bearer literal-first, Bearer literal-second, from-outside")
    assert "literal" not in said and "outside" not in said


def test_a_run_without_literal_secrets_goes_on_without_its_file(tmp_path: Path) -> None:
    runs = Runs(tmp_path)
    runs.env["SOME_TOKEN"] = "from-outside"
    flow = runs.flow("steps: {a: {exec: 'echo ***; test ${#T} = 12', approval: true, env: {T: '${SOME_TOKEN}'}}}")
    runs(flow, "--run-id", "r1", code=14)
    runs.decide(YES)
    (tmp_path / flow).unlink()
    assert runs("--resume", "r1", code=0)["ok"]


@pytest.mark.parametrize(
    ("kept", "written", "same"),
    [
        ({"a": "x *** y"}, {"a": "x secret y"}, True),
        ({"a": "***"}, {"a": 1234}, True),
        ({"a": "x *** y"}, {"a": "z secret y"}, False),
        ({"a": "x"}, {"a": "y"}, False),
        ({"a": ["x"]}, {"a": ["x", "y"]}, False),
        ({"a": "x"}, {"a": "x", "b": 1}, False),
        ({"a": 1}, {"a": True}, False),
    ],
)
def test_a_file_may_differ_from_what_was_kept_only_where_something_is_hidden(
    kept: Any, written: Any, same: bool
) -> None:
    assert is_same(kept, written) is same


def test_a_variable_that_is_not_set_is_an_error_before_anything_runs(run: Run, tmp_path: Path) -> None:
    text = """
    env: {TOP: "${NOT_SET_1}"}
    tools: {used: {exec: x, env: {A: "${NOT_SET_2}"}}, idle: {exec: x, env: {A: "${NOT_SET_3}"}}}
    steps:
      first: {exec: touch ran}
      second: {exec: 'true', env: {T: "Bearer ${API_TOKEN}", U: "${IS_SET}${IS_EMPTY}"}}
      third: {type: tool, tool: used}
    """
    with pytest.raises(Failure) as refused:
        run(text, environment={**PATH, "IS_SET": "x", "IS_EMPTY": ""})
    assert refused.value.code == "ARG_ERROR"
    errors: Any = refused.value.context["errors"]
    assert [error["field"] for error in errors] == ["env.TOP", "steps.second.env.T", "tools.used.env.A"]
    assert not (tmp_path / "ran").exists()


def test_a_variable_that_may_be_missing_says_what_it_is_then(run: Run) -> None:
    envelope = run(
        """
        steps:
          a:
            exec: echo "[$A] [$B] [$C] [$D] [$E]"
            env: {A: "${NONE:-a b}", B: "${NONE-}", C: "${EMPTY:-c}", D: "${EMPTY-d}", E: "${SET:-e}-${SET}"}
        """,
        environment={**PATH, "EMPTY": "", "SET": "s"},
    )
    assert step(envelope, "a")["output"] == "[a b] [] [c] [] [s-s]"


def test_data_cannot_ask_for_a_variable(run: Run) -> None:
    """Only what stands in the file does: a step that prints `${API_TOKEN}` is not given the token."""
    envelope = run(
        """
        steps:
          evil: {exec: "printf '%s' '${API_TOKEN} ${NOT_SET}'"}
          plain: {exec: 'printf "%s" "$A" | wc -c', env: {A: "{{ outputs.evil }}"}, depends_on: evil}
          mixed:
            exec: test "$A" = '${API_TOKEN} ${NOT_SET} <token-value-1>'
            env: {A: "{{ outputs.evil | trim }} <${API_TOKEN}>"}
            depends_on: evil
        """,
        environment={**PATH, "API_TOKEN": "token-value-1"},
    )
    assert statuses(envelope) == {"evil": "succeeded", "plain": "succeeded", "mixed": "succeeded"}
    assert str(step(envelope, "plain")["output"]) == str(len("${API_TOKEN} ${NOT_SET}"))


def test_a_secret_that_looks_like_a_template_is_not_one(run: Run) -> None:
    envelope = run(
        "steps: {a: {exec: 'test \"$A\" = \"x {{ 1 + 1 }}\"', env: {A: '{{ run.name }}${B_KEY}'}}}".replace(
            "x {{ 1 + 1 }}", "flow$WANT"
        ),
        environment={**PATH, "B_KEY": "{{ 1 + 1 }}", "WANT": "{{ 1 + 1 }}"},
    )
    assert statuses(envelope) == {"a": "succeeded"}


def test_check_points_at_variables_that_are_not_set_here(shotclock: Callable[..., Any], tmp_path: Path) -> None:
    (tmp_path / "flow.yaml").write_text('steps: {a: {exec: x, env: {T: "${NOT_SET_ANYWHERE}", U: "${NEITHER:-}"}}}')
    found = shotclock("check", tmp_path / "flow.yaml").json()["data"]["findings"]
    assert [(each["rule"], each["severity"], each["field"]) for each in found] == [
        ("env/unset", "warning", "steps.a.env.T")
    ]


def test_a_variable_that_a_template_names_is_not_set(shotclock: Callable[..., Any], run: Run, tmp_path: Path) -> None:
    text = "{env: {OWN: a}, steps: {a: {exec: 'echo {{ env.OWN }} {{ env.NOT_SET }}', if: 'env.MAYBE is not defined'}}}"
    (tmp_path / "flow.yaml").write_text(text)
    (found,) = shotclock("check", tmp_path / "flow.yaml").json()["data"]["findings"]
    assert (found["rule"], found["severity"], found["field"]) == ("env/unset", "warning", "steps.a.exec")
    assert "the variable NOT_SET is not set; set it" in found["message"]
    error = step(run(text), "a")["error"]
    assert error["code"] == "TEMPLATE_FAILED" and "the variable NOT_SET is not set; set it" in error["message"]


def test_a_known_secret_is_not_kept_wherever_it_stands_in_the_file() -> None:
    secret = "token-value-1"
    written = {
        "inputs": {"a": {"default": f"x {secret}"}},
        "tools": {"t": {"exec": f"curl {secret}", "stdin": secret}},
        "steps": {
            secret: {"type": "command", "exec": f"curl -H 'X: {secret}'", "depends_on": [secret]},
            "h": {
                "type": "http_client",
                "url": f"https://x/?q={secret}",
                "body": {"k": [secret]},
                "params": {"p": secret},
            },
            "m": {"type": "mcp", "command": f"server {secret}", "args": [secret], "arguments": {"a": {"b": secret}}},
            "g": {"type": "git-checkout", "repository": f"https://x:{secret}@host/r"},
        },
    }
    kept = without_secrets(written, Redaction({"API_TOKEN": secret}))
    assert json.dumps(kept).count(secret) == 2  # the name of a step, and who waits for it
    assert is_same(kept, written)


def test_a_secret_that_base64_breaks_over_lines_is_hidden(run: Run, tmp_path: Path) -> None:
    secret = "ghp_AbCdEfGhIjKlMnOpQrStUvWxYz0123456789"
    wraps = [20, 64, 76]
    script = "\n".join(
        f"for n in 1 20 30 40 41 42; do printf %${{n}}s%s x $API_TOKEN | base64 -w {wrap}; done" for wrap in wraps
    )
    encoded = base64.encodebytes(b"token = " * 6 + secret.encode()).decode()
    hides = Redaction({"API_TOKEN": secret})
    as_json = json.dumps({"key": encoded.replace("\n", "\r\n")})
    assert hides.holds(encoded) and "***" in hides.text(as_json) and json.loads(hides.text(as_json))
    untouched = "first line\nsecond line\n"
    assert hides.text(untouched) == untouched and not hides.holds(untouched)

    workflow = {"steps": {"a": {"type": "command", "exec": script, "env": {"API_TOKEN": "${API_TOKEN}"}}}}
    envelope = run(WorkflowFile.model_validate(workflow), environment={**PATH, "API_TOKEN": secret})
    output = str(step(envelope, "a")["output"])
    assert output.count("***") == 6 * len(wraps)
    for text in (output, stored(tmp_path)):
        # What is certain of the secret's base64 at each of its three offsets.
        joined = text.replace("\\n", "").replace("\n", "")
        for before in range(3):
            assert base64.b64encode(b" " * before + secret.encode()).decode()[8:-8] not in joined


def test_a_workflow_with_nothing_to_hide_is_kept_as_it_is(run: Run, tmp_path: Path) -> None:
    workflow = WorkflowFile.model_validate({"steps": {"a": {"type": "command", "exec": "echo ***", "env": {"A": "b"}}}})
    run(workflow, environment=PATH)
    assert "x-secrets-hidden" not in stored(tmp_path)


def test_settings_of_git_in_the_environment_reach_git_whole(run: Run, tmp_path: Path) -> None:
    repository = tmp_path / "repository"
    git = ["git", "-c", "user.name=x", "-c", "user.email=x@example.com"]
    subprocess.run([*git, "init", "-q", repository], check=True, timeout=20)
    subprocess.run([*git, "commit", "-q", "--allow-empty", "-m", "x"], check=True, timeout=20, cwd=repository)
    settings = {"GIT_CONFIG_COUNT": "1", "GIT_CONFIG_KEY_0": "safe.directory", "GIT_CONFIG_VALUE_0": "*"}
    envelope = run(
        f"""
        steps:
          fetch: {{type: git-checkout, repository: "{repository}", path: copy}}
          read: {{exec: git config --get safe.directory}}
        """,
        environment={**os.environ, **settings},
    )
    assert statuses(envelope) == {"fetch": "succeeded", "read": "succeeded"}
    assert step(envelope, "read")["output"] == "*"
