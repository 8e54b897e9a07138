"""Secrets, and their removal from texts: by the name of a variable, by their value, and by their place in a URL."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any
from urllib.parse import quote, quote_plus

_SECRET_VARIABLE = re.compile(
    r"(^|_)(TOKEN|SECRET|SECRETS|PASSWORD|PASSWD|PASSPHRASE|PWD_?HASH|KEY|APIKEY|CREDENTIALS?|AUTH|COOKIE|PRIVATE|DSN)(_|$)",
    re.IGNORECASE,
)
# The name of a setting. git refuses to work where it is gone and GIT_CONFIG_COUNT is not.
_SETTING = re.compile(r"GIT_CONFIG_KEY_\d+")
_SECRET_HEADER = re.compile(
    r"authorization|cookie|token|secret|password|signature|api-?key|-key$|^key$|-auth", re.IGNORECASE
)
_USER_IN_URL = re.compile(r"(?<=://)[^/?#\s]*@")
_PASSWORD_IN_URL = re.compile(r"(?<=://)[^/@\s]*:[^/@\s]*@")
HIDDEN = "***"
# Between two characters of base64 that is broken over lines.
_BREAK = r"(?:\s|\\[rn])*"
# Shorter ones would be found in every other word.
SHORTEST = 5
SHORTEST_PART = 8


def looks_secret(variable: str) -> bool:
    """Return whether the name of a variable indicates a secret value."""
    return _SECRET_VARIABLE.search(variable) is not None and not _SETTING.fullmatch(variable)


def is_secret_header(name: str) -> bool:
    """Return whether the name of an HTTP header indicates a secret value."""
    return _SECRET_HEADER.search(name) is not None


def hide_values(text: str, secrets: Iterable[str], shortest: int = SHORTEST) -> str:
    """Return the text without these values, except for those too short to be recognised."""
    return _hide_longest_first(text, sorted({each for each in secrets if len(each) >= shortest}, key=len, reverse=True))


def hide_credentials(text: str, *, names_too: bool = True) -> str:
    """Return the text without the credentials in its URLs. In http a name alone can be the secret; in ssh
    (`names_too=False`) it is the user."""
    return (_USER_IN_URL if names_too else _PASSWORD_IN_URL).sub(f"{HIDDEN}@", text)


def _hide_longest_first(text: str, secrets: Iterable[str]) -> str:
    # One after the other is twenty times as fast as one regular expression.
    for secret in secrets:
        if secret in text:
            text = text.replace(secret, HIDDEN)
    return text


class Redaction:
    """Removes secret values from texts, also in base64 (in one line or several), in hex, or escaped for JSON or a URL,
    and each line of a secret that has several."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._secrets: set[str] = set()
        self._ways: list[str] = []
        self._in_base64: list[str] = []
        self.learn(environment)

    def learn(self, variables: Mapping[str, str]) -> None:
        """Add the values of variables with secret names."""
        new = {value for name, value in variables.items() if looks_secret(name) and len(value) >= SHORTEST}
        if new <= self._secrets:
            return
        self._secrets |= new
        written = {each for value in self._secrets for each in _ways_to_write(value)}
        self._ways = sorted(written, key=len, reverse=True)
        plain = {each for value in self._secrets for each in _plain_parts(value)}
        self._in_base64 = [each for part in plain for each in _in_base64(part.encode("utf-8", "surrogateescape"))]

    def holds(self, text: str) -> bool:
        """Return whether a secret is in the text, in any of these encodings."""
        return any(written in text for written in self._ways) or bool(self._broken_in(text))

    def text(self, text: str) -> str:
        text = _hide_longest_first(text, self._ways)
        for written in self._broken_in(text):
            text = re.sub(_BREAK.join(map(re.escape, written)), HIDDEN, text)
        return text

    def _broken_in(self, text: str) -> list[str]:
        """Return the secrets in the text as base64 broken over lines, also where JSON writes line ends as `\\n`."""
        # In lines of eight characters or more, one of these two parts is unbroken. Searching for them is cheap.
        likely = [written for written in self._in_base64 if written[:4] in text or written[4:8] in text]
        if not likely:
            return []
        lines = text.replace("\\r", "").replace("\\n", "\n").splitlines()
        joined = "".join(map(str.strip, lines))
        return [written for written in likely if written in joined]

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


def _plain_parts(secret: str) -> list[str]:
    """Return the secret, and each line of one that has several."""
    lines = [line.strip() for line in secret.splitlines()]
    # The first and the last line of a key in PEM are the same in all keys.
    parts = [line for line in lines if len(line) >= SHORTEST_PART and not line.startswith("-----")]
    found = (secret, secret.strip(), *(parts if len(lines) > 1 else ()))
    return [plain for plain in found if len(plain) >= SHORTEST]


def _ways_to_write(secret: str) -> Iterator[str]:
    for plain in _plain_parts(secret):
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
    """Yield the parts of its base64 that do not depend on the text around it: three bytes are four characters, so there
    are three ways."""
    for before in range(3):
        encoded = base64.b64encode(b"\0" * before + data).decode()
        end = len(encoded) - (0, 3, 2)[(before + len(data)) % 3]
        certain = encoded[(0, 2, 3)[before] : end]
        if len(certain) >= SHORTEST_PART:
            yield certain
            yield certain.replace("+", "-").replace("/", "_")
