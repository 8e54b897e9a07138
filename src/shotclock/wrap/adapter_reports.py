"""Reports of the adapter to the process that started it: requests without an answer, and the loss of its session.

They are lines between the messages of the server, which always begin with a brace.
"""

from __future__ import annotations

import json
from enum import StrEnum

from ..core.value_types import value

_MARK = b"\x1eshotclock "


class Fate(StrEnum):
    """The fate of a request that was not answered."""

    NOT_SENT = "was not sent"
    REFUSED = "was refused"
    LOST = "was lost"
    FAILED = "failed"


@value
class AdapterReport:
    """A request without an answer. Without an id: the session is lost, and the adapter ends."""

    id: object
    code: str
    fate: Fate
    why: str  # the end of a sentence that begins with the server
    line: str = ""  # a request that may be sent in the next session

    def to_line(self) -> bytes:
        fields = [self.id, self.code, self.fate, self.why, self.line]
        return _MARK + json.dumps(fields).encode() + b"\n"

    @classmethod
    def of_line(cls, line: bytes) -> AdapterReport | None:
        """Return the report of a line; None if it is a message."""
        if not line.startswith(_MARK):
            return None
        id, code, fate, why, text = json.loads(line[len(_MARK) :])
        return cls(id, code, Fate(fate), why, text)
