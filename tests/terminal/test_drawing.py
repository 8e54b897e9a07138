"""Ages, sizes and tables as people read them."""

from typing import Any

import pytest

from shotclock.core.limits import WallTime
from shotclock.terminal import drawing, output


def test_times_and_sizes_have_few_digits(monkeypatch: pytest.MonkeyPatch) -> None:
    now = WallTime(1_000_000_000_000)
    monkeypatch.setattr(drawing, "wall_time", lambda: now)
    for ms, shown in ((999, "999ms"), (4_484, "4.48s"), (12_340, "12.3s"), (59_960, "1m"), (312_400, "5m12s")):
        assert output.brief(ms) == shown, ms
    rounded = {999: "0s", 1_000: "1s", 59_999: "59s", 719_999: "11m", 11_400_000: "3h10m", 187_300_000: "2d4h"}
    for ms, shown in rounded.items():
        assert drawing.age((now - ms).iso()) == shown == drawing.time_left((now + ms).iso()), ms
    assert drawing.age((now + 5_000).iso()) == "0s" and drawing.time_left(drawing.NEVER) == "no end"
    assert [drawing.limit_in_words(ms) for ms in (None, 0, 5)] == ["no limit", "no limit", "5ms"]
    assert [drawing.limit_in_words(ms, "-") for ms in (None, 0)] == ["-", "0ms"]
    assert [drawing.short_size(size) for size in (1, 999, 1_500)] == ["1 B", "999 B", "1.5 kB"]


def test_a_table_has_its_titles_and_off_a_terminal_nothing_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    def rows(data: object, console: Any) -> None:
        made = drawing.table("NAME", "TEXT", wraps=1)
        made.add_row("n", str(data))
        assert [column.no_wrap for column in made.columns] == [True, False]
        console.print(made)

    monkeypatch.delenv("COLUMNS", raising=False)
    assert [line.split() for line in drawing.draw(rows, "x" * 200).splitlines()] == [["NAME", "TEXT"], ["n", "x" * 200]]
    monkeypatch.setenv("COLUMNS", "20")
    assert drawing.draw(rows, "y" * 30).splitlines()[1] == "n     " + "y" * 13 + "…"
