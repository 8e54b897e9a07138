"""Commands whose names are spelt in every way, and whose results are or are not what they declare."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shotclock import App, Context

app = App("named", default_timeout="20s")


@dataclass
class Box:
    size: int
    label: str | None = None


@app.command(mutates=False)
def search_files(text: str) -> list[str]:
    return [text]


@app.command(mutates=False, name="getUser")
async def get_user(number: int) -> dict[str, int]:
    return {"number": number}


@app.command(mutates=False, name="shop.list")
def listed() -> int:
    return 3


@app.command(mutates=False)
def import_(path: Path) -> str:
    return str(path)


@app.command(mutates=False)
def calls(ctx: Context, name: str) -> Any:
    return ctx.call(name, {"text": "x"}).to_dict()


@app.command(mutates=False)
def counts(result: str) -> int:
    return {"right": 3, "wrong": "three", "none": None, "nan": float("nan")}[result]  # type: ignore[return-value]


@app.command(mutates=False)
async def counts_async(result: str) -> int | None:
    return counts(result)


@app.command(mutates=False)
def boxes(wrong: bool = False) -> list[Box]:
    return [Box(1), {"size": "big"} if wrong else Box(2, "b")]  # type: ignore[list-item]


if __name__ == "__main__":
    app()
