"""Place of a call in a trace: the ids of W3C Trace Context, passed to children even where nothing is recorded."""

from __future__ import annotations

import re
from collections.abc import Mapping, MutableMapping

from .value_types import value

TRACEPARENT_VARIABLE = "TRACEPARENT"
TRACESTATE_VARIABLE = "TRACESTATE"
# As headers, and as keys of an MCP request's `_meta`.
TRACEPARENT = "traceparent"
TRACESTATE = "tracestate"

# Longer ones may be cut on the way (W3C §3.3.1.5) and are left out.
LONGEST_STATE = 512
# Version, trace id, span id, flags, and further fields of later versions.
_PARENT = r"(?!ff)([0-9a-f]{2})-(?!0{32})([0-9a-f]{32})-(?!0{16})([0-9a-f]{16})-([0-9a-f]{2})(-.*)?"


@value
class TraceContext:
    trace_id: str
    span_id: str = ""  # empty where the trace begins here
    sampled: bool = True
    state: str = ""

    @staticmethod
    def parse(traceparent: object, tracestate: object = None) -> TraceContext | None:
        """Parse a traceparent; None where it is invalid. Later versions are read as far as the standard allows."""
        if not isinstance(traceparent, str):
            return None
        text = traceparent.strip(" \t")
        found = re.fullmatch(_PARENT, text) if len(text) <= LONGEST_STATE else None
        if found is None or (found[1] == "00" and found[5] is not None):
            return None
        return TraceContext(found[2], found[3], bool(int(found[4], 16) & 1), _state(tracestate))

    @staticmethod
    def carried_by(carrier: Mapping[str, object]) -> TraceContext | None:
        """Read the trace of headers or of `_meta`."""
        return TraceContext.parse(carrier.get(TRACEPARENT), carrier.get(TRACESTATE))

    @property
    def trace(self) -> TraceContext:
        """Return itself: it has the interface of a call."""
        return self

    @property
    def traceparent(self) -> str:
        return f"00-{self.trace_id}-{self.span_id}-{'01' if self.sampled else '00'}"

    def below(self, span_id: str) -> TraceContext:
        return TraceContext(self.trace_id, span_id, self.sampled, self.state)

    def as_headers(self) -> dict[str, str]:
        """Return the headers, in lower case as in `_meta`."""
        carried = {TRACEPARENT: self.traceparent}
        if self.state:
            carried[TRACESTATE] = self.state
        return carried

    def add_to(self, headers: MutableMapping[str, str]) -> None:
        """Add the headers, unless there is a trace already."""
        if TRACEPARENT not in map(str.lower, headers):
            headers.update(self.as_headers())

    def as_variables(self) -> dict[str, str]:
        return {name.upper(): value for name, value in self.as_headers().items()}


def span_id_of(request_id: str) -> str:
    """Return the span id of a call: the 48 random bits of the process and the call's number, as in its request id."""
    token, _, number = request_id.partition("-")
    if len(token) == 12 and 0 < len(number) <= 4:
        return token + number.rjust(4, "0")
    return f"{((int(token, 16) << 16) + int(number, 16)) % (1 << 64):016x}"


def trace_from_variables(environment: Mapping[str, str]) -> TraceContext | None:
    return TraceContext.parse(environment.get(TRACEPARENT_VARIABLE), environment.get(TRACESTATE_VARIABLE))


def _state(written: object) -> str:
    """Return the tracestate unchanged, or nothing where it is not valid in a header."""
    if not isinstance(written, str) or len(written) > LONGEST_STATE:
        return ""
    return written.strip() if all(" " <= char <= "~" or char == "\t" for char in written) else ""
