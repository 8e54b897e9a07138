"""Commands that destroy something, and who has to confirm that."""

from pathlib import Path

from shotclock import App, Context

app = App("cleaner")


@app.command(destructive=True)
def wipe(path: Path) -> str:
    path.unlink()
    return "wiped"


@app.command(destructive=True, interruption=True)
def wipe_later(path: Path) -> str:
    path.unlink()
    return "wiped"


@app.command(destructive=True)
def prune(path: Path, dry_run: bool = False) -> list[str]:
    if not dry_run:
        path.unlink()
    return [str(path)]


@app.command(destructive=True, requires_person="yes")
def personal(path: Path) -> None:
    path.unlink()


@app.command(destructive=True, approval=True)
def approved(path: Path) -> None:
    path.unlink()


@app.command(destructive=True)
def broken_preview(path: Path, dry_run: bool = False) -> None:
    if dry_run:
        path.read_bytes()
        raise ValueError("no idea what would go")
    path.unlink()


@app.command
def tidy(path: Path, ctx: Context) -> dict[str, object]:
    return ctx.call("wipe", {"path": str(path)}).to_dict()


@app.command
def touch(path: Path) -> None:
    path.touch()


if __name__ == "__main__":
    app()
