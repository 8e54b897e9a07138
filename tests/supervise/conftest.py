"""Fixtures of the tests of supervise/: those of the calls, which start the processes, as elsewhere."""

import pytest

from tests.calls.conftest import no_main_program as no_main_program


@pytest.fixture(autouse=True)
def cold(cold_runtimes: None) -> None:
    """Here is tested how processes start, and what is imported in them."""
