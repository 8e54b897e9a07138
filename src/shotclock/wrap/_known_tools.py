"""Tools as the client has listed them, as far as repeated calls and cut results depend on them."""

from __future__ import annotations

from ..calls.call import Effects
from ..core.value_types import value

MOST_TOOLS = 5_000


@value
class KnownTool:
    """A tool. One that is not known changes things with every call."""

    effects: Effects = Effects(mutates=True)
    has_output_schema: bool | None = None
    """None if it is not known."""


_UNKNOWN = KnownTool()


class KnownTools:
    def __init__(self) -> None:
        self._tools: dict[str, KnownTool] = {}

    def get(self, name: str) -> KnownTool:
        return self._tools.get(name, _UNKNOWN)

    def learn(self, result: object) -> None:
        """Note the tools of a result of `tools/list`."""
        tools = result.get("tools") if isinstance(result, dict) else None
        for tool in tools if isinstance(tools, list) else ():
            name = tool.get("name") if isinstance(tool, dict) else None
            if not isinstance(name, str) or len(self._tools) >= MOST_TOOLS:
                continue
            hints = tool.get("annotations")
            hints = hints if isinstance(hints, dict) else {}
            effects = Effects(hints.get("readOnlyHint") is not True, hints.get("idempotentHint") is True)
            self._tools[name] = KnownTool(effects, "outputSchema" in tool)
