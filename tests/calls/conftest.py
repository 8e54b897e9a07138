"""Fixtures of the enforcement tests."""

import sys
import types
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def no_main_program() -> Iterator[None]:
    """Workers import the main program. That is pytest here, which would cost each test that has any 0.3 s."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main
