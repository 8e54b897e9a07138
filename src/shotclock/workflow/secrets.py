"""Secrets: variables whose names look like one reach neither templates nor children unless a step asks for them, and
their values are kept out of everything that is written down."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import quote, quote_plus

_SECRET = re.compile(
    r"(^|_)(TOKEN|SECRET|SECRETS|PASSWORD|PASSWD|PASSPHRASE|PWD_?HASH|KEY|APIKEY|CREDENTIALS?|AUTH|COOKIE|PRIVATE|DSN)(_|$)",
    re.IGNORECASE,
)
_REFERENCE = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)\}")
HIDDEN = "***"
# Shorter ones would be found in every other word.
SHORTEST = 5
SHORTEST_PART = 8


def looks_secret(name: str) -> bool:
    return _SECRET.search(name) is not None


def visible(environment: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if not looks_secret(name)}


def filled_in(text: str, environment: Mapping[str, str]) -> str:
    """`${NAME}` replaced by the variable, secret or not: this is where a step asks for it. Unknown ones are empty."""
    return _REFERENCE.sub(lambda found: environment.get(found.group(1), ""), text)


class Redaction:
    """Takes secret values out of whatever is about to be written down, also as base64, in hex, or escaped for JSON or a
    URL, and each line of one that has several."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._known: set[str] = set()
        self._ways: list[str] = []
        self.learn(environment)

    def learn(self, variables: Mapping[str, str]) -> None:
        """Of these, the values of those whose names look secret."""
        new = {value for name, value in variables.items() if looks_secret(name) and len(value) >= SHORTEST}
        if new <= self._known:
            return
        self._known |= new
        written = {each for value in self._known for each in _ways_to_write(value)}
        self._ways = sorted(written, key=len, reverse=True)

    def text(self, text: str) -> str:
        # One after the other is twenty times as fast as a regular expression of them all.
        for written in self._ways:
            if written in text:
                text = text.replace(written, HIDDEN)
        return text

    def value(self, value: Any) -> Any:
        if not self._ways:
            return value
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, list):
            return [self.value(item) for item in value]
        if isinstance(value, dict):
            return {self.text(str(key)): self.value(item) for key, item in value.items()}
        return value


def _ways_to_write(secret: str) -> Iterator[str]:
    lines = [line.strip() for line in secret.splitlines()]
    # The first and the last line of a key in PEM are everybody's.
    parts = [line for line in lines if len(line) >= SHORTEST_PART and not line.startswith("-----")]
    for plain in (secret, secret.strip(), *(parts if len(lines) > 1 else ())):
        if len(plain) < SHORTEST:
            continue
        data = plain.encode("utf-8", "surrogateescape")
        yield plain
        yield json.dumps(plain)[1:-1]
        yield json.dumps(plain, ensure_ascii=False)[1:-1]
        yield quote(data, safe="")
        yield quote(data)
        yield quote_plus(data)
        yield data.hex()
        yield data.hex().upper()
        yield from _in_base64(data)


def _in_base64(data: bytes) -> Iterator[str]:
    """What is the same whatever stands around it: three bytes are four characters, so there are three ways."""
    for before in range(3):
        encoded = base64.b64encode(b"\0" * before + data).decode()
        end = len(encoded) - (0, 3, 2)[(before + len(data)) % 3]
        certain = encoded[(0, 2, 3)[before] : end]
        if len(certain) >= SHORTEST_PART:
            yield certain
            yield certain.replace("+", "-").replace("/", "_")
