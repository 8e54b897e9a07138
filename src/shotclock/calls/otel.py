"""Spans written with the SDK of OpenTelemetry. Only the threads that record spans import this."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence

from opentelemetry import trace as api
from opentelemetry.context import Context
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, Tracer, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
from opentelemetry.sdk.trace.sampling import DEFAULT_ON

from .._version import __version__
from ..core.trace import TraceContext
from ..supervise.spans import Span, span_context

# Its messages about an unreachable collector become our note; the caller may read stderr as data.
logging.getLogger("opentelemetry").addHandler(logging.NullHandler())


# How long each last request may take, while the process waits to end. Shorter than the SDK's first pause between two
# attempts (0.8 s), so a refusing collector gets one request.
LAST_EXPORT_S = 0.7


class Writer:
    def __init__(self, on_failure: Callable[[str], None], *, most: int, has_thread: bool = True) -> None:
        """Without a thread of its own, spans are sent by `send`."""
        provider = api.get_tracer_provider()
        self._own: TracerProvider | None = None
        self._exporter: _Exporter | None = None
        if not isinstance(provider, TracerProvider):
            self._exporter = _Exporter(on_failure)
            provider = self._own = _make_provider(self._exporter, most, has_thread)
        tracer = provider.get_tracer("shotclock", __version__)
        assert isinstance(tracer, Tracer)
        self._tracer, self._ids = tracer, _Ids()
        tracer.id_generator = self._ids

    def flush(self) -> None:
        self.hurry()
        self.send()

    def hurry(self) -> None:
        """Give every further request LAST_EXPORT_S, and stop one that is being retried. May be called by any thread."""
        if self._exporter is not None:
            self._exporter.hurry()

    def send(self) -> None:
        """Send the written spans now."""
        if self._own is not None:
            self._own.force_flush()

    def write(self, ended: Span) -> None:
        self._ids.following = ended.trace
        context = Context()
        if ended.parent_id:
            parent = api.NonRecordingSpan(span_context(api, ended.trace.below(ended.parent_id)))
            context = api.set_span_in_context(parent, context)
        span = self._tracer.start_span(
            ended.name,
            context,
            api.SpanKind.SERVER if ended.is_of_server else api.SpanKind.INTERNAL,
            attributes=dict(ended.attributes),
            start_time=ended.started_ns,
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
    """Generator of the ids that the span's children have already."""

    following: TraceContext

    def generate_trace_id(self) -> int:
        return int(self.following.trace_id, 16)

    def generate_span_id(self) -> int:
        return int(self.following.span_id, 16)


class _Gatherer(SpanProcessor):
    """Processor that keeps ended spans until they are sent, in the thread that asks for it."""

    def __init__(self, exporter: SpanExporter) -> None:
        self._exporter = exporter
        self._ended: list[ReadableSpan] = []

    def on_end(self, span: ReadableSpan) -> None:
        if span.context is not None and span.context.trace_flags.sampled:
            self._ended.append(span)

    def force_flush(self, timeout_millis: int = 0) -> bool:
        ended, self._ended = self._ended, []
        return not ended or self._exporter.export(ended) is SpanExportResult.SUCCESS


def _make_provider(exporter: _Exporter, most: int, has_thread: bool) -> TracerProvider:
    """Make a provider that is not set as the program's, so it receives only our spans."""
    named = "OTEL_SERVICE_NAME" in os.environ or "service.name=" in os.environ.get("OTEL_RESOURCE_ATTRIBUTES", "")
    resource = Resource.create({} if named else {"service.name": "shotclock", "service.version": __version__})
    # The caller's decision, or yes: our children have it already, so a later sampler could not change it.
    provider = TracerProvider(sampler=DEFAULT_ON, resource=resource, shutdown_on_exit=False)
    if not has_thread:
        provider.add_span_processor(_Gatherer(exporter))
        return provider
    # The SDK's default is 2,048, fewer than the spans of a thousand steps.
    size = None if "OTEL_BSP_MAX_QUEUE_SIZE" in os.environ else most
    provider.add_span_processor(BatchSpanProcessor(exporter, max_queue_size=size))
    return provider


class _Exporter(SpanExporter):
    """Exporter over OTLP and HTTP that notes when the collector does not accept spans."""

    def __init__(self, on_failure: Callable[[str], None]) -> None:
        # A program with its own provider may not have it installed.
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

        self._make = OTLPSpanExporter
        self._exporter = OTLPSpanExporter()
        self._on_failure = on_failure

    def hurry(self) -> None:
        """Stop retrying, and drop the spans that wait for a retry."""
        tried, self._exporter = self._exporter, self._make(timeout=LAST_EXPORT_S)
        tried.shutdown()  # type: ignore[no-untyped-call]

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        result = self._exporter.export(spans)
        if result is not SpanExportResult.SUCCESS:
            self._on_failure("the collector cannot be reached, or did not accept them")
        return result

    def shutdown(self) -> None:
        self._exporter.shutdown()  # type: ignore[no-untyped-call]
