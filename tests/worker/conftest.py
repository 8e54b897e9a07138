"""The fixtures of the tests of supervise/: processes start cold here too."""

from tests.supervise.conftest import cold, no_main_program

__all__ = ["cold", "no_main_program"]
