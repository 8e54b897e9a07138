"""The App that `shotclock serve ui` serves: UI executions as MCP tools, with the same budgets as everywhere.

    ui_snapshot -> "- button "Buy" [ref=e3]"      ui_click(ref="e3")      ui_expect("bought", id="answer")

Each tool is one execution on the device that `shotclock ui` keeps. The tools of single actions follow from the declared
verbs. They run in the shared process: a device that one of them starts keeps its page for the next, while the children
of a worker process end with its call. They only wait for the daemon, bounded, and can be cancelled at any time.
"""

from __future__ import annotations

import inspect
from functools import partial
from typing import Any, cast

from ._version import __version__
from .app import App
from .core.errors import Failure, SideEffects
from .process.content import Image
from .process.context import Context
from .ui.client import execute_async
from .ui.device import DEFAULT_DEVICE
from .ui.payload import VERBS, Input, Verb, build

DEVICE_TEXT = "browser, cdp:URL or android:SERIAL."

app = App(
    "ui",
    version=__version__,
    help="Look at a page or an app with ui_snapshot, then act on its refs. Every action has a budget.",
    # The longest execution, the margin for its result, and the start of a device.
    default_timeout="3m40s",
    operation_timeout="4m",
)


async def _run(payload: object, device: str, ctx: Context, timeout_ms: int | None = None) -> dict[str, Any]:
    """Run an execution and return its result. Raises Failure with the code, the data and the side effects."""
    envelope = await execute_async(
        device, payload, timeout_ms=timeout_ms, remaining_ms=ctx.remaining_ms(), traceparent=ctx.traceparent
    )
    error, data = cast(Any, envelope.error), cast(dict[str, Any], envelope.data)
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


def _add_tool(verb: Verb) -> None:
    inputs = {_parameter_name(each): each for each in verb.inputs if not each.only_cli}
    returns_image = verb.name == "screenshot"

    async def tool(ctx: Context, device: str = DEFAULT_DEVICE, **values: Any) -> Any:
        named = {each.name: values.get(name) for name, each in inputs.items()}
        result = await _run(build(verb.name, named), device, ctx)
        shown = {**result["stepResults"][0]["data"], "page": result["page"]}
        if not returns_image:
            return shown
        return [{"bytes": shown["bytes"], "page": shown["page"]}, Image(data=shown["image"])]

    parameter = partial(inspect.Parameter, kind=inspect.Parameter.KEYWORD_ONLY)
    parameters = [parameter("ctx", annotation=Context)]
    for name, each in inputs.items():
        if each.required:
            parameters.append(parameter(name, annotation=each.type))
        elif each.type is bool:
            parameters.append(parameter(name, annotation=bool, default=False))
        else:
            parameters.append(parameter(name, annotation=each.type | None, default=None))
    parameters.append(parameter("device", annotation=str, default=DEFAULT_DEVICE))
    lines = [f"    {name}: {each.text}" for name, each in inputs.items()]
    tool.__name__ = tool.__qualname__ = f"ui_{verb.name}"
    tool.__doc__ = "\n".join([verb.text, "", "Args:", *lines, f"    device: {DEVICE_TEXT}"])
    returned = list[dict[str, Any] | Image] if returns_image else dict[str, Any]
    tool.__annotations__ = {each.name: each.annotation for each in parameters} | {"return": returned}
    tool.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    app.command(mutates=verb.mutates, isolation="shared")(tool)


def _parameter_name(each: Input) -> str:
    return "timeout_ms" if each.name == "timeout" else each.name


for _name in ("open", "snapshot", "click", "type", "wait", "screenshot"):
    _add_tool(VERBS[_name])


@app.command(isolation="shared")
async def ui_execute(
    execution: dict[str, Any], ctx: Context, timeout_ms: int | None = None, device: str = DEFAULT_DEVICE
) -> dict[str, Any]:
    """Run an execution: {commandId, taskId, source, expectedFormat, timeoutMs, mode?, actions: [{id, type, params?}]}.

    Args:
        execution: The payload; docs/reference/ui.md lists the actions.
        timeout_ms: Replaces the payload's timeoutMs.
        device: browser, cdp:URL or android:SERIAL.
    """
    actions = execution.get("actions")
    params = [each.get("params") for each in actions if isinstance(each, dict)] if isinstance(actions, list) else []
    if any(isinstance(each, dict) and "path" in each for each in params):
        # The client may be on another machine, and has no files here.
        message = "take_screenshot has no path here: the picture is in the result, or use ui_screenshot"
        raise Failure("NOT_ALLOWED", message)
    return await _run(execution, device, ctx, timeout_ms)


@app.command(mutates=False, isolation="shared")
async def ui_expect(
    text: str,
    ctx: Context,
    role: str | None = None,
    id: str | None = None,
    label: str | None = None,
    css: str | None = None,
    exact: bool = False,
    timeout_ms: int = 5_000,
    device: str = DEFAULT_DEVICE,
) -> dict[str, Any]:
    """Check that a text is visible, anywhere or in one node; if it is not, return the text of that node.

    Args:
        text: The text, or a part of it.
        role: The role of the node that should have it.
        id: Its test id or resource id.
        label: Its label or description.
        css: A CSS selector, on a browser.
        exact: It is the whole text of the node.
        timeout_ms: How long it may take to appear, 60000 at most.
        device: browser, cdp:URL or android:SERIAL.
    """
    node = {"role": role, "id": id, "label": label, "css": css}
    expected = {"text" if exact else "text_contains": text, "timeout": timeout_ms}
    try:
        await _run(build("wait", {**node, **expected}), device, ctx)
    except Failure as failure:
        if failure.code == "WAIT_TIMEOUT" and any(node.values()):
            found = await execute_async(device, build("read", node, 3_000), remaining_ms=ctx.remaining_ms())
            if found.ok and isinstance(found.data, dict):
                steps: Any = found.data["stepResults"]
                failure.context["found"] = steps[0]["data"]["text"]
        raise
    return {"met": True, "text": text}
