"""A store in a directory of its own, and children that use it."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from shotclock.store.store import Store


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return tmp_path / "home"


@pytest.fixture
def store(home: Path) -> Iterator[Store]:
    with Store.open(home) as opened:
        yield opened
