"""An execution on a device: one action after the other, each in its budget, and always a result.

The result is plain data, sent from the process of the device to the caller:

    {"commandId": …, "taskId": …, "status": "success" | "failed" | "partial",
     "stepResults": [{"id": …, "actionType": …, "success": …, "data": {…}}],     every step that ran
     "position": {"index": 2, "actionId": "wait-1", "completed": 2, "total": 4},
     "page": {"state": "same" | "changed" | "navigating" | "fresh" | "unresponsive" | "lost", "where": …, "next": …},
     "error": null | {"code": …, "message": …, "actionId": …, "clock": {…}},
     "effects": "none" | "partial" | "complete" | "unknown", "durationMs": …}

The actions end by `timeoutMs`. Examining the page and repairing it may take another 4000 ms at most, which is less
than the margin in which the caller waits for the result.

The last section is the process of the device. Its functions are operations of the daemon's runtime, called in a host
process of their own: a function that blocks or leaks ends with that process, and the daemon still answers in time.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import os
import re
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import TypeVar, cast

from ..core.envelope import describe_exception
from ..core.errors import Failure
from ..core.limits import NS_PER_MS, ClockKind, Deadline, Fired
from ..core.value_types import JsonObject, record, value
from ..supervise.clock import monotonic_ns
from ..worker.context import Context
from . import _android as android
from . import _browser as browser
from . import payload
from .device import Countdown, Device, Place, ProgramOutput, Snapshot, kind_of
from .payload import Action, Execution, effects_of_steps, read_execution, usable_ms

T = TypeVar("T")
Event = dict[str, object]

# A silent device is cancelled this long after the limit of its action: it may take a last look at the end.
GUARD_MS = 250
LOOK_GUARD_MS = 150  # the same for a look at its place, and for its recovery
LOOK_MS = 1_000  # A device that failed has this long to report its place. A frozen one reaches the limit.
# A silent device has this long to recover. With LOOK_MS this is less than the margin for the result.
RECOVER_MS = 2_400
MAX_IMAGE_BYTES = 4_000_000  # larger images need a path
MIN_LINE_BYTES = 200  # a line of a snapshot may fill a quarter of it, and this much in any case

REST = "more nodes: name one to see what is in it, scroll, or raise maxBytes (64000 at most)"

CALLER = "caller"
_REF = re.compile(r" \[ref=\w{1,20}\]")
_TIMEOUTS = ("WAIT_TIMEOUT", "EVAL_TIMEOUT", "OPERATION_TIMEOUT")


@value
class StepBudget:
    limit_ms: int
    owner: str
    clock_ms: int  # the whole limit of that clock
    since_ns: int  # the start of that clock

    def ring(self) -> dict[str, object]:
        elapsed_ms = (monotonic_ns() - self.since_ns) // NS_PER_MS
        return Fired(ClockKind.TIMEOUT, self.owner, self.clock_ms, elapsed_ms).as_context()


@record
class ExecutionRun:
    execution: Execution
    device: Device
    on_event: Callable[[Event], None]  # Called when a step begins and when it ends. Does not wait.
    within_ms: int | None = None  # the rest of the caller's time

    async def run(self) -> JsonObject:
        """Run the actions and return the result. Raises CancelledError only."""
        execution = self.execution
        started_ns = monotonic_ns()
        limit_ms = usable_ms(self._limit_ms)
        if self._owner == CALLER:  # which waits no longer, even for a device that must be cancelled
            limit_ms = max(1, limit_ms - 2 * GUARD_MS)
        deadline = Deadline.after_ms(started_ns, limit_ms)
        before = self.device.place_seen()
        if before is None:
            with contextlib.suppress(Failure, TimeoutError):
                before = await _guarded(self.device.look(LOOK_MS), LOOK_MS)
        steps: list[JsonObject] = []
        failures: list[JsonObject] = []
        page: dict[str, object] | None = None
        index, in_a_row = -1, 0
        for index, action in enumerate(execution.actions):
            budget = self._budget(action, deadline, started_ns)
            if budget is None:
                index -= 1
                message = f"the {self._limit_ms} ms of the execution ended before {action.type} {action.id} began"
                clock = StepBudget(0, self._owner, self._limit_ms, started_ns).ring()
                failures.append({"code": "OPERATION_TIMEOUT", "message": message, "clock": clock})
                break
            self.on_event({"event": "step", "id": action.id, "actionType": action.type, "index": index})
            step, error = await self._step(action, budget)
            steps.append(step)
            self.on_event({"event": "stepResult", **step})
            page = None
            if error is None:
                in_a_row = 0
                continue
            failures.append(error)
            in_a_row += 1
            page = await self._examine(before, started_ns)
            may_continue = in_a_row < payload.BEST_EFFORT_MAX_FAILURES and page["next"] != "none"
            if execution.mode != "best_effort" or not may_continue:
                break
        if page is None:
            seen = self.device.place_seen()
            page = await self._examine(before, started_ns) if seen is None else _page(seen, before)
        if self.device.is_fresh and page["state"] in ("same", "changed"):
            page["state"], self.device.is_fresh = "fresh", False
        return self._result(steps, failures, index, page, started_ns)

    @property
    def _limit_ms(self) -> int:
        own_ms = self.execution.timeout_ms
        return own_ms if self.within_ms is None else max(1, min(own_ms, self.within_ms))

    @property
    def _owner(self) -> str:
        return f"execution {self.execution.command_id}" if self._limit_ms == self.execution.timeout_ms else CALLER

    def _budget(self, action: Action, deadline: Deadline, started_ns: int) -> StepBudget | None:
        """Return the budget of an action: its own or its type's, within the rest of the execution. None: no rest."""
        now_ns = monotonic_ns()
        left_ms = deadline.remaining_ms(now_ns)
        if left_ms <= 0:
            return None
        wanted_ms = action.params.default_ms if action.limit_ms is None else action.limit_ms
        if wanted_ms <= left_ms:
            return StepBudget(wanted_ms, f"action {action.id}", wanted_ms, now_ns)
        return StepBudget(left_ms, self._owner, self._limit_ms, started_ns)

    async def _step(self, action: Action, budget: StepBudget) -> tuple[JsonObject, JsonObject | None]:
        error: JsonObject | None = None
        data: JsonObject = {}
        try:
            if isinstance(action.params, payload.Sleep):
                data = await _sleep(action.params.duration_ms, budget)
            else:
                async with asyncio.timeout((budget.limit_ms + GUARD_MS) / 1000):
                    data = await perform(self.device, action, budget.limit_ms)
        except TimeoutError:  # the guard: a device reports its own timeouts by a Failure
            code = "OPERATION_TIMEOUT" if budget.owner == self._owner else _timeout_code(action)
            message = f"{action.type} {action.id} was not answered within {budget.limit_ms} ms"
            error = {"code": code, "message": message}
        except Failure as failure:
            error = {"code": failure.code, "message": str(failure), **({"data": failure.data} if failure.data else {})}
        except Exception as bug:
            name, text, lines = describe_exception(bug)
            error = {"code": "INTERNAL_ERROR", "message": f"{name}: {text}", "traceback": lines}
        if error is not None and error["code"] in _TIMEOUTS:
            error["clock"] = budget.ring()
        names = {"id": action.id, "actionType": action.type}
        step = {**names, "success": error is None, "data": (error or data) | self.device.take_notes()}
        return step, error and {**error, "actionId": action.id, "actionType": action.type}

    async def _examine(self, before: Place | None, started_ns: int) -> dict[str, object]:
        """Return the state of the page and repair it. Without time for that the device is replaced after the answer."""
        state = "unresponsive"
        look_ms, may_recover = LOOK_MS, True
        if self.within_ms is not None:
            left_ms = self.within_ms - (monotonic_ns() - started_ns) // NS_PER_MS - 2 * GUARD_MS
            look_ms, may_recover = max(1, min(LOOK_MS, left_ms)), left_ms >= LOOK_MS + RECOVER_MS
        try:
            return _page(await _guarded(self.device.look(look_ms), look_ms), before)
        except (TimeoutError, Failure) as error:
            if isinstance(error, Failure) and error.code == "DEVICE_LOST":
                state = "lost"
        seen = self.device.place_seen()
        if seen is not None and seen.navigating_to is not None:
            if not may_recover:
                return _page(seen, before)
            state = "navigating"
        last = seen or before
        page: dict[str, object] = {"state": state, "where": None if last is None else last.where, "next": "none"}
        if may_recover:
            with contextlib.suppress(Failure, TimeoutError):
                now = await _guarded(self.device.recover(RECOVER_MS), RECOVER_MS)
                page["next"] = "recovered" if last is not None and now.document == last.document else "fresh"
        return page

    def _result(
        self,
        steps: list[JsonObject],
        failures: list[JsonObject],
        index: int,
        page: dict[str, object],
        started_ns: int,
    ) -> JsonObject:
        execution = self.execution
        completed = sum(step["success"] for step in steps)
        error: JsonObject | None = None
        status = "success"
        if failures:
            error, status = failures[0], "failed"
            if execution.mode == "best_effort" and completed:
                status = "partial"
                message = f"{completed} of {len(execution.actions)} actions succeeded; first: {failures[0]['message']}"
                error = {**failures[0], "code": "PARTIAL_FAILURE", "message": message, "failures": failures}
        return {
            **describe_result(execution, status, steps, index, page),
            "error": error,
            "effects": effects_of_steps(execution, steps).value,
            "durationMs": (monotonic_ns() - started_ns) // NS_PER_MS,
        }


def describe_result(
    execution: Execution, status: str, steps: list[JsonObject], index: int, page: dict[str, object]
) -> JsonObject:
    """Return the data of a result. `index` is that of the last action that began, or -1."""
    action_id = execution.actions[index].id if index >= 0 else None
    completed = sum(bool(step["success"]) for step in steps)
    position = {"index": index, "actionId": action_id, "completed": completed, "total": len(execution.actions)}
    head = {"commandId": execution.command_id, "taskId": execution.task_id, "status": status}
    return {**head, "stepResults": steps, "position": position, "page": page}


def _page(now: Place, before: Place | None) -> dict[str, object]:
    if now.navigating_to is not None:
        return {"state": "navigating", "where": now.where, "to": now.navigating_to, "next": "same"}
    is_same = before is not None and now.document == before.document
    titled = {} if is_same or not now.title else {"title": now.title}
    return {"state": "same" if is_same else "changed", "where": now.where, **titled, "next": "same"}


def _timeout_code(action: Action) -> str:
    if action.type in ("wait_for_node", "wait_for_navigation", "scroll_until"):
        return "WAIT_TIMEOUT"
    return "OPERATION_TIMEOUT" if action.params.mutates else "EVAL_TIMEOUT"


async def _guarded(look: Awaitable[T], within_ms: int) -> T:
    async with asyncio.timeout((within_ms + LOOK_GUARD_MS) / 1000):
        return await look


async def _sleep(duration_ms: int, budget: StepBudget) -> dict[str, object]:
    await asyncio.sleep(min(duration_ms, budget.limit_ms) / 1000)
    if budget.limit_ms < duration_ms:
        message = f"the execution had only {budget.limit_ms} ms left for a sleep of {duration_ms} ms"
        raise Failure("OPERATION_TIMEOUT", message)
    return {"durationMs": duration_ms}


async def perform(device: Device, action: Action, within_ms: int) -> dict[str, object]:
    time = Countdown(within_ms)
    match action.params:
        case payload.Scroll() as params:
            return {"moved": await device.scroll(params, time)}
        case payload.ScrollUntil() as params:
            return await _scroll_until(device, params, time)
        case payload.ReadText() as params:
            texts = await device.read_text(params.matcher, time)
            return shorten_texts(texts if params.all else texts[:1], params.all, params.max_bytes)
        case payload.ReadKeyValuePair() as params:
            if (pair := await device.read_key_value_pair(params.label_matcher, time)) is None:
                named = params.label_matcher.describe()
                raise Failure("ACTION_FAILED", f"the node with {named} has no value beside it")
            label, text = (_cut(each, payload.DEFAULT_SNAPSHOT_BYTES) for each in pair)
            return {"label": label, "value": text} | ({} if (label, text) == pair else {"truncated": True})
        case payload.SnapshotUi() as params:
            return shorten_snapshot(await device.snapshot(params.matcher, time), params.max_bytes)
        case payload.TakeScreenshot() as params:
            return await _keep_image(await device.screenshot(time), params.path)
    method: Callable[[payload.Params, Countdown], Awaitable[dict[str, object]]] = getattr(device, action.type)
    return await method(action.params, time)


def shorten_snapshot(snapshot: Snapshot, max_bytes: int) -> dict[str, object]:
    lines: list[str] = []
    size = lines_cut = 0
    every = snapshot.text.splitlines()
    for line in every:
        longest = min(max(MIN_LINE_BYTES, max_bytes // 4), max_bytes - 1)
        kept = _cut_line(line, longest)
        size += _size(kept) + 1
        if size > max_bytes or not kept:
            break
        lines.append(kept)
        lines_cut += kept != line
    left = len(every) - len(lines)
    data: dict[str, object] = {"text": "\n".join(lines), "where": snapshot.place.where}
    data["truncated"] = bool(left or lines_cut or snapshot.nodes_left_out or snapshot.depth)
    counts = {"nodesLeftOut": snapshot.nodes_left_out, "linesLeftOut": left, "linesCut": lines_cut}
    counts["deepest"] = snapshot.depth
    data |= {name: count for name, count in counts.items() if count}
    return data | ({"rest": REST} if left or snapshot.nodes_left_out or snapshot.depth else {})


def shorten_texts(texts: list[str], is_all: bool, max_bytes: int) -> dict[str, object]:
    """Return the texts that fit, the first one cut if necessary, and the number of texts left out."""
    kept, size = [_cut(texts[0], max_bytes)], _size(texts[0])
    for text in texts[1:]:
        size += _size(text)
        if size > max_bytes:
            break
        kept.append(text)
    data: dict[str, object] = {"text": kept[0]} | ({"all": kept} if is_all else {})
    if left := len(texts) - len(kept):
        data["textsLeftOut"] = left
    if left or kept[0] != texts[0]:
        data["truncated"] = True
    return data


def _size(text: str) -> int:
    return len(text.encode("utf-8", "replace"))


def _cut(text: str, most: int) -> str:
    if _size(text) <= most:
        return text
    room = most - len("…".encode())
    return text.encode("utf-8", "replace")[:room].decode("utf-8", "ignore") + "…" if room > 0 else ""


def _cut_line(line: str, most: int) -> str:
    """Cut the line of a node, but keep its ref, which may follow a long name."""
    kept = _cut(line, most)
    if kept == line or not (found := _REF.search(line, len(kept) - 1)):
        return kept
    ref = found[0]
    return f"{_cut(line, most - len(ref))}{ref}" if most > 2 * len(ref) else kept


async def _scroll_until(device: Device, params: payload.ScrollUntil, time: Countdown) -> dict[str, object]:
    container = {} if params.container is None else {"container": params.container}
    step = payload.Scroll.model_validate({"direction": params.direction, **container})
    scrolled, why = 0, f"in {time.limit_ms} ms"
    while not time.is_over:
        if await device.sees(params.matcher, time.left_ms):
            return {"scrolls": scrolled}
        if scrolled >= params.max_scrolls:
            why = f"after {scrolled} scrolls"
            break
        if not await device.scroll(step, Countdown(time.left_ms)):
            why = f"at the end, after {scrolled} scrolls"
            break
        scrolled += 1
    raise Failure("WAIT_TIMEOUT", f"no node with {params.matcher.describe()} was found {why}")


async def _keep_image(image: bytes, path: str | None) -> dict[str, object]:
    data: dict[str, object] = {"mimeType": "image/png", "bytes": len(image)}
    if path is None:
        if len(image) > MAX_IMAGE_BYTES:
            message = f"the image has {len(image)} bytes; a result holds at most {MAX_IMAGE_BYTES}: set a path"
            raise Failure("ACTION_FAILED", message)
        return data | {"image": base64.b64encode(image).decode()}
    if not os.path.isabs(path):
        raise Failure("ACTION_FAILED", f"the path of a screenshot must be absolute, not {path!r}")
    try:
        await asyncio.to_thread(Path(path).write_bytes, image)
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        why = getattr(error, "strerror", None) or error
        raise Failure("ACTION_FAILED", f"the image cannot be written to {path}: {why}") from error
    return data | {"path": path}


RUN_COMMAND = "command"  # the question by which a device has the daemon run a program
START_PROGRAM = "program"  # the question by which a device has the daemon start a program that outlives both


class _DaemonServices:
    def __init__(self) -> None:
        self.ctx: Context | None = None

    async def run_command(self, argv: Sequence[str], *, within_ms: int) -> ProgramOutput:
        return cast(ProgramOutput, await self._ask(RUN_COMMAND, {"argv": list(argv), "within_ms": within_ms}))

    async def start_program(self, argv: Sequence[str]) -> None:
        await self._ask(START_PROGRAM, list(argv))

    async def _ask(self, question: str, request: object) -> object:
        if self.ctx is None:
            raise RuntimeError("a device may only ask during a call")
        return await self.ctx.link.ask(question, request)


# A module has `open_device`, which starts or reaches a device and is bounded by its caller, and `find_devices`, which
# returns the devices of its kind, unusable ones included, within 5 s, and starts none.
MODULES = {"browser": browser, "cdp": browser, "android": android}
_services = _DaemonServices()
_devices: dict[str, Device] = {}


async def open_session(device: str, is_fresh: bool, ctx: Context) -> dict[str, object]:
    """Open the device, unless it is open. `is_fresh`: it replaces a device whose pages are gone."""
    _services.ctx = ctx
    if device not in _devices:
        _devices[device] = await MODULES[kind_of(device)].open_device(device, _services)
        _devices[device].is_fresh = is_fresh
    place = _devices[device].place_seen()
    return {"device": device, "where": None if place is None else place.where}


async def run_execution(device: str, execution: JsonObject, within_ms: int | None, ctx: Context) -> JsonObject:
    """Run an execution on the device and return its result. Each event is a line of text to the daemon."""
    _services.ctx = ctx
    if device not in _devices:
        raise Failure("DEVICE_LOST", f"{device} is no longer open in this process")

    def send(event: Event) -> None:
        ctx.write(json.dumps(event) + "\n")

    return await ExecutionRun(read_execution(execution), _devices[device], send, within_ms).run()


async def close_session(device: str, ctx: Context) -> None:
    _services.ctx = ctx
    if (opened := _devices.pop(device, None)) is not None:
        await opened.close()
