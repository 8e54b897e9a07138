"""The fixture of the tests of calls/ for functions that run in workers."""

from tests.calls.conftest import no_main_program

__all__ = ["no_main_program"]
