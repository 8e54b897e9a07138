"""The tools of an agent, in the process that runs the workflow.

A tool of the file runs as a `tool` step would; one of an MCP server uses a connection that stays open for the agent's
run. When the step winds down, running calls and servers are asked to stop; late results still go to the model.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from types import ModuleType
from typing import TYPE_CHECKING, Any

from ...calls import commands
from ...calls.call import Call, Outcome, Work, WorkView, wound_down_problem
from ...calls.control import control_of
from ...calls.outcomes import timeout_problem
from ...calls.runtime import Runtime
from ...calls.supervised_commands import InteractiveProcess, run_shielded
from ...core.envelope import Envelope, Problem, Warning_
from ...core.errors import Ending, Failure, SideEffects
from ...core.json_values import as_text
from ...core.limits import NS_PER_MS, ClockKind, Clocks, format_duration
from ...core.value_types import JsonObject, entity, field, replace, value
from ...net.tool_call import load_client
from ...supervise.client import REPORT_LIMIT_MS
from ...supervise.clock import monotonic_ns
from ...supervise.command_task import LOOKED_AT
from ...worker.context import CallListener, Scope, current_scope
from ._step_text import StepText
from .provider import StepCall, duration_ms

if TYPE_CHECKING:
    import mcp_types

    from ...net.mcp_client import ServerConversation
    from .ai_models import AiPart, AiServer

TOOL_TIMEOUT_MS = 60_000
# A server that hangs is cut off, and killed if it was started here.
LEAVE_LIMIT_S = 0.5
# Characters: the model pays for them again with every request.
RESULT_LIMIT = 200_000
# Characters in the result of a step.
TEXT_LIMIT = 1024 * 1024


@value
class _Tool:
    name: str
    own_name: str
    description: str
    input_schema: Mapping[str, Any]
    server: _Server | None = None  # None for a tool of the file


@entity
class _Server:
    name: str
    written: AiServer
    conversation: ServerConversation | None = None
    process: InteractiveProcess | None = None
    opened: AsyncExitStack = field(default_factory=AsyncExitStack)
    request_ids: list[str] = field(default_factory=list)


class AgentTools:
    def __init__(self, step: StepCall, ai: AiPart, call: Call, runtime: Runtime) -> None:
        self._step, self._ai, self._call, self._runtime = step, ai, call, runtime
        scope = current_scope.get()
        depth = 0 if scope is None else scope.depth + 1
        self._inside = Scope(call.bound.bell, depth, call.name, call, call=call)
        self._tools: dict[str, _Tool] = {}
        self._servers = [_Server(name, written) for name, written in ai.mcp_servers.items()]
        self._running: set[asyncio.Task[Any]] = set()
        self._stopping: list[asyncio.Future[None]] = []
        self.late_results: list[JsonObject] = []
        self.warnings: tuple[Warning_, ...] = ()
        self.survivors: list[dict[str, object]] = []
        self._is_prolonged = False
        self.has_left_doubt: bool = False  # a call failed and may have had side effects
        self.shown: StepText = StepText(step)

    @property
    def definitions(self) -> list[JsonObject]:
        return [
            {"name": each.name, "description": each.description, "input_schema": dict(each.input_schema)}
            for each in self._tools.values()
        ]

    @asynccontextmanager
    async def connected(self) -> AsyncIterator[None]:
        """Connect all servers at once and list their tools; afterwards stop all their processes. Raises Failure."""
        try:
            found = [await self._describe_own(name) for name in self._ai.tools]
            if self._servers:
                found += await self._connect_servers()
            self._tools = _name_apart(found)
            yield
        finally:
            await run_shielded(self._end())
            for server in self._servers:
                process = server.process
                if process is not None and process.report is not None:
                    judged = commands.judge(self._call, process.task, process.report)
                    self.survivors += judged.survivors
                    self.warnings += judged.warnings

    async def _connect_servers(self) -> list[_Tool]:
        client = await load_client(self._call)
        if client is None:
            raise Failure("CONNECT_FAILED", "loading the MCP client took too long")
        try:
            async with asyncio.TaskGroup() as group:
                opening = [group.create_task(self._open(server, client)) for server in self._servers]
        except BaseExceptionGroup as failed:
            raise failed.exceptions[0] from None
        return [tool for task in opening for tool in task.result()]

    async def _end(self) -> None:
        """Cancel the running tools, wait until they are gone, and leave the servers."""
        for asking in self._stopping:
            asking.cancel()
        for task in self._running:
            if not task.cancelling():
                task.cancel()
        if self._running:
            await asyncio.wait(self._running, timeout=(self._call.bound.grace_ms + REPORT_LIMIT_MS) / 1000)
        await asyncio.gather(*(server.opened.aclose() for server in self._servers), return_exceptions=True)

    # --- servers ------------------------------------------------------------------------------------------

    async def _describe_own(self, name: str) -> _Tool:
        tools = self._step.tools
        try:
            if tools is None:
                raise KeyError(name)
            tool = await tools.describe(name)
        except KeyError:
            raise Failure("STEP_INVALID", f"there is no tool {name!r} in `tools`") from None
        return _Tool(name, name, tool.description, tool.input_schema)

    async def _open(self, server: _Server, client: ModuleType) -> list[_Tool]:
        written = server.written
        talk: ServerConversation = client.ServerConversation(
            self._call.trace, on_log=self.shown.log, on_progress=self.shown.progress
        )
        server.conversation = talk
        if written.command is not None:
            argv = [written.command, *written.args]
            env = {name: as_text(value) for name, value in written.env.items() if value is not None}
            opening = self._runtime.open(self._call, argv, env=env, base_env=self._step.env, cwd=self._step.folder)
            server.process = await server.opened.enter_async_context(opening)
            transport = talk.over_pipes(server.process)
        else:
            headers = {name: as_text(value) for name, value in written.headers.items() if value is not None}
            transport = talk.over_http(str(written.url), {**self._call.trace.as_headers(), **headers})
        talking = asyncio.ensure_future(talk.talk(transport))
        server.opened.push_async_callback(_leave, talk, talking)
        bell, limits_s = self._call.bound.bell, []
        if bell is not None:
            limits_s.append(bell.remaining_ns(monotonic_ns()) / 1e9)
        if written.connect_timeout is not None:
            limits_s.append(duration_ms(written.connect_timeout, "ms") / 1000)
        waits: list[asyncio.Future[Any]] = [talk.listed, talking]
        await asyncio.wait(waits, timeout=min(limits_s, default=None), return_when=asyncio.FIRST_COMPLETED)
        if talk.listed.done():
            return list(_read_tools(server, talk.listed.result()))
        if not talking.done():
            raise Failure("CONNECT_FAILED", f"connecting the MCP server {server.name!r} took too long")
        if server.process is not None:
            await server.process.close(politely=False)  # which gives its report
        problem = talk.settled.result() if talk.settled.done() else None
        why = problem.message if isinstance(problem, Problem) else "it left"
        raise Failure("CONNECT_FAILED", f"the MCP server {server.name!r} cannot be used: {why}{self._describe(server)}")

    def _describe(self, server: _Server) -> str:
        report = None if server.process is None else server.process.report
        if server.process is None or report is None:
            return ""
        judged = commands.judge(self._call, server.process.task, report)
        if isinstance(judged.problem, Problem) and report.unstartable is not None:
            return f": {judged.problem.message}"
        stderr = str(judged.data.get("stderr", "")).strip() if isinstance(judged.data, dict) else ""
        return f": {stderr.splitlines()[-1][:300]}" if stderr else ""

    # --- calls --------------------------------------------------------------------------------------------

    def ask_to_stop(self, until_ns: int) -> None:
        """Ask the servers to end their calls early. The step's control asks the tools of the file."""
        within_ms = max(1, (until_ns - monotonic_ns()) // NS_PER_MS)
        for server in () if self._stopping else self._servers:
            if server.conversation is not None:
                asking = server.conversation.ask_to_stop(server.request_ids or [self._call.request_id], within_ms)
                self._stopping.append(asyncio.ensure_future(asking))

    async def call(self, name: str, arguments: Mapping[str, Any]) -> JsonObject:
        """Call a tool and return the reply for the model. Raises only a cancellation."""
        if self.is_winding_down():
            return self._failed_reply("not run: time is nearly up")
        reply = await self._call_tool(name, arguments)
        if self.is_winding_down():
            self.late_results.append({"tool": name, "output": reply["output"] if reply["ok"] else reply["error"]})
        return reply

    async def _call_tool(self, name: str, arguments: Mapping[str, Any]) -> JsonObject:
        tool = self._tools.get(name)
        task = asyncio.current_task()
        assert task is not None
        self._running.add(task)
        token = current_scope.set(self._inside)
        is_clear = False
        try:
            if tool is None:
                is_clear = True
                return self._failed_reply(f"there is no tool {name!r}")
            if tool.server is None:
                assert self._step.tools is not None
                envelope, output = await self._step.tools.call(tool.own_name, arguments)
            else:
                envelope, output = await self._call_on_server(tool, tool.server, arguments)
            is_clear = envelope.ok or envelope.meta.get("side_effects") == SideEffects.NONE
        except Failure as failure:
            return self._failed_reply(str(failure))
        except Exception as error:  # a bug of ours ends one call of a tool
            return self._failed_reply(f"{type(error).__name__}: {error}")
        finally:
            current_scope.reset(token)
            self._running.discard(task)
            self.has_left_doubt = self.has_left_doubt or not is_clear
        if envelope.ok:
            return {"ok": True, "output": _shorten(output), "remaining_ms": self.remaining_ms()}
        error_detail = envelope.error or {}
        text = as_text(output).strip() if output else ""
        stderr = envelope.data.get("stderr") if isinstance(envelope.data, dict) else None
        parts = [str(error_detail.get("message", "it failed")), text, str(stderr or "").strip()]
        return self._failed_reply("\n".join(part for part in parts if part))

    def _failed_reply(self, message: str) -> JsonObject:
        return {"ok": False, "error": _shorten(message), "remaining_ms": self.remaining_ms()}

    def is_winding_down(self) -> bool:
        return self._call.winding_down is not None

    def prolong_wind_down(self) -> None:
        """Give the model a whole wind-down for its last answer after tools that used theirs, once."""
        if (stop := self._call.winding_down) is not None and self.late_results and not self._is_prolonged:
            self._is_prolonged = True
            control_of(self._call).prolong_wind_down(monotonic_ns() + stop.until_ns - stop.at_ns)

    def remaining_ms(self) -> int | None:
        bell, winding_down, now_ns = self._call.bound.bell, self._call.winding_down, monotonic_ns()
        ends_ns = [] if bell is None else [bell.at_ns]
        if winding_down is not None:
            ends_ns.append(winding_down.until_ns)
        return max(0, min(ends_ns) - now_ns) // NS_PER_MS if ends_ns else None

    async def _call_on_server(self, tool: _Tool, server: _Server, arguments: Mapping[str, Any]) -> tuple[Envelope, Any]:
        written = server.written.timeout
        clocks = Clocks(timeout_ms=TOOL_TIMEOUT_MS if written is None else duration_ms(written, "ms"))
        call = self._runtime.begin(f"tool {tool.name}", {}, clocks, is_command=True)
        outputs: list[Any] = []
        server.request_ids.append(call.request_id)
        try:
            async with self._runtime.answering(call) as answering:
                answering.outcome = await self._wait_for_server(call, tool, server, arguments, outputs)
        finally:
            server.request_ids.remove(call.request_id)
        return answering.envelope, outputs[0] if outputs else None

    async def _wait_for_server(
        self, call: Call, tool: _Tool, server: _Server, arguments: Mapping[str, Any], outputs: list[Any]
    ) -> Outcome:
        assert server.conversation is not None
        bell = call.bound.bell
        remaining_ms = None if bell is None else bell.remaining_ms(monotonic_ns())
        if remaining_ms == 0:
            return Outcome(Ending.NOT_STARTED, timeout_problem(call, 0))
        call.cancellation.ending = Ending.CANCELLED
        asking = asyncio.ensure_future(server.conversation.call(tool.own_name, arguments, remaining_ms, call.trace))
        call.work = work = _ServerWork(asking)
        try:
            await asyncio.wait([asking], timeout=None if remaining_ms is None else remaining_ms / 1000)
        finally:
            if not asking.done():
                asking.cancel()
                await run_shielded(asyncio.wait([asking], timeout=LEAVE_LIMIT_S))
        if work.is_stopped:
            return Outcome(Ending.CANCELLED, wound_down_problem(call))
        if asking.cancelled() or not asking.done():
            fired = call.fired(ClockKind.TIMEOUT, monotonic_ns() - call.started_ns)
            message = f"the tool did not answer within {format_duration(fired.limit_ms)}, and was given up"
            return Outcome(Ending.CANCELLED, Problem("TIMEOUT", message, fired=fired))
        result = asking.result()
        outputs.append(server.conversation.output_of(result))
        if result.is_error:
            text = server.conversation.text_of(result).strip()
            return Outcome(Ending.FINISHED, Problem("TOOL_FAILED", text or "the tool failed"))
        return Outcome(Ending.FINISHED)


class _ServerWork(Work):
    def __init__(self, asking: asyncio.Future[Any]) -> None:
        self._asking = asking
        self.is_stopped = False

    def stop_unwound(self) -> None:
        self.is_stopped = self._asking.cancel()


async def _leave(talk: ServerConversation, talking: asyncio.Future[None]) -> None:
    talk.close()
    await asyncio.wait([talking], timeout=LEAVE_LIMIT_S)
    if not talking.done():
        talking.cancel()
        await asyncio.wait([talking], timeout=LEAVE_LIMIT_S)


def _read_tools(server: _Server, tools: list[mcp_types.Tool]) -> Iterator[_Tool]:
    """Yield the tools that the agent may call. Raises Failure for a missing one."""
    allowed = server.written.tools
    names = {tool.name for tool in tools}
    if len(names) < len(tools):
        twice = next(name for name in names if sum(tool.name == name for tool in tools) > 1)
        if allowed is None or twice in allowed:
            raise Failure("STEP_INVALID", f"the MCP server {server.name!r} has two tools called {twice!r}")
    if allowed is not None and (missing := sorted(set(allowed) - names)):
        raise Failure("STEP_INVALID", f"the MCP server {server.name!r} has no tool {missing[0]!r}")
    for tool in tools:
        if allowed is None or tool.name in allowed:
            schema = dict(tool.input_schema or {"type": "object", "properties": {}})
            yield _Tool(tool.name, tool.name, tool.description or "", schema, server)


def _name_apart(found: list[_Tool]) -> dict[str, _Tool]:
    """Return the tools by name. A name that several servers have begins with the server's."""
    counts = Counter(tool.own_name for tool in found)
    named: dict[str, _Tool] = {}
    for tool in found:
        prefix = f"{tool.server.name}_" if tool.server is not None and counts[tool.own_name] > 1 else ""
        # Every provider of models accepts such a name.
        name = re.sub("[^A-Za-z0-9_-]", "_", f"{prefix}{tool.own_name}")[:64]
        if name in named:
            raise Failure("STEP_INVALID", f"two tools would be called {name!r}: name the servers apart")
        named[name] = replace(tool, name=name)
    return named


def _shorten(output: Any) -> Any:
    """Return an output for the model: all of it, or its beginning and its end."""
    text = output if isinstance(output, str) else json.dumps(output, ensure_ascii=False)
    return output if len(text) <= RESULT_LIMIT else _cut_middle(text, RESULT_LIMIT)


def _cut_middle(text: str, limit: int) -> str:
    half = limit // 2
    return text if len(text) <= limit else f"{text[:half]}\n[{len(text) - limit} characters left out]\n{text[-half:]}"


# --- listening to the agent -----------------------------------------------------------------------------------


class AgentListener(CallListener):
    """Listener to one agent: keeps its text, and answers its tool calls."""

    def __init__(self, tools: AgentTools, on_begin: Callable[[], None]) -> None:
        """`on_begin` is called before the model is asked for the first time."""
        self.tools, self._on_begin = tools, on_begin
        self.shown: StepText = tools.shown
        self._text = ""
        self._request_began = 0
        self.tool_calls: int = 0
        self._created_ns, self._began_ns = monotonic_ns(), 0
        self.details: JsonObject = {}  # the model and its usage so far

    @property
    def has_begun(self) -> bool:
        return self._began_ns > 0

    @property
    def startup_ms(self) -> int:
        """Return how long servers and the model's process took to start; so far, if they have not."""
        return ((self._began_ns or monotonic_ns()) - self._created_ns) // NS_PER_MS

    @property
    def text(self) -> str:
        """Return the beginning and the end of the model's text."""
        return _cut_middle(self._text, TEXT_LIMIT)

    @property
    def size(self) -> int:
        return len(self._text)

    def wrote(self, text: str) -> None:
        self._text += text  # bounded by CONVERSATION_LIMIT of the agent
        self.shown.write(text)

    def ask(self, question: str, value: object) -> Coroutine[Any, Any, object]:
        match question, value:
            case "tool", {"name": str(name), "arguments": dict(arguments)}:
                self.tool_calls += 1
                self.shown.end_line()
                self.shown.log("info", f"calls {name}")
                if (usage := self.details.get("usage")) is not None:
                    usage["tool_calls"] = max(usage["tool_calls"], self.tool_calls)
                return self.tools.call(name, arguments)
            case "request", dict(details):
                return self._handle_request(details)
        return super().ask(question, value)

    async def _handle_request(self, details: JsonObject) -> JsonObject:
        """Record a request; with `again`, the text since the last one is void. Return the time left in a wind-down."""
        if not self.has_begun:
            self._began_ns = monotonic_ns()
            self._on_begin()
        self.shown.end_line()
        if details.pop("again", False):
            if len(self._text) > self._request_began:
                self.shown.log("info", "the answer was broken off, and is asked for again")
            self._text = self._text[: self._request_began]
        self._request_began = len(self._text)
        self.details.update(details)
        self.tools.prolong_wind_down()
        return {"stops_in_ms": self.tools.remaining_ms() if self.tools.is_winding_down() else None}


class RequestListener(CallListener):
    """Listener to a model without tools."""

    def ask(self, question: str, value: object) -> Coroutine[Any, Any, object]:
        return asyncio.sleep(0) if question == "request" else super().ask(question, value)


class AgentWork(Work):
    """The agent of a step, which winds down and extends with it."""

    needs_end = True

    def __init__(self, call: Call, tools: AgentTools, listener: AgentListener) -> None:
        self._call, self._tools, self._listener = call, tools, listener
        self._starting, self._part = call.work, call

    @property
    def is_queued(self) -> bool:
        """Return whether its processes and servers are still starting."""
        return not self._listener.has_begun

    def begin(self, part: Call) -> None:
        part.work, self._part = self._starting, part

    @property
    def _inner(self) -> Work:
        work = self._starting if self._part is self._call else self._part.work
        assert work is not None, "an attempt has work"
        return work

    def kept_ms(self, left_ms: int) -> int:
        return left_ms // 2  # for the model's last answer

    def wind_down(self, until_ns: int) -> None:
        kept_ms = self.kept_ms(max(0, until_ns - monotonic_ns()) // NS_PER_MS)
        self._tools.ask_to_stop(until_ns - kept_ms * NS_PER_MS)
        self._part.winding_down = self._call.winding_down
        self._inner.wind_down(until_ns)

    def stop_unwound(self) -> None:
        self._inner.stop_unwound()

    def move_bell(self) -> bool:
        return self._inner.move_bell()

    async def look(self) -> WorkView:
        return WorkView(stdout=self._listener.text[-LOOKED_AT:], written=self._listener.size)
