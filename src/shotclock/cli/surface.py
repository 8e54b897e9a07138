"""The command line of an App: words in, one envelope out, on the clock.

Built from the app's catalogue alone. The program forks a zygote of itself before anything else, so the commands run in
killable processes with everything imported, and this process only holds the clock and writes the answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import difflib
import inspect
import json
import os
import shlex
import sys
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any, Protocol

from .. import __version__
from ..core.catalogue import BUDGET_VARIABLE, CONFIRMATION, DEFAULT_BUDGET_MS, Catalogue, CommandSpec
from ..core.clocks import Clocks
from ..core.durations import DurationError, parse_duration_ms
from ..core.effects import Ending
from ..core.envelope import Envelope, Problem, stopped_by
from ..core.errors import Failure
from ..core.manifest import build_manifest, choices_of, flag_name, option_flags, resolved
from ..desk import Desk
from ..enforce.admission import Admission, Outcome, Tool, admit, answer
from ..enforce.call import Runtime
from ..enforce.clock import process_began_ns
from ..enforce.foreground import fill_standard_descriptors
from ..enforce.handlers import raised
from ..enforce.preloaded import Preloaded, Program
from . import signals
from .heartbeat import Heartbeat
from .output import emit, flush_quietly, is_terminal, say_line, summary_line, wants_json, write_quietly
from .parsing import Mistakes, parse, print_help
from .words import Group, Parameter, Parsed, Words

if TYPE_CHECKING:
    from ..jobs import Stdin

_FLAG = Parameter(negative="", show_default=False)


class Offered(Protocol):
    """What the command line needs of an App."""

    workers: int | None

    def catalogue(self) -> Catalogue: ...
    @property
    def program(self) -> Program: ...


@dataclass(frozen=True)
class Request:
    """A command line that was understood."""

    spec: CommandSpec
    arguments: dict[str, object]
    clocks: Clocks
    budget_ms: int | None = None
    validate_only: bool = False
    dry_run: bool = False
    resume_from: str | None = None
    idempotency_key: str | None = None
    heartbeat: Heartbeat | None = None
    justification: str = ""
    confirmed: bool = False
    words: tuple[str, ...] = ()
    """As it was written."""


def main(app: Offered, words: list[str]) -> int:
    catalogue = app.catalogue()
    if "--debug" in words:
        catalogue = replace(catalogue, debug=True)
    as_json = wants_json("--json" in words)
    fill_standard_descriptors()
    try:
        return _main(app, catalogue, words, as_json)
    except signals.Signalled as signalled:
        return _deliver_unstarted(catalogue, catalogue.name, stopped_by(signalled.name), as_json)
    except Exception as error:  # ours: whoever called still gets an envelope
        outcome = raised(error)
        outcome.ending = Ending.KILLED  # what had begun dies with us; how far it was nobody knows here
        return deliver(answer(_admit(catalogue, catalogue.name), outcome), as_json)


def _main(app: Offered, catalogue: Catalogue, words: list[str], as_json: bool) -> int:
    vocabulary = _vocabulary(catalogue)
    names = [spec.hyphenated for spec in catalogue.commands] + ["manifest", "help"]
    if any(spec.interruption for spec in catalogue.commands):
        names.insert(-2, "job")
    if not words:
        print_help(vocabulary, [])
        listed = f"there are {', '.join(names)}"
        return _refuse(catalogue, catalogue.name, [{"field": "command", "message": f"none given; {listed}"}], as_json)
    if words[0] == "help":
        words = [*words[1:2], "--help"]
    if (meant := catalogue.find(words[0])) is not None:
        words = [meant.hyphenated, *words[1:]]
    if not words[0].startswith("-") and words[0] not in names:
        close = difflib.get_close_matches(words[0], names, n=1)
        hint = f"did you mean {close[0]}?" if close else f"there are {', '.join(names)}"
        mistake = {"field": "command", "message": f"{words[0]!r} is no command; {hint}"}
        return _refuse(catalogue, catalogue.name, [mistake], as_json)
    if words[0] == "job" and "job" in names:
        from .job import main as job_main

        return job_main(words[1:], app=catalogue.name, command=own_words(), tool=_tool(catalogue))
    parsed, mistakes = parse(vocabulary, words, help_hint=f"{catalogue.name} {words[0]} --help")
    if parsed is None:
        return _refuse(catalogue, words[0], mistakes, as_json)
    if parsed.wants_help:
        print_help(vocabulary, [word for word in words[:1] if not word.startswith("-")])
        return 0
    if parsed.wants_version or words[0].startswith("-"):
        return _version(catalogue, mistakes, as_json)
    if words[0] == "manifest":
        return _refuse(catalogue, "manifest", mistakes, as_json) if mistakes else _manifest(catalogue, as_json)
    spec = catalogue.find(words[0])
    assert spec is not None
    request = replace(_request(spec, parsed, mistakes), words=tuple(words))
    return _perform(app, catalogue, request, mistakes, as_json)


# --- understanding ----------------------------------------------------------------------------------------


def _vocabulary(catalogue: Catalogue) -> Words:
    vocabulary = Words(
        name=catalogue.name,
        help=catalogue.summary,
        version=catalogue.version,
        usage=f"Usage: {catalogue.name} COMMAND [OPTIONS]",
        epilogue="Off a terminal every command prints one JSON envelope on stdout.",
    )
    for spec in catalogue.commands:
        vocabulary.add(_stand_in(spec), name=spec.hyphenated)
    vocabulary.add(_manifest_help, name="manifest")
    if any(spec.interruption for spec in catalogue.commands):
        vocabulary.add(_job_help, name="job")
    return vocabulary


def _manifest_help(*, json: Annotated[bool, _FLAG] = False, timeout: str = "30s") -> None:
    """Describe every command, flag and exit code, for programs."""


def _job_help() -> None:
    """List, look at, wait for and cancel work that goes on after its caller left: list|status|wait|cancel."""


def _stand_in(spec: CommandSpec) -> Callable[..., None]:
    """A function that only has the signature: whatever is said arrives as words, and is checked by the real types."""
    properties = spec.input_schema.get("properties", {})
    definitions = spec.input_schema.get("$defs", {})
    required = set(spec.input_schema.get("required", ()))
    parameters = []
    for name, written in properties.items():
        if name == "dry_run":
            continue
        schema = resolved(written, definitions)
        positional = name in spec.positionals and schema.get("type") != "boolean"
        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD if positional else inspect.Parameter.KEYWORD_ONLY
        negative = None if schema.get("type") == "boolean" else ""
        text = _help_on(schema, name in required)
        described = Parameter(name=f"--{flag_name(name)}", help=text, negative=negative, show_default=False)
        annotation = Annotated[_word_type(schema), described]  # type: ignore[valid-type]
        parameters.append(inspect.Parameter(name, kind, default=None, annotation=annotation))
    group = Group("Options of every command", sort_key=1)
    common = {
        "timeout": ("string", f"Stop the work after this time (500ms, 30s, 5m; 0: none). [{_default_timeout(spec)}]"),
        "json": ("boolean", "The envelope alone on stdout, also on a terminal."),
        "debug": ("boolean", "Put the traceback of what the command raised into the envelope."),
        **{name: (flag["type"], flag["description"]) for name, flag in option_flags(spec).items()},
    }
    for name, (type_name, text) in common.items():
        word_type = bool if type_name == "boolean" else str
        described = Parameter(name=f"--{name}", help=text, group=group, negative="", show_default=False)
        key = name.replace("-", "_")
        parameters.append(
            inspect.Parameter(
                key, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[word_type | None, described]
            )
        )
    parameters.sort(key=lambda parameter: parameter.kind)

    def stand_in(**_: object) -> None: ...

    stand_in.__doc__ = spec.description
    stand_in.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    stand_in.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return stand_in


def _default_timeout(spec: CommandSpec) -> str:
    from ..core.durations import format_duration

    return format_duration(spec.clocks.timeout_ms) if spec.clocks.timeout_ms else "none"


def _word_type(schema: dict[str, Any]) -> Any:
    match schema.get("type"):
        case "boolean":
            return bool | None
        case "array":
            return list[str] | None
        case _:
            return str | None


def _help_on(schema: dict[str, Any], required: bool) -> str:
    text = str(schema.get("description") or "")
    notes = []
    if (choices := choices_of(schema)) is not None:
        notes.append("one of " + ", ".join(choices))
    elif schema.get("type") in ("integer", "number"):
        notes.append(str(schema["type"]))
    elif schema.get("type") == "object":
        notes.append("JSON")
    if required:
        notes.append("required")
    elif schema.get("default") not in (None, [], {}, ""):
        notes.append(f"default {json.dumps(schema['default'])}")
    return " ".join([text, *(f"[{note}]" for note in notes)]).strip()


def _request(spec: CommandSpec, parsed: Parsed, mistakes: Mistakes) -> Request:
    said = {name: value for name, value in parsed.arguments.arguments.items() if value is not None}
    definitions = spec.input_schema.get("$defs", {})
    properties = spec.input_schema.get("properties", {})
    arguments = {
        name: from_words(value, resolved(properties[name], definitions), definitions)
        for name, value in said.items()
        if name in properties and name != "dry_run"
    }

    def duration(name: str) -> int | None:
        if name not in said:
            return None
        try:
            return parse_duration_ms(said[name])
        except DurationError as error:
            mistakes.append({"field": name.replace("_", "-"), "message": str(error)})
            return None

    timeout_ms, budget_ms, interval_ms = duration("timeout"), duration("budget"), duration("heartbeat_interval")
    heartbeat = None if interval_ms is None else Heartbeat(spec.name, interval_ms, as_json=False)
    if "heartbeat_ms" in said:
        if said["heartbeat_ms"].isdecimal() and int(said["heartbeat_ms"]) > 0:
            heartbeat = Heartbeat(spec.name, int(said["heartbeat_ms"]), as_json=True)
        else:
            mistakes.append({"field": "heartbeat-ms", "message": "must be a whole number of milliseconds above 0"})
    resume_from = said.get("resume_from")
    if resume_from is not None and resume_from not in spec.steps:
        mistakes.append({"field": "resume-from", "message": f"its steps are {', '.join(spec.steps)}"})
        resume_from = None
    return Request(
        spec,
        arguments,
        Clocks(timeout_ms=timeout_ms),
        _budget(spec, budget_ms, mistakes),
        bool(said.get("validate_only")),
        bool(said.get("dry_run")),
        resume_from,
        said.get("idempotency_key"),
        heartbeat,
        str(said.get("justification", "")) if spec.approval is not None else "",
        spec.needs_confirmation and bool(said.get(CONFIRMATION)),
    )


def _budget(spec: CommandSpec, asked_ms: int | None, mistakes: Mistakes) -> int | None:
    """How long we wait for a command that may outlive us: what was said, what the environment says, or 30 s where no
    person waits. Zero waits for as long as it takes."""
    if spec.interruption is None:
        return asked_ms
    if asked_ms is None and (written := os.environ.get(BUDGET_VARIABLE, "").strip()):
        if written.isdecimal():
            asked_ms = int(written)
        else:
            mistakes.append({"field": BUDGET_VARIABLE, "message": f"{written!r} is not a whole number of milliseconds"})
    if asked_ms is None and not is_terminal(sys.stdout):
        asked_ms = DEFAULT_BUDGET_MS
    return asked_ms or None


def from_words(value: object, schema: dict[str, Any], definitions: dict[str, Any]) -> object:
    """A word as the JSON value it stands for, where its type is not text. What does not fit stays as it is: the real
    types say what is wrong with it."""
    if isinstance(value, list):
        items = resolved(schema.get("items", {}), definitions)
        if len(value) == 1 and items.get("type") != "string" and value[0].startswith("["):
            return _from_json(value[0], "array", value)  # the whole list, written as JSON
        kinds = [resolved(item, definitions) for item in schema.get("prefixItems", ())]
        kinds += [items] * max(0, len(value) - len(kinds))
        return [from_words(item, kind, definitions) for item, kind in zip(value, kinds, strict=False)]
    if not isinstance(value, str):
        return value
    for choice in schema.get("enum", [schema["const"]] if "const" in schema else []):
        if str(choice) == value:
            return choice
    kind = schema.get("type", "array or object" if value[:1] in ("{", "[") else "string")
    return _from_json(value, kind, value) if kind in _JSON_TYPES else value


_JSON_TYPES: dict[str, tuple[type, ...]] = {
    "integer": (int, float),
    "number": (int, float),
    "boolean": (bool,),
    "object": (dict,),
    "array": (list,),
    "array or object": (list, dict),
}


def _from_json(text: str, kind: str, otherwise: object) -> object:
    try:
        read = json.loads(text)
    except (ValueError, RecursionError):
        return otherwise
    fits = isinstance(read, _JSON_TYPES[kind]) and (kind == "boolean" or not isinstance(read, bool))  # a bool is an int
    return read if fits else otherwise


# --- doing ------------------------------------------------------------------------------------------------


def _perform(app: Offered, catalogue: Catalogue, request: Request, mistakes: Mistakes, as_json: bool) -> int:
    spec = request.spec
    if mistakes:
        request = replace(request, validate_only=True)  # nothing runs; what else is wrong is told as well
    elif spec.requires_person is not None and not request.validate_only and not request.dry_run:
        refusal = _ask_person(spec, request.arguments)
        if refusal is not None:
            return _deliver_unstarted(catalogue, spec.name, refusal, as_json, request.clocks)
        request = replace(request, confirmed=True)
    with contextlib.ExitStack() as stack:
        stdin = None
        if spec.reads_stdin and not request.validate_only:
            from .spool import spooled_stdin

            limit_ms = spec.clocks.timeout_ms if request.clocks.timeout_ms is None else request.clocks.timeout_ms
            spooled = stack.enter_context(spooled_stdin(limit_ms or None))
            if isinstance(spooled, Problem):
                return _deliver_unstarted(catalogue, spec.name, spooled, as_json, request.clocks)
            stdin = spooled
        envelope = _converse_about(app, catalogue, request, stdin)
    if mistakes:
        found: Any = (envelope.error or {}).get("errors", []) if envelope.code == "ARG_ERROR" else []
        # A value that was not understood was left out: that it is missing is no news.
        known = {mistake["field"].lstrip("-").replace("-", "_") for mistake in mistakes}
        others = [problem for problem in found if problem["field"].partition(".")[0] not in known]
        return _refuse(catalogue, spec.name, mistakes + others, as_json, request.clocks)
    return deliver(envelope, as_json)


def _converse_about(app: Offered, catalogue: Catalogue, request: Request, stdin: Stdin | None) -> Envelope:
    for stream in (sys.stdout, sys.stderr):
        flush_quietly(stream)
    signals.only_note()  # in a fork hook an exception would be lost; whoever listens next finds what came
    preloaded = Preloaded.forked_here()
    runtime = Runtime(
        # No state outlives a command line: everything runs where it can be killed.
        operations=[replace(each.operation(), isolation="process") for each in catalogue.commands],
        workers=1,
        preloaded=preloaded,
        program=app.program if preloaded is None else None,
    )
    try:
        desk = Desk(catalogue, runtime, program=app.program, command=own_words())
    except Failure as failure:
        return answer(_admit(catalogue, request.spec.name, request.clocks), raised(failure))
    return asyncio.run(_converse(desk, request, stdin))


async def _converse(desk: Desk, request: Request, stdin: Stdin | None) -> Envelope:
    heartbeat = request.heartbeat
    beating: Coroutine[Any, Any, None] | None = heartbeat.beat() if heartbeat is not None else None
    beats = None if beating is None else asyncio.ensure_future(beating)
    try:
        with signals.told() as stop:
            async with desk:
                return await desk.call(
                    request.spec.name,
                    request.arguments,
                    request.clocks,
                    budget_ms=request.budget_ms,
                    idempotency_key=request.idempotency_key,
                    validate_only=request.validate_only,
                    dry_run=request.dry_run,
                    resume_from=request.resume_from,
                    on_progress=None if heartbeat is None else heartbeat.progress,
                    stop=stop,
                    stdin=stdin,
                    justification=request.justification,
                    confirmed=request.confirmed,
                    again=shlex.join([*own_words(), *request.words]),
                    began_ns=process_began_ns(),
                )
    finally:
        if beats is not None:
            beats.cancel()


def _ask_person(spec: CommandSpec, arguments: dict[str, object]) -> Problem | None:
    """Only a person at a terminal may answer, by typing back what is expected. No flag answers for them."""
    from .person import ask

    assert spec.requires_person is not None
    properties = spec.input_schema.get("properties", {})
    defaults = {name: schema["default"] for name, schema in properties.items() if "default" in schema}
    missing = [name for name in spec.input_schema.get("required", ()) if name not in arguments]
    if missing:  # nobody is asked about a call that cannot be made
        errors = [{"field": name, "message": "Field required"} for name in missing]
        return Problem("ARG_ERROR", "; ".join(f"{name}: required" for name in missing), "validation", errors=errors)
    expected = spec.requires_person.format_map({name: str(value) for name, value in {**defaults, **arguments}.items()})
    return ask(spec.name, expected)


def _manifest(catalogue: Catalogue, as_json: bool) -> int:
    admission = _admit(catalogue, "manifest", mutates=False)
    manifest = build_manifest(catalogue, __version__)
    return deliver(answer(admission, Outcome(Ending.FINISHED, data=manifest)), as_json)


def _version(catalogue: Catalogue, mistakes: Mistakes, as_json: bool) -> int:
    if mistakes:
        return _refuse(catalogue, catalogue.name, mistakes, as_json)
    admission = _admit(catalogue, catalogue.name, mutates=False)
    return deliver(answer(admission, Outcome(Ending.FINISHED, data={"version": catalogue.version})), as_json)


def own_words() -> list[str]:
    """How the program that runs here is called once more."""
    main = sys.modules["__main__"]
    spec = getattr(main, "__spec__", None)
    if spec is not None and spec.name:
        return [sys.executable, "-m", spec.name.removesuffix(".__main__")]
    file = os.path.abspath(getattr(main, "__file__", None) or sys.argv[0])
    return [file] if os.access(file, os.X_OK) else [sys.executable, file]


# --- answering --------------------------------------------------------------------------------------------


def _tool(catalogue: Catalogue) -> Tool:
    return Tool(catalogue.semantic_version, catalogue.debug)


def _admit(catalogue: Catalogue, name: str, clocks: Clocks | None = None, *, mutates: bool = True) -> Admission:
    """For an answer that no call of the command makes: with its clocks all the same, and since we began."""
    spec = catalogue.find(name)
    return admit(
        name,
        clocks or Clocks(),
        defaults=catalogue.clocks if spec is None else spec.clocks,
        mutates=mutates,
        tool=_tool(catalogue),
        began_ns=process_began_ns(),
    )


def _refuse(catalogue: Catalogue, name: str, mistakes: Mistakes, as_json: bool, clocks: Clocks | None = None) -> int:
    unique = [mistake for number, mistake in enumerate(mistakes) if mistake not in mistakes[:number]]
    message = "; ".join(f"{mistake['field']}: {mistake['message']}" for mistake in unique)
    problem = Problem("ARG_ERROR", message, "validation", errors=unique)
    return _deliver_unstarted(catalogue, name, problem, as_json, clocks)


def _deliver_unstarted(
    catalogue: Catalogue, name: str, problem: Problem, as_json: bool, clocks: Clocks | None = None
) -> int:
    return deliver(answer(_admit(catalogue, name, clocks), Outcome(Ending.NOT_STARTED, problem)), as_json)


def deliver(envelope: Envelope, as_json: bool) -> int:
    """The envelope for programs; for a person what came of it, and what there is to know about it on stderr."""
    signals.only_note()
    if as_json:
        return emit(envelope, signals.heard)
    if envelope.data:
        write_quietly(sys.stdout, _readable(envelope.data) + "\n", signals.heard)
    if envelope.error is not None or envelope.warnings:
        say_line(summary_line(envelope))
    return envelope.exit_code


def _readable(data: object) -> str:
    if isinstance(data, dict) and list(data) == ["result"]:
        data = data["result"]
    return data if isinstance(data, str) else json.dumps(data, indent=2, ensure_ascii=False)
