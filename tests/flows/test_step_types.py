"""A step type is one file and one line; what nobody uses is not loaded."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shotclock.core.envelope import Envelope
from shotclock.flows.check.lint import lint
from shotclock.flows.check.plan import plan_of
from shotclock.flows.file.loader import load_text
from shotclock.flows.steps.provider import MODULES
from shotclock.supervise import spans

Run = Callable[..., Envelope]
STARTED_WITHIN_S = 60.0


@pytest.fixture
def shouting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(MODULES, "shout", "tests.flows.shouting_provider")


@pytest.mark.usefixtures("shouting")
def test_a_new_step_type_is_one_file_and_one_line(run: Run) -> None:
    envelope = run("""
        steps:
          first: {exec: echo hello}
          second: {type: shout, text: "{{ outputs.first }}", depends_on: first}
          third: {type: shout, word: "no word", depends_on: second, on_fail: {retry: {max: 1, backoff: {delay_ms: 1}}}}
    """)
    assert isinstance(envelope.data, dict)
    steps: dict[str, Any] = envelope.data["steps"]
    assert steps["second"]["output"] == "HELLO"
    assert steps["third"]["status"] == "failed"
    assert steps["third"]["attempts"] == 2
    assert steps["third"]["error"]["context"]["rule"] == "shout/unpronounceable"


@pytest.mark.usefixtures("shouting")
def test_its_file_says_what_is_wrong_with_a_step_and_how_long_it_may_take() -> None:
    wrong = load_text(b"steps: {a: {type: shout, wort: x}}")
    assert {(each.rule, each.path) for each in wrong.findings} == {
        ("schema/missing", ("steps", "a", "word")),
        ("schema/unknown-key", ("steps", "a", "wort")),
    }
    loaded = load_text(b"steps: {a: {type: shout, word: x}, b: {type: shout, word: x, timeout: 500}}")
    assert loaded.workflow is not None
    assert [step.timeout_ms for step in plan_of(loaded.workflow).steps] == [2_000, 500]
    assert lint(loaded) == []


def test_a_file_of_commands_loads_no_other_provider(tmp_path: Path) -> None:
    (tmp_path / "flow.yaml").write_text("steps: {a: {exec: echo hello}}")
    program = (
        "import sys\n"
        "from pathlib import Path\n"
        "from shotclock.flows.check.lint import lint\n"
        "from shotclock.flows.file.loader import load_file\n"
        "assert lint(load_file(Path('flow.yaml'))) == []\n"
        "print(*sorted(sys.modules), sep='\\n')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, timeout=STARTED_WITHIN_S
    )
    loaded = set(done.stdout.split())
    assert "shotclock.flows.steps.command" in loaded, done
    others = {f"shotclock.flows.steps.{name}" for name in ("ai", "function", "git", "http", "human", "mcp")}
    assert not loaded & {*others, "mcp", "httpx2", "asyncio", "ssl", "sqlite3"}


@pytest.mark.usefixtures("shouting")
def test_a_try_is_one_call_that_is_answered_once(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen by whoever records spans: one for the run, one for each step, one for each try."""
    ended: list[str] = []

    class Recorder:
        def call_ended(self, call: Any, outcome: Any, now_ns: int, wall_ns: int) -> None:
            ended.append(call.name)

        def tell(self, make: Any) -> None:
            pass

        def hand_over(self) -> None:
            pass

    monkeypatch.setattr(spans, "recorder", Recorder())
    envelope = run("""
        steps:
          say: {exec: echo hello}
          shout: {type: shout, word: hello}
          fail: {exec: exit 3, on_fail: {retry: {max: 1, backoff: {delay_ms: 1}}}, continue_on_failure: true}
    """)
    assert envelope.ok, envelope.to_json()
    assert sorted(name for name in ended if name.startswith("step ")) == [
        "step fail",
        "step fail",
        "step say",
        "step shout",
    ]
