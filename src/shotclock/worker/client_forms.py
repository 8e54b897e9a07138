"""Forms that a client shows to its person: the JSON Schema of a Python type, and the typed answer.

MCP allows a flat object of texts, numbers, truth values and choices, each with a default. `ctx.ask` takes the type of
one such value, or a model, dataclass or TypedDict of them.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, Generic, Literal, NamedTuple, TypeVar
from urllib.parse import urlsplit

from ..core.errors import Failure

T = TypeVar("T")

LONGEST_URL = 4_000
REQUIRED_CAPABILITIES = "required_capabilities"  # in the context of a failure: those that the client lacks
CAPABILITIES = {"elicitation/create": "elicitation", "sampling/createMessage": "sampling", "roots/list": "roots"}
"""The capabilities of clients that questions need."""
_CHOICES = {"enum", "oneOf", "anyOf"}
_FORMATS = {None, "email", "uri", "date", "date-time"}
_WORDS = {
    "string": {"minLength", "maxLength", "pattern", "format", "enumNames"} | _CHOICES,
    "integer": {"minimum", "maximum"},
    "number": {"minimum", "maximum"},
    "boolean": set[str](),
    "array": {"items", "minItems", "maxItems", "uniqueItems"},
}
_ALWAYS = {"type", "title", "description", "default"}


class Answer(NamedTuple, Generic[T]):
    """The answer of a person: the data only if the action is "accept"."""

    action: Literal["accept", "decline", "cancel"]
    data: T | None = None


class Sampled(NamedTuple):
    """The message of the client's model."""

    text: str
    model: str
    stop_reason: str | None
    content: list[dict[str, Any]]
    """All parts, where it is more than a text."""


class Root(NamedTuple):
    """A folder or file that the client works on."""

    uri: str
    name: str | None = None


class Form:
    def __init__(self, of: Any) -> None:
        """Raises TypeError for a type that a client cannot ask for."""
        from pydantic import TypeAdapter, create_model  # slow to import, and few commands ask

        marks = ("model_fields", "__dataclass_fields__", "__total__")
        self._is_one_value = not (isinstance(of, type) and any(hasattr(of, mark) for mark in marks))
        try:
            asked = create_model("Asked", answer=(of, ...)) if self._is_one_value else of
            self._adapter: Any = TypeAdapter(asked)
            written = self._adapter.json_schema(schema_generator=_generator())
        except Exception as error:
            raise TypeError(f"ctx.ask: {_name(of)} cannot be asked for: {error}") from None
        definitions = written.get("$defs", {})
        properties = {name: _inline(each, definitions) for name, each in written.get("properties", {}).items()}
        for name, each in properties.items():
            if (why := _why_not(each)) is not None:
                what = _name(of) if self._is_one_value else f"{_name(of)}.{name}"
                raise TypeError(
                    f"ctx.ask: {what} cannot be asked for: {why}; use str, int, float, bool, Literal or Enum of texts, "
                    "a list of these choices, or a flat model or dataclass of them"
                )
        if not properties:
            raise TypeError(f"ctx.ask: {_name(of)} has no field to ask for")
        self.schema: dict[str, Any] = {"type": "object", "properties": properties}
        if written.get("required"):
            self.schema["required"] = written["required"]

    def read(self, result: Mapping[str, Any]) -> Answer[Any]:
        """Return the typed answer of a client. Raises Failure BAD_ANSWER."""
        action = result.get("action")
        if action in ("decline", "cancel"):
            return Answer(action)
        content = result.get("content")
        try:
            if action != "accept" or not isinstance(content, Mapping):
                raise ValueError("it is no form")
            data = self._adapter.validate_python(dict(content))
        except ValueError as error:  # pydantic's is one
            lines = "; ".join(str(error).splitlines()[1:3]) or str(error)
            raise Failure("BAD_ANSWER", f"the client's answer does not fit the question: {lines}") from None
        return Answer("accept", data.answer if self._is_one_value else data)


def check_capabilities(declared: Mapping[str, Any], method: str, params: Mapping[str, Any]) -> None:
    """Raise Failure CANNOT_ASK if a client that declared these cannot answer. Plain `elicitation` is forms."""
    name = CAPABILITIES[method]
    has, missing = declared.get(name), dict[str, Any]()
    if method == "elicitation/create":
        mode = "url" if params.get("mode") == "url" else "form"
        if has is not None and (mode in has or (mode == "form" and "url" not in has)):
            return
        missing = {mode: {}} if has is not None or mode == "url" else {}
    elif has is not None:
        return
    message = f"the client does not support {'.'.join([name, *missing])} ({method})"
    raise Failure("CANNOT_ASK", message, context={REQUIRED_CAPABILITIES: {name: missing}})


def checked_url(url: str) -> str:
    """Return a URL that a person can be asked to open. Raises ValueError."""
    parts = urlsplit(url)
    if parts.scheme not in ("https", "http") or not parts.hostname or len(url) > LONGEST_URL or not url.isprintable():
        raise ValueError(f"ctx.ask_url: not an http or https URL of at most {LONGEST_URL} characters: {url[:100]!r}")
    return url


def read_consent(result: Mapping[str, Any]) -> Answer[None]:
    """Return the answer to a URL. Raises Failure BAD_ANSWER."""
    action = result.get("action")
    if action not in ("accept", "decline", "cancel"):
        raise Failure("BAD_ANSWER", "the client's answer has no action")
    return Answer(action)


def read_sample(result: Mapping[str, Any]) -> Sampled:
    """Return the message of the client's model. Raises Failure BAD_ANSWER."""
    content: Any = result.get("content")
    parts: list[Any] = content if isinstance(content, list) else [content]
    if not isinstance(result.get("model"), str) or not all(isinstance(part, dict) for part in parts):
        raise Failure("BAD_ANSWER", "the client's answer is no message of a model")
    text = "".join(str(part.get("text", "")) for part in parts if part.get("type") == "text")
    return Sampled(text, result["model"], result.get("stopReason"), parts)


def read_roots(result: Mapping[str, Any]) -> list[Root]:
    """Return the roots of the client. Raises Failure BAD_ANSWER."""
    roots = result.get("roots")
    if not isinstance(roots, list) or not all(isinstance(root, dict) and "uri" in root for root in roots):
        raise Failure("BAD_ANSWER", "the client's answer is no list of roots")
    return [Root(str(root["uri"]), root.get("name")) for root in roots]


def sampling_messages(messages: object) -> list[dict[str, Any]]:
    """Return a text, or a list of texts and messages, as MCP writes messages. Raises TypeError."""
    if isinstance(messages, str):
        messages = [messages]
    written = []
    for message in messages if isinstance(messages, list | tuple) else [None]:
        whole = {"role": "user", "content": message} if isinstance(message, str) else message
        role, content = (whole.get("role"), whole.get("content")) if isinstance(whole, dict) else (None, None)
        if role not in ("user", "assistant") or not isinstance(content, str | dict | list):
            raise TypeError(
                "ctx.sample: a message is a text, or a dict with role (user or assistant) and content; "
                f"got {repr(message)[:100]}"
            )
        content = {"type": "text", "text": content} if isinstance(content, str) else content
        written.append({"role": role, "content": content})
    return written


def _name(of: Any) -> str:
    return str(of.__name__) if type(of) is type or hasattr(of, "__mro__") else str(of)


def _inline(schema: dict[str, Any], definitions: Mapping[str, Any]) -> dict[str, Any]:
    """Return the schema without references: MCP has none in forms."""
    if "$ref" in schema:
        rest = {word: each for word, each in schema.items() if word != "$ref"}
        schema = {**definitions[schema["$ref"].rpartition("/")[2]], **rest}
    if "const" in schema:
        schema = {"enum": [schema["const"]], **{word: each for word, each in schema.items() if word != "const"}}
    if isinstance(schema.get("items"), dict):
        items = {word: each for word, each in _inline(schema["items"], definitions).items() if word != "title"}
        if "oneOf" in items:  # in a list of choices they are named so
            items = {"anyOf": items["oneOf"]}
        return {**schema, "items": items}
    return schema


def _why_not(schema: Mapping[str, Any]) -> str | None:
    kind = schema.get("type")
    if kind not in _WORDS:
        return "it is no text, number, truth value or choice"
    if more := schema.keys() - _WORDS[kind] - _ALWAYS:
        return f"forms have no {', '.join(sorted(more))}"
    if schema.get("format") not in _FORMATS:
        return f"forms have no format {schema['format']!r}"
    items = schema.get("items", {})
    if kind == "array" and not ((items.keys() <= {"type", "enum"} and "enum" in items) or items.keys() == {"anyOf"}):
        return "a list has to be one of choices, such as list[Literal[...]]"
    if not all(isinstance(each, str) for part in (schema, items) for each in part.get("enum", ())):
        return "choices are texts"
    return None


@lru_cache(maxsize=1)
def _generator() -> Any:
    """Return the generator of schemas. Made on use, because pydantic is slow to import."""
    from pydantic.json_schema import GenerateJsonSchema

    class FormSchema(GenerateJsonSchema):
        def nullable_schema(self, schema: Any) -> Any:
            """Leave None out: an optional field is one that is not required."""
            return self.generate_inner(schema["schema"])

        def default_schema(self, schema: Any) -> Any:
            written = super().default_schema(schema)
            return {word: each for word, each in written.items() if word != "default" or each is not None}

        def enum_schema(self, schema: Any) -> Any:
            """Show the names of an enum's members where they say something else than the values."""
            written = super().enum_schema(schema)
            members: list[enum.Enum] = schema["members"]
            if all(_title(each) == _plain(str(each.value)) for each in members):
                return written
            choices = [{"const": each.value, "title": _title(each)} for each in members]
            if not all(isinstance(each.value, str) for each in members):
                return written
            return {"type": "string", "oneOf": choices}

    return FormSchema


def _title(member: enum.Enum) -> str:
    return _plain(member.name)


def _plain(name: str) -> str:
    return name.replace("_", " ").replace("-", " ").capitalize()
