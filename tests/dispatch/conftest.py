"""Jobs, keys and limits are tested through real App programs, as tests/apps/app does: the same fixtures."""

from tests.apps.app.conftest import home, tool

__all__ = ["home", "tool"]
