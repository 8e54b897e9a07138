"""What is secret, and how it is kept out of what is shown or written down: by the name that it has, by its value, and
by where it stands in an address. All of it is here, for every provider and for the record of a run."""

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
    """Return whether the name of a variable says that its value is secret."""
    return _SECRET_VARIABLE.search(variable) is not None and not _SETTING.fullmatch(variable)


def is_secret_header(name: str) -> bool:
    """Return whether the name of an HTTP header says that its value is secret."""
    return _SECRET_HEADER.search(name) is not None


def hide_values(text: str, secrets: Iterable[str], shortest: int = SHORTEST) -> str:
    """Return the text without these values, as far as they are long enough to be known for what they are."""
    return _hide_longest_first(text, sorted({each for each in secrets if len(each) >= shortest}, key=len, reverse=True))


def hide_credentials(text: str, *, names_too: bool = True) -> str:
    """Return the text without what stands before the host in its addresses: in http a name alone can be the secret, in
    ssh (`names_too=False`) it is who to be."""
    return (_USER_IN_URL if names_too else _PASSWORD_IN_URL).sub(f"{HIDDEN}@", text)


def _hide_longest_first(text: str, secrets: Iterable[str]) -> str:
    # One after the other is twenty times as fast as a regular expression of them all.
    for secret in secrets:
        if secret in text:
            text = text.replace(secret, HIDDEN)
    return text


class Redaction:
    """Takes secret values out of whatever is about to be written down, also as base64 (in one line or in several), in
    hex, or escaped for JSON or a URL, and each line of one that has several."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._known: set[str] = set()
        self._ways: list[str] = []
        self._in_base64: list[str] = []
        self.learn(environment)

    def learn(self, variables: Mapping[str, str]) -> None:
        """Add the values of the variables whose names look secret to what is hidden."""
        new = {value for name, value in variables.items() if looks_secret(name) and len(value) >= SHORTEST}
        if new <= self._known:
            return
        self._known |= new
        written = {each for value in self._known for each in _ways_to_write(value)}
        self._ways = sorted(written, key=len, reverse=True)
        plain = {each for value in self._known for each in _plain_parts(value)}
        self._in_base64 = [each for part in plain for each in _in_base64(part.encode("utf-8", "surrogateescape"))]

    def holds(self, text: str) -> bool:
        """Return whether a secret is in the text, written in any of these ways."""
        return any(written in text for written in self._ways) or bool(self._broken_in(text))

    def text(self, text: str) -> str:
        text = _hide_longest_first(text, self._ways)
        for written in self._broken_in(text):
            text = re.sub(_BREAK.join(map(re.escape, written)), HIDDEN, text)
        return text

    def _broken_in(self, text: str) -> list[str]:
        """Return what is in the text as base64 that is broken over lines, also where JSON writes these as `\\n`."""
        # In lines of eight characters or more, one of these two parts is whole. Looking for them is cheap.
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
    # The first and the last line of a key in PEM are everybody's.
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
    """Yield the parts of its base64 that are the same whatever stands around it: three bytes are four characters, so
    there are three ways."""
    for before in range(3):
        encoded = base64.b64encode(b"\0" * before + data).decode()
        end = len(encoded) - (0, 3, 2)[(before + len(data)) % 3]
        certain = encoded[(0, 2, 3)[before] : end]
        if len(certain) >= SHORTEST_PART:
            yield certain
            yield certain.replace("+", "-").replace("/", "_")
