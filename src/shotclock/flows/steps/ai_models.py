"""The keys of `ai`, the model with its server and its key, and the JSON Schema of the output.

The key of a provider is sent only to the provider's own hosts, to this machine, and to servers that the user's
environment names, never to a server that only the file names.

jsonschema is imported on use: it is slow.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator, Mapping
from ipaddress import ip_address
from typing import Annotated, Any, Literal, NamedTuple
from urllib.parse import urlsplit

from ...core.errors import Failure
from ...core.validation import Before, Part, field
from ...core.value_types import JsonObject
from ...core.visible_text import looks_secret
from .provider import Backoff, Milliseconds, Retry, Scalar, as_list, check_server


class ModelProvider(NamedTuple):
    """A provider of models, and its variables in the environment."""

    keys: tuple[str, ...]  # the first that is set counts
    url_variable: str
    package: str
    default_model: str
    names: str  # the beginnings of model names
    host: str  # with subdomains


PROVIDERS = {
    "anthropic": ModelProvider(
        ("ANTHROPIC_API_KEY",), "ANTHROPIC_BASE_URL", "anthropic", "claude-sonnet-5", r"claude", "api.anthropic.com"
    ),
    "openai": ModelProvider(
        ("OPENAI_API_KEY",), "OPENAI_BASE_URL", "openai", "gpt-5.5", r"gpt|chatgpt|o\d", "api.openai.com"
    ),
    "google": ModelProvider(
        ("GOOGLE_API_KEY", "GEMINI_API_KEY"),
        "GOOGLE_GEMINI_BASE_URL",
        "google.genai",
        "gemini-3.5-flash",
        r"gemini",
        "generativelanguage.googleapis.com",
    ),
}
KEY_NAMES = frozenset(name for each in PROVIDERS.values() for name in each.keys)
NAME_KEY = (
    "put the key of that server into a variable of its own and name it in `api_key_env`, "
    "or set the server in the environment"
)

# Default timeouts by the family of the model, the first match. Small models answer at once, large ones think for long.
OTHER_TIMEOUT_MS = 10 * 60_000
TIMEOUTS_MS = (
    (re.compile(r"haiku|\bmini\b|\bnano\b|flash|\blite\b"), 5 * 60_000),
    (re.compile(r"opus|mythos|-pro\b|deep-research|^o\d"), 30 * 60_000),
    (re.compile(r"claude|gpt|gemini"), 15 * 60_000),
)


def default_timeout_ms(model: str | None) -> int:
    for family, timeout_ms in TIMEOUTS_MS:
        if model is not None and family.search(model):
            return timeout_ms
    return OTHER_TIMEOUT_MS


class ChosenModel(NamedTuple):
    provider: str
    model: str
    base_url: str | None
    key: str


def _secret_name(written: Any) -> Any:
    if isinstance(written, str) and not looks_secret(written):
        raise ValueError("should be a name like MY_API_KEY, which marks its value as a secret")
    return written


class AiModel(Part):
    """`fallback`: a model for when the one before it does not answer."""

    provider: Literal["anthropic", "openai", "google"] | None = None
    model: str | None = None
    base_url: str | None = None
    api_key_env: Annotated[str, Before(_secret_name)] | None = None  # names the variable with the key of this server


Cost = int | float


def _above_zero(written: Any) -> Any:
    if isinstance(written, int | float) and not isinstance(written, bool) and not 0 < written < float("inf"):
        raise ValueError("should be an amount above 0, in US dollars")
    return written


class AiLimits(Part):
    """`limits`: limits of the agent beside its time."""

    requests: int | None = field(default=None, ge=1)
    tool_calls: int | None = field(default=None, ge=0)
    input_tokens: int | None = field(default=None, ge=1)
    output_tokens: int | None = field(default=None, ge=1)
    total_tokens: int | None = field(default=None, ge=1)
    cost: Annotated[Cost, Before(_above_zero)] | None = None  # in US dollars


class AiServer(Part):
    """`mcp_servers`: an MCP server whose tools the agent may call."""

    command: str | None = None
    args: list[str] = field(default=[], keys=("args", "command_args"))
    env: dict[str, Scalar] = field(default={})
    url: str | None = None
    headers: dict[str, Scalar] = field(default={})
    tools: list[str] | None = None
    timeout: Milliseconds | None = None
    connect_timeout: Milliseconds | None = None
    transport: Literal["stdio", "http"] | None = None

    def check_together(self) -> None:
        check_server(self.command, self.url, self.transport)


DEFAULT_RETRY = Retry(max=2, backoff=Backoff(mode="exponential", delay_ms=500, max_delay_ms=30_000, jitter=True))
DEFAULT_REQUESTS = 50  # more is a loop


class AiPart(AiModel):
    """`ai`: which model, how long, with which tools."""

    system_prompt: str | None = None
    timeout: Milliseconds | None = None
    ai_timeout: Milliseconds | None = None  # the soft limit
    mcp_servers: dict[str, AiServer] = field(default={})
    tools: Annotated[list[str], Before(as_list, str | list[str])] = field(default=[])
    max_iterations: int | None = field(default=None, ge=1)
    limits: AiLimits = AiLimits()
    retry: Retry = DEFAULT_RETRY
    fallback: list[AiModel] = field(default=[])
    timeout_behavior: Literal["graceful", "negotiated"] = "graceful"
    negotiated_timeout_budget: Milliseconds | None = None
    negotiated_timeout_max_requests: int | None = field(default=None, ge=1)
    negotiated_timeout_max_per_request: Milliseconds | None = None
    graceful_stop_deadline: Milliseconds | None = None


def choose_model(written: AiModel, environment: Mapping[str, str], own: Mapping[str, str] | None = None) -> ChosenModel:
    """Return the model with its key. Raises Failure where no key is set. `own` are the variables that the file adds.

    The provider is that of the file; or OpenAI's protocol for a `base_url`; or the one whose models have such names; or
    the first whose key is set. The model is that of the file, or SHOTCLOCK_AI_MODEL, or the provider's default.
    """
    variables = {**environment, **(own or {})}
    wanted = written.model or variables.get("SHOTCLOCK_AI_MODEL") or None
    provider: str | None = written.provider
    if provider is None and written.base_url is not None:
        provider = "openai"
    if provider is None and wanted is not None:
        provider = next((name for name, each in PROVIDERS.items() if re.match(each.names, wanted)), None)
    if provider is None:
        provider = next((name for name, each in PROVIDERS.items() if _find_key(each, variables)), None)
    if provider is None and variables.get(PROVIDERS["openai"].url_variable):
        provider = "openai"
    if provider is None:
        names = ", ".join(each.keys[0] for each in PROVIDERS.values())
        raise Failure("PRECONDITION", f"no key of a model is set: set one of {names}")
    chosen = PROVIDERS[provider]
    url = written.base_url or variables.get(chosen.url_variable) or None
    if url is not None and not re.match(r"https?://[^/?#\s]", url, re.IGNORECASE):
        raise Failure("STEP_INVALID", f"{url!r} is not the address of a server: begin it with http:// or https://")
    # A provider's key is only sent to its own server, to this machine, or to the address in the user's environment.
    is_trusted = url is None or url == environment.get(chosen.url_variable) or _is_own(url, chosen)
    if written.api_key_env is not None:
        foreign = None if is_trusted else url
        if foreign is not None and written.api_key_env in KEY_NAMES:
            message = f"{written.api_key_env} is not sent to {host_of(foreign)}: it is the key of a provider of models"
            raise Failure("PRECONDITION", message, suggestion=NAME_KEY)
        if not variables.get(written.api_key_env):
            raise Failure("PRECONDITION", f"the variable {written.api_key_env} is not set, which `api_key_env` names")
        key = variables[written.api_key_env]
    else:
        key = _find_key(chosen, variables) if is_trusted else ""
        if not key and not (provider == "openai" and url):  # a local server may need none
            raise _no_key(provider, None if is_trusted else url)
    if written.model is None and wanted is not None and not re.match(chosen.names, wanted) and url is None:
        wanted = None  # the variable names a model of another provider
    return ChosenModel(provider, wanted or chosen.default_model, url, key)


def _find_key(provider: ModelProvider, variables: Mapping[str, str]) -> str:
    return next((variables[name] for name in provider.keys if variables.get(name)), "")


_NOT_PLAIN = re.compile(r"[\\@\s\x00-\x20]")


def _is_own(url: str, provider: ModelProvider) -> bool:
    """Return whether an address is the provider's by https, or on this machine."""
    if _NOT_PLAIN.search(url):  # parsers of addresses disagree about the host
        return False
    try:
        parts = urlsplit(url)
        host = (parts.hostname or "").rstrip(".")
    except ValueError:
        return False
    if host == "localhost" or host.endswith(".localhost"):
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return parts.scheme == "https" and (host == provider.host or host.endswith(f".{provider.host}"))


def _no_key(provider: str, foreign: str | None) -> Failure:
    name = PROVIDERS[provider].keys[0]
    if foreign is None:
        return Failure("PRECONDITION", f"the variable {name} is not set: it holds the key of {provider}'s models")
    message = f"{host_of(foreign)} is not a host of {provider}, so {name} is not sent there, and no other key is named"
    return Failure("PRECONDITION", message, suggestion=NAME_KEY)


def host_of(url: str) -> str:
    try:
        return urlsplit(url).hostname or url
    except ValueError:
        return url


def withheld_key(chosen: ChosenModel, variables: Mapping[str, str]) -> str | None:
    """Return the variable whose key is not sent to a server without a key of its own."""
    keys = PROVIDERS[chosen.provider].keys
    return next((name for name in keys if variables.get(name)), None) if not chosen.key else None


def find_schema_flaw(schema: Mapping[str, Any]) -> str | None:
    from jsonschema import Draft202012Validator, FormatChecker
    from jsonschema.exceptions import SchemaError
    from referencing import Registry
    from referencing.exceptions import Unresolvable
    from referencing.jsonschema import DRAFT202012

    try:
        Draft202012Validator.check_schema(schema, format_checker=FormatChecker(["regex"]))
        resolver = Registry().with_resource("", DRAFT202012.create_resource(schema)).resolver()
        for part in _objects_in(schema):
            reference = part.get("$ref")
            if isinstance(reference, str) and not isinstance(resolver.lookup(reference).contents, dict | bool):
                return f"$ref {reference!r} refers to a value that is not a schema"
    except SchemaError as error:
        where = "/".join(str(key) for key in error.path)
        return error.message + (f", at {where}" if where else "")
    except Unresolvable as error:
        return f"$ref {error.ref!r} refers to nothing in the schema, and nothing is fetched: begin it with '#'"
    except RecursionError:
        return "it is nested too deeply"
    return None


def find_value_flaw(schema: Mapping[str, Any], value: object) -> str | None:
    from jsonschema import Draft202012Validator
    from jsonschema.exceptions import best_match

    error = best_match(Draft202012Validator(schema).iter_errors(value))
    return None if error is None else f"{error.json_path}: {error.message}"


def _objects_in(value: object) -> Iterator[JsonObject]:
    """Yield the objects in a schema that are not values of `const` or `enum`."""
    if isinstance(value, dict):
        yield value
        value = [each for key, each in value.items() if key not in ("const", "enum")]
    if isinstance(value, list):
        for each in value:
            yield from _objects_in(each)


def as_object(schema: Mapping[str, Any]) -> tuple[JsonObject, bool]:
    """Return a schema for a model, and whether the answer is wrapped as `result`: a structured answer is an object.

    Definitions move to `$defs`, where every provider expects them. Raises ValueError for other references.
    """
    written: JsonObject = copy.deepcopy(dict(schema))
    for part in _objects_in(written):
        if isinstance(reference := part.get("$ref"), str):
            if not (found := re.fullmatch(r"#/(?:\$defs|definitions)/([^/]+)", reference)):
                raise ValueError(f"$ref {reference!r}: write '#/$defs/NAME'")
            part["$ref"] = f"#/$defs/{found[1]}"
    definitions = {**written.pop("definitions", {}), **written.pop("$defs", {})}
    is_wrapped = written.get("type") != "object"
    if is_wrapped:
        written = {"type": "object", "properties": {"result": written}, "required": ["result"]}
    return ({**written, "$defs": definitions} if definitions else written), is_wrapped
