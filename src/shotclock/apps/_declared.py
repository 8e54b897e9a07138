"""Options of `@app.command`, resources and prompts: what an author writes, read into the values of a CommandSpec.

Declarations that only a server offers are CommandSpecs too, so that they run on the same path, on the clock. The name
of one begins with its kind and a blank, which no command's name has.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Mapping
from string import Formatter
from types import UnionType
from typing import Any, NamedTuple, TypedDict, Union, get_args, get_origin

from ..core.arguments import HandlerParameter, context_name, parameters_of, signature_of, to_jsonable
from ..core.catalogue import (
    ApprovedFile,
    CommandSpec,
    HandlerReference,
    Interruption,
    Isolation,
    Listing,
    SecretParameter,
)
from ..core.limits import CLOCK_NAMES, Clocks, DurationError, format_duration, parse_duration_ms
from ..core.overtime import OvertimeError, OvertimePolicy
from ..core.proposal import Policy
from ..core.signatures import known_hints
from ..core.uri_template import check_parameters, check_uri, is_template, parse_template
from ..core.value_types import JsonObject
from ._manifest import CONFIRM_FLAG, flag_name

RESERVED = {CONFIRM_FLAG, "help"}
"""Names that a parameter cannot have. The first is an argument over MCP as well; the second describes the command."""


_APP_NAME = re.compile(r"[a-z][a-z0-9]*(-[a-z0-9]+)*")


class Declared(TypedDict, total=False):
    """Options of `@app.command`."""

    name: str | None
    timeout: object
    timeout_ms: int | None
    soft: object
    idle: object
    queue: object
    grace: object
    wind_down: object
    overtime: object
    min_time: object
    isolation: Isolation
    mutates: bool
    idempotent: bool
    destructive: bool | None
    confirm: bool
    steps: Iterable[str]
    interruption: Interruption | Mapping[str, Any] | bool | None
    exit_codes: Iterable[str]
    requires_person: str | None
    approval: Policy | Mapping[str, Any] | bool | None
    single_flight: str | None
    concurrency: int | None
    stdin: bool
    mcp: bool
    title: str | None
    description: str | None
    icons: Iterable[Any] | None
    open_world: bool | None
    meta: Mapping[str, Any] | None


DEFAULT_OPTIONS: Declared = {
    **{"isolation": "auto", "mutates": True, "idempotent": False, "destructive": None, "confirm": True},
    **{"steps": (), "exit_codes": (), "stdin": False, "mcp": True},
}


def check_app_name(name: str) -> None:
    if not _APP_NAME.fullmatch(name):
        near = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-").lstrip("-0123456789") or "my-tool"
        raise ValueError(f"an app's name is lower case words joined by hyphens, such as {near!r}, not {name!r}")


def check_options(name: str, options: Declared, parameters: list[HandlerParameter]) -> None:
    flags: dict[str, str] = {}
    for parameter in parameters:
        flag = flag_name(parameter.name)
        if flag in RESERVED:
            raise ValueError(f"{name!r}: --{flag} has a meaning for every command; call the parameter something else")
        if flags.setdefault(flag, parameter.name) != parameter.name:
            raise ValueError(f"{name!r}: {flags[flag]!r} and {parameter.name!r} would both be --{flag}")
        if parameter.name == "dry_run" and not options["destructive"]:
            raise ValueError(f"{name!r}: only a destructive command has a dry run")
    if options["destructive"] and not options["mutates"]:
        raise ValueError(f"{name!r} cannot be destructive and not mutate anything")
    if not options["confirm"] and not options["destructive"]:
        raise ValueError(f"{name!r}: confirm=False belongs to destructive=True: no other command is confirmed")
    if (concurrency := options.get("concurrency")) is not None and concurrency < 1:
        raise ValueError(f"{name!r}: concurrency must be at least 1")
    if len(set(options["steps"])) < len(tuple(options["steps"])):
        raise ValueError(f"{name!r}: every step needs a name of its own")
    for template in (options.get("single_flight"), options.get("requires_person")):
        check_placeholders(name, template or "", {parameter.name for parameter in parameters})


def check_placeholders(name: str, template: str, parameters: set[str]) -> None:
    try:
        fields = [(field, spec, conversion) for _, field, spec, conversion in Formatter().parse(template)]
    except ValueError as error:
        raise ValueError(f"{name!r}: {template!r}: {error}") from None
    for field, spec, conversion in fields:
        if field is not None and field not in parameters:
            raise ValueError(f"{name!r}: {{{field}}} in {template!r} is not one of its parameters")
        if spec or conversion:
            raise ValueError(f"{name!r}: {{{field}}} in {template!r} takes no format and no conversion")


def read_clocks(name: str, options: Declared, interruption: Interruption | None, defaults: Clocks) -> Clocks:
    limits = {name: limit for name, limit in options.items() if name in CLOCK_NAMES}
    if (timeout_ms := options.get("timeout_ms")) is not None:
        limits["timeout"] = f"{read_limit_ms('timeout', limits.get('timeout'), timeout_ms)}ms"
    clocks = Clocks.of(**limits)
    if interruption is not None:  # the work of a job is bounded by its lifetime, not by the App's timeout
        job = Clocks(timeout_ms=interruption.max_lifetime_ms, idle_ms=interruption.idle_timeout_ms)
        clocks = clocks.over(job)
    clocks = clocks.over(defaults)
    if clocks.soft_ms and clocks.timeout_ms and clocks.soft_ms >= clocks.timeout_ms:
        limit = format_duration(clocks.timeout_ms)
        raise ValueError(f"{name!r}: soft must be shorter than the timeout of {limit}, or it has no effect")
    return clocks


class Documentation(NamedTuple):
    summary: str
    text: str
    parameters: dict[str, str]


def read_documentation(function: Callable[..., Any]) -> Documentation:
    written = (function.__doc__ or "").strip()
    if "\n" not in written and ":" not in written:
        return Documentation(written, written, {})
    import docstring_parser

    parsed = docstring_parser.parse(inspect.cleandoc(written))
    texts = [text for text in (parsed.short_description, parsed.long_description) if text]
    parameters = {param.arg_name: " ".join((param.description or "").split()) for param in parsed.params}
    return Documentation(texts[0] if texts else "", "\n\n".join(texts), {k: v for k, v in parameters.items() if v})


def read_overtime(name: str, written: object, clocks: Clocks) -> JsonObject | bool | str | None:
    if written is None or written is False:
        return None
    plain: Any = dict(written) if isinstance(written, Mapping) else written
    try:
        OvertimePolicy.of(plain, clocks.timeout_ms or 0)
    except OvertimeError as error:
        raise ValueError(f"{name!r}: overtime: {error}") from None
    return plain  # type: ignore[no-any-return]


def read_min_time(name: str, written: object, clocks: Clocks) -> int:
    if written is None:
        return 0
    min_time_ms = parse_duration_ms(written)
    if clocks.timeout_ms and min_time_ms > clocks.timeout_ms:
        raise ValueError(f"{name!r}: min_time is longer than the timeout: it could never start")
    return min_time_ms


def read_interruption(declared: Interruption | Mapping[str, Any] | bool | None) -> Interruption | None:
    if declared is None or isinstance(declared, Interruption):
        return declared
    if isinstance(declared, bool):
        return Interruption() if declared else None
    return Interruption(**_in_ms(declared, "idle_timeout", "max_lifetime"))


def _in_ms(declared: Mapping[str, Any], *durations: str) -> JsonObject:
    """Return a declaration with durations in milliseconds: `ttl` becomes `ttl_ms`."""
    fields = dict(declared)
    for name in durations:
        if name in fields:
            fields[f"{name}_ms"] = parse_duration_ms(fields.pop(name))
    return fields


def read_approval(name: str, declared: Policy | Mapping[str, Any] | bool | None) -> Policy | None:
    if declared is None or isinstance(declared, Policy):
        return declared
    if isinstance(declared, bool):
        return Policy() if declared else None
    fields = _in_ms(declared, "ttl", "remind")
    fields["deciders"] = tuple(fields.get("deciders", ()))
    fields.pop("file", None)
    try:
        policy = Policy(**fields)
    except TypeError as error:
        raise ValueError(f"{name!r}: approval: {error}") from None
    if policy.when_expired not in ("expire", "reject", "default"):
        raise ValueError(f"{name!r}: approval: when_expired is 'expire', 'reject' or 'default'")
    return policy


def read_limit_ms(name: str, written: object, ms: int | None, default: str = "0") -> int:
    if written is not None and ms is not None:
        raise ValueError(f"{name} and {name}_ms are one limit: leave one out")
    try:
        if ms is not None:
            return parse_duration_ms(ms, bare="ms")
        return parse_duration_ms(default if written is None else written)
    except DurationError as error:
        raise DurationError(f"{name}: {error}") from None


def find_secrets(function: Callable[..., Any], app: str) -> tuple[SecretParameter, ...]:
    """Return the parameters of type `Secret[str]`, or `Secret[str] | None`."""
    hints = known_hints(function, include_extras=True)
    found = []
    for parameter in parameters_of(function):
        hint = hints.get(parameter.name)
        kinds = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
        if any(_is_secret(get_origin(kind) or kind) for kind in kinds):
            variable = re.sub(r"\W", "_", f"{app}_{parameter.name.strip('_')}").upper()
            found.append(SecretParameter(parameter.name, variable, parameter.default is ...))
    return tuple(found)


def _is_secret(kind: Any) -> bool:
    """Return whether a type is `Secret`, which is pydantic's; programs that do not use it do not import that."""
    return getattr(kind, "__qualname__", "") == "Secret" and kind.__module__ == "pydantic.types"


def read_approved_file(name: str, declared: object, parameters: list[HandlerParameter]) -> ApprovedFile | None:
    """Read an approved file. Raises ValueError unless the operator sees every argument."""
    written = declared.get("file") if isinstance(declared, Mapping) else None
    if written is None:
        return None
    try:
        file = ApprovedFile(**{**written, "path": str(written["path"])})
    except (TypeError, KeyError) as error:
        raise ValueError(f"{name!r}: approval: file has path, proposed and perhaps decision: {error}") from None
    if not file.path.startswith("/"):
        raise ValueError(f"{name!r}: approval: {file.path!r} must be an absolute path")
    by_name = {parameter.name: parameter for parameter in parameters}
    if file.proposed not in by_name or (file.decision is not None and file.decision not in by_name):
        raise ValueError(f"{name!r}: approval: file: proposed and decision name parameters of the command")
    if file.decision is not None and by_name[file.decision].default is ...:
        raise ValueError(f"{name!r}: approval: {file.decision!r} needs a default: callers do not pass it")
    if unseen := by_name.keys() - {file.proposed, file.decision, "justification"}:
        message = f"the operator sees the file, and would not see {', '.join(sorted(unseen))}"
        raise ValueError(f"{name!r}: approval: {message}")
    return file


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


def _plain_mapping(written: Any) -> JsonObject:
    plain = to_jsonable(dict(written) if isinstance(written, Mapping) else written)
    if not isinstance(plain, dict):
        raise ValueError(f"{written!r} is not a mapping")
    return {name: item for name, item in plain.items() if item is not None}


def _read_icon(written: Any) -> JsonObject:
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
