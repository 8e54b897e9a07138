"""The inventory of a shop."""

import json
import sqlite3
import struct
import zlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Annotated, Any
from urllib.request import urlopen

from pydantic import Field

from shotclock import App, Image
from shotclock.fastmcp import AcceptedElicitation, Context, ToolError


@dataclass
class Item:
    name: str
    count: int
    price: float


@dataclass
class Order:
    count: int
    express: bool = False


async def open_database(server: Any) -> AsyncIterator[dict[str, Any]]:
    database = sqlite3.connect(":memory:", check_same_thread=False, isolation_level=None)
    database.execute("CREATE TABLE items (name TEXT PRIMARY KEY, count INTEGER, price REAL)")
    yield {"database": database}
    database.close()


mcp = App("inventory", help="What a shop has in stock.", lifespan=open_database)


def find(ctx: Context, name: str) -> Item:
    row = ctx.lifespan_context["database"].execute("SELECT * FROM items WHERE name = ?", [name]).fetchone()
    if row is None:
        raise ToolError(f"there is no {name} in stock")
    return Item(*row)


@mcp.command(mutates=False)
def gross(price: float, rate: Annotated[float, Field(description="In percent", ge=0, le=100)] = 19) -> float:
    """Add the tax to a price."""
    return round(price * (1 + rate / 100), 2)


@mcp.command
def add(item: Item, ctx: Context) -> str:
    """Add an item."""
    values = [item.name, item.count, item.price]
    try:
        ctx.lifespan_context["database"].execute("INSERT INTO items VALUES (?, ?, ?)", values)
    except sqlite3.IntegrityError:
        raise ToolError(f"{item.name} is there already") from None
    return f"{item.count} {item.name}"


@mcp.command(title="Find items", mutates=False)
def search(query: Annotated[str, Field(min_length=1)], ctx: Context, limit: int = 10) -> list[Item]:
    """Find items by a part of their name."""
    rows = ctx.lifespan_context["database"].execute(
        "SELECT * FROM items WHERE name LIKE ? ORDER BY name LIMIT ?", [f"%{query}%", limit]
    )
    return [Item(*row) for row in rows]


@mcp.command
async def take(name: str, count: int, context: Context) -> Item:
    """Take some of an item out of the stock."""
    item = find(context, name)
    if item.count < count:
        raise ToolError(f"{item.count} {name} are left, not {count}")
    item.count -= count
    context.lifespan_context["database"].execute("UPDATE items SET count = ? WHERE name = ?", [item.count, name])
    if item.count < 3:
        await context.warning(f"few {name} are left")
    return item


@mcp.command
async def load(items: list[Item], ctx: Context) -> int:
    """Add many items."""
    for number, item in enumerate(items, 1):
        values = [item.name, item.count, item.price]
        ctx.lifespan_context["database"].execute("INSERT OR REPLACE INTO items VALUES (?, ?, ?)", values)
        await ctx.report_progress(number, len(items), f"added {item.name}")
    await ctx.info(f"added {len(items)} items")
    return len(items)


@mcp.command
async def reorder(name: str, ctx: Context) -> str:
    """Order more of an item. The person decides how many."""
    find(ctx, name)
    answer = await ctx.elicit(f"How many {name} do you want?", Order)
    if not isinstance(answer, AcceptedElicitation):
        return "nothing was ordered"
    sure = await ctx.elicit(f"Order {answer.data.count} {name}?", ["yes", "no"])
    if not isinstance(sure, AcceptedElicitation) or sure.data == "no":
        return "nothing was ordered"
    return f"ordered {answer.data.count} {name}{' by express' if answer.data.express else ''}"


@mcp.command(name="chart", mutates=False)
async def draw_chart(ctx: Context) -> Image:
    """Draw the stock, one bar for each item."""
    counts = [count for (count,) in ctx.lifespan_context["database"].execute("SELECT count FROM items ORDER BY name")]
    rows = [b"\0" + bytes(255 * (x >= count) for x in range(64)) for count in counts for _ in range(8)]
    data = b"\x89PNG\r\n\x1a\n"
    header = struct.pack(">IIBBBBB", 64, len(rows), 8, 0, 0, 0, 0)
    for kind, body in ((b"IHDR", header), (b"IDAT", zlib.compress(b"".join(rows))), (b"IEND", b"")):
        data += struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))
    return Image(data=data, format="png")


@mcp.command(mutates=False)
def supplier_price(url: str) -> float:
    """Read a price from the page of a supplier."""
    with urlopen(url) as page:
        return float(page.read())


@mcp.resource("inventory://summary", mime_type="application/json")
def summary(ctx: Context) -> str:
    """How many items there are, and their value."""
    row = ctx.lifespan_context["database"].execute("SELECT count(*), total(count * price) FROM items").fetchone()
    return json.dumps({"items": row[0], "value": row[1]})


@mcp.resource("inventory://items/{name}")
async def item_text(name: str, ctx: Context) -> str:
    """One item."""
    item = find(ctx, name)
    return f"{item.count} {item.name} at {item.price}"


@mcp.prompt
def letter(name: str, count: int = 1) -> str:
    """A letter to the supplier."""
    return f"Write a short letter that orders {count} {name}."


if __name__ == "__main__":
    mcp.serve_mcp()
