"""Changes of timeouts in the text of a file: only those characters change, and what cannot be edited safely is left."""

import textwrap
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from shotclock.store.store import Store
from shotclock.workflow.history import Advice, History, Measured, advise, read_history
from shotclock.workflow.loader import load_text
from shotclock.workflow.plan import step_timeout_ms
from shotclock.workflow.schema import WorkflowFile
from shotclock.workflow.timeout_edit import EditedFile, edit_timeouts

from .past import add_run, took


def edit(text: str, /, **wanted_ms: int) -> EditedFile:
    """Edit the timeouts of these steps; `run` is that of the run."""
    loaded = load_text(text.encode())
    assert loaded.workflow is not None, loaded.findings
    advised = [
        Advice(each.step, each.timeout_ms, each.source, Measured(), "raise", "", "", ms, each.path)
        for each in advise(loaded.workflow, History())
        if (ms := wanted_ms.get(each.step or "run")) is not None
    ]
    assert len(advised) == len(wanted_ms)
    return edit_timeouts(text, loaded, advised)


def changed_lines(before: str, after: str) -> list[tuple[str, str]]:
    old, new = before.split("\n"), after.split("\n")
    assert len(old) == len(new), "a line was added or removed"
    return [(a, b) for a, b in zip(old, new, strict=True) if a != b]


FORMS = """\
# A file with everything that a careless edit would lose.
timeout: 5m          # of the run
x-shared: &env {A: "1"}   # an anchor

steps:
  seconds:
    # a comment above
    exec: |
      echo "timeout: 60"
    timeout:   60   # trailing
    env: *env
  text: {exec: 'true', timeout: "30s"}   # flow style
  iso:
    exec:   'true'
    "timeout":    'PT30S'
  quoted: {timeout: '60', exec: 'true'}
  web: {type: http_client, url: "http://127.0.0.1:1/", timeout: 30000}
  model:
    type: ai
    prompt: hello
    ai:
      model: test
      timeout: 60000
  clone: {type: git-checkout, repository: a/b, clone_timeout_ms: 300000}
"""


def test_each_timeout_keeps_its_form_and_nothing_else_changes() -> None:
    steps = ("seconds", "text", "iso", "quoted", "web", "model", "clone")
    edited = edit(FORMS, run=600_000, **dict.fromkeys(steps, 90_000))
    assert edited.notes == () and set(edited.steps) == {None, *steps}
    assert [b.strip() for _, b in changed_lines(FORMS, edited.text)] == [
        "timeout: 10m          # of the run",
        "timeout:   90   # trailing",
        "text: {exec: 'true', timeout: \"1m30s\"}   # flow style",
        "\"timeout\":    'PT90S'",
        "quoted: {timeout: '90', exec: 'true'}",
        'web: {type: http_client, url: "http://127.0.0.1:1/", timeout: 90000}',
        "timeout: 90000",
        "clone: {type: git-checkout, repository: a/b, clone_timeout_ms: 90000}",
    ]


def test_line_ends_a_byte_order_mark_and_a_missing_last_newline_stay() -> None:
    text = "\ufeffsteps:\r\n  a: # ü\r\n    exec: 'é'\r\n    timeout: 10s"
    assert edit(text, a=20_000).text == text.replace("10s", "20s")
    added = "steps:\r\n  a:\r\n    exec: 'true'\r\n    tags: [x]\r\n"
    assert edit(added, a=90_000).text == added.replace("'true'\r\n", "'true'\r\n    timeout: 1m30s\r\n")


def test_a_timeout_is_added_where_the_default_was_in_force() -> None:
    text = textwrap.dedent("""\
        steps:
          short:
            exec: 'true'   # why
            # about the tags
            tags: [x]
          long:
            # the script
            exec: |
              echo a

              echo b
          flow: {exec: 'true'}
          last:
            exec: 'true'""")
    edited = edit(text, short=90_000, long=90_000, flow=90_000)
    assert edited.notes == ()
    lines = edited.text.split("\n")
    assert lines[lines.index("    exec: 'true'   # why") + 1] == "    timeout: 1m30s"
    assert lines[lines.index("    exec: |") - 1] == "    timeout: 1m30s"
    assert "  flow: {timeout: 1m30s, exec: 'true'}" in lines and len(lines) == len(text.split("\n")) + 2
    # Nothing is below the last line to put it before.
    assert edit(text, last=90_000).steps in ((), ("last",))


def test_a_timeout_that_is_shared_or_elsewhere_is_left_with_a_note() -> None:
    cases = {
        "merged": "x-b: &b {timeout: 10s}\nsteps:\n  a: {<<: *b, exec: 'true'}\n  b: {<<: *b, exec: 'true'}\n",
        "alias": "x-t: &t 10s\nsteps: {a: {exec: 'true', timeout: *t}}\n",
        "anchored": "steps: {a: {exec: 'true', timeout: &t 10s}, b: {exec: 'true', timeout: *t}}\n",
        "anchored step": "steps:\n  a: &a {exec: 'true', timeout: 10s}\n  b: *a\n",
        "defaults": "defaults: {timeout: 10s}\nsteps: {a: {exec: 'true'}}\n",
        "tool": "tools: {t: {exec: 'true', timeout: 10s}}\nsteps: {a: {type: tool, tool: t}}\n",
        "tag": "steps: {a: {exec: 'true', timeout: !!str 10s}}\n",
        "block": "steps:\n  a:\n    exec: 'true'\n    timeout: >-\n      10s\n",
    }
    for name, text in cases.items():
        edited = edit(text, a=20_000)
        assert edited.text == text and edited.steps == () and len(edited.notes) == 1, (name, edited)
        assert edited.notes[0].startswith("a: ") and "edit" in edited.notes[0], (name, edited)


def test_an_anchor_that_no_other_step_uses_is_no_obstacle() -> None:
    text = "steps:\n  a: &a {exec: 'true', timeout: 10s}\n"
    assert edit(text, a=20_000).text == text.replace("10s", "20s")


@given(st.integers(1, 10_000), st.sampled_from(["60", "'60'", "60s", '"1m"', "PT60S", "1.5"]), st.booleans())
def test_an_edited_file_has_the_wanted_timeout(seconds: int, written: str, is_web: bool) -> None:
    kind = "type: http_client, url: 'http://a/'" if is_web else "exec: 'true'"
    number = written.replace("1.5", "1500") if is_web else written
    edited = edit(f"steps: {{a: {{{kind}, timeout: {number}}}}} # {seconds}\n", a=seconds * 1000)
    workflow = load_text(edited.text.encode()).workflow
    assert isinstance(workflow, WorkflowFile)
    assert step_timeout_ms(workflow, workflow.steps["a"]) == seconds * 1000
    assert edited.text.endswith(f" # {seconds}\n")


def test_advice_that_was_written_is_followed_by_no_other(store: Store, tmp_path: Path) -> None:
    """Otherwise each `advise --write` would move the timeout again."""
    for at, slowest_ms in enumerate((40, 900, 5_000, 55_000, 3_000_000)):
        file = tmp_path / str(slowest_ms)
        for number in range(25):
            add_run(store, file, took(slowest_ms, "a"), number=at * 100 + number)
        history = read_history(store.runs, "flow", file)
        for timeout in ("50ms", "1s", "60s", "2h"):
            text = f"steps: {{a: {{exec: 'true', timeout: {timeout}}}}}\n"
            for rounds in range(2):
                loaded = load_text(text.encode())
                assert loaded.workflow is not None
                edited = edit_timeouts(text, loaded, advise(loaded.workflow, history))
                assert not rounds or edited.text == text, (slowest_ms, timeout, text, edited)
                text = edited.text
