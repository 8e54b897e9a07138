"""Kit for tests of an App: call its commands, connect an MCP client, check answers. See docs/howto/test-a-tool.md.

    def test_greet() -> None:
        with testing.calls(app) as call:
            assert testing.assert_ok(call("greet", name="Ada")) == "Hello, Ada"

The pytest plugin is `shotclock.testing.plugin`. It loads in every pytest of an environment that has Shotclock, so the
names of this package are imported on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..core.lazy_names import names_on_first_use

if TYPE_CHECKING:
    from .answers import assert_failed as assert_failed
    from .answers import assert_ok as assert_ok
    from .connections import AsyncCommandCalls as AsyncCommandCalls
    from .connections import CommandCalls as CommandCalls
    from .connections import calls as calls
    from .connections import client as client
    from .plugin import ProcessesLeft as ProcessesLeft

_HOME = {
    "AsyncCommandCalls": "connections",
    "CommandCalls": "connections",
    "ProcessesLeft": "plugin",
    "assert_failed": "answers",
    "assert_ok": "answers",
    "calls": "connections",
    "client": "connections",
}
__all__ = sorted(_HOME)
if not TYPE_CHECKING:  # a type checker that sees `__getattr__` accepts every name
    __getattr__, __dir__ = names_on_first_use(__name__, _HOME)
