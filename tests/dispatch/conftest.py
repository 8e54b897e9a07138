"""Jobs, keys and limits are tested through real App programs, as tests/app does: the same fixtures."""

from tests.app.conftest import home, tool

__all__ = ["home", "tool"]
