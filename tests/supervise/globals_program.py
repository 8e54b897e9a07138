"""Module globals of every kind, for the search of those that calls change."""

from __future__ import annotations

import itertools
import logging
import re
import sqlite3
import threading
from collections import Counter, defaultdict, deque
from dataclasses import dataclass, field
from typing import Any

from tests.supervise import globals_store

NOTES: list[str] = []
BY_NAME: dict[str, int] = {}
SEEN: set[str] = set()
RECENT: deque[str] = deque(maxlen=3)
GROUPS: defaultdict[str, list[str]] = defaultdict(list)
COUNTS: Counter[str] = Counter()
total = 0
last = None
db = sqlite3.connect(":memory:")

DEFAULTS = {"size": 3}
NAMES = ["a", "b"]
LIMIT = 5
LOG = logging.getLogger("globals")
LOCK = threading.Lock()
PATTERN = re.compile("x")
LOCAL = threading.local()
NUMBERS = itertools.count()
client: Any = None


@dataclass
class Store:
    items: list[str] = field(default_factory=list)
    size: int = 0
    connection: Any = None

    def add(self, item: str) -> None:
        self._note(item)

    def _note(self, item: str) -> None:
        self.size += 1

    def push(self, item: str) -> None:
        self.items.append(item)

    def get(self) -> list[str]:
        return [*self.items]

    def connect(self) -> Any:
        if self.connection is None:
            self.connection = object()
        return self.connection


STORE, PUSHED, DIRECT, SETTINGS = Store(), Store(), Store(), Store()


def append(text: str) -> None:
    NOTES.append(text)


def subscript(name: str) -> None:
    BY_NAME[name.strip()] = BY_NAME.get(name, 0) + 1


def augmented(name: str) -> None:
    COUNTS[name] += 1


def nested(name: str) -> None:
    GROUPS[name.lower()].append(name)


def deleted(name: str) -> None:
    SEEN.discard(name)
    RECENT.append(name)


def assigned() -> int:
    global total
    total += 1
    return total


def remembered(value: Any) -> None:
    global last
    last = value


def reader() -> int:
    return len(NOTES)


def by_helper(text: str) -> None:
    append(text)


def inside() -> None:
    def add() -> None:
        NOTES.append("x")

    add()


def query() -> list[Any]:
    return db.execute("select 1").fetchall()


def method(item: str) -> None:
    STORE.add(item)


def method_on_container(item: str) -> None:
    PUSHED.push(item)


def attribute(item: str) -> None:
    DIRECT.items.append(item)


def elsewhere(item: str) -> None:
    globals_store.remember(item)


def elsewhere_directly(item: str) -> None:
    globals_store.KEPT.append(item)


def quiet(name: str) -> Any:
    global client
    LOG.info("%s", name)
    if client is None:
        client = object()
    changed = DEFAULTS.copy()
    changed["size"] = LIMIT
    LOCAL.value = name
    notes: list[str] = []
    notes.append(name)
    with LOCK:
        found = PATTERN.search(name), NAMES.index("a"), DEFAULTS["size"], SETTINGS.get(), SETTINGS.connect()
    return found, next(NUMBERS), changed, globals_store.LIMITS.get("a")


def shadowed(NOTES: list[str]) -> None:
    NOTES.append("a parameter")
