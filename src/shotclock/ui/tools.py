"""The App that `shotclock serve ui` serves: UI executions as MCP tools, with the same budgets as everywhere.

    ui_snapshot -> "- button "Buy" [ref=e3]"      ui_click(ref="e3")      ui_expect("bought", resourceId="answer")

Each tool is one execution on the device that `shotclock ui` keeps. The tools of single actions follow from the declared
verbs. They run in the shared process: a device that one of them starts keeps its page for the next, while the children
of a worker process end with its call. They only wait for the daemon, bounded, and can be cancelled at any time.

The client may be on another machine. So a tool reads files only below the folder of `serve ui --files`.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Awaitable, Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, cast, get_args, get_origin

from pydantic import WithJsonSchema

from .._version import __version__
from ..apps.app import App
from ..core.errors import Failure, SideEffects
from ..core.signatures import declare
from ..core.value_types import JsonObject
from ..worker.content import Image
from ..worker.context import Context
from .client import execute_async
from .device import DEFAULT_DEVICE
from .payload import ACTION_TYPES, DEFAULT_TIMEOUT_MS, MODES, Matcher
from .verbs import ABSENT, VERBS, Parameter, Verb, build_tool, leaves_of, new_head

FILES_VARIABLE = "SHOTCLOCK_UI_FILES"  # the folder of `serve ui --files`

app: App = App(
    "ui",
    version=__version__,
    help="Look at a page or an app with ui_snapshot, then act on its refs. Every action has a budget (timeoutMs). "
    "Name a node by ref, or by role, textEquals, textContains, resourceId (test id or id), contentDescEquals (label) "
    "or css; all of them must hold, in any frame. An answer has the tabs, dialogs, downloads and file choosers that "
    "were opened: a confirm or prompt waits for ui_dialog, and the next other action dismisses it. "
    "device: browser, cdp:URL or android:SERIAL.",
    # The longest execution, the margin for its result, and the start of a device.
    default_timeout="3m40s",
    operation_timeout="4m",
)


async def _run(payload: JsonObject, device: str, ctx: Context) -> JsonObject:
    payload, remaining_ms = _confine_files(payload), ctx.remaining_ms()
    envelope = await execute_async(device, payload, remaining_ms=remaining_ms, traceparent=ctx.traceparent)
    error, data = cast(Any, envelope.error), cast(JsonObject, envelope.data)
    if error is None:
        return data
    raise Failure(
        str(envelope.code),
        error["message"],
        data=data,
        context=error.get("context"),
        suggestion=error.get("suggestion"),
        side_effects=SideEffects(str(envelope.meta["side_effects"])),
        retry_after_ms=error.get("retry_after_ms"),
    )


async def _act(payload: JsonObject, device: str, ctx: Context) -> JsonObject:
    """Run an execution of one action, and return its data and the page. A failure has them without its own words."""
    try:
        result = await _run(payload, device, ctx)
    except Failure as failure:
        if isinstance(failure.data, dict) and failure.data.get("stepResults"):
            (step,) = failure.data["stepResults"]
            notes = {name: each for name, each in step["data"].items() if name not in ("code", "message", "clock")}
            failure.data = {**notes, "page": failure.data.get("page")}
        raise
    return {**result["stepResults"][0]["data"], "page": result["page"]}


def _confine_files(payload: JsonObject) -> JsonObject:
    """Return the payload with the resolved paths of its uploads. Raises Failure for a file of this machine."""
    written = payload.get("actions")
    actions: list[Any] = []
    for action in written if isinstance(written, list) else ():
        params = action.get("params") if isinstance(action, dict) else None
        if isinstance(params, dict) and "path" in params:
            raise _not_allowed("take_screenshot has no path here: the picture is in the result, or use ui_screenshot")
        if isinstance(params, dict) and isinstance(params.get("paths"), list):
            paths = [_find_upload(each) if isinstance(each, str) else each for each in params["paths"]]
            action = {**action, "params": {**params, "paths": paths}}
        actions.append(action)
    return {**payload, "actions": actions} if isinstance(written, list) else payload


def _find_upload(path: str) -> str:
    folder = os.environ.get(FILES_VARIABLE)
    if not folder:
        raise _not_allowed("this server uploads no files: start it with `serve ui --files DIR`")
    try:
        root = Path(folder).resolve(strict=True)
        found = (root / path).resolve(strict=True)
    except (OSError, ValueError):
        found = None
    # The same answer for a file that is not there: it says nothing about other folders.
    if found is None or not found.is_relative_to(root) or not found.is_file():
        raise _not_allowed(f"{path!r:.300} is not a file below the folder of --files")
    return str(found)


def _not_allowed(message: str) -> Failure:
    return Failure("NOT_ALLOWED", message, side_effects=SideEffects.NONE)


def _add_tool(
    name: str,
    text: str,
    parameters: Iterable[Parameter],
    tool: Callable[..., Awaitable[Any]],
    *,
    mutates: bool,
    returned: Any = JsonObject,
) -> None:
    """Register a function that takes `ctx`, `device` and the parameters by their names."""
    parameter = partial(inspect.Parameter, kind=inspect.Parameter.KEYWORD_ONLY)
    every = [parameter("ctx", annotation=Context)]
    lines: list[str] = []
    for each in parameters:
        default = inspect.Parameter.empty if each.default is ... else each.default
        every.append(parameter(each.name, annotation=each.type, default=default))
        lines += [f"    {each.name}: {each.text}"] if each.text else []
    every.append(parameter("device", annotation=str, default=DEFAULT_DEVICE))
    tool.__name__ = tool.__qualname__ = name
    tool.__doc__ = "\n".join([text, *(["", "Args:", *lines] if lines else [])])
    declare(tool, inspect.Signature(every, return_annotation=returned))
    app.command(mutates=mutates, isolation="shared")(tool)


def _add_verb(verb: Verb) -> None:
    async def tool(ctx: Context, device: str, **arguments: Any) -> Any:
        return await _act(build_tool(verb.name, arguments), device, ctx)

    async def picture(ctx: Context, device: str, **arguments: Any) -> Any:
        shown = await tool(ctx, device, **arguments)
        image = Image(data=shown.pop("image"))
        return [shown, image]

    add = partial(_add_tool, verb.tool, verb.text, verb.parameters, mutates=verb.mutates)
    if verb.name == "screenshot":
        add(picture, returned=list[JsonObject | Image])
    else:
        add(tool)


for _verb in VERBS.values():
    if _verb.tool:
        _add_verb(_verb)


def _describe_params() -> str:
    parts = []
    for name, kind in ACTION_TYPES.items():
        infos = [info for info in kind.model_fields.values() if info.keys[0] != "path"]
        keys = [f"{info.keys[0]}{'*' if info.is_required() else ''}" for info in infos]
        parts.append(f"{name}({', '.join(keys)})")
    return f"{', '.join(parts)}. * is required; container, labelMatcher and expectedNode are matchers as well."


def _schema_of(kind: Any) -> JsonObject:
    if get_origin(kind) is Literal:
        return {"enum": list(get_args(kind))}
    if get_origin(kind) is list:
        return {"type": "array", "items": {"type": "string"}}
    if kind is Matcher:
        return {"type": "object"}
    names: dict[Any, str] = {str: "string", int: "integer", float: "number", bool: "boolean"}
    return {"type": names.get(kind, "object")}


def _execution_schema() -> JsonObject:
    params: JsonObject = {}
    for kind in ACTION_TYPES.values():
        for leaf in leaves_of(kind):
            params.setdefault(leaf.path[0], _schema_of(leaf.kind if len(leaf.path) == 1 else Matcher))
    del params["path"]  # refused here
    criteria = {info.keys[0]: {"type": "string"} for info in Matcher.model_fields.values()}
    params["matcher"] = {"type": "object", "properties": criteria}
    action = {
        "id": {"type": "string"},
        "type": {"enum": list(ACTION_TYPES)},
        "params": {"type": "object", "properties": params, "description": _describe_params()},
    }
    actions = {"type": "object", "properties": action, "required": ["id", "type"]}
    return {
        "type": "object",
        "properties": {
            "actions": {"type": "array", "items": actions, "description": "1 to 50, in their order."},
            "timeoutMs": {"type": "integer", "description": f"Over the whole [{DEFAULT_TIMEOUT_MS}, at most 120000]."},
            "mode": {"enum": list(MODES), "description": "best_effort continues after a failure [direct]."},
        },
        "required": ["actions"],
    }


@app.command(isolation="shared")
async def ui_execute(
    execution: Annotated[JsonObject, WithJsonSchema(_execution_schema())],
    ctx: Context,
    device: str = DEFAULT_DEVICE,
) -> JsonObject:
    """Run several actions as one execution, with one budget over them.

    Args:
        execution: The payload. commandId, taskId, source and expectedFormat may be left out.
    """
    head = {**new_head("execute", "mcp"), "timeoutMs": DEFAULT_TIMEOUT_MS}
    return await _run({**head, **execution}, device, ctx)


async def _expect(ctx: Context, device: str, text: str, exact: bool, timeoutMs: int, **node: str) -> JsonObject:
    expected = {"textEquals" if exact else "textContains": text, "timeoutMs": timeoutMs}
    try:
        await _act(build_tool("wait", {**node, **expected}), device, ctx)
    except Failure as failure:
        if failure.code == "WAIT_TIMEOUT" and any(node.values()):
            reading = build_tool("read", {**node, "timeoutMs": 3_000})
            found = await execute_async(device, reading, remaining_ms=ctx.remaining_ms())
            if found.ok and isinstance(found.data, dict):
                steps: Any = found.data["stepResults"]
                failure.context["found"] = steps[0]["data"]["text"]
        raise
    return {"met": True, "text": text}


_add_tool(
    "ui_expect",
    "Check that a text is visible, anywhere or in one node; if it is not, return the text of that node.",
    [
        Parameter("text", "The text, or a part of it.", str, ...),
        Parameter("exact", "It is the whole text of the node.", bool, False),
        *(Parameter(key, "", str, ABSENT) for key in ("role", "resourceId", "contentDescEquals", "css")),
        Parameter("timeoutMs", "", int, 5_000),
    ],
    _expect,
    mutates=False,
)
