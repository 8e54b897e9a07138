"""Commands that say exactly what they were run with."""

import sys
import time
import uuid
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, SecretStr, StringConstraints

from shotclock import App, Context, Failure

app = App("exact", default_timeout="10s")


class Account(BaseModel):
    iban: Annotated[str, StringConstraints(strip_whitespace=True, to_upper=True)]
    limit: float = 0.0


def note(folder: Path, value: object) -> str:
    with open(folder / "done", "a") as file:
        file.write(f"{value!r}\n")
    return repr(value)


@app.command(approval=True)
def guarded(folder: str, v: Any) -> str:
    return note(Path(folder), v)


@app.command(approval=True)
def pay(
    amount: float,
    times: int = 1,
    to: Account | None = None,
    via: Path = Path("/bank"),
    pin: SecretStr | None = None,
    tags: set[str] | None = None,
    rates: dict[int, float] | None = None,
) -> str:
    return repr(amount)


@app.command(approval=True)
def say(folder: str, what: Annotated[str, AfterValidator(lambda path: Path(path).read_text())]) -> str:
    """Says what a file holds, which is read where the arguments are checked."""
    return note(Path(folder), what)


@app.command(approval=True)
def stamp(name: Annotated[str, AfterValidator(lambda name: f"{name}-{uuid.uuid4()}")]) -> str:
    """Gets another name every time."""
    return name


@app.command()
async def around(ctx: Context, amount: int) -> Any:
    inner = await ctx.call("pay", {"amount": amount})
    return inner.code


@app.command(interruption=True)
async def around_as_job(ctx: Context, amount: int) -> Any:
    inner = await ctx.call("pay", {"amount": amount})
    return inner.code


@app.command()
def keyed(folder: str, v: Any) -> str:
    return note(Path(folder), v)


@app.command(interruption=True)
def kept(folder: Path, v: Any) -> str:
    return note(folder, v)


@app.command(interruption=True, approval=True)
def kept_and_guarded(folder: Path, v: Any) -> str:
    return note(folder, v)


@app.command(approval=True, stdin=True)
def feed(folder: str) -> str:
    return note(Path(folder), sys.stdin.read())


@app.command(approval=True, steps=["backup", "erase"])
def stepped(ctx: Context, folder: str) -> list[str]:
    done = []
    for name in ("backup", "erase"):
        if ctx.step(name):
            done.append(note(Path(folder), name))
    return done


@app.command(approval=True, mutates=False)
def fails(folder: str) -> None:
    """Takes a moment, and changes nothing."""
    note(Path(folder), "ran")
    wait_for(Path(folder) / "end")
    raise Failure("FILE_UNREADABLE", "there is nothing")


def slowly(folder: Path) -> Path:
    if (folder / "slow").exists():
        wait_for(folder / "checked")
    return folder


@app.command(approval=True, interruption=True)
def raced(folder: Annotated[Path, AfterValidator(slowly)]) -> str:
    """A job whose arguments take a moment to check."""
    note(folder, "ran")
    wait_for(folder / "end")
    return "done"


def wait_for(path: Path) -> None:
    give_up_at = time.monotonic() + 8
    while not path.exists() and time.monotonic() < give_up_at:
        time.sleep(0.02)


if __name__ == "__main__":
    app()
