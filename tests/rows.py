"""Tables inside a test: the report of a failure names the row. And matrices of which `make test` runs the corners."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest


@contextmanager
def row(*values: object) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        error.add_note(f"row: {values!r}"[:2000])
        raise


def corners(rows: Iterable[Any], *kept: object) -> list[Any]:
    """Return rows as parameters. Those not kept, by the row or by its first value, run in `make soak` alone."""

    def parameter(each: Any) -> Any:
        values = each if isinstance(each, tuple) else (each,)
        return each if each in kept or values[0] in kept else pytest.param(*values, marks=pytest.mark.soak)

    return [parameter(each) for each in rows]
