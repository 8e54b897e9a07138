"""FastMCP's counterpart of examples/conformance.py: `fastmcp_server.py PORT`, with the same names.

Runs in an environment of its own, which has FastMCP.
"""

import base64
import json
import sys
from typing import Annotated, Any

import anyio
import mcp_types as types
from fastmcp import Context, FastMCP
from fastmcp.exceptions import ToolError
from fastmcp.prompts import Message
from fastmcp.utilities.types import Audio, Image
from pydantic import Field

PNG = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
)
WAV = base64.b64decode("UklGRiYAAABXQVZFZm10IBAAAAABAAEAQB8AAAB9AAACABAAZGF0YQIAAAA=")
STEP_S = 0.05

server: Any = FastMCP("conformance", version="1.0.0")


def embedded(uri: str, kind: str, text: str) -> types.EmbeddedResource:
    resource = types.TextResourceContents(uri=uri, mime_type=kind, text=text)
    return types.EmbeddedResource(type="resource", resource=resource)


# --- tools


@server.tool
def test_simple_text() -> str:
    """Return a text."""
    return "This is a simple text response for testing."


@server.tool
def test_image_content() -> Image:
    """Return an image."""
    return Image(data=PNG, format="png")


@server.tool
def test_audio_content() -> Audio:
    """Return a sound."""
    return Audio(data=WAV, format="wav")


@server.tool
def test_embedded_resource() -> types.EmbeddedResource:
    """Return an embedded resource."""
    return embedded("test://embedded-resource", "text/plain", "This is an embedded resource content.")


@server.tool
def test_multiple_content_types() -> list[Any]:
    """Return a text, an image and an embedded resource."""
    text = json.dumps({"test": "data", "value": 123})
    resource = embedded("test://mixed-content-resource", "application/json", text)
    return ["Multiple content types test:", Image(data=PNG, format="png"), resource]


@server.tool
def test_error_handling() -> str:
    """Fail."""
    raise ToolError("This tool intentionally returns an error for testing")


@server.tool
async def test_tool_with_progress(ctx: Context) -> str:
    """Report progress."""
    for done in (0, 50, 100):
        await ctx.report_progress(done, 100)
        await anyio.sleep(STEP_S)
    return "done"


@server.tool
async def test_tool_with_logging(ctx: Context) -> str:
    """Send three log messages."""
    for words in ("started", "processing data", "completed"):
        await ctx.info(f"Tool {words}")
        await anyio.sleep(STEP_S)
    return "logged"


@server.tool
def test_custom_header(region: Annotated[str, Field(json_schema_extra={"x-mcp-header": "Region"})]) -> str:
    """Return an argument that clients also send as a header."""
    return region


@server.tool
async def test_elicitation(message: str, ctx: Context) -> str:
    """Ask the person at the client."""
    answer = await ctx.elicit(message, response_type=str)
    return f"User response: {answer.action}"


@server.tool
async def test_sampling(prompt: str, ctx: Context) -> str:
    """Ask the model of the client."""
    messages = [types.SamplingMessage(role="user", content=types.TextContent(type="text", text=prompt))]
    answer = await ctx.session.create_message(messages, max_tokens=100, related_request_id=ctx.request_id)
    return f"LLM response: {getattr(answer.content, 'text', '')}"


# --- resources and prompts


@server.resource("test://static-text", mime_type="text/plain")
def static_text() -> str:
    return "This is the content of the static text resource."


@server.resource("test://static-binary", mime_type="image/png")
def static_binary() -> bytes:
    return PNG


@server.resource("test://template/{id}/data", mime_type="application/json")
def template(id: str) -> str:
    return json.dumps({"id": id, "templateTest": True, "data": f"Data for ID: {id}"})


@server.resource("test://watched-resource", mime_type="text/plain")
def watched_resource() -> str:
    return "Watched resource content"


@server.prompt
def test_simple_prompt() -> str:
    """Ask."""
    return "This is a simple prompt for testing."


@server.prompt
def test_prompt_with_arguments(arg1: str, arg2: str) -> str:
    """Ask with arguments."""
    return f"Prompt with arguments: arg1='{arg1}', arg2='{arg2}'"


@server.prompt
def test_prompt_with_embedded_resource(resourceUri: str) -> list[Message]:
    """Ask about a resource."""
    resource = embedded(resourceUri, "text/plain", "Embedded resource content for testing.")
    return [Message(resource), Message("Please process the embedded resource above.")]


@server.prompt
def test_prompt_with_image() -> list[Message]:
    """Ask about an image."""
    image = types.ImageContent(type="image", data=base64.b64encode(PNG).decode(), mime_type="image/png")
    return [Message(image), Message("Please analyze the image above.")]


@server.completion
async def complete(ref: Any, argument: Any, context: Any) -> list[str]:
    return [word for word in ("paris", "park", "party") if word.startswith(argument.value)]


if __name__ == "__main__":
    server.run(
        transport="http",
        host="127.0.0.1",
        port=int(sys.argv[1]),
        show_banner=False,
        log_level="CRITICAL",
        host_origin_protection=True,
    )
