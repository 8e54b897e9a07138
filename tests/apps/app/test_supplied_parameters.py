"""Arguments are checked and converted whatever else the framework supplies to a function."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
from pydantic import Field

from shotclock import App, Context, Depends, Secret
from shotclock.ui.tools import app as ui_tools

Small = Annotated[int, Field(ge=1, le=5)]
Mode = Literal["a", "b"]


def database() -> str:
    return "db"


class Own(Context):
    pass


def of_own(call: Own) -> str:
    return type(call).__name__


app = App("supplied")


@app.command(mutates=False)
def plain(n: Small, mode: Mode, where: Path = Path()) -> str:
    return f"{n!r} {mode} {type(where).__name__}"


@app.command(mutates=False)
def depends(n: Small, mode: Mode, db: Annotated[str, Depends(database)], where: Path = Path()) -> str:
    return f"{n!r} {mode} {type(where).__name__}"


@app.command(mutates=False)
def secret(n: Small, mode: Mode, token: Secret[str] | None = None, where: Path = Path()) -> str:
    return f"{n!r} {mode} {type(where).__name__}"


@app.command(mutates=False)
def own_context(call: Own, n: Small, mode: Mode, where: Path = Path()) -> str:
    return f"{n!r} {mode} {type(where).__name__}"


@app.command(mutates=False)
def yielding(n: Small, mode: Mode, where: Path = Path()) -> Iterator[str]:
    yield f"{n!r} {mode} {type(where).__name__}"


@app.command(mutates=False)
def everything(
    n: Small, mode: Mode, db: Annotated[str, Depends(of_own)], token: Secret[str] | None = None, where: Path = Path()
) -> Iterator[str]:
    assert db == "Own"
    yield f"{n!r} {mode} {type(where).__name__}"


@app.command(mutates=False)
async def everything_async(
    n: Small, mode: Mode, db: Annotated[str, Depends(of_own)], token: Secret[str] | None = None, where: Path = Path()
) -> str:
    assert db == "Own"
    return f"{n!r} {mode} {type(where).__name__}"


@app.command(mutates=False)
def own_in_dependency_of_generator(db: Annotated[str, Depends(of_own)]) -> Iterator[str]:
    yield db


@app.command(mutates=False)
def own_beside_unannotated(ctx, db: Annotated[str, Depends(of_own)]) -> str:  # type: ignore[no-untyped-def]
    return f"{db} {type(ctx).__name__}"


@app.prompt
def ask(n: Small, db: Annotated[str, Depends(database)]) -> str:
    return repr(n)


CHECKED = ("plain", "depends", "secret", "own_context", "yielding", "everything", "everything_async")


@pytest.mark.slow
def test_arguments_are_checked_and_converted_whatever_the_framework_supplies() -> None:
    async def scenario() -> None:
        async with app:
            for name in CHECKED:
                good = await app.call(name, n="3", mode="b")
                expected: Any = "3 b PosixPath"
                assert good.value in (expected, [expected]), (name, good)
                for wrong in ({"n": 9, "mode": "a"}, {"n": "abc", "mode": "a"}, {"n": 3, "mode": "c"}):
                    refused = await app.call(name, **wrong)
                    assert refused.code == "ARG_ERROR" and refused.ending == "not_started", (name, wrong, refused)

    asyncio.run(scenario())


def test_arguments_of_the_tools_for_pages_are_checked_before_a_device_is_started() -> None:
    async def scenario() -> None:
        async with ui_tools:
            refused = await ui_tools.call("ui_wait", timeoutMs="abc", device="none")
            assert refused.code == "ARG_ERROR" and refused.ending == "not_started", refused
            assert [problem["field"] for problem in refused.to_dict()["error"]["errors"]] == ["timeoutMs"]

    asyncio.run(scenario())


def test_a_dependency_receives_its_subclass_of_context_whatever_the_command_is() -> None:
    async def scenario() -> None:
        async with app:
            assert (await app.call("own_in_dependency_of_generator")).data == ["Own"]
            assert (await app.call("own_beside_unannotated")).data == {"result": "Own Own"}

    asyncio.run(scenario())
