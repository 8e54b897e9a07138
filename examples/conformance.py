"""The server that the public conformance suites of MCP expect, with the names that they use."""

import base64
import json
import os
import time
from typing import Annotated, Any

from pydantic import Field

from shotclock import App, Audio, Context, EmbeddedResource, Failure, Image

app = App("conformance", version="1.0.0")

PNG = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
)
WAV = base64.b64decode("UklGRiYAAABXQVZFZm10IBAAAAABAAEAQB8AAAB9AAACABAAZGF0YQIAAAA=")


# --- tools ----------------------------------------------------------------------------------------


@app.command(mutates=False)
def test_simple_text() -> str:
    """Return a text."""
    return "This is a simple text response for testing."


@app.command(mutates=False)
def test_image_content() -> Image:
    """Return an image."""
    return Image(data=PNG)


@app.command(mutates=False)
def test_audio_content() -> Audio:
    """Return a sound."""
    return Audio(data=WAV)


@app.command(mutates=False)
def test_embedded_resource() -> EmbeddedResource:
    """Return an embedded resource."""
    text = "This is an embedded resource content."
    return EmbeddedResource("test://embedded-resource", text=text, mime_type="text/plain")


@app.command(mutates=False)
def test_multiple_content_types() -> list[str | Image | EmbeddedResource]:
    """Return a text, an image and an embedded resource."""
    text = json.dumps({"test": "data", "value": 123})
    resource = EmbeddedResource("test://mixed-content-resource", text=text, mime_type="application/json")
    return ["Multiple content types test:", Image(data=PNG), resource]


@app.command(mutates=False)
def test_error_handling() -> str:
    """Fail."""
    raise Failure("COMMAND_FAILED", "This tool intentionally returns an error for testing")


@app.command(mutates=False)
def test_tool_with_progress(ctx: Context) -> str:
    """Report progress."""
    for done in (0, 50, 100):
        ctx.progress(done, 100)
        time.sleep(0.05)
    return "done"


@app.command(mutates=False)
def test_custom_header(region: Annotated[str, Field(json_schema_extra={"x-mcp-header": "Region"})]) -> str:
    """Return an argument that clients also send as a header."""
    return region


# --- tasks ----------------------------------------------------------------------------------------


@app.command(mutates=False)
def greet(name: str) -> str:
    """Greet somebody."""
    return f"Hello, {name}!"


@app.command(mutates=False, interruption=True)
def slow_compute(seconds: float, label: str = "") -> str:
    """Compute for some seconds."""
    time.sleep(seconds)
    return f"computed {label} for {seconds} seconds"


@app.command(mutates=False, interruption=True)
def failing_job() -> str:
    """Fail after a second."""
    time.sleep(1)
    raise Failure("COMMAND_FAILED", "This job intentionally fails for testing")


@app.command(mutates=False, interruption=True)
def protocol_error_job() -> str:
    """End the process that runs it."""
    os._exit(1)


# --- resources ------------------------------------------------------------------------------------


@app.resource("test://static-text", mime_type="text/plain")
def static_text() -> str:
    """Return a text."""
    return "This is the content of the static text resource."


@app.resource("test://static-binary", mime_type="image/png")
def static_binary() -> bytes:
    """Return bytes."""
    return PNG


@app.resource("test://template/{id}/data", mime_type="application/json")
def template(id: str) -> dict[str, Any]:
    """Return an object."""
    return {"id": id, "templateTest": True, "data": f"Data for ID: {id}"}


@app.resource("test://watched-resource", mime_type="text/plain")
def watched_resource() -> str:
    """Return a text that may change."""
    return "Watched resource content"


# --- prompts --------------------------------------------------------------------------------------


@app.prompt
def test_simple_prompt() -> str:
    """Ask."""
    return "This is a simple prompt for testing."


@app.prompt
def test_prompt_with_arguments(arg1: str, arg2: str) -> str:
    """Ask with arguments.

    Args:
        arg1: The first argument.
        arg2: The second argument.
    """
    return f"Prompt with arguments: arg1='{arg1}', arg2='{arg2}'"


@app.prompt
def test_prompt_with_embedded_resource(resourceUri: str) -> list[str | EmbeddedResource]:
    """Ask about a resource.

    Args:
        resourceUri: The URI of the resource.
    """
    text = "Embedded resource content for testing."
    resource = EmbeddedResource(resourceUri, text=text, mime_type="text/plain")
    return [resource, "Please process the embedded resource above."]


@app.prompt
def test_prompt_with_image() -> list[str | Image]:
    """Ask about an image."""
    return [Image(data=PNG), "Please analyze the image above."]


@app.completion("test_prompt_with_arguments", "arg1")
def complete_arg1(value: str) -> list[str]:
    return [word for word in ("paris", "park", "party") if word.startswith(value)]
