"""The recorder of spans, if OpenTelemetry is set up. Every call imports this module; the rest is in `telemetry.py`."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping

from ..core.trace import TraceContext
from ..core.value_types import value

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import ModuleType
    from typing import Any, Protocol

    class SpanRecorder(Protocol):
        """`calls.telemetry.Recorder`, as the modules below it see it."""

        def tell(self, ended: Callable[[], Span]) -> None: ...
        def call_ended(self, call: Any, outcome: Any, now_ns: int, wall_ns: int) -> None: ...
        def hand_over(self) -> None: ...
        def finish(self) -> str | None: ...


Attribute = str | int | bool


@value
class SpanEvent:
    """A moment in a span, in wall-clock nanoseconds."""

    name: str
    at_ns: int
    attributes: Mapping[str, Attribute]


@value
class Span:
    """An ended span, in the words of OpenTelemetry. Times are wall-clock nanoseconds."""

    name: str
    trace: TraceContext
    parent_id: str
    started_ns: int
    ended_ns: int
    attributes: Mapping[str, Attribute]
    code: str | None = None
    message: str = ""
    events: tuple[SpanEvent, ...] = ()
    is_of_server: bool = False
    """Whether it is of the kind SERVER, for a request of another process; otherwise it is INTERNAL."""


recorder: SpanRecorder | None = None


def are_wanted() -> bool:
    """Return whether the variables of OpenTelemetry or a provider of the program ask for spans."""
    if os.environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return False
    return has_own_provider() or _is_configured(os.environ)


def has_own_provider() -> bool:
    """Return whether the program has set up a provider. Imports nothing."""
    sdk, api = sys.modules.get("opentelemetry.sdk.trace"), sys.modules.get("opentelemetry.trace")
    if sdk is None or api is None or not hasattr(sdk, "TracerProvider"):
        return False
    return isinstance(api.get_tracer_provider(), sdk.TracerProvider)


def active() -> TraceContext | None:
    api = sys.modules.get("opentelemetry.trace")
    if api is None or not hasattr(api, "get_current_span"):
        return None
    try:
        found = api.get_current_span().get_span_context()
        if not found.is_valid:
            return None
        state = found.trace_state.to_header() if found.trace_state else ""
        return TraceContext(f"{found.trace_id:032x}", f"{found.span_id:016x}", bool(found.trace_flags.sampled), state)
    except Exception:  # a foreign kind of span; a call must not fail for it
        return None


def stand_at(trace: TraceContext) -> None:
    """Make this the parent of the program's own spans in this context."""
    api, contexts = sys.modules.get("opentelemetry.trace"), sys.modules.get("opentelemetry.context")
    if api is None or contexts is None or not hasattr(contexts, "attach") or not hasattr(api, "NonRecordingSpan"):
        return
    try:
        contexts.attach(api.set_span_in_context(api.NonRecordingSpan(span_context(api, trace))))
    except Exception:  # as above
        pass


def span_context(api: ModuleType, trace: TraceContext) -> Any:
    state = api.TraceState.from_header([trace.state]) if trace.state else None
    flags = api.TraceFlags(int(trace.sampled))
    return api.SpanContext(int(trace.trace_id, 16), int(trace.span_id, 16), True, flags, state)


def _is_configured(environment: Mapping[str, str]) -> bool:
    exporters = environment.get("OTEL_TRACES_EXPORTER", "").replace(",", " ").split()
    if exporters:
        return "otlp" in exporters
    names = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
    return any(environment.get(name, "").strip() for name in names)
