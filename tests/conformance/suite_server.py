"""The server that the MCP conformance suite asks for, over stdio or HTTP: `suite_server.py [PORT]`.

The suite prescribes names, texts and schemas. They are found in its scenarios.
"""

from __future__ import annotations

import base64
import json
import sys
from collections.abc import Callable
from typing import Annotated, Any

import anyio
import mcp_types as types
from mcp.server.mcpserver import Context, MCPServer, RequestStateSecurity
from mcp.server.mcpserver.prompts.base import Prompt, UserMessage
from mcp.server.streamable_http import EventCallback, EventMessage, EventStore
from mcp.shared.exceptions import MCPError
from pydantic import Field

PNG = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
WAV = base64.b64encode(b"RIFF&\0\0\0WAVEfmt \x10\0\0\0\1\0\1\0@\x1f\0\0\x80>\0\0\2\0\x10\0data\2\0\0\0\0\0").decode()
STEP_S = 0.05
RECONNECTED_S = 0.3
RETRY_MS = 100

server = MCPServer("suite", version="1", request_state_security=RequestStateSecurity(keys=[b"suite" * 8]))


# --- tools with a fixed result


def text(words: str) -> types.TextContent:
    return types.TextContent(type="text", text=words)


def embedded(uri: str, kind: str, words: str) -> types.EmbeddedResource:
    resource = types.TextResourceContents(uri=uri, mime_type=kind, text=words)
    return types.EmbeddedResource(type="resource", resource=resource)


IMAGE = types.ImageContent(type="image", data=PNG, mime_type="image/png")
AUDIO = types.AudioContent(type="audio", data=WAV, mime_type="audio/wav")
NOTE = embedded("test://embedded-resource", "text/plain", "This is an embedded resource content.")
MIXED = embedded("test://mixed-content-resource", "application/json", '{"test":"data","value":123}')
FIXED: dict[str, list[Any]] = {
    "test_simple_text": [text("This is a simple text response for testing.")],
    "test_image_content": [IMAGE],
    "test_audio_content": [AUDIO],
    "test_embedded_resource": [NOTE],
    "test_multiple_content_types": [text("Multiple content types test:"), IMAGE, MIXED],
    "json_schema_2020_12_tool": [text("done")],
}


def fixed(content: list[Any]) -> Callable[[], list[Any]]:
    def tool() -> list[Any]:
        return content

    return tool


for name, content in FIXED.items():
    server.add_tool(fixed(content), name, description=f"Return the content of {name}.", structured_output=False)

CONTACT = {"anyOf": [{"required": ["phone"]}, {"required": ["email"]}]}
# The SDK has no public way to give a schema.
server._tool_manager._tools["json_schema_2020_12_tool"].parameters = {
    "$schema": "https://json-schema.org/draft/2020-12/schema",
    "type": "object",
    "$defs": {
        "address": {
            "$anchor": "addressDef",
            "type": "object",
            "properties": {"street": {"type": "string"}, "city": {"type": "string"}},
        }
    },
    "properties": {
        **{each: {"type": "string"} for each in ("name", "phone", "email")},
        "address": {"$ref": "#/$defs/address"},
        "contactMethod": {"type": "string", "enum": ["phone", "email"]},
    },
    "allOf": [CONTACT],
    "if": {"properties": {"contactMethod": {"const": "phone"}}, "required": ["contactMethod"]},
    "then": {"required": ["phone"]},
    "else": {"required": ["email"]},
    "additionalProperties": False,
}


# --- tools that speak to the client during the call


@server.tool()
async def test_tool_with_logging(ctx: Context) -> str:
    """Send three log messages."""
    for words in ("started", "processing data", "completed"):
        await ctx.info(f"Tool {words}")
        await anyio.sleep(STEP_S)
    return "logged"


@server.tool()
async def test_tool_with_progress(ctx: Context) -> str:
    """Report progress three times."""
    for done in (0, 50, 100):
        await ctx.report_progress(done, 100, f"{done} of 100")
        await anyio.sleep(STEP_S)
    return "finished"


@server.tool()
async def test_error_handling() -> str:
    """Fail."""
    raise RuntimeError("This tool intentionally returns an error for testing")


@server.tool()
async def test_sampling(prompt: str, ctx: Context) -> str:
    """Ask the model of the client."""
    messages = [types.SamplingMessage(role="user", content=text(prompt))]
    answer = await ctx.session.create_message(messages, max_tokens=100, related_request_id=ctx.request_id)
    return f"LLM response: {getattr(answer.content, 'text', '')}"


async def elicited(ctx: Context, message: str, properties: dict[str, Any], required: list[str]) -> str:
    schema = {"type": "object", "properties": properties, "required": required}
    answer = await ctx.session.elicit_form(message, schema, ctx.request_id)
    return f"action={answer.action}, content={json.dumps(answer.content)}"


@server.tool()
async def test_elicitation(message: str, ctx: Context) -> str:
    """Ask the person at the client."""
    return await elicited(ctx, message, {"response": {"type": "string", "description": "A response"}}, ["response"])


STATES = ["active", "inactive", "pending"]
DEFAULTS: dict[str, Any] = {
    "name": {"type": "string", "default": "John Doe"},
    "age": {"type": "integer", "default": 30},
    "score": {"type": "number", "default": 95.5},
    "status": {"type": "string", "enum": STATES, "default": "active"},
    "verified": {"type": "boolean", "default": True},
}
TITLED = [{"const": f"value{number}", "title": f"Option {number}"} for number in (1, 2, 3)]
ENUMS: dict[str, Any] = {
    "untitledSingle": {"type": "string", "enum": STATES},
    "titledSingle": {"type": "string", "oneOf": TITLED},
    "legacyEnum": {"type": "string", "enum": ["a", "b"], "enumNames": ["First", "Second"]},
    "untitledMulti": {"type": "array", "items": {"type": "string", "enum": STATES}},
    "titledMulti": {"type": "array", "items": {"anyOf": TITLED}},
}


@server.tool()
async def test_elicitation_sep1034_defaults(ctx: Context) -> str:
    """Ask with defaults."""
    return await elicited(ctx, "Please accept the defaults", DEFAULTS, [])


@server.tool()
async def test_elicitation_sep1330_enums(ctx: Context) -> str:
    """Ask with choices."""
    return await elicited(ctx, "Please choose", ENUMS, [])


@server.tool()
async def test_reconnection(ctx: Context) -> str:
    """Close the stream of the call, and answer later."""
    await ctx.close_sse_stream()
    await anyio.sleep(RECONNECTED_S)
    return "Reconnection test completed"


@server.tool()
async def test_trigger_tool_change(ctx: Context) -> str:
    """Announce a change of the tools."""
    server.add_tool(fixed([]), "test_dynamic_tool")
    server.remove_tool("test_dynamic_tool")
    await ctx.notify_tools_changed()
    return "changed"


@server.tool()
async def test_trigger_prompt_change(ctx: Context) -> str:
    """Announce a change of the prompts."""
    server.add_prompt(Prompt.from_function(test_simple_prompt, name="test_dynamic_prompt"))
    server.remove_prompt("test_dynamic_prompt")
    await ctx.notify_prompts_changed()
    return "changed"


@server.tool()
async def test_x_mcp_header(region: Annotated[str, Field(json_schema_extra={"x-mcp-header": "Region"})] = "") -> str:
    """Return an argument that is also a header."""
    return f"region={region}"


@server.tool()
async def test_missing_capability(ctx: Context) -> str:
    """Fail for a client without sampling."""
    capabilities = ctx.session.client_capabilities
    if capabilities is None or capabilities.sampling is None:
        needed = {"requiredCapabilities": {"sampling": {}}}
        raise MCPError(types.MISSING_REQUIRED_CLIENT_CAPABILITY, "the client does not offer sampling", needed)
    return "the client offers sampling"


# --- tools that need another round: the questions of revision 2026-07-28


def form(message: str, **properties: str) -> types.ElicitRequest:
    schema = {"type": "object", "properties": {name: {"type": kind} for name, kind in properties.items()}}
    return types.ElicitRequest(
        params=types.ElicitRequestFormParams(message=message, requested_schema={**schema, "required": list(properties)})
    )


def sampling(prompt: str) -> types.CreateMessageRequest:
    messages = [types.SamplingMessage(role="user", content=text(prompt))]
    return types.CreateMessageRequest(params=types.CreateMessageRequestParams(messages=messages, max_tokens=100))


NAME = form("What is your name?", name="string")
CONFIRM = form("Please confirm", ok="boolean")
ROUNDS: dict[str, tuple[dict[str, Any], str | None]] = {
    "elicitation": ({"user_name": NAME}, None),
    "sampling": ({"capital_question": sampling("What is the capital of France?")}, None),
    "list_roots": ({"client_roots": types.ListRootsRequest()}, None),
    "request_state": ({"confirm": CONFIRM}, "nonce"),
    "multiple_inputs": (
        {"user_name": NAME, "greeting": sampling("Greet me"), "client_roots": types.ListRootsRequest()},
        "several",
    ),
    "tampered_state": ({"confirm": CONFIRM}, "round-1"),
}
Answer = str | types.InputRequiredResult


def asking(requests: dict[str, Any], state: str | None) -> Callable[[Context], Answer]:
    def tool(ctx: Context) -> Answer:
        responses = ctx.input_responses or {}
        if requests.keys() <= responses.keys() and ctx.request_state == state:
            answers = {name: response.model_dump(mode="json") for name, response in responses.items()}
            return f"state-ok: {json.dumps(answers)}"
        return types.InputRequiredResult(input_requests=requests, request_state=state)

    return tool


for name, (requests, state) in ROUNDS.items():
    server.add_tool(asking(requests, state), f"test_input_required_result_{name}", description="Ask the client.")


@server.tool()
async def test_input_required_result_multi_round(ctx: Context) -> Answer:
    """Ask twice."""
    responses, state = ctx.input_responses or {}, ctx.request_state or "0"
    if state == "2" and "step2" in responses:
        return "both answered"
    if state == "1" and "step1" in responses:
        requests = {"step2": form("Step 2: your favourite colour?", color="string")}
        return types.InputRequiredResult(input_requests=requests, request_state="2")
    return types.InputRequiredResult(input_requests={"step1": NAME}, request_state="1")


@server.tool()
async def test_input_required_result_capabilities(ctx: Context) -> Answer:
    """Ask what the client can answer."""
    offered = ctx.client_capabilities
    requests: dict[str, Any] = {}
    if offered is None or offered.sampling is not None:
        requests["sample"] = sampling("Say hello")
    if offered is None or offered.elicitation is not None:
        requests["ask"] = NAME
    return types.InputRequiredResult(input_requests=requests, request_state="offered")


# --- resources, prompts, and the rest


@server.resource("test://static-text")
def static_text() -> str:
    return "This is the content of the static text resource."


@server.resource("test://static-binary", mime_type="image/png")
def static_binary() -> bytes:
    return base64.b64decode(PNG)


@server.resource("test://template/{id}/data")
def template(id: str) -> str:
    return json.dumps({"id": id, "templateTest": True, "data": f"Data for ID: {id}"})


@server.resource("test://watched-resource")
def watched() -> str:
    return "watched"


@server.prompt()
def test_simple_prompt() -> list[UserMessage]:
    """A prompt."""
    return [UserMessage(text("This is a simple prompt for testing."))]


@server.prompt()
def test_prompt_with_arguments(arg1: str, arg2: str) -> list[UserMessage]:
    """A prompt with arguments."""
    return [UserMessage(text(f"Prompt with arguments: arg1='{arg1}', arg2='{arg2}'"))]


@server.prompt()
def test_prompt_with_embedded_resource(resourceUri: str) -> list[UserMessage]:
    """A prompt with a resource."""
    resource = embedded(resourceUri, "text/plain", "Embedded resource content for testing.")
    return [UserMessage(resource), UserMessage(text("Please process the embedded resource above."))]


@server.prompt()
def test_prompt_with_image() -> list[UserMessage]:
    """A prompt with an image."""
    return [UserMessage(IMAGE), UserMessage(text("Please analyze the image above."))]


@server.prompt()
async def test_input_required_result_prompt(ctx: Context) -> list[UserMessage] | types.InputRequiredResult:
    """A prompt that asks first."""
    if "user_context" in (ctx.input_responses or {}):
        return [UserMessage(text("Use the context"))]
    return types.InputRequiredResult(input_requests={"user_context": form("Which context?", context="string")})


@server.completion()
async def complete(ref: Any, argument: Any, context: Any) -> types.Completion:
    return types.Completion(values=[], total=0, has_more=False)


async def accept(ctx: Any, params: Any) -> types.EmptyResult:
    return types.EmptyResult()


# The SDK has no public way to add these.
for method, params in (
    ("logging/setLevel", types.SetLevelRequestParams),
    ("resources/subscribe", types.SubscribeRequestParams),
    ("resources/unsubscribe", types.UnsubscribeRequestParams),
):
    server._lowlevel_server.add_request_handler(method, params, accept)


class KeptEvents(EventStore):
    """The events of all streams, in order. The place in the list is the id."""

    def __init__(self) -> None:
        self.events: list[tuple[str, Any]] = []

    async def store_event(self, stream_id: str, message: Any) -> str:
        self.events.append((stream_id, message))
        return str(len(self.events))

    async def replay_events_after(self, last_event_id: str, send_callback: EventCallback) -> str | None:
        stream = self.events[int(last_event_id) - 1][0]
        for place, (each, message) in enumerate(self.events[int(last_event_id) :], int(last_event_id) + 1):
            if each == stream and message is not None:
                await send_callback(EventMessage(message, str(place)))
        return stream


if __name__ == "__main__":
    if sys.argv[1:]:
        port = int(sys.argv[1])
        server.run("streamable-http", port=port, event_store=KeptEvents(), retry_interval=RETRY_MS)
    else:
        server.run("stdio")
