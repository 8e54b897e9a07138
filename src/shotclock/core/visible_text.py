"""Text from outside with every character visible, the exact text of an action, and the removal of secrets.

Invisible characters, and those that look like others, are shown by their number. One function serves the terminal, the
operators' page, reports and the text of an action. It is exact: different texts are shown differently, because a mark
cannot be forged (`<U+` in a text is marked as well).

The text of an action is the one form that people are shown and that approvals are bound to:

    run: "shop/pay"
    with:
      amount: 9007199254740993
      note: |
        | first line
        | second line
    where:
      directory: "/srv/shop"

Two actions with one text are one action: numbers are written in full, text is in quotes, and no value can look like
another or end before its end. Reasons, titles and an agent's claims about a file are not part of it.

Secrets are removed by the name of a variable, by their value, and by their place in a URL.

Contract (AGENTS.md): one exact text.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from typing import Any
from urllib.parse import quote, quote_plus

# Controls except line ends and tabs, the beginning of a mark, and all other characters that need a closer look.
_SUSPECT = re.compile("[\x00-\x08\x0b-\x1f\x7f]|<(?=U\\+)|[^\x00-\x7f]")
# Alphabets with letters that look like Latin ones or like digits.
_ALPHABETS = {
    "Greek": "\u0370-\u03ff\u1d26-\u1d2a\u1f00-\u1fff\uab65",
    "Cyrillic": "\u0400-\u052f\u1c80-\u1c8f\u1d2b\u2de0-\u2dff\ua640-\ua69f",
    "Armenian": "\u0530-\u058f",
    "Hebrew": "\u05d0-\u05ea",
    "Georgian": "\u10a0-\u10ff\u1c90-\u1cbf\u2d00-\u2d2f",
    "Ethiopic": "\u1200-\u137f",
    "Cherokee": "\u13a0-\u13ff\uab70-\uabbf",
    "Canadian": "\u1400-\u167f",
    "Runic": "\u1680-\u16ff",
    "Coptic": "\u2c80-\u2cff",
    "Tifinagh": "\u2d30-\u2d7f",
    "Lisu": "\ua4d0-\ua4ff",
    "Vai": "\ua500-\ua63f",
    "ancient": "\U00010280-\U0001044f\U000104b0-\U0001056f\U000118a0-\U000118ff\U00016f00-\U00016f9f",
    # Of scripts without blanks, or joined to Latin words, only the letters that look like an o or an l.
    "Arabic": "\u0627\u0647\u06be\u06c1\u06d5",
    "Indic": "\u0b20\u0c02\u0c82\u0d02\u0d20\u0d82\u101d",
}
_OTHER_LETTERS = re.compile(f"[{''.join(_ALPHABETS.values())}]")
_WORD = re.compile(r"\w+")
_LATIN = re.compile("[A-Za-z\u00aa\u00ba\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u024f\u1e00-\u1eff]")
# Letters that look like a Latin one or a digit: a word of only these looks like a Latin word.
_TWINS = frozenset(
    # Cyrillic
    "\u0430\u0435\u043e\u0440\u0441\u0443\u0445\u0455\u0456\u0458\u04bb\u04cf\u0501\u051b\u051d\u0475\u04af"
    "\u0410\u0412\u0415\u041a\u041c\u041d\u041e\u0420\u0421\u0422\u0423\u0425\u0405\u0406\u0408\u04c0\u0474\u04ae\u051a"
    "\u051c\ua644\ua647"
    # Greek
    "\u0391\u0392\u0395\u0396\u0397\u0399\u039a\u039c\u039d\u039f\u03a1\u03a4\u03a5\u03a7\u03bf\u03bd\u03b9\u03ba\u03c1\u03c5"
    "\u03f2\u03f3\u03f9\u037f\u03dc\u1d26"
    # Armenian
    "\u0585\u0570\u0578\u057d\u0566\u0581\u0575\u056c\u0561\u0563\u0584\u057c\u0582\u0580\u053c\u054f\u054d\u0555"
    # Hebrew, Arabic, Indic
    "\u05d5\u05d8\u05df\u05e1\u0627\u0647\u06be\u06c1\u06d5\u0b20\u0c02\u0c82\u0d02\u0d20\u0d82\u101d"
    # Georgian, Ethiopic, Runic, Tifinagh, Coptic
    "\u10e7\u10fd\u1200\u1205\u12d0\u16b7\u16c1\u16d5\u16d6\u16b1\u16d2\u2d39\u2d4f\u2d54\u2d55\u2d5d\u2d59\u2d51"
    "\u2c82\u2c83\u2c84\u2c88\u2c8e\u2c8f\u2c92\u2c94\u2c98\u2c9a\u2c9e\u2c9f\u2ca2\u2ca3\u2ca4\u2ca5\u2ca6\u2ca8\u2cac\u2cad\u2cca\u2c93"
    # Cherokee, large and small
    "\u13a0\u13a1\u13a2\u13a5\u13a6\u13a9\u13aa\u13ab\u13ac\u13b3\u13b7\u13bb\u13bd\u13be\u13c0\u13c2\u13c3"
    "\u13cc\u13ce\u13cf\u13d2\u13d4\u13d5\u13d9\u13da\u13de\u13df\u13e2\u13e6\u13e7\u13ee\u13f3\u13f4"
    "\uab70\uab71\uab72\uab75\uab76\uab79\uab7a\uab7b\uab7c\uab83\uab87\uab8b\uab8d\uab8e\uab90\uab92\uab93"
    "\uab9c\uab9e\uab9f\uaba2\uaba4\uaba5\uaba9\uabaa\uabae\uabaf\uabb2\uabb6\uabb7\uabbe\u13fb\u13fc"
    # Canadian syllables
    "\u144c\u146d\u146f\u1472\u148d\u14aa\u142f\u1431\u1433\u1455\u1541\u1587\u157c\u15b4\u15c5\u15de\u15ea\u15f0\u15f7\u166d\u166e"
)
# Alphabets made of Latin letters, upright and turned: all of their words look Latin.
_MADE_OF_LATIN = ("Lisu", "ancient")
# Invisible, although Unicode calls them letters, marks or symbols.
_UNSEEN = frozenset("\u034f\u115f\u1160\u17b4\u17b5\u2800\u3164\uffa0\U0001d159")
# They look like - / : ; , . ! | ' ` or like a letter (a, g, i, c, o, v, w, z, s, u).
_POSES = frozenset(
    "\u2010\u2011\u2012\u2043\u2212\u2215\u2044\u29f8\u2236\ua789\u0589\u05c3\u201a\u01c3\u01c0\u2223\u02b9\u02bc\u02c8\u02cb"
    "\u2035\u0251\u0261\u0269\u1d04\u1d0f\u1d20\u1d21\u1d22\ua731\u1d1c\ua78c"
)
_JOINED_BEFORE, _JOINED_AFTER = re.compile(r"[A-Za-z0-9][!-/:-@\[-`{-~]"), re.compile(r"[!-/:-@\[-`{-~][A-Za-z0-9]")
# Accents and overlays that are characters of their own, after the letter that they are drawn on.
_COMBINING = ((0x300, 0x36F), (0x1AB0, 0x1AFF), (0x1DC0, 0x1DFF), (0x20D0, 0x20FF), (0xFE20, 0xFE2F))

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


def visible(text: str) -> str:
    """Return the text with every character visible: an escape is `<U+001B>`, a change of direction `<U+202E>`.

    Line ends, tabs and the letters of all languages stay, except for letters that pose as Latin ones. Each line is
    marked by itself, so that it looks the same alone, in a file and in a difference.
    """
    if not text.isascii() and _OTHER_LETTERS.search(text) is not None:
        return "\n".join(map(_visible_line, text.split("\n")))
    return _SUSPECT.sub(_mark_if_odd, text)


def _visible_line(line: str) -> str:
    pieces, at = [], 0
    for place in _posing_letters(line):
        pieces += [_SUSPECT.sub(_mark_if_odd, line[at:place]), _mark(line[place])]
        at = place + 1
    return "".join([*pieces, _SUSPECT.sub(_mark_if_odd, line[at:])])


def one_line(text: str, limit: int = 300) -> str:
    flat = visible(" ".join(text.split()))
    return flat if len(flat) <= limit else flat[: limit - 1] + "…"


def _mark_if_odd(found: re.Match[str]) -> str:
    character = found[0]
    return _mark(character) if character < "\x80" or _is_odd(character) else character


def _mark(character: str) -> str:
    return f"<U+{ord(character):04X}>"


@lru_cache(maxsize=8192)
def _is_odd(character: str) -> bool:
    """Return whether a character beyond ASCII is invisible, joins the one before it, or poses as ASCII."""
    import unicodedata

    kind, number = unicodedata.category(character), ord(character)
    # Digits of other scripts are read as numbers by programs, and some as another number by people.
    if kind[0] in "CZ" or kind in ("Me", "Nd") or character in _UNSEEN or character in _POSES:
        return True
    if kind == "Mn":
        # Variation selectors are invisible; a letter with a separate accent looks like a letter with one.
        is_selector = 0xFE00 <= number <= 0xFE0F or 0x180B <= number <= 0x180F
        return is_selector or any(low <= number <= high for low, high in _COMBINING) or number > 0xE0000
    words = unicodedata.decomposition(character).split()
    if words and words[0] in ("<font>", "<wide>", "<compat>"):
        meant = [chr(int(word, 16)) for word in words[1:]]
        return all(each < "\x80" for each in meant) and (len(meant) == 1 or all(map(str.isalpha, meant)))
    return len(words) == 1 and int(words[0], 16) < 0x80


def _posing_letters(line: str) -> list[int]:
    """Return the places of letters that are mixed with those of another alphabet, or in a word that looks Latin."""
    found: list[int] = []
    words = []
    for word in _WORD.finditer(line):
        if _OTHER_LETTERS.search(word[0]):
            names = {str(found.lastgroup) for found in _which().finditer(word[0])}
            words.append((word, names | {"Latin"} if _LATIN.search(word[0]) else names))
    # A real text in such a language has letters that look like no Latin ones.
    written = {name for word, names in words if len(names) == 1 and not _looks_latin(word[0]) for name in names}
    for word, names in words:
        poses = _looks_latin(word[0]) and (not names <= written or _stands_among_latin(line, word))
        if len(names) > 1 or poses:
            found += [word.start() + at for at, letter in enumerate(word[0]) if _OTHER_LETTERS.match(letter)]
    return found


@lru_cache(maxsize=1)
def _which() -> re.Pattern[str]:
    """Compile the pattern when it is first needed, which is rare."""
    return re.compile("|".join(f"(?P<{name}>[{letters}])" for name, letters in _ALPHABETS.items()))


def _looks_latin(word: str) -> bool:
    found = (letter in _TWINS or letter < "\x80" or _which().match(letter) for letter in word)
    return all(each is True or (each and each.lastgroup in _MADE_OF_LATIN) for each in found)


def _stands_among_latin(text: str, word: re.Match[str]) -> bool:
    """Return whether a word is joined to a Latin one without a space, as in a host, a path or an address."""
    before, after = text[max(0, word.start() - 2) : word.start()], text[word.end() : word.end() + 2]
    return _JOINED_BEFORE.fullmatch(before) is not None or _JOINED_AFTER.fullmatch(after) is not None


_ESCAPES = str.maketrans({"\\": "\\\\", '"': '\\"', "\n": "\\n", "\t": "\\t"})
_PLAIN_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]*", re.ASCII)


def text_of(value: Mapping[str, Any]) -> str:
    """Return the exact text of named values: different values have different texts.

    Names keep their order, because the receiver of a value sees that order.
    """
    return "\n".join(_lines(value, ""))


def _lines(value: Mapping[str, Any] | list[Any] | tuple[Any, ...], indent: str) -> Iterator[str]:
    if isinstance(value, Mapping):
        entries = [(f"{_name(name)}:", each) for name, each in value.items()]
    else:
        entries = [("-", each) for each in value]
    for head, each in entries:
        if isinstance(each, Mapping | list | tuple) and each:
            yield f"{indent}{head}"
            yield from _lines(each, f"{indent}  ")
        elif isinstance(each, str) and "\n" in each:
            yield f"{indent}{head} |"
            for line in each.split("\n"):
                yield f"{indent}  | {_line(line)}"
        else:
            yield f"{indent}{head} {_scalar(each)}"


def _name(name: object) -> str:
    if not isinstance(name, str):
        raise TypeError(f"{name!r} is no name")
    return name if _PLAIN_NAME.fullmatch(name) else _quote(name)


def _scalar(value: object) -> str:
    if isinstance(value, str):
        return _quote(value)
    if value is None or isinstance(value, int | float):
        return json.dumps(value, allow_nan=False)
    if isinstance(value, Mapping):
        return "{}"
    if isinstance(value, list | tuple):
        return "[]"
    raise TypeError(f"a {type(value).__name__} is not JSON")


def _quote(text: str) -> str:
    return visible(f'"{text.translate(_ESCAPES)}"')


def _line(line: str) -> str:
    """Return one line of several, with a blank at its end made visible."""
    return f"{visible(line[:-1])}<U+{ord(line[-1]):04X}>" if line.endswith((" ", "\t")) else visible(line)


def looks_secret(variable: str) -> bool:
    """Return whether the name of a variable indicates a secret value."""
    return _SECRET_VARIABLE.search(variable) is not None and not _SETTING.fullmatch(variable)


def is_secret_header(name: str) -> bool:
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
        self.learn_values(value for name, value in variables.items() if looks_secret(name))

    def learn_values(self, values: Iterable[str]) -> None:
        """Add secret values, except for those too short to be recognised."""
        new = {value for value in values if len(value) >= SHORTEST}
        if new <= self._secrets:
            return
        self._secrets |= new
        written = {each for value in self._secrets for each in _ways_to_write(value)}
        self._ways = sorted(written, key=len, reverse=True)
        plain = {each for value in self._secrets for each in _plain_parts(value)}
        self._in_base64 = [each for part in plain for each in _in_base64(part.encode("utf-8", "surrogateescape"))]

    def holds(self, text: str) -> bool:
        return any(written in text for written in self._ways) or bool(self._broken_in(text))

    def text(self, text: str) -> str:
        text = _hide_longest_first(text, self._ways)
        for written in self._broken_in(text):
            text = re.sub(_BREAK.join(map(re.escape, written)), HIDDEN, text)
        return text

    def find_unfinished(self, text: str) -> int:
        """Return where a secret may begin that the text does not yet hold whole: its length if there is none."""
        ends = (len(text) - size for way in self._ways for size in range(1, len(way)) if text.endswith(way[:size]))
        cut = min(ends, default=len(text))
        while True:  # a whole secret across the cut would be halved
            starts = (
                start
                for way in self._ways
                for start in range(max(0, cut - len(way) + 1), cut)
                if text.startswith(way, start)
            )
            if (first := min(starts, default=cut)) == cut:
                return cut
            cut = first

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
