"""Spans for OpenTelemetry, recorded by a thread so that they never delay or break a call."""

from __future__ import annotations

import atexit
import importlib.util
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from queue import SimpleQueue
from typing import TYPE_CHECKING

from ..core.errors import side_effects_of
from ..core.limits import NS_PER_MS, ClockKind
from ..core.value_types import as_dict
from ..supervise import spans
from ..supervise.spans import Attribute, Span, SpanEvent
from .call import Call, Outcome

if TYPE_CHECKING:
    from .otel import Writer

BACKLOG = 10_000  # only a provider that hangs exhausts this; further spans are dropped
# Importing the exporter and one request take a tenth of it; an unreachable collector exhausts it. Exit hooks have 3 s.
FLUSH_LIMIT_S = 2.0
HANDOVER_LIMIT_S = 1.0  # how long a closing runtime waits until the program's own provider has all its spans


def begin_if_wanted() -> None:
    if spans.recorder is None and spans.are_wanted() and is_installed():
        spans.recorder = Recorder()


def finish() -> str | None:
    """Send the remaining spans within FLUSH_LIMIT_S. Return the problem, if any."""
    return None if spans.recorder is None else spans.recorder.finish()


def is_installed() -> bool:
    """Return whether spans can be recorded."""
    try:
        return spans.has_own_provider() or all(
            importlib.util.find_spec(name) is not None
            for name in ("opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.http")
        )
    except ImportError:
        return False


class Recorder:
    """Recorder of one process, that never raises. Its thread starts with the first span, so earlier forks have none."""

    def __init__(self) -> None:
        self._ended: SimpleQueue[Callable[[], Span] | threading.Event | None] = SimpleQueue()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._left_out = 0
        self._trouble = ""
        atexit.register(self.finish)
        os.register_at_fork(after_in_child=_forget)

    def tell(self, ended: Callable[[], Span]) -> None:
        if self._ended.qsize() >= BACKLOG:
            self._left_out += 1
            return
        self._ended.put(ended)
        if self._thread is None:
            self._start()

    def call_ended(self, call: Call, outcome: Outcome, now_ns: int, wall_ns: int) -> None:
        # Only small facts: the queue may be long, and output large.
        data = outcome.data if isinstance(outcome.data, dict) else {}
        small = Outcome(outcome.ending, outcome.problem, side_effects=outcome.side_effects)
        self.tell(partial(_call_span, call, small, _facts(data), now_ns, wall_ns))

    def hand_over(self) -> None:
        if self._thread is not None:
            handed_over = threading.Event()
            self._ended.put(handed_over)
            handed_over.wait(HANDOVER_LIMIT_S)

    def finish(self) -> str | None:
        if self._thread is not None:
            self._ended.put(None)
            self._thread.join(FLUSH_LIMIT_S)
            if self._thread.is_alive():
                self._record_trouble(f"the collector has not answered within {FLUSH_LIMIT_S:g} s")
        if self._left_out:
            self._record_trouble(f"{self._left_out} came faster than they could be recorded")
        return f"spans are missing: {self._trouble}" if self._trouble else None

    def _start(self) -> None:
        with self._lock:
            if self._thread is None:
                thread = threading.Thread(target=self._record, name="shotclock-spans", daemon=True)
                self._trouble = ""
                try:
                    thread.start()
                    self._thread = thread
                except RuntimeError as error:  # no more threads, or the interpreter is leaving
                    self._trouble = str(error)

    def _record(self) -> None:
        writer: Writer | None = None
        try:
            from .otel import Writer

            writer = Writer(self._record_trouble, most=BACKLOG)
        except Exception as error:
            self._trouble = f"{type(error).__name__}: {error}"
        while (ended := self._ended.get()) is not None:  # without a bound: it ends with the process
            if isinstance(ended, threading.Event):
                ended.set()
            elif writer is not None:
                try:
                    writer.write(ended())
                except Exception as error:
                    self._trouble = f"{type(error).__name__}: {error}"
        if writer is not None:
            writer.flush()

    def _record_trouble(self, why: str) -> None:
        self._trouble = self._trouble or why


def _forget() -> None:
    """Drop the recorder in a forked process, which has no thread."""
    spans.recorder = None


def _facts(data: Mapping[str, object]) -> dict[str, Attribute]:
    names = {"exit_code": "process.exit.code", "run_id": "shotclock.run.id", "job_id": "shotclock.job.id"}
    return {attribute: fact for name, attribute in names.items() if isinstance(fact := data.get(name), str | int)}


def _call_span(call: Call, outcome: Outcome, facts: Mapping[str, Attribute], now_ns: int, wall_ns: int) -> Span:
    problem = outcome.problem() if callable(outcome.problem) else outcome.problem
    effects = outcome.side_effects or (problem.side_effects if problem is not None else None)
    effects = effects or side_effects_of(ending=outcome.ending, ok=problem is None, mutates=call.mutates)
    kind, name = _name_span(call.name, facts)
    limits_ms = {**as_dict(call.clocks), "timeout_ms": call.bound.limit_ms, "reserve_ms": None}
    attributes: dict[str, Attribute] = {
        "shotclock.kind": kind,
        "shotclock.request.id": call.request_id,
        "shotclock.ending": outcome.ending.value,
        "shotclock.side_effects": effects.value,
        "shotclock.exit_code": 0,
        **{f"shotclock.{clock}": limit_ms for clock, limit_ms in limits_ms.items() if limit_ms},
        **facts,
    }
    if call.overtime is not None:
        attributes["shotclock.overtime.requests"] = len(call.overtime.requests)
        attributes["shotclock.overtime.granted_ms"] = call.overtime.granted_ms
    if call.winding_down is not None:
        attributes["shotclock.wind_down.by"] = call.winding_down.by
    code, message = None, ""
    if problem is not None:
        entry = problem.registered
        # Not the message: it may quote secret output.
        code, message = problem.code, entry.summary
        attributes["shotclock.exit_code"] = entry.exit_code if problem.exit_code is None else problem.exit_code
        if problem.fired is not None:
            for detail, value in problem.fired.as_context().items():
                attributes[f"shotclock.clock.{detail}"] = value if isinstance(value, int) else str(value)
            if problem.fired.kind is ClockKind.BUDGET:
                attributes["shotclock.budget_ms"] = problem.fired.limit_ms
    started_ns = wall_ns - (now_ns - call.started_ns)
    events = tuple(_overtime_events(call, started_ns))
    return Span(name, call.trace, call.caller.span_id, started_ns, wall_ns, attributes, code, message, events)


def _overtime_events(call: Call, started_ns: int) -> Iterator[SpanEvent]:
    """Yield the overtime events without their reasons, which may quote secrets."""
    for request in call.overtime.requests if call.overtime is not None else ():
        requested_ns = started_ns + request.at_ms * NS_PER_MS
        if not request.is_gift:
            requested: dict[str, Attribute] = {"shotclock.overtime.asked_by": request.asked_by}
            yield SpanEvent("shotclock.overtime.requested", requested_ns, requested)
        decided: dict[str, Attribute] = {
            "shotclock.overtime.asked_by": request.asked_by,
            "shotclock.overtime.observer": request.observer,
            "shotclock.overtime.asked_ms": request.asked_ms,
            "shotclock.overtime.granted_ms": request.granted_ms,
            "shotclock.overtime.took_ms": request.took_ms,
        }
        decided_ns = requested_ns + request.took_ms * NS_PER_MS
        yield SpanEvent(f"shotclock.overtime.{request.verdict.value}", decided_ns, decided)
    if (stop := call.winding_down) is not None:
        within_ms = max(0, stop.until_ns - stop.at_ns) // NS_PER_MS
        stopped: dict[str, Attribute] = {"shotclock.wind_down.by": stop.by, "shotclock.wind_down.within_ms": within_ms}
        yield SpanEvent("shotclock.wind_down", started_ns + stop.at_ns - call.started_ns, stopped)


def _name_span(name: str, facts: Mapping[str, Attribute]) -> tuple[str, str]:
    """Return kind and name of a span. The call `step X` is one attempt of the step, which has its own span above."""
    if name.startswith("run ") and "shotclock.run.id" in facts:
        return "run", name
    return "call", f"try {name.removeprefix('step ')}" if name.startswith("step ") else name
