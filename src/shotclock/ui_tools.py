"""The App that `shotclock serve ui` serves: UI executions as MCP tools, with the budgets that they have everywhere.

    ui_snapshot -> "- button "Buy" [ref=e3]"      ui_click(ref="e3")      ui_expect("bought", id="answer")

An App like anybody's, so it stands above all rooms; each tool is one execution on the device that `shotclock ui` keeps.

The tools run on a loop. A device that one of them has to start is to keep its page for the next, and what a call starts
in a process of its own ends with the call. They only wait for the daemon, bounded, and can be cut off at any time.
"""

from __future__ import annotations

from typing import Any

from ._version import __version__
from .app import App
from .core.envelope import Envelope
from .core.errors import Failure, SideEffects
from .process.context import Context
from .ui import builders
from .ui.async_client import execute
from .ui.device_names import DEFAULT_DEVICE

# The longest execution, what is waited for its result, and a device that has to be started first.
LONGEST = "3m40s"

app = App(
    "ui",
    version=__version__,
    help="Look at a page or an app with ui_snapshot, then act on its refs. Every action has a budget.",
    default_timeout=LONGEST,
    operation_timeout="4m",
)


async def _run(payload: dict[str, Any], device: str, ctx: Context, timeout_ms: int | None = None) -> dict[str, Any]:
    """Run an execution and return its result. Raises Failure with the code, the data and the effects of what failed."""
    envelope = await execute(
        device, payload, timeout_ms=timeout_ms, remaining_ms=ctx.remaining_ms(), traceparent=ctx.traceparent
    )
    if envelope.error is not None:
        raise _failure(envelope)
    assert isinstance(envelope.data, dict)
    return envelope.data


def _failure(envelope: Envelope) -> Failure:
    error: Any = envelope.error
    return Failure(
        str(envelope.code),
        error["message"],
        data=envelope.data,
        context=error.get("context"),
        suggestion=error.get("suggestion"),
        side_effects=SideEffects(str(envelope.meta["side_effects"])),
        retry_after_ms=error.get("retry_after_ms"),
    )


async def _do(payload: dict[str, Any], device: str, ctx: Context) -> dict[str, Any]:
    """Run an execution of one action and return what it gave, with what became of the page."""
    result = await _run(payload, device, ctx)
    data: dict[str, Any] = {**result["stepResults"][0]["data"], "page": result["page"]}
    return data


def _matcher(**criteria: str | None) -> dict[str, str]:
    names = {"text": "textEquals", "text_contains": "textContains", "id": "resourceId", "label": "contentDescEquals"}
    matcher = {names.get(name, name): text for name, text in criteria.items() if text is not None}
    if not matcher:
        raise Failure("MISSING_ARGUMENT", "which node? ref, text, text_contains, id, role, label or css")
    return matcher


@app.command(isolation="loop")
async def ui_execute(
    execution: dict[str, Any],
    ctx: Context,
    timeout_ms: int | None = None,
    device: str = DEFAULT_DEVICE,
) -> dict[str, Any]:
    """Run an execution: {commandId, taskId, source, expectedFormat, timeoutMs, mode?, actions: [{id, type, params?}]}.

    Args:
        execution: The payload; docs/reference/ui.md lists the actions.
        timeout_ms: Instead of the payload's timeoutMs.
        device: browser, cdp:URL or android:SERIAL.
    """
    actions = execution.get("actions")
    params = (
        [action.get("params") for action in actions if isinstance(action, dict)] if isinstance(actions, list) else []
    )
    if any(isinstance(each, dict) and {"path", "file"} & each.keys() for each in params):
        # Whoever calls may be on another machine, and has no files here to write.
        raise Failure(
            "NOT_ALLOWED", "take_screenshot has no path here: the picture is in the result, or use ui_screenshot"
        )
    return await _run(execution, device, ctx, timeout_ms)


@app.command(isolation="loop")
async def ui_open(target: str, ctx: Context, device: str = DEFAULT_DEVICE) -> dict[str, Any]:
    """Open an address in the browser, or an app on the phone.

    Args:
        target: The address, or the app's id.
        device: browser, cdp:URL or android:SERIAL.
    """
    return await _do(builders.build_open(target), device, ctx)


@app.command(mutates=False, isolation="loop")
async def ui_snapshot(ctx: Context, max_bytes: int | None = None, device: str = DEFAULT_DEVICE) -> dict[str, Any]:
    """Return what is to be seen as text: roles, names, states, and refs for the other tools.

    Args:
        max_bytes: At most so much text (24000).
        device: browser, cdp:URL or android:SERIAL.
    """
    return await _do(builders.build_snapshot(max_bytes=max_bytes), device, ctx)


@app.command(isolation="loop")
async def ui_click(
    ctx: Context,
    ref: str | None = None,
    text: str | None = None,
    role: str | None = None,
    id: str | None = None,
    label: str | None = None,
    css: str | None = None,
    long: bool = False,
    device: str = DEFAULT_DEVICE,
) -> dict[str, Any]:
    """Click a node, named by its ref in the last snapshot or by what it is like.

    Args:
        ref: Its ref, as in [ref=e12].
        text: Its text.
        role: Its role.
        id: Its test id or resource id.
        label: Its label or description.
        css: A CSS selector, on a browser.
        long: Click for long.
        device: browser, cdp:URL or android:SERIAL.
    """
    matcher = _matcher(ref=ref, text=text, role=role, id=id, label=label, css=css)
    return await _do(builders.build_click(matcher=matcher, kind="long_click" if long else "default"), device, ctx)


@app.command(isolation="loop")
async def ui_type(
    words: str,
    ctx: Context,
    ref: str | None = None,
    role: str | None = None,
    id: str | None = None,
    label: str | None = None,
    css: str | None = None,
    submit: bool = False,
    device: str = DEFAULT_DEVICE,
) -> dict[str, Any]:
    """Put text into a node, in place of what is there.

    Args:
        words: The text.
        ref: The node's ref, as in [ref=e12].
        role: Its role.
        id: Its test id or resource id.
        label: Its label or description.
        css: A CSS selector, on a browser.
        submit: Press Enter behind it.
        device: browser, cdp:URL or android:SERIAL.
    """
    matcher = _matcher(ref=ref, role=role, id=id, label=label, css=css)
    return await _do(builders.build_type(matcher, words, submit=submit), device, ctx)


@app.command(mutates=False, isolation="loop")
async def ui_wait(
    ctx: Context,
    text: str | None = None,
    text_contains: str | None = None,
    role: str | None = None,
    id: str | None = None,
    label: str | None = None,
    css: str | None = None,
    hidden: bool = False,
    timeout_ms: int = 10_000,
    device: str = DEFAULT_DEVICE,
) -> dict[str, Any]:
    """Wait until a node is to be seen, or is not any more.

    Args:
        text: Its text.
        text_contains: A part of its text.
        role: Its role.
        id: Its test id or resource id.
        label: Its label or description.
        css: A CSS selector, on a browser.
        hidden: Until none is to be seen.
        timeout_ms: How long to wait, 60000 at most.
        device: browser, cdp:URL or android:SERIAL.
    """
    matcher = _matcher(text=text, text_contains=text_contains, role=role, id=id, label=label, css=css)
    return await _do(builders.build_wait(matcher, timeout_ms, state="hidden" if hidden else "visible"), device, ctx)


@app.command(mutates=False, isolation="loop")
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
    """Check that a text is to be seen, anywhere or in one node; where it is not, say what is there instead.

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
    said = {name: value for name, value in {"role": role, "id": id, "label": label, "css": css}.items() if value}
    expected = {"text": text} if exact else {"text_contains": text}
    payload = builders.build_wait(_matcher(**expected, **said), timeout_ms)
    envelope = await execute(device, payload, remaining_ms=ctx.remaining_ms())
    if envelope.ok:
        return {"met": True, "text": text}
    failure = _failure(envelope)
    if envelope.code == "WAIT_TIMEOUT" and said:
        there = await execute(device, builders.build_read(_matcher(**said), 3_000), remaining_ms=ctx.remaining_ms())
        if there.ok and isinstance(there.data, dict):
            steps: Any = there.data["stepResults"]
            failure.context["found"] = steps[0]["data"]["text"]
    raise failure


@app.command(mutates=False, isolation="loop")
async def ui_screenshot(ctx: Context, device: str = DEFAULT_DEVICE) -> dict[str, Any]:
    """Take a picture of what is to be seen.

    Args:
        device: browser, cdp:URL or android:SERIAL.
    """
    return await _do(builders.build_screenshot(), device, ctx)
