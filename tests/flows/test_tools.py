"""Tools of a workflow file: commands with a timeout, a place and a schema of their own."""

from collections.abc import Callable
from pathlib import Path

import pytest

from shotclock.core.envelope import Envelope

from .conftest import step

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("no_survivors")]
Run = Callable[..., Envelope]


def test_a_tool_has_clocks_a_place_and_arguments_of_its_own(run: Run, tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    envelope = run(
        """
        tools:
          slow: {exec: "sleep 600", timeout: 300}
          where: {exec: pwd, cwd: there}
          add:
            exec: echo $(( {{ args.a }} + 1 ))
            input_schema: {type: object, properties: {a: {type: integer}}, required: [a]}
        steps:
          slow: {type: tool, tool: slow, grace: 0s}
          slower: {type: tool, tool: slow, timeout: 900, grace: 0s}
          where: {type: tool, tool: where}
          add: {type: tool, tool: add, arguments: {a: 2}}
          wrong: {type: tool, tool: add, arguments: {a: two}}
          none: {type: tool, tool: add}
        """
    )
    assert step(envelope, "slow")["error"]["context"]["clock"]["limit_ms"] == 300
    assert step(envelope, "slower")["error"]["context"]["clock"]["limit_ms"] == 900
    assert step(envelope, "where")["output"] == str(tmp_path / "there")
    assert step(envelope, "add")["output"] == "3"
    assert "'two' is not of type 'integer'" in step(envelope, "wrong")["error"]["message"]
    assert "'a' is a required property" in step(envelope, "none")["error"]["message"]
    assert step(envelope, "none")["error"]["code"] == "STEP_INVALID"
