"""An app whose commands end in every way that an answer has to be true about."""

import time
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator

from shotclock import App, Context, Failure, register_error

register_error("SHOP_SOLD_OUT", summary="There is none left.", hint="wait", exit_code=90, side_effects="none")

app = App("answers", default_timeout="10s", grace="300ms", version="1.2.3")


class UnknownCity(Failure):
    def __init__(self, city: str) -> None:
        super().__init__(f"unknown city: {city}")


class UnknownStreet(Failure):
    """Does not call `Failure.__init__`, as many exceptions do."""

    def __init__(self, street: str) -> None:
        self.street = street

    def __str__(self) -> str:
        return f"unknown street: {self.street}"


ERRORS: dict[str, BaseException] = {
    "missing": FileNotFoundError(2, "No such file or directory", "/nope"),
    "there": FileExistsError(17, "File exists", "/there"),
    "forbidden": PermissionError(13, "Permission denied", "/etc/shadow"),
    "refused": ConnectionRefusedError(111, "Connection refused"),
    "slow": TimeoutError("timed out"),
    "bug": KeyError("x"),
    "telling": RuntimeError("postgres://user:pw@db/srv/secret is gone"),
    "telling file": FileNotFoundError(2, "No such file or directory", "/srv/secret/plan.txt"),
    "telling connection": ConnectionRefusedError(111, "Connect call failed ('db.secret', 5432)"),
    "telling text": ConnectionError("postgres://user:pw@db/srv/secret is gone"),
    "long": ValueError("x" * 3_000_000),
    "sold out": Failure("SHOP_SOLD_OUT", "none left", context={"left": 0}),
    "not found": Failure("NOT_FOUND", "no such shelf"),
    "argument": Failure("ARG_ERROR", "the shelf is odd"),
    "text": Failure("unknown country: Ulmia"),
    "city": UnknownCity("Ulm"),
    "street": UnknownStreet("Ulm Road"),
}


RESULTS: dict[str, Any] = {
    "name": Path("/tmp/\udcff.txt"),
    "half": {"a": ["\ud800"]},
    "names": dict([("\udcff", 1), ("\udcfe", 2)]),
    "nan": [float("nan"), float("inf")],
    "bytes": {"b": b"\xff"},
    "whole": {"ü": "😀", "n": 1.5},
}


def hang(value: int) -> int:
    time.sleep(60 if value == 1 else 0)
    return value


Slow = Annotated[int, AfterValidator(hang)]


@app.command(mutates=False)
def raises(which: str) -> None:
    raise ERRORS[which]


@app.command(mutates=False)
async def raises_async(which: str) -> None:
    raise ERRORS[which]


@app.command(interruption=True)
def raises_in_a_job(which: str) -> None:
    raise ERRORS[which]


@app.command
def changes(which: str) -> None:
    raise ERRORS[which]


@app.command(mutates=False)
def returns(which: str) -> Any:
    return RESULTS[which]


@app.command(mutates=False)
async def returns_async(which: str) -> Any:
    return RESULTS[which]


@app.command(mutates=False)
def says(text: str) -> None:
    raise Failure("NOT_FOUND", f"no {bytes.fromhex(text).decode(errors='surrogateescape')}")


@app.command(mutates=False)
def advances(ctx: Context, wrong: bool = False) -> None:
    ctx.progress(0.5, 1.0, "half")
    if wrong:
        ctx.progress("x", 1)  # type: ignore[arg-type]


@app.command(mutates=False)
async def advances_async(ctx: Context, wrong: bool = False) -> None:
    ctx.progress(0.5, 1.0, "half")
    if wrong:
        ctx.progress(float("nan"))


@app.command(timeout="2m")
def lasts(number: Slow = 0) -> None:
    pass


@app.command(destructive=True)
def purges(number: int = 0) -> None:
    pass


@app.command(requires_person="yes")
def personal() -> None:
    pass


@app.command(stdin=True)
def reads() -> None:
    pass


@app.command(approval=True)
def approved(number: Slow) -> None:
    pass


@app.command(single_flight="one")
def alone(folder: Path, number: Slow = 0) -> None:
    (folder / "up").touch()
    time.sleep(20)


@app.command(interruption=True)
def goes_on(ctx: Context, seconds: float) -> None:
    ctx.progress(0.5, 2.0, "a quarter")
    time.sleep(seconds)


@app.command(mutates=False)
def fails_first(folder: Path) -> Any:
    """Fails slowly when it is called first, and takes long the second time."""
    with (folder / "tries").open("a") as file:
        file.write("x")
    time.sleep(2.9 if (folder / "tries").read_text() == "x" else 20)
    raise Failure("NOT_FOUND", "not yet")


if __name__ == "__main__":
    app()
