"""An App whose commands share module globals that worker processes do not share."""

from __future__ import annotations

import sqlite3

from shotclock import App

app = App("globals")
db = sqlite3.connect(":memory:")
NOTES: list[str] = []
MEANT: list[str] = []
SHARED: list[str] = []


@app.command
def add_note(text: str) -> int:
    NOTES.append(text)
    return len(NOTES)


@app.command(mutates=False)
def list_rows() -> list[str]:
    return [str(row) for row in db.execute("select 1")]


@app.resource("notes://all")
def all_notes() -> str:
    return "\n".join(NOTES)


@app.command(isolation="process")
def meant(text: str) -> None:
    MEANT.append(text)


@app.command(isolation="shared")
async def shared(text: str) -> None:
    SHARED.append(text)


if __name__ == "__main__":
    app()
