"""Functions that log, and that ask the person and the model of their client."""

import asyncio
import os
import time
from enum import StrEnum
from pathlib import Path
from typing import Literal

from pydantic import BaseModel

from shotclock import App, Context, Failure

app = App("asking")


class Size(StrEnum):
    SMALL_BOX = "s"
    LARGE_BOX = "l"


class Order(BaseModel):
    size: Size
    count: int = 1
    extras: list[Literal["bow", "card"]] = []


@app.command(mutates=False)
def order(folder: str, ctx: Context) -> str:
    """Ask twice; the work before a question is done once."""
    with open(Path(folder) / "begun", "a") as begun:
        begun.write("x")
    first = ctx.ask("What do you want?", Order)
    if first.action != "accept":
        return f"no order: {first.action}"
    again = ctx.ask("Sure?", bool)
    return f"{first.data.count} {first.data.size.name} {first.data.extras} {again.data}"


@app.command(mutates=False, timeout="1s", idle="500ms")
async def patient(ctx: Context) -> str:
    """Ask a person who takes longer than the limits of the call."""
    return str((await ctx.ask("Your name?")).data)


@app.command(mutates=False, timeout="1s")
def slow_after(ctx: Context) -> str:
    """Hang after the answer."""
    ctx.ask("Your name?")
    time.sleep(60)
    return "late"


@app.command(mutates=False)
def summarise(text: str, ctx: Context) -> str:
    """Have the client's model answer."""
    sampled = ctx.sample(text, max_tokens=10, system="Be brief")
    return f"{sampled.model}: {sampled.text}"


@app.command(mutates=False)
def nested(ctx: Context) -> str:
    """Ask for a type that no form has."""
    ctx.ask("?", dict[str, int])
    return "asked"


@app.command(mutates=False)
def chatty(ctx: Context) -> str:
    """Log at two levels."""
    ctx.log("details", "debug")
    ctx.log("half done", "warning", "work")
    return "logged"


@app.command(mutates=False)
def sign_in(ctx: Context) -> str:
    """Send the person to a page."""
    answer = ctx.ask_url("Please sign in", "https://example.com/sign-in?id=1", name="sign_in")
    ctx.url_completed(name="sign_in")
    return f"{answer.action} {answer.data}"


@app.command(mutates=False)
def ask_much(characters: int, ctx: Context) -> str:
    """Ask a question of this length."""
    return str(ctx.ask("?" * characters))


@app.command(mutates=False)
async def ask_often(questions: int, ctx: Context) -> int:
    """Ask so many questions at the same time, and return the number of those that could be asked."""
    asked = [ctx.ask("?", bool, name=str(number)) for number in range(questions)]
    answers = await asyncio.gather(*asked, return_exceptions=True)
    return sum(not isinstance(answer, Failure) for answer in answers)


@app.command(mutates=False, isolation="shared")
async def ask_in_shared(ctx: Context) -> str:
    """Ask in the shared process."""
    return str((await ctx.ask("Your name?")).data)


@app.command(mutates=False, timeout="500ms")
def ask_late(ctx: Context) -> str:
    """Ask a moment before the timeout."""
    while (ctx.remaining_ms() or 0) > 20:
        time.sleep(0.001)
    return str(ctx.ask("Your name?").data)


@app.command(mutates=False)
def ask_with_pid(folder: str, ctx: Context) -> str:
    """Write the pid of this process, and ask."""
    (Path(folder) / "pid").write_text(str(os.getpid()))
    return str(ctx.ask("Your name?").data)


@app.command(mutates=False)
def flood(messages: int, ctx: Context) -> str:
    """Log much."""
    for number in range(messages):
        ctx.log(f"{number} {'x' * 1_000}")
    return "flooded"


@app.command(mutates=False, interruption=True, timeout="1s")
def job_that_asks(ctx: Context) -> str:
    """Ask in a job."""
    return str(ctx.ask("Your name?", name="name").data)
