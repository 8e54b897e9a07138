"""Text from outside, made harmless to look at."""

from __future__ import annotations

import re

# What moves the cursor, starts an escape sequence or turns the reading direction round, and lone surrogates. Joiners
# stay: languages and emoji need them.
_UNSEEN = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\ud800-\udfff]"
)


def visible(text: str) -> str:
    """Text from outside with everything in it to be seen: an escape is `\\x1b`, a turned direction `\\u202e`."""
    return _UNSEEN.sub(lambda found: found[0].encode("unicode_escape", "surrogatepass").decode("ascii"), text)


def one_line(text: str, limit: int = 300) -> str:
    flat = visible(" ".join(text.split()))
    return flat if len(flat) <= limit else flat[: limit - 1] + "…"


# What an exception says may be of any length, and whoever reads the answer has to read it.
LONGEST_MESSAGE = 4_000


def shortened(text: str, limit: int = LONGEST_MESSAGE) -> str:
    """Cut a text to its beginning, and say how much is left out."""
    return text if len(text) <= limit else f"{text[:limit]} … ({len(text) - limit} more characters)"
