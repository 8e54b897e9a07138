"""Fixtures of the tests of process/: those of the runtime, which starts what they look at."""

from tests.runtime.conftest import no_main_program as no_main_program
