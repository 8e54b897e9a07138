"""Spans written with OpenTelemetry's SDK: to the provider of the program, or to one of our own.

Only imported where spans are recorded (`telemetry.py`), and only by the thread that records them.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence

from opentelemetry import trace as api
from opentelemetry.context import Context
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, Tracer, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
from opentelemetry.sdk.trace.sampling import DEFAULT_ON

from .._version import __version__
from ..core.trace import TraceContext
from ..process.spans import Span, span_context

# What it says about a collector that is away is our note; stderr may be somebody's data.
logging.getLogger("opentelemetry").addHandler(logging.NullHandler())


# For each request of the last batches, while a process waits to end. Shorter than the SDK's first pause between two
# tries (0.8 s), so a collector that refuses is asked once.
LAST_EXPORT_S = 0.7


class Writer:
    """Writer of spans. `most` is how many of them may wait for the collector."""

    def __init__(self, on_failure: Callable[[str], None], *, most: int) -> None:
        provider = api.get_tracer_provider()
        self._own: TracerProvider | None = None
        self._exporter: _Exporter | None = None
        if not isinstance(provider, TracerProvider):
            self._exporter = _Exporter(on_failure)
            provider = self._own = _make_provider(self._exporter, most)
        tracer = provider.get_tracer("shotclock", __version__)
        assert isinstance(tracer, Tracer)
        self._tracer, self._ids = tracer, _Ids()
        tracer.id_generator = self._ids

    def flush(self) -> None:
        """Write the last of it. A provider of the program's own is the program's to flush."""
        if self._own is not None and self._exporter is not None:
            self._exporter.hurry()
            self._own.force_flush()

    def write(self, ended: Span) -> None:
        self._ids.following = ended.trace
        context = Context()
        if ended.parent_id:
            parent = api.NonRecordingSpan(span_context(api, ended.trace.below(ended.parent_id)))
            context = api.set_span_in_context(parent, context)
        span = self._tracer.start_span(
            ended.name, context, attributes=dict(ended.attributes), start_time=ended.started_ns
        )
        for event in ended.events:
            span.add_event(event.name, dict(event.attributes), event.at_ns)
        if ended.code is None:
            span.set_status(api.StatusCode.OK)
        else:
            span.set_attribute("error.type", ended.code)
            span.set_status(api.StatusCode.ERROR, ended.message or ended.code)
        span.end(ended.ended_ns)


class _Ids(RandomIdGenerator):
    """Ids of the span that is written next: its children have had them for long."""

    following: TraceContext

    def generate_trace_id(self) -> int:
        return int(self.following.trace_id, 16)

    def generate_span_id(self) -> int:
        return int(self.following.span_id, 16)


def _make_provider(exporter: _Exporter, most: int) -> TracerProvider:
    """Make a provider as the variables of OpenTelemetry say. It is not made the program's: nobody else's spans get into
    it."""
    named = "OTEL_SERVICE_NAME" in os.environ or "service.name=" in os.environ.get("OTEL_RESOURCE_ATTRIBUTES", "")
    resource = Resource.create({} if named else {"service.name": "shotclock", "service.version": __version__})
    # The caller's word, or yes: what we have told our children cannot be taken back by a sampler that is asked later.
    provider = TracerProvider(sampler=DEFAULT_ON, resource=resource, shutdown_on_exit=False)
    # The SDK's default is 2,048, less than what a thousand steps end with in a moment.
    size = None if "OTEL_BSP_MAX_QUEUE_SIZE" in os.environ else most
    provider.add_span_processor(BatchSpanProcessor(exporter, max_queue_size=size))
    return provider


class _Exporter(SpanExporter):
    """Export by OTLP over HTTP, with a note when the collector does not take it."""

    def __init__(self, on_failure: Callable[[str], None]) -> None:
        # Here: a program with a provider of its own need not have it.
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

        self._make = OTLPSpanExporter
        self._exporter = OTLPSpanExporter()
        self._on_failure = on_failure

    def hurry(self) -> None:
        """Try nothing twice from here on, and give up what waits to be tried again."""
        tried, self._exporter = self._exporter, self._make(timeout=LAST_EXPORT_S)
        tried.shutdown()  # type: ignore[no-untyped-call]

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        result = self._exporter.export(spans)
        if result is not SpanExportResult.SUCCESS:
            self._on_failure("the collector cannot be reached, or did not take them")
        return result

    def shutdown(self) -> None:
        self._exporter.shutdown()  # type: ignore[no-untyped-call]
