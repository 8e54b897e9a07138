"""Rows: the interface of a database, and the mapping of declared records to columns and back.

Tables use SQL that any database understands, with `?` for values. A column holds text, a whole number, bytes or
nothing; columns ending in `_at` are wall-clock milliseconds. Text that cannot be encoded (paths,
labels) is written as bytes.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from enum import Enum
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from ..core.clocks import ProcessIdentity, WallTime
from ..core.record_json import hints_of, of_json, to_json, without_none
from ..core.value_types import value

# One value: 60 MB of text, the most that a step hands on, of which JSON escapes a byte with six at most; and the rest
# of its record. SQLite would accept a gigabyte, and hold the writer's lock meanwhile.
LONGEST_JSON = 400_000_000

Column = str | int | bytes | None
T = TypeVar("T")


class Result(Protocol):
    """Rows that a statement has found, and the number that it has changed."""

    @property
    def rowcount(self) -> int: ...
    def fetchone(self) -> Any: ...
    def fetchall(self) -> list[Any]: ...
    def __iter__(self) -> Iterator[Any]: ...


class Transaction(Protocol):
    """One transaction. It encodes times, processes, text and numbers."""

    def execute(self, statement: str, values: Sequence[object] = ()) -> Result: ...
    def executemany(self, statement: str, rows: Iterable[Sequence[object]]) -> Result: ...
    def change_mark(self) -> object:
        """Return a mark that is equal to an earlier one as long as no other connection has changed anything since."""
        ...


class Database(Protocol):
    """One database, shared by the threads of a process. Its errors are StoreBusy and StoreUnusable."""

    @property
    def path(self) -> Path: ...
    def read(self) -> AbstractContextManager[Transaction]: ...
    def write(self, *, durable: bool = True, may_wait: bool = True) -> AbstractContextManager[Transaction]: ...
    def open_another(self) -> Database:
        """Open it a second time, for a thread that must not wait for others. The caller closes it."""
        ...

    def shrink(self, pages: int | None = None) -> bool: ...
    def close(self) -> None: ...


# --- one column -------------------------------------------------------------------------------------------------


def encode(value: object) -> Column:
    """Return a value as a column holds it. Raises TypeError for other types than text, numbers, times and processes."""
    if isinstance(value, str):
        text = str(value)  # of an enum, its value
        try:
            _ = text.isascii() or text.encode()
        except UnicodeEncodeError:  # undecodable bytes (surrogates), which SQLite would refuse
            return text.encode("utf-8", "surrogatepass")
        return text
    if value is None or isinstance(value, int | bytes):
        return value
    if isinstance(value, WallTime):
        return value.ms
    if isinstance(value, ProcessIdentity):  # one canonical text, so that equal processes are equal columns
        return json_text([value.host, value.boot_id, value.pid, value.started, value.namespace])
    raise TypeError(f"a column cannot hold {type(value).__name__}")


def decode_text(column: str | bytes) -> str:
    """Return the text of an encoded column."""
    return column.decode("utf-8", "surrogatepass") if isinstance(column, bytes) else column


def decode_process(column: str) -> ProcessIdentity:
    """Return the process of an encoded column."""
    return ProcessIdentity(*json.loads(column))


def json_text(value: object) -> str:
    """Return JSON text. Raises ValueError or TypeError for other values, and for those too deep or too long."""
    try:
        text = json.dumps(value, allow_nan=False, separators=(",", ":"))
    except RecursionError:
        raise ValueError("nested too deep to be stored") from None
    if len(text) > LONGEST_JSON:
        raise ValueError(f"{len(text)} characters of JSON are too many to be stored: {LONGEST_JSON} at most")
    return text


def check_count(count: int, name: str) -> int:
    """Return the number. Raises TypeError or ValueError unless it is a whole one from 0 up that fits into a column."""
    if type(count) is not int:
        raise TypeError(f"{name} must be a whole number, not {count!r}")
    if not 0 <= count < 2**63:
        raise ValueError(f"{name} must be a whole number from 0 up, not {count}")
    return count


# --- one row ----------------------------------------------------------------------------------------------------


@value
class Codec:
    """Pair of functions that write the values of a field to a column and read them from it."""

    encode: Callable[[Any], Any]
    decode: Callable[[Any], Any]


def _codec_of(declared: Any) -> Codec:
    """Return the codec of a declared type: a plain column where there is one, else JSON."""
    inner = without_none(declared)
    if inner is str:
        codec = Codec(encode, decode_text)
    elif inner is ProcessIdentity:
        codec = Codec(encode, decode_process)
    elif inner in (int, bool, WallTime) or (isinstance(inner, type) and issubclass(inner, Enum)):
        codec = Codec(encode, inner)
    else:
        codec = Codec(lambda value: json_text(to_json(value)), lambda column: of_json(inner, json.loads(column)))
    if inner is declared:
        return codec
    return Codec(
        lambda value: None if value is None else codec.encode(value),
        lambda column: None if column is None else codec.decode(column),
    )


class RowMapper(Generic[T]):
    """Mapping of the rows of a table to records of one class and back, by the names and types of its fields."""

    def __init__(self, kind: Callable[..., T], table: str, codecs: Mapping[str, Codec] | None = None) -> None:
        """`codecs` has the fields that are written differently from what their type says."""
        self._kind, self._table = kind, table
        self._codecs = {name: (codecs or {}).get(name) or _codec_of(type) for name, type in hints_of(kind).items()}
        self.columns = ", ".join(self._codecs)

    def read(self, row: Sequence[Any]) -> T:
        """Return the record of a row that has `columns`."""
        pairs = zip(self._codecs.items(), row, strict=True)
        return self._kind(**{name: codec.decode(column) for (name, codec), column in pairs})

    def write(self, record: T, without: Sequence[str] = ()) -> dict[str, Column]:
        """Return the columns of a record, by their names, without those of some fields."""
        return {
            name: codec.encode(getattr(record, name)) for name, codec in self._codecs.items() if name not in without
        }

    def list(self, transaction: Transaction, rest: str = "", values: Sequence[object] = ()) -> list[T]:
        """Return the records of the rows that `rest` (WHERE, ORDER BY, LIMIT) selects."""
        found = transaction.execute(f"SELECT {self.columns} FROM {self._table} {rest}", values)
        return [self.read(row) for row in found.fetchall()]

    def get(self, transaction: Transaction, rest: str, values: Sequence[object]) -> T | None:
        """Return the record of the first row that `rest` selects, or None."""
        row = transaction.execute(f"SELECT {self.columns} FROM {self._table} {rest}", values).fetchone()
        return None if row is None else self.read(row)

    def insert(self, transaction: Transaction, record: T, **more: object) -> None:
        """Insert a row for a record, with `more` columns."""
        insert_row(transaction, self._table, {**self.write(record), **more})


def insert_row(transaction: Transaction, table: str, columns: Mapping[str, object]) -> None:
    """Insert a row of these columns."""
    marks = ", ".join("?" * len(columns))
    statement = f"INSERT INTO {table} ({', '.join(columns)}) VALUES ({marks})"
    transaction.execute(statement, tuple(columns.values()))


def update_row(transaction: Transaction, table: str, columns: Mapping[str, object], id: str) -> None:
    """Set these columns of the row with this id."""
    settings = ", ".join(f"{name} = ?" for name in columns)
    transaction.execute(f"UPDATE {table} SET {settings} WHERE id = ?", (*columns.values(), id))
