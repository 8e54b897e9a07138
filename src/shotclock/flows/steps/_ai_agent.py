"""The agent of an `ai` step, in a process of its own. Its caller runs the tools.

At the soft limit, an unfinished answer is cut and the model is asked to answer with what it has; running tools may end,
and no further one is called. A failed request is repeated, or sent to the next model, with the whole conversation, so
that no tool runs twice.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import resource
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from decimal import Decimal
from itertools import chain, count
from typing import Any

import httpx2
from pydantic_ai import Agent, StructuredDict, ToolOutput, exceptions
from pydantic_ai.capabilities import PrepareOutputTools
from pydantic_ai.messages import (
    ModelMessage,
    ModelRequest,
    ModelResponse,
    PartDeltaEvent,
    PartStartEvent,
    TextPart,
    TextPartDelta,
    UserPromptPart,
)
from pydantic_ai.models import Model
from pydantic_ai.settings import ModelSettings
from pydantic_ai.tools import RunContext, ToolDefinition
from pydantic_ai.toolsets import AbstractToolset, ToolsetTool
from pydantic_ai.usage import RunUsage, UsageLimits
from pydantic_core import SchemaValidator, core_schema

from ...core.errors import Failure
from ...core.json_values import read_json
from ...core.limits import format_duration
from ...core.value_types import JsonObject
from ...worker.context import Context
from ._ai_client import LONGEST_REQUEST_S, AnswerTooLong, build_model
from .ai_models import as_object, find_value_flaw
from .http_message import causes_of
from .provider import Retry

# Between two signs of life during a tool call or a pause, and between two checks of the soft limit.
HEARTBEAT_S = 0.05
# For the cancellation of a tool call to reach its caller.
LEAVE_LIMIT_S = 1.0
# Corrections of an invalid answer or of invalid arguments of a tool.
CORRECTIONS = 2
# A request may take this much longer than the remaining time, so that the call's own clock ends it and is named.
LATE_REQUEST_S = 1.0
# Per agent.
MOST_TOOLS_AT_ONCE = 8
# Characters, with tool calls and results. No model accepts so much.
CONVERSATION_LIMIT = 16_000_000
# The size of each part beside its text: a model can also call tools endlessly.
PART_SIZE = 2_000
# Bytes of this process, where an SDK keeps more than the limits above. Its modules take 80 MiB.
MEMORY_LIMIT = 1024**3
# Characters of a provider's message.
MESSAGE_SHOWN = 2_000

WIND_DOWN = (
    "Time is nearly up: {left} left. Call no more tools. Answer now, with what you have; say what you could not finish."
)
NOT_RUN = "not run: time is nearly up. Answer now, with what you have."

_CODES: tuple[tuple[tuple[type[BaseException], ...], str], ...] = (
    ((exceptions.ModelAuthenticationError,), "MODEL_AUTH_FAILED"),
    ((exceptions.ModelRateLimitError,), "MODEL_RATE_LIMITED"),
    ((exceptions.ModelQuotaExceededError,), "MODEL_QUOTA_EXCEEDED"),
    (
        (exceptions.ModelRequestRejectedError, exceptions.ContentFilterError, exceptions.UserError),
        "MODEL_REQUEST_REFUSED",
    ),
    (
        (
            exceptions.ModelHTTPError,
            exceptions.ModelUnavailableError,
            exceptions.ModelServerError,
            exceptions.ModelConnectionError,
            exceptions.ModelRequestTimeout,
            httpx2.HTTPError,
            OSError,
        ),
        "MODEL_UNAVAILABLE",
    ),
    # Of the first only invalid JSON is left here; endless nesting is a RecursionError.
    (
        (exceptions.ModelAPIError, exceptions.UnexpectedModelBehavior, ValueError, RecursionError, MemoryError),
        "MODEL_ANSWER_INVALID",
    ),
)
_UNREACHED = (httpx2.HTTPError, httpx2.InvalidURL, OSError)
_STATUSES = {
    401: "MODEL_AUTH_FAILED",
    402: "MODEL_QUOTA_EXCEEDED",
    403: "MODEL_AUTH_FAILED",
    408: "MODEL_UNAVAILABLE",
    429: "MODEL_RATE_LIMITED",
}
_FAILURES = tuple(kind for kinds, _ in _CODES for kind in kinds)
_TOKENS = ("input_tokens", "output_tokens", "total_tokens")
# The message is the only difference to other errors of pydantic-ai's class.
_NEVER_FITS = "Exceeded maximum output retries"
# The text in the parts of an answer, and in their later additions.
_SIZED = ("content", "args", "tool_name", "content_delta", "args_delta", "tool_name_delta")
_LIMIT_NAME = re.compile("(request|tool_calls|input_tokens|output_tokens|total_tokens|cost)_limit")


async def run_agent(ctx: Context, task: JsonObject) -> JsonObject:
    """Run an agent and return its answer. Bounds the memory of this process. Raises Failure."""
    hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
    most = MEMORY_LIMIT if hard == resource.RLIM_INFINITY else min(MEMORY_LIMIT, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (most, hard))
    return await AgentRun(ctx, task, [build_model(*each) for each in task["models"]]).answer()


class _CutShort(Exception):
    """A request that was cut at the soft limit. Its text is kept."""


class _Truncated(ConnectionError):
    """A stream that ended before the answer did."""


class _Silent(ConnectionError):
    """A model that was silent for too long while another one is left."""


class AgentRun:
    """One run of an agent: one conversation, with its models one after the other."""

    def __init__(self, ctx: Context, task: JsonObject, models: list[Model], *, tells_end: bool = True) -> None:
        """`tells_end`: every answer of the model ends with its finish reason, as over HTTP."""
        self._ctx, self._task, self._models, self._tells_end = ctx, task, models, tells_end
        self._history: list[ModelMessage] | None = None
        self._usage = RunUsage()
        self._is_usage_known = True
        self._retries = 0
        self._is_winding_down = False
        self._heard_at = 0.0  # when the model last sent anything, in loop time
        self._stops_at: float | None = None  # the end of the wind-down, which may be before the deadline
        self._waiting = len(models)  # models left, including the current one
        self._corrected = 0  # answers requested again because they did not fit the schema
        self._failed: list[dict[str, object]] = []
        self._size = 0  # of the current answer
        self._kept = 0  # of the conversation before it
        self._requests = 0
        self._tool_calls = 0  # failed ones included
        limits = task["limits"]
        cost = limits.get("cost")
        self._most_requests: int | None = limits.get("requests")
        self._most_tool_calls: int | None = limits.get("tool_calls")
        self._limits = UsageLimits(
            request_limit=None,  # requests and tool calls are counted here: pydantic-ai does not count failed ones
            input_tokens_limit=limits.get("input_tokens"),
            output_tokens_limit=limits.get("output_tokens"),
            total_tokens_limit=limits.get("total_tokens"),
            cost_limit=None if cost is None else Decimal(str(cost)),
        )
        self._is_wrapped = False
        names = {each["name"] for each in task["tools"]}
        candidates = chain(["final_result"], (f"final_result_{number}" for number in count(2)))
        self._output_tool = next(name for name in candidates if name not in names)
        self._agent = self._make_agent()

    def _make_agent(self) -> Agent[None, Any]:
        written = self._task.get("output_schema")
        if written is None:
            return self._build(str)
        try:
            schema, self._is_wrapped = as_object(written)
        except (ValueError, RecursionError) as error:
            raise Failure("STEP_INVALID", f"a model cannot be asked for this output_schema: {error}") from None

        async def give_schema(ctx: RunContext[None], tools: list[ToolDefinition]) -> list[ToolDefinition]:
            return [replace(tool, parameters_json_schema=schema) for tool in tools]

        # Not as the schema of its type: pydantic does not support references there.
        answer = ToolOutput(StructuredDict({"type": "object"}, name="answer"), name=self._output_tool)
        agent = self._build(answer, PrepareOutputTools(give_schema))
        agent.output_validator(self._check_output)
        return agent

    def _check_output(self, output: JsonObject) -> JsonObject:
        """Request corrections of an invalid answer, at most CORRECTIONS; the caller reports a remaining flaw."""
        if self._is_wrapped and "result" not in output:
            raise exceptions.ModelRetry("give the answer as `result`")
        if self._corrected < CORRECTIONS and not self._ctx.stopping and self._may_send:
            flaw = find_value_flaw(self._task["output_schema"], output["result"] if self._is_wrapped else output)
            if flaw is not None:
                self._corrected += 1
                raise exceptions.ModelRetry(f"the answer does not fit its schema: {flaw[:MESSAGE_SHOWN]}")
        return output

    def _build(self, output: Any, *capabilities: Any) -> Agent[None, Any]:
        return Agent(
            output_type=output,
            instructions=self._task.get("system_prompt"),
            toolsets=[_Tools(self._ctx, self._task["tools"], self._count_result)],
            retries=CORRECTIONS,
            name="shotclock",
            deps_type=type(None),
            capabilities=capabilities,
        )

    async def answer(self) -> JsonObject:
        """Return the model's answer. Raises Failure with the usage in its data."""
        for model in self._models:
            try:
                return await self._ask(model)
            except Failure as failure:
                failure.data = self._describe(model.model_name)
                self._waiting -= 1
                if failure.code in ("LIMIT_REACHED", "PRECONDITION") or not self._waiting or not self._may_send:
                    raise
                self._failed.append({"model": model.model_name, "code": failure.code, "message": str(failure)})
                await self._begin_again()
        raise AssertionError("there is a model")

    async def _ask(self, model: Model) -> JsonObject:
        """Ask one model, and retry after temporary failures. Raises Failure."""
        retry, attempts = Retry.model_validate(self._task["retry"]), 1
        while True:
            try:
                return await self._converse(model)
            except _CutShort:  # the same request is sent again, with the request to finish
                if self._most_requests is not None:
                    self._most_requests += 1
                continue
            except exceptions.UsageLimitExceeded as error:
                named = _LIMIT_NAME.search(str(error))
                raise self._limit_reached("requests" if named is None else named[1]) from None
            except _FAILURES as error:
                failure = self._make_failure(error)
                pause_s = self._pause_s(retry, attempts, failure)
                is_over = attempts > retry.max or pause_s is None or self._ctx.stopping or not self._may_send
                # A silent model has used its time, and a retry would only wait longer.
                is_over = is_over or isinstance(error, _Silent)
                if failure.code not in ("MODEL_RATE_LIMITED", "MODEL_UNAVAILABLE") or is_over:
                    raise failure from error
            attempts += 1
            self._retries += 1
            assert pause_s is not None
            await self._rest(pause_s)
            await self._begin_again()

    async def _converse(self, model: Model) -> JsonObject:
        """Continue the conversation to its end. Raises exceptions of pydantic-ai and the SDKs."""
        going = self._agent.iter(
            self._task["prompt"] if self._history is None else None,
            message_history=self._history,
            model=model,
            model_settings=self._settings,
            usage=self._usage,
            usage_limits=self._limits,
        )
        is_void = is_cut = False
        response: ModelResponse | None = None
        async with going as run:
            try:
                async for node in run:
                    if Agent.is_model_request_node(node):
                        self._count_request()
                        details = self._describe(model.model_name)
                        # A model that called no tool has answered: this request is for a correction.
                        details["again"] = response is not None and not self._find_calls(response)
                        self._read_time(await self._ctx.link.ask("request", details))
                        if self._ctx.stopping:
                            self._wind_down(node.request.parts)
                        async with self._watched(), node.stream(run.ctx) as stream:
                            async for event in stream:
                                self._handle_event(event)
                            response = stream.response
                            self._check_end(response)
                        self._kept += self._size
                        self._check_limits(model, response)
                    elif Agent.is_call_tools_node(node):
                        self._count_tool_calls(node.model_response)
                assert run.result is not None
                response, output = run.result.response, run.result.output
                output = output["result"] if self._is_wrapped else output
            except exceptions.UnexpectedModelBehavior as error:
                if response is None or not str(error).startswith(_NEVER_FITS):
                    raise
                output = _read_answer(response)  # the caller reports its flaw
            except _Truncated:
                is_void = True
                raise
            except _CutShort:
                is_cut = True
                raise
            finally:
                self._history = _without_unfinished(run.all_messages(), is_void=is_void, is_cut=is_cut) or None
        finish = response.finish_reason
        return {
            "output": output,
            "partial": self._is_winding_down or finish == "length",
            **self._describe(response.model_name or model.model_name),
            "finish_reason": finish,
        }

    @property
    def _may_send(self) -> bool:
        return self._most_requests is None or self._requests < self._most_requests

    def _count_request(self) -> None:
        if not self._may_send:
            raise self._limit_reached("requests")
        self._requests += 1
        self._size = 0

    def _count_tool_calls(self, response: ModelResponse) -> None:
        requested = self._find_calls(response)
        if self._most_tool_calls is not None and self._tool_calls + requested > self._most_tool_calls:
            raise self._limit_reached("tool_calls")
        self._tool_calls += requested

    def _find_calls(self, response: ModelResponse) -> int:
        """Count the tool calls in an answer, without the output tool."""
        return sum(part.tool_name != self._output_tool for part in response.tool_calls)

    def _count_result(self, result: object) -> None:
        """Count the result of a tool, which is sent with every further request."""
        self._kept += PART_SIZE + len(str(result))
        if self._kept > CONVERSATION_LIMIT:
            raise self._limit_reached("characters")

    def _check_end(self, response: ModelResponse) -> None:
        """Raise _Truncated for an answer without its provider's finish reason; `finish_reason` may be a guess."""
        reason = (response.provider_details or {}).get("finish_reason")
        is_ended = reason or response.finish_reason == "content_filter" or response.state == "suspended"
        if self._tells_end and not is_ended:
            raise _Truncated("the connection was lost before the model had ended its answer")

    def _read_time(self, reply: object) -> None:
        if isinstance(reply, dict) and reply.get("stops_in_ms") is not None:
            self._stops_at = asyncio.get_running_loop().time() + reply["stops_in_ms"] / 1000

    def _left_s(self) -> float | None:
        remaining_ms = self._ctx.remaining_ms()
        left_s = [] if remaining_ms is None else [remaining_ms / 1000]
        if self._stops_at is not None:
            left_s.append(max(0.0, self._stops_at - asyncio.get_running_loop().time()))
        return min(left_s, default=None)

    @contextlib.asynccontextmanager
    async def _watched(self) -> AsyncIterator[None]:
        """Watch a request. Raises _CutShort at the soft limit, _Silent after too long a silence."""
        self._heard_at = asyncio.get_running_loop().time()
        reasons: list[Exception] = []
        try:
            async with asyncio.timeout(None) as patience:
                watching = asyncio.ensure_future(self._watch(self._most_silence_s(), patience, reasons))
                try:
                    yield
                finally:
                    watching.cancel()
        except TimeoutError:
            if reasons:
                raise reasons[0] from None
            raise

    async def _watch(self, silence_s: float | None, patience: asyncio.Timeout, reasons: list[Exception]) -> None:
        loop = asyncio.get_running_loop()
        while not reasons:
            await asyncio.sleep(HEARTBEAT_S)
            if self._ctx.stopping and not self._is_winding_down:  # a request to finish is not cut
                reasons.append(_CutShort())
            elif silence_s is not None and loop.time() - self._heard_at >= silence_s:
                silence = format_duration(int(silence_s * 1000))
                reasons.append(_Silent(f"it was silent for {silence}, and another model was asked"))
            elif silence_s is not None:
                self._ctx.write("")  # the idle limit of the step is for the last model; this one is watched here
        patience.reschedule(loop.time())

    def _most_silence_s(self) -> float | None:
        """Return how long a model may be silent; None for the last one, which the step's clocks end."""
        if self._waiting < 2 or not self._may_send:
            return None
        idle_ms: int | None = self._task.get("idle_ms")
        left_s = self._left_s()
        shares = [idle_ms / 1000] if idle_ms else []
        return min([*shares, *([] if left_s is None else [left_s / self._waiting])], default=None)

    def _settings(self, ctx: RunContext[None]) -> ModelSettings:
        """Return settings without the SDK's retries, bounded by the call's clock."""
        left_s = self._left_s()
        timeout_s = LONGEST_REQUEST_S if left_s is None else left_s + LATE_REQUEST_S
        settings = ModelSettings(max_retries=0, timeout=timeout_s)
        if self._is_winding_down and self._task["tools"]:
            settings["tool_choice"] = "none"
        return settings

    def _wind_down(self, parts: Any) -> None:
        if not self._is_winding_down:
            self._is_winding_down = True
            left_s = self._left_s()
            left = "little time is" if left_s is None else f"{format_duration(max(1, int(left_s * 1000)))} is"
            parts.append(UserPromptPart(WIND_DOWN.format(left=left)))

    def _handle_event(self, event: object) -> None:
        text = ""
        if isinstance(event, PartStartEvent) and isinstance(event.part, TextPart):
            text = event.part.content
        elif isinstance(event, PartDeltaEvent) and isinstance(event.delta, TextPartDelta):
            text = event.delta.content_delta
        self._heard_at = asyncio.get_running_loop().time()
        self._ctx.write(text)
        self._size += _size_of(event)
        if self._kept + self._size > CONVERSATION_LIMIT:
            raise AnswerTooLong(f"its answer is longer than {CONVERSATION_LIMIT} characters, and was given up")

    def _check_limits(self, model: Model, response: ModelResponse) -> None:
        """Raise Failure where a limit cannot be checked: no reported tokens, or no known price."""
        if not response.usage.total_tokens:
            self._is_usage_known = False
            limited = [name for name in (*_TOKENS, "cost") if self._task["limits"].get(name) is not None]
            if limited:
                message = f"{model.model_name} reports no usage, so `limits.{limited[0]}` cannot be checked"
                raise Failure("PRECONDITION", message, suggestion="limit `requests` instead")
        if self._limits.cost_limit is not None and self._usage.cost is None:
            message = f"no price of {model.model_name} is known, so `limits.cost` cannot be watched"
            raise Failure("PRECONDITION", message, suggestion="limit the tokens instead")

    # --- failures -----------------------------------------------------------------------------------------

    def _limit_reached(self, which: str) -> Failure:
        most = CONVERSATION_LIMIT if which == "characters" else self._task["limits"].get(which)
        message = f"the agent has reached its limit of {most} {which.replace('_', ' ')}"
        return Failure("LIMIT_REACHED", message, context={"limit": which, "most": most})

    def _make_failure(self, error: BaseException) -> Failure:
        causes = list(causes_of(error))
        # An SDK reports it as a lost connection.
        error = next((each for each in causes if isinstance(each, AnswerTooLong)), error)
        code = next(code for kinds, code in _CODES if isinstance(error, kinds))
        message = str(error) or type(error).__name__
        reasons = [str(each) for each in causes[1:] if isinstance(each, _UNREACHED) and str(each)]
        if isinstance(error, exceptions.ModelConnectionError) and reasons:  # SDKs leave out why it was not reached
            message = f"{message.rstrip('.')}: {reasons[0]}"
        if isinstance(error, MemoryError):
            message = f"its answer does not fit into {MEMORY_LIMIT} bytes of memory, and was given up"
        context: dict[str, object] = {"exception": type(error).__name__}
        if isinstance(error, exceptions.ModelHTTPError):
            context["status"] = error.status_code
            if code == "MODEL_UNAVAILABLE" and 400 <= error.status_code < 500:  # pydantic-ai has no class for it
                code = _STATUSES.get(error.status_code, "MODEL_REQUEST_REFUSED")
        retry_after = getattr(error, "retry_after", None)
        wait_ms = None if retry_after is None else max(0, int(retry_after * 1000))
        return Failure(code, message[:MESSAGE_SHOWN], context=context, retry_after_ms=wait_ms)

    def _pause_s(self, retry: Retry, attempts: int, failure: Failure) -> float | None:
        """Return the pause before the next attempt; None where no time would be left."""
        pause_s = retry.backoff.pause_ms(attempts, failure.retry_after_ms or 0) / 1000
        left_s = self._left_s()
        return None if left_s is not None and left_s <= pause_s else pause_s

    async def _rest(self, pause_s: float) -> None:
        """Wait with signs of life, at most until the soft limit."""
        loop = asyncio.get_running_loop()
        until = loop.time() + pause_s
        while (left_s := until - loop.time()) > 0 and not self._ctx.stopping:
            await asyncio.sleep(min(HEARTBEAT_S, left_s))
            self._ctx.write("")

    async def _begin_again(self) -> None:
        await self._ctx.link.ask("request", {"again": True, "retries": self._retries})

    def _describe(self, model: str) -> JsonObject:
        used, is_known = self._usage, self._is_usage_known and self._usage.total_tokens > 0
        usage: JsonObject = {
            "requests": self._requests,
            "tool_calls": self._tool_calls,
            **{name: getattr(used, name) if is_known else None for name in _TOKENS},
        }
        if used.cost is not None and is_known:
            usage["cost"] = float(used.cost)
        details: JsonObject = {"model": model, "usage": usage}
        if self._retries:
            details["retries"] = self._retries
        if self._failed:
            details["failed_models"] = list(self._failed)
        return details


def _without_unfinished(messages: list[ModelMessage], *, is_void: bool, is_cut: bool) -> list[ModelMessage]:
    """Return the conversation up to the unanswered request, with the text of an answer that was cut."""
    last = messages[-1] if messages else None
    if is_void and isinstance(last, ModelResponse):
        messages = messages[:-1]
    while messages and isinstance(messages[-1], ModelResponse) and messages[-1].state != "complete":
        messages = messages[:-1]
    if is_cut and isinstance(last, ModelResponse) and last.text:
        return [*messages, replace(last, parts=[TextPart(last.text)], state="complete"), ModelRequest(parts=[])]
    return messages


def _read_answer(response: ModelResponse) -> Any:
    answer = response.tool_calls[0].args if response.tool_calls else response.text
    text = answer if isinstance(answer, str) else json.dumps(answer)
    try:
        return read_json(text).value
    except ValueError:  # also for JSON that is nested too deeply
        return text


def _size_of(event: object) -> int:
    size, part = 0, getattr(event, "delta", None)
    if isinstance(event, PartStartEvent):
        size, part = PART_SIZE, event.part
    return size + sum(len(str(getattr(part, name, None) or "")) for name in _SIZED)


class _Tools(AbstractToolset[None]):
    """The tools of the agent, which its caller runs."""

    def __init__(self, ctx: Context, tools: list[JsonObject], count: Callable[[object], None]) -> None:
        """`count` is called with each result, and raises where the conversation is full."""
        self._ctx, self._count = ctx, count
        self._turns = asyncio.Semaphore(MOST_TOOLS_AT_ONCE)
        arguments = SchemaValidator(core_schema.dict_schema(keys_schema=core_schema.str_schema()))
        self._tools = {
            each["name"]: ToolsetTool[None](
                toolset=self,
                tool_def=ToolDefinition(
                    name=each["name"],
                    description=each["description"] or None,
                    parameters_json_schema=each["input_schema"],
                ),
                max_retries=CORRECTIONS,
                args_validator=arguments,
            )
            for each in tools
        }

    @property
    def id(self) -> str | None:
        return "shotclock"

    async def get_tools(self, ctx: RunContext[None]) -> dict[str, ToolsetTool[None]]:
        return self._tools

    async def call_tool(self, name: str, tool_args: JsonObject, ctx: RunContext[None], tool: ToolsetTool[None]) -> Any:
        """Call a tool. Raises ToolFailed for the model, and Failure where the conversation is full."""
        async with self._turns:
            result = await self._ask_for(name, tool_args)
        self._count(result)
        return result

    async def _ask_for(self, name: str, tool_args: JsonObject) -> Any:
        if self._ctx.stopping:
            raise exceptions.ToolFailed(NOT_RUN)
        asking = asyncio.ensure_future(self._ctx.link.ask("tool", {"name": name, "arguments": tool_args}))
        try:
            while not (await asyncio.wait([asking], timeout=HEARTBEAT_S))[0]:
                # The tool has its own clock, and the model counts as alive.
                self._ctx.write("")
        finally:
            if not asking.done():
                asking.cancel()
                await asyncio.wait([asking], timeout=LEAVE_LIMIT_S)
        try:
            reply = asking.result()
        except Failure as failure:
            raise exceptions.ToolFailed(str(failure)) from None
        left_ms = reply["remaining_ms"]
        if not reply["ok"]:
            left = "no time limit" if left_ms is None else f"{format_duration(left_ms)} of your time are left"
            raise exceptions.ToolFailed(f"{reply['error']}\n({left})")
        return reply["output"] if left_ms is None else {"result": reply["output"], "remaining_ms": left_ms}
