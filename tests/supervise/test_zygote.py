"""What the process that workers are forked from has imported, and what not."""

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest

from shotclock import Clocks, Envelope, Operation, Runtime
from shotclock.core.catalogue import HandlerReference
from shotclock.dispatch.invocation import Target
from tests.calls.bounds import run
from tests.calls.operations import imported, next_day

pytestmark = [pytest.mark.usefixtures("no_survivors"), pytest.mark.slow]

APP = """
import datetime, sys
from shotclock import App

app = App("days")

@app.command
def imported(name: str) -> bool:
    return name in sys.modules

@app.command
def next_day(when: TYPE) -> str:
    return str(datetime.date.fromisoformat(str(when)) + datetime.timedelta(days=1))
"""


def call(operation: Operation, arguments: dict[str, Any], **options: Any) -> Envelope:
    async def scenario() -> Envelope:
        async with Runtime(**options) as runtime:
            return await runtime.call(operation, arguments, Clocks.of("15s"))

    return run(scenario())


@pytest.mark.parametrize(("written", "is_there"), [("str", False), ("datetime.date", True)])
def test_pydantic_is_there_before_the_fork_where_a_command_of_the_app_needs_it_and_nowhere_else(
    written: str, is_there: bool, tmp_path: Path
) -> None:
    (tmp_path / "days.py").write_text(APP.replace("TYPE", written))
    program = Target.parse(f"{tmp_path}/days.py:app").program
    found = Operation("imported", HandlerReference("__mp_main__", "imported"), isolation="process")
    moved = Operation("next_day", HandlerReference("__mp_main__", "next_day"), isolation="process")
    assert call(found, {"name": "pydantic"}, program=program).value is is_there
    assert call(moved, {"when": "2026-01-02"}, program=program).value == "2026-01-03"
    assert call(moved, {"when": 5.5}, program=program).code == "ARG_ERROR"


@pytest.mark.parametrize("has_it", [True, False])
def test_where_any_function_may_be_called_pydantic_is_there_if_the_program_has_it(
    has_it: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    importlib.import_module("pydantic")
    if not has_it:
        monkeypatch.delitem(sys.modules, "pydantic")
    preload = ["tests.calls.operations"]
    assert call(Operation("imported", imported), {"name": "pydantic"}, preload=preload).value is has_it
    assert call(Operation("typed", next_day), {"when": "2026-01-02"}, preload=preload).data == {"result": "2026-01-03"}


def test_a_function_that_is_called_first_and_needs_pydantic_has_it_imported_for_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    importlib.import_module("pydantic")
    monkeypatch.delitem(sys.modules, "pydantic")

    async def scenario() -> object:
        async with Runtime(workers=1, most_workers=1, preload=["tests.calls.operations"]) as runtime:
            assert (await runtime.call(Operation("typed", next_day), {"when": "2026-01-02"}, Clocks.of("15s"))).ok
            (worker,) = runtime._children.pool()._all
            worker.kill("the next one has called nothing")
            return (await runtime.call(Operation("imported", imported), {"name": "pydantic"}, Clocks.of("15s"))).value

    assert run(scenario()) is True
