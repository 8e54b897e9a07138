"""Parameters filled by `Depends`: callers do not see them, and they are closed after the call."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Annotated

import pytest

from shotclock import App, Context, Depends

app = App("dependent")


def command_name(ctx: Context) -> str:
    return ctx.name


def connection(name: Annotated[str, Depends(command_name)]) -> Iterator[list[str]]:
    opened = [f"opened for {name}"]
    try:
        yield opened
    finally:
        Path(opened[1]).write_text("closed")


async def async_connection() -> AsyncIterator[str]:
    yield "async"


@app.command(mutates=False)
def read(path: str, db: Annotated[list[str], Depends(connection)], fail: bool = False) -> str:
    db.append(path)
    if fail:
        raise ValueError("of the command")
    return db[0]


@app.command(mutates=False)
def read_sync(db: Annotated[str, Depends(async_connection)]) -> str:
    return db


@app.command(mutates=False)
async def read_async(db: str = Depends(async_connection)) -> str:
    return db


def test_a_dependency_is_filled_and_closed_also_after_a_failure(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with app:
            for fail, code in ((False, None), (True, "INTERNAL_ERROR")):
                file = tmp_path / str(fail)
                envelope = await app.call("read", path=str(file), fail=fail)
                assert envelope.code == code and file.read_text() == "closed"
                assert fail or envelope.value == "opened for read"
            for name in ("read_sync", "read_async"):
                assert (await app.call(name)).value == "async"

    asyncio.run(asyncio.wait_for(scenario(), 60))


def test_no_caller_sees_or_passes_a_dependency() -> None:
    spec = app.catalogue().find("read")
    assert spec is not None and set(spec.input_schema["properties"]) == {"path", "fail"}
    envelope = asyncio.run(asyncio.wait_for(app.call("read", path="x", db=["mine"]), 60))
    assert envelope.code == "ARG_ERROR"


def test_a_dependency_with_a_parameter_that_nothing_fills_is_refused() -> None:
    def needs(host: str) -> str:
        return host

    def broken(db: str = Depends(needs)) -> str:
        return db

    with pytest.raises(TypeError, match="'host' has no value"):
        App("refused").command(broken)
