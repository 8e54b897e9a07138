"""Mapping of records to rows and back, by the declared types of their fields; and the tables that hold them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from typing import Any, Generic, TypeVar

from ..core.json_values import hints_of, of_json, to_json, without_none
from ..core.limits import ProcessIdentity, WallTime
from ..core.value_types import value
from ._database import Column, Transaction, decode_process, decode_text, encode, json_text

T = TypeVar("T")


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
        self.columns: str = ", ".join(self._codecs)

    def read(self, row: Sequence[Any]) -> T:
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
        row = transaction.execute(f"SELECT {self.columns} FROM {self._table} {rest}", values).fetchone()
        return None if row is None else self.read(row)

    def insert(self, transaction: Transaction, record: T, **more: object) -> None:
        insert_row(transaction, self._table, {**self.write(record), **more})


def insert_row(transaction: Transaction, table: str, columns: Mapping[str, object]) -> None:
    marks = ", ".join("?" * len(columns))
    statement = f"INSERT INTO {table} ({', '.join(columns)}) VALUES ({marks})"
    transaction.execute(statement, tuple(columns.values()))


def update_row(transaction: Transaction, table: str, columns: Mapping[str, object], id: str) -> None:
    settings = ", ".join(f"{name} = ?" for name in columns)
    transaction.execute(f"UPDATE {table} SET {settings} WHERE id = ?", (*columns.values(), id))


def create_table(table: str, kinds: Sequence[type], more: Mapping[str, str | None], *constraints: str) -> str:
    """Return the statement that creates a table for the fields of these records.

    `more` has further columns, other types of columns, and None for a field that has no column.
    """
    columns = {name: _column_type(name, declared) for kind in kinds for name, declared in hints_of(kind).items()}
    parts = [f"{name} {type}" for name, type in {**columns, **more}.items() if type is not None]
    return f"CREATE TABLE {table} ({', '.join([*parts, *constraints])})"


def _column_type(name: str, declared: Any) -> str:
    inner = without_none(declared)
    kind = "INTEGER" if inner in (int, bool, WallTime) else "TEXT"
    if isinstance(inner, type) and issubclass(inner, Enum):
        choices = ", ".join(f"'{each.value}'" for each in inner)
        kind += f" CHECK ({name} IN ({choices}))"
    return kind if inner is not declared else f"{kind} NOT NULL"
