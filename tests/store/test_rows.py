"""Rows and records: what goes in comes back."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shotclock.core.limits import LATEST_MS, ProcessIdentity, WallTime
from shotclock.core.value_types import value
from shotclock.store._database import encode
from shotclock.store._rows import RowMapper
from shotclock.store.store import Store
from tests.rows import row

texts = st.text(st.characters(), max_size=30)  # lone surrogates too: a path may hold any bytes
times = st.integers(0, LATEST_MS).map(WallTime)
processes = st.builds(ProcessIdentity, texts, texts, st.integers(1, 2**22), st.integers(0, 2**62), texts)
values = st.recursive(st.none() | st.booleans() | st.integers() | texts, lambda inner: st.lists(inner, max_size=3))


@value
class Everything:
    text: str
    maybe_text: str | None
    number: int
    at: WallTime
    maybe_at: WallTime | None
    process: ProcessIdentity
    plain: Any
    maybe_plain: dict[str, Any] | None


@given(
    st.builds(
        Everything,
        texts,
        st.none() | texts,
        st.integers(0, 2**62),
        times,
        st.none() | times,
        processes,
        values,
        st.none() | st.dictionaries(texts, values, max_size=3),
    )
)
def test_what_is_written_is_read_back(value: Everything) -> None:
    mapper = RowMapper(Everything, "everything")
    columns = mapper.write(value)
    assert ", ".join(columns) == mapper.columns
    assert all(isinstance(column, str | int | bytes | None) for column in columns.values())
    assert mapper.read([encode(column) for column in columns.values()]) == value


def test_a_value_that_no_column_can_hold_is_refused_before_it_is_written(store: Store) -> None:
    table: list[Any] = [1.5, ["a"], {"a": 1}, object()]
    for value in table:
        with row(value):
            with pytest.raises(TypeError, match="a column cannot hold"), store._database.write() as transaction:
                transaction.execute("SELECT ?", (value,))
