"""One `tools/call`: read it as a request, run it under the backstop of the server, and render its envelope.

    client ── tools/call ── ToolCallMiddleware ── dispatcher ── runtime ── worker | host process
                                 │
                                 └ backstop: answers when it fires, even if the rest hangs

The middleware comes before the SDK's checks, so that bad arguments get an envelope as well. This process runs no code
of the App (AGENTS.md: a server runs no user code).
"""

from __future__ import annotations

import asyncio
import difflib
from collections.abc import Collection, Coroutine, Mapping
from functools import partial
from typing import Any

from mcp.server.context import CallNext, HandlerResult, ServerRequestContext
from mcp.shared.exceptions import MCPError
from mcp_types import INVALID_PARAMS, SERVER_INFO_META_KEY, Tool
from mcp_types.version import MODERN_PROTOCOL_VERSIONS

from ...calls.call import Call, CallRequest, Outcome, answer, invalid, new_trace
from ...calls.outcomes import outcome_of_error
from ...calls.principal import ANONYMOUS, Principal
from ...core.catalogue import DEFAULT_BUDGET_MS
from ...core.envelope import Envelope, Problem, stop_problem, warning
from ...core.errors import Ending, Failure
from ...core.limits import NS_PER_MS, ClockKind, Clocks, Deadline, Fired, format_duration
from ...core.trace import TraceContext
from ...core.value_types import JsonObject, record
from ...dispatch.dispatcher import Dispatcher
from ...supervise.clock import monotonic_ns
from ...worker.context import ASK_CLIENT, RESOURCE_UPDATED, Caller, Scope, current_scope
from ._listing import missing_in, refusal_of
from ._paused_calls import GuardedCall, PausedCalls
from ._results import LONGEST_RESULT, make_fit, names_result, render_result, replace_by_error
from ._subscriptions import Subscriptions
from ._tasks import Tasks
from ._tools import (
    CHECK,
    JOB_TOOL,
    JUSTIFICATION,
    OWN_TOOLS,
    PROPOSE,
    WITHDRAW,
    OwnTools,
    ProgressReports,
    ServerTools,
    ask_while_waiting,
    decider_at,
    input_required,
    may_answer,
    take_answers,
    takes_justification,
)
from .client_link import LONGEST_MS, ClientLink, FunctionRequest, LogLevels, RequestMeta, read_request_meta

# After the backstop has fired, the answer waits for the work to be gone: for its grace, up to the first, and then the
# second.
LONGEST_GRACE_MS = 5_000
STOPPED_WITHIN_S = 0.5
BACKSTOP = "OPERATION_TIMEOUT"
GATHER_S = 0.02  # questions that a function asks at the same time are sent together
MODERN = frozenset(MODERN_PROTOCOL_VERSIONS)


@record
class CallCounts:
    calls: int = 0
    in_flight: int = 0
    cancelled: int = 0
    backstop: int = 0
    late: int = 0  # results dropped because the backstop had answered
    idle: asyncio.Event | None = None
    """Set once no call is in flight, if that is waited for."""


class Clients:
    """The server's knowledge of its clients. It outlives a reload."""

    def __init__(self, *, reloads: bool = False, headers: Collection[str] = (), most: int = LONGEST_RESULT) -> None:
        """Keep what is set for all: the `headers` of requests that functions see, `most` characters of an answer."""
        self.reloads, self.headers, self.most = reloads, headers, most
        self.log_levels: LogLevels = LogLevels()
        self.subscriptions: Subscriptions = Subscriptions(reloads=reloads)
        self.paused: PausedCalls = PausedCalls()
        self.counts: CallCounts = CallCounts()


class ToolCallMiddleware:
    def __init__(
        self,
        dispatcher: Dispatcher,
        tools: Mapping[str, Tool],
        *,
        operation_timeout_ms: int,
        server_info: JsonObject,
        own_tools: ServerTools | None = None,
        clients: Clients | None = None,
    ) -> None:
        self.dispatcher = dispatcher
        self.tools = tools
        self._specs = {spec.name: spec for spec in dispatcher.catalogue.everything}
        self._limit_ms = operation_timeout_ms
        self._server_info = server_info
        if own_tools is None:
            own_tools = OwnTools(dispatcher, {name for name in OWN_TOOLS if name in tools and name not in self._specs})
        self._own = own_tools.names
        self.own_tools: ServerTools = own_tools
        self._work: set[asyncio.Task[Envelope]] = set()
        """All that has not ended, also of paused calls and of calls whose client has its answer or is gone."""
        self._stopped_by: str | None = None
        # One for each call that may wait for a person or a job: every call that ends would search a shared future.
        self._stops: set[asyncio.Future[str]] = set()
        clients = clients or Clients()
        self._log_levels, self._paused = clients.log_levels, clients.paused
        self._headers, self._most = clients.headers, clients.most
        self.counts: CallCounts = clients.counts
        self._subscriptions = clients.subscriptions
        self.tasks: Tasks = Tasks(dispatcher, self._render, principal_at)

    def stop(self, signal_name: str) -> None:
        """Answer the calls that wait for a person or a job. The runtime stops and answers those that run here."""
        self._stopped_by = signal_name
        self._paused.stop_all(self)
        for stop in self._stops:
            if not stop.done():
                stop.set_result(signal_name)

    async def until_idle(self) -> None:
        if self.counts.in_flight:
            self.counts.idle = asyncio.Event()
            await self.counts.idle.wait()  # bounded by the caller

    async def until_done(self) -> None:
        while self._work:
            await asyncio.wait(self._work)  # bounded by the limits of the calls

    async def __call__(self, ctx: ServerRequestContext[Any, Any], call_next: CallNext) -> HandlerResult:
        if ctx.method != "tools/call" or ctx.request_id is None:
            return await call_next(ctx)
        if (owner := self._owner_of(ctx)) is not self:
            return await owner(ctx, call_next)  # its program was replaced meanwhile
        params = ctx.params or {}
        name, meta = params.get("name"), params.get("_meta")
        if not isinstance(name, str) or not isinstance(meta, dict | None):
            raise MCPError(code=INVALID_PARAMS, message="tools/call needs a name, and _meta has to be an object")
        if name not in self.tools and (spec := self.dispatcher.catalogue.find(name)) is not None and spec.on_mcp:
            name = spec.name  # in another spelling, as on the command line
        envelope = await self._answer(ctx, name, params.get("arguments"))
        if not isinstance(envelope, Envelope):
            return envelope
        if envelope.code == "CANNOT_ASK" and ctx.protocol_version in MODERN and missing_in(envelope) is not None:
            raise refusal_of(envelope)  # as the 2026 revision demands; an older client gets the result of a failed tool
        task = await self.tasks.created_by(ctx, name, envelope)
        if task is not None:
            return {**task, "_meta": {SERVER_INFO_META_KEY: self._server_info}}
        return self._render(ctx, name, envelope)

    def _render(self, ctx: ServerRequestContext[Any, Any], name: str, envelope: Envelope) -> JsonObject:
        server_info = self._server_info if ctx.protocol_version in MODERN else None
        spec = self._specs.get(name)
        try:
            text = self.own_tools.text_of(name, envelope) if name in self._own else None
            return render_result(
                envelope,
                server_info,
                is_wrapped=spec is not None and names_result(spec.output_schema),
                has_schema=spec is None or spec.output_schema is not None,
                has_state=spec is not None and spec.may_be_unfinished,
                shown=text,
                most=self._most,
            )
        except (TypeError, ValueError, RecursionError) as error:
            envelope.warnings = []
            message = f"the answer cannot be put into JSON: {error}"
            return render_result(replace_by_error(envelope, "RESULT_NOT_SERIALIZABLE", message), server_info)

    def _owner_of(self, ctx: ServerRequestContext[Any, Any]) -> ToolCallMiddleware:
        """Return the middleware of the program in which the call of a request began."""
        return (self._paused.owner_of(ctx) if "requestState" in (ctx.params or {}) else None) or self

    async def serve(
        self, ctx: ServerRequestContext[Any, Any], name: str, arguments: Mapping[str, object]
    ) -> Envelope | JsonObject:
        """Run the function of a resource, a prompt or a completion, as a tool runs."""
        envelope = await self._owner_of(ctx)._answer(ctx, name, arguments, is_tool=False)
        return make_fit(envelope, self._most) if isinstance(envelope, Envelope) else envelope

    async def _answer(
        self, ctx: ServerRequestContext[Any, Any], name: str, arguments: object, *, is_tool: bool = True
    ) -> Envelope | JsonObject:
        """Carry out a request. Returns a mapping if the client has to ask its person first."""
        meta: Any = (ctx.params or {}).get("_meta")
        # In the request's own task: everything that is done for it belongs below its sender.
        current_scope.set(Scope(self.dispatcher.runtime.inherited, -1, "caller", self._trace(ctx.request, meta)))
        self.counts.calls += 1
        self.counts.in_flight += 1
        request_meta = read_request_meta(meta)
        if request_meta.budget_ms is None and self.tasks.starts_at_once(ctx, name):
            request_meta = request_meta._replace(budget_ms=0)
        progress = ProgressReports(ctx.session.report_progress) if request_meta.wants_progress else None
        request = FunctionRequest(
            name,
            arguments,
            request_meta,
            ClientLink(self._log_levels),
            principal_at(ctx.request),
            is_tool,
            self.tasks.asks_of(ctx, name),
            _caller_at(ctx, self._headers),
        )
        try:
            paused = self._paused.take(ctx, request) if "requestState" in (ctx.params or {}) else None
            if paused is not None:
                request = request._replace(link=paused.request.link)
            request.link.attach(ctx, progress)
            may_ask = is_tool and self.dispatcher.catalogue.elicitation and self._may_ask(name)
            decider = decider_at(ctx, request.principal) if may_ask else None
            if paused is not None:
                answered = await self._answer_within_backstop(paused)
            elif decider is None:
                answered = await self._carry_out(request)
            else:
                answered = await self._elicit(ctx, request, decider)
            await request.link.detach()
            unread = request.link.unread
        except asyncio.CancelledError:
            self.counts.cancelled += 1
            raise
        finally:
            self.counts.in_flight -= 1
            if self.counts.idle is not None and not self.counts.in_flight:
                self.counts.idle.set()
            request.link.abandon()
        if isinstance(answered, Envelope):
            if request_meta.unreadable is not None:
                answered.warnings.append(warning("DEADLINE_UNREADABLE", request_meta.unreadable))
            if unread:
                answered.warnings.append(warning("LOG_INCOMPLETE", unread=unread))
        return answered

    def _may_ask(self, name: str) -> bool:
        spec = self._specs.get(name)
        return spec.approval is not None if spec is not None else name == PROPOSE and name in self._own

    async def _elicit(
        self, ctx: ServerRequestContext[Any, Any], request: FunctionRequest, decider: Principal
    ) -> Envelope | JsonObject:
        """Carry out a call of a client that can ask its person. Returns a mapping if it has to ask first."""
        is_modern = ctx.protocol_version in MODERN
        try:
            inbox = self.dispatcher.inbox()
            responses = (ctx.params or {}).get("inputResponses")
            answered = await take_answers(responses, inbox, request.principal, decider) if is_modern else set()
            at_once = request._replace(meta=request.meta._replace(budget_ms=0))
            if request.name == PROPOSE and isinstance(request.arguments, dict):
                at_once = at_once._replace(arguments={**request.arguments, "wait_ms": 0})
            envelope = await self._carry_out(at_once)
            if not isinstance(envelope, Envelope) or envelope.code != "INCOMPLETE":
                return envelope
            data = envelope.data if isinstance(envelope.data, dict) else {}
            proposal = await inbox.get(str(data.get("proposal_id"))) if data.get("status") == "pending" else None
        except Failure as failure:  # the store cannot be used
            return await self._carry_out(request, outcome_of_error(failure))
        if proposal is None or proposal.id in answered or not may_answer(proposal, decider):
            return await self._carry_out(request)
        if is_modern:
            return {**input_required(proposal), "_meta": {SERVER_INFO_META_KEY: self._server_info}}
        asking = asyncio.ensure_future(ask_while_waiting(ctx, proposal, inbox, decider))
        try:
            return await self._carry_out(request)
        finally:
            asking.cancel()

    def _trace(self, request: object, meta: Mapping[str, Any] | None) -> TraceContext:
        """Return the trace of the sender, else that of the server's starter, else a new one."""
        for carrier in (meta, getattr(request, "headers", None)):
            if carrier and (trace := TraceContext.carried_by(carrier)) is not None:
                return trace
        ours = self.dispatcher.runtime.trace
        return ours if ours.span_id else new_trace()

    async def _carry_out(self, tool_request: FunctionRequest, refusal: Outcome | None = None) -> Envelope | JsonObject:
        request, dispatcher = self._read(tool_request, refusal), self.dispatcher
        is_own = request.name in self._own and request.refusal is None
        work: Coroutine[Any, Any, Envelope]
        if is_own:
            call = self.own_tools.begin(request)
            call.cancellation.ending = Ending.CANCELLED  # it has done what it could: no guard comes before its work
            work = self.own_tools.carry_out(call, request)
        else:
            call = dispatcher.begin(request)
            work = dispatcher.carry_out(call)
        tool_request.link.call = call
        task = asyncio.get_running_loop().create_task(work)
        self._work.add(task)
        task.add_done_callback(self._work.discard)
        stop = self._stopper(call, task, request.stop)
        return await self._answer_within_backstop(GuardedCall(self, call, task, stop, tool_request, monotonic_ns()))

    def _read(self, tool_request: FunctionRequest, refusal: Outcome | None) -> CallRequest:
        """Read a request. One that cannot be read or done carries its refusal."""
        name, meta, written = tool_request.name, tool_request.meta, tool_request.arguments
        spec, mistakes = self._specs.get(name), list(meta.mistakes)
        arguments: JsonObject = written if isinstance(written, dict) else {}
        request = CallRequest(
            name if name in self._specs or name in self.tools else name[:100],
            arguments,
            None if meta.timeout_ms is None else Clocks(timeout_ms=meta.timeout_ms),
            tool_request.principal,
            meta.idempotency_key,
            None if meta.remaining_ms is None else Deadline.after_ms(monotonic_ns(), meta.remaining_ms),
            on_progress=None if tool_request.link.progress is None else tool_request.link.note_progress,
            on_question=partial(self._answer_question, tool_request.link),
            asks=tool_request.asks,
            caller=tool_request.caller,
            on_log=tool_request.link.log,
            repeat_hint=f"call the tool {name} again with the same arguments",
            refusal=refusal,
        )
        if written is not None and not isinstance(written, dict):
            mistakes.append({"field": "arguments", "message": "must be an object"})
        if tool_request.is_tool and name not in self.tools:
            close = difflib.get_close_matches(name, self.tools, n=1)
            hint = f"did you mean {close[0]!r}?" if close else "list the tools, and mind the spelling"
            problem = Problem("UNKNOWN_OPERATION", f"there is no tool {name[:100]!r}", "validation", suggestion=hint)
            request.refusal = Outcome(Ending.NOT_STARTED, problem)
            return request
        if name in self._own and isinstance(written, dict | None):
            mistakes += self.own_tools.mistakes_in(name, arguments)
        if spec is not None and spec.approval is not None:
            justification = arguments.get(JUSTIFICATION, "")
            if isinstance(justification, str):
                request.justification = justification
            else:
                mistakes.append({"field": JUSTIFICATION, "message": "must be a text"})
            if takes_justification(spec):
                request.arguments = {field: value for field, value in arguments.items() if field != JUSTIFICATION}
        if mistakes:
            request.refusal = invalid(mistakes)
        elif spec is None:
            wait_ms = self.own_tools.wait_ms(name, arguments)
            request.budget_ms = None if wait_ms is None else self._budget_ms(wait_ms, meta)
        elif spec.may_be_unfinished:
            request.stop = asyncio.get_running_loop().create_future()
            waits_ms = meta.budget_ms
            if waits_ms is None and spec.interruption is None:
                waits_ms = LONGEST_MS  # the response budget says how long, within these
            request.budget_ms = self._budget_ms(waits_ms, meta)
        return request

    def _answer_question(self, link: ClientLink, question: str, value: object) -> Coroutine[Any, Any, object] | None:
        if question == ASK_CLIENT and isinstance(value, dict):
            return link.ask(value)
        return self._subscriptions.resource_updated(str(value)) if question == RESOURCE_UPDATED else None

    def _budget_ms(self, wanted_ms: int | None, request_meta: RequestMeta) -> int:
        """Return a wait below the backstop and the caller's deadline, which would end work that may outlive it."""
        limits = [DEFAULT_BUDGET_MS if wanted_ms is None else wanted_ms]
        for limit_ms in (self._limit_ms or None, request_meta.remaining_ms):
            if limit_ms is not None:
                limits.append(limit_ms * 8 // 10)
        return min(limits)

    def _stopper(
        self, call: Call, task: asyncio.Task[Envelope], stop: asyncio.Future[str] | None
    ) -> asyncio.Future[str] | None:
        """Return the future that stops a call with the server. One of the server's own tools is cancelled by it."""
        if stop is None and call.name not in self._specs:
            stop = asyncio.get_running_loop().create_future()

            def cancel(stopped: asyncio.Future[str]) -> None:
                if not stopped.cancelled():
                    call.cancellation.reason = stop_problem(stopped.result())
                    task.cancel()

            stop.add_done_callback(cancel)
        return stop

    async def _answer_within_backstop(self, guarded: GuardedCall) -> Envelope | JsonObject:
        """Wait for a call, and answer it when the backstop fires, even if its work hangs.

        The work is a task of its own: neither the SDK's cancellation, which is repeated until obeyed, nor the backstop
        waits for it. Returns a mapping if the call is paused until its client has answered a question.
        """
        call, task, stop = guarded.call, guarded.task, guarded.stop
        if stop is not None:
            self._stops.add(stop)
            if self._stopped_by is not None and not stop.done():
                stop.set_result(self._stopped_by)
        try:
            paused = await self._wait(guarded)
        except asyncio.CancelledError:
            self._drop(task)
            raise
        finally:
            if stop is not None:
                self._stops.discard(stop)
        if paused is not None:
            return paused
        if task.done():
            return _name_tools(_answer_of(call, task))
        self.counts.backstop += 1
        limit_ms, elapsed_ms = self._limit_ms, (monotonic_ns() - call.started_ns) // NS_PER_MS
        call.cancellation.reason = Problem(
            BACKSTOP,
            f"{call.name} did not end within the server's {format_duration(limit_ms)}",
            fired=Fired(ClockKind.OPERATION, "server", limit_ms, elapsed_ms),
            context={"timeout_ms": limit_ms},
        )
        self._drop(task, late=True)
        grace_ms = min(call.bound.grace_ms, LONGEST_GRACE_MS)
        await asyncio.wait((task,), timeout=grace_ms / 1000 + STOPPED_WITHIN_S)
        envelope = _answer_of(call, task)
        if envelope.code == BACKSTOP:
            envelope.meta.update(timeout_ms=self._limit_ms, remaining_ms=0)
        return _name_tools(envelope)

    async def _wait(self, guarded: GuardedCall) -> JsonObject | None:
        """Wait for the end of a call or the backstop. Returns the answer of one that is paused."""
        task, link, left_s = guarded.task, guarded.request.link, self._left_s(guarded)
        while left_s != 0:
            if link.is_asking:
                await asyncio.wait((task,), timeout=GATHER_S)
                if not task.done() and (paused := self._paused.pause(guarded, self._server_info)):
                    return paused
            else:
                await asyncio.wait((task, link.asked), timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                break
            left_s = self._left_s(guarded)
        return None

    def _left_s(self, guarded: GuardedCall) -> float | None:
        """Return the time until the backstop, which does not count the wait for an answer of the client."""
        link = guarded.request.link
        if not self._limit_ms:
            return None
        worked_ns = monotonic_ns() - guarded.began_ns - link.waited_ns
        left_s = max(0.0, self._limit_ms / 1000 - worked_ns / 1e9)
        return max(left_s, GATHER_S) if link.is_waiting else left_s

    def _drop(self, task: asyncio.Task[Envelope], *, late: bool = False) -> None:
        """Stop work whose caller is answered or gone, and drop its result."""

        def count(task: asyncio.Task[Envelope]) -> None:
            if not task.cancelled() and task.exception() is None and task.result().code != BACKSTOP:
                self.counts.late += 1

        if late:
            task.add_done_callback(count)
        task.cancel()


def principal_at(request: Any) -> Principal:
    """Return the sender; over stdio, which has no HTTP request, the anonymous agent."""
    if request is None:
        return ANONYMOUS
    from ...people.auth import principal_of

    return principal_of(request)


def _caller_at(ctx: ServerRequestContext[Any, Any], wanted: Collection[str]) -> Caller:
    """Return the client of a request as functions see it, with the headers that `serve` passes."""
    client, by = ctx.session.client_params, principal_at(ctx.request)
    headers = None if ctx.request is None else ctx.request.headers
    return Caller(
        None if by == ANONYMOUS else by.name,
        "" if client is None else client.client_info.name,
        "" if client is None else client.client_info.version,
        ctx.session._connection.session_id,
        by.claims,
        {name: ", ".join(headers.getlist(name)) for name in wanted if headers is not None and name in headers},
    )


def _answer_of(call: Call, task: asyncio.Task[Envelope]) -> Envelope:
    """Return the answer of a call, or make one if its work made none."""
    if not task.done():
        outcome = Outcome(Ending.ABANDONED, call.cancellation.reason)
    elif task.cancelled():
        outcome = Outcome(Ending.CANCELLED, Problem("SHUTTING_DOWN", "the server is stopping"))
    elif (error := task.exception()) is not None:
        outcome = outcome_of_error(error if isinstance(error, Exception) else RuntimeError(repr(error)))
    else:
        return task.result()
    return answer(call, outcome)


def _name_tools(envelope: Envelope) -> Envelope:
    """Name the tools that continue a job or a pending proposal, for a client that may have no shell."""
    data = envelope.data
    if envelope.code not in ("INCOMPLETE", "CANCELLED") or not isinstance(data, dict):
        return envelope
    if data.get("status") == "pending":
        with_id = f"with proposal_id {data['proposal_id']}"
        data["cancel_command"] = f"call the tool {WITHDRAW} {with_id}"
        if str(data.get("continue_command")).startswith("shotclock "):
            data["continue_command"] = f"call the tool {CHECK} {with_id}"
    elif str(data.get("continue_command")).startswith("shotclock job "):
        call = f"call the tool {JOB_TOOL} with job_id {data['job_id']} and action"
        data |= {"continue_command": f"{call} wait", "cancel_command": f"{call} cancel"}
    return envelope
