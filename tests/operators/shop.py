"""An App to serve: what is asked for here is asked over HTTP, so it needs no commands of interest."""

from shotclock import App

app = App("shop", default_timeout="10s")


@app.command(mutates=False)
def price(item: str) -> float:
    """What an item costs."""
    return 2.5
