"""Fixtures of the tests of process/: those of the runtime, which starts what they look at, as it does elsewhere."""

import pytest

from tests.runtime.conftest import no_main_program as no_main_program


@pytest.fixture(autouse=True)
def cold(cold_runtimes: None) -> None:
    """Here is tested how processes start, and what is imported in them."""
