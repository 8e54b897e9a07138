"""Commands with secret parameters."""

import sys
from typing import Any

from shotclock import App, Context, Failure, Secret

app = App("my-tool")


@app.command(mutates=False)
def login(user: str, token: Secret[str], pin: Secret[int] | None = None, leak: str = "") -> dict[str, Any]:
    """Log in.

    Args:
        user: The name.
        token: The token.
        leak: Where to reveal it.
    """
    text = token.get_secret_value()
    sys.stderr.write(f"{token}\n")
    if leak == "failure":
        raise Failure("AUTH_REQUIRED", f"{text} is not valid", context={"header": f"Bearer {text}"})
    if leak == "bug":
        raise ValueError(text)
    shown = text if leak == "data" else str(token)
    return {
        "user": user,
        "length": len(text),
        "shown": shown,
        "pin": None if pin is None else pin.get_secret_value() + 1,
    }


@app.command(mutates=False)
async def later(ctx: Context, token: Secret[str]) -> str:
    """Have a secret in a coroutine."""
    return token.get_secret_value()[::-1]


@app.command(approval={"ttl": "1h"})
def guarded(token: Secret[str], name: str = "x") -> str:
    """Ask the operator first."""
    return name


@app.command(mutates=False, interruption={"max_lifetime": "1m"})
def long(ctx: Context, token: Secret[str]) -> dict[str, Any]:
    """Work as a job."""
    ctx.progress(1, 2, token.get_secret_value())
    return {"length": len(token.get_secret_value()), "leak": token.get_secret_value()}


if __name__ == "__main__":
    app()
