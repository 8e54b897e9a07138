"""One call of a tool of an MCP server that is started for it or reached by URL: its clocks and its outcome.

A server that was started is gone with all its processes afterwards. The call never relies on the SDK to end.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import re
from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from ..calls import commands
from ..calls.call import Call, Outcome, Work, WorkView, wound_down_problem
from ..calls.control import control_of
from ..calls.outcomes import outcome_of_error
from ..calls.runtime import Runtime
from ..calls.supervised_commands import InteractiveProcess, run_shielded
from ..core.envelope import ENVELOPE_KEY, Envelope, Problem, restore_data
from ..core.errors import Ending, Failure, SideEffects
from ..core.json_values import as_plain, warn_of_kept
from ..core.limits import NS_PER_MS, ClockKind, Fired, in_seconds, reserve_ms_for
from ..core.value_types import JsonObject, value
from ..supervise.clock import monotonic_ns

if TYPE_CHECKING:
    from .mcp_client import Conversation

# For a DELETE by URL. A server that hangs gets none.
CLOSE_LIMIT_S = 0.5
# From a cold disk, loading the SDK takes about a second.
IMPORT_LIMIT_S = 30.0
# A longer retry_after_ms is cut to this.
LONGEST_RETRY_AFTER_MS = 24 * 3600 * 1000
# Characters of a failed tool's text.
MESSAGE_SHOWN = 2000
_CODE = re.compile("[A-Z][A-Z0-9_]+")
_CLIENT = "shotclock.net.mcp_client"
_DETAILS = {"code": str, "message": str, "retryable": bool, "suggestion": str, "retry_after_ms": int, "context": dict}


@value
class ToolRequest:
    tool: str
    arguments: JsonObject
    argv: list[str]  # the command of the server; empty where it is reached by URL
    env: Mapping[str, str]  # beside those of `base_env`
    base_env: Mapping[str, str]
    folder: Path
    on_cancelled: Callable[[Outcome], None]  # called with what is known of a server that a cancellation has killed
    url: str = ""
    headers: Mapping[str, str] = {}
    connect_ms: int = 0
    on_log: Callable[[str, str, str | None], None] | None = None
    on_progress: Callable[[float, float | None, str | None], None] | None = None

    async def send(self, call: Call, runtime: Runtime) -> ToolAnswer:
        client = await load_client(call)
        if client is None and call.bound.bell is not None:
            fired = call.fired(ClockKind.TIMEOUT, monotonic_ns() - call.started_ns)
            problem = Problem("TIMEOUT", f"MCP connection timed out after {in_seconds(fired.limit_ms)}", fired=fired)
            return ToolAnswer(Outcome(Ending.NOT_STARTED, problem), None, "connect_timeout")
        if client is None:
            problem = Problem("SPAWN_FAILED", "the MCP client could not be loaded in time")
            return ToolAnswer(Outcome(Ending.NOT_STARTED, problem))
        if (trouble := _find_unsendable(self.arguments)) is not None:
            problem = Problem("ARG_ERROR", trouble, "validation", errors=[{"field": "arguments", "message": trouble}])
            return ToolAnswer(Outcome(Ending.NOT_STARTED, problem))
        return await _ToolCall(client, self, call, runtime).result()


@value
class ToolAnswer:
    outcome: Outcome
    output: Any = None
    rule: str | None = None  # connect_timeout, connect_error, timeout or tool_error, where the code does not say it
    rewrite: Callable[[Envelope], Envelope] | None = None  # merges the envelope of a Shotclock server into ours
    envelope: Mapping[str, Any] | None = None  # of a Shotclock server, with its own keys


async def load_client(call: Call) -> ModuleType | None:
    """Import `mcp_client` in a thread; return None where the call's deadline passes first."""
    loading = asyncio.ensure_future(asyncio.to_thread(importlib.import_module, _CLIENT))
    try:
        while not loading.done():
            bell = call.bound.bell
            limit_s = IMPORT_LIMIT_S if bell is None else bell.remaining_ns(monotonic_ns()) / 1e9
            await asyncio.wait([loading], timeout=limit_s)
            if bell is call.bound.bell:  # overtime did not extend it
                break
        return loading.result() if loading.done() else None
    finally:
        loading.cancel()  # ends the wait, not the thread


class _ToolCall(Work):
    """One call of a tool, from the start of its server."""

    def __init__(self, client: ModuleType, request: ToolRequest, admission: Call, runtime: Runtime) -> None:
        """`client` is the module `mcp_client`."""
        self._request, self._admission, self._runtime = request, admission, runtime
        self._conversation: Conversation = client.Conversation(
            request.tool,
            request.arguments,
            self._remaining_ms,
            admission.trace,
            on_sign=control_of(admission).record_sign_of_life,
            on_progress=self._note_progress,
            on_log=request.on_log,
        )
        self._rule: str | None = None
        self._unwound: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._stopping: asyncio.Task[None] | None = None
        self._server: InteractiveProcess | None = None

    def _note_progress(self, done: float, total: float | None, message: str | None) -> None:
        control_of(self._admission).record_progress(done, total, message)
        if self._request.on_progress is not None:
            self._request.on_progress(done, total, message)

    def _remaining_ms(self) -> int | None:
        bell = self._admission.bound.bell
        return None if bell is None else bell.remaining_ms(monotonic_ns())

    # --- winding down and overtime --------------------------------------------------------------------------

    def wind_down(self, until_ns: int) -> None:
        if self._stopping is None:
            within_ms = max(1, (until_ns - monotonic_ns()) // NS_PER_MS)
            asking = self._conversation.ask_to_stop([self._admission.request_id], within_ms)
            self._stopping = asyncio.ensure_future(asking)

    def stop_unwound(self) -> None:
        if not self._unwound.done():
            self._unwound.set_result(None)

    def move_bell(self) -> bool:
        """Pass the new timeout on to a started server. The waiter reads it when the old one rings."""
        bound = self._admission.bound
        if self._server is not None and bound.bell is not None and bound.kill_ns is not None:
            self._server.move_bell(bound.bell.at_ns, bound.kill_ns)
        return True

    async def look(self) -> WorkView:
        return WorkView(has_begun=self._conversation.has_begun)  # as for the idle limit: starting may be silent

    async def result(self) -> ToolAnswer:
        self._admission.work = self
        if (winding_down := self._admission.winding_down) is not None:  # while the client was being loaded
            self.wind_down(winding_down.until_ns)
        try:
            return await self._result()
        finally:
            if self._stopping is not None:
                self._stopping.cancel()

    async def _result(self) -> ToolAnswer:
        try:
            outcome, output = await (self._by_command() if self._request.argv else self._by_url())
        except Failure as failure:
            outcome, output = outcome_of_error(failure), None
            outcome.ending, self._rule = Ending.NOT_STARTED, "connect_error"
        if outcome.problem is not None or not _is_envelope(output):
            return ToolAnswer(outcome, output, self._rule)
        code = None if output["error"] is None else output["error"]["code"]
        is_over = code in _TIMED_OUT and self._time_is_over()
        rule = None if code is None else "timeout" if is_over else "tool_error"

        def rewrite(ours: Envelope) -> Envelope:
            adopted = _adopt_answer(ours, output)
            return self._by_our_clock(adopted) if is_over else adopted

        data = output["data"]
        value = data["result"] if isinstance(data, dict) and set(data) == {"result"} else data
        return ToolAnswer(outcome, value, rule, rewrite, output)

    def _time_is_over(self) -> bool:
        """Return whether the server's time is used up. It stops a reserve earlier."""
        if self._conversation.granted is None:
            return False
        called_ns, given_ms = self._conversation.granted
        return monotonic_ns() >= called_ns + (given_ms - reserve_ms_for(given_ms)) * NS_PER_MS

    def _by_our_clock(self, theirs: Envelope) -> Envelope:
        """Return a timeout of the server as one of the call's own clock."""
        fired = self._admission.fired(ClockKind.TIMEOUT, monotonic_ns() - self._admission.started_ns)
        message = f"MCP tool call timed out after {in_seconds(fired.limit_ms)}"
        error = {**(theirs.error or {}), "message": message, "context": {"clock": fired.as_context()}}
        return Envelope(theirs.data, error, theirs.warnings, theirs.meta, fired=fired)

    async def _by_url(self) -> tuple[Outcome, Any]:
        headers = dict(self._request.headers)
        self._admission.trace.add_to(headers)
        problem = await self._hold_conversation(self._conversation.over_http(self._request.url, headers))
        return self._judge(problem, Ending.CANCELLED)

    async def _by_command(self) -> tuple[Outcome, Any]:
        asked = self._request
        server: InteractiveProcess | None = None
        admission, bound = self._admission, self._admission.bound
        opening = self._runtime.open(admission, asked.argv, env=asked.env, base_env=asked.base_env, cwd=asked.folder)
        try:
            async with opening as server:
                self._server = server
                if admission.bound is not bound:  # extended while it was being started
                    self.move_bell()
                problem = await self._hold_conversation(self._conversation.over_pipes(server))
                if problem is not None:
                    await server.close(politely=False)
        except asyncio.CancelledError:
            if server is not None and server.report is not None:
                cancelled = Outcome(Ending.KILLED, Problem("CANCELLED", "the call of the tool was cancelled"))
                asked.on_cancelled(self._with_report(cancelled, server))
            raise
        outcome, output = self._judge(problem, Ending.KILLED)
        return self._with_report(outcome, server), output

    # --- the clocks ---------------------------------------------------------------------------------------

    async def _hold_conversation(self, transport: AbstractAsyncContextManager[Any]) -> Problem | None:
        talk = self._conversation
        talking = asyncio.ensure_future(talk.talk(transport))
        try:
            while not talk.settled.done():
                now = monotonic_ns()
                at_ns, kind, limit_ms = min(self._alarms(), default=(None, ClockKind.TIMEOUT, 0))
                if at_ns is not None and now >= at_ns:
                    return self._timeout_problem(talk, kind, limit_ms)
                if self._unwound.done():
                    return wound_down_problem(self._admission)
                waits: list[asyncio.Future[Any]] = [talk.settled, self._unwound]
                if not talk.calling.done():
                    waits.append(talk.calling)  # the idle limit begins with the call
                limit_s = None if at_ns is None else (at_ns - now) / 1e9
                await asyncio.wait(waits, timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
            # A received answer is not discarded because closing takes time.
            await asyncio.wait([talking], timeout=CLOSE_LIMIT_S)
            return None
        finally:
            talking.cancel()
            await run_shielded(asyncio.wait([talking], timeout=CLOSE_LIMIT_S))
            if not talking.done():  # a second cancellation ends its clean-up
                talking.cancel()

    def _alarms(self) -> list[tuple[int, ClockKind, int]]:
        talk, bound, idle_ms = self._conversation, self._admission.bound, self._admission.clocks.idle_ms
        alarms = [] if bound.bell is None else [(bound.bell.at_ns, ClockKind.TIMEOUT, bound.limit_ms)]
        if not talk.has_begun:  # starting may be silent
            at_ns = talk.stage_began_ns + self._request.connect_ms * NS_PER_MS
            alarms += [(at_ns, ClockKind.OPERATION, self._request.connect_ms)] if self._request.connect_ms else []
        elif idle_ms:
            alarms.append((talk.heard_ns + idle_ms * NS_PER_MS, ClockKind.IDLE, idle_ms))
        return alarms

    def _timeout_problem(self, talk: Conversation, kind: ClockKind, limit_ms: int) -> Problem:
        elapsed_ns = monotonic_ns() - self._admission.started_ns
        if kind is ClockKind.OPERATION:  # connect_timeout
            fired = Fired(ClockKind.TIMEOUT, f"{self._admission.name} connect", limit_ms, elapsed_ns // NS_PER_MS)
        else:
            fired = self._admission.fired(kind, elapsed_ns)
        if kind is ClockKind.IDLE:
            return Problem("STALLED", f"the MCP server sent nothing for {in_seconds(limit_ms)}", fired=fired)
        self._rule = None if talk.has_begun else "connect_timeout"
        message = f"MCP {talk.stage.value} timed out after {in_seconds(limit_ms)}{self._describe_stray()}"
        return Problem("TIMEOUT", message, fired=fired)

    def _describe_stray(self) -> str:
        stray = self._conversation.stray.decode("utf-8", "replace").strip()
        return f"; what it prints is not MCP: {stray!r}" if stray else ""

    # --- outcomes -----------------------------------------------------------------------------------------

    def _judge(self, problem: Problem | None, stopped_as: Ending) -> tuple[Outcome, Any]:
        talk = self._conversation
        if problem is not None:
            # A server that was started may have acted before the call.
            is_unbegun = stopped_as is Ending.CANCELLED and not talk.is_calling
            return Outcome(Ending.NOT_STARTED if is_unbegun else stopped_as, problem), None
        settled = talk.settled.result()
        if isinstance(settled, Problem):
            ending = Ending.FINISHED if talk.is_calling else Ending.NOT_STARTED
            if self._describe_stray() and settled.code in _LOST:
                settled = Problem(settled.code, settled.message + self._describe_stray(), context=settled.context)
            return Outcome(ending, settled), None
        data: dict[str, object] = {"content": talk.content_of(settled)}
        given = (settled.meta or {}).get(ENVELOPE_KEY)
        if isinstance(given, dict):
            given = restore_data(given, settled.structured_content)
        output = given if _is_envelope(given) else talk.output_of(settled)
        if settled.is_error and not _is_envelope(output):
            message = talk.text_of(settled).strip()[:MESSAGE_SHOWN] or "the tool failed without a message"
            return Outcome(Ending.FINISHED, Problem("TOOL_FAILED", message), data), output
        notes = (warn_of_kept([*dict.fromkeys(talk.kept)]),) if talk.kept else ()
        return Outcome(Ending.FINISHED, data=data, warnings=notes), output

    def _with_report(self, outcome: Outcome, server: InteractiveProcess) -> Outcome:
        """Add the supervisor's report on the server."""
        report = server.report
        assert report is not None
        judged = commands.judge(self._admission, server.task, report)
        outcome.warnings += judged.warnings
        outcome.survivors = judged.survivors
        problem = outcome.problem
        if not isinstance(problem, Problem):
            return outcome
        if report.unstartable is not None:
            return Outcome(Ending.NOT_STARTED, judged.problem)
        process: JsonObject = judged.data if isinstance(judged.data, dict) else {}
        data = outcome.data if isinstance(outcome.data, dict) else {}
        # Whole: a workflow removes secrets and then cuts it; half a secret would not be recognized.
        outcome.data = {**data, "stderr": str(process.get("stderr", ""))}
        if problem.code in _LOST and self._conversation.lost:
            how = f" with exit code {process['exit_code']}" if report.stopped is None and "exit_code" in process else ""
            stderr = str(process.get("stderr", "")).strip()
            last = f": {stderr.splitlines()[-1][:300]}" if stderr else ""
            message = f"the MCP server left{how} before it had answered{last}{self._describe_stray()}"
            outcome.problem = Problem(problem.code, message, context=problem.context)
        return outcome


def _find_unsendable(arguments: object) -> str | None:
    """Return why arguments are not JSON, or None."""
    try:
        json.dumps(arguments, allow_nan=False, ensure_ascii=False).encode()
    except (TypeError, ValueError, RecursionError) as error:
        return f"cannot be sent as JSON: {error}"
    return None


_LOST = ("CONNECT_FAILED", "CONNECTION_LOST")
_TIMED_OUT = ("TIMEOUT", "NO_TIME_LEFT", "OPERATION_TIMEOUT")


def _is_envelope(output: Any) -> bool:
    if not isinstance(output, dict) or set(output) != {"ok", "data", "error", "warnings", "meta"}:
        return False
    data, error, warnings, meta = (output[key] for key in ("data", "error", "warnings", "meta"))
    return (
        (error is None or _has_code_and_message(error))
        and isinstance(warnings, list)
        and isinstance(meta, dict)
        and (data is None or isinstance(data, dict | list))
    )


def _has_code_and_message(detail: Any) -> bool:
    if not isinstance(detail, dict):
        return False
    code, message = detail.get("code"), detail.get("message")
    return isinstance(code, str) and isinstance(message, str) and _CODE.fullmatch(code) is not None


def _adopt_answer(ours: Envelope, theirs: Mapping[str, Any]) -> Envelope:
    """Return the envelope of a Shotclock server as ours. Values of a wrong type are ignored."""
    meta, their_meta, data = dict(ours.meta), theirs["meta"], theirs["data"]
    if their_meta.get("ending") in set(Ending):
        meta["ending"] = their_meta["ending"]
    if their_meta.get("side_effects") in set(SideEffects):
        meta["side_effects"] = their_meta["side_effects"]
    error = None
    if theirs["error"] is not None:
        exit_code = their_meta.get("exit_code")
        meta["exit_code"] = exit_code if type(exit_code) is int and 0 < exit_code < 256 else 1
        error = {"retryable": False, "phase": "execution", **_keep_typed(theirs["error"])}
    warnings = [*ours.warnings, *(_keep_typed(each) for each in theirs["warnings"] if _has_code_and_message(each))]
    return Envelope(data, error, warnings, meta)


def _keep_typed(detail: Mapping[str, Any]) -> dict[str, object]:
    """Return the details of a server's error that have the right type and are JSON."""
    typed = {name: detail[name] for name, kind in _DETAILS.items() if type(detail.get(name)) is kind}
    if "retry_after_ms" in typed:
        typed["retry_after_ms"] = min(max(0, typed["retry_after_ms"]), LONGEST_RETRY_AFTER_MS)
    try:
        return dict(as_plain(typed).value)
    except ValueError:
        return dict(as_plain({name: value for name, value in typed.items() if name != "context"}).value)
