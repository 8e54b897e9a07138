"""The server that the public conformance suites of MCP expect, with the names that they use."""

import asyncio
import base64
import json
import os
import time
from enum import StrEnum
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field

from shotclock import Answer, App, Audio, Context, EmbeddedResource, Failure, Image

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


# --- log, questions to the person and the model of the client ---------------------------------------


class Account(BaseModel):
    """What the suite asks a person for."""

    username: str = Field(description="User's response")
    email: str = Field(description="User's email address")


class Defaults(BaseModel):
    """One field of each kind, with a default."""

    name: str = "John Doe"
    age: int = 30
    score: float = 95.5
    status: Literal["active", "inactive", "pending"] = "active"
    verified: bool = True


class Titled(StrEnum):
    """Choices with titles."""

    FIRST_OPTION = "value1"
    SECOND_OPTION = "value2"
    THIRD_OPTION = "value3"


Untitled = Literal["option1", "option2", "option3"]
OLD_NAMES: dict[str, Any] = {"enumNames": ["Option One", "Option Two", "Option Three"]}


class Choices(BaseModel):
    """One field of each kind of choice."""

    untitledSingle: Untitled
    titledSingle: Titled
    legacyEnum: Annotated[Literal["opt1", "opt2", "opt3"], Field(json_schema_extra=OLD_NAMES)]
    untitledMulti: list[Untitled]
    titledMulti: list[Titled]


class Name(BaseModel):
    name: str


class Color(BaseModel):
    color: str


class Confirmation(BaseModel):
    ok: bool


class Deletion(BaseModel):
    confirm: bool


class Background(BaseModel):
    context: str


def describe(answer: Answer[Any]) -> str:
    content = None if answer.data is None else answer.data.model_dump(mode="json")
    return f"Elicitation completed: action={answer.action}, content={json.dumps(content)}"


@app.command(mutates=False)
def test_tool_with_logging(ctx: Context) -> str:
    """Log."""
    ctx.log("Tool execution started")
    time.sleep(0.05)
    ctx.log("Tool processing data")
    time.sleep(0.05)
    ctx.log("Tool execution completed")
    return "logged"


@app.command(mutates=False)
def test_logging_tool(ctx: Context) -> str:
    """Log at each level."""
    for level in ("debug", "info", "warning", "error"):
        ctx.log(f"a message of level {level}", level)
    return "logged"


@app.command(mutates=False)
def test_sampling(prompt: str, ctx: Context) -> str:
    """Have the client's model answer."""
    return f"LLM response: {ctx.sample(prompt, max_tokens=100).text}"


@app.command(mutates=False)
def test_missing_capability(ctx: Context) -> str:
    """Need the client's model."""
    return str(ctx.sample("Say hello").text)


@app.command(mutates=False)
def test_elicitation(message: str, ctx: Context) -> str:
    """Ask the client's person."""
    return f"User response: {describe(ctx.ask(message, Account))}"


@app.command(mutates=False)
def test_elicitation_sep1034_defaults(ctx: Context) -> str:
    """Ask with defaults."""
    return describe(ctx.ask("Please check the defaults", Defaults))


@app.command(mutates=False)
def test_elicitation_sep1330_enums(ctx: Context) -> str:
    """Ask for choices."""
    return describe(ctx.ask("Please choose", Choices))


@app.command(interruption=True)
def confirm_delete(filename: str, ctx: Context) -> str:
    """Ask in a task."""
    answer = ctx.ask(f"Delete {filename}?", Deletion)
    return f"deleted {filename}" if answer.data and answer.data.confirm else f"kept {filename}"


@app.command(mutates=False, interruption=True)
async def multi_input(ctx: Context) -> str:
    """Ask two questions at the same time in a task."""
    name, answer = await asyncio.gather(
        ctx.ask("What is your name?", Name, name="name"), ctx.ask("Sure?", Deletion, name="confirm")
    )
    return f"{name.action} {answer.action}"


@app.command(mutates=False)
def test_input_required_result_elicitation(ctx: Context) -> str:
    """Ask for a name."""
    answer = ctx.ask("What is your name?", Name, name="user_name")
    return f"Hello, {answer.data.name if answer.data else 'stranger'}!"


@app.command(mutates=False)
def test_input_required_result_sampling(ctx: Context) -> str:
    """Ask the model for a capital."""
    sampled = ctx.sample("What is the capital of France?", max_tokens=100, name="capital_question")
    return str(sampled.text)


@app.command(mutates=False)
def test_input_required_result_list_roots(ctx: Context) -> str:
    """Ask for the roots."""
    return ", ".join(root.uri for root in ctx.roots(name="client_roots"))


@app.command(mutates=False)
def test_input_required_result_request_state(ctx: Context) -> str:
    """Ask for a confirmation."""
    return f"state-ok: {ctx.ask('Please confirm', Confirmation, name='confirm').action}"


@app.command(mutates=False)
def test_input_required_result_tampered_state(ctx: Context) -> str:
    """Ask for a confirmation, with a state that cannot be forged."""
    return f"state-ok: {ctx.ask('Please confirm', Confirmation, name='confirm').action}"


@app.command(mutates=False)
async def test_input_required_result_multiple_inputs(ctx: Context) -> str:
    """Ask the person, the model and the client at the same time."""
    answer, sampled, roots = await asyncio.gather(
        ctx.ask("What is your name?", Name, name="user_name"),
        ctx.sample("Generate a greeting", max_tokens=50, name="greeting"),
        ctx.roots(name="client_roots"),
    )
    return f"{answer.action}: {sampled.text} ({len(roots)} roots)"


@app.command(mutates=False)
def test_input_required_result_multi_round(ctx: Context) -> str:
    """Ask twice."""
    name = ctx.ask("Step 1: What is your name?", Name, name="step1")
    color = ctx.ask("Step 2: What is your favorite color?", Color, name="step2")
    return f"{name.data} {color.data}"


@app.command(mutates=False)
def test_input_required_result_capabilities(ctx: Context) -> str:
    """Ask the person, or the model of a client that cannot ask a person."""
    try:
        return describe(ctx.ask("What is your name?", Name, name="user_name"))
    except Failure:
        return str(ctx.sample("Which name is common?", name="name").text)


@app.prompt
def test_input_required_result_prompt(ctx: Context) -> str:
    """Ask for the background first."""
    answer = ctx.ask("What context should the prompt use?", Background, name="user_context")
    return f"Consider this: {answer.data.context if answer.data else 'nothing'}"
