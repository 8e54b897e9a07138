"""Tables inside a test: the report of a failure names the row."""

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def row(*values: object) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        error.add_note(f"row: {values!r}"[:2000])
        raise
