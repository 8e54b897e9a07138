"""Variables of the environment in texts of a user, as clients of MCP write them."""

from __future__ import annotations

import os
import re

_VARIABLE = re.compile(r"\$\{(?:env:)?([A-Za-z_]\w*)(?::-([^}]*))?\}")


def expand(text: str) -> str:
    """Replace `${NAME}` and `${NAME:-default}`. Raises ValueError if a variable is not set."""

    def find(match: re.Match[str]) -> str:
        found = os.environ.get(match[1], match[2])
        if found is None:
            raise ValueError(f"it uses the variable {match[1]}, which is not set")
        return found

    return _VARIABLE.sub(find, text)
