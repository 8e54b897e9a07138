"""An App to serve: agents ask for things over HTTP, or with its tool `propose`."""

from shotclock import App

app = App("shop", default_timeout="10s", proposals=True)


@app.command(mutates=False)
def price(item: str) -> float:
    """What an item costs."""
    return 2.5
