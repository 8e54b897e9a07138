"""One request of a client, and the client of the call: it reads the log of the function, and answers its questions.

An older client gets a request while its call runs. One of the 2026 revision gets `input_required` as the answer,
and repeats its request with `inputResponses` and the `requestState` that names the paused function. Meanwhile the
function waits in its worker: its work is not repeated. Waiting stops the limits of the call, not the
deadline of its caller.

A remaining time in `_meta` that cannot be read is only a hint, and ignored with a warning; an option that cannot be
read is refused.
"""

from __future__ import annotations

import asyncio
import secrets
from collections import deque
from collections.abc import Coroutine, Mapping
from contextlib import suppress
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from mcp.server.connection import Connection, allowed_log_levels
from mcp.server.lowlevel import Server
from mcp.shared.exceptions import MCPError, NoBackChannelError
from mcp.shared.message import ServerMessageMetadata
from mcp_types import (
    INVALID_PARAMS,
    CreateMessageRequest,
    CreateMessageResult,
    ElicitCompleteNotification,
    ElicitCompleteNotificationParams,
    ElicitRequest,
    ElicitResult,
    EmptyResult,
    ListRootsRequest,
    ListRootsResult,
    LoggingMessageNotification,
    LoggingMessageNotificationParams,
    SetLevelRequestParams,
)
from mcp_types.version import MODERN_PROTOCOL_VERSIONS
from pydantic import BaseModel, ValidationError

from ...calls.call import Call
from ...calls.control import control_of
from ...calls.principal import Principal
from ...core.errors import Failure
from ...core.limits import format_duration
from ...core.value_types import JsonObject
from ...supervise.clock import monotonic_ns
from ...worker.client_forms import check_capabilities
from ...worker.context import ASK_LIMIT_MS, LOG_LEVELS, URL_COMPLETED, Caller, check_question
from ._listing import Context
from ._results import REMAINING
from ._tools import LAST_WORD_S, ProgressReports

MOST_UNSENT = 200  # log messages of a call that the client has not read yet; further ones are dropped and counted
FIRST_LEVEL = "info"  # of an older client that has set none
# The requests that `input_required` may answer.
PAUSABLE = frozenset({"tools/call", "prompts/get", "resources/read"})


class QuestionKind(NamedTuple):
    request: type[Any]
    result: type[BaseModel]


KINDS = {
    "elicitation/create": QuestionKind(ElicitRequest, ElicitResult),
    "sampling/createMessage": QuestionKind(CreateMessageRequest, CreateMessageResult),
    "roots/list": QuestionKind(ListRootsRequest, ListRootsResult),
}


class LogLevels:
    """The levels that older clients have set."""

    def __init__(self) -> None:
        self._levels: WeakKeyDictionary[Connection, str] = WeakKeyDictionary()

    def offer(self, server: Server[Any]) -> None:
        async def set_level(ctx: Context, params: SetLevelRequestParams) -> EmptyResult:
            self._levels[ctx.session._connection] = params.level
            return EmptyResult()

        server.add_request_handler("logging/setLevel", SetLevelRequestParams, set_level)

    def wanted(self, ctx: Context) -> frozenset[str]:
        if ctx.protocol_version in MODERN_PROTOCOL_VERSIONS:
            return frozenset(allowed_log_levels(ctx.protocol_version, (ctx.params or {}).get("_meta")))
        lowest = self._levels.get(ctx.session._connection, FIRST_LEVEL)
        return frozenset(LOG_LEVELS[LOG_LEVELS.index(lowest) :])


class ClientQuestion(NamedTuple):
    request: JsonObject
    answer: asyncio.Future[Any]


class ClientLink:
    """The present request of the client of one call."""

    def __init__(self, levels: LogLevels) -> None:
        self.progress: ProgressReports | None = None
        self.call: Call | None = None
        self.asked: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Done once there is a question for `input_required`."""
        self._levels = levels
        self._ctx: Context | None = None
        self._wanted: frozenset[str] = frozenset()
        self._given: JsonObject = {}
        self._questions: dict[str, ClientQuestion] = {}
        self._url_ids: dict[str, str] = {}
        """Of the URLs that an older client was asked to open, by the name of the question."""
        self._unsent: deque[tuple[str, str, str | None]] = deque()
        self._dropped = 0
        self._sending: asyncio.Task[None] | None = None
        self._waits, self._waiting_since_ns, self._waited_ns = 0, 0, 0

    def attach(self, ctx: Context, progress: ProgressReports | None) -> None:
        """Use this request from now on, with the answers that it brings."""
        self._ctx, self.progress, self._wanted = ctx, progress, self._levels.wanted(ctx)
        given = dict(responses_in(ctx))
        for name, question in self._questions.items():
            if name in given and not question.answer.done():
                question.answer.set_result(given.pop(name))
        self._given = given
        self.asked = asyncio.get_running_loop().create_future()
        self._send_log()

    async def detach(self) -> None:
        """Send the last messages before the answer to the request."""
        if self._sending is not None:
            await asyncio.wait([self._sending], timeout=LAST_WORD_S)
        if self.progress is not None:
            await self.progress.finish()

    @property
    def unread(self) -> int:
        """Return how many log messages the client has not got, and does not get once this is abandoned."""
        return self._dropped + len(self._unsent)

    def abandon(self) -> None:
        """Send nothing more: the request has its answer, or the client has left."""
        self._ctx = None
        if self._sending is not None:
            self._sending.cancel()
        if self.progress is not None:
            self.progress.abandon()

    def note_progress(self, done: float, total: float | None, message: str | None) -> None:
        if self.progress is not None:
            self.progress.note(done, total, message)

    # --- log ------------------------------------------------------------------------------------------

    def log(self, level: str, message: str, logger: str | None) -> None:
        if level not in self._wanted:
            return
        if len(self._unsent) >= MOST_UNSENT:
            self._dropped += 1
        else:
            self._unsent.append((level, message, logger))
            self._send_log()

    def _send_log(self) -> None:
        if self._unsent and self._sending is None and self._ctx is not None:
            self._sending = asyncio.get_running_loop().create_task(self._send(self._ctx))

    async def _send(self, ctx: Context) -> None:
        try:
            with suppress(Exception):  # the client has left
                while self._unsent or self._dropped:
                    lost = 0 if self._unsent else self._dropped
                    note = "warning", f"{lost} messages were dropped: the client reads slowly", None
                    level, message, logger = note if lost else self._unsent[0]
                    params = LoggingMessageNotificationParams(level=level, data=message, logger=logger)  # type: ignore[arg-type]
                    await ctx.session.send_notification(LoggingMessageNotification(params=params), ctx.request_id)
                    self._dropped -= lost
                    if not lost:
                        self._unsent.popleft()
        finally:
            self._sending = None

    # --- questions ------------------------------------------------------------------------------------

    @property
    def is_asking(self) -> bool:
        """Return whether a question waits for the client to repeat its request."""
        return any(not question.answer.done() for question in self._questions.values())

    @property
    def is_waiting(self) -> bool:
        return self._waits > 0

    @property
    def waited_ns(self) -> int:
        """Return how long the call has waited for its client."""
        return self._waited_ns + (monotonic_ns() - self._waiting_since_ns if self._waits else 0)

    def input_requests(self) -> JsonObject:
        return {name: each.request for name, each in self._questions.items() if not each.answer.done()}

    def refuse(self, failure: Failure) -> None:
        for question in self._questions.values():
            if not question.answer.done():
                question.answer.set_exception(failure)

    def ask(self, asked: Mapping[str, Any]) -> Coroutine[Any, Any, JsonObject]:
        """Return the client's answer. Raises Failure."""
        if asked["method"] == URL_COMPLETED:
            return self._note_completed(asked["name"])
        return self._ask(asked["name"], asked["method"], asked["params"])

    async def _ask(self, name: str, method: str, params: JsonObject) -> JsonObject:
        ctx, call, kind = self._ctx, self.call, KINDS[method]
        if ctx is None or call is None:
            raise Failure("CANNOT_ASK", "the client has left")
        check_capabilities(capabilities_of(ctx), method, params)
        check_question(params, self._waits)
        is_modern = ctx.protocol_version in MODERN_PROTOCOL_VERSIONS
        if params.get("mode") == "url" and not is_modern:
            self._url_ids[name] = secrets.token_hex(16)
            params = {**params, "elicitationId": self._url_ids[name]}
        try:
            request = kind.request.model_validate({"method": method, "params": params})
        except ValidationError as error:
            raise Failure("CANNOT_ASK", f"it is no {method}: {_first_line(error)}") from None
        if is_modern and name in self._given:
            return checked_answer(method, self._given.pop(name))
        if is_modern and (ctx.method not in PAUSABLE or name in self._questions):
            why = f"{ctx.method} cannot ask" if ctx.method not in PAUSABLE else f"{name!r} is being asked already"
            raise Failure("CANNOT_ASK", why)
        if not self._waits:
            self._waiting_since_ns = monotonic_ns()
        self._waits += 1
        try:
            with control_of(call).person_wait(ASK_LIMIT_MS) as limit_ms:
                async with asyncio.timeout(limit_ms / 1000):
                    if is_modern:
                        answer = await self._wait_for_repeat(name, {"method": method, "params": params})
                        return checked_answer(method, answer)
                    metadata = ServerMessageMetadata(related_request_id=ctx.request_id)
                    result = await ctx.session.send_request(request, kind.result, metadata=metadata)
                    return result.model_dump(mode="json", by_alias=True, exclude_none=True)
        except TimeoutError:
            raise Failure("NO_ANSWER", f"no answer within {format_duration(ASK_LIMIT_MS)}") from None
        except NoBackChannelError:
            raise Failure("CANNOT_ASK", "the connection of the client has no way back for questions") from None
        except MCPError as error:
            raise Failure("NO_ANSWER", f"the client answered with an error: {str(error)[:500]}") from None
        except ValidationError as error:
            raise _bad_answer(method, error) from None
        finally:
            self._waits -= 1
            if not self._waits:
                self._waited_ns += monotonic_ns() - self._waiting_since_ns

    async def _wait_for_repeat(self, name: str, request: JsonObject) -> Any:
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._questions[name] = ClientQuestion(request, answer)
        if not self.asked.done():
            self.asked.set_result(None)
        try:
            return await answer  # bounded by the caller
        finally:
            del self._questions[name]
            if not self._questions and self.asked.done():
                self.asked = asyncio.get_running_loop().create_future()

    async def _note_completed(self, name: str) -> JsonObject:
        """Inform an older client that its person has finished at a URL. The 2026 revision has no such message."""
        ctx, id = self._ctx, self._url_ids.pop(name, None)
        if ctx is not None and id is not None:
            completed = ElicitCompleteNotification(params=ElicitCompleteNotificationParams(elicitation_id=id))
            with suppress(Exception):  # the client has left
                async with asyncio.timeout(LAST_WORD_S):
                    await ctx.session.send_notification(completed, ctx.request_id)
        return {}


def capabilities_of(ctx: Context) -> JsonObject:
    declared = ctx.session.client_capabilities
    return {} if declared is None else declared.model_dump(mode="json", by_alias=True, exclude_none=True)


def responses_in(ctx: Context) -> Mapping[str, Any]:
    """Return the answers that a request brings. Raises MCPError."""
    responses = (ctx.params or {}).get("inputResponses")
    if ctx.protocol_version not in MODERN_PROTOCOL_VERSIONS or responses is None:
        return {}
    if not isinstance(responses, dict) or not all(isinstance(each, dict) for each in responses.values()):
        raise MCPError(code=INVALID_PARAMS, message="inputResponses has to be an object of objects")
    return responses


def checked_answer(method: str, answer: object) -> JsonObject:
    """Return the answer to a question. Raises Failure BAD_ANSWER."""
    try:
        checked = KINDS[method].result.model_validate(answer)
    except ValidationError as error:
        raise _bad_answer(method, error) from None
    return checked.model_dump(mode="json", by_alias=True, exclude_none=True)


def _bad_answer(method: str, error: ValidationError) -> Failure:
    return Failure("BAD_ANSWER", f"the client's answer is no result of {method}: {_first_line(error)}")


def _first_line(error: ValidationError) -> str:
    first = error.errors(include_url=False)[0]
    return f"{'.'.join(map(str, first['loc']))}: {first['msg']}"


TIMEOUT = "shotclock.dev/timeoutMs"
BUDGET = "shotclock.dev/budgetMs"
IDEMPOTENCY_KEY = "shotclock.dev/idempotencyKey"

LONGEST_MS = 100_000_000_000  # about three years. Longer times overflow timers
LONGEST_KEY = 256


class RequestMeta(NamedTuple):
    remaining_ms: int | None = None
    timeout_ms: int | None = None
    budget_ms: int | None = None
    idempotency_key: str | None = None
    wants_progress: bool = False
    unreadable: str | None = None  # why the remaining time was ignored, if it was
    mistakes: tuple[dict[str, str], ...] = ()


def read_request_meta(meta: Mapping[str, Any] | None) -> RequestMeta:
    if not meta:
        return RequestMeta()
    mistakes: list[dict[str, str]] = []
    remaining_ms, unreadable = meta.get(REMAINING), None
    if remaining_ms is not None and not _is_duration(remaining_ms):
        unreadable = f"_meta[{REMAINING!r}] is not a whole number of milliseconds: {repr(remaining_ms)[:40]}"
        remaining_ms = None
    limits: list[int | None] = []
    for name in (TIMEOUT, BUDGET):
        limit = meta.get(name)
        if limit is not None and not _is_duration(limit):
            mistakes.append({"field": f"_meta.{name}", "message": "must be a whole number of milliseconds, 0 or more"})
            limit = None
        limits.append(limit)
    key = meta.get(IDEMPOTENCY_KEY)
    if key is not None and not (isinstance(key, str) and 0 < len(key) <= LONGEST_KEY):
        message = f"must be a string of 1 to {LONGEST_KEY} characters"
        mistakes.append({"field": f"_meta.{IDEMPOTENCY_KEY}", "message": message})
    wants_progress = meta.get("progressToken") is not None
    return RequestMeta(remaining_ms, limits[0], limits[1], key, wants_progress, unreadable, tuple(mistakes))


def _is_duration(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= LONGEST_MS


class FunctionRequest(NamedTuple):
    name: str
    arguments: object
    meta: RequestMeta
    link: ClientLink
    principal: Principal
    is_tool: bool = True  # else a resource, a prompt or a completion
    asks: Mapping[str, Any] | None = None
    """The capabilities of a client that a job may ask."""
    caller: Caller | None = None
