"""Rows of results, the bars they are held against, and how both are printed."""

from __future__ import annotations

from dataclasses import dataclass, field

HEADER = ["what", "shotclock", "peer", "ratio", "bar", "met?"]


@dataclass(frozen=True)
class Bar:
    """What a row has to reach: its ratio where the unit is ×, otherwise our own figure."""

    limit: float
    unit: str = "×"
    at_least: bool = False

    def __str__(self) -> str:
        return f"{'≥' if self.at_least else '≤'} {self.limit:g} {self.unit}"

    def is_met_by(self, figure: float) -> bool:
        return figure >= self.limit if self.at_least else figure <= self.limit


@dataclass(frozen=True)
class Row:
    """One comparison. `ratio` is shotclock's figure divided by the peer's."""

    what: str
    ours: str
    peer: str = "–"
    ratio: float | None = None
    bar: str = "–"
    met: bool | None = None
    why: str = ""
    """Said on the page if the bar is missed: what the time goes into."""

    @property
    def cells(self) -> list[str]:
        ratio = "–" if self.ratio is None else f"{self.ratio:.2f} ×"
        verdict = {True: "yes", False: "**no**", None: ""}[self.met]
        return [self.what, self.ours, self.peer, ratio, self.bar, verdict]


def compared(
    what: str,
    ours: float,
    peer_name: str,
    peer: float,
    shown: str,
    bar: Bar | None = None,
    why: str = "",
    ratio: float | None = None,
) -> Row:
    """A row about the ratio of two figures, each written in the format `shown`, for example "{:.1f} µs". Where the
    sides took turns, `ratio` is that of `Figures`."""
    ratio = ours / peer if ratio is None else ratio
    beside = f"{peer_name} {shown.format(peer)}"
    if bar is None:
        return Row(what, shown.format(ours), beside, ratio)
    return Row(what, shown.format(ours), beside, ratio, str(bar), bar.is_met_by(ratio), why)


def absolute(
    what: str, ours: float, shown: str, bar: Bar | None, peer: str = "–", ratio: float | None = None, why: str = ""
) -> Row:
    """A row whose bar is about our own figure; the peer, and the ratio to it, stand beside it for orientation."""
    if bar is None:
        return Row(what, shown.format(ours), peer, ratio)
    return Row(what, shown.format(ours), peer, ratio, str(bar), bar.is_met_by(ours), why)


@dataclass(frozen=True)
class Table:
    title: str
    note: str
    rows: list[Row] = field(default_factory=list)
    header: list[str] = field(default_factory=lambda: HEADER)
    grid: list[list[str]] = field(default_factory=list)
    """Plain cells under a header of their own, for a table that is no list of comparisons."""

    @property
    def cells(self) -> list[list[str]]:
        return [self.header, *(row.cells for row in self.rows), *self.grid]

    def as_text(self) -> str:
        plain = [[cell.replace("**", "").replace("`", "") for cell in line] for line in self.cells]
        return "\n".join(["", self.title, *_aligned(plain), ""])

    def as_markdown(self) -> str:
        header, *body = self.cells
        lines = ["| " + " | ".join(line) + " |" for line in [header, ["---"] * len(header), *body]]
        return "\n".join([f"## {self.title}", "", self.note, "", *lines, ""])


def _aligned(lines: list[list[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    shown = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines]
    return [shown[0], "  ".join("-" * width for width in widths), *shown[1:]]
