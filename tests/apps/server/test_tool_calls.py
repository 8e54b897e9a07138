"""The gate and its backstop, with a desk that does not keep its word; and what goes with them."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from mcp.server import _streamable_http_modern as modern_transport

from shotclock.apps.server._results import render_result
from shotclock.apps.server._tool_calls import ToolCallMiddleware
from shotclock.apps.server._tools import INTERVAL_S, ProgressReports, tools_of
from shotclock.apps.server.client_link import read_request_meta
from shotclock.apps.server.serve import backstop_warnings, refuse_inline
from shotclock.calls.call import OURSELVES, Call, CallRequest, Outcome, admit, answer
from shotclock.core.catalogue import Catalogue, CommandSpec, HandlerReference, Interruption
from shotclock.core.envelope import Envelope, Problem
from shotclock.core.errors import Ending, Failure
from shotclock.core.limits import Clocks
from shotclock.core.trace import TraceContext
from shotclock.core.value_types import as_dict
from tests.apps.server.client import MODERN, envelope_on_wire, run, timed

LATE_S = 3.0


def spec(name: str = "work", **declared: Any) -> CommandSpec:
    return CommandSpec(name, HandlerReference("nowhere", name), **declared)


class StubbornDesk:
    """Never ends on cancellation, as a desk never should: it goes on until it is let, and then has a result."""

    def __init__(self, *specs: CommandSpec) -> None:
        self.catalogue = Catalogue("stubborn", "1", commands=specs)
        self.runtime = SimpleNamespace(trace=TraceContext("f" * 32), inherited=None)
        self.tool = OURSELVES
        self.let_go = asyncio.Event()
        self.asked: dict[str, Any] = {}

    def begin(self, request: CallRequest) -> Call:
        self.asked = as_dict(request)
        call = admit(request.name, request.clocks or Clocks(grace_ms=0))
        call.request = request
        return call

    async def carry_out(self, call: Call) -> Envelope:
        while not self.let_go.is_set():
            try:
                await asyncio.wait_for(self.let_go.wait(), 20)
            except asyncio.CancelledError:
                pass
        return answer(call, Outcome(Ending.FINISHED, data={"late": True}))


def gate_of(dispatcher: Any, operation_timeout_ms: int) -> ToolCallMiddleware:
    tools = tools_of(dispatcher.catalogue)
    return ToolCallMiddleware(
        dispatcher, tools, operation_timeout_ms=operation_timeout_ms, server_info={"name": "stubborn"}
    )


def request(name: str = "work", **meta: Any) -> Any:
    return SimpleNamespace(
        method="tools/call",
        request_id=1,
        params={"name": name, "arguments": {}, "_meta": meta},
        protocol_version=MODERN,
        session=SimpleNamespace(
            report_progress=None,
            client_capabilities=None,
            client_params=None,
            _connection=SimpleNamespace(session_id=None),
        ),
        request=None,
    )


async def call(gate: ToolCallMiddleware, **meta: Any) -> dict[str, Any]:
    result = await gate(request(**meta), None)  # type: ignore[arg-type]
    assert isinstance(result, dict)
    return result


def test_the_backstop_answers_even_if_the_work_never_obeys(validate_envelope: Any) -> None:
    async def scenario() -> None:
        dispatcher = StubbornDesk(spec(clocks=Clocks(timeout_ms=0)))
        gate = gate_of(dispatcher, 200)
        result, took_s = await timed(call(gate))
        assert 0.2 <= took_s < 0.2 + LATE_S
        envelope = validate_envelope(envelope_on_wire(result))
        assert result["isError"]
        assert envelope["error"]["code"] == "OPERATION_TIMEOUT"
        assert envelope["error"]["context"]["timeout_ms"] == 200
        clock = envelope["error"]["context"]["clock"]
        assert (clock["kind"], clock["owner"], clock["limit_ms"]) == ("operation", "server", 200)
        assert envelope["meta"]["ending"] == "abandoned"
        assert (gate.counts.backstop, gate.counts.late) == (1, 0)
        dispatcher.let_go.set()  # its result comes now, and nobody gets it
        for _ in range(200):
            if gate.counts.late:
                break
            await asyncio.sleep(0.005)
        assert gate.counts.late == 1

    run(scenario())


def test_a_cancelled_request_does_not_wait_for_work_that_never_obeys() -> None:
    async def scenario() -> None:
        dispatcher = StubbornDesk(spec())
        gate = gate_of(dispatcher, 0)
        asked = asyncio.ensure_future(call(gate))
        while not dispatcher.asked:
            await asyncio.sleep(0)
        asked.cancel()
        done, _ = await asyncio.wait([asked], timeout=LATE_S)
        assert asked in done
        assert (gate.counts.cancelled, gate.counts.in_flight, gate.counts.late) == (1, 0, 0)
        dispatcher.let_go.set()

    run(scenario())


def test_a_desk_that_raises_is_answered_for(validate_envelope: Any) -> None:
    class Raising(StubbornDesk):
        async def carry_out(self, call: Call) -> Envelope:
            raise RuntimeError("a bug of ours")

    async def scenario() -> None:
        result = await call(gate_of(Raising(spec()), 1000))
        envelope = validate_envelope(envelope_on_wire(result))
        assert envelope["error"]["code"] == "INTERNAL_ERROR"
        assert "a bug of ours" in envelope["error"]["message"]

    run(scenario())


def test_without_a_backstop_nothing_rings() -> None:
    async def scenario() -> None:
        dispatcher = StubbornDesk(spec())
        asyncio.get_running_loop().call_later(0.3, dispatcher.let_go.set)
        result = await call(gate_of(dispatcher, 0))
        assert envelope_on_wire(result)["data"] == {"late": True}

    run(scenario())


def test_the_sdk_still_has_the_constant_that_says_how_often_it_pings() -> None:
    assert modern_transport._SSE_PING_INTERVAL > 0


@pytest.mark.parametrize(
    ("limit_ms", "meta", "budget_ms"),
    [
        (120_000, {}, 30_000),
        (0, {}, 30_000),
        (10_000, {}, 8_000),
        (120_000, {"shotclock.dev/budgetMs": 500}, 500),
        (10_000, {"shotclock.dev/budgetMs": 60_000}, 8_000),
        (120_000, {"shotclock.dev/remainingMs": 1_000}, 800),
    ],
)
def test_who_calls_what_may_go_on_is_answered_before_the_backstop_and_its_own_deadline(
    limit_ms: int, meta: dict[str, int], budget_ms: int
) -> None:
    async def scenario() -> None:
        dispatcher = StubbornDesk(spec(interruption=Interruption()))
        dispatcher.let_go.set()
        await call(gate_of(dispatcher, limit_ms), **meta)
        assert dispatcher.asked["budget_ms"] == budget_ms

    run(scenario())


def test_that_the_work_goes_on_or_a_person_said_no_is_no_error_of_the_tool() -> None:
    admission = admit("work", Clocks())
    for problem, data, is_error in [
        (Problem("INCOMPLETE", "goes on"), {"job_id": "1"}, False),
        (Problem("INCOMPLETE", "asks"), {"status": "pending"}, False),
        (Problem("PROPOSAL_REJECTED", "no"), {"status": "rejected"}, False),
        (Problem("INPUT_REQUIRED", "asks"), {"status": "pending"}, True),
        (None, None, False),
    ]:
        envelope = answer(admission, Outcome(Ending.FINISHED, problem, data))
        assert render_result(envelope, None)["isError"] is is_error


@pytest.mark.parametrize(
    ("limit_ms", "warned"), [(120_000, False), (60_001, False), (60_000, True), (1_000, True), (0, False)]
)
def test_a_backstop_that_rings_before_a_tools_own_clock_is_warned_of(limit_ms: int, warned: bool) -> None:
    catalogue = Catalogue(
        "c",
        "1",
        commands=(
            spec("short", clocks=Clocks(timeout_ms=100)),
            spec("long", clocks=Clocks(timeout_ms=60_000)),
            spec("endless", clocks=Clocks(timeout_ms=0)),
            spec("job", clocks=Clocks(timeout_ms=3_600_000), interruption=Interruption()),
            spec("hidden", clocks=Clocks(timeout_ms=3_600_000), on_mcp=False),
        ),
    )
    warnings = backstop_warnings(catalogue, limit_ms)
    assert bool(warnings) is warned
    assert all("'long'" in line for line in warnings)


def test_a_tool_on_the_servers_own_loop_is_refused() -> None:
    refuse_inline(Catalogue("c", "1", commands=(spec("a", isolation="inline", on_mcp=False), spec("b"))))
    with pytest.raises(Failure, match="a: isolation='inline'"):
        refuse_inline(Catalogue("c", "1", commands=(spec("a", isolation="inline"), spec("b", isolation="process"))))


def test_terms_without_a_word_of_ours_say_nothing() -> None:
    assert (
        read_request_meta(None)
        == read_request_meta({"io.modelcontextprotocol/protocolVersion": "x"})
        == read_request_meta({})
    )


# --- progress -------------------------------------------------------------------------------------


def test_progress_that_does_not_increase_is_not_told_and_none_comes_after_the_end() -> None:
    async def scenario() -> None:
        told: list[float] = []

        async def report(done: float, total: float | None, message: str | None) -> None:
            told.append(done)

        reports = ProgressReports(report)
        for done in (1, 1, 0, 5, 3):
            reports.note(done, None, None)
        await reports.finish()
        assert told == [1, 5]
        reports.note(9, None, None)
        await asyncio.sleep(2 * INTERVAL_S)
        assert told[-1] == 5

    run(scenario())


@pytest.mark.slow
def test_an_answer_does_not_wait_long_for_a_client_that_takes_no_progress() -> None:
    async def scenario() -> None:
        async def report(done: float, total: float | None, message: str | None) -> None:
            await asyncio.sleep(60)

        reports = ProgressReports(report)
        reports.note(1, None, None)
        await asyncio.sleep(0)
        reports.note(2, None, None)
        _, took_s = await timed(reports.finish())
        assert took_s < 10

    run(scenario())
