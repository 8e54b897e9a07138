"""Secrets: variables whose names look like one reach neither templates nor children unless a step asks for them, and
their values are kept out of everything that is written down."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

_SECRET = re.compile(
    r"(^|_)(TOKEN|SECRET|SECRETS|PASSWORD|PASSWD|PASSPHRASE|PWD_?HASH|KEY|APIKEY|CREDENTIALS?|AUTH|COOKIE|PRIVATE|DSN)(_|$)",
    re.IGNORECASE,
)
_REFERENCE = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)\}")
HIDDEN = "***"
# Shorter ones would be found in every other word.
SHORTEST = 5


def looks_secret(name: str) -> bool:
    return _SECRET.search(name) is not None


def visible(environment: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if not looks_secret(name)}


def filled_in(text: str, environment: Mapping[str, str]) -> str:
    """`${NAME}` replaced by the variable, secret or not: this is where a step asks for it. Unknown ones are empty."""
    return _REFERENCE.sub(lambda found: environment.get(found.group(1), ""), text)


class Redaction:
    """Takes secret values out of whatever is about to be written down."""

    def __init__(self, environment: Mapping[str, str], more: Iterable[str] = ()) -> None:
        secrets = {value for name, value in environment.items() if looks_secret(name)} | set(more)
        long_enough = sorted((value for value in secrets if len(value) >= SHORTEST), key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, long_enough))) if long_enough else None

    def text(self, text: str) -> str:
        return text if self._pattern is None else self._pattern.sub(HIDDEN, text)

    def value(self, value: Any) -> Any:
        if self._pattern is None:
            return value
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, list):
            return [self.value(item) for item in value]
        if isinstance(value, dict):
            return {self.text(str(key)): self.value(item) for key, item in value.items()}
        return value
