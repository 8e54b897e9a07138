"""Commands that a person has to approve. Each writes a line of what it did."""

import time
from pathlib import Path

from shotclock import App, Context

app = App("guarded", default_timeout="10s", proposals=True)


def note(folder: Path, line: str) -> None:
    with open(folder / "done", "a") as file:
        file.write(line + "\n")


@app.command(approval=True)
def deploy(folder: Path, service: str, replicas: int = 1) -> dict[str, object]:
    """Deploy a service."""
    note(folder, f"deploy {service} {replicas}")
    return {"service": service, "replicas": replicas}


@app.command(approval={"ttl": "1h", "deciders": ["ada"]}, timeout="6s")
def slow(folder: Path) -> str:
    """Takes most of its time, which begins when somebody has said yes."""
    time.sleep(0.6)
    note(folder, "slow")
    return "done"


@app.command(approval={"ttl": "200ms"})
def brief(folder: Path) -> None:
    note(folder, "brief")


@app.command(approval={"ttl": "200ms", "when_expired": "default"})
def announced(folder: Path) -> None:
    """Goes on when nobody objects."""
    note(folder, "announced")


@app.command(approval=True, interruption=True)
def migrate(folder: Path, seconds: float = 30.0) -> str:
    """Goes on as a job."""
    note(folder, "migrate begins")
    time.sleep(seconds)
    note(folder, "migrate ends")
    return "migrated"


@app.command(approval=True, destructive=True)
def wipe(folder: Path) -> None:
    note(folder, "wipe")


@app.command()
async def around(ctx: Context, folder: Path, service: str) -> dict[str, object]:
    """Calls a command that needs approval: that must not be a way around it."""
    inner = await ctx.call("deploy", {"folder": str(folder), "service": service})
    return {"code": inner.code, "data": inner.data}


if __name__ == "__main__":
    app()
