"""Declarations that only a server offers: resources, prompts and completions; and how clients show them.

Each is a CommandSpec like that of a command, so that it runs on the same path, on the clock. Its name begins with its
kind and a blank, which no command's name has.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypedDict, get_args

from ..core.arguments import context_name, parameters_of, signature_of, to_jsonable
from ..core.catalogue import CommandSpec, HandlerReference, Isolation, Listing
from ..core.limits import Clocks
from ..core.uri_template import check_parameters, check_uri, is_template, parse_template

_ICON_KEYS = {"src", "mimeType", "sizes", "theme"}
_PROMPT_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_./-]{0,127}")


class ServedOptions(TypedDict, total=False):
    """Options of `@app.resource`, `@app.prompt` and `@app.completion`."""

    name: str | None
    title: str | None
    description: str | None
    icons: Iterable[Any] | None
    annotations: Any
    meta: Mapping[str, Any] | None
    mime_type: str | None
    timeout: object
    soft: object
    idle: object
    queue: object
    grace: object
    wind_down: object
    isolation: Isolation
    single_flight: str | None
    concurrency: int | None


_ONLY_RESOURCE = {"mime_type", "annotations"}
_SHOWN = {"name", "title", "description", "icons", "meta", *_ONLY_RESOURCE}


def check_served_options(kind: str, options: Mapping[str, object]) -> None:
    """Raise TypeError for an option that this kind of declaration does not have."""
    allowed = set(ServedOptions.__annotations__)
    if kind != "resource":
        allowed -= _ONLY_RESOURCE
    if kind == "completion":
        allowed -= _SHOWN
    if unknown := sorted(options.keys() - allowed):
        raise TypeError(f"@app.{kind} has no option {unknown[0]!r}; there are {', '.join(sorted(allowed))}")
    if options.get("isolation", "auto") not in get_args(Isolation):
        raise ValueError(f"there is no isolation {options['isolation']!r}")


def read_listing(options: Mapping[str, Any], uri: str = "") -> Listing:
    """Return how clients show a declaration. Raises ValueError."""
    annotations, meta = options.get("annotations"), options.get("meta")
    return Listing(
        title=options.get("title"),
        icons=tuple(_read_icon(icon) for icon in options.get("icons") or ()),
        annotations=None if annotations is None else _plain_mapping(annotations),
        meta=None if meta is None else _plain_mapping(meta),
        uri=uri,
        mime_type=options.get("mime_type"),
    )


def _plain_mapping(written: Any) -> dict[str, Any]:
    plain = to_jsonable(dict(written) if isinstance(written, Mapping) else written)
    if not isinstance(plain, dict):
        raise ValueError(f"{written!r} is not a mapping")
    return {name: item for name, item in plain.items() if item is not None}


def _read_icon(written: Any) -> dict[str, Any]:
    """Return an icon: its URL, a mapping, or the model of the SDK."""
    icon = {"src": written} if isinstance(written, str) else _plain_mapping(written)
    if not isinstance(icon.get("src"), str) or icon.keys() - _ICON_KEYS:
        raise ValueError(f"an icon has src, and perhaps mimeType, sizes and theme, not {written!r}")
    if not icon["src"].startswith(("https:", "http:", "data:")):
        raise ValueError(f"the src of an icon is an http: or data: URL, not {icon['src'][:80]!r}")
    return icon


def served_spec(
    kind: str,
    subject: str,
    function: Callable[..., Any],
    options: ServedOptions,
    clocks: Clocks,
    handler: Callable[[str, bool], HandlerReference],
    documentation: tuple[str, str, Mapping[str, str]],
) -> CommandSpec:
    """Return the declaration of a resource, a prompt or a completion. Raises TypeError and ValueError.

    `subject` is its URI, its name, or what it completes; `handler` makes the reference to its function.
    """
    context = context_name(function)
    parameters = [each for each in parameters_of(function) if each.name != context]
    uri = ""
    if kind == "resource":
        required = {each.name: each.default is ... for each in parameters}
        subject = uri = _check_resource(subject, required)
    elif kind == "prompt" and not _PROMPT_NAME.fullmatch(subject):
        raise ValueError(f"a prompt's name is up to 128 letters, digits and _ . / -, not {subject!r}")
    name, is_async = f"{kind} {subject}", inspect.iscoroutinefunction(function)
    schema = to_jsonable(signature_of(function).json_schema())
    summary, text, described = documentation
    for parameter, words in described.items():
        if parameter in schema["properties"]:
            schema["properties"][parameter].setdefault("description", words)
    listing = read_listing(options, uri)
    return CommandSpec(
        name=name,
        handler=handler(name, is_async),
        summary=summary,
        description=options.get("description") or text,
        input_schema=schema,
        isolation=options.get("isolation", "auto"),
        clocks=clocks,
        mutates=False,
        single_flight=options.get("single_flight"),
        concurrency=options.get("concurrency"),
        listing=listing,
        shown_name=options.get("name") or (function.__name__ if kind == "resource" else subject),
    )


def find_idle_completions(app: str, served: Iterable[CommandSpec]) -> list[str]:
    """Return a sentence for each completion of an argument that neither a prompt nor a template has."""
    specs = list(served)
    known = {
        f"completion {spec.name.partition(' ')[2]} {argument}"
        for spec in specs
        for argument in spec.input_schema["properties"]
        if spec.kind != "completion"
    }
    idle = (spec.name for spec in specs if spec.kind == "completion" and spec.name not in {*known, "completion *"})
    return [f"{app}: {name} completes nothing: no prompt and no template has this argument" for name in idle]


def _check_resource(uri: str, parameters: Mapping[str, bool]) -> str:
    if is_template(uri):
        template = parse_template(uri)
        check_parameters(template, parameters)
        return template.text
    check_uri(uri)
    if required := [name for name, is_required in parameters.items() if is_required]:
        raise ValueError(f"the parameter {required[0]!r} has no value: put {{{required[0]}}} into {uri!r}")
    return uri
