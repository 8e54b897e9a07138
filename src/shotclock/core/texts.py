"""Text from outside, made harmless to look at: what cannot be seen or looks like something else is shown by its number.

One function for the terminal, the operators' page, reports and the text that an approval is bound to. It is exact: two
texts that differ are shown differently, because a mark itself cannot be forged (`<U+` in a text is marked as well).
"""

from __future__ import annotations

import re
from functools import lru_cache

# Controls but for line ends and tabs, the beginning of a mark, and everything that has to be looked at closer.
_SUSPECT = re.compile("[\x00-\x08\x0b-\x1f\x7f]|<(?=U\\+)|[^\x00-\x7f]")
# Alphabets with letters that look like Latin ones: Greek, Cyrillic, Armenian, Georgian, Cherokee, Coptic, Lisu, others.
_OTHER_LETTERS = re.compile(
    "[\u0370-\u058f\u10a0-\u10ff\u13a0-\u13ff\u1c80-\u1cbf\u1d26-\u1d2b\u1f00-\u1fff\u2c80-\u2cff\u2d00-\u2d2f"
    "\u2de0-\u2dff\ua4d0-\ua4ff\ua640-\ua69f\uab65\uab70-\uabbf\U00010280-\U0001044f\U000104b0-\U000104ff"
    "\U000118a0-\U000118ff]"
)
_WORD = re.compile(r"\w+")
_LATIN = re.compile("[A-Za-z\u00aa\u00ba\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u024f\u1e00-\u1eff]")
# Greek and Cyrillic letters that nobody tells from a Latin one: a word of nothing else looks like a Latin word.
_TWINS = frozenset(
    "\u0430\u0435\u043e\u0440\u0441\u0443\u0445\u0455\u0456\u0458\u04bb\u04cf\u0501\u051b\u051d"
    "\u0410\u0412\u0415\u041a\u041c\u041d\u041e\u0420\u0421\u0422\u0423\u0425\u0405\u0406\u0408\u04c0"
    "\u0391\u0392\u0395\u0396\u0397\u0399\u039a\u039c\u039d\u039f\u03a1\u03a4\u03a5\u03a7\u03bf\u03bd\u03b9\u03ba\u03c1\u03c5"
)
# Seen by nobody, although Unicode calls them letters, marks or symbols.
_UNSEEN = frozenset("\u034f\u115f\u1160\u17b4\u17b5\u2800\u3164\uffa0\U0001d159")
# Taken for - / : ; , . ! | ' ` by everybody, and for a letter (a, g, i).
_POSES = frozenset(
    "\u2010\u2011\u2012\u2043\u2212\u2215\u2044\u29f8\u2236\ua789\u0589\u05c3\u201a\u01c3\u01c0\u2223\u02b9\u02bc\u02c8\u02cb"
    "\u2035\u0251\u0261\u0269"
)
_JOINED_BEFORE, _JOINED_AFTER = re.compile(r"[A-Za-z0-9][!-/:-@\[-`{-~]"), re.compile(r"[!-/:-@\[-`{-~][A-Za-z0-9]")
# Accents and overlays that stand by themselves, after the letter that they are drawn on.
_COMBINING = ((0x300, 0x36F), (0x1AB0, 0x1AFF), (0x1DC0, 0x1DFF), (0x20D0, 0x20FF), (0xFE20, 0xFE2F))


def visible(text: str) -> str:
    """Return the text with everything in it to be seen: an escape is `<U+001B>`, a turned direction `<U+202E>`.

    Line ends and tabs stay. So do the letters of all languages, but for those that pose as Latin ones.
    """
    if not text.isascii() and _OTHER_LETTERS.search(text) is not None:
        pieces, at = [], 0
        for place in _posing_letters(text):
            pieces += [_SUSPECT.sub(_marked, text[at:place]), _mark(text[place])]
            at = place + 1
        return "".join([*pieces, _SUSPECT.sub(_marked, text[at:])])
    return _SUSPECT.sub(_marked, text)


def one_line(text: str, limit: int = 300) -> str:
    flat = visible(" ".join(text.split()))
    return flat if len(flat) <= limit else flat[: limit - 1] + "…"


def _marked(found: re.Match[str]) -> str:
    character = found[0]
    return _mark(character) if character < "\x80" or _is_odd(character) else character


def _mark(character: str) -> str:
    return f"<U+{ord(character):04X}>"


@lru_cache(maxsize=8192)
def _is_odd(character: str) -> bool:
    """Whether this one, which is not ASCII, cannot be seen, joins what stands before it, or poses as ASCII."""
    import unicodedata

    kind, number = unicodedata.category(character), ord(character)
    if kind[0] in "CZ" or kind == "Me" or character in _UNSEEN or character in _POSES:
        return True
    if kind == "Mn":
        # Variation selectors have no looks of their own; accents that stand by themselves look like a letter with one.
        is_selector = 0xFE00 <= number <= 0xFE0F or 0x180B <= number <= 0x180F
        return is_selector or any(low <= number <= high for low, high in _COMBINING) or number > 0xE0000
    words = unicodedata.decomposition(character).split()
    if words and words[0] in ("<font>", "<wide>", "<compat>"):
        meant = [chr(int(word, 16)) for word in words[1:]]
        return all(each < "\x80" for each in meant) and (len(meant) == 1 or all(map(str.isalpha, meant)))
    return len(words) == 1 and int(words[0], 16) < 0x80


def _posing_letters(text: str) -> list[int]:
    """Where letters of another alphabet stand among Latin ones, or are a whole word that looks Latin."""
    found: list[int] = []
    words = [word for word in _WORD.finditer(text) if _OTHER_LETTERS.search(word[0]) is not None]
    # Where somebody really writes in such a language there are letters that look like no other.
    is_written = any(not _looks_latin(word[0]) for word in words if _LATIN.search(word[0]) is None)
    for word in words:
        is_mixed = _LATIN.search(word[0]) is not None
        if is_mixed or (_looks_latin(word[0]) and (not is_written or _stands_among_latin(text, word))):
            found += [word.start() + at for at, letter in enumerate(word[0]) if _OTHER_LETTERS.match(letter)]
    return found


def _looks_latin(word: str) -> bool:
    return all(letter in _TWINS or letter < "\x80" for letter in word)


def _stands_among_latin(text: str, word: re.Match[str]) -> bool:
    """Whether what it is joined to, without a space between, is Latin: a host, a path, an address."""
    before, after = text[max(0, word.start() - 2) : word.start()], text[word.end() : word.end() + 2]
    return _JOINED_BEFORE.fullmatch(before) is not None or _JOINED_AFTER.fullmatch(after) is not None
