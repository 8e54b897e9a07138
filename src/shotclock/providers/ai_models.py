"""Which model an `ai` step asks, where, and with which key.

What a file names as the server of a model is not sent the key of a provider: that goes to the provider's own hosts, to
this machine, and where the environment of the user says.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from ipaddress import ip_address
from typing import Annotated, Any, Literal, NamedTuple
from urllib.parse import urlsplit

from ..core.errors import Failure
from ..core.redaction import looks_secret
from ..core.validation import Before, Part


class ModelProvider(NamedTuple):
    """A provider of models, and where what it needs is found in the environment."""

    keys: tuple[str, ...]
    """The variables that may hold the key, the first that is set counts."""
    url_variable: str
    package: str
    """The SDK that speaks with it."""
    default_model: str
    names: str
    """What names of its models begin with."""
    host: str
    """Its own, with all below it."""


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
MODEL_VARIABLE = "SHOTCLOCK_AI_MODEL"
NAME_KEY = (
    "put the key of that server into a variable of its own and name it in `api_key_env`, "
    "or set the server in the environment"
)

# How long a step may take where the file does not say: by the family of its model, the first that fits. Small models
# answer at once, large ones think for long; none has more than half an hour.
OTHER_TIMEOUT_MS = 10 * 60_000
TIMEOUTS_MS = (
    (re.compile(r"haiku|\bmini\b|\bnano\b|flash|\blite\b"), 5 * 60_000),
    (re.compile(r"opus|mythos|-pro\b|deep-research|^o\d"), 30 * 60_000),
    (re.compile(r"claude|gpt|gemini"), 15 * 60_000),
)


def default_timeout_ms(model: str | None) -> int:
    """Return how long a step with this model may take where nobody says."""
    for family, timeout_ms in TIMEOUTS_MS:
        if model is not None and family.search(model):
            return timeout_ms
    return OTHER_TIMEOUT_MS


class ChosenModel(NamedTuple):
    """A model as the agent process is told of it."""

    provider: str
    model: str
    base_url: str | None
    key: str


ProviderName = Literal["anthropic", "openai", "google"]


def _secret_name(written: Any) -> Any:
    if isinstance(written, str) and not looks_secret(written):
        raise ValueError("should be a name like MY_API_KEY, by which the value is known for a secret")
    return written


class AiModel(Part):
    """`fallback`: a model to ask where the one before it does not answer."""

    provider: ProviderName | None = None
    model: str | None = None
    base_url: str | None = None
    api_key_env: Annotated[str, Before(_secret_name)] | None = None
    """The variable that holds the key of this server."""


def choose_model(written: AiModel, environment: Mapping[str, str], own: Mapping[str, str] | None = None) -> ChosenModel:
    """Return the model that is meant, with its key. Raise Failure where its key is not set, or none is named and no key
    is there to choose by. `environment` is the user's, `own` what the file adds to it for the step.

    The provider is what the file says; or OpenAI's protocol, where it names a `base_url`; or the one whose models are
    called like that; or the first whose key is set. The model is what the file says, or SHOTCLOCK_AI_MODEL, or the
    provider's default."""
    variables = {**environment, **(own or {})}
    wanted = written.model or variables.get(MODEL_VARIABLE) or None
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
    known = PROVIDERS[provider]
    url = written.base_url or variables.get(known.url_variable) or None
    if url is not None and not _ADDRESS.match(url):
        raise Failure("STEP_INVALID", f"{url!r} is no address of a server: it begins with http:// or https://")
    # What the user's environment names is the user's own word, whatever else the file says.
    is_trusted = url is None or url == environment.get(known.url_variable) or _is_own(url, known)
    if written.api_key_env is not None:
        key = _read_named_key(written.api_key_env, variables, None if is_trusted else url)
    else:
        key = _find_key(known, variables) if is_trusted else ""
        if not key and not (provider == "openai" and url):  # a server of one's own may need none
            raise _no_key(provider, None if is_trusted else url)
    if written.model is None and wanted is not None and not re.match(known.names, wanted) and url is None:
        wanted = None  # what the environment names is another provider's
    return ChosenModel(provider, wanted or known.default_model, url, key)


def _find_key(provider: ModelProvider, variables: Mapping[str, str]) -> str:
    return next((variables[name] for name in provider.keys if variables.get(name)), "")


_ADDRESS = re.compile(r"https?://[^/?#\s]", re.IGNORECASE)
_NOT_PLAIN = re.compile(r"[\\@\s\x00-\x20]")


def _is_own(url: str, provider: ModelProvider) -> bool:
    """Return whether an address is one of the provider's hosts, reached so that nobody reads along, or of this
    machine."""
    if _NOT_PLAIN.search(url):  # readers of addresses differ about where the host is then
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


def _read_named_key(name: str, variables: Mapping[str, str], foreign: str | None) -> str:
    """Return the key that a file names by its variable. Raises Failure where it is not set, or that of a provider for a
    server that is not the provider's (`foreign`)."""
    if foreign is not None and name in KEY_NAMES:
        message = f"{name} is not sent to {host_of(foreign)}: it is the key of a provider of models"
        raise Failure("PRECONDITION", message, suggestion=NAME_KEY)
    if not variables.get(name):
        raise Failure("PRECONDITION", f"the variable {name} is not set, which `api_key_env` names")
    return variables[name]


def _no_key(provider: str, foreign: str | None) -> Failure:
    name = PROVIDERS[provider].keys[0]
    if foreign is None:
        return Failure("PRECONDITION", f"the variable {name} is not set: it holds the key of {provider}'s models")
    message = f"{host_of(foreign)} is no host of {provider}'s, so it is not sent {name}, and no other key is named"
    return Failure("PRECONDITION", message, suggestion=NAME_KEY)


def host_of(url: str) -> str:
    try:
        return urlsplit(url).hostname or url
    except ValueError:
        return url


def withheld_key(chosen: ChosenModel, variables: Mapping[str, str]) -> str | None:
    """Return the variable whose key is not sent to the server of a model, where it has none of its own; None where
    there is nothing to send."""
    known = PROVIDERS[chosen.provider]
    return next((name for name in known.keys if variables.get(name)), None) if not chosen.key else None
