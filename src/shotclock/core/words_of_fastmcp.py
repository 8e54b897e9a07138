"""Members that authors know from FastMCP and that have another name here, or none."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

_STATE = "keep state in the lifespan, or in a database"
_FUNCTIONS = "call the function that makes it"
_SESSIONS = "a function does not see the session of its client"
CONTEXT = {
    **dict.fromkeys(("get_state", "set_state", "delete_state"), _STATE),
    **dict.fromkeys(("read_resource", "list_resources", "get_prompt", "list_prompts"), _FUNCTIONS),
    **dict.fromkeys(("session", "session_id", "client_id", "request_context", "transport"), _SESSIONS),
    "fastmcp": "import the App from its module",
}
APP = {
    "tool": "write @app.command",
    "add_tool": "write app.command(function)",
    "run": "write app.serve_mcp(), or app() for the command line",
    "http_app": "write app.serve_mcp(http='HOST:PORT')",
    "mount": "put the commands into one App, or serve several servers as one with `shotclock wrap`",
    "custom_route": "an App serves MCP alone",
}


class ExplainsMembers:
    """A class that says what to write in place of a member that it does not have."""

    _instead_of: ClassVar[Mapping[str, str]] = {}

    if not TYPE_CHECKING:  # type checkers report unknown members themselves

        def __getattr__(self, name):
            instead = self._instead_of.get(name)
            raise AttributeError(
                f"{type(self).__name__!r} object has no attribute {name!r}" + (f": {instead}" if instead else "")
            )
