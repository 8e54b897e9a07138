"""Commands with parameters that are called like options of every command."""

from typing import Any

from shotclock import App, Context

app = App("shadowing", default_timeout="20s")


@app.command(mutates=False)
def fetch(url: str, timeout: float = 1.5, json: bool = False, debug: str = "no") -> dict[str, Any]:
    """Fetch a page."""
    return {"url": url, "timeout": timeout, "json": json, "debug": debug}


@app.command(mutates=False, steps=["first", "second"])
def move(
    ctx: Context, idempotency_key: str = "", budget: int = 0, resume_from: str = "", validate_only: bool = False
) -> Any:
    """Move things."""
    return {
        "key": idempotency_key,
        "budget": budget,
        "from": resume_from,
        "only": validate_only,
        "skips": not ctx.step("first"),
    }


@app.command(mutates=False)
def plain(name: str) -> str:
    """Have ordinary parameters."""
    return name


if __name__ == "__main__":
    app()
