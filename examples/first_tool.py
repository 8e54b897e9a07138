"""A first bounded tool: a command line and an MCP server from two functions. See docs/tutorial-app.md."""

import time

from shotclock import App

app = App("first-tool", default_timeout="10s")


@app.command(mutates=False)
def greet(name: str, times: int = 1) -> str:
    """Greet somebody."""
    return " ".join([f"Hello, {name}!"] * times)


@app.command(timeout="1s", mutates=False)
def hang() -> None:
    """Never end."""
    time.sleep(600)


if __name__ == "__main__":
    app()
