"""Whether anybody records traces, and who is told of what has ended. Nobody is, unless OpenTelemetry is set up.

This stands on the way of every call, so it imports nothing and asks one question; the rest is in `telemetry.py`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping

from ..core.records import value

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ..core.trace import TraceContext
    from .admission import Admission, Outcome

Attribute = str | int | bool


@value
class Span:
    """What ended, in the words of OpenTelemetry. Times are wall-clock nanoseconds."""

    name: str
    trace: TraceContext
    """Its own ids, which its children have been told long ago."""
    parent_id: str
    started_ns: int
    ended_ns: int
    attributes: Mapping[str, Attribute]
    code: str | None = None
    message: str = ""


class Listener:
    """Who is told. Never waits and never raises."""

    def call_ended(self, admission: Admission, outcome: Outcome, now_ns: int, wall_ns: int) -> None:
        """A call has been answered just now."""

    def tell(self, ended: Callable[[], Span]) -> None:
        """Anything else. The span is made where it is recorded, not on the path of whoever tells."""


recorder: Listener | None = None


def are_wanted() -> bool:
    """By the variables of OpenTelemetry, or because the program has set up a provider of its own."""
    if os.environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return False
    return has_own_provider() or _is_configured(os.environ)


def has_own_provider() -> bool:
    """Looks only at what the program has imported anyway."""
    sdk, api = sys.modules.get("opentelemetry.sdk.trace"), sys.modules.get("opentelemetry.trace")
    if sdk is None or api is None or not hasattr(sdk, "TracerProvider"):
        return False
    return isinstance(api.get_tracer_provider(), sdk.TracerProvider)


def _is_configured(environment: Mapping[str, str]) -> bool:
    exporters = environment.get("OTEL_TRACES_EXPORTER", "").replace(",", " ").split()
    if exporters:
        return "otlp" in exporters
    names = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
    return any(environment.get(name, "").strip() for name in names)
