"""Rows: what a database has to offer to the tables, and how values become columns and columns values.

Tables speak SQL that any database understands, with `?` for values; what is particular to one is in its `Database`
(store/database.py), in its schema, and below in what one column can hold: text, a whole number, bytes or nothing.
Columns ending in `_at` are wall-clock milliseconds. Text that may hold anything (paths, labels) is written as bytes
where it cannot be encoded.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from ..core.clocks import ProcessIdentity, WallTime
from ..core.value_types import value

# One value: 60 MB of text, the most that a step hands on, of which JSON escapes a byte with six at most; and the rest
# of its record. SQLite would take a gigabyte, and hold the writer's lock while it does.
LONGEST_JSON = 400_000_000

Column = str | int | bytes | None
T = TypeVar("T")


# --- what a database offers -------------------------------------------------------------------------------------


class Result(Protocol):
    """The rows that a statement has found, and how many it has changed."""

    @property
    def rowcount(self) -> int: ...
    def fetchone(self) -> Any: ...
    def fetchall(self) -> list[Any]: ...
    def __iter__(self) -> Iterator[Any]: ...


class Transaction(Protocol):
    """One transaction. Values are given as they are: times, processes, text and numbers are encoded."""

    def execute(self, statement: str, values: Sequence[object] = ()) -> Result: ...
    def executemany(self, statement: str, rows: Iterable[Sequence[object]]) -> Result: ...
    def change_mark(self) -> object:
        """Return what is equal to an earlier mark as long as nobody else has changed anything since."""
        ...


class Database(Protocol):
    """One database, shared by the threads of a process. Its errors are StoreBusy and StoreUnusable."""

    @property
    def path(self) -> Path: ...
    def read(self) -> AbstractContextManager[Transaction]: ...
    def write(self, *, durable: bool = True, may_wait: bool = True) -> AbstractContextManager[Transaction]: ...
    def open_another(self) -> Database:
        """Open it a second time, for a thread that others must not keep waiting. The caller closes it."""
        ...

    def shrink(self, pages: int | None = None) -> bool: ...
    def close(self) -> None: ...


# --- one column -------------------------------------------------------------------------------------------------


def encode(given: object) -> Column:
    """Return a value as a column holds it. Raises TypeError for what is no text, number, time or process."""
    if isinstance(given, str):
        text = str(given)  # of an enum, its value
        try:
            _ = text.isascii() or text.encode()
        except UnicodeEncodeError:  # undecodable bytes (surrogates), which SQLite would refuse
            return text.encode("utf-8", "surrogatepass")
        return text
    if given is None or isinstance(given, int | bytes):
        return given
    if isinstance(given, WallTime):
        return given.ms
    if isinstance(given, ProcessIdentity):  # one canonical text, so that equal processes are equal columns
        return json_text([given.host, given.boot_id, given.pid, given.started, given.namespace])
    raise TypeError(f"a column cannot hold {type(given).__name__}")


def decode_text(column: str | bytes) -> str:
    """Return the text that `encode` was given."""
    return column.decode("utf-8", "surrogatepass") if isinstance(column, bytes) else column


def decode_process(column: str) -> ProcessIdentity:
    """Return the process that `encode` was given."""
    return ProcessIdentity(*json.loads(column))


def json_text(value: object) -> str:
    """Return JSON text. Raises ValueError or TypeError for what is no JSON, too deep, or too long."""
    try:
        text = json.dumps(value, allow_nan=False, separators=(",", ":"))
    except RecursionError:
        raise ValueError("nested too deep to be stored") from None
    if len(text) > LONGEST_JSON:
        raise ValueError(f"{len(text)} characters of JSON are too many to be stored: {LONGEST_JSON} at most")
    return text


def check_count(count: int, what: str) -> int:
    """Return the number. Raises TypeError or ValueError unless it is a whole one from 0 up that fits into a column."""
    if type(count) is not int:
        raise TypeError(f"{what} must be a whole number, not {count!r}")
    if not 0 <= count < 2**63:
        raise ValueError(f"{what} must be a whole number from 0 up, not {count}")
    return count


# --- one row ----------------------------------------------------------------------------------------------------


@value
class Codec:
    """Pair of functions by which the values of a field are written to a column and read from it."""

    encode: Callable[[Any], Any]
    decode: Callable[[Any], Any]


def _keep(value: Any) -> Any:
    return value


def optional(codec: Codec) -> Codec:
    """Return the codec for a field that may be None."""
    return Codec(
        lambda value: None if value is None else codec.encode(value),
        lambda column: None if column is None else codec.decode(column),
    )


JSON = Codec(json_text, json.loads)
# By what a field is declared as; ` | None` is understood for all of them.
_CODECS = {
    "str": Codec(encode, decode_text),
    "int": Codec(_keep, _keep),
    "WallTime": Codec(encode, WallTime),
    "ProcessIdentity": Codec(encode, decode_process),
    "Any": JSON,
    "dict[str, Any]": JSON,
}


class RowMapper(Generic[T]):
    """Maps the rows of a table to values of one type and back, by the names and declared types of its fields.

    `codecs` has the fields whose type is not known here. A field that is `without` a column is made by `build` from the
    others and from the columns `beside` them.
    """

    def __init__(
        self,
        kind: type[T],
        table: str,
        *,
        without: Sequence[str] = (),
        beside: Mapping[str, str] | None = None,
        build: Callable[[dict[str, Any]], T] | None = None,
        codecs: Mapping[str, Codec] | None = None,
    ) -> None:
        declared = dict(kind.__annotations__)
        declared = {name: type for name, type in declared.items() if name not in without} | dict(beside or {})
        self._fields = tuple(declared)
        self._codecs = tuple((codecs or {}).get(name) or _codec_of(type) for name, type in declared.items())
        self._build: Callable[[dict[str, Any]], T] = build or (lambda fields: kind(**fields))
        self._table = table
        self.columns = ", ".join(self._fields)

    def read(self, row: Sequence[Any]) -> T:
        """Return the value of a row that has `columns`."""
        return self._build({
            name: codec.decode(column) for name, codec, column in zip(self._fields, self._codecs, row, strict=True)
        })  # fmt: skip

    def write(self, value: T, without: Sequence[str] = ()) -> dict[str, Column]:
        """Return the columns of a value, by their names, without those of some fields."""
        return {
            name: codec.encode(getattr(value, name))
            for name, codec in zip(self._fields, self._codecs, strict=True)
            if name not in without
        }

    def list(self, transaction: Transaction, rest: str = "", values: Sequence[object] = ()) -> list[T]:
        """Return the values of all rows that `rest` (WHERE, ORDER BY, LIMIT) leaves."""
        found = transaction.execute(f"SELECT {self.columns} FROM {self._table} {rest}", values)
        return [self.read(row) for row in found.fetchall()]

    def get(self, transaction: Transaction, rest: str, values: Sequence[object]) -> T | None:
        """Return the value of the first row that `rest` leaves, or None."""
        row = transaction.execute(f"SELECT {self.columns} FROM {self._table} {rest}", values).fetchone()
        return None if row is None else self.read(row)

    def insert(self, transaction: Transaction, value: T, **more: object) -> None:
        """Insert a row for a value, with `more` columns."""
        insert_row(transaction, self._table, {**self.write(value), **more})


def insert_row(transaction: Transaction, table: str, columns: Mapping[str, object]) -> None:
    """Insert a row of these columns."""
    marks = ", ".join("?" * len(columns))
    statement = f"INSERT INTO {table} ({', '.join(columns)}) VALUES ({marks})"
    transaction.execute(statement, tuple(columns.values()))


def _codec_of(declared: str) -> Codec:
    base, _, none = declared.partition(" | ")
    return optional(_CODECS[base]) if none == "None" else _CODECS[declared]
