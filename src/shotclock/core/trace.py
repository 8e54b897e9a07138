"""Place of a call in a trace: the ids of W3C Trace Context, passed to children even where nothing is recorded."""

from __future__ import annotations

from collections.abc import Mapping

from .value_types import value

TRACEPARENT_VARIABLE = "TRACEPARENT"
TRACESTATE_VARIABLE = "TRACESTATE"
# As headers, and as keys of an MCP request's `_meta`.
TRACEPARENT = "traceparent"
TRACESTATE = "tracestate"

# Longer ones may be cut on the way (W3C §3.3.1.5) and are left out.
LONGEST_STATE = 512
_HEX = frozenset("0123456789abcdef")


@value
class TraceContext:
    trace_id: str
    span_id: str = ""  # empty where the trace begins here
    sampled: bool = True
    state: str = ""

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

    def as_variables(self) -> dict[str, str]:
        return {name.upper(): value for name, value in self.as_headers().items()}


def parse_trace(traceparent: object, tracestate: object = None) -> TraceContext | None:
    """Parse a traceparent; None where it is invalid. Later versions are read as far as possible, by the standard."""
    if not isinstance(traceparent, str):
        return None
    text = traceparent.strip(" \t")
    fields = text.split("-")
    if len(fields) < 4 or len(text) > LONGEST_STATE:
        return None
    version, trace_id, span_id, flags = fields[:4]
    is_well_formed = (
        _is_hex(version, 2)
        and version != "ff"
        and (version != "00" or len(fields) == 4)
        and _is_hex(trace_id, 32)
        and _is_hex(span_id, 16)
        and _is_hex(flags, 2)
    )
    if not is_well_formed or not trace_id.strip("0") or not span_id.strip("0"):
        return None
    return TraceContext(trace_id, span_id, bool(int(flags, 16) & 1), _state(tracestate))


def span_id_of(request_id: str) -> str:
    """Return the span id of a call: the 48 random bits of the process and the call's number, as in its request id."""
    token, _, number = request_id.partition("-")
    if len(token) == 12 and 0 < len(number) <= 4:
        return token + number.rjust(4, "0")
    return f"{((int(token, 16) << 16) + int(number, 16)) % (1 << 64):016x}"


def trace_from_variables(environment: Mapping[str, str]) -> TraceContext | None:
    return parse_trace(environment.get(TRACEPARENT_VARIABLE), environment.get(TRACESTATE_VARIABLE))


def _is_hex(text: str, length: int) -> bool:
    return len(text) == length and _HEX.issuperset(text)


def _state(written: object) -> str:
    """Return the tracestate unchanged, or nothing where it is not valid in a header."""
    if not isinstance(written, str) or len(written) > LONGEST_STATE:
        return ""
    return written.strip() if all(" " <= char <= "~" or char == "\t" for char in written) else ""
